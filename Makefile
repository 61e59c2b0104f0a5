# Every target sets up what it needs in .venv: a fresh clone needs Python 3.11+ and this file.
PYTHON ?= python3
VENV   := .venv
RUN    := OMP_NUM_THREADS=1 $(VENV)/bin/python

.PHONY: demo test lint types unit docs campaign-store clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt torch
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.ready   ## the main job on a tiny model and made data, on the CPU, in minutes
	$(RUN) -m assay demo

test: lint types unit   ## what CI runs

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .

types: $(VENV)/.ready
	$(VENV)/bin/mypy

unit: $(VENV)/.ready
	$(RUN) -m pytest -n 2 --dist loadfile

docs:   ## regenerate docs/files.md
	$(PYTHON) docs/generate.py

campaign-store: $(VENV)/.ready   ## the full crash campaign on the store; writes results/
	$(RUN) -m tests.store.campaign --full

clean:
	rm -rf $(VENV) demo-run

"""Entry of a proving process: what it leaves out, that no folder is refuted for it, and how early `assay prove` starts it."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from assay.guard import proving_entry
from assay.guard.proof import ProofRequest
from assay.guard.proof_subject import ProofSampling
from assay.guard.proving_process import ProvingProcess
from assay.testing.tiny_models import save_adapter, save_hf_folder, save_model, tiny_model

FAMILIES = ("gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "granite", "yarn",
            "qwen3_moe", "qwen2_moe", "gpt_oss")
INSTALLED = ("sklearn", "torchvision", "torchaudio", "librosa", "soundfile")
QUICK = ProofSampling(samples=0)


def python(code: str, *arguments: str) -> str:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, env=buffered)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def with_broken_libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProvingProcess]:
    """Proving process where much is installed that ends whoever imports it."""
    libraries = tmp_path_factory.mktemp("libraries")
    for name in INSTALLED:
        (libraries / name).mkdir()
        (libraries / name / "__init__.py").write_text(f"raise OSError('{name} was imported')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(libraries), os.environ.get("PYTHONPATH")))))
        process = ProvingProcess(1, "cpu")
    yield process
    process.stop()


def consumer(process: ProvingProcess, folder: Path) -> tuple[str, str]:
    said = process.answer(asdict(ProofRequest(str(folder), probing=QUICK, checks=("consumer",))) | {"threads": 1}, 120)
    assert said is not None, process.last_words()
    return next((verdict["outcome"], verdict["reason"]) for verdict in said["verdicts"] if verdict["check"] == "consumer")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_needs_what_is_left_out(family: str, tmp_path: Path, with_broken_libraries: ProvingProcess):
    """transformers imports torchvision for every family where it is installed."""
    outcome, reason = consumer(with_broken_libraries, save_hf_folder(tmp_path / family, tiny_model(family)))
    assert outcome == "PROVEN", reason


def test_no_adapter_needs_what_is_left_out(tmp_path: Path, with_broken_libraries: ProvingProcess):
    base = save_model(tmp_path / "base", tiny_model()).folder
    outcome, reason = consumer(with_broken_libraries, save_adapter(tmp_path / "adapter", base).folder)
    assert (outcome, "through peft" in reason) == ("PROVEN", True), reason


def test_nothing_is_collected_while_libraries_are_imported_and_everything_afterwards():
    """What proofs leave behind may hold a GPU's memory."""
    stub = ("import gc, importlib.metadata, sys, types\nproof = types.ModuleType('assay.guard.proof')\n"
            "proof.main = lambda: print(gc.isenabled(), type(importlib.metadata.packages_distributions()).__name__)\n"
            "sys.modules[proof.__name__] = proof\nfrom assay.guard import proving_entry\nproving_entry.main()\n")
    assert python(stub) == "False DistributionsAsAsked\n"
    answering = ("import gc, os\nfrom assay.guard import proof, proving_entry\n"
                 "def stop(*_):\n    os.write(2, f'{gc.isenabled()} {gc.get_freeze_count() > 100_000}'.encode())\n    os._exit(0)\n"
                 "proof._answer = stop\nproving_entry.main()\n")
    with subprocess.Popen([sys.executable, "-c", answering], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"{}\n")
        process.stdin.flush()  # and no end of the requests, with which the process ends
        assert process.stderr.read().endswith(b"True True")


def test_the_distribution_of_a_package_is_found_without_reading_about_all_others(monkeypatch: pytest.MonkeyPatch):
    known = importlib.metadata.packages_distributions()
    asked = proving_entry.DistributionsAsAsked()
    named = {"PIL", "yaml", "torch", "accelerate"} & known.keys()
    assert {name: asked[name] for name in named} == {name: known[name] for name in named}
    assert (list(asked), len(asked)) == (list(known), len(known))
    assert asked.get("no such package") is None
    monkeypatch.setattr(proving_entry, "_read_all", lambda: pytest.fail("all were read"))
    assert proving_entry.DistributionsAsAsked()["torch"] == ["torch"]


def test_the_verb_starts_its_processes_before_it_imports_torch(tmp_path: Path):
    """Importing it takes more than a second, and they would begin to do so themselves that much later."""
    (tmp_path / "model.safetensors").write_bytes(b"some")
    code = ("import sys\nfrom assay.guard import proving_process\nfrom assay.guard.proving_process import ProvingProcess\nstarted = []\n"
            "def start(process):\n    process.process = None\n    started.append(process.libraries)\n"
            "    print('torch' in sys.modules)\n    if len(started) == 2:\n        sys.exit(started != [True, False])\n"
            "ProvingProcess.start = start\nproving_process.usable_cores = lambda: 16\n"
            "from assay.cli import main\nmain(['prove', sys.argv[1]])\n")
    assert python(code, str(tmp_path)) == "False\nFalse\n"


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_verdicts_are_printed_before_the_processes_are_ended(more: tuple[str, ...], tmp_path: Path):
    """One with a GPU's context takes a while to end."""
    code = ("import os, sys\nfrom assay.guard.proving_process import PROVING_PROCESSES\nfrom assay.verbs import prove\n"
            "from assay.verdict import proven\nclass Kept:\n    stop = int\n    def kill(self): os.write(1, b'an end')\n"
            "def prove_artifact(_):\n    with PROVING_PROCESSES.keeping():\n        PROVING_PROCESSES._idle.append(Kept())\n"
            "        return [proven('whole', 'what was found')]\n"
            "prove.prove_artifact = prove_artifact\nfrom assay.cli import main\nmain(['prove', *sys.argv[1:]])\n")
    printed = python(code, str(tmp_path), *more)
    assert 0 < printed.index("what was found") < printed.index("an end")

"""Reinforcement on a tiny model, end to end: exact answers become more, noise teaches nothing, forked adapters hold, proven and probed."""

from pathlib import Path
from typing import Any

import pytest

from assay.errors import AssayError
from assay.evaluation.loaded_model import LoadedModel
from assay.generate.generation_request import Sampling
from assay.guard.proof import Prover, prove_checkpoint
from assay.health.degenerate import Expected
from assay.health.generation_probe import Health, ModelGenerator, probe
from assay.health.probe_prompts import ProbePrompt
from assay.model.patch import Patch
from assay.recipes import grpo as recipe
from assay.recipes import rewards
from assay.recipes.starting_model import AdapterModel
from assay.store import saving
from assay.store.artifact import open_artifact
from assay.store.checkpoint import open_checkpoint, step_folders
from assay.verdict import Outcome, overall, without_optional
from tests.recipes.sums import options, reinforced, taught, unproven

pytestmark = pytest.mark.slow  # a minute for the two toys, and a fresh process for every artifact of the forks

NOISE = '''
import zlib

def noise(prompt, completion, row):
    return zlib.crc32(repr((prompt, completion)).encode()) % 2
'''
LONG: dict[str, Any] = {"prompts": 16, "num_generations": 8, "max_steps": 36, "save_steps": 12, "eval_prompts": 30,
                        "num_generations_eval": 16}  # enough of both that the gain is shown on every CPU


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("whole"))


@pytest.mark.arithmetic
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exact_answers_on_held_out_sums_become_more(seed: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    unproven(monkeypatch)
    gain = reinforced(options(whole, tmp_path / "run", seed=seed, **LONG))[-1]
    assert gain.outcome is Outcome.PROVEN, gain.reason
    assert gain.evidence["p"] < 0.01
    assert gain.evidence["change"] > 0.15


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_reward_that_does_not_look_at_the_answer_shows_nothing(seed: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is refused before the first rollout; with that asleep, the verdict on what is wanted still claims nothing."""
    unproven(monkeypatch)
    monkeypatch.setattr(rewards, "preflight_rewards", lambda *_, **__: [])
    (tmp_path / "odd.py").write_text(NOISE)
    config = options(whole, tmp_path / "run", seed=seed, reward=(f"{tmp_path / 'odd.py'}:noise:1",), metric="answer", **LONG)
    gain = reinforced(config)[-1]
    assert gain.outcome is not Outcome.PROVEN, gain.reason

# ---------------------------------------------------------------- forks, with proofs in fresh processes


@pytest.fixture(scope="module")
def adapter(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step k of an adapter's run, proven."""
    found = taught(tmp_path_factory.mktemp("adapter"), whole.parent.parent / "model", lora_r=4, steps=10)
    verdicts = prove_checkpoint(found)
    assert overall(without_optional(verdicts)) is Outcome.PROVEN, "\n".join(map(str, verdicts))
    return found


def forking(adapter: Path, out: Path) -> Any:
    return options(adapter, out, max_steps=2, save_steps=2, learning_rate=2e-3, prompts=8)


def probed(path: Path) -> Health:
    """The sums that it was taught, as text: it never saw a chat."""
    speaker = ModelGenerator(LoadedModel(open_artifact(path)), Sampling(max_new=12, temperature=0.7))
    speaker.raw = True
    sums = [ProbePrompt(f"{a}+{b}", "sums", f"{a}+{b}=", Expected(numbers=True, short=True)) for a in range(10) for b in range(10)]
    return probe(speaker, sums, n=1)


def test_a_forked_adapter_holds_and_every_artifact_is_proven_and_probed(adapter: Path, tmp_path: Path):
    config = forking(adapter, tmp_path / "run")
    verdicts = reinforced(config)
    assert overall(without_optional(verdicts)) is not Outcome.REFUTED, "\n".join(map(str, verdicts))
    saved = step_folders(tmp_path / "run" / "checkpoints")
    artifacts = [*saved, tmp_path / "run" / "adapter", tmp_path / "run" / "model"]
    assert len(saved) == 3
    assert all(open_checkpoint(path).hallmark is not None for path in artifacts)
    for path in artifacts:
        assert probed(path).verdict().outcome is Outcome.PROVEN, f"{path.name}: {probed(path).sentence}"


def parents_patch(adapter: Path) -> Patch:
    patch = open_artifact(adapter).patch
    assert patch is not None
    return patch


@pytest.mark.parametrize(("fault", "words"), [
    ("wrong active adapter", "refuted by its proof and is quarantined"),
    ("half-written", "refuted by its proof|adapter_model"),
    ("empty", "adapter")])
def test_an_adapter_that_is_saved_wrongly_is_stopped_before_anyone_reads_it(fault: str, words: str, adapter: Path, tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch):
    start, before, whole_adapter = Prover.start, parents_patch(adapter), saving.write_adapter

    def torn(self: Prover, folder: Path, **options: Any) -> None:
        if folder.name != "step-000000":
            file = folder / "adapter_model.safetensors"
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        start(self, folder, **options)

    if fault == "wrong active adapter":
        monkeypatch.setattr(AdapterModel, "patch", lambda self: before)
    elif fault == "half-written":
        monkeypatch.setattr(Prover, "start", torn)
    else:
        monkeypatch.setattr(saving, "write_adapter", lambda *given, **options: (whole_adapter(*given, **options)[0], {}))
    with pytest.raises(AssayError, match=words):
        recipe.grpo(forking(adapter, tmp_path / "run"), lambda _: None)
    assert not (tmp_path / "run" / "model").exists()
    assert not (tmp_path / "run" / "adapter").exists()

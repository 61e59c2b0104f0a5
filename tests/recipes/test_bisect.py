"""A run is walked to its first bad checkpoint, and what changed there is named: by trace, by diff, on the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from assay.editing.block_hooks import block
from assay.errors import UsageError
from assay.recipes.bisect import first_bad_checkpoint, is_malformed, probe_named, shelf
from assay.store import checkpoint, gguf
from assay.store.artifact import open_artifact
from assay.testing.tiny_models import nudge, save_model, tiny_model
from assay.verbs import bisect as verb
from assay.verbs import diff as diff_verb
from assay.verbs import trace as trace_verb
from assay.verdict import proven

STEPS = tuple(range(10, 70, 10))
FIRST_BAD = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run in which from step 40 on one matrix of layer 1 is another; the held-out loss tells."""
    folder = tmp_path_factory.mktemp("run")
    with (folder / "eval.jsonl").open("w") as looks:
        for step in STEPS:
            written(folder, step, spoiled=step >= FIRST_BAD)
            base = 5.0 if step >= FIRST_BAD else 3.0 - step / 100
            looks.write(json.dumps({"step": step, "train": 3.0, "per_document": [base + d / 10 for d in range(8)]}) + "\n")
    return folder


def written(folder: Path, step: int, *, spoiled: bool, hallmarked: bool = True) -> None:
    model = tiny_model()
    if spoiled:
        with torch.no_grad():
            block(model, 1).mlp.down.weight.mul_(1.5)
    found = save_model(checkpoint.step_folder(folder / "checkpoints", step), model)
    if hallmarked:
        checkpoint.write_hallmark(found, [proven("whole", "it is")])


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("probe", ["loss-above:4", "loss-jump", "own"])
def test_the_first_bad_one_is_found(run: Path, probe: str, tmp_path: Path):
    if probe == "own":
        (tmp_path / "mine.py").write_text(f"def bad(folder):\n    return int(folder.name[5:]) >= {FIRST_BAD}\n")
        probe = f"{tmp_path / 'mine.py'}:bad"
    found = first_bad_checkpoint(run, probe_named(probe, run), say=silent)
    assert (found.last_good.name, found.first_bad.name) == ("step-000030", "step-000040")


def test_a_run_that_is_scored_by_a_reward_has_no_loss_to_probe(run: Path, tmp_path: Path):
    """GRPO keeps minus the score: taken for a loss, nothing is ever above a limit."""
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    scored = [{"step": step, "train": 0.0, "metric": "answer", "per_document": [-(0.2 if step >= FIRST_BAD else 0.7)] * 8}
              for step in STEPS]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    for probe in ("loss-above:-0.5", "loss-jump"):
        with pytest.raises(UsageError, match=r"'answer', a score, better higher, and no loss; give --probe score-below:X"):
            probe_named(probe, tmp_path)
    found = first_bad_checkpoint(tmp_path, probe_named("score-below:0.5", tmp_path), say=silent)
    assert (found.last_good.name, found.first_bad.name) == ("step-000030", "step-000040")
    with pytest.raises(UsageError, match="give --probe loss-above:X"):
        probe_named("score-below:0.5", run)


def test_two_runs_part_where_their_digests_do(run: Path, tmp_path: Path):
    for step in STEPS:
        written(tmp_path, step, spoiled=False)
    found = first_bad_checkpoint(run, probe_named(f"differs:{tmp_path}", run), say=silent)
    assert found.first_bad.name == "step-000040"
    assert first_bad_checkpoint(tmp_path, probe_named(f"differs:{tmp_path}", tmp_path), say=silent).first_bad is None


def test_only_proven_checkpoints_are_asked(run: Path, tmp_path: Path):
    for step in (10, 20, 30):
        written(tmp_path, step, spoiled=False, hallmarked=step != 20)
    good, passed_over = shelf(tmp_path)
    assert [path.name for path in good] == ["step-000010", "step-000030"]
    assert passed_over == ["step-000020 has no hallmark"]


@pytest.mark.parametrize(("probe", "words"), [
    ("loss-above:x", "expected a number"), ("nonsense", "expected FILE.py:function"), ("gone.py:f", "no such Python file")])
def test_what_cannot_be_asked_is_refused(run: Path, probe: str, words: str):
    with pytest.raises(UsageError, match=words):
        probe_named(probe, run)


def test_a_probe_says_yes_or_no(run: Path, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def vague(folder):\n    return None\n")
    with pytest.raises(UsageError, match="returned None"):
        first_bad_checkpoint(run, probe_named(f"{tmp_path / 'mine.py'}:vague", run), say=silent)
    with pytest.raises(UsageError, match="there is no such function"):
        probe_named(f"{tmp_path / 'mine.py'}:other", run)


def test_an_untrained_model_is_malformed(tmp_path: Path):
    assert is_malformed(save_model(tmp_path / "untrained", tiny_model(max_length=512)).folder)


def test_the_verb_hands_over_to_trace_and_diff(run: Path, capsys: pytest.CaptureFixture):
    assert verb.run(verb.FLAGS(str(run), probe="loss-above:4", json=True)) == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["first_bad"].endswith("step-000040")
    assert facts["verdict"]["evidence"]["diverging"] == ["layer 1 down"]
    assert "blocks.1.mlp.down.weight (5.0e-01)" in facts["verdict"]["reason"]
    moved = [one for one in facts["diff"]["tensors"] if one["moved"]]
    assert [one["name"] for one in moved] == ["model.layers.1.mlp.down_proj.weight"]
    assert verb.run(verb.FLAGS(str(run), probe="loss-above:9")) == 0
    assert "none is bad at the end" in capsys.readouterr().out


def test_trace_and_diff_on_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    good, bad = (str(run / "checkpoints" / f"step-0000{step}") for step in (30, 40))
    assert trace_verb.run(trace_verb.FLAGS(good, prompt="the cat is here")) == 0
    assert "layer 1 residual" in capsys.readouterr().out
    assert trace_verb.run(trace_verb.FLAGS(good, bad, picture=str(tmp_path / "map.png"))) == 3
    assert "layer 1 down is the first that diverges" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    for through in ("batched", "cache"):
        assert trace_verb.run(trace_verb.FLAGS(good, through=through, b_dtype="float16", json=True)) == 0
        assert json.loads(capsys.readouterr().out)["verdict"]["outcome"] == "PROVEN"
    assert diff_verb.run(diff_verb.FLAGS(good, bad)) == 0
    out = capsys.readouterr().out
    assert "model.layers.1.mlp.down_proj.weight" in out
    assert "1 of 20 tensors differ" in out


def test_a_gguf_file_is_traced_beside_a_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    pytest.importorskip("gguf")
    good, bad = (open_artifact(run / "checkpoints" / f"step-0000{step}") for step in (30, 40))
    for source, due in ((good, 0), (bad, 3)):
        assert source.tokenizer is not None
        gguf.write_gguf(tmp_path / f"{due}.gguf", source.config, source.tensors, source.tokenizer, "f16")
        assert trace_verb.run(trace_verb.FLAGS(str(good.path), str(tmp_path / f"{due}.gguf"), tolerance=0.02)) == due
    assert "layer 1 down is the first that diverges" in " ".join(capsys.readouterr().out.split())


def test_other_geometry_and_bad_tokens_are_refused(run: Path, tmp_path: Path):
    good = str(run / "checkpoints" / "step-000030")
    other = str(save_model(tmp_path / "wide", nudge(tiny_model(hidden=128))).folder)
    with pytest.raises(UsageError, match="hidden 96"):
        trace_verb.run(trace_verb.FLAGS(good, other))
    (tmp_path / "ids.json").write_text("[1, 2, 99999]")
    with pytest.raises(UsageError, match="outside the vocabulary"):
        trace_verb.run(trace_verb.FLAGS(good, tokens=str(tmp_path / "ids.json")))
    (tmp_path / "ids.json").write_text("[[1], [2, 3]]")
    with pytest.raises(UsageError, match="several of the same length"):
        trace_verb.run(trace_verb.FLAGS(good, tokens=str(tmp_path / "ids.json")))

"""What a run hands over is what it scored: the moving average where there is one, and of an artifact the bytes themselves.

Whole runs of a tiny model, in this process. Only the fresh processes of the proofs are left out: tests/guard has them.
"""

import json
import shutil
import zipfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from assay.data.bpe import train_tokenizer, write_tokenizer
from assay.data.build_corpus import CorpusPlan, build_corpus
from assay.data.data_files import DocumentRule
from assay.errors import ArtifactError, UsageError
from assay.evaluation.held_out_loss import score_corpus
from assay.guard import proof
from assay.learn.ema import ema_weights
from assay.recipes import hand_over
from assay.recipes.hand_over import check_weight_set, rescore, write_export
from assay.recipes.options import Pretrain
from assay.recipes.pretrain import pretrain
from assay.recipes.size_limit import check_bytes, check_squeezed_score, write_squeezed
from assay.recipes.squeezed_code import CODE, FreshScore, check_own_code, pack_code, reread, score_afresh
from assay.recipes.trainer import Trainer
from assay.store.artifact import build_model as built
from assay.store.artifact import open_artifact
from assay.store.assayz import read_assayz, write_assayz
from assay.store.checkpoint import open_checkpoint, step_folder
from assay.store.export_artifact import export_artifact
from assay.store.ledger import Ledger
from assay.verdict import Outcome, proven
from assay.zoo.run_faults import hand_nothing_over
from tests.data.conftest import made_text, write_jsonl

ROWS, LENGTH, STEPS = 4, 32, 8


@pytest.fixture(scope="module", autouse=True)
def no_fresh_processes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "prove_checkpoint", lambda folder, **_: [])
        patch.setattr(hand_over, "prove", lambda request: [proven("stands in", "for the fresh process")])
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    text = write_jsonl(folder / "text.jsonl", [made_text(seed, 60) for seed in range(40)])
    write_tokenizer(train_tokenizer([text], 320, rule=DocumentRule())[0], folder / "tokenizer")
    return build_corpus([text], folder / "corpus", folder / "tokenizer", CorpusPlan(held_out=0.2), workers=1)


def options(corpus, out, **more):
    return Pretrain(**{"corpus": str(corpus.folder), "out": str(out), "depth": 1, "max_length": LENGTH, "batch_tokens": ROWS * LENGTH,
                       "tokens": STEPS * ROWS * LENGTH, "save_steps": 4, "warmup_steps": 2, "eval_documents": 4, "device": "cpu",
                       "num_train_epochs": 9} | more)


def ran(config, say=lambda _: None):
    found = pretrain(config, say)
    assert found.interrupted is None
    return found.verdicts


@pytest.fixture(scope="module")
def averaging(corpus, tmp_path_factory):
    """A run with a moving average and an artifact: its folder, verdicts and words."""
    out, said = tmp_path_factory.mktemp("runs") / "ema", []
    verdicts = ran(options(corpus, out, ema=0.9, max_bytes=60_000, artifact_seconds=900.0), said.append)
    return SimpleNamespace(folder=out, verdicts=verdicts, said=said, last=step_folder(out / "checkpoints", STEPS),
                           events=Ledger(out / "ledger.jsonl").events())


@pytest.fixture(scope="module")
def raw_run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "raw"
    ran(options(corpus, out))
    return out


def scoring(corpus):
    return partial(score_corpus, corpus=corpus, rows=ROWS, length=LENGTH, context=LENGTH // 2)


# ---------------------------------------------------------------- two named weight sets (FAILURES C19)


def test_the_average_changes_nothing_that_training_goes_on_from(averaging, raw_run):
    for step in (4, STEPS):
        with_it, without = (open_checkpoint(step_folder(run / "checkpoints", step)) for run in (averaging.folder, raw_run))
        assert all(torch.equal(tensor, without.weights()[name]) for name, tensor in with_it.weights().items())
        assert all(torch.equal(with_it.optimizer()[name], tensor) for name, tensor in without.optimizer().items())


def test_a_checkpoint_names_both_sets_and_holds_both(averaging, raw_run):
    saved = open_artifact(averaging.last)
    facts, average = saved.raw.checkpoint.facts, ema_weights(saved.raw.checkpoint.optimizer())
    assert (facts["weight_set"], facts["scored_set"]) == ("raw", "ema")
    assert average.keys() == saved.tensors.keys()
    assert not any(torch.equal(average[name], tensor) for name, tensor in saved.tensors.items() if tensor.dim() == 2)
    plain = open_checkpoint(step_folder(raw_run / "checkpoints", STEPS))
    assert (plain.facts["weight_set"], plain.facts["scored_set"]) == (None, None)
    assert not ema_weights(plain.optimizer())


def test_what_is_handed_over_is_what_was_evaluated(averaging, corpus):
    last = json.loads((averaging.folder / "eval.jsonl").read_text().splitlines()[-1])
    recorded = np.array(last["per_document"])
    assert last["step"] == STEPS  # and the best: the model is still learning
    given, raw = open_artifact(averaging.folder / "model"), open_artifact(averaging.last)
    assert given.raw.checkpoint.facts["weight_set"] == "ema"
    assert all(torch.equal(tensor, ema_weights(raw.raw.checkpoint.optimizer())[name]) for name, tensor in given.tensors.items())
    of_given, of_raw = (score_corpus(built(a), corpus, rows=ROWS, length=LENGTH, count=4).per_document for a in (given, raw))
    assert np.abs(of_given - recorded).max() < 1e-5
    assert np.abs(of_raw - recorded).max() > 1e-3
    assert given.raw.checkpoint.facts["parent"]["weights"] == raw.digest


@pytest.mark.parametrize("which", ["model", "last"])
def test_an_export_says_which_set_it_holds(averaging, which, tmp_path):
    source = open_artifact(averaging.folder / "model" if which == "model" else averaging.last)
    export_artifact(source, "hf", tmp_path / "export", "bfloat16")
    facts = open_checkpoint(tmp_path / "export").facts
    assert (facts["weight_set"], facts["scored_set"]) == ("ema" if which == "model" else "raw", "ema")


def test_evaluations_say_which_set_they_scored(averaging, raw_run):
    of = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (averaging.folder, raw_run)]
    looked = [[row.get("eval_weight_set") for row in rows if "eval_loss" in row] for rows in of]
    assert looked == [["ema"] * 3, [None] * 3]
    assert any("bits per byte (ema weights)" in line for line in averaging.said)


def test_handing_over_the_other_set_is_refuted(averaging, tmp_path):
    shutil.copytree(averaging.last, tmp_path / "raw")
    verdict = check_weight_set(averaging.last, tmp_path / "raw")
    assert verdict.outcome is Outcome.REFUTED
    assert verdict.reason.startswith("0 of 10 tensors are those that were scored")
    assert check_weight_set(averaging.last, averaging.folder / "model").outcome is Outcome.PROVEN


def test_a_run_without_an_average_hands_over_its_model(raw_run, tmp_path):
    best = step_folder(raw_run / "checkpoints", STEPS)
    write_export(best, tmp_path / "again")
    for where in (raw_run / "model", tmp_path / "again"):
        assert all(torch.equal(tensor, open_artifact(best).tensors[name]) for name, tensor in open_artifact(where).tensors.items())


@pytest.mark.parametrize("at", [1, 5])
def test_resumed_equals_uninterrupted_with_its_average(averaging, corpus, tmp_path, monkeypatch, at):
    config = options(corpus, tmp_path / "run", ema=0.9, max_bytes=60_000)
    over = Trainer.over
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", lambda self: over(self) or self.done == at)
        patch.setattr("assay.recipes.pretrain.hand_over", hand_nothing_over)
        patch.setattr("assay.recipes.pretrain.write_down", lambda *_, **__: None)
        patch.setattr("assay.recipes.pretrain.write_squeezed", lambda *_, **__: [])
        ran(config)
    assert not (tmp_path / "run" / "model").exists()
    ran(config)
    resumed, whole = open_checkpoint(step_folder(tmp_path / "run" / "checkpoints", STEPS)), open_checkpoint(averaging.last)
    assert all(torch.equal(resumed.weights()[name], tensor) for name, tensor in whole.weights().items())
    assert all(torch.equal(resumed.optimizer()[name], tensor) for name, tensor in whole.optimizer().items())
    assert (tmp_path / "run" / "model.assayz").read_bytes() == (averaging.folder / "model.assayz").read_bytes()


# ---------------------------------------------------------------- so many bytes


def test_the_artifact_is_the_handed_over_model_in_so_many_bytes(averaging, corpus):
    file = averaging.folder / "model.assayz"
    found = read_assayz(file)
    assert file.stat().st_size <= 60_000
    assert found.facts["source"] == open_artifact(averaging.folder / "model").digest
    assert found.tokenizer.digest == corpus.tokenizer_digest
    verdicts = {v.check: v for v in averaging.verdicts}
    assert verdicts["bytes"].outcome is verdicts["artifact score"].outcome is verdicts["time"].outcome is Outcome.PROVEN
    assert verdicts["time"].evidence["most"] == 900.0


def test_the_score_that_is_told_is_the_files_own(averaging, corpus):
    event = next(event for event in averaging.events if event["kind"] == "artifact")
    found = reread(averaging.folder / "model.assayz", corpus, ROWS, LENGTH).bits_per_byte
    before = rescore(open_artifact(averaging.folder / "model"), scoring(corpus)).bits_per_byte
    assert event["score"]["mean"] == found.mean != before.mean
    assert event["unquantised"]["mean"] == before.mean
    assert event["bytes"] == (averaging.folder / "model.assayz").stat().st_size
    assert any(f"{found} bits per byte, read back from the file" in line for line in averaging.said)


def test_other_weights_in_the_file_are_refuted_by_their_score(averaging, corpus, tmp_path):
    model = open_artifact(averaging.folder / "model")
    before = rescore(model, scoring(corpus))
    worse = replace(model, tensors=model.tensors | {"embed.weight": 8 * model.tensors["embed.weight"].roll(1, 0)})
    write_assayz(worse, tmp_path / "m", 10**9)
    verdict = check_squeezed_score(before, reread(tmp_path / "m", corpus, ROWS, LENGTH))
    assert verdict.outcome is Outcome.REFUTED
    assert "more than the 0.05 allowed" in verdict.reason
    assert verdict.evidence["cost"]["low"] < verdict.evidence["cost"]["mean"] < verdict.evidence["cost"]["high"]


def test_a_damaged_file_has_no_score(averaging, corpus, tmp_path):
    data = bytearray((averaging.folder / "model.assayz").read_bytes())
    data[-100] ^= 1
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(ArtifactError, match="are not those that were written"):
        reread(tmp_path / "m", corpus, ROWS, LENGTH)


def test_more_bytes_than_allowed_are_refuted(averaging):
    file = averaging.folder / "model.assayz"
    assert check_bytes(file, file.stat().st_size).outcome is Outcome.PROVEN
    assert check_bytes(file, file.stat().st_size - 1).outcome is Outcome.REFUTED


def test_a_file_is_not_scored_on_text_of_another_tokenizer(averaging, corpus):
    other = replace(corpus, manifest=corpus.manifest | {"tokenizer": {"digest": "0" * 64}})
    with pytest.raises(UsageError, match="score it on a corpus of its own tokenizer"):
        reread(averaging.folder / "model.assayz", other, ROWS, LENGTH)


def test_what_cannot_fit_is_refused_before_training(corpus, tmp_path):
    with pytest.raises(UsageError, match=r"depth 3 .*--depth 2,"):
        pretrain(options(corpus, tmp_path / "run", depth=3, max_bytes=600_000), lambda _: None)
    with pytest.raises(UsageError, match="what fits is a tokenizer with fewer tokens"):
        pretrain(options(corpus, tmp_path / "run", depth=1, max_bytes=10_000), lambda _: None)
    assert not (tmp_path / "run").exists()


def test_the_code_that_runs_the_file_counts_where_asked_and_scores_it_alone(averaging, corpus, tmp_path, monkeypatch):
    """What code it takes is asked of a fresh process here, once, so that only what code leaves is left for the weights."""
    traced = score_afresh(averaging.folder / "model.assayz", corpus, rows=ROWS, length=LENGTH)
    monkeypatch.setattr("assay.recipes.size_limit.score_afresh", lambda *given, code=None, **asked: traced if code is None else
                        score_afresh(*given, code=code, **asked))
    run = SimpleNamespace(folder=tmp_path, log=Ledger(tmp_path / "ledger.jsonl").append, say=lambda _: None)
    before = rescore(open_artifact(averaging.folder / "model"), scoring(corpus))
    allowed = pack_code(traced.modules, tmp_path / "alone.zip") + 60_000
    found = {verdict.check: verdict for verdict in write_squeezed(run, averaging.folder / "model", before, corpus, rows=ROWS, length=LENGTH,
                                                                  max_bytes=allowed, count_code=True, max_seconds=0.001)}
    assert {check for check, verdict in found.items() if verdict.outcome is Outcome.PROVEN} == {"bytes", "artifact score", "artifact code"}
    assert found["time"].outcome is Outcome.REFUTED
    assert "0.001 are allowed" in found["time"].reason
    file, code = tmp_path / "model.assayz", tmp_path / CODE
    assert found["bytes"].evidence["bytes"] == file.stat().st_size + code.stat().st_size <= allowed
    assert check_bytes(file, file.stat().st_size, code).outcome is Outcome.REFUTED
    with zipfile.ZipFile(code) as packed:
        modules = [name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in packed.namelist()]
    assert "assay.store.assayz" in modules
    assert "assay.recipes.pretrain" not in modules
    told = reread(file, corpus, ROWS, LENGTH)
    sound = FreshScore(told.bits_per_byte.mean, 1.0, modules, f"{code}/assay/__init__.py")
    assert check_own_code(sound, told, code).outcome is Outcome.PROVEN
    assert "other code than was counted" in check_own_code(sound._replace(origin="/elsewhere/assay"), told, code).reason
    assert "not the code that the score is of" in check_own_code(sound._replace(mean=2 * sound.mean), told, code).reason
    pack_code([name for name in modules if name != "assay.store.assayz"], code)
    with pytest.raises(ArtifactError, match=r"has code\.zip could not score it: .*assayz"):
        score_afresh(file, corpus, rows=ROWS, length=LENGTH, code=code)


def test_code_and_seconds_of_no_artifact_are_refused(corpus, tmp_path):
    for asked in ({"count_code": True}, {"artifact_seconds": 9.0}):
        with pytest.raises(UsageError, match="about the artifact of --max-bytes"):
            pretrain(options(corpus, tmp_path / "run", **asked), lambda _: None)
    with pytest.raises(UsageError, match=r"may take .* bytes at int5 beside [0-9]{3},[0-9]{3} of code"):
        pretrain(options(corpus, tmp_path / "run", count_code=True, max_bytes=60_000), lambda _: None)
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_after_all_leaves_the_model_standing(averaging, corpus, tmp_path):
    run = SimpleNamespace(folder=tmp_path, log=Ledger(tmp_path / "ledger.jsonl").append, say=lambda _: None)
    before = rescore(open_artifact(averaging.folder / "model"), scoring(corpus))
    with pytest.raises(UsageError, match="or allow more bytes"):
        write_squeezed(run, averaging.folder / "model", before, corpus, rows=ROWS, length=LENGTH, max_bytes=10_000)
    assert not (tmp_path / "model.assayz").exists()

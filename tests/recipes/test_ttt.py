"""assay ttt, end to end on a tiny model: scored, written down, learned, forgotten; and what it did is said document by document."""

import importlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.config import parse
from assay.errors import DataError, GuardStop, UsageError
from assay.recipes.run import Run
from assay.recipes.seeds import final_score
from assay.recipes.ttt import ttt
from assay.recipes.ttt_options import Ttt
from assay.store.artifact import open_artifact
from assay.store.ledger import read_chain
from assay.strict_json import read_json_lines
from assay.testing.fault_injection import swap
from assay.testing.tiny_models import save_model, tiny_model
from assay.verbs import seeds as seeds_verb
from assay.verbs import ttt as verb
from assay.verdict import Outcome
from assay.zoo import ttt_faults

ttt_recipe = importlib.import_module("assay.recipes.ttt")
SETTINGS = "--chunk 24 --context 72 --rank 2 --learning-rate 1e-2 --batch-size 4 --device cpu"


def options(folder: Path, more: str = "", out: str = "run") -> Ttt:
    if not (folder / "base").exists():
        save_model(folder / "base", tiny_model())
        (folder / "text.txt").write_text("".join(ttt_faults.repetitive_texts(10)))
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ttt_faults.repetitive_texts(10)))
    return parse(Ttt, f"{folder / 'base'} --text {folder / 'text.jsonl'} --out {folder / out} {SETTINGS} {more}".split(), prog="assay ttt")


def quiet(_: str) -> None:
    pass


@pytest.mark.arithmetic
def test_from_text_to_a_proven_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = options(tmp_path, "--json --quiet")
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    assert verb.run(flags) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert shown.err == "", "--quiet"
    assert told["headline"].startswith("gain shown: +")
    assert {v["check"]: v["outcome"] for v in told["verdicts"]} == dict.fromkeys(
        ("order", "gain", "regressions", "base", "sites", "reading", "bits"), "PROVEN")
    saved = told["estimates"]["bits per byte, saved"]
    assert saved["n"] == len(told["documents"]) == 10
    assert saved["low"] > 0.05
    means = {name: told["estimates"][f"bits per byte, {name}"]["mean"] for name in ("with", "without")}
    assert means["without"] - means["with"] == pytest.approx(saved["mean"], abs=1e-9)
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == before

    events = read_chain(tmp_path / "run" / "scores.jsonl").events
    assert [event["kind"] for event in events[:4]] == ["begin", "score", "update", "score"]
    nats = sum(row["nats"] for event in events if event["kind"] == "score" for row in event["rows"])
    assert nats == pytest.approx(sum(one["bits_with"] for one in told["documents"]) * 0.6931471805599453, rel=1e-9)
    assert (tmp_path / "run" / "ttt.png").read_bytes().startswith(b"\x89PNG")
    preflight = next(event for event in read_chain(tmp_path / "run" / "ledger.jsonl").events if event["kind"] == "preflight")
    assert [(v["check"], v["outcome"]) for v in preflight["verdicts"]] == [("causality", "PROVEN"), ("sight", "PROVEN"),
                                                                                  ("statistics", "PROVEN")]
    score = final_score(tmp_path / "run")
    assert score is not None
    assert score.mean == means["with"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["eval_bits_per_byte"] == pytest.approx(means["with"], abs=1e-9)

    with pytest.raises(UsageError, match="holds scores already"):
        verb.run(flags)


def test_without_a_patch_it_is_what_the_model_says_of_the_raw_bytes(tmp_path: Path):
    """Every byte is paid for once, by a plain pass over each document, which fits the context whole."""
    report = ttt(options(tmp_path, f"--context 200 --text {tmp_path / 'text.txt'} --document-bytes 60"), quiet)
    assert all(v.check != "time" for v in report.verdicts), "nobody asked for a limit"
    artifact = open_artifact(tmp_path / "base")
    model, raw = tiny_model(), (tmp_path / "text.txt").read_bytes()
    assert sum(text.bytes for text in report.documents) == len(raw)
    for text in report.documents:
        assert text.tokens[0] == artifact.stops.eos
        tokens = torch.tensor([text.tokens])
        with torch.no_grad():
            nats = torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="sum")
        assert text.without == pytest.approx(float(nats) / 0.6931471805599453, rel=1e-5)


def test_a_warm_start_is_watched_and_drift_beyond_the_bound_is_refuted(tmp_path: Path):
    warm = ttt(options(tmp_path, "--warm-start --batch-size 2", "warm"), quiet)
    assert next(v for v in warm.verdicts if v.check == "drift").outcome is Outcome.PROVEN
    assert warm.norms[:2] == pytest.approx([1, 1])
    assert len(set(warm.norms[2:])) == 8
    decayed = ttt(options(tmp_path, "--warm-start --batch-size 2 --weight-decay 40", "decayed"), quiet)
    drift = next(v for v in decayed.verdicts if v.check == "drift")
    assert drift.outcome is Outcome.REFUTED
    assert "run away or die out" in drift.reason


def test_one_adapter_for_all_documents_saves_more_than_a_fresh_one_for_each(tmp_path: Path):
    """Every line is said by two of ten documents, so that what was kept serves the second five."""
    carried = ttt(options(tmp_path, "--carry-over --batch-size 2", "carried"), quiet)
    assert {v.check: v.outcome for v in carried.verdicts} == dict.fromkeys(
        ("order", "gain", "regressions", "drift", "base", "sites", "reading", "bits"), Outcome.PROVEN)
    assert "in this order of the documents" in next(v for v in carried.verdicts if v.check == "gain").reason
    fresh = ttt(options(tmp_path, "--batch-size 2", "fresh"), quiet)
    kept, alone = (sum(text.saved for text in outcome.documents[5:]) for outcome in (carried, fresh))
    assert kept > 1.5 * alone > 0
    with pytest.raises(UsageError, match="give one of the two"):
        ttt(options(tmp_path, "--carry-over --warm-start", "both"), quiet)


@pytest.mark.parametrize(("most", "outcome"), [(4, Outcome.PROVEN), (3.9, Outcome.REFUTED)])
def test_a_time_limit_is_of_the_reading_with_the_patch(most: float, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a clock that moves with the work alone: 9 s of reading without the patch, and 4 s with it."""
    clock = {"now": 100.0}

    def timed(work: Any, seconds: float, *given: Any) -> Any:
        clock["now"] += seconds
        return work(*given)

    for name, seconds in (("token_costs", 9.0), ("learn_and_note", 4.0)):
        monkeypatch.setattr(ttt_recipe, name, partial(timed, getattr(ttt_recipe, name), seconds))
    monkeypatch.setattr(ttt_recipe, "time", SimpleNamespace(monotonic=lambda: clock["now"]))
    report = ttt(options(tmp_path, f"--max-seconds {most}"), quiet)
    (found,) = [v for v in report.verdicts if v.check == "time"]
    assert (found.outcome, report.seconds) == (outcome, {"without": 9.0, "with": 4.0})
    assert found.reason.startswith("reading with the patch took 4.0 s")


def test_a_rate_that_ruins_documents_is_said_by_name(tmp_path: Path):
    report = ttt(options(tmp_path, "--learning-rate 1"), quiet)
    verdicts = {v.check: v for v in report.verdicts}
    assert verdicts["gain"].outcome is Outcome.REFUTED
    assert verdicts["regressions"].outcome is Outcome.REFUTED
    assert "text.jsonl:" in verdicts["regressions"].reason
    assert verdicts["base"].outcome is Outcome.PROVEN


def test_losses_in_another_unit_than_is_told_are_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = Run.record
    monkeypatch.setattr(Run, "record", lambda run, step, **found: usual(run, step, **found | {"loss": found["loss"] / 0.6931471805599453}))
    bits = next(v for v in ttt(options(tmp_path), quiet).verdicts if v.check == "bits")
    assert bits.outcome is Outcome.REFUTED
    assert "nats a token, which metrics.jsonl does not say" in bits.reason


def test_a_last_chunk_that_was_learned_before_it_was_scored_stops_the_run(tmp_path: Path):
    """The step is undone after the score, so that the ledger of scores shows none."""
    with ttt_faults.last_chunk_learned(tmp_path), pytest.raises(GuardStop, match="had seen the future"):
        ttt(options(tmp_path), quiet)
    assert not (tmp_path / "run" / "scores.jsonl").exists()


def test_a_reading_that_was_killed_begins_again_and_ends_as_one_that_was_not(tmp_path: Path):
    whole = ttt(options(tmp_path, out="whole"), quiet)

    def killed(_: Run, step: int, **__: object) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with swap(Run, "record", killed), pytest.raises(KeyboardInterrupt):
        ttt(options(tmp_path), quiet)
    again = ttt(options(tmp_path), quiet)
    assert [(text.name, text.with_) for text in again.documents] == [(text.name, text.with_) for text in whole.documents]
    assert [str(verdict) for verdict in again.verdicts] == [str(verdict) for verdict in whole.verdicts]
    assert [row["step"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 11))
    assert (tmp_path / "run" / "earlier-1-scores.jsonl").exists()
    with pytest.raises(UsageError, match="holds scores already"):
        ttt(options(tmp_path), quiet)


def test_what_is_no_number_stops_the_run_and_is_written_down(tmp_path: Path):
    with pytest.raises(GuardStop, match="nothing was"):
        ttt(options(tmp_path, "--learning-rate 1e30"), quiet)
    assert read_chain(tmp_path / "run" / "ledger.jsonl").events[-1]["kind"] == "stopped"


def test_what_cannot_be_paired_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="needs two or more"):
        ttt(options(tmp_path, "--documents 1"), quiet)
    for wrong in ("--targets q w", "--betas 0.9", "--rank 0", "--context 20"):
        with pytest.raises(UsageError, match="expected"):
            ttt(options(tmp_path, wrong, "wrong"), quiet)


def test_seeds_take_it_with_a_set_for_each_weight_decay(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = parse(seeds_verb.FLAGS, ["ttt", str(tmp_path / "base"), "--text", "t.txt", "--warm-start", "--seeds", "1", "2", "--over",
                                     "weight-decay=0.5,2", "--out", "runs"], prog="assay seeds")
    sets = seeds_verb.plans_by_value(flags)
    plans = {name: seeds_verb.checked_plan(one) for name, one in sets.items()}
    assert list(plans) == ["weight-decay 0.5", "weight-decay 2"]
    asked = f"ttt {tmp_path / 'base'} --text t.txt --warm-start --weight-decay 2 --seed 1 --out runs/weight-decay-2/seed-1"
    assert plans["weight-decay 2"].command(1)[3:] == asked.split()
    for wrong in ("weight-decay", "weight-decay=1,,2", "=1"):
        with pytest.raises(UsageError, match="expected an option and its values"):
            seeds_verb.plans_by_value(parse(seeds_verb.FLAGS, ["ttt", "--seeds", "1", "2", "--over", wrong, "--out", "r"],
                                            prog="assay seeds"))

"""A set of seeds: each run once, none forgotten, collapsed ones named, and a verdict on all of them together.

A stand-in for a recipe keeps a recipe's promises in a blink: a ledger, metrics, an exit code, a save on SIGTERM.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from assay import cli
from assay.config import parse
from assay.errors import StoreError, UsageError
from assay.recipes import seeds
from assay.recipes.seeds import Ending, Plan, ending_in_words, final_score, judged, run_seeds
from assay.statistics.estimate import Estimate
from assay.store.checkpoint import quarantine_checkpoint
from assay.store.ledger import Ledger
from assay.testing.tiny_models import save_model, tiny_model
from assay.verbs.seeds import FLAGS, RECIPES, checked_plan
from assay.verdict import Outcome, overall, refuted

RECIPE = Path(__file__).with_name("stand_in.py")


@dataclass(frozen=True)
class StandIn(Plan):
    """A plan whose runs are the stand-in's; `options` tell each seed what shall become of it."""

    def command(self, seed):
        return [sys.executable, str(RECIPE), str(self.folder(seed)), str(seed), *self.options]


def plan(out, *options, of=(1, 2, 3)):
    return StandIn("pretrain", options, of, str(out), "cpu")


def sittings(out, seed):
    file = out / f"seed-{seed}" / "sittings"
    return len(file.read_text().split()) if file.exists() else 0


def quiet(_):
    pass


# ---------------------------------------------------------------- the verdict


def test_a_clean_set_is_proven_with_what_it_excludes(tmp_path):
    found = run_seeds(plan(tmp_path), quiet)
    assert [v.outcome for v in found.verdicts] == [Outcome.PROVEN, Outcome.PROVEN]
    document = json.loads((tmp_path / "seeds.json").read_text())
    assert document == found.document
    assert document["sentence"].startswith("one mode: bits per byte 1.2")
    assert document["sentence"].endswith("3 of 3 clean only bounds the collapse rate below 63 %")
    assert document["mean"]["n"] == 3
    assert document["mean"]["low"] < document["mean"]["mean"] < document["mean"]["high"]
    assert document["worst"] == {"seed": 3, "value": 1.203}
    assert document["collapse_rate_below"] == pytest.approx(0.632, abs=1e-3)
    assert document["scores"]["2"] == {"mean": 1.202, "low": 1.1, "high": 1.3, "n": 9, "level": 0.95}
    assert document["outcome"] == "PROVEN"
    assert "step 5" in (tmp_path / "seed-2.log").read_text()


def test_two_of_three_collapsed_are_not_the_healthy_ones(tmp_path):
    found = run_seeds(plan(tmp_path, "collapse=2", "collapse=3"), quiet)
    assert overall(found.verdicts) is Outcome.REFUTED
    document = found.document
    assert document["collapsed"] == [2, 3]
    assert [mode["seeds"] for mode in document["modes"]] == [[1], [2, 3]]
    assert {(d["seed"], d["step"], d["metric"]) for d in document["departures"]} == {(2, 20, "loss"), (3, 20, "loss")}
    assert "seed 2 left the others at step 20 in loss" in document["sentence"]
    assert "2 of 3 seeds collapsed" in document["sentence"]
    assert document["collapse_rate_below"] is None
    assert document["outcome"] == "REFUTED"


@pytest.mark.parametrize(("fate", "exit_code", "words"), [
    ("guard=2", 4, "seed 2: stopped by a guard: constant_loss: loss 1.0 at 30 steps"),
    ("crash=2", 1, "seed 2: died with exit code 1: ZeroDivisionError: division by zero"),
    ("killed=2", -9, "seed 2: killed by SIGKILL; its last words: step 5"),
])
def test_a_seed_that_did_not_end_collapsed_and_is_named_with_its_sentence(tmp_path, fate, exit_code, words):
    found = run_seeds(plan(tmp_path, fate), quiet)
    runs, together = found.verdicts
    assert (runs.outcome, together.outcome) == (Outcome.REFUTED, Outcome.REFUTED)
    assert "2 of 3 seeds ran to their end" in runs.reason
    assert words in runs.reason
    assert together.evidence["collapsed"] == [2]
    assert found.document["seeds"]["2"]["exit_code"] == exit_code
    assert found.document["worst"] == {"seed": 2, "value": "nan"}
    assert found.document["scores"]["2"] is None


def test_a_run_whose_own_verdict_went_against_it_refutes_the_set_though_its_score_is_like_the_others(tmp_path):
    found = run_seeds(plan(tmp_path, "refuted=2"), quiet)
    runs, together = found.verdicts
    assert runs.outcome is Outcome.REFUTED
    assert "seed 2: a verdict went against it: REFUTED score: exported bytes score 9.9" in runs.reason
    assert together.outcome is Outcome.PROVEN
    assert together.evidence["collapsed"] == []


def test_all_seeds_lost():
    endings = {seed: Ending(4, "stopped by a guard: x") for seed in (1, 2)}
    verdicts, summary = judged(endings, {1: None, 2: None}, {})
    assert overall(verdicts) is Outcome.REFUTED
    assert summary["collapsed"] == [1, 2]
    assert "2 of 2 seeds collapsed" in summary["sentence"]


def test_a_score_of_an_earlier_session_is_not_how_a_stopped_run_ended():
    endings = {1: Ending(0, ""), 2: Ending(4, "stopped by a guard: x")}
    score = Estimate(1.2, 1.1, 1.3, 9)
    _, summary = judged(endings, {1: score, 2: score}, {})
    assert summary["collapsed"] == [2]


def test_the_artifacts_score_counts_where_the_run_was_to_fit_into_bytes(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append("hand over", score={"mean": 1.2, "low": 1.1, "high": 1.3, "n": 9, "level": 0.95})
    assert final_score(tmp_path) == Estimate(1.2, 1.1, 1.3, 9)
    ledger.append("artifact", score={"mean": 1.25, "low": 1.1, "high": 1.3, "n": 9, "level": 0.95})
    ledger.append("resume")
    assert final_score(tmp_path) == Estimate(1.25, 1.1, 1.3, 9)


# ---------------------------------------------------------------- going on


def test_a_finished_seed_is_not_run_again_and_a_crashed_one_is(tmp_path):
    first = run_seeds(plan(tmp_path, "crash=2", "guard=3"), quiet)
    assert first.document["collapsed"] == [2, 3]
    (tmp_path / "mended").touch()
    said = []
    second = run_seeds(plan(tmp_path, "crash=2", "guard=3"), said.append)
    assert second.document["collapsed"] == [3]
    assert [sittings(tmp_path, seed) for seed in (1, 2, 3)] == [1, 2, 1]
    assert "seed 1: finished before (done and proven)" in said


def test_more_seeds_may_be_added(tmp_path):
    run_seeds(plan(tmp_path), quiet)
    found = run_seeds(plan(tmp_path, of=(1, 2, 3, 4)), quiet)
    assert found.document["n"] == 4
    assert [sittings(tmp_path, seed) for seed in (1, 2, 3, 4)] == [1, 1, 1, 1]


def test_a_folder_that_was_removed_is_run_again(tmp_path):
    import shutil

    run_seeds(plan(tmp_path), quiet)
    shutil.rmtree(tmp_path / "seed-2")
    assert overall(run_seeds(plan(tmp_path), quiet).verdicts) is Outcome.PROVEN
    assert sittings(tmp_path, 2) == 1


def test_other_options_are_another_set(tmp_path):
    run_seeds(plan(tmp_path), quiet)
    with pytest.raises(UsageError, match=r"another set: options was \[\], now \['crash=1'\]"):
        run_seeds(plan(tmp_path, "crash=1"), quiet)


def test_seeds_of_other_data_are_another_set(tmp_path):
    data, said = tmp_path / "data.jsonl", []
    data.write_text("1\n")
    asked = replace(plan(tmp_path / "out"), inputs=(str(data),))
    assert overall(run_seeds(asked, quiet).verdicts) is Outcome.PROVEN
    assert overall(run_seeds(asked, said.append).verdicts) is Outcome.PROVEN, "a clean twin"
    data.write_text("2\n")
    with pytest.raises(UsageError, match=r"data.jsonl changed since its seeds began"):
        run_seeds(replace(asked, seeds=(1, 2, 3, 4)), quiet)
    assert sittings(tmp_path / "out", 4) == 0


def test_data_that_change_between_two_seeds_end_the_set(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("1\n")

    def meddle(line):
        if line.startswith("seed 2: begins"):
            data.write_text("2\n")

    with pytest.raises(UsageError, match=r"data.jsonl changed since its seeds began"):
        run_seeds(replace(plan(tmp_path / "out", of=(1, 2)), inputs=(str(data),)), meddle)


def test_whatever_the_options_name_is_an_input_of_the_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: base\n")
    flags = parse(FLAGS, ["sft", "--config", "run.yaml", "--data", "a.jsonl", "b.jsonl", "--seeds", "1", "2", "--out", "out"],
                  prog="assay seeds")
    assert set(checked_plan(flags).inputs) == {"run.yaml", "a.jsonl", "b.jsonl", "base"}


def test_a_seed_whose_model_was_quarantined_since_refutes_the_set(tmp_path):
    run_seeds(plan(tmp_path), quiet)
    checkpoint = save_model(tmp_path / "seed-2" / "model", tiny_model())
    assert overall(run_seeds(plan(tmp_path), quiet).verdicts) is Outcome.PROVEN
    quarantine_checkpoint(checkpoint, [refuted("generations", "it talks nonsense")])
    found = run_seeds(plan(tmp_path), quiet)
    assert found.verdicts[0].outcome is Outcome.REFUTED
    assert "2 of 3 seeds ran to their end and were proven; seed 2: a verdict went against it" in found.verdicts[0].reason
    assert "it talks nonsense" in found.verdicts[0].reason


def test_a_seed_whose_run_went_on_elsewhere_is_run_again(tmp_path):
    """Its score would be that of another run."""
    run_seeds(plan(tmp_path), quiet)
    again = Ledger(tmp_path / "seed-2" / "ledger.jsonl")
    again.append("hand over", score={"mean": 0.1, "low": 0.1, "high": 0.1, "n": 9, "level": 0.95})
    again.close()
    found = run_seeds(plan(tmp_path), quiet)
    assert [sittings(tmp_path, seed) for seed in (1, 2, 3)] == [1, 2, 1]
    assert found.document["scores"]["2"]["mean"] == 1.202


def test_a_request_that_makes_no_sense_ends_the_set_at_its_first_seed(tmp_path):
    with pytest.raises(UsageError, match="seed 1: died with exit code 2: corpus: no such folder"):
        run_seeds(plan(tmp_path, "usage=1", "usage=2", "usage=3"), quiet)
    assert [sittings(tmp_path, seed) for seed in (1, 2, 3)] == [1, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once_waited_for_and_leaves_no_verdict(tmp_path, number):
    def when_it_sleeps():
        while not (tmp_path / "seed-2" / "asleep").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    threading.Thread(target=when_it_sleeps, daemon=True).start()
    found = run_seeds(plan(tmp_path, "sleep=2"), quiet)
    assert found.interrupted == number
    assert found.verdicts == []
    assert (tmp_path / "seed-2" / "saved").read_text() == f"{int(number)} "
    assert sittings(tmp_path, 3) == 0
    assert set(json.loads((tmp_path / "seeds.json").read_text())["seeds"]) == {"1"}
    assert signal.getsignal(number) == before
    (tmp_path / "mended").touch()
    assert overall(run_seeds(plan(tmp_path, "sleep=2"), quiet).verdicts) is Outcome.PROVEN
    assert [sittings(tmp_path, seed) for seed in (1, 2, 3)] == [1, 2, 1]


def test_a_signal_that_comes_while_a_seed_is_started_reaches_it_once(tmp_path, monkeypatch):
    """Twice would be "stop at once": it would not save."""
    processes, sent, send = seeds.Processes(quiet), [], subprocess.Popen.send_signal

    class Starting(set):
        def add(self, process):
            super().add(process)
            os.kill(os.getpid(), signal.SIGTERM)
            handled.wait(0.5)

    handled = threading.Event()
    monkeypatch.setattr(processes, "_live", Starting())
    monkeypatch.setattr(subprocess.Popen, "send_signal", lambda *to: (sent.append(to[1]), handled.set(), send(*to)))
    with processes.forwarding_signals():
        seeds.run_all(plan(tmp_path, "sleep=1"), [1], processes, seeds.Record(plan(tmp_path)))  # it does not end before it is told to
    assert sent == [signal.SIGTERM]


def unwritable(out, say):
    (out / "seed-1.log").mkdir()
    return say


def unheard(out, say):
    def broken(text):
        if "step 5" in text:
            raise BrokenPipeError
        say(text)

    return broken


@pytest.mark.parametrize(("trouble", "error"), [(unwritable, StoreError), (unheard, BrokenPipeError)])
def test_a_seed_that_cannot_be_heard_is_ended_and_nobody_waits(tmp_path, monkeypatch, trouble, error):
    """A log on a full disk, `assay seeds | head`."""
    asleep = plan(tmp_path, "sleep=1", "sleep=2")
    started, found, popen = [], [], subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    def run():
        with pytest.raises(error):
            seeds.run_all(asleep, [1, 2], seeds.Processes(trouble(tmp_path, quiet)), seeds.Record(asleep))
        found.append([process.returncode for process in started])

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(seeds, "gpus", lambda device: ["0"])
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits for ever"
    assert len(found[0]) == 1  # the other was not begun
    assert None not in found[0]


def test_with_two_gpus_two_run_at_a_time_each_on_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "gpus", lambda device: ["3", "5"])
    run_seeds(plan(tmp_path, "meet=1", "meet=2", of=(1, 2, 3)), quiet)  # each of the two waits for the other
    places = [(tmp_path / f"seed-{seed}" / "gpu").read_text() for seed in (1, 2)]
    assert sorted(places) == ["3", "5"]
    assert (tmp_path / "seed-3" / "gpu").read_text() in places


def test_a_device_of_its_own_is_kept():
    assert seeds.gpus("cpu") == seeds.gpus("cuda:1") == []


@pytest.mark.parametrize(("code", "tail", "words"), [
    (0, ["x"], "done and proven"), (1, ["Traceback", "  File", "KeyError: 'a'", ""], "died with exit code 1: KeyError: 'a'"),
    (4, ["assay: loss: it is 1.0", "later"], "stopped by a guard: loss: it is 1.0"), (1, [], "died with exit code 1: it said nothing"),
    (-11, ["step 3"], "killed by SIGSEGV; its last words: step 3")])
def test_endings_in_words(code, tail, words):
    assert ending_in_words(code, tail) == words


# ---------------------------------------------------------------- the command line


def flags(*argv):
    return parse(FLAGS, argv, prog="assay seeds")


def test_what_is_not_its_own_is_passed_on_in_order():
    found = flags("pretrain", "--corpus", "c", "--learning-rate", "-1", "--seeds", "42", "314", "--depth=2", "--out", "o", "--json",
                  "--tokens", "5")
    assert found == FLAGS("pretrain", (42, 314), "o", True, ("--corpus", "c", "--learning-rate", "-1", "--depth=2", "--tokens", "5"))
    with pytest.raises(UsageError, match=r"--learning-rate is -1.0; expected a number above 0"):
        checked_plan(found)
    meant = replace(found, options=tuple("1" if word == "-1" else word for word in found.options))
    assert checked_plan(meant).command(42)[1:] == ["-m", "assay", "pretrain", "--corpus", "c", "--learning-rate", "1", "--depth=2",
                                                   "--tokens", "5",
                                              "--seed", "42", "--out", "o/seed-42"]


@pytest.mark.parametrize(("argv", "sentence"), [
    (["--seeds", "1", "2", "--dept", "3"], r"unknown argument '--dept'; did you mean '--depth'\?"),
    (["--seeds", "1", "2", "--depth", "x"], "invalid int value: 'x'"), (["--seeds", "1", "2", "--seed", "3"], "leave it out"),
    (["--seeds", "1", "2", "--seed=3"], "leave it out"), (["--seeds", "1", "1"], "two or more different seeds"),
    (["--seeds", "1"], "two or more different seeds"), ([], "required: --seeds")])
def test_mistakes_are_found_before_anything_runs(tmp_path, argv, sentence):
    with pytest.raises(UsageError, match=sentence):
        checked_plan(flags("pretrain", "--corpus", "c", "--out", str(tmp_path / "o"), *argv))
    assert not (tmp_path / "o").exists()


def test_an_unknown_recipe_is_refused():
    with pytest.raises(UsageError, match="invalid choice: 'pretrian'"):
        flags("pretrian", "--seeds", "1", "2", "--out", "o")


def test_exit_codes_and_json(tmp_path, monkeypatch, capfd):
    argv = ["seeds", "pretrain", "--corpus", "c", "--seeds", "1", "2", "--json", "--out"]
    for options, code in (((), 0), (("guard=2",), 3), (("usage=1",), 2)):
        monkeypatch.setattr("assay.verbs.seeds.checked_plan", lambda flags, options=options: plan(flags.out, *options, of=flags.seeds))
        assert cli.run([*argv, str(tmp_path / str(code))]) == code
        out, err = capfd.readouterr()
        assert "seed 1: begins" in err
        if code != 2:
            assert json.loads(out)["outcome"] == {0: "PROVEN", 3: "REFUTED"}[code]

# ---------------------------------------------------------------- every recipe


def around(mean, far):
    return Estimate(mean, mean - far, mean + far, 50)


def test_every_recipe_has_a_measure():
    assert set(RECIPES) == set(seeds.MEASURES)


@pytest.mark.parametrize(("recipe", "means", "far", "collapsed"), [
    ("grpo", {1: 0.62, 2: 0.58, 3: 0.05}, 0.05, [3]), ("grpo", {1: 0.62, 2: 0.58, 3: 0.52}, 0.05, []),
    ("sft", {1: 1.44, 2: 1.50, 3: 1.56}, 0.1, []), ("sft", {1: 1.44, 2: 1.50, 3: 4.0}, 0.1, [3]),
    ("edit", {1: 1.0, 2: 0.98, 3: 0.2}, 0.02, [3]), ("pretrain", {1: 1.44, 2: 1.4401, 3: 1.50}, 0.1, [3])])
def test_seeds_are_compared_by_the_recipes_own_score(recipe, means, far, collapsed):
    """Where each seed holds out other data, scores differ by that too, and it is no collapse."""
    endings = {seed: Ending(0, "done and proven") for seed in means}
    verdicts, summary = judged(endings, {seed: around(mean, far) for seed, mean in means.items()}, {}, seeds.MEASURES[recipe])
    assert summary["collapsed"] == collapsed
    assert (overall(verdicts) is Outcome.PROVEN) is (not collapsed)


def test_the_score_of_a_policy_and_of_edits_is_found(tmp_path):
    policy, edits = Ledger(tmp_path / "policy" / "ledger.jsonl"), Ledger(tmp_path / "edits" / "ledger.jsonl")
    said = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 9, "level": 0.95}
    policy.append("hand over", metric="answer", score=said)
    edits.append("edits", estimates={seeds.EDITED: said})
    assert final_score(tmp_path / "policy") == final_score(tmp_path / "edits") == Estimate(**said)
    assert seeds.evaluated_score({"step": 1, "eval_loss": 2.0, "eval_weight_set": 1.0, "eval_nats_per_token": 3.0, "eval_low": 1.0}) == 3.0
    assert seeds.evaluated_score({"step": 1, "eval_answer": 0.25, "eval_low": 0.1}) == 0.25
    assert seeds.evaluated_score({"step": 1, "loss": 0.25}) is None

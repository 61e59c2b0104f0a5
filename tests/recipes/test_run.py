"""The run folder: what is written, what is refused, and what a failure beside the loop leaves."""

import errno
import io
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.errors import GuardStop, StoreError, UsageError
from assay.guard import proof
from assay.guard.proof import Prover, hallmark_or_quarantine
from assay.recipes import run as run_module
from assay.recipes.run import Run, plain, rewrite_json_rows
from assay.recipes.starting_model import day_of_run
from assay.store import durable
from assay.store.checkpoint import Contents, latest_checkpoint, open_checkpoint, step_folders
from assay.store.ledger import Event
from assay.store.saving import BackgroundSaver
from assay.strict_json import read_json_lines
from assay.testing.tiny_training import NoProver
from assay.verdict import Verdict, proven, refuted, unproven
from assay.witness.replay import RECORD, SAID, WITNESS_FOLDER
from tests.recipes.sittings import EVERY, events, options, rows, saved_steps, sit
from tests.refusals import stopped_by


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(run_module, "Prover", NoProver)
    return Run(tmp_path / "run", options(tmp_path / "run"), say=lambda _: None)


def test_a_run_is_of_the_day_on_which_it_began_whenever_it_goes_on(run: Run):
    begun = datetime.fromisoformat(json.loads(run.ledger.path.read_text().splitlines()[0])["time"])
    run.log(Event.TIME)
    assert day_of_run(run.folder) == begun
    assert abs(day_of_run(run.folder / "another") - datetime.now()) < timedelta(minutes=1)


def test_the_same_options_are_the_same_run_and_others_are_another(tmp_path: Path):
    config = options(tmp_path / "run")
    first = Run(tmp_path / "run", config, say=print)
    assert not first.resumed
    first.ledger.close()
    longer = replace(config, tokens=10**6, device=None, out="elsewhere")
    again = Run(tmp_path / "run", longer, say=print)
    assert again.resumed
    again.ledger.close()
    with pytest.raises(UsageError, match=r"learning_rate was None, now 0\.1, seed was 0, now 7"):
        Run(tmp_path / "run", replace(config, seed=7, learning_rate=0.1), say=print)


def test_a_second_writer_is_refused(run: Run):
    with pytest.raises(UsageError, match="another process is writing"):
        Run(run.folder, run.config, say=print)


def test_of_two_that_begin_at_once_the_folder_holds_the_options_of_the_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second begins when the first has found no options there, and is about to write its own."""
    config, folder, replace_file, refused = options(tmp_path / "run"), tmp_path / "run", durable.replace_file, []

    def meanwhile(path: Path, data: bytes) -> None:
        monkeypatch.undo()
        with pytest.raises(UsageError, match="another process is writing") as caught:
            Run(folder, replace(config, seed=7), say=print)
        refused.append(caught)
        replace_file(path, data)

    monkeypatch.setattr(durable, "replace_file", meanwhile)
    first = Run(folder, config, say=print)
    assert refused
    assert "seed: 0\n" in (folder / "config.yaml").read_text()
    first.ledger.close()


def test_who_was_refused_keeps_nobody_out(tmp_path: Path):
    config = options(tmp_path / "run")
    Run(tmp_path / "run", config, say=print).ledger.close()
    with pytest.raises(UsageError, match="is another run") as kept:
        Run(tmp_path / "run", replace(config, seed=7), say=print)
    Run(tmp_path / "run", config, say=print).ledger.close()
    assert kept.traceback


def test_what_is_not_finite_is_written_as_a_word(run: Run):
    run.record(3, loss=float("nan"), grad_norm=float("inf"), epoch=1, note=None)
    text = run.metrics_file.read_text()
    assert json.loads(text, parse_constant=lambda word: pytest.fail(word)) == {
        "step": 3, "loss": "nan", "grad_norm": "inf", "epoch": 1, "note": None}


def test_rewinding_keeps_what_came_before_the_step(run: Run):
    for step in range(5):
        run.record(step, loss=float(step))
    run.rewind(3)
    assert [row["step"] for row in rows(run.metrics_file)] == [0, 1, 2]


def test_a_torn_last_line_is_not_a_row(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    assert read_json_lines(file) == []
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_json_lines(file) == [{"step": 1}, {"step": 2}]
    rewrite_json_rows(file, read_json_lines(file)[:1])
    assert file.read_text() == '{"step": 1}\n'


def test_what_is_set_aside_is_kept_under_a_name_of_its_own(run: Run):
    for content in ("first", "second"):
        (run.folder / "model").write_text(content)
        run.set_aside(run.folder / "model")
    run.set_aside(run.folder / "model")  # nothing there: nothing to do
    assert [(run.folder / f"earlier-{i}-model").read_text() for i in (1, 2)] == ["first", "second"]


def test_every_verdict_is_written_down_and_one_that_refutes_stops(run: Run):
    run.judge("account", [proven("movement", "all moved"), unproven("steps", "not counted")])
    with stopped_by("movement"):
        run.judge("account", [refuted("movement", "stuck")])
    run.ledger.close()
    written = [[v["outcome"] for v in event["verdicts"]] for event in events(run.config, "account")]
    assert written == [["PROVEN", "UNPROVEN"], ["REFUTED"]]


def test_plain_is_strict_json():
    assert plain({"a": (1, float("-inf")), Path("b"): {"x"}, "c": Path("d")}) == {"a": [1, "-inf"], "b": ["x"], "c": "d"}


def test_old_checkpoints_are_retired_beside_the_loop_and_written_down_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Hashing what is kept takes as long as the disk does: the loop must not wait for it."""
    whole, where = run_module.delete_old_checkpoints, []

    def watched(*given: Any) -> list[Path]:
        gone = whole(*given)
        where.append((threading.current_thread() is threading.main_thread(), [path.name for path in gone]))
        return gone

    monkeypatch.setattr(run_module, "delete_old_checkpoints", watched)
    config = options(tmp_path / "run")
    sit(config)
    assert [main for main, _ in where] == [False] * 8  # steps 0, 1, 6, 12, 18, 24, 26; then once more at the end
    retired = [event["checkpoint"] for event in events(config, "retire")]
    assert retired == [name for _, gone in where for name in gone]
    assert saved_steps(config) == [24, 26]
    assert len(retired) == 5


def test_nothing_is_retired_while_a_proof_is_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.recipes import sittings

    class Reading(NoProver):
        closed = False

        @property
        def busy(self) -> bool:  # type: ignore[override]
            return not self.closed

        def close(self) -> list[tuple[Path, list[Verdict]]]:
            self.closed = True
            return []

    monkeypatch.setattr(sittings, "NoProver", Reading)
    config, present = options(tmp_path / "run"), []
    sit(config, after={25: lambda work: (work.run.settle(), present.extend(saved_steps(config)))})
    assert present == [0, 1, 6, 12, 18, 24]
    assert saved_steps(config) == [24, 26]  # once it is over


def test_a_rotation_that_takes_what_had_to_stay_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = run_module.delete_old_checkpoints

    def greedy(folder: Path, keep: int, *given: Any) -> list[Path]:
        gone = whole(folder, keep, *given)
        if gone:
            shutil.rmtree(step_folders(folder)[-2])
        return gone

    monkeypatch.setattr(run_module, "delete_old_checkpoints", greedy)
    with stopped_by("kept"):
        sit(options(tmp_path / "run"))


def test_what_stays_is_asked_for_after_a_rotation_and_damage_to_an_older_one_is_said(run: Run):
    for step in range(3):
        run.save(step, Contents("model", {"w": torch.ones(3)}), best=None)
    run.finish(None)
    damaged = run.checkpoints / "step-000001" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x55")
    run._retired, run._kept = [], [(run_module.check_kept_checkpoints(step_folders(run.checkpoints)), True)]
    run._write_down_retired()
    run.ledger.close()
    assert [event["verdicts"][0]["outcome"] for event in events(run.config, "kept")] == ["PROVEN"]
    assert "gone or damaged" in events(run.config, "warning")[0]["reason"]


class Late(NoProver):
    """Begins each proof once the loop waits for its save, which is when the next save was asked for; it ends when one more is."""

    def __init__(self) -> None:
        self.written, self.awaited = threading.Event(), threading.Event()
        self.written.set()  # nothing has to be, before the first save
        self.busy = False

    def start(self, folder: Path, **_: Any) -> None:
        self.written.set()
        assert self.awaited.wait(60)
        self.awaited.clear()
        self.busy = True

    def finished(self) -> list[tuple[Path, list[Verdict]]]:
        assert self.written.wait(60)
        self.written.clear()
        self.busy = False
        return []


def test_nor_while_one_that_began_after_the_next_save_was_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch):
    """A slow disk: the loop asks for a save while the one before it is still being written."""
    prover, wait = Late(), BackgroundSaver.wait

    def waiting(saver: BackgroundSaver) -> Any:
        if saver._pending:
            prover.awaited.set()
        return wait(saver)

    monkeypatch.setattr(run, "_prover", prover)
    monkeypatch.setattr(BackgroundSaver, "wait", waiting)
    for step in range(5):
        run.save(step, Contents("model", {"w": torch.ones(3)}), best=None)
    run.settle()
    assert saved_steps(run.config) == [0, 1, 2, 3, 4]


def test_a_replay_that_is_done_before_the_last_checkpoint_is_written_is_spoken_of_in_its_proof(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Begun when the loop ends, it may be over while the last evaluation goes on."""
    record = run.folder / WITNESS_FOLDER / "step-000001"
    record.mkdir(parents=True)
    (record / RECORD).write_text("{}")

    def replayed(records: list[Path], *_: Any, **__: Any) -> list[Verdict]:
        for each in records:
            (each / SAID).write_text("{}")
        return [refuted("witness", "another step")]

    monkeypatch.setattr(proof, "ask_witness", replayed)
    monkeypatch.setattr(proof, "prove", lambda *_, **__: [proven("whole", "all is there")])
    monkeypatch.setattr(proof.PROVING_PROCESSES, "_early", 2)
    run._prover = Prover()
    run.end_loop(1, 0.0)
    while not (record / SAID).exists():
        time.sleep(0.01)
    where = run.save(1, Contents("model", {"w": torch.ones(3)}), best=None)
    run.finish(None)
    with pytest.raises(GuardStop, match="another step"):
        run.settle_proofs()
    assert open_checkpoint(where).quarantined


def test_a_checkpoint_that_its_proof_refuted_is_left_out_of_the_choice_also_when_it_is_gone(run: Run):
    for step in range(3):
        run.save(step, Contents("model", {"w": torch.ones(3)}), best=None)
    run.settle()
    hallmark_or_quarantine(open_checkpoint(run.checkpoints / "step-000001"), [refuted("answers", "probe logits")])
    for _ in range(2):
        run.rewind(2)
        assert run.unsaved == {1: "its proof refuted it"}
        shutil.rmtree(run.checkpoints / "step-000001", ignore_errors=True)
    assert [event["step"] for event in events(run.config, "not saved")] == [1]


@pytest.mark.parametrize("interrupted", [None, signal.SIGTERM])
def test_proofs_that_an_earlier_session_did_not_live_to_see_are_made_when_a_run_finishes(run: Run, interrupted: int | None,
                                                                                        monkeypatch: pytest.MonkeyPatch):
    """Of checkpoints that stay, and of those that nothing has marked."""
    class Asked(NoProver):
        def start(self, folder: Path, *, beside: bool, **_: Any) -> None:
            asked.append((folder.name, beside))

    asked = list[tuple[str, bool]]()
    for step in range(5):
        run.save(step, Contents("model", {"w": torch.ones(3)}), best=run.checkpoints / "step-000001")
    run.settle()
    hallmark_or_quarantine(open_checkpoint(run.checkpoints / "step-000003"), [proven("answers", "probe logits")])
    run.ledger.close()
    monkeypatch.setattr(run_module, "Prover", Asked)
    later = Run(run.folder, run.config, say=lambda _: None)
    later.save(5, Contents("model", {"w": torch.ones(3)}), best=run.checkpoints / "step-000001")
    later.settle()
    later.end_loop(1, 0.0)
    later.interrupted = interrupted
    later.finish(run.checkpoints / "step-000001")
    again = [] if interrupted else [("step-000001", False), ("step-000004", False)]
    assert asked == [("step-000005", True), *again]
    later.ledger.close()


# ---------------------------------------------------------------- failures beside the loop


class Refuting(NoProver):
    """Refutes the checkpoint of one step, at the next question; it is quarantined before that, as by a proof."""

    def __init__(self) -> None:
        self.found: list[tuple[Path, list[Verdict]]] = []

    @property
    def busy(self) -> bool:  # type: ignore[override]
        return bool(self.found)

    def start(self, folder: Path, **_: Any) -> None:
        verdicts = [(refuted if folder.name == f"step-{2 * EVERY:06d}" else proven)("answers", "probe logits")]
        hallmark_or_quarantine(open_checkpoint(folder), verdicts)
        self.found.append((folder, verdicts))

    def finished(self) -> list[tuple[Path, list[Verdict]]]:
        return [self.found.pop(0) for _ in range(len(self.found))]  # the saver's thread may add one meanwhile

    close = finished


def test_a_refuted_proof_stops_the_run_and_what_came_before_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tests.recipes import sittings

    monkeypatch.setattr(sittings, "NoProver", Refuting)
    config = options(tmp_path / "run")
    with pytest.raises(GuardStop, match=r"step-000012 .*answers: .*Earlier checkpoints stand"):
        sit(config)
    proofs = {event["checkpoint"]: event["outcome"] for event in events(config, "proof")}  # a save under way may still be proven after it
    assert proofs["step-000006"] == "PROVEN"
    assert proofs["step-000012"] == "REFUTED"
    assert events(config, "stopped")[0]["exit_code"] == 4
    assert 6 in saved_steps(config)
    assert events(config, "stopped")[0]["stands"] in ("step-000006", "step-000018")  # the newest that is not refuted


@pytest.mark.parametrize("moment", [EVERY, "last"])
def test_a_full_disk_stops_the_run_and_what_was_saved_stands(moment: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = EVERY if moment == EVERY else 26
    whole = durable.write_file

    def full(path: Path, chunks: Any) -> str:
        if f"step-{step:06d}" in str(path) and path.name == "optimizer.safetensors":
            with durable.as_store_error(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, chunks)

    monkeypatch.setattr(durable, "write_file", full)
    config = options(tmp_path / "run")
    with pytest.raises(StoreError, match="the disk is full"):
        sit(config)
    stopped, = events(config, "stopped")
    found, passed_over = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert stopped["exit_code"] == 1
    assert found is not None
    assert passed_over == []
    assert found.folder.name == stopped["stands"] == ("step-000001" if moment == EVERY else "step-000024")


def test_a_full_disk_under_the_metrics_is_written_down_too(run: Run):
    run.metrics_file = Path("/dev/full")

    def sit_down() -> None:
        with run.sitting():
            run.record(1, loss=1.0)

    with pytest.raises(StoreError, match="the disk is full"):
        sit_down()
    assert [event["exit_code"] for event in events(run.config, "stopped")] == [1]


@pytest.mark.parametrize("second", [refuted("answers", "also wrong"), UsageError("the parent is gone"), proven("answers", "right")])
def test_proofs_that_end_together_are_all_written_down(second: Verdict | UsageError, run: Run, monkeypatch: pytest.MonkeyPatch):
    found: dict[str, Any] = {"step-000001": refuted("answers", "wrong"), "step-000002": second, "step-000003": refuted("answers", "worse")}

    def prove(folder: Path, **_: Any) -> list[Verdict]:
        if isinstance(found[folder.name], UsageError):
            raise found[folder.name]
        return [found[folder.name]]

    monkeypatch.setattr(proof, "prove_checkpoint", prove)
    prover = Prover()
    monkeypatch.setattr(run, "_prover", prover)
    for name in found:
        prover.start(run.checkpoints / name)
    prover._pool.shutdown()

    def sit_down() -> None:
        with run.sitting():
            run.check()

    with pytest.raises(GuardStop, match="step-000001 was refuted"):
        sit_down()
    proofs = {event["checkpoint"]: event["outcome"] for event in events(run.config, "proof")}
    assert proofs == {name: str(each.outcome) for name, each in found.items() if isinstance(each, Verdict)}
    also = " ".join(event["reason"] for event in events(run.config, "also found"))
    assert "step-000003 was refuted" in also
    assert isinstance(second, Verdict) or str(second) in also


def test_a_signal_in_the_middle_of_a_line_is_noted_like_any_other(run: Run):
    class Screen(io.RawIOBase):
        lines = 0

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.lines += 1
            if self.lines == 1:
                signal.raise_signal(signal.SIGTERM)
            return len(data)

    screen = Screen()
    out = io.TextIOWrapper(io.BufferedWriter(screen))
    run.say = lambda text: print(text, file=out, flush=True)
    with run.interruptible():
        run.say("step 1")
    assert (run.interrupted, screen.lines) == (signal.SIGTERM, 1)


def test_off_the_main_thread_signals_stay_whose_they_were(run: Run):
    """A notebook or a server calls recipes in threads, where Python lets nobody listen for signals."""
    before, inside = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with run.interruptible():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]
    with run.interruptible():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_error_on_the_way_out_is_not_lost(run: Run, monkeypatch: pytest.MonkeyPatch):
    def close() -> None:
        raise StoreError("the last save failed as well")

    monkeypatch.setattr(run._saver, "close", close)

    def fail() -> None:
        with run.sitting():
            raise GuardStop("the first error")

    with pytest.raises(GuardStop, match="the first error"):
        fail()
    assert [event["reason"] for event in events(run.config, "also found")] == ["the last save failed as well"]
    assert [event["reason"] for event in events(run.config, "stopped")] == ["the first error"]

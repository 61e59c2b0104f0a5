"""Run: a folder with config.yaml, ledger.jsonl, metrics.jsonl and checkpoints/, and what every recipe writes into it.

Saving and proving happen beside training; a failed save or a refuted proof comes back at the next step.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from assay.errors import ArtifactError, AssayError, GuardStop, UsageError
from assay.guard.proof import Prover
from assay.guard.proof_subject import DEFAULT_SAMPLING, ProofSampling
from assay.guard.proving_process import PROVING_PROCESSES
from assay.guard.resume_checks import check_kept_checkpoints, check_newest_checkpoint, check_own_checkpoint
from assay.guard.training_guards import stop_if_refuted
from assay.model.chat_template import write_day
from assay.recipes.child_runs import signals_handled
from assay.recipes.remote_run import RemoteRun, restore_run
from assay.recipes.save_pace import LITTLE
from assay.recipes.witness_records import pending_looks, pending_records
from assay.statistics.known_answers import check_statistics
from assay.store import durable
from assay.store.checkpoint import (
    MANIFEST,
    Checkpoint,
    Contents,
    delete_old_checkpoints,
    latest_checkpoint,
    open_checkpoint,
    step_folder,
    step_folders,
)
from assay.store.ledger import Event, Ledger, read_chain
from assay.store.saving import BackgroundSaver
from assay.strict_json import parse_yaml, read_json_lines, read_small_file
from assay.verdict import Outcome, Verdict, overall, without_optional

TELL_EVERY = 5.0  # seconds
WORTH_SAYING = 60.0  # seconds of loop; shorter ones say nothing of how it would go on
FEW = 3  # checkpoints: the first and the last come anyway
WRITTEN_EVERY = 50  # judgements of a step or rollout between two that are written down while they prove
_SHOWN = 4  # options that differ, where a folder holds another run
# How long to go on, and where, may change between sessions; what is learned, and from what, may not.
FREE = {"minutes", "tokens", "device", "gpus", "process_timeout", "replay_steps", "replica_steps", "out", "remote", "json", "resume",
        "probe_samples", "witness", "early_stopping_patience", "early_stopping_threshold", "track", "track_checkpoints", "quiet"}
PARTS = ("open", "compile", "preflight", "steps", "evaluation", "saving", "proving", "hand-over")  # of a run's wall time


CHECKING_PARTS = ("preflight", "evaluation", "saving", "proving")  # those in which nothing is learned


class TimeSpent:
    """A run is in one phase after another; a part takes its seconds out of the phase, or of the part, that it lies in.

    For the loop's own thread: what is written and proven beside it costs the run only what it waits for.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._now, self._within = now, ["open"]
        self._since = now()

    def phase(self, name: str) -> None:
        self._settle()
        self._within[0] = name

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._settle()
        self._within.append(name)
        try:
            yield
        finally:
            self._settle()
            self._within.pop()

    def so_far(self) -> dict[str, float]:
        """Seconds of every part there was, in the order in which a run has them."""
        self._settle()
        named = [*PARTS, *(name for name in self.seconds if name not in PARTS)]
        return {name: round(self.seconds[name], 3) for name in named if name in self.seconds}

    def checks_words(self) -> str:
        """The share of the time so far that was spent waiting for checks, saves and proofs, in words."""
        spent = self.so_far()
        return f"checks {sum(spent.get(name, 0.0) for name in CHECKING_PARTS) / max(sum(spent.values()), 1e-9):.0%}"

    def sentence(self) -> str:
        spent = self.so_far()
        return f"{sum(spent.values()):.1f} s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items())

    def _settle(self) -> None:
        now, name = self._now(), self._within[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


class SaveCost:
    """How long the loop of one session stood still for its checkpoints, and for copies of the best weights in memory. What a proof takes
    beside the loop is not in it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.seconds, self.times, self.copies, self.latest, self._began = 0.0, 0, 0, 0.0, time.monotonic()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        with self._standing():
            yield
        self.times += 1

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        with self._standing():
            yield
        self.copies += 1

    @contextlib.contextmanager
    def _standing(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.latest = time.monotonic() - began
        self.seconds += self.latest

    @property
    def loop(self) -> float:
        return time.monotonic() - self._began

    def advice(self, steps: int) -> str | None:
        """Advice on how often to save, after this many steps since the start or resume."""
        loop = self.loop
        if loop < WORTH_SAYING or self.times <= FEW or self.seconds <= LITTLE * loop:
            return None
        each = self.seconds / self.times
        apart = each / LITTLE
        return (f"saving held the loop up for {self.seconds:.0f} s of {loop:.0f}, {each:.2g} s a checkpoint: {self.seconds / loop:.0%}; "
                f"with one every {_round_up(apart * steps / loop)} steps, or {apart:.0f} s, it would be {LITTLE:.0%}")


def _round_up(steps: float) -> int:
    """Round up to two digits: it is advice."""
    digits = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return math.ceil(steps / digits) * digits


class Run:
    """One execution of a recipe. `kept` is how many checkpoints stay besides the best; `probing` is how its proofs sample texts."""

    def __init__(self, folder: Path, config: Any, *, kept: int = 2, say: Callable[[str], None], probing: ProofSampling = DEFAULT_SAMPLING,
                 spent: TimeSpent | None = None, remote: RemoteRun | None = None):
        self.folder, self.config, self.kept, self.say = folder, config, kept, say
        self.checkpoints = folder / "checkpoints"
        self.interrupted: int | None = None
        self.going_on_from = 0
        self._told = 0.0  # when progress was told last
        self._paced: tuple[int, float] | None = None  # the first step of this process that was told, and when
        self.needed: set[str] = set()  # digests that retention may not delete
        self.unsaved: dict[int, str] = {}  # steps that scored better than all that was kept and were not kept, or refuted, and why
        self._saved: list[Checkpoint] = []  # beside the loop, and not yet written down
        self._retired: list[Path] = []  # likewise
        self._kept: list[tuple[Verdict, bool]] = []  # likewise, of what had to stay, and whether all of it is there
        self._saver, self._prover, self.probing = BackgroundSaver(), Prover(), probing
        self._tidying: Future[None] | None = None
        self.settle_records: Callable[[], None] = _nothing  # waits for kept steps that are being written
        self.close_records: Callable[[], None] = _nothing  # and ends their thread
        self.save_waiting: Callable[[], None] = _nothing  # saves the best weights, where they wait in memory
        self.save_cost, self.spent = SaveCost(), spent or TimeSpent()
        self.spent.phase("preflight")
        self._told_time = False
        self._looping = True  # until `end_loop`
        self._finished = False  # True between `finish` and `settle_proofs`
        self._best_at_end: Path | None = None
        self._replayed_early: list[Path] = []  # kept steps whose replays the proof of the last checkpoint speaks of
        self.headroom = 0  # bytes of the GPU that the run will still take: a proof leaves them free
        self._judged_often = 0
        self.memory_seen = 0  # bytes of the GPU, what CUDA graphs hold counted too
        self.remote, self._best = remote, dict[Path, Path | None]()  # of each checkpoint, what was best when it was saved
        durable.require_outside_checkpoints(folder / "config.yaml")
        durable.make_folder(folder)
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.ledger.claim()  # of two that begin at once one is refused, before it writes its options over the other's
        with contextlib.ExitStack() as refused:
            refused.callback(self.ledger.close)
            self.resumed = _settle_config(folder / "config.yaml", config)
            refused.pop_all()
        self.metrics_file = folder / "metrics.jsonl"
        self.ledger.append(Event.RESUME if self.resumed else Event.START, recipe=type(config).__name__,
                           config=plain(dataclasses.asdict(config)))

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, to resume from; None where the run begins, and earlier measurements are then discarded.

        Checkpoints that are passed over are reported, recorded and moved out of the way, because their steps will be taken and saved
        again.
        """
        newest_first = reversed(step_folders(self.checkpoints))
        found, passed_over = latest_checkpoint(self.checkpoints) if self.resumed else (None, [])
        for path, sentence in zip(newest_first, passed_over, strict=False):
            self.say(f"passed over: {sentence}")
            self.ledger.append(Event.PASSED_OVER, reason=sentence)
            self.set_aside(path)
        if found is None:
            self.rewind(0)
        else:
            changed = changed_options(self.config, found.facts.get("run_config") or {})
            own = check_own_checkpoint(found, read_chain(self.ledger.path).events, changed)
            self.judge(Event.NEWEST, [check_newest_checkpoint(self.checkpoints), own])
        return found

    def set_aside(self, path: Path) -> None:
        """Move a path out of the way of what is about to be written there; nothing is deleted."""
        if path.exists():
            names = (path.with_name(f"earlier-{number}-{path.name}") for number in itertools.count(1))
            aside = next(name for name in names if not name.exists())
            path.rename(aside)
            self.say(f"{path.name} is kept as {aside.name}")
            self.ledger.append(Event.SET_ASIDE, path=path.name, kept_as=aside.name)

    def rewind(self, step: int) -> None:
        """Metrics of steps that were taken after the checkpoint are about to be taken again. What a proof refuted counts as not saved."""
        self.going_on_from = step
        self.unsaved = {each: why for each, why in unsaved_on_record(read_chain(self.ledger.path).events).items() if each <= step}
        for folder in step_folders(self.checkpoints):
            if _step_of(folder) not in self.unsaved and _quarantined(folder):
                self._leave_out(_step_of(folder), "its proof refuted it", f"{folder.name} is quarantined, and is not handed over")
        rewrite_json_rows(self.metrics_file, [row for row in read_json_lines(self.metrics_file) if row["step"] < step])

    @property
    def witnesses(self) -> bool:
        """Whether the run's proofs replay the steps that were kept for them."""
        return self._prover.witnesses

    @property
    def proves(self) -> bool:
        """Whether the run's checkpoints are proven."""
        return self._prover.proves

    def rehearse_proofs(self, model: Path) -> None:
        """Warm up the proving processes, on a GPU, on the starting model while the run prepares its first step."""
        if self.probing.device != "cpu":
            self._prover.rehearse(model, self.probing, self.headroom)

    def log(self, kind: Event, **facts: Any) -> None:
        """Append one line to the ledger. The one that says what a run came to is its last."""
        if kind is Event.HAND_OVER:
            self._tidied()
            self._tell_time()
        self.ledger.append(kind, **facts)

    def _tell_time(self) -> None:
        """Print where the time went, once, at the end of a session."""
        if not self._told_time:
            self._told_time = True
            self.ledger.append(Event.TIME, seconds=self.spent.so_far())
            self.say(self.spent.sentence())

    def judge(self, what: Event, verdicts: list[Verdict]) -> None:
        """Verdicts are written down, whatever they say; one that refutes stops the run."""
        self.ledger.append(what, verdicts=plain([verdict.to_json() for verdict in verdicts]))
        stop_if_refuted(verdicts)

    def judge_often(self, what: Event, verdicts: list[Verdict]) -> None:
        """Judge verdicts that come at every step: the first since the start and every so many are written down, and a refuted one always
        is.
        """
        against = any(verdict.outcome is Outcome.REFUTED for verdict in verdicts)
        self._judged_often += 1
        if against or self._judged_often % WRITTEN_EVERY <= 2:  # a rollout and its step
            self.judge(what, verdicts)
        else:
            stop_if_refuted(verdicts)

    def preflight(self, verdicts: list[Verdict]) -> None:
        """Print and judge the verdicts of the preflight, with those on the arithmetic of all that will be claimed."""
        verdicts = [*verdicts, check_statistics()]
        self.say("\n".join(f"  {verdict}" for verdict in verdicts))
        self.judge(Event.PREFLIGHT, verdicts)

    def record(self, step: int, **metrics: float | int | str | None) -> None:
        """Append one line to metrics.jsonl. A number that is not finite is written as a word, never as a missing value."""
        append_json_rows(self.metrics_file, [{"step": step, **plain(metrics)}])

    def consumed(self) -> dict[int, str]:
        """The data that each step of the run, over all restarts, recorded as read."""
        return {row["step"]: row["data"] for row in read_json_lines(self.metrics_file) if "data" in row}

    def save(self, step: int, contents: Contents | Callable[[], Contents], *, best: Path | None, against: str | None = None) -> Path:
        """Snapshot now; write, retire what is old and prove beside the loop. Raises what an earlier save or proof found.

        The ledger says that a save begins before it does, and its digest when the loop next looks: what it never named is not the run's.

        Nothing is retired while a proof is reading, which is asked when it is about to be: a save that this one waited for may just
        have begun its own. What else may go is settled now.
        """
        self.check()
        where, needed = step_folder(self.checkpoints, step), frozenset(self.needed)
        self._best[where] = best

        def after(written: Checkpoint) -> None:
            self._saved.append(written)
            if not self._prover.busy:
                self._retire(best, needed)
            self.settle_records()
            self._prover.start(written.folder, against=against, probing=self.probing, beside=self._looping, headroom=self.headroom,
                               records=self._led_to(step))

        self._saver.make_room(contents, self.headroom)
        self._write_down_saved()
        self.ledger.append(Event.SAVE, step=step, checkpoint=where.name)
        self._saver.save(where, contents, after=after, headroom=self.headroom)
        return where

    def _led_to(self, step: int) -> list[Path]:
        """Records that the proof of this step's checkpoint speaks of."""
        kept = dict.fromkeys([*self._replayed_early, *pending_records(self.folder)])  # a replay that is done is pending no more
        return [*(record for record in kept if _step_of(record) <= step), *pending_looks(self.folder, step)]  # others came since

    def copy(self, contents: Contents) -> Callable[[], Contents]:
        """A copy in memory, which `save` takes later."""
        self.check()
        return self._saver.copy(contents, headroom=self.headroom)

    def pass_over(self, step: int, why: str) -> None:
        """The evaluation of this step is better than all that are kept, and its weights are not kept: say so, and write it down."""
        self._leave_out(step, why, f"step {step} scored better than all that is saved, and was not saved: {why}")

    def _leave_out(self, step: int, why: str, sentence: str) -> None:
        self.unsaved[step] = why
        self.say(sentence)
        self.log(Event.UNSAVED, step=step, why=why, reason=sentence)

    @property
    def busy_beside(self) -> bool:
        """Whether a checkpoint is being written or proven, or waits for its proof, while the loop goes on."""
        return self._saver.busy or self._prover.busy

    def check(self) -> None:
        """Surface what happened beside the loop. Never waits."""
        self._saver.check()
        self._write_down_saved()
        self._write_down_retired()
        self._judge_proofs(self._prover.finished())
        self._write_down_sent()

    def settle(self, *, proofs: bool = False) -> None:
        """Wait until what was saved lies on the disk; with `proofs`, until it is proven too."""
        self._saver.wait()
        self._write_down_saved()
        if proofs:
            self._prover.wait_no_longer()
        while proofs and self._prover.busy:
            self._judge_proofs(self._prover.finished())
            time.sleep(0.05)

    def end_loop(self, steps: int, slowed: float) -> None:
        """Record what saving cost, after this many steps since the start or resume, which took so many seconds longer beside it; proofs
        may use more of the machine from here on."""
        self._looping = False
        self._prover.wait_no_longer()
        if self.interrupted is None:  # else no checkpoint need follow
            self._replayed_early = pending_records(self.folder)
            self._prover.replay_early(self._replayed_early, self.probing, self.headroom)
        self.spent.phase("proving")
        cost = self.save_cost
        self.ledger.append(Event.SAVING, seconds=cost.seconds, checkpoints=cost.times, copies=cost.copies, slowed=slowed, loop=cost.loop)
        if (advice := cost.advice(steps)) is not None:
            self.say(advice)

    def finish(self, best: Path | None) -> None:
        """Wait for the last save. Its proof goes on: `settle_proofs` waits for that."""
        with self.spent.part("saving"):
            self._saver.close()
            self.settle_records()
        self._write_down_saved()
        self._write_down_retired()
        if self.interrupted is None:
            self._prove_what_was_cut_short(best)
        self._finished, self._best_at_end = True, best

    def _prove_what_was_cut_short(self, best: Path | None) -> None:
        """Begin anew the proofs of checkpoints that stay and whose own an earlier session did not live to see."""
        folders = step_folders(self.checkpoints)
        for folder in folders:
            if folder not in self._best and folder in (best, *folders[-self.kept:]) and _unmarked(folder):
                records = self._led_to(_step_of(folder))
                self._prover.start(folder, probing=self.probing, beside=False, headroom=self.headroom, records=records)

    def settle_proofs(self) -> None:
        """Wait for every proof once the run has finished, and judge it; then old checkpoints are retired beside what follows. What stays
        is hashed for that, which takes seconds; the run ends when it is done."""
        finished, self._finished = self._finished, False
        if not finished:
            return
        self._judge_proofs(self._prover.close())
        self._wait_for_remote()
        if self._best_at_end is not None:
            thread = ThreadPoolExecutor(1, "retire")
            self._tidying = thread.submit(self._retire, self._best_at_end, frozenset(self.needed))
            thread.shutdown(wait=False)

    def _tidied(self) -> None:
        tidying, self._tidying = self._tidying, None
        if tidying is not None:
            tidying.result()
            self._write_down_retired()

    def _retire(self, best: Path | None, needed: Iterable[str]) -> None:
        """Retire old checkpoints. Of those that were there and had to stay, it is asked afterwards whether they are there and verify."""
        before = step_folders(self.checkpoints)
        sending = set() if self.remote is None else self.remote.holding()
        gone = delete_old_checkpoints(self.checkpoints, self.kept, best, sending | set(needed))
        self._retired += gone
        if gone:
            due = [path for path in before if path in before[-self.kept :] or path == best]
            self._kept.append((check_kept_checkpoints(due), all(path.is_dir() for path in due)))

    def _write_down_saved(self) -> None:
        """Write finished saves into the ledger, in the loop's own thread: a ledger has one writer."""
        while self._saved:
            written = self._saved.pop(0)
            self.ledger.append(Event.SAVED, checkpoint=written.folder.name, digest=written.digest)

    def _write_down_retired(self) -> None:
        while self._retired:
            self.ledger.append(Event.RETIRE, checkpoint=self._retired.pop(0).name)
        while self._kept:
            verdict, there = self._kept.pop(0)
            if verdict.outcome is Outcome.REFUTED and there:  # damaged, which no rotation does: newer ones stand, and training goes on
                self.say(str(verdict))
                self.log(Event.WARNING, reason=str(verdict))
            else:
                self.judge(Event.KEPT, [verdict])

    def _judge_proofs(self, proofs: Iterable[tuple[Path, list[Verdict]]]) -> None:
        for folder, verdicts in proofs:
            outcome = overall(without_optional(verdicts))
            self.ledger.append(Event.PROOF, checkpoint=folder.name, outcome=str(outcome), verdicts=plain([v.to_json() for v in verdicts]))
            if outcome is Outcome.REFUTED:
                reasons = "; ".join(str(v) for v in verdicts if v.outcome is Outcome.REFUTED)
                raise GuardStop(f"{folder.name} was refuted by its proof and is quarantined: {reasons}. Earlier checkpoints stand")
            told = [v for v in verdicts if v.outcome is not Outcome.PROVEN and (v in without_optional(verdicts) or v.evidence.get("bad"))]
            self.say(f"{folder.name}: {outcome}" + (f" ({'; '.join(map(str, told))})" if told else ""))
            self._offer_to_remote(folder)

    def _offer_to_remote(self, folder: Path) -> None:
        """Offer a checkpoint to the remote store, with what a run that resumes from it elsewhere would need: the best so far, and what
        later checkpoints refer to."""
        if self.remote is not None:
            best = self._best.get(folder)
            held = step_folders(self.checkpoints) if self.needed else []
            referred = [path for path in held if durable.hash_file(path / MANIFEST) in self.needed]
            self.remote.offer(folder, [*referred, *([] if best is None else [best])])

    def _wait_for_remote(self) -> None:
        if self.remote is not None:
            with self.spent.part("remote"):
                self.remote.wait()
            self._write_down_sent()

    def _write_down_sent(self) -> None:
        for verdict in [] if self.remote is None else self.remote.told():
            self.say(str(verdict))
            self.log(Event.REMOTE, verdicts=[verdict.to_json()])

    def progress(self, done: int, of: int | None, what: str, seconds: float) -> None:
        """A line every few seconds: how far it is, how fast, how long it will take, in how much memory, and what its checks cost."""
        now = time.monotonic()
        first, began = self._paced = self._paced or (done, now)
        if now - self._told >= TELL_EVERY or done == of:
            self._told = now
            pace = pace_words(done - first, now - began, None if of is None else of - done) if done > first else []
            memory = memory_words(self.memory_seen)
            words = [f"step {done}{f' of {of}' if of else ''}", what, f"{seconds:.0f} s", *pace, memory, self.spent.checks_words()]
            self.say("  ".join(words))

    @contextlib.contextmanager
    def sitting(self) -> Iterator[None]:
        """Session of a run, around everything: what ends the run early is written down, once what was begun beside it is done."""
        with PROVING_PROCESSES.keeping():
            self._prover.start_early(self.probing.device)
            try:
                yield
                self.settle_proofs()
                self._tidied()
            except AssayError as error:
                self._stopped(error)
                raise
            finally:
                self._tell_time()
                self.ledger.close()
                self.close_records()
                self._let_trainer_go()
                if self.remote is not None:
                    self.remote.close()

    def _let_trainer_go(self) -> None:
        """Drop what the trainer left here: it holds the run, and a circle would keep a finished run's model on the GPU."""
        self.settle_records = self.close_records = self.save_waiting = _nothing

    def _stopped(self, error: AssayError) -> None:
        for wait in (self.save_waiting, self._saver.close, self._tidied, self._write_down_saved, self._write_down_retired,
                     lambda: self._judge_proofs(self._prover.close())):
            self._also(wait)
        while self._prover.busy:  # those behind one that was refuted
            self._also(self.check)
        self._wait_for_remote()
        good, _ = latest_checkpoint(self.checkpoints)
        stands = good.folder.name if good else None
        self._tell_time()
        self.ledger.append(Event.STOPPED, reason=str(error), exit_code=error.exit_code, stands=stands)
        self.say(f"stopped; {stands or 'no checkpoint'} stands")

    def _also(self, wait: Callable[[], None]) -> None:
        """Wait for what was begun, and log its error: the first error is the one to raise; what is found on the way out must not be lost
        either."""
        try:
            wait()
        except AssayError as also:
            self.ledger.append(Event.ALSO_FOUND, reason=str(also))
            self.say(str(also))

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C set `interrupted`; the recipe saves and leaves at the next step. A second one is obeyed at once.

        Only the main thread hears signals: in another, whoever called the recipe may set `interrupted`.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, _: FrameType | None) -> None:
            if self.interrupted is not None:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self.interrupted = number
            with contextlib.suppress(RuntimeError):  # it came in the middle of a line: Python cannot print another one there
                self.say(f"{signal.Signals(number).name}: saving, then stopping (again to stop at once)")

        with signals_handled(note):
            yield


def unsaved_on_record(events: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Steps that a ledger says were not saved though they scored better than what was, and why; one that was taken again and saved is
    none."""
    found: dict[int, str] = {}
    for event in events:
        if event["kind"] == Event.UNSAVED:
            found[event["step"]] = event["why"]
        elif event["kind"] == Event.SAVE:
            found.pop(event["step"], None)
    return found


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _quarantined(folder: Path) -> bool:
    with contextlib.suppress(AssayError):  # a damaged one is passed over elsewhere
        return open_checkpoint(folder, verify=False).quarantined is not None
    return False


def _unmarked(folder: Path) -> bool:
    """Whether no proof has come to an end for a checkpoint."""
    with contextlib.suppress(AssayError):
        found = open_checkpoint(folder, verify=False)
        return found.hallmark is None and found.quarantined is None
    return False


def _nothing() -> None:
    """What a run does where no trainer has asked for more."""


@contextlib.contextmanager
def open_run(config: Any, say: Callable[[str], None], device: str, spent: TimeSpent | None = None) -> Iterator[Run]:
    """The run in --out, begun or gone on with. A request that is refused before this leaves no folder. `spent` counts from its start."""
    folder, remote = Path(config.out), None
    if config.remote is not None:
        restore_run(config.remote, folder, lambda data: changed_options(config, parse_yaml(data, where=config.remote)), say)
        remote = RemoteRun(config.remote, folder)
    run = Run(folder, config, say=say, probing=ProofSampling(config.probe_samples, device), spent=spent, remote=remote)
    try:
        with run.sitting():
            yield run
    finally:
        write_day(None)  # what is rendered after the run is of its own day


def pace_words(steps: int, seconds: float, left: int | None) -> list[str]:
    """Steps a second, and how long the rest takes at that rate."""
    rate = steps / max(seconds, 1e-9)
    return [f"{rate:.3g} steps/s"] + ([f"{duration(left / rate)} left"] if left else [])


def duration(seconds: float) -> str:
    """12 s, 3:05 min, 2:14 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    high, low, unit = (*divmod(round(seconds), 60), "min") if seconds < 6000 else (*divmod(round(seconds / 60), 60), "h")
    return f"{high}:{low:02d} {unit}"


def memory_words(seen: int = 0) -> str:
    """The most that this process has taken, of its GPU where it has one, or what was `seen` there."""
    if torch.cuda.is_initialized():
        return f"{max(seen, torch.cuda.max_memory_allocated()) / (1 << 30):.1f} GiB of GPU"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20):.1f} GiB"


def print_line(text: str) -> None:
    print(text, flush=True)


def plain(value: Any) -> Any:
    """Strict JSON: paths as text, tuples as lists, and what is not finite as the word for it."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def append_json_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A disk that is full is a StoreError like any other: it is written down how the run ended."""
    with durable.as_store_error(path), path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def rewrite_json_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.exists():
        durable.replace_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _settle_config(path: Path, config: Any) -> bool:
    """Write the configuration once; a later session must be the same run. Returns whether there was an earlier one."""
    import yaml

    values = plain(dataclasses.asdict(config))
    if not path.exists():
        durable.replace_file(path, yaml.safe_dump(values, sort_keys=False).encode())
        return False
    try:
        earlier = parse_yaml(read_small_file(path), where=str(path))
    except ArtifactError:
        earlier = None
    if not isinstance(earlier, dict) or earlier.keys() - values.keys():
        raise UsageError(f"{path}: these are not the options of a run, so it cannot be gone on with; give another --out")
    if changed := changed_options(config, earlier):
        said = ", ".join(changed[:_SHOWN])
        said += f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise UsageError(f"{path.parent} is another run: {said}; give the same options, or another --out")
    return True


def changed_options(config: Any, earlier: Mapping[str, Any]) -> list[str]:
    """The options in which `earlier` differs from `config`, in words; a missing one has its default."""
    defaults = plain({each.name: each.default for each in dataclasses.fields(config) if each.default is not dataclasses.MISSING})
    values, was = plain(dataclasses.asdict(config)), defaults | dict(earlier)
    return [f"{name} was {was.get(name)!r}, now {values[name]!r}" for name in values if name not in FREE and was.get(name) != values[name]]

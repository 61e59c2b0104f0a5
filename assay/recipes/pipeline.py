"""Pipeline: stages run in their order, each a process of its own, with gates between them; what is unchanged is not run again.

`OUT/NAME` is what the stage NAME wrote and `OUT/logs/NAME.log` what it said. `OUT/pipeline.json` records how each stands, with the digests
of what it read and made, and `OUT/pipeline.jsonl` is the ledger. The same command resumes where it stopped; what another command made in a
stage's place is moved to `OUT/earlier`, and nothing is deleted.
"""

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from assay.errors import ArtifactError, AssayError, GuardStop, UsageError
from assay.recipes.child_runs import pass_on_output, signals_handled
from assay.recipes.pipeline_plan import Gate, PipelinePlan, Stage
from assay.store import durable
from assay.store.checkpoint import HALLMARK, QUARANTINE, open_checkpoint
from assay.store.ledger import Event, Ledger
from assay.store.model_cache import cached_model
from assay.store.remote import is_url
from assay.strict_json import read_json
from assay.verdict import Outcome, Verdict, overall, proven, refuted, unproven

StageState = Literal["not begun", "done before", "running", "done", "failed", "stopped at a gate", "out of budget"]
NOT_MADE = {HALLMARK, QUARANTINE, "report.html"}  # said of what a stage made, by whoever comes later
NOT_HANDED_OVER = {"checkpoints"}  # of a run: what counts is what it hands over, and its ledger
TIME_TO_SAVE = 120.0  # seconds for a save, once a stage was told to stop
PR_SET_PDEATHSIG = 1  # of Linux's prctl
MEANINGS = {1: "it failed", 2: "it was refused", 3: "a verdict went against it", GuardStop.exit_code: "stopped by a guard",
            130: "interrupted", 143: "interrupted"}
_RECORD = {"format": range(1, 2), "stages": [{"name": str, "state": str, "seconds": float, "sittings": int, "key?": (str, None),
                                              "made?": (str, None)}], "wall?": float}


@dataclass(frozen=True)
class StageRecord:
    """How a stage stands. `key` is the digest of what it was asked and of all that it read, `made` of what it wrote."""

    name: str
    verb: str
    command: list[str]
    out: str
    model: str | None
    log: str
    state: StageState = "not begun"
    sentence: str = ""
    exit_code: int | None = None
    seconds: float = 0.0  # over all sessions
    sittings: int = 0
    key: str | None = None
    made: str | None = None
    gates: list[dict[str, Any]] = field(default_factory=list)
    ran_before: bool = False  # unchanged since an earlier session


class PipelineRecord:
    """pipeline.json, written anew whenever a stage's standing changes, and the ledger, whose lock makes this the one writer."""

    def __init__(self, plan: PipelinePlan, show: Callable[[], object]):
        durable.require_outside_checkpoints(plan.out / "pipeline.json")
        durable.make_folder(plan.out / "logs")
        self.plan, self.path, self.show = plan, plan.out / "pipeline.json", show
        self.ledger = Ledger(plan.out / "pipeline.jsonl")
        self.ledger.claim()
        document = read_json(self.path, _RECORD) if self.path.exists() else {"stages": []}
        earlier = {one["name"]: one for one in document["stages"]}
        self._lock, self._began, self._wall_before = threading.RLock(), time.monotonic(), document.get("wall", 0.0)
        self.stages = {stage.name: _recalled(stage, plan.out, earlier.get(stage.name)) for stage in plan.stages}
        self.append(Event.RESUME if earlier else Event.START, recipe="pipeline", file=plan.file)
        self.write()

    def put(self, record: StageRecord) -> None:
        with self._lock:
            self.stages[record.name] = record
            self.write()

    def append(self, event: Event, **facts: Any) -> None:
        with self._lock:
            self.ledger.append(event, **facts)

    def write(self) -> None:
        document = {"format": 1, "file": self.plan.file, "purpose": self.plan.purpose,
                    "wall": round(self._wall_before + time.monotonic() - self._began, 1),
                    "stages": [asdict(self.stages[stage.name]) for stage in self.plan.stages]}
        durable.replace_file(self.path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
        self.show()

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.stages.values())


def _recalled(stage: Stage, out: Path, earlier: dict[str, Any] | None) -> StageRecord:
    """Recorded key and times of a stage; whether it still stands is asked when its turn comes."""
    fresh = StageRecord(stage.name, stage.verb, ["assay", stage.verb, *stage.words], stage.out, stage.model,
                        str(out / "logs" / f"{stage.name}.log"))
    if earlier is None:
        return fresh
    state: StageState = "done before" if earlier["state"] in ("done", "done before", "stopped at a gate") else "not begun"
    return replace(fresh, state=state, key=earlier.get("key"), made=earlier.get("made"), seconds=earlier["seconds"],
                   sittings=earlier["sittings"], sentence=str(earlier.get("sentence", "")) if earlier["state"].startswith("done") else "")


# ---------------------------------------------------------------- the whole


def run_pipeline(plan: PipelinePlan, say: Callable[[str], None], show: Callable[[], object] = lambda: None, jobs: int = 1) -> int:
    """The exit code: 0 where every stage is done and every gate holds, else that of what stopped it. `show` is called at every change."""
    record = PipelineRecord(plan, show)
    with contextlib.closing(record.ledger), _stage_lock(plan.out / "logs" / "stage.lock", say) as lock:
        code = _run_stages(record, StageProcesses(say, lock), say, jobs)
        record.write()
        return code


def _run_stages(record: PipelineRecord, processes: "StageProcesses", say: Callable[[str], None], jobs: int) -> int:
    """Run the stages in the file's order, each once the gates of all that it needs hold, at most `jobs` at a time. Where one is stopped,
    none begins."""

    def work(stage: Stage) -> int:
        return run_stage(stage, record, processes, say) or pass_gates(stage, record, processes, say)

    left, running, codes = list(record.plan.stages), dict[Future[int], Stage](), dict[str, int]()
    with processes.forwarding_signals(), ThreadPoolExecutor(jobs) as pool:
        while True:
            ready = [stage for stage in left if all(codes.get(name) == 0 for name in stage.needs)]
            for stage in ready[:jobs - len(running)] if processes.interrupted is None and not any(codes.values()) else ():
                left.remove(stage)
                running[pool.submit(work, stage)] = stage
            if not running:
                break
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                codes[running.pop(ended).name] = ended.result()
    if processes.interrupted is not None:
        return 128 + processes.interrupted
    return next(filter(None, codes.values()), 0)


def run_stage(stage: Stage, record: PipelineRecord, processes: "StageProcesses", say: Callable[[str], None]) -> int:
    """0 where it is done: now, or before and nothing has changed since, or been found against what it made."""
    now, key = record.stages[stage.name], stage_key(stage)
    unchanged = now.state == "done before" and now.key == key and now.made == digest_of_made(stage)
    against = quarantine_of(stage) if unchanged else None
    if against is not None:
        say(f"{stage.name}: run again: {against}")
    elif unchanged:
        say(f"{stage.name}: unchanged, not run again")
        record.put(replace(now, state="done", ran_before=True, exit_code=0))
        return 0
    same = now.key == key
    make_room(stage, record, say, same=same)
    now = replace(now, state="running", key=key, made=None, gates=[], ran_before=False, exit_code=None, sentence="it has begun",
                  seconds=now.seconds if same else 0.0, sittings=(now.sittings if same else 0) + 1)
    record.put(now)
    ended = processes.run(stage, Path(now.log), budget=_left(stage, record))
    state: StageState = "out of budget" if ended.out_of_budget else "failed" if ended.code else "done"
    made = digest_of_made(stage) if state == "done" else None
    if state == "done" and made is None:
        state, ended = "failed", replace(ended, code=1, sentence=f"it ended with 0, and {stage.out} is not there")
    record.append(Event.STAGE, stage=stage.name, command=now.command, exit_code=ended.code, sentence=ended.sentence,
                         seconds=round(ended.seconds, 3), key=key, made=made)
    record.put(replace(now, state=state, sentence=ended.sentence, exit_code=ended.code, seconds=now.seconds + ended.seconds, made=made))
    say(f"{stage.name}: {ended.sentence} ({ended.seconds:.1f} s)")
    return ended.code


def _left(stage: Stage, record: PipelineRecord) -> float | None:
    """Seconds of the stage's own budget or of the whole pipeline's, whichever ends first."""
    left = [budget - spent for budget, spent in ((stage.budget, record.stages[stage.name].seconds), (record.plan.budget, record.seconds))
            if budget is not None]
    return min(left, default=None)


def make_room(stage: Stage, record: PipelineRecord, say: Callable[[str], None], *, same: bool) -> None:
    """Clear the stage's place: what lies there stays only where the same command resumes it."""
    for place in (Path(stage.out), record.plan.out / f"{stage.name}.json"):
        ended = stage.kind.report is not None and (place / stage.kind.report).exists()  # and killed before that was noted
        if stage.verb == "fetch" or not os.path.lexists(place) or (same and stage.kind.goes_on and not ended):
            continue
        durable.make_folder(record.plan.out / "earlier")
        names = (record.plan.out / "earlier" / f"{number}-{place.name}" for number in itertools.count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        place.rename(aside)
        say(f"{stage.name}: what was there before is kept as {aside}")


# ---------------------------------------------------------------- digests


def stage_key(stage: Stage) -> str:
    """sha256 of verb, options as the file says them, and the bytes of every file, folder and model that they name."""
    read = [digest_of_path(_located(text, stage)) for text in stage.inputs if not is_url(text)]
    return hashlib.sha256(json.dumps([stage.verb, dict(stage.said), read], sort_keys=True, default=str).encode()).hexdigest()


def _located(text: str, stage: Stage) -> Path:
    path = cached_model(text) or Path(text)
    if not path.exists():
        raise ArtifactError(f"stage {stage.name}: {text} is not there, though the stage before it ended; look into its log")
    return path


def digest_of_made(stage: Stage) -> str | None:
    """Digest of what a stage wrote; None where nothing is there. What a run keeps for resuming is not counted."""
    place = (cached_model(stage.out) or Path(stage.out)) if stage.verb == "fetch" else Path(stage.out)
    return digest_of_path(place) if place.exists() else None


def quarantine_of(stage: Stage) -> str | None:
    """What was found against a stage's model since it was made; a digest of what it wrote leaves marks out."""
    try:
        marked = None if stage.model is None else open_checkpoint(cached_model(stage.model) or Path(stage.model), verify=False).quarantined
    except AssayError:  # nothing that could hold a mark
        return None
    return None if marked is None else f"{stage.model} is quarantined: {'; '.join(one['reason'] for one in marked['verdicts'])}"


def digest_of_path(path: Path) -> str:
    """sha256 over names and bytes, of a file or of everything in a folder; not of marks that a later proof leaves there."""
    if not path.is_dir():
        return durable.hash_file(path)
    digest = hashlib.sha256()
    for file in sorted(_files_in(path)):
        digest.update(f"{file.relative_to(path).as_posix()} {durable.hash_file(file)}\n".encode())
    return digest.hexdigest()


def _files_in(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        if entry.name.startswith((".", "earlier-")) or entry.name in NOT_MADE:
            continue
        if not entry.is_dir():
            yield Path(entry.path)
        elif entry.name not in NOT_HANDED_OVER:
            yield from _files_in(Path(entry.path))


# ---------------------------------------------------------------- gates


def pass_gates(stage: Stage, record: PipelineRecord, processes: "StageProcesses", say: Callable[[str], None]) -> int:
    """0 where all hold. They are asked anew in every session: a model may have been damaged since."""
    found = [check_gate(gate, stage, record, processes) for gate in stage.gates if processes.interrupted is None]
    if processes.interrupted is not None:  # an answer that was cut short is none
        return 0
    for verdict in found:
        say(f"{stage.name}: {verdict}")
        record.append(Event.GATE, stage=stage.name, verdict=verdict.to_json())
    held = all(verdict.outcome is Outcome.PROVEN for verdict in found)
    now = replace(record.stages[stage.name], gates=[verdict.to_json() for verdict in found])
    if not held:
        against = next(verdict for verdict in found if verdict.outcome is not Outcome.PROVEN)
        now = replace(now, state="stopped at a gate", sentence=f"require: {against.check}: {against.reason}")
    record.put(now)
    return 0 if held else 3


def check_gate(gate: Gate, stage: Stage, record: PipelineRecord, processes: "StageProcesses") -> Verdict:
    if gate.kind in ("proven", "not refuted"):
        return check_proven(gate, stage, record, processes)
    return check_shown(gate, stage, record, processes)


def check_proven(gate: Gate, stage: Stage, record: PipelineRecord, processes: "StageProcesses") -> Verdict:
    """Check that a stage's model is proven: by the hallmark, with every byte hashed again; where there is none, by a proof here and now."""
    if stage.verb == "prove" or stage.out.endswith(".gguf"):  # a GGUF file has no room for a hallmark: by what its export proved
        return _proof_verdict(gate, read_json(_printed_to(stage), (dict, list)))
    assert stage.model is not None, "the plan lets only stages with a model have this gate"
    if marked := _by_its_mark(gate, cached_model(stage.model) or Path(stage.model)):
        return marked
    asked = processes.ask(stage, ["prove", stage.model, "--json"], record.plan.out)
    if asked.document is None:
        return refuted(gate.words, f"{stage.model}: {asked.sentence}")
    return _proof_verdict(gate, asked.document)


def _by_its_mark(gate: Gate, model: Path) -> Verdict | None:
    """Verdict by a model's hallmark or quarantine; None where there is neither, or nothing that could hold one."""
    try:
        checkpoint = open_checkpoint(model)
    except AssayError:
        return None
    if checkpoint.quarantined:
        return refuted(gate.words, f"{model} is quarantined: {'; '.join(one['reason'] for one in checkpoint.quarantined['verdicts'])}")
    if not checkpoint.hallmark:
        return None
    return proven(gate.words, f"{model} has its hallmark ({checkpoint.digest[:12]}), and every byte is as it was proven")


def _proof_verdict(gate: Gate, document: Any) -> Verdict:
    """Verdict of `assay prove --json` on one artifact, or on several."""
    each = document if isinstance(document, list) else [document]
    outcomes = [Outcome(one["outcome"]) for one in each]
    against = [f"{verdict['check']}: {verdict['reason']}" for one in each for verdict in one["verdicts"] if verdict["outcome"] != "PROVEN"]
    reason = f": {against[0]}" if against and {*outcomes} != {Outcome.PROVEN} else ""
    words = f"{', '.join(one['path'] for one in each)}: {', '.join(outcomes)}{reason}"
    if gate.kind == "not refuted" and Outcome.REFUTED not in outcomes:
        return proven(gate.words, words)
    if Outcome.REFUTED in outcomes:
        return refuted(gate.words, words)
    return proven(gate.words, words) if set(outcomes) == {Outcome.PROVEN} else unproven(gate.words, words)


def check_shown(gate: Gate, stage: Stage, record: PipelineRecord, processes: "StageProcesses") -> Verdict:
    """Check that an improvement is shown: by the comparison that the stage made, or that of its evaluation with the other's."""
    if stage.verb == "compare":
        document: Any = read_json(Path(stage.out))
    else:
        other = next(one for one in record.plan.stages if one.name == gate.than)
        metric = [] if gate.on in (stage.said.get("task"), other.said.get("task")) else [f"--metric={gate.on}"]
        arms = [f"{one.name}={one.out}" for one in (other, stage)]
        asked = processes.ask(stage, ["compare", *arms, *metric, "--json"], record.plan.out)
        if asked.document is None:
            return unproven(gate.words, asked.sentence)
        document = asked.document
    return _comparison_verdict(gate, document["comparisons"], _tasks(stage, record.plan))


def _tasks(stage: Stage, plan: PipelinePlan) -> set[str]:
    return {str(one.said.get("task")) for one in plan.stages if one.verb == "eval" and one.name in (stage.name, *stage.needs)}


def _comparison_verdict(gate: Gate, comparisons: Sequence[dict[str, Any]], tasks: set[str]) -> Verdict:
    about = [one for one in comparisons if gate.on in tasks or one["metric"] == gate.on]
    if not about:
        metrics = ", ".join({one["metric"] for one in comparisons}) or "nothing"
        return unproven(gate.words, f"nothing was compared on {gate.on}; found {metrics}")
    against = [one for one in about if one["same_weights"] or not _holds(gate, one["claim"])]
    words = "; ".join(one["sentence"] for one in against or about)
    if not against:
        return proven(gate.words, words)
    return refuted(gate.words, words) if any(one["claim"] == "shown worse" for one in against) else unproven(gate.words, words)


def _holds(gate: Gate, claim: str) -> bool:
    return claim == "shown better" if gate.kind == "shown better" else claim != "shown worse"


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class StageEnd:
    """How a stage's process ended, in its own words; `document` is what it printed where it prints JSON."""

    code: int
    sentence: str
    seconds: float
    out_of_budget: bool = False
    document: Any = None


class StageProcesses:
    """The processes of stages and gates. A signal to us is passed on to those that live, so that they save before they stop."""

    def __init__(self, say: Callable[[str], None], lock: int | None = None):
        self.say, self.lock = say, () if lock is None else (lock,)
        self.interrupted: int | None = None
        self._live: set[subprocess.Popen[str]] = set()

    def run(self, stage: Stage, log: Path, *, budget: float | None) -> StageEnd:
        """The stage's own command; past its budget it is told to save and stop."""
        if budget is not None and budget <= 0:
            return StageEnd(GuardStop.exit_code, "its budget is spent; give it more in the file, and the same command goes on", 0.0, True)
        printed = _printed_to(stage) if stage.kind.prints else None
        self.say(f"{stage.name}: assay {' '.join([stage.verb, *stage.words])}")
        return self._run(stage.name, [stage.verb, *stage.words], log, printed, budget)

    def ask(self, stage: Stage, words: list[str], out: Path) -> StageEnd:
        """A command of a gate, whose answer is read and not kept."""
        printed = out / "logs" / f"{stage.name}.gate.json"
        return self._run(stage.name, words, out / "logs" / f"{stage.name}.log", printed, None)

    def _run(self, name: str, words: list[str], log: Path, printed: Path | None, budget: float | None) -> StageEnd:
        began, late = time.monotonic(), threading.Event()
        with contextlib.ExitStack() as held:
            stdout: Any = subprocess.PIPE if printed is None else held.enter_context(printed.with_suffix(".part").open("wb"))
            process = held.enter_context(subprocess.Popen(
                [sys.executable, "-m", "assay", *words], stdout=stdout, stderr=subprocess.STDOUT if printed is None else subprocess.PIPE,
                text=True, errors="replace", start_new_session=True, pass_fds=self.lock, preexec_fn=_end_with_parent()))
            held.callback(self._ended, process)
            self._live.add(process)
            if self.interrupted is not None:  # it came while this one was being started
                process.send_signal(self.interrupted)
            held.enter_context(_time_limit(process, budget, late))
            heard = process.stdout if printed is None else process.stderr
            assert heard is not None
            tail = pass_on_output(heard, log, lambda line: self.say(f"{name}: {line}"))
            code = process.wait()
        code, seconds = 128 - code if code < 0 else code, time.monotonic() - began
        document = None if printed is None else _settle(printed, code)
        if late.is_set():
            return StageEnd(GuardStop.exit_code, f"its budget is spent after {seconds:.0f} s: it was told to save and stop", seconds, True)
        return StageEnd(code, _end_in_words(code, tail, document), seconds, document=document)

    def _ended(self, process: subprocess.Popen[str]) -> None:
        """End a process, whatever happened: it is not left behind."""
        self._live.discard(process)
        if process.poll() is None:
            process.terminate()
            process.wait()

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        def forward(number: int, _: FrameType | None) -> None:
            self.interrupted = number
            for process in tuple(self._live):
                process.send_signal(number)

        with signals_handled(forward):
            yield


@contextlib.contextmanager
def _stage_lock(path: Path, say: Callable[[str], None]) -> Iterator[int]:
    """Lock of a stage, held by us and by the stage's process: where we are killed, the next session waits until what we began has saved and
    gone."""
    fd = durable.disk.open_append(path)
    try:
        until, told = time.monotonic() + TIME_TO_SAVE, False
        while True:
            try:
                durable.disk.lock(fd)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UsageError(f"{path}: a stage of an earlier sitting is still running; wait for it, or stop it") from None
                if not told:
                    say("a stage of an earlier sitting is still saving; waiting for it")
                    told = True
                time.sleep(0.1)
        yield fd
    finally:
        durable.disk.close(fd)


def _end_with_parent() -> Callable[[], object] | None:
    """Ask Linux to send the process SIGTERM when we die, so that it saves and goes; None on other systems."""
    libc = ctypes.CDLL(None)
    return (lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)) if hasattr(libc, "prctl") else None


@contextlib.contextmanager
def _time_limit(process: subprocess.Popen[str], seconds: float | None, late: threading.Event) -> Iterator[None]:
    def stop() -> None:
        late.set()
        process.terminate()

    timers = [] if seconds is None else [threading.Timer(seconds, stop), threading.Timer(seconds + TIME_TO_SAVE, process.kill)]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _printed_to(stage: Stage) -> Path:
    return Path(stage.out) if stage.out.endswith(".json") else Path(stage.out).with_suffix(".json")


def _settle(printed: Path, code: int) -> Any:
    """JSON that a command printed to its end, under its own name; None where it did not get so far."""
    part = printed.with_suffix(".part")
    try:
        if code not in (0, 3):
            raise ArtifactError(f"it ended with {code}")
        document = read_json(part, (dict, list))
    except ArtifactError:
        part.unlink()
        return None
    durable.replace_file(printed, part.read_bytes())
    part.unlink()
    return document


def _end_in_words(code: int, tail: Sequence[str], document: Any) -> str:
    """Message about how a stage ended: its own last line where it is done, else the sentence that it gave; and what the exit code means."""
    said = [line.removeprefix("assay: ") for line in tail if line.startswith("assay: ")]
    against = [line.strip() for line in tail if line.strip().startswith("REFUTED")]
    last = [line for line in reversed(tail) if line.strip()]
    words = " ".join(next(iter([*_document_words(document), *said[-1:], *against, *last]), "").split())
    if code == 0:
        return words or "done"
    meaning = MEANINGS.get(code, f"killed by {signal.Signals(code - 128).name}" if 128 < code < 160 else f"it died with exit code {code}")
    return f"{meaning}{f': {words}' if words else ''}"


def _document_words(document: Any) -> list[str]:
    """One line for a command that prints JSON."""
    if not isinstance(document, dict):
        return []
    compared = [one["sentence"] for one in document.get("comparisons", [])]
    verdicts = [Verdict(one["check"], Outcome(one["outcome"]), one["reason"]) for one in document.get("verdicts", [])]
    outcome = document.get("outcome") or overall(verdicts)
    worst = [f": {one.check}: {one.reason}" for one in verdicts if one.outcome == outcome != Outcome.PROVEN]
    told = f"{outcome}{next(iter(worst), '')}" if verdicts else ""
    return list(filter(None, ["; ".join(compared), told]))

"""One recipe over several seeds, each a run of its own process and folder, and what they show together.

`OUT/seed-42` is the run of seed 42 and `OUT/seed-42.log` what it said; `OUT/seeds.json` records how each ended, from the
first on, and in the end the verdict. A seed that was stopped by a guard, or died, is a seed that collapsed.
"""

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from assay.errors import ArtifactError, GuardStop, UsageError
from assay.recipes.child_runs import pass_on_output, signals_handled
from assay.recipes.pipeline import digest_of_path
from assay.recipes.run import plain
from assay.statistics.estimate import Estimate
from assay.statistics.seed_stability import NOISE_OF_A_LOSS, Curves, SeedsVerdict, collapse_bound, stability
from assay.store import durable
from assay.store.checkpoint import MANIFEST, open_checkpoint
from assay.store.ledger import Event, Ledger
from assay.store.model_cache import cached_model
from assay.strict_json import read_json, read_json_lines
from assay.verdict import Verdict, overall, proven, refuted

NOISE_OF_A_SCORE = 0.03  # of a rate: what seeds of one reinforcement may well end apart, beside the error of measuring each
EDITED = "efficacy, generated, after"
NO_SCORE = {"eval_loss", "eval_weight_set"}  # columns of an evaluation that stand before its score


@dataclass(frozen=True)
class Measure:
    """Measure that a recipe's runs are compared by. `own_held_out`: each seed holds out other data, so that scores differ by that too."""

    metric: str
    lower_is_better: bool = True
    own_held_out: bool = False

    def noise(self, scores: Iterable[Estimate | None]) -> float | None:
        """How far healthy seeds may end apart; None: as far as losses on one held-out set do."""
        known = [score for score in scores if score is not None and math.isfinite(score.mean)]
        if not (self.own_held_out and known):
            return None
        error = math.sqrt(sum(((score.high - score.low) / 2 / TWO_SIDED) ** 2 for score in known) / len(known))
        return max(error, NOISE_OF_A_LOSS * min(abs(score.mean) for score in known) if self.lower_is_better else NOISE_OF_A_SCORE)


TWO_SIDED = 1.96  # standard errors from the mean to the end of an interval
MEASURES = {"pretrain": Measure("bits per byte"), "ttt": Measure("bits per byte"), "sft": Measure("nats per token", own_held_out=True),
            "distill": Measure("held-out loss", own_held_out=True), "dpo": Measure("loss per pair", own_held_out=True),
            "kto": Measure("held-out loss", own_held_out=True), "reward-model": Measure("held-out loss", own_held_out=True),
            "grpo": Measure("held-out score", lower_is_better=False, own_held_out=True),
            "edit": Measure(EDITED, lower_is_better=False, own_held_out=True)}
LAST = {0: "done and proven", 3: "a verdict went against it", GuardStop.exit_code: "stopped by a guard"}  # not run again


@dataclass(frozen=True)
class Plan:
    recipe: str
    options: tuple[str, ...]  # as the recipe takes them, without seed and out
    seeds: tuple[int, ...]
    out: str
    device: str | None
    inputs: tuple[str, ...] = ()  # files, folders and models that the options name

    def folder(self, seed: int) -> Path:
        return Path(self.out) / f"seed-{seed}"

    def command(self, seed: int) -> list[str]:
        return [sys.executable, "-m", "assay", self.recipe, *self.options, "--seed", str(seed), "--out", str(self.folder(seed))]


@dataclass(frozen=True)
class Ending:
    """How a seed's run ended, in its own words."""

    exit_code: int  # negative: the signal that killed it
    sentence: str
    ledger: str | None = None  # sha256 of the run's ledger as it was then: whatever was done there since is another run's

    @property
    def last(self) -> bool:
        return self.exit_code in LAST


@dataclass(frozen=True)
class Found:
    verdicts: list[Verdict]
    document: dict[str, Any]
    interrupted: int | None = None  # the signal, where one came: then there is no verdict


def run_seeds(plan: Plan, say: Callable[[str], None]) -> Found:
    """Run every seed that has not finished, then give the verdict on all."""
    record = Record(plan)
    due = [seed for seed in plan.seeds if not record.finished(seed)]
    for seed in plan.seeds:
        if seed not in due:
            say(f"seed {seed}: finished before ({record.endings[seed].sentence})")
    processes = Processes(say)
    with processes.forwarding_signals():
        run_all(plan, due, processes, record)
    if processes.interrupted is not None:
        return Found([], record.document, processes.interrupted)
    record.require_same_inputs()
    scores = {seed: final_score(plan.folder(seed)) for seed in plan.seeds}
    endings = {seed: as_it_stands(record.endings[seed], plan.folder(seed)) for seed in plan.seeds}
    verdicts, summary = judged(endings, scores, curves(plan), MEASURES[plan.recipe])
    record.write(summary)
    return Found(verdicts, record.document)


def run_all(plan: Plan, due: list[int], processes: "Processes", record: "Record") -> None:
    """Run all due seeds, as many at a time as there are GPUs. A request that makes no sense ends it: every other seed would meet it too."""
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    places: list[str | None] = [*gpus(plan.device)] or [None]
    for place in places:
        free.put(place)
    refused: list[str] = []
    broken = threading.Event()  # one could not be begun or heard: its error is raised once the others are over, and no other begins

    def one(seed: int) -> None:
        if refused or broken.is_set() or processes.interrupted is not None:
            return
        place, ending = free.get(), None
        try:
            record.require_same_inputs()
            ending = processes.run(seed, plan.command(seed), place, Path(plan.out) / f"seed-{seed}.log")
        finally:
            if ending is None:
                broken.set()
            free.put(place)
        if ending.exit_code == UsageError.exit_code:
            refused.append(f"seed {seed}: {ending.sentence}")
        elif processes.interrupted is None:
            record.ended(seed, ending)

    with ThreadPoolExecutor(len(places), "seed") as pool:
        for finished in [pool.submit(one, seed) for seed in due]:
            finished.result()
    if refused:
        raise UsageError(refused[0])


def judged(endings: dict[int, Ending], scores: dict[int, Estimate | None], curves: Curves,
           measure: Measure = MEASURES["pretrain"]) -> tuple[list[Verdict], dict[str, Any]]:
    """The verdicts, and what seeds.json says of them. A seed without a score has no number, and so collapsed."""
    final = {seed: _number(endings[seed], scores[seed]) for seed in endings}
    found = stability(final, curves, metric=measure.metric, lower_is_better=measure.lower_is_better, noise=measure.noise(scores.values()))
    verdicts = [check_runs(endings), found.verdict()]
    summary = _summary(found) | {
        "scores": {seed: None if score is None else asdict(score) for seed, score in scores.items()},
        "outcome": str(overall(verdicts)), "verdicts": [verdict.to_json() for verdict in verdicts]}
    return verdicts, summary


def as_it_stands(ending: Ending, folder: Path) -> Ending:
    """How a seed's run ended, and against a proven one what was found since against its model: a verdict that went against it."""
    for where in (folder / "adapter", folder / "model"):
        if ending.exit_code or not (where / MANIFEST).is_file():
            continue
        try:
            marked = open_checkpoint(where, verify=False).quarantined
            against = None if marked is None else f"{where} is quarantined: {'; '.join(one['reason'] for one in marked['verdicts'])}"
        except ArtifactError as error:
            against = str(error)
        if against is not None:
            return replace(ending, exit_code=3, sentence=f"{LAST[3]}: {against}")
    return ending


def check_runs(endings: dict[int, Ending]) -> Verdict:
    """Whether every seed's own run ended proven."""
    failed = {seed: ending for seed, ending in endings.items() if ending.exit_code != 0}
    words = f"{len(endings) - len(failed)} of {len(endings)} seeds ran to their end and were proven"
    if not failed:
        return proven("runs", words)
    sentences = "; ".join(f"seed {seed}: {ending.sentence}" for seed, ending in failed.items())
    return refuted("runs", f"{words}; {sentences}", failed=sorted(failed))


def final_score(folder: Path) -> Estimate | None:
    """Score that the run reported of what it handed over, or read; of the artifact, where it was to fit into so many bytes."""
    events = Ledger(folder / "ledger.jsonl").events()
    for kind in (Event.ARTIFACT, Event.HAND_OVER, Event.TTT):
        if reported := [event["score"] for event in events if event["kind"] == kind]:
            return Estimate(**reported[-1])
    edits = [event["estimates"] for event in events if event["kind"] == Event.EDITS]
    return Estimate(**edits[-1][EDITED]) if edits and EDITED in edits[-1] else None


def curves(plan: Plan) -> Curves:
    """Curves from each run's metrics.jsonl, as far as it got."""
    rows, metric = {seed: read_json_lines(plan.folder(seed) / "metrics.jsonl") for seed in plan.seeds}, MEASURES[plan.recipe].metric
    losses = {seed: [(row["step"], float(row["loss"])) for row in rows[seed] if "loss" in row] for seed in plan.seeds}
    scores = {seed: [(row["step"], score) for row in rows[seed] if (score := evaluated_score(row)) is not None] for seed in plan.seeds}
    return {"loss": losses, metric: scores}


def evaluated_score(row: Mapping[str, Any]) -> float | None:
    """Score of a row that an evaluation wrote: the first of its columns that is a score."""
    return next((float(value) for name, value in row.items() if name.startswith("eval_") and name not in NO_SCORE), None)


def gpus(device: str | None) -> list[str]:
    """The GPUs to spread over; none where the recipe was given a device of its own."""
    import torch

    if device not in (None, "cuda") or not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else list(map(str, range(torch.cuda.device_count())))


class Processes:
    """The seeds under way. A signal to us is passed on to them once, so that they save before they stop."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.interrupted: int | None = None
        self._live: set[subprocess.Popen[str]] = set()
        self._one_at_a_time = threading.Lock()

    def run(self, seed: int, command: list[str], gpu: str | None, log: Path) -> Ending:
        """Run one seed in a process group of its own: Ctrl-C on a terminal reaches us alone, and we pass it on."""
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        self.say(f"seed {seed}: begins{'' if gpu is None else f' on GPU {gpu}'}, log in {log}")
        with self._begun(command, environment) as process:
            assert process.stdout is not None
            tail = pass_on_output(process.stdout, log, lambda line: self.say(f"seed {seed}: {line}"))
            code = process.wait()
        return Ending(code, ending_in_words(code, tail))

    @contextlib.contextmanager
    def _begun(self, command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
        """Start a process that is not left behind, whatever happens here: one that nobody hears any more is told to stop, and waited
        for."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                   env=environment, start_new_session=True)
        try:
            with self._one_at_a_time:
                self._live.add(process)
                if self.interrupted is not None:  # it came while this one was being started
                    process.send_signal(self.interrupted)
            yield process
        finally:
            with self._one_at_a_time:
                self._live.discard(process)
            if process.poll() is None:
                process.terminate()
                process.communicate()

    @contextlib.contextmanager
    def forwarding_signals(self) -> Iterator[None]:
        def forward(number: int, _: FrameType | None) -> None:
            with self._one_at_a_time:  # of the seeds' threads: one that is being started gets it from here or there, not from both
                self.interrupted = number
                for process in self._live:
                    process.send_signal(number)

        with signals_handled(forward):
            yield


def ending_in_words(code: int, tail: list[str]) -> str:
    """The run's own sentence where it gave one, else its last line; and what the exit code means."""
    if code == 0:
        return LAST[0]
    said = [line.removeprefix("assay: ") for line in tail if line.startswith("assay: ")]
    against = [line.strip() for line in tail if line.strip().startswith("REFUTED")]
    words = " ".join(([*against, *said] or [line for line in tail if line.strip()] or ["it said nothing"])[-1].split())
    if code < 0:
        return f"killed by {signal.Signals(-code).name}; its last words: {words}"
    return f"{LAST.get(code, f'died with exit code {code}')}: {words}"


class Record:
    """seeds.json: how each seed ended, written whenever one does, so that a set resumes where it was interrupted."""

    def __init__(self, plan: Plan):
        self.plan, self.path, self.endings = plan, Path(plan.out) / "seeds.json", dict[int, Ending]()
        metric, self.inputs = MEASURES[plan.recipe].metric, inputs_now(plan)
        self.document: dict[str, Any] = {"recipe": plan.recipe, "options": list(plan.options), "inputs": self.inputs, "metric": metric,
                                         "seeds": {}}
        durable.make_folder(self.path.parent)
        self._one_at_a_time = threading.Lock()
        if self.path.exists():
            self._recall()

    def finished(self, seed: int) -> bool:
        ledger, ending = self.plan.folder(seed) / "ledger.jsonl", self.endings.get(seed)
        return ending is not None and ending.last and ledger.exists() and ending.ledger == durable.hash_file(ledger)

    def require_same_inputs(self) -> None:
        """Seeds of one recipe read the same: what changed meanwhile would count as a difference between seeds."""
        refuse_other_inputs(self.inputs, inputs_now(self.plan), self.path)

    def ended(self, seed: int, ending: Ending) -> None:
        ledger = self.plan.folder(seed) / "ledger.jsonl"
        with self._one_at_a_time:
            self.endings[seed] = replace(ending, ledger=durable.hash_file(ledger) if ledger.exists() else None)
            self.write({})

    def write(self, summary: dict[str, Any]) -> None:
        shown = {str(seed): asdict(ending) | {"folder": self.plan.folder(seed).name} for seed, ending in self.endings.items()}
        self.document = plain(self.document | {"seeds": shown} | summary)
        durable.replace_file(self.path, (json.dumps(self.document, indent=1, allow_nan=False) + "\n").encode())

    def _recall(self) -> None:
        earlier = read_json(self.path, {"recipe": str, "options": list, "inputs": {str: str},
                                        "seeds": {str: {"exit_code": int, "sentence": str, "ledger": (str, None)}}})
        for name, now in (("recipe", self.plan.recipe), ("options", list(self.plan.options))):
            if earlier[name] != now:
                raise UsageError(f"{self.path} is of another set: {name} was {earlier[name]}, now {now}; give the same, or another "
                                 "--out")
        refuse_other_inputs(earlier["inputs"], self.inputs, self.path)
        for seed, ending in earlier["seeds"].items():
            self.endings[int(seed)] = Ending(ending["exit_code"], ending["sentence"], ending["ledger"])


def inputs_now(plan: Plan) -> dict[str, str]:
    """sha256 of everything that the options name, where it lies on this machine."""
    places = {text: cached_model(text) or Path(text) for text in plan.inputs}
    return {text: digest_of_path(place) for text, place in places.items() if place.exists()}


def refuse_other_inputs(earlier: Mapping[str, str], now: Mapping[str, str], path: Path) -> None:
    if changed := sorted(name for name in {**earlier, **now} if earlier.get(name) != now.get(name)):
        raise UsageError(f"{path} is of another set: {', '.join(changed)} changed since its seeds began; give back what they read, or "
                         "another --out")


def _number(ending: Ending, score: Estimate | None) -> float:
    """A run that was stopped may have a score of an earlier session: it is not how it ended."""
    return score.mean if score is not None and ending.exit_code in (0, 3) else math.nan


def _summary(found: SeedsVerdict) -> dict[str, Any]:
    clean = not found.collapsed
    return {"n": found.n, "sentence": found.sentence, "mean": None if found.mean is None else asdict(found.mean),
            "worst": {"seed": found.worst_seed, "value": found.worst}, "modes": [asdict(mode) for mode in found.modes],
            "collapsed": list(found.collapsed), "departures": [asdict(departure) for departure in found.departures],
            "collapse_rate_below": collapse_bound(found.n) if clean else None}

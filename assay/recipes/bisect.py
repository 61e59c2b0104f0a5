"""Bisecting a run: its proven checkpoints in order, and the probes that tell a good one from a bad one.

A probe is any function from a checkpoint's folder to whether it is bad. `probe_named` makes one of what the command line says.
"""

import importlib.util
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from assay.comparison.bisection import Bisection, bisect_first_bad
from assay.errors import AssayError, UsageError
from assay.statistics.early_stopping import compare_losses
from assay.store.checkpoint import open_checkpoint, step_folders
from assay.store.digests import recorded_digest
from assay.strict_json import read_json_lines

Probe = Callable[[Path], bool]
_KNOWN = "FILE.py:function, loss-above:X, loss-jump, score-below:X, health or differs:RUN"


def first_bad_checkpoint(run: Path, bad: Probe, *, every: bool = False, say: Callable[[str], None] = print) -> Bisection[Path]:
    """Find the first bad checkpoint. Only those with a hallmark are asked: of the others nobody knows whether they are what was trained."""
    proven, passed_over = shelf(run)
    for sentence in passed_over:
        say(f"passed over: {sentence}")
    if len(proven) < 2:
        raise UsageError(f"{run}: {len(proven)} proven checkpoint(s); bisecting needs at least two (assay prove earns a hallmark)")

    def told(path: Path) -> bool:
        is_bad = bad(path)
        say(f"{path.name}: {'bad' if is_bad else 'good'}")
        return is_bad

    return bisect_first_bad(proven, told, every=every)


def shelf(run: Path) -> tuple[list[Path], list[str]]:
    """The run's proven checkpoints, oldest first, and why each of the others is left out."""
    if not (run / "checkpoints").is_dir():
        raise UsageError(f"{run}: there is no folder `checkpoints` here, so this is not a run")
    proven, passed_over = [], []
    for path in step_folders(run / "checkpoints"):
        try:
            if open_checkpoint(path, verify=False).hallmark is not None:
                proven.append(path)
            else:
                passed_over.append(f"{path.name} has no hallmark")
        except AssayError as error:
            passed_over.append(str(error))
    return proven, passed_over


def probe_named(text: str, run: Path) -> Probe:
    """Names become functions here, once."""
    kind, _, rest = text.partition(":")
    if kind.endswith(".py"):
        return from_file(Path(kind), rest)
    if kind == "loss-above":
        return loss_above(run, _number(rest))
    if kind == "score-below":
        return score_below(run, _number(rest))
    if kind == "differs":
        return differs_from(Path(rest))
    if text == "loss-jump":
        return loss_jump(run)
    if text == "health":
        return is_malformed
    raise UsageError(f"--probe {text}: expected {_KNOWN}")

# ---------------------------------------------------------------- probes


def from_file(path: Path, name: str) -> Probe:
    """The user's own function, from the user's own file: it is run as it stands."""
    spec = importlib.util.spec_from_file_location("probe", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"--probe {path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may fail in any way while it is imported
        raise UsageError(f"--probe {path}: {_failure(error)}; it must be importable") from error
    function = vars(module).get(name)
    if not callable(function):
        raise UsageError(f"--probe {path}:{name}: there is no such function; it takes a checkpoint's folder and says whether it is bad")

    def bad(checkpoint: Path) -> bool:
        try:
            answer = function(checkpoint)
        except (Exception, SystemExit) as error:  # and so may the function
            raise UsageError(f"--probe {path}:{name} failed on {checkpoint.name}: {_failure(error)}; nothing is concluded") from error
        return _said(answer, f"{path}:{name}")

    return bad


def loss_above(run: Path, limit: float) -> Probe:
    """Probe that calls a checkpoint bad by the held-out losses that the run wrote down at its evaluations."""
    losses = evaluated_losses(run)
    return lambda checkpoint: bool(_look(losses, checkpoint).mean() > limit)


def score_below(run: Path, limit: float) -> Probe:
    """Probe that calls a checkpoint bad by the held-out scores that a run with a reward wrote down: higher is better there."""
    if scored_by(run) is None:
        raise UsageError(f"{run}: its evaluations are of a loss, which is better lower; give --probe loss-above:X or loss-jump")
    scores = {step: -negated for step, negated in _evaluations(run).items()}
    return lambda checkpoint: bool(_look(scores, checkpoint).mean() < limit)


def loss_jump(run: Path) -> Probe:
    """Worse on the same documents, by an interval that excludes 0, than the best evaluation before it."""
    losses = evaluated_losses(run)

    def bad(checkpoint: Path) -> bool:
        after = _look(losses, checkpoint)
        before = [loss for step, loss in losses.items() if step < _step(checkpoint)]
        best = min(before, key=lambda loss: float(loss.mean()), default=None)
        return best is not None and compare_losses(best, after).verdict == "worse"

    return bad


def is_malformed(checkpoint: Path) -> bool:
    """Whether `assay probe` would refute a checkpoint: more malformed texts are shown than are tolerated."""
    from assay.evaluation.loaded_model import LoadedModel
    from assay.generate.generation_request import Sampling
    from assay.health.generation_probe import ModelGenerator, probe
    from assay.health.probe_prompts import BUILT_IN_PROMPTS, TEXT_BEGINNINGS
    from assay.store.artifact import open_artifact

    speaker = ModelGenerator(LoadedModel(open_artifact(checkpoint)), Sampling(max_new=128))
    health = probe(speaker, TEXT_BEGINNINGS if speaker.raw else BUILT_IN_PROMPTS, name=checkpoint.name)
    return health.malformed


def differs_from(other: Path) -> Probe:
    """Other weights than another run has at the same step: where two runs of different code, or machines, went apart."""
    there = {path.name: path for path in shelf(other)[0]}

    def bad(checkpoint: Path) -> bool:
        if checkpoint.name not in there:
            raise UsageError(f"{other} has no proven {checkpoint.name} to hold against; it has {', '.join(there) or 'none'}")
        return _digest(checkpoint) != _digest(there[checkpoint.name])

    return bad


def evaluated_losses(run: Path) -> dict[int, np.ndarray]:
    """Step → the loss of every held-out document. A run that is scored by a reward has no loss."""
    if (metric := scored_by(run)) is not None:
        raise UsageError(f"{run}: its evaluations are of {metric!r}, a score, better higher, and no loss; give --probe score-below:X")
    return _evaluations(run)


def scored_by(run: Path) -> str | None:
    """The reward that a run's evaluations are of; None where they are of a loss."""
    return next((str(row["metric"]) for row in read_json_lines(run / "eval.jsonl") if row.get("metric")), None)


def _evaluations(run: Path) -> dict[int, np.ndarray]:
    """Step → what every held-out document or prompt scored; losses weighed so that their mean is the printed one, over all tokens."""
    found = {row["step"]: np.array(row["per_document"]) * (np.array(row["tokens"]) / np.mean(row["tokens"]) if "tokens" in row else 1)
             for row in read_json_lines(run / "eval.jsonl")}
    if not found:
        raise UsageError(f"{run}: no held-out evaluation is on record (eval.jsonl), so a probe of the loss has nothing to read")
    return found


def _look(losses: dict[int, np.ndarray], checkpoint: Path) -> np.ndarray:
    step = _step(checkpoint)
    if step not in losses:
        raise UsageError(f"{checkpoint.name}: nothing was evaluated at that step; there are evaluations at {', '.join(map(str, losses))}")
    return losses[step]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _digest(checkpoint: Path) -> str:
    return recorded_digest(open_checkpoint(checkpoint, verify=False).manifest)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--probe …:{text}: expected a number, as in loss-above:3.2 or score-below:0.4") from None


def _failure(error: BaseException) -> str:
    """Message of an error, and its line: the last that is not of the import system."""
    lines = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} (line {lines[-1].lineno} of {lines[-1].filename})"


def _said(answer: Any, where: str) -> bool:
    if not isinstance(answer, bool | np.bool_):
        raise UsageError(f"--probe {where} returned {answer!r}; expected True for a bad checkpoint, False for a good one")
    return bool(answer)

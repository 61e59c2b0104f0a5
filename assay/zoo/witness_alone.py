"""Witness alone: which faults of the zoo the witness would have caught if every other check were silent; measured, not declared.

Each fault is planted in small runs of its kind whose own checks say nothing: a fine-tuning, one by LoRA, a pretraining, a distillation, a
reinforcement with its evaluations, an evaluation; a mistake of the forward pass in a fine-tuning of its family. Then the witness is asked,
and the run's records are held against the clean twin's: what changed nothing in any of them was not reached, and nothing is said of the
witness there. Faults of files, folders, exports, edits, preferences, servers and processes strike nothing that the witness looks at, and
are not asked.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay.errors import AssayError
from assay.evaluation import evaluate as evaluating
from assay.recipes import sft
from assay.recipes.run import Run
from assay.recipes.witness_records import pending_looks, pending_records
from assay.store.scratch import scratch_folder
from assay.testing import tiny_training
from assay.testing.fault_injection import Fault, Plant, in_place_of, nothing, observe, swap, together
from assay.testing.tiny_forward import FORWARD_FAULTS, ForwardFault, random_model
from assay.testing.tiny_models import save_model
from assay.verdict import Outcome, Verdict
from assay.witness.due_evaluation import judge_evaluation
from assay.witness.due_looks import judge_look
from assay.witness.replay import replay_step
from assay.zoo.evaluation_faults import write_witnessed_evaluation
from assay.zoo.witness_faults import reinforce_witnessed, train_witnessed

CAUGHT, UNSEEN, UNREACHED, STOPPED, UNASKED = "caught", "not seen", "not reached", "stopped", "not asked"
_TOLD = 160  # characters of a reason
RunOf = Callable[[Path], None]


@dataclass(frozen=True)
class Alone:
    """What the witness alone makes of a fault: `answer`, the run that shows it, and the witness's words or the reason."""

    fault: Fault
    answer: str
    run: str = ""
    reason: str = ""

    def facts(self) -> dict[str, Any]:
        return self.fault.facts() | {"witness": self.answer, "run": self.run, "reason": self.reason}

    def line(self) -> str:
        return f"{self.answer:12} {self.run:9} {self.fault.name}" + (f": {self.reason}" if self.reason else "")


def _evaluate(folder: Path) -> None:
    write_witnessed_evaluation(folder)


RUNS: dict[str, RunOf] = {
    "sft": lambda folder: train_witnessed(folder / "run", "sft"),
    "lora": lambda folder: train_witnessed(folder / "run", "sft", lora_r=4),
    "pretrain": lambda folder: train_witnessed(folder / "run", "pretrain"),
    "distill": lambda folder: train_witnessed(folder / "run", "distill"),
    "grpo": lambda folder: reinforce_witnessed(folder),
    "eval": _evaluate,
}
RUNS_ASKED: dict[str, tuple[str, ...]] = {  # by the file that a fault stands in
    "training_faults": ("sft",), "run_faults": ("sft", "lora", "pretrain"), "chat_faults": ("sft",),
    "corpus_faults": ("pretrain",), "distillation_faults": ("distill",), "rollout_faults": ("grpo",), "reward_faults": ("grpo",),
    "staleness_faults": ("grpo",), "evaluation_faults": ("eval",), "adapter_faults": ("lora",), "method_faults": ("sft", "lora")}


def witness_alone(fault: Fault) -> Alone:
    if fault.check.startswith("witness"):  # a row whose own job asks the witness, and nobody else
        seen = observe(fault, clean=lambda _: [])
        return Alone(fault, CAUGHT if seen.caught else UNSEEN, "its own", str(seen.facts()["reason"] or "")[:_TOLD])
    if fault.check == "forward":
        return _broken_in_training(fault, FORWARD_FAULTS[fault.name])
    found = [_in_a_run(fault, name) for name in RUNS_ASKED.get(_file_of(fault), ())]
    answers = {each.answer: each for each in reversed(found)}
    return next((answers[answer] for answer in (CAUGHT, UNSEEN, STOPPED, UNREACHED, UNASKED) if answer in answers),
                Alone(fault, UNASKED))


def summary_of(found: list[Alone]) -> str:
    counts = {answer: sum(each.answer == answer for each in found) for answer in (CAUGHT, UNSEEN, UNREACHED, STOPPED, UNASKED)}
    return (f"{counts[CAUGHT]} of {len(found)} faults would have been caught by the witness alone. {counts[UNSEEN]} changed a run and were "
            f"not seen by it; {counts[UNREACHED]} changed nothing in runs that it looks at; {counts[STOPPED]} stopped the run before a "
            f"step was kept; {counts[UNASKED]} were not asked (files, folders, exports, edits, preferences, servers, processes)")


def _file_of(fault: Fault) -> str:
    return str(fault.plant.__module__).rpartition(".")[2]


def _in_a_run(fault: Fault, name: str) -> Alone:
    with scratch_folder() as folder, contextlib.ExitStack() as planted:
        answer = UNASKED
        try:
            planted.enter_context(silenced())
            planted.enter_context(fault.plant(folder))  # which fails where the files that it strikes are not this run's
            answer = STOPPED
            RUNS[name](folder)
        except Exception as error:  # a fault that was made for another run may do anything to this one
            return Alone(fault, answer, name, f"{type(error).__name__}: {error}"[:_TOLD])
        planted.close()
        return _what_it_says(fault, name, folder, lambda: clean_digest(name))


def _what_it_says(fault: Fault, name: str, folder: Path, clean: Callable[[], str]) -> Alone:
    said = witnessed_verdicts(folder)
    if not said:
        return Alone(fault, STOPPED, name, "no step was kept")
    against = [verdict.reason for verdict in said if verdict.outcome is Outcome.REFUTED]
    if against:
        return Alone(fault, CAUGHT, name, against[0][:_TOLD])
    if all(verdict.outcome is Outcome.UNPROVEN for verdict in said):
        return Alone(fault, UNASKED, name, said[0].reason[:_TOLD])
    return Alone(fault, UNREACHED if left_behind(folder) == clean() else UNSEEN, name)


def _broken_in_training(fault: Fault, broken: ForwardFault) -> Alone:
    """A mistake of the forward pass, in a fine-tuning of a model of its family. What only shows in company or from the cache does not
    strike there."""
    if broken.way != "plainly":
        return Alone(fault, UNASKED)
    with scratch_folder() as folder:
        try:
            with silenced(), in_place_of(sft, "load_start")(functools.partial(_broken_start, broken))(folder):
                _train_family(folder, broken.family)
        except AssayError as error:
            return Alone(fault, STOPPED, broken.family, str(error)[:_TOLD])
        return _what_it_says(fault, broken.family, folder, lambda: clean_family(broken.family))


def _broken_start(broken: ForwardFault, usual: Any, *given: Any) -> Any:
    start = usual(*given)
    with torch.no_grad():
        broken.breaks(start.model, 1)
    return start


def _train_family(folder: Path, family: str) -> None:
    base = save_model(folder / "base", random_model(family)).folder
    train_witnessed(folder / "run", "sft", model=str(base), max_steps=2)


@functools.cache
def clean_family(family: str) -> str:
    """Verdict on the clean twin in that family, which the witness must not refute."""
    folder = tiny_training.process_folder() / f"witness-alone-family-{family}"
    folder.mkdir()
    with silenced():
        _train_family(folder, family)
    against = [str(verdict) for verdict in witnessed_verdicts(folder) if verdict.outcome is Outcome.REFUTED]
    assert not against, against
    return left_behind(folder)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """A run's own verdicts are written nowhere and stop nothing; an evaluation's stop nothing."""
    with together(swap(Run, "judge", lambda *_: None), swap(Run, "judge_often", lambda *_: None),
                  swap(evaluating, "stop_if_unsound", lambda verdicts: verdicts)):
        yield


def witnessed_verdicts(folder: Path) -> list[Verdict]:
    """What the witness says of all that was kept in the folder."""
    if (folder / "out" / "witness.json").is_file():
        return judge_evaluation(folder / "out")
    run = folder / "run"
    return [*map(replay_step, pending_records(run)), *map(judge_look, pending_looks(run, 10**6))]


def left_behind(folder: Path) -> str:
    """A digest of everything that was kept for the witness, and of scores; paths and times are not in it."""
    found = hashlib.sha256()
    for file in sorted([*folder.glob("run/witness/*/*.safetensors"), *folder.glob("out/scores.jsonl"), *folder.glob("run/eval.jsonl")]):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


@functools.cache
def clean_digest(name: str) -> str:
    """Digest of the clean twin, which the witness must not refute."""
    folder = tiny_training.process_folder() / f"witness-alone-{name}"
    folder.mkdir()
    plant: Plant = nothing
    with silenced(), plant(folder):
        RUNS[name](folder)
    against = [str(verdict) for verdict in witnessed_verdicts(folder) if verdict.outcome is not Outcome.PROVEN]
    assert not against, against
    return left_behind(folder)

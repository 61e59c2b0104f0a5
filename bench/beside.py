"""What the benchmarks that measure Assay beside TRL have in common: the same weights, the same rows, one clock, one table."""

import gc
import importlib.metadata
import json
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from assay.data.layouts import Conversation
from assay.recipes import run
from assay.recipes.trainer import Trainer
from assay.store.artifact import open_artifact
from assay.store.export_artifact import export_artifact
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.tiny_training import NoProver

TINY = "tiny"
TOLD = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "liger_kernel", "triton")


@dataclass
class Clock:
    """Fenced readings after `warm` steps and then after every `block`: what a step takes has the device's work in it."""

    warm: int
    block: int
    device: str
    marks: list[float] = field(default_factory=list)

    def stepped(self, done: int) -> None:
        """`done` steps are over."""
        if done >= self.warm and (done - self.warm) % self.block == 0:
            fence(self.device)
            self.marks.append(time.perf_counter())

    @property
    def blocks(self) -> list[float]:
        """Seconds of each."""
        return [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]

    def rates(self, a_step: list[int]) -> list[float]:
        """Of each block: what its steps did, over its seconds."""
        begins = [self.warm + place * self.block for place in range(len(self.blocks))]
        return [sum(a_step[begin : begin + self.block]) / seconds for begin, seconds in zip(begins, self.blocks, strict=True)]

    def per_step(self) -> list[float]:
        return [seconds / self.block for seconds in self.blocks]


def fence(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_memory(device: str) -> str:
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.startswith("cuda") else ""


def middle(values: list[float], digits: int = 1) -> str:
    """The median, and how far the values lie apart."""
    return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}] (n={len(values)})"


def weights(model: str, dtype: str, home: Path, length: int) -> Path:
    """The model as a folder that both open; the built-in tiny one where that is asked for."""
    where = home / f"weights-{dtype}"
    if not where.exists():
        source = model
        if model == TINY:
            source = str(home / TINY)
            if not Path(source).exists():
                save_model(Path(source), tiny_model("llama", max_length=2 * length))
        export_artifact(open_artifact(source), "hf", where, dtype)
    return where


def write_rows(file: Path, rows: Iterable[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def asked_and_answered(said: Conversation) -> dict[str, list[dict[str, str]]]:
    """A conversation in TRL's columns: what is in `prompt` is not learned."""
    messages = [dict(message) for message in said.messages]
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def without_proofs() -> None:
    """A proof runs in a process of its own, beside the loop; here it would only take cores from the peer that is measured next."""
    run.Prover = NoProver  # type: ignore[assignment, misc]


class Enough(Exception):
    """A measured run has taken its steps."""


class Measured(Trainer):
    """Of a recipe as it is, but that it ends with its loop: nothing is handed over, and what was learned is measured in memory."""

    def end_loop(self) -> None:
        self._write(self.watch.read())
        self.run.finish(None)
        self.run.settle_proofs()
        unless_interrupted(self.run.interrupted)
        raise Enough


Kind = TypeVar("Kind", bound=Measured)


class Clocked(Measured):
    """With a clock between its steps. Before it starts, the first checkpoint is waited for."""

    def __init__(self, clock: Clock, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self.clock = clock

    def over(self) -> bool:
        """Asked once after every step, when all that belongs to it is done."""
        if self.done == self.clock.warm:
            self.run.settle()
        if self.done:
            self.clock.stepped(self.done)
        return super().over()


def train_only(recipe: Any, config: Any, say: Callable[[str], None], trainer: Callable[..., Kind]) -> Kind:
    """The trainer that a recipe of this module made: `trainer`, in the place of its own."""
    made: list[Kind] = []

    def make(*given: Any, **named: Any) -> Kind:
        made.append(trainer(*given, **named))
        return made[0]

    recipe.Trainer = make
    try:
        getattr(recipe, recipe.__name__.rpartition(".")[2])(config, say)
    except Enough:
        pass
    finally:
        recipe.Trainer = Trainer
    return made[0]


def aloud(tell: bool) -> Callable[[str], None]:
    return lambda text: print(f"    {text}", flush=True) if tell else None


def unless_interrupted(signal: int | None) -> None:
    """A recipe that was told to stop leaves in good order; nothing more is measured then."""
    if signal is not None:
        raise KeyboardInterrupt(f"signal {signal}")


def quiet() -> None:
    """The peers' progress bars would fill the page."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def measured(work: Mapping[str, Callable[[], str]], device: str) -> list[str]:
    """A line a row, each printed as soon as it is known. One that fails says so, and the others are still measured."""
    lines = []
    for name, measure in work.items():
        print(f"... {name}", flush=True)
        began = time.perf_counter()
        torch._dynamo.reset()
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            line = measure()
        except Exception as error:  # a peer's failure may be any
            traceback.print_exc()
            line = f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        lines.append(f"{name:41} {line}")
        print(f"{lines[-1]}  ({time.perf_counter() - began:.0f} s in all)", flush=True)
    return lines


def surroundings(device: str) -> str:
    known = {dist.metadata["Name"].lower().replace("-", "_"): dist.version for dist in importlib.metadata.distributions()}
    versions = ", ".join(f"{name} {known[name]}" for name in TOLD if name in known)
    where = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    return f"{time.strftime('%Y-%m-%d %H:%M')} UTC, {where}, Python {platform.python_version()}, {versions}"

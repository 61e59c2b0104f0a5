"""Witness records: the state before and after a few optimizer steps, kept beside the run for the witness to replay.

Kept are the first step of each sitting, the last, and a few that the seed draws between them. The proof of the next checkpoint replays
what is kept, in its fresh process (assay/witness/replay.py). What is not replayed is said, and why.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from assay.errors import UsageError
from assay.learn.optim import state_tensors
from assay.seeds import derive
from assay.store import durable
from assay.verdict import Outcome, Verdict, unproven
from assay.witness.replay import AFTER, BEFORE, RECORD, SAID, WITNESS_FOLDER, summary

MOST_WORK, MOST_BYTES = 3e12, 4 << 30  # floating-point operations of one replay; bytes of one record
COPIES = 6  # weights and two moments, before and after


class WitnessRecords:
    """Of one sitting. `off` says why nothing is kept, where that is so."""

    def __init__(self, trainer: Any, *, witnesses: bool):
        self.trainer, self.folder = trainer, trainer.run.folder / WITNESS_FOLDER
        drawn = trainer.run.config.witness
        if drawn != "off" and not drawn.isdecimal():
            raise UsageError(f"--witness is {drawn!r}; expected a number of steps to replay between the first and the last, or off")
        self.off = "--witness off" if drawn == "off" else None if witnesses else "this run is not proven"
        self.rollout: Any = None  # what is learned from, where a run draws it itself
        self.drawn, self._before = 0 if self.off else int(drawn), dict[str, Tensor]()
        self._end: tuple[int | None, int | None] = None, None

    def begin_step(self, step: int) -> None:
        """Copy the state, where step `step` (counted from 0) is one that is kept."""
        if self.off is None and self.due(step):
            schedule = self.trainer.schedule  # which may decide, once this step is taken, when the run ends
            self._before, self._end = self._state(), (schedule.stop_at, schedule.decay_from)

    def due(self, step: int) -> bool:
        last = self.trainer.schedule.stop_at
        if step == self.trainer.start or (last is not None and step == last - 1):
            return True
        drawn = [derive(self.trainer.run.config.seed, "witness", number) for number in range(self.drawn)]
        if last is None:  # time decides: one between 16 and 32, one between 256 and 512, …
            return step in {16 ** number + seed % 16 ** number for number, seed in enumerate(drawn, 1)}
        return step in {1 + seed % max(1, last - 1) for seed in drawn}

    def end_step(self, taken: Any) -> None:
        """Write the record, once whatever else might touch the weights after the step has run."""
        if self._before and taken is not None:
            before, self._before = self._before, {}
            self._write(before, self._state(), taken)

    def _write(self, before: dict[str, Tensor], after: dict[str, Tensor], taken: Any) -> None:
        where = self.folder / f"step-{taken.index + 1:06d}"
        where.mkdir(parents=True, exist_ok=True)
        (where / SAID).unlink(missing_ok=True)
        if (why := self._too_much(taken.tokens)) is not None:
            said = unproven("witness", f"{where.name} was not replayed: {why}", optional=True)
            durable.replace_file(where / SAID, json.dumps(said.to_json()).encode())
            return
        save_file(before, where / BEFORE)
        save_file(after, where / AFTER)
        durable.replace_file(where / RECORD, json.dumps(self._facts(taken)).encode())

    def _too_much(self, tokens: int) -> str | None:
        trained = sum(p.numel() for p in self.trainer.model.parameters() if p.requires_grad)
        work = 6.0 * tokens * sum(p.numel() for p in self.trainer.model.parameters())
        if COPIES * 4 * trained > MOST_BYTES:
            return f"its record would hold {COPIES * 4 * trained / 2**30:.1f} GiB, more than {MOST_BYTES >> 30}"
        return f"a replay would take {work:.1e} operations, more than {MOST_WORK:.0e}" if work > MOST_WORK else None

    def _facts(self, taken: Any) -> dict[str, Any]:
        trainer, lineage = self.trainer, self.trainer.weights.ancestry.later
        base = getattr(trainer.weights, "base", None)
        return {"recipe": type(trainer.run.config).__name__, "step": taken.index, "first": taken.index == trainer.start,
                "loss": float(taken.loss), "weight": taken.weight, "ids": [list(map(str, row)) for row in taken.ids],
                "stop_at": self._end[0], "decay_from": self._end[1], "steps_before": trainer.steps_before,
                "parent": "" if lineage.parent is None else lineage.parent.path, "base": None if base is None else base.path,
                "device": trainer.device, "rollout": None if self.rollout is None else self.rollout.witness_facts()}

    def _state(self) -> dict[str, Tensor]:
        """What is trained and the optimizer's moments, in memory of their own."""
        named = dict(self.trainer.model.named_parameters())
        weights = {f"weights/{name}": p for name, p in named.items() if p.requires_grad}
        moments = {f"state/{name}": tensor for name, tensor in state_tensors(self.trainer.optimizer, named).items()}
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in (weights | moments).items()}


def pending_records(run: Path) -> list[Path]:
    """Those that are whole and that no process has replayed yet."""
    return sorted(path.parent for path in (run / WITNESS_FOLDER).glob(f"step-*/{RECORD}") if not (path.parent / SAID).exists())


def witness_verdict(run: Path, asked: str) -> Verdict:
    """What the witness said of all kept steps of a run. `asked` is --witness."""
    if asked == "off":
        return unproven("witness", "--witness off: no step was replayed by code that did not take it", optional=True)
    said = [json.loads(path.read_text()) for path in sorted((run / WITNESS_FOLDER).glob(f"step-*/{SAID}"))]
    waiting = [unproven("witness", f"{path.name} was kept and not replayed", optional=True) for path in pending_records(run)]
    return summary([Verdict(v["check"], Outcome(v["outcome"]), v["reason"], v["evidence"]) for v in said] + waiting)

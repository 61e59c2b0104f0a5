"""Witness records: the state before and after a few optimizer steps, kept beside the run for the witness to replay.

Kept are the first step of each session, the last, and a few that the seed draws between them; of a large model on a GPU, whose state is
gigabytes, the first and one that is drawn. The proof of the next checkpoint replays what is kept, in its fresh process and on the run's
device (assay/witness/replay.py). What is not replayed is said, and why.
"""

import json
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from assay.data.hub_datasets import local_data
from assay.data.mixture import weighted_source
from assay.errors import UsageError
from assay.learn.loop import Step
from assay.model.transformer import parameter_count
from assay.recipes.witness_pace import REPLAY_SPEED, WitnessPace
from assay.seeds import derive
from assay.store import durable
from assay.store.remote import is_url, local_path
from assay.store.saving import beside_the_loop, device_snapshot, room_on_device, snapshot
from assay.verdict import Outcome, Verdict, unproven
from assay.witness.due_looks import LOOKS, looks_summary
from assay.witness.replay import AFTER, BEFORE, RECORD, SAID, WITNESS_FOLDER, summary

if TYPE_CHECKING:  # which has these records
    from assay.recipes.trainer import Trainer

MOST_WORK = {"cpu": 3e12, "cuda": 1e14}  # floating-point operations of one replay, by where it runs: a minute or two, a few seconds
MOST_BYTES, MUCH_BYTES = 4 << 30, 1 << 30  # of one record; of one that is kept less often on a GPU
COPIES = 6  # weights and two moments, before and after


class WitnessRecords:
    """Witness records of a run since its start or resume. `off` says why nothing is kept, where that is so."""

    def __init__(self, trainer: "Trainer", *, witnesses: bool):
        self.trainer: Trainer = weakref.proxy(trainer)  # who holds it: a circle would keep a finished run's model on the GPU
        self.folder = trainer.run.folder / WITNESS_FOLDER
        drawn = trainer.run.config.witness
        if drawn != "off" and not drawn.isdecimal():
            raise UsageError(f"--witness is {drawn!r}; expected a number of steps to replay between the first and the last, or off")
        self.off = "--witness off" if drawn == "off" else None if witnesses else "this run is not proven"
        self.rollout: list[dict[str, Any]] | None = None  # what is learned from, where a run draws it itself
        self.drawn, self._before, self._begun = 0 if self.off else int(drawn), dict[str, Tensor](), False
        self._end: tuple[int | None, int | None] = None, None
        self.pace = WitnessPace()
        self.on_gpu = trainer.device.startswith("cuda")
        self._tokens = 0 if trainer.order is None else trainer.order.rows * trainer.order.length  # of a step, as far as is known
        self._writer, self._writing = ThreadPoolExecutor(1, "witness"), list[Future[None]]()

    def begin_step(self, step: int) -> None:
        """Copy the state, where step `step` (counted from 0) is one that is kept, can be replayed and is paid for."""
        self._begun = self.off is None and self.due(step)
        if self._begun and step > self.trainer.start and (why := self.pace.too_dear(self._seconds())) is not None:
            self._begun = False
            self._say_left_out(step + 1, why)
        if self._begun:
            schedule = self.trainer.schedule  # which may decide, once this step is taken, when the run ends
            self._end = schedule.stop_at, schedule.decay_from
            self._before = {} if self._too_much(self._tokens) else self._state()

    def due(self, step: int) -> bool:
        last, few = self.trainer.schedule.stop_at, self.on_gpu and self._bytes() > MUCH_BYTES
        if step == self.trainer.start or (last is not None and step == last - 1 and not few):
            return True
        drawn = [derive(self.trainer.run.config.seed, "witness", number) for number in range(min(self.drawn, 1) if few else self.drawn)]
        if last is None:  # time decides: one between 16 and 32, one between 256 and 512, …
            return step in {16 ** number + seed % 16 ** number for number, seed in enumerate(drawn, 1)}
        return step in {1 + seed % max(1, last - 1) for seed in drawn}

    def end_step(self, taken: Step | None) -> None:
        """Write the record beside the loop, once whatever else might touch the weights after the step has run."""
        if not self._begun or taken is None:
            return
        before, self._before, self._begun, self._tokens = self._before, {}, False, taken.tokens
        if (why := self._too_much(taken.tokens)) is not None or not before:
            self._say_left_out(taken.index + 1, why or "fewer tokens than were expected")
            return
        where = self._empty_folder(taken.index + 1)
        self.pace.kept.append(where)
        after, facts = self._state(), self._facts(taken)
        copied = torch.cuda.current_stream(self.trainer.device).record_event() if self.on_gpu else None
        self._writing.append(self._writer.submit(_write, where, before, after, facts, copied))

    def settle(self) -> None:
        """Wait until every record is whole. From any thread; raises what a write raised."""
        while self._writing:
            self._writing.pop(0).result()

    def close(self) -> None:
        """Wait for what is being written; nothing more is kept."""
        self._writer.shutdown()

    def _empty_folder(self, number: int) -> Path:
        where = self.folder / f"step-{number:06d}"
        where.mkdir(parents=True, exist_ok=True)
        (where / SAID).unlink(missing_ok=True)
        return where

    def _say_left_out(self, number: int, why: str) -> None:
        """Record that a step was not replayed, beside the records of the others, for the hallmark."""
        where = self._empty_folder(number)
        said = unproven("witness", f"{where.name} was not replayed: {why}", optional=True)
        durable.replace_file(where / SAID, json.dumps(said.to_json()).encode())

    def _seconds(self) -> float:
        """Seconds that a replay will take, as far as its operations tell: in double precision and once more in the run's."""
        return 12.0 * self._tokens * parameter_count(self.trainer.model) / REPLAY_SPEED["cuda" if self.on_gpu else "cpu"]

    def _bytes(self) -> int:
        return COPIES * 4 * sum(p.numel() for p in self.trainer.model.parameters() if p.requires_grad)

    def _too_much(self, tokens: int) -> str | None:
        work, most = 6.0 * tokens * parameter_count(self.trainer.model), MOST_WORK["cuda" if self.on_gpu else "cpu"]
        if self._bytes() > MOST_BYTES:
            return f"its record would hold {self._bytes() / 2**30:.1f} GiB, more than {MOST_BYTES >> 30}"
        return f"a replay would take {work:.1e} operations, more than {most:.0e}" if work > most else None

    def _facts(self, taken: Step) -> dict[str, Any]:
        trainer, lineage = self.trainer, self.trainer.weights.ancestry.later
        base = getattr(trainer.weights, "base", None)
        return {"recipe": type(trainer.run.config).__name__, "step": taken.index, "first": taken.index == trainer.start,
                "loss": float(taken.loss), "weight": taken.weight, "ids": [list(map(str, row)) for row in taken.ids],
                "stop_at": self._end[0], "decay_from": self._end[1], "steps_before": trainer.steps_before,
                "parent": "" if lineage.parent is None else lineage.parent.path, "base": None if base is None else base.path,
                "device": trainer.device, "local": local_copies(trainer.run.config),
                "rollout": self.rollout}

    def _state(self) -> dict[str, Tensor]:
        """Trained weights and the optimizer's moments, in memory of their own: on the GPU where there is room, else on the CPU."""
        trained, state = self.trainer.state_now()
        weights = {f"weights/{name}": p for name, p in trained.items()}
        moments = {f"state/{name}": tensor for name, tensor in state.items()}
        if room_on_device([*weights.values(), *moments.values()]):
            return device_snapshot(weights | moments)
        return snapshot(weights | moments)


def local_copies(config: Any) -> dict[str, Any]:
    """Options that name a URL, and where the run read what lies there. Of teachers by weight (a=0.7,b=0.3) none is replayed. `copies` are
    those of --data and --mix, by URL."""
    named = {name: getattr(config, name, None) for name in ("corpus", "teacher")}
    found: dict[str, Any] = {name: str(local_path(value)) for name, value in named.items()
                             if value is not None and is_url(value) and "=" not in value}
    copies = {name: str(local(name)) for option, local in (("data", local_data), ("mix", local_path))
              for entry in getattr(config, option, ()) or () if is_url(name := weighted_source(entry).name)}
    return found | ({"copies": copies} if copies else {})


def _write(where: Path, before: dict[str, Tensor], after: dict[str, Tensor], facts: dict[str, Any],
           copied: torch.cuda.Event | None) -> None:
    """Write a record, which is whole when `record.json` is there. On a GPU once the copies are made."""
    with beside_the_loop(copied):
        for state, name in ((before, BEFORE), (after, AFTER)):
            save_file(snapshot(state) if copied is not None else state, where / name)
            state.clear()
    durable.replace_file(where / RECORD, json.dumps(facts).encode())


def pending_records(run: Path) -> list[Path]:
    """Records that are complete and that no process has replayed yet."""
    return sorted(path.parent for path in (run / WITNESS_FOLDER).glob(f"step-*/{RECORD}") if not (path.parent / SAID).exists())


def look_folder(run: Path, name: str) -> Path:
    """Folder of a kept evaluation: of a step, or of the parent's or the final model's answers to every held-out prompt."""
    return run / WITNESS_FOLDER / f"eval-{name}"


def pending_looks(run: Path, step: int) -> list[Path]:
    """Evaluations up to a step that no process has looked at again yet."""
    kept = sorted(path.parent for path in (run / WITNESS_FOLDER).glob(f"eval-[0-9]*/{RECORD}") if not (path.parent / SAID).exists())
    return [folder for folder in kept if int(folder.name.rpartition("-")[2]) <= step]


def looks_verdicts(run: Path) -> list[Verdict]:
    """The witness's verdicts on the kept evaluations, if any."""
    kept = sorted(path.parent for path in (run / WITNESS_FOLDER).glob(f"eval-[0-9]*/{RECORD}"))
    said = [json.loads((folder / SAID).read_text()) if (folder / SAID).exists() else
            unproven(LOOKS, f"{folder.name} was kept and not looked at again", optional=True).to_json() for folder in kept]
    return [looks_summary([Verdict(v["check"], Outcome(v["outcome"]), v["reason"], v["evidence"]) for v in said])] if kept else []


def witness_verdict(run: Path, asked: str) -> Verdict:
    """The witness's verdict on all kept steps of a run. `asked` is --witness."""
    if asked == "off":
        return unproven("witness", "--witness off: no step was replayed by code that did not take it", optional=True)
    said = [json.loads(path.read_text()) for path in sorted((run / WITNESS_FOLDER).glob(f"step-*/{SAID}"))]
    waiting = [unproven("witness", f"{path.name} was kept and not replayed", optional=True) for path in pending_records(run)]
    return summary([Verdict(v["check"], Outcome(v["outcome"]), v["reason"], v["evidence"]) for v in said] + waiting)

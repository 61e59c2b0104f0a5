"""What every training recipe remembers between steps: resume, rehearse, account, look, save, prove. A recipe adds its data and its loss.

The loop itself (learn/loop.py) knows none of this. A recipe is a subclass that gives the parts and answers what differs:
which batches, which facts about the data stand in a checkpoint, and which verdicts its data must earn.
"""

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.data_ledger import DataPlan, check_data_ledger, ids_digest
from assay.data.order import StepBatches, iterate_batches
from assay.guard.loss_preflight import Gradients, check_precision, loss_gradients, preflight_loss, sample_rows
from assay.guard.resume_checks import check_resumed
from assay.guard.training_guards import (
    LEARNING_SHARE,
    StepReading,
    StepWatch,
    UpdateAccount,
    check_detectors,
    check_gradients,
    check_optimizer,
    check_steps,
    check_weights,
)
from assay.learn import loop
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.ema import Ema, split_ema_state
from assay.learn.loop import Accumulate, Step, train
from assay.learn.objectives import Objective
from assay.learn.optim import load_state_tensors, state_tensors
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.recipes.forms import Form
from assay.recipes.looks import Looks
from assay.recipes.pace import Pace
from assay.recipes.run import Run, plain
from assay.recipes.stopping import Stopping
from assay.recipes.thrift import Thrift
from assay.store.checkpoint import Checkpoint, Contents
from assay.store.digests import environment
from assay.store.ledger import Event
from assay.store.saving import owned_contents
from assay.strict_json import read_json_lines
from assay.verdict import Verdict


class Source(StepBatches, Protocol):
    """Where batches come from: a pure function of the step."""

    @property
    def rows(self) -> int: ...  # of a batch
    @property
    def windows(self) -> int: ...  # parts that an epoch reads, each once
    @property
    def steps(self) -> int: ...  # that the data gives before it is exhausted
    def epoch_of(self, step: int) -> int: ...


@dataclasses.dataclass
class Parts:
    """What a recipe is made of."""

    run: Run
    model: Transformer
    form: Form
    optimizer: torch.optim.Optimizer
    objective: Objective
    source: Source
    pace: Pace
    looks: Looks
    watch: StepWatch
    micro: int  # rows that go through the model at a time
    clip: float
    every: int  # steps between checkpoints; the first comes after step 1
    ema: Ema | None = None
    minutes: float | None = None  # also a checkpoint after so many
    steps_before: int = 0  # that the optimizer's moments have seen in another run
    look_first: bool = False  # at what the run begins with: what it was worth before is part of the result
    stopping: Stopping | None = None


class Training(ABC):
    def __init__(self, config: Any, parts: Parts):
        self.config, self.parts = config, parts
        self.run, self.model, self.optimizer, self.source = parts.run, parts.model, parts.optimizer, parts.source
        self.pace, self.looks, self.watch, self.ema = parts.pace, parts.looks, parts.watch, parts.ema
        self.device = str(self.model.embed.weight.device)
        self.accumulate: Accumulate = GraphedAccumulate() if self.device.startswith("cuda") else loop.accumulated
        self.start = self.done = self.saved = 0  # steps taken before this sitting, in all, and up to the last save
        self.saved_at = 0.0  # seconds of the run
        self.thrift = Thrift()

    # ---------------------------------------------------------------- what a recipe answers

    @abstractmethod
    def data_facts(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of the data that was read up to `step`."""

    @abstractmethod
    def data_verdicts(self) -> list[Verdict]:
        """Before the first step of a sitting."""

    @abstractmethod
    def same_data(self, recorded: Mapping[str, Any]) -> Verdict:
        """Whether the data is what a checkpoint's `data_facts` say."""

    def rehearsals(self, batch: Batch) -> list[Verdict]:
        """What the objective must show on one real batch. Next-token losses are compared with their naive twin."""
        return preflight_loss(self.model, self.parts.objective, batch, self.accumulate)

    def precision(self, batch: Batch, found: Gradients) -> list[Verdict]:
        """Where the run computes in less than fp32, that what it makes of a batch is near what fp32 makes of it."""
        rounded = self.model.compute_dtype not in (None, torch.float32)
        return [check_precision(self.model, self.parts.objective, batch, found, *self.consulted())] if rounded else []

    def consulted(self) -> list[Transformer]:
        """Other models that the objective asks."""
        return []

    @abstractmethod
    def read_times(self) -> dict[int, int]:
        """How many parts of the data all steps so far have read how often: {times: parts}."""

    def counted(self, plan: DataPlan) -> dict[int, int]:
        """The same, of data whose plan is a function of the step: counted from what the steps wrote down, and judged."""
        recorded = {row["step"]: row["data"] for row in read_json_lines(self.run.metrics_file) if "data" in row}
        verdict, times = check_data_ledger(recorded, plan, self.done)
        self.run.judge(Event.DATA_LEDGER, [verdict])
        return times

    def also_recorded(self, read: StepReading) -> dict[str, Any]:
        """More columns for a step's line of metrics."""
        return {}

    # ---------------------------------------------------------------- the run

    def go(self) -> int | None:
        """All steps that are left. Returns the signal that interrupted the run, if one did."""
        with self.run.interruptible():
            self.begin()
            for step in train(self.model, self.optimizer, self.batches(), self.parts.objective, micro=self.parts.micro,
                              schedule=self.pace.multiplier, clip=self.parts.clip, start=self.start, accumulate=self.accumulate):
                self.after(step)
                if self.over():
                    break
            self.finish()
        return self.run.interrupted

    def begin(self) -> None:
        """Go on from the newest good checkpoint, or make the first one: a save is made and proven before step 1."""
        found = self.run.newest() if self.run.resumed else None
        if found is not None:
            self.resume(found)
        else:
            self.run.rewind(0)
            self.looks.recall()
        self.rehearse()
        if found is None:
            self.run.save(0, lambda: self.contents(0), best=None)
            if self.parts.look_first:
                self.looks.look(self.model, 0)
        self.account = UpdateAccount(self.model, self.parts.form.reachable())

    def batches(self) -> Iterator[Batch]:
        self.run.ledger.append(Event.DATA, **self.data_facts(self.start), windows=self.source.windows, from_step=self.start)
        self.watch.begin()
        self.thrift.begin()
        return self.planned_batches()

    def planned_batches(self) -> Iterator[Batch]:
        return iter(()) if self.stopped else iterate_batches(self.source, self.start, self.pace.budget.steps)

    @property
    def stopped(self) -> bool:
        """Early, by what the looks show."""
        return self.parts.stopping is not None and self.parts.stopping.reason is not None

    def rehearse(self) -> None:
        """Before the first step of a sitting: the loss is the loss, every tensor is reached and held, the alarms are awake.

        One micro-batch goes through as all of the run's will: what is compiled and captured for it serves them too.
        """
        batch = next(self.rehearsal_batch().split(self.parts.micro)).to(self.device)
        whole = len(batch), float(batch.weight.sum())
        found = loss_gradients(self.model, lambda: self.accumulate(self.model, self.parts.objective, batch, *whole).loss, backward=False)
        form = self.parts.form
        with uncompiled():
            verdicts = [check_detectors(), *self.rehearsals(sample_rows(batch)), *self.precision(batch, found),
                        check_gradients(found[1], form.reachable()), check_optimizer(self.model, self.optimizer, form.trained()),
                        *self.data_verdicts()]
        self.run.say("\n".join(f"  {verdict}" for verdict in verdicts))
        self.run.judge(Event.PREFLIGHT, verdicts)

    def rehearsal_batch(self) -> Batch:
        return self.source.batch(0)

    def resume(self, found: Checkpoint) -> None:
        """Weights, moments and the step number: everything else is a function of them."""
        trainer = found.trainer() or {}
        self.parts.form.restore(found)
        moments, average = split_ema_state(found.optimizer() or {})
        load_state_tensors(self.optimizer, dict(self.model.named_parameters()), moments)
        if self.ema is not None:
            self.ema.load(average)
        self.run.judge(Event.RESUMED, [check_resumed(self.parts.form.weights(), self.state(), found), self.same_data(trainer["data"]),
                                   check_steps(self.optimizer, trainer["step"] + self.parts.steps_before)])
        self.start = self.done = self.saved = trainer["step"]
        self.pace.restore(trainer)
        self.run.rewind(self.start)
        self.looks.recall()
        if self.parts.stopping is not None:
            self.parts.stopping.judge(self.done)
        self.run.say(f"going on from step {self.start} ({found.folder.name})")
        now, was = environment(), found.facts["environment"]
        if changed := {name: f"{was.get(name)} → {now[name]}" for name in now if was.get(name) != now[name]}:
            self.run.say(f"the environment changed ({changed}): the run goes on, but is not bit for bit the uninterrupted one")
            self.run.ledger.append(Event.NOT_BIT_EXACT, changed=changed)

    def after(self, step: Step) -> None:
        self.record(self.watch.feed(step, [group["lr"] for group in self.optimizer.param_groups]))
        self.account.stepped(step.multiplier, min(group["lr"] for group in self.optimizer.param_groups))
        self.done = step.index + 1
        if self.ema is not None:
            self.ema.update(step.index)
        self.run.check()
        if self.pace.decide_the_end(self.done, self.watch.pace()):
            self.run.ledger.append(Event.WAY_DOWN, step=self.done, stop_at=self.pace.stop_at, seconds_a_step=self.watch.pace())
        if self.due():
            self.checkpoint()
        self.watch.begin()

    def due(self) -> bool:
        """A checkpoint after step 1, every so many steps or minutes, and where the data ends: a next step raises."""
        late = self.parts.minutes is not None and self.pace.clock.seconds - self.saved_at >= 60 * self.parts.minutes
        return late or self.done in (1, self.source.steps) or self.done % self.parts.every == 0

    def record(self, read: list[StepReading]) -> None:
        for found in read:
            step, loss, norm, metrics = found
            self.looks.saw(loss)
            self.run.record(step.index, loss=loss, grad_norm=norm, **metrics, learning_rate=self.watch.peaks[0] * step.multiplier,
                            num_tokens=(step.index + 1) * step.tokens, epoch=self.source.epoch_of(step.index), data=ids_digest(step.ids),
                            **self.also_recorded(found), seconds=round(self.pace.clock.seconds, 3))
        if read:
            shown = {"loss": read[-1].loss, **read[-1].metrics}
            told = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
            self.run.progress(self.done, self.pace.stop_at, told, self.pace.clock.seconds)

    def over(self) -> bool:
        return self.run.interrupted is not None or self.stopped or self.pace.over(self.done)

    def checkpoint(self, *, look: bool = True) -> None:
        """A look, and a save of what was looked at. What moved and what did not is accounted for first."""
        self.record(self.watch.read())
        if self.done > self.start:
            self.settle_account()
        if look:
            with contextlib.nullcontext() if self.ema is None else self.ema.swapped():
                self.looks.look(self.model, self.done, weight_set=None if self.ema is None else "ema")
        if self.saved != self.done:
            self.saved, self.saved_at = self.done, self.pace.clock.seconds
            with self.thrift.saving():
                self.run.save(self.done, partial(self.contents, self.done), best=self.best())
        if look and self.parts.stopping is not None:
            self.parts.stopping.judge(self.done)

    def best(self) -> Path | None:
        return self.looks.best_checkpoint(self.run.checkpoints) if self.looks.steps else None

    def settle_account(self) -> None:
        applied = check_steps(self.optimizer, self.done + self.parts.steps_before)
        self.run.judge(Event.ACCOUNT, [self.account.moved(), self.account.frozen(), applied, check_weights(self.model)])
        if self.pace.multiplier(self.done - 1) >= LEARNING_SHARE:
            self.account.begin()

    def contents(self, step: int) -> Contents:
        trainer = {"step": step, "steps_before": self.parts.steps_before, **self.pace.state(), "data": self.data_facts(step),
                   "rng": {"seed": self.config.seed}}
        return owned_contents(self.parts.form.contents(step, plain(dataclasses.asdict(self.config)), trainer, self.state()))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint's optimizer file holds, live."""
        moments = state_tensors(self.optimizer, dict(self.model.named_parameters()))
        return moments if self.ema is None else moments | self.ema.tensors()

    def finish(self) -> None:
        """Whatever ended the loop: the last values are judged, the last state is saved and proven.

        An interrupted run takes no look, because the uninterrupted one would not have taken it here.
        """
        self.record(self.watch.read())
        self.run.looping = False
        self.run.ledger.append(Event.SAVING, seconds=self.thrift.seconds, checkpoints=self.thrift.times, loop=self.thrift.loop)
        if (advice := self.thrift.advice(self.done - self.start)) is not None:
            self.run.say(advice)
        interrupted = self.run.interrupted is not None
        if self.done and (self.saved if interrupted else self.looks.latest_step) != self.done:
            self.checkpoint(look=not interrupted)
        self.run.finish()
        self.run.ledger.append(Event.CONSUMED, steps=self.done, windows=self.source.windows, read_times=plain(self.read_times()))
        if self.looks.steps:
            self.run.tidy(self.best())

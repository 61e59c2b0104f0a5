"""Trainer: what every training recipe keeps between steps, for the recipe to call: resume, preflight, metrics, accounting, saves.

    trainer = Trainer(run, weights, optimizer, objective, schedule, …)
    if (saved := run.newest()) is not None:
        trainer.resume(saved, data.check_same(…))
    …                                   # preflight, the first save, the first evaluation
    trainer.start_loop(data.facts(trainer.done), parts)
    for step in trainer.steps(batches):
        trainer.record(step, …)         # its line of metrics; every value is judged
        if trainer.save_due():
            trainer.account()           # what moved and what did not
            trainer.save(data.facts(trainer.done), best=…)
    trainer.end_loop()

The loop itself (learn/loop.py) knows none of this, and this knows neither the data nor the method: a recipe passes values.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.data_ledger import ids_digest
from assay.data.order import Order
from assay.data.packing import PackedExamples
from assay.errors import UsageError
from assay.guard.average_checks import FollowedAverage
from assay.guard.data_order_checks import check_consumed
from assay.guard.loss_preflight import Gradients, check_precision, loss_gradients
from assay.guard.resume_checks import check_resumed
from assay.guard.training_guards import (
    LEARNING_SHARE,
    StepReading,
    StepWatch,
    UpdateAccount,
    check_coded_moments,
    check_gradients,
    check_optimizer,
    check_steps,
    check_weights,
    stop_if_refuted,
)
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.ema import Ema, split_ema_state
from assay.learn.loop import Accumulate, Step, train
from assay.learn.loss_scaling import ScaledAccumulate
from assay.learn.low_bit_adamw import STRETCH, LowBitAdamW
from assay.learn.lr_schedule import Schedule
from assay.learn.objectives import Objective
from assay.learn.optim import largest_quotient, load_state_tensors, state_tensors
from assay.learn.parallel import ParallelAccumulate
from assay.learn.sharded import ShardedEma, ShardedOptimizer
from assay.model.transformer import Transformer, parameter_count
from assay.model.world import World
from assay.recipes.processes import (
    PartedAccount,
    accumulate_together,
    check_parted_weights,
    check_processes,
    check_ranks,
    check_sharding,
    check_world_parity,
    require_global,
    sharded_model,
)
from assay.recipes.run import Run, plain
from assay.recipes.save_pace import LITTLE, SavePace
from assay.recipes.starting_model import AdapterModel, TrainedWeights, under_foreign_names, writes_merged
from assay.recipes.step_replay import StepReplay
from assay.recipes.witness_records import WitnessRecords
from assay.store import durable
from assay.store.checkpoint import Checkpoint, Contents, step_folder
from assay.store.digests import environment
from assay.store.ledger import Event
from assay.store.saving import Lineage, owned_contents, room_in_memory
from assay.verdict import Verdict, unproven

ROUNDING_DEVIATIONS = 10.0  # standard deviations of the sum of stochastic roundings that no element ever strays
Describe = Callable[[], Contents | Callable[[], Contents]]  # what is to be saved now: live tensors, or a function that makes owned ones
MOST_BYTES_EARLY = 4 * 10**9  # of a checkpoint after step 1, where the cost decides: a larger one waits for its turn


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """Save plan: a checkpoint after the first step (or rollout), every so many steps, after so many minutes, and where the data ends.

    `paced`: of the regular checkpoints only those that the time budget of saving allows, and others between them where it allows. The
    weights of the best evaluation wait in memory for their turn.
    """

    every: int
    last: int  # steps that the data gives: a next one would raise
    minutes: float | None = None
    paced: bool = False


class WaitingBest(NamedTuple):
    """The state after the best evaluation so far, which is to be saved: `at` is when that was."""

    step: int
    contents: Callable[[], Contents]
    at: float


class Trainer:
    """State of a training run between steps: model, optimizer, schedule, saves and checks. A recipe calls its methods from top to bottom.

    `order` is the plan of which rows each step reads, where it is known in advance. `steps_before` is how many steps the optimizer's
    moments have seen in another run. `steady` is False in reinforcement learning, where rewards decide and some steps have no gradient at
    all.
    """

    def __init__(self, run: Run, weights: TrainedWeights, optimizer: torch.optim.Optimizer, objective: Objective, schedule: Schedule, *,
                 micro: int, clip: float, saves: SavePlan, order: Order | PackedExamples | None = None, vocab: int | None = None,
                 ema: Ema | None = None, steps_before: int = 0, steady: bool = True, world: World | None = None):
        self.run, self.weights, self.model, self.optimizer, self.objective = run, weights, weights.model, optimizer, objective
        self.schedule, self.micro, self.clip, self.saves, self.order = schedule, micro, clip, saves, order
        self.ema: Ema | ShardedEma | None = ema
        self._followed: FollowedAverage | None = None
        self.steps_before, self.steady = steps_before, steady
        self.watch = StepWatch([group["lr"] for group in optimizer.param_groups], schedule.multiplier, vocab=vocab, steady=steady)
        in_parts = weights.stored is not None and world is not None
        self.device = world.device if in_parts and world is not None else str(self.model.embed.weight.device)
        self.sharded = sharded_model(run.config, world, self.model, optimizer, objective, ema)
        if self.sharded is not None and weights.stored is not None:
            self.sharded.open_in_parts(weights.stored)
        self.accumulate = self.sharded or accumulate_together(world, run.config.shards, self.model, objective, self.device)
        self.scaling = ScaledAccumulate(self.accumulate) if self.model.compute_dtype == torch.float16 else None
        self.accumulate = self.scaling or self.accumulate
        self._scale_state: dict[str, Any] | None = None  # where the session begins
        self.replay = StepReplay(run.config.replay_steps, self.accumulate, self.model, objective, micro)
        self._frozen_in_parts: list[Mapping[str, int]] = []
        self._shares = 0
        self.start = self.done = 0  # steps taken before this process, and in all
        self.saved: int | None = None  # the step of the newest checkpoint
        self.pace, self._looped = SavePace(), False
        self._waiting: WaitingBest | None = None
        run.save_waiting = self._save_waiting
        self._saved_at = 0.0  # seconds of the run
        self._losses: list[float] = []  # since they were last asked for
        self._columns: dict[int, dict[str, Any]] = {}  # of steps whose line is still to be written
        self._shown = ""
        self.consumed: Verdict | None = None  # whether the steps that were last read back read what was planned
        self._informed = False  # a step since the last account had a gradient
        self._accounted = 0  # the step of the last account
        self.records = WitnessRecords(self, witnesses=run.witnesses)
        run.settle_records, run.close_records = self.records.settle, self.records.close
        self._unkept: Step | None = None  # the last step, until it is known that nothing touches the weights after it

    # ---------------------------------------------------------------- before the first step

    def resume(self, found: Checkpoint, *same_data: Verdict) -> None:
        """Restore weights, optimizer moments and the step number from a checkpoint; everything else is a function of these."""
        state = found.trainer() or {}
        moments, average = split_ema_state(found.optimizer() or {})
        load_state_tensors(self.optimizer, dict(self.model.named_parameters()), moments)  # of one in parts: checked, and counters alone
        if self.sharded is not None and self.sharded.never_whole:
            self.sharded.open_in_parts(self.weights.stored_in(found, moments, average))
        else:
            self.weights.restore(found)
        if isinstance(self.ema, Ema):
            self.ema.load(average)
        self.run.judge(Event.RESUMED, [check_resumed(*self._live(), found), *same_data,
                                   check_steps(self.optimizer, state["step"] + self.steps_before)])
        self.start = self.done = self.saved = state["step"]
        self._scale_state = state.get("loss_scale")
        self.schedule.restore(state)
        if "saving" in state:
            self.pace.restore(state["saving"])
        self.run.rewind(self.start)
        self.run.say(f"resuming from step {self.start} ({found.folder.name})")
        now = environment() | {"processes": str(self._parting_processes())}
        was = {"processes": str(state.get("processes", 1))} | found.facts["environment"]
        if changed := {name: f"{was.get(name)} → {now[name]}" for name in now if was.get(name) != now[name]}:
            self.run.say(f"the environment changed ({changed}): the run goes on, but is not bit for bit the uninterrupted one")
            self.run.log(Event.NOT_BIT_EXACT, changed=changed)

    def _live(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Live tensors of the weight and optimizer files of a checkpoint, before the first step since this start or resume."""
        if self.sharded is None or not self.sharded.never_whole:
            return self.weights.weights(), self._state()
        ours, state = self.sharded.live()
        adapter = isinstance(self.weights, AdapterModel)  # whose factors are here
        return self.weights.weights() if adapter else under_foreign_names(self.model.config, ours), state

    def parameters(self) -> Mapping[str, Tensor]:
        """The model's parameters, before the first step since this start or resume; where no process holds the whole model, each is
        gathered on access.
        """
        in_parts = self.sharded is not None and self.sharded.never_whole
        return self.sharded.live()[0] if self.sharded is not None and in_parts else dict(self.model.named_parameters())

    def first_micro_batch(self, batch: Batch) -> Batch:
        """The first micro-batch of a batch, on the device."""
        return next(batch.split(self.micro)).to(self.device)

    def gradients(self, batch: Batch) -> Gradients:
        """Gradients of one micro-batch, computed as all micro-batches of the run will be, so that compiled code and CUDA graphs are
        reused.
        """
        whole = len(batch), float(batch.weight.sum())
        with self.run.spent.part("compile" if self.device.startswith("cuda") else "preflight"):
            return loss_gradients(self.model, lambda: self.accumulate(self.model, self.objective, batch, *whole).loss, backward=False)

    def check_precision(self, batch: Batch, found: Gradients, *others: Transformer) -> list[Verdict]:
        """Check, where the run computes in less than fp32, that its loss and gradients on a batch are close to fp32's."""
        rounded = self.model.compute_dtype not in (None, torch.float32)
        return [check_precision(self.model, self.objective, batch, found, *others)] if rounded else []

    def check_reach(self, found: Gradients) -> list[Verdict]:
        """Check that every tensor to be trained gets a gradient and is in the optimizer."""
        return [check_gradients(found[1], self.weights.reachable()), check_optimizer(self.model, self.optimizer, self.weights.trained()),
                *check_coded_moments(self.optimizer), *check_processes(self.accumulate)]

    def check_world(self, batch: Batch, compute: torch.dtype | None = None) -> list[Verdict]:
        """Check, where several processes compute, or a step is cut into shards, that they compute what one process computes on a batch.
        `compute` is the dtype of the comparison, for gradients that are sums of cancelling terms, in which rounding would dominate.

        With FSDP the model is whole until here and sharded from here on; `weights` then reads process 0's copy in host memory.
        """
        usual, self.model.compute_dtype = self.model.compute_dtype, compute or self.model.compute_dtype
        try:
            if self.sharded is None:
                parity = check_world_parity(self.accumulate, batch, self.micro)
            else:
                parity = check_sharding(self.sharded, batch, self.micro)
        finally:
            self.model.compute_dtype = usual
        verdicts = [*parity, *self.replay.check_start(batch)]
        if self.sharded is None:
            return verdicts
        assert self.sharded.whole is not None, "process 0 keeps a copy"
        for copied in (self.sharded.whole, self.sharded.gathered):
            if copied is not None:
                copied.compute_dtype = usual
        self.weights.model, self.optimizer = self.sharded.whole, ShardedOptimizer(self.sharded)
        if self.ema is not None:
            self.ema = ShardedEma(self.sharded)
        return verdicts

    def sampled_weights(self) -> TrainedWeights:
        """`weights` with a model that this process can sample from alone; with sharded parameters that is process 0's copy, as of its
        last gathering.
        """
        found = copy.copy(self.weights)
        if self.sharded is not None and self.sharded.gathered is not None:
            found.model = self.sharded.gathered
        return found

    @property
    def accumulate_alone(self) -> Accumulate:
        """Gradient accumulation in this process only, without shards."""
        return self.accumulate.inner if isinstance(self.accumulate, ParallelAccumulate) else self.accumulate

    def _graphs(self) -> GraphedAccumulate | None:
        alone = self.accumulate_alone.inner if isinstance(self.accumulate_alone, ScaledAccumulate) else self.accumulate_alone
        return alone if isinstance(alone, GraphedAccumulate) else None

    def start_loop(self, facts: Mapping[str, Any], parts: int) -> None:
        """Begin the training loop: from here on every change of a tensor is accounted for, and time counts. An epoch reads `parts` parts
        of the data, each once.
        """
        if self.scaling is not None:
            self.scaling.restore(self._scale_state)  # whatever a preflight made of it
        if (graphs := self._graphs()) is not None:
            graphs.keep_only(self.model.compute_dtype)
            torch.cuda.empty_cache()  # what a preflight took in fp32 stays held otherwise, and proofs beside the loop find no room
        if self.sharded is not None and self.sharded.never_whole:
            self.sharded.forget_gradients()
            self._account: UpdateAccount = PartedAccount(self.sharded, self.weights.reachable())
        else:
            self._account = UpdateAccount(self.weights.model, self.weights.reachable(), drawn=self._masters_in_bf16())
        self._frozen_in_parts = [each["frozen"] for each in self.sharded.said_by_all()] if self.sharded is not None else []
        self.run.log(Event.DATA, **facts, windows=parts, from_step=self.done)
        self.run.save_cost.begin()
        self.run.spent.phase("steps")
        self.schedule.begin()
        self._saved_at = self.schedule.clock.seconds
        self.watch.begin()

    # ---------------------------------------------------------------- the loop

    def steps(self, batches: Iterable[Batch]) -> Generator[Step, None, None]:
        taken = train(self.model, self.optimizer, self._replayed(self._compared(batches)), self.objective, micro=self.micro,
                      schedule=self.schedule.multiplier, clip=self.clip, start=self.done, accumulate=self.accumulate)
        try:
            self.records.begin_step(self.done)
            for step in taken:
                require_global(step)
                self.done, self._unkept = step.index + 1, step
                yield step
                self._keep_step()
                self.records.begin_step(self.done)
        finally:
            self._keep_step()

    def _replayed(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        """Batches, with one micro-batch computed twice before every --replay-steps step."""
        for step, batch in enumerate(batches, self.done):
            if self.replay.due(step):
                self.run.judge_often(Event.STEP, [self.replay.check(step, batch)])
            yield batch

    def _compared(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        """Batches; every --replica-steps the processes compare what they hold, before the next step is computed with it."""
        every = self.run.config.replica_steps
        for step, batch in enumerate(batches, self.done):
            if every and step % every == 0 and step > self.start and (found := self._check_agreement()):
                self.run.judge(Event.STEP, found)
            yield batch

    def _check_agreement(self) -> list[Verdict]:
        if self.sharded is None:
            return check_processes(self.accumulate)
        return check_ranks(self.sharded.said_by_all(), self._frozen_in_parts, self.done + self.steps_before)

    def _keep_step(self) -> None:
        """Write the record of a step that the witness replays."""
        self.records.end_step(self._unkept)
        self._unkept = None

    def record(self, step: Step, *, shown: str = "", **columns: Any) -> None:
        """Write the step's line of metrics, once its values have arrived and were checked. `shown` is what the progress line says of the
        step.
        """
        scaled = {} if self.scaling is None else {"loss_scale": self.scaling.scale, "recomputed_batches": self.scaling.recomputed}
        self._columns[step.index], self._shown = columns | scaled, shown
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self._write(self.watch.feed(step, rates))
        self._account.record_step(step.multiplier, min(rates))
        if self.ema is not None:
            self._update_average(self.ema, step.index)
        self.run.check()
        if self.schedule.decide_end(self.done, self.watch.pace()):
            self.run.log(Event.WAY_DOWN, step=self.done, stop_at=self.schedule.stop_at, seconds_a_step=self.watch.pace())
        self.watch.begin()

    def _update_average(self, ema: Ema | ShardedEma, step: int) -> None:
        if self._followed is None:
            own = ema if isinstance(ema, Ema) else ema.own_rows
            self._followed = FollowedAverage(own.averaged(), own.tensors(), own.decay)
        ema.update(step)
        self._followed.update(step)

    def _write(self, read: list[StepReading]) -> None:
        seconds = self.schedule.clock.seconds
        if self.order is not None and read:
            self.consumed = check_consumed([each.step for each in read], self.order)
            stop_if_refuted([self.consumed])
        for step, loss, norm, metrics in read:
            self._losses.append(loss)
            self._informed |= norm > 0
            row: dict[str, Any] = {
                "loss": loss, "grad_norm": norm, **metrics, "learning_rate": self.watch.peaks[0] * step.multiplier,
                "num_tokens": (step.index + 1) * step.tokens, "data": ids_digest(step.ids)}
            self.run.record(step.index, **(row | self._columns.pop(step.index)), seconds=round(seconds, 3))
        if read:
            self.pace.read(self.watch.seconds[-1], len(read), beside=self.run.busy_beside)
            told = "  ".join(f"{name} {value:.4f}" for name, value in {"loss": read[-1].loss, **read[-1].metrics}.items())
            self.run.progress(self.done, self.schedule.stop_at, self._shown or told, seconds)

    def new_losses(self) -> list[float]:
        """The training losses that were read since this was last asked."""
        found, self._losses = self._losses, []
        return found

    def over(self) -> bool:
        """Whether the budget is spent or a signal came."""
        return self.run.interrupted is not None or self.schedule.over(self.done)

    def save_due(self) -> bool:
        """Whether a checkpoint with an evaluation is due. Only the step number decides, unless --save-minutes was given."""
        first = self.done == self.schedule.multiple and not (self.saves.paced and self._checkpoint_bytes() > MOST_BYTES_EARLY)
        return self._late() or first or self.done == self.saves.last or self.done % self.saves.every == 0

    def _late(self) -> bool:
        """Whether a save is late by --save-minutes."""
        return self.saves.minutes is not None and self.schedule.clock.seconds - self._saved_at >= 60 * self.saves.minutes

    def extra_save_due(self) -> bool:
        """Whether a checkpoint without an evaluation is due, so that a kill loses little. The clock may decide, since nothing else
        depends on it.
        """
        return self.saves.paced and self.pace.due()

    def account(self) -> None:
        """Account for all updates before an evaluation and a save: check the last values, that trained tensors moved and that frozen ones
        did not.
        """
        self._keep_step()
        self._write(self.watch.read())
        if self.done == self.start:
            return
        if self.sharded is not None:
            self.sharded.refresh()
        still = self.done == self._accounted or (not self.steady and not self._informed)
        nothing_due = unproven("movement", "no step since the last account had a gradient", optional=True)
        moved = nothing_due if still else self._account.check_moved()
        applied = check_steps(self.optimizer, self.done + self.steps_before)
        finite = check_parted_weights(self.sharded) if self.sharded is not None and self.sharded.never_whole else \
            check_weights(self.weights.model)
        average = [] if self._followed is None else [self._followed.check()]
        self.run.judge(Event.ACCOUNT, [moved, *self._check_frozen(), applied, finite, *average, *check_processes(self.accumulate)])
        self._accounted = self.done
        if not still:
            self._informed = False
            if self.schedule.multiplier(self.done - 1) >= LEARNING_SHARE:
                self._account.begin()

    def _check_frozen(self) -> list[Verdict]:
        """Check that frozen tensors kept their bits. Where parameters are sharded, each process looks at its own rows, and all say what
        step they took."""
        if self.sharded is None:
            return [self._account.check_frozen()]
        return check_ranks(self.sharded.said_by_all(), self._frozen_in_parts, self.done + self.steps_before)

    def scored_weights(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model holds the weights that are evaluated: their moving average, where there is one."""
        return contextlib.nullcontext() if self.ema is None else self.ema.swapped()

    # ---------------------------------------------------------------- saves

    def save(self, facts: Mapping[str, Any], *, best: Path | None = None, moved: bool = True) -> None:
        """The state after `done` steps, unless it is saved. `facts` are the data's; `moved` is False where nothing has changed the weights.

        What was `best` so far stays when old checkpoints are retired. In a run whose saves are paced it may be too early for a
        checkpoint: then the best waits in memory, and what is not the best is not kept. Before anything newer is saved, what waits is:
        a run that goes on from a checkpoint finds the best up to there on the disk.
        """
        if self.saved is None and self.done == 0:
            self._require_disk()
        if self.saved != self.done:
            is_best = best is not None and best == step_folder(best.parent, self.done)
            self._take_turn(partial(self._describe, facts, moved), best, is_best=is_best)
        self.watch.begin()

    def _take_turn(self, contents: Describe, best: Path | None, *, is_best: bool) -> None:
        if not self.saves.paced or self._must_save(best):
            self._save_waiting(better=is_best)
            self._save_now(contents, best)
            return
        why = self._no_copy()
        turn = self.pace.turn(best=is_best, waiting=self._waiting is not None, room=why is None)
        if turn == "save waiting":
            self._save_waiting()
        elif turn == "save":
            self._waiting = None  # that was not as good
            self._save_now(contents, best)
        elif turn == "copy":
            self._copy_best(contents)
        elif turn == "pass over":
            soon = f"a checkpoint so soon after the last would have cost more than {LITTLE:.0%} of the time"
            self.run.pass_over(self.done, f"{soon}, and {why or 'copies in memory have taken their share of it'}")

    def _must_save(self, best: Path | None) -> bool:
        """Whether this step must be saved, whatever it costs: the first, the last, and what --save-minutes asks for; and what is not
        compared with anything."""
        last = self._looped or self.over() or self.done == self.saves.last
        return last or best is None or self.done <= self.schedule.multiple or self._late()

    def _describe(self, facts: Mapping[str, Any], moved: bool) -> Contents | Callable[[], Contents]:
        bound = None if self.weights.ancestry.largest is None else self._reach(self.weights.ancestry.largest)
        lineage = self.weights.ancestry.lineage(moved=moved and self.done > 0, bound=bound)
        self.run.headroom = self._moments_to_come()
        return self._contents(facts, lineage) if self.sharded is None else partial(self._shared_contents, facts, lineage)

    def _save_now(self, contents: Describe, best: Path | None) -> None:
        if self.saved != self.done:
            self.saved, self._saved_at = self.done, self.schedule.clock.seconds
            with self.run.save_cost.saving(), self.run.spent.part("saving"):
                self.run.save(self.done, contents(), best=best)
            self.pace.saved(self.run.save_cost.latest)
            self._note_memory()

    def _save_waiting(self, *, better: bool = False) -> None:
        """Save the best that waits in memory, unless the state of now is `better`."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and (waiting.step == self.done or not better):
            self.saved, self._saved_at = waiting.step, self.schedule.clock.seconds
            with self.run.save_cost.saving(), self.run.spent.part("saving"):
                self.run.save(waiting.step, waiting.contents, best=step_folder(self.run.checkpoints, waiting.step))
            self.pace.saved(self.run.save_cost.latest, state_at=waiting.at)

    def _copy_best(self, contents: Describe) -> None:
        """Copy the best state to memory, where it waits to be saved."""
        self._waiting = None  # its memory is the new one's
        with self.run.save_cost.copying(), self.run.spent.part("saving"):
            made = contents()
            copied = self.run.copy(made() if callable(made) else made)
        self.pace.copied(self.run.save_cost.latest)
        self._note_memory()
        self._waiting = WaitingBest(self.done, copied, self.pace.now())

    def _note_memory(self) -> None:
        """Note the GPU memory in use beside a snapshot that was just made: then a run's loop takes the most."""
        if (graphs := self._graphs()) is not None:
            self.run.memory_seen = max(self.run.memory_seen, torch.cuda.memory_allocated(self.device) + graphs.held_bytes())

    def _no_copy(self) -> str | None:
        """Why memory cannot hold a copy of the state; None where it can."""
        if self.sharded is not None and not isinstance(self.weights, AdapterModel):
            return "its parts lie in several processes, which keep no copy"
        size = self._checkpoint_bytes()
        return None if self._waiting is not None or room_in_memory(size) else f"memory has no room for a copy of {size / 1e9:.1f} GB"

    def _checkpoint_bytes(self) -> int:
        """Bytes of weights and moments in fp32, and of their average where there is one."""
        trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        return (12 if self.ema is None else 16) * trained

    def _require_disk(self) -> None:
        """Require disk space for the run at its fullest: the newest two checkpoints, the best and one that is being written, and
        RUN/model."""
        merged = not isinstance(self.weights, AdapterModel) or writes_merged(self.run.config, self.weights.base.path)
        each, model = self._checkpoint_bytes(), 4 * parameter_count(self.model) * merged
        steps = self.schedule.stop_at
        times = 4 if steps is None else min(4, 2 + steps // self.saves.every)
        needed, free = each // 3 + (times - 1) * each + model, durable.free_space(self.run.folder)
        if needed > free:
            raise UsageError(f"{self.run.folder}: the disk has {free / 1e9:.1f} GB free, and the run will need {needed / 1e9:.1f}: up to "
                             f"{times} checkpoints of {each / 1e9:.1f} GB, and the model; make room, give --out on another disk, or train "
                             "an adapter (--lora-r)")

    def _moments_to_come(self) -> int:
        """Bytes that the first step will take for the optimizer's moments."""
        trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        return 0 if self.done else 8 * trained + (4 * trained if self.ema is not None else 0)

    def _contents(self, facts: Mapping[str, Any], lineage: Lineage, moments: Mapping[str, Tensor] | None = None) -> Contents:
        """Live tensors: the save copies them before the loop goes on."""
        config = self.run.config
        state = {"step": self.done, "steps_before": self.steps_before, **self.schedule.state(), "data": facts, "rng": {"seed": config.seed},
                 "processes": self._parting_processes(), **({"saving": self.pace.state()} if self.saves.paced else {}),
                 **({} if self.scaling is None else {"loss_scale": self.scaling.state()})}
        return self.weights.contents(lineage, plain(dataclasses.asdict(config)), state, self._state() if moments is None else moments)

    def _parting_processes(self) -> int:
        """How many the result depends on: one, unless parameters are sharded."""
        return 1 if self.sharded is None else self.sharded.world.size

    def _shared_contents(self, facts: Mapping[str, Any], lineage: Lineage) -> Contents:
        """Checkpoint contents of sharded parameters, in memory of its own: every process writes what it owns. An adapter is small, and
        process 0's alone."""
        assert self.sharded is not None
        self.sharded.refresh()
        if isinstance(self.weights, AdapterModel):
            return owned_contents(self._contents(facts, lineage))
        self._shares += 1
        shared, weights, state = self.sharded.hold_shares(number=self._shares)
        return dataclasses.replace(self._contents(facts, lineage, {}), weights=weights, optimizer=state, shared=shared)

    def state_now(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Trained weights, under the model's own names, and the optimizer's moments, whole wherever they lie."""
        if self.sharded is not None:
            self.sharded.refresh()
        if self.sharded is not None and self.sharded.never_whole:
            return self.sharded.gather_weights(), split_ema_state(self._state())[0]
        trained = {name: p.detach() for name, p in self.weights.model.named_parameters() if p.requires_grad}
        return trained, split_ema_state(self._state())[0]

    def _state(self) -> dict[str, Tensor]:
        """Live contents of a checkpoint's optimizer file."""
        if self.sharded is not None and self.sharded.parts:
            return self.sharded.gather_state()
        moments = state_tensors(self.optimizer, dict(self.model.named_parameters()))
        return moments | self.ema.tensors() if isinstance(self.ema, Ema) else moments

    def _reach(self, largest: float) -> float:
        """How far AdamW can have moved an element until now, decay of the largest weight there is included."""
        groups = self.optimizer.param_groups
        betas, decay = groups[0]["betas"], max(group["weight_decay"] for group in groups)
        travelled = self.watch.peaks[0] * largest_quotient(betas) * sum(self.schedule.multiplier(taken) for taken in range(self.done))
        stretch = STRETCH if isinstance(self.optimizer, LowBitAdamW) and self.optimizer.coded else 1.01
        reached = travelled * (1 + decay * (largest + travelled)) * stretch
        if not self._masters_in_bf16():
            return reached
        apart = (largest + reached) * torch.finfo(torch.bfloat16).eps  # of two numbers there; drawn roundings add up as a random walk does
        return reached + apart + ROUNDING_DEVIATIONS * (reached * apart) ** 0.5

    def _masters_in_bf16(self) -> bool:
        return any(parameter.dtype == torch.bfloat16 for parameter in self.weights.model.parameters() if parameter.requires_grad)

    def end_loop(self) -> None:
        """End the loop, whatever ended it: the last values are judged. What is saved from here on is proven with more of the machine: the
        memory of the loop's activations is given back before the proofs ask what is free."""
        self.watch.begin()
        self._looped = True
        self._write(self.watch.read())
        if (graphs := self._graphs()) is not None:
            graphs.forget()
            torch.cuda.empty_cache()
        self.run.end_loop(self.done - self.start, self.pace.slowed)

    def finish(self, times_read: Mapping[int, int], parts: int, best: Path | None) -> None:
        """Wait for the last save; write down how often each part of the data was read. The last proofs go on until `run.settle_proofs`,
        after which all checkpoints but the newest and the `best` are retired."""
        self.run.finish(best)
        self.run.log(Event.CONSUMED, steps=self.done, windows=parts, read_times=plain(times_read))

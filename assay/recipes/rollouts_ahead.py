"""Rollouts drawn ahead (--max-staleness 1): the next one is sampled and scored while the trainer learns from this one.

Which weights draw a rollout is a definition and no race: the rollout of a step is drawn with the policy as it was when the rollout
before it began to be learned from. The sampler has a copy of it. So the same seed gives the same bits, however fast either side is.

    rollout = ahead.take(step, reference)    # waits for what is under way
    ahead.begin(step + updates, …)           # the weights are copied; from here on the next one is drawn in a thread
    …                                        # learn from this one
    ahead.settle()                           # before a save: it waits, and the checkpoint holds what it waited for
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import LogprobFloor
from assay.guard.staleness_checks import check_in_flight, check_stale_weights, check_staleness, check_waiting, updates_behind
from assay.learn.stale_weights import effective_share, importance_weighted, truncated_weights
from assay.model.placement import uncompiled
from assay.recipes.drawn_records import drawn_json, read_drawn
from assay.recipes.grpo_options import Grpo
from assay.recipes.prompts import PromptOrder
from assay.recipes.reference import Reference
from assay.recipes.rollout_batch import Layout, batch_logprobs
from assay.recipes.rollouts import COMPARED, Collector
from assay.recipes.run import Run, plain
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict

NOTHING_DUE = "no rollout was to come"


@dataclass(frozen=True)
class WaitingRollout:
    """Rollout that is drawn and not yet learned from."""

    step: int  # that it is for
    drawn_at: int  # updates that the weights had seen that drew it
    policy: str  # their fingerprint
    drawn: Any


class RolloutsAhead(AbstractContextManager["RolloutsAhead"]):
    """Rollouts drawn ahead while the policy learns. With a staleness of 0 every rollout is drawn when it is asked for, and nothing else
    here does anything."""

    def __init__(self, config: Grpo, collector: Collector, order: PromptOrder, run: Run):
        self.config, self.collector, self.order, self.run = config, collector, order, run
        self.model = collector.sampler.model
        self.on = config.max_staleness > 0
        self.waiting: WaitingRollout | None = None
        self.begun: dict[int, list[str]] = {}  # by step, the prompts that were drawn ahead for it
        self.trained: set[int] = set()
        self.dropped: dict[int, list[str]] = {}
        self._of_draws: list[Verdict] = []
        self._told = False  # the first verdicts of a session on a rollout that was drawn ahead are written down
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._under_way: tuple[int, int, str, LogprobFloor, Future[Any]] | None = None
        device = collector.sampler.engine.weights.device if self.on else torch.device("cpu")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    # ---------------------------------------------------------------- a rollout to learn from, and the next one

    def take(self, step: int, reference: Reference | None) -> Any:
        """The rollout of the step: the one that waits, or one that the policy as it is now draws."""
        self.settle()
        waiting, self.waiting = self.waiting, None
        self.trained.add(step)
        if waiting is None:
            return self.collector.collect(step, reference)
        assert waiting.step == step, f"a rollout for step {waiting.step} waits where step {step} is to be taken"
        policy = fingerprint(self.model)
        self.collector.fingerprints.setdefault(step, policy)
        return self._corrected(self.collector.assemble(step, waiting.drawn, reference, policy, waiting.drawn_at))

    def begin(self, step: int, stop_at: int | None, floor: LogprobFloor) -> None:
        """Draw the rollout of a step that is to come with the weights as they are now, in a thread. Where no step is to come, nothing."""
        rollout, now = step // self.config.num_iterations, step - self.config.num_iterations
        if not self.on or rollout >= self.order.rollouts or (stop_at is not None and step >= stop_at):
            return
        policy = fingerprint(self.model)
        self.collector.fingerprints[now] = policy
        self.collector.load(now)
        self.begun[step] = [prompt.id for prompt in self.order.drawn(rollout)]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # the copies are made before they are sampled from
        self._under_way = step, now, policy, floor, self._thread.submit(self._draw, step, torch.get_num_threads())

    def _draw(self, step: int, threads: int) -> Any:
        torch.set_num_threads(threads)  # a new thread may have another number of its own, and sums another order
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            return self.collector.draw(step)

    def settle(self) -> None:
        """Wait for what is under way, and look at it with the weights that drew it."""
        if self._under_way is None:
            return
        (step, drawn_at, policy, floor, drawing), self._under_way = self._under_way, None
        drawn = drawing.result()
        self._of_draws = self.collector.check_drawn(drawn, floor)  # written down with what is said of the rollout when it is taken
        if any(verdict.outcome is Outcome.REFUTED for verdict in self._of_draws):
            self.run.judge(Event.ROLLOUT, self._of_draws)
        self.waiting = WaitingRollout(step, drawn_at, policy, drawn)

    def drop(self, why: str) -> None:
        """Drop the waiting rollout, and name it: it was drawn and will not be learned from."""
        self.settle()
        if self.waiting is not None:
            self.dropped[self.waiting.step] = self.begun.get(self.waiting.step, [])
            self.run.log(Event.DROPPED, step=self.waiting.step, prompts=self.dropped[self.waiting.step], reason=why)
            self.waiting = None

    # ---------------------------------------------------------------- corrected, and what is said of it

    def _corrected(self, rollout: Any) -> Any:
        """Rollout of the previous weights, importance-weighted as the present ones would sample it."""
        collector, rows = self.collector, rollout.rows
        now_BT = collector.trainer_logprobs(rows)
        then_BT = collector.sampled_logprobs(rollout)
        weight_BT = truncated_weights(now_BT, then_BT, rows.weight != 0, self.config.importance_sampling_cap)
        rows = importance_weighted(rows, now_BT, weight_BT)
        return replace(rollout, rows=rows, batch=collector.layout.packed(rows).batch, importance_BT=weight_BT)

    def check(self, rollout: Any, floor: LogprobFloor) -> list[Verdict]:
        if not self.on:
            return []
        of_draws, self._of_draws = self._of_draws, []
        most = self.config.max_staleness * self.config.num_iterations
        verdicts = [check_staleness(self.collector.versions(rollout), rollout.step, most)]
        if rollout.drawn_at != rollout.step:
            sampled_BT, plain_B1 = self.collector.sampled_logprobs(rollout), self.collector.advantage_of_rows(rollout)
            verdicts.append(check_stale_weights(rollout.rows, sampled_BT, plain_B1, self._now(rollout), self.config.importance_sampling_cap,
                                             floor))
            if not self._told:
                self._told = True
                self.run.judge(Event.ROLLOUT, [*of_draws, *verdicts])
        return [*of_draws, *verdicts]

    def _now(self, rollout: Any) -> dict[int, Sequence[float]]:
        """Current policy's log-probabilities of the counting tokens of some rows, spread over the rollout, neither packed nor compiled."""
        rows, asked = rollout.rows, self.collector.asked
        chosen = sorted({round(place * (len(rows) - 1) / (COMPARED - 1)) for place in range(COMPARED)})
        part = type(rows)(**{name: stream[chosen] for name, stream in rows.streams().items()})
        with uncompiled():
            found = batch_logprobs(self.model, part, asked.temperature, Layout(COMPARED), entropy=asked.wants_entropy)
        return {row: found[place][rows.weight[row] != 0].tolist() for place, row in enumerate(chosen)}

    def measure(self, rollout: Any) -> dict[str, float]:
        """Updates that the rollout's tokens are behind the policy, and what importance weights leave of them."""
        if not self.on:
            return {}
        behind = updates_behind(self.collector.versions(rollout), rollout.step)
        found = {"sampling/staleness/mean": sum(updates * tokens for updates, tokens in behind.items()) / max(1, sum(behind.values())),
                 "sampling/staleness/max": float(max(behind))}
        if rollout.importance_BT is None:
            return found
        weights = rollout.importance_BT[rollout.rows.weight != 0]
        return found | {"sampling/effective_sample_size": effective_share(weights),
                        "sampling/truncated_ratio": float((weights >= self.config.importance_sampling_cap).float().mean())}

    # ---------------------------------------------------------------- over sessions

    def facts(self) -> dict[str, Any]:
        """Record of the waiting rollout in a checkpoint: all of it."""
        if not self.on:
            return {}
        if self.waiting is None:
            return {"ahead": NOTHING_DUE}
        waiting = self.waiting
        return {"ahead": plain({"step": waiting.step, "drawn_at": waiting.drawn_at, "policy": waiting.policy,
                                "prompts": self.begun[waiting.step], "drawn": drawn_json(waiting.drawn)})}

    def recall(self, recorded: Mapping[str, Any], step: int) -> list[Verdict]:
        """The rollout that waited when the checkpoint of `step` was written."""
        if not self.on:
            return []
        updates = self.config.num_iterations
        due = [prompt.id for prompt in self.order.drawn(step // updates)] if step // updates < self.order.rollouts else []
        found, ahead = check_waiting(recorded, step, due, updates), recorded.get("ahead")
        if isinstance(ahead, Mapping):
            self.waiting = WaitingRollout(ahead["step"], ahead["drawn_at"], ahead["policy"], read_drawn(ahead["drawn"], self.order.prompts))
            self.begun[ahead["step"]] = list(ahead["prompts"])
            self.collector.fingerprints[ahead["drawn_at"]] = ahead["policy"]
        return [found]

    def check_end(self) -> list[Verdict]:
        """Check all rollouts that this process drew ahead, or found waiting."""
        waiting = {} if self.waiting is None else {self.waiting.step: self.begun[self.waiting.step]}
        return [check_in_flight(self.begun, self.trained, waiting, self.dropped)] if self.on else []

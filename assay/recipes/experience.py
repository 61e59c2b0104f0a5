"""What a policy learns from: each rollout drawn with the weights as they are now, judged before it is believed, and kept in samples."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch

from assay.data.batch import Batch
from assay.generate.generation_request import Completion, Sampling
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import LogprobFloor, check_identity, check_sampled_ids, check_version, naive_logprobs, version_name
from assay.guard.policy_loss_checks import check_advantages, check_counted
from assay.guard.rollout_checks import check_independence, rollout_metrics
from assay.guard.training_guards import stop_if_refuted
from assay.learn.advantage import Advantages, group_advantages, kl_shift, refill
from assay.learn.policy import Surrogate
from assay.recipes.grpo_options import Grpo
from assay.recipes.judged import Judging
from assay.recipes.layout import Layout
from assay.recipes.reference import Reference
from assay.recipes.rollouts import (
    Group,
    Prompt,
    PromptOrder,
    Sampler,
    assembled,
    batch_logprobs,
    component_metrics,
    counted,
    of_completions,
    quickest_score,
    reading_metrics,
    ruled_groups,
    shortened,
)
from assay.recipes.run import Run, append_rows, plain, rewrite_rows
from assay.reward.endpoint import Cost
from assay.reward.worker_pool import ErrorLimit, RewardWorkers
from assay.store.ledger import Event
from assay.strict_json import read_json_lines
from assay.verdict import Outcome, Verdict

COMPARED = 16  # completions of a rollout whose log-probabilities are computed anew before the update; after it, all are compared
WRITTEN_EVERY = 50  # steps between verdicts in the ledger while they prove; one that refutes is written at once


def address(step: int) -> tuple[str | int, ...]:
    """Where a rollout's draws stand; the prompt's id and the member's number follow."""
    return "rollout", step


class Experience:
    """The source of a run's batches. Step s learns from rollout s // inner, which is drawn when its first step asks for it."""

    def __init__(self, config: Grpo, order: PromptOrder, sampler: Sampler, workers: RewardWorkers, judging: Judging | None,
                 limit: ErrorLimit,
                 run: Run, asked: Surrogate, layout: Layout):
        self.config, self.order, self.sampler, self.workers, self.judging, self.limit = config, order, sampler, workers, judging, limit
        self.run, self.asked, self.layout, self.model = run, asked, layout, sampler.model
        self.sampling = Sampling(max_new=config.max_new, temperature=config.temperature, seed=config.seed)
        self.file = run.folder / "samples.jsonl"
        self.reference: Reference | None = None
        self.floor = LogprobFloor(0.0, 0.0, 0)
        self.updates = 0  # since the fork, as far as they have moved the weights
        self.waiting: list[str] = []  # prompts whose group could not be judged: the next rollout draws them again
        self._score = quickest_score(self.model, layout)
        self._held: Batch | None = None
        self._drawn: list[Group] = []
        self._judged = 0

    @property
    def rows(self) -> int:
        return self.order.places

    @property
    def windows(self) -> int:
        return len(self.order.prompts)

    @property
    def steps(self) -> int:
        return self.order.rollouts * self.config.inner

    def epoch_of(self, step: int) -> int:
        return step // self.config.inner * self.rows // self.windows

    def forget_after(self, step: int) -> None:
        """Samples of steps that are about to be taken again."""
        rewrite_rows(self.file, [row for row in read_json_lines(self.file) if row["step"] < step])

    def batch(self, step: int) -> Batch:
        if step % self.config.inner == 0:
            self._held = self.rollout(step)
        assert self._held is not None, "a run goes on at the beginning of a rollout"
        return self._held

    # ---------------------------------------------------------------- one rollout

    def rollout(self, step: int) -> Batch:
        self.sampler.load(step)
        if self.reference is not None:
            self.reference.follow(step)
            self.updates = step if self.sampler.fingerprint != self.reference.fingerprint else 0
        learned, everything = self.drawn(step)
        advantages = self.advantages(learned)
        counted_N = counted(learned, advantages, mask_truncated=self.config.mask_truncated, cap=self.config.max_new)
        rows = self.learnable(learned, advantages, counted_N)
        batch = self.layout.packed(rows).batch
        self.judge(Event.ROLLOUT, self.verdicts(step, learned, everything, advantages, counted_N, rows, batch))
        self.keep(step, learned, advantages)
        self._drawn = everything
        return batch

    def measured(self) -> dict[str, float]:
        """Of the last rollout. Asked for while a GPU is learning from it, it costs no time."""
        groups = self._drawn
        found = rollout_metrics([group.completions for group in groups], [group.rewards for group in groups], self.advantages(groups))
        found |= component_metrics(groups)
        for reward in (reward for reward in self.workers.rewards if reward.name == "answer" and reward.file is None):
            found |= reading_metrics(groups, reward.options.get("form", "any"))
        if self.judging is not None:
            found |= {f"judge/{name}": value for name, value in self.judging.rollout.counts().items()}
        return found

    def drawn(self, step: int) -> tuple[list[Group], list[Group]]:
        """What is learned from, and all that was drawn: places whose group taught nothing get other prompts, up to the limit."""
        rollout = step // self.config.inner
        groups = self.completed(step, self.prompts_of(rollout))
        everything, tried, spare = list(groups), [1] * len(groups), self.order.spare(rollout)
        while self.config.refill:
            plan = refill(self.advantages(groups).silent_P, tried, self.config.refill + 1)
            others = list(zip(plan.again, spare, strict=False))
            if not others:
                break
            for (place, _), group in zip(others, self.completed(step, [prompt for _, prompt in others]), strict=True):
                groups[place], tried[place] = group, tried[place] + 1
                everything.append(group)
        silent = self.advantages(groups).silent_P
        informing = [group for group, nothing in zip(groups, silent, strict=True) if not nothing] if self.config.refill else groups
        return informing or groups, everything

    def prompts_of(self, rollout: int) -> list[Prompt]:
        """Those whose turn it is, and those that wait for a judge since the rollout before."""
        due = self.order.drawn(rollout)
        again = set(self.waiting) - {prompt.id for prompt in due}
        self.waiting = []
        if self.judging is not None:
            self.judging.begin()
        return due + [prompt for prompt in self.order.prompts if prompt.id in again]

    def completed(self, step: int, prompts: Sequence[Prompt]) -> list[Group]:
        completions = self.sampler.draw(prompts, self.sampling, address(step), self.config.group)
        groups = ruled_groups(self.workers, prompts, completions)
        if self.judging is not None:
            groups, unjudged = self.judging.joined(str(step), groups)
            self.wait_for(step, unjudged, self.judging.sitting.cost)
        groups = shortened(groups, cap=self.config.max_new, overlong=self.config.overlong)
        self.limit.feed([scored for group in groups for scored in group.scored])
        return groups

    def wait_for(self, step: int, unjudged: Mapping[str, Sequence[str]], cost: Cost) -> None:
        """Groups without a judgement: their prompts come again, and nobody has to find out from a gap."""
        if unjudged:
            self.waiting += unjudged
            self.run.say(f"step {step + 1}: {len(unjudged)} groups could not be judged and are drawn again with the next rollout: "
                         f"{next(iter(unjudged.values()))[0]}")
            self.run.ledger.append(Event.UNJUDGED, step=step, groups=plain(unjudged), cost=asdict(cost))

    def advantages(self, groups: Sequence[Group]) -> Advantages:
        return group_advantages([group.rewards for group in groups], scale=self.config.scale)

    def learnable(self, groups: Sequence[Group], advantages: Advantages, counted_N: Sequence[bool]) -> Batch:
        batch = assembled(groups, advantages.values_PG.flatten().tolist(), counted_N, self.config.normalise, cap=self.config.max_new)
        if self.reference is None:
            return batch
        reference = self.reference.logprobs(batch, self.asked.temperature, entropy=self.asked.wants_entropy)
        batch = replace(batch, reference=reference)
        if self.config.kl != "shift":
            return batch
        assert batch.behaviour is not None
        assert batch.advantage is not None
        return replace(batch, advantage=batch.advantage + kl_shift(batch.behaviour, reference, batch.weight, self.config.kl_weight))

    # ---------------------------------------------------------------- what is said of it

    def verdicts(self, step: int, learned: Sequence[Group], everything: Sequence[Group], advantages: Advantages,
                 counted_N: Sequence[bool], rows: Batch, batch: Batch) -> list[Verdict]:
        """`rows` as they were drawn, one a completion, and `batch` as it will be learned from."""
        said = [(group.prompt, completion) for group in learned for completion in group.completions]
        versions = [completion.version for group in everything for completion in group.completions]
        return [check_version(versions, version_name(step, fingerprint(self.model))),
                check_sampled_ids(batch, [prompt.ids for prompt, _ in said], [completion.ids for _, completion in said],
                          stop_ids=self.sampler.engine.stop_ids, cap=self.config.max_new),
                self.identity(said, rows),
                check_independence([group.completions for group in everything]),
                check_advantages([group.rewards for group in learned], advantages, self.config.scale),
                check_counted(counted_N, advantages.known_PG.flatten().tolist(), [completion.ended for _, completion in said],
                              mask_truncated=self.config.mask_truncated),
                *(self.judging.verdicts if self.judging is not None else ())]

    def identity(self, rows: Sequence[tuple[Prompt, Completion]], batch: Batch) -> Verdict:
        """Some completions, spread over the rollout: the trainer gives them the probabilities that they were drawn with."""
        chosen = sorted({round(place * (len(rows) - 1) / (COMPARED - 1)) for place in range(COMPARED)})
        part = Batch(**{name: stream[chosen] for name, stream in batch.streams().items()})  # type: ignore[arg-type]
        prompts, said = [rows[i][0].ids for i in chosen], [rows[i][1] for i in chosen]
        trainer = batch_logprobs(self.model, part, self.asked.temperature, self.layout, entropy=self.asked.wants_entropy, score=self._score)
        written_out = lambda: naive_logprobs(self.model, prompts, [c.ids for c in said], self.asked.temperature)  # noqa: E731
        return check_identity([c.logprobs for c in said], of_completions(trainer, part, prompts), self.floor, written_out)

    def judge(self, what: Event, verdicts: list[Verdict]) -> None:
        """The first of a sitting and every so many are written down, and what refutes is always."""
        against = any(verdict.outcome is Outcome.REFUTED for verdict in verdicts)
        self._judged += 1
        if against or self._judged % WRITTEN_EVERY <= 2:  # a rollout and its step
            self.run.judge(what, verdicts)
        else:
            stop_if_refuted(verdicts)

    def keep(self, step: int, groups: Sequence[Group], advantages: Advantages) -> None:
        """Some of the completions, spread over the rollout, with all that says where they came from and what they were worth."""
        rows = [(group.prompt, member, completion, scored, float(advantages.values_PG[place][member]))
                for place, group in enumerate(groups)
                for member, (completion, scored) in enumerate(zip(group.completions, group.scored, strict=True))]
        kept = rows[:: max(1, -(-len(rows) // max(1, self.config.samples)))]
        append_rows(self.file, (plain({
            "step": step, "prompt_id": prompt.id, "prompt": prompt.text, "ids": list(completion.ids), "text": completion.text,
            "ended": completion.ended, "reward": scored.value, "rewards": dict(scored.components), "error": scored.error,
            "advantage": advantage, "version": completion.version,
            "address": [self.config.seed, "sample", *address(step), prompt.id, member]})
            for prompt, member, completion, scored, advantage in kept))

    @torch.no_grad()
    def rehearsal(self, step: int) -> tuple[Batch, list[tuple[Prompt, Completion]]]:
        """A rollout that is not learned from, each completion with an advantage of its own so that every tensor gets a gradient."""
        prompts = self.order.drawn(min(step // self.config.inner, self.order.rollouts - 1))
        self.sampler.load(step)
        drawn = self.sampler.draw(prompts, self.sampling, ("rehearsal",), self.config.group)
        groups = [Group(prompt, completions, ()) for prompt, completions in zip(prompts, drawn, strict=True)]
        rows = [(group.prompt, completion) for group in groups for completion in group.completions]
        values = [(1 + 0.1 * (row % 10)) * (-1) ** row for row in range(len(rows))]
        batch = assembled(groups, values, [True] * len(rows), self.config.normalise, cap=self.config.max_new)
        return replace(batch, reference=batch.behaviour), rows

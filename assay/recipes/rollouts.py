"""Rollouts: prompts completed by the policy itself, scored, and made into a batch; what they must show, and what they measure.

Shapes: P prompts, G completions of each, N = P · G completions.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.data_ledger import ids_digest
from assay.errors import GuardStop
from assay.evaluation.soundness import DrawnTokens, judge_draws, rescored_together
from assay.generate.engine import Engine, fitting_slots
from assay.generate.generation_request import Completion, GenerationRequest, Sampling
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import (
    LogprobFloor,
    OutgrownFloor,
    check_identity,
    check_reference_again,
    check_sampled_ids,
    check_version,
    naive_logprobs,
    version_name,
)
from assay.guard.policy_loss_checks import check_advantages, check_counted
from assay.guard.rollout_checks import (
    SiblingCounts,
    check_collapse,
    check_none_held_out,
    check_planned_prompts,
    rollout_metrics,
    rollout_warnings,
)
from assay.learn.advantage import Advantages, estimated_advantages, refill, untruncated
from assay.learn.importance import ImportanceWeights
from assay.learn.loop import Step
from assay.learn.objectives import Objective
from assay.learn.policy import Surrogate, token_logprobs
from assay.model.placement import uncompiled
from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.recipes.grpo_options import Grpo
from assay.recipes.prompts import Prompt, PromptData
from assay.recipes.reference import Reference, with_reference
from assay.recipes.rewards import Group, Rewards, component_metrics, penalise_overlong, reading_metrics, score_by_rules
from assay.recipes.rollout_batch import Drawn, Layout, batch_logprobs, batch_of, of_completions, quickest_score
from assay.recipes.run import Run, append_json_rows, plain, rewrite_json_rows
from assay.store.ledger import Event
from assay.strict_json import read_json_lines
from assay.verdict import Verdict

COMPARED = 16  # completions of a rollout whose log-probabilities are computed anew before the update; after it, all are compared
RESCORED_A_ROLLOUT = 8  # completions whose draws are scored again by the plain model; their sum over rollouts is what is judged
FIRST_ASKED, ASKED_EVERY = 4, 8  # the first rollouts of a session in which rewards and reference are asked twice, and then every so many
SAID_AGAIN = 50  # steps after which a warning is repeated
PROGRESS_METRICS = {"reward": "reward", "±": "reward_std", "length": "completions/mean_length", "kl": "kl", "entropy": "entropy"}


class Sampler:
    """An engine on the trainer's own weights. What it draws carries the version that `load` last named.

    One that `lags` samples from a copy of that version while the trainer goes on.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None, stops: SpecialTokens, *, slots: int, length: int,
                 device: str | None = None, gather: Callable[[], None] | None = None, lags: bool = False):
        self.model, self.fingerprint, self.gather = model, fingerprint(model), gather
        self.version = version_name(0, self.fingerprint)
        length = min(length, model.config.max_length)
        self.engine = Engine(model, slots=fitting_slots(model, slots, length, device), length=length, stop_ids=stops.stop_ids,
                             version=self.version, tokenizer=tokenizer, device=device, lags=lags)

    def load(self, updates: int) -> str:
        """The weights as they are now, after so many updates. Where they lie with several processes they are gathered first."""
        if self.gather is not None:
            self.gather()
        self.fingerprint = fingerprint(self.model)
        self.version = version_name(updates, self.fingerprint)
        self.engine.load(self.version)
        return self.version

    def draw(self, prompts: Sequence[Prompt], sampling: Sampling, address: tuple[str | int, ...], group: int) -> list[list[Completion]]:
        """`group` completions of each prompt; member m of prompt p draws at (seed, *address, p, m)."""
        tickets = {self.engine.submit(GenerationRequest(prompt.ids, sampling, (*address, prompt.id), group)): place
                   for place, prompt in enumerate(prompts)}
        ended = {(tickets[progress.ticket], progress.member): progress.completion for progress in self.engine.drain()}
        return [[completion for member in range(group) if (completion := ended[place, member]) is not None]
                for place in range(len(prompts))]

    # What a sampler elsewhere (remote_sampler.py) has more to say of, and do with.

    importance: ImportanceWeights | None = None

    def verdicts(self) -> list[Verdict]:
        return []

    def identity_floor(self, own: LogprobFloor) -> LogprobFloor:
        """How far what it draws may be from the trainer."""
        return own

    def corrected(self, batch: Batch, trainer_logprobs: Callable[[Batch], Tensor]) -> Batch:
        """A rollout's rows, weighed where the trainer would have drawn them otherwise."""
        return batch

    def metrics(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Rollout:
    """`groups` are learned from, `everything` was drawn. `rows` hold one completion each; `batch` is how they go through the model."""

    step: int
    updates: int  # since the reference, as far as they have moved the weights
    groups: list[Group]
    everything: list[Group]
    advantages: Advantages
    counted_N: list[bool]
    rows: Batch
    batch: Batch
    drawn_at: int  # updates that the weights had seen that drew it; `step`, unless it was drawn ahead
    importance_BT: Tensor | None = None  # weights of its tokens, where it was
    weighed: bool = False  # a server drew it: the rows have the trainer's log-probabilities, and advantages with importance weights

    @property
    def drawn(self) -> Drawn:
        return completions_of(self.groups)

    @property
    def scored(self) -> tuple[list[list[Completion]], list[list[float | None]]]:
        """Completions that were drawn, and the reward of each."""
        return [list(group.completions) for group in self.everything], [list(group.rewards) for group in self.everything]

    def witness_facts(self) -> list[dict[str, Any]]:
        """Record of a step for the witness: prompts, completions with the log-probabilities that they were drawn with, and rewards. Of
        importance-weighted ones the ratio is to the trainer's log-probabilities, and the server's stand beside them."""
        drawn, assumed = self.drawn, list[list[float]]()
        if self.weighed:
            assert self.rows.behaviour is not None
            assumed = of_completions(self.rows.behaviour, self.rows, [prompt.ids for prompt, _ in drawn])
        facts = iter([{"logprobs": assumed[row], "sampler_logprobs": list(said.logprobs)} if self.weighed else
                      {"logprobs": list(said.logprobs)} for row, (_, said) in enumerate(drawn)])
        return [{"prompt": group.prompt.id, "ids": list(group.prompt.ids), "rewards": list(group.rewards),
                 "completions": [{"ids": list(said.ids), **next(facts), "ended": said.ended} for said in group.completions]}
                for group in self.groups]


def completions_of(groups: Sequence[Group]) -> Drawn:
    return [(group.prompt, completion) for group in groups for completion in group.completions]


class DrawnGroups(NamedTuple):
    groups: list[Group]
    everything: list[Group]


class Collector(Protocol):
    """Interface of what makes rollouts for the recipe: completions of prompts here, episodes in episode_rollouts.py."""

    sampler: Sampler
    sampling: Sampling
    asked: Surrogate
    layout: Layout
    cap: int
    waiting: list[str]
    fingerprints: dict[int, str]
    floors: OutgrownFloor

    def collect(self, step: int, reference: Reference | None) -> Any: ...

    def load(self, step: int) -> None: ...

    def draw(self, step: int) -> Any: ...

    def assemble(self, step: int, drawn: Any, reference: Reference | None, policy: str, drawn_at: int) -> Any: ...

    def check_drawn(self, drawn: Any, floor: LogprobFloor) -> list[Verdict]: ...

    def sampled_logprobs(self, rollout: Any) -> Tensor: ...

    def trainer_logprobs(self, batch: Batch) -> Tensor: ...

    def advantage_of_rows(self, rollout: Any) -> Tensor: ...

    def versions(self, rollout: Any) -> list[tuple[str, int]]: ...

    def check(self, rollout: Any, floor: LogprobFloor, reference: Reference | None = None) -> list[Verdict]: ...

    def measure(self, rollout: Any) -> dict[str, float]: ...

    def keep_samples(self, rollout: Any) -> None: ...

    def prompts_digest(self, rollout: Any) -> str: ...

    def draw_for_preflight(self, step: int) -> tuple[Batch, Drawn]: ...

    def preflight(self, objective: Objective, batch: Batch) -> list[Verdict]: ...

    def forget_after(self, step: int) -> None: ...

    def facts(self) -> dict[str, Any]: ...


class RolloutCollector:
    """Collector that draws rollouts with the weights as they are now. `waiting` are prompts whose group could not be judged: the next one
    draws them."""

    def __init__(self, config: Grpo, prompts: PromptData, sampler: Sampler, rewards: Rewards, run: Run, asked: Surrogate, layout: Layout):
        self.config, self.order, self.sampler, self.rewards = config, prompts.order, sampler, rewards
        self.run, self.asked, self.layout, self.model = run, asked, layout, sampler.model
        self.sampling = Sampling(max_new=config.max_completion_length, temperature=config.temperature, seed=config.seed)
        self.cap = config.max_completion_length  # tokens that are sampled of one prompt
        self.file = run.folder / "samples.jsonl"
        self.waiting: list[str] = []
        self._score = token_logprobs if config.fsdp else quickest_score(self.model, layout)
        self.train_ids = [prompt.id for prompt in prompts.train]
        self.held_out = frozenset(said for prompt in prompts.held_out for said in (prompt.content, prompt.text))
        self.fingerprints: dict[int, str] = {}  # of the policy after so many updates, as far as this process saw it
        self.draws, self.siblings, self.looks = DrawnTokens(), SiblingCounts(config.num_generations), 0
        self.floors = OutgrownFloor()

    def forget_after(self, step: int) -> None:
        """Samples of steps that are about to be taken again."""
        rewrite_json_rows(self.file, [row for row in read_json_lines(self.file) if row["step"] < step])

    def collect(self, step: int, reference: Reference | None) -> Rollout:
        """Prompts, completions, rewards, advantages, and the batch to learn from."""
        self.load(step)
        return self.assemble(step, self.draw(step), reference, self.sampler.fingerprint, step)

    def load(self, step: int) -> None:
        """The sampler takes up the weights as they are now, after so many updates."""
        self.sampler.load(step)
        self.fingerprints.setdefault(step, self.sampler.fingerprint)

    def draw(self, step: int) -> DrawnGroups:
        """Sample the groups of a step with the weights that were loaded: what is learned from, and all that was drawn; prompts and draws
        are those of the step."""
        return DrawnGroups(*self._groups(step))

    def assemble(self, step: int, drawn: DrawnGroups, reference: Reference | None, policy: str, drawn_at: int) -> Rollout:
        """Advantages and the batch to learn from; `policy` is the fingerprint of the weights that will."""
        groups, everything = drawn
        updates = step if reference is not None and self._left(reference, policy) else 0
        advantages = self._advantages(groups)
        counted_N = counted_completions(groups, advantages, mask_truncated=self.config.mask_truncated_completions,
                                        cap=self.config.max_completion_length)
        rows = self.sampler.corrected(self._rows(groups, advantages, counted_N, reference), self.trainer_logprobs)
        return Rollout(step, updates, groups, everything, advantages, counted_N, rows, self.layout.packed(rows).batch, drawn_at,
                       weighed=self.sampler.importance is not None)

    def _left(self, reference: Reference, policy: str) -> bool:
        """Whether the policy has moved from what its reference should be: by its own record, and by the reference's where it has none."""
        assert reference.step is not None
        return policy != self.fingerprints.get(reference.step, reference.fingerprint)

    def facts(self) -> dict[str, Any]:
        return {} if self.rewards.judge is None else {"waiting": list(self.waiting)}

    # ---------------------------------------------------------------- one rollout

    def _groups(self, step: int) -> tuple[list[Group], list[Group]]:
        """Groups to learn from, and all that were drawn: places whose group taught nothing get other prompts, up to the limit."""
        rollout = step // self.config.num_iterations
        groups = self._complete(step, self._prompts(rollout))
        everything, tried, spare = list(groups), [1] * len(groups), self.order.spare(rollout)
        while self.config.refill:
            plan = refill(self._advantages(groups).silent_P, tried, self.config.refill + 1)
            others = list(zip(plan.again, spare, strict=False))
            if not others:
                break
            for (place, _), group in zip(others, self._complete(step, [prompt for _, prompt in others]), strict=True):
                groups[place], tried[place] = group, tried[place] + 1
                everything.append(group)
        silent = self._advantages(groups).silent_P
        informing = [group for group, nothing in zip(groups, silent, strict=True) if not nothing] if self.config.refill else groups
        return informing or groups, everything

    def _prompts(self, rollout: int) -> list[Prompt]:
        """Prompts whose turn it is, and those that wait for a judge since the rollout before."""
        due = self.order.drawn(rollout)
        again = set(self.waiting) - {prompt.id for prompt in due}
        self.waiting = []
        if self.rewards.judge is not None:
            self.rewards.judge.begin()
        return due + [prompt for prompt in self.order.prompts if prompt.id in again]

    def _complete(self, step: int, prompts: Sequence[Prompt]) -> list[Group]:
        completions = self.sampler.draw(prompts, self.sampling, address(step), self.config.num_generations)
        groups, judge = score_by_rules(self.rewards.workers, prompts, completions), self.rewards.judge
        if judge is not None:
            groups, unjudged = judge.join_scores(str(step), groups)
            self._wait_for(step, unjudged)
        groups = penalise_overlong(groups, cap=self.config.max_completion_length, overlong=self.config.overlong_buffer)
        self.rewards.stop_at_limit([scored for group in groups for scored in group.scored])
        return groups

    def _wait_for(self, step: int, unjudged: Mapping[str, Sequence[str]]) -> None:
        """Groups without a judgement: their prompts come again, and nobody has to find out from a gap."""
        if unjudged:
            assert self.rewards.judge is not None
            self.waiting += unjudged
            self.run.say(f"step {step + 1}: {len(unjudged)} groups could not be judged and are drawn again with the next rollout: "
                         f"{next(iter(unjudged.values()))[0]}")
            self.run.log(Event.UNJUDGED, step=step, groups=plain(unjudged), cost=asdict(self.rewards.judge.sitting.cost))

    def _advantages(self, groups: Sequence[Group]) -> Advantages:
        return estimated_advantages([group.rewards for group in groups], self.config.advantage_estimator, self.config.scale_rewards)

    def _rows(self, groups: Sequence[Group], advantages: Advantages, counted_N: Sequence[bool], reference: Reference | None) -> Batch:
        batch = batch_of(completions_of(groups), advantages.values_PG.flatten().tolist(), counted_N, self.config.normalisation,
                         cap=self.config.max_completion_length)
        return with_reference(batch, reference, self.asked, self.config)

    # ---------------------------------------------------------------- what is said of it

    def check(self, rollout: Rollout, floor: LogprobFloor, reference: Reference | None = None) -> list[Verdict]:
        """Check a rollout: it was sampled by the current weights, with the trainer's probabilities, and its advantages are those asked
        for.
        """
        drawn, config, everything = rollout.drawn, self.config, rollout.everything
        fresh, versions = rollout.drawn_at == rollout.step, [version for version, _ in self.versions(rollout)]
        policy = fingerprint(self.sampler.model) if fresh else self.fingerprints[rollout.drawn_at]
        of_draws = self._check_fresh(rollout, self.sampler.identity_floor(floor)) if fresh else []  # else looked at when it was drawn
        return [check_version(versions, version_name(rollout.drawn_at, policy)),
                check_sampled_ids(rollout.batch, [prompt.ids for prompt, _ in drawn], [completion.ids for _, completion in drawn],
                          stop_ids=self.sampler.engine.stop_ids, cap=config.max_completion_length),
                *of_draws, *self.sampler.verdicts(),
                check_planned_prompts(self.due_prompts(rollout), self.train_ids, seed=config.seed,
                                      rollout=rollout.step // config.num_iterations),
                check_none_held_out({group.prompt.id: (group.prompt.content, group.prompt.text) for group in everything}, self.held_out),
                check_advantages([group.rewards for group in rollout.groups], rollout.advantages, config.scale_rewards,
                                 config.advantage_estimator),
                check_counted(rollout.counted_N, rollout.advantages.known_PG.flatten().tolist(),
                              [completion.ended for _, completion in drawn], mask_truncated=config.mask_truncated_completions),
                *(self._ask_twice(rollout, floor, reference) if self.looks <= FIRST_ASKED or self.looks % ASKED_EVERY == 0 else ()),
                *(self.rewards.judge.verdicts if self.rewards.judge is not None else ())]

    def _check_fresh(self, rollout: Rollout, floor: LogprobFloor) -> list[Verdict]:
        part, chosen = self._compared(rollout.drawn, rollout.rows)
        trainer = self.trainer_logprobs(part)
        return self._check_draws(rollout.everything, chosen, of_completions(trainer, part, [prompt.ids for prompt, _ in chosen]),
                                 self.model, floor)

    def check_drawn(self, drawn: DrawnGroups, floor: LogprobFloor) -> list[Verdict]:
        """Check groups that were drawn ahead, with the sampler's copy of the weights that drew them, before it takes up others."""
        every, policy = completions_of(drawn.groups), self.sampler.engine.weights.model
        rows = batch_of(every, [0.0] * len(every), [True] * len(every), self.config.normalisation, cap=self.config.max_completion_length)
        part, chosen = self._compared(every, rows)
        with uncompiled():
            found = batch_logprobs(policy, part, self.asked.temperature, Layout(COMPARED), entropy=self.asked.wants_entropy)
        return self._check_draws(drawn.everything, chosen, of_completions(found, part, [prompt.ids for prompt, _ in chosen]), policy, floor)

    def sampled_logprobs(self, rollout: Rollout) -> Tensor:
        """(B, T): of every sampled token of the rows, what the sampler wrote down."""
        found = torch.zeros(rollout.rows.tokens.shape)
        for row, (prompt, completion) in enumerate(rollout.drawn):
            found[row, len(prompt.ids):len(prompt.ids) + len(completion.ids)] = torch.tensor(completion.logprobs)
        return found

    def advantage_of_rows(self, rollout: Rollout) -> Tensor:
        """(B, 1): of every row, that of its completion."""
        return torch.tensor(rollout.advantages.values_PG.flatten(), dtype=torch.float32)[:, None]

    def versions(self, rollout: Rollout) -> list[tuple[str, int]]:
        """Versions of the weights that sampled the rollout, with the number of tokens of each."""
        return [(completion.version, len(completion.ids)) for group in rollout.everything for completion in group.completions]

    def due_prompts(self, rollout: Rollout) -> list[str]:
        """The ids that were drawn because it was their turn: those that wait for a judge, or take a silent one's place, come after."""
        return [group.prompt.id for group in rollout.everything[: self.order.places]]

    def prompts_digest(self, rollout: Rollout) -> str:
        """Digest of a rollout's prompts, written down with the step, so that all sessions together can be compared with the plan."""
        return ids_digest(((*self.due_prompts(rollout),),))

    def _check_draws(self, everything: Sequence[Group], chosen: Drawn, trainer: Sequence[Sequence[float]], model: Transformer,
                     floor: LogprobFloor) -> list[Verdict]:
        """`model` gives some completions, spread over the rollout, the probabilities that they were drawn with; and whether tokens look
        drawn from the stated distribution, over all rollouts of this process. Of what was drawn, not of what was kept: that is chosen by
        its rewards."""
        self.looks += 1
        self.siblings.add([group.completions for group in everything])
        drawn, said = completions_of(everything), [completion for _, completion in chosen]
        asked = [prompt.ids for prompt, _ in chosen], [completion.ids for completion in said], self.asked.temperature
        identity = check_identity([completion.logprobs for completion in said], trainer, self.floors.over(floor),
                                  lambda: naive_logprobs(model, *asked), anew=lambda worst: self.floors.measure(model, *asked, worst))
        with uncompiled():  # every length would be compiled anew
            again = drawn[:: max(1, -(-len(drawn) // RESCORED_A_ROLLOUT))]
            self.draws += rescored_together(model, [(prompt.ids, completion.ids) for prompt, completion in again], self.sampling)
        return [identity, judge_draws(self.draws, self.sampling, self.looks), self.siblings.check()]

    def _ask_twice(self, rollout: Rollout, floor: LogprobFloor, reference: Reference | None) -> list[Verdict]:
        verdicts = [self.rewards.ask_again(rollout.everything)] if self.rewards.rules else []
        if reference is not None and rollout.rows.reference is not None:
            part, drawn = self._compared(rollout.drawn, rollout.rows)
            with uncompiled():
                again = batch_logprobs(reference.model, part, self.asked.temperature, Layout(COMPARED), entropy=self.asked.wants_entropy)
            prompts = [prompt.ids for prompt, _ in drawn]
            assert part.reference is not None
            first, second = (of_completions(said, part, prompts) for said in (part.reference, again))
            verdicts.append(check_reference_again(first, second, floor))
        return verdicts

    def trainer_logprobs(self, batch: Batch) -> Tensor:
        return batch_logprobs(self.model, batch, self.asked.temperature, self.layout, entropy=self.asked.wants_entropy, score=self._score)

    def _compared(self, drawn: Drawn, batch: Batch) -> tuple[Batch, Drawn]:
        """Completions to compare, spread over the rollout, as rows and as they were drawn."""
        chosen = sorted({round(place * (len(drawn) - 1) / (COMPARED - 1)) for place in range(COMPARED)})
        part = Batch(**{name: stream[chosen] for name, stream in batch.streams().items()})  # type: ignore[arg-type]
        return part, [drawn[i] for i in chosen]

    def measure(self, rollout: Rollout) -> dict[str, float]:
        """Metrics of a rollout. Asked for while a GPU is learning from it, they cost no time."""
        groups, judge = rollout.everything, self.rewards.judge
        found = rollout_metrics([group.completions for group in groups], [group.rewards for group in groups], self._advantages(groups))
        found |= component_metrics(groups) | self.rewards.noise_metrics(groups) | self.sampler.metrics()
        for reward in (reward for reward in self.rewards.rules if reward.name == "answer" and reward.file is None):
            found |= reading_metrics(groups, reward.options.get("form", "any"))
        return found if judge is None else found | {f"judge/{name}": value for name, value in judge.rollout.counts().items()}

    def keep_samples(self, rollout: Rollout) -> None:
        """Write some of the completions, spread over the rollout, with all that says where they came from and what they were worth."""
        rows = [(group.prompt, member, completion, scored, float(rollout.advantages.values_PG[place][member]))
                for place, group in enumerate(rollout.groups)
                for member, (completion, scored) in enumerate(zip(group.completions, group.scored, strict=True))]
        kept = rows[:: max(1, -(-len(rows) // max(1, self.config.samples)))]
        append_json_rows(self.file, (plain({
            "step": rollout.step, "prompt_id": prompt.id, "prompt": prompt.text, "ids": list(completion.ids), "text": completion.text,
            "ended": completion.ended, "reward": scored.value, "rewards": dict(scored.components), "error": scored.error,
            "advantage": advantage, "version": completion.version,
            "address": [self.config.seed, "sample", *address(rollout.step), prompt.id, member]})
            for prompt, member, completion, scored, advantage in kept))

    @torch.no_grad()
    def draw_for_preflight(self, step: int) -> tuple[Batch, Drawn]:
        """A rollout that is not learned from, each completion with an advantage of its own so that every tensor gets a gradient."""
        prompts = self.order.drawn(min(step // self.config.num_iterations, self.order.rollouts - 1))
        self.sampler.load(step)
        completions = self.sampler.draw(prompts, self.sampling, ("rehearsal",), self.config.num_generations)
        drawn = [(prompt, completion) for prompt, group in zip(prompts, completions, strict=True) for completion in group]
        values = [(1 + 0.1 * (row % 10)) * (-1) ** row for row in range(len(drawn))]
        batch = batch_of(drawn, values, [True] * len(drawn), self.config.normalisation, cap=self.config.max_completion_length)
        return replace(batch, reference=batch.behaviour), drawn


    def preflight(self, objective: Objective, batch: Batch) -> list[Verdict]:
        """Verdicts beyond what is asked of every policy: those on a remote sampler alone, since what is inserted here is the prompt."""
        return self.sampler.verdicts()


def address(step: int) -> tuple[str | int, ...]:
    """Seed address of a rollout's draws; the prompt's id and the member's number follow."""
    return "rollout", step


def counted_completions(groups: Sequence[Group], advantages: Advantages, *, mask_truncated: bool, cap: int) -> list[bool]:
    """Mask of the completions that are learned from: those whose reward is known and, where asked, that ended by themselves."""
    ended = [completion.ended for group in groups for completion in group.completions]
    kept = untruncated(ended) if mask_truncated else np.ones(len(ended), dtype=bool)
    found = (advantages.known_PG.flatten() & kept).tolist()
    if not any(found):
        raise GuardStop(f"of {len(found)} completions {int((~advantages.known_PG).sum())} have no known reward and "
                        f"{ended.count('length')} hit the cap of {cap} tokens: nothing is left to learn from; mend the reward, raise "
                        "--max-completion-length, or leave --mask-truncated-completions out")
    return found


class RolloutHistory:
    """History of a run's rollouts: the measurements of each with those of its last update; `tokens` were trained on."""

    def __init__(self, run: Run, vocab: int):
        self.run, self.vocab = run, vocab
        self.rollouts: list[dict[str, float]] = []
        self.tokens = 0
        self._warned: dict[str, int] = {}

    def recall(self) -> None:
        """Recall, from the written metrics, what the rules over the steps so far have to know."""
        for row in read_json_lines(self.run.metrics_file):
            numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
            if "groups" in row:
                self.rollouts.append(numbers)
            elif "loss" in row and self.rollouts:
                self.rollouts[-1] |= numbers
            self.tokens = row.get("num_tokens", self.tokens)

    def add(self, step: Step, found: Mapping[str, float], measured: Mapping[str, float] | None) -> None:
        """Add what an update on the last rollout found; of its first one also what the rollout `measured` as it was drawn."""
        if measured is not None:
            self.rollouts.append(dict(measured))
        self.rollouts[-1] |= {**found, "grad_norm": float(step.grad_norm)}
        self.tokens += step.tokens

    def verdicts(self) -> list[Verdict]:
        return check_collapse(self.rollouts, self.vocab)

    def say_warnings(self, step: int) -> None:
        for sentence in rollout_warnings(self.rollouts):
            self.warn(step, sentence)

    def warn(self, step: int, sentence: str) -> None:
        """Warn once, and again after so many steps; with other numbers it is still the same warning."""
        rule = re.sub(r"[\d.]+", "", sentence)
        if step - self._warned.get(rule, -SAID_AGAIN) >= SAID_AGAIN:
            self._warned[rule] = step
            self.run.say(f"step {step + 1}: {sentence}")
            self.run.log(Event.WARNING, step=step + 1, reason=sentence)

    def line(self) -> str:
        """Progress line about the last rollout."""
        now = self.rollouts[-1]
        return "  ".join(f"{name} {now[key]:.4g}" for name, key in PROGRESS_METRICS.items() if key in now)

"""Tiny GRPO run of a few steps, with every guard that watches one.

Each stage is a function of this module, so that a fault can take its place: the engine, what it is told of new weights, what is
drawn, scored, assembled, trained and compared with.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from assay.data.batch import Batch
from assay.evaluation.soundness import DrawnTokens, judge_draws, rescored_draws
from assay.generate.engine import Engine
from assay.generate.generation_request import Completion, GenerationRequest, Sampling
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import (
    LogprobFloor,
    check_floor,
    check_identity,
    check_on_policy,
    check_reference,
    check_sampled_ids,
    check_version,
    measure_logprob_floor,
    naive_logprobs,
    version_name,
)
from assay.guard.policy_loss_checks import check_advantages, check_counted, check_directions, check_policy_loss
from assay.guard.rollout_checks import SiblingCounts, check_collapse, check_rewards_again, check_rollout_seeds, rollout_metrics
from assay.learn import advantage, loop, policy
from assay.learn.advantage import Counting, Normalise, RewardValue
from assay.learn.objectives import Objective, averages
from assay.learn.optim import adamw
from assay.learn.policy import Surrogate
from assay.model.attention import PADDING
from assay.model.transformer import Transformer
from assay.seeds import generator
from assay.testing.fault_injection import Job, Plant
from assay.testing.tiny_models import tiny_model
from assay.verdict import Outcome, Verdict

CompletionGroups = list[list[Completion]]
PromptIds = Sequence[Sequence[int]]

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, CAP = 4, 4, 5, 10
STOP_IDS = tuple(range(250, 258))
_LOUD = 3.0  # so that a temperature, a stale weight or another base shows in what is drawn


@dataclass(frozen=True)
class TinyGrpo:
    """Tiny GRPO run, whose defaults leave every guard silent."""

    asked: Surrogate = field(default_factory=lambda: Surrogate(kl="k3", kl_weight=0.05, temperature=0.7))
    normalise: Normalise = "token"
    mask_truncated: bool = False
    steps: int = 2
    micro: int = 8
    seed: int = 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_new=CAP, temperature=self.asked.temperature, seed=self.seed)


@functools.cache
def a_grpo_run(of: TinyGrpo | None = None) -> Job:
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        with plant(folder):
            return run_grpo(of or TinyGrpo())
    return job


def run_grpo(plan: TinyGrpo) -> list[Verdict]:
    """Verdicts of the guards on a tiny GRPO run."""
    model = make_policy(plan.seed)
    reference, recorded = make_reference(model)
    engine, optimizer = make_engine(model), adamw(model.named_parameters(), 1e-3)
    objective = make_objective(plan.asked)
    prompts = make_prompts(model, plan.seed)
    floor = measure_logprob_floor(model, [[*p, *p] for p in prompts], plan.asked.temperature)
    verdicts, history, siblings, draws = [check_floor(floor)], [], SiblingCounts(GROUP_SIZE), DrawnTokens()
    for step in range(plan.steps):
        serve_weights(engine, model, step)
        groups = draw_groups(engine, prompts, plan.sampling, step)
        rewards = hand_out_rewards(score_groups(groups))
        siblings.add(groups)
        for prompt, completion in ((prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group):
            draws += rescored_draws(model, prompt, completion.ids, plan.sampling)
        verdicts += [siblings.check(), judge_draws(draws, plan.sampling, step + 1), check_rewards_again(
            [{"share": reward} for group in rewards for reward in group],
            [{"share": reward} for group in score_groups(groups) for reward in group], 0.0)]
        found = advantage.group_advantages(rewards)
        batch, counted = assemble_batch(plan, prompts, groups, found.values_PG.tolist(), found.known_PG.flatten().tolist(), reference)
        verdicts += [check_version([c.version for group in groups for c in group], version_name(step, fingerprint(model))),
                     *check_trained_rows(model, plan, prompts, groups, batch, floor), check_advantages(rewards, found, "group"),
                     check_counted(counted, found.known_PG.flatten().tolist(), [c.ended for group in groups for c in group],
                                   mask_truncated=plan.mask_truncated)]
        if step == 0:
            verdicts += [check_policy_loss(model, objective, batch, plan.asked, plan.normalise, CAP),
                         check_directions(model, objective, batch, plan.asked), check_seed_reaches(engine, prompts, plan.sampling)]
        if not batch.weight.any():
            break
        [taken] = loop.train(model, optimizer, [batch], objective, micro=plan.micro, start=step)
        metrics = averages(taken.metrics)
        verdicts += [check_on_policy(metrics, floor, plan.asked.epsilon),
                     check_reference(metrics["kl"], step, floor, recorded, fingerprint(reference))]
        history.append(rollout_metrics(groups, rewards, found) | metrics | {"grad_norm": float(taken.grad_norm)})
    return decisive([*verdicts, *(check_collapse(history, model.config.vocab) if history else [])])


def decisive(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Decisive verdict of each check: that at which a run would have stopped, or else its last."""
    last = {verdict.check: verdict for verdict in verdicts}
    first = {verdict.check: verdict for verdict in reversed(verdicts) if verdict.outcome is Outcome.REFUTED}
    return list((last | first).values())


def check_trained_rows(model: Transformer, plan: TinyGrpo, prompts: PromptIds, groups: CompletionGroups, batch: Batch,
                       floor: LogprobFloor) -> list[Verdict]:
    """Whether what is about to be trained is what was sampled."""
    asked, flat = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group], [c for group in groups for c in group]
    pairs = [(prompt, completion.ids) for prompt, completion in zip(asked, flat, strict=True)]
    at = lambda temperature: lambda: naive_logprobs(model, asked, [c.ids for c in flat], temperature)  # noqa: E731
    trainer = trainer_logprobs(model, batch, plan.asked.temperature)
    return [check_identity([c.logprobs for c in flat], trainer, floor, at(plan.asked.temperature), {"temperature 1": at(1.0)}),
            check_sampled_ids(batch, asked, [ids for _, ids in pairs], stop_ids=STOP_IDS, cap=CAP)]

# ---------------------------------------------------------------- the stages


def make_policy(seed: int) -> Transformer:
    model = tiny_model(seed=seed)
    with torch.no_grad():
        model.norm.weight.mul_(_LOUD)  # type: ignore[operator]
    return model


def make_reference(model: Transformer) -> tuple[Transformer, str]:
    """The fork, frozen, and the digest that the run records of it."""
    reference = copy.deepcopy(model).requires_grad_(False)
    return reference, fingerprint(reference)


def make_engine(model: Transformer) -> Engine:
    return Engine(model, slots=PROMPTS * GROUP_SIZE, length=PROMPT_TOKENS + CAP, stop_ids=STOP_IDS,
                  version=version_name(0, fingerprint(model)))


def make_objective(asked: Surrogate) -> Objective:
    return policy.policy_gradient(asked)


def make_prompts(model: Transformer, seed: int) -> list[list[int]]:
    chance = generator(seed, "prompts")
    return torch.randint(0, 250, (PROMPTS, PROMPT_TOKENS), generator=chance).tolist()


def serve_weights(engine: Engine, model: Transformer, updates: int) -> None:
    engine.load(version_name(updates, fingerprint(model)))


def draw_groups(engine: Engine, prompts: PromptIds, sampling: Sampling, step: int) -> CompletionGroups:
    tickets = {engine.submit(GenerationRequest(tuple(prompt), sampling, (step, number), GROUP_SIZE)): number for number,
               prompt in enumerate(prompts)}
    ended = {(tickets[p.ticket], p.member): p.completion for p in engine.drain()}
    return [[completion for member in range(GROUP_SIZE) if (completion := ended[number, member]) is not None]
            for number in range(len(prompts))]


def check_seed_reaches(engine: Engine, prompts: PromptIds, sampling: Sampling) -> Verdict:
    one, two = (draw_groups(engine, prompts, Sampling(max_new=CAP, temperature=sampling.temperature, seed=seed), 0) for seed in (1, 2))
    return check_rollout_seeds(*([c for group in groups for c in group] for groups in (one, two)))


def score_groups(groups: CompletionGroups) -> list[list[RewardValue]]:
    """The share of small ids in a completion; one completion cannot be scored."""
    rewards = [[sum(token < 100 for token in c.ids) / len(c.ids) for c in group] for group in groups]
    return [[None if (number, place) == (1, 2) else reward for place, reward in enumerate(group)] for number, group in enumerate(rewards)]


def hand_out_rewards(rewards: list[list[RewardValue]]) -> list[list[RewardValue]]:
    """Rewards on their way from the workers to the completions they belong to."""
    return rewards


def sequence_ids(prompt: Sequence[int], completion: Completion) -> list[int]:
    return [*prompt, *completion.ids]


def assemble_batch(plan: TinyGrpo, prompts: PromptIds, groups: CompletionGroups, values: list[list[float]], known: list[bool],
                   reference: Transformer) -> tuple[Batch, list[bool]]:
    """One row a completion, and which of them count."""
    flat = [(prompt, c, value) for prompt, group, row in zip(prompts, groups, values, strict=True)
            for c, value in zip(group, row, strict=True)]
    rows = [sequence_ids(prompt, completion) for prompt, completion, _ in flat]
    kept = advantage.untruncated([c.ended for _, c, _ in flat]) if plan.mask_truncated else [True] * len(flat)
    counted = [bool(a and b) for a, b in zip(known, kept, strict=True)]
    counting = weigh_tokens([len(row) - PROMPT_TOKENS for row in rows], counted, plan.normalise)
    shape = len(rows), PROMPT_TOKENS + CAP
    streams: dict[str, Any] = {name: torch.zeros(shape) for name in ("weight", "advantage", "behaviour")}
    tokens, documents = torch.zeros(shape, dtype=torch.int64), torch.full(shape, PADDING, dtype=torch.int32)
    for row, (ids, (_, completion, value)) in enumerate(zip(rows, flat, strict=True)):
        tokens[row, :len(ids)], documents[row, :len(ids)] = torch.tensor(ids), 0
        done = slice(PROMPT_TOKENS, len(ids))
        streams["weight"][row, done], streams["advantage"][row, done] = float(counting.weight_N[row]), value
        behaviour = torch.tensor(completion.logprobs)[:len(ids) - PROMPT_TOKENS]
        streams["behaviour"][row, PROMPT_TOKENS:PROMPT_TOKENS + len(behaviour)] = behaviour
    batch = Batch(tokens, documents=documents, divisor=counting.divisor, **streams)
    with torch.no_grad():
        seen, _ = policy.token_logprobs(reference, batch, plan.asked.temperature, entropy=True)
    return replace(batch, reference=seen), counted


def weigh_tokens(lengths: Sequence[int], counted: Sequence[bool], how: Normalise) -> Counting:
    return advantage.token_weights(lengths, counted, how, CAP)


@torch.no_grad()
def trainer_logprobs(model: Transformer, batch: Batch, temperature: float) -> list[list[float]]:
    """Log-probabilities of the completions, as the objective sees them."""
    logp, _ = policy.token_logprobs(model, batch, temperature, entropy=True)
    assert batch.documents is not None
    return [row[PROMPT_TOKENS:int(length)].tolist() for row, length in zip(logp, (batch.documents != PADDING).sum(1), strict=True)]

"""Tiny GRPO run one rollout off the policy, saved and resumed once, with every check that watches staleness.

Each stage is a function of this module, so that a fault can take its place: what the sampler is given and calls it, what it writes
down, how it is corrected, and what a checkpoint keeps of what is in flight.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.generate.engine import Engine
from assay.generate.generation_request import Completion
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import check_version, measure_logprob_floor, version_name
from assay.guard.staleness_checks import check_in_flight, check_stale_weights, check_staleness, check_waiting
from assay.learn import advantage, loop, policy, stale_weights
from assay.learn.optim import adamw
from assay.model.transformer import Transformer
from assay.testing.fault_injection import Plant
from assay.testing.tiny_grpo import (
    CAP,
    GROUP_SIZE,
    PROMPT_TOKENS,
    PROMPTS,
    STOP_IDS,
    CompletionGroups,
    TinyGrpo,
    assemble_batch,
    decisive,
    draw_groups,
    make_policy,
    make_prompts,
    make_reference,
    score_groups,
    trainer_logprobs,
)
from assay.verdict import Outcome, Verdict

STEPS, SAVED_AT, WEIGHT_CAP = 4, 2, 2.0


def a_run_ahead(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return run_ahead(TinyGrpo())


def run_ahead(plan: TinyGrpo) -> list[Verdict]:
    """Verdicts on a run that samples each rollout while it learns from the one before. It is saved and read back once."""
    model, verdicts = make_policy(plan.seed), list[Verdict]()
    reference, _ = make_reference(model)
    engine = Engine(model, slots=PROMPTS * GROUP_SIZE, length=PROMPT_TOKENS + CAP, stop_ids=STOP_IDS, version="none", lags=True)
    optimizer, prompts = adamw(model.named_parameters(), 5e-3), make_prompts(model, plan.seed)
    floor = measure_logprob_floor(model, [[*p, *p] for p in prompts], plan.asked.temperature)
    names, made_by = [str(number) for number in range(len(prompts))], {0: version_name(0, fingerprint(model))}
    serve_copy(engine, model, 0)
    drawn_at, groups, drawn, trained = 0, written_down(draw_groups(engine, prompts, plan.sampling, 0)), {0: names}, set[int]()
    for step in range(STEPS):
        if step == SAVED_AT:
            kept = saved({"ahead": {"step": step, "drawn_at": drawn_at, "prompts": names, "drawn": as_json(groups)}})
            verdicts.append(check_waiting(kept, step, names, 1))
            if "ahead" not in kept:
                break
            groups = from_json(kept["ahead"]["drawn"])
        versions = [(c.version, len(c.ids)) for group in groups for c in group]
        verdicts += [check_version([version for version, _ in versions], made_by[drawn_at]), check_staleness(versions, step, 1)]
        batch, plain = stale_batch(plan, prompts, groups, reference)
        if step > 0:
            then, before = batch.behaviour, batch.advantage
            assert then is not None
            assert before is not None
            batch = correct_stale(batch, present_logprobs(model, batch, plan.asked.temperature), then)
            again = dict(enumerate(trainer_logprobs(model, batch, plan.asked.temperature)))
            counted = {row: [value for value, weight in zip(values, batch.weight[row, PROMPT_TOKENS:].tolist(), strict=False) if weight]
                       for row, values in again.items()}
            verdicts.append(check_stale_weights(batch, then, plain, counted, WEIGHT_CAP, floor))
        if any(verdict.outcome is Outcome.REFUTED for verdict in verdicts):
            break
        trained.add(step)
        if step + 1 < STEPS:
            made_by[step] = version_name(step, fingerprint(model))
            serve_copy(engine, model, step)
            drawn_at, drawn[step + 1] = step, names
            groups = written_down(draw_groups(engine, prompts, plan.sampling, step + 1))
        list(loop.train(model, optimizer, [batch], policy.policy_gradient(plan.asked), micro=plan.micro, start=step))
    return decisive([*verdicts, check_in_flight(drawn, trained, {}, {})] if len(trained) == STEPS else verdicts)

# ---------------------------------------------------------------- the stages


def serve_copy(engine: Engine, model: Transformer, updates: int) -> None:
    engine.load(version_name(updates, fingerprint(model)))


def written_down(groups: CompletionGroups) -> CompletionGroups:
    """Groups as the sampler reports them."""
    return groups


def correct_stale(batch: Batch, now: Tensor, then: Tensor) -> Batch:
    return stale_weights.importance_weighted(batch, now, stale_weights.truncated_weights(now, then, batch.weight != 0, WEIGHT_CAP))


def saved(facts: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's facts, written and read back."""
    return json.loads(json.dumps(facts))

# ----------------------------------------------------------------


def stale_batch(plan: TinyGrpo, prompts: Sequence[Sequence[int]], groups: CompletionGroups, reference: Transformer) -> tuple[Batch, Tensor]:
    """The batch, and (B, 1) the advantage of each row."""
    found = advantage.group_advantages(score_groups(groups))
    batch, _ = assemble_batch(plan, prompts, groups, found.values_PG.tolist(), found.known_PG.flatten().tolist(), reference)
    return batch, torch.tensor(found.values_PG.flatten(), dtype=torch.float32)[:, None]


@torch.no_grad()
def present_logprobs(model: Transformer, batch: Batch, temperature: float) -> Tensor:
    return policy.token_logprobs(model, batch, temperature, entropy=True)[0]


def as_json(groups: CompletionGroups) -> list[list[dict[str, Any]]]:
    return [[{"ids": c.ids, "logprobs": c.logprobs, "ended": c.ended, "version": c.version} for c in group] for group in groups]


def from_json(rows: list[list[dict[str, Any]]]) -> CompletionGroups:
    return [[Completion(tuple(row["ids"]), tuple(row["logprobs"]), row["ended"], row["version"]) for row in group] for group in rows]

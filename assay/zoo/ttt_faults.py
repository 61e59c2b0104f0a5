"""Test-time training faults: learned before scored, targets in sight, patches never reset, fine on one seed only."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.guard.ttt_checks import (
    TokenCosts,
    causality_cuts,
    check_base_unchanged,
    check_causality,
    check_document_regressions,
    check_factor_drift,
    check_score_order,
    check_target_unseen,
    check_ttt_gain,
    token_costs,
)
from assay.learn import ttt_loop
from assay.learn.ttt_loop import ChunkScored, DocumentBegun, SlotAdam, TttEvent, TttSettings, read_and_adapt
from assay.learn.ttt_witness import check_reading
from assay.model.batched_lora import TTT_TARGETS, BatchedAdapters, ttt_sites
from assay.model.lora import fresh
from assay.model.patch import Patch
from assay.model.transformer import Transformer
from assay.statistics.seed_stability import stability
from assay.testing.fault_injection import Plant, fault, in_place_of, swap
from assay.testing.tiny_models import tiny_model, tokenizer_and_stops
from assay.verdict import Verdict

TTT_SETTINGS = TttSettings(chunk=24, context=72, steps=1, lr=1e-2)
CARRY_OVER = replace(TTT_SETTINGS, carry_over=True)
_SLOTS = 2
_SEEDS, PLACE = (42, 314, 1337), 5  # of the first right factors: positive for the last two of these seeds
LINES = ("the bell rings and the river is long\n", "over the hill and under the stone\n", "winter and summer and winter again\n",
         "one for the baker and one for the king\n", "she is singing and he is walking\n")


def repetitive_texts(count: int) -> list[str]:
    """Each says one line over and over: what a reader learns who learns while reading."""
    return [f"{number} {LINES[number % len(LINES)]}" * 4 for number in range(count)]


def repetitive_ids(count: int = 6) -> list[list[int]]:
    """The same as ids."""
    tokenizer, stops = tokenizer_and_stops()
    assert stops.eos is not None
    return [[stops.eos, *tokenizer.encode(text)] for text in repetitive_texts(count)]

# ---------------------------------------------------------------- jobs


def a_causality_preflight(folder: Path, plant: Plant) -> list[Verdict]:
    """Two beginnings are read, with and without what comes after a cut."""
    model, documents = tiny_model(), [tokens[:73] for tokens in repetitive_ids(2)]
    with plant(folder):
        verdict = check_causality(lambda given: read_and_learn(model, given, slots=2)[0], documents,
                                  causality_cuts(TTT_SETTINGS.chunk, len(documents[0])), model.config.vocab)
        recorded = read_and_learn(model, documents, slots=2)[0][0]
    return [verdict, check_target_unseen(model, recorded, documents[0], (1, 12, 24))]


def a_reading(folder: Path, plant: Plant) -> list[Verdict]:
    """Six documents in two slots, each with a fresh patch."""
    model, documents = tiny_model(), repetitive_ids()
    before = weight_bytes(model)
    without = token_costs(read_and_adapt(model, documents, TTT_SETTINGS, _SLOTS), len(documents))
    with plant(folder):
        with_, events = read_and_learn(model, documents)
    learned_sums, sums = (np.array([found.sum(dtype=np.float64) for found in side]) for side in (with_, without))
    return [check_reading(model, documents[:1], (without[:1], with_[:1]), first_patch(model, 0), TTT_SETTINGS),
            check_score_order(as_ledger(events), [len(tokens) - 1 for tokens in documents], warm=False),
            check_ttt_gain(learned_sums, sums, np.full(len(documents), 100.0)), check_base_unchanged(before, weight_bytes(model)),
            check_document_regressions(learned_sums, sums, [f"document {n}" for n in range(len(documents))], 0.05)]


def a_carried_preflight(folder: Path, plant: Plant) -> list[Verdict]:
    """Two beginnings that share an adapter are read, with and without what comes after a cut."""
    model, documents = tiny_model(), [tokens[:73] for tokens in repetitive_ids(2)]
    with plant(folder):
        return [check_causality(lambda given: read_and_learn(model, given, CARRY_OVER, slots=2)[0], documents,
                                causality_cuts(CARRY_OVER.chunk, len(documents[0])), model.config.vocab, shared_chunk=CARRY_OVER.chunk)]


def a_carried_reading(folder: Path, plant: Plant) -> list[Verdict]:
    """Six documents in two slots, all with one patch."""
    model, documents = tiny_model(), repetitive_ids()
    without = token_costs(read_and_adapt(model, documents, CARRY_OVER, _SLOTS), len(documents))
    with plant(folder):
        with_, events = read_and_learn(model, documents, CARRY_OVER)
    learned_sums, sums = (np.array([found.sum(dtype=np.float64) for found in side]) for side in (with_, without))
    return [check_reading(model, documents, (without, with_), first_patch(model, 0), CARRY_OVER, slots=_SLOTS),
            check_score_order(as_ledger(events), [len(tokens) - 1 for tokens in documents], warm=False, carry_over=True),
            check_ttt_gain(learned_sums, sums, np.full(len(documents), 100.0), carry_over=True),
            check_factor_drift([one.right for event in events for one in event if isinstance(one, DocumentBegun)][_SLOTS:], 4.0)]


def a_warm_reading(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        _, events = read_and_learn(tiny_model(), repetitive_ids(), replace(TTT_SETTINGS, warm=True, weight_decay=0.1))
    return [check_factor_drift([one.right for event in events for one in event if isinstance(one, DocumentBegun)][_SLOTS:], 4.0)]


def three_warm_seeds(folder: Path, plant: Plant) -> list[Verdict]:
    """The same documents, with three first patches."""
    with plant(folder):
        ends = {seed: mean_cost(read_and_learn(tiny_model(), repetitive_ids(), replace(TTT_SETTINGS, warm=True), seed=seed)[0])
                for seed in _SEEDS}
    return [stability(ends, metric="nats per token").verdict()]


def read_and_learn(model: Transformer, documents: Sequence[Sequence[int]], how: TttSettings = TTT_SETTINGS, slots: int = _SLOTS,
                   seed: int = 0) -> tuple[TokenCosts, list[TttEvent]]:
    adapters = BatchedAdapters(first_patch(model, seed), slots, shared=how.carry_over)
    with adapters.attached(model):
        events = list(read_and_adapt(model, documents, how, slots, adapters))
    return token_costs(events, len(documents)), events


def first_patch(model: Transformer, seed: int) -> Patch:
    return fresh(model.config, ttt_sites(model.config, TTT_TARGETS), 2, 1.0, seed, None)


def as_ledger(events: Sequence[TttEvent]) -> list[dict[str, Any]]:
    kinds = {DocumentBegun: "begin", ChunkScored: "score"}
    return [{"seq": seq, "kind": kinds.get(type(event[0]), "update"),
             "rows": [vars(one) | ({"tokens": len(one.losses)} if isinstance(one, ChunkScored) else {}) for one in event]}
            for seq, event in enumerate(events)]


def mean_cost(found: TokenCosts) -> float:
    return float(np.concatenate(found).mean(dtype=np.float64))


def weight_bytes(model: Transformer) -> dict[str, str]:
    return {name: parameter.detach().numpy().tobytes().hex() for name, parameter in model.named_parameters()}

# ---------------------------------------------------------------- faults


@fault("learned before it was scored", rows=(), stage="ttt", check="causality", job=a_causality_preflight)
@in_place_of(ttt_loop, "score_chunks")
def learned_first(usual: Any, model: Transformer, window: Batch, adam: SlotAdam | None, learning: Sequence[bool]) -> Tensor:
    """The step on a chunk comes before its score: bits per byte fall wonderfully."""
    if adam is not None:
        ttt_loop.learn_from_chunks(model, window, usual(model, window, adam, [True]), adam, learning)
    return usual(model, window, adam, learning)


@fault("the last chunk learned, scored and forgotten", rows=(), stage="ttt", check="causality", job=a_causality_preflight)
@in_place_of(ttt_loop, "score_chunks")
def last_chunk_learned(usual: Any, model: Transformer, window: Batch, adam: SlotAdam | None, learning: Sequence[bool]) -> Tensor:
    """A step on the last chunk comes before its score and is undone after it: the ledger of scores shows no step at all."""
    if adam is None or any(learning):
        return usual(model, window, adam, learning)
    state_BN, steps_B = adam.adapters.state_BN.detach().clone(), adam.steps_B.clone()
    moments = adam.first_BN.clone(), adam.second_BN.clone()
    ttt_loop.learn_from_chunks(model, window, usual(model, window, adam, [True]), adam, [True] * len(learning))
    found = usual(model, window, adam, learning).detach()
    with torch.no_grad():
        adam.adapters.state_BN.copy_(state_BN)
    adam.steps_B, (adam.first_BN, adam.second_BN) = steps_B, moments
    return found


@fault("sum over the batch in place of the document's own", rows=(), stage="ttt", check="causality", job=a_causality_preflight)
@in_place_of(SlotAdam, "step")
def shared_step(usual: Any, adam: SlotAdam, gradient: Tensor, learning: Sequence[bool]) -> None:
    """All documents that are read side by side take one step, so that each has seen the others'."""
    usual(adam, gradient.mean(0, keepdim=True).expand_as(gradient), learning)


@fault("target within sight", rows=(), stage="ttt", check="sight", job=a_causality_preflight)
@in_place_of(Transformer, "hidden")
def target_in_sight(usual: Any, model: Transformer, tokens: Tensor, **given: Any) -> Tensor:
    """The token that is to be predicted shines through the state that predicts it."""
    return usual(model, tokens, **given) + 0.1 * model.embed.weight[tokens.roll(-1, 1)]


fault("patch not reset between documents", rows=(), stage="ttt", check="order", job=a_reading)(
    lambda _: swap(BatchedAdapters, "begin", lambda adapters, slot, warm: None))


@fault("scores of a patch that was stepped meanwhile", rows=(), stage="ttt", check="order", job=a_reading)
@in_place_of(ttt_loop, "score_chunks")
def stepped_meanwhile(usual: Any, model: Transformer, window: Batch, adam: SlotAdam | None, learning: Sequence[bool]) -> Tensor:
    """Another pass steps on the state between the update that is on record and the score that follows it."""
    if adam is not None:
        with torch.no_grad():
            adam.adapters.state_BN.mul_(1.001)
    return usual(model, window, adam, learning)


@fault("patch merged into the base", rows=(), stage="ttt", check="base", job=a_reading)
@in_place_of(ttt_loop, "learn_from_chunks")
def merged_into_base(usual: Any, model: Transformer, *rest: Any) -> None:
    """What a document taught stays in the model."""
    usual(model, *rest)
    with torch.no_grad():
        model.get_parameter("blocks.0.attn.out.base.weight").add_(1e-4)


@fault("an optimizer that counts no steps", rows=(), stage="ttt", check="reading", job=a_reading)
@in_place_of(SlotAdam, "step")
def uncounted_steps(usual: Any, adam: SlotAdam, gradient: Tensor, learning: Sequence[bool]) -> None:
    """The moments are taken for those of the hundredth step: a smaller update, a smaller gain, and nothing else."""
    adam.steps_B += 100
    usual(adam, gradient, learning)
    adam.steps_B -= 100


@fault("one document learned before another beside it is scored", rows=(), stage="ttt", check="causality", job=a_carried_preflight)
@in_place_of(ttt_loop, "score_chunks")
def learned_between(usual: Any, model: Transformer, window: Batch, adam: SlotAdam | None, learning: Sequence[bool]) -> Tensor:
    """The adapter that two documents share has learned the chunk of one when it scores that of the other."""
    losses_BK = usual(model, window, adam, learning)
    if adam is None:
        return losses_BK
    before = adam.adapters.state_BN.detach().clone(), adam.steps_B.clone(), adam.first_BN.clone(), adam.second_BN.clone()
    one = replace(window, weight=window.weight * torch.tensor([[1.0], [0.0]]))
    ttt_loop.learn_from_chunks(model, one, usual(model, one, adam, [True]), adam, [True, False])
    later_BK = usual(model, window, adam, [False])
    with torch.no_grad():
        adam.adapters.state_BN.copy_(before[0])
    adam.steps_B, adam.first_BN, adam.second_BN = before[1:]
    return usual(model, window, adam, learning) + (later_BK - losses_BK.detach()) * torch.tensor([[0.0], [1.0]])


fault("an adapter that was to be carried over begins afresh", rows=(), stage="ttt", check="order", job=a_carried_reading)(
    lambda _: swap(SlotAdam, "begin", lambda adam, slot: adam.adapters.begin(0, warm=False)))


@fault("a carried-over adapter runs away", rows=("S6",), stage="ttt", check="drift", job=a_carried_reading)
@in_place_of(SlotAdam, "step")
def carried_away(usual: Any, adam: SlotAdam, gradient: Tensor, learning: Sequence[bool]) -> None:
    """Weight decay has the wrong sign, and no document begins afresh."""
    adam.settings = replace(adam.settings, weight_decay=-20.0)
    usual(adam, gradient, learning)


@fault("a step too large for its documents", rows=("S6",), stage="ttt", check="regressions", job=a_reading)
@in_place_of(SlotAdam, "step")
def step_too_large(usual: Any, adam: SlotAdam, gradient: Tensor, learning: Sequence[bool]) -> None:
    adam.settings = replace(TTT_SETTINGS, lr=1.0)
    usual(adam, gradient, learning)


@fault("warm-started factors run away", rows=("S6",), stage="ttt", check="drift", job=a_warm_reading)
@in_place_of(SlotAdam, "step")
def run_away(usual: Any, adam: SlotAdam, gradient: Tensor, learning: Sequence[bool]) -> None:
    """Weight decay has the wrong sign, and what is kept grows from document to document."""
    adam.settings = replace(adam.settings, weight_decay=-20.0)
    usual(adam, gradient, learning)


@fault("two seeds of three collapse while reading", rows=("S6",), stage="ttt", check="seeds", job=three_warm_seeds)
@in_place_of(SlotAdam, "step")
def seeds_collapse(usual: Any, adam: SlotAdam, gradient: Tensor, learning: Sequence[bool]) -> None:
    """Fault: from some first factors a kernel's sums overflow, and come out with the other sign."""
    overflows = bool(adam.adapters.first_N[adam.adapters.right_N][PLACE] > 0)  # a matter of the seed
    usual(adam, -gradient if overflows else gradient, learning)

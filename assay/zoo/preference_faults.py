"""Preference faults: a reference that is not the parent or does not stay it, pairs that are none, and losses that prefer nothing."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from assay.data import preferences
from assay.data.batch import Batch
from assay.data.chat import TrainingExample
from assay.data.preferences import PreferencePair
from assay.data.reference_store import StoredReference
from assay.evaluation import held_out_pairs
from assay.learn import preference
from assay.learn.objectives import Loss, Objective
from assay.learn.policy import token_logprobs
from assay.learn.preference import PAIR_LOSSES, PairScores, PreferenceSettings
from assay.model.transformer import Transformer
from assay.testing import tiny_preferences
from assay.testing.fault_injection import fault, in_place_of, on_disk, swap
from assay.testing.tiny_models import tiny_model
from assay.testing.tiny_preferences import (
    a_live_preference_run,
    a_preference_preflight,
    a_preference_run,
    pairs_audited,
    pairs_cut,
    pairs_read,
    preference_rows,
    write_rows,
)

# ---------------------------------------------------------------- the reference is not the parent


fault("reference of another model", rows=("R22",), stage="loss", check="initial loss", job=a_preference_preflight())(
    # The base instead of the fine-tuned parent: the policy is pulled back to before its fine-tuning.
    lambda _: swap(tiny_preferences, "reference_for", lambda policy: tiny_model("llama", 3)))
fault("reference's log-probabilities shifted by one", rows=("N33",), stage="loss", check="reference", job=a_preference_preflight())(
    in_place_of(StoredReference, "attached")(lambda usual, self, batch: _shifted(usual(self, batch))))


@fault("reference that moves", rows=("R22",), stage="loss", check="reference", job=a_preference_run)
@in_place_of(tiny_preferences, "answered")
def reference_that_moves(_: Any, stored: StoredReference, batch: Batch, policy: Transformer) -> Batch:
    """It shares the policy's tensors, or is synchronised with them: nothing holds the policy any more."""
    with torch.no_grad():
        return replace(batch, reference=token_logprobs(policy, batch)[0])


@fault("live reference in the policy's tensors", rows=("R22",), stage="loss", check="live reference", job=a_live_preference_run)
@in_place_of(tiny_preferences, "reference_for")
def live_reference_in_the_policys_tensors(usual: Any, policy: Transformer) -> Transformer:
    """A copy that copies nothing: frozen parameters of its own around the storage that the optimizer writes to."""
    reference = usual(policy)
    for ours, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
        ours.data = theirs.data
    return reference


@fault("ln 2 for ever", rows=("O10",), stage="loss", check="loss moves", job=a_preference_run)
@in_place_of(preference, "pair_scores")
def ln_2_for_ever(usual: Any, model: Transformer, batch: Batch, settings: PreferenceSettings) -> PairScores:
    """Every step's reference is that step's policy: the weights move, the gradient looks healthy, and the loss is a constant."""
    found = usual(model, batch, settings)
    return found._replace(chosen_reference=found.chosen.detach(), rejected_reference=found.rejected.detach())

# ---------------------------------------------------------------- pairs that are none


@fault("swapped columns", rows=(), stage="data", check="direction", job=a_preference_run)
@in_place_of(tiny_preferences, "tiny_pairs")
def swapped_columns(usual: Any, *given: Any, **named: Any) -> list[PreferencePair]:
    """What is rejected is taught; loss, margin and accuracy of training are as good as ever."""
    return [PreferencePair(pair.id, pair.rejected, pair.chosen) for pair in usual(*given, **named)]


fault("chosen is rejected", rows=(), stage="data", check="rows", job=pairs_read)(
    # A pair that prefers nothing has the loss ln 2 and a gradient of 0.
    on_disk(lambda folder: _add_row(folder, {"prompt": "a ", "chosen": "b", "rejected": "b"})))
fault("columns swapped against their scores", rows=(), stage="data", check="rows", job=pairs_read)(
    on_disk(lambda folder: _add_row(folder, {"prompt": "a ", "chosen": "b", "rejected": "c", "score_chosen": 2, "score_rejected": 9})))
fault("sides that differ in white space alone", rows=(), stage="data", check="rows", job=pairs_read)(
    # A margin is learned, held-out pairs are told apart, and what was taught is how a text ends.
    on_disk(lambda folder: _add_row(folder, {"prompt": "a ", "chosen": "b", "rejected": "b \n"})))
fault("completions that repeat the prompt", rows=(), stage="data", check="rows", job=pairs_read)(
    # Whole texts beside a column prompt: every prompt is read twice, and the model learns to say it again.
    on_disk(lambda folder: write_rows(folder / "pairs.jsonl", [
        row | {side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in preference_rows()])))
fault("every pair the other way round too", rows=(), stage="data", check="contradictions", job=pairs_audited)(
    # Two files, one of them with its columns swapped: the gradients cancel, and the loss stays at ln 2.
    in_place_of(tiny_preferences, "preference_rows")(lambda usual, *given: [each for row in usual(*given) for each in (
        row, row | {"chosen": row["rejected"], "rejected": row["chosen"]})]))
fault("prompts held out that are learned from", rows=("D19",), stage="data", check="held-out prompts", job=pairs_audited)(
    # Pairs divided by rows where a prompt has several: what is held out has been seen.
    in_place_of(tiny_preferences, "held_out_rows")(
        lambda usual: [row | {"rejected": row["rejected"] + "?"} for row in preference_rows(16)]))
fault("both sides written from one", rows=(), stage="data", check="pairs", job=pairs_cut)(
    in_place_of(preferences, "fit_pair")(lambda usual, pair, *given: PreferencePair(pair.id, pair.chosen, pair.chosen)))
fault("prompt cut on one side only", rows=(), stage="data", check="pairs", job=pairs_cut)(
    # Where a side is too long, its beginning goes: the other side still has it, and the margin measures the prompt.
    in_place_of(preferences, "fit_to_length")(lambda usual, side, length, over: _cut_at_the_beginning(side, length)))

# ---------------------------------------------------------------- losses that prefer nothing, or the other


fault("preference the wrong way round", rows=(), stage="loss", check="loss", job=a_preference_preflight())(
    lambda _: swap(preference, "PAIR_LOSSES", PAIR_LOSSES | {"sigmoid": lambda settings, scores: PAIR_LOSSES["sigmoid"](
        settings, scores._replace(chosen=scores.rejected, rejected=scores.chosen, chosen_reference=scores.rejected_reference,
                                  rejected_reference=scores.chosen_reference))}))
fault("IPO by sums over tokens", rows=(), stage="loss", check="loss", job=a_preference_preflight(PreferenceSettings("ipo")))(
    # Its square then grows with the length of the answers.
    lambda _: swap(preference, "mean_margin", lambda scores: scores.chosen_ratio - scores.rejected_ratio))
fault("margins of the rejected over the chosen", rows=(), stage="loss", check="figures", job=a_preference_preflight())(
    # The loss is right, and all that is written of it says that the opposite is learned.
    in_place_of(preference, "pair_rewards")(lambda usual, *given: tuple(reversed(usual(*given)))))
fault("held-out margins at half their size", rows=(), stage="eval", check="scores", job=a_preference_preflight())(
    in_place_of(held_out_pairs, "pair_rewards")(lambda usual, *given: [reward / 2 for reward in usual(*given)]))
fault("preference that takes a mean", rows=("L03",), stage="loss", check="accumulation", job=a_preference_preflight())(
    # Where the loop counts on a sum over pairs: rows with few of them count as much as rows with many.
    lambda _: preferring(lambda loss: loss._replace(total=loss.total / loss.weight)))

# ---------------------------------------------------------------- where in our code they are planted


def preferring(change: Callable[[Loss], Loss]) -> AbstractContextManager[None]:
    whole = preference.preference

    def changed(settings: PreferenceSettings) -> Objective:
        return lambda model, batch: change(whole(settings)(model, batch))

    return swap(preference, "preference", changed)


def _shifted(batch: Batch) -> Batch:
    assert batch.reference is not None
    return replace(batch, reference=batch.reference.roll(1, 1))


def _cut_at_the_beginning(side: TrainingExample, length: int) -> TrainingExample:
    lost = max(0, len(side) - length)
    weight = side.weight[lost:].copy()
    weight[0] = 0
    return replace(side, tokens=side.tokens[lost:], weight=weight, prompt=max(1, side.prompt - lost), cut=lost > 0)


def _add_row(folder: Path, row: dict[str, Any]) -> None:
    with (folder / "pairs.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")

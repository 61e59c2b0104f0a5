"""Tiny preference runs: made-up pairs, a reference that is asked once, a few steps, and the checks that a real run has."""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from assay.data import preferences
from assay.data.batch import Batch
from assay.data.preferences import PackedPairs, PreferencePair, pair_rows
from assay.data.reference_store import StoredReference, open_reference, pair_answers, write_reference
from assay.evaluation.held_out_pairs import score_pairs
from assay.guard.preference_checks import (
    check_contradictions,
    check_direction,
    check_held_out_prompts,
    check_loss_at_reference,
    check_loss_moves,
    check_pair_reference,
    check_pairs,
    preflight_preference,
)
from assay.learn import loop, preference
from assay.learn.policy import token_logprobs
from assay.learn.preference import PreferenceSettings
from assay.model.transformer import Transformer
from assay.recipes.live_reference import LiveReference
from assay.testing.fault_injection import Job, Plant
from assay.testing.tiny_models import tiny_model, tokenizer_and_stops
from assay.testing.tiny_training import check_accepted, make_optimizer
from assay.verdict import Verdict

SIDE_TOKENS, PREFERENCE_STEPS, PAIRS_A_STEP = 40, 24, 4
WEIGHTS = "of the zoo"


def preference_rows(count: int = 24, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number}: ", "chosen": f"yes, {number} it is", "rejected": f"no, not {number}" + "!" * (number % 3)}
            for number in range(first, first + count)]


def held_out_rows() -> list[dict[str, Any]]:
    return preference_rows(16, 40)


def write_rows(where: Path, rows: Sequence[dict[str, Any]]) -> Path:
    where.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return where


def tiny_pairs(folder: Path, *, length: int = SIDE_TOKENS) -> list[PreferencePair]:
    """Read from a file and rendered, as a run's are; some are longer than `length` where that is short."""
    said = preferences.read_preferences(write_rows(folder / "pairs.jsonl", preference_rows()))
    return preferences.render_pairs(said, *tokenizer_and_stops(), length=length, over="truncate")[0]


def held_out_pairs(folder: Path) -> list[PreferencePair]:
    said = preferences.read_preferences(write_rows(folder / "held.jsonl", held_out_rows()))
    return preferences.render_pairs(said, *tokenizer_and_stops(), length=SIDE_TOKENS)[0]


def asked_reference(folder: Path, pairs: Sequence[PreferencePair], model: Transformer) -> StoredReference:
    """The model's log-probabilities, written and read back."""
    batch = pair_rows([[pair] for pair in pairs], 2 * SIDE_TOKENS)
    write_reference(folder / "reference", pair_answers(batch, token_logprobs(model, batch)[0].detach()), weights=WEIGHTS, data=WEIGHTS)
    return open_reference(folder / "reference", pairs, weights=WEIGHTS, data=WEIGHTS)


def parent_model() -> Transformer:
    return tiny_model("llama")


def reference_for(_: Transformer) -> Transformer:
    """Reference model of a policy: its parent."""
    return parent_model()

# ---------------------------------------------------------------- jobs


@functools.cache
def a_preference_preflight(settings: PreferenceSettings | None = None) -> Job:
    """The checks before the first step, on a first batch of two pairs a row."""
    asked = settings or PreferenceSettings()

    def job(folder: Path, plant: Plant) -> list[Verdict]:
        with plant(folder):
            pairs, policy = tiny_pairs(folder), parent_model()
            stored = asked_reference(folder, pairs, reference_for(policy))
            batch, objective = stored.attached(PackedPairs(pairs, 0, 4, 2 * SIDE_TOKENS).batch(0)), preference.preference(asked)
            loss = float(objective(policy, batch).total.detach()) / (batch.divisor or 0.0)
            return [check_pairs(pairs), check_loss_at_reference(loss, asked, None), check_pair_reference(batch, parent_model(), WEIGHTS),
                    *preflight_preference(policy, objective, batch, asked)]
    return job


def pairs_cut(folder: Path, plant: Plant) -> list[Verdict]:
    """Pairs that are longer than the length, cut to it."""
    with plant(folder):
        return [check_pairs(tiny_pairs(folder, length=24))]


def pairs_audited(folder: Path, plant: Plant) -> list[Verdict]:
    """Pairs to learn and pairs held out, as a set."""
    with plant(folder):
        pairs, held_out = tiny_pairs(folder), held_out_pairs(folder)
        return [check_contradictions([pair.preference for pair in pairs], "pair"), check_held_out_prompts(pairs, held_out, "pair")]


def pairs_read(folder: Path, plant: Plant) -> list[Verdict]:
    file = write_rows(folder / "pairs.jsonl", preference_rows())
    with plant(folder):
        return [check_accepted("rows", lambda: preferences.read_preferences(file))]


def a_preference_run(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: some preference steps; then what was learned is asked of other pairs, and the reference of its parent."""
    settings = PreferenceSettings()
    held_out = held_out_pairs(folder)
    with plant(folder):
        pairs, policy = tiny_pairs(folder), parent_model()
        stored = asked_reference(folder, pairs, reference_for(policy))
        losses = [float(step.loss) for step in preference_steps(policy, pairs, stored, settings)]
        sample = answered(stored, pair_rows([[pair] for pair in pairs[:4]], 2 * SIDE_TOKENS), policy)
    (folder / "held").mkdir()
    judged = asked_reference(folder / "held", held_out, parent_model())
    batches = [judged.attached(pair_rows([[pair] for pair in held_out], 2 * SIDE_TOKENS))]
    before, after = (score_pairs(model, batches, settings, rows=len(held_out)) for model in (parent_model(), policy))
    return [check_loss_moves(losses[1:], settings), check_direction(before, after), check_pair_reference(sample, parent_model(), WEIGHTS)]


def a_live_preference_run(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: some steps against a reference in memory; then it is asked for its bits, and the parent for what it says."""
    with plant(folder):
        pairs, policy = tiny_pairs(folder), parent_model()
        live = LiveReference(reference_for(policy).requires_grad_(False), WEIGHTS, 2)
        list(preference_steps(policy, pairs, live, PreferenceSettings()))
        sample = live.attached(pair_rows([[pair] for pair in pairs[:4]], 2 * SIDE_TOKENS))
    return [live.check_unmoved(), check_pair_reference(sample, parent_model(), WEIGHTS)]


def preference_steps(policy: Transformer, pairs: Sequence[PreferencePair], stored: StoredReference | LiveReference,
                     settings: PreferenceSettings) -> Iterator[loop.Step]:
    order = PackedPairs(pairs, 0, PAIRS_A_STEP, 2 * SIDE_TOKENS, epochs=PREFERENCE_STEPS)
    batches = (answered(stored, order.batch(step), policy) for step in range(PREFERENCE_STEPS))
    yield from loop.train(policy, make_optimizer(policy, 1e-3), batches, preference.preference(settings), micro=2)


def answered(stored: StoredReference | LiveReference, batch: Batch, policy: Transformer) -> Batch:
    """The batch with what the reference says of it, whatever the `policy` has become."""
    return stored.attached(batch)

"""No token teaches before it is scored: leaks that are planted are named, and a ledger that was written in another order is refused."""

import copy
from dataclasses import asdict, replace

import numpy as np
import pytest

from assay.guard import ttt_checks as guard
from assay.guard.ttt_checks import causality_cuts, changed_from, check_causality, check_score_order, check_target_unseen, token_costs
from assay.learn import ttt_loop
from assay.learn.ttt_loop import ChunkScored, TttSettings, read_and_adapt
from assay.model.batched_lora import TTT_TARGETS, BatchedAdapters, ttt_sites
from assay.model.lora import fresh
from assay.model.transformer import Transformer
from assay.testing.fault_injection import swap
from assay.testing.tiny_models import tiny_model
from assay.verdict import Outcome

HOW = TttSettings(chunk=10, context=24, steps=1, lr=3e-2)
CHANCE = np.random.default_rng(0)
DOCUMENTS = [[256, *CHANCE.integers(0, 40, length).tolist()] for length in (34, 25)]
CUTS = (14, 21)  # within the second chunk, and at its end


def reading(documents, how=HOW):
    model = tiny_model()
    adapters = BatchedAdapters(fresh(model.config, ttt_sites(model.config, TTT_TARGETS), 4, 1.0, 0, None), len(documents),
                               shared=how.carry_over)
    with adapters.attached(model):
        return token_costs(read_and_adapt(model, documents, how, len(documents), adapters), len(documents))


def judged():
    return check_causality(reading, DOCUMENTS, CUTS, 320)


def test_past_scores_are_the_same_bits_whatever_comes():
    verdict = judged()
    assert verdict.outcome is Outcome.PROVEN
    assert verdict.evidence["compared"] == 13 + 20 + 2 * 25 + 13 + 20 + 2 * 34  # each document is cut, beside the other
    assert verdict.evidence["moved"] == 21 + 14 + 12 + 5


@pytest.mark.parametrize(("chunk", "length", "cuts"), [(10, 31, [6, 16, 21, 26]), (10, 29, [6, 16, 21, 25]), (24, 12, [7]),
                                                       (1, 4, [2, 3]), (10, 2, [])])
def test_every_chunk_is_cut_and_the_last_one_too(chunk: int, length: int, cuts: list[int]):
    assert causality_cuts(chunk, length) == cuts


def test_learning_before_scoring_is_seen_within_the_chunk():
    whole = ttt_loop.score_chunks

    def too_early(model, window, adam, learning):
        ttt_loop.learn_from_chunks(model, window, whole(model, window, adam, [True]), adam, [True] * len(learning))
        return whole(model, window, adam, learning)

    with swap(ttt_loop, "score_chunks", too_early):
        verdict = judged()
    assert verdict.outcome is Outcome.REFUTED
    assert "scored by what had seen the future" in verdict.reason
    assert verdict.evidence["token"] == 11  # the first of the chunk that was cut, and none of the chunk before


def peeking(ahead):
    """Plant a forward pass that sees the token so many places ahead."""
    hidden = Transformer.hidden

    def forward(model, tokens, **given):
        return hidden(model, tokens, **given) + 0.1 * model.embed.weight[tokens.roll(-ahead, 1)]

    return swap(Transformer, "hidden", forward)


def test_a_token_that_is_peeked_at_is_seen():
    with peeking(2):
        verdict = judged()
    assert (verdict.outcome, verdict.evidence["token"]) == (Outcome.REFUTED, 13)
    with peeking(1):  # its own score is the only one that a token's change may move, and it must not come from itself either
        recorded = reading(DOCUMENTS)[0]
    assert check_target_unseen(tiny_model(), reading(DOCUMENTS)[0], DOCUMENTS[0], (1, 5, 10)).outcome is Outcome.PROVEN
    verdict = check_target_unseen(tiny_model(), recorded, DOCUMENTS[0], (1, 5, 10))
    assert verdict.outcome is Outcome.REFUTED
    assert "its score has seen the token itself" in verdict.reason


def test_the_chances_of_all_tokens_in_one_place_sum_to_one_after_steps_too():
    """Only a distribution that was settled before the token was seen does that."""
    every = [[*DOCUMENTS[0][:14], token] for token in range(320)]
    last = np.array([found[-1] for found in reading(every)], dtype=np.float64)
    assert np.exp(-last).sum() == pytest.approx(1, abs=1e-5)
    with peeking(1):
        last = np.array([found[-1] for found in reading(every)], dtype=np.float64)
    assert abs(np.exp(-last).sum() - 1) > 1e-3


def test_one_document_that_reaches_another_is_seen():
    whole = ttt_loop.SlotAdam.step

    def shared(adam, gradient, learning):
        return whole(adam, gradient.mean(0, keepdim=True).expand_as(gradient), learning)

    with swap(ttt_loop.SlotAdam, "step", shared):
        verdict = judged()
    assert (verdict.outcome, verdict.evidence["document"]) == (Outcome.REFUTED, 1)


def carried(documents):
    return reading(documents, replace(HOW, carry_over=True))


def test_documents_that_share_an_adapter_reach_each_other_only_once_they_are_scored():
    verdict = check_causality(carried, DOCUMENTS, CUTS, 320, shared_chunk=HOW.chunk)
    assert verdict.outcome is Outcome.PROVEN
    assert verdict.evidence["compared"] == 13 + 20 + 20 + 25 + 13 + 20 + 20 + 30  # other documents up to the end of the cut's chunk
    verdict = check_causality(carried, DOCUMENTS, CUTS, 320)
    assert (verdict.outcome, verdict.evidence["document"], verdict.evidence["token"]) == (Outcome.REFUTED, 1, 21)


def test_a_shared_adapter_that_learns_one_document_before_it_scores_another_is_seen():
    whole = ttt_loop.score_chunks

    def too_early(model, window, adam, learning):
        ttt_loop.learn_from_chunks(model, window, whole(model, window, adam, [True]), adam, [True] * len(learning))
        return whole(model, window, adam, learning)

    with swap(ttt_loop, "score_chunks", too_early):
        verdict = check_causality(carried, DOCUMENTS, CUTS, 320, shared_chunk=HOW.chunk)
    assert (verdict.outcome, verdict.evidence["token"]) == (Outcome.REFUTED, 11)


def test_a_reading_that_looks_at_nothing_proves_nothing():
    assert check_causality(lambda documents: [np.zeros(34, np.float32), np.zeros(25, np.float32)], DOCUMENTS, CUTS, 320).outcome \
        is Outcome.UNPROVEN


def test_every_token_from_the_cut_on_is_another():
    changed = changed_from(DOCUMENTS[0], 14, 320)
    assert changed[:14] == DOCUMENTS[0][:14]
    assert all(0 <= new < 320 and new != old for new, old in zip(changed[14:], DOCUMENTS[0][14:], strict=True))

# ---------------------------------------------------------------- the ledger of scores


@pytest.fixture(scope="module")
def events():
    return recorded_events(HOW)


def recorded_events(how):
    model = tiny_model()
    adapters = BatchedAdapters(fresh(model.config, ttt_sites(model.config, ("q",)), 2, 1.0, 0, None), 2, shared=how.carry_over)
    found = []
    with adapters.attached(model):
        for seq, event in enumerate(read_and_adapt(model, [*DOCUMENTS, DOCUMENTS[0]], how, 2, adapters)):
            rows = [({k: v for k, v in vars(one).items() if k != "losses"} | {"tokens": len(one.losses)}) if isinstance(one, ChunkScored)
                    else asdict(one) for one in event]
            kind = {"DocumentBegun": "begin", "ChunkScored": "score"}.get(type(event[0]).__name__, "update")
            found.append({"seq": seq, "kind": kind, "rows": rows})
    return found


def ordered(events, warm=False, tokens=(34, 25, 34), carry_over=False):
    return check_score_order(events, tokens, warm=warm, carry_over=carry_over)


def test_what_was_written_in_order_is_proven(events):
    verdict = ordered(events)
    assert verdict.outcome is Outcome.PROVEN
    assert (verdict.evidence["scores"], verdict.evidence["updates"]) == (4 + 3 + 4, 3 + 2 + 3)


def changed(events, line, **facts):
    other = copy.deepcopy(events)
    other[line]["rows"][0] |= facts
    return other


def exchanged(events, one, other):
    moved = copy.deepcopy(events)
    moved[one], moved[other] = moved[other], moved[one]
    return moved


@pytest.mark.parametrize(("damage", "words"), [
    (lambda e: exchanged(e, 1, 2), "a step was taken on chunk 0 before it was scored"),
    (lambda e: changed(e, 3, adapter="0" * 16), "chunk 1 was scored by adapter 0000000000000000 after 1 steps"),
    (lambda e: changed(e, 3, steps=2), "after 2 steps; the one that the chunks before it left is"),
    (lambda e: changed(e, 3, chunk=2), "chunk 2 was scored where chunk 1 was due"),
    (lambda e: changed(e, 0, left=0.5), "left factors of norm 0.5, not 0"),
    (lambda e: e[:-1], "document 2 was scored on 30 tokens of 34"),
    (lambda e: e[1:], "slot 0 had not begun it"),
])
def test_another_order_is_refused_by_its_line(events, damage, words):
    verdict = ordered(damage(events))
    assert verdict.outcome is Outcome.REFUTED
    assert words in verdict.reason


def test_a_document_that_was_not_reset_is_named_unless_it_was_to_start_warm(events):
    later = next(event["seq"] for event in events if event["kind"] == "begin" and event["seq"])
    after = changed(events, later, adapter="f" * 16)
    after[later + 1]["rows"] = [row | ({"adapter": "f" * 16} if row["document"] == 2 else {}) for row in after[later + 1]["rows"]]
    assert "it was not reset" in ordered(after).reason
    assert ordered(after, warm=True).outcome is Outcome.PROVEN


def test_one_adapter_for_all_is_followed_from_document_to_document(events):
    shared = recorded_events(replace(HOW, carry_over=True))
    verdict = ordered(shared, carry_over=True)
    assert verdict.outcome is Outcome.PROVEN
    assert (verdict.evidence["scores"], verdict.evidence["updates"]) == (4 + 3 + 4, 4 + 3 + 3)  # only the last chunk of all teaches nobody
    assert "still there" in ordered(shared).reason
    assert "one step left 2 adapters" in ordered(events, carry_over=True).reason
    later = next(event["seq"] for event in shared if event["kind"] == "begin" and event["seq"])
    assert "it was not carried over" in ordered(changed(shared, later, adapter="f" * 16), carry_over=True).reason
    assert "before it was scored, or twice" in ordered(exchanged(shared, 3, 4), carry_over=True).reason

# ---------------------------------------------------------------- what it did


def test_a_gain_is_shown_only_by_enough_documents():
    alone, sizes = np.linspace(800, 1200, 12), np.full(12, 500.0)
    noise = np.random.default_rng(0).normal(0, 4, 12)
    assert guard.check_ttt_gain(alone - 10 + noise, alone, sizes).outcome is Outcome.PROVEN
    assert guard.check_ttt_gain(alone + 10 + noise, alone, sizes).outcome is Outcome.REFUTED
    assert guard.check_ttt_gain(alone + noise, alone, sizes).outcome is Outcome.UNPROVEN
    assert guard.check_ttt_gain(alone[:4] - 10, alone[:4], sizes[:4]).outcome is Outcome.UNPROVEN  # one of sixteen signs is no evidence


def test_one_document_that_collapsed_is_named_though_the_mean_is_fine():
    alone = np.full(10, 1000.0)
    learned = alone - 50
    learned[7] = 1100
    names = [f"text:{i}" for i in range(10)]
    verdict = guard.check_document_regressions(learned, alone, names, 0.05)
    assert verdict.outcome is Outcome.REFUTED
    assert "1 of 10 documents got worse, text:7 most: 1000 bits became 1100 (+10.00%); allowed is 5.0%" in verdict.reason
    assert guard.check_document_regressions(learned, alone, names, 0.11).outcome is Outcome.PROVEN
    assert "0 of 10 documents got worse;" in guard.check_document_regressions(alone - 1, alone, names, 0.05).reason


def test_kept_factors_that_run_away_or_die_out_are_seen():
    assert guard.check_factor_drift([1.0, 1.1, 1.3], 4).outcome is Outcome.PROVEN
    for norms in ([1.0, 2.0, 4.1], [1.0, 0.5, 0.2], [1.0, float("nan")], [1.0, float("inf")], [1.0, 0.0]):
        assert guard.check_factor_drift(norms, 4).outcome is Outcome.REFUTED
    assert guard.check_factor_drift([], 4).outcome is Outcome.UNPROVEN


def test_a_base_that_moved_is_named():
    assert guard.check_base_unchanged({"a": "1", "b": "2"}, {"a": "1", "b": "2"}).outcome is Outcome.PROVEN
    verdict = guard.check_base_unchanged({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    assert (verdict.outcome, verdict.evidence["changed"]) == (Outcome.REFUTED, ["b"])

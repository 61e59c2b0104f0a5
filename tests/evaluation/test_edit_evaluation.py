"""Verdicts on edits: each on the numbers that must sway it, and on those that must not."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.editing.edit_preflight import check_batching, check_keys
from assay.editing.fact_questions import (
    FactQuestion,
    FactReply,
    QuestionKind,
    answer_surprises,
    ask_questions,
    begins_with,
    fact_questions,
    ngram_entropy,
)
from assay.editing.facts import RefusedFact, make_fact
from assay.editing.memit import EditResult
from assay.editing.moments import tokenized_text
from assay.editing.targets import Target
from assay.evaluation.edit_evaluation import (
    EditedReplies,
    EditGoals,
    at_least,
    check_control,
    check_edits,
    check_retest,
    check_subjects,
    check_update,
    edit_estimates,
    edit_failures,
    perplexity_drift,
    text_surprise,
    update_sizes,
)
from assay.model.patch import Patch
from assay.model.transformer import initialised
from assay.statistics.estimate import proportion
from assay.testing.tiny_models import tiny_config, tiny_tokenizer
from assay.verdict import Outcome

FACTS = [make_fact(str(i), "The home of {} is", f"Ann{i}", "Oran", old="Lund", paraphrases=("She is from",)) for i in range(20)]


def reply(kind: QuestionKind, fact: str, right: bool, said: str | None = None, answer: str = "Oran") -> FactReply:
    said = said or (f" {answer}." if right else " Lund.")
    return FactReply(FactQuestion(kind, fact, "?", answer, "Lund"), 1.0 if right else 3.0, 2.0, said)


def examined(right: int, *, neighbours: int = 20, nll: float = 2.0, uneven: float = 0.0) -> EditedReplies:
    replies = [reply("efficacy", str(i), i < right) for i in range(20)]
    replies += [reply("neighbourhood", str(i), i < neighbours) for i in range(20)]
    rows = np.linspace(-0.01, 0.01, 8) + uneven * (-1.0) ** np.arange(8)
    return EditedReplies(replies, [4.0 + 0.1 * i for i in range(20)], 100 * (nll + rows), np.full(8, 100.0))


def outcomes(before: EditedReplies, after: EditedReplies) -> dict[str, Outcome]:
    return {verdict.check: verdict.outcome for verdict in check_edits(before, after, EditGoals())}


def test_good_edits_are_proven():
    assert set(outcomes(examined(0), examined(20)).values()) == {Outcome.PROVEN}


@pytest.mark.parametrize(("check", "before", "after", "outcome"), [
    ("efficacy", examined(0), examined(12), Outcome.REFUTED),
    ("efficacy", examined(0), examined(18), Outcome.UNPROVEN),  # 0.9 of 20: 0.95 is still possible
    ("generated", examined(0), examined(8), Outcome.REFUTED),
    ("control", examined(7), examined(20), Outcome.REFUTED),
    ("control", examined(2), examined(20), Outcome.PROVEN),
    ("locality", examined(0), examined(20, neighbours=8), Outcome.REFUTED),
    ("locality", examined(0), examined(20, neighbours=18), Outcome.PROVEN),
    ("locality", examined(0), examined(20, neighbours=17), Outcome.UNPROVEN),  # 0.15 less of 20: neither shown nor excluded
    ("perplexity", examined(0), examined(20, nll=2.05), Outcome.REFUTED),
    ("perplexity", examined(0), examined(20, nll=2.015, uneven=0.02), Outcome.UNPROVEN),  # 1.5 %, and an interval beyond 2 %
    ("perplexity", examined(0), examined(20, nll=2.015), Outcome.PROVEN),
])
def test_each_number_sways_its_verdict(check: str, before: EditedReplies, after: EditedReplies, outcome: Outcome):
    assert outcomes(before, after)[check] is outcome


def test_drift_is_of_perplexity_and_paired_by_row():
    found = perplexity_drift(examined(0), examined(0, nll=2.01))
    assert found.mean == pytest.approx(math.expm1(0.01))
    assert found.high - found.low < 1e-9  # rows differ from each other, but not in how much they moved


def test_estimates_have_what_was_asked_and_nothing_else():
    found = edit_estimates(examined(1), examined(20))
    assert str(found["efficacy, generated, before"]) == str(proportion(1, 20))
    assert "portability, generated, after" not in found
    assert found["neighbourhood, says the same as before"].mean == 1.0


def test_portability_is_reported_where_it_was_asked():
    before, after = examined(0), examined(20)
    asked = [FactReply(FactQuestion("portability", str(i), "?", "Oran", None), 1.0, None, " Oran." if i < 5 else " Lund.")
             for i in range(20)]
    found = edit_estimates(replace(before, replies=[*before.replies, *asked]), replace(after, replies=[*after.replies, *asked]))
    assert str(found["portability, generated, after"]) == str(proportion(5, 20))
    assert "portability, likelier, after" not in found  # nothing is known to compete with the answer


def test_a_goal_that_the_interval_includes_is_not_shown():
    assert at_least("x", proportion(19, 20), 0.95).outcome is Outcome.PROVEN
    assert "not shown" in at_least("x", proportion(18, 20), 0.95).reason
    assert at_least("x", proportion(10, 20), 0.95).outcome is Outcome.REFUTED


def test_a_claim_that_the_final_model_does_not_keep_is_refuted():
    final = [reply("efficacy", "0", False), reply("efficacy", "1", True)]
    assert check_retest([reply("efficacy", "1", True)], final).outcome is Outcome.PROVEN
    lost = check_retest([reply("efficacy", "0", True), reply("efficacy", "1", True)], final)
    assert (lost.outcome, lost.evidence["facts"]) == (Outcome.REFUTED, ["0"])


def test_updates_are_judged_by_size_and_by_the_key_they_map():
    before = {"a": torch.eye(4), "b": torch.eye(4)}
    sizes = update_sizes(before, {"a": 1.1 * torch.eye(4), "b": torch.eye(4)})
    assert sizes == pytest.approx({"a": 0.1})
    assert check_update(sizes, [1.0]).outcome is Outcome.PROVEN
    assert check_update({"a": 0.6}).outcome is Outcome.REFUTED
    assert check_update({"a": math.nan}).outcome is Outcome.REFUTED
    assert check_update(sizes, [1.0, 0.98]).outcome is Outcome.REFUTED
    assert check_update({}).outcome is Outcome.REFUTED


def test_a_refused_request_is_never_success():
    assert check_subjects(3, []).outcome is Outcome.PROVEN
    assert check_subjects(3, [RefusedFact("x", "x: not there")]).outcome is Outcome.UNPROVEN


def test_control_reads_what_was_said_and_not_what_was_likelier():
    assert check_control([reply("efficacy", str(i), True, said=" Lund.") for i in range(9)]).outcome is Outcome.PROVEN

# ---------------------------------------------------------------- reasons


def target(probability: float) -> Target:
    return Target(torch.zeros(2), torch.ones(2), probability, 0.1, 25, True)


@pytest.mark.parametrize(("probability", "reached", "said", "words"), [
    (0.2, 0.9, " Lund.", "never reached in the search: probability 0.20 after 25 steps, with δ at its longest"),
    (0.9, 0.3, " Lund.", "lost in the solve: the state went 30% of its way"),
    (0.9, 0.9, " Rome.", "something else is likelier still"),
    (0.9, 0.9, " Quito.", "overwritten: the model says the target of rival"),
])
def test_a_failure_has_the_reason_that_the_evidence_gives(probability: float, reached: float, said: str, words: str):
    facts = [FACTS[0], make_fact("rival", "The home of {} is", "Ann0", "Quito")]
    replies = [reply("efficacy", "0", True, said=said), reply("efficacy", "rival", True, answer="Quito")]
    after = EditedReplies(replies, [], np.array([]), np.array([]))
    found = edit_failures(facts, EditResult(Patch(None), [target(probability)] * 2, {}, [reached] * 2), after)
    assert [one["fact"] for one in found] == ["0"]
    assert words in found[0]["reason"]

# ---------------------------------------------------------------- questions


@pytest.mark.parametrize(("said", "answer", "expected"), [
    (" Oran.", "Oran", True), ("Oran", "Oran", True), (" Orange", "Oran", False), (" in Oran", "Oran", False), (" C++11", "C++", True),
    ("", "Oran", False)])
def test_what_counts_as_said(said: str, answer: str, expected: bool):
    assert begins_with(said, answer) is expected


def test_surprise_is_that_of_a_plain_forward_pass():
    model, tokenizer = initialised(tiny_config(), 3), tiny_tokenizer()
    found = answer_surprises(model, tokenizer, [("a long prompt, and then", "some answer"), ("b", "c"), ("d", None)])
    ids, start = tokenizer.encode("a long prompt, and then some answer"), len(tokenizer.encode("a long prompt, and then"))
    logprobs = model(torch.tensor([ids]))[0].detach().log_softmax(-1)
    due = -logprobs[start - 1 : -1].gather(-1, torch.tensor(ids[start:])[:, None]).mean()
    assert found[0] == pytest.approx(float(due), abs=1e-5)
    assert found[2] is None


def test_text_is_scored_without_its_padding():
    model = initialised(tiny_config(), 3)
    rows = ((5, 6, 7, 8, 9, 10), (1, 2, 3))
    nll, tokens = text_surprise(model, tokenized_text(rows))
    assert tokens.tolist() == [5, 2]
    for row, found in zip(rows, nll, strict=True):
        logprobs = model(torch.tensor([row]))[0, :-1].detach().log_softmax(-1)
        assert found == pytest.approx(-float(logprobs.gather(-1, torch.tensor(row[1:])[:, None]).sum()), abs=1e-4)


def test_a_batch_is_as_good_as_one_alone_and_keys_are_the_weights():
    model, tokenizer = initialised(tiny_config("qwen2"), 0), tiny_tokenizer()
    assert check_batching(model, tokenizer, fact_questions(FACTS[:2]), (258,)).outcome is Outcome.PROVEN
    for family in ("llama", "gpt2", "assay", "mixed"):
        assert check_keys(initialised(tiny_config(family), 0), range(20)).outcome is Outcome.PROVEN


def test_every_question_is_asked():
    asked = fact_questions([replace(FACTS[0], portability=())])
    assert [(one.kind, one.answer, one.other) for one in asked] == [("efficacy", "Oran", "Lund"), ("paraphrase", "Oran", "Lund")]
    replies = ask_questions(initialised(tiny_config(), 0), tiny_tokenizer(), asked, (258,))
    assert all(one.prefers is not None and one.says is False for one in replies)


def test_entropy_is_low_where_text_repeats_itself():
    assert ngram_entropy([1, 2] * 20) < 1.1
    assert ngram_entropy(range(40)) == pytest.approx((math.log2(39) + 2 * math.log2(38)) / 3)
    assert ngram_entropy([]) == 0.0

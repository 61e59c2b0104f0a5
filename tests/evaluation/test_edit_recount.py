"""Recount of edits: what was recorded is believed where it comes out again, and each wrong number is named."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.editing.facts import make_fact
from assay.editing.moments import tokenized_text
from assay.evaluation import edit_recount
from assay.evaluation.edit_evaluation import EditedReplies, edit_estimates, evaluate_edits
from assay.evaluation.edit_recount import check_edit_figures, check_replies
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config, tiny_tokenizer
from assay.verdict import Outcome

FACTS = [make_fact(str(i), "The home of {} is", f"Ann{i}", "Oran", old="Lund", paraphrases=("She is from",)) for i in range(3)]
READING = tokenized_text(((1, 2, 3, 4, 5), (6,), (7, 8, 9), (10, 11)))


@pytest.fixture(scope="module")
def asked():
    model = initialised(tiny_config(), 3)
    tokenizer = tiny_tokenizer()
    return model, tokenizer, evaluate_edits(model, tokenizer, FACTS, READING, ())


def test_what_was_asked_comes_out_again(asked):
    model, tokenizer, found = asked
    verdict = check_replies(model, tokenizer, found, READING, (), "before")
    assert verdict.outcome is Outcome.PROVEN, verdict.reason
    assert check_edit_figures(FACTS, found, found, edit_estimates(found, found)).outcome is Outcome.PROVEN


@pytest.mark.parametrize("wrong", [
    lambda found: replace(found, replies=[replace(one, answer_nll=one.answer_nll + 0.01) for one in found.replies]),
    lambda found: replace(found, replies=[replace(one, other_nll=None) for one in found.replies]),
    lambda found: replace(found, replies=[replace(one, said="Oran!" + one.said) for one in found.replies]),
    lambda found: replace(found, replies=[replace(one, rank=one.rank + 9) for one in found.replies]),
    lambda found: replace(found, text_nll=found.text_nll + 1),
    lambda found: replace(found, fluency=[bits + 0.1 for bits in found.fluency]),
    lambda found: replace(found, text_tokens=found.text_tokens + 1),
    lambda found: replace(found, text_nll=np.append(found.text_nll, 1.0), text_tokens=np.append(found.text_tokens, 1.0))])
def test_a_reply_that_does_not_come_out_again_is_refuted(asked, wrong):
    model, tokenizer, found = asked
    assert check_replies(model, tokenizer, wrong(found), READING, (), "before").outcome is Outcome.REFUTED


@pytest.mark.parametrize(("name", "change"), [
    ("efficacy, likelier, after", {"mean": 0.5, "low": 0.0, "high": 1.0}), ("paraphrase, generated, before", {"n": 1}),
    ("fluency (bits), after", {"mean": 0.1, "low": 0.0, "high": 9.0}), ("perplexity drift", {"mean": 0.1, "high": 0.2}),
    ("perplexity drift", {"n": 2}), ("efficacy, generated, before", None), ("paraphrase, reciprocal rank, after", {"mean": 0.9}),
    ("paraphrase, old answer generated, before", None)])
def test_a_figure_that_the_replies_do_not_give_is_refuted(asked, name, change):
    found: EditedReplies = asked[2]
    estimates = dict(edit_estimates(found, found))
    if change is None:
        del estimates[name]
    else:
        estimates[name] = replace(estimates[name], **change)
    verdict = check_edit_figures(FACTS, found, found, estimates)
    assert verdict.outcome is Outcome.REFUTED
    assert name in verdict.reason


def test_a_question_that_was_not_asked_is_missed(asked):
    found: EditedReplies = asked[2]
    fewer = replace(found, replies=[one for one in found.replies if one.question.kind != "paraphrase"])
    verdict = check_edit_figures(FACTS, fewer, fewer, edit_estimates(fewer, fewer))
    assert verdict.outcome is Outcome.REFUTED
    assert "0 paraphrase questions were asked" in verdict.reason


def test_the_last_character_of_a_reply_may_be_several_tokens(monkeypatch: pytest.MonkeyPatch):
    tokenizer, prompt = tiny_tokenizer(), [5]
    due = tokenizer.encode('"ע')
    assert tokenizer.decode(due[:-1], special=False) == '"\ufffd'
    # A model of which nothing but what comes next is asked.
    monkeypatch.setattr(edit_recount, "_next_logits",
                        lambda _, ids: torch.nn.functional.one_hot(torch.tensor(([*due, 7])[len(ids) - len(prompt)]), 512).float())
    model = initialised(tiny_config("llama"), 0)
    assert edit_recount._greedy(model, tokenizer, prompt, '"ע', ()) is None
    assert edit_recount._greedy(model, tokenizer, prompt, '"\ufffd', ()) is None
    assert edit_recount._greedy(model, tokenizer, prompt, '"x', ()) == '"ע'

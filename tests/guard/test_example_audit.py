"""The audit is silent on clean conversations of every layout, and each fault is refuted by the check that exists for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from assay.data.chat import TrainingExample, render_conversations
from assay.data.layouts import Conversation
from assay.data.packing import PackedExamples
from assay.guard.example_audit import audit_examples, check_batch, conversation_prompts
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.testing.tiny_models import tiny_model, tiny_tokenizer
from assay.verdict import Outcome, Verdict
from assay.zoo.chat_faults import chat_words, plain_words, words_with_bos

CHECKS = ["supervised", "intended", "stop", "bos", "prompt", "pad", "vocabulary", "embeddings", "rendered", "lengths", "duplicates",
          "overlap"]


def talks(count: int = 8, answer: str = "the river {n} is long.") -> list[Conversation]:
    return [Conversation(f"made:{n}:{n:x}", f"made:{n}", (
        {"role": "user", "content": f"n{n}: which of the rivers in the north is the long one?"},
        {"role": "assistant", "content": answer.format(n=n)},
        {"role": "user", "content": f"and the {n}?"}, {"role": "assistant", "content": "it is not."})) for n in range(count)]


def texts(count: int = 8) -> list[Conversation]:
    return [Conversation(f"made:{n}:{n:x}", f"made:{n}", plain=(f"say {n} th" if n % 2 else "", f"e river {n}")) for n in range(count)]


def examples(conversations: Sequence[Conversation], words: Tokenizer, **options: Any) -> list[TrainingExample]:
    return render_conversations(conversations, words, resolve_special_tokens(words, {}, {}), **{"length": 400, **options}).examples


def audited(made: Sequence[TrainingExample], words: Tokenizer, **options: Any) -> dict[str, Verdict]:
    found = audit_examples(made, words, resolve_special_tokens(words, {}, {}),
                           **{"embed": tiny_model().embed.weight, "trainable": (), **options})
    return {verdict.check: verdict for verdict in found}


@pytest.mark.parametrize(("conversations", "words"), [
    (talks(), chat_words()), (talks(), words_with_bos()), (texts(), plain_words()), (texts(), words_with_bos()), (texts(), chat_words())])
@pytest.mark.parametrize("options", [{}, {"roles": ("user", "assistant")}, {"over": "truncate", "length": 106}, {"turns": "apart"}])
def test_clean_conversations_are_proven(conversations: list[Conversation], words: Tokenizer, options: dict[str, Any]):
    made = examples(conversations, words, **options)
    assert made
    verdicts = audited(made[1:], words, held_out=made[:1] if "turns" not in options else made[:0])
    assert list(verdicts) == CHECKS
    refused = [str(v) for v in verdicts.values() if v.outcome is not Outcome.PROVEN and v.check != "overlap"]
    assert not refused
    assert verdicts["overlap"].outcome is not Outcome.REFUTED


Change = Callable[[TrainingExample], TrainingExample]


def nothing_left(example: TrainingExample) -> TrainingExample:
    return replace(example, weight=np.zeros(len(example)))


def everything(example: TrainingExample) -> TrainingExample:
    return replace(example, weight=np.arange(len(example)) > 0)


def shifted_late(example: TrainingExample) -> TrainingExample:
    return replace(example, weight=np.append(0, example.weight[:-1]))


def shifted_early(example: TrainingExample) -> TrainingExample:
    return replace(example, weight=np.append(example.weight[1:], 0), prompt=example.prompt - 1)


def no_end(example: TrainingExample) -> TrainingExample:
    return replace(example, tokens=example.tokens[:-1], weight=example.weight[:-1],
                   intended=(*example.intended[:-1], example.intended[-1].removesuffix("<|im_end|>")))


def end_masked(example: TrainingExample) -> TrainingExample:
    return replace(example, weight=np.append(example.weight[:-1], 0),
                   intended=(*example.intended[:-1], example.intended[-1].removesuffix("<|im_end|>")))


def another_answer(example: TrainingExample) -> TrainingExample:
    tokens = example.tokens.copy()
    tokens[-3] = ord("X")
    return replace(example, tokens=tokens)


def another_prompt(example: TrainingExample) -> TrainingExample:
    tokens = example.tokens.copy()
    tokens[example.prompt - 3] += 1
    return replace(example, tokens=tokens)


def padding_taught(example: TrainingExample) -> TrainingExample:
    return replace(example, tokens=np.append(example.tokens, 256), weight=np.append(example.weight, 1))


def beyond(example: TrainingExample) -> TrainingExample:
    return replace(example, tokens=np.append(example.tokens, 400), weight=np.append(example.weight, 0))


def without_token(example: TrainingExample) -> TrainingExample:
    return replace(example, tokens=np.append(example.tokens, 319), weight=np.append(example.weight, 0))


def heavy(example: TrainingExample) -> TrainingExample:
    return replace(example, weight=np.where(example.weight > 0, np.nan, 0))


@pytest.mark.parametrize(("change", "check"), [
    (nothing_left, "supervised"), (everything, "supervised"), (heavy, "supervised"), (shifted_late, "intended"),
    (shifted_early, "intended"), (another_answer, "intended"), (no_end, "stop"), (end_masked, "stop"), (another_prompt, "prompt"),
    (another_prompt, "rendered"), (padding_taught, "pad"), (beyond, "vocabulary"), (without_token, "vocabulary")])
def test_one_faulty_example_among_clean_ones_is_found(change: Change, check: str):
    made = examples(talks(), chat_words())
    verdict = audited([*made[:5], change(made[5]), *made[6:]], chat_words())[check]
    assert verdict.outcome is Outcome.REFUTED
    if check not in ("vocabulary", "pad", "supervised") or change is nothing_left:
        assert "made:5:5" in verdict.reason


def with_bos_twice(example: TrainingExample) -> TrainingExample:
    return replace(example, tokens=np.append(256, example.tokens), weight=np.append(0, example.weight), prompt=example.prompt + 1)


def with_bos_later(example: TrainingExample) -> TrainingExample:
    return replace(example, tokens=np.append(example.tokens, 256), weight=np.append(example.weight, 0))


def without_bos(example: TrainingExample) -> TrainingExample:
    return replace(example, tokens=example.tokens[1:], weight=example.weight[1:], prompt=example.prompt - 1)


@pytest.mark.parametrize(("change", "words"), [
    (with_bos_twice, "begin with '<|endoftext|>' twice"), (with_bos_later, "after their beginning"),
    (without_bos, "begin without '<|endoftext|>'")])
def test_bos_stands_once_and_first(change: Change, words: str):
    made = examples(talks(), words_with_bos())
    verdict = audited([*made[:5], change(made[5]), *made[6:]], words_with_bos())["bos"]
    assert verdict.outcome is Outcome.REFUTED
    assert words in verdict.reason


def test_a_stop_token_spelled_out_in_an_answer_is_found():
    verdict = audited(examples(talks(answer="the <|im_end|> {n}."), chat_words()), chat_words())["stop"]
    assert verdict.outcome is Outcome.REFUTED
    assert "before their end" in verdict.reason


def test_the_end_of_a_turn_must_stop_generation():
    words = chat_words()
    other = Tokenizer(words.document, {**words.settings, "eos_token": "<|endoftext|>"}, words.templates)
    verdict = audited(examples(talks(), other), other)["stop"]
    assert verdict.outcome is Outcome.REFUTED
    assert "which stops nothing" in verdict.reason


def test_cut_completions_are_said_and_refused_where_none_ends():
    made = examples(talks(), chat_words(), over="truncate", length=106)
    assert all(example.cut for example in made)
    verdict = audited(made, chat_words())["stop"]
    assert verdict.outcome is Outcome.PROVEN
    assert verdict.evidence["cut"] == len(made)
    first = [replace(e, tokens=e.tokens[: e.prompt + 5], weight=e.weight[: e.prompt + 5], intended=e.intended[:1]) for e in made]
    assert audited(first, chat_words())["stop"].outcome is Outcome.REFUTED
    assert audited(first, chat_words())["intended"].outcome is Outcome.PROVEN


def test_an_empty_row_of_the_embedding_must_learn():
    made, embed = examples(talks(), chat_words()), tiny_model().embed.weight.detach().clone()
    embed[257] = 0
    assert audited(made, chat_words(), embed=embed)["embeddings"].outcome is Outcome.REFUTED
    assert "'<|im_start|>'" in audited(made, chat_words(), embed=embed)["embeddings"].reason
    assert audited(made, chat_words(), embed=embed, trainable={257})["embeddings"].outcome is Outcome.PROVEN
    assert audited(made, chat_words(), embed=embed, trainable="all")["embeddings"].outcome is Outcome.PROVEN
    embed[257] = torch.nan
    assert audited(made, chat_words(), embed=embed, trainable="all")["embeddings"].outcome is Outcome.REFUTED
    assert audited(made, chat_words(), embed=None)["embeddings"].outcome is Outcome.UNPROVEN


def test_copies_and_overlaps_are_found():
    made = examples(talks(), chat_words())
    assert audited([*made, made[0]], chat_words())["duplicates"].evidence["copies"] == 1
    assert audited([*made, *made], chat_words())["duplicates"].outcome is Outcome.REFUTED
    assert audited(made[1:], chat_words(), held_out=made[:1])["overlap"].outcome is Outcome.PROVEN
    assert audited(made, chat_words(), held_out=made[:1])["overlap"].outcome is Outcome.REFUTED
    renamed = replace(made[0], id="other:1:ffff")  # the same words under another name
    assert audited(made, chat_words(), held_out=[renamed])["overlap"].outcome is Outcome.REFUTED
    assert audited(made, chat_words(), evaluation=["Which of these mountains is the high one?"])["overlap"].outcome is Outcome.PROVEN
    same = conversation_prompts([replace(talks()[0], messages=talks()[3].messages[:1])])
    assert audited(made, chat_words(), evaluation=same)["overlap"].outcome is Outcome.REFUTED


def test_no_examples_are_refused():
    assert audit_examples([], chat_words(), resolve_special_tokens(chat_words(), {}, {}))[0].outcome is Outcome.REFUTED


def test_a_batch_holds_what_was_audited():
    made = examples(talks(), chat_words())
    by_id = {example.id: example for example in made}
    batch = PackedExamples(made, 0, 2, 300).batch(0)
    assert check_batch(batch, by_id).outcome is Outcome.PROVEN
    masked = replace(batch, weight=batch.weight * (batch.tokens != tiny_tokenizer().eos))
    assert check_batch(masked, by_id).outcome is Outcome.REFUTED
    tokens = batch.tokens.clone()
    tokens[1, 5] += 1
    assert check_batch(replace(batch, tokens=tokens), by_id).outcome is Outcome.REFUTED
    assert check_batch(batch, {}).outcome is Outcome.REFUTED

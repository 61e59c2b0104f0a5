"""The last token of a subject: found by offsets, checked by decoding, refused where a token reaches beyond it."""

import copy

import pytest

from assay.editing.contexts import Contexts
from assay.editing.facts import make_fact
from assay.editing.subject_tokens import answer_ids, encode_prompt, leading_special_ids, locate_subject, placeable_facts
from assay.errors import DataError
from assay.model.tokenizer import Tokenizer
from assay.testing.tiny_facts import facts_tokenizer


def merged(*tokens: str, bos: bool = False) -> Tokenizer:
    """The tokenizer of the tiny world with more merges, and on request with a token before every text."""
    document = copy.deepcopy(facts_tokenizer().document)
    for token in tokens:
        for end in range(2, len(token) + 1):
            if token[:end] not in document["model"]["vocab"]:
                document["model"]["vocab"][token[:end]] = len(document["model"]["vocab"])
                document["model"]["merges"].append([token[: end - 1], token[end - 1]])
    if bos:
        special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}
        single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        document["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    return Tokenizer.from_parts(document, None, eos_token="<|endoftext|>")


@pytest.mark.parametrize(("prompt", "subject"), [
    ("The home of Borin is", "Borin"),  # one token, with its space
    ("The home of Tamsin Rook is", "Tamsin Rook"),  # two
    ("Borin lives in", "Borin"),  # at the beginning, where it is single letters
    ("The home of Zoë is", "Zoë"),  # ends in the second byte of a character
    ("The home of 東京 is", "東京"),
    ("Osk, Osk and Osk live in", "Osk"),  # the last of three
    ("'Osk' lives in", "Osk"),
    ("The home of Osk", "Osk"),  # the prompt's own end
])
def test_the_span_decodes_to_the_subject(prompt: str, subject: str):
    tokenizer = facts_tokenizer()
    fact = make_fact("x", prompt, subject, "Oran")
    span = locate_subject(tokenizer, fact.prompt, fact.start, fact.subject, "x")
    assert tokenizer.decode(span.ids[span.first : span.last + 1]).lstrip() == subject
    assert tokenizer.decode(span.ids[: span.last + 1]) == prompt[: fact.start + len(subject)]
    assert tokenizer.decode(span.ids) == prompt


def test_a_token_that_reaches_beyond_the_subject_is_refused_by_name():
    tokenizer = merged("Inc", ".,")
    fact = make_fact("case 2864", "tronc Inc., founded in", "tronc Inc.", "Oran")
    with pytest.raises(DataError, match=r"case 2864: .*'tronc Inc\.,'"):
        locate_subject(tokenizer, fact.prompt, fact.start, fact.subject, fact.name)
    kept, refused = placeable_facts(tokenizer, [make_fact("good", "The home of Osk is", "Osk", "Oran"), fact])
    assert ([one.name for one in kept], [one.name for one in refused]) == (["good"], ["case 2864"])


def test_a_template_may_not_cut_a_word():
    fact = make_fact("x", "The home of {}in is", "Bor", "Oran")
    with pytest.raises(DataError, match="decode to 'Borin', not to 'Bor'"):
        locate_subject(facts_tokenizer(), fact.prompt, fact.start, fact.subject, fact.name)


def test_tokens_before_the_text_shift_the_place():
    plain, dressed = facts_tokenizer(), merged(bos=True)
    assert (leading_special_ids(plain), leading_special_ids(dressed)) == ((), (256,))
    one, other = (locate_subject(tokenizer, "The home of Osk is", 12, "Osk", "x") for tokenizer in (plain, dressed))
    assert other.ids == (256, *one.ids)
    assert (other.first, other.last) == (one.first + 1, one.last + 1)
    assert encode_prompt(dressed, "The home") == (256, *plain.encode("The home"))


def test_the_place_is_right_after_every_prefix():
    tokenizer, fact, prefixes = facts_tokenizer(), make_fact("x", "{} lives in", "Borin", "Oran"), ("", "They say Osk. ", "Borin\n")
    for prefix, span in zip(prefixes, Contexts(prefixes).spans(tokenizer, fact), strict=True):
        assert tokenizer.decode(span.ids[: span.last + 1]) == f"{prefix}Borin"


def test_an_answer_brings_its_space():
    tokenizer = facts_tokenizer()
    assert answer_ids(tokenizer, "Oran") == tuple(tokenizer.encode(" Oran"))
    assert answer_ids(tokenizer, "東京") == tuple(tokenizer.encode("東京"))
    assert tokenizer.decode([*encode_prompt(tokenizer, "The home of Osk is"), *answer_ids(tokenizer, "Oran")]) == "The home of Osk is Oran"

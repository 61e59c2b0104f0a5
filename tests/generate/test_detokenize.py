"""Text that has been shown is never taken back, and a stop string ends it wherever it begins."""

import random

import pytest

from assay.generate.detokenize import Detokenizer
from assay.testing.tiny_models import tiny_tokenizer

TEXT = "the café is singing — 日本 and the end. The tail"


def fed(text, stops, sizes):
    """(what was shown, ids that counted or None), the ids fed in pieces of these sizes."""
    tokenizer = tiny_tokenizer()
    ids, words, shown, start = tokenizer.encode(text), Detokenizer(tokenizer, stops), "", 0
    for size in sizes:
        piece = ids[start : start + size]
        if not piece:
            break
        count = words.feed(piece)
        if count is not None:
            return shown + words.finish(True), start + count
        shown += words.take()
        start += size
    return shown + words.finish(False), None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("stops", "kept"), [((), TEXT), (("nowhere",), TEXT), (("the end",), "the café is singing — 日本 and "),
                                             (("end", "and the e"), "the café is singing — 日本 "), (("本",), "the café is singing — 日"),
                                             (("the",), ""), (("tail!", "tai"), TEXT[:-4])])
def test_any_cut_into_pieces_gives_the_same_text(stops, kept, seed):
    sizes = [random.Random(seed).randint(1, 1 + seed * 2) for _ in range(200)]
    shown, count = fed(TEXT, stops, sizes)
    assert shown == kept
    if kept == TEXT:
        assert count is None
    else:  # the fewest ids whose text holds a stop string
        ids, tokenizer = tiny_tokenizer().encode(TEXT), tiny_tokenizer()
        assert any(stop in tokenizer.decode(ids[:count]) for stop in stops)
        assert not any(stop in tokenizer.decode(ids[: count - 1]) for stop in stops)


def test_the_start_of_a_stop_string_is_held_back():
    words = Detokenizer(tiny_tokenizer(), ("END",))
    words.feed(tiny_tokenizer().encode("a bE"))
    assert words.take() == "a b"
    words.feed(tiny_tokenizer().encode("N"))
    assert words.take() == ""
    words.feed(tiny_tokenizer().encode("x"))
    assert words.take() == "ENx"


def test_half_a_character_is_not_shown_and_not_lost():
    tokenizer = tiny_tokenizer()
    first, *rest = tokenizer.encode("日")
    words = Detokenizer(tokenizer, ())
    words.feed([first])
    assert words.take() == ""
    words.feed(rest)
    assert words.take() == "日"
    words.feed([first])
    assert words.take() == ""
    assert words.finish(False) == "\ufffd"


def test_half_a_character_is_not_the_stop_string_that_looks_like_it():
    tokenizer = tiny_tokenizer()
    first, *rest = tokenizer.encode("日")
    words = Detokenizer(tokenizer, ("\ufffd",))
    assert words.feed([first]) is None
    assert words.feed(rest) is None
    assert words.finish(False) == "日"

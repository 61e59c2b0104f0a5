"""Detectors: silent on every healthy text, and every degenerate one is caught by its own cause."""

import numpy as np
import pytest

from assay.health.degenerate import Expected, distinct_share, malformed, periodic_tail, same_everywhere, word_soup

from .texts import DEGENERATE, HEALTHY, PARAGRAPH


@pytest.mark.parametrize("name", HEALTHY)
def test_no_false_alarm(name):
    text, expected = HEALTHY[name]
    ended = "stop" if expected.ends else "length"
    assert malformed(text, ended=ended, expected=expected) is None
    assert malformed(text + "\n", ended=ended, expected=expected, tokens=list(text.encode())) is None


@pytest.mark.parametrize("name", DEGENERATE)
def test_every_degenerate_text_is_caught_by_its_cause(name):
    text, ended, expected, cause = DEGENERATE[name]
    found = malformed(text, ended=ended, expected=expected)
    assert found is not None
    assert found.cause == cause
    assert found.evidence


def test_the_same_text_is_no_fault_where_it_is_asked_for():
    text, ended, _, _ = DEGENERATE["code"]
    assert malformed(text, ended=ended, expected=Expected(code=True)) is None
    text, ended, _, _ = DEGENERATE["arithmetic"]
    assert malformed(text, ended=ended, expected=Expected(numbers=True)) is None
    assert malformed(PARAGRAPH, ended="length", expected=Expected(ends=False)) is None


def test_loops_of_tokens_are_seen_without_words():
    tokens = [5, 9, 2] + [7, 8, 3, 4] * 12
    found = malformed("ﬁ" * 3, ended="length", expected=Expected(ends=False), tokens=tokens)
    assert found is not None
    assert found.cause == "repetition"


def test_a_tail_is_measured_from_its_end():
    assert periodic_tail(list("abcabcabc" * 2)) == (3, 6)
    assert periodic_tail(list("xyz") + ["a"] * 9) == (1, 9)
    assert periodic_tail(["a"] * 9 + ["b"]) is None
    assert periodic_tail([]) is None
    assert distinct_share(["a", "b", "c", "d", "a", "b", "c", "d"]) == 0.8


def test_healthy_texts_cut_anywhere_raise_no_loop():
    for text, expected in HEALTHY.values():
        for end in range(1, len(text), 7):
            found = malformed(text[:end], ended="length", expected=Expected(expected.script, True, True, True, (), False))
            assert found is None or found.cause == "empty", (text[:end], found)


def test_word_soup_is_a_matter_of_likelihood():
    usual = list(np.random.default_rng(0).normal(1.6, 0.3, 40))
    assert all(word_soup(surprise, usual) is None for surprise in usual)
    assert word_soup(7.5, usual) is not None
    assert word_soup(float("nan"), usual) is not None
    assert word_soup(9.0, []) is None


def test_one_answer_to_everything_is_domain_collapse():
    same = {f"p{i}": f"There are {i + 2} apples in the box, so the answer is {i + 2} apples." for i in range(5)}
    found = same_everywhere(same | {"own": PARAGRAPH})
    assert set(found) == set(same)
    assert {one.cause for one in found.values()} == {"same everywhere"}
    assert same_everywhere({name: text for name, (text, _) in HEALTHY.items() if name not in ("long", "cap allowed")}) == {}
    assert same_everywhere({"a": "Yes", "b": "Yes", "c": "Yes"}) == {}

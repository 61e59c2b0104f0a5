"""Overlap between held-out and training text: found when planted, silent when not."""

import random
from pathlib import Path

import numpy as np
import pytest

from assay.data.near_duplicates import document_prints, find_duplicates
from assay.data.overlap import GRAM_WORDS, HeldOutText, OverlapLookup, measure_overlap, ngram_hashes, word_hashes, words_fingerprint
from tests.data.conftest import SYLLABLES


def plain_text(seed: int) -> bytes:
    """200 words of ASCII letters, so that words can be counted by hand."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices(SYLLABLES, k=3)) for _ in range(200)).encode()


TRAIN = [plain_text(seed) for seed in range(50)]
HELD = [(f"held#{seed}", plain_text(1000 + seed)) for seed in range(10)]


def test_other_text_shares_nothing(tmp_path: Path) -> None:
    found = measure_overlap(TRAIN, HELD, tmp_path)
    assert (found.exact, found.shared, found.share, found.worst) == (0, 0, 0.0, ())
    assert found.documents == 10
    assert found.grams == 10 * (200 - GRAM_WORDS + 1)


def test_a_copy_is_exact_whatever_its_case_spacing_and_signs(tmp_path: Path) -> None:
    loud = b"(" + HELD[3][1].upper().replace(b" ", b",\n\t ") + b"!)"
    found = measure_overlap([*TRAIN, loud], HELD, tmp_path)
    assert found.exact == 1
    assert found.worst[0] == ("held#3", 1.0, True)
    assert found.share == pytest.approx(0.1)


def test_part_of_a_document_is_measured_by_its_13_grams(tmp_path: Path) -> None:
    """Half of one document, in the middle of another: the share of its runs of 13 words, counted by hand."""
    half = b" ".join(HELD[5][1].split()[:100])
    found = measure_overlap([*TRAIN, b"before it " + half + b" after it"], HELD, tmp_path)
    expected = 100 - GRAM_WORDS + 1
    assert found.exact == 0
    assert found.shared == expected
    assert found.worst == (("held#5", expected / (200 - GRAM_WORDS + 1), False),)


def test_twelve_words_in_common_are_not_thirteen(tmp_path: Path) -> None:
    own = HELD[0][1].split()
    assert measure_overlap([b" ".join(own[:12])], HELD, tmp_path).shared == 0
    assert measure_overlap([b" ".join(own[:13])], HELD, tmp_path).shared == 1


def test_words_are_the_same_wherever_they_stand() -> None:
    text = "the Quick brown—fox, 42 jumps café".encode()
    assert word_hashes(b"  ... " + text + b"!")[:6].tolist() == word_hashes(text)[:6].tolist()
    assert len(set(word_hashes(text).tolist())) == 7
    assert len(word_hashes("我爱北京".encode())) == 4
    assert word_hashes("北京".encode())[0] == word_hashes("a 北京".encode())[1]
    assert len(word_hashes(b"")) == len(word_hashes(b" ... ")) == len(ngram_hashes(word_hashes(b"a b"))) == 0


@pytest.mark.parametrize(("one", "other"), [
    ("Café Łódź Å", "Cafe\u0301 Ło\u0301dz\u0301 A\u030a"),  # an accent as a code point of its own
    ("ÉTÉ Straße ÑANDÚ", "été straße ñandú"), ("the ﬁnal oﬃce", "the final office"), ("Ｔｅｓｔ １２", "test 12"),
    ("“Well—yes… ‘no’,” he said", "\"Well - yes... 'no',\" he said"), ("co\u00adop\u200berate \u202anow\u202c", "cooperate now"),
    ("10\u00a0000 «deux»", "10 000 'deux'"), ("我爱，北京。", "我爱北京"), ("ﾊﾟﾝ", "パン")])
def test_one_text_in_two_spellings_is_one(one: str, other: str, tmp_path: Path) -> None:
    assert word_hashes(one.encode()).tolist() == word_hashes(other.encode()).tolist()
    held = " ".join(f"{one} {number}" for number in range(20)).encode()
    train = " ".join(f"{other} {number}" for number in range(20)).encode()
    found = measure_overlap([train], [("held", held)], tmp_path)
    assert (found.exact, found.shared) == (1, found.grams)
    prints = document_prints([held, train])
    assert find_duplicates(prints, 0.8).near == 1
    assert find_duplicates(prints, None).exact == 0, "their bytes differ"


@pytest.mark.parametrize(("one", "other"), [("résumé", "resume"), ("naïve", "naive"), ("αβγ", "αβδ"), ("北京", "东京"), ("и", "й")])
def test_other_words_stay_others(one: str, other: str) -> None:
    assert word_hashes(one.encode()).tolist() != word_hashes(other.encode()).tolist()


def test_documents_without_words_are_told_apart_by_their_bytes() -> None:
    assert words_fingerprint(word_hashes(b"!!!"), b"!!!") != words_fingerprint(word_hashes(b"???"), b"???")
    assert words_fingerprint(word_hashes(b"a b"), b"a b") == words_fingerprint(word_hashes(b"A, b."), b"A, b.")


def test_a_sample_measures_the_same_share_in_bounded_memory(tmp_path: Path) -> None:
    held = HeldOutText(capacity=1000)
    for name, raw in HELD:
        held.add(name, raw)
    assert 600 < held.kept <= 1000
    assert held.kept / (10 * (200 - GRAM_WORDS + 1)) == pytest.approx((held.limit + 1) / 2**64, rel=0.25)
    found = measure_overlap(TRAIN + [raw for _, raw in HELD[:4]], HELD, tmp_path)
    held.save(tmp_path)
    for raw in TRAIN + [raw for _, raw in HELD[:4]]:
        held.note(*OverlapLookup(tmp_path).hits(raw)[:2])
    sampled = held.overlap()
    assert sampled.exact == found.exact == 4
    assert sampled.shared / sampled.grams == pytest.approx(found.shared / found.grams, abs=0.06)
    assert sampled.sampled == 0.5


def test_hits_noted_often_are_counted_once() -> None:
    held = HeldOutText(capacity=300)
    held.add("a", HELD[0][1])
    grams = np.unique(held.grams[0])
    for _ in range(10):
        held.note(grams, np.asarray(held.prints, np.uint64))
    found = held.overlap()
    assert (found.shared, found.exact) == (len(grams), 1)
    assert sum(map(len, held.hit_grams)) <= 300 + len(grams)

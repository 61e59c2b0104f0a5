"""Degenerate texts by cause: repetition, garbling, wrong script, … Pure functions of a text and of how it ended.

    >>> malformed("I see. I see. I see. I see. I see. I see. I see.", ended="length").cause
    'repetition'

Every threshold depends on the length of the text: two equal lines are a refrain, forty are a loop. What only a likelihood can
tell, words in no order, is `word_soup`.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Cause = Literal["empty", "repetition", "garbled", "word soup", "wrong script", "code for prose", "numbers for prose", "missing tags", "cap",
                "same everywhere"]

# (longest period in words, copies that make a loop): a short phrase may be said more often than a long one
_COPIES = ((1, 9), (4, 6), (20, 4), (400, 3))
FEWEST_LOOPED = 9  # words that a loop covers
LETTERS_IN_A_LOOP = 60  # characters of one word that repeats within itself
# (from so many words on, least share of different 4-word runs)
VARIETY = ((40, 0.15), (80, 0.25), (200, 0.30), (600, 0.33))
COUNTED = 12  # copies of a phrase that differ in numbers alone, in a text that never ended
SOUP_NATS, SOUP_SPREADS = 2.0, 4.0  # above the reference's own texts, per token
SIMILAR, SIMILAR_WORDS = 0.6, 8
CODE_LINE = re.compile(
    r"^\s*(def |class |import |from \w+ import|return\b|#include|public |private |const |let |var |function |SELECT |for \(|while \(|if \("
    r"|elif |print\(|using )|[;{]\s*$|^\s*[})\]]+[;,]?\s*$|^\s*\w+(\.\w+)* = .*[()\[\]]")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
OPERATOR = re.compile(r"(?<=\d)\s+[-+*/=×÷]\s+(?=\d)")
RULE = re.compile(r"[-=_*.|+#~\s:0]*")  # what separators, table rules and padding are made of


@dataclass(frozen=True)
class Expected:
    """Form that a prompt asks for. `tags` must all be there; `ends` is False where nothing taught the model to stop."""

    script: str = "LATIN"  # "": any
    code: bool = False
    numbers: bool = False
    short: bool = False  # many prompts may have this same answer
    tags: tuple[str, ...] = ()
    ends: bool = True


PROSE = Expected()


@dataclass(frozen=True)
class Malformed:
    cause: Cause
    evidence: str


def malformed(text: str, *, ended: str, expected: Expected = PROSE, tokens: Sequence[int] = ()) -> Malformed | None:
    """The first cause that is found, the gravest first; None for a text with nothing wrong that can be seen from itself."""
    return (_empty(text, expected) or repetition(text, ended=ended, tokens=tokens) or _garbled(text) or _wrong_script(text, expected)
            or _missing_tags(text, expected) or _code(text, expected) or _numbers(text, expected) or _cap(text, ended, expected))


def repetition(text: str, *, ended: str = "stop", tokens: Sequence[int] = ()) -> Malformed | None:
    """A tail that goes round, a text of too few different phrases, or a count that never ends."""
    words = text.split()
    for units in (words, tokens):
        if (found := periodic_tail(units)) is not None and not _harmless(text, words):
            shown = " ".join(words[-found[0]:]) if units is words else f"{found[0]} tokens"
            return Malformed("repetition", f"{found[1]} times in a row to the end: {shown[:60]!r}")
    if (inside := _letters_in_a_loop(text)) is not None:
        return inside
    limit = max((share for least, share in VARIETY if len(words) >= least), default=None)
    if limit is not None and (variety := distinct_share(words)) < limit and not RULE.fullmatch(text):
        return Malformed("repetition", f"only {variety:.0%} of its {len(words)} runs of 4 words are different, expected {limit:.0%}")
    return _counting(words) if ended == "length" else None


def periodic_tail(units: Sequence[object]) -> tuple[int, int] | None:
    """(period, copies) of the tail that repeats itself most often, if often enough for its period. A last copy may be cut off."""
    code: dict[object, int] = {}
    numbers = np.array([code.setdefault(unit, len(code)) for unit in units], dtype=np.int64)
    n = numbers.size
    for period in range(1, min(n // 3, _COPIES[-1][0]) + 1):
        equal = numbers[period:][::-1] == numbers[:-period][::-1]
        run = int(equal.argmin()) if not equal.all() else equal.size
        copies = (run + period) // period
        enough = next(least for longest, least in _COPIES if period <= longest)
        if copies >= enough and run + period >= FEWEST_LOOPED:
            return period, copies
    return None


def distinct_share(words: Sequence[str], run: int = 4) -> float:
    """The share of runs of so many words that are not said again."""
    runs = [tuple(words[i : i + run]) for i in range(len(words) - run + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def word_soup(surprise: float, usual: Sequence[float]) -> Malformed | None:
    """`surprise`: nats per token of the text under a reference model; `usual`: those of texts that are in order, such as its own."""
    if not usual:
        return None
    middle, spread = float(np.mean(usual)), float(np.std(usual))
    limit = middle + max(SOUP_NATS, SOUP_SPREADS * spread)
    if not surprise <= limit:
        return Malformed("word soup", f"{surprise:.1f} nats a token under the reference, texts in order {middle:.1f}; limit {limit:.1f}")
    return None


def same_everywhere(texts: Mapping[str, str]) -> dict[str, Malformed]:
    """Prompt → cause, where the text is nearly that of two other prompts or more: whatever is asked, the same is said."""
    shingles = {prompt: _shingles(text) for prompt, text in texts.items()}
    alike: Counter[str] = Counter()
    names = [name for name, own in shingles.items() if own]
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            a, b = shingles[one], shingles[other]
            if len(a & b) >= SIMILAR * len(a | b):
                alike.update((one, other))
    return {name: Malformed("same everywhere", f"nearly the same text answers {count} other prompts: {texts[name][:60]!r}")
            for name, count in alike.items() if count >= 2}

# ---------------------------------------------------------------- one cause each


def _empty(text: str, expected: Expected) -> Malformed | None:
    left = text
    for tag in expected.tags:
        left = left.replace(tag, "")
    return None if any(not c.isspace() for c in left) else Malformed("empty", "nothing was said")


def _harmless(text: str, words: Sequence[str]) -> bool:
    """Rules, padding and the zeros of a matrix repeat for a good reason, as far as a page goes."""
    return len(words) <= 200 and RULE.fullmatch(text.rstrip()[-12:]) is not None


def _counting(words: Sequence[str]) -> Malformed | None:
    """The same phrase with other numbers, in a text that did not end; rows of a table are no phrase."""
    found = periodic_tail([_NUMBER.sub("0", word) for word in words])
    if found is None or found[1] < COUNTED or sum(word.isalpha() for word in words[-found[0]:]) < 3:
        return None
    return Malformed("repetition", f"counts without end: {found[1]} times {' '.join(words[-found[0]:])[:60]!r} but for its numbers")


def _letters_in_a_loop(text: str) -> Malformed | None:
    """One long word, or text without spaces, that goes round in itself."""
    for period in range(1, 13):
        tail, run = text.rstrip(), 0
        while run + period < len(tail) and tail[-1 - run] == tail[-1 - run - period]:
            run += 1
        unit = tail[-period:]
        if run + period >= LETTERS_IN_A_LOOP and not any(c.isspace() for c in unit) and not RULE.fullmatch(unit):
            return Malformed("repetition", f"{(run + period) // period} times in a row to the end: {unit!r}")
    return None


def _garbled(text: str) -> Malformed | None:
    """Bytes that make no character, or characters that make no word."""
    broken = text.count("\ufffd")
    if broken >= 3 and broken > 0.01 * len(text):
        return Malformed("garbled", f"{broken} characters of {len(text)} could not be decoded")
    odd = sum(unicodedata.category(c) in ("Cc", "Co", "Cn") and c not in "\n\t\r" for c in text)
    if odd >= 3 and odd > 0.02 * len(text):
        return Malformed("garbled", f"{odd} characters of {len(text)} are control characters or not assigned")
    return None


def _wrong_script(text: str, expected: Expected) -> Malformed | None:
    letters = [c for c in text if c.isalpha()]
    if not expected.script or len(letters) < 8:
        return None
    scripts = Counter(map(_script, letters))
    share = scripts[expected.script] / len(letters)
    if share < 0.5:
        most = scripts.most_common(1)[0][0]
        return Malformed("wrong script", f"{share:.0%} of its letters are {expected.script.lower()}, most are {most.lower()}")
    return None


def _missing_tags(text: str, expected: Expected) -> Malformed | None:
    missing = [tag for tag in expected.tags if tag not in text]
    return Malformed("missing tags", f"{', '.join(missing)} not there") if missing else None


def _code(text: str, expected: Expected) -> Malformed | None:
    lines = [line for line in text.splitlines() if line.strip()]
    if expected.code or len(lines) < 3:
        return None
    code = sum(CODE_LINE.search(line) is not None for line in lines)
    if code > 0.5 * len(lines):
        return Malformed("code for prose", f"{code} of {len(lines)} lines are code, where prose was asked for")
    return None


def _numbers(text: str, expected: Expected) -> Malformed | None:
    """Arithmetic, whatever the question: what a model does that was rewarded for sums alone."""
    words = text.split()
    if expected.numbers or expected.code or len(words) < 8:
        return None
    numeric = sum(any(c.isdigit() for c in word) for word in words) + len(OPERATOR.findall(text))
    markers = [line for line in text.splitlines() if re.match(r"\s*\d+[.)]\s+\S", line)]  # the numbers of a list are no sums
    if numeric - len(markers) > 0.4 * len(words):
        return Malformed("numbers for prose", f"{numeric} of {len(words)} words are numbers or operators, where prose was asked for")
    return None


def _cap(text: str, ended: str, expected: Expected) -> Malformed | None:
    if expected.ends and ended == "length":
        return Malformed("cap", f"it did not end within the tokens it was given: …{text[-40:]!r}")
    return None

# ---------------------------------------------------------------- helpers


def _shingles(text: str) -> set[tuple[str, ...]]:
    """Runs of three words, numbers all alike; nothing of a text that is too short to be anybody's own."""
    words = [_NUMBER.sub("0", word.strip(".,;:!?\"'").lower()) for word in text.split()]
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)} if len(words) >= SIMILAR_WORDS else set()


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    """The first word of the letter's Unicode name: LATIN, CYRILLIC, CJK, GREEK, …"""
    return unicodedata.name(letter, "UNKNOWN").split()[0]

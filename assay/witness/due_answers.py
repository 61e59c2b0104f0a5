"""Due answers: what a text states as its answer, read strictly and leniently by the rule in docs/witness.md, and whether it is right."""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

THINKING, THOUGHT = "<think>", "</think>"
OPENED, CLOSED = "<answer>", "</answer>"
MOST_CHARACTERS = 64  # of a number
WRITTEN_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*\$?\s*(?P<inner>[+-]?)(?P<digits>{WRITTEN_DIGITS})(?:[eE](?P<power>[+-]?[0-9]{{1,2}}))?"
                    r"(?:\s*/\s*(?P<below>[0-9]+))?")
QUOTIENT = re.compile(r"(-?)\\(?:|d|t)frac\{([0-9]+)\}\{([0-9]+)\}")
NUMBER_IN_WORDS = re.compile(rf"(?:-(?=[$.0-9]))?\$?(?:{WRITTEN_DIGITS})(?:/[0-9]+)?%?")
SAYS_SO = re.compile(r"\banswer\s*(?:is|:|=)", re.IGNORECASE)


class Stated(NamedTuple):
    """Stated answer: where it begins and ends in the text, and what stands within the mark."""

    start: int
    end: int
    words: str


class DueGrade(NamedTuple):
    strict: bool
    lenient: bool
    parsed: bool
    answer: str | None  # as votes count it


def due_grade(text: str, gold: str) -> DueGrade:
    strict, lenient = strict_answer(text), lenient_answer(text)
    return DueGrade(is_same(strict, gold), is_same(lenient, gold), strict is not None, voted(strict))


def row_gold(row: Mapping[str, Any]) -> str:
    """`gold`, or what follows the last #### of `answer`."""
    return str(row["gold"] if "gold" in row else row["answer"]).split("####")[-1].strip()


def strict_answer(text: str) -> str | None:
    """Answer that is stated exactly once, and all of what is stated."""
    said, matched = outside_thoughts(text)
    if not matched:
        return None
    stated = outermost([*answer_tags(said), *boxes(said), *hashes(said, later=False)])
    if stated:
        return unwrapped(stated[0].words) or None if len(stated) == 1 else None
    if any(mark in said for mark in (OPENED, CLOSED, "\\boxed", "####")):
        return None
    whole = unwrapped(said)
    if as_number(whole) is not None or ((letters := whole.removesuffix(".")) and all(map(is_letter, letters))):
        return whole
    ends = said.rstrip()
    claims = list(SAYS_SO.finditer(said))
    if len(claims) != 1:
        return None
    rest = ends[claims[0].end():].lstrip().removeprefix(":").lstrip() if claims[0].end() <= len(ends) else ""
    return None if "\n" in rest else unwrapped(rest) or None


def lenient_answer(text: str) -> str | None:
    """Answer read leniently: the last thing that could be meant."""
    said, _ = outside_thoughts(text)
    stated = outermost([*answer_tags(said), *boxes(said), *hashes(said, later=True)])
    if not stated:
        return last_number_in(said)
    words = unwrapped(next((each.words for each in reversed(stated) if each.words.strip()), ""))
    return words if as_number(words) is not None else last_number_in(words) or words or None


def is_same(answer: str | None, gold: str) -> bool:
    """Whether two answers are the same: as numbers where one of them is a number, else as words."""
    if not (answer or "").strip():
        return False
    assert answer is not None
    numbers = as_number(answer), as_number(gold)
    return numbers[0] == numbers[1] if any(number is not None for number in numbers) else words_alike(answer) == words_alike(gold)


def voted(answer: str | None) -> str | None:
    if answer is None:
        return None
    number = as_number(answer)
    return words_alike(answer) if number is None else str(number)


def words_alike(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".")

# ---------------------------------------------------------------- marks


def outside_thoughts(text: str) -> tuple[str, bool]:
    """Text without what is between think tags, the first of which the prompt may have opened; and whether no tag is left."""
    closed, opened = text.find(THOUGHT), text.find(THINKING)
    rest, said = (THINKING + text if closed >= 0 and not 0 <= opened < closed else text), ""
    while (start := rest.find(THINKING)) >= 0 and (end := rest.find(THOUGHT, start)) >= 0:
        said, rest = f"{said}{rest[:start]} ", rest[end + len(THOUGHT):]
    said += rest
    return said, THINKING not in said and THOUGHT not in said


def answer_tags(text: str) -> Iterator[Stated]:
    """Every closing tag whose nearest tag before it opens."""
    at = -1
    while (at := text.find(CLOSED, at + 1)) >= 0:
        start = text.rfind(OPENED, 0, at)
        if start > text.rfind(CLOSED, 0, at):
            yield Stated(start, at + len(CLOSED), text[start + len(OPENED):at])


def boxes(text: str) -> Iterator[Stated]:
    r"""Every \boxed{…} whose brace is closed."""
    at = -1
    while (at := text.find("\\boxed", at + 1)) >= 0:
        inner = text[at + len("\\boxed"):].lstrip()
        start = len(text) - len(inner) + 1
        end = closing_brace(text, start) if inner.startswith("{") else None
        if end is not None:
            yield Stated(at, end + 1, text[start:end])


def closing_brace(text: str, start: int) -> int | None:
    open_braces = 1
    for at in range(start, len(text)):
        open_braces += (text[at] == "{") - (text[at] == "}")
        if not open_braces:
            return at
    return None


def hashes(text: str, *, later: bool) -> Iterator[Stated]:
    """Answers after four # or more on the line; `later`: on the next line that says something."""
    at = 0
    while (start := text.find("####", at)) >= 0:
        after = start + len(text[start:]) - len(text[start:].lstrip("#"))
        rest = text[after:]
        begins = after + len(rest) - len(rest.lstrip() if later else rest.lstrip("".join(set(rest) & BLANKS)))
        if later and text[begins:begins + 1] in ("", "#"):
            begins, end = after, after
        else:
            end = begins + len(text[begins:].partition("\n")[0])
        yield Stated(start, end, text[begins:end])
        at = max(end, after)


BLANKS = {character for character in map(chr, range(0x3001)) if character.isspace() and character != "\n"}


def outermost(stated: list[Stated]) -> list[Stated]:
    kept: list[Stated] = []
    for each in sorted(stated, key=lambda each: (each.start, -each.end)):
        if not kept or each.start >= kept[-1].end:
            kept.append(each)
    return kept


def unwrapped(words: str) -> str:
    """Text without the stars, dollars, brackets, boxes and #### around all of it."""
    while True:
        words = words.strip()
        around = list(boxes(words))
        inner = around[0].words if len(around) == 1 and around[0][:2] == (0, len(words)) else without_wrapping(words.removesuffix("."))
        if inner is None:
            return words
        words = inner


def without_wrapping(words: str) -> str | None:
    for before, after in (("**", "**"), ("$", "$"), ("\\(", "\\)"), ("\\text{", "}"), ("####", "")):
        if words.startswith(before) and words.endswith(after) and len(words) > len(before) + len(after):
            return words[len(before):len(words) - len(after)]
    return None


def is_letter(character: str) -> bool:
    return character == "_" or (character.isalnum() and not character.isdecimal())

# ---------------------------------------------------------------- numbers


def as_number(text: str) -> Fraction | None:
    """The number that the whole text is: 12.0, 1,000, $5, -$5, 1/2, 2e3, 50% (which is 50) or LaTeX's fraction of two whole numbers."""
    for written, plain in (("−", "-"), ("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\,", "")):
        text = text.strip().replace(written, plain)
    if len(text) > MOST_CHARACTERS:
        return None
    text = text.removesuffix(".").rstrip().removesuffix("%").rstrip()
    if quotient := QUOTIENT.fullmatch(text):
        text = "{}{}/{}".format(*quotient.groups())
    found = NUMBER.fullmatch(text)
    if found is None or (found["sign"] and found["inner"]) or int(found["below"] or 1) == 0:
        return None
    size = Fraction(found["digits"].replace(",", "")) / int(found["below"] or 1) * Fraction(10) ** int(found["power"] or 0)
    return -size if "-" in found["sign"] + found["inner"] else size


def last_number_in(text: str) -> str | None:
    """Last number of a text that no letter, digit or dot stands before."""
    text, at, last = text.replace("−", "-"), 0, None
    while (found := NUMBER_IN_WORDS.search(text, at)) is not None:
        before = text[found.start() - 1:found.start()]
        if before and (before == "." or before == "_" or before.isalnum()):
            at = found.start() + 1
        else:
            last, at = found[0], found.end()
    return last

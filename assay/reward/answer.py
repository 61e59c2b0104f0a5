"""Answer extraction: GSM8K's ####, \\boxed{}, <answer>, or the last number; each read strictly and leniently.

    read_answer("6 * 7 = 42\\n#### 42")                           "42"
    read_answer("<answer>41 or 42</answer>")                     "41 or 42", which equals no gold
    read_answer("<answer>41</answer><answer>42</answer>")        None: stated twice
    read_answer("…so it must be 42 in all", "lenient")           "42"

Strictly, an answer is stated exactly once, and the whole of what is stated is the answer. Leniently, the last thing that
could be meant is taken: what other tools call flexible extraction, and what a model learns to exploit. A mark with nothing
after it is no answer by either reading, whatever the working before it says.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from assay.errors import DataError, UsageError

Strictness = Literal["strict", "lenient"]
AnswerForm = Literal["any", "tag", "boxed", "hash", "last"]
MARKED: tuple[AnswerForm, ...] = ("tag", "boxed", "hash")

LONGEST_NUMBER = 64  # characters; more is no answer, and a long exponent would fill the memory
_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"([+-]?)\s*\$?\s*([+-]?)({_PLAIN})(?:[eE]([+-]?[0-9]{{1,2}}))?(?:\s*/\s*([0-9]+))?")
_IN_TEXT = re.compile(rf"(?<![\w.])(?:-(?=[$.\d]))?\$?(?:{_PLAIN})(?:/[0-9]+)?%?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_HASH = {"strict": re.compile(r"#{4,}[^\S\n]*([^\n]*)"),  # leniently, what is marked may begin on a later line
         "lenient": re.compile(r"#{4,}(?:\s*([^\s#][^\n]*))?")}
_STATED = re.compile(r"\banswer\s*(?:is|:|=)\s*:?\s*([^\n]*)\Z", re.IGNORECASE)
_WRAPPED = re.compile(r"\*\*(.+)\*\*|\$(.+)\$|\\\((.+)\\\)|\\text\{(.+)\}|####(.+)", re.DOTALL)


@dataclass(frozen=True)
class Readings:
    """Readings of one completion, strict and lenient. Where the two part, the reward depends on who reads."""

    strict: str | None
    lenient: str | None
    gold: str

    @property
    def strictly_right(self) -> bool:
        return same_answer(self.strict, self.gold)

    @property
    def leniently_right(self) -> bool:
        return same_answer(self.lenient, self.gold)

    @property
    def agree(self) -> bool:
        return self.strictly_right == self.leniently_right


def read_answer(text: str, how: Strictness = "strict", form: AnswerForm = "any") -> str | None:
    """Answer that a text gives, in its own words, or None. What is thought between think tags is no answer."""
    spoken = _outside_thinking(text, how)
    if spoken is None:
        return None
    forms = MARKED if form == "any" else (form,)
    marks = _outermost([mark for each in forms for mark in _marks(spoken, each, how)])
    if how == "strict":
        if form == "last" or (form == "any" and not marks):
            return None if _marks_left_open(spoken) else _only_answer(spoken)
        return _unwrapped(marks[0][2]) or None if len(marks) == 1 else None
    if marks:
        return _leniently(_unwrapped(next((mark[2] for mark in reversed(marks) if mark[2].strip()), "")))
    return last_number(spoken) if form in ("any", "last") else None


def readings(text: str, gold: str, form: AnswerForm = "any") -> Readings:
    return Readings(read_answer(text, "strict", form), read_answer(text, "lenient", form), gold)


def reading_disagreements(read: Iterable[Readings]) -> int:
    """How many completions are right by one reading and wrong by the other."""
    return sum(not each.agree for each in read)


def same_answer(answer: str | None, gold: str) -> bool:
    """Whether two answers are equal as numbers (12.0 is 12, 1,000 is 1000, $5 is 5, 1/2 is 0.5), or else as words, whatever their case and
    spacing."""
    if answer is None or not answer.strip():
        return False
    number, wanted = read_number(answer), read_number(gold)
    if number is not None or wanted is not None:
        return number == wanted
    return _words(answer) == _words(gold)


def gold_answer(row: Mapping[str, Any]) -> str:
    """The right answer of a row: its `gold`, or its `answer`, of which GSM8K writes the working first and #### last."""
    for column in ("gold", "answer"):
        if column in row:
            value = row[column]
            if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
                raise DataError(f"the gold answer in column {column!r} is {value!r}; expected a number or words")
            stated = str(value).rsplit("####", 1)[-1].strip()
            if not stated:
                raise DataError(f"column {column!r} ends with '####' and no answer after it")
            return stated
    raise DataError(f"the row has neither 'gold' nor 'answer', only {', '.join(map(repr, row)) or 'nothing'}")


def read_number(text: str) -> Fraction | None:
    """The number that the whole text is, exactly, or None. A currency or percent sign is a unit: 50% is 50."""
    text = text.strip().replace("−", "-").replace("\\$", "$").replace("\\%", "%").replace("{,}", ",").replace("\\,", "")
    if len(text) > LONGEST_NUMBER:
        return None
    text = text.removesuffix(".").rstrip().removesuffix("%").rstrip()
    if fraction := _FRACTION.fullmatch(text):
        text = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    found = _NUMBER.fullmatch(text)
    if found is None or (found[1] and found[2]) or (found[5] and not int(found[5])):
        return None
    value = Fraction(found[3].replace(",", "")) * Fraction(10) ** int(found[4] or 0) / int(found[5] or 1)
    return -value if "-" in (found[1], found[2]) else value


def last_number(text: str) -> str | None:
    found = _IN_TEXT.findall(text.replace("−", "-"))
    return found[-1] if found else None


Mark = tuple[int, int, str]  # where it begins and ends, and what it marks


def _marks(text: str, form: AnswerForm, how: Strictness) -> list[Mark]:
    if form == "tag":
        return [(m.start(), m.end(), m[1]) for m in _TAG.finditer(text)]
    if form == "hash":
        return [(m.start(), m.end(), m[1] or "") for m in _HASH[how].finditer(text)]
    return list(_boxes(text)) if form == "boxed" else []


def _boxes(text: str) -> Iterable[Mark]:
    """Every \\boxed{…} that is closed, braces within it balanced."""
    for found in re.finditer(r"\\boxed\s*\{", text):
        depth = 1
        for at in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                yield found.start(), at + 1, text[found.end() : at]
                break


def _outermost(marks: list[Mark]) -> list[Mark]:
    """Marks without those that stand within another: <answer>\\boxed{42}</answer> states one answer."""
    kept: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark[0], -mark[1])):
        if not kept or mark[0] >= kept[-1][1]:
            kept.append(mark)
    return kept


def _marks_left_open(text: str) -> bool:
    return any(mark in text for mark in ("<answer>", "</answer>", "\\boxed", "####"))


def _only_answer(text: str) -> str | None:
    """Answer of a text without marks: all of it where it is a number or one word, or what it says at its end that the answer is."""
    whole = _unwrapped(text)
    if read_number(whole) is not None or re.fullmatch(r"[^\W\d]+\.?", whole):
        return whole
    if len(re.findall(r"\banswer\s*(?:is|:|=)", text, re.IGNORECASE)) != 1:
        return None
    stated = _STATED.search(text.rstrip())
    return _unwrapped(stated[1]) or None if stated else None


def _outside_thinking(text: str, how: Strictness) -> str | None:
    """Text outside think tags, of which the prompt may have opened the first; None, read strictly, where they do not match."""
    if how not in ("strict", "lenient"):
        raise UsageError(f"an answer is read 'strict' or 'lenient', not {how!r}")
    if "<think>" not in text.partition("</think>")[0] and "</think>" in text:
        text = "<think>" + text
    spoken = _THOUGHT.sub(" ", text)
    return None if how == "strict" and ("<think>" in spoken or "</think>" in spoken) else spoken


def _unwrapped(stated: str) -> str:
    """42 for **42**, $42$, \\boxed{42}, #### 42."""
    stated = stated.strip()
    while True:
        boxes = list(_boxes(stated))
        whole_box = len(boxes) == 1 and boxes[0][:2] == (0, len(stated))
        wrapped = None if whole_box else _WRAPPED.fullmatch(stated.removesuffix("."))
        if not whole_box and not wrapped:
            return stated
        stated = (boxes[0][2] if whole_box else next(filter(None, wrapped.groups()))).strip()  # type: ignore[union-attr]


def _leniently(stated: str) -> str | None:
    if read_number(stated) is not None:
        return stated
    return last_number(stated) or stated or None


def _words(text: str) -> str:
    return " ".join(text.split()).casefold().removesuffix(".")

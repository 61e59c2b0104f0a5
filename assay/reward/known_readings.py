"""Known readings of answers: texts whose strict and lenient reading, and numbers whose value, stand here.

What is right is decided by reading a text. A mistake there moves a score, and nothing else says what it should have been; so whoever scores
by answers reads these first.
"""

from collections.abc import Iterator
from fractions import Fraction

from assay.reward.answer import AnswerForm, gold_answer, read_answer, read_number, readings, same_answer
from assay.verdict import Verdict, proven, refuted

_TEXTS: tuple[tuple[str, AnswerForm, str | None, str | None], ...] = (  # text, form, strictly, leniently
    ("42", "any", "42", "42"), ("6 * 7 = 42\n#### 42", "any", "42", "42"), ("<answer>41 or 42</answer>", "any", "41 or 42", "42"),
    ("<answer>41</answer><answer>42</answer>", "any", None, "42"), ("…so it must be 42 in all", "any", None, "42"),
    ("<answer>\\boxed{42}</answer>", "any", "42", "42"), ("\\boxed{\\frac{1}{2}} and 3", "any", "\\frac{1}{2}", "\\frac{1}{2}"),
    ("\\boxed{4", "any", None, "4"), ("\\boxed{4\nthe answer is 5", "any", None, "5"), ("#### ", "any", None, None),
    ("####\n7", "any", None, "7"), ("the answer is **9**.", "any", "9", "9"),
    ("12 apples, 7 pears", "any", None, "7"), ("yes", "any", "yes", None), ("<think>3</think> 4", "any", "4", "4"),
    ("3</think> 4", "any", "4", "4"), ("<think>3", "any", None, "3"), ("1 <answer>2</answer> 3", "tag", "2", "2"),
    ("1 <answer>2</answer> 3", "boxed", None, None), ("1 <answer>2</answer> 3", "last", None, "3"), ("5 #### 6", "hash", "6", "6"),
    ("-1,200.50", "last", "-1,200.50", "-1,200.50"), ("", "any", None, None))
_NUMBERS: tuple[tuple[str, Fraction | None], ...] = (
    ("12.0", Fraction(12)), ("1,000", Fraction(1000)), ("$5", Fraction(5)), ("-$5", Fraction(-5)), ("1/2", Fraction(1, 2)), ("1/0", None),
    ("50%", Fraction(50)), ("−3", Fraction(-3)), ("2e3", Fraction(2000)), ("\\frac{3}{4}", Fraction(3, 4)), ("7.", Fraction(7)),
    (".5", Fraction(1, 2)), ("+-5", None), ("1,00", None), ("9" * 64, Fraction(int("9" * 64))), ("9" * 65, None), ("four", None))
_PAIRS: tuple[tuple[str | None, str, bool], ...] = (
    ("12.0", "12", True), ("1/2", "0.5", True), ("Paris. ", "paris", True), ("New  York", "new york", True), ("12", "13", False),
    (None, "12", False), (" ", "12", False), ("12 apples", "12", False), ("Paris", "Rome", False))
_GOLDS: tuple[tuple[dict[str, object], str], ...] = (
    ({"answer": "6 * 7 = 42\n#### 42"}, "42"), ({"gold": 3, "answer": "4"}, "3"), ({"gold": " Paris "}, "Paris"))


def check_readings() -> Verdict:
    wrong = list(_wrong())
    cases = len(_TEXTS) + len(_NUMBERS) + len(_PAIRS) + len(_GOLDS)
    if wrong:
        return refuted("readings", f"{len(wrong)} of {cases} known answers are read otherwise, so no score here can be believed: "
                                   f"{'; '.join(wrong[:3])}", wrong=wrong)
    return proven("readings", f"{cases} known texts, numbers and golds are read as they should be")


def _wrong() -> Iterator[str]:
    for text, form, strict, lenient in _TEXTS:
        found = read_answer(text, "strict", form), read_answer(text, "lenient", form)
        if found != (strict, lenient):
            yield f"{text!r} ({form}) is {found}, known is {(strict, lenient)}"
        both = readings(text, "42", form)
        if (both.strictly_right, both.leniently_right) != (strict == "42", lenient == "42"):
            yield f"{text!r} ({form}) is right strictly: {both.strictly_right}, leniently: {both.leniently_right}"
    for text, number in _NUMBERS:
        if (value := read_number(text)) != number:
            yield f"{text!r} is {value}, known is {number}"
    for answer, gold, alike in _PAIRS:
        if same_answer(answer, gold) is not alike:
            yield f"{answer!r} and {gold!r} are the same: {not alike}, known is {alike}"
    for row, gold in _GOLDS:
        if (stated := gold_answer(row)) != gold:
            yield f"the gold of {row} is {stated!r}, known is {gold!r}"

"""What a completion gives as its answer, read strictly and leniently."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import DataError, UsageError
from assay.reward.answer import gold_answer, last_number, read_answer, read_number, reading_disagreements, readings, same_answer

READ = [  # text, strictly, leniently
    ("48/2 = 24\n48+24 = 72\n#### 72", "72", "72"),
    ("so \\boxed{42}.", "42", "42"),
    ("so $\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}", "\\frac{1}{2}"),
    ("<think>41? no</think><answer>42</answer>", "42", "42"),
    ("<answer>\\boxed{42}</answer>", "42", "42"),
    ("<answer> **1,234** </answer>", "1,234", "1,234"),
    ("42", "42", "42"),
    ("The answer is 42.", "42.", "42"),
    ("Final answer: Paris", "Paris", None),
    # one reading takes what the other leaves
    ("<answer>42 or 43</answer>", "42 or 43", "43"),
    ("<answer>42 apples</answer>", "42 apples", "42"),
    ("<answer>41</answer> wait <answer>42</answer>", None, "42"),
    ("<answer>42</answer> again <answer>42</answer>", None, "42"),
    ("<answer>42</answer> or \\boxed{43}", None, "43"),
    ("#### 41\n#### 42", None, "42"),
    ("It is 42 in all", None, "42"),
    ("the answer is 41, no, the answer is 42", None, "42"),
    ("The answer is 41 or 42", "41 or 42", "42"),
    ("<think>\\boxed{41} hmm", None, "41"),
    ("thought</think><answer>42</answer>", "42", "42"),
    ("<think>a</think><answer>42</answer>\n" * 2, None, "42"),
    ("<think>a<think>b</think></think>42", None, "42"),
    ("6*7=<<6*7=42>>42\n####", None, None),
    ("6*7=<<6*7=42>>42\n#### \n#### \n", None, None),
    ("####\n\n42\nof 50", None, "42"),
    ("#### 42\n#### ", None, "42"),
    ("<answer>42</answer><answer></answer>", None, "42"),
    ("#### \n#### 42", None, "42"),
    ("##### 42", "42", "42"),
    ("########\n########", None, None),
    ("<answer>42", None, "42"),
    # nothing there
    ("", None, None),
    ("<answer></answer>", None, None),
    ("<think>it is 42</think>", None, None),
    ("I do not know.", None, None),
]


@pytest.mark.parametrize(("text", "strictly", "leniently"), READ)
def test_both_readings(text: str, strictly: str | None, leniently: str | None):
    assert (read_answer(text, "strict"), read_answer(text, "lenient")) == (strictly, leniently)


@pytest.mark.parametrize(("form", "value"), [("tag", "1"), ("boxed", "2"), ("hash", "3"), ("last", None)])
def test_a_form_reads_its_own_mark_only(form, value):
    text = "<answer>1</answer> \\boxed{2}\n#### 3"
    assert read_answer(text, "strict", form) == value
    assert read_answer("nothing marked, 7", "strict", form) is None
    assert read_answer("nothing marked, 7", "lenient", form) == ("7" if form == "last" else None)


def test_an_unknown_reading_is_a_usage_error():
    with pytest.raises(UsageError, match="'strict' or 'lenient'"):
        read_answer("42", "fuzzy")  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "value"), [
    ("42", 42), ("42.", 42), ("42.0", 42), ("-7", -7), ("−7", -7), ("+7", 7), ("1,234,567", 1234567), ("$1,200.50", Fraction(2401, 2)),
    ("-$5", -5), ("$-5", -5), ("50%", 50), ("50 %.", 50), ("1/2", Fraction(1, 2)), ("-3/4", Fraction(-3, 4)), (".5", Fraction(1, 2)),
    ("\\frac{1}{2}", Fraction(1, 2)), ("\\$12", 12), ("1e3", 1000), ("1{,}000", 1000), (" 12 ", 12)])
def test_numbers_in_many_dresses(text: str, value):
    assert read_number(text) == value


@pytest.mark.parametrize("text", ["", "x", "42 or 43", "41,42", "1,23", "1/0", "--5", "-$-5", "1 2", "3.4.5", "NaN", "inf", "1e999", "٤٢",
                                  "9" * 65, "12 dollars", "1/2/3"])
def test_what_is_no_number(text: str):
    assert read_number(text) is None


@given(st.integers(-10**9, 10**9))
def test_every_whole_number_is_read_as_itself(n: int):
    for text in (str(n), f"{n:,}", f"{n}.0", f"${n}", f"{n}%", f"{n}."):
        assert read_number(text) == n
    assert read_number(read_answer(f"so\n#### {n:,}") or "") == n
    assert same_answer(last_number(f"it is {n:,} apples"), str(n))


def test_a_minus_between_numbers_is_no_sign():
    assert (last_number("10-3"), last_number("it fell to -3"), last_number("a3 b")) == ("3", "-3", None)
    assert (last_number("so 10 - 3"), last_number("what is left:\n- 3 pears"), last_number("10 − 3")) == ("3", "3", "3")
    assert (last_number("it costs -$3"), last_number("10 - -3")) == ("-$3", "-3")


@pytest.mark.parametrize(("answer", "gold", "same"), [
    ("12.0", "12", True), ("$1,000", "1000", True), ("0.5", "1/2", True), ("  New  york. ", "new York", True),
    ("42 or 43", "42", False), ("", "42", False), (None, "42", False), ("", "", False), ("42", "42 apples", False),
    ("york", "new york", False)])
def test_same_answer(answer, gold, same):
    assert same_answer(answer, gold) is same


def test_where_the_readings_part_is_counted():
    read = [readings(text, "43") for text in ("#### 43", "<answer>42 or 43</answer>", "it is 43", "#### 42")]
    assert [each.strictly_right for each in read] == [True, False, False, False]
    assert [each.leniently_right for each in read] == [True, True, True, False]
    assert reading_disagreements(read) == 2


def test_the_gold_of_a_row():
    assert gold_answer({"answer": "6*7=42\n#### 42"}) == "42"
    assert gold_answer({"gold": 42, "answer": "no"}) == "42"
    for row in ({}, {"answer": None}, {"answer": "  "}, {"answer": "working\n####"}, {"gold": True}):
        with pytest.raises(DataError):
            gold_answer(row)

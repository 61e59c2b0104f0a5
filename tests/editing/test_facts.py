"""Every layout becomes the same Fact, and a subject that is not in its prompt as spelled is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.editing.facts import Fact, SideQuestion, make_fact, read_facts
from assay.errors import DataError


def read(tmp_path: Path, *rows: dict[str, Any]) -> tuple[list[Fact], list]:
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_facts(path)


ORIGINAL = {"case_id": 7, "requested_rewrite": {"prompt": "The mother tongue of {} is", "subject": "Ann", "target_new": {"str": "English"},
                                                "target_true": {"str": "French"}},
            "paraphrase_prompts": ["Ann speaks "], "neighborhood_prompts": ["Bob was born to speak"]}
EASY = {"case_id": 7, "prompt": "The mother tongue of Ann is", "subject": "Ann", "target_new": "English", "ground_truth": "French",
        "rephrase_prompt": "Ann speaks", "locality_prompt": "Bob was born to speak", "locality_ground_truth": "French"}
PLAIN = {"name": "7", "prompt": "The mother tongue of Ann is", "subject": "Ann", "target": "English", "old": "French",
         "paraphrases": ["Ann speaks"], "neighbourhood": [{"prompt": "Bob was born to speak", "answer": "French"}]}


def test_three_layouts_of_one_fact_are_one_fact(tmp_path: Path):
    (original, easy, plain), refused = read(tmp_path, ORIGINAL, EASY, PLAIN)
    assert not refused
    assert original == easy
    assert easy.name == "case 7"
    assert (plain.name, plain.prompt, plain.start, plain.target, plain.old) == ("7", original.prompt, 21, "English", "French")
    assert plain.paraphrases == original.paraphrases == ("Ann speaks",)
    assert plain.neighbourhood == original.neighbourhood == (SideQuestion("Bob was born to speak", "French"),)


def test_what_is_refused_is_named_and_the_others_go_on(tmp_path: Path):
    facts, refused = read(tmp_path, PLAIN, PLAIN | {"name": "ghost", "subject": "Bob"}, PLAIN | {"name": "8"})
    assert [fact.name for fact in facts] == ["7", "8"]
    assert [one.name for one in refused] == ["ghost"]
    assert "'Bob' does not occur in 'The mother tongue of Ann is'" in refused[0].reason


def test_a_row_of_no_known_layout_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"row 0: has answer, question; expected CounterFact"):
        read(tmp_path, {"question": "?", "answer": "!"})


@pytest.mark.parametrize("row", [
    {"requested_rewrite": {"prompt": "{} is"}}, PLAIN | {"prompt": 3}, PLAIN | {"neighbourhood": [{"prompt": "x"}]},
    EASY | {"locality_prompt": ["one", "two"]}])
def test_a_field_that_is_not_as_its_layout_has_it_is_an_error(row: dict[str, Any], tmp_path: Path):
    with pytest.raises(DataError, match="not as that layout has it"):
        read(tmp_path, row)


def test_an_empty_answer_is_none(tmp_path: Path):
    (fact,), _ = read(tmp_path, EASY | {"locality_ground_truth": " "})
    assert fact.neighbourhood == (SideQuestion("Bob was born to speak", None),)


@pytest.mark.parametrize(("prompt", "subject", "start"), [
    ("Rome: the mayor of Rome is", "Rome", 19),  # the last of several
    ("Was Romeo from Rome", "Rome", 15),  # not inside a longer word
    ("Rome and Romeo", "Rome", 0),
    ("  People in Lyon's twin city speak ", " Lyon ", 10),  # spaces around either
    ("{} is where Ann lives", "Ann", 0),  # a template says where
    ("The capital of {} is", "Ann", 15),
    ("東京の市長は", "東京", 0),  # no spaces between words
    ("C++ was made by", "C++", 0),
])
def test_where_a_subject_stands(prompt: str, subject: str, start: int):
    fact = make_fact("x", prompt, subject, "y")
    assert fact.start == start
    assert fact.prompt[start : start + len(fact.subject)] == subject.strip()
    assert fact.prompt == fact.prompt.strip()


@pytest.mark.parametrize(("prompt", "subject", "words"), [
    ("The king of spain is", "Spain", "it is spelled 'spain' there"),
    ("Romeo lives in", "Rome", "only inside a longer word"),
    ("The king of  New  York is", "New York", "does not occur"),
    ("{} and {}", "Ann", "2 places for the subject"),
    ("Ann is", "  ", "the subject is empty"),
])
def test_what_is_not_there_as_spelled_is_refused(prompt: str, subject: str, words: str):
    with pytest.raises(DataError, match=words):
        make_fact("x", prompt, subject, "y")

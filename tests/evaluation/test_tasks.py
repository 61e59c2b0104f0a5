"""Every task: its gold texts score, its wrong ones do not, and what cannot be used is refused by name."""

import json
import sys
from dataclasses import replace

import pytest

from assay.cli import run as assay
from assay.errors import DataError, UsageError
from assay.evaluation.task import Likelihood, MultipleChoice, Score, check_scoring, cut_at_stop, dataset_digest, make_examples, score_choice
from assay.evaluation.tasks import TASKS, TaskRequest, answers, graded, open_task
from assay.reward import gym, sandbox
from assay.reward.reward_functions import parse_rewards
from assay.verdict import Outcome
from tests.evaluation.eval_fixtures import FACT, FUNCTION, INSTRUCTED, PROBLEMS, QUESTION, SHADOWED, write_rows

needs_bwrap = pytest.mark.skipif(sandbox.sandbox_unavailable() is not None, reason=f"no sandbox here: {sandbox.sandbox_unavailable()}")


def made(name, tmp_path, rows=None, **more):
    data = None if rows is None else write_rows(tmp_path / "data.jsonl", rows)
    return open_task(TaskRequest(name, data, **more))


def outcomes(task):
    return {verdict.check: verdict.outcome for verdict in check_scoring(task)}


ALL_PROVEN = dict.fromkeys(("gold answers", "wrong answers", "two readings"), Outcome.PROVEN)


@pytest.mark.parametrize(("name", "rows", "more"), [
    ("gsm8k", PROBLEMS, {}), ("arithmetic", None, {"limit": 30}), ("instructions", [INSTRUCTED], {}),
    pytest.param("humaneval", [FUNCTION], {}, marks=needs_bwrap), pytest.param("mbpp", [SHADOWED], {}, marks=needs_bwrap),
    ("graded", [{"prompt": "Say 7.", "answer": "7"}], {"grader": "answer"}), ("graded", PROBLEMS, {"grader": "answer"})])
def test_the_oracles_of_a_generation_task_hold(name, rows, more, tmp_path):
    canaries = {"grader": Outcome.PROVEN} if name == "graded" else {}
    assert outcomes(made(name, tmp_path, rows, **more)) == ALL_PROVEN | canaries


@pytest.mark.parametrize(("name", "row"), [("choices", QUESTION), ("counterfact", FACT), ("text", {"text": "Some words."})])
def test_the_oracles_of_a_likelihood_task_hold(name, row, tmp_path):
    assert outcomes(made(name, tmp_path, [row])) == {"gold answers": Outcome.PROVEN}


def test_a_grader_that_always_says_yes_is_found_out(tmp_path):
    (tmp_path / "yes.py").write_text("def yes(prompt, completion, row):\n    return 1.0\n")
    task = made("graded", tmp_path, [{"prompt": "Say 7.", "answer": "7"}], grader=f"{tmp_path}/yes.py:yes")
    assert outcomes(task)["wrong answers"] is Outcome.REFUTED


GRADERS = {  # body of a user's grader → what its canaries come to
    "any number counts": ("return float(any(letter.isdigit() for letter in completion) and completion != prompt)", Outcome.REFUTED),
    "the number is in it": ("return float(row['answer'] in completion.split() and completion != prompt)", Outcome.UNPROVEN),
    "within a fifth": ("from contextlib import suppress\n    with suppress(ValueError):\n"
                       "        return float(abs(float(completion) / float(row['answer']) - 1) < 0.2)\n    return 0.0", Outcome.UNPROVEN),
    "right or wrong": ("return float(completion.strip() == row['answer'])", Outcome.PROVEN),
    "a little for trying": ("return 1.0 if completion.strip() == row['answer'] else 0.0 if completion in ('', prompt) else 0.2",
                            Outcome.PROVEN)}


@pytest.mark.parametrize("name", GRADERS)
def test_a_lenient_grader_is_found_out_and_a_sound_one_is_not(name, tmp_path):
    """Nothing and the prompt score 0 under every one of them, so only a wrong answer tells them apart."""
    body, due = GRADERS[name]
    (tmp_path / "mine.py").write_text(f"def grade(prompt, completion, row):\n    {body}\n")
    rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in (7, 12, 40, 900)]
    assert outcomes(made("graded", tmp_path, rows, grader=f"{tmp_path}/mine.py:grade")) == ALL_PROVEN | {"grader": due}


@pytest.mark.parametrize("rows", [
    [{"prompt": "1+1?", "answer": "2", "gold_completion": "So it is 2."}, {"prompt": "1+2?", "answer": "3", "gold_completion": "So 3."}],
    [{"prompt": "Capital of Italy?", "answer": "Rome"}, {"prompt": "Of France?", "answer": "Paris"}],
    [{"prompt": "a?", "answer": "yes"}, {"prompt": "b?", "answer": "yes"}], [{"prompt": "c?", "gold_completion": "Well."}],
    [{"prompt": "Half?", "answer": "0.5", "gold_completion": "0.5"}, {"prompt": "More?", "answer": "-2.25"}]])
def test_canaries_raise_no_alarm_over_a_grader_of_last_words(rows, tmp_path):
    """A list of several answers that ends with the right one scores, and is said; or no wrong answer is known. Nothing is refused."""
    (tmp_path / "mine.py").write_text("def grade(prompt, completion, row):\n    words = completion.removesuffix('.').split()\n"
                                      "    return float(words[-1:] == [row.get('answer', 'Well')])\n")
    assert outcomes(made("graded", tmp_path, rows, grader=f"{tmp_path}/mine.py:grade"))["grader"] is Outcome.UNPROVEN


def test_a_grader_that_fails_is_an_error_and_no_score(tmp_path):
    (tmp_path / "bad.py").write_text("def bad(prompt, completion, row):\n    raise KeyError('x')\n")
    task = made("graded", tmp_path, [{"prompt": "Say 7.", "answer": "7"}], grader=f"{tmp_path}/bad.py:bad")
    with pytest.raises(DataError, match="the grader failed on example 0"):
        task.score(task.examples[0], "7")


def test_a_stop_string_given_as_letters_is_found_out(tmp_path):
    task = made("gsm8k", tmp_path, PROBLEMS)
    broken = replace(task, stop=tuple("Question:"))
    assert outcomes(broken)["gold answers"] is Outcome.REFUTED


def test_first_match_extraction_is_found_out(tmp_path):
    def first_number(example, text):
        found = next((word for word in text.split() if word.strip(".").isdigit()), None)
        right = float(found is not None and found.strip(".") == answers.gold_answer(example.row))
        return Score(right, right, found is not None, found)

    verdicts = outcomes(replace(made("gsm8k", tmp_path, PROBLEMS), score=first_number))
    assert Outcome.REFUTED in (verdicts["gold answers"], verdicts["wrong answers"])


# ---------------------------------------------------------------- single tasks


def test_gsm8k_reads_strictly_and_leniently(tmp_path):
    task = made("gsm8k", tmp_path, PROBLEMS)
    example = task.examples[0]  # 6
    assert task.score(example, "2 + 4 = 6\n#### 6") == Score(1, 1, True, "6")
    assert task.score(example, "#### 6.00").answer == "6"
    assert task.score(example, "So she ends up with 6 figs, I say") == Score(0, 1, False, None)
    assert task.score(example, "#### 6\n#### 7").value == 0


def test_arithmetic_is_made_from_its_seed_alone():
    rows = [[e.row for e in open_task(TaskRequest("arithmetic", limit=50, seed=seed)).examples] for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]
    assert len({row["question"] for row in rows[0]}) > 40
    for row in rows[0]:
        left, sign, right = row["question"].removeprefix("What is ").removesuffix("?").split()
        assert eval(f"{left}{sign.replace('×', '*')}{right}") == int(row["answer"])


@needs_bwrap
def test_a_program_may_not_bring_its_own_helpers_to_the_tests(tmp_path):
    task = made("humaneval", tmp_path, [FUNCTION])
    always_four = "    return 4\n\n\ndef helper(x):\n    return 2\n"  # with a helper that gives 2 back, 4 would do if 6 were not asked for
    no_helper = "    return 2 * x\n\n\ndef helper(x):\n    raise KeyError\n"
    assert [task.score(task.examples[0], text).value for text in (always_four, no_helper)] == [0, 1]


@needs_bwrap
def test_mbpp_reads_one_block_strictly_and_the_last_leniently(tmp_path):
    task = made("mbpp", tmp_path, [SHADOWED])
    right, wrong = f"```python\n{SHADOWED['code']}\n```", "```\ndef sum(n): return 0\n```"
    read = [task.score(task.examples[0], text) for text in (right, f"{wrong}\n{right}", SHADOWED["code"], "no")]
    assert [(score.value, score.lenient, score.parsed) for score in read] == [(1, 1, True), (0, 1, False), (0, 1, False), (0, 0, False)]


def test_counterfact_asks_all_three_kinds(tmp_path):
    task = made("counterfact", tmp_path, [FACT])
    choices = [task.choice(example) for example in task.examples]
    assert [choice.part for choice in choices] == ["efficacy", "paraphrase", "neighbourhood", "neighbourhood"]
    assert choices[0].options == (" France", " Italy")
    assert choices[2].options == (" Italy", " France")
    assert len({choice.unit for choice in choices}) == 1


@pytest.mark.parametrize(("rule", "options", "good", "bad"), [
    ("punctuation:no_comma", {}, "no commas here", "one, two"),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "one two three", "one two"),
    ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 2}, "One.", "One. Two. Three."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***a\n***\nb", "a\n******\nb"),
    ("keywords:existence", {"keywords": ["fig", "ash"]}, "An ash and a Fig.", "figs and ash"),
    ("keywords:forbidden_words", {"forbidden_words": ["fig"]}, "figs", "a fig"),
    ("keywords:frequency", {"relation": "at least", "keyword": "fig", "frequency": 2}, "fig fig", "fig"),
    ("keywords:letter_frequency", {"let_relation": "less than", "letter": "a", "let_frequency": 2}, "a", "a a"),
    ("change_case:english_lowercase", {}, "low", "Low"),
    ("change_case:english_capital", {}, "HIGH", "HIGh"),
    ("change_case:capital_word_frequency", {"capital_relation": "at least", "capital_frequency": 2}, "A B c", "A b c"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\nwords", "<A title>"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a\n* b\n* c"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a*"),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2}, "Section 1\nSection 2", "Section 1"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Hi", "Bye. PS"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye. p. s. Hi", "Bye. P.P.S"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye. P.P.S Hi", "Bye. P.S. Hi"),
    ("startend:quotation", {}, '"quoted"', '"half'),
    ("startend:end_checker", {"end_phrase": "The end."}, "So: the end.", "The end. Or not"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it"}, "Say it: it", "It"),
    ("combination:two_responses", {}, "a\n******\nb", "a ****** a")])
def test_every_instruction_has_a_text_that_follows_it_and_one_that_does_not(rule, options, good, bad):
    assert [graded.follows(graded.RULES[rule], options, text) for text in (good, bad, "")] == [True, False, False]


def test_every_rule_is_tested():
    [mark] = test_every_instruction_has_a_text_that_follows_it_and_one_that_does_not.pytestmark
    assert {case[0] for case in mark.args[1]} == set(graded.RULES)


# ---------------------------------------------------------------- the parts of a task


def test_a_changed_row_another_order_and_another_id_are_other_datasets():
    rows = [{"id": "a", "x": 1}, {"id": "b", "x": 2}]
    digests = [dataset_digest(make_examples(changed)) for changed in
               (rows, rows[::-1], [rows[0], {"id": "b", "x": 3}], [rows[0], {"id": "c", "x": 2}], rows[:1])]
    assert len(set(digests)) == len(digests)
    assert dataset_digest(make_examples([dict(reversed(row.items())) for row in rows])) == digests[0]


def test_a_tie_chooses_nothing_and_length_counts_only_where_it_should():
    choice = MultipleChoice("c", (" a", " bbb"), 1)
    assert score_choice(choice, [Likelihood(-2, 1, 2), Likelihood(-2, 2, 4)]) == {"total": 0, "byte": 1, "token": 1}
    assert score_choice(choice, [Likelihood(-2, 1, 2), Likelihood(-4, 2, 4)]) == {"total": 0, "byte": 0, "token": 0}


def test_a_text_ends_before_the_first_stop():
    assert cut_at_stop("one two three", ["three", " t"]) == "one"
    assert cut_at_stop("one", []) == "one"


def test_a_score_outside_its_range_is_refused():
    with pytest.raises(DataError, match="between 0 and 1"):
        Score(float("nan"), 0, True)


@pytest.mark.parametrize(("name", "rows", "sentence"), [
    ("gsm8k", [{"question": "How many?"}], "neither 'gold' nor 'answer'"), ("gsm8k", [], "no example"),
    ("gsm8k", [{"id": 1, "question": "q", "answer": "1"}] * 2, "stands on two rows"),
    ("choices", [QUESTION | {"answerKey": "7"}], "none of 1, 2"), ("choices", [QUESTION | {"choices": ["one"]}], "two texts or more"),
    ("instructions", [INSTRUCTED | {"instruction_id_list": ["language:response_language"], "kwargs": [{}]}], "no rule here checks"),
    pytest.param("mbpp", [SHADOWED | {"test_list": ["assert max(1, 2) == 2"]}], "nothing that its own solution", marks=needs_bwrap)])
def test_rows_that_cannot_be_used_are_refused_by_name(name, rows, sentence, tmp_path):
    with pytest.raises(DataError, match=sentence):
        made(name, tmp_path, rows)


def test_requests_that_cannot_be_served_are_refused(tmp_path):
    for request, sentence in ((TaskRequest("gsm8"), "did you mean 'gsm8k'"), (TaskRequest("gsm8k"), "needs --data"),
                              (TaskRequest("gsm8k", tmp_path / "x.jsonl", grader="answer"), "has a scoring of its own"),
                              (TaskRequest("graded", tmp_path / "x.jsonl"), "needs --grader")):
        with pytest.raises(UsageError, match=sentence):
            open_task(request)


def test_reasoning_gym_is_an_extra(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys):
    """Without the package, the task, the reward and the verb say how to install it. With it: tests/reward/test_gym.py."""
    gym.open_dataset.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr("assay.reward.reward_functions.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'assay\[gym\]'"):
        parse_rewards(["gym:1"])
    with pytest.raises(UsageError, match="pip install"):
        open_task(TaskRequest("reasoning_gym", grader="chain_sum"))
    assert assay(["data", "gym", "chain_sum", "--out", str(tmp_path / "x.jsonl")]) == 2
    assert "pip install" in capsys.readouterr().err


def test_every_task_says_what_its_data_are_and_a_json_list_will_do(tmp_path):
    assert all(TASKS.values())
    (tmp_path / "data.json").write_text(json.dumps([FACT]))
    assert len(open_task(TaskRequest("counterfact", tmp_path / "data.json")).examples) == 4

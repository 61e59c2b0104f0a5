"""Canaries: completions of known worth: right, wrong, empty, all options at once, repeated, cut off, echoed."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from assay.errors import DataError
from assay.reward.answer import gold_answer, read_answer, read_number, same_answer

AnswerStyle = Literal["tag", "hash", "boxed", "plain"]
CanaryKind = Literal["wrong", "empty", "all_options", "repeated", "truncated", "echo"]
STYLES = {"tag": "<think>{working}</think>\n<answer>{stated}</answer>", "hash": "{working}\n#### {stated}",
          "boxed": "{working}\n\\boxed{{{stated}}}", "plain": "{stated}"}
GOLD_COMPLETION = "gold_completion"  # a column that holds a right completion whole, where an answer alone is none (code, JSON)
KNOW_THE_ANSWER = {"answer", "unit_tests", "gym"}  # the rewards that tell a right answer from a wrong one
REPETITIONS = 3


def gold_completion(row: Mapping[str, Any], style: AnswerStyle) -> str:
    """A right completion: the row's own, or its gold answer as `style` states it, after the row's working where it has one."""
    if GOLD_COMPLETION in row:
        return str(row[GOLD_COMPLETION])
    return _stating(row, gold_answer(row), style)


def canaries(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]], style: AnswerStyle, prompt: str) -> dict[CanaryKind, list[str]]:
    """Completions of each kind that must not get what the gold completion gets. `others` lend answers that are wrong here."""
    gold = gold_completion(row, style)
    made: dict[CanaryKind, list[str]] = {"empty": [""], "repeated": ["\n".join([gold] * REPETITIONS)], "echo": [prompt]}
    if GOLD_COMPLETION in row:
        wrong = [str(other[GOLD_COMPLETION]) for other in others if GOLD_COMPLETION in other and other[GOLD_COMPLETION] != gold][:2]
        all_options = ["\n".join([*wrong, gold])] if wrong else []
        return made | {"wrong": wrong[:1], "truncated": [gold[: len(gold) // 2]], "all_options": all_options}
    right, wrong = gold_answer(row), _wrong_answers(row, others)
    before = len(gold) - len(gold.rpartition(right)[2]) - len(right)  # how much stands in front of the stated answer
    return made | {
        "wrong": [_stating(row, each, style) for each in wrong],
        "empty": ["", _stating(row, "", style)],
        "all_options": [_stating(row, " or ".join([*wrong, right]), style), _stating(row, " or ".join([right, *wrong]), style)],
        "truncated": [text for text in dict.fromkeys((gold[: before or len(right) // 2], gold[: max(gold.rfind("\n", 0, before), 0)]))
                      if not same_answer(read_answer(text), right)],  # a working that is the answer alone is no cut
    }


def _stating(row: Mapping[str, Any], stated: str, style: AnswerStyle) -> str:
    working, marked, _ = str(row.get("answer", "")).rpartition("####")
    return STYLES[style].format(working=working.strip() if marked else "Step by step.", stated=stated)


def _wrong_answers(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """Wrong answers, two of them: neighbours of this row's on the number line, or what is right elsewhere."""
    right = gold_answer(row)
    number = read_number(right)
    if number is not None:
        return [str(number + 1), str(number + 10)]
    elsewhere = (answer for other in others if not same_answer(answer := _gold_or_nothing(other), right) and answer)
    return [*dict.fromkeys(elsewhere), f"not {right}", f"{right}s"][:2]


def _gold_or_nothing(row: Mapping[str, Any]) -> str:
    try:
        return gold_answer(row)
    except DataError:
        return ""

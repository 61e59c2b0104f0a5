"""Graded tasks: instructions that a program can check (IFEval's rules), and any JSONL scored by a reward or a user's function."""

import atexit
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from assay.errors import DataError, UsageError
from assay.evaluation.task import GenerationTask, Score, TaskExample, evenly_spaced, make_examples, text_column
from assay.evaluation.tasks import TaskRequest
from assay.reward.answer import gold_answer, read_number
from assay.reward.canary import GOLD_COMPLETION, KNOW_THE_ANSWER
from assay.reward.reward_functions import parse_rewards, reward_digest
from assay.reward.worker_pool import RewardItem, RewardWorkers
from assay.verdict import Verdict, proven, refuted, unproven

# ---------------------------------------------------------------- graded

GRADERS = 2
CANARY_ROWS = 16
FAR_OFF = 1000  # no tolerance takes three times a number and this much more for the number


def make_graded(request: TaskRequest) -> GenerationTask:
    """The user's file is imported in worker processes, with time-outs, never here. What it cannot tell is an error, not 0."""
    if request.grader is None:
        raise UsageError("task graded needs --grader: the name of a reward, such as answer, or FILE.py:FUNCTION")
    if not 0 < len(rewards := parse_rewards([request.grader])) < 2 or rewards[0].weight != 1:
        raise UsageError(f"--grader {request.grader}: expected one reward, without a weight")
    workers = RewardWorkers(rewards, count=GRADERS)
    atexit.register(workers.close)
    examples = make_examples(request.rows(), request.limit)

    def score(example: TaskExample, text: str) -> Score:
        [found] = workers.score([RewardItem(_graded_prompt(example), text, example.row)])
        if found.value is None:
            raise DataError(f"the grader failed on example {example.id}: {found.error}")
        if not 0 <= found.value <= 1:
            raise DataError(f"the grader gave example {example.id} {found.value}; expected a number from 0 to 1")
        return Score(found.value, found.value, parsed=bool(text.strip()))

    def canaries() -> list[Verdict]:
        looks = rewards[0].file is not None or rewards[0].name in KNOW_THE_ANSWER
        return check_grader(examples, score) if looks else []

    return GenerationTask("graded", examples, _graded_prompt, score, _graded_gold, _graded_wrong, grader=reward_digest(rewards[0]),
                          canaries=canaries)


def _graded_prompt(example: TaskExample) -> str:
    return text_column(example.row, "prompt", "question", "instruction")


def _graded_gold(example: TaskExample) -> str | None:
    """The row's own right text, where it has one: `gold_completion`, or its gold or answer as it stands."""
    return next((str(example.row[name]) for name in (GOLD_COMPLETION, "gold", "answer", "response") if example.row.get(name)), None)


def _graded_wrong(example: TaskExample) -> list[str]:
    """Wrong answers for the grader, which none should pay for: nothing, and the prompt said back."""
    return ["", _graded_prompt(example)]

# ---------------------------------------------------------------- canaries


def check_grader(examples: Sequence[TaskExample], score: Callable[[TaskExample, str], Score]) -> list[Verdict]:
    """GRPO's canaries for a grader: a wrong answer, in the very form of the right one, gets less; and so does a list of several.

    A tolerance may take a near number for right, and some graders take an answer named among others; both are said. Where every
    wrong answer of a row gets what the right one gets, the score says nothing: refuted.
    """
    picked = evenly_spaced([example for example in examples if has_answer(example.row)], CANARY_ROWS)
    tried = [(example, text, wrong) for example in picked if (text := _graded_gold(example))
             and (wrong := wrong_answers(example, text, picked))]
    if not tried:
        return [unproven("grader", "graded: no row has a gold answer that others differ from, so no wrong answer is known; add `gold`")]
    found = [_tried(example, text, wrong, score) for example, text, wrong in tried]
    texts, near = sum(len(wrong) for _, _, wrong in tried), [(one.id, answer) for one in found for answer in one.passed]
    blind, lists = [one for one in found if one.blind], sum(one.lists for one in found)
    evidence = {"rows": len(tried), "texts": texts, "passed": len(near), "blind": len(blind), "lists": lists}
    if any(one.certain for one in blind) or 2 * len(blind) > len(tried):
        first = blind[0]
        return [refuted("grader", f"graded: every wrong answer gets what the right one gets in {len(blind)} of {len(tried)} rows (example "
                        f"{first.id}: {first.passed[-1]!r} for {first.right!r}): a wrong answer would be marked right; mend the grader, or "
                        "take `gold` and `answer` out of the rows where form alone is graded", **evidence)]
    if near or lists:
        said = f"{len(near)} of {texts} wrong answers" + (f" (example {near[0][0]}: {near[0][1]!r})" if near else "")
        return [unproven("grader", f"graded: {said} and {lists} of {len(tried)} lists of several answers get what the right one gets: "
                         "a tolerance or a lenient reading, and a way to score without knowing", **evidence)]
    return [proven("grader", f"graded: {texts} wrong answers and {len(tried)} lists of several get less than the right one", **evidence)]


@dataclass(frozen=True)
class TriedRow:
    """`passed`: the wrong answers that got what the right one gets. `certain`: nothing but the answer stands in the right text."""

    id: str
    right: str
    passed: tuple[str, ...]
    blind: bool
    lists: bool
    certain: bool


def _tried(example: TaskExample, text: str, wrong: Sequence[str], score: Callable[[TaskExample, str], Score]) -> TriedRow:
    due, right = score(example, text).value, gold_answer(example.row)
    passed = tuple(answer for answer in wrong if score(example, stating(example, text, answer)).value >= due)
    several = score(example, stating(example, text, " or ".join([*wrong, right]))).value >= due
    return TriedRow(example.id, right, passed, len(passed) == len(wrong), several, GOLD_COMPLETION not in example.row)


def has_answer(row: Mapping[str, Any]) -> bool:
    """Whether it has a gold answer, not a right text alone."""
    try:
        gold_answer(row)
    except DataError:
        return False
    return True


def wrong_answers(example: TaskExample, text: str, others: Sequence[TaskExample]) -> list[str]:
    """Wrong answers made from a right text: two near numbers and a far one; or what is right elsewhere, unless the one contains the other.
    None where the text does not state the answer in so many words."""
    right = gold_answer(example.row)
    if stating(example, text, "\0") == text:
        return []
    if (number := read_number(right)) is not None:
        return [_decimal(each) for each in (number + 1, number + 10, 3 * abs(number) + FAR_OFF)]
    elsewhere = dict.fromkeys(gold_answer(other.row) for other in others)
    return [each for each in elsewhere if each.lower() not in right.lower() and right.lower() not in each.lower()][:2]


def stating(example: TaskExample, text: str, answer: str) -> str:
    """The right text with another answer wherever it states its own."""
    return re.sub(rf"(?<!\w){re.escape(gold_answer(example.row))}(?!\w)", lambda _: answer, text)


def _decimal(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else f"{float(number):.10g}"

# ---------------------------------------------------------------- instructions

Rule = Callable[[str, Mapping[str, Any]], bool]


def make_instructions(request: TaskRequest) -> GenerationTask:
    """Instruction following by rules that a program can check, under IFEval's names and with its columns."""
    examples = make_examples([{**row, "id": str(row.get("key", number))} for number, row in enumerate(request.rows())], request.limit)
    for example in examples:
        rules_of(example)
    return GenerationTask("instructions", examples, lambda e: text_column(e.row, "prompt"), _score_instructions,
                          gold=lambda e: e.row.get("gold"), wrong=lambda e: ["", " \n"])


def _score_instructions(example: TaskExample, text: str) -> Score:
    """1 where every instruction was followed. Leniently, a first or last line and asterisks may be taken away before."""
    rules = rules_of(example)
    followed = [follows(rule, options, text) for rule, options in rules]
    leniently = [any(follows(rule, options, version) for version in versions(text)) for rule, options in rules]
    return Score(float(all(followed)), float(all(leniently)), bool(text.strip()), measures={"instructions": sum(followed) / len(followed)})


def follows(rule: Rule, options: Mapping[str, Any], text: str) -> bool:
    return bool(text.strip()) and rule(text, options)


def versions(text: str) -> list[str]:
    lines = text.split("\n")
    cut = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
    return [*cut, *(version.replace("*", "") for version in cut)]


def rules_of(example: TaskExample) -> list[tuple[Rule, Mapping[str, Any]]]:
    names, options = example.row.get("instruction_id_list"), example.row.get("kwargs")
    if not isinstance(names, list) or not names or not isinstance(options, list) or len(names) != len(options):
        raise DataError(f"example {example.id}: expected `instruction_id_list` and one `kwargs` for each of its entries")
    unknown = [name for name in names if name not in RULES]
    if unknown:
        raise DataError(f"example {example.id} asks for {unknown[0]!r}, which no rule here checks; leave the row out, or write the rule")
    return [(RULES[name], {k: v for k, v in (given or {}).items() if v is not None}) for name, given in zip(names, options, strict=True)]


# ---------------------------------------------------------------- rules: (text, options) → followed or not


def compared(count: int, options: Mapping[str, Any], number: str) -> bool:
    """IFEval knows two relations: `at least` and `less than`."""
    relation, limit = options.get("relation", "at least"), options[number]
    if relation not in ("at least", "less than"):
        raise DataError(f"the relation {relation!r} is neither 'at least' nor 'less than'")
    return count >= limit if relation == "at least" else count < limit


def is_json(text: str, _: Mapping[str, Any]) -> bool:
    body = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def has_words(text: str, words: list[str]) -> list[bool]:
    return [re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None for word in words]


def paragraphs(text: str, divider: str) -> list[str]:
    return [part for part in re.split(divider, text.strip()) if part.strip()]


def divided(text: str, options: Mapping[str, Any]) -> bool:
    """Whether the text has the asked number of paragraphs between ***; one that is empty between two dividers is none, and not what was
    asked for."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    inner = [index for index, part in enumerate(parts) if part.strip() or 0 < index < len(parts) - 1]
    return all(parts[index].strip() for index in inner) and len(inner) == options["num_paragraphs"]


def postscript(text: str, options: Mapping[str, Any]) -> bool:
    """Whether the text has the postscript, as IFEval looks for it: anywhere, in any case; a space may follow a dot of P.S."""
    spelled = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    return re.search(spelled.get(options["postscript_marker"], re.escape(options["postscript_marker"].lower())), text.lower()) is not None


def sentences(text: str) -> int:
    return len(re.findall(r"[^.!?]*\w[^.!?]*(?:[.!?]+|$)", text))


def capital_words(text: str) -> int:
    return sum(word.isupper() for word in re.findall(r"[^\W\d_]+", text))


def sections(text: str, options: Mapping[str, Any]) -> bool:
    return len(re.findall(rf"{re.escape(options['section_spliter'].strip())}\s*\d+", text)) >= options["num_sections"]


def two_responses(text: str, _: Mapping[str, Any]) -> bool:
    parts = [part.strip() for part in text.split("******") if part.strip()]
    return len(parts) == 2 and parts[0] != parts[1]


RULES: dict[str, Rule] = {
    "punctuation:no_comma": lambda text, o: "," not in text,
    "length_constraints:number_words": lambda text, o: compared(len(re.findall(r"\w+", text)), o, "num_words"),
    "length_constraints:number_sentences": lambda text, o: compared(sentences(text), o, "num_sentences"),
    "length_constraints:number_paragraphs": divided,
    "keywords:existence": lambda text, o: all(has_words(text, o["keywords"])),
    "keywords:forbidden_words": lambda text, o: not any(has_words(text, o["forbidden_words"])),
    "keywords:frequency": lambda text, o: compared(len(re.findall(re.escape(o["keyword"]), text, re.IGNORECASE)), o, "frequency"),
    "keywords:letter_frequency": lambda text, o: compared(
        text.lower().count(o["letter"].lower()), {"relation": o.get("let_relation", "at least"), "n": o["let_frequency"]}, "n"),
    "change_case:english_lowercase": lambda text, o: text.islower(),
    "change_case:english_capital": lambda text, o: text.isupper(),
    "change_case:capital_word_frequency": lambda text, o: compared(
        capital_words(text), {"relation": o.get("capital_relation", "at least"), "n": o["capital_frequency"]}, "n"),
    "detectable_format:json_format": is_json,
    "detectable_format:title": lambda text, o: re.search(r"<<[^\n<>]*\S[^\n<>]*>>", text) is not None,
    "detectable_format:number_bullet_lists": lambda text, o: len(re.findall(r"^\s*[*-]\s+\S", text, re.MULTILINE)) == o["num_bullets"],
    "detectable_format:number_highlighted_sections": lambda text, o: len(re.findall(r"\*[^\n*]+\*", text)) >= o["num_highlights"],
    "detectable_format:multiple_sections": sections,
    "detectable_content:number_placeholders": lambda text, o: len(re.findall(r"\[[^\[\]]+\]", text)) >= o["num_placeholders"],
    "detectable_content:postscript": postscript,
    "startend:quotation": lambda text, o: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "startend:end_checker": lambda text, o: text.strip().strip('"').lower().endswith(o["end_phrase"].strip().lower()),
    "combination:repeat_prompt": lambda text, o: text.strip().lower().startswith(o["prompt_to_repeat"].strip().lower()),
    "combination:two_responses": two_responses,
}

"""Tasks: examples with ids and a digest, the prompt for each, how an answer is scored, and checks of the scoring itself.

Three kinds, after lm-eval's three calls: a `GenerationTask` asks for text, a `MultipleChoiceTask` compares likelihoods of given
texts, a `PerplexityTask` takes the likelihood of whole texts. `loaded_model.py` answers the three calls.

A score is a number or an exception. What was not parsed is scored 0 and counted apart; what went wrong is never a score.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from assay.errors import DataError
from assay.verdict import Verdict, proven, refuted, unproven

ID_COLUMNS = ("id", "task_id", "idx", "case_id")
MOST_ORACLES = 2000  # examples whose gold and wrong texts are scored before a task counts
MOST_SLOW_ORACLES = 48  # where every score waits for a process
_LISTED = 20  # disagreements named in the evidence


@dataclass(frozen=True)
class TaskExample:
    id: str
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """`value` is by the strict reading, `lenient` by the lenient one; both from 0 to 1.

    `answer` is canonical: samples with equal answers are equally right, so that they can vote. None has no vote.
    """

    value: float
    lenient: float
    parsed: bool
    answer: str | None = None
    measures: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not all(math.isfinite(v) and 0 <= v <= 1 for v in (self.value, self.lenient, *self.measures.values())):
            raise DataError(f"a score lies between 0 and 1; found {self.value}, {self.lenient} and {dict(self.measures)}")


@dataclass(frozen=True)
class GenerationTask:
    """`gold` is a text that must score 1, or None where nobody knows one; `wrong` are texts that must score 0."""

    name: str
    examples: tuple[TaskExample, ...]
    prompt: Callable[[TaskExample], str]
    score: Callable[[TaskExample, str], Score]
    gold: Callable[[TaskExample], str | None]
    wrong: Callable[[TaskExample], Sequence[str]]
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    raw: bool = False  # the prompt is a text to be continued, not a message to be answered
    votes: bool = False  # equal answers can be counted, so that the majority has one
    scorers: int = 1  # threads: more where a score waits for a process
    grader: str | None = None  # digest of a grader that is not Assay's own: its scores go with no other's
    canaries: Callable[[], list[Verdict]] = list  # further checks of the scoring, of a task whose grader is not Assay's own
    kind: Literal["generation"] = "generation"


@dataclass(frozen=True)
class MultipleChoice:
    context: str
    options: tuple[str, ...]  # each as it follows the context, spaces included
    right: int
    part: str = ""  # several questions of one example are estimated apart, by this name
    unit: str = ""  # what is independent: questions with the same unit stand or fall together


@dataclass(frozen=True)
class MultipleChoiceTask:
    """`by` is the measure that a headline quotes; all are recorded."""

    name: str
    examples: tuple[TaskExample, ...]
    choice: Callable[[TaskExample], MultipleChoice]
    by: Literal["total", "byte", "token"] = "total"
    kind: Literal["choosing"] = "choosing"


@dataclass(frozen=True)
class PerplexityTask:
    name: str
    examples: tuple[TaskExample, ...]
    text: Callable[[TaskExample], str]
    kind: Literal["reading"] = "reading"


Task = GenerationTask | MultipleChoiceTask | PerplexityTask


@dataclass(frozen=True)
class Likelihood:
    nats: float  # log-probability of the whole text, never above 0
    tokens: int
    bytes: int

    def by(self, unit: Literal["total", "byte", "token"]) -> float:
        return self.nats / {"total": 1, "byte": self.bytes, "token": self.tokens}[unit]


# ---------------------------------------------------------------- examples


def make_examples(rows: Iterable[Mapping[str, Any]], limit: int | None = None) -> tuple[TaskExample, ...]:
    """Ids are the rows' own where every row has one, else their numbers, from 0. `limit`: the first so many."""
    kept = [row for number, row in enumerate(rows) if limit is None or number < limit]
    column = next((name for name in ID_COLUMNS if all(isinstance(row.get(name), str | int) for row in kept)), None)
    ids = [str(number if column is None else row[column]) for number, row in enumerate(kept)]
    if not kept:
        raise DataError("there is no example to evaluate on")
    if len(set(ids)) < len(ids):
        twice = next(id for id in ids if ids.count(id) > 1)
        raise DataError(f"the id {twice!r} stands on two rows; ids tell examples apart, so give each row its own")
    return tuple(TaskExample(id, row) for id, row in zip(ids, kept, strict=True))


def dataset_digest(examples: Sequence[TaskExample]) -> str:
    """sha256 over every id and every row, in order: another row, another order or one changed word is another dataset."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps([example.id, example.row], sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string, as the sampler cuts it."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def text_column(row: Mapping[str, Any], *names: str) -> str:
    """The first of these columns that the row has, as text; an error that names what it has instead."""
    for name in names:
        if isinstance(row.get(name), str) and row[name].strip():
            return row[name]
    raise DataError(f"a row has no text in {' or '.join(map(repr, names))}; it has {', '.join(map(repr, row)) or 'nothing'}")


# ---------------------------------------------------------------- scoring


def score_choice(choice: MultipleChoice, likelihoods: Sequence[Likelihood]) -> dict[str, float]:
    """1 where the right option is the likeliest: by its total, per byte, per token. A tie is wrong: nothing was chosen."""
    found = {}
    for unit in ("total", "byte", "token"):
        values = [likelihood.by(unit) for likelihood in likelihoods]
        found[unit] = float(all(values[choice.right] > v for i, v in enumerate(values) if i != choice.right))
    return found


def score_all(task: GenerationTask, texts: Sequence[tuple[TaskExample, str]]) -> list[Score]:
    if task.scorers == 1:  # a thread would add half as much again to a score that waits for nothing
        return [task.score(*pair) for pair in texts]
    with ThreadPoolExecutor(task.scorers) as pool:
        return list(pool.map(lambda pair: task.score(*pair), texts))


# ---------------------------------------------------------------- oracles


def check_scoring(task: Task) -> list[Verdict]:
    """Whether the scoring can be believed, found out on answers whose worth is known, before any model is asked."""
    if isinstance(task, GenerationTask):
        most = MOST_ORACLES if task.scorers == 1 else MOST_SLOW_ORACLES
        return [*_text_oracles(task, evenly_spaced(task.examples, most)), *task.canaries()]
    return [_choice_oracle(task)] if isinstance(task, MultipleChoiceTask) else [_reading_oracle(task)]


def evenly_spaced(examples: Sequence[TaskExample], most: int) -> list[TaskExample]:
    """At most `most` examples, evenly spaced from the first to the last."""
    step = max(1, math.ceil(len(examples) / most))
    return list(examples[::step])


def _text_oracles(task: GenerationTask, examples: list[TaskExample]) -> list[Verdict]:
    gold = [(e, cut_at_stop(text, task.stop)) for e in examples if (text := task.gold(e)) is not None]
    wrong = [(e, cut_at_stop(text, task.stop)) for e in examples for text in task.wrong(e)]
    if not gold:
        return [unproven("gold answers", f"{task.name}: no row carries a right text, so nothing shows that one would score; add `gold`")]
    scores = score_all(task, gold + wrong)
    right, others = scores[: len(gold)], scores[len(gold):]
    return [_gold_verdict(task, gold, right), _wrong_verdict(task, wrong, others), _reading_verdict(task, gold + wrong, scores, len(gold))]


def _gold_verdict(task: GenerationTask, gold: list[tuple[TaskExample, str]], scores: list[Score]) -> Verdict:
    missed = [e.id for (e, _), score in zip(gold, scores, strict=True) if score.value != 1]
    unparsed = sum(not score.parsed for score in scores) / len(scores)
    evidence = {"texts": len(gold), "missed": missed[:_LISTED], "unparsed": unparsed}
    if missed:
        return refuted("gold answers", f"{task.name}: {len(missed)} of {len(gold)} right texts do not score 1 (first: {missed[0]}; "
                       f"{unparsed:.1%} were not parsed): a right answer would be marked wrong", **evidence)
    return proven("gold answers", f"{task.name}: all {len(gold)} right texts score 1", **evidence)


def _wrong_verdict(task: GenerationTask, wrong: list[tuple[TaskExample, str]], scores: list[Score]) -> Verdict:
    if not wrong:
        return unproven("wrong answers", f"{task.name}: no wrong text is known, so nothing shows that one would fail")
    passed = [(e.id, text) for (e, text), score in zip(wrong, scores, strict=True) if score.value > 0]
    evidence = {"texts": len(wrong), "passed": [{"id": id, "text": text[-500:]} for id, text in passed[:_LISTED]],
                "unparsed": sum(not score.parsed for score in scores) / len(scores),
                "passed_leniently": sum(score.lenient > 0 for score in scores)}
    if passed:
        return refuted("wrong answers", f"{task.name}: {len(passed)} of {len(wrong)} wrong texts score above 0 (first: {passed[0][0]}): "
                       "a wrong answer would be marked right", **evidence)
    return proven("wrong answers", f"{task.name}: none of {len(wrong)} wrong texts scores", **evidence)


def _reading_verdict(task: GenerationTask, texts: list[tuple[TaskExample, str]], scores: list[Score], golds: int) -> Verdict:
    """Strict and lenient reading side by side. They may part on wrong texts, which is why both are shown; never on right ones."""
    apart = [i for i, score in enumerate(scores) if score.value != score.lenient]
    shown = [{"id": texts[i][0].id, "text": texts[i][1][-500:], "strict": scores[i].value, "lenient": scores[i].lenient}
             for i in apart[:_LISTED]]
    evidence = {"texts": len(texts), "disagreements": len(apart), "listed": shown}
    on_gold = sum(i < golds for i in apart)
    if on_gold:
        return refuted("two readings", f"{task.name}: strict and lenient reading differ on {on_gold} of {golds} right texts", **evidence)
    return proven("two readings", f"{task.name}: strict and lenient reading agree on all {golds} right texts, "
                  f"and differ on {len(apart)} of {len(texts) - golds} wrong ones", **evidence)


def _choice_oracle(task: MultipleChoiceTask) -> Verdict:
    """A stand-in that finds the right option likeliest must score 1 by every measure, one that finds it least likely 0."""
    missed = []
    for example in task.examples:
        choice = task.choice(example)
        for believed, due in ((0.0, 1.0), (-1e6, 0.0)):
            stand_in = [Likelihood(believed if i == choice.right else -1000.0, max(len(o), 1), max(len(o.encode()), 1))
                        for i, o in enumerate(choice.options)]
            if set(score_choice(choice, stand_in).values()) != {due}:
                missed.append(example.id)
    if missed:
        return refuted("gold answers", f"{task.name}: the right option is not scored as it should be on {len(missed)} examples "
                       f"(first: {missed[0]})", missed=missed[:_LISTED])
    return proven("gold answers", f"{task.name}: choosing the right option scores 1 and any other 0 on all {len(task.examples)} examples")


def _reading_oracle(task: PerplexityTask) -> Verdict:
    empty = [example.id for example in task.examples if not task.text(example)]
    if empty:
        return refuted("gold answers", f"{task.name}: {len(empty)} texts are empty (first: {empty[0]}): no bits per byte")
    return proven("gold answers", f"{task.name}: all {len(task.examples)} texts have bytes to be predicted")

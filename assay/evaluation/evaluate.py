"""Evaluation of a model on a task: scoring checks first, then samples or likelihoods, part by part, each kept on disk.

Parts are the same however often the evaluation was interrupted, so on one machine a killed one ends with the same bytes.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.errors import GuardStop, UsageError
from assay.evaluation import recount, soundness, summary
from assay.evaluation.eval_folder import EvalFolder
from assay.evaluation.eval_witness import witness_evaluation
from assay.evaluation.loaded_model import LoadedModel, prompt_token_ids
from assay.evaluation.task import (
    GenerationTask,
    MultipleChoiceTask,
    PerplexityTask,
    Score,
    Task,
    TaskExample,
    check_scoring,
    dataset_digest,
    score_all,
    score_choice,
)
from assay.generate.generation_request import Completion, Sampling
from assay.reward.known_readings import check_readings
from assay.statistics.estimate import Estimate
from assay.statistics.known_answers import check_statistics
from assay.store.digests import code_digest, environment
from assay.verdict import Outcome, Verdict

COMPLETIONS_PER_PART = {"cuda": 4096, "cpu": 128}  # completions in one part: a kill costs at most so many
EXAMPLES_PER_PART = 256  # of a task without sampling, in one part
_LISTED = 50  # disagreements kept in the summary

EvalProgress = Callable[[int, int], None]  # (examples done, of all)


class Unsound(GuardStop):
    """Error of an evaluation whose soundness was refuted: the scores would not mean what they say, so none are given."""

    def __init__(self, verdict: Verdict):
        super().__init__(f"nothing is concluded: {verdict.reason}")
        self.verdict = verdict


@dataclass(frozen=True)
class Evaluation:
    estimates: dict[str, Estimate]
    verdicts: list[Verdict]
    disagreements: list[dict[str, Any]]  # samples on which the strict and the lenient reading differ
    rows: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {"estimates": {name: asdict(estimate) for name, estimate in self.estimates.items()},
                "verdicts": [verdict.to_json() for verdict in self.verdicts], "disagreements": len(self.disagreements)}


@dataclass(frozen=True)
class EvalSetup:
    """Setup of one evaluation: `texts` are the prompts by example, `raw` leaves the chat template out."""

    loaded: LoadedModel
    task: Task
    texts: dict[str, str]
    k: int
    sampling: Sampling
    raw: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its completion."""
        return max(self.loaded.length_of(text, raw=self.raw) for text in self.texts.values()) + self.sampling.max_new


def evaluate(loaded: LoadedModel, task: Task, folder: Path, *, k: int = 1, sampling: Sampling | None = None, raw: bool = False,
             trained_on: Iterable[str] = (), progress: EvalProgress = lambda done, of: None,
             asked: Mapping[str, Any] | None = None) -> Evaluation:
    """`raw` leaves the chat template out. `trained_on` are texts that the model was trained on, looked through for the examples. `asked`
    are the options of the command, by which the witness makes a few examples again; without them it is not asked."""
    sampling = sampling or Sampling()
    refuse_unsound_request(task, k, sampling)
    training = list(trained_on)  # read before anything is paid for
    # A task that repeats itself, or whose own gold texts do not score, says nothing about a model.
    verdicts = stop_if_unsound([soundness.check_question_copies(task), *check_scoring(task)])
    texts = {example.id: _asked(task, example) for example in task.examples}
    setup = EvalSetup(loaded, task, texts, k, sampling, raw or not isinstance(task, GenerationTask) or task.raw)
    verdicts += _before(setup)
    if isinstance(task, GenerationTask):
        loaded.require_room(setup.longest)
    results = EvalFolder(folder, _request(setup))
    try:
        for done, rows in _parts(setup, results.rows):
            results.append({**row, "checkpoint": loaded.identity, "dataset": results.request["dataset"]} for row in rows)
            progress(done, len(task.examples))
        rows = [results.rows[example.id] for example in task.examples if example.id in results.rows]
        verdicts += _after(setup, rows, results.request["dataset"])
        verdicts += [soundness.check_leak(task.examples, training)] if training else []
        verdicts += stop_if_unsound(witness_evaluation(folder, loaded, texts, asked, raw=setup.raw)) if asked is not None else []
        figures = summary.summarise(task, rows, k)
        verdicts += stop_if_unsound([recount.check_figures(rows, figures, votes=task.votes)]) if isinstance(task, GenerationTask) else []
        found = Evaluation(figures, verdicts, summary.sample_disagreements(rows), rows)
        results.finish({"path": str(loaded.artifact.path), **found.to_json(), "disagreements_listed": found.disagreements[:_LISTED],
                        "code": code_digest(), "environment": environment()})
        due = {"task": task.name, "examples": len(task.examples), "checkpoint": loaded.identity}
        read_back = recount.check_read_back(folder, rows, figures, due | ({"k": k} if isinstance(task, GenerationTask) else {}))
        if read_back.outcome is Outcome.REFUTED:
            results.withdraw()
        stop_if_unsound([read_back])
        results.require_summary()
    finally:
        results.close()
    return found


def refuse_unsound_request(task: Task, k: int, sampling: Sampling) -> None:
    if k < 1 or (k > 1 and (sampling.temperature == 0 or not isinstance(task, GenerationTask))):
        raise UsageError(f"-k {k}: expected at least 1, and more only of a task that samples, at a temperature above 0")
    if len(task.examples) < 2:
        raise UsageError(f"{task.name}: one example alone shows no spread, so no interval can be given; evaluate on 2 or more")


# ---------------------------------------------------------------- before and after


def stop_if_unsound(verdicts: list[Verdict]) -> list[Verdict]:
    for verdict in verdicts:
        if verdict.outcome is Outcome.REFUTED:
            raise Unsound(verdict)
    return verdicts


def _before(setup: EvalSetup) -> list[Verdict]:
    loaded, some = setup.loaded, list(setup.texts.values())[:3]
    first = prompt_token_ids(loaded.tokenizer, some[0], raw=setup.raw)[: loaded.model.config.max_length]
    return stop_if_unsound([soundness.check_text_start(loaded, some), soundness.check_repeatable(loaded.model, first), check_statistics(),
                            check_readings(), *soundness.check_recorded_answers(loaded)])


def _after(setup: EvalSetup, rows: Sequence[Mapping[str, Any]], dataset: str) -> list[Verdict]:
    verdicts = [soundness.check_complete(setup.task, rows, setup.k), soundness.check_dataset(dataset, setup.task.examples)]
    if isinstance(setup.task, GenerationTask):
        verdicts.append(soundness.check_sample_seeds(rows, setup.sampling.temperature))
        verdicts.append(soundness.check_draws(setup.loaded, rows, setup.sampling, raw=setup.raw))
        verdicts.append(recount.check_sample_endings(rows, setup.loaded.artifact.stops.stop_ids, setup.sampling.max_new))
        verdicts.append(soundness.check_rescored(setup.loaded, rows, setup.sampling, raw=setup.raw))
    if setup.k > 1:
        verdicts.append(soundness.check_pass_at_k(summary.pass_at_k))
    return stop_if_unsound(verdicts)


def _request(setup: EvalSetup) -> dict[str, Any]:
    """Request of an evaluation: all that the scores depend on. The path of the model is not among it: a moved folder is the same model."""
    loaded, task, weight = setup.loaded, setup.task, setup.loaded.model.embed.weight
    prompts = hashlib.sha256("\0".join(setup.texts.values()).encode("utf-8", "backslashreplace")).hexdigest()
    request = {"task": task.name, "dataset": dataset_digest(task.examples), "examples": len(task.examples), "checkpoint": loaded.identity,
               "tokenizer": loaded.tokenizer.digest, "template": loaded.tokenizer.template_digest, "prompts": prompts,
               "device": weight.device.type, "dtype": str(weight.dtype).removeprefix("torch.")}
    if isinstance(task, GenerationTask):
        request |= {"k": setup.k, "sampling": asdict(setup.sampling), "stop": list(task.stop), "raw": setup.raw}
        request |= {"grader": task.grader} if task.grader is not None else {}
    return request


# ---------------------------------------------------------------- parts


def _parts(setup: EvalSetup, done: Mapping[str, Any]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(examples done, the new rows) of every part that is not done yet. A part that was begun is done again, whole."""
    loaded, task, reserved = setup.loaded, setup.task, False
    members = COMPLETIONS_PER_PART[loaded.model.embed.weight.device.type]
    size = max(1, members // setup.k) if isinstance(task, GenerationTask) else EXAMPLES_PER_PART
    for start in range(0, len(task.examples), size):
        part = task.examples[start : start + size]
        if all(example.id in done for example in part):
            continue
        if isinstance(task, GenerationTask) and not reserved:
            loaded.reserve(setup.longest, min(size, len(task.examples)) * setup.k)
            reserved = True
        yield start + len(part), [row for row in _scored(setup, part) if row["id"] not in done]


def _scored(setup: EvalSetup, part: Sequence[TaskExample]) -> list[dict[str, Any]]:
    loaded, task = setup.loaded, setup.task
    if isinstance(task, GenerationTask):
        return _sampled(setup, task, part)
    return _chosen(loaded, task, part) if isinstance(task, MultipleChoiceTask) else _read(loaded, task, part)


def _sampled(setup: EvalSetup, task: GenerationTask, part: Sequence[TaskExample]) -> list[dict[str, Any]]:
    loaded, sampling, texts = setup.loaded, setup.sampling, setup.texts
    completions = loaded.generate_until({e.id: texts[e.id] for e in part}, sampling, k=setup.k, stop=task.stop, raw=setup.raw)
    pairs = [(e, completion.text or "") for e in part for completion in completions[e.id]]
    scores = iter(score_all(task, pairs))
    rows = []
    for example in part:
        samples = [{"seed": loaded.seed_of(sampling, example.id, m), **_said(completion), **_score(next(scores))}
                   for m, completion in enumerate(completions[example.id])]
        rows.append({"id": example.id, "prompt": texts[example.id], "samples": samples})
    return rows


def _said(completion: Completion) -> dict[str, Any]:
    return {"ids": list(completion.ids), "text": completion.text, "ended": completion.ended, "logprob": sum(completion.logprobs)}


def _score(score: Score) -> dict[str, Any]:
    return {"score": score.value, "lenient": score.lenient, "parsed": score.parsed, "answer": score.answer,
            "measures": dict(score.measures)}


def _chosen(loaded: LoadedModel, task: MultipleChoiceTask, part: Sequence[TaskExample]) -> list[dict[str, Any]]:
    choices = [task.choice(example) for example in part]
    found = iter(loaded.loglikelihood([(choice.context, option) for choice in choices for option in choice.options]))
    rows = []
    for example, choice in zip(part, choices, strict=True):
        likelihoods = [next(found) for _ in choice.options]
        rows.append({"id": example.id, "prompt": choice.context, "options": list(choice.options), "right": choice.right,
                     "part": choice.part, "unit": choice.unit, "nats": [each.nats for each in likelihoods],
                     "tokens": [each.tokens for each in likelihoods], "scores": score_choice(choice, likelihoods)})
    return rows


def _read(loaded: LoadedModel, task: PerplexityTask, part: Sequence[TaskExample]) -> list[dict[str, Any]]:
    found = loaded.loglikelihood_rolling([task.text(example) for example in part])
    return [{"id": example.id, **asdict(likelihood)} for example, likelihood in zip(part, found, strict=True)]


def _asked(task: Task, example: TaskExample) -> str:
    if isinstance(task, GenerationTask):
        return task.prompt(example)
    return task.choice(example).context if isinstance(task, MultipleChoiceTask) else task.text(example)

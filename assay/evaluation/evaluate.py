"""Evaluation of a model on a task: scoring checks first, then samples or likelihoods, part by part, each kept on disk.

Parts are the same however often the evaluation was interrupted, so on one machine a killed one ends with the same bytes.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.errors import GuardStop, UsageError
from assay.evaluation import soundness, summary
from assay.evaluation.eval_folder import EvalFolder
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
from assay.statistics.estimate import Estimate
from assay.store.digests import code_digest, environment
from assay.verdict import Outcome, Verdict

COMPLETIONS_PER_PART = {"cuda": 4096, "cpu": 128}  # completions in one part: a kill costs at most so many
EXAMPLES_PER_PART = 256  # of a task without sampling, in one part
_LISTED = 50  # disagreements kept in the summary

EvalProgress = Callable[[int, int], None]  # (examples done, of all)


class Unsound(GuardStop):
    """What was refuted: the scores would not mean what they say, so none are given."""

    def __init__(self, verdict: Verdict):
        super().__init__(f"nothing is concluded: {verdict.reason}")
        self.verdict = verdict


@dataclass(frozen=True)
class Evaluation:
    estimates: dict[str, Estimate]
    verdicts: list[Verdict]
    apart: list[dict[str, Any]]  # samples on which the strict and the lenient reading differ
    rows: list[dict[str, Any]]


def evaluate(opened: LoadedModel, task: Task, folder: Path, *, k: int = 1, sampling: Sampling | None = None, raw: bool = False,
             trained_on: Iterable[str] = (), said: EvalProgress = lambda done, of: None) -> Evaluation:
    """`raw` leaves the chat template out. `trained_on` are texts that the model was trained on, looked through for the examples."""
    sampling = sampling or Sampling()
    if k < 1 or (k > 1 and (sampling.temperature == 0 or not isinstance(task, GenerationTask))):
        raise UsageError(f"-k {k}: expected at least 1, and more only of a task that samples, at a temperature above 0")
    if len(task.examples) < 2:
        raise UsageError(f"{task.name}: one example alone shows no spread, so no interval can be given; evaluate on 2 or more")
    training = list(trained_on)  # read before anything is paid for
    verdicts = stop_if_unsound(check_scoring(task))  # a task whose own gold texts do not score says nothing about a model
    texts = {example.id: _asked(task, example) for example in task.examples}
    raw = raw or not isinstance(task, GenerationTask) or task.raw
    verdicts += _before(opened, texts, raw)
    if isinstance(task, GenerationTask):
        opened.require_room(_longest(opened, texts, raw) + sampling.max_new)
    results = EvalFolder(folder, _request(opened, task, texts, k, sampling, raw))
    try:
        for part, rows in _parts(opened, task, texts, k, sampling, raw, results.rows):
            results.append(_named(row, opened, results.request) for row in rows)
            said(part, len(task.examples))
        rows = [results.rows[example.id] for example in task.examples if example.id in results.rows]
        verdicts += _after(task, rows, k, sampling, results.request["dataset"])
        verdicts += [soundness.check_leak(task.examples, training)] if training else []
        found = Evaluation(summary.summarise(task, rows, k), verdicts, summary.sample_disagreements(rows), rows)
        results.finish(_summary(opened, found))
    finally:
        results.close()
    return found


# ---------------------------------------------------------------- before and after


def stop_if_unsound(verdicts: list[Verdict]) -> list[Verdict]:
    for verdict in verdicts:
        if verdict.outcome is Outcome.REFUTED:
            raise Unsound(verdict)
    return verdicts


def _before(opened: LoadedModel, texts: Mapping[str, str], raw: bool) -> list[Verdict]:
    some = list(texts.values())[:3]
    first = prompt_token_ids(opened.tokenizer, some[0], raw=raw)[: opened.model.config.max_length]
    return stop_if_unsound([soundness.check_text_start(opened, some), soundness.check_repeatable(opened.model, first)])


def _after(task: Task, rows: Sequence[Mapping[str, Any]], k: int, sampling: Sampling, dataset: str) -> list[Verdict]:
    verdicts = [soundness.check_complete(task, rows, k), soundness.check_dataset(dataset, task.examples)]
    if isinstance(task, GenerationTask):
        verdicts.append(soundness.check_sample_seeds(rows, sampling.temperature))
    if k > 1:
        verdicts.append(soundness.check_pass_at_k(summary.pass_at_k))
    return stop_if_unsound(verdicts)


def _request(opened: LoadedModel, task: Task, texts: Mapping[str, str], k: int, sampling: Sampling, raw: bool) -> dict[str, Any]:
    """All that the scores depend on. The path of the model is not among it: a moved folder is the same model."""
    weight = opened.model.embed.weight
    prompts = hashlib.sha256("\0".join(texts.values()).encode("utf-8", "backslashreplace")).hexdigest()
    asked = {"k": k, "sampling": asdict(sampling), "stop": list(task.stop), "raw": raw} if isinstance(task, GenerationTask) else {}
    return {"task": task.name, "dataset": dataset_digest(task.examples), "examples": len(task.examples), "checkpoint": opened.identity,
            "tokenizer": opened.tokenizer.digest, "template": opened.tokenizer.template_digest, "prompts": prompts,
            "device": weight.device.type, "dtype": str(weight.dtype).removeprefix("torch."), **asked}


def _summary(opened: LoadedModel, found: Evaluation) -> dict[str, Any]:
    return {"path": str(opened.artifact.path), "estimates": {name: asdict(estimate) for name, estimate in found.estimates.items()},
            "verdicts": [verdict.to_json() for verdict in found.verdicts], "disagreements": len(found.apart),
            "disagreements_listed": found.apart[:_LISTED], "code": code_digest(), "environment": environment()}


def _named(row: dict[str, Any], opened: LoadedModel, request: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "checkpoint": opened.identity, "dataset": request["dataset"]}


# ---------------------------------------------------------------- parts


def _parts(opened: LoadedModel, task: Task, texts: Mapping[str, str], k: int, sampling: Sampling, raw: bool,
           done: Mapping[str, Any]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(examples done, the new rows) of every part that is not done yet. A part that was begun is done again, whole."""
    members = COMPLETIONS_PER_PART[opened.model.embed.weight.device.type]
    size = max(1, members // k) if isinstance(task, GenerationTask) else EXAMPLES_PER_PART
    reserved = False
    for start in range(0, len(task.examples), size):
        part = task.examples[start : start + size]
        if all(example.id in done for example in part):
            continue
        if isinstance(task, GenerationTask) and not reserved:
            opened.reserve(_longest(opened, texts, raw) + sampling.max_new, min(size, len(task.examples)) * k)
            reserved = True
        yield start + len(part), [row for row in _scored(opened, task, part, texts, k, sampling, raw) if row["id"] not in done]


def _longest(opened: LoadedModel, texts: Mapping[str, str], raw: bool) -> int:
    return max(opened.length_of(text, raw=raw) for text in texts.values())


def _scored(opened: LoadedModel, task: Task, part: Sequence[TaskExample], texts: Mapping[str, str], k: int, sampling: Sampling,
            raw: bool) -> list[dict[str, Any]]:
    if isinstance(task, GenerationTask):
        return _sampled(opened, task, part, texts, k, sampling, raw)
    return _chosen(opened, task, part) if isinstance(task, MultipleChoiceTask) else _read(opened, task, part)


def _sampled(opened: LoadedModel, task: GenerationTask, part: Sequence[TaskExample], texts: Mapping[str, str], k: int, sampling: Sampling,
             raw: bool) -> list[dict[str, Any]]:
    completions = opened.generate_until({e.id: texts[e.id] for e in part}, sampling, k=k, stop=task.stop, raw=raw)
    pairs = [(e, completion.text or "") for e in part for completion in completions[e.id]]
    scores = iter(score_all(task, pairs))
    rows = []
    for example in part:
        samples = [{"seed": opened.seed_of(sampling, example.id, m), **_said(completion), **_score(next(scores))}
                   for m, completion in enumerate(completions[example.id])]
        rows.append({"id": example.id, "prompt": texts[example.id], "samples": samples})
    return rows


def _said(completion: Completion) -> dict[str, Any]:
    return {"ids": list(completion.ids), "text": completion.text, "ended": completion.ended, "logprob": sum(completion.logprobs)}


def _score(score: Score) -> dict[str, Any]:
    return {"score": score.value, "lenient": score.lenient, "parsed": score.parsed, "answer": score.answer,
            "measures": dict(score.measures)}


def _chosen(opened: LoadedModel, task: MultipleChoiceTask, part: Sequence[TaskExample]) -> list[dict[str, Any]]:
    choices = [task.choice(example) for example in part]
    found = iter(opened.loglikelihood([(choice.context, option) for choice in choices for option in choice.options]))
    rows = []
    for example, choice in zip(part, choices, strict=True):
        likelihoods = [next(found) for _ in choice.options]
        rows.append({"id": example.id, "prompt": choice.context, "options": list(choice.options), "right": choice.right,
                     "part": choice.part, "unit": choice.unit, "nats": [each.nats for each in likelihoods],
                     "tokens": [each.tokens for each in likelihoods], "scores": score_choice(choice, likelihoods)})
    return rows


def _read(opened: LoadedModel, task: PerplexityTask, part: Sequence[TaskExample]) -> list[dict[str, Any]]:
    found = opened.loglikelihood_rolling([task.text(example) for example in part])
    return [{"id": example.id, **asdict(likelihood)} for example, likelihood in zip(part, found, strict=True)]


def _asked(task: Task, example: TaskExample) -> str:
    if isinstance(task, GenerationTask):
        return task.prompt(example)
    return task.choice(example).context if isinstance(task, MultipleChoiceTask) else task.text(example)

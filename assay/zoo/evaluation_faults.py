"""Evaluation faults: graders, stop strings, BOS, dropout, lost examples, seeds, pass@k, data that changed or leaked; and what only the
witness sees, since the evaluation's own checks share the function that is wrong."""

import contextlib
import functools
import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.evaluation import evaluate as evaluating
from assay.evaluation import loaded_model, summary
from assay.evaluation.eval_witness import keep_eval_record
from assay.evaluation.evaluate import Unsound, evaluate
from assay.evaluation.loaded_model import LoadedModel
from assay.evaluation.soundness import check_dataset, check_pass_at_k
from assay.evaluation.task import GenerationTask, TaskExample, check_scoring
from assay.evaluation.tasks import TaskRequest, answers, open_task
from assay.generate.engine import ActiveCompletion, Engine
from assay.generate.generation_request import Sampling
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.reward import answer as answer_reading
from assay.reward.known_readings import check_readings
from assay.seeds import generator
from assay.statistics import estimate
from assay.statistics.estimate import pass_at_k
from assay.statistics.known_answers import check_statistics
from assay.store.artifact import build_model, open_artifact
from assay.testing import tiny_training
from assay.testing.fault_injection import Plant, fault, in_place_of, nothing, on_disk, swap, together
from assay.testing.tiny_models import forget_manifest, nudge, save_model, tiny_model, tiny_tokenizer
from assay.verdict import Verdict
from assay.witness.due_evaluation import judge_evaluation

_ROWS = [{"question": f"Ann has {n} figs and buys {2 * n} more. How many figs has she then, all in all?",
         "answer": f"She has {n} + {2 * n} = {3 * n} figs.\n#### {3 * n}"} for n in range(2, 10)]
WARM = Sampling(max_new=8, temperature=1.0)
_SAMPLES = 3

# ---------------------------------------------------------------- jobs


def oracles_of_a_task(folder: Path, plant: Plant) -> list[Verdict]:
    data = write_examples(folder / "test.jsonl", _ROWS)
    with plant(folder):
        return check_scoring(open_task(TaskRequest("gsm8k", data)))


def an_evaluation(folder: Path, plant: Plant, sampling: Sampling = WARM, k: int = _SAMPLES, moved: float = 0.0) -> list[Verdict]:
    """A tiny model whose tokenizer begins every text with a token of its own."""
    data = write_examples(folder / "test.jsonl", _ROWS)
    training = write_examples(folder / "train.jsonl", [{"text": "Figs ripen late. " * 9}])
    save_model(folder / "model", nudge(tiny_model(), moved), tokenizer=with_bos())
    with plant(folder):
        opened, task = LoadedModel(open_artifact(folder / "model")), open_task(TaskRequest("gsm8k", data))
        try:
            return evaluate(opened, task, folder / "out", k=k, sampling=sampling, raw=True, trained_on=[training.read_text()]).verdicts
        except Unsound as found:
            return [found.verdict]


def a_greedy_evaluation(folder: Path, plant: Plant) -> list[Verdict]:
    """Nothing is drawn, so that no statistic of draws can tell. In a fresh model the words before hardly matter; in this one they do."""
    return an_evaluation(folder, plant, Sampling(max_new=8, temperature=0.0), 1, moved=0.3)


def a_witnessed_evaluation(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: an evaluation whose kept examples are rescored by the witness, whatever its own checks say."""
    return list(clean_witness()) if plant is nothing else _witnessed_evaluation(folder, plant)


@functools.cache
def clean_witness() -> list[Verdict]:
    """Verdicts of the clean twin, once for all faults that the witness alone sees."""
    folder = tiny_training.process_folder() / "witnessed-evaluation"
    folder.mkdir()
    return _witnessed_evaluation(folder, nothing)


def _witnessed_evaluation(folder: Path, plant: Plant) -> list[Verdict]:
    write_witnessed_evaluation(folder, plant)
    return judge_evaluation(folder / "out")


def write_witnessed_evaluation(folder: Path, plant: Plant = nothing) -> None:
    """An evaluation whose own checks stop nothing, with what is kept of it for the witness."""
    data = write_examples(folder / "test.jsonl", _ROWS)
    save_model(folder / "model", nudge(tiny_model(max_length=512), 0.3))
    forget_manifest(folder / "model")  # which knows what the live model answered
    sampling = Sampling(max_new=12, temperature=1.0)
    asked = {"task": "gsm8k", "data": str(data), "limit": 6, "seed": 0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "raw": False,
             "dtype": None, "max_new_tokens": sampling.max_new, "witness": 6}
    with plant(folder):
        opened, task = LoadedModel(open_artifact(folder / "model")), open_task(TaskRequest("gsm8k", data, 6))
        with contextlib.suppress(Unsound):
            evaluate(opened, task, folder / "out", k=4, sampling=sampling)
        assert isinstance(task, GenerationTask)
        keep_eval_record(folder / "out", opened, {example.id: task.prompt(example) for example in task.examples}, asked, raw=False)


def two_evaluations(folder: Path, plant: Plant) -> list[Verdict]:
    """The second is compared with the first one's record of what it was asked."""
    data = write_examples(folder / "test.jsonl", _ROWS)
    an_evaluation(folder, nothing)
    recorded = json.loads((folder / "out" / "eval.json").read_text())["dataset"]
    with plant(folder):
        return [check_dataset(recorded, open_task(TaskRequest("gsm8k", data)).examples)]


def intervals(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [check_statistics()]


def readings_of_answers(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [check_readings()]


def an_estimator(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [check_pass_at_k(summary.pass_at_k)]


def write_examples(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def with_bos() -> Tokenizer:
    tokenizer = tiny_tokenizer(template=False)
    begin = {"id": "<|endoftext|>", "type_id": 0}
    added = {"type": "TemplateProcessing", "single": [{"SpecialToken": begin}, {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
             "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}}
    return Tokenizer.from_parts({**tokenizer.document, "post_processor": added}, bos_token="<|endoftext|>", eos_token="<|endoftext|>")

# ---------------------------------------------------------------- faults of the scoring


@fault("stop string taken letter by letter", rows=("E04",), stage="eval", check="gold answers", job=oracles_of_a_task)
@in_place_of(answers, "number_problems")
def stop_by_letters(usual: Any, name: str, examples: tuple[TaskExample, ...]) -> GenerationTask:
    """A stop string was passed where a list of them belongs, so every text ends at the first of its letters."""
    return replace(usual(name, examples), stop=tuple("She says:"))


@fault("first number taken for the answer", rows=("E05",), stage="eval", check="wrong answers", job=oracles_of_a_task)
@in_place_of(answers, "read_answer")
def first_number(_: Any, text: str, how: str) -> str | None:
    """What is echoed or tried first is scored, not what is answered."""
    found = re.search(r"\d+", text)
    return found and found[0]


fault("intervals that know nothing of what was not seen", rows=(), stage="eval", check="statistics", job=intervals)(
    lambda _: swap(estimate, "_unseen_variance", lambda rate, units: 0.0))

fault("a lenient reading that takes the whole statement", rows=(), stage="eval", check="readings", job=readings_of_answers)(
    lambda _: swap(answer_reading, "_leniently", lambda stated: stated or None))

fault("grader that always says yes", rows=(), stage="eval", check="wrong answers", job=oracles_of_a_task)(
    lambda _: swap(answers, "same_answer", lambda answer, gold: True))

# ---------------------------------------------------------------- faults of the model's side


fault("beginning of text missing", rows=("E03",), stage="eval", check="beginning", job=an_evaluation)(
    # One path to the model adds the token that begins a text, the other does not.
    lambda _: swap(loaded_model, "prompt_token_ids", lambda tokenizer, text, *, raw: tuple(tokenizer.encode(text))))


@fault("dropout while evaluating", rows=("E01",), stage="eval", check="repeatable", job=an_evaluation)
def dropout_on(_: Path) -> AbstractContextManager[None]:
    whole, chance = Transformer.hidden, generator(0, "dropout")

    def hidden(model: Transformer, *args: Any, **options: Any) -> Tensor:
        states = whole(model, *args, **options)
        return states * (torch.rand(states.shape, generator=chance) > 0.05)

    return swap(Transformer, "hidden", hidden)


fault("evaluated in training mode", rows=("E02",), stage="eval", check="repeatable", job=an_evaluation)(
    lambda _: swap(loaded_model, "build_model", lambda *args, **options: build_model(*args, **options).train()))
fault("seeds that do not reach the sampler", rows=(), stage="eval", check="seeds", job=an_evaluation)(
    # Sixteen samples of a problem are one sample sixteen times, and pass@16 is pass@1.
    lambda _: swap(ActiveCompletion, "key", property(lambda tenant: 7)))


@fault("slot that keeps another prompt", rows=("R06",), stage="eval", check="rescored", job=a_greedy_evaluation)
def slot_that_keeps_another_prompt(_: Path) -> AbstractContextManager[None]:
    """Two slots serve eight prompts; the keys and values of the first ones stay."""
    fill = Engine._fill_prefixes
    return together(swap(loaded_model, "SLOTS_ON_CPU", 2), swap(
        Engine, "_fill_prefixes", lambda engine, wanted: None if any(engine._prefixes) else fill(engine, wanted)))


@fault("prompt cut from the left", rows=("N36",), stage="eval", check="rescored", job=a_greedy_evaluation)
@in_place_of(Engine, "submit")
def cut_prompt(usual: Any, engine: Engine, request: Any) -> Any:
    """Context and new tokens are more than the model holds; with a warning, the question goes and its last token stays."""
    return usual(engine, replace(request, prompt=request.prompt[-1:]))


@fault("cut off, and said to have stopped", rows=("E04",), stage="eval", check="endings", job=an_evaluation)
@in_place_of(evaluating, "_sampled")
def said_to_have_stopped(usual: Any, *args: Any) -> list[dict[str, Any]]:
    """The share of texts that end looks healthy, and is nobody's."""
    return [row | {"samples": [sample | {"ended": "stop"} for sample in row["samples"]]} for row in usual(*args)]


@fault("failed examples left out of the mean", rows=("E06",), stage="eval", check="every example", job=an_evaluation)
@in_place_of(evaluating, "_sampled")
def left_out(usual: Any, *args: Any) -> list[dict[str, Any]]:
    return [row for row in usual(*args) if int(row["id"]) % 3]

# ---------------------------------------------------------------- faults of the data and of the sums


fault("one question in four copies", rows=("D20",), stage="data", check="copies", job=an_evaluation)(
    # Eight examples look like eight, and two are asked: the interval is half as wide as it should be.
    on_disk(lambda folder: write_examples(folder / "test.jsonl", _ROWS[:2] * 4)))
fault("a token counted that was never drawn", rows=(), stage="eval", check="figures", job=an_evaluation)(
    in_place_of(summary, "clustered")(lambda usual, values, owner: usual([value + 1 for value in values], owner)))
fault("one row of the dataset changed", rows=("D20",), stage="eval", check="dataset", job=two_evaluations)(
    # The file under the same name is another one on the other machine.
    on_disk(lambda folder: write_examples(folder / "test.jsonl", [*_ROWS[:-1], _ROWS[-1] | {"answer": "#### 28"}])))
fault("trained on the test rows", rows=("D19",), stage="data", check="leak", job=an_evaluation)(
    on_disk(lambda folder: (folder / "train.jsonl").write_text(
        "".join(["Figs ripen late.\n", *(f"{row['question']}\n{row['answer']}\n" for row in _ROWS)]))))
fault("pass@k as if samples were put back", rows=("E07",), stage="eval", check="pass@k", job=an_estimator)(
    lambda _: swap(summary, "pass_at_k", lambda n, correct, k: 1 - (1 - correct / n) ** k))
fault("pass@k of more samples than were drawn", rows=("E07",), stage="eval", check="pass@k", job=an_estimator)(
    # k above n is taken for n, in silence.
    lambda _: swap(summary, "pass_at_k", lambda n, correct, k: pass_at_k(n, correct, min(k, n))))

# ---------------------------------------------------------------- faults that the evaluation's own checks share


seen_by_the_witness = functools.partial(fault, rows=("W01",), stage="eval", job=a_witnessed_evaluation)

seen_by_the_witness("an evaluation without the generation prompt", check="witness prompts")(
    in_place_of(loaded_model, "prompt_token_ids")(lambda usual, tokenizer, text, *, raw: usual(tokenizer, text, raw=True) if raw else tuple(
        tokenizer.encode(tokenizer.render([{"role": "user", "content": text}])))))
seen_by_the_witness("questions asked without the form of the answer", check="witness prompts")(
    lambda _: swap(answers, "ASK_FOR_NUMBER", "{question}"))
seen_by_the_witness("one example more than --limit", check="witness prompts")(
    in_place_of(answers, "make_examples")(lambda usual, rows, limit: usual(rows, limit + 1)))
seen_by_the_witness("states a fifth too large in every pass", check="witness texts")(
    # Sampler and second readings share the forward pass: texts are colder than stated, and agree with themselves.
    in_place_of(Transformer, "hidden")(lambda usual, *given, **streams: 1.2 * usual(*given, **streams)))
seen_by_the_witness("votes counted by the lenient reading", check="witness scores")(
    in_place_of(answers, "_score_number")(lambda usual, example, text: replace(
        usual(example, text), answer=answers.canonical(answer_reading.read_answer(text, "lenient")))))

"""assay eval: score a model on a task, example by example, with intervals."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from assay.config import argument, option
from assay.errors import DataError, UsageError
from assay.recipes.options import DEVICE
from assay.verbs.terminal import progress_line
from assay.verdict import Outcome, overall

if TYPE_CHECKING:
    from assay.evaluation.evaluate import Evaluation


@dataclass(frozen=True)
class FLAGS:
    """Evaluate a model on a task, or with --suite beside its parent on several, with one verdict on what it has forgotten. The same
    command goes on where it was interrupted."""

    path: str = argument("checkpoint, folder, adapter, GGUF file or fetched name")
    out: str = option("folder for scores.jsonl and eval.json", group="run", metavar="FOLDER")
    task: str | None = option("task: gsm8k, arithmetic, humaneval, mbpp, choices, text, counterfact, instructions, reasoning_gym or "
                              "graded; this or --suite is required", group="data", default=None)
    suite: str | None = option("YAML file of tasks, and probes for degenerate text, on which the model is compared with --against; "
                               "REFUTED where it is shown to have lost more than a task's margin (Holm over all tasks)",
                               group="data", metavar="FILE",
                               default=None)
    against: str | None = option("the parent model to compare with", needs="--suite", group="model", metavar="MODEL", default=None)
    data: str | None = option("data file of the task; none is bundled", needs="--task", group="data", metavar="FILE", default=None)
    k: int = option("samples per example", needs="--task", group="generation", short="-k", default=1)
    temperature: float = option("sampling temperature; 0: greedy", needs="--task", group="generation", default=0.0)
    max_new_tokens: int = option("the most tokens of a sample", needs="--task", group="generation", default=256)
    top_k: int = option("sample among the N likeliest tokens; 0: all", needs="--task", group="generation", default=0)
    top_p: float = option("nucleus sampling: sample within this probability mass", needs="--task", group="generation", default=1.0)
    seed: int = option("seed; the same seed gives the same samples", needs="--task", group="generation", default=0)
    limit: int | None = option("evaluate only the first N examples", needs="--task", group="data", default=None, default_text="all")
    grader: str | None = option("a reward's name or FILE.py:FUNCTION; of reasoning_gym: a dataset's name",
                                needs="--task graded or --task reasoning_gym", group="data", default=None)
    raw: bool = option("use no chat template", needs="--task", group="generation", default=False)
    trained_on: tuple[str, ...] = option("training files to search for the examples (contamination)",
                                         needs="--task", group="data", metavar="FILE", default=())
    base: str | None = option("base of an adapter that does not name its base", group="model", metavar="MODEL", default=None)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None,
                                default_text=DEVICE)
    dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        "number format to compute in", needs="--task", group="model", default=None, default_text="bfloat16 on a GPU, float32 elsewhere")
    witness: int = option("examples that a fresh process renders, scores and grades again, independently, through transformers "
                          "(docs/witness.md); 0: none",
                          needs="--task", group="run", least=0, default=8)
    json: bool = option("print JSON", group="run", default=False)


EXAMPLES = """  assay eval runs/a/checkpoints/step-000500 --task gsm8k --data test.jsonl -k 16 --temperature 0.7 --out evals/a
  assay eval runs/sft/model --against smollm2-135m --suite before-after.yaml --out evals/forgotten
  assay eval smollm2-135m --task arithmetic --limit 100 --out evals/sums
  assay eval ./model --task humaneval --data HumanEval.jsonl.gz --out evals/code
  assay eval ./model --task graded --data mine.jsonl --grader grade.py:score --out evals/mine"""


def run(flags: FLAGS) -> int:
    if (flags.task is None) == (flags.suite is None):
        raise UsageError("assay eval: give a --task, or a --suite of several with --against PARENT")
    if flags.suite is not None:
        return ask_suite(flags)
    found = evaluate_model(flags)
    print(json.dumps(found.to_json(), indent=1) if flags.json else evaluation_text(found, Path(flags.out)))
    return 3 if overall(found.verdicts) is Outcome.REFUTED else 0


def ask_suite(flags: FLAGS) -> int:
    from assay.model.placement import default_device
    from assay.recipes.suite import read_suite, run_suite
    from assay.store.artifact import open_artifact
    from assay.verbs.terminal import line_printer

    if flags.suite is None or flags.against is None:
        raise UsageError("assay eval --suite: name the model that it is held against: --against PARENT")
    found = run_suite(read_suite(flags.suite), open_artifact(flags.against), open_artifact(flags.path, base=flags.base), Path(flags.out),
                      device=flags.device or default_device(), say=line_printer(json=flags.json))
    print(json.dumps(found.to_json(), indent=1) if flags.json else f"{found.verdict}\nresults in {flags.out}")
    return 3 if found.verdict.outcome is Outcome.REFUTED else 0


def evaluate_model(flags: FLAGS) -> "Evaluation":
    import torch

    from assay.evaluation.evaluate import evaluate
    from assay.evaluation.loaded_model import LoadedModel
    from assay.evaluation.tasks import TaskRequest, open_task
    from assay.generate.generation_request import Sampling
    from assay.model.placement import default_device
    from assay.store.artifact import open_artifact, quarantines

    assert flags.task is not None
    task = open_task(TaskRequest(flags.task, Path(flags.data) if flags.data else None, flags.limit, flags.grader, flags.seed))
    artifact = open_artifact(flags.path, base=flags.base)
    for note in (*artifact.notes, *quarantines(artifact)):
        print(f"note: {note}", file=sys.stderr)
    opened = LoadedModel(artifact, device=flags.device or default_device(), dtype=getattr(torch, flags.dtype) if flags.dtype else None)
    sampling = Sampling(flags.max_new_tokens, flags.temperature, flags.top_k, flags.top_p, flags.seed)
    with progress_line() as show:
        return evaluate(opened, task, Path(flags.out), k=flags.k, sampling=sampling, raw=flags.raw,
                        trained_on=training_texts(map(Path, flags.trained_on)),
                        progress=lambda done, of: show(f"{task.name}: {done} of {of} examples", last=done == of),
                        asked={name: value for name, value in asdict(flags).items() if name not in ("out", "json")})


def training_texts(files: Iterable[Path]) -> Iterable[str]:
    """Texts of the training files: plain text, or every string of every row."""
    from assay.data.data_files import ROW_READERS, read_rows
    from assay.evaluation.soundness import row_text

    for file in files:
        if file.name.endswith(tuple(ROW_READERS)):
            for row in read_rows(file):
                yield row_text(row.values)
        else:
            yield plain_text(file)


def plain_text(file: Path) -> str:
    from assay.data.data_files import TextSource, open_source

    with open_source(TextSource(file, file.name)) as lines:
        try:
            return lines.read().decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{file}: not UTF-8 at byte {error.start} ({error.reason}); convert the file") from None


def evaluation_text(found: "Evaluation", folder: Path) -> str:
    width = max(map(len, found.estimates))
    lines = [f"{name:{width}}  {estimate}" for name, estimate in found.estimates.items()]
    lines += [f"strict and lenient reading differ on {len(found.disagreements)} samples" if found.disagreements else ""]
    return "\n".join([*filter(None, lines), *(f"  {verdict}" for verdict in found.verdicts), f"results in {folder}"])

"""Python API: the verbs as functions, with the same typed options as the command line, in scripts and notebooks.

Data may be a path, a list of rows or a `datasets.Dataset`; a reward may be a function. What is given in memory is written to
OUT/inputs, named by its content, so that a run can be gone on with, and done again from the command line with its config.yaml.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.config import from_mapping
from assay.errors import UsageError
from assay.outcome import RunOutcome
from assay.recipes.dpo_options import Dpo
from assay.recipes.edit_options import Edit
from assay.recipes.grpo_options import Grpo
from assay.recipes.kto_options import Kto
from assay.recipes.merge_options import MergeModels, PruneLayers
from assay.recipes.options import Distill, Pretrain, Sft
from assay.recipes.reward_model_options import RewardModel
from assay.recipes.steer_options import Steer
from assay.recipes.ttt_options import Ttt

if TYPE_CHECKING:
    from assay.comparison.pairwise import Comparison
    from assay.evaluation.evaluate import Evaluation
    from assay.generate.generation_request import Completion
    from assay.interop.publishing import Published
    from assay.store.artifact import Artifact
    from assay.verdict import Verdict

Say = Callable[[str], None]


def load(path: str | Path, *, base: str | Path | None = None) -> "Artifact":
    """A model wherever it lies: a checkpoint, Hugging Face or PEFT folder, GGUF file or fetched name; strictly, or not at all."""
    from assay.store.artifact import open_artifact

    return open_artifact(path, base=base)


def sft(*, say: Say | None = None, **options: Any) -> RunOutcome:
    """Fine-tune a model on conversations, the whole of it or a LoRA adapter."""
    from assay.recipes import sft as recipe

    return _run(recipe.sft, Sft, options, say)


def dpo(*, say: Say | None = None, **options: Any) -> RunOutcome:
    """Teach a model which of two answers is preferred, by DPO or a relative of it."""
    from assay.recipes import dpo as recipe

    return _run(recipe.dpo, Dpo, options, say)


def kto(*, say: Say | None = None, **options: Any) -> RunOutcome:
    """Teach a model from single answers that were called desirable or undesirable."""
    from assay.recipes import kto as recipe

    return _run(recipe.kto, Kto, options, say)


def reward_model(*, say: Say | None = None, **options: Any) -> RunOutcome:
    """Teach a model what an answer is worth, from pairs of which one is preferred; it serves as a reward of `grpo`."""
    from assay.recipes import reward_model as recipe

    return _run(recipe.reward_model, RewardModel, options, say)


def grpo(*, say: Say | None = None, **options: Any) -> RunOutcome:
    """Reinforce what is rewarded; `reward` may be a function (prompt, completion, row) → number, or several with weights."""
    from assay.recipes import grpo as recipe

    return _run(recipe.grpo, Grpo, options, say)


def distill(*, say: Say | None = None, **options: Any) -> RunOutcome:
    """Teach a student what a teacher knows."""
    from assay.recipes import distill as recipe

    return _run(recipe.distill, Distill, options, say)


def pretrain(*, say: Say | None = None, **options: Any) -> RunOutcome:
    """Train a model from scratch on a corpus."""
    from assay.recipes import pretrain as recipe

    return _run(recipe.pretrain, Pretrain, options, say)


def edit(path: str | Path, *, say: Say | None = None, **options: Any) -> RunOutcome:
    """Write new facts into a model's weights."""
    from assay.recipes import edit as recipe

    return _run(recipe.edit, Edit, {"path": str(path), **options}, say)


def ttt(path: str | Path, *, say: Say | None = None, **options: Any) -> RunOutcome:
    """Read documents while learning from them, every chunk scored before it is learned from."""
    from assay.recipes import ttt as recipe

    return _run(recipe.ttt, Ttt, {"path": str(path), **options}, say)


def merge(*models: str | Path, out: str | Path, say: Say | None = None, **options: Any) -> RunOutcome:
    """Merge fine-tunes of one model; a model may be PATH=WEIGHT."""
    from assay.recipes import merge as recipe

    return recipe.merge(_options(MergeModels, {"models": [str(model) for model in models], "out": str(out), **options}, Path(out)),
                        say or _print_line)


def prune(model: str | Path, *, out: str | Path, say: Say | None = None, **options: Any) -> RunOutcome:
    """Take layers out of a model."""
    from assay.recipes import merge as recipe

    return recipe.prune(_options(PruneLayers, {"model": str(model), "out": str(out), **options}, Path(out)), say or _print_line)


def steer(model: str | Path, *, out: str | Path, say: Say | None = None, **options: Any) -> RunOutcome:
    """Make a steering vector of pairs, and measure what it does and costs."""
    from assay.recipes import steer as recipe

    return recipe.steer(_options(Steer, {"model": str(model), "out": str(out), **options}, Path(out)), say or _print_line)


def evaluate(path: str | Path, *, out: str | Path, **options: Any) -> "Evaluation":
    """A model's scores on a task, example by example, with intervals."""
    from assay.verbs import eval as verb

    return verb.evaluate_model(_options(verb.FLAGS, {"path": str(path), "out": str(out), **options}, Path(out)))


def compare(*results: str | Path, **options: Any) -> "list[Comparison]":
    """Compare two or more results: evaluation folders, or NAME=FOLDER,FOLDER for several runs of one recipe."""
    from assay.comparison.pairwise import compare as compare_arms
    from assay.verbs import compare as verb

    flags = from_mapping(verb.FLAGS, {"results": [str(one) for one in results], **options}, where="assay.compare")
    return compare_arms(verb.read_arms(flags)[0], level=flags.level)


def prove(path: str | Path, **options: Any) -> "list[Verdict]":
    """Prove an artifact: run every check on it in a fresh process that knows nothing but its bytes."""
    from assay.verbs import prove as verb

    return verb.prove_artifact(from_mapping(verb.FLAGS, {"path": str(path), **options}, where="assay.prove"))


def publish(path: str | Path, *, to: str | Path, **options: Any) -> "Published":
    """Push a proven model with a card made from its ledger to a folder, hf:// or s3://, and hash what is fetched back."""
    from assay.verbs import publish as verb

    flags = from_mapping(verb.FLAGS, {"path": str(path), "to": str(to), **options}, where="assay.publish")
    return verb.publish_model(flags)


def verify(path: str | Path, **options: Any) -> "list[Verdict]":
    """Verify a downloaded model: hash it against manifest, hallmark, publication and signature."""
    from assay.verbs import verify as verb

    return verb.verify_published(from_mapping(verb.FLAGS, {"path": str(path), **options}, where="assay.verify"))


def sample(path: str | Path, prompt: str | Iterable[str] = "", **options: Any) -> "list[Completion]":
    """Completions with their ids and log-probabilities, in the order of the prompts."""
    from assay.verbs import sample as verb

    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    return verb.sample_texts(from_mapping(verb.FLAGS, {"path": str(path), "prompt": prompts, **options}, where="assay.sample"))


def _run(recipe: Callable[[Any, Say], RunOutcome], options: type, given: Mapping[str, Any], say: Say | None) -> RunOutcome:
    if given.get("out") is None:
        raise UsageError(f"assay.{recipe.__name__}: out is missing; name the folder of the run")
    from assay.interop.live_tracking import tracking

    typed = _options(options, given, Path(given["out"]))
    quiet = getattr(typed, "quiet", False) and say is None
    with tracking(Path(given["out"]), getattr(typed, "track", ()), checkpoints=getattr(typed, "track_checkpoints", False)):
        return recipe(typed, _keep_silent if quiet else say or _print_line)


def _options(cls: type, given: Mapping[str, Any], out: Path) -> Any:
    """Options of the command line's own type, with what was given in memory written to OUT/inputs."""
    from assay.reward.callable_reward import reward_spec

    values = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    inputs = out / "inputs"
    for name in ("data", "held_out_data", "facts", "text"):
        if name in values:
            several = name == "data" and cls in (Sft, Dpo, Kto, RewardModel, Grpo, Distill)
            values[name] = _as_files(name, values[name], inputs) if several else _as_file(name, values[name], inputs)
    if "reward" in values:
        rewards = values["reward"] if isinstance(values["reward"], list) else [values["reward"]]
        values["reward"] = [reward_spec(reward, inputs) for reward in rewards]
    if callable(values.get("grader")):
        values["grader"] = reward_spec(values["grader"], inputs).rpartition(":")[0]
    return from_mapping(cls, values, where=f"assay.{cls.__name__.lower()}" if cls.__name__ != "FLAGS" else "assay.evaluate")


def _as_files(name: str, rows: Any, folder: Path) -> list[str]:
    """Data as files, one or several; a list of rows is one."""
    several = isinstance(rows, list | tuple) and rows and all(isinstance(row, str | Path) for row in rows)
    return [str(row) for row in rows] if several else [str(_as_file(name, rows, folder))]


def _as_file(name: str, rows: Any, folder: Path) -> str | None:
    if rows is None or isinstance(rows, str | Path):
        return None if rows is None else str(rows)
    try:
        raw = "".join(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: expected a path, or rows that are mappings of plain values (a list of dicts, a datasets.Dataset); "
                         f"{error}") from None
    from assay.store import durable

    file = folder / f"{name}-{hashlib.sha256(raw).hexdigest()[:12]}.jsonl"
    if not file.exists():
        durable.make_folder(folder)
        durable.replace_file(file, raw)
    return str(file)


def _print_line(text: str) -> None:
    print(text, flush=True)


def _keep_silent(_: str) -> None:
    """Print nothing: what is not printed stands in the ledger."""


def _with_signature(function: Callable[..., Any], cls: type) -> None:
    """The options as keyword arguments with their types and defaults, for help() and editors."""
    own = [one for one in inspect.signature(function).parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    names = {one.name for one in own}
    more = [inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, annotation=one.type,
                              default=inspect.Parameter.empty if one.default is MISSING else one.default)
            for one in fields(cls) if one.name not in names]
    function.__signature__ = inspect.Signature([*own, *more], return_annotation=RunOutcome)  # type: ignore[attr-defined]


for _function, _cls in ((sft, Sft), (dpo, Dpo), (kto, Kto), (reward_model, RewardModel),
                       (grpo, Grpo), (distill, Distill), (pretrain, Pretrain), (edit, Edit), (ttt, Ttt)):
    _with_signature(_function, _cls)

"""assay init: three questions, and a commented YAML file with which the recipe runs."""

import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from assay.config import argument, option
from assay.errors import UsageError
from assay.recipes.dpo_options import Dpo
from assay.recipes.grpo_options import Grpo
from assay.recipes.kto_options import Kto
from assay.recipes.options import Distill, Pretrain, Sft


@dataclass(frozen=True)
class FLAGS:
    """Ask for a recipe, a model and the data, and write the recipe's options as a commented YAML file. A question that an option here
    answers is not asked. Every other option is in the file with its help and default, commented out."""

    out: str = argument("YAML file to write; it must not exist", default="assay.yaml")
    recipe: Literal["sft", "dpo", "kto", "grpo", "distill", "pretrain"] | None = option("recipe to write options for",
                                                                                        default=None, default_text="asked")
    model: str | None = option("model to start from; for distill the teacher, for pretrain none", default=None,
                               default_text="asked")
    data: str | None = option("file to train on; for pretrain the corpus", default=None, default_text="asked")


EXAMPLES = """  assay init
  assay init run.yaml --recipe sft --model smollm2-135m --data chats.jsonl
  assay sft --config run.yaml"""


class InitRecipe(NamedTuple):
    options: type
    meaning: str
    model: str  # the option that the model goes to; "": none
    data: str
    suggested: dict[str, Any]


INIT_RECIPES = {
    "sft": InitRecipe(Sft, "learn to answer as in conversations", "model", "data", {"lora_r": 16}),
    "dpo": InitRecipe(Dpo, "prefer one answer of two", "model", "data", {"lora_r": 16}),
    "kto": InitRecipe(Kto, "learn from answers called good or bad", "model", "data", {"lora_r": 16}),
    "grpo": InitRecipe(Grpo, "be rewarded for right answers", "model", "data", {"reward": ["answer:1"]}),
    "distill": InitRecipe(Distill, "teach a student of half the layers", "teacher", "data", {"student_layers": None}),
    "pretrain": InitRecipe(Pretrain, "train from scratch on a corpus of assay corpus", "", "corpus", {"minutes": 5}),
}


def run(flags: FLAGS) -> int:
    where = Path(flags.out)
    if os.path.lexists(where):
        raise UsageError(f"{where} exists; name another file, or remove it")
    name = flags.recipe or _asked("What is to be done?", {key: recipe.meaning for key, recipe in INIT_RECIPES.items()})
    if name not in INIT_RECIPES:
        raise UsageError(f"{name!r} is none of: {', '.join(INIT_RECIPES)}")
    recipe = INIT_RECIPES[name]
    model = flags.model or (_asked(f"Which model ({recipe.model})? A folder, GGUF file or fetched name") if recipe.model else "")
    data = flags.data or _asked(f"Which {recipe.data}? A path")
    text = options_file(name, model, data, layers_of=_layers)
    where.parent.mkdir(parents=True, exist_ok=True)
    with where.open("x") as file:
        file.write(text)
    print(f"{where}: look at it, then: assay {name} --config {where}")
    return 0


def _asked(question: str, choices: dict[str, str] | None = None) -> str:
    shown = "".join(f"\n  {name:9} {meaning}" for name, meaning in (choices or {}).items())
    print(f"{question}{shown}\n> ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if not answer:
        raise UsageError("no answer came; answer, or give --recipe, --model and --data")
    return answer


def _layers(teacher: str) -> int:
    from assay.store.artifact import open_artifact

    return open_artifact(teacher).config.depth


def options_file(name: str, model: str, data: str, *, layers_of: Callable[[str], int]) -> str:
    """The chosen options first; then all others, out of force, each under its help."""
    recipe = INIT_RECIPES[name]
    chosen: dict[str, Any] = ({recipe.model: model} if recipe.model else {}) | {recipe.data: data, "out": f"runs/{name}"} | recipe.suggested
    if "student_layers" in chosen:
        chosen["student_layers"] = max(1, layers_of(model) // 2)
    fields = {field.name: field for field in dataclasses.fields(recipe.options)}
    lines = [f"# assay {name} --config THIS FILE; a flag on the command line overrides what stands here.",
             f"# assay plan {name} --config THIS FILE says what it takes of the device before anything is loaded.", ""]
    for key, value in chosen.items():
        lines += [f"# {_help(fields[key])}", f"{_key(key)}: {_value(value)}", ""]
    lines += ["# Everything else, with its default. Take the # away from an option to set it.", ""]
    for key, field in fields.items():
        if key not in chosen:
            lines += [f"# {_help(field)}", f"#{_key(key)}: {_value(None if field.default is dataclasses.MISSING else field.default)}"]
    return "\n".join(lines) + "\n"


def _help(field: dataclasses.Field) -> str:
    text = field.metadata["help"]
    return f"{text[:1].upper()}{text[1:]}." + (f" Default: {field.metadata['default_text']}." if field.metadata.get("default_text") else "")


def _key(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def _value(value: Any) -> str:
    """YAML that is JSON too, which quotes what must be quoted."""
    import json

    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)

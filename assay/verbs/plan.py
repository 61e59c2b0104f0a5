"""assay plan: say what a run would take of a device and a disk, by part, from config and headers alone."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from assay.config import argument, option, parse, passed_on
from assay.recipes.dpo_options import Dpo
from assay.recipes.grpo_options import Grpo
from assay.recipes.kto_options import Kto
from assay.recipes.options import Distill, Pretrain, Sft

if TYPE_CHECKING:
    from assay.recipes.memory_plan import MemoryPlan, PlannedModel


@dataclass(frozen=True)
class FLAGS:
    """Estimate what a run would take: device memory by part, disk, seconds per step on this machine's device, and, where it does not
    fit, the settings that would. Every option that is not listed here is the recipe's own. No weight is loaded, and nothing is
    written."""

    recipe: Literal["sft", "dpo", "kto", "grpo", "distill", "pretrain"] = argument("recipe to plan; its own options follow")
    memory: float | None = option("plan for a device with this many GiB", group="memory", metavar="GIB", above=0, default=None,
                                  default_text="this machine's GPU")
    json: bool = option("print JSON", default=False)
    options: tuple[str, ...] = passed_on()


EXAMPLES = """  assay plan sft --model ./qwen3-8b --lora-r 16 --micro-batch-tokens 4096
  assay plan sft --model smollm2-135m --memory 16
  assay plan grpo --model ./qwen3-8b --lora-r 16 --prompts 16 --num-generations 8 --memory 80
  assay plan pretrain --corpus corpus --depth 12 --minutes 5"""
PLANNED_RECIPES: dict[str, type[Sft] | type[Dpo] | type[Kto] | type[Grpo] | type[Distill] | type[Pretrain]] = {
    "sft": Sft, "dpo": Dpo, "kto": Kto, "grpo": Grpo, "distill": Distill, "pretrain": Pretrain}
# What a recipe requires and a plan does not ask about.
UNASKED = {"sft": ("--data", "--out"), "dpo": ("--data", "--out"), "kto": ("--data", "--out"), "distill": ("--data", "--out"),
           "grpo": ("--data", "--out", "--reward"), "pretrain": ("--out",)}


def run(flags: FLAGS) -> int:
    from assay.model.placement import default_device
    from assay.recipes.memory_plan import GIB, alternatives, device_memory

    found, device, tokens = planned(flags)
    seconds, is_here = list[float](), device == "cpu" or default_device() != "cpu"
    if tokens is not None and flags.memory is None and is_here:
        from assay.recipes.time_plan import product_speed, step_seconds, time_in_words

        speed = product_speed(device)
        seconds = [step_seconds(found, tokens, speed)]
    available = device_memory(device) if flags.memory is None else int(flags.memory * GIB)
    fits = None if available is None else found.on_device_at_least <= available
    instead = alternatives(found, available) if available is not None and not fits else []
    if flags.json:
        print(json.dumps(found.to_json() | {"available": available, "fits": fits, "alternatives": instead,
                                            "seconds_a_step": next(iter(seconds), None)}, indent=1))
        return 0 if fits is not False else 3
    print("\n".join(found.lines()))
    if tokens is not None and seconds:
        print(time_in_words(found, tokens, speed))
    if not is_here and available is None:
        print(f"  no {device} is here: whether it fits and how long a step takes is not known; --memory GIB says what that device has")
    if available is not None:
        others = "; ".join(instead) or "nothing that leaves the model as it is"
        print(f"  {available / GIB:.1f} GiB are there: it {'fits' if fits else f'does not fit; what would: {others}'}")
    return 0 if fits is not False else 3


def planned(flags: FLAGS) -> tuple["MemoryPlan", str, int | None]:
    """The plan, the device that it is for (with --memory a GPU, whether or not one is here), and tokens of a step, where options say."""
    from assay.model.placement import default_device
    from assay.recipes.memory_plan import PlannedModel, plan_memory, plan_pretraining, planned_model, planned_work
    from assay.recipes.plan_refusals import refuse_for_model, refuse_unclear_options

    given = {word.partition("=")[0] for word in flags.options}
    asked = {*given, "--data", "--reward"} if "--environment" in given else given  # which has tasks and rewards of its own
    filled = [word for name in UNASKED[flags.recipe] if name not in asked and "--config" not in given for word in (name, "unasked")]
    config = parse(PLANNED_RECIPES[flags.recipe], [*flags.options, *filled], prog=f"assay plan {flags.recipe}", config_file=True)
    device = config.device or ("cuda" if flags.memory is not None else default_device())
    refuse_unclear_options(config)
    if isinstance(config, Pretrain):
        from assay.model.tokenizer import Tokenizer
        from assay.recipes.pretrain import chosen_shape
        from assay.store.remote import local_path

        chosen = chosen_shape(config, Tokenizer.from_folder(local_path(config.corpus)))
        refuse_for_model(config, PlannedModel(chosen.model, 0))
        return plan_pretraining(config, chosen.model, device), device, config.batch_tokens
    student = isinstance(config, Distill) and config.student_layers is not None
    model = _planned_student(config) if isinstance(config, Distill) and student else planned_model(str(config.model or config.from_))
    refuse_for_model(config, model)
    return plan_memory(model, planned_work(config, model, device)), device, None if isinstance(config, Grpo) else config.batch_tokens


def _planned_student(config: Distill) -> "PlannedModel":
    """Some of the teacher's layers, in fp32."""
    from assay.recipes.memory_plan import MASTER, PlannedModel, planned_model
    from assay.recipes.teachers import kept_layers, with_layers

    assert config.student_layers is not None
    teacher = planned_model(config.teachers()[0][0]).config
    made = PlannedModel(with_layers(teacher, {}, kept_layers(teacher.depth, config.student_layers))[0], 0)
    return PlannedModel(made.config, MASTER * made.parameters)

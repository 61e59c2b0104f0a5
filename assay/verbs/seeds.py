"""assay seeds: run a recipe once per seed, with one verdict on all of them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay.config import argument, option, parse, passed_on
from assay.errors import UsageError
from assay.recipes.dpo_options import Dpo
from assay.recipes.edit_options import Edit
from assay.recipes.grpo_options import Grpo
from assay.recipes.kto_options import Kto
from assay.recipes.options import Distill, Pretrain, Sft
from assay.recipes.reward_model_options import RewardModel
from assay.recipes.ttt_options import Ttt
from assay.verbs.terminal import line_printer
from assay.verdict import Outcome, Verdict, overall

if TYPE_CHECKING:
    from assay.recipes.seeds import Plan


@dataclass(frozen=True)
class FLAGS:
    """Run a recipe once per seed, one after another or one on each GPU, and judge the seeds together: the mean with its interval, the
    worst seed, a collapse or two modes, the step where a collapsing seed left the others, and which collapse rate the result
    excludes. Every option that is not listed here is the recipe's own and is passed on to it. A finished seed is not run again; an
    interrupted one is resumed."""

    recipe: Literal["pretrain", "sft", "dpo", "kto", "reward-model", "grpo", "distill", "edit", "ttt"] = argument(
        "recipe to run; its own options follow")
    seeds: tuple[int, ...] = option("two or more seeds", metavar="SEED")
    out: str = option("folder for one run per seed and seeds.json; with --over for one such folder per value", metavar="FOLDER")
    json: bool = option("print seeds.json", default=False)
    options: tuple[str, ...] = passed_on()
    over: str | None = option("run all seeds for each value of one option of the recipe, as in weight-decay=0.5,1,2",
                              metavar="OPTION=VALUE,…", default=None)


EXAMPLES = """  assay seeds pretrain --corpus corpus --depth 6 --minutes 5 --seeds 42 314 1337 --out runs/three
  assay seeds pretrain --config run.yaml --seeds 1 2 3 4 5 --out runs/five --json
  assay seeds grpo --model runs/sft/model --data gsm8k.jsonl --reward answer:1 --max-steps 100 --seeds 1 2 3 --out runs/rl
  assay seeds ttt runs/a/model --text wiki.txt --warm-start --seeds 42 314 1337 --over weight-decay=0.5,1,2 --out runs/table"""
RECIPES: dict[str, type[Any]] = {"pretrain": Pretrain, "sft": Sft, "dpo": Dpo, "kto": Kto, "reward-model": RewardModel, "grpo": Grpo,
                                 "distill": Distill, "edit": Edit, "ttt": Ttt}


def run(flags: FLAGS) -> int:
    from assay.recipes.seeds import run_seeds

    plans = {name: checked_plan(one) for name, one in plans_by_value(flags).items()}  # all of them, before the first is paid for
    documents, verdicts = dict[str, Any](), list[Verdict]()
    for name, plan in plans.items():
        found = run_seeds(plan, line_printer(json=flags.json))
        if found.interrupted is not None:
            return 128 + found.interrupted
        documents[name], verdicts = found.document, [*verdicts, *found.verdicts]
        if not flags.json:
            print("\n".join([*([f"{name}:"] if name else []), *(f"  {verdict}" for verdict in found.verdicts)]))
    if flags.json:
        print(json.dumps(documents if flags.over else documents[""], indent=1))
    return 0 if overall(verdicts) is Outcome.PROVEN else 3


def plans_by_value(flags: FLAGS) -> dict[str, FLAGS]:
    """Sets of seeds to run: one under no name, or a set for each value of --over under "option value"."""
    if flags.over is None:
        return {"": flags}
    name, _, values = flags.over.partition("=")
    if not name or not all(values.split(",")):
        raise UsageError(f"--over {flags.over}: expected an option and its values, as weight-decay=0.5,1,2")
    return {f"{name} {value}": replace(flags, over=None, out=f"{flags.out}/{name}-{value}", options=(*flags.options, f"--{name}", value))
            for value in values.split(",")}


def checked_plan(flags: FLAGS) -> "Plan":
    """The recipe reads its options here and now: a mistake is found before the first seed is paid for."""
    from assay.recipes.pipeline_plan import named_inputs
    from assay.recipes.seeds import Plan
    from assay.store.durable import require_outside_checkpoints

    if len(set(flags.seeds)) != len(flags.seeds) or len(flags.seeds) < 2:
        raise UsageError(f"--seeds {' '.join(map(str, flags.seeds))}: expected two or more different seeds; one shows nothing "
                         "of how seeds differ")
    require_outside_checkpoints(Path(flags.out) / "seeds.json")
    if taken := [word for word in flags.options if word.partition("=")[0] == "--seed"]:
        raise UsageError(f"{taken[0]}: each seed of --seeds is given to the recipe; leave it out")
    argv = [*flags.options, "--seed", str(flags.seeds[0]), "--out", flags.out]
    config = parse(RECIPES[flags.recipe], argv, prog=f"assay {flags.recipe}", config_file=True)
    named = [] if (file := _config_file(flags.options)) is None else [file]
    inputs = dict.fromkeys([*named, *named_inputs(flags.recipe, asdict(config))])
    return Plan(flags.recipe, flags.options, flags.seeds, flags.out, config.device, tuple(inputs))


def _config_file(options: Sequence[str]) -> str | None:
    """The file of --config, whose options are the set's too."""
    for word, after in zip(options, (*options[1:], ""), strict=True):
        if word.partition("=")[0] == "--config":
            return word.partition("=")[2] or after
    return None

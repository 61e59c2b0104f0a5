"""assay dpo: teach a model which of two answers is preferred, the whole of it or an adapter."""

from assay.recipes.dpo_options import Dpo as FLAGS
from assay.verbs.recipe_command import run_recipe

EXAMPLES = """  assay dpo --model runs/sft/model --data pairs.jsonl --out runs/dpo
  assay dpo --model smollm2-135m --data pairs.jsonl --out runs/lora --lora-r 16 --loss-type ipo --beta 0.2
  assay dpo --model smollm2-135m --data pairs.jsonl --out runs/live --reference live
  assay dpo --model smollm2-135m --data pairs.jsonl --out runs/simpo --loss-type simpo --simpo-gamma 1"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.dpo import dpo

    return run_recipe(dpo, flags)

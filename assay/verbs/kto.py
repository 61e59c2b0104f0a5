"""assay kto: teach a model from single answers that were called good or bad, the whole of it or an adapter."""

from assay.recipes.kto_options import Kto as FLAGS
from assay.verbs.recipe_command import run_recipe

EXAMPLES = """  assay kto --model runs/sft/model --data answers.jsonl --out runs/kto
  assay kto --model smollm2-135m --data answers.jsonl --out runs/lora --lora-r 16 --undesirable-weight 2
  assay kto --model smollm2-135m --data pairs.jsonl --out runs/apo --loss-type apo_zero_unpaired"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.kto import kto

    return run_recipe(kto, flags)

"""assay pretrain: train a model from scratch, with every check on."""

from assay.recipes.options import Pretrain as FLAGS
from assay.verbs.recipe_command import run_recipe

EXAMPLES = """  assay pretrain --corpus corpus --out runs/a --depth 6 --minutes 5
  assay pretrain --corpus corpus --out runs/b --depth 2 --tokens 2000000 --num-train-epochs 4 --device cpu
  assay pretrain --corpus corpus --out runs/c --depth 7 --minutes 4 --num-train-epochs 20 --max-bytes 16000000"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.pretrain import pretrain

    return run_recipe(pretrain, flags)

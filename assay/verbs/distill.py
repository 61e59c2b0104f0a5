"""assay distill: train a student on a teacher's logits or text."""

from assay.recipes.options import Distill as FLAGS
from assay.verbs.recipe_command import run_recipe

EXAMPLES = """  assay distill --teacher smollm2-135m --student-layers 15 --data text.jsonl --out runs/half --learning-rate 3e-4
  assay distill --teacher smollm2-360m --model smollm2-135m --data chats.jsonl --out runs/stored --how stored --teacher-top-k 64
  assay distill --teacher qwen3-0.6b --model smollm2-135m --data prompts.jsonl --out runs/words --how text --max-new-tokens 512"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.distill import distill

    return run_recipe(distill, flags)

"""assay sft: fine-tune a model on conversations, the whole of it or an adapter."""

from assay.recipes.options import Sft as FLAGS
from assay.verbs.recipe_command import run_recipe

EXAMPLES = """  assay sft --model smollm2-135m --data gsm8k.jsonl --out runs/sft
  assay sft --model smollm2-135m --data chats.jsonl --out runs/lora --lora-r 16 --num-train-epochs 2
  assay sft --model smollm2-135m --data chats.jsonl --out runs/a --remote s3://bucket/runs/a
  assay sft --from runs/lora/checkpoints/step-000200 --optimizer-state fresh --data more.jsonl --out runs/fork"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.sft import sft

    return run_recipe(sft, flags)

"""assay grpo: reinforcement learning from rewards on the policy's own completions, the whole model or an adapter."""

from assay.recipes.grpo_options import Grpo as FLAGS
from assay.verbs.recipe_command import run_recipe

EXAMPLES = """  assay grpo --from runs/sft/checkpoints/step-000400 --optimizer-state fresh --data gsm8k.jsonl --reward answer:1 --out runs/a
  assay grpo --model smollm2-135m --data gsm8k.jsonl --reward answer:1 format:0.1 --num-generations 8 --prompts 16 --lora-r 8 --out runs/b
  assay grpo --model runs/sft/model --data gsm8k.jsonl --reward 'judge[model=big,url=http://127.0.0.1:8000/v1]:1' --metric answer \\
      --out runs/c
  assay grpo --model runs/sft/model --environment calculator --max-turns 4 --max-completion-length 128 --lora-r 8 --out runs/d"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.grpo import grpo

    return run_recipe(grpo, flags)

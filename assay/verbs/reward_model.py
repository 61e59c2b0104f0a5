"""assay reward-model: teach a model what an answer is worth, from pairs, for assay grpo --reward model:PATH."""

from assay.recipes.reward_model_options import RewardModel as FLAGS
from assay.verbs.recipe_command import run_recipe

EXAMPLES = """  assay reward-model --model smollm2-135m --data pairs.jsonl --out runs/reward
  assay reward-model --model runs/sft/model --data pairs.jsonl --out runs/reward --center-rewards-coefficient 0.01
  assay grpo --model runs/sft/model --data prompts.jsonl --reward model:runs/reward/model --out runs/grpo"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.reward_model import reward_model

    return run_recipe(reward_model, flags)

"""assay prune: take layers out of a model, those that do least on some data or those that are named."""

from assay.recipes.merge_options import PruneLayers as FLAGS

EXAMPLES = """  assay prune smollm2-135m --layers 4 --data held-out.jsonl --out pruned
  assay prune runs/sft/model --drop 20 21 22 --out pruned"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.merge import prune

    outcome = prune(flags)
    print(outcome)
    return outcome.exit_code

"""assay merge: merge fine-tunes of one model into one, parentage and arithmetic proven, the effect measured."""

from assay.recipes.merge_options import MergeModels as FLAGS

EXAMPLES = """  assay merge runs/a/model runs/b/model --out merged
  assay merge runs/a/model=0.7 runs/b/model=0.3 --method slerp --out merged --data held-out.jsonl
  assay merge runs/a/model runs/b/model --base smollm2-135m --method ties --density 0.2 --out merged --data held-out.jsonl"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.merge import merge

    outcome = merge(flags)
    print(outcome)
    return outcome.exit_code

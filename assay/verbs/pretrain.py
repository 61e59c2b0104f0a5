"""assay pretrain: train a model from scratch, with every check on."""

from assay.recipes.options import Pretrain as FLAGS
from assay.verbs.terminal import print_headline

EXAMPLES = """  assay pretrain --corpus corpus --out runs/a --depth 6 --minutes 5
  assay pretrain --corpus corpus --out runs/b --depth 2 --tokens 2000000 --num-train-epochs 4 --device cpu
  assay pretrain --corpus corpus --out runs/c --depth 7 --minutes 4 --num-train-epochs 20 --max-bytes 16000000"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.outcome import RunOutcome
    from assay.recipes.pretrain import pretrain

    outcome: RunOutcome = pretrain(flags)
    if outcome.verdicts:
        print(outcome)
        print_headline(outcome.folder)
    return outcome.exit_code

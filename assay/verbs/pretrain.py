"""assay pretrain: train a model from scratch, with every check on."""

from assay.recipes.options import Pretrain as FLAGS
from assay.verdict import Outcome, overall

EXAMPLES = """  assay pretrain --corpus corpus --out runs/a --depth 6 --minutes 5
  assay pretrain --corpus corpus --out runs/b --depth 2 --tokens 2000000 --epochs 4 --device cpu
  assay pretrain --corpus corpus --out runs/c --depth 7 --minutes 4 --epochs 20 --max-bytes 16000000"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.guard.proof import without_optional
    from assay.recipes.pretrain import pretrain

    verdicts, interrupted = pretrain(flags)
    if interrupted is not None:
        return 128 + interrupted
    for verdict in verdicts:
        print(f"  {verdict}")
    return 0 if overall(without_optional(verdicts)) is Outcome.PROVEN else 3

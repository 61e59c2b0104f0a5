"""assay steer: make a steering vector of pairs of answers, and measure what it does and what it costs; the weights stay as they are."""

from assay.recipes.steer_options import Steer as FLAGS

EXAMPLES = """  assay steer smollm2-135m --data polite-pairs.jsonl --out vectors/polite --text wiki.txt
  assay steer ./model --data pairs.jsonl --out vectors/a --layer 12 --scale 4"""

__all__ = ["EXAMPLES", "FLAGS", "run"]


def run(flags: FLAGS) -> int:
    from assay.recipes.steer import steer

    outcome = steer(flags)
    print(outcome)
    return outcome.exit_code

"""assay bisect: find the first bad checkpoint of a run, and show what changed there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.config import argument, option
from assay.verbs.terminal import line_printer

if TYPE_CHECKING:
    from assay.comparison.bisection import Bisection
    from assay.comparison.weights_diff import WeightsDiff
    from assay.tracing.first_divergence import PassDivergence, WeightChange


@dataclass(frozen=True)
class FLAGS:
    """Find the first bad checkpoint of a run by bisection over its proven checkpoints, assuming that later ones are bad too; then
    compare it with the last good one, by trace and diff."""

    run: str = argument("folder of a run")
    probe: str = option("test that tells a bad checkpoint from a good one: FILE.py:function (takes the folder, returns whether it is "
                        "bad), loss-above:X, loss-jump, score-below:X, health, differs:RUN")
    all_: bool = option("test every checkpoint instead of bisecting, so that a bad one may be followed by a good one", default=False)
    prompt: str | None = option("text on which the first bad and the last good checkpoint are traced",
                                default=None, default_text="fixed tokens")
    only: bool = option("only find the checkpoint, without trace and diff", default=False)
    json: bool = option("print JSON", default=False)


EXAMPLES = """  assay bisect runs/a --probe loss-above:3.2
  assay bisect runs/a --probe mine.py:answers_are_garbage --all
  assay bisect runs/a --probe differs:runs/a-on-the-old-code"""


def run(flags: FLAGS) -> int:
    from assay.recipes.bisect import first_bad_checkpoint, probe_named

    found = first_bad_checkpoint(Path(flags.run), probe_named(flags.probe, Path(flags.run)), every=flags.all_,
                                 say=line_printer(json=flags.json))
    if not flags.json:
        print(found.sentence)
    pair = pair_to_compare(found, flags)
    inside = None if pair is None or flags.only else trace_and_diff(*pair, flags)
    if flags.json:
        print(json.dumps(as_json(found, pair, inside), indent=1))
    elif inside is not None:
        print_change(*inside)
    return 0 if found.first_bad is None else 3


def pair_to_compare(found: "Bisection[Path]", flags: FLAGS) -> tuple[Path, Path] | None:
    """Pair of checkpoints to compare: the first bad one and the last good one, or the other run's checkpoint of the same step."""
    if found.first_bad is None:
        return None
    if flags.probe.startswith("differs:"):
        return Path(flags.probe.removeprefix("differs:")) / "checkpoints" / found.first_bad.name, found.first_bad
    return None if found.last_good is None else (found.last_good, found.first_bad)


def trace_and_diff(good: Path, bad: Path, flags: FLAGS) -> "tuple[PassDivergence, list[WeightChange] | None, WeightsDiff]":
    from assay.comparison.weights_diff import diff_weights
    from assay.store.artifact import open_artifact
    from assay.verbs import trace as tracing
    from assay.verbs.diff import hf_tensors

    a, b = open_artifact(good), open_artifact(bad)
    asked = tracing.FLAGS(str(good), str(bad), prompt=flags.prompt)
    return *tracing.compare_models(a, b, tracing.tokens_to_trace(asked, a), asked), diff_weights(hf_tensors(a), hf_tensors(b))


def print_change(found: "PassDivergence", moved: "list[WeightChange] | None", changed: "WeightsDiff") -> None:
    from assay.tracing.first_divergence import check_forward
    from assay.verbs.diff import print_diff as show_diff
    from assay.verbs.trace import print_divergence

    print_divergence(found, every=False)
    print(check_forward(found, moved))
    show_diff(changed, every=False)


def as_json(found: "Bisection[Path]", pair: tuple[Path, Path] | None,
            inside: "tuple[PassDivergence, list[WeightChange] | None, WeightsDiff] | None") \
        -> dict[str, Any]:
    from assay.comparison.weights_diff import weights_diff_json
    from assay.recipes.run import plain
    from assay.tracing.first_divergence import check_forward, gap_json

    facts: dict[str, Any] = {"sentence": found.sentence, "first_bad": found.first_bad, "last_good": found.last_good,
             "looked": {path.name: bad for path, bad in found.looked.items()}, "compared": pair}
    if inside is not None:
        comparison, moved, changed = inside
        facts |= {"verdict": check_forward(comparison, moved).to_json(), "sites": [gap_json(gap) for gap in comparison.gaps],
                  "diff": weights_diff_json(changed)}
    return plain(facts)

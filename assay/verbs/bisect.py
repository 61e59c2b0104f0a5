"""assay bisect: the first bad checkpoint of a run, and what changed there."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.config import argument, option

if TYPE_CHECKING:
    from assay.measure.bisect import Found
    from assay.measure.diff import Diff
    from assay.measure.parting import Comparison, Moved


@dataclass(frozen=True)
class FLAGS:
    """Walk a run's proven checkpoints to the first bad one, taking what is bad to stay bad; hold it against the last good one."""

    run: str = argument("a run's folder")
    probe: str = option("what tells good from bad: FILE.py:function (folder → is it bad?), loss-above:X, loss-jump, health, differs:RUN")
    every: bool = option("ask every checkpoint instead of halving: nothing is assumed", default=False)
    prompt: str | None = option("text for the trace; fixed tokens unless given", default=None)
    only: bool = option("find the checkpoint, and leave trace and diff", default=False)
    json: bool = option("print JSON", default=False)


EXAMPLES = """  assay bisect runs/a --probe loss-above:3.2
  assay bisect runs/a --probe mine.py:answers_are_garbage --every
  assay bisect runs/a --probe differs:runs/a-on-the-old-code"""


def run(flags: FLAGS) -> int:
    from assay.recipes.bisect import first_bad_checkpoint, probe_named

    say = sys.stderr if flags.json else sys.stdout
    found = first_bad_checkpoint(Path(flags.run), probe_named(flags.probe, Path(flags.run)), every=flags.every,
                                 say=lambda line: print(line, file=say, flush=True))
    if not flags.json:
        print(found.sentence)
    pair = handed_over(found, flags)
    inside = None if pair is None or flags.only else looked_into(*pair, flags)
    if flags.json:
        print(json.dumps(as_json(found, pair, inside), indent=1))
    elif inside is not None:
        show(*inside)
    return 0 if found.first_bad is None else 3


def handed_over(found: "Found[Path]", flags: FLAGS) -> tuple[Path, Path] | None:
    """What to hold the first bad one against: the last good one, or the other run's checkpoint of the same step."""
    if found.first_bad is None:
        return None
    if flags.probe.startswith("differs:"):
        return Path(flags.probe.removeprefix("differs:")) / "checkpoints" / found.first_bad.name, found.first_bad
    return None if found.last_good is None else (found.last_good, found.first_bad)


def looked_into(good: Path, bad: Path, flags: FLAGS) -> "tuple[Comparison, list[Moved] | None, Diff]":
    from assay.measure.diff import diff
    from assay.store.artifact import open_artifact
    from assay.verbs import trace as tracing
    from assay.verbs.diff import named

    a, b = open_artifact(good), open_artifact(bad)
    asked = tracing.FLAGS(str(good), str(bad), prompt=flags.prompt)
    return *tracing.compared(a, b, tracing.asked(asked, a), asked), diff(named(a), named(b))


def show(found: "Comparison", moved: "list[Moved] | None", changed: "Diff") -> None:
    from assay.measure.parting import check_forward
    from assay.verbs.diff import show as show_diff
    from assay.verbs.trace import show_comparison

    show_comparison(found, every=False)
    print(check_forward(found, moved))
    show_diff(changed, every=False)


def as_json(found: "Found[Path]", pair: tuple[Path, Path] | None, inside: "tuple[Comparison, list[Moved] | None, Diff] | None") \
        -> dict[str, Any]:
    from assay.measure.diff import diff_json
    from assay.measure.parting import check_forward, gap_json
    from assay.recipes.run import plain

    facts: dict[str, Any] = {"sentence": found.sentence, "first_bad": found.first_bad, "last_good": found.last_good,
             "looked": {path.name: bad for path, bad in found.looked.items()}, "compared": pair}
    if inside is not None:
        comparison, moved, changed = inside
        facts |= {"verdict": check_forward(comparison, moved).to_json(), "sites": [gap_json(gap) for gap in comparison.gaps],
                  "diff": diff_json(changed)}
    return plain(facts)

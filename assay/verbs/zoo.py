"""assay zoo: plant each known silent failure on a tiny model and show that its check catches it on this machine."""

import difflib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.config import option
from assay.errors import UsageError

if TYPE_CHECKING:
    from assay.zoo import Fault, Sighting


@dataclass(frozen=True)
class FLAGS:
    """Plant faults one by one, each beside its clean twin, on the CPU. Exits with 3 where a fault is missed or a clean twin raises an
    alarm."""

    only: tuple[str, ...] = option("names of the faults to plant (see --list)", metavar="NAME", default=(), default_text="all")
    witness: bool = option("for each fault say whether the witness alone, with every other check silent, would have caught it",
                           default=False)
    list: bool = option("list the faults without planting them", default=False)
    json: bool = option("print JSON", default=False)


EXAMPLES = """  assay zoo
  assay zoo --only 'flipped bit' 'empty weights file'
  assay zoo --witness
  assay zoo --list --json"""


def run(flags: FLAGS) -> int:
    from assay.zoo import catalogue, observe

    faults = chosen_faults(catalogue(), flags.only)
    if flags.list:
        print(json.dumps([f.facts() for f in faults], indent=1) if flags.json else "\n".join(fault_line(f) for f in faults))
        return 0
    if flags.witness:
        return ask_witness_alone(faults, as_json=flags.json)
    sightings = []
    for fault in faults:
        sightings.append(observe(fault))
        if not flags.json:
            print(sighting_line(sightings[-1]), flush=True)
    missed = sum(not s.caught for s in sightings)
    alarms = sum(s.false_alarm for s in sightings)
    if flags.json:
        print(json.dumps([s.facts() for s in sightings], indent=1))
    else:
        print(f"\n{len(sightings) - missed} of {len(sightings)} faults caught, {alarms} false alarms in {len(sightings)} clean twins")
    return 3 if missed or alarms else 0


def ask_witness_alone(faults: "list[Fault]", *, as_json: bool) -> int:
    """Measure the witness alone, on runs whose other checks say nothing; what it does not catch is no failure of this command."""
    from assay.zoo.witness_alone import summary_of, witness_alone

    found = []
    for fault in faults:
        found.append(witness_alone(fault))
        if not as_json:
            print(found[-1].line(), flush=True)
    print(json.dumps([each.facts() for each in found], indent=1) if as_json else f"\n{summary_of(found)}")
    return 0


def chosen_faults(faults: "dict[str, Fault]", only: tuple[str, ...]) -> "list[Fault]":
    for name in only:
        if name not in faults:
            close = difflib.get_close_matches(name, faults, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"`assay zoo --list` names all {len(faults)}"
            raise UsageError(f"no fault is called {name!r}; {hint}")
    return [faults[name] for name in only or faults]


def fault_line(fault: "Fault") -> str:
    return f"{fault.name:44} {fault.stage:10} {fault.check:14} {', '.join(fault.rows)}"


def sighting_line(sighting: "Sighting") -> str:
    outcome = "FALSE ALARM" if sighting.false_alarm else "caught" if sighting.caught else "MISSED"
    reason = sighting.facts()["reason"] or ""
    return f"{outcome:12} {sighting.seconds:5.1f} s  {sighting.fault.name}: {reason}"

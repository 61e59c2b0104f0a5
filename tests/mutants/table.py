"""Table of a mutation campaign, from its lines: by room and by rule, and every silent mutant."""

import datetime
import json
import math
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

KINDS = ("crashed", "timeout", "stopped", "said", "record", "rounding", "silent", "equivalent")
NO_DIFFERENCE = ("equivalent", "record", "rounding")
Row = dict[str, Any]


def wilson(count: int, of: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share."""
    if not of:
        return 0.0, 1.0
    share, spread = count / of, z * z / of
    middle, half = (share + spread / 2) / (1 + spread), z * math.sqrt(share * (1 - share) / of + spread / (4 * of)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def table(rows: list[Row], command: str) -> str:
    mutants, clean = [row for row in rows if "rule" in row], [row for row in rows if "rule" not in row]
    parts = [_head(command), _legend(), _totals(mutants), _by(mutants, "room", lambda row: row["room"]),
             _by(mutants, "rule", lambda row: row["rule"]), _by(mutants, "reference run", lambda row: row["run"]), _checks(mutants),
             _clean(clean), _listed(mutants, "silent"), _listed(mutants, "rounding")]
    return "\n\n".join(filter(None, parts)) + "\n"


def _head(command: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    def known(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} not installed"

    versions = ", ".join(known(name) for name in ("torch", "transformers", "peft", "tokenizers"))
    return (f"Mutation campaign: small mistakes planted in the code that makes results, one at a time\n"
            f"command: {command}\ndate: {datetime.date.today()}; Python {platform.python_version()}, {versions}, CPU, one thread a run")


def _legend() -> str:
    return ("crashed: traceback, exit 1 or 2; timeout: no end within its time limit; stopped: a verdict ended it (exit 3 or 4);\n"
            "said: exit 0, but a check that was PROVEN is not any more; record: weights, scores and metrics equal bit for bit, another\n"
            "ledger, manifest, hallmark, verdict's words or digest; rounding: equal but for the last digits (numbers to 1e-5, tensors to\n"
            "1e-4 of their largest value);\n"
            "silent: other weights, scores or metrics, exit 0, every verdict as before; equivalent: everything equal bit for bit.\n"
            "The share of silent ones is of those that make a difference: not equivalent, record or rounding; with its 95 % interval\n"
            "(Wilson).")


def _totals(rows: list[Row]) -> str:
    return f"{len(rows)} mutants\n" + _lines([("all rooms", rows)], "")


def _by(rows: list[Row], title: str, key: Callable[[Row], str]) -> str:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return _lines(sorted(groups.items()), f"by {title}")


def _lines(groups: Iterable[tuple[str, list[Row]]], title: str) -> str:
    lines = [f"{title:28}" + f"{'n':>6}" + "".join(f"{kind:>12}" for kind in KINDS) + "  silent of the different"]
    for name, rows in groups:
        count = Counter(row["kind"] for row in rows)
        of = len(rows) - sum(count[kind] for kind in NO_DIFFERENCE)
        low, high = wilson(count["silent"], of)
        share = f"{count['silent'] / of:6.1%} [{low:.1%}, {high:.1%}]" if of else "     –"
        lines.append(f"{name:28}{len(rows):6}" + "".join(f"{count[kind]:12}" for kind in KINDS) + f"  {share} (n={of})")
    return "\n".join(lines)


def _checks(rows: list[Row]) -> str:
    stopped = [row for row in rows if row["kind"] == "stopped"]
    count = Counter(row["check"] for row in stopped)
    early = Counter(row["check"] for row in stopped if not row["step"])
    lines = [f"  {name:28}{number:5}   before the first step {early[name]:5}" for name, number in count.most_common()]
    return "\n".join([f"which check stopped them ({len(stopped)})", *lines])


def _clean(rows: list[Row]) -> str:
    if not rows:
        return ""
    alarms = [row for row in rows if row["kind"] != "clean"]
    low, high = wilson(sum(row["kind"] == "false alarm" for row in rows), len(rows))
    head = (f"{len(rows)} clean runs with other seeds and settings: {sum(row['kind'] == 'false alarm' for row in rows)} false alarms "
            f"[{low:.1%}, {high:.1%}]")
    return "\n".join([head, *(f"  {row['kind']}: assay {row['command']}\n    {row['words']}" for row in alarms)])


def _listed(rows: list[Row], kind: str) -> str:
    found = sorted((row for row in rows if row["kind"] == kind), key=lambda row: (row["file"], row["line"]))
    lines = ["\n".join([f"{row['file']}:{row['line']} [{row['id']}] {row['rule']} ({row['run']})", f"    {_one_line(row['before'])}",
                        f"  → {_one_line(row['after'])}", *(f"    {text}" for text in row["changed"][:2]),
                        *(f"    in {run}: {kind}" for run, kind in row.get("elsewhere", {}).items())]) for row in found]
    return "\n".join([f"every mutant of kind {kind} ({len(found)})", *lines])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def write_table(results: Path, where: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    unique = {row["id"]: row for row in rows}
    where.write_text(table(list(unique.values()), "python -m tests.mutants " + " ".join(sys.argv[1:])))

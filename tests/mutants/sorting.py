"""Sorting of mutants: what a run left is compared with what the reference run left, file by file and key by key.

What differs between clean runs (times, paths, the digest of the code) is left out: those keys are found by comparing clean runs. A number,
or a tensor, that differs in its last digits alone is rounding: a product in another order is as good.
"""

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.forked_runs import TIMED_OUT, Ended

IGNORED = (".html", ".png", ".svg", ".log", ".lock", ".yaml", ".py")
RECORDS = ("ledger.jsonl", "manifest.json", "hallmark.json", "quarantine.json", "trainer.json")
OUTCOMES = ("PROVEN", "UNPROVEN", "REFUTED")  # the worse, the later
VERDICT = re.compile(r"\b(PROVEN|REFUTED|UNPROVEN)\s+([a-z@][\w@ ]*?):")
CLOCK = re.compile(r"\bseconds\b|_seconds\b|^[a-z ]+\.(seq|time|self|previous)=")  # clean runs may agree on these by chance
DIGEST = re.compile(r'"(\d+@)?[0-9a-f]{12,64}"')
SAME_NUMBER, SAME_TENSOR = 1e-5, 1e-4  # relative; of a tensor, to its largest value
SHOWN = 3  # differences that are kept of each mutant
Left = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Sorted:
    """`kind` is crashed, stopped, timeout, equivalent, said, record, rounding or silent."""

    kind: str
    check: str = ""
    step: int = 0
    words: str = ""
    changed: list[str] = field(default_factory=list)


def left_in(folder: Path, ended: Ended, said: bool) -> Left:
    """Every file that a run left, as its sha256 or, where it is JSON, as keys and values."""
    found: Left = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        name = file.relative_to(folder).as_posix()
        if name.startswith(".") or file.suffix in IGNORED:
            continue
        found[name] = _file_content(file, str(folder))
    if said:
        found["stdout.json"] = _flat(_parsed(ended.out.replace(str(folder), "@")))
    return found


def _file_content(file: Path, root: str) -> dict[str, Any]:
    data = file.read_bytes()
    if file.suffix not in (".json", ".jsonl") or file.name.startswith("tokenizer"):
        return {"bytes": hashlib.sha256(data).hexdigest()}
    text = data.decode(errors="replace").replace(root, "@")
    if file.suffix == ".json":
        return _flat(_parsed(text))
    rows = [_parsed(line) for line in text.splitlines()]
    if file.name != "ledger.jsonl":
        return {f"{number}.{key}": value for number, row in enumerate(rows) for key, value in _flat(row).items()}
    # Proofs end when they end: events are compared as a heap, not in their order.
    heap = Counter((f"{row.get('kind')}.{pattern(key)}", value) for row in rows if isinstance(row, dict)
                   for key, value in _flat(row).items())
    return {f"{key}={value}": f"{number} times" for (key, value), number in heap.items()}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, part in pairs for key, leaf in _flat(part, f"{at}.{name}" if at else str(name)).items()}
    return {at: json.dumps(value)}


def pattern(key: str) -> str:
    """A key with its numbers left out."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", key.partition("=")[0])


def volatile_keys(clean: list[Left]) -> set[tuple[str, str]]:
    """Keys on which two clean runs do not agree."""
    found: set[tuple[str, str]] = set()
    for other in clean[1:]:
        for name in clean[0].keys() | other.keys():
            one, two = clean[0].get(name, {}), other.get(name, {})
            found |= {(_file_pattern(name), pattern(key)) for key in one.keys() | two.keys() if one.get(key) != two.get(key)}
    return found


def _file_pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def differences(reference: Left, left: Left, volatile: set[tuple[str, str]],
                folders: tuple[Path, Path] | None = None) -> dict[str, list[str]]:
    """By what they mean: weights and whatever else is handed over, scores, only the record, or only the last digits. `folders` are where
    the two runs' tensors lie."""
    found: dict[str, list[str]] = {"weights": [], "scores": [], "record": [], "rounding": []}
    for name in sorted(reference.keys() | left.keys()):
        one, two = reference.get(name, {}), left.get(name, {})
        keys = [key for key in sorted(one.keys() | two.keys())
                if one.get(key) != two.get(key) and not CLOCK.search(key) and (_file_pattern(name), pattern(key)) not in volatile]
        shown = Counter[str]()
        for key in keys:
            meaning = _meaning(name, key, one.get(key), two.get(key), folders)
            shown[meaning] += 1
            if shown[meaning] <= 2:
                found[meaning].append(f"{name} {key}: {_short(one.get(key))} → {_short(two.get(key))}")
    return found


def _meaning(name: str, key: str, one: Any, two: Any, folders: tuple[Path, Path] | None) -> str:
    """Verdicts and digests are the record, in whatever file they stand."""
    base = name.rpartition("/")[2]
    if base in RECORDS or "/witness/" in f"/{name}" or re.search(r"(^|\.)(verdicts|checks)\.", key):
        return "record"
    if key != "bytes" and all(value in (None, "null") or DIGEST.fullmatch(value) for value in (one, two)):
        return "record"
    if _same_number(one, two) or (base.endswith(".safetensors") and folders is not None and _same_tensors(*(at / name for at in folders))):
        return "rounding"
    is_score = base.endswith((".json", ".jsonl")) and not base.startswith(("config", "generation_config", "tokenizer", "special", "adapter",
                                                                           "model.safetensors", "chat_template", "added"))
    return "scores" if is_score else "weights"


def _same_number(one: Any, two: Any) -> bool:
    try:
        a, b = json.loads(one), json.loads(two)
    except (TypeError, ValueError):
        return False
    return all(type(value) is float for value in (a, b)) and abs(a - b) <= SAME_NUMBER * max(abs(a), abs(b)) + 1e-9


def _same_tensors(one: Path, two: Path) -> bool:
    from safetensors.numpy import load_file

    if not (one.is_file() and two.is_file()):
        return False
    a, b = load_file(one), load_file(two)
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape and abs(a[name].astype("f8") - b[name].astype("f8")).max(initial=0)
        <= SAME_TENSOR * abs(a[name].astype("f8")).max(initial=1e-30) for name in a)


def _short(value: Any) -> str:
    return "nothing" if value is None else str(value)[:60]


def verdicts_in(left: Left, ended: Ended) -> dict[str, str]:
    """The worst outcome of every check, from what was printed and from the files."""
    said = [(check, outcome) for outcome, check in VERDICT.findall(f"{ended.out}\n{ended.err}")]
    for content in left.values():
        for key, value in content.items():
            if key.endswith("check") and (outcome := content.get(key.removesuffix("check") + "outcome")):
                said.append((value.strip('"'), outcome.strip('"')))
    worst: dict[str, str] = {}
    for check, outcome in said:
        if outcome in OUTCOMES and OUTCOMES.index(outcome) >= OUTCOMES.index(worst.get(check, "PROVEN")):
            worst[check] = outcome
    return worst


def steps_done(left: Left) -> int:
    steps = [json.loads(value) for name, content in left.items() if name.endswith("metrics.jsonl")
             for key, value in content.items() if key.endswith(".step")]
    return max((step for step in steps if isinstance(step, int)), default=0)


@dataclass(frozen=True)
class Reference:
    left: Left
    verdicts: dict[str, str]
    volatile: set[tuple[str, str]]
    seconds: float
    folder: Path | None = None  # where its tensors are kept


def sort_run(reference: Reference, left: Left, ended: Ended, folder: Path | None = None) -> Sorted:
    verdicts, step = verdicts_in(left, ended), steps_done(left)
    worse = {check: outcome for check, outcome in verdicts.items()
             if OUTCOMES.index(outcome) > OUTCOMES.index(reference.verdicts.get(check, "PROVEN"))}
    if ended.code == TIMED_OUT:
        return Sorted("timeout", step=step)
    if ended.code in (3, 4):
        check = next((name for name, outcome in worse.items() if outcome == "REFUTED"), next(iter(worse), "refused"))
        return Sorted("stopped", check, step, ["", *(ended.err.strip() or ended.out.strip()).splitlines()][-1][:200])
    if ended.code != 0:
        return Sorted("crashed", step=step, words=f"exit {ended.code}: {(ended.err.strip().splitlines() or [''])[-1][:200]}")
    folders = None if reference.folder is None or folder is None else (reference.folder, folder)
    found = differences(reference.left, left, reference.volatile, folders)
    changed = [f"{meaning}: {text}" for meaning, texts in found.items() for text in texts[:SHOWN]]
    if not changed:
        return Sorted("equivalent")
    if worse:
        return Sorted("said", next(iter(worse)), step, f"{next(iter(worse.values()))}", changed)
    kind = "silent" if found["weights"] or found["scores"] else "rounding" if found["rounding"] else "record"
    return Sorted(kind, step=step, changed=changed)

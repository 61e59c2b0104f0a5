"""Run record: a run as its files tell it; what is missing, torn or damaged becomes a sentence, and nothing raises."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay import strict_json
from assay.errors import ArtifactError, UsageError
from assay.store import durable, ledger, sealed
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict

_LIMIT = 1 << 30
MARKS = {"hallmarked": "PROVEN", "quarantined": "REFUTED", "unproven": "UNPROVEN"}  # what lies beside a manifest, and what that says
_QUARANTINE = {"verdicts": [{"outcome": str, "reason": str}]}
LEDGER, METRICS, CONFIG = "ledger.jsonl", "metrics.jsonl", "config.yaml"


@dataclass(frozen=True)
class Lines:
    """A file of JSON lines: the whole ones, and what is to be said of the rest."""

    rows: list[dict[str, Any]]
    sha256: str | None
    remarks: list[str]


@dataclass(frozen=True)
class RunRecord:
    """`damage` is what voids a claim: a broken chain. `remarks` are what a reader should know besides."""

    folder: Path
    events: list[dict[str, Any]]
    head: str
    metrics: Lines
    config_text: str | None
    config: dict[str, Any]
    damage: str | None = None
    remarks: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def recipe(self) -> str:
        """The verb that began it."""
        begun = [event.get("recipe") for event in self.events if event["kind"] in (Event.START, Event.RESUME)]
        return str(begun[-1]).lower() if begun and begun[-1] else "unknown"

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] in kinds]


def is_run(folder: Path) -> bool:
    return (folder / LEDGER).is_file() or ((folder / CONFIG).is_file() and (folder / METRICS).is_file())


def read_run(folder: Path, metrics: Lines | None = None) -> RunRecord:
    """`metrics` are those of whoever has read them already."""
    if not is_run(folder):
        raise UsageError(f"{folder}: not a run: there is neither {LEDGER} nor {CONFIG} with {METRICS}; give the folder of a run")
    events, head, damage, remarks = _read_ledger(folder / LEDGER)
    text, config, about_config = _read_config(folder / CONFIG)
    metrics = read_lines(folder / METRICS) if metrics is None else metrics
    return RunRecord(folder, events, head, metrics, text, config, damage, [*remarks, *metrics.remarks, *about_config])


def read_lines(path: Path) -> Lines:
    """JSON lines. A last one that a kill tore is said; one in the middle that does not parse is said by its number."""
    if not path.is_file():
        return Lines([], None, [f"{path.name} is not here"])
    try:
        data = durable.read_file(path, limit=_LIMIT)
    except ArtifactError as error:
        return Lines([], None, [_told(error, path)])
    *lines, tail = data.split(b"\n")
    rows, remarks = [], []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(strict_json.parse_json(line, where=path.name, shape=dict, surrogates=True))
        except ArtifactError as error:
            remarks.append(f"{path.name} line {number} is {'not JSON' if 'not JSON' in str(error) else 'no JSON object'} and was left out")
    if tail:
        remarks.append(f"{path.name}: the last line was cut short after {len(tail)} bytes; the {len(rows)} before it are shown")
    return Lines(rows, hashlib.sha256(data).hexdigest(), remarks)


def read_json_or_remark(path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """An object and no sentence; or neither where there is no such file; or the sentence about what was found."""
    if not path.is_file():
        return None, None
    try:
        return strict_json.read_json(path, limit=_LIMIT), None
    except ArtifactError as error:
        return None, _told(error, path)


# ---------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint's manifest as it was sealed. `problem` says why the folder is not what the manifest lists."""

    name: str
    manifest: dict[str, Any]
    digest: str
    mark: str  # a key of MARKS
    problem: str | None

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest["facts"]

    @property
    def weights(self) -> str:
        from assay.store.digests import recorded_digest

        return recorded_digest(self.manifest)

    def ancestor(self, role: str) -> dict[str, str] | None:
        """`parent` or `base`: the digest of its weights, and where they were."""
        found = self.facts.get(role)
        return found if isinstance(found, dict) and {"weights", "path"} <= found.keys() else None


def saved_in(run: Path) -> tuple[list[SavedCheckpoint], list[str]]:
    """The run's base, its checkpoints by step, and what it handed over; and what is wrong with those that cannot be read."""
    from assay.store.checkpoint import MANIFEST, step_folders

    places = [run / "base", *step_folders(run / "checkpoints"), run / "adapter", run / "model"]
    found, wrong = [], []
    for place in places:
        if (place / MANIFEST).is_file():
            try:
                found.append(_saved(place))
            except ArtifactError as error:
                wrong.append(_told(error, place))
    return found, wrong


def newest_manifest(run: Path) -> dict[str, Any]:
    """Manifest of the last step, or of what was handed over without any (an edit); empty where none can be read. Loads no tensor
    library."""
    by_step = sorted((run / "checkpoints").glob("step-*/manifest.json"), key=lambda path: (len(path.parent.name), path.parent.name))
    places = [run / "model" / "manifest.json", *by_step]
    for place in reversed([path for path in places if path.is_file()]):
        try:
            return sealed.unseal(durable.read_file(place, limit=_LIMIT), where=str(place), indent=1)
        except ArtifactError:
            continue  # the older one may say it; that this one is damaged is said by the report and by `assay prove`
    return {}


def _saved(place: Path) -> SavedCheckpoint:
    """The manifest must be as it was sealed; weights that are not here, or of another size, are a problem that is said."""
    from assay.store.checkpoint import MANIFEST, SMALL_FILE_LIMIT, open_checkpoint, require_manifest

    data = durable.read_file(place / MANIFEST, limit=SMALL_FILE_LIMIT)
    manifest = sealed.unseal(data, where=str(place / MANIFEST), indent=1)
    require_manifest(manifest, place)
    digest = hashlib.sha256(data).hexdigest()
    try:
        found = open_checkpoint(place, verify=False)
        mark = "quarantined" if found.quarantined else "hallmarked" if found.hallmark else "unproven"
        return SavedCheckpoint(place.name, manifest, digest, mark, None)
    except ArtifactError as error:
        return SavedCheckpoint(place.name, manifest, digest, "unproven", _told(error, place))


def found_since(place: Path) -> Verdict | None:
    """What speaks against a model that was handed over, as it lies there now; None where every file has its size and nothing was found
    against it. Bytes are not hashed: `assay prove` does that. Loads no tensor library."""
    if not (place / "manifest.json").is_file():
        return Verdict("kept", Outcome.UNPROVEN, f"{place.name} is not there any more")
    try:
        if (place / "quarantine.json").is_file():
            mark = strict_json.read_json(place / "quarantine.json", _QUARANTINE)
            against = "; ".join(one["reason"] for one in mark["verdicts"] if one["outcome"] == Outcome.REFUTED)
            return Verdict("kept", Outcome.REFUTED, f"{place.name} is quarantined: {against or 'no reason is recorded'}")
        data = durable.read_file(place / "manifest.json", limit=_LIMIT)
        listed = sealed.unseal(data, where=str(place / "manifest.json"), indent=1).get("files", {})
        sizes = {name: facts["bytes"] for name, facts in listed.items()}
        wrong = sorted(name for name in sizes if not (file := place / name).is_file() or file.stat().st_size != sizes[name])
    except ArtifactError as error:
        return Verdict("kept", Outcome.REFUTED, f"{place.name} is damaged: {_told(error, place)}")
    if wrong:
        return Verdict("kept", Outcome.REFUTED, f"{place.name} is damaged: {', '.join(wrong)} is gone, or of another size than was written")
    return None


# ---------------------------------------------------------------- verdicts


def verdicts_of(event: Mapping[str, Any]) -> list[Verdict]:
    """Verdicts of an event as recorded. What is not written as a verdict is counted as one that proves nothing, never as success."""
    found = event.get("verdicts")
    return [_verdict(entry) for entry in found] if isinstance(found, list) else []


def _verdict(entry: Any) -> Verdict:
    if not isinstance(entry, dict) or entry.get("outcome") not in list(Outcome):
        return Verdict("unknown", Outcome.UNPROVEN, f"the ledger holds no verdict here: {json.dumps(entry)[:200]}")
    evidence = entry["evidence"] if isinstance(entry.get("evidence"), dict) else {}
    return Verdict(str(entry.get("check")), Outcome(entry["outcome"]), str(entry.get("reason")), evidence)


def finite_number(value: Any) -> float | None:
    """Value as a float, if it can be drawn or compared."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


# ---------------------------------------------------------------- files


def _read_ledger(path: Path) -> tuple[list[dict[str, Any]], str, str | None, list[str]]:
    if not path.is_file():
        return [], ledger.GENESIS, None, [f"{path.name} is not here: nothing says what was checked"]
    try:
        chain, broken = ledger.read_until_damage(path)
    except ArtifactError as error:
        return [], ledger.GENESIS, _told(error, path), []
    if broken is not None:
        return chain.events, chain.head, (f"{_told(broken, path)}. The {len(chain.events)} events before it are shown; nothing vouches "
                                          "for what comes after"), []
    torn = [f"{path.name}: the last line was cut short after {len(chain.tail)} bytes; the {len(chain.events)} events before it are "
            "whole"] if chain.tail else []
    return chain.events, chain.head, None, torn


def _read_config(path: Path) -> tuple[str | None, dict[str, Any], list[str]]:
    text = None
    if not path.is_file():
        return None, {}, [f"{path.name} is not here"]
    try:
        text = strict_json.read_small_file(path, _LIMIT).decode("utf-8", "backslashreplace")
        values = strict_json.parse_yaml(text.encode(), where=path.name)
    except ArtifactError as error:
        return text, {}, [_told(error, path)]
    return (text, values, []) if isinstance(values, dict) else (text, {}, [f"{path.name} holds no options"])


def _told(error: Exception, path: Path) -> str:
    """The sentence without the folders above the run: where it lies is no part of what it shows."""
    return str(error).replace(f"{path.parent}/", "")

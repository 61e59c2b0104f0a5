"""Other tools' logs as results to compare: lm-eval's samples, inspect-ai's logs, trainer_state.json, and exports of Weights & Biases.

They are taken as they come. What is unknown is never 0: a sample without a score, a log of a run that failed, or two files of one task
in a folder are refused by name.
"""

import hashlib
import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.comparison.read_results import Arm, Samples, ScoredRun, Series, is_lower_better, read_score, sorted_out
from assay.errors import DataError, UsageError
from assay.strict_json import NATURAL, parse_json, read_json, read_small_file, require_shape

INSPECT_VALUES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}  # correct, incorrect, partial, no answer: as inspect-ai counts them
_LM_EVAL = {"doc_id": (NATURAL, str), "metrics": [str], "filter?": str, "doc_hash?": str}
_INSPECT_SAMPLE = {"id": (int, str), "epoch?": NATURAL, "scores?": ({str: {"value": object}}, None), "error?": object}
_INSPECT = {"status": str, "eval": {"task": str, "model?": str}}
_TRAINER_STATE = {"log_history": [{"step": NATURAL}]}
ZSTANDARD = 93  # as a zip archive numbers it
LARGEST_SAMPLE = 64 << 20  # bytes of one member of an archive


def read_foreign(path: Path, metric: str | None, lower_is_better: bool | None) -> list[Arm | Series] | None:
    """Read another tool's log, or None where it is no log that is known here."""
    if path.is_dir():
        return _read_folder(path, metric, lower_is_better)
    if path.suffix == ".eval":
        return [_inspect_arm(path, *_inspect_archive(path), metric, lower_is_better)]
    if path.suffix == ".json" and (found := read_json(path, object, error=DataError)) and isinstance(found, dict):
        if "log_history" in found:
            return [_trainer_series(path, metric, lower_is_better)]
        if {"eval", "status"} <= found.keys():
            document = read_json(path, _INSPECT | {"samples?": ([_INSPECT_SAMPLE], None)}, error=DataError)
            return [_inspect_arm(path, document, document.get("samples") or [], metric, lower_is_better)]
    return None


def read_foreign_rows(rows: Sequence[Mapping[str, Any]], path: Path, metric: str | None, lower: bool | None) -> list[Arm | Series] | None:
    """Rows of a table or of JSON lines in another tool's columns, or None where they are plain ones."""
    if {"doc_id", "metrics"} <= rows[0].keys():
        return [_lm_eval_arm(path, filtered, mine, metric, lower) for filtered, mine in _by_filter(rows, path).items()]
    if "_step" in rows[0]:  # Weights & Biases' history
        return sorted_out([{**row, "step": row["_step"]} for row in rows], path, metric or "score", lower)
    if "Step" in rows[0] and (curves := [name for name in rows[0] if " - " in name and not name.endswith(("__MIN", "__MAX"))]):
        return [_exported_series(path, name, rows, lower) for name in curves if metric is None or name.endswith(f" - {metric}")] or None
    return None


def _read_folder(folder: Path, metric: str | None, lower: bool | None) -> list[Arm | Series] | None:
    """A folder of lm-eval (or the one above it), of inspect-ai, or of a trainer."""
    if samples := sorted(folder.glob("samples_*.jsonl")) or sorted(folder.glob("*/samples_*.jsonl")):
        _refuse_two_of_one_task(folder, samples)
        return [one for file in samples for one in read_foreign_rows(_json_lines(file), file, metric, lower) or []]
    if logs := sorted([*folder.glob("*.eval"), *folder.glob("????-??-??T*_*_*.json")]):  # as inspect-ai names them
        if len(logs) > 1:
            raise UsageError(f"{folder}: {len(logs)} logs of inspect-ai are here ({logs[0].name}, {logs[1].name}, …); name one")
        return read_foreign(logs[0], metric, lower)
    states = [path for path in (folder, *folder.glob("checkpoint-*")) if (path / "trainer_state.json").is_file()]
    if not states:
        return None
    newest = max(states, key=lambda path: int(path.name.rpartition("-")[2]) if path.name.rpartition("-")[2].isdigit() else 0)
    return read_foreign(newest / "trainer_state.json", metric, lower)


# ---------------------------------------------------------------- lm-eval


def _json_lines(file: Path) -> list[dict[str, Any]]:
    lines = read_small_file(file, 1 << 30, DataError).splitlines()
    rows = [parse_json(line, where=f"{file}:{number}", shape=dict, error=DataError) for number, line in enumerate(lines, 1) if line]
    if not rows:
        raise DataError(f"{file}: no rows")
    return rows


def _by_filter(rows: Sequence[Mapping[str, Any]], path: Path) -> dict[str, list[Mapping[str, Any]]]:
    """lm-eval writes a question once for each way of reading its answer; each is a result of its own."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for number, row in enumerate(rows, 1):
        require_shape(row, _LM_EVAL, where=f"{path}:{number}", error=DataError)
        found.setdefault(str(row.get("filter") or "none"), []).append(row)
    return found


def _lm_eval_arm(path: Path, filtered: str, rows: Sequence[Mapping[str, Any]], metric: str | None, lower: bool | None) -> Arm:
    task = _task_of(path)
    name = metric or _only_metric(rows[0]["metrics"], path)
    scores: dict[str, Samples] = {}
    for row in rows:
        where = f"{path}: {name} of doc_id {row['doc_id']}"
        if name not in row:
            raise UsageError(f"{path}: no metric {name!r}; it has {', '.join(row['metrics'])}")
        if str(row["doc_id"]) in scores:
            raise DataError(f"{where}: this question stands twice with filter {filtered!r}; give one run's samples a file")
        scores[str(row["doc_id"])] = (read_score(row[name], where),)
    asked = hashlib.sha256("".join(sorted(str(row.get("doc_hash") or "") for row in rows)).encode()).hexdigest()[:16]
    group = task if filtered == "none" else f"{task}, {filtered}"
    lower_is_better = is_lower_better(name, lower)
    return Arm(path.parent.name, name, (ScoredRun(path.name, scores),), lower_is_better, group, data={"task": task, "dataset": asked})


def _task_of(path: Path) -> str:
    """samples_TASK_2026-01-31T10-00-00.000.jsonl"""
    return path.stem.removeprefix("samples_").rpartition("_")[0] or path.stem


def _only_metric(metrics: Sequence[str], path: Path) -> str:
    if not metrics:
        raise DataError(f"{path}: its rows name no metric")
    if len(metrics) > 1:
        raise UsageError(f"{path}: has the metrics {', '.join(metrics)}; choose one with --metric")
    return metrics[0]


def _refuse_two_of_one_task(folder: Path, files: Sequence[Path]) -> None:
    seen: dict[tuple[Path, str], Path] = {}
    for file in files:
        if (key := (file.parent, _task_of(file))) in seen:
            raise UsageError(f"{folder}: {seen[key].name} and {file.name} are two evaluations of one task; name the file that you mean")
        seen[key] = file


# ---------------------------------------------------------------- inspect-ai


def _inspect_archive(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Head and samples of a .eval file, an archive with one member a sample."""
    try:
        with zipfile.ZipFile(io.BytesIO(read_small_file(path, error=DataError))) as archive:
            head = parse_json(_member(archive, "header.json", path), where=f"{path}: header.json", shape=_INSPECT, error=DataError)
            names = sorted(name for name in archive.namelist() if name.startswith("samples/") and name.endswith(".json"))
            samples = [parse_json(_member(archive, name, path), where=f"{path}: {name}", shape=_INSPECT_SAMPLE, error=DataError,
                                  surrogates=True) for name in names]
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path}: is no log of inspect-ai that can be read ({error}); write it as JSON: inspect log convert --to json"
                        ) from None
    return head, samples


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    if archive.getinfo(name).file_size > LARGEST_SAMPLE:
        raise DataError(f"{path}: {name} has {archive.getinfo(name).file_size:,} bytes; expected at most {LARGEST_SAMPLE:,}")
    return _zstd_member(archive, name, path) if archive.getinfo(name).compress_type == ZSTANDARD else archive.read(name)


def _zstd_member(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """A member that Python's zipfile does not decompress before 3.14: its bytes are found by the archive's own table."""
    try:
        from pyarrow import Codec
    except ModuleNotFoundError:
        raise UsageError(f"{path}: is compressed with Zstandard, which pyarrow reads: pip install 'assay[data]'; or write it as JSON: "
                         "inspect log convert --to json") from None
    info, file = archive.getinfo(name), archive.fp
    assert file is not None
    file.seek(info.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    file.seek(info.header_offset + 30 + name_length + extra_length)
    try:
        data: bytes = Codec("zstd").decompress(file.read(info.compress_size), info.file_size, asbytes=True)
    except OSError as error:
        raise DataError(f"{path}: {name} is damaged ({error})") from None
    if zlib.crc32(data) != info.CRC:
        raise DataError(f"{path}: {name} is damaged: its checksum is another")
    return data


def _inspect_arm(path: Path, head: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], metric: str | None,
                 lower: bool | None) -> Arm:
    if head["status"] != "success":
        raise DataError(f"{path}: the evaluation ended as {head['status']!r}; a mean over what was scored before would be of other data")
    if not samples:
        raise DataError(f"{path}: no samples are in it; a summary cannot be paired. Log samples and evaluate again")
    scorers = sorted({name for sample in samples for name in sample.get("scores") or {}})
    chosen = metric or _only_metric(scorers, path)
    scores: dict[str, list[Any]] = {}
    for sample in samples:
        where = f"{path}: sample {sample['id']!r}, epoch {sample.get('epoch', 1)}"
        if sample.get("error") or chosen not in (sample.get("scores") or {}):
            raise DataError(f"{where}: has no score of {chosen!r}{' (it ended in an error)' if sample.get('error') else ''}; evaluate it "
                            f"again, or leave it out of every arm. Scorers: {', '.join(scorers) or 'none'}")
        value = sample["scores"][chosen]["value"]
        scores.setdefault(str(sample["id"]), []).append(INSPECT_VALUES.get(value, value) if isinstance(value, str) else value)
    found = {name: tuple(read_score(value, f"{path}: {chosen} of {name!r}") for value in values) for name, values in scores.items()}
    return Arm(str(head["eval"].get("model") or path.stem), chosen, (ScoredRun(path.name, found),), is_lower_better(chosen, lower),
               data={"task": head["eval"]["task"]})


# ---------------------------------------------------------------- curves


def _trainer_series(path: Path, metric: str | None, lower: bool | None) -> Series:
    """transformers' and TRL's trainer_state.json: the evaluations' loss where there were any, else the training loss."""
    history = read_json(path, _TRAINER_STATE, error=DataError)["log_history"]
    known = list(dict.fromkeys(name for line in history for name in line))
    chosen = metric or ("eval_loss" if "eval_loss" in known else "loss")
    lines = [line for line in history if chosen in line]
    if not lines:
        raise UsageError(f"{path}: no metric {chosen!r}; it has {', '.join(known)}")
    name = path.parent.parent.name if path.parent.name.startswith("checkpoint-") else path.parent.name
    return _series(name or path.stem, chosen, ((line["step"], line[chosen]) for line in lines), path, lower)


def _exported_series(path: Path, column: str, rows: Sequence[Mapping[str, Any]], lower: bool | None) -> Series:
    """A column `RUN - METRIC` of the table that Weights & Biases' page exports; rows where the run has no value are empty."""
    name, _, metric = column.rpartition(" - ")
    return _series(name, metric, ((row["Step"], row[column]) for row in rows if row[column] not in (None, "")), path, lower)


def _series(name: str, metric: str, points: Iterable[tuple[Any, Any]], path: Path, lower: bool | None) -> Series:
    by_step: dict[int, float] = {}
    for step, value in points:
        where = f"{path}: {metric} at step {step}"
        number = read_score(step, where)
        if int(number) in by_step:
            raise DataError(f"{where}: stands twice")
        by_step[int(number)] = read_score(value, where)
    if not by_step:
        raise DataError(f"{path}: {metric} of {name} has no value")
    steps = sorted(by_step)
    return Series(name, metric, tuple(steps), tuple((by_step[step],) for step in steps), is_lower_better(metric, lower))

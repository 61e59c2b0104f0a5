"""Evaluation folder: request.json says what was asked, scores.jsonl holds a line per example, eval.json what they come to.

The same command resumes where it was killed. Another model, dataset, prompt or setting in the same folder is refused.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from assay.errors import DataError, GuardStop, UsageError
from assay.store import durable
from assay.strict_json import NATURAL, parse_json, read_json, require_shape

_FORMAT = 1
REQUEST, SCORES, SUMMARY = "request.json", "scores.jsonl", "eval.json"
_SAMPLE = {"ids": list, "text": (str, None), "ended": str, "score": float, "lenient": float, "parsed": bool,
           "answer": (str, float, bool, None), "measures": dict}
_ROWS = {"samples": {"id": str, "samples": [_SAMPLE]}, "scores": {"id": str, "scores": dict, "nats": [float]},
        "nats": {"id": str, "nats": float, "bytes": NATURAL, "tokens": NATURAL}}  # by what a row of its kind of task holds


class EvalFolder:
    """A folder that one evaluation writes to. `rows` are those that were scored before, by id."""

    def __init__(self, folder: Path, request: Mapping[str, Any]):
        self.folder, self.request = folder, dict(request) | {"format": _FORMAT}
        durable.make_folder(folder)
        self._require_ours()
        self.file = (folder / SCORES).open("a+b")
        with contextlib.ExitStack() as refused:
            refused.callback(self.file.close)
            self._lock()
            self._claim()
            self.rows = {row["id"]: row for row in self._read()}
            refused.pop_all()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, written together, after all of them are scored."""
        rows = list(rows)
        with durable.as_store_error(self.folder / SCORES):
            self.file.write(b"".join(_line(row) for row in rows))
            self.file.flush()
        self.rows |= {row["id"]: dict(row) for row in rows}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The scores are on the disk for good before anything says what they come to."""
        with durable.as_store_error(self.folder / SCORES):
            durable.disk.sync(self.file.fileno())
        self.file.seek(0)
        digest = hashlib.sha256(self.file.read()).hexdigest()
        text = json.dumps({**self.request, **summary, "scores_sha256": digest}, indent=1, ensure_ascii=False)
        durable.replace_file(self.folder / SUMMARY, text.encode() + b"\n")

    def withdraw(self) -> None:
        """Take back what the scores were said to come to."""
        durable.remove_file(self.folder / SUMMARY)

    def require_summary(self) -> None:
        """Stop where an evaluation that was read back soundly is not there in the end."""
        if not (self.folder / SUMMARY).exists():
            raise GuardStop(f"{self.folder / SUMMARY}: the evaluation was written, and is gone before it ends; evaluate again")

    def close(self) -> None:
        self.file.close()

    def _require_ours(self) -> None:
        """Refuse a folder of something else. One that was killed early may have left nothing but its lock; rows and graders that were given
        in memory lie in `inputs`."""
        names = {entry.name for entry in self.folder.iterdir() if not entry.name.startswith(durable.PARTIAL)}
        if REQUEST not in names and names - {SCORES, "inputs"}:
            raise UsageError(f"{self.folder} holds something else; give an empty or a new folder with --out")

    def _lock(self) -> None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.folder}: another evaluation is writing here; wait for it, or give another --out") from None

    def _claim(self) -> None:
        """Claim the folder for this request, under the lock: of two that begin at once, the scores of one must not come to stand under the
        request of the other."""
        path = self.folder / REQUEST
        if not path.exists():
            if os.fstat(self.file.fileno()).st_size:
                raise UsageError(f"{path} is missing, and {SCORES} is not empty: nobody knows what it holds; give another --out")
            durable.replace_file(path, json.dumps(self.request, indent=1).encode() + b"\n")
            return
        recorded = read_json(path, error=DataError)
        other = [name for name in {**recorded, **self.request} if recorded.get(name) != self.request.get(name)]
        if other:
            first = other[0]
            raise DataError(f"{self.folder} holds an evaluation with another {', '.join(other)} (there {_shown(recorded.get(first))}, now "
                            f"{_shown(self.request.get(first))}); give another folder with --out")

    def _read(self) -> Iterable[dict[str, Any]]:
        """Rows of every whole line; what a kill left of one goes."""
        self.file.seek(0)
        text = self.file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.file.truncate(len(whole))
        return [_row(line, f"{self.folder / SCORES}:{number}") for number, line in enumerate(whole.split(b"\n")[:-1], 1)]


def _row(line: bytes, where: str) -> dict[str, Any]:
    row = parse_json(line, where=where, shape={"id": str}, error=DataError, surrogates=True)
    require_shape(row, _ROWS[next((kind for kind in _ROWS if kind in row), "nats")], where=where, error=DataError)
    return row


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else text[:24] + "…"

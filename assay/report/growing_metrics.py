"""Growing metrics: metrics.jsonl read on from where it was left, and thinned as it comes, so that its length costs nothing later."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.report.figures import BETWEEN, NO_CURVES
from assay.report.run_record import Lines, finite_number
from assay.report.run_status import held_out_scores

AT_ONCE = 4 << 20  # bytes that one reading takes: a long file comes in several, and others are served between them
MOST_BUCKETS = 600  # points of one curve


class GrowingLines:
    """JSON lines of a file that is being written, whole ones alone; a file that became shorter, or another file, is read from its
    beginning."""

    def __init__(self, path: Path):
        self.path = path
        self.begin_again()

    def begin_again(self) -> None:
        self.offset, self.left_out = 0, 0
        self._file: tuple[int, int] | None = None

    def changed(self) -> tuple[bool, bool]:
        """Whether there is something to read, and whether what was read before is void."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False, self._file is not None
        void = self._file is not None and (self._file != (found.st_dev, found.st_ino) or found.st_size < self.offset)
        return void or found.st_size > self.offset, void

    def read(self) -> Iterator[dict[str, Any]]:
        """The next objects, at most some megabytes of them. A line without an end is left for later."""
        with open(self.path, "rb") as file:
            found = os.fstat(file.fileno())
            self._file = (found.st_dev, found.st_ino)
            file.seek(self.offset)
            data = file.read(AT_ONCE)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == AT_ONCE:  # no metric is as long: it is passed over, piece by piece
            end, self.left_out = len(data), self.left_out + 1
        self.offset += end
        for line in data[:end].splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield row
            else:
                self.left_out += 1


@dataclass
class Bucket:
    """Neighbouring points as one. `low` and `high` are the sums of intervals where every point has one, else the extremes."""

    last: int
    total: float
    count: int
    least: float
    greatest: float
    low: float | None
    high: float | None

    def join(self, other: "Bucket") -> None:
        self.last, self.total, self.count = other.last, self.total + other.total, self.count + other.count
        self.least, self.greatest = min(self.least, other.least), max(self.greatest, other.greatest)
        self.low = None if self.low is None or other.low is None else self.low + other.low
        self.high = None if self.high is None or other.high is None else self.high + other.high


@dataclass
class GrowingCurve:
    """Curve of at most `MOST_BUCKETS` points: when there are more, two neighbours become one, and from then on so do the new ones."""

    size: int = 1  # points in a bucket
    buckets: list[Bucket] = field(default_factory=list)

    def add(self, step: int, value: float, low: float | None, high: float | None) -> None:
        point = Bucket(step, value, 1, value, value, low, high)
        if self.buckets and self.buckets[-1].count < self.size:
            self.buckets[-1].join(point)
        else:
            self.buckets.append(point)
        if len(self.buckets) > MOST_BUCKETS:
            self._halve()

    def _halve(self) -> None:
        kept = self.buckets[::2]
        for bucket, neighbour in zip(kept, self.buckets[1::2], strict=False):
            bucket.join(neighbour)
        self.buckets, self.size = kept, 2 * self.size

    def to_json(self) -> dict[str, Any]:
        """Means, and a band: the mean interval where one is on record, else from least to greatest of what each point stands for."""
        known = all(one.low is not None and one.high is not None for one in self.buckets)
        low = [(one.low or 0.0) / one.count if known else one.least for one in self.buckets]
        high = [(one.high or 0.0) / one.count if known else one.greatest for one in self.buckets]
        drawn = {"x": [one.last for one in self.buckets], "y": [_short(one.total / one.count) for one in self.buckets], "size": self.size}
        return drawn | ({"low": [_short(v) for v in low], "high": [_short(v) for v in high]} if known or self.size > 1 else {})


class GrowingMetrics:
    """A run's curves so far, the rows with held-out scores, and the newest row."""

    def __init__(self, path: Path):
        self.lines = GrowingLines(path)
        self._forget()

    def _forget(self) -> None:
        self.lines.begin_again()
        self.curves: dict[str, GrowingCurve] = {}
        self.evaluated: list[dict[str, Any]] = []
        self.newest: dict[str, Any] = {}
        self.rows = 0

    def read_on(self) -> bool:
        """Whether anything came."""
        changed, void = self.lines.changed()
        if void:
            self._forget()
        if not changed:
            return void
        before = self.lines.offset
        for row in self.lines.read():
            self._take(row)
        return self.lines.offset != before

    def known(self) -> Lines:
        """Lines that a run's row on the board is made from: the evaluations, and the last row."""
        rows = [*self.evaluated, *([self.newest] if self.newest else [])]
        left_out = self.lines.left_out
        return Lines(rows, None, [f"{left_out} lines of {self.lines.path.name} are no JSON objects and were left out"] if left_out else [])

    def _take(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            return
        self.rows += 1
        if finite_number(row.get("eval_low")) is not None:
            self.evaluated.append(row)
        if (step >= self.newest.get("step", -1) and "num_tokens" in row) or not self.newest:
            self.newest = row
        intervals = self._intervals(row)
        for key, value in row.items():
            if key not in NO_CURVES and (number := finite_number(value)) is not None:
                self.curves.setdefault(key, GrowingCurve()).add(step + 1, number, *intervals.get(key, (None, None)))

    def _intervals(self, row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        found = {}
        for score in held_out_scores([row]) if "eval_low" in row else ():
            if score.low is not None and score.high is not None:
                found["eval_" + score.name.replace(" ", "_")] = (score.low, score.high)
        for key, (low, high) in BETWEEN.items():
            least, greatest = finite_number(row.get(low)), finite_number(row.get(high))
            if key in row and least is not None and greatest is not None:
                found[key] = (least, greatest)
        return found


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None

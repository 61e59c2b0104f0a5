"""Row files mixed, split, deduplicated and inspected: every row stays the bytes that it was, and what was done is counted.

Rows of .jsonl files are copied as they stand; those of other kinds are written as JSON. What is written is written whole or not at all.
Files are read more than once and never held: memory keeps some tens of bytes of each row (indexed_rows.py, near_duplicates.py). A row
that changed between two readings is refused.
"""

import hashlib
import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from itertools import compress, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data.data_files import MAX_DOCUMENT_BYTES, DataRow, TextSource, open_source, read_rows, row_object, source_lines
from assay.data.hub_datasets import local_data
from assay.data.indexed_rows import IndexedRows, changed_row, held_file, indexed_copy
from assay.data.layouts import CONVERSATION_LAYOUTS
from assay.data.mixture import WeightedSource, placed_row, rows_given, rows_until_empty, source_cycle, whole_shares
from assay.data.near_duplicates import (
    NEAR_COPY,
    Duplicates,
    PlacedLine,
    find_duplicates,
    prints_of_lines,
    refuse_wrong_likeness,
    stored_prints,
)
from assay.errors import DataError, GuardStop, UsageError
from assay.seeds import derive
from assay.store import durable

PREFERENCES = {"pairs": {"chosen", "rejected"}, "labelled": {"prompt", "completion", "label"}}  # layouts of dpo and kto, by what they need
_LOOKED_AT = 3  # rows that are shown
_COMPARED = 32  # rows left out that are compared again, and of each group before and after it


def row_lines(name: str) -> Iterator[bytes]:
    """Every row as one line of JSON, in order: of a .jsonl file the line itself, which must be a row."""
    for where, line in placed_lines(name):
        row_object(line, where)
        yield line


def placed_lines(name: str) -> Iterator[PlacedLine]:
    """Every row of a file, of which there must be one; of a .jsonl file the lines that are not blank, unread."""
    path, found = local_data(name), False
    copied = path.is_file() and path.name.endswith((".jsonl", ".jsonl.gz"))
    for placed in _jsonl_lines(TextSource(path, path.name)) if copied else map(written_row, read_rows(path)):
        found = True
        yield placed
    if not found:
        raise no_row_in(name)


def no_row_in(name: str) -> DataError:
    return DataError(f"{name}: there is no row in it")


def _jsonl_lines(source: TextSource) -> Iterator[PlacedLine]:
    return ((where, line if line.endswith(b"\n") else line + b"\n") for where, _, line in _lines_at(source))


def _lines_at(source: TextSource) -> Iterator[tuple[str, int, bytes]]:
    """Lines that are not blank, as they stand, each with its place in words and in bytes."""
    start = 0
    with open_source(source) as file:
        for number, line in source_lines(source, file, 6 * MAX_DOCUMENT_BYTES):
            if line.strip():
                yield f"{source.path}:{number}", start, line
            start += len(line)


@contextmanager
def indexed_rows(name: str, out: Path) -> Iterator[IndexedRows]:
    """Every row of a file, each of which was read once and is a row; those that lie in no .jsonl file as JSON in a file beside `out`."""
    path = local_data(name)
    if not (path.is_file() and path.name.endswith(".jsonl")):
        with indexed_copy(name, row_lines(name), out) as index:
            yield index
        return
    source = TextSource(path, path.name)
    with held_file(source) as file:
        index = IndexedRows(name, file)
        for where, start, line in _lines_at(source):
            row_object(line, where)
            index.note(start, line)
        if not len(index):
            raise no_row_in(name)
        yield index


def rows_read_again(lines: Iterable[PlacedLine], hashes: Sequence[int], name: str) -> Iterator[PlacedLine]:
    """Rows of a second reading, which are those of the first by their hashes, neither more nor fewer."""
    number = -1
    for number, (where, line) in enumerate(lines):
        if number == len(hashes) or hash(line) != hashes[number]:
            raise changed_row(name, number)
        yield where, line
    if number + 1 < len(hashes):
        raise changed_row(name, number + 1)


def written_row(row: DataRow) -> PlacedLine:
    """Row as a line of JSON, which has no word for NaN: what pandas writes into parquet where a number is missing becomes null. It has none
    for bytes and for infinite numbers either, and these are refused. Dates and decimals become text."""
    def as_text(value: Any) -> str:
        if isinstance(value, bytes):
            raise DataError(f"{row.where}: the column {column_with(row.values, bytes)!r} holds bytes, which JSON cannot say; make it text, "
                            "or leave it out of the file")
        return str(value)

    try:
        line = json.dumps(without_nan(row.values), ensure_ascii=False, allow_nan=False, default=as_text)
    except ValueError:
        raise DataError(f"{row.where}: not JSON (Infinity): a number is infinite, which JSON cannot say; write a finite one or "
                        "none") from None
    return row.where, line.encode(errors="surrogatepass") + b"\n"


def column_with(values: dict[str, Any], kind: type) -> str:
    """The first that holds such a value, however deep."""
    def holds(value: Any) -> bool:
        within = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return isinstance(value, kind) or any(map(holds, within))

    return next(name for name, value in values.items() if holds(value))


def without_nan(value: Any, infinite: Callable[[float], Any] = float) -> Any:
    """Null in the place of NaN, and what `infinite` makes of numbers that are."""
    if isinstance(value, dict):
        return {key: without_nan(each, infinite) for key, each in value.items()}
    if isinstance(value, list | tuple):  # a map of parquet's is a list of pairs
        return [without_nan(each, infinite) for each in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else infinite(value)


def write_lines(out: str, lines: Iterable[bytes], rows: int) -> str:
    """A new .jsonl file with these rows, so many of them; its sha256, which must be that of the rows one after another."""
    path = Path(out)
    if not path.name.endswith(".jsonl"):
        raise UsageError(f"--out {out}: expected the name of a .jsonl file")
    refuse_existing(path)
    durable.make_folder(path.absolute().parent)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    due, count = hashlib.sha256(), 0

    def hashed() -> Iterator[bytes]:
        nonlocal count
        for line in lines:
            if not line.strip() or line.find(b"\n") != len(line) - 1:
                raise GuardStop(f"{out}: not written: row {count + 1:,} would not be one line of the file: {line[:80]!r}")
            due.update(line)
            count += 1
            yield line

    try:
        digest = durable.write_file(beside, in_pieces(hashed()))
        if (digest, count) != (due.hexdigest(), rows):
            raise GuardStop(f"{out}: not written: its {count:,} rows hash to {due.hexdigest()[:12]}, and what lay on the disk of {rows:,} "
                            f"that were meant to {digest[:12]}; write it again onto a sound disk")
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
    return digest


def refuse_existing(*paths: Path) -> None:
    for path in paths:
        if path.exists():
            raise UsageError(f"{path} is there already; remove it, or give another --out")
        durable.require_outside_checkpoints(path)


def in_pieces(lines: Iterable[bytes], size: int = 1 << 20) -> Iterator[bytes]:
    held, length = list[bytes](), 0
    for line in lines:
        held.append(line)
        length += len(line)
        if length >= size:
            yield b"".join(held)
            held, length = [], 0
    if held:
        yield b"".join(held)

# ---------------------------------------------------------------- mixing


def mix_rows(sources: Sequence[WeightedSource], out: str, *, rows: int | None, epochs: int, seed: int) -> dict[str, Any]:
    """Rows of several files by their weights, each file in an order of its own; until `rows`, or until a file was read `epochs` times."""
    refuse_existing(Path(out))
    with ExitStack() as opened:
        files = [opened.enter_context(indexed_rows(source.name, Path(out))) for source in sources]
        shares = whole_shares([source.weight or Fraction(1) for source in sources])
        there = rows_until_empty([epochs * len(file) for file in files], shares)
        out_first = sources[placed_row(there, shares).source].name
        if rows is not None and rows > there:
            raise DataError(f"{out_first} has been read {epochs} time(s) after {there:,} of {rows:,} rows; lower --n or its weight, or "
                            "raise --epochs")
        total = there if rows is None else rows
        digest = write_lines(out, mixed_lines(files, shares, total, seed), total)
    given = rows_given(total, shares)
    return {"file": out, "sha256": digest, "rows": sum(given), "ran_out": out_first if rows is None else None, "sources": {
        source.name: {"rows": count, "share": count / max(1, sum(given)), "asked": share / sum(shares), "times_read": count / len(file)}
        for source, count, share, file in zip(sources, given, shares, files, strict=True)}}


def mixed_lines(files: Sequence[IndexedRows], shares: tuple[int, ...], rows: int, seed: int) -> Iterator[bytes]:
    orders = [file.in_order(derive(seed, "source", source)) for source, file in enumerate(files)]
    return (next(orders[source]) for source in islice(cycle(source_cycle(shares)), rows))

# ---------------------------------------------------------------- splitting


def row_content(line: bytes, where: str) -> str:
    """Content key of a row, equal for rows that say the same."""
    return hashlib.sha256(json.dumps(row_object(line, where), sort_keys=True).encode()).hexdigest()[:16]


def refuse_wrong_contents() -> None:
    """Check content keys before rows are held out: of known rows, those that say the same have one, whatever the order of their columns,
    and no others."""
    same = [b'{"a": 1, "b": {"c": "x", "d": null}}', b'{"b":{"d":null,"c":"x"},"a":1}']
    others = [b'{"a": 1, "b": {"c": "y", "d": null}}', b'{"a": "1", "b": {"c": "x", "d": null}}', b'{"a": 1}']
    contents = [row_content(line, "a known row") for line in (*same, *others)]
    if contents[0] != contents[1] or len(set(contents)) != 1 + len(others):
        raise GuardStop("split: two of five known rows say the same, and by their contents it is not these two: copies would stand on both "
                        "sides")


def split_rows(name: str, folder: str, *, held_out: float, seed: int) -> dict[str, Any]:
    """FOLDER/train.jsonl and FOLDER/held-out.jsonl. Who is held out depends on what a row says and on the seed; copies go to one side."""
    refuse_existing(*(Path(folder) / f"{side}.jsonl" for side in ("train", "held-out")))
    refuse_wrong_contents()
    contents, hashes = array("Q"), array("q")
    for where, line in placed_lines(name):
        contents.append(int(row_content(line, where), 16))
        hashes.append(hash(line))
    apart, different = rows_apart(contents, held_out, seed)
    found = dict[str, Any]()
    for side, wanted in (("train", False), ("held-out", True)):
        out, rows = str(Path(folder) / f"{side}.jsonl"), int((apart == wanted).sum())
        lines = compress(rows_read_again(placed_lines(name), hashes, name), (apart == wanted).tobytes())
        found[side] = {"file": out, "rows": rows, "sha256": write_lines(out, (line for _, line in lines), rows)}
    with stored_prints(prints_of_lines(rows_read_again(placed_lines(name), hashes, name)), Path(out)) as prints:
        near = near_across(find_duplicates(prints, NEAR_COPY), apart)
    return found | {"copies": len(contents) - different, "near": near}


def rows_apart(contents: Sequence[int], held_out: float, seed: int) -> tuple[NDArray[np.bool_], int]:
    """Whether each row is held out, and how many different rows there are."""
    different, content_of = np.unique(np.array(contents, np.uint64), return_inverse=True)
    count = round(held_out * len(different))
    if not 0 < count < len(different):
        raise UsageError(f"--share {held_out:g} of {len(different)} different rows are {count}; expected at least one on each side")
    places = np.fromiter((derive(seed, "held-out", f"{content:016x}") for content in different.tolist()), np.int64, len(different))
    chosen = np.zeros(len(different), np.bool_)
    chosen[np.argsort(places, kind="stable")[:count]] = True
    return chosen[content_of], len(different)


def near_across(found: Duplicates, apart: NDArray[np.bool_]) -> int:
    """How many rows that are held out are near copies of rows that are not: what is measured on them is partly memory."""
    return int(np.isin(found.first[apart], found.first[~apart]).sum())

# ---------------------------------------------------------------- duplicates


def deduplicate(names: Sequence[str], out: str, *, threshold: float | None, field: str | None, workers: int) -> dict[str, Any]:
    """The rows of all files without those that repeat an earlier one: all of it or, with a threshold, nearly its words."""
    refuse_wrong_likeness()
    refuse_existing(Path(out))
    hashes = array("q")

    def noted() -> Iterator[PlacedLine]:
        for where, line in lines_of_all(names):
            hashes.append(hash(line))
            yield where, line

    with stored_prints(prints_of_lines(noted(), field=field, workers=workers, signed=threshold is not None), Path(out)) as prints:
        found = find_duplicates(prints, threshold)
    kept = found.kept
    lines = compress(rows_read_again(lines_of_all(names), hashes, ", ".join(names)), kept.tobytes())
    digest = write_lines(out, (line for _, line in lines), int(kept.sum()))
    repeated = np.flatnonzero(~kept)
    return {"file": out, "sha256": digest, "rows": len(kept), "kept": int(kept.sum()), "exact": found.exact, "near": found.near,
            "threshold": threshold, "pairs": [[int(row) + 1, int(found.first[row]) + 1] for row in repeated[:10]],
            "compared": [repeats_of(found, row) for row in repeated[:: -(-len(repeated) // _COMPARED) or 1].tolist()]}


def repeats_of(found: Duplicates, row: int) -> list[int]:
    """Number of a row that was left out, and of some that it is alike: a recount compares them."""
    group = np.flatnonzero(found.first == found.first[row])
    place = int(np.searchsorted(group, row))
    near = np.delete(group, place)[max(0, place - _COMPARED) : place + _COMPARED]
    return [each + 1 for each in (row, *dict.fromkeys([int(found.first[row]), *near.tolist()]))]


def lines_of_all(names: Sequence[str]) -> Iterator[PlacedLine]:
    return (placed for name in names for placed in placed_lines(name))

# ---------------------------------------------------------------- looking


def look_at_rows(name: str, limit: int | None = None) -> dict[str, Any]:
    """Columns with their kinds, how long rows are, how many repeat others, which layout they have, and the first of them."""
    columns, kinds = Counter[str](), dict[str, Counter[str]]()
    lengths, contents, layouts, first = array("q"), array("Q"), Counter[str](), list[dict[str, Any]]()
    for row in read_rows(local_data(name), limit=limit):
        columns.update(key for key, value in row.values.items() if value is not None)
        for key, value in row.values.items():
            kinds.setdefault(key, Counter())[type(value).__name__] += 1
        shown = without_nan(row.values, str)  # JSON has no word for infinite numbers
        lengths.append(len(json.dumps(shown, ensure_ascii=False, default=str).encode(errors="surrogatepass")) + 1)
        contents.append(int.from_bytes(hashlib.sha256(json.dumps(shown, sort_keys=True, default=str).encode()).digest()[:8]))
        layouts[layout_name(row)] += 1
        first += [shown] if len(first) < _LOOKED_AT else []
    if not lengths:
        raise no_row_in(name)
    quantiles = np.quantile(lengths, [0, 0.5, 0.95, 1]).astype(int).tolist()
    return {"file": name, "rows": len(lengths), "bytes": sum(lengths), "row_bytes": dict(zip(("least", "median", "p95", "most"), quantiles,
                                                                                             strict=True)),
            "copies": len(lengths) - len(np.unique(contents)), "layouts": dict(layouts), "first": first,
            "columns": {key: {"filled": columns[key], "kinds": dict(kinds[key])} for key in kinds}}


def layout_name(row: DataRow) -> str:
    """Name of the conversation layout that a row has, by its columns; `pairs` and `labelled` are those of preferences."""
    has = {key for key, value in row.values.items() if value is not None}
    others = [name for name, needs in PREFERENCES.items() if needs <= has]
    found = [name for name, layout in CONVERSATION_LAYOUTS.items() if layout.needs <= has and name != "prompt"]
    return (others or found or (["prompt"] if "prompt" in has else ["none"]))[0]

"""Row files mixed, split, deduplicated and inspected: every row stays the bytes that it was, and what was done is counted.

Rows of .jsonl files are copied as they stand; those of other kinds are written as JSON. What is written is written whole or not at all.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from assay.data.data_files import MAX_DOCUMENT_BYTES, DataRow, TextSource, open_source, read_rows, row_object, source_lines
from assay.data.hub_datasets import local_data
from assay.data.layouts import CONVERSATION_LAYOUTS
from assay.data.mixture import WeightedSource, placed_row, rows_given, rows_until_empty, whole_shares
from assay.data.near_duplicates import NEAR_COPY, PlacedLine, find_duplicates, prints_of_lines, refuse_wrong_likeness
from assay.data.order import permuted_places
from assay.errors import DataError, GuardStop, UsageError
from assay.seeds import derive
from assay.store import durable

PREFERENCES = {"pairs": {"chosen", "rejected"}, "labelled": {"prompt", "completion", "label"}}  # layouts of dpo and kto, by what they need
_LOOKED_AT = 3  # rows that are shown


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
        raise DataError(f"{name}: there is no row in it")


def _jsonl_lines(source: TextSource) -> Iterator[PlacedLine]:
    with open_source(source) as file:
        for number, line in source_lines(source, file, 6 * MAX_DOCUMENT_BYTES):
            if line.strip():
                yield f"{source.path}:{number}", line if line.endswith(b"\n") else line + b"\n"


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
    texts = [list(row_lines(source.name)) for source in sources]
    shares = whole_shares([source.weight or Fraction(1) for source in sources])
    there = rows_until_empty([epochs * len(lines) for lines in texts], shares)
    out_first = sources[placed_row(there, shares).source].name
    if rows is not None and rows > there:
        raise DataError(f"{out_first} has been read {epochs} time(s) after {there:,} of {rows:,} rows; lower --n or its weight, or raise "
                        "--epochs")
    total = there if rows is None else rows
    digest = write_lines(out, mixed_lines(texts, shares, total, seed), total)
    given = rows_given(total, shares)
    return {"file": out, "sha256": digest, "rows": sum(given), "ran_out": out_first if rows is None else None, "sources": {
        source.name: {"rows": count, "share": count / max(1, sum(given)), "asked": share / sum(shares), "times_read": count / len(lines)}
        for source, count, share, lines in zip(sources, given, shares, texts, strict=True)}}


def mixed_lines(texts: Sequence[Sequence[bytes]], shares: tuple[int, ...], rows: int, seed: int) -> Iterator[bytes]:
    orders: dict[tuple[int, int], list[int]] = {}
    for row in range(rows):
        source, number = placed_row(row, shares)
        epoch, place = divmod(number, len(texts[source]))
        if (source, epoch) not in orders:
            key = derive(derive(seed, "source", source), "order", epoch)
            orders[source, epoch] = permuted_places(np.arange(len(texts[source])), len(texts[source]), key).tolist()
        yield texts[source][orders[source, epoch][place]]

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
    contents = [row_content(line, where) for where, line in placed_lines(name)]
    ordered = sorted(set(contents), key=lambda content: derive(seed, "held-out", content))
    count = round(held_out * len(ordered))
    if not 0 < count < len(ordered):
        raise UsageError(f"--share {held_out:g} of {len(ordered)} different rows are {count}; expected at least one on each side")
    apart, found = set(ordered[:count]), dict[str, Any]()
    for side, wanted in (("train", False), ("held-out", True)):
        out = str(Path(folder) / f"{side}.jsonl")
        rows = sum((content in apart) is wanted for content in contents)
        lines = (line for (_, line), content in zip(placed_lines(name), contents, strict=True) if (content in apart) is wanted)
        found[side] = {"file": out, "rows": rows, "sha256": write_lines(out, lines, rows)}
    return found | {"copies": len(contents) - len(ordered), "near": near_across(name, [content in apart for content in contents])}


def near_across(name: str, held_out: Sequence[bool]) -> int:
    """How many rows that are held out are near copies of rows that are not: what is measured on them is partly memory."""
    groups, apart = find_duplicates(prints_of_lines(placed_lines(name)), NEAR_COPY).first, np.array(held_out)
    return int(np.isin(groups[apart], groups[~apart]).sum())

# ---------------------------------------------------------------- duplicates


def deduplicate(names: Sequence[str], out: str, *, threshold: float | None, field: str | None, workers: int) -> dict[str, Any]:
    """The rows of all files without those that repeat an earlier one: all of it or, with a threshold, nearly its words."""
    refuse_wrong_likeness()
    prints = prints_of_lines(lines_of_all(names), field=field, workers=workers, signed=threshold is not None)
    found = find_duplicates(prints, threshold)
    kept = found.kept
    lines = (line for (_, line), keep in zip(lines_of_all(names), kept, strict=True) if keep)
    digest = write_lines(out, lines, int(kept.sum()))
    repeated = np.flatnonzero(~kept)
    return {"file": out, "sha256": digest, "rows": len(kept), "kept": int(kept.sum()), "exact": found.exact, "near": found.near,
            "threshold": threshold, "pairs": [[int(row) + 1, int(found.first[row]) + 1] for row in repeated[:10]]}


def lines_of_all(names: Sequence[str]) -> Iterator[PlacedLine]:
    return (placed for name in names for placed in placed_lines(name))

# ---------------------------------------------------------------- looking


def look_at_rows(name: str, limit: int | None = None) -> dict[str, Any]:
    """Columns with their kinds, how long rows are, how many repeat others, which layout they have, and the first of them."""
    columns, kinds = Counter[str](), dict[str, Counter[str]]()
    lengths, contents, layouts, first = list[int](), set[str](), Counter[str](), list[dict[str, Any]]()
    for row in read_rows(local_data(name), limit=limit):
        columns.update(key for key, value in row.values.items() if value is not None)
        for key, value in row.values.items():
            kinds.setdefault(key, Counter())[type(value).__name__] += 1
        shown = without_nan(row.values, str)  # JSON has no word for infinite numbers
        lengths.append(len(json.dumps(shown, ensure_ascii=False, default=str).encode(errors="surrogatepass")) + 1)
        contents.add(hashlib.sha256(json.dumps(shown, sort_keys=True, default=str).encode()).hexdigest())
        layouts[layout_name(row)] += 1
        first += [shown] if len(first) < _LOOKED_AT else []
    if not lengths:
        raise DataError(f"{name}: there is no row in it")
    quantiles = np.quantile(lengths, [0, 0.5, 0.95, 1]).astype(int).tolist()
    return {"file": name, "rows": len(lengths), "bytes": sum(lengths), "row_bytes": dict(zip(("least", "median", "p95", "most"), quantiles,
                                                                                             strict=True)),
            "copies": len(lengths) - len(contents), "layouts": dict(layouts), "first": first,
            "columns": {key: {"filled": columns[key], "kinds": dict(kinds[key])} for key in kinds}}


def layout_name(row: DataRow) -> str:
    """Name of the conversation layout that a row has, by its columns; `pairs` and `labelled` are those of preferences."""
    has = {key for key, value in row.values.items() if value is not None}
    others = [name for name, needs in PREFERENCES.items() if needs <= has]
    found = [name for name, layout in CONVERSATION_LAYOUTS.items() if layout.needs <= has and name != "prompt"]
    return (others or found or (["prompt"] if "prompt" in has else ["none"]))[0]

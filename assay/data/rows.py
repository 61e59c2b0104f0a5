"""Rows in: .jsonl, .jsonl.gz, .parquet and .csv become mappings, each with the file and line that it stands on.

A row is taken as it is or refused by name: no line is skipped, no second value of a key wins in silence.
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.data.text import ESCAPED, MAX_DOCUMENT_BYTES, READ_ROWS, Source, lines, opened, parsed
from assay.errors import DataError, UsageError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".csv")


@dataclass(frozen=True)
class Row:
    where: str  # file:line, for errors
    number: int  # of the row, counted from 1
    values: dict[str, Any]


def read_rows(path: Path | str) -> Iterator[Row]:
    """Every row of a file, in its order."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: {'a folder; expected a file of rows: ' + ', '.join(SUFFIXES) if path.is_dir() else 'no such file'}")
    reader = next((READERS[suffix] for suffix in SUFFIXES if path.name.endswith(suffix)), None)
    if reader is None:
        raise UsageError(f"{path}: unknown kind of file; expected {', '.join(SUFFIXES)}")
    return reader(Source(path, path.name))


def _jsonl(source: Source) -> Iterator[Row]:
    number = 0
    with opened(source) as file:
        for line_number, line in lines(source, file, ESCAPED * MAX_DOCUMENT_BYTES):
            if line.strip():
                number += 1
                where = f"{source.path}:{line_number}"
                yield Row(where, number, _object(line, where))


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = parsed(line.decode(), where, _each_key_once)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line ({error.reason}); convert the file") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"{_repeated([key for key, _ in pairs])} stands twice in one object, and readers differ on which counts")
    return values


def _csv(source: Source) -> Iterator[Row]:
    with opened(source) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")  # spreadsheets write a byte order mark
        reader = csv.reader(text, strict=True)
        header: list[str] = []
        number = 0
        try:
            for cells in reader:
                where = f"{source.path}:{reader.line_num}"
                if not header:
                    header = _columns(cells, where)
                elif cells:
                    number += 1
                    yield Row(where, number, _cells(header, cells, where))
        except UnicodeDecodeError as error:  # decoded in blocks, so that the line is not known
            raise DataError(f"{source.path}: not UTF-8 after line {reader.line_num} ({error.reason}); convert the file") from None
        except csv.Error as error:
            raise DataError(f"{source.path}:{reader.line_num + 1}: cannot be read as CSV ({error})") from None


def _cells(header: list[str], cells: list[str], where: str) -> dict[str, Any]:
    if len(cells) != len(header):
        raise DataError(f"{where}: {len(cells)} cells; the header names {len(header)} columns ({', '.join(header)})")
    return dict(zip(header, cells, strict=True))


def _parquet(source: Source) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{source.path}: reading parquet needs pyarrow; pip install 'assay[data]'") from None
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            _columns(file.schema_arrow.names, str(source.path))
            number = 0
            for batch in file.iter_batches(batch_size=READ_ROWS):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{source.path}:{number}", number, values)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{source.path}: cannot be read as parquet ({error})") from None


def _columns(names: Sequence[str], where: str) -> list[str]:
    if len(set(names)) < len(names):
        raise DataError(f"{where}: the column {_repeated(names)} is there twice; name each column once")
    return list(names)


def _repeated(names: Sequence[str]) -> str:
    return repr(Counter(names).most_common(1)[0][0])


READERS: dict[str, Callable[[Source], Iterator[Row]]] = {".jsonl": _jsonl, ".jsonl.gz": _jsonl, ".parquet": _parquet, ".csv": _csv}

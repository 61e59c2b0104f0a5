"""Data files: .txt, .jsonl, .parquet and .csv become documents or rows, in bounded memory, each with its file and line.

What a document is:
  .jsonl, .jsonl.gz   the UTF-8 bytes of the row's text field
  .parquet            the same, of the row's text column (needs pyarrow: the `data` extra)
  .txt, .gz, no suffix    the whole file; or, on request, what stands between separator lines, or chunks of N bytes
                      lengthened to the next line end, which together are the file

Bytes are never translated: line ends, byte order marks and spaces stay as they are. A document that is not UTF-8 is
refused by name, or left out and counted: it is never repaired, because its bits per byte would be of another text.

A row is taken as it is or refused by name: no line is skipped, no second value of a key wins in silence.
"""

import csv
import gzip
import io
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

from assay.errors import DataError, UsageError
from assay.seeds import derive
from assay.strict_json import parse_json

if TYPE_CHECKING:
    from pyarrow import RecordBatch

MAX_DOCUMENT_BYTES = 16 << 20  # the encoder holds about 60 bytes per byte of one document
_ESCAPED = 6  # most bytes of JSON for one byte of text
_A_LINE = "expected one object a line"
NO_WEIGHT = "; a weight after a colon is read by --data of the training commands and by assay data mix"
_PARQUET_ROWS = 256  # parquet rows decoded at a time
_PARQUET_BYTES = 1 << 20  # of a column that are read at a time; left alone, arrow reads the whole file ahead
FileKind = Literal["text", "jsonl", "parquet"]
FILE_KINDS: dict[str, FileKind] = {"": "text", ".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True)
class TextSource:
    """A file, and the name under which its documents are known on every machine."""

    path: Path
    name: str

    @property
    def kind(self) -> FileKind:
        suffix = Path(self.path.name.removesuffix(".gz")).suffix
        if suffix in FILE_KINDS:
            return FILE_KINDS[suffix]
        raise UsageError(f"{self.path}: unknown kind of file; expected .txt or .jsonl (also with .gz), .parquet, "
                         "or a text file without a suffix")


@dataclass(frozen=True)
class DocumentRule:
    """How files become documents. It is part of a corpus: another rule gives other documents."""

    field: str = "text"  # of JSONL rows, column of parquet
    split: str | None = None  # .txt: a line equal to this ends a document and belongs to none
    document_bytes: int | None = None  # .txt: a document ends at the first line end at or after so many bytes
    skip_invalid: bool = False  # leave out documents that are not UTF-8, instead of refusing

    def __post_init__(self) -> None:
        if self.split is not None and self.document_bytes is not None:
            raise UsageError("--split and --document-bytes are two rules for one file; give one of them")
        if self.document_bytes is not None and not 1 <= self.document_bytes <= MAX_DOCUMENT_BYTES:
            raise UsageError(f"--document-bytes is {self.document_bytes}; expected 1 to {MAX_DOCUMENT_BYTES}")


@dataclass(frozen=True)
class Document:
    """`raw` is the document's own UTF-8; `id` depends on the source's name and the ordinal alone, never on the text."""

    source: str
    ordinal: int
    raw: bytes
    where: str  # file:line, for errors

    @cached_property
    def id(self) -> int:
        return document_id(self.source, self.ordinal)


def document_id(source: str, ordinal: int) -> int:
    return derive(0, "document", source, ordinal)


def find_sources(paths: Iterable[Path]) -> list[TextSource]:
    """Files by their own name, files of a folder by their path below it; in the order given, folders sorted."""
    found: list[TextSource] = []
    for path in paths:
        if path.is_dir():
            if not (inside := files_within(path)):
                raise UsageError(f"{path}: the folder holds no files")
            found += [TextSource(p, p.relative_to(path).as_posix()) for p in inside]
        elif path.is_file():
            found.append(TextSource(path, path.name))
        else:
            raise UsageError(f"{path}: no such file or folder")
    for name, count in Counter(source.name for source in found).items():
        if count > 1:
            raise UsageError(f"{count} sources are named {name!r}, and documents are known by their source's name; "
                             "give the folder above them, so that names become paths")
    for source in found:
        source.kind  # noqa: B018 - refuses an unknown kind before anything is read
    return found


def files_within(folder: Path) -> list[Path]:
    """All files of a folder and of the folders in it, sorted; what is hidden is left out, and nothing else is."""
    files = list[Path]()
    for path in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
        if path.is_file():
            files.append(path)
        elif path.is_dir() and not path.is_symlink():
            files += files_within(path)
        else:
            raise UsageError(f"{path}: {unreadable_entry(path)}; remove it, or give the files themselves")
    return files


def unreadable_entry(path: Path) -> str:
    """Kind of an entry of a folder that is no file."""
    if path.is_symlink():
        return "a link to a folder, which is not followed" if path.is_dir() else "a link to something that is not there"
    return "a folder" if path.is_dir() else "neither a file nor a folder"


def iter_documents(source: TextSource, rule: DocumentRule, left_out: Counter[str]) -> Iterator[Document]:
    """Every document of one source. Empty ones are left out and counted, their ordinals kept."""
    readers = {"text": _text_documents, "jsonl": _jsonl_documents, "parquet": _parquet_documents}
    for ordinal, (where, raw) in enumerate(readers[source.kind](source, rule)):
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise _too_long(where)
        if not raw:
            left_out["empty"] += 1
        elif _is_text(raw, where, rule.skip_invalid):
            yield Document(source.name, ordinal, raw, where)
        else:
            left_out["invalid"] += 1


def _is_text(raw: bytes, where: str, skip_invalid: bool) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        if skip_invalid:
            return False
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the document ({error.reason}); convert the file, "
                        "or leave such documents out (--skip-invalid of assay corpus and assay tokenizer)") from None
    return True


def _text_documents(source: TextSource, rule: DocumentRule) -> Iterator[tuple[str, bytes]]:
    with open_source(source) as file:
        if rule.document_bytes is not None:
            yield from _chunks(source, file, rule.document_bytes)
        elif rule.split is not None:
            yield from _between(source, file, rule.split.encode())
        else:
            yield f"{source.path}:1", file.read(MAX_DOCUMENT_BYTES + 1)


def _chunks(source: TextSource, file: BinaryIO, size: int) -> Iterator[tuple[str, bytes]]:
    line = 1
    while chunk := file.read(size):
        if not chunk.endswith(b"\n"):
            chunk += file.readline(MAX_DOCUMENT_BYTES + 1 - len(chunk))
        yield f"{source.path}:{line}", chunk
        line += chunk.count(b"\n")


def _between(source: TextSource, file: BinaryIO, separator: bytes) -> Iterator[tuple[str, bytes]]:
    held: list[bytes] = []
    first, size = 1, 0
    for number, line in source_lines(source, file, MAX_DOCUMENT_BYTES):
        if line.rstrip(b"\r\n") == separator:
            yield f"{source.path}:{first}", b"".join(held)
            held, first, size = [], number + 1, 0
            continue
        held.append(line)
        size += len(line)
        if size > MAX_DOCUMENT_BYTES:
            raise _too_long(f"{source.path}:{first}")
    if held:
        yield f"{source.path}:{first}", b"".join(held)


def _jsonl_documents(source: TextSource, rule: DocumentRule) -> Iterator[tuple[str, bytes]]:
    with open_source(source) as file:
        for number, line in source_lines(source, file, _ESCAPED * MAX_DOCUMENT_BYTES):
            if not line.strip():
                continue
            where = f"{source.path}:{number}"
            try:
                line.decode()
            except UnicodeDecodeError:
                yield where, line  # not UTF-8, and refused or left out as such
                continue
            row = parse_json(line, where=where, error=DataError, advice=_A_LINE, surrogates=True)
            yield where, _field_bytes(row, rule.field, where)


def _field_bytes(row: Any, field: str, where: str) -> bytes:
    if not isinstance(row, dict) or field not in row:
        found = f"an object with {', '.join(row) or 'no keys'}" if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where}: expected an object with a {field!r} field, found {found}; name it with --field")
    text = row[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: {field!r} is {type(text).__name__}; expected a string")
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="surrogatepass")  # half a surrogate pair: not UTF-8, and refused or left out as such


def _parquet_documents(source: TextSource, rule: DocumentRule) -> Iterator[tuple[str, bytes]]:
    """A text column is taken as its bytes, which no writer of parquet had to make UTF-8."""
    for first, batch in _parquet_batches(source, rule.field):
        column = batch.column(0)
        text = str(column.type) in ("string", "large_string", "string_view")
        values = column.cast("large_binary").to_pylist() if text else [row[rule.field] for row in _python_rows(batch, source, first)]
        for number, value in enumerate(values, first):
            where = f"{source.path}:{number}"
            yield where, value if text and value is not None else _field_bytes({rule.field: value}, rule.field, where)


def _parquet_batches(source: TextSource, column: str | None = None) -> "Iterator[tuple[int, RecordBatch]]":
    """The rows by some hundreds, each time with the number of the first, from 1; of one column, where it is named."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{source.path}: reading parquet needs pyarrow; pip install 'assay[data]'") from None
    try:
        with pyarrow.parquet.ParquetFile(source.path, pre_buffer=False, buffer_size=_PARQUET_BYTES) as file:
            names, number = file.schema_arrow.names, 1
            if column is not None and column not in names:
                raise DataError(f"{source.path}: no column {column!r}, but {', '.join(names)}; name one with --field")
            if len(set(names)) < len(names):
                raise DataError(f"{source.path}: the column {_repeated(names)} is there twice; name each column once")
            columns = None if column is None else [column]
            for batch in file.iter_batches(_PARQUET_ROWS, columns=columns, use_threads=False):  # threads keep what they free
                yield number, batch
                number += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{source.path}: cannot be read as parquet ({error})") from None


def _repeated(names: Sequence[str]) -> str:
    return repr(Counter(names).most_common(1)[0][0])


def source_lines(source: TextSource, file: BinaryIO, longest: int) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise _too_long(f"{source.path}:{number}")
        yield number, line


@contextmanager
def open_source(source: TextSource) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked; whatever the disk or gzip says while it is read becomes a sentence with its name."""
    try:
        with source.path.open("rb") as file:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if source.path.suffix == ".gz" else file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{source.path}: the gzip stream is damaged or cut short ({error})") from None
    except OSError as error:
        raise DataError(f"{source.path}: {error.strerror or error}") from None


def _too_long(where: str) -> DataError:
    return DataError(f"{where}: a document of more than {MAX_DOCUMENT_BYTES} bytes; cut text files into documents with "
                     "--document-bytes N or --split LINE")

# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class DataRow:
    where: str  # file:line, for errors
    number: int  # of the row, counted from 1
    values: dict[str, Any]


def read_rows(path: Path | str, *, otherwise: str | None = None, limit: int | None = None) -> Iterator[DataRow]:
    """Every row of a file, or of a folder's files one after the other by name, in its order; the first `limit` of them. A file of an
    unknown suffix is refused, or read as one of the suffix `otherwise`."""
    return islice(_folder_rows(Path(path)) if Path(path).is_dir() else _file_rows(Path(path), otherwise), limit)


def _folder_rows(folder: Path) -> Iterator[DataRow]:
    """Numbered through all files, which lie directly in the folder."""
    shown = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    rows = [path for path in shown if path.is_file() and path.name.endswith(tuple(ROW_READERS))]
    if not rows or len(rows) < len(shown):
        other = next((path for path in shown if path not in rows), None)
        odd = "no file" if other is None else f"{other.name} in it{'' if other.is_file() else f', {unreadable_entry(other)}'}"
        raise UsageError(f"{folder}: a folder with {odd}; expected files of rows and nothing else: {', '.join(ROW_READERS)}")
    yield from (replace(row, number=number) for number, row in enumerate((row for file in rows for row in _file_rows(file)), 1))


def _file_rows(path: Path, otherwise: str | None = None) -> Iterator[DataRow]:
    if not path.is_file():
        raise UsageError(f"{path}: no such file{NO_WEIGHT if re.fullmatch('.+:[0-9.]+', path.name) else ''}")
    suffix = next((suffix for suffix in ROW_READERS if path.name.endswith(suffix)), otherwise)
    if suffix is None:
        raise UsageError(f"{path}: unknown kind of file; expected {', '.join(ROW_READERS)}")
    return ROW_READERS[suffix](TextSource(path, path.name))


def _jsonl_rows(source: TextSource) -> Iterator[DataRow]:
    number = 0
    with open_source(source) as file:
        for line_number, line in source_lines(source, file, _ESCAPED * MAX_DOCUMENT_BYTES):
            if line.strip():
                number += 1
                where = f"{source.path}:{line_number}"
                yield DataRow(where, number, row_object(line, where))


def row_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line ({error.reason}); convert the file") from None
    return parse_json(line, where=where, shape=dict, error=DataError, advice=_A_LINE)


def _csv_rows(source: TextSource) -> Iterator[DataRow]:
    with open_source(source) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")  # spreadsheets write a byte order mark
        csv.field_size_limit(MAX_DOCUMENT_BYTES)  # of the whole process, as the csv module has it; its own is 131,072
        reader = csv.reader(text, strict=True, delimiter="\t" if source.path.name.endswith(".tsv") else ",")
        header: list[str] = []
        number = 0
        try:
            for cells in reader:
                where = f"{source.path}:{reader.line_num}"
                if not header:
                    header = cells
                    if len(set(header)) < len(header):
                        raise DataError(f"{where}: the column {_repeated(header)} is there twice; name each column once")
                elif cells:
                    number += 1
                    yield DataRow(where, number, _cells(header, cells, where))
        except UnicodeDecodeError as error:  # decoded in blocks, so that the line is not known
            raise DataError(f"{source.path}: not UTF-8 after line {reader.line_num} ({error.reason}); convert the file") from None
        except csv.Error as error:
            raise DataError(f"{source.path}:{reader.line_num}: cannot be read as CSV ({error})") from None


def _cells(header: list[str], cells: list[str], where: str) -> dict[str, Any]:
    if len(cells) != len(header):
        raise DataError(f"{where}: {len(cells)} cells; the header names {len(header)} columns ({', '.join(header)})")
    return dict(zip(header, cells, strict=True))


def _parquet_rows(source: TextSource) -> Iterator[DataRow]:
    for first, batch in _parquet_batches(source):
        for number, values in enumerate(_python_rows(batch, source, first), first):
            yield DataRow(f"{source.path}:{number}", number, values)


_UNCONVERTIBLE = ValueError, OverflowError  # text that is not UTF-8, a name twice in one struct, a date that Python does not have


def _python_rows(batch: "RecordBatch", source: TextSource, first: int) -> list[dict[str, Any]]:
    try:
        return cast(list[dict[str, Any]], batch.to_pylist())
    except _UNCONVERTIBLE:
        for row, name in product(range(batch.num_rows), batch.schema.names):
            try:
                batch.slice(row, 1).column(name).to_pylist()
            except _UNCONVERTIBLE as error:
                said = f"not UTF-8 at byte {error.start} ({error.reason})" if isinstance(error, UnicodeDecodeError) else f"{error}"
                raise DataError(f"{source.path}:{first + row}: the column {name!r} cannot be read: {said}; write it anew, or leave it "
                                "out of the file") from None
        raise


ROW_READERS: dict[str, Callable[[TextSource], Iterator[DataRow]]] = {
    ".jsonl": _jsonl_rows, ".jsonl.gz": _jsonl_rows, ".parquet": _parquet_rows, ".csv": _csv_rows, ".tsv": _csv_rows}

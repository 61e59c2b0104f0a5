"""GGUF header, read with suspicion: counts, lengths and offsets are checked before anything is trusted.

Layout: magic, version, tensor count, key count; keys with typed values; the tensor table; then, aligned, the tensors in
the order of the table and without gaps (as llama.cpp demands). Nothing here reads tensor data.
"""

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from assay.errors import ArtifactError, UsageError
from assay.strict_json import open_regular

HEADER_BYTES = 256 << 20  # a vocabulary of 250,000 tokens takes 10 MiB
ENTRIES = 1 << 16  # keys, or tensors
NAME_BYTES = 1 << 10
TENSOR_NAME_BYTES = 63  # ggml has no room for more
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # as in struct
UINT32, STRING, ARRAY = 4, 8, 9
# Type id → name, elements in a block, bytes in a block.
GGUF_TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
              8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
              30: ("BF16", 1, 2)}


@dataclass(frozen=True)
class GgufTensor:
    shape: tuple[int, ...]  # rows first, as torch has it
    type: str
    offset: int  # in the file
    bytes: int


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    with open_regular(path) as fd, open(fd, "rb", closefd=False) as file:
        cursor = _Cursor(file, os.fstat(fd).st_size, path)
        if cursor.take(4) != b"GGUF":
            raise ArtifactError(f"{path}: does not begin with GGUF; this is another kind of file")
        version = cursor.number("I")
        if version not in (2, 3):
            raise ArtifactError(f"{path}: GGUF version {version}; expected 2 or 3, little-endian")
        tensors, keys = cursor.count("tensors", 24), cursor.count("keys", 13)
        metadata = _metadata(cursor, keys)
        table = [_table_entry(cursor) for _ in range(tensors)]
        return GgufHeader(metadata, _placed(cursor, metadata, table))


class _Cursor:
    """Forward reader of a header; what would pass the end of the file, or of all reason, is refused before it is read."""

    def __init__(self, file: BinaryIO, size: int, path: Path):
        self.file, self.size, self.path, self.position = file, size, path, 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > self.size:
            raise ArtifactError(f"{self.path}: ends at byte {self.size:,}, its header goes on to {end:,}: cut short")
        if end > HEADER_BYTES:
            raise ArtifactError(f"{self.path}: its header is longer than {HEADER_BYTES >> 20} MiB; it is damaged")
        data = self.file.read(count)
        if len(data) != count:
            raise ArtifactError(f"{self.path}: changed while it was read")
        self.position = end
        return data

    def numbers(self, kind: str, count: int) -> list[Any]:
        values = list(struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize(f"<{kind}"))))
        return [_decimal(value) for value in values] if kind == "f" else values

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def count(self, what: str, smallest: int) -> int:
        """How many follow; each takes `smallest` bytes at least."""
        count = self.number("Q")
        if count > ENTRIES or count * smallest > self.size:
            raise ArtifactError(f"{self.path}: {count:,} {what} in a file of {self.size:,} bytes; it is damaged")
        return count

    def text(self, limit: int = HEADER_BYTES) -> str:
        length = int.from_bytes(self.take(8), "little")
        if length > limit:
            raise ArtifactError(f"{self.path}: a text of {length:,} bytes; expected at most {limit:,}: it is damaged")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            where = f"text before byte {self.position:,}"
            raise ArtifactError(f"{self.path}: {where} is not UTF-8: {error.reason}") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != ARRAY:
            raise ArtifactError(f"{self.path}: value type {kind} is unknown; it is damaged, or newer than this reader")
        element, count = self.number("I"), self.number("Q")
        if element == STRING and count * 8 <= self.size:
            return [self.text() for _ in range(count)]
        if element not in _SCALARS:
            raise ArtifactError(f"{self.path}: an array of {count:,} values of type {element}; it is damaged")
        return self.numbers(_SCALARS[element], count)


def _decimal(value: float) -> float:
    """A float32 as the decimal that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key, kind = cursor.text(NAME_BYTES), cursor.number("I")
        if not key or key in metadata:
            raise ArtifactError(f"{cursor.path}: key {key!r} {'stands twice' if key else 'has no name'}; it is damaged")
        if key == "general.alignment" and kind != UINT32:
            raise ArtifactError(f"{cursor.path}: general.alignment is of value type {kind}; expected {UINT32}, a uint32")
        metadata[key] = cursor.value(kind)
    return metadata


def _table_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.text(TENSOR_NAME_BYTES), cursor.number("I")
    if not 1 <= dimensions <= 4:
        raise ArtifactError(f"{cursor.path}: {name} has {dimensions} dimensions; expected 1 to 4")
    shape = tuple(reversed(cursor.numbers("Q", dimensions)))
    if 0 in shape:
        raise ArtifactError(f"{cursor.path}: {name} has shape {list(shape)}: it holds nothing")
    return name, shape, cursor.number("I"), cursor.number("Q")


def _placed(cursor: _Cursor, metadata: dict[str, Any], table: list[Any]) -> dict[str, GgufTensor]:
    """Each tensor's place in the file; they must follow one another and fill the file to its end."""
    alignment = metadata.get("general.alignment", 32)
    if alignment not in [1 << bit for bit in range(17)]:
        raise ArtifactError(f"{cursor.path}: general.alignment {alignment!r}; expected a power of two up to 65,536")
    start, end, tensors = _padded(cursor.position, alignment), 0, dict[str, GgufTensor]()
    for name, shape, type_id, offset in table:
        type, size = _size(name, shape, type_id, cursor.path)
        if name in tensors:
            raise ArtifactError(f"{cursor.path}: tensor {name!r} stands twice")
        if offset != _padded(end, alignment):
            raise ArtifactError(f"{cursor.path}: {name} is at {offset:,}, where {_padded(end, alignment):,} is due")
        end = offset + size
        if start + end > cursor.size:
            raise ArtifactError(f"{cursor.path}: ends at byte {cursor.size:,}, but {name} goes on to {start + end:,}; "
                                "it is cut short")
        tensors[name] = GgufTensor(shape, type, start + offset, size)
    if cursor.size > max(start + _padded(end, alignment), cursor.position):
        raise ArtifactError(f"{cursor.path}: {cursor.size - start - end:,} bytes follow the last tensor; it is damaged")
    return tensors


def _size(name: str, shape: tuple[int, ...], type_id: int, path: Path) -> tuple[str, int]:
    if type_id not in GGUF_TYPES:
        known = ", ".join(type for type, _, _ in GGUF_TYPES.values())
        raise UsageError(f"{path}: {name} is of type {_type_name(type_id)}, which is not supported; expected {known}")
    type, elements, size = GGUF_TYPES[type_id]
    if shape[-1] % elements:
        raise ArtifactError(f"{path}: {name} has rows of {shape[-1]:,}, and {type} comes in blocks of {elements}")
    return type, prod(shape) // elements * size


def _type_name(type_id: int) -> str:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(type_id).name if type_id in list(GGMLQuantizationType) else str(type_id)


def _padded(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment

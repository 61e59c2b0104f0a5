"""Safetensors files, strictly: what is written is hashed as it goes, what is read is hostile until it is proven whole.

The reader accepts no file that the safetensors library refuses, and refuses some that it accepts: huge headers, odd
names, bytes that no tensor owns, shards that disagree with their index.
"""

import errno
import hashlib
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.model.transfers import to_host
from assay.store import durable
from assay.store.mapped_pages import PART_BYTES, hashed_in_passing
from assay.store.sealed import canonical_json
from assay.strict_json import as_artifact_error, open_regular, parse_json

SAFETENSORS_HEADER_LIMIT = 16 << 20
INDEX_LIMIT = 64 << 20
SHARD_BYTES = 5 * 10**9
RANK_LIMIT = 16
SAFETENSORS_METADATA = "__metadata__"
MADV_POPULATE_READ = 22  # of Linux; Python has no name for it yet
SAFETENSORS_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor as a header declares it; [start, stop) counts bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def empty(self) -> bool:
        """Whether the tensor has no elements: legal in the format, and in a model the mark of weights that were never gathered."""
        return self.start == self.stop


@dataclass(frozen=True)
class FileFacts:
    """Facts of one file in a manifest. Of a safetensors file also the parts that make it up without a gap: `header`, the sha256 of all
    before the data, and `tensors`, name → dtype, shape, sha256.
    """

    sha256: str
    bytes: int
    header: str | None = None
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileFacts:
    """Write a new safetensors file to the disk in one pass; the bytes that are hashed are those that are written."""
    ordered = {name: tensors[name] for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))}
    header = _header_bytes(ordered, metadata or {"format": "pt"}, path)
    digests: dict[str, str] = {}
    with ThreadPoolExecutor(1, "sha256") as hasher:
        sha256 = durable.write_file(path, _chunks(header, ordered, hasher, digests))
    facts = {name: {"dtype": DTYPE_NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "sha256": digests[name]}
             for name in sorted(tensors)}
    size = len(header) + sum(map(tensor_bytes, tensors.values()))
    return FileFacts(sha256, size, hashlib.sha256(header).hexdigest(), facts)


def read_tensors(path: Path, expected: str | FileFacts | None = None) -> dict[str, Tensor]:
    """Every tensor of the file, over the very memory that was hashed: the file is mapped, and nothing is copied.

    Expected is the sha256 of the file, or the facts from when it was written, which allow to hash on every core. Like
    any mapped file it must not be written in place while the tensors are in use; the store never does. It may go.
    """
    with open_regular(path) as fd:
        before = os.fstat(fd)
        infos, data_start = _read_header(fd, path)
        mapped = _map(fd, before.st_size, path)
        content = torch.frombuffer(mapped, dtype=torch.uint8)
        if isinstance(expected, FileFacts):
            _require_parts(content, infos, data_start, expected, path)
        elif expected is not None:
            durable.require_hash(path, hashed_in_passing(content), expected)
        now = os.fstat(fd)
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise ArtifactError(f"{path}: another program changes it while it is read; wait until it is whole")
    return {name: _tensor(content[data_start:], info) for name, info in infos.items()}


def read_safetensors_header(path: Path) -> dict[str, SafetensorsEntry]:
    """Header of a safetensors file, in the order of its data; refused unless header and length agree in every byte."""
    with open_regular(path) as fd:
        infos, _ = _read_header(fd, path)
    return infos


def write_sharded(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int = SHARD_BYTES,
                  stem: str = "model") -> dict[str, FileFacts]:
    """`model.safetensors`, or beyond `max_shard_bytes` numbered shards and their index; facts by file name."""
    shards = _shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        return {f"{stem}.safetensors": write_tensors(folder / f"{stem}.safetensors", shards[0])}
    named = {shard_file_name(stem, i, len(shards)): shard for i, shard in enumerate(shards, 1)}
    facts = {name: write_tensors(folder / name, shard) for name, shard in named.items()}
    return facts | write_index(folder, facts, stem)


def shard_file_name(stem: str, part: int, parts: int) -> str:
    return f"{stem}-{part:05d}-of-{parts:05d}.safetensors"


def write_index(folder: Path, shards: Mapping[str, FileFacts], stem: str) -> dict[str, FileFacts]:
    """Write the index of shards (which file holds each tensor), as transformers reads it; returns its facts by its name. A tensor in two
    files is refused, and files that are not numbered from 1 to as many as there are."""
    _require_numbered(folder, sorted(shards), stem)
    weight_map: dict[str, str] = {}
    for file, facts in shards.items():
        if twice := weight_map.keys() & facts.tensors.keys():
            raise ArtifactError(f"{folder / file}: holds {min(twice)!r}, which another file of the same checkpoint holds too")
        weight_map |= dict.fromkeys(facts.tensors, file)
    sizes = (math.prod(entry["shape"]) * SAFETENSORS_DTYPES[entry["dtype"]].itemsize
             for facts in shards.values() for entry in facts.tensors.values())
    index_path = folder / f"{stem}.safetensors.index.json"
    data = canonical_json({"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}, where=str(index_path), indent=1)
    return {index_path.name: FileFacts(durable.write_file(index_path, [data]), len(data))}


def _require_numbered(folder: Path, names: Sequence[str], stem: str) -> None:
    due = [f"{stem}-{part:05d}-of-{len(names):05d}.safetensors" for part in range(1, len(names) + 1)]
    if [*names] not in ([f"{stem}.safetensors"], due):
        raise ArtifactError(f"{folder}: the files of {stem} that were written are {', '.join(names)}; due are {', '.join(due)}: a part is "
                            "missing, or has another's number; nothing was saved")


def read_folder_tensors(folder: Path, expected: Mapping[str, FileFacts] | None = None,
                        stem: str = "model") -> dict[str, Tensor]:
    """Read all weights of a folder, one file or sharded; index, shards and headers must agree in every name.

    `expected` maps file names to the facts from when they were written.
    """
    facts = expected or {}
    index = facts.get(f"{stem}.safetensors.index.json")
    tensors: dict[str, Tensor] = {}
    for name, declared in folder_shards(folder, index.sha256 if index else None, stem).items():
        shard = read_tensors(inside(folder, name), facts.get(name))
        if declared is not None and set(shard) != declared:
            _refuse_shard(folder / name, set(shard), declared)
        tensors |= shard  # disjoint: a tensor has one shard in the index, and each shard holds exactly its own
    return tensors


def read_folder_headers(folder: Path, stem: str = "model") -> dict[str, SafetensorsEntry]:
    """Headers of all weights of a folder; index, shards and headers must agree in every name, as for `read_folder_tensors`."""
    found: dict[str, SafetensorsEntry] = {}
    for name, declared in folder_shards(folder, stem=stem).items():
        shard = read_safetensors_header(inside(folder, name))
        if declared is not None and set(shard) != declared:
            _refuse_shard(folder / name, set(shard), declared)
        found |= shard
    return found


def folder_shards(folder: Path, index_sha256: str | None = None, stem: str = "model") -> dict[str, set[str] | None]:
    """The weight files of a folder and the tensors that the index puts in each (None: one file, no index)."""
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    with as_artifact_error(folder):
        present = set(os.listdir(folder))
    if single in present and index in present and set(_read_index(folder, index, index_sha256)) != {single}:
        raise ArtifactError(f"{folder}: holds both {single} and {index}, which names other files; remove the stale one")
    if single not in present and index not in present:
        raise ArtifactError(f"{folder}: holds neither {single} nor {index}; nothing to load")
    shards: dict[str, set[str] | None] = {single: None}
    if index in present:
        shards = dict(_read_index(folder, index, index_sha256))
    if missing := sorted(shards.keys() - present):
        raise ArtifactError(f"{folder / index}: names {', '.join(missing)}, which is missing; fetch or restore it")
    shard_name = re.compile(re.escape(stem) + r"-\d+-of-\d+\.safetensors")
    if stray := sorted(name for name in present - shards.keys() if shard_name.fullmatch(name)):
        raise ArtifactError(f"{folder}: holds {', '.join(stray)}, which no index lists: left over from another model, "
                            "or the index is stale; restore the folder")
    return shards


def parse_header(data: bytes, data_bytes: int, where: str) -> dict[str, SafetensorsEntry]:
    """The header's JSON against a data area of `data_bytes`: no gap, no overlap, nothing beyond, nothing left over."""
    if not data.startswith(b"{"):
        raise ArtifactError(f"{where}: the header is not a JSON object; not a safetensors file, or a damaged one")
    document = parse_json(data, where=where, parse_int=_natural, parse_float=_refuse_number)
    _check_metadata(document.pop(SAFETENSORS_METADATA, {}), where)
    infos = {name: _info(name, entry, where) for name, entry in document.items()}
    ordered = dict(sorted(infos.items(), key=lambda item: (item[1].start, item[1].stop)))
    position = 0
    for name, info in ordered.items():
        if info.start != position:
            raise ArtifactError(f"{where}: the tensor {name!r} begins at byte {info.start:,} of the data, expected "
                                f"{position:,}: the header leaves a gap or lets tensors overlap")
        position = info.stop
    if position != data_bytes:
        fault = "truncated" if position > data_bytes else "something was appended"
        raise ArtifactError(f"{where}: the header declares {position:,} bytes of data and the file holds "
                            f"{data_bytes:,}: {fault}; fetch or restore it")
    return ordered


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, which must lie in the folder: no absolute or `../` name, no link that leads out.

    In a Hugging Face hub cache, where every file of a snapshot is a link, the model's cache counts as the folder.
    """
    if not name or "\0" in name or "\\" in name or os.path.isabs(name) or ".." in name.split("/"):
        raise ArtifactError(f"{folder}: refers to the file {name!r}; names must be relative and stay in the folder")
    if "/" not in name and not os.path.islink(folder / name):
        return folder / name
    root = Path(os.path.realpath(folder))
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    if not Path(os.path.realpath(folder / name)).is_relative_to(root):
        raise ArtifactError(f"{folder / name}: a link that leads out of the folder; replace it by the file itself")
    return folder / name


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's elements in order, as in a manifest: the same for every layout and device."""
    return hashlib.sha256(_raw(tensor)).hexdigest()


def _header_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path) -> bytes:
    """Length, JSON, and spaces up to a multiple of 8: as the safetensors library lays it out."""
    document: dict[str, Any] = {SAFETENSORS_METADATA: dict(metadata)}
    position = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise UsageError(f"{path}: the tensor {name!r} is {tensor.dtype}; the format knows {', '.join(SAFETENSORS_DTYPES)}")
        stop = position + tensor_bytes(tensor)
        document[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, stop]}
        position = stop
    text = canonical_json(document, where=str(path))[:-1]
    text += b" " * (-len(text) % 8)
    parse_header(text, position, str(path))  # what we could not read back is not written
    return len(text).to_bytes(8, "little") + text


def _chunks(header: bytes, tensors: Mapping[str, Tensor], hasher: ThreadPoolExecutor,
            digests: dict[str, str]) -> Iterator[memoryview]:
    """The file's bytes; each tensor is hashed in a thread while the caller hashes and writes the same bytes."""
    yield memoryview(header)
    for name, tensor in tensors.items():
        raw = _raw(tensor)
        digest = durable.in_thread(hasher, hashlib.sha256, raw)
        yield raw
        digests[name] = digest.result().hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    """The elements in order as bytes; copied only where the tensor is not on the CPU or not contiguous."""
    flat = to_host(tensor).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Tensors split into shards, in the given order; a tensor larger than the limit gets a shard to itself."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor_bytes(tensor) > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor_bytes(tensor)
    return shards


def _read_header(fd: int, path: Path) -> tuple[dict[str, SafetensorsEntry], int]:
    """The tensors, and where their data starts. A length is judged before anything is allocated for it."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(durable.read_range(fd, 0, min(size, 8), path), "little")
    if size < 8 or length > size - 8:
        raise ArtifactError(f"{path}: {size:,} bytes, too few for its header: truncated, or not safetensors")
    if length > SAFETENSORS_HEADER_LIMIT:
        raise ArtifactError(f"{path}: announces a header of {length:,} bytes; at most {SAFETENSORS_HEADER_LIMIT:,} are read, and "
                            "no model needs more")
    data_start = 8 + length
    return parse_header(durable.read_range(fd, 8, data_start, path), size - data_start, str(path)), data_start


def _map(fd: int, size: int, path: Path) -> mmap.mmap:
    """The file as memory; writing to it changes this process's copy alone. All of it was read once, and a large one given back."""
    with as_artifact_error(path):
        mapped = mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            for start in range(0, size, PART_BYTES):
                length = min(PART_BYTES, size - start)
                mapped.madvise(MADV_POPULATE_READ, start, length)  # a disk that cannot read is an error here, and a SIGBUS later
                if size > PART_BYTES:
                    mapped.madvise(mmap.MADV_DONTNEED, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 5.14 does not know it
                raise OSError(errno.EIO, os.strerror(errno.EIO)) from None
    return mapped


def _require_parts(content: Tensor, infos: Mapping[str, SafetensorsEntry], data_start: int, expected: FileFacts,
                   path: Path) -> None:
    """Header and tensors are as they were written; the header was found to leave no byte between them."""
    durable.require_hash(path, hashed_in_passing(content[:data_start]), expected.header, what="the bytes of its header")

    def check(name: str) -> None:
        start, stop = data_start + infos[name].start, data_start + infos[name].stop
        wanted = expected.tensors[name]["sha256"] if name in expected.tensors else "no such tensor"
        durable.require_hash(path, hashed_in_passing(content[start:stop]), wanted, what=f"the bytes of its tensor {name!r}")

    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "sha256") as hashers:
        many = len(content) > PART_BYTES  # what is small is hashed sooner than a thread is started
        list((hashers.map if many else map)(check, infos))


def _info(name: str, entry: Any, where: str) -> SafetensorsEntry:
    _check_name(name, where)
    what = f"{where}: the tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ArtifactError(f"{what} must declare dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise ArtifactError(f"{what} has the dtype {str(dtype)[:40]!r}; expected one of {', '.join(SAFETENSORS_DTYPES)}")
    if not _naturals(shape) or len(shape) > RANK_LIMIT or not _naturals(offsets) or len(offsets) != 2:
        raise ArtifactError(f"{what} has a shape or data_offsets that are not lists of whole numbers")
    size, given = math.prod(shape) * SAFETENSORS_DTYPES[dtype].itemsize, offsets[1] - offsets[0]
    # Zeros count as ones here: no product on the way may pass 64 bits, or readers of other languages overflow.
    if size != given or math.prod(max(length, 1) for length in shape) * 8 >= 2**63:
        raise ArtifactError(f"{what} of {dtype} {shape} needs {size:,} bytes, and its data_offsets give it {given:,}")
    return SafetensorsEntry(dtype, tuple(shape), *offsets)


def _check_name(name: str, where: str) -> None:
    if not name or not name.isprintable() or name.startswith("/") or ".." in re.split(r"[/\\]", name):
        raise ArtifactError(f"{where}: {name[:80]!r} is no name for a tensor: empty, unprintable, or climbing")


def _check_metadata(metadata: Any, where: str) -> None:
    texts = [*metadata, *metadata.values()] if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) and _is_unicode(text) for text in texts):
        raise ArtifactError(f"{where}: {SAFETENSORS_METADATA} must map text to text")


def _is_unicode(text: str) -> bool:
    """JSON can spell half of a surrogate pair, which is no character."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _natural(text: str) -> int:
    if text.startswith("-") or len(text) > 19:
        raise ValueError(f"the number {text[:40]} where a size is due")
    return int(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:40]} where a whole number is due")


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _tensor(data: Tensor, info: SafetensorsEntry) -> Tensor:
    dtype = SAFETENSORS_DTYPES[info.dtype]
    if info.empty:
        return torch.empty(info.shape, dtype=dtype)
    flat = data[info.start:info.stop]
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()  # foreign writers may leave a tensor unaligned, where torch cannot view it
    return flat.view(dtype).view(info.shape)


def _read_index(folder: Path, index: str, sha256: str | None) -> dict[str, set[str]]:
    path = inside(folder, index)
    document = parse_json(durable.read_file(path, limit=INDEX_LIMIT, expected_sha256=sha256), where=str(path))
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(s, str) for s in weight_map.values()):
        raise ArtifactError(f"{path}: expected a weight_map from tensor names to shard names")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if shard not in shards:
            inside(folder, shard)
            shards[shard] = set()
        shards[shard].add(tensor)
    return shards


def _refuse_shard(path: Path, found: set[str], declared: set[str]) -> NoReturn:
    missing, extra = sorted(declared - found), sorted(found - declared)
    names = ", ".join([*(f"lacks {name!r}" for name in missing[:3]), *(f"holds {name!r}" for name in extra[:3])])
    raise ArtifactError(f"{path}: not the shard that the index describes: it {names} ({len(missing)} missing, "
                        f"{len(extra)} too many); swapped, stale, or from another model")

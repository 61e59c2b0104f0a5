"""A model in as few bytes as asked: quantised row by row, entropy-coded, one file that holds everything needed to run it.

    MAGIC, length of the header (4 bytes), header, sections back to back, and nothing after them

The header is sealed JSON: the geometry, how the weights were rounded, and size and sha256 of every section. There is no
table of tensors: their names, shapes and order follow from the geometry. Sections:

    codes       one int8 a weight of every matrix, value = code · step of its row
    steps       one byte a row: step = unit · 2^(code / 16), after one unit (float32) a matrix; a step need not be precise,
                only known
    vectors     norms and biases, float16
    tokenizer   tokenizer.json, named tokens and templates

One dial sets the precision: a row's step is 4 rms / levels, from 127 levels (int8) down to 31 (int6), the finest that fits.
Weights beyond 4 rms are not cut off: they keep their codes up to 127 steps, because the entropy coder makes rare codes long
and common ones short. Normal weights have the most entropy for their rms, so no others take more bytes than they do.
The coder is DEFLATE's Huffman stage alone: of zlib, bz2 and lzma it came nearest to the entropy of normal weights (0.8 to
1 % above; bz2 6 %, lzma 2 to 9 %), and its decoder is everywhere.
"""

import hashlib
import json
import lzma
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.config import from_mapping
from assay.errors import ArtifactError, UsageError
from assay.model.families import family_named, shapes
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig, Rope
from assay.store import durable
from assay.store.artifact import Artifact
from assay.store.sealed import parse, seal, unseal

MAGIC = b"ASSAYZ1\n"
FORMAT = 1
FINEST, COARSEST = 127, 31  # levels: int8, int6
REACH = 4.0  # rms of a row that its levels cover
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # of a row's largest weight, tried where 127 codes cannot reach it at this step
STEP_CODES = 16  # a factor of two in steps of 4.4 %
MOST_BITS = 5.10  # a weight at 31 levels: the entropy of normal weights is 5.002, their Huffman code takes 5.052
FILE_LIMIT = 1 << 30
HEADER_LIMIT = 1 << 16
TOKENIZER_LIMIT = 64 << 20
SIDE_LIMIT, DEPTH_LIMIT = 1 << 24, 1024  # of a geometry read from a file
SECTIONS = ("tokenizer", "vectors", "steps", "codes")


@dataclass(frozen=True)
class SqueezeReport:
    """What was written. `bits` are of one weight, after coding, by kind of matrix."""

    path: Path
    bytes: int
    parameters: int
    levels: int
    bits: dict[str, float]
    sections: dict[str, int]

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.bytes / self.parameters

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {bits:.2f}" for kind, bits in self.bits.items())
        return (f"{self.bytes:,} bytes for {self.parameters:,} parameters: {self.bits_per_parameter:.3f} bits each with all "
                f"that belongs to them; weights of {self.levels} levels ({kinds} bits)")


@dataclass(frozen=True)
class Squeezed:
    """A file as read: the model that it holds, with weights as float32."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    tokenizer: Tokenizer
    levels: int
    source: str  # digest of the weights before they were rounded


@dataclass(frozen=True)
class Rounded:
    """A matrix: value = codes · steps, a step a row."""

    codes: NDArray[np.int8]
    step_codes: NDArray[np.uint8]
    unit: np.float32

    @property
    def steps(self) -> NDArray[np.float32]:
        return steps_of(self.step_codes, self.unit)


def squeeze(artifact: Artifact, where: Path, max_bytes: int) -> SqueezeReport:
    """Write the finest precision from int8 to int6 that takes at most `max_bytes`, whole or not at all."""
    if artifact.patch is not None:
        raise UsageError(f"{artifact.path} is an adapter; export it --to merged first, then squeeze that")
    if artifact.tokenizer is None:
        raise UsageError(f"{artifact.path}: a squeezed model carries its tokenizer, and there is none here; add "
                         "tokenizer.json")
    weights = Weights(artifact)
    levels, data = _finest_that_fits(weights, max_bytes)
    durable.make_folder(where.parent)
    durable.replace_file(where, data)
    return weights.report(where, levels, data)


def unsqueeze(path: Path) -> Squeezed:
    """What `squeeze` wrote, or an ArtifactError. No size in the file is believed before the bytes that it needs are there."""
    data = durable.read_file(path, limit=FILE_LIMIT)
    header, body = _read_header(data, str(path))
    config = read_geometry(header["geometry"], str(path))
    packed = _read_sections(header["sections"], body, str(path))
    matrices, vectors = parted(config)
    weights = sum(map(math.prod, matrices.values()))
    if weights > 8 * len(packed["codes"]):
        raise ArtifactError(f"{path}: {weights:,} weights in {len(packed['codes']):,} bytes is less than a bit each, which no "
                            "code of ours comes to: damaged, or made to harm")
    codes = np.frombuffer(_inflated(packed["codes"], weights, f"{path}: codes"), np.int8)
    tensors = _matrices(matrices, codes, _read_steps(packed["steps"], matrices, str(path)))
    tensors |= _read_vectors(packed["vectors"], vectors, str(path))
    tokenizer = _read_tokenizer(packed["tokenizer"], str(path))
    if tokenizer.digest != header["tokenizer"]:
        raise ArtifactError(f"{path}: holds tokenizer {tokenizer.digest[:12]}, its header names {header['tokenizer'][:12]!r}")
    return Squeezed(config, {name: tensors[name] for name in shapes(config)}, tokenizer, header["levels"], header["source"])


def most_bytes(config: ModelConfig, tokenizer: Tokenizer) -> int:
    """What a model of this geometry takes at int6, whatever its weights: what must fit before any training is paid for."""
    matrices, vectors = parted(config)
    rows, weights = sum(shape[0] for shape in matrices.values()), sum(map(math.prod, matrices.values()))
    rest = 2 * sum(map(math.prod, vectors.values())) + 1.02 * rows + 4 * len(matrices) + 4096  # header, ends of blocks
    return math.ceil(MOST_BITS / 8 * weights + rest) + len(_packed_tokenizer(tokenizer))


class Weights:
    """A model's parameters on their way into a file, and what does not change with the precision."""

    def __init__(self, artifact: Artifact):
        assert artifact.tokenizer is not None
        self.artifact, self.config = artifact, artifact.config
        matrices, vectors = parted(self.config)
        for name, tensor in artifact.tensors.items():
            if not torch.isfinite(tensor).all():
                raise ArtifactError(f"{artifact.path}: {name} holds values that are not finite; it cannot be quantised")
        self.matrices = {name: artifact.tensors[name].float().numpy() for name in matrices}
        self.fixed = {"tokenizer": _packed_tokenizer(artifact.tokenizer), "vectors": self._packed_vectors(vectors)}

    def file(self, levels: int) -> bytes:
        """The whole file at this precision."""
        rounded = [rounded_rows(matrix, levels) for matrix in self.matrices.values()]
        units = np.array([one.unit for one in rounded], "<f4").tobytes()
        steps = units + b"".join(one.step_codes.tobytes() for one in rounded)
        codes = b"".join(one.codes.tobytes() for one in rounded)
        sections = self.fixed | {"steps": _deflated(steps), "codes": _deflated(codes)}
        listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in sections.items()}
        geometry = asdict(self.config) | {"windows": list(self.config.windows)}
        assert self.artifact.tokenizer is not None
        header = seal({"assay": "squeezed", "format": FORMAT, "geometry": geometry, "levels": levels, "sections": listed,
                       "source": self.artifact.digest, "tokenizer": self.artifact.tokenizer.digest}, where="header")
        return MAGIC + len(header).to_bytes(4, "little") + header + b"".join(sections[name] for name in SECTIONS)

    def report(self, where: Path, levels: int, data: bytes) -> SqueezeReport:
        header, _ = _read_header(data, str(where))
        spent: dict[str, list[int]] = {}
        for name, matrix in self.matrices.items():
            code_bytes = len(_deflated(rounded_rows(matrix, levels).codes.tobytes()))
            spent.setdefault(kind(name), []).append(code_bytes)
        sizes = {of: sum(m.size for name, m in self.matrices.items() if kind(name) == of) for of in spent}
        parameters = sum(tensor.numel() for tensor in self.artifact.tensors.values())
        return SqueezeReport(where, len(data), parameters, levels, {of: 8 * sum(spent[of]) / sizes[of] for of in spent},
                             {name: entry["bytes"] for name, entry in header["sections"].items()})

    def _packed_vectors(self, names: Mapping[str, tuple[int, ...]]) -> bytes:
        halves = {name: self.artifact.tensors[name].to(torch.float16) for name in names}
        for name, half in halves.items():
            if not torch.isfinite(half).all():
                raise UsageError(f"{self.artifact.path}: {name} has values beyond 65,504, which float16 cannot hold; it "
                                 "cannot be squeezed")
        return _deflated(b"".join(half.numpy().tobytes() for half in halves.values()))


def rounded_rows(matrix: NDArray[np.float32], levels: int) -> Rounded:
    """Each row in steps of 4 rms / levels, or of as much as 127 codes need to reach its large weights."""
    rms = np.sqrt(np.square(matrix, dtype=np.float64).mean(1))
    wanted = np.maximum(REACH / levels * rms, _least_steps(matrix, REACH / levels * rms))
    unit = np.float32(max(wanted.max() * 2.0 ** (-255 / STEP_CODES), np.finfo(np.float32).tiny))
    with np.errstate(divide="ignore"):
        step_codes = np.ceil(STEP_CODES * np.log2(wanted / unit) - 1e-4).clip(0, 255).astype(np.uint8)
    steps = steps_of(step_codes, unit)
    return Rounded(np.rint(matrix / steps[:, None]).clip(-FINEST, FINEST).astype(np.int8), step_codes, unit)


def steps_of(step_codes: NDArray[np.uint8], unit: np.float32) -> NDArray[np.float32]:
    """Computed in float64 and rounded once, so that writer and reader agree to the last bit."""
    return (np.float64(unit) * np.exp2(step_codes.astype(np.float64) / STEP_CODES)).astype(np.float32)


def kind(name: str) -> str:
    return "embedding" if name in ("embed.weight", "position.weight", "head.weight") else "matrices"


def parted(config: ModelConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """(matrices, vectors) of the architecture, by name, in the order in which a file holds them."""
    every = shapes(config)
    matrices = [name for name, shape in every.items() if len(shape) == 2]
    return {name: every[name] for name in matrices}, {name: every[name] for name in every if name not in matrices}


def read_geometry(fields: Any, where: str) -> ModelConfig:
    """A hostile header may claim anything: every field is there, of its type, in bounds, before a model is thought of."""
    where = f"{where}: geometry"
    if not isinstance(fields, dict):
        raise ArtifactError(f"{where} is no JSON object")
    sizes = [value for value in fields.values() if isinstance(value, int) and not isinstance(value, bool)]
    windows, depth, rope = fields.get("windows"), fields.get("depth"), fields.get("rope")
    if not all(0 < size <= SIDE_LIMIT for size in sizes) or not isinstance(depth, int) or depth > DEPTH_LIMIT:
        raise ArtifactError(f"{where}: sizes from 1 to {SIDE_LIMIT:,} and up to {DEPTH_LIMIT} layers are expected")
    if not isinstance(windows, list) or len(windows) != depth:
        raise ArtifactError(f"{where}: expected a window, or null, for each of {depth} layers")
    if type(fields.get("heads")) is not int or type(fields.get("kv_heads")) is not int or fields["heads"] % fields["kv_heads"]:
        raise ArtifactError(f"{where}: query heads must be shared out evenly over key/value heads")
    try:
        family_named(fields.get("family"), where)
        known = None if rope is None else from_mapping(Rope, rope, where=where)
        config = from_mapping(ModelConfig, fields | {"rope": known}, where=where)
    except (UsageError, AttributeError) as error:
        raise ArtifactError(str(error)) from None
    if known is not None and not _whole(known):
        raise ArtifactError(f"{where}: rotary positions of kind {known.kind!r} lack a factor, or a number is not positive")
    return config


def _whole(rope: Rope) -> bool:
    needed = {"default": [], "linear": [rope.factor],
              "llama3": [rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_length]}[rope.kind]
    return all(value is not None and math.isfinite(value) and value > 0 for value in [rope.base, *needed])


def _finest_that_fits(weights: Weights, max_bytes: int) -> tuple[int, bytes]:
    """By bisection; the bytes are the file's own, not an estimate's."""
    finest = weights.file(FINEST)
    if len(finest) <= max_bytes:
        return FINEST, finest
    fits, data, too_fine = COARSEST, weights.file(COARSEST), FINEST
    if len(data) > max_bytes:
        raise UsageError(_does_not_fit(weights, len(data), max_bytes))
    while too_fine - fits > 1:
        middle = (fits + too_fine) // 2
        tried = weights.file(middle)
        if len(tried) <= max_bytes:
            fits, data = middle, tried
        else:
            too_fine = middle
    return fits, data


def _does_not_fit(weights: Weights, least: int, max_bytes: int) -> str:
    """How many bytes it came to, and what would fit at the same width."""
    config = weights.config
    total = sum(matrix.size for matrix in weights.matrices.values())
    room = int(total * max_bytes / least)
    tables = sum(matrix.size for name, matrix in weights.matrices.items() if kind(name) == "embedding")
    layer = (total - tables) // config.depth
    depth, vocab = (room - tables) // layer, config.vocab * (room - total + tables) // tables
    ways = [f"{depth} layers instead of {config.depth}"] if depth > 0 else []
    ways += [f"a vocabulary of {vocab // 64 * 64} instead of {config.vocab}"] if vocab >= 512 else []
    return (f"{weights.artifact.path}: at int6 it takes {least:,} bytes ({8 * least / total:.2f} bits a weight), and at most "
            f"{max_bytes:,} are allowed. What fits is about {max(room, 0):,} parameters: "
            f"{' or '.join(ways) or 'a narrower model'}, or allow more bytes")


def _least_steps(matrix: NDArray[np.float32], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The step that 127 codes need; where it exceeds the wanted one, cutting off a few large weights may lose less."""
    largest = np.abs(matrix).max(1).astype(np.float64)
    least = np.zeros_like(largest)
    short = np.flatnonzero(largest / FINEST > wanted)
    if short.size:
        rows = matrix[short].astype(np.float64)
        tried = np.array([clip * largest[short] / FINEST for clip in CLIPS])
        errors = np.array([_squared_error(rows, steps) for steps in tried])
        least[short] = tried[errors.argmin(0), np.arange(short.size)]
    return least


def _squared_error(rows: NDArray[np.float64], steps: NDArray[np.float64]) -> NDArray[np.float64]:
    codes = np.rint(rows / steps[:, None]).clip(-FINEST, FINEST)
    return np.square(codes * steps[:, None] - rows).sum(1)


def _matrices(sizes: Mapping[str, tuple[int, ...]], codes: NDArray[np.int8],
              steps: Mapping[str, NDArray[np.float32]]) -> dict[str, Tensor]:
    tensors, start = {}, 0
    for name, shape in sizes.items():
        stop = start + math.prod(shape)
        tensors[name] = torch.from_numpy(codes[start:stop].reshape(shape).astype(np.float32) * steps[name][:, None])
        start = stop
    return tensors


def _read_steps(packed: bytes, sizes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, NDArray[np.float32]]:
    rows = [shape[0] for shape in sizes.values()]
    raw = _inflated(packed, 4 * len(rows) + sum(rows), f"{where}: steps")
    units = np.frombuffer(raw[:4 * len(rows)], "<f4")
    if not np.isfinite(units).all() or (units <= 0).any() or (units > 1e6).any():
        raise ArtifactError(f"{where}: a unit of the steps is not a positive number up to a million: damaged, or made to harm")
    codes = np.split(np.frombuffer(raw[4 * len(rows):], np.uint8), np.cumsum(rows)[:-1])
    return {name: steps_of(code, unit) for name, code, unit in zip(sizes, codes, units, strict=True)}


def _read_vectors(packed: bytes, sizes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, Tensor]:
    raw = _inflated(packed, 2 * sum(map(math.prod, sizes.values())), f"{where}: vectors")
    values = np.frombuffer(raw, "<f2").astype(np.float32)
    if not np.isfinite(values).all():
        raise ArtifactError(f"{where}: a norm or bias is not finite: damaged")
    parts = np.split(values, np.cumsum([math.prod(shape) for shape in sizes.values()])[:-1]) if sizes else []
    return {name: torch.from_numpy(part.copy()).reshape(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)}


def _packed_tokenizer(tokenizer: Tokenizer) -> bytes:
    parts = {"document": tokenizer.document, "settings": tokenizer.settings, "templates": tokenizer.templates}
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return lzma.compress(text.encode(), preset=6 | lzma.PRESET_EXTREME)


def _read_tokenizer(packed: bytes, where: str) -> Tokenizer:
    where = f"{where}: tokenizer"
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=4 * TOKENIZER_LIMIT)
    text = _whole_stream(decoder, packed, TOKENIZER_LIMIT, where)
    parts = parse(text, where=where)
    if not isinstance(parts, dict) or set(parts) != {"document", "settings", "templates"} \
            or not all(isinstance(part, dict) for part in parts.values()):
        raise ArtifactError(f"{where}: expected document, settings and templates")
    return Tokenizer(**parts)


def _deflated(data: bytes) -> bytes:
    """Huffman codes alone: chance repetitions in weights cost more to name than to spell."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def _inflated(packed: bytes, size: int, where: str) -> bytes:
    data = _whole_stream(zlib.decompressobj(-zlib.MAX_WBITS), packed, size, where)
    if len(data) != size:
        raise ArtifactError(f"{where}: {len(data):,} bytes, and the geometry asks for {size:,}: damaged")
    return data


def _whole_stream(decoder: Any, packed: bytes, limit: int, where: str) -> bytes:
    """All of one stream, which must end within `limit` bytes and at the end of what is there."""
    try:
        data = decoder.decompress(packed, limit + 1)
    except (zlib.error, lzma.LZMAError) as error:
        raise ArtifactError(f"{where}: cannot be decompressed: {error}") from None
    if len(data) > limit or not decoder.eof or decoder.unused_data:
        raise ArtifactError(f"{where}: does not end where it should, or holds more than {limit:,} bytes: damaged")
    return data


FIELDS: dict[str, Callable[[Any], bool]] = {
    "assay": lambda v: v == "squeezed", "format": lambda v: v == FORMAT, "geometry": lambda v: isinstance(v, dict),
    "levels": lambda v: type(v) is int and COARSEST <= v <= FINEST, "source": lambda v: isinstance(v, str),
    "tokenizer": lambda v: isinstance(v, str), "sections": lambda v: isinstance(v, dict) and set(v) == set(SECTIONS),
}


def _read_header(data: bytes, where: str) -> tuple[dict[str, Any], memoryview]:
    """The header, and all that follows it."""
    start = len(MAGIC) + 4
    if not data.startswith(MAGIC) or len(data) < start:
        raise ArtifactError(f"{where}: does not begin as a squeezed model does ({MAGIC!r})")
    end = start + int.from_bytes(data[len(MAGIC):start], "little")
    if end - start > HEADER_LIMIT or end > len(data):
        raise ArtifactError(f"{where}: announces a header of {end - start:,} bytes in a file of {len(data):,}: damaged")
    header = unseal(data[start:end], where=where)
    if set(header) != set(FIELDS) or (wrong := [name for name, good in FIELDS.items() if not good(header[name])]):
        raise ArtifactError(f"{where}: its header is not of format {FORMAT}: {sorted(set(header) ^ set(FIELDS)) or wrong}")
    return header, memoryview(data)[end:]


def _read_sections(listed: Mapping[str, Any], body: memoryview, where: str) -> dict[str, bytes]:
    for name, entry in listed.items():
        if not isinstance(entry, dict) or {key: type(value) for key, value in entry.items()} != {"bytes": int, "sha256": str}:
            raise ArtifactError(f"{where}: says of {name!r} {entry!r}; expected its bytes and sha256")
    sizes = [listed[name]["bytes"] for name in SECTIONS]
    if min(sizes) < 0 or sum(sizes) != len(body):
        raise ArtifactError(f"{where}: {len(body):,} bytes follow the header, which lists {sum(sizes):,}: truncated, or "
                            "something was appended")
    packed, start = {}, 0
    for name, size in zip(SECTIONS, sizes, strict=True):
        packed[name] = bytes(body[start:start + size])
        start += size
        if hashlib.sha256(packed[name]).hexdigest() != listed[name]["sha256"]:
            raise ArtifactError(f"{where}: the bytes of {name!r} are not those that were written: damaged; restore the file")
    return packed

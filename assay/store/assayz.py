"""Squeezed model (.assayz): rounded and entropy-coded into as few bytes as asked, one file with all that runs it.

    MAGIC, length of the header (4 bytes), header, sections back to back, and nothing after them

The header is sealed JSON: the geometry, the precision, and size and sha256 of every section. There is no table of tensors:
names, shapes and order follow from the geometry. The sections:

    tokenizer          tokenizer.json, named tokens and templates
    vectors            norms and biases, float16
    steps              a unit (float32) for each matrix, then a byte for each row: see below
    tables, matrices   the codes, an int8 a weight: of embedding, positions and head; and of everything else

Tables get twice the levels, one bit more: rounding them cost five times as much a weight where it was measured. The coder
is DEFLATE's Huffman stage alone. Of zlib, bz2 and lzma it came nearest to the entropy of normal weights (0.8 to 1 % above;
bz2 4 to 6 %, lzma 2 to 9 %), and its decoder is everywhere.

Matrices are rounded row by row, each in whole steps of a size of its own, so that value = code · step.
One dial sets the precision: a row's step is 4 rms / levels, from 127 levels (int8) over 63 (int7) and 31 (int6) down to 15
(int5), and all between. Weights beyond 4 rms are not cut off: they keep their codes up to 127 steps, because an entropy
coder makes rare codes long and common ones short. Normal weights have the most entropy for their rms: no others take more
bytes. A step need not be precise, only known: it is one byte, a power of 2^(1/16) times its matrix's unit.
"""

import hashlib
import json
import lzma
import math
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.config import from_mapping
from assay.errors import ArtifactError, UsageError
from assay.model.families import family_named, parameter_shapes
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig, Rope
from assay.store import durable
from assay.store.model_formats import Description, FileModel, ModelFormat, shown_geometry
from assay.store.sealed import seal, unseal
from assay.strict_json import NATURAL, parse_json, require_shape

FINEST, COARSEST = 127, 15  # levels: int8, int5
REACH = 4.0  # rms of a row that its levels cover
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # of a row's largest weight, where 127 codes do not reach it at this step
STEP_CODES = 16  # a factor of two, in steps of 4.4 %
GUESSES = 6  # of the number of levels that fits


@dataclass(frozen=True)
class RoundedRows:
    codes: NDArray[np.int8]
    step_codes: NDArray[np.uint8]  # one a row
    unit: np.float32


def rounded_rows(matrix: NDArray[np.float32], levels: int) -> RoundedRows:
    """Rows of a matrix rounded, each in steps of 4 rms / levels, or of as much as 127 codes need to reach its large weights."""
    rms = np.sqrt(np.square(matrix, dtype=np.float64).mean(1))
    wanted = np.maximum(REACH / levels * rms, _least_steps(matrix, REACH / levels * rms))
    unit = np.float32(max(wanted.max() * 2.0 ** (-255 / STEP_CODES), np.finfo(np.float32).tiny))
    with np.errstate(divide="ignore"):  # a row of zeros has no step of its own, and needs none
        exponents = np.ceil(STEP_CODES * np.log2(wanted / unit) - 1e-4)
    step_codes = exponents.clip(0, 255).astype(np.uint8)
    codes = np.rint(matrix / steps_of(step_codes, unit)[:, None]).clip(-FINEST, FINEST)
    return RoundedRows(codes.astype(np.int8), step_codes, unit)


def unrounded(codes: NDArray[np.int8], steps: NDArray[np.float32]) -> NDArray[np.float32]:
    return codes.astype(np.float32) * steps[:, None]


def steps_of(step_codes: NDArray[np.uint8], unit: np.float32) -> NDArray[np.float32]:
    """Computed in float64 and rounded once, so that writer and reader agree to the last bit."""
    return (np.float64(unit) * np.exp2(step_codes.astype(np.float64) / STEP_CODES)).astype(np.float32)


def most_bits(levels: int) -> float:
    """Most bits of one coded weight: the entropy of a normal one at these levels, and the 1.2 % that Huffman codes may add."""
    return 1.012 * (math.log2(levels / REACH) + 0.5 * math.log2(2 * math.pi * math.e))


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


if TYPE_CHECKING:
    from assay.store.artifact import Artifact

ASSAYZ_MAGIC = b"ASSAYZ1\n"
ASSAYZ_FORMAT = 1
CODES = ("tables", "matrices")
SECTIONS = ("tokenizer", "vectors", "steps", *CODES)
_TABLES = ("embed.weight", "position.weight", "head.weight")
ASSAYZ_LIMIT = 1 << 30
ASSAYZ_HEADER_LIMIT = 1 << 16
TOKENIZER_LIMIT = 64 << 20
SIDE_LIMIT, DEPTH_LIMIT = 1 << 24, 1024  # of a geometry read from a file
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SqueezeReport:
    """Report on a written .assayz file. `bits` are per weight, after coding, by section."""

    path: Path
    bytes: int
    parameters: int
    levels: int
    bits: dict[str, float]
    sections: dict[str, int]

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {bits:.2f}" for kind, bits in self.bits.items())
        return (f"{self.bytes:,} bytes for {self.parameters:,} parameters, {8 * self.bytes / self.parameters:.3f} bits each "
                f"with all that belongs to them; {self.levels} levels (bits a weight: {kinds})")


def write_assayz(artifact: "Artifact", where: Path, max_bytes: int) -> SqueezeReport:
    """Write the finest precision from int8 to int5 that takes at most `max_bytes`, whole or not at all."""
    if artifact.patch is not None:
        raise UsageError(f"{artifact.path} is an adapter; export it --to merged first, then squeeze that")
    if artifact.tokenizer is None:
        raise UsageError(f"{artifact.path}: a squeezed model carries its tokenizer, and there is none here; add "
                         "tokenizer.json")
    source = SqueezeSource(artifact, artifact.tokenizer)
    levels, sections = _finest_that_fits(source, max_bytes)
    data = source.file(levels, sections)
    durable.make_folder(where.parent)
    durable.replace_file(where, data)
    weights = {name: sum(matrix.size for of, matrix in source.matrices.items() if section_of(of) == name) for name in CODES}
    return SqueezeReport(where, len(data), sum(tensor.numel() for tensor in artifact.tensors.values()), levels,
                         {name: 8 * len(sections[name]) / weights[name] for name in CODES},
                         {name: len(sections[name]) for name in SECTIONS})


def read_assayz(path: Path) -> FileModel:
    """Read what `squeeze` wrote, or raise an ArtifactError; `facts` is the header, with the levels and the digest of the source's weights.

    No size in the file is believed before the bytes it asks for are there.
    """
    data = durable.read_file(path, limit=ASSAYZ_LIMIT)
    header, body = _read_header(data, str(path))
    config = read_geometry(header["geometry"], str(path))
    packed = _read_sections(header["sections"], body, str(path))
    matrices, vectors = matrices_and_vectors(config)
    tensors = _read_vectors(packed["vectors"], vectors, str(path))
    steps = _read_steps(packed["steps"], matrices, str(path))
    for name in CODES:
        own = {of: shape for of, shape in matrices.items() if section_of(of) == name}
        tensors |= _read_codes(packed[name], own, steps, f"{path}: {name}")
    tokenizer = _read_tokenizer(packed["tokenizer"], f"{path}: tokenizer")
    if tokenizer.digest != header["tokenizer"]:
        raise ArtifactError(f"{path}: holds tokenizer {tokenizer.digest[:12]}, and its header names another")
    return FileModel(config, {name: tensors[name] for name in parameter_shapes(config)}, tokenizer,
                      resolve_special_tokens(tokenizer, {}, {}), header)


def describe_assayz(path: Path) -> Description:
    """A file whose every section has its recorded hash; nothing is unpacked. A matrix is shown by its levels, of which some steps of
    a row's own size go up and as many down."""
    header, body = _read_header(durable.read_file(path, limit=ASSAYZ_LIMIT), str(path))
    _read_sections(header["sections"], body, str(path))
    config = read_geometry(header["geometry"], str(path))
    tensors = {name: {"dtype": f"±{levels_of(name, header['levels'])}" if len(shape) == 2 else "F16", "shape": list(shape)}
               for name, shape in parameter_shapes(config).items()}
    sections = ", ".join(f"{name} {section['bytes']:,}" for name, section in header["sections"].items())
    lineage = {"source": f"weights {header['source'][:12]}", "tokenizer": header["tokenizer"][:12], "sections": sections}
    return Description(shown_geometry(config), tensors, lineage,
                       "UNPROVEN: every section has its recorded hash; assay prove --against its source shows the rest")


def rounded_tensors(tensors: Mapping[str, Tensor], levels: int) -> dict[str, Tensor]:
    """Tensors that a file of this precision gives back for these weights, to the last bit."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            one = rounded_rows(tensor.float().numpy(), levels_of(name, levels))
            found[name] = torch.from_numpy(unrounded(one.codes, steps_of(one.step_codes, one.unit)))
        else:
            found[name] = tensor.to(torch.float16).float()
    return found


ASSAYZ = ModelFormat(
    "squeezed", describe_assayz, ".assayz", read_assayz, rounding=lambda tensors, header: rounded_tensors(tensors, header["levels"]),
    verified=f"each of its {len(SECTIONS)} sections has the sha256 of its sealed header",
    unreadable="a squeezed file is Assay's own; nobody else reads it")


def most_assayz_bytes(config: ModelConfig, tokenizer: Tokenizer) -> int:
    """Most bytes that a model of this geometry takes at int5, whatever its weights: what must fit before any training is paid for."""
    matrices, vectors = matrices_and_vectors(config)
    codes = sum(most_bits(levels_of(name, COARSEST)) * math.prod(shape) for name, shape in matrices.items()) / 8
    steps = 1.02 * sum(shape[0] for shape in matrices.values()) + 4 * len(matrices)
    others = 2.02 * sum(map(math.prod, vectors.values())) + 4096  # the header, and code tables that serve short blocks
    return math.ceil(codes + steps + others) + len(_packed_tokenizer(tokenizer))


class SqueezeSource:
    """A model on its way into a file: its matrices, and the sections that no precision changes."""

    def __init__(self, artifact: "Artifact", tokenizer: Tokenizer):
        self.artifact, self.config, self.tokenizer = artifact, artifact.config, tokenizer
        rope = self.config.rope
        if self.config.experts is not None or self.config.local_rope is not None or (rope is not None and not _whole(rope)):
            raise UsageError(f"{artifact.path}: a {self.config.family} with experts, two rotary bases or YaRN or LongRoPE is not squeezed")
        for name, tensor in artifact.tensors.items():
            if not torch.isfinite(tensor).all():
                raise ArtifactError(f"{artifact.path}: {name} holds values that are not finite; it cannot be rounded")
        matrices, vectors = matrices_and_vectors(self.config)
        self.matrices = {name: artifact.tensors[name].float().numpy() for name in matrices}
        self.fixed = {"tokenizer": _packed_tokenizer(tokenizer), "vectors": self._packed_vectors(vectors)}

    def sections(self, levels: int) -> dict[str, bytes]:
        rounded = {name: rounded_rows(matrix, levels_of(name, levels)) for name, matrix in self.matrices.items()}
        codes = {of: b"".join(one.codes.tobytes() for name, one in rounded.items() if section_of(name) == of) for of in CODES}
        return self.fixed | {"steps": _packed_steps(list(rounded.values()))} | {of: _deflated(codes[of]) for of in CODES}

    def file(self, levels: int, sections: Mapping[str, bytes]) -> bytes:
        listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in sections.items()}
        geometry = compact_geometry(self.config)
        header = seal({"assay": "squeezed", "format": ASSAYZ_FORMAT, "geometry": geometry, "levels": levels, "sections": listed,
                       "source": self.artifact.digest, "tokenizer": self.tokenizer.digest}, where="header")
        return ASSAYZ_MAGIC + len(header).to_bytes(4, "little") + header + b"".join(sections[name] for name in SECTIONS)

    def _packed_vectors(self, names: Shapes) -> bytes:
        halves = {name: self.artifact.tensors[name].to(torch.float16) for name in names}
        for name, half in halves.items():
            if not torch.isfinite(half).all():
                raise UsageError(f"{self.artifact.path}: {name} has values beyond 65,504, which float16 cannot hold; it "
                                 "cannot be squeezed")
        return _deflated(b"".join(half.numpy().tobytes() for half in halves.values()))


def compact_geometry(config: ModelConfig) -> dict[str, Any]:
    """Model config without what few models have and this one has not: every byte counts."""
    few = [field for field in dataclass_fields(ModelConfig) if field.default is not MISSING]
    off = {field.name for field in few if getattr(config, field.name) == field.default}
    geometry = {name: value for name, value in asdict(config).items() if name not in off} | {"windows": list(config.windows)}
    if config.rope is not None:
        usual = ("base", "kind", "factor", "low_freq_factor", "high_freq_factor", "original_length")
        geometry["rope"] = {name: value for name, value in geometry["rope"].items() if name in usual or value is not None}
    return geometry


def matrices_and_vectors(config: ModelConfig) -> tuple[Shapes, Shapes]:
    """(matrices, vectors) of the architecture, by name, in the order in which a file holds them."""
    every = parameter_shapes(config)
    matrices = [name for name, shape in every.items() if len(shape) == 2]
    return {name: every[name] for name in matrices}, {name: every[name] for name in every if name not in matrices}


def section_of(name: str) -> str:
    return "tables" if name in _TABLES else "matrices"


def levels_of(name: str, levels: int) -> int:
    return min(FINEST, 2 * levels) if name in _TABLES else levels


def _finest_that_fits(source: SqueezeSource, max_bytes: int) -> tuple[int, dict[str, bytes]]:
    """Finest number of levels that fits, by the size of the file itself. Twice the levels take a bit more a weight: what is left of the
    bytes says which number to try next, and two neighbours, of which one fits and one does not, end the search. Of weights that take less,
    because most are 0, that says little: after a few guesses the middle is tried."""
    def sized(levels: int) -> tuple[dict[str, bytes], int]:
        sections = source.sections(levels)
        return sections, len(source.file(levels, sections))

    weights, fits, too_fine = sum(matrix.size for matrix in source.matrices.values()), COARSEST, FINEST + 1
    best, size = sized(COARSEST)
    if size > max_bytes:
        raise UsageError(_does_not_fit(source, size, max_bytes))
    tried, guesses = fits, 0
    while too_fine - fits > 1:
        likely = math.floor(tried * 2.0 ** min(8 * (max_bytes - size) / weights, 8.0))
        tried = min(max(likely, fits + 1), too_fine - 1) if guesses < GUESSES else (fits + too_fine) // 2
        guesses += 1
        sections, size = sized(tried)
        if size <= max_bytes:
            fits, best = tried, sections
        else:
            too_fine = tried
    return fits, best


def _does_not_fit(source: SqueezeSource, least: int, max_bytes: int) -> str:
    """How many bytes it came to, and what would fit at the same width."""
    config, sizes = source.config, {name: matrix.size for name, matrix in source.matrices.items()}
    total, tables = sum(sizes.values()), sum(size for name, size in sizes.items() if name in _TABLES)
    room = total * max_bytes // least
    depth, vocab = (room - tables) * config.depth // (total - tables), (room - total + tables) * config.vocab // tables
    ways = [f"{depth} layers instead of {config.depth}"] if depth > 0 else []
    ways += [f"a vocabulary of {vocab} instead of {config.vocab}"] if 2 * vocab > config.vocab else []
    return (f"{source.artifact.path}: at int5 it takes {least:,} bytes, and at most {max_bytes:,} are allowed; that is room for "
            f"about {room:,} of its {total:,} weights: {' or '.join(ways) or 'a narrower model'}, or allow more bytes")


# ---------------------------------------------------------------- sections


def _packed_steps(rounded: list[RoundedRows]) -> bytes:
    units = np.array([one.unit for one in rounded], "<f4").tobytes()
    return _deflated(units + b"".join(one.step_codes.tobytes() for one in rounded))


def _read_steps(packed: bytes, matrices: Shapes, where: str) -> dict[str, NDArray[np.float32]]:
    rows = [shape[0] for shape in matrices.values()]
    raw = _inflated(packed, 4 * len(rows) + sum(rows), f"{where}: steps")
    units = np.frombuffer(raw[:4 * len(rows)], "<f4")
    if not ((units > 0) & (units < 1e6)).all():
        raise ArtifactError(f"{where}: a unit of the steps is not a positive number below a million: made to harm")
    codes = np.split(np.frombuffer(raw[4 * len(rows):], np.uint8), np.cumsum(rows)[:-1])
    return {name: steps_of(code, unit) for name, code, unit in zip(matrices, codes, units, strict=True)}


def _read_codes(packed: bytes, matrices: Shapes, steps: Mapping[str, NDArray[np.float32]], where: str) -> dict[str, Tensor]:
    sizes = [math.prod(shape) for shape in matrices.values()]
    codes = np.split(np.frombuffer(_inflated(packed, sum(sizes), where), np.int8), np.cumsum(sizes)[:-1])
    return {name: torch.from_numpy(unrounded(own.reshape(shape), steps[name]))
            for (name, shape), own in zip(matrices.items(), codes, strict=True)}


def _read_vectors(packed: bytes, vectors: Shapes, where: str) -> dict[str, Tensor]:
    sizes = [math.prod(shape) for shape in vectors.values()]
    values = np.frombuffer(_inflated(packed, 2 * sum(sizes), f"{where}: vectors"), "<f2").astype(np.float32)
    if not np.isfinite(values).all():
        raise ArtifactError(f"{where}: a norm or bias is not finite: made to harm")
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return {name: torch.from_numpy(part.copy()).reshape(shape) for (name, shape), part in zip(vectors.items(), parts, strict=True)}


def _packed_tokenizer(tokenizer: Tokenizer) -> bytes:
    parts = {"document": tokenizer.document, "settings": tokenizer.settings, "templates": tokenizer.templates}
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return lzma.compress(text.encode(), preset=6 | lzma.PRESET_EXTREME)


def _read_tokenizer(packed: bytes, where: str) -> Tokenizer:
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=4 * TOKENIZER_LIMIT)
    parts = parse_json(_whole_stream(decoder, packed, TOKENIZER_LIMIT, where), where=where,
                       shape={"document": dict, "settings": dict, "templates": dict})
    return Tokenizer(parts["document"], parts["settings"], parts["templates"])


def _deflated(data: bytes) -> bytes:
    """Huffman codes alone: chance repetitions among weights cost more to name than to spell."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def _inflated(packed: bytes, size: int, where: str) -> bytes:
    if size > 8 * len(packed):
        raise ArtifactError(f"{where}: {size:,} bytes out of {len(packed):,} are less than a bit each, which no Huffman code "
                            "comes to: made to harm")
    data = _whole_stream(zlib.decompressobj(-zlib.MAX_WBITS), packed, size, where)
    if len(data) != size:
        raise ArtifactError(f"{where}: {len(data):,} bytes, and the geometry asks for {size:,}: made to harm")
    return data


def _whole_stream(decoder: Any, packed: bytes, limit: int, where: str) -> bytes:
    """Decompress all of one stream, which must end within `limit` bytes and where the section does."""
    try:
        data = decoder.decompress(packed, limit + 1)
    except (zlib.error, lzma.LZMAError) as error:
        raise ArtifactError(f"{where}: cannot be decompressed: {error}") from None
    if len(data) > limit or not decoder.eof or decoder.unused_data:
        raise ArtifactError(f"{where}: does not end where its section does, or holds more than {limit:,} bytes: made to harm")
    return data


# ---------------------------------------------------------------- header


_HEADER = {
    "assay": str, "format": int, "geometry": dict, "levels": range(COARSEST, FINEST + 1), "source": str, "tokenizer": str, ...: None,
    "sections": {...: None} | {name: {"bytes": NATURAL, "sha256": str, ...: None} for name in SECTIONS}}


def _read_header(data: bytes, where: str) -> tuple[dict[str, Any], memoryview]:
    """The header, and all that follows it."""
    start = len(ASSAYZ_MAGIC) + 4
    if not data.startswith(ASSAYZ_MAGIC) or len(data) < start:
        raise ArtifactError(f"{where}: does not begin as a squeezed model of format {ASSAYZ_FORMAT} does")
    end = start + int.from_bytes(data[len(ASSAYZ_MAGIC):start], "little")
    if end - start > ASSAYZ_HEADER_LIMIT or end > len(data):
        raise ArtifactError(f"{where}: announces a header of {end - start:,} bytes in a file of {len(data):,}: damaged")
    header = unseal(data[start:end], where=where)
    require_shape(header, _HEADER, where=where)
    if (header["assay"], header["format"]) != ("squeezed", ASSAYZ_FORMAT):
        raise ArtifactError(f"{where}: is {header['assay']!r:.40} of format {header['format']}; this Assay reads format {ASSAYZ_FORMAT}")
    return header, memoryview(data)[end:]


def _read_sections(listed: Mapping[str, Any], body: memoryview, where: str) -> dict[str, bytes]:
    sizes = [listed[name]["bytes"] for name in SECTIONS]
    if sum(sizes) != len(body):
        raise ArtifactError(f"{where}: {len(body):,} bytes follow the header, which lists {sum(sizes):,}: truncated, or "
                            "something was appended")
    packed, start = {}, 0
    for name, size in zip(SECTIONS, sizes, strict=True):
        packed[name] = bytes(body[start:start + size])
        start += size
        if hashlib.sha256(packed[name]).hexdigest() != listed[name]["sha256"]:
            raise ArtifactError(f"{where}: the bytes of {name!r} are not those that were written: damaged; restore the file")
    return packed


def read_geometry(fields: dict[str, Any], where: str) -> ModelConfig:
    """A header may claim anything: every field is there, of its type and in bounds, before a model is thought of."""
    where = f"{where}: geometry"
    sizes = [value for value in fields.values() if isinstance(value, int) and not isinstance(value, bool)]
    windows, depth, rope = fields.get("windows"), fields.get("depth"), fields.get("rope")
    heads, kv_heads = fields.get("heads"), fields.get("kv_heads")
    if type(depth) is not int or depth > DEPTH_LIMIT or not all(0 < size <= SIDE_LIMIT for size in sizes):
        raise ArtifactError(f"{where}: expected sizes from 1 to {SIDE_LIMIT:,}, and up to {DEPTH_LIMIT} layers")
    if not isinstance(windows, list) or len(windows) != depth or not all(w is None or (type(w) is int and w > 0) for w in windows):
        raise ArtifactError(f"{where}: expected a window, or null, for each of {depth} layers")
    if type(heads) is not int or type(kv_heads) is not int or heads % kv_heads:
        raise ArtifactError(f"{where}: query heads must be shared out evenly over key/value heads")
    try:
        family_named(str(fields.get("family")), where)
        positions = from_mapping(Rope, rope, where=where) if isinstance(rope, dict) else rope
        config = from_mapping(ModelConfig, fields | {"rope": positions}, where=where)
    except UsageError as error:
        raise ArtifactError(str(error)) from None
    if config.rope is not None and not _whole(config.rope):
        raise ArtifactError(f"{where}: rotary positions of kind {config.rope.kind!r} lack a factor, or one is not positive")
    return config


def _whole(rope: Rope) -> bool:
    needed = {"default": [], "linear": [rope.factor],
              "llama3": [rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_length]}.get(rope.kind, [None])
    return all(value is not None and math.isfinite(value) and value > 0 for value in [rope.base, *needed])

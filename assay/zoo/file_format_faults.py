"""File format faults: hostile safetensors and JSON, links and names that lead out of a folder, GGUF and 16-MB files."""

import contextlib
import functools
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.errors import ArtifactError
from assay.guard import llama_cpp_checks
from assay.guard.compressed_checks import check_compressed
from assay.guard.llama_cpp_checks import check_in_llama_cpp
from assay.model import families
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.store import assayz, compressed_tensors, gguf
from assay.store.artifact import open_artifact
from assay.store.checkpoint import write_checkpoint
from assay.store.export_artifact import ExportFormat, export_artifact
from assay.store.safetensors_files import read_tensors, tensor_sha256, write_tensors
from assay.store.saving import Lineage, model_contents
from assay.testing.fault_injection import Job, Plant, fault, fault_if_installed, in_place_of, on_disk, swap
from assay.testing.tiny_models import (
    INDEX_FILE,
    WEIGHTS_FILE,
    a_folder,
    edit_json,
    examine_folder,
    rounded_to_four_bits,
    save_hf_folder,
    shard_files,
    tiny_model,
    tiny_tokenizer,
    truncate,
)
from assay.verdict import Outcome, Verdict, proven, refuted, unproven

MEBIBYTE = 1 << 20
MUTANTS = 300
_SECONDS, MEMORY = 1.0, 64 * MEBIBYTE  # what a hostile header may cost

# ---------------------------------------------------------------- jobs


def a_folder_on_the_clock(folder: Path, plant: Plant) -> list[Verdict]:
    """A refusal counts only if it was quick and took little memory."""
    where = save_hf_folder(folder / "model", tiny_model())
    with plant(where):
        tracemalloc.start()
        start = time.perf_counter()
        verdicts = examine_folder(where)
        seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    refused = any(verdict.outcome is Outcome.REFUTED for verdict in verdicts)
    if refused and (seconds > _SECONDS or peak > MEMORY):
        return [unproven("whole", f"it was refused, but that took {seconds:.1f} s and {peak / MEBIBYTE:.0f} MiB")]
    return verdicts


def files_read_one_by_one(folder: Path, plant: Plant) -> list[Verdict]:
    """Each file is refused, or read as the safetensors library reads it: nothing else may happen, nothing may hang."""
    write_tensors(folder / WEIGHTS_FILE, {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})
    with plant(folder):
        files = sorted(folder.iterdir())
        start = time.perf_counter()
        refused = [file.name for file in files if not read_as_the_library_does(file)]
        seconds = time.perf_counter() - start
    if seconds > len(files) * _SECONDS / 10:
        return [unproven("headers", f"{len(files)} files took {seconds:.1f} s")]
    if refused:
        return [refuted("headers", f"{len(refused)} of {len(files)} files were refused, the others read as they are")]
    return [proven("headers", "the file is read as the library does")]


def read_as_the_library_does(file: Path) -> bool:
    """False where it was refused. What we accept the library accepts, and finds the same in it."""
    from safetensors.torch import load

    try:
        tensors = read_tensors(file)
    except ArtifactError:
        return False
    theirs = load(file.read_bytes())
    assert tensors.keys() == theirs.keys(), f"{file}: names differ"
    assert all(tensor_sha256(tensor) == tensor_sha256(theirs[name]) for name, tensor in tensors.items())
    return True


@functools.cache
def a_gguf_export(dtype: str) -> Job:
    """A Llama with grouped heads, written as GGUF and proven against its source; struck while it is written."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        tokenizer, where = with_numbers(), folder / "model.gguf"
        contents = model_contents(tiny_model(), tokenizer, resolve_special_tokens(tokenizer, {}, {}), Lineage())
        source = write_checkpoint(folder / "source", contents).folder
        with plant(folder):
            bound = export_artifact(open_artifact(source), "gguf", where, dtype)
        return examine_folder(where, against=str(source), expect="same", bound=bound)
    return job


def a_quantised_export(folder: Path, plant: Plant) -> list[Verdict]:
    """A model with opinions in q4_k_m, opened and scored in llama.cpp; struck while it is written or before it is opened there."""
    tokenizer, where, model = with_numbers(), folder / "model.gguf", tiny_model(width=256, head_dim=64, hidden=512)
    with torch.no_grad():
        model.embed.weight.mul_(8)
    contents = model_contents(model, tokenizer, resolve_special_tokens(tokenizer, {}, {}), Lineage())
    source = open_artifact(write_checkpoint(folder / "source", contents).folder)
    with plant(folder):
        bound = export_artifact(source, "gguf", where, "q4_k_m")
        verdicts = check_in_llama_cpp(where, source)
    return [*verdicts, *examine_folder(where, against=str(source.path), expect="same", bound=bound)]


def a_gguf_file(folder: Path, plant: Plant) -> list[Verdict]:
    """Another tool's, struck on the disk."""
    source, where = save_hf_folder(folder / "source", tiny_model()), folder / "model.gguf"
    export_artifact(open_artifact(source), "gguf", where, "f16")
    with plant(where):
        return examine_folder(where)


def a_squeezed_file(folder: Path, plant: Plant) -> list[Verdict]:
    """Struck while it is written, and proven against its source."""
    source, where = save_hf_folder(folder / "source", tiny_model()), folder / "model.assayz"
    with plant(where):
        assayz.write_assayz(open_artifact(source), where, 1 << 20)
    return examine_folder(where, against=str(source))


def with_numbers() -> Tokenizer:
    """The tiny tokenizer, and a merge that only a splitter which keeps long numbers together can make."""
    plain = tiny_tokenizer()
    model = plain.document["model"]
    grown = model | {"vocab": model["vocab"] | {"15": plain.size}, "merges": [*model["merges"], ["1", "5"]]}
    return Tokenizer(plain.document | {"model": grown}, plain.settings, plain.templates)

# ---------------------------------------------------------------- hostile files


fault("duplicate key in a header", rows=("C04",), stage="load", check="whole", job=a_folder())(
    # Two readers would see two models.
    on_disk(lambda folder: rewrite_header(folder / WEIGHTS_FILE, lambda header: header.replace(
        b'"model.layers.1.self_attn.k_proj.weight"', b'"model.layers.1.self_attn.v_proj.weight"'))))


@fault("duplicate key in config.json", rows=("L14",), stage="load", check="whole", job=a_folder())
@on_disk
def duplicate_key_in_config(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"rope_theta": 10000.5,', 1))


@fault("climbing name in an index", rows=("C04",), stage="load", check="whole", job=a_folder(sharded=True))
@on_disk
def climbing_name_in_an_index(folder: Path) -> None:
    first = shard_files(folder)[0]
    first.rename(folder.parent / "outside.safetensors")
    outside = "../outside.safetensors"
    edit_json(folder / INDEX_FILE, lambda index: index | {"weight_map": {
        name: outside if shard == first.name else shard for name, shard in index["weight_map"].items()}})


fault("climbing name in a header", rows=("C04",), stage="load", check="whole", job=a_folder())(
    on_disk(lambda folder: rewrite_header(folder / WEIGHTS_FILE, lambda header: header.replace(
        b'"model.norm.weight"', b'"../../norm.weight"'))))


@fault("header of 97 MB", rows=("C03",), stage="load", check="whole", job=a_folder_on_the_clock)
@on_disk
def header_of_97_mb(folder: Path) -> None:
    """Valid JSON that a parser would read to the end."""
    padding = b',"__metadata__":{"a":"' + b"x" * 97_000_000 + b'"}}'
    rewrite_header(folder / WEIGHTS_FILE, lambda header: header[:-1] + padding)


fault("weights linked from elsewhere", rows=("C04",), stage="load", check="whole", job=a_folder())(
    on_disk(lambda folder: link_out(folder / WEIGHTS_FILE)))
fault("tokenizer linked from elsewhere", rows=("C04",), stage="load", check="whole", job=a_folder())(
    on_disk(lambda folder: link_out(folder / "tokenizer.json")))


@fault("mutated headers", rows=("C03",), stage="load", check="headers", job=files_read_one_by_one)
@on_disk
def mutated_headers(folder: Path) -> None:
    data, chance = (folder / WEIGHTS_FILE).read_bytes(), random.Random(0)
    for i in range(MUTANTS):
        (folder / f"mutant-{i:03d}.safetensors").write_bytes(mutated(data, chance))

# ---------------------------------------------------------------- GGUF


gguf_fault = fault_if_installed("gguf")


gguf_fault("q and k not permuted", rows=("M08",), stage="export", check="lineage", job=a_gguf_export("f16"))(
    lambda _: swap(families, "interleave_heads", lambda rows, heads: rows))
gguf_fault("k permuted by q's heads", rows=("M08",), stage="export", check="lineage", job=a_gguf_export("f16"))(
    # Right for every model but those with grouped heads.
    in_place_of(families, "interleave_heads")(lambda usual, rows, heads: usual(rows, tiny_model().config.heads)))
gguf_fault("wrong pre-tokenizer tag", rows=("M09",), stage="export", check="tokenizer", job=a_gguf_export("f16"))(
    # The tag was guessed from a hash, and numbers are split in another way.
    lambda _: exporting_metadata(lambda metadata: metadata | {"tokenizer.ggml.pre": "smaug-bpe"}))
gguf_fault("chat template lost", rows=("M09",), stage="export", check="tokenizer", job=a_gguf_export("f16"))(
    lambda _: exporting_metadata(lambda metadata: {k: v for k, v in metadata.items() if k != "tokenizer.chat_template"}))
gguf_fault("quantised twice", rows=("M10",), stage="export", check="lineage", job=a_gguf_export("q8_0"))(
    # Called Q8_0, and made from four bits.
    in_place_of(gguf, "_rounded")(lambda usual, name, tensor, type: usual(name, rounded_to_four_bits(tensor), type)))


@gguf_fault("one tensor badly quantised", rows=("M10",), stage="export", check="lineage", job=a_gguf_export("q8_0"))
@in_place_of(gguf, "_rounded")
def one_tensor_badly_quantised(usual: Any, name: str, tensor: Tensor, type: str) -> Any:
    return usual(name, tensor * 1.2 if name == "blk.1.attn_k.weight" else tensor, type)


gguf_fault("EOS is the start of a turn", rows=("D09", "Seen: GGUF EOS"), stage="export", check="fields",
           job=a_gguf_export("f16"))(
    lambda _: swap(gguf, "_ends", lambda tokenizer, stops: {"tokenizer.ggml.eos_token_id": 257}))
gguf_fault("GGUF cut short", rows=("C03",), stage="load", check="whole", job=a_gguf_file)(on_disk(lambda file: truncate(file, 0.9)))

llama_fault = fault_if_installed("llama_cpp")
llama_fault("llama.cpp splits numbers", rows=("M09",), stage="export", check="llama ids", job=a_quantised_export)(
    lambda _: exporting_metadata(lambda metadata: metadata | {"tokenizer.ggml.pre": "smaug-bpe"}))


@llama_fault("another model's file in llama.cpp", rows=("M10",), stage="export", check="llama perplexity", job=a_quantised_export)
@in_place_of(llama_cpp_checks, "ask_llama_cpp")
def another_models_file(usual: Any, request: dict[str, Any], seconds: float) -> Any:
    """What was proven and what is loaded are two files."""
    other = Path(request["file"]).with_name("other.gguf")
    source = save_hf_folder(other.with_name("other"), tiny_model(seed=1, width=256, head_dim=64, hidden=512))
    export_artifact(open_artifact(source), "gguf", other, "q8_0")
    return usual(request | {"file": str(other)}, seconds)

# ---------------------------------------------------------------- codes with scales


@functools.cache
def a_compressed_folder(form: ExportFormat) -> Job:
    """Job: a compressed folder as another tool would leave it, without a manifest; struck on the disk, and proven against its source."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        source, where = open_artifact(save_hf_folder(folder / "source", tiny_model())), folder / "model"
        bound = export_artifact(source, form, where)
        (where / "manifest.json").unlink()
        with plant(where):
            found = examine_folder(where, against=str(source.path), expect="same", bound=bound)
            refused = any(verdict.outcome is Outcome.REFUTED for verdict in found)
            return found if refused else [*found, *check_compressed(where, source)]
    return job


def compressed_fault(name: str, form: ExportFormat, check: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    def strike(where: Path) -> None:
        tensors = {name: tensor.clone() for name, tensor in read_tensors(where / WEIGHTS_FILE).items()}
        (where / WEIGHTS_FILE).unlink()
        write_tensors(where / WEIGHTS_FILE, tensors | change(tensors))

    fault(name, rows=("M10",), stage="export", check=check, job=a_compressed_folder(form))(on_disk(strike))


def from_the_other_end(words: Tensor) -> Tensor:
    codes = compressed_tensors.unpacked_nibbles(words)
    return compressed_tensors.packed_nibbles(codes.reshape(-1, 8).flip(1).reshape(codes.shape))


DOWN, OUT = "model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.o_proj.weight"
compressed_fault("one layer not in FP8, as the config says it is", "fp8", "architecture", lambda held: {DOWN: held[DOWN].float()})
compressed_fault("scales of FP8 transposed", "fp8", "architecture", lambda held: {f"{OUT}_scale": held[f"{OUT}_scale"].T.contiguous()})
compressed_fault("rows of codes with other rows' scales", "w8a8", "lineage", lambda held: {f"{OUT}_scale": held[f"{OUT}_scale"].roll(1, 0)})
compressed_fault("four-bit codes packed from the other end", "w4a16", "lineage", lambda held: {
    f"{DOWN}_packed": from_the_other_end(held[f"{DOWN}_packed"])})
compressed_fault("codes that are all zero", "w8a8", "values", lambda held: {
    name: torch.zeros_like(codes) for name, codes in held.items() if codes.dtype == torch.int8})
compressed_fault("scales twice what they must be", "fp8", "rounding", lambda held: {
    DOWN: (held[DOWN].float() / 2).to(torch.float8_e4m3fn), f"{DOWN}_scale": held[f"{DOWN}_scale"] * 2})

# ---------------------------------------------------------------- squeezed files


fault("squeezed out of four bits", rows=("M10",), stage="export", check="lineage", job=a_squeezed_file)(
    # Its header says 127 levels.
    in_place_of(assayz, "rounded_rows")(lambda usual, matrix, levels: usual(
        rounded_to_four_bits(torch.from_numpy(matrix)).numpy(), levels)))


@fault("squeezed file damaged", rows=("C03",), stage="export", check="whole", job=a_squeezed_file)
@contextlib.contextmanager
def squeezed_file_damaged(where: Path) -> Iterator[None]:
    yield
    data = bytearray(where.read_bytes())
    data[-100] ^= 1
    where.write_bytes(data)

# ---------------------------------------------------------------- tools


def rewrite_header(file: Path, change: Callable[[bytes], bytes]) -> None:
    header, data = split_header(file.read_bytes())
    header = change(header)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def split_header(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[:8], "little")
    return data[8:8 + length].rstrip(), data[8 + length:]


def link_out(file: Path) -> None:
    outside = file.parent.parent / file.name
    file.rename(outside)
    file.symlink_to(outside)


def exporting_metadata(change: Callable[[dict[str, Any]], dict[str, Any]]) -> AbstractContextManager[None]:
    whole = gguf.tokenizer_to_gguf
    return swap(gguf, "tokenizer_to_gguf", lambda tokenizer, vocab: change(whole(tokenizer, vocab)))


_TOKENS = (b'"', b"{", b"[" * 3000, b"-1", b"1e9", b"9" * 25, b"NaN", b"\xff", b"\\ud800", b"../", b"F64", b"")
LENGTHS = (0, 1, 9, 97_000_000, 2**63, 2**64 - 1)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """A token, some bytes or the length of the header changed, or the end cut off."""
    header, rest = split_header(data)
    kind, start = chance.randrange(4), chance.randrange(len(header))
    if kind == 0:  # with a length that stays true, so that the parser sees it
        header = header[:start] + chance.choice(_TOKENS) + header[start + chance.choice([0, 1, 3]):]
        return len(header).to_bytes(8, "little") + header + rest
    if kind == 1:
        return data[:8] + bytes(chance.randrange(256) if chance.random() < 0.02 else byte for byte in data[8:])
    if kind == 2:
        return chance.choice(LENGTHS).to_bytes(8, "little") + data[8:]
    return data[:chance.randrange(len(data))]

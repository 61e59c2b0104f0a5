"""Broken GGUF files: the kinds that llama.cpp's tests/test-gguf.cpp makes by hand, made again here; each must be refused, or read.

That program writes into temporary files, so there is nothing to point at: what it writes for each kind is written here by ourselves,
with two keys and two tensors instead of a hundred. A kind that llama.cpp's checkout no longer names is not tried.
"""

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from assay.errors import AssayError
from assay.store.gguf_header import read_gguf_header
from tests.judges.score import Score, checkout, checkout_version, first_words

ASKS = "is this handcrafted GGUF file refused (or read, where it is sound)?"
SOUND = {"HEADER_EMPTY", "KV_SUCCESS", "TENSORS_ZERO_DIM", "TENSORS_SUCCESS", "TENSORS_CUSTOM_ALIGN", "DATA_SUCCESS", "DATA_CUSTOM_ALIGN"}
U32, I32, F32, I8, I64 = 4, 5, 0, 24, 27  # types of a value, and of a tensor
ENDLESS = 2**64 - 1


def judge(folder: Path) -> Score:
    program = checkout(folder, "llama.cpp", "tests", "test-gguf.cpp")
    score = Score(checkout_version(folder, "llama.cpp", [program]))
    named = program.read_text()
    with tempfile.TemporaryDirectory() as scratch:
        for kind, make in KINDS.items():
            if f"HANDCRAFTED_{kind}" not in named:
                score.notes.append(f"{kind} is no longer made by the checkout's program")
                continue
            file = Path(scratch) / f"{kind}.gguf"
            file.write_bytes(make())
            try_file(score, kind, file)
    return score


def try_file(score: Score, kind: str, file: Path) -> None:
    try:
        read_gguf_header(file)
    except AssayError as error:
        if kind in SOUND:
            score.refusals[f"{kind}: {first_words(error).replace(str(file.parent), '')}"] += 1
        else:
            score.right += 1
    else:
        score.agree(kind in SOUND, kind, "read without a word, llama.cpp refuses it")


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words)) + words.encode()


def header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def number(name: str, value: int, kind: int = U32) -> bytes:
    return text(name) + struct.pack("<II", kind, value)


def tensor(name: str, *, shape: tuple[int, ...] = (8, 2), dimensions: int | None = None, kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}qiQ", dimensions or len(shape), *shape, kind, offset)


def padded(data: bytes, alignment: int = 32) -> bytes:
    return data + bytes(-len(data) % alignment)


def keyed(*keys: bytes) -> Callable[[], bytes]:
    return lambda: padded(header(keys=len(keys)) + b"".join(keys))


def tabled(*entries: bytes, keys: tuple[bytes, ...] = (), data: int = 0, alignment: int = 32) -> Callable[[], bytes]:
    return lambda: padded(header(tensors=len(entries), keys=len(keys)) + b"".join(keys + entries), alignment) + bytes(data)


ALIGN_1, ALIGN_13 = number("general.alignment", 1), number("general.alignment", 13)
ONE, TWO = tensor("my_tensor_0"), tensor("my_tensor_1", offset=64)
UNALIGNED = (tensor("my_tensor_0", shape=(7,)), tensor("my_tensor_1", shape=(7,), offset=28))  # 28 bytes, the next at once
HUGE = tensor("my_tensor_0", shape=(0x7FFFFFFFFFFFFFC0,), kind=I8)
KINDS: dict[str, Callable[[], bytes]] = {
    "HEADER_BAD_MAGIC": lambda: padded(header(magic=b"FUGG")),
    "HEADER_BAD_VERSION_0": lambda: padded(header(version=0)),
    "HEADER_BAD_VERSION_1": lambda: padded(header(version=1)),
    "HEADER_BAD_VERSION_FUTURE": lambda: padded(header(version=4)),
    "HEADER_BAD_N_TENSORS": lambda: padded(header(tensors=ENDLESS)),
    "HEADER_BAD_N_KV": lambda: padded(header(keys=ENDLESS)),
    "HEADER_EMPTY": lambda: padded(header()),
    "KV_BAD_KEY_SIZE": lambda: padded(header(keys=1) + struct.pack("<Q", ENDLESS) + b"my_key_0" + struct.pack("<II", U32, 7)),
    "KV_EMPTY_KEY": keyed(number("", 7)),
    "KV_BAD_TYPE": keyed(number("my_key_0", 7, kind=13)),
    "KV_DUPLICATE_KEY": keyed(number("my_key_0", 7), number("my_key_0", 7)),
    "KV_BAD_ALIGN": keyed(number("my_key_0", 7), ALIGN_13),
    "KV_WRONG_TYPE_ALIGN": keyed(number("my_key_0", 7), number("general.alignment", 32, kind=I32)),
    "KV_SUCCESS": keyed(number("my_key_0", 7), number("my_key_1", 8)),
    "TENSORS_BAD_NAME_SIZE": tabled(tensor("my_tensor_0" + "_and_so_on" * 7), data=64),
    "TENSORS_BAD_N_DIMS": tabled(tensor("my_tensor_0", dimensions=5), data=64),
    "TENSORS_BAD_SHAPE": tabled(tensor("my_tensor_0", shape=(-1, -1)), data=64),
    "TENSORS_ZERO_DIM": tabled(tensor("my_tensor_0", shape=(8, 0))),
    "TENSORS_NE_TOO_BIG": tabled(tensor("my_tensor_0", shape=(4 * (2**31 - 1),) * 2), data=64),
    "TENSORS_NBYTES_TOO_BIG": tabled(tensor("my_tensor_0", shape=(1_534_000_000,) * 2, kind=I64), data=64),
    "TENSORS_BAD_TYPE": tabled(tensor("my_tensor_0", kind=99), data=64),
    "TENSORS_BAD_OFFSET": tabled(tensor("my_tensor_0", offset=ENDLESS), data=64),
    "TENSORS_DUPLICATE_NAME": tabled(ONE, tensor("my_tensor_0", offset=64), data=128),
    "TENSORS_BAD_ALIGN": tabled(ONE, keys=(ALIGN_13,), data=64, alignment=13),
    "TENSORS_INCONSISTENT_ALIGN": tabled(*UNALIGNED, alignment=1),
    "TENSORS_SUCCESS": tabled(ONE, TWO),
    "TENSORS_CUSTOM_ALIGN": tabled(*UNALIGNED, keys=(ALIGN_1,), alignment=1),
    "DATA_NOT_ENOUGH_DATA": tabled(ONE, TWO, data=127),
    "DATA_BAD_ALIGN": tabled(ONE, keys=(ALIGN_13,), data=64, alignment=13),
    "DATA_INCONSISTENT_ALIGN": tabled(*UNALIGNED, data=56, alignment=1),
    "DATA_MEM_SIZE_OVERFLOW": tabled(HUGE, tensor("my_tensor_1", shape=(0x7FFFFFFFFFFFFFC0,), kind=I8, offset=0x7FFFFFFFFFFFFFC0), data=32),
    "DATA_SUCCESS": tabled(ONE, TWO, data=128),
    "DATA_CUSTOM_ALIGN": tabled(*UNALIGNED, keys=(ALIGN_1,), data=56, alignment=1),
}

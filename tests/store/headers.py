"""Safetensors files, mutated: bytes, JSON tokens, structure, lengths."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import safetensors.torch
import torch

TOKENS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b"[" * 2000,
          b"-0", b"-1", b"1e2", b"1.0", b"0", b"00", b"1", b"9" * 19, b"9" * 20, b"9" * 5000, b"18446744073709551616",
          b"NaN", b"Infinity", b"null", b"true", b'"\\ud800"', b'"\\u0000"', b'"../a"', b'""', b'"__metadata__":{},',
          b'"F32"', b'"F4"', b'"dtype":"F32",']
DTYPES = ["F32", "F16", "BF16", "F64", "I8", "U8", "I16", "I32", "I64", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "C64",
          "F99", "f32", "", 3]
NAMES = ["", "..", "../x", "a/../b", "/etc/passwd", "a\x00b", "w", "weight", "é", "__metadata__", "a" * 3000, "\ud800"]
NUMBERS: list[Any] = [0, 1, 2, 3, 4, 7, 8, 16, 2**31, 2**32, 2**62, 2**63, 2**64, -1, -0.0, 1.0, True, None, "4",
                      10**30]


def mutated_files(count: int, seed: int) -> Iterator[bytes]:
    """`count` files, the same for the same seed; a few of them happen to be valid."""
    chance = random.Random(seed)
    originals = _originals()
    for _ in range(count):
        data = chance.choice(originals)
        for _ in range(chance.choice([1, 1, 1, 2, 4])):
            data = chance.choice([_bytes, _tokens, _structure, _structure, _structure, _lengths])(data, chance)
        yield data


def assembled(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _originals() -> list[bytes]:
    rows = torch.arange(6, dtype=torch.float32)
    return [safetensors.torch.save(tensors, metadata) for tensors, metadata in [
        ({"w": rows.reshape(2, 3)}, None),
        ({"a": rows, "b": rows.to(torch.bfloat16), "c": torch.tensor(True)}, {"format": "pt"}),
        ({"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.5), "long": torch.arange(3)}, {"k": "v"}),
        ({}, None),
    ]]


def _split(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[:8], "little")
    return data[8:8 + length], data[8 + length:]


def _bytes(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        if changed:
            changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _tokens(data: bytes, chance: random.Random) -> bytes:
    """A token put in or over something, with the length field kept true so that the parser sees it."""
    header, rest = _split(data)
    start = chance.randrange(len(header) + 1)
    stop = min(len(header), start + chance.choice([0, 0, 1, 2, 5]))
    return assembled(header[:start] + chance.choice(TOKENS) + header[stop:], rest)


def _lengths(data: bytes, chance: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    other = chance.choice([0, 1, length - 1, length + 1, length + 8, 97_000_000, 2**32, 2**63, 2**64 - 1])
    return chance.choice([
        lambda: min(max(other, 0), 2**64 - 1).to_bytes(8, "little") + data[8:],
        lambda: data[:chance.randrange(len(data) + 1)],
        lambda: data + bytes(chance.choice([1, 4, 8])),
        lambda: assembled(_split(data)[0] + b" " * chance.choice([1, 8]), _split(data)[1]),
    ])()


def _structure(data: bytes, chance: random.Random) -> bytes:
    """The header as a document, changed in one place and spelled again."""
    header, rest = _split(data)
    try:
        document = json.loads(header)
    except (ValueError, RecursionError):
        return data
    if not isinstance(document, dict) or not document:
        return assembled(json.dumps({chance.choice(NAMES): chance.choice(NUMBERS)}).encode(), rest)
    name = chance.choice(list(document))
    entry = document[name]
    if isinstance(entry, dict) and isinstance(entry.get("shape"), list) and isinstance(entry.get("data_offsets"), list):
        chance.choice([_dtype, _shape, _offsets, _field])(entry, chance)
    chance.choice([_same, _same, _renamed, _removed, _doubled])(document, name, chance)
    return assembled(json.dumps(document).encode(), rest)


def _dtype(entry: dict[str, Any], chance: random.Random) -> None:
    entry["dtype"] = chance.choice(DTYPES)


def _shape(entry: dict[str, Any], chance: random.Random) -> None:
    shape = entry["shape"]
    chance.choice([
        lambda: shape.append(chance.choice(NUMBERS)),
        lambda: shape and shape.__setitem__(chance.randrange(len(shape)), chance.choice(NUMBERS)),
        lambda: shape.reverse(),
        lambda: shape.extend([1] * chance.choice([1, 8, 70])),
        lambda: shape.extend([2**40, 2**40, 0]),
    ])()


def _offsets(entry: dict[str, Any], chance: random.Random) -> None:
    offsets = entry["data_offsets"]
    chance.choice([
        lambda: offsets.reverse(),
        lambda: offsets.append(0),
        lambda: offsets and offsets.__setitem__(chance.randrange(len(offsets)), chance.choice(NUMBERS)),
        lambda: offsets and type(offsets[0]) is int and offsets.__setitem__(0, offsets[0] + chance.choice([-4, -1, 1])),
    ])()


def _field(entry: dict[str, Any], chance: random.Random) -> None:
    if chance.random() < 0.5:
        entry[chance.choice(["extra", "strides", "offset"])] = chance.choice(NUMBERS)
    else:
        del entry[chance.choice(list(entry))]


def _same(document: dict[str, Any], name: str, chance: random.Random) -> None:
    pass


def _renamed(document: dict[str, Any], name: str, chance: random.Random) -> None:
    document[chance.choice(NAMES)] = document.pop(name)


def _removed(document: dict[str, Any], name: str, chance: random.Random) -> None:
    del document[name]


def _doubled(document: dict[str, Any], name: str, chance: random.Random) -> None:
    document[chance.choice(NAMES)] = copy.deepcopy(document[name])

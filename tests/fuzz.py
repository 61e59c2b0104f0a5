"""Mutants of files: bytes flipped, cut and doubled; JSON with one value another, gone, or too much, sealed again where it was sealed."""

import copy
import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

from assay.store.sealed import seal

TOKENS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b"[" * 2000, b"{\"a\":" * 120, b"-",
          b"1e999", b"-1e400", b"9" * 50, b"9" * 5000, b"NaN", b"Infinity", b"null", b"true", b'"\\ud800"', b'"\\u0000"', b'"n":1,', b"\\"]
ODD: list[Any] = [None, True, 0, -1, 1.5, 2**31, 2**63, 10**30, 1e308, "", "x", "\u0000", "é" * 300, "../../etc/passwd", [], [None],
                  [[]], {}, {"a": 1},
                  {"weights": 3}, [1, "a"], "nan", "9" * 400]


def byte_mutants(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        mutant = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            at, end = sorted(rng.randrange(len(mutant) + 1) for _ in range(2))
            kind = rng.randrange(4)
            if kind == 0 and at < len(mutant):
                mutant[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                del mutant[at:end]
            elif kind == 2:
                mutant[at:at] = mutant[at:end][:40]
            else:
                mutant[at:at] = rng.choice(TOKENS)
        yield bytes(mutant)


def json_mutants(document: Any, count: int, seed: int) -> Iterator[Any]:
    """The document with one value, key or item changed."""
    rng = random.Random(seed)
    for _ in range(count):
        mutant = copy.deepcopy(document)
        places = list(_places(mutant))
        if not places:
            yield rng.choice(ODD)
            continue
        parent, key = rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice(["", "x", "../x", "\u0000"])] = parent.pop(key)
        else:
            parent[key] = copy.deepcopy(rng.choice(ODD))
        yield mutant


def mutants_of_json(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Mutants of a file that holds one document: half of them are JSON still, and sealed where the document was."""
    yield from byte_mutants(data, count // 2, seed)
    document = json.loads(data)
    for mutant in json_mutants({key: value for key, value in document.items() if key != "self"}, count - count // 2, seed):
        yield seal(mutant, where="x", indent=1) if "self" in document and isinstance(mutant, dict) else json.dumps(mutant).encode()


def mutants_of_lines(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Mutants of a file of JSON lines; a ledger is chained anew from the line that was changed."""
    yield from byte_mutants(data, count // 2, seed)
    rng, lines = random.Random(seed), [json.loads(line) for line in data.splitlines()]
    for number in range(count - count // 2):
        at = rng.randrange(len(lines))
        [mutant] = json_mutants(lines[at], 1, seed + number)
        changed = [*lines[:at], mutant, *lines[at + 1:]]
        yield _chained(changed) if "previous" in lines[0] else b"".join(json.dumps(line).encode() + b"\n" for line in changed)


def _chained(lines: list[Any]) -> bytes:
    written, head = b"", "0" * 64
    for line in lines:
        facts = {key: value for key, value in line.items() if key != "self"} if isinstance(line, dict) else {"kind": line}
        sealed = seal(facts | ({"previous": head} if "previous" in facts else {}), where="x")
        written, head = written + sealed, hashlib.sha256(sealed).hexdigest()
    return written


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)

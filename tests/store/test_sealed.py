"""Sealed JSON reads back as it was written, and not at all if a byte differs."""

import json

import pytest

from assay.errors import ArtifactError, UsageError
from assay.store.sealed import canonical_json, seal, unseal
from assay.strict_json import parse_json

DOCUMENT = {"b": [1, 2.5, None, True, "é\ud800"], "a": {"z": -0.0, "y": 10**30}}


@pytest.mark.parametrize("indent", [None, 1])
def test_what_is_sealed_reads_back(indent: int | None) -> None:
    assert unseal(seal(DOCUMENT, where="x", indent=indent), where="x", indent=indent) == DOCUMENT


@pytest.mark.parametrize("indent", [None, 1])
def test_the_order_of_keys_does_not_matter(indent: int | None) -> None:
    reordered = dict(reversed(DOCUMENT.items()))
    assert seal(DOCUMENT, where="x", indent=indent) == seal(reordered, where="x", indent=indent)


def test_every_bit_counts() -> None:
    data = seal(DOCUMENT, where="x", indent=1)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(ArtifactError):
                unseal(bytes(damaged), where="x", indent=1)


@pytest.mark.parametrize("spell", [
    lambda data: data + b"\n", lambda data: data[:-1], lambda data: b" " + data,
    lambda data: json.dumps(json.loads(data), sort_keys=True).encode() + b"\n",
], ids=["a newline more", "a newline less", "a space", "other separators"])
def test_the_same_document_spelled_otherwise_is_refused(spell) -> None:
    with pytest.raises(ArtifactError, match="not as Assay writes them"):
        unseal(spell(seal({"a": 1, "b": 2}, where="x")), where="x")


def test_a_seal_from_another_document_is_refused() -> None:
    one, other = json.loads(seal({"a": 1}, where="x")), json.loads(seal({"a": 2}, where="x"))
    with pytest.raises(ArtifactError, match="its content hashes to"):
        unseal(canonical_json({**one, "self": other["self"]}, where="x"), where="x")


@pytest.mark.parametrize("data", [
    b'{"a":1,"a":1}', b'{"a":NaN}', b'{"a":-Infinity}', b"[" * 10_000, b"\xff", b"", b'{"a":' + b"9" * 5000 + b"}",
], ids=["twice", "nan", "infinity", "deep", "not utf-8", "empty", "endless number"])
def test_what_is_not_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="not JSON"):
        parse_json(data, where="x")


def test_numbers_that_are_not_finite_are_refused_with_a_way_out() -> None:
    with pytest.raises(UsageError, match="on purpose"):
        seal({"loss": float("nan")}, where="x")
    with pytest.raises(ArtifactError):
        unseal(b'{"a":1e999,"self":"0"}\n', where="x")


def test_the_key_of_the_seal_is_taken() -> None:
    with pytest.raises(UsageError, match="'self'"):
        seal({"self": 1}, where="x")

"""The strict reader: what is JSON is read as json reads it, and whatever else a file holds is one sentence that names it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from assay.errors import ArtifactError, DataError
from assay.strict_json import (
    DEPTH_LIMIT,
    NATURAL,
    parse_json,
    parse_yaml,
    read_json,
    read_json_if_there,
    read_json_lines,
    require_shape,
)
from tests.fuzz import byte_mutants

DOCUMENT: dict[str, Any] = {
    "format": "assay/1", "none": None, "yes": True, "n": 12, "x": -1.5e-3, "text": "é \U0001f600 \\ \"", "deep": [[{"a": [1, 2, {}]}], []],
    "files": {"a.bin": {"bytes": 3, "sha256": "0" * 64}}, "model_max_length": 1000000000000000019884624838656}


@pytest.mark.parametrize(("data", "reason"), [
    (b'{"a":1,"a":1}', "'a' stands twice"), (b'[{"b":{"a":1,"a":1}}]', "'a' stands twice"), (b"NaN", "NaN is not JSON"),
    (b"[-Infinity]", "-Infinity is not JSON"), (b"[1e999]", "too large"), (b"9" * 41, "41 digits"), (b"9" * 5000, "5000 digits"),
    (b"[" * 100_000, "nested too deeply"), (b'{"a":' * (DEPTH_LIMIT + 1) + b"1" + b"}" * (DEPTH_LIMIT + 1), "nested too deeply"),
    (b'"\\ud800"', "half of a surrogate pair"), (b"\xff", "codec can't decode"), (b"\xef\xbb\xbf{}", "byte order mark"),
    (b"", "Expecting value"), (b"{} {}", "Extra data")])
def test_what_is_not_strict_json_is_refused_by_name(data: bytes, reason: str):
    with pytest.raises(ArtifactError, match=r"^x\.json: not JSON") as refused:
        parse_json(data, where="x.json")
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 300


def test_what_is_json_is_read_as_json_reads_it():
    texts = (json.dumps(DOCUMENT), json.dumps(DOCUMENT, ensure_ascii=False, indent=1), '"\\ud83d\\ude00"', '"' + "9" * 100 + '"', "1e300")
    for text in texts:
        assert parse_json(text.encode(), where="x") == parse_json(text, where="x") == json.loads(text)
    nested = b"[" * DEPTH_LIMIT + b"]" * DEPTH_LIMIT
    assert parse_json(nested, where="x") == json.loads(nested)


def test_no_mutant_of_a_document_does_more_than_be_read_or_be_refused():
    read, refusals = 0, []
    for mutant in byte_mutants(json.dumps(DOCUMENT).encode(), 2000, seed=1):
        try:
            assert parse_json(mutant, where="x") == json.loads(mutant)
            read += 1
        except ArtifactError as error:
            refusals.append(str(error))
    assert read > 100
    assert len(refusals) > 1000
    assert all(refusal.startswith("x: not JSON") for refusal in refusals)


def test_no_mutant_of_yaml_does_more_than_be_read_or_be_refused():
    document = b"model: a/b\nsteps: 12\nlist: [1, 2.5, x]\nnested: {a: {b: null}}\nwhen: 2026-01-01\ntext: |\n  a\n  b\n"
    refusals = []
    for mutant in byte_mutants(document, 600, seed=2):
        try:
            str(parse_yaml(mutant, where="x"))
        except ArtifactError as error:
            refusals.append(str(error))
    assert 100 < len(refusals) < 600
    assert all(refusal.startswith("x: not YAML: ") for refusal in refusals)


LAUGHS = b"a: &a [1,1,1,1,1,1,1,1,1,1]\n" + b"".join(
    b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 10)) for i in range(8))


@pytest.mark.parametrize(("data", "reason"), [
    (b"a: 1\na: 2", "'a' stands twice"), (b"&a [*a]", "nested too deeply"), (b"[" * 5000, "nested too deeply"), (b"!!bool x", "x"),
    (b"!!python/object:os.system {}", "could not determine a constructor"), (b"2001-99-99", "month"), (b"!!timestamp x", ""),
    (LAUGHS, "once its aliases are followed")])
def test_yaml_that_is_none_or_means_harm_is_refused(data: bytes, reason: str):
    with pytest.raises(DataError, match=f"^x: not YAML: .*{reason}"):
        parse_yaml(data, where="x", error=DataError)


def test_a_small_alias_is_followed():
    assert parse_yaml(b"a: &x [1]\nb: *x", where="x") == {"a": [1], "b": [1]}


@pytest.mark.parametrize(("value", "shape", "reason"), [
    ({"a": 1}, {"a": str}, "a is 1; expected text"), ({}, {"a": int}, "the document has no 'a'"),
    ([], dict, "expected a JSON object, found list"),
    ({"a": {"b": True}}, {"a": {"b": int}}, "a.b is True; expected a whole number"), ([1, "x"], [int], r"\[1\] is 'x'"),
    ({"f": {"x": {"bytes": -1}}}, {"f": {str: {"bytes": NATURAL}}}, r"f\['x'\].bytes is -1; expected a whole number from 0"),
    (1.0, int, "expected a whole number, found 1.0"),
    (5, (str, None), "expected text or null, found 5"), ({"a": [1]}, {"a?": [str]}, "a.0. is 1")])
def test_a_shape_that_is_not_met_is_named_by_its_place(value: Any, shape: Any, reason: str):
    with pytest.raises(ArtifactError, match=f"^x: {reason}"):
        require_shape(value, shape, where="x")


@pytest.mark.parametrize(("value", "shape"), [
    (1, float), (None, (str, None)), ({"a": 1, "b": 2}, {"a": int}), ({}, {"a?": int}), ([], [int]), ({"x": 1}, {str: int}), (3, range(4)),
    (object(), object)])
def test_a_shape_that_is_met_says_nothing(value: Any, shape: Any):
    require_shape(value, shape, where="x")


def test_files_are_plain_bounded_and_named(tmp_path: Path):
    file = tmp_path / "x.json"
    assert read_json_if_there(file) is None
    file.write_text('{"a": 1}')
    assert read_json(file) == read_json_if_there(file) == {"a": 1}
    with pytest.raises(ArtifactError, match=r"x\.json: 8 bytes, and at most 7"):
        read_json(file, limit=7)
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(DataError, match="expected a file"):
            read_json(odd, error=DataError)
    with pytest.raises(ArtifactError, match=r"none\.json: cannot be read: No such file"):
        read_json(tmp_path / "none.json")


def test_lines_are_read_as_far_as_they_are_whole(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    assert read_json_lines(file) == []
    file.write_text('{"a": 1}\n{"a": 2}\n{"a": ')
    assert read_json_lines(file) == [{"a": 1}, {"a": 2}]
    file.write_text('{"a": 1}\n[]\n')
    with pytest.raises(ArtifactError, match=r"x\.jsonl:2: expected a JSON object, found list"):
        read_json_lines(file)

"""JSON Schema as a reward judges by it: the standard's cases that were once judged wrong, and what is refused."""

import socket

import pytest

from assay.errors import DataError
from assay.reward.json_schema import check_schema, schema_fault
from assay.reward.json_schema_formats import as_uri, has_sound_address, is_hostname, is_plain_hostname
from assay.reward.reward_functions import parse_rewards
from assay.reward.worker_pool import RewardItem, RewardWorkers

DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
TREE = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}, "inside": {"items": {"$ref": "#"}}}}


@pytest.mark.parametrize(("schema", "fits", "breaks"), [  # after the official suite
    ({"const": [False]}, [[False]], [[0], [0.0]]), ({"const": {"a": True}}, [{"a": True}], [{"a": 1}, {"a": 1.0}]),
    ({"enum": [[1]]}, [[1], [1.0]], [[True]]), ({"enum": [{"foo": False}]}, [{"foo": False}], [{"foo": 0}]),
    ({"uniqueItems": True}, [[1, True], [[1], [True]], [{"a": 0}, {"a": False}]], [[1, 1.0], [[1], [1.0]]]),
    ({"type": "integer"}, [1.0, -3], [True, 1.5, "1"]), ({"multipleOf": 0.01}, [0.0075 * 4], [0.00751]),
    ({"prefixItems": [{"type": "integer"}], "items": False}, [[], [1]], [["a"], [1, 2]]),
    ({"$schema": DRAFT_7, "items": [{"type": "integer"}], "additionalItems": False}, [[1]], [[1, 2]]),
    ({"contains": {"const": 5}, "minContains": 2}, [[5, 5]], [[5], []]), ({"maxLength": 2}, ["💩💩"], ["💩💩💩"]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5], [3, 1.5]), ({"not": {"type": "null"}}, [0], [None]),
    ({"if": {"minimum": 0}, "then": {"multipleOf": 2}, "else": {"const": -1}}, [4, -1], [3, -2]),
    ({"patternProperties": {"^f": {"type": "null"}}, "additionalProperties": False}, [{"foo": None}], [{"foo": 1}, {"bar": None}]),
    ({"properties": {"__proto__": {"type": "number"}, "toString": {"maxLength": 1}}}, [{"__proto__": 1}, {"toString": "a"}],
     [{"__proto__": "x"}, {"toString": "ab"}]),
    ({"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}, [[1]], [["x"]]),
    (TREE, [{"name": "a", "inside": [{"name": "b"}]}], [{"name": "a", "inside": [{}]}]), (True, [1], []), (False, [], [1, None]),
    ({"format": "date"}, ["2024-02-29", 7], ["2023-02-29"]), ({"format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1"]),
    ({"$schema": DRAFT_2019, "additionalProperties": {"type": "integer"}, "unevaluatedProperties": False}, [{"a": 1}], [{"a": "x"}]),
    ({"$schema": DRAFT_7, "contentMediaType": "application/json"}, ['{"a": 1}', 5], ["{", ""]),
    ({"$schema": DRAFT_7, "contentMediaType": "application/json", "contentEncoding": "base64"}, ["e30="], ["e30", "ew==", "{}"]),
    ({"format": "regex"}, ["(?<=a+)b", "a"], ["(?<=a", "("]), ({"format": "idn-hostname"}, ["אב.com"], ["0a.אב", "אב."]),
    ({"multipleOf": 0.5}, [1.5], [float("inf")]), ({"nullable": True, "x-order": 3}, [1], [])])
def test_values_fit_or_break_a_schema_as_the_standard_says(schema: object, fits: list[object], breaks: list[object]):
    assert [schema_fault(value, schema) for value in fits] == [None] * len(fits)
    assert all(schema_fault(value, schema) for value in breaks)


def test_hosts_and_addresses_are_those_of_their_standard():  # formats that jsonschema checks only with its extras installed
    assert [name for name in ("a-b.org", "ab--cd.org", "xn--", "-a") if is_hostname(name)] == ["a-b.org"]
    assert [name for name in ("a-b.org", "ab--cd.org", "-a") if is_plain_hostname(name)] == ["a-b.org", "ab--cd.org"]
    links = ["http://[::1]/a", "http://[::ffff:1.2.3.4]", "http://[::ffff:01.2.3.4]", "//[::g]", "a/b"]
    assert [link for link in links if not has_sound_address(link)] == ["http://[::ffff:01.2.3.4]"]
    assert [as_uri(link) for link in ("http://ø/𐌀", "a?\ue000")] == ["http://%C3%B8/%F0%90%8C%80", "a?%EE%80%80"]
    assert as_uri("a\ue000") is as_uri("\ufffe") is None


def test_a_fault_says_where():
    schema = {"properties": {"a": {"items": {"type": "integer"}}}}
    assert schema_fault({"a": [1, "x"]}, schema, "the answer") == "the answer.a[1]: 'x' is not of type 'integer'"
    assert len(schema_fault({"a": ["x" * 10**6]}, schema) or "") <= 300


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "int"}, "no JSON Schema"), ({"required": "n"}, "required is no"), ({"pattern": "("}, "not a 'regex'"), (5, "object"),
    ({"$ref": "https://example.com/a.json"}, "nothing is fetched"), ({"items": {"$ref": "#/$defs/none"}}, "not in it"),
    ({"$schema": "https://example.com/mine"}, "dialect"), ({"$schema": 3}, "dialect"), ({"format": "postcode"}, "nothing checks here"),
    ({"properties": {"a": {"requird": ["b"]}}}, "required")])
def test_a_schema_that_cannot_be_enforced_is_refused(schema: object, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("it went to the network"))
    with pytest.raises(DataError, match=words):
        check_schema(schema)


def test_a_document_nested_too_deeply_is_its_own_fault_and_a_schema_without_end_is_not():
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    assert "deep" in (schema_fault(deep, {"items": {"$ref": "#"}}) or "")
    with pytest.raises(DataError, match="without end"):
        schema_fault(1, {"$ref": "#"})


def test_a_pattern_that_takes_forever_is_an_error_row_after_the_time_out():
    slow, quick = {"pattern": "^(a+)+$"}, {"pattern": "^a"}
    with RewardWorkers(parse_rewards(["json_schema"]), count=1, seconds=3.0) as workers:
        first, second = workers.score([RewardItem("", f'"{"a" * 40}!"', {"schema": schema}) for schema in (slow, quick)])
    assert first.value is None
    assert "more than 3 s" in str(first.error)
    assert second.value == 1


@pytest.mark.parametrize(("pattern", "fits", "not_fits"), [
    (r"^\d+$", ["7", "42"], ["٧", "7\n", "x"]), (r"^\w$", ["a", "_"], ["é", "-"]), (r"^\W$", ["é", "-"], ["a"]),
    (r"^[\D]$", ["٧", "x"], ["7"]),
    (r"^\s$", [" ", "\ufeff", "\u00a0"], ["\x1c", "x"]), (r"^[\s\S]+$", ["a\n b\ufeff"], [""]), (r"^a$", ["a"], ["a\n"]),
    (r"^(?<letter>[ab])\k<letter>$", ["aa", "bb"], ["ab"]), (r"^\cA$", ["\x01"], ["A", "cA"]), (r"^[^]$", ["\n", "x"], [""]),
    (r"^[]$", [], ["", "x"]),
    (r"^[[&~|]+$", ["[&~|"], ["x"]), (r"^\u{1F600}$", ["😀"], ["u"]), (r"(?<=\$)\d", ["$5"], ["5"]), (r"^[$]\/\-$", ["$/-"], ["/-"]),
])
def test_a_pattern_means_what_ecmascript_means_by_it(pattern, fits, not_fits):
    for schema, wrapped in (({"pattern": pattern}, lambda text: text),
                            ({"patternProperties": {pattern: {}}, "additionalProperties": False}, lambda text: {text: 1})):
        assert [text for text in fits if schema_fault(wrapped(text), schema)] == []
        assert [text for text in not_fits if not schema_fault(wrapped(text), schema)] == []


@pytest.mark.parametrize("pattern", [r"\p{L}", r"\Aa", r"a\Z", "(?P<x>a)", "(?i)a", "(?#a)b", "(?<=a+)b", "(", "\\"])
def test_a_pattern_that_python_has_no_equal_of_is_refused(pattern):
    for schema in ({"pattern": pattern}, {"patternProperties": {pattern: {}}}):
        with pytest.raises(DataError, match=r"pattern|no JSON Schema"):
            check_schema(schema)


@pytest.mark.parametrize(("format", "fits", "not_fits"), [
    ("email", ["a.b@x.org", '"a b"@x.org', "a@[127.0.0.1]", "a@[IPv6:::1]"],
     ["a", "@x.org", "a@", ".a@x.org", "a..b@x.org", "a b@x.org", "a@x@y.org"]),
    ("uuid", ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638_"]),
    ("date", ["2026-01-31"], ["2026-02-30", "2026-01-31\n", "２０26-01-31"]), ("ipv4", ["10.0.0.1"], ["10.0.0.256", "10.0.0.1\n"]),
])
def test_formats_are_checked_to_the_last_character(format, fits, not_fits):
    assert [text for text in fits if schema_fault(text, {"format": format})] == []
    assert [text for text in not_fits if not schema_fault(text, {"format": format})] == []


def test_a_keyword_that_checks_nothing_in_its_dialect_is_refused():
    with pytest.raises(DataError, match="dependentRequired"):
        check_schema({"dependencies": {"a": ["b"]}})
    assert schema_fault({"a": 1}, {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}})

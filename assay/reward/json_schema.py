"""JSON Schema validation by the `jsonschema` library: offline, formats checked, and the schema itself checked first.

Draft 2020-12, or the dialect that the schema names in `$schema`. What could not be enforced here is refused, never skipped: a
reference to what is not in the schema, a format that nothing checks, a keyword that is another one misspelled.
"""

import base64
import functools
import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from assay.errors import DataError
from assay.reward.ecma_pattern import python_pattern
from assay.reward.json_schema_formats import format_checker

ANNOTATIONS = {"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "$defs", "definitions",
               "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding",
               "contentMediaType", "contentSchema", "then", "else", "minContains", "maxContains"}  # no checks of their own
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
DEEPEST = 32  # levels of a document that a schema that refers to itself can follow at least
LONGEST_FAULT = 300  # characters; the library quotes the value that is wrong, which may be long


def check_schema(schema: Any) -> None:
    """A DataError where the schema is none, or could not be enforced here."""
    _validator(json.dumps(schema))


def schema_fault(value: Any, schema: Any, at: str = "the document") -> str | None:
    """The first way in which a value breaks the schema, in words, or None."""
    validator = _validator(json.dumps(schema))
    try:
        error = next(validator.iter_errors(value), None)
    except OverflowError:
        return f"{at} has a number that is too large to be checked"
    except RecursionError:
        if _nested_deeper(value, DEEPEST):
            return f"{at} is nested more than {DEEPEST} levels deep"
        raise DataError("the schema refers to itself without end, so nothing can be checked by it") from None
    return None if error is None else f"{at}{error.json_path[1:]}: {error.message}"[:LONGEST_FAULT]


@functools.lru_cache(maxsize=64)
def _validator(text: str) -> Any:
    """A validator of the schema, which was checked against its dialect; nothing is fetched."""
    from jsonschema.exceptions import SchemaError
    from jsonschema_specifications import REGISTRY

    schema = json.loads(text)
    dialect = _dialect(schema)
    try:
        dialect.check_schema(schema, format_checker=format_checker(dialect))
        _check_parts(schema, dialect)
    except SchemaError as error:
        raise DataError(f"the schema{error.json_path[1:]} is no JSON Schema: {error.message[:LONGEST_FAULT]}") from None
    except RecursionError:
        raise DataError("the schema is nested too deeply to be checked") from None
    return _with_content(dialect)(schema, registry=REGISTRY, format_checker=format_checker(dialect))


def _with_content(dialect: Any) -> Any:
    """Draft 7 lets a validator look into strings that hold base64 or JSON; later drafts call these words annotations."""
    from jsonschema import Draft7Validator
    from jsonschema.validators import extend

    checks = {"contentEncoding": _check_encoding, "contentMediaType": _check_media_type}
    return extend(dialect, checks) if dialect is Draft7Validator else dialect


def _check_encoding(validator: Any, encoding: str, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    from jsonschema import ValidationError

    if encoding == "base64" and isinstance(value, str) and _decoded(value) is None:
        yield ValidationError(f"{value!r} is no base64")


def _check_media_type(validator: Any, media_type: str, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    from jsonschema import ValidationError

    if media_type != "application/json" or not isinstance(value, str):
        return
    text = _decoded(value) if schema.get("contentEncoding") == "base64" else value.encode()
    try:
        json.loads(b"null" if text is None else text)  # what cannot be decoded is the encoding's fault
    except ValueError:
        yield ValidationError(f"{value!r} holds no JSON")


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def _dialect(schema: Any) -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    if not isinstance(schema, Mapping) or "$schema" not in schema:
        return Draft202012Validator
    named = schema["$schema"]
    found = validator_for({"$schema": named}, default=None) if isinstance(named, str) else None
    if found is None:
        raise DataError(f"the schema is written in {named!r}, a dialect that is not known here; drafts 3, 4, 6, 7, 2019-09 and 2020-12 are")
    return found


def _check_parts(schema: Any, dialect: Any) -> None:
    """Every part at every depth: references lead somewhere inside, formats have a check, keywords are no others misspelled. Its patterns,
    which are ECMAScript's, become Python's."""
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    root = specification_with(dialect.META_SCHEMA.get("$schema", dialect.META_SCHEMA.get("id", ""))).create_resource(schema)
    waiting = [(root, REGISTRY.resolver_with_root(root))]
    while waiting:
        part, resolver = waiting.pop()
        if isinstance(part.contents, Mapping):
            _check_words(part.contents, dialect)
            if isinstance(part.contents.get("extends"), Mapping) and "extends" in dialect.VALIDATORS:
                raise DataError("the schema has draft 3's `extends` with one schema, whose references cannot be followed here; give a list "
                                "of one, or allOf in a later draft")
            for reference in (part.contents[key] for key in REFERENCES if isinstance(part.contents.get(key), str)):
                try:
                    resolver.lookup(reference)
                except Unresolvable:
                    raise DataError(f"the schema refers to {reference!r}, which is not in it, and nothing is fetched; put what it means "
                                    "under $defs and refer to that") from None
        waiting += [(inner, resolver.in_subresource(inner)) for inner in part.subresources()]
        if isinstance(part.contents, dict):
            _translate_patterns(part.contents)
            if "additionalProperties" in part.contents:  # beside it nothing is left unevaluated; the library forgets that in 2019-09
                part.contents.pop("unevaluatedProperties", None)


def _translate_patterns(part: dict[str, Any]) -> None:
    if isinstance(part.get("pattern"), str):
        part["pattern"] = python_pattern(part["pattern"])
    if isinstance(part.get("patternProperties"), dict):
        part["patternProperties"] = {python_pattern(name): inner for name, inner in part["patternProperties"].items()}


def _check_words(part: Mapping[str, Any], dialect: Any) -> None:
    known = ANNOTATIONS | set(dialect.VALIDATORS)
    for keyword in part.keys() - known:  # others are annotations, as the standard has it
        if meant := get_close_matches(keyword, known, 1, cutoff=0.85):
            raise DataError(f"the schema has the keyword {keyword!r}, which checks nothing; did you mean {meant[0]!r}?")
    if "dependencies" in part and "dependencies" not in dialect.VALIDATORS:
        raise DataError("the schema has the keyword 'dependencies', which checks nothing in its dialect; say dependentRequired or "
                        "dependentSchemas")
    if isinstance(part.get("format"), str) and part["format"] not in dialect.FORMAT_CHECKER.checkers:
        raise DataError(f"the schema asks for format {part['format']!r}, which nothing checks here; pip install "
                        "'jsonschema[format-nongpl]' if it is a standard one, or write it as a pattern")


def _nested_deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        level = [inner for each in level if isinstance(each, list | dict) for inner in (each.values() if isinstance(each, dict) else each)]
    return bool(level)

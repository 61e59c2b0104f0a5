"""JSON Schema, the part that rewards and judges need; a keyword it does not know is refused, never skipped."""

import json
import re
from collections.abc import Mapping
from typing import Any

from assay.errors import DataError

Json = Any
TYPES: dict[str, type | tuple[type, ...]] = {"object": dict, "array": list, "string": str, "number": (int, float), "integer": int,
                                             "boolean": bool, "null": type(None)}
_KNOWN = {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "minimum", "maximum", "minLength",
         "maxLength", "minItems", "maxItems", "pattern"}
_SILENT = {"title", "description", "$schema"}  # words for people


def parse_strict_json(text: str) -> Json:
    """Strict JSON, or a ValueError: NaN and Infinity are not in it, and no key stands twice in one object."""
    return json.loads(text, parse_constant=_refused_constant, object_pairs_hook=_object)


def check_schema(schema: Json, at: str = "the schema") -> None:
    """Every keyword, at every depth, is one that `fault` enforces."""
    if not isinstance(schema, Mapping):
        raise DataError(f"{at} is {type(schema).__name__}; expected an object")
    unknown = sorted(schema.keys() - _KNOWN - _SILENT)
    if unknown:
        raise DataError(f"{at} uses {', '.join(unknown)}, which is not enforced here; known: {', '.join(sorted(_KNOWN))}")
    for name in _names(schema):
        if name not in TYPES:
            raise DataError(f"{at} asks for type {name!r}; expected one of {', '.join(TYPES)}")
    if not isinstance(schema.get("additionalProperties", True), bool):
        raise DataError(f"{at}: additionalProperties must be true or false here")
    within = [*schema.get("properties", {}).items(), *(("anyOf", each) for each in schema.get("anyOf", ()))]
    for key, inner in [*within, *([("items", schema["items"])] if "items" in schema else [])]:
        check_schema(inner, f"{at}.{key}")


def schema_fault(value: Json, schema: Mapping[str, Any], at: str = "the document") -> str | None:
    """The first way in which a value breaks a checked schema, in words, or None."""
    if "type" in schema and not any(_is(value, name) for name in _names(schema)):
        return f"{at} is {_kind(value)}; expected {' or '.join(_names(schema))}"
    if "enum" in schema and not any(_same(value, each) for each in schema["enum"]):
        return f"{at} is not one of {json.dumps(schema['enum'])}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{at} is not {json.dumps(schema['const'])}"
    if "anyOf" in schema and all(schema_fault(value, each) for each in schema["anyOf"]):
        return f"{at} fits none of {len(schema['anyOf'])} alternatives"
    if isinstance(value, dict):
        return _fault_in_object(value, schema, at)
    if isinstance(value, list):
        return _outside(len(value), schema, "Items", f"the length of {at}") or _first(
            schema_fault(each, schema.get("items", {}), f"{at}[{i}]") for i, each in enumerate(value))
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"], value):
            return f"{at} does not match {schema['pattern']!r}"
        return _outside(len(value), schema, "Length", f"the length of {at}")
    return _outside(value, schema, "imum", at) if _is(value, "number") else None


def _fault_in_object(value: dict[str, Any], schema: Mapping[str, Any], at: str) -> str | None:
    properties = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            return f"{at} lacks {key!r}"
    strangers = [key for key in value if key not in properties]
    if strangers and schema.get("additionalProperties", True) is False:
        return f"{at} has {strangers[0]!r}, which is not in the schema"
    return _first(schema_fault(value[key], inner, f"{at}.{key}") for key, inner in properties.items() if key in value)


def _first(faults: Any) -> str | None:
    return next((found for found in faults if found), None)


def _outside(number: float, schema: Mapping[str, Any], what: str, at: str) -> str | None:
    low, high = schema.get(f"min{what}", number), schema.get(f"max{what}", number)
    return None if low <= number <= high else f"{at} is {number}; expected {low} to {high}"


def _names(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("type", [])
    return [names] if isinstance(names, str) else names


def _is(value: Json, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES[name]) or (name == "integer" and isinstance(value, float) and value.is_integer())


def _same(value: Json, other: Json) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _kind(value: Json) -> str:
    return next(name for name in ("boolean", "null", "object", "array", "string", "number") if _is(value, name))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return made


def _refused_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")

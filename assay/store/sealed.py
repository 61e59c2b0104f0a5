"""Sealed JSON: one canonical spelling, and a field `self` that holds the sha256 of all the rest.

A flipped byte anywhere breaks the JSON, leaves the canonical spelling, or disagrees with `self`; each is refused.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any, NoReturn

from assay.errors import ArtifactError, UsageError

SELF = "self"


def seal(document: dict[str, Any], *, where: str, indent: int | None = None) -> bytes:
    """The canonical bytes of `document` with its own sha256 in `self`."""
    if SELF in document:
        raise UsageError(f"{where}: the key {SELF!r} is taken by the document's own sha256; use another name")
    digest = hashlib.sha256(canonical_json(document, where=where, indent=indent)).hexdigest()
    return canonical_json({**document, SELF: digest}, where=where, indent=indent)


def unseal(data: bytes, *, where: str, indent: int | None = None) -> dict[str, Any]:
    """What was sealed, without `self`; ArtifactError if a single byte is not what `seal` wrote."""
    document = parse_json(data, where=where)
    if not isinstance(document, dict):
        raise ArtifactError(f"{where}: expected a JSON object, found {type(document).__name__}")
    if not spelled_canonically(data, document, indent):
        raise ArtifactError(f"{where}: the bytes are not as Assay writes them: edited or damaged; restore the original")
    claimed = document.pop(SELF, None)
    actual = hashlib.sha256(canonical_json(document, where=where, indent=indent)).hexdigest()
    if claimed != actual:
        raise ArtifactError(f"{where}: its content hashes to {actual}, but it says {claimed}: edited or damaged; "
                            "restore the original")
    return document


def canonical_json(document: Any, *, where: str, indent: int | None = None) -> bytes:
    """Sorted keys, ASCII, no NaN, a newline at the end: the same document gives the same bytes on every machine."""
    separators = (",", ":") if indent is None else (",", ": ")
    try:
        text = json.dumps(document, sort_keys=True, allow_nan=False, indent=indent, separators=separators)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: cannot be written as JSON: {error}; a number that is not finite must be written on "
                         'purpose, as text such as "nan"') from None
    return text.encode("ascii") + b"\n"


def spelled_canonically(data: bytes, document: Any, indent: int | None) -> bool:
    try:
        return canonical_json(document, where="", indent=indent) == data
    except UsageError:  # 1e999 parses to infinity, which has no canonical spelling
        return False


def parse_json(data: bytes, *, where: str, parse_int: Callable[[str], Any] | None = None,
          parse_float: Callable[[str], Any] | None = None) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, no NaN; every way in which hostile bytes fail is an ArtifactError."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant,
                          parse_int=parse_int, parse_float=parse_float)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: not valid JSON: {_short(error)}; damaged, or not what its name says") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} appears twice")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _short(error: Exception) -> str:
    """The reason without the offending document, which a UnicodeDecodeError or a long key would repeat in full."""
    return (str(error) or type(error).__name__)[:200]

"""Sealed JSON: one canonical spelling, and a field `self` that holds the sha256 of all the rest.

A flipped byte anywhere breaks the JSON, leaves the canonical spelling, or disagrees with `self`; each is refused.
"""

import hashlib
import json
from typing import Any

from assay.errors import ArtifactError, UsageError
from assay.strict_json import parse_json

SELF = "self"


def seal(document: dict[str, Any], *, where: str, indent: int | None = None) -> bytes:
    """The canonical bytes of `document` with its own sha256 in `self`."""
    if SELF in document:
        raise UsageError(f"{where}: the key {SELF!r} is taken by the document's own sha256; use another name")
    digest = hashlib.sha256(canonical_json(document, where=where, indent=indent)).hexdigest()
    return canonical_json({**document, SELF: digest}, where=where, indent=indent)


def unseal(data: bytes, *, where: str, indent: int | None = None) -> dict[str, Any]:
    """The sealed content, without `self`; ArtifactError if a single byte is not what `seal` wrote."""
    document = parse_json(data, where=where, shape=dict, surrogates=True)
    if not spelled_canonically(data, document, indent):
        raise ArtifactError(f"{where}: the bytes are not as Assay writes them: edited or damaged; restore the original")
    claimed = document.pop(SELF, None)
    actual = hashlib.sha256(canonical_json(document, where=where, indent=indent)).hexdigest()
    if claimed != actual:
        raise ArtifactError(f"{where}: its content hashes to {actual}, but it says {claimed}: edited or damaged; "
                            "restore the original")
    return document


def canonical_json(document: Any, *, where: str, indent: int | None = None) -> bytes:
    """Canonical JSON: sorted keys, ASCII, no NaN, a newline at the end: the same document gives the same bytes on every machine."""
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

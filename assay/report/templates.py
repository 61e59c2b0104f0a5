"""Report templates: jinja2 with autoescape, so that every text of a run stays text; what cannot be seen in it is written out."""

import re
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")  # controls, and what reorders text


@cache
def templates() -> jinja2.Environment:
    """The files of templates/. A name that a template uses and nobody gave is an error."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("assay.report"), autoescape=True, undefined=jinja2.StrictUndefined,
                                     finalize=visible, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cut"] = cut
    return environment


def visible(value: Any) -> str:
    """Text with control characters, lone surrogates and marks that turn its direction written out; None as nothing, markup as it is."""
    if value is None or isinstance(value, Markup):
        return value or ""
    return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", str(value)).encode("utf-8", "backslashreplace").decode()


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} characters more)"

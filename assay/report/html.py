"""Escaped markup: every text is escaped, and only `tag` makes markup."""

import re
from collections.abc import Iterable
from typing import Any

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")  # controls, and what reorders text
ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})
VOID = {"br", "meta", "hr", "img"}


class Html(str):
    """Markup, safe as it is. Everything else that stands in a tag is text."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """`class_` is class, `data_x` is data-x; an attribute that is None or False is left out."""
    given = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None and value is not False)
    if name in VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: Any) -> Html:
    """Markup as it is, lists one after the other, None as nothing, anything else as text."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, list | tuple):
            parts.append(joined(*child))
        elif child is not None:
            parts.append(child if isinstance(child, Html) else escaped(str(child)))
    return Html("".join(parts))


def escaped(text: str) -> Html:
    """What cannot be seen is written out: a control character, a lone surrogate, a mark that turns the direction of text."""
    visible = _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return Html(visible.encode("utf-8", "backslashreplace").decode().translate(ENTITIES))


def table(head: list[Any], rows: list[list[Any]], class_: str | None = None) -> Html:
    """In a box of its own, which scrolls where the page is too narrow."""
    body = [tag("tr", [cell if isinstance(cell, Html) and cell.startswith("<td") else tag("td", cell) for cell in row]) for row in rows]
    return tag("div", tag("table", tag("thead", tag("tr", [tag("th", name, scope="col") for name in head])), tag("tbody", body)),
               class_=f"scroll {class_}" if class_ else "scroll", tabindex="0", role="group")


def section(anchor: str, title: str, *children: Any) -> Html:
    return tag("section", tag("h2", title), *children, id=anchor)


def folded(summary: Any, *children: Any, open_: bool = False) -> Html:
    return tag("details", tag("summary", summary), *children, open=open_)


def lead(*words: Any) -> Html:
    """What a section shows, in a sentence."""
    return tag("p", *words, class_="lead")


def missing(words: str) -> Html:
    """Said in the place of what is not on record."""
    return tag("p", words, class_="missing")


def remarks(sentences: Iterable[str]) -> Html:
    return joined([tag("p", sentence, class_="remark") for sentence in sentences])


def badge(outcome: str) -> Html:
    """The word says it; the colour only helps to find it."""
    return tag("span", outcome, class_=f"badge {outcome.lower()}")


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} characters more)"


def _attribute(key: str, value: Any) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'

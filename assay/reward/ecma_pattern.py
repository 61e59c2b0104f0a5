"""ECMAScript patterns in Python's regular expressions: JSON Schema means the former, and they differ in silence.

In ECMAScript \\d and \\w are ASCII, \\s has other members, $ does not match before a last line break, groups are named (?<name>…). What has
no equal in Python (\\p{…}, variable lookbehind) and what is no ECMAScript (\\A, (?P<…>), (?i)) is refused.
"""

import re
from functools import lru_cache

from assay.errors import DataError

_SPACES = [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F),
           (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_SETS = {"d": [(48, 57)], "w": [(48, 57), (65, 90), (95, 95), (97, 122)], "s": _SPACES}
_GROUPS = ("(?:", "(?=", "(?!", "(?<=", "(?<!")
_PIECE = re.compile(r"\\c[A-Za-z]|\\u\{[0-9A-Fa-f]+\}|\\k<\w+>|\\.|\(\?<(?![=!])|\(\?.{0,2}|\[\^?\]?|.", re.DOTALL)


@lru_cache(maxsize=1024)
def python_pattern(pattern: str) -> str:
    """Pattern translated for Python's `re`; a DataError where there is none."""
    return _compiled(_pieces(pattern), pattern)


def is_ecma_pattern(pattern: str) -> bool:
    """Whether it is a pattern at all; a lookbehind of any width is one, though only those of a fixed width are one in Python."""
    try:
        _compiled([{"(?<=": "(?=", "(?<!": "(?!"}.get(piece, piece) for piece in _pieces(pattern)], pattern)
    except DataError:
        return False
    return True


def _pieces(pattern: str) -> list[str]:
    written, at, within = [], 0, False
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)[0]  # type: ignore[index]
        piece = piece[0] if within and piece[0] in "([" else piece
        part, piece, within = _translated(piece, within, pattern)
        written.append(part)
        at += len(piece)
    return written


def _compiled(pieces: list[str], pattern: str) -> str:
    found = "".join(pieces)
    try:
        re.compile(found)
    except (re.error, RecursionError, OverflowError) as error:
        raise DataError(f"the pattern {pattern!r} has no equal in Python's regular expressions: {error}") from None
    return found


def _translated(piece: str, within: bool, pattern: str) -> tuple[str, str, bool]:
    """Piece of an ECMA pattern in Python, the part of it that was used, and whether a character class is open after it."""
    if piece[0] == "\\":
        return _escape(piece, within, pattern), piece, within
    if within:
        return {"[": r"\[", "&": r"\&", "~": r"\~", "|": r"\|"}.get(piece, piece), piece, piece != "]"
    if piece in ("[]", "[^]"):
        return ("(?!)" if piece == "[]" else r"[\s\S]"), piece, False
    if piece[0] == "[":
        return piece, piece, True
    if piece == "(?<":
        return "(?P<", piece, False
    if piece.startswith("(?"):
        kind = next((group for group in _GROUPS if piece.startswith(group) or group.startswith(piece)), None)
        if kind is None or not piece.startswith(kind):
            raise DataError(f"the pattern {pattern!r} has {piece!r}, which is no ECMAScript")
        return kind, kind, False
    return (r"\Z" if piece == "$" else piece), piece, False


def _escape(piece: str, within: bool, pattern: str) -> str:
    letter = piece[1:2]
    if letter.lower() in _SETS and len(piece) == 2:
        members = _members(_SETS[letter.lower()] if letter.islower() else _others(_SETS[letter.lower()]))
        return members if within else f"[{members}]"
    if letter == "c" and len(piece) == 3:
        return re.escape(chr(ord(piece[2]) % 32))
    if letter == "u" and len(piece) > 2:
        return re.escape(chr(min(int(piece[3:-1], 16), 0x10FFFF)))
    if letter == "k" and len(piece) > 2:
        return f"(?P={piece[3:-1]})"
    if letter == "0":
        return r"\x00"
    if not letter or (letter.isalpha() and letter not in "bBfnrtvxu"):
        raise DataError(f"the pattern {pattern!r} has {piece!r}, which is no ECMAScript, or has no equal in Python's regular expressions")
    return piece if letter.isascii() else letter


def _members(ranges: list[tuple[int, int]]) -> str:
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


def _others(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of all characters that are in none of the given ranges, which are in order."""
    edges = [-1, *(edge for pair in ranges for edge in pair), 0x110000]
    return [(last + 1, first - 1) for last, first in zip(edges[::2], edges[1::2], strict=True) if last + 1 <= first - 1]

"""Formats of JSON Schema, checked by the `jsonschema` library, and where it is too lenient or too strict by rules of our own."""

import copy
import ipaddress
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from assay.reward.ecma_pattern import is_ecma_pattern

ASCII_FORMATS = {"date", "time", "date-time", "uri", "uri-reference", "ipv4", "ip-address", "ipv6", "email", "hostname",
                 "host-name", "duration", "uuid"}
_ATOM, _LABEL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+", r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_CLOCK = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = r"(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})+"
_EXPRESSION = rf"{_VARIABLE}(?:\.{_VARIABLE})*(?:\*|:[1-9][0-9]{{0,3}})?"
_TEMPLATE = rf"(?:[^\x00-\x20\x7f-\x9f\"%<>\\^`{{|}}]|%[0-9A-Fa-f]{{2}}|\{{[+#./;?&=,!@|]?{_EXPRESSION}(?:,{_EXPRESSION})*\}})*"
_WHOLE = {"uri-template": _TEMPLATE, "duration": rf"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
          "uuid": r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
          "relative-json-pointer": r"(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)"}


def format_checker(dialect: Any) -> Any:
    """The dialect's own checker; the formats that it knows stay those that it knows."""
    from jsonschema import Draft3Validator, Draft4Validator, Draft6Validator

    checker = copy.copy(dialect.FORMAT_CHECKER)
    hosts = is_plain_hostname if dialect in (Draft3Validator, Draft4Validator, Draft6Validator) else is_hostname
    checker.checkers = {name: (_checked(name, check, hosts), raises) for name, (check, raises) in checker.checkers.items()}
    for name in {"iri", "iri-reference"} & checker.checkers.keys():
        checker.checkers[name] = (_checked_as_uri(*checker.checkers[name.replace("iri", "uri")]), ())
    return checker


def _checked_as_uri(check: Callable[[Any], bool], raises: Any) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        try:
            return not isinstance(value, str) or ((link := as_uri(value)) is not None and check(link))
        except raises:
            return False
    return fits


def as_uri(iri: str) -> str | None:
    """An internationalised link as a plain one, by RFC 3987's own rule: letters outside ASCII are percent-encoded; None where one is of
    no kind that may stand there."""
    query = iri.find("?")
    letters = [(at, letter) for at, letter in enumerate(iri) if not letter.isascii()]
    if any(not (_is_text(ord(letter)) or (_is_private(ord(letter)) and -1 < query < at)) for at, letter in letters):
        return None
    plain = "".join(letter if letter.isascii() else "".join(f"%{byte:02X}" for byte in letter.encode()) for letter in iri)
    return plain.replace("//[V", "//[v", 1)  # the library knows the version's letter in lower case alone


def _is_text(code: int) -> bool:
    """ucschar: no control, no surrogate, no private use, no noncharacter, no special."""
    plane = 0xA0 <= code <= 0xD7FF or 0xF900 <= code <= 0xFDCF or 0xFDF0 <= code <= 0xFFEF
    return plane or (0x10000 <= code <= 0xEFFFD and code & 0xFFFF <= 0xFFFD and not 0xE0000 <= code < 0xE1000)


def _is_private(code: int) -> bool:
    return 0xE000 <= code <= 0xF8FF or 0xF0000 <= code <= 0xFFFFD or 0x100000 <= code <= 0x10FFFD


def _checked(name: str, check: Callable[[Any], bool], hosts: Callable[[str], bool]) -> Callable[[Any], bool]:
    ours = {"email": is_email, "hostname": hosts, "host-name": hosts, "regex": is_ecma_pattern}.get(name)
    ours = (lambda text: re.fullmatch(_WHOLE[name], text) is not None) if name in _WHOLE else ours
    extra = {"idn-hostname": is_one_direction, "uri": has_sound_address, "uri-reference": has_sound_address}.get(name, lambda text: True)

    def fits(value: Any) -> bool:
        if not isinstance(value, str):
            return True
        if name in ASCII_FORMATS and not (value.isascii() and (value.isprintable() or not value)):
            return False
        if name in ("time", "date-time"):
            value = without_leap_second(value)
        return ours(value) if ours else check(value) and extra(value)
    return fits


def is_email(text: str) -> bool:
    """A mailbox as RFC 5321 has it: words with dots between them or one quoted, and a host or an address in brackets."""
    found = re.fullmatch(rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@(?:\[(?P<address>[^\[\]]+)\]|(?P<host>[^\[\]@]+))", text)
    if not found:
        return False
    return is_hostname(found["host"]) if found["host"] else _is_address(found["address"])


def is_hostname(text: str) -> bool:
    return is_plain_hostname(text) and all(_is_plain_or_punycode(label) for label in text.split("."))


def is_plain_hostname(text: str) -> bool:
    """A host's name as RFC 1123 has it, which knows no internationalised labels."""
    return len(text) <= 253 and all(re.fullmatch(_LABEL, label) for label in text.split("."))


def is_one_direction(text: str) -> bool:
    """Whether a name keeps RFC 5893's rule: where one label is written from right to left, every label keeps it; a name ends in no dot."""
    import idna

    labels = re.split("[.\u3002\uff0e\uff61]", text)
    if not labels[-1]:
        return False
    if all(unicodedata.bidirectional(letter) not in ("R", "AL", "AN") for letter in text):
        return True
    try:
        return all(idna.check_bidi(label, check_ltr=True) for label in labels)
    except idna.IDNAError:
        return False


def has_sound_address(text: str) -> bool:
    """An IPv6 address in brackets is one, its IPv4 part without leading zeros, which are octal to some readers."""
    found = re.search(r"//[^/?#]*\[([0-9A-Fa-f:.]+)\]", text)
    return found is None or _is_address(f"ipv6:{found[1]}")


def without_leap_second(text: str) -> str:
    """23:59:60 of UTC, in any time zone, as the second before, which the library knows."""
    found = re.fullmatch(r"(.*)([0-9]{2}):([0-9]{2}):60((?:\.[0-9]+)?)(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))", text)
    if not found:
        return text
    ahead = (int(found[6]) * 60 + int(found[7])) * (-1 if found[5] == "-" else 1) if found[5] else 0
    last = (int(found[2]) * 60 + int(found[3]) - ahead) % 1440 == 1439
    return text[: found.start(4) - 2] + "59" + text[found.start(4):] if last else text


def _is_address(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text[5:]) if text.lower().startswith("ipv6:") else ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _is_plain_or_punycode(label: str) -> bool:
    """-- in the third place belongs to internationalised labels; these are decoded where the idna library is installed."""
    if label[2:4] != "--":
        return True
    if label[:2].lower() != "xn":
        return False
    try:
        import idna
    except ModuleNotFoundError:
        return True
    try:
        idna.ulabel(label)
    except idna.IDNAError:
        return False
    return True

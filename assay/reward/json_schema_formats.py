"""Formats of JSON Schema, checked by the `jsonschema` library, and where it is too lenient or too strict by rules of our own."""

import copy
import ipaddress
import re
from collections.abc import Callable
from typing import Any

from assay.errors import DataError
from assay.reward.ecma_pattern import python_pattern

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
    checker = copy.copy(dialect.FORMAT_CHECKER)
    checker.checkers = {name: (_checked(name, check), raises) for name, (check, raises) in checker.checkers.items()}
    return checker


def _checked(name: str, check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    ours = {"email": is_email, "hostname": is_hostname, "host-name": is_hostname, "regex": is_pattern}.get(name)
    ours = (lambda text: re.fullmatch(_WHOLE[name], text) is not None) if name in _WHOLE else ours

    def fits(value: Any) -> bool:
        if not isinstance(value, str):
            return True
        if name in ASCII_FORMATS and not (value.isascii() and (value.isprintable() or not value)):
            return False
        if name in ("time", "date-time"):
            value = without_leap_second(value)
        return ours(value) if ours else check(value) and not (name == "idn-hostname" and value.endswith((".", "。", "．", "｡")))
    return fits


def is_email(text: str) -> bool:
    """A mailbox as RFC 5321 has it: words with dots between them or one quoted, and a host or an address in brackets."""
    found = re.fullmatch(rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@(?:\[(?P<address>[^\[\]]+)\]|(?P<host>[^\[\]@]+))", text)
    if not found:
        return False
    return is_hostname(found["host"]) if found["host"] else _is_address(found["address"])


def is_hostname(text: str) -> bool:
    return len(text) <= 253 and all(re.fullmatch(_LABEL, label) and _is_plain_or_punycode(label) for label in text.split("."))


def without_leap_second(text: str) -> str:
    """23:59:60 of UTC, in any time zone, as the second before, which the library knows."""
    found = re.fullmatch(r"(.*)([0-9]{2}):([0-9]{2}):60((?:\.[0-9]+)?)(?:[Zz]|([+-])([0-9]{2}):([0-9]{2}))", text)
    if not found:
        return text
    ahead = (int(found[6]) * 60 + int(found[7])) * (-1 if found[5] == "-" else 1) if found[5] else 0
    last = (int(found[2]) * 60 + int(found[3]) - ahead) % 1440 == 1439
    return text[: found.start(4) - 2] + "59" + text[found.start(4):] if last else text


def is_pattern(text: str) -> bool:
    try:
        python_pattern(text)
    except DataError:
        return False
    return True


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

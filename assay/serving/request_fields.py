"""Request fields: each taken once, typed and within its bounds, or refused by its name; what nobody took is refused too."""

import json
from collections.abc import Mapping
from typing import Any

from assay.errors import UsageError

IGNORED_FIELDS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}  # none of them changes an answer
UNSUPPORTED_FIELDS: dict[str, Any] = {  # what we cannot do, and the value that asks for nothing
    "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "functions": [], "function_call": "none", "tools": [],
    "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
    "modalities": ["text"], "echo": False, "suffix": ""}


class RequestRefused(UsageError):
    """A request that gets a 4xx or 503, with the fields of OpenAI's error objects."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None,
                 retry_after: int | None = None):
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after


class RequestFields:
    """A request's fields, each taken once; `rest` refuses what nobody took."""

    def __init__(self, body: Mapping[str, Any]):
        self.left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str) -> Any:
        return self.left.pop(name, None)

    def text(self, name: str) -> str | None:
        return self._typed(name, str, "a string")

    def flag(self, name: str) -> bool:
        return bool(self._typed(name, bool, "true or false"))

    def whole(self, name: str, low: int, high: int | None = None) -> int | None:
        value = self._typed(name, int, "a whole number")
        self._within(name, value, low, high)
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self._typed(name, (int, float), "a number")
        self._within(name, value, low, high)
        return default if value is None else float(value)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.text(name)
        if value is not None and value not in choices:
            raise RequestRefused(f"{name} is {short_json(value)}; expected one of {', '.join(choices)}", param=name)
        return value or choices[0]

    def rest(self) -> None:
        for name, value in self.left.items():
            if name in UNSUPPORTED_FIELDS and value != UNSUPPORTED_FIELDS[name]:
                raise RequestRefused(f"{name} is not supported by this server; leave it out", param=name, code="unsupported_parameter")
            if name not in UNSUPPORTED_FIELDS and name not in IGNORED_FIELDS:
                raise RequestRefused(f"Unrecognized request argument supplied: {short_json(name)}", param=name[:100],
                                     code="unknown_parameter")

    def _typed(self, name: str, kind: type | tuple[type, ...], words: str) -> Any:
        value = self.take(name)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise RequestRefused(f"{name} is {short_json(value)}; expected {words}", param=name, code="invalid_type")
        return value

    def _within(self, name: str, value: float | None, low: float, high: float | None) -> None:
        if value is not None and (value < low or (high is not None and value > high)):
            expected = f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
            raise RequestRefused(f"{name} is {short_json(value)}; expected {expected}", param=name, code="invalid_value")


def short_json(value: Any) -> str:
    """JSON that a client sent, shortened for an error message."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

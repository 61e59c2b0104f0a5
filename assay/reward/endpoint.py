"""OpenAI-compatible endpoint client: one question out, one readable answer back; retries, back-off, cost.

What a caller gets is an EndpointAnswer or, after the last try, an Unanswered with the reason of every try. A request that would
fail for every question (no such model, a bad key) is a UsageError at once.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from assay.errors import AssayError, UsageError
from assay.seeds import derive

T = TypeVar("T")
LONGEST_WAIT = 60.0  # a server that asks for more gets its question again at the next round
WORTH_ANOTHER_TRY = {408, 409, 425, 429}
WRONG_FOR_ALL = {401: "the key was not accepted", 403: "the key may not do this", 404: "there is no such model or path"}


@dataclass(frozen=True)
class Endpoint:
    base_url: str
    model: str
    key: str = field(default="", repr=False)
    seconds: float = 120.0


@dataclass(frozen=True)
class HttpReply:
    status: int
    body: str
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case


Post = Callable[[dict[str, Any]], HttpReply]


class Unreachable(AssayError):
    """Error of an endpoint from which no reply came: refused, cut off, or too slow."""


class Unreadable(ValueError):
    """A reply came, and is not what was asked for."""


@dataclass(frozen=True)
class Cost:
    """`untold` calls were answered without saying what they cost."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    untold: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.calls + other.calls, self.prompt_tokens + other.prompt_tokens,
                    self.completion_tokens + other.completion_tokens, self.untold + other.untold)


@dataclass(frozen=True)
class EndpointAnswer(Generic[T]):
    value: T
    cost: Cost
    payload: dict[str, Any]  # as it was accepted at last
    faults: tuple[str, ...] = ()  # of the tries before


class Unanswered(AssayError):
    """Error of an endpoint where every try failed; `faults` says how, `cost` what was paid."""

    def __init__(self, faults: tuple[str, ...], cost: Cost) -> None:
        super().__init__("; ".join(faults))
        self.faults, self.cost = faults, cost


def endpoint_from_environment(base_url: str = "", model: str = "", *, key_variable: str = "OPENAI_API_KEY",
                              seconds: float = 120.0) -> Endpoint:
    """Endpoint as given, else from OPENAI_BASE_URL and OPENAI_MODEL; the key only ever from the environment."""
    base_url, model = base_url or os.environ.get("OPENAI_BASE_URL", ""), model or os.environ.get("OPENAI_MODEL", "")
    if urlsplit(base_url).scheme not in ("http", "https") or not model:
        raise UsageError(f"judge: expected an http(s) base URL and a model, found {base_url!r} and {model!r}; give them, or set "
                         "OPENAI_BASE_URL and OPENAI_MODEL")
    return Endpoint(base_url.rstrip("/"), model, os.environ.get(key_variable, ""), seconds)


@contextmanager
def connected(endpoint: Endpoint) -> Iterator[Post]:
    """A function that posts a chat completion; safe to call from several threads."""
    try:
        import httpx
    except ModuleNotFoundError:
        raise UsageError("judge: httpx is not installed; pip install httpx") from None
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    local = urlsplit(endpoint.base_url).hostname in ("localhost", "127.0.0.1", "::1")  # no proxy on the way to ourselves
    with httpx.Client(headers=headers, timeout=endpoint.seconds, trust_env=not local) as client:

        def post(payload: dict[str, Any]) -> HttpReply:
            try:
                reply = client.post(f"{endpoint.base_url}/chat/completions", json={"model": endpoint.model, **payload})
            except (httpx.TransportError, httpx.DecodingError) as error:
                raise Unreachable(f"{type(error).__name__}: {error}") from None
            return HttpReply(reply.status_code, reply.text, {name.lower(): value for name, value in reply.headers.items()})

        yield post


def ask_endpoint(post: Post, payload: dict[str, Any], read: Callable[[str], T], *, tries: int, sleep: Callable[[float], None],
                 seed: int, address: tuple[str | int, ...]) -> EndpointAnswer[T]:
    """`read` takes the message's text and raises Unreadable where it is not what was asked for."""
    faults: list[str] = []
    cost, wait = Cost(), 0.0
    while len(faults) < tries:
        if wait:
            sleep(wait)
        wait = back_off(len(faults), seed, address)
        try:
            reply = post(payload)
        except Unreachable as error:
            faults.append(str(error))
            continue
        if reply.status == 200:
            cost += _cost(reply)
            try:
                return EndpointAnswer(read(_content(reply)), cost, payload, tuple(faults))
            except Unreadable as error:
                faults.append(str(error))
            continue
        if reply.status in (400, 422) and "response_format" in payload and "response_format" in reply.body:
            payload = {name: value for name, value in payload.items() if name != "response_format"}
            wait = 0.0
            continue
        faults.append(f"status {reply.status}: {reply.body[:200]}")
        wait = max(wait, retry_after(reply))
        if _hopeless(reply) or wait > LONGEST_WAIT:
            break
    raise Unanswered(tuple(faults), cost)


def back_off(failed: int, seed: int, address: tuple[str | int, ...]) -> float:
    """Seconds after the failures so far: 1, 2, 4, …, up to a minute, less up to half of it, so that not all come back at once."""
    share = derive(seed, "back off", *address, failed) / 2**63
    return min(LONGEST_WAIT, 2.0**failed) * (1 - share / 2)


def _hopeless(reply: HttpReply) -> bool:
    if reply.status in WRONG_FOR_ALL:
        raise UsageError(f"judge: status {reply.status}, {WRONG_FOR_ALL[reply.status]}: {reply.body[:200]}")
    return reply.status < 500 and reply.status not in WORTH_ANOTHER_TRY


def retry_after(reply: HttpReply) -> float:
    asked = reply.headers.get("retry-after", "")
    if asked.isdecimal():
        return float(asked)
    try:
        return max(0.0, parsedate_to_datetime(asked).timestamp() - parsedate_to_datetime(reply.headers.get("date", "")).timestamp())
    except ValueError:  # neither seconds nor a date, or no date to count from
        return 0.0


def _content(reply: HttpReply) -> str:
    try:
        choice = json.loads(reply.body)["choices"][0]
        content, reason = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Unreadable(f"the reply is no chat completion: {reply.body[:200]}") from None
    if reason == "length":
        raise Unreadable("the answer was cut off at its token limit")
    if not isinstance(content, str):
        raise Unreadable(f"the message's content is {type(content).__name__}; expected text")
    return content


def _cost(reply: HttpReply) -> Cost:
    try:
        usage = json.loads(reply.body)["usage"]
        return Cost(1, int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    except (ValueError, LookupError, TypeError):
        return Cost(1, untold=1)

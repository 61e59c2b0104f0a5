"""Access to a local server: on loopback by local names alone, beyond it by the holder of a token."""

import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from assay.errors import UsageError

LEAST_TOKEN = 16  # characters, where others can reach the server


class AccessRefused(NamedTuple):
    """Why a request is not answered, with the status of the reply."""

    sentence: str
    status: int
    code: str


def bind_listener(host: str, port: int, token: str | None) -> socket.socket:
    """A bound socket; a host that others can reach needs a token."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        _refuse_weak_token(token, host, ipaddress.ip_address(address[0]).is_loopback)
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: {error}; choose another with --port, 0 for any that is free") from None


def _refuse_weak_token(token: str | None, host: str, loopback: bool) -> None:
    if token is None and not loopback:
        raise UsageError(f"--host {host} can be reached by others, who must not use it unasked: set ASSAY_TOKEN or --token, "
                         "or stay on 127.0.0.1")
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise UsageError("the token is blank, or holds spaces or characters that no header carries; expected printable ASCII alone")
    if token is not None and len(token) < LEAST_TOKEN and not loopback:
        raise UsageError(f"--host {host} can be reached by others, and a token of {len(token)} characters is soon guessed; expected at "
                         f"least {LEAST_TOKEN}, such as those of `openssl rand -hex 16`")


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def on_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


class AccessGate:
    """Access control of a server: the holder of the token may speak; without a token, and about health, anybody, but on loopback only by a
    local name.

    A page whose name was rebound to 127.0.0.1 after it was loaded speaks from the user's own browser, but under its own name.
    """

    def __init__(self, app: Any, token: str | None, loopback: bool, refused: Callable[[AccessRefused], Any]):
        self.app, self.token, self.loopback, self.refused = app, token, loopback, refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (found := self._refusal(scope)) is not None:
            await self.refused(found)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Any) -> AccessRefused | None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self.token is not None and hmac.compare_digest(self.given(headers), self.token.encode()):
            return None
        if self.loopback and not _is_local(host):
            return AccessRefused(f"the host {host[:200]!r} is not this machine", 403, "wrong_host")
        if self.token is None or scope["path"] == "/health":
            return None
        return AccessRefused("Incorrect API key provided; send Authorization: Bearer TOKEN", 401, "invalid_api_key")

    def given(self, headers: Mapping[bytes, bytes]) -> bytes:
        """The token that the client offers."""
        return headers.get(b"authorization", b"").removeprefix(b"Bearer ")


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False

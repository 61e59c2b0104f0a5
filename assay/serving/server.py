"""Server with OpenAI's HTTP interface in front of an `EngineThread`, on loopback unless a token guards it.

    GET  /health                  whether it serves, and how much is under way; needs no token
    GET  /metrics                 counts for Prometheus
    GET  /v1/models[/NAME]        names, digests, whether proven, bytes held
    POST /v1/chat/completions     whole or streamed, with tools, or in the form of a JSON schema
    POST /v1/completions          text or token ids
    POST /v1/adapters             {"name", "path"}: a proven adapter joins under a name of its own, once its fingerprint agrees
    DELETE /v1/adapters/NAME      it takes no new requests and goes when those under way are over

With `assay serve --train` also /v1/trajectories, /v1/trajectories/ID/close and /v1/train (`policy_training`).

Without a token only local names are answered, and only JSON is read, so that no page in a browser can speak to it.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError, UsageError
from assay.serving.endpoints import Endpoints, error_response, internal_error_response, json_response
from assay.serving.engine_thread import EngineThread
from assay.serving.metrics import RequestCounts
from assay.serving.openai_protocol import error_object
from assay.serving.policy_training import ServedPolicy
from assay.serving.request_fields import RequestRefused, short_json

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

LEAST_TOKEN = 16  # characters, where others can reach the server
GRACE = 10.0  # seconds that those under way have to finish when the server is told to stop


def serve(serving: EngineThread, listener: socket.socket, *, token: str | None, ready: Callable[[str], None], grace: float = GRACE,
          policy: ServedPolicy | None = None) -> int:
    """Serve until a signal; 128 + its number comes back, or 1 where the engine failed. `ready` is told the address."""
    server = _server(serving, server_application(serving, token, loopback=_on_loopback(listener), policy=policy), grace)
    serving.on_failure = lambda: setattr(server, "should_exit", True)
    server.should_exit = serving.failed  # before anybody listened
    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        caught.append(number)
        server.should_exit = True  # it may come before the server has handlers of its own

    handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ready(_address(listener))
        server.run(sockets=[listener])  # it has handlers of its own, and afterwards hands on to ours what it caught
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        serving.stop()
    return 128 + caught[0] if caught else int(serving.failed)


@contextlib.contextmanager
def serve_in_background(serving: EngineThread, *, token: str | None = None, grace: float = GRACE,
                        policy: ServedPolicy | None = None) -> Iterator[str]:
    """The server in a thread, on a free port of 127.0.0.1, for the length of the block: yields http://127.0.0.1:PORT/v1."""
    listener = bind_listener("127.0.0.1", 0, token)
    server = _server(serving, server_application(serving, token, policy=policy), grace)
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.005)
        yield f"{_address(listener)}/v1"
    finally:
        server.should_exit = True
        thread.join()
        serving.stop()


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
        raise UsageError(f"--host {host} can be reached by others, who must not use this model unasked: set ASSAY_TOKEN or --token, "
                         "or stay on 127.0.0.1")
    if token is not None and not re.fullmatch("[!-~]+", token):
        raise UsageError("the token is blank, or holds spaces or characters that no header carries; expected printable ASCII alone")
    if token is not None and len(token) < LEAST_TOKEN and not loopback:
        raise UsageError(f"--host {host} can be reached by others, and a token of {len(token)} characters is soon guessed; expected at "
                         f"least {LEAST_TOKEN}, such as those of `openssl rand -hex 16`")


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _on_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _server(serving: EngineThread, app: "Starlette", grace: float) -> "uvicorn.Server":
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Nothing new begins; what is under way finishes, or is cancelled when its grace is over."""
            serving.closing = True
            deadline = time.monotonic() + grace
            while serving.busy and time.monotonic() < deadline and not self.force_exit and not serving.failed:
                await asyncio.sleep(0.02)
            serving.cancel_all()
            await super().shutdown(sockets)

    return Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=5))


def server_application(serving: EngineThread, token: str | None = None, *, loopback: bool = True,
                       policy: ServedPolicy | None = None) -> "Starlette":
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import Route

    desk = Endpoints(serving, policy)
    routes = [
        Route("/health", desk.health), Route("/metrics", desk.metrics),
        Route("/v1/models", desk.models), Route("/v1/models/{name:path}", desk.model),
        Route("/v1/chat/completions", desk.chat, methods=["POST"]), Route("/v1/completions", desk.completions, methods=["POST"]),
        Route("/v1/trajectories", desk.open_trajectory, methods=["POST"]), Route("/v1/train", desk.train, methods=["POST"]),
        Route("/v1/trajectories/{name}/close", desk.close_trajectory, methods=["POST"]),
        Route("/v1/adapters", desk.load_adapter, methods=["POST"]),
        Route("/v1/adapters/{name:path}", desk.retire_adapter, methods=["DELETE"])]
    handlers: dict[Any, Any] = {AssayError: error_response, HTTPException: error_response, Exception: internal_error_response}
    middleware = [Middleware(RequestCounts, counts=desk.requests), Middleware(AccessGate, token=token, loopback=loopback)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


class AccessGate:
    """Who may speak: the holder of the token; without a token, and about health, anybody, but on loopback only by a local name.

    A page whose name was rebound to 127.0.0.1 after it was loaded speaks from the user's own browser, but under its own name.
    """

    def __init__(self, app: Any, token: str | None, loopback: bool):
        self.app, self.token, self.loopback = app, token, loopback

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (found := self._refusal(scope)) is not None:
            await json_response(found.status, error_object(str(found), status=found.status, code=found.code))(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Any) -> RequestRefused | None:
        headers = dict(scope["headers"])
        given, host = headers.get(b"authorization", b"").removeprefix(b"Bearer "), headers.get(b"host", b"").decode("latin-1")
        if self.token is not None and hmac.compare_digest(given, self.token.encode()):
            return None
        if self.loopback and not _is_local(host):
            return RequestRefused(f"the host {short_json(host)} is not this machine", status=403, code="wrong_host")
        if self.token is None or scope["path"] == "/health":
            return None
        return RequestRefused("Incorrect API key provided; send Authorization: Bearer TOKEN", status=401, code="invalid_api_key")


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False

"""Server with OpenAI's HTTP interface in front of an `EngineThread`, on loopback unless a token guards it.

    GET  /health                  whether it serves, and how much is under way; needs no token
    GET  /metrics                 counts for Prometheus
    GET  /v1/models[/NAME]        names, digests, whether proven, bytes held
    POST /v1/chat/completions     whole or streamed, with tools, or in the form of a JSON schema
    POST /v1/completions          text or token ids
    POST /v1/adapters             {"name", "path"}: a proven adapter joins under a name of its own, once its fingerprint agrees
    DELETE /v1/adapters/NAME      it takes no new requests and goes when those under way are over

With `assay serve --rollouts` also POST /v1/weights {"path", "version"}: a trainer's next weights, from a folder, under the model's name.
With `assay serve --train` also /v1/trajectories, /v1/trajectories/ID/close and /v1/train (`policy_training`).

Without a token only local names are answered, and only JSON is read, so that no page in a browser can speak to it.
"""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError
from assay.generate.access import AccessGate, AccessRefused, address_of, bind_listener, on_loopback
from assay.serving.endpoints import Endpoints, error_response, internal_error_response, json_response
from assay.serving.engine_thread import EngineThread
from assay.serving.metrics import RequestCounts
from assay.serving.openai_protocol import error_object
from assay.serving.policy_training import ServedPolicy

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

GRACE = 10.0  # seconds that those under way have to finish when the server is told to stop


def serve(serving: EngineThread, listener: socket.socket, *, token: str | None, ready: Callable[[str], None], grace: float = GRACE,
          policy: ServedPolicy | None = None) -> int:
    """Serve until a signal; 128 + its number comes back, or 1 where the engine failed. `ready` is told the address."""
    server = _server(serving, server_application(serving, token, loopback=on_loopback(listener), policy=policy), grace)
    serving.on_failure = lambda: setattr(server, "should_exit", True)
    server.should_exit = serving.failed  # before anybody listened
    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        caught.append(number)
        server.should_exit = True  # it may come before the server has handlers of its own

    handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ready(address_of(listener))
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
        yield f"{address_of(listener)}/v1"
    finally:
        server.should_exit = True
        thread.join()
        serving.stop()


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
        Route("/v1/adapters", desk.load_adapter, methods=["POST"]), Route("/v1/weights", desk.take_weights, methods=["POST"]),
        Route("/v1/adapters/{name:path}", desk.retire_adapter, methods=["DELETE"])]
    handlers: dict[Any, Any] = {AssayError: error_response, HTTPException: error_response, Exception: internal_error_response}
    middleware = [Middleware(RequestCounts, counts=desk.requests),
                  Middleware(AccessGate, token=token, loopback=loopback, refused=_refused)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def _refused(found: AccessRefused) -> Any:
    return json_response(found.status, error_object(found.sentence, status=found.status, code=found.code))

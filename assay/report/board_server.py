"""Board server: runs as a live page, on loopback unless a token guards it.

    GET  /                     the page; its texts come from the calls below, and a script puts them there as text
    GET  /api/events           server-sent: every run's row at first, then those that changed; what the GPUs do
    GET  /api/runs/ID          verdicts with evidence, samples beside the parent's
    GET  /api/curves?run=ID…   thinned curves of several runs, to lie over one another
    POST /api/runs/ID/stop     the run saves and stops

Nothing on the page is fetched from elsewhere, and its policy forbids it. A change needs JSON from this page's own origin.
"""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from assay.errors import UsageError
from assay.generate.access import AccessGate, AccessRefused
from assay.report.live_runs import LiveRuns
from assay.report.templates import templates

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

COOKIE = "assay_board"
ASSETS = {"uPlot.iife.min.js": "text/javascript", "board.js": "text/javascript", "uPlot.min.css": "text/css", "page.css": "text/css",
          "board.css": "text/css"}
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
          "frame-ancestors 'none'")
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
           "Cache-Control": "no-store"}
PAUSE, BEAT = 0.5, 15.0  # seconds between two looks for changes, and between two signs of life
MOST_OVERLAID = 12  # runs in one chart


def board_application(runs: LiveRuns, token: str | None = None, *, loopback: bool = True) -> "Starlette":
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Route

    pages = BoardPages(runs)
    routes = [Route("/", pages.page), Route("/assets/{name}", pages.asset), Route("/api/events", pages.events),
              Route("/api/runs/{id}", pages.run), Route("/api/curves", pages.curves),
              Route("/api/runs/{id}/stop", pages.stop, methods=["POST"])]

    @asynccontextmanager
    async def watching(_: Any) -> AsyncGenerator[None, None]:
        threading.Thread(target=runs.watch, name="runs", daemon=True).start()
        yield
        runs.close()

    gate = Middleware(BoardGate, token=token, loopback=loopback, refused=_refused)
    return Starlette(routes=routes, middleware=[gate], lifespan=watching)


def board_server(runs: LiveRuns, token: str | None = None, *, loopback: bool = True) -> "uvicorn.Server":
    """Web server of the board, to be run on a bound socket. Told to stop, it ends the pages' streams first, so that nothing is cut off."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            runs.close()
            await super().shutdown(sockets)

    application = board_application(runs, token, loopback=loopback)
    return Server(uvicorn.Config(application, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=5))


class BoardGate(AccessGate):
    """A browser offers the token once in the address (/?token=…), and then by a cookie that no script reads."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import RedirectResponse

        asked = scope["type"] == "http" and scope["path"] == "/" and self.token is not None
        if asked and (given := Request(scope).query_params.get("token")):
            reply = RedirectResponse("/", status_code=303)
            reply.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            await reply(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def given(self, headers: Mapping[bytes, bytes]) -> bytes:
        try:
            cookie = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE)
        except CookieError:
            cookie = None
        return super().given(headers) or (cookie.value.encode() if cookie else b"")


class BoardPages:
    """The replies. Those that read files are plain functions, which the server calls in threads."""

    def __init__(self, runs: LiveRuns):
        self.runs = runs

    async def page(self, _: "Request") -> "Response":
        from starlette.responses import HTMLResponse

        return HTMLResponse(templates().get_template("board.html.j2").render(), headers=HEADERS)

    async def asset(self, request: "Request") -> "Response":
        from starlette.responses import Response

        name = request.path_params["name"]
        if name not in ASSETS:
            return _json({"error": "no such file"}, 404)
        data = (resources.files("assay.report") / "assets" / name).read_bytes()
        return Response(data, media_type=ASSETS[name], headers=HEADERS)

    async def events(self, request: "Request") -> "Response":
        from starlette.responses import StreamingResponse

        return StreamingResponse(self._changes(request), media_type="text/event-stream", headers=HEADERS | {"X-Accel-Buffering": "no"})

    async def _changes(self, request: "Request") -> AsyncGenerator[str, None]:
        """Everything, then what changed; a client that comes back after a break gets everything again."""
        sent: dict[str, int] = {}
        first, gpus, silent = True, None, 0.0
        while not (self.runs.closed or await request.is_disconnected()):
            shown = self.runs.shown()
            changed = [run.to_json() for run in shown if sent.get(run.id) != run.version]
            gone = sorted(sent.keys() - {run.id for run in shown})
            sent = {run.id: run.version for run in shown}
            if changed or gone or first:
                yield _event("runs", {"all": first, "changed": changed, "gone": gone})
            if first or gpus != self.runs.gpus:
                gpus = self.runs.gpus
                yield _event("machine", {"gpus": gpus})
            silent = 0.0 if changed or first else silent + PAUSE
            if silent >= BEAT:
                silent = 0.0
                yield ": alive\n\n"
            first = False
            await asyncio.sleep(PAUSE)

    def run(self, request: "Request") -> "Response":
        try:
            run = self.runs.run_of(request.path_params["id"])
        except KeyError:
            return _json({"error": "no such run is on the board"}, 404)
        return _json(run.details(self.runs.parent_of(run)))

    def curves(self, request: "Request") -> "Response":
        """Curves by metric, of each run that has it; of a run that is gone nothing."""
        found: dict[str, list[dict[str, Any]]] = {}
        for id in request.query_params.getlist("run")[:MOST_OVERLAID]:
            run = self.runs.runs.get(id)
            for key, curve in sorted(run.metrics.curves.items()) if run is not None else ():
                found.setdefault(key, []).append({"run": id, **curve.to_json()})
        return _json({"curves": found})

    async def stop(self, request: "Request") -> "Response":
        if request.headers.get("content-type", "") != "application/json" or not _own_origin(request):
            return _json({"error": "only this page may stop a run: JSON from its own origin is expected"}, 403)
        try:
            run = self.runs.run_of(request.path_params["id"])
            return _json({"asked": run.stop()})
        except KeyError:
            return _json({"error": "no such run is on the board"}, 404)
        except UsageError as error:
            return _json({"error": str(error)}, 409)


def _own_origin(request: "Request") -> bool:
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def _event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(value, allow_nan=False)}\n\n"


def _json(value: Any, status: int = 200) -> "Response":
    from starlette.responses import Response

    return Response(json.dumps(value, allow_nan=False), status, media_type="application/json", headers=HEADERS)


def _refused(found: AccessRefused) -> Any:
    words = "open /?token=TOKEN, or send Authorization: Bearer TOKEN" if found.status == 401 else found.sentence
    return _json({"error": words}, found.status)

"""Rehearsal: the server's own application answers the known requests (`guard.known_requests`) before it listens to anybody."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from assay.errors import GuardStop
from assay.guard.known_requests import KnownReply, ServedModel, check_known_requests
from assay.serving.engine_thread import EngineThread
from assay.serving.policy_training import ServedPolicy
from assay.serving.server import server_application
from assay.serving.tool_protocol import CALL_SYNTAX
from assay.verdict import Outcome, Verdict


def rehearse(serving: EngineThread, token: str | None = None, *, policy: ServedPolicy | None = None) -> Verdict:
    """Verdict on the answers; GuardStop where one is wrong. The first model's counts begin anew afterwards."""
    app, first = server_application(serving, token, policy=policy), serving.first
    served = ServedModel(first.name, first.engine.version, first.engine.weights.source, first.tokenizer, first.engine.stop_ids,
                         first.engine.length, first.engine.weights.dtype, serving.size.slots + serving.size.queue, serving.size.slots,
                         len(serving.models), first.tool_format.name in CALL_SYNTAX)
    with asyncio.Runner() as loop:
        found = check_known_requests(lambda method, path, body: loop.run(_asked(app, method, path, body, token)), served)
    first.prompt_tokens = first.completion_tokens = 0
    if found.outcome is Outcome.REFUTED:
        raise GuardStop(f"{first.name!r} is not served: {found.check}: {found.reason}", [found])
    return found


async def _asked(app: Any, method: str, path: str, body: Mapping[str, Any] | None, token: str | None) -> KnownReply:
    """A request as uvicorn would hand it to the application, and all that it sends back."""
    sent: list[dict[str, Any]] = []
    waiting = [{"type": "http.request", "body": b"" if body is None else json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()  # this client never leaves
        return waiting.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    headers += [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    await app({"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
               "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers, "client": ("127.0.0.1", 1),
               "server": ("127.0.0.1", 80)}, receive, send)
    kind = dict(sent[0]["headers"]).get(b"content-type", b"").decode()
    return KnownReply(sent[0]["status"], _read(b"".join(message.get("body", b"") for message in sent[1:]).decode(), kind))


def _read(text: str, kind: str) -> Any:
    if kind.startswith("application/json"):
        return json.loads(text)
    if kind.startswith("text/event-stream"):
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        return [*map(json.loads, events[:-1]), events[-1]]
    return text

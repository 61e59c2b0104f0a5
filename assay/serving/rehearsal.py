"""Rehearsal: the server's own application answers the known requests (`guard.known_requests`) before it listens to anybody."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from assay.errors import GuardStop, UsageError
from assay.guard.due_replies import ServedModel
from assay.guard.known_requests import SCHEMA, KnownReply, KnownRequest, check_known_requests
from assay.serving.engine_thread import EngineThread
from assay.serving.hosted_model import HostedModel
from assay.serving.policy_training import ServedPolicy
from assay.serving.server import server_application
from assay.serving.tool_protocol import CALL_SYNTAX
from assay.verdict import Outcome, Verdict


def rehearse(serving: EngineThread, token: str | None = None, *, policy: ServedPolicy | None = None) -> Verdict:
    """Verdict on the answers; GuardStop where one is wrong. The models' counts of tokens begin anew afterwards."""
    app, hosted, size = server_application(serving, token, policy=policy), list(serving.models.values()), serving.size
    no_forms = _no_forms(serving.first)
    served = [_served(model, no_forms) for model in hosted]
    with asyncio.Runner() as loop:
        found = check_known_requests(lambda requests: loop.run(_replies(app, requests, token)), served, slots=size.slots,
                                     room=size.slots + size.queue)
    for model in hosted:
        model.prompt_tokens = model.completion_tokens = 0
    if found.outcome is Outcome.REFUTED:
        raise GuardStop(f"{serving.first.name!r} is not served: {found.check}: {found.reason}", [found])
    return found


def _served(model: HostedModel, no_forms: str | None) -> ServedModel:
    engine = model.engine
    return ServedModel(model.name, engine.version, engine.weights.source, model.tokenizer, engine.stop_ids, engine.length,
                       engine.weights.dtype, calls=model.tool_format.name in CALL_SYNTAX, no_forms=no_forms)


def _no_forms(model: HostedModel) -> str | None:
    """Why no form can be demanded of the model's answers: llguidance is not installed, or the vocabulary has no number."""
    try:
        model.forms.json_schema(SCHEMA)
    except UsageError as error:
        return str(error)
    return None


async def _replies(app: Any, requests: Sequence[KnownRequest], token: str | None) -> list[KnownReply]:
    return await asyncio.gather(*(_reply(app, request, token) for request in requests))


async def _reply(app: Any, request: KnownRequest, token: str | None) -> KnownReply:
    """A request as uvicorn would hand it to the application, and all that is sent back."""
    sent: list[dict[str, Any]] = []
    body = b"" if request.body is None else json.dumps(request.body).encode()
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()  # this client never leaves
        return waiting.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    headers += [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    method = request.method or ("GET" if request.body is None else "POST")
    await app({"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
               "scheme": "http", "path": request.path, "raw_path": request.path.encode(), "query_string": b"", "root_path": "",
               "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}, receive, send)
    kind = dict(sent[0]["headers"]).get(b"content-type", b"").decode()
    return KnownReply(sent[0]["status"], _read(b"".join(message.get("body", b"") for message in sent[1:]).decode(), kind))


def _read(text: str, kind: str) -> Any:
    if kind.startswith("application/json"):
        return json.loads(text)
    if kind.startswith("text/event-stream"):
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        return [*map(json.loads, events[:-1]), events[-1]]
    return text

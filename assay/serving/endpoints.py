"""HTTP endpoints of the server: read a request, let its completions flow from the engine, reply whole or in events.

The same request with the same seed gets the same text, alone or among others: choice k draws at the address (seed, k).
A client that leaves takes its request along.
"""

import asyncio
import contextlib
import json
import math
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from assay.errors import AssayError, UsageError
from assay.generate.generation_request import Completion, CompletionProgress, GenerationRequest, Sampling
from assay.generate.token_grammar import TokenGrammar
from assay.serving import openai_protocol
from assay.serving.engine_thread import EngineThread, PendingCall
from assay.serving.hosted_model import HostedModel, RankedTokens
from assay.serving.metrics import CONTENT_TYPE, metrics_text
from assay.serving.openai_protocol import ApiReply, ApiRequest, error_object, model_object
from assay.serving.policy_training import ServedPolicy
from assay.serving.request_fields import RequestFields, RequestRefused
from assay.serving.tool_protocol import render_chat, speech_grammar

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    Send = Callable[[Any], Awaitable[None]]
    Receive = Callable[[], Awaitable[Any]]

T = TypeVar("T")
ProgressEvents = AsyncGenerator[tuple[int, CompletionProgress | None, RankedTokens | None], None]
BODY_BYTES = 4 << 20
DRAINED_BYTES = 4 * BODY_BYTES  # of a body that is too large: a client that still writes would not read why it was refused
CLIENT_CLOSED = 499  # what a log shows for a client that did not wait


class Endpoints:
    """The endpoints of one server. Adapters join one after another."""

    def __init__(self, serving: EngineThread, policy: ServedPolicy | None = None):
        self.serving, self.policy = serving, policy
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.joining = asyncio.Lock()

    async def health(self, request: "HttpRequest") -> "Response":
        models = list(self.serving.models.values())
        broken = self.serving.failed or self.serving.closing or any(model.broken is not None for model in models)
        return json_response(503 if broken else 200, {"status": "unavailable" if broken else "ok", "models": len(models),
                                              "completions": self.serving.busy, "slots": self.serving.size.slots * len(models)})

    async def metrics(self, request: "HttpRequest") -> "Response":
        from starlette.responses import Response

        return Response(metrics_text(self.serving, self.requests), headers={"content-type": CONTENT_TYPE})

    async def models(self, request: "HttpRequest") -> "Response":
        return json_response(200, {"object": "list", "data": [self._described(model) for model in list(self.serving.models.values())]})

    async def model(self, request: "HttpRequest") -> "Response":
        return json_response(200, self._described(self.serving.find(request.path_params["name"])))

    async def chat(self, request: "HttpRequest") -> Any:
        return await self._respond(request, openai_protocol.read_chat(await _body(request)))

    async def completions(self, request: "HttpRequest") -> Any:
        return await self._respond(request, openai_protocol.read_completion(await _body(request)))

    async def load_adapter(self, request: "HttpRequest") -> "Response":
        fields = RequestFields(await _body(request))
        name, path = fields.text("name"), fields.text("path")
        fields.rest()
        if not name or not path:
            raise RequestRefused("expected the name that the adapter shall have and the path of its checkpoint", param="path" if name
                                 else "name")
        async with self.joining:
            joined = await asyncio.to_thread(self._open_adapter, name, path)
        return json_response(200, self._described(joined))

    async def take_weights(self, request: "HttpRequest") -> "Response":
        fields = RequestFields(await _body(request))
        path, version = fields.text("path"), fields.text("version")
        fields.rest()
        if not path or not version:
            raise RequestRefused("expected the path of the weights and the version that replies shall name", param="version" if path
                                 else "path")
        async with self.joining:
            taken = await asyncio.to_thread(_or_refused, "weights_refused", self.serving.take_weights, path, version)
        return json_response(200, self._described(taken))

    def _open_adapter(self, name: str, path: str) -> HostedModel:
        return _or_refused("adapter_refused", self.serving.open_adapter, name, path)

    async def retire_adapter(self, request: "HttpRequest") -> "Response":
        name = request.path_params["name"]
        self.serving.retire(name)
        if name in self.serving.models:
            raise AssayError(f"{name!r} should be retired, and is still served; stop the server")
        return json_response(200, {"id": name, "object": "model", "deleted": True})

    def _policy(self) -> ServedPolicy:
        if self.policy is None:
            raise RequestRefused("this server does not train; start it with assay serve --train", status=409, code="not_training")
        return self.policy

    async def open_trajectory(self, request: "HttpRequest") -> "Response":
        fields = RequestFields(await _body(request))
        fields.rest()
        return json_response(200, self._policy().open())

    async def close_trajectory(self, request: "HttpRequest") -> "Response":
        fields, name = RequestFields(await _body(request)), request.path_params["name"]
        reward = fields.number("reward", -math.inf, math.inf, math.nan)
        error = fields.text("error")
        fields.rest()
        self._policy().close(name, None if math.isnan(reward) else reward, error)
        return json_response(200, {"id": name, "closed": True})

    async def train(self, request: "HttpRequest") -> "Response":
        fields = RequestFields(await _body(request))
        groups, policy = fields.take("groups"), self._policy()
        fields.rest()
        if not isinstance(groups, list) or not groups or not all(
                isinstance(group, list) and all(isinstance(name, str) for name in group) for group in groups):
            raise RequestRefused("groups: expected lists of trajectories' ids", param="groups", code="invalid_type")
        return json_response(200, await asyncio.wrap_future(self.serving.ask(lambda: policy.learn(groups))))

    async def _respond(self, request: "HttpRequest", asked: ApiRequest) -> Any:
        model = self.serving.find(asked.model)
        trajectory = request.headers.get("x-assay-trajectory")
        if trajectory is not None:
            return await self._respond_in(trajectory, request, asked, model)
        prompts = await asyncio.to_thread(api_prompt_ids, model, asked)
        answer = ApiReply.to(asked, model, prompts, secrets.randbits(63) if asked.seed is None else asked.seed)
        grammar = await asyncio.to_thread(api_grammar, model, asked)
        return await self._flow(request, CompletionFlow(self.serving, answer, grammar))

    async def _respond_in(self, trajectory: str, request: "HttpRequest", asked: ApiRequest, model: HostedModel) -> Any:
        """A turn that may be trained on: from the ids that were sampled and inserted before it, and kept as it is sampled."""
        if asked.kind != "chat":
            raise RequestRefused("trajectories are made of chat completions; leave X-Assay-Trajectory out", param="prompt")
        policy = self._policy()
        await asyncio.to_thread(encoded_prompts, model, asked)  # what the template refuses or has no place for is refused here too
        prompt = policy.begin_turn(trajectory, asked, model)
        answer = ApiReply.to(asked, model, (prompt,), secrets.randbits(63) if asked.seed is None else asked.seed)

        def ended(completion: Completion | None) -> None:
            message = {} if completion is None else answer.message(0, completion)
            policy.end_turn(trajectory, completion, message, f"{answer.id}/0")

        try:
            require_context((prompt,), asked, model)
        except RequestRefused:
            ended(None)
            raise
        return await self._flow(request, CompletionFlow(self.serving, answer, ended=ended))

    async def _flow(self, request: "HttpRequest", flow: "CompletionFlow") -> Any:
        if flow.answer.asked.stream:
            return EventStream(flow)
        whole = await unless_disconnected(request.receive, flow.collect())
        return json_response(CLIENT_CLOSED, {}) if whole is None else json_response(200, whole)

    def _described(self, model: HostedModel) -> dict[str, Any]:
        first = self.serving.first
        return model_object(model, None if model is first else first.name) | {"takes_weights": model is first and
                                                                              self.serving.size.takes_weights}


def _or_refused(code: str, opened: Callable[..., HostedModel], *given: str) -> HostedModel:
    """An artifact that is refused is the client's to know about, not a failure of the server."""
    try:
        return opened(*given)
    except RequestRefused:
        raise
    except AssayError as error:
        raise RequestRefused(str(error), param="path", code=code) from None


def api_prompt_ids(model: HostedModel, asked: ApiRequest) -> tuple[tuple[int, ...], ...]:
    """Token ids, each with room for at least one more; a chat goes through the model's own template."""
    prompts = encoded_prompts(model, asked)
    require_context(prompts, asked, model)
    return prompts


def encoded_prompts(model: HostedModel, asked: ApiRequest) -> tuple[tuple[int, ...], ...]:
    tokenizer, stops = model.tokenizer, model.artifact.stops
    if asked.kind == "chat":
        if tokenizer.template is None:
            raise RequestRefused(f"{model.name!r} has no chat template; use /v1/completions", param="messages")
        if asked.form.tools and model.unread_tools is not None:
            raise RequestRefused(f"tools are not supported by this model: {model.unread_tools}", param="tools",
                                 code="unsupported_parameter")
        prompts = [tokenizer.encode(render_chat(tokenizer, asked.messages, asked.form.tools, model.tool_format))]
    else:
        prompts = [tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else list(prompt) for prompt in asked.prompts]
    beginning = [id for id in (stops.bos, stops.eos) if id is not None][:1]
    return tuple(tuple(prompt or beginning) for prompt in prompts)


def require_context(prompts: Sequence[Sequence[int]], asked: ApiRequest, model: HostedModel) -> None:
    for prompt in prompts:
        if len(prompt) + (asked.max_new or 1) > model.engine.length:
            raise RequestRefused(f"This model's maximum context length is {model.engine.length} tokens. However, you requested "
                          f"{len(prompt) + (asked.max_new or 1)} tokens ({len(prompt)} in the prompt, {asked.max_new or 1} in the "
                          "completion)", param="messages" if asked.kind == "chat" else "prompt", code="context_length_exceeded")


def api_grammar(model: HostedModel, asked: ApiRequest) -> TokenGrammar | None:
    """The form that the answer must have; None where the model may say what it likes."""
    if not asked.form.constrained:
        return None
    param = "tool_choice" if asked.form.called else "response_format"
    try:
        return speech_grammar(asked.form, model.forms, model.tool_format)
    except RequestRefused:
        raise
    except UsageError as error:
        raise RequestRefused(str(error), param=param, code="unsupported_parameter") from None


class CompletionFlow:
    """The completions of one reply on their way from the engine. Whatever ends it early, they are cancelled."""

    def __init__(self, serving: EngineThread, answer: ApiReply, grammar: TokenGrammar | None = None,
                 ended: Callable[[Completion | None], None] | None = None):
        self.serving, self.answer, self.model, self.grammar = serving, answer, answer.model, grammar
        self.ended = ended  # told of the one completion when it is whole, or None where it came to nothing
        self.members = answer.asked.n * len(answer.prompts)

    async def collect(self) -> dict[str, Any]:
        """All of them, whole."""
        ended: dict[int, tuple[Completion, RankedTokens | None]] = {}
        async with contextlib.aclosing(self.news()) as news:
            async for index, progress, scores in news:
                if progress is not None and progress.completion is not None:
                    ended[index] = progress.completion, scores
        return self.answer.whole(ended)

    async def news(self) -> ProgressEvents:
        """(choice, what it gained, its ranks); first of all (0, None, None), once the engine has taken the request."""
        arrivals: asyncio.Queue[tuple[int, CompletionProgress | AssayError, RankedTokens | None]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def arrive(*item: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more, which must not end the engine's thread
                loop.call_soon_threadsafe(arrivals.put_nowait, item)

        calls = [self._call(index, prompt, arrive) for index, prompt in enumerate(self.answer.prompts)]
        told = self.ended
        try:
            self.serving.admit(self.model, self.members)
        except RequestRefused:
            if told is not None:
                told(None)
            raise
        try:
            for call in calls:  # no weights are taken up while a request is under way: all of it is of one version
                self.answer = replace(self.answer, version=await asyncio.wrap_future(self.serving.submit(call)))
            yield 0, None, None
            left = self.members
            while left:
                index, item, scores = await arrivals.get()
                if isinstance(item, AssayError):
                    raise item
                if item.completion is not None and item.completion.ended == "cancelled":
                    raise RequestRefused("the server is shutting down", status=503, code="unavailable")
                if item.completion is not None and item.completion.ended == "no token":
                    raise RequestRefused("no token can follow in the form that was asked for; ask for a simpler one",
                                         param="response_format", code="form_failed")
                left -= item.completion is not None
                if item.completion is not None and told is not None:
                    told(item.completion)
                    told = None
                yield index, item, scores
        finally:
            if told is not None:
                told(None)
            for call in calls:
                self.serving.cancel(call)
            self.serving.release(self.model, self.members)

    def _call(self, number: int, prompt: tuple[int, ...], arrive: Callable[..., object]) -> PendingCall:
        asked, first = self.answer.asked, number * self.answer.asked.n
        sampling = Sampling(asked.max_new or self.model.engine.length - len(prompt), asked.temperature, asked.top_k, asked.top_p,
                            self.answer.seed, asked.min_p, asked.repetition_penalty)
        request = GenerationRequest(prompt, sampling, group=asked.n, first=first, stop=asked.stop, stream=asked.stream,
                                    grammar=self.grammar)
        ranks = asked.logprobs and (asked.alternatives or asked.under == "model")
        under = sampling if asked.under == "sampled" else Sampling()

        def deliver(item: CompletionProgress | AssayError, scores: RankedTokens | None) -> None:
            arrive(first + (item.member if isinstance(item, CompletionProgress) else 0), item, scores)

        return PendingCall(self.model, request, deliver, under if ranks else None, asked.alternatives)


class EventStream:
    """Server-sent events. Errors before the first event are replies of their own; later ones are the last event."""

    def __init__(self, flow: CompletionFlow):
        self.flow = flow

    async def __call__(self, scope: Any, receive: "Receive", send: "Send") -> None:
        async with contextlib.aclosing(self.flow.news()) as news:
            await anext(news)  # submitted, or refused
            await send({"type": "http.response.start", "status": 200, "headers": [
                (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]})
            await unless_disconnected(receive, self._events(news, send))

    async def _events(self, news: ProgressEvents, send: "Send") -> bool:
        answer, completions = self.flow.answer, []
        for piece in answer.opening():
            await _event(send, piece)
        try:
            async for index, progress, _ in news:
                assert progress is not None, "only the first carries none"
                await _event(send, answer.piece(index, progress))
                completions += [progress.completion] if progress.completion is not None else []
            if answer.asked.usage_in_stream:
                await _event(send, answer.last(completions))
            await _event(send, "[DONE]")
        except AssayError as error:
            await _event(send, error_object(str(error), status=_status(error)))
        await send({"type": "http.response.body", "body": b""})
        return True

# ---------------------------------------------------------------- HTTP


async def _body(request: "HttpRequest") -> dict[str, Any]:
    """JSON of at most BODY_BYTES."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestRefused("expected a body with Content-Type: application/json", status=415, code="unsupported_media_type")
    from starlette.requests import ClientDisconnect

    kept, total = [], 0
    try:
        async for chunk in request.stream():
            total += len(chunk)
            if total <= BODY_BYTES:
                kept.append(chunk)
            elif total > DRAINED_BYTES:
                break
    except ClientDisconnect:
        raise RequestRefused("the client left before its request was whole", status=CLIENT_CLOSED) from None
    if total > BODY_BYTES:
        raise RequestRefused(f"the body has more than {BODY_BYTES:,} bytes", status=413, code="request_too_large")
    return openai_protocol.parse_body(b"".join(kept))


async def unless_disconnected(receive: "Receive", work: Coroutine[Any, Any, T]) -> T | None:
    """Result of the work, or None where the client left before; the work is then cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: "Receive") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _event(send: "Send", value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})


def json_response(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> "Response":
    from starlette.responses import Response

    return Response(json.dumps(body, allow_nan=False), status, headers, "application/json")


def _status(error: AssayError) -> int:
    return error.status if isinstance(error, RequestRefused) else 400 if isinstance(error, UsageError) else 500


async def error_response(_: "HttpRequest", error: Any) -> "Response":
    """Ours, and Starlette's for paths and methods that there are not."""
    if not isinstance(error, AssayError):
        return json_response(error.status_code, error_object(error.detail, status=error.status_code), error.headers)
    status = _status(error)
    param, code, wait = (error.param, error.code, error.retry_after) if isinstance(error, RequestRefused) else (None, None, None)
    headers = None if wait is None else {"retry-after": str(wait)}
    return json_response(status, error_object(str(error), status=status, param=param, code=code), headers)


async def internal_error_response(_: "HttpRequest", error: Exception) -> "Response":
    """The traceback goes to the server's own log."""
    return json_response(500, error_object("the server met an error of its own; its log has the traceback", status=500))

"""OpenAI protocol: requests read field by field, refusals, and replies as OpenAI's objects, whole or in pieces.

A null is an absent field. A field that would change the answer and that we cannot honour is refused; nothing is ignored but
what cannot change an answer. Beyond OpenAI's fields: `top_k`, `min_p`, `repetition_penalty`, `logprobs_under`, `return_token_ids`.

Log-probabilities are of every token that was sampled, the one that stopped the text included. They are under the distribution
that was drawn from, after penalty, temperature and truncation (greedy: one outcome, log-probability 0), so a trainer can use
them as they are; with `logprobs_under: "model"` they are under the plain softmax of the logits. A token that could not be
drawn has none and is not listed. `system_fingerprint` is the digest of the weights that every token came from.
"""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

from assay.errors import ArtifactError
from assay.generate.generation_request import MOST_TOP_K, Completion, CompletionProgress
from assay.model.tokenizer import Tokenizer
from assay.serving.hosted_model import HostedModel, RankedTokens
from assay.serving.request_fields import RequestFields, RequestRefused, short_json
from assay.serving.tool_protocol import SpeechForm, read_speech_form, read_tool_calls, spoken_message
from assay.strict_json import parse_json

MOST_CHOICES, MOST_PROMPTS = 128, 128
MOST_STOPS, LONGEST_STOP = 4, 256
MOST_ALTERNATIVES = {"chat": 20, "text": 5}  # as OpenAI has them
COMPLETION_TOKENS = 16  # /v1/completions without max_tokens, as OpenAI has it
MESSAGE_FIELDS = {"assistant": ("tool_calls", "tool_call_faults"), "tool": ("tool_call_id",)}

EndpointKind = Literal["chat", "text"]


@dataclass(frozen=True)
class ApiRequest:
    """A request, read and typed; what it says about the model is not checked yet."""

    kind: EndpointKind
    model: str
    messages: tuple[dict[str, Any], ...]  # of a chat
    prompts: tuple[str | tuple[int, ...], ...]  # of a text completion
    n: int
    max_new: int | None  # None: as many as fit
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    alternatives: int  # how many of the likeliest tokens are named at each place
    under: Literal["sampled", "model"]  # whose log-probabilities: the distribution that was drawn from, or the plain softmax
    token_ids: bool
    form: SpeechForm = field(default_factory=SpeechForm)  # of a chat


def parse_body(body: bytes) -> dict[str, Any]:
    """Numbers may be infinite here: whoever reads the field refuses them by its name."""
    try:
        return parse_json(body, where="the body", shape=dict, advice="send one JSON object", parse_float=float)
    except ArtifactError as error:
        raise RequestRefused(str(error), code="invalid_json") from None


def read_chat(body: Mapping[str, Any]) -> ApiRequest:
    fields = RequestFields(body)
    messages, form = _messages(fields.take("messages")), read_speech_form(fields)
    limits = [fields.whole(name, 1) for name in ("max_completion_tokens", "max_tokens")]
    alternatives = fields.whole("top_logprobs", 0, MOST_ALTERNATIVES["chat"])
    logprobs = fields.flag("logprobs")
    if alternatives is not None and not logprobs:
        raise RequestRefused("top_logprobs needs logprobs to be true", param="top_logprobs")
    asked = _asked(fields, "chat", messages=messages, max_new=next((limit for limit in limits if limit is not None), None),
                   logprobs=logprobs, alternatives=alternatives or 0)
    if form.constrained and asked.alternatives and asked.under == "sampled":
        raise RequestRefused("top_logprobs is not supported where tokens are drawn among those that a form allows; ask without, or with "
                             "logprobs_under model", param="top_logprobs", code="unsupported_parameter")
    return replace(asked, form=form)


def read_completion(body: Mapping[str, Any]) -> ApiRequest:
    fields = RequestFields(body)
    prompts = _prompts(fields.take("prompt"))
    limit = fields.whole("max_tokens", 1)
    alternatives = fields.whole("logprobs", 0, MOST_ALTERNATIVES["text"])
    if fields.whole("best_of", 1) not in (None, body.get("n") or 1):
        raise RequestRefused("best_of other than n is not supported; ask for n and choose", param="best_of")
    return _asked(fields, "text", prompts=prompts, max_new=COMPLETION_TOKENS if limit is None else limit,
                  logprobs=alternatives is not None, alternatives=alternatives or 0)


def error_object(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# ----------------------------------------------------------------


def _asked(fields: RequestFields, kind: EndpointKind, *, messages: tuple[dict[str, Any], ...] = (),
           prompts: tuple[str | tuple[int, ...], ...] = (),
           max_new: int | None, logprobs: bool, alternatives: int) -> ApiRequest:
    """The fields that both kinds of request share."""
    model = fields.text("model")
    if not model:
        raise RequestRefused("you must provide a model parameter; GET /v1/models lists them", param="model")
    top_p = fields.number("top_p", 0, 1, 1.0)
    penalty = fields.number("repetition_penalty", 0, 10, 1.0)
    for name, value in (("top_p", top_p), ("repetition_penalty", penalty)):
        if not value:
            raise RequestRefused(f"{name} is 0; expected more", param=name, code="invalid_value")
    stream = fields.flag("stream")
    asked = ApiRequest(
        kind, model, messages, prompts, n=fields.whole("n", 1, MOST_CHOICES) or 1, max_new=max_new,
        temperature=fields.number("temperature", 0, 2, 1.0), top_p=top_p, top_k=fields.whole("top_k", 0, MOST_TOP_K) or 0,
        min_p=fields.number("min_p", 0, 1, 0.0), repetition_penalty=penalty, seed=fields.whole("seed", -(2**63), 2**63 - 1),
        stop=_stops(fields.take("stop")), stream=stream, usage_in_stream=_usage_in_stream(fields.take("stream_options"), stream),
        logprobs=logprobs, alternatives=alternatives, under=fields.choice("logprobs_under", ("sampled", "model")),  # type: ignore[arg-type]
        token_ids=fields.flag("return_token_ids"))
    fields.rest()
    if stream and logprobs and (alternatives or asked.under == "model"):
        raise RequestRefused("alternatives and log-probabilities of the plain softmax are made once a text is whole; ask without stream",
                      param="stream", code="unsupported_parameter")
    return asked


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise RequestRefused("messages: expected a list of at least one message", param="messages")
    return tuple(read_message(message, f"messages[{index}]") for index, message in enumerate(value))


def read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestRefused(f"{where}: expected an object with a role and content", param=where, code="invalid_type")
    known = {"role", "content", "name", "refusal", *MESSAGE_FIELDS.get(message["role"], ())}
    if others := [name for name, value in message.items() if value is not None and name not in known]:
        raise RequestRefused(f"{where}: {short_json(others[0])} is not supported; expected role and content", param=where,
                             code="unsupported_parameter")
    said: dict[str, Any] = {"role": message["role"]}
    if message.get("tool_calls"):
        calls = read_tool_calls(message["tool_calls"], where)
        return said | {"content": _content(message.get("content") or "", where), "tool_calls": calls}
    answers = {name: message[name] for name in ("tool_call_id", "name") if message["role"] == "tool" and isinstance(message.get(name), str)}
    return said | {"content": _content(message.get("content"), where)} | answers


def _content(content: Any, where: str) -> str:
    """Text, or parts that are all text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [text for part in parts if isinstance(part, dict) and part.get("type") == "text" and isinstance(text := part.get("text"), str)]
    if not texts or len(texts) != len(parts):
        raise RequestRefused(f"{where}.content: expected text, or parts that are all text", param=where, code="invalid_type")
    return "".join(texts)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """OpenAI's four forms: a text, texts, ids, lists of ids."""
    if isinstance(value, str) or _are_ids(value):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_PROMPTS or not all(isinstance(p, str) or _are_ids(p) for p in value):
        raise RequestRefused(f"prompt: expected text, token ids, or a list of 1 to {MOST_PROMPTS} of either", param="prompt",
                             code="invalid_type")
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int for id in value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stops):
        raise RequestRefused(f"stop: expected a string, or up to {MOST_STOPS}, of 1 to {LONGEST_STOP} characters", param="stop",
                      code="invalid_value")
    return tuple(stops)


def _usage_in_stream(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream or not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise RequestRefused("stream_options: expected {\"include_usage\": true}, and only with stream", param="stream_options")
    return options.get("include_usage", False)


OBJECTS = {"chat": ("chatcmpl", "chat.completion", "chat.completion.chunk"), "text": ("cmpl", "text_completion", "text_completion")}
FINISH_REASONS = {"stop": "stop", "stop string": "stop", "length": "length"}


@dataclass(frozen=True)
class ApiReply:
    """One request's reply in the making: what all its pieces share."""

    asked: ApiRequest
    model: HostedModel
    prompts: tuple[tuple[int, ...], ...]
    seed: int
    id: str
    created: int
    version: str = ""  # of the weights that answer, from when the engine has taken the request

    @classmethod
    def to(cls, asked: ApiRequest, model: HostedModel, prompts: tuple[tuple[int, ...], ...], seed: int) -> "ApiReply":
        return cls(asked, model, prompts, seed, f"{OBJECTS[asked.kind][0]}-{secrets.token_hex(12)}", int(time.time()))

    def whole(self, ended: Mapping[int, tuple[Completion, RankedTokens | None]]) -> dict[str, Any]:
        choices = [self._choice(index, *ended[index]) for index in sorted(ended)]
        return self._envelope(OBJECTS[self.asked.kind][1], choices) | {"usage": self.usage(c for c, _ in ended.values())}

    def opening(self) -> list[dict[str, Any]]:
        """A chat's stream says first who speaks."""
        if self.asked.kind == "text":
            return []
        return [self._piece(index, {"delta": {"role": "assistant", "content": ""}}) for index in range(self.asked.n)]

    def piece(self, index: int, progress: CompletionProgress) -> dict[str, Any]:
        """Chunk of a streamed reply, and with the last of it why it ended."""
        said: dict[str, Any] = {"delta": self._delta(index, progress)} if self.asked.kind == "chat" else {"text": progress.text}
        if self.asked.logprobs and progress.ids:
            said["logprobs"] = self._logprobs(progress.ids, progress.logprobs, None)
        if self.asked.token_ids:
            said["token_ids"] = list(progress.ids)
        reason = None if progress.completion is None else self._reason(progress.completion, said.get("delta", {}))
        return self._piece(index, said, reason)

    def _delta(self, index: int, progress: CompletionProgress) -> dict[str, Any]:
        """Streamed delta of a message. With tools a turn's text comes when it is whole: until then nobody knows what of it is a call."""
        if not self.asked.form.tools:
            return {"content": progress.text}
        if progress.completion is None:
            return {"content": ""}
        message = self.message(index, progress.completion)
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
        return {name: value for name, value in message.items() if name in ("content", "tool_call_faults")} | (
            {"tool_calls": calls} if calls else {})

    def message(self, index: int, completion: Completion) -> dict[str, Any]:
        if not self.asked.form.tools:
            return {"role": "assistant", "content": completion.text, "refusal": None}
        return spoken_message(completion, self.model.tokenizer, self.model.tool_format, f"{self.id}/{index}", self.asked.form.tools)

    @staticmethod
    def _reason(completion: Completion, message: Mapping[str, Any]) -> str:
        reason = FINISH_REASONS[completion.ended]
        return "tool_calls" if reason == "stop" and message.get("tool_calls") else reason

    def last(self, completions: Iterable[Completion]) -> dict[str, Any]:
        return self._envelope(OBJECTS[self.asked.kind][2], []) | {"usage": self.usage(completions)}

    def usage(self, completions: Iterable[Completion]) -> dict[str, int]:
        """A prompt counts once, however many completions it has."""
        asked, said = sum(map(len, self.prompts)), sum(len(completion.ids) for completion in completions)
        return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}

    def _choice(self, index: int, completion: Completion, scores: RankedTokens | None) -> dict[str, Any]:
        said: dict[str, Any] = {"text": completion.text}
        if self.asked.kind == "chat":
            said = {"message": self.message(index, completion)}
        logprobs = self._logprobs(completion.ids, completion.logprobs, scores) if self.asked.logprobs else None
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": self._reason(completion, said.get("message", {}))}
        if self.asked.token_ids:
            choice |= {"prompt_token_ids": list(self.prompts[index // self.asked.n]), "token_ids": list(completion.ids)}
        return choice

    def _piece(self, index: int, said: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._envelope(OBJECTS[self.asked.kind][2], [{"index": index, "logprobs": None, **said, "finish_reason": reason}])

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """`seed` is ours: with it anyone can have the same answer again, whether it was asked for or not."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model.name, "choices": choices,
                "system_fingerprint": self.version, "seed": self.seed}

    def _logprobs(self, ids: Sequence[int], drawn: Sequence[float], scores: RankedTokens | None) -> dict[str, Any]:
        likeliest: Sequence[Sequence[tuple[int, float]]] = [()] * len(ids) if scores is None else scores.likeliest
        chosen = scores.chosen if scores is not None and self.asked.under == "model" else drawn
        write = chat_logprobs if self.asked.kind == "chat" else text_logprobs
        return write(self.model.tokenizer, ids, chosen, likeliest)


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float],
                  likeliest: Sequence[Sequence[tuple[int, float]]]) -> dict[str, Any]:
    def entry(id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.bytes_of(id)
        return {"token": tokenizer.piece(id), "logprob": logprob, "bytes": None if data is None else list(data)}

    content = [entry(id, logprob) | {"top_logprobs": [entry(*pair) for pair in pairs]}
               for id, logprob, pairs in zip(ids, logprobs, likeliest, strict=True)]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float],
                  likeliest: Sequence[Sequence[tuple[int, float]]]) -> dict[str, Any]:
    """Offsets count the characters of the tokens as they are shown, from the beginning of the completion or of its piece."""
    pieces = [tokenizer.piece(id) for id in ids]
    offsets = list(accumulate(map(len, pieces), initial=0))[:-1]
    return {"tokens": pieces, "token_logprobs": list(logprobs), "text_offset": offsets,
            "top_logprobs": [{tokenizer.piece(id): logprob for id, logprob in pairs} for pairs in likeliest]}


def model_object(model: HostedModel, parent: str | None) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "assay", "parent": parent,
            "system_fingerprint": model.engine.version, "proven": model.proven, "max_model_len": model.engine.length,
            "dtype": str(model.engine.weights.dtype).removeprefix("torch."),
            "bytes": model.memory, "verdicts": [verdict.to_json() for verdict in model.verdicts]}

"""Server faults: answers that a client would believe, drawn or scored otherwise than they say, cut, miscounted, or of another request."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from assay.generate.generation_request import Completion, CompletionProgress, GenerationRequest, Sampling
from assay.guard.known_requests import CHECK
from assay.serving import endpoints
from assay.serving.engine_thread import EngineThread
from assay.serving.openai_protocol import ApiReply
from assay.serving.request_fields import RequestFields
from assay.testing.fault_injection import Plant, fault, in_place_of
from assay.testing.tiny_rehearsed import a_rehearsed_server

_SEEDS = itertools.count(1000)


def server_fault(name: str, *rows: str) -> Callable[[Plant], Plant]:
    return fault(name, rows=rows, stage="serve", check=CHECK, job=a_rehearsed_server)


@server_fault("log-probabilities one token late", "N33")
@in_place_of(ApiReply, "_logprobs")
def one_late(usual: Any, self: ApiReply, ids: Any, drawn: Any, scores: Any) -> Any:
    return usual(self, ids, [*drawn[-1:], *drawn[:-1]], scores)


@server_fault("request's temperature not heard", "R08")
@in_place_of(endpoints, "Sampling")
def one_temperature(usual: Any, *given: Any) -> Sampling:
    return replace(usual(*given), temperature=1.0) if given and given[1] else usual(*given)


@server_fault("request's top-p not heard", "R10")
@in_place_of(endpoints, "Sampling")
def whole_vocabulary(usual: Any, *given: Any) -> Sampling:
    return replace(usual(*given), top_p=1.0)


@server_fault("request's seed not heard", "R14")
@in_place_of(endpoints, "Sampling")
def other_seed(usual: Any, *given: Any) -> Sampling:
    return replace(usual(*given), seed=next(_SEEDS)) if given else usual()


@server_fault("plain log-probabilities for those of the draw", "R09")
@in_place_of(endpoints, "PendingCall")
def ranked_plainly(usual: Any, model: Any, request: Any, deliver: Any, rank: Sampling | None, alternatives: int) -> Any:
    return usual(model, request, deliver, rank and Sampling(), alternatives)


@server_fault("choices of one prompt all the same", "R13")
@in_place_of(ApiReply, "whole")
def one_choice(usual: Any, self: ApiReply, ended: Any) -> dict[str, Any]:
    return usual(self, {index: ended[index - index % self.asked.n] for index in ended})


@server_fault("request's stop string not heard")
@in_place_of(endpoints, "GenerationRequest")
def never_cut(usual: Any, prompt: Any, sampling: Sampling, **given: Any) -> GenerationRequest:
    return usual(prompt, sampling, **given | {"stop": ()})


@server_fault("stop token shown to the client", "D09")
@in_place_of(ApiReply, "message")
def stop_shown(usual: Any, self: ApiReply, index: int, completion: Completion) -> dict[str, Any]:
    return usual(self, index, replace(completion, text=self.model.tokenizer.decode(completion.ids)))


@server_fault("stream without its last piece")
@in_place_of(ApiReply, "piece")
def end_dropped(usual: Any, self: ApiReply, index: int, progress: CompletionProgress) -> dict[str, Any]:
    return usual(self, index, progress if progress.completion is None else replace(progress, text=""))


@server_fault("usage without the stop token")
@in_place_of(ApiReply, "usage")
def one_less(usual: Any, self: ApiReply, completions: Any) -> dict[str, int]:
    told = usual(self, completions)
    return told | {"completion_tokens": told["completion_tokens"] - 1}


@server_fault("unknown field of a request dropped")
@in_place_of(RequestFields, "rest")
def not_heard(_: Any, self: RequestFields) -> None:
    self.left.clear()


@server_fault("chat without the template's beginning of an answer", "D11")
@in_place_of(endpoints, "render_chat")
def no_beginning(_: Any, tokenizer: Any, messages: Any, tools: Any, spoken: Any) -> str:
    return tokenizer.render(messages, tools=list(tools) or None)


@server_fault("tools left out of the prompt")
@in_place_of(endpoints, "render_chat")
def no_tools(usual: Any, tokenizer: Any, messages: Any, tools: Any, spoken: Any) -> str:
    return usual(tokenizer, messages, (), spoken)


@server_fault("adapter's name answered by its base", "R03", "M06")
@in_place_of(EngineThread, "find")
def always_the_first(usual: Any, self: EngineThread, name: str) -> Any:
    usual(self, name)
    return self.first


@server_fault("room of a request never given back")
@in_place_of(EngineThread, "release")
def never_released(_: Any, self: EngineThread, model: Any, members: int) -> None:
    """After a day the server is full, and nobody is served."""


@server_fault("adapter said to be retired that stays")
@in_place_of(EngineThread, "retire")
def nobody_retires(usual: Any, self: EngineThread, name: str) -> None:
    """Requests go on to weights that their owner took back."""

"""Remote sampling: an engine over HTTP, on weights that it is handed by folder: vLLM 0.20 or later, or `assay serve --rollouts`.

Token in, token out: ids are sent and ids come back, each with the log-probability that it was drawn with, and every reply names the
version of the weights that it came from. Whatever cannot be read so is refused. A reply's name of a version is the server's word;
what its weights and its cache of prefixes really are is asked by `guard/remote_policy.py`.
"""

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from assay.errors import AssayError, GuardStop, UsageError
from assay.generate.generation_request import Completion, CompletionProgress, FinishReason, GenerationRequest, Sampling
from assay.model.tokenizer import Tokenizer
from assay.seeds import derive
from assay.verdict import Verdict, proven, refuted

LEAST_VLLM = (0, 20)
REPLY_SECONDS = 600.0  # that one reply may take: a hand-over of weights, or a prompt's completions
REQUESTS_AT_ONCE = 64
RESETS = 5  # tries of a cache reset, which fails while blocks are held
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ENDED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class RemoteRequest(NamedTuple):
    """`group` completions of one prompt; the server draws them at `seed`."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    group: int
    stop_ids: tuple[int, ...]


class RemoteDraw(NamedTuple):
    """One completion as a reply of the server reports it."""

    ids: list[int]
    logprobs: list[float | None]
    reason: str
    version: str


class RemoteReply(NamedTuple):
    prompt: list[int] | None  # the ids that the server says it answered
    draws: list[RemoteDraw]


class RemoteServer(Protocol):
    """`words` name the engine with its version. `adapters`: what it is handed is an adapter on the weights that it was started with."""

    words: str
    dtype: torch.dtype
    length: int  # tokens of a prompt with its completion
    keeps_probes: bool  # whether a folder may hold files beside the model's own

    def take(self, folder: Path, version: str) -> None: ...

    def ask(self, request: RemoteRequest) -> RemoteReply: ...


class RemoteEngine:
    """Engine for rollouts on a server: `load` sends weights, `submit` and `drain` have completions sampled."""

    def __init__(self, server: RemoteServer, *, stop_ids: Collection[int], length: int, tokenizer: Tokenizer | None = None):
        self.server, self.stop_ids, self.length, self.tokenizer = server, tuple(stop_ids), min(length, server.length), tokenizer
        self.version = ""
        self.replies = self.tokens = 0  # since the last load
        self._tickets = 0
        self._waiting: dict[int, GenerationRequest] = {}

    def load(self, version: str, folder: Path) -> None:
        """The weights in a folder that the server can read too, under a name that no weights had before."""
        if self._waiting:
            raise UsageError(f"{len(self._waiting)} requests wait and would be answered by {version!r}; drain them first")
        self.server.take(folder, version)
        self.version, self.replies, self.tokens = version, 0, 0

    def submit(self, request: GenerationRequest) -> int:
        if len(request.prompt) + request.sampling.max_new > self.length:
            raise UsageError(f"the prompt has {len(request.prompt)} tokens and {request.sampling.max_new} new ones are asked for; the "
                             f"server's context is {self.length} tokens")
        if request.stop or request.stream or request.grammar is not None:
            raise UsageError("a remote engine draws whole completions of token ids: stop strings, streams and grammars are not sent")
        self._tickets += 1
        self._waiting[self._tickets] = request
        return self._tickets

    def drain(self) -> list[CompletionProgress]:
        waiting, self._waiting = self._waiting, {}
        with ThreadPoolExecutor(min(REQUESTS_AT_ONCE, max(1, len(waiting)))) as threads:
            found = list(threads.map(self._complete, waiting.values()))
        return [CompletionProgress(ticket, member, completion.ids, completion.logprobs, "", completion)
                for ticket, completions in zip(waiting, found, strict=True) for member, completion in enumerate(completions)]

    def complete(self, prompts: Sequence[tuple[int, ...]], sampling: Sampling, address: tuple[str | int, ...],
                 group: int) -> list[list[Completion]]:
        """`group` completions of each, at once."""
        tickets = [self.submit(GenerationRequest(prompt, sampling, (*address, place), group)) for place, prompt in enumerate(prompts)]
        ended = {(progress.ticket, progress.member): progress.completion for progress in self.drain()}
        return [[found for member in range(group) if (found := ended[ticket, member]) is not None] for ticket in tickets]

    def check_replies(self) -> Verdict:
        """Verdict on the server's replies; what could not be read was refused when it came."""
        return proven("reply", f"{self.replies} replies of {self.server.words} answered the ids that they were sent, {self.tokens} tokens "
                      "each with its log-probability", replies=self.replies, tokens=self.tokens)

    def _complete(self, request: GenerationRequest) -> list[Completion]:
        stop_ids = self.stop_ids if request.stop_ids is None else request.stop_ids
        seed = derive(request.sampling.seed, "remote", *request.address, request.first)
        try:
            reply = self.server.ask(RemoteRequest(request.prompt, request.sampling, seed, request.group, stop_ids))
            wrong = fault_of_reply(reply, request)
        except (KeyError, IndexError, TypeError) as error:
            wrong = f"a reply has not the fields that were asked for ({type(error).__name__}: {error})"
        if wrong is not None:
            verdict = refuted("reply", f"{self.server.words}: {wrong}")
            raise GuardStop(f"REFUTED reply: {verdict.reason}", [verdict])
        self.replies += 1
        self.tokens += sum(len(draw.ids) for draw in reply.draws)
        return [self._completion(draw) for draw in reply.draws]

    def _completion(self, draw: RemoteDraw) -> Completion:
        text = None if self.tokenizer is None else self.tokenizer.decode(draw.ids, special=False)
        logprobs = tuple(value for value in draw.logprobs if value is not None)
        return Completion(tuple(draw.ids), logprobs, ENDED[draw.reason], draw.version, text)


def fault_of_reply(reply: RemoteReply, request: GenerationRequest) -> str | None:
    """Why a reply cannot be trained on; None where it can."""
    if reply.prompt is None or tuple(reply.prompt) != request.prompt:
        said = "does not say which ids it answered" if reply.prompt is None else f"answered other ids ({len(reply.prompt)} of them)"
        return f"asked about {len(request.prompt)} ids, it {said}: what it was sent was decoded and encoded again, or cut"
    if len(reply.draws) != request.group:
        return f"{request.group} completions were asked for and {len(reply.draws)} came"
    for draw in reply.draws:
        if len(draw.ids) != len(draw.logprobs) or not draw.ids:
            return f"a completion of {len(draw.ids)} ids came with {len(draw.logprobs)} log-probabilities; expected one for each"
        if len(draw.ids) > request.sampling.max_new:
            return f"a completion has {len(draw.ids)} ids where at most {request.sampling.max_new} were asked for"
        unusable = [value for value in draw.logprobs if value is None or not math.isfinite(value) or value > 0]
        if unusable:
            return f"a token has log-probability {unusable[0]}: expected a number of at most 0"
        if draw.reason not in ENDED:
            return f"a completion ended by {draw.reason!r}: expected a stop token or its length"
    return None

# ---------------------------------------------------------------- servers


def connect(url: str, *, temperature: float, adapters: bool) -> RemoteServer:
    """The server behind a URL, asked what it is; UsageError where it cannot do what rollouts need."""
    http = HttpServer(url.rstrip("/").removesuffix("/v1"), os.environ.get("ASSAY_TOKEN") or None)
    version = http.get("/version", absent_ok=True)
    if version is not None:
        return VllmServer.asked(http, str(version.get("version", "")), temperature=temperature, adapters=adapters)
    return AssayServer.asked(http)


@dataclass(eq=False)
class VllmServer:
    """vLLM with VLLM_SERVER_DEV_MODE=1 and, where it knows the option, --enable-scale-out; for adapters also --enable-lora and
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. A whole model is reloaded in place; an adapter joins under a name of its own a version."""

    http: "HttpServer"
    words: str
    dtype: torch.dtype
    length: int
    base: str  # its name for the weights that it was started with
    adapters: bool
    keeps_probes = False  # vLLM reads every safetensors file of a folder

    def __post_init__(self) -> None:
        self.model = self.base  # what is asked for

    @classmethod
    def asked(cls, http: "HttpServer", version: str, *, temperature: float, adapters: bool) -> "VllmServer":
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers < LEAST_VLLM:
            raise UsageError(f"{http.url}: vLLM {version or 'of an unknown version'}; rollouts need {LEAST_VLLM[0]}.{LEAST_VLLM[1]} or "
                             "later")
        info = http.get("/server_info?config_format=json", absent_ok=True)
        if info is None:
            raise UsageError(f"{http.url}: vLLM takes no new weights as it was started; set VLLM_SERVER_DEV_MODE=1 for it")
        model = info["vllm_config"]["model_config"]
        if temperature != 1 and model.get("logprobs_mode") != "processed_logprobs":
            raise UsageError(f"{http.url}: vLLM gives log-probabilities before the temperature ({model.get('logprobs_mode')}), and "
                             f"--temperature is {temperature}; start it with --logprobs-mode processed_logprobs")
        if not adapters and http.get("/weight_info", absent_ok=True) is None:
            raise UsageError(f"{http.url}: vLLM {version} does not say which weights a reply came from; use a later one, or train an "
                             "adapter (--lora-r), whose versions have names of their own")
        served = http.get("/v1/models")["data"][0]
        return cls(http, f"vLLM {version}", dtype_named(str(model["dtype"]), http.url), int(model["max_model_len"]), served["id"], adapters)

    def take(self, folder: Path, version: str) -> None:
        """Load new weights, in this order: weights, cache, name. Nothing is asked of the server before all three are done."""
        if self.adapters:
            self._join(folder, version)
        else:
            self.http.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self._reset_cache()
        if not self.adapters:
            self.http.post("/update_weight_version", {"new_version": version})

    def _join(self, folder: Path, version: str) -> None:
        """An adapter of the same name is of a session that was interrupted: the one in the folder takes its place."""
        if version in {model["id"] for model in self.http.get("/v1/models")["data"]}:
            self.http.post("/v1/unload_lora_adapter", {"lora_name": version})
        self.http.post("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(folder)})
        before, self.model = self.model, version
        if before not in (self.base, version):
            self.http.post("/v1/unload_lora_adapter", {"lora_name": before})

    def _reset_cache(self) -> None:
        """Prefixes are cached by their ids alone: after a reload, keys and values of the old weights would answer."""
        for tried in range(RESETS):
            if self.http.post("/reset_prefix_cache", {}).get("success", True):
                return
            time.sleep(0.2 * 2**tried)
        raise GuardStop(f"{self.http.url}: vLLM did not reset its prefix cache in {RESETS} tries, so that keys of the old weights would "
                        "answer; let nobody else use this server")

    def ask(self, request: RemoteRequest) -> RemoteReply:
        sampling = request.sampling
        said = self.http.post("/inference/v1/generate", {
            "model": self.model, "token_ids": list(request.prompt), "return_token_ids": True, "sampling_params": {
                "n": request.group, "seed": request.seed, "max_tokens": sampling.max_new, "temperature": sampling.temperature,
                "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty, "logprobs": 0, "stop_token_ids": list(request.stop_ids),
                "ignore_eos": True, "detokenize": False}})
        draws = [self._draw(choice, said) for choice in sorted(said["choices"], key=lambda choice: choice["index"])]
        return RemoteReply(said.get("prompt_token_ids"), draws)

    def _draw(self, choice: Mapping[str, Any], said: Mapping[str, Any]) -> RemoteDraw:
        """The ids of the log-probabilities must be the ids of the completion: their number is what the reader compares."""
        entries = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [entry["logprob"] for entry, token in zip(entries, choice["token_ids"], strict=False) if entry["token_id"] == token]
        spans = [span["version"] for span in choice.get("weight_versions") or ()]
        version = said["model"] if self.adapters else "+".join(dict.fromkeys(spans))
        return RemoteDraw(choice["token_ids"], logprobs, choice["finish_reason"], version)


@dataclass(eq=False)
class AssayServer:
    """`assay serve MODEL --rollouts`. Weights, keys and values of a version are made anew from its folder, under the model's name."""

    http: "HttpServer"
    words: str
    dtype: torch.dtype
    length: int
    model: str
    keeps_probes = True  # the recorded answers, which the server compares its own with

    @classmethod
    def asked(cls, http: "HttpServer") -> "AssayServer":
        models = (http.get("/v1/models", absent_ok=True) or {}).get("data") or [{}]
        if models[0].get("owned_by") != "assay":
            raise UsageError(f"{http.url}: neither vLLM nor assay serve answers there; start one of them, and give its address without /v1")
        if not models[0].get("takes_weights"):
            raise UsageError(f"{http.url}: assay serve takes no new weights as it was started; start it with --rollouts")
        return cls(http, "assay serve", dtype_named(models[0]["dtype"], http.url), models[0]["max_model_len"], models[0]["id"])

    def take(self, folder: Path, version: str) -> None:
        found = self.http.post("/v1/weights", {"path": str(folder), "version": version})["system_fingerprint"]
        if found != version:
            raise GuardStop(f"{self.http.url}: weights were handed over as {version!r} and the server calls them {found!r}")

    def ask(self, request: RemoteRequest) -> RemoteReply:
        sampling = request.sampling
        said = self.http.post("/v1/completions", {
            "model": self.model, "prompt": list(request.prompt), "n": request.group, "seed": request.seed, "max_tokens": sampling.max_new,
            "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty, "logprobs": 0, "return_token_ids": True})
        choices = sorted(said["choices"], key=lambda choice: choice["index"])
        return RemoteReply(choices[0]["prompt_token_ids"] if choices else None, [
            RemoteDraw(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"], said["system_fingerprint"])
            for choice in choices])


def dtype_named(name: str, where: str) -> torch.dtype:
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise UsageError(f"{where}: computes in {name}; expected one of {', '.join(DTYPES)}, whose rounding is known")
    return found

# ---------------------------------------------------------------- HTTP


@dataclass(frozen=True)
class HttpServer:
    """JSON over HTTP, by no proxy. A server that is busy (429) is asked again; one that is gone ends the run, which can be resumed."""

    url: str
    token: str | None = None

    def get(self, path: str, *, absent_ok: bool = False) -> Any:
        """GET a path; None where there is no such path, if that is an answer."""
        return self._ask(path, None, absent_ok)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._ask(path, body, False)

    def _ask(self, path: str, body: Mapping[str, Any] | None, absent_ok: bool) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode(), headers)
        deadline = time.monotonic() + REPLY_SECONDS
        while True:
            try:
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=REPLY_SECONDS) as reply:
                    return json_or_nothing(reply.read())
            except urllib.error.HTTPError as error:
                if error.code == 404 and absent_ok:
                    return None
                if error.code != 429 or time.monotonic() > deadline:
                    words = error.read().decode(errors="replace")[:500]
                    raise AssayError(f"{self.url}{path}: refused with {error.code}: {words}") from None
                time.sleep(float(error.headers.get("retry-after") or 1))
            except (urllib.error.URLError, OSError, ValueError) as error:
                why = getattr(error, "reason", error)
                raise AssayError(f"{self.url}{path}: {why}; is the server that makes the rollouts running? The same command goes on with "
                                 "the run") from None


def json_or_nothing(data: bytes) -> Any:
    """A reply without a JSON object, such as an empty one, says nothing but that it succeeded."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

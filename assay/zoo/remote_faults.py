"""Remote rollout faults: a server that keeps old keys or weights, answers under another name, of other ids, or with other numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from assay.errors import GuardStop
from assay.generate.generation_request import Sampling
from assay.generate.remote import AssayServer, RemoteDraw, RemoteEngine, RemoteReply, RemoteRequest, connect
from assay.guard.policy_identity import check_identity, check_version, measure_logprob_floor, version_name
from assay.model.transformer import Transformer
from assay.recipes.prompts import Prompt
from assay.recipes.remote_sampler import RemoteSampler
from assay.recipes.rollout_batch import Layout, batch_logprobs, batch_of, of_completions
from assay.serving.engine_thread import EngineThread, ServerSize
from assay.serving.hosted_model import HostedModel
from assay.serving.server import serve_in_background
from assay.store.artifact import build_model, open_artifact
from assay.testing import tiny_grpo
from assay.testing.fault_injection import Plant, fault, in_place_of
from assay.testing.tiny_models import nudge, save_model, tiny_model, tokenizer_and_stops
from assay.verdict import Verdict

PROMPTS, TEMPERATURE, ROLLOUT_NEW = 4, 0.7, 6
LONGEST_PROMPT = 40  # tokens: prompts of a rollout are shorter, canaries longer


def a_remote_rollout(folder: Path, plant: Plant) -> list[Verdict]:
    """Two rollouts by `assay serve --rollouts`, with an update between them."""
    model = nudge(tiny_model("qwen3"), 0.3)
    first = save_model(folder / "base", model).folder
    serving = EngineThread(ServerSize(slots=8, takes_weights=True))
    serving.open("policy", first)
    with serve_in_background(serving) as url, plant(folder):
        try:
            return tiny_grpo.decisive(_two_rollouts(model, url, folder))
        except GuardStop as stop:
            return list(stop.verdicts)


def _two_rollouts(model: Transformer, url: str, folder: Path) -> list[Verdict]:
    tokenizer, stops = tokenizer_and_stops()
    prompts = [Prompt(f"prompts.jsonl:{n}:{n}", tuple(range(40 + 7 * n, 60 + 7 * n)), f"prompt {n}", {}) for n in range(PROMPTS)]
    sampler = RemoteSampler(model, tokenizer, stops, connect(url, temperature=TEMPERATURE, adapters=False),
                            write=lambda place, _: save_model(place, model), folder=folder / "handed_over",
                            texts=[prompt.ids for prompt in prompts], temperature=TEMPERATURE, cap=3.0)
    own = measure_logprob_floor(model, [(*prompt.ids, *prompt.ids) for prompt in prompts], TEMPERATURE)
    sampling, verdicts = Sampling(max_new=ROLLOUT_NEW, temperature=TEMPERATURE), list[Verdict]()
    for step in range(2):
        sampler.load(step)
        groups = sampler.draw(prompts, sampling, ("rollout", step), 4)
        drawn = [(prompt, said) for prompt, group in zip(prompts, groups, strict=True) for said in group]
        batch = batch_of(drawn, [1.0] * len(drawn), [True] * len(drawn), "token", cap=ROLLOUT_NEW)
        trainer = batch_logprobs(model, batch, TEMPERATURE, Layout(16), entropy=False)
        sampler.corrected(batch, lambda _, found=trainer: found)  # type: ignore[misc]
        due = of_completions(trainer, batch, [prompt.ids for prompt, _ in drawn])
        verdicts += [check_version([said.version for _, said in drawn], version_name(step, sampler.fingerprint)),
                     check_identity([said.logprobs for _, said in drawn], due, sampler.identity_floor(own)), *sampler.verdicts()]
        nudge(model, 0.05, seed=1)
    return verdicts


def remote_fault(name: str, rows: tuple[str, ...], stage: str, check: str) -> Callable[[Plant], Plant]:
    return fault(name, rows=rows, stage=stage, check=check, job=a_remote_rollout)


def replies_changed(change: Callable[[RemoteReply, RemoteRequest], RemoteReply]) -> Plant:
    """What the server says is changed on its way."""
    return in_place_of(AssayServer, "ask")(lambda usual, server, request: change(usual(server, request), request))


def each_draw(change: Callable[[RemoteDraw], RemoteDraw]) -> Callable[[RemoteReply, RemoteRequest], RemoteReply]:
    """Change every draw of rollouts alone: the canaries are answered as they should be."""
    def changed(reply: RemoteReply, request: RemoteRequest) -> RemoteReply:
        return reply if len(request.prompt) > LONGEST_PROMPT else reply._replace(draws=[change(draw) for draw in reply.draws])
    return changed

# ---------------------------------------------------------------- the hand-over


@remote_fault("prefix cache that outlives a reload", ("N26", "R06"), "sync", "canaries")
@in_place_of(EngineThread, "take_weights")
def stale_prefixes(_: Any, self: EngineThread, path: str, version: str) -> HostedModel:
    """Weights are written in place, and prefixes are found by their ids: what older weights made of a prompt goes on answering."""
    def write() -> HostedModel:
        engine = self.first.engine
        new = dict(build_model(open_artifact(path)).named_parameters())
        with torch.no_grad():
            for name, parameter in engine.weights.source.named_parameters():
                parameter.copy_(new[name])
        engine.weights.load()
        engine.version = version
        return self.first
    return self.ask(write).result()


@remote_fault("adapter name reused", ("N39", "R02"), "sync", "canaries")
@in_place_of(EngineThread, "take_weights")
def known_name(usual: Any, self: EngineThread, path: str, version: str) -> HostedModel:
    """The server knows the name that weights are handed over under, and goes on with what it holds under it."""
    if "@" in self.first.engine.version:
        self.first.engine.version = version
        return self.first
    return usual(self, path, version)


@remote_fault("rollouts that never get new weights", ("N39", "R01"), "sync", "canaries")
@in_place_of(RemoteEngine, "load")
def never_handed_over(usual: Any, self: RemoteEngine, version: str, folder: Path) -> None:
    """The hand-over sits in a branch that is taken once."""
    if not self.version:
        usual(self, version, folder)
    self.version = version


remote_fault("reply of another version", ("N39", "R03"), "sync", "version")(
    # Behind one address stand two servers, and one of them was not told.
    replies_changed(each_draw(lambda draw: draw._replace(version="0@before"))))

# ---------------------------------------------------------------- what a reply says


remote_fault("server's log-probabilities before the temperature", ("R09",), "logprob", "engine_floor")(
    in_place_of(AssayServer, "ask")(lambda usual, server, request: RemoteReply(
        (said := usual(server, request)).prompt,
        [draw._replace(logprobs=[value * request.sampling.temperature for value in draw.logprobs]) for draw in said.draws])))
remote_fault("server's log-probabilities off by a little", ("R11",), "logprob", "identity")(
    replies_changed(each_draw(lambda draw: draw._replace(logprobs=[value - 1e-3 for value in draw.logprobs if value is not None]))))
remote_fault("server's log-probabilities shifted by a token", ("N33",), "logprob", "identity")(
    replies_changed(each_draw(lambda draw: draw._replace(logprobs=draw.logprobs[-1:] + draw.logprobs[:-1]))))
remote_fault("another policy behind the importance weights", ("N32",), "logprob", "importance")(
    # A half of the tokens was all but certain to the server: their weights are next to nothing, and nothing is left to learn from.
    replies_changed(each_draw(lambda draw: draw._replace(logprobs=[-1e-3 if place % 2 else value
                                                                   for place, value in enumerate(draw.logprobs)]))))
remote_fault("log-probability that is no number", ("N32",), "logprob", "reply")(
    replies_changed(each_draw(lambda draw: draw._replace(logprobs=[None, *draw.logprobs[1:]]))))


@remote_fault("prompt encoded again by the server", ("N18", "R12"), "tokenise", "reply")
@in_place_of(AssayServer, "ask")
def encoded_by_the_server(usual: Any, self: AssayServer, request: RemoteRequest) -> RemoteReply:
    """A gateway speaks text: ids are decoded on the way in, and what comes of the text is answered."""
    tokenizer, _ = tokenizer_and_stops()
    text = tokenizer.decode(list(request.prompt))
    again = tuple(tokenizer.encode(text.replace("8", "８")))
    return usual(self, request._replace(prompt=again[: self.length - request.sampling.max_new]))

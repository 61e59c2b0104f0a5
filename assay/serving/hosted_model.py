"""Hosted model: a checkpoint under one name, its engine, and the check that the engine answers as the checkpoint recorded.

Every name has weights, keys and values of its own: loading one touches no other, and `memory` says what each holds.
Shapes: N places, V vocabulary.
"""

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from assay.agents.tool_calls import ToolFormat, format_for
from assay.errors import ArtifactError, UsageError
from assay.generate.engine import Engine
from assay.generate.generation_request import GenerationRequest, Sampling
from assay.generate.policy_logprobs import completion_logprobs, policy_logits, sampled_distribution, tokens_seen_before
from assay.generate.token_grammar import GrammarVocabulary
from assay.guard.trajectory_checks import check_tool_format
from assay.model.kv_cache import DecodeView, SlotCache
from assay.model.placement import place_for_inference, place_for_training, uncompiled
from assay.model.probe_logits import ProbeLogits, compute_probe_logits, probe_distance, probe_inputs, share_of_change
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.recipes.options import Trained
from assay.recipes.starting_model import TrainedWeights, trainable
from assay.store.artifact import Artifact, build_model, open_artifact, refuse_quarantined
from assay.verdict import Outcome, Verdict, overall, proven, refuted, unproven

# Relative distance of probe answers. In fp32 only rounding is between the two (1e-6 to 1e-5 seen). bf16 rounds at every layer and
# would hide a young adapter, so there the same weights are also asked in fp32.
SAME_ANSWERS = {torch.float32: 2e-4, torch.bfloat16: 1e-1}
WHOLE_CHANGE = 0.1  # how far from all of an adapter's change may show
_FAINT = 5e-5  # a change of answers that rounding may blur
# Nats a token between the engine and a pass without a cache: 1e-6 seen in fp32, 0.015 in bf16.
SAME_LOGPROBS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
TRIAL, TRIAL_PROMPT = Sampling(max_new=8), 16
_ROWS = 512  # of logits alive at once


@dataclass(eq=False)
class HostedModel:
    name: str
    artifact: Artifact
    engine: Engine
    verdicts: tuple[Verdict, ...]
    created: int = field(default_factory=lambda: int(time.time()))
    members: int = 0  # completions under way or waiting
    prompt_tokens: int = 0  # of completions that ended
    completion_tokens: int = 0
    broken: str | None = None  # why it serves no more
    trained: TrainedWeights | None = None  # of a policy that learns: the whole model, or an adapter on its base

    @property
    def digest(self) -> str:
        """Digest of the checkpoint's own weights: an adapter's, or a whole model's."""
        return self.artifact.digest

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.artifact.tokenizer is not None, "opened() refuses a model without one"
        return self.artifact.tokenizer

    @property
    def tool_format(self) -> ToolFormat:
        return format_for(self.tokenizer.template)

    @functools.cached_property
    def unread_tools(self) -> str | None:
        """Why the model's tool calls could not be read; None where they can, or where its template does not say how it calls."""
        found = check_tool_format(self.tokenizer, self.tool_format)
        return found.reason if found.outcome is Outcome.REFUTED else None

    @functools.cached_property
    def forms(self) -> GrammarVocabulary:
        """Vocabulary of grammars, made when a form is first asked for: a large vocabulary takes a second."""
        return GrammarVocabulary(self.tokenizer, vocab=self.engine.weights.model.config.vocab, stop_ids=self.engine.stop_ids)

    @property
    def proven(self) -> bool:
        return has_hallmark(self.artifact)

    @property
    def memory(self) -> int:
        """Bytes of weights, keys and values."""
        weights = {id(p): p for model in (self.engine.weights.source, self.engine.weights.model) for p in model.parameters()}
        cache = self.engine.slots.cache
        return sum(t.numel() * t.element_size() for t in (*weights.values(), *cache.keys, *cache.values))


def open_for_serving(path: str | Path, *, base: str | Path | None = None, hallmark: bool = False) -> Artifact:
    """The artifact to be served; with `hallmark` only an adapter that a fresh process has proven."""
    artifact = open_artifact(path, base=base)
    if artifact.tokenizer is None:
        raise UsageError(f"{artifact.path}: there is no tokenizer here, so text means nothing to it; add tokenizer.json")
    if hallmark and artifact.patch is None:
        raise UsageError(f"{artifact.path}: a whole model, and only adapters join a running server; start another for it")
    if hallmark and not has_hallmark(artifact):
        raise ArtifactError(f"{artifact.path}: has no hallmark, so nobody has proven these bytes; assay prove {artifact.path}")
    return artifact


def has_hallmark(artifact: Artifact) -> bool:
    return artifact.raw.checkpoint is not None and artifact.raw.checkpoint.hallmark is not None


def host_model(name: str, artifact: Artifact, *, slots: int, length: int, device: str, dtype: torch.dtype,
               learns: Trained | None = None, version: str | None = None) -> HostedModel:
    """A model that is ready for requests; ArtifactError where its engine does not answer as the checkpoint recorded. `learns`: what of
    it is trained, by the options of a recipe. `version`: what its replies call the weights, if not by their digest."""
    trained = None if learns is None else _learning_weights(learns, artifact)
    if trained is not None:
        model = place_for_training(trained.model, device, compute=dtype, compile=False)
    else:
        model = place_for_inference(build_model(artifact, None), device, compute=dtype)
    engine = Engine(model, slots=slots, length=length, stop_ids=artifact.stops.stop_ids, version=version or artifact.digest,
                    tokenizer=artifact.tokenizer)
    verdicts = (check_served_fingerprint(engine, artifact), check_serving_path(engine))
    if overall(verdicts) is Outcome.REFUTED:
        wrong = "; ".join(verdict.reason for verdict in verdicts if verdict.outcome is Outcome.REFUTED)
        raise ArtifactError(f"{artifact.path}: not served as {name!r}: {wrong}")
    return HostedModel(name, artifact, engine, verdicts, trained=trained)


def _learning_weights(config: Trained, artifact: Artifact) -> TrainedWeights:
    """Weights to train, as for a recipe that begins with this artifact: every weight, a fresh adapter on it, or the adapter that it is."""
    assert artifact.tokenizer is not None, "opened() refuses a model without one"
    if config.lora_r and artifact.raw.place.kind == "gguf":
        raise UsageError(f"{artifact.path}: a GGUF file, and an adapter's base is a folder that other tools open; assay export it --to hf "
                         "first")
    return trainable(config, refuse_quarantined(artifact), artifact.tokenizer)

# ---------------------------------------------------------------- checks


def check_served_fingerprint(engine: Engine, artifact: Artifact) -> Verdict:
    """The served model answers the probe, token by token over a cache, as the live model did when it was saved."""
    probes = artifact.raw.checkpoint.probes() if artifact.raw.checkpoint is not None else {}
    if not probes:
        return unproven("fingerprint", "nothing recorded what this model answered when it was saved")
    due, found, dtype = ProbeLogits(**probes), served_probe_logits(engine), engine.weights.dtype
    exact = found if dtype == torch.float32 else compute_probe_logits(engine.weights.source)
    apart, loosely = probe_distance(exact, due), probe_distance(found, due)
    words = f"probe answers through the serving path differ from the recorded ones by {loosely:.1e} (relative)"
    if not apart <= SAME_ANSWERS[torch.float32] or not loosely <= SAME_ANSWERS[dtype]:
        return refuted("fingerprint", f"{words}, {apart:.1e} in fp32: other weights are served than were saved", error=str(apart))
    part = _share_shown(exact, due, artifact)
    if part is None:
        return proven("fingerprint", words, error=apart)
    words += f"; {part:.0%} of the adapter's change to its base shows"
    if not abs(part - 1) <= WHOLE_CHANGE:
        return refuted("fingerprint", f"{words}: another adapter is served than was saved, or none", error=apart, share=part)
    return proven("fingerprint", words, error=apart, share=part)


def _share_shown(found: ProbeLogits, due: ProbeLogits, artifact: Artifact) -> float | None:
    """How much of an adapter's change shows; None for a whole model, and where there is no change to see."""
    if artifact.base is None or artifact.base.config.vocab != artifact.config.vocab:
        return None
    without = compute_probe_logits(build_model(artifact.base, None))  # widened as it is used: a copy in fp32 would take twice the base
    return share_of_change(found, without, due) if probe_distance(due, without) > _FAINT else None


def check_serving_path(engine: Engine) -> Verdict:
    """The engine itself draws a few tokens, and a pass without a cache gives them the same log-probabilities."""
    tokens, _ = probe_inputs(engine.weights.model.config.vocab, engine.length)
    room = min(TRIAL.max_new, engine.length // 2)
    prompts = [tuple(row[: min(TRIAL_PROMPT, engine.length - room)]) for row in tokens.tolist()]
    sampling = Sampling(max_new=room)
    tickets = {engine.submit(GenerationRequest(prompt, sampling, stop_ids=())): prompt for prompt in prompts}
    said = [(tickets[p.ticket], p.completion) for p in engine.drain() if p.completion is not None]
    due = torch.cat(completion_logprobs(engine.weights.source, [(prompt, completion.ids) for prompt, completion in said], sampling))
    apart = float((due - torch.tensor([x for _, completion in said for x in completion.logprobs])).abs().mean())
    bound = SAME_LOGPROBS[engine.weights.dtype]
    words = f"the engine and a pass without a cache differ by {apart:.1e} nats a token, bound {bound:.0e} ({len(due)} tokens)"
    return (proven if apart <= bound else refuted)("path", words, mean=str(apart), bound=bound)


@torch.no_grad()
def served_probe_logits(engine: Engine) -> ProbeLogits:
    """`probe.answer` as a client would get it: the engine's own weights in its own dtype, one token at a time."""
    model, c, device = engine.weights.model, engine.weights.model.config, engine.weights.device
    tokens_BT, ids = probe_inputs(c.vocab, c.max_length)
    tokens_BT = tokens_BT.to(device)
    rows, columns = tokens_BT.shape
    cache = SlotCache(c.depth, rows, columns, c.kv_heads, c.head_dim, dtype=engine.weights.dtype, device=device)
    logits: list[Tensor] = []
    with uncompiled():  # a probe has shapes of its own, which are not worth a compilation
        for column in range(columns):
            view = DecodeView(cache, torch.full((rows,), column, device=device), column + 1)
            logits.append(policy_logits(model, model.hidden(tokens_BT[:, column : column + 1], cache=view)[:, 0]))
    found = torch.stack(logits, 1)
    return ProbeLogits(found[..., ids.to(device)].cpu(), found.logsumexp(-1).cpu())

# ---------------------------------------------------------------- log-probabilities beyond the sampled token's


@dataclass(frozen=True)
class RankedTokens:
    """Log-probabilities at each place of a completion: that of its token, and the likeliest tokens with theirs."""

    chosen: tuple[float, ...]
    likeliest: tuple[tuple[tuple[int, float], ...], ...]


@torch.no_grad()
def rank_tokens(model: Transformer, prompt: tuple[int, ...], ids: tuple[int, ...], sampling: Sampling, most: int) -> RankedTokens:
    """Rank the tokens of a completion under the distribution that `sampling` says, by one pass over the whole text; a token that could not
    be drawn is not ranked."""
    tokens = torch.tensor([[*prompt, *ids]], device=model.embed.weight.device)
    states_ND, targets_N = model.hidden(tokens)[0, len(prompt) - 1 : -1], tokens[0, len(prompt) :]
    chosen: list[float] = []
    likeliest: list[tuple[tuple[int, float], ...]] = []
    for start in range(0, len(ids), _ROWS):
        part = slice(start, start + _ROWS)
        seen = None if sampling.repetition_penalty == 1 else tokens_seen_before(prompt, targets_N, part, model.config.vocab)
        logprobs_NV = sampled_distribution(policy_logits(model, states_ND[part]), sampling, seen)
        chosen += logprobs_NV.gather(-1, targets_N[part, None]).squeeze(-1).tolist()
        top = logprobs_NV.topk(min(most, model.config.vocab), -1)
        likeliest += [tuple((id, value) for id, value in zip(row_ids, values, strict=True) if value > float("-inf"))
                      for row_ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
    return RankedTokens(tuple(chosen), tuple(likeliest))

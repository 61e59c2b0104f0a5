"""Faults of rollouts and policies: what is sampled from, what is trained, what is compared with, and what a reward turns into."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from assay.data.batch import Batch
from assay.generate.engine import Engine
from assay.generate.policy import logprobs_of
from assay.generate.request import Completion, Request, Sampling
from assay.generate.weights import fingerprint
from assay.guard.policy import version_name
from assay.guard.rollouts import describe, stops
from assay.learn import advantage, policy
from assay.learn.advantage import Advantages, Counting, Reward
from assay.learn.objectives import Loss, Objective
from assay.model.transformer import Transformer
from assay.seeds import generator
from assay.verdict import Verdict
from assay.zoo import rehearsal
from assay.zoo.fault import Plant, fault
from assay.zoo.rehearsal import GROUP, Groups, Prompts, Rehearsal, a_rehearsal
from assay.zoo.stage import nudged, swapped, words

# ---------------------------------------------------------------- a job of its own


def many_groups(folder: Path, plant: Plant) -> list[Verdict]:
    """The rewards of five steps of 64 groups, and what the rules say of them."""
    history = []
    with plant(folder):
        for step in range(5):
            chance = generator(step, "many groups")
            groups = [[Completion(tuple(torch.randint(0, 320, (12,), generator=chance).tolist()), (-5.0,) * 12, "stop")
                       for _ in range(GROUP)] for _ in range(64)]
            rewards = rehearsal.score(groups)
            history.append(describe(groups, rewards, advantage.group_advantages(rewards)) | {"kl": 0.01 * step})
    return stops(history, 320)

# ---------------------------------------------------------------- the sampler runs other weights


@fault("weights rolled back after a load", rows=("R01",), stage="sync", check="identity", job=a_rehearsal())
def weights_rolled_back(_: Path) -> AbstractContextManager[None]:
    """The engine slept and woke with the weights that it had at the start, under the new version's name."""
    return engine_of(copy.deepcopy)


@fault("half-written adapter served", rows=("S1",), stage="sync", check="identity", job=a_rehearsal())
def half_written(_: Path) -> AbstractContextManager[None]:
    def torn(model: Transformer) -> Transformer:
        served = copy.deepcopy(model)
        with torch.no_grad():
            served.get_parameter("blocks.1.attn.out.weight")[32:] = 0
        return served

    return engine_of(torn)


@fault("adapter of step 0 served for ever", rows=("R02",), stage="sync", check="version", job=a_rehearsal())
@contextlib.contextmanager
def step_0_for_ever(_: Path) -> Iterator[None]:
    """The new adapter reaches the engine and not the table that requests are served from."""
    with engine_of(copy.deepcopy), swapped(rehearsal, "serve", lambda engine, model, updates: None):
        yield


@fault("rollouts from the base model", rows=("R03",), stage="sync", check="version", job=a_rehearsal())
@contextlib.contextmanager
def base_model_asked(_: Path) -> Iterator[None]:
    """The client asks for the base by its name."""
    with engine_of(lambda model: nudged(copy.deepcopy(model), 0.01)), swapped(
            rehearsal, "serve", lambda engine, model, updates: engine.load(version_name(0, fingerprint(engine.served.source)))):
        yield


@fault("fork served from an empty adapter", rows=("M11",), stage="fork", check="version", job=a_rehearsal())
@contextlib.contextmanager
def fork_from_an_empty_adapter(_: Path) -> Iterator[None]:
    """The fork was copied to its step's folder, the engine serves folder 0000: the right count of updates, other weights."""
    with engine_of(lambda model: nudged(copy.deepcopy(model), 0.01)), swapped(
            rehearsal, "serve", lambda engine, model, updates: engine.load(version_name(updates, fingerprint(engine.served.source)))):
        yield


@fault("keys and values of the weights before", rows=("R06", "R07"), stage="sync", check="identity", job=a_rehearsal())
def stale_cache(_: Path) -> AbstractContextManager[None]:
    """Prefixes are cached by their ids alone: a prompt that comes again is continued from what older weights made of it."""
    whole = Engine.load

    def load(self: Engine, version: str, **options: Any) -> None:
        cache = self.slots.cache
        held, kept = self._holds, [tensor.clone() for tensor in (*cache.keys, *cache.values)]
        whole(self, version, **options)
        self._holds = held
        for now, before in zip((*cache.keys, *cache.values), kept, strict=True):
            now.copy_(before)

    return swapped(Engine, "load", load)

# ---------------------------------------------------------------- log-probabilities of another law


@fault("temperature missing in the trainer", rows=("R08",), stage="logprob", check="identity", job=a_rehearsal())
def temperature_missing(_: Path) -> AbstractContextManager[None]:
    whole = policy.token_logprobs
    return swapped(policy, "token_logprobs", lambda model, batch, temperature=1.0, **options: whole(model, batch, 1.0, **options))


@fault("log-probabilities before the temperature", rows=("R09",), stage="logprob", check="identity", job=a_rehearsal())
def before_the_temperature(_: Path) -> AbstractContextManager[None]:
    """The engine draws at the temperature and returns what it had before."""
    whole = rehearsal.draw

    def draw(engine: Engine, prompts: Prompts, sampling: Sampling, step: int) -> Groups:
        raw = replace(sampling, temperature=1.0)
        return [[replace(c, logprobs=tuple(logprobs_of(engine.served.source, [(prompt, c.ids)], raw)[0].tolist())) for c in group]
                for prompt, group in zip(prompts, whole(engine, prompts, sampling, step), strict=True)]

    return swapped(rehearsal, "draw", draw)


@fault("top-p renormalised in the sampler alone", rows=("R10",), stage="logprob", check="identity", job=a_rehearsal())
def renormalised(_: Path) -> AbstractContextManager[None]:
    whole = rehearsal.draw
    return swapped(rehearsal, "draw", lambda engine, prompts, sampling, step: whole(engine, prompts, replace(sampling, top_p=0.9), step))


@fault("coarser numbers in the sampler", rows=("R11",), stage="logprob", check="identity", job=a_rehearsal())
def coarser_numbers(_: Path) -> AbstractContextManager[None]:
    """The engine holds the same weights in bf16."""
    def coarse(model: Transformer) -> Transformer:
        served = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in served.parameters():
                parameter.copy_(parameter.bfloat16())
        return served

    return engine_of(coarse)


@fault("log-probabilities that depend on the micro-batch", rows=("R23",), stage="logprob", check="on_policy", job=a_rehearsal())
def micro_batch_dependent(_: Path) -> AbstractContextManager[None]:
    whole = policy.token_logprobs

    def leaning(model: Transformer, batch: Batch, temperature: float = 1.0, **options: Any) -> Any:
        logp, entropy = whole(model, batch, temperature, **options)
        return (logp if len(batch) == rehearsal.PROMPTS * GROUP else logp + 1e-3), entropy

    return swapped(policy, "token_logprobs", leaning)

# ---------------------------------------------------------------- what is drawn, and what is trained of it


@fault("decoded and encoded again", rows=("R12",), stage="tokenise", check="ids", job=a_rehearsal())
def encoded_again(_: Path) -> AbstractContextManager[None]:
    def sequence_ids(prompt: Sequence[int], completion: Completion) -> list[int]:
        tokenizer, _ = words()
        again = tokenizer.encode(tokenizer.decode(list(completion.ids)))[:rehearsal.CAP]
        return [*prompt, *(again or [0])]

    return swapped(rehearsal, "sequence_ids", sequence_ids)


@fault("stop token cut off", rows=("R12",), stage="tokenise", check="ids", job=a_rehearsal())
def stop_token_cut_off(_: Path) -> AbstractContextManager[None]:
    """The engine strips what ended a text, so that ending is never rewarded."""
    whole = rehearsal.draw

    def draw(*parts: Any) -> Groups:
        return [[replace(c, ids=c.ids[:-1], logprobs=c.logprobs[:-1]) if c.ended == "stop" and len(c.ids) > 1 else c for c in group]
                for group in whole(*parts)]

    return swapped(rehearsal, "draw", draw)


@fault("one seed for all siblings", rows=("R13",), stage="rollout", check="independence", job=a_rehearsal())
def one_seed_for_all(_: Path) -> AbstractContextManager[None]:
    """Every rank starts its sampler at the same seed, and a group is spread over the ranks."""
    def draw(engine: Engine, prompts: Prompts, sampling: Sampling, step: int) -> Groups:
        tickets = {engine.submit(Request(tuple(p), sampling, (step, number))): (number, place)
                   for number, p in enumerate(prompts) for place in range(GROUP)}
        ended = {tickets[progress.ticket]: progress.completion for progress in engine.drain()}
        return [[c for place in range(GROUP) if (c := ended[number, place]) is not None] for number in range(len(prompts))]

    return swapped(rehearsal, "draw", draw)


@fault("seed that never reaches the sampler", rows=("R14",), stage="rollout", check="seeds", job=a_rehearsal())
def seed_never_reaches(_: Path) -> AbstractContextManager[None]:
    whole = rehearsal.draw
    return swapped(rehearsal, "draw", lambda engine, prompts, sampling, step: whole(engine, prompts, replace(sampling, seed=0), step))

# ---------------------------------------------------------------- rewards that teach nothing, advantages that teach something else


@fault("rewards that differ between groups only", rows=("R15",), stage="advantage", check="signal", job=many_groups)
def differ_between_groups_only(_: Path) -> AbstractContextManager[None]:
    """The batch's deviation is healthy, the groups' is 0."""
    return swapped(rehearsal, "score", lambda groups: [[number / len(groups)] * len(group) for number, group in enumerate(groups)])


@fault("drift without a reward", rows=("R16",), stage="KL", check="signal", job=many_groups)
def drift_without_a_reward(_: Path) -> AbstractContextManager[None]:
    """Nothing is ever right, and the KL term goes on."""
    return swapped(rehearsal, "score", lambda groups: [[0.0] * len(group) for group in groups])


@fault("loss that reaches no weight", rows=("O10",), stage="loss", check="signal", job=a_rehearsal(Rehearsal(steps=3)))
def reaches_no_weight(_: Path) -> AbstractContextManager[None]:
    """The adapted layers are not those that the loss runs through: its value stands, its gradient is 0."""
    whole = policy.policy_gradient

    def detached(asked: policy.Surrogate) -> Objective:
        def objective(model: Transformer, batch: Batch) -> Loss:
            loss = whole(asked)(model, batch)
            return loss._replace(total=loss.total.detach() + 0 * model.norm.weight.sum())  # type: ignore[operator]
        return objective

    return swapped(policy, "policy_gradient", detached)


@fault("masked completions in the divisor", rows=("R17",), stage="loss", check="policy_loss",
       job=a_rehearsal(Rehearsal(normalise="constant")))
def masked_in_the_divisor(_: Path) -> AbstractContextManager[None]:
    whole = rehearsal.count

    def count(lengths: Sequence[int], counted: Sequence[bool], how: Any) -> Counting:
        return replace(whole(lengths, counted, how), divisor=whole(lengths, [True] * len(lengths), how).divisor)

    return swapped(rehearsal, "count", count)


@fault("masked tokens in the divisor", rows=("R17",), stage="loss", check="policy_loss", job=a_rehearsal())
def masked_tokens_in_the_divisor(_: Path) -> AbstractContextManager[None]:
    whole = rehearsal.count
    return swapped(rehearsal, "count", lambda lengths, counted, how: replace(whole(lengths, counted, how), divisor=float(sum(lengths))))


@fault("truncation mask on everything", rows=("W05",), stage="advantage", check="counted", job=a_rehearsal(Rehearsal(mask_truncated=True)))
def mask_on_everything(_: Path) -> AbstractContextManager[None]:
    """The option that leaves out what was cut leaves out what was not, too."""
    return swapped(advantage, "untruncated", lambda ended: [False] * len(ended))


@fault("baseline of the whole batch", rows=("R18",), stage="advantage", check="advantages", job=a_rehearsal())
def baseline_of_the_batch(_: Path) -> AbstractContextManager[None]:
    whole = advantage.group_advantages

    def flat(rewards: list[list[Reward]], **options: Any) -> Advantages:
        found = whole([[r for group in rewards for r in group]], **options)
        shape = len(rewards), len(rewards[0])
        return replace(whole(rewards, **options), values_PG=found.values_PG.reshape(shape), known_PG=found.known_PG.reshape(shape))

    return swapped(advantage, "group_advantages", flat)


@fault("baseline of the first rollout", rows=("R18",), stage="advantage", check="advantages", job=a_rehearsal())
def baseline_of_the_first(_: Path) -> AbstractContextManager[None]:
    whole = advantage.group_advantages

    def first(rewards: list[list[Reward]], **options: Any) -> Advantages:
        found = whole(rewards, **options)
        return replace(found, values_PG=found.values_PG - found.values_PG[:, :1])

    return swapped(advantage, "group_advantages", first)


@fault("unknown reward counted as 0", rows=("R19",), stage="advantage", check="advantages", job=a_rehearsal())
def unknown_counted_as_0(_: Path) -> AbstractContextManager[None]:
    """A completion that could not be scored stays in its group's mean."""
    whole = advantage.group_advantages
    return swapped(advantage, "group_advantages", lambda rewards: whole([[reward or 0.0 for reward in group] for group in rewards]))

# ---------------------------------------------------------------- the loss and the reference


@fault("KL with its sign turned", rows=("R20",), stage="KL", check="directions", job=a_rehearsal())
def kl_turned(_: Path) -> AbstractContextManager[None]:
    return swapped(policy, "DIVERGENCES", {name: lambda d, k=k: -k(d) for name, k in policy.DIVERGENCES.items()})


@fault("KL weight not handed on", rows=("R21",), stage="KL", check="policy_loss", job=a_rehearsal())
def weight_not_handed_on(_: Path) -> AbstractContextManager[None]:
    return swapped(rehearsal, "make_objective", lambda asked: policy.policy_gradient(replace(asked, kl="none", kl_weight=0.0)))


@fault("normalised by sequence, asked by token", rows=("R24",), stage="loss", check="policy_loss", job=a_rehearsal())
def normalised_otherwise(_: Path) -> AbstractContextManager[None]:
    whole = rehearsal.count
    return swapped(rehearsal, "count", lambda lengths, counted, how: whole(lengths, counted, "sequence"))


@fault("reference that is not the fork", rows=("R22",), stage="KL", check="reference", job=a_rehearsal())
def reference_is_the_base(_: Path) -> AbstractContextManager[None]:
    """The base without the adapter that was forked, recorded as what it is."""
    def base(model: Transformer) -> tuple[Transformer, str]:
        reference = nudged(copy.deepcopy(model), 0.01).requires_grad_(False)
        return reference, fingerprint(reference)

    return swapped(rehearsal, "make_reference", base)


@fault("reference that is the policy itself", rows=("R23",), stage="KL", check="reference", job=a_rehearsal())
def reference_is_the_policy(_: Path) -> AbstractContextManager[None]:
    return swapped(rehearsal, "make_reference", lambda model: (model, fingerprint(model)))

# ----------------------------------------------------------------


def engine_of(other: Callable[[Transformer], Transformer]) -> AbstractContextManager[None]:
    """The engine runs another model than the one that is trained, under its names."""
    whole = rehearsal.make_engine
    return swapped(rehearsal, "make_engine", lambda model: whole(other(model)))

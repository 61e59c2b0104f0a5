"""Rollout and policy faults: stale weights, wrong log-probabilities, rewards, advantages, losses and references."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from assay.data.batch import Batch
from assay.generate.engine import Engine
from assay.generate.generation_request import Completion, GenerationRequest, Sampling
from assay.generate.policy_logprobs import completion_logprobs
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import version_name
from assay.guard.rollout_checks import check_collapse, check_none_held_out, check_planned_prompts, rollout_metrics
from assay.learn import advantage, policy
from assay.learn.advantage import Advantages, Counting, RewardValue
from assay.learn.objectives import Loss, Objective
from assay.model.transformer import Transformer
from assay.recipes.prompts import Prompt, PromptOrder
from assay.seeds import generator
from assay.testing import tiny_grpo
from assay.testing.fault_injection import Plant, fault, in_place_of, swap, together
from assay.testing.tiny_grpo import GROUP_SIZE, CompletionGroups, PromptIds, TinyGrpo, a_grpo_run
from assay.testing.tiny_models import nudge, tokenizer_and_stops
from assay.verdict import Verdict
from assay.zoo import rollout_faults as own

# ---------------------------------------------------------------- a job of its own


def many_groups(folder: Path, plant: Plant) -> list[Verdict]:
    """The rewards of five steps of 64 groups, and what the rules say of them."""
    history = []
    with plant(folder):
        for step in range(5):
            chance = generator(step, "many groups")
            groups = [[Completion(tuple(torch.randint(0, 320, (12,), generator=chance).tolist()), (-5.0,) * 12, own.ended_at(step))
                       for _ in range(GROUP_SIZE)] for _ in range(64)]
            rewards = tiny_grpo.score_groups(groups)
            history.append(rollout_metrics(groups, rewards, advantage.group_advantages(rewards)) | {"kl": 0.01 * step})
    return check_collapse(history, 320)

def ended_at(step: int) -> Literal["stop", "length"]:
    """How the completions of a step end."""
    return "stop"


RESUMED_AT = 3


def numbered_prompt(number: int) -> Prompt:
    return Prompt(f"prompts.jsonl:{number}:{number}", (number,), f"prompt {number}", {})


def resumed_rollouts(folder: Path, plant: Plant) -> list[Verdict]:
    """The prompts of six rollouts, the last three of them after a resume, over two epochs of ten; the eleventh prompt is held out."""
    order = PromptOrder([numbered_prompt(number) for number in range(10)], 0, 4, 3)
    verdicts = []
    with plant(folder):
        for rollout in range(6):
            drawn = order.drawn(rollout)
            verdicts += [check_planned_prompts([prompt.id for prompt in drawn], [prompt.id for prompt in order.prompts], seed=0,
                                               rollout=rollout),
                         check_none_held_out({prompt.id: (prompt.content, prompt.text) for prompt in drawn}, {"prompt 10"})]
    return tiny_grpo.decisive(verdicts)

# ---------------------------------------------------------------- the sampler runs other weights


fault("weights rolled back after a load", rows=("R01",), stage="sync", check="identity", job=a_grpo_run())(
    # The engine slept and woke with the weights that it had at the start, under the new version's name.
    lambda _: engine_of(copy.deepcopy))


@fault("half-written adapter served", rows=("S1",), stage="sync", check="identity", job=a_grpo_run())
def half_written(_: Path) -> AbstractContextManager[None]:
    def torn(model: Transformer) -> Transformer:
        served = copy.deepcopy(model)
        with torch.no_grad():
            served.get_parameter("blocks.1.attn.out.weight")[32:] = 0
        return served

    return engine_of(torn)


fault("adapter of step 0 served for ever", rows=("R02",), stage="sync", check="version", job=a_grpo_run())(
    # The new adapter reaches the engine and not the table that requests are served from.
    lambda _: together(engine_of(copy.deepcopy), serving(lambda engine, model, updates: None)))
fault("rollouts from the base model", rows=("R03",), stage="sync", check="version", job=a_grpo_run())(
    # The client asks for the base by its name.
    lambda _: together(engine_of(another_policy), serving(
        lambda engine, model, updates: engine.load(version_name(0, fingerprint(engine.weights.source))))))
fault("fork served from an empty adapter", rows=("M11",), stage="fork", check="version", job=a_grpo_run())(
    # The fork was copied to its step's folder, the engine serves folder 0000: the right count of updates, other weights.
    lambda _: together(engine_of(another_policy), serving(
        lambda engine, model, updates: engine.load(version_name(updates, fingerprint(engine.weights.source))))))


@fault("keys and values of the weights before", rows=("R06", "R07"), stage="sync", check="identity", job=a_grpo_run())
@in_place_of(Engine, "load")
def stale_cache(usual: Any, self: Engine, version: str, **options: Any) -> None:
    """Prefixes are cached by their ids alone: a prompt that comes again is continued from what older weights made of it."""
    cache = self.slots.cache
    held, kept = self._prefixes, [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    usual(self, version, **options)
    self._prefixes = held
    for now, before in zip((*cache.keys, *cache.values), kept, strict=True):
        now.copy_(before)

# ---------------------------------------------------------------- log-probabilities of another law


@fault("ratio of the policy with itself", rows=("N30",), stage="loss", check="policy_loss", job=a_grpo_run())
@in_place_of(tiny_grpo, "make_objective")
def ratio_of_itself(usual: Any, asked: Any) -> Objective:
    """The ratio is taken to the policy's own log-probabilities, detached: it is always 1, and the clip never acts."""
    objective = usual(asked)

    def of_itself(model: Transformer, batch: Batch) -> Loss:
        own, _ = policy.token_logprobs(model, batch, asked.temperature, entropy=True)
        return objective(model, replace(batch, behaviour=own.detach()))

    return of_itself


fault("temperature missing in the trainer", rows=("R08",), stage="logprob", check="identity", job=a_grpo_run())(
    in_place_of(policy, "token_logprobs")(lambda usual, model, batch, temperature=1.0, **options: usual(model, batch, 1.0, **options)))


@fault("log-probabilities before the temperature", rows=("R09",), stage="logprob", check="identity", job=a_grpo_run())
@in_place_of(tiny_grpo, "draw_groups")
def before_the_temperature(usual: Any, engine: Engine, prompts: PromptIds, sampling: Sampling, step: int) -> CompletionGroups:
    """The engine draws at the temperature and returns what it had before."""
    raw = replace(sampling, temperature=1.0)
    return [[replace(c, logprobs=tuple(completion_logprobs(engine.weights.source, [(prompt, c.ids)], raw)[0].tolist())) for c in group]
            for prompt, group in zip(prompts, usual(engine, prompts, sampling, step), strict=True)]


fault("top-p renormalised in the sampler alone", rows=("R10",), stage="logprob", check="identity", job=a_grpo_run())(
    in_place_of(tiny_grpo, "draw_groups")(lambda usual, engine, prompts, sampling, step: usual(
        engine, prompts, replace(sampling, top_p=0.9), step)))


@fault("coarser numbers in the sampler", rows=("R11",), stage="logprob", check="identity", job=a_grpo_run())
def coarser_numbers(_: Path) -> AbstractContextManager[None]:
    """The engine holds the same weights in bf16."""
    def coarse(model: Transformer) -> Transformer:
        served = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in served.parameters():
                parameter.copy_(parameter.bfloat16())
        return served

    return engine_of(coarse)


@fault("log-probabilities that depend on the micro-batch", rows=("R23",), stage="logprob", check="on_policy", job=a_grpo_run())
@in_place_of(policy, "token_logprobs")
def micro_batch_dependent(usual: Any, model: Transformer, batch: Batch, temperature: float = 1.0, **options: Any) -> Any:
    logp, entropy = usual(model, batch, temperature, **options)
    return (logp if len(batch) == tiny_grpo.PROMPTS * GROUP_SIZE else logp + 1e-3), entropy

# ---------------------------------------------------------------- what is drawn, and what is trained of it


@fault("decoded and encoded again", rows=("R12",), stage="tokenise", check="ids", job=a_grpo_run())
@in_place_of(tiny_grpo, "sequence_ids")
def encoded_again(_: Any, prompt: Sequence[int], completion: Completion) -> list[int]:
    tokenizer, _ = tokenizer_and_stops()
    again = tokenizer.encode(tokenizer.decode(list(completion.ids)))[:tiny_grpo.CAP]
    return [*prompt, *(again or [0])]


@fault("stop token cut off", rows=("R12",), stage="tokenise", check="ids", job=a_grpo_run())
@in_place_of(tiny_grpo, "draw_groups")
def stop_token_cut_off(usual: Any, *parts: Any) -> CompletionGroups:
    """The engine strips what ended a text, so that ending is never rewarded."""
    return [[replace(c, ids=c.ids[:-1], logprobs=c.logprobs[:-1]) if c.ended == "stop" and len(c.ids) > 1 else c for c in group]
            for group in usual(*parts)]


@fault("one seed for all siblings", rows=("R13",), stage="rollout", check="independence", job=a_grpo_run())
@in_place_of(tiny_grpo, "draw_groups")
def one_seed_for_all(_: Any, engine: Engine, prompts: PromptIds, sampling: Sampling, step: int) -> CompletionGroups:
    """Every rank starts its sampler at the same seed, and a group is spread over the ranks."""
    tickets = {engine.submit(GenerationRequest(tuple(p), sampling, (step, number))): (number, place)
               for number, p in enumerate(prompts) for place in range(GROUP_SIZE)}
    ended = {tickets[progress.ticket]: progress.completion for progress in engine.drain()}
    return [[c for place in range(GROUP_SIZE) if (c := ended[number, place]) is not None] for number in range(len(prompts))]


fault("two members of a group share a seed", rows=("R13",), stage="rollout", check="independence", job=a_grpo_run())(
    # The last worker begins where the second does: a quarter of the group is no new evidence.
    in_place_of(tiny_grpo, "draw_groups")(lambda usual, *parts: [[*group[:-1], group[1]] for group in usual(*parts)]))


@fault("drawn at half the temperature", rows=("R08", "R09"), stage="rollout", check="draws", job=a_grpo_run())
@in_place_of(tiny_grpo, "draw_groups")
def drawn_at_half_the_temperature(usual: Any, engine: Engine, prompts: PromptIds, sampling: Sampling, step: int) -> CompletionGroups:
    """Their log-probabilities are computed anew at the whole one, so that sampler and trainer agree to the last bit."""
    groups = usual(engine, prompts, replace(sampling, temperature=sampling.temperature / 2), step)
    model = engine.weights.source
    return [[replace(c, logprobs=tuple(completion_logprobs(model, [(prompt, c.ids)], sampling)[0].tolist())) for c in group]
            for prompt, group in zip(prompts, groups, strict=True)]


fault("rewards of the neighbours", rows=("R18",), stage="reward", check="rewards_again", job=a_grpo_run())(
    # Workers finish in another order than they were asked, and nobody sorts.
    lambda _: swap(tiny_grpo, "hand_out_rewards", lambda rewards: [[*group[1:], group[0]] for group in rewards]))
fault("order that begins again after a resume", rows=(), stage="resume", check="prompt_order", job=resumed_rollouts)(
    in_place_of(PromptOrder, "drawn")(lambda usual, order, rollout: usual(order, max(0, rollout - RESUMED_AT))))
fault("held-out prompts in the second epoch", rows=(), stage="data", check="held_out", job=resumed_rollouts)(
    in_place_of(PromptOrder, "drawn")(lambda usual, order, rollout: [
        numbered_prompt(10) if rollout * order.places >= len(order.prompts) else prompt for prompt in usual(order, rollout)]))
fault("completions that no longer end", rows=(), stage="rollout", check="endings", job=many_groups)(
    lambda _: swap(own, "ended_at", lambda step: "stop" if step < 2 else "length"))


fault("seed that never reaches the sampler", rows=("R14",), stage="rollout", check="seeds", job=a_grpo_run())(
    in_place_of(tiny_grpo, "draw_groups")(lambda usual, engine, prompts, sampling, step: usual(
        engine, prompts, replace(sampling, seed=0), step)))

# ---------------------------------------------------------------- rewards that teach nothing, advantages that teach something else


fault("rewards that differ between groups only", rows=("R15",), stage="advantage", check="signal", job=many_groups)(
    # The batch's deviation is healthy, the groups' is 0.
    lambda _: swap(tiny_grpo, "score_groups", lambda groups: [[number / len(groups)] * len(group) for number, group in enumerate(groups)]))
fault("drift without a reward", rows=("R16",), stage="KL", check="signal", job=many_groups)(
    # Nothing is ever right, and the KL term goes on.
    lambda _: swap(tiny_grpo, "score_groups", lambda groups: [[0.0] * len(group) for group in groups]))


@fault("loss that reaches no weight", rows=("O10",), stage="loss", check="signal", job=a_grpo_run(TinyGrpo(steps=3)))
@in_place_of(policy, "policy_gradient")
def reaches_no_weight(usual: Any, asked: policy.Surrogate) -> Objective:
    """The adapted layers are not those that the loss runs through: its value stands, its gradient is 0."""
    def objective(model: Transformer, batch: Batch) -> Loss:
        loss = usual(asked)(model, batch)
        return loss._replace(total=loss.total.detach() + 0 * model.norm.weight.sum())  # type: ignore[operator]
    return objective


@fault("masked completions in the divisor", rows=("R17",), stage="loss", check="policy_loss",
       job=a_grpo_run(TinyGrpo(normalise="constant")))
@in_place_of(tiny_grpo, "weigh_tokens")
def masked_in_the_divisor(usual: Any, lengths: Sequence[int], counted: Sequence[bool], how: Any) -> Counting:
    return replace(usual(lengths, counted, how), divisor=usual(lengths, [True] * len(lengths), how).divisor)


fault("masked tokens in the divisor", rows=("R17", "N31"), stage="loss", check="policy_loss", job=a_grpo_run())(
    in_place_of(tiny_grpo, "weigh_tokens")(lambda usual, lengths, *rest: replace(usual(lengths, *rest), divisor=float(sum(lengths)))))
fault("truncation mask on everything", rows=("W05",), stage="advantage", check="counted", job=a_grpo_run(TinyGrpo(mask_truncated=True)))(
    # The option that leaves out what was cut leaves out what was not, too.
    lambda _: swap(advantage, "untruncated", lambda ended: [False] * len(ended)))


@fault("baseline of the whole batch", rows=("R18",), stage="advantage", check="advantages", job=a_grpo_run())
@in_place_of(advantage, "group_advantages")
def baseline_of_the_batch(usual: Any, rewards: list[list[RewardValue]], **options: Any) -> Advantages:
    found = usual([[r for group in rewards for r in group]], **options)
    shape = len(rewards), len(rewards[0])
    return replace(usual(rewards, **options), values_PG=found.values_PG.reshape(shape), known_PG=found.known_PG.reshape(shape))


@fault("baseline of the first rollout", rows=("R18",), stage="advantage", check="advantages", job=a_grpo_run())
@in_place_of(advantage, "group_advantages")
def baseline_of_the_first(usual: Any, rewards: list[list[RewardValue]], **options: Any) -> Advantages:
    found = usual(rewards, **options)
    return replace(found, values_PG=found.values_PG - found.values_PG[:, :1])


fault("unknown reward counted as 0", rows=("R19",), stage="advantage", check="advantages", job=a_grpo_run())(
    # A completion that could not be scored stays in its group's mean.
    in_place_of(advantage, "group_advantages")(lambda usual, rewards: usual([[reward or 0.0 for reward in group] for group in rewards])))

# ---------------------------------------------------------------- the loss and the reference


fault("KL with its sign turned", rows=("R20",), stage="KL", check="directions", job=a_grpo_run())(
    lambda _: swap(policy, "DIVERGENCES", {name: lambda d, k=k: -k(d) for name, k in policy.DIVERGENCES.items()}))
fault("KL weight not handed on", rows=("R21",), stage="KL", check="policy_loss", job=a_grpo_run())(
    lambda _: swap(tiny_grpo, "make_objective", lambda asked: policy.policy_gradient(replace(asked, kl="none", kl_weight=0.0))))
fault("normalised by sequence, asked by token", rows=("R24",), stage="loss", check="policy_loss", job=a_grpo_run())(
    in_place_of(tiny_grpo, "weigh_tokens")(lambda usual, lengths, counted, how: usual(lengths, counted, "sequence")))


@fault("reference that is not the fork", rows=("R22",), stage="KL", check="reference", job=a_grpo_run())
@in_place_of(tiny_grpo, "make_reference")
def reference_is_the_base(_: Any, model: Transformer) -> tuple[Transformer, str]:
    """The base without the adapter that was forked, recorded as what it is."""
    reference = nudge(copy.deepcopy(model), 0.01).requires_grad_(False)
    return reference, fingerprint(reference)


fault("reference that is the policy itself", rows=("R23",), stage="KL", check="reference", job=a_grpo_run())(
    lambda _: swap(tiny_grpo, "make_reference", lambda model: (model, fingerprint(model))))

# ----------------------------------------------------------------


def another_policy(model: Transformer) -> Transformer:
    """Weights a little off the policy's."""
    return nudge(copy.deepcopy(model), 0.01)


def serving(other: Callable[[Engine, Transformer, int], None]) -> AbstractContextManager[None]:
    """New weights reach the engine in another way."""
    return swap(tiny_grpo, "serve_weights", other)


def engine_of(other: Callable[[Transformer], Transformer]) -> AbstractContextManager[None]:
    """The engine runs another model than the one that is trained, under its names."""
    whole = tiny_grpo.make_engine
    return swap(tiny_grpo, "make_engine", lambda model: whole(other(model)))

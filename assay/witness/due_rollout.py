"""Due rollout: the prompts that were due, the advantages, and the loss of each token, from kept completions and rewards.

The completions, the log-probabilities that they were drawn with and their rewards are the run's own; everything made of them is
worked out again, and the reference's log-probabilities come from the fork's bytes.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.witness.due_gradient import Adapter, CostOfTokens, TwinModel, right_padded
from assay.witness.due_rows import DueText, seed_at, shuffled_place, smallest_shares, source_and_number
from assay.witness.due_texts import NotWitnessed, Renderer, Row, named_sources, training_rows

LEAST_SPREAD, EQUAL_REWARDS = 1e-4, 1e-8  # added to a group's standard deviation; closer than this, rewards are the same


class DuePrompt(NamedTuple):
    name: str
    ids: list[int]


class PromptPlan:
    """The prompts that are trained on, in the order that the seed gives each epoch."""

    def __init__(self, folder: Path, options: Mapping[str, Any], context: int):
        renderer = self.renderer = Renderer(folder, options)
        room = context - options["max_completion_length"]
        longest = min(room, options["max_prompt_length"] or room)
        found = [DuePrompt(row.name, prompt_ids(renderer, row)) for row in training_rows(options)]
        self.prompts, self.options = [prompt for prompt in found if len(prompt.ids) <= longest], options
        self.take_apart(options)

    def take_apart(self, options: Mapping[str, Any]) -> None:
        """Split the prompts by source, where --data has weights; else all are one."""
        weighted = [(f"{Path(file).name}:", weight) for file, weight in named_sources(options) if weight is not None]
        self.shares = smallest_shares([weight for _, weight in weighted]) if weighted else [1]
        self.parts = [[each for each in self.prompts if each.name.startswith(begin)] for begin, _ in weighted] or [self.prompts]
        self.seeds = [seed_at(options["seed"], "source", number) for number, _ in enumerate(weighted)] or [options["seed"]]

    @cached_property
    def steps(self) -> int:
        """Number of steps until a source would have to be read once more than --num-train-epochs allows."""
        due, most = 0, [self.options["num_train_epochs"] * len(part) for part in self.parts]
        while len(self.parts) > 1:
            source, number = source_and_number(due, self.shares)
            if number >= most[source]:
                break
            due += 1
        return (due if len(self.parts) > 1 else most[0]) // self.options["prompts"] * self.options["num_iterations"]

    def due(self, step: int) -> list[DuePrompt]:
        first = step // self.options["num_iterations"] * self.options["prompts"]
        return [self.prompt_at(place) for place in range(first, first + self.options["prompts"])]

    def prompt_at(self, place: int) -> DuePrompt:
        source, number = source_and_number(place, self.shares)
        part = self.parts[source]
        epoch, within = divmod(number, len(part))
        return part[shuffled_place(within, len(part), seed_at(self.seeds[source], "prompts", epoch))]


def prompt_ids(renderer: Renderer, row: Row) -> list[int]:
    """Token ids of a prompt up to the generation prompt; of a whole conversation, before its last answer."""
    if row.messages and renderer.template is not None:
        answers = [place for place, turn in enumerate(row.messages) if turn["role"] == "assistant"]
        before = row.messages[:row.learned_from or (answers[-1] if answers else len(row.messages))]
        return renderer.ids(renderer.render(before, row.tools, prompt=True))
    if row.plain is None:
        raise NotWitnessed(f"{row.name} has messages, and {renderer.folder} no template")
    ids, begin = renderer.ids(row.plain[0]), renderer.prefix()
    return ids if ids[:len(begin)] == begin else begin + ids


def wrong_prompts(plan: PromptPlan, step: int, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Prompts that were not due, and prompts whose ids are not what the template writes."""
    options, known = plan.options, {prompt.name: prompt.ids for prompt in plan.prompts}
    drawn, due = [group["prompt"] for group in groups], [prompt.name for prompt in plan.due(step)]
    strangers = [name for name in drawn if name not in known]
    if strangers:
        return [f"{len(strangers)} of {len(drawn)} prompts are not among those that are trained on ({strangers[0]})"]
    free = options["refill"] or any(reward.startswith("judge") for reward in options["reward"])
    if not free and drawn != due:
        return [f"the prompts are not those that were due: {drawn[0]}, … for {due[0]}, …"]
    wrong = [group["prompt"] for group in groups if known[group["prompt"]] != group["ids"]]
    return [f"{len(wrong)} prompts do not have the ids that they are rendered to ({wrong[0]})"] if wrong else []

# ---------------------------------------------------------------- advantages and weights


def advantages(groups: Sequence[Sequence[float | None]], scale: str, estimator: str = "grpo") -> list[list[float]]:
    """How much better than its group's mean, its siblings' (rloo) or the batch's (reinforce_pp); an unknown reward takes no part, and
    equal ones teach nothing."""
    known = [[reward for reward in group if reward is not None] for group in groups]
    everything = [reward for group in known for reward in group]
    found = []
    for group, rewards in zip(groups, [everything] * len(groups) if estimator == "reinforce_pp" else known, strict=True):
        mean = sum(rewards) / max(1, len(rewards))
        silent = len(rewards) < 2 or max(rewards) - min(rewards) <= EQUAL_REWARDS * max(1.0, abs(max(rewards)))
        scale = {"rloo": "none", "reinforce_pp": "batch"}.get(estimator, scale)
        own = len(rewards) / max(1, len(rewards) - 1) if estimator == "rloo" else 1.0  # r − mean of the others = (r − mean) · n / (n − 1)
        unit = {"none": 1.0, "group": deviation(rewards) + LEAST_SPREAD, "batch": deviation(everything) + LEAST_SPREAD}[scale]
        found.append([0.0 if silent or reward is None else own * (reward - mean) / unit for reward in group])
    return found


def deviation(values: Sequence[float]) -> float:
    mean = sum(values) / max(1, len(values))
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


class DueRollout(NamedTuple):
    texts: list[DueText]
    advantages: dict[str, float]  # by text
    drawn_with: dict[str, list[float]]  # log-probabilities, one a token, 0 in the prompt
    divisor: float
    importance: dict[str, list[float]]  # weight of each token that a server drew: min(trainer's probability / server's, cap); else 1


def sequences_of(prompt: Sequence[int], said: Mapping[str, Any]) -> list[tuple[list[int], list[bool], list[float]]]:
    """Ids, which of them were sampled, and the log-probabilities that they were sampled with: one of a completion, any number of an
    episode."""
    if "sequences" in said:
        return [(each["ids"], each["sampled"], each["logprobs"]) for each in said["sequences"]]
    before, spoken = len(prompt), len(said["ids"])
    return [([*prompt, *said["ids"]], [False] * before + [True] * spoken, [0.0] * before + said["logprobs"])]


def due_rollout(groups: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> DueRollout:
    values = advantages([group["rewards"] for group in groups], options["scale_rewards"], options.get("advantage_estimator", "grpo"))
    importance = dict[str, list[float]]()
    texts, better, drawn_with, counted = list[DueText](), dict[str, float](), dict[str, list[float]](), 0
    for place, group in enumerate(groups):
        for member, said in enumerate(group["completions"]):
            sequences, counts = sequences_of(group["ids"], said), group["rewards"][member] is not None
            tokens = sum(sum(sampled) for _, sampled, _ in sequences)
            counts = counts and tokens > 0 and not (options["mask_truncated_completions"] and said["ended"] == "length")
            weight = (1 / tokens if options["loss_type"] == "grpo" else 1.0) if counts else 0.0
            for number, (ids, sampled, logprobs) in enumerate(sequences):
                name = f"{place}:{member}:{number}"
                texts.append(DueText(name, ids, [weight * each for each in sampled]))
                better[name], drawn_with[name] = values[place][member], logprobs
                importance[name] = importance_weights(kept_draw(said, number, options), len(ids), logprobs, options)
            counted += counts
    constant = options["loss_type"] == "dr_grpo"
    cap = options["max_completion_length"] * (options["max_turns"] if options.get("environment") else 1)
    divisor = counted * cap if constant else sum(sum(text.weights) for text in texts)
    return DueRollout(texts, better, drawn_with, divisor, importance)


def kept_draw(said: Mapping[str, Any], number: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Record that holds a text's log-probabilities: a completion, or one sequence of an episode."""
    if "sequences" not in said:
        return said
    weighed = options.get("vllm_server_base_url") and options["vllm_importance_sampling_correction"]
    if weighed and "sampler_logprobs" not in said["sequences"][number]:
        raise NotWitnessed("these episodes were weighed by a server's log-probabilities, which were not kept of them")
    return said["sequences"][number]


def importance_weights(said: Mapping[str, Any], tokens: int, logprobs: Sequence[float], options: Mapping[str, Any]) -> list[float]:
    """Importance weights of a completion's tokens: where a server drew it, its own log-probabilities are kept beside the trainer's."""
    theirs = said.get("sampler_logprobs")
    if theirs is None:
        return [1.0] * tokens
    before = tokens - len(theirs)
    most = options["vllm_importance_sampling_clip_max"]
    return [1.0] * before + [math.exp(min(ours - other, math.log(most))) for ours, other in zip(logprobs[before:], theirs, strict=True)]

# ---------------------------------------------------------------- what a token costs


def policy_costs(rollout: DueRollout, options: Mapping[str, Any], step: int, twin: TwinModel, fork: Mapping[str, Tensor]) -> CostOfTokens:
    """−surrogate + beta · KL · ratio − bonus · entropy, as PPO, GSPO, DAPO and CISPO write it."""
    if options["beta"] and (options["kl_estimator"] == "shift" or options["kl_window"]):
        raise NotWitnessed("--kl-estimator shift and --kl-window are not replayed")
    stale = options.get("max_staleness", 0) > 0  # drawn with weights before these
    if stale and options["num_iterations"] > 1:
        raise NotWitnessed("--max-staleness with --num-iterations: what the policy was when its rollout began is not kept")
    low, high = options["epsilon"], options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"]
    if options["loss_type"] == "cispo" and options["epsilon_high"] is not None:
        high = options["epsilon_high"] - 1
    bonus = options["entropy_weight"] * options["entropy_decay"] ** step

    def costs(logits: Tensor, tokens: Tensor, texts: Sequence[DueText]) -> Tensor:
        every, (_, learned) = (logits[:, :-1] / options["temperature"]).log_softmax(-1), right_padded(texts)
        logp = every.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        advantages = torch.tensor([[rollout.advantages[text.name]] for text in texts], dtype=torch.float64)
        counts, better, then = (stream.to(logits.device) for stream in (
            learned[:, 1:] != 0, advantages * aligned(texts, rollout.importance), aligned(texts, rollout.drawn_with)))
        if stale:  # ratios to the policy as it is; each token weighs what it would be drawn with now over what it was, up to a cap
            better = better * (logp.detach() - then).exp().clamp(max=options["importance_sampling_cap"])
        apart = torch.where(counts, logp - (logp.detach() if stale else then), 0.0)
        if options["importance_sampling_level"] == "sequence":
            apart = (apart.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)).expand_as(apart)
        ratio = apart.exp()
        if options["loss_type"] == "cispo":
            gained = ratio.detach().clamp(max=1 + high) * better * logp
        else:
            gained = torch.minimum(ratio * better, ratio.clamp(1 - low, 1 + high) * better)
        loss = -gained
        if options["beta"]:
            with torch.no_grad():
                theirs = (twin.logits(fork, tokens)[:, :-1] / options["temperature"]).log_softmax(-1).gather(-1, tokens[:, 1:, None])
            gap = logp - theirs.squeeze(-1)
            estimate = {"k1": gap, "k2": gap.square() / 2, "k3": torch.expm1(-gap) + gap}[options["kl_estimator"]]
            loss = loss + options["beta"] * estimate * ratio
        if bonus:
            loss = loss + bonus * (every.exp() * every).sum(-1)
        return torch.where(counts, loss, 0.0)
    return costs


def aligned(texts: Sequence[DueText], streams: Mapping[str, list[float]]) -> Tensor:
    """(B, T − 1): of every token but the first."""
    longest = max(len(text.tokens) for text in texts)
    return torch.tensor([streams[text.name] + [0.0] * (longest - len(text.tokens)) for text in texts], dtype=torch.float64)[:, 1:]


def fork_weights(twin: TwinModel, frozen: Mapping[str, Tensor], factors: Mapping[str, Tensor],
                 adapter: Adapter | None) -> dict[str, Tensor]:
    """Weights that the run began with: the parent's, with the parent's adapter where it was one."""
    weights = {name: tensor.to(twin.device, twin.dtype) for name, tensor in frozen.items()}
    for name in weights if adapter is not None else ():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in factors:
            assert adapter is not None
            left, right = (factors[f"{stem}.lora_{side}.weight"].to(twin.device, twin.dtype) for side in "BA")
            weights[name] = weights[name] + (adapter.scale * left @ right if not twin.gpt2 else (adapter.scale * left @ right).t())
    return weights

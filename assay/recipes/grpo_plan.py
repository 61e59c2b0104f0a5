"""What a reinforcement run is asked for becomes its parts: refusals, the loss, the pace, and prompts of which some are held out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from assay.data.packing import hold_out
from assay.errors import UsageError
from assay.generate.generation_request import Sampling
from assay.learn.policy import Surrogate
from assay.model.placement import require_device
from assay.model.transformer import parameter_count
from assay.recipes.beginning import Beginning
from assay.recipes.grpo_options import Grpo
from assay.recipes.judged import Judging
from assay.recipes.pace import Budget, Pace
from assay.recipes.rollouts import Prompt, PromptOrder, prompts_digest, read_prompts
from assay.recipes.tuning import refuse_unbudgeted
from assay.reward.reward_functions import RewardSpec, parse_rewards
from assay.verdict import Verdict, proven, refuted

NEVER = 10**12


def refuse_nonsense(config: Grpo) -> None:
    refuse_unbudgeted(config)
    if config.sampler_device is not None:
        require_device(config.sampler_device)
    if config.group < 2 or config.prompts < 1 or config.inner < 1 or config.micro < 1 or config.max_new < 1:
        raise UsageError(f"{config.prompts} prompts of {config.group} completions of {config.max_new} tokens, {config.inner} updates a "
                         f"rollout, {config.micro} rows at a time: expected at least 2 completions and 1 of everything else")
    if not config.temperature > 0:
        raise UsageError(f"--temperature is {config.temperature}: completions that are all the same teach nothing; give one above 0")
    if config.steps is not None and config.steps % config.inner:
        raise UsageError(f"--steps {config.steps} with --inner {config.inner}: a rollout is learned from {config.inner} times; "
                         "give a multiple of that")
    if config.kl_window and (config.kl == "none" or not config.checkpoint_every):
        raise UsageError("--kl-window: the reference trails from checkpoint to checkpoint; it needs a --kl and a --checkpoint-every")
    if min(config.refill, config.overlong, config.kl_window, config.eval_samples, config.samples) < 0 or config.overlong > config.max_new:
        raise UsageError("--refill, --overlong, --kl-window, --eval-samples and --samples are counts, and --overlong at most --max-new")


def surrogate(config: Grpo, device: str) -> Surrogate:
    in_loss = config.kl in ("k1", "k2", "k3")
    bonus = torch.tensor(config.entropy_weight, device=device) if config.entropy_weight else 0.0
    return Surrogate(ratio=config.ratio, epsilon=config.epsilon, epsilon_high=config.epsilon_high,
                     kl=config.kl if in_loss else "none", kl_weight=config.kl_weight if in_loss else 0.0,  # type: ignore[arg-type]
                     entropy_weight=bonus, temperature=config.temperature)


def chosen_metric(config: Grpo) -> RewardSpec:
    """The reward that says what is wanted: as named, or the heaviest rule of what is rewarded."""
    if config.metric is not None:
        return replace(parse_rewards([config.metric])[0], weight=1.0)
    rules = [reward for reward in parse_rewards(config.reward, relative=True) if not reward.relative]
    if not rules:
        raise UsageError("--reward judge alone: a judge says which completion of a group is better, not how good one is, so that no two "
                         "looks could be compared; give --metric, a rule that says what is wanted on held-out prompts")
    return max(rules, key=lambda reward: reward.weight)


def examining(config: Grpo) -> Sampling:
    return Sampling(max_new=config.max_new, temperature=config.temperature if config.eval_samples else 0.0, seed=config.seed)


class WholeRollouts(Pace):
    """A run ends where a rollout does."""

    def __init__(self, budget: Budget, inner: int):
        super().__init__(budget)
        self.inner = inner

    def decide_the_end(self, done: int, seconds_a_step: float | None) -> bool:
        decided = super().decide_the_end(done, seconds_a_step)
        if decided and self.stop_at is not None:
            self.stop_at = whole_rollouts(self.stop_at, self.inner)
        return decided


def paced(config: Grpo, order: PromptOrder) -> WholeRollouts:
    steps = None if config.minutes is not None else config.steps or order.rollouts * config.inner
    order.drawn((steps or config.inner) // config.inner - 1)  # refused now, where the data does not suffice
    warmup = min(config.warmup, steps // 4) if steps else config.warmup
    return WholeRollouts(Budget(steps, config.minutes, config.schedule, warmup, config.decay), config.inner)


def whole_rollouts(steps: int, inner: int) -> int:
    """So many steps, or the few more that end a rollout; 0 is never."""
    return -(-steps // inner) * inner or NEVER

@dataclass(frozen=True)
class Prompted:
    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    dropped: int  # too long

    @property
    def digest(self) -> str:
        return prompts_digest([*self.train, *self.held_out])


def prompted(config: Grpo, start: Beginning) -> Prompted:
    """Who is held out is decided by what the prompts say, before any is dropped for its length."""
    def read(file: str) -> list[Prompt]:
        return read_prompts(file, start.tokenizer, config.gsm8k)

    said = [prompt for file in config.data for prompt in read(file)]
    kept, apart = (said, read(config.held_out_data)) if config.held_out_data else hold_out(said, config.held_out, config.seed)
    room = start.model.config.max_length - config.max_new
    longest = min(room, config.max_prompt or room)
    train, held_out = ([prompt for prompt in some if len(prompt.ids) <= longest] for some in (kept, apart))
    if len(held_out) < 2:
        raise UsageError(f"{len(held_out)} prompts are held out, so nothing could be said about the result: raise --held-out, or give "
                         "--held-out-data")
    return Prompted(train, held_out, len(kept) + len(apart) - len(train) - len(held_out))


def check_apart(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> Verdict:
    """No held-out prompt is trained on, in this file or another, under this number or another."""
    seen = {prompt.content for prompt in train} | {prompt.text for prompt in train}
    both = [prompt.id for prompt in held_out if prompt.content in seen or prompt.text in seen]
    if both:
        return refuted("held_out", f"{len(both)} held-out prompts are trained on too: a gain on them would say nothing; remove them",
                       prompts=len(both))
    return proven("held_out", f"none of {len(held_out)} held-out prompts is among the {len(train)} that are trained on")


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` of them; who they are depends on what they say alone."""
    return list(prompts[:: max(1, -(-len(prompts) // max(2, count)))])


def announced(config: Grpo, start: Beginning, order: PromptOrder, prompts: Prompted, lr: float, pace: Pace, device: str,
              judging: Judging | None) -> list[str]:
    """Everything that was derived, before anything is spent."""
    trained = sum(p.numel() for p in start.model.parameters() if p.requires_grad)
    end = f"{pace.stop_at:,} steps" if pace.stop_at else f"{config.minutes:g} minutes"
    return [f"{start.parent.path}: {parameter_count(start.model):,} parameters, of which {trained:,} are trained; weights "
            f"{start.parent.digest[:12]}",
            f"{len(prompts.train):,} prompts to learn from, {len(prompts.held_out):,} held out, {prompts.dropped} dropped as too long",
            f"{order.places} prompts × {config.group} completions of at most {config.max_new} tokens a rollout, {config.inner} updates; "
            f"adamw at {lr:g}, {end}, on {device}" + (f", sampling on {config.sampler_device}" if config.sampler_device else ""),
            *([] if judging is None else [f"judged by {judging.endpoint.model} at {judging.endpoint.base_url}, {judging.judge.repeat:.0%} "
                                          "of the groups twice; a judge is asked anew by every run: no two are bit for bit the same"])]

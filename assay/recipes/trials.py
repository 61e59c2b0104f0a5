"""Held-out prompts answered during a run: what is wanted beside what is rewarded, prompt by prompt, the same ones each time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import GuardStop
from assay.generate.generation_request import Sampling
from assay.guard.reward_checks import check_proxy
from assay.model.transformer import Transformer
from assay.recipes.looks import Looks
from assay.recipes.rollouts import Prompt, Sampler, item
from assay.recipes.run import Run, append_rows
from assay.reward.reward_functions import RewardSpec
from assay.reward.worker_pool import ErrorLimit, RewardWorkers, ScoredItem
from assay.statistics.early_stopping import choose_best
from assay.statistics.effects import paired_effect
from assay.statistics.estimate import Estimate, mean
from assay.store.ledger import Event
from assay.strict_json import read_json_lines
from assay.verdict import Outcome, Verdict, proven, refuted, unproven

_LEVEL = 0.05  # chance that a gain is claimed where there is none, over all looks together
ANOTHER = 0.001  # what was saved scores otherwise than what was looked at: rounding turns an answer now and then, either way


@dataclass(frozen=True)
class Answered:
    """Per prompt, the means over its completions. `rewarded` is None where a judge rewards: its scores compare within a group alone."""

    wanted: NDArray[np.float64]
    rewarded: NDArray[np.float64] | None

    @property
    def estimate(self) -> Estimate:
        return mean(self.wanted)


@dataclass(frozen=True)
class Examiner:
    """`metric` is a reward of the run, whose component is taken, or another with workers of its own."""

    prompts: Sequence[Prompt]
    workers: RewardWorkers
    metric: RewardSpec
    apart: RewardWorkers | None  # None: the metric is a component of what `workers` score
    limit: ErrorLimit
    sampling: Sampling
    samples: int
    judged: bool = False  # rewards depend on a judge

    def __call__(self, sampler: Sampler, prompts: Sequence[Prompt] | None = None) -> Answered:
        """What the sampler's weights, as they were loaded, answer. The draws have the same addresses at every look."""
        asked = self.prompts if prompts is None else prompts
        groups = sampler.draw(asked, self.sampling, ("held out",), self.samples)
        items = [item(prompt, completion) for prompt, group in zip(asked, groups, strict=True) for completion in group]
        scored = self.workers.score(items)
        wanted = scored if self.apart is None else self.apart.score(items)
        self.limit.feed(scored)
        rewards = None if self.judged else self._means(asked, [each.value for each in scored], scored)
        return Answered(self._means(asked, [each.components[self.metric.name] for each in wanted], wanted), rewards)

    def _means(self, asked: Sequence[Prompt], values: Sequence[float | None], scored: Sequence[ScoredItem]) -> NDArray[np.float64]:
        """Of what is known; a prompt of which nothing is known would be another set of prompts than the last look's."""
        found = []
        for place, prompt in enumerate(asked):
            part = slice(place * self.samples, (place + 1) * self.samples)
            known = [value for value in values[part] if value is not None]
            if not known:
                raise GuardStop(f"held-out prompt {prompt.id} could not be scored: {scored[part][0].error}; mend the reward, or the row")
            found.append(float(np.mean(known)))
        return np.array(found)


class Trials(Looks):
    """A history in which a loss is minus the score, so that the best is the lowest as elsewhere. Step 0 is the parent."""

    def __init__(self, run: Run, answer: Callable[[Transformer, int], Answered], *, name: str, device: str):
        super().__init__(run, self._no_loss, repeats_from=0, device=device)
        self.answer, self.name = answer, name
        self.rewards: list[float] = []

    @staticmethod
    def _no_loss(_: Transformer) -> Any:
        raise AssertionError("answers are looked at, not losses")

    def look(self, model: Transformer, step: int, weight_set: str | None = None) -> Any:
        found = self.answer(model, step)
        self._remember(step, -found.wanted, 0.0)
        reward = None if found.rewarded is None else float(found.rewarded.mean())
        append_rows(self.file, [{"step": step, "train": 0.0, "per_document": (-found.wanted).tolist(), "reward": reward}])
        scored = found.estimate
        self.run.record(step - 1, **{f"eval_{self.name}": scored.mean, "eval_low": scored.low, "eval_high": scored.high,
                                     "eval_prompts": scored.n} | ({} if reward is None else {"eval_reward": reward}))
        self.run.say(f"step {step}: held-out {self.name} {scored}" + ("" if reward is None else f", reward {reward:.4f}"))
        if reward is not None:
            self.rewards.append(reward)
            self._say_parting(step)
        return found

    def recall(self) -> None:
        super().recall()
        self.rewards = [row["reward"] for row in read_json_lines(self.file) if row["reward"] is not None]

    def best_step(self) -> int:
        """Among those that have learned: whether that is better than the parent is another question."""
        return self.steps[1 + choose_best(self.losses[1:]).best] if len(self.losses) > 1 else 0

    def verdict_in_words(self) -> str:
        return choose_best(self.losses[1:]).reason if len(self.losses) > 2 else "there was one look"

    def _say_parting(self, step: int) -> None:
        verdict = check_proxy(self.rewards, [-float(losses.mean()) for losses in self.losses])
        if verdict.outcome is Outcome.REFUTED:
            self.run.say(f"step {step}: {verdict.reason}")
            self.run.ledger.append(Event.PROXY, step=step, verdicts=[verdict.to_json()])


def check_same_answers(what: str, recorded: NDArray[np.float64], found: NDArray[np.float64]) -> Verdict:
    """The same weights answer the same prompts alike. Rounding may turn one answer or another, and none in particular."""
    others = int((recorded != found).sum())
    words = f"{what}: {others} of {len(found)} prompts are scored otherwise, {recorded.mean():.4f} then and {found.mean():.4f} now"
    if others and paired_effect(found, recorded).p < ANOTHER:
        return refuted("score", f"{words}: these are not the weights that were scored", others=others)
    return proven("score", words, others=others)


def check_gain(name: str, before: NDArray[np.float64], after: NDArray[np.float64], looks: int) -> Verdict:
    """Did the held-out score rise from the parent's, prompt by prompt? The best of several looks has as many chances to look good."""
    effect = paired_effect(after, before)
    p = min(1.0, effect.p * max(1, looks))
    change = effect.interval(1 - _LEVEL / max(1, looks))
    words = (f"held-out {name} went from {before.mean():.4f} to {after.mean():.4f} on {len(after)} prompts: {change} "
             f"(p = {p:.2g}, the best of {looks} looks)")
    evidence = {"p": p, "change": effect.mean, "low": change.low, "high": change.high, "prompts": len(after), "looks": looks}
    if p > _LEVEL:
        return unproven("gain", f"{words}: not shown", optional=True, **evidence)
    if effect.mean < 0:
        return refuted("gain", f"{words}: it fell", **evidence)
    return proven("gain", f"{words}: it rose", **evidence)

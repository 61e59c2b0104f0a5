"""Evaluation of a policy during a run: held-out prompts answered, the same ones each time; what is wanted beside what is rewarded."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from assay.generate.generation_request import Sampling
from assay.guard.reward_checks import check_proxy
from assay.recipes.evaluator import EvalHistory
from assay.recipes.prompts import Prompt
from assay.recipes.rewards import Answered, Rewards
from assay.recipes.rollouts import Sampler
from assay.recipes.run import Run
from assay.statistics.early_stopping import choose_best
from assay.statistics.effects import paired_effect
from assay.store.checkpoint import step_folder
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict, proven, refuted, unproven

LEVEL = 0.05  # chance that a gain is claimed where there is none, over all evaluations together
ANOTHER = 0.001  # what was saved scores otherwise than what was evaluated: rounding turns an answer now and then, either way


class PromptEvaluator:
    """Scores `samples` completions of each of the `prompts` by the metric. Step 0 is the parent.

    In its history a loss is minus the score, so that the best is the lowest as elsewhere.
    """

    def __init__(self, run: Run, prompts: Sequence[Prompt], rewards: Rewards, sampling: Sampling, samples: int):
        self.run, self.prompts, self.rewards, self.sampling, self.samples = run, prompts, rewards, sampling, samples
        self.history, self.name = EvalHistory(run), rewards.metric.name
        self.mean_rewards: list[float] = []

    def recall(self) -> None:
        self.mean_rewards = [row["reward"] for row in self.history.recall() if row["reward"] is not None]

    def evaluate(self, sampler: Sampler, step: int) -> Answered:
        """The weights as they are now, after so many updates."""
        with self.run.spent.part("evaluation"):
            sampler.load(step)
            found = self.answer(sampler, self.prompts)
        reward = None if found.rewarded is None else float(found.rewarded.mean())
        self.history.add(step, -found.wanted, 0.0, found.digest, reward=reward, metric=self.name)
        scored = found.estimate
        self.run.record(step - 1, **{f"eval_{self.name}": scored.mean, "eval_low": scored.low, "eval_high": scored.high,
                                     "eval_prompts": scored.n} | ({} if reward is None else {"eval_reward": reward}))
        self.run.say(f"step {step}: held-out {self.name} {scored}" + ("" if reward is None else f", reward {reward:.4f}"))
        if reward is not None:
            self.mean_rewards.append(reward)
            self._say_parting(step)
        return found

    def answer(self, sampler: Sampler, prompts: Sequence[Prompt]) -> Answered:
        """What the sampler's weights, as they were loaded, answer. The draws have the same addresses each time."""
        return self.rewards.answer(sampler, prompts, self.sampling, self.samples)

    def best_step(self) -> int:
        """Among those that have learned: whether that is better than the parent is another question."""
        history = self.history
        return history.steps[1 + choose_best(history.losses[1:]).best] if len(history.losses) > 1 else 0

    @property
    def latest_step(self) -> int | None:
        return self.history.latest_step

    def best_losses(self) -> np.ndarray:
        return self.history.at(self.best_step())

    def best_checkpoint(self) -> Path | None:
        return step_folder(self.run.checkpoints, self.best_step()) if self.history.steps else None

    def best_in_words(self) -> str:
        return choose_best(self.history.losses[1:]).reason if len(self.history.losses) > 2 else "there was one evaluation"

    def _say_parting(self, step: int) -> None:
        verdict = check_proxy(self.mean_rewards, [-float(losses.mean()) for losses in self.history.losses])
        if verdict.outcome is Outcome.REFUTED:
            self.run.say(f"step {step}: {verdict.reason}")
            self.run.log(Event.PROXY, step=step, verdicts=[verdict.to_json()])


def check_same_answers(what: str, recorded: NDArray[np.float64], found: NDArray[np.float64]) -> Verdict:
    """The same weights answer the same prompts alike. Rounding may turn one answer or another, and none in particular."""
    others = int((recorded != found).sum())
    words = f"{what}: {others} of {len(found)} prompts are scored otherwise, {recorded.mean():.4f} then and {found.mean():.4f} now"
    if others and paired_effect(found, recorded).p < ANOTHER:
        return refuted("score", f"{words}: these are not the weights that were scored", others=others)
    return proven("score", words, others=others)


def check_gain(name: str, before: NDArray[np.float64], after: NDArray[np.float64], evaluations: int) -> Verdict:
    """Did the held-out score rise from the parent's, prompt by prompt? The best of several evaluations has as many chances to look good."""
    effect = paired_effect(after, before)
    p = min(1.0, effect.p * max(1, evaluations))
    change = effect.interval(1 - LEVEL / max(1, evaluations))
    words = (f"held-out {name} went from {before.mean():.4f} to {after.mean():.4f} on {len(after)} prompts: {change} "
             f"(p = {p:.2g}, the best of {evaluations} evaluations)")
    evidence = {"p": p, "change": effect.mean, "low": change.low, "high": change.high, "prompts": len(after), "evaluations": evaluations}
    if p > LEVEL:
        return unproven("gain", f"{words}: not shown", optional=True, **evidence)
    if effect.mean < 0:
        return refuted("gain", f"{words}: it fell", **evidence)
    return proven("gain", f"{words}: it rose", **evidence)

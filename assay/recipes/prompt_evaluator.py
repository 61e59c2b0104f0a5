"""Evaluation of a policy during a run: held-out prompts answered, the same ones each time; what is wanted beside what is rewarded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from assay.generate.generation_request import Sampling
from assay.guard.reward_checks import check_proxy
from assay.recipes.evaluator import EvalHistory
from assay.recipes.prompts import Prompt
from assay.recipes.rewards import Answered
from assay.recipes.rollouts import Sampler
from assay.recipes.run import Run
from assay.recipes.witness_looks import LookRecords
from assay.statistics.early_stopping import choose_best
from assay.statistics.effects import paired_effect, visible_change
from assay.store.checkpoint import step_folder
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict, proven, refuted, unproven

EVALUATION_SHARE = 0.05  # of all completions that a run samples: what evaluations may cost beside it
USUAL_PROMPTS, FEWEST_PROMPTS, MOST_SAMPLES = 128, 8, 16  # of an evaluation: where the run's length is not known, at least, at most
LEVEL = 0.05  # chance that a gain is claimed where there is none, over all evaluations together
ANOTHER = 0.001  # what was saved scores otherwise than what was evaluated: rounding turns an answer now and then, either way


@dataclass(frozen=True)
class EvaluationPlan:
    """Plan of the evaluations: what each scores, and the share of the run's sampling that all of them take."""

    prompts: int
    samples: int  # completions of each; 1 is greedy where nothing else was asked for
    greedy: bool
    share: float | None  # None: how long the run will be is not known


def plan_evaluations(*, held_out: int, asked_prompts: int | None, asked_samples: int | None, completions: int | None,
                     evaluations: int) -> EvaluationPlan:
    """Plan the evaluations: as many prompts, then as many samples of each, as EVALUATION_SHARE of the run's `completions` pays for; half of
    what is held out at most, so that the gain is measured on prompts that nothing was chosen by."""
    most = max(2, held_out // 2)
    paid = USUAL_PROMPTS if completions is None else int(EVALUATION_SHARE * completions / max(1, evaluations))
    prompts = min(most, asked_prompts or max(FEWEST_PROMPTS, paid))
    affordable = 1 if completions is None else min(MOST_SAMPLES, paid // prompts)
    samples = asked_samples if asked_samples is not None else affordable if affordable > 1 else 0
    share = None if completions is None else prompts * max(1, samples) * evaluations / completions
    return EvaluationPlan(prompts, max(1, samples), samples == 0, share)


class HeldOutScorer(Protocol):
    """Rewards of prompts, or an environment's tasks."""

    @property
    def metric(self) -> Any: ...

    def answer(self, sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling, samples: int) -> Answered: ...


class PromptEvaluator:
    """Scores `samples` completions of each of the `prompts` by the metric. Step 0 is the parent.

    In its history a loss is minus the score, so that the best is the lowest as elsewhere.
    """

    def __init__(self, run: Run, prompts: Sequence[Prompt], rewards: HeldOutScorer, sampling: Sampling, samples: int,
                 looks: LookRecords | None = None):
        self.run, self.prompts, self.rewards, self.sampling, self.samples, self.looks = run, prompts, rewards, sampling, samples, looks
        self.history, self.name = EvalHistory(run), rewards.metric.name
        self.mean_rewards: list[float] = []

    def recall(self) -> None:
        self.mean_rewards = [row["reward"] for row in self.history.recall() if row["reward"] is not None]

    def evaluate(self, sampler: Sampler, step: int) -> Answered:
        """The weights as they are now, after so many updates."""
        with self.run.spent.part("evaluation"):
            sampler.load(step)
            found = self.answer(sampler, self.prompts)
        if self.looks is not None:
            self.looks.keep_step(step, found, self.prompts, self.sampling)
        reward = None if found.rewarded is None else float(found.rewarded.mean())
        self.history.add(step, -found.wanted, 0.0, found.digest, reward=reward, metric=self.name)
        scored = found.estimate
        self.run.record(step - 1, **{f"eval_{self.name}": scored.mean, "eval_low": scored.low, "eval_high": scored.high,
                                     "eval_prompts": scored.n} | ({} if reward is None else {"eval_reward": reward}))
        self.run.say(f"step {step}: held-out {self.name} {scored}" + ("" if reward is None else f", reward {reward:.4f}"))
        if len(self.history.steps) == 1:
            self.run.say(f"an evaluation of {scored.n} prompts shows changes from about {visible_change(found.wanted):.2g} on; smaller "
                         "ones may be noise")
        if reward is not None:
            self.mean_rewards.append(reward)
            self._say_parting(step)
        return found

    def answer(self, sampler: Sampler, prompts: Sequence[Prompt]) -> Answered:
        """Answers of the sampler's weights, as loaded; the random draws have the same addresses each time."""
        return self.rewards.answer(sampler, prompts, self.sampling, self.samples)

    def scores_at(self, step: int) -> NDArray[np.float64]:
        """Score of each prompt at the evaluation of that step."""
        return -self.history.at(step)

    def best_step(self) -> int:
        """The highest mean among those that have learned and whose weights are kept, in a checkpoint or in memory until they are: kept
        while the run goes on, and not yet said to be better than the others."""
        kept = [step for step in self.history.steps[1:] if step not in self.run.unsaved]
        return kept[choose_best([self.history.at(step) for step in kept]).best] if kept else 0

    def chosen(self) -> tuple[int, str]:
        """The step that is handed over, and why: the last, unless the one with the highest mean is shown to be better than it."""
        last, best, looks = self.history.steps[-1], self.best_step(), len(self.history.steps) - 1
        if best == last:
            return last, "the last evaluation has the highest mean" + self._not_kept(best)
        effect = paired_effect(self.scores_at(best), self.scores_at(last))
        p = min(1.0, effect.p * max(1, looks - 1))
        words = (f"step {best} scored {effect.mean:.4f} more than the last, step {last}, on {effect.n} prompts (p = {p:.2g}, as the "
                 f"highest of {looks})")
        words += self._not_kept(best)
        return (best, f"{words}: shown") if p < LEVEL and effect.mean > 0 else (last, f"{words}: not shown, so the last is handed over")

    def _not_kept(self, best: int) -> str:
        """Words for the step that scored more than the best whose weights are kept, where there is one."""
        lost = max(self.run.unsaved.keys() & set(self.history.steps), key=lambda step: self.scores_at(step).mean(), default=None)
        if lost is None or self.scores_at(lost).mean() <= self.scores_at(best).mean():
            return ""
        return f" of those that were kept; step {lost} scored {self.scores_at(lost).mean():.4f} and was not: {self.run.unsaved[lost]}"

    @property
    def latest_step(self) -> int | None:
        return self.history.latest_step

    def best_checkpoint(self) -> Path | None:
        return step_folder(self.run.checkpoints, self.best_step()) if self.history.steps else None

    def _say_parting(self, step: int) -> None:
        verdict = check_proxy(self.mean_rewards, [-float(losses.mean()) for losses in self.history.losses])
        if verdict.outcome is Outcome.REFUTED:
            self.run.say(f"step {step}: {verdict.reason}")
            self.run.log(Event.PROXY, step=step, verdicts=[verdict.to_json()])


def check_same_answers(what: str, recorded: NDArray[np.float64], found: NDArray[np.float64]) -> Verdict:
    """Check that the same weights answer the same prompts alike, apart from single answers that rounding may change."""
    others = int((recorded != found).sum())
    words = f"{what}: {others} of {len(found)} prompts are scored otherwise, {recorded.mean():.4f} then and {found.mean():.4f} now"
    if others and paired_effect(found, recorded).p < ANOTHER:
        return refuted("score", f"{words}: these are not the weights that were scored", others=others)
    return proven("score", words, others=others)


def check_gain(name: str, before: NDArray[np.float64], after: NDArray[np.float64], chances: int = 1) -> Verdict:
    """Check that the held-out score rose from the parent's, prompt by prompt. On prompts that the checkpoint was also chosen by, the best
    of several evaluations has as many `chances` to look good."""
    effect = paired_effect(after, before)
    p = min(1.0, effect.p * max(1, chances))
    change = effect.interval(1 - LEVEL / max(1, chances))
    how = "on prompts that were not used to choose the checkpoint" if chances == 1 else f"the best of {chances} evaluations"
    words = (f"held-out {name} went from {before.mean():.4f} to {after.mean():.4f} on {len(after)} prompts: {change} (p = {p:.2g}, {how})")
    evidence = {"p": p, "change": effect.mean, "low": change.low, "high": change.high, "prompts": len(after), "evaluations": chances}
    if p > LEVEL:
        return unproven("gain", f"{words}: not shown", optional=True, **evidence)
    if effect.mean < 0:
        return refuted("gain", f"{words}: it fell", **evidence)
    return proven("gain", f"{words}: it rose", **evidence)

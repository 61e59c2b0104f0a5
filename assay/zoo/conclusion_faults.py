"""Conclusion faults: stops on noise, overfitting, collapsed seeds, gains not shown, rewards that fell, sick texts."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.comparison import pairwise
from assay.comparison.pairwise import Claim, compare, per_completion_p
from assay.comparison.read_results import Arm, ScoredRun, Series
from assay.comparison.second_opinion import check_comparisons
from assay.data.order import Order
from assay.evaluation.held_out_loss import HeldOut, score_corpus
from assay.guard.conclusion_checks import (
    check_best,
    check_budget,
    check_claim,
    check_early_stopping,
    check_generalisation_gap,
    check_improvement,
    check_rise,
)
from assay.health.generation_probe import GeneratedText, compare_health, probe
from assay.health.probe_prompts import BUILT_IN_PROMPTS, ProbePrompt
from assay.learn import objectives
from assay.learn.lr_schedule import Budget, Schedule
from assay.model.transformer import Transformer
from assay.seeds import derive, generator
from assay.statistics.early_stopping import choose_best
from assay.statistics.seed_stability import stability
from assay.testing import tiny_training
from assay.testing.fault_injection import Plant, fault, in_place_of, swap
from assay.testing.tiny_training import LEAST_IMPROVEMENT, PATIENCE, ROWS_A_STEP, TINY_LENGTH, TinyRun, tiny_corpus
from assay.verdict import Verdict
from assay.zoo import conclusion_faults as own

HELD_OUT_SCORES, STEPS_BETWEEN = 7, 6
EVALUATIONS = 24
_SEEDS = (42, 314, 1337)

# ---------------------------------------------------------------- jobs


def a_noisy_validation(folder: Path, plant: Plant) -> list[Verdict]:
    """Two batches are held out, and their mean moves by 0.04 from one evaluation to the next; the loss falls all the while."""
    noise = np.random.default_rng(derive(0, "validation"))
    history = [9.8 - 0.012 * seen + noise.normal(0, 0.04 * math.sqrt(2), 2) for seen in range(EVALUATIONS)]
    with plant(folder):
        seen = next((n for n in range(2, EVALUATIONS) if tiny_training.decides_to_stop(history[:n], EVALUATIONS)), EVALUATIONS)
    return [check_early_stopping(history[:seen], planned=EVALUATIONS, min_improvement=LEAST_IMPROVEMENT, patience=PATIENCE)]


def a_run_with_evaluations(folder: Path, plant: Plant) -> list[Verdict]:
    """Twice over the corpus, and held-out text every few steps."""
    with plant(folder):
        run = TinyRun(steps=HELD_OUT_SCORES * STEPS_BETWEEN, lr=3e-3, epochs=2, micro=ROWS_A_STEP)
        model, held_out, train, losses = run.model(), list[float](), list[float](), list[float]()
        for step in run.train(model):
            losses.append(float(step.loss))
            if len(losses) == STEPS_BETWEEN:
                train.append(float(np.mean(losses)))
                held_out.append(held_out_score(model).loss)
                losses = []
    return [check_generalisation_gap(train, held_out)]


def a_budget_of_steps(folder: Path, plant: Plant) -> list[Verdict]:
    """A loop that its schedule ends."""
    schedule, done = Schedule(Budget(steps=20, minutes=None, schedule="wsd", warmup=2, decay=0.5)), 0
    with plant(folder):
        while not schedule.over(done):
            done += 1
    return [check_budget(schedule, done)]


def three_seeds(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [stability({seed: final_loss(seed) for seed in _SEEDS}, metric="held-out loss").verdict()]


def final_loss(seed: int) -> float:
    run = TinyRun(steps=10, lr=3e-3, seed=seed, micro=ROWS_A_STEP)
    model = run.model()
    for _ in run.train(model):
        pass
    return held_out_score(model).loss


def held_out_score(model: Transformer) -> HeldOut:
    return score_corpus(model, tiny_corpus(), rows=16, length=TINY_LENGTH)

# ---------------------------------------------------------------- faults


@fault("stopped on noise", rows=("S4",), stage="eval", check="stopping", job=a_noisy_validation)
@in_place_of(tiny_training, "decides_to_stop")
def stopped_on_noise(_: Any, history: Sequence[Any], evaluations: int) -> bool:
    """The classic rule: no new best for two evaluations means converged."""
    means = [float(np.mean(losses)) for losses in history]
    return min(means[-PATIENCE:]) > min(means[:-PATIENCE], default=math.inf)


fault("learned by heart", rows=("S5",), stage="data", check="gap", job=a_run_with_evaluations)(
    # A corpus far too small for its model goes round and round.
    lambda _: swap(Order, "consumed", lambda order, step: np.arange(order.rows)))


fault("a budget cut short", rows=("S3",), stage="optimizer", check="budget", job=a_budget_of_steps)(
    # Steps are counted from 1 in one place and by micro-batches in another: the loop ends at half its steps, at a high rate.
    in_place_of(Schedule, "over")(lambda usual, schedule, done: usual(schedule, 2 * done)))


@fault("two seeds of three collapse", rows=("S6",), stage="precision", check="seeds", job=three_seeds)
def two_seeds_collapse(_: Path) -> AbstractContextManager[None]:
    """A new kernel's loss is right, but from some first weights its sums overflow, and the gradient drowns in their rounding."""
    whole, rounding = objectives.linear_cross_entropy, generator(0, "rounding")

    def entropy(hidden: Tensor, head: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        total, losses = whole(hidden, head, *rest, **options)
        overflows = bool(head.detach()[1, 0] > 0)  # a matter of the seed
        noise = (hidden * torch.randn(hidden.shape, generator=rounding) * 10 * overflows).sum()
        return total + noise - noise.detach(), losses

    return swap(objectives, "linear_cross_entropy", entropy)


PROBLEMS = 200
WORDS = ("river", "stone", "light", "under", "before", "winter", "table", "open", "quiet", "seven", "garden", "letter", "follow", "bread",
         "window", "slowly", "carry", "north", "paper", "green", "across", "morning", "little", "house", "answer", "bridge", "always")

# ---------------------------------------------------------------- who concludes, and who speaks


def conclude(arms: Sequence[Arm]) -> tuple[str, Claim]:
    """The arm that is talked about, and what is said of it against the first."""
    found = compare(arms)[0]
    return found.after, found.claim


def declares_passed(series: Series) -> bool:
    """Whether a run's reward lets it be called a success."""
    from assay.comparison.trend import trend

    return trend(series).improves


def healthy_texts(prompts: Sequence[ProbePrompt], round: int) -> list[GeneratedText]:
    """Texts without a fault: to each prompt words of its own."""
    spoken = []
    for prompt in prompts:
        chance = np.random.default_rng(derive(round, "healthy", prompt.id))
        spoken.append(GeneratedText(" ".join(chance.choice(WORDS, 24)).capitalize() + ".", "stop"))
    return spoken

# ---------------------------------------------------------------- jobs


def forked_runs(_: Path, plant: Plant) -> list[Verdict]:
    """Six runs before and four after, 18 texts each; two of the four are malformed through and through."""
    before = Arm("old", "malformed", tuple(_texts(i, 0) for i in range(6)), True)
    after = Arm("new", "malformed", tuple(_texts(i, 18 if i < 2 else 0) for i in range(4)), True)
    return _concluded(plant, [before, after])


def two_checkpoints(_: Path, plant: Plant) -> list[Verdict]:
    """200 problems, 3 right before and 4 after."""
    return _concluded(plant, [_solved("sft", 3), _solved("grpo", 4)])


def many_variants(_: Path, plant: Plant) -> list[Verdict]:
    """Twenty variants that change nothing, each scored once on the same problems."""
    chance = np.random.default_rng(derive(2, "variants"))
    rates = chance.uniform(0.1, 0.9, PROBLEMS)
    arms = [Arm(f"variant {i}" if i else "before", "accuracy", (_run(chance.random(PROBLEMS) < rates),), False) for i in range(21)]
    return _concluded(plant, arms)


def three_seeds_each(_: Path, plant: Plant) -> list[Verdict]:
    """The new recipe is a little better on one seed and collapses on two."""
    arms = [Arm(name, "bits per byte", tuple(ScoredRun(str(i), {"": (value,)}) for i, value in enumerate(values)), True)
            for name, values in (("before", (1.0697, 1.0695, 1.0696)), ("after", (1.0690, 1.1214, 1.1214)))]
    return _concluded(plant, arms)


def form_and_answer(_: Path, plant: Plant) -> list[Verdict]:
    """Job: after training every answer has its form, and half of those that were right are wrong."""
    arms = [Arm(name, "accuracy", (_run(right),), False) for name, right in (
        ("before", np.arange(PROBLEMS) < 60), ("after", np.arange(PROBLEMS) < 30))]
    return _concluded(plant, arms)


def a_falling_reward(_: Path, plant: Plant) -> list[Verdict]:
    """0.600 at the beginning, 0.541 after 500 steps, with the noise that such rewards have."""
    chance, steps = np.random.default_rng(derive(0, "reward")), range(0, 500, 5)
    series = Series("grpo", "reward", tuple(steps), tuple((0.600 - 0.059 * step / 500 + chance.normal(0, 0.02),) for step in steps), False)
    with plant(_):
        passed = own.declares_passed(series)
    return [check_rise(series, passed=passed)]


def a_probe(_: Path, plant: Plant) -> list[Verdict]:
    """Job: probe a saved artifact and its parent, which is healthy."""
    parent = probe(healthy_texts, BUILT_IN_PROMPTS, n=4, name="parent")
    with plant(_):
        child = probe(own.healthy_texts, BUILT_IN_PROMPTS, n=4, name="child")
    return [child.verdict(), compare_health(child, parent)[1]]


def a_run_with_a_best(_: Path, plant: Plant) -> list[Verdict]:
    """Four evaluations of 40 documents: better after some steps than before the first, and then worse and worse."""
    noise = np.random.default_rng(derive(0, "evaluations"))
    scores = [loss + 0.02 * noise.standard_normal(40) for loss in (3.0, 2.8, 3.2, 3.3)]
    with plant(_):
        best = own.chosen(scores)
    return [check_improvement(best, scores[0], scores[best])]


def a_run_with_ragged_documents(_: Path, plant: Plant) -> list[Verdict]:
    """Three short documents and a long one; what is printed is the mean over tokens, and by documents another step looks better."""
    tokens = np.array([10.0, 10.0, 10.0, 370.0])
    losses = [np.array([2.0, 2.1, 1.9, 2.0]), np.array([1.8, 1.9, 1.7, 1.2]), np.array([0.9, 1.0, 0.8, 1.6])]
    with plant(_):
        best = own.chosen([each * tokens / tokens.mean() for each in losses])
    return [check_best(best, {step: float((each * tokens).sum() / tokens.sum()) for step, each in enumerate(losses)})]


def chosen(scores: Sequence[np.ndarray]) -> int:
    """Index of the evaluation whose checkpoint is handed over."""
    return choose_best(list(scores)).best


def a_second_opinion(_: Path, plant: Plant) -> list[Verdict]:
    """60 problems and no gain, compared, and the comparison looked over."""
    chance = np.random.default_rng(derive(0, "opinion"))
    before = chance.random(60)
    arms = [Arm(name, "score", (_run(scores),), False) for name, scores in (
        ("before", before), ("after", np.clip(before + 0.1 * chance.standard_normal(60), 0, 1)))]
    with plant(_):
        return [check_comparisons(arms, compare(arms), 0.05)]


def _concluded(plant: Plant, arms: list[Arm]) -> list[Verdict]:
    with plant(Path()):
        claimed, claims = own.conclude(arms)
    return [check_claim(claimed, arms, claims)]

# ---------------------------------------------------------------- faults


@fault("completions counted as runs", rows=("S1",), stage="eval", check="claim", job=forked_runs)
@in_place_of(own, "conclude")
def completions_counted_as_runs(_: Any, arms: Sequence[Arm]) -> tuple[str, Claim]:
    """36 of 72 texts against 0 of 108 is called proof; the runs, not the texts, are independent."""
    p = per_completion_p(arms[0], arms[1])
    return arms[1].name, "shown worse" if p is not None and p <= 0.05 else "not shown"


fault("one problem called a gain", rows=("S8",), stage="eval", check="claim", job=two_checkpoints)(
    lambda _: swap(own, "conclude", _larger_mean))


@fault("best of many called a gain", rows=("S8",), stage="eval", check="claim", job=many_variants)
@in_place_of(own, "conclude")
def best_of_many_called_a_gain(_: Any, arms: Sequence[Arm]) -> tuple[str, Claim]:
    """Each variant is tested alone, and the one that came out best is reported."""
    return max((compare([arms[0], arm])[0] for arm in arms[1:]), key=lambda one: one.effect.mean).after, "shown better"


@fault("best seed reported", rows=("S6",), stage="eval", check="claim", job=three_seeds_each)
@in_place_of(own, "conclude")
def best_seed_reported(_: Any, arms: Sequence[Arm]) -> tuple[str, Claim]:
    """The seeds that collapsed are left out as outliers."""
    lowest = [min(run.score for run in arm.runs) for arm in arms]
    return arms[1].name, "shown better" if lowest[1] < lowest[0] else "not shown"


fault("form taken for the answer", rows=("W03",), stage="eval", check="claim", job=form_and_answer)(
    # All texts have the form that was rewarded, and that is reported as better.
    lambda _: swap(own, "conclude", lambda arms: (arms[1].name, "shown better")))


@fault("compared on other problems", rows=("E06", "D20"), stage="eval", check="claim", job=two_checkpoints)
@in_place_of(own, "conclude")
def compared_on_other_problems(_: Any, arms: list[Arm]) -> tuple[str, Claim]:
    """What failed is missing on one side, and the rest is averaged."""
    kept = {problem: scores for problem, scores in arms[1].runs[0].scores.items() if int(problem) < 50}
    arms[1] = Arm(arms[1].name, arms[1].metric, (ScoredRun("", kept),), False)
    return _larger_mean(arms)


fault("a fall called success", rows=("S8",), stage="reward", check="rise", job=a_falling_reward)(
    # The run came to its end, so it passed.
    lambda _: swap(own, "declares_passed", lambda series: True))


fault("the worst chosen for the best", rows=("C06",), stage="eval", check="improvement", job=a_run_with_a_best)(
    in_place_of(own, "chosen")(lambda _, scores: int(np.argmax([losses.mean() for losses in scores]))))
fault("the best by another mean than is printed", rows=("C06",), stage="eval", check="best", job=a_run_with_ragged_documents)(
    # A mean of the documents' medians, in place of the mean over tokens.
    in_place_of(own, "chosen")(lambda _, scores: int(np.argmin([np.median(losses) for losses in scores]))))
fault("p-values lost on the way", rows=("S8",), stage="eval", check="second opinion", job=a_second_opinion)(
    # The adjustment for many comparisons returns a list that nobody filled.
    lambda _: swap(pairwise, "holm", lambda p_values: [0.0] * len(p_values)))


@fault("saved artifact loops", rows=("S1",), stage="save", check="health", job=a_probe)
@in_place_of(own, "healthy_texts")
def saved_artifact_loops(usual: Any, prompts: Sequence[ProbePrompt], round: int) -> list[GeneratedText]:
    """Half of the texts go round and round."""
    loop = GeneratedText("and then we went on and on " * 15, "length")
    return [loop if i % 2 else one for i, one in enumerate(usual(prompts, round))]


@fault("every question answered with sums", rows=("S8",), stage="eval", check="health", job=a_probe)
@in_place_of(own, "healthy_texts")
def every_question_answered_with_sums(_: Any, prompts: Sequence[ProbePrompt], round: int) -> list[GeneratedText]:
    worked = [f"{i} + {round + 4} = {i + round + 4} {i} * 3 = {3 * i} so the answer is #### {3 * i}" for i in range(len(prompts))]
    return [GeneratedText(text, "stop") for text in worked]


fault("empty answers", rows=("W02",), stage="reward", check="health against parent", job=a_probe)(
    # What a reward for anything that the gold contains leads to.
    lambda _: swap(own, "healthy_texts", lambda prompts, round: [GeneratedText("", "stop") for _ in prompts]))


def _larger_mean(arms: Sequence[Arm]) -> tuple[str, Claim]:
    return arms[1].name, "shown better" if arms[1].runs[0].score > arms[0].runs[0].score else "not shown"


def _texts(run: int, bad: int) -> ScoredRun:
    return ScoredRun(str(run), {str(i): (float(i < bad),) for i in range(18)})


def _solved(name: str, right: int) -> Arm:
    return Arm(name, "pass@1", (_run(np.arange(PROBLEMS) < right),), False)


def _run(right: np.ndarray) -> ScoredRun:
    return ScoredRun("", {str(i): (float(score),) for i, score in enumerate(right)})

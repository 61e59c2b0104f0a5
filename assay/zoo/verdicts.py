"""Faults of conclusions: runs hidden behind completions, a gain of one problem, the best of many, a fall called success, sick texts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from assay.guard.claims import check_claim, check_rise
from assay.measure.arms import Arm, Run, Series
from assay.measure.compare import Claim, compare, per_completion_p
from assay.measure.probe import Said, against, probe
from assay.measure.probe_prompts import BUILT_IN, Prompt
from assay.seeds import derive
from assay.verdict import Verdict
from assay.zoo import verdicts as own
from assay.zoo.fault import Plant, fault
from assay.zoo.stage import swapped

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
    from assay.measure.trend import trend

    return trend(series).improves


def say(prompts: Sequence[Prompt], round: int) -> list[Said]:
    """Texts without a fault: to each prompt words of its own."""
    spoken = []
    for prompt in prompts:
        chance = np.random.default_rng(derive(round, "healthy", prompt.id))
        spoken.append(Said(" ".join(chance.choice(WORDS, 24)).capitalize() + ".", "stop"))
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
    arms = [Arm(name, "bits per byte", tuple(Run(str(i), {"": (value,)}) for i, value in enumerate(values)), True)
            for name, values in (("before", (1.0697, 1.0695, 1.0696)), ("after", (1.0690, 1.1214, 1.1214)))]
    return _concluded(plant, arms)


def form_and_answer(_: Path, plant: Plant) -> list[Verdict]:
    """After training every answer has its form, and half of those that were right are wrong."""
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
    """Of a saved artifact and of its parent, which is healthy."""
    parent = probe(say, BUILT_IN, n=4, name="parent")
    with plant(_):
        child = probe(own.say, BUILT_IN, n=4, name="child")
    return [child.verdict(), against(child, parent)[1]]


def _concluded(plant: Plant, arms: list[Arm]) -> list[Verdict]:
    with plant(Path()):
        claimed, claims = own.conclude(arms)
    return [check_claim(claimed, arms, claims)]

# ---------------------------------------------------------------- faults


@fault("completions counted as runs", rows=("S1",), stage="eval", check="claim", job=forked_runs)
def completions_counted_as_runs(_: Path) -> AbstractContextManager[None]:
    """36 of 72 texts against 0 of 108 is called proof; the runs, not the texts, are independent."""
    def every_text(arms: Sequence[Arm]) -> tuple[str, Claim]:
        p = per_completion_p(arms[0], arms[1])
        return arms[1].name, "shown worse" if p is not None and p <= 0.05 else "not shown"

    return swapped(own, "conclude", every_text)


@fault("one problem called a gain", rows=("S8",), stage="eval", check="claim", job=two_checkpoints)
def one_problem_called_a_gain(_: Path) -> AbstractContextManager[None]:
    return swapped(own, "conclude", _larger_mean)


@fault("best of many called a gain", rows=("S8",), stage="eval", check="claim", job=many_variants)
def best_of_many_called_a_gain(_: Path) -> AbstractContextManager[None]:
    """Each variant is tested alone, and the one that came out best is reported."""
    def best(arms: Sequence[Arm]) -> tuple[str, Claim]:
        return max((compare([arms[0], arm])[0] for arm in arms[1:]), key=lambda one: one.effect.mean).after, "shown better"

    return swapped(own, "conclude", best)


@fault("best seed reported", rows=("S6",), stage="eval", check="claim", job=three_seeds_each)
def best_seed_reported(_: Path) -> AbstractContextManager[None]:
    """The seeds that collapsed are left out as outliers."""
    def best_seed(arms: Sequence[Arm]) -> tuple[str, Claim]:
        lowest = [min(run.score for run in arm.runs) for arm in arms]
        return arms[1].name, "shown better" if lowest[1] < lowest[0] else "not shown"

    return swapped(own, "conclude", best_seed)


@fault("form taken for the answer", rows=("W03",), stage="eval", check="claim", job=form_and_answer)
def form_taken_for_the_answer(_: Path) -> AbstractContextManager[None]:
    """All texts have the form that was rewarded, and that is reported as better."""
    return swapped(own, "conclude", lambda arms: (arms[1].name, "shown better"))


@fault("compared on other problems", rows=("E06", "D20"), stage="eval", check="claim", job=two_checkpoints)
def compared_on_other_problems(_: Path) -> AbstractContextManager[None]:
    """What failed is missing on one side, and the rest is averaged."""
    def of_the_rest(arms: list[Arm]) -> tuple[str, Claim]:
        kept = {problem: scores for problem, scores in arms[1].runs[0].scores.items() if int(problem) < 50}
        arms[1] = Arm(arms[1].name, arms[1].metric, (Run("", kept),), False)
        return _larger_mean(arms)

    return swapped(own, "conclude", of_the_rest)


@fault("a fall called success", rows=("S8",), stage="reward", check="rise", job=a_falling_reward)
def a_fall_called_success(_: Path) -> AbstractContextManager[None]:
    """The run came to its end, so it passed."""
    return swapped(own, "declares_passed", lambda series: True)


@fault("saved artifact loops", rows=("S1",), stage="save", check="health", job=a_probe)
def saved_artifact_loops(_: Path) -> AbstractContextManager[None]:
    """Half of the texts go round and round."""
    healthy = say

    def looping(prompts: Sequence[Prompt], round: int) -> list[Said]:
        loop = Said("and then we went on and on " * 15, "length")
        return [loop if i % 2 else one for i, one in enumerate(healthy(prompts, round))]

    return swapped(own, "say", looping)


@fault("every question answered with sums", rows=("S8",), stage="eval", check="health", job=a_probe)
def every_question_answered_with_sums(_: Path) -> AbstractContextManager[None]:
    def sums(prompts: Sequence[Prompt], round: int) -> list[Said]:
        worked = [f"{i} + {round + 4} = {i + round + 4} {i} * 3 = {3 * i} so the answer is #### {3 * i}" for i in range(len(prompts))]
        return [Said(text, "stop") for text in worked]

    return swapped(own, "say", sums)


@fault("empty answers", rows=("W02",), stage="reward", check="health against parent", job=a_probe)
def empty_answers(_: Path) -> AbstractContextManager[None]:
    """What a reward for anything that the gold contains leads to."""
    return swapped(own, "say", lambda prompts, round: [Said("", "stop") for _ in prompts])


def _larger_mean(arms: Sequence[Arm]) -> tuple[str, Claim]:
    return arms[1].name, "shown better" if arms[1].runs[0].score > arms[0].runs[0].score else "not shown"


def _texts(run: int, bad: int) -> Run:
    return Run(str(run), {str(i): (float(i < bad),) for i in range(18)})


def _solved(name: str, right: int) -> Arm:
    return Arm(name, "pass@1", (_run(np.arange(PROBLEMS) < right),), False)


def _run(right: np.ndarray) -> Run:
    return Run("", {str(i): (float(score),) for i, score in enumerate(right)})

"""Rollout checks against collapse and missing signal: metrics under TRL's names, rules that stop a run, warnings.

A stop needs two things: numbers that no healthy run shows, and several steps of them, so that one odd batch stops nothing. What
a healthy run may show on its way (a task that is nearly solved, a base model that seldom ends) is a warning. The beginning is
the middle of the first steps: a rule about change asks where this run came from, not where others did.

Shapes: P prompts, G completions of each.
"""

import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from assay.data.order import permuted_places
from assay.generate.generation_request import Completion
from assay.learn.advantage import Advantages, RewardValue, reward_std
from assay.seeds import derive
from assay.verdict import Verdict, proven, refuted, unproven

Metrics = Mapping[str, float]
Groups = Sequence[Sequence[Completion]]

BEGINNING = 4  # steps that say how a run began
SILENT_GROUPS = 256  # in a row without one that informs: where 1 in 10 does, 2 times in 10^12; where 1 in 100 does, stopping is a favour
FEW_SIGNALS = 0.1  # share of informative groups below which nine tenths of the sampling is wasted
_STEPS = 3  # in a row for what cannot be one odd batch, since each is a mean over many completions
CAP_HITS, CAP_HITS_BEFORE = 0.9, 0.5  # share of completions that hit the cap: a run that ended most texts and now ends one in ten
LOOPING, LOOPING_BEFORE = 0.5, 0.1  # share of completions that end in a loop
PERIOD, LOOP_TOKENS = 16, 48  # a loop repeats at most 16 tokens over the last 48: digits and lists do it for less
KL_WARN, KL_STOP = 0.5, 5.0  # nats a token: RL runs that work stay below 0.1; at 5 a text is e^(5 n) times less likely than it was
RATIO_APART = 0.5  # of its mean from 1, which it is in expectation whatever the step
CLIP_WARN, CLIP_STOP = 0.3, 0.8  # of tokens: most of the batch's gradient is gone
ENTROPY_LOST = 0.1  # of where it began
UNIQUE_LOST = 0.5  # of the different completions of a prompt, against where it began: half of the group's draws say nothing new
LENGTH_TIMES = 3.0  # longer or shorter than it began: a reward that pays for length, or for none, is learned long before an answer
TOWARDS_NOISE = 0.5  # of the way from where entropy began to that of noise
ROUNDED_CHANCES = 0.02  # by which a completion's probability may be too low, summed from rounded log-probabilities
NOISY_TIMES, _SAME_REWARD = 5.0, 1e-9  # how many times the noise that was measured a reward may differ from itself
SAME_FIGURE = 1e-6  # relative, and absolute below 1
_CHANCE = 1e-9  # of a false alarm by coincidence: a run of 10,000 steps has one in 100,000

# ---------------------------------------------------------------- what is measured


def rollout_metrics(groups: Groups, rewards_PG: Sequence[Sequence[RewardValue]], advantages: Advantages) -> dict[str, float]:
    """Metrics of a rollout under TRL's names; those without one are `groups`, `rewards/unknown`, `completions/unique`, `/looping`,
    `/mean_length_better`, `_worse`.

    What no completion allows to be said is left out: it is unknown, not 0.
    """
    every = [completion for group in groups for completion in group]
    lengths = np.array([len(completion.ids) for completion in every], dtype=float)
    cut = np.array([completion.ended == "length" for completion in every])
    known = [reward for group in rewards_PG for reward in group if reward is not None]
    found = {"groups": len(groups), "frac_reward_zero_std": advantages.frac_zero_std, "rewards/unknown": 1 - len(known) / len(every),
             "completions/mean_length": lengths.mean(), "completions/min_length": lengths.min(), "completions/max_length": lengths.max(),
             "completions/clipped_ratio": cut.mean(), "completions/looping": np.mean([is_looping(c.ids) for c in every]),
             "completions/unique": np.mean([len({c.ids for c in group}) / len(group) for group in groups])}
    if known:
        found |= {"reward": float(np.mean(known)), "reward_std": reward_std(rewards_PG)}
    if not cut.all():
        ended = lengths[~cut]
        found |= {"completions/mean_terminated_length": ended.mean(), "completions/min_terminated_length": ended.min(),
                  "completions/max_terminated_length": ended.max()}
    signs = np.sign(advantages.values_PG).flatten()
    for name, sign in (("better", 1), ("worse", -1)):  # their drift apart is how a wrong normalisation shows
        if (signs == sign).any():
            found[f"completions/mean_length_{name}"] = lengths[signs == sign].mean()
    return {name: float(value) for name, value in found.items()}


def check_measured(measured: Mapping[str, float], of_objective: Mapping[str, float], groups: Groups,
                   rewards_PG: Sequence[Sequence[RewardValue]], *, entropy: bool) -> Verdict:
    """Figures of a rollout that nothing decides by, counted again by the standard library; `entropy` says whether it is to be measured."""
    known = [float(reward) for group in rewards_PG for reward in group if reward is not None]
    every = [completion for group in groups for completion in group]
    due = {"completions/mean_length": statistics.fmean(len(completion.ids) for completion in every),
           "completions/max_length": float(max(len(completion.ids) for completion in every)),
           "completions/clipped_ratio": sum(completion.ended == "length" for completion in every) / len(every)}
    if known:
        due |= {"reward": statistics.fmean(known), "reward_std": statistics.stdev(known) if len(known) > 1 else 0.0}
    wrong = [f"{name} is {value:.6g}, written {measured.get(name)}" for name, value in due.items()
             if name not in measured or not math.isclose(measured[name], value, rel_tol=SAME_FIGURE, abs_tol=SAME_FIGURE)]
    if ("entropy" in of_objective) != entropy:
        wrong.append(f"the entropy is {'written, and was not to be measured' if 'entropy' in of_objective else 'not written'}")
    if wrong:
        return refuted("measured", f"the rollout does not give what is written of it: {'; '.join(wrong)}", wrong=wrong)
    return proven("measured", f"{len(due)} figures of {len(every)} completions are what they give when they are counted again")


def is_looping(ids: Sequence[int]) -> bool:
    """The end repeats itself: the last tokens have a short period."""
    end = list(ids[-LOOP_TOKENS:])
    return len(end) == LOOP_TOKENS and any(end[period:] == end[:-period] for period in range(1, PERIOD + 1))

# ---------------------------------------------------------------- rules over the steps so far


def check_collapse(history: Sequence[Metrics], vocab: int) -> list[Verdict]:
    """One verdict a rule. `history` holds every step's metrics, oldest first: the rollouts' and the objective's together."""
    return [check_reward_signal(history), check_endings(history), check_looping(history), check_entropy(history, vocab),
            check_divergence(history), check_ratio(history)]


def check_reward_signal(history: Sequence[Metrics]) -> Verdict:
    """Groups have rewards that differ, or there is nothing to learn: then only the KL term, or nothing at all, moves the weights."""
    dead = [step["grad_norm"] == 0 for step in history if "grad_norm" in step and step["frac_reward_zero_std"] < 1][-_STEPS:]
    if len(dead) == _STEPS and all(dead):
        return refuted("signal", f"the gradient is exactly 0 in {_STEPS} steps whose rewards differ: the loss does not reach the weights")
    groups, informing = _groups(history)
    if informing == 0 and groups < SILENT_GROUPS:
        return unproven("signal", f"none of {groups} groups had rewards that differ; after {SILENT_GROUPS} such the run stops")
    if informing == 0:
        pulled = "; the KL term alone moves the weights" if history[-1].get("kl", 0) > 0 else ""
        return refuted("signal", f"of the last {groups} groups none had rewards that differ: nothing is learned from them{pulled}. "
                       "Choose easier or harder prompts, a larger group, or a reward with more steps", groups=groups)
    return proven("signal", f"{informing} of the last {groups} groups had rewards that differ", groups=groups, informing=informing)


def check_endings(history: Sequence[Metrics]) -> Verdict:
    """Check that completions still end by themselves, from the fourth step on: in a run of a few, the first half says how it began, and two
    steps in a row decide."""
    few = len([step for step in history if "completions/clipped_ratio" in step]) < BEGINNING + _STEPS
    return _risen(history, "endings", "completions/clipped_ratio", CAP_HITS, CAP_HITS_BEFORE,
                  "of completions hit the cap: the policy has forgotten how to end", **({"beginning": 2, "steps": 2} if few else {}))


def check_still_ends(before: ArrayLike, after: ArrayLike) -> Verdict:
    """Check that the final model ends its answers as its parent did, by the share of each held-out prompt's completions that hit the
    length limit.
    """
    if not (np.size(before) and np.size(after)):
        return unproven("endings", "no held-out completion was drawn")
    was, now = (float(np.asarray(cut, np.float64).mean()) for cut in (before, after))
    words = f"{now:.0%} of held-out completions hit the cap, of the parent's {was:.0%}"
    if now >= CAP_HITS and was < CAP_HITS_BEFORE:
        return refuted("endings", f"{words}: the policy has forgotten how to end", before=was, after=now)
    return proven("endings", words, before=was, after=now)


def check_looping(history: Sequence[Metrics]) -> Verdict:
    return _risen(history, "looping", "completions/looping", LOOPING, LOOPING_BEFORE,
                  "of completions end in a loop: the policy has collapsed")


def check_entropy(history: Sequence[Metrics], vocab: int) -> Verdict:
    """The policy does not drift towards noise. Low entropy is a warning only: a task that is learned looks the same."""
    values, most = [step["entropy"] for step in history if "entropy" in step], math.log(vocab)
    if len(values) < BEGINNING + _STEPS:
        return unproven("entropy", f"{len(values)} steps are too few; {BEGINNING + _STEPS} are needed")
    began, recent = float(np.median(values[:BEGINNING])), values[-_STEPS:]
    bound = began + TOWARDS_NOISE * (most - began)
    if not min(recent) <= bound:
        return refuted("entropy",
                       f"{_STEPS} steps had entropy {min(recent):.2f} or more, it began at {began:.2f} and noise has {most:.2f}: "
                       "the policy dissolves", began=began)
    return proven("entropy", f"entropy {recent[-1]:.3f}, began at {began:.3f}", began=began, now=recent[-1])


def check_divergence(history: Sequence[Metrics]) -> Verdict:
    recent = _recent(history, "kl", _STEPS)
    if not recent:
        return unproven("divergence", "no KL was measured: the run has no reference")
    if not all(math.isfinite(value) for value in recent) or (len(recent) == _STEPS and min(recent) > KL_STOP):
        return refuted("divergence", f"KL to the reference is {recent[-1]:.3g} nats a token, above {KL_STOP} in {_STEPS} steps: "
                       "the policy is another model", kl=str(recent[-1]))
    return proven("divergence", f"KL to the reference is {recent[-1]:.3g} nats a token", kl=recent[-1])


def check_ratio(history: Sequence[Metrics]) -> Verdict:
    """Check, in steps with several inner updates, that the ratio stays about 1 and that clipping leaves most of the batch to train on."""
    ratios, clipped = (_recent(history, name, _STEPS) for name in ("sampling/importance_sampling_ratio/mean", "clip_ratio/region_mean"))
    if not ratios:
        return unproven("ratio", "no ratio was measured")
    if not math.isfinite(ratios[-1]) or (len(ratios) == _STEPS and min(abs(ratio - 1) for ratio in ratios) > RATIO_APART):
        return refuted("ratio", f"the mean ratio is {ratios[-1]:.3g} where 1 is expected: policy and rollouts have parted",
                       ratio=str(ratios[-1]))
    if len(clipped) == _STEPS and min(clipped) > CLIP_STOP:
        return refuted("ratio", f"{min(clipped):.0%} or more of the tokens are clipped in {_STEPS} steps: lower the learning rate or take "
                       "fewer inner epochs")
    return proven("ratio", f"the mean ratio is {ratios[-1]:.4f}")


def rollout_warnings(history: Sequence[Metrics]) -> list[str]:
    """Sentences about what a healthy run may show, and a sick one shows first."""
    found, now = [], history[-1]
    groups, informing = _groups(history)
    if groups >= SILENT_GROUPS and informing < FEW_SIGNALS * groups:
        found.append(f"{informing} of the last {groups} groups had rewards that differ: most sampling is wasted; sample more per prompt, "
                     "or turn on dynamic sampling")
    if len(history) == 1 and now.get("completions/clipped_ratio", 0) >= CAP_HITS:
        found.append(f"{now['completions/clipped_ratio']:.0%} of the first completions hit the cap: raise it, or teach the model to end")
    if (noise := now.get("rewards/noise_alone", 0)) > 0:
        found.append(f"{noise:.0%} of groups have rewards that differ by no more than the reward's own noise: they are learned from as if "
                     "one completion were better; round the reward, or make it a function of the text alone")
    if now.get("rewards/unknown", 0) > 0:
        found.append(f"{now['rewards/unknown']:.1%} of rewards are unknown: the reward function failed or timed out there")
    entropies = [step["entropy"] for step in history if "entropy" in step]
    if len(entropies) > BEGINNING and entropies[-1] < ENTROPY_LOST * float(np.median(entropies[:BEGINNING])):
        found.append(f"entropy is {entropies[-1]:.3g}, a tenth of where it began: little is explored any more")
    if (share := _times_the_beginning(history, "completions/unique")) is not None and share < UNIQUE_LOST:
        found.append(f"{now['completions/unique']:.0%} of a prompt's completions differ, {share:.0%} of what it began with: the group says "
                     "the same again and again; raise the temperature, or stop here")
    if (times := _times_the_beginning(history, "completions/mean_length")) is not None and not 1 / LENGTH_TIMES <= times <= LENGTH_TIMES:
        found.append(f"completions have {now['completions/mean_length']:.0f} tokens on average, {times:.2g} times what they began with: "
                     "look whether the reward pays for length")
    if KL_WARN < now.get("kl", 0) <= KL_STOP:
        found.append(f"KL to the reference is {now['kl']:.2f} nats a token: the policy moves far from it")
    if now.get("clip_ratio/region_mean", 0) > CLIP_WARN:
        found.append(f"{now['clip_ratio/region_mean']:.0%} of tokens are clipped: the inner updates are too large")
    return found

# ---------------------------------------------------------------- prompts and rewards


def check_planned_prompts(drawn: Sequence[str], train: Sequence[str], *, seed: int, rollout: int) -> Verdict:
    """The ids that a rollout drew are those that the documented order has for it: epoch by epoch each prompt once, permuted by
    derive(seed, "prompts", epoch); after a resume too."""
    places, size = range(rollout * len(drawn), (rollout + 1) * len(drawn)), len(train)
    due = [train[int(permuted_places(np.array([place % size]), size, derive(seed, "prompts", place // size))[0])] for place in places]
    if list(drawn) != due:
        wrong = next(number for number, (found, planned) in enumerate(zip(drawn, due, strict=True)) if found != planned)
        return refuted("prompt_order", f"rollout {rollout} drew {drawn[wrong]!r} at place {wrong}, the plan has {due[wrong]!r}: the order "
                       "was lost, reset, or is of other prompts", rollout=rollout)
    return proven("prompt_order", f"rollout {rollout} drew the {len(due)} prompts that were planned for it", rollout=rollout)


def check_none_held_out(drawn: Mapping[str, Collection[str]], held_out: Collection[str]) -> Verdict:
    """`drawn`: of each prompt by its id, what it says and the hash of it; `held_out` holds the same of what is never trained on."""
    leaked = [id for id, contents in drawn.items() if any(content in held_out for content in contents)]
    if leaked:
        return refuted("held_out", f"{len(leaked)} of {len(drawn)} prompts of a rollout are held out ({leaked[0]}): a gain on them would "
                       "say nothing", prompts=leaked[:20])
    return proven("held_out", f"none of the {len(drawn)} prompts of a rollout is held out")


def check_rewards_again(first: Sequence[Mapping[str, float | None]], again: Sequence[Mapping[str, float | None]], noise: float) -> Verdict:
    """Check that the same completions, scored a second time from their text, get the same rewards: each component that is known both
    times.

    `noise` is how far apart two answers about one completion were before the run: a rule's is 0.
    """
    apart = [(abs(one[name] - two[name]), place, name) for place, (one, two) in enumerate(zip(first, again, strict=True))  # type: ignore[operator]
             for name in one.keys() & two.keys() if one[name] is not None and two[name] is not None]
    if not apart:
        return unproven("rewards_again", "no completion has a known reward to be asked about again")
    most, place, name = max(apart)
    scored = len({place for _, place, _ in apart})
    words = f"{scored} of {len(first)} completions scored again from their text differ by at most {most:.4g}"
    if most > NOISY_TIMES * noise + _SAME_REWARD:
        return refuted("rewards_again", f"{words} ({name}: {first[place][name]:.4g} and then {again[place][name]:.4g}); asked twice before "
                       f"the run they differed by {noise:.4g}: rewards went to other completions, or were not computed", most=most)
    return proven("rewards_again", words, most=most, completions=scored)

# ---------------------------------------------------------------- coincidence


class SiblingCounts:
    """Counts over all rollouts so far, for every two members of a group: how often they said the same, and how often chance would have it.

    One rollout seldom shows that two members share a seed; their sum over rollouts does, whichever two they are.
    """

    def __init__(self, members: int):
        self.same_GG, self.expected_GG = np.zeros((members, members)), np.zeros((members, members))
        self.pairs = self.looks = 0

    def add(self, groups: Groups) -> None:
        self.looks += 1
        for group in groups:
            likely = [math.exp(min(0.0, sum(completion.logprobs))) for completion in group]
            for one, other in itertools.combinations(range(len(group)), 2):
                self.same_GG[one, other] += group[one].ids == group[other].ids
                self.expected_GG[one, other] += likely[one]
                self.pairs += 1

    def check(self) -> Verdict:
        """The chance is a bound for each two members, times how many there are, times the looks squared: over all looks it adds up."""
        if not self.pairs:
            return unproven("independence", "there are no two completions of one prompt to compare")
        tried = self.looks**2 * len(self.same_GG)**2
        chances = {pair: tried * _chernoff_above(self.same_GG[pair], self.expected_GG[pair])
                   for pair in itertools.combinations(range(len(self.same_GG)), 2)}
        (one, other), chance = min(chances.items(), key=lambda item: item[1])
        same, expected = int(self.same_GG.sum()), float(self.expected_GG.sum())
        words = f"over {self.looks} rollouts {same} of {self.pairs} pairs of siblings are identical, {expected:.3g} expected by chance"
        if chance < _CHANCE:
            return refuted("independence", f"{words}; members {one} and {other} were {int(self.same_GG[one, other])} times, "
                           f"{self.expected_GG[one, other]:.3g} expected: they share a seed", same=same, expected=expected)
        return proven("independence", words, same=same, expected=expected)


def _chernoff_above(count: float, expected: float) -> float:
    """The bound, with what rounding may have taken from the probabilities that `expected` is the sum of."""
    generous = expected * (1 + ROUNDED_CHANCES) + 1e-12
    return _chernoff(count, generous) if count > generous else 1.0


def check_rollout_seeds(one: Sequence[Completion], other: Sequence[Completion]) -> Verdict:
    """Check that the same prompts under another seed get other completions, as far as their probability allows."""
    return _coincidence("seeds", list(zip(one, other, strict=True)), "answers to two seeds", "the seed does not reach the sampler")


def _coincidence(check: str, pairs: Sequence[tuple[Completion, Completion]], what: str, cause: str) -> Verdict:
    if not pairs:
        return unproven(check, "there are no two completions of one prompt to compare")
    same = sum(one.ids == other.ids for one, other in pairs)
    expected = sum(math.exp(min(0.0, sum(one.logprobs))) for one, _ in pairs)
    words = f"{same} of {len(pairs)} pairs of {what} are identical, {expected:.3g} expected by chance"
    if same > expected and _chernoff(same, expected) < _CHANCE:
        return refuted(check, f"{words}: {cause}", same=same, expected=expected)
    return proven(check, words, same=same, expected=expected)


def _chernoff(count: float, expected: float) -> float:
    """A bound on the probability of `count` or more independent events, where `expected` (fewer) are."""
    return math.exp(count - expected + count * math.log(max(expected, 1e-300) / count))

# ----------------------------------------------------------------


def _groups(history: Sequence[Metrics]) -> tuple[int, int]:
    """How many groups the last steps hold, enough of them to judge where there are enough, and how many of those inform."""
    groups = informing = 0
    for step in reversed(history):
        groups += round(step["groups"])
        informing += round(step["groups"] * (1 - step["frac_reward_zero_std"]))
        if groups >= SILENT_GROUPS:
            break
    return groups, informing


def _times_the_beginning(history: Sequence[Metrics], name: str) -> float | None:
    """The last value over the middle of the first ones; None as long as there is nothing but a beginning."""
    values = [step[name] for step in history if name in step]
    began = float(np.median(values[:BEGINNING])) if len(values) > BEGINNING else 0.0
    return values[-1] / began if began > 0 else None


def _recent(history: Sequence[Metrics], name: str, steps: int) -> list[float]:
    return [step[name] for step in history[-steps:] if name in step]


def _risen(history: Sequence[Metrics], check: str, name: str, bound: float, before: float, words: str, *, beginning: int = BEGINNING,
           steps: int = _STEPS) -> Verdict:
    """Refute a series that began below `before` and now stands at `bound` or above."""
    values = [step[name] for step in history if name in step]
    if len(values) < beginning + steps:
        return unproven(check, f"{len(values)} steps are too few; {beginning + steps} are needed")
    began, recent = float(np.median(values[:beginning])), values[-steps:]
    if min(recent) >= bound and began < before:
        return refuted(check, f"{min(recent):.0%} {words} (it began at {began:.0%})", began=began, now=recent[-1])
    return proven(check, f"{recent[-1]:.1%}, began at {began:.1%}", began=began, now=recent[-1])

"""The health of generations: every sample judged by cause, a rate that may be looked at after each one, and what that shows.

    health = probe(speaker, BUILT_IN, n=4)
    health.verdict()            PROVEN below the bound, REFUTED above what is tolerated, else UNPROVEN and what it would take

A speaker is a function: prompts and the number of the round → what was said to each. See `speakers.py`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from assay.errors import UsageError
from assay.measure.bisect import bisect
from assay.measure.compare import signed
from assay.measure.degenerate import Cause, Malformed, malformed, same_everywhere, word_soup
from assay.measure.evidence import Effect, paired_effect
from assay.measure.probe_prompts import Prompt
from assay.measure.sequential import LEVEL, bounds, clean_needed
from assay.verdict import Verdict, proven, refuted, unproven

TOLERATED = 0.05  # a share of malformed texts that a healthy model may have
BOUND = 0.10  # what clean samples must exclude before health counts as proven
RATES = (0.05, 0.02, 0.01)
SHOWN = 3  # examples of what was malformed


@dataclass(frozen=True)
class Said:
    """One generated text. `surprise`: its nats per token under a reference model, where there is one."""

    text: str
    ended: str  # stop, length, …
    tokens: tuple[int, ...] = ()
    surprise: float | None = None


Speaker = Callable[[Sequence[Prompt], int], list[Said]]
Surprise = Callable[[Sequence[Prompt], Sequence[Said]], list[float]]


@dataclass(frozen=True)
class Sample:
    prompt: Prompt
    round: int
    said: Said
    wrong: Malformed | None

    def to_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt.id, "domain": self.prompt.domain, "round": self.round, "ended": self.said.ended,
                "text": self.said.text, "cause": self.wrong.cause if self.wrong else None,
                "evidence": self.wrong.evidence if self.wrong else None}


@dataclass(frozen=True)
class Health:
    """What a probe found. Its interval may be looked at after any sample: it holds at all of them together."""

    name: str
    samples: tuple[Sample, ...]
    tolerated: float = TOLERATED
    bound: float = BOUND

    @property
    def bad(self) -> int:
        return sum(sample.wrong is not None for sample in self.samples)

    @property
    def rounds(self) -> int:
        return 1 + max(sample.round for sample in self.samples)

    @property
    def interval(self) -> tuple[float, float]:
        return bounds(self.bad, len(self.samples))

    @property
    def malformed(self) -> bool:
        """More malformed texts are shown than are tolerated."""
        return self.interval[0] > self.tolerated

    @property
    def healthy(self) -> bool:
        """A rate as high as the bound is excluded."""
        return self.interval[1] <= self.bound

    @property
    def causes(self) -> dict[Cause, int]:
        return dict(Counter(sample.wrong.cause for sample in self.samples if sample.wrong is not None).most_common())

    @property
    def sentence(self) -> str:
        low, high = self.interval
        found = f"{self.bad} of {len(self.samples)} texts are malformed, a rate of {low:.1%} to {high:.1%} ({LEVEL:.0%}, at every look)"
        if self.bad:
            return f"{found}: {', '.join(f'{cause} {count}' for cause, count in self.causes.items())}"
        needed = ", ".join(f"{clean_needed(rate)} at {rate:.0%}" for rate in RATES)
        return f"{found}; clean samples that bound it: {needed}"

    def verdict(self) -> Verdict:
        (low, high), domains = self.interval, Counter(sample.prompt.domain for sample in self.samples if sample.wrong is not None)
        evidence = {"bad": self.bad, "n": len(self.samples), "low": low, "high": high, "causes": self.causes, "domains": dict(domains),
                    "examples": [sample.to_json() for sample in self.samples if sample.wrong is not None][:SHOWN]}
        if self.malformed:
            return refuted("health", f"{self.sentence}; {self.tolerated:.0%} are tolerated", **evidence)
        if self.healthy:
            return proven("health", self.sentence, **evidence)
        return unproven("health", f"{self.sentence}; {self.bound:.0%} is not excluded: draw more samples", **evidence)


def probe(speak: Speaker, prompts: Sequence[Prompt], *, n: int = 4, name: str = "", surprise: Surprise | None = None,
          usual: Sequence[float] = (), tolerated: float = TOLERATED, bound: float = BOUND,
          enough: Callable[[Health], bool] = lambda health: health.malformed) -> Health:
    """Rounds of one sample per prompt, judged after each, until that is enough or n rounds are over.

    `surprise` gives the nats per token of texts under a reference model, where texts in order have the `usual` ones.
    """
    if n < 1 or not prompts:
        raise UsageError(f"a probe of {n} samples of {len(prompts)} prompts: expected at least one of each")
    samples: list[Sample] = []
    for round in range(n):
        said = speak(prompts, round)
        if surprise is not None:
            said = [replace(one, surprise=value) for one, value in zip(said, surprise(prompts, said), strict=True)]
        samples += judged(prompts, said, round, usual)
        health = Health(name, tuple(samples), tolerated, bound)
        if enough(health):
            break
    return health


def judged(prompts: Sequence[Prompt], said: Sequence[Said], round: int = 0, usual: Sequence[float] = ()) -> list[Sample]:
    """Each text by itself, then all of a round together: what is said to every prompt is an answer to none."""
    alone = [malformed(one.text, ended=one.ended, expected=prompt.expected, tokens=one.tokens) or _soup(one, usual)
             for prompt, one in zip(prompts, said, strict=True)]
    texts = {prompt.id: one.text for prompt, one in zip(prompts, said, strict=True) if not prompt.expected.short}
    same = same_everywhere(texts)
    return [Sample(prompt, round, one, wrong or same.get(prompt.id)) for prompt, one, wrong in zip(prompts, said, alone, strict=True)]


def against(child: Health, parent: Health) -> tuple[Effect, Verdict]:
    """The share of malformed texts, paired by prompt over the rounds that both have had."""
    rounds = min(max(sample.round for sample in health.samples) for health in (child, parent))
    new, old = (_by_prompt(health, rounds) for health in (child, parent))
    if new.keys() != old.keys():
        raise UsageError("the two were not asked the same prompts")
    effect = paired_effect([np.mean(new[id]) for id in old], [np.mean(old[id]) for id in old])
    words = f"malformed texts against {parent.name or 'the parent'}: {signed(effect.interval())} prompts, p = {effect.p:.2g}"
    evidence = {"change": effect.mean, "p": effect.p, "child": child.bad, "parent": parent.bad}
    if effect.p <= 1 - LEVEL and effect.mean > 0:
        return effect, refuted("health against parent", f"{words}: shown worse", **evidence)
    return effect, proven("health against parent", f"{words}: not shown worse", **evidence)


@dataclass(frozen=True)
class History:
    """Checkpoints in order, those that were probed, and the first bad one after a good one."""

    probed: dict[str, Health]
    last_good: str | None
    first_bad: str | None

    @property
    def sentence(self) -> str:
        if self.first_bad is None:
            return f"none of {len(self.probed)} probed checkpoints is shown to be malformed"
        since = f"; {self.last_good} is not" if self.last_good else ", and it is the first there is"
        return f"{self.first_bad} is the first that is shown to be malformed{since} ({len(self.probed)} probed)"


def first_bad(names: Sequence[str], look: Callable[[str], Health], *, every: int = 8) -> History:
    """Up to `every` checkpoints are all looked at; of more, the ends and then halves, taking what is bad to stay bad."""
    if not names:
        raise UsageError("there is no checkpoint to probe")
    seen: dict[str, Health] = {}

    def bad(name: str) -> bool:
        seen[name] = look(name)
        return seen[name].malformed

    found = bisect(names, bad, every=len(names) <= every)
    return History({name: seen[name] for name in names if name in seen}, found.last_good, found.first_bad)


def _by_prompt(health: Health, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sample in health.samples:
        if sample.round <= rounds:
            found.setdefault(sample.prompt.id, []).append(float(sample.wrong is not None))
    return found


def _soup(said: Said, usual: Sequence[float]) -> Malformed | None:
    return None if said.surprise is None else word_soup(said.surprise, usual)

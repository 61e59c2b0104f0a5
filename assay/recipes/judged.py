"""A judge in a run: its scores join those of the rules; what it cannot judge is asked again, said, and its prompt drawn anew.

A group that could not be judged is asked about once more when the others of its rollout are done. One that is still without
scores is an error row for each of its completions, is told and written down, and its prompt waits: the next rollout draws new
completions of it, because the old ones are no longer the policy's. What waits stands in the checkpoints.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from assay.errors import UsageError
from assay.guard.judge_checks import check_groups_judged, check_judge_agreement, check_position_bias
from assay.recipes.rollouts import Group
from assay.recipes.run import Run
from assay.reward.endpoint import Cost, connected, endpoint_from_environment
from assay.reward.llm_judge import RUBRIC, Judge, Judged, Repeat, Scores, judge_group, rank_agreement
from assay.reward.reward_functions import JudgeOptions, RewardSpec
from assay.reward.worker_pool import ScoredItem
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict

NAME = "judge"


@dataclass
class Heard:
    """What a judge has said, and what that cost, over some groups. `late` were judged when they were asked about again."""

    groups: int = 0
    unjudged: int = 0
    late: int = 0
    repeats: list[Repeat] = field(default_factory=list)
    repeats_failed: int = 0
    shown: list[Scores] = field(default_factory=list)
    cost: Cost = field(default_factory=Cost)

    def add(self, asked: int, late: int, judged: Judged) -> None:
        self.groups, self.unjudged, self.late = self.groups + asked, self.unjudged + len(judged.unjudged), self.late + late
        self.repeats_failed, self.cost = self.repeats_failed + judged.repeats_failed, self.cost + judged.cost
        self.repeats += judged.repeats
        self.shown += judged.shown

    def counts(self) -> dict[str, float]:
        """Without what is unknown: agreement where nothing was ranked twice."""
        ranks = [rank for each in self.repeats if (rank := rank_agreement(each.first, each.second)) is not None]
        counts: dict[str, float] = {"groups": self.groups, "unjudged": self.unjudged, "late": self.late, "repeats": len(self.repeats),
                                    "repeats_failed": self.repeats_failed, **asdict(self.cost)}
        if self.repeats:
            counts["largest_difference"] = max(each.largest_difference for each in self.repeats)
        return counts | ({"agreement": float(np.mean(ranks))} if ranks else {})


class Judging:
    """A run's judge, connected. `sitting` holds all that it said since the run was started, `rollout` what it said since `begin`."""

    def __init__(self, reward: RewardSpec, seed: int) -> None:
        options = JudgeOptions(**reward.options)
        self.weight = reward.weight
        self.endpoint = endpoint_from_environment(options.url, options.model, key_variable=options.key, seconds=options.seconds)
        self.rubric = _read(options.rubric) if options.rubric else RUBRIC
        self._open = ExitStack()
        self.judge = Judge(self._open.enter_context(connected(self.endpoint)), seed=seed, rubric=self.rubric, tries=options.tries,
                           concurrency=options.concurrency, repeat=options.repeat)
        self.sitting, self.rollout = Heard(), Heard()
        self.verdicts: list[Verdict] = []  # of this rollout: no group vanished

    def __enter__(self) -> "Judging":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def identity(self) -> dict[str, str]:
        """Who judges, and by what. The key is no part of it."""
        return {"url": self.endpoint.base_url, "model": self.endpoint.model, "rubric": hashlib.sha256(self.rubric.encode()).hexdigest()}

    def begin(self) -> None:
        self.rollout, self.verdicts = Heard(), []

    def joined(self, where: str, groups: Sequence[Group]) -> tuple[list[Group], dict[str, tuple[str, ...]]]:
        """The groups with the judge's component, and the reasons for those that have none, by prompt. `where` tells rollouts apart."""
        ids = [f"{where}/{place}/{each.prompt.id}" for place, each in enumerate(groups)]  # a prompt may come twice where epochs meet
        asked = [judge_group(id, each.prompt.text, [str(c.text) for c in each.completions]) for id, each in zip(ids, groups, strict=True)]
        judged = self.asked(asked)
        self.verdicts.append(check_groups_judged(ids, judged))
        faults = {each.group.id: each.faults for each in judged.unjudged}
        found = [self._with(each, judged.scores.get(id), faults.get(id, ())) for id, each in zip(ids, groups, strict=True)]
        return found, {each.prompt.id: faults[id] for id, each in zip(ids, groups, strict=True) if id in faults}

    def asked(self, groups: Sequence[Any]) -> Judged:
        """One call a group; those that failed once more, after the others. Nothing is left pending: what is stale is not asked about."""
        judged = self.judge.score(groups)
        late = 0
        if judged.unjudged:
            again = self.judge.score([])
            late, judged = len(again.scores), _merged(judged, again)
        self.judge.pending.clear()
        for heard in (self.sitting, self.rollout):
            heard.add(len(groups), late, judged)
        return judged

    def heard(self, run: Run, step: int) -> str:
        """What it said and cost in this sitting is written down. A judge that contradicts itself ends the run; one that is swayed by
        the order of the page is worth a warning, because that order is another one each time."""
        run.ledger.append(Event.JUDGE_COST, step=step, **self.identity, **self.sitting.counts())
        run.judge(Event.JUDGE, [check_judge_agreement(self.sitting.repeats)])
        position = check_position_bias(self.sitting.shown)
        return position.reason if position.outcome is Outcome.REFUTED else ""

    def _with(self, group: Group, scores: Scores | None, faults: Sequence[str]) -> Group:
        if scores is None:
            why = f"{NAME}: {'; '.join(faults)}"
            return replace(group, scored=[ScoredItem(None, each.error or why, {**each.components, NAME: None}) for each in group.scored])
        return replace(group, scored=[
            ScoredItem(None if each.value is None else each.value + self.weight * score, each.error, {**each.components, NAME: score})
            for each, score in zip(group.scored, scores, strict=True)])


def _merged(first: Judged, again: Judged) -> Judged:
    """`again` was asked about what `first` left unjudged, and nothing else."""
    return Judged({**first.scores, **again.scores}, again.unjudged, first.repeats + again.repeats,
                  first.repeats_failed + again.repeats_failed, first.shown + again.shown, first.cost + again.cost)


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError as error:
        raise UsageError(f"--reward judge: rubric {file}: {error.strerror}") from None

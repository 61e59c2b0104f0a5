"""Rewards of a run: rules in worker processes, a judge behind an endpoint, and the metric that says what is wanted.

A group that the judge could not judge is asked about once more when the others of its rollout are done. One that is still without
scores is an error row for each of its completions, is told and written down, and its prompt waits: the next rollout draws new
completions of it, because the old ones are no longer the policy's. What waits stands in the checkpoints.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import DataError, GuardStop, UsageError
from assay.generate.generation_request import Completion, Sampling
from assay.guard.judge_checks import (
    check_groups_judged,
    check_judge_agreement,
    check_judge_order,
    check_judge_parser,
    check_judge_places,
    check_position_bias,
)
from assay.guard.reward_checks import check_reward_errors, check_reward_repeat, completion_style, preflight_rewards
from assay.guard.reward_model_checks import check_reward_words
from assay.guard.rollout_checks import check_rewards_again
from assay.learn.advantage import RewardValue as Value
from assay.learn.advantage import overlong_penalty
from assay.model.tokenizer import Tokenizer
from assay.recipes.grpo_options import Grpo
from assay.recipes.prompts import Prompt, PromptData, prompts_digest
from assay.recipes.run import Run
from assay.reward.answer import AnswerForm, gold_answer, reading_disagreements, readings
from assay.reward.endpoint import Cost, connected, endpoint_from_environment
from assay.reward.known_readings import check_readings
from assay.reward.llm_judge import RUBRIC, Judge, Judged, Repeat, Scores, judge_group, rank_agreement
from assay.reward.model_reward import STAND_IN, read_by_reward_model, reward_artifact
from assay.reward.reward_functions import JudgeOptions, RewardSpec, parse_rewards, reward_digest
from assay.reward.worker_pool import AskedPrompt, ErrorLimit, RewardItem, RewardWorkers, ScoredItem
from assay.seeds import derive
from assay.statistics.estimate import Estimate, mean
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict, refuted, unproven

if TYPE_CHECKING:
    from assay.recipes.rollouts import Sampler

HELD_OUT_ADDRESS = ("held out",)
NAME = "judge"
OVERLONG = "overlong"
WITNESSED_PROMPTS = 4  # of an evaluation: looked at once more by the witness
PROMPTS_RENDERED = 64  # by a reward model's own template, to hold what it reads against
ASKED_TWICE = 16  # completions that are scored twice before a run, to measure a reward's noise


@dataclass(frozen=True)
class Answered:
    """Mean scores per prompt, over its completions. `rewarded` is None where a judge rewards: its scores compare within a group alone."""

    wanted: NDArray[np.float64]
    rewarded: NDArray[np.float64] | None
    digest: str | None = None  # of the prompts
    cut: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # the share of completions that hit the cap
    kept: Sequence[Mapping[str, Any]] = ()  # a few prompts with their completions and scores, for the witness

    @property
    def estimate(self) -> Estimate:
        return mean(self.wanted)


class Rewards:
    """Rewards of a run: what scores its completions. `limit` stops the run where too many rewards fail."""

    def __init__(self, config: Grpo):
        rewards, self.metric = parse_rewards(config.reward, relative=True), chosen_metric(config)
        self.rules = [reward for reward in rewards if not reward.relative]
        self.judge = next((JudgeReward(reward, config.seed) for reward in rewards if reward.relative), None)
        self.seconds = config.reward_seconds
        self.workers = RewardWorkers(self.rules, count=config.reward_workers, seconds=config.reward_seconds)
        self.metric_workers = None if config.metric is None else RewardWorkers([self.metric], count=1, seconds=config.reward_seconds)
        self.reward_model = next((proven_reward_model(rule.options["path"]) for rule in self.rules if rule.learned), None)
        self.digests = {rule.name: reward_digest(rule) for rule in self.rules if not rule.learned} \
            | ({} if config.metric is None else {"metric": reward_digest(self.metric)})
        self.limit = ErrorLimit(config.reward_errors)
        self.noise = 0.0  # how far apart two answers about one completion were
        self._open = ExitStack()

    def __enter__(self) -> "Rewards":
        for part in (self.workers, self.metric_workers, self.judge):
            if part is not None:
                self._open.enter_context(part)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def answer(self, sampler: "Sampler", prompts: Sequence[Prompt], sampling: Sampling, samples: int) -> Answered:
        """Scores of the sampler's answers to held-out prompts, with the weights as loaded; the random draws have the same addresses each
        time.
        """
        groups = sampler.draw(prompts, sampling, HELD_OUT_ADDRESS, samples)
        items = [item(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
        scored = self.workers.score(items)
        wanted = scored if self.metric_workers is None else self.metric_workers.score(items)
        self.stop_at_limit(scored)
        rewarded = None if self.judge is not None else known_means(prompts, [each.value for each in scored], scored, samples)
        cut = np.array([np.mean([completion.ended == "length" for completion in group]) for group in groups])
        means = known_means(prompts, [each.components[self.metric.name] for each in wanted], wanted, samples)
        kept = kept_answers(prompts, groups, [each.components[self.metric.name] for each in wanted], means, sampling.seed)
        return Answered(means, rewarded, prompts_digest(prompts), cut, kept)

    def stop_at_limit(self, scored: Sequence[ScoredItem]) -> None:
        """Stop the run where too many of all rewards so far have failed."""
        self.limit.feed(scored)

    def facts(self) -> dict[str, Any]:
        learned = {"reward_model": self.reward_model} if self.reward_model else {}
        return learned | {"rules": self.digests} | ({} if self.judge is None else {"judge": self.judge.identity})

    def check_same(self, recorded: Mapping[str, Any]) -> list[Verdict]:
        began = recorded.get("rules", {})
        if changed := sorted(name for name in {**began, **self.digests} if began.get(name) != self.digests.get(name)):
            return [refuted("same data", f"the reward {', '.join(changed)} is another than the run began with: scores by two rules do not "
                                         "compare; give the first one back, or begin a new run")]
        if self.reward_model and recorded.get("reward_model") != self.reward_model:
            return [refuted("same data", f"the reward model is {self.reward_model[:12]} now, the run began with "
                                         f"{str(recorded.get('reward_model'))[:12]}; give it back, or begin a new run")]
        if self.judge is None or recorded["judge"] == self.judge.identity:
            return []
        return [refuted("same data", f"the judge is {self.judge.identity} now, the run began with {recorded['judge']}: scores of two "
                                     "judges do not compare; give the first one back, or begin a new run")]

    def audit(self, prompts: PromptData, tokenizer: Tokenizer) -> list[Verdict]:
        """Audit the rewards: right answers are rewarded and wrong ones are not; a judge is not swayed by the order of what it reads."""
        every = (*prompts.train, *prompts.held_out)
        rows, texts, verdicts = [prompt.row for prompt in every], [prompt.text for prompt in every], list[Verdict]()
        if self.rules:
            verdicts += self._canaries(rows, texts, tokenizer)
            repeat = check_reward_repeat(self._asked_twice(every, tokenizer))
            self.noise = float(repeat.evidence.get("noise", 0.0))
            verdicts += [repeat, check_readings()]
        learned = {spec.options["path"]: None for spec in (*self.rules, self.metric) if spec.learned}
        verdicts += [check_reward_readings(path, tokenizer, every) for path in learned if any(prompt.asked for prompt in every)]
        if self.judge is not None:
            verdicts += [check_judge_parser(), check_judge_places(self.judge.judge),
                         check_judge_order(self.judge.ask, rows, texts, completion_style(self.rules, rows))]
        return verdicts

    def _canaries(self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], tokenizer: Tokenizer) -> list[Verdict]:
        """Canaries of the reward rules. What a reward model gives a right completion nobody knows: it was proven on pairs when it was
        made."""
        count, plain_rules = (lambda text: len(tokenizer.encode(text))), [rule for rule in self.rules if not rule.learned]
        if len(plain_rules) == len(self.rules):
            return preflight_rewards(self.rules, rows, self.workers, prompts=texts, count_tokens=count)
        said = unproven("reward_model", f"the reward model {str(self.reward_model)[:12]} is taken at its word: no completion is known to "
                                        "be worth most to it; watch --metric, which is another", optional=True)
        if not plain_rules:
            return [check_reward_errors(self.workers), said]
        with RewardWorkers(plain_rules, count=1, seconds=self.seconds) as workers:
            return [*preflight_rewards(plain_rules, rows, workers, prompts=texts, count_tokens=count), said]

    def _asked_twice(self, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[tuple[ScoredItem, ScoredItem]]:
        """The prompts themselves as completions, which any reward can score, in two calls and in two orders."""
        some = prompts[:: max(1, -(-len(prompts) // ASKED_TWICE))]
        items = [RewardItem(prompt.text, prompt.text, {**prompt.row, "completion_tokens": len(tokenizer.encode(prompt.text))}, prompt.asked)
                 for prompt in some]
        return list(zip(self.workers.score(items), reversed(self.workers.score(items[::-1])), strict=True))

    def ask_again(self, groups: "Sequence[Group]") -> Verdict:
        """Score one group of a rollout again, of those whose rewards differ most, from the text of its completions alone."""
        widest = max(groups, key=lambda group: _range(group.rewards))
        names = [reward.name for reward in self.rules]
        first = [{name: scored.components[name] for name in names} for scored in widest.scored]

        def second() -> list[Mapping[str, Value]]:
            return [scored.components for scored in self.workers.score([item(widest.prompt, said) for said in widest.completions])]

        found = check_rewards_again(first, again := second(), self.noise)
        if found.outcome is not Outcome.REFUTED:
            return found
        # A test that ran out of time once is no fault: what agrees with the first answer in either of two more is taken.
        both = [{name: _nearer(said[name], one[name], two[name]) for name in names}
                for said, one, two in zip(first, again, second(), strict=True)]
        return check_rewards_again(first, both, self.noise)

    def noise_metrics(self, groups: "Sequence[Group]") -> dict[str, float]:
        """rewards/noise_alone: the share of groups whose rewards differ, and by no more than two answers about one completion do."""
        if not self.noise:
            return {}
        return {"rewards/noise_alone": float(np.mean([0 < _range(group.rewards) <= 2 * self.noise for group in groups]))}


def known_means(asked: Sequence[Prompt], values: Sequence[Value], scored: Sequence[ScoredItem], samples: int) -> NDArray[np.float64]:
    """Mean known score of each prompt's `samples`; a prompt of which nothing is known is an error, since without it this would be another
    set of prompts than the last time's."""
    found = []
    for place, prompt in enumerate(asked):
        part = slice(place * samples, (place + 1) * samples)
        known = [value for value in values[part] if value is not None]
        if not known:
            raise GuardStop(f"held-out prompt {prompt.id} could not be scored: {scored[part][0].error}; mend the reward, or the row")
        found.append(float(np.mean(known)))
    return np.array(found)


def kept_answers(asked: Sequence[Prompt], groups: Sequence[Sequence[Completion]], values: Sequence[Value], means: NDArray[np.float64],
                 seed: int) -> list[dict[str, Any]]:
    """Records of a few prompts for the witness, drawn by the seed: ids, completions, what each scored, and what the prompt counts."""
    samples = len(groups[0])
    drawn = sorted(range(len(asked)), key=lambda place: derive(seed, "witness", asked[place].id))[:WITNESSED_PROMPTS]
    return [{"id": asked[place].id, "ids": list(asked[place].ids), "wanted": float(means[place]),
             "samples": [{"ids": list(said.ids), "text": said.text, "logprob": sum(said.logprobs),
                          "score": values[place * samples + member]} for member, said in enumerate(groups[place])]}
            for place in sorted(drawn)]


def _nearer(said: Value, one: Value, two: Value) -> Value:
    """Nearer of two later answers to the first; one that is unknown is far from anything."""
    if said is None or one is None or two is None:
        return two if one is None else one
    return one if abs(one - said) <= abs(two - said) else two


def _range(rewards: Sequence[Value]) -> float:
    known = [reward for reward in rewards if reward is not None]
    return max(known) - min(known) if known else 0.0


def proven_reward_model(path: str) -> str:
    """Digest of a proven reward model. One that another tool made, or that is not proven, is refused: a reward that is noise is learned
    like any other."""
    artifact = reward_artifact(path)
    if artifact.raw.checkpoint is None or artifact.raw.checkpoint.hallmark is None:
        raise UsageError(f"--reward model:{path} has no hallmark: nothing shows that it tells good answers from bad ones; make it with "
                         "assay reward-model, or prove it with assay prove")
    return artifact.digest


def check_reward_readings(path: str, policy: Tokenizer, prompts: Sequence[Prompt]) -> Verdict:
    """Every prompt is written for the reward model once, by its own template, so that none is refused on the way."""
    tokenizer = reward_artifact(path).tokenizer
    assert tokenizer is not None
    asked = [(prompt, prompt.asked) for prompt in prompts if prompt.asked is not None]
    try:
        read = read_by_reward_model(path, [(said, STAND_IN) for _, said in asked])
    except DataError as error:
        raise UsageError(f"--reward model:{path}: its template does not write the prompts: {error}; remove such rows, or train a reward "
                         "model whose template does") from None
    return check_reward_words(path, tokenizer, policy, [
        (prompt.ids, tuple(example.tokens[: example.prompt].tolist()), told(said),
         rendered_prompt(tokenizer, said) if place < PROMPTS_RENDERED else None)
        for place, ((prompt, said), example) in enumerate(zip(asked, read, strict=True))])


def rendered_prompt(tokenizer: Tokenizer, asked: AskedPrompt) -> str | None:
    """Prompt as the tokenizer's template writes it before an answer; None of plain text, or where there is no template."""
    if not asked.messages or tokenizer.template is None:
        return None
    return tokenizer.render(asked.messages, add_generation_prompt=True, tools=asked.tools)


def told(asked: AskedPrompt) -> str:
    """Text of all that a prompt's row says, whoever writes it."""
    return "\n".join([asked.plain or "", *(str(message) for message in asked.messages), str(asked.tools or "")])


def chosen_metric(config: Grpo) -> RewardSpec:
    """The reward that says what is wanted: as named, or the heaviest rule of what is rewarded."""
    if config.metric is not None:
        return replace(parse_rewards([config.metric])[0], weight=1.0)
    rules = [reward for reward in parse_rewards(config.reward, relative=True) if not reward.relative]
    if not rules:
        raise UsageError("--reward judge alone: a judge says which completion of a group is better, not how good one is, so that no two "
                         "evaluations could be compared; give --metric, a rule that says what is wanted on held-out prompts")
    return max(rules, key=lambda reward: reward.weight)


# ---------------------------------------------------------------- groups and their scores


@dataclass(frozen=True)
class Group:
    prompt: Prompt
    completions: Sequence[Completion]
    scored: Sequence[ScoredItem]

    @property
    def rewards(self) -> list[Value]:
        return [scored.value for scored in self.scored]


def score_by_rules(workers: RewardWorkers, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]) -> list[Group]:
    """Score every completion by the rules, through the reward workers."""
    pairs = [(prompt, completion) for prompt, group in zip(prompts, completions, strict=True) for completion in group]
    scores = iter(workers.score([item(prompt, completion) for prompt, completion in pairs]))
    return [Group(prompt, group, [next(scores) for _ in group]) for prompt, group in zip(prompts, completions, strict=True)]


def penalise_overlong(groups: Sequence[Group], *, cap: int, overlong: int) -> list[Group]:
    """Penalty for the last `overlong` tokens before the length limit."""
    return [replace(group, scored=[_penalised(scored, len(completion.ids), cap, overlong)
                                   for scored, completion in zip(group.scored, group.completions, strict=True)]) for group in groups]


def item(prompt: Prompt, completion: Completion) -> RewardItem:
    assert completion.text is not None, "the sampler has a tokenizer"
    return RewardItem(prompt.text, completion.text, {**prompt.row, "completion_tokens": len(completion.ids)}, prompt.asked)


def _penalised(scored: ScoredItem, length: int, cap: int, overlong: int) -> ScoredItem:
    if not overlong:
        return scored
    penalty = float(overlong_penalty([length], cap, overlong)[0])
    return replace(scored, value=None if scored.value is None else scored.value + penalty,
                   components={**scored.components, OVERLONG: penalty})


def component_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """rewards/NAME/mean and /std, TRL's names, of what is known; a component of which nothing is known is left out."""
    values: dict[str, list[float]] = {}
    for scored in (scored for group in groups for scored in group.scored):
        for name, value in scored.components.items():
            values.setdefault(name, []).extend([] if value is None else [value])
    found: dict[str, float] = {}
    for name, known in values.items():
        if known:
            found |= {f"rewards/{name}/mean": float(np.mean(known)), f"rewards/{name}/std": float(np.std(known, ddof=1)) if len(known) > 1
                      else 0.0}
    return found


def reading_metrics(groups: Sequence[Group], form: AnswerForm) -> dict[str, float]:
    """Answers read both ways: how often the lenient reading is right, and how often right by one is wrong by the other."""
    read = [readings(str(completion.text), gold_answer(group.prompt.row), form) for group in groups for completion in group.completions]
    return {"rewards/answer/strict": float(np.mean([each.strictly_right for each in read])),
            "rewards/answer/lenient": float(np.mean([each.leniently_right for each in read])),
            "rewards/answer/readings_apart": reading_disagreements(read) / len(read)}

# ---------------------------------------------------------------- a judge


@dataclass
class JudgeRecord:
    """Record of a judge's answers and their cost over some groups. `late` were judged on a second request."""

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
        """Counts of the judge's work, without what is unknown: agreement where nothing was ranked twice."""
        ranks = [rank for each in self.repeats if (rank := rank_agreement(each.first, each.second)) is not None]
        counts: dict[str, float] = {"groups": self.groups, "unjudged": self.unjudged, "late": self.late, "repeats": len(self.repeats),
                                    "repeats_failed": self.repeats_failed, **asdict(self.cost)}
        if self.repeats:
            counts["largest_difference"] = max(each.largest_difference for each in self.repeats)
        return counts | ({"agreement": float(np.mean(ranks))} if ranks else {})


class JudgeReward:
    """A run's judge, connected. `sitting` holds all that it said since the run was started, `rollout` what it said since `begin`."""

    def __init__(self, reward: RewardSpec, seed: int) -> None:
        options = JudgeOptions(**reward.options)
        self.weight = reward.weight
        self.endpoint = endpoint_from_environment(options.url, options.model, key_variable=options.key, seconds=options.seconds)
        self.rubric = _read(options.rubric) if options.rubric else RUBRIC
        self._open = ExitStack()
        self.judge = Judge(self._open.enter_context(connected(self.endpoint)), seed=seed, rubric=self.rubric, tries=options.tries,
                           concurrency=options.concurrency, repeat=options.repeat)
        self.sitting, self.rollout = JudgeRecord(), JudgeRecord()
        self.verdicts: list[Verdict] = []  # of this rollout: no group vanished

    def __enter__(self) -> "JudgeReward":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def identity(self) -> dict[str, str]:
        """Identity of the judge: who judges, and by what rubric. The key is no part of it."""
        return {"url": self.endpoint.base_url, "model": self.endpoint.model, "rubric": hashlib.sha256(self.rubric.encode()).hexdigest()}

    def begin(self) -> None:
        self.rollout, self.verdicts = JudgeRecord(), []

    def join_scores(self, where: str, groups: Sequence[Group]) -> tuple[list[Group], dict[str, tuple[str, ...]]]:
        """The groups with the judge's component, and the reasons for those that have none, by prompt. `where` tells rollouts apart."""
        ids = [f"{where}/{place}/{each.prompt.id}" for place, each in enumerate(groups)]  # a prompt may come twice where epochs meet
        asked = [judge_group(id, each.prompt.text, [str(c.text) for c in each.completions]) for id, each in zip(ids, groups, strict=True)]
        judged = self.ask(asked)
        self.verdicts.append(check_groups_judged(ids, judged))
        faults = {each.group.id: each.faults for each in judged.unjudged}
        found = [self._with(each, judged.scores.get(id), faults.get(id, ())) for id, each in zip(ids, groups, strict=True)]
        return found, {each.prompt.id: faults[id] for id, each in zip(ids, groups, strict=True) if id in faults}

    def ask(self, groups: Sequence[Any]) -> Judged:
        """Ask the judge, one call a group; those that failed once more, after the others. Nothing is left pending: what is stale is not
        asked about."""
        judged = self.judge.score(groups)
        late = 0
        if judged.unjudged:
            again = self.judge.score([])
            late, judged = len(again.scores), _merged(judged, again)
        self.judge.pending.clear()
        for record in (self.sitting, self.rollout):
            record.add(len(groups), late, judged)
        return judged

    def write_down(self, run: Run, step: int) -> str:
        """Record what the judge said and cost in this process. A judge that contradicts itself ends the run; one that is swayed by the
        order of the page is worth a warning, because that order is another one each time."""
        run.log(Event.JUDGE_COST, step=step, **self.identity, **self.sitting.counts())
        agreement = check_judge_agreement(self.sitting.repeats)
        run.say(f"step {step}: {agreement}")
        run.judge(Event.JUDGE, [agreement])
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

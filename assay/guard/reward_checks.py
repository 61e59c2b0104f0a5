"""Reward checks: a preflight on canaries (completions of known worth); later, whether the held-out metric follows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from assay.errors import DataError
from assay.reward.answer import gold_answer, read_answer, same_answer
from assay.reward.canary import GOLD_COMPLETION, KNOW_THE_ANSWER, AnswerStyle, CanaryKind, canaries, gold_completion
from assay.reward.reward_functions import RewardSpec
from assay.reward.worker_pool import RewardItem, RewardWorkers, ScoredItem
from assay.statistics.early_stopping import mann_kendall_p
from assay.statistics.estimate import finite_vector
from assay.verdict import Verdict, proven, refuted, unproven

_Rows = Sequence[Mapping[str, Any]]

_SAMPLE = 16  # rows whose canaries are scored
_SAME = 1e-9  # a difference in reward that is none
_KINDS: dict[CanaryKind, str] = {
    "wrong": "a wrong answer", "empty": "no answer", "all_options": "a list of several answers",
    "repeated": "the same text again and again",
    "truncated": "a completion cut off before its answer", "echo": "the prompt itself"}
NEED_THE_ANSWER = {"wrong", "all_options", "repeated"}

FEWEST_EVALUATIONS = 7  # six values after the best one can just show a fall at 0.5 %
FALLING, RISING = 0.005, 0.05

# ---------------------------------------------------------------- before the first rollout


@dataclass(frozen=True)
class ScoredCanaries:
    """One row's canaries as the workers scored them."""

    number: int
    gold: ScoredItem
    others: Mapping[CanaryKind, Sequence[tuple[str, ScoredItem]]]

    def all(self) -> list[ScoredItem]:
        return [self.gold, *(scored for tried in self.others.values() for _, scored in tried)]


def preflight_rewards(rewards: Sequence[RewardSpec], rows: _Rows, workers: RewardWorkers, *, prompts: Sequence[str] | None = None,
                      style: AnswerStyle | None = None,
                      count_tokens: Callable[[str], int] = lambda text: len(text.split())) -> list[Verdict]:
    """Reward preflight in the run's own workers, on rows of its own data: right completions get full marks, and nothing else does.

    `prompts` are the rows' prompts as rendered; `count_tokens` is for rewards that look at `completion_tokens`.
    """
    style = style or completion_style(rewards, rows)
    prompts = [str(row.get("prompt", row.get("question", ""))) for row in rows] if prompts is None else prompts
    known = any(reward.file or reward.name in KNOW_THE_ANSWER for reward in rewards)
    verdicts = [check_golds(rows, style) if known else unproven("reward_golds", "no reward of this run looks at the answer"),
                check_reward_errors(workers)]
    usable = [number for number, row in enumerate(rows) if has_gold(row)]
    if not usable:
        return [*verdicts, unproven("reward_gold", f"none of {len(rows)} rows has a gold answer, so no completion is known to be right; "
                                    f"add 'gold', 'answer' or {GOLD_COMPLETION!r}")]
    picked = [usable[i] for i in sorted({round(at) for at in np.linspace(0, len(usable) - 1, _SAMPLE)})]
    tried = _tried(rows, picked, workers, prompts, style, count_tokens)
    verdicts += [check_scored(tried)]
    if any(scored.value is None for each in tried for scored in each.all()):
        return verdicts  # what is compared below would be missing
    if (unrewarded := check_made_gold(rewards, rows, tried, style)) is not None:
        return [*verdicts, unrewarded, check_flat(tried)]
    canary = [check_canary(kind, tried, answer_components(rewards, tried)) if known or kind not in NEED_THE_ANSWER else
              unproven(f"reward_{kind}", "no reward of this run looks at the answer; form alone is rewarded") for kind in _KINDS]
    return [*verdicts, check_gold(rewards, tried), *canary, check_flat(tried), check_scale(rewards, tried, known)]


def completion_style(rewards: Sequence[RewardSpec], rows: _Rows) -> AnswerStyle:
    """How a right completion of this run looks: with tags where they are rewarded, else as the data or the reward has it."""
    if any(reward.name == "format" and not reward.file for reward in rewards):
        return "tag"
    forms = {reward.options.get("form", "any") for reward in rewards if reward.name == "answer" and not reward.file}
    wanted: dict[str, AnswerStyle] = {"tag": "tag", "boxed": "boxed", "hash": "hash", "last": "plain"}
    if len(forms) == 1 and (form := forms.pop()) in wanted:
        return wanted[form]
    return "hash" if any("####" in str(row.get("answer", "")) for row in rows) else "plain"


def check_golds(rows: _Rows, style: AnswerStyle) -> Verdict:
    """Every row of the data has a gold answer that can be read back from a right completion: a row without one is constant reward."""
    unreadable = []
    for number, row in enumerate(rows):
        try:
            if GOLD_COMPLETION not in row and not same_answer(read_answer(gold_completion(row, style)), gold_answer(row)):
                unreadable.append(f"row {number}: {gold_answer(row)[:80]!r} cannot be read back")
        except DataError as error:
            unreadable.append(f"row {number}: {error}")
    if unreadable:
        reason = f"{len(unreadable)} of {len(rows)} gold answers cannot be used ({'; '.join(unreadable[:3])}); remove or mend those rows"
        return refuted("reward_golds", reason, unreadable=len(unreadable), rows=len(rows))
    return proven("reward_golds", f"all {len(rows)} gold answers can be read", rows=len(rows))


def check_reward_errors(workers: RewardWorkers) -> Verdict:
    """Rewards that raise, or give what is no number, come back from the workers as errors."""
    drilled = workers.drill()
    passed = [f"{name} became {scored.value}" for name, scored in drilled.items() if scored.value is not None or not scored.error]
    if passed or not drilled:
        return refuted("reward_errors", f"a reward that fails is not seen to fail: {', '.join(passed) or 'no drill came back'}")
    return proven("reward_errors", f"{len(drilled)} failures on purpose ({', '.join(drilled)}) all came back as errors")


def check_scored(tried: Sequence[ScoredCanaries]) -> Verdict:
    scored = [each for one in tried for each in one.all()]
    errors = [str(each.error) for each in scored if each.value is None]
    if errors:
        reason = f"{len(errors)} of {len(scored)} completions of known worth could not be scored: {errors[0]}"
        return refuted("reward_scored", reason, errors=errors[:3])
    return proven("reward_scored", f"{len(scored)} completions of known worth were all scored", completions=len(scored))


def check_gold(rewards: Sequence[RewardSpec], tried: Sequence[ScoredCanaries]) -> Verdict:
    """A right completion gets the most that each component gives."""
    for one in tried:
        for reward in rewards:
            value = one.gold.components[reward.name]
            assert value is not None
            most = reward.full_marks
            if most is None:
                most = max(float(scored.components[reward.name] or 0) for scored in one.all()) if reward.weight > 0 else value
            if value < most - _SAME:
                reason = f"the right completion of row {one.number} gets {value:.4g} of {most:.4g} for {reward.name}"
                return refuted("reward_gold", reason, row=one.number, component=reward.name)
    return proven("reward_gold", f"{len(tried)} right completions get full marks", rows=len(tried))


def check_made_gold(rewards: Sequence[RewardSpec], rows: _Rows, tried: Sequence[ScoredCanaries], style: AnswerStyle) -> Verdict | None:
    """A user's reward that gives nothing to any completion made here may want another form, such as a sentence around the answer: then
    the canaries say nothing of it, and that is what is said. None where some completion is rewarded."""
    own = [reward for reward in rewards if reward.file and reward.weight > 0]
    seen = {reward.name: {scored.components[reward.name] for one in tried for scored in one.all()} for reward in own}
    silent = [name for name, values in seen.items() if len(values) == 1]
    if not silent or len(silent) < len(rewards) or any(GOLD_COMPLETION in rows[one.number] for one in tried):
        return None
    made = gold_completion(rows[tried[0].number], style)
    return refuted("reward_gold", f"{silent[0]} gives {seen[silent[0]].pop():.4g} to every completion tried, right, wrong and empty. "
                   f"The right one was made from the row's answer alone: {made[-120:]!r}. Where a right completion must look otherwise, a "
                   f"sentence around the answer for one, add a column {GOLD_COMPLETION!r} that holds a right completion whole; where it "
                   "need not, the reward does not look at the answer", component=silent[0])


def answer_components(rewards: Sequence[RewardSpec], tried: Sequence[ScoredCanaries]) -> list[str]:
    """The components that tell a right answer from a wrong one; a user's is known by its doing so."""
    return [reward.name for reward in rewards if reward.weight > 0 and (reward.name in KNOW_THE_ANSWER or _gap(reward.name, tried) > _SAME)]


def check_canary(kind: CanaryKind, tried: Sequence[ScoredCanaries], components: Sequence[str]) -> Verdict:
    """Check that completions that are not right get less than the right one in every row: in total, and by each component that reads the
    answer.

    In all alone would not do: bad form hides that an empty answer is taken for a right one.
    """
    check, pairs = f"reward_{kind}", [(one, text, scored) for one in tried for text, scored in one.others.get(kind, ())]
    if not pairs:
        return unproven(check, f"no row allows a completion that is {_KINDS[kind]}")
    for one, text, scored in pairs:
        compared = {"": (scored.value, one.gold.value)} | {f" for {c}": (scored.components[c], one.gold.components[c]) for c in components}
        for what, (value, gold) in compared.items():
            assert value is not None
            assert gold is not None
            if value >= gold - _SAME:
                reason = f"{_KINDS[kind]} gets {value:.4g}{what}, the right completion {gold:.4g} (row {one.number}): {text[-120:]!r}"
                return refuted(check, reason, row=one.number, value=value, gold=gold)
    return proven(check, f"{_KINDS[kind]} gets less than the right completion in {len(tried)} rows", completions=len(pairs))


def check_flat(tried: Sequence[ScoredCanaries]) -> Verdict:
    """Check that not every completion gets the same reward: else every group has no variance, and nothing is learned."""
    distinct = {scored.value for one in tried for scored in one.all()}
    count = sum(len(one.all()) for one in tried)
    if len(distinct) == 1:
        return refuted("reward_flat", f"all {count} completions, right, wrong and empty, get {distinct.pop()}: there is nothing to learn")
    return proven("reward_flat", f"{count} completions get {len(distinct)} different rewards", distinct=len(distinct))


def check_reward_repeat(pairs: Sequence[tuple[ScoredItem, ScoredItem]]) -> Verdict:
    """Check that the same completion gets the same reward the second time; a difference is noise, which a group would mistake for signal.
    """
    apart = [abs(one.value - two.value) for one, two in pairs if one.value is not None and two.value is not None]
    if not apart:
        return unproven("reward_repeat", f"none of {len(pairs)} completions could be scored twice")
    noise, differ = max(apart), sum(each > _SAME for each in apart)
    if differ:
        return unproven("reward_repeat", f"asked twice about the same {len(apart)} completions, the reward of {differ} differs, by up to "
                        f"{noise:.4g}: groups of equal completions are told apart by noise, and learned from; make the reward a function "
                        "of the text alone, or round it", noise=noise, differ=differ)
    return proven("reward_repeat", f"{len(apart)} completions get the same reward the second time", noise=0.0)


def check_scale(rewards: Sequence[RewardSpec], tried: Sequence[ScoredCanaries], known: bool) -> Verdict:
    """Check that correctness outweighs everything else: otherwise the best form with a wrong answer would beat a right answer."""
    if not known or not any(one.others.get("wrong") for one in tried):
        return unproven("reward_scale", "right and wrong answers are not told apart by this run's rewards or rows")
    by_answer = by_form = 0.0
    for reward in rewards:
        gap = _gap(reward.name, tried)
        seen = [scored.components[reward.name] or 0 for one in tried for scored in one.all()]
        if reward.weight * gap > _SAME:
            by_answer += reward.weight * gap
        else:
            by_form += abs(reward.weight) * (max(seen) - min(seen) if reward.file else 1.0)
    evidence = {"by_answer": by_answer, "by_form": by_form}
    if by_form > by_answer + _SAME:
        reason = f"a right answer is worth {by_answer:.4g} more than a wrong one, form and length up to {by_form:.4g}"
        return refuted("reward_scale", f"{reason}: form will be learned instead", **evidence)
    return proven("reward_scale", f"a right answer is worth {by_answer:.4g}, form and length up to {by_form:.4g}", **evidence)


def _gap(component: str, tried: Sequence[ScoredCanaries]) -> float:
    """How much more a right answer gets than a wrong one, on average."""
    wrong = [(one.gold, scored) for one in tried for _, scored in one.others["wrong"]]
    gaps = [(gold.components[component] or 0) - (scored.components[component] or 0) for gold, scored in wrong]
    return float(np.mean(gaps)) if gaps else 0.0


def _tried(rows: _Rows, picked: Sequence[int], workers: RewardWorkers, prompts: Sequence[str], style: AnswerStyle,
           count_tokens: Callable[[str], int]) -> list[ScoredCanaries]:
    """Scores of all canaries of all picked rows, in one go through the workers."""
    texts: list[tuple[int, CanaryKind | None, str]] = []
    for number in picked:
        texts.append((number, None, gold_completion(rows[number], style)))
        made = canaries(rows[number], [rows[i] for i in picked], style, prompts[number])
        texts += [(number, kind, text) for kind, some in made.items() for text in some]
    items = [RewardItem(prompts[number], text, {**rows[number], "completion_tokens": count_tokens(text)}) for number, _, text in texts]
    scored = list(zip(texts, workers.score(items), strict=True))
    return [ScoredCanaries(number, next(score for (row, kind, _), score in scored if row == number and kind is None),
                  {kind: [(text, score) for (row, of, text), score in scored if (row, of) == (number, kind)] for kind in _KINDS})
            for number in picked]


def has_gold(row: Mapping[str, Any]) -> bool:
    try:
        gold_completion(row, "plain")
    except DataError:
        return False
    return True

# ---------------------------------------------------------------- during a run


def check_proxy(proxy: ArrayLike, true: ArrayLike) -> Verdict:
    """Reward and held-out metric, one pair an evaluation: since the metric's best, it does not fall while the reward rises.

    By Mann–Kendall on what came after the best value (whose own height would count as evidence otherwise): the metric falls at
    0.5 %, the reward rises at 5 %. Asked after each of 20 evaluations of a metric that is noise under a reward that rises, it
    raises a false alarm in 1.2 % of runs (20,000 simulated). A fall of one standard deviation of the noise per evaluation is
    found after seven of them in the middle, of half a one within twelve in 93 % of runs.
    """
    reward, metric = finite_vector("mean reward", proxy), finite_vector("held-out score", true)
    if reward.size != metric.size:
        raise DataError(f"{reward.size} rewards and {metric.size} held-out scores: give one of each per evaluation")
    best = int(metric.argmax())
    if metric.size < FEWEST_EVALUATIONS:
        return unproven("proxy", f"{metric.size} evaluations cannot show that reward and held-out metric part; {FEWEST_EVALUATIONS} can")
    falling, rising = mann_kendall_p(-metric[best + 1 :]) if best + 1 < metric.size else 1.0, mann_kendall_p(reward[best:])
    evidence = {"best": best, "p_falling": falling, "p_rising": rising, "evaluations": int(metric.size)}
    if falling <= FALLING and rising <= RISING:
        reason = (f"the reward rose from {reward[best]:.4g} to {reward[-1]:.4g} while the held-out metric fell from {metric[best]:.4g} "
                  f"(evaluation {best}) to {metric[-1]:.4g}: what is rewarded is no longer what is wanted; go back to evaluation {best}")
        return refuted("proxy", reason, **evidence)
    return proven("proxy", f"reward and held-out metric are not shown to part over {metric.size} evaluations", **evidence)

"""Judge checks: unusable answers are no scores, no group vanishes, position does not matter, asked twice it agrees."""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from assay.guard.reward_checks import has_gold
from assay.reward import llm_judge
from assay.reward.canary import AnswerStyle, canaries, gold_completion
from assay.reward.endpoint import HttpReply
from assay.reward.llm_judge import Judge, Judged, JudgeGroup, Repeat, judge_group, rank_agreement
from assay.seeds import derive
from assay.statistics.estimate import mean
from assay.verdict import Verdict, proven, refuted, unproven

FEWEST_GROUPS = 8
POSITION_LEVEL = 0.999
LEAST_AGREEMENT = 0.5
TRIED, LEAST_RIGHT = 8, 0.75  # rows before a run, and the share of them in which a right completion must stand above a wrong one
_PLACES = 6  # completions of a group whose scores are known: an order of so many is seldom its own inverse
_TWO = '{{"scores": [{{"id": "1", "score": 0.5}}, {{"id": "2", "score": {second}}}]}}'
BAD_ANSWERS = ("", "The second is better.", "{}", '{"scores": []}', '{"scores": [{"id": "1", "score": 0.5}]}',
               _TWO.format(second=0.5).replace('"2"', '"1"'),
               *(_TWO.format(second=bad) for bad in ("NaN", "1.5", "-0.5", "null", '"0.5"', "true")))


def check_judge_parser() -> Verdict:
    """Answers that hold no usable scores are refused by the very code that reads a judge's answers."""
    taken = []
    for text in BAD_ANSWERS:
        try:
            taken.append(f"{text[:60]!r} became {llm_judge.read_scores(text, 2)}")
        except llm_judge.Unreadable:
            continue
    if taken:
        return refuted("judge_errors", f"{len(taken)} of {len(BAD_ANSWERS)} unusable answers of a judge became scores: {taken[0]}")
    return proven("judge_errors", f"{len(BAD_ANSWERS)} unusable answers of a judge were all refused")


def check_judge_order(asked: Callable[[Sequence[JudgeGroup]], Judged], rows: Sequence[Mapping[str, Any]], prompts: Sequence[str],
                      style: AnswerStyle) -> Verdict:
    """Check before the first rollout that the judge ranks a right completion above a wrong and an empty one, in most rows.

    Not in all, as a rule must: a judge may err. It is not asked for full marks either: its scores only rank a group. Canaries that
    look like right answers (repeated, cut off, several options) are left to its rubric.
    """
    known = [number for number, row in enumerate(rows) if has_gold(row)]
    if not known:
        return unproven("judge_order", f"none of {len(rows)} rows has a gold answer, so nothing shows that the judge prefers what is right")
    picked = [known[i] for i in sorted({round(at) for at in np.linspace(0, len(known) - 1, TRIED)})]
    pages = {f"preflight/{number}": _known_worth(rows, picked, number, prompts[number], style) for number in picked}
    places = {id: derive(number, "right place") % len(pages[id]) for id, number in zip(pages, picked, strict=True)}
    for id, (gold, *others) in list(pages.items()):
        pages[id] = [*others[: places[id]], gold, *others[places[id] :]]
    judged = asked([judge_group(id, prompts[number], pages[id]) for id, number in zip(pages, picked, strict=True)])
    if 2 * len(judged.unjudged) > len(pages):
        return refuted("judge_order", f"{len(judged.unjudged)} of {len(pages)} groups of known worth could not be judged: "
                       f"{judged.unjudged[0].faults[0]}", unjudged=len(judged.unjudged))
    right = sum(all(scores[places[id]] > score for place, score in enumerate(scores) if place != places[id])
                for id, scores in judged.scores.items())
    words = f"in {right} of {len(judged.scores)} rows the judge puts the right completion above a wrong one and none at all"
    if right < LEAST_RIGHT * len(judged.scores):
        return refuted("judge_order", f"{words}; at least {LEAST_RIGHT:.0%} are asked for: it does not reward what is right", right=right)
    return proven("judge_order", words, right=right, rows=len(judged.scores))


def _known_worth(rows: Sequence[Mapping[str, Any]], picked: Sequence[int], number: int, prompt: str, style: AnswerStyle) -> list[str]:
    """The right completion first; where it stands among them when the judge is asked is another matter."""
    made = canaries(rows[number], [rows[i] for i in picked], style, prompt)
    return [gold_completion(rows[number], style), *made["wrong"][:2], ""]


def check_judge_places(judge: Judge) -> Verdict:
    """A score goes back to the completion that got it, whatever the order of the page: through the run's own code, with a stand-in for
    the endpoint that scores each completion by the number it is. A score of another place of the page would be no error anywhere."""
    tried = copy.copy(judge)
    tried.post, tried.pending, tried.repeat, tried._rounds = _scores_by_number, {}, 1.0, {}
    groups = {f"places/{number}": [str((5 * place + number) % _PLACES / _PLACES) for place in range(_PLACES)] for number in range(TRIED)}
    judged = tried.score([judge_group(id, "Which number is largest?", said) for id, said in groups.items()])
    for id, said in groups.items():
        due = tuple(map(float, said))
        again = [repeat.second for repeat in judged.repeats if repeat.id == id]
        for found in (judged.scores.get(id), *again):
            if found != due:
                return refuted("judge_places", f"completions of known scores {due} came back as {found}: scores are given to other "
                               "completions than the judge gave them to")
    return proven("judge_places", f"{len(groups)} groups of {_PLACES} completions, each asked about in two orders, got their own scores")


def _scores_by_number(payload: Mapping[str, Any]) -> HttpReply:
    """Reply of an endpoint that takes each completion for its score."""
    page = str(payload["messages"][-1]["content"])
    shown = json.loads(page.rpartition("The completions:\n")[2])
    scores = [{"id": each["id"], "explanation": "", "score": float(each["messages"][-1]["content"])} for each in shown]
    return HttpReply(200, json.dumps({"choices": [{"message": {"content": json.dumps({"scores": scores})}, "finish_reason": "stop"}]}))


def check_groups_judged(asked: Iterable[str], judged: Judged) -> Verdict:
    """Every group that was asked about has its scores or its reasons."""
    groups = list(asked)
    lost = [group for group in groups if group not in judged.scores and group not in {each.group.id for each in judged.unjudged}]
    if lost:
        reason = f"{len(lost)} of {len(groups)} groups have neither scores nor a reason: {', '.join(lost[:3])}"
        return refuted("judge_groups", reason, lost=lost)
    without = f"{len(judged.unjudged)} could not be judged and wait" if judged.unjudged else "all have scores"
    return proven("judge_groups", f"{len(groups)} groups were asked about, {without}", unjudged=[each.group.id for each in judged.unjudged])


def check_position_bias(shown: Iterable[Sequence[float]]) -> Verdict:
    """Check that a completion's position on the page does not sway its score: each group's scores in the order shown."""
    sways = [found for scores in shown if (found := rank_agreement(range(len(scores)), scores)) is not None]
    if len(sways) < FEWEST_GROUPS or len(set(sways)) < 2:
        return _constant_sway(sways) or unproven("judge_position", f"{len(sways)} ranked groups are too few; {FEWEST_GROUPS} are needed")
    sway = mean(sways, level=POSITION_LEVEL)
    if sway.contains(0):
        return proven("judge_position", f"score and place on the page: rank correlation {sway}", correlation=sway.mean)
    side = "last" if sway.mean > 0 else "first"
    reason = f"the judge favours what it is shown {side}: rank correlation of score and place {sway}; scores hold noise by order"
    return refuted("judge_position", reason, correlation=sway.mean)


def check_judge_agreement(repeats: Sequence[Repeat]) -> Verdict:
    """Check that the judge agrees with itself: asked again, in another order, it ranks the same way, on the mean of Kendall's τ over groups
    at least 0.5.

    What is below is a contradiction where chance does not explain it: the upper end of a 99.9 % interval is below too.
    """
    if not repeats:
        return unproven("judge_agreement", "no group was scored twice; ask for a larger share of repeats")
    largest = max(each.largest_difference for each in repeats)
    ranks = [rank for each in repeats if (rank := rank_agreement(each.first, each.second)) is not None]
    evidence = {"groups": len(repeats), "ranked": len(ranks), "largest_difference": largest}
    if not ranks:
        return unproven("judge_agreement", f"in {len(repeats)} repeated groups the judge ranked nothing: its scores are equal", **evidence)
    agreement = float(np.mean(ranks))
    said = f"over {len(ranks)} groups scored twice, rank agreement {agreement:.3g}, largest difference of one score {largest:.3g}"
    if agreement >= LEAST_AGREEMENT:
        return proven("judge_agreement", said, agreement=agreement, **evidence)
    at_best = agreement if len(set(ranks)) == 1 else mean(ranks, level=POSITION_LEVEL).high
    if len(ranks) < FEWEST_GROUPS or at_best >= LEAST_AGREEMENT:
        return unproven("judge_agreement", f"{said}: below {LEAST_AGREEMENT}, which so few do not show", agreement=agreement, **evidence)
    return refuted("judge_agreement", f"{said}: the judge contradicts itself; at least {LEAST_AGREEMENT} is asked for", **evidence)


def _constant_sway(sways: Sequence[float]) -> Verdict | None:
    """Verdict where all groups are scored in the very order of the page: no spread to estimate, and no doubt."""
    if len(sways) >= FEWEST_GROUPS and sways[0] != 0:
        return refuted("judge_position", f"all {len(sways)} groups are scored in the order of the page, whatever stands there")
    return None

"""A judge: unusable answers are refused, no group vanishes, the order of the page is no matter, asked twice it agrees."""

import numpy as np
import pytest

from assay.guard.judge_checks import (
    BAD_ANSWERS,
    check_groups_judged,
    check_judge_agreement,
    check_judge_order,
    check_judge_parser,
    check_judge_places,
    check_position_bias,
)
from assay.reward import llm_judge
from assay.reward.llm_judge import Judge, Judged, Repeat, Unjudged, judge_group, page_order
from assay.testing.fault_injection import swap
from assay.verdict import Outcome


def test_every_unusable_answer_is_refused_by_the_drill_and_a_usable_one_is_not():
    assert check_judge_parser().outcome is Outcome.PROVEN
    assert len(set(BAD_ANSWERS)) == 12
    assert llm_judge.read_scores('{"scores": [{"id": "1", "score": 0.5}, {"id": "2", "score": 0.5}]}', 2) == (0.5, 0.5)
    with swap(llm_judge, "read_scores", lambda text, count: (0.0,) * count):
        assert check_judge_parser().outcome is Outcome.REFUTED


def test_a_group_that_vanished_is_named():
    judged = Judged(scores={"a": (0.1, 0.2)}, unjudged=[Unjudged(judge_group("b", "p", ["x", "y"]), ("500",))])
    assert check_groups_judged(["a", "b"], judged).outcome is Outcome.PROVEN
    verdict = check_groups_judged(["a", "b", "c"], judged)
    assert verdict.outcome is Outcome.REFUTED
    assert verdict.evidence["lost"] == ["c"]


def test_a_judge_swayed_by_the_order_of_the_page_is_found():
    noise = np.random.default_rng(0)
    fair = [tuple(noise.random(6)) for _ in range(40)]
    swayed = [tuple(scores + 0.15 * np.arange(6)) for scores in fair]
    assert check_position_bias(fair).outcome is Outcome.PROVEN
    verdict = check_position_bias(swayed)
    assert verdict.outcome is Outcome.REFUTED
    assert "favours what it is shown last" in verdict.reason
    assert check_position_bias([(0.3, 0.2, 0.1)] * 8).outcome is Outcome.REFUTED
    assert check_position_bias([(0.3, 0.2, 0.1)] * 7).outcome is Outcome.UNPROVEN
    assert check_position_bias([(0.3, 0.3)] * 20).outcome is Outcome.UNPROVEN


def test_position_bias_is_seldom_seen_where_there_is_none():
    noise = np.random.default_rng(1)
    alarms = sum(check_position_bias([tuple(noise.random(4)) for _ in range(12)]).outcome is Outcome.REFUTED for _ in range(1000))
    assert alarms <= 6  # 1 in 1,000 each


def test_agreement_is_reported_with_rank_and_largest_difference():
    same = [Repeat(str(n), (0.1, 0.5, 0.9), (0.2, 0.5, 0.8)) for n in range(3)]
    verdict = check_judge_agreement(same)
    assert verdict.outcome is Outcome.PROVEN
    assert verdict.evidence["largest_difference"] == pytest.approx(0.1)
    against = [Repeat(str(n), (0.1, 0.5, 0.9), (0.9, 0.5, 0.1)) for n in range(8)]
    assert check_judge_agreement([*same, *against]).outcome is Outcome.UNPROVEN, "chance explains it"
    assert check_judge_agreement([*same, *(4 * against)]).outcome is Outcome.REFUTED
    assert [check_judge_agreement(against[:n]).outcome for n in (7, 8)] == [Outcome.UNPROVEN, Outcome.REFUTED]
    assert check_judge_agreement([Repeat("a", (0.5, 0.5), (0.1, 0.2))]).outcome is Outcome.UNPROVEN
    assert check_judge_agreement([]).outcome is Outcome.UNPROVEN


def test_agreement_that_is_good_enough_is_seldom_called_a_contradiction():
    """A noisy judge whose ranks agree at 0.6 on average."""
    noise = np.random.default_rng(2)
    alarms = 0
    for _ in range(400):
        worth = [noise.random(5) for _ in range(12)]
        twice = [Repeat(str(n), *(tuple(each + noise.normal(0, 0.13, 5)) for _ in range(2))) for n, each in enumerate(worth)]
        alarms += check_judge_agreement(twice).outcome is Outcome.REFUTED
    assert alarms <= 1


ROWS = [{"prompt": f"{a}+1=", "gold": str(a + 1)} for a in range(20)]
PROMPTS = [row["prompt"] for row in ROWS]


def ordered(score, fails=()):
    """`check_order` before a judge that scores (prompt, completion) so, and cannot judge some rows."""
    def asked(groups):
        judged = Judged()
        for each in groups:
            prompt = each.conversations[0][0]["content"]
            if PROMPTS.index(prompt) in fails:
                judged.unjudged.append(Unjudged(each, ("500",)))
            else:
                judged.scores[each.id] = tuple(score(prompt, talk[1]["content"]) for talk in each.conversations)
        return judged
    return check_judge_order(asked, ROWS, PROMPTS, "plain")


def right(prompt, text):
    return float(text == str(int(prompt.split("+")[0]) + 1))


def test_a_judge_must_put_what_is_right_above_what_is_not_in_most_rows():
    assert ordered(right).outcome is Outcome.PROVEN
    assert ordered(lambda prompt, text: right(prompt, text) if prompt != "0+1=" else 0.0).outcome is Outcome.PROVEN, "it may err"
    for score in (lambda *_: 0.5, lambda prompt, text: 1 - right(prompt, text), lambda prompt, text: float(not text)):
        assert ordered(score).outcome is Outcome.REFUTED
    assert ordered(lambda prompt, text: right(prompt, text) if int(prompt.split("+")[0]) % 2 else 0.5).outcome is Outcome.REFUTED


def test_a_judge_that_can_not_judge_most_rows_is_refused_and_rows_without_gold_are_said():
    assert ordered(right, fails=(0,)).outcome is Outcome.PROVEN
    verdict = ordered(right, fails=range(20))
    assert verdict.outcome is Outcome.REFUTED
    assert "could not be judged: 500" in verdict.reason
    without = check_judge_order(lambda groups: Judged(), [{"prompt": "x"}], ["x"], "plain")
    assert without.outcome is Outcome.UNPROVEN
    assert "nothing shows that the judge prefers what is right" in without.reason


def test_scores_that_come_back_by_the_inverse_order_are_found_before_the_endpoint_is_asked():
    """They are numbers between 0 and 1, one for each completion: nothing else is wrong with them."""
    judge = Judge(lambda payload: pytest.fail("the endpoint was asked"))
    assert check_judge_places(judge).outcome is Outcome.PROVEN
    assert (judge.cost.calls, judge.pending) == (0, {})
    sound = llm_judge.in_own_order

    def inverse(group, rests, order, shown):
        return sound(group, rests, range(len(order)), tuple(shown[i] for i in order))

    with swap(llm_judge, "in_own_order", inverse):
        verdict = check_judge_places(judge)
    assert verdict.outcome is Outcome.REFUTED
    assert "other completions than the judge gave them to" in verdict.reason


def test_a_repeat_is_never_asked_in_the_order_of_the_first_time():
    for count in (2, 3, 5):
        for group in range(40):
            first, second, third = (page_order(count, 0, str(group), round) for round in (0, 1, 2))
            assert first != second != third
            assert sorted(second) == list(range(count))


def test_the_right_completion_stands_at_any_place_when_a_judge_is_tried():
    places = []

    def asked(groups):
        scores = {group.id: tuple(float(said["content"] == prompt["content"][:-1]) for prompt, said in group.conversations)
                  for group in groups}
        places.extend(each.index(1.0) for each in scores.values())
        return Judged(scores=scores)

    rows = [{"gold": str(n)} for n in range(100, 140)]
    assert check_judge_order(asked, rows, [f"{n}=" for n in range(100, 140)], "plain").outcome is Outcome.PROVEN
    assert len(set(places)) > 1

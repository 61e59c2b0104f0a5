"""Advantages and weights: what is unknown takes no part, what is silent is found, and every divisor counts what is used."""

import statistics

import numpy as np
import pytest
import torch

from assay.errors import DataError, UsageError
from assay.learn.advantage import (
    STD_FLOOR,
    Refill,
    estimated_advantages,
    group_advantages,
    kl_shift,
    overlong_penalty,
    refill,
    reward_std,
    token_weights,
    untruncated,
)
from assay.witness.due_rollout import advantages as witnessed


def test_a_group_has_mean_0_and_deviation_1():
    found = group_advantages([[1.0, 0.0, 0.0, 0.5], [3.0, 3.0, 3.0, 9.0]])
    assert found.values_PG.mean(1) == pytest.approx([0, 0], abs=1e-12)
    assert found.values_PG.std(1, ddof=1) == pytest.approx([1, 1], rel=1e-3)
    assert not found.silent_P.any()
    plain = group_advantages([[1.0, 0.0, 0.0, 0.5], [3.0, 3.0, 3.0, 9.0]], scale="none")
    assert plain.values_PG.tolist() == [[0.625, -0.375, -0.375, 0.125], [-1.5, -1.5, -1.5, 4.5]]


def test_leaving_oneself_out_compares_with_the_siblings():
    rewards = [[1.0, 0.0, None, 2.0]]
    found = group_advantages(rewards, scale="none", leave_one_out=True).values_PG[0]
    assert found == pytest.approx([1 - 1.0, 0 - 1.5, 0, 2 - 0.5])


def test_the_scale_of_a_batch_is_one_for_all():
    rewards = [[1.0, 0.0], [10.0, 0.0]]
    found = group_advantages(rewards, scale="batch").values_PG
    assert found == pytest.approx(np.array([[0.5, -0.5], [5.0, -5.0]]) / (np.std([1, 0, 10, 0], ddof=1) + 1e-4))
    assert reward_std([[1.0, None]]) == 0


def test_unknown_rewards_take_no_part():
    found = group_advantages([[1.0, None, 0.0], [None, None, None], [None, 1.0, None]], scale="none")
    assert found.values_PG.tolist() == [[0.5, 0, -0.5], [0, 0, 0], [0, 0, 0]]
    assert found.known_PG.tolist() == [[True, False, True], [False] * 3, [False, True, False]]
    assert found.silent_P.tolist() == [False, True, True]  # one reward has nothing to be better than
    assert found.frac_zero_std == pytest.approx(2 / 3)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -1e6, 0.0])
def test_equal_rewards_make_no_signal_out_of_rounding(reward: float):
    found = group_advantages([[reward] * 7])
    assert found.silent_P.all()
    assert not found.values_PG.any()


def test_rewards_that_are_no_numbers_are_refused():
    with pytest.raises(DataError, match="prompt 0, completion 1: the reward is nan"):
        group_advantages([[1.0, float("nan")]])
    with pytest.raises(DataError, match="all of one size"):
        group_advantages([[1.0, 2.0], [1.0]])
    with pytest.raises(UsageError, match="expected 'group', 'batch' or 'none'"):
        group_advantages([[1.0, 2.0]], scale="std")  # type: ignore[arg-type]


def test_weights_and_divisors():
    lengths, counted = [4, 2, 8], [True, False, True]
    token, sequence, constant = (token_weights(lengths, counted, how, 10) for how in ("token", "sequence", "constant"))  # type: ignore[arg-type]
    assert (token.weight_N.tolist(), token.divisor) == ([1, 0, 1], None)
    assert (sequence.weight_N.tolist(), sequence.divisor) == ([0.25, 0, 0.125], None)
    assert (constant.weight_N.tolist(), constant.divisor) == ([1, 0, 1], 20)  # two that count, not three
    assert sequence.weight_N @ lengths == 2  # the loop's divisor: sequences that count
    with pytest.raises(UsageError, match="needs the cap"):
        token_weights(lengths, counted, "constant", 7)
    with pytest.raises(DataError, match="at least one token"):
        token_weights([0], [True], "token")
    with pytest.raises(UsageError, match="is not known"):
        token_weights([1], [True], "dapo")  # type: ignore[arg-type]


def test_only_what_hit_the_cap_is_truncated():
    assert untruncated(["stop", "length", "stop"]).tolist() == [True, False, True]


def test_the_over_long_are_punished_softly():
    assert overlong_penalty([1, 12, 14, 16, 20], cap=16, buffer=4).tolist() == [0, 0, -0.5, -1, -1]
    with pytest.raises(UsageError, match="0 < buffer ≤ cap"):
        overlong_penalty([1], cap=4, buffer=5)


def test_the_kl_shift_only_moves_credit():
    rng = torch.Generator().manual_seed(0)
    behaviour, reference = torch.randn(2, 3, 5, generator=rng)
    weight = torch.rand(3, 5, generator=rng) * (torch.arange(5) > 1)
    behaviour[:, 0] = torch.nan  # nothing was sampled there
    shift = kl_shift(behaviour, reference, weight, 0.5)
    assert float((weight * shift).sum()) == pytest.approx(0, abs=1e-6)
    assert not shift[:, :2].any()
    counts = weight > 0
    gap, moved = (behaviour - reference)[counts], shift[counts]
    assert torch.corrcoef(torch.stack([gap, moved]))[0, 1] == pytest.approx(-1)
    assert float(moved.std() / gap.std()) == pytest.approx(0.5)


def test_groups_without_a_signal_are_sampled_anew_up_to_a_limit():
    assert refill([True, False, True, False], [1, 1, 3, 3], limit=3) == Refill(kept=(1, 3), again=(0,), given_up=(2,))
    with pytest.raises(DataError, match="2 groups but 1 counts"):
        refill([True, False], [1], 2)


REWARDS = [[1.0, 0.0, None, 0.5], [3.0, 3.0, 3.0, 3.0], [0.0, -2.0, 4.0, None]]


def test_rloo_compares_with_the_mean_of_the_siblings_alone_and_leaves_it_plain():
    found = estimated_advantages(REWARDS, "rloo")
    for values, group in zip(found.values_PG, REWARDS, strict=True):
        for place, reward in enumerate(group):
            others = [other for at, other in enumerate(group) if at != place and other is not None]
            assert values[place] == pytest.approx(0.0 if reward is None else reward - sum(others) / len(others))
    assert found.silent_P.tolist() == [False, True, False]


def test_reinforce_pp_compares_with_the_whole_batch_so_that_equal_groups_learn_too():
    found, known = estimated_advantages(REWARDS, "reinforce_pp"), [r for group in REWARDS for r in group if r is not None]
    mean, deviation = statistics.mean(known), statistics.stdev(known) + STD_FLOOR
    due = [[0.0 if reward is None else (reward - mean) / deviation for reward in group] for group in REWARDS]
    assert found.values_PG == pytest.approx(np.array(due))
    assert not found.silent_P.any()
    assert found.values_PG[1][0] > 0
    equal = estimated_advantages([[2.0, 2.0], [2.0, None]], "reinforce_pp")
    assert equal.silent_P.all()
    assert not equal.values_PG.any()


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_pp"])
def test_the_witness_works_out_the_same_advantages(estimator: str):
    assert np.array(witnessed(REWARDS, "group", estimator)) == pytest.approx(estimated_advantages(REWARDS, estimator).values_PG)  # type: ignore[arg-type]

"""The ground: addressed randomness and verdicts."""

import torch

from assay.seeds import derive, generator
from assay.verdict import Outcome, overall, proven, refuted, unproven


def test_an_address_is_its_parts_and_where_they_end():
    addresses = [(0, "a", 1), (0, "a", 11), (0, "a1", 1), (0, "a", "1"), (1, "a", 1), (0, "a", 1, 1), (0, "a"), (0, "ab"), (0, "a", "b")]
    seeds = [derive(*address) for address in addresses]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_everywhere():
    assert derive(0, "rollout", 3, 7) == 5397524018520832835


def test_a_generator_leaves_the_ambient_one_alone():
    before = torch.get_rng_state()
    torch.rand(3, generator=generator(0, "x"))
    assert torch.equal(before, torch.get_rng_state())


def test_unproven_is_never_success():
    yes, no, unknown = proven("a", ""), refuted("b", ""), unproven("c", "")
    assert overall([yes, yes]) is Outcome.PROVEN
    assert overall([yes, unknown]) is Outcome.UNPROVEN
    assert overall([yes, unknown, no]) is Outcome.REFUTED
    assert overall([]) is Outcome.UNPROVEN

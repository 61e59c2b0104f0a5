"""The short crash campaign; `python -m tests.store.campaign --full` is the long one."""

from collections.abc import Callable

import pytest

from tests.store import campaign
from tests.store.campaign import FILES, FOLDERS, LEDGER, Tally

PARTS: dict[str, Callable[[], Tally]] = {
    "killed at random": lambda: campaign.killed_at_random(15, seed=0),
    "killed at every other operation": lambda: campaign.killed_at_every_operation(fast=True, stride=2),
    "starved": lambda: campaign.starved(stride=17),
    "flipped": lambda: campaign.flipped((0x04,), stride=5),
    "power cut": lambda: campaign.power_cut(3),
    "hostile headers": lambda: campaign.header_fuzz(2000, seed=0),
}


@pytest.mark.parametrize("part", PARTS)
def test_every_promise_holds(part: str) -> None:
    tally = PARTS[part]()
    assert tally.tried > 10
    assert not tally.broken, str(tally)


@pytest.mark.parametrize("left_out", [(FILES, FOLDERS, LEDGER), (FILES,), (FOLDERS,), (LEDGER,)], ids=" and ".join)
def test_the_campaign_finds_out_a_store_without_fsync(left_out: tuple[str, ...]) -> None:
    assert campaign.power_cut(3, lambda kind, number: kind in left_out).broken


def test_the_campaign_finds_out_a_store_without_the_rename() -> None:
    with campaign.written_in_place():
        assert campaign.killed_at_every_operation(fast=True).broken
        assert campaign.power_cut(1).broken


@pytest.mark.skipif(not campaign.can_strace(), reason="needs strace and the right to trace")
def test_killed_at_some_system_calls() -> None:
    tally = campaign.killed_at_every_syscall(only={"fsync", "rename", "mkdir"})
    assert tally.tried > 10
    assert not tally.broken, str(tally)

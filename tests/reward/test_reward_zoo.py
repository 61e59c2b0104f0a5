"""Every fault of rewards and judges is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.guard import reward_checks
from assay.testing.fault_injection import FAULTS, swap
from assay.verdict import proven
from assay.zoo import observe, reward_faults

REASONS = {
    "scores by the inverse of the page's order": "other completions than the judge gave them to",
    "alarm in a thread swallowed": "a wrong answer gets 0.2, the right completion 0.2 (row 0)",
    "constant reward": "right, wrong and empty, get 1.0: there is nothing to learn",
    "empty answer rewarded": "no answer gets 1 for right, the right completion 1",
    "all options rewarded": "a list of several answers gets 1.2",
    "answer read leniently": "a completion cut off before its answer gets 1",
    "form outweighs the answer": "a right answer is worth 0.2 more than a wrong one, form and length up to 1",
    "metric falls under a rising reward": "while the held-out metric fell from",
    "gold that cannot be read": "1 of 9 gold answers cannot be used (row 8",
    "truncation option zeroes all": "a wrong answer gets 0.2, the right completion 0.2 (row 0)",
    "prompt scored for the answer": "a wrong answer gets",
    "failed reward scored 0": "raises became 0.0",
    "unjudged group dropped": "1 of 24 groups have neither scores nor a reason: problem 7",
    "garbled judgement scored": "unusable answers of a judge became scores",
    "judge swayed by the order": "the judge favours what it is shown first",
    "scores left in the order of the page": "the judge contradicts itself",
    "judge that likes silence": "in 0 of 8 rows the judge puts the right completion above",
    "judge that tells nothing apart": "in 0 of 8 rows the judge puts the right completion above",
}
WANTED = {f"W0{n}" for n in range(1, 7)} | {"E05", "E06"}


def test_every_row_about_rewards_has_a_fault_and_every_fault_its_reason():
    own = {name: fault for name, fault in FAULTS.items() if fault.job.__module__ == reward_faults.__name__}
    assert own.keys() == REASONS.keys()
    assert not WANTED - {row for fault in own.values() for row in fault.rows}


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = observe(FAULTS[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in sighting.facts()["reason"], shown


def test_a_blind_check_misses_its_fault():
    with swap(reward_checks, "check_scale", lambda *_: proven("reward_scale", "looks fine")):
        assert not observe(FAULTS["form outweighs the answer"]).caught
    with swap(reward_faults, "check_groups_judged", lambda *_: proven("judge_groups", "looks fine")):
        assert not observe(FAULTS["unjudged group dropped"]).caught

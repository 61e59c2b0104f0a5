"""Every fault of distillation is caught by its check, for its own reason; its clean twin is silent."""

import pytest

from assay.guard import distillation_checks
from assay.testing.fault_injection import nothing, swap
from assay.testing.tiny_training import a_distillation_preflight, teacher_weights
from assay.verdict import proven
from assay.zoo import catalogue, observe
from tests.zoo.sightings import sight

REASONS = {
    "teacher's term missing": "and the gradient by 0.0%: the teacher's signal does not reach the student",
    "teacher's term without a gradient": "and the gradient by 0.0%: the teacher's signal does not reach the student",
    "teacher's answers dropped by the loader": "they were given for another text, or stand at the wrong tokens",
    "mean over the vocabulary": "look for a mean that was taken over the vocabulary",
    "teacher of another vocabulary": "Let the teacher write text, and fine-tune the student on that",
    "teacher that cannot read the text": "it does not read this text as it should",
    "teacher's answers shifted by one": "the objective and its formula written out",
    "stored answers shifted by one": "they were given for another text, or stand at the wrong tokens",
    "stored answers for another text": "are for 32 other tokens than these 32",
    "stored answers of another tokenizer": "its ids mean other text",
    "stored answers damaged": "logprobs.bin: missing, or not the bytes that the manifest names",
    "temperature without its square": "gradients apart by at most 9.4e-01",
    "divergence the wrong way round": "the objective and its formula written out",
    "only the teacher softened": "distilling the student from itself: loss 8.9e-03",
    "impossible token times its probability": "gradients that are not finite: embed.weight",
    "teacher's soft cap ignored": "the objective and its formula written out",
    "distillation that takes a mean": "4 rows one at a time, and all at once",
    "padding in the teacher's term": "eight columns of padding change the loss from",
    "teacher in training mode": "in training mode: the teacher",
    "dropout in the teacher": "something in it is drawn by lot",
    "student built of the teacher's own layers": "9 of 18 tensors of the teacher may learn or got a gradient",
    "last batch's loss as the result": "another number, such as the last batch's",
}


def test_every_row_about_distillation_has_a_fault_and_every_fault_its_reason():
    here = {name: fault for name, fault in catalogue().items() if fault.plant.__module__ == "assay.zoo.distillation_faults"}
    assert here.keys() == REASONS.keys()
    assert {"L03", "L07", "L08", "L09", "L10", "S2"} <= {row for fault in here.values() for row in fault.rows}


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(catalogue()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS[name] in sighting.facts()["reason"], shown


def test_a_blind_check_misses_its_fault():
    with swap(distillation_checks, "check_teacher_signal", lambda *given: proven("signal", "looks fine")):
        assert not observe(catalogue()["teacher's term missing"]).caught


def test_nothing_planted_outlives_its_job(tmp_path):
    job, weights = a_distillation_preflight(), {name: value.clone() for name, value in teacher_weights().items()}
    before = [str(verdict) for verdict in job(tmp_path, nothing)]
    for name in ("teacher that cannot read the text", "teacher's answers shifted by one", "student built of the teacher's own layers"):
        observe(catalogue()[name])
    assert [str(verdict) for verdict in job(tmp_path, nothing)] == before
    assert all(value.equal(weights[name]) for name, value in teacher_weights().items())

"""Which faults the witness alone catches is measured: a fault of its own, one of another file, one that strikes no run, one of a folder."""

import json

import pytest

from assay.cli import run as assay
from assay.zoo import catalogue
from assay.zoo.witness_alone import CAUGHT, UNASKED, UNREACHED, witness_alone


@pytest.mark.parametrize(("name", "answer", "where"), [
    ("clipping computed and not applied", CAUGHT, "its own"), ("gate and up exchanged", CAUGHT, "llama"),
    ("stop token masked from step 2 on", CAUGHT, "sft"), ("replicas part", UNREACHED, "sft")])
def test_a_fault_is_planted_in_a_run_whose_other_checks_are_silent(name: str, answer: str, where: str):
    found = witness_alone(catalogue()[name])
    assert (found.answer, found.run) == (answer, where), found.line()


def test_the_command_counts_what_the_witness_catches_and_what_it_is_not_asked(capsys: pytest.CaptureFixture[str]):
    assert assay(["zoo", "--witness", "--only", "flipped bit", "clipping computed and not applied"]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 faults would have been caught by the witness alone" in said
    assert "1 were not asked" in said
    assert assay(["zoo", "--witness", "--json", "--only", "flipped bit"]) == 0
    assert [row["witness"] for row in json.loads(capsys.readouterr().out)] == [UNASKED]

"""Every fault of two processes that hold one model in parts is caught by its check, for its own reason; its clean twin is silent."""

import functools
import tempfile
from pathlib import Path

import pytest

from assay.testing.fault_injection import Job, nothing
from assay.verdict import Outcome, Verdict
from assay.zoo import catalogue

REASONS = {
    "gradients reduced over a group of one": "gradients of 2 processes that hold the model in parts, and of one",
    "gradients divided twice": "differ by 5.0e-01 of their norm",
    "gradient norm of one process": "a value of one process was taken for that of all",
    "a process skips a step": "process 1 counts [0] steps, the loop took 2",
    "process 1 reads process 0's rows": "a row was left out, read twice or changed on its way",
    "tied embedding drifts where it is sharded": "are not what was cut into parts: embed.weight",
    "moments filled with zeros on resharding": "are not what was cut into parts: embed.weight/exp_avg",
    "another seed in one process": "are not what was cut into parts: blocks.0.attn.qkv.weight",
    "an older policy is sampled from": "13 of 13 trained tensors that process 0 samples from are not what the processes hold now",
    "parts that come back changed from a hand-over": "1 of 13 trained tensors that process 0 samples from are not what the processes hold",
    "masters rounded to bf16 as they are cut": "are not what was cut into parts",
    "Muon orthogonalises parts of a matrix": "Muon's direction of blocks.1.attn.qkv.weight, made of parts",
    "a chip computes wrong now and then": "step 7: one micro-batch, computed twice with the same weights, gave other bits in 1 tensor",
}


@functools.cache
def clean(job: Job) -> list[Verdict]:
    """One twin for all that share a job."""
    with tempfile.TemporaryDirectory() as folder:
        return job(Path(folder), nothing)


def test_every_fault_of_sharding_has_its_reason():
    assert REASONS.keys() == {name for name, fault in catalogue().items() if fault.plant.__module__ == "assay.zoo.sharding_faults"}


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str, tmp_path: Path):
    fault = catalogue()[name]
    planted = fault.job(tmp_path, fault.plant)
    against = [v for v in planted if v.check == fault.check and v.outcome is Outcome.REFUTED]
    assert against, "\n".join(map(str, planted))
    assert REASONS[name] in against[0].reason
    assert all(v.outcome is Outcome.PROVEN for v in clean(fault.job)), "\n".join(map(str, clean(fault.job)))
    assert fault.check in {v.check for v in clean(fault.job)}

"""Transfers: numbers of many tensors after one wait, and what is on the CPU already is not copied."""

import math

import torch

from assay.model.transfers import read_numbers, to_host


def test_numbers_keep_their_names_and_every_digit():
    exact = torch.tensor(1.0, dtype=torch.float64) / 3
    half, count, none = torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(7), torch.tensor(math.nan)
    found = read_numbers({"third": exact, "half": half, "count": count, "none": none})
    assert list(found) == ["third", "half", "count", "none"]
    assert (found["third"], found["half"], found["count"]) == (float(exact), 0.5, 7.0)
    assert math.isnan(found["none"])
    assert read_numbers({}) == {}


def test_what_lies_on_the_cpu_stays_where_it_is():
    values = torch.randn(3, 4, requires_grad=True)
    found = to_host(values)
    assert found.data_ptr() == values.data_ptr()
    assert not found.requires_grad

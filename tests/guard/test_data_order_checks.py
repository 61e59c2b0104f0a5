"""Checks on what a run reads."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.data.order import Order
from assay.guard import data_order_checks
from assay.guard.data_order_checks import check_consumed, check_epoch_order, check_same_data
from assay.learn.loop import Step
from assay.testing.tiny_training import TinyRun, make_corpus, tiny_corpus, tiny_documents
from assay.verdict import Outcome


def step_of(order: Order, index: int, reading: int | None = None, tokens: int | None = None) -> Step:
    windows = order.consumed(index if reading is None else reading)
    held = order.rows * order.length if tokens is None else tokens
    return Step(index, torch.tensor(1.0), torch.tensor(1.0), 1.0, held, 1.0, tuple((int(w),) for w in windows))


def test_what_was_planned_is_proven_and_what_was_not_says_whose_it_is():
    order = TinyRun(epochs=2).order()
    assert check_consumed([step_of(order, i) for i in range(60)], order).outcome is Outcome.PROVEN
    found = check_consumed([step_of(order, 40), step_of(order, 41, reading=1)], order)
    assert found.outcome is Outcome.REFUTED
    assert found.evidence["step"] == 41
    assert found.reason.endswith(", which are those of step 1")


def test_the_same_windows_in_another_order_are_not_what_was_planned():
    order = TinyRun().order()
    right = step_of(order, 3)
    assert check_consumed([replace(right, ids=right.ids[::-1])], order).outcome is Outcome.REFUTED


def test_a_batch_of_another_size_is_refuted():
    order = TinyRun().order()
    assert "read 64 tokens; a batch holds 128" in check_consumed([step_of(order, 3, tokens=64)], order).reason


def test_a_batch_that_does_not_say_what_it_holds_is_refuted():
    order = TinyRun().order()
    assert check_consumed([replace(step_of(order, 3), ids=())], order).outcome is Outcome.REFUTED


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 32, 159])
@pytest.mark.parametrize(("world", "epochs"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_every_order_of_ours_is_proven(rows: int, world: int, epochs: int):
    order = replace(TinyRun().order(), rows=rows, world=world, epochs=epochs)
    if order.steps:
        assert check_epoch_order(order).outcome is Outcome.PROVEN


def test_a_large_corpus_is_sampled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_order_checks, "PLACES", 40)
    found = check_epoch_order(TinyRun(epochs=2).order())
    assert found.outcome is Outcome.PROVEN
    assert "40 of 159 windows looked at" in found.reason


@pytest.mark.parametrize("wrong", ["one window twice", "a window that is not there", "the second epoch like the first"])
def test_an_order_that_is_wrong_in_one_place_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch):
    whole = Order.consumed

    def consumed(order: Order, step: int) -> np.ndarray:
        windows = whole(order, step).copy()
        if wrong == "one window twice" and step == 7:
            windows[2] = whole(order, 3)[1]
        if wrong == "a window that is not there" and step == 7:
            windows[2] = order.windows
        if wrong == "the second epoch like the first":
            first = step * order.rows % order.windows
            windows = np.array([whole(order, place // order.rows)[place % order.rows] for place in range(first, first + order.rows)])
        return windows

    order = replace(TinyRun().order(), rows=3, epochs=2)  # three divides 159: no step reads from two epochs
    assert check_epoch_order(order).outcome is Outcome.PROVEN
    monkeypatch.setattr(Order, "consumed", consumed)
    assert check_epoch_order(order).outcome is Outcome.REFUTED


def test_the_corpus_of_a_run_is_known_by_its_digest(tmp_path):
    assert check_same_data(tiny_corpus().digest, tiny_corpus()).outcome is Outcome.PROVEN
    other = make_corpus(tmp_path, tiny_documents(), seed=1)
    found = check_same_data(tiny_corpus().digest, other)
    assert found.outcome is Outcome.REFUTED
    assert "began with " + tiny_corpus().digest[:12] in found.reason

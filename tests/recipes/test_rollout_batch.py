"""Completions packed into rows of one shape: the same tokens, weights, loss and gradients, and the same run."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.data.batch import Batch
from assay.guard.loss_preflight import loss_gradients
from assay.learn.advantage import kl_shift
from assay.learn.policy import Surrogate, policy_gradient
from assay.model.attention import PADDING, documents_from_lengths
from assay.recipes.grpo_options import Grpo
from assay.recipes.reference import Reference, with_reference
from assay.recipes.rollout_batch import Layout, batch_logprobs, dealt, layout_of
from assay.testing.tiny_models import tiny_model

LENGTHS = [9, 24, 3, 17, 12, 24, 5, 8, 20, 2, 11]


def rollout(lengths=LENGTHS, prompt=2) -> Batch:
    draw = torch.Generator().manual_seed(0)
    shape = len(lengths), 24
    documents = documents_from_lengths(lengths, 24).int()
    said = (documents != PADDING) & (torch.arange(24) >= prompt - 1) & (torch.arange(24) > 0)
    streams = {name: torch.randn(shape, generator=draw) * said for name in ("advantage", "behaviour", "reference")}
    streams |= {"behaviour": streams["behaviour"] - 4.0, "reference": streams["reference"] - 4.0}
    weight = said * torch.rand(len(lengths), 1, generator=draw)
    tokens = torch.randint(0, 256, shape, generator=draw) * (documents != PADDING)
    return Batch(tokens, weight, documents, ids=tuple((f"p{row}",) for row in range(len(lengths))), divisor=7.0, **streams)


@pytest.mark.parametrize("layout", [Layout(2, 32), Layout(3, 24), Layout(1, 64), Layout(8, 40), Layout(4)], ids=str)
def test_packed_and_back_everything_is_where_it_was(layout):
    rows = rollout()
    packed = layout.packed(rows)
    assert len(packed.batch) % layout.rows == 0 or layout.width is None
    assert packed.batch.tokens.shape[1] == (layout.width or 24)
    assert packed.batch.divisor == 7.0
    for name, stream in rows.streams().items():
        if name != "documents":
            there = rows.documents != PADDING
            assert torch.equal(packed.unpacked(packed.batch.streams()[name])[there], stream[there]), name
    assert sorted(consumed for row in packed.batch.ids for consumed in row) == sorted(f"p{row}" for row in range(len(rows)))
    beyond = packed.batch.documents == PADDING
    assert not packed.batch.weight[beyond].any()


@pytest.mark.parametrize(("family", "ratio"), [("llama", "token"), ("llama", "sequence"), ("llama", "cispo"), ("gpt2", "token"),
                                              ("mistral", "token"), ("assay", "sequence")])
def test_loss_gradients_and_metrics_are_those_of_the_rows(family, ratio):
    model, rows = tiny_model(family), rollout()
    objective = policy_gradient(Surrogate(ratio=ratio, kl="k3", kl_weight=0.1))
    packed = Layout(2, 40).packed(rows).batch
    due, found = (loss_gradients(model, lambda batch=batch: objective(model, batch).total) for batch in (rows, packed))
    assert found[0] == pytest.approx(due[0], rel=1e-5)
    for name, gradient in due[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=3e-6)
    one, two = (objective(model, batch).metrics for batch in (rows, packed))
    assert list(map(float, one.values())) == pytest.approx(list(map(float, two.values())), rel=1e-4)


def test_log_probabilities_come_back_row_by_row():
    model, rows = tiny_model(), rollout()
    due, found = (batch_logprobs(model, rows, 0.7, layout, entropy=False) for layout in (Layout(4), Layout(2, 40)))
    said = rows.weight != 0
    torch.testing.assert_close(found[said], due[said], rtol=1e-5, atol=1e-5)


def test_every_micro_batch_gets_its_share_of_empty_rows():
    plan = [[place] for place in range(9)]
    hands = np.array([len(row) for row in dealt(plan, 4)]).reshape(-1, 4)
    assert hands.sum(1).tolist() == [3, 3, 3]
    assert sorted(member for row in dealt(plan, 4) for member in row) == list(range(9))
    assert dealt(plan, 3) != plan and len(dealt(plan, 3)) == 9  # noqa: PT018


def test_a_gpu_gets_rows_of_one_shape_within_what_was_allowed():
    assert layout_of("cpu", 32, 400, 2048) == Layout(32)
    assert layout_of("cuda:0", 32, 384, 8192) == Layout(8, 1024)
    assert layout_of("cuda", 4, 384, 8192) == Layout(1, 1024)  # 1,536 tokens at a time
    assert layout_of("cuda", 32, 384, 512) == Layout(16, 512)
    assert layout_of("cuda", 8, 3000, 4096) == Layout(2, 3000)


class Uniform(Reference):
    """A reference that nothing was loaded into: it gives every token the same."""

    def __init__(self) -> None:
        pass

    def logprobs(self, batch: Batch, temperature: float, *, entropy: bool) -> torch.Tensor:
        return torch.full(batch.tokens.shape, -2.0 * temperature)


def test_a_reference_adds_its_stream_and_shifts_advantages_only_where_asked():
    bare, asked = replace(rollout(), reference=None), Surrogate(temperature=0.5)
    due = torch.full(bare.tokens.shape, -1.0)
    penalised, shifted = (with_reference(bare, Uniform(), asked, Grpo(model="m", data="d", out="o", beta=0.3, kl_estimator=kind))
                          for kind in ("k3", "shift"))
    assert with_reference(bare, None, asked, Grpo(model="m", data="d", out="o")) is bare
    assert torch.equal(penalised.reference, due)
    assert torch.equal(penalised.advantage, bare.advantage)
    assert torch.equal(shifted.reference, due)
    assert torch.equal(shifted.advantage - bare.advantage != 0, bare.weight != 0)
    torch.testing.assert_close(shifted.advantage, bare.advantage + kl_shift(bare.behaviour, due, bare.weight, 0.3))

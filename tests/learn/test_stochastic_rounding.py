"""Stochastic rounding: right on average, exact where bf16 is, the same draw at the same place, and steps that nearest rounding loses."""

import torch

from assay.learn.low_bit_adamw import adamw_bf16_masters
from assay.learn.optim import adamw
from assay.learn.stochastic_rounding import stochastically_rounded


def test_it_is_right_on_average_and_one_of_the_two_neighbours():
    for value in (1.0 + 2**-10, -0.02 - 2**-16):
        values = torch.full((200_000,), value)
        made = stochastically_rounded(values, 5, torch.tensor(3.0)).float()
        assert len(made.unique()) == 2
        apart = float(made.max() - made.min())
        assert abs(float(made.double().mean()) - value) < 5 * apart / 2 / len(values) ** 0.5
        assert made.min() <= value <= made.max()


def test_what_bf16_holds_stays_and_a_draw_depends_on_tensor_step_and_element():
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert torch.equal(stochastically_rounded(exact, 1, torch.tensor(1.0)).float(), exact)
    values = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    first, again, later, other = (stochastically_rounded(values, key, torch.tensor(float(step))) for key, step in
                                  ((1, 1), (1, 1), (1, 2), (2, 1)))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, other)


def test_small_steps_come_through_as_in_fp32_and_are_lost_by_nearest_rounding():
    """A gradient that never changes: AdamW's step is its rate, a twentieth of the distance between two numbers."""
    ends = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        weight = torch.nn.Parameter(torch.full((64, 64), 1.5, dtype=dtype))
        made = adamw([("blocks.0.mlp.up.weight", weight)], 4e-4, weight_decay=0.0) if name == "fp32" else \
            adamw_bf16_masters([("blocks.0.mlp.up.weight", weight)], 4e-4, weight_decay=0.0, seed=0)
        for _ in range(50):
            weight.grad = torch.ones_like(weight)
            made.step()
        ends[name] = float(weight.detach().double().mean())
    assert abs(ends["bf16"] - ends["fp32"]) < 0.02 * (1.5 - ends["fp32"])
    assert float((torch.tensor(1.5) - 4e-4).bfloat16()) == 1.5

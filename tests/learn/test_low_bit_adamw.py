"""AdamW with moments in 8 bits: its levels, how near it stays to AdamW, what it skips, and that its state is saved whole."""

import pytest
import torch

from assay.errors import ArtifactError
from assay.guard.training_guards import check_steps
from assay.learn.low_bit_adamw import (
    LEAST_CODED,
    MOMENTS_A_SCALE,
    STRETCH,
    LowBitAdamW,
    adamw_8bit,
    decode_moments,
    dynamic_map,
    encode_moments,
)
from assay.learn.optim import adamw, largest_quotient, load_state_tensors, state_tensors
from assay.verdict import Outcome

CPU = torch.device("cpu")
SIZE = (96, 64)


def trained(make, steps: int = 30, **given) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer, float]:
    """A small regression of known answer; the loss that it ends with."""
    random = torch.Generator().manual_seed(0)
    named = {"blocks.0.mlp.up.weight": torch.nn.Parameter(torch.randn(SIZE, generator=random) * 0.02),
             "blocks.0.norm.weight": torch.nn.Parameter(torch.ones(SIZE[0]))}
    x, due = torch.randn(256, SIZE[1], generator=random), torch.randn(SIZE, generator=random) * 0.1
    optimizer = make(named.items(), 3e-3, weight_decay=0.0, **given)
    for _ in range(steps):
        loss = ((x @ named["blocks.0.mlp.up.weight"].T * named["blocks.0.norm.weight"] - x @ due.T) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return named, optimizer, float(loss.detach())


def test_it_learns_what_adamw_learns():
    """A bound that moments of half as many bits do not keep."""
    whole, _, loss = trained(adamw)
    few, optimizer, low = trained(adamw_8bit)
    assert low < 1.03 * loss
    apart = (few["blocks.0.mlp.up.weight"] - whole["blocks.0.mlp.up.weight"]).norm() / whole["blocks.0.mlp.up.weight"].norm()
    assert float(apart.detach()) < 0.03
    assert torch.allclose(few["blocks.0.norm.weight"], whole["blocks.0.norm.weight"], rtol=0.02)
    assert check_steps(optimizer, 30).outcome is Outcome.PROVEN


def test_the_state_is_a_quarter_and_small_tensors_keep_theirs():
    _, optimizer, _ = trained(adamw_8bit, 1)
    assert isinstance(optimizer, LowBitAdamW)
    (matrix, vector) = (optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    bytes_of = {name: t.numel() * t.element_size() for name, t in matrix.items()}
    assert sum(bytes_of.values()) == 4 + 2 * (SIZE[0] * SIZE[1] + 4 * SIZE[0] * SIZE[1] // MOMENTS_A_SCALE)
    assert SIZE[0] < LEAST_CODED
    assert {t.dtype for t in vector.values()} == {torch.float32}


def test_levels_are_the_paper_s_and_only_0_becomes_0():
    signed, unsigned = (dynamic_map(sign, CPU) for sign in (True, False))
    assert len(signed) == len(unsigned) == 256
    assert float(signed.min()) == pytest.approx(-0.99296875)
    assert float(unsigned[1]) == pytest.approx(3.25e-7)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    near = decode_moments(*encode_moments(values, True), values.shape, True)
    assert float((near - values).abs().max()) < 0.012 * float(values.abs().max())
    roots = values.abs()
    up = decode_moments(*encode_moments(roots, False), roots.shape, False)
    assert float((up - roots).abs().max()) < 0.006 * float(roots.max())
    tiny = torch.tensor([1.0, 1e-9, 0.0])
    assert (decode_moments(*encode_moments(tiny, False), tiny.shape, False) > 0).tolist() == [True, True, False]
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed: pip install bitsandbytes")
    assert torch.allclose(functional.create_dynamic_map(signed=True), signed)


def test_a_small_gradient_beside_a_large_one_takes_no_longer_step_than_adamw_could():
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = adamw_8bit([("blocks.0.mlp.up.weight", weight)], 1e-3, weight_decay=0.0)
    grad = torch.full((64, 64), 1e-6)
    grad[:, 0] = 1.0  # in every block of 256
    for _ in range(5):
        before, weight.grad = weight.detach().clone(), grad.clone()
        optimizer.step()
        assert float((weight.detach() - before).abs().max()) <= 1e-3 * largest_quotient((0.9, 0.95)) * STRETCH


def test_a_step_to_be_skipped_moves_nothing():
    named, optimizer, _ = trained(adamw_8bit, 3)
    kept = {name: t.detach().clone() for name, t in {**named, **state_tensors(optimizer, named)}.items()}
    for p in named.values():
        p.grad = torch.full_like(p, torch.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(t, kept[name]) for name, t in {**named, **state_tensors(optimizer, named)}.items())


def test_its_state_goes_on_bit_for_bit_and_is_no_adamw_s():
    named, optimizer, _ = trained(adamw_8bit, 3)
    saved = {name: t.clone() for name, t in state_tensors(optimizer, named).items()}
    fresh = adamw_8bit(named.items(), 3e-3, weight_decay=0.0)
    load_state_tensors(fresh, named, saved)
    assert all(torch.equal(t, saved[name]) for name, t in state_tensors(fresh, named).items())
    with pytest.raises(ArtifactError, match="another optimizer"):
        load_state_tensors(adamw(named.items(), 3e-3), named, saved)

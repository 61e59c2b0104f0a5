"""AdamW and Muon on CUDA: bf16 orthogonalisation within its band, bad steps skipped on the device, exact resume."""

import pytest
import torch
from torch import nn

from assay.learn.loop import clip_gradients
from assay.learn.optim import adamw, load_state_tensors, muon, orthogonalised, state_tensors
from assay.seeds import generator

pytestmark = pytest.mark.gpu
BUILD = {
    "adamw": lambda model: adamw(model.named_parameters(), 1e-2),
    "muon": lambda model: muon(model.named_parameters(), lr_matrix=0.02, lr_embed=1e-2, lr_scalar=1e-2,
                               slices={"fused.weight": (128, 64, 64)}, weight_decay=0.1),
}


def toy():
    model = nn.ModuleDict({"embed": nn.Embedding(50, 96), "fused": nn.Linear(96, 256), "tall": nn.Linear(256, 96)})
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.1, generator=generator(0, "toy", name))
    return model.cuda()


def train(model, optimizer, steps):
    for step in steps:
        tokens = torch.randint(0, 50, (64,), generator=generator(1, "tokens", step)).cuda()
        optimizer.zero_grad()
        states = model["tall"](torch.relu(model["fused"](model["embed"](tokens))))
        nn.functional.cross_entropy(states @ model["embed"].weight.T, (3 * tokens + 1) % 50).backward()
        optimizer.step()


@pytest.mark.parametrize("shape", [(576, 576), (576, 1536), (1536, 576)])
def test_bf16_singular_values_land_in_the_band(shape):
    rng, n = generator(0, "spectrum", device="cuda"), min(shape)
    u, v = (torch.linalg.qr(torch.randn(size, n, generator=rng, device="cuda"))[0] for size in shape)
    sigma = torch.logspace(0, -2, n, device="cuda")
    assert sigma[-1] / sigma.norm() > 1e-4
    known = sigma / sigma.norm() > 1e-3
    result = orthogonalised(((u * sigma) @ v.T)[None])[0]
    assert torch.linalg.svdvals(result).max() < 1.13
    assert (u.T @ result @ v).diagonal()[known].min() > 0.83


@pytest.mark.parametrize("name", BUILD)
def test_a_bad_step_is_skipped_on_the_device(name):
    model = toy()
    optimizer, names = BUILD[name](model), dict(model.named_parameters())
    optimizer.grad_scale, optimizer.found_inf = None, torch.zeros((), device="cuda")
    train(model, optimizer, range(3))
    snapshot = lambda: [t.detach().clone() for t in (*model.parameters(), *state_tensors(optimizer, names).values())]
    before = snapshot()
    for p in model.parameters():
        p.grad.fill_(float("nan"))
    optimizer.found_inf = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
    optimizer.found_inf = torch.zeros((), device="cuda")
    train(model, optimizer, range(3, 4))
    assert not any(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))


@pytest.mark.parametrize("name", BUILD)
def test_resumed_is_uninterrupted_bit_for_bit(name):
    straight, first, second = toy(), toy(), toy()
    train(straight, BUILD[name](straight), range(8))
    optimizer = BUILD[name](first)
    train(first, optimizer, range(4))
    saved = {k: t.cpu() for k, t in state_tensors(optimizer, dict(first.named_parameters())).items()}
    second.load_state_dict(first.state_dict())
    resumed = BUILD[name](second)
    load_state_tensors(resumed, dict(second.named_parameters()), saved)
    train(second, resumed, range(4, 8))
    for a, b in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_clipping_on_the_way_is_clipping_before():
    """Through the fused kernel, and as `clip_grad_norm_` does it first; then a bad step, which moves nothing; no wait in either."""
    ours, theirs = toy(), toy()
    mine, due = BUILD["adamw"](ours), BUILD["adamw"](theirs)
    for step in range(4):
        for model in (ours, theirs):
            for name, p in model.named_parameters():
                p.grad = torch.randn(p.shape, generator=generator(step, name, device="cuda"), device="cuda")
        usual = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        mine.found_inf = torch.zeros((), device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            norm = clip_gradients(mine, list(ours.parameters()), 1.0)
            mine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        due.step()
        torch.testing.assert_close(norm, usual)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        moments = (mine.state[one]["exp_avg"], due.state[other]["exp_avg"])
        torch.testing.assert_close(*moments, rtol=1e-4, atol=1e-9)  # the weights hardly know of the scale, the moments do
    before = [one.detach().clone() for one in ours.parameters()]
    mine.found_inf = torch.ones((), device="cuda")
    mine.step()
    assert all(torch.equal(*both) for both in zip(before, ours.parameters(), strict=True))
    assert all(float(mine.state[one]["step"]) == 4 for one in ours.parameters())

"""AdamW and Muon: what they orthogonalise, that they learn, and that their state survives a round trip bit for bit."""

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

from assay.errors import ArtifactError, UsageError
from assay.learn import optim
from assay.learn.optim import adamw, largest_quotient, load_state_tensors, muon, orthogonalised, parameter_kind, state_tensors
from assay.seeds import generator


class Toy(nn.Module):
    """Every kind of parameter: an embedding, a fused matrix, a tall one, a vector and a head."""

    def __init__(self, seed=0):
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.fused = nn.Linear(12, 8 + 4 + 4)
        self.tall = nn.Linear(16, 12, bias=False)
        self.head = nn.Linear(12, 11, bias=False)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.normal_(0, 0.3, generator=generator(seed, "toy", name))

    def loss(self, step):
        tokens = torch.randint(0, 11, (32,), generator=generator(1, "tokens", step))
        x = self.embed(tokens)
        x = x + self.tall(torch.relu(self.fused(x)))
        return nn.functional.cross_entropy(self.head(x), (3 * tokens + 1) % 11)


SLICES = {"fused.weight": (8, 4, 4)}
BUILD = {
    "adamw": lambda model: adamw(model.named_parameters(), 1e-2),
    "muon": lambda model: muon(model.named_parameters(), lr_matrix=0.05, lr_embed=1e-2, lr_scalar=1e-2, slices=SLICES,
                               weight_decay=0.1),
}


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()


# ── orthogonalisation, measured by singular values ────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("shape", [(24, 24), (24, 60), (60, 24)])
def test_singular_vectors_stay_and_singular_values_land_in_the_band(shape):
    """Made with a known spectrum, from 1 down to a thousandth of the Frobenius norm."""
    rng = generator(0, "spectrum")
    n = min(shape)
    u, v = (torch.linalg.qr(torch.randn(size, n, generator=rng, dtype=torch.float64))[0] for size in shape)
    sigma = torch.logspace(0, -2.8, n, dtype=torch.float64)
    assert sigma[-1] / sigma.norm() > 1e-3
    result = orthogonalised(((u * sigma) @ v.T).float()[None] * 7)[0]
    assert result.dtype == torch.float32
    assert result.shape == shape
    in_its_basis = u.T @ result.double() @ v
    values = in_its_basis.diagonal()
    assert values.min() > 0.83
    assert values.max() < 1.13
    assert (in_its_basis - values.diag()).abs().max() < 1e-4
    assert torch.linalg.matrix_norm(result.double() - u @ v.T, 2) < 0.17  # the polar factor itself


def test_small_singular_values_grow_and_zero_stays_zero():
    values = orthogonalised(torch.diag(torch.tensor([1.0, 1e-4, 0.0]))[None])[0].diagonal()
    assert 0.05 < values[1] < 0.5
    assert values[2] == 0
    assert (orthogonalised(torch.zeros(2, 3, 4)) == 0).all()


def test_the_polynomials_are_the_papers():
    """They equioscillate: on [1e-3, 1] five of them, unscaled, leave an error of 0.1236 on both sides of 1."""
    x = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    for a, b, c in optim.POLAR_EXPRESS:
        x = a * x + b * x**3 + c * x**5
    assert float(x.max()) == pytest.approx(1.12356, abs=1e-5)
    assert float(x.min()) == pytest.approx(0.87644, abs=1e-5)


# ── Muon's step ───────────────────────────────────────────────────────────────────────────────────────────────────────

def two_steps(matrices, grads, slices=None, **named):
    """Take two optimizer steps on gradients in different directions: the given ones, then those with their columns reversed."""
    module = nn.ParameterDict({name: nn.Parameter(m.clone()) for name, m in matrices.items()})
    optimizer = muon(module.named_parameters(), lr_matrix=0.1, lr_embed=1, lr_scalar=1, slices=slices, **named)
    for turn in (lambda g: g, lambda g: g.flip(1)):
        for name, p in module.items():
            p.grad = turn(grads[name])
        optimizer.step()
    return {name: p.detach() for name, p in module.items()}


def draw(name, *shape):
    return torch.randn(shape, generator=generator(0, "draw", name))


def test_a_step_is_nesterov_momentum_orthogonalised_and_scaled():
    for rows, columns in ((6, 10), (24, 6)):
        weight, grad = draw("weight", rows, columns), draw("grad", rows, columns)
        found = two_steps({"w": weight}, {"w": grad}, momentum=0.9, weight_decay=0.2)
        buffer = torch.zeros(rows, columns)
        for g in (grad, grad.flip(1)):
            buffer = 0.9 * buffer + 0.1 * g
            update = orthogonalised((0.1 * g + 0.9 * buffer)[None])[0]
            weight = weight * (1 - 0.1 * 0.2) - 0.1 * max(1, rows / columns) ** 0.5 * update
        torch.testing.assert_close(found["w"], weight, rtol=0, atol=1e-5)


def test_slices_of_a_fused_matrix_move_as_matrices_of_their_own():
    parts = {"a": draw("a", 8, 12), "b": draw("b", 4, 12), "c": draw("c", 4, 12)}
    grads = {name: draw(f"grad {name}", *m.shape) for name, m in parts.items()}
    apart = two_steps(parts, grads)
    stacked = {"abc": torch.cat(list(parts.values()))}, {"abc": torch.cat(list(grads.values()))}
    fused = two_steps(*stacked, slices={"abc": (8, 4, 4)})
    whole = two_steps(*stacked)
    assert torch.equal(fused["abc"], torch.cat(list(apart.values())))
    assert (whole["abc"] - fused["abc"]).abs().max() > 1e-2  # else this test could not fail


def test_batched_is_one_by_one(monkeypatch):
    matrices = {f"m{i}": draw(i, 6, 10) for i in range(5)}
    grads = {name: draw(f"grad {name}", 6, 10) for name in matrices}
    together = two_steps(matrices, grads)
    monkeypatch.setattr(optim, "BATCH_ELEMENTS", 1)
    singly = two_steps(matrices, grads)
    for name in matrices:
        torch.testing.assert_close(together[name], singly[name], rtol=0, atol=1e-6)


def test_a_step_marked_bad_leaves_matrices_and_momentum_as_they_were():
    model = nn.ModuleDict({"inner": nn.Linear(6, 4, bias=False)})
    optimizer = muon(model.named_parameters(), lr_matrix=0.1, lr_embed=1, lr_scalar=1, weight_decay=0.3)
    weight = model["inner"].weight
    weight.grad = draw("grad", 4, 6)
    optimizer.found_inf = torch.tensor(0.0)
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, before)
    before, momentum = weight.detach().clone(), optimizer.state[weight]["momentum"].clone()
    optimizer.found_inf = torch.tensor(1.0)
    for poison in (float("nan"), float("inf")):
        weight.grad.fill_(poison)
        optimizer.step()
        assert torch.equal(weight, before)
        assert torch.equal(optimizer.state[weight]["momentum"], momentum)


def test_the_groups_are_what_their_kinds_say():
    model = Toy()
    optimizer = BUILD["muon"](model)
    names = {p: name for name, p in model.named_parameters()}
    groups = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    assert groups == [["fused.weight", "tall.weight"], ["embed.weight", "head.weight"], ["fused.bias"]]
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 1e-2, 1e-2]
    decaying, still = BUILD["adamw"](model).param_groups
    assert [names[p] for p in decaying["params"]] == ["fused.weight", "tall.weight", "head.weight"]
    assert decaying["weight_decay"] == 0.1
    assert [names[p] for p in still["params"]] == ["embed.weight", "fused.bias"]
    assert still["weight_decay"] == 0.0
    assert parameter_kind("blocks.3.overhead.weight", model.tall.weight) == "matrix"


# ── both learn, both resume ───────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.arithmetic
@pytest.mark.parametrize("name", BUILD)
def test_it_learns(name):
    model = Toy()
    before = model.loss(999).item()
    train(model, BUILD[name](model), range(150))
    assert before > 2
    assert model.loss(999).item() < 0.02


def test_our_adamw_is_torchs():
    ours, theirs = Toy(), Toy()
    train(ours, BUILD["adamw"](ours), range(5))
    decays = [theirs.fused.weight, theirs.tall.weight, theirs.head.weight]
    still = [theirs.embed.weight, theirs.fused.bias]
    plain = torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": still, "weight_decay": 0.0}],
                              lr=1e-2, betas=(0.9, 0.95))
    train(theirs, plain, range(5))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_muons_embeddings_move_as_adamw_without_decay_would_move_them():
    ours, theirs = Toy(), Toy()
    for model in (ours, theirs):
        for p in (model.fused.weight, model.tall.weight):
            p.requires_grad_(False)
    train(ours, BUILD["muon"](ours), range(5))
    train(theirs, torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95),
                                    weight_decay=0.0), range(5))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_resumed_is_uninterrupted_bit_for_bit(name, at):
    straight = Toy()
    train(straight, BUILD[name](straight), range(9))
    first = Toy()
    optimizer = BUILD[name](first)
    train(first, optimizer, range(at))
    saved = safetensors.torch.save(state_tensors(optimizer, dict(first.named_parameters())))
    weights = safetensors.torch.save(first.state_dict())
    second = Toy(seed=5)
    second.load_state_dict(safetensors.torch.load(weights))
    resumed = BUILD[name](second)
    load_state_tensors(resumed, dict(second.named_parameters()), safetensors.torch.load(saved))
    train(second, resumed, range(at, 9))
    for a, b in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", BUILD)
def test_torchs_own_state_dict_works_too(name):
    straight, model = Toy(), Toy()
    train(straight, BUILD[name](straight), range(6))
    optimizer = BUILD[name](model)
    train(model, optimizer, range(3))
    again = BUILD[name](model)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, again, range(3, 6))
    for a, b in zip(straight.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_state_is_whole_before_the_first_step_and_named():
    model = Toy()
    names = dict(model.named_parameters())
    moments = lambda name: {f"{name}/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    assert state_tensors(BUILD["adamw"](model), names).keys() == set().union(*map(moments, names))
    assert state_tensors(BUILD["muon"](model), names).keys() == {
        "fused.weight/momentum", "tall.weight/momentum",
        *moments("embed.weight"), *moments("head.weight"), *moments("fused.bias")}


@pytest.mark.parametrize(("damage", "sentence"), [
    (lambda t: t.pop("tall.weight/momentum"), r"1 \(tall.weight/momentum\) missing, none unknown"),
    (lambda t: t.update({"more/momentum": torch.zeros(1)}), r"none missing, 1 \(more/momentum\) unknown"),
    (lambda t: t.clear(), r"11 \(embed.weight/exp_avg, .*, …\) missing"),
    (lambda t: t.update({"fused.bias/exp_avg": torch.zeros(15)}), r"bias/exp_avg is \(15,\) torch.float32; expected"),
    (lambda t: t.update({"fused.bias/step": torch.zeros((), dtype=torch.int64)}), r"bias/step is \(\) torch.int64"),
])
def test_damaged_state_is_refused_and_nothing_is_written(damage, sentence):
    model = Toy()
    optimizer, names = BUILD["muon"](model), dict(model.named_parameters())
    train(model, optimizer, range(2))
    tensors = {name: torch.ones_like(t) for name, t in state_tensors(optimizer, names).items()}
    before = {name: t.clone() for name, t in state_tensors(optimizer, names).items()}
    damage(tensors)
    with pytest.raises(ArtifactError, match=sentence):
        load_state_tensors(optimizer, names, tensors)
    for name, t in state_tensors(optimizer, names).items():
        assert torch.equal(t, before[name])


# ── what cannot be asked ──────────────────────────────────────────────────────────────────────────────────────────────

def test_refusals():
    model = Toy()
    build = lambda **slices: muon(model.named_parameters(), lr_matrix=1, lr_embed=1, lr_scalar=1, slices=slices)
    with pytest.raises(UsageError, match=r"'absent', which is no matrix"):
        build(absent=(1,))
    with pytest.raises(UsageError, match=r"'embed\.weight', which is no matrix"):
        build(**{"embed.weight": (11,)})
    with pytest.raises(UsageError, match=r"fused\.weight into \(8, 4\) rows; it has 16"):
        build(**{"fused.weight": (8, 4)})
    with pytest.raises(UsageError, match="trained but has no name"):
        state_tensors(BUILD["adamw"](model), dict(Toy().named_parameters()))
    with pytest.raises(UsageError, match=r"embed\.weight is torch\.bfloat16"):
        adamw(Toy().bfloat16().named_parameters(), 1e-3)
    with pytest.raises(UsageError, match="nothing to train"):
        adamw(model.requires_grad_(False).named_parameters(), 1e-3)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_no_step_of_adam_is_longer_than_its_largest_quotient_and_some_come_near(betas):
    """Gradients that grow by β₂/β₁ a step are the worst there are."""
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=1.0, betas=betas, eps=0.0, weight_decay=0.0)
    longest = 0.0
    for step in range(200):
        before = float(weight.detach())
        weight.grad = torch.tensor((betas[1] / betas[0]) ** step, dtype=torch.float64)
        optimizer.step()
        longest = max(longest, abs(float(weight.detach()) - before))
    assert 1 < longest <= largest_quotient(betas)
    assert longest > (0.98 if betas[1] == 0.95 else 0.2) * largest_quotient(betas)

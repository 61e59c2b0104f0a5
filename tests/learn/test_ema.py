"""The moving average is a second set of weights with a name: right in value, strict to load, and never in the raw one's place."""

import pytest
import safetensors.torch
import torch
from torch import nn

from assay.errors import ArtifactError, UsageError
from assay.learn.ema import Ema, ema_weights, split_ema_state
from assay.learn.optim import adamw, load_state_tensors, state_tensors
from assay.seeds import generator


def toy(seed=0):
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(generator=generator(seed, "toy", name))
    return model


def taken(model, optimizer, ema, steps):
    for step in steps:
        x = torch.randn(16, 5, generator=generator(1, "x", step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        ema.update(step)


def bits(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_average_is_the_recursion_written_out():
    model = toy()
    optimizer, ema = adamw(model.named_parameters(), 0.05), Ema(model, 0.9)
    expected = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    for step in range(200):
        taken(model, optimizer, ema, [step])
        decay = min(0.9, (1 + step) / (10 + step))
        expected = {name: decay * old + (1 - decay) * dict(model.named_parameters())[name].detach() for name, old in expected.items()}
    for name, tensor in ema_weights(ema.tensors()).items():
        assert torch.allclose(tensor.double(), expected[name], rtol=0, atol=1e-6)
        assert not torch.allclose(tensor, dict(model.named_parameters())[name], atol=1e-4)


def test_the_decay_grows_to_its_own_value_and_depends_on_the_step_alone():
    ema = Ema(toy(), 0.999)
    decays = [ema.decay_at(step) for step in range(20_000)]
    assert decays[0] == 0.1
    assert decays == sorted(decays)
    assert decays[-1] == 0.999
    assert [ema.decay_at(step) for step in range(20_000)] == decays


def test_inside_it_is_the_average_and_afterwards_the_raw_bits():
    model = toy()
    optimizer, ema = adamw(model.named_parameters(), 0.05), Ema(model, 0.9)
    taken(model, optimizer, ema, range(5))
    raw, addresses = bits(model), [p.data_ptr() for p in model.parameters()]
    with ema.swapped():
        assert all(torch.equal(p, ema.tensors()[f"ema/{name}"]) for name, p in model.named_parameters())
        assert not torch.equal(model[0].weight, raw["0.weight"])
        with torch.no_grad():
            model[0].weight.add_(100)  # whatever happens inside
    assert all(torch.equal(p, raw[name]) for name, p in model.named_parameters())
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_an_error_inside_leaves_the_raw_bits():
    model = toy()
    optimizer, ema = adamw(model.named_parameters(), 0.05), Ema(model, 0.9)
    taken(model, optimizer, ema, range(5))
    raw, average = bits(model), {name: tensor.clone() for name, tensor in ema.tensors().items()}
    with pytest.raises(RuntimeError, match="scoring failed"), ema.swapped():
        raise RuntimeError("scoring failed")
    assert all(torch.equal(p, raw[name]) for name, p in model.named_parameters())
    assert all(torch.equal(tensor, average[name]) for name, tensor in ema.tensors().items())
    taken(model, optimizer, ema, [5])  # and it goes on


def test_an_error_while_the_average_is_put_in_leaves_the_raw_bits():
    model = toy()
    optimizer, ema = adamw(model.named_parameters(), 0.05), Ema(model, 0.9)
    taken(model, optimizer, ema, range(5))
    raw = bits(model)
    ema._average["2.weight"] = torch.zeros(2, 2)  # of another shape: the third copy fails
    with pytest.raises(RuntimeError, match="size"), ema.swapped():
        pytest.fail("must not get here")
    assert all(torch.equal(p, raw[name]) for name, p in model.named_parameters())


def test_the_average_is_never_averaged_with_itself():
    ema = Ema(toy(), 0.9)
    with ema.swapped():
        with pytest.raises(AssertionError):
            ema.update(0)
        with pytest.raises(AssertionError), ema.swapped():
            pass
    ema.update(0)


def test_swapping_never_moves_the_average_or_what_training_goes_on_from():
    """FAILURES C19: with and without looks at the average, the same raw weights and the same average, bit for bit."""
    plain, looked = toy(), toy()
    (first, one), (second, two) = ((adamw(m.named_parameters(), 0.05), Ema(m, 0.9)) for m in (plain, looked))
    for step in range(8):
        taken(plain, first, one, [step])
        taken(looked, second, two, [step])
        with two.swapped():
            looked(torch.ones(1, 5))
    assert all(torch.equal(p, dict(plain.named_parameters())[name]) for name, p in looked.named_parameters())
    assert all(torch.equal(tensor, one.tensors()[name]) for name, tensor in two.tensors().items())


def test_resumed_equals_uninterrupted_through_the_optimizers_file(tmp_path):
    whole = toy()
    optimizer, ema = adamw(whole.named_parameters(), 0.05), Ema(whole, 0.99)
    taken(whole, optimizer, ema, range(12))

    first = toy()
    optimizer, half = adamw(first.named_parameters(), 0.05), Ema(first, 0.99)
    taken(first, optimizer, half, range(5))
    safetensors.torch.save_file(state_tensors(optimizer, dict(first.named_parameters())) | half.tensors(), tmp_path / "o")
    raw = bits(first)

    second = toy(seed=9)
    with torch.no_grad():
        for name, p in second.named_parameters():
            p.copy_(raw[name])
    optimizer, again = adamw(second.named_parameters(), 0.05), Ema(second, 0.99)
    moments, average = split_ema_state(safetensors.torch.load_file(tmp_path / "o"))
    load_state_tensors(optimizer, dict(second.named_parameters()), moments)
    again.load(average)
    taken(second, optimizer, again, range(5, 12))
    assert all(torch.equal(p, dict(whole.named_parameters())[name]) for name, p in second.named_parameters())
    assert all(torch.equal(tensor, ema.tensors()[name]) for name, tensor in again.tensors().items())


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda t: t.pop("ema/0.bias"), r"1 \(ema/0.bias\) missing"),
    (lambda t: t.update({"ema/9.bias": torch.zeros(1)}), r"1 \(ema/9.bias\) unknown"),
    (lambda t: t.update({"ema/2.bias": torch.zeros(4)}), r"ema/2.bias is \(4,\)"),
    (lambda t: t.update({"ema/2.bias": torch.zeros(3).double()}), "float64"), (lambda t: t.clear(), "saved without an average")])
def test_what_does_not_fit_is_refused_before_anything_is_written(change, sentence):
    ema, tensors = Ema(toy(), 0.9), Ema(toy(seed=1), 0.9).tensors()
    before = {name: tensor.clone() for name, tensor in ema.tensors().items()}
    change(tensors)
    with pytest.raises(ArtifactError, match=sentence):
        ema.load(tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ema.tensors().items())


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(UsageError, match="between 0 and 1"):
        Ema(toy(), decay)


def test_an_average_is_kept_of_full_precision_only():
    with pytest.raises(UsageError, match="float32"):
        Ema(toy().bfloat16(), 0.9)


def test_it_covers_what_is_frozen_too():
    model = toy()
    model[0].weight.requires_grad_(False)
    assert ema_weights(Ema(model, 0.9).tensors()).keys() == dict(model.named_parameters()).keys()

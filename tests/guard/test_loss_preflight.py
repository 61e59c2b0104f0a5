"""Preflight: silent on every family, blind to nothing it exists for, and leaving no trace."""

from dataclasses import replace

import pytest
import torch

from assay.guard import loss_preflight
from assay.guard.loss_preflight import (
    check_accumulation,
    check_attention,
    check_isolation,
    check_loss,
    check_padding,
    check_precision,
    loss_gradients,
    naive_logits,
    preflight_loss,
)
from assay.learn import loop
from assay.learn.objectives import next_token
from assay.model.attention import document_starts
from assay.model.placement import fp32_uncompiled
from assay.testing.tiny_models import nudge, tiny_model
from assay.testing.tiny_training import TinyRun
from assay.verdict import Outcome

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gpt2", "assay", "mixed")
NAMES = ["attention", "loss", "accumulation", "isolation", "padding", "determinism"]


@pytest.fixture
def batch():
    return TinyRun().order().batch(0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trained", [False, True])
def test_it_is_silent_on_a_model_that_is_right(family: str, trained: bool, batch):
    model = nudge(tiny_model(family), 0.1) if trained else tiny_model(family)
    verdicts = preflight_loss(model, next_token, batch)
    assert [(v.check, v.outcome) for v in verdicts] == [(name, Outcome.PROVEN) for name in NAMES], "\n".join(map(str, verdicts))


@pytest.mark.parametrize("family", ["assay", "gpt2"])
def test_it_leaves_no_trace(family: str, batch):
    model = tiny_model(family).train()
    marks = {name: torch.full_like(p, 7.0) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = marks[name]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    preflight_loss(model, next_token, batch)
    assert all(torch.equal(p, before[name]) and p.grad is marks[name] for name, p in model.named_parameters())
    assert all(bool((mark == 7).all()) for mark in marks.values())
    assert all(module.training for module in model.modules())


def test_the_mode_is_restored_where_it_was_evaluation(batch):
    model = tiny_model().eval()
    preflight_loss(model, next_token, batch)
    assert not any(module.training for module in model.modules())


def test_what_the_loop_will_use_is_what_is_checked(batch):
    """A second implementation of accumulation, as a CUDA graph is, with the division left out."""
    def undivided(model, objective, given, micro, weight):
        return loop.accumulated(model, objective, given, micro, 1.0)

    assert check_accumulation(tiny_model(), next_token, batch).outcome is Outcome.PROVEN
    assert check_accumulation(tiny_model(), next_token, batch, undivided).outcome is Outcome.REFUTED


def test_answers_after_long_prompts_are_enough(batch):
    """Only the last tokens of each row count: what is left of them must not be nothing, which would be a loss of 0 / 0."""
    late = replace(batch, weight=batch.weight * (torch.arange(batch.weight.shape[1]) >= batch.weight.shape[1] - 3))
    assert check_accumulation(tiny_model(), next_token, late).outcome is Outcome.PROVEN


def test_of_a_large_model_fewer_columns_say_as_much(batch, monkeypatch: pytest.MonkeyPatch):
    """Also where answers come late, or a row has none; and what is wrong is still found."""
    monkeypatch.setattr(loss_preflight, "LARGE", 0)
    monkeypatch.setattr(loss_preflight, "_ENOUGH", (8, 4))
    late = batch.weight * (torch.arange(batch.weight.shape[1]) >= 20)
    late[0] = 0
    for weight in (batch.weight, late):
        given = replace(batch, weight=weight)
        shown = loss_preflight.first_columns(given)
        assert len(shown) == 2
        assert shown.tokens.shape[1] < batch.tokens.shape[1]
        assert bool(((shown.weight != 0).sum(1) >= 4).all())
        assert {v.outcome for v in preflight_loss(tiny_model(), next_token, given)} == {Outcome.PROVEN}

    def scaled(model, part):
        loss = next_token(model, part)
        return loss._replace(total=1.001 * loss.total)

    assert any(v.outcome is Outcome.REFUTED for v in preflight_loss(tiny_model(), scaled, batch))


def test_a_hair_more_than_rounding_is_found(batch):
    """One part in a thousand, in the value alone or in the gradient of one tensor alone."""
    def value(model, given):
        loss = next_token(model, given)
        return loss._replace(total=loss.total + 1e-3 * loss.total.detach())

    def gradient(model, given):
        loss = next_token(model, given)
        extra = model.norm.weight.sum() * 1e-3 * loss.total.detach()
        return loss._replace(total=loss.total + extra - extra.detach())

    assert check_loss(tiny_model(), value, batch).outcome is Outcome.REFUTED
    found = check_loss(tiny_model(), gradient, batch)
    assert found.outcome is Outcome.REFUTED
    assert found.evidence["tensor"] == "norm.weight"


def test_a_gradient_that_does_not_reach_a_tensor_is_found(batch):
    model = tiny_model()

    def objective(given_model, given):
        norm = model.norm.weight
        norm.requires_grad_(False)
        loss = next_token(given_model, given)
        norm.requires_grad_(True)
        return loss

    found = check_loss(model, objective, batch)
    assert found.outcome is Outcome.REFUTED
    assert "norm.weight" in found.reason


def test_a_loss_that_is_not_a_number_is_refuted_and_not_merely_different(batch):
    def objective(model, given):
        loss = next_token(model, given)
        return loss._replace(total=loss.total * float("nan"))

    assert check_loss(tiny_model(), objective, batch).outcome is Outcome.REFUTED
    assert check_padding(tiny_model(), objective, batch).outcome is Outcome.REFUTED


def test_padding_is_laid_out_anew(batch):
    """Where documents begin is counted in the flattened rows: with eight columns more, each row begins elsewhere."""
    seen = []

    def objective(model, given):
        seen.append(given)
        return next_token(model, given)

    packed = replace(batch, documents=torch.zeros(batch.tokens.shape, dtype=torch.int32))
    check_padding(tiny_model(), objective, replace(packed, starts=document_starts(packed.documents)))
    assert all(given.starts is None or torch.equal(given.starts, document_starts(given.documents)) for given in seen)


def test_attention_written_out_follows_the_config(batch):
    """The window is part of it: with another one the logits are others, and the check says so."""
    model = tiny_model("mistral")
    assert check_attention(model, batch).outcome is Outcome.PROVEN
    wider = replace(model.config, windows=(25, 24))
    due = naive_logits(model, loss_preflight.sample_rows(batch))
    model.config = wider
    assert not torch.equal(naive_logits(model, loss_preflight.sample_rows(batch)), due)


def test_a_leak_of_one_bit_is_a_leak(batch, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    whole = type(model).hidden

    def leaking(self, tokens, **options):
        return whole(self, tokens, **options) + 1e-7 * tokens[:, :1, None]

    assert check_isolation(model, batch).outcome is Outcome.PROVEN
    monkeypatch.setattr(type(model), "hidden", leaking)
    assert check_isolation(model, batch).outcome is Outcome.REFUTED


def test_gradients_gives_value_and_gradients_and_puts_back(batch):
    model = tiny_model()
    value, found = loss_gradients(model, lambda: next_token(model, batch).total)
    assert value == pytest.approx(float(next_token(model, batch).total.detach()))
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())


# ---------------------------------------------------------------- the run's own precision

def test_precision_forgives_rounding_and_nothing_else(batch):
    """Gradients off by a tenth pass, as bf16's are; twice the gradient, half of it, another sign, another loss do not."""
    model = tiny_model()
    loss, found = loss_gradients(model, lambda: next_token(model, batch).total / batch.weight.sum())
    noisy = {name: g + 0.1 * g.norm() * unit(g) for name, g in found.items()}
    assert check_precision(model, next_token, batch, (loss, noisy)).outcome is Outcome.PROVEN
    for factor in (2.0, 0.5, -1.0):
        wrong = {name: factor * g for name, g in found.items()}
        assert check_precision(model, next_token, batch, (loss, wrong)).outcome is Outcome.REFUTED
    assert check_precision(model, next_token, batch, (1.05 * loss, found)).outcome is Outcome.REFUTED
    doubled = {name: 2 * g if name.endswith("mlp.up.weight") else g for name, g in found.items()}  # a small part of all gradients
    assert "2.000 (*.mlp.up.weight) times" in check_precision(model, next_token, batch, (loss, doubled)).reason
    assert check_precision(model, next_token, batch, (loss, doubled)).outcome is Outcome.REFUTED
    lost = {name: g for name, g in found.items() if name != "norm.weight"}
    assert "reach different parameters" in check_precision(model, next_token, batch, (loss, lost)).reason


def unit(like):
    noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(like.numel()))
    return noise / noise.norm()


def test_what_is_exact_is_computed_in_fp32_whatever_the_run_computes_in():
    """And the run's own dtype is back afterwards, even where a check dies."""
    model = tiny_model()
    model.compute_dtype = torch.bfloat16

    def dies() -> None:
        assert model.compute_dtype is torch.float32
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), fp32_uncompiled(model):
        dies()
    assert model.compute_dtype is torch.bfloat16

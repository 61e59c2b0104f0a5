"""Mixed values and gated heads: nothing at first where they say so, the same however computed, and never handed on in silence."""

from dataclasses import replace

import pytest
import torch

from assay.cli import run as assay
from assay.data.batch import Batch
from assay.errors import UsageError
from assay.guard.loss_preflight import naive_logits
from assay.guard.proof import prove_checkpoint
from assay.guard.training_guards import UpdateAccount, check_gradients, check_optimizer
from assay.learn.loop import train
from assay.learn.objectives import next_token
from assay.learn.optim import adamw, muon
from assay.model.families import config_to_hf
from assay.model.lora import attach, detach, fresh, plan
from assay.model.patch import patched
from assay.model.transformer import initialised
from assay.store import gguf
from assay.store.artifact import build_model, open_artifact
from assay.testing.tiny_models import nudge, save_model, tiny_config, tiny_model, tokenizer_and_stops
from assay.testing.tiny_training import TinyRun
from assay.verdict import Outcome, overall, without_optional

TOKENS = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
OWN = [f"blocks.{layer}.attn.{part}.weight" for layer in range(3) for part in ("mix", "gate") if part == "gate" or layer > 0]


def loss(model) -> torch.Tensor:
    return model(TOKENS).log_softmax(-1)[..., 7].sum()


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_plain_model_has_none_of_their_parameters_and_a_mixed_one_has_them():
    names = dict(initialised(tiny_config("mixed"), 0).named_parameters())
    plain = dict(tiny_model("mixed", value_residual=False, attention_gate=False).named_parameters())
    assert sorted(names.keys() - plain.keys()) == sorted(OWN)
    assert all(torch.equal(parameter, names[name]) for name, parameter in plain.items())


def test_a_fresh_model_is_nearly_the_ungated_one_and_with_gates_of_0_it_is_that_one():
    model, ungated = tiny_model("mixed"), tiny_model("mixed", attention_gate=False)(TOKENS)
    assert 0 < (model(TOKENS) - ungated).norm() < 0.01 * ungated.norm()
    for layer in range(3):
        model.get_parameter(f"blocks.{layer}.attn.gate.weight").data.zero_()
    assert torch.equal(model(TOKENS), ungated)


def test_shares_of_one_and_nothing_are_no_mixing_and_the_first_layer_alone_is_read():
    model, plain = nudge(tiny_model("mixed"), 0.1), nudge(tiny_model("mixed", value_residual=False), 0.1)
    shares = [model.get_parameter(f"blocks.{layer}.attn.mix.weight").data for layer in (1, 2)]
    for share in shares:
        share.copy_(torch.tensor([1.0, 0.0]))
    assert torch.equal(model(TOKENS), plain(TOKENS))
    for share in shares:
        share.copy_(torch.tensor([0.0, 1.0]))
    before = model(TOKENS)
    for layer in (1, 2):  # nobody asks for the values of these layers any more
        model.get_parameter(f"blocks.{layer}.attn.qkv.weight").data[-32:] += 1
    assert torch.equal(model(TOKENS), before)
    model.get_parameter("blocks.0.attn.qkv.weight").data[-32:] += 1
    assert not torch.allclose(model(TOKENS), before, atol=1e-2)


def test_gradients_are_those_of_the_formula_written_out():
    """The first layer's values are learned from through every layer that mixes them in."""
    model = nudge(tiny_model("mixed"), 0.1)
    found = gradients(model)
    model.zero_grad()
    naive_logits(model, Batch(TOKENS, torch.zeros(TOKENS.shape))).log_softmax(-1)[..., 7].sum().backward()
    for name, parameter in model.named_parameters():
        error = (found[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


def test_computing_a_layer_again_gives_the_same_gradients():
    model = nudge(tiny_model("mixed"), 0.1)
    kept = gradients(model)
    model.recompute = True
    again = gradients(model)
    assert all(torch.equal(again[name], gradient) for name, gradient in kept.items())
    assert all(kept[name].abs().max() > 0 for name in OWN)


def test_compiled_block_by_block_it_is_the_same():
    model = nudge(tiny_model("mixed"), 0.1)
    kept = gradients(model)
    for block in model.blocks:
        block.compile(backend="aot_eager", dynamic=False, fullgraph=True)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, kept[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_update_accounting_sees_them_and_they_move(optimizer: str):
    model = tiny_model("mixed")
    named = list(model.named_parameters())
    names = [name for name, _ in named]
    rule = adamw(named, 1e-3) if optimizer == "adamw" else muon(named, lr_matrix=0.02, lr_embed=0.01, lr_scalar=0.01)
    assert check_optimizer(model, rule, names).outcome is Outcome.PROVEN
    account, order = UpdateAccount(model), TinyRun().order()
    for _ in train(model, rule, (order.batch(step) for step in range(2)), next_token, micro=8):
        pass
    assert check_gradients(gradients(model), names).outcome is Outcome.PROVEN
    assert account.check_moved().outcome is Outcome.PROVEN
    model.get_parameter(OWN[1]).data.copy_(torch.full((2,), 0.5) if "mix" in OWN[1] else 0)
    assert OWN[1] in account.check_moved().reason


def test_an_adapter_live_equals_merged_and_the_gate_can_be_adapted_by_name():
    model = nudge(tiny_model("mixed"), 0.1)
    targets = ("q_proj", "v_proj", "o_proj", "head_gate")
    patch = fresh(model.config, plan(model.config, targets), rank=4, scale=2.0, seed=1, parent="base")
    plain = model(TOKENS).detach()
    attach(model, patch)
    assert torch.equal(model(TOKENS), plain)
    nudge(model, 0.1, seed=3)
    live = model(TOKENS).detach()
    back = detach(model, "base")
    assert torch.equal(model(TOKENS), plain)
    with patched(model, back):
        torch.testing.assert_close(model(TOKENS), live, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(plain, live, atol=1e-2)
    assert not any("head_gate" in site.foreign for site in plan(model.config))  # but only where it is asked for


def test_a_saved_model_is_proven_and_comes_back(tmp_path):
    model = nudge(tiny_model("mixed"), 0.1)
    written = save_model(tmp_path / "model", model)
    verdicts = prove_checkpoint(written.folder)
    assert overall(without_optional(verdicts)) is Outcome.PROVEN, "\n".join(map(str, verdicts))
    back = build_model(open_artifact(tmp_path / "model"))
    assert back.config == model.config
    assert torch.equal(back(TOKENS), model(TOKENS))
    assert assay(["export", str(tmp_path / "model"), "--to", "hf", "--out", str(tmp_path / "again")]) == 0
    assert torch.equal(build_model(open_artifact(tmp_path / "again"))(TOKENS), model(TOKENS))


@pytest.mark.parametrize(("changed", "words_of_it"), [
    ({"value_residual": True}, "mixing of the first layer's values"), ({"attention_gate": True}, "gates on attention's output"),
    ({"softcap": 15.0}, "soft cap"), ({"activation": "relu2"}, "squared relu")])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_what_a_foreign_architecture_cannot_say_is_refused(family: str, changed: dict, words_of_it: str, tmp_path):
    config = replace(tiny_config(family), **changed)
    with pytest.raises(UsageError, match=f"the {family} architecture of transformers has no {words_of_it}"):
        config_to_hf(config, "float32")
    tensors = dict(initialised(config, 0).named_parameters())
    with pytest.raises(UsageError, match=f"GGUF cannot express {words_of_it}"):
        gguf.write_gguf(tmp_path / "model.gguf", config, tensors, tokenizer_and_stops()[0], "f16")
    assert not (tmp_path / "model.gguf").exists()


def test_the_own_family_is_not_exported_to_gguf(tmp_path, capsys):
    save_model(tmp_path / "model", tiny_model("mixed"))
    assert assay(["export", str(tmp_path / "model"), "--to", "gguf", "--out", str(tmp_path / "model.gguf")]) == 2
    assert "writes no GGUF file of the 'assay' architecture" in capsys.readouterr().err

"""Runs of later families through `sft`, and the context: a longer conversation is refused, unless a rope scaling is stated."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.data.chat import TrainingExample
from assay.errors import UsageError
from assay.model.families import scaled_context
from assay.recipes import hand_over, run, sft, starting_model
from assay.recipes.conversations import refuse_beyond_context
from assay.store.artifact import open_artifact
from assay.testing.tiny_models import rewrite_tensors, save_hf_folder, save_model, tiny_config, tiny_model
from assay.testing.tiny_training import NoProver
from assay.verdict import Outcome, proven


@pytest.fixture(autouse=True)
def unproven(monkeypatch):
    """Leave saves unproven: what a fresh process says is the matter of tests/model/test_model_families.py."""
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    monkeypatch.setattr(starting_model, "prove_checkpoint", lambda folder, **_: [proven("whole", "not looked at")])


def options(tmp_path, model, words, **more):
    rows = [{"prompt": f"say {i}", "completion": " the" * (words + i % 3)} for i in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_model(tmp_path / "model", model)
    return sft.Sft(model=str(tmp_path / "model"), data=(str(tmp_path / "data.jsonl"),), out=str(tmp_path / "run"), max_length=128,
                   batch_tokens=512, max_steps=4, num_train_epochs=4, learning_rate=3e-3, held_out=0.2, device="cpu", **more)


@pytest.mark.parametrize(("family", "lora_r"), [("qwen3_moe", 4), ("gpt_oss", 4), ("qwen2_moe", 4), ("gemma2", 0)])
def test_a_family_is_tuned_and_every_guard_is_silent(family, lora_r, tmp_path):
    said = list[str]()
    found = sft.sft(options(tmp_path, tiny_model(family), 12, lora_r=lora_r), said.append)
    balance = tiny_config(family).experts and tiny_config(family).experts.balance
    assert any("keep them equally busy" in line for line in said) == bool(balance), "a loss that is not added is named"
    assert all(verdict.outcome is Outcome.PROVEN for verdict in found.verdicts), str(found)
    assert found.exit_code == 0
    before, after = (open_artifact(tmp_path / name).tensors["blocks.1.mlp.down.weight"] for name in ("model", "run/model"))
    moved = (before != after).view(tiny_config(family).experts.count if tiny_config(family).experts else 1, -1).any(1)
    assert moved.all(), "every expert was adapted"


def test_a_conversation_beyond_the_context_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"context of 64: .*--rope-scaling yarn:2"):
        sft.sft(options(tmp_path, tiny_model(max_length=64), 70), lambda _: None)


@pytest.mark.parametrize(("family", "max_length", "words"), [("phi3", 64, "--rope-scaling long$"), ("gpt2", 64, "give --max-length 64$"),
                                                            ("llama3", 64, "give --max-length 64$")])
def test_a_way_out_is_one_that_this_model_has(family, max_length, words):
    model = tiny_config(family) if family == "phi3" else replace(tiny_config(family), max_length=max_length)
    longer = TrainingExample("a", np.zeros(model.max_length + 3, np.int64), np.zeros(model.max_length + 3), (), 1)
    with pytest.raises(UsageError, match=words):
        refuse_beyond_context([longer], model)


def test_a_stated_scaling_lengthens_the_context_and_is_written_down(tmp_path):
    found = sft.sft(options(tmp_path, tiny_model(max_length=64), 70, rope_scaling="yarn:2", lora_r=4), lambda _: None)
    assert found.exit_code == 0
    written = json.loads((tmp_path / "run" / "base" / "config.json").read_text())
    assert (written["max_position_embeddings"], written["rope_parameters"]["rope_type"]) == (128, "yarn")


@pytest.mark.parametrize("made", [{"rope_scaling": "yarn:2"}, {"new_tokens": ("<think>",)}])
def test_a_base_that_is_made_keeps_the_dtype_of_its_file(made, tmp_path):
    """It is frozen, and in fp32 would take twice the memory that a plan says; where dtypes are mixed, fp32 holds them all."""
    model = tiny_model().to(torch.bfloat16)
    config = options(tmp_path, model, 12, lora_r=4, **made)
    for name, dtypes in (("bf16", {torch.bfloat16}), ("mixed", {torch.bfloat16, torch.float32})):
        folder = save_hf_folder(tmp_path / name, model)
        if name == "mixed":
            rewrite_tensors(folder / "model.safetensors", lambda weights: {
                key: tensor.float() if "norm" in key else tensor for key, tensor in weights.items()})
        before = open_artifact(folder)
        assert {tensor.dtype for tensor in before.tensors.values()} == dtypes
        start = starting_model.load_start(replace(config, model=str(folder), out=str(tmp_path / f"run-{name}")), "cpu", lambda _: None)
        assert {t.dtype for t in start.parent.tensors.values()} == ({torch.bfloat16} if name == "bf16" else {torch.float32})
        assert torch.equal(start.parent.tensors["norm.weight"].float(), before.tensors["norm.weight"].float())


def test_scalings_in_words():
    phi = tiny_config("phi3")
    assert scaled_context(phi, "long").max_length == 1024
    assert scaled_context(phi, "long").rope.short_factor == phi.rope.long_factor
    assert scaled_context(tiny_config(), "linear:2").max_length == 512
    for config, scaling, words in [
        (tiny_config(), "long", "only a LongRoPE model"), (tiny_config("gpt2"), "yarn:2", "learns its positions"),
        (tiny_config("llama3"), "yarn:2", "of kind 'llama3' already"), (tiny_config(), "yarn:0.5", "above 1"),
        (replace(tiny_config(), family="phi3"), "yarn:2", "a phi3 takes no other scaling than its own")]:
        with pytest.raises(UsageError, match=words):
            scaled_context(config, scaling)

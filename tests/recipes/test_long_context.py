"""A conversation beyond the model's context is refused, unless a rope scaling is stated; then the base says so and is proven."""

import json
from dataclasses import replace

import pytest

from assay.errors import UsageError
from assay.model.families import scaled_context
from assay.recipes import sft
from assay.testing.tiny_models import save_hf_folder, tiny_config, tiny_model


def conversations(folder, words):
    rows = [{"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": " the" * (words + i % 3)}]}
            for i in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "data.jsonl")


def options(tmp_path, **more):
    base = save_hf_folder(tmp_path / "model", tiny_model(max_length=64))
    return sft.Sft(model=str(base), data=(conversations(tmp_path, 70),), out=str(tmp_path / "run"), max_length=128, batch_tokens=512,
                   max_steps=2, lora_r=4, held_out=0.2, device="cpu", probe_samples=0, **more)


def test_a_conversation_beyond_the_context_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"context of 64: .*--rope-scaling yarn:2"):
        sft.sft(options(tmp_path))


def test_a_stated_scaling_lengthens_the_context_and_is_written_down(tmp_path):
    sft.sft(options(tmp_path, rope_scaling="yarn:2"))
    written = json.loads((tmp_path / "run" / "base" / "config.json").read_text())
    assert (written["max_position_embeddings"], written["rope_parameters"]["rope_type"]) == (128, "yarn")


def test_scalings_in_words():
    phi = tiny_config("phi3")
    assert scaled_context(phi, "long").max_length == 1024
    assert scaled_context(phi, "long").rope.short_factor == phi.rope.long_factor
    assert scaled_context(tiny_config(), "linear:2").max_length == 512
    for config, scaling, words in [
        (tiny_config(), "long", "only a LongRoPE model"), (tiny_config("gpt2"), "yarn:2", "learns its positions"),
        (tiny_config("llama3"), "yarn:2", "of kind 'llama3' already"), (tiny_config(), "yarn:0.5", "above 1"),
        (replace(tiny_config(), family="phi3"), "yarn:2", "take no other")]:
        with pytest.raises(UsageError, match=words):
            scaled_context(config, scaling)

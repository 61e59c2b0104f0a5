"""The built-in tiny models of the demo, the zoo and the tests: every family, small enough for a blink."""

from dataclasses import replace
from typing import Any

from assay.model.tokenizer import BYTE_OF, Tokenizer
from assay.model.transformer import ModelConfig, Rope

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""


def tiny_config(family: str = "llama", vocab: int = 320) -> ModelConfig:
    """Two layers of width 64; grouped heads where the family has them, so that no layout error can hide in symmetry."""
    llama = ModelConfig(
        family="llama", vocab=vocab, width=64, depth=2, heads=4, kv_heads=2, head_dim=16, hidden=96, max_length=256, norm="rms",
        norm_eps=1e-5, rope=Rope(10000.0), activation="silu", gated=True, qkv_bias=False, out_bias=False, mlp_bias=False,
        qk_norm=False, windows=(None, None), tied=True, softcap=None, value_residual=False, attention_gate=False)
    variants = {
        "llama": llama,
        "llama3": replace(llama, rope=Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 32), tied=False),
        "mistral": replace(llama, family="mistral", windows=(24, 24), tied=False),
        "qwen2": replace(llama, family="qwen2", qkv_bias=True, rope=Rope(1000000.0)),
        "qwen3": replace(llama, family="qwen3", qk_norm=True, head_dim=24, rope=Rope(1000000.0)),
        "gpt2": replace(llama, family="gpt2", kv_heads=4, hidden=256, norm="layer", rope=None, activation="gelu_tanh", gated=False,
                        qkv_bias=True, out_bias=True, mlp_bias=True),
        "assay": replace(llama, family="assay", qk_norm=True, activation="relu2", gated=False, softcap=15.0),
        "mixed": replace(llama, family="assay", depth=3, windows=(None, 24, None), value_residual=True, attention_gate=True),
    }
    return variants[family]


def tiny_tokenizer(template: bool = True) -> Tokenizer:
    """Bytes, a few merges, three special tokens and ChatML: real in kind, small in size."""
    vocab = dict(BYTE_OF) | {token: 256 + i for i, token in enumerate(SPECIAL)}
    merges: list[list[str]] = []
    for word in ("Ġthe", "Ġand", "Ġis", "ing", "er"):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append([word[:end - 1], word[end - 1]])
    added = [{"id": vocab[token], "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for token in SPECIAL]
    byte_level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    document = {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
                "decoder": byte_level, "truncation": None, "padding": None,
                "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                          "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges}}
    stop = "<|im_end|>" if template else "<|endoftext|>"
    return Tokenizer.from_parts(document, TEMPLATE if template else None, bos_token=None, eos_token=stop, pad_token="<|endoftext|>")

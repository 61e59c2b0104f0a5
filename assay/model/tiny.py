"""The built-in tiny models of the demo, the zoo and the tests: every family, small enough for a blink."""

from dataclasses import replace

from assay.model.transformer import ModelConfig, Rope


def tiny_config(family: str = "llama", vocab: int = 320) -> ModelConfig:
    """Two layers of width 64; grouped heads where the family has them, so that no layout error can hide in symmetry."""
    llama = ModelConfig(
        family="llama", vocab=vocab, width=64, depth=2, heads=4, kv_heads=2, head_dim=16, hidden=96, max_length=256, norm="rms",
        norm_eps=1e-5, rope=Rope(10000.0), activation="silu", gated=True, qkv_bias=False, out_bias=False, mlp_bias=False,
        qk_norm=False, windows=(None, None), tied=True, softcap=None)
    variants = {
        "llama": llama,
        "llama3": replace(llama, rope=Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 32), tied=False),
        "mistral": replace(llama, family="mistral", windows=(24, 24), tied=False),
        "qwen2": replace(llama, family="qwen2", qkv_bias=True, rope=Rope(1000000.0)),
        "qwen3": replace(llama, family="qwen3", qk_norm=True, head_dim=24, rope=Rope(1000000.0)),
        "gpt2": replace(llama, family="gpt2", kv_heads=4, hidden=256, norm="layer", rope=None, activation="gelu_tanh", gated=False,
                        qkv_bias=True, out_bias=True, mlp_bias=True),
        "assay": replace(llama, family="assay", qk_norm=True, activation="relu2", gated=False, softcap=15.0),
    }
    return variants[family]

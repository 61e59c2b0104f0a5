"""Forward-pass faults: some fifty small mistakes in a model's arithmetic, each with the site where a trace must find it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from assay.editing.block_hooks import block
from assay.kernels.rotary import rotate
from assay.model.attention import TokenLayout, positions_in_document
from assay.model.transformer import (
    LayerNorm,
    Mixture,
    ModelConfig,
    OffsetRmsNorm,
    RmsNorm,
    Rope,
    Transformer,
    gelu_tanh,
    inverse_frequencies,
    softcap,
)
from assay.testing.tiny_forward import (
    attention_by_hand,
    attention_kernel,
    change_attention,
    change_mlp,
    forward_fault,
    put_forward,
    remove_norm,
    round_to_bf16,
    sight_mask,
    stale_cache_entry,
    wrap_method,
)

# ---------------------------------------------------------------- the ends of the model


forward_fault("embedding scaled", "embedding")(
    # As Gemma's are, and as nobody else's.
    lambda model, _: block(model, 0).register_forward_pre_hook(lambda _, given: (given[0] * model.config.width**0.5, *given[1:])))
forward_fault("ids off by one", "embedding")(
    lambda model, _: wrap_method(model, "hidden", lambda usual, tokens, **given: usual((tokens + 1) % model.config.vocab, **given)))
forward_fault("positions from one", "embedding", family="gpt2")(
    lambda model, _: wrap_method(model, "hidden", lambda usual, tokens: usual(
        tokens, positions=torch.arange(1, tokens.shape[1] + 1).expand_as(tokens))))


@forward_fault("positions left out", "embedding", family="gpt2")
def positions_left_out(model: Transformer, _: int) -> None:
    assert model.position is not None
    model.position.weight.zero_()


forward_fault("final norm left out", "final norm")(lambda model, _: remove_norm(model.norm))
forward_fault("tied to a shifted embedding", "logits")(lambda model, _: wrap_method(model, "head_weight", lambda usual: usual().roll(1, 0)))


@forward_fault("head of its own, never trained", "logits", family="llama3")
def head_never_trained(model: Transformer, _: int) -> None:
    assert model.head is not None
    model.head.weight.copy_(model.embed.weight)


forward_fault("soft cap left out", "logits", family="assay", rows=("L12",))(
    lambda model, _: wrap_method(model, "logits", lambda usual, states: states @ model.head_weight().T))
forward_fault("soft cap of another size", "logits", family="assay")(
    lambda model, _: wrap_method(model, "logits", lambda usual, states: softcap(states @ model.head_weight().T, 30.0)))
forward_fault("head in bf16", "logits", rows=("S6",))(
    lambda model, _: wrap_method(model, "logits", lambda usual, states: usual(states.bfloat16().float())))

# ---------------------------------------------------------------- norms and the residual stream


forward_fault("norm left out", "attn norm")(lambda model, layer: remove_norm(block(model, layer).attn_norm))


@forward_fault("norm with a tenth of its epsilon", "mlp norm")
def epsilon(model: Transformer, layer: int) -> None:
    norm = block(model, layer).mlp_norm
    assert isinstance(norm, RmsNorm)
    norm.eps /= 10


forward_fault("norm without its weight", "mlp norm")(
    lambda model, layer: put_forward(block(model, layer).mlp_norm, lambda x: torch.rms_norm(x, x.shape[-1:], eps=1e-5)))
forward_fault("norm that subtracts the mean", "attn norm")(
    lambda model, layer: wrap_method(block(model, layer).attn_norm, "forward", lambda usual, x: usual(x - x.mean(-1, keepdim=True))))


@forward_fault("norm that keeps the mean", "mlp norm", family="gpt2")
def norm_that_keeps_the_mean(model: Transformer, layer: int) -> None:
    norm = block(model, layer).mlp_norm
    assert isinstance(norm, LayerNorm)
    put_forward(norm, lambda x: torch.rms_norm(x, x.shape[-1:], norm.weight, 1e-5) + norm.bias)


forward_fault("norm of the other half", "mlp norm")(
    lambda model, layer: put_forward(block(model, layer).mlp_norm, block(model, layer).attn_norm.forward))
forward_fault("norm in bf16", "attn norm", rows=("S6",))(lambda model, layer: round_to_bf16(block(model, layer).attn_norm))


@forward_fault("attention's residual lost", "middle")
def attention_residual_lost(model: Transformer, layer: int) -> None:
    one = block(model, layer)

    def forward(x: Tensor, *given: Any) -> Tensor:
        x = one.attn(one.attn_norm(x), *given)
        return x + one.mlp(one.mlp_norm(x))

    put_forward(one, forward)


@forward_fault("MLP's residual lost", "residual")
def mlp_residual_lost(model: Transformer, layer: int) -> None:
    one = block(model, layer)
    put_forward(one, lambda x, *given: one.mlp(one.mlp_norm(x + one.attn(one.attn_norm(x), *given))))


@forward_fault("halves side by side", "middle")
def halves_side_by_side(model: Transformer, layer: int) -> None:
    """Both read the stream as it came in, as GPT-J's do."""
    one = block(model, layer)
    put_forward(one, lambda x, *given: x + one.attn(one.attn_norm(x), *given) + one.mlp(one.mlp_norm(x)))

# ---------------------------------------------------------------- projections


@forward_fault("q and k exchanged", "q", family="gpt2")
def q_and_k_exchanged(model: Transformer, layer: int) -> None:
    weight, rows = block(model, layer).attn.qkv.weight, model.config.width
    weight[: 2 * rows] = weight[: 2 * rows].roll(rows, 0)


@forward_fault("two heads of v exchanged", "v")
def two_heads_of_v_exchanged(model: Transformer, layer: int) -> None:
    one = block(model, layer).attn
    values = one.qkv.weight[-one.rows[2] :]
    values.copy_(values.roll(one.head_dim, 0))


@forward_fault("bias of q left out", "q", family="qwen2")
def bias_of_q_left_out(model: Transformer, layer: int) -> None:
    one = block(model, layer).attn
    one.qkv.bias[: one.rows[0]] = 0


@forward_fault("bias of v left out", "v", family="qwen2")
def bias_of_v_left_out(model: Transformer, layer: int) -> None:
    one = block(model, layer).attn
    one.qkv.bias[-one.rows[2] :] = 0


@forward_fault("square matrix transposed", "attn out", rows=("S7",))
def square_matrix_transposed(model: Transformer, layer: int) -> None:
    weight = block(model, layer).attn.out.weight
    weight.copy_(weight.T.clone())


forward_fault("accumulated in bf16", "down", rows=("S6",))(lambda model, layer: round_to_bf16(block(model, layer).mlp.down))
forward_fault("scale of the last layer left on", "down")(lambda model, layer: block(model, layer).mlp.down.weight.mul_(0.5**0.5))
forward_fault("bias of down left out", "down", family="gpt2")(lambda model, layer: block(model, layer).mlp.down.bias.zero_())


@forward_fault("one row of up lost", "up")
def one_row_of_up_lost(model: Transformer, layer: int) -> None:
    block(model, layer).mlp.up.weight[-7] = 0

# ---------------------------------------------------------------- the MLP


forward_fault("gated product off by one", "product", rows=("S7",))(
    lambda model, layer: change_mlp(model, layer, product=lambda act, up: act * up.roll(-1, -1)))
forward_fault("gate and up added", "product")(lambda model, layer: change_mlp(model, layer, product=torch.add))
forward_fault("gate and up exchanged", "act", "gate", rows=("S7",))(
    lambda model, layer: change_mlp(model, layer, halves=lambda gate, up: (up, gate)))
forward_fault("another activation", "act")(lambda model, layer: setattr(block(model, layer).mlp, "activation", gelu_tanh))
forward_fault("activation by erf", "act", family="gpt2")(lambda model, layer: setattr(block(model, layer).mlp, "activation", F.gelu))
forward_fault("relu not squared", "act", family="assay")(lambda model, layer: setattr(block(model, layer).mlp, "activation", torch.relu))

# ---------------------------------------------------------------- rotation


forward_fault("another model's rotary base", "query", rows=("L14",))(
    lambda model, _: setattr(model, "frequencies", inverse_frequencies(Rope(500000.0), model.config.head_dim)))
forward_fault("rope scaling left out", "query", family="llama3", rows=("L13",))(
    lambda model, _: setattr(model, "frequencies", inverse_frequencies(Rope(500000.0), model.config.head_dim)))
forward_fault("pairs side by side", "query", rows=("M08",))(
    lambda model, layer: change_attention(model, layer, turn=lambda x, cos, sin: rotate(
        x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)))
forward_fault("rotated backwards", "query")(
    lambda model, layer: change_attention(model, layer, turn=lambda x, cos, sin: rotate(x, cos, -sin)))
forward_fault("keys one position late", "key")(
    lambda model, layer: change_attention(model, layer, turn_key=lambda x, cos, sin: rotate(x, cos.roll(1, 1), sin.roll(1, 1))))
forward_fault("angles in bf16", "query", rows=("S6",))(
    lambda model, layer: change_attention(model, layer, turn=lambda x, cos, sin: rotate(x, cos.bfloat16().float(), sin.bfloat16().float())))
forward_fault("norm of heads left out", "query", family="qwen3")(lambda model, layer: change_attention(model, layer, no_norm=True))
forward_fault("norm of heads after rotation", "query", family="qwen3")(lambda model, layer: change_attention(model, layer, late_norm=True))

# ---------------------------------------------------------------- attention


forward_fault("scale left out", "scores")(
    lambda model, layer: change_attention(model, layer, look=lambda q, k, v, _: attention_kernel(q, k, v, scale=1.0)))
forward_fault("one token of the future", "scores")(
    lambda model, layer: change_attention(model, layer, look=lambda q, k, v, _: attention_kernel(
        q, k, v, sight_mask(q.shape[1], nearest=-1))))
forward_fault("window off by one", "scores", family="mistral", rows=("L12",))(
    lambda model, layer: change_attention(model, layer, look=lambda q, k, v, _: attention_kernel(
        q, k, v, sight_mask(q.shape[1], furthest=25))))
forward_fault("kernel that knows no window", "attended", family="mistral", rows=("L12",))(
    lambda model, layer: change_attention(model, layer, look=lambda q, k, v, _: attention_by_hand(q, k, v, torch.float32)))
forward_fault("keys dealt out in turns", "key", "scores", rows=("M08",))(
    # Heads 0, 2 share a key, and 1, 3; they are neighbours that should.
    lambda model, layer: change_attention(model, layer, look=lambda q, k, v, _: attention_kernel(
        q, *(x.repeat(1, 1, q.shape[2] // x.shape[2], 1) for x in (k, v)))))
forward_fault("two heads exchanged", "attended", rows=("S7",))(
    lambda model, layer: change_attention(model, layer, joined=lambda x, _: x[:, :, [1, 0, 2, 3]].flatten(2)))
forward_fault("softmax in bf16", "attended", rows=("S6",))(
    lambda model, layer: change_attention(model, layer, look=lambda q, k, v, _: attention_by_hand(q, k, v, torch.bfloat16)))

# ---------------------------------------------------------------- what later families do otherwise


def in_the_config(name: str, right: str, family: str, row: str, change: Callable[[ModelConfig], dict[str, Any]]) -> None:
    """A field of the config that the code does not look at."""
    forward_fault(name, right, family=family, rows=(row,))(
        lambda model, _: setattr(model, "config", replace(model.config, **change(model.config))))


in_the_config("Gemma's window off by one", "scores", "gemma3_text", "L12",
              lambda c: {"windows": tuple(window and window + 1 for window in c.windows)})
in_the_config("local layers turned as global ones are", "query", "gemma3_text", "L14", lambda c: {"local_rope": None})
in_the_config("YaRN's attention factor missed", "query", "yarn", "L13",
              lambda c: {"rope": replace(cast(Rope, c.rope), attention_factor=None)})
in_the_config("LongRoPE's attention factor missed", "query", "phi3", "L13",
              lambda c: {"rope": replace(cast(Rope, c.rope), attention_factor=None)})
in_the_config("positions in a layer that has none", "query", "smollm3", "L13", lambda c: {"unrotated": ()})
in_the_config("scale of logits left out", "logits", "granite", "L12", lambda c: {"logit_scale": None})
in_the_config("embedding not scaled", "embedding", "granite", "L12", lambda c: {"embedding_scale": None})
forward_fault("embedding scaled twice", "embedding", family="gemma3_text", rows=("L12",))(
    lambda model, _: block(model, 0).register_forward_pre_hook(lambda _, given: (given[0] * model.config.width**0.5, *given[1:])))
forward_fault("soft cap of scores left out", "scores", family="gemma2", rows=("L12",))(
    lambda model, layer: setattr(block(model, layer).attn, "softcap", None))
forward_fault("scale of scores left out", "scores", family="granite", rows=("L12",))(
    lambda model, layer: setattr(block(model, layer).attn, "scale", None))
forward_fault("residual multiplier left out", "middle", family="granite", rows=("L12",))(
    lambda model, layer: setattr(block(model, layer), "scale", None))


@forward_fault("norms before and after exchanged", "attn norm", family="gemma2", rows=("L12",))
def norms_before_and_after_exchanged(model: Transformer, layer: int) -> None:
    one = block(model, layer)
    one.attn_norm, one.attn_post_norm = one.attn_post_norm, one.attn_norm


@forward_fault("norm that multiplies by its weight alone", "attn norm", family="gemma3_text", rows=("L12",))
def norm_without_the_one(model: Transformer, layer: int) -> None:
    norm = block(model, layer).attn_norm
    assert isinstance(norm, OffsetRmsNorm)
    put_forward(norm, lambda x: torch.rms_norm(x, x.shape[-1:], norm.weight, norm.eps))


@forward_fault("sinks dropped", "scores", family="gpt_oss", rows=("L12",))
def sinks_dropped(model: Transformer, layer: int) -> None:
    attn = block(model, layer).attn

    def without(usual: Any, *given: Any) -> Tensor:
        sinks, attn.sinks = attn.sinks, None
        try:
            return usual(*given)
        finally:
            attn.sinks = sinks

    wrap_method(attn, "forward", without)


def mixture(model: Transformer, layer: int) -> Mixture:
    """The layer's, or the next one's where it has a plain MLP."""
    found = block(model, layer if model.config.mixture_at(layer) else layer + 1).mlp
    assert isinstance(found, Mixture)
    return found


forward_fault("router's bias ignored", "router", family="gpt_oss", rows=("L12",))(
    lambda model, layer: put_forward(mixture(model, layer).router, lambda x: F.linear(x, mixture(model, layer).router.weight)))
forward_fault("shares of experts not made whole", "mixed", family="qwen3_moe", rows=("L12",))(
    lambda model, layer: setattr(mixture(model, layer), "rule", replace(mixture(model, layer).rule, normalised=False)))
forward_fault("shares of experts made whole", "mixed", family="qwen2_moe", rows=("L12",))(
    lambda model, layer: setattr(mixture(model, layer), "rule", replace(mixture(model, layer).rule, normalised=True)))
forward_fault("experts' activation not clamped", "mixed", family="gpt_oss", rows=("L12",))(
    lambda model, layer: setattr(mixture(model, layer), "rule", replace(mixture(model, layer).rule, clamp=1e9)))
forward_fault("shared expert without its gate", "mixed", family="qwen2_moe", rows=("L12",))(
    lambda model, layer: put_forward(cast(nn.Module, mixture(model, layer).shared_gate), lambda x: x[..., :1] * 0 + 30))


@forward_fault("norm of each head where all are normed together", "query", family="olmo2", rows=("L12",))
def norm_of_each_head(model: Transformer, layer: int) -> None:
    attn = block(model, layer).attn
    assert isinstance(attn.q_norm, RmsNorm)
    norm = attn.q_norm

    def by_heads(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, attn.head_dim))
        return torch.rms_norm(heads, heads.shape[-1:], eps=norm.eps).flatten(-2) * norm.weight

    put_forward(norm, by_heads)

# ---------------------------------------------------------------- cache and batch

forward_fault("stale key in the cache", "scores", way="from the cache", rows=("D25",))(stale_cache_entry("keys"))
forward_fault("stale value in the cache", "attended", way="from the cache", rows=("D25",))(stale_cache_entry("values"))


@forward_fault("position not carried on", "query", way="from the cache", rows=("D25",))
def position_not_carried_on(model: Transformer, _: int) -> None:
    def rotary(usual: Any, placement: TokenLayout) -> Any:
        decoding = placement.positions.shape[1] == 1
        return usual(placement._replace(positions=placement.positions - 1) if decoding else placement)

    wrap_method(model, "rotary", rotary)


forward_fault("padding seen", "scores", way="in company", rows=("D24",))(
    lambda model, _: wrap_method(model, "hidden", lambda usual, tokens, documents: usual(
        tokens, documents=torch.zeros_like(documents), positions=positions_in_document(documents))))
forward_fault("padding counted as positions", "query", way="in company", rows=("D24",))(
    lambda model, _: wrap_method(model, "hidden", lambda usual, tokens, documents: usual(
        tokens, documents=documents, positions=torch.arange(tokens.shape[1]).expand_as(tokens))))

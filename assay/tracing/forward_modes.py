"""Forward modes: one model over the same tokens plainly, beside other rows, through the cache, or run by transformers.

A ForwardMode is `(tokens_BT, look)`: it runs its model and calls `look(site, value, start)` at every site with the part that belongs
to the tokens; `start` is the position of the part's first token. What `look` returns takes the part's place. All modes must agree.
Where transformers' attention is eager, what attention is given is not seen: `load_with_transformers` asks for the fused one.
"""

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.model.attention import PADDING
from assay.model.kv_cache import DecodeView, PrefillView, SlotCache
from assay.model.transformer import ModelConfig, Transformer
from assay.seeds import generator
from assay.tracing.hooks import LOGITS, Site, SiteModules, SiteObserver, observe_modules, observe_sites

PassObserver = Callable[[Site, Tensor, int], Tensor | None]
ForwardMode = Callable[[Tensor, PassObserver], None]
EVERYTHING = slice(None)


def plain_forward(model: Transformer) -> ForwardMode:
    """One forward pass over the tokens and nothing else."""
    def run(tokens_BT: Tensor, look: PassObserver) -> None:
        see = cropped_observer(look)
        with torch.no_grad(), observe_sites(model, see):
            see(Site(None, LOGITS), model.logits(model.hidden(tokens_BT)))

    return run


def batched_forward(model: Transformer, *, rows: int = 2, padding: int = 3) -> ForwardMode:
    """Forward pass of a text between other rows, and behind padding: what stands beside a text may not change what it means."""
    def run(tokens_BT: Tensor, look: PassObserver) -> None:
        (B, T), device = tokens_BT.shape, tokens_BT.device
        shape = (B + rows, T + padding)
        batch = torch.randint(0, model.config.vocab, shape, generator=generator(0, "company", *shape)).to(device)
        documents = torch.zeros(shape, dtype=torch.long, device=device)
        batch[1 : B + 1, padding:] = tokens_BT
        documents[1 : B + 1, :padding] = PADDING
        see = cropped_observer(look, slice(1, B + 1), slice(padding, None))
        with torch.no_grad(), observe_sites(model, see):
            see(Site(None, LOGITS), model.logits(model.hidden(batch, documents=documents)))

    return run


def cached_forward(model: Transformer, *, filled: int) -> ForwardMode:
    """The first `filled` tokens at once, each later one by itself against the keys and values of those before it."""
    def run(tokens_BT: Tensor, look: PassObserver) -> None:
        (B, T), c, device = tokens_BT.shape, model.config, tokens_BT.device
        dtype = model.compute_dtype or model.embed.weight.dtype
        cache = SlotCache(c.depth, B, T, c.kv_heads, c.head_dim, dtype=dtype, device=device)
        slots = torch.arange(B, device=device)
        pieces = [(0, filled), *((t, t + 1) for t in range(filled, T))]
        for start, stop in pieces:
            see = cropped_observer(look, at=start)
            with torch.no_grad(), observe_sites(model, see) as attention:
                filling = PrefillView(cache, cache.places(torch.zeros_like(tokens_BT[:, :filled]), slots))
                view = DecodeView(cache, torch.full_like(slots, start), stop, attention.decoding) if start else filling
                see(Site(None, LOGITS), model.logits(model.hidden(tokens_BT[:, start:stop], cache=view)))

    return run


def cropped_observer(look: PassObserver, rows: slice = EVERYTHING, columns: slice = EVERYTHING, at: int = 0) -> SiteObserver:
    """`look` at some rows and columns of what a model computes; the others go on as they are."""
    def see(site: Site, value: Tensor) -> Tensor | None:
        other = look(site, value[rows, columns], at)
        if other is None:
            return None
        if rows == columns == EVERYTHING:
            return other.to(value.dtype).view_as(value)
        whole = value.clone()
        whole[rows, columns] = other.to(value.dtype).view_as(value[rows, columns])
        return whole

    return see


LLAMA_MODULES = SiteModules("model.layers", "model.norm", "self_attn", {
    "attn norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "attended": ">self_attn.o_proj", "attn out": "self_attn.o_proj", "middle": ">post_attention_layernorm",
    "mlp norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "act": "mlp.act_fn",
    "product": ">mlp.down_proj", "down": "mlp.down_proj", "mixed": "mlp", "residual": ""}, {})
POST_NORMS = {"attn post norm": "post_attention_layernorm", "middle": ">pre_feedforward_layernorm", "mlp norm": "pre_feedforward_layernorm",
              "mlp post norm": "post_feedforward_layernorm"}
GPT2_MODULES = SiteModules("transformer.h", "transformer.ln_f", "attn", {
    "attn norm": "ln_1", "attended": ">attn.c_proj", "attn out": "attn.c_proj", "middle": ">ln_2", "mlp norm": "ln_2",
    "up": "mlp.c_fc", "act": "mlp.act", "down": "mlp.c_proj", "residual": ""}, {"attn.c_attn": ("q", "k", "v")})


def transformers_modules(config: ModelConfig) -> SiteModules:
    """Modules at which transformers has the sites of such a model. Its routers lay all tokens in one row, and are not looked at."""
    if config.family == "gpt2":
        return GPT2_MODULES
    modules = LLAMA_MODULES
    if config.post_norms:
        others = POST_NORMS if config.pre_norms else POST_NORMS | {"middle": ">mlp"}
        modules = modules._replace(sites={**modules.sites, **others})
    if config.family == "phi3":
        sites = {name: path for name, path in modules.sites.items() if name not in ("q", "k", "v", "gate", "up")}
        modules = modules._replace(sites=sites | {"act": "mlp.activation_fn"}, fused={
            "self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")})
    return modules


def load_with_transformers(path: Path, dtype: torch.dtype, *, fused: bool = True) -> nn.Module:
    """The folder or GGUF file through transformers; never code from the folder. `fused`: its attention is PyTorch's kernel, which knows
    neither soft caps nor sinks."""
    try:
        import transformers
    except ImportError:
        raise UsageError("transformers is not installed, so it cannot run this model; pip install 'assay[hf]'") from None
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.is_file():
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    loader: Any = transformers.AutoModelForCausalLM
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # their progress bars and advice
        warnings.simplefilter("ignore")
        return loader.from_pretrained(**where, dtype=dtype, attn_implementation="sdpa" if fused else "eager", local_files_only=True,
                                      trust_remote_code=False).eval()


def transformers_forward(model: nn.Module, config: ModelConfig) -> ForwardMode:
    """A causal language model of transformers; `config` is the geometry as we read it from the same files."""
    if config.family == "assay":
        raise UsageError(f"transformers has no {config.family!r} architecture; only Assay runs it")

    modules = transformers_modules(config)

    def run(tokens_BT: Tensor, look: PassObserver) -> None:
        see = cropped_observer(look)
        with torch.no_grad(), observe_modules(model, config, modules, see):
            see(Site(None, LOGITS), model(tokens_BT, use_cache=False).logits)

    return run

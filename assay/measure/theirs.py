"""The same sites in a model that transformers runs, so that two implementations of the same weights can be compared inside.

Where its attention is eager, what attention is given is not seen: `loaded` asks for the fused one.
"""

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from assay.edit.sites import hooked
from assay.errors import UsageError
from assay.measure.sites import EMBEDDING, FINAL_NORM, LOGITS, Site
from assay.measure.tap import Attention, See, after, before, in_parts, watched
from assay.measure.ways import Look, Runner, framed
from assay.model.transformer import ModelConfig, qkv_rows

# site → module in a layer, and whether the site is what enters it
LLAMA = {"attn norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
         "attended": ">self_attn.o_proj", "attn out": "self_attn.o_proj", "middle": ">post_attention_layernorm",
         "mlp norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "act": "mlp.act_fn",
         "product": ">mlp.down_proj", "down": "mlp.down_proj", "residual": ""}
GPT2 = {"attn norm": "ln_1", "attended": ">attn.c_proj", "attn out": "attn.c_proj", "middle": ">ln_2", "mlp norm": "ln_2",
        "up": "mlp.c_fc", "act": "mlp.act", "down": "mlp.c_proj", "residual": ""}
# layers, final norm, attention in a layer
PLACES = {"llama": ("model.layers", "model.norm", "self_attn"), "gpt2": ("transformer.h", "transformer.ln_f", "attn")}


def loaded(path: Path, dtype: torch.dtype) -> nn.Module:
    """The folder or GGUF file through transformers; never code from the folder."""
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
        return loader.from_pretrained(**where, dtype=dtype, attn_implementation="sdpa", local_files_only=True,
                                      trust_remote_code=False).eval()


def theirs(model: nn.Module, config: ModelConfig) -> Runner:
    """A causal language model of transformers; `config` is the geometry as we read it from the same files."""
    if config.family not in ("gpt2", "llama", "mistral", "qwen2", "qwen3"):
        raise UsageError(f"transformers has no {config.family!r} architecture; only Assay runs it")

    def run(tokens_BT: Tensor, look: Look) -> None:
        see = framed(look)
        attention = Attention(see, config.kv_heads)
        layers, _, attn = PLACES[_kind(config)]
        attentions = [model.get_submodule(f"{layers}.{layer}.{attn}") for layer in range(config.depth)]
        with torch.no_grad(), hooked(_hooks(model, config, see)), watched(attention, attentions):
            see(Site(None, LOGITS), model(tokens_BT, use_cache=False).logits)

    return run


def _kind(config: ModelConfig) -> str:
    return "gpt2" if config.family == "gpt2" else "llama"


def _hooks(model: nn.Module, config: ModelConfig, see: See) -> list[RemovableHandle]:
    gpt2 = config.family == "gpt2"
    layers, norm, _ = PLACES[_kind(config)]
    handles = [model.get_submodule(f"{layers}.0").register_forward_pre_hook(before(see, Site(None, EMBEDDING))),
               model.get_submodule(norm).register_forward_hook(after(see, Site(None, FINAL_NORM)))]
    for layer in range(config.depth):
        at = model.get_submodule(f"{layers}.{layer}")
        handles += [_hook(at, module, see, Site(layer, name)) for name, module in (GPT2 if gpt2 else LLAMA).items()]
        if gpt2:
            fused = in_parts(see, [Site(layer, part) for part in "qkv"], qkv_rows(config))
            handles.append(at.get_submodule("attn.c_attn").register_forward_hook(fused))
    return handles


def _hook(layer: nn.Module, name: str, see: See, site: Site) -> RemovableHandle:
    module = layer.get_submodule(name.removeprefix(">"))
    hook: Callable[..., Any] = before(see, site) if name.startswith(">") else after(see, site)
    return module.register_forward_pre_hook(hook) if name.startswith(">") else module.register_forward_hook(hook)

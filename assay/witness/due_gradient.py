"""Due gradient: the mean loss of the due texts and its gradient, each text alone in its row, through transformers' own model.

What a run trains has names of its own (`blocks.0.attn.qkv.weight`: q, k and v one below the other; `lefts` and `rights` of an adapter).
Here they are leaves of the autograd graph, and transformers' parameters are views or sums of them: W + alpha/r · B A.
"""

import contextlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from assay.witness.due_rows import DueText
from assay.witness.due_texts import NotWitnessed, read_fields

TOKENS_TOGETHER = {"cpu": 1024, "cuda": 4096}  # go through the model at a time
KNOWN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
# Our leaf, and the leaves that transformers keeps for its rows, in order.
SPLIT = {"attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
         "attn.out": ("self_attn.o_proj",), "mlp.down": ("mlp.down_proj",), "attn_norm": ("input_layernorm",),
         "mlp_norm": ("post_attention_layernorm",), "attn.q_norm": ("self_attn.q_norm",), "attn.k_norm": ("self_attn.k_norm",)}
SPLIT_GPT2 = {"attn.qkv": ("attn.c_attn",), "attn.out": ("attn.c_proj",), "mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",),
              "attn_norm": ("ln_1",), "mlp_norm": ("ln_2",)}
TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
TOP_GPT2 = {"embed": "transformer.wte", "position": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}


class Adapter(NamedTuple):
    """Adapter as the options describe it: its rank, its scale, and the layers by transformers' leaf names."""

    rank: int
    scale: float
    targets: tuple[str, ...]


class DueGradient(NamedTuple):
    loss: float
    weight: float
    gradients: dict[str, Tensor]


class TwinModel:
    """transformers' model of a folder's config, or of one that is given, fed with whatever weights are asked about. `loss` is what a loss
    is computed in from its logits: where that is fp32, as in a run, 1 - p of a token that the model is sure of has few digits left."""

    def __init__(self, config: Mapping[str, Any] | Path, dtype: torch.dtype, device: str = "cpu", loss: torch.dtype = torch.float64):
        if not importlib.util.find_spec("transformers"):
            raise NotWitnessed("transformers is not installed; pip install 'assay[hf]'")
        fields = config if isinstance(config, Mapping) else read_fields(config / "config.json")
        if not fields:
            raise NotWitnessed(f"{config} is no Hugging Face folder")
        if fields.get("model_type") not in KNOWN_FAMILIES:
            raise NotWitnessed(f"the witness has no model of the family {fields.get('model_type')}")
        from transformers import AutoConfig, AutoModelForCausalLM

        given = {name: value for name, value in fields.items() if name != "model_type"}
        known = AutoConfig.for_model(fields["model_type"], **given) if isinstance(config, Mapping) else AutoConfig.from_pretrained(config)
        known.dtype = torch.float32
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(known, attn_implementation="eager").eval().requires_grad_(False)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)  # not the tables: rotary frequencies in bf16 would be other angles
        self.dtype, self.device, self.loss, self.gpt2 = dtype, device, loss, fields["model_type"] == "gpt2"
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}

    def foreign(self, name: str) -> list[str]:
        """transformers' parameters that hold the rows of one of the run's tensors, in order."""
        stem, kind = name.rpartition(".")[::2]
        if not stem.startswith("blocks."):
            return [f"{(TOP_GPT2 if self.gpt2 else TOP)[stem]}.{kind}"]
        _, layer, leaf = stem.split(".", 2)
        pattern = "transformer.h.{}.{}.{}" if self.gpt2 else "model.layers.{}.{}.{}"
        return [pattern.format(layer, each, kind) for each in (SPLIT_GPT2 if self.gpt2 else SPLIT)[leaf]]

    def views(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        names = self.foreign(name)
        if len(names) == 1:
            turned = self.gpt2 and name.startswith("blocks.") and tensor.ndim == 2  # GPT-2 keeps its matrices transposed
            return {names[0]: tensor.t() if turned else tensor}
        return dict(zip(names, tensor.split([self.shapes[each][0] for each in names]), strict=True))

    def adapted(self, name: str, adapter: Adapter) -> list[str]:
        """Layers of the matrix `name` that the options adapt, in the order of its rows."""
        return [each for each in self.foreign(name) if {each.removesuffix(".weight"), each.split(".")[-2]} & {*adapter.targets}]

    def adaptable(self, adapter: Adapter) -> set[str]:
        """Every layer that the options adapt."""
        return {name for name, shape in self.shapes.items() if len(shape) == 2 and not name.endswith(("embed_tokens.weight", "wte.weight"))
                and {name.removesuffix(".weight"), name.split(".")[-2]} & {*adapter.targets}}

    def logits(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """(B, T, V) in the loss's precision, whatever they were computed in."""
        embedding = f"{(TOP_GPT2 if self.gpt2 else TOP)['embed']}.weight"
        parameters = {name: tensor for name, tensor in weights.items() if name in self.shapes}
        if missing := sorted(self.shapes.keys() - parameters.keys()):
            raise NotWitnessed(f"the files do not hold {missing[0]} under the name that transformers has for it")
        parameters["lm_head.weight"] = weights["lm_head.weight"] if "lm_head.weight" in self.shapes else parameters[embedding]
        return torch.func.functional_call(self.model, parameters, (tokens,), {"use_cache": False}).logits.to(self.loss)


# (the student's logits, tokens, the texts) → (B, T − 1): what predicting each token but the first costs
CostOfTokens = Callable[[Tensor, Tensor, Sequence[DueText]], Tensor]


def cross_entropy(logits: Tensor, tokens: Tensor, _: Sequence[DueText]) -> Tensor:
    return -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def blended(teacher: TwinModel, theirs: Mapping[str, Tensor], options: Mapping[str, Any], vocab: int | None) -> CostOfTokens:
    """kd_weight · τ² · D(teacher, student) + ce_weight · cross-entropy, both distributions over the ids that the tokenizer has."""
    theirs = {name: tensor.to(teacher.device, teacher.dtype) for name, tensor in theirs.items()}
    hot, share = options["temperature"], options["beta"]

    def costs(logits: Tensor, tokens: Tensor, texts: Sequence[DueText]) -> Tensor:
        with torch.no_grad():
            taught = (teacher.logits(theirs, tokens)[:, :-1, :vocab] / hot).log_softmax(-1)
        learned = (logits[:, :-1, :vocab] / hot).log_softmax(-1)
        if (few := options.get("divergence_top_k")) is not None and few < learned.shape[-1]:
            likeliest = (learned.detach() if options["divergence"] == "reverse" else taught).topk(few, -1).indices
            taught, learned = (few_and_others(each, likeliest) for each in (taught, learned))
        mixed = torch.logaddexp(taught + math.log(share), learned + math.log1p(-share)) if options["divergence"] == "jsd" else learned
        if options["divergence"] == "jsd":
            apart = share * kl(taught, mixed) + (1 - share) * kl(learned, mixed)
        else:
            apart = kl(taught, learned) if options["divergence"] == "forward" else kl(learned, taught)
        return options["kd_weight"] * hot**2 * apart + options["ce_weight"] * cross_entropy(logits, tokens, texts)
    return costs


def few_and_others(logprobs: Tensor, likeliest: Tensor) -> Tensor:
    """Log-probabilities of these tokens, and of any other."""
    kept = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, likeliest, True)
    others = torch.where(kept, -math.inf, logprobs).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, likeliest), others], -1)


def kl(one: Tensor, other: Tensor) -> Tensor:
    """KL(one ‖ other), of log-probabilities."""
    return (one.exp() * (one - other)).sum(-1)


def a_few_at_a_time(texts: Sequence[DueText], most: int) -> Iterator[list[DueText]]:
    """Texts in groups of similar length, so that little is padding; at most so many tokens in each."""
    some: list[DueText] = []
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        if some and (len(some) + 1) * len(text.tokens) > most:
            yield some
            some = []
        some.append(text)
    yield some


def right_padded(texts: Sequence[DueText]) -> tuple[Tensor, Tensor]:
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.tensor([text.tokens + [0] * (longest - len(text.tokens)) for text in texts])
    learned = torch.tensor([text.weights + [0.0] * (longest - len(text.weights)) for text in texts], dtype=torch.float64)
    return tokens, learned


def due_gradient(twin: TwinModel, trained: Mapping[str, Tensor], frozen: Mapping[str, Tensor], adapter: Adapter | None,
                 texts: Sequence[DueText], costs: CostOfTokens = cross_entropy, divisor: float | None = None) -> DueGradient:
    """Gradient of the mean over all learned tokens of the step: one sum, divided once. Padding stands behind a text, where no model
    looks."""
    leaves = {name: tensor.to(twin.device, twin.dtype, copy=True).requires_grad_() for name, tensor in trained.items()}
    texts = [text for text in texts if any(text.weights)]
    weight, total = sum(sum(text.weights) for text in texts), 0.0
    divisor = divisor or weight
    for some in a_few_at_a_time(texts, TOKENS_TOGETHER[twin.device.partition(":")[0]]):
        tokens, learned = (part.to(twin.device) for part in right_padded(some))
        loss = (costs(twin.logits(live_weights(twin, leaves, frozen, adapter), tokens), tokens, some) * learned[:, 1:]).sum()
        (loss / divisor).backward()
        total += float(loss.detach())
    zeros = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    return DueGradient(total / divisor, weight, {name: (zeros[name] if leaf.grad is None else leaf.grad).double()
                                                for name, leaf in leaves.items()})


def live_weights(twin: TwinModel, leaves: Mapping[str, Tensor], frozen: Mapping[str, Tensor], adapter: Adapter | None) -> dict[str, Tensor]:
    if adapter is None:
        return {each: view for name, leaf in leaves.items() for each, view in twin.views(name, leaf).items()}
    weights = {name: tensor.to(twin.device, twin.dtype) for name, tensor in frozen.items()}
    for stem in dict.fromkeys(name.rsplit(".", 2)[0] for name in leaves):
        for number, each in enumerate(twin.adapted(f"{stem}.weight", adapter)):
            change = adapter.scale * leaves[f"{stem}.lefts.{number}"] @ leaves[f"{stem}.rights.{number}"]
            weights[each] = weights[each] + (change.t() if twin.gpt2 else change)
    return weights

# ---------------------------------------------------------------- files


def read_safetensors(folder: Path, single: str = "model.safetensors", device: str = "cpu") -> dict[str, Tensor]:
    """Read all tensors of a folder, sharded or not, on a device."""
    index = folder / f"{single}.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [single]
    if not all((folder / file).is_file() for file in files):
        raise NotWitnessed(f"{folder} holds no {single}")
    found: dict[str, Tensor] = {}
    with contextlib.ExitStack() as open_files:
        for file in files:
            handle = open_files.enter_context(safe_open(str(folder / file), "pt", device=device))
            found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
    return found

"""LoRA: plan which layers to adapt, attach a patch's low-rank part as live layers, detach it as a Patch.

One forward path: a LoraLinear stands where the Linear stood, and q, k and v keep adapters of their own although their rows
share one matrix.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from assay.errors import UsageError
from assay.model.families import FAMILIES, hf_layout, parameter_shapes
from assay.model.patch import LowRank, Patch
from assay.model.transformer import Linear, ModelConfig, Transformer
from assay.seeds import generator


@dataclass(frozen=True)
class LoraSite:
    """A linear layer as PEFT names it, and the rows of our matrix that hold it."""

    foreign: str  # model.layers.0.self_attn.q_proj
    parameter: str  # blocks.0.attn.qkv.weight
    start: int
    stop: int


class LoraLinear(nn.Module):
    """base(x) + scale · left (right x), for each adapted range of rows."""

    def __init__(self, base: Linear, parts: tuple[LowRank, ...]):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.ranges = [(part.start, part.stop, part.scale) for part in parts]
        self.lefts = nn.ParameterList(part.left.clone() for part in parts)
        self.rights = nn.ParameterList(part.right.clone() for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        out, done, deltas = self.base(x), 0, []
        for (start, stop, scale), left, right in zip(self.ranges, self.lefts, self.rights, strict=True):
            if start > done:
                deltas.append(out.new_zeros(()).expand(*out.shape[:-1], start - done))
            deltas.append(scale * F.linear(F.linear(x, right.to(x.dtype)), left.to(x.dtype)))
            done = stop
        if done < out.shape[-1]:
            deltas.append(out.new_zeros(()).expand(*out.shape[:-1], out.shape[-1] - done))
        return out + (torch.cat(deltas, -1) if len(deltas) > 1 else deltas[0])

    @property
    def weight(self) -> Tensor:
        """The matrix that it amounts to, for whoever takes a head's matrix together with the states; gradients pass."""
        whole, done, pieces = self.base.weight, 0, []
        for (start, stop, scale), left, right in zip(self.ranges, self.lefts, self.rights, strict=True):
            pieces += [whole[done:start], whole[start:stop] + scale * (left @ right).to(whole.dtype)]
            done = stop
        return torch.cat([*pieces, whole[done:]])

    def parts(self) -> tuple[LowRank, ...]:
        return tuple(LowRank(start, stop, left.detach(), right.detach(), scale)
                     for (start, stop, scale), left, right in zip(self.ranges, self.lefts, self.rights, strict=True))


def lora_sites(config: ModelConfig) -> dict[str, LoraSite]:
    """Every layer that LoRA can adapt, under its foreign name."""
    found = {}
    for ours, pieces in hf_layout(config).items():
        if not ours.endswith(".weight") or len(parameter_shapes(config)[ours]) != 2 or ours.startswith(("embed", "position")):
            continue
        start = 0
        for piece in pieces:
            stop = start + (piece.rows or parameter_shapes(config)[ours][0])
            name = piece.name.removesuffix(".weight")
            found[name] = LoraSite(name, ours, start, stop)
            start = stop
    return found


def plan(config: ModelConfig, targets: tuple[str, ...] | None = None) -> list[LoraSite]:
    """The sites whose leaf name is among `targets` (default: every linear layer in the blocks). A target that matches
    nothing is an error: an adapter that adapts less than was asked looks like one that learns little."""
    every = lora_sites(config)
    wanted = targets or FAMILIES[config.family].adaptable
    chosen = [site for name, site in every.items() if name.rpartition(".")[2] in wanted or name in wanted]
    idle = [t for t in wanted if not any(s.foreign == t or s.foreign.endswith(f".{t}") for s in chosen)]
    if idle and targets:
        known = sorted({name.rpartition(".")[2] for name in every})
        raise UsageError(f"LoRA target(s) {', '.join(idle)} match no layer of this {config.family}; expected among: {', '.join(known)}")
    return chosen


def fresh(config: ModelConfig, planned: list[LoraSite], rank: int, scale: float, seed: int, parent: str | None) -> Patch:
    """A new adapter: left = 0, so that it equals no adapter; right as in the LoRA paper's implementation."""
    low_rank: dict[str, list[LowRank]] = {}
    for site in planned:
        width = parameter_shapes(config)[site.parameter][1]
        right = torch.empty(rank, width).uniform_(-1, 1, generator=generator(seed, "lora", site.foreign)) / math.sqrt(width)
        part = LowRank(site.start, site.stop, torch.zeros(site.stop - site.start, rank), right, scale)
        low_rank.setdefault(site.parameter, []).append(part)
    return Patch(parent, {name: tuple(parts) for name, parts in low_rank.items()})


def attach(model: Transformer, patch: Patch) -> list[nn.Parameter]:
    """Make the patch's low-rank part live. Everything else is frozen; returns what may be trained."""
    model.requires_grad_(False)
    for name, parts in patch.low_rank.items():
        owner, leaf = name.removesuffix(".weight").rpartition(".")[::2]
        base = model.get_submodule(f"{owner}.{leaf}" if owner else leaf)
        if isinstance(base, LoraLinear):
            raise UsageError(f"{name} has an adapter already; detach or merge it before attaching another")
        assert isinstance(base, Linear), f"{name} is not a linear layer"
        setattr(model.get_submodule(owner), leaf, LoraLinear(base, parts))
    with torch.no_grad():
        for name, tensor in patch.replaced.items():
            model.get_parameter(name).copy_(tensor)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def detach(model: Transformer, parent: str | None) -> Patch:
    """Put the plain layers back, bit for bit, and return what was learned."""
    low_rank = {}
    for name, module in [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLinear)]:
        owner, leaf = name.rpartition(".")[::2]
        setattr(model.get_submodule(owner), leaf, module.base)
        low_rank[f"{name}.weight"] = module.parts()
    return Patch(parent, low_rank)

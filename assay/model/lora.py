"""LoRA: plan which layers to adapt, attach a patch's low-rank part as live layers, detach it as a Patch.

One forward path: a LoraLinear stands where the Linear stood, and q, k and v keep adapters of their own although their rows
share one matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.kernels.low_rank import adapted_linear, adapts_in_place, low_rank_output
from assay.model.families import FAMILIES, hf_layout, parameter_shapes
from assay.model.patch import LowRank, Patch
from assay.model.transformer import ExpertLinear, Linear, ModelConfig, Transformer
from assay.seeds import generator


@dataclass(frozen=True)
class LoraSite:
    """A linear layer as PEFT names it, and the rows of our matrix that hold it.

    Where PEFT has one parameter of all experts, `stacked`, each expert's part of it is a layer here, under a name with its number.
    """

    foreign: str  # model.layers.0.self_attn.q_proj
    parameter: str  # blocks.0.attn.qkv.weight
    start: int
    stop: int
    stacked: bool = False


class LoraLinear(nn.Module):
    """base(x) + scale · left (right x), for each adapted range of rows."""

    experts = 1

    def __init__(self, base: Linear, parts: tuple[LowRank, ...]):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.ranges = [(part.start, part.stop, part.scale) for part in parts]
        self.lefts = nn.ParameterList(part.left.clone() for part in parts)
        self.rights = nn.ParameterList(part.right.clone() for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        if type(self.base) is Linear and adapts_in_place(x, self.base.weight, self.base.bias):
            return adapted_linear(x, self.base.weight, self.ranges, self.lefts, self.rights)
        out = self.base(x)
        return out + low_rank_output(x, out.shape[-1], self.ranges, self.lefts, self.rights)

    @torch.no_grad()
    def load(self, parts: tuple[LowRank, ...]) -> None:
        """Other values of the same layers, ranks and scales."""
        for (left, right), own_left, own_right in zip(held_factors(parts, self.experts), self.lefts, self.rights, strict=True):
            own_left.copy_(left)
            own_right.copy_(right)

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


class LoraExperts(LoraLinear):
    """LoRA layer whose matrix holds one matrix an expert: its tokens meet its own factors. Those of all experts are one tensor, so that a
    step in which an expert has no tokens is a step of that tensor all the same."""

    def __init__(self, base: ExpertLinear, parts: tuple[LowRank, ...]):
        nn.Module.__init__(self)
        self.base: ExpertLinear = base.requires_grad_(False)
        self.experts, self.outer = base.experts, base.out_features // base.experts
        several = len(parts) // base.experts
        self.ranges = [(part.start, part.stop, part.scale) for part in parts[:several]]  # of the first expert
        due = [(start + e * self.outer, stop + e * self.outer, scale) for e in range(base.experts) for start, stop, scale in self.ranges]
        if [(part.start, part.stop, part.scale) for part in parts] != due:
            raise UsageError(f"an adapter for some of {base.experts} experts, or for other matrices of each, is not supported; "
                             "adapt the same matrices of all of them")
        lefts, rights = zip(*held_factors(parts, base.experts), strict=True)
        self.lefts, self.rights = nn.ParameterList(lefts), nn.ParameterList(rights)

    def forward(self, x_ND: Tensor, counts: Sequence[int]) -> Tensor:  # type: ignore[override]
        added = []
        for expert, own in enumerate(x_ND.split(list(counts))):
            lefts, rights = ([factors[expert] for factors in side] for side in (self.lefts, self.rights))
            added.append(low_rank_output(own, self.outer, self.ranges, lefts, rights))
        return self.base(x_ND, counts) + torch.cat(added)

    def parts(self) -> tuple[LowRank, ...]:
        return tuple(LowRank(start + e * self.outer, stop + e * self.outer, left[e].detach(), right[e].detach(), scale)
                     for e in range(self.base.experts)
                     for (start, stop, scale), left, right in zip(self.ranges, self.lefts, self.rights, strict=True))


def held_factors(parts: tuple[LowRank, ...], experts: int) -> list[tuple[Tensor, Tensor]]:
    """The factors as the live layer holds them: of a mixture's matrix, those of all experts in one tensor."""
    if experts == 1:
        return [(part.left, part.right) for part in parts]
    several = len(parts) // experts
    return [(torch.stack([part.left for part in parts[i::several]]), torch.stack([part.right for part in parts[i::several]]))
            for i in range(several)]


def live_factors(config: ModelConfig, patch: Patch) -> dict[str, Tensor]:
    """A patch's factors under the names that they have in a live model."""
    found: dict[str, Tensor] = {}
    for name, parts in patch.low_rank.items():
        layer = name.removesuffix(".weight")
        for i, (left, right) in enumerate(held_factors(parts, experts_in(config, name))):
            found |= {f"{layer}.lefts.{i}": left, f"{layer}.rights.{i}": right}
    return found


def experts_in(config: ModelConfig, parameter: str) -> int:
    """How many matrices a parameter holds: one, or one for each expert."""
    layer, _, leaf = parameter.removeprefix("blocks.").partition(".")
    mixture = layer.isdigit() and config.mixture_at(int(layer)) and leaf in ("mlp.up.weight", "mlp.down.weight")
    return config.experts.count if mixture and config.experts is not None else 1


def lora_sites(config: ModelConfig) -> dict[str, LoraSite]:
    """Every layer that LoRA can adapt, under its foreign name. Of a mixture's MLPs the experts alone: PEFT takes the same names in a
    dense layer or a shared expert for experts, and drops what it was given for them without a word; where the family has shared
    experts, it drops what it was given for the others too, and takes them as one parameter, as it does gpt-oss's."""
    found = linear_layers(config)
    if config.experts is None:
        return found
    own_names = config.family != "gpt_oss" and config.experts.shared_hidden is None
    kept = {name: site for name, site in found.items() if ".mlp." not in site.parameter or (
        experts_in(config, site.parameter) > 1 and own_names)}
    return kept if own_names else kept | stacked_experts(config)


def stacked_experts(config: ModelConfig) -> dict[str, LoraSite]:
    """Gate and up of an expert share their factors there, being rows of one matrix."""
    found = {}
    for ours, (rows, _) in ((name, shape) for name, shape in parameter_shapes(config).items() if experts_in(config, name) > 1):
        layer, leaf = ours.split(".")[1], "gate_up_proj" if ours.endswith("up.weight") else "down_proj"
        each = rows // experts_in(config, ours)
        for expert in range(experts_in(config, ours)):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"
            found[name] = LoraSite(name, ours, expert * each, (expert + 1) * each, stacked=True)
    return found


def linear_layers(config: ModelConfig) -> dict[str, LoraSite]:
    """Every linear layer that has a foreign name of its own."""
    found = {}
    for ours, pieces in hf_layout(config).items():
        if not ours.endswith(".weight") or len(parameter_shapes(config)[ours]) != 2 or ours.startswith(("embed", "position")):
            continue
        if pieces[0].experts is not None:  # one tensor of all experts
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
    halves = {name.rpartition(".")[2] for name in (site.foreign for site in chosen if experts_in(config, site.parameter) > 1)
              } & {"gate_proj", "up_proj"}
    if len(halves) == 1:
        raise UsageError(f"LoRA target {halves.pop()} of a {config.family}'s experts without its other half: PEFT holds gate_proj and "
                         "up_proj as one matrix there, and loads no adapter of one alone; name both")
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
        live = LoraExperts(base, parts) if isinstance(base, ExpertLinear) else LoraLinear(base, parts)
        setattr(model.get_submodule(owner), leaf, live)
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

"""AdamW with its moments in 8 bits: a code for each and an fp32 scale for 256 of them (Dettmers et al., arXiv 2110.02861).

The codes are levels of the paper's dynamic map, as in bitsandbytes and torchao, whose optimizers are not used: their states are tensor
subclasses that no safetensors file holds, and neither knows `found_inf`. Each moment goes to its nearest level. Of the second its root is
kept, which spans half as many decades, and only 0 becomes 0: where a small one rounds to 0, as theirs may, its element takes a step of
m / eps.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from assay.learn.optim import adamw_groups
from assay.learn.stochastic_rounding import stochastically_rounded
from assay.seeds import derive

MOMENTS_A_SCALE = 256  # moments that share a scale
LEAST_CODED = 4096  # elements: what is smaller keeps its moments in fp32, as with bitsandbytes
STRETCH = 4.0  # how much farther than AdamW's a step can be: the lowest decade of the map has one level, or two
_MOMENTS = {"exp_avg": True, "root_avg_sq": False}  # and whether it has a sign


def adamw_8bit(named_params: Iterable[tuple[str, nn.Parameter]], lr: float, betas: tuple[float, float] = (0.9, 0.95),
               weight_decay: float = 0.1, eps: float = 1e-8) -> "LowBitAdamW":
    """AdamW with 8-bit moments. As in `adamw`, embeddings and everything that is not a matrix do not decay."""
    return LowBitAdamW(adamw_groups(named_params, weight_decay), {"lr": lr, "betas": betas, "eps": eps})


def adamw_bf16_masters(named_params: Iterable[tuple[str, nn.Parameter]], lr: float, betas: tuple[float, float] = (0.9, 0.95),
                       weight_decay: float = 0.1, eps: float = 1e-8, *, seed: int, coded: bool = False) -> "LowBitAdamW":
    """AdamW for weights in bf16, with the groups of `adamw`: each step is computed in fp32 and rounded stochastically. `coded`: with
    moments in 8 bits."""
    groups = adamw_groups(named_params, weight_decay, masters=torch.bfloat16)
    return LowBitAdamW(groups, {"lr": lr, "betas": betas, "eps": eps}, coded=coded, seed=seed)


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW with 8-bit moments or bf16 weights, made by `adamw_8bit` or `adamw_bf16_masters`. Born with its whole state, every entry a
    plain tensor."""

    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], *, coded: bool = True, seed: int = 0):
        super().__init__([group for group in groups if group["params"]], defaults)
        self.coded = coded
        held = [p for group in self.param_groups for p in group["params"]]
        self._keys = {p: derive(seed, "rounding", number) for number, p in enumerate(held)}
        for p in held:
            self.state[p] = {"step": torch.zeros((), device=p.device)}
            for name, signed in _MOMENTS.items():
                self.state[p] |= self._stored(name, torch.zeros_like(p, dtype=torch.float32), signed)

    def _stored(self, name: str, values: Tensor, signed: bool) -> dict[str, Tensor]:
        return _stored(name, values, signed, LEAST_CODED if self.coded else math.inf)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes the gradients"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """A step to be skipped moves nothing, on the device, without asking whether."""
        state, (first, second), grad = self.state[p], group["betas"], p.grad
        assert grad is not None
        keep = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        if self.found_inf is not None:
            grad = torch.where(self.found_inf > 0, 0.0, grad)
        state["step"] += keep
        held = {name: _read(state, name, p.shape, signed) for name, signed in _MOMENTS.items()}
        exp_avg = held["exp_avg"].lerp(grad.float(), 1 - first)
        root = (second * held["root_avg_sq"].square() + (1 - second) * grad.float().square()).sqrt()
        step = state["step"].clamp(min=1)
        quotient = (exp_avg / (1 - first**step)) / (root / (1 - second**step).sqrt() + group["eps"])
        after = p.float().mul_(1 - group["lr"] * group["weight_decay"] * keep).sub_(group["lr"] * keep * quotient)  # p itself in fp32
        if p.dtype == torch.bfloat16:
            p.copy_(stochastically_rounded(after, self._keys[p], state["step"]))
        for name, values in (("exp_avg", exp_avg), ("root_avg_sq", root)):
            for key, made in self._stored(name, values, _MOMENTS[name]).items():
                there = state[key]
                there.copy_(made if self.found_inf is None else torch.where(self.found_inf > 0, there, made))

# ---------------------------------------------------------------- codes


def _stored(name: str, values: Tensor, signed: bool, least: float) -> dict[str, Tensor]:
    if values.numel() < least:
        return {name: values}
    codes, scale = encode_moments(values, signed)
    return {f"{name}_codes": codes, f"{name}_scale": scale}


def _read(state: dict[str, Tensor], name: str, shape: torch.Size, signed: bool) -> Tensor:
    return state[name] if name in state else decode_moments(state[f"{name}_codes"], state[f"{name}_scale"], shape, signed)


def encode_moments(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales of the values in order, each the nearest level; without a sign the lowest but 0 for all that are not 0."""
    flat = nn.functional.pad(values.flatten(), (0, -values.numel() % MOMENTS_A_SCALE)).view(-1, MOMENTS_A_SCALE)
    scale = flat.abs().amax(1)
    shares = flat / torch.where(scale > 0, scale, 1.0)[:, None]
    levels = dynamic_map(signed, values.device)
    codes = torch.bucketize(shares, (levels[1:] + levels[:-1]) / 2)
    codes = codes if signed else codes.maximum((shares > 0).to(codes.dtype))
    return codes.to(torch.uint8).flatten()[: values.numel()], scale


def decode_moments(codes: Tensor, scale: Tensor, shape: torch.Size, signed: bool) -> Tensor:
    levels = dynamic_map(signed, codes.device)[codes.int()]
    return (levels * scale.repeat_interleave(MOMENTS_A_SCALE)[: len(levels)]).view(shape)


@functools.cache
def dynamic_map(signed: bool, device: torch.device) -> Tensor:
    """256 levels in [−1, 1] or [0, 1], sorted: seven decades, each with twice as many evenly spaced ones as the decade below."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        means = (10 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        found += means + ([-value for value in means] if signed else [])
    return torch.tensor(sorted(found)).to(device)

"""Batched LoRA: a low-rank adapter of its own for every row of a batch, as test-time training needs, or one that all rows share.

A BatchedLora stands where the Linear stood, as LoraLinear does, and its factors have a leading dimension of slots. All factors
of all slots are the rows of one matrix, so that a slot is reset, stepped and fingerprinted by its row. A shared adapter is one row.

Shapes: B slots (rows of the batch), T time, N elements of one slot's patch, r rank.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.model.lora import LoraSite
from assay.model.patch import LowRank, Patch
from assay.model.transformer import Linear, ModelConfig, Transformer, qkv_rows

TTT_TARGETS = ("q", "k", "v", "o", "mlp", "head")
_CHUNK = 1 << 20  # columns that are summed at once
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


class BatchedLora(nn.Module):
    """base(x) + scale · left (right x) for each adapted range of rows, with row b's own factors for row b of the batch."""

    def __init__(self, base: Linear, ranges: list[tuple[int, int, float]]):
        super().__init__()
        self.base, self.ranges = base, ranges
        self.factors: list[tuple[Tensor, Tensor]] = []  # (B, rows, r) and (B, r, in) of each range, handed over before each pass

    def forward(self, x_BTD: Tensor) -> Tensor:
        out, done, deltas = self.base(x_BTD), 0, []
        for (start, stop, scale), (left, right) in zip(self.ranges, self.factors, strict=True):
            if start > done:
                deltas.append(out.new_zeros(()).expand(*out.shape[:-1], start - done))
            inner_BTr = torch.bmm(x_BTD, right.mT.to(x_BTD.dtype)) * scale
            deltas.append(torch.bmm(inner_BTr, left.mT.to(x_BTD.dtype)))
            done = stop
        if done < out.shape[-1]:
            deltas.append(out.new_zeros(()).expand(*out.shape[:-1], out.shape[-1] - done))
        return out + (deltas[0] if len(deltas) == 1 else torch.cat(deltas, -1))


class BatchedAdapters:
    """`slots` copies of a patch, each learning apart, or one that all of them share. `state_BN` is all there is to know of them: row b
    holds slot b's factors, and of a shared adapter there is one row."""

    def __init__(self, patch: Patch, slots: int, device: torch.device | str = "cpu", *, shared: bool = False):
        self.patch, self.slots, self.shared = patch, slots, shared
        pieces = [(name, factor) for name, parts in patch.low_rank.items() for part in parts for factor in (part.left, part.right)]
        self._shapes = [tuple(factor.shape) for _, factor in pieces]
        self.first_N = torch.cat([factor.detach().float().flatten() for _, factor in pieces]).to(device)
        rights = [torch.full((factor.numel(),), place % 2 == 1) for place, (_, factor) in enumerate(pieces)]
        self.right_N = torch.cat(rights).to(device)  # which elements belong to right factors: LoRA's A
        self.state_BN = self.first_N.repeat(1 if shared else slots, 1).requires_grad_()
        self._live: list[BatchedLora] = []

    def row(self, slot: int) -> int:
        """Row of the state that holds a slot's factors."""
        return 0 if self.shared else slot

    @contextlib.contextmanager
    def attached(self, model: Transformer) -> Iterator[None]:
        """Live for the length of the block; afterwards the model has its own layers again, even after an error."""
        learning = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        owners = {name: _owner(model, name) for name in self.patch.low_rank}
        kept = {name: getattr(owner, leaf) for name, (owner, leaf) in owners.items()}
        try:
            model.requires_grad_(False)
            for name, parts in self.patch.low_rank.items():
                layer = BatchedLora(_base(model, name), [(part.start, part.stop, part.scale) for part in parts])
                self._live.append(layer)
                setattr(*owners[name], layer)
            yield
        finally:
            self._live.clear()
            for name, (owner, leaf) in owners.items():
                if kept[name] is None:  # a tied model's head is no module
                    delattr(owner, leaf)
                setattr(owner, leaf, kept[name])
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(learning[name])

    def bind(self, dtype: torch.dtype = torch.float32) -> None:
        """Hand every layer its factors as views of the state; before each pass, so that each has a graph of its own. In `dtype`, what
        the model computes in: rounded all at once, not factor by factor, which on a GPU is a thousand small kernels less."""
        sizes = [rows * columns for rows, columns in self._shapes]
        parts = self.state_BN.to(dtype).split(sizes, 1)
        views = iter([part.view(-1, *shape).expand(self.slots, *shape) for part, shape in zip(parts, self._shapes, strict=True)])
        for layer in self._live:
            layer.factors = [(next(views), next(views)) for _ in layer.ranges]

    @torch.no_grad()
    def begin(self, slot: int, *, warm: bool) -> None:
        """The slot is as at first; `warm` keeps its right factors as they are and begins with the left ones at zero. Not of a shared
        adapter, which goes on as it is."""
        row_N = self.state_BN[slot]
        row_N.copy_(torch.where(self.right_N, row_N, 0.0) if warm else self.first_N)

    @torch.no_grad()
    def fingerprints(self) -> list[str]:
        """An exact checksum of each slot's bits and their places, made on the device: integer sums wrap and have no order."""
        bits_BN = self.state_BN.detach().view(torch.int32)
        total_B = torch.zeros(len(bits_BN), dtype=torch.int64, device=bits_BN.device)
        for start in range(0, bits_BN.shape[1], _CHUNK):
            part_BC = bits_BN[:, start : start + _CHUNK].long()
            place_C = torch.arange(start, start + part_BC.shape[1], device=bits_BN.device)
            total_B += ((part_BC + 1) * ((2 * place_C + 1) * _ODD)).sum(1)
        found = [f"{total % (1 << 64):016x}" for total in total_B.tolist()]
        return [found[self.row(slot)] for slot in range(self.slots)]

    @torch.no_grad()
    def norms(self, slot: int) -> tuple[float, float]:
        """Norm of the left factors together, and of the right ones relative to their first."""
        left, right = (torch.where(of, self.state_BN[self.row(slot)], 0.0).norm() for of in (~self.right_N, self.right_N))
        return float(left), float(right / torch.where(self.right_N, self.first_N, 0.0).norm())

    def detached(self, slot: int) -> Patch:
        """Adapter of a slot, as a Patch of the model that it is for."""
        sizes = [rows * columns for rows, columns in self._shapes]
        views = iter([part.view(shape).detach().clone().cpu() for part, shape in
                      zip(self.state_BN[self.row(slot)].split(sizes), self._shapes, strict=True)])
        return Patch(self.patch.parent, {name: tuple(LowRank(part.start, part.stop, next(views), next(views), part.scale) for part in parts)
                                         for name, parts in self.patch.low_rank.items()})


def ttt_sites(config: ModelConfig, targets: tuple[str, ...]) -> list[LoraSite]:
    """LoRA sites of the targets in our matrices. The head of a tied model is adapted as a head alone: its embedding stays."""
    unknown = [target for target in targets if target not in TTT_TARGETS]
    if unknown or not targets or len(set(targets)) < len(targets):
        raise UsageError(f"targets {' '.join(targets) or '(none)'}: expected some of {', '.join(TTT_TARGETS)}, each once")
    if config.experts is not None and "mlp" in targets:
        raise UsageError(f"targets {' '.join(targets)}: {config.family} has experts in the place of an MLP; leave mlp out")
    q, k, _ = qkv_rows(config)
    rows = {"q": ("attn.qkv", 0, q), "k": ("attn.qkv", q, q + k), "v": ("attn.qkv", q + k, q + 2 * k), "o": ("attn.out", 0, config.width)}
    inner = [("mlp.up", start, start + config.hidden) for start in ((0, config.hidden) if config.gated else (0,))]
    found = []
    for layer in range(config.depth):
        chosen = [rows[target] for target in TTT_TARGETS if target in targets and target in rows]
        chosen += [*inner, ("mlp.down", 0, config.width)] if "mlp" in targets else []
        found += [LoraSite(f"blocks.{layer}.{leaf}:{start}", f"blocks.{layer}.{leaf}.weight", start, stop) for leaf, start, stop in chosen]
    head = LoraSite("head", "embed.weight" if config.tied else "head.weight", 0, config.vocab)
    return [*found, head] if "head" in targets else found


def _owner(model: Transformer, name: str) -> tuple[nn.Module, str]:
    """Module and attribute that hold the matrix: the head's own place, where it is the embedding's."""
    owner, leaf = ("", "head") if name == "embed.weight" else name.removesuffix(".weight").rpartition(".")[::2]
    return model.get_submodule(owner), leaf


def _base(model: Transformer, name: str) -> Linear:
    if name != "embed.weight":
        base = model.get_submodule(name.removesuffix(".weight"))
        if not isinstance(base, Linear):
            raise UsageError(f"{name} has an adapter already; merge it before training at test time")
        return base
    head = Linear(model.config.width, model.config.vocab, bias=False, device="meta")
    head.weight = model.embed.weight
    return head

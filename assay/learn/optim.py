"""The optimizers: AdamW, and Muon, whose matrices move by orthogonalised momentum and everything else by AdamW.

Both are a `torch.optim.Optimizer` over fp32 parameters with fp32 moments. Both are born with their whole state, so that
`state_tensors` always names all of it and `load_state_tensors` can be strict. On a GPU both leave weights and state
untouched where `found_inf` is 1, the sign that torch's gradient scaler and our loop give.

`torch.optim.Muon` (2.9 to 2.13) is not used: it takes one matrix at a time, always in bf16, with one fixed polynomial,
would orthogonalise q, k and v together where they are rows of one matrix, and does not know `found_inf`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_update

from assay.errors import ArtifactError, UsageError

EMBEDDINGS, _HEAD = (".embed.weight", ".position.weight"), ".head.weight"
BATCH_ELEMENTS = 1 << 26  # matrices orthogonalised together: a quarter of a gigabyte in fp32, whatever the model's size

# Polar Express (Amsel, Persson, Musco, Gower: arXiv 2505.16932, Algorithm 1): for each iteration the odd quintic
# a·x + b·x³ + c·x⁵ that brings singular values in [1e-3, 1] closest to 1, given the iterations before it.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_SAFETY = 1.01  # the paper's: rounding may lift a singular value above 1, where these polynomials explode

Named = Iterable[tuple[str, torch.nn.Parameter]]


# ── the two optimizers ────────────────────────────────────────────────────────────────────────────────────────────────

def adamw(named_params: Named, lr: float, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.1,
          eps: float = 1e-8, moments: str | None = None) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; embeddings and everything that is not a matrix do not decay.

    `moments` is where the moments lie before the first step, if not beside their parameters: those that are to be sharded wait on the CPU.
    """
    groups = adamw_groups(named_params, weight_decay)
    params = [p for group in groups for p in group["params"]]
    fused = _fused(params)
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=fused)
    for p in params:
        optimizer.state[p] = _adamw_state(p, fused, moments)
    return optimizer


def adamw_groups(named_params: Named, weight_decay: float, masters: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Parameter groups of AdamW: those that decay, and those that do not. Other masters than fp32 are for an optimizer that rounds
    stochastically."""
    params = _trainable(named_params, masters)
    decays = {name: parameter_kind(name, p) in ("matrix", "head") for name, p in params.items()}
    return [{"params": [p for name, p in params.items() if decays[name] == decaying],
             "weight_decay": weight_decay if decaying else 0.0} for decaying in (True, False)]


def largest_quotient(betas: tuple[float, float]) -> float:
    """The most that Adam's m̂ / √v̂ can be, whatever the gradients: 1.165 for the β used here, 7.3 for (0.9, 0.999).

    By Cauchy and Schwarz |Σ wᵢgᵢ| ≤ √(Σ wᵢ²/uᵢ) · √(Σ uᵢgᵢ²) for the weights w and u of the two averages. Gradients that grow
    by β₂/β₁ a step reach it; bias correction only lowers it.
    """
    first, second = betas
    return (1 - first) / ((1 - second) * (1 - first**2 / second)) ** 0.5


def muon(named_params: Named, *, lr_matrix: float, lr_embed: float, lr_scalar: float,
         slices: Mapping[str, tuple[int, ...]] | None = None, momentum: float = 0.95, weight_decay: float = 0.0,
         betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, moments: str | None = None) -> "Muon":
    """Muon for the matrices within the blocks; AdamW for embeddings and head (`lr_embed`) and the rest (`lr_scalar`).

    `slices` names the matrices that hold several, one below the other, with the rows of each. `weight_decay` is for
    the matrices alone. `moments` as for `adamw`.
    """
    named, slices = dict(named_params), slices or {}
    params = _trainable(named.items())
    for name, rows in slices.items():
        _check_slices(name, rows, named)
    by_kind: dict[str, dict[str, torch.nn.Parameter]] = {"matrix": {}, "embedding": {}, "head": {}, "vector": {}}
    for name, p in params.items():
        by_kind[parameter_kind(name, p)][name] = p
    matrices, tables = by_kind["matrix"], by_kind["embedding"] | by_kind["head"]
    adam = {"betas": betas, "eps": eps, "orthogonal": False}
    return Muon([
        {"params": list(matrices.values()), "rows": [slices.get(name, (len(p),)) for name, p in matrices.items()],
         "lr": lr_matrix, "momentum": momentum, "weight_decay": weight_decay, "orthogonal": True},
        {"params": list(tables.values()), "lr": lr_embed, **adam},
        {"params": list(by_kind["vector"].values()), "lr": lr_scalar, **adam},
    ], moments)


class Muon(torch.optim.Optimizer):
    """Muon, made by `muon`. Groups with `orthogonal` take Muon's step, the others AdamW's without decay."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], moments: str | None = None) -> None:
        super().__init__([group for group in groups if group["params"]], {})
        for group in self.param_groups:
            group["fused"] = _fused(group["params"])
            for p in group["params"]:
                alone = {"momentum": torch.zeros_like(p, device=moments)} if group["orthogonal"] else None
                self.state[p] = alone or _adamw_state(p, group["fused"], moments)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loop computes the gradients"
        assert self.grad_scale is None, "gradients come unscaled"
        for group in self.param_groups:
            if group["orthogonal"]:
                self._muon_step(group)
            else:
                self._adamw_step(group)

    def _muon_step(self, group: dict[str, Any]) -> None:
        """Nesterov momentum, orthogonalised; √(rows / columns) keeps the change of a tall matrix's outputs the same.

        Jordan et al., 2024 (kellerjordan.github.io/posts/muon). A step to be skipped moves nothing: its gradients are
        taken as 0 and its rates as 0, on the device, without asking whether.
        """
        keep: float | Tensor = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        momentum, lr = group["momentum"], group["lr"]
        for weights, grads, momenta in self._batches(group):
            grad_nrc, momentum_nrc = torch.stack(grads), torch.stack(momenta)
            if self.found_inf is not None:
                grad_nrc = torch.where(self.found_inf > 0, 0.0, grad_nrc)
            momentum_nrc.lerp_(grad_nrc, (1 - momentum) * keep)
            update_nrc = orthogonalised(grad_nrc.lerp_(momentum_nrc, momentum))
            _, rows, columns = update_nrc.shape
            step_nrc = update_nrc * (-lr * max(1.0, rows / columns) ** 0.5 * keep)
            torch._foreach_copy_(momenta, momentum_nrc.unbind())
            if group["weight_decay"]:
                torch._foreach_mul_(weights, 1 - lr * group["weight_decay"] * keep)
            torch._foreach_add_(weights, step_nrc.unbind())

    def _batches(self, group: dict[str, Any]) -> Iterator[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """(weights, gradients, momenta) of matrices of one shape, as views into the parameters and their state."""
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for p, rows in zip(group["params"], group["rows"], strict=True):
            if p.grad is not None:
                for views in zip(p.split(rows), p.grad.split(rows), self.state[p]["momentum"].split(rows), strict=True):
                    by_shape.setdefault(views[0].shape, []).append(views)
        for shape, matrices in by_shape.items():
            most = max(1, BATCH_ELEMENTS // shape.numel())
            for start in range(0, len(matrices), most):
                weights, grads, momenta = zip(*matrices[start : start + most], strict=True)
                yield list(weights), list(grads), list(momenta)

    def _adamw_step(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        state = {key: [self.state[p][key] for p in params] for key in ("exp_avg", "exp_avg_sq", "step")}
        beta1, beta2 = group["betas"]
        adamw_update(params, [p.grad for p in params], state["exp_avg"], state["exp_avg_sq"], [], state["step"],
                     foreach=False, fused=group["fused"], found_inf=self.found_inf, amsgrad=False, maximize=False,
                     beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=0.0, eps=group["eps"])


def orthogonalised(matrices_nrc: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix to each, roughly: directions kept, every singular value brought near 1.

    A singular value of at least a thousandth of the Frobenius norm ends in [0.83, 1.13]; a smaller one comes as near
    to 1 as five steps take it, and 0 stays 0. Computed in fp32 on the CPU and in bf16 on a GPU, returned in fp32.
    """
    tall = matrices_nrc.shape[-2] > matrices_nrc.shape[-1]
    x = matrices_nrc.mT if tall else matrices_nrc  # the products below are as large as the first dimension
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * _SAFETY + 1e-7)
    if x.is_cuda:
        x = x.bfloat16()
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b / _SAFETY**3, alpha=c / _SAFETY**5)
        x = torch.baddbmm(x, polynomial, x, beta=a / _SAFETY)
    return (x.mT if tall else x).float().contiguous()


# ── the state, as named tensors ───────────────────────────────────────────────────────────────────────────────────────

def state_tensors(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of the optimizer's state, live, under "parameter/moment". `names` maps names to parameters."""
    name_of = {p: name for name, p in names.items()}
    tensors = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p not in name_of:
                raise UsageError(f"optimizer state: a parameter of shape {tuple(p.shape)} is trained but has no name; "
                                 "the optimizer was built for another model")
            for key, value in optimizer.state[p].items():
                assert isinstance(value, Tensor), f"{key} is not a tensor: this optimizer's state cannot be saved whole"
                tensors[f"{name_of[p]}/{key}"] = value
    return tensors


def load_state_tensors(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor],
                       tensors: Mapping[str, Tensor]) -> None:
    """Put saved tensors back, bit for bit."""
    load_strictly(state_tensors(optimizer, names), tensors, "optimizer state", "it was saved by another optimizer or for another model")


@torch.no_grad()
def load_strictly(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str, why: str) -> None:
    """Copy saved tensors into live ones of the same names; all of them are checked before the first is written."""
    missing, extra = sorted(state.keys() - tensors.keys()), sorted(tensors.keys() - state.keys())
    if missing or extra:
        raise ArtifactError(f"{what}: {_some(missing)} missing, {_some(extra)} unknown; {why}")
    for name, value in state.items():
        found = tensors[name]
        if (found.shape, found.dtype) != (value.shape, value.dtype):
            raise ArtifactError(f"{what}: {name} is {tuple(found.shape)} {found.dtype}; expected {tuple(value.shape)} {value.dtype}")
    for name, value in state.items():
        value.copy_(tensors[name])


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})" if names else "none"


# ── the parameters ────────────────────────────────────────────────────────────────────────────────────────────────────

def parameter_kind(name: str, parameter: Tensor) -> Literal["matrix", "embedding", "head", "vector"]:
    """Kind of a Transformer's parameter for its optimizer, told by its name and shape."""
    if parameter.ndim != 2:
        return "vector"
    if f".{name}".endswith(EMBEDDINGS):
        return "embedding"
    return "head" if f".{name}".endswith(_HEAD) else "matrix"


def _trainable(named_params: Named, masters: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    params = {name: p for name, p in named_params if p.requires_grad}
    if not params:
        raise UsageError("optimizer: no parameter requires a gradient, there is nothing to train")
    for name, p in params.items():
        if p.dtype != masters:
            raise UsageError(f"optimizer: {name} is {p.dtype}; trained weights are kept in {str(masters)[6:]}, because rounding "
                             "would swallow small updates. Compute in bf16 through the model's compute_dtype instead")
    return params


def _check_slices(name: str, rows: tuple[int, ...], params: Mapping[str, Tensor]) -> None:
    if name not in params or parameter_kind(name, params[name]) != "matrix":
        raise UsageError(f"muon: slices name {name!r}, which is no matrix of this model's blocks")
    if min(rows) < 1 or sum(rows) != len(params[name]):
        raise UsageError(f"muon: slices split {name} into {rows} rows; it has {len(params[name])}")


def _fused(params: Iterable[Tensor]) -> bool:
    return all(p.is_cuda for p in params)


def _adamw_state(p: Tensor, fused: bool, where: str | None) -> dict[str, Tensor]:
    """AdamW's state as torch would make it on the first step; its fused kernel counts on the device, the plain loop on the host."""
    return {"step": torch.zeros((), device=p.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(p, device=where), "exp_avg_sq": torch.zeros_like(p, device=where)}

"""Targets: the state at a subject's last token from which the model would say the new answer.

For each fact a change δ of the residual stream is optimised, where the last edited layer adds to it, so that the target
follows in every context while the subject's essence ("… is a") stays. Everything before the subject's last token is
constant and is computed once, so that a step computes a handful of tokens a row; facts stand beside each other in a
batch and do not see each other.

Shapes: n facts, B rows (each fact has one a context, and one for its essence), T time, D width, V vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from assay.edit.before import Before, read_before
from assay.edit.contexts import Contexts
from assay.edit.facts import Fact
from assay.edit.sites import block, down, hooked, padded
from assay.edit.subject import Spot, answer_ids, locate
from assay.errors import DataError
from assay.model.attention import PADDING
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer

ESSENCE = " is a"
AT_ONCE = {"cpu": 16}  # facts in one batch; elsewhere MANY
MANY = 128


@dataclass(frozen=True)
class Aim:
    """How targets are sought; the defaults are MEMIT's."""

    steps: int = 25
    lr: float = 0.5
    kl: float = 0.0625
    decay: float = 0.5
    clamp: float = 0.75  # most that δ may be, in lengths of the state it changes
    enough: float = 0.05  # a loss below this ends the search


@dataclass(frozen=True)
class Target:
    """`state` is where the bare prompt's last subject token shall arrive; `probability` is the target's, were it there."""

    state: Tensor  # (D,) float64
    delta: Tensor  # (D,) float64
    probability: float
    loss: float
    steps: int
    clamped: bool


@dataclass
class Rows:
    """The rows of some facts: what comes before the subject's last token, and the tokens from there on."""

    before: Before
    tokens: Tensor  # (B, T); column 0 is the subject's last token in every row
    documents: Tensor
    fact: Tensor  # (B,) which fact a row belongs to
    asked: Tensor  # (A, 2) row and column of every position that predicts a target's token
    due: Tensor  # (A,) the token that shall follow there
    share: Tensor  # (A,) its part in the fact's loss: the contexts' rows and the target's tokens count alike
    essence: Tensor  # (n, 2) row and column of every fact's essence


def find_targets(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], surroundings: Contexts, layer: int,
                 aim: Aim) -> list[Target]:
    """One target a fact, for the state after `layer`. The model is as it was afterwards: only δ is optimised."""
    at_once = AT_ONCE.get(model.embed.weight.device.type, MANY)
    with untrained(model):
        return [target for start in range(0, len(facts), at_once)
                for target in _search(model, _rows(model, tokenizer, facts[start : start + at_once], surroundings), layer, aim)]


def _search(model: Transformer, rows: Rows, layer: int, aim: Aim) -> list[Target]:
    count = len(rows.essence)
    initial, essence = _initial(model, rows, layer)
    deltas = [nn.Parameter(torch.zeros_like(state)) for state in initial]
    optimizer = torch.optim.Adam(deltas, aim.lr)
    lengths, found = initial.norm(dim=-1), dict[int, Target]()
    for step in range(aim.steps + 1):
        active = [i for i in range(count) if i not in found]
        nll, kl = _losses(model, _chosen(rows, active), torch.stack([deltas[i] for i in active]), essence[active], layer)
        size = torch.stack([deltas[i].norm() for i in active])
        losses = nll + aim.kl * kl + aim.decay * size / lengths[active].square()
        for i, loss, surprise in zip(active, losses.tolist(), nll.tolist(), strict=True):
            if not math.isfinite(loss):
                raise DataError(f"the search for target {i} met a loss of {loss}; lower its learning rate or the weights of its terms")
            if loss < aim.enough or step == aim.steps:
                clamped = bool(deltas[i].norm() >= 0.999 * aim.clamp * lengths[i])
                found[i] = _target(initial[i], deltas[i], surprise, loss, step, clamped)
        if len(found) == count:
            break
        _step(optimizer, deltas, losses, active, aim.clamp * lengths)
    return [found[i] for i in range(count)]


def _step(optimizer: torch.optim.Optimizer, deltas: list[nn.Parameter], losses: Tensor, active: list[int], longest: Tensor) -> None:
    """The facts' losses are summed and share nothing, so each δ moves as if it were alone; one that has arrived stays."""
    gradients = torch.autograd.grad(losses.sum(), [deltas[i] for i in active])
    optimizer.zero_grad(set_to_none=True)
    for i, gradient in zip(active, gradients, strict=True):
        deltas[i].grad = gradient
    optimizer.step()
    with torch.no_grad():
        for i in active:
            deltas[i].mul_((longest[i] / deltas[i].norm().clamp(min=1e-12)).clamp(max=1.0))


def _target(initial: Tensor, delta: Tensor, surprise: float, loss: float, steps: int, clamped: bool) -> Target:
    delta = delta.detach().double().cpu()
    return Target(initial.double().cpu() + delta, delta, math.exp(-surprise), loss, steps, clamped)


@torch.no_grad()
def _initial(model: Transformer, rows: Rows, layer: int) -> tuple[Tensor, Tensor]:
    """(n, D) the states of the bare prompts' last subject tokens, and (n, V) what the model says of each essence."""
    seen: list[Tensor] = []
    first = torch.stack([(rows.fact == i).nonzero()[0, 0] for i in range(len(rows.essence))])
    with hooked([block(model, layer).register_forward_hook(lambda _, __, output: seen.append(output[first, 0]))]):
        states = _states(model, rows)
    return seen[0], _logprobs(model, states, rows.essence)


def _losses(model: Transformer, rows: Rows, deltas_nD: Tensor, essence_nV: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """(n,) mean surprise at the target, and the divergence of the essence from what it was."""
    def inject(_: nn.Module, __: object, output_BTD: Tensor) -> Tensor:
        return torch.cat([output_BTD[:, :1] + deltas_nD[rows.fact][:, None].to(output_BTD.dtype), output_BTD[:, 1:]], 1)

    with hooked([down(model, layer).register_forward_hook(inject)]):
        states = _states(model, rows)
    said = _logprobs(model, states, rows.asked).gather(-1, rows.due[:, None]).squeeze(-1)
    nll = torch.zeros(len(deltas_nD), device=said.device).index_add(0, rows.fact[rows.asked[:, 0]], -said * rows.share)
    now = _logprobs(model, states, rows.essence)
    return nll, (essence_nV.exp() * (essence_nV - now)).sum(-1)


def _states(model: Transformer, rows: Rows) -> Tensor:
    return model.hidden(rows.tokens, documents=rows.documents, cache=rows.before)  # type: ignore[arg-type]  # a view like those of cache.py


def _logprobs(model: Transformer, states_BTD: Tensor, places: Tensor) -> Tensor:
    return model.logits(states_BTD[places[:, 0], places[:, 1]]).float().log_softmax(-1)

# ---------------------------------------------------------------- rows


def _rows(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], surroundings: Contexts) -> Rows:
    heads: list[Sequence[int]] = []
    tails: list[Sequence[int]] = []
    owner, asked, share, essence = [], [], [], []
    due: list[int] = []
    for number, fact in enumerate(facts):
        target, spots = answer_ids(tokenizer, fact.target), surroundings.spots(tokenizer, fact)
        for spot in spots:
            row, ends = len(heads), len(spot.ids) - spot.last - 1
            heads.append(spot.ids[: spot.last])
            tails.append((*spot.ids[spot.last :], *target[:-1]))
            asked += [(row, ends + i) for i in range(len(target))]
            due += target
            share += [1 / (len(spots) * len(target))] * len(target)
        spot = _essence(tokenizer, fact)
        essence.append((len(heads), len(spot.ids) - spot.last - 1))
        heads.append(spot.ids[: spot.last])
        tails.append(spot.ids[spot.last :])
        owner += [number] * (len(spots) + 1)
    device = model.embed.weight.device
    tokens, documents = padded(tails, device)
    return Rows(read_before(model, heads), tokens, documents, torch.tensor(owner, device=device), torch.tensor(asked, device=device),
                torch.tensor(due, device=device), torch.tensor(share, device=device), torch.tensor(essence, device=device))


def _essence(tokenizer: Tokenizer, fact: Fact) -> Spot:
    return locate(tokenizer, fact.subject + ESSENCE, 0, fact.subject, fact.name)


def _chosen(rows: Rows, facts: list[int]) -> Rows:
    """The rows of these facts, which are numbered anew."""
    if len(facts) == len(rows.essence):
        return rows
    device = rows.tokens.device
    number = torch.full((len(rows.essence),), -1, device=device)
    number[facts] = torch.arange(len(facts), device=device)
    keep = (number[rows.fact] >= 0).nonzero().flatten()
    place = torch.full((len(rows.tokens),), -1, device=device)
    place[keep] = torch.arange(len(keep), device=device)
    mine = place[rows.asked[:, 0]] >= 0

    def moved(places: Tensor) -> Tensor:
        return torch.stack([place[places[:, 0]], places[:, 1]], 1)

    width = int((rows.documents[keep] != PADDING).sum(1).max())
    return Rows(rows.before.chosen(keep), rows.tokens[keep, :width], rows.documents[keep, :width], number[rows.fact[keep]],
                moved(rows.asked[mine]), rows.due[mine], rows.share[mine], moved(rows.essence[facts]))


@contextlib.contextmanager
def untrained(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient within the block."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)

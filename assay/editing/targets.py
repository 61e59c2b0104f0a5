"""Target states of an edit: the state at a subject's last token from which the model would say the new answer.

For each fact a change δ of the residual stream is optimised, where the last edited layer adds to it, so that the target
follows in every context while the subject's essence ("… is a") stays. Everything before the subject's last token is
constant and is computed once, into a PrefixCache, so that a step computes a handful of tokens a row; facts stand beside each other in a
batch and do not see each other.

Shapes: n facts, B rows (each fact has one a context, and one for its essence), T time, D width, V vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from assay.editing.block_hooks import block, down_projection, hooked, padded
from assay.editing.contexts import Contexts
from assay.editing.facts import Fact
from assay.editing.subject_tokens import SubjectSpan, answer_ids, locate_subject
from assay.errors import DataError
from assay.model.attention import (
    PADDING,
    PLAIN_RULE,
    AttentionMask,
    AttentionRule,
    TokenLayout,
    attend,
    document_causal_mask,
    positions_in_document,
    token_layout,
)
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer


class RecordingCache(NamedTuple):
    """The layers run in order, and each adds its own."""

    keys: list[Tensor]
    values: list[Tensor]

    def layout(self, tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, windows: set[int | None],
               starts: Tensor | None) -> TokenLayout:
        return token_layout(tokens_BT, documents, positions, windows, starts)

    def layer(self, index: int) -> "RecordingCache":
        assert len(self.keys) == index, "layers run in order"
        return self

    def attend(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask: AttentionMask, rule: AttentionRule = PLAIN_RULE) -> Tensor:
        self.keys.append(k_BTKd)
        self.values.append(v_BTKd)
        return attend(q_BTHd, k_BTKd, v_BTKd, mask, rule)


class PrefixCacheLayer(NamedTuple):
    keys_BSKd: Tensor
    values_BSKd: Tensor

    def attend(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask: AttentionMask, rule: AttentionRule = PLAIN_RULE) -> Tensor:
        return attend(q_BTHd, torch.cat([self.keys_BSKd, k_BTKd], 1), torch.cat([self.values_BSKd, v_BTKd], 1), mask, rule)


class PrefixCache(NamedTuple):
    """`documents` (B, S) says which of the tokens before are real; the new ones count on from there."""

    keys: list[Tensor]
    values: list[Tensor]
    documents: Tensor

    def layout(self, tokens_BT: Tensor, documents: Tensor | None, positions: Tensor | None, windows: set[int | None],
               starts: Tensor | None) -> TokenLayout:
        assert documents is not None, "rows end at different columns"
        lengths = (self.documents != PADDING).sum(1, keepdim=True)
        here = lengths + positions_in_document(documents)
        seen = torch.cat([self.documents, documents], 1), torch.cat([positions_in_document(self.documents), here], 1)
        return TokenLayout(documents, here, {window: AttentionMask(document_causal_mask(documents, here, *seen, window))
                                             for window in windows})

    def layer(self, index: int) -> PrefixCacheLayer:
        return PrefixCacheLayer(self.keys[index], self.values[index])

    def chosen(self, rows: Tensor) -> "PrefixCache":
        return PrefixCache([keys[rows] for keys in self.keys], [values[rows] for values in self.values], self.documents[rows])


@torch.no_grad()
def read_prefix(model: Transformer, rows: Sequence[Sequence[int]]) -> PrefixCache:
    """Rows end in the same column, so that what follows begins in the same one; a row may be empty."""
    tokens, documents = padded(rows, model.embed.weight.device, left=True)
    recording = RecordingCache([], [])
    model.hidden(tokens, documents=documents, cache=recording)  # type: ignore[arg-type]  # a view like those of kv_cache.py
    return PrefixCache(recording.keys, recording.values, documents)


ESSENCE = " is a"
_AT_ONCE = {"cpu": 16}  # facts in one batch; elsewhere MANY
_MANY = 128
_BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam


@dataclass(frozen=True)
class TargetOptions:
    """Options of the search for targets; the defaults are MEMIT's."""

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
class TargetRows:
    """The rows of some facts: what comes before the subject's last token, and the tokens from there on."""

    before: PrefixCache
    tokens: Tensor  # (B, T); column 0 is the subject's last token in every row
    documents: Tensor
    fact: Tensor  # (B,) which fact a row belongs to
    bare: Tensor  # (n,) the row of every fact's prompt with nothing before it
    asked: Tensor  # (A, 2) row and column of every position that predicts a target's token
    due: Tensor  # (A,) the token that shall follow there
    share: Tensor  # (A,) its part in the fact's loss: the contexts' rows and the target's tokens count alike
    essence: Tensor  # (n, 2) row and column of every fact's essence


def find_targets(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], contexts: Contexts, layer: int,
                 options: TargetOptions) -> list[Target]:
    """One target a fact, for the state after `layer`. The model is as it was afterwards: only δ is optimised."""
    at_once = _AT_ONCE.get(model.embed.weight.device.type, _MANY)
    order = sorted(range(len(facts)), key=lambda i: _length(tokenizer, facts[i]))  # like lengths together: little padding
    found: dict[int, Target] = {}
    with frozen_parameters(model):
        for start in range(0, len(order), at_once):
            part = order[start : start + at_once]
            rows = _rows(model, tokenizer, [facts[i] for i in part], contexts)
            found |= zip(part, _search(model, rows, layer, options), strict=True)
    return [found[i] for i in range(len(facts))]


def _search(model: Transformer, rows: TargetRows, layer: int, options: TargetOptions) -> list[Target]:
    """Search the targets of all facts of the rows at once. A fact that has arrived stays where it is, and its rows are computed no
    longer."""
    initial_nD, essence_nV = _initial(model, rows, layer)
    lengths_n = initial_nD.norm(dim=-1)
    deltas = Deltas(initial_nD, options.lr, options.clamp * lengths_n)
    seeking, here = list(range(len(initial_nD))), rows
    ends: dict[int, tuple[float, float, int]] = {}
    for step in range(options.steps + 1):
        sought_aD = deltas.value_nD[seeking].requires_grad_()
        nll_a, kl_a = _losses(model, here, sought_aD, essence_nV[seeking], layer)
        losses_a = nll_a + options.kl * kl_a + options.decay * sought_aD.norm(dim=-1) / lengths_n[seeking].square()
        losses, surprises = torch.stack([losses_a.detach(), nll_a.detach()]).tolist()  # the one look at the device of a step
        for i, loss, surprise in zip(seeking, losses, surprises, strict=True):
            if not math.isfinite(loss):
                raise DataError(f"the search for target {i} met a loss of {loss}; lower its learning rate or the weights of its terms")
            if loss < options.enough or step == options.steps:
                ends[i] = (surprise, loss, step)
        if len(ends) == len(initial_nD):
            break
        (gradient_aD,) = torch.autograd.grad(losses_a.sum(), sought_aD)  # facts share nothing: each has its own gradient
        going = [place for place, i in enumerate(seeking) if i not in ends]
        if len(going) < len(seeking):
            seeking, gradient_aD = [seeking[place] for place in going], gradient_aD[going]
            here = _chosen(rows, seeking)
        deltas.step(seeking, gradient_aD, step + 1)
    return _targets(initial_nD, deltas.value_nD, ends, options.clamp * lengths_n)


class Deltas:
    """Every fact's δ, no longer than it may be, and its Adam; those that are sought have all taken the same number of steps."""

    def __init__(self, initial_nD: Tensor, lr: float, longest_n: Tensor):
        self.value_nD, self._first_nD, self._second_nD = (torch.zeros_like(initial_nD) for _ in range(3))
        self.lr, self.longest_n = lr, longest_n

    def step(self, sought: list[int], gradient_aD: Tensor, count: int) -> None:
        (beta1, beta2), eps = _BETAS, EPS
        first, second = self._first_nD[sought].lerp(gradient_aD, 1 - beta1), self._second_nD[sought].lerp(gradient_aD.square(), 1 - beta2)
        moved = self.value_nD[sought] - self.lr / (1 - beta1**count) * first / ((second / (1 - beta2**count)).sqrt() + eps)
        shorter_a = (self.longest_n[sought] / moved.norm(dim=-1).clamp(min=1e-12)).clamp(max=1.0)
        self._first_nD[sought], self._second_nD[sought], self.value_nD[sought] = first, second, moved * shorter_a[:, None]


def _targets(initial_nD: Tensor, deltas_nD: Tensor, ends: dict[int, tuple[float, float, int]], longest_n: Tensor) -> list[Target]:
    initial, delta, longest = (tensor.double().cpu() for tensor in (initial_nD, deltas_nD, longest_n))
    clamped = (delta.norm(dim=-1) >= 0.999 * longest).tolist()
    return [Target(initial[i] + delta[i], delta[i], math.exp(-surprise), loss, steps, clamped[i])
            for i, (surprise, loss, steps) in sorted(ends.items())]


@torch.no_grad()
def _initial(model: Transformer, rows: TargetRows, layer: int) -> tuple[Tensor, Tensor]:
    """(n, D) the states of the bare prompts' last subject tokens, and (n, V) what the model says of each essence."""
    seen: list[Tensor] = []
    with hooked([block(model, layer).register_forward_hook(lambda _, __, output: seen.append(output[rows.bare, 0]))]):
        states = _states(model, rows)
    return seen[0], _logprobs(model, states, rows.essence)


def _losses(model: Transformer, rows: TargetRows, deltas_nD: Tensor, essence_nV: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """(n,) mean surprise at the target, and the divergence of the essence from what it was."""
    def inject(_: nn.Module, __: object, output_BTD: Tensor) -> Tensor:
        return torch.cat([output_BTD[:, :1] + deltas_nD[rows.fact][:, None].to(output_BTD.dtype), output_BTD[:, 1:]], 1)

    with hooked([down_projection(model, layer).register_forward_hook(inject)]):
        states = _states(model, rows)
    said = _logprobs(model, states, rows.asked).gather(-1, rows.due[:, None]).squeeze(-1)
    nll = torch.zeros(len(deltas_nD), device=said.device).index_add(0, rows.fact[rows.asked[:, 0]], -said * rows.share)
    now = _logprobs(model, states, rows.essence)
    return nll, (essence_nV.exp() * (essence_nV - now)).sum(-1)


def _states(model: Transformer, rows: TargetRows) -> Tensor:
    return model.hidden(rows.tokens, documents=rows.documents, cache=rows.before)  # type: ignore[arg-type]  # a view like those of kv_cache.py


def _logprobs(model: Transformer, states_BTD: Tensor, places: Tensor) -> Tensor:
    return model.logits(states_BTD[places[:, 0], places[:, 1]]).float().log_softmax(-1)

# ---------------------------------------------------------------- rows


def _rows(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], contexts: Contexts) -> TargetRows:
    heads: list[Sequence[int]] = []
    tails: list[Sequence[int]] = []
    owner, bare, asked, share, essence = [], [], [], [], []
    due: list[int] = []
    for number, fact in enumerate(facts):
        target, spans = answer_ids(tokenizer, fact.target), contexts.spans(tokenizer, fact)
        bare.append(len(heads))
        for span in spans:
            row, ends = len(heads), len(span.ids) - span.last - 1
            heads.append(span.ids[: span.last])
            tails.append((*span.ids[span.last :], *target[:-1]))
            asked += [(row, ends + i) for i in range(len(target))]
            due += target
            share += [1 / (len(spans) * len(target))] * len(target)
        span = _essence(tokenizer, fact)
        essence.append((len(heads), len(span.ids) - span.last - 1))
        heads.append(span.ids[: span.last])
        tails.append(span.ids[span.last :])
        owner += [number] * (len(spans) + 1)
    device = model.embed.weight.device
    tokens, documents = padded(tails, device)
    listed = (torch.tensor(values, device=device) for values in (owner, bare, asked, due, share, essence))
    return TargetRows(read_prefix(model, heads), tokens, documents, *listed)


def _length(tokenizer: Tokenizer, fact: Fact) -> int:
    """Tokens that a step computes for a row of this fact."""
    span = locate_subject(tokenizer, fact.prompt, fact.start, fact.subject, fact.name)
    return len(span.ids) - span.last + len(answer_ids(tokenizer, fact.target))


def _essence(tokenizer: Tokenizer, fact: Fact) -> SubjectSpan:
    return locate_subject(tokenizer, fact.subject + ESSENCE, 0, fact.subject, fact.name)


def _chosen(rows: TargetRows, facts: list[int]) -> TargetRows:
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
    return TargetRows(rows.before.chosen(keep), rows.tokens[keep, :width], rows.documents[keep, :width], number[rows.fact[keep]],
                      place[rows.bare[facts]], moved(rows.asked[mine]), rows.due[mine], rows.share[mine], moved(rows.essence[facts]))


@contextlib.contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """Freeze all parameters within the block: none asks for a gradient."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)

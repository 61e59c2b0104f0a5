"""Loss preflight on one real batch before step 1: values and gradients, each against a naive twin.

The naive twins here are written out on purpose. `naive_loss` shares with the code it judges the model's `hidden` and `logits`
alone; `naive_logits`, which judges those, shares the layers' own products and norms.

What is one and the same by arithmetic is compared in fp32, whatever the run computes in: in bf16 two right ways to compute a
gradient of SmolLM2 were 5 % apart, by the rounding of 30 layers, and a bound above that would forgive real faults. That the run's
own precision, compiled and captured as it will run, comes near that is a check of its own.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from assay.data.batch import Batch
from assay.kernels.rotary import rotate
from assay.learn import loop
from assay.learn.loop import Accumulate
from assay.learn.objectives import Objective
from assay.model.placement import fp32_uncompiled
from assay.model.transfers import read_numbers
from assay.model.transformer import Attention, Block, Mixture, Mlp, Transformer, parameter_count
from assay.seeds import generator
from assay.verdict import Outcome, Verdict, proven, refuted

Gradients = tuple[float, Mapping[str, Tensor]]  # the loss, and the gradient of each parameter that has one
NaiveLoss = Callable[[Transformer, Batch], Tensor]  # an objective written out: the mean loss over the batch's weight

# Relative error that rounding explains: fp32 sums in another order, or bf16 products in another order.
PARITY_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
# A single tensor's fp32 gradient on a GPU, whose products are summed in another order for every shape: of SmolLM2's, on an H200,
# those of norms in late layers were up to 7e-4 apart.
GPU_GRADIENT = 5e-3
# Where the same gradient with its sums in another order is itself apart: so many times that, and never more than what a GPU may be.
REORDERED, MOST_ROUNDING = 10.0, GPU_GRADIENT
_DRAWS = 3
_LAST_BITS = 16 * torch.finfo(torch.float32).eps  # by which norms are moved for that: one ulp alone moves all logits alike
# bf16 as it runs against fp32: relative error of all gradients together (0.02 of SmolLM2's, 0.21 of half its layers, untrained), and how
# many times the gradient of a kind of tensor, over all layers, may be what it should be: rounding hardly goes along with a gradient.
_ROUNDING, TIMES = 0.5, (0.8, 1.25)
NONE = 1e-6  # of the whole gradient's norm: a kind of tensor that has less of it has none
PREFLIGHT_ROWS = 4  # of the batch: enough to have ragged parts
LARGE = 10**9  # parameters, from which on fp32 costs minutes: two rows of fewer columns then show the same
TOKENS_TOGETHER_FP32 = 4096  # of a smaller model: row by row, launching takes longer than computing
_ENOUGH = 256, 8  # columns, and weighted tokens of each row that must be among them
_LOUD = 0.2  # for the checks that must see them: standard deviation of the logits in soft caps, largest weight of a gate
_COLUMNS = 2048  # of a row that attention is written out for: its cost grows with their square


def preflight_loss(model: Transformer, objective: Objective, batch: Batch, accumulate: Accumulate | None = None,
                   naive: NaiveLoss | None = None, teacher: Transformer | None = None) -> list[Verdict]:
    """Every check of this file but `check_precision`. The model's weights, gradients and mode are as before afterwards.

    `accumulate` is what the loop will be given: what is checked must be what runs. `naive` is the objective written
    out; without it, next-token cross-entropy. `teacher` is another model that the objective asks.
    """
    batch = sample_rows(batch)
    batch = batch if parameter_count(model) < LARGE else first_columns(batch)
    with fp32_uncompiled(model, *([] if teacher is None else [teacher])):
        exact = [check_attention(model, batch), check_loss(model, objective, batch, naive),
                 check_accumulation(model, objective, batch, accumulate)]
    return [*exact, check_isolation(model, batch), check_padding(model, objective, batch), check_determinism(model, objective, batch)]


@torch.no_grad()
def check_attention(model: Transformer, batch: Batch) -> Verdict:
    """The model's logits are those of its config written out: causal, within documents and windows, softly capped."""
    part: dict[str, Any] = {name: stream[:1, :_COLUMNS].cpu() for name, stream in batch.streams().items()}
    row = Batch(**part).to(batch.tokens.device)
    with amplified(model, row):
        found, due = batch_logits(model, row), naive_logits(model, row)
    error = float((found - due).norm() / (due.norm() + 1e-20))
    words = f"logits differ from attention and soft cap computed explicitly by {error:.1e} (relative), bound {_bound(model):.0e}"
    if not error <= _bound(model):
        return refuted("attention", f"{words}: a window, a cap, a mask, a mix or a gate of the config is not applied", error=str(error))
    return proven("attention", words, error=error)


def check_loss(model: Transformer, objective: Objective, batch: Batch, naive: NaiveLoss | None = None) -> Verdict:
    """The objective equals its naive twin, written out in full logits, in value and in gradient, whatever the weights."""
    uneven = replace(batch, weight=_uneven(batch.weight))
    with amplified(model, sample_rows(batch)):
        ours = loss_gradients(model, lambda: objective(model, uneven).total / uneven.weight.sum())
        written_out = loss_gradients(model, lambda: (naive or naive_loss)(model, uneven))
    twin = "plain cross-entropy" if naive is None else "its formula written out"
    return compare_gradients("loss", f"the objective and {twin}", ours, written_out, model)


def check_accumulation(model: Transformer, objective: Objective, batch: Batch, accumulate: Accumulate | None = None) -> Verdict:
    """Micro-batches of one row give the step that one batch gives: on rows of different weight, and on fewer rows than usual."""
    accumulate = accumulate or loop.accumulated
    full = _accumulation(model, objective, batch, accumulate, rows=len(batch))
    short = _accumulation(model, objective, batch, accumulate, rows=max(1, len(batch) // 2))  # as at the end of an epoch
    return full if full.outcome is Outcome.REFUTED else short


def check_precision(model: Transformer, objective: Objective, batch: Batch, found: Gradients, *others: Transformer) -> Verdict:
    """`found`, made as the run makes it of this batch's mean loss, is near what fp32 gives, a few rows at a time and uncompiled."""
    together = TOKENS_TOGETHER_FP32 if parameter_count(model) < LARGE else 1
    weight, rows = float(batch.weight.sum()), max(1, together // batch.tokens.shape[1])
    with fp32_uncompiled(model, *others):
        due = loss_gradients(model, lambda: loop.accumulated(model, objective, batch, rows, weight).loss, backward=False)
    what = f"the loss in {model.compute_dtype or torch.float32} as it will run, and in fp32"
    near = _compared("precision", what, found, due, PARITY_BOUNDS[torch.bfloat16], _ROUNDING, together=True)
    if near.outcome is Outcome.REFUTED:
        return near
    times = _times(found[1], due[1])
    least, most = min(times, key=lambda kind: times[kind]), max(times, key=lambda kind: times[kind])
    words = f"{near.reason}; {times[least]:.3f} (*.{least}) to {times[most]:.3f} (*.{most}) times what they should be"
    sized = TIMES[0] <= times[least] and times[most] <= TIMES[1]
    return (proven if sized else refuted)("precision", words, **near.evidence, least=times[least], most=times[most])


def _times(found: Mapping[str, Tensor], due: Mapping[str, Tensor]) -> dict[str, float]:
    """Gradient ratio of each kind of tensor, all layers together: how many times the due gradient is in what was found, ⟨found, due⟩ /
    ⟨due, due⟩."""
    kinds: dict[str, list[str]] = {}
    for name in due:
        kinds.setdefault(re.sub(r"^blocks\.\d+\.", "", name), []).append(name)
    square = read_numbers({name: gradient.double().square().sum() for name, gradient in due.items()})
    product = read_numbers({name: (found[name].double() * gradient.double()).sum() for name, gradient in due.items()})
    squares, along = ({kind: sum(sums[name] for name in names) for kind, names in kinds.items()} for sums in (square, product))
    return {kind: along[kind] / squares[kind] for kind in kinds if squares[kind] > NONE**2 * sum(squares.values())}


@torch.no_grad()
def check_isolation(model: Transformer, batch: Batch) -> Verdict:
    """Check that packed documents do not leak: of two in a row, other words in the first change nothing in the second."""
    tokens, half = batch.tokens[:1].cpu(), batch.tokens.shape[1] // 2
    documents = (torch.arange(tokens.shape[1])[None] >= half).int()
    changed = torch.where(documents == 0, (tokens + 1) % model.config.vocab, tokens)
    packed = [Batch(t, torch.zeros(t.shape), documents).to(batch.tokens.device) for t in (tokens, changed)]
    before, after = (model.hidden(p.tokens, documents=p.documents, starts=p.starts)[:, half:] for p in packed)
    leak = float((before - after).norm() / before.norm())
    allowed = 0.0 if model.config.experts is None else _bound(model)  # an expert's products are rounded by how many tokens it has
    if not leak <= allowed:
        return refuted("isolation", f"changing one packed document moves another's states by {leak:.1e}: packing leaks", leak=leak)
    words = "bit for bit" if leak == 0 else f"as they are, but for {leak:.1e} (relative) of rounding in its experts, bound {allowed:.0e}"
    return proven("isolation", f"changing one packed document leaves the other's states {words}")


def check_padding(model: Transformer, objective: Objective, batch: Batch) -> Verdict:
    """Columns of padding add nothing to the loss."""
    documents = batch.documents if batch.documents is not None else torch.zeros_like(batch.tokens, dtype=torch.int32)
    plain = replace(batch, documents=documents)
    columns = {name: torch.full_like(stream[:, :1], -1 if name == "documents" else 0) for name, stream in plain.streams().items()}
    padding: dict[str, Any] = {name: torch.cat([stream, *[columns[name]] * 8], 1) for name, stream in plain.streams().items()}
    padded = replace(plain, **padding, starts=None)  # those of the batch are counted in rows without padding
    with torch.no_grad():
        one, two = (float(objective(model, b).total) for b in (plain, padded))
    error = abs(one - two) / max(abs(one), 1e-9)
    if not error <= _bound(model):
        return refuted("padding", f"eight columns of padding change the loss from {one:.6g} to {two:.6g}", error=str(error))
    return proven("padding", f"eight columns of padding change the loss by {error:.1e} (relative)", error=error)


@torch.no_grad()
def check_determinism(model: Transformer, objective: Objective, batch: Batch) -> Verdict:
    """Check determinism: two evaluations of the same batch agree to the last bit: no dropout, no state, nothing left in training mode."""
    training = model.training
    model.eval()
    still = [name or "the model" for name, module in model.named_modules() if module.training]
    one, two = (objective(model, batch).total for _ in range(2))
    model.train(training)
    if still:
        return refuted("determinism", f"still in training mode after eval(): {', '.join(still[:3])}", modules=still)
    if not torch.equal(one, two):
        return refuted("determinism", f"two evaluations of one batch gave {float(one)} and {float(two)}; dropout or hidden state is active")
    return proven("determinism", "two evaluations of one batch agree to the last bit")


def naive_loss(model: Transformer, batch: Batch) -> Tensor:
    """−Σ weight · log p(next token) / Σ weight, with whole fp32 logits and an explicit shift by one."""
    states = model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions)

    def row_logprobs(states_TD: Tensor, tokens_T: Tensor) -> Tensor:
        return model.logits(states_TD[:-1]).float().log_softmax(-1).gather(-1, tokens_T[1:, None]).squeeze(-1)

    # A row at a time, its logits recomputed in the backward pass: of 151,936 ids those of four rows alone would take ten gigabytes.
    rows = zip(states, batch.tokens, strict=True)
    taken = [checkpoint(row_logprobs, *row, use_reentrant=False, preserve_rng_state=False) for row in rows]
    return -(torch.stack(taken) * batch.weight[:, 1:]).sum() / batch.weight.sum()


def batch_logits(model: Transformer, batch: Batch) -> Tensor:
    return model.logits(model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions, starts=batch.starts)).float()


def naive_logits(model: Transformer, row: Batch) -> Tensor:
    """Logits with every product of attention written out in fp32, from the config: who sees whom is decided here anew."""
    config, T = model.config, row.tokens.shape[1]
    positions = row.positions if row.positions is not None else torch.arange(T, device=row.tokens.device)[None]
    documents = row.documents if row.documents is not None else torch.zeros_like(row.tokens)
    distance = positions[:, :, None] - positions[:, None, :]
    seen = (documents[:, :, None] == documents[:, None, :]) & (distance >= 0)
    x = model.embed.weight[row.tokens]
    x = x if model.position is None else x.float() + model.position.weight[positions].float()
    x = x.to(model.compute_dtype or model.embed.weight.dtype)
    x = x if config.embedding_scale is None else x * torch.tensor(config.embedding_scale, dtype=x.dtype, device=x.device)
    share = 1.0 if config.residual_scale is None else config.residual_scale
    values: list[Tensor] = []  # of the layers so far
    for layer, (block, window) in enumerate(zip(cast(Iterable[Block], model.blocks), config.windows, strict=True)):
        within = seen if window is None else seen & (distance < window)
        attended = _naive_attention(model, layer, block.attn, _through(block.attn_norm, x), positions, within, values)
        x = x + share * _through(block.attn_post_norm, attended)
        x = x + share * _through(block.mlp_post_norm, _naive_mlp(block.mlp, _through(block.mlp_norm, x)))
    plain = (model.norm(x) @ model.head_weight().to(x.dtype).T).float() * (1.0 if config.logit_scale is None else config.logit_scale)
    return plain if config.softcap is None else config.softcap * torch.tanh(plain / config.softcap)


def _through(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _naive_attention(model: Transformer, layer: int, attn: Attention, x_BTD: Tensor, positions: Tensor, seen_BTS: Tensor,
                     values: list[Tensor]) -> Tensor:
    config = model.config
    q, k, v = attn.qkv(x_BTD).split(attn.rows, -1)
    if config.qk_norm_whole and attn.q_norm is not None and attn.k_norm is not None:
        q, k = attn.q_norm(q), attn.k_norm(k)
    q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in (q, k, v))
    if not config.qk_norm_whole and attn.q_norm is not None and attn.k_norm is not None:
        q, k = attn.q_norm(q), attn.k_norm(k)
    local = config.local_rope is not None and config.windows[layer] is not None
    rope, frequencies = (config.local_rope, model.local_frequencies) if local else (config.rope, model.frequencies)
    if rope is not None and layer not in config.unrotated:
        angles = positions[..., None, None].float() * cast(Tensor, frequencies)
        longer = rope.attention_factor or 1.0
        q, k = (rotate(part, angles.cos() * longer, angles.sin() * longer) for part in (q, k))
    values.append(v)
    if attn.mix is not None:
        own, firsts = attn.mix.weight.to(v.dtype)
        v = own * v + firsts * values[0]
    k, v = (part.float().repeat_interleave(config.heads // config.kv_heads, dim=2) for part in (k, v))
    scores_BHTS = torch.einsum("bthd,bshd->bhts", q.float(), k) * (config.attention_scale or config.head_dim**-0.5)
    if config.attention_softcap is not None:
        scores_BHTS = config.attention_softcap * torch.tanh(scores_BHTS / config.attention_softcap)
    exponents = scores_BHTS.masked_fill(~seen_BTS[:, None], -math.inf)
    total = exponents.logsumexp(-1, keepdim=True)
    if attn.sinks is not None:
        total = torch.logaddexp(total, attn.sinks.weight.float()[:, None, None])
    attended = torch.einsum("bhts,bshd->bthd", (exponents - total).exp(), v)
    if attn.gate is not None:
        attended = attended * 2 / (1 + torch.exp(-attn.gate(x_BTD).float()))[..., None]
    return attn.out(attended.to(x_BTD.dtype).flatten(2))


def _naive_mlp(mlp: Mlp | Mixture, x_BTD: Tensor) -> Tensor:
    """A mixture with every expert asked about every token, and those that were not chosen counting nothing."""
    if isinstance(mlp, Mlp):
        return mlp(x_BTD)
    x_ND, rule = x_BTD.flatten(0, 1), mlp.rule
    logits_NE = mlp.router(x_ND).float()
    least_N1 = logits_NE.topk(rule.active, -1).values[:, -1:]
    chosen_NE = logits_NE >= least_N1
    among = logits_NE.masked_fill(~chosen_NE, -math.inf) if rule.normalised else logits_NE
    shares_NE = (logits_NE - among.logsumexp(-1, keepdim=True)).exp() * chosen_NE
    out = torch.zeros_like(x_ND)
    for expert in range(rule.count):
        alone = [len(x_ND) if expert == other else 0 for other in range(rule.count)]
        out = out + shares_NE[:, expert, None].to(x_ND.dtype) * mlp.down(mlp.gate(mlp.up(x_ND, alone)), alone)
    if mlp.shared is not None and mlp.shared_gate is not None:
        out = out + mlp.shared(x_ND) / (1 + torch.exp(-mlp.shared_gate(x_ND)))
    return out.view_as(x_BTD)


def loss_gradients(model: Transformer, loss: Callable[[], Tensor], *, backward: bool = True) -> Gradients:
    """The loss and every parameter's gradient; the model's own gradients are put back."""
    kept = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    value = loss()
    if backward:
        value.backward()
    found = model.gradients()
    for name, parameter in model.named_parameters():
        parameter.grad = kept[name]
    return float(value.detach()), found


@contextlib.contextmanager
def amplified(model: Transformer, batch: Batch) -> Iterator[None]:
    """Logits large enough for the soft cap to bend them, and gates that weigh: in a fresh model neither's absence would show."""
    gain, cap = cast(Tensor, model.norm.weight), model.config.softcap
    gates = [parameter for name, parameter in model.named_parameters() if name.endswith("attn.gate.weight")]
    kept = [parameter.detach().clone() for parameter in (gain, *gates)]
    with torch.no_grad():
        for gate in gates:
            gate.copy_(torch.linspace(-_LOUD, _LOUD, gate.numel()).view_as(gate))
        if cap is not None:
            gain.mul_(max(1.0, _LOUD * cap / float(batch_logits(model, batch).std())))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip((gain, *gates), kept, strict=True):
                parameter.copy_(before)


def sample_rows(batch: Batch) -> Batch:
    return next(batch.split(PREFLIGHT_ROWS))


def first_columns(batch: Batch) -> Batch:
    """The two rows with most to learn, and as many columns of them as hold some of it in each."""
    columns, tokens = _ENOUGH
    rows = (batch.weight != 0).sum(1).argsort(descending=True, stable=True)[:2]
    counted = (batch.weight[rows] != 0).cumsum(1)
    due = counted[:, -1:].clamp(max=tokens)
    needed = int((counted < due).sum(1).max()) + 1
    cut: dict[str, Any] = {name: stream[rows, : max(columns, needed)].cpu() for name, stream in batch.streams().items()}
    return replace(batch, **cut, ids=(), starts=None).to(batch.tokens.device)


def _accumulation(model: Transformer, objective: Objective, batch: Batch, accumulate: Accumulate, *, rows: int) -> Verdict:
    """The first rows one by one, against the whole batch with the other rows' weight at 0: both mean the same."""
    taken = torch.arange(len(batch), device=batch.weight.device)[:, None] < rows
    ragged = replace(batch, weight=_ragged(batch.weight) * taken)
    weight = float(ragged.weight.sum())
    parts = loss_gradients(model, lambda: accumulate(model, objective, next(ragged.split(rows)), 1, weight).loss, backward=False)
    whole = loss_gradients(model, lambda: objective(model, ragged).total / weight)
    return compare_gradients("accumulation", f"{rows} rows one at a time, and all at once", parts, whole, model)


def _uneven(weight: Tensor) -> Tensor:
    """Neighbours that count differently: a gradient scaled by one token's weight instead of each token's own would show."""
    return weight * (1 + 0.5 * (torch.arange(weight.shape[1], device=weight.device) % 3))


def _ragged(weight: Tensor) -> Tensor:
    """Rows that count for different numbers of tokens, which is where a mean of means goes wrong. A row that counts goes on counting:
    of answers after long prompts the first columns would leave nothing."""
    counted = (weight != 0).cumsum(1)
    share = torch.arange(1, len(weight) + 1, device=weight.device)[:, None] * counted[:, -1:] // (len(weight) + 1)
    return weight * (counted <= share + 2)


def compare_gradients(check: str, what: str, one: Gradients, two: Gradients, model: Transformer,
                      reordered: Callable[[int], tuple[Gradients, Gradients]] | None = None) -> Verdict:
    """Compare loss and gradients computed in two ways, within the rounding of the compute dtype; in fp32 tensor by tensor. In bf16 rounding
    alone moves a small tensor's gradient by more than any bound, so that all are taken together.

    Where terms cancel, rounding is more of what is left, and the deeper the model the more of it: `reordered`, the two with their sums
    in another order, is asked a few times where the bound does not hold. How far each is from itself is rounding; a fault stays.
    """
    value = _bound(model)
    if value > PARITY_BOUNDS[torch.float32]:
        return _compared(check, what, one, two, value, value, together=True)
    bound = GPU_GRADIENT if model.embed.weight.is_cuda else value
    found = _compared(check, what, one, two, value, bound)
    if found.outcome is Outcome.PROVEN or reordered is None:
        return found
    again = [_apart(other, first) for draw in range(_DRAWS) for other, first in zip(reordered(draw), (one, two), strict=True)]
    if None in again:
        return found
    values, errors = zip(*cast(list[tuple[float, dict[str, float]]], again), strict=True)
    allowed = lambda *roundings: min(MOST_ROUNDING, max(value, REORDERED * max(roundings)))  # noqa: E731
    return _compared(check, what, one, two, allowed(*values),
                     {name: allowed(*(each.get(name, 0.0) for each in errors)) for name in two[1]})


def _compared(check: str, what: str, one: Gradients, two: Gradients, value_bound: float, gradient_bound: float | Mapping[str, float], *,
              together: bool = False) -> Verdict:
    """Tensor by tensor, or all of them `together` as if they were one. `gradient_bound`: one for all, or each tensor's own; the worst
    tensor is the one furthest beyond its bound."""
    apart = _apart(one, two, together=together)
    if apart is None:
        return refuted(check, f"{what} reach different parameters: {sorted(one[1].keys() ^ two[1].keys())[:3]}")
    value, errors = apart
    bounds = gradient_bound if isinstance(gradient_bound, Mapping) else dict.fromkeys(errors, gradient_bound)
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name] / bounds[name])
    words = (f"{what}: loss {one[0]:.5f} and {two[0]:.5f}, gradients apart by at most {errors[worst]:.1e} (relative, {worst}), "
             f"bound {bounds[worst]:.0e}{' by the rounding measured on this model' if isinstance(gradient_bound, Mapping) else ''}")
    if not (value <= value_bound and errors[worst] <= bounds[worst]):
        return refuted(check, words, value_error=str(value), gradient_error=str(errors[worst]), tensor=worst)
    return proven(check, words, value_error=value, gradient_error=errors[worst], bound=bounds[worst])


def _apart(one: Gradients, two: Gradients, *, together: bool = False) -> tuple[float, dict[str, float]] | None:
    """The relative errors of the loss and of each tensor's gradient; None where the two reach different parameters."""
    if one[1].keys() != two[1].keys():
        return None
    off = read_numbers({name: (gradient.float() - two[1][name].float()).norm() for name, gradient in one[1].items()})
    size = read_numbers({name: two[1][name].float().norm() for name in off})
    norms = {name: (off[name], size[name]) for name in off}
    if together:  # from the norms of each: a copy of all would take as much again
        norms = {"all together": (math.hypot(*(apart for apart, _ in norms.values())), math.hypot(*(due for _, due in norms.values())))}
    return abs(one[0] - two[0]) / max(abs(two[0]), 1e-9), {name: apart / (due + 1e-20) for name, (apart, due) in norms.items()}


@contextlib.contextmanager
def nudged_norms(model: Transformer, draw: int = 0) -> Iterator[None]:
    """Move every gain and bias by its last bits, so that each layer rounds otherwise; put back by the bits afterwards.

    Through `data`, which counts as no write: a sampler that holds these weights has still what it loaded.
    """
    chance = generator(draw, "last bits")
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    kept = [parameter.detach().clone() for parameter in vectors]
    with torch.no_grad():
        for parameter in vectors:
            noise = torch.randn(parameter.shape, generator=chance).to(parameter.device)
            parameter.data.mul_(1 + _LAST_BITS * noise.to(parameter.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(vectors, kept, strict=True):
                parameter.data.copy_(before)


def _bound(model: Transformer) -> float:
    """Parity bound of the compute dtype, or of the gradients' dtype where that is coarser."""
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} & PARITY_BOUNDS.keys()
    return max(PARITY_BOUNDS[dtype] for dtype in {model.compute_dtype or torch.float32, *trained})

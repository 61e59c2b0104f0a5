"""Before step 1, on one real batch: the loss is the loss, however it is computed. Values and gradients, each against a naive twin.

The naive twins here are written out on purpose and share nothing with the code they judge but the model's `hidden` and `logits`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.learn.loop import accumulated
from assay.learn.objectives import Objective
from assay.model.transformer import Transformer
from assay.verdict import Verdict, proven, refuted

# Relative error that rounding explains: fp32 sums in another order, or bf16 products in another order.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
ROWS = 4  # of the batch: enough to have ragged parts


def preflight(model: Transformer, objective: Objective, batch: Batch) -> list[Verdict]:
    """Every check of this file. The model's weights, gradients and mode are as before afterwards."""
    batch = sample_rows(batch)
    return [check(model, objective, batch) for check in (check_loss, check_accumulation, check_isolation, check_padding, check_determinism)]


def check_loss(model: Transformer, objective: Objective, batch: Batch) -> Verdict:
    """The objective equals next-token cross-entropy written out in full logits, in value and in gradient."""
    ours = gradients(model, lambda: objective(model, batch).total / batch.weight.sum())
    naive = gradients(model, lambda: naive_loss(model, batch))
    return _compared("loss", "fused and plain cross-entropy", ours, naive, model)


def check_accumulation(model: Transformer, objective: Objective, batch: Batch) -> Verdict:
    """Micro-batches of one row give the step that one batch gives, on rows of different weight."""
    ragged = replace(batch, weight=_ragged(batch.weight))
    weight = float(ragged.weight.sum())
    parts = gradients(model, lambda: accumulated(model, objective, ragged, 1, weight), backward=False)
    whole = gradients(model, lambda: objective(model, ragged).total / weight)
    return _compared("accumulation", "one row at a time and all at once", parts, whole, model)


@torch.no_grad()
def check_isolation(model: Transformer, objective: Objective, batch: Batch) -> Verdict:
    """Two documents packed into a row: other words in the first change nothing in the second."""
    tokens, half = batch.tokens[:1].cpu(), batch.tokens.shape[1] // 2
    documents = (torch.arange(tokens.shape[1])[None] >= half).int()
    changed = torch.where(documents == 0, (tokens + 1) % model.config.vocab, tokens)
    packed = [Batch(t, torch.zeros(t.shape), documents).to(batch.tokens.device) for t in (tokens, changed)]
    before, after = (model.hidden(p.tokens, documents=p.documents, starts=p.starts)[:, half:] for p in packed)
    leak = float((before - after).abs().max())
    if leak > 0:
        return refuted("isolation", f"changing one packed document moves another's states by {leak:.1e}: packing leaks", leak=leak)
    return proven("isolation", "changing one packed document leaves the other's states bit for bit")


def check_padding(model: Transformer, objective: Objective, batch: Batch) -> Verdict:
    """Columns of padding add nothing to the loss."""
    pad = lambda stream, value: torch.nn.functional.pad(stream, (0, 8), value=value)  # noqa: E731
    documents = batch.documents if batch.documents is not None else torch.zeros_like(batch.tokens, dtype=torch.int32)
    positions = None if batch.positions is None else pad(batch.positions, 0)
    plain = replace(batch, documents=documents)
    padded = replace(batch, tokens=pad(batch.tokens, 0), weight=pad(batch.weight, 0.0), documents=pad(documents, -1), positions=positions)
    with torch.no_grad():
        one, two = (float(objective(model, b).total) for b in (plain, padded))
    error = abs(one - two) / max(abs(one), 1e-9)
    if not error <= _bound(model):
        return refuted("padding", f"eight columns of padding change the loss from {one:.6g} to {two:.6g}", error=str(error))
    return proven("padding", f"eight columns of padding change the loss by {error:.1e} (relative)", error=error)


@torch.no_grad()
def check_determinism(model: Transformer, objective: Objective, batch: Batch) -> Verdict:
    """Two evaluations of the same batch agree to the last bit: no dropout, no state, nothing left in training mode."""
    training = model.training
    model.eval()
    still = [name for name, module in model.named_modules() if module.training]
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
    logprobs = model.logits(states[:, :-1]).float().log_softmax(-1)
    taken = logprobs.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    return -(taken * batch.weight[:, 1:]).sum() / batch.weight.sum()


def gradients(model: Transformer, loss: Callable[[], Tensor], *, backward: bool = True) -> tuple[float, dict[str, Tensor]]:
    """The loss and every parameter's gradient; the model's own gradients are put back."""
    kept = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    value = loss()
    if backward:
        value.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        parameter.grad = kept[name]
    return float(value.detach()), found


def sample_rows(batch: Batch) -> Batch:
    return next(batch.split(ROWS))


def _ragged(weight: Tensor) -> Tensor:
    """Rows that count for different numbers of tokens, which is where a mean of means goes wrong."""
    keep = torch.arange(weight.shape[1], device=weight.device)[None] < (torch.arange(len(weight), device=weight.device) + 1)[:, None] * (
        weight.shape[1] // (len(weight) + 1)) + 2
    return weight * keep


def _compared(check: str, what: str, one: tuple[float, dict[str, Tensor]], two: tuple[float, dict[str, Tensor]], model: Transformer) -> Verdict:
    bound = _bound(model)
    if one[1].keys() != two[1].keys():
        return refuted(check, f"{what} reach different parameters: {sorted(one[1].keys() ^ two[1].keys())[:3]}")
    value = abs(one[0] - two[0]) / max(abs(two[0]), 1e-9)
    errors = {name: float((g - two[1][name]).float().norm() / (two[1][name].float().norm() + 1e-20)) for name, g in one[1].items()}
    worst = max(errors, key=lambda name: errors[name])
    words = f"{what}: loss {one[0]:.5f} and {two[0]:.5f}, gradients apart by at most {errors[worst]:.1e} (relative, {worst}), bound {bound:.0e}"
    if not (value <= bound and errors[worst] <= bound):
        return refuted(check, words, value_error=str(value), gradient_error=str(errors[worst]), tensor=worst)
    return proven(check, words, value_error=value, gradient_error=errors[worst], bound=bound)


def _bound(model: Transformer) -> float:
    return BOUNDS[model.compute_dtype or torch.float32]

"""Probe logits: a model's logits on fixed tokens, as a fingerprint of its behaviour.

They catch what no hash of a file can, such as a transposed load or code that changed its meaning.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.seeds import generator

_ROWS, LENGTH, _IDS = 2, 96, 256  # long enough for a wrong rotary base to show, and beyond every tiny sliding window


class ProbeLogits(NamedTuple):
    """Logits at every position for some token ids, and the logsumexp over all of them, which every other id moves."""

    logits: Tensor  # (ROWS, LENGTH, ids) fp32
    logsumexp: Tensor  # (ROWS, LENGTH) fp32


def probe_inputs(vocab: int, max_length: int) -> tuple[Tensor, Tensor]:
    """(tokens, ids): what the probe feeds, and whose logits it records; a function of the vocabulary alone."""
    length = min(LENGTH, max_length)
    tokens = torch.randint(0, vocab, (_ROWS, length), generator=generator(0, "probe tokens", vocab))
    ids = torch.randperm(vocab, generator=generator(0, "probe ids", vocab))[:_IDS].sort().values
    return tokens, ids


@torch.no_grad()
def compute_probe_logits(model: Transformer) -> ProbeLogits:
    """The model's logits on the probe's tokens, in fp32 whatever its compute dtype; its mode is left as it was found."""
    tokens, ids = probe_inputs(model.config.vocab, model.config.max_length)
    training, compute = model.training, model.compute_dtype
    model.eval()
    model.compute_dtype = torch.float32
    try:
        device = "cpu" if model.embed.weight.is_meta else model.embed.weight.device  # one that has shapes alone asks another
        with uncompiled():  # once a save, in a shape and dtype of its own
            logits = model.logits(model.hidden(tokens.to(device))).float()
        return ProbeLogits(logits[..., ids.to(device)].cpu(), logits.logsumexp(-1).cpu())
    finally:
        model.compute_dtype = compute
        model.train(training)


def probe_distance(a: ProbeLogits, b: ProbeLogits) -> float:
    """How far the log-probabilities of `a` are from `b`'s, relative to how far `b`'s spread around their mean.

    Two unrelated models are about 1.4 apart. Measured against the log-probabilities themselves, any two fresh models
    would look alike: all of theirs are near −log V. Infinite where either is not finite.
    """
    one, two = _vector(a), _vector(b)
    if one.shape != two.shape or not torch.isfinite(one).all() or not torch.isfinite(two).all():
        return float("inf")
    spread = (b.logits - b.logits.mean(-1, keepdim=True)).double().norm()
    return float((one - two).norm() / spread) if (one != two).any() else 0.0


def share_of_change(seen: ProbeLogits, base: ProbeLogits, changed: ProbeLogits) -> float:
    """How much of the change from `base` to `changed` shows in `seen`: 0 none of it, 1 all of it, 2 twice as much."""
    found, whole = _vector(seen) - _vector(base), _vector(changed) - _vector(base)
    return float((found * whole).sum() / whole.square().sum())


def _vector(answer: ProbeLogits) -> Tensor:
    """Log-probabilities and what normalised them."""
    return torch.cat([answer.logits - answer.logsumexp[..., None], answer.logsumexp[..., None]], -1).double()

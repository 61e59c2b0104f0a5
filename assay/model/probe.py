"""A fingerprint of behaviour, not of bytes: what a model says to fixed tokens. It catches what no hash of a file can, such
as a transposed load or code that changed its meaning.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from assay.model.transformer import Transformer
from assay.seeds import generator

ROWS, LENGTH, IDS = 2, 96, 256  # long enough for a wrong rotary base to show, and beyond every tiny sliding window


class Answer(NamedTuple):
    """Logits at every position for some token ids, and the logsumexp over all of them, which every other id moves."""

    logits: Tensor  # (ROWS, LENGTH, ids) fp32
    logsumexp: Tensor  # (ROWS, LENGTH) fp32


def questions(vocab: int, max_length: int) -> tuple[Tensor, Tensor]:
    """The tokens to ask and the ids to listen to: a function of the vocabulary alone."""
    length = min(LENGTH, max_length)
    tokens = torch.randint(0, vocab, (ROWS, length), generator=generator(0, "probe tokens", vocab))
    ids = torch.randperm(vocab, generator=generator(0, "probe ids", vocab))[:IDS].sort().values
    return tokens, ids


@torch.no_grad()
def answer(model: Transformer) -> Answer:
    """In fp32 whatever the training's compute dtype, in eval mode, which is left as it was found."""
    tokens, ids = questions(model.config.vocab, model.config.max_length)
    training, compute = model.training, model.compute_dtype
    model.eval()
    model.compute_dtype = torch.float32
    try:
        device = model.embed.weight.device
        logits = model.logits(model.hidden(tokens.to(device))).float()
        return Answer(logits[..., ids.to(device)].cpu(), logits.logsumexp(-1).cpu())
    finally:
        model.compute_dtype = compute
        model.train(training)


def distance(a: Answer, b: Answer) -> float:
    """Relative error of the log-probabilities, ‖a − b‖ / ‖b‖; infinite where either is not finite."""
    one, two = (torch.cat([x.logits - x.logsumexp[..., None], x.logsumexp[..., None]], -1).double() for x in (a, b))
    if one.shape != two.shape or not torch.isfinite(one).all() or not torch.isfinite(two).all():
        return float("inf")
    return float((one - two).norm() / two.norm())

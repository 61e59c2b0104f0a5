"""Ways to run one model over the same tokens: as they are, in the company of other rows, through the cache. All must agree.

A Runner is `(tokens_BT, look)`: it runs its model and calls `look(site, value, start)` at every site with the part that belongs to
the tokens; `start` is the position of the part's first token. What `look` returns takes the part's place.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from assay.measure.sites import LOGITS, Site
from assay.measure.tap import See, tapped
from assay.model.attention import PADDING
from assay.model.cache import Decoding, Filling, SlotCache
from assay.model.transformer import Transformer
from assay.seeds import generator

Look = Callable[[Site, Tensor, int], Tensor | None]
Runner = Callable[[Tensor, Look], None]
WHOLE = slice(None)


def plainly(model: Transformer) -> Runner:
    """One forward pass over the tokens and nothing else."""
    def run(tokens_BT: Tensor, look: Look) -> None:
        see = framed(look)
        with torch.no_grad(), tapped(model, see):
            see(Site(None, LOGITS), model.logits(model.hidden(tokens_BT)))

    return run


def in_company(model: Transformer, *, rows: int = 2, padding: int = 3) -> Runner:
    """Between other rows, and behind padding: what stands beside a text may not change what it means."""
    def run(tokens_BT: Tensor, look: Look) -> None:
        (B, T), device = tokens_BT.shape, tokens_BT.device
        shape = (B + rows, T + padding)
        batch = torch.randint(0, model.config.vocab, shape, generator=generator(0, "company", *shape)).to(device)
        documents = torch.zeros(shape, dtype=torch.long, device=device)
        batch[1 : B + 1, padding:] = tokens_BT
        documents[1 : B + 1, :padding] = PADDING
        see = framed(look, slice(1, B + 1), slice(padding, None))
        with torch.no_grad(), tapped(model, see):
            see(Site(None, LOGITS), model.logits(model.hidden(batch, documents=documents)))

    return run


def from_cache(model: Transformer, *, filled: int) -> Runner:
    """The first `filled` tokens at once, each later one by itself against the keys and values of those before it."""
    def run(tokens_BT: Tensor, look: Look) -> None:
        (B, T), c, device = tokens_BT.shape, model.config, tokens_BT.device
        dtype = model.compute_dtype or model.embed.weight.dtype
        cache = SlotCache(c.depth, B, T, c.kv_heads, c.head_dim, dtype=dtype, device=device)
        slots = torch.arange(B, device=device)
        pieces = [(0, filled), *((t, t + 1) for t in range(filled, T))]
        for start, stop in pieces:
            see = framed(look, at=start)
            with torch.no_grad(), tapped(model, see) as attention:
                filling = Filling(cache, cache.places(torch.zeros_like(tokens_BT[:, :filled]), slots))
                view = Decoding(cache, torch.full_like(slots, start), stop, attention.decoding) if start else filling
                see(Site(None, LOGITS), model.logits(model.hidden(tokens_BT[:, start:stop], cache=view)))

    return run


def framed(look: Look, rows: slice = WHOLE, columns: slice = WHOLE, at: int = 0) -> See:
    """`look` at some rows and columns of what a model computes; the others go on as they are."""
    def see(site: Site, value: Tensor) -> Tensor | None:
        other = look(site, value[rows, columns], at)
        if other is None:
            return None
        if rows == columns == WHOLE:
            return other.to(value.dtype).view_as(value)
        whole = value.clone()
        whole[rows, columns] = other.to(value.dtype).view_as(value[rows, columns])
        return whole

    return see

"""Slot advance after a draw: log each slot's token, and let the slot go on or end, in one kernel instead of a dozen.

Shapes: S slots, C steps that are logged, X stop ids of a slot.
"""

from __future__ import annotations  # the kernel's `tl.constexpr` must not be looked up at import

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from assay.kernels.triton_jit import jitted

if TYPE_CHECKING:
    import triton.language as tl  # at run time jitted() binds it: where no GPU is, Triton need not be installed

NO_TOKEN = -1  # logged by a slot that drew nothing
_BLOCK, _WARPS = 1024, 8  # slots that are taken at once: as many as there are, as a rule


class SlotState(NamedTuple):
    """State of the decoding slots: the newest token stands at `position`, and at `end` the last one is drawn. All int64."""

    token_S: Tensor
    position_S: Tensor
    end_S: Tensor
    running_S: Tensor  # 1 or 0
    stops_XS: Tensor


class TokenLog(NamedTuple):
    """Row `cursor` is written next."""

    ids_CS: Tensor
    logprobs_CS: Tensor
    cursor: Tensor  # (1,) int64


def advance_slots(chosen_S: Tensor, logprobs_S: Tensor, state: SlotState, log: TokenLog) -> None:
    """Advance the decoding slots in place: a running slot takes its token up and goes one place on, or ends with a stop id or at its
    end."""
    (fused_advance_slots if chosen_S.is_cuda else plain_advance_slots)(chosen_S, logprobs_S, state, log)


def plain_advance_slots(chosen_S: Tensor, logprobs_S: Tensor, state: SlotState, log: TokenLog) -> None:
    running = state.running_S == 1
    log.ids_CS.index_copy_(0, log.cursor, torch.where(running, chosen_S, NO_TOKEN)[None])
    log.logprobs_CS.index_copy_(0, log.cursor, logprobs_S[None])
    log.cursor.add_(1)
    ended = (chosen_S == state.stops_XS).any(0) | (state.position_S >= state.end_S)
    going = running & ~ended
    state.token_S.copy_(torch.where(going, chosen_S, state.token_S))
    state.position_S.add_(going)
    state.running_S.copy_(going)


def fused_advance_slots(chosen_S: Tensor, logprobs_S: Tensor, state: SlotState, log: TokenLog, *, block: int = _BLOCK) -> None:
    """`advance_slots` on CUDA (or in Triton's interpreter): one program, since the cursor is everyone's."""
    X, S = state.stops_XS.shape
    assert all(x.stride(-1) == 1 for x in (chosen_S, logprobs_S, *state, log.ids_CS, log.logprobs_CS)), "slots lie side by side"
    jitted(_advance)[(1,)](chosen_S, logprobs_S, *state, *log, S, state.stops_XS.stride(0), log.ids_CS.stride(0),
                        log.logprobs_CS.stride(0), X=X, NOBODY=NO_TOKEN, BLOCK=block, num_warps=_WARPS)


def _advance(chosen_ptr, logprob_ptr, token_ptr, position_ptr, end_ptr, running_ptr, stops_ptr, ids_ptr, logprobs_ptr, cursor_ptr,
          S, stops_row, ids_row, logprobs_row, X: tl.constexpr, NOBODY: tl.constexpr, BLOCK: tl.constexpr):
    """Triton: all slots, BLOCK at a time."""
    cursor = tl.load(cursor_ptr)
    tl.debug_barrier()  # no thread moves the cursor before all have read it
    for start in range(0, S, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        real = slot < S
        chosen = tl.load(chosen_ptr + slot, mask=real, other=0)
        logprob = tl.load(logprob_ptr + slot, mask=real, other=0.0)
        position = tl.load(position_ptr + slot, mask=real, other=0)
        end = tl.load(end_ptr + slot, mask=real, other=0)
        running = tl.load(running_ptr + slot, mask=real, other=0)
        going = (running == 1) & (position < end)
        for stop in tl.static_range(X):
            going = going & (chosen != tl.load(stops_ptr + stop * stops_row + slot, mask=real, other=0))
        tl.store(ids_ptr + cursor * ids_row + slot, tl.where(running == 1, chosen, NOBODY), mask=real)
        tl.store(logprobs_ptr + cursor * logprobs_row + slot, logprob, mask=real)
        tl.store(token_ptr + slot, chosen, mask=real & going)
        tl.store(position_ptr + slot, position + going.to(tl.int64), mask=real)
        tl.store(running_ptr + slot, going.to(tl.int64), mask=real)
    tl.store(cursor_ptr, cursor + 1)

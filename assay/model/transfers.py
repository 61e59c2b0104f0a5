"""Transfers between the machine's memory and a device, without holding up what else is under way there."""

from collections.abc import Mapping

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Values to a device, without waiting for what is under way there: on CUDA from pinned memory, since any other copy waits."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def to_host(tensor: Tensor) -> Tensor:
    """Values in the machine's memory. What lies on a GPU comes through pinned memory on the current stream: any other copy holds up
    whatever another thread launches meanwhile."""
    if not tensor.is_cuda:
        return tensor.detach()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach(), non_blocking=True)
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    return pinned


def read_numbers(named: Mapping[str, Tensor]) -> dict[str, float]:
    """Numbers that a device has computed, after one wait for all: where other processes share a GPU, each wait takes milliseconds."""
    return dict(zip(named, torch.stack([value.double() for value in named.values()]).tolist(), strict=True)) if named else {}

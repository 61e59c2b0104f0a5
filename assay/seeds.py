"""Seeds with an address: `derive(seed, "rollout", step, problem)` is the same number on every machine, in any order."""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *address: str | int) -> int:
    """A 63-bit seed that depends on every part of the address and on where one part ends and the next begins."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (seed, *address))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *address: str | int, device: str = "cpu") -> "torch.Generator":
    """A torch generator seeded at that address; no ambient RNG is read or changed."""
    import torch

    return torch.Generator(device).manual_seed(derive(seed, *address))

"""Triton JIT: a kernel is compiled when it is first launched, so that Triton need not be installed where no GPU is."""

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def jitted(kernel: Callable) -> Any:
    """The kernel as Triton launches it; `tl`, which its module names for type checkers alone, is bound there first."""
    import triton
    import triton.language

    kernel.__globals__["tl"] = triton.language
    return triton.jit(kernel)

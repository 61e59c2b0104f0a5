"""Interoperation: our checks and models inside other people's tools."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.interop.hf import Prove

__all__ = ["Prove"]


def __getattr__(name: str) -> Any:
    """`from assay.interop import Prove` loads transformers, and only then."""
    if name == "Prove":
        from assay.interop.hf import Prove

        return Prove
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Assay trains, post-trains, distils, edits and evaluates language models, and proves every artifact it hands over."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.api import (
        compare,
        distill,
        dpo,
        edit,
        evaluate,
        grpo,
        kto,
        load,
        merge,
        pretrain,
        prove,
        prune,
        publish,
        reward_model,
        sample,
        sft,
        steer,
        ttt,
        verify,
    )

__version__ = "0.1.0"
__all__ = ["compare", "distill", "dpo", "edit", "evaluate", "grpo", "kto", "load", "merge", "pretrain", "prove", "prune", "publish",
           "reward_model", "sample", "sft", "steer", "ttt", "verify"]


def __getattr__(name: str) -> Any:
    """The API on first use: importing assay loads no torch."""
    if name in __all__:
        function = getattr(importlib.import_module("assay.api"), name)
        globals()[name] = function  # a package of the same name (assay.editing), imported later, must not take its place
        return function
    raise AttributeError(f"module 'assay' has no attribute {name!r}")

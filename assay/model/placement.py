"""Where a model lives and in what it computes: the only file that knows devices, compilation and compute dtypes."""

import torch

from assay.errors import UsageError
from assay.model.transformer import Transformer


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def place_for_training(model: Transformer, device: str, *, compute: torch.dtype | None = None, compile: bool | None = None,
                       recompute: bool = False) -> Transformer:
    """fp32 master weights everywhere; on a GPU bf16 compute and torch.compile, unless told otherwise."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"device {device!r}: torch sees no GPU here; use --device cpu")
    on_gpu = device.startswith("cuda")
    model.to(device, torch.float32)
    model.compute_dtype = compute or (torch.bfloat16 if on_gpu else torch.float32)
    model.recompute = recompute
    if compile or (compile is None and on_gpu):
        # Block by block: all layers share one compiled graph, so that compilation takes seconds, whatever the depth.
        for block in model.blocks:
            block.compile(dynamic=False)
    return model

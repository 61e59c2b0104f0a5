"""Compute dtype and masters of a run, as --dtype and --master-dtype ask for them, and where they are refused."""

from typing import Any

import torch

from assay.errors import UsageError
from assay.model.transformer import ModelConfig

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def asked_compute(config: Any) -> torch.dtype | None:
    """Compute dtype that was asked for; None: as the device has it. Recipes without --dtype compute as the device does. Masters in bf16
    have nothing for fp32 to see."""
    return COMPUTE_DTYPES.get(getattr(config, "dtype", None) or ("bf16" if asked_masters(config) == torch.bfloat16 else ""))


def asked_masters(config: Any) -> torch.dtype:
    return COMPUTE_DTYPES[getattr(config, "master_dtype", "fp32")]


def compute_bytes(config: Any, device: str) -> int:
    """Bytes of a number in the forward pass."""
    return (asked_compute(config) or (torch.bfloat16 if device.startswith("cuda") else torch.float32)).itemsize


def refuse_bf16_masters(config: Any, *, adapter: bool) -> None:
    if asked_masters(config) == torch.float32:
        return
    if adapter:
        raise UsageError("--master-dtype bf16 is for the whole model: an adapter's masters are small, and what is frozen keeps its "
                         "file's dtype")
    if config.dtype not in (None, "bf16"):
        raise UsageError(f"--master-dtype bf16 computes in bf16, and --dtype {config.dtype} was asked for; leave one of them out")
    if config.fsdp or config.shards > 1 or config.gpus > 1:
        raise UsageError("--master-dtype bf16 rounds in one process; leave --fsdp, --shards and --gpus out")


def refuse_fp16(config: Any, model: ModelConfig) -> None:
    """Refuse fp16 where it cannot work, before anything is computed."""
    if asked_compute(config) != torch.float16:
        return
    if model.family.startswith("gemma"):
        raise UsageError(f"--dtype fp16: the residual stream of a {model.family} model exceeds 65,504, the largest number of fp16; train "
                         "it with --dtype bf16, or with fp32 where the card has no bf16")
    if config.fsdp or config.shards > 1 or config.gpus > 1:
        raise UsageError("--dtype fp16 finds its loss scale in one process; leave --fsdp, --shards and --gpus out, or use --dtype bf16")

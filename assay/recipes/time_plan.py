"""Time plan: how long a step will take, from the arithmetic of a config and how fast this device multiplies, tried for a moment.

What a step has beside its products (norms, attention's softmax, the optimizer, launching) is in the share of that speed that training
reached where it was measured. A model too small to keep its device busy takes longer than it says, and the plan says so.
"""

import math
import re
import time

import torch

from assay.model.families import parameter_shapes
from assay.model.transformer import ModelConfig, qkv_rows
from assay.recipes.memory_plan import MemoryPlan

# Of the speed of a large product, on an H200: LoRA of an 8B 0.66, of a 1.7B 0.54, a 135M whole 0.50 (results/size.txt, results/train.txt).
REACHED = 0.55
BUSY = 10**8  # parameters, below which launching decides
_SIDE = {"cuda": 4096, "cpu": 512}  # of the matrices that are tried
_TRIED = 0.2  # seconds


def forward_operations(config: ModelConfig, length: int) -> float:
    """Floating-point operations of a token on its way through the model, in a row of so many; of a mixture those of its chosen experts."""
    shapes = parameter_shapes(config)
    read = {"position.weight"} if config.tied else {"position.weight", "embed.weight"}  # one that is the head too is multiplied with
    matrices = sum(math.prod(shape) * _share(config, name) for name, shape in shapes.items() if len(shape) > 1 and name not in read)
    seen = sum(min(length, window or length) for window in config.windows) / 2
    return 2 * matrices + 4 * seen * qkv_rows(config)[0]


def _share(config: ModelConfig, name: str) -> float:
    """Share of a matrix that a token is multiplied with: 1, or the active share of experts."""
    experts = re.fullmatch(r"blocks\.(\d+)\.mlp\.(up|down)\.weight", name)
    if config.experts is None or experts is None or not config.mixture_at(int(experts[1])):
        return 1.0
    return config.experts.active / config.experts.count


def step_operations(plan: MemoryPlan, tokens: int) -> float:
    """Operations of a step, forward and backward. What is frozen needs no gradient of its own; activations that are recomputed cost another
    forward pass."""
    adapter = plan.work.lora_r or plan.model.rank
    passes = (2 if adapter else 3) + plan.work.checkpointing
    return tokens * passes * forward_operations(plan.model.config, plan.work.length)


def product_speed(device: str) -> float:
    """Floating-point operations a second of a large product in the dtype that training has there: the fastest of a few."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    side, dtype = _SIDE[kind], torch.bfloat16 if kind == "cuda" else torch.float32
    matrix, fastest = torch.randn(side, side, device=device, dtype=dtype), math.inf
    ends = time.perf_counter() + _TRIED
    for tried in range(1000):
        began = time.perf_counter()
        _ = (matrix @ matrix)[0, 0].item()  # waits for it
        fastest = min(fastest, time.perf_counter() - began) if tried else fastest  # the first loads a library
        if tried > 1 and time.perf_counter() > ends:
            break
    return 2 * side**3 / fastest


def step_seconds(plan: MemoryPlan, tokens: int, speed: float) -> float:
    return step_operations(plan, tokens) / (REACHED * speed)


def time_in_words(plan: MemoryPlan, tokens: int, speed: float) -> str:
    busy = "" if plan.model.parameters >= BUSY else "; a model as small as this takes longer, since launching decides"
    seconds = step_seconds(plan, tokens, speed)
    return (f"  {'a step':12} {seconds:8.2f} s or so of {tokens:,} tokens: {step_operations(plan, tokens):.1e} operations, at "
            f"{REACHED:.0%} of the {speed:.1e} a second that this device multiplies with{busy}")

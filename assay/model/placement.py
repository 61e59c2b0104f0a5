"""Devices, compilation and compute dtypes of a model: the only file that knows them."""

import contextlib
import contextvars
import gc
import importlib
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.kernels import cached_attention, gated_activation, linear, low_rank, rms_norm, rotary
from assay.model.quantised import is_code, register_quantised_product
from assay.model.transformer import Transformer

_EAGER = contextvars.ContextVar("eager", default=False)
_COMPILER = "torch._inductor.compile_fx"  # imports all that compiles, and starts the processes that compile beside each other
_LOADING = list[threading.Thread]()


@contextlib.contextmanager
def capture_graph(pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """A CUDA graph of what is done meanwhile. Two things would invalidate it: the copies of a save in another thread, unless only this
    thread's acts count; and Python's collector, if the dead objects that it finds hold another graph. So it waits."""
    graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield graph
    finally:
        if collecting:
            gc.enable()


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def require_device(device: str) -> str:
    """The device itself, where it has a name that we compute on and is here."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device):
        raise UsageError(f"device {device!r}: expected cpu, cuda, or one of several GPUs as in cuda:1")
    if device != "cpu" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r}: torch sees no GPU here; use --device cpu")
    if device != "cpu" and int(device.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {device!r}: torch sees {torch.cuda.device_count()} GPU(s) here, counted from cuda:0")
    return device


def load_compiler_beside(device: str) -> None:
    """Import torch's compiler in a thread, where a model will be compiled: it takes seconds, while weights and data are read."""
    if device.startswith("cuda") and _COMPILER not in sys.modules and not _LOADING:
        _LOADING.append(threading.Thread(target=importlib.import_module, args=(_COMPILER,), name="compiler", daemon=True))
        _LOADING[0].start()


def await_compiler() -> None:
    """Wait for the compiler's import before anything asks for it: a module that another thread has half imported is no compiler."""
    for thread in _LOADING:
        thread.join()


def place_for_training(model: Transformer, device: str, *, compute: torch.dtype | None = None, compile: bool | None = None,
                       recompute: bool = False, masters: torch.dtype = torch.float32) -> Transformer:
    """Place a model for training: on a GPU bf16 compute and torch.compile, unless told otherwise. What is trained is in `masters`; what is
    frozen keeps the dtype that it came in where the model computes in half precision, and is widened, exactly and once, where it computes
    in fp32."""
    require_device(device)
    await_compiler()
    on_gpu = device.startswith("cuda")
    model.compute_dtype = compute or (torch.bfloat16 if on_gpu else torch.float32)
    model.recompute = recompute
    if any(parameter.is_meta for parameter in model.parameters()):  # one that others will send: what has no memory yet gets none here
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    else:
        model.to(device)
    for name, parameter in model.named_parameters():
        if not is_code(name) and (parameter.requires_grad or model.compute_dtype == torch.float32):
            parameter.data = parameter.data.to(masters if parameter.requires_grad else torch.float32)
    cached_attention.register_cached_attention()
    if on_gpu:
        gated_activation.register_gated_backward()
        linear.register_weight_gradient()
        low_rank.register_adapted_linear()
        register_quantised_product()
        rms_norm.register_norm_backward()
        rotary.register_rotated_backward()
    if compile or (compile is None and on_gpu):
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # fp32 is asked for where it is meant
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")  # what ours remember never changes
        # Block by block: all layers share one compiled graph, so that compilation takes seconds, whatever the depth.
        # Of a layer with experts the attention alone: its router is read on the host, in another shape at every step.
        options = repeatable_kernels(model.compute_dtype)
        for layer, block in enumerate(model.blocks):
            (block.attn if model.config.mixture_at(layer) else block).compile(dynamic=False, options=options)  # type: ignore[union-attr]
    return model


def repeatable_kernels(compute: torch.dtype) -> dict[str, str | int | bool | Callable[..., object]] | None:
    """Compiler options that make a run repeat its bits. In half precision the sums are our own kernels; in fp32 they are the compiler's,
    which it would choose by a stopwatch: on one H200 two runs of one command then differed by 2e-6 after two steps."""
    told = compute == torch.float32 and "deterministic" in importlib.import_module("torch._inductor").list_options()
    return {"deterministic": True} if told else None


def place_for_inference(model: Transformer, device: str, *, compute: torch.dtype | None = None) -> Transformer:
    """Place a model for inference: as a run computes, uncompiled, with nothing to train. Every tensor stays in the dtype that it came in,
    where that can be."""
    return place_for_training(model.requires_grad_(False), device, compute=compute, compile=False)


def frozen_tensors(model: Transformer) -> dict[str, Tensor]:
    """Tensors that no training changes, under the names that they have where no layer is adapted."""
    return {name.replace(".base.", "."): parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Eager execution for the length of the block: what runs a few times, each in another shape, is not worth a compilation.

    Where torch's compiler was never loaded nothing is compiled, and loading it to say so would cost every proof 1.7 s.
    """
    before = _EAGER.set(True)
    _BLOCKS.begin()
    try:
        yield
    finally:
        _BLOCKS.end()
        _EAGER.reset(before)


class _EagerBlocks:
    """Blocks that are uncompiled now, in whatever thread. The compiler's stance is one for all threads: where two blocks overlapped and
    each gave back what it had found, the one that ended last left the whole process uncompiled for good."""

    def __init__(self) -> None:
        self.count, self.lock = 0, threading.Lock()
        self.stance: Any = None

    def begin(self) -> None:
        with self.lock:
            self.count += 1
            if self.stance is None and "torch._dynamo" in sys.modules:
                self.stance = torch.compiler.set_stance("force_eager")

    def end(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0 and self.stance is not None:
                self.stance.__exit__(None, None, None)
                self.stance = None


_BLOCKS = _EagerBlocks()


def is_uncompiled() -> bool:
    """Whether `uncompiled` holds here. A graph that was captured then serves no step: its kernels round otherwise, and are slower."""
    return _EAGER.get()


@contextlib.contextmanager
def fp32_uncompiled(*models: Transformer) -> Iterator[None]:
    """The models compute in fp32 and uncompiled inside the block: two ways to compute one thing then hardly differ by rounding.

    On a GPU activations are recomputed in the backward pass, which changes no bit: in fp32 they, and the frozen weights that each layer
    widens for itself, would take several times what the run itself takes.
    """
    kept = [(model.compute_dtype, model.recompute) for model in models]
    for model in models:
        model.compute_dtype = torch.float32
        model.recompute |= model.embed.weight.is_cuda
    try:
        with uncompiled():
            yield
    finally:
        for model, (dtype, recompute) in zip(models, kept, strict=True):
            model.compute_dtype, model.recompute = dtype, recompute

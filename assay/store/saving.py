"""Saving a live model: its checkpoint contents (foreign names, config, lineage, probe answers), written in the background."""

import contextlib
import copy
import dataclasses
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from assay.model.families import config_to_hf, hf_layout, to_foreign
from assay.model.patch import Patch
from assay.model.probe_logits import compute_probe_logits
from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer
from assay.model.transfers import to_host
from assay.model.transformer import ModelConfig, Transformer
from assay.store import checkpoint
from assay.store.checkpoint import Checkpoint, Contents
from assay.store.digests import code_digest, environment
from assay.store.peft import write_adapter
from assay.store.safetensors_files import tensor_bytes

SPARE_OF_DEVICE = 8  # one in so many bytes of a GPU stays free beside a snapshot
MEMORY_INFO = Path("/proc/meminfo")
CONTROL_GROUPS = {Path("/sys/fs/cgroup"): ("memory.max", "memory.current", "inactive_file"),  # version 2, then 1
                  Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
SPARE_OF_MEMORY = 2  # one in so many bytes that the machine has free stays free beside a copy that is kept


@dataclass(frozen=True)
class Ancestor:
    """Weights that this checkpoint came from or rests on: named by digest, with the place where they were."""

    weights: str
    path: str
    held: str | None = None  # nf4, int8 or bf16, where `weights` is the digest of what those weights came to in that dtype


@dataclass(frozen=True)
class Lineage:
    """Lineage that a proof may expect. `moved`: differs from the parent; `same`: equals it; `new`: nothing came before."""

    change: Literal["new", "moved", "same"] = "new"
    parent: Ancestor | None = None
    frozen: tuple[str, ...] = ()  # tensors that must equal the parent's, bit for bit
    movement_bound: float | None = None  # how far the optimizer could have moved one element since the parent
    taught_to_stop: bool = False  # the data ended its answers with a stop token, so generations must end
    weight_set: Literal["raw", "ema"] | None = None  # which of a run's two sets these weights are; None: there was one
    scored_set: Literal["raw", "ema"] | None = None  # which of them was scored; "ema" lies in the optimizer's file
    rebased: Mapping[str, Any] | None = None  # of a merge into other weights than were trained on: which, and what it changed
    rounded: str | None = None  # dtype that the parent's values were rounded to, where not all of them fit it as they were


def model_contents(model: Transformer, tokenizer: Tokenizer | None, stops: SpecialTokens, lineage: Lineage, *,
                   dtype: torch.dtype = torch.float32,
                   run_config: Mapping[str, Any] | None = None, trainer: Mapping[str, Any] | None = None,
                   optimizer: Mapping[str, Tensor] | None = None) -> Contents:
    """A whole model. The tensors are live views where the dtype allows: BackgroundSaver or write() copies them."""
    weights = to_foreign(hf_layout(model.config), {name: p.detach().to(dtype) for name, p in model.named_parameters()})
    files = model_files(model.config, tokenizer, stops, dtype)
    facts = _facts(model.config, tokenizer, lineage, run_config)
    return Contents("model", weights, files, facts, compute_probe_logits(model)._asdict(), optimizer, trainer)


def adapter_contents(model: Transformer, patch: Patch, base: Ancestor, tokenizer: Tokenizer | None, lineage: Lineage, *,
                     rslora: bool = False, run_config: Mapping[str, Any] | None = None, trainer: Mapping[str, Any] | None = None,
                     optimizer: Mapping[str, Tensor] | None = None) -> Contents:
    """An adapter whose live model, base and patch together, is `model`."""
    fields, weights = write_adapter(model.config, patch, base.path, rslora=rslora)
    files = {"adapter_config.json": json_bytes(fields), **(tokenizer.files() if tokenizer else {})}
    facts = _facts(model.config, tokenizer, lineage, run_config) | {"base": dataclasses.asdict(base)}
    return Contents("adapter", weights, files, facts, compute_probe_logits(model)._asdict(), optimizer, trainer)


def model_files(config: ModelConfig, tokenizer: Tokenizer | None, stops: SpecialTokens, dtype: torch.dtype) -> dict[str, bytes]:
    """config.json, generation_config.json and the tokenizer's files, which agree on every special id."""
    eos = sorted(stops.stop_ids)
    ids = {"bos_token_id": stops.bos, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
    fields = config_to_hf(config, str(dtype).removeprefix("torch.")) | ids
    return {"config.json": json_bytes(fields), "generation_config.json": json_bytes(ids | {"do_sample": False}),
            **(tokenizer.files() if tokenizer else {})}


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _facts(config: ModelConfig, tokenizer: Tokenizer | None, lineage: Lineage, run_config: Mapping[str, Any] | None) -> dict[str, Any]:
    return dataclasses.asdict(lineage) | {
        "frozen": list(lineage.frozen), "model_config": dataclasses.asdict(config) | {"windows": list(config.windows)},
        "run_config": None if run_config is None else dict(run_config), "code": code_digest(), "environment": environment(),
        "tokenizer": tokenizer.digest if tokenizer else None, "template": tokenizer.template_digest if tokenizer else None}


class BackgroundSaver:
    """Writer of checkpoints in a background thread, one after another. The next save waits for the one under way, and raises what it raised
    before it begins; but where a GPU has room for its copies beside the other's, they are made and wait there instead of the loop."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "save")
        self._pending: list[Future[Checkpoint]] = []
        self._leaving: Callable[[], Future[Contents] | None] = lambda: None  # a copy that leaves the GPU; its memory is its owner's

    def save(self, where: Path, contents: Contents | Callable[[], Contents],
             after: Callable[[Checkpoint], object] | None = None, *, headroom: int = 0) -> None:
        """Return once nothing that the caller does later can change what is saved.

        On a GPU the copies are made there, where so much more stays free, and leave it beside the loop.

        `contents` may hold live tensors, which are copied here; a function makes contents that are already its own, and
        is called here, when no other snapshot is held. `after` runs in the thread once the checkpoint is committed.
        """
        self.make_room(contents, headroom)
        owned = contents() if callable(contents) else owned_contents(contents, headroom)
        self._pending.append(self._writer.submit(_write, where, owned, after, _copied(owned)))

    def make_room(self, contents: Contents | Callable[[], Contents], headroom: int = 0) -> None:
        """Wait for saves under way, unless there is one at the most and the GPU has room for copies of these contents too."""
        self.check()
        if len(self._pending) > 1 or callable(contents) or not room_on_device(_tensors(contents), headroom):
            self.wait()

    def copy(self, contents: Contents, *, headroom: int = 0) -> Callable[[], Contents]:
        """A copy in the machine's memory that nothing the caller does later can change, to be saved later: a function that gives it. It
        is made as `save` makes it, and what is on a GPU leaves it beside the loop."""
        owned = owned_contents(contents, headroom)
        leaving = self._writer.submit(_in_memory, owned, _copied(owned))
        self._leaving = weakref.ref(leaving)
        return leaving.result

    @property
    def busy(self) -> bool:
        return any(future is not None and not future.done() for future in (*self._pending, self._leaving()))

    def check(self) -> None:
        """Raise what a finished save raised; never waits."""
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()

    def wait(self) -> Checkpoint | None:
        """The newest checkpoint being saved, once it and those before it are committed; None if no save was begun since the last wait."""
        pending, self._pending = self._pending, []
        futures.wait(pending)
        return [each.result() for each in pending][-1] if pending else None

    def close(self) -> None:
        """Wait for the save under way, and raise what it raised."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def __enter__(self) -> "BackgroundSaver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies on the CPU that share no memory with the originals."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(to_host(tensor)) for name, tensor in tensors.items()}


def owned_contents(contents: Contents, headroom: int = 0) -> Contents:
    """Copy of the contents in memory that nobody else can reach: on the GPU where they lie, if there is room, else on the CPU."""
    if room_on_device(_tensors(contents), headroom):
        with contextlib.suppress(torch.OutOfMemoryError):
            return _owned(contents, device_snapshot)
    return _owned(contents, snapshot)


def _tensors(contents: Contents) -> list[Tensor]:
    return [*contents.weights.values(), *(contents.optimizer or {}).values()]


def device_snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies where the originals lie: a GPU makes them in milliseconds, and the loop goes on."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def room_on_device(tensors: list[Tensor], headroom: int = 0) -> bool:
    """Whether the GPU has room for copies of these tensors; False where none lies on a GPU."""
    on_device = [tensor for tensor in tensors if tensor.is_cuda]
    if not on_device:
        return False
    free, total = torch.cuda.mem_get_info(on_device[0].device)
    return sum(map(tensor_bytes, on_device)) + headroom + total // SPARE_OF_DEVICE <= free


def room_in_memory(size: int) -> bool:
    """Whether the machine's memory has room for a copy of so many bytes that stays; False where the machine does not say what is free."""
    return size <= free_memory() // SPARE_OF_MEMORY


def free_memory() -> int:
    """Bytes of the machine's memory that can be had: of the machine, or of the control group that this process is in. 0: unknown."""
    try:
        named = dict(line.split(":") for line in MEMORY_INFO.read_text().splitlines())
        free = 1024 * int(named["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return 0
    for group, (limit, used, cached) in CONTROL_GROUPS.items():
        with contextlib.suppress(OSError, KeyError, ValueError):  # there is none, or it has no limit
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free = min(free, int((group / limit).read_text()) - int((group / used).read_text()) + int(counts[cached]))
    return max(0, free)


def _in_memory(contents: Contents, copied: torch.cuda.Event | None) -> Contents:
    """The same contents, off the GPU; as they are where they do not lie on one."""
    if copied is None:
        return contents
    with beside_the_loop(copied):
        return _owned(contents, snapshot)


def _copied(contents: Contents) -> torch.cuda.Event | None:
    """CUDA event that happens when the copies on a GPU are made; None where there are none."""
    there = next((tensor for tensor in contents.weights.values() if tensor.is_cuda), None)
    return None if there is None else torch.cuda.current_stream(there.device).record_event()


def _owned(contents: Contents, copied: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> Contents:
    return replace(contents, weights=copied(contents.weights), probes=copied(contents.probes),
                   optimizer=None if contents.optimizer is None else copied(contents.optimizer),
                   files=dict(contents.files), facts=copy.deepcopy(contents.facts),
                   trainer=copy.deepcopy(contents.trainer))


def _write(where: Path, contents: Contents, after: Callable[[Checkpoint], object] | None, copied: torch.cuda.Event | None) -> Checkpoint:
    with beside_the_loop(copied):
        written = checkpoint.write_checkpoint(where, contents)
    if after is not None:
        after(written)
    return written


@contextlib.contextmanager
def beside_the_loop(copied: torch.cuda.Event | None) -> Iterator[None]:
    """A stream of its own, which begins when the copies are made: what it brings to the CPU waits for no step, and no step for it."""
    if copied is None:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_event(copied)
    with torch.cuda.stream(stream):
        yield

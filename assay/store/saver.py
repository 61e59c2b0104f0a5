"""Saving beside the loop: a snapshot is taken at once and written in a thread; a failure is raised at the next call."""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from assay.store import checkpoint
from assay.store.checkpoint import Checkpoint, Contents


class BackgroundSaver:
    """At most one save is under way; the next one waits for it, and raises what it raised before it begins."""

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, "save")
        self._pending: Future[Checkpoint] | None = None

    def save(self, where: Path, contents: Contents | Callable[[], Contents],
             after: Callable[[Checkpoint], object] | None = None) -> None:
        """Return once nothing that the caller does later can change what is saved.

        `contents` may hold live tensors, which are copied here; a function makes contents that are already its own, and
        is called here, when no other snapshot is held. `after` runs in the thread once the checkpoint is committed.
        """
        self.wait()
        owned = contents() if callable(contents) else own(contents)
        self._pending = self._writer.submit(_write, where, owned, after)

    def check(self) -> None:
        """Raise what a finished save raised; never waits."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> Checkpoint | None:
        """The checkpoint being saved, once it is committed; None if no save was begun since the last wait."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

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
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
            for name, tensor in tensors.items()}


def own(contents: Contents) -> Contents:
    """The same contents in memory that nobody else can reach."""
    return replace(contents, weights=snapshot(contents.weights), probes=snapshot(contents.probes),
                   optimizer=None if contents.optimizer is None else snapshot(contents.optimizer),
                   files=dict(contents.files), facts=copy.deepcopy(contents.facts),
                   trainer=copy.deepcopy(contents.trainer))


def _write(where: Path, contents: Contents, after: Callable[[Checkpoint], object] | None) -> Checkpoint:
    written = checkpoint.write(where, contents)
    if after is not None:
        after(written)
    return written

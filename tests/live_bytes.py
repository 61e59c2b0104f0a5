"""Live bytes: what tensors hold at the most while a block runs, counted storage by storage as torch's operators make them.

A GPU's own counter says the same of its memory. Storages that were there before, and those over a mapped file, are not counted. Of a tensor
that lies in parts (DTensor) this process's part is counted.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in storages((args, kwargs or {})):
            self._known.add(storage)  # made elsewhere, where nobody has counted it
        found = func(*args, **(kwargs or {}))
        for storage in storages(found):
            if storage.device.type != "meta" and storage not in self._known:
                self._count(storage)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield getattr(leaf, "_local_tensor", leaf).untyped_storage()

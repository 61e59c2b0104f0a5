"""World: the processes that compute one run together, as torchrun's variables name them, or this one alone.

Only process 0 runs the recipe and writes; the others wait for its calls. Everything that travels between processes goes through here.
"""

import contextlib
import datetime
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from assay.errors import AssayError, UsageError
from assay.model.placement import default_device, require_device

PATIENCE = 120.0  # seconds: a process that says nothing for so long has died or hangs
BEAT = 2.0  # seconds between signs of life of process 0, which may evaluate, save and prove for longer than any patience


class World:
    """Rank and size, and the device of this process. Used as a context: the others learn when process 0 has ended, however it did."""

    def __init__(self, rank: int, size: int, device: str, store: Any = None):
        self.rank, self.size, self.device, self._store = rank, size, device, store
        self._called = 0
        self._over = threading.Event()
        self._through_host = size > 1 and dist.get_backend() == "gloo"  # which carries tensors of the CPU only

    def __enter__(self) -> "World":
        if self.size > 1 and self.rank == 0:
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.size == 1:
            return
        self._over.set()
        if self.rank == 0:
            self._store.set(f"call {self._called}", json.dumps({"end": True}))
        dist.destroy_process_group()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._store.add("beat", 1)

    # ---------------------------------------------------------------- calls of process 0

    def announce(self, call: dict[str, Any]) -> None:
        if self.size > 1:
            self._store.set(f"call {self._called}", json.dumps(call))
            self._called += 1
            if self._called > 2:
                self._store.delete_key(f"call {self._called - 3}")

    def calls(self) -> Iterator[dict[str, Any]]:
        """What process 0 asks for, until it ends."""
        for number in itertools.count():
            call = json.loads(self._next(f"call {number}"))
            if call.get("end"):
                return
            yield call

    def reply(self, value: Any) -> None:
        self._store.set(f"reply {self.rank}", json.dumps(value))

    def replies(self) -> list[Any]:
        """Of all others, in order of rank."""
        found = [json.loads(self._store.get(f"reply {rank}")) for rank in range(1, self.size)]
        for rank in range(1, self.size):
            self._store.delete_key(f"reply {rank}")
        return found

    def _next(self, key: str) -> bytes:
        beats, heard = -1, time.monotonic()
        while True:
            with contextlib.suppress(RuntimeError):  # a wait that ends in vain
                self._store.wait([key], datetime.timedelta(seconds=BEAT))
                return self._store.get(key)
            try:
                now = self._store.add("beat", 0)
            except RuntimeError as error:
                raise AssayError(f"process {self.rank}: process 0 is gone ({str(error).splitlines()[0]})") from None
            if now != beats:
                beats, heard = now, time.monotonic()
            elif time.monotonic() - heard > PATIENCE:
                raise AssayError(f"process {self.rank}: process 0 has given no sign of life for {PATIENCE:.0f} s")

    # ---------------------------------------------------------------- tensors

    def broadcast(self, tensor: Tensor) -> None:
        """Process 0's values into everyone's tensor."""
        if self.size > 1:
            self._carry(tensor, lambda carried: dist.broadcast(carried, 0), back=self.rank != 0)

    def send(self, tensor: Tensor, to: int) -> None:
        self._carry(tensor, lambda carried: dist.send(carried, to), back=False)

    def receive(self, tensor: Tensor, source: int) -> None:
        self._carry(tensor, lambda carried: dist.recv(carried, source), back=True)

    def _carry(self, tensor: Tensor, move: Any, *, back: bool) -> None:
        carried = tensor.detach().cpu() if self._through_host else tensor.detach()
        carried = carried.contiguous()
        try:
            move(carried)
        except (RuntimeError, ValueError) as error:
            raise AssayError(f"process {self.rank} of {self.size}: another process died or did not answer within {PATIENCE:.0f} s "
                             f"({str(error).splitlines()[0][:200]}). The run goes on from its last checkpoint by the same command, on as "
                             "many processes as are left") from None
        if back and carried.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(carried)


def join_world(device: str | None) -> World:
    """As torchrun, or `--gpus`, set the environment; one process where nothing is set."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(0, 1, device or default_device())
    chosen = local_device(device or default_device())
    backend = "nccl" if chosen.startswith("cuda") and not shared_gpu() else "gloo"
    patience = datetime.timedelta(seconds=PATIENCE)
    store, rank, size = next(dist.rendezvous("env://", timeout=patience))
    if chosen.startswith("cuda"):
        torch.cuda.set_device(chosen)
    dist.init_process_group(backend, store=dist.PrefixStore("tensors", store), rank=rank, world_size=size, timeout=patience)
    return World(rank, size, chosen, dist.PrefixStore("calls", store))


def local_device(device: str) -> str:
    if device == "cpu":
        return device
    if device != "cuda":
        raise UsageError(f"--device {device} with several processes: each takes the GPU of its own number; give cuda or cpu")
    return require_device(f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}")


def shared_gpu() -> bool:
    """More processes than GPUs here: NCCL refuses that, gloo carries their sums through the host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))) > torch.cuda.device_count()

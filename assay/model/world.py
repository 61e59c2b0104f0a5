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
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from assay.errors import AssayError, UsageError
from assay.model.placement import default_device, require_device

PATIENCE = 120.0  # seconds: a process that says nothing for so long has died or hangs; --process-timeout says another number
BEAT = 2.0  # seconds between signs of life of process 0, which may evaluate, save and prove for longer than any patience
LAST_WORD = 10.0  # seconds that process 0 waits at the end until the others know that it is one
KEPT_CALLS = 1024
GLANCE, LONGEST_PAUSE = 0.0002, 0.01  # seconds between two looks for a call: at first, and where it is long in coming
LOST = ("connection", "gloo", "timed out", "timeout", "nccl", "socket", "broken pipe")  # what torch says of another process's end


class World:
    """Rank and size, and the device of this process. Used as a context: the others learn when process 0 has ended, however it did."""

    def __init__(self, rank: int, size: int, device: str, store: Any = None, patience: float = PATIENCE):
        self.rank, self.size, self.device, self.patience, self._store = rank, size, device, patience, store
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
            self._wait_until_heard(1.0 if error is not None else LAST_WORD)
        dist.destroy_process_group()

    def _wait_until_heard(self, seconds: float) -> None:
        """The store goes with process 0: the others hear of the end before it does, those that can."""
        until = time.monotonic() + seconds
        while self._store.add("heard", 0) < self.size - 1 and time.monotonic() < until:
            time.sleep(LONGEST_PAUSE)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._store.add("beat", 1)

    # ---------------------------------------------------------------- calls of process 0

    def announce(self, call: dict[str, Any]) -> None:
        if self.size > 1:
            self._store.set(f"call {self._called}", json.dumps(call))
            self._called += 1
            if self._called > KEPT_CALLS:  # read long ago: whoever is called and does not answer holds process 0 up much sooner
                self._store.delete_key(f"call {self._called - KEPT_CALLS - 1}")

    def calls(self) -> Iterator[dict[str, Any]]:
        """Calls of process 0, until it ends."""
        for number in itertools.count():
            call = json.loads(self._next(f"call {number}"))
            if call.get("end"):
                self._store.add("heard", 1)
                return
            yield call

    def reply(self, value: Any) -> None:
        self._store.set(f"reply {self.rank}", json.dumps(value))

    def replies(self) -> list[Any]:
        """Replies of all other processes, in order of rank."""
        with self.lost_in_words():
            found = [json.loads(self._store.get(f"reply {rank}")) for rank in range(1, self.size)]
        for rank in range(1, self.size):
            self._store.delete_key(f"reply {rank}")
        return found

    def post(self, key: str, value: Any) -> None:
        """Post a value under a key, beside the calls: for threads, and for any process."""
        self._store.set(f"post {key}", json.dumps(value))

    def fetch(self, key: str, seconds: float) -> Any:
        """Value that was posted, once it is; None where nothing came in time. Never holds the connection that others speak through."""
        until = time.monotonic() + seconds
        while not self._store.check([f"post {key}"]):
            if time.monotonic() > until:
                return None
            time.sleep(LONGEST_PAUSE)
        return json.loads(self._store.get(f"post {key}"))

    def made_by_first(self, what: str, make: Callable[[], object]) -> None:
        """Process 0 makes something on the disk, which may take its time; the others wait until it has, or is gone."""
        if self.rank == 0:
            make()
        if self.size > 1 and self.rank == 0:
            self.post(what, True)
        while self.rank > 0:
            try:
                if self.fetch(what, self.patience):
                    return
            except RuntimeError as error:
                raise AssayError(f"process {self.rank}: process 0 is gone before it made {what} ({str(error).splitlines()[0]})") from None

    def _next(self, key: str) -> bytes:
        """Next call under a key, polled ever more slowly: a wait would hold the connection, which other threads speak through."""
        beats, heard, asked, pause = -1, time.monotonic(), 0.0, GLANCE
        try:
            while not self._store.check([key]):
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_PAUSE)
                if time.monotonic() - asked < BEAT:
                    continue
                asked, now = time.monotonic(), self._store.add("beat", 0)
                if now != beats:
                    beats, heard = now, asked
                elif asked - heard > self.patience:
                    raise AssayError(f"process {self.rank}: process 0 has given no sign of life for {self.patience:.0f} s")
            return self._store.get(key)
        except RuntimeError as error:
            raise AssayError(f"process {self.rank}: process 0 is gone ({str(error).splitlines()[0]})") from None

    # ---------------------------------------------------------------- tensors

    def broadcast(self, tensor: Tensor) -> None:
        """Process 0's values into everyone's tensor."""
        if self.size > 1:
            self._carry(tensor, lambda carried: dist.broadcast(carried, 0), back=self.rank != 0)

    def send(self, tensor: Tensor, to: int) -> None:
        self._carry(tensor, lambda carried: dist.send(carried, to), back=False)

    def receive(self, tensor: Tensor, source: int) -> None:
        self._carry(tensor, lambda carried: dist.recv(carried, source), back=True)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all processes, the same bits in each: a new tensor."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def _reduced(self, tensor: Tensor, rule: Any) -> Tensor:
        total = tensor.detach().clone()
        self._carry(total, lambda carried: dist.all_reduce(carried, rule), back=True)
        return total

    def gather_rows(self, part: Tensor, rows: int, to: int) -> Tensor | None:
        """A tensor of so many rows, of which each process holds a part (`rows_held`), whole in process `to`, where gloo needs it on
        the CPU; None elsewhere."""
        sent = self._padded(part, rows)
        whole = sent.new_empty((self.size * len(sent), *sent.shape[1:])) if self.rank == to else None
        with self.lost_in_words():
            dist.gather(_bytes(sent), None if whole is None else [_bytes(each) for each in whole.split(len(sent))], dst=to)
        return None if whole is None else whole[:rows]

    def scatter_rows(self, whole: Tensor | None, like: Tensor, rows: int, source: int) -> Tensor:
        """This process's part, as `like`, of a tensor that process `source` holds whole."""
        received = torch.empty_like(self._padded(like, rows))
        parts = None if whole is None else [self._like_all(self.rows_held_by(rank, whole), received) for rank in range(self.size)]
        with self.lost_in_words():
            dist.scatter(_bytes(received), None if parts is None else [_bytes(each) for each in parts], src=source)
        return received[: len(like)].to(like.device)

    def _like_all(self, part: Tensor, due: Tensor) -> Tensor:
        """A process's rows where they can travel, as many as the fullest has: where they lie, if nothing need be added."""
        part = part.detach().to(device=due.device, dtype=due.dtype).contiguous()
        if len(part) == len(due):
            return part
        padded = torch.zeros_like(due)
        padded[: len(part)] = part
        return padded

    def _padded(self, part: Tensor, rows: int) -> Tensor:
        """Part padded to as many rows as the fullest process has, where it can travel."""
        padded = part.new_zeros((-(-rows // self.size), *part.shape[1:]), device="cpu" if self._through_host else part.device)
        padded[: len(part)] = part.detach()
        return padded

    def rows_held(self, whole: Tensor) -> Tensor:
        """This process's part of a tensor: a stretch of rows, as FSDP cuts it; of a small one some processes hold nothing."""
        return self.rows_held_by(self.rank, whole)

    def rows_held_by(self, rank: int, whole: Tensor) -> Tensor:
        each = -(-len(whole) // self.size)
        return whole[rank * each : (rank + 1) * each]

    def _carry(self, tensor: Tensor, move: Any, *, back: bool) -> None:
        carried = tensor.detach().cpu() if self._through_host else tensor.detach()
        carried = carried.contiguous()
        with self.lost_in_words():
            move(carried)
        if back and carried.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(carried)

    @contextlib.contextmanager
    def lost_in_words(self) -> Iterator[None]:
        """Raise a plain sentence where another process is gone or silent, instead of what torch says of it."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            first = (str(error).splitlines() or [""])[0][:200]
            if not any(sign in str(error).lower() for sign in LOST):
                raise
            raise AssayError(f"process {self.rank} of {self.size}: another process died or did not answer within {self.patience:.0f} s "
                             f"({first}). The run goes on from its last checkpoint by the same command, on as many processes as are "
                             "left") from None


def _bytes(tensor: Tensor) -> Tensor:
    """Tensor's memory as bytes: every backend carries bytes, not every one every dtype."""
    return tensor.view(torch.uint8)


def join_world(device: str | None, patience: float = PATIENCE) -> World:
    """Join the world as torchrun, or `--gpus`, set the environment; one process where nothing is set."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(0, 1, device or default_device(), patience=patience)
    chosen = local_device(device or default_device())
    backend = "nccl" if chosen.startswith("cuda") and not shared_gpu() else "gloo"
    # To come together may take longer than any later answer: machines do not start at once.
    store, rank, size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=max(patience, PATIENCE))))
    store.set_timeout(datetime.timedelta(seconds=patience))
    if chosen.startswith("cuda"):
        torch.cuda.set_device(chosen)
    dist.init_process_group(backend, store=dist.PrefixStore("tensors", store), rank=rank, world_size=size,
                            timeout=datetime.timedelta(seconds=patience))
    return World(rank, size, chosen, dist.PrefixStore("calls", store), patience)


def local_device(device: str) -> str:
    if device == "cpu":
        return device
    if device != "cuda":
        raise UsageError(f"--device {device} with several processes: each takes the GPU of its own number; give cuda or cpu")
    return require_device(f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}")


def shared_gpu() -> bool:
    """Whether there are more processes than GPUs here: NCCL refuses that, gloo carries their sums through the host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))) > torch.cuda.device_count()

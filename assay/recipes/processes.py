"""Processes of one run: started by `--gpus`, joined as torchrun's variables say, and what those do that do not run the recipe."""

import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from assay.data.batch import Batch
from assay.errors import UsageError
from assay.guard.loss_preflight import loss_gradients
from assay.guard.training_guards import check_replicas, parameter_digests
from assay.learn import loop
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.loop import Accumulate
from assay.learn.objectives import Objective
from assay.learn.parallel import ParallelAccumulate, answer_calls, replica_digests
from assay.model.transformer import Transformer
from assay.model.world import World, join_world
from assay.outcome import RunOutcome
from assay.verdict import Verdict, proven, refuted

PARITY = 1e-2  # of the gradient's norm; sums of bf16 products in another order differ by 1e-3, a share left out by 0.1 or more
SECONDS_TO_END = 30.0  # seconds that the others have to end once process 0 has


def join_processes(device: str | None, shards: int, say: Callable[[str], None]) -> tuple[World, Callable[[str], None]]:
    """This run's processes, and who speaks: the first alone."""
    world = join_world(device)
    if world.size > shards:
        raise UsageError(f"{world.size} processes and --shards {shards}: a step is cut into shards, and every process takes at least one. "
                         f"Give --shards {world.size} or more; the result depends on it, and not on the number of processes")
    if world.size > 1 and world.rank == 0:
        say(f"{world.size} processes compute {shards} shards of every step")
    return world, say if world.rank == 0 else _silent


def _silent(_: str) -> None:
    """Of several processes one speaks."""


def accumulate_on(device: str) -> Accumulate:
    return GraphedAccumulate() if device.startswith("cuda") else loop.accumulated


def accumulate_together(world: World | None, shards: int, model: Transformer, objective: Objective, device: str) -> Accumulate:
    """One process and one shard: nothing is put in between."""
    inner = accumulate_on(device)
    if shards == 1:
        return inner
    return ParallelAccumulate(inner, world or World(0, 1, device), shards, model, objective)


def follow(world: World, model: Transformer, objective: Objective, folder: str) -> RunOutcome:
    """What every process but the first does: compute what it is asked for until the run ends."""
    with world:
        answer_calls(world, accumulate_on(world.device), model, objective, parameter_digests)
    return RunOutcome(Path(folder), followed=True)


def check_processes(accumulate: Accumulate) -> list[Verdict]:
    """Whether all processes hold the same tensors, those that are frozen too; nothing where there is one process."""
    if not isinstance(accumulate, ParallelAccumulate) or accumulate.world.size == 1:
        return []
    return [check_replicas(replica_digests(accumulate.world, accumulate.model, parameter_digests))]


def check_world_parity(accumulate: Accumulate, batch: Batch, micro: int) -> list[Verdict]:
    """Whether the processes together make of a batch what one alone makes of it: nothing is divided twice, left out or summed in part."""
    if not isinstance(accumulate, ParallelAccumulate):
        return []
    weight = float(batch.weight.sum())
    (together, summed), (alone, plain) = (
        loss_gradients(accumulate.model, partial(_loss_of, compute, accumulate.model, accumulate.objective, batch, micro, weight),
                       backward=False) for compute in (accumulate, accumulate.inner))
    scale = max(1e-30, math.sqrt(sum(float(gradient.float().square().sum()) for gradient in plain.values())))
    apart = math.sqrt(sum(float((summed[name].float() - gradient.float()).square().sum()) for name, gradient in plain.items())) / scale
    words = (f"gradients of {accumulate.world.size} processes and {accumulate.shards} shards, and of one process, differ by {apart:.1e} of "
             f"their norm, bound {PARITY:.0e}; losses {together:.6f} and {alone:.6f}")
    close = apart <= PARITY and abs(together - alone) <= PARITY * max(1.0, abs(alone)) and summed.keys() == plain.keys()
    return [(proven if close else refuted)("world_parity", words, apart=apart, shards=accumulate.shards)]


def _loss_of(compute: Accumulate, *given: Any) -> Tensor:
    return compute(*given).loss


def launch_processes(words: Sequence[str], count: int) -> int:
    """The same command in `count` processes of this machine; the exit code of the first. A signal goes to it: it saves, and all end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    processes = [subprocess.Popen([sys.executable, "-m", "assay", *words], start_new_session=rank > 0,
                                  env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)]
    previous = {number: signal.signal(number, _pass_to(processes[0])) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _exit_code(processes[0].wait())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for process in processes[1:]:
            _end(process)


def _pass_to(process: "subprocess.Popen[bytes]") -> Callable[[int, FrameType | None], None]:
    def handle(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    return handle


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

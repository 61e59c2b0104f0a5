"""Processes of one run: started by `--gpus`, joined as torchrun's variables say, and what those do that do not run the recipe."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from assay.errors import UsageError
from assay.learn import loop
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.loop import Accumulate
from assay.learn.objectives import Objective
from assay.learn.parallel import ParallelAccumulate, answer_calls
from assay.model.transformer import Transformer
from assay.model.world import World, join_world
from assay.outcome import RunOutcome

GRACE = 30.0  # seconds that the others have to end once process 0 has


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
        answer_calls(world, accumulate_on(world.device), model, objective)
    return RunOutcome(Path(folder), followed=True)


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
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

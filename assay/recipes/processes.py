"""Processes of one run: started by `--gpus`, joined as torchrun's variables say, and what those do that do not run the recipe."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from assay.data.batch import Batch
from assay.errors import GuardStop, UsageError
from assay.generate.sampler_weights import tensor_checksums
from assay.guard.loss_preflight import loss_gradients
from assay.guard.training_guards import UpdateAccount, check_replicas
from assay.learn import loop
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.ema import Ema
from assay.learn.loop import Accumulate, Step
from assay.learn.objectives import Objective
from assay.learn.parallel import ParallelAccumulate, answer_calls, replica_digests
from assay.learn.sharded import ShardedModel, gradient_distance, lies_in_parts
from assay.model.transformer import Transformer
from assay.model.world import World, join_world
from assay.outcome import RunOutcome
from assay.recipes.options import Pretrain, Trained
from assay.verdict import Verdict, proven, refuted

PARITY = 1e-2  # of the gradient's norm; sums of bf16 products in another order differ by 1e-3, a share left out by 0.1 or more
USUAL_SHARDS = 8  # of a step, where several GPUs are asked for and nothing else is
SECONDS_TO_END = 30.0  # seconds that the others have to end once process 0 has


def join_processes(config: Trained | Pretrain, say: Callable[[str], None]) -> tuple[World, Callable[[str], None]]:
    """Join this run's processes; returns them, and the function that prints: in the first process alone."""
    refuse_unclear_parts(config)
    world = join_world(config.device, config.process_timeout)
    if world.size > config.shards and not config.fsdp:
        raise UsageError(f"{world.size} processes and --shards {config.shards}: a step is cut into shards, and every process takes at "
                         f"least one. Give --shards {world.size} or more; the result depends on it, and not on the number of processes. Or "
                         "give --fsdp, where one process cannot hold the model's moments")
    if world.size > 1 and world.rank == 0:
        say(f"{world.size} processes hold the model in parts (FSDP)" if config.fsdp else
            f"{world.size} processes compute {config.shards} shards of every step")
    return world, say if world.rank == 0 else _silent


def refuse_unclear_parts(config: Trained | Pretrain) -> None:
    if config.fsdp and config.shards > 1:
        raise UsageError(f"--fsdp and --shards {config.shards}: with FSDP the processes are the shards; give one of them")
    if config.fsdp and isinstance(config, Trained) and (config.optim == "adamw_8bit" or config.base_dtype is not None):
        raise UsageError("--fsdp shards tensors of numbers, not of codes: leave --optim adamw_8bit and --base-dtype out")


def _silent(_: str) -> None:
    """Print nothing: of several processes one speaks."""


def accumulate_on(device: str) -> Accumulate:
    return GraphedAccumulate() if device.startswith("cuda") else loop.accumulated


def accumulate_together(world: World | None, shards: int, model: Transformer, objective: Objective, device: str) -> Accumulate:
    """Gradient accumulation over all processes and shards; with one of each, nothing is put in between."""
    inner = accumulate_on(device)
    if shards == 1:
        return inner
    return ParallelAccumulate(inner, world or World(0, 1, device), shards, model, objective)


def sharded_model(config: Trained | Pretrain, world: World | None, model: Transformer, optimizer: torch.optim.Optimizer,
                  objective: Objective, ema: Ema | None) -> ShardedModel | None:
    """The sharded model, with --fsdp and several processes; None with one process, where there is nothing to shard."""
    if world is None or world.size == 1 or not config.fsdp:
        return None
    return ShardedModel(world, model, optimizer, objective, tensor_checksums, ema)


def moments_wait(config: Trained | Pretrain, *, in_parts: bool = False) -> str | None:
    """Device of the optimizer moments before step 1: the CPU where they are to be sharded, so that no GPU ever holds them whole; nowhere in
    a process that is sent its part, and in all of them where the model is opened in parts."""
    if holds_outline(config) or in_parts:
        return "meta"
    return "cpu" if shards_parameters(config) else None


def shards_parameters(config: Trained | Pretrain) -> bool:
    """Whether parameters are sharded: with --fsdp and several processes."""
    return config.fsdp and int(os.environ.get("WORLD_SIZE", "1")) > 1


def holds_outline(config: Trained | Pretrain) -> bool:
    """Whether this process holds an outline: every one but the first, with --fsdp, needs shapes, and is sent its rows of every tensor."""
    return shards_parameters(config) and int(os.environ.get("RANK", "0")) > 0


def follow(world: World, model: Transformer, objective: Objective, config: Trained | Pretrain,
           optimizer: Callable[[], torch.optim.Optimizer] | None = None, ema: float = 0.0) -> RunOutcome:
    """Loop of every process but the first: compute what process 0 asks for until the run ends."""
    with world:
        if config.fsdp and optimizer is not None:
            sharded = sharded_model(config, world, model, optimizer(), objective, Ema(model, ema) if ema else None)
            assert sharded is not None, "a process that follows is one of several"
            sharded.answer_calls()
        else:
            answer_calls(world, accumulate_on(world.device), model, objective, replica_checksums)
    return RunOutcome(Path(config.out), followed=True)


def check_processes(accumulate: Accumulate) -> list[Verdict]:
    """Whether all processes hold the same tensors, those that are frozen too; nothing where there is one process."""
    if not isinstance(accumulate, ParallelAccumulate) or accumulate.world.size == 1:
        return []
    return [check_replicas(replica_digests(accumulate.world, accumulate.model, replica_checksums))]


def replica_checksums(model: nn.Module) -> dict[str, str]:
    """Checksums of every bit of every tensor, computed on its device; cheap enough to compare between steps."""
    return {name: f"{total:x}" for name, total in tensor_checksums(dict(model.named_parameters())).items()}


def check_world_parity(accumulate: Accumulate, batch: Batch, micro: int) -> list[Verdict]:
    """Whether the processes together make of a batch what one alone makes of it: nothing is divided twice, left out or summed in part."""
    if not isinstance(accumulate, ParallelAccumulate):
        return []
    weight = float(batch.weight.sum())
    (together, summed), (alone, plain) = (
        loss_gradients(accumulate.model, partial(_loss_of, compute, accumulate.model, accumulate.objective, batch, micro, weight),
                       backward=False) for compute in (accumulate, accumulate.inner))
    apart = gradient_distance(summed, plain)
    words = (f"gradients of {accumulate.world.size} processes and {accumulate.shards} shards, and of one process, differ by {apart:.1e} of "
             f"their norm, bound {PARITY:.0e}; losses {together:.6f} and {alone:.6f}")
    close = apart <= PARITY and abs(together - alone) <= PARITY * max(1.0, abs(alone))
    return [(proven if close else refuted)("world_parity", words, apart=apart, shards=accumulate.shards)]


def check_sharding(sharded: ShardedModel, batch: Batch, micro: int) -> list[Verdict]:
    """One process's loss and gradients of a batch; then the model is cut into parts, and what all processes make of the same batch is
    compared with it. What was cut is, put together again, what it was: weights, moments and average."""
    weight = float(batch.weight.sum())
    compute = partial(_loss_of, loop.accumulated, sharded.model, sharded.objective, batch, micro, weight)
    alone, plain = loss_gradients(sharded.model, compute, backward=False)
    due = plain if sharded.never_whole else {name: gradient.cpu() for name, gradient in plain.items()}
    del plain
    sharded.shard()
    together = float(sharded(sharded.model, sharded.objective, batch, micro, weight).loss)
    found = sharded.keep_gradients() if sharded.never_whole else sharded.gather_gradients()
    apart, size = gradient_distance(found, due), sharded.world.size
    words = (f"gradients of {size} processes that hold the model in parts, and of one that holds all of it, differ by {apart:.1e} of their "
             f"norm, bound {PARITY:.0e}; losses {together:.6f} and {alone:.6f}")
    close = apart <= PARITY and abs(together - alone) <= PARITY * max(1.0, abs(alone))
    return [check_parts(sharded), (proven if close else refuted)("world_parity", words, apart=apart, processes=size),
            *check_matrix_direction(sharded)]


def check_matrix_direction(sharded: ShardedModel) -> list[Verdict]:
    """Whether Muon orthogonalises matrices that lie in parts as it does whole ones; nothing where another rule moves them."""
    if (found := sharded.directions_apart()) is None:
        return []
    name, apart = found
    words = f"Muon's direction of {name}, made of parts, is {apart:.1e} of its norm from that of the whole matrix, bound {PARITY:.0e}"
    return [(proven if apart <= PARITY else refuted)("directions", words, apart=apart)]


def check_parts(sharded: ShardedModel) -> Verdict:
    wrong, count = sharded.unlike_before(), len(sharded.parts) + len(sharded.own_state())
    if wrong:
        return refuted("sharded", f"{len(wrong)} of {count} tensors are not what was cut into parts: {', '.join(wrong[:3])}", tensors=wrong)
    return proven("sharded", f"{count} tensors (weights, moments, average) lie in parts with {sharded.world.size} processes, and are "
                             "together what they were, bit for bit", tensors=count)


class PartedAccount(UpdateAccount):
    """An update account of a model that nobody holds whole: every process looks at its own rows."""

    def __init__(self, sharded: ShardedModel, reachable: Collection[str]):
        self.sharded = sharded
        super().__init__(nn.ParameterDict(), None)
        self.model = sharded.own_parameters()
        self.begin(reachable)

    def begin(self, reachable: Collection[str] | None = None) -> None:
        super().begin(reachable)
        self.sharded.look_at_parts(names=list(self.before))

    def _moved_shares(self) -> dict[str, float]:
        return {name: moved / max(1, count) for name, (moved, count) in self.sharded.moved_counts().items()}


def check_parted_weights(sharded: ShardedModel) -> Verdict:
    """Every weight is a number, in whichever process it lies."""
    if bad := sharded.without_numbers():
        return refuted("weights", f"{len(bad)} tensor(s) hold values that are not finite: {', '.join(bad[:3])}", tensors=bad)
    return proven("weights", f"all {len(sharded.parts)} tensors are finite", tensors=len(sharded.parts))


def check_gathered(sharded: ShardedModel | None) -> list[Verdict]:
    """Whether what process 0 samples from is what all processes train; nothing where it samples from the trainer's own tensors."""
    if sharded is None:
        return []
    trained = sum(part.requires_grad for part in sharded.parts.values())
    if wrong := sharded.unlike_gathered():
        return [refuted("gathered", f"{len(wrong)} of {trained} trained tensors that process 0 samples from are not what the processes "
                                    f"hold now: {', '.join(wrong[:3])}; it sampled from an older policy, or rows were lost on their way",
                        tensors=wrong)]
    return [proven("gathered", f"all {trained} trained tensors that process 0 samples from are what {sharded.world.size} processes hold, "
                               "bit for bit", tensors=trained)]


def check_ranks(said: Sequence[Mapping[str, Any]], frozen: Sequence[Mapping[str, int]], taken: int) -> list[Verdict]:
    """Check what all processes report of themselves (`ShardedModel.said_by_all`): one step, one norm, one loss, and unchanged frozen
    rows.
    """
    strayed = sorted({name for now, before in zip(said, frozen, strict=True) for name in before if now["frozen"].get(name) != before[name]})
    if strayed:
        kept = refuted("frozen", f"{len(strayed)} frozen tensor(s) changed: {', '.join(strayed[:3])}", tensors=strayed)
    else:
        names = {name for rows in frozen for name in rows}
        kept = proven("frozen", f"all {len(names)} frozen tensors have their old bits in all processes", tensors=len(names))
    for rank, each in enumerate(said):
        if each["steps"] not in ([], [taken]):
            words = f"process {rank} counts {each['steps']} steps, the loop took {taken}: it skipped or repeated one"
            return [kept, refuted("ranks", words, rank=rank)]
        if each["applied"] != said[0]["applied"]:
            words = (f"process {rank} says of its last step {each['applied']}, process 0 {said[0]['applied']}: a value of one process was "
                     "taken for that of all")
            return [kept, refuted("ranks", words, rank=rank)]
    return [kept, proven("ranks", f"{len(said)} processes took the same {taken} steps, with the same loss and gradient norm in the last",
                         processes=len(said))]


def require_global(step: Step) -> None:
    """Require that a step's values are plain and of all processes: a DTensor would be one process's part of it."""
    values = {"loss": step.loss, "grad_norm": step.grad_norm, **step.metrics}
    if parts := [name for name, value in values.items() if lies_in_parts(value)]:
        raise GuardStop(f"step {step.index}: {', '.join(parts)} is a part of a value that lies with several processes (DTensor); it must "
                        "be gathered before it is written down")


def _loss_of(compute: Accumulate, *given: Any) -> Tensor:
    return compute(*given).loss


def shards_for(config: Trained | Pretrain) -> list[str]:
    """Number of shards that `--gpus` alone means: one that the usual numbers of GPUs divide, so that the run may resume on fewer."""
    return [] if config.fsdp or config.shards > 1 else ["--shards", str(max(USUAL_SHARDS, config.gpus))]


def launch_processes(words: Sequence[str], count: int) -> int:
    """Run the same command in `count` processes on this machine and return the exit code of the first. A signal goes to it: it saves, and
    all end.
    """
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

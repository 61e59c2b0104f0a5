"""Sharding faults: what goes wrong in silence where several processes hold one model in parts, or one chip computes wrong."""

import itertools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from assay.data.batch import Batch
from assay.learn import loop, sharded
from assay.learn.loop import Accumulated
from assay.learn.objectives import next_token
from assay.learn.sharded import ShardedModel
from assay.model.transformer import Transformer
from assay.model.world import World
from assay.recipes.step_replay import StepReplay
from assay.testing import two_processes
from assay.testing.fault_injection import Plant, fault, in_place_of, swap
from assay.testing.tiny_models import tiny_model
from assay.testing.tiny_training import MICRO_ROWS, TinyRun
from assay.testing.two_processes import a_sharded_muon_run, a_sharded_run
from assay.verdict import Verdict


def in_process_1() -> bool:
    return os.environ.get("RANK") == "1"


@fault("gradients reduced over a group of one", rows=("N01",), stage="distributed", check="world_parity", job=a_sharded_run)
@in_place_of(dist, "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor")  # since torch 2.13
def group_of_one(usual: Any, output: Tensor, input: Tensor, *_: Any, **__: Any) -> None:
    """Every process keeps its rows of its own gradient: each trains apart, and the curves are plausible."""
    output.copy_(input.chunk(dist.get_world_size())[dist.get_rank()])


@fault("gradients divided twice", rows=("N04",), stage="distributed", check="world_parity", job=a_sharded_run)
@in_place_of(sharded, "shard_parameters")
def divided_twice(usual: Any, model: Any, world: World) -> None:
    """FSDP divides by the number of processes, and the loop has divided by the tokens of all of them."""
    usual(model, world)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(float(world.size))


@fault("gradient norm of one process", rows=("N03",), stage="distributed", check="ranks", job=a_sharded_run)
@in_place_of(World, "sum")
def norm_of_one_process(usual: Any, world: World, values: Tensor) -> Tensor:
    """Each process clips by the norm of the rows that it holds."""
    return values.clone() if values.numel() == 1 else usual(world, values)


@fault("a process skips a step", rows=("N05",), stage="distributed", check="ranks", job=a_sharded_run)
@in_place_of(torch.optim.AdamW, "step")
def a_process_skips_a_step(usual: Any, optimizer: torch.optim.AdamW, *given: Any) -> Any:
    """It found a value that was not finite, and asked nobody."""
    return None if in_process_1() else usual(optimizer, *given)


@fault("process 1 reads process 0's rows", rows=("D16",), stage="distributed", check="rows", job=a_sharded_run)
@in_place_of(sharded, "rows_of")
def rows_of_another(usual: Any, batch: Batch, rank: int, size: int) -> Batch:
    return usual(batch, 0, size)


@fault("tied embedding drifts where it is sharded", rows=("N11",), stage="distributed", check="sharded", job=a_sharded_run)
@in_place_of(ShardedModel, "_lend_to_forward_passes")
def embedding_drifts(usual: Any, held: ShardedModel) -> None:
    """Memory was made anew for the part of one process, and filled for the head alone."""
    usual(held)
    if in_process_1():
        sharded.own_part(held.model.embed.weight).mul_(1.01)


@fault("moments filled with zeros on resharding", rows=("N21", "N22"), stage="distributed", check="sharded", job=a_sharded_run)
@in_place_of(ShardedModel, "_own_moments")
def zeros_for_moments(usual: Any, model: ShardedModel) -> dict[str, dict[str, Tensor]]:
    """The offsets of the second part were counted with padding that is not in the file."""
    found = usual(model)
    if in_process_1():
        found["embed.weight"]["exp_avg"].zero_()
    return found


@fault("another seed in one process", rows=("O13",), stage="distributed", check="sharded", job=a_sharded_run)
def another_seed(_: Path) -> AbstractContextManager[None]:
    """What is trained is sent to all; what is frozen is each process's own."""
    usual = ShardedModel._own_rows

    def own_rows(model: ShardedModel, tensor: Tensor) -> Tensor:
        sent = usual(model, tensor)
        frozen = tensor.shape == model.shapes[two_processes.FROZEN]
        return model.world.rows_held(tensor).clone() if in_process_1() and frozen else sent

    seeds = swap(two_processes, "seed_of_weights", lambda rank: rank)
    return both(seeds, swap(ShardedModel, "_own_rows", own_rows))


@contextmanager
def both(one: AbstractContextManager[None], other: AbstractContextManager[None]) -> Iterator[None]:
    with one, other:
        yield


@fault("an older policy is sampled from", rows=("R01", "R02"), stage="distributed", check="gathered", job=a_sharded_run)
@in_place_of(ShardedModel, "refresh")
def older_policy(usual: Any, model: ShardedModel) -> None:
    """What lies with several processes is gathered for the first rollout, and never again."""


@fault("parts that come back changed from a hand-over", rows=("N02",), stage="distributed", check="gathered", job=a_sharded_run)
@in_place_of(ShardedModel, "refresh")
def parts_come_back_changed(usual: Any, model: ShardedModel) -> None:
    """Weights were moved away while the sampler drew, and one process put its own back from a stale copy."""
    usual(model)
    if in_process_1():
        sharded.own_part(model.model.embed.weight).mul_(1.01)


@fault("masters rounded to bf16 as they are cut", rows=("N10",), stage="distributed", check="sharded", job=a_sharded_run)
@in_place_of(ShardedModel, "_own_rows")
def masters_in_bf16(usual: Any, model: ShardedModel, tensor: Tensor) -> Tensor:
    """The widening back to fp32 was lost: from here on small updates are rounded away."""
    return usual(model, tensor).bfloat16().float()


@fault("Muon orthogonalises parts of a matrix", rows=("N25",), stage="distributed", check="directions", job=a_sharded_muon_run)
@in_place_of(ShardedModel, "_direction")
def parts_orthogonalised(usual: Any, model: ShardedModel, part: Tensor, *_: Any) -> Tensor:
    """What a process holds of a matrix is taken for a matrix: the loss falls, and the method is another one."""
    return sharded.matrix_direction(part, (len(part),))


def a_replayed_step(folder: Path, plant: Plant) -> list[Verdict]:
    """One micro-batch, three times before the first step and twice at a later one."""
    model, batch = tiny_model(), TinyRun().order().batch(0)
    with plant(folder):
        replay = StepReplay(1, loop.accumulated, model, next_token, MICRO_ROWS)
        return [*replay.check_start(batch), replay.check(7, batch)]


@fault("a chip computes wrong now and then", rows=("N43",), stage="optimizer", check="replay", job=a_replayed_step)
def wrong_now_and_then(_: Path) -> AbstractContextManager[None]:
    """The fifth pass through it has one wrong bit."""
    passes, usual = itertools.count(1), loop.accumulated

    def accumulated(model: Transformer, *given: Any) -> Accumulated:
        found = usual(model, *given)
        if next(passes) == 5 and model.embed.weight.grad is not None:
            model.embed.weight.grad.view(torch.int32)[7, 3] ^= 1
        return found

    return swap(loop, "accumulated", accumulated)

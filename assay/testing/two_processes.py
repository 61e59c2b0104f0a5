"""Two processes on one CPU that hold a tiny model in parts, forked for one job; what process 0 found comes back as verdicts."""

import importlib
import json
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from assay.data.batch import Batch
from assay.errors import AssayError, GuardStop
from assay.generate.sampler_weights import tensor_checksums
from assay.learn.loop import train
from assay.learn.objectives import next_token
from assay.learn.optim import adamw, muon
from assay.learn.sharded import ShardedModel, ShardedOptimizer
from assay.model.transformer import Transformer, qkv_rows
from assay.model.world import join_world
from assay.recipes.processes import check_gathered, check_ranks, check_sharding
from assay.testing.fault_injection import Plant
from assay.testing.tiny_models import tiny_model
from assay.verdict import Outcome, Verdict, proven, refuted

OptimizerOf = Callable[[Transformer], torch.optim.Optimizer]
FROZEN = "blocks.0.attn.qkv.weight"
STEPS, SECONDS_TO_ANSWER, ANSWER = 2, 90.0, "verdicts.json"


def seed_of_weights(rank: int) -> int:
    """Every process makes the model from the same seed."""
    return 0


def a_sharded_run(folder: Path, plant: Plant, optimizer_of: OptimizerOf | None = None) -> list[Verdict]:
    """A model with moments, as a resumed run has them, is cut into parts; two steps; and what all processes say of them."""
    with plant(folder):
        codes = fork_processes(lambda: _take_part(folder, optimizer_of or (lambda model: adamw(model.named_parameters(), 1e-2))), 2)
    if not (folder / ANSWER).exists():
        return [refuted("ranks", f"the processes ended with {codes} and said nothing")]
    said = json.loads((folder / ANSWER).read_text())
    return [Verdict(each["check"], Outcome(each["outcome"]), each["reason"], each["evidence"]) for each in said]


def a_sharded_muon_run(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: a sharded run with matrices that move by orthogonalised momentum."""
    return a_sharded_run(folder, plant, lambda model: muon(model.named_parameters(), lr_matrix=1e-2, lr_embed=1e-2, lr_scalar=1e-2,
                                                           slices={FROZEN.replace(".0.", ".1."): qkv_rows(model.config)}))


def fork_processes(act: Callable[[], object], count: int) -> list[int]:
    """Run one act in so many processes, which find each other as torchrun's do; their exit codes, in order of rank."""
    importlib.import_module("torch.distributed.fsdp")  # seconds, in every child that would do it
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os._exit(_exit_code(act))
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _exit_code(act: Callable[[], object]) -> int:
    try:
        act()
    except AssayError as error:
        print(f"process {os.environ['RANK']}: {error}", flush=True)
        return error.exit_code
    except BaseException:  # the child must not run on in its parent's place
        traceback.print_exc()
        return 99
    return 0


def _take_part(folder: Path, optimizer_of: OptimizerOf) -> None:
    torch.set_num_threads(1)
    world = join_world("cpu", SECONDS_TO_ANSWER)
    model = tiny_model(seed=seed_of_weights(world.rank)).requires_grad_(True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != FROZEN)
    optimizer = optimizer_of(model)
    for number, state in enumerate(optimizer.state.values()):
        first = state["exp_avg" if "exp_avg" in state else "momentum"]
        first.copy_(torch.linspace(-1e-4, 1e-4 + 1e-6 * number, first.numel()).view_as(first))
    sharded = ShardedModel(world, model, optimizer, next_token, tensor_checksums)
    with world:
        if world.rank > 0:
            sharded.answer_calls()
            return
        try:
            verdicts = _train(sharded)
        except GuardStop as stop:
            verdicts = list(stop.verdicts)
        (folder / ANSWER).write_text(json.dumps([verdict.to_json() for verdict in verdicts]))


def _train(sharded: ShardedModel) -> list[Verdict]:
    verdicts = check_sharding(sharded, _batch(0), micro=2)
    if any(verdict.outcome is Outcome.REFUTED for verdict in verdicts):
        return verdicts
    frozen = [each["frozen"] for each in sharded.said_by_all()]
    batches = [_batch(step) for step in range(STEPS)]
    for _ in train(sharded.model, ShardedOptimizer(sharded), batches, sharded.objective, micro=2, accumulate=sharded):
        pass
    rows = proven("rows", f"every row of {STEPS} steps was read by one process")
    sharded.refresh()
    return [*verdicts, rows, *check_gathered(sharded), *check_ranks(sharded.said_by_all(), frozen, STEPS)]


def _batch(step: int) -> Batch:
    """Five rows: one process has more than the other."""
    tokens = torch.randint(0, 256, (5, 16), generator=torch.Generator().manual_seed(step))
    weight = torch.ones(5, 16)
    weight[:, 0] = 0
    return Batch(tokens, weight, ids=tuple((5 * step + row,) for row in range(5)))

"""Scale on paper: memory, bytes on the wire, saves, proofs and lost work from 1 to 1,024 GPUs, for 135M, 8B and 70B.

    python bench/scale.py              the tables of docs/scale.md, from the constants in results/scale.txt
    python bench/scale.py --measure    measure gloo's protocol costs here with 2 and 4 processes (seconds), and print the line to record

A model of a few multiplications, not a simulation. What was measured stands in MEASURED with its source, and in results/scale.txt; what
was not stands in ASSUMED. Every table says which is which.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results" / "scale.txt"
GIB, GB, HOUR = 2.0**30, 1e9, 3600.0
GPUS = (1, 8, 64, 256, 1024)
PER_MACHINE = 8

MEASURED = {  # on one H200, each from the file that is named
    "bf16 peak, FLOP/s": (786e12, "results/train.txt"),
    "share of it that training reaches": (0.458, "results/train.txt, SmolLM2-135M, 395 k tokens/s"),
    "activations, bytes a token, layer and width": (33.0, "results/train.txt: 10.9 GiB, 2.3 of them state; 16,384 tokens, 30 × 576"),
    "written and hashed, bytes/s": (0.74e9, "results/size.txt: 16.5 GB of 8B weights in 22.2 s"),
    "opened and verified, bytes/s": (3.4e9, "results/size.txt: 15.3 GiB of 8B in 4.81 s, 16 cores"),
    "a proof's fixed part, s": (4.0, "results/time-to-proof.txt: assay prove of 135M, 3.7 to 4.1 s, imports most of it"),
}
ASSUMED = {  # not measured here: one GPU was at hand
    "GPU memory, bytes": (139 * GIB, "H200"),
    "link inside a machine, bytes/s": (400e9, "NVLink's data sheet says 450 each way"),
    "link between machines, bytes/s a GPU": (40e9, "one 400 Gb/s port a GPU, at 80 %"),
    "hours between failures of one GPU": (50_000.0, "Llama 3's report: 419 interruptions of 16,384 GPUs in 54 days"),
    "restart, s": (300.0, "a queue that answers at once, opening, compiling, preflight"),
    "tokens of a GPU in a step": (16_384.0, "weak scaling: the batch grows with the machines"),
    "largest useful batch, tokens": (8e6, "beyond it more tokens a step teach little more"),
}


def constant(name: str) -> float:
    return (MEASURED.get(name) or ASSUMED[name])[0]


@dataclass(frozen=True)
class Shape:
    name: str
    parameters: float
    layers: int
    width: int


SHAPES = (Shape("135M", 134.5e6, 30, 576), Shape("8B", 8.23e9, 36, 4096), Shape("70B", 70.6e9, 80, 8192))
STATE = 16  # bytes a parameter: fp32 weights, two moments, gradients
SAVED = 12  # of them in a checkpoint

# ---------------------------------------------------------------- the model


def link(gpus: int) -> float:
    return constant("link inside a machine, bytes/s" if gpus <= PER_MACHINE else "link between machines, bytes/s a GPU")


def compute_seconds(shape: Shape) -> float:
    """Forward and backward of a GPU's tokens: six operations a parameter and token."""
    return 6 * shape.parameters * constant("tokens of a GPU in a step") / (
        constant("bf16 peak, FLOP/s") * constant("share of it that training reaches"))


def activations(shape: Shape, *, recomputed: bool) -> float:
    """Of one GPU's tokens; computed again on the way back, a layer keeps two bytes a token and width, and one layer has all of its own."""
    tokens, each = constant("tokens of a GPU in a step"), constant("activations, bytes a token, layer and width") * shape.width
    return tokens * (2 * shape.layers * shape.width + each if recomputed else shape.layers * each)


def memory(shape: Shape, gpus: int, *, sharded: bool) -> float:
    """State over the GPUs that share it, two gathered layers in fp32 (the next is on its way), and activations, recomputed if need be."""
    state = STATE * shape.parameters / (gpus if sharded else 1)
    gathered = 8 * shape.parameters / shape.layers if sharded and gpus > 1 else 2 * shape.parameters
    kept = state + gathered + activations(shape, recomputed=False)
    return kept if kept <= constant("GPU memory, bytes") else state + gathered + activations(shape, recomputed=True)


def replicated_bytes(shape: Shape, gpus: int) -> float:
    """Through process 0 in a step: fp32 weights out and fp32 sums in, once for each level of the tree."""
    return 2 * 4 * shape.parameters * math.ceil(math.log2(gpus)) if gpus > 1 else 0.0


def sharded_bytes(shape: Shape, gpus: int) -> float:
    """Into and out of each GPU in a step: weights gathered for both passes and gradients scattered, all in fp32."""
    return (4 + 4 + 4) * shape.parameters * (gpus - 1) / gpus


def exposed(shape: Shape, gpus: int, *, sharded: bool) -> float:
    """Seconds of a step that wait for the wire: FSDP overlaps with computing, our tree comes after it."""
    sent = (sharded_bytes if sharded else replicated_bytes)(shape, gpus) / link(gpus)
    return max(0.0, sent - compute_seconds(shape)) if sharded else sent


def save_seconds(shape: Shape, gpus: int) -> float:
    """Each machine writes its share."""
    return SAVED * shape.parameters / constant("written and hashed, bytes/s") / math.ceil(gpus / PER_MACHINE)


def proof_seconds(shape: Shape) -> float:
    """One fresh process opens the checkpoint and its parent: however many GPUs trained it."""
    return constant("a proof's fixed part, s") + 2 * SAVED * shape.parameters / constant("opened and verified, bytes/s")


def between_saves(shape: Shape, gpus: int) -> float:
    """As recipes/save_pace.py: at most 1.5 % of the time, 2 to 30 minutes. The loop waits for the snapshot, a tenth of the save."""
    return min(1800.0, max(120.0, save_seconds(shape, gpus) / 10 / 0.015))


def lost_share(shape: Shape, gpus: int) -> float:
    """Of the time: at each failure half of what lies between two proven checkpoints, the save and proof under way, and the restart."""
    each = between_saves(shape, gpus) / 2 + save_seconds(shape, gpus) + proof_seconds(shape) + constant("restart, s")
    return each * gpus / (constant("hours between failures of one GPU") * HOUR)

# ---------------------------------------------------------------- the tables


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def per_size(value: Callable[[Shape, int], str]) -> list[list[str]]:
    return [[shape.name, *(value(shape, gpus) for gpus in GPUS)] for shape in SHAPES]


def headed(what: str) -> list[str]:
    return [what, *(f"{gpus:,}" for gpus in GPUS)]


def gib(number: float) -> str:
    room = constant("GPU memory, bytes")
    return f"{number / GIB:,.0f}" if number <= room else f"**{number / GIB:,.0f}**"


def seconds(number: float) -> str:
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"


def tables() -> dict[str, str]:
    """Title → table, in the order of docs/scale.md."""
    sources = [[name, f"{value:.3g}", kind, why] for kind, known in (("measured", MEASURED), ("assumed", ASSUMED))
               for name, (value, why) in known.items()]
    return {
        "constants": table(["constant", "value", "", "source"], sources),
        "gloo, measured here": gloo_table(recorded_gloo()),
        "GiB a GPU, replicated (bold: does not fit)": table(headed("GPUs"), per_size(lambda s, n: gib(memory(s, n, sharded=False)))),
        "GiB a GPU, sharded": table(headed("GPUs"), per_size(lambda s, n: gib(memory(s, n, sharded=True)))),
        "GB through process 0 in a step, replicated": table(headed("GPUs"), per_size(lambda s, n: seconds(replicated_bytes(s, n) / GB))),
        "GB into and out of each GPU in a step, sharded": table(headed("GPUs"), per_size(lambda s, n: seconds(sharded_bytes(s, n) / GB))),
        "seconds a step: computing + waiting for the wire, replicated": table(headed("GPUs"), per_size(
            lambda s, n: f"{seconds(compute_seconds(s))} + {seconds(exposed(s, n, sharded=False))}")),
        "seconds a step: computing + waiting for the wire, sharded": table(headed("GPUs"), per_size(
            lambda s, n: f"{seconds(compute_seconds(s))} + {seconds(exposed(s, n, sharded=True))}")),
        "seconds to write a checkpoint / to prove it": table(headed("GPUs"), per_size(
            lambda s, n: f"{seconds(save_seconds(s, n))} / {seconds(proof_seconds(s))}")),
        "expected lost work, share of the time": table(headed("GPUs"), per_size(lambda s, n: f"{lost_share(s, n):.2%}")),
        "where more than data parallelism begins": table(["", *(shape.name for shape in SHAPES)], limits()),
    }


def limits() -> list[list[str]]:
    """From the same constants."""
    room, tokens = constant("GPU memory, bytes"), constant("tokens of a GPU in a step")
    hidden = 12 * constant("bf16 peak, FLOP/s") * constant("share of it that training reaches") / 6 / link(1024)
    least = [next((str(n) for n in range(1, 1025) if memory(shape, n, sharded=True) <= room), "more") for shape in SHAPES]
    rows = [(room - 18 * shape.parameters / 1024 - 8 * shape.parameters / shape.layers) / (
        2 * shape.layers * shape.width + constant("activations, bytes a token, layer and width") * shape.width) for shape in SHAPES]
    opening = [(24 * shape.parameters / 16 + 16 * shape.parameters / shape.layers) / 2**30 for shape in SHAPES]
    return [["GPUs from which the sharded state fits", *least],
            ["GiB of process 0 before step 1 on 16 GPUs: weights, moments, three sets of gradients, a layer",
             *(f"{number:,.1f}" for number in opening)],
            ["tokens a GPU and step below which FSDP waits for the network", *[f"{hidden:,.0f}"] * len(SHAPES)],
            ["GPUs from which the batch is larger than is useful: tensor parallelism",
             *[f"{constant('largest useful batch, tokens') / tokens:,.0f}"] * len(SHAPES)],
            ["longest row of one GPU, tokens; beyond it context parallelism", *(f"{number / 1e3:,.0f} k" for number in rows)]]

# ---------------------------------------------------------------- gloo, measured


def gloo_table(found: dict[str, dict[str, float]]) -> str:
    return table(["processes", "round trip of 8 bytes, ms", "weights out, GB/s", "sums in, GB/s"],
                 [[size, f"{one['round trip ms']:.2f}", f"{one['broadcast GB/s']:.2f}", f"{one['tree GB/s']:.2f}"]
                  for size, one in found.items()])


def recorded_gloo() -> dict[str, dict[str, float]]:
    line = next(line for line in RESULTS.read_text().splitlines() if line.startswith("gloo: "))
    return json.loads(line.removeprefix("gloo: "))


def measure_gloo(size: int, megabytes: int = 32) -> dict[str, float]:
    import tempfile

    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_measured, (size, megabytes, folder), nprocs=size)
        return json.loads((Path(folder) / "found.json").read_text())


def _measured(rank: int, size: int, megabytes: int, folder: str) -> None:
    """The three things that learn/parallel.py does with a wire: a word to all and back, weights to all, sums up a binary tree."""
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    word, payload = torch.zeros(1, dtype=torch.float64), torch.zeros(megabytes * 250_000)

    def tree() -> None:
        step = 1
        while step < size:
            if rank % (2 * step) == step:
                dist.send(payload, rank - step)
                return
            if rank % (2 * step) == 0 and rank + step < size:
                dist.recv(payload, rank + step)
            step *= 2

    def best(act: Callable[[], object], times: int) -> float:
        found = []
        for _ in range(times):
            dist.barrier()
            began = time.perf_counter()
            act()
            dist.barrier()
            found.append(time.perf_counter() - began)
        return min(found)

    idle = best(lambda: None, 5)
    trip = best(lambda: dist.all_reduce(word), 20)
    out, into = (max(1e-9, best(act, 5) - idle) for act in (lambda: dist.broadcast(payload, 0), tree))
    if rank == 0:
        size_gb = payload.numel() * 4 / GB
        found = {"round trip ms": round(trip * 1e3, 3), "broadcast GB/s": round(size_gb / out, 3), "tree GB/s": round(size_gb / into, 3)}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure gloo here, and print the line for results/scale.txt")
    if parser.parse_args().measure:
        print("gloo: " + json.dumps({str(size): measure_gloo(size) for size in (2, 4)}))
        return
    for title, body in tables().items():
        print(f"### {title}\n\n{body}\n")


if __name__ == "__main__":
    main()

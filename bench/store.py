"""What proof costs the store: verified loading and background saving beside safetensors and torch.save, in one run.

    python -m bench.store            at SmolLM2's size (135 M parameters, made), bf16 and fp32
    python -m bench.store --small    a hundredth of it, to see that it runs

Loads read from the page cache, so that the disk does not hide the hashing. Medians over repeats, with the spread in
brackets, and the processor seconds: where other programs compete for the cores, those tell more than the clock.
`--out FILE` writes the lines to a file too.
"""

import argparse
import datetime
import hashlib
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from assay.seeds import generator
from assay.store import safetensors_files
from assay.store.checkpoint import Contents, open_checkpoint, write_checkpoint
from assay.store.saving import BackgroundSaver, snapshot

LOAD_GOAL = 1.3


class Times:
    """Seconds of one thing, over repeats: on the clock, and of all processors together."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.busy: list[float] = []

    def take(self, work: Callable[[], Any]) -> None:
        began, idle = time.perf_counter(), time.process_time()
        work()
        self.seconds.append(time.perf_counter() - began)
        self.busy.append(time.process_time() - idle)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def processor(self) -> float:
        return statistics.median(self.busy)

    def __str__(self) -> str:
        spread = f"[{min(self.seconds):.3f}, {max(self.seconds):.3f}]"
        return f"{self.median:7.3f} s {spread:15} processor {self.processor:6.3f} s"


def smollm2_shapes(scale: int = 1) -> dict[str, tuple[int, ...]]:
    """SmolLM2-135M: 30 layers, 576 wide, 9 heads of which 3 hold keys and values, 49,152 words, tied."""
    d, f, kv = 576, 1536, 192
    layer = {"input_layernorm": (d,), "self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d),
             "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, d), "post_attention_layernorm": (d,),
             "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49_152 // scale, d), "model.norm.weight": (d,)}
    for i in range(max(1, 30 // scale)):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def made_weights(dtype: torch.dtype, scale: int) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=generator(0, name)).to(dtype)
            for name, shape in smollm2_shapes(scale).items()}


def load_lines(weights: dict[str, Tensor], folder: Path, repeats: int) -> Iterator[str]:
    """Verified loading against load_file plus one pass of sha256, interleaved so that drift hits all alike."""
    where = folder / "checkpoint"
    written = write_checkpoint(where, Contents("model", weights))
    path = where / "model.safetensors"
    torch.save(weights, folder / "weights.pt")
    data = path.read_bytes()
    names = ["load_file", "load_file + touch", "torch.load", "sha256", "verified", "verified, thorough"]
    times = {name: Times() for name in names}
    for _ in range(repeats):
        times["load_file"].take(lambda: safetensors.torch.load_file(path))
        times["load_file + touch"].take(lambda: touch(safetensors.torch.load_file(path)))
        times["torch.load"].take(lambda: touch(torch.load(folder / "weights.pt", weights_only=True)))
        times["sha256"].take(lambda: hashlib.sha256(data).digest())
        times["verified"].take(lambda: touch(open_checkpoint(where, verify=False).weights()))
        times["verified, thorough"].take(lambda: touch(open_checkpoint(where).weights()))
    same = written.weights()
    assert all(torch.equal(same[name], weights[name]) for name in weights)
    rate = len(data) / times["sha256"].median / 1e9
    goal, verified = (times["load_file"], times["sha256"]), times["verified"]
    yield f"  safetensors load_file (maps, reads nothing) {times['load_file']}"
    yield f"  safetensors load_file, every page touched   {times['load_file + touch']}"
    yield f"  torch.load, every page touched              {times['torch.load']}"
    yield f"  sha256 alone, one core, {rate:.2f} GB/s           {times['sha256']}"
    yield f"  Assay: open and load, each byte verified    {times['verified']}"
    yield f"  Assay: the same after hashing the folder    {times['verified, thorough']}"
    clock = verified.median / sum(part.median for part in goal)
    processor = verified.processor / sum(part.processor for part in goal)
    yield (f"  verified load / (load_file + sha256) = {clock:.2f} on the clock (goal ≤ {LOAD_GOAL}), {processor:.2f} "
           "of processor time")


def touch(loaded: dict[str, Tensor]) -> None:
    """Read one byte of every page, as the first use of the weights would."""
    for tensor in loaded.values():
        tensor.view(-1).view(torch.uint8)[::4096].sum()


def save_lines(weights: dict[str, Tensor], folder: Path, repeats: int) -> Iterator[str]:
    """How long `save` keeps the loop waiting, against the snapshot copy alone; and whole saves, side by side."""
    names = ["snapshot", "stall", "background", "save_file", "save_file + fsync", "torch.save", "tensors"]
    times = {name: Times() for name in names}
    for i in range(repeats):
        times["snapshot"].take(lambda: snapshot(weights))
        with BackgroundSaver() as saver:
            def stalled(saver: BackgroundSaver = saver, where: Path = folder / f"step-{i:06d}") -> None:
                saver.save(where, Contents("model", weights))
            times["stall"].take(stalled)
            times["background"].take(saver.wait)
        shutil.rmtree(folder / f"step-{i:06d}")
        times["save_file"].take(lambda: safetensors.torch.save_file(weights, folder / "x"))
        times["save_file + fsync"].take(lambda: save_file_fsynced(weights, folder / "x"))
        times["torch.save"].take(lambda: torch.save(weights, folder / "x.pt"))
        os.unlink(folder / "x")
        times["tensors"].take(lambda: safetensors_files.write_tensors(folder / "x", weights))
        os.unlink(folder / "x")
    yield f"  the snapshot copy alone                     {times['snapshot']}"
    yield f"  Assay: save() returns after                 {times['stall']}"
    yield f"  Assay: then hashed and on the disk after    {times['background']}"
    yield f"  Assay: write_tensors, hashed and fsynced    {times['tensors']}"
    yield f"  safetensors save_file, nothing fsynced      {times['save_file']}"
    yield f"  safetensors save_file, then fsync           {times['save_file + fsync']}"
    yield f"  torch.save, nothing fsynced                 {times['torch.save']}"
    stall, copy = times["stall"], times["snapshot"]
    yield (f"  stall / snapshot copy = {stall.median / copy.median:.2f} on the clock (goal: no more than the copy), "
           f"{stall.processor / copy.processor:.2f} of processor time")


def save_file_fsynced(weights: dict[str, Tensor], path: Path) -> None:
    safetensors.torch.save_file(weights, path)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a hundredth of the size")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the lines there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm_memory(4 << 30)
    lines = []
    for line in report(100 if options.small else 1, options.repeats):
        print(line, flush=True)
        lines.append(line)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return 0


def warm_memory(size: int) -> None:
    """Touch memory once: in a virtual machine the first touch of a page costs several times what the later ones do."""
    torch.zeros(size // 8, dtype=torch.int64).add_(1)


def report(scale: int, repeats: int) -> Iterator[str]:
    others = os.getloadavg()[0]
    yield (f"$ python -m bench.store --repeats {repeats}\n"
           f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, python {platform.python_version()}, "
           f"torch {torch.__version__}, safetensors {safetensors.__version__}\n"
           f"{len(os.sched_getaffinity(0))} cores, load of other programs at the start {others:.1f}; "
           f"medians of {repeats} [min, max]")
    for dtype in (torch.bfloat16, torch.float32):
        weights = made_weights(dtype, scale)
        size = sum(tensor.nbytes for tensor in weights.values())
        count = sum(tensor.numel() for tensor in weights.values())
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            yield f"\n{count:,} parameters, {str(dtype).removeprefix('torch.')}, {size:,} bytes: loading"
            yield from load_lines(weights, Path(folder), repeats)
            yield f"\n{count:,} parameters, {str(dtype).removeprefix('torch.')}, {size:,} bytes: saving"
            yield from save_lines(weights, Path(folder), repeats)


if __name__ == "__main__":
    sys.exit(main())

"""What test-time training costs: documents read one at a time, and side by side, with a patch of their own each.

    python bench/ttt.py                                    # SmolLM2-135M's shape with made-up weights: speed does not depend on them
    python bench/ttt.py --documents 4 --tokens 128 --chunk 32 --batch 4 --depth 4 --device cpu

Goal: side by side at least 20 times faster than one at a time on a GPU. What it gains is told by `assay ttt`, and over seeds and
weight decays by `assay seeds ttt … --over weight-decay=0.5,1,2`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing can be installed, the checkout will do

from assay.learn.passing import Passing, read
from assay.model.batched_lora import TARGETS, Adapters, passing_sites
from assay.model.lora import fresh
from assay.model.placement import default_device
from assay.model.tiny import tiny_config
from assay.model.transformer import Transformer, initialised
from assay.seeds import generator
from assay.store.identity import environment


def main() -> None:
    flags = arguments()
    shape = replace(tiny_config(vocab=49152), width=576, depth=flags.depth, heads=9, kv_heads=3, head_dim=64, hidden=1536, max_length=8192,
                    windows=(None,) * flags.depth)
    model = initialised(shape, 0).to(flags.device, torch.bfloat16 if flags.device.startswith("cuda") else torch.float32).eval()
    chance = generator(0, "documents")
    documents = torch.randint(0, shape.vocab, (flags.documents, flags.tokens + 1), generator=chance).tolist()
    how = Passing(flags.chunk, min(4 * flags.chunk, shape.max_length), 1, 1e-3)
    print(f"$ {' '.join(sys.argv)}      {environment()}")
    seconds(model, documents[:1], how, 1)  # the first pass of all pays for what is loaded late
    alone = seconds(model, documents[: flags.alone], how, 1) / flags.alone
    beside = seconds(model, documents, how, flags.batch) / flags.documents
    print(f"one at a time       {alone:8.3f} s a document of {flags.tokens} tokens  ({flags.alone} read)")
    print(f"{flags.batch:4} side by side   {beside:8.3f} s a document  ({flags.documents} read), {alone / beside:.1f} times faster")


def seconds(model: Transformer, documents: Sequence[Sequence[int]], how: Passing, slots: int) -> float:
    patch = fresh(model.config, passing_sites(model.config, TARGETS), 8, 1.0, 0, None)
    adapters, began = Adapters(patch, slots, model.embed.weight.device), time.perf_counter()
    with adapters.attached(model):
        for _ in read(model, documents, how, slots, adapters):
            pass  # every event has waited for the device
    return time.perf_counter() - began


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=128)
    parser.add_argument("--alone", type=int, default=2, help="documents that are read one at a time")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--depth", type=int, default=30)
    parser.add_argument("--device", default=default_device())
    return parser.parse_args()


if __name__ == "__main__":
    main()

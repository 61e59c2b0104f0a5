"""What test-time training costs: documents read one at a time, and side by side, with a patch of their own each.

    python bench/ttt.py                                    # SmolLM2-135M's shape with made-up weights: speed does not depend on them
    python bench/ttt.py --chunk 32 --batch 2 4 --documents 4 --tokens 128 --depth 4 --device cpu

Goal: side by side at least 20 times faster than one at a time on a GPU. One document alone leaves a GPU waiting for its next kernel,
a chunk of 256 as much as one of 64; side by side it computes. What test-time training gains: `bench/ttt_seeds.py`, `assay ttt`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing can be installed, the checkout will do

from assay.learn.ttt_loop import TttSettings, read_and_adapt
from assay.model.batched_lora import TTT_TARGETS, BatchedAdapters, ttt_sites
from assay.model.lora import fresh
from assay.model.placement import default_device
from assay.model.transformer import Transformer, initialised
from assay.seeds import generator
from assay.store.digests import environment
from assay.testing.tiny_models import tiny_config


def main() -> None:
    flags = arguments()
    shape = replace(tiny_config(vocab=49152), width=576, depth=flags.depth, heads=9, kv_heads=3, head_dim=64, hidden=1536, max_length=8192,
                    windows=(None,) * flags.depth)
    model = initialised(shape, 0).to(flags.device, torch.bfloat16 if flags.device.startswith("cuda") else torch.float32).eval()
    chance = generator(0, "documents")
    documents = torch.randint(0, shape.vocab, (max(flags.documents, *flags.batch), flags.tokens + 1), generator=chance).tolist()
    print(f"$ {' '.join(sys.argv)}\n{environment()}", flush=True)
    for chunk in flags.chunk:
        how = TttSettings(chunk, min(4 * chunk, shape.max_length), 1, 1e-3)
        alone = seconds(model, documents[: flags.alone], how, 1)
        print(f"chunks of {chunk}: one at a time  {alone:8.3f} s a document of {flags.tokens} tokens", flush=True)
        for batch in flags.batch:
            beside = seconds(model, documents[: max(flags.documents, batch)], how, batch)
            words = f"{beside:8.3f} s a document, {alone / beside:5.1f} times faster{memory(model)}"
            print(f"chunks of {chunk}: {batch:4} side by side {words}", flush=True)


def seconds(model: Transformer, documents: Sequence[Sequence[int]], how: TttSettings, slots: int) -> float:
    """A document; after some that are not counted and pay for what is loaded late."""
    patch = fresh(model.config, ttt_sites(model.config, TTT_TARGETS), 8, 1.0, 0, None)
    adapters = BatchedAdapters(patch, slots, model.embed.weight.device)
    with adapters.attached(model):
        for part in ([document[: 1 + 5 * how.chunk] for document in documents[:slots]], documents):
            began = time.perf_counter()
            for _ in read_and_adapt(model, part, how, slots, adapters):
                pass  # every event has waited for the device
    return (time.perf_counter() - began) / len(documents)


def memory(model: Transformer) -> str:
    """The most that was held since the last time."""
    if not model.embed.weight.is_cuda:
        return ""
    most = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return f", {most:.1f} GiB"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=64, help="read side by side, as many at a time as the batch is large")
    parser.add_argument("--alone", type=int, default=2, help="documents that are read one at a time")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, nargs="+", default=[256, 128, 64], help="sizes of chunks; a window is four of them")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--depth", type=int, default=30)
    parser.add_argument("--device", default=default_device())
    return parser.parse_args()


if __name__ == "__main__":
    main()

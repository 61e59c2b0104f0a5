"""What a trace costs: one traced forward pass beside a plain one, SmolLM2-135M's shape, 512 tokens.

    python bench/trace.py                     # on a GPU where there is one, else on one CPU thread
    python bench/trace.py --tokens 128 --rounds 3

The two take turns; what counts is the median over rounds of traced / plain, each of a pair beside the other in time. On a CPU it
is the process's own time that is read. Goal: at most 1.5 times a plain pass.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing can be installed, the checkout will do

from train import SMOLLM2

from assay.model.transformer import initialised
from assay.store.digests import environment
from assay.tracing.activations import trace_activations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    model = initialised(SMOLLM2, 0).to(device, getattr(torch, args.dtype)).eval()
    tokens = torch.randint(0, SMOLLM2.vocab, (1, args.tokens), generator=torch.Generator().manual_seed(0)).to(device)

    def plain() -> None:
        with torch.no_grad():
            model(tokens)

    pairs = [(timed(plain, device), timed(lambda: trace_activations(model, tokens), device)) for _ in range(args.rounds + 1)][1:]
    ratios = sorted(traced / alone for alone, traced in pairs)
    middle = [1e3 * statistics.median(column) for column in zip(*pairs, strict=True)]
    print(f"{environment()}\n{args.tokens} tokens, {args.dtype}, {device}: plain {middle[0]:.1f} ms, traced {middle[1]:.1f} ms; "
          f"{statistics.median(ratios):.2f} times (goal 1.5), {ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} rounds")


def timed(work: Callable[[], object], device: str) -> float:
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


if __name__ == "__main__":
    main()

"""Fused linear + soft-capped cross-entropy on one GPU, beside eager PyTorch, torch.compile and Liger.

    python bench/softcap_ce.py                        # 16,384 tokens, 49,152 vocabulary, 576 hidden, softcap 15
    PYTHONPATH=path/to/liger python bench/softcap_ce.py --peers --out results/softcap_ce.json

Each row is one forward and backward. Its gradients are first compared with float64, then it is timed by device events
(median) and its peak memory is read, above what the inputs take. The stages and the launch shapes of the kernel come
first, the table last. Rows that start with `chunk` are ours with other chunk sizes.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing can be installed, the checkout will do

from assay.kernels import softcap_ce
from assay.kernels.softcap_ce import IGNORE, fused_linear_cross_entropy, linear_logprobs, plain_linear_cross_entropy

CHUNKS = (1024, 2048, 4096, 8192)
LAUNCHES = ((4096, 8), (8192, 8), (8192, 16), (16384, 16), (16384, 32))
PEAK_FLOPS = 790e12  # bf16, as measured on an H200 with an 8192³ product
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    name: str
    ms: float
    spread_ms: float
    peak_mib: float
    error_hidden: float
    error_head: float


def main() -> None:
    args = arguments()
    problem = make_problem(args.tokens, args.vocab, args.hidden)
    exact = reference(*problem, args.softcap)
    stages(problem, args.softcap)
    launches(problem, args.softcap)
    rows = [measured(name, loss, problem, exact) for name, loss in variants(args).items()]
    report(rows, args)
    if args.out:
        Path(args.out).write_text(json.dumps({"shape": vars(args), "device": torch.cuda.get_device_name(),
                                              "torch": torch.__version__, "rows": [asdict(r) for r in rows]}, indent=1))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--softcap", type=float, default=15.0, help="0 for none")
    parser.add_argument("--peers", action="store_true", help="also Liger's fused linear cross-entropy, if importable")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes the longest")
    parser.add_argument("--out", help="write the rows to this JSON file")
    args = parser.parse_args()
    args.softcap = args.softcap or None
    return args


def make_problem(N: int, V: int, D: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random states and head with logits of standard deviation 3; one token in eight is ignored, weights are 1."""
    rng = torch.Generator("cuda").manual_seed(0)
    hidden_ND = torch.randn(N, D, generator=rng, device="cuda").bfloat16().requires_grad_()
    head_VD = (3 * D**-0.5 * torch.randn(V, D, generator=rng, device="cuda")).bfloat16().requires_grad_()
    targets_N = torch.randint(0, V, (N,), generator=rng, device="cuda")
    targets_N[::8] = IGNORE
    return hidden_ND, head_VD, targets_N, torch.ones(N, device="cuda")  # ones, because Liger takes no token weights


def variants(args: argparse.Namespace) -> dict[str, Loss]:
    def ours(*given: Tensor, chunk: int | None = None) -> Tensor:
        return fused_linear_cross_entropy(*given, softcap=args.softcap, chunk=chunk)[0]

    found: dict[str, Loss] = {"eager": partial(eager, softcap=args.softcap), "assay": ours}
    for chunk in CHUNKS:
        if chunk < args.tokens:
            found[f"chunk {chunk}"] = partial(ours, chunk=chunk)
    found["assay logprobs"] = lambda h, w, t, _: -(linear_logprobs(h, w, t.clamp_min(0), softcap=args.softcap)
                                                   * (t != IGNORE)).sum()
    if not args.no_compile:
        found["torch.compile"] = torch.compile(partial(eager, softcap=args.softcap))
    if args.peers:
        found |= liger(args.softcap)
    return found


def eager(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weight_N: Tensor, softcap: float | None) -> Tensor:
    logits_NV = (hidden_ND @ head_VD.T).float()
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    return (weight_N * F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="none")).sum()


def liger(softcap: float | None) -> dict[str, Loss]:
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function
    except ImportError as error:
        print(f"liger_kernel left out: {error}")
        return {}

    def loss(h: Tensor, w: Tensor, t: Tensor, _: Tensor, accum: torch.dtype | None) -> Tensor:
        return Function.apply(h, w, t, None, None, IGNORE, 0.0, 0.0, "sum", softcap, False, accum)[0]

    return {"liger": partial(loss, accum=None), "liger fp32 sums": partial(loss, accum=torch.float32)}


# ── correctness ───────────────────────────────────────────────────────────────────────────────────────────────────────

def reference(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weight_N: Tensor,
              softcap: float | None) -> tuple[Any, Any]:
    """Gradients of the plain twin in float64, a slice of tokens at a time."""
    hidden64, head64 = (x.detach().double().requires_grad_() for x in (hidden_ND, head_VD))
    for part in torch.arange(len(hidden_ND), device="cuda").split(2048):
        given = hidden64[part], head64, targets_N[part], weight_N[part]
        plain_linear_cross_entropy(*given, softcap=softcap)[0].backward()
    return hidden64.grad, head64.grad


def errors(problem: tuple, exact: tuple[Any, Any]) -> list[float]:
    return [((x.grad.double() - e).norm() / e.norm()).item() for x, e in zip(problem, exact, strict=False)]


# ── time and memory ───────────────────────────────────────────────────────────────────────────────────────────────────

def measured(name: str, loss: Loss, problem: tuple, exact: tuple[Any, Any]) -> Row:
    def step() -> None:
        for leaf in problem[:2]:
            leaf.grad = None
        loss(*problem).backward()

    step()  # compiles
    off = errors(problem, exact)
    if not max(off) < 2e-2:
        raise SystemExit(f"{name}: gradients are off by {off} from float64; no time is worth measuring")
    times = timed(step)
    for leaf in problem[:2]:
        leaf.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return Row(name, statistics.median(times), max(times) - min(times), peak, *off)


def timed(step: Callable[[], object], repeats: int = 20) -> list[float]:
    for _ in range(3):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def stages(problem: tuple, softcap: float | None) -> None:
    """Where the time of one chunk goes."""
    hidden_ND, head_VD, targets_N, weight_N = (x.detach() for x in problem)
    (N, D), V = hidden_ND.shape, len(head_VD)
    chunk = softcap_ce.even_chunk(N, V, 2)
    part = slice(0, min(chunk, N))
    logits_CV = softcap_ce.padded_rows(hidden_ND, part.stop, V, torch.bfloat16)
    d_hidden_CD, d_head_VD = torch.empty(part.stop, D, device="cuda"), torch.zeros(V, D, device="cuda")
    losses_C, product = torch.empty(part.stop, device="cuda"), softcap_ce.matmul_into
    work = {
        "logits = hidden @ head": lambda: product(hidden_ND[part], head_VD.T, out=logits_CV),
        "rows, losses only": lambda: rows_of(softcap, logits_CV, None, targets_N[part], losses_C, None),
        "rows, gradients": lambda: rows_of(softcap, logits_CV, logits_CV, targets_N[part], losses_C, weight_N[part]),
        "d hidden = grads @ head": lambda: product(logits_CV, head_VD, out=d_hidden_CD),
        "d head += grads @ hidden": lambda: product(logits_CV.T, hidden_ND[part], out=d_head_VD, add=True),
    }
    print(f"stages of one chunk of {chunk} tokens (three products at the peak rate: "
          f"{3 * 2e3 * chunk * V * D / PEAK_FLOPS:.3f} ms)")
    for name, run in work.items():
        print(f"  {name:26} {statistics.median(timed(run)):7.3f} ms")


def launches(problem: tuple, softcap: float | None) -> None:
    """The kernel alone, on one chunk, with other block sizes and warps."""
    hidden_ND, head_VD, targets_N, weight_N = (x.detach() for x in problem)
    C, V = min(4096, len(hidden_ND)), len(head_VD)
    logits_CV = softcap_ce.padded_rows(hidden_ND, C, V, torch.bfloat16)
    softcap_ce.matmul_into(hidden_ND[:C], head_VD.T, out=logits_CV)
    losses_C, chosen = torch.empty(C, device="cuda"), softcap_ce.launch_shape
    run = partial(rows_of, softcap, logits_CV, logits_CV, targets_N[:C], losses_C, weight_N[:C])
    for block, warps in LAUNCHES:
        softcap_ce.launch_shape = partial(lambda shape, _: shape, (block, warps))
        ms = statistics.median(timed(run))
        mark = "  (chosen)" if (block, warps) == chosen(V) else ""
        print(f"  rows, {block:5} logits on {warps:2} warps {ms:7.3f} ms, {3 * 2e-6 * C * V / ms:6.0f} GB/s{mark}")
    softcap_ce.launch_shape = chosen


def rows_of(softcap: float | None, *tensors: Any) -> None:
    bf16 = torch.bfloat16
    softcap_ce._Sweep(softcap, 1.0, IGNORE, compute=bf16, logits=bf16, chunk=None)._rows(*tensors)


def report(rows: list[Row], args: argparse.Namespace) -> None:
    base = rows[0]
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {args.tokens:,} tokens × {args.vocab:,} "
          f"vocabulary × {args.hidden} hidden, softcap {args.softcap}; forward and backward")
    print(f"{'':18}{'ms':>9}{'±':>8}{'/ eager':>9}{'peak MiB':>11}{'/ eager':>9}{'err d hidden':>14}{'err d head':>12}")
    for row in rows:
        off = f"{row.error_hidden:14.1e}{row.error_head:12.1e}"
        print(f"{row.name:18}{row.ms:9.2f}{row.spread_ms:8.2f}{row.ms / base.ms:9.2f}{row.peak_mib:11.0f}"
              f"{row.peak_mib / base.peak_mib:9.3f}{off}")


if __name__ == "__main__":
    main()

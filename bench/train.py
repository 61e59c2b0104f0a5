"""Training speed on one GPU: our loop beside transformers with torch.compile, same shape, same tokens, same run.

    python bench/train.py                     # both shapes
    python bench/train.py --only smollm2 --steps 20
    python bench/train.py --only smollm2 --guards --no-peers      # what the guards of a run cost: blocks of steps with and without them

nanoGPT does not install from PyPI; its figure (500 k tokens/s on the GPT-2 shape, one H200, torch 2.11) is a stated limit.
A step is forward, backward, gradient clipping and a fused AdamW update on fresh random tokens, bf16 compute, fp32 masters.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import replace

import torch

from assay.data.batch import Batch
from assay.guard.training_guards import StepWatch, UpdateAccount
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.loop import constant, train
from assay.learn.objectives import next_token
from assay.learn.optim import adamw
from assay.model.families import config_to_hf
from assay.model.placement import place_for_training
from assay.model.transformer import ModelConfig, Rope, initialised, parameter_count
from assay.testing.tiny_models import tiny_config

GPT2 = replace(tiny_config("gpt2"), vocab=50304, width=768, depth=12, heads=12, kv_heads=12, head_dim=64, hidden=3072, max_length=1024,
               windows=(None,) * 12)
SMOLLM2 = replace(tiny_config("llama"), vocab=49152, width=576, depth=30, heads=9, kv_heads=3, head_dim=64, hidden=1536, max_length=8192,
                  rope=Rope(100000.0), windows=(None,) * 30)
# shape → (config, rows a step, rows a micro-batch, length, the peer's figure stated in tokens/s)
SHAPES = {"gpt2": (GPT2, 64, 64, 1024, ("nanoGPT, stated", 500_000)),
          "smollm2": (SMOLLM2, 16, 16, 1024, ("transformers + compile, stated", 275_000))}


def flops_per_token(config: ModelConfig, length: int) -> float:
    """6 per weight that multiplies (the head included), and attention's 12 · layers · width · length, halved by causality."""
    matrices = parameter_count(initialised_on_meta(config)) - config.vocab * config.width * (1 if not config.tied else 0)
    return 6 * matrices + 6 * config.depth * config.heads * config.head_dim * length


def initialised_on_meta(config: ModelConfig):
    from assay.model.transformer import Transformer

    with torch.device("meta"):
        return Transformer(config)


def batches(config: ModelConfig, rows: int, length: int, steps: int, documents: int):
    for step in range(steps):
        tokens = torch.randint(0, config.vocab, (rows, length), generator=torch.Generator().manual_seed(step))
        weight = torch.ones(rows, length)
        weight[:, 0] = 0
        packed = None
        if documents > 1:
            packed = (torch.arange(length) * documents // length).int().expand(rows, length).contiguous()
            weight[:, 1:][packed[:, 1:] != packed[:, :-1]] = 0
        yield Batch(tokens, weight, packed)


def ours(config: ModelConfig, rows: int, micro: int, length: int, steps: int, documents: int = 1) -> tuple[list[float], float]:
    model = place_for_training(initialised(config, 0), "cuda")
    optimizer = adamw(list(model.named_parameters()), lr=3e-4)
    made = batches(config, rows, length, steps, documents)
    return timed(train(model, optimizer, made, next_token, micro=micro, accumulate=GraphedAccumulate()))


def guards_cost(config: ModelConfig, rows: int, micro: int, length: int, blocks: int = 6, block: int = 32) -> str:
    """Blocks of steps in turn with and without what a recipe does after each step: feeding the watch, reading it back every so many
    steps, judging, accounting, writing metrics. The check that loss and gradients are finite is in the loop, and in both."""
    model = place_for_training(initialised(config, 0), "cuda")
    optimizer = adamw(list(model.named_parameters()), lr=3e-4)
    rates = [group["lr"] for group in optimizer.param_groups]
    watch, account = StepWatch(rates, constant, vocab=config.vocab), UpdateAccount(model)
    steps = train(model, optimizer, batches(config, rows, length, (2 * blocks + 1) * block, 1), next_token, micro=micro,
                  accumulate=GraphedAccumulate())
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryFile("w") as metrics:
        for number in range(-1, 2 * blocks):  # the first block warms up
            guarded = number % 2 == 0
            torch.cuda.synchronize()
            began = time.perf_counter()
            watch.begin()
            for step in itertools.islice(steps, block):
                if guarded:
                    for read in watch.feed(step, rates):
                        metrics.write(json.dumps({"step": read.step.index, "loss": read.loss, "grad_norm": read.grad_norm}) + "\n")
                    account.record_step(step.multiplier, rates[0])
                    watch.begin()
            torch.cuda.synchronize()
            if number >= 0:
                seconds[guarded].append((time.perf_counter() - began) / block)
    ratios = [with_ / without - 1 for with_, without in zip(seconds[True], seconds[False], strict=True)]
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    return (f"guards: {1e3 * statistics.median(seconds[False]):.2f} ms a step without, {1e3 * statistics.median(seconds[True]):.2f} with; "
            f"{100 * mean:+.2f} % ± {100 * 2.57 * error:.2f} (95 %, n={blocks} pairs of {block} steps)")


def timed(steps) -> tuple[list[float], float]:
    """Seconds of every step, and of the compilation: a device synchronisation after each step, outside the loop itself."""
    seconds, first = [], None
    torch.cuda.synchronize()
    before = time.perf_counter()
    for index, _ in enumerate(steps):
        if index < 5:
            torch.cuda.synchronize()
            now = time.perf_counter()
            first = now - before if first is None else first
            before = now
            if index == 4:
                block = before
        elif index % 5 == 4:
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - block) / 5)
            block = time.perf_counter()
    return seconds, first or 0.0


def theirs(config: ModelConfig, rows: int, micro: int, length: int, steps: int) -> tuple[list[float], float]:
    """transformers as its users run it: bf16 autocast over fp32 weights, SDPA, torch.compile, fused AdamW."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.for_model(**config_to_hf(config, "float32"))
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").cuda().train()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def run():
        for batch in batches(config, rows, length, steps, 1):
            for part in batch.split(micro):
                tokens = part.tokens.cuda(non_blocking=True)
                with torch.autocast("cuda", torch.bfloat16):
                    loss = compiled(tokens, labels=tokens).loss
                (loss * len(part) / rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield loss

    return timed(run())


def peak_rate() -> float:
    """bf16 FLOP/s of a large product on this GPU, the ceiling that utilisation is stated against."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--steps", type=int, default=35)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--guards", action="store_true", help="what the guards of a run cost")
    flags = parser.parse_args()
    rate, rows = peak_rate(), []
    for name, (config, batch, micro, length, (peer, figure)) in SHAPES.items():
        if flags.only not in (None, name):
            continue
        runs = {"assay": lambda c=config, b=batch, m=micro, n=length: ours(c, b, m, n, flags.steps),
                "assay, 4 documents a row": lambda c=config, b=batch, m=micro, n=length: ours(c, b, m, n, flags.steps, 4)}
        if not flags.no_peers:
            runs["transformers + compile"] = lambda c=config, b=batch, m=micro, n=length: theirs(c, b, m, n, flags.steps)
        for who, run in runs.items():
            torch._dynamo.reset()
            torch.cuda.reset_peak_memory_stats()
            seconds, first = run()
            median, tokens = statistics.median(seconds), batch * length
            used = flops_per_token(config, length) * tokens / median / rate
            rows.append(f"{name:8} {who:26} {1e3 * median:7.1f} ms {tokens / median / 1e3:8.0f} k tokens/s  {100 * used:5.1f} % of peak"
                        f"  spread {1e3 * (max(seconds) - min(seconds)):5.1f} ms (n={len(seconds)} × 5)  first step {first:5.1f} s"
                        f"  {torch.cuda.max_memory_allocated() / 2**30:5.1f} GiB")
            print(rows[-1], flush=True)
        rows.append(f"{name:8} {peer:26} {'':10} {figure / 1e3:8.0f} k tokens/s")
        if flags.guards:
            torch._dynamo.reset()
            rows.append(f"{name:8} {guards_cost(config, batch, micro, length)}")
    print(f"\ntorch {torch.__version__}, {torch.cuda.get_device_name()}, bf16 peak {rate / 1e12:.0f} TFLOP/s")
    print("\n".join(rows))


if __name__ == "__main__":
    main()

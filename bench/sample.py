"""Sampling speed on one GPU: the engine beside transformers' generate, same shape, same prompts' lengths, same run.

    python bench/sample.py                     # 256 streams of 128 + 128 tokens, T 0.7, top-k 50, SmolLM2-135M's shape
    python bench/sample.py --streams 64 --no-peers --parts

The clock covers all that a caller waits for: prefill, decoding, reading back. The floor counts the bytes that decoding must move,
weights once a step and keys and values as far as they are filled, over the bandwidth of a large copy on this GPU.
"""

import argparse
import statistics
import time

import torch
from train import SMOLLM2, initialised_on_meta

from assay.generate.engine import Engine
from assay.generate.generation_request import GenerationRequest, Sampling
from assay.kernels.cached_attention import cached_attention
from assay.kernels.draw_tokens import SamplingRule, draw_tokens
from assay.model.families import config_to_hf
from assay.model.placement import place_for_training
from assay.model.transformer import initialised, parameter_count


def prompts(streams: int, length: int, seed: int) -> list[tuple[int, ...]]:
    tokens = torch.randint(0, SMOLLM2.vocab, (streams, length), generator=torch.Generator().manual_seed(seed))
    return [tuple(row) for row in tokens.tolist()]


def timed(work) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def on_device(work, times: int = 50) -> float:
    """Median seconds of one call, between device events."""
    for _ in range(5):
        work()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for start, end in marks:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3


def copy_rate() -> float:
    """Bytes a second, read and written, of a large device copy."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / on_device(lambda: b.copy_(a), 10)


def floor_seconds(streams: int, prompt: int, new: int, rate: float) -> float:
    """Of all decoding steps together."""
    weights = 2 * parameter_count(initialised_on_meta(SMOLLM2))
    a_token = 2 * 2 * SMOLLM2.depth * SMOLLM2.kv_heads * SMOLLM2.head_dim
    return sum(weights + streams * (prompt + step) * a_token for step in range(new)) / rate


class Ours:
    def __init__(self, flags: argparse.Namespace):
        self.flags = flags
        self.model = place_for_training(initialised(SMOLLM2, 0), "cuda", compile=False)
        self.engine = Engine(self.model, slots=flags.streams, length=flags.prompt + flags.new, version="bench", steps=flags.steps)

    def run(self, requests: list[GenerationRequest]) -> int:
        """How many tokens came."""
        for request in requests:
            self.engine.submit(request)
        return sum(len(progress.completion.ids) for progress in self.engine.drain() if progress.completion is not None)

    def sampling(self, new: int) -> Sampling:
        return Sampling(new, 0.7, 50)

    def distinct(self, seed: int) -> list[GenerationRequest]:
        made = prompts(self.flags.streams, self.flags.prompt, seed)
        return [GenerationRequest(prompt, self.sampling(self.flags.new), (seed, i)) for i, prompt in enumerate(made)]

    def groups(self, seed: int) -> list[GenerationRequest]:
        return [GenerationRequest(p, self.sampling(self.flags.new), (seed, i), group=8)
                for i, p in enumerate(prompts(self.flags.streams // 8, self.flags.prompt, seed))]

    def ragged(self, seed: int) -> list[GenerationRequest]:
        """Four times as many requests as slots, of 1 to `new` tokens each: slots are refilled as they fall free."""
        new = torch.randint(1, self.flags.new + 1, (4 * self.flags.streams,), generator=torch.Generator().manual_seed(seed)).tolist()
        made = prompts(len(new), self.flags.prompt, seed)
        return [GenerationRequest(prompt, self.sampling(n), (seed, i)) for i, (prompt, n) in enumerate(zip(made, new, strict=True))]

    def step_seconds(self) -> float:
        """One captured step of all slots, full to the middle of their completions."""
        for request in self.distinct(99):
            self.engine.submit(request)
        for _ in range(self.flags.new // (2 * self.engine.slots.steps)):
            self.engine.step()
        seconds = on_device(lambda: self.engine.slots.launch(1, self.flags.prompt + self.flags.new, False), 20)
        self.engine.load("bench", begun="restart")
        self.engine.drain()
        return seconds


def theirs(flags: argparse.Namespace):
    """transformers as its users run it: bf16 weights, SDPA, its default cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.for_model(**config_to_hf(SMOLLM2, "bfloat16"))
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa", dtype=torch.bfloat16).cuda().eval()
    model.generation_config.eos_token_id = None

    def run(seed: int) -> None:
        tokens = torch.tensor(prompts(flags.streams, flags.prompt, seed), device="cuda")
        made = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=0.7, top_k=50, top_p=1.0,
                              max_new_tokens=flags.new, min_new_tokens=flags.new, pad_token_id=0)
        assert made.shape == (flags.streams, flags.prompt + flags.new)

    return run


def parts(flags: argparse.Namespace) -> list[str]:
    """The pieces of a step by themselves, each launched alone: launching costs show in the small ones."""
    c, S = SMOLLM2, flags.streams
    L, filled = flags.prompt + flags.new, flags.prompt + flags.new // 2

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    q, k, v = make(S, c.heads, c.head_dim), make(S, c.kv_heads, c.head_dim), make(S, c.kv_heads, c.head_dim)
    keys, values = make(S, L, c.kv_heads, c.head_dim), make(S, L, c.kv_heads, c.head_dim)
    positions = torch.full((S,), filled, device="cuda")
    states, head = make(S, c.width), make(c.vocab, c.width)
    logits = torch.randn(S, c.vocab, device="cuda") * 3
    rule = SamplingRule(*(torch.full((S,), value, device="cuda") for value in (0.7, 50, 1.0, 0.0)))
    key = torch.arange(S, device="cuda")
    found = {"attention over slots, one layer": on_device(lambda: cached_attention(q, k, v, keys, values, positions, None, L)),
             "head product, fp32 out": on_device(lambda: torch.mm(states, head.T, out_dtype=torch.float32)),
             "draw, top-k 50": on_device(lambda: draw_tokens(logits, rule, key, positions)),
             "draw, temperature alone": on_device(lambda: draw_tokens(logits, rule._replace(top_k=torch.zeros_like(rule.top_k)), key,
                                                                      positions)),
             "torch.topk 50 alone": on_device(lambda: logits.topk(50))}
    return [f"  {name:36} {1e6 * seconds:8.1f} µs" for name, seconds in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--steps", type=int, default=None, help="tokens a slot makes before the host looks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--parts", action="store_true", help="the pieces of a step, one by one")
    flags = parser.parse_args()
    rate, tokens = copy_rate(), flags.streams * flags.new
    due = floor_seconds(flags.streams, flags.prompt, flags.new, rate)
    ours, lines = Ours(flags), []
    first = timed(lambda: ours.run(ours.distinct(0)))
    peer = None
    if not flags.no_peers:
        run = theirs(flags)
        run(0)
        peer = statistics.median(timed(lambda seed=seed: run(seed)) for seed in (1, 2))
        lines.append(f"{'transformers generate':34} {1e3 * peer:9.1f} ms {tokens / peer / 1e3:8.1f} k tokens/s  (n=2)")
    works = {"assay, distinct prompts": ours.distinct, "assay, groups of 8": ours.groups, "assay, ragged, refilled": ours.ragged}
    for name, make in works.items():
        ours.run(make(1))
        seconds, made = [], 0
        for seed in range(2, 2 + flags.repeats):
            asked, came = make(seed), list[int]()
            seconds.append(timed(lambda asked=asked, came=came: came.append(ours.run(asked))))
            made += came[0]
        speed = made / sum(seconds)
        times = f"  {speed / (tokens / peer):5.1f} × transformers" if peer else ""
        lines.append(f"{name:34} {1e3 * statistics.median(seconds):9.1f} ms {speed / 1e3:8.1f} k tokens/s  "
                     f"spread {1e3 * (max(seconds) - min(seconds)):.1f} ms (n={flags.repeats}){times}  "
                     f"{100 * speed * due / tokens:5.1f} % of the floor's rate")
        print(lines[-1], flush=True)
    step = ours.step_seconds()
    print(f"\ntorch {torch.__version__}, {torch.cuda.get_device_name()}, {flags.streams} streams, {flags.prompt} + {flags.new} tokens, "
          f"T 0.7, top-k 50, copy {rate / 1e12:.2f} TB/s")
    print(f"bandwidth floor of decoding: {1e3 * due / flags.new:.3f} ms a step, {tokens / due / 1e3:.0f} k tokens/s; "
          f"a captured step: {1e3 * step:.3f} ms; first use, with compilation and capture: {first:.1f} s; "
          f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    print("\n".join([*lines, *(parts(flags) if flags.parts else [])]))


if __name__ == "__main__":
    main()

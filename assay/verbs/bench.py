"""assay bench: this machine beside transformers in a minute: training and sampling, same weights, same tokens."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from assay.config import option
from assay.recipes.options import DEVICE

if TYPE_CHECKING:
    import torch

    from assay.data.batch import Batch
    from assay.model.transformer import ModelConfig


@dataclass(frozen=True)
class FLAGS:
    """Measure training steps and sampling on this machine, by Assay and by transformers, with the same random weights and the same
    tokens. The two are timed in alternating blocks, so that other load on the machine affects both; prints medians with minimum and
    maximum."""

    shape: Literal["small", "135m"] | None = option("model shape: 6 million parameters (small), or SmolLM2-135M's (135m)", default=None,
                                                    default_text="135m on a GPU, else small")
    seconds: float = option("about how many seconds to measure, after compilation", above=0, default=40.0)
    device: str | None = option("where to compute: cpu or cuda", default=None, default_text=DEVICE)
    json: bool = option("print JSON", default=False)


EXAMPLES = """  assay bench
  assay bench --shape 135m --seconds 60 --json"""
BENCH_SHAPES = {"small": (4096, 256, 6, 4, 2, 64, 768), "135m": (49152, 576, 30, 9, 3, 64, 1536)}
LENGTH, STREAMS, PROMPT, NEW = 512, 16, 32, 64
MOST_BLOCKS, BLOCK_STEPS = 9, 4


def run(flags: FLAGS) -> int:
    found = measure_machine(flags)
    if flags.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{found['shape']} ({found['parameters']:,} parameters, random weights) on {found['device']}, torch {found['torch']}, "
          f"transformers {found['transformers'] or 'not installed'}")
    for what in ("training", "sampling"):
        for who, rate in found[what].items():
            print(f"  {what:9} {who:13} {rate['median']:12,.0f} tokens/s  [{rate['least']:,.0f}, {rate['most']:,.0f}] (n={rate['n']})")
        if len(found[what]) == 2:
            print(f"  {what:9} {ratio_words(found[what]['assay'], found[what]['transformers'])}")
    print("Steps are forward, backward, clipping and AdamW, on a GPU in bf16 over fp32 masters, transformers' with torch.compile; sampling "
          "is at temperature 1. Guards, saves and proofs of a run are not in it.")
    return 0


def ratio_words(ours: dict[str, float], theirs: dict[str, float]) -> str:
    """A few blocks show a difference only where the slowest of one is quicker than the quickest of the other."""
    words = (f"{ours['median'] / theirs['median']:.2f} × transformers "
             f"[{ours['least'] / theirs['most']:.2f}, {ours['most'] / theirs['least']:.2f}]")
    apart = ours["least"] > theirs["most"] or ours["most"] < theirs["least"]
    return words if apart else f"{words}: not told apart; give it more --seconds, or a machine that does nothing else"


def measure_machine(flags: FLAGS) -> dict[str, Any]:
    import importlib.util

    import torch

    from assay.model.placement import default_device, require_device
    from assay.model.transformer import initialised, parameter_count

    device = require_device(flags.device or default_device())
    shape = flags.shape or ("small" if device == "cpu" else "135m")
    config = bench_config(shape)
    weights, rows = initialised(config, 0), 2 if device == "cpu" else 16
    peer = importlib.util.find_spec("transformers") is not None
    training: dict[str, Callable[[], int]] = {"assay": _our_steps(config, rows, device)}
    sampling: dict[str, Callable[[], int]] = {"assay": _our_samples(weights, device)}
    if peer:
        training["transformers"], sampling["transformers"] = _their_steps(config, rows, device), _their_samples(weights, device)
    named = torch.cuda.get_device_name(device) if device != "cpu" else f"the CPU ({torch.get_num_threads()} threads)"
    return {"shape": shape, "parameters": parameter_count(weights), "device": named, "torch": torch.__version__,
            "transformers": _version("transformers"), "training": timed_in_turn(training, flags.seconds / 2, device),
            "sampling": timed_in_turn(sampling, flags.seconds / 2, device)}


def timed_in_turn(blocks: dict[str, Callable[[], int]], seconds: float, device: str) -> dict[str, dict[str, float]]:
    """Tokens a second of each block, the first of which warms it up; one after another until the time is over, three times at least."""
    for block in blocks.values():
        block()
    rates: dict[str, list[float]] = {name: [] for name in blocks}
    until = time.perf_counter() + seconds
    while len(next(iter(rates.values()))) < 3 or (time.perf_counter() < until and len(next(iter(rates.values()))) < MOST_BLOCKS):
        for name, block in blocks.items():
            _fence(device)
            began = time.perf_counter()
            tokens = block()
            _fence(device)
            rates[name].append(tokens / (time.perf_counter() - began))
    return {name: {"median": statistics.median(found), "least": min(found), "most": max(found), "n": len(found)}
            for name, found in rates.items()}


def bench_config(shape: str) -> "ModelConfig":
    from assay.model.transformer import ModelConfig, Rope

    vocab, width, depth, heads, shared, head, hidden = BENCH_SHAPES[shape]
    return ModelConfig(family="llama", vocab=vocab, width=width, depth=depth, heads=heads, kv_heads=shared, head_dim=head, hidden=hidden,
                       max_length=2048, norm="rms", norm_eps=1e-5, rope=Rope(100000.0), activation="silu", gated=True, qkv_bias=False,
                       out_bias=False, mlp_bias=False, qk_norm=False, windows=(None,) * depth, tied=True, softcap=None,
                       value_residual=False, attention_gate=False)


def bench_batches(config: "ModelConfig", rows: int) -> Iterator["Batch"]:
    import torch

    from assay.data.batch import Batch

    step = 0
    while True:
        tokens = torch.randint(0, config.vocab, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
        weight = torch.ones(rows, LENGTH)
        weight[:, 0] = 0
        yield Batch(tokens, weight)
        step += 1


def _our_steps(config: "ModelConfig", rows: int, device: str) -> Callable[[], int]:
    from assay.learn.cuda_graph import GraphedAccumulate
    from assay.learn.loop import train
    from assay.learn.objectives import next_token
    from assay.learn.optim import adamw
    from assay.model.placement import place_for_training
    from assay.model.transformer import initialised

    model = place_for_training(initialised(config, 0), device)
    graphed = None if device == "cpu" else GraphedAccumulate()
    steps = train(model, adamw(list(model.named_parameters()), lr=1e-4), bench_batches(config, rows), next_token, micro=rows,
                  accumulate=graphed)

    def block() -> int:
        return sum(next(steps).tokens for _ in range(BLOCK_STEPS))

    return block


def _their_steps(config: "ModelConfig", rows: int, device: str) -> Callable[[], int]:
    import torch

    model = _their_model(config, device).train()
    called = model if device == "cpu" else torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device != "cpu")
    batches = bench_batches(config, rows)

    def block() -> int:
        for _ in range(BLOCK_STEPS):
            tokens = next(batches).tokens.to(device)
            with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=device != "cpu"):
                loss = called(tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return BLOCK_STEPS * rows * LENGTH

    return block


def _our_samples(weights: Any, device: str) -> Callable[[], int]:
    import copy

    import torch

    from assay.generate.engine import sample
    from assay.generate.generation_request import Sampling

    model = copy.deepcopy(weights).to(device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16).eval()
    prompts = _prompts(weights.config).tolist()
    return lambda: sum(len(said.ids) for said in sample(model, prompts, (), Sampling(max_new=NEW, temperature=1.0)))


def _their_samples(weights: Any, device: str) -> Callable[[], int]:
    import torch

    model = _their_model(weights.config, device).eval()
    model = model if device == "cpu" else model.to(torch.bfloat16)
    tokens = _prompts(weights.config).to(device)
    asked = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0}
    return lambda: int(model.generate(tokens, attention_mask=torch.ones_like(tokens), **asked).shape[1] - PROMPT) * STREAMS


def _prompts(config: "ModelConfig") -> "torch.Tensor":
    import torch

    return torch.randint(0, config.vocab, (STREAMS, PROMPT), generator=torch.Generator().manual_seed(0))


def _their_model(config: "ModelConfig", device: str) -> Any:
    """transformers' own model with the same numbers."""
    import torch
    import transformers

    from assay.model.families import config_to_hf, hf_layout, to_foreign
    from assay.model.transformer import initialised

    transformers.logging.set_verbosity_error()
    shape = transformers.AutoConfig.for_model(**config_to_hf(config, "float32"))
    model = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa", dtype=torch.float32)
    own = {name: tensor.detach() for name, tensor in initialised(config, 0).named_parameters()}
    missing = model.load_state_dict(to_foreign(hf_layout(config), own), strict=False).missing_keys
    assert not [name for name in missing if name != "lm_head.weight"], missing
    return model.to(device)


def _fence(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

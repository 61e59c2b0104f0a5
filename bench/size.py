"""Real shapes on one GPU, with random weights: open, first step, training, sampling and memory, beside transformers + PEFT.

    python bench/size.py                                  # 135m, 0.6b, 1.7b and 8b, every row, one table at the end
    python bench/size.py --only 8b,lora,peer-lora         # one shape, two rows
    python bench/size.py --only 8b,lora --checkpointing --micro 1 --cap-gib 24
    python bench/size.py --only 8b,nf4-16gib,bf16-24gib   # one row of 1024 tokens at a time within 16 and 24 GiB
    python bench/size.py --only 8b,first-step,prove,grpo,peer-grpo --limit 120
    python bench/size.py --only 135m,same --weights SMOLLM2 --text FILE    # a folder, GGUF file or fetched name
    python bench/size.py --only tiny --device cpu --rows 2 --length 32 --micro 1 --streams 2 --prompt 8 --new 4    # a dry run

Weights are drawn on the device and written as bf16 shards, once a shape, into --home (a temporary folder without it). Every row is
a process of its own with a time limit; it prints its result as it comes, and the table holds all of them. LoRA: rank 16 on all
linear layers, --rows × --length tokens a step, --micro rows at a time, AdamW. Rows:

    open         a folder from the page cache to the device: seconds, and the host's peak memory beyond an empty process's
    lora         training steps as a run makes them (compiled, captured), without what a run does around them
    sft          `assay sft` whole: preflight, first save, steps, proofs and hand-over; first step counts from the command
    sample       --streams requests of --prompt + --new tokens; `floor` is the share of the bandwidth bound by weights alone, `floor kv`
                 of that by weights, keys and values, as bench/sample.py has it
    nf4-16gib    the same on a base in nf4, 1 × --length tokens a step with gradient checkpointing, in 16 GiB of GPU memory
    bf16-24gib   the same on the base in bf16, in 24 GiB
    same         losses of LoRA steps on the base in its file's dtype, in int8 and in nf4, beside the same base in fp32, three seeds: the
                 mean difference with its interval over seeds, and the worst; with --weights and --text of a real model, on real text
    peer-lora    transformers + PEFT, eager, bf16
    first-step   `assay sft --lora-r 16` from its start to its first step, then it is ended (goal at 8B: 45 s)
    prove        an adapter proven alone: by `assay prove`, and by a process that has proven one on this base before (goal at 8B: 10 s)
    grpo         `assay grpo --lora-r 16` with its KL: --prompts × --group completions of --max-new tokens; seconds and parts of a step
    peer-grpo    transformers' generate and a PEFT step on --peer-group completions of as many tokens: seconds a completion
    peer-sample  transformers' generate

A row that fails says how far it came: its last phase, the seconds until then and the most memory. The last four, the first two with GiB in
their names and `same` are asked for by name.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from assay.model.transformer import ModelConfig, Rope
from assay.store.artifact import Artifact, Destination, build_model, open_artifact
from assay.testing.tiny_models import tiny_config, tokenizer_and_stops

GIB = 2**30


def shape(family: str, depth: int, **geometry: Any) -> ModelConfig:
    return replace(tiny_config(family), depth=depth, windows=(None,) * depth, **geometry)


SHAPES = {
    "tiny": shape("qwen3", 2, vocab=512, width=64, heads=4, kv_heads=2, head_dim=16, hidden=128, max_length=512),
    "135m": shape("llama", 30, vocab=49152, width=576, heads=9, kv_heads=3, head_dim=64, hidden=1536, max_length=8192,
                  rope=Rope(100000.0), tied=True),
    "0.6b": shape("qwen3", 28, vocab=151936, width=1024, heads=16, kv_heads=8, head_dim=128, hidden=3072, max_length=40960,
                  rope=Rope(1e6), tied=True),
    "1.7b": shape("llama", 24, vocab=49152, width=2048, heads=32, kv_heads=32, head_dim=64, hidden=8192, max_length=8192,
                  rope=Rope(130000.0), tied=True),
    "8b": shape("qwen3", 36, vocab=151936, width=4096, heads=32, kv_heads=8, head_dim=128, hidden=12288, max_length=40960,
                rope=Rope(1e6), tied=False),
}
SHARD = 4 * 10**9  # bytes
WARM = 3  # steps before the clock counts

# ---------------------------------------------------------------- weights


def make_folder(config: ModelConfig, folder: Path, device: str) -> float:
    """Random weights as a Hugging Face folder, made on the device shard by shard; seconds."""
    from safetensors.torch import save_file

    from assay.model.families import hf_layout, parameter_shapes, to_foreign
    from assay.store.saving import model_files

    began, shards, pending, size = time.perf_counter(), list[list[str]](), dict[str, torch.Tensor](), 0
    folder.mkdir(parents=True)

    def flush() -> None:
        nonlocal pending, size
        save_file({name: tensor.cpu().contiguous() for name, tensor in pending.items()}, folder / f"part-{len(shards)}.safetensors",
                  metadata={"format": "pt"})
        shards.append(list(pending))
        pending, size = {}, 0

    layout = hf_layout(config)
    torch.manual_seed(0)
    for name, dims in parameter_shapes(config).items():
        made = torch.ones(dims, device=device) if len(dims) == 1 else torch.randn(dims, device=device, dtype=torch.bfloat16) * 0.02
        pending |= to_foreign({name: layout[name]}, {name: made.to(torch.bfloat16)})
        size += 2 * made.numel()
        if size > SHARD:
            flush()
    if pending:
        flush()
    named = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)] if len(shards) > 1 else \
        ["model.safetensors"]
    for i, name in enumerate(named):
        (folder / f"part-{i}.safetensors").rename(folder / name)
    if len(shards) > 1:
        where = {tensor: name for name, tensors in zip(named, shards, strict=True) for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
    for name, data in model_files(config, *tokenizer_and_stops(), torch.bfloat16).items():
        (folder / name).write_bytes(data)
    return time.perf_counter() - began

# ---------------------------------------------------------------- what a row measures with


def fence(flags: argparse.Namespace) -> None:
    if flags.device.startswith("cuda"):
        torch.cuda.synchronize()


def memory(flags: argparse.Namespace) -> dict[str, float]:
    """Peaks: of what was allocated and of what was held on the GPU, and of the host."""
    host = {"host GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)}
    if not flags.device.startswith("cuda"):
        return host
    used = {"peak GiB": torch.cuda.max_memory_allocated(), "held GiB": torch.cuda.max_memory_reserved()}
    return {name: round(size / GIB, 2) for name, size in used.items()} | host


def ready(flags: argparse.Namespace) -> float:
    """A device that is awake, and no more of its memory than was allowed; the host's peak so far, in GiB."""
    if flags.device.startswith("cuda"):
        torch.zeros(1, device=flags.device)
        if flags.cap_gib:
            torch.cuda.set_per_process_memory_fraction(flags.cap_gib * GIB / torch.cuda.get_device_properties(0).total_memory)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


BEGAN = time.perf_counter()  # of this row's process, after its imports


def phase(flags: argparse.Namespace, name: str) -> None:
    """How far a row has come, for whoever is told that it came no further."""
    print("PHASE " + json.dumps({"phase": name, "s": round(time.perf_counter() - BEGAN, 1)} | memory(flags)), flush=True)


def timed_steps(flags: argparse.Namespace, step: Callable[[], object]) -> dict[str, float]:
    """The first, and the median of those after the warm-up."""
    seconds = []
    for number in range(1, WARM + flags.steps + 1):
        began = time.perf_counter()
        step()
        fence(flags)
        seconds.append(time.perf_counter() - began)
        phase(flags, f"step {number}")
    each = statistics.median(seconds[WARM:])
    return {"first step s": round(seconds[0], 2), "step s": round(each, 4), "tokens/s": round(flags.rows * flags.length / each)}


def random_tokens(flags: argparse.Namespace, vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (flags.rows, flags.length), generator=torch.Generator().manual_seed(1))

# ---------------------------------------------------------------- rows


def row_open(flags: argparse.Namespace, folder: Path) -> dict[str, float]:
    empty, began = ready(flags), time.perf_counter()
    open_artifact(folder, to=Destination(flags.device))
    fence(flags)
    found = {"open s": round(time.perf_counter() - began, 2)} | memory(flags)
    return found | {"host GiB": round(found["host GiB"] - empty, 2)}


def lora_options(flags: argparse.Namespace, folder: Path, base_dtype: str | None = None) -> Any:
    from assay.recipes.options import Sft

    return Sft(model=str(folder), data=(), out=str(folder.parent / "never"), lora_r=16, max_length=flags.length,
               batch_tokens=flags.rows * flags.length, micro_batch_tokens=flags.micro * flags.length,
               gradient_checkpointing=flags.checkpointing, base_dtype=base_dtype)  # type: ignore[arg-type]


def row_lora(flags: argparse.Namespace, folder: Path, base_dtype: str | None = None) -> dict[str, float]:
    from assay.data.batch import Batch
    from assay.learn import loop
    from assay.learn.cuda_graph import GraphedAccumulate
    from assay.learn.objectives import next_token
    from assay.learn.optim import adamw
    from assay.recipes.memory_plan import PlannedWork, plan_memory, planned_model
    from assay.recipes.starting_model import load_start

    ready(flags)
    began = time.perf_counter()
    options = lora_options(flags, folder, base_dtype)
    start = load_start(options, flags.device, print)
    fence(flags)
    opened = round(time.perf_counter() - began, 2)
    phase(flags, "open")
    tokens = random_tokens(flags, start.model.config.vocab)
    weight = torch.ones(tokens.shape)
    weight[:, 0] = 0
    batch = Batch(tokens, weight)
    accumulate = GraphedAccumulate() if flags.device.startswith("cuda") else loop.accumulated
    steps = loop.train(start.model, adamw(start.model.named_parameters(), 1e-4), iter(lambda: batch, None), next_token, micro=flags.micro,
                       accumulate=accumulate)
    planned = plan_memory(planned_model(folder), PlannedWork(flags.micro, flags.length, 16, checkpointing=flags.checkpointing,
                                                             base_dtype=base_dtype))
    return {"open s": opened} | timed_steps(flags, lambda: next(steps)) | memory(flags) | {"plan GiB": round(planned.steps / GIB, 2)}


def within(gib: float, base_dtype: str) -> Callable[[argparse.Namespace, Path], dict[str, float]]:
    """One row at a time and a step, gradient checkpointing, no more GPU memory than so much."""
    def row(flags: argparse.Namespace, folder: Path) -> dict[str, float]:
        one = argparse.Namespace(**vars(flags) | {"rows": 1, "micro": 1, "checkpointing": True, "cap_gib": flags.cap_gib or gib})
        return row_lora(one, folder, base_dtype)
    return row


def row_same(flags: argparse.Namespace, folder: Path) -> dict[str, float]:
    from assay.data.batch import Batch
    from assay.learn import loop
    from assay.learn.cuda_graph import GraphedAccumulate
    from assay.learn.objectives import next_token
    from assay.learn.optim import adamw
    from assay.model.lora import attach, fresh, plan
    from assay.model.placement import place_for_training
    from assay.statistics.estimate import ratio

    ready(flags)
    source = open_artifact(folder)
    if source.raw.whole is not None:  # codes are made of a folder
        folder = written_as_folder(source, Path(tempfile.mkdtemp(prefix="size-")) / "folder")
    tokens = text_tokens(flags, source) if flags.text else random_tokens(flags, source.config.vocab)

    def losses(base: Artifact, dtype: torch.dtype | None, seed: int) -> list[float]:
        model = build_model(base, dtype)
        attach(model, fresh(source.config, plan(source.config), 16, 2.0, seed, base.digest))
        place_for_training(model, flags.device).train()
        weight = torch.ones(tokens.shape)
        weight[:, 0] = 0
        accumulate = GraphedAccumulate() if flags.device.startswith("cuda") else loop.accumulated
        steps = loop.train(model, adamw(model.named_parameters(), 3e-4), [Batch(tokens, weight)] * (WARM + flags.steps), next_token,
                           micro=flags.micro, accumulate=accumulate)
        return [float(step.loss) for step in steps]

    wide = [losses(source, torch.float32, seed) for seed in (0, 1, 2)]
    found: dict[str, Any] = {"first": wide[0][0], "last": wide[0][-1]}
    phase(flags, "fp32 learned from")
    for name in flags.bases.split(","):
        base = source if name == "file" else open_artifact(folder, to=Destination(flags.device), held=name)
        each = [[(a - b) / b for a, b in zip(losses(base, None, seed), due, strict=True)] for seed, due in enumerate(wide)]
        over = ratio([statistics.mean(seed) for seed in each], [1.0] * len(each))  # the mean over seeds, with its t-interval
        worst = max(abs(share) for seed in each for share in seed)
        print(f"{name}: {over} of the loss in fp32 at {len(each[0])} steps of {len(each)} seeds, worst {worst:.2e}", flush=True)
        phase(flags, f"{name} compared")
        found |= {f"{name} mean": f"{over.mean:+.1e} [{over.low:+.1e}, {over.high:+.1e}]", f"{name} worst": f"{worst:.1e}"}
    return found | {"worst": max((found[f"{name} worst"] for name in flags.bases.split(",")), key=float)}


def written_as_folder(source: Artifact, where: Path) -> Path:
    from assay.store.checkpoint import write_checkpoint
    from assay.store.saving import Lineage, model_contents

    model = build_model(source)
    write_checkpoint(where, model_contents(model, source.tokenizer, source.stops, Lineage("new"), dtype=torch.float32))
    return where


def text_tokens(flags: argparse.Namespace, source: Any) -> torch.Tensor:
    ids = source.tokenizer.encode(Path(flags.text).read_text()[: 40 * flags.rows * flags.length])
    return torch.tensor(ids[: flags.rows * flags.length]).view(flags.rows, flags.length)


def row_sft(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from assay.recipes import sft
    from assay.recipes.options import Sft
    from assay.recipes.trainer import Trainer

    ready(flags)
    began, marks, said = time.perf_counter(), list[float](), list[str]()

    def say(line: str) -> None:
        said.append(line)
        phase(flags, line.strip()[:100])

    class Timed(Trainer):
        def record(self, *given: Any, **named: Any) -> None:
            fence(flags)
            marks.append(time.perf_counter() - began)
            super().record(*given, **named)

    sft.Trainer = Timed  # type: ignore[misc]
    out = folder.parent / f"run-{folder.name}"
    shutil.rmtree(out, ignore_errors=True)
    data = write_sums(folder.parent / "sums.jsonl", flags)
    outcome = sft.sft(Sft(model=str(folder), data=(str(data),), out=str(out), lora_r=16, max_length=flags.length, held_out=0.02,
                          batch_tokens=flags.rows * flags.length, micro_batch_tokens=flags.micro * flags.length, save_steps=0, insist=True,
                          max_steps=WARM + flags.steps, num_train_epochs=1000, probe_samples=0, device=flags.device,
                          gradient_checkpointing=flags.checkpointing), say)
    each = statistics.median(after - before for before, after in zip(marks[WARM - 1 :], marks[WARM:], strict=False))
    shutil.rmtree(out, ignore_errors=True)
    return {"first step s": round(marks[0], 2), "step s": round(each, 4), "tokens/s": round(flags.rows * flags.length / each),
            "whole s": round(time.perf_counter() - began, 1), "exit": outcome.exit_code,
            "parts": next((line for line in said if " s: open " in line), "")} | memory(flags)


def row_first_step(flags: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The command is ended after its first step; what it started ends with it."""
    out, data = folder.parent / "first-step", write_sums(folder.parent / "sums.jsonl", flags)
    shutil.rmtree(out, ignore_errors=True)
    asked = ["sft", "--model", str(folder), "--data", str(data), "--out", str(out), "--lora-r", "16", "--max-length", str(flags.length),
             "--batch-tokens", str(flags.rows * flags.length), "--micro-batch-tokens", str(flags.micro * flags.length), "--max-steps", "9",
             "--num-train-epochs", "1000", "--held-out", "0.02", "--insist", "--device", flags.device]
    began, found, last = time.perf_counter(), dict[str, float](), "it said nothing"
    with subprocess.Popen([sys.executable, "-m", "assay", *asked], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = round(time.perf_counter() - began, 2)
            if line.startswith(("LoRA", "step 0:")):
                found["open s" if line.startswith("LoRA") else "step 0 s"] = now
                phase(flags, line[:60].strip())
            if line.startswith("step 1"):
                found["first step s"] = now
                process.kill()
                break
            last = line.strip()
    shutil.rmtree(out, ignore_errors=True)
    if "first step s" not in found:
        raise SystemExit(f"the command ended before a step: {last}")
    return found


def row_prove(flags: argparse.Namespace, folder: Path) -> dict[str, float]:
    """An adapter as a run writes it, moved a little; its base is read for the first proof, and kept for the second."""
    from assay.guard.proof import ProofRequest, prove
    from assay.guard.proof_subject import ProofSampling
    from assay.guard.proving_process import PROVING_PROCESSES
    from assay.recipes.starting_model import load_start
    from assay.store.checkpoint import write_checkpoint
    from assay.verdict import overall, without_optional

    ready(flags)
    where = folder.parent / f"adapter-{folder.name}"
    shutil.rmtree(where, ignore_errors=True)
    start = load_start(lora_options(flags, folder), flags.device, print)
    with torch.no_grad():
        for parameter in start.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 1e-3)
    write_checkpoint(where, start.weights.contents(start.weights.ancestry.later, {}, {}, {}))
    del start
    gc.collect()
    if flags.device.startswith("cuda"):
        torch.cuda.empty_cache()
    phase(flags, "adapter written")
    began = time.perf_counter()
    alone = subprocess.run([sys.executable, "-m", "assay", "prove", str(where), "--device", flags.device], capture_output=True, text=True)
    found: dict[str, Any] = {"whole s": round(time.perf_counter() - began, 2), "exit": alone.returncode}
    phase(flags, f"assay prove: exit {alone.returncode}")
    request = ProofRequest(str(where), probing=ProofSampling(device=flags.device))
    with PROVING_PROCESSES.keeping():
        for name in ("open s", "proof s"):
            began = time.perf_counter()
            verdicts = prove(request)
            found[name] = round(time.perf_counter() - began, 2)
            phase(flags, f"{name}: {overall(without_optional(verdicts))}")
    return found | {"worst": str(overall(without_optional(verdicts)))}


REWARD = """def reward(prompt, completion, row):
    return 1.0 if completion.strip() == row["gold_completion"] else sum(completion.encode()) % 8 / 16
"""


def row_grpo(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Of random weights: every completion is as long as it may be, and its reward is as good as drawn."""
    import grpo as bench_grpo
    from beside import Clock, train_only, without_proofs

    from assay.recipes import grpo
    from assay.recipes.grpo_options import Grpo

    ready(flags)
    without_proofs()
    home = Path(tempfile.mkdtemp(prefix="size-grpo-"))
    (home / "drawn.py").write_text(REWARD)
    asked = [{"prompt": f"What is {i} + {i * 7 % 89}? ", "gold_completion": f"It is {i + i * 7 % 89}."} for i in range(40 * flags.prompts)]
    for name, rows in (("train", asked[4:]), ("held-out", asked[:4])):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    clock, began, made = Clock(1, 1, flags.device), time.perf_counter(), list[Any]()
    config = Grpo(model=str(folder), data=(str(home / "train.jsonl"),), held_out_data=str(home / "held-out.jsonl"), out=str(home / "run"),
                  reward=(f"{home / 'drawn.py'}:reward:1",), prompts=flags.prompts, num_generations=flags.group, lora_r=16,
                  max_completion_length=flags.max_new, beta=0.01, max_steps=2 + flags.grpo_steps, warmup_steps=0, save_steps=0, insist=True,
                  eval_prompts=2, num_generations_eval=0, micro_batch_size=flags.grpo_micro, device=flags.device,
                  gradient_checkpointing=flags.checkpointing)

    class Timed(bench_grpo.Timed):
        def record(self, step: Any, **columns: Any) -> None:
            super().record(step, **columns)
            phase(flags, f"step {self.done}")

    def trainer(*given: Any, **named: Any) -> Any:
        made.append(Timed(clock, flags.grpo_steps, *given, **named))
        return made[0]

    grpo.load_start = bench_grpo.without_stops  # type: ignore[assignment]
    with bench_grpo.parts_timed(bench_grpo.PARTS, lambda: made[0].timing if made else None):
        done = train_only(grpo, config, print, trainer)
    seconds = clock.per_step()
    each, completions = statistics.median(seconds[: flags.grpo_steps]), flags.prompts * flags.group
    print(f"parts of a step, fenced: {done.timing.line(1, seconds[-1])}", flush=True)
    return {"first step s": round(clock.marks[0] - began, 1), "step s": round(each, 3), "s/completion": round(each / completions, 4),
            "tokens/s": round(completions * flags.max_new / each), "parts": done.timing.line(1, seconds[-1])} | memory(flags)


def row_peer_grpo(flags: argparse.Namespace, folder: Path) -> dict[str, float]:
    """What TRL does in a step, without its checks: generate, the reference's log-probabilities with the adapter off, and a PEFT step."""
    from peft import LoraConfig, get_peft_model

    ready(flags)
    model = get_peft_model(peer_model(flags, folder), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    phase(flags, "open")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, fused=flags.device.startswith("cuda"))
    prompts = torch.randint(0, model.config.vocab_size, (flags.peer_group, 16), generator=torch.Generator().manual_seed(2)).to(flags.device)

    def logprobs(rows: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=rows).logits[:, prompts.shape[1] - 1 : -1].float()
        return logits.log_softmax(-1).gather(-1, rows[:, prompts.shape[1] :, None])[..., 0]

    def step() -> None:
        model.eval()
        with torch.no_grad():
            rows = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0,
                                  max_new_tokens=flags.max_new, min_new_tokens=flags.max_new, pad_token_id=0)
            with model.disable_adapter():
                reference = torch.cat([logprobs(row[None]) for row in rows])
        phase(flags, "generated")
        model.train()
        for row, of_reference in zip(rows, reference, strict=True):
            now = logprobs(row[None])[0]
            off = of_reference - now
            loss = -(torch.exp(now - now.detach()) - 0.01 * (off.exp() - off - 1)).mean()
            (loss / len(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()

    began = time.perf_counter()
    step()
    fence(flags)
    each = time.perf_counter() - began
    return {"step s": round(each, 2), "s/completion": round(each / flags.peer_group, 3),
            "tokens/s": round(flags.peer_group * flags.max_new / each)} | memory(flags)


def write_sums(path: Path, flags: argparse.Namespace) -> Path:
    """Conversations of about a quarter of a row each, one of a kind."""
    terms = max(2, flags.length // 32)
    rows = ({"prompt": "+".join(str((i * 7919 + k * 104729) % 997) for k in range(terms)) + "=", "completion": str(i)} for i in range(600))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row_sample(flags: argparse.Namespace, folder: Path) -> dict[str, float]:
    from assay.generate.engine import Engine
    from assay.generate.generation_request import GenerationRequest, Sampling
    from assay.model.placement import place_for_inference

    ready(flags)
    began = time.perf_counter()
    model = place_for_inference(build_model(open_artifact(folder, to=Destination(flags.device)), None), flags.device)
    engine = Engine(model, slots=flags.streams, length=flags.prompt + flags.new, version="bench")
    fence(flags)
    opened = round(time.perf_counter() - began, 2)
    prompts = torch.randint(0, model.config.vocab, (flags.streams, flags.prompt), generator=torch.Generator().manual_seed(2)).tolist()

    def once() -> int:
        for i, prompt in enumerate(prompts):
            engine.submit(GenerationRequest(tuple(prompt), Sampling(flags.new, 0.7, 50), (str(i),)))
        return sum(len(progress.completion.ids) for progress in engine.drain() if progress.completion is not None)

    weights, config = 2 * sum(p.numel() for p in model.parameters()), model.config
    cached = cached_bytes(flags, config.depth, config.kv_heads, config.head_dim)
    return {"open s": opened} | sampled(flags, once, weights, cached) | memory(flags)


def cached_bytes(flags: argparse.Namespace, depth: int, kv_heads: int, head_dim: int) -> int:
    """Keys and values, in 2 bytes each, that the steps of all streams together read."""
    a_token = 2 * 2 * depth * kv_heads * head_dim
    return flags.streams * a_token * sum(flags.prompt + step for step in range(flags.new))


def sampled(flags: argparse.Namespace, once: Callable[[], int], weight_bytes: int, cached: int) -> dict[str, float]:
    once()
    seconds, tokens = [], 0
    for _ in range(3):
        fence(flags)
        began = time.perf_counter()
        tokens = once()
        fence(flags)
        seconds.append(time.perf_counter() - began)
    each = statistics.median(seconds)
    if not flags.device.startswith("cuda"):
        return {"tokens/s": round(tokens / each)}
    weights = flags.new * weight_bytes / copy_rate() / each
    return {"tokens/s": round(tokens / each), "floor": round(weights, 3),
            "floor kv": round(weights * (1 + cached / (flags.new * weight_bytes)), 3)}


def copy_rate() -> float:
    """Bytes a second, read and written, of a large device copy."""
    a = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    rates = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        b.copy_(a)
        torch.cuda.synchronize()
        rates.append(2 * a.numel() / (time.perf_counter() - began))
    return max(rates)


def peer_model(flags: argparse.Namespace, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(flags.device)


def row_peer_lora(flags: argparse.Namespace, folder: Path) -> dict[str, float]:
    from peft import LoraConfig, get_peft_model

    ready(flags)
    began = time.perf_counter()
    model = peer_model(flags, folder)
    fence(flags)
    opened = round(time.perf_counter() - began, 2)
    if flags.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=flags.device.startswith("cuda"))
    tokens = random_tokens(flags, model.config.vocab_size).to(flags.device)

    def step() -> None:
        for part in tokens.split(flags.micro):
            (model(input_ids=part, labels=part).loss * len(part) / len(tokens)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"open s": opened} | timed_steps(flags, step) | memory(flags)


def row_peer_sample(flags: argparse.Namespace, folder: Path) -> dict[str, float]:
    ready(flags)
    model = peer_model(flags, folder).eval()
    prompts = torch.randint(0, model.config.vocab_size, (flags.streams, flags.prompt), generator=torch.Generator().manual_seed(2))
    prompts = prompts.to(flags.device)

    @torch.no_grad()
    def once() -> int:
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=0.7, top_k=50,
                             max_new_tokens=flags.new, min_new_tokens=flags.new, pad_token_id=0)
        return (out.shape[1] - prompts.shape[1]) * len(out)

    config = model.config
    cached = cached_bytes(flags, config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    return sampled(flags, once, 2 * sum(p.numel() for p in model.parameters()), cached) | memory(flags)


ROWS: dict[str, Callable[[argparse.Namespace, Path], dict[str, float]]] = {
    "open": row_open, "lora": row_lora, "nf4-16gib": within(16, "nf4"), "bf16-24gib": within(24, "bf16"), "sft": row_sft,
    "sample": row_sample, "same": row_same, "first-step": row_first_step, "prove": row_prove, "grpo": row_grpo,
    "peer-lora": row_peer_lora, "peer-sample": row_peer_sample, "peer-grpo": row_peer_grpo}

ALIASES = {"nf4": "nf4-16gib", "lora24": "bf16-24gib"}
SEPARATE = ("same", "nf4-16gib", "bf16-24gib", "first-step", "prove", "grpo", "peer-grpo")  # rows that are asked for by name

# ---------------------------------------------------------------- the table


def main() -> None:
    flags = parsed()
    if flags.child:
        row, folder = flags.child
        print("RESULT " + json.dumps(ROWS[row](flags, Path(folder))), flush=True)
        return
    print(f"{device_name(flags)}; " + ", ".join(versions()), flush=True)
    with home(flags) as place:
        rows = list(measured_rows(flags, place))
    print_table(rows)


def measured_rows(flags: argparse.Namespace, place: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    asked = {ALIASES.get(name, name) for name in flags.only.split(",")} if flags.only else set()
    if unknown := asked - SHAPES.keys() - ROWS.keys():
        raise SystemExit(f"--only: {', '.join(sorted(unknown))}? expected shapes ({', '.join(SHAPES)}) and rows ({', '.join(ROWS)})")
    shapes = [name for name in SHAPES if name in asked] or [name for name in SHAPES if name != "tiny"]
    for name in shapes:
        folder = Path(flags.weights) if flags.weights else place / name
        if not flags.weights and not folder.exists():
            seconds = make_folder(SHAPES[name], folder, flags.device)
            print(f"{name}: random weights written in {seconds:.1f} s", flush=True)
            gc.collect()
            if flags.device.startswith("cuda"):
                torch.cuda.empty_cache()
        for row in [row for row in ROWS if row in asked] or [row for row in ROWS if row not in SEPARATE]:
            result = in_a_process(row, folder)
            print(f"{name} {row}: {result}", flush=True)
            yield name, row, result
        if not flags.home and not flags.weights:
            shutil.rmtree(folder)


def in_a_process(row: str, folder: Path) -> dict[str, Any]:
    """A row's result; or what stopped it, in a sentence."""
    flags = parsed()
    try:
        done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child", row, str(folder)], capture_output=True, text=True,
                              timeout=flags.limit, check=False)
    except subprocess.TimeoutExpired as late:
        if flags.verbose:
            print(*(words[-4000:].decode(errors="replace") for words in (late.stdout, late.stderr) if isinstance(words, bytes)), sep="\n")
        return {"failed": f"not done after {flags.limit} s{how_far(late.stdout)}"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    said = [line for line in done.stderr.splitlines() if line.strip()] or ["said nothing"]
    if flags.verbose:
        print(done.stdout[-4000:], done.stderr[-8000:], sep="\n", flush=True)
    return {"failed": f"exit {done.returncode}: {said[-1][:300]}{how_far(done.stdout)}"}


def how_far(printed: str | bytes | None) -> str:
    """The last phase that a row told of."""
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""
    told = [line.removeprefix("PHASE ") for line in text.splitlines() if line.startswith("PHASE ")]
    if not told:
        return "; it did not open the model"
    last = json.loads(told[-1])
    name, seconds = last.pop("phase"), last.pop("s")
    return f"; it came as far as {name!r} after {seconds} s: " + ", ".join(f"{value} {what}" for what, value in last.items())


def print_table(rows: list[tuple[str, str, dict[str, Any]]]) -> None:
    columns = ["open s", "first step s", "step s", "tokens/s", "s/completion", "floor", "floor kv", "proof s", "whole s", "peak GiB",
               "plan GiB", "held GiB", "host GiB", "worst"]
    print("\n| shape | row | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 2))
    for name, row, result in rows:
        cells = [str(result.get(column, "")) for column in columns]
        print(f"| {name} | {row} | " + (result["failed"] if "failed" in result else " | ".join(cells)) + " |")


@contextlib.contextmanager
def home(flags: argparse.Namespace) -> Iterator[Path]:
    if flags.home:
        yield Path(flags.home)
    else:
        with tempfile.TemporaryDirectory(prefix="size-") as made:
            yield Path(made)


def device_name(flags: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if flags.device.startswith("cuda") else "cpu"


def versions() -> Iterator[str]:
    for name in ("torch", "triton", "transformers", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes and rows, separated by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--home", default="", help="keep the weights here")
    parser.add_argument("--weights", default="", help="a real model's folder, in the place of random weights")
    parser.add_argument("--text", default="", help="for the row `same`: real text to learn")
    parser.add_argument("--bases", default="file,bf16,int8,nf4", help="for the row `same`: what is compared with fp32")
    parser.add_argument("--limit", type=float, default=420, help="seconds that a row may take")
    parser.add_argument("--cap-gib", type=float, default=0, help="GPU memory that a row may hold")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--verbose", action="store_true", help="show what a failed row said")
    for name, default in (("rows", 16), ("length", 1024), ("micro", 4), ("steps", 6), ("streams", 64), ("prompt", 128), ("new", 64),
                          ("prompts", 16), ("group", 8), ("max-new", 256), ("grpo-micro", 16), ("grpo-steps", 2), ("peer-group", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

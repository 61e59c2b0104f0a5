"""assay doctor: show the environment, what is missing, and what each missing part would enable."""

import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.config import option

if TYPE_CHECKING:
    from assay.model.transformer import ModelConfig


@dataclass(frozen=True)
class FLAGS:
    """Show the environment. Nothing is changed and nothing is sent."""

    json: bool = option("print JSON", default=False)


EXAMPLES = "  assay doctor\n  assay doctor --json"

# package → (the extra that brings it, what it enables)
OPTIONAL = {
    "transformers": ("hf", "proofs through transformers' own loader"),
    "peft": ("hf", "proofs of adapters through PEFT"),
    "gguf": ("gguf", "reading and writing GGUF files"),
    "llama-cpp-python": ("llama", "GGUF files proven in llama.cpp itself, and its K-quants"),
    "compressed-tensors": ("compressed", "folders in fp8, w8a8 and w4a16 proven through transformers"),
    "llmcompressor": ("gptq", "4-bit folders fitted to a text; it wants an older transformers, so an environment of its own"),
    "pyarrow": ("data", "corpora and data sets in parquet"),
    "starlette": ("serve", "assay serve, with uvicorn"),
    "uvicorn": ("serve", "assay serve, with starlette"),
    "httpx": ("judge", "a judge, or a probe, behind an OpenAI-compatible endpoint"),
    "fsspec": ("remote", "checkpoints, models and corpora at URLs; s3:// with s3fs, gs:// with gcsfs"),
    "matplotlib": ("plot", "pictures beside the numbers"),
    "triton": (None, "fused kernels on a GPU (comes with torch's CUDA builds)"),
}
ROW_TOKENS = 2048
USABLE = 0.95  # of a GPU's memory: torch and CUDA take the rest for themselves
TRAINING_WAYS: dict[str, dict[str, Any]] = {
    "the whole model, AdamW": {},
    "the whole model, --optim adamw_8bit --gradient-checkpointing": {"moments": 2, "checkpointing": True},
    "--lora-r 16": {"lora_r": 16},
    "--lora-r 16 --base-dtype nf4 --gradient-checkpointing": {"lora_r": 16, "base_dtype": "nf4", "checkpointing": True},
}
CORE = ("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "rich", "scipy", "pyyaml")


def run(flags: FLAGS) -> int:
    facts = environment_facts()
    if flags.json:
        print(json.dumps(facts, indent=1))
        return 0
    print("\n".join(f"{name:16} {value}" for name, value in facts["machine"].items()))
    for gpu, lines in facts["fits"].items():
        print(f"\n{gpu} can train, one row of {ROW_TOKENS} tokens at a time:")
        print("\n".join(f"  {line}" for line in lines))
    print("\ninstalled: " + ", ".join(f"{name} {version}" for name, version in facts["installed"].items()))
    for name, gap in facts["missing"].items():
        print(f"missing:   {name}: {gap['enables']}; {gap['install']}")
    return 0


def environment_facts() -> dict:
    from assay.reward.sandbox import sandbox_unavailable

    versions = {name: _version(name) for name in (*CORE, *OPTIONAL)}
    missing = {name: {"enables": what, "install": f"pip install 'assay[{extra}]'" if extra else "nothing to install on a CPU"}
               for name, (extra, what) in OPTIONAL.items() if versions[name] is None}
    if (reason := sandbox_unavailable()) is not None:
        missing["sandbox"] = {"enables": "running generated code (HumanEval, MBPP, unit-test rewards)", "install": reason}
    return {"machine": _machine(), "installed": {n: v for n, v in versions.items() if v is not None}, "missing": missing, "fits": _fits()}


def _fits() -> dict[str, list[str]]:
    import torch

    gpus = [torch.cuda.get_device_properties(place) for place in range(torch.cuda.device_count())]
    return {f"GPU {place}, {gpu.name}": trainable_models(gpu.total_memory) for place, gpu in enumerate(gpus)}


def trainable_models(available: int) -> list[str]:
    """Largest of the known model shapes that `assay plan` says would fit, for each way to train, and what it would take."""
    from assay.recipes.memory_plan import GIB, PlannedModel, PlannedWork, plan_memory

    lines = []
    for words, asked in TRAINING_WAYS.items():
        plans = {name: plan_memory(PlannedModel(config, 2 * PlannedModel(config, 0).parameters), PlannedWork(1, ROW_TOKENS, **asked))
                 for name, config in known_shapes().items()}
        fitting = {name: plan.total - plan.parts["saving"] for name, plan in plans.items()
                   if plan.total - plan.parts["saving"] <= available * USABLE}
        largest = max(fitting, key=lambda name: fitting[name], default=None)
        lines.append(f"{words:58} " + ("none of the known shapes" if largest is None else f"{largest} ({fitting[largest] / GIB:.1f} GiB)"))
    return lines


def known_shapes() -> dict[str, "ModelConfig"]:
    """Published models' geometry, by which sizes are compared; no weights."""
    from assay.model.transformer import ModelConfig, Rope

    shapes = {"SmolLM2-135M": (49152, 576, 30, 9, 3, 64, 1536), "Qwen3-0.6B": (151936, 1024, 28, 16, 8, 128, 3072),
              "Qwen3-1.7B": (151936, 2048, 28, 16, 8, 128, 6144), "Qwen3-4B": (151936, 2560, 36, 32, 8, 128, 9728),
              "Qwen3-8B": (151936, 4096, 36, 32, 8, 128, 12288), "Qwen3-14B": (151936, 5120, 40, 40, 8, 128, 17408),
              "Qwen3-32B": (151936, 5120, 64, 64, 8, 128, 25600)}
    untied = {"Qwen3-8B", "Qwen3-14B", "Qwen3-32B"}
    return {name: ModelConfig(family="qwen3", vocab=vocab, width=width, depth=depth, heads=heads, kv_heads=shared, head_dim=head,
                              hidden=hidden, max_length=8192, norm="rms", norm_eps=1e-6, rope=Rope(1e6), activation="silu", gated=True,
                              qkv_bias=False,
                              out_bias=False, mlp_bias=False, qk_norm=True, windows=(None,) * depth, tied=name not in untied, softcap=None,
                              value_residual=False, attention_gate=False)
            for name, (vocab, width, depth, heads, shared, head, hidden) in shapes.items()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, str]:
    import torch

    from assay import __version__
    from assay.store.model_cache import cache_folder

    gpus = [f"{properties.name} ({properties.total_memory >> 30} GiB)"
            for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {"assay": __version__, "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}",
            "cores": str(os.cpu_count()), "memory": f"{pages * size >> 30} GiB",
            "gpu": ", ".join(gpus) or "none: everything runs on the CPU",
            "bf16": str(bool(gpus) and torch.cuda.is_bf16_supported()), "cache": str(cache_folder()),
            "hub": "offline (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "used only when a hub name is given"}

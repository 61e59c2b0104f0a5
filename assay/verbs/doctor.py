"""assay doctor: show the environment, what is missing, and what each missing part would enable."""

import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass

from assay.config import option


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
    "pyarrow": ("data", "corpora and data sets in parquet"),
    "starlette": ("serve", "assay serve, with uvicorn"),
    "uvicorn": ("serve", "assay serve, with starlette"),
    "httpx": ("judge", "a judge, or a probe, behind an OpenAI-compatible endpoint"),
    "fsspec": ("remote", "checkpoints, models and corpora at URLs; s3:// with s3fs, gs:// with gcsfs"),
    "matplotlib": ("plot", "pictures beside the numbers"),
    "triton": (None, "fused kernels on a GPU (comes with torch's CUDA builds)"),
}
CORE = ("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "rich", "scipy", "pyyaml")


def run(flags: FLAGS) -> int:
    facts = environment_facts()
    if flags.json:
        print(json.dumps(facts, indent=1))
        return 0
    print("\n".join(f"{name:16} {value}" for name, value in facts["machine"].items()))
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
    return {"machine": _machine(), "installed": {n: v for n, v in versions.items() if v is not None}, "missing": missing}


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

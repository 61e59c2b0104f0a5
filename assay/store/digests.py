"""Digests: of a set of weights, of the code that ran, and the facts of the environment it ran in."""

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import assay
from assay.store.mapped_pages import PART_BYTES, hashed_in_passing
from assay.store.safetensors_files import DTYPE_NAMES, tensor_bytes

WEIGHT_FILES = ("model", "adapter_model")
MOST_HASHERS = 16


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """The identity of weights under their foreign names, whatever files hold them and in whatever order."""
    return combined_digest(tensor_facts(tensors))


def tensor_facts(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """name → dtype, shape and sha256, as a manifest records them."""
    digests = tensor_digests(tensors)
    return {name: {"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape), "sha256": digests[name]} for name, t in tensors.items()}


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """name → sha256, several at a time: hashing holds no lock of Python's."""
    with ThreadPoolExecutor(min(MOST_HASHERS, len(os.sched_getaffinity(0))), "sha256") as hashers:
        many = sum(map(tensor_bytes, tensors.values())) > PART_BYTES
        return dict(zip(tensors, (hashers.map if many else map)(hashed_in_passing, tensors.values()), strict=True))


def recorded_tensors(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """name → dtype, shape and sha256 of every weight that a manifest records."""
    return {name: facts for file, tensors in manifest["tensors"].items() if file.startswith(WEIGHT_FILES)
            for name, facts in tensors.items()}


def recorded_digest(manifest: Mapping[str, Any]) -> str:
    """Digest of the weights, from what the manifest recorded when the tensors were written."""
    return combined_digest(recorded_tensors(manifest))


@functools.cache
def code_digest() -> str:
    """sha256 over every Python file of this package, so that a checkpoint names the code that wrote it."""
    root = Path(assay.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """Facts of the environment that may change the last bit of a result."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"assay": assay.__version__, "python": platform.python_version(), "torch": torch.__version__, "device": device,
            "machine": f"{platform.system()} {platform.machine()}", "threads": str(torch.get_num_threads())}


def combined_digest(facts: Mapping[str, Mapping[str, Any]]) -> str:
    lines = (f"{name} {fact['dtype']} {list(fact['shape'])} {fact['sha256']}" for name, fact in sorted(facts.items()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

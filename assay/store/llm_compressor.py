"""GPTQ by llm-compressor, where it is installed: asked in a process of its own, which has its own versions of what it needs.

GPTQ rounds a matrix column by column and lets the columns that are left make up for what was lost, on texts that it is given. What
comes back is read by Assay's own reader and must be the layers that were sent, in the codes that were asked for.
"""

import importlib.util
import json
from pathlib import Path

import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.json_child import JsonChild
from assay.store.compressed_tensors import CompressedScheme, recipe_of
from assay.store.safetensors_files import read_folder_tensors
from assay.strict_json import read_json

LLM_COMPRESSOR_MISSING = ("llm-compressor is not installed (pip install 'assay[gptq]', in an environment of its own: it wants an older "
                          "transformers)")
_CHILD = Path(__file__).parent / "llm_compressor_child.py"
_SECONDS = 12 * 3600.0


def llm_compressor_installed() -> bool:
    return importlib.util.find_spec("llmcompressor") is not None


def require_llm_compressor() -> None:
    if not llm_compressor_installed():
        raise UsageError(f"--to gptq is llm-compressor's work, and {LLM_COMPRESSOR_MISSING}; --to w4a16 rounds without texts, and needs "
                         "nothing more")


def gptq_weights(source: Path, scratch: Path, scheme: CompressedScheme, group: int | None, rows: list[list[int]],
                 dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of the folder `source` in codes of `scheme`, fitted to these rows of token ids."""
    child = JsonChild(_CHILD, "")
    child.start()
    request = {"source": str(source), "target": str(scratch), "rows": rows, "bits": scheme.bits, "group": group,
               "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
    found = child.ask(json.dumps(request).encode() + b"\n", _SECONDS)
    status = child.stop()
    if found is None or "error" in found:
        why = f"its process died with status {status}" if found is None else found["error"]
        raise UsageError(f"llm-compressor did not round {source}: {why}; --to w4a16 rounds without texts")
    fields = read_json(scratch / "config.json")
    recipe = recipe_of(fields, "what llm-compressor wrote")
    if (recipe.scheme, recipe.group) != (scheme, group):
        raise ArtifactError(f"llm-compressor wrote {recipe.scheme.name} in groups of {recipe.group}; asked for was {scheme.name} in "
                            f"groups of {group}")
    return read_folder_tensors(scratch, stem="model")

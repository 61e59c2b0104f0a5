"""llama.cpp, through llama-cpp-python where it is installed: asked in a process of its own, which it may well end."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.json_child import JsonChild

LLAMA_CPP_MISSING = "llama-cpp-python is not installed (pip install 'assay[llama]')"
LLAMA_QUANTS = ("q6_k", "q5_k_m", "q4_k_m")  # made by llama.cpp's own quantiser
_CHILD = Path(__file__).parent / "llama_cpp_child.py"
_QUANTISE_SECONDS = 6 * 3600.0


def llama_cpp_installed() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def ask_llama_cpp(request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Answer of llama.cpp; `error` says why there is none."""
    child = JsonChild(_CHILD, "")
    child.start()
    try:
        found = child.ask(json.dumps(request).encode() + b"\n", seconds)
    except TimeoutError:
        return {"error": f"no answer came within {seconds:g} s"}
    status = child.stop()
    return {"error": f"its process died with status {status}"} if found is None else found


def quantise_gguf(source: Path, target: Path, kind: str, threads: int = 1) -> None:
    """`target` is `source`, a GGUF file of floats, in llama.cpp's `kind`."""
    if not llama_cpp_installed():
        raise UsageError(f"{kind} is made by llama.cpp itself, and {LLAMA_CPP_MISSING}; q8_0 needs no more than the gguf package")
    found = ask_llama_cpp({"do": "quantise", "source": str(source), "target": str(target), "kind": kind, "threads": threads},
                          _QUANTISE_SECONDS)
    if "error" in found or found["status"] != 0:
        raise UsageError(f"llama.cpp did not quantise {source.name} to {kind}: {found.get('error') or 'status ' + str(found['status'])}; "
                         "use --quant q8_0")

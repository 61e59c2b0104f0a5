"""llm-compressor child process: rounds a model's linear layers by GPTQ to given rows of token ids; a JSON line for each request.

Nothing of Assay is imported here.
"""

import importlib.metadata
import json
import os
import sys
import threading
import time
from typing import Any


def fitted_folder(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset  # type: ignore[import-untyped, unused-ignore]
    from llmcompressor import oneshot  # type: ignore[import-not-found, unused-ignore]
    from llmcompressor.modifiers.quantization import GPTQModifier  # type: ignore[import-not-found, unused-ignore]
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(request["threads"])
    rows = request["rows"]
    model = AutoModelForCausalLM.from_pretrained(request["source"], dtype=getattr(torch, request["dtype"]))
    texts = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    weights = {"num_bits": request["bits"], "type": "int", "symmetric": True, "strategy": "group", "group_size": request["group"]}
    modifier = GPTQModifier(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"], actorder=None)
    oneshot(model=model, dataset=texts, recipe=modifier, num_calibration_samples=len(rows), max_seq_length=max(map(len, rows)))
    model.save_pretrained(request["target"], save_compressed=True)
    return {"version": importlib.metadata.version("llmcompressor")}


def end_with(parent: int) -> None:
    """Rounding takes hours: whoever asked for it may be gone by then."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the library prints is no answer
    for line in sys.stdin.buffer:
        try:
            found = fitted_folder(json.loads(line))
        except (ValueError, RuntimeError, TypeError, KeyError, ImportError) as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main()

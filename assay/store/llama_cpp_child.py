"""llama.cpp child process: quantises a GGUF file, or reads texts, scores tokens and generates with one; a JSON line for each request.

A file that llama.cpp cannot bear ends this process and no other. Nothing of Assay is imported here.
"""

import ctypes
import importlib.metadata
import json
import os
import sys
from typing import Any

import llama_cpp
import numpy as np

FILE_KINDS = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
              "q5_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def quantise(request: dict[str, Any]) -> dict[str, Any]:
    wanted = llama_cpp.llama_model_quantize_default_params()
    wanted.ftype, wanted.nthread = FILE_KINDS[request["kind"]], request["threads"]
    status = llama_cpp.llama_model_quantize(request["source"].encode(), request["target"].encode(), ctypes.byref(wanted))
    return {"status": int(status)}


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Token ids of the texts; log-probabilities of the rows' tokens after their first; greedy continuations of the prompts."""
    longest = max(map(len, [*request["rows"], *(prompt + [0] * request["new"] for prompt in request["prompts"])]))
    model = llama_cpp.Llama(request["file"], n_ctx=longest + 8, n_batch=longest + 8, logits_all=True, n_threads=request["threads"],
                            n_threads_batch=request["threads"], verbose=False)
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    ends = {id: bool(llama_cpp.llama_vocab_is_eog(vocab, id)) for id in request["stops"]}
    return {"texts": [model.tokenize(text.encode(), add_bos=False, special=True) for text in request["texts"]],
            "rows": [scored(model, row) for row in request["rows"]],
            "generations": [generated(model, prompt, request["new"], vocab) for prompt in request["prompts"]],
            "ends": [id for id, ended in ends.items() if ended]}


def scored(model: Any, row: list[int]) -> list[float]:
    model.reset()
    model.eval(row)
    logits = np.array(model.scores[:len(row)], np.float64)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return [float(logits[place, token]) for place, token in enumerate(row[1:])]


def generated(model: Any, prompt: list[int], new: int, vocab: Any) -> list[int]:
    model.reset()
    model.eval(prompt)
    said: list[int] = []
    while len(said) < new:
        said.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        if llama_cpp.llama_vocab_is_eog(vocab, said[-1]):
            break
        model.eval(said[-1:])
    return said


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the library prints is no answer
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            found = {"quantise": quantise, "read": read}[request["do"]](request)
        except (ValueError, RuntimeError) as error:
            found = {"error": str(error)}
        answers.write(json.dumps(found | {"version": importlib.metadata.version("llama-cpp-python")}).encode() + b"\n")


if __name__ == "__main__":
    main()

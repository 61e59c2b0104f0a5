"""What a proof costs: `assay prove` on a real model in a fresh process, its seconds and its memory; and where they go.

    python bench/prove.py                          # smollm2-135m, after `assay fetch smollm2-135m`
    python bench/prove.py PATH
    python bench/prove.py --parts PATH [AGAINST]   # imports, each in a process of its own, and every part of two proofs in one process

Goal: SmolLM2-135M on two CPU cores in at most 60 s; on an H200 in 4 s.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from assay.guard import proof
from assay.guard.kept_artifacts import KeptArtifacts
from assay.guard.proof_subject import ProofSampling
from assay.model.placement import default_device
from assay.store.digests import environment

IMPORTS = ("torch", "assay.guard.proof", "transformers.models.llama.modeling_llama", "peft")  # in this order, each after those before
ASKED = "import importlib, sys, time; a = time.perf_counter(), time.process_time(); importlib.import_module(sys.argv[-1]); " \
        "print(f'{time.perf_counter() - a[0]:.2f} s, {time.process_time() - a[1]:.2f} of CPU')"


def main() -> None:
    if sys.argv[1:2] == ["--parts"]:
        show_parts(sys.argv[2], *sys.argv[3:4])
        return
    path = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "assay", "prove", path], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"$ assay prove {path}      {environment()}\n\n{done.stdout}{done.stderr}")
    print(f"exit code {done.returncode}; {seconds:.1f} s of wall time, {used.ru_utime + used.ru_stime:.1f} s of CPU, "
          f"{used.ru_maxrss / 2**20:.2f} GiB at most; torch {torch.__version__}")


def show_parts(path: str, against: str | None = None) -> None:
    """The second proof is what a kept process takes for the next checkpoint of a run."""
    for place, name in enumerate(IMPORTS):
        before = "".join(f"import {earlier}; " for earlier in IMPORTS[:place])
        said = subprocess.run([sys.executable, "-c", before + ASKED, name], capture_output=True, text=True)
        print(f"import {name:44} {said.stdout.strip() or said.stderr.strip()[-80:]}", flush=True)
    device = default_device()
    timed("first kernels", proof._first_kernels)(device)
    proof.PROOF_CHECKS = tuple(timed(proof.check_name(check), check) for check in proof.PROOF_CHECKS)
    for stage in ("read_artifact", "interpret_artifact", "_parent"):
        setattr(proof, stage, timed(stage, getattr(proof, stage)))
    kept, request = KeptArtifacts(), proof.ProofRequest(path, against=against, probing=ProofSampling(device=device))
    for number in ("first", "second"):
        found = timed(f"{number} proof in all", proof.examine_artifact)(request, kept)
        print(f"{sum(verdict.outcome is proof.Outcome.PROVEN for verdict in found)} of {len(found)} proven on {device}\n", flush=True)


def timed(label: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return work(*given, **named)
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            print(f"{label:24} {time.perf_counter() - wall:7.2f} s, {time.process_time() - cpu:7.2f} of CPU", flush=True)

    run.__name__ = work.__name__
    return run


if __name__ == "__main__":
    main()

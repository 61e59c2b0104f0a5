"""What a proof costs: `assay prove` on a real model in a fresh process, its seconds and its memory.

    python bench/prove.py                 # smollm2-135m, after `assay fetch smollm2-135m`
    python bench/prove.py PATH

Goal: SmolLM2-135M on two CPU cores in at most 60 s.
"""

import resource
import subprocess
import sys
import time

import torch

from assay.store.digests import environment


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "assay", "prove", path], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"$ assay prove {path}      {environment()}\n\n{done.stdout}{done.stderr}")
    print(f"exit code {done.returncode}; {seconds:.1f} s of wall time, {used.ru_utime + used.ru_stime:.1f} s of CPU, "
          f"{used.ru_maxrss / 2**20:.2f} GiB at most; torch {torch.__version__}")


if __name__ == "__main__":
    main()

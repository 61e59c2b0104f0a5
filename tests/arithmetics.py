"""Arithmetics: other CPUs, emulated by other instructions, the same sums in other orders, and other initial weights.

    OMP_NUM_THREADS=1 python -m tests.arithmetics > results/arithmetics.txt

runs every test marked `arithmetic` (those that judge what a tiny model has learned) under each of them and prints a table, in which
a test that failed stands with what it asserted; names given behind it choose some rows, and `--jobs 8` runs eight at a time (they come
in the table's order). A GPU is not used, where there is one.
tests/conftest.py calls `switch_on` in a process that was asked for one.
"""

import argparse
import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ORDER, SEEDS, THREADS, ONEDNN = "ASSAY_TEST_ORDER", "ASSAY_TEST_SEEDS", "ASSAY_TEST_THREADS", "ASSAY_TEST_ONEDNN"
ARITHMETICS = {
    "as it is": {},
    "plain instructions": {"ATEN_CPU_CAPABILITY": "default"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "MKL compatible": {"MKL_CBWR": "COMPATIBLE"},
    "no oneDNN": {ONEDNN: "off"},
    "two threads": {THREADS: "2", "OMP_NUM_THREADS": "2"},
    **{f"sums in order {seed}": {ORDER: str(seed)} for seed in range(1, 11)},
    **{f"initial weights {seed}": {SEEDS: str(seed)} for seed in range(1, 11)},
}
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rfE")
PASSED, LINE = re.compile(r"\d+ passed"), re.compile(r"\S+\.py:\d+: ")
TOLD = 12  # lines of a failed test's account in the table
INITIAL = (b"init", b"nudge", b"lora")  # addresses of initial weights


def switch_on() -> None:
    """Apply the settings that the environment asks of this process: threads, oneDNN or none, the order of sums, other seeds."""
    torch.set_num_threads(int(os.environ.get(THREADS, "1")))
    if os.environ.get(ONEDNN) == "off":
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    if ORDER in os.environ:
        reorder_sums(int(os.environ[ORDER]))
    if SEEDS in os.environ:
        shift_seeds(os.environ[SEEDS])


def shift_seeds(salt: str) -> None:
    """Other initial weights of every model, here and in all that has imported assay.seeds; data and their order stay."""
    from assay import seeds

    def salted(text: bytes) -> Any:
        return hashlib.sha256(salt.encode() + text if any(b"\x1fstr:" + name in text for name in INITIAL) else text)

    seeds.hashlib = SimpleNamespace(sha256=salted)  # type: ignore[assignment]

# ---------------------------------------------------------------- sums in another order


def reorder_sums(seed: int) -> None:
    """Matrix products and attention add up the same products in another order, forwards and backwards, in every thread."""

    @functools.cache
    def shuffled(count: int) -> Tensor:
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + count))

    def product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        order = shuffled(left.shape[-1])
        return left.index_select(left.dim() - 1, order), right.index_select(right.dim() - 2, order)

    def attention(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        order = shuffled(query.shape[-1])
        return query.index_select(-1, order), key.index_select(-1, order)

    _replace("mm", 0, product)
    _replace("bmm", 0, product)
    _replace("addmm", 1, product)
    _replace("baddbmm", 1, product)
    _replace("_scaled_dot_product_flash_attention_for_cpu", 0, attention)


_LIBRARY = torch.library.Library("aten", "IMPL")


def _replace(name: str, first: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """The CPU's own kernel, given what `change` makes of two of its arguments."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def reordered(keys: Any, *args: Any, **options: Any) -> Any:
        changed = [*args[:first], *change(*args[first : first + 2]), *args[first + 2 :]]
        return kernel.call_boxed(keys, *changed, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced, which is the point
        _LIBRARY.impl(name, reordered, "CPU", with_keyset=True, allow_override=True)

# ---------------------------------------------------------------- the table


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.arithmetics")
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows to run: " + ", ".join(ARITHMETICS))
    parser.add_argument("--jobs", type=int, default=1, help="rows to run at a time; leave two threads for each. Default: 1")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(ARITHMETICS)):
        parser.error(f"no arithmetic is called {unknown[0]!r}; there are {', '.join(ARITHMETICS)}")
    chosen, jobs = given.names or list(ARITHMETICS), max(1, given.jobs)
    print("command   OMP_NUM_THREADS=1 python -m tests.arithmetics", *(f'"{name}"' for name in given.names), f"--jobs {jobs}")
    print(f"versions  Python {platform.python_version()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, "
          f"{platform.machine()}\ndate      {time.strftime('%Y-%m-%d')}\n")
    marked = [str(file) for file in sorted(Path("tests").rglob("test_*.py")) if "pytest.mark.arithmetic" in file.read_text()]
    failures = 0
    with ThreadPoolExecutor(jobs) as pool:
        for name, said in zip(chosen, pool.map(lambda name: run_row(name, marked), chosen), strict=True):
            told, against = read_row(said)
            print(f"{name:<20} {told}", *against, sep="\n    ", flush=True)
            failures += bool(against)
    print(f"\n{failures} of {len(chosen)} arithmetics failed a test")
    return int(failures > 0)


def run_row(name: str, marked: list[str]) -> list[str]:
    """Pytest's result of all marked tests under one arithmetic, in a process of its own that sees no GPU."""
    done = subprocess.run([*PYTEST, "-m", "arithmetic and not gpu and not slow", *marked], capture_output=True, text=True, check=False,
                          env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"} | ARITHMETICS[name])
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def read_row(said: list[str]) -> tuple[str, list[str]]:
    """How many tests passed, and what is held against the row: each failed test, the line it failed in and what it asserted."""
    told = next((line.strip("= ") for line in reversed(said) if PASSED.search(line)), "no test passed")
    against = [line.split(" - ")[0] for line in said if line.startswith(("FAILED", "ERROR"))]
    if not against:
        return told, [] if told != "no test passed" else said[-TOLD:]
    accounts = "\n".join(said).split("\n____")[1:]  # pytest draws a line with the test's name above each
    return told, against + [line for account in accounts for line in _asserted(account.splitlines())]


def _asserted(account: list[str]) -> list[str]:
    told = [f"    {line}" for line in account if line.startswith(("E  ", ">  ")) or LINE.match(line)]
    return [account[0].strip("_ ") + ":", *told[-TOLD:]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

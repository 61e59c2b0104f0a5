"""Campaigns on whole commands: a soak of training and serving, a crowd of clients at the server.

    python -m tests.campaigns soak --minutes 90               memory, descriptors, threads and temporary files over time
    python -m tests.campaigns server --requests 20000         200 clients, some of which leave early or read slowly

Each prints its table last and ends with 1 where a promise did not hold. `make campaigns` keeps the tables in results/.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import http.client
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from assay.verbs.demo import stages

REINFORCE = ("--reward", "answer:1", "--prompts", "8", "--num-generations", "4", "--max-completion-length", "8", "--held-out", "0.2",
             "--device", "cpu")


def endless_commands(folder: Path) -> dict[str, list[str]]:
    """An sft and a grpo of more steps than there is time for."""
    base = stages.build_and_save(folder / "base")
    learned, sums = stages.write_lessons(folder)
    fit, taught = ("--data", str(learned), *stages.SHORT), folder / "taught"
    teach = ("--max-steps", "120", "--save-steps", "30", "--learning-rate", "5e-3", "--out", str(taught))
    subprocess.run([sys.executable, "-m", "assay", "sft", "--model", str(base), *fit, *teach], check=True, stdout=subprocess.DEVNULL)
    endless = ("--max-steps", "100000", "--save-steps", "500", "--num-train-epochs", "100000000",
               "--learning-rate", "1e-5")  # more would spoil the model in thousands of epochs
    asked = {"sft": ("--model", str(base), *fit), "grpo": ("--model", str(taught / "model"), "--data", str(sums), *REINFORCE)}
    return {name: [sys.executable, "-m", "assay", name, *words, *endless, "--out", str(folder / name)] for name, words in asked.items()}


def temporary_files() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("assay*"))


# ---- soak

@dataclass(frozen=True)
class Reading:
    """Resources that a process and its children hold at a moment."""

    minute: float
    memory: int
    descriptors: int
    threads: int
    temporary: int


def read_process(pid: int, since: float) -> Reading | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        memory = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024
        threads = int(re.search(r"Threads:\s+(\d+)", status)[1])
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, TypeError):
        return None
    return Reading((time.monotonic() - since) / 60, memory, descriptors, threads, len(temporary_files()))


def campaign_of_soak(minutes: float) -> int:
    """One sft and one grpo of many steps, and a server under steady load, side by side; what each holds must not grow."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        commands = endless_commands(folder)
        since, end = time.monotonic(), time.monotonic() + minutes * 60
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        processes = {name: subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=one_thread)
                     for name, words in commands.items()}
        server, port = stack.enter_context(serving(folder / "taught" / "model"))
        processes["serve"] = server
        stop = threading.Event()
        load = threading.Thread(target=steady_load, args=(port, stop), daemon=True)
        load.start()
        readings: dict[str, list[Reading]] = {name: [] for name in processes}
        while time.monotonic() < end:
            time.sleep(min(15.0, minutes * 2))
            for name, process in processes.items():
                if process.poll() is None and (reading := read_process(process.pid, since)):
                    readings[name].append(reading)
        stop.set()
        for name in ("sft", "grpo"):
            processes[name].send_signal(signal.SIGTERM)
        codes = {name: processes[name].wait(120) for name in ("sft", "grpo")}
    return print_soak(readings, codes)


def print_soak(readings: dict[str, list[Reading]], codes: dict[str, int]) -> int:
    print(f"{'process':8} {'minute':>7} {'memory MiB':>11} {'descriptors':>12} {'threads':>8} {'temporary':>10}")
    grown = []
    for name, all_readings in readings.items():
        for reading in all_readings[:: max(1, len(all_readings) // 12)]:
            print(f"{name:8} {reading.minute:7.1f} {reading.memory / 2**20:11.0f} {reading.descriptors:12} {reading.threads:8} "
                  f"{reading.temporary:10}")
        settled = all_readings[len(all_readings) // 4 :]
        half = len(settled) // 2
        if half:
            early, late = max(r.memory for r in settled[:half]), max(r.memory for r in settled[half:])
            grown += [f"{name}: memory {early / 2**20:.0f} → {late / 2**20:.0f} MiB"] if late > early * 1.1 + 2**24 else []
            early, late = (max(r.descriptors for r in part) for part in (settled[:half], settled[half:]))
            grown += [f"{name}: descriptors {early} → {late}"] if late > early + 4 else []
    print("grew: " + ("; ".join(grown) or "nothing") + f"; exit codes after SIGTERM: {codes}")
    return int(bool(grown) or any(code not in (143, 0) for code in codes.values()))


# ---- server

@contextlib.contextmanager
def serving(model: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "assay", "serve", str(model), "--name", "tiny", "--port", "0", "--queue", "512", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        assert process.stdout is not None
        address = next((line for line in process.stdout if line.startswith("serving at ")), None)
        if address is None:
            raise SystemExit("the server did not start")
        try:
            yield process, int(re.search(r":(\d+)/", address)[1])
        finally:
            process.terminate()
            process.wait(60)


def ask(port: int, kind: str, number: int) -> str:
    """One request of a client of that kind; what came of it in a word."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    asked = {"model": "tiny", "prompt": f"{number % 10}+{number % 7}=", "max_tokens": 6, "seed": number, "stream": kind != "whole"}
    body = json.dumps(asked)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if kind == "leaves":
            return "left"
        response = connection.getresponse()
        if kind == "slow":
            while response.read(16):
                time.sleep(0.005)
        else:
            response.read()
        return str(response.status)
    except (ConnectionError, http.client.HTTPException, TimeoutError) as error:
        return type(error).__name__
    finally:
        connection.close()


def steady_load(port: int, stop: threading.Event) -> None:
    for number in itertools.count():
        if stop.is_set():
            return
        ask(port, ("whole", "stream", "leaves", "slow")[number % 4], number)
        time.sleep(0.05)


def campaign_of_server(requests: int, clients: int) -> int:
    with tempfile.TemporaryDirectory(prefix="campaign-") as place:
        base = stages.build_and_save(Path(place) / "base")
        with serving(base) as (process, port), concurrent.futures.ThreadPoolExecutor(clients) as pool:
            first, since = ask(port, "whole", 0), time.monotonic()
            before = read_process(process.pid, since)
            kinds = ("whole", "stream", "whole", "leaves", "stream", "slow")
            met = Counter(pool.map(lambda number: f"{kinds[number % 6]} {ask(port, kinds[number % 6], number)}", range(requests)))
            seconds = time.monotonic() - since
            time.sleep(3)
            after, alive = read_process(process.pid, since), ask(port, "whole", 1)
    assert before is not None
    assert after is not None
    print(f"{requests:,} requests of {clients} clients in {seconds:.0f} s; the first answer {first}, the last {alive}")
    for name, count in sorted(met.items()):
        print(f"    {name:28} {count:,}")
    print(f"memory {before.memory / 2**20:.0f} → {after.memory / 2**20:.0f} MiB, descriptors {before.descriptors} → {after.descriptors}, "
          f"threads {before.threads} → {after.threads}")
    broken = [name for name in met if name.split()[1] not in {"200", "429", "left"}]
    leaked = after.descriptors > before.descriptors + 8 or after.threads > before.threads + 8 or alive != "200"
    return int(bool(broken) or leaked)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=["soak", "server"])
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=200)
    chosen = parser.parse_args()
    print(f"$ python -m tests.campaigns {' '.join(sys.argv[1:])}\n{datetime.date.today()}, python {platform.python_version()}, "
          f"torch {torch.__version__}, {os.cpu_count()} cores\n")
    return campaign_of_soak(chosen.minutes) if chosen.campaign == "soak" else campaign_of_server(chosen.requests, chosen.clients)


if __name__ == "__main__":
    sys.exit(main())

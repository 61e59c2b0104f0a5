"""Campaigns on whole commands: kills at random moments, a soak of training and serving, a crowd of clients at the server.

    python -m tests.campaigns kills --kills 500 --jobs 2      every recipe, killed again and again, must end in the undisturbed result
    python -m tests.campaigns soak --minutes 90               memory, descriptors, threads and temporary files over time
    python -m tests.campaigns server --requests 20000         200 clients, some of which leave early or read slowly

Each prints its table last and ends with 1 where a promise did not hold. `make campaigns` keeps the tables in results/.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import hashlib
import http.client
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from assay.verbs.demo import stages

REINFORCE = ("--reward", "answer:1", "--prompts", "8", "--num-train-epochs", "20", "--num-generations", "4", "--max-completion-length", "8",
             "--max-steps", "12", "--save-steps", "4", "--held-out", "0.2", "--learning-rate", "1e-4", "--device", "cpu")
LIMIT = 300.0  # seconds that one command may take, undisturbed


@dataclass(frozen=True)
class Job:
    """A command with the files that say what it came to."""

    name: str
    words: tuple[str, ...]
    results: tuple[str, ...]  # patterns below its --out

    def command(self, out: Path) -> list[str]:
        return [sys.executable, "-m", "assay", *self.words, "--out", str(out)]

    def result(self, out: Path) -> str:
        """A digest of everything that a user takes away; times of the clock are left out."""
        digest = hashlib.sha256()
        for path in sorted(itertools.chain.from_iterable(out.glob(pattern) for pattern in self.results)):
            digest.update(path.relative_to(out).as_posix().encode() + b"\0" + without_times(path))
        return digest.hexdigest()


def without_times(path: Path) -> bytes:
    data = path.read_bytes()
    return re.sub(rb'"(seconds|time|at|started|tokens_per_second)": [^,}\n]+', b"", data) if path.suffix in {".json", ".jsonl"} else data


def made_jobs(folder: Path) -> list[Job]:
    """Every recipe, as small as it can be and still save, evaluate and prove on the way."""
    from assay.testing.tiny_training import make_corpus, tiny_documents

    base = stages.build_and_save(folder / "base")
    learned, sums = stages.write_lessons(folder)
    documents = tiny_documents(300)
    make_corpus(folder / "text", documents)
    (folder / "plain.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    fit = ("--data", str(learned), *stages.SHORT, "--save-steps", "30")
    model, weights = ("model/*.safetensors",), ("model/*.safetensors", "adapter/*.safetensors")
    taught = folder / "taught"
    teach = ["sft", "--model", str(base), *fit, "--max-steps", "120", "--learning-rate", "5e-3", "--out", str(taught)]
    subprocess.run([sys.executable, "-m", "assay", *teach], check=True, stdout=subprocess.DEVNULL)
    return [
        Job("sft", ("sft", "--model", str(base), *fit, "--max-steps", "60", "--learning-rate", "5e-3"), model),
        Job("sft, LoRA", ("sft", "--model", str(base), *fit, "--max-steps", "60", "--lora-r", "4"), weights),
        Job("distill", ("distill", "--model", str(base), "--teacher", str(taught / "model"), *fit, "--max-steps", "60"), model),
        Job("pretrain", ("pretrain", *stages.PRETRAIN, "--num-train-epochs", "3", "--corpus", str(folder / "text" / "corpus")), model),
        Job("grpo", ("grpo", "--model", str(taught / "model"), "--data", str(sums), *REINFORCE), model),
        Job("corpus", ("corpus", str(folder / "plain.jsonl"), "--tokenizer", str(base)), ("**/*.bin", "**/*.safetensors")),
    ]


@dataclass
class Killed:
    """What became of one job: how often it was killed, and how its last, undisturbed run differed."""

    name: str
    kills: int = 0
    finished: int = 0
    moments: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def run_until(command: Sequence[str], seconds: float, log: Path) -> int | None:
    """The exit code; None where the command and all its children were killed after that many seconds."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(log, "ab") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None


def kill_and_finish(job: Job, folder: Path, chance: random.Random, alone: tuple[float, str], most: int) -> Killed:
    """Up to `most` kills at random moments of one run, then the rest of it: the result must be the undisturbed one."""
    out, log, outcome = folder / "out", folder / "log", Killed(job.name)
    folder.mkdir(parents=True)
    code: int | None = None
    while code is None and outcome.kills < most:
        after = chance.uniform(0.3, alone[0])
        if (code := run_until(job.command(out), after, log)) is None:
            outcome.kills += 1
            outcome.moments.append(after)
    code = run_until(job.command(out), LIMIT, log) if code is None else code
    if code != 0:
        outcome.broken.append(f"exit {code} after kills at {[round(moment, 1) for moment in outcome.moments]}: {log.read_text()[-300:]!r}")
    elif job.result(out) != alone[1]:
        outcome.broken.append(f"another result after kills at {[round(moment, 1) for moment in outcome.moments]}")
    outcome.finished += 1
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def undisturbed(job: Job, folder: Path) -> tuple[float, str]:
    start = time.monotonic()
    folder.mkdir(parents=True)
    code = run_until(job.command(folder / "out"), LIMIT, folder / "log")
    if code != 0:
        raise SystemExit(f"{job.name} alone ended with {code}: {(folder / 'log').read_text()[-2000:]}")
    return time.monotonic() - start, job.result(folder / "out")


def campaign_of_kills(kills: int, jobs: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="campaign-") as place, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        folder = Path(place)
        todo = made_jobs(folder)
        results = pool.map(lambda job: undisturbed(job, folder / f"alone-{job.name}"), todo)
        alone = dict(zip([job.name for job in todo], results, strict=True))
        tallies = {job.name: Killed(job.name) for job in todo}
        order = itertools.cycle(todo)
        number = itertools.count()
        while sum(tally.kills for tally in tallies.values()) < kills:
            batch = [(next(order), next(number)) for _ in range(jobs * 2)]
            for one in pool.map(lambda item: kill_and_finish(item[0], folder / f"killed-{item[1]}", random.Random(f"{seed} {item[1]}"),
                                                             alone[item[0].name], 3), batch):
                tally = tallies[one.name]
                tally.kills += one.kills
                tally.finished += one.finished
                tally.broken += one.broken
            print(f"{sum(tally.kills for tally in tallies.values()):,} kills", file=sys.stderr, flush=True)
        left = temporary_files()
    print(f"{'recipe':12} {'kills':>6} {'finished':>9} {'equal to the undisturbed run':>29}")
    for tally in tallies.values():
        print(f"{tally.name:12} {tally.kills:6} {tally.finished:9} {tally.finished - len(tally.broken):29}")
        for sentence in tally.broken[:3]:
            print(f"    {sentence}")
    print(f"files and folders of Assay left in the system's temporary folder: {len(left)}")
    return int(any(tally.broken for tally in tallies.values()))


def temporary_files() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("assay*"))


# ---- soak

@dataclass(frozen=True)
class Reading:
    """What a process and its children hold at a moment."""

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
        jobs = {job.name: job for job in made_jobs(folder)}
        since, end = time.monotonic(), time.monotonic() + minutes * 60
        processes = {name: start_endless(jobs[name], folder / name.replace(", ", "-"), minutes) for name in ("sft", "grpo")}
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


def start_endless(job: Job, out: Path, minutes: float) -> subprocess.Popen[bytes]:
    """The same recipe with more steps than it has time for."""
    words = list(job.command(out))
    words[words.index("--max-steps") + 1] = "100000"
    words[words.index("--save-steps") + 1] = "500"
    words[words.index("--learning-rate") + 1] = "1e-5"  # more would spoil the model in thousands of epochs
    words += ["--num-train-epochs", "100000000"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})


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
    parser.add_argument("campaign", choices=["kills", "soak", "server"])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=200)
    chosen = parser.parse_args()
    print(f"$ python -m tests.campaigns {' '.join(sys.argv[1:])}\n{datetime.date.today()}, python {platform.python_version()}, "
          f"torch {torch.__version__}, {os.cpu_count()} cores\n")
    if chosen.campaign == "kills":
        return campaign_of_kills(chosen.kills, chosen.jobs, chosen.seed)
    return campaign_of_soak(chosen.minutes) if chosen.campaign == "soak" else campaign_of_server(chosen.requests, chosen.clients)


if __name__ == "__main__":
    sys.exit(main())

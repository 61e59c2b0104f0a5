"""Forked runs: an Assay command in a fork of a process that has torch imported, from any copy of the package, within a time limit.

Importing torch and transformers takes longer than a tiny run. So the campaign's process imports them once (`preload`), never imports
Assay itself, and forks for every command; the fork imports Assay from the copy it is given. The fresh process of a proof is forked in
the same way, by a keeper that has not imported Assay either. Every other child is a real process, which finds the same copy by PYTHONPATH.
"""

import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.mutants import line_coverage

TIMED_OUT = 124
PROOF = ("-m", "assay.guard.proof")
SUBREAPER, DEATH_SIGNAL = 36, 1  # of prctl: orphans become children of this process; it gets this signal when its parent is gone
ALWAYS = ("torch", "numpy", "tokenizers", "safetensors.torch", "scipy.stats", "transformers", "peft", "jinja2", "yaml", "rich",
          "jsonschema")


@dataclass(frozen=True)
class ForkedRun:
    """`words` as on the command line, in `folder`, with Assay from `code`; `coverage` is where the lines that were reached are written."""

    words: tuple[str, ...]
    folder: Path
    code: Path
    seconds: float
    coverage: Path | None = None
    module: str = "assay"
    modules: Path | None = None  # where the names of the modules that were imported are written


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    seconds: float


def preload(names: Iterable[str] = ALWAYS) -> None:
    """What is not installed here is missing in every run alike."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in names:
        if name.partition(".")[0] not in ("assay", "tests", "__main__", "sitecustomize"):
            with contextlib.suppress(Exception):  # a module that cannot be imported alone is imported by whoever needs it
                importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def start(run: ForkedRun) -> int:
    """The process id of the keeper, which ends when everything that the run started has."""
    assert not any(name.partition(".")[0] == "assay" for name in sys.modules), "Assay is imported already: a fork would not see its copy"
    sys.stdout.flush()
    keeper = os.fork()
    if keeper:
        return keeper
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, _leave)
        libc = ctypes.CDLL(None)
        libc.prctl(SUBREAPER, 1, 0, 0, 0)
        libc.prctl(DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)
        _keep(run)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave()


def _leave(*_: object) -> NoReturn:
    """With all that was started. Nothing is raised: what this process would unwind is the campaign's own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _end_descendants()
    finally:
        os._exit(0)


def ended(run: ForkedRun) -> Ended:
    """What the keeper wrote down; one that died itself is a crash."""
    try:
        code, seconds = json.loads((run.folder / ".ended").read_text())
    except (OSError, ValueError):
        code, seconds = 1, 0.0
    texts = [file.read_text(errors="replace") if (file := run.folder / name).exists() else "" for name in (".stdout", ".stderr")]
    return Ended(code, texts[0], texts[1], seconds)


def wait(run: ForkedRun) -> Ended:
    os.waitpid(start(run), 0)
    return ended(run)


def _keep(run: ForkedRun) -> None:
    """Start the command, fork the proofs it asks for, and end everything at the time limit."""
    began = time.monotonic()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    main = _fork_command(run, run.module, run.words, there, (run.folder / ".stdout", run.folder / ".stderr"))
    there.close()
    proofs: dict[int, dict[str, Any]] = {}
    code: int | None = None
    while code is None:
        if select.select([here], [], [], 0.005)[0] and (asked := here.recv(1 << 20)):
            request = json.loads(asked)
            proofs[_fork_command(run, request["module"], request["words"], None, request["files"], request["environment"],
                                 Path(request["folder"]))] = request
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in proofs:
                Path(proofs.pop(pid)["ended"]).write_text(str(os.waitstatus_to_exitcode(status)))
            elif pid == main:
                code = os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > run.seconds:
            code = TIMED_OUT
    (run.folder / ".ended").write_text(json.dumps([code, time.monotonic() - began]))


def _end_descendants() -> None:
    """All at once and until none is left: this process is their reaper, so that none escapes by losing its parent."""
    while found := _descendants(os.getpid()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def _descendants(root: int) -> set[int]:
    parents: dict[int, int] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def _fork_command(run: ForkedRun, module: str, words: Sequence[str], keeper: socket.socket | None, files: Sequence[Path | str],
                  environment: dict[str, str] | None = None, folder: Path | None = None) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        _prepare(run, files, environment)
        if folder is not None:
            os.chdir(folder)
        if keeper is not None:
            _ask_keeper_for_proofs(keeper)
        code = _command_code(module, words)
        if run.modules is not None:
            (run.modules / f"{os.getpid()}.txt").write_text("\n".join(sys.modules))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _prepare(run: ForkedRun, files: Sequence[Path | str], environment: dict[str, str] | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for fd, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    os.dup2(os.pipe()[0], 0)  # nothing is ever written to it, and it stays open: a proof whose input ends takes its parent for dead
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.chdir(run.folder)
    own = {"PYTHONPATH": str(run.code), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
           "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(run.folder / ".tmp"), "COLUMNS": "200"}
    (run.folder / ".tmp").mkdir(exist_ok=True)
    import tempfile
    tempfile.tempdir = None
    os.environ.update(own | (environment or {}))
    sys.dont_write_bytecode = True
    root = Path(__file__).resolve().parents[2]
    sys.path[:] = [str(run.code), *(place for place in sys.path if place and Path(place).resolve() != root)]
    importlib.invalidate_caches()
    if run.coverage is not None:
        os.environ[line_coverage.FOLDER] = str(run.coverage)
        line_coverage.begin()


def _command_code(module: str, words: Sequence[str]) -> int:
    """The exit code, as the interpreter would end with it."""
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as done:
        if isinstance(done.code, str):
            print(done.code, file=sys.stderr)
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _ask_keeper_for_proofs(keeper: socket.socket) -> None:
    """`subprocess.run` of a proof becomes a fork by the keeper: the same module in a process that has not imported Assay before."""
    real = subprocess.run

    def run(command: Any, *others: Any, **options: Any) -> Any:
        if not isinstance(command, list) or tuple(command[1:3]) != PROOF:
            return real(command, *others, **options)
        place = Path(os.environ["TMPDIR"]) / f"proof-{time.monotonic_ns()}"
        place.mkdir()
        files = [str(place / "out"), str(place / "err")]
        environment = {name: value for name, value in options["env"].items() if os.environ.get(name) != value}
        keeper.send(json.dumps({"module": PROOF[1], "words": command[3:], "files": files, "ended": str(place / "ended"),
                                "environment": environment, "folder": os.getcwd()}).encode())
        until = time.monotonic() + options.get("timeout", 1e9)
        while not (place / "ended").exists() or not (place / "ended").read_text():
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(command, options["timeout"])
            time.sleep(0.01)
        out, err = (Path(file).read_text(errors="replace") for file in files)
        return subprocess.CompletedProcess(command, int((place / "ended").read_text()), out, err)

    subprocess.run = run  # type: ignore[assignment]

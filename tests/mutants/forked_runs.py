"""Forked runs: an Assay command in a fork of a process that has torch imported, from any copy of the package, within a time limit.

Importing torch and transformers takes several times longer than a tiny run. So the campaign's process imports them once (`preload`), never
imports Assay itself, and forks a job for every mutant, which forks every command; the command imports Assay from the copy it is given.
Python processes that the command starts (proofs, reward workers, chat templates) are forked by the job in the same way: it has not imported
Assay either, so that they know as little of the run as a new process would. Whatever else it starts is a real process.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.mutants import line_coverage

TIMED_OUT = 124
LOOK = 0.01  # seconds between two looks for processes that have ended
SUBREAPER, DEATH_SIGNAL = 36, 1  # of prctl: orphans become children of this process; it gets this signal when its parent is gone
ALWAYS = ("torch", "numpy", "tokenizers", "safetensors.torch", "scipy.stats", "transformers", "transformers.models.auto.modeling_auto",
          "transformers.models.llama.modeling_llama", "peft", "jinja2.sandbox", "yaml", "rich", "jsonschema",
          "torch.distributed.fsdp", "uvicorn", "starlette.applications", "starlette.requests")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
ENVIRONMENT = ONE_THREAD | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200",
                            "PYTHONDONTWRITEBYTECODE": "1"}


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
    """Import what runs need; what is not installed here is missing in every run alike."""
    os.environ |= ENVIRONMENT
    for name in names:
        if name.partition(".")[0] not in ("assay", "tests", "__main__", "sitecustomize"):
            with contextlib.suppress(Exception):  # a module that cannot be imported alone is imported by whoever needs it
                importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every page of what stands here


# ---------------------------------------------------------------- jobs: a process for each mutant

def start_job(work: Callable[[], Any], answer: Path) -> int:
    """The id of a process that does `work`, leaves what it returns in `answer`, and ends with all that it has started."""
    assert not any(name.partition(".")[0] == "assay" for name in sys.modules), "Assay is imported already: a fork would not see its copy"
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    job = os.fork()
    if job:
        return job
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, _leave)
        libc = ctypes.CDLL(None)
        libc.prctl(SUBREAPER, 1, 0, 0, 0)
        libc.prctl(DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)
        answer.write_bytes(pickle.dumps(work()))
    except BaseException:
        traceback.print_exc()
    finally:
        _leave()


def job_answer(answer: Path) -> Any:
    """None of a job that died."""
    try:
        return pickle.loads(answer.read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        return None


def wait(run: ForkedRun) -> Ended:
    """The run in a job of its own."""
    answer = run.folder / ".answer"
    os.waitpid(start_job(lambda: run_command(run), answer), 0)
    return job_answer(answer) or Ended(1, "", "the job died", 0.0)


def _leave(*_: object) -> NoReturn:
    """End this process with all that was started. Nothing is raised: what this process would unwind is the campaign's own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _end_descendants()
    finally:
        os._exit(0)


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


# ---------------------------------------------------------------- a command, and the processes that it asks for

def run_command(run: ForkedRun) -> Ended:
    """Run a command as a job: start it, fork what it asks for, and end everything when it ends or at the time limit."""
    began = time.monotonic()
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outputs = [os.open(run.folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for name in (".stdout", ".stderr")]
    nothing, _ = os.pipe()  # it stays open: a process whose input ends takes its parent for dead
    main = _fork(run, ["-m", run.module, *run.words], (nothing, *outputs), there)
    asked: dict[int, socket.socket] = {}
    code: int | None = None
    while code is None:
        if select.select([here], [], [], LOOK)[0]:
            words, reply, files, options = _request(here)
            asked[_fork(run, words, files, there, options, reply)] = reply
            for fd in files:
                os.close(fd)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == main:
            code = os.waitstatus_to_exitcode(status)
        elif pid in asked:
            _tell(asked.pop(pid), status)
        if code is None and time.monotonic() - began > run.seconds:
            code = TIMED_OUT
    here.close()
    there.close()
    _end_descendants()
    texts = []
    for fd in outputs:
        texts.append(os.pread(fd, 1 << 24, 0).decode(errors="replace"))
        os.close(fd)
    os.close(nothing)
    return Ended(code, texts[0], texts[1], time.monotonic() - began)


def _request(here: socket.socket) -> tuple[list[str], socket.socket, list[int], dict[str, Any]]:
    data, fds, _, _ = socket.recv_fds(here, 1 << 18, 4)
    asked = json.loads(data)
    return asked.pop("words"), socket.socket(fileno=fds[3]), fds[:3], asked


def _tell(reply: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who asked may be gone
        reply.send(str(number).encode())


def _fork(run: ForkedRun, words: Sequence[str], files: Sequence[int], job: socket.socket, options: Mapping[str, Any] | None = None,
          reply: socket.socket | None = None) -> int:
    """`words` as Python's command line: `-m MODULE …` or `-P SCRIPT …`. `reply` is told the process's id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        _prepare(run, files, options or {})
        if reply is not None:
            _tell(reply, os.getpid())
        Forked.job, subprocess.Popen = job, Forked  # type: ignore[misc]
        code = _command_code(words)
        if run.modules is not None:
            (run.modules / f"{os.getpid()}.txt").write_text("\n".join(sys.modules))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _prepare(run: ForkedRun, files: Sequence[int], options: Mapping[str, Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if options.get("session"):
        os.setsid()
    for fd, file in enumerate(files):
        os.dup2(file, fd)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww"))
    os.chdir(options.get("folder", run.folder))
    (run.folder / ".tmp").mkdir(exist_ok=True)
    tempfile.tempdir = None
    own = ENVIRONMENT | {"PYTHONPATH": str(run.code), "TMPDIR": str(run.folder / ".tmp"),
                         "ASSAY_CACHE": str(run.folder / ".cache")}  # what another run remembered would hide a mistake, and keep it
    if "environment" in options:
        os.environ.clear()
        own = options["environment"]
    os.environ.update(own)
    sys.dont_write_bytecode = True
    root = Path(__file__).resolve().parents[2]
    sys.path[:] = [str(run.code), *(place for place in sys.path if place and Path(place).resolve() != root)]
    importlib.invalidate_caches()
    if run.coverage is not None:
        os.environ[line_coverage.FOLDER] = str(run.coverage)
        line_coverage.begin()


def _command_code(words: Sequence[str]) -> int:
    """The exit code, as the interpreter would end with it."""
    sys.argv = list(words[1:])
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            _allow_what_is_mapped()
            runpy.run_path(words[1], run_name="__main__")
    except SystemExit as done:
        if isinstance(done.code, str):
            print(done.code, file=sys.stderr)
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _allow_what_is_mapped() -> None:
    """A script that bounds its own memory does not know that torch is mapped here: that bound is left out."""
    real = resource.setrlimit
    resource.setrlimit = lambda which, limits: None if which == resource.RLIMIT_AS else real(which, limits)


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A Python process that the job forks instead: the same module or script in a process that has not imported Assay before."""

    job: socket.socket | None = None

    def _execute_child(self, args: Any, *others: Any) -> None:  # type: ignore[override]
        words = list(map(os.fspath, args)) if isinstance(args, list | tuple) else []
        self._reply: socket.socket | None = None
        if self.job is None or len(words) < 3 or words[0] != sys.executable or words[1] not in ("-m", "-P"):
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        folder, environment, pipes, session = others[4], others[5], others[9:15], others[20]
        standard = [pipes[0], pipes[3], pipes[5]]
        self._reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = [own if given == -1 else given for own, given in enumerate(standard)]
        request = {"words": words[1:], "folder": str(folder or os.getcwd()), "session": session,
                   "environment": dict(os.environ if environment is None else environment)}
        socket.send_fds(self.job, [json.dumps(request).encode()], [*files, theirs.fileno()])
        theirs.close()
        self._child_created = True
        self.pid = int(self._reply.recv(64))
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._reply is None:
            return super()._try_wait(flags)  # type: ignore[misc,no-any-return]
        try:
            said = self._reply.recv(64, socket.MSG_DONTWAIT if flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        return self.pid, int(said or signal.SIGKILL)

    def _internal_poll(self, _deadstate: Any = None, *others: Any) -> int | None:
        if getattr(self, "_reply", None) is None:
            return super()._internal_poll(_deadstate, *others)  # type: ignore[misc,no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
                self._handle_exitstatus(ended[1])  # type: ignore[attr-defined]
        return self.returncode

"""Sandbox for generated code: bubblewrap, nothing to see or reach, and no say in whether the program passed.

    run_python("print(input())", stdin="hi")                       → ProgramOutcome("ran", stdout="hi\\n")
    judge_program("def double(x): return 2 * x", "assert double(2) == 4", names=["double"])   → ProgramOutcome("passed")

`judge_program` uses two sandboxes that share two pipes: the program is in one, its tests in the other (sandbox_process.py). The
program never sees the tests, cannot reach their process, and what it returns arrives there as plain data; so exiting with 0,
printing "passed", an object that equals everything or a patched `assert` change nothing.

A sandbox has: no network, no /proc, no home, no environment; the standard library of our interpreter and the system's
shared libraries, read-only; a small private /tmp; limits on CPU, memory, processes, files; a seccomp filter where the
machine's is known. There is no way to run a program without it.
"""

import contextlib
import functools
import json
import os
import platform
import secrets
import selectors
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from assay.errors import AssayError, DataError, UsageError
from assay.reward.bubblewrap import bwrap_arguments, filter_program

Status = Literal["ran", "passed", "failed", "timeout", "killed", "flooded"]
STARTUP_SECONDS = 60.0
UNUSED_UIDS = 1 << 30  # as root, every sandbox gets a user of its own above this, so that its processes are counted alone


@dataclass(frozen=True)
class Limits:
    """Resource limits of one sandbox. `seconds` are of CPU time; on a busy machine a right program gets `wall_seconds` to use them."""

    seconds: int = 5
    wall_seconds: float = 15.0
    memory_bytes: int = 512 << 20  # of each process
    processes: int = 8  # threads count too
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    open_files: int = 64
    output_bytes: int = 1 << 20  # of stdout and stderr together

    def for_the_kernel(self) -> dict[str, int]:
        return {"RLIMIT_CPU": self.seconds, "RLIMIT_AS": self.memory_bytes, "RLIMIT_NPROC": self.processes, "RLIMIT_FSIZE": self.file_bytes,
                "RLIMIT_NOFILE": self.open_files, "RLIMIT_CORE": 0, "RLIMIT_MEMLOCK": 0, "RLIMIT_MSGQUEUE": 0}


@dataclass(frozen=True)
class ProgramOutcome:
    """"ran" says only that a program ended by itself with status 0; "passed" is said by `judge` alone."""

    status: Status
    reason: str = ""  # why not, in words
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.status == "passed"


DEFAULT_LIMITS = Limits()


def run_python(program: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> ProgramOutcome:
    """The program as __main__; `stdin` is all it can read. Judge it by its stdout, never by its word."""
    require_sandbox()
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        box = Sandbox(stack, "run", {"program": program}, limits, stdin=stdin)
        ended = watched([box], limits)
    status: Status = ended or ("ran" if box.status == 0 else "failed" if box.status < 128 else "killed")
    return box.outcome(status, _how_it_ended(status, box), start)


def judge_program(program: str, tests: str, *, names: Sequence[str], setup: str = "", limits: Limits = DEFAULT_LIMITS) -> ProgramOutcome:
    """"passed" if and only if `tests` ran to their last line and called something of the program on the way.

    `names` is what the tests take from the program; `setup` is run before them, on their side. Both are trusted, the program
    is not. A test that never calls the program is a DataError: it would pass anything.
    """
    require_sandbox()
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        (asked, asking), (answered, answering) = _pipe(stack), _pipe(stack)
        program_box = Sandbox(stack, "host", {"program": program}, limits, questions=asked.fileno(), answers=answering.fileno())
        examiner = Sandbox(stack, "examine", {"tests": tests, "setup": setup, "names": list(names)}, limits,
                           questions=asking.fileno(), answers=answered.fileno())
        for end in (asked, asking, answered, answering):  # now theirs alone: the end of one is seen by the other
            end.close()
        ended = watched([examiner, program_box], limits)
    verdict = json.loads(examiner.said) if examiner.said else None
    if ended or verdict is None:
        status: Status = ended or "killed"
        return program_box.outcome(status, _how_it_ended(status, program_box if ended else examiner), start)
    if "unjudged" in verdict:
        raise DataError(f"these tests cannot judge a program from outside: {verdict['unjudged']}")
    if not verdict["passed"]:
        reason = _how_it_ended("failed", program_box) if verdict["gone"] else verdict["reason"].strip()
        return program_box.outcome("failed", reason, start)
    if not verdict["calls"]:
        raise DataError(f"the tests never called the program ({', '.join(names) or 'no names were given'}), so any program would pass them")
    return program_box.outcome("passed", "", start)


# ---------------------------------------------------------------- is there a sandbox here?


def require_sandbox() -> None:
    if (reason := sandbox_unavailable()) is not None:
        raise UsageError(f"generated code runs only in a sandbox, and there is none here: {reason}")


@functools.cache
def sandbox_unavailable() -> str | None:
    """Why no sandbox can be had on this machine, or None. Found out by starting one."""
    if platform.system() != "Linux":
        return f"bubblewrap needs Linux, this is {platform.system()}"
    if shutil.which("bwrap") is None:
        return "bwrap is missing; install it (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"
    try:
        with contextlib.ExitStack() as stack:
            watched([box := Sandbox(stack, "run", {"program": "pass"}, DEFAULT_LIMITS)], DEFAULT_LIMITS)
    except SandboxFailed as error:
        return f"{error}; user namespaces may be switched off here (sysctl kernel.unprivileged_userns_clone, user.max_user_namespaces)"
    return None if box.status == 0 else f"a program that does nothing ended with status {box.status}: {box.printed(2)}"


class SandboxFailed(AssayError):
    """The sandbox itself did not start. Nothing is known about the program, so nothing is said about it."""


# ---------------------------------------------------------------- one sandbox


class Sandbox:
    """A sandbox that was started: its process, and what came out of it so far."""

    def __init__(self, stack: contextlib.ExitStack, part: str, source: dict[str, Any], limits: Limits, *, stdin: str = "", **links: int):
        self.pieces: dict[int, list[bytes]] = {1: [], 2: []}
        self.said, self.ready, self.status = b"", False, 0
        self.outputs = {1: _pipe(stack), 2: _pipe(stack), 3: _pipe(stack)}  # 3: what sandbox_process.py itself says
        rules, text = filter_program(), _memory(stack, json.dumps(source).encode())
        uid = UNUSED_UIDS + secrets.randbelow(UNUSED_UIDS) if os.geteuid() == 0 else None
        control = self.outputs[3][1].fileno()
        setting = {"limits": limits.for_the_kernel(), "uid": uid, "source": text, "control": control, **links}
        filter = [] if rules is None else [_memory(stack, rules)]
        walls = [*bwrap_arguments(limits.disk_bytes, as_root=uid is not None), *(part for fd in filter for part in ("--seccomp", str(fd)))]
        command = ["bwrap", *walls, "/python/bin/python", "-I", "-S", "-B", "-c", _inside(), part, json.dumps(setting)]
        self.process = subprocess.Popen(
            command, executable=shutil.which("bwrap"), env={}, cwd="/", start_new_session=True, stdin=_memory(stack, stdin.encode()),
            stdout=self.outputs[1][1], stderr=self.outputs[2][1], pass_fds=[text, control, *filter, *links.values()])
        stack.callback(self.end)
        for _, theirs in self.outputs.values():
            theirs.close()

    def take(self, channel: int, data: bytes) -> None:
        if channel != 3:
            self.pieces[channel].append(data)
            return
        self.said += data
        if not self.ready and self.said.startswith(b"ready\n"):
            self.ready, self.said = True, self.said.removeprefix(b"ready\n")

    @property
    def printed_bytes(self) -> int:
        return sum(len(piece) for pieces in self.pieces.values() for piece in pieces)

    def printed(self, channel: int) -> str:
        return b"".join(self.pieces[channel]).decode(errors="replace")

    def end(self) -> None:
        """End the sandbox: its first process is killed; the kernel then ends every other one in its PID namespace."""
        if self.process.poll() is None:
            self.process.kill()
        self.status = self.process.wait()

    def outcome(self, status: Status, reason: str, start: float) -> ProgramOutcome:
        return ProgramOutcome(status, reason, self.printed(1), self.printed(2), round(time.monotonic() - start, 3))


def watched(boxes: list[Sandbox], limits: Limits) -> Literal["timeout", "flooded"] | None:
    """Read what the boxes write until the first of them ends, then end them all. None: it ended by itself, in time."""
    first = boxes[0]
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for box in boxes:
            for channel, (ours, _) in box.outputs.items():
                selector.register(ours, selectors.EVENT_READ, (box, channel))
        over = os.pidfd_open(first.process.pid)
        stack.callback(os.close, over)
        selector.register(over, selectors.EVENT_READ, None)
        ended = _until(selector, boxes, limits)
        for box in boxes:
            box.end()
        if ended is None:
            _rest(selector, boxes, limits)
    for box in boxes:
        if not box.ready:
            raise SandboxFailed(f"bwrap ended with status {box.status} before the program began: {box.printed(2).strip()[-500:]}")
    return ended


def _until(selector: selectors.BaseSelector, boxes: list[Sandbox], limits: Limits) -> Literal["timeout", "flooded"] | None:
    """The clock of a program starts when its sandbox stands: how long that takes is no fault of its own."""
    deadline, waiting = time.monotonic() + STARTUP_SECONDS, True
    while (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            if key.data is None:
                return None
            box, channel = key.data
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fd)
            box.take(channel, data)
            if box.printed_bytes > limits.output_bytes:
                return "flooded"
        if waiting and all(box.ready for box in boxes):
            deadline, waiting = time.monotonic() + limits.wall_seconds, False
    return "timeout"


def _rest(selector: selectors.BaseSelector, boxes: list[Sandbox], limits: Limits) -> None:
    """Read what was written before the end. All writers are dead or dying, so every pipe comes to its end; a pipe holds little."""
    for key in list(selector.get_map().values()):
        if key.data is not None:
            box, channel = key.data
            while (data := os.read(key.fd, 1 << 16)) and box.printed_bytes <= limits.output_bytes:
                box.take(channel, data)


def _how_it_ended(status: Status, box: Sandbox) -> str:
    if status == "timeout":
        return "it did not end in time"
    if status == "flooded":
        return "it printed more than it may"
    if status == "ran":
        return ""
    last = box.printed(2).strip().splitlines()
    return last[-1][:1000] if status == "failed" and last else f"its process ended with status {box.status}"


# ---------------------------------------------------------------- files for its own eyes


@functools.cache
def _inside() -> str:
    return Path(__file__).with_name("sandbox_process.py").read_text()


def _pipe(stack: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    """File objects, because one can be closed twice and a bare number cannot: another thread may have it by then."""
    reading, writing = os.pipe()
    return stack.enter_context(FileIO(reading, "rb")), stack.enter_context(FileIO(writing, "wb"))


def _memory(stack: contextlib.ExitStack, content: bytes) -> int:
    """A file without a name that holds the content and stands at its beginning."""
    file = stack.enter_context(FileIO(os.memfd_create("assay"), "w+b"))
    file.write(content)
    file.seek(0)
    return file.fileno()

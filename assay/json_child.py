"""JSON child: a Python script in a process of its own that answers one JSON line to each JSON line it is sent.

Chat templates and rewards run in such processes: what they compute is a stranger's, may hang, and may end the process. The child
has a session of its own, so that Ctrl-C is for the parent to handle and its own children end with it. The functions at the end are the
child's side: a stranger's code runs in its main thread, where signals arrive, and another thread reads the requests, so that the process
also ends with its parent in the middle of an answer.
"""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO


class JsonChild:
    """Child process that speaks JSON lines. Started by `start`; after an answer that did not come, `stop` ends it and says how it had
    ended."""

    def __init__(self, script: Path, argument: str, environment: Mapping[str, str] | None = None) -> None:
        self.script, self.argument, self.environment = script, argument, environment or {}
        self.process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def start(self) -> None:
        command = [sys.executable, "-P", str(self.script), self.argument]  # -P: the folder of the script stays off the path
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        start_new_session=True, env=os.environ | dict(self.environment), bufsize=0)
        os.set_blocking(self._pipes()[0], False)

    def ask(self, request: bytes, seconds: float | None = None) -> dict[str, Any] | None:
        """The answer; None from a process that died, TimeoutError after `seconds`. Whatever else is raised, Ctrl-C for one, ends the
        process: the next request must not get this one's answer."""
        until = None if seconds is None else time.monotonic() + seconds
        try:
            self._write(request, until)
            return self._answer(until)
        except BrokenPipeError:
            return None
        except BaseException:
            self.stop()
            raise

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """First message of the process, once it is ready; None where it died or said nothing within `seconds`."""
        try:
            return self._answer(time.monotonic() + seconds)
        except TimeoutError:
            return None

    def stop(self) -> int:
        """Kill the process and whatever it has started, and return its status: one that was dead already has kept its own."""
        self.kill()
        process, self.process, self._unread = self.process, None, b""
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        return process.wait()

    def kill(self) -> None:
        """Kill the process group without waiting: where several end, all are told before the first is waited for."""
        process = self.process  # another thread may stop it meanwhile
        with contextlib.suppress(ProcessLookupError, PermissionError):  # some systems say so of a group that is dead
            if process is not None:
                os.killpg(process.pid, signal.SIGKILL)

    def _pipes(self) -> tuple[int, int]:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin.fileno(), self.process.stdout.fileno()

    def _write(self, request: bytes, until: float | None) -> None:
        """A pipe holds little: a child that does not read it must not be waited for longer than for an answer."""
        pipe, left = self._pipes()[0], memoryview(request)
        while left:
            _await(pipe, select.POLLOUT, until)
            left = left[os.write(pipe, left):]

    def _answer(self, until: float | None) -> dict[str, Any] | None:
        pipe = self._pipes()[1]
        pieces = [self._unread]
        while b"\n" not in pieces[-1]:
            _await(pipe, select.POLLIN, until)
            pieces.append(os.read(pipe, 1 << 20))
            if not pieces[-1]:
                return None
        line, self._unread = b"".join(pieces).split(b"\n", 1)
        return json.loads(line)


def _await(pipe: int, event: int, until: float | None) -> None:
    waiting = select.poll()  # select() would fail from the 1,024th open file on
    waiting.register(pipe, event)
    if not waiting.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError

# ---------------------------------------------------------------- the child's side


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Requests and answers under other numbers: what a stranger's code prints goes to stderr, what it reads is empty."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def request_lines(requests: BinaryIO) -> Iterator[bytes]:
    """Request lines, an iterator that does not end: where the requests end, the process ends, with whatever was started in it."""
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in requests:
            waiting.put(line)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return iter(waiting.get, None)


def write_answer(answers: BinaryIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
    answers.flush()

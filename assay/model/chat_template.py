"""Chat templates, rendered as transformers renders them, with bounds on size, output, memory and time.

A template is a program from a stranger. jinja2's immutable sandbox keeps it from Python's internals, but cannot stop
nested loops, a string doubled forty times or a list that holds another a billion times: those run inside C, where the
interpreter calls no hook. So templates render in a child process (chat_template_worker.py) that the kernel ends when it uses
more CPU time or memory than it was given. The child starts with the first template (about 0.1 s) and stays; a rendering
then costs a round trip through a pipe. Any thread may ask; requests take turns.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from assay.errors import ArtifactError, DataError

TEMPLATE_CHARS = 256 * 1024  # the longest in use are a tenth of this
_LIMITS = {"cpu_seconds": 1.0, "memory_bytes": 512 * 2**20, "output_chars": 16 * 2**20}


def render_template(template: str, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
           add_generation_prompt: bool = False, **variables: Any) -> str:
    """The text of a conversation. `variables` are what else the template may ask for: bos_token, date_string, …

    A conversation that the template rejects is a DataError; a template that is broken or exceeds its limits is an
    ArtifactError.
    """
    if len(template) > TEMPLATE_CHARS:
        raise ArtifactError(f"chat template: {len(template)} characters; expected at most {TEMPLATE_CHARS}")
    context = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    try:
        request = json.dumps({"template": template, "context": context | variables})
    except (TypeError, ValueError) as error:
        raise DataError(f"chat template: a conversation must be plain JSON: {error}") from None
    answer = _renderer().ask(request.encode() + b"\n")
    if "refused" in answer:
        raise ArtifactError(f"chat template refused: {answer['refused']}")
    if "failed" in answer:
        raise DataError(f"the chat template does not accept this conversation: {answer['failed']}")
    return answer["text"]


class TemplateProcess:
    """The child process: started when first asked, replaced after a template has killed it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, request: bytes) -> dict[str, Any]:
        with self.lock:
            process = self.process = self.process or self._start()
            question, answers = _pipes(process)
            try:
                question.write(request)
                question.flush()
                answer = answers.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # Ctrl-C while waiting: the next question must not get this one's answer
                self._stop()
                raise
            return json.loads(answer) if answer.endswith(b"\n") else {"refused": _why_it_died(self._stop())}

    def close(self) -> None:
        if self.process is not None:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        worker = Path(__file__).with_name("chat_template_worker.py")
        # -P: the folder of the script stays off the path. A session of its own: Ctrl-C is for the parent to handle.
        command = [sys.executable, "-P", str(worker), json.dumps(_LIMITS | {"path": sys.path})]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                start_new_session=True)

    def _stop(self) -> int:
        process, self.process = self.process, None
        assert process is not None
        for pipe in _pipes(process):
            with contextlib.suppress(BrokenPipeError):  # closing flushes
                pipe.close()
        try:
            return process.wait(timeout=0.5)  # a dead one is reaped, an idle one ends with its input
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


@functools.cache
def _renderer() -> TemplateProcess:
    os.register_at_fork(after_in_child=_renderer.cache_clear)  # a forked child must not read its parent's answers
    renderer = TemplateProcess()
    atexit.register(renderer.close)
    return renderer


def _why_it_died(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it ran for more than {_LIMITS['cpu_seconds']} s of CPU time"
    return f"its process ended with status {status}"

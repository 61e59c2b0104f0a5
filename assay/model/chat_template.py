"""Chat templates, rendered as transformers renders them, with bounds on size, output, memory and time.

A template is a program from a stranger. jinja2's immutable sandbox keeps it from Python's internals, but cannot stop
nested loops, a string doubled forty times or a list that holds another a billion times: those run inside C, where the
interpreter calls no hook. So templates render in a child process (chat_template_worker.py) that the kernel ends when it uses
more CPU time or memory than it was given. The child starts with the first template (about 0.1 s) and stays; a rendering
then costs a round trip through a pipe, or many together one. Any thread may ask; requests take turns.

Some templates write the date. `write_day` says which: a run is of the day on which it began, or its prompts would change at midnight.
"""

import atexit
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError, DataError
from assay.json_child import JsonChild

TEMPLATE_CHARS = 256 * 1024  # the longest in use are a tenth of this
Chat = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, bool]  # messages, tools, whether the answer's beginning too
_LIMITS = {"cpu_seconds": 1.0, "memory_bytes": 512 * 2**20, "output_chars": 16 * 2**20}

_day: datetime | None = None


def write_day(day: datetime | None) -> None:
    """The date that templates write from here on; None: that of the moment."""
    global _day
    _day = day


def render_template(template: str, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
           add_generation_prompt: bool = False, **variables: Any) -> str:
    """The text of a conversation. `variables` are what else the template may ask for: bos_token, date_string, …

    A conversation that the template rejects is a DataError; a template that is broken or exceeds its limits is an
    ArtifactError.
    """
    answer = _asked(template, [_context(messages, tools, add_generation_prompt) | variables])[0]
    if "refused" in answer:
        raise ArtifactError(f"chat template refused: {answer['refused']}")
    if "failed" in answer:
        raise DataError(f"the chat template does not accept this conversation: {answer['failed']}")
    return answer["text"]


def render_templates(template: str, chats: Sequence[Chat], **variables: Any) -> list[str | None]:
    """The texts of many conversations in one round trip; None where there is none, which `render_template` then says why."""
    try:
        answers = _asked(template, [_context(*chat) | variables for chat in chats])
    except (ArtifactError, DataError):
        answers = []
    texts = [answer.get("text") for answer in answers]
    return texts if len(texts) == len(chats) else [None] * len(chats)  # one of them ended the process


def _context(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None,
             add_generation_prompt: bool) -> dict[str, Any]:
    return {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}


def _asked(template: str, contexts: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """An answer to each; a single one where the process died."""
    if len(template) > TEMPLATE_CHARS:
        raise ArtifactError(f"chat template: {len(template)} characters; expected at most {TEMPLATE_CHARS}")
    try:
        request = json.dumps({"template": template, "contexts": contexts, "day": None if _day is None else _day.isoformat()})
    except (TypeError, ValueError) as error:
        raise DataError(f"chat template: a conversation must be plain JSON: {error}") from None
    return _renderer().ask(request.encode() + b"\n")


def start_renderer() -> None:
    """Start the child process before the first template: it takes up to a second to import what it needs, beside whatever else goes on."""
    _renderer().start()


class TemplateProcess:
    """The child process: started when first asked or before, replaced after a template has killed it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.child = JsonChild(Path(__file__).with_name("chat_template_worker.py"), json.dumps(_LIMITS | {"path": sys.path}))

    def start(self) -> None:
        with self.lock:
            if self.child.process is None:
                self.child.start()

    def ask(self, request: bytes) -> list[dict[str, str]]:
        with self.lock:
            self.start()
            answer = self.child.ask(request)
            return [{"refused": _why_it_died(self.child.stop())}] if answer is None else answer["answers"]


@functools.cache
def _renderer() -> TemplateProcess:
    os.register_at_fork(after_in_child=_renderer.cache_clear)  # a forked child must not read its parent's answers
    renderer = TemplateProcess()
    atexit.register(renderer.child.stop)
    return renderer


def _why_it_died(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it ran for more than {_LIMITS['cpu_seconds']} s of CPU time"
    return f"its process ended with status {status}"

"""Child runs: the output of a run in a process of its own is logged and passed on, and signals are handled meanwhile.

It loads no torch: a pipeline only starts processes.
"""

import contextlib
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

from assay.store import durable


@contextlib.contextmanager
def signals_handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Ctrl-C and a request to end go to `handler`."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def pass_on_output(stream: Iterable[str], log: Path, say: Callable[[str], None]) -> list[str]:
    """Log and pass on what a process prints until its end; its last lines come back."""
    tail: deque[str] = deque(maxlen=50)
    with durable.as_store_error(log):
        file = log.open("a")
    with file:
        for line in stream:
            with durable.as_store_error(log):
                file.write(line)
                file.flush()
            tail.append(line.rstrip("\n"))
            say(tail[-1])
    return list(tail)

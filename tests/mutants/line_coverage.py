"""Line coverage of the Assay package in this process: every line that runs is written to a file at once, as its process may be killed.

Python 3.12 and later have `sys.monitoring`, which costs next to nothing; before that a trace function does.
"""

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

FOLDER = "ASSAY_MUTANTS_COVERAGE"
TOOL = "assay mutants"


def begin() -> None:
    """Begin recording lines of this process and its threads; exec'd children begin their own from sitecustomize.py."""
    place = os.open(os.path.join(os.environ[FOLDER], f"{os.getpid()}-{threading.get_ident()}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen: set[tuple[str, int, bool]] = set()

    def hit(code: CodeType, line: int) -> None:
        within = code.co_name != "<module>" and bool(code.co_flags & 0x2)  # functions have CO_NEWLOCALS, class bodies do not
        if (key := (code.co_filename, line, within)) not in seen:
            seen.add(key)
            os.write(place, f"{code.co_filename}\t{line}\t{int(within)}\n".encode())

    if sys.version_info >= (3, 12):
        _monitor(hit)
    else:
        _trace(hit)


def is_ours(file: str) -> bool:
    return "/assay/" in file and "/code/" in file


def _monitor(hit: Any) -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    monitoring.use_tool_id(monitoring.COVERAGE_ID, TOOL)

    def line(code: CodeType, number: int) -> Any:
        if is_ours(code.co_filename):
            hit(code, number)
        return monitoring.DISABLE

    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, line)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)


def _trace(hit: Any) -> None:
    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            hit(frame.f_code, frame.f_lineno)
        return local

    def begun(frame: FrameType, _: str, __: Any) -> Any:
        return local if is_ours(frame.f_code.co_filename) else None

    threading.settrace(begun)
    sys.settrace(begun)

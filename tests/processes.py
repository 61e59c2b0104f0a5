"""Whether processes that nobody here has started come to their end."""

import os
import select
import signal

SOON = 60.0  # seconds; no test waits so long unless it fails


def ended(pid: int, within: float = SOON) -> bool:
    """Whether a process has ended, asked of the kernel: a zombie, which nobody reaps in some containers, has ended. What has not is killed,
    so that nothing stays."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        over = bool(waiting.poll(within * 1000))
        if not over:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        return over
    finally:
        os.close(process)

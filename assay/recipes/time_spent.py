"""Time spent by a run: where its wall time went, part by part, each second in one part."""

import contextlib
import time
from collections.abc import Callable, Iterator

PARTS = ("open", "compile", "preflight", "steps", "evaluation", "saving", "proving", "hand-over")


class TimeSpent:
    """A run is in one phase after another; a part takes its seconds out of the phase, or of the part, that it lies in.

    For the loop's own thread: what is written and proven beside it costs the run only what it waits for.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self._now, self._within = now, ["open"]
        self._since = now()

    def phase(self, name: str) -> None:
        self._settle()
        self._within[0] = name

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._settle()
        self._within.append(name)
        try:
            yield
        finally:
            self._settle()
            self._within.pop()

    def so_far(self) -> dict[str, float]:
        """Seconds of every part there was, in the order in which a run has them."""
        self._settle()
        named = [*PARTS, *(name for name in self.seconds if name not in PARTS)]
        return {name: round(self.seconds[name], 3) for name in named if name in self.seconds}

    def sentence(self) -> str:
        spent = self.so_far()
        return f"{sum(spent.values()):.1f} s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items())

    def _settle(self) -> None:
        now, name = self._now(), self._within[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

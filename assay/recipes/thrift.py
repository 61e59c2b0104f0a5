"""How long a loop stood still for its checkpoints, and how far apart they would have to be to cost little."""

import contextlib
import math
import time
from collections.abc import Iterator

LITTLE = 0.02  # of the loop's time
WORTH_SAYING = 60.0  # seconds of loop; shorter ones say nothing of how it would go on
FEW = 3  # checkpoints: the first and the last come anyway


class Thrift:
    """Of one sitting. What a proof takes beside the loop is not in it."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.seconds, self.times, self._began = 0.0, 0, time.monotonic()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds += time.monotonic() - began
        self.times += 1

    @property
    def loop(self) -> float:
        return time.monotonic() - self._began

    def advice(self, steps: int) -> str | None:
        """After so many steps of this sitting."""
        loop = self.loop
        if loop < WORTH_SAYING or self.times <= FEW or self.seconds <= LITTLE * loop:
            return None
        each = self.seconds / self.times
        apart = each / LITTLE
        return (f"saving held the loop up for {self.seconds:.0f} s of {loop:.0f}, {each:.2g} s a checkpoint: {self.seconds / loop:.0%}; "
                f"with one every {round_up(apart * steps / loop)} steps, or {apart:.0f} s, it would be {LITTLE:.0%}")


def round_up(steps: float) -> int:
    """To two digits: it is advice."""
    digits = 10 ** max(0, math.floor(math.log10(steps)) - 1)
    return math.ceil(steps / digits) * digits

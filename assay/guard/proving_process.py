"""Proving process: a Python process that a trainer never touched, which answers one proof after another; and those kept for the next.

Starting one costs its imports and a CUDA context, which is most of a small proof. So a run keeps its processes until it ends. What a
kept process remembers between two proofs, it says in the proof; one that died or hung is gone, and the proof is made anew elsewhere.
A rehearsal is a proof that counts for nothing, of the model that a run begins with: kernels are compiled for it and libraries loaded, and
what was opened for it stays open, before anybody waits for a proof.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from assay.json_child import JsonChild

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
CORES_A_PROOF = 4  # a proof beside a loop takes one of so many cores
MOST_PROOFS = 4  # at a time: a short run has as many checkpoints
FOR_THE_WITNESS = 2  # processes more, where there are cores for all proofs at a time
EARLY_CONTEXTS = 3  # processes that take their part of a GPU before they are asked: each has half a GiB there
WHERE_THERE_IS_ONE = "a GPU where there is one"  # the device of one that is started before anybody has asked torch for devices
LIBRARIES = "libraries"  # are imported early, which takes longer than all else
GPU_TO_ITSELF = "alone"  # no run waits for the GPU: it is got ready beside the imports, not after them
_MOMENT, _LOOK_AGAIN = 10.0, 0.2  # seconds
SOON = 2.0  # seconds that a first proof on a GPU takes longer than those after it
_TOLD = 2000  # characters of what it wrote before it died


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def proof_threads(beside: bool) -> int:
    """Threads of a proof, within what the environment allows. Threads that wait for a busy core are many times slower than one."""
    share, allowed = usable_cores() // (2 * CORES_A_PROOF if beside else 2), os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, min(share, int(allowed) if allowed.isdecimal() else share))


def processes_early() -> int:
    """Number of processes that may get ready while a run opens its model: with few cores, none, since that would take as long later; with
    many, as many as there are proofs and replays at a time."""
    at_once = usable_cores() // CORES_A_PROOF
    return MOST_PROOFS + FOR_THE_WITNESS if at_once >= MOST_PROOFS else max(0, at_once - 1)


class ProvingProcess(JsonChild):
    """`python -m assay.guard.proving_entry`, with a session of its own: a Ctrl-C that ends the run must not look like a proof that failed.

    With a `device` it gets ready for proofs there before the first is asked for; other `libraries` are imported then too, where asked.
    `alone`: no run has that device to share with it.
    """

    def __init__(self, threads: int, device: str | None = None, *, libraries: bool = True, alone: bool = False) -> None:
        self.threads, self.device, self.libraries, self.alone, self.asked = threads, device, libraries, alone, 0
        self.rehearsed = False
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self.start()

    def start(self) -> None:
        environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(self.threads)}
        self._unread = b""
        wanted = [LIBRARIES] * self.libraries + [GPU_TO_ITSELF] * self.alone
        early = [] if self.device is None else [self.device, *wanted]
        self.process = subprocess.Popen([sys.executable, "-m", "assay.guard.proving_entry", *early], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True, env=environment, bufsize=0)
        os.set_blocking(self._pipes()[0], False)

    def answer(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """Answer to a request; None where the process died on the way; TimeoutError where nothing came in time, and then it is ended. Paths
        mean what they mean here: whoever asks may be in another folder than when the process was started."""
        self.asked += 1
        return self.ask(json.dumps({**request, "folder": os.getcwd()}).encode() + b"\n", seconds)

    @property
    def alive(self) -> bool:
        process = self.process  # another thread may stop it meanwhile
        return process is not None and process.poll() is None

    def ended(self) -> int:
        """The status of one that died; what closed its output may take a moment to end."""
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_MOMENT)
        return self.stop()

    def last_words(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace").strip()[-_TOLD:]


class KeptProcesses:
    """Processes that wait for the next proof of this program, from any thread, while somebody keeps them."""

    def __init__(self) -> None:
        self._idle: list[ProvingProcess] = []
        self._rehearsing: list[ProvingProcess] = []
        self._taken: list[ProvingProcess] = []
        self._early = 0  # processes that were started before they were needed
        self._keepers = 0
        self._changing = threading.Condition()
        self.ends_with_program = False  # nobody waits for those that are killed: a context of a GPU takes half a second to go

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        with self._changing:
            self._keepers += 1
        try:
            yield
        finally:
            with self._changing:
                self._keepers -= 1
                self._early = self._early if self._keepers else 0
                ended, self._idle = ([], self._idle) if self._keepers else (self._idle, [])
                for process in [] if self._keepers else self._rehearsing:
                    process.kill()  # whoever waits for it gets no answer, and stops it
            for process in ended:
                process.kill()
            for process in [] if self.ends_with_program else ended:
                process.stop()

    @property
    def several(self) -> bool:
        """Whether two requests are answered side by side by processes that are kept anyway."""
        return self._early > 1

    def start_early(self, threads: int, device: str, count: int = 1, *, libraries: bool = True, alone: bool = False) -> None:
        """Start `count` processes that import all they will need and wait, where somebody keeps them. They will prove on `device`, where
        the first few get ready, too."""
        with self._changing:
            self._early = max(self._early, count) if self._keepers else 0
            while self._keepers and len(self._idle) < count:
                ready = device if len(self._idle) < EARLY_CONTEXTS else "cpu"
                self._idle.append(ProvingProcess(threads, ready, libraries=libraries, alone=alone))

    def rehearse(self, request: Mapping[str, Any], seconds: float) -> None:
        """Warm up as many processes as there are proofs at a time: each answers a request whose answer nobody reads, beside whatever else
        goes on."""
        with self._changing:
            chosen, self._idle = self._idle[:MOST_PROOFS], self._idle[MOST_PROOFS:]
            self._rehearsing += chosen
        for process in chosen:
            threading.Thread(target=self._rehearse, args=(process, request, seconds), name="rehearse", daemon=True).start()

    def _rehearse(self, process: ProvingProcess, request: Mapping[str, Any], seconds: float) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                process.rehearsed = process.answer(request, seconds) is not None
        finally:
            with self._changing:
                self._rehearsing.remove(process)
                self._changing.notify_all()
                kept = bool(self._keepers) and process.alive
                self._idle += [process] if kept else []
            if not kept:
                process.stop()

    def take(self, threads: int, *, libraries: bool = True) -> ProvingProcess:
        """Take a process that waits, with other libraries where they will be needed, and the one that knows most. Where all that were
        started early are busy it is waited for: a new one would import for longer; and, for a moment, where none that waits has rehearsed
        and one that is busy has. Else a new one."""
        until = time.monotonic() + SOON
        with self._changing:
            while (not self._idle and (self._rehearsing or self._all_busy())) or (self._only_unrehearsed() and time.monotonic() < until):
                self._changing.wait(_LOOK_AGAIN)  # also for one that died, of which nobody tells
            while self._idle:
                order = [(process.libraries == libraries, process.rehearsed, process.asked) for process in self._idle]
                process = self._idle.pop(max(range(len(order)), key=lambda place: order[place]))
                if process.alive:
                    self._taken.append(process)
                    return process
                process.stop()
        return ProvingProcess(threads)

    def _only_unrehearsed(self) -> bool:
        """Whether every process that waits would have to warm up first, and one that is busy would not."""
        return bool(self._idle) and not any(process.rehearsed for process in self._idle) \
            and any(process.rehearsed for process in self._taken)

    def _all_busy(self) -> bool:
        self._taken = [process for process in self._taken if process.alive]
        return self.several and len(self._taken) >= self._early

    def give_back(self, process: ProvingProcess) -> None:
        with self._changing:
            self._taken = [taken for taken in self._taken if taken is not process]
            self._changing.notify_all()
            if self._keepers and process.alive:
                self._idle.append(process)
                return
        process.stop()


PROVING_PROCESSES = KeptProcesses()

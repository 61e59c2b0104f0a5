"""Ledger: what happened in a run, one JSON line an event, each bound by its hash to the line before.

Lines are only ever added. A last line that a crash cut short is tolerated and reported; any other line that is not as
it was written is damage or tampering, and is refused by its number. (That whole lines are missing at the end, nothing
in the file can tell; what was derived from them, such as a hallmark, can.)
"""

import contextlib
import hashlib
import os
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError, UsageError
from assay.store import durable
from assay.store.sealed import seal, unseal
from assay.strict_json import NATURAL, require_shape

GENESIS = "0" * 64
LEDGER_LIMIT = 1 << 30
_LINE = {"seq": NATURAL, "time": str, "kind": str, "previous": str}


class Event(StrEnum):
    """Every kind of line that a ledger holds."""

    # a session
    START = "start"
    RESUME = "resume"
    PASSED_OVER = "passed over"  # a checkpoint that does not verify
    SET_ASIDE = "set aside"
    NEWEST = "newest"  # what is resumed from is the newest, and the run's own
    RESUMED = "resumed"
    NOT_BIT_EXACT = "not bit-exact"
    TORN = "torn"  # what a crash left of a line
    WARNING = "warning"
    TIME = "time"  # where it went, when a session ends
    STOPPED = "stopped"
    ALSO_FOUND = "also found"  # on the way out
    EARLY_STOP = "early stop"
    # what is learned from, and by what
    DATA = "data"
    DATA_LEDGER = "data ledger"
    CONSUMED = "consumed"
    DOCUMENTS = "documents"
    REFERENCE = "reference"
    TEACHER = "teacher"
    TEACHER_UNMOVED = "teacher unmoved"
    FORK = "fork"
    # checks before and during training
    PREFLIGHT = "preflight"
    FLOOR = "floor"
    BATCH = "batch"
    ROLLOUT = "rollout"
    STEP = "step"
    ACCOUNT = "account"
    WAY_DOWN = "way down"
    HELD_OUT = "held out"  # evaluations are of one set
    GAP = "gap"
    MEMORY = "memory"  # used, beside what was planned
    PROXY = "proxy"
    JUDGE = "judge"
    JUDGE_COST = "judge cost"
    UNJUDGED = "unjudged"
    DROPPED = "dropped"  # prompts that were drawn ahead and will not be learned from
    # checkpoints
    SAVE = "save"  # about to be written
    SAVED = "saved"  # written, with its digest
    SAVING = "saving"
    UNSAVED = "not saved"  # though it scored better than all that is, and why
    RETIRE = "retire"
    KEPT = "kept"  # what had to stay when others were retired
    PROOF = "proof"
    REMOTE = "remote"  # whether a checkpoint is at --remote
    # results
    LAYERS = "layers"
    EDITS = "edits"
    TTT = "ttt"
    ARTIFACT = "artifact"
    HAND_OVER = "hand over"
    # a pipeline's
    STAGE = "stage"  # how it ended
    GATE = "gate"
    # a ledger of test-time training's scores
    BEGIN = "begin"
    SCORE = "score"
    UPDATE = "update"


@dataclass(frozen=True)
class LedgerChain:
    """A ledger as read: its events, the sha256 of its last whole line, where that line ends, and the torn rest."""

    events: list[dict[str, Any]]
    head: str
    size: int
    tail: bytes


class Ledger:
    """Anyone may read; `claim`, or the first `append`, makes this object the one writer, until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn: str | None = None  # the sentence about a torn last line, as of the last reading
        self._fd: int | None = None
        self._pid = os.getpid()
        self._one_at_a_time = threading.Lock()
        self._head, self._seq, self._size = GENESIS, 0, 0

    def events(self) -> list[dict[str, Any]]:
        """Every event, oldest first, once the whole chain is verified."""
        chain = read_chain(self.path)
        self.torn = _torn(self.path, chain)
        return chain.events

    def append(self, kind: Event, **facts: Any) -> str:
        """The event is on the disk for good when this returns the sha256 of its line."""
        if taken := _LINE.keys() & facts.keys():
            raise UsageError(f"{self.path}: facts cannot be named {', '.join(sorted(taken))}; the ledger fills these")
        with self._one_at_a_time:
            return self._append(self._writable(), kind, facts)

    def claim(self) -> None:
        """Become the one writer now, or UsageError: for who has more to write than events."""
        with self._one_at_a_time:
            self._writable()

    def close(self) -> None:
        with self._one_at_a_time, durable.as_store_error(self.path):
            self._let_go()

    def _writable(self) -> int:
        if self._pid != os.getpid():
            raise UsageError(f"{self.path}: this process is a fork of the ledger's writer; let the parent write")
        return self._begin_writing() if self._fd is None else self._fd

    def _begin_writing(self) -> int:
        """Become the writer, verify what is there, and put a torn last line on record before anything else."""
        durable.make_folder(self.path.parent)
        with durable.as_store_error(self.path):
            fd = self._fd = durable.disk.open_append(self.path)
            ready = False
            try:
                _lock(fd, self.path)
                durable.sync_folder(self.path.parent)
                chain = read_chain(self.path)
                if chain.tail:
                    durable.disk.truncate(fd, chain.size)
                ready = True
            finally:
                if not ready:
                    self._let_go()
        self._head, self._seq, self._size = chain.head, len(chain.events), chain.size
        self.torn = _torn(self.path, chain)
        if chain.tail:
            self._append(fd, Event.TORN, {"bytes": len(chain.tail), "sha256": hashlib.sha256(chain.tail).hexdigest()})
        return fd

    def _append(self, fd: int, kind: Event, facts: dict[str, Any]) -> str:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        event = {"seq": self._seq, "time": now, "kind": kind, "previous": self._head, **facts}
        line = seal(event, where=f"{self.path}: the event {str(kind)!r}")
        written = False
        with durable.as_store_error(self.path):
            try:
                durable.write_all(fd, memoryview(line))
                durable.disk.sync_data(fd)
                written = True
            finally:
                if not written:  # leave the file as it was; the next append reads and verifies it anew
                    with contextlib.suppress(OSError):
                        durable.disk.truncate(fd, self._size)
                    self._let_go()
        self._head, self._seq, self._size = hashlib.sha256(line).hexdigest(), self._seq + 1, self._size + len(line)
        return self._head

    def _let_go(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            durable.disk.close(fd)


def read_chain(path: Path) -> LedgerChain:
    """Read a ledger with every line verified: it is as it was sealed, it is the next one, and it names the one before."""
    chain, damage = read_until_damage(path)
    if damage is not None:
        raise damage
    return chain


def read_until_damage(path: Path) -> tuple[LedgerChain, ArtifactError | None]:
    """Lines that verify, up to the first that does not, and what is wrong with that one, for readers who show what is left."""
    data = durable.read_file(path, limit=LEDGER_LIMIT) if path.exists() else b""
    *lines, tail = data.split(b"\n")
    events: list[dict[str, Any]] = []
    head, size = GENESIS, 0
    try:
        for seq, text in enumerate(lines):
            line = text + b"\n"
            events.append(_following(line, seq, head, f"{path} line {seq + 1}"))
            head, size = hashlib.sha256(line).hexdigest(), size + len(line)
        if _is_sealed(tail[:-1] + b"\n"):  # a torn write has no byte in the newline's place
            raise ArtifactError(f"{path} line {len(lines) + 1}: whole but for its last byte, which should end the line: "
                                "damaged; restore the ledger from a copy")
    except ArtifactError as damage:
        return LedgerChain(events, head, size, data[size:]), damage
    return LedgerChain(events, head, size, tail), None


def _following(line: bytes, seq: int, head: str, where: str) -> dict[str, Any]:
    event = unseal(line, where=where)
    require_shape(event, _LINE, where=where)
    if event.get("seq") != seq or event.get("previous") != head:
        raise ArtifactError(f"{where}: does not follow the line before it: lines were removed, added or reordered; "
                            "restore the ledger from a copy")
    return event


def _is_sealed(line: bytes) -> bool:
    try:
        unseal(line, where="")
    except ArtifactError:
        return False
    return True


def _lock(fd: int, path: Path) -> None:
    try:
        durable.disk.lock(fd)
    except BlockingIOError:
        raise UsageError(f"{path}: another process is writing this ledger, and a run has one writer; wait for it, or "
                         "stop it") from None


def _torn(path: Path, chain: LedgerChain) -> str | None:
    if not chain.tail:
        return None
    return (f"{path}: a crash cut the last line short after {len(chain.tail)} bytes; the {len(chain.events)} events "
            "before it are whole")

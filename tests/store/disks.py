"""Other disks in the real one's place: one that fails, one that kills, one that remembers and is cut from power."""

import contextlib
import errno
import itertools
import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.store import durable

MIXTURES = 1024  # of subsets over several folders


class Watched:
    """Every operation of the disk passes through `around(name, operation, *arguments)`."""

    def __init__(self, around: Callable[..., Any]) -> None:
        self._around = around
        self._real = durable.Disk()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._real, name)
        return lambda *arguments: self._around(name, operation, *arguments)


@contextlib.contextmanager
def installed(disk: Any) -> Iterator[Any]:
    real, durable.disk = durable.disk, disk
    try:
        yield disk
    finally:
        durable.disk = real


@dataclass
class Failing:
    """Fails from operation number `at` on, `lasting` times: with an errno, or by writing half of what was asked."""

    at: int
    fault: int | None = errno.EIO  # None: a short write
    lasting: int = 1
    calls: int = 0

    def __call__(self, name: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        self.calls += 1
        if not self.at <= self.calls < self.at + self.lasting:
            return operation(*arguments)
        if self.fault is not None:
            if name == "close":
                operation(*arguments)  # a close that fails has closed all the same
            raise OSError(self.fault, os.strerror(self.fault))
        if name == "write":
            fd, data = arguments
            return operation(fd, data[:max(1, len(data) // 2)])
        return operation(*arguments)


@dataclass
class Killing:
    """SIGKILL to ourselves instead of operation number `at`."""

    at: int
    calls: int = 0

    def __call__(self, name: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation(*arguments)


@dataclass(frozen=True)
class Op:
    """One change to the disk, by inode, so that a rename does not confuse what came before it.

    link: `name` in folder `inode` now means `target`, a file or folder (`note`); unlink: it means nothing; move: `name`
    takes `old`'s meaning; data: the file `inode` now holds `content`; sync: the file or folder `inode` is on the disk;
    mark: the program says `note`.
    """

    kind: str
    inode: int = 0
    name: str = ""
    target: int = 0
    old: str = ""
    content: bytes = b""
    note: Any = None


@dataclass
class Recorder:
    """Performs every operation under `root` for real, and remembers it as an Op."""

    root: Path
    ops: list[Op] = field(default_factory=list)
    inodes: dict[Path, int] = field(default_factory=dict)
    open_files: dict[int, int] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inodes[self.root] = 0
        self._numbers = itertools.count(1)

    def mark(self, note: Any) -> None:
        self.ops.append(Op("mark", note=note))

    def __call__(self, name: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        result = operation(*arguments)
        getattr(self, f"_{name}")(result, *arguments)
        return result

    def _link(self, path: Path, what: str) -> int:
        inode = self.inodes[path] = next(self._numbers)
        self.ops.append(Op("link", self.inodes[path.parent], path.name, inode, note=what))
        return inode

    def _create(self, fd: int, path: Path) -> None:
        self.open_files[fd] = self._link(path, "file")
        self.contents[self.open_files[fd]] = b""

    def _open_append(self, fd: int, path: Path) -> None:
        if path in self.inodes:
            self.open_files[fd] = self.inodes[path]
        else:
            self._create(fd, path)

    def _open_folder(self, fd: int, path: Path) -> None:
        self.open_files[fd] = self.inodes[path]

    def _set(self, fd: int, content: bytes) -> None:
        self.contents[self.open_files[fd]] = content
        self.ops.append(Op("data", self.open_files[fd], content=content))

    def _write(self, count: int, fd: int, data: memoryview) -> None:
        self._set(fd, self.contents[self.open_files[fd]] + bytes(data[:count]))

    def _truncate(self, _: None, fd: int, length: int) -> None:
        self._set(fd, self.contents[self.open_files[fd]][:length])

    def _sync(self, _: None, fd: int) -> None:
        self.ops.append(Op("sync", self.open_files[fd]))

    _sync_data = _sync

    def _lock(self, _: None, fd: int) -> None:
        pass

    def _close(self, _: None, fd: int) -> None:
        self.open_files.pop(fd, None)

    def _mkdir(self, _: None, path: Path) -> None:
        self._link(path, "folder")

    def _rename(self, _: None, source: Path, target: Path) -> None:
        assert source.parent == target.parent, "the model below knows renames within one folder only"
        inode = self.inodes[source]
        self.ops.append(Op("move", self.inodes[source.parent], target.name, inode, source.name))
        moved = {path: number for path, number in self.inodes.items() if path == source or source in path.parents}
        for path, number in moved.items():
            del self.inodes[path]
            self.inodes[target / path.relative_to(source)] = number

    def _unlink(self, _: None, path: Path) -> None:
        self.ops.append(Op("unlink", self.inodes[path.parent], path.name))
        del self.inodes[path]

    _rmdir = _unlink


@dataclass
class Folder:
    entries: dict[str, int] = field(default_factory=dict)  # on the disk for good
    pending: list[Op] = field(default_factory=list)  # each may or may not be there after a power cut


@dataclass
class File:
    synced: bytes = b""
    written: bytes = b""


Tree = dict[str, Any]  # name → bytes of a file, or the tree of a folder


def after_power_cut(ops: list[Op]) -> Iterator[Tree]:
    """The worst that a disk may show after these operations, without repetition.

    What was fsynced is there. Of the rest: of the changes to each folder any subset took place (of more than 6: none,
    all, each alone, each missing), in any mixture over the folders (where that is too many: one folder at a time, the
    others with none or all); of each file the bytes since its last fsync are gone, zero, half there or all there.
    """
    folders, files = _replayed(ops)
    seen = set()
    for fate in (_gone, _zero, _half, _whole):
        contents = {inode: fate(file) for inode, file in files.items()}
        for choice in _choices({inode: folder.pending for inode, folder in folders.items() if folder.pending}):
            entries = {inode: dict(folder.entries) for inode, folder in folders.items()}
            for inode, chosen in choice.items():
                for op in chosen:
                    _apply(entries[inode], op)
            tree = _tree(0, entries, contents)
            if (key := repr(tree)) not in seen:
                seen.add(key)
                yield tree


def lay_out(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (folder / name).write_bytes(node)
        else:
            lay_out(node, folder / name)


def _replayed(ops: list[Op]) -> tuple[dict[int, Folder], dict[int, File]]:
    folders, files = {0: Folder()}, {}
    for op in ops:
        if op.kind in ("link", "unlink", "move"):
            folders[op.inode].pending.append(op)
        if op.kind == "link" and op.note == "file":
            files[op.target] = File()
        elif op.kind == "link":
            folders[op.target] = Folder()
        elif op.kind == "data":
            files[op.inode].written = op.content
        elif op.kind == "sync" and op.inode in files:
            files[op.inode].synced = files[op.inode].written
        elif op.kind == "sync":
            for change in folders[op.inode].pending:
                _apply(folders[op.inode].entries, change)
            folders[op.inode].pending.clear()
    return folders, files


def _apply(entries: dict[str, int], op: Op) -> None:
    if op.kind == "move":
        entries.pop(op.old, None)
    if op.kind == "unlink":
        entries.pop(op.name, None)
    else:
        entries[op.name] = op.target


def _choices(pending: dict[int, list[Op]]) -> Iterator[dict[int, tuple[Op, ...]]]:
    subsets = {inode: _subsets(changes) for inode, changes in pending.items()}
    if math.prod(map(len, subsets.values())) <= MIXTURES:
        for mixture in itertools.product(*subsets.values()):
            yield dict(zip(subsets, mixture, strict=True))
        return
    for rest in (dict.fromkeys(pending, ()), {inode: tuple(changes) for inode, changes in pending.items()}):
        for inode, chosen in ((inode, chosen) for inode, choices in subsets.items() for chosen in choices):
            yield {**rest, inode: chosen}


def _subsets(changes: list[Op]) -> list[tuple[Op, ...]]:
    if len(changes) <= 6:
        return [chosen for size in range(len(changes) + 1) for chosen in itertools.combinations(changes, size)]
    alone = [(change,) for change in changes]
    missing = [tuple(other for other in changes if other is not change) for change in changes]
    return [(), tuple(changes), *alone, *missing]


def _tree(inode: int, entries: dict[int, dict[str, int]], contents: dict[int, bytes]) -> Tree:
    return {name: contents[child] if child in contents else _tree(child, entries, contents)
            for name, child in sorted(entries[inode].items())}


def _kept(file: File) -> bytes:
    """What surely survives: the synced bytes, as far as the file was not cut shorter since."""
    return file.synced[:len(file.written)]


def _gone(file: File) -> bytes:
    return file.synced


def _zero(file: File) -> bytes:
    return _kept(file) + bytes(len(file.written) - len(_kept(file)))


def _half(file: File) -> bytes:
    kept = len(_kept(file))
    return file.written[:kept + (len(file.written) - kept) // 2]


def _whole(file: File) -> bytes:
    return file.written

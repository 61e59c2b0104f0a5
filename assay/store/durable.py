"""Durable writes: every disk operation of the store, in the order that survives a kill and a power cut.

A folder is written beside its final place, each file fsynced, then the folder fsynced, renamed, and its parent fsynced.
What is unfinished is named `.partial-…` and locked by its writer; the lock dies with the writer, and `sweep` removes
what nobody holds. All system calls that change the disk go through `disk`, looked up at each call, so that a test can
put another in its place and make any of them fail.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from assay.errors import ArtifactError, StoreError, UsageError
from assay.strict_json import as_artifact_error, open_regular, read_small_file

T = TypeVar("T")
PARTIAL = ".partial-"
TRASH = ".trash-"
READ_BYTES = 1 << 19  # read and hashed in pieces that fit a core's cache
WRITE_BYTES = 4 << 20  # written in pieces of this size, each hashed in a thread meanwhile
SMALL_BYTES = 64 << 10  # what is smaller is hashed sooner than a thread wakes up
NO_LOCKS = {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EBADF, errno.EINVAL}  # as some network filesystems answer
NO_LINKS = {errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.EMLINK, errno.EXDEV}  # the same of hard links


class Disk:
    """The system calls that change the disk, one method each."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def open_append(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def open_folder(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_data(self, fd: int) -> None:
        os.fdatasync(fd)

    def lock(self, fd: int) -> None:
        """Lock a file; raises BlockingIOError where another holds it. The kernel frees it when the last copy of fd closes."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self, fd: int) -> None:
        os.close(fd)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path, 0o755)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)


disk = Disk()


@contextlib.contextmanager
def new_folder(final: Path, *, needed: int = 0) -> Iterator[Path]:
    """A temporary folder that becomes `final` with all that was put there, on the disk for good, or is gone.

    Files must be written with `write_file` or `HashedFile`. `needed` bytes are asked of the disk before the first is written. If
    only the very last fsync fails, `final` is there and whole but may not outlive a power cut: StoreError all the same.
    """
    _require_new(final)
    with as_store_error(final):
        make_folder(final.parent)
        sweep(final.parent)
        _require_space(final, needed)
        with _becoming(final, _claim_folder) as (temporary, _):
            yield temporary
            for folder, _, _ in os.walk(temporary, topdown=False):
                sync_folder(Path(folder))


@contextlib.contextmanager
def new_file(final: Path) -> Iterator[Path]:
    """A temporary file for a writer of another library, which becomes `final` on the disk for good, or is gone."""
    _require_new(final)
    with as_store_error(final):
        make_folder(final.parent)
        with _becoming(final, _claim_file) as (temporary, held):
            yield temporary
            disk.sync(held)


@contextlib.contextmanager
def nameless_file(beside: Path) -> Iterator[IO[bytes]]:
    """A temporary file on the disk of `beside`, in its folder or the nearest above it that is there. It has no name, so that nothing of it
    is left by whatever ends the process."""
    folder = next(folder for folder in beside.absolute().parents if folder.is_dir())
    with as_store_error(beside), tempfile.TemporaryFile(dir=folder) as file:
        yield file


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[Path | None]:
    """The folder's files under its own name in a temporary place beside it: links, or copies where the filesystem has none. Whoever
    removes the folder meanwhile takes nothing from them. None where it was gone before all of them were held."""
    temporary, held = _claim(folder, _claim_folder)
    try:
        yield _linked(folder, temporary / folder.name)
    finally:
        _discard(temporary)
        disk.close(held)


def _linked(folder: Path, place: Path) -> Path | None:
    try:
        disk.mkdir(place)
        for entry in sorted(folder.iterdir()):
            if entry.is_dir():
                if _linked(entry, place / entry.name) is None:
                    return None
            else:
                _link_or_copy(entry, place / entry.name)
    except FileNotFoundError:  # its name goes first and at once, so that what was linked until then is a part
        return None
    return place


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        disk.link(file, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with file.open("rb") as source:
            write_file(target, iter(lambda: source.read(WRITE_BYTES), b""))


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> str:
    """Write a new file to the disk, and return its sha256. Each chunk is hashed while it is written."""
    digest = hashlib.sha256()
    with as_store_error(path), ThreadPoolExecutor(1, "sha256") as hasher, _closing(disk.create(path)) as fd:
        for chunk in chunks:
            for piece in _pieces(chunk):
                hashed = in_thread(hasher, digest.update, piece)
                write_all(fd, piece)
                hashed.result()
        disk.sync(fd)
    return digest.hexdigest()


class HashedFile:
    """A new file that is written piece by piece, hashed on the way, and on the disk once it is closed."""

    def __init__(self, path: Path):
        self.path, self.size, self.sha256 = path, 0, hashlib.sha256()
        self.file = os.fdopen(disk.create(path), "wb")

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)

    def close(self) -> dict[str, Any]:
        """Close the file; returns what a manifest says of it."""
        self.file.flush()
        disk.sync(self.file.fileno())
        self.file.close()
        return {"bytes": self.size, "sha256": self.sha256.hexdigest()}


def write_entry(path: Path, data: bytes) -> dict[str, Any]:
    """Write a new file, and return what a manifest says of it."""
    return {"bytes": len(data), "sha256": write_file(path, [data])}


def write_all(fd: int, view: memoryview) -> None:
    """A short write is no error: the rest is written next."""
    while view:
        written = disk.write(fd, view)
        if written <= 0:
            raise OSError(errno.EIO, "the disk took no bytes and gave no reason")
        view = view[written:]


def replace_file(path: Path, data: bytes) -> None:
    """`path` holds `data`, or what it held before: never a mixture, and for good once this returns."""
    with as_store_error(path):
        sweep(path.parent)
        with _becoming(path, _claim_file) as (_, held):
            write_all(held, memoryview(data))
            disk.sync(held)


def require_outside_checkpoints(path: Path) -> None:
    """A checkpoint is every file that its manifest lists and no other: one more, and it is refused from then on."""
    for folder in path.absolute().parents:
        if (folder / "manifest.json").is_file() and ((folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()):
            raise UsageError(f"{path} lies inside the checkpoint {folder}, which no file may join; choose a place outside it")


def make_folder(path: Path) -> None:
    """The folder and its missing parents, each one's name on the disk for good."""
    if path.is_dir():
        return
    if path.exists() and not path.is_dir():  # asked again: another writer may have been quicker
        raise UsageError(f"{path}: a file is in the way; expected a folder, or nothing")
    require_outside_checkpoints(path)
    make_folder(path.parent)
    with as_store_error(path):
        with contextlib.suppress(FileExistsError):  # another writer was quicker
            disk.mkdir(path)
        sync_folder(path.parent)


def remove_file(path: Path) -> None:
    with as_store_error(path):
        disk.unlink(path)
        sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """The name goes first and at once; a kill in the middle leaves only trash, which `sweep` takes out."""
    trash = path.with_name(f"{TRASH}{path.name}-{os.getpid()}-{time.time_ns():x}")
    with as_store_error(path):
        disk.rename(path, trash)
        sync_folder(path.parent)
        _remove_tree(trash)


def sweep(folder: Path) -> list[Path]:
    """Remove what dead writers left half-written in `folder` and what was half-removed; return what went.

    A live writer holds a lock on its work, in whatever process or container it lives, so it is passed over; so is
    everything on a filesystem that has no locks.
    """
    swept = []
    with as_store_error(folder):
        for path in sorted(folder.iterdir()):
            if path.name.startswith(TRASH):
                _remove_tree(path)
            elif not (path.name.startswith(PARTIAL) and _removed_if_abandoned(path)):
                continue
            swept.append(path)
    return swept


def sync_folder(path: Path) -> None:
    with _closing(disk.open_folder(path)) as fd:
        disk.sync(fd)


def read_file(path: Path, *, limit: int, expected_sha256: str | None = None) -> bytes:
    """The bytes of a small file; more than `limit` of them, or another hash than expected, is refused."""
    data = read_small_file(path, limit)
    require_hash(path, hashlib.sha256(data).hexdigest(), expected_sha256)
    return data


def read_range(fd: int, start: int, stop: int, path: Path) -> bytes:
    data = bytearray(stop - start)
    filled = 0
    for piece in _pieces_read(fd, start, stop, path):
        data[filled:filled + len(piece)] = piece
        filled += len(piece)
    return bytes(data)


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as fd:
        for piece in _pieces_read(fd, 0, os.fstat(fd).st_size, path):
            digest.update(piece)
    return digest.hexdigest()


def in_thread(pool: ThreadPoolExecutor, function: Callable[[memoryview], T], data: memoryview) -> Future[T]:
    """`function(data)` in the pool, or here and now where that is quicker."""
    return pool.submit(function, data) if len(data) > SMALL_BYTES else _done(function(data))


def require_hash(path: Path, actual: str, expected: str | None, *, what: str = "its bytes") -> None:
    if expected is not None and actual != expected:
        raise ArtifactError(f"{path}: {what} hash to {actual}, but {expected} was recorded when it was written: "
                            "damaged, or a file from elsewhere; restore it, or use an older checkpoint")


@contextlib.contextmanager
def as_store_error(where: Path) -> Iterator[None]:
    """Turn every refusal of the disk into a StoreError that says where, why, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"the disk is full ({_free_bytes(where)}); make room, or keep fewer checkpoints, and save again"
        else:
            advice = f"{_reason(error)}; check the disk and the permissions, and save again"
        raise StoreError(f"{where}: not saved: {advice}. What was committed before is intact.") from error


def _require_new(final: Path) -> None:
    if os.path.lexists(final):
        raise UsageError(f"{final} exists, and what was committed is never overwritten; choose another place")
    require_outside_checkpoints(final)


@contextlib.contextmanager
def _becoming(final: Path, claim: Callable[[Path], int | None]) -> Iterator[tuple[Path, int]]:
    """A locked temporary beside `final` and its descriptor; it is renamed to `final`, on the disk for good, or is gone."""
    temporary, held = _claim(final, claim)
    renamed = False
    try:
        yield temporary, held
        disk.rename(temporary, final)
        renamed = True
        sync_folder(final.parent)
    finally:
        if not renamed:
            _discard(temporary)
        disk.close(held)


def _claim(final: Path, claim: Callable[[Path], int | None]) -> tuple[Path, int]:
    """A new temporary name beside `final` and the descriptor that holds its lock."""
    while True:
        temporary = final.with_name(f"{PARTIAL}{final.name}-{os.getpid()}-{time.time_ns():x}")
        held = claim(temporary)
        if held is not None:
            return temporary, held


def _claim_folder(path: Path) -> int | None:
    disk.mkdir(path)
    try:
        fd = disk.open_folder(path)
    except FileNotFoundError:  # swept between the two calls
        return None
    return _held(path, fd)


def _claim_file(path: Path) -> int | None:
    return _held(path, disk.create(path))


def _held(path: Path, fd: int) -> int | None:
    """fd once it is locked and `path` still names it; None where a sweeper took the new name before it was locked."""
    ours = False
    try:
        ours = _locked(fd) is not False and _names(path, fd)
    finally:
        if not ours:
            disk.close(fd)
    return fd if ours else None


def _locked(fd: int) -> bool | None:
    """Try to lock. True: we hold the lock. False: another does. None: this filesystem has none."""
    try:
        disk.lock(fd)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise
    return True


def _removed_if_abandoned(path: Path) -> bool:
    """Remove what nobody holds the lock of and is still there: a writer renames its work before it lets go.

    The lock is kept until all of it is gone: a writer that has just made the name finds it taken, and makes another.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with _closing(fd):
        abandoned = _locked(fd) is True and _names(path, fd)
        if abandoned:
            _remove_tree(path)
    return abandoned


def _names(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove_tree(path: Path) -> None:
    """Remove a folder without following a link; another process may be removing the same."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            disk.unlink(path)
            return
        for entry in sorted(path.iterdir()):
            _remove_tree(entry)
        disk.rmdir(path)


def _discard(path: Path) -> None:
    """Discard a path, best effort: what cannot be removed now is swept later."""
    with contextlib.suppress(OSError):
        _remove_tree(path)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        disk.close(fd)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


def _pieces(chunk: bytes | memoryview) -> Iterator[memoryview]:
    view = memoryview(chunk).cast("B")
    for start in range(0, len(view), WRITE_BYTES):
        yield view[start:start + WRITE_BYTES]


def _pieces_read(fd: int, start: int, stop: int, path: Path) -> Iterator[memoryview]:
    """Pieces of a file, each in the same memory as the one before, and is to be used before the next is asked for."""
    view = memoryview(bytearray(min(READ_BYTES, stop - start)))
    while start < stop:
        with as_artifact_error(path):
            count = os.preadv(fd, [view[:stop - start]], start)
        if count == 0:
            raise ArtifactError(f"{path}: ended {stop - start:,} bytes early; another program changes it meanwhile")
        yield view[:count]
        start += count


def free_space(folder: Path) -> int:
    """Bytes that may still be written there."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _require_space(final: Path, needed: int) -> None:
    free = free_space(final.parent)
    if needed > free:
        raise StoreError(f"{final}: not saved: it needs {needed:,} bytes and the disk has {free:,} free; make room, or "
                         "keep fewer checkpoints, and save again. What was committed before is intact.")


def _free_bytes(where: Path) -> str:
    with contextlib.suppress(OSError):
        space = os.statvfs(where.parent)
        return f"{space.f_bavail * space.f_frsize:,} bytes are free"
    return "how much is free is unknown"


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)

"""Whole or not at all, seen from outside: what appears, what is swept, what the errors say."""

import errno
import hashlib
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from assay.errors import ArtifactError, StoreError, UsageError
from assay.store import durable
from tests.store.disks import Failing, Watched, installed


def commit_folder(final: Path, write, **asked) -> None:
    with durable.new_folder(final, **asked) as folder:
        write(folder)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def write_one(folder: Path) -> None:
    durable.write_file(folder / "file", [b"one", memoryview(b"two")])


def test_a_committed_folder_holds_what_was_written(tmp_path: Path) -> None:
    commit_folder(tmp_path / "a" / "b" / "final", write_one)
    assert names(tmp_path / "a" / "b") == ["final"]
    assert (tmp_path / "a" / "b" / "final" / "file").read_bytes() == b"onetwo"


def test_what_was_committed_is_never_overwritten(tmp_path: Path) -> None:
    commit_folder(tmp_path / "final", write_one)
    with pytest.raises(UsageError, match="never overwritten"):
        commit_folder(tmp_path / "final", lambda folder: None)
    assert names(tmp_path / "final") == ["file"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        write_one(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit_folder(tmp_path / "final", fails)
    assert names(tmp_path) == []


def test_write_file_returns_the_hash_of_what_lies_on_the_disk(tmp_path: Path) -> None:
    chunks = [os.urandom(3), os.urandom(durable.WRITE_BYTES + 17), b"", os.urandom(durable.SMALL_BYTES + 1)]
    digest = durable.write_file(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)
    assert digest == hashlib.sha256(b"".join(chunks)).hexdigest() == durable.hash_file(tmp_path / "file")
    assert durable.read_file(tmp_path / "file", limit=1 << 30, expected_sha256=digest) == b"".join(chunks)


def test_a_disk_that_takes_no_bytes_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with (installed(Watched(lambda name, operation, *args: 0 if name == "write" else operation(*args))),
          pytest.raises(StoreError, match="took no bytes")):
        durable.write_file(tmp_path / "file", [b"data"])


def test_replace_file_replaces_all_or_nothing(tmp_path: Path) -> None:
    durable.replace_file(tmp_path / "mark", b"old")
    with installed(Watched(Failing(at=3))), pytest.raises(StoreError, match="intact"):
        durable.replace_file(tmp_path / "mark", b"new")
    assert names(tmp_path) == ["mark"]
    assert (tmp_path / "mark").read_bytes() == b"old"
    durable.replace_file(tmp_path / "mark", b"new")
    assert (tmp_path / "mark").read_bytes() == b"new"
    assert names(tmp_path) == ["mark"]


def test_a_full_disk_is_named_with_what_is_free_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"needs 1,000,000,000,000,000 bytes and the disk has [\d,]+ free; make room"):
        commit_folder(tmp_path / "final", write_one, needed=10**15)
    with (installed(Watched(Failing(at=6, fault=errno.ENOSPC))),
          pytest.raises(StoreError, match=r"the disk is full \([\d,]+ bytes are free\); make room")):
        commit_folder(tmp_path / "final", write_one)
    assert names(tmp_path) == []


def test_sweep_spares_a_live_writer_and_takes_a_dead_ones_work(tmp_path: Path) -> None:
    begun, may_end = multiprocessing.Event(), multiprocessing.Event()

    def slow(folder: Path) -> None:
        write_one(folder)
        begun.set()
        may_end.wait()

    writer = multiprocessing.get_context("fork").Process(target=commit_folder, args=(tmp_path / "final", slow))
    writer.start()
    assert begun.wait(60)
    assert durable.sweep(tmp_path) == []
    writer.kill()
    writer.join()
    assert [path.name[:14] for path in durable.sweep(tmp_path)] == [".partial-final"]
    assert names(tmp_path) == []


def test_sweep_spares_another_thread_of_this_process(tmp_path: Path) -> None:
    swept = []
    commit_folder(tmp_path / "final", lambda folder: swept.extend(durable.sweep(tmp_path)))
    assert swept == []
    assert names(tmp_path) == ["final"]


def test_a_writer_whose_new_folder_was_swept_takes_another(tmp_path: Path) -> None:
    """The one moment in which a folder has no lock yet: between mkdir and flock."""
    taken: list[bool] = []

    def sweep_before_the_first_lock(name, operation, *arguments):
        if name == "lock" and not taken:
            taken.append(True)
            for path in tmp_path.iterdir():
                os.rmdir(path)
        return operation(*arguments)

    with installed(Watched(sweep_before_the_first_lock)):
        commit_folder(tmp_path / "final", write_one)
    assert taken
    assert names(tmp_path) == ["final"]


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["folder", "file"])
def test_a_sweeper_keeps_the_lock_until_all_is_gone(tmp_path: Path, make) -> None:
    """Else a writer that made the name a moment ago takes the lock, writes, and has its work removed under its hands."""
    make(tmp_path / ".partial-old-1-1")
    locks: list[bool | None] = []

    def lock_before_removing(name, operation, *arguments):
        if name in ("rmdir", "unlink"):
            fd = os.open(arguments[0], os.O_RDONLY)
            locks.append(durable._locked(fd))
            os.close(fd)
        return operation(*arguments)

    with installed(Watched(lock_before_removing)):
        durable.sweep(tmp_path)
    assert locks == [False]
    assert names(tmp_path) == []


def test_where_the_filesystem_has_no_locks_saving_works_and_sweeping_spares_all(tmp_path: Path) -> None:
    def no_locks(name, operation, *arguments):
        if name == "lock":
            raise OSError(errno.ENOLCK, "No locks available")
        return operation(*arguments)

    (tmp_path / ".partial-old-1-1").mkdir()
    with installed(Watched(no_locks)):
        commit_folder(tmp_path / "final", write_one)
    assert names(tmp_path) == [".partial-old-1-1", "final"]


def test_removing_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    (tmp_path / "doomed").mkdir()
    (tmp_path / "doomed" / "link").symlink_to(tmp_path / "precious")
    durable.remove_folder(tmp_path / "doomed")
    assert names(tmp_path) == ["precious"]
    assert names(tmp_path / "precious") == ["file"]


def test_writers_in_many_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    threads = [threading.Thread(target=commit_folder, args=(tmp_path / f"{i}", write_one)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(tmp_path) == [f"{i}" for i in range(8)]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_reading_what_is_no_file_is_refused_and_never_waits(tmp_path: Path, make) -> None:
    make(tmp_path / "odd")
    with pytest.raises(ArtifactError, match="expected a file"):
        durable.read_file(tmp_path / "odd", limit=10)


def test_reading_is_limited_and_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    with pytest.raises(ArtifactError, match="at most 4"):
        durable.read_file(tmp_path / "file", limit=4)
    with pytest.raises(ArtifactError, match="recorded when it was written"):
        durable.read_file(tmp_path / "file", limit=5, expected_sha256="0" * 64)
    with pytest.raises(ArtifactError, match="cannot be read"):
        durable.read_file(tmp_path / "none", limit=5)

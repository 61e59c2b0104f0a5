"""Nothing in the ledger changes, nobody else writes it, and only a last line may be torn."""

import hashlib
import json
import multiprocessing
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from assay.errors import ArtifactError, StoreError, UsageError
from assay.store.ledger import Ledger
from tests.store.disks import Failing, Watched, installed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.jsonl"


@pytest.fixture
def three(path: Path) -> Path:
    ledger = Ledger(path)
    for number in range(3):
        ledger.append("step", number=number, loss=1.5)
    ledger.close()
    return path


def test_events_come_back_in_order_with_their_hashes_chained(path: Path) -> None:
    ledger = Ledger(path)
    hashes = [ledger.append("begin", seed=1), ledger.append("end", note="é\n")]
    events = Ledger(path).events()
    assert [(event["seq"], event["kind"]) for event in events] == [(0, "begin"), (1, "end")]
    assert [event["previous"] for event in events] == ["0" * 64, hashes[0]]
    assert hashes == [hashlib.sha256(line).hexdigest() for line in path.read_bytes().splitlines(keepends=True)]
    assert events[1]["note"] == "é\n"
    age = datetime.now(UTC) - datetime.fromisoformat(events[0]["time"])
    assert timedelta(0) <= age < timedelta(minutes=1)
    ledger.close()


def test_a_ledger_goes_on_where_the_last_writer_ended(three: Path) -> None:
    ledger = Ledger(three)
    ledger.append("again")
    assert [event["seq"] for event in ledger.events()] == [0, 1, 2, 3]
    ledger.close()


def test_no_ledger_is_no_events(path: Path) -> None:
    assert Ledger(path).events() == []
    assert not path.exists()


def test_a_second_writer_is_refused_until_the_first_closes(three: Path) -> None:
    first, second = Ledger(three), Ledger(three)
    first.append("mine")
    with pytest.raises(UsageError, match="a run has one writer"):
        second.append("mine too")
    assert len(second.events()) == 4
    first.close()
    second.append("now mine")
    second.close()


def test_a_writer_that_was_killed_holds_no_lock(path: Path) -> None:
    def write_and_die() -> None:
        Ledger(path).append("begun")
        os.kill(os.getpid(), 9)

    writer = multiprocessing.get_context("fork").Process(target=write_and_die)
    writer.start()
    writer.join()
    assert writer.exitcode == -9
    ledger = Ledger(path)
    ledger.append("again")
    assert [event["kind"] for event in ledger.events()] == ["begun", "again"]
    ledger.close()


def test_a_fork_of_the_writer_may_not_write(path: Path) -> None:
    ledger = Ledger(path)
    ledger.append("begun")

    def write() -> None:
        try:
            ledger.append("twice")
        except UsageError:
            os._exit(42)

    fork = multiprocessing.get_context("fork").Process(target=write)
    fork.start()
    fork.join()
    assert fork.exitcode == 42
    ledger.close()


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_a_torn_last_line_is_tolerated_reported_and_put_on_record(three: Path, cut: int) -> None:
    whole = three.read_bytes()
    torn = whole[:-cut]
    last = torn[torn.rindex(b"\n") + 1:]
    three.write_bytes(torn)
    reader = Ledger(three)
    assert len(reader.events()) == 2
    assert f"after {len(last)} bytes" in str(reader.torn)
    assert three.read_bytes() == torn, "reading repairs nothing"
    writer = Ledger(three)
    writer.append("again")
    assert writer.torn is not None
    events = Ledger(three).events()
    assert [event["kind"] for event in events] == ["step", "step", "torn", "again"]
    assert events[2]["bytes"] == len(last)
    assert events[2]["sha256"] == hashlib.sha256(last).hexdigest()
    writer.close()


def rewritten(line: bytes, **changes) -> bytes:
    return json.dumps({**json.loads(line), **changes}, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(("tamper", "line"), [
    (lambda lines: [lines[0], rewritten(lines[1], loss=0.1), lines[2]], 2),
    (lambda lines: [lines[0], lines[2]], 2),
    (lambda lines: [lines[1], lines[2]], 1),
    (lambda lines: [lines[1], lines[0], lines[2]], 1),
    (lambda lines: [lines[0], lines[0], lines[1], lines[2]], 2),
    (lambda lines: [lines[0], b"", lines[1], lines[2]], 2),
    (lambda lines: [lines[0], lines[1], lines[2][:-9]], 3),
    (lambda lines: [lines[0], lines[1], rewritten(lines[2], loss=0.1)], 3),
], ids=["edited", "removed", "beginning removed", "swapped", "doubled", "blank", "cut but ended", "last edited"])
def test_anything_else_is_tampering_and_named_by_its_line(three: Path, tamper, line: int) -> None:
    three.write_bytes(b"".join(changed + b"\n" for changed in tamper(three.read_bytes().splitlines())))
    with pytest.raises(ArtifactError, match=f"line {line}"):
        Ledger(three).events()
    with pytest.raises(ArtifactError, match=f"line {line}"):
        Ledger(three).append("more")


def test_a_line_of_another_run_in_the_same_place_is_tampering(three: Path, tmp_path: Path) -> None:
    """Its seal and its number are right: that it does not name the line before it is all that tells."""
    other = Ledger(tmp_path / "other" / "ledger.jsonl")
    for number in range(3):
        other.append("step", number=number, loss=0.1)
    other.close()
    lines = three.read_bytes().splitlines(keepends=True)
    three.write_bytes(b"".join([*lines[:2], other.path.read_bytes().splitlines(keepends=True)[2]]))
    with pytest.raises(ArtifactError, match="line 3: does not follow the line before it"):
        Ledger(three).events()


def test_a_last_newline_that_became_something_else_is_damage_and_no_torn_line(three: Path) -> None:
    three.write_bytes(three.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match="line 3"):
        Ledger(three).events()


def test_numbers_that_are_not_finite_and_taken_names_are_refused(path: Path) -> None:
    ledger = Ledger(path)
    with pytest.raises(UsageError, match='as text such as "nan"'):
        ledger.append("step", loss=float("nan"))
    with pytest.raises(UsageError, match="seq"):
        ledger.append("step", seq=3)
    ledger.append("step", loss="nan")
    assert len(ledger.events()) == 1
    ledger.close()


@pytest.mark.parametrize("at", range(1, 5))
def test_a_failed_append_leaves_the_ledger_as_it_was(three: Path, at: int) -> None:
    ledger = Ledger(three)
    ledger.append("before")
    before = three.read_bytes()
    with installed(Watched(Failing(at))):
        try:
            ledger.append("fails", more="x" * 10)
            assert at > 2, "write and fdatasync must be heard"
        except StoreError:
            assert three.read_bytes() == before
    ledger.append("after")
    assert [event["kind"] for event in ledger.events()][-1] == "after"
    ledger.close()


def test_threads_may_share_a_ledger(path: Path) -> None:
    ledger = Ledger(path)
    threads = [threading.Thread(target=lambda: [ledger.append("x") for _ in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ledger.events()) == 40
    ledger.close()

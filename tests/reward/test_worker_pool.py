"""Rewards in worker processes: what cannot be told is an error row, what hangs or dies takes only its item with it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from assay.errors import DataError, GuardStop, UsageError
from assay.reward.reward_functions import RewardSpec, parse_rewards
from assay.reward.worker_pool import ErrorLimit, RewardItem, RewardWorkers, ScoredItem, scored_item
from tests.processes import ended

MINE = '''
import os, random, signal, sys, time
import neighbour

def act(prompt, completion, row):
    if completion == "raise":
        raise KeyError("no such key")
    if completion == "hang":
        time.sleep(1000)
    if completion == "spin":
        while True: pass
    if completion == "die":
        os._exit(7)
    if completion == "exit":
        sys.exit(3)
    if completion == "alarm":
        signal.alarm(1); signal.alarm(0)
    if completion == "print":
        print("noise on stdout", flush=True); os.write(1, b"more\\n"); sys.stdin.read()
    if completion == "draw":
        return random.random()
    if completion == "hash":
        return hash("a string") / 2**64
    return {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "none": None, "bool": True}.get(completion, neighbour.WORTH)
'''
ROW = {"answer": "#### 42"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "neighbour.py").write_text("WORTH = 0.25")
    (folder / "mine.py").write_text(MINE)
    return folder / "mine.py"


@pytest.fixture(scope="module")
def workers(file: Path):
    with RewardWorkers(parse_rewards([f"{file}:act:2", "answer:1"]), count=2, seconds=60.0) as workers:
        yield workers


def items(*completions: str) -> list[RewardItem]:
    return [RewardItem("p", completion, ROW) for completion in completions]


def test_values_are_weighed_and_come_in_order(workers: RewardWorkers):
    texts = [f"#### {n % 60}" for n in range(200)]
    rows = workers.score(items(*texts))
    assert [row.components["answer"] for row in rows] == [float(n % 60 == 42) for n in range(200)]
    assert rows[42] == ScoredItem(1.5, None, {"act": 0.25, "answer": 1.0})
    assert rows == workers.score(items(*texts))
    assert workers.score([]) == []


@pytest.mark.parametrize(("completion", "error"), [
    ("raise", "act: KeyError: 'no such key'"), ("nan", "act: ValueError: the reward is nan"),
    ("inf", "act: ValueError: the reward is inf"), ("exit", "act: SystemExit: 3"),
    ("text", "act: TypeError: the reward is '1.0', a str"), ("none", "act: TypeError: the reward is 'None'")])
def test_what_is_no_number_is_an_error_row(workers: RewardWorkers, completion: str, error: str):
    [row] = workers.score(items(completion))
    assert row.value is None
    assert str(row.error).startswith(error)
    assert row.components == {"act": None, "answer": 0.0}


def test_a_worker_lost_is_replaced_and_only_its_item_is_an_error(file: Path):
    with RewardWorkers(parse_rewards([f"{file}:act:2", "answer:1"]), count=2, seconds=4.0) as workers:
        rows = workers.score(items("#### 42", "hang", "spin", "die", *["#### 42"] * 20))
    assert [row.value for row in rows] == [1.5, None, None, None, *[1.5] * 20]
    assert [row.error for row in rows[1:4]] == ["the item took more than 4 s"] * 2 + ["the worker ended with status 7 on this item"]
    assert rows[1].components == {"act": None, "answer": None}


def test_what_a_reward_prints_or_reads_does_not_reach_the_pipes(workers: RewardWorkers):
    rows = workers.score(items("print", "#### 42", "print", "bool", "alarm"))
    assert [row.value for row in rows] == [0.5, 1.5, 0.5, 2.0, 0.5]


def test_a_reward_that_draws_is_the_same_in_any_worker_and_order(workers: RewardWorkers):
    first = [row.value for row in workers.score(items("draw", "x", "draw"))]
    assert first[0] is not None
    assert 0 < first[0] < 2
    assert [row.value for row in workers.score(items("draw", "draw"))] != [first[0], first[0] + 1]
    assert workers.score(items("draw", "x", "draw"))[2].value == first[2]
    assert workers.score(items("hash"))[0].value == workers.score(items("hash"))[0].value


def test_known_failures_come_back_as_errors(workers: RewardWorkers):
    drilled = workers.drill()
    assert set(drilled) == {"raises", "nan", "inf", "text", "nothing"}
    assert all(row.value is None and row.error for row in drilled.values())


def test_an_answer_is_believed_only_whole():
    half = scored_item({"values": {"a": 1.0}, "errors": {}}, {"a": 1.0, "b": 1.0})
    assert half == ScoredItem(None, "no finite value came back", {"a": 1.0, "b": None})
    assert scored_item({"values": {"a": float("nan")}, "errors": {}}, {"a": 1.0}).value is None
    assert scored_item({"values": {"a": 3.0}, "errors": {}}, {"a": 0.5}).value == 1.5


@pytest.mark.parametrize(("source", "sentence"), [
    ("act = print\nraise RuntimeError('broken')", "RuntimeError: broken"), ("act = 1", "has no function 'act'"),
    ("act = print\nimport os; os._exit(0)", "or it died")])
def test_a_file_that_does_not_load_is_a_usage_error(tmp_path: Path, source: str, sentence: str):
    (tmp_path / "bad.py").write_text(source)
    with RewardWorkers(parse_rewards([f"{tmp_path}/bad.py:act:1"]), count=1) as workers, pytest.raises(UsageError, match=sentence):
        workers.score(items("x"))


def test_a_row_that_is_no_json_is_a_data_error(workers: RewardWorkers):
    with pytest.raises(DataError, match="item 0 is not plain JSON"):
        workers.score([RewardItem("p", "c", {"x": object()})])


def test_workers_load_no_torch(tmp_path: Path):
    (tmp_path / "look.py").write_text("import sys\ndef heavy(p, c, r): return sum(m in sys.modules for m in ('torch', 'numpy', 'scipy'))")
    with RewardWorkers([RewardSpec("heavy", file=str(tmp_path / "look.py")), *parse_rewards(["answer", "format"])], count=1) as workers:
        assert workers.score(items("x"))[0].components["heavy"] == 0


def test_a_worker_ends_with_its_parent_even_while_a_reward_sleeps(file: Path, tmp_path: Path):
    note = tmp_path / "pid"
    slow = f"import os, time\ndef slow(p, c, r):\n    open({str(note)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(600)"
    (tmp_path / "slow.py").write_text(slow)
    program = ("from assay.reward.reward_functions import RewardSpec\nfrom assay.reward.worker_pool import *\n"
               f"RewardWorkers([RewardSpec('slow', file={str(tmp_path / 'slow.py')!r})], count=1).score([RewardItem('', '', {{}})])")
    parent = subprocess.Popen([sys.executable, "-c", program])
    until = time.monotonic() + 60
    while not (note.exists() and note.read_text().endswith(".")) and time.monotonic() < until:
        time.sleep(0.01)
    worker = int(note.read_text()[:-1])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert ended(worker)


@pytest.mark.parametrize("end", ["closed", "parent killed"])
def test_what_a_reward_started_ends_with_its_worker(end: str, tmp_path: Path):
    note = tmp_path / "pid"
    (tmp_path / "start.py").write_text(f"""
import subprocess
def start(prompt, completion, row):
    child = subprocess.Popen(["sleep", "600"])
    open({str(note)!r}, "w").write(str(child.pid))
    return 1.0
""")
    program = f"""
import os, signal
from assay.reward.reward_functions import RewardSpec
from assay.reward.worker_pool import *
with RewardWorkers([RewardSpec("start", file={str(tmp_path / "start.py")!r})], count=1) as workers:
    workers.score([RewardItem("", "", {{}})])
    if {end == "parent killed"}:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=120)
    assert done.returncode == (0 if end == "closed" else -signal.SIGKILL)
    assert ended(int(note.read_text()))


def test_a_worker_that_does_not_even_read_is_not_waited_for():
    """What it is asked is more than a pipe holds."""
    with RewardWorkers(parse_rewards(["answer"]), count=1, seconds=60.0) as some:
        assert some.score(items("#### 42"))[0].value == 1
        [worker], found = some._workers, []
        assert worker.child.process is not None
        os.kill(worker.child.process.pid, signal.SIGSTOP)
        worker.seconds = 0.3
        asking = threading.Thread(target=lambda: found.extend(some.score([RewardItem("p" * 2**20, "#### 42", ROW)])), daemon=True)
        asking.start()
        asking.join(60)
        assert [scored.error for scored in found] == ["the item took more than 0.3 s"]
        worker.seconds = 60.0
        assert some.score(items("#### 42"))[0].value == 1


GOOD, BAD = ScoredItem(1.0, None), ScoredItem(None, "act: KeyError: 'x'")


def test_too_many_errors_stop_the_run_with_the_first_of_them():
    limit = ErrorLimit(0.05)
    limit.feed([BAD])  # one of fewer than twenty is no rate
    limit.feed([GOOD] * 200)
    limit.feed([BAD] * 10)
    with pytest.raises(GuardStop, match=r"11 of the last 200 .*12 of 212 .*act: KeyError: 'x'") as stop:
        limit.feed([BAD])
    assert stop.value.exit_code == 4
    assert (limit.scored, limit.errors, limit.first) == (212, 12, ["act: KeyError: 'x'"] * 3)


def test_late_failures_are_not_hidden_by_a_long_good_past():
    limit = ErrorLimit(0.05)
    limit.feed([GOOD] * 100_000)
    with pytest.raises(GuardStop):
        limit.feed([BAD] * 16)


def test_no_error_is_allowed_where_none_is_asked_for():
    with pytest.raises(GuardStop):
        ErrorLimit(0).feed([GOOD, BAD])
    with pytest.raises(UsageError):
        ErrorLimit(1.0)


def test_no_process_is_left(file: Path):
    with RewardWorkers(parse_rewards(["answer"]), count=2) as some:
        some.score(items("x", "y", "z"))
        pids = [worker.child.process.pid for worker in some._workers if worker.child.process]
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() and os.getpgid(pid) == pid for pid in pids)

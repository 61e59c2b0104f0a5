"""Hostile programs have no effect outside, and each is judged right; honest ones pass."""

import os
import platform
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from assay.errors import DataError, UsageError
from assay.reward import sandbox
from assay.reward.sandbox import UNUSED_UIDS, Limits, ProgramOutcome, judge_program, run_python
from tests.reward.hostile import ENDLESS, ESCAPES, FORGERIES

needs_bwrap = pytest.mark.skipif(sandbox.sandbox_unavailable() is not None, reason=f"no sandbox here: {sandbox.sandbox_unavailable()}")
TESTS = """
assert double(2) == 4
assert double(-3) == -6
assert all(map(lambda case: double(case[0]) == case[1], [(5, 10), (6, 12)]))
"""
PATIENT = Limits(seconds=20, wall_seconds=120, output_bytes=1 << 16)  # a busy machine must not turn right into wrong
SHORT = Limits(seconds=1, wall_seconds=1.2, output_bytes=1 << 16)


class Outside:
    """Things outside that a program could reach if the walls had a hole."""

    def __init__(self, folder):
        self.secret = folder / "secret.txt"
        self.secret.write_text("the secret\n")
        self.bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.server, self.abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0assay-{os.getpid()}")
        self.abstract.listen()
        self.visitors: list[str] = []
        for listener in (self.server, self.abstract):
            threading.Thread(target=self._receive, args=(listener,), daemon=True).start()

    def _receive(self, listener):
        while True:
            try:
                listener.accept()
            except OSError:  # closed
                return
            self.visitors.append(str(listener))

    def filled(self, program):
        port = self.server.getsockname()[1]
        return program.format(secret=self.secret, port=port, pid=self.bystander.pid, abstract=f"assay-{os.getpid()}")

    def is_untouched(self):
        return self.secret.read_text() == "the secret\n" and self.bystander.poll() is None and not self.visitors and os.environ["SECRET"]

    def close(self):
        self.bystander.communicate(b"\n")
        self.server.close()
        self.abstract.close()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All programs, several at a time."""
    if platform.machine() != "x86_64":
        pytest.skip("the programs name system calls by their numbers on x86-64")
    os.environ["SECRET"] = "the secret"
    outside = Outside(tmp_path_factory.mktemp("outside"))
    jobs = [(name, program, SHORT if name in ENDLESS else PATIENT) for name, program in (ESCAPES | FORGERIES | ENDLESS).items()]
    with recorded_users() as users, ThreadPoolExecutor(4) as pool:
        judged = list(pool.map(lambda job: judge_program(outside.filled(job[1]), TESTS, names=["double"], limits=job[2]), jobs))
    yield {name: outcome for (name, _, _), outcome in zip(jobs, judged, strict=True)} | {"outside": outside, "users": users}
    outside.close()
    del os.environ["SECRET"]


@needs_bwrap
@pytest.mark.parametrize("name", ESCAPES)
def test_what_is_forbidden_is_refused_and_the_right_answer_still_counts(outcomes, name):
    assert outcomes[name].status == "passed", outcomes[name]


@needs_bwrap
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_does_not_pass(outcomes, name):
    assert outcomes[name].status in ("failed", "killed", "flooded"), outcomes[name]


@needs_bwrap
@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_ended(outcomes, name):
    assert outcomes[name].status in ("timeout", "failed", "killed"), outcomes[name]
    assert not outcomes[name].passed


@needs_bwrap
def test_nothing_outside_was_touched_and_nothing_is_left(outcomes):
    assert outcomes["outside"].is_untouched()
    assert not left_over(outcomes["users"])
    assert len(outcomes["users"]) > 100 or os.geteuid() != 0


@contextmanager
def recorded_users():
    """Users that the sandboxes ran as; only root can give each its own."""
    users, draw = set(), sandbox.secrets.randbelow

    def drawn(below):
        users.add(UNUSED_UIDS + (number := draw(below)))
        return number

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox.secrets, "randbelow", drawn)
        yield users


def left_over(uids):
    """Processes of these users; the kernel ends them with their namespace, which may take a moment."""
    found = []
    for _ in range(1200):
        found = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if owner(pid) in uids]
        if not found:
            break
        threading.Event().wait(0.05)
    return found


def owner(pid):
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------- honest programs


HONEST = {
    "plain": ("def f(x): return x + 1", "assert f(1) == 2"),
    "types survive": ("def f(x): return x", """
for value in [None, True, 1, 2.5, 'é\\ud800', [1, (2, {3}), {'a': b'x'}], frozenset({1}), 1j, 10 ** 5000, range(3), {(1, 2): [3]}]:
    assert f(value) == value and type(f(value)) is type(value)
assert f(float('inf')) > 0 and f(float('nan')) != f(float('nan'))"""),
    "a generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "an exception": ("def f(x):\n    if x < 0: raise ValueError('negative')\n    return x", """
try: f(-1)
except ValueError as error: assert str(error) == 'negative'
else: assert False"""),
    "its own exception": ("class Odd(Exception): pass\ndef f(x): raise Odd(x)", """
try: f(1)
except Exception as error: assert 'Odd' in str(error)
else: assert False"""),
    "a class with state": ("class f:\n    def __init__(self): self.n = 0\n    def add(self, k): self.n += k; return self",
                           "a = f()\nassert a.add(2).add(3).n == 5\nassert f().n == 0"),
    "objects given back": ("class P:\n    def __init__(self, v): self.v = v\ndef f(v): return P(v)\ndef g(p): return p.v",
                           "assert g(f(3)) == 3"),
    "a constant": ("f = 7\ndef g(): return 1", "assert f == 7 and g() == 1"),
    "prints, and has a dataclass": ("""
print('hello')
from dataclasses import dataclass
@dataclass
class D:
    a: int
def f(): return D(1).a""", "assert f() == 1"),
    "big data": ("def f(x): return sorted(x)", "assert f(list(range(100000, 0, -1)))[0] == 1"),
}


@needs_bwrap
@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name):
    program, tests = HONEST[name]
    outcome = judge_program(program, tests, names=["f", "g"], limits=PATIENT)
    assert outcome.status == "passed", outcome


@needs_bwrap
def test_what_a_program_prints_and_why_it_failed_is_kept():
    outcome = judge_program("print('thinking')\ndef f(): return 1", "assert f() == 2, 'one is not two'", names=["f"], limits=PATIENT)
    assert (outcome.status, outcome.stdout) == ("failed", "thinking\n")
    assert "one is not two" in outcome.reason


@needs_bwrap
def test_setup_is_on_the_tests_side_and_the_programs_names_win():
    setup = "def helper(x): return x * 10\ndef f(x): ..."
    tests, forged = "assert f(2) == helper(2)", "def helper(x): return 0\ndef f(x): return 0"
    assert judge_program("def f(x): return x * 10", tests, names=["f"], setup=setup, limits=PATIENT).passed
    assert not judge_program(forged, tests, names=["f"], setup=setup, limits=PATIENT).passed


@needs_bwrap
def test_tests_that_would_pass_anything_are_refused():
    with pytest.raises(DataError, match="never called"):
        judge_program("def f(): return 1", "assert True", names=["f"], limits=PATIENT)


@needs_bwrap
def test_tests_that_cannot_judge_from_outside_are_an_error_and_no_score():
    with pytest.raises(DataError, match="cannot leave their sandbox"):
        judge_program("def f(g): return g(1)", "assert f(lambda x: x) == 1", names=["f"], limits=PATIENT)


@needs_bwrap
def test_a_program_with_stdin():
    outcome = run_python("import sys\nprint(sum(map(int, sys.stdin)))", stdin="1\n2\n3\n", limits=PATIENT)
    assert (outcome.status, outcome.stdout) == ("ran", "6\n")
    outcome = run_python("if __name__ == '__main__': raise ValueError('no')", limits=PATIENT)
    assert (outcome.status, outcome.reason) == ("failed", "ValueError: no")
    assert run_python("import os; os.kill(os.getpid(), 11)", limits=PATIENT).status == "killed"


@needs_bwrap
def test_output_is_bounded_while_it_is_read():
    outcome = run_python("import os\nwhile True: os.write(1, b'x' * 65536)", limits=PATIENT)
    assert outcome.status == "flooded"
    assert len(outcome.stdout) <= PATIENT.output_bytes + (1 << 16)


@needs_bwrap
def test_a_sandbox_that_does_not_start_is_an_error_and_no_verdict(monkeypatch):
    walls = sandbox.bwrap_arguments
    monkeypatch.setattr(sandbox, "bwrap_arguments", lambda *a, **k: [*walls(*a, **k), "--ro-bind", "/no/such/folder", "/x"])
    with pytest.raises(sandbox.SandboxFailed, match="before the program began"):
        run_python("pass")


def test_without_bwrap_there_is_a_refusal_that_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox.sandbox_unavailable.cache_clear()
    try:
        with pytest.raises(UsageError, match="apt-get install bubblewrap"):
            judge_program("def f(): return 1", "assert f() == 1", names=["f"])
    finally:
        sandbox.sandbox_unavailable.cache_clear()


def test_only_judge_says_passed():
    assert ProgramOutcome("ran").passed is False

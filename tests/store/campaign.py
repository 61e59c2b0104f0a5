"""The crash campaign: kill, starve, corrupt and cut the power of the store, and count what it lost.

    python -m tests.store.campaign            the short version, as in the tests
    python -m tests.store.campaign --full     the long one; writes results/store-campaign.txt

Every part returns a Tally: how often it tried, and a sentence for each promise that did not hold. The last part is the
test of the test: the same campaign against a store without its fsyncs or its rename must find such sentences.
"""

import argparse
import contextlib
import datetime
import errno
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch

from assay.errors import ArtifactError, AssayError, StoreError
from assay.store import checkpoint, durable, safetensors_files
from assay.store.checkpoint import Contents, open_checkpoint, step_folder, step_folders
from assay.store.ledger import Ledger, read_chain
from assay.verdict import proven
from tests.store.disks import Failing, Killing, Op, Recorder, Tree, Watched, after_power_cut, installed, lay_out
from tests.store.headers import mutated_files

ENOUGH = 10  # broken promises, after which a part need not go on
Say = Callable[[str, int, str], None]  # (what returned, step, digest)


@dataclass
class Tally:
    """Tally of a part of the campaign: what it tried, what it met on the way, and every promise it saw broken."""

    what: str
    tried: int = 0
    broken: list[str] = field(default_factory=list)
    met: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        met = ", ".join(f"{count:,} {name}" for name, count in sorted(self.met.items()))
        met = f" ({met})" if met else ""
        lines = [f"{self.what}: {self.tried:,} tried, {len(self.broken):,} broken promises{met}"]
        lines += [f"    {re.sub('/[^ ]*campaign-[^/]*/', '', sentence)}" for sentence in self.broken[:2]]
        return "\n".join(lines)


def contents(step: int, floats: int = 8) -> Contents:
    """A checkpoint of two shards, optimizer, probes and trainer state; each step differs in every tensor."""
    rows = torch.arange(floats, dtype=torch.float32) + step
    return Contents("model", {"embed": rows, "head": rows.to(torch.bfloat16)}, {"config.json": b'{"made": true}'},
                    {"parent": None, "base": None}, {"logits": rows[:4]}, {"moment": -rows}, {"step": step})


def live(folder: Path, first: int, last: int, say: Say, floats: int = 8) -> None:
    """Live as a run does: save, hallmark, log, retain; `say` tells the outside what has returned and must now hold."""
    with contextlib.closing(Ledger(folder / "ledger.jsonl")) as ledger:
        for step in range(first, last + 1):
            where = step_folder(folder / "checkpoints", step)
            saved = checkpoint.write_checkpoint(where, contents(step, floats), max_shard_bytes=floats * 4)
            say("saved", step, saved.digest)
            checkpoint.write_hallmark(saved, [proven("made", "for the campaign")])
            say("hallmarked", step, saved.digest)
            say("logged", step, ledger.append("saved", step=step, digest=saved.digest))
            checkpoint.delete_old_checkpoints(folder / "checkpoints", keep=2)


def broken_promises(folder: Path, said: list[tuple[str, int, str]]) -> Iterator[str]:
    """Promises that `said` claims and the disk does not hold, and whatever is visible but not whole."""
    found = {}
    for path in step_folders(folder / "checkpoints"):
        try:
            found[path.name] = open_checkpoint(path)
        except AssayError as error:
            yield f"half-written and visible: {error}"
    saved = {step: digest for what, step, digest in said if what == "saved"}
    for step in saved:
        kept = found.get(f"step-{step:06d}")
        if sum(name > f"step-{step:06d}" for name in found) >= 2:
            continue  # two newer ones are good, so that retention may have taken this one
        if kept is None or kept.digest != saved[step]:
            yield f"lost: the save of step {step} returned, and it is not there"
        elif ("hallmarked", step, saved[step]) in said and kept.hallmark is None:
            yield f"lost: the hallmark of step {step} was written, and it is not there"
    newest, _ = checkpoint.latest_checkpoint(folder / "checkpoints")
    if saved and (newest is None or newest.step is None or newest.step < max(saved)):
        yield f"latest is {newest and newest.step}, and step {max(saved)} was saved"
    yield from _broken_ledger(folder / "ledger.jsonl", [digest for what, _, digest in said if what == "logged"])


def _broken_ledger(path: Path, logged: list[str]) -> Iterator[str]:
    try:
        chain = read_chain(path)
    except ArtifactError as error:
        yield f"the ledger is refused: {error}"
        return
    heads = {event["previous"] for event in chain.events} | {chain.head}
    for digest in logged:
        if digest not in heads:
            yield f"lost: an event of the ledger whose append returned ({digest[:12]})"


# --- 1 and 2: killed


class Writer:
    """A process of its own that runs `work(say)`; it may be killed at any moment, and what it said is still known."""

    def __init__(self, work: Callable[[Say], None], *, held: bool = False) -> None:
        self._from, said = os.pipe()
        go, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            if held:
                os.read(go, 1)
            status = 1
            try:
                work(lambda *what: (os.write(said, json.dumps(what).encode() + b"\n"), None)[1])
                status = 0
            finally:
                os._exit(status)
        os.close(said)
        os.close(go)

    def release(self) -> None:
        os.close(self._go)
        self._go = -1

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def said(self) -> list[tuple[str, int, str]]:
        """Everything it said, once it is dead."""
        with open(self._from, "rb") as pipe:
            lines = pipe.read().splitlines()
        _, status = os.waitpid(self.pid, 0)
        assert status in (0, signal.SIGKILL), f"the writer fell over by itself: {status}"
        if self._go >= 0:
            os.close(self._go)
        return [tuple(json.loads(line)) for line in lines]


def killed_at_random(times: int, seed: int, floats: int = 64 << 10) -> Tally:
    """kill -9 after a random time; the next writer goes on in the same folder, so that it also meets what was left."""
    tally = Tally("kill -9 at random points of saves")
    chance = random.Random(seed)
    while tally.tried < times:
        with _place() as folder:  # a fresh one now and then keeps the ledger short
            duration = _seconds_of(lambda: live(folder, 1, 2, _ignore, floats)) / 2
            said: list[tuple[str, int, str]] = []
            for _ in range(min(100, times - tally.tried)):
                first = int(step_folders(folder / "checkpoints")[-1].name[5:]) + 1
                writer = Writer(partial(live, folder, first, first + 100, floats=floats))
                time.sleep(chance.uniform(0, 2.5 * duration))
                writer.kill()
                said += writer.said()
                tally.tried += 1
                _count_remains(folder / "checkpoints", tally)
                tally.broken += broken_promises(folder, said)
            tally.broken += _left_over(folder, floats)
    return tally


def killed_at_every_operation(fast: bool = False, stride: int = 1) -> Tally:
    """Our own shim kills the process instead of each operation (or one of `stride`) of one round of save, hallmark, log and retain."""
    tally = Tally("kill -9 at every disk operation of one round")
    with _place(fast) as folder:
        live(folder / "before", 1, 2, _ignore)
        for at in range(1, 10_000, stride):
            shutil.copytree(folder / "before", folder / "now")
            writer = Writer(partial(_live_killed, folder / "now", at))
            said = writer.said()
            tally.broken += broken_promises(folder / "now", said)
            shutil.rmtree(folder / "now")
            if ("done", 3, "") in said or len(tally.broken) >= ENOUGH:
                return tally
            tally.tried += 1
    raise AssertionError("a round has fewer operations")


def _live_killed(folder: Path, at: int, say: Say) -> None:
    with installed(Watched(Killing(at))):
        live(folder, 3, 3, say)
    say("done", 3, "")


def killed_at_every_syscall(only: set[str] | None = None) -> Tally:
    """strace kills the process at the n-th call of every kind (or `only` of some) that one round makes, for every n.

    It counts for each thread on its own; all that changes the disk is done by one.
    """
    tally = Tally("kill -9 at every system call of one round (strace)")
    with _place() as folder:
        live(folder / "before", 1, 2, _ignore)
        counts = _syscalls_of_one_round(folder)
        for name, count in sorted((name, counts[name]) for name in only or counts):
            for at in range(1, count + 1):
                injection = ["-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={at}"]
                said = _under_strace(folder, injection, "/dev/null")
                tally.tried += 1
                tally.met["ran to the end"] += ("done", 3, "") in said
                tally.broken += broken_promises(folder / "now", said)
    return tally


def _syscalls_of_one_round(folder: Path) -> Counter[str]:
    log = folder / "strace.log"
    said = _under_strace(folder, [], str(log))
    assert ("done", 3, "") in said, "strace let the round finish"
    calls = Counter(re.findall(r"^(\d+) +(\w+)\(", log.read_text(), re.MULTILINE))
    most: Counter[str] = Counter()
    for (_, name), count in calls.items():
        most[name] = max(most[name], count)
    return Counter({name: count for name, count in most.items() if name not in ("exit", "exit_group")})


def _under_strace(folder: Path, options: list[str], log: str) -> list[tuple[str, int, str]]:
    shutil.rmtree(folder / "now", ignore_errors=True)
    shutil.copytree(folder / "before", folder / "now")

    def work(say: Say) -> None:
        live(folder / "now", 3, 3, say)
        say("done", 3, "")

    writer = Writer(work, held=True)
    command = ["strace", "-f", "-p", str(writer.pid), "-o", log, *options]
    strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert strace.stderr is not None
    assert "attached" in strace.stderr.readline(), "strace may not attach here"
    writer.release()
    said = writer.said()
    strace.wait()
    strace.stderr.close()
    return said


def can_strace() -> bool:
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode == 0


# --- 3: the disk refuses


def starved(stride: int = 1) -> Tally:
    """ENOSPC, EIO, EIO from then on, and a short write at every operation of one round."""
    tally = Tally("ENOSPC, EIO, a dead disk and short writes at every disk operation of one round")
    kinds = {"ENOSPC": (errno.ENOSPC, 1), "EIO": (errno.EIO, 1), "dead disk": (errno.EIO, 10**6),
             "short writes": (None, 1)}
    with _place(fast=True) as folder:
        live(folder / "before", 1, 2, _ignore)
        for name, (fault, lasting) in kinds.items():
            for at in range(1, 10_000, stride):
                shutil.copytree(folder / "before", folder / "now")
                failing = Failing(at, fault, lasting)
                _starve(folder / "now", failing, f"{name} at operation {at}", tally)
                shutil.rmtree(folder / "now")
                if failing.calls < at:
                    break
                tally.tried += 1
                tally.met[name] += 1
    return tally


def _starve(folder: Path, failing: Failing, fault: str, tally: Tally) -> None:
    said: list[tuple[str, int, str]] = []
    error: AssayError | None = None
    with installed(Watched(failing)):
        try:
            live(folder, 3, 3, lambda *what: said.append(what))
        except StoreError as refused:
            error = refused
        except (OSError, AssayError) as wrong:
            tally.broken.append(f"{fault}: {type(wrong).__name__} instead of StoreError: {wrong}")
    happened = failing.at <= failing.calls
    if failing.fault is None and error is not None:
        tally.broken.append(f"{fault}: a short write is no error, yet: {error}")
    if failing.lasting > 1 and happened and error is None:
        tally.broken.append(f"{fault}: nothing was raised")
    if failing.fault == errno.ENOSPC and error is not None and "full" not in str(error):
        tally.broken.append(f"{fault}: the error does not say that the disk is full: {error}")
    tally.broken += [f"{fault}: {sentence}" for sentence in broken_promises(folder, said)]
    tally.broken += [f"{fault}: afterwards: {sentence}" for sentence in _left_over(folder)]


def _left_over(folder: Path, floats: int = 8) -> Iterator[str]:
    """A healthy round after trouble succeeds, and leaves nothing half-written behind."""
    first = int(step_folders(folder / "checkpoints")[-1].name[5:]) + 1
    said: list[tuple[str, int, str]] = []
    live(folder, first, first, lambda *what: said.append(what), floats)
    yield from broken_promises(folder, said)
    for path in folder.rglob(f"{durable.PARTIAL}*"):
        if path.parent == folder / "checkpoints":
            yield f"{path.name} was never swept"


# --- 4: flipped bytes


def flipped(masks: tuple[int, ...], stride: int = 1) -> Tally:
    """Every byte of a small checkpoint, manifest and hallmark included, and of a ledger (or one of `stride`): changed, and refused."""
    tally = Tally("every byte position of a small checkpoint and ledger flipped")
    with _place(fast=True) as folder:
        live(folder, 1, 1, _ignore)
        where = step_folder(folder / "checkpoints", 1)
        for path in sorted(where.iterdir()):
            _flip_each(path, masks, lambda: open_checkpoint(where), tally, stride)
        _flip_each(folder / "ledger.jsonl", masks, Ledger(folder / "ledger.jsonl").events, tally, stride)
        tally.broken += broken_promises(folder, [])
    return tally


def _flip_each(path: Path, masks: tuple[int, ...], read: Callable[[], Any], tally: Tally, stride: int) -> None:
    original = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for position, byte in itertools.islice(enumerate(original), 0, None, stride):
            for mask in masks:
                os.pwrite(file.fileno(), bytes([byte ^ mask]), position)
                tally.tried += 1
                try:
                    read()
                    tally.broken.append(f"{path.name}: byte {position} ^ {mask:#04x} was accepted")
                except ArtifactError:
                    pass
            os.pwrite(file.fileno(), bytes([byte]), position)
    tally.met["bytes"] += len(range(0, len(original), stride))


# --- 5: the power is cut


def power_cut(rounds: int, forgets: "Forgets | None" = None) -> Tally:
    """Cut the power after every operation of a run, and look at the worst disks that this may leave."""
    tally = Tally("power cut after every operation of a run")
    with _place(fast=True) as folder:
        root = folder / "recorded"
        root.mkdir()
        recorder = Recorder(root)
        with installed(Watched(_forgetting(forgets, recorder) if forgets else recorder)):
            live(root, 1, rounds, lambda *what: recorder.mark(what))
        tally.met["operations"] = len(recorder.ops)
        seen: set[str] = set()
        for tree, said in _cuts(recorder.ops):
            tally.tried += 1
            if (key := repr((_visible(tree), said))) not in seen:
                seen.add(key)
                tally.broken += _judged(tree, said, folder / "cut")
            if len(tally.broken) >= ENOUGH:
                break
        tally.met["different to the eye"] = len(seen)
    return tally


def _cuts(ops: list[Op]) -> Iterator[tuple[Tree, list[tuple[str, int, str]]]]:
    """A disk, and what the program had said when it lost power."""
    for end in range(1, len(ops) + 1):
        said = [op.note for op in ops[:end] if op.kind == "mark"]
        for tree in after_power_cut(ops[:end]):
            yield tree, said


def _visible(tree: Tree) -> Tree:
    """Without the insides of what no reader opens."""
    hidden = (durable.PARTIAL, durable.TRASH)
    return {name: _visible(node) if isinstance(node, dict) else node
            for name, node in tree.items() if not name.startswith(hidden)}


def _judged(tree: Tree, said: list[tuple[str, int, str]], folder: Path) -> list[str]:
    lay_out(tree, folder)
    broken = list(broken_promises(folder, said))
    shutil.rmtree(folder)
    return broken


# --- 6: hostile headers


def header_fuzz(count: int, seed: int) -> Tally:
    """Mutated safetensors files: no crash, no hang, and none accepted that the safetensors library refuses."""
    tally = Tally("mutated safetensors headers")
    with _place(fast=True) as folder:
        path = folder / "mutated.safetensors"
        for data in mutated_files(count, seed):
            path.write_bytes(data)
            began = time.process_time()  # a busy machine is not the reader's fault
            ours = _accepts(lambda: safetensors_files.read_tensors(path), ArtifactError)
            if (taken := time.process_time() - began) > 1:
                tally.broken.append(f"took {taken:.1f} s: {data[:200]!r}")
            theirs = _accepts(partial(safetensors.deserialize, data), safetensors.SafetensorError)
            tally.tried += 1
            tally.met["accepted"] += ours
            tally.met["accepted by the library"] += theirs
            if ours and not theirs:
                tally.broken.append(f"accepted, and the library refuses it: {data[:200]!r}")
    return tally


def _accepts(read: Callable[[], Any], refusal: type[Exception]) -> bool:
    try:
        read()
    except refusal:
        return False
    return True


# --- 7: the test of the test


FILES, FOLDERS, LEDGER = "fsync of files", "fsync of folders", "fdatasync of the ledger"
Forgets = Callable[[str, int], bool]  # (which kind, the how-manieth of all): is this one left out?


def _forgetting(forgets: Forgets, around: Callable[..., Any]) -> Callable[..., Any]:
    """A disk that never hears of some fsyncs."""
    numbers = itertools.count(1)

    def call(name: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        if name not in ("sync", "sync_data"):
            return around(name, operation, *arguments)
        is_folder = stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
        kind = LEDGER if name == "sync_data" else FOLDERS if is_folder else FILES
        return None if forgets(kind, next(numbers)) else around(name, operation, *arguments)
    return call


@contextlib.contextmanager
def written_in_place() -> Iterator[None]:
    """A store without the rename: folders are filled where all can see them."""
    @contextlib.contextmanager
    def write_there(final: Path, *, needed: int = 0) -> Iterator[Path]:
        durable.make_folder(final.parent)
        durable.disk.mkdir(final)
        yield final
        durable.sync_folder(final)
        durable.sync_folder(final.parent)

    kept = durable.new_folder
    durable.new_folder = write_there
    try:
        yield
    finally:
        durable.new_folder = kept


def tests_of_the_test(full: bool) -> Iterator[tuple[Tally, bool]]:
    """The campaign against a store that is broken on purpose, which it must find out."""
    for names in [(FILES, FOLDERS, LEDGER), (FILES,), (FOLDERS,), (LEDGER,)]:
        tally = power_cut(3, partial(_is_among, names))
        tally.what = f"broken on purpose, without the {' and '.join(names)}: power cut"
        yield tally, bool(tally.broken)
    with written_in_place():
        parts = [lambda: power_cut(1), lambda: killed_at_every_operation(fast=True)]
        for part in parts + [lambda: killed_at_random(20, seed=1)] * full:
            tally = part()
            tally.what = f"broken on purpose, without the rename: {tally.what}"
            yield tally, bool(tally.broken)
    if full:
        tally = each_fsync_left_out()
        yield tally, tally.tried > 0 and not tally.broken


def _is_among(names: tuple[str, ...], kind: str, number: int) -> bool:
    return kind in names


def each_fsync_left_out() -> Tally:
    """No fsync is idle: with any single one left out, a power cut breaks a promise."""
    tally = Tally("broken on purpose, without one fsync, whichever it is: power cut (broken: nobody missed it)")
    for left_out in range(1, 10_000):
        callers: list[str] = []

        def forgets(kind: str, number: int, left_out: int = left_out, callers: list[str] = callers) -> bool:
            if number == left_out:
                callers += [frame.name for frame in traceback.extract_stack() if "assay" in frame.filename]
            return number == left_out

        found = power_cut(3, forgets).broken
        if not callers:
            break
        if callers == ["delete_old_checkpoints", "sync_folder"]:  # matters after a crash only; test_checkpoint has that case
            continue
        tally.tried += 1
        if not found:
            tally.broken.append(f"nobody missed number {left_out}: {' → '.join(callers)}")
    return tally


# --- the whole


def run(full: bool) -> Iterator[tuple[Tally, bool]]:
    """Each part's tally, and whether it is as it must be."""
    parts: list[Callable[[], Tally]] = [
        lambda: killed_at_random(3000 if full else 20, seed=0),
        lambda: killed_at_every_operation(fast=not full),
        lambda: starved(1 if full else 5),
        lambda: flipped((0x01, 0x80, 0xFF) if full else (0x04,)),
        lambda: power_cut(4 if full else 3),
        lambda: header_fuzz(1_000_000 if full else 2000, seed=0),
    ]
    if full and can_strace():
        parts.append(killed_at_every_syscall)
    for part in parts:
        tally = part()
        yield tally, tally.tried > 0 and not tally.broken
    yield from tests_of_the_test(full)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the long version; writes results/store-campaign.txt")
    full = parser.parse_args().full
    torch.set_num_threads(1)
    lines = [_heading(full)]
    print(lines[0], flush=True)
    good = True
    for tally, as_it_must in _timed(run(full)):
        good = good and as_it_must
        lines.append(f"{'as it must' if as_it_must else 'FAILED    '}  {tally}")
        print(lines[-1], flush=True)
    lines.append("every promise held, and every broken store was found out" if good else "FAILED")
    print(lines[-1])
    if full:
        Path("results/store-campaign.txt").write_text("\n".join(lines) + "\n")
    return 0 if good else 1


def _timed(tallies: Iterator[tuple[Tally, bool]]) -> Iterator[tuple[Tally, bool]]:
    began = time.monotonic()
    for tally, as_it_must in tallies:
        tally.what += f" [{time.monotonic() - began:.0f} s]"
        yield tally, as_it_must
        began = time.monotonic()


def _heading(full: bool) -> str:
    with _place() as folder:
        command = ["df", "--output=fstype", str(folder)]
        filesystem = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()[-1]
    return (f"$ python -m tests.store.campaign{' --full' if full else ''}\n"
            f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, python {platform.python_version()}, "
            f"torch {torch.__version__}, safetensors {safetensors.__version__}, "
            f"{platform.system()} {platform.release().split('-')[0]}, {filesystem}, {os.cpu_count()} cores\n")


@contextlib.contextmanager
def _place(fast: bool = False) -> Iterator[Path]:
    """A folder on a real disk, or in memory where only the bytes matter."""
    memory = "/dev/shm" if fast and os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=memory) as folder:
        yield Path(folder)


def _count_remains(folder: Path, tally: Tally) -> None:
    names = os.listdir(folder)
    tally.met["left a half-written folder"] += any(name.startswith(durable.PARTIAL) for name in names)
    tally.met["left a half-removed one"] += any(name.startswith(durable.TRASH) for name in names)


def _seconds_of(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _ignore(what: str, step: int, digest: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())

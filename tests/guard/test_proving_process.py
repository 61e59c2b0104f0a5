"""Kept proving processes: the verdicts of a fresh one, what they remember and say so, and what becomes of one that dies or hangs."""

import importlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.guard import artifact_checks, behaviour_checks, proof, proving_process
from assay.guard.kept_artifacts import KeptArtifacts, proof_device
from assay.guard.proof import ProofRequest, Prover, examine_artifact, prove, prove_apart, prove_checkpoint
from assay.guard.proof_subject import ProofSampling
from assay.guard.proving_process import GPU_TO_ITSELF, LIBRARIES, PROVING_PROCESSES, ProvingProcess
from assay.store.artifact import open_artifact
from assay.store.checkpoint import open_checkpoint
from assay.store.export_artifact import export_artifact
from assay.testing.tiny_models import save_adapter, save_model, tiny_model
from assay.verdict import Outcome, Verdict, overall, proven, without_optional

QUICK = ProofSampling(samples=0)
pytestmark = pytest.mark.usefixtures("fresh_proofs")


def outcomes(verdicts: list[Verdict]) -> dict[str, Outcome]:
    return {verdict.check: verdict.outcome for verdict in verdicts}


def reasons(verdicts: list[Verdict]) -> dict[str, str]:
    return {verdict.check: verdict.reason for verdict in verdicts}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", tiny_model()).folder


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return save_adapter(tmp_path / "adapter", base).folder


@pytest.fixture
def kept() -> Iterator[ProvingProcess]:
    with PROVING_PROCESSES.keeping():
        PROVING_PROCESSES.start_early(1, "cpu")
        yield PROVING_PROCESSES._idle[0]


@pytest.fixture(scope="module")
def lasting() -> Iterator[ProvingProcess]:
    """Proving process for tests that end no process: to start one takes longer than their proofs, and it knows nothing of the next test's
    folders."""
    process = ProvingProcess(1, "cpu")
    yield process
    process.kill()
    process.stop()


@pytest.fixture
def lent(lasting: ProvingProcess) -> Iterator[ProvingProcess]:
    """Replacement of `kept`."""
    with PROVING_PROCESSES.keeping():
        lasting.asked = 0
        PROVING_PROCESSES._idle.append(lasting)
        yield lasting
        PROVING_PROCESSES._idle.remove(lasting)


def test_a_kept_process_gives_a_fresh_ones_verdicts_and_says_what_it_kept(base: Path, adapter: Path, lent: ProvingProcess):
    request = ProofRequest(str(adapter), against=str(base), probing=QUICK)
    fresh = examine_artifact(request)
    first, second = prove(request), prove_checkpoint(adapter, against=str(base), probing=QUICK)
    assert lent.asked == 2
    assert outcomes(first) == outcomes(second) == outcomes(fresh)
    assert "earlier proof of this process" not in reasons(first)["whole"]
    assert f"{base} is as it was when an earlier proof of this process hashed it" in reasons(second)["whole"]
    mark = open_checkpoint(adapter).hallmark
    assert mark is not None
    assert mark["verdicts"][0]["evidence"]["kept_open"] == [str(base)]


def test_a_rehearsal_leaves_the_model_open_for_the_first_proof_which_waits_for_it(base: Path, adapter: Path, lent: ProvingProcess,
                                                                                  monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 37, 1 << 37))
    Prover().rehearse(base, QUICK)
    found = prove(ProofRequest(str(adapter), against=str(base), probing=QUICK))
    assert lent.asked == 2
    assert outcomes(found)["whole"] is Outcome.PROVEN
    assert "earlier proof of this process" in reasons(found)["whole"]
    assert not PROVING_PROCESSES._rehearsing


def test_a_model_whose_proofs_take_much_of_a_gpu_is_not_rehearsed(base: Path, lent: ProvingProcess, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 23, 1 << 23))
    Prover().rehearse(base, QUICK)
    assert lent.asked == 0


def test_what_changed_since_it_was_kept_is_read_again(base: Path, adapter: Path):
    kept, request = KeptArtifacts(), ProofRequest(str(adapter), against=str(base), probing=QUICK)
    assert Outcome.REFUTED not in outcomes(examine_artifact(request, kept)).values()
    file = base / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        last = weights.read(1)
        weights.seek(-1, os.SEEK_END)
        weights.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a tool may that keeps times
    assert "hash to" in reasons(examine_artifact(request, kept))["architecture"]


def test_what_is_proven_is_never_kept(base: Path):
    kept, request = KeptArtifacts(), ProofRequest(str(base), probing=QUICK)
    examine_artifact(request, kept)
    assert kept._kept == []


def test_a_kept_process_that_dies_is_replaced_by_a_fresh_one(base: Path, kept: ProvingProcess):
    request, kept.asked = ProofRequest(str(base), probing=QUICK, checks=("hashes", "loaded", "values")), 1  # it has proven before
    assert kept.process is not None
    pid = kept.process.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Thread(target=lambda: (time.sleep(0.3), os.kill(pid, signal.SIGKILL))).start()
    verdicts = prove(request)
    assert kept.asked == 2
    assert not kept.alive
    assert overall(without_optional(verdicts)) is Outcome.PROVEN


def test_a_process_that_dies_on_its_first_proof_proves_nothing(base: Path, kept: ProvingProcess):
    assert kept.process is not None
    pid = kept.process.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Thread(target=lambda: (time.sleep(0.3), os.kill(pid, signal.SIGKILL))).start()
    (verdict,) = prove(ProofRequest(str(base), probing=QUICK))
    assert (verdict.check, verdict.outcome) == ("process", Outcome.UNPROVEN)


def test_a_kept_process_that_hangs_proves_nothing_and_is_gone(base: Path, kept: ProvingProcess):
    assert kept.process is not None
    os.kill(kept.process.pid, signal.SIGSTOP)
    (verdict,) = prove_checkpoint(base, timeout=0.3)
    assert (verdict.check, verdict.outcome) == ("process", Outcome.UNPROVEN)
    assert open_checkpoint(base).hallmark is None
    assert not kept.alive
    assert PROVING_PROCESSES._idle == []


def test_processes_end_with_whoever_kept_them(kept: ProvingProcess):
    process = kept.process
    assert process is not None
    with PROVING_PROCESSES.keeping():
        pass
    assert kept.alive
    PROVING_PROCESSES._keepers -= 1
    with PROVING_PROCESSES.keeping():
        pass
    PROVING_PROCESSES._keepers += 1
    assert process.poll() is not None


# ---------------------------------------------------------------- on another device


def test_on_another_device_the_verdicts_are_the_same(base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`cpu:0` is another device by name: all that a GPU's proof moves, shares and keeps, is moved, shared and kept."""
    bound = export_artifact(open_artifact(adapter), "merged", tmp_path / "merged", "float32")
    requests = [ProofRequest(str(adapter), str(base), probing=QUICK),
                ProofRequest(str(tmp_path / "merged"), str(adapter), expect="same", bound=bound, probing=QUICK)]
    here = [outcomes(examine_artifact(request)) for request in requests]
    monkeypatch.setattr(proof, "_device", lambda *_: ("cpu:0", None))
    kept = KeptArtifacts()
    there = [examine_artifact(request, kept) for request in (*requests, requests[0])]
    assert [outcomes(verdicts) for verdicts in there] == [*here, here[0]]
    assert {verdict.evidence["device"] for verdicts in there for verdict in verdicts if verdict.check == "whole"} == {"cpu:0"}


def test_an_exported_adapter_is_compared_part_by_part(base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its base, however large, is not merged for it; an adapter that differs in one number is another."""
    bound = export_artifact(open_artifact(adapter), "peft", tmp_path / "peft")
    request = ProofRequest(str(tmp_path / "peft"), str(adapter), expect="same", bound=bound, probing=QUICK)
    with monkeypatch.context() as patched:
        patched.setattr(artifact_checks, "merged_tensors", lambda *_: pytest.fail("the base was merged"))
        assert outcomes(examine_artifact(request))["lineage"] is Outcome.PROVEN
    one, other = open_artifact(adapter), open_artifact(tmp_path / "peft")
    assert artifact_checks._same_adapter(one, other)
    next(iter(other.patch.low_rank.values()))[0].right.view(-1)[0] += 1
    assert not artifact_checks._same_adapter(one, other)


def test_a_kept_base_is_loaded_once_by_either_library(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch):
    loaded, load = [], behaviour_checks._load_with_transformers
    monkeypatch.setattr(behaviour_checks, "_load_with_transformers",
                        lambda artifact, **options: loaded.append(artifact.path) or load(artifact, **options))
    monkeypatch.setattr(proof, "_device", lambda *_: ("cpu:0", None))
    kept, request = KeptArtifacts(), ProofRequest(str(adapter), str(base), probing=QUICK)
    first, second = examine_artifact(request, kept), examine_artifact(request, kept)
    assert loaded == [base]
    assert outcomes(first) == outcomes(second)
    assert outcomes(second)["consumer"] is Outcome.PROVEN
    with torch.no_grad():  # a bit of the base that is kept in memory changes between two proofs
        kept._kept[0].model("cpu:0").get_parameter("norm.weight")[0] += 1
    assert "norm.weight" in reasons(examine_artifact(request, kept))["loaded"]


def test_a_device_that_fails_says_nothing_of_the_artifact(base: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proof, "_device", lambda *_: ("meta", None))
    verdicts = examine_artifact(ProofRequest(str(base), probing=QUICK))
    assert overall(without_optional(verdicts)) is Outcome.PROVEN
    assert "proven on the CPU, since the proof on meta died" in reasons(verdicts)["whole"]


@pytest.mark.parametrize(("free", "headroom", "device"), [(60, 0, "cuda"), (29, 0, "cpu"), (60, 40, "cpu"), (31, 0, "cuda")])
def test_a_proof_takes_the_gpu_only_where_the_run_will_not_miss_it(free: int, headroom: int, device: str, monkeypatch: pytest.MonkeyPatch):
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * gib, 80 * gib))
    found, why = proof_device("cuda", 20 * gib, headroom * gib)
    assert found == device
    assert (why is None) == (device == "cuda")
    assert proof_device("cpu", 20 * gib) == ("cpu", None)

@pytest.mark.usefixtures("lent")
def test_a_proof_in_two_processes_says_what_one_says(base: Path):
    """And where the bytes are damaged, both refuse them and it is said once."""
    request = ProofRequest(str(base), probing=QUICK)
    with PROVING_PROCESSES.keeping():
        PROVING_PROCESSES.start_early(1, "cpu", 2, libraries=False, alone=True)
        apart = prove_apart(request)
        assert [process.asked for process in PROVING_PROCESSES._idle] == [1, 1]
        assert [(v.check, v.outcome) for v in apart] == [(v.check, v.outcome) for v in examine_artifact(request)]
        weights = base / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        assert [v.check for v in prove_apart(request) if v.outcome is Outcome.REFUTED] == ["whole"]


@pytest.mark.parametrize(("early", "order"), [(["cuda", GPU_TO_ITSELF], {"device", "imports"}), (["cuda"], {"imports"})])
def test_only_where_no_run_waits_for_the_gpu_is_it_got_ready_beside_the_imports(early: list[str], order: set[str],
                                                                                monkeypatch: pytest.MonkeyPatch):
    seen, ready = set[str](), threading.Event()
    monkeypatch.setattr(proof, "_first_kernels", lambda _: (seen.add("device"), ready.set()))
    monkeypatch.setattr(proof, "WARM_LIBRARIES", ("json",))

    def importing(name: str) -> None:
        ready.wait(5 if GPU_TO_ITSELF in early else 0)
        assert seen | {"imports"} == order

    monkeypatch.setattr(importlib, "import_module", importing)
    proof._warm_up([*early, LIBRARIES], queue.SimpleQueue())
    assert ready.wait(5)


class Echo(ProvingProcess):
    """Answers everything, and imports nothing."""

    def start(self) -> None:
        self._unread = b""
        script = "import sys\nfor line in sys.stdin: print('{}', flush=True)"
        self.process = subprocess.Popen([sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                                        start_new_session=True)
        os.set_blocking(self._pipes()[0], False)


def test_where_all_that_were_started_early_are_busy_one_is_waited_for_and_one_that_died_is_replaced(monkeypatch: pytest.MonkeyPatch):
    """A new one would import for longer than the others prove."""
    monkeypatch.setattr(proving_process, "ProvingProcess", Echo)
    kept, got = proving_process.KeptProcesses(), list[ProvingProcess]()

    def take_another() -> threading.Thread:
        thread = threading.Thread(target=lambda: got.append(kept.take(1)))
        thread.start()
        thread.join(0.3)
        return thread

    with kept.keeping():
        kept.start_early(1, "cuda", 4)
        assert [process.device for process in kept._idle] == ["cuda", "cuda", "cuda", "cpu"]
        held = [kept.take(1) for _ in range(4)]
        waiting = take_another()
        assert not got
        kept.give_back(held[0])
        waiting.join(5)
        assert got == held[:1]
        waiting = take_another()
        held[1].kill()
        waiting.join(5)
        assert got[1] not in held
        for process in {*held, *got}:
            kept.give_back(process)


def test_one_that_rehearsed_is_waited_for_a_moment_and_taken_before_one_that_has_to_warm_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proving_process, "ProvingProcess", Echo)
    kept, got = proving_process.KeptProcesses(), list[ProvingProcess]()
    with kept.keeping():
        kept.start_early(1, "cuda", 2)
        new, known = kept._idle
        new.asked, known.rehearsed = 5, True
        assert kept.take(1) is known
        waiting = threading.Thread(target=lambda: got.append(kept.take(1)))
        waiting.start()
        waiting.join(0.3)
        assert not got
        kept.give_back(known)
        waiting.join(5)
        assert got == [known]
        monkeypatch.setattr(proving_process, "SOON", 0.1)
        assert kept.take(1) is new  # it is not waited for longer than warming up takes
        for process in (new, known):
            kept.give_back(process)


@pytest.mark.parametrize("ends_with_program", [False, True])
def test_a_program_that_ends_kills_its_processes_and_waits_for_none(ends_with_program: bool, monkeypatch: pytest.MonkeyPatch):
    waited, wait = list[bool](), subprocess.Popen.wait
    monkeypatch.setattr(proving_process, "ProvingProcess", Echo)
    monkeypatch.setattr(subprocess.Popen, "wait", lambda process, *given: waited.append(True) or wait(process, *given))
    kept = proving_process.KeptProcesses()
    kept.ends_with_program = ends_with_program
    with kept.keeping():
        kept.start_early(1, "cpu")
        process = kept._idle[0].process
    assert process is not None
    assert bool(waited) is not ends_with_program
    assert wait(process, 10) == -signal.SIGKILL


@pytest.mark.parametrize(("early", "beside", "at_once"), [(2, False, True), (1, False, False), (2, True, False)])
def test_kept_steps_are_replayed_meanwhile_where_several_processes_are_kept(early: int, beside: bool, at_once: bool, tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch):
    begun, replaying = list[str](), threading.Event()

    def prove_slowly(*_: Any, **__: Any) -> list[Verdict]:
        begun.append("with its replay" if replaying.wait(5 if at_once else 0.05) else "alone")
        return []

    monkeypatch.setattr(proof, "prove", prove_slowly)
    monkeypatch.setattr(proof, "ask_witness", lambda *_, **__: replaying.set() or [])
    monkeypatch.setattr(PROVING_PROCESSES, "_early", early)
    assert prove_checkpoint(tmp_path, records=[tmp_path], beside=beside) == []  # an empty folder carries no mark
    assert begun == ["with its replay" if at_once else "alone"]
    assert replaying.is_set()

def test_a_replay_begun_early_is_spoken_of_in_the_proof_of_the_next_checkpoint_and_made_once(tmp_path: Path,
                                                                                            monkeypatch: pytest.MonkeyPatch):
    asked, first, second = list[list[Path]](), tmp_path / "step-000001", tmp_path / "step-000002"

    def replayed(records: list[Path], *_: Any, **__: Any) -> list[Verdict]:
        asked.append(list(records))
        return [proven("witness", records[0].name)]

    monkeypatch.setattr(proof, "prove", lambda *_, **__: [])
    monkeypatch.setattr(proof, "ask_witness", replayed)
    monkeypatch.setattr(PROVING_PROCESSES, "_early", 2)
    for name in "ab":
        (tmp_path / name).mkdir()
    prover = Prover()
    prover.replay_early([first], QUICK)
    prover.replay_early([first], QUICK)
    while not asked:
        time.sleep(0.01)
    prover.start(tmp_path / "a", records=[first, second], beside=False)
    prover.start(tmp_path / "b", records=[first, second], beside=False)
    prover.replay_early([first, second], QUICK)
    said = {folder.name: [verdict.reason for verdict in verdicts] for folder, verdicts in prover.close()}
    assert said == {"a": ["step-000002", "step-000001"], "b": []}
    assert sorted(asked) == [[first], [second]]


def test_nothing_is_replayed_early_where_one_process_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It would wait for the proofs, and they for it."""
    asked = list[Path]()
    monkeypatch.setattr(proof, "ask_witness", lambda records, *_, **__: asked.extend(records) or [])
    monkeypatch.setattr(PROVING_PROCESSES, "_early", 1)
    prover = Prover()
    prover.replay_early([tmp_path], QUICK)
    list(prover.close())
    assert not asked

# ---------------------------------------------------------------- beside a loop


def test_on_a_gpu_proofs_wait_for_the_end_of_a_short_loop_and_go_one_by_one_beside_a_long_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proof, "usable_cores", lambda: 64)
    begun = list[tuple[str, bool]]()

    def prove_slowly(folder: Path, *, beside: bool, **_: Any) -> list[Verdict]:
        begun.append((folder.name, beside))
        time.sleep(0.1)
        return []

    monkeypatch.setattr(proof, "prove_checkpoint", prove_slowly)
    on_gpu, here = ProofSampling(0, "cuda"), ProofSampling(0, "cpu")
    short = Prover()
    short.start(Path("a"), probing=on_gpu)
    short.start(Path("b"), probing=here)
    while ("b", True) not in begun:
        time.sleep(0.01)
    time.sleep(0.2)
    assert begun == [("b", True)]
    short.wait_no_longer()
    assert {folder.name for folder, _ in short.close()} == {"a", "b"}
    assert begun[1:] == [("a", False)]

    begun.clear()
    long = Prover(patience=0.0)
    started = time.monotonic()
    for name in "cd":
        long.start(Path(name), probing=on_gpu)
    while long.busy:
        list(long.finished())
        time.sleep(0.01)
    assert sorted(begun) == [("c", True), ("d", True)]
    assert time.monotonic() - started >= 0.2


@pytest.mark.parametrize(("total", "at_once"), [(1 << 23, 1), (1 << 37, 2)])
def test_proofs_of_a_model_that_takes_much_of_a_gpu_go_one_by_one_also_when_the_loop_is_over(total: int, at_once: int, adapter: Path,
                                                                                          monkeypatch: pytest.MonkeyPatch):
    """Each in a process of its own they would each put the base there, and all but the first would find no room."""
    monkeypatch.setattr(proof, "usable_cores", lambda: 64)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total, total))
    running, most, changing = list[str](), list[int](), threading.Lock()

    def prove_slowly(folder: Path, **_: Any) -> list[Verdict]:
        with changing:
            running.append(folder.name)
            most.append(len(running))
        time.sleep(0.2)
        with changing:
            running.remove(folder.name)
        return []

    monkeypatch.setattr(proof, "prove_checkpoint", prove_slowly)
    prover = Prover()
    for beside in (True, False):  # one that waited for the loop, and one of its last checkpoint
        prover.start(adapter, probing=ProofSampling(0, "cuda"), beside=beside)
    assert len(list(prover.close())) == 2
    assert max(most) == at_once


def test_what_a_proof_takes_to_a_gpu_is_its_model_or_its_adapters_base_without_moments(base: Path, adapter: Path):
    weights = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    (base / "optimizer.safetensors").write_bytes(bytes(1000))
    assert proof.stored_bytes(base) == proof.proven_bytes(adapter) == weights
    assert proof.proven_bytes(base.with_name("nothing")) == 0

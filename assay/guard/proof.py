"""Proofs: a fresh process that knows nothing but the bytes on disk, and earns a checkpoint its hallmark.

`prove` asks a process of proving_entry.py, which opens the artifact through our loader and other people's, and returns a
verdict for every check. A check that crashes is refuted, not forgotten. `prove_checkpoint` also writes the outcome down:
hallmark.json where everything required is PROVEN, quarantine.json otherwise. `Prover` does so beside a training loop.
"""

import contextlib
import gc
import importlib.util
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from assay.errors import ArtifactError, AssayError, UsageError
from assay.guard.artifact_checks import check_fields, check_hashes, check_lineage, check_loaded, check_tokenizer, check_values
from assay.guard.behaviour_checks import check_answers, check_consumer, check_generations, check_health
from assay.guard.kept_artifacts import MUCH_OF_GPU, WORKSPACE, KeptArtifacts, fp32_bytes, gpu_turn, proof_device
from assay.guard.proof_subject import DEFAULT_SAMPLING, Expectation, ProofSampling, ProofSubject
from assay.guard.proving_process import (
    CORES_A_PROOF,
    FOR_THE_WITNESS,
    GPU_TO_ITSELF,
    LIBRARIES,
    MOST_PROOFS,
    PROVING_PROCESSES,
    WHERE_THERE_IS_ONE,
    ProvingProcess,
    processes_early,
    proof_threads,
    usable_cores,
)
from assay.guard.unknown_adapter import examine_unknown_adapter, why_unknown
from assay.model.placement import default_device
from assay.store.artifact import Artifact, interpret_artifact, locate_artifact, quarantines, read_artifact
from assay.store.checkpoint import STATE_STEM, Checkpoint, open_checkpoint, quarantine_checkpoint, write_hallmark
from assay.store.export_artifact import rounding_bound
from assay.store.safetensors_files import tensor_bytes
from assay.verdict import Outcome, Verdict, overall, proven, refuted, unproven, without_optional
from assay.witness.due_looks import LOOKS

PROOF_CHECKS: tuple[Callable[[ProofSubject], Verdict], ...] = (
    check_hashes, check_loaded, check_values, check_fields, check_tokenizer, check_answers, check_lineage, check_consumer,
    check_generations, check_health)
OTHER_LIBRARY = "consumer"
WARM_LIBRARIES = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "peft")
PROOF_TIMEOUT = 1800.0
_REPLAY_WORKSPACE = 8 << 30  # bytes of a GPU
REHEARSED = 8  # bytes of a GPU, at the most, that a rehearsal takes for one of its model's file
SHORT_LOOP = 60.0  # seconds: a loop on a GPU that is over by then is proven afterwards
_LOOK_AGAIN = 0.1  # seconds
ENDED_FROM_OUTSIDE = {signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP}  # says nothing about the artifact


@dataclass(frozen=True)
class ProofRequest:
    path: str
    against: str | None = None  # parent or source; None: the parent that the manifest names, where it is still there
    base: str | None = None
    expect: Expectation | None = None  # None: as the manifest says, else "moved"
    bound: float | None = None  # how far answers may be off where `same` is expected
    against_base: str | None = None  # the base of `against`, where that is an adapter
    probing: ProofSampling = DEFAULT_SAMPLING

    headroom: int = 0  # bytes of the GPU that the run will still take
    checks: tuple[str, ...] | None = None  # those that are made; None: all

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "ProofRequest":
        checks = fields.get("checks")
        return cls(**fields | {"probing": ProofSampling(**fields["probing"]), "checks": None if checks is None else tuple(checks)})

    @property
    def wanted(self) -> tuple[Callable[[ProofSubject], Verdict], ...]:
        return tuple(check for check in PROOF_CHECKS if self.checks is None or check_name(check) in self.checks)


def check_name(check: Callable[[ProofSubject], Verdict]) -> str:
    return check.__name__.removeprefix("check_")


def prove_apart(request: ProofRequest, *, timeout: float = PROOF_TIMEOUT) -> list[Verdict]:
    """Prove as `prove` does, with the check by another library in a process of its own, because importing that takes longer than all other
    checks: both read the files for themselves."""
    others = tuple(name for name in map(check_name, PROOF_CHECKS) if name != OTHER_LIBRARY)
    with ThreadPoolExecutor(1, "consumer") as beside:
        asked = beside.submit(prove, replace(request, checks=(OTHER_LIBRARY,)), timeout=timeout)
        found = prove(replace(request, checks=others), timeout=timeout)
        heard = asked.result()
    known = {verdict.check for verdict in found if verdict.outcome is Outcome.REFUTED}
    heard = [verdict for verdict in heard
             if verdict.check == OTHER_LIBRARY or (verdict.outcome is Outcome.REFUTED and verdict.check not in known)]
    place = next((place for place, verdict in enumerate(found) if verdict.check == "generations"), len(found))
    return [*found[:place], *heard, *found[place:]]


def prove(request: ProofRequest, *, timeout: float = PROOF_TIMEOUT, beside: bool = False) -> list[Verdict]:
    """Prove an artifact: every check, in a process that no trainer has touched: one that is kept for this, or a fresh one; it takes few
    cores where it runs `beside` a training loop. Raises UsageError where the request itself makes no sense."""
    process = PROVING_PROCESSES.take(proof_threads(beside=False), libraries=request.checks is None or OTHER_LIBRARY in request.checks)
    found = _ask(process, request, timeout, beside)
    if found is None and process.asked > 1:  # what it did before may have killed it: a fresh one has nothing but the artifact
        process.stop()
        process = ProvingProcess(proof_threads(beside=False))
        found = _ask(process, request, timeout, beside)
    if found is None:
        return [_death(process)]
    PROVING_PROCESSES.give_back(process)
    if "refused" in found:
        raise UsageError(found["refused"])
    return [Verdict(v["check"], Outcome(v["outcome"]), v["reason"], v["evidence"]) for v in found["verdicts"]]


def _ask(process: ProvingProcess, request: ProofRequest, timeout: float, beside: bool) -> dict[str, Any] | None:
    """Ask a proving process; None where it died."""
    try:
        return process.answer(asdict(request) | {"threads": proof_threads(beside)}, timeout)
    except TimeoutError:
        late = unproven("process", f"the proving process did not finish within {timeout:g} s, which says nothing of the artifact; "
                                   "prove it again where the machine is less busy")
        return {"verdicts": [late.to_json()]}


def _death(process: ProvingProcess) -> Verdict:
    code, words = process.ended(), process.last_words()
    if -code in ENDED_FROM_OUTSIDE:
        return unproven("process", f"the fresh process was ended by signal {-code} before it could say anything; prove it again")
    tail = words.splitlines()[-1:] or ["no output"]
    return refuted("process", f"the fresh process died with exit code {code}: {tail[0]}", stderr=words)


def prove_checkpoint(folder: Path, *, against: str | None = None, base: str | None = None, probing: ProofSampling = DEFAULT_SAMPLING,
                     timeout: float = PROOF_TIMEOUT, beside: bool = False, headroom: int = 0, records: Sequence[Path] = (),
                     replays: Sequence[Future[list[Verdict]]] = (), apart: bool = False) -> list[Verdict]:
    """Prove a checkpoint of ours and write the outcome into it. Bytes that do not even open stay as they are. `records` are steps that
    led to it, kept for the witness, who replays them meanwhile where several processes are kept; `replays` of others are under way.
    `apart`: in two processes."""
    request = ProofRequest(str(folder), against=against, base=base, probing=probing, headroom=headroom)
    replay = partial(ask_witness, records, probing.device, beside=beside, headroom=headroom)
    with ThreadPoolExecutor(1, "witness") as other:
        meanwhile = other.submit(replay) if records and not beside and PROVING_PROCESSES.several else None
        verdicts = prove_apart(request, timeout=timeout) if apart else prove(request, timeout=timeout, beside=beside)
        if records:
            verdicts += replay() if meanwhile is None else meanwhile.result()
    verdicts += [verdict for replayed in replays for verdict in replayed.result()]
    hashed = any(v.check == "whole" and v.outcome is Outcome.PROVEN for v in verdicts)  # every byte, by the proof itself
    try:
        checkpoint = open_checkpoint(folder, verify=not hashed)
    except ArtifactError:
        return verdicts  # nothing here can carry a mark: the store refuses it already
    hallmark_or_quarantine(checkpoint, verdicts)
    return verdicts


def ask_witness(records: Sequence[Path], device: str = "cpu", *, timeout: float = PROOF_TIMEOUT, beside: bool = False,
                headroom: int = 0) -> list[Verdict]:
    """Replay kept steps on a device, in a process that no trainer has touched. Where it is late or dies it has not spoken: that is
    UNPROVEN."""
    process = PROVING_PROCESSES.take(proof_threads(beside=False))
    try:
        found = process.answer({"records": [str(record) for record in records], "device": device, "headroom": headroom,
                                "threads": proof_threads(beside)}, timeout)
    except TimeoutError:
        found = None
    if found is None:
        process.stop()
        return [unproven("witness", f"{len(records)} kept step(s) were not replayed: the process died or took more than {timeout:g} s",
                         optional=True)]
    PROVING_PROCESSES.give_back(process)
    return [Verdict(v["check"], Outcome(v["outcome"]), v["reason"], v["evidence"]) for v in found["verdicts"]]


def hallmark_or_quarantine(checkpoint: Checkpoint, verdicts: list[Verdict]) -> None:
    if overall(without_optional(verdicts)) is Outcome.PROVEN:
        silent = [verdict for verdict in verdicts if verdict.check in ("witness", LOOKS) and verdict.outcome is Outcome.UNPROVEN]
        write_hallmark(checkpoint, without_optional(verdicts), unproven=silent)
    elif overall(without_optional(verdicts)) is Outcome.REFUTED:
        quarantine_checkpoint(checkpoint, verdicts)


def mark_judged(where: Path, proof: Sequence[Verdict], judged: Sequence[Verdict]) -> None:
    """Give a model that was made in one go its hallmark for what its proof found, once everything else was `judged`: whoever finds it
    after a kill must not take it for one that holds. What was refuted is quarantined."""
    against = [verdict for verdict in judged if verdict.outcome is Outcome.REFUTED and verdict not in proof]
    hallmark_or_quarantine(open_checkpoint(where), [*proof, *against])


def stored_bytes(model: Path) -> int:
    """Bytes of a folder's weight files, without an optimizer's; 0 where it is no folder."""
    files = list(model.glob("*.safetensors")) if model.is_dir() else []
    return sum(file.stat().st_size for file in files if not file.name.startswith(STATE_STEM))


def proven_bytes(folder: Path) -> int:
    """Bytes of weight files that a proof of this checkpoint takes to a GPU: its own, or those of an adapter's base. 0 where it does not
    open."""
    try:
        base = open_checkpoint(folder, verify=False).facts.get("base")
    except AssayError:
        return 0
    return stored_bytes(folder if base is None else Path(base["path"]))


def takes_much(stored: int, device: str) -> bool:
    """Whether proofs of a model with so many bytes of weight files take much of a GPU."""
    return stored > 0 and stored > torch.cuda.mem_get_info(device)[1] // (REHEARSED * MUCH_OF_GPU)


class Prover:
    """Proofs beside a training loop, one at a time or, where there are cores to spare, a few; the loop asks for what is finished and
    never waits. They are begun in the saver's thread and asked for in the loop's: without a lock one begun meanwhile would be lost.

    Two processes on one GPU take turns, and a loop of small steps was five times slower beside a proof. So on a GPU a proof waits for
    the end of the loop, unless that takes long: then they are made beside it, one at a time.
    """

    proves = True  # a proof leaves a mark in its checkpoint
    witnesses = True  # kept steps are replayed with the next proof

    def __init__(self, patience: float = SHORT_LOOP) -> None:
        self._pool = ThreadPoolExecutor(max(1, min(MOST_PROOFS, usable_cores() // CORES_A_PROOF)), "prove")
        self._pending: list[tuple[Path, Future[list[Verdict]]]] = []
        self._changing, self._turn = threading.Lock(), threading.Lock()
        self._replayers = ThreadPoolExecutor(FOR_THE_WITNESS, "replay")
        self._replays: dict[Path, Future[list[Verdict]]] = {}  # under way, until the proof of a later checkpoint takes them
        self._given: set[Path] = set()  # kept steps that a proof or a replay has
        self._patience, self._until = patience, math.inf  # when those that wait for the loop's end wait no longer
        self._no_waiting = threading.Event()

    def start_early(self, device: str = "cpu") -> None:
        """Processes that are ready for the first proofs, where there are cores for them now."""
        PROVING_PROCESSES.start_early(proof_threads(beside=False), device, processes_early())

    def rehearse(self, model: Path, probing: ProofSampling, headroom: int = 0) -> None:
        """The processes that wait prove the model that a run begins with, against itself, while the run gets ready; nobody reads what
        they find. Where its proofs would take much of the GPU they do not: the run comes first."""
        stored = stored_bytes(model)
        if not stored or takes_much(stored, probing.device):
            return
        request = ProofRequest(str(model), against=str(model), expect="moved", probing=probing, headroom=headroom)
        PROVING_PROCESSES.rehearse(asdict(request) | {"threads": proof_threads(beside=True)}, PROOF_TIMEOUT)

    def replay_early(self, records: Sequence[Path], probing: ProofSampling, headroom: int = 0) -> None:
        """Replay kept steps, where several processes are kept, before the checkpoint is written whose proof will speak of them."""
        with self._changing:
            for record in [each for each in records if each not in self._given] if PROVING_PROCESSES.several else []:
                self._given.add(record)
                self._replays[record] = self._replayers.submit(ask_witness, [record], probing.device, headroom=headroom)

    def start(self, folder: Path, *, against: str | None = None, base: str | None = None, probing: ProofSampling = DEFAULT_SAMPLING,
              beside: bool = True, headroom: int = 0, records: Sequence[Path] = ()) -> None:
        """Begin the proof of a checkpoint. Of `records`, kept steps that led to it, those that nobody replays yet are replayed with it."""
        with self._changing:
            replays = [self._replays.pop(record) for record in records if record in self._replays]
            new = [record for record in records if record not in self._given]
            self._given.update(new)
            ask = partial(prove_checkpoint, folder, against=against, base=base, probing=probing, headroom=headroom, records=new,
                          replays=replays)
            self._until = min(self._until, time.monotonic() + self._patience)
            asked = ask if probing.device == "cpu" else partial(self._in_turn, ask, folder, probing.device)
            self._pending.append((folder, self._pool.submit(asked, beside=beside)))
            crowded = len(self._pending) > MOST_PROOFS  # nothing is retired while proofs wait, and a disk is finite
        if crowded:
            self._until = 0.0

    def _in_turn(self, ask: Callable[..., list[Verdict]], folder: Path, device: str, *, beside: bool) -> list[Verdict]:
        """Run proofs in turn: those of a large model go one after another even when the loop is over, and so to the one process that has
        its base on the GPU: a second one would find no room there beside the first, and take minutes on the CPU."""
        while beside and not self._no_waiting.is_set():
            if time.monotonic() >= self._until and self._turn.acquire(blocking=False):
                try:
                    return ask(beside=True)
                finally:
                    self._turn.release()
            self._no_waiting.wait(_LOOK_AGAIN)
        with self._turn if takes_much(proven_bytes(folder), device) else contextlib.nullcontext():
            return ask(beside=False)

    def wait_no_longer(self) -> None:
        """The loop is over, or stands still until its proofs are made."""
        self._no_waiting.set()

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def finished(self) -> Iterator[tuple[Path, list[Verdict]]]:
        """Finished proofs, each given away when it is asked for: behind one that raises, or stops the run, the others are still here."""
        while (ended := self._next_ended()) is not None:
            folder, future = ended
            yield folder, future.result()

    def close(self) -> Iterator[tuple[Path, list[Verdict]]]:
        """Wait for every proof under way."""
        self.wait_no_longer()
        self._pool.shutdown(wait=True)
        self._replayers.shutdown(wait=True)
        return self.finished()

    def _next_ended(self) -> tuple[Path, "Future[list[Verdict]]"] | None:
        with self._changing:
            place = next((place for place, (_, future) in enumerate(self._pending) if future.done()), None)
            return None if place is None else self._pending.pop(place)


def examine_artifact(request: ProofRequest, kept: KeptArtifacts | None = None) -> list[Verdict]:
    """The checks themselves, in this process. A stage that refuses the artifact refutes it, and what could not run is UNPROVEN.

    `kept` holds what earlier proofs of this process have opened.
    """
    kept = kept or KeptArtifacts()
    kept.begin()
    try:
        return _examined(request, kept)
    finally:
        kept.end()


def _examined(request: ProofRequest, kept: KeptArtifacts) -> list[Verdict]:
    place = locate_artifact(request.path)
    try:
        raw = read_artifact(place, every_byte=request.checks != (OTHER_LIBRARY,))
    except ArtifactError as error:
        return [refuted("whole", str(error)), *_not_run(request, "the bytes were refused")]
    whole = proven("whole", f"every file is there, with the right size and a valid header: {len(raw.tensors)} tensors")
    if (why := why_unknown(raw)) is not None:
        return [whole, *examine_unknown_adapter(raw, why, request.base)]
    try:
        artifact = interpret_artifact(raw, base=request.base, opened=kept.open)
    except ArtifactError as error:
        return [whole, refuted("architecture", str(error)),
                *_not_run(request, "the tensors do not make the model that the config describes")]
    fits = proven("architecture", f"{artifact.config.family}, {artifact.config.depth} layers of width {artifact.config.width}: "
                                  f"exactly the tensors it demands, with their shapes ({_parameters(artifact):,} parameters)")
    parent = None if request.checks == (OTHER_LIBRARY,) else _parent(request, artifact, kept)
    with gpu_turn(request.probing.device, _bytes_needed(artifact, parent)):
        device, why = _device(request, artifact, parent, kept)
        checked = _checked(_subject(request, artifact, parent, device, kept), request)
    if checked is None:
        device, why = "cpu", f"proven on the CPU, since the proof on {device} died"
        checked = _checked(_subject(request, artifact, parent, device, kept), request)
    assert checked is not None
    against = [refuted("parent", f"{sentence}; what is wrong with it is wrong with what is made of it")
               for sentence in ([] if parent is None else quarantines(parent))]
    return [_with_surroundings(whole, kept.reused, device, why), fits, *checked, *against]


def _with_surroundings(whole: Verdict, reused: list[Path], device: str, why: str | None) -> Verdict:
    """Verdict with what a reader of the hallmark should know of the process that earned it."""
    told = [f"{path} is as it was when an earlier proof of this process hashed it" for path in reused]
    return Verdict(whole.check, whole.outcome, "; ".join([whole.reason, *told, *([why] if why else [])]),
                   whole.evidence | {"device": device, "kept_open": [str(path) for path in reused]})


def _parent(request: ProofRequest, artifact: Artifact, kept: KeptArtifacts) -> Artifact | None:
    recorded = _facts(artifact).get("parent")
    against = request.against or (recorded["path"] if recorded and Path(recorded["path"]).exists() else None)
    against_base = request.against_base or request.base
    if against is None:
        return None
    if locate_artifact(against).adapter:  # on the base that it was trained on, unless this was merged into another on purpose
        return kept.open(against, against_base, held="file" if _facts(artifact).get("rebased") else None)
    same = recorded if recorded and Path(recorded["path"]).resolve() == Path(against).resolve() else {}
    return kept.open(against, held=same.get("held"))


def _facts(artifact: Artifact) -> dict[str, Any]:
    return artifact.raw.checkpoint.facts if artifact.raw.checkpoint else {}


def _device(request: ProofRequest, artifact: Artifact, parent: Artifact | None, kept: KeptArtifacts) -> tuple[str, str | None]:
    """A folder of tensors is compared where there is room: itself, its parent or base, and the same through transformers."""
    folders = all(one is None or one.raw.whole is None for one in (artifact, parent, artifact.base))
    if request.probing.device == "cpu" or not folders:
        return "cpu", None
    needed = max(0, _bytes_needed(artifact, parent) - kept.bytes_on(request.probing.device))
    return proof_device(request.probing.device, needed + WORKSPACE, request.headroom)


def _bytes_needed(artifact: Artifact, parent: Artifact | None) -> int:
    """GPU memory that a proof needs: tensors as they are stored, and in fp32 for the model, its parent and the same through
    transformers."""
    models = [artifact.tensors, artifact.tensors, *([] if parent is None or parent.tensors is artifact.tensors else [parent.tensors])]
    stored = {id(tensors): sum(map(tensor_bytes, tensors.values())) for tensors in models}
    return sum(map(fp32_bytes, models)) + sum(stored.values())


def _subject(request: ProofRequest, artifact: Artifact, parent: Artifact | None, device: str, kept: KeptArtifacts) -> ProofSubject:
    copied = _facts(artifact).get("change") == "same" or artifact.raw.place.format.rounding is not None
    expect = request.expect or ("same" if copied else "moved")
    return ProofSubject(artifact.raw, artifact, parent, expect, request.bound or rounding_bound(artifact), request.probing, device, kept)


def _checked(subject: ProofSubject, request: ProofRequest) -> list[Verdict] | None:
    """Run the checks of a proof; None where a GPU failed it: that says nothing of the artifact."""
    try:
        return [_ran(check, subject) for check in request.wanted]
    except RuntimeError:
        if subject.device == "cpu":
            raise
        return None


def _ran(check: Callable[[ProofSubject], Verdict], subject: ProofSubject) -> Verdict:
    name = check_name(check)
    try:
        return check(subject)
    except AssayError as error:
        return refuted(name, str(error))
    except Exception as error:  # a check that dies proves nothing: the reason becomes a verdict, never a pass
        if subject.device != "cpu" and isinstance(error, RuntimeError):
            raise
        return refuted(name, f"the check itself died: {type(error).__name__}: {error}")


def _not_run(request: ProofRequest, why: str) -> list[Verdict]:
    return [unproven(check_name(check), f"did not run: {why}") for check in request.wanted]


def _parameters(artifact: Artifact) -> int:
    return sum(t.numel() for t in artifact.tensors.values())


def main() -> None:
    """Main loop of a proving process: one answer a line to each request a line, until the input ends: then whoever asked is gone, and
    nobody is left to be answered."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    os.nice(5)  # beside a training loop: it comes first
    _warm_up(sys.argv[1:], requests)
    gc.freeze()  # what was imported is no garbage, and need not be looked through again
    gc.enable()
    kept = KeptArtifacts()
    while True:
        answers.write(json.dumps(_answer(requests.get(), kept), default=str).encode() + b"\n")


def _warm_up(early: list[str], requests: "queue.SimpleQueue[bytes]") -> None:
    """Warm up what the first proof would wait for, as long as nobody waits. Contexts of one GPU are made one at a time, and a run's own
    comes first: only where there is none is it made beside the imports, which hold Python's lock while it does not."""
    where = default_device() if early[:1] == [WHERE_THERE_IS_ONE] else "".join(early[:1])
    beside = threading.Thread(target=_first_kernels, args=(where,), daemon=True)
    if GPU_TO_ITSELF in early:
        beside.start()
    with contextlib.suppress(ImportError, RuntimeError):  # what fails here fails the proof, in its own words
        for name in WARM_LIBRARIES if LIBRARIES in early else ():
            if requests.empty() and importlib.util.find_spec(name.partition(".")[0]) is not None:
                importlib.import_module(name)
    if GPU_TO_ITSELF not in early:
        _first_kernels(where)


def _first_kernels(device: str) -> None:
    """A context on a GPU, and the library that multiplies there."""
    with contextlib.suppress(RuntimeError):
        if device not in ("", "cpu"):
            torch.ones(8, 8, device=device).mm(torch.ones(8, 8, device=device)).sum().item()


def _answer(line: bytes, kept: KeptArtifacts) -> dict[str, Any]:
    fields = json.loads(line)
    os.chdir(fields.pop("folder"))
    torch.set_num_threads(fields.pop("threads"))
    if "records" in fields:
        looks = [record for record in fields["records"] if Path(record).name.startswith("eval-")]
        steps = [record for record in fields["records"] if record not in looks]
        return {"verdicts": [_replayed(check, kept_of, fields["device"], fields["headroom"]).to_json()
                             for check, kept_of in (("witness", steps), (LOOKS, looks)) if kept_of]}
    try:
        return {"verdicts": [verdict.to_json() for verdict in examine_artifact(ProofRequest.from_fields(fields), kept)]}
    except AssayError as error:
        return {"refused": str(error)}


def _replayed(check: str, records: Sequence[str], asked: str, headroom: int) -> Verdict:
    """Verdict of the witness on kept steps, or on kept evaluations. A witness that dies has not spoken, and a sound run must not fall with
    it. What was kept for a GPU's replay would take hours elsewhere."""
    from assay.witness.due_looks import judge_looks
    from assay.witness.replay import replay_steps

    folders = [Path(record) for record in records]
    try:
        device, why = proof_device(asked, max(map(_replay_bytes, folders)), headroom)
        if device != asked:
            return unproven(check, f"{len(folders)} record(s) were not replayed: {why}", optional=True)
        return judge_looks(folders, device) if check == LOOKS else replay_steps(folders, device)
    except Exception as error:
        return unproven(check, f"the witness itself died: {type(error).__name__}: {error}", optional=True)


def _replay_bytes(record: Path) -> int:
    """GPU memory that a witness replay needs: the record, gradients in double precision, and the logits of a few texts; of an evaluation,
    its model in fp32."""
    if record.name.startswith("eval-"):
        return 4 * int(json.loads((record / "record.json").read_text())["parameters"]) + _REPLAY_WORKSPACE
    return 3 * sum(file.stat().st_size for file in record.iterdir()) + _REPLAY_WORKSPACE


def _listen(requests: "queue.SimpleQueue[bytes]") -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(1)


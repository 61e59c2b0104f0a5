"""Proofs: a fresh process that knows nothing but the bytes on disk, and earns a checkpoint its hallmark.

`prove` starts `python -m assay.guard.proof`, which opens the artifact through our loader and other people's, and returns a
verdict for every check. A check that crashes is refuted, not forgotten. `prove_checkpoint` also writes the outcome down:
hallmark.json where everything required is PROVEN, quarantine.json otherwise. `Prover` does so beside a training loop.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from assay.errors import ArtifactError, AssayError, UsageError
from assay.guard.artifact_checks import check_fields, check_hashes, check_lineage, check_loaded, check_tokenizer, check_values
from assay.guard.behaviour_checks import check_answers, check_consumer, check_generations, check_health
from assay.guard.proof_subject import DEFAULT_SAMPLING, Expectation, ProofSampling, ProofSubject
from assay.store.artifact import Artifact, interpret_artifact, locate_artifact, open_artifact, read_artifact
from assay.store.checkpoint import Checkpoint, open_checkpoint, quarantine_checkpoint, write_hallmark
from assay.store.export_artifact import rounding_bound
from assay.verdict import Outcome, Verdict, overall, proven, refuted, unproven, without_optional

PROOF_CHECKS: tuple[Callable[[ProofSubject], Verdict], ...] = (
    check_hashes, check_loaded, check_values, check_fields, check_tokenizer, check_answers, check_lineage, check_consumer,
    check_generations, check_health)
PROOF_TIMEOUT = 1800.0
CORES_A_PROOF, MOST_PROOFS = 4, 4  # a proof beside a loop takes one of so many cores, and there are never more
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
    records: tuple[str, ...] = ()  # kept steps of the run, which the witness replays in the same process

    @classmethod
    def from_json(cls, text: str) -> "ProofRequest":
        fields = json.loads(text)
        return cls(**fields | {"probing": ProofSampling(**fields["probing"]), "records": tuple(fields["records"])})


def prove(request: ProofRequest, *, timeout: float = PROOF_TIMEOUT, beside: bool = False) -> list[Verdict]:
    """Every check in a fresh process, which takes few cores where it runs `beside` a training loop. Raises UsageError where the
    request itself makes no sense."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "verdicts.json"
        command = [sys.executable, "-m", "assay.guard.proof", json.dumps(asdict(request)), str(answer)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(proof_threads(beside))}
        reading, writing = os.pipe()
        try:
            # A process group of its own: a Ctrl-C that ends the run must not look like a proof that failed.
            done = subprocess.run(command, stdin=reading, capture_output=True, text=True, timeout=timeout, env=environment,
                                  start_new_session=True)
        except subprocess.TimeoutExpired:
            if answer.exists():  # all but what the witness says
                return _verdicts(answer)
            return [unproven("process", f"the fresh process did not finish within {timeout:g} s, which says nothing of the artifact; "
                                        "prove it again where the machine is less busy")]
        finally:
            os.close(reading)
            os.close(writing)
        if done.returncode == UsageError.exit_code:
            raise UsageError(done.stderr.strip().removeprefix("assay: "))
        if -done.returncode in ENDED_FROM_OUTSIDE:
            return [unproven("process", f"the fresh process was ended by signal {-done.returncode} before it could say anything; "
                                        "prove it again")]
        if not answer.exists():
            tail = done.stderr.strip().splitlines()[-1:] or ["no output"]
            return [refuted("process", f"the fresh process died with exit code {done.returncode}: {tail[0]}", stderr=done.stderr[-2000:])]
        return _verdicts(answer)


def _verdicts(answer: Path) -> list[Verdict]:
    return [Verdict(v["check"], Outcome(v["outcome"]), v["reason"], v["evidence"]) for v in json.loads(answer.read_text())]


def prove_checkpoint(folder: Path, *, against: str | None = None, base: str | None = None, probing: ProofSampling = DEFAULT_SAMPLING,
                     timeout: float = PROOF_TIMEOUT, beside: bool = False, records: Sequence[Path] = ()) -> list[Verdict]:
    """Prove a checkpoint of ours and write the outcome into it. Bytes that do not even open stay as they are."""
    request = ProofRequest(str(folder), against=against, base=base, probing=probing, records=tuple(map(str, records)))
    verdicts = prove(request, timeout=timeout, beside=beside)
    try:
        checkpoint = open_checkpoint(folder)
    except ArtifactError:
        return verdicts  # nothing here can carry a mark: the store refuses it already
    hallmark_or_quarantine(checkpoint, verdicts)
    return verdicts


def hallmark_or_quarantine(checkpoint: Checkpoint, verdicts: list[Verdict]) -> None:
    if overall(without_optional(verdicts)) is Outcome.PROVEN:
        silent = [verdict for verdict in verdicts if verdict.check == "witness" and verdict.outcome is Outcome.UNPROVEN]
        write_hallmark(checkpoint, without_optional(verdicts), unproven=silent)
    elif overall(without_optional(verdicts)) is Outcome.REFUTED:
        quarantine_checkpoint(checkpoint, verdicts)


def usable_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def proof_threads(beside: bool) -> int:
    """Of a proof, within what the environment allows. Threads that wait for a busy core are many times slower than one."""
    share, allowed = usable_cores() // (2 * CORES_A_PROOF if beside else 2), os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, min(share, int(allowed) if allowed.isdecimal() else share))


class Prover:
    """Proofs beside a training loop, one at a time or, where there are cores to spare, a few; the loop asks for what is finished and
    never waits. They are begun in the saver's thread and asked for in the loop's: without a lock one begun meanwhile would be lost."""

    witnesses = True  # kept steps are replayed with the next proof

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max(1, min(MOST_PROOFS, usable_cores() // CORES_A_PROOF)), "prove")
        self._pending: list[tuple[Path, Future[list[Verdict]]]] = []
        self._changing = threading.Lock()

    def start(self, folder: Path, *, against: str | None = None, base: str | None = None, probing: ProofSampling = DEFAULT_SAMPLING,
              beside: bool = True, records: Sequence[Path] = ()) -> None:
        future = self._pool.submit(prove_checkpoint, folder, against=against, base=base, probing=probing, beside=beside, records=records)
        with self._changing:
            self._pending.append((folder, future))

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def finished(self) -> Iterator[tuple[Path, list[Verdict]]]:
        """Each is given away when it is asked for: behind one that raises, or stops the run, the others are still here."""
        while (ended := self._next_ended()) is not None:
            folder, future = ended
            yield folder, future.result()

    def close(self) -> Iterator[tuple[Path, list[Verdict]]]:
        """Wait for every proof under way."""
        self._pool.shutdown(wait=True)
        return self.finished()

    def _next_ended(self) -> tuple[Path, "Future[list[Verdict]]"] | None:
        with self._changing:
            place = next((place for place, (_, future) in enumerate(self._pending) if future.done()), None)
            return None if place is None else self._pending.pop(place)


def examine_artifact(request: ProofRequest) -> list[Verdict]:
    """The checks themselves, in this process. A stage that refuses the artifact refutes it, and what could not run is UNPROVEN."""
    place = locate_artifact(request.path)
    try:
        raw = read_artifact(place, every_byte=True)
    except ArtifactError as error:
        return [refuted("whole", str(error)), *_not_run("the bytes were refused")]
    whole = proven("whole", f"every file is there, of its size, with strict headers: {len(raw.tensors)} tensors")
    try:
        artifact = interpret_artifact(raw, base=request.base)
    except ArtifactError as error:
        return [whole, refuted("architecture", str(error)), *_not_run("the tensors do not make the model that the config describes")]
    fits = proven("architecture", f"{artifact.config.family}, {artifact.config.depth} layers of width {artifact.config.width}: "
                                  f"exactly the tensors it demands, in shape ({_parameters(artifact):,} parameters)")
    subject = _subject(request, artifact)
    return [whole, fits, *(_ran(check, subject) for check in PROOF_CHECKS)]


def _subject(request: ProofRequest, artifact: Artifact) -> ProofSubject:
    facts = artifact.raw.checkpoint.facts if artifact.raw.checkpoint else {}
    recorded = facts.get("parent")
    against = request.against or (recorded["path"] if recorded and Path(recorded["path"]).exists() else None)
    against_base = request.against_base or request.base
    parent = None if against is None else open_artifact(against, base=against_base if locate_artifact(against).adapter else None)
    copied = facts.get("change") == "same" or artifact.raw.place.format.rounding is not None
    expect = request.expect or ("same" if copied else "moved")
    return ProofSubject(artifact.raw, artifact, parent, expect, request.bound or rounding_bound(artifact), request.probing)


def _ran(check: Callable[[ProofSubject], Verdict], subject: ProofSubject) -> Verdict:
    name = check.__name__.removeprefix("check_")
    try:
        return check(subject)
    except AssayError as error:
        return refuted(name, str(error))
    except Exception as error:  # a check that dies proves nothing: the reason becomes a verdict, never a pass
        return refuted(name, f"the check itself died: {type(error).__name__}: {error}")


def _not_run(why: str) -> list[Verdict]:
    return [unproven(check.__name__.removeprefix("check_"), f"did not run: {why}") for check in PROOF_CHECKS]


def _parameters(artifact: Artifact) -> int:
    return sum(t.numel() for t in artifact.tensors.values())


def main() -> None:
    request, answer = ProofRequest.from_json(sys.argv[1]), Path(sys.argv[2])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(5)  # beside a training loop: it comes first
    try:
        verdicts = examine_artifact(request)
    except AssayError as error:
        print(f"assay: {error}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    answer.write_text(json.dumps([verdict.to_json() for verdict in verdicts], default=str))
    if request.records:
        verdicts.append(_replayed(request.records))
        written = answer.with_suffix(".part")
        written.write_text(json.dumps([verdict.to_json() for verdict in verdicts], default=str))
        written.rename(answer)


def _replayed(records: Sequence[str]) -> Verdict:
    """What the witness says. Where it dies it has not spoken: that is UNPROVEN, and said, because a sound run must not fall with it."""
    from assay.witness.replay import replay_steps

    try:
        return replay_steps([Path(record) for record in records])
    except Exception as error:
        return unproven("witness", f"the witness itself died: {type(error).__name__}: {error}", optional=True)


def _end_with_parent() -> None:
    """Nothing is ever written to stdin: it ends when whoever asked is gone, and nobody is left to be answered."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()

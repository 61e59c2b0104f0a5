"""A run copied to a store: killed while a checkpoint is sent, gone on with on a fresh machine; and what a bad store does to it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.errors import UsageError
from assay.outcome import RunOutcome
from assay.recipes import remote_run
from assay.recipes.hand_over import send_to_remote, void_if_refuted
from assay.recipes.remote_run import CHECKPOINTS, RECORD_INDEX, RECORDS, RemoteRun, read_index, record_names
from assay.store import remote
from assay.store.artifact import open_artifact
from assay.store.checkpoint import HALLMARK, MANIFEST, QUARANTINE, write_hallmark
from assay.store.remote import RemoteFolder, local_copy
from assay.testing import tiny_training
from assay.testing.tiny_models import flip_bit, save_model, tiny_model
from assay.testing.tiny_training import tiny_corpus
from assay.verdict import Outcome, Verdict, proven, refuted
from tests.recipes import sittings
from tests.recipes.sittings import STEPS, events, in_a_fork, left_by, options

pytest.importorskip("fsspec")


class Approves(tiny_training.NoProver):
    """Proves in no time whatever was saved."""

    def __init__(self) -> None:
        super().__init__()
        self._ready: list[tuple[Path, list[Verdict]]] = []

    def start(self, folder: Path, **_: Any) -> None:
        self._ready.append((folder, [proven("whole", "made up for a test")]))

    def finished(self) -> list[tuple[Path, list[Verdict]]]:
        ready, self._ready = self._ready, []
        return ready

    close = finished


@pytest.fixture(autouse=True)
def approved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sittings, "NoProver", Approves)
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))
    local_copy.cache_clear()
    yield
    local_copy.cache_clear()


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Every checkpoint is sent before the loop goes on: none takes another's place."""
    usual = RemoteRun.offer
    patch.setattr(RemoteRun, "offer", lambda self, newest, others: (usual(self, newest, others), self.wait()))


def sit(folder: Path, store: Path, said: list[str] | None = None, **changed: Any) -> tuple[Any, RunOutcome]:
    after = changed.pop("after", None)
    config = options(folder, remote=f"file://{store}", corpus=f"file://{tiny_corpus().folder}", **changed)
    return config, sittings.sit(config, after=after, say=(said if said is not None else []).append)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    config = options(tmp_path_factory.mktemp("whole") / "run")
    sittings.sit(config)
    return left_by(config)


def test_killed_while_a_checkpoint_is_sent_a_fresh_machine_goes_on_bit_for_bit(tmp_path: Path, uninterrupted: dict[str, Any],
                                                                               monkeypatch: pytest.MonkeyPatch):
    def killed() -> int:
        one_by_one(monkeypatch)
        usual = RemoteFolder.send_file

        def send(self: RemoteFolder, path: Path, name: str, sha256: str) -> None:
            usual(self, path, name, sha256)
            if path.parent.name == "step-000012" and name.endswith(".safetensors"):
                os._exit(9)

        monkeypatch.setattr(RemoteFolder, "send_file", send)
        sit(tmp_path / "here", tmp_path / "store")
        return 0

    assert in_a_fork(killed) == 9
    assert (tmp_path / "store" / CHECKPOINTS / "step-000012" / "model.safetensors").exists()
    said = list[str]()
    config, _ = sit(tmp_path / "elsewhere", tmp_path / "store", said)
    assert any("resuming from step 6" in line for line in said), said
    assert left_by(config) == uninterrupted
    assert record_names(RemoteFolder(config.remote))[0] == f"step-{STEPS:06d}"


def test_what_rots_in_the_store_is_passed_over_and_the_record_before_it_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one_by_one(monkeypatch)
    stop = {13: lambda trainer: setattr(trainer.run, "interrupted", 15)}
    config, outcome = sit(tmp_path / "here", tmp_path / "store", after=stop)
    assert outcome.exit_code == 143
    store, there = tmp_path / "store", RemoteFolder(config.remote)
    assert record_names(there) == ["step-000013", "step-000012"]
    flip_bit(store / CHECKPOINTS / "step-000013" / "model.safetensors", byte=-1)
    said = list[str]()
    sit(tmp_path / "elsewhere", store, said, after=stop)
    assert any(line.startswith("passed over") and "hash to" in line for line in said), said
    assert any("resuming from step 12" in line for line in said), said
    for name in record_names(there):
        flip_bit(store / RECORDS / name / RECORD_INDEX, byte=40)
    with pytest.raises(UsageError, match="nothing can be gone on with"):
        sit(tmp_path / "third", store)


def test_a_store_that_fails_costs_the_run_nothing_and_is_said(tmp_path: Path, uninterrupted: dict[str, Any],
                                                              monkeypatch: pytest.MonkeyPatch):
    from fsspec.implementations.local import LocalFileSystem

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(LocalFileSystem, "put_file", refuse)
    said = list[str]()
    config, _ = sit(tmp_path / "run", tmp_path / "store", said)
    assert left_by(config) == uninterrupted
    assert {event["verdicts"][0]["outcome"] for event in events(config, "remote")} == {Outcome.UNPROVEN}
    assert any("no route to host" in line and "The run goes on" in line for line in said)


def test_the_copy_of_another_run_is_not_overwritten_or_gone_on_with(tmp_path: Path):
    stop = {2: lambda trainer: setattr(trainer.run, "interrupted", 15)}
    sit(tmp_path / "a", tmp_path / "store", after=stop)
    with pytest.raises(UsageError, match="holds another run: seed was 0, now 3"):
        sit(tmp_path / "b", tmp_path / "store", seed=3)
    sittings.sit(options(tmp_path / "c", corpus=f"file://{tiny_corpus().folder}"), after=stop)
    with pytest.raises(UsageError, match="holds another run than"):
        sit(tmp_path / "c", tmp_path / "store")


def test_what_is_handed_over_is_at_the_url_or_the_verdict_says_that_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_model(tmp_path / "run" / "model", tiny_model())
    kept = RemoteRun(f"file://{tmp_path}/store", tmp_path / "run")
    kept.latest = proven("remote", "the last checkpoint is there")
    assert kept.send_model([tmp_path / "run" / "model"]).outcome is Outcome.PROVEN
    assert open_artifact(f"file://{tmp_path}/store/model").digest == open_artifact(tmp_path / "run" / "model").digest
    monkeypatch.setattr(RemoteFolder, "send_file", lambda *_: (_ for _ in ()).throw(remote.StoreError("no answer")))
    verdict = kept.send_model([tmp_path / "run" / "model"])
    assert verdict.outcome is Outcome.UNPROVEN
    assert RunOutcome(tmp_path, [verdict]).exit_code == 3


def test_an_older_checkpoint_that_is_proven_later_does_not_take_the_place_of_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Several proofs go on at a time, and those that a kill had cut short are made last."""
    sent, begun, free = list[str](), threading.Event(), threading.Event()
    monkeypatch.setattr(RemoteRun, "_send", lambda _, shipment: (begun.set(), free.wait(60), sent.append(shipment.name)))
    kept = RemoteRun(f"file://{tmp_path}/store", tmp_path)
    for step in (1, 9, 6):
        (folder := tmp_path / f"step-{step:06d}").mkdir()
        (folder / MANIFEST).write_text("{}")
        kept.offer(folder, [])
        assert begun.wait(60)  # the first is under way before another can take its place
    free.set()
    kept.close()
    assert sent == ["step-000001", "step-000009"]


def test_a_hallmark_that_is_taken_back_here_is_taken_back_at_the_url(tmp_path: Path):
    """Some recipes judge once more after the hand-over."""
    place = tmp_path / "run" / "model"
    write_hallmark(save_model(place, tiny_model()), [proven("whole", "made up for a test")])
    run: Any = SimpleNamespace(remote=RemoteRun(f"file://{tmp_path}/store", tmp_path / "run"), say=lambda _: None)
    send_to_remote(run, [place])
    there = RemoteFolder(f"file://{tmp_path}/store/model")
    assert HALLMARK in there.names()
    void_if_refuted(run, [place], [refuted("direction", "made up for a test")])
    assert (QUARANTINE in there.names(), HALLMARK in there.names()) == (True, False)


def test_an_index_is_refused_that_does_not_name_its_own_checkpoint(tmp_path: Path):
    record = RemoteFolder(f"file://{tmp_path}/store").under(f"{RECORDS}/step-000001")
    index = {"assay": "remote run", "format": 1, "run": "", "checkpoints": {"../x": ""}, "files": {}}
    record.send_bytes(remote_run.seal(index, where="", indent=1), RECORD_INDEX)
    with pytest.raises(remote_run.ArtifactError, match="expected step-000001 among them"):
        read_index(RemoteFolder(f"file://{tmp_path}/store"), "step-000001")

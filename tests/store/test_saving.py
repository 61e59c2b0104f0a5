"""A background save holds what was there when it was asked for, and no failure of it goes unheard."""

import gc
import os
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from assay.errors import StoreError
from assay.store import saving
from assay.store.checkpoint import Checkpoint, Contents, latest_checkpoint, open_checkpoint, step_folder, write_hallmark
from assay.store.saving import BackgroundSaver, snapshot
from assay.verdict import proven
from tests.store.disks import Failing, Watched, installed


def contents(step: int, weight: torch.Tensor, facts: dict | None = None) -> Contents:
    return Contents("model", {"w": weight}, facts=facts or {}, optimizer={"m": weight}, trainer={"step": step})


class Gate:
    """A disk that waits until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, name, operation, *arguments):
        self.open.wait()
        return operation(*arguments)


def test_later_steps_cannot_touch_the_snapshot(tmp_path: Path) -> None:
    weight, facts, gate = torch.zeros(1000), {"seen": [1]}, Gate()
    with installed(Watched(gate)), BackgroundSaver() as saver:
        saver.save(tmp_path / "c", contents(1, weight, facts))
        weight.fill_(7)
        facts["seen"].append(2)
        gate.open.set()
    read = open_checkpoint(tmp_path / "c")
    assert read.weights()["w"].unique().tolist() == [0.0]
    assert (read.optimizer() or {})["m"].unique().tolist() == [0.0]
    assert read.facts == {"seen": [1]}


def test_a_copy_is_saved_later_as_it_was(tmp_path: Path) -> None:
    weight, facts = torch.zeros(1000), {"seen": [1]}
    with BackgroundSaver() as saver:
        copied = saver.copy(contents(1, weight, facts))
        weight.fill_(7)
        facts["seen"].append(2)
        saver.save(tmp_path / "newer", contents(2, weight))
        saver.save(tmp_path / "c", copied)
    read = open_checkpoint(tmp_path / "c")
    assert read.weights()["w"].unique().tolist() == (read.optimizer() or {})["m"].unique().tolist() == [0.0]
    assert read.facts == {"seen": [1]}
    assert open_checkpoint(tmp_path / "newer").weights()["w"].unique().tolist() == [7.0]


def test_a_copy_that_nobody_wants_any_more_gives_its_memory_back(tmp_path: Path) -> None:
    with BackgroundSaver() as saver:
        copied = saver.copy(contents(1, torch.zeros(1000)))
        held = weakref.ref(copied().weights["w"])
        saver.save(tmp_path / "c", copied)
    assert held() is not None
    del copied
    gc.collect()
    assert held() is None


def test_free_memory_is_the_machines_or_its_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, group = tmp_path / "meminfo", tmp_path / "group"
    monkeypatch.setattr(saving, "MEMORY_INFO", info)
    monkeypatch.setattr(saving, "CONTROL_GROUPS", {tmp_path / "none": ("a", "b", "c"), group: ("max", "current", "inactive_file")})
    assert saving.free_memory() == 0, "where nobody says, there is none"
    info.write_text("MemTotal:       9000 kB\nMemAvailable:   5000 kB\nHugePages_Total:       0\n")
    assert saving.free_memory() == 5000 * 1024
    group.mkdir()
    for name, text in (("max", "3000000\n"), ("current", "2000000\n"), ("memory.stat", "anon 5\ninactive_file 500000\n")):
        (group / name).write_text(text)
    assert saving.free_memory() == 1_500_000
    assert saving.room_in_memory(750_000)
    assert not saving.room_in_memory(750_001)
    (group / "max").write_text("max\n")
    assert saving.free_memory() == 5000 * 1024


def test_save_returns_before_the_disk_has_done_anything(tmp_path: Path) -> None:
    gate = Gate()
    with installed(Watched(gate)), BackgroundSaver() as saver:
        saver.save(tmp_path / "c", contents(1, torch.zeros(4)))
        saver.check()
        assert os.listdir(tmp_path) == []
        gate.open.set()
        assert saver.wait() == open_checkpoint(tmp_path / "c")
        assert saver.wait() is None


@pytest.mark.parametrize("meet", ["save", "check", "close", "exit"])
def test_a_failed_save_surfaces_at_the_next_call_and_once(tmp_path: Path, meet: str) -> None:
    saver = BackgroundSaver()
    with installed(Watched(Failing(at=9))):
        saver.save(step_folder(tmp_path, 1), contents(1, torch.zeros(4)))
        saver._writer.submit(int).result()  # the save before it in the queue is over
    calls = {"save": lambda: saver.save(step_folder(tmp_path, 2), contents(2, torch.zeros(4))), "check": saver.check,
             "close": saver.close, "exit": lambda: saver.__exit__(None, None, None)}
    with pytest.raises(StoreError, match="Input/output error"):
        calls[meet]()
    assert latest_checkpoint(tmp_path) == (None, [])
    if meet in ("save", "check"):
        saver.save(step_folder(tmp_path, 2), contents(2, torch.zeros(4)))
        assert saver.wait() == open_checkpoint(step_folder(tmp_path, 2))
    saver.close()


def test_what_comes_after_runs_on_the_committed_checkpoint_and_its_failure_is_heard(tmp_path: Path) -> None:
    def prove(written: Checkpoint) -> None:
        write_hallmark(open_checkpoint(written.folder), [proven("x", "ok")])

    with BackgroundSaver() as saver:
        saver.save(step_folder(tmp_path, 1), contents(1, torch.zeros(4)), after=prove)
    assert latest_checkpoint(tmp_path, hallmarked=True)[0] is not None
    saver = BackgroundSaver()
    saver.save(step_folder(tmp_path, 2), contents(2, torch.zeros(4)), after=lambda written: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        saver.close()


def test_one_save_at_a_time_and_the_next_snapshot_is_taken_when_the_last_is_written(tmp_path: Path) -> None:
    order = []

    def made(step: int) -> Contents:
        order.append(f"snapshot {step}")
        return contents(step, torch.zeros(4))

    with BackgroundSaver() as saver:
        for step in (1, 2, 3):
            saver.save(step_folder(tmp_path, step), partial(made, step),
                       after=lambda written: order.append(f"saved {written.step}"))
    assert order == [f"{what} {step}" for step in (1, 2, 3) for what in ("snapshot", "saved")]


def test_where_a_gpu_has_room_one_save_waits_there_behind_another_instead_of_the_loop(tmp_path: Path,
                                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "room_on_device", lambda *_: True)
    monkeypatch.setattr(saving, "device_snapshot", snapshot)
    gate, weight = Gate(), torch.zeros(4)
    with installed(Watched(gate)), BackgroundSaver() as saver:
        for step in (1, 2):
            saver.save(step_folder(tmp_path, step), contents(step, weight))
            weight += 1
        third = threading.Thread(target=saver.save, args=(step_folder(tmp_path, 3), contents(3, weight)))
        third.start()
        third.join(0.3)
        waits = third.is_alive()
        gate.open.set()
        third.join(60)
        saver.wait()
    assert waits
    found = [open_checkpoint(step_folder(tmp_path, step)).weights()["w"] for step in (1, 2, 3)]
    assert [float(each[0]) for each in found] == [0, 1, 2]


def test_of_two_saves_the_failure_of_the_first_is_heard_and_the_second_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "room_on_device", lambda *_: True)
    monkeypatch.setattr(saving, "device_snapshot", snapshot)
    saver, begun = BackgroundSaver(), threading.Event()
    saver._writer.submit(begun.wait)
    with installed(Watched(Failing(at=9))):
        for step in (1, 2):
            saver.save(step_folder(tmp_path, step), contents(step, torch.zeros(4)))
        begun.set()
        with pytest.raises(StoreError, match="Input/output error"):
            saver.wait()
        assert latest_checkpoint(tmp_path)[0] == open_checkpoint(step_folder(tmp_path, 2))
    saver.close()


def test_a_snapshot_shares_no_memory() -> None:
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    tensors = {"plain": base, "view": base.t(), "row": base[1]}
    copies = snapshot(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor)
        assert copies[name].is_contiguous()
        assert not copies[name].requires_grad
        assert copies[name].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()

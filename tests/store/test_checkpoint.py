"""A checkpoint is as it was written, or it is refused; the newest good one is found; the last good ones never go."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from assay.errors import ArtifactError, StoreError, UsageError
from assay.store import checkpoint
from assay.store.checkpoint import (
    Contents,
    delete_old_checkpoints,
    latest_checkpoint,
    open_checkpoint,
    quarantine_checkpoint,
    step_folder,
    write_checkpoint,
    write_hallmark,
)
from assay.store.sealed import canonical_json, seal, unseal
from assay.verdict import proven, refuted, unproven
from tests.store.disks import Failing, Recorder, Watched, after_power_cut, installed, lay_out

GOOD = [proven("whole", "every hash agrees")]
BAD = [refuted("finite", "3 tensors hold NaN")]


def contents(step: int = 1, **changes) -> Contents:
    values = torch.arange(12, dtype=torch.float32) + step
    given = {"kind": "model", "weights": {"embed": values.reshape(3, 4), "head": values.to(torch.bfloat16)},
             "files": {"config.json": b"{}"}, "facts": {"parent": None, "model_config": {"layers": (2,)}},
             "probes": {"logits": values}, "optimizer": {"embed.exp_avg": -values}, "trainer": {"step": step}}
    return Contents(**{**given, **changes})


def save(folder: Path, step: int, **changes) -> checkpoint.Checkpoint:
    return write_checkpoint(step_folder(folder, step), contents(step, **changes))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# --- one checkpoint


@pytest.mark.parametrize("limit", [10**9, 50], ids=["one file", "sharded"])
def test_what_is_written_reads_back(tmp_path: Path, limit: int) -> None:
    given = contents(7)
    written = write_checkpoint(tmp_path / "c", given, max_shard_bytes=limit)
    read = open_checkpoint(tmp_path / "c")
    assert read == written
    assert read.digest == hashlib.sha256((tmp_path / "c" / "manifest.json").read_bytes()).hexdigest()
    for part, wanted in [(read.weights(), given.weights), (read.optimizer() or {}, given.optimizer or {}),
                         (read.probes(), given.probes)]:
        assert part.keys() == wanted.keys()
        assert all(torch.equal(part[name], wanted[name]) for name in wanted)
    assert read.trainer() == {"step": 7}
    assert read.step == 7
    assert read.read("config.json") == b"{}"
    assert read.facts == {"parent": None, "model_config": {"layers": [2]}}
    assert read.hallmark is None


def test_the_manifest_accounts_for_everything(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "c", contents()).manifest
    files = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir() if path.name != "manifest.json"}
    assert manifest["files"].keys() == files.keys()
    for name, data in files.items():
        entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if name.endswith(".safetensors"):
            header = data[:8 + int.from_bytes(data[:8], "little")]
            entry["header"] = hashlib.sha256(header).hexdigest()
        assert manifest["files"][name] == entry
    assert manifest["bytes"] == sum(map(len, files.values()))
    assert manifest["parameters"] == 24
    embed = torch.arange(12, dtype=torch.float32) + 1
    assert manifest["tensors"]["model.safetensors"]["embed"] == {
        "dtype": "F32", "shape": [3, 4], "sha256": hashlib.sha256(embed.numpy().tobytes()).hexdigest()}
    assert set(manifest["tensors"]) == {"model.safetensors", "optimizer.safetensors", "probes.safetensors"}


@pytest.mark.parametrize("limit", [10**9, 64])
def test_the_index_keeps_other_programs_from_probes_and_optimizer(tmp_path: Path, limit: int) -> None:
    """vLLM opens every safetensors file of a folder, or where there is an index those that it names."""
    folder = tmp_path / "step-000001"
    saved = write_checkpoint(folder, contents(), max_shard_bytes=limit)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    named = set(index["weight_map"].values())
    theirs = [name for file in named for name in safetensors.torch.load_file(folder / file)]
    assert len(list(folder.glob("*.safetensors"))) > len(named)
    assert sorted(theirs) == sorted(saved.weights())


def test_an_adapter_is_where_peft_looks_for_it(tmp_path: Path) -> None:
    weights = {"base_model.model.q.lora_A.weight": torch.ones(2, 2)}
    written = write_checkpoint(tmp_path / "c", contents(kind="adapter", weights=weights, optimizer=None, trainer=None, probes={}))
    assert safetensors.torch.load_file(tmp_path / "c" / "adapter_model.safetensors").keys() == weights.keys()
    assert written.weights().keys() == weights.keys()
    assert written.optimizer() is None
    assert written.trainer() is None
    assert written.step is None
    assert written.probes() == {}


def test_the_same_contents_have_the_same_digest(tmp_path: Path) -> None:
    assert write_checkpoint(tmp_path / "a", contents()).digest == write_checkpoint(tmp_path / "b", contents()).digest
    assert write_checkpoint(tmp_path / "c", contents(facts={"parent": "x"})).digest != write_checkpoint(tmp_path / "d", contents()).digest


@pytest.mark.parametrize("weights", [{}, {"w": torch.zeros(0, 4), "v": torch.zeros(1)}], ids=["none", "not gathered"])
def test_a_save_without_weights_is_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ArtifactError, match="gather"):
        write_checkpoint(tmp_path / "c", contents(weights=weights))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["manifest.json", "trainer.json", "x.safetensors", "../x", "a/b", "."])
def test_files_cannot_take_the_stores_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot hold a file named"):
        write_checkpoint(tmp_path / "c", contents(files={name: b""}))
    assert os.listdir(tmp_path) == []


def test_facts_that_are_not_finite_are_refused_before_the_disk_is_touched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        write_checkpoint(tmp_path / "c", contents(facts={"loss": float("inf")}))
    assert os.listdir(tmp_path) == []


def test_a_step_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(UsageError, match="never overwritten"):
        save(tmp_path, 1)


# --- what must be refused (flipped bytes are in the campaign)


def test_a_swapped_pair_of_shards_is_refused(tmp_path: Path) -> None:
    """Same names, same shapes, so that only the hashes can tell."""
    weights = {f"layer.{i}": torch.full((8,), float(i)) for i in range(2)}
    written = write_checkpoint(tmp_path / "c", contents(weights=weights), max_shard_bytes=32)
    one, two = (tmp_path / "c" / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    content = one.read_bytes(), two.read_bytes()
    one.write_bytes(content[1])
    two.write_bytes(content[0])
    with pytest.raises(ArtifactError, match="damaged, or a file from elsewhere"):
        open_checkpoint(tmp_path / "c")
    with pytest.raises(ArtifactError, match="damaged, or a file from elsewhere"):
        written.weights()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "probes.safetensors", "trainer.json"])
def test_a_stale_file_from_an_older_step_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    shutil.copy(step_folder(tmp_path, 1) / name, step_folder(tmp_path, 2) / name)
    with pytest.raises(ArtifactError, match="damaged, or a file from elsewhere"):
        open_checkpoint(step_folder(tmp_path, 2))
    assert "damaged" in latest_checkpoint(tmp_path)[1][0]


def test_a_manifest_from_another_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    shutil.copy(step_folder(tmp_path, 1) / "manifest.json", step_folder(tmp_path, 2) / "manifest.json")
    with pytest.raises(ArtifactError, match="damaged, or a file from elsewhere"):
        open_checkpoint(step_folder(tmp_path, 2))


def test_a_copied_hallmark_is_refused(tmp_path: Path) -> None:
    write_hallmark(save(tmp_path, 1), GOOD)
    save(tmp_path, 2)
    shutil.copy(step_folder(tmp_path, 1) / "hallmark.json", step_folder(tmp_path, 2))
    with pytest.raises(ArtifactError, match="speaks of the checkpoint"):
        open_checkpoint(step_folder(tmp_path, 2))


@pytest.mark.parametrize("verify", [True, False])
def test_missing_extra_and_cut_files_are_refused_even_without_hashing(tmp_path: Path, verify: bool) -> None:
    for name, change, reason in [
        ("missing", lambda c: os.unlink(c / "config.json"), "lacks config.json"),
        ("extra", lambda c: (c / "pytorch_model.bin").write_bytes(b""), "holds pytorch_model.bin"),
        ("folder", lambda c: (c / "sub").mkdir(), "holds sub"),
        ("cut", lambda c: os.truncate(c / "model.safetensors", 100), "truncated or replaced"),
        ("link", lambda c: (c / "config.json").rename(tmp_path / "out") and (c / "config.json").symlink_to("../out"),
         "leads out"),
        ("manifest", lambda c: os.unlink(c / "manifest.json"), "has no manifest.json"),
    ]:
        write_checkpoint(tmp_path / name, contents())
        change(tmp_path / name)
        with pytest.raises(ArtifactError, match=reason):
            open_checkpoint(tmp_path / name, verify=verify)


def test_what_was_not_hashed_on_opening_is_hashed_on_reading(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", contents())
    read = open_checkpoint(tmp_path / "c", verify=False)
    for name in ("model.safetensors", "optimizer.safetensors", "probes.safetensors", "trainer.json", "config.json"):
        flip(tmp_path / "c" / name)
    for reading in (read.weights, read.optimizer, read.probes, read.trainer, lambda: read.read("config.json")):
        with pytest.raises(ArtifactError):
            reading()


def test_every_byte_of_the_weights_counts_on_reading(tmp_path: Path) -> None:
    """Header and tensors are hashed apart, on many cores, and together leave no byte out."""
    read = write_checkpoint(tmp_path / "c", contents(weights={"w": torch.zeros(3), "b": torch.ones(5, dtype=torch.uint8)}))
    path = tmp_path / "c" / "model.safetensors"
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1:])
        with pytest.raises(ArtifactError):
            read.weights()
    path.write_bytes(data)
    assert read.weights()["w"].tolist() == [0, 0, 0]


def test_a_readme_may_be_added(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", contents())
    (tmp_path / "c" / "README.md").write_text("about")
    open_checkpoint(tmp_path / "c")


def test_what_a_killed_hallmark_left_does_not_spoil_the_checkpoint(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", contents())
    (tmp_path / "c" / ".partial-hallmark.json-1-1").write_bytes(b"{")
    write_hallmark(open_checkpoint(tmp_path / "c"), GOOD)
    assert written.hallmark is not None
    assert not list((tmp_path / "c").glob(".partial*"))


@pytest.mark.parametrize(("change", "reason"), [
    ({"format": 2}, "this Assay reads"), ({"assay": "ledger"}, "this Assay reads"), ({"kind": "pickle"}, "expected a model or an adapter"),
    ({"files": []}, "files is list"), ({"parameters": 1.5}, "parameters is 1.5"), ({"more": 1}, "nothing asks for"),
    ({"files": {"../x": {"bytes": 1, "sha256": ""}}}, "stay in the folder"),
    ({"files": {"x": {"bytes": "1", "sha256": ""}}}, "expected a whole number"),
    ({"files": {"x.safetensors": {"bytes": 1, "sha256": ""}}}, "the header's of tensors"),
    ({"tensors": {"x": []}}, "expected a JSON object"), ({"tensors": {"x": {"w": {}}}}, "has no 'dtype'"),
], ids=str)
def test_a_manifest_with_a_good_seal_and_bad_fields_is_refused(tmp_path: Path, change: dict, reason: str) -> None:
    write_checkpoint(tmp_path / "c", contents())
    path = tmp_path / "c" / "manifest.json"
    manifest = unseal(path.read_bytes(), where="", indent=1)
    path.write_bytes(seal({**manifest, **change}, where="", indent=1))
    with pytest.raises(ArtifactError, match=reason):
        open_checkpoint(tmp_path / "c")


def test_no_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        open_checkpoint(tmp_path / "none")


# --- marks


def test_a_hallmark_is_earned_by_proof_alone(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", contents())
    for verdicts in ([], BAD, [*GOOD, unproven("generates", "no tokenizer")]):
        with pytest.raises(ArtifactError, match="earns no hallmark"):
            write_hallmark(written, verdicts)
    assert written.hallmark is None
    write_hallmark(written, GOOD)
    assert open_checkpoint(tmp_path / "c").hallmark == {
        "format": 1, "manifest": written.digest, "verdicts": [verdict.to_json() for verdict in GOOD]}


def test_quarantine_voids_a_hallmark_and_forbids_another(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", contents())
    write_hallmark(written, GOOD)
    quarantine_checkpoint(written, BAD)
    assert open_checkpoint(tmp_path / "c").hallmark is None
    assert not (tmp_path / "c" / "hallmark.json").exists()
    with pytest.raises(ArtifactError, match="is quarantined"):
        write_hallmark(written, GOOD)


def test_a_full_disk_that_cannot_hold_a_quarantine_leaves_no_hallmark_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: bytes) -> None:
        raise StoreError(f"{path}: the disk is full")

    written = write_checkpoint(tmp_path / "c", contents())
    write_hallmark(written, GOOD)
    monkeypatch.setattr(checkpoint.durable, "replace_file", full)
    with pytest.raises(StoreError, match="the disk is full"):
        quarantine_checkpoint(written, BAD)
    assert open_checkpoint(tmp_path / "c").hallmark is None


def test_a_mark_is_not_written_on_a_changed_manifest(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "c", contents())
    shutil.rmtree(tmp_path / "c")
    write_checkpoint(tmp_path / "c", contents(2))
    with pytest.raises(ArtifactError, match="changed since it was opened"):
        write_hallmark(written, GOOD)


# --- latest


def test_latest_falls_back_past_bad_ones_and_says_so(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    flip(step_folder(tmp_path, 4) / "model.safetensors")
    quarantine_checkpoint(open_checkpoint(step_folder(tmp_path, 3)), BAD)
    found, passed_over = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 2
    assert len(passed_over) == 2
    assert "step-000004" in passed_over[0]
    assert "damaged" in passed_over[0]
    assert "step-000003: quarantined: 3 tensors hold NaN" in passed_over[1]


def test_latest_counts_and_does_not_spell(tmp_path: Path) -> None:
    save(tmp_path, 999_999)
    save(tmp_path, 1_000_000)
    os.utime(step_folder(tmp_path, 999_999))
    found, _ = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1_000_000


def test_latest_can_ask_for_a_hallmark(tmp_path: Path) -> None:
    write_hallmark(save(tmp_path, 1), GOOD)
    save(tmp_path, 2)
    found, passed_over = latest_checkpoint(tmp_path, hallmarked=True)
    assert found is not None
    assert found.step == 1
    assert passed_over == [f"{step_folder(tmp_path, 2)}: has no hallmark; run `assay prove` on it"]


def test_a_checkpoint_under_another_steps_name_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shutil.copytree(step_folder(tmp_path, 1), step_folder(tmp_path, 2))
    found, passed_over = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.folder == step_folder(tmp_path, 1)
    assert "says step 1" in passed_over[0]


def test_latest_of_nothing_is_nothing(tmp_path: Path) -> None:
    (tmp_path / ".partial-step-000001-1-1").mkdir()
    assert latest_checkpoint(tmp_path) == (None, [])
    assert latest_checkpoint(tmp_path / "none") == (None, [])


# --- retention


def kept(folder: Path) -> list[int]:
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(folder))


def test_retention_keeps_the_newest_the_best_and_the_needed(tmp_path: Path) -> None:
    saved = {step: save(tmp_path, step) for step in range(1, 8)}
    gone = delete_old_checkpoints(tmp_path, keep=2, best=step_folder(tmp_path, 3), needed={saved[1].digest})
    assert kept(tmp_path) == [1, 3, 6, 7]
    assert [path.name for path in gone] == ["step-000002", "step-000004", "step-000005"]


def test_the_last_two_good_ones_never_go(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
    flip(step_folder(tmp_path, 6) / "model.safetensors")
    flip(step_folder(tmp_path, 5) / "manifest.json")
    quarantine_checkpoint(open_checkpoint(step_folder(tmp_path, 4)), BAD)
    delete_old_checkpoints(tmp_path, keep=1)
    assert kept(tmp_path) == [2, 3, 6]


def test_the_last_that_is_proven_stays_behind_any_number_that_are_not(tmp_path: Path) -> None:
    """A proof may be cut short again and again: what came after the last proven one is good, and nobody knows how good."""
    for step in range(1, 7):
        save(tmp_path, step)
    for step in (1, 2, 3):
        write_hallmark(open_checkpoint(step_folder(tmp_path, step)), GOOD)
    flip(step_folder(tmp_path, 3) / "model.safetensors")  # proven once, and no longer what was proven
    delete_old_checkpoints(tmp_path, keep=1)
    assert kept(tmp_path) == [2, 5, 6]
    write_hallmark(open_checkpoint(step_folder(tmp_path, 5)), GOOD)
    delete_old_checkpoints(tmp_path, keep=1)
    assert kept(tmp_path) == [5, 6]


def test_nothing_goes_while_fewer_than_two_are_good(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    for step in (2, 3, 4):
        flip(step_folder(tmp_path, step) / "model.safetensors")
    assert delete_old_checkpoints(tmp_path, keep=1) == []
    assert kept(tmp_path) == [1, 2, 3, 4]


def test_retention_touches_nothing_but_steps(tmp_path: Path) -> None:
    for step in range(1, 4):
        save(tmp_path, step)
    (tmp_path / "final").mkdir()
    (tmp_path / "step-000000").symlink_to("final")
    delete_old_checkpoints(tmp_path, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["final", "step-000000", "step-000002", "step-000003"]
    with pytest.raises(UsageError, match="at least 1"):
        delete_old_checkpoints(tmp_path, keep=0)


def test_what_retention_counts_on_outlives_a_power_cut(tmp_path: Path) -> None:
    """A crash between the rename and the last fsync leaves a good checkpoint that a power cut may still take away."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    recorder = Recorder(folder)
    with installed(Watched(recorder)):
        save(folder, 1)
        save(folder, 2)
        with pytest.raises(StoreError):
            write_without_the_last_sync(folder, recorder)
        begin = len(recorder.ops)
        assert [path.name for path in delete_old_checkpoints(folder, keep=1)] == ["step-000001"]
    for end in range(begin, len(recorder.ops) + 1):
        for number, tree in enumerate(after_power_cut(recorder.ops[:end])):
            cut = tmp_path / f"{end}-{number}"
            lay_out(tree, cut)
            assert len([path for path in checkpoint.step_folders(cut) if open_checkpoint(path)]) >= 2


def write_without_the_last_sync(folder: Path, recorder: Recorder) -> None:
    renamed = []

    def fail_after_the_rename(name, operation, *arguments):
        renamed.extend([True] * (name == "rename"))
        if renamed and name == "sync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return recorder(name, operation, *arguments)

    with installed(Watched(fail_after_the_rename)):
        save(folder, 3)


def test_a_disk_that_fails_while_removing_is_told(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, step)
    with installed(Watched(Failing(at=1, lasting=10**6))), pytest.raises(StoreError, match="Input/output error"):
        delete_old_checkpoints(tmp_path, keep=1)
    assert kept(tmp_path) == [1, 2, 3, 4]


def test_the_manifest_is_readable_json(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "c", contents()).manifest
    data = (tmp_path / "c" / "manifest.json").read_bytes()
    assert json.loads(data).items() > manifest.items()
    assert data == canonical_json(json.loads(data), where="", indent=1)


def test_marks_of_a_checkpoint_that_a_link_names(tmp_path: Path):
    saved = save(tmp_path, 1)
    (tmp_path / "newest").symlink_to(saved.folder)
    write_hallmark(open_checkpoint(tmp_path / "newest"), GOOD)
    assert (saved.folder / "hallmark.json").is_file()
    quarantine_checkpoint(open_checkpoint(tmp_path / "newest"), [refuted("answers", "other bytes")])
    assert (saved.folder / "quarantine.json").is_file()
    assert not (saved.folder / "hallmark.json").exists()

"""Safetensors as the library reads and writes them; and everything that it would let through, refused."""

import json
import mmap
import os
import time
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch

from assay.errors import ArtifactError, UsageError
from assay.seeds import generator
from assay.store import durable, safetensors_files
from assay.store.safetensors_files import (
    FileFacts,
    inside,
    read_folder_tensors,
    read_safetensors_header,
    read_tensors,
    write_index,
    write_sharded,
    write_tensors,
)
from tests.store.headers import assembled

DTYPES = list(safetensors_files.SAFETENSORS_DTYPES.values())


def made(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits will do, NaNs among them."""
    size = torch.empty(shape, dtype=dtype).nbytes
    top = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator(0, str(dtype)))
    return bits.view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.fixture
def zoo() -> dict[str, torch.Tensor]:
    every = {f"of.{dtype}".replace("torch.", ""): made(dtype, 3, 5) for dtype in DTYPES}
    return {**every, "transposed": made(torch.float32, 4, 7).t(), "strided": made(torch.bfloat16, 9, 4)[::2, 1],
            "scalar": torch.tensor(2.5), "odd": made(torch.uint8, 3), "larger": made(torch.float32, 70_001)}


def test_the_library_reads_what_we_write(tmp_path: Path, zoo: dict[str, torch.Tensor]) -> None:
    facts = write_tensors(tmp_path / "x.safetensors", zoo, {"format": "pt", "made": "é"})
    read = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert read.keys() == zoo.keys()
    assert all(same_bits(read[name], zoo[name]) for name in zoo)
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "made": "é"}
    assert facts.sha256 == durable.hash_file(tmp_path / "x.safetensors")
    assert facts.bytes == os.path.getsize(tmp_path / "x.safetensors")


def test_we_read_what_the_library_writes(tmp_path: Path, zoo: dict[str, torch.Tensor]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in zoo.items()}
    safetensors.torch.save_file(contiguous, tmp_path / "x.safetensors", {"k": "v"})
    read = read_tensors(tmp_path / "x.safetensors", durable.hash_file(tmp_path / "x.safetensors"))
    assert all(same_bits(read[name], zoo[name]) for name in zoo)
    assert read.keys() == zoo.keys()


def test_facts_name_every_tensor(tmp_path: Path, zoo: dict[str, torch.Tensor]) -> None:
    facts = write_tensors(tmp_path / "x.safetensors", zoo)
    for name, tensor in zoo.items():
        assert facts.tensors[name] == {"dtype": safetensors_files.DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape),
                                       "sha256": safetensors_files.tensor_sha256(tensor.clone())}


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path, zoo: dict[str, torch.Tensor]) -> None:
    one = write_tensors(tmp_path / "1", zoo)
    assert one.sha256 == write_tensors(tmp_path / "2", dict(reversed(zoo.items()))).sha256


def test_reading_copies_nothing(tmp_path: Path) -> None:
    facts = write_tensors(tmp_path / "x", {"a": torch.zeros(4 << 20), "b": torch.zeros(4 << 20)})
    tracemalloc.start()
    for expected in (None, facts.sha256, facts):
        read = read_tensors(tmp_path / "x", expected)
        assert read["a"].untyped_storage().data_ptr() == read["b"].untyped_storage().data_ptr()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * durable.READ_BYTES < facts.bytes / 3


def test_tensors_are_ours_to_change_and_outlive_their_file(tmp_path: Path) -> None:
    facts = write_tensors(tmp_path / "x", {"a": torch.arange(8.0)})
    read = read_tensors(tmp_path / "x", facts)["a"]
    read[0] = 99
    assert durable.hash_file(tmp_path / "x") == facts.sha256
    os.unlink(tmp_path / "x")
    assert read.tolist() == [99, 1, 2, 3, 4, 5, 6, 7]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = write_tensors(tmp_path / "x", {"a": torch.arange(8.0)})
    require_hash = durable.require_hash

    def require_then_change(path, actual, *rest, **more):
        require_hash(path, actual, *rest, **more)
        os.utime(path, ns=(0, 1))

    monkeypatch.setattr(durable, "require_hash", require_then_change)
    with pytest.raises(ArtifactError, match="another program changes it"):
        read_tensors(tmp_path / "x", facts)


def test_memory_that_the_disk_cannot_fill_is_refused_and_kills_nobody(tmp_path: Path, monkeypatch) -> None:
    """Cut short once it is mapped, a file gives a signal instead of bytes, as one on a dying disk does."""
    facts = write_tensors(tmp_path / "x", {"a": torch.zeros(1 << 14)})

    class CutShort(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            os.truncate(tmp_path / "x", 100)
            super().madvise(*advice)

    monkeypatch.setattr(mmap, "mmap", CutShort)
    with pytest.raises(ArtifactError, match="cannot be read: Input/output error"):
        read_tensors(tmp_path / "x", facts)


def test_a_header_of_97_megabytes_is_refused_at_once_and_in_little_memory(tmp_path: Path) -> None:
    with open(tmp_path / "x", "wb") as file:
        file.write((97 << 20).to_bytes(8, "little") + b"{")
        file.truncate((97 << 20) + 100)
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(ArtifactError, match="announces a header of 101,711,872 bytes"):
        read_tensors(tmp_path / "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.process_time() - began < 1
    assert peak < 1 << 20


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HOSTILE = {
    "gap": ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, 12, "expected 4"),
    "overlap": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12, "expected 8"),
    "late start": ({"a": entry(4, 8, [1])}, 8, "expected 0"),
    "backwards": ({"a": entry(8, 4, [1])}, 8, "give it -4"),
    "truncated": ({"a": entry(0, 16, [4])}, 12, "truncated"),
    "appended": ({"a": entry(0, 4, [1])}, 8, "something was appended"),
    "size": ({"a": entry(0, 8, [1])}, 8, "needs 4 bytes"),
    "overflow": ({"a": entry(0, 0, [2**40, 2**40, 0])}, 0, "needs 0 bytes"),
    "dtype": ({"a": entry(0, 4, [1], "F33")}, 4, "dtype 'F33'"),
    "rank": ({"a": entry(0, 4, [1] * 99)}, 4, "not lists of whole numbers"),
    "true": ({"a": entry(0, 4, [True])}, 4, "not lists of whole numbers"),
    "extra field": ({"a": {**entry(0, 4, [1]), "strides": [1]}}, 4, "nothing else"),
    "climbing name": ({"../a": entry(0, 4, [1])}, 4, "no name for a tensor"),
    "inner climb": ({"a/../../b": entry(0, 4, [1])}, 4, "no name for a tensor"),
    "empty name": ({"": entry(0, 4, [1])}, 4, "no name for a tensor"),
    "nul": ({"a\0": entry(0, 4, [1])}, 4, "no name for a tensor"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry(0, 4, [1])}, 4, "text to text"),
    "metadata list": ({"__metadata__": []}, 0, "text to text"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    header, data_bytes, reason = HOSTILE[case]
    (tmp_path / "x").write_bytes(assembled(json.dumps(header).encode(), bytes(data_bytes)))
    with pytest.raises(ArtifactError, match=reason):
        read_safetensors_header(tmp_path / "x")


@pytest.mark.parametrize("header", [
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}}',
    b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
    b'[]', b'',
], ids=["key twice", "field twice", "minus zero", "float", "list", "nothing"])
def test_a_header_that_is_no_strict_json_is_refused(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "x").write_bytes(assembled(header, bytes(4)))
    with pytest.raises(ArtifactError):
        read_safetensors_header(tmp_path / "x")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 20])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    write_tensors(tmp_path / "whole", {"a": torch.zeros(4)})
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:length])
    with pytest.raises(ArtifactError):
        read_tensors(tmp_path / "cut")


def test_empty_tensors_are_flagged(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"full": torch.zeros(2), "empty": torch.zeros(0, 3)})
    assert {name: info.empty for name, info in read_safetensors_header(tmp_path / "x").items()} == {"full": False, "empty": True}
    assert read_tensors(tmp_path / "x")["empty"].shape == (0, 3)


def test_a_tensor_that_lies_unaligned_is_read_all_the_same(tmp_path: Path) -> None:
    header = {"a": entry(0, 3, [3], "U8"), "b": entry(3, 11, [2])}
    data = bytes(3) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "x").write_bytes(assembled(json.dumps(header).encode(), data))
    assert read_tensors(tmp_path / "x")["b"].tolist() == [1.5, -2.0]


def test_other_bytes_than_expected_are_refused(tmp_path: Path) -> None:
    old = write_tensors(tmp_path / "old", {"a": torch.zeros(4)})
    write_tensors(tmp_path / "new", {"a": torch.ones(4)})
    with pytest.raises(ArtifactError, match="damaged, or a file from elsewhere"):
        read_tensors(tmp_path / "new", old.sha256)


def test_what_cannot_be_written_is_refused_before_it_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="complex64"):
        write_tensors(tmp_path / "x", {"a": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ArtifactError, match="no name for a tensor"):
        write_tensors(tmp_path / "x", {"../a": torch.zeros(2)})
    assert not (tmp_path / "x").exists()


# --- folders


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {f"layer.{i}": made(torch.float32, 4, 4) + i for i in range(6)}


@pytest.fixture
def sharded(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Three shards of two tensors each."""
    write_sharded(tmp_path, weights, max_shard_bytes=128)
    return tmp_path


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


def change_index(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_shards_read_back_together(sharded: Path, weights: dict[str, torch.Tensor]) -> None:
    assert len(list(sharded.glob("model-*-of-00003.safetensors"))) == 3
    read = read_folder_tensors(sharded)
    assert read.keys() == weights.keys()
    assert all(same_bits(read[name], weights[name]) for name in weights)


@pytest.mark.parametrize("parts", [(2, 3), (-1, 0), (0, 1), (1, 3), (1,)])
def test_an_index_is_written_over_parts_from_one_to_as_many_as_there_are_and_over_no_others(tmp_path: Path, parts) -> None:
    named = {f"model-{part:05d}-of-00002.safetensors": FileFacts("", 0) for part in parts}
    with pytest.raises(ArtifactError, match=r"due are model-00001-of-0000\d.*nothing was saved"):
        write_index(tmp_path, named, "model")
    assert not [*tmp_path.iterdir()]


def test_what_fits_one_file_is_one_file(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    assert list(write_sharded(tmp_path, weights)) == ["model.safetensors"]
    assert read_folder_tensors(tmp_path).keys() == weights.keys()


def test_a_swapped_pair_of_shards_is_refused(sharded: Path) -> None:
    os.rename(sharded / shard(1), sharded / "kept")
    os.rename(sharded / shard(2), sharded / shard(1))
    os.rename(sharded / "kept", sharded / shard(2))
    with pytest.raises(ArtifactError, match="not the shard that the index describes"):
        read_folder_tensors(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    os.unlink(sharded / shard(2))
    with pytest.raises(ArtifactError, match=r"model-00002-of-00003\.safetensors.* missing"):
        read_folder_tensors(sharded)


def test_a_shard_that_no_index_lists_is_refused(sharded: Path) -> None:
    write_tensors(sharded / "model-00004-of-00004.safetensors", {"stale": torch.zeros(1)})
    with pytest.raises(ArtifactError, match="which no index lists"):
        read_folder_tensors(sharded)


def test_a_tensor_that_the_index_forgets_or_invents_is_refused(sharded: Path) -> None:
    change_index(sharded, lambda weight_map: weight_map.pop("layer.0"))
    with pytest.raises(ArtifactError, match=r"holds 'layer.0' \(0 missing, 1 too many\)"):
        read_folder_tensors(sharded)
    change_index(sharded, lambda weight_map: weight_map.update({"layer.0": shard(1), "layer.9": shard(1)}))
    with pytest.raises(ArtifactError, match=r"lacks 'layer.9' \(1 missing, 0 too many\)"):
        read_folder_tensors(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    os.unlink(sharded / shard(2))
    write_tensors(sharded / shard(2), {f"layer.{i}": torch.zeros(1) for i in (0, 2, 3)})
    with pytest.raises(ArtifactError, match=r"holds 'layer\.0'"):
        read_folder_tensors(sharded)


def test_one_file_beside_an_index_is_ambiguous(sharded: Path, weights: dict[str, torch.Tensor]) -> None:
    write_tensors(sharded / "model.safetensors", weights)
    with pytest.raises(ArtifactError, match="remove the stale one"):
        read_folder_tensors(sharded)


def test_shards_without_their_index_are_refused(sharded: Path) -> None:
    os.unlink(sharded / "model.safetensors.index.json")
    with pytest.raises(ArtifactError, match="holds neither"):
        read_folder_tensors(sharded)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/../../x", "a\0b", "", "..\\x"])
def test_an_index_that_points_out_of_the_folder_is_refused(sharded: Path, name: str) -> None:
    change_index(sharded, lambda weight_map: weight_map.update({"layer.0": name}))
    with pytest.raises(ArtifactError, match="must be relative and stay"):
        read_folder_tensors(sharded)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "outside.safetensors", {"a": torch.zeros(1)})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(ArtifactError, match="leads out of the folder"):
        read_folder_tensors(tmp_path / "folder")


def test_a_link_into_a_folder_with_the_same_beginning_is_refused(tmp_path: Path) -> None:
    for name in ("model", "model-evil"):
        (tmp_path / name).mkdir()
    write_tensors(tmp_path / "model-evil" / "x", {"a": torch.zeros(1)})
    (tmp_path / "model" / "x").symlink_to("../model-evil/x")
    with pytest.raises(ArtifactError, match="leads out of the folder"):
        inside(tmp_path / "model", "x")


def test_the_links_of_a_hub_cache_are_followed_within_the_model(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    write_tensors(cache / "blobs" / "123", {"a": torch.ones(1)})
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert read_folder_tensors(snapshot)["a"].tolist() == [1.0]
    (tmp_path / "secret").write_bytes(b"")
    (snapshot / "config.json").symlink_to("../../../secret")
    with pytest.raises(ArtifactError, match="leads out"):
        inside(snapshot, "config.json")

"""Mapped pages: what is hashed and carried is the file's bytes, its memory is given back, and no value that was written is lost."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from assay.errors import UsageError
from assay.store.artifact import Destination, open_artifact, straight_to
from assay.store.mapped_pages import carried_to, hashed_in_passing, release_pages
from assay.store.safetensors_files import read_tensors, tensor_sha256, write_tensors
from assay.testing.tiny_models import save_hf_folder, tiny_model

STREAMED = """
import resource, sys
from pathlib import Path
from assay.store.digests import weights_digest
from assay.store.mapped_pages import carried_to
from assay.store.safetensors_files import read_folder_tensors
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
tensors = read_folder_tensors(Path(sys.argv[1]))
weights_digest(tensors)
largest = 0
for tensor in tensors.values():
    largest = max(largest, carried_to(tensor, "cpu").numel() * tensor.element_size() / 2**20)
print(peak() - before, largest)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("mapped") / "model.safetensors"
    made = torch.Generator().manual_seed(0)
    shapes = {f"{i}.weight": (1024, 1024) for i in range(4)} | {"odd": (3, 5)}
    write_tensors(where, {name: torch.randn(shape, generator=made) for name, shape in shapes.items()})
    return where


def test_a_large_model_is_opened_hashed_and_carried_in_little_memory(tmp_path: Path):
    made = torch.zeros(32 << 20, dtype=torch.bfloat16)
    write_tensors(tmp_path / "model.safetensors", {f"{i}.weight": made for i in range(5)})  # 320 MiB in five tensors
    done = subprocess.run([sys.executable, "-c", STREAMED, str(tmp_path)], capture_output=True, text=True, check=True)
    grown, largest = map(float, done.stdout.split())
    assert largest == 64
    assert grown < 2 * largest + 96, f"{grown:.0f} MiB of host memory for a file of 320"


def test_what_is_hashed_in_passing_has_its_sha256(file: Path):
    for tensor in read_tensors(file).values():
        assert hashed_in_passing(tensor) == tensor_sha256(tensor)
        assert hashed_in_passing(tensor.double()[:, ::2]) == tensor_sha256(tensor.double()[:, ::2])
    assert hashed_in_passing(torch.empty(0)) == tensor_sha256(torch.empty(0))


def test_what_is_carried_is_a_copy_of_every_element(file: Path):
    for tensor in read_tensors(file).values():
        copy = carried_to(tensor, "cpu")
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr()
    assert torch.equal(carried_to(torch.arange(12.0).view(3, 4).t(), "cpu"), torch.arange(12.0).view(3, 4).t())
    assert carried_to(torch.tensor(3.0), "cpu") == 3


def test_pages_that_were_written_to_keep_what_was_written(file: Path):
    tensor = read_tensors(file)["1.weight"]
    tensor.sum()
    assert release_pages(tensor) > 0, "pages that were only read are given back"
    tensor[7, 7] = 42
    assert release_pages(tensor) == 0
    assert tensor[7, 7] == 42
    heap = torch.full((1 << 20,), 3.0)
    assert release_pages(heap) == 0
    assert bool((heap == 3).all())


def test_a_device_that_is_not_here_is_refused_before_anything_is_opened(tmp_path: Path):
    with pytest.raises(UsageError, match="torch sees"):
        open_artifact(tmp_path, to=straight_to("cuda:77"))
    assert straight_to("cpu") is None


def test_what_lies_on_the_device_in_the_same_bits_is_shared(tmp_path: Path):
    folder = save_hf_folder(tmp_path / "model", tiny_model("qwen3"))
    first = open_artifact(folder, to=Destination("cpu"))
    plain = open_artifact(folder)
    assert first.digest == plain.digest
    assert all(torch.equal(first.tensors[name], tensor) for name, tensor in plain.tensors.items())
    held = dict(first.tensors)
    held["norm.weight"] = held["norm.weight"] + 1e-3
    again = open_artifact(folder, to=Destination("cpu", held))
    shared = {name for name, tensor in again.tensors.items() if tensor.data_ptr() == held[name].data_ptr()}
    assert shared == held.keys() - {"norm.weight"}
    assert torch.equal(again.tensors["norm.weight"], plain.tensors["norm.weight"]), "what differs is the file's"

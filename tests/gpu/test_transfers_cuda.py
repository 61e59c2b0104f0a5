"""Copies that leave a GPU, and graphs that serve batches of other documents."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.data.batch import Batch
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.loop import accumulated
from assay.learn.objectives import next_token
from assay.model.placement import place_for_training
from assay.model.transfers import read_numbers, to_host
from assay.store.safetensors_files import read_tensors, write_tensors
from assay.testing.tiny_models import tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_leaves_the_gpu_has_its_bits_whatever_the_stream_and_layout(dtype: torch.dtype, tmp_path: Path):
    values = torch.randint(-100, 100, (257, 129), device="cuda").to(dtype)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = to_host(values.T)
    assert found.is_pinned()
    assert torch.equal(found, values.T.cpu())
    write_tensors(tmp_path / "t.safetensors", {"a": values.T, "b": values})
    read = read_tensors(tmp_path / "t.safetensors")
    assert torch.equal(read["a"], values.T.cpu())
    assert torch.equal(read["b"], values.cpu())


def test_numbers_of_a_gpu_are_read_together():
    assert read_numbers({"a": torch.tensor(2.5, device="cuda"), "b": torch.tensor(3, device="cuda")}) == {"a": 2.5, "b": 3.0}


def test_one_graph_serves_batches_of_a_few_documents_more_and_fewer():
    model, graphs = place_for_training(tiny_model("llama"), "cuda", compute=torch.bfloat16, compile=False), GraphedAccumulate()
    tokens = torch.randint(0, 250, (8, 128), generator=torch.Generator().manual_seed(1))
    for count in (120, 131, 100, 90, 64):
        documents = (torch.arange(tokens.numel()) * count // tokens.numel()).view(tokens.shape).int()
        first = torch.ones_like(documents, dtype=torch.bool)
        first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        batch = Batch(tokens, (~first).float(), documents)
        weight = float(batch.weight.sum())
        due, gradient = accumulated(model, next_token, replace(batch), 8, weight), {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        found = graphs(model, next_token, batch, 8, weight)
        assert torch.allclose(found.loss, due.loss, rtol=1e-4)
        apart = max(float((p.grad - gradient[n]).norm() / gradient[n].norm()) for n, p in model.named_parameters())
        assert apart <= 1e-2
        model.zero_grad()
    assert len(graphs._first) == 1

"""Distillation on a GPU: what the CPU gives, in fp32, in bf16 and through a CUDA graph."""

import pytest
import torch

from assay.data.batch import Batch
from assay.learn.cuda_graph import GraphedAccumulate
from assay.learn.distillation import DistillationSettings, distillation, stored_distillation, teacher_top_k
from assay.learn.loop import accumulated
from assay.learn.objectives import Objective, averages
from assay.learn.policy import Surrogate, policy_gradient
from assay.model.transformer import Transformer
from assay.seeds import generator
from assay.testing.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

VOCAB = 4096


def batch() -> Batch:
    tokens = torch.randint(0, VOCAB, (4, 128), generator=generator(0, "tokens"))
    documents = (torch.arange(128) >= 50).int().repeat(4, 1)
    weight = torch.rand(4, 128, generator=generator(0, "weight"))
    weight[:, [0, 50]] = 0
    return Batch(tokens, weight, documents)


def models(device: str, dtype: torch.dtype | None = None) -> tuple[Transformer, Transformer]:
    student, teacher = tiny_model("llama", 1, vocab=VOCAB).to(device), tiny_model("assay", 2, vocab=VOCAB).to(device).requires_grad_(False)
    for model in (student, teacher):
        model.compute_dtype = dtype
        with torch.no_grad():
            model.norm.weight.mul_(3.0)
    return student, teacher


def measured(student: Transformer, objective: Objective, b: Batch, accumulate=accumulated) -> tuple[float, torch.Tensor, dict[str, float]]:
    loss, metrics = accumulate(student, objective, b, 2, float(b.weight.sum()))
    found = torch.cat([p.grad.flatten().cpu() for p in student.parameters()])
    student.zero_grad()
    return float(loss), found, averages(metrics)


@pytest.mark.parametrize("blend", [DistillationSettings(), DistillationSettings("reverse", 2.0), DistillationSettings("jsd", 3.0,
                                                                                                                      ce_weight=0.5)],
                         ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(None, 1e-3), (torch.bfloat16, 5e-2)])
def test_it_is_what_the_cpu_gives(blend: DistillationSettings, dtype: torch.dtype | None, bound: float):
    b = batch()
    (student, teacher), (there, asked) = models("cpu"), models("cuda", dtype)
    due, found = measured(student, distillation(teacher, blend), b), measured(there, distillation(asked, blend), b)
    assert found[0] == pytest.approx(due[0], rel=bound)
    assert float((found[1] - due[1]).norm()) <= bound * float(due[1].norm())
    assert found[2] == pytest.approx(due[2], rel=bound)


@pytest.mark.parametrize("stored", [False, True])
def test_a_graph_gives_what_eager_gives(stored: bool):
    student, teacher = models("cuda", torch.bfloat16)
    b, objective = batch(), distillation(teacher, DistillationSettings("jsd", 2.0, ce_weight=0.5))
    if stored:
        ids, logprobs = teacher_top_k(teacher, b.to("cuda"), 16)
        b = Batch(b.tokens, b.weight, b.documents, teacher_ids=ids, teacher_logprobs=logprobs)
        objective = stored_distillation()
    assert_a_graph_gives_what_eager_gives(student, objective, b)


def test_a_graph_gives_what_eager_gives_of_a_policy():
    """GRPO runs without graphs because its widths differ; its objective and what it measures could be captured."""
    student, b = models("cuda", torch.bfloat16)[0], batch()
    streams = {name: torch.randn(4, 128, generator=generator(0, name)) for name in ("advantage", "behaviour", "reference")}
    rollout = Batch(b.tokens, b.weight, b.documents, **{name: stream - 8 * (name != "advantage") for name, stream in streams.items()})
    assert_a_graph_gives_what_eager_gives(student, policy_gradient(Surrogate(kl="k2", kl_weight=0.01)), rollout)


def assert_a_graph_gives_what_eager_gives(student: Transformer, objective: Objective, b: Batch) -> None:
    graph = GraphedAccumulate()
    eager = measured(student, objective, b)
    for _ in range(2):  # as captured, and replayed
        graphed = measured(student, objective, b, graph)
        assert graphed[0] == pytest.approx(eager[0], rel=1e-3)
        assert float((graphed[1] - eager[1]).norm()) <= 1e-2 * float(eager[1].norm())
        assert graphed[2] == pytest.approx(eager[2], rel=1e-3, abs=1e-4)

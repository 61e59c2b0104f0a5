"""Our fine-tuning loss and gradients are TRL's on the same rows: rendered, masked, packed and counted alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.data.chat import render_conversations
from assay.data.layouts import read_conversations
from assay.data.packing import PackedExamples
from assay.learn.loop import accumulated
from assay.learn.objectives import next_token
from assay.model.families import hf_layout, to_foreign
from assay.store.artifact import build_model, open_artifact
from assay.testing.tiny_models import save_hf_folder, tiny_model

pytestmark = pytest.mark.slow  # importing TRL takes longer than all of it
ROWS = [{"prompt": f"What is {a} and {b}? ", "completion": f"{a} and {b} are {a + b}, of course" + "!" * (a % 3)}
        for a in range(4) for b in range(2)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_hf_folder(tmp_path / "base", tiny_model("llama"))


def trl_step(base: Path, out: Path, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one batch of all rows, as SFTTrainer computes it, and its gradients."""
    trl, transformers, datasets = (pytest.importorskip(name) for name in ("trl", "transformers", "datasets"))
    args = trl.SFTConfig(str(out), per_device_train_batch_size=len(ROWS), report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
                         gradient_checkpointing=False, max_length=128, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer = trl.SFTTrainer(model, args=args, train_dataset=datasets.Dataset.from_list(ROWS),
                             processing_class=transformers.AutoTokenizer.from_pretrained(base))
    inputs = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def our_step(base: Path, data: Path, *, packing: bool, micro: int) -> tuple[float, dict[str, torch.Tensor]]:
    artifact = open_artifact(base)
    assert artifact.tokenizer is not None
    examples = render_conversations(read_conversations(data).rows, artifact.tokenizer, artifact.stops, length=128).examples
    order = PackedExamples(examples, 0, 1, 128, packing=packing)
    order = PackedExamples(examples, 0, order.windows, 128, packing=packing)
    model, batch = build_model(artifact).requires_grad_(True), order.batch(0)
    loss = accumulated(model, next_token, batch, micro, float(batch.weight.sum())).loss
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return float(loss), to_foreign(hf_layout(model.config), gradients)


@pytest.mark.parametrize(("packing", "micro"), [(True, 1), (True, 8), (False, 8), (False, 3)])
def test_loss_and_gradients_are_those_of_trl(packing: bool, micro: int, base: Path, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    theirs, ours = trl_step(base, tmp_path / "out"), our_step(base, tmp_path / "rows.jsonl", packing=packing, micro=micro)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert ours[1].keys() - theirs[1].keys() <= {"lm_head.weight"}  # tied: the embedding's gradient has it
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name

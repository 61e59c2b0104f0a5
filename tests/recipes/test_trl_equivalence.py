"""Our losses and gradients are TRL's on the same rows, of fine-tuning and of preferences: rendered, masked, packed and counted alike."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.data.chat import render_conversations
from assay.data.layouts import read_conversations
from assay.data.packing import PackedExamples
from assay.data.preferences import PackedPairs, pair_rows, read_preferences, render_pairs
from assay.learn.loop import accumulated
from assay.learn.objectives import averages, next_token
from assay.learn.policy import token_logprobs
from assay.learn.preference import PreferenceSettings, pair_scores, preference
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

# ---------------------------------------------------------------- preferences

PAIRS = [{"prompt": f"What is {a} and {b}? ", "chosen": f"{a} and {b} are {a + b}" + "!" * a, "rejected": f"I do not know {b}" + "?" * b}
         for a in range(3) for b in range(3)]
TRL_LOSSES = [("sigmoid", 0.1, 0.0), ("sigmoid_norm", 2.0, 0.0), ("ipo", 0.1, 0.0), ("hinge", 0.1, 0.0), ("robust", 0.3, 0.2)]


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy that has left its reference, and the reference."""
    folder = tmp_path_factory.mktemp("two")
    return save_hf_folder(folder / "policy", tiny_model("llama")), save_hf_folder(folder / "reference", tiny_model("llama", 5))


def trl_preference_step(policy: Path, reference: Path, out: Path,
                        **options: Any) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    trl, transformers, datasets = (pytest.importorskip(name) for name in ("trl", "transformers", "datasets"))
    args = trl.DPOConfig(str(out), per_device_train_batch_size=len(PAIRS), report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
                         gradient_checkpointing=False, max_length=128, **options)
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (policy, reference)]
    trainer = trl.DPOTrainer(models[0], models[1], args=args, train_dataset=datasets.Dataset.from_list(PAIRS),
                             processing_class=transformers.AutoTokenizer.from_pretrained(policy))
    models[0].train()
    loss = trainer.compute_loss(models[0], next(iter(trainer.get_train_dataloader())))
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if name.startswith(("rewards/", "logps/"))}
    return float(loss.detach()), {name: p.grad for name, p in models[0].named_parameters() if p.grad is not None}, metrics


@pytest.mark.parametrize(("loss_type", "beta", "smoothing"), TRL_LOSSES)
def test_preference_loss_gradients_and_metrics_are_those_of_trl(loss_type: Any, beta: float, smoothing: float,
                                                               two_models: tuple[Path, Path], tmp_path: Path):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    theirs = trl_preference_step(*two_models, tmp_path / "out", loss_type=[loss_type], beta=beta, label_smoothing=smoothing)
    policy, reference = (open_artifact(folder) for folder in two_models)
    assert policy.tokenizer is not None
    pairs, _ = render_pairs(read_preferences(tmp_path / "pairs.jsonl"), policy.tokenizer, policy.stops, length=128)
    order = PackedPairs(pairs, 0, 1, 256)
    batch, model = PackedPairs(pairs, 0, order.windows, 256).batch(0), build_model(policy).requires_grad_(True)
    with torch.no_grad():
        batch = replace(batch, reference=token_logprobs(build_model(reference), batch)[0])
    found = accumulated(model, preference(PreferenceSettings(loss_type, beta, smoothing)), batch, 2, batch.divisor or 0.0)
    ours = to_foreign(hf_layout(model.config), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert float(found.loss) == pytest.approx(theirs[0], rel=1e-5)
    assert averages(found.metrics) == pytest.approx(theirs[2], rel=1e-4, abs=1e-5)
    for name, gradient in theirs[1].items():
        assert (ours[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


# name of the loss: its settings here, and TRL's options
WITHOUT_REFERENCE: dict[str, tuple[PreferenceSettings, dict[str, Any]]] = {
    "cpo": (PreferenceSettings("simpo", 2.0, 0.1, 0.5),
            {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5, "beta": 2.0, "label_smoothing": 0.1}),
    "orpo": (PreferenceSettings("orpo", 0.3), {"beta": 0.3})}


def trl_step_without_reference(name: str, policy: Path, out: Path, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    trl = pytest.importorskip(f"trl.experimental.{name}")
    transformers, datasets = (pytest.importorskip(module) for module in ("transformers", "datasets"))
    args = getattr(trl, f"{name.upper()}Config")(str(out), per_device_train_batch_size=len(PAIRS), report_to=[], use_cpu=True, bf16=False,
                                                 disable_tqdm=True, gradient_checkpointing=False, max_length=128, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    trainer = getattr(trl, f"{name.upper()}Trainer")(model, args=args, train_dataset=datasets.Dataset.from_list(PAIRS),
                                                     processing_class=transformers.AutoTokenizer.from_pretrained(policy))
    model.train()
    loss = trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", WITHOUT_REFERENCE)
def test_losses_without_a_reference_are_those_of_trl(name: str, two_models: tuple[Path, Path], tmp_path: Path):
    """ORPO's is of the chosen answer here, a mean for each pair, as in its paper. TRL's is of prompt and answer, a mean over all tokens of
    the micro-batch: put in the place of ours, it gives TRL's number and gradients."""
    settings, options = WITHOUT_REFERENCE[name]
    theirs = trl_step_without_reference(name, two_models[0], tmp_path / "out", **options)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    policy = open_artifact(two_models[0])
    assert policy.tokenizer is not None
    pairs, _ = render_pairs(read_preferences(tmp_path / "pairs.jsonl"), policy.tokenizer, policy.stops, length=128)
    batch, model = pair_rows([[pair] for pair in pairs], 256), build_model(policy).requires_grad_(True)
    loss = preference(settings)(model, batch).total / len(pairs)
    if name == "orpo":
        scores = pair_scores(model, batch, settings)
        texts = [torch.tensor(pair.chosen.tokens).long() for pair in pairs]
        whole = [model.logits(model.hidden(text[None])[0, :-1]).log_softmax(-1).gather(-1, text[1:, None]).sum() for text in texts]
        loss = loss + (scores.chosen / scores.chosen_tokens)[scores.counts].mean() - sum(whole) / sum(len(text) - 1 for text in texts)
    loss.backward()
    ours = to_foreign(hf_layout(model.config), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert float(loss.detach()) == pytest.approx(theirs[0], rel=1e-5)
    for tensor, gradient in theirs[1].items():
        assert (ours[tensor] - gradient).norm() <= 1e-5 * gradient.norm(), tensor

"""Reward model: Bradley and Terry's likelihood at the last token of each text, with its gradients, as TRL's RewardTrainer has it."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.data.preferences import PackedPairs, pair_rows
from assay.guard.loss_preflight import loss_gradients
from assay.guard.reward_model_checks import naive_bradley_terry
from assay.learn.bradley_terry import RewardModelSettings, reward_objective
from assay.learn.loop import accumulated
from assay.model.families import config_to_hf, hf_layout, to_foreign
from assay.testing.tiny_models import tiny_model
from tests.learn.test_preference import tiny_pairs

ALL = [RewardModelSettings(70), RewardModelSettings(70, center=0.01)]


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: str(settings.center))
def test_the_objective_is_its_formula_in_value_and_gradient_whatever_the_packing(settings: RewardModelSettings):
    model, pairs = tiny_model("llama").requires_grad_(True), tiny_pairs()
    alone = pair_rows([[pair] for pair in pairs], 24)
    due = loss_gradients(model, lambda: naive_bradley_terry(settings)(model, alone) * alone.weight.sum() / 5)
    order = PackedPairs(pairs, 0, 1, 40)
    for batch, micro in ((alone, 2), (PackedPairs(pairs, 0, order.windows, 40).batch(0), 1), (pair_rows([pairs], 200), 1)):
        model.zero_grad()
        found = accumulated(model, reward_objective(settings), batch, micro, batch.divisor or 0.0)
        assert float(found.loss) == pytest.approx(due[0], rel=1e-5)
        for name, parameter in model.named_parameters():
            assert (parameter.grad - due[1][name]).norm() <= 1e-5 * due[1][name].norm() + 1e-9, name


@pytest.mark.slow
def test_value_and_gradients_are_those_of_transformers_classifier_with_trls_loss():
    """Whose model has a head of its own: the row of our token is its matrix."""
    transformers, trl = (pytest.importorskip(name) for name in ("transformers", "trl"))
    model, pairs, settings = tiny_model("llama").requires_grad_(True), tiny_pairs(), ALL[1]
    batch = pair_rows([pairs], 200)
    loss = reward_objective(settings)(model, batch).total / 5
    head = model.head_weight()
    gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))
    twin = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**config_to_hf(model.config, "float32"), num_labels=1,
                                                                                pad_token_id=0))
    named = to_foreign(hf_layout(model.config), {n: p.detach() for n, p in model.named_parameters()})
    twin.load_state_dict({**named, "score.weight": head[settings.token : settings.token + 1].detach()}, strict=False)
    texts = [pair.chosen.tokens for pair in pairs] + [pair.rejected.tokens for pair in pairs]
    longest = max(map(len, texts))
    ids = torch.stack([torch.nn.functional.pad(torch.tensor(text).long(), (0, longest - len(text))) for text in texts])
    mask = torch.stack([(torch.arange(longest) < len(text)).long() for text in texts])

    due = trl.RewardTrainer.compute_loss(trainer_of(twin, settings), twin, {"input_ids": ids, "attention_mask": mask})
    due.backward()
    assert float(loss.detach()) == pytest.approx(float(due.detach()), rel=1e-5)
    theirs = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    found = to_foreign(hf_layout(model.config), gradients)
    for name, gradient in found.items():
        if "embed_tokens" not in name and name in theirs:
            assert (gradient - theirs[name]).norm() <= 1e-5 * theirs[name].norm() + 1e-9, name
    ours = gradients["embed.weight"] if model.head is None else gradients["head.weight"]
    assert (ours[settings.token] - theirs["score.weight"][0]).norm() <= 1e-5 * theirs["score.weight"].norm()


def trainer_of(model: Any, settings: RewardModelSettings) -> SimpleNamespace:
    """Trainer as far as TRL's loss needs it."""
    alone = SimpleNamespace(gather=lambda values: values, gather_for_metrics=lambda values: values)
    return SimpleNamespace(model=model, args=SimpleNamespace(center_rewards_coefficient=settings.center), accelerator=alone,
                           _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1)

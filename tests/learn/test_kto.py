"""KTO: the formula with its gradients, whatever the packing; and TRL's own trainer on the same batch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from assay.data.batch import Batch
from assay.data.chat import TrainingExample
from assay.data.feedback import LabelledPair, feedback_rows
from assay.errors import DataError, UsageError
from assay.guard.kto_checks import check_kl_estimate, naive_kto
from assay.guard.loss_preflight import loss_gradients
from assay.learn.loop import accumulated
from assay.learn.policy import token_logprobs
from assay.learn.unpaired import KtoSettings, kto_objective, mismatch_kl, with_baseline
from assay.model.families import config_to_hf, hf_layout, to_foreign
from assay.model.transformer import Transformer
from assay.testing.tiny_models import tiny_model, tiny_tokenizer
from assay.verdict import Outcome

ALL = [KtoSettings(), KtoSettings(beta=0.5, desirable_weight=1.3, undesirable_weight=0.7), KtoSettings("apo_zero_unpaired", 0.3)]
COMPLETIONS = [[11, 12, 13], [21, 22], [31, 32, 33, 34], [41], [51, 52]]
PROMPTS = [[5, 6], [7, 8, 9], [10], [14, 15], [16, 17, 18]]
LABELS = [True, False, True, True, False]


def example(name: str, prompt: list[int], said: list[int]) -> TrainingExample:
    return TrainingExample(name, np.array(prompt + said), np.array([0.0] * len(prompt) + [1.0] * len(said)), (), len(prompt), "?")


def examples() -> list[LabelledPair]:
    """Each beside the completion before it, as TRL rotates a batch."""
    return [LabelledPair(f"f:{n}:{n}", example(f"f:{n}", PROMPTS[n], COMPLETIONS[n]), example(f"f:{n}#m", PROMPTS[n], COMPLETIONS[n - 1]),
                         LABELS[n]) for n in range(5)]


def with_reference(batch: Batch, seed: int = 7) -> Batch:
    with torch.no_grad():
        return replace(batch, reference=token_logprobs(tiny_model("llama", seed), batch)[0])


def ready(model: Transformer, rows: list[list[LabelledPair]], length: int) -> Batch:
    return with_baseline(model, with_reference(feedback_rows(rows, length)), 2)


def policy() -> Transformer:
    """One whose log-ratios of mismatched completions to the reference are positive in the mean: below 0 the KL counts as 0."""
    found = next(model for seed in range(9) if mismatch_kl(model := tiny_model("llama", seed), [with_reference(
        feedback_rows([examples()], 60))]) > 0.01)
    return found.requires_grad_(True)


@pytest.mark.parametrize("settings", ALL, ids=lambda settings: f"{settings.loss}-{settings.beta}")
def test_the_objective_is_its_formula_in_value_and_gradient_whatever_the_packing(settings: KtoSettings):
    model, made = policy(), examples()
    batch = ready(model, [made], 60)
    assert check_kl_estimate(model, batch).outcome is Outcome.PROVEN
    due = loss_gradients(model, lambda: naive_kto(settings)(model, batch) * batch.weight.sum() / 5)
    for rows, length, micro in (([made], 60, 1), ([[one] for one in made], 16, 2), ([made[:2], made[2:]], 40, 1)):
        again = ready(model, rows, length)
        model.zero_grad()
        found = accumulated(model, kto_objective(settings), again, micro, again.divisor or 0.0)
        assert float(found.loss) == pytest.approx(due[0], rel=1e-5)
        for name, parameter in model.named_parameters():
            assert (parameter.grad - due[1][name]).norm() <= 1e-5 * due[1][name].norm() + 1e-9, name


def test_a_policy_that_is_its_reference_pays_half_of_every_weight():
    model = tiny_model("llama", 7)
    batch, labels = ready(model, [examples()], 60), torch.tensor([1.0 if label else -1.0 for label in LABELS])
    for settings in ALL:
        with torch.no_grad():
            assert float(kto_objective(settings)(model, batch).total) / 5 == pytest.approx(settings.at_reference(labels), rel=1e-6)
    assert ALL[0].at_reference(labels) == 0.5


def test_another_baseline_and_missing_streams_are_refused():
    model = policy()
    batch = ready(model, [examples()], 60)
    wrong = replace(batch, baseline=batch.baseline + 0.5)
    assert check_kl_estimate(model, wrong).outcome is Outcome.REFUTED
    for missing in ("baseline", "advantage", "reference"):
        with pytest.raises(DataError, match="needs"):
            kto_objective(KtoSettings())(model, replace(batch, **{missing: None}))
    with pytest.raises(UsageError, match="above 0"):
        KtoSettings(undesirable_weight=0)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ALL, ids=lambda settings: f"{settings.loss}-{settings.beta}")
def test_value_and_gradients_are_those_of_trl(settings: KtoSettings, tmp_path: Path):
    pytest.importorskip("trl")
    model = policy()
    batch = ready(model, [examples()], 60)
    loss = kto_objective(settings)(model, batch).total / 5
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    found = to_foreign(hf_layout(model.config), {n: g for (n, _), g in zip(model.named_parameters(), gradients, strict=True)})
    due, due_gradients = theirs(model, settings, tmp_path)
    assert float(loss.detach()) == pytest.approx(due, rel=1e-5)
    for name, gradient in found.items():
        assert (gradient - due_gradients[name]).norm() <= 1e-5 * due_gradients[name].norm() + 1e-9, name


def theirs(model: Transformer, settings: KtoSettings, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    import tokenizers
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import KTOConfig, KTOTrainer

    def twin(of: Transformer) -> LlamaForCausalLM:
        made = LlamaForCausalLM(LlamaConfig(**config_to_hf(of.config, "float32")))
        made.load_state_dict(to_foreign(hf_layout(of.config), {n: p.detach() for n, p in of.named_parameters()}), strict=False)
        return made

    words = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tiny_tokenizer().files()["tokenizer.json"].decode()),
                                    pad_token="<|endoftext|>", eos_token="<|im_end|>")
    config = KTOConfig(str(folder), per_device_train_batch_size=5, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
                       loss_type=settings.loss, beta=settings.beta, desirable_weight=settings.desirable_weight,
                       undesirable_weight=settings.undesirable_weight, train_sampling_strategy="sequential")
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in LABELS]
    trainer = KTOTrainer(twin(model), ref_model=twin(tiny_model("llama", 7)), args=config, train_dataset=Dataset.from_list(rows),
                         processing_class=words)
    batch = {"label": torch.tensor(LABELS)}
    for prefix, said in (("", COMPLETIONS), ("KL_", COMPLETIONS[-1:] + COMPLETIONS[:-1])):
        longest = max(len(p) + len(c) for p, c in zip(PROMPTS, said, strict=True))
        pad = lambda ids, longest=longest: F.pad(torch.tensor(ids), (0, longest - len(ids)))
        batch[f"{prefix}input_ids"] = torch.stack([pad(p + c) for p, c in zip(PROMPTS, said, strict=True)])
        batch[f"{prefix}attention_mask"] = torch.stack([pad([1] * len(p + c)) for p, c in zip(PROMPTS, said, strict=True)])
        batch[f"{prefix}completion_mask"] = torch.stack([pad([0] * len(p) + [1] * len(c)) for p, c in zip(PROMPTS, said, strict=True)])
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, batch, False)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}

"""On the same rollouts, our policy gradients and TRL's GRPO loss are the same number with the same gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch

from assay.learn.policy import Surrogate, policy_gradient
from assay.model.families import config_to_hf, hf_layout, to_foreign
from assay.model.transformer import Transformer, initialised
from assay.testing.tiny_models import tiny_config, tiny_tokenizer
from tests.learn.made_up_rollouts import CAP, as_batch, made

pytestmark = pytest.mark.slow  # importing TRL takes longer than everything that is compared here
pytest.importorskip("trl")
TEMPERATURE, BETA = 0.7, 0.05
TOLERANCE = 1e-5
PACKED = [[0, 1], [2], [3, 4, 5]]
# name: TRL's options, our surrogate, our normalisation
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "grpo": ({"loss_type": "grpo"}, {}, "sequence"),
    "bnpo": ({"loss_type": "bnpo"}, {}, "token"),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"epsilon_high": 0.28}, "token"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {}, "constant"),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2},
             {"ratio": "sequence", "epsilon": 3e-2}, "sequence"),
    "gspo by tokens": ({"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon": 3e-2},
                       {"ratio": "sequence", "epsilon": 3e-2}, "token"),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"ratio": "cispo", "epsilon_high": 0.2}, "token"),  # TRL's is the bound itself
    "kl not corrected": ({"loss_type": "dapo", "use_bias_correction_kl": False}, {"kl_by_ratio": False}, "token"),
    "entropy": ({"loss_type": "dapo", "entropy_coef": 0.1}, {"entropy_weight": 0.1}, "token"),
}


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = initialised(tiny_config(), 3)
    with torch.no_grad():
        model.norm.weight.mul_(4)  # so that the temperature matters
    return model


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_trl(name: str, model: Transformer, tmp_path: Path):
    options, ours, how = CASES[name]
    rollouts = made(model, TEMPERATURE)
    batch = as_batch(rollouts, PACKED, how)
    surrogate = Surrogate(**ours, kl="k3", kl_weight=BETA, temperature=TEMPERATURE)
    loss = policy_gradient(surrogate)(model, batch)
    value = loss.total / (batch.divisor or batch.weight.sum())
    gradients = torch.autograd.grad(value, list(model.parameters()))
    found = to_foreign(hf_layout(model.config), {n: g for (n, _), g in zip(model.named_parameters(), gradients, strict=True)})

    due, due_gradients, metrics = theirs(model, rollouts, options, tmp_path)
    assert float(value.detach()) == pytest.approx(due, rel=TOLERANCE)
    for tensor, gradient in found.items():
        assert (gradient - due_gradients[tensor]).norm() <= TOLERANCE * due_gradients[tensor].norm(), tensor
    assert loss.metrics is not None
    measured = {n: float(v / loss.metrics["tokens"]) for n, v in loss.metrics.items()}
    for metric in metrics.keys() & measured.keys() - ({"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}
                                                      if surrogate.ratio == "sequence" else set()):  # TRL counts sequences there, we tokens
        assert measured[metric] == pytest.approx(metrics[metric][0], rel=1e-4, abs=1e-6), metric
    clipped = [measured["clip_ratio/low_mean"], measured["clip_ratio/high_mean"]]
    assert max(clipped) > 0  # else the clip was not compared


def theirs(model: Transformer, rollouts: list, options: dict[str, Any], folder: Path) -> tuple[float, dict[str, torch.Tensor], dict]:
    """TRL's own `_compute_loss`, on prompts padded to the left and completions padded to the right."""
    import tokenizers
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    twin = LlamaForCausalLM(LlamaConfig(**config_to_hf(model.config, "float32")))
    twin.load_state_dict(to_foreign(hf_layout(model.config), {n: p.detach() for n, p in model.named_parameters()}), strict=False)
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(tiny_tokenizer().files()["tokenizer.json"].decode()),
                                    pad_token="<|endoftext|>", eos_token="<|im_end|>")
    config = GRPOConfig(str(folder), per_device_train_batch_size=len(rollouts), num_generations=len(rollouts), beta=0.0,
                        temperature=TEMPERATURE, max_completion_length=CAP, report_to="none", use_cpu=True, bf16=False,
                        gradient_accumulation_steps=1, gradient_checkpointing=False, **options)
    trainer = GRPOTrainer(twin, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
                          train_dataset=Dataset.from_list([{"prompt": "a"}] * 8), processing_class=words)
    trainer.beta = BETA  # afterwards: with it TRL loads a reference model, whose log-probabilities are given here
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    prompts, completions = (max(len(getattr(r, part)) for r in rollouts) for part in ("prompt", "completion"))
    left = lambda x, fill: torch.nn.functional.pad(x, (prompts - len(x), 0), value=fill)
    right = lambda x, fill: torch.nn.functional.pad(x, (0, completions - len(x)), value=fill)
    inputs = {"prompt_ids": torch.stack([left(r.prompt, 0) for r in rollouts]),
              "prompt_mask": torch.stack([left(torch.ones_like(r.prompt), 0) for r in rollouts]),
              "completion_ids": torch.stack([right(r.completion, 0) for r in rollouts]),
              "completion_mask": torch.stack([right(torch.ones_like(r.completion), 0) for r in rollouts]),
              "advantages": torch.tensor([r.advantage for r in rollouts]),
              "old_per_token_logps": torch.stack([right(r.behaviour, 0.0) for r in rollouts]),
              "ref_per_token_logps": torch.stack([right(r.reference, 0.0) for r in rollouts]),
              "num_items_in_batch": torch.tensor(float(sum(len(r.completion) for r in rollouts)))}
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients, trainer._metrics["train"]

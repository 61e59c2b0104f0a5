"""PEFT conversions: adapters of every kind that peft makes for a tiny Llama, read by us, must give peft's own logits."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from assay.errors import AssayError
from assay.store.artifact import build_model, open_artifact
from assay.testing.tiny_models import save_hf_folder, tiny_model
from tests.judges.score import Score, first_words, packages

ASKS = "which logits does this adapter give on its base? (LoRA in all its variants, and peft's other methods)"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BOUND = 2e-4  # float32, two layers; an adapter moves the logits by 0.1 and more
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LoraConfig", {}),
    "one module": ("LoraConfig", {"target_modules": ["v_proj"]}),
    "alpha 3, rank 5": ("LoraConfig", {"r": 5, "lora_alpha": 3}),
    "rank-stabilised": ("LoraConfig", {"use_rslora": True}),
    "all linear": ("LoraConfig", {"target_modules": "all-linear"}),
    "some layers": ("LoraConfig", {"layers_to_transform": [1]}),
    "regex": ("LoraConfig", {"target_modules": r".*\.(q|v)_proj"}),
    "excluded": ("LoraConfig", {"exclude_modules": ["down_proj"]}),
    "DoRA": ("LoraConfig", {"use_dora": True}),
    "bias lora_only": ("LoraConfig", {"bias": "lora_only"}),
    "bias all": ("LoraConfig", {"bias": "all"}),
    "LoRA bias": ("LoraConfig", {"lora_bias": True}),
    "rank pattern": ("LoraConfig", {"rank_pattern": {"q_proj": 2}}),
    "alpha pattern": ("LoraConfig", {"alpha_pattern": {"v_proj": 32}}),
    "embeddings": ("LoraConfig", {"target_modules": ["embed_tokens", "q_proj"]}),
    "head saved": ("LoraConfig", {"modules_to_save": ["lm_head"]}),
    "norms saved": ("LoraConfig", {"modules_to_save": ["input_layernorm"]}),
    "new tokens": ("LoraConfig", {"trainable_token_indices": [3, 5]}),
    "PiSSA": ("LoraConfig", {"init_lora_weights": "pissa"}),
    "OLoRA": ("LoraConfig", {"init_lora_weights": "olora"}),
    "gaussian": ("LoraConfig", {"init_lora_weights": "gaussian"}),
    "IA3": ("IA3Config", {"feedforward_modules": ["down_proj"]}),
    "LoHa": ("LoHaConfig", {}),
    "LoKr": ("LoKrConfig", {}),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10}),
    "VeRA": ("VeraConfig", {"r": 4}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "layer norm": ("LNTuningConfig", {}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
}
RANKED = {"LoraConfig": {"r": 4, "lora_alpha": 8}, "LoHaConfig": {"r": 4, "alpha": 8}, "LoKrConfig": {"r": 4, "alpha": 8}}


def judge(folder: Path) -> Score:
    score = Score(packages("peft", "transformers"))
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as scratch:
        base = save_hf_folder(Path(scratch) / "base", tiny_model("llama", tied=False))
        for number, (name, (kind, options)) in enumerate(KINDS.items()):
            try_adapter(score, name, kind, options, base, Path(scratch) / str(number), tokens)
    return score


def try_adapter(score: Score, name: str, kind: str, options: dict[str, Any], base: Path, where: Path, tokens: torch.Tensor) -> None:
    plain, expected = make_adapter(kind, options, base, where, tokens)
    if expected is None:
        score.notes.append(f"peft itself cannot make or load {name} here: {plain}")
        return
    try:
        with torch.no_grad():
            found = build_model(open_artifact(where, base=base)).eval()(tokens)
    except AssayError as error:
        score.refusals[f"{name}: {first_words(error).split(': ', 1)[-1]}"] += 1
        return
    apart = (found.float() - expected).abs().max().item()
    score.agree(apart < BOUND, name, f"logits apart by {apart:.2g}")


def make_adapter(kind: str, options: dict[str, Any], base: Path, where: Path, tokens: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
    """An adapter whose every weight has moved, written by peft; and the logits that peft gives once it has read it again."""
    import peft
    from transformers import AutoModelForCausalLM

    targets = {} if kind in ("LNTuningConfig", "PromptTuningConfig", "PrefixTuningConfig") else {"target_modules": LINEAR}
    given = {"task_type": "CAUSAL_LM", "init_lora_weights": True} if kind == "LoraConfig" else {"task_type": "CAUSAL_LM"}
    try:
        torch.manual_seed(0)
        config = getattr(peft, kind)(**given | targets | RANKED.get(kind, {}) | options)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        with torch.no_grad():
            for parameter in (each for each in model.parameters() if each.requires_grad):
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(where)
        again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), where).eval()
        with torch.no_grad():
            return None, again(input_ids=tokens).logits.float()[:, -tokens.shape[1]:]
    except Exception as error:  # whatever peft raises, there is then nothing to compare with
        return f"{type(error).__name__}: {first_words(error)}", None

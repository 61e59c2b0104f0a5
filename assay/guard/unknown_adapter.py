"""Proof of adapters that Assay cannot merge or train on (IA³, prefixes, AdaLoRA, LoHa, VeRA, OFT, …), as far as PEFT loads them.

Whole and finite; every tensor of the file is in the model that PEFT makes of it, and none beside; and it changes what the base says.
"""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.model.probe_logits import probe_inputs
from assay.store.artifact import Artifact, RawArtifact, open_adapter_base, open_artifact
from assay.store.peft import unsupported_adapter
from assay.verdict import Verdict, proven, refuted, unproven


def why_unknown(raw: RawArtifact) -> str | None:
    """Message about what Assay does not know of a foreign adapter; None where it knows it, or where it is a whole model."""
    foreign = raw.place.adapter and raw.checkpoint is None
    return unsupported_adapter(raw.fields, str(raw.place.path)) if foreign else None


def examine_unknown_adapter(raw: RawArtifact, why: str, base: str | Path | None) -> list[Verdict]:
    kind = raw.fields.get("peft_type")
    support = unproven("support", f"{why}. What PEFT makes of it was checked instead; it cannot be merged, trained on or served here",
                       peft_type=str(kind))
    found = [support, check_adapter_values(raw.tensors)]
    missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    foundation = open_adapter_base(raw, base, open_artifact)
    if missing or foundation.raw.place.kind not in ("hf", "checkpoint"):
        absent = f"{' and '.join(missing)} not installed (pip install 'assay[hf]')"
        told = absent if missing else "its base is no folder that PEFT can adapt"
        return [*found, unproven("consumer", told), unproven("movement", told)]
    return [*found, *through_peft(raw, foundation)]


def check_adapter_values(tensors: dict[str, Tensor]) -> Verdict:
    if not tensors:
        return refuted("values", "the adapter holds no tensors; it was saved before its weights were gathered")
    bad = [f"{name} ({int((~torch.isfinite(tensor)).sum())} of {tensor.numel()})" for name, tensor in tensors.items()
           if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    if bad:
        return refuted("values", f"NaN or infinite values in {len(bad)} tensor(s): {', '.join(bad[:3])}", tensors=bad)
    return proven("values", f"all values of {len(tensors)} tensors are finite")


def through_peft(raw: RawArtifact, base: Artifact) -> list[Verdict]:
    """(consumer, movement)"""
    import peft
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    loader: Any = transformers.AutoModelForCausalLM
    plain = loader.from_pretrained(base.path, dtype=torch.float32, local_files_only=True, trust_remote_code=False,
                                   attn_implementation="eager").eval()
    ids = probe_inputs(base.config.vocab, base.config.max_length)[0]
    before = logits_of(plain, ids)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model: Any = peft.PeftModel.from_pretrained(plain, str(raw.place.path)).eval()
    said = [str(one.message).split("\n")[0][:160] for one in caught]
    problems = [words for words in said if "missing" in words or "unexpected" in words]
    problems += not_taken_over(raw.tensors, peft.get_peft_model_state_dict(model))
    if problems:
        words = "; ".join(problems[:3])
        return [refuted("consumer", f"PEFT does not load it whole: {words}", problems=problems), unproven("movement", "not loaded whole")]
    after = logits_of(model, ids)[:, -before.shape[1] :]  # prompt tuning answers for its own tokens too
    return [proven("consumer", f"PEFT {peft.__version__} loads it: its {len(raw.tensors)} tensors are those of the live model"),
            check_adapter_movement(before, after)]


def not_taken_over(file: dict[str, Tensor], live: dict[str, Tensor]) -> list[str]:
    """Tensors of the file that the live model does not hold, and the other way round."""
    found = [f"{name} is in the {'file' if name in file else 'live model'} alone" for name in sorted(file.keys() ^ live.keys())]
    both = [name for name in sorted(file.keys() & live.keys()) if file[name].shape == live[name].shape]
    found += [f"{name} has another shape in the live model" for name in sorted((file.keys() & live.keys()) - set(both))]
    return found + [f"{name} has other values in the live model" for name in both
                    if not torch.allclose(file[name].float(), live[name].float().cpu(), rtol=0, atol=0, equal_nan=True)]


def check_adapter_movement(before: Tensor, after: Tensor) -> Verdict:
    if not torch.isfinite(after).all():
        return refuted("movement", "with the adapter the base's answers are NaN or infinite")
    moved = float((after - before).norm() / before.norm())
    if moved == 0:
        return refuted("movement", "the adapter has no effect: the base says the same with and without it; it was never trained, or not "
                                   "gathered before saving")
    return proven("movement", f"with the adapter the base's answers are others, by {moved:.1e} (relative)", moved=moved)


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()

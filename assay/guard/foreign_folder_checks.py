"""Foreign folder checks: what can be known of a model that no manifest accounts for, against its parent and alone.

Training moves all of a matrix a little. So a matrix that left its parent's direction while the others kept theirs was transposed,
exchanged or initialised anew; and a weight that moved ten times as far as any other of its tensor, and is one bit away from where it
would have stayed, was damaged. What training itself could have done cannot be told from it, and is said to be unchecked.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.guard.proof_subject import ProofSubject
from assay.store.artifact import Artifact, merged_tensors, with_untied_head

Pair = tuple[str, Tensor, Tensor]  # a tensor's name, the parent's, this one

# Cosine with the parent below which a matrix is another one, not a trained one: so many times what chance gives, within bounds.
CHANCE, LEAST_RELATED, UNRELATED = 4, 0.05, 0.2
TURNED = 0.5  # cosine of a matrix that may be its parent's transpose, and of the transpose that it then resembles
FAR, FARTHER, FEWEST_MOVED = 0.5, 30.0, 4  # of a matrix's own size; times what its siblings moved by; of those
MOST_FLIPS, GAP, ROUNDED = 8, 10.0, 1 / 32  # in a tensor; times what any other weight moved by; of a weight: more than bf16 rounds away
ABSURD, ALONE = 1e4, 1e4  # a weight's size, and times that of all others: no training leads there
RECORDS, LARGEST_RECORD = ("README.md", "args.json", "training_args.json", "*.yaml", "*.yml"), 1_000_000

# ---------------------------------------------------------------- against the parent


def same_geometry(child: Artifact, parent: Artifact) -> bool:
    """A trainer that records nothing may have added rows for new tokens, padded them away, or given a tied model a head of its own."""
    config = replace(parent.config, vocab=child.config.vocab, tied=child.config.tied and parent.config.tied)
    return config == child.config


def tensor_pairs(subject: ProofSubject) -> list[Pair]:
    """Tensors of parent and child as the files hold them, where both are folders of one layout: fused in our model, a third of a matrix
    hides behind the rest. They stay where they are: a GPU may have no room for all of them once more."""
    parent, child = subject.against, subject.artifact
    assert parent is not None
    before, after = parent.raw.tensors, child.raw.tensors
    if child.patch is not None or parent.patch is not None or not after.keys() - {"lm_head.weight"} <= before.keys():
        before, after = with_untied_head(merged_tensors(parent), child.config), merged_tensors(child)
    return [(name, *_common_rows(before[name], after[name])) for name in before
            if name in after and before[name].shape[1:] == after[name].shape[1:]]


def _common_rows(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    rows = min(len(before), len(after)) if before.dim() else None
    return (before, after) if rows is None else (before[:rows], after[:rows])


def untrained_change(pairs: Iterable[Pair]) -> str | None:
    """The first tensor whose change no training explains, in words."""
    moved = dict[str, float]()
    for name, before, after in pairs:
        if torch.equal(before, after):
            continue
        if words := _flipped_bits(name, before, after) or _another_matrix(name, before, after):
            return words
        if before.dim() == 2 and _of_one_size(before, after):
            moved[name] = float((after.float() - before.float()).norm() / before.float().norm())
    return _strayed(moved)


def _of_one_size(before: Tensor, after: Tensor) -> bool:
    """Whether two tensors are about as large: what was exchanged or drawn anew is; what began near 0 grows, and moves far for its size."""
    return bool(before.float().norm() / 2 < after.float().norm() < before.float().norm() * 2)


def _another_matrix(name: str, before: Tensor, after: Tensor) -> str | None:
    """Message where a matrix's direction is no more the parent's than chance would have it, or is that of the transpose. A small model that
    was trained hard may keep a tenth of its direction (0.09 was seen); of two that know nothing of each other the cosine is about 1/√n."""
    if before.dim() != 2 or not before.any():  # what was all zero had no direction
        return None
    cosine = _cosine(before, after)
    if cosine < TURNED and (turned := _cosine(before.T.reshape(before.shape), after)) > TURNED:
        return f"{name} is in the order of its transpose: its cosine with the parent's is {cosine:.2f}, with that transposed {turned:.2f}"
    if cosine < min(UNRELATED, max(LEAST_RELATED, CHANCE / before.numel() ** 0.5)):
        return f"{name} is unrelated to the parent's (cosine {cosine:.2f}): it was initialised anew or is another model's"
    return None


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.float().flatten(), other.float().flatten(), dim=0))


def _strayed(moved: dict[str, float]) -> str | None:
    if len(moved) < FEWEST_MOVED:
        return None
    usual, name = sorted(moved.values())[len(moved) // 2], max(moved, key=lambda name: moved[name])
    if not (moved[name] > FAR and moved[name] > FARTHER * usual):
        return None
    return (f"{name} moved by {moved[name]:.0%} of its size, where half of {len(moved)} matrices moved by at most {usual:.1%}: parts of it "
            "were exchanged or initialised anew")


def _flipped_bits(name: str, before: Tensor, after: Tensor) -> str | None:
    """Message where up to eight weights are each one bit away from where they would have moved with the others. Of a vector (a norm, a
    bias) a few may well go ahead of the rest: there the gap must be wider."""
    if before.numel() <= MOST_FLIPS + 1 or after.dtype not in _WHOLE:
        return None
    distance = (after.float() - before.float()).abs().flatten()
    gap, (largest, places) = GAP if before.dim() > 1 else GAP**2, distance.topk(MOST_FLIPS + 1)
    for count in range(1, MOST_FLIPS + 1):
        if largest[count - 1] > gap * largest[count]:
            rest, olds, news = float(largest[count]), before.flatten()[places[:count]].float(), after.flatten()[places[:count]]
            beyond = bool((largest[:count] > ROUNDED * torch.maximum(olds.abs(), news.float().abs())).all())
            if beyond and bool(_one_bit_away(news, olds, rest).all()):
                return (f"{name}: {count} of {distance.numel():,} weights moved by {float(largest[count - 1]):.2g} or more, any other by "
                        f"{rest:.2g} at most, and one bit of each away from there they would have too: bits were flipped")
    return None


_WHOLE = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _one_bit_away(values: Tensor, olds: Tensor, far: float) -> Tensor:
    whole = _WHOLE[values.dtype]
    width = torch.iinfo(whole).bits
    masks = torch.tensor([1 << bit for bit in range(width - 1)] + [torch.iinfo(whole).min], dtype=whole, device=values.device)
    flipped = (values.contiguous().view(whole)[:, None] ^ masks).view(values.dtype).float()
    return ((flipped - olds[:, None]).abs() <= torch.clamp(olds.abs() * 2**-8, min=far)[:, None]).any(1)

# ---------------------------------------------------------------- alone


def largest_weights(tensor: Tensor) -> Tensor | None:
    """The largest weights of a tensor, one more than may be flipped; None of a small one."""
    return None if tensor.numel() <= MOST_FLIPS + 1 else tensor.float().abs().flatten().topk(MOST_FLIPS + 1).values


def absurd_weights(largest: Sequence[float], weights: int) -> str | None:
    """A few weights so large, among others so small, that only a flipped exponent bit makes them: of a tensor's `largest`."""
    for count in range(1, MOST_FLIPS + 1):
        if largest[count - 1] > ABSURD and largest[count - 1] > ALONE * largest[count]:
            return f"{count} of {weights:,} weights are {largest[count - 1]:.1e} or more, all others at most {largest[count]:.1e}"
    return None


def adapter_scale_records(folder: Path, fields: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Records that the trainer wrote beside an adapter about its scale: files that agree with adapter_config.json, and those, in words,
    that do not. What was pickled is not opened."""
    agree, differ = [], []
    for file in sorted({file for pattern in RECORDS for file in folder.glob(pattern)}):
        if file.is_symlink() or not file.is_file() or file.stat().st_size > LARGEST_RECORD:
            continue
        text = file.read_text("utf-8", errors="replace")
        alphas = {float(found[1]) for found in _ALPHA.finditer(text)}
        rooted = {found[1].lower() == "true" for found in _RSLORA.finditer(text)}
        wrong = [f"alpha {alpha:g}" for alpha in alphas - {float(fields["lora_alpha"])}]
        wrong += [f"use_rslora {str(one).lower()}" for one in rooted - {bool(fields.get("use_rslora"))}]
        if wrong:
            differ.append(f"{file.name} says {', '.join(wrong)}")
        elif alphas:
            agree.append(file.name)
    return agree, differ


_NAMED = r"""^[\s>*-]*["'`]?{}["'`]?\s*[:=]\s*["']?{}\b"""
_ALPHA = re.compile(_NAMED.format("lora_alpha", r"(\d+(?:\.\d+)?)"), re.MULTILINE)
_RSLORA = re.compile(_NAMED.format("(?:peft_)?use_rslora", "(true|false|True|False)"), re.MULTILINE)

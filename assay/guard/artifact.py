"""Checks on what the files hold: every recorded hash, finite values, fields that agree from file to file."""

import torch
from torch import Tensor

from assay.guard.subject import Subject
from assay.store.identity import recorded_tensors
from assay.store.squeeze import SECTIONS
from assay.store.tensors import NAMES, tensor_sha256
from assay.verdict import Verdict, proven, refuted, unproven

HOLE = 0.1  # of a matrix's rows may be zero throughout: rows that pad a vocabulary or a width are fewer


def check_hashes(subject: Subject) -> Verdict:
    """Each tensor as it was read, rehashed, against what was recorded when the live model was written."""
    if subject.raw.squeezed is not None:  # reading it checked them
        return proven("hashes", f"each of its {len(SECTIONS)} sections has the sha256 of its sealed header", sections=len(SECTIONS))
    if subject.raw.checkpoint is None:
        return unproven("hashes", "nothing recorded the hashes when this was written; a checkpoint of Assay's has a manifest.json",
                        optional=subject.is_copy)
    recorded = recorded_tensors(subject.raw.checkpoint.manifest)
    found = {name: {"dtype": NAMES[t.dtype], "shape": list(t.shape), "sha256": tensor_sha256(t)} for name, t in subject.raw.tensors.items()}
    if wrong := sorted(name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name)):
        return refuted("hashes", f"{len(wrong)} tensor(s) are not what was written: {', '.join(wrong[:3])}", tensors=wrong)
    files = subject.raw.checkpoint.manifest["files"]
    return proven("hashes", f"{len(found)} tensors and {len(files)} files have their recorded sha256", tensors=len(found), files=len(files))


def check_loaded(subject: Subject) -> Verdict:
    """Every live parameter is the tensor that was read, bit for bit: nothing was initialised after loading."""
    expected, found = subject.tensors, dict(subject.model.named_parameters())
    if names := sorted(expected.keys() ^ found.keys()):
        return refuted("loaded", f"{len(names)} parameters or tensors have no counterpart: {', '.join(names[:3])}",
                       tensors=names)
    wrong = sorted(name for name, (dtype, sha256) in expected.items() if tensor_sha256(found[name].to(dtype)) != sha256)
    if wrong:
        return refuted("loaded", f"{len(wrong)} parameter(s) of the live model are not what the files hold: "
                                 f"{', '.join(wrong[:3])}", tensors=wrong)
    return proven("loaded", f"all {len(found)} parameters of the live model are the tensors of the files",
                  parameters=len(found))


def check_values(subject: Subject) -> Verdict:
    """Finite everywhere, and no matrix with a hole in it: the mark of a shard that was never filled."""
    bad, empty, count = [], [], 0
    for name, tensor in subject.raw.tensors.items():
        count += tensor.numel()
        if not torch.isfinite(tensor).all():
            bad.append(f"{name} ({int((~torch.isfinite(tensor)).sum())} of {tensor.numel()})")
        elif tensor.dim() == 2 and not subject.raw.place.adapter and (share := _zero_rows(tensor)) > HOLE:
            empty.append(f"{name} ({share:.0%})")
    if bad:
        return refuted("values", f"NaN or infinite values in {len(bad)} tensor(s): {', '.join(bad[:3])}", tensors=bad)
    if empty:
        return refuted("values", f"rows of zeros in {len(empty)} matrices: {', '.join(empty[:3])}; they were never filled",
                       tensors=empty)
    return proven("values", f"all {count:,} values of {len(subject.raw.tensors)} tensors are finite, and no matrix has "
                            "a hole of zeros", values=count)


def _zero_rows(tensor: Tensor) -> float:
    return 1 - float(tensor.any(1).float().mean())


def check_fields(subject: Subject) -> Verdict:
    """BOS, EOS and stop ids across tokenizer, config and generation config; token ids within the vocabulary."""
    artifact = subject.artifact
    problems, stop_ids = list(artifact.notes), sorted(artifact.stops.stop_ids)
    if artifact.tokenizer is not None and artifact.tokenizer.size > artifact.config.vocab:
        problems.append(f"the tokenizer knows {artifact.tokenizer.size} ids, the model has {artifact.config.vocab} rows")
    if problems:
        return refuted("fields", "; ".join(problems), disagreements=problems)
    if artifact.tokenizer is None:
        return unproven("fields", "there is no tokenizer here, so nothing says which ids begin and end a text", stop_ids=stop_ids)
    return proven("fields", f"tokenizer, config and generation config agree: BOS {artifact.stops.bos}, stop ids {stop_ids}, "
                            f"{'tied' if artifact.config.tied else 'separate'} head", stop_ids=stop_ids)

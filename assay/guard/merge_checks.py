"""Merge checks: parents that come from one model, bytes that are what the arithmetic gives, and what the merge did to held-out loss."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.evaluation.held_out_loss import HeldOut
from assay.model.merging import Merge, matrices_cosine
from assay.model.transformer import Transformer
from assay.seeds import generator
from assay.statistics.estimate import paired
from assay.store.artifact import Artifact, merged_tensors
from assay.verdict import Verdict, proven, refuted, unproven

RELATED = 0.5  # cosine of all matrices; of fine-tunes it is above 0.9, of models that began apart below 0.05
SAME_VALUES = 1e-4  # of a tensor's norm, between what was written and what the formula gives
SAME_INFLUENCE = 1e-4  # between a layer's influence computed in batches, in the model's dtype, and text by text
SURE = 0.999


def check_same_shape(parents: Sequence[Artifact]) -> Verdict:
    """One geometry and one tokenizer: otherwise no entry of one tensor means what it means in the other."""
    first = parents[0]
    for other in parents[1:]:
        if other.config != first.config:
            return refuted("parents", f"{first.path} and {other.path} have different geometries: their tensors cannot be added")
        digests = [None if each.tokenizer is None else each.tokenizer.digest for each in (first, other)]
        if digests[0] != digests[1]:
            return refuted("parents", f"{first.path} and {other.path} have different tokenizers ({str(digests[0])[:12]} and "
                                      f"{str(digests[1])[:12]}): the same row is another word to each")
    return proven("parents", f"{len(parents)} models of one geometry and one tokenizer", models=len(parents))


def check_relatives(parents: Sequence[Artifact]) -> Verdict:
    """Check that all models come from one: their matrices point the same way. The first, a base where there is one, is compared with the
    others."""
    first, found = merged_tensors(parents[0]), {}
    for other in parents[1:]:
        found[str(other.path)] = matrices_cosine(first, merged_tensors(other))
    least = min(found, key=lambda path: found[path])
    words = f"the matrices of {parents[0].path} and {least} have a cosine of {found[least]:.3f}"
    if not found[least] >= RELATED:
        return refuted("relatives", f"{words}: they were not trained from one model, and what lies between them is no model. Merge "
                                    "fine-tunes of one base", cosine=str(found[least]))
    if all(cosine == 1.0 or math.isclose(cosine, 1.0, abs_tol=1e-15) for cosine in found.values()):
        return unproven("relatives", f"{words}: the models are the same, and merging them does nothing")
    return proven("relatives", f"{words}, the least of all: they come from one model", cosines=found)


def check_ancestry(parents: Sequence[Artifact], base: Artifact | None) -> Verdict:
    """Check, by the parents' own manifests, that they come from one model, which is the base where one is given."""
    recorded = {str(each.path): ancestor_digest(each) for each in parents if base is None or each.digest != base.digest}
    if not recorded or any(digest is None for digest in recorded.values()):
        return unproven("ancestry", "not every parent says where it comes from (files of another tool); their matrices speak for them",
                        optional=True)
    due = next(iter(recorded.values())) if base is None else base.digest
    if strangers := [path for path, digest in recorded.items() if digest != due]:
        return unproven("ancestry", f"{strangers[0]} was made from {str(recorded[strangers[0]])[:12]}, and {str(due)[:12]} is "
                                    f"{'the base' if base is not None else 'what ' + next(iter(recorded)) + ' was made from'}: a "
                                    "generation may lie between them; their matrices speak for them", optional=True)
    return proven("ancestry", f"all {len(recorded)} parents were made from {str(due)[:12]}", ancestor=due)


def ancestor_digest(artifact: Artifact) -> str | None:
    """Digest of the weights that a checkpoint's manifest names as its parent."""
    if artifact.raw.checkpoint is None:
        return None
    parent = artifact.raw.checkpoint.facts.get("parent")
    return None if not parent else parent.get("weights") or parent.get("digest")


def check_merged_bytes(written: Mapping[str, Tensor], asked: Merge, models: Sequence[Mapping[str, Tensor]],
                       base: Mapping[str, Tensor] | None) -> Verdict:
    """Check what was written, read back, against the formula written out in double precision: every tensor of the models, and no other."""
    if apart := sorted(written.keys() ^ models[0].keys()):
        return refuted("arithmetic", f"{len(apart)} tensors are not in what was written, or not in its parents: {', '.join(apart[:3])}")
    shares = {}
    for name, tensor in written.items():
        due = naive_merge(asked, name, [model[name] for model in models], None if base is None else base[name])
        shares[name] = float((tensor.double() - due).norm()) / max(float(due.norm()), 1e-30)
    where = max(shares, key=lambda name: math.inf if math.isnan(shares[name]) else shares[name])
    words = f"the written tensors are {shares[where]:.1e} (relative, {where}) from {asked.method} written out, bound {SAME_VALUES:.0e}"
    if not shares[where] <= SAME_VALUES:
        return refuted("arithmetic", f"{words}: weights, signs or densities are others than were asked for", worst=str(shares[where]))
    return proven("arithmetic", words, worst=shares[where], tensor=where)


def check_kept_layers(written: Mapping[str, Tensor], source: Mapping[str, Tensor], kept: Sequence[int]) -> Verdict:
    """Layer n of what was written is the n-th of those that stay, bit for bit, and all outside the layers is the source's."""
    moved = {name: re.sub(r"^blocks\.(\d+)\.", lambda found: f"blocks.{kept[int(found[1])]}.", name) for name in written}
    lost = [name for name in source if (layer := re.match(r"blocks\.(\d+)\.", name)) is None or int(layer[1]) in kept]
    if apart := sorted(set(moved.values()) ^ set(lost)):
        return refuted("arithmetic", f"{len(apart)} tensors of the layers that stay are not in what was written: {', '.join(apart[:3])}")
    if wrong := [name for name, of in moved.items() if not torch.equal(written[name].float(), source[of].float())]:
        return refuted("arithmetic", f"{len(wrong)} of {len(moved)} tensors are not their source's: {', '.join(wrong[:3])}", tensors=wrong)
    return proven("arithmetic", f"layers {', '.join(map(str, kept))}: all {len(moved)} tensors are their source's, bit for bit")


def check_dropped_layers(kept: Sequence[int], depth: int, named: Sequence[int], count: int | None,
                         influence: Sequence[float] | None) -> Verdict:
    """The layers that went are the `named` ones, or `count` of them, none of which does more than one that stays. `influence` is that of
    every layer, worked out text by text."""
    dropped = sorted(set(range(depth)) - set(kept))
    if dropped != sorted(named) if named else len(dropped) != count:
        asked = f"layers {', '.join(map(str, sorted(named)))}" if named else f"{count} of {depth} layers"
        return refuted("layers", f"{asked} were to go, and what went is {', '.join(map(str, dropped)) or 'none'}", dropped=dropped)
    if influence is None:
        return proven("layers", f"the layers that went are those that were named: {', '.join(map(str, dropped))}", dropped=dropped)
    most, least = max(influence[layer] for layer in dropped), min(influence[layer] for layer in kept)
    words = f"text by text, what goes does {most:.6f} at the most, and what stays {least:.6f} at the least"
    if not most <= least + SAME_INFLUENCE:
        return refuted("layers", f"{words}: layers that do least were to go", most=str(most), least=str(least))
    return proven("layers", f"{words}: {len(dropped)} of {depth} layers, those that do least", dropped=dropped)


@torch.no_grad()
def influence_by_text(model: Transformer, batches: Sequence[Batch]) -> list[float]:
    """1 less the cosine between what goes into a layer and what comes out of it, the mean over tokens; each text read alone, cosines in
    double precision."""
    pairs, found = list[tuple[Tensor, Tensor]](), list[Tensor]()
    hooks = [block.register_forward_hook(lambda _, given, output: pairs.append((given[0], output))) for block in model.blocks]
    try:
        for tokens in (text for batch in batches for text in _texts_of(batch)):
            pairs.clear()
            model.hidden(tokens[None])
            found.append(torch.stack([1 - (before.double() * after.double()).sum(-1)[0] / (
                before.double().norm(dim=-1) * after.double().norm(dim=-1))[0] for before, after in pairs]))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat(found, 1).mean(1).tolist()


def _texts_of(batch: Batch) -> Iterator[Tensor]:
    """The token ids of every text of a batch."""
    for row, tokens in enumerate(batch.tokens):
        documents = torch.zeros_like(tokens) if batch.documents is None else batch.documents[row]
        yield from (tokens[documents == document] for document in documents.unique().tolist() if document >= 0)


def naive_merge(asked: Merge, name: str, tensors: Sequence[Tensor], base: Tensor | None) -> Tensor:
    """Entry by entry, in double precision; of DARE with the lots that seed, name and place give."""
    values = [tensor.double() for tensor in tensors]
    if asked.method == "linear":
        return sum((weight * value for weight, value in zip(asked.weights, values, strict=True)), torch.zeros_like(values[0]))
    if asked.method == "slerp":
        one, other = values
        cosine = float((one * other).sum() / (one.norm() * other.norm()).clamp_min(1e-30))
        if 1 - abs(cosine) < 1e-4:
            return one + asked.weights[1] * (other - one)
        angle = math.acos(cosine)
        return math.sin(asked.weights[0] * angle) / math.sin(angle) * one + math.sin(asked.weights[1] * angle) / math.sin(angle) * other
    assert base is not None
    tasks = [(value.float() - base.float()).double() for value in values]
    if asked.method == "ties":
        tasks = [_largest(task, asked.density) for task in tasks]
        scaled = np.stack([weight * task.numpy() for weight, task in zip(asked.weights, tasks, strict=True)])
        sign = np.sign(scaled.astype(np.float32).sum(0))
        agree = (np.sign(scaled) == sign) & (scaled != 0)
        return base.double() + torch.from_numpy(np.where(agree, scaled, 0).sum(0) / np.maximum(agree.sum(0), 1))
    if asked.method == "dare":
        lots = [torch.rand(task.shape, generator=generator(asked.seed, "dare", name, place)) for place, task in enumerate(tasks)]
        tasks = [task / asked.density * (lot < asked.density) for task, lot in zip(tasks, lots, strict=True)]
    return base.double() + sum((weight * task for weight, task in zip(asked.weights, tasks, strict=True)), torch.zeros_like(tasks[0]))


def _largest(task: Tensor, density: float) -> Tensor:
    ordered = task.abs().flatten().sort(descending=True).values
    return torch.where(task.abs() >= ordered[max(1, round(density * task.numel())) - 1], task, torch.zeros_like(task))


def check_effect(parents: Mapping[str, HeldOut], merged: HeldOut) -> Verdict:
    """Held-out loss of the merge beside each parent's, on the same conversations. Worse than every one of them is no merge."""
    apart = {name: paired(merged.per_document, found.per_document) for name, found in parents.items()}
    said = ", ".join(f"{change} beside {name}" for name, change in apart.items())
    words = f"held-out loss {merged.estimate}: {said}"
    if all(paired(merged.per_document, found.per_document, level=SURE).low > 0 for found in parents.values()):
        return refuted("effect", f"{words}: the merge is worse than each of what it was made of", loss=merged.loss)
    return proven("effect", words, loss=merged.loss, apart={name: change.mean for name, change in apart.items()})

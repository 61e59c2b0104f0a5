"""Checks on how an artifact stands to what it came from: moved as far as the optimizer could have moved it, or not at all."""

import torch
from torch import Tensor

from assay.guard.subject import Subject
from assay.model.probe import distance
from assay.store.artifact import Artifact, merged
from assay.verdict import Verdict, proven, refuted, unproven

ROUNDING = 1e-6  # of an element's own size: what storing it may add to a movement
UNRELATED = 0.2  # cosine with the parent below which a matrix is another one, not a trained one


def check_lineage(subject: Subject) -> Verdict:
    if subject.against is None:
        return _without_parent(subject)
    return _same(subject) if subject.expect == "same" else _moved(subject)


def _without_parent(subject: Subject) -> Verdict:
    if subject.facts.get("change") == "new":
        return proven("lineage", "nothing came before it")
    if (parent := subject.facts.get("parent")) is not None:
        return unproven("lineage", f"its parent, weights {parent['weights'][:12]}, is not at {parent['path']}; name it with --against")
    return unproven("lineage", "no parent is known, so whether training changed anything cannot be said; name it with --against")


def _same(subject: Subject) -> Verdict:
    """For exports: the written bytes answer as the source does, as closely as their number format can."""
    assert subject.against is not None and subject.bound is not None
    error = distance(subject.answers, subject.against_answers)
    words = f"answers differ from {subject.against.path.name}'s by {error:.1e} (relative), bound {subject.bound:.0e}"
    if subject.against.base is not None and _equal(subject.artifact, subject.against.base):
        return refuted("lineage", f"every tensor equals the base {subject.against.base.path.name}: the adapter was never applied")
    if not error <= subject.bound:
        return refuted("lineage", f"{words}: this is not the same model", error=str(error), bound=subject.bound)
    return proven("lineage", words, error=error, bound=subject.bound)


def _moved(subject: Subject) -> Verdict:
    assert subject.against is not None
    if subject.artifact.config != subject.against.config:
        return refuted("lineage", f"the parent {subject.against.path} has another geometry; it cannot be the parent")
    recorded = subject.facts.get("parent")
    if recorded is not None and recorded["weights"] != subject.against.digest:
        return refuted("lineage", f"its manifest names weights {recorded['weights'][:12]} as parent, {subject.against.path} holds {subject.against.digest[:12]}")
    movement = {name: (before, after) for name, before, after in _pairs(subject.against, subject.artifact)}
    moved = {name: float((after.float() - before.float()).abs().max()) for name, (before, after) in movement.items() if not torch.equal(before, after)}
    if not moved:
        return refuted("lineage", f"every one of {len(movement)} tensors equals the parent's: nothing was learned, or the wrong weights were saved")
    if stray := sorted(set(subject.facts.get("frozen", ())) & moved.keys()):
        return refuted("lineage", f"{len(stray)} tensor(s) that were frozen have moved: {', '.join(stray[:3])}", tensors=stray)
    return _plausible(subject, movement, moved)


def _plausible(subject: Subject, movement: dict[str, tuple[Tensor, Tensor]], moved: dict[str, float]) -> Verdict:
    farthest = max(moved, key=lambda name: moved[name])
    words = f"{len(moved)} of {len(movement)} tensors moved, at most by {moved[farthest]:.2e} ({farthest})"
    bound = subject.facts.get("movement_bound")
    if bound is not None:
        beyond = [n for n, far in moved.items() if far > bound + ROUNDING * float(movement[n][0].abs().max())]
        if beyond:
            return refuted("lineage", f"{words}; the optimizer could have moved an element by {bound:.2e}: {', '.join(beyond[:3])}", tensors=beyond)
        return proven("lineage", f"{words}, within the optimizer's {bound:.2e}", moved=len(moved), farthest=moved[farthest], bound=bound)
    for name, (before, after) in movement.items():
        cosine = float(torch.nn.functional.cosine_similarity(before.float().flatten(), after.float().flatten(), dim=0))
        if before.dim() == 2 and cosine < UNRELATED:
            return refuted("lineage", f"{name} is unrelated to the parent's (cosine {cosine:.2f}): it was initialised anew or is another model's")
    return proven("lineage", f"{words}; how far the optimizer could go is not recorded", moved=len(moved), farthest=moved[farthest])


def _equal(one: Artifact, other: Artifact) -> bool:
    return one.config == other.config and all(torch.equal(a.float(), b.float()) for _, a, b in _pairs(one, other))


def _pairs(parent: Artifact, child: Artifact) -> list[tuple[str, Tensor, Tensor]]:
    before, after = merged(parent), merged(child)
    return [(name, before[name], after[name]) for name in before]

"""Checks on how an artifact stands to what it came from: moved as far as the optimizer could have moved it, or not at all."""

import torch
from torch import Tensor

from assay.guard.subject import Subject
from assay.model.probe import answer, distance, share
from assay.store.artifact import Artifact, build, merged
from assay.store.peft import config_with
from assay.store.squeeze import Squeezed, rounded
from assay.verdict import Verdict, proven, refuted, unproven

ROUNDING = 1e-6  # of an element's own size: what storing it may add to a movement
UNRELATED = 0.2  # cosine with the parent below which a matrix is another one, not a trained one
MERGED = (0.5, 1.5)  # the share of an adapter's effect on the answers that a merge must show
TENSOR = 0.25  # of the answers' bound is a tensor's: through many layers rounding grows (5 to 9 times in SmolLM2-135M)
NOT_MERGED = 0.1  # of an adapter's change to one tensor: less is none, and rounding


def check_lineage(subject: Subject) -> Verdict:
    if subject.against is None:
        return _without_parent(subject)
    return _same(subject) if subject.expect == "same" else _moved(subject)


def _without_parent(subject: Subject) -> Verdict:
    if subject.raw.squeezed is not None:
        return unproven("lineage", f"made of the weights {subject.raw.squeezed.source[:12]}; name them with --against")
    if subject.facts.get("change") == "new":
        return proven("lineage", "nothing came before it")
    if (parent := subject.facts.get("parent")) is not None:
        return unproven("lineage", f"its parent, weights {parent['weights'][:12]}, is not at {parent['path']}; name it with --against")
    return unproven("lineage", "no parent is known, so whether training changed anything cannot be said; name it with --against")


def _same(subject: Subject) -> Verdict:
    """For exports: the source's numbers, as closely as the written format holds them, and so its answers."""
    source = subject.against
    assert source is not None
    assert subject.bound is not None
    if subject.raw.squeezed is not None:
        return _squeezed(subject, source, subject.raw.squeezed)
    if words := _another_parent(subject, source):
        return refuted("lineage", words)
    if subject.artifact.patch is None and (words := _not_merged(subject, source)):
        return refuted("lineage", words)
    if stray := _stray(subject, source, subject.bound):
        return refuted("lineage", f"{len(stray)} tensor(s) are not those of {source.path.name}, rounded: "
                                  f"{', '.join(stray[:3])}", tensors=stray)
    error = distance(subject.answers, subject.against_answers)
    words = f"answers differ from {source.path.name}'s by {error:.1e} (relative), bound {subject.bound:.0e}"
    if not error <= subject.bound:
        return refuted("lineage", f"{words}: this is not the same model", error=str(error), bound=subject.bound)
    return proven("lineage", f"every tensor is the source's; {words}", error=error, bound=subject.bound)


def _squeezed(subject: Subject, source: Artifact, file: Squeezed) -> Verdict:
    """Rounding is a function: every weight must be what it makes of the source's, to the last bit."""
    if file.source != source.digest:
        return refuted("lineage", f"its header names the weights {file.source[:12]}, {source.path} holds {source.digest[:12]}")
    due = rounded(source.tensors, file.levels)
    if stray := [name for name, tensor in due.items() if not torch.equal(tensor, subject.artifact.tensors[name])]:
        return refuted("lineage", f"{len(stray)} tensor(s) are not those of {source.path.name}, rounded: {', '.join(stray[:3])}",
                       tensors=stray)
    error = distance(subject.answers, subject.against_answers)
    return proven("lineage", f"every tensor is that of {source.path.name}, rounded to {file.levels} levels, to the last bit; its answers "
                             f"differ by {error:.1e} (relative)", error=error, levels=file.levels)


def _another_parent(subject: Subject, parent: Artifact) -> str | None:
    recorded = subject.facts.get("parent")
    if recorded is None or recorded["weights"] == parent.digest:
        return None
    return f"its manifest names weights {recorded['weights'][:12]} as parent, {parent.path} holds {parent.digest[:12]}"


def _not_merged(subject: Subject, source: Artifact) -> str | None:
    """What a merge left out or put in twice: tensor by tensor, and in the answers."""
    if source.patch is None or source.base is None:
        return None
    before, changed, found = source.base.tensors, merged(source, torch.float32), subject.artifact.tensors
    alike = [name for name in sorted(source.patch.names() & before.keys() & found.keys())
             if before[name].shape == changed[name].shape == found[name].shape]
    if idle := [name for name in alike if _share(found[name], before[name], changed[name]) < NOT_MERGED]:
        return (f"the adapter was never applied, or rounding swallowed it: of {len(source.patch.names())} tensors that "
                f"it changes {len(idle)} are the base's ({', '.join(idle[:3])})")
    if source.config.vocab != source.base.config.vocab:
        return None  # the base has no answer for tokens it lacks
    part, (least, most) = share(subject.answers, answer(build(source.base)), subject.against_answers), MERGED
    if least <= part <= most:
        return None
    return f"{part:.0%} of the adapter's effect on the answers is here: " + (
        "it was merged more than once" if part > most else "rounding swallowed it; export in float32")


def _share(found: Tensor, before: Tensor, changed: Tensor) -> float:
    """How much of the change from `before` to `changed` is in `found`."""
    change = changed.double() - before.double()
    return float(((found.double() - before.double()) * change).sum() / change.square().sum()) if change.any() else 1.0


def _stray(subject: Subject, source: Artifact, bound: float) -> list[str]:
    """Tensors that are not the source's. Rounding to a float dtype is exact; quantising and merging come near."""
    before, after = merged(source, torch.float32), merged(subject.artifact, torch.float32)
    quantised, patched = subject.raw.place.kind == "gguf", source.patch.names() if source.patch else set()
    stray = []
    for name in sorted(before.keys() & after.keys()):
        due = before[name].to(after[name].dtype)
        error = _error(after[name], due)
        if not error <= (TENSOR * bound if quantised or name in patched else 0):
            stray.append(f"{name} (relative error {error:.1e})")
    return stray


def _error(found: Tensor, due: Tensor) -> float:
    if torch.equal(found, due):
        return 0.0
    same_shape = found.shape == due.shape
    return float((found.double() - due.double()).norm() / due.double().norm()) if same_shape else float("inf")


def _moved(subject: Subject) -> Verdict:
    assert subject.against is not None
    patch = subject.artifact.patch
    if subject.artifact.config != (subject.against.config if patch is None else config_with(subject.against.config, patch)):
        return refuted("lineage", f"the parent {subject.against.path} has another geometry; it cannot be the parent")
    if words := _another_parent(subject, subject.against):
        return refuted("lineage", words)
    movement = {name: (before, after) for name, before, after in _pairs(subject.against, subject.artifact)}
    moved = {name: float((after.float() - before.float()).abs().max())
             for name, (before, after) in movement.items() if not torch.equal(before, after)}
    if not moved:
        return refuted("lineage", f"every one of {len(movement)} tensors equals the parent's: nothing was learned, "
                                  "or the wrong weights were saved")
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
            return refuted("lineage", f"{words}; the optimizer could have moved an element by {bound:.2e}: {', '.join(beyond[:3])}",
                           tensors=beyond)
        return proven("lineage", f"{words}, within the optimizer's {bound:.2e}", moved=len(moved), farthest=moved[farthest], bound=bound)
    for name, (before, after) in movement.items():
        cosine = float(torch.nn.functional.cosine_similarity(before.float().flatten(), after.float().flatten(), dim=0))
        if before.dim() == 2 and cosine < UNRELATED:
            return refuted("lineage", f"{name} is unrelated to the parent's (cosine {cosine:.2f}): it was initialised anew "
                                      "or is another model's")
    return proven("lineage", f"{words}; how far the optimizer could go is not recorded", moved=len(moved), farthest=moved[farthest])


def _pairs(parent: Artifact, child: Artifact) -> list[tuple[str, Tensor, Tensor]]:
    before, after = merged(parent), merged(child)
    return [(name, before[name], after[name]) for name in before]

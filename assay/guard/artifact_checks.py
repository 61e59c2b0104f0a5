"""Artifact checks: recorded hashes, finite values, fields that agree, the tokenizer, and the distance from the parent."""

from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from assay.guard.foreign_folder_checks import (
    Pair,
    absurd_weights,
    adapter_scale_records,
    largest_weights,
    same_geometry,
    tensor_pairs,
    untrained_change,
)
from assay.guard.proof_subject import ProofSubject
from assay.guard.tokenizer_comparison import compare_templates, compare_tokenizers, silent_generation_prompt
from assay.model.probe_logits import compute_probe_logits, probe_distance, share_of_change
from assay.model.transfers import read_numbers
from assay.store.artifact import Artifact, build_model, merged_tensors, with_untied_head
from assay.store.checkpoint import WEIGHTS
from assay.store.digests import recorded_tensors, tensor_facts
from assay.store.peft import config_with
from assay.verdict import Outcome, Verdict, proven, refuted, unproven

HOLE = 0.1  # of a matrix's rows may be zero throughout: rows that pad a vocabulary or a width are fewer


def check_hashes(subject: ProofSubject) -> Verdict:
    """Each tensor as it was read, rehashed, against what was recorded when the live model was written."""
    if subject.raw.place.format.verified is not None:
        return proven("hashes", subject.raw.place.format.verified)
    if subject.raw.checkpoint is None:
        return unproven("hashes", "nothing recorded the hashes when this was written, so small damage since then could not be checked; "
                                  "a checkpoint of Assay's has a manifest.json", optional=subject.is_copy)
    recorded = recorded_tensors(subject.raw.checkpoint.manifest)
    found = tensor_facts(subject.raw.tensors)
    if wrong := sorted(name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name)):
        return refuted("hashes", f"{len(wrong)} tensor(s) are not what was written: {', '.join(wrong[:3])}", tensors=wrong)
    files = subject.raw.checkpoint.manifest["files"]
    if WEIGHTS in files and f"{WEIGHTS}.index.json" not in files:
        return refuted("hashes", f"{WEIGHTS} has no index beside it: vLLM would take every .safetensors file of the folder for weights")
    return proven("hashes", f"{len(found)} tensors and {len(files)} files have their recorded sha256", tensors=len(found), files=len(files))


def check_loaded(subject: ProofSubject) -> Verdict:
    """Every live parameter is the tensor that was read, bit for bit: nothing was initialised after loading."""
    expected, found = subject.tensors, dict(subject.model.named_parameters())
    if names := sorted(expected.keys() ^ found.keys()):
        return refuted("loaded", f"{len(names)} parameters or tensors have no counterpart: {', '.join(names[:3])}",
                       tensors=names)
    live = subject.live_digests()
    wrong = sorted(name for name, (_, sha256) in expected.items() if live[name] != sha256)
    if wrong:
        return refuted("loaded", f"{len(wrong)} parameter(s) of the live model are not what the files hold: "
                                 f"{', '.join(wrong[:3])}", tensors=wrong)
    return proven("loaded", f"all {len(found)} parameters of the live model are the tensors of the files",
                  parameters=len(found))


def check_values(subject: ProofSubject) -> Verdict:
    """Finite everywhere, and no matrix with a hole in it: the mark of a shard that was never filled. Without recorded hashes, no
    weight that only a flipped bit makes."""
    tensors = subject.artifact.tensors if subject.raw.compressed else subject.raw.tensors
    seen = {name: _values(subject, name, read.to(subject.device)) for name, read in tensors.items()}
    strange, holes = read_numbers({name: each[0] for name, each in seen.items()}), read_numbers({n: each[1] for n, each in seen.items()})
    bad = [f"{name} ({int(found)} of {tensors[name].numel()})" for name, found in strange.items() if found]
    empty = [f"{name} ({share:.0%})" for name, share in holes.items() if share > HOLE and not strange[name]]
    absurd = [f"{name} ({words})" for name, (*_, largest) in seen.items() if largest is not None and not strange[name]
              and (words := absurd_weights(largest.tolist(), tensors[name].numel()))]
    count = sum(tensor.numel() for tensor in tensors.values())
    if bad:
        return refuted("values", f"NaN or infinite values in {len(bad)} tensor(s): {', '.join(bad[:3])}", tensors=bad)
    if empty:
        return refuted("values", f"rows of zeros in {len(empty)} matrices: {', '.join(empty[:3])}; they were never filled",
                       tensors=empty)
    if absurd:
        return refuted("values", f"weights that no training makes in {len(absurd)} tensor(s): {', '.join(absurd[:3])}: bits were flipped",
                       tensors=absurd)
    return proven("values", f"all {count:,} values of {len(tensors)} tensors are finite, and no matrix has "
                            "a hole of zeros", values=count)


def _values(subject: ProofSubject, name: str, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """How many values of a tensor are not finite, the share of rows that are zero where it holds matrices, and the largest values of one
    that nobody has recorded."""
    matrices = _holds_matrices(name, tensor) and not subject.raw.place.adapter
    holes = _zero_rows(tensor) if matrices else torch.zeros((), device=tensor.device)
    return (~torch.isfinite(tensor)).sum(), holes, largest_weights(tensor) if subject.raw.checkpoint is None else None


def _holds_matrices(name: str, tensor: Tensor) -> bool:
    """One, or one an expert. Biases of all experts lie in a table too, and like every bias may be 0."""
    return tensor.dim() >= 2 and not name.endswith("bias")


def _zero_rows(tensor: Tensor) -> Tensor:
    """Share of a matrix's rows that are zero throughout; of several that of the emptiest."""
    return 1 - tensor.any(-1).float().mean(-1).min()


def check_fields(subject: ProofSubject) -> Verdict:
    """BOS, EOS and stop ids across tokenizer, config and generation config; token ids within the vocabulary."""
    artifact = subject.artifact
    problems, stop_ids = list(artifact.notes), sorted(artifact.stops.stop_ids)
    if artifact.tokenizer is not None and artifact.tokenizer.size > artifact.config.vocab:
        problems.append(f"the tokenizer knows {artifact.tokenizer.size} ids, the model has {artifact.config.vocab} rows")
    unrecorded = artifact.adapter is not None and subject.raw.checkpoint is None
    agree, differ = adapter_scale_records(subject.path, subject.raw.fields) if unrecorded else ([], [])
    problems += [f"adapter_config.json says {_scale(subject)}, {words}" for words in differ]
    if problems:
        return refuted("fields", "; ".join(problems), disagreements=problems)
    if artifact.tokenizer is None:
        return unproven("fields", "there is no tokenizer here, so nothing says which ids begin and end a text", stop_ids=stop_ids)
    words = f"tokenizer, config and generation config agree: BOS {artifact.stops.bos}, stop ids {stop_ids}, " \
            f"{'tied' if artifact.config.tied else 'separate'} head"
    if unrecorded and not agree:
        return unproven("fields", f"{words}; how much the adapter counts ({_scale(subject)}) stands in adapter_config.json alone and could "
                                  "not be checked", stop_ids=stop_ids)
    return proven("fields", words + (f"; {_scale(subject)}, as {', '.join(agree)} says" if agree else ""), stop_ids=stop_ids)


def _scale(subject: ProofSubject) -> str:
    """Scale of an adapter (alpha, rank, rsLoRA), as its own file has it."""
    fields = subject.raw.fields
    return f"alpha {fields['lora_alpha']:g}, rank {fields['r']}, use_rslora {str(bool(fields.get('use_rslora'))).lower()}"


def check_tokenizer(subject: ProofSubject) -> Verdict:
    """A wrong split gives plausible ids that the model has never seen, and everything else still looks right."""
    tokenizer = subject.artifact.tokenizer
    if tokenizer is None:
        if subject.is_copy and subject.raw.checkpoint is not None and subject.against.tokenizer is not None:  # type: ignore[union-attr]
            return refuted("tokenizer", "there is none here, and its source has one: it was lost in the export")
        return unproven("tokenizer", "there is none here", optional=True)
    if subject.facts.get("tokenizer", tokenizer.digest) != tokenizer.digest:
        return refuted("tokenizer", f"its manifest records tokenizer {subject.facts['tokenizer'][:12]}, "
                                    f"the files make {tokenizer.digest[:12]}")
    if subject.facts.get("template", tokenizer.template_digest) != tokenizer.template_digest:
        return refuted("tokenizer", f"its manifest records the chat template {str(subject.facts['template'])[:12]}, the files hold "
                                    f"{str(tokenizer.template_digest)[:12]}")
    if subject.against is None or subject.against.tokenizer is None:
        if subject.facts.get("tokenizer"):
            return proven("tokenizer", f"the files make the tokenizer that was saved, {tokenizer.digest[:12]}")
        if words := silent_generation_prompt(tokenizer):
            return unproven("tokenizer", f"{words}: lost, or never there; name a parent with --against")
        return unproven("tokenizer", "there is none to compare it with; name a parent with --against", optional=True)
    same, recorded, name = subject.expect == "same", subject.raw.checkpoint is not None, subject.against.path.name
    found = compare_tokenizers(tokenizer, subject.against.tokenizer, name, same=same, exact=recorded)
    if same or recorded or found.outcome is not Outcome.PROVEN:
        return found
    return compare_templates(tokenizer, subject.against.tokenizer, name) or found


_ROUNDING = 1e-6  # of an element's own size: what storing it may add to a movement
MERGED = (0.5, 1.5)  # the share of an adapter's effect on the answers that a merge must show
TENSOR = 0.25  # of the answers' bound is a tensor's: through many layers rounding grows (5 to 9 times in SmolLM2-135M)
NOT_MERGED = 0.1  # of an adapter's change to one tensor: less is none, and rounding


def check_lineage(subject: ProofSubject) -> Verdict:
    if subject.against is None:
        return _without_parent(subject)
    return _same(subject) if subject.expect == "same" else _moved(subject)


def _without_parent(subject: ProofSubject) -> Verdict:
    if subject.raw.place.format.rounding is not None:
        return unproven("lineage", f"made of the weights {subject.raw.fields['source'][:12]}; name them with --against")
    if subject.facts.get("change") == "new":
        return proven("lineage", "it has no parent")
    if (parent := subject.facts.get("parent")) is not None:
        return unproven("lineage", f"its parent, weights {parent['weights'][:12]}, is not at {parent['path']}; name it with --against")
    return unproven("lineage", "no parent is known, so whether training changed anything, and whether a matrix is transposed or another's, "
                               "could not be checked; name it with --against")


def _same(subject: ProofSubject) -> Verdict:
    """Check that an export has the source's numbers, as closely as the written format holds them, and so its answers."""
    source = subject.against
    assert source is not None
    assert subject.bound is not None
    if (rounding := subject.raw.place.format.rounding) is not None:
        return _rounded(subject, source, rounding(source.tensors, subject.raw.fields))
    if words := _another_parent(subject, source):
        return refuted("lineage", words)
    if subject.artifact.patch is None and (words := _not_merged(subject, source)):
        return refuted("lineage", words)
    if stray := _stray(subject, source, subject.bound):
        return refuted("lineage", f"{len(stray)} tensor(s) are not those of {source.path.name}, rounded: "
                                  f"{', '.join(stray[:3])}", tensors=stray)
    error = probe_distance(subject.answers, subject.against_answers)
    words = f"answers differ from {source.path.name}'s by {error:.1e} (relative), bound {subject.bound:.0e}"
    if not error <= subject.bound:
        return refuted("lineage", f"{words}: this is not the same model", error=str(error), bound=subject.bound)
    return proven("lineage", f"every tensor is the source's; {words}", error=error, bound=subject.bound)


def _rounded(subject: ProofSubject, source: Artifact, due: dict[str, Tensor]) -> Verdict:
    """Rounding is a function: every weight must be what it makes of the source's, to the last bit."""
    made_of, levels = subject.raw.fields["source"], subject.raw.fields["levels"]
    if made_of != source.digest:
        return refuted("lineage", f"its header names the weights {made_of[:12]}, {source.path} holds {source.digest[:12]}")
    if stray := [name for name, tensor in due.items() if not torch.equal(tensor, subject.artifact.tensors[name])]:
        return refuted("lineage", f"{len(stray)} tensor(s) are not those of {source.path.name}, rounded: {', '.join(stray[:3])}",
                       tensors=stray)
    error = probe_distance(subject.answers, subject.against_answers)
    return proven("lineage", f"every tensor is that of {source.path.name}, rounded to {levels} levels, to the last bit; its answers "
                             f"differ by {error:.1e} (relative)", error=error, levels=levels)


def _another_parent(subject: ProofSubject, parent: Artifact) -> str | None:
    recorded = subject.facts.get("parent")
    if recorded is None or recorded["weights"] == parent.digest:
        return None
    return f"its manifest names weights {recorded['weights'][:12]} as parent, {parent.path} holds {parent.digest[:12]}"


def _not_merged(subject: ProofSubject, source: Artifact) -> str | None:
    """Message about what a merge left out or put in twice: tensor by tensor, and in the answers."""
    if source.patch is None or source.base is None:
        return None
    before, changed, found = source.base.tensors, merged_tensors(source, torch.float32), subject.artifact.tensors
    alike = [name for name in sorted(source.patch.names() & before.keys() & found.keys())
             if before[name].shape == changed[name].shape == found[name].shape]
    if idle := [name for name in alike if _share(found[name], before[name], changed[name]) < NOT_MERGED]:
        return (f"the adapter was never applied, or rounding swallowed it: of {len(source.patch.names())} tensors that "
                f"it changes {len(idle)} are the base's ({', '.join(idle[:3])})")
    if source.config.vocab != source.base.config.vocab:
        return None  # the base has no answer for tokens it lacks
    of_base = compute_probe_logits(build_model(source.base).to(subject.device))
    part, (least, most) = share_of_change(subject.answers, of_base, subject.against_answers), MERGED
    if least <= part <= most:
        return None
    return f"{part:.0%} of the adapter's effect on the answers is here: " + (
        "it was merged more than once" if part > most else "rounding swallowed it; export in float32")


def _share(found: Tensor, before: Tensor, changed: Tensor) -> float:
    """How much of the change from `before` to `changed` is in `found`."""
    change = changed.double() - before.double()
    return float(((found.double() - before.double()) * change).sum() / change.square().sum()) if change.any() else 1.0


def _stray(subject: ProofSubject, source: Artifact, bound: float) -> list[str]:
    """Tensors that are not the source's. Rounding to a float dtype is exact; quantising and merging come near.

    Two adapters with the same parts on the same base are one model: a large base need not be merged twice to see that."""
    if _same_adapter(subject.artifact, source):
        return []
    before, after = merged_tensors(source, torch.float32), merged_tensors(subject.artifact, torch.float32)
    bounds_in, patched = subject.raw.place.format.tensor_bounds, source.patch.names() if source.patch else set()
    bounds = {} if bounds_in is None else bounds_in(subject.path)
    stray = []
    for name in sorted(before.keys() & after.keys()):
        due = before[name].to(after[name].dtype)
        error = _error(after[name], due)
        if not error <= (TENSOR * bound if name in patched else bounds.get(name, 0)):
            stray.append(f"{name} (relative error {error:.1e})")
    return stray


def _same_adapter(one: Artifact, other: Artifact) -> bool:
    """Bit for bit, and on the same weights."""
    if one.patch is None or other.patch is None or one.base is None or other.base is None or one.base.digest != other.base.digest:
        return False
    mine, its = one.patch, other.patch
    if mine.low_rank.keys() != its.low_rank.keys() or mine.replaced.keys() != its.replaced.keys():
        return False
    pairs = [(a, b) for name, parts in mine.low_rank.items() for a, b in zip_longest(parts, its.low_rank[name])]
    return all(a is not None and b is not None and (a.scale, a.start, a.stop) == (b.scale, b.start, b.stop) and torch.equal(a.left, b.left)
               and torch.equal(a.right, b.right) for a, b in pairs) \
        and all(torch.equal(tensor, its.replaced[name]) for name, tensor in mine.replaced.items())


def _error(found: Tensor, due: Tensor) -> float:
    if torch.equal(found, due):
        return 0.0
    same_shape = found.shape == due.shape
    return float((found.double() - due.double()).norm() / due.double().norm()) if same_shape else float("inf")


def _moved(subject: ProofSubject) -> Verdict:
    assert subject.against is not None
    patch = subject.artifact.patch
    unrecorded = subject.raw.checkpoint is None and patch is None
    if not (same_geometry(subject.artifact, subject.against) if unrecorded else
            subject.artifact.config == (subject.against.config if patch is None else config_with(subject.against.config, patch))):
        return refuted("lineage", f"the parent {subject.against.path} has another geometry; it cannot be the parent")
    if words := _another_parent(subject, subject.against):
        return refuted("lineage", words)
    pairs = tensor_pairs(subject) if unrecorded else _pairs(subject.against, subject.artifact)
    movement = {name: (before, after) for name, before, after in pairs}
    apart = read_numbers({name: (after.float() - before.float()).abs().max() for name, before, after in _carried(subject, movement)
                          if before.numel()})
    moved = {name: far for name, far in apart.items() if far != 0}
    if not moved:
        return refuted("lineage", f"every one of {len(movement)} tensors equals the parent's: nothing was learned, "
                                  "or the wrong weights were saved")
    if stray := sorted(set(subject.facts.get("frozen", ())) & moved.keys()):
        return refuted("lineage", f"{len(stray)} tensor(s) that were frozen have moved: {', '.join(stray[:3])}", tensors=stray)
    return _plausible(subject, movement, moved)


def _plausible(subject: ProofSubject, movement: dict[str, tuple[Tensor, Tensor]], moved: dict[str, float]) -> Verdict:
    farthest = max(moved, key=lambda name: moved[name])
    words = f"{len(moved)} of {len(movement)} tensors moved, at most by {moved[farthest]:.2e} ({farthest})"
    bound = subject.facts.get("movement_bound")
    if bound is not None:
        beyond = [n for n, far in moved.items() if far > bound + _ROUNDING * float(movement[n][0].abs().max())]
        if beyond:
            return refuted("lineage", f"{words}; the optimizer could have moved an element by {bound:.2e}: {', '.join(beyond[:3])}",
                           tensors=beyond)
        return proven("lineage", f"{words}, within the optimizer's {bound:.2e}", moved=len(moved), farthest=moved[farthest], bound=bound)
    if untrained := untrained_change(_carried(subject, movement)):
        return refuted("lineage", untrained)
    return proven("lineage", f"{words}, and no tensor in a way that training does not; how far the optimizer could go is not recorded",
                  moved=len(moved), farthest=moved[farthest])


def _carried(subject: ProofSubject, movement: dict[str, tuple[Tensor, Tensor]]) -> Iterator[Pair]:
    """Pairs of tensors, moved one after the other to the device where the proof computes."""
    return ((name, before.to(subject.device), after.to(subject.device)) for name, (before, after) in movement.items())


def _pairs(parent: Artifact, child: Artifact) -> list[tuple[str, Tensor, Tensor]]:
    before, after = with_untied_head(merged_tensors(parent), child.config), merged_tensors(child)
    return [(name, before[name], after[name]) for name in before]

"""Handing over: the best checkpoint is exported, its bytes are read back, and they must score what was recorded."""

from dataclasses import asdict, replace
from pathlib import Path

import torch

from assay.data.corpus import Corpus
from assay.errors import ArtifactError
from assay.guard.proof import Request, mark, prove
from assay.learn.ema import averaged
from assay.measure.held_out import HeldOut, score
from assay.model.placement import place_for_training
from assay.recipes.looks import Looks
from assay.recipes.run import Run, plain
from assay.recipes.squeezed import squeezed
from assay.store import checkpoint
from assay.store.artifact import Artifact, build, open_artifact
from assay.store.checkpoint import open_checkpoint
from assay.store.export import export
from assay.store.pack import Ancestor, Lineage, model_contents
from assay.verdict import Outcome, Verdict, proven, refuted

SAME_SCORE = 1e-4  # bits per byte: what fp32 sums in another order may differ by
SAME_LOOK = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # a document's loss, compiled or not, relative to the mean


def hand_over(run: Run, best: Path, looks: Looks, corpus: Corpus, *, rows: int, length: int, max_bytes: int | None) -> list[Verdict]:
    """`RUN/model` is the best checkpoint as a plain Hugging Face folder, proven; its score on all held-out text is the run's."""
    where = run.folder / "model"
    run.say(f"best: {best.name}; {looks.verdict_in_words()}")
    looked = check_look(looks, best, corpus, rows, length)
    recorded = rescored(scored(open_artifact(best)), corpus, rows, length)
    if handed_over_before(best, where):
        verdicts = [check_weight_set(best, where)]
    else:
        run.set_aside(where)
        verdicts = written(best, where)
        mark(open_checkpoint(where), verdicts)
    verdicts += [looked, check_score(recorded, rescored(open_artifact(where), corpus, rows, length))]
    run.ledger.append("hand over", checkpoint=best.name, bits_per_byte=str(recorded.bits_per_byte), held_out=corpus.held_out_digest,
                      score=asdict(recorded.bits_per_byte), verdicts=plain([verdict.to_json() for verdict in verdicts]))
    run.say(f"{where}: {recorded.bits_per_byte} bits per byte on all held-out text")
    if max_bytes is not None:
        verdicts += squeezed(run, where, recorded, corpus, rows=rows, length=length, max_bytes=max_bytes)
    return verdicts


def handed_over_before(best: Path, where: Path) -> bool:
    """An earlier sitting wrote these very weights, and they were proven; a longer run may since have found better ones."""
    if not where.exists():
        return False
    try:
        return open_checkpoint(where).hallmark is not None and check_weight_set(best, where).outcome is Outcome.PROVEN
    except ArtifactError:
        return False


def scored(saved: Artifact) -> Artifact:
    """The weight set of a checkpoint that the looks scored: its model, or the average in its optimizer's file."""
    assert saved.raw.checkpoint is not None
    if saved.raw.checkpoint.facts["scored_set"] != "ema":
        return saved
    return replace(saved, tensors=averaged(saved.raw.checkpoint.optimizer() or {}))


def written(best: Path, where: Path) -> list[Verdict]:
    """The scored set as a Hugging Face folder, proven in a fresh process: the checkpoint's model, or its average."""
    saved = open_artifact(best)
    if (chosen := scored(saved)) is saved:
        return prove(Request(str(where), str(best), expect="same", bound=export(saved, "hf", where)))
    lineage = Lineage("moved", Ancestor(saved.digest, str(best)), weight_set="ema", scored_set="ema")
    checkpoint.write(where, model_contents(build(chosen), saved.tokenizer, saved.stops, lineage))
    return [*prove(Request(str(where), str(best), expect="moved")), check_weight_set(best, where)]


def check_weight_set(best: Path, where: Path) -> Verdict:
    """What lies at `where` is the set that was scored, bit for bit, and not the other one."""
    due, found = scored(open_artifact(best)).tensors, open_artifact(where).tensors
    assert due.keys() == found.keys(), "both were opened strictly, as the same architecture"
    wrong = sorted(name for name in due if not torch.equal(due[name], found[name]))
    words = f"{len(due) - len(wrong)} of {len(due)} tensors are those that were scored, bit for bit"
    if wrong:
        return refuted("weight set", f"{words}; {', '.join(wrong[:3])} are not", tensors=wrong)
    return proven("weight set", words, tensors=len(due))


def rescored(artifact: Artifact, corpus: Corpus, rows: int, length: int) -> HeldOut:
    """The score of the bytes on disk, not of any model in memory. Long documents are read with half a row of context."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return score(build(artifact).to(device), corpus, rows=rows, length=length, context=length // 2)


def check_look(looks: Looks, best: Path, corpus: Corpus, rows: int, length: int) -> Verdict:
    """The bytes of the best checkpoint score what the look recorded of the live model: they are the weights that were scored."""
    model = place_for_training(build(scored(open_artifact(best))), looks.device, compile=False)
    found = score(model, corpus, rows=rows, length=length, count=looks.documents).per_document
    recorded, bound = looks.losses[looks.steps.index(looks.best_step())], SAME_LOOK[model.compute_dtype or torch.float32]
    error = float(abs(found - recorded).max() / recorded.mean())
    words = (f"{best.name} as saved and as scored then differ by {error:.1e} (relative, the worst of {len(found)} documents), "
             f"bound {bound:.0e}")
    if not error <= bound:
        return refuted("score", f"{words}: what was saved is not what was scored", error=str(error))
    return proven("score", words, error=error)


def check_score(recorded: HeldOut, found: HeldOut) -> Verdict:
    difference = abs(recorded.bits_per_byte.mean - found.bits_per_byte.mean)
    words = f"exported bytes score {found.bits_per_byte} bits per byte, recorded {recorded.bits_per_byte.mean:.6f}"
    return proven("score", words, difference=difference) if difference <= SAME_SCORE else refuted("score", words, difference=difference)

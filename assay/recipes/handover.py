"""Handing over: the best checkpoint is exported, its bytes are read back, and they must score what was recorded."""

from pathlib import Path

import torch

from assay.data.corpus import Corpus
from assay.guard.proof import Request, mark, prove
from assay.measure.held_out import HeldOut, score
from assay.recipes.looks import Looks
from assay.recipes.run import Run, plain
from assay.store.artifact import build, open_artifact
from assay.store.checkpoint import open_checkpoint
from assay.store.export import export
from assay.verdict import Verdict, proven, refuted

SAME_SCORE = 1e-4  # bits per byte: what fp32 sums in another order may differ by


def hand_over(run: Run, best: Path, looks: Looks, corpus: Corpus, *, rows: int, length: int, max_bytes: int | None) -> list[Verdict]:
    """`RUN/model` is the best checkpoint as a plain Hugging Face folder, proven; its score on all held-out text is the run's."""
    where = run.folder / "model"
    run.say(f"best: {best.name}; {looks.verdict_in_words()}")
    recorded = reread(best, corpus, rows, length)
    if not where.exists():
        bound = export(open_artifact(best), "hf", where)
        verdicts = prove(Request(str(where), str(best), expect="same", bound=bound))
        mark(open_checkpoint(where), verdicts)
    else:
        verdicts = [proven("export", f"{where} was written by an earlier sitting")]
    verdicts.append(check_score(recorded, reread(where, corpus, rows, length)))
    run.ledger.append("hand over", checkpoint=best.name, bits_per_byte=str(recorded.bits_per_byte), held_out=corpus.held_out_digest,
                      verdicts=plain([verdict.to_json() for verdict in verdicts]))
    run.say(f"{where}: {recorded.bits_per_byte} bits per byte on all held-out text")
    if max_bytes is not None:
        from assay.recipes.artifact import squeeze

        verdicts += squeeze(run, best, corpus, rows=rows, length=length, max_bytes=max_bytes)
    return verdicts


def reread(path: Path, corpus: Corpus, rows: int, length: int) -> HeldOut:
    """The score of the bytes on disk, not of any model in memory. Long documents are read with half a row of context."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return score(build(open_artifact(path)).to(device), corpus, rows=rows, length=length, context=length // 2)


def check_score(recorded: HeldOut, found: HeldOut) -> Verdict:
    difference = abs(recorded.bits_per_byte.mean - found.bits_per_byte.mean)
    words = f"exported bytes score {found.bits_per_byte} bits per byte, recorded {recorded.bits_per_byte.mean:.6f}"
    return proven("score", words, difference=difference) if difference <= SAME_SCORE else refuted("score", words, difference=difference)

"""Size-limited artifact of a run, RUN/model.assayz: squeezed, read back from the disk, scored as it was read, and only that score told."""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from assay.data.token_corpus import Corpus
from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut, score_corpus
from assay.model.placement import default_device
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig
from assay.recipes.run import Run, plain
from assay.statistics.estimate import Estimate, ratio
from assay.store.artifact import assemble_model, open_artifact
from assay.store.assayz import most_assayz_bytes, read_assayz, write_assayz
from assay.store.ledger import Event
from assay.verdict import Verdict, proven, refuted

WORSE = 0.05  # bits per byte that rounding may cost: more, and the artifact is not the model that was trained


def require_room(of_depth: Callable[[int], ModelConfig], depth: int, tokenizer: Tokenizer, max_bytes: int) -> str:
    """Before anything is trained: what the artifact will take at int5, in words, or a refusal that says what would fit."""
    most = most_assayz_bytes(of_depth(depth), tokenizer)
    if most <= max_bytes:
        return f"the artifact takes at most {most:,} bytes at int5, of {max_bytes:,}; it gets the finest precision that fits"
    fitting = next((less for less in range(depth - 1, 0, -1) if most_assayz_bytes(of_depth(less), tokenizer) <= max_bytes), None)
    way = "a tokenizer with fewer tokens" if fitting is None else f"--depth {fitting}, or a tokenizer with fewer tokens"
    raise UsageError(f"--max-bytes {max_bytes:,}: at depth {depth} and {tokenizer.size} tokens the artifact may take {most:,} "
                     f"bytes at int5; what fits is {way}")


def write_squeezed(run: Run, model: Path, before: HeldOut, corpus: Corpus, *, rows: int, length: int, max_bytes: int) -> list[Verdict]:
    """`RUN/model.assayz` is the handed-over model in at most `max_bytes`. `before` is its score before it was rounded."""
    where = run.folder / "model.assayz"
    report = write_assayz(open_artifact(model), where, max_bytes)
    after = reread(where, corpus, rows, length)
    verdicts = [check_bytes(where, max_bytes), check_squeezed_score(before, after)]
    run.ledger.append(Event.ARTIFACT, file=where.name, bytes=report.bytes, levels=report.levels, bits=report.bits,
                      score=asdict(after.bits_per_byte), unquantised=asdict(before.bits_per_byte),
                      verdicts=plain([verdict.to_json() for verdict in verdicts]))
    run.say(f"{where}: {report}")
    run.say(f"{where}: {after.bits_per_byte} bits per byte, read back from the file")
    return verdicts


def reread(where: Path, corpus: Corpus, rows: int, length: int) -> HeldOut:
    """The score of the file: nothing that made it is used again."""
    found = read_assayz(where)
    if found.tokenizer.digest != corpus.tokenizer_digest:
        raise UsageError(f"{where} was made with tokenizer {found.tokenizer.digest[:12]}, {corpus.folder} with "
                         f"{corpus.tokenizer_digest[:12]}; score it on a corpus of its own tokenizer")
    model = assemble_model(found.config, found.tensors, torch.float32).to(default_device())
    return score_corpus(model.eval(), corpus, rows=rows, length=length, context=length // 2)


def check_bytes(where: Path, max_bytes: int) -> Verdict:
    size = where.stat().st_size
    words = f"{where.name} is {size:,} bytes with its tokenizer and all that is needed to run it, {max_bytes:,} are allowed"
    return (proven if size <= max_bytes else refuted)("bytes", words, bytes=size, max_bytes=max_bytes)


def check_squeezed_score(before: HeldOut, after: HeldOut) -> Verdict:
    """Document by document, so that what rounding cost has an interval of its own."""
    cost = rounding_cost(before, after)
    words = f"the bytes on disk score {after.bits_per_byte} bits per byte; unquantised {before.bits_per_byte}, so rounding cost {cost}"
    evidence = {"score": asdict(after.bits_per_byte), "cost": asdict(cost), "bound": WORSE}
    if cost.mean > WORSE:
        return refuted("artifact score", f"{words}, more than the {WORSE} allowed; give more bytes or train a smaller model", **evidence)
    return proven("artifact score", words, **evidence)


def rounding_cost(before: HeldOut, after: HeldOut) -> Estimate:
    assert before.documents is not None and after.documents is not None, "both were scored on a corpus"  # noqa: PT018
    assert np.array_equal(before.documents.ids, after.documents.ids), "both were scored on all held-out text"
    return ratio((after.documents.nll - before.documents.nll) / math.log(2), after.documents.bytes)

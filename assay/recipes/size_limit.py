"""Size-limited artifact of a run, RUN/model.assayz: squeezed, read back from the disk, scored as it was read, and only that score told."""

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from assay.data.token_corpus import Corpus
from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig
from assay.recipes.run import Run, plain
from assay.recipes.squeezed_code import CODE, check_own_code, check_seconds, pack_code, reread, score_afresh
from assay.statistics.estimate import Estimate, ratio
from assay.store.artifact import open_artifact
from assay.store.assayz import most_assayz_bytes, write_assayz
from assay.store.ledger import Event
from assay.verdict import Verdict, proven, refuted

WORSE = 0.05  # bits per byte that rounding may cost: more, and the artifact is not the model that was trained


def require_room(of_depth: Callable[[int], ModelConfig], depth: int, tokenizer: Tokenizer, max_bytes: int, code: int = 0) -> str:
    """Refuse a size limit before anything is trained if the artifact cannot fit, with what would fit; else say what it will take at int5.
    `code` are the bytes of the code that counts."""
    most, room = most_assayz_bytes(of_depth(depth), tokenizer), max_bytes - code
    beside = f" beside {code:,} of code" if code else ""
    if most <= room:
        return f"the artifact takes at most {most:,} bytes at int5{beside}, of {max_bytes:,}; it gets the finest precision that fits"
    fitting = next((less for less in range(depth - 1, 0, -1) if most_assayz_bytes(of_depth(less), tokenizer) <= room), None)
    way = "a tokenizer with fewer tokens" if fitting is None else f"--depth {fitting}, or a tokenizer with fewer tokens"
    raise UsageError(f"--max-bytes {max_bytes:,}: at depth {depth} and {tokenizer.size} tokens the artifact may take {most:,} "
                     f"bytes at int5{beside}; what fits is {way}")


def write_squeezed(run: Run, model: Path, before: HeldOut, corpus: Corpus, *, rows: int, length: int, max_bytes: int,
                   count_code: bool = False, max_seconds: float | None = None) -> list[Verdict]:
    """`RUN/model.assayz` is the handed-over model in at most `max_bytes`, `RUN/code.zip` among them where code counts. `before` is its
    score before it was rounded."""
    where, code, source = run.folder / "model.assayz", run.folder / CODE if count_code else None, open_artifact(model)
    score = partial(score_afresh, where, corpus, rows=rows, length=length, code=code)
    if code is not None:
        write_assayz(source, where, max_bytes)  # a draft, of which it is asked what code it takes
        pack_code(score_afresh(where, corpus, rows=rows, length=length).modules, code)
    report = write_assayz(source, where, max_bytes - (0 if code is None else code.stat().st_size))
    after = reread(where, corpus, rows, length)
    afresh = score() if code is not None or max_seconds is not None else None
    verdicts = [check_bytes(where, max_bytes, code), check_squeezed_score(before, after)]
    verdicts += [check_own_code(afresh, after, code)] if afresh is not None and code is not None else []
    verdicts += [check_seconds(afresh.seconds, max_seconds, f"opening {where.name} and scoring all held-out text in a fresh process")
                 ] if afresh is not None and max_seconds is not None else []
    run.log(Event.ARTIFACT, file=where.name, bytes=report.bytes, levels=report.levels, bits=report.bits,
                      score=asdict(after.bits_per_byte), unquantised=asdict(before.bits_per_byte),
                      verdicts=plain([verdict.to_json() for verdict in verdicts]))
    run.say(f"{where}: {report}")
    run.say(f"{where}: {after.bits_per_byte} bits per byte, read back from the file")
    return verdicts


def check_bytes(where: Path, max_bytes: int, code: Path | None = None) -> Verdict:
    size = where.stat().st_size + (0 if code is None else code.stat().st_size)
    what = "all that is needed to run it" if code is None else f"the code that runs it ({code.name})"
    words = f"{where.name} is {size:,} bytes with its tokenizer and {what}, {max_bytes:,} are allowed"
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

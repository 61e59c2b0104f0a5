"""Test-time training: score a chunk, write the score down, then train on it; bits per byte with and without, paired by document."""

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.data.data_files import DocumentRule, find_sources, iter_documents
from assay.errors import DataError, UsageError
from assay.guard.ttt_checks import (
    TokenCosts,
    causality_cuts,
    check_base_unchanged,
    check_causality,
    check_document_regressions,
    check_factor_drift,
    check_score_order,
    check_target_unseen,
    check_ttt_gain,
    token_costs,
    ttt_gain,
)
from assay.learn.ttt_loop import AdapterUpdated, ChunkScored, DocumentBegun, TttEvent, TttSettings, read_and_adapt, require_readable
from assay.learn.ttt_witness import check_reading, check_sites
from assay.model.batched_lora import BatchedAdapters, ttt_sites
from assay.model.lora import fresh
from assay.model.patch import Patch
from assay.model.placement import default_device, require_device
from assay.model.transformer import Transformer
from assay.outcome import RunOutcome
from assay.recipes.run import Run, plain, print_line
from assay.recipes.squeezed_code import check_seconds
from assay.recipes.ttt_options import Ttt
from assay.statistics.estimate import Array, Estimate, bits_per_byte
from assay.statistics.known_answers import check_statistics
from assay.store import durable
from assay.store.artifact import Artifact, build_model, open_artifact, quarantines
from assay.store.digests import environment, tensor_facts
from assay.store.ledger import Event, Ledger
from assay.strict_json import read_json_lines
from assay.tracing.plots import draw_ttt_savings
from assay.verdict import Verdict, proven, refuted

PREFLIGHT_TOKENS = 32  # tokens of a chunk, at most, while causality is checked
TTT_REPORT, TTT_SCORES = "ttt.json", "scores.jsonl"  # the report is written last: a folder without one was killed on the way
_KINDS = {DocumentBegun: Event.BEGIN, ChunkScored: Event.SCORE}  # else: update


@dataclass(frozen=True)
class Read:
    """One document: its tokens, after the token that begins every text, and their cost in bits without and with test-time training."""

    name: str  # file:line
    bytes: int
    tokens: tuple[int, ...]
    without: float = math.nan
    with_: float = math.nan

    @property
    def saved(self) -> float:
        """Bits per byte."""
        return (self.without - self.with_) / self.bytes


@dataclass(frozen=True, kw_only=True)
class TttOutcome(RunOutcome):
    """Outcome of a test-time training run, as OUT/ttt.json holds it; its `results` are estimates."""

    documents: list[Read]
    left_out: dict[str, int]
    norms: list[float]  # of the right factors that each document began with, relative to the first
    seconds: dict[str, float]


def ttt(config: Ttt, say: Callable[[str], None] = print_line) -> TttOutcome:
    """Run test-time training: open, preflight, read every document with and without, check and report."""
    source, where = open_readable(config), Path(config.out)
    model = load_reader(source, config.device or default_device())
    patch = fresh(source.config, ttt_sites(source.config, config.targets), config.rank, config.scale, config.seed, source.digest)
    texts, left_out = read_documents(config, source)
    how, slots = ttt_plan(config, model), min(config.batch_size, len(texts))
    require_readable(model, tokens_of(texts), how)
    run = Run(where, config, say=say)
    for sentence in quarantines(source):
        say(sentence)
    with run.sitting():
        begin_again(run)
        run.log(Event.DOCUMENTS, count=len(texts), bytes=sum(text.bytes for text in texts), left_out=dict(left_out))
        run.judge(Event.PREFLIGHT, [*preflight_ttt(model, texts, how, patch), check_statistics()])
        before, began = weights(model), time.monotonic()
        without = token_costs(read_and_adapt(model, tokens_of(texts), how, slots), len(texts))
        halfway = time.monotonic()
        notes = Notes(run, texts, without)
        learn_and_note(model, texts, how, BatchedAdapters(patch, slots, model.embed.weight.device, shared=how.carry_over), notes)
        seconds = {"without": round(halfway - began, 2), "with": round(time.monotonic() - halfway, 2)}
        timed = [] if config.max_seconds is None else [check_seconds(seconds["with"], config.max_seconds, "reading with the patch")]
        verdicts = [*_judged(config, notes, slots), check_base_unchanged(before, weights(model)), *timed,
                    *witness_reading(model, config, notes, patch, how, without)]
        outcome = TttOutcome(run.folder, verdicts, results=estimates(notes.texts), documents=notes.texts, left_out=dict(left_out),
                             norms=notes.norms, seconds=seconds)
        write_ttt_report(run, outcome)
    return outcome


def begin_again(run: Run) -> None:
    """Set aside the scores of a reading that was killed: they belong to an adapter that is lost, and all is read from the start."""
    run.set_aside(run.folder / TTT_SCORES)
    run.rewind(0)


def learn_and_note(model: Transformer, texts: Sequence[Read], how: TttSettings, adapters: BatchedAdapters, notes: "Notes") -> None:
    with adapters.attached(model), contextlib.closing(notes.ledger):
        for event in read_and_adapt(model, tokens_of(texts), how, adapters.slots, adapters):
            notes.take(event)


class Notes:
    """Record of what was read so far. An event is on disk before the next one is asked for: a score before the step that follows it."""

    def __init__(self, run: Run, texts: Sequence[Read], without: TokenCosts):
        self.run, self.ledger = run, Ledger(run.folder / TTT_SCORES)
        self.texts = [replace(text, without=bits(alone)) for text, alone in zip(texts, without, strict=True)]
        self.norms: list[float] = []
        self._costs: dict[int, list[NDArray[np.float32]]] = {}
        self._done: list[Read] = []
        self._began = time.monotonic()

    def take(self, event: TttEvent) -> None:
        self.ledger.append(_KINDS.get(type(event[0]), Event.UPDATE), rows=[_row(one) for one in event])
        for one in event:
            if isinstance(one, DocumentBegun):
                self.norms.append(one.right)
            elif isinstance(one, ChunkScored):
                self._add(one)

    def costs_of(self, document: int) -> NDArray[np.float32]:
        """Losses of a document's tokens with the patch, in nats."""
        return np.concatenate(self._costs[document])

    def _add(self, scored: ChunkScored) -> None:
        parts = self._costs.setdefault(scored.document, [])
        parts.append(scored.losses)
        text = self.texts[scored.document]
        if sum(map(len, parts)) == len(text.tokens) - 1:
            self.texts[scored.document] = text = replace(text, with_=bits(np.concatenate(parts)))
            self._finished(text)

    def _finished(self, text: Read) -> None:
        """Record a finished document, one line of metrics; the bits per byte are those of all documents so far."""
        self._done.append(text)
        so_far = sum(one.with_ for one in self._done) / sum(one.bytes for one in self._done)
        self.run.record(len(self._done), document=text.name, loss=text.with_ * math.log(2) / (len(text.tokens) - 1),
                        eval_bits_per_byte=so_far, saved_bits_per_byte=text.saved)
        self.run.progress(len(self._done), len(self.texts), f"documents, {so_far:.4f} bits per byte", time.monotonic() - self._began)

# ---------------------------------------------------------------- before


def open_readable(config: Ttt) -> Artifact:
    source = open_artifact(config.path)
    if source.patch is not None:
        raise UsageError(f"{source.path} is an adapter; export it --to merged, and read with that")
    if source.tokenizer is None:
        raise UsageError(f"{source.path}: documents are text, and there is no tokenizer here; add tokenizer.json")
    if (Path(config.out) / TTT_REPORT).exists():
        raise UsageError(f"{config.out} holds scores already, and a score is written once; choose another --out")
    if config.warm_start and config.carry_over:
        raise UsageError("--warm-start keeps the right factors and --carry-over all of them; give one of the two")
    if config.rank < 1 or config.batch_size < 1 or not config.max_drift > 1 or not config.max_regression >= 0 or len(config.betas) != 2:
        raise UsageError("expected --rank and --batch-size from 1, --max-drift above 1, --max-regression from 0, and two --betas")
    return source


def load_reader(source: Artifact, device: str) -> Transformer:
    require_device(device)
    return build_model(source, torch.bfloat16 if device.startswith("cuda") else torch.float32).to(device).eval()


def ttt_plan(config: Ttt, model: Transformer) -> TttSettings:
    context = config.context or min(4 * config.chunk, model.config.max_length)
    return TttSettings(config.chunk, context, config.steps_per_chunk, config.learning_rate, (config.betas[0], config.betas[1]),
                       config.weight_decay, warm=config.warm_start, carry_over=config.carry_over)


def read_documents(config: Ttt, source: Artifact) -> tuple[list[Read], Counter[str]]:
    """Documents in order. One whose ids do not decode to its own text is left out and counted, since its score would be of another text."""
    tokenizer, left_out, found = source.tokenizer, Counter[str](), list[Read]()
    assert tokenizer is not None
    first = first_token(source)
    rule = DocumentRule(document_bytes=config.document_bytes)
    for document in (one for file in find_sources([Path(config.text)]) for one in iter_documents(file, rule, left_out)):
        if len(found) == config.documents:
            break
        text = document.raw.decode()
        ids = tokenizer.encode(text)
        if tokenizer.decode(ids) == text:
            found.append(Read(document.where, len(document.raw), (first, *ids)))
        else:
            left_out["not its own text when decoded"] += 1
    if len(found) < 2:
        raise DataError(f"{config.text}: {len(found)} documents can be read ({left_out.total()} left out); an interval needs two or more. "
                        "Cut plain text with --document-bytes")
    return found, left_out


def first_token(source: Artifact) -> int:
    """The token that predicts a text's first token: BOS, else the EOS of the text before."""
    first = next((id for id in (source.stops.bos, source.stops.eos) if id is not None), None)
    if first is None:
        raise UsageError(f"{source.path}: no token begins or ends a text, so nothing can predict a first one; name one as bos_token or "
                         "eos_token")
    return first


def preflight_ttt(model: Transformer, texts: Sequence[Read], how: TttSettings, patch: Patch) -> list[Verdict]:
    """TTT preflight: causality of this model, adapter and plan, on the beginnings of two documents of three chunks: cut within every
    chunk, the last and, in the second document, ragged one too.
    """
    chunk = min(how.chunk, PREFLIGHT_TOKENS)
    short = replace(how, chunk=chunk, context=min(how.context, 3 * chunk))
    one, two = sorted((text.tokens for text in texts[:8]), key=len, reverse=True)[:2]
    beginnings = [one[: 1 + 3 * chunk], two[: 1 + 3 * chunk - chunk // 4]]
    length = len(beginnings[0])

    def reading(tokens: Sequence[Sequence[int]]) -> TokenCosts:
        adapters = BatchedAdapters(patch, len(tokens), model.embed.weight.device, shared=how.carry_over)
        with adapters.attached(model):
            return token_costs(read_and_adapt(model, tokens, short, len(tokens), adapters), len(tokens))

    cuts = sorted({cut for tokens in beginnings for cut in causality_cuts(chunk, len(tokens))}) or [max(1, length // 2)]
    unlearned = [place for place in (1, chunk // 2, chunk) if 1 <= place < min(length, 1 + chunk)]
    return [check_causality(reading, beginnings, cuts, model.config.vocab, shared_chunk=chunk if how.carry_over else None),
            check_target_unseen(model, reading(beginnings)[0], beginnings[0], unlearned)]

# ---------------------------------------------------------------- after


def _judged(config: Ttt, notes: Notes, slots: int) -> list[Verdict]:
    found = notes.texts
    with_, without, sizes = columns(found)
    verdicts = [check_score_order(notes.ledger.events(), [len(text.tokens) - 1 for text in found], warm=config.warm_start,
                                  carry_over=config.carry_over),
                check_ttt_gain(with_, without, sizes, carry_over=config.carry_over),
                check_document_regressions(with_, without, [text.name for text in found], config.max_regression)]
    kept = config.warm_start or config.carry_over
    return [*verdicts, check_factor_drift(notes.norms[slots:], config.max_drift)] if kept else verdicts


def witness_reading(model: Transformer, config: Ttt, notes: Notes, patch: Patch, how: TttSettings, without: TokenCosts) -> list[Verdict]:
    """Recompute the shortest document of several chunks, or what a carried-over adapter read first, and the reported figures from the
    costs of the tokens."""
    lengths = [len(text.tokens) for text in notes.texts]
    shortest = min(range(len(lengths)), key=lambda place: (lengths[place] <= 1 + how.chunk, lengths[place]))
    numbers = range(len(lengths)) if how.carry_over else [shortest]
    costs = [without[number] for number in numbers], [notes.costs_of(number) for number in numbers]
    reading = check_reading(model, [notes.texts[number].tokens for number in numbers], costs, patch, how,
                            slots=min(config.batch_size, len(lengths)) if how.carry_over else 1)
    return [check_sites(patch, model.config, config.targets), reading, check_bits_told(notes, without)]


def check_bits_told(notes: Notes, without: TokenCosts) -> Verdict:
    """Check the reported bits per byte of all documents together against the sum over tokens."""
    learned, sizes, told = [notes.costs_of(number) for number in range(len(notes.texts))], sum(text.bytes for text in notes.texts), {
        name: estimate.mean for name, estimate in estimates(notes.texts).items()}
    bits = {name: math.fsum(float(cost) for costs in of for cost in costs) / 0.6931471805599453 / sizes
            for name, of in (("bits per byte, without", without), ("bits per byte, with", learned))}
    wrong = [f"{name} is {due:.6g}, told {told[name]:.6g}" for name, due in bits.items() if not math.isclose(due, told[name], rel_tol=1e-5)]
    logged = [row["loss"] for row in read_json_lines(notes.run.metrics_file) if "loss" in row]
    wrong += [f"{text.name} costs {due:.6g} nats a token, which metrics.jsonl does not say" for text, costs in zip(
        notes.texts, learned, strict=True) if not any(math.isclose(due := math.fsum(map(float, costs)) / len(costs), loss, rel_tol=1e-5)
                                                      for loss in logged)]
    if wrong:
        return refuted("bits", f"the tokens do not cost what is told: {'; '.join(wrong)}", wrong=wrong)
    return proven("bits", f"{len(learned)} documents cost the bits that their tokens sum to")


def estimates(texts: Sequence[Read]) -> dict[str, Estimate]:
    with_, without, sizes = columns(texts)
    return {"bits per byte, without": bits_per_byte(without * math.log(2), sizes),
            "bits per byte, with": bits_per_byte(with_ * math.log(2), sizes),
            "bits per byte, saved": ttt_gain(with_, without, sizes)}


def write_ttt_report(run: Run, outcome: TttOutcome) -> None:
    found = {name: asdict(estimate) for name, estimate in outcome.results.items()}
    rows = [{"name": text.name, "bytes": text.bytes, "tokens": len(text.tokens) - 1, "bits_without": text.without, "bits_with": text.with_,
             "saved_bits_per_byte": text.saved} for text in outcome.documents]
    document = {"estimates": found, "documents": rows, "left_out": outcome.left_out, "norms": outcome.norms, "seconds": outcome.seconds,
                "environment": environment(), "verdicts": [verdict.to_json() for verdict in outcome.verdicts]}
    try:
        draw_ttt_savings([text.saved for text in outcome.documents], outcome.results["bits per byte, saved"], run.folder / "ttt.png")
    except UsageError as error:  # the picture is an extra, its numbers are there
        run.say(str(error))
    run.log(Event.TTT, score=found["bits per byte, with"], estimates=plain(found), norms=plain(outcome.norms),
                      verdicts=plain([verdict.to_json() for verdict in outcome.verdicts]))
    durable.replace_file(run.folder / TTT_REPORT, (json.dumps(plain(document), indent=1) + "\n").encode())

# ---------------------------------------------------------------- small things


def tokens_of(texts: Sequence[Read]) -> list[tuple[int, ...]]:
    return [text.tokens for text in texts]


def columns(texts: Sequence[Read]) -> tuple[Array, Array, Array]:
    """Bits with and without, and bytes, by document."""
    return np.array([t.with_ for t in texts]), np.array([t.without for t in texts]), np.array([t.bytes for t in texts], dtype=np.float64)


def bits(losses: NDArray[np.float32]) -> float:
    return float(losses.astype(np.float64).sum() / math.log(2))


def _row(one: DocumentBegun | ChunkScored | AdapterUpdated) -> dict[str, Any]:
    """Row of the score ledger."""
    if not isinstance(one, ChunkScored):
        return asdict(one)
    facts = {name: value for name, value in vars(one).items() if name != "losses"}
    return facts | {"tokens": len(one.losses), "nats": float(one.losses.astype(np.float64).sum())}


def weights(model: Transformer) -> dict[str, str]:
    return {name: facts["sha256"] for name, facts in tensor_facts({n: p.detach().cpu() for n, p in model.named_parameters()}).items()}

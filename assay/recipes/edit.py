"""Editing facts: locate subjects, choose layers, solve for a patch, write it as a proven checkpoint, and measure what was read back."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from assay.edit.causal import Effects, best_window, trace
from assay.edit.contexts import Contexts, contexts
from assay.edit.facts import Fact, Refused, read_facts
from assay.edit.memit import Edited, by_moments, by_null_space, checked_layers, towards
from assay.edit.moments import LENGTH, Reading, parted, read_text, second_moments
from assay.edit.picture import draw
from assay.edit.rome import rome
from assay.edit.subject import prompt_ids, spots
from assay.edit.targets import Aim, find_targets
from assay.errors import DataError, UsageError
from assay.guard.behaviour import greedy
from assay.guard.proof import Request, mark, prove
from assay.guard.subject import AS_USUAL, Probing
from assay.measure.edit_preflight import check_batching, check_keys, check_spans, check_targets
from assay.measure.edit_probe import Probed, check_probe, probed
from assay.measure.edits import (
    Examined,
    Goals,
    check_edits,
    check_retest,
    check_subjects,
    check_update,
    estimates,
    examine,
    failures,
    update_sizes,
)
from assay.measure.estimate import Estimate
from assay.measure.examinee import OpenedModel
from assay.measure.questions import ask, begins_with, generated, questions
from assay.model.patch import Patch, applied, patched
from assay.model.placement import default_device, require_device, uncompiled
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.recipes.edit_options import Edit
from assay.recipes.run import Run, plain
from assay.store import checkpoint, durable
from assay.store.artifact import Artifact, assembled, build, open_artifact
from assay.store.checkpoint import open_checkpoint
from assay.store.export import DTYPES, stored_dtype
from assay.store.pack import Ancestor, Lineage, model_contents
from assay.verdict import Verdict

AT_ONCE = {"cpu": 64}  # facts that are asked together while looking for known ones; elsewhere MANY
MANY = 1024


@dataclass
class Report:
    """All that a run found, as OUT/edits.json holds it."""

    verdicts: list[Verdict]
    estimates: dict[str, Estimate]
    failed: list[dict[str, str]]
    refused: list[Refused]
    layers: list[int]
    sizes: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)


def edit(config: Edit, say: Callable[[str], None]) -> Report:
    source, device = opened(config), require_device(config.device or default_device())
    with uncompiled():
        return edit_opened(config, source, build(source).to(device), say)


def edit_opened(config: Edit, source: Artifact, model: Transformer, say: Callable[[str], None]) -> Report:
    where, device, tokenizer = Path(config.out) / "model", model.embed.weight.device, source.tokenizer
    assert tokenizer is not None
    scored, reading = texts(config, model, tokenizer)
    facts, refused = chosen_facts(config, model, source, say)
    probing = Probing(config.probe_samples, str(device))
    run, watch = Run(Path(config.out), config, say=say, probing=probing), Stopwatch()
    with run.sitting():
        run.judge("preflight", preflight(model, source, facts))
        before = examine(model, tokenizer, facts, scored, source.stops.stop_ids)
        watch.lap("scores before")
        layers, effects = chosen_layers(config, model, tokenizer, facts)
        told_layers(run, layers, effects)
        watch.lap("causal trace")
        edited = solved(config, model, source, facts, layers, reading, watch)
        with patched(model, edited.patch):
            claimed = ask(model, tokenizer, [q for q in questions(facts) if q.kind == "efficacy"], source.stops.stop_ids)
        verdicts = apply_patch(source, edited.patch, where, taught=ends(model, source), probing=probing)
        run.ledger.append("proof", checkpoint="model", verdicts=plain([verdict.to_json() for verdict in verdicts]))
        watch.lap("checkpoint and proof")
        reloaded = open_artifact(where)
        after = examine(build(reloaded).to(device), tokenizer, facts, scored, source.stops.stop_ids)
        watch.lap("scores after")
        texts_beside = probed(OpenedModel(source, device=str(device), dtype=torch.float32),
                              OpenedModel(reloaded, device=str(device), dtype=torch.float32), rounds=config.probe_rounds, seed=config.seed)
        watch.lap("probe")
        sizes = update_sizes(source.tensors, reloaded.tensors)
        unserved = [] if config.known else refused  # whoever asks for known facts gets others instead of those
        verdicts += [check_subjects(len(facts), unserved), *check_edits(before, after, goals(config)), check_probe(texts_beside),
                     check_retest(claimed, after.replies),
                     check_update(sizes, edited.reached if config.method == "rome" else None, config.max_update)]
        found = estimates(before, after) | ({} if texts_beside is None else texts_beside.estimates())
        report = Report(verdicts, found, failures(facts, edited, after), refused, layers, sizes, watch.seconds)
        written(run, report, facts, edited, before, after, texts_beside)
    return report


def apply_patch(source: Artifact, patch: Patch, where: Path, *, taught: bool, probing: Probing = AS_USUAL) -> list[Verdict]:
    """The parent's tensors with the patch applied, as a checkpoint at `where`, proven in a fresh process and marked."""
    changed = applied(source.tensors, patch, source.digest)
    dtype = DTYPES[stored_dtype(source.tensors)]
    model = assembled(source.config, source.tensors | changed, torch.float32)
    lineage = Lineage("moved", Ancestor(source.digest, str(source.path)), frozen=tuple(sorted(source.tensors.keys() - changed.keys())),
                      taught_to_stop=taught)
    checkpoint.write(where, model_contents(model, source.tokenizer, source.stops, lineage, dtype=dtype))
    verdicts = prove(Request(str(where), str(source.path), expect="moved", probing=probing))
    mark(open_checkpoint(where), verdicts)
    return verdicts


def opened(config: Edit) -> Artifact:
    if (where := Path(config.out) / "model").exists():
        raise UsageError(f"{where} exists, and what was edited is never overwritten; choose another --out")
    source = open_artifact(config.path)
    if source.patch is not None:
        raise UsageError(f"{source.path} is an adapter; export it --to merged, and edit that")
    if source.tokenizer is None:
        raise UsageError(f"{source.path}: facts are text, and there is no tokenizer here; add tokenizer.json")
    return source


def preflight(model: Transformer, source: Artifact, facts: Sequence[Fact]) -> list[Verdict]:
    """What must hold before anything is sought: the right places, the right targets, the model's own keys, padding that is none."""
    tokenizer = source.tokenizer
    assert tokenizer is not None
    return [check_spans(tokenizer, facts), check_targets(tokenizer, facts), check_keys(model, prompt_ids(tokenizer, facts[0].prompt)),
            check_batching(model, tokenizer, questions(facts)[:6], source.stops.stop_ids)]


def ends(model: Transformer, source: Artifact) -> bool:
    """The parent's texts end, so the edited model's must."""
    return any(completion.ended == "stop" for completion in greedy(model, source))


def texts(config: Edit, model: Transformer, tokenizer: Tokenizer) -> tuple[Reading, Reading]:
    """(to score, for moments)"""
    whole = read_text(Path(config.text), tokenizer, config.moment_tokens + config.drift_tokens, length=min(LENGTH, model.config.max_length))
    return parted(whole, config.drift_tokens)


def goals(config: Edit) -> Goals:
    return Goals(config.goal_efficacy, config.goal_generated, config.goal_drift)

# ---------------------------------------------------------------- facts


def chosen_facts(config: Edit, model: Transformer, source: Artifact, say: Callable[[str], None]) -> tuple[list[Fact], list[Refused]]:
    """Those that can be placed, and where --known asks for it those that the model knows."""
    tokenizer = source.tokenizer
    assert tokenizer is not None
    read, refused = read_facts(Path(config.facts), config.first)
    if config.known and not any(fact.old for fact in read):
        raise DataError(f"{config.facts}: no row says what the answer was before, so --known has nothing to ask the model for; give rows "
                        "with an old and a new answer, as CounterFact has them, or leave --known out")
    at_once = AT_ONCE.get(model.embed.weight.device.type, MANY)
    facts: list[Fact] = []
    for start in range(0, len(read), at_once):
        placed, others = spots(tokenizer, read[start : start + at_once])
        facts += known(model, tokenizer, placed, source.stops.stop_ids) if config.known else placed
        refused += others
        if config.known and len(facts) >= config.known:
            break
    if config.known and len(facts) < config.known:
        raise DataError(f"{config.facts}: the model gives the old answer of {len(facts)} facts by itself, {config.known} are asked for; "
                        "lower --known")
    for one in refused:
        say(f"refused: {one.reason}")
    if not facts:
        raise DataError(f"{config.facts}: every request was refused; the first: {refused[0].reason}")
    require_names(facts)
    return facts[: config.known], refused


def known(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], stop_ids: Sequence[int]) -> list[Fact]:
    """Facts whose old answer the model says by itself."""
    told = [fact for fact in facts if fact.old]
    longest = max((len(tokenizer.encode(fact.old or "")) for fact in told), default=1)
    said = generated(model, tokenizer, [fact.prompt for fact in told], longest + 2, stop_ids)
    return [fact for fact, text in zip(told, said, strict=True) if begins_with(text, fact.old or "")]


def require_names(facts: Sequence[Fact]) -> None:
    """Scores are kept by name."""
    names = [fact.name for fact in facts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"two facts are called {twice!r}; give each a name of its own")

# ---------------------------------------------------------------- layers and patch


def chosen_layers(config: Edit, model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact]) -> tuple[list[int], Effects | None]:
    depth = model.config.depth
    if config.layers != "auto":
        return parsed_layers(config.layers), None
    window = config.window or (1 if config.method == "rome" else max(1, round(depth / 6)))
    effects = trace(model, tokenizer, facts[: config.trace_facts], window=window, samples=config.trace_samples, seed=config.seed)
    return best_window(effects, depth), effects


def parsed_layers(text: str) -> list[int]:
    if match := re.fullmatch(r"(\d+)-(\d+)", text):
        return list(range(int(match[1]), int(match[2]) + 1))
    if re.fullmatch(r"\d+(,\d+)*", text):
        return [int(part) for part in text.split(",")]
    raise UsageError(f"--layers {text!r}: expected auto, a range such as 3-8, or a list such as 3,5,7")


def solved(config: Edit, model: Transformer, source: Artifact, facts: Sequence[Fact], layers: list[int], reading: Reading,
           watch: "Stopwatch") -> Edited:
    tokenizer = source.tokenizer
    assert tokenizer is not None
    moments = second_moments(model, reading, layers, source.digest)
    watch.lap("second moments")
    around: Contexts = contexts(model, tokenizer, count=config.prefixes, length=config.prefix_tokens, seed=config.seed)
    aim = Aim(config.steps, config.lr, config.kl, config.decay, config.clamp)
    if config.method == "rome":
        edited = rome(model, tokenizer, facts, layers, moments, around, aim, parent=source.digest)
    else:
        layers = checked_layers(model, layers)
        targets = find_targets(model, tokenizer, facts, around, layers[-1], aim)
        watch.lap("targets")
        solve = by_moments(moments, config.weight) if config.method == "memit" else by_null_space(moments, config.null_share, config.ridge)
        edited = towards(model, tokenizer, facts, targets, layers, solve, around, parent=source.digest)
    watch.lap("solve")
    return edited

# ---------------------------------------------------------------- what is written


class Stopwatch:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 2), now


def told_layers(run: Run, layers: list[int], effects: Effects | None) -> None:
    run.ledger.append("layers", layers=layers, by="causal tracing" if effects else "the command line")
    run.say(f"layers {', '.join(map(str, layers))}")
    if effects is None:
        return
    durable.replace_file(run.folder / "causal.json", (json.dumps(asdict(effects) | {"chosen": layers}, indent=1) + "\n").encode())
    try:
        draw(effects, layers, run.folder / "causal.png")
    except UsageError as error:  # the picture is an extra, its numbers are there
        run.say(str(error))


def written(run: Run, report: Report, facts: Sequence[Fact], edited: Edited, before: Examined, after: Examined,
            texts_beside: Probed | None) -> None:
    found = {name: asdict(estimate) for name, estimate in report.estimates.items()}
    rows = [{"fact": asdict(fact), "probability": target.probability, "search_steps": target.steps, "clamped": target.clamped,
             "reached": reached} for fact, target, reached in zip(facts, edited.targets, edited.reached, strict=True)]
    replies = [{"question": asdict(b.question), "before": _reply(b), "after": _reply(a)}
               for b, a in zip(before.replies, after.replies, strict=True)]
    document = {"layers": report.layers, "estimates": found, "sizes": report.sizes, "failed": report.failed, "seconds": report.seconds,
                "refused": [asdict(one) for one in report.refused], "verdicts": [verdict.to_json() for verdict in report.verdicts],
                "facts": rows, "replies": replies, "probe": None if texts_beside is None else texts_beside.to_json()}
    durable.replace_file(run.folder / "edits.json", (json.dumps(plain(document), indent=1) + "\n").encode())
    run.ledger.append("edits", layers=report.layers, estimates=plain(found), sizes=plain(report.sizes), failed=plain(report.failed),
                      refused=plain([asdict(one) for one in report.refused]),
                      verdicts=plain([verdict.to_json() for verdict in report.verdicts]))
    run.record(0, **{name: estimate.mean for name, estimate in report.estimates.items()})


def _reply(reply: Any) -> dict[str, Any]:
    return {"answer_nll": reply.answer_nll, "other_nll": reply.other_nll, "said": reply.said}

"""Editing facts: find subjects, choose layers, solve for a patch, write it as a proven checkpoint, and evaluate it from disk."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.editing.causal_tracing import IndirectEffects, best_window, causal_trace
from assay.editing.contexts import Contexts, sample_contexts
from assay.editing.edit_preflight import check_batching, check_keys, check_spans, check_targets
from assay.editing.edit_witness import EditMethod, check_contexts, check_moments, check_search, check_solution, check_tuned
from assay.editing.fact_questions import ask_questions, begins_with, fact_questions, greedy_texts
from assay.editing.facts import Fact, RefusedFact, read_facts
from assay.editing.memit import (
    EditResult,
    Solver,
    alphaedit_solver,
    checked_layers,
    memit_solver,
    refuse_uneditable,
    rome,
    spread_over_layers,
)
from assay.editing.moments import ROW_LENGTH, TokenizedText, compute_moments, read_text, second_moments, split_text
from assay.editing.rephrasings import check_rephrasings, read_wordings, with_rephrasings
from assay.editing.subject_tokens import encode_prompt, placeable_facts
from assay.editing.targets import TargetOptions, find_targets
from assay.editing.tuned_edit import TuneOptions, bystander_prompts, tune_edit
from assay.errors import DataError, UsageError
from assay.evaluation.edit_evaluation import (
    EditedReplies,
    EditGoals,
    check_edits,
    check_retest,
    check_subjects,
    check_update,
    edit_estimates,
    edit_failures,
    evaluate_edits,
    relation_rates,
    update_sizes,
)
from assay.evaluation.edit_recount import check_edit_figures, check_replies
from assay.evaluation.loaded_model import LoadedModel
from assay.guard.behaviour_checks import greedy_completions
from assay.guard.proof import ProofRequest, mark_judged, prove
from assay.guard.proof_subject import DEFAULT_SAMPLING, ProofSampling
from assay.guard.training_guards import stop_if_refuted
from assay.health.edit_drift import EditDrift, check_edit_drift, probe_edit
from assay.model.patch import Patch, patched, patched_tensors
from assay.model.placement import default_device, require_device, uncompiled
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.outcome import RunOutcome
from assay.recipes.edit_options import Edit
from assay.recipes.run import Run, plain, print_line
from assay.statistics.known_answers import check_statistics
from assay.store import checkpoint, durable
from assay.store.artifact import Artifact, assemble_model, build_model, open_artifact, refuse_quarantined
from assay.store.export_artifact import EXPORT_DTYPES, majority_dtype
from assay.store.ledger import Event
from assay.store.saving import Ancestor, Lineage, model_contents
from assay.tracing.plots import draw_causal_trace
from assay.verdict import Verdict, proven, refuted

EDIT_REPORT = "edits.json"
_AT_ONCE = {"cpu": 64}  # facts that are asked together while looking for known ones; elsewhere MANY
_MANY = 1024


@dataclass(frozen=True, kw_only=True)
class EditOutcome(RunOutcome):
    """Outcome of an edit, as OUT/edits.json holds it; its `results` are estimates."""

    failed: list[dict[str, str]]
    refused: list[RefusedFact]
    layers: list[int]
    sizes: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)


def edit(config: Edit, say: Callable[[str], None] = print_line) -> EditOutcome:
    """Run an edit. A killed edit starts again with the same command and comes to the same result; the report is written last."""
    source, device = open_editable(config), require_device(config.device or default_device())
    text = edit_texts(config, source)
    with uncompiled():
        return edit_opened(config, source, build_model(source).to(device), text, say)


def edit_opened(config: Edit, source: Artifact, model: Transformer, text: tuple[TokenizedText, TokenizedText],
                say: Callable[[str], None]) -> EditOutcome:
    where, device, tokenizer = Path(config.out) / "model", model.embed.weight.device, source.tokenizer
    assert tokenizer is not None
    scored, reading = text
    facts, refused = chosen_facts(config, model, source, say)
    probing = ProofSampling(config.probe_samples, str(device))
    run, watch = Run(Path(config.out), config, say=say, probing=probing), Stopwatch()
    with run.sitting():
        run.set_aside(where)  # of a session that was killed before it had measured what it wrote
        run.rewind(0)
        run.judge(Event.PREFLIGHT, [*preflight_edit(model, source, facts), check_statistics()])
        before = evaluate_edits(model, tokenizer, facts, scored, source.stops.stop_ids)
        watch.lap("scores before")
        layers, effects = chosen_layers(config, model, tokenizer, facts)
        tell_layers(run, layers, effects)
        watch.lap("causal trace")
        edited, watched = solve_edits(config, model, source, facts, layers, reading, watch)
        with patched(model, edited.patch):
            claimed = ask_questions(model, tokenizer, [q for q in fact_questions(facts) if q.kind == "efficacy"], source.stops.stop_ids)
        proof = apply_patch(source, edited.patch, where, taught=ends(model, source), probing=probing)
        run.log(Event.PROOF, checkpoint="model", verdicts=plain([verdict.to_json() for verdict in proof]))
        watch.lap("checkpoint and proof")
        reloaded = open_artifact(where)
        read_back = build_model(reloaded).to(device)
        after = evaluate_edits(read_back, tokenizer, facts, scored, source.stops.stop_ids)
        watch.lap("scores after")
        texts_beside = probe_edit(LoadedModel(source, device=str(device), dtype=torch.float32),
                              LoadedModel(reloaded, device=str(device), dtype=torch.float32), rounds=config.probe_rounds, seed=config.seed)
        watch.lap("probe")
        sizes = update_sizes(source.tensors, reloaded.tensors)
        unserved = [] if config.known else refused  # whoever asks for known facts gets others instead of those
        verdicts = [*proof, check_subjects(len(facts), unserved), *check_edits(before, after, goals(config)),
                    check_edit_drift(texts_beside), check_retest(claimed, after.replies),
                    check_update(sizes, edited.reached if config.method == "rome" else None, config.max_update)]
        scores = edit_estimates(before, after)
        verdicts += [*watched, check_replies(model, tokenizer, before, scored, source.stops.stop_ids, "before"),
                     check_replies(read_back, tokenizer, after, scored, source.stops.stop_ids, "after"),
                     check_edit_figures(facts, before, after, scores)]
        found = scores | ({} if texts_beside is None else texts_beside.estimates())
        mark_judged(where, proof, verdicts)
        outcome = EditOutcome(run.folder, verdicts, model=where, results=found, failed=edit_failures(facts, edited, after), refused=refused,
                              layers=layers, sizes=sizes, seconds=watch.seconds)
        write_edit_report(run, outcome, facts, edited, before, after, texts_beside)
        stop_if_refuted([check_edit_report(run.folder / EDIT_REPORT, outcome, len(facts))])
    return outcome


def apply_patch(source: Artifact, patch: Patch, where: Path, *, taught: bool, probing: ProofSampling = DEFAULT_SAMPLING) -> list[Verdict]:
    """Write the parent's tensors with the patch applied as a checkpoint at `where`, and prove it in a fresh process. It gets
    its hallmark when it was measured too."""
    changed = patched_tensors(source.tensors, patch, source.digest)
    dtype = EXPORT_DTYPES[majority_dtype(source.tensors)]
    model = assemble_model(source.config, source.tensors | changed, torch.float32)
    lineage = Lineage("moved", Ancestor(source.digest, str(source.path)), frozen=tuple(sorted(source.tensors.keys() - changed.keys())),
                      taught_to_stop=taught)
    checkpoint.write_checkpoint(where, model_contents(model, source.tokenizer, source.stops, lineage, dtype=dtype))
    return prove(ProofRequest(str(where), str(source.path), expect="moved", probing=probing))


def open_editable(config: Edit) -> Artifact:
    """Open the model; refuse one that cannot be edited, or measured afterwards, before its weights are built."""
    out = Path(config.out)
    if (out / EDIT_REPORT).exists() or ((out / "model").exists() and not (out / "ledger.jsonl").exists()):
        raise UsageError(f"{out / 'model'} exists, and what was edited is never overwritten; choose another --out")
    if config.probe_rounds < 1:
        raise UsageError(f"--probe-rounds {config.probe_rounds}: expected at least 1; without texts to other prompts nothing says what "
                         "the edit did to them")
    source = refuse_quarantined(open_artifact(config.path))
    if source.patch is not None:
        raise UsageError(f"{source.path} is an adapter; export it --to merged, and edit that")
    if source.tokenizer is None:
        raise UsageError(f"{source.path}: facts are text, and there is no tokenizer here; add tokenizer.json")
    refuse_uneditable(source.config)
    return source


def preflight_edit(model: Transformer, source: Artifact, facts: Sequence[Fact]) -> list[Verdict]:
    """Edit preflight: subjects found at the right tokens, the right target tokens, keys that are the model's own, and padding without
    effect.
    """
    tokenizer = source.tokenizer
    assert tokenizer is not None
    return [check_spans(tokenizer, facts), check_rephrasings(facts), check_targets(tokenizer, facts),
            check_keys(model, encode_prompt(tokenizer, facts[0].prompt)),
            check_batching(model, tokenizer, fact_questions(facts)[:6], source.stops.stop_ids)]


def ends(model: Transformer, source: Artifact) -> bool:
    """Whether the parent's texts end, so that the edited model's must too."""
    return any(completion.ended == "stop" for completion in greedy_completions(model, source))


def edit_texts(config: Edit, source: Artifact) -> tuple[TokenizedText, TokenizedText]:
    """(to score, for moments)"""
    assert source.tokenizer is not None
    whole = read_text(Path(config.text), source.tokenizer, config.moment_tokens + config.drift_tokens,
                      length=min(ROW_LENGTH, source.config.max_length))
    return split_text(whole, config.drift_tokens)


def goals(config: Edit) -> EditGoals:
    return EditGoals(config.goal_efficacy, config.goal_generated, config.goal_drift)

# ---------------------------------------------------------------- facts


def chosen_facts(config: Edit, model: Transformer, source: Artifact, say: Callable[[str], None]) -> tuple[list[Fact], list[RefusedFact]]:
    """Facts to edit: those whose subject is found and, with --known, whose old answer the model gives."""
    tokenizer = source.tokenizer
    assert tokenizer is not None
    read, refused = read_facts(Path(config.facts), config.first)
    if config.known and not any(fact.old for fact in read):
        raise DataError(f"{config.facts}: no row says what the answer was before, so --known has nothing to ask the model for; give rows "
                        "with an old and a new answer, as CounterFact has them, or leave --known out")
    at_once = _AT_ONCE.get(model.embed.weight.device.type, _MANY)
    facts: list[Fact] = []
    for start in range(0, len(read), at_once):
        placed, others = placeable_facts(tokenizer, read[start : start + at_once])
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
    return reworded(config, tokenizer, facts[: config.known]), refused


def reworded(config: Edit, tokenizer: Tokenizer, facts: list[Fact]) -> list[Fact]:
    """The facts with other wordings: those in which the file asks about the same relation, up to --rephrasings."""
    if not config.rephrasings:
        return facts
    return with_rephrasings(facts, read_wordings(read_facts(Path(config.facts))[0]), tokenizer, config.rephrasings, config.seed)


def known(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], stop_ids: Sequence[int]) -> list[Fact]:
    """Facts whose old answer the model generates by itself."""
    told = [fact for fact in facts if fact.old]
    longest = max((len(tokenizer.encode(fact.old or "")) for fact in told), default=1)
    said = greedy_texts(model, tokenizer, [fact.prompt for fact in told], longest + 2, stop_ids)
    return [fact for fact, text in zip(told, said, strict=True) if begins_with(text, fact.old or "")]


def require_names(facts: Sequence[Fact]) -> None:
    """Refuse facts without distinct names, since scores are kept by name."""
    names = [fact.name for fact in facts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"two facts are called {twice!r}; give each a name of its own")

# ---------------------------------------------------------------- layers and patch


def chosen_layers(config: Edit, model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact]) -> tuple[list[int],
                                                                                                          IndirectEffects | None]:
    depth = model.config.depth
    if config.layers != "auto":
        return parsed_layers(config.layers), None
    window = config.window or (1 if config.method == "rome" else max(1, round(depth / 6)))
    effects = causal_trace(model, tokenizer, facts[: config.trace_facts], window=window, samples=config.trace_samples, seed=config.seed)
    return best_window(effects, depth), effects


def parsed_layers(text: str) -> list[int]:
    if match := re.fullmatch(r"(\d+)-(\d+)", text):
        return list(range(int(match[1]), int(match[2]) + 1))
    if re.fullmatch(r"\d+(,\d+)*", text):
        return [int(part) for part in text.split(",")]
    raise UsageError(f"--layers {text!r}: expected auto, a range such as 3-8, or a list such as 3,5,7")


def solve_edits(config: Edit, model: Transformer, source: Artifact, facts: Sequence[Fact], layers: list[int], reading: TokenizedText,
                watch: "Stopwatch") -> tuple[EditResult, list[Verdict]]:
    """Solve for the patch; returns it with its evidence and the witness's verdicts on each part."""
    tokenizer = source.tokenizer
    assert tokenizer is not None
    moments = second_moments(model, reading, layers if config.method != "tune" else [], source.digest)
    watch.lap("second moments")
    around: Contexts = sample_contexts(model, tokenizer, count=config.prefixes, length=config.prefix_tokens, seed=config.seed)
    verdicts = [check_contexts(model, tokenizer, around, config.prefixes)]
    verdicts += [check_moments(model, reading, moments, compute_moments)] if moments else []
    aim = target_options(config)
    if config.method == "tune":
        edited = tune_edit(model, tokenizer, facts, layers, around, reading.rows, chosen_bystanders(config, facts), tune_options(config),
                           seed=config.seed, parent=source.digest)
        verdicts += [check_tuned(model, tokenizer, facts, around, edited)]
    elif config.method == "rome":
        edited = rome(model, tokenizer, facts, layers, moments, around, aim, parent=source.digest)
    else:
        layers = checked_layers(model, layers)
        targets = find_targets(model, tokenizer, facts, around, layers[-1], aim)
        watch.lap("targets")
        edited = spread_over_layers(model, tokenizer, facts, targets, layers, chosen_solver(config, moments), around, parent=source.digest,
                                    each=config.keys == "each")
        how = EditMethod(config.method, config.mom2_update_weight, config.null_share, config.ridge, config.keys == "each")
        verdicts += [check_search(model, tokenizer, facts, around, targets, layers[-1], aim),
                     check_solution(model, tokenizer, facts, around, edited, moments, how)]
    watch.lap("solve")
    return edited, verdicts


def target_options(config: Edit) -> TargetOptions:
    return TargetOptions(config.v_num_grad_steps, config.v_lr, config.kl_factor, config.v_weight_decay, config.clamp_norm_factor)


def tune_options(config: Edit) -> TuneOptions:
    return TuneOptions(config.tune_steps, config.tune_lr, config.tune_hold)


def chosen_bystanders(config: Edit, facts: Sequence[Fact]) -> list[str]:
    return bystander_prompts(facts, read_facts(Path(config.facts))[0], config.bystanders, config.seed)


def chosen_solver(config: Edit, moments: Mapping[int, Tensor]) -> Solver:
    if config.method == "alphaedit":
        return alphaedit_solver(moments, config.null_share, config.ridge)
    return memit_solver(moments, config.mom2_update_weight)

# ---------------------------------------------------------------- what is written


class Stopwatch:
    """Seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 2), now


def tell_layers(run: Run, layers: list[int], effects: IndirectEffects | None) -> None:
    run.log(Event.LAYERS, layers=layers, by="causal tracing" if effects else "the command line")
    run.say(f"layers {', '.join(map(str, layers))}")
    if effects is None:
        return
    durable.replace_file(run.folder / "causal.json", (json.dumps(asdict(effects) | {"chosen": layers}, indent=1) + "\n").encode())
    try:
        draw_causal_trace(effects, layers, run.folder / "causal.png")
    except UsageError as error:  # the picture is an extra, its numbers are there
        run.say(str(error))


def write_edit_report(run: Run, outcome: EditOutcome, facts: Sequence[Fact], edited: EditResult,
                      before: EditedReplies, after: EditedReplies, texts_beside: EditDrift | None) -> None:
    found = {name: asdict(estimate) for name, estimate in outcome.results.items()}
    rows = [{"fact": asdict(fact), "probability": target.probability, "search_steps": target.steps, "clamped": target.clamped,
             "reached": reached} for fact, target, reached in zip(facts, edited.targets, edited.reached, strict=True)]
    replies = [{"question": asdict(b.question), "before": _reply(b), "after": _reply(a)}
               for b, a in zip(before.replies, after.replies, strict=True)]
    document = {"layers": outcome.layers, "estimates": found, "sizes": outcome.sizes, "failed": outcome.failed, "seconds": outcome.seconds,
                "refused": [asdict(one) for one in outcome.refused], "verdicts": [verdict.to_json() for verdict in outcome.verdicts],
                "facts": rows, "replies": replies, "relations": relation_rates(facts, after),
                "probe": None if texts_beside is None else texts_beside.to_json()}
    run.log(Event.EDITS, layers=outcome.layers, estimates=plain(found), sizes=plain(outcome.sizes), failed=plain(outcome.failed),
                      refused=plain([asdict(one) for one in outcome.refused]),
                      verdicts=plain([verdict.to_json() for verdict in outcome.verdicts]))
    run.record(0, **{name: estimate.mean for name, estimate in outcome.results.items()})
    durable.replace_file(run.folder / EDIT_REPORT, (json.dumps(plain(document), indent=1) + "\n").encode())


def check_edit_report(file: Path, outcome: EditOutcome, facts: int) -> Verdict:
    """Check that the report is on disk, with every fact and every figure."""
    written = json.loads(file.read_text()) if file.is_file() else {}
    told = {name: estimate["mean"] for name, estimate in written.get("estimates", {}).items()}
    if told != {name: plain(estimate.mean) for name, estimate in outcome.results.items()} or len(written.get("facts", ())) != facts:
        return refuted("report", f"{file} does not hold the {facts} facts and {len(outcome.results)} figures of this run")
    return proven("report", f"{facts} facts and {len(told)} figures lie in {file.name}")


def _reply(reply: Any) -> dict[str, Any]:
    return {"answer_nll": reply.answer_nll, "other_nll": reply.other_nll, "said": reply.said, "rank": reply.rank}

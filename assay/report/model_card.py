"""Model card from manifest, hallmark and ledger: what a model is, from what, how trained, measured and proven, and what was not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from assay.errors import DataError, UsageError
from assay.report.findings import estimate_text, findings, not_checked, results_section
from assay.report.headline import headline
from assay.report.markdown import code, code_block, markdown_text, table, verdict_table
from assay.report.provenance import provenance_section
from assay.report.run_record import RunRecord, SavedCheckpoint, is_run, read_run, saved_in, verdicts_of
from assay.store.checkpoint import Checkpoint
from assay.store.digests import recorded_digest, recorded_tensors
from assay.store.durable import hash_file
from assay.strict_json import read_json
from assay.verdict import Outcome, Verdict

NEVER_CHECKED = (
    "Whether the model is good at anything that no evaluation above measures, or safe to use for anything.",
    "Licences: neither of the weights it began with, nor of its data.",
    "What the data say; they are named by hash, and whoever has them can compare.",
    "Who made it, unless it is signed by a key that you know.")
_EVALUATION = {"task": str, "dataset": str, "checkpoint": str, "k": int, "estimates": {str: dict}, "scores_sha256": str}


@dataclass(frozen=True)
class CardEvaluation:
    """A folder of `assay eval` that scored these very weights."""

    name: str
    summary: dict[str, Any]


@dataclass(frozen=True)
class CardSource:
    """Sources of a model card. `record` is None where no run lies beside the weights and none was named."""

    name: str
    checkpoint: Checkpoint
    record: RunRecord | None
    evaluations: Sequence[CardEvaluation] = ()
    gguf: tuple[str, Sequence[Verdict]] | None = None  # the file's name, and what a proof against these weights said of it


def find_run(checkpoint: Checkpoint, named: Path | None = None) -> RunRecord | None:
    """The run that a checkpoint came from: the one that is named, or the folder it lies in. Another run's ledger is refused."""
    folder = checkpoint.folder.resolve()
    places = [named] if named is not None else [place for place in (folder.parent, folder.parent.parent) if is_run(place)]
    if not places:
        return None
    record = read_run(places[0])
    own = {recorded_digest(checkpoint.manifest), (checkpoint.facts.get("parent") or {}).get("weights")}
    if not own & {one.weights for one in saved_in(places[0])[0]}:
        raise UsageError(f"{places[0]}: none of its checkpoints holds the weights of {checkpoint.folder} or of what these were made from; "
                         "name the run that made them with --run")
    if record.damage:
        raise UsageError(f"{places[0]}: {record.damage}; a card is not made from it")
    return record


def read_card_evaluation(folder: Path, checkpoint: Checkpoint) -> CardEvaluation:
    """Read an evaluation of these weights, with the scores that it was computed from; any other is refused."""
    summary = read_json(folder / "eval.json", _EVALUATION, error=DataError)
    if summary["checkpoint"].split("+")[0] != (weights := recorded_digest(checkpoint.manifest)):
        raise DataError(f"{folder}: evaluates the weights {summary['checkpoint'][:12]}…, and {checkpoint.folder} holds {weights[:12]}…; "
                        "evaluate what is published")
    if hash_file(folder / "scores.jsonl") != summary["scores_sha256"]:
        raise DataError(f"{folder}: scores.jsonl is not what eval.json was computed from; run the evaluation again")
    return CardEvaluation(folder.name, summary)


def model_card(source: CardSource) -> str:
    """Model card of a checkpoint; the same files give the same card."""
    saved = saved_in(source.record.folder)[0] if source.record else []
    parts = [_front_matter(source), f"# {markdown_text(source.name)}", _summary(source), *_about(source), *_ancestry(source, saved),
             *_data(source.record, saved), *_training(source, saved), *_evaluations(source), *_verdicts(source), *_unchecked(source, saved),
             *_verification(source)]
    return "\n\n".join(parts) + "\n"


def _front_matter(source: CardSource) -> str:
    library = "peft" if source.checkpoint.kind == "adapter" else "transformers"
    return f"---\nlibrary_name: {library}\ntags:\n- assay\n---"


def _summary(source: CardSource) -> str:
    if source.record is None:
        return "Proven by Assay; the ledger of the run that made it is not at hand, so this card is made from its manifest and hallmark."
    return f"Made by `assay {source.record.recipe}`: {markdown_text(headline(source.record))}."


def _about(source: CardSource) -> Iterator[str]:
    manifest, geometry = source.checkpoint.manifest, source.checkpoint.facts.get("model_config") or {}
    dtypes = sorted({entry["dtype"] for entry in recorded_tensors(manifest).values()})
    shape = ", ".join(f"{name} {geometry[name]}" for name in ("family", "depth", "width", "vocab", "max_length") if name in geometry)
    yield "## What it is"
    yield table(("", ""), [
        ("kind", "an adapter; it needs its base" if source.checkpoint.kind == "adapter" else "a whole model"),
        *([("shape", markdown_text(shape))] if shape else []),
        ("parameters", f"{manifest['parameters']:,} in {', '.join(dtypes)}"),
        ("weights (digest)", code(recorded_digest(manifest))),
        ("manifest.json (sha256)", code(source.checkpoint.digest)),
        *([("for llama.cpp", code(source.gguf[0]))] if source.gguf else [])])


def _ancestry(source: CardSource, saved: Sequence[SavedCheckpoint]) -> Iterator[str]:
    """Table of ancestors, from these weights back through the run's own checkpoints to what it began with."""
    facts, rows = source.checkpoint.facts, []
    if isinstance(base := facts.get("base"), dict):
        rows.append(("an adapter of", code(base["weights"]), code(PurePath(base["path"]).name)))
    known = {one.weights: one for one in saved if (one.ancestor("parent") or {}).get("weights") != one.weights}
    while isinstance(parent := facts.get("parent"), dict):
        change = {"same": "equal to", "moved": "trained on from"}.get(str(facts.get("change")), "made from")
        rows.append((change, code(parent["weights"]), code(PurePath(parent["path"]).name)))
        if (above := known.pop(parent["weights"], None)) is None:
            break
        facts = above.facts
    yield "## From what"
    yield table(("", "weights (digest)", "called"), rows) if rows else "From nothing: it was initialised, and no parent is on record."


def _data(record: RunRecord | None, saved: Sequence[SavedCheckpoint]) -> Iterator[str]:
    rows = provenance_section(record, saved)["data"] if record else []
    yield "## Data"
    cells = [(markdown_text(kind), markdown_text(name), code(value)) for kind, name, value in rows]
    yield table(("event", "what", "value"), cells) if cells else "Unknown: no ledger says which data were read."


def _training(source: CardSource, saved: Sequence[SavedCheckpoint]) -> Iterator[str]:
    yield "## How it was trained"
    facts = source.checkpoint.facts
    environment = facts.get("environment") or {}
    rows = [(markdown_text(name), code(value)) for name, value in sorted(environment.items())]
    rows += [("code (digest)", code(facts["code"]))] if facts.get("code") else []
    if source.record is None:
        yield "Unknown: the run's ledger and options are not at hand. What wrote the files:"
    else:
        rows += [("ledger (sha256 of its last event)", code(source.record.head))]
        yield "The options, as they were given; `assay " + source.record.recipe + " --config config.yaml --out AGAIN` runs it again."
        yield code_block(source.record.config_text or "# not on record", "yaml")
        yield markdown_text(provenance_section(source.record, saved)["promise"])
    yield table(("", ""), rows)


def _evaluations(source: CardSource) -> Iterator[str]:
    rows = [(markdown_text(f"the run's {kind}"), markdown_text(name), markdown_text(value))
            for kind, name, value in (results_section(source.record) if source.record else [])]
    for one in source.evaluations:
        asked = f"{one.summary['task']} (k={one.summary['k']}, data {one.summary['dataset'][:12]}…)"
        found = one.summary["estimates"]
        rows += [(markdown_text(asked), markdown_text(name), markdown_text(estimate_text(value))) for name, value in found.items()]
    yield "## Evaluations"
    yield table(("of", "what", "estimate [interval] (n)"), rows) if rows else "None on record: nothing says what this model is worth."


def _verdicts(source: CardSource) -> Iterator[str]:
    yield "## What was proven"
    yield "Of these bytes, read back by a fresh process (`hallmark.json`):"
    yield verdict_table(verdicts_of(source.checkpoint.hallmark or {}))
    if source.gguf:
        yield f"Of {code(source.gguf[0])}, opened in a fresh process and held against these weights:"
        yield verdict_table(source.gguf[1])
    if source.record is None:
        return
    found = findings(source.record.events)
    against = [one for one in found if one.verdict.outcome is Outcome.REFUTED]
    good = sum(one.verdict.outcome is Outcome.PROVEN for one in found)
    left = len(found) - good - len(against)
    yield f"Of the run: {good} of {len(found)} checks proven every time they ran, {len(against)} refuted, {left} open."
    if against:
        yield verdict_table([one.verdict for one in against])


def _unchecked(source: CardSource, saved: Sequence[SavedCheckpoint]) -> Iterator[str]:
    remarks = source.record.remarks if source.record else ["No ledger: what happened during training was not looked at."]
    open_ = not_checked(source.record, saved, remarks) if source.record else [("", remark) for remark in remarks]
    said = [markdown_text(f"{name}{sentence}") for name, sentence in open_]
    yield "## What was *not* checked, or not shown"
    yield "\n".join(f"- {sentence}" for sentence in [*dict.fromkeys(said), *NEVER_CHECKED])


def _verification(source: CardSource) -> Iterator[str]:
    yield "## How to verify"
    yield ("Download the whole folder. With Assay installed, the first command hashes every file against `manifest.json`, "
           "`hallmark.json` and `publication.json`, and checks a signature; the second loads it in a fresh process and proves it again.")
    yield code_block("assay verify FOLDER --signers allowed_signers    # without --signers where you know no key\n"
                     "assay prove FOLDER", "sh")
    yield f"The sha256 of `manifest.json` must be {code(source.checkpoint.digest)}; without Assay: `sha256sum manifest.json`."

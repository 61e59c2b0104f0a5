"""assay prove: run every check in a fresh process, on our checkpoints and on what other tools wrote."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from assay.config import argument, option
from assay.errors import UsageError
from assay.recipes.options import DEVICE, PROBE_SAMPLES_HELP
from assay.verdict import Outcome, Verdict, overall, unproven, without_optional


@dataclass(frozen=True)
class FLAGS:
    """Reload PATH in a fresh process and check it: complete, hashed, finite, the architecture it claims, the live model's logits,
    moved from its parent, the same through transformers or PEFT, sample texts that end and are not degenerate. A checkpoint that
    Assay wrote gets a hallmark or is quarantined. Of a folder that another tool wrote (transformers, TRL, unsloth, axolotl, PEFT,
    GGUF) everything that can be checked is; the rest is UNPROVEN, with the reason. A squeezed (.assayz) file must hold exactly what
    quantising --against gives."""

    path: str = argument("checkpoint, Hugging Face or PEFT folder, GGUF or .assayz file; or a trainer's output folder, of which each "
                         "checkpoint-N is proven")
    against: str | None = option("parent to compare with (with --expect same: the source)", metavar="MODEL", default=None,
                                 default_text="the parent that PATH names")
    base: str | None = option("base of an adapter that does not name its base", metavar="MODEL", default=None)
    expect: Literal["moved", "same"] | None = option("expected relation to --against: trained from it (moved), or equal to it (same)",
                                                     default=None)
    probe_samples: int = option(PROBE_SAMPLES_HELP, least=0, default=4)
    device: str | None = option("device to compute on, if there is room: cpu or cuda", default=None, default_text=DEVICE)
    strict: bool = option("exit with 3 also where a check is UNPROVEN", default=False)
    summary: str | None = option("file to which the verdicts are appended as a Markdown table, such as $GITHUB_STEP_SUMMARY",
                                 metavar="FILE",
                                 default=None, default_text="none")
    json: bool = option("print verdicts as JSON", default=False)


READ_TWICE = 4 * 10**9  # bytes of a model that two processes may well read at once

EXAMPLES = """  assay prove runs/a/checkpoints/step-000500
  assay prove ./trl-output --against ./base-model     # did training change anything?
  assay prove ./adapter --base ./base-model --json
  assay prove model-q8_0.gguf --against ./source --expect same
  assay prove runs/a/model.assayz --against runs/a/model
  assay prove runs/a/model --strict --summary $GITHUB_STEP_SUMMARY"""


def run(flags: FLAGS) -> int:
    from assay.guard.proving_process import PROVING_PROCESSES
    from assay.store.trainer_output import trainer_checkpoints  # nothing here may import torch: the proving processes would wait for it

    if places := trainer_checkpoints(Path(flags.path)):
        return _prove_each(flags, places)
    with PROVING_PROCESSES.keeping():  # their end takes a moment, for which nobody should wait to read the verdicts
        verdicts = prove_artifact(flags)
        outcome = print_proof(Path(flags.path), verdicts, as_json=flags.json)
    _summarise(flags, {Path(flags.path): verdicts})
    return exit_code(outcome, strict=flags.strict)


def _prove_each(flags: FLAGS, places: list[Path]) -> int:
    """Prove each place; one that cannot be opened does not hide the others; where none can, that is the answer."""
    proofs: dict[Path, list[Verdict]] = {}
    refusals: list[UsageError] = []
    for place in places:
        try:
            proofs[place] = prove_artifact(replace(flags, path=str(place)))
        except UsageError as error:
            refusals.append(error)
            proofs[place] = [unproven("support", str(error))]
        if not flags.json:
            print_proof(place, proofs[place], as_json=False)
            print(flush=True)
    if len(refusals) == len(places):
        raise refusals[0]
    if flags.json:
        print(json.dumps([proof_document(place, verdicts) for place, verdicts in proofs.items()], indent=1))
    _summarise(flags, proofs)
    return max(exit_code(overall(without_optional(verdicts)), strict=flags.strict) for verdicts in proofs.values())


def _summarise(flags: FLAGS, proofs: Mapping[Path, list[Verdict]]) -> None:
    if flags.summary is None:
        return
    from assay.report.markdown import append_summary, markdown_text, verdict_table

    for place, verdicts in proofs.items():
        outcome = overall(without_optional(verdicts))
        append_summary(flags.summary, f"### assay prove {markdown_text(place)}: {outcome}\n\n{verdict_table(verdicts)}")


def prove_artifact(flags: FLAGS) -> list[Verdict]:
    """Run every check in a fresh process; a checkpoint of ours that passes gets its hallmark.

    That process starts first: it imports torch and transformers while this one imports what asks it. Where there are cores for two, and
    the model may well be read twice, transformers has one of its own."""
    from assay.guard.proving_process import PROVING_PROCESSES, WHERE_THERE_IS_ONE, processes_early, proof_threads

    apart = processes_early() >= 2 and _small_and_whole(Path(flags.path))
    with PROVING_PROCESSES.keeping():
        if Path(flags.path).exists():
            PROVING_PROCESSES.start_early(proof_threads(beside=False), flags.device or WHERE_THERE_IS_ONE, alone=True)
        if apart:
            PROVING_PROCESSES.start_early(proof_threads(beside=False), flags.device or WHERE_THERE_IS_ONE, 2, libraries=False, alone=True)
        return _proven(flags, apart=apart)


def _small_and_whole(path: Path) -> bool:
    files = list(path.glob("*.safetensors")) if path.is_dir() and not (path / "adapter_config.json").exists() else []
    return 0 < sum(file.stat().st_size for file in files) <= READ_TWICE


def _proven(flags: FLAGS, *, apart: bool = False) -> list[Verdict]:
    from assay.guard.proof import ProofRequest, prove, prove_apart, prove_checkpoint
    from assay.guard.proof_subject import ProofSampling
    from assay.model.placement import default_device, require_device
    from assay.store.artifact import locate_artifact

    place, probing = locate_artifact(flags.path), ProofSampling(flags.probe_samples, require_device(flags.device or default_device()))
    if flags.against == "" or (flags.expect and flags.against is None and place.kind != "checkpoint"):
        raise UsageError(f"--against names what {place.path} is compared with, a model's path; nothing else here does")
    if place.kind == "checkpoint" and flags.expect is None:
        return prove_checkpoint(place.path, against=flags.against, base=flags.base, probing=probing, apart=apart)
    bound = place.format.bound(place.path) if place.format.bound and flags.expect == "same" else None  # a rounded copy is a copy
    verdicts = (prove_apart if apart else prove)(ProofRequest(str(place.path), flags.against, flags.base, flags.expect, bound,
                                                              probing=probing))
    if place.kind == "gguf" and flags.expect == "same" and flags.against and overall(verdicts) is not Outcome.REFUTED:
        from assay.guard.llama_cpp_checks import check_in_llama_cpp
        from assay.store.artifact import open_artifact

        return [*verdicts, *check_in_llama_cpp(place.path, open_artifact(flags.against))]
    return verdicts


def print_proof(path: Path, verdicts: list[Verdict], *, as_json: bool) -> Outcome:
    """Print every verdict, and what they come to together."""
    outcome = overall(without_optional(verdicts))
    if as_json:
        print(json.dumps(proof_document(path, verdicts), indent=1), flush=True)
        return outcome
    count = {kind: sum(v.outcome is kind for v in verdicts) for kind in Outcome}
    counts = f"{count[Outcome.PROVEN]} proven, {count[Outcome.REFUTED]} refuted, {count[Outcome.UNPROVEN]} could not be checked"
    meaning = {Outcome.PROVEN: "every required check holds", Outcome.REFUTED: "do not use it",
               Outcome.UNPROVEN: "nothing is refuted, but it is not proven"}[outcome]
    print("\n".join(map(str, verdicts)))
    print(f"\n{path.name}: {outcome} ({counts}): {meaning}", flush=True)
    return outcome


def proof_document(path: Path, verdicts: list[Verdict]) -> dict[str, Any]:
    return {"path": str(path), "outcome": str(overall(without_optional(verdicts))), "verdicts": [v.to_json() for v in verdicts]}


def exit_code(outcome: Outcome, *, strict: bool = False) -> int:
    return 3 if outcome is Outcome.REFUTED or (strict and outcome is Outcome.UNPROVEN) else 0

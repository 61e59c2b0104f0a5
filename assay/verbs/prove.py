"""assay prove: run every check in a fresh process, on our checkpoints and on what other tools wrote."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from assay.config import argument, option
from assay.errors import UsageError
from assay.verdict import Outcome, Verdict, overall


@dataclass(frozen=True)
class FLAGS:
    """Reload PATH in a fresh process and check it: whole, hashed, finite, the architecture it claims, the answers the live model
    gave, moved from its parent, the same through transformers or PEFT, generations that end and are healthy. A checkpoint of Assay's gets a
    hallmark or is quarantined. Of a folder that another tool wrote (transformers, TRL, unsloth, axolotl, PEFT, GGUF) what can
    be proven is; the rest is UNPROVEN, in words. A squeezed file must hold what rounding makes of --against, bit for bit."""

    path: str = argument("checkpoint, Hugging Face or PEFT folder, GGUF or squeezed file")
    against: str | None = option("parent (or source, with --expect same) to compare with", metavar="MODEL", default=None,
                                 default_text="the parent that PATH names")
    base: str | None = option("an adapter's base, where the adapter does not name it", metavar="MODEL", default=None)
    expect: Literal["moved", "same"] | None = option("how it should stand to --against: trained on from it, or equal to it", default=None)
    probe_samples: int = option("texts to each of eight prompts by which its health may be judged; where the first of each are clean, they "
                                "are enough; 0: none", least=0, default=4)
    device: str = option("where those texts are sampled: cpu or cuda", default="cpu")
    strict: bool = option("exit with 3 also where something is UNPROVEN", default=False)
    json: bool = option("print verdicts as JSON", default=False)


EXAMPLES = """  assay prove runs/a/checkpoints/step-000500
  assay prove ./trl-output --against ./base-model     # did training change anything?
  assay prove ./adapter --base ./base-model --json
  assay prove model-q8_0.gguf --against ./source --expect same
  assay prove runs/a/model.assayz --against runs/a/model"""


def run(flags: FLAGS) -> int:
    from assay.guard.proof import ProofRequest, prove, prove_checkpoint
    from assay.guard.proof_subject import ProofSampling
    from assay.model.placement import require_device
    from assay.store.artifact import locate_artifact

    place, probing = locate_artifact(flags.path), ProofSampling(flags.probe_samples, require_device(flags.device))
    if flags.against == "" or (flags.expect and flags.against is None and place.kind != "checkpoint"):
        raise UsageError(f"--against names what {place.path} is compared with, a model's path; nothing else here does")
    if place.kind == "checkpoint" and flags.expect is None:
        verdicts = prove_checkpoint(place.path, against=flags.against, base=flags.base, probing=probing)
    else:
        bound = place.format.bound(place.path) if place.format.bound and flags.expect == "same" else None  # a rounded copy is a copy
        verdicts = prove(ProofRequest(str(place.path), flags.against, flags.base, flags.expect, bound, probing=probing))
    return exit_code(print_proof(place.path, verdicts, as_json=flags.json), strict=flags.strict)


def print_proof(path: Path, verdicts: list[Verdict], *, as_json: bool) -> Outcome:
    """Every verdict, and what they come to together."""
    from assay.guard.proof import without_optional

    outcome = overall(without_optional(verdicts))
    if as_json:
        print(json.dumps({"path": str(path), "outcome": str(outcome), "verdicts": [v.to_json() for v in verdicts]}, indent=1))
        return outcome
    count = {kind: sum(v.outcome is kind for v in verdicts) for kind in Outcome}
    counts = f"{count[Outcome.PROVEN]} proven, {count[Outcome.REFUTED]} refuted, {count[Outcome.UNPROVEN]} could not be checked"
    meaning = {Outcome.PROVEN: "everything that was asked of it holds", Outcome.REFUTED: "do not use it",
               Outcome.UNPROVEN: "nothing speaks against it, but it is not proven"}[outcome]
    print("\n".join(map(str, verdicts)))
    print(f"\n{path.name}: {outcome} ({counts}): {meaning}")
    return outcome


def exit_code(outcome: Outcome, *, strict: bool = False) -> int:
    return 3 if outcome is Outcome.REFUTED or (strict and outcome is Outcome.UNPROVEN) else 0

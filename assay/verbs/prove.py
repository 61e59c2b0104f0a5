"""assay prove: run every check in a fresh process, on our checkpoints and on what other tools wrote."""

import json
from dataclasses import dataclass
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
    against: str | None = option("parent (or source, with --expect same) to compare with", default=None)
    base: str | None = option("an adapter's base, where the adapter does not name it", default=None)
    expect: Literal["moved", "same"] | None = option("how it should stand to --against: trained on from it, or equal to it", default=None)
    probe_samples: int = option("texts to each of eight prompts by which its health may be judged; clean ones are enough after one; "
                                "0: none", least=0, default=4)
    device: str = option("where those texts are sampled: cpu, cuda, …", default="cpu")
    strict: bool = option("exit 3 also where something is UNPROVEN", default=False)
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
    outcome = conclusion(verdicts)
    if flags.json:
        print(json.dumps({"path": str(place.path), "outcome": str(outcome), "verdicts": [v.to_json() for v in verdicts]}, indent=1))
    else:
        print("\n".join(map(str, verdicts)))
        print(f"\n{proof_summary(place.path.name, outcome, verdicts)}")
    return exit_code(outcome, strict=flags.strict)


def conclusion(verdicts: list[Verdict]) -> Outcome:
    from assay.guard.proof import without_optional

    return overall(without_optional(verdicts))


def proof_summary(name: str, outcome: Outcome, verdicts: list[Verdict]) -> str:
    count = {kind: sum(v.outcome is kind for v in verdicts) for kind in Outcome}
    counts = f"{count[Outcome.PROVEN]} proven, {count[Outcome.REFUTED]} refuted, {count[Outcome.UNPROVEN]} could not be checked"
    meaning = {Outcome.PROVEN: "everything that was asked of it holds", Outcome.REFUTED: "do not use it",
               Outcome.UNPROVEN: "nothing speaks against it, but it is not proven"}[outcome]
    return f"{name}: {outcome} ({counts}): {meaning}"


def exit_code(outcome: Outcome, *, strict: bool = False) -> int:
    return 3 if outcome is Outcome.REFUTED or (strict and outcome is Outcome.UNPROVEN) else 0

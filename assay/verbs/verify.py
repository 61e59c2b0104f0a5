"""assay verify: hash what was downloaded against manifest, hallmark and publication, and say who proved it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.config import argument, option

if TYPE_CHECKING:
    from assay.verdict import Verdict


@dataclass(frozen=True)
class FLAGS:
    """Hash every file of a published model against its manifest, and manifest, hallmark and model card against publication.json; say
    which checks proved it, and whose signature is valid. Nothing is loaded or run: `assay prove` does that. Exits with 0 where
    everything matches, and with 3 where something does not or the model has no hallmark."""

    path: str = argument("downloaded folder; or hf://OWNER/NAME or s3://BUCKET/PATH, which is downloaded to a temporary folder first")
    signers: str | None = option("names and public keys that may have signed it, in ssh-keygen's ALLOWED SIGNERS format; any other "
                                 "signature is refuted",
                                 metavar="FILE", default=None, default_text="the key is printed, and its owner is unknown")
    summary: str | None = option("file to which the verdicts are appended as a Markdown table, such as $GITHUB_STEP_SUMMARY",
                                 metavar="FILE",
                                 default=None, default_text="none")
    json: bool = option("print verdicts as JSON", default=False)


EXAMPLES = """  assay verify ./downloaded
  assay verify ./downloaded --signers allowed_signers
  assay verify hf://me/my-model --json"""


def verify_published(flags: FLAGS) -> "list[Verdict]":
    from assay.guard.publication_checks import check_published
    from assay.interop.publish_targets import open_target
    from assay.store.scratch import scratch_folder

    with scratch_folder() as scratch:
        return check_published(open_target(flags.path).fetch(scratch), Path(flags.signers) if flags.signers else None)


def run(flags: FLAGS) -> int:
    from assay.report.markdown import append_summary, markdown_text, verdict_table
    from assay.verdict import Outcome, overall, without_optional

    verdicts = verify_published(flags)
    outcome = overall(without_optional(verdicts))
    if flags.summary is not None:
        append_summary(flags.summary, f"### assay verify {markdown_text(flags.path)}: {outcome}\n\n{verdict_table(verdicts)}")
    if flags.json:
        print(json.dumps({"path": flags.path, "outcome": str(outcome), "verdicts": [verdict.to_json() for verdict in verdicts]}, indent=1))
    else:
        meaning = {Outcome.PROVEN: "what was proven is what lies here", Outcome.REFUTED: "do not use it", Outcome.UNPROVEN: "not proven"}
        print("\n".join(map(str, verdicts)))
        print(f"\n{flags.path}: {outcome}: {meaning[outcome]}")
    return 0 if outcome is Outcome.PROVEN else 3

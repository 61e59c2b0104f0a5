"""assay publish: push a proven model with a model card made from its ledger, and hash what is fetched back before it says done."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assay.config import argument, option

if TYPE_CHECKING:
    from assay.interop.publishing import Published


@dataclass(frozen=True)
class FLAGS:
    """Publish a checkpoint that has a hallmark: its files, a model card made from manifest, hallmark and ledger, and
    publication.json, which names all of them by sha256 and which --sign signs. Everything is then downloaded again and hashed before
    success is reported. Refused are a folder that is not proven and a target that is not empty."""

    path: str = argument("checkpoint that Assay wrote: RUN/model, RUN/adapter, or the output of assay export")
    to: str = option("target: hf://OWNER/NAME, a new folder, or s3://BUCKET/PATH (with s3fs installed)", metavar="TARGET")
    run: str | None = option("run whose ledger describes the training", metavar="RUN", default=None,
                             default_text="the run that contains PATH")
    evals: tuple[str, ...] = option("folders of `assay eval` results of exactly these weights, for the model card",
                                    metavar="FOLDER", default=(),
                                    default_text="none")
    gguf: str | None = option("also publish a GGUF file in this number format (f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m), proven first",
                              metavar="DTYPE", default=None, default_text="none")
    sign: str | None = option("SSH key that signs the publication, by ssh-keygen, offline",
                              metavar="KEY", default=None, default_text="unsigned")
    name: str | None = option("the model's name on the card", default=None, default_text="the last part of the target")
    public: bool = option("make a new repository on the hub public", default=False)
    json: bool = option("print verdicts as JSON", default=False)


EXAMPLES = """  assay publish runs/sft/model --to hf://me/my-model --sign ~/.ssh/id_ed25519
  assay publish runs/sft/model --to ./published --evals evals/after
  assay publish runs/sft/model --to s3://models/mine --gguf q8_0"""


def publish_model(flags: FLAGS) -> "Published":
    from assay.interop.publishing import PublishRequest, publish

    return publish(PublishRequest(
        Path(flags.path), flags.to, run=Path(flags.run) if flags.run else None, evaluations=tuple(map(Path, flags.evals)), gguf=flags.gguf,
        key=Path(flags.sign).expanduser() if flags.sign else None, public=flags.public, name=flags.name))


def run(flags: FLAGS) -> int:
    from assay.verdict import Outcome, overall, without_optional

    done = publish_model(flags)
    outcome = overall(without_optional(done.verdicts))
    if flags.json:
        print(json.dumps({"published": done.version, "outcome": str(outcome), "files": list(done.files),
                          "verdicts": [verdict.to_json() for verdict in done.verdicts]}, indent=1))
    else:
        print("\n".join(map(str, done.verdicts)))
        print(f"\n{done.version}: {'published, fetched back and verified' if outcome is Outcome.PROVEN else 'do not use what lies there'}")
    return 0 if outcome is Outcome.PROVEN else 3

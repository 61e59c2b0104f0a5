"""Publishing: a proven checkpoint with its card and publication, signed if asked, is pushed, fetched back and hashed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.errors import ArtifactError, UsageError
from assay.guard.llama_cpp_checks import check_in_llama_cpp
from assay.guard.proof import ProofRequest, prove
from assay.guard.publication_checks import check_hallmark, check_published
from assay.interop.publish_targets import PublishTarget, open_target
from assay.report.model_card import CardSource, find_run, model_card, read_card_evaluation
from assay.store import durable
from assay.store.artifact import open_artifact
from assay.store.checkpoint import (
    CARD,
    HALLMARK,
    HUB_OWN,
    MANIFEST,
    PUBLICATION,
    SIGNATURE,
    STATE_STEM,
    Checkpoint,
    open_checkpoint,
)
from assay.store.export_artifact import export_artifact
from assay.store.publication import publication_of
from assay.store.scratch import scratch_folder
from assay.store.ssh_signature import sign_bytes
from assay.verdict import Outcome, Verdict, overall, proven, refuted


@dataclass(frozen=True)
class PublishRequest:
    folder: Path
    to: str
    run: Path | None = None  # None: the run that the folder lies in
    evaluations: Sequence[Path] = ()
    gguf: str | None = None  # number format of a GGUF file beside the safetensors
    key: Path | None = None  # an SSH key that signs
    public: bool = False
    name: str | None = None  # on the card


@dataclass(frozen=True)
class Published:
    """`version` names what lies there; `verdicts` are of what was fetched back."""

    version: str
    files: Sequence[str]
    verdicts: Sequence[Verdict]


def publish(request: PublishRequest) -> Published:
    """Publish a model. Everything that can be refused is refused before the first byte leaves; a target that holds anything is left as it
    is."""
    checkpoint = require_publishable(request.folder)
    target = open_target(request.to, public=request.public)
    if held := [name for name in target.names() if name not in HUB_OWN]:
        raise UsageError(f"{request.to} holds {', '.join(held[:3])}{' and more' if len(held) > 3 else ''}; what was published is never "
                         "overwritten: choose another place")
    with scratch_folder() as scratch:
        files = _made_files(checkpoint, request, scratch)
        version = target.push(files)
        back = scratch / "fetched back"
        back.mkdir()
        return Published(version, sorted(files), check_fetched_back(target, back, files))


def require_publishable(folder: Path) -> Checkpoint:
    """A checkpoint of ours with a hallmark, nothing against it, and nothing that only its run needs. Every byte is hashed."""
    checkpoint = open_checkpoint(folder)
    verdict = check_hallmark(checkpoint)
    if verdict.outcome is not Outcome.PROVEN:
        raise ArtifactError(f"{folder}: is not proven, and not published: {verdict.reason}")
    if state := [name for name in checkpoint.manifest["files"] if name.startswith(STATE_STEM)]:
        raise UsageError(f"{folder}: holds the state of a run ({state[0]}); publish what the run handed over (RUN/model, RUN/adapter), or "
                         f"write it without: assay export {folder} --to hf --out MODEL")
    return checkpoint


def check_fetched_back(target: PublishTarget, into: Path, files: Mapping[str, Path]) -> list[Verdict]:
    """Check that what lies at the target, read back, is byte for byte what was pushed; and what a stranger's `assay verify` would say of
    it."""
    back = target.fetch(into)
    for name, path in files.items():
        sent, found = durable.hash_file(path), durable.hash_file(back / name) if (back / name).is_file() else None
        if sent != found:
            said = f"{name} hashes to {found}" if found else f"{name} is not there"
            return [refuted("fetched back", f"{said}, and {sent} was pushed: do not use what lies there; remove it, and publish again")]
    return [proven("fetched back", f"{len(files)} files were read back and hash to what was pushed"), *check_published(back)]


def _made_files(checkpoint: Checkpoint, request: PublishRequest, scratch: Path) -> dict[str, Path]:
    """Name → local file of all that is pushed; what publishing adds is made in `scratch`."""
    gguf, said = _gguf_file(checkpoint, request.gguf, scratch) if request.gguf else (None, [])
    evaluations = [read_card_evaluation(folder, checkpoint) for folder in request.evaluations]
    name = request.name or request.to.rstrip("/").rsplit("/", 1)[-1]
    source = CardSource(name, checkpoint, find_run(checkpoint, request.run), evaluations, (gguf.name, said) if gguf else None)
    beside = {CARD: scratch / CARD} | ({gguf.name: gguf} if gguf else {})
    durable.write_file(scratch / CARD, [model_card(source).encode()])
    publication = publication_of(checkpoint, beside)
    made = {PUBLICATION: publication.data} | ({SIGNATURE: sign_bytes(publication.data, request.key)} if request.key else {})
    for own, data in made.items():
        durable.write_file(scratch / own, [data])
        beside[own] = scratch / own
    return {own: checkpoint.folder / own for own in (*checkpoint.manifest["files"], MANIFEST, HALLMARK)} | beside


def _gguf_file(checkpoint: Checkpoint, dtype: str, scratch: Path) -> tuple[Path, list[Verdict]]:
    """Write a GGUF file, and prove it in a fresh process against the checkpoint; one that is refuted ends the publication here."""
    where = scratch / f"model-{dtype}.gguf"
    source = open_artifact(checkpoint.folder)
    bound = export_artifact(source, "gguf", where, dtype)
    verdicts = prove(ProofRequest(str(where), str(checkpoint.folder), None, "same", bound))
    if overall(verdicts) is not Outcome.REFUTED:
        verdicts += check_in_llama_cpp(where, source)
    if against := [verdict for verdict in verdicts if verdict.outcome is Outcome.REFUTED]:
        raise ArtifactError(f"{where.name} is refuted, and nothing is published: {'; '.join(map(str, against))}")
    return where, verdicts

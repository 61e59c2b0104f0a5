"""Publication checks of a downloaded model: every file against manifest and publication, the hallmark, and whose signature holds."""

import os
from pathlib import Path

from assay.errors import ArtifactError
from assay.store import durable
from assay.store.checkpoint import PUBLICATION, PUBLISHED_BESIDE, SIGNATURE, Checkpoint, open_checkpoint
from assay.store.publication import Publication, read_publication, unaccounted_files
from assay.store.safetensors_files import inside
from assay.store.ssh_signature import require_signature, ssh_keygen_installed
from assay.verdict import Outcome, Verdict, overall, proven, refuted, unproven, without_optional


def check_published(folder: Path, signers: Path | None = None) -> list[Verdict]:
    """Files, hallmark, publication and signature, in this order: each rests on the one before."""
    try:
        checkpoint = open_checkpoint(folder)
    except ArtifactError as error:
        why = "the files themselves are refused"
        return [refuted("files", str(error)), *(unproven(check, why) for check in ("hallmark", "publication", "signature"))]
    count = len(checkpoint.manifest["files"])
    files = proven("files", f"all {count} files of the manifest hash to what it says ({checkpoint.manifest['bytes']:,} bytes); its own "
                            f"sha256 is {checkpoint.digest}", manifest=checkpoint.digest)
    try:
        publication = read_publication(folder)
    except ArtifactError as error:
        return [files, check_hallmark(checkpoint), refuted("publication", str(error)), unproven("signature", f"{PUBLICATION} is refused")]
    return [files, check_hallmark(checkpoint), check_publication(checkpoint, publication), check_signature(folder, publication, signers)]


def check_hallmark(checkpoint: Checkpoint) -> Verdict:
    """A fresh process proved these bytes, and nothing that was found later speaks against them."""
    if (mark := checkpoint.quarantined) is not None:
        against = [one["reason"] for one in mark["verdicts"] if one["outcome"] != Outcome.PROVEN]
        return refuted("hallmark", f"quarantined: {'; '.join(against) or 'no reason is recorded'}")
    if (mark := checkpoint.hallmark) is None:
        return unproven("hallmark", "there is none: nobody proved these bytes; run `assay prove` on the folder")
    try:
        said = [Verdict(one["check"], Outcome(one["outcome"]), one["reason"], one.get("evidence", {})) for one in mark["verdicts"]]
    except ValueError as error:
        return refuted("hallmark", f"holds what is no verdict: {error}")
    if overall(without_optional(said)) is not Outcome.PROVEN:
        against = [str(one) for one in without_optional(said) if one.outcome is not Outcome.PROVEN]
        return refuted("hallmark", f"it was never earned: {'; '.join(against) or 'it names no check'}")
    return proven("hallmark", f"of this very manifest, by {len(said)} checks in a fresh process: {', '.join(one.check for one in said)}")


def check_publication(checkpoint: Checkpoint, publication: Publication | None) -> Verdict:
    """The card, the hallmark and a GGUF file are the published ones, and nothing else lies there."""
    if publication is None:
        return unproven("publication", f"there is no {PUBLICATION}: nothing accounts for a model card beside these files", optional=True)
    if publication.manifest != checkpoint.digest:
        return refuted("publication", f"{PUBLICATION} is of another folder: it names the manifest {publication.manifest}, and this one is "
                                      f"{checkpoint.digest}")
    if others := unaccounted_files(checkpoint, publication):
        return refuted("publication", f"{', '.join(others)}: not published with the rest; remove what nobody accounts for")
    absent = [name for name in publication.files if not os.path.lexists(checkpoint.folder / name)]
    if missing := [name for name in absent if not name.endswith(PUBLISHED_BESIDE)]:
        return refuted("publication", f"{', '.join(missing)}: published, and not here; download the folder whole")
    for name, entry in publication.files.items():
        if name in absent:
            continue
        try:
            durable.require_hash(checkpoint.folder / name, durable.hash_file(inside(checkpoint.folder, name)), entry["sha256"])
        except ArtifactError as error:
            return refuted("publication", str(error))
    here = [name for name in publication.files if name not in absent]
    left = f"; not here, so not looked at: {', '.join(absent)}" if absent else ""
    return proven("publication", f"{', '.join(here)} are as they were published, and nothing else is here{left}")


def check_signature(folder: Path, publication: Publication | None, signers: Path | None = None) -> Verdict:
    """Check the signature of a publication. Asked whether one of `signers` signed, anything else refutes. Unasked, the key is named and
    nobody vouches for it."""
    signature = folder / SIGNATURE
    if publication is None or not os.path.lexists(signature):
        told = "nobody signed it: whoever can write to the folder could have changed all of it together"
        return unproven("signature", told, optional=True) if signers is None else refuted("signature", f"{told}; --signers asks for one")
    if signers is None and not ssh_keygen_installed():
        return unproven("signature", f"{SIGNATURE} was not looked at: ssh-keygen is not installed; install OpenSSH", optional=True)
    try:
        signer = require_signature(publication.data, inside(folder, SIGNATURE), signers)
    except ArtifactError as error:
        return refuted("signature", str(error))
    if signer.name is None:
        return unproven("signature", f"holds, by {signer}; whose key that is, --signers would say", optional=True, key=signer.key)
    return proven("signature", f"holds: signed by {signer}", signer=signer.name, key=signer.key)

"""Publication: publication.json, which names by sha256 all that was published with a checkpoint's manifest; it is what is signed.

The manifest accounts for weights, configs and tokenizer. The publication accounts for the manifest itself, the hallmark, the model card
and a GGUF file, so that one signature over it covers every byte.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError
from assay.store import durable
from assay.store.checkpoint import HALLMARK, HUB_OWN, MANIFEST, PUBLICATION, SIGNATURE, SMALL_FILE_LIMIT, Checkpoint
from assay.store.safetensors_files import inside
from assay.store.sealed import seal, unseal
from assay.strict_json import NATURAL, require_shape

_FORMAT = 1
_SHAPE = {"assay": str, "format": int, "manifest": str, "files": {str: {"bytes": NATURAL, "sha256": str, ...: None}}, ...: None}


@dataclass(frozen=True)
class Publication:
    """`data` are the bytes of publication.json, which a signature is over."""

    manifest: str  # sha256: the checkpoint's digest
    files: Mapping[str, Mapping[str, Any]]
    data: bytes


def publication_of(checkpoint: Checkpoint, beside: Mapping[str, Path]) -> Publication:
    """Publication of a checkpoint that carries its marks, and of the files that are to lie beside it."""
    paths = {MANIFEST: checkpoint.folder / MANIFEST, HALLMARK: checkpoint.folder / HALLMARK, **beside}
    files = {name: {"bytes": path.stat().st_size, "sha256": durable.hash_file(path)} for name, path in paths.items()}
    document = {"assay": "publication", "format": _FORMAT, "manifest": checkpoint.digest, "files": files}
    return Publication(checkpoint.digest, files, seal(document, where=PUBLICATION, indent=1))


def read_publication(folder: Path) -> Publication | None:
    """Read a folder's publication as it was sealed; None where the folder has none."""
    path = folder / PUBLICATION
    if not os.path.lexists(path):
        return None
    data = durable.read_file(inside(folder, PUBLICATION), limit=SMALL_FILE_LIMIT)
    document = unseal(data, where=str(path), indent=1)
    require_shape(document, _SHAPE, where=str(path))
    if (found := (document["assay"], document["format"])) != ("publication", _FORMAT):
        raise ArtifactError(f"{path}: is {found}; this Assay reads {('publication', _FORMAT)}")
    return Publication(document["manifest"], document["files"], data)


def unaccounted_files(checkpoint: Checkpoint, publication: Publication) -> list[str]:
    """Names in the folder that neither the manifest nor the publication lists, apart from what the hub itself puts there."""
    known = checkpoint.manifest["files"].keys() | publication.files.keys() | {PUBLICATION, SIGNATURE} | HUB_OWN
    return sorted(name for name in os.listdir(checkpoint.folder) if name not in known and not name.startswith(durable.PARTIAL))

"""Reference log-probabilities, stored: of each token of each pair, bound by digests to the weights that gave them and to the data.

    DIR/manifest.json    written last: format, weights, data, examples, tokens, sha256 of the file and of itself
    DIR/logprobs.bin     float32, one a token, pair after pair in the order of the data; what nothing predicts means nothing
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batch import Batch
from assay.data.preferences import PreferencePair
from assay.errors import ArtifactError, DataError
from assay.store import durable
from assay.store.sealed import seal, unseal
from assay.strict_json import NATURAL, read_small_file, require_shape

REFERENCE_FORMAT = "assay-reference/1"
REFERENCE_MANIFEST = {"format": str, "weights": str, "data": str, "examples": NATURAL, "tokens": NATURAL,
                      "file": {"bytes": NATURAL, "sha256": str}}


@dataclass(frozen=True)
class StoredReference:
    folder: Path
    weights: str  # the digest of the model that was asked
    digest: str  # of its answers
    logprobs: NDArray[np.float32]
    places: dict[str, slice]  # by the id of a pair

    def attached(self, batch: Batch) -> Batch:
        """The batch with what the reference says of its tokens."""
        said = np.zeros(batch.tokens.shape, np.float32)
        for row, ids in enumerate(batch.ids):
            at = 0
            for id in ids:
                here = self._of(str(id))
                said[row, at : at + len(here)] = here
                at += len(here)
        return replace(batch, reference=torch.from_numpy(said))

    def _of(self, id: str) -> NDArray[np.float32]:
        if id not in self.places:
            raise DataError(f"{self.folder}: the reference was not asked about {id}; begin a new run")
        return self.logprobs[self.places[id]]


def write_reference(folder: Path, answers: Iterable[NDArray[np.float32]], *, weights: str, data: str) -> None:
    """Write a reference's answers, whole or not at all; `answers` are one array a pair."""
    with durable.new_folder(folder) as partial:
        file, count, tokens = durable.HashedFile(partial / "logprobs.bin"), 0, 0
        for answer in answers:
            if not np.isfinite(answer).all() or answer.max() > 1e-3:
                raise DataError(f"pair {count}: the reference's values reach {answer.max()}: not log-probabilities. Look at its weights")
            file.write(answer.astype("<f4").tobytes())
            count, tokens = count + 1, tokens + len(answer)
        manifest = {"format": REFERENCE_FORMAT, "weights": weights, "data": data, "examples": count, "tokens": tokens, "file": file.close()}
        durable.write_file(partial / "manifest.json", [seal(manifest, where=str(folder / "manifest.json"), indent=1)])


def open_reference(folder: Path, pairs: Sequence[PreferencePair], *, weights: str, data: str) -> StoredReference:
    """Open a stored reference; refused unless every byte has its hash, and it is of these weights and these pairs."""
    path = folder / "manifest.json"
    manifest: dict[str, Any] = unseal(read_small_file(path), where=str(path), indent=1)
    if manifest.get("format") != REFERENCE_FORMAT:
        raise ArtifactError(f"{path}: not a manifest of the format {REFERENCE_FORMAT}; begin a new run")
    require_shape(manifest, REFERENCE_MANIFEST, where=str(path))
    for what, due in (("weights", weights), ("data", data)):
        if manifest[what] != due:
            raise ArtifactError(f"{folder} holds a reference of {what} {manifest[what][:12]}, the run has {due[:12]}: the "
                                f"{'model' if what == 'weights' else 'data'} was changed since it began; give it back, or begin a new run")
    ends = list(accumulate(map(len, pairs), initial=0))
    raw = durable.read_file(folder / "logprobs.bin", limit=1 << 40, expected_sha256=manifest["file"]["sha256"])
    logprobs = np.frombuffer(raw, "<f4")
    if (manifest["examples"], len(logprobs)) != (len(pairs), ends[-1]):
        raise ArtifactError(f"{folder} holds {len(logprobs)} tokens of {manifest['examples']} pairs, the data has {ends[-1]} of "
                            f"{len(pairs)}; begin a new run")
    places = {pair.id: slice(start, start + len(pair)) for pair, start in zip(pairs, ends, strict=False)}
    return StoredReference(folder, weights, manifest["file"]["sha256"], logprobs, places)


def pair_answers(batch: Batch, logprobs_BT: Tensor) -> Iterable[NDArray[np.float32]]:
    """Log-probabilities of the tokens of a batch's pairs, in the order of its ids; 0 where nothing predicts a token."""
    assert batch.documents is not None
    said, documents = logprobs_BT.float().cpu().numpy(), batch.documents.cpu().numpy()
    for row, ids in enumerate(batch.ids):
        begins = np.flatnonzero(np.diff(documents[row], prepend=-2))  # of each document, and of the padding
        for number in range(len(ids)):
            start, stop = begins[2 * number], begins[2 * number + 2] if 2 * number + 2 < len(begins) else len(documents[row])
            answer = said[row, start:stop].copy()
            answer[[0, begins[2 * number + 1] - start]] = 0
            yield answer

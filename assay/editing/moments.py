"""Second moments C = E[k kᵀ] of the inputs of each MLP's down-projection: what an edit must not disturb.

Streamed over text through the layers that are asked for and no further; padding is no key. Keys are fp32, their products
and sums float64: summed in fp32, the small directions of C came out negative. What was computed lies in the cache under the
digest of model, text, count and layer, beside the moments of its first rows alone: these are computed again, and compared,
before it is used.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from assay.data.data_files import DocumentRule, find_sources, iter_documents
from assay.editing.block_hooks import padded, watch_keys
from assay.editing.subject_tokens import leading_special_ids
from assay.errors import ArtifactError, DataError, StoreError, UsageError
from assay.model.attention import PADDING
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.store import durable
from assay.store.model_cache import cache_folder
from assay.store.safetensors_files import read_tensors, write_tensors
from assay.store.sealed import seal, unseal
from assay.verdict import Outcome, Verdict, proven, refuted

_FORMAT = 2
SAME_MOMENTS = 1e-3  # relative: the same sums on another device
_ROWS, ROW_LENGTH = 8, 256
FACTS, TENSORS = "facts.json", "moment.safetensors"


@dataclass(frozen=True)
class TokenizedText:
    """Text as rows of ids, each a stretch of one document, and the digest that names exactly these."""

    rows: tuple[tuple[int, ...], ...]
    digest: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))


def read_text(path: Path, tokenizer: Tokenizer, tokens: int, *, length: int = ROW_LENGTH) -> TokenizedText:
    """The first `tokens` tokens of the file, cut into rows of at most `length`, never across a document's end."""
    rows = tuple(_rows(path, tokenizer, tokens, length))
    if not rows:
        raise DataError(f"{path}: no text to read")
    return tokenized_text(rows)


def split_text(reading: TokenizedText, tokens: int) -> tuple[TokenizedText, TokenizedText]:
    """The first rows, of `tokens` tokens or a little more, and the rest: what is scored is not what moments are made of."""
    count, held = 0, 0
    while held < tokens and count < len(reading.rows):
        held += len(reading.rows[count])
        count += 1
    if count < 2 or count == len(reading.rows):
        raise DataError(f"{reading.tokens} tokens of text in {len(reading.rows)} rows cannot be parted into {tokens} to score "
                        "(--drift-tokens), in two rows at least, and more for moments (--moment-tokens); give more text, or lower "
                        "--drift-tokens")
    return tokenized_text(reading.rows[:count]), tokenized_text(reading.rows[count:])


def tokenized_text(rows: tuple[tuple[int, ...], ...]) -> TokenizedText:
    words = "\n".join(" ".join(map(str, row)) for row in rows)
    return TokenizedText(rows, hashlib.sha256(words.encode()).hexdigest())


def second_moments(model: Transformer, reading: TokenizedText, layers: Sequence[int], identity: str) -> dict[int, Tensor]:
    """layer → C in float64, on the CPU. `identity` is the digest of the model's weights, under which C is remembered."""
    remembered = {layer: found for layer in layers if (found := _remembered(_place(identity, reading, layer))) is not None}
    missing, sample = [layer for layer in layers if layer not in remembered], reading.rows[:_ROWS]
    verdict = check_remembered_moments(compute_moments(model, sample, list(remembered)),
                                       {layer: tensors["sample"] for layer, tensors in remembered.items()})
    if verdict.outcome is Outcome.REFUTED:
        places = ", ".join(str(_place(identity, reading, layer)) for layer in verdict.evidence["layers"])
        raise ArtifactError(f"{verdict.reason}; delete {places}, and they are computed anew")
    if missing:
        samples = compute_moments(model, sample, missing)
        for layer, moment in compute_moments(model, reading.rows, missing).items():
            _remember(_place(identity, reading, layer), moment, samples[layer])
            remembered[layer] = {"moment": moment}
    return {layer: remembered[layer]["moment"] for layer in layers}


def check_remembered_moments(computed: Mapping[int, Tensor], remembered: Mapping[int, Tensor]) -> Verdict:
    """Moments of a few rows, as this model gives them now and as they lie in the cache: those of another model are others."""
    apart = {layer: float((remembered[layer] - due).norm() / due.norm()) for layer, due in computed.items()}
    wrong = [layer for layer, distance in apart.items() if not distance <= SAME_MOMENTS]
    if wrong:
        return refuted("moments", f"the second moments in the cache are not this model's: layer {wrong[0]}'s differ by "
                       f"{apart[wrong[0]]:.2g} on the first rows of the text, bound {SAME_MOMENTS:g}", layers=wrong)
    return proven("moments", f"the second moments of {len(apart)} layers in the cache are this model's on the first rows of the text",
                  apart=max(apart.values(), default=0.0))


def compute_moments(model: Transformer, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, Tensor]:
    if not layers:
        return {}
    device, size = model.embed.weight.device, model.config.hidden
    sums = {layer: torch.zeros(size, size, dtype=torch.float64, device=device) for layer in layers}
    count = sum(map(len, rows))
    for batch in _batches(rows):
        tokens, docs = padded(batch, device)
        real = docs != PADDING

        def add(layer: int, keys_BTF: Tensor, real: Tensor = real) -> None:
            keys = keys_BTF[real].double()
            sums[layer].addmm_(keys.T, keys)

        watch_keys(model, tokens, docs, layers, add)
    for layer, total in sums.items():
        if not torch.isfinite(total).all():
            raise DataError(f"layer {layer}: the second moments are not finite; the model's activations overflow on this text")
    return {layer: (total / count).cpu() for layer, total in sums.items()}


def _rows(path: Path, tokenizer: Tokenizer, tokens: int, length: int) -> Iterator[tuple[int, ...]]:
    lead, left = leading_special_ids(tokenizer), tokens
    for source in find_sources([path]):
        for document in iter_documents(source, DocumentRule(document_bytes=1 << 16) if source.kind == "text" else DocumentRule(),
                                       Counter()):
            ids = [*lead, *tokenizer.encode(document.raw.decode())]
            for start in range(0, len(ids), length):
                row = tuple(ids[start : start + min(length, left)])
                yield row
                left -= len(row)
                if left == 0:
                    return


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    ordered = iter(sorted(rows, key=len, reverse=True))  # like lengths together: little padding
    while batch := list(islice(ordered, _ROWS)):
        yield batch

# ---------------------------------------------------------------- cache


def _place(identity: str, reading: TokenizedText, layer: int) -> Path:
    address = f"moments {_FORMAT}\n{identity}\n{reading.digest}\n{reading.tokens}\n{layer}"
    return cache_folder() / "moments" / hashlib.sha256(address.encode()).hexdigest()


def _remembered(place: Path) -> dict[str, Tensor] | None:
    """Cached moments, checked against their hash each time: a damaged file is refused, never silently recomputed."""
    if not place.exists():
        return None
    facts = unseal(durable.read_file(place / FACTS, limit=1 << 20), where=str(place / FACTS))
    return read_tensors(place / TENSORS, facts["sha256"])


def _remember(place: Path, moment: Tensor, sample: Tensor) -> None:
    """Store moments in the cache. Another process may have computed the same meanwhile: what it wrote is whole, and stays."""
    try:
        with durable.new_folder(place) as folder:
            facts = write_tensors(folder / TENSORS, {"moment": moment, "sample": sample})
            durable.write_file(folder / FACTS, [seal({"sha256": facts.sha256}, where=str(place / FACTS))])
    except (StoreError, UsageError):
        if not place.exists():
            raise

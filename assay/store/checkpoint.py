"""Checkpoint: an immutable folder that Hugging Face tools load, and a `manifest.json` that accounts for every byte.

The manifest is written last and names the sha256 of every file and tensor; its own sha256 is the checkpoint's digest.
Beside it may come, later, `hallmark.json` (a fresh process proved these bytes) or `quarantine.json` (it refuted them);
both name the digest, so that neither can be carried to another checkpoint. What publishing adds, publication.py says.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from assay.errors import ArtifactError, StoreError, UsageError
from assay.store import durable
from assay.store.digests import WEIGHT_FILES
from assay.store.safetensors_files import (
    SHARD_BYTES,
    FileFacts,
    inside,
    read_folder_tensors,
    read_tensors,
    tensor_bytes,
    write_index,
    write_sharded,
    write_tensors,
)
from assay.store.sealed import canonical_json, seal, unseal
from assay.strict_json import NATURAL, as_artifact_error, open_regular, parse_json, require_shape
from assay.verdict import Outcome, Verdict, overall

if TYPE_CHECKING:  # which knows processes: whoever only reads a checkpoint need not
    from assay.store.shared_save import SharedSave

CHECKPOINT_FORMAT = 1
SMALL_FILE_LIMIT = 256 << 20
MANIFEST, HALLMARK, QUARANTINE, TRAINER = "manifest.json", "hallmark.json", "quarantine.json", "trainer.json"
STATE_STEM = "optimizer"
WEIGHTS, OPTIMIZER, PROBES, ADAPTER = (f"{stem}.safetensors" for stem in ("model", STATE_STEM, "probes", "adapter_model"))
PUBLICATION, SIGNATURE, CARD = "publication.json", "publication.json.sig", "README.md"
HUB_OWN = {".gitattributes", ".cache"}  # what the Hugging Face hub and its client put beside a model
UNLISTED = {MANIFEST, HALLMARK, QUARANTINE, PUBLICATION, SIGNATURE, CARD} | HUB_OWN  # may lie there without being in the manifest
PUBLISHED_BESIDE = ".gguf"  # the same model for llama.cpp, which no reader of a folder opens
RESERVED = {MANIFEST, HALLMARK, QUARANTINE, PUBLICATION, SIGNATURE, TRAINER}
STEP = re.compile(r"step-(\d{6,})")
_ANCESTOR = ({"weights": str, "path": str}, None)
_FACTS = {"parent?": _ANCESTOR, "base?": _ANCESTOR, "change?": str, "frozen?": [str], "movement_bound?": (float, None),
         "taught_to_stop?": bool, "rounded?": (str, None), "run_config?": (dict, None), "environment?": dict, "tokenizer?": (str, None)}
_MARK = {"format": int, "manifest": str, "verdicts": [{"check": str, "outcome": str, "reason": str, "evidence?": dict}]}
_MANIFEST_SHAPE = {
    "assay": str, "format": int, "kind": str, "parameters": NATURAL, "bytes": NATURAL, "facts": _FACTS, ...: None,
    "files": {str: {"bytes": NATURAL, "sha256": str, "header?": str, ...: None}},
    "tensors": {str: {str: {"dtype": str, "shape": [NATURAL], "sha256": str, ...: None}}}}


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint to be written; it owns the tensors until then."""

    kind: Literal["model", "adapter"]
    weights: Mapping[str, Tensor]
    files: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    probes: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, Tensor] | None = None
    trainer: Mapping[str, Any] | None = None
    shared: "SharedSave | None" = None  # several processes write it: the tensors here are those that this one owns


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose manifest was read and believed; each file is checked against it again whenever it is read."""

    folder: Path
    manifest: dict[str, Any]
    digest: str

    @property
    def kind(self) -> str:
        return self.manifest["kind"]

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest["facts"]

    @property
    def step(self) -> int | None:
        trainer = self.trainer()
        return None if trainer is None else trainer.get("step")

    @property
    def hallmark(self) -> dict[str, Any] | None:
        """Hallmark of these files, or None; a quarantine voids it."""
        return None if self.quarantined else _read_mark(self, HALLMARK)

    @property
    def quarantined(self) -> dict[str, Any] | None:
        return _read_mark(self, QUARANTINE)

    def model_files(self) -> dict[str, Any]:
        """File name → size and hashes of all that makes the model: weights, configs and tokenizer, not the state of a run."""
        return {name: facts for name, facts in self.manifest["files"].items() if name not in (PROBES, OPTIMIZER, TRAINER)}

    def weights(self) -> dict[str, Tensor]:
        if self.kind == "adapter":
            return self.read_tensors(ADAPTER)
        return read_folder_tensors(self.folder, {name: self._facts(name) for name in self.manifest["files"]})

    def optimizer(self) -> dict[str, Tensor] | None:
        if not recorded_state(self.manifest):
            return None
        return read_folder_tensors(self.folder, {name: self._facts(name) for name in self.manifest["files"]}, stem=STATE_STEM)

    def probes(self) -> dict[str, Tensor]:
        return self.read_tensors(PROBES) if PROBES in self.manifest["files"] else {}

    def trainer(self) -> dict[str, Any] | None:
        if TRAINER not in self.manifest["files"]:
            return None
        return parse_json(self.read(TRAINER), where=str(self.folder / TRAINER), shape={"step?": (NATURAL, None)})

    def read(self, name: str) -> bytes:
        """The bytes of a file that the manifest lists, as they were when it was written."""
        entry = self.manifest["files"].get(name)
        if entry is None:
            raise ArtifactError(f"{self.folder}: its manifest lists no {name}")
        return durable.read_file(inside(self.folder, name), limit=SMALL_FILE_LIMIT, expected_sha256=entry["sha256"])

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of a file that the manifest lists, each hashed as it is read."""
        return read_tensors(inside(self.folder, name), self._facts(name))

    def _facts(self, name: str) -> FileFacts:
        return FileFacts(**self.manifest["files"][name], tensors=self.manifest["tensors"].get(name, {}))


def write_checkpoint(where: Path, contents: Contents, *, max_shard_bytes: int = SHARD_BYTES) -> Checkpoint:
    """The checkpoint is at `where`, whole and for good, when this returns; StoreError if the disk did not let it."""
    _require_writable(where, contents)
    with durable.new_folder(where, needed=_bytes_needed(contents)) as folder:
        manifest = _manifest(contents, _write_parts(folder, contents, max_shard_bytes))
        data = seal(manifest, where=str(where / MANIFEST), indent=1)
        digest = durable.write_file(folder / MANIFEST, [data])
    return Checkpoint(where, unseal(data, where=str(where / MANIFEST), indent=1), digest)


def open_checkpoint(where: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `where`, or an ArtifactError that says what is wrong with it.

    With `verify` every byte is hashed now; without, names and sizes are checked now and each file when it is read.
    """
    if not where.is_dir():
        raise UsageError(f"{where}: no such folder; expected a checkpoint")
    if not os.path.lexists(where / MANIFEST):
        raise ArtifactError(f"{where}: has no {MANIFEST}: not an Assay checkpoint, or an incomplete copy of one")
    data = durable.read_file(inside(where, MANIFEST), limit=SMALL_FILE_LIMIT)
    manifest = unseal(data, where=str(where / MANIFEST), indent=1)
    require_manifest(manifest, where)
    _check_listing(manifest, where)
    checkpoint = Checkpoint(where, manifest, hashlib.sha256(data).hexdigest())
    for mark in (HALLMARK, QUARANTINE):
        _read_mark(checkpoint, mark)
    if verify:
        _check_hashes(checkpoint)
    return checkpoint


def latest_checkpoint(folder: Path, *, hallmarked: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """The newest `step-…` that verifies (and is hallmarked, if asked), and why each newer one was passed over."""
    passed_over: list[str] = []
    for path in reversed(step_folders(folder)):
        found = _good(path, hallmarked)
        if isinstance(found, Checkpoint):
            return found, passed_over
        passed_over.append(found)
    return None, passed_over


def delete_old_checkpoints(folder: Path, keep: int, best: Path | None = None, needed: Iterable[str] = ()) -> list[Path]:
    """Delete old checkpoints and return what went.

    The newest `keep`, the best, those whose digest is `needed` (parents, references), the newest two that verify, and the
    newest that is proven stay whatever happens; while fewer than two verify, nothing goes.
    """
    if keep < 1:
        raise UsageError(f"keep = {keep} checkpoints of {folder}; expected at least 1")
    found, needed = step_folders(folder), set(needed)
    kept = set(found[-keep:]) | {path for path in found if _same(path, best)}
    doomed = [path for path in found if path not in kept and _digest(path) not in needed]
    good, proven = _counted_on(found) if doomed else ([], None)
    if len(good) < 2:
        return []
    doomed = [path for path in doomed if path not in good and path != proven]
    with durable.as_store_error(folder):
        durable.sync_folder(folder)  # what is counted on must outlive a power cut before anything older goes
    for path in doomed:
        durable.remove_folder(path)
    return doomed


def write_hallmark(checkpoint: Checkpoint, verdicts: Iterable[Verdict], *, unproven: Iterable[Verdict] = ()) -> dict[str, Any]:
    """Write hallmark.json; refused unless there are verdicts and every one is PROVEN. What is optional and `unproven` is said beside."""
    verdicts = list(verdicts)
    if overall(verdicts) is not Outcome.PROVEN:
        failing = "; ".join(map(str, (v for v in verdicts if v.outcome is not Outcome.PROVEN))) or "no check ran"
        raise ArtifactError(f"{checkpoint.folder}: earns no hallmark: {failing}")
    if checkpoint.quarantined:
        raise ArtifactError(f"{checkpoint.folder}: is quarantined; remove {QUARANTINE} on purpose to prove it again")
    return _write_mark(checkpoint, HALLMARK, [*verdicts, *unproven])


def quarantine_checkpoint(checkpoint: Checkpoint, verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Write quarantine.json with the reasons; from then on `latest` passes over it, and a hallmark is void. Where a full disk cannot hold
    the reasons, the hallmark goes all the same."""
    try:
        mark = _write_mark(checkpoint, QUARANTINE, list(verdicts))
    except StoreError:
        _remove_hallmark(checkpoint)
        raise
    _remove_hallmark(checkpoint)
    return mark


def _remove_hallmark(checkpoint: Checkpoint) -> None:
    if os.path.lexists(checkpoint.folder / HALLMARK):
        durable.remove_file(checkpoint.folder.resolve() / HALLMARK)


def recorded_state(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """name → dtype, shape and sha256 of every tensor of the optimizer's state that a manifest records, in whatever files it lies."""
    return {name: facts for file, tensors in manifest["tensors"].items() if file.startswith(STATE_STEM) for name, facts in tensors.items()}


def step_folders(folder: Path) -> list[Path]:
    """The folders named `step-000123`, oldest first; whether they are good is another question."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir()
             if (match := STEP.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()]
    return [path for _, path in sorted(found)]


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def _write_parts(folder: Path, contents: Contents, max_shard_bytes: int) -> dict[str, FileFacts]:
    """Write everything but the manifest; returns what is to be said of it there."""
    if contents.shared is not None:
        facts = contents.shared.write(folder, {"model": contents.weights, STATE_STEM: contents.optimizer or {}})
    elif contents.kind == "adapter":
        facts = {ADAPTER: write_tensors(folder / ADAPTER, contents.weights)}
    else:
        facts = write_sharded(folder, contents.weights, max_shard_bytes)
    if WEIGHTS in facts:  # without an index vLLM would take the files of probes and optimizer for weights too
        facts |= write_index(folder, {WEIGHTS: facts[WEIGHTS]}, "model")
    if contents.probes:
        facts[PROBES] = write_tensors(folder / PROBES, contents.probes)
    if contents.optimizer is not None and contents.shared is None:
        facts[OPTIMIZER] = write_tensors(folder / OPTIMIZER, contents.optimizer)
    files = dict(contents.files)
    if contents.trainer is not None:
        files[TRAINER] = canonical_json(contents.trainer, where=str(folder / TRAINER), indent=1)
    for name, data in files.items():
        facts[name] = FileFacts(durable.write_file(folder / name, [data]), len(data))
    return facts


def _manifest(contents: Contents, facts: Mapping[str, FileFacts]) -> dict[str, Any]:
    return {
        "assay": "checkpoint", "format": CHECKPOINT_FORMAT, "kind": contents.kind,
        "files": {name: {"sha256": fact.sha256, "bytes": fact.bytes} | ({"header": fact.header} if fact.header else {})
                  for name, fact in facts.items()},
        "tensors": {name: fact.tensors for name, fact in facts.items() if name.endswith(".safetensors")},
        "parameters": sum(math.prod(entry["shape"]) for name, fact in facts.items() if name.startswith(WEIGHT_FILES)
                          for entry in fact.tensors.values()),
        "bytes": sum(fact.bytes for fact in facts.values()),
        "facts": dict(contents.facts),
    }


def _require_writable(where: Path, contents: Contents) -> None:
    """Refuse contents that no reader could use, before the disk is touched."""
    if not contents.weights:
        raise ArtifactError(f"{where}: not saved: it holds no weights; gather them before saving")
    for name, tensor in contents.weights.items():
        if tensor.numel() == 0:
            raise ArtifactError(f"{where}: not saved: the weight {name!r} of shape {list(tensor.shape)} is empty; "
                                "gather the weights before saving")
    for name in contents.files:
        if "/" in name or name.startswith(".") or name in RESERVED or name.endswith(".safetensors"):
            raise UsageError(f"{where}: cannot hold a file named {name!r}; expected a plain name, none of ours")
        inside(where, name)
    canonical_json({**contents.facts}, where=f"{where}: facts")
    canonical_json(contents.trainer, where=f"{where}: trainer")


def _bytes_needed(contents: Contents) -> int:
    parts = [contents.weights, contents.probes, contents.optimizer or {}]
    own = sum(tensor_bytes(t) for part in parts for t in part.values())
    return sum(map(len, contents.files.values())) + own * (1 if contents.shared is None else len(contents.shared.writers))


def require_manifest(manifest: dict[str, Any], where: Path) -> None:
    found = (manifest.get("assay"), manifest.get("format"))
    if found != ("checkpoint", CHECKPOINT_FORMAT):
        raise ArtifactError(f"{where / MANIFEST}: is {found}; this Assay reads {('checkpoint', CHECKPOINT_FORMAT)}")
    require_shape(manifest, _MANIFEST_SHAPE, where=str(where / MANIFEST))
    if manifest["kind"] not in ("model", "adapter"):
        raise ArtifactError(f"{where / MANIFEST}: is of a {manifest['kind']!r:.40}; expected a model or an adapter")
    for name, entry in manifest["files"].items():
        inside(where, name)
        if ("header" in entry) != name.endswith(".safetensors"):
            raise ArtifactError(f"{where / MANIFEST}: says of {name!r} {entry!r}; expected bytes and sha256, and the header's of tensors")


def _check_listing(manifest: dict[str, Any], where: Path) -> None:
    """Exactly the files of the manifest are there, each a plain file of its size."""
    with as_artifact_error(where):
        present = {name for name in os.listdir(where) if not name.startswith(durable.PARTIAL)}
    listed = set(manifest["files"])
    if missing := sorted(listed - present):
        raise ArtifactError(f"{where}: lacks {', '.join(missing)}, which its manifest lists; restore it, or use "
                            "another checkpoint")
    if extra := sorted(name for name in present - listed - UNLISTED if not name.endswith(PUBLISHED_BESIDE)):
        raise ArtifactError(f"{where}: holds {', '.join(extra)}, which its manifest does not list; remove it")
    for name, entry in manifest["files"].items():
        with open_regular(inside(where, name)) as fd:
            size = os.fstat(fd).st_size
        if size != entry["bytes"]:
            raise ArtifactError(f"{where / name}: {size:,} bytes, and {entry['bytes']:,} were written: truncated or "
                                "replaced; restore it, or use another checkpoint")


def _check_hashes(checkpoint: Checkpoint) -> None:
    """Tensors are hashed one by one, on every core: with their header they are all of their file, which may be one of many gigabytes."""
    for name, entry in checkpoint.manifest["files"].items():
        try:
            if "header" in entry:
                checkpoint.read_tensors(name)
                continue
        except ArtifactError:  # what is wrong with it as a file says more than what is wrong with its header
            _require_file(checkpoint, name)
            raise
        _require_file(checkpoint, name)


def _require_file(checkpoint: Checkpoint, name: str) -> None:
    path = checkpoint.folder / name
    durable.require_hash(path, durable.hash_file(path), checkpoint.manifest["files"][name]["sha256"])


def _good(path: Path, hallmarked: bool = False) -> Checkpoint | str:
    """The checkpoint if it verifies and nothing speaks against it, else the sentence that does."""
    try:
        checkpoint = open_checkpoint(path)
        step = checkpoint.step
        if reasons := checkpoint.quarantined:
            return f"{path}: quarantined: {_reasons(reasons)}"
    except (ArtifactError, UsageError) as error:
        return str(error)
    if step is not None and path.name != step_folder(path.parent, step).name:
        return f"{path}: its {TRAINER} says step {step}: renamed or copied from elsewhere"
    if hallmarked and checkpoint.hallmark is None:
        return f"{path}: has no hallmark; run `assay prove` on it"
    return checkpoint


def _counted_on(found: list[Path]) -> tuple[list[Path], Path | None]:
    """The newest two that verify, and the newest of those with a hallmark. Every byte is hashed, of no more than it takes."""
    good: list[Path] = []
    proven: Path | None = None
    for path in reversed(found):
        if len(good) == 2 and (proven is not None or not os.path.lexists(path / HALLMARK)):
            continue
        checkpoint = _good(path)
        if isinstance(checkpoint, Checkpoint):
            good += [path] if len(good) < 2 else []
            proven = path if proven is None and checkpoint.hallmark is not None else proven
    return good, proven


def _same(path: Path, best: Path | None) -> bool:
    return best is not None and os.path.realpath(path) == os.path.realpath(best)


def _digest(path: Path) -> str | None:
    """Digest by which a child would name this checkpoint, whether or not it still verifies."""
    try:
        return durable.hash_file(path / MANIFEST)
    except ArtifactError:
        return None


def _write_mark(checkpoint: Checkpoint, name: str, verdicts: list[Verdict]) -> dict[str, Any]:
    if _digest(checkpoint.folder) != checkpoint.digest:
        raise ArtifactError(f"{checkpoint.folder}: its manifest changed since it was opened; open it again")
    mark = {"format": CHECKPOINT_FORMAT, "manifest": checkpoint.digest, "verdicts": [verdict.to_json() for verdict in verdicts]}
    where = checkpoint.folder.resolve() / name  # a checkpoint may be named by a link
    durable.replace_file(where, seal(mark, where=str(where), indent=1))
    return mark


def _read_mark(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    path = checkpoint.folder / name
    if not os.path.lexists(path):
        return None
    mark = unseal(durable.read_file(inside(checkpoint.folder, name), limit=SMALL_FILE_LIMIT), where=str(path), indent=1)
    require_shape(mark, _MARK, where=str(path))
    if mark["format"] != CHECKPOINT_FORMAT:
        raise ArtifactError(f"{path}: format {mark['format']}; this Assay reads {CHECKPOINT_FORMAT}")
    if mark.get("manifest") != checkpoint.digest:
        raise ArtifactError(f"{path}: speaks of the checkpoint {mark.get('manifest')}, and this one is "
                            f"{checkpoint.digest}: copied from elsewhere, or the manifest was replaced; remove it and "
                            "prove this one")
    return mark


def _reasons(mark: dict[str, Any]) -> str:
    failing = [v["reason"] for v in mark["verdicts"] if v["outcome"] != Outcome.PROVEN]
    return "; ".join(map(str, failing)) or "no reason recorded"

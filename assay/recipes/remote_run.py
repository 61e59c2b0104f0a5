"""Remote copy of a run at a URL: every proven checkpoint is sent in the background, and a fresh machine resumes from it.

    URL/checkpoints/step-000100/…    as in the run's folder, manifest.json after the rest
    URL/records/step-000100/…        the run's own files (config.yaml, ledger.jsonl, metrics.jsonl, …) as of that checkpoint
    URL/records/step-000100/index.json     sealed, sent last: digests of the checkpoints and files that belong together
    URL/model, URL/adapter           what was handed over

Without its index a record does not count; with it, every byte that it names was read back from the store and hashed. A store that fails
costs the run nothing but this copy, which is said.
"""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError, AssayError, StoreError, UsageError
from assay.store import durable
from assay.store.checkpoint import HALLMARK, MANIFEST, QUARANTINE, STEP, Checkpoint, open_checkpoint
from assay.store.remote import RemoteFolder, fetch_folder, send_folder
from assay.store.sealed import seal, unseal
from assay.strict_json import NATURAL, require_shape
from assay.verdict import Verdict, proven, unproven

RECORD_INDEX, CHECKPOINTS, RECORDS = "index.json", "checkpoints", "records"
REMOTE_FORMAT = 1
CONFIG = "config.yaml"
KEPT_RECORDS = 2
_INDEX = {"assay": str, "format": int, "run": str, "checkpoints": {str: str}, "files": {str: {"bytes": NATURAL, "sha256": str}}}


@dataclass(frozen=True)
class _Shipment:
    """Record of one upload: checkpoints, the newest last, and how much of each file of the run there was."""

    checkpoints: tuple[tuple[Path, str], ...]
    lengths: dict[Path, int]

    @property
    def name(self) -> str:
        return self.checkpoints[-1][0].name


class RemoteRun:
    """Background copy of a run to a remote store, one shipment at a time; where one waits already, the newer takes its place. Never raises:
    `told` says."""

    def __init__(self, url: str, folder: Path):
        self.remote, self.folder = RemoteFolder(url), folder
        self._sender = ThreadPoolExecutor(1, "remote")
        self._lock = threading.Lock()
        self._waiting: _Shipment | None = None
        self._sending: _Shipment | None = None
        self._pending: Future[None] | None = None
        self._newest = 0  # step that was offered
        self._there: dict[str, str] = {}  # checkpoints that this process has sent: name → digest
        self._told: list[Verdict] = []
        self.latest: Verdict = unproven("remote", f"no checkpoint was sent to {self.remote.url}")

    def offer(self, newest: Path, others: Iterable[Path]) -> None:
        """The checkpoint `newest`, with what a resume from it would need besides. What is gone by now is left out, and so is what is proven
        after a newer one."""
        if (step := int(newest.name.removeprefix("step-"))) < self._newest:
            return
        self._newest = step
        folders = [path for path in dict.fromkeys([*(path for path in others if path != newest), newest]) if (path / MANIFEST).exists()]
        if newest not in folders:
            return
        named = tuple((path, durable.hash_file(path / MANIFEST)) for path in folders)
        lengths = {path: path.stat().st_size for path in sorted(self.folder.iterdir()) if path.is_file() and not path.name.startswith(".")}
        with self._lock:
            self._waiting = _Shipment(named, lengths)
            if self._pending is None or self._pending.done():
                self._pending = self._sender.submit(self._send_all)

    def holding(self) -> set[str]:
        """Digests of checkpoints that are still to be read."""
        with self._lock:
            shipments = [shipment for shipment in (self._waiting, self._sending) if shipment is not None]
        return {digest for shipment in shipments for _, digest in shipment.checkpoints}

    def told(self) -> list[Verdict]:
        """Verdicts on what was sent, or failed to be, since this was last asked."""
        with self._lock:
            told, self._told = self._told, []
        return told

    def wait(self) -> None:
        while (pending := self._pending) is not None and not pending.done():
            pending.result()

    def close(self) -> None:
        self.wait()
        self._sender.shutdown()

    def send_model(self, places: Iterable[Path]) -> Verdict:
        """Send what was handed over, and the last record; returns whether all of it is at the URL."""
        self.wait()
        try:
            for place in places:
                send_folder(place, self.remote.under(place.name))
        except AssayError as error:
            return unproven("remote", f"what was handed over is here and not at the URL: {error}")
        return self.latest

    def _send_all(self) -> None:
        while True:
            with self._lock:
                self._sending, self._waiting = self._waiting, None
                if self._sending is None:
                    self._pending = None
                    return
            found = self._sent(self._sending)
            with self._lock:
                self.latest, self._sending = found, None
                self._told.append(found)

    def _sent(self, shipment: _Shipment) -> Verdict:
        try:
            self._send(shipment)
        except (AssayError, OSError) as error:
            return unproven("remote", f"{shipment.name} is here and not at {self.remote.url}: {error}. The run goes on")
        return proven("remote", f"{shipment.name} is at {self.remote.url}: every byte was read back, and has the hash of its manifest",
                      checkpoint=shipment.name)

    def _send(self, shipment: _Shipment) -> None:
        record = self.remote.under(f"{RECORDS}/{shipment.name}")
        record.remove(RECORD_INDEX)
        for folder, digest in shipment.checkpoints:
            if self._there.get(folder.name) != digest:
                self._there.pop(folder.name, None)
                send_folder(folder, self.remote.under(f"{CHECKPOINTS}/{folder.name}"))
                self._there[folder.name] = digest
        files = dict[str, Any]()
        for path, length in shipment.lengths.items():
            data = _beginning(path, length)
            record.send_bytes(data, path.name)
            files[path.name] = {"bytes": length, "sha256": hashlib.sha256(data).hexdigest()}
        index = {"assay": "remote run", "format": REMOTE_FORMAT, "run": run_identity(self.folder), "files": files,
                 "checkpoints": {folder.name: digest for folder, digest in shipment.checkpoints}}
        record.send_bytes(seal(index, where=f"{record.url}/{RECORD_INDEX}", indent=1), RECORD_INDEX)
        self._retire()

    def _retire(self) -> None:
        """Remove older records and checkpoints that none of the newest records names. The newest alone must not be all there is: it may
        rot."""
        records = record_names(self.remote)
        kept, needed = records[:KEPT_RECORDS], set[str]()
        for name in kept:
            needed |= read_index(self.remote, name)["checkpoints"].keys()
        for name in records[KEPT_RECORDS:]:
            self.remote.under(f"{RECORDS}/{name}").remove(RECORD_INDEX)
            self.remote.under(f"{RECORDS}/{name}").remove()
        for name in self.remote.under(CHECKPOINTS).names():
            if name not in needed:
                self._there.pop(name, None)
                self.remote.under(f"{CHECKPOINTS}/{name}").remove(MANIFEST)
                self.remote.under(f"{CHECKPOINTS}/{name}").remove()


def restore_run(url: str, folder: Path, same_options: Callable[[bytes], list[str]], say: Callable[[str], None]) -> None:
    """Restore a run from the URL where the folder holds none: its newest record that is whole, fetched and verified. Where both hold one,
    it must be the same. `same_options` says what makes the options there another run's."""
    remote = RemoteFolder(url)
    if (folder / CONFIG).exists():
        _require_same_run(remote, folder, say)
        return
    records = record_names(remote)
    passed_over = list[str]()
    for name in records:
        try:
            index = read_index(remote, name)
            _require_same_options(remote, name, index, same_options)
            _fetch(remote, name, index, folder)
        except ArtifactError as error:
            passed_over.append(str(error))
            say(f"passed over: {error}")
        else:
            say(f"fetched from {url}: {', '.join(index['checkpoints'])}, every byte with its hash")
            return
    if passed_over:
        raise UsageError(f"{url} holds a run of which nothing can be gone on with: {passed_over[0]}; restore it, or give another --remote")


def record_names(remote: RemoteFolder) -> list[str]:
    """Records that are whole as far as their index says, newest first."""
    found = [name for name in remote.under(RECORDS).names() if STEP.fullmatch(name)]
    newest_first = sorted(found, key=lambda name: int(name.removeprefix("step-")), reverse=True)
    return [name for name in newest_first if RECORD_INDEX in remote.under(f"{RECORDS}/{name}").names()]


def read_index(remote: RemoteFolder, name: str) -> dict[str, Any]:
    record = remote.under(f"{RECORDS}/{name}")
    where = f"{record.url}/{RECORD_INDEX}"
    data = record.read(RECORD_INDEX)
    if data is None:
        raise ArtifactError(f"{where}: is not there any more")
    index = unseal(data, where=where, indent=1)
    require_shape(index, _INDEX, where=where)
    if (index["assay"], index["format"]) != ("remote run", REMOTE_FORMAT):
        raise ArtifactError(f"{where}: is {index['assay']!r:.40} of format {index['format']}; expected a remote run of {REMOTE_FORMAT}")
    if name not in index["checkpoints"] or not all(map(STEP.fullmatch, index["checkpoints"])) or CONFIG not in index["files"]:
        raise ArtifactError(f"{where}: names {sorted(index['checkpoints'])}; expected {name} among them, and the run's {CONFIG}")
    return index


def run_identity(folder: Path) -> str:
    """The first line of a ledger: it has the time and the options of the run's beginning."""
    with (folder / "ledger.jsonl").open("rb") as ledger:
        return hashlib.sha256(ledger.readline()).hexdigest()


def _beginning(path: Path, length: int) -> bytes:
    """Bytes of a file when it was that long: lines are only ever added to those that change."""
    with path.open("rb") as file:
        data = file.read(length)
    if len(data) != length:
        raise ArtifactError(f"{path}: has {len(data):,} bytes, and had {length:,}: something else writes here")
    return data


def _require_same_run(remote: RemoteFolder, folder: Path, say: Callable[[str], None]) -> None:
    """A store that cannot be asked stops no run that is here."""
    try:
        records = record_names(remote)
    except StoreError as error:
        say(f"{error}. The run goes on from {folder}")
        return
    for name in records:
        with contextlib.suppress(ArtifactError):  # a damaged index says nothing of whose it is
            if read_index(remote, name)["run"] != run_identity(folder):
                raise UsageError(f"{remote.url} holds another run than {folder}; give another --remote, or the --out of that run")
            return


def _require_same_options(remote: RemoteFolder, name: str, index: dict[str, Any], same_options: Callable[[bytes], list[str]]) -> None:
    data = remote.under(f"{RECORDS}/{name}").read(CONFIG)
    if data is None or hashlib.sha256(data).hexdigest() != index["files"][CONFIG]["sha256"]:
        raise ArtifactError(f"{remote.url}/{RECORDS}/{name}/{CONFIG}: is not what its index names")
    if changed := same_options(data):
        raise UsageError(f"{remote.url} holds another run: {', '.join(changed[:4])}; give the same options, or another --remote")


def _fetch(remote: RemoteFolder, name: str, index: dict[str, Any], folder: Path) -> None:
    """Checkpoints first and the options last: a folder without them holds no run yet, and is fetched again."""
    for step, digest in index["checkpoints"].items():
        _fetch_checkpoint(remote.under(f"{CHECKPOINTS}/{step}"), digest, folder / CHECKPOINTS / step)
    record = remote.under(f"{RECORDS}/{name}")
    for file in sorted(index["files"], key=lambda file: file == CONFIG):
        if Path(file).name != file or file.startswith("."):
            raise ArtifactError(f"{record.url}/{RECORD_INDEX}: names the file {file!r:.80}; expected plain names")
        record.fetch_file(file, folder / file, index["files"][file])


def _fetch_checkpoint(remote: RemoteFolder, digest: str, place: Path) -> Checkpoint:
    if place.exists():  # an earlier try fetched it
        found = open_checkpoint(place)
    else:
        data = remote.read(MANIFEST)
        if data is None:
            raise ArtifactError(f"{remote.url}: has no {MANIFEST}: half of a checkpoint, or a deleted one")
        if (actual := hashlib.sha256(data).hexdigest()) != digest:
            raise ArtifactError(f"{remote.url}/{MANIFEST}: hashes to {actual}, and the record names {digest}: another checkpoint's")
        fetch_folder(remote, data, place)
        for mark in (HALLMARK, QUARANTINE):
            if (data := remote.read(mark)) is not None:
                durable.replace_file(place / mark, data)
        found = open_checkpoint(place)
    if found.digest != digest:
        raise ArtifactError(f"{place}: is the checkpoint {found.digest[:12]}, and the record names {digest[:12]}; remove the folder")
    return found

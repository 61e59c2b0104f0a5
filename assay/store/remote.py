"""Remote folders: checkpoints, models and corpora at fsspec URLs (s3://, gs://, hf://, file://), sent and fetched with every byte hashed.

A folder is sent with its `manifest.json` last, and every object is fetched back and hashed before it counts: what was cut off half-way
has no manifest, and is nothing. A folder is opened through a local copy in the cache, which is named by the manifest's digest and is made
whole or not at all.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from assay.errors import ArtifactError, AssayError, StoreError, UsageError
from assay.store import durable
from assay.store.checkpoint import HALLMARK, MANIFEST, QUARANTINE, SMALL_FILE_LIMIT
from assay.store.model_cache import cache_folder
from assay.store.safetensors_files import inside
from assay.strict_json import NATURAL, parse_json

T = TypeVar("T")
URL = re.compile(r"([a-z][a-z0-9+.-]*)://.+", re.IGNORECASE)
PLUG_INS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs"}
PAUSES = (1.0, 5.0)  # seconds before the second and the third try
FETCHED_BYTES = 4 << 20
_FILES = {"files": {str: {"bytes": NATURAL, "sha256": str}}}


def is_url(name: str | Path) -> bool:
    return URL.fullmatch(str(name)) is not None


def local_path(name: str | Path) -> Path:
    """A path of this machine: the path itself, or the verified copy of what lies at a URL."""
    return local_copy(str(name)) if is_url(name) else Path(name)


@functools.cache
def local_copy(url: str) -> Path:
    """The folder at `url` in the cache, every file with the hash that its manifest states; fetched first where it is not there.

    One process sees one version of it. A hallmark or quarantine may have come since it was fetched, or gone: these are asked for again.
    """
    remote = RemoteFolder(url)
    data = remote.read(MANIFEST)
    if data is None:
        raise UsageError(f"{url}: has no {MANIFEST}, so nothing says what its bytes should be: not one of Assay's folders, or half of one; "
                         "copy it to a disk and name the folder there")
    place = cache_folder() / "remote" / hashlib.sha256(data).hexdigest() / remote.name
    with _alone(place.parent):
        if not place.exists():
            fetch_folder(remote, data, place)
        for mark in (HALLMARK, QUARANTINE):
            _bring_mark(place / mark, remote.read(mark))
    return place


def _bring_mark(place: Path, data: bytes | None) -> None:
    if data is not None and not (place.exists() and place.read_bytes() == data):
        durable.replace_file(place, data)
    elif data is None and place.exists():
        durable.remove_file(place)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock a folder: of several processes that fetch it, one does."""
    durable.make_folder(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel frees it, whatever ends the process
        yield
    finally:
        os.close(handle)


class _NotThere(Exception):
    """Error of an object that does not exist: no other try would find it."""


class _Unanswered(Exception):
    """The store failed while it was read."""


class RemoteFolder:
    """Objects under a URL. Every call is tried three times; then the store's refusal is a StoreError, in words."""

    def __init__(self, url: str):
        self.url, self.name = url.rstrip("/"), url.rstrip("/").rsplit("/", 1)[-1]
        self._store, self._root = _connect(self.url)

    def under(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.url}/{name}")

    def send_file(self, path: Path, name: str, sha256: str) -> None:
        """The object has this hash, read back from the store, when this returns."""
        self._sent(name, lambda place: self._store.put_file(str(path), place), sha256)

    def send_bytes(self, data: bytes, name: str) -> None:
        self._sent(name, lambda place: self._store.pipe_file(place, data), hashlib.sha256(data).hexdigest())

    def _sent(self, name: str, put: Callable[[str], object], sha256: str) -> None:
        def send() -> str:
            put(self._place(name))
            return _hash_of(self._pieces(name))

        found = self._tried(name, send)
        if found != sha256:
            raise StoreError(f"{self.url}/{name}: its bytes hash to {found} when they are read back, and {sha256} were sent: damaged on "
                             "the way, or another writer was there; check the store, and give each run a URL of its own")

    def read(self, name: str, limit: int = SMALL_FILE_LIMIT) -> bytes | None:
        """A small object; None where there is none."""
        def read() -> bytes | None:
            try:
                return b"".join(_at_most(self._pieces(name), limit, f"{self.url}/{name}"))
            except _NotThere:
                return None

        return self._tried(name, read)

    def fetch_file(self, name: str, to: Path, entry: dict[str, Any]) -> None:
        """A new file with these bytes and this hash; an ArtifactError that names what else was found."""
        def fetch() -> str:
            to.unlink(missing_ok=True)  # what an earlier try left
            return durable.write_file(to, _at_most(self._pieces(name), entry["bytes"], f"{self.url}/{name}"))

        try:
            found = self._tried(name, fetch)
        except _NotThere:
            raise ArtifactError(f"{self.url}/{name}: is not there, and the manifest lists it; send it again, or use another") from None
        if found != entry["sha256"]:
            raise ArtifactError(f"{self.url}/{name}: its bytes hash to {found}, but {entry['sha256']} was recorded when it was written: "
                                "damaged, or a file from elsewhere; restore it, or use another")

    def copy_file(self, name: str, to: Path) -> str:
        """A new file with the bytes of an object that no manifest speaks of; their sha256."""
        def copy() -> str:
            to.unlink(missing_ok=True)  # what an earlier try left
            return durable.write_file(to, self._pieces(name))

        try:
            return self._tried(name, copy)
        except _NotThere:
            raise UsageError(f"{self.url}/{name}: there is no such object") from None

    def version(self, name: str) -> str:
        """Version of an object: another text once it has changed."""
        try:
            return str(self._tried(name, lambda: self._store.ukey(self._place(name))))
        except StoreError as error:
            raise UsageError(f"{self.url}/{name}: cannot be found: {error}") from None

    def is_there(self) -> bool:
        """Whether the URL is there as a folder, and not as an object of that name."""
        return self._tried("", lambda: bool(self._store.isdir(self._root)))

    def names(self) -> list[str]:
        """Names of what lies directly in the folder, sorted; none where there is no folder."""
        def listed() -> list[str]:
            self._store.invalidate_cache()
            try:
                return sorted({str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._store.ls(self._root, detail=False)})
            except FileNotFoundError:
                return []

        return self._tried("", listed)

    def remove(self, name: str = "") -> None:
        """An object, or all that lies in a folder; nothing where it is not there."""
        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._store.rm(self._place(name), recursive=True)

        self._tried(name, remove)

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _pieces(self, name: str) -> Iterator[bytes]:
        """Pieces of an object. Whoever writes them to a disk must not take the store's errors for the disk's."""
        self._store.invalidate_cache()
        try:
            with self._store.open(self._place(name), "rb") as file:
                while piece := file.read(FETCHED_BYTES):
                    yield piece
        except FileNotFoundError:
            raise _NotThere(name) from None
        except OSError as error:
            raise _Unanswered(f"{type(error).__name__}: {error}") from error

    def _tried(self, name: str, act: Callable[[], T]) -> T:
        where = f"{self.url}/{name}".rstrip("/")
        for pause in (*PAUSES, None):
            try:
                return act()
            except (_NotThere, AssayError):
                raise
            except Exception as error:  # a store's plug-in may raise anything
                if pause is None:
                    raise StoreError(f"{where}: the store did not answer as it should, three times: {type(error).__name__}: "
                                     f"{str(error)[:300]}; check the network, the rights and the name") from error
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")


def send_folder(folder: Path, remote: RemoteFolder) -> None:
    """Send all that the folder's manifest lists, then the manifest, then its marks. An older manifest there goes first: until the new one
    is there, the place holds nothing that counts."""
    data = durable.read_file(folder / MANIFEST, limit=SMALL_FILE_LIMIT)
    for name in (HALLMARK, QUARANTINE, MANIFEST):
        remote.remove(name)
    for name, entry in manifest_files(data, str(folder / MANIFEST)).items():
        remote.send_file(inside(folder, name), name, entry["sha256"])
    for name in (MANIFEST, HALLMARK, QUARANTINE):
        if (folder / name).exists():
            remote.send_bytes(durable.read_file(folder / name, limit=SMALL_FILE_LIMIT), name)


def fetch_folder(remote: RemoteFolder, manifest: bytes, place: Path) -> None:
    """Fetch all that the manifest lists, hashed as it arrives, and the manifest: at `place`, or not at all."""
    files = manifest_files(manifest, f"{remote.url}/{MANIFEST}")
    with durable.new_folder(place, needed=sum(entry["bytes"] for entry in files.values())) as folder:
        for name, entry in files.items():
            remote.fetch_file(name, inside(folder, name), entry)
        durable.write_file(folder / MANIFEST, [manifest])


def manifest_files(data: bytes, where: str) -> dict[str, dict[str, Any]]:
    """Files that a manifest lists: of a checkpoint or of a corpus. Names lead nowhere else."""
    files = parse_json(data, where=where, shape=_FILES)["files"]
    for name in files:
        if Path(name).name != name or name.startswith(".") or name in (MANIFEST, HALLMARK, QUARANTINE):
            raise ArtifactError(f"{where}: lists {name!r:.80}; expected plain names of files beside it")
    return files


def _connect(url: str) -> tuple[Any, str]:
    found = URL.fullmatch(url)
    if found is None:
        raise UsageError(f"{url!r} is no URL; expected one such as s3://bucket/folder, gs://bucket/folder or file:///folder")
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise UsageError(f"{url}: URLs need fsspec; pip install 'assay[remote]'") from None
    plug_in = PLUG_INS.get(found[1].lower())
    own = {"auto_mkdir": True} if found[1].lower() in ("file", "local") else {}
    try:
        store, root = url_to_fs(url, use_listings_cache=False, **own)
    except ImportError as error:
        raise UsageError(f"{url}: {found[1]}:// needs a package that is not installed; pip install {plug_in or 'the one that it names'} "
                         f"({error})") from None
    except ValueError as error:
        raise UsageError(f"{url}: {error}; expected s3://, gs://, hf://, file:// or another that fsspec knows") from None
    return store, root.rstrip("/")


def _hash_of(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _at_most(pieces: Iterable[bytes], limit: int, where: str) -> Iterator[bytes]:
    taken = 0
    for piece in pieces:
        taken += len(piece)
        if taken > limit:
            raise ArtifactError(f"{where}: has more than the {limit:,} bytes that were expected; another file, or a damaged one")
        yield piece

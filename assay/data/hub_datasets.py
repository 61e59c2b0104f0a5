"""Datasets of the Hugging Face hub by name, hf://OWNER/NAME[CONFIG][SPLIT], and files of rows at URLs: copied into the cache once.

A dataset is read as its parquet files: those that the hub itself converted (its branch refs/convert/parquet, CONFIG/SPLIT/*.parquet), or
those that the dataset has (CONFIG/SPLIT-*.parquet). The copy is named by the commit, so that one name cannot come to mean two texts
within a run's life; which commit it was is the name of the folder.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from assay.errors import AssayError, UsageError
from assay.store import durable
from assay.store.model_cache import cache_folder, hub_error_types
from assay.store.remote import RemoteFolder, is_url

CONVERTED = "refs/convert/parquet"
DATASET = re.compile(r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)(?:\[([^\[\]]*)\])?(?:\[([^\[\]]+)\])?(?:@([\w./-]+))?")
FETCHED = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".tsv", ".txt", ".txt.gz")
_PARQUET = re.compile(r"(?:(?P<config>[^/]+)/)?(?:(?P<folder>[^/]+)/)?(?P<file>[^/]+)\.parquet")


class DatasetName(NamedTuple):
    repository: str
    config: str | None
    split: str | None
    revision: str | None

    def __str__(self) -> str:
        return f"hf://{self.repository}"


def local_data(name: Path | str) -> Path:
    """A path of this machine: the path itself, or the copy of what a URL names, made on first use."""
    if not is_url(name):
        return Path(name)
    if str(name).startswith("hf://"):
        found = DATASET.fullmatch(str(name))
        if found is None:
            raise UsageError(f"{name}: expected hf://OWNER/NAME[CONFIG][SPLIT], as in hf://openai/gsm8k[main][train]")
        return fetch_dataset(DatasetName(found[1], found[2] or None, found[3], found[4]))
    return fetch_rows(str(name))


def fetch_rows(url: str) -> Path:
    """A file at a URL of fsspec's, or all files that lie directly in a folder there, in the cache; whole or not at all. A copy belongs to
    one version of what lies there."""
    above, _, last = url.rstrip("/").rpartition("/")
    alone = last.endswith(FETCHED) and not RemoteFolder(url).is_there()  # Spark's folders are called rows.parquet
    remote = RemoteFolder(above if alone else url)
    names = [last] if alone else [name for name in remote.names() if not name.startswith(".")]
    if odd := [name for name in names if not name.endswith(FETCHED)] or ["no file"] * (not names):
        raise UsageError(f"{url}: {odd[0]} lies there; expected files of rows or text and nothing else: {', '.join(FETCHED)}")
    versions = hashlib.sha256("\n".join([url, *(f"{name} {remote.version(name)}" for name in names)]).encode()).hexdigest()[:16]
    place = cache_folder() / "rows" / versions / (last.partition(".")[0] if alone else last)
    if not place.exists():
        with durable.new_folder(place) as made:
            for name in names:
                remote.copy_file(name, made / name)
    return place / last if alone else place


def fetch_dataset(name: DatasetName) -> Path:
    """The folder of a split's parquet files."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RevisionNotFoundError

    with hub_errors(name):
        api = HfApi()
        try:
            info = api.dataset_info(name.repository, revision=name.revision or CONVERTED)
        except RevisionNotFoundError:
            info = api.dataset_info(name.repository)
    files = [each.rfilename for each in info.siblings or []]
    config, split, chosen = files_of_split(name, files)
    place = cache_folder() / "datasets" / name.repository.replace("/", "--") / str(info.sha)[:12] / config / split
    if not place.exists():
        durable.make_folder(place.parent)
        with durable.new_folder(place) as made, hub_errors(name):
            for number, file in enumerate(chosen):
                got = hf_hub_download(name.repository, file, repo_type="dataset", revision=info.sha)
                durable.write_file(made / f"{number:05d}.parquet", pieces_of(Path(got)))
    return place


def files_of_split(name: DatasetName, files: list[str]) -> tuple[str, str, list[str]]:
    """(config, split, its files): as named, or the only one there is, `train` among splits. Nothing else is guessed."""
    splits: dict[str, dict[str, list[str]]] = {}
    for file in sorted(files):
        if found := _PARQUET.fullmatch(file):
            config, split = placed_in(found)
            splits.setdefault(config, {}).setdefault(split, []).append(file)
    config = name.config or (next(iter(splits)) if len(splits) == 1 else "default")
    if config not in splits:
        has = f"the configs {', '.join(splits)}" if splits else "no parquet files"
        raise UsageError(f"{name}: has {has}, and {name.config or 'none of them'} was named; expected "
                         f"hf://{name.repository}[CONFIG][SPLIT]")
    split = name.split or (next(iter(splits[config])) if len(splits[config]) == 1 else "train")
    if split not in splits[config]:
        raise UsageError(f"{name}[{config}]: has the splits {', '.join(splits[config])}, not {split!r}; expected "
                         f"hf://{name.repository}[{config}][SPLIT]")
    return config, split, splits[config][split]


def placed_in(found: re.Match[str]) -> tuple[str, str]:
    """(config, split) by a file's path: CONFIG/SPLIT/0000.parquet, CONFIG/SPLIT-00000-of-00002.parquet, data/SPLIT-….parquet."""
    own = re.sub(r"-\d+-of-\d+(?:-[0-9a-f]+)?$", "", found["file"])
    config = found["config"] or "default"
    if found["folder"] is not None:
        return config, found["folder"].removeprefix("partial-")
    return "default" if config == "data" else config, own


def pieces_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            yield piece


@contextmanager
def hub_errors(name: DatasetName) -> Iterator[None]:
    try:
        yield
    except hub_error_types() as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise AssayError(f"{name}: the hub refused or could not be reached{offline}: {said}; check the name, the network and "
                         "`hf auth login`") from None

"""Remote folders: sent whole or not counted, fetched with every byte hashed; on files, in memory, and on S3 where s3fs and moto are."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.errors import ArtifactError, StoreError, UsageError
from assay.store import remote
from assay.store.artifact import open_artifact
from assay.store.checkpoint import MANIFEST, open_checkpoint
from assay.store.remote import RemoteFolder, local_copy, local_path, send_folder
from assay.testing.tiny_models import save_model, tiny_model

pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("saved") / "model"
    save_model(where, tiny_model())
    return where


@pytest.fixture
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    kind = getattr(request, "param", "file")
    if kind == "s3":
        why = "S3 is tested where s3fs and moto are: pip install s3fs 'moto[server]'"
        pytest.importorskip("s3fs", reason=why)
        server = pytest.importorskip("moto.server", reason=why).ThreadedMotoServer(port=0)
        server.start()
        host, port = server.get_host_and_port()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                                "AWS_DEFAULT_REGION": "us-east-1"}.items():
                patch.setenv(name, value)
            import s3fs

            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().mkdir(f"assay-{port}")
            yield f"s3://assay-{port}/runs"
        server.stop()
    else:
        yield f"file://{tmp_path}/bucket" if kind == "file" else f"memory://{tmp_path.name}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))
    local_copy.cache_clear()
    yield
    local_copy.cache_clear()


@pytest.mark.parametrize("bucket", ["file", "memory", "s3"], indirect=True)
def test_a_model_at_a_url_opens_through_a_verified_copy_and_is_fetched_once(bucket: str, saved: Path, monkeypatch: pytest.MonkeyPatch):
    url = f"{bucket}/model"
    send_folder(saved, RemoteFolder(url))
    opened = open_artifact(url)
    assert opened.digest == open_artifact(saved).digest
    assert opened.path.is_relative_to(remote.cache_folder())
    local_copy.cache_clear()
    monkeypatch.setattr(RemoteFolder, "fetch_file", None)
    assert local_path(url) == opened.path


@pytest.mark.parametrize("bucket", ["file", "s3"], indirect=True)
def test_what_is_cut_off_while_it_is_sent_does_not_count(bucket: str, saved: Path, monkeypatch: pytest.MonkeyPatch):
    """An older manifest lies there, and would otherwise vouch for a mixture."""
    url, sent = f"{bucket}/model", RemoteFolder.send_file
    send_folder(saved, RemoteFolder(url))
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "send_file", lambda self, path, name, sha256: cut_off(name) or sent(self, path, name, sha256))
        with pytest.raises(KeyboardInterrupt):
            send_folder(saved, RemoteFolder(url))
    assert MANIFEST not in RemoteFolder(url).names()
    with pytest.raises(UsageError, match=r"has no manifest\.json"):
        open_artifact(url)
    send_folder(saved, RemoteFolder(url))
    assert open_artifact(url).digest == open_artifact(saved).digest


def cut_off(name: str) -> None:
    if name.endswith(".safetensors"):
        raise KeyboardInterrupt


def damaged(place: Path, how: str, saved: Path) -> None:
    file = place / "model.safetensors"
    if how == "flipped byte":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif how == "missing file":
        file.unlink()
    elif how == "longer file":
        file.write_bytes(file.read_bytes() + b"0")
    else:
        other = place.parent / "other"
        save_model(other, tiny_model(seed=5))
        shutil.copy(other / MANIFEST, place / MANIFEST)


@pytest.mark.parametrize(("how", "words"), [("flipped byte", "hash to"), ("missing file", "is not there"), ("longer file", "more than"),
                                            ("stale manifest", "hash to")])
def test_damage_in_the_store_is_refused_and_leaves_nothing_in_the_cache(how: str, words: str, bucket: str, saved: Path):
    url = f"{bucket}/model"
    send_folder(saved, RemoteFolder(url))
    damaged(Path(bucket.removeprefix("file://")) / "model", how, saved)
    with pytest.raises(ArtifactError, match=words):
        open_artifact(url)
    assert not list((remote.cache_folder() / "remote").glob("*/model"))


def test_bytes_that_come_back_otherwise_are_not_said_to_be_there(bucket: str, saved: Path, monkeypatch: pytest.MonkeyPatch):
    from fsspec.implementations.local import LocalFileSystem

    usual = LocalFileSystem.put_file

    def put(self: Any, path: str, place: str, **more: Any) -> None:
        usual(self, path, place, **more)
        if place.endswith("model.safetensors"):
            Path(place).write_bytes(Path(place).read_bytes()[:-1] + b"\1")

    monkeypatch.setattr(LocalFileSystem, "put_file", put)
    with pytest.raises(StoreError, match="when they are read back"):
        send_folder(saved, RemoteFolder(f"{bucket}/model"))
    assert MANIFEST not in RemoteFolder(f"{bucket}/model").names()


def test_a_store_that_stumbles_once_is_asked_again_and_one_that_fails_says_so(bucket: str, saved: Path, monkeypatch: pytest.MonkeyPatch):
    from fsspec.implementations.local import LocalFileSystem

    usual, asked = LocalFileSystem.put_file, []

    def put(self: Any, path: str, place: str, **more: Any) -> None:
        asked.append(place)
        if len(asked) in failing:
            raise ConnectionError("reset by peer")
        usual(self, path, place, **more)

    monkeypatch.setattr(LocalFileSystem, "put_file", put)
    failing = [1, 2]
    send_folder(saved, RemoteFolder(f"{bucket}/model"))
    assert open_checkpoint(local_path(f"{bucket}/model")).digest == open_checkpoint(saved).digest
    failing = [*range(1000)]
    with pytest.raises(StoreError, match="three times: ConnectionError: reset by peer"):
        send_folder(saved, RemoteFolder(f"{bucket}/other"))


@pytest.mark.parametrize(("url", "words"), [("runs/a", "is no URL"), ("nosuch://bucket/a", "expected s3://")])
def test_a_url_that_nothing_serves_is_refused_in_words(url: str, words: str):
    with pytest.raises(UsageError, match=words):
        RemoteFolder(url)


def test_the_package_that_a_store_needs_is_named(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match="pip install gcsfs"):
        RemoteFolder("gs://bucket/a")


def test_a_manifest_that_leads_elsewhere_is_refused(bucket: str, saved: Path):
    place = Path(bucket.removeprefix("file://")) / "model"
    place.mkdir(parents=True)
    (place / MANIFEST).write_text('{"files": {"../../x": {"bytes": 1, "sha256": "0"}}}')
    with pytest.raises(ArtifactError, match="expected plain names"):
        local_copy(f"{bucket}/model")

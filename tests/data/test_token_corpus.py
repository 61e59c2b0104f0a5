"""A corpus: whole or not there, the same for any number of workers, refused when it is not what it says."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from assay.data import build_corpus as building
from assay.data.build_corpus import CorpusPlan, build_corpus
from assay.data.data_files import DocumentRule, document_id
from assay.data.encode import encode_plain, plain_backend
from assay.data.encode_workers import EncodeTask, Encoding, start_encoders
from assay.data.token_corpus import Corpus, assert_disjoint, open_corpus
from assay.errors import ArtifactError, AssayError, DataError, StoreError, UsageError
from assay.model.tokenizer import Tokenizer
from assay.seeds import derive
from tests.data.conftest import made_text, write_jsonl
from tests.processes import ended

Make = Callable[..., Corpus]


def rewritten(corpus: Corpus, tmp_path: Path, **changed: bytes) -> Path:
    """A copy with some files replaced, and a manifest that agrees with them: a poisoned cache."""
    folder = tmp_path / "copy"
    shutil.copytree(corpus.folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, data in changed.items():
        (folder / name).write_bytes(data)
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_every_document_stands_between_boundaries_with_its_bytes(corpus: Corpus, texts: list[str], tokenizer: Path) -> None:
    backend = plain_backend(Tokenizer.from_folder(tokenizer))
    by_id = {document_id("made.jsonl", i): text for i, text in enumerate(texts)}
    for split in (corpus.train, corpus.held_out):
        for number, record in enumerate(split.index):
            ids, text = split.document(number), by_id.pop(int(record["id"]))
            assert ids[0] == ids[-1] == corpus.boundary
            assert ids[1:-1].astype("<u2").tobytes() == encode_plain(backend, text, "<u2")
            assert record["bytes"] == len(text.encode())
    assert not by_id
    assert len(corpus.train.shards) > 3  # documents and counts hold across shards
    assert corpus.manifest["train"]["bytes"] + corpus.manifest["held_out"]["bytes"] == sum(len(t.encode()) for t in texts)


def test_the_manifest_says_what_was_done(corpus: Corpus, jsonl: Path, tokenizer: Path) -> None:
    manifest = corpus.manifest
    (source,) = manifest["sources"]
    assert source["sha256"] == hashlib.sha256(jsonl.read_bytes()).hexdigest()
    assert (source["name"], source["bytes"], source["documents"]) == ("made.jsonl", jsonl.stat().st_size, 200)
    assert manifest["tokenizer"]["digest"] == Tokenizer.from_folder(tokenizer).digest
    assert manifest["boundary"] == {"token": "<|endoftext|>", "id": 0, "before": True, "after": True}
    names = {path.name for path in corpus.folder.iterdir()} - {"manifest.json"}
    assert names == manifest["files"].keys()


def test_workers_change_nothing(make: Make, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "TASK_BYTES", 1000)  # many tasks, so that the queue is full
    parallel = make(held_out=0.1, shard_tokens=5000, workers=2)
    assert parallel.digest == corpus.digest


def test_held_out_documents_are_chosen_by_id_alone(corpus: Corpus, make: Make, texts: list[str], tmp_path: Path) -> None:
    """Other texts under the same names are held out alike, and every document is on one side."""
    expected = {i for i in range(200) if derive(0, "held-out", document_id("made.jsonl", i)) < 0.1 * 2**63}
    held = {int(i) for i in corpus.held_out.index["id"]}
    assert held == {document_id("made.jsonl", i) for i in expected}
    assert not held & {int(i) for i in corpus.train.index["id"]}
    other = make(write_jsonl(tmp_path / "made.jsonl", [made_text(5000 + i, 20) for i in range(200)]), held_out=0.1)
    assert {int(i) for i in other.held_out.index["id"]} == held
    assert {int(i) for i in make(held_out=0.1, seed=1).held_out.index["id"]} != held
    assert corpus.held_out_digest == make(held_out=0.1, shard_tokens=77).held_out_digest != other.held_out_digest


def test_whole_files_can_be_held_out(make: Make, jsonl: Path, tmp_path: Path) -> None:
    valid = write_jsonl(tmp_path / "valid.jsonl", [made_text(9000 + i, 50) for i in range(7)])
    corpus = make(jsonl, held_out=0.0, held_out_files=(valid,))
    assert {int(i) for i in corpus.held_out.index["id"]} == {document_id("valid.jsonl", i) for i in range(7)}
    assert corpus.train.documents == 200
    with pytest.raises(UsageError, match=r"'made\.jsonl' is given both"):
        make(jsonl, held_out_files=(jsonl,))


def test_nothing_is_written_unless_everything_is(jsonl: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "corpus"

    def no_space(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(building, "_manifest", no_space)
    with pytest.raises(StoreError, match="the disk is full"):
        build_corpus([jsonl], out, tokenizer, CorpusPlan())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    build_corpus([jsonl], out, tokenizer, CorpusPlan())
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    with pytest.raises(UsageError, match="exists"):
        build_corpus([jsonl], out, tokenizer, CorpusPlan())


def test_a_source_that_changes_while_it_is_read_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [made_text(i, 30) for i in range(40)])

    class Changing(CorpusPlan):
        def holds_out(self, *_: object) -> bool:
            path.touch()
            return super().holds_out(*_)  # type: ignore[arg-type]

    with pytest.raises(DataError, match=r"a\.jsonl changed while it was being read"):
        build_corpus([path], tmp_path / "out", tokenizer, Changing())


@pytest.mark.parametrize(("lines", "said"), [
    ([], "no documents"), (["", ""], "2 empty documents left out"), (["one document"], "0 of 1 documents are held out")])
def test_an_empty_side_is_an_error(make: Make, tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(DataError, match=said):
        make(write_jsonl(tmp_path / "a.jsonl", lines))


def test_without_held_out_text_everything_is_trained_on(make: Make) -> None:
    corpus = make(held_out=0.0)
    assert (corpus.train.documents, corpus.held_out.documents, corpus.held_out.tokens) == (200, 0, 0)
    assert_disjoint(corpus)
    assert open_corpus(corpus.folder).digest == corpus.digest


# ---------------------------------------------------------------- D14, D15: caches

def test_another_tokenizer_is_refused(corpus: Corpus) -> None:
    assert open_corpus(corpus.folder, tokenizer_digest=corpus.tokenizer_digest).digest == corpus.digest
    with pytest.raises(DataError, match="its ids mean other text"):
        open_corpus(corpus.folder, tokenizer_digest="0" * 64)


@pytest.mark.parametrize("name", ["train-00000.bin", "held-00000.bin", "train-index.bin", "samples.jsonl", "tokenizer.json"])
def test_one_flipped_bit_is_refused(corpus: Corpus, tmp_path: Path, name: str) -> None:
    shutil.copytree(corpus.folder, tmp_path / "copy")
    data = bytearray((tmp_path / "copy" / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "copy" / name).write_bytes(data)
    with pytest.raises(ArtifactError, match=name):
        open_corpus(tmp_path / "copy")


def test_a_cut_or_missing_file_is_refused_even_unverified(corpus: Corpus, tmp_path: Path) -> None:
    shutil.copytree(corpus.folder, tmp_path / "copy")
    shard = tmp_path / "copy" / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ArtifactError, match=r"train-00001\.bin"):
        open_corpus(tmp_path / "copy", verify=False)
    shard.unlink()
    with pytest.raises(ArtifactError, match="not a file of this folder"):
        open_corpus(tmp_path / "copy", verify=False)


def test_a_poisoned_cache_is_found_by_encoding_again(corpus: Corpus, tmp_path: Path) -> None:
    """Shards of another tokenizer under a manifest that agrees with them: every hash is right, every text is wrong."""
    shifted = {}
    for name in corpus.manifest["files"]:
        if name.endswith(".bin") and "index" not in name:
            ids = np.fromfile(corpus.folder / name, "<u2")
            shifted[name] = np.where(ids == 0, 0, ids % 399 + 1).astype("<u2").tobytes()
    with pytest.raises(ArtifactError, match="does not encode to its stored ids"):
        open_corpus(rewritten(corpus, tmp_path, **shifted))


def test_a_swapped_tokenizer_is_found(corpus: Corpus, tmp_path: Path) -> None:
    document = json.loads((corpus.folder / "tokenizer.json").read_text())
    document["model"]["merges"] = document["model"]["merges"][:-50]
    with pytest.raises(ArtifactError, match="not the tokenizer that the manifest names"):
        open_corpus(rewritten(corpus, tmp_path, **{"tokenizer.json": json.dumps(document).encode()}))


def test_an_index_that_does_not_fit_its_shards_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    index = corpus.train.index.copy()
    index["tokens"][0] += 1
    with pytest.raises(ArtifactError, match="does not describe the train shards"):
        open_corpus(rewritten(corpus, tmp_path, **{"train-index.bin": index.tobytes()}))


@pytest.mark.parametrize(("manifest", "error", "said"), [
    (None, UsageError, "is not a corpus"), ("{", ArtifactError, "not JSON"), ("[]", ArtifactError, "not a manifest"),
    ('{"format": "assay-corpus/1"}', ArtifactError, "not a manifest")])
def test_a_folder_that_is_no_corpus_is_refused(tmp_path: Path, manifest: str | None, error: type, said: str) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(error, match=said):
        open_corpus(tmp_path)


def test_names_cannot_leave_the_folder(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "outside.bin").write_bytes(b"")
    folder = rewritten(corpus, tmp_path, **{"../outside.bin": b"xx"})
    with pytest.raises(ArtifactError, match="not a file of this folder"):
        open_corpus(folder)


# ---------------------------------------------------------------- D19: leaks

def test_validation_rows_in_the_training_file_are_refused(make: Make, texts: list[str], tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", texts)
    valid = write_jsonl(tmp_path / "valid.jsonl", texts[20:40])
    with pytest.raises(DataError, match=r"20 of 20 .*valid\.jsonl#0"):
        make(train, held_out=0.0, held_out_files=(valid,))
    knowingly = make(train, held_out=0.0, held_out_files=(valid,), max_overlap=1.0)
    assert knowingly.manifest["overlap"]["exact"] == 20


def test_near_duplicates_are_refused(make: Make, texts: list[str], tmp_path: Path) -> None:
    """No document is the same, but most of each stands in training."""
    near = [f"{text} and {i} other words" for i, text in enumerate(texts[:20])]
    valid = write_jsonl(tmp_path / "valid.jsonl", [*near, *(made_text(7000 + i, 100) for i in range(20))])
    with pytest.raises(DataError, match=r"0 of 40 .*--max-overlap 5\.00%.*valid\.jsonl#"):
        make(write_jsonl(tmp_path / "train.jsonl", texts), held_out=0.0, held_out_files=(valid,))


def test_the_check_before_training_is_silent_on_a_clean_corpus_and_names_a_leak(corpus: Corpus, make: Make, texts: list[str],
                                                                               tmp_path: Path) -> None:
    assert_disjoint(corpus)
    valid = write_jsonl(tmp_path / "valid.jsonl", [text.upper() for text in texts[:20] if "É" not in text.upper()])
    other = make(write_jsonl(tmp_path / "other.jsonl", [made_text(8000 + i, 20) for i in range(20)]), held_out=0.0,
                 held_out_files=(valid,))
    with pytest.raises(DataError, match="held-out documents stand in training"):
        assert_disjoint(corpus, other)


def test_an_id_on_both_sides_is_refused(corpus: Corpus) -> None:
    from dataclasses import replace

    leaked = replace(corpus, train=replace(corpus.train, index=np.concatenate([corpus.train.index, corpus.held_out.index[:1]])))
    with pytest.raises(DataError, match="1 documents are both trained on and held out"):
        assert_disjoint(leaked)


def test_text_files_make_a_corpus_too(make: Make, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("\n".join(texts))
    corpus = make(tmp_path / "all.txt", rule=DocumentRule(document_bytes=500), held_out=0.2)
    assert corpus.train.bytes + corpus.held_out.bytes == (tmp_path / "all.txt").stat().st_size


def test_a_dead_encoding_process_is_a_sentence(tokenizer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    missing = Encoding.of(Tokenizer.from_folder(tokenizer), None, tmp_path / "missing")
    with pytest.raises(AssayError, match="an encoding process died"), start_encoders(missing, tmp_path, 2) as encode:
        list(encode([[EncodeTask(1, b"text", False)]]))


def test_encoding_processes_end_with_one_that_was_killed(tokenizer: Path, tmp_path: Path) -> None:
    program = f"""
import multiprocessing, os, signal
from pathlib import Path
from assay.data.encode_workers import Encoding, start_encoders
from assay.model.tokenizer import Tokenizer

folder = Path({str(tokenizer)!r})
with start_encoders(Encoding.of(Tokenizer.from_folder(folder), None, folder), folder, 2) as encode:
    list(encode([[], []]))
    Path({str(tmp_path / "pids")!r}).write_text(" ".join(str(child.pid) for child in multiprocessing.active_children()))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == -signal.SIGKILL
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    assert len(pids) == 2
    assert [pid for pid in pids if not ended(pid)] == []


def test_what_a_killed_build_leaves_is_gone_after_the_next(jsonl: Path, tokenizer: Path, tmp_path: Path):
    program = f"""
import os, signal
from pathlib import Path
from assay.data import build_corpus as building
building._take = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
building.build_corpus([Path({str(jsonl)!r})], Path({str(tmp_path / "made" / "corpus")!r}), Path({str(tokenizer)!r}), building.CorpusPlan())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == -signal.SIGKILL
    assert [path.name.partition("-corpus")[0] for path in (tmp_path / "made").iterdir()] == [".partial"]
    build_corpus([jsonl], tmp_path / "made" / "corpus", tokenizer, CorpusPlan())
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["corpus"]
    assert [path.name for path in (tmp_path / "made" / "corpus").iterdir() if path.name.startswith(".")] == []

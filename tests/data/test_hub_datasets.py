"""Datasets of the hub by name, through the real client against a double; and rows at a URL."""

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from assay.data.hub_datasets import DatasetName, files_of_split, local_data
from assay.data.layouts import read_conversations
from assay.errors import UsageError
from assay.store.model_cache import hub_error_types
from tests.interop.hub_double import running_hub

pyarrow = pytest.importorskip("pyarrow")


def parquet(rows: list[dict[str, str]]) -> bytes:
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


SCRIPT = """
import json, sys
from assay.data.hub_datasets import local_data
from assay.data.data_files import read_rows
path = local_data(sys.argv[1])
print(json.dumps([path.parts[-4:], [row.values for row in read_rows(path)]]))
local_data(sys.argv[2])
"""


def test_a_dataset_is_fetched_by_name_and_named_by_its_commit(tmp_path: Path):
    """In a process of its own: the client reads the hub's address when it is imported."""
    with running_hub() as hub:
        files = {f"main/train/{n:04d}.parquet": parquet([{"question": f"{n}+{k}", "answer": f"#### {n + k}"} for k in range(2)])
                 for n in range(2)}
        hub.repositories["datasets/owner/sums"] = files | {"main/test/0000.parquet": parquet([{"question": "9+9", "answer": "#### 18"}])}

        own = {"HF_ENDPOINT": hub.endpoint, "ASSAY_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run([sys.executable, "-c", SCRIPT, "hf://owner/sums[main][train]", "hf://owner/sums[main][dev]"],
                              capture_output=True, text=True, check=False, env=os.environ | own)
        assert done.stdout, done.stderr
        where, rows = json.loads(done.stdout)
        assert where == ["owner--sums", "c0ffee000000", "main", "train"]
        assert [row["question"] for row in rows] == ["0+0", "0+1", "1+0", "1+1"]
        assert "has the splits test, train, not 'dev'" in done.stderr


def test_a_hub_that_does_not_answer_is_said(tmp_path: Path):
    own = {"HF_ENDPOINT": "http://127.0.0.1:9", "ASSAY_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([sys.executable, "-m", "assay", "data", "look", "hf://owner/sums"], capture_output=True, text=True, check=False,
                          env=os.environ | own)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("assay: hf://owner/sums: the hub refused or could not be reached")
    assert "Traceback" not in done.stderr


def test_configs_and_splits_are_named_or_the_only_ones():
    files = ["README.md", "a/train/0000.parquet", "b/train-00000-of-00002.parquet", "b/train-00001-of-00002.parquet", "b/test-0.parquet"]
    assert files_of_split(DatasetName("o/n", "b", "train", None), files) == ("b", "train", files[2:4])
    assert files_of_split(DatasetName("o/n", None, None, None), ["data/train-00000-of-00001-ab12.parquet"])[:2] == ("default", "train")
    for name, words in ((DatasetName("o/n", None, None, None), "the configs a, b"), (DatasetName("o/n", "b", "dev", None), "the splits")):
        with pytest.raises(UsageError, match=words):
            files_of_split(name, files)
    with pytest.raises(UsageError, match=r"OWNER/NAME\[CONFIG\]\[SPLIT\]"):
        local_data("hf://no-owner")


def test_rows_at_a_url_are_copied_once_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("fsspec")
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    there = tmp_path / "there"
    there.mkdir()
    (there / "rows.jsonl").write_text('{"text": "one"}\n')
    (there / "more.parquet").write_bytes(parquet([{"text": "two"}]))
    url = f"file://{there}/rows.jsonl"
    first = local_data(url)
    assert [row.plain for row in read_conversations(url).rows] == [("", "one")]
    assert local_data(url) == first
    assert [row.plain[1] for row in read_conversations(f"file://{there}").rows if row.plain] == ["two", "one"]
    (there / "rows.jsonl").write_text('{"text": "other"}\n')
    assert [row.plain for row in read_conversations(url).rows] == [("", "other")]
    with pytest.raises(UsageError, match="nowhere: no file lies there"):
        local_data(f"file://{tmp_path / 'nowhere'}")


@pytest.mark.parametrize("folder", ["rows", "rows.parquet"])
def test_nothing_that_lies_in_a_folder_at_a_url_is_passed_over(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("fsspec")
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    (there := tmp_path / folder).mkdir()
    (there / "a.jsonl").write_text('{"text": "one"}\n')
    (there / ".written-by").write_text("what is hidden is nobody's data")
    assert [row.plain for row in read_conversations(f"file://{there}").rows] == [("", "one")]
    (there / "more").mkdir()
    with pytest.raises(UsageError, match="more lies there; expected files of rows"):
        local_data(f"file://{there}")
    (there / "more").rmdir()
    (there / "b.jsonl.zst").write_bytes(b"")
    with pytest.raises(UsageError, match=r"b\.jsonl\.zst lies there"):
        local_data(f"file://{there}")


def test_the_errors_of_the_library_that_the_hub_speaks_by_are_known():
    from huggingface_hub.utils import get_session

    library = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    assert issubclass(library.HTTPError, hub_error_types())

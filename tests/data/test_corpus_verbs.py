"""assay tokenizer and assay corpus, as a user types them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from assay.config import parse
from assay.data.token_corpus import open_corpus
from assay.errors import DataError, UsageError
from assay.verbs import corpus, terminal, tokenizer
from tests.data.conftest import write_jsonl


def test_from_text_to_a_corpus(jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenizer.run(parse(tokenizer.FLAGS, [str(jsonl), "--vocab-size", "300", "--out", str(tmp_path / "bpe")], prog="t")) == 0
    assert "300 tokens" in capsys.readouterr().out
    flags = [str(jsonl), "--tokenizer", str(tmp_path / "bpe"), "--out", str(tmp_path / "c"), "--held-out", "0.1", "--workers", "1"]
    assert corpus.run(parse(corpus.FLAGS, flags, prog="c")) == 0
    said = capsys.readouterr().out
    made = open_corpus(tmp_path / "c")
    assert f"{made.train.tokens:,} tokens" in said
    assert f"{made.held_out.bytes:,} bytes" in said
    assert "13-grams" in said
    flags[4] = str(tmp_path / "d")
    assert corpus.run(parse(corpus.FLAGS, [*flags, "--json"], prog="c")) == 0
    assert json.loads(capsys.readouterr().out) == made.manifest


def test_files_held_out_whole_leave_the_rest_to_training(jsonl: Path, texts: list[str], tokenizer_folder: Path, tmp_path: Path) -> None:
    valid = write_jsonl(tmp_path / "valid.jsonl", texts[:30])
    flags = [str(jsonl), "--held-out-files", str(valid), "--tokenizer", str(tokenizer_folder), "--out", str(tmp_path / "c"),
             "--workers", "1"]
    with pytest.raises(DataError, match="30 of 30 held-out documents stand whole in training") as refused:
        corpus.run(parse(corpus.FLAGS, flags, prog="c"))
    assert refused.value.exit_code == 2
    assert not (tmp_path / "c").exists()


@pytest.fixture
def tokenizer_folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue("tokenizer")


def test_a_file_without_documents_is_named(jsonl: Path, tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    for texts, named in (([jsonl], False), ([jsonl, tmp_path / "none.jsonl"], True)):
        flags = [*map(str, texts), "--tokenizer", str(tokenizer_folder), "--out", str(tmp_path / f"corpus-{named}"), "--workers", "1"]
        assert corpus.run(parse(corpus.FLAGS, flags, prog="assay corpus")) == 0
        assert ("1 of 2 files, in which there is no document, such as none.jsonl" in capsys.readouterr().out) is named


@pytest.mark.parametrize(("flags", "words"), [(("--document-bytes", "100"), "--document-bytes cuts text files, and none is given"),
                                              (("--split", ""), "--split cuts text files"), (("--field", "body"), "--field body names")])
def test_an_option_for_other_kinds_of_files_is_refused(flags: tuple[str, str], words: str, jsonl: Path, tokenizer_folder: Path,
                                                       tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text\n")
    given = [str(tmp_path / "a.txt" if flags[0] == "--field" else jsonl), *flags]
    with pytest.raises(UsageError, match=words):
        corpus.run(parse(corpus.FLAGS, [*given, "--tokenizer", str(tokenizer_folder), "--out", str(tmp_path / "out")], prog="assay corpus"))


def test_a_plain_line_is_printed_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from assay.data.build_corpus import CorpusProgress

    clock = iter(range(100))
    monkeypatch.setattr("assay.verbs.terminal.time.monotonic", lambda: float(next(clock)))
    with terminal.progress_line() as show:
        for second in range(12):
            show(corpus.progress_words(CorpusProgress("encoding", second * 10**6, 20 * 10**6, second * 1000, float(second))),
                 last=second == 11)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["encoding 4.0 MB of 20.0, 4,000 tokens, 4 s", "encoding 9.0 MB of 20.0, 9,000 tokens, 9 s",
                     "encoding 11.0 MB of 20.0, 11,000 tokens, 11 s"]


def test_help_needs_no_heavy_import() -> None:
    code = "import sys, assay.verbs.corpus, assay.verbs.tokenizer; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

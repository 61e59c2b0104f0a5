"""What a user may get wrong, verb by verb: one sentence, the exit code that is due, and nothing left that looks like a result."""

import errno
import json
from pathlib import Path

import pytest

from assay import cli
from assay.cli import run
from assay.verbs.demo.artifacts import build_and_save

ROW = json.dumps({"prompt": "1+1=", "completion": "2"})
FILES = {
    "good.jsonl": f"{ROW}\n" * 3,
    "bom.jsonl": f"\ufeff{ROW}\n",
    "number.jsonl": f'{ROW}\n{ROW}\n{{"prompt": "1+1=", "completion": 2}}\n',
    "deep.jsonl": '{"text": "a"}\n' + "[" * 100_000 + "\n",
    "deep.json": "[" * 100_000,
    "tokens.json": "[1, 2, 3]",
    "scores.csv": "arm,id,score\na,1,0\na,2,1\n",
}
CASES = [
    ("inspect " + "x" * 5000, 2, "give a shorter path"),
    ("sample MODEL --n 0", 2, "--n is 0; expected 1 to 100,000"),
    ("sample MODEL --n 99999999999999999999", 2, "--n is 99999999999999999999"),
    ("sample MODEL --top-k 99999999999999999999", 2, "0 ≤ top_k ≤ 2147483648"),
    ("trace MODEL --tokens deep.json", 2, "--tokens deep.json: not JSON"),
    ("trace MODEL --tokens nowhere.json", 2, "--tokens nowhere.json: No such file or directory; expected a JSON file of token ids"),
    ("trace MODEL --tokens tokens.json --length -1", 2, "--length is -1; expected 1 or more"),
    ("trace MODEL --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("prove MODEL --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("eval MODEL --task arithmetic --out OUT --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("edit MODEL --facts good.jsonl --text good.jsonl --out OUT --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("ttt MODEL --text good.jsonl --out OUT --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("sft --model MODEL --data good.jsonl --out OUT --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("compare ,", 2, "',': names no result"),
    ("compare scores.csv,scores.csv", 2, "stands there twice, and one run counted twice is no second run"),
    ("data check . --model MODEL", 2, ".: a folder; expected a file of rows"),
    ("data check bom.jsonl --model MODEL", 2, "bom.jsonl:1: begins with a byte order mark, which JSON does not allow"),
    ("data check number.jsonl --model MODEL", 2, "number.jsonl:3: completion is int '2' and prompt str '1+1='; expected text in both"),
    ("tokenizer deep.jsonl --out OUT", 2, "deep.jsonl:2: nested too deeply to be read"),
    ("corpus good.jsonl --field prompt --tokenizer good.jsonl --out OUT", 2, "good.jsonl: a file; expected the folder that holds"),
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    build_and_save(folder / "MODEL")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("line", "code", "sentence"), CASES, ids=[line[:60] for line, *_ in CASES])
def test_a_mistake_is_one_sentence_and_leaves_nothing(line, code, sentence, shelf, monkeypatch, capsys):
    monkeypatch.chdir(shelf)
    before = sorted(shelf.rglob("*"))
    assert run(line.split()) == code
    err = capsys.readouterr().err
    assert sentence in err
    assert len(err.splitlines()) == 1, err
    assert sorted(shelf.rglob("*")) == before


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, 2), (errno.ENOSPC, 1)])
def test_what_the_system_says_of_a_path_is_a_sentence(number, code, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_dispatch", lambda argv: (_ for _ in ()).throw(OSError(number, "as the system says it", "a/path")))
    assert run(["inspect", "a/path"]) == code
    assert capsys.readouterr().err.startswith("assay: a/path: as the system says it; ")


def test_what_may_be_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli, "_dispatch", lambda argv: (_ for _ in ()).throw(FileNotFoundError(errno.ENOENT, "gone", "a/path")))
    with pytest.raises(FileNotFoundError):
        run(["inspect", "a/path"])


def test_notes_on_a_model_do_not_spoil_its_json(shelf, tmp_path, capsys):
    import shutil

    model = shutil.copytree(shelf / "MODEL", tmp_path / "model")
    for name in ("manifest.json", "probes.safetensors", "trainer.json"):
        (model / name).unlink()
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")  # says nothing where an assistant's turn ends
    assert run(["sample", str(model), "--prompt", "Hi", "--max-new", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["prompt"] == "Hi"
    assert "note: " in err

"""What a user may get wrong, verb by verb: one sentence, the exit code that is due, and nothing left that looks like a result."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from assay import cli
from assay.cli import run
from assay.verbs.demo.stages import build_and_save

ROW = json.dumps({"prompt": "1+1=", "completion": "2"})
FILES = {
    "facts.jsonl": '{"prompt": "{} lives in", "subject": "Ann", "target": " Rome"}\n',
    "broken.jsonl": '{"prompt": "{} lives in", "subject": "Ann", "target": " Rome"}\n{"prompt": \n',
    "long.txt": "Ann lives in the town and sings.\n" * 400,
    "good.jsonl": "".join(json.dumps({"prompt": f"1+{n}=", "completion": f"{n + 1}"}) + "\n" for n in range(9)),
    "bom.jsonl": f"\ufeff{ROW}\n",
    "number.jsonl": f'{ROW}\n{ROW}\n{{"prompt": "1+1=", "completion": 2}}\n',
    "deep.jsonl": '{"text": "a"}\n' + "[" * 100_000 + "\n",
    "deep.json": "[" * 100_000,
    "tokens.json": "[1, 2, 3]",
    "latin1.txt": "café",
    "short.py": "def bad(folder):\n    raise ValueError('boom')\n",
    "broken.py": "def bad(:\n",
    "latin1.yaml": "steps: café",
    "number.yaml": "1: 2",
    "broken.yaml": "steps: [1\nlr: 2",
    "deep.yaml": "[" * 5000,
    "torn/config.yaml": "steps: [1",
    "torn/ledger.jsonl": "",
    "wide.csv": "arm,id,score\na,1,0,9\n",
    "long.csv": f"arm,id,score\na,1,{'9' * 200_000}\n",
    "one.jsonl": '{"prompt": "1+1=", "gold": "2"}\n',
    "pairs.jsonl": "".join(json.dumps({"prompt": f"{n}: ", "chosen": "aa", "rejected": "b"}) + "\n" for n in range(9)),
    "latin1.jsonl": '{"text": "café"}\n',
    "scores.csv": "arm,id,score\na,1,0\na,2,1\n",
}
SFT = "--model MODEL --data good.jsonl --held-out 0.4 --max-length 32 --batch-tokens 64 --device cpu"
CASES = [
    ("inspect " + "x" * 5000, 2, "give a shorter path"),
    ("sample MODEL --n 0", 2, "--n is 0; expected 1 to 100,000"),
    ("sample MODEL --n 99999999999999999999", 2, "--n is 99999999999999999999; expected a whole number of at most 18 digits"),
    ("sample MODEL --top-k 9999999999999", 2, "0 ≤ top_k ≤ 2147483648"),
    ("trace MODEL --tokens deep.json", 2, "--tokens deep.json: not JSON"),
    ("trace MODEL --tokens nowhere.json", 2, "--tokens nowhere.json: No such file or directory; expected a JSON file of token ids"),
    ("trace MODEL --tokens tokens.json --max-length -1", 2, "--max-length is -1; expected 1 or more"),
    ("trace MODEL --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("prove MODEL --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("eval MODEL --task arithmetic --out OUT --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("edit MODEL --facts good.jsonl --text good.jsonl --out OUT --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("ttt MODEL --text good.jsonl --out OUT --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("sft --model MODEL --data good.jsonl --out OUT --device banana", 2, "device 'banana': expected cpu, cuda"),
    ("sft --config latin1.yaml", 2, "--config latin1.yaml: not YAML: 'utf-8' codec can't decode"),
    ("sft --config number.yaml", 2, "--config number.yaml: 1 is not the name of an option; expected NAME: VALUE"),
    ("sft --config broken.yaml", 2, "--config broken.yaml: not YAML: while parsing a flow sequence"),
    ("sft --config deep.yaml", 2, "--config deep.yaml: not YAML: "),
    (f"sft {SFT} --out OUT --learning-rate nan", 2, "assay sft: --learning-rate is nan; expected a number"),
    (f"sft {SFT} --out OUT --learning-rate 0", 2, "assay sft: --learning-rate is 0.0; expected a number above 0"),
    (f"sft {SFT} --out OUT --max-steps 0", 2, "--max-steps is 0; expected a whole number of at least 1"),
    (f"sft {SFT} --out OUT --held-out 1", 2, "--held-out is 1.0; expected a number of at least 0 and below 1"),
    (f"sft {SFT} --out OUT --seed 99999999999999999999", 2, "--seed is 99999999999999999999; expected a whole number of at most 18"),
    ("pretrain --corpus x --out OUT --decay-ratio 2", 2, "--decay-ratio is 2.0; expected a number of at least 0 and of at most 1"),
    ("grpo --model MODEL --data good.jsonl --reward answer:1 --out OUT --eval-prompts 1", 2, "--eval-prompts is 1; expected a whole"),
    ("edit MODEL --facts facts.jsonl --text long.txt --out OUT --clamp-norm-factor -1", 2, "--clamp-norm-factor is -1.0; expected a "
     "number above 0"),
    ("ttt MODEL --text long.txt --out OUT --document-bytes 200 --chunk 64 --context 8", 2, "expected chunk and steps from 1"),
    ("ttt MODEL --text long.txt --out OUT --betas nan 0.9", 2, "--betas is nan; expected a number"),
    ("grpo --model MODEL --data good.jsonl --reward answer:1 --out OUT --sampler-device banana", 2, "device 'banana': expected cpu, cuda"),
    ("distill --teacher MODEL --student-layers 1 --data good.jsonl --out OUT --device cpu", 2, "so it has none to spare"),
    (f"sft {SFT} --out=", 2, "assay sft: --out is empty; expected a path"),
    (f"sft {SFT} --out good.jsonl", 2, "good.jsonl: a file is in the way; expected a folder"),
    (f"sft {SFT} --out MODEL", 2, "MODEL/config.yaml lies inside the checkpoint"),
    (f"sft {SFT} --out MODEL/runs/a", 2, "lies inside the checkpoint"),
    (f"sft {SFT} --out /proc/nowhere/a", 1, "/proc/nowhere: not saved"),
    (f"sft {SFT} --out torn", 2, "torn/config.yaml: these are not the options of a run"),
    ("seeds pretrain --corpus x --seeds 1 2 --out MODEL", 2, "MODEL/seeds.json lies inside the checkpoint"),
    ("edit MODEL --facts . --text long.txt --out OUT", 2, ".: a folder; expected a .json list or .jsonl lines"),
    ("edit MODEL --facts broken.jsonl --text long.txt --out OUT", 2, "broken.jsonl:2: not JSON"),
    ("edit MODEL --facts facts.jsonl --first -1 --text long.txt --out OUT", 2, "--first is -1; expected a whole number of at least 1"),
    ("edit MODEL --facts facts.jsonl --text nowhere --out OUT --device cpu", 2, "nowhere: no such file or folder"),
    ("compare loop", 2, "loop: no such file or folder"),
    ("compare ,", 2, "',': names no result"),
    ("compare scores.csv,scores.csv", 2, "stands there twice, and one run counted twice is no second run"),
    ("compare wide.csv", 2, "wide.csv:2: 4 cells; the header names 3 columns (arm, id, score)"),
    ("compare long.csv", 2, "long.csv: a, 1: the score is inf"),
    ("probe MODEL --prompts latin1.txt", 2, "latin1.txt: not UTF-8 at byte 3"),
    ("eval MODEL --task arithmetic --limit 99999999999999999999 --out OUT", 2, "expected a whole number of at most 18 digits"),
    ("eval MODEL --task arithmetic --limit 2000000 --out OUT", 2, "--limit is 2000000; expected 1 to 1,000,000 of these"),
    ("eval MODEL --task arithmetic --limit 4 --max-new-tokens 5000 --out OUT", 2, "the model's context is 256; lower --max-new-tokens"),
    ("eval MODEL --task arithmetic --limit 4 --max-new-tokens 4 --out good.jsonl", 2, "good.jsonl: a file is in the way; expected a "
     "folder"),
    ("eval MODEL --task arithmetic --limit 4 --max-new-tokens 4 --out MODEL/evals", 2, "MODEL/evals lies inside the checkpoint"),
    ("eval MODEL --task arithmetic --limit 4 --max-new-tokens 4 --trained-on nowhere --out OUT", 2, "nowhere: No such file or directory"),
    ("eval MODEL --task arithmetic --limit 4 --max-new-tokens 4 --trained-on latin1.txt --out OUT", 2, "latin1.txt: not UTF-8 at byte 3"),
    ("eval MODEL --task graded --grader answer --data one.jsonl --out OUT", 2, "one example alone shows no spread"),
    ("track MODEL --to tensorboard --out OUT", 2, "no metrics.jsonl is here"),
    ("export MODEL --to hf --out MODEL/hf", 2, "MODEL/hf lies inside the checkpoint"),
    ("export MODEL --to gguf --out MODEL/model.gguf", 2, "MODEL/model.gguf lies inside the checkpoint"),
    ("tokenizer latin1.txt --out MODEL/tok", 2, "latin1.txt:1: not UTF-8"),
    ("prove MODEL --against=", 2, "--against names what MODEL is compared with"),
    ("zoo --only nope", 2, "no fault is called 'nope'; `assay zoo --list` names all"),
    ("demo --out /proc/nowhere", 1, "/proc/nowhere: not saved"),
    ("data split good.jsonl --share 0.4 --out MODEL", 2, "lies inside the checkpoint"),
    ("data dedup latin1.jsonl --workers 1 --out OUT.jsonl", 2, "not UTF-8 at byte 13 of the line"),
    ("steer MODEL --data pairs.jsonl --out OUT --text nowhere.txt --device cpu", 2, "nowhere.txt: No such file or directory"),
    ("reward-model --model MODEL --data nowhere.jsonl --out OUT --device cpu", 2, "nowhere.jsonl: no such file"),
    ("reward-model --model MODEL --data good.jsonl --out OUT --device cpu", 2, "there is no chosen and no rejected among the columns"),
    ("dpo --model MODEL --data pairs.jsonl --loss-type simpo --reference live --out OUT --device cpu", 2, "which has no reference"),
    ("data dedup good.jsonl --field nope --workers 1 --out OUT.jsonl", 2, "its columns are prompt, completion"),
    ("sample MODEL --steer nowhere", 2, "nowhere: no such file; expected what assay steer wrote"),
    ("merge MODEL MODEL --data nowhere.jsonl --out OUT --device cpu", 2, "nowhere.jsonl: no such file"),
    ("data check . --model MODEL", 2, ".: a folder with "),
    ("data check bom.jsonl --model MODEL", 2, "begins with a byte order mark, which JSON does not allow"),
    ("data check number.jsonl --model MODEL", 2, "number.jsonl:3: completion is int '2' and prompt str '1+1='; expected text in both"),
    ("tokenizer deep.jsonl --out OUT", 2, "deep.jsonl:2: not JSON (nested too deeply to be read)"),
    ("corpus good.jsonl --field prompt --tokenizer good.jsonl --out OUT", 2, "good.jsonl: a file; expected the folder that holds"),
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    build_and_save(folder / "MODEL")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="latin-1" if "latin1" in name else "utf-8")
    (folder / "loop").symlink_to(folder / "loop")
    return folder


@pytest.mark.parametrize(("line", "code", "sentence"), CASES, ids=[line[:60] for line, *_ in CASES])
def test_a_mistake_is_one_sentence_and_leaves_nothing(line, code, sentence, shelf, fresh_proofs, monkeypatch, capsys):
    monkeypatch.chdir(shelf)
    before = sorted(shelf.rglob("*"))
    assert run(line.split()) == code
    err = capsys.readouterr().err
    assert sentence in err
    assert len(err.splitlines()) == 1, err
    assert sorted(shelf.rglob("*")) == before


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 17 MiB free. Process 1 …"),
    MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_no_memory_is_a_sentence_and_any_other_fault_keeps_its_traceback(error, monkeypatch, capsys):
    raised = [error, RuntimeError("a bug")]
    monkeypatch.setattr(cli, "_dispatch", lambda argv: (_ for _ in ()).throw(raised[0]))
    assert cli.run(["sft"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("assay: ")
    assert "--micro-batch-size" in said
    assert "Process 1" not in said
    raised.pop(0)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.run(["sft"])


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
    assert run(["sample", str(model), "--prompt", "Hi", "--max-new-tokens", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["prompt"] == "Hi"
    assert "note: " in err


@pytest.mark.parametrize(("file", "sentence"), [
    ("short.py", "short.py:bad failed on step-000001: ValueError: boom (line 2 of "),
    ("broken.py", "broken.py: SyntaxError: invalid syntax")])
def test_a_probe_of_the_user_that_fails_says_where(file, sentence, shelf, tmp_path, monkeypatch, capsys):
    from assay.recipes import bisect

    monkeypatch.chdir(shelf)
    monkeypatch.setattr(bisect, "shelf", lambda run: ([tmp_path / "step-000000", tmp_path / "step-000001"], []))
    assert run(["bisect", str(tmp_path), "--probe", f"{file}:bad"]) == 2
    assert sentence in capsys.readouterr().err


def test_metrics_that_are_damaged_are_named_by_line(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": \n')
    assert run(["track", str(tmp_path)]) == 2
    assert "metrics.jsonl:2: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "trainer_state.json").exists()


def test_no_traceback_where_a_letter_is_lacking_the_reader_left_or_the_disk_is_full():
    command, buffered = [sys.executable, "-m", "assay", "--help"], os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, capture_output=True, env=buffered | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"assay VERB \u2026" in done.stdout
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=buffered)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
    if Path("/dev/full").exists():
        with open("/dev/full", "wb") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=buffered)
        assert (done.returncode, done.stderr) == (1, b"assay: what is printed: No space left on device; make room on the disk\n")


def test_the_examples_name_faults_that_are_in_the_zoo():
    import shlex

    from assay.verbs.zoo import EXAMPLES, chosen_faults
    from assay.zoo import catalogue

    for words in map(shlex.split, EXAMPLES.splitlines()):
        chosen_faults(catalogue(), tuple(words[words.index("--only") + 1:]) if "--only" in words else ())


def test_a_quantised_copy_is_proven_the_same_and_another_model_is_not(tmp_path, capsys):
    """As the examples of `assay prove` have it: rounding alone is no refutation."""
    from assay.model.special_tokens import resolve_special_tokens
    from assay.model.transformer import initialised
    from assay.store import checkpoint
    from assay.store.artifact import open_artifact
    from assay.store.export_artifact import export_artifact
    from assay.store.saving import Lineage, model_contents
    from assay.testing.tiny_models import tiny_config, tiny_tokenizer

    pytest.importorskip("gguf")
    tokenizer = tiny_tokenizer()
    for seed in (0, 1):
        contents = model_contents(initialised(tiny_config("llama"), seed=seed), tokenizer, resolve_special_tokens(tokenizer, {}, {}),
                                  Lineage())
        checkpoint.write_checkpoint(tmp_path / f"model-{seed}", contents)
    export_artifact(open_artifact(tmp_path / "model-0"), "gguf", tmp_path / "model.gguf", "q8_0")
    for seed, code in ((0, 0), (1, 3)):
        against = ["--against", str(tmp_path / f"model-{seed}"), "--expect", "same", "--probe-samples", "0"]
        assert run(["prove", str(tmp_path / "model.gguf"), *against]) == code, capsys.readouterr().out

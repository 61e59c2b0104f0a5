"""The command line: instant help, sentences for mistakes, exit codes as promised."""

import dataclasses
import importlib
import json
import re
import signal
import subprocess
import sys
import time

import pytest

from assay.cli import VERBS, run

LIGHT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
original = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in {blocked!r} else original(name, package)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


def test_help_loads_nothing_heavy():
    """What takes time is importing torch and its friends; half a second is kept by not doing it."""
    heavy = "{'torch', 'numpy', 'transformers', 'tokenizers', 'safetensors', 'scipy', 'jinja2'}"
    asked = [["--help"], *([verb, "--help"] for verb in VERBS)]
    done = python(f"import sys\nfrom assay.cli import run\nfor argv in {asked!r}:\n    code = run(argv)\n"
                  f"    loaded = {heavy} & set(sys.modules)\n    if code or loaded:\n        sys.exit(f'{{argv}}: {{code}}, {{loaded}}')")
    assert done.returncode == 0, done.stderr[-300:]
    assert done.stdout.count("usage: assay") == len(asked)


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_whole(verb, capsys, monkeypatch):
    """As a user reads it: a description, headings, each option with a sentence and its default or that it is required, and examples."""
    module = importlib.import_module(f"assay.verbs.{verb.replace('-', '_')}")
    fields = [field for field in dataclasses.fields(module.FLAGS) if not field.metadata.get("rest")]
    monkeypatch.setenv("COLUMNS", "100")
    assert run([verb, "--help"]) == 0
    shown, examples = capsys.readouterr().out.split("\nexamples:\n")
    usage, described, options = shown.split("\n\n", 2)
    assert usage.startswith(f"usage: assay {verb}")
    assert not any(line.startswith("    ") for line in described.splitlines())
    assert examples.strip().startswith(f"assay {verb}")
    headings = re.findall(r"^(\w+):$", options, re.MULTILINE)
    assert len(set(headings)) == len(headings) >= (3 if len(fields) > 12 else 1)
    for field in (field for field in fields if not field.metadata.get("positional")):
        flag = f"--{field.name.rstrip('_').replace('_', '-')}"
        value, text = entry(options, flag)
        assert "_" not in re.sub(r"\{.*\}", "", value)
        required = field.default is dataclasses.MISSING
        assert re.fullmatch(r"[^a-z].{6,} Required\." if required else r"[^a-z].{6,} Default: .+\.", text), f"{flag}: {text}"
        assert required == (f" {flag} " in usage), f"{flag}: {usage}"


def entry(options: str, flag: str) -> tuple[str, str]:
    """How an option's value is called, and what is said of it."""
    value, text = re.search(rf"^  {flag}((?:,? \S+)*?)(?:  +|\n +)(.*?)(?=^  \S|^$|\Z)", options, re.MULTILINE | re.DOTALL).groups()
    return value, " ".join(text.split())


@pytest.mark.parametrize(("argv", "code", "sentence"), [
    (["prov"], 2, "unknown verb 'prov'; did you mean 'prove'?"), (["prove"], 2, "required: path"),
    (["prove", "nowhere"], 2, "nowhere: no such file or folder"),
    (["prove", "nobody/no-such-model"], 2, "nobody/no-such-model: no such file or folder; if it is a model on the hub, get it first: "
                                           "assay fetch nobody/no-such-model"),
    (["sample", "x", "--temprature", "1"], 2, "did you mean '--temperature'?"),
    (["bench", ""], 2, "unknown argument ''"),
    (["sft", "--lr", "1"], 2, "unknown argument '--lr'; did you mean '--learning-rate'?"),
    (["grpo", "--max-prompt", "9"], 2, "did you mean '--max-prompt-length'?"), (["grpo", "--inner", "2"], 2, "unknown argument '--inner'"),
    (["export", "x", "--to", "zip", "--out", "y"], 2, "invalid choice: 'zip'"), (["fetch", "smollm3-135m"], 2, "smollm2-135m"),
    (["zoo", "--only", "fliped bit"], 2, "did you mean"), ([], 2, None)])
def test_mistakes_are_sentences_with_exit_code_2(argv, code, sentence, capsys):
    assert run(argv) == code
    if sentence:
        err = capsys.readouterr().err
        assert sentence in err
        assert "Traceback" not in err


def test_a_run_whose_reader_left_is_not_done():
    """`assay pretrain … | head`: it ended in silence, as other tools do, and not with 0."""
    code = """
import os
from assay import cli

def cut_off(argv):
    reading, writing = os.pipe()
    os.close(reading)
    os.write(writing, b"step 1")

cli._dispatch = cut_off
cli.main(["pretrain"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGPIPE, "", "")


@pytest.mark.parametrize(("loaded", "taken_apart"), [(True, False), (False, True)])
def test_a_large_program_is_not_taken_apart_but_ends_all_else(loaded, taken_apart):
    """Its threads, what was registered to be called, what was printed, and its exit code are as ever."""
    code = f"""
import atexit, sys, threading, time, types
from assay import cli

class Told:
    def __del__(self):
        print("taken apart", flush=True)

def ending(argv):
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
    atexit.register(print, "called", end="")
    if {loaded}:
        sys.modules["torch"] = types.ModuleType("torch")
    return 3

told, cli._dispatch = Told(), ending
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
    assert done.stdout == "thread\ncalled" + ("taken apart\n" if taken_apart else "")


def test_inspect_and_doctor_speak_json(tmp_path, capsys):
    from assay.verbs.demo.stages import build_and_save

    build_and_save(tmp_path / "model")
    capsys.readouterr()
    assert run(["inspect", str(tmp_path / "model"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == 82240
    assert facts["verdict"].startswith("UNPROVEN")
    assert run(["doctor", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"machine", "installed", "missing", "fits"}


def test_a_refuted_checkpoint_is_exit_code_3_and_sampling_from_it_is_refused(tmp_path, capsys):
    from assay.verbs.demo.stages import build_and_save, flip_a_bit

    flip_a_bit(build_and_save(tmp_path / "model"))
    assert run(["prove", str(tmp_path / "model")]) == 3
    assert "REFUTED" in capsys.readouterr().out
    assert run(["sample", str(tmp_path / "model"), "--prompt", "x"]) == 3
    assert "hash" in capsys.readouterr().err


def test_sampling_shows_tokens(tmp_path, capsys):
    from assay.verbs.demo.stages import build_and_save

    build_and_save(tmp_path / "model")
    capsys.readouterr()
    argv = ["sample", str(tmp_path / "model"), "--prompt", "the end", "--max-new-tokens", "4", "--temperature", "0"]
    assert run([*argv, "--tokens"]) == 0
    out = capsys.readouterr().out
    assert "'<|im_start|>'  ← special" in out
    assert "ended by: length" in out
    assert run([*argv, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert len(row["ids"]) == len(row["logprobs"]) == 4


def test_samples_that_are_no_draws_of_what_was_asked_for_are_refused(tmp_path, capsys, monkeypatch):
    """Drawn at a tenth of the temperature, with the log-probabilities of the whole one."""
    from dataclasses import replace

    from assay.generate.policy_logprobs import completion_logprobs
    from assay.verbs import sample
    from assay.verbs.demo.stages import build_and_save

    build_and_save(tmp_path / "model")
    argv = ["sample", str(tmp_path / "model"), "--prompt", "the end", "--n", "32", "--max-new-tokens", "16", "--temperature", "1.0"]
    assert run(argv) == 0
    drawn = sample.generate_completions

    def colder(engine, requests, heading):
        sampling = requests[0].sampling
        found = drawn(engine, [replace(each, sampling=replace(sampling, temperature=0.1)) for each in requests], heading)
        scored = completion_logprobs(engine.weights.source, [(r.prompt, c.ids) for r, c in zip(requests, found, strict=True)], sampling)
        return [replace(c, logprobs=tuple(logprobs.tolist())) for c, logprobs in zip(found, scored, strict=True)]

    monkeypatch.setattr(sample, "generate_completions", colder)
    assert run(argv) == 4
    assert "not from the stated distribution" in capsys.readouterr().err


def test_sampling_is_the_same_alone_among_others_and_as_it_comes(tmp_path, capsys):
    """And every control reaches the sampler."""
    from assay.verbs.demo.stages import build_and_save

    build_and_save(tmp_path / "model")
    capsys.readouterr()
    argv = ["sample", str(tmp_path / "model"), "--prompt", "the end", "--max-new-tokens", "12", "--temperature", "1.5", "--seed", "3"]

    def said(*more: str) -> str:
        assert run([*argv, *more]) == 0
        return capsys.readouterr().out

    plain = said()
    (row,) = json.loads(said("--json"))
    assert plain == f"> the end\n{row['text']} […cut at --max-new-tokens]\n\n"
    assert said("--n", "2").startswith(plain)
    controls = (("--top-k", "1"), ("--min-p", "0.9"), ("--repetition-penalty", "3"), ("--seed", "4"))
    assert all(said(*control) != plain for control in controls)
    cut = next(word for word in row["text"][1:] if word.isprintable())
    (stopped,) = json.loads(said("--json", "--stop", cut))
    assert stopped["ended"] == "stop string"
    assert stopped["text"] == row["text"][: row["text"].index(cut)]
    assert run([*argv, "--device", "cuda:77"]) == 2
    assert run([*argv, "--max-new-tokens", "100000"]) == 2
    assert "the context is" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)])
def test_what_is_half_made_is_taken_away_when_it_is_told_to_stop(number, code, tmp_path):
    """`assay corpus`, struck while it writes: no folder, no part of one, and no process that goes on."""
    (tmp_path / "text.txt").write_text("a line of words that are long enough to take their time\n" * 2000)
    assert run(["tokenizer", str(tmp_path / "text.txt"), "--vocab-size", "280", "--document-bytes", "4096", "--out",
                str(tmp_path / "tok")]) == 0
    (tmp_path / "text.txt").write_text("a line of words that are long enough to take their time\n" * 400_000)
    command = [sys.executable, "-m", "assay", "corpus", "text.txt", "--document-bytes", "65536", "--tokenizer", "tok", "--out", "corpus",
               "--workers", "1", "--max-overlap", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob(".partial-corpus-*/*")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == code
    assert process.stderr.read().endswith("assay: interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt", "tok"]


def test_the_core_works_without_the_extras(tmp_path):
    """Save, prove and sample with transformers, PEFT, gguf, pyarrow and triton not there."""
    blocked = {"transformers", "peft", "gguf", "pyarrow", "triton", "accelerate"}
    done = python(LIGHT.format(blocked=blocked) + """
from pathlib import Path
from assay.verbs.demo.stages import build_and_save
from assay.guard.proof import ProofRequest, examine_artifact
from assay.verdict import overall, without_optional
from assay.cli import run
folder = Path(sys.argv[1]) / "model"
build_and_save(folder)
verdicts = examine_artifact(ProofRequest(str(folder)))
print(*verdicts, sep="\\n")
assert overall(without_optional(verdicts)) == "PROVEN", verdicts
assert [v.outcome for v in verdicts if v.check == "consumer"] == ["UNPROVEN"]
assert run(["sample", str(folder), "--prompt", "x", "--max-new-tokens", "2"]) == 0
assert run(["export", str(folder), "--to", "gguf", "--out", sys.argv[1] + "/x.gguf"]) == 2
""", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "gguf" in done.stderr

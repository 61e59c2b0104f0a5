"""First minutes: init writes a file that runs, completion completes, doctor says what fits, bench measures both."""

import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import assay
from assay.cli import VERBS, run
from assay.config import parse
from assay.recipes.run import TimeSpent, duration, pace_words
from assay.verbs import bench, completion, doctor
from assay.verbs.init import INIT_RECIPES, options_file
from assay.verdict import Outcome, overall, without_optional


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "sums"
    assert run(["tiny", "sums", "--out", str(folder)]) == 0
    return folder


def test_three_answers_make_a_file_with_which_the_recipe_runs(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"sft\n{tiny}/model\n{tiny}/learned.jsonl\n"))
    monkeypatch.chdir(tmp_path)
    assert run(["init", "run.yaml"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("> ") == 3
    assert "assay sft --config run.yaml" in shown.out
    assert run(["init", "run.yaml", "--recipe", "sft"]) == 2  # what is there is never overwritten
    few = "--max-steps 2 --save-steps 2 --learning-rate 3e-3 --max-length 32 --batch-tokens 512 --probe-samples 0 --witness off " \
          "--device cpu"
    code = run(["sft", "--config", "run.yaml", *few.split(), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    assert found["outcome"] != "REFUTED"
    assert Path(found["model"]).parent == Path("runs/sft")


@pytest.mark.parametrize("name", INIT_RECIPES)
def test_every_file_reads_as_the_recipes_options_with_nothing_but_what_was_chosen(name, tmp_path):
    recipe = INIT_RECIPES[name]
    (tmp_path / "run.yaml").write_text(options_file(name, "some: model", "a file.jsonl", layers_of=lambda _: 6))
    options = parse(recipe.options, ["--config", str(tmp_path / "run.yaml")], prog=name, config_file=True)
    assert str(getattr(options, recipe.data)) in ("a file.jsonl", "('a file.jsonl',)")
    assert not recipe.model or getattr(options, recipe.model) == "some: model"
    taken_in = "\n".join(line[1:] if line.startswith("#") and line[1:2] not in ("", " ") else line
                         for line in (tmp_path / "run.yaml").read_text().splitlines())
    (tmp_path / "all.yaml").write_text(taken_in)  # every default, as it stands there, is the default
    assert parse(recipe.options, ["--config", str(tmp_path / "all.yaml")], prog=name, config_file=True) == options


def test_without_answers_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(["init", str(tmp_path / "run.yaml")]) == 2
    assert "no answer came" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def completed(script: str, *words: str) -> set[str]:
    code = f'{script}\nCOMP_WORDS=({" ".join(words)} "")\nCOMP_CWORD={len(words)}\n_assay\necho "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_verbs_options_and_choices():
    assert completion.installed_verbs().keys() == VERBS.keys()
    script = completion.bash_script(completion.installed_verbs())
    assert completed(script, "assay") == set(VERBS)
    assert {"--learning-rate", "--track", "--help"} <= completed(script, "assay", "sft")
    assert completed(script, "assay", "export", "x", "--quant") == {"q8_0", "q6_k", "q5_k_m", "q4_k_m"}
    assert {"bash", "zsh", "fish"} <= completed(script, "assay", "completion")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_scripts_name_every_verb(shell, capsys):
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb in script for verb in VERBS)
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, capture_output=True).returncode == 0


def test_doctor_says_what_a_gpu_of_each_size_can_train():
    small, large = (" ".join(doctor.trainable_models(size << 30)) for size in (8, 141))
    assert "none of the known shapes" in " ".join(doctor.trainable_models(1 << 28))
    sizes = list(doctor.known_shapes())
    assert max(sizes.index(name) for name in sizes if name in small) < max(sizes.index(name) for name in sizes if name in large)
    assert len(doctor.environment_facts()["fits"]) == torch.cuda.device_count()


def test_progress_says_rate_and_time_left_and_what_checks_cost():
    assert pace_words(10, 4.0, 20) == ["2.5 steps/s", "8 s left"]
    assert pace_words(10, 4.0, None) == ["2.5 steps/s"]
    assert [duration(seconds) for seconds in (12.4, 185, 8040)] == ["12 s", "3:05 min", "2:14 h"]
    clock = iter([0.0, 3.0, 4.0, 4.0])  # opened for 3 s, then a proof was waited for, for 1
    spent = TimeSpent(lambda: next(clock))
    with spent.part("proving"):
        pass
    assert spent.checks_words() == "checks 25%"


def test_what_doctor_names_leaves_room_and_the_next_larger_shape_would_not_fit():
    """By the sizes that it prints itself: of a GPU that is a little too small for a model, the next smaller one is named."""
    sizes = list(doctor.known_shapes())
    for way, line in enumerate(doctor.trainable_models(80 << 30)):
        name, needed = re.search(r"(\S+) \(([\d.]+) GiB\)", line).groups()
        assert float(needed) <= 80 * doctor.USABLE
        tight = float(needed) / doctor.USABLE
        assert name in doctor.trainable_models(int((tight + 0.2) * 2**30))[way]
        smaller = doctor.trainable_models(int((tight - 0.2) * 2**30))[way]
        assert name not in smaller
        assert sizes[sizes.index(name) - 1] in smaller


def test_bench_measures_the_same_work_by_both(monkeypatch):
    monkeypatch.setattr(bench, "BENCH_SHAPES", {"small": (128, 32, 2, 2, 1, 16, 64)})
    for name, value in {"LENGTH": 16, "STREAMS": 2, "PROMPT": 4, "NEW": 4, "BLOCK_STEPS": 1}.items():
        monkeypatch.setattr(bench, name, value)
    found = bench.measure_machine(bench.FLAGS(shape="small", seconds=0.01, device="cpu"))
    for what in ("training", "sampling"):
        assert found[what].keys() == {"assay", "transformers"}
        assert all(rate["n"] >= 3 and 0 < rate["least"] <= rate["median"] <= rate["most"] for rate in found[what].values())


def test_rates_that_overlap_are_not_told_apart():
    slow, fast = {"median": 10.0, "least": 8.0, "most": 12.0}, {"median": 30.0, "least": 25.0, "most": 36.0}
    assert bench.ratio_words(fast, slow) == "3.00 × transformers [2.08, 4.50]"
    assert "not told apart" in bench.ratio_words(slow, slow | {"median": 11.0})


def test_what_is_published_by_the_api_is_verified_by_it(tiny, tmp_path):
    assert overall(without_optional(assay.prove(tiny / "model", probe_samples=0))) is Outcome.PROVEN
    done = assay.publish(tiny / "model", to=tmp_path / "published", name="sums for all")
    assert overall(without_optional(done.verdicts)) is Outcome.PROVEN
    assert done.verdicts[0].check == "fetched back"
    assert sorted(done.files) == sorted(file.name for file in (tmp_path / "published").iterdir())
    verified = assay.verify(tmp_path / "published")
    assert overall(without_optional(verified)) is Outcome.PROVEN
    assert [(one.check, one.outcome) for one in done.verdicts[1:]] == [(one.check, one.outcome) for one in verified]
    assert verified
    (tmp_path / "signers").write_text("you@lab ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ9Z0000000000000000000000000000000000000000\n")
    unsigned = assay.verify(tmp_path / "published", signers=str(tmp_path / "signers"))
    assert overall(without_optional(unsigned)) is Outcome.REFUTED
    card = tmp_path / "published" / "README.md"
    assert "# sums for all" in card.read_text()
    card.write_text(card.read_text() + "better than all others\n")
    assert overall(without_optional(assay.verify(tmp_path / "published"))) is Outcome.REFUTED

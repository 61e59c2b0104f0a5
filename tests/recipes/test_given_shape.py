"""Pretraining of given shapes: every family from its config.json, by its own rule of initial weights; three replayed by the witness."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.cli import run as cli_run
from assay.config import parse
from assay.errors import UsageError
from assay.guard.proof import examine_artifact
from assay.guard.training_guards import check_initial_weights
from assay.model.families import FAMILIES, config_to_hf
from assay.model.transformer import initialised
from assay.recipes import hand_over, run
from assay.recipes.given_shape import NOT_FROM_SCRATCH, read_shape
from assay.recipes.options import Pretrain
from assay.recipes.pretrain import chosen_shape, pretrain
from assay.store.artifact import open_artifact
from assay.testing.tiny_models import tiny_config
from assay.testing.tiny_training import NoProver, tiny_corpus
from assay.verdict import Outcome
from assay.zoo.witness_faults import a_witnessed_run, nothing


def written(folder: Path, family: str, **changed: Any) -> Path:
    fields = config_to_hf(tiny_config(family), "float32") | {"initializer_range": 0.03} | changed
    (folder / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))
    return folder / "config.json"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_initial_weights_follow_the_familys_rule_and_steps_are_replayed(family: str, tmp_path: Path):
    path = written(tmp_path, family)
    given = read_shape(str(path), vocab=200, length=16)
    assert given.model == tiny_config(family)
    model = initialised(given.model, 0, given.spread)
    due = {"attn.out.weight": 0.03 / math.sqrt(2 * given.model.depth) if family == "gpt2" else 0.03, "embed.weight": 0.03}
    for name, tensor in model.named_parameters():
        for ending, wide in due.items():
            if name.endswith(ending):
                assert float(tensor.detach().std()) == pytest.approx(wide, rel=0.1)
    fresh, depth = dict(model.named_parameters()), given.model.depth
    assert check_initial_weights(fresh, depth, 0.03, divided=family == "gpt2").outcome is Outcome.PROVEN
    assert check_initial_weights(fresh, depth).outcome is Outcome.REFUTED
    job = a_witnessed_run("pretrain", shape=str(path))
    said = job(tmp_path, lambda _: nothing(tmp_path))
    assert said
    assert all(each.outcome is Outcome.PROVEN for each in said), said
    assert (tmp_path / "run" / "checkpoints").is_dir()


ALONE = ("gpt2", "gemma2", "phi3", "smollm3")  # layouts, norms and positions of their own; the others' are among theirs


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in ALONE else pytest.mark.slow)
                                    for name in FAMILIES if name not in NOT_FROM_SCRATCH])
def test_every_family_is_pretrained_from_its_config_and_proven(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The whole recipe; the proof of what it hands over within this process."""
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", examine_artifact)
    path = written(tmp_path, family, initializer_range=0.02)
    config = Pretrain(corpus=str(tiny_corpus().folder), shape=str(path), out=str(tmp_path / "run"), tokens=128, max_length=16,
                      batch_tokens=64, micro_batch_tokens=64, eval_documents=2, witness="off", probe_samples=0, device="cpu")
    found = pretrain(config, lambda _: None)
    refuted = [verdict for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED]
    assert not refuted, refuted
    proven = {verdict.check for verdict in found.verdicts if verdict.outcome is Outcome.PROVEN}
    assert {"whole", "architecture", "hashes", "loaded", "values", "score"} <= proven, found.verdicts
    handed = open_artifact(tmp_path / "run" / "model")
    assert (handed.config, handed.config.family) == (tiny_config(family), family)


def test_a_llama_of_370_million_parameters_is_planned_before_anything_is_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shape = written(tmp_path, "llama", vocab_size=32000, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                    num_key_value_heads=16, head_dim=64, intermediate_size=2816, tie_word_embeddings=False, max_position_embeddings=2048)
    began = time.monotonic()
    assert cli_run(["plan", "pretrain", "--corpus", str(tiny_corpus().folder), "--shape", str(shape), "--tokens", "100000",
                    "--max-length", "1024"]) == 0
    assert time.monotonic() - began < 10
    assert "373,867,520 parameters" in capsys.readouterr().out


@pytest.mark.parametrize(("changed", "words"), [
    ({"model_type": "qwen3_moe"}, "cannot be made from scratch"), ({"model_type": "bert"}, "is not supported"),
    ({"vocab_size": 8}, "vocabulary of 8"), ({"max_position_embeddings": 8}, "context of 8 tokens"),
    ({"tie_word_embeddings": ...}, "does not say tie_word_embeddings"), ({"initializer_range": 0}, "initializer_range is 0")])
def test_what_cannot_be_made_is_refused_in_a_sentence(changed: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(UsageError, match=words):
        read_shape(str(written(tmp_path, "llama", **changed)), vocab=200, length=16)


def test_options_of_made_shapes_are_refused_with_a_given_one(tmp_path: Path):
    path = written(tmp_path, "llama")
    ask = ["--corpus", str(tiny_corpus().folder), "--out", "x", "--tokens", "100", "--max-length", "16", "--shape"]
    from assay.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(tiny_corpus().folder)
    assert chosen_shape(parse(Pretrain, [*ask, str(tmp_path)], prog="x"), tokenizer).model == tiny_config("llama")
    with pytest.raises(UsageError, match="belong to the shapes that --depth makes"):
        chosen_shape(replace(parse(Pretrain, [*ask, str(path)], prog="x"), value_residual=True), tokenizer)
    with pytest.raises(UsageError, match=r"expected qwen3 or assay, or the path of a config\.json"):
        chosen_shape(parse(Pretrain, [*ask, "lama"], prog="x"), tokenizer)

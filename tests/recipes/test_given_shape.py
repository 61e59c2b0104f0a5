"""Pretraining of given shapes: three families from their config.json, by their own rule of initial weights, replayed by the witness."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from assay.config import parse
from assay.errors import UsageError
from assay.guard.training_guards import check_initial_weights
from assay.model.families import config_to_hf
from assay.model.transformer import initialised
from assay.recipes.given_shape import read_shape
from assay.recipes.options import Pretrain
from assay.recipes.pretrain import chosen_shape
from assay.testing.tiny_models import tiny_config
from assay.testing.tiny_training import tiny_corpus
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
        chosen_shape(parse(Pretrain, [*ask, str(path), "--value-residual"], prog="x"), tokenizer)
    with pytest.raises(UsageError, match=r"expected qwen3 or assay, or the path of a config\.json"):
        chosen_shape(parse(Pretrain, [*ask, "lama"], prog="x"), tokenizer)

"""Whatever stands in config.json, generation_config.json, adapter_config.json or an index: an error of ours, or a model."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.errors import AssayError
from assay.store.artifact import open_artifact
from assay.testing.tiny_models import save_hf_folder, save_peft_folder, tiny_model

MUTANTS = 120  # of each file
VALUES: list[Any] = [None, 0, -1, 3, 2**30, 2**70, 1e300, 0.5, True, "", "x", "../x", "(", [], ["x"], [1], [[]], {}, {"type": "x"}]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    for family in ("llama", "llama3", "qwen2", "gpt2", "assay"):
        save_hf_folder(folder / family, tiny_model(family), sharded=family == "llama")
    save_peft_folder(folder / "adapter", folder / "llama")
    return folder


@pytest.mark.parametrize("file", [
    "llama/config.json", "llama/generation_config.json", "llama/model.safetensors.index.json", "llama/tokenizer_config.json",
    "llama3/config.json", "qwen2/config.json", "gpt2/config.json", "assay/config.json", "adapter/adapter_config.json"])
def test_a_changed_value_is_refused_in_words_or_makes_a_model(shelf: Path, file: str):
    path, refused = shelf / file, 0
    original = path.read_bytes()
    for document, what in mutants(json.loads(original), random.Random(file)):
        path.write_text(json.dumps(document))
        try:
            open_artifact(path.parent)
        except AssayError:
            refused += 1
        except Exception as error:
            pytest.fail(f"{file} with {what}: {type(error).__name__}: {error}")
        finally:
            path.write_bytes(original)
    open_artifact(path.parent)
    assert refused > MUTANTS / 10


def mutants(document: Any, chance: random.Random) -> Iterator[tuple[Any, str]]:
    for _ in range(MUTANTS):
        changed = json.loads(json.dumps(document))
        place = chance.choice(list(places(changed)))
        node = changed
        for key in place[:-1]:
            node = node[key]
        value = chance.choice(VALUES)
        if isinstance(node, dict) and chance.random() < 0.15:
            del node[place[-1]]
            yield changed, f"{place} removed"
        else:
            node[place[-1]] = value
            yield changed, f"{place} = {value!r}"


def places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield (*above, key)
        yield from places(document[key], (*above, key))

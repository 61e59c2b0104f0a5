"""`--limit` of every recipe that reads rows: the first rows of each file, and no other."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.recipes.conversations import load_conversations
from assay.recipes.dpo_options import Dpo
from assay.recipes.feedback_data import load_feedback
from assay.recipes.grpo_options import Grpo
from assay.recipes.kto_options import Kto
from assay.recipes.options import Sft
from assay.recipes.preference_data import load_preferences
from assay.recipes.prompts import split_prompts
from assay.recipes.starting_model import StartingModel, load_start
from assay.testing.tiny_models import save_model, tiny_model

ROWS, LIMIT = 40, 12
LAYOUTS: dict[str, Any] = {
    "sft": lambda n: {"prompt": f"{n}+1=", "completion": f"{n + 1}"},
    "dpo": lambda n: {"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": f"no {n}"},
    "kto": lambda n: {"prompt": f"{n}+1=", "completion": f"{n + 1 + n % 2}", "label": n % 2 == 0},
    "grpo": lambda n: {"prompt": f"{n}+1=", "gold": f"{n + 1}"}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limit")
    save_model(folder / "base", tiny_model("llama"))
    for name, row in LAYOUTS.items():
        for part in (0, 1):
            said = [row(100 * part + n) for n in range(ROWS)]
            (folder / f"{name}-{part}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in said))
    return folder


@pytest.fixture(scope="module")
def start(home: Path) -> StartingModel:
    return load_start(Sft(model=str(home / "base"), data=("none",), out=str(home / "none"), device="cpu"), "cpu", lambda _: None)


@pytest.mark.parametrize(("name", "options", "load"), [
    ("sft", Sft, load_conversations), ("dpo", Dpo, load_preferences), ("kto", Kto, load_feedback), ("grpo", Grpo, split_prompts)])
def test_the_first_rows_of_each_file_are_read(name: str, options: Any, load: Any, home: Path, start: StartingModel):
    data = tuple(str(home / f"{name}-{part}.jsonl") for part in (0, 1))
    tuned = {"max_length": 64, "batch_tokens": 256, "micro_batch_tokens": 256}
    budget = {"prompts": 2, "max_completion_length": 8} if name == "grpo" else tuned
    usual = {"model": str(home / "base"), "data": data, "out": str(home / "run"), "held_out": 0.25, "max_steps": 1, "device": "cpu"}
    for limit, due in ((LIMIT, LIMIT), (None, ROWS)):
        found = load(options(**usual, **budget, limit=limit), start)
        lines = sorted((str(row.id).split(":")[0], int(str(row.id).split(":")[1])) for row in (*found.train, *found.held_out))
        assert lines == [(f"{name}-{part}.jsonl", number) for part in (0, 1) for number in range(1, due + 1)]

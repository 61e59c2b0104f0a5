"""The models that most reinforcement tests start from: taught once for all files and processes, read and never written to."""

from pathlib import Path

import pytest

from assay.store.checkpoint import step_folder
from tests.recipes.sums import TAUGHT, taught
from tests.trained_once import trained_once


@pytest.fixture(scope="session")
def knows_sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of the whole model's run."""
    with trained_once("sums", tmp_path_factory) as (folder, unmade):
        return taught(folder) if unmade else step_folder(folder / "sft" / "checkpoints", TAUGHT)


@pytest.fixture(scope="session")
def sums_adapter(knows_sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of an adapter on it."""
    with trained_once("sums-adapter", tmp_path_factory) as (folder, unmade):
        base = knows_sums.parent.parent / "model"
        return taught(folder, base, lora_r=4, steps=10) if unmade else step_folder(folder / "sft" / "checkpoints", 10)

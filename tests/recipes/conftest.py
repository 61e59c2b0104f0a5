"""The model that most reinforcement tests start from: taught once for all files."""

from pathlib import Path

import pytest

from assay.store.checkpoint import step_folder
from tests.recipes.sums import TAUGHT, taught
from tests.trained_once import trained_once


@pytest.fixture(scope="session")
def knows_sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last checkpoint, which is read and never written to."""
    with trained_once("sums", tmp_path_factory) as (folder, unmade):
        return taught(folder) if unmade else step_folder(folder / "sft" / "checkpoints", TAUGHT)

"""The model that most reinforcement tests start from: taught once for all files."""

from pathlib import Path

import pytest

from tests.recipes.sums import taught


@pytest.fixture(scope="session")
def knows_sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last checkpoint, which is read and never written to."""
    return taught(tmp_path_factory.mktemp("sums"))

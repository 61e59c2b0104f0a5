"""GPU tests begin with no proving process of the tests before: one that waits would hold memory of the GPU that others measure."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def kept_proofs() -> Iterator[None]:
    yield

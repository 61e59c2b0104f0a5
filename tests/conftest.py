"""One torch thread: two threads on a contended two-core machine were 30 times slower and change the last bit.

After pytest's own last line another says in words which tests did not run, why, and what to install. Where files are shared out among
processes the slowest come first, so that none is left to run alone at the end.
"""

import pytest

from tests import arithmetics
from tests.skipped import skip_summary

arithmetics.switch_on()
SLOWEST = ("tests/test_api.py", "tests/recipes/", "tests/zoo/", "tests/kernels/test_interpreted.py", "tests/test_bad_input.py",
           "tests/laws/")


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist would begin with the files of most tests, and end with those of one that takes a minute."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((place for place, name in enumerate(SLOWEST) if item.nodeid.startswith(name)), len(SLOWEST)))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The reports of all workers have arrived at the process that has a terminal; a worker has none."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or hasattr(config, "workerinput"):
        return
    reports = [report for report in terminal.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    if told := skip_summary(report.longrepr[2] for report in reports):
        terminal.write_line(told)

"""One torch thread: two threads on a contended two-core machine were 30 times slower and change the last bit.

After pytest's own last line another says in words which tests did not run, why, and what to install.
"""

import pytest

from tests import arithmetics
from tests.skipped import skip_summary

arithmetics.switch_on()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The reports of all workers have arrived at the process that has a terminal; a worker has none."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or hasattr(config, "workerinput"):
        return
    reports = [report for report in terminal.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    if told := skip_summary(report.longrepr[2] for report in reports):
        terminal.write_line(told)

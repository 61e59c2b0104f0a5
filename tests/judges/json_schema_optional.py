"""JSON Schema Test Suite, optional tests: formats, regular expressions as ECMAScript has them, large numbers, content."""

from pathlib import Path

from tests.judges.json_schema import judge_files, suite_files
from tests.judges.score import Score

ASKS = "is this instance valid by this format, by this ECMAScript pattern? (optional in the standard)"


def judge(folder: Path) -> Score:
    return judge_files(folder, suite_files(folder, optional=True))

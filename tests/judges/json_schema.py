"""JSON Schema Test Suite, required tests: every test of every draft against our JSON Schema reward."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.reward.json_schema import schema_fault
from tests.judges.score import Score, checkout, checkout_version

ASKS = "is this instance valid by this schema? (drafts 3 to 2020-12)"
DIALECTS = {"draft3": "http://json-schema.org/draft-03/schema#", "draft4": "http://json-schema.org/draft-04/schema#",
            "draft6": "http://json-schema.org/draft-06/schema#", "draft7": "http://json-schema.org/draft-07/schema#",
            "draft2019-09": "https://json-schema.org/draft/2019-09/schema", "draft2020-12": "https://json-schema.org/draft/2020-12/schema"}


def judge(folder: Path) -> Score:
    files = suite_files(folder, optional=False)
    left_out = [file for file in files if file.name == "format.json"]
    score = judge_files(folder, [file for file in files if file not in left_out])
    if left_out:
        score.notes.append("format.json is left out: it asks that a format is an annotation and checks nothing; ours is checked, always")
    return score


def suite_files(folder: Path, *, optional: bool) -> list[Path]:
    tests = checkout(folder, "JSON-Schema-Test-Suite", "tests")
    return [file for draft in DIALECTS for file in sorted((tests / draft).rglob("*.json")) if ("optional" in file.parts) == optional]


def judge_files(folder: Path, files: Iterable[Path]) -> Score:
    files = list(files)
    score = Score(checkout_version(folder, "JSON-Schema-Test-Suite", files))
    for file in files:
        place = file.relative_to(folder / "JSON-Schema-Test-Suite" / "tests")
        for group in json.loads(file.read_text()):
            schema = in_dialect(group["schema"], DIALECTS[place.parts[0]])
            for test in group["tests"]:
                try_instance(score, f"{place}: {group['description']}: {test['description']}", schema, test)
    return score


def in_dialect(schema: Any, dialect: str) -> Any:
    """Older drafts' tests do not name their dialect; ours is 2020-12 unless the schema does."""
    return {"$schema": dialect} | schema if isinstance(schema, dict) else schema


def try_instance(score: Score, case: str, schema: Any, test: dict[str, Any]) -> None:
    try:
        fault = schema_fault(test["data"], schema)
    except AssayError as error:
        score.refusals[reason(str(error))] += 1
    except Exception as error:  # a crash is a wrong answer, and must not end the count
        score.mistakes.append(f"{case}: {type(error).__name__}: {error}")
    else:
        score.agree((fault is None) == test["valid"], case, f"said {fault or 'valid'}, expected {'valid' if test['valid'] else 'invalid'}")


def reason(words: str) -> str:
    """The refusal without the name that it is about, so that alike ones count together."""
    for kind in ("refers to itself", "refers to", "asks for format", "is written in", "is no JSON Schema", "nested", "has the keyword",
                 "extends", "pattern"):
        if kind in words:
            return f"the schema {kind} …"
    return words[:80]

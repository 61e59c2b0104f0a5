"""HumanEval's canonical solutions in our sandbox: each passes its own tests, and neither an empty body nor a constant does."""

import ast
import gzip
import json
from pathlib import Path
from typing import Any

from assay.reward.sandbox import judge_program, sandbox_unavailable
from tests.judges.score import AbsentJudge, Score, checkout, checkout_version

ASKS = "does this program pass the problem's tests? (the canonical solution, an empty body, a constant)"
WRONG = {"an empty body": "    pass\n", "a constant": "    return 1\n"}


def judge(folder: Path) -> Score:
    file = checkout(folder, "human-eval", "data", "HumanEval.jsonl.gz")
    if reason := sandbox_unavailable():
        raise AbsentJudge(reason)
    score = Score(checkout_version(folder, "human-eval", [file]))
    for line in gzip.decompress(file.read_bytes()).splitlines():
        problem = json.loads(line)
        found = outcome(problem, problem["canonical_solution"])
        score.agree(found == "passed", f"{problem['task_id']}, canonical", found)
        for kind, body in WRONG.items():
            found = outcome(problem, body)
            score.agree(found != "passed", f"{problem['task_id']}, {kind}", found)
    return score


def outcome(problem: dict[str, Any], body: str) -> str:
    tests = f"{problem['test']}\ncheck({problem['entry_point']})\n"
    found = judge_program(problem["prompt"] + body, tests, names=taken_names(problem["prompt"] + body, tests))
    return "passed" if found.passed else f"{found.status}: {found.reason}"


def taken_names(program: str, tests: str) -> list[str]:
    """The program's functions that its tests name: the one that is asked for, and at times a helper that the prompt gives."""
    made = {node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)}
    return sorted(made & {node.id for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Name)})

"""EvalPlus's canonical solutions in our sandbox: each agrees with itself on EvalPlus's inputs, an empty body or a constant does not.

EvalPlus's package holds no data: it fetches HumanEvalPlus and MbppPlus when it runs. Where the user has put those files (`.jsonl` or
`.jsonl.gz`, any version in the name) into FOLDER or FOLDER/evalplus they are asked; else that is said.
"""

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from assay.reward.sandbox import judge_program, sandbox_unavailable
from tests.judges.human_eval_solutions import WRONG, taken_names
from tests.judges.score import AbsentJudge, Score

ASKS = "does this program answer EvalPlus's inputs as the canonical solution does? (that solution, an empty body, a constant)"
SETS = re.compile(r"(humaneval|mbpp)_?plus.*\.jsonl(\.gz)?", re.IGNORECASE)
MOST_INPUTS = 64  # of a problem, spread over all; some have thousands
TESTS = '''
import copy, json, math

def alike(found, due, near):
    if isinstance(due, float) and isinstance(found, (int, float)) and not isinstance(found, bool):
        return found == due or (found != found and due != due) or math.isclose(found, due, rel_tol=1e-7, abs_tol=near)
    if isinstance(due, (list, tuple)) and type(found) is type(due):
        return len(found) == len(due) and all(alike(one, other, near) for one, other in zip(found, due))
    return type(found) is type(due) and found == due

reference, asked = {{}}, 0
exec({program!r}, reference)
for given in json.loads({inputs!r}):
    try:
        due = reference[{name!r}](*copy.deepcopy(given))
    except Exception:
        continue  # the canonical solution takes another type than JSON has
    asked += 1
    assert alike({name}(*copy.deepcopy(given)), due, {near!r}), given
assert asked, "no input could be asked"
'''


def judge(folder: Path) -> Score:
    places = [place for place in (folder, folder / "evalplus") if place.is_dir()]
    files = sorted(file for place in places for file in place.iterdir() if SETS.fullmatch(file.name))
    if not files:
        raise AbsentJudge("no HumanEvalPlus*.jsonl(.gz) or MbppPlus*.jsonl(.gz) is in the folder of judges or its evalplus/: EvalPlus's "
                          "package has none; put its releases' files there")
    if reason := sandbox_unavailable():
        raise AbsentJudge(reason)
    digests = ", ".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}" for file in files)
    score = Score(digests, notes=[f"at most {MOST_INPUTS} inputs of a problem, spread over all"])
    for file in files:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        for problem in map(json.loads, filter(None, data.splitlines())):
            try_problem(score, problem)
    return score


def try_problem(score: Score, problem: dict[str, Any]) -> None:
    canonical = problem["prompt"] + problem["canonical_solution"]
    found = outcome(problem, canonical, canonical)
    if "no input could be asked" in found:
        score.refusals["its inputs are of types that JSON does not hold, which EvalPlus makes of them by rules of its own"] += 1
        return
    score.agree(found == "passed", f"{problem['task_id']}, canonical", found)
    for kind, body in WRONG.items():
        wrong = f"def {problem['entry_point']}(*given):\n{body}"
        found = outcome(problem, wrong, canonical)
        score.agree(found != "passed", f"{problem['task_id']}, {kind}", found)


def outcome(problem: dict[str, Any], program: str, canonical: str) -> str:
    name, every = problem["entry_point"], [*problem["base_input"], *problem["plus_input"]]
    inputs = every[:: max(1, -(-len(every) // MOST_INPUTS))]
    tests = TESTS.format(program=canonical, inputs=json.dumps(inputs), name=name, near=float(problem.get("atol") or 0))
    found = judge_program(program, tests, names=taken_names(program, tests) or [name])
    return "passed" if found.passed else f"{found.status}: {found.reason}"

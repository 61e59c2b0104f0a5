"""Code tasks: HumanEval completes a function, MBPP writes one; their tests run in the sandbox, out of the program's reach."""

import ast
import re

from assay.errors import DataError
from assay.evaluation.task import GenerationTask, Score, TaskExample, make_examples, text_column
from assay.evaluation.tasks import TaskRequest
from assay.reward.sandbox import Limits, judge_program, require_sandbox

CODE_SCORERS = 4

# ---------------------------------------------------------------- HumanEval

STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")  # after the body, these begin something else


def make_humaneval(request: TaskRequest) -> GenerationTask:
    """A function is completed from its signature and docstring."""
    require_sandbox()
    examples = make_examples(request.rows(), request.limit)
    for example in examples:
        for name in ("prompt", "test", "entry_point"):
            text_column(example.row, name)
    return GenerationTask("humaneval", examples, lambda e: text_column(e.row, "prompt"), _score_humaneval,
                          lambda e: e.row.get("canonical_solution"), _wrong_bodies,
                      stop=STOP, raw=True, scorers=CODE_SCORERS)


def _score_humaneval(example: TaskExample, text: str) -> Score:
    """Score a HumanEval program. What was set as the prompt, functions included, is also on the tests' side; only the asked function is the
    program's."""
    row, entry = example.row, text_column(example.row, "entry_point")
    outcome = judge_program(row["prompt"] + text, f"{row['test']}\ncheck({entry})\n", names=[entry], setup=row["prompt"])
    return Score(float(outcome.passed), float(outcome.passed), parsed=bool(text.strip()))


def _wrong_bodies(example: TaskExample) -> list[str]:
    return ["", "    return None\n", "    raise SystemExit(0)\n", "    import os; os._exit(0)\n"]

# ---------------------------------------------------------------- MBPP

MBPP_LIMITS = Limits(seconds=12, wall_seconds=36)  # one of the rows' own solutions needs five seconds
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```[^\S\n]*$", re.DOTALL | re.MULTILINE)
ASK_FOR_FUNCTION = "{text}\nThe function must pass this test:\n{test}\nAnswer with one Python code block and nothing else."


def make_mbpp(request: TaskRequest) -> GenerationTask:
    """A function is written from a sentence and one of its tests."""
    require_sandbox()
    examples = make_examples(request.rows(), request.limit)
    for example in examples:
        asked_names(example)
    return GenerationTask("mbpp", examples, _mbpp_prompt, _score_mbpp, lambda e: f"```python\n{text_column(e.row, 'code')}\n```",
                          _wrong_programs, scorers=CODE_SCORERS)


def _mbpp_prompt(example: TaskExample) -> str:
    return ASK_FOR_FUNCTION.format(text=text_column(example.row, "prompt", "text").strip(), test=example.row["test_list"][0])


def _score_mbpp(example: TaskExample, text: str) -> Score:
    """Score an MBPP program. Strictly, the one code block is the program; leniently, the last of several, or the bare text."""
    blocks = FENCED.findall(text)
    strict, lenient = blocks[0] if len(blocks) == 1 else None, blocks[-1] if blocks else text
    passed = {program: passes(example, program) for program in {strict, lenient} if program is not None and program.strip()}
    return Score(passed.get(strict, 0.0), passed.get(lenient, 0.0), strict is not None)


def passes(example: TaskExample, program: str) -> float:
    """The tests may lean on what the row's own solution imports; they get it from there, never from the program."""
    imports = [ast.unparse(node) for node in ast.parse(text_column(example.row, "code")).body
               if isinstance(node, ast.Import | ast.ImportFrom)]
    setup = "\n".join([*imports, *example.row.get("test_imports", []), example.row.get("test_setup_code") or ""])
    return float(judge_program(program, "\n".join(example.row["test_list"]), names=asked_names(example), setup=setup,
                               limits=MBPP_LIMITS).passed)


def asked_names(example: TaskExample) -> list[str]:
    """Names that the tests take from a program: what the row's own solution defines and they use. All else stays theirs."""
    tests = example.row.get("test_list")
    if not isinstance(tests, list) or not tests:
        raise DataError(f"example {example.id} has no `test_list`")
    try:
        solution, used = ast.parse(text_column(example.row, "code")), ast.parse("\n".join(tests))
    except SyntaxError as error:
        raise DataError(f"example {example.id}: its code or its tests are not Python: {error}") from None
    defined = {node.name for node in solution.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names = sorted(defined & {node.id for node in ast.walk(used) if isinstance(node, ast.Name)})
    if not names:
        raise DataError(f"example {example.id}: its tests use nothing that its own solution defines")
    return names


def _wrong_programs(example: TaskExample) -> list[str]:
    names = asked_names(example)
    idle = "\n".join(f"def {name}(*args, **kwargs): return None" for name in names)
    forged = "\n".join(f"def {name}(*args, **kwargs): raise SystemExit(0)" for name in names)
    return ["", "I cannot do that.", f"```python\n{idle}\n```", f"```python\n{forged}\n```"]

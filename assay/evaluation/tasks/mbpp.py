"""MBPP task: a function is written from a sentence and one of its tests; all of its tests run in the sandbox."""

import ast
import re

from assay.errors import DataError
from assay.evaluation.task import GenerationTask, Score, TaskExample, make_examples, text_column
from assay.evaluation.tasks import TaskRequest
from assay.reward.sandbox import Limits, judge_program, require_sandbox

_SCORERS = 4
_LIMITS = Limits(seconds=12, wall_seconds=36)  # one of the rows' own solutions needs five seconds
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```[^\S\n]*$", re.DOTALL | re.MULTILINE)
_ASK = "{text}\nThe function must pass this test:\n{test}\nAnswer with one Python code block and nothing else."


def make(request: TaskRequest) -> GenerationTask:
    require_sandbox()
    examples = make_examples(request.rows(), request.limit)
    for example in examples:
        asked_names(example)
    return GenerationTask("mbpp", examples, _prompt, _score, lambda e: f"```python\n{text_column(e.row, 'code')}\n```", _wrong,
                          scorers=_SCORERS)


def _prompt(example: TaskExample) -> str:
    return _ASK.format(text=text_column(example.row, "prompt", "text").strip(), test=example.row["test_list"][0])


def _score(example: TaskExample, text: str) -> Score:
    """Strictly, the one code block is the program; leniently, the last of several, or the bare text."""
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
                               limits=_LIMITS).passed)


def asked_names(example: TaskExample) -> list[str]:
    """What the tests take from a program: what the row's own solution defines and they use. All else stays theirs."""
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


def _wrong(example: TaskExample) -> list[str]:
    names = asked_names(example)
    idle = "\n".join(f"def {name}(*args, **kwargs): return None" for name in names)
    forged = "\n".join(f"def {name}(*args, **kwargs): raise SystemExit(0)" for name in names)
    return ["", "I cannot do that.", f"```python\n{idle}\n```", f"```python\n{forged}\n```"]

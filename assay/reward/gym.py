"""reasoning-gym (extra): problems made from a seed as rows of data, and its own scorers as a reward.

    rows = gym_problems("chain_sum", 1000, seed=0)     prompt, answer, a right completion, and where the problem comes from
    gym_score(rows[0], "-4")                           what its own scorer gives that answer, 0 … 1

A row names its problem (dataset, seed, size, number). Who scores makes the same problem again and refuses a row that says another:
entries hold more than JSON can carry, and another version of the package may ask something else under the same number.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from assay.errors import DataError, UsageError
from assay.reward.canary import STYLES

HINT = "reasoning-gym is not installed; pip install 'assay[gym]', or reasoning-gym alone"
_ASK = "\nPut your answer between <answer> and </answer>."
EVALUATORS = {"eval", "exec", "parse_expr", "sympify"}  # sympy's parsers end in eval too
OURS = {"entry", "metadata"}  # what a scorer may evaluate: it made it itself


def gym_problems(dataset: str, count: int, *, seed: int) -> list[dict[str, Any]]:
    """`count` rows, each with its prompt and a completion that must get full marks."""
    made = open_dataset(dataset, seed, count)
    return [_row(made[number], {"dataset": dataset, "seed": seed, "size": count, "number": number}) for number in range(count)]


def gym_score(row: Mapping[str, Any], answer: str) -> float:
    """Score by the dataset's own scorer, on the problem that the row names."""
    origin = row.get("gym")
    if not isinstance(origin, Mapping) or origin.keys() != {"dataset", "seed", "size", "number"}:
        raise DataError(f"the row names no problem of reasoning-gym in column 'gym': found {origin!r}; make rows with assay data gym")
    dataset = open_dataset(origin["dataset"], origin["seed"], origin["size"])
    entry = problem(dataset, origin["number"])
    if entry["question"] + _ASK != row.get("prompt"):
        raise DataError(f"reasoning-gym {version()} asks something else under {dict(origin)} than the row does; make the rows again")
    return float(dataset.score_answer(answer, entry))


@lru_cache(maxsize=64)
def open_dataset(dataset: str, seed: int, size: int) -> Any:
    """A dataset of the package, unless its scorer would run as code what a model wrote."""
    reasoning_gym = reasoning_gym_package()
    try:
        made = reasoning_gym.create_dataset(dataset, size=size, seed=seed)
    except (ValueError, AssertionError) as error:  # how it says that there is no such dataset, or that it needs options
        raise UsageError(f"reasoning-gym: {dataset!r} with {size} problems cannot be made: {error}") from None
    if evaluates_answers(type(made)):
        raise UsageError(f"reasoning-gym: the scorer of {dataset} evaluates what is answered as Python, and what a model writes is not "
                         "run outside a sandbox; choose another dataset")
    return made


def reasoning_gym_package() -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise UsageError(HINT) from None
    return reasoning_gym


def version() -> str:
    from importlib.metadata import version

    return version("reasoning-gym")


@lru_cache(maxsize=1024)
def problem(dataset: Any, number: int) -> dict[str, Any]:
    return dataset[number]


def evaluates_answers(dataset: type) -> bool:
    """Whether the scorer hands to eval, or to a parser that ends in it, anything but what the dataset made itself."""
    source = textwrap.dedent(inspect.getsource(dataset.score_answer))  # type: ignore[attr-defined]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _name(node.func) in EVALUATORS:
            given = {part.id for each in node.args for part in ast.walk(each) if isinstance(part, ast.Name)}
            if not given <= OURS:
                return True
    return False


def _name(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


def _row(entry: Mapping[str, Any], origin: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(entry["answer"], str):
        raise UsageError(f"reasoning-gym: {origin['dataset']} gives no answer to its own problems, so nothing shows that a right one would "
                         "be rewarded; choose another dataset")
    right = STYLES["tag"].format(working="Step by step.", stated=entry["answer"])
    return {"prompt": entry["question"] + _ASK, "answer": entry["answer"], "gold_completion": right, "gym": origin}

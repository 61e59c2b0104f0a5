"""Callable rewards: a Python function, also one defined in a notebook, becomes a file that the reward workers import.

Rewards run in processes of their own, so a function travels as its source, with the imports, constants and functions that it names. What
cannot travel so (an open file, a model, a lambda) is refused in words.
"""

import hashlib
import inspect
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.store import durable

_PLAIN = (int, float, str, bytes, bool, type(None))


def reward_spec(reward: str | Callable[..., float] | tuple[Callable[..., float], float], folder: Path) -> str:
    """FILE:FUNCTION:WEIGHT, as on the command line; a text is one already. Files are written to `folder`, named by their content."""
    if isinstance(reward, str):
        return reward
    function, weight = reward if isinstance(reward, tuple) else (reward, 1.0)
    if not isinstance(function, types.FunctionType) or function.__name__ == "<lambda>":
        raise UsageError(f"reward {function!r}: expected a function made by def, with (prompt, completion, row) → number; "
                         "or FILE.py:FUNCTION:WEIGHT, or a built-in one such as 'answer:1'")
    source = _source_with_names(function)
    file = folder / f"{function.__name__}-{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
    if not file.exists():
        durable.make_folder(folder)
        durable.replace_file(file, source.encode())
    return f"{file}:{function.__name__}:{weight:g}"


def _source_with_names(function: types.FunctionType) -> str:
    """The function's source after everything of its module that it names, directly or through other functions."""
    needed: dict[str, str] = {}
    _collect(function, needed, function.__name__)
    imports = [text for text in needed.values() if text.startswith(("import ", "from "))]
    return "\n".join(imports) + "\n\n\n" * bool(imports) + "\n\n\n".join(text for text in needed.values() if text not in imports) + "\n"


def _collect(function: types.FunctionType, needed: dict[str, str], reward: str) -> None:
    """Fill `needed` with the source of a function and of all that it names, in an order in which they can be run."""
    if function.__closure__:
        names = ", ".join(function.__code__.co_freevars)
        raise UsageError(f"reward {reward}: {function.__name__} uses {names} of the function around it, which does not exist in another "
                         "process; make it a constant of the module, or write the reward to a file")
    needed[function.__name__] = ""  # it may name itself, or one that names it
    for name in _global_names(function.__code__):
        if name in function.__globals__ and name not in needed:
            value = function.__globals__[name]
            if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
                _collect(value, needed, reward)
            else:
                needed[name] = _statement(name, value, reward)
    needed[function.__name__] = needed.pop(function.__name__) or _source(function, reward)


def _statement(name: str, value: Any, reward: str) -> str:
    """The line that gives `name` the same value in another process."""
    if isinstance(value, types.ModuleType):
        return f"import {name}" if value.__name__ == name else f"import {value.__name__} as {name}"
    if _is_plain(value):
        return f"{name} = {value!r}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) and value.__module__ not in ("__main__", None):
        return f"from {value.__module__} import {value.__qualname__} as {name}"
    raise UsageError(f"reward {reward}: it uses {name}, a {type(value).__name__}, which cannot be handed to another process; write the "
                     "reward to a file that makes it, and name it as FILE.py:FUNCTION:WEIGHT")


def _source(function: types.FunctionType, reward: str) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function)).strip("\n")
    except OSError:
        raise UsageError(f"reward {reward}: the source of {function.__name__} cannot be read; write it to a file, and name it as "
                         "FILE.py:FUNCTION:WEIGHT") from None


def _global_names(code: types.CodeType) -> list[str]:
    """Global names used by a function and by those inside it."""
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _global_names(constant)]
    return [*code.co_names, *inner]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return all(map(_is_plain, value)) if isinstance(value, list | tuple | set | frozenset) else isinstance(value, _PLAIN)

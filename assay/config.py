"""One frozen dataclass per verb is default, type, help and command line at once.

    @dataclass(frozen=True)
    class Sample:
        '''Sample from a model.'''
        path: str = argument("checkpoint, folder or GGUF file")
        prompt: tuple[str, ...] = option("text to continue", default=())
        n: int = option("completions per prompt", default=1)

`parse(Sample, argv)` makes one from flags, and from `--config run.yaml` where a recipe offers it; an unknown key is an
error that names the nearest known one.
"""

import argparse
import dataclasses
import difflib
import keyword
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Union

from assay.errors import UsageError
from assay.strict_json import parse_yaml

T = TypeVar("T")
_SCALARS = (str, int, float, Path)


class Bound(NamedTuple):
    words: str
    holds: Callable[[float, float], bool]


_BOUNDS = {"least": Bound("of at least", operator.ge), "above": Bound("above", operator.gt), "below": Bound("below", operator.lt),
          "most": Bound("of at most", operator.le)}


def argument(help: str, **kwargs: Any) -> Any:
    """A positional field; a tuple type takes one or more values."""
    return dataclasses.field(metadata={"help": help, "positional": True}, **kwargs)


def option(help: str, *, short: str = "", least: float | None = None, above: float | None = None, below: float | None = None,
           most: float | None = None, **kwargs: Any) -> Any:
    """A flag; without a default it is required. What lies outside its bounds is refused before anything is done with it."""
    bounds = {"least": least, "above": above, "below": below, "most": most}
    return dataclasses.field(metadata={"help": help, "short": short} | {k: v for k, v in bounds.items() if v is not None}, **kwargs)


def passed_on() -> Any:
    """A tuple of all arguments that no other field takes, in their order: for a verb that runs another."""
    return dataclasses.field(default=(), metadata={"rest": True})


def parse(cls: type[T], argv: Sequence[str], *, prog: str, examples: str = "", config_file: bool = False) -> T:
    """`config_file` adds --config FILE.yaml, whose values the flags override."""
    parser = _parser(cls, prog, examples, config_file)
    rest = [f.name for f in dataclasses.fields(cls) if f.metadata.get("rest")]  # type: ignore[arg-type]
    known, others = parser.parse_known_args(argv) if rest else (parser.parse_args(argv), [])
    given = vars(known) | {name: tuple(others) for name in rest}
    path = given.pop("config", None)
    values = {**(_read_yaml(Path(path)) if path else {}), **given}
    return from_mapping(cls, values, where=path or prog)


def from_mapping(cls: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """Build `cls` from plain values; unknown or missing keys and wrong types are errors, never defaults."""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise UsageError(f"{where}: unknown option {key!r}{nearest(key, fields)}")
    required = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [n for n, f in fields.items() if (f.default, f.default_factory) == required and n not in values]
    if missing:
        raise UsageError(f"{where}: missing {', '.join(missing)}; see --help")
    if values.get("out") == "":  # Path("") is the folder one stands in, and an unset variable is not meant to name that
        raise UsageError(f"{where}: --out is empty; expected a path")
    hints = typing.get_type_hints(cls)
    typed = {key: _typed(value, hints[key], f"{where}: {key}") for key, value in values.items()}
    for key, value in typed.items():
        for one in value if isinstance(value, tuple) else (value,):
            _require_within(one, fields[key].metadata, f"{where}: --{key.rstrip('_').replace('_', '-')}")
    return cls(**typed)


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """'; did you mean …?' for an error about a mistyped name, or the names themselves where none is near."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of: {', '.join(known)}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            flags = [s for action in self._actions for s in action.option_strings]
            word = message.removeprefix(prefix).split()[0]
            message = f"unknown argument {word!r}{nearest(word, flags)}"
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")


def _parser(cls: type, prog: str, examples: str, config_file: bool) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=cls.__doc__, epilog=examples and f"examples:\n{examples}",
                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    if config_file:
        parser.add_argument("--config", metavar="FILE.yaml", default=argparse.SUPPRESS, help="read options from a file; flags override it")
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.metadata.get("rest"):
            _add(parser, field, hints[field.name], in_file=config_file)
    return parser


def _add(parser: argparse.ArgumentParser, field: dataclasses.Field, hint: Any, in_file: bool) -> None:
    """One field as one argparse argument. Absent flags stay absent, so that a config file can fill them."""
    meta, hint = field.metadata, _unwrapped(hint)
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    many, scalar = _element(hint)
    kwargs: dict[str, Any] = {"help": meta["help"].replace("%", "%%"), "default": argparse.SUPPRESS}
    if not required and field.default not in (None, (), "", False):
        kwargs["help"] += f" (default: {field.default})"
    if scalar is bool:
        kwargs["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
    elif typing.get_origin(scalar) is Literal:
        kwargs["choices"] = typing.get_args(scalar)
    else:
        kwargs["type"] = scalar
    if meta.get("positional"):
        kwargs["nargs"] = ("+" if many else None) if required else ("*" if many else "?")
        parser.add_argument(field.name, **kwargs)
        return
    if many:
        kwargs["nargs"] = "+"
    if scalar is not bool and not kwargs.get("choices"):
        kwargs["metavar"] = field.name.upper()
    names = [f"--{field.name.rstrip('_').replace('_', '-')}", *([meta["short"]] if meta["short"] else [])]
    parser.add_argument(*names, dest=field.name, required=required and not in_file, **kwargs)


def _unwrapped(hint: Any) -> Any:
    """`X | None` → `X`."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        assert len(rest) == 1, f"one type or None, not {hint}"
        return rest[0]
    return hint


def _element(hint: Any) -> tuple[bool, Any]:
    """(is it a tuple of many, the type of one value)."""
    if typing.get_origin(hint) is tuple:
        return True, typing.get_args(hint)[0]
    return False, hint


def _typed(value: Any, hint: Any, where: str) -> Any:
    """The value as the annotated type; a lossless reading of what YAML or the shell gave, or an error."""
    if value is None and type(None) in typing.get_args(hint):
        return None
    many, scalar = _element(_unwrapped(hint))
    if many:
        values = [value] if isinstance(value, str | int | float) else value
        return tuple(_typed(v, scalar, where) for v in values)
    if typing.get_origin(scalar) is Literal:
        if value not in typing.get_args(scalar):
            raise UsageError(f"{where} is {value!r}; expected one of {', '.join(map(str, typing.get_args(scalar)))}")
        return value
    if isinstance(value, scalar) and not (scalar is int and isinstance(value, bool)):
        return value
    if scalar in _SCALARS and isinstance(value, str | int | float) and not isinstance(value, bool):
        return _converted(value, scalar, where)
    raise UsageError(f"{where} is {value!r}; expected {scalar.__name__}")


def _converted(value: Any, scalar: type, where: str) -> Any:
    try:
        converted = scalar(value)
    except (TypeError, ValueError):
        raise UsageError(f"{where} is {value!r}; expected {scalar.__name__}") from None
    if scalar is int and converted != value and not isinstance(value, str):
        raise UsageError(f"{where} is {value!r}; expected a whole number")
    return converted


def _require_within(value: Any, bounds: Mapping[str, Any], where: str) -> None:
    """Numbers only. None of them may be NaN or infinite, nor a whole one larger than a machine's."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    kind = "a number" if isinstance(value, float) else "a whole number"
    if not (math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63):
        raise UsageError(f"{where} is {value!r}; expected {kind}{'' if isinstance(value, float) else ' of at most 18 digits'}")
    asked = {name: bounds[name] for name in _BOUNDS if name in bounds}
    if not all(_BOUNDS[name].holds(value, bound) for name, bound in asked.items()):
        words = " and ".join(f"{_BOUNDS[name].words} {bound:,}" for name, bound in asked.items())
        raise UsageError(f"{where} is {value!r}; expected {kind} {words}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    values = parse_yaml(data, where=f"--config {path}", error=UsageError)
    if not isinstance(values, dict):
        raise UsageError(f"--config {path}: expected a mapping of options, found {type(values).__name__}")
    if strange := [key for key in values if not isinstance(key, str)]:
        raise UsageError(f"--config {path}: {strange[0]!r} is not the name of an option; expected NAME: VALUE on each line")
    named = {key.replace("-", "_"): value for key, value in values.items()}
    return {f"{key}_" if keyword.iskeyword(key) else key: value for key, value in named.items()}  # `from` is no name for a field

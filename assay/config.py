"""Options: one frozen dataclass per verb is default, type, help and command line at once.

    @dataclass(frozen=True)
    class Sample:
        '''Sample from a model.'''
        path: str = argument("checkpoint, folder or GGUF file")
        prompt: tuple[str, ...] = option("text to continue", group="data", default=(), default_text="none")
        n: int = option("completions per prompt", group="generation", default=1)

`parse(Sample, argv)` makes one from flags, and from `--config run.yaml` where a recipe offers it; an unknown key is an
error that names the nearest known one. Help is one sentence and its default, under the heading of its group.
"""

import argparse
import dataclasses
import difflib
import inspect
import keyword
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Union

from assay.errors import UsageError
from assay.strict_json import parse_yaml

T = TypeVar("T")
_SCALARS = (str, int, float, Path)

# The headings of --help in the order in which they stand. What names no group stands under "options".
HELP_GROUPS = ("model", "data", "method", "generation", "rewards", "optimizer", "budget", "evaluation", "checkpoints", "memory", "run",
               "options")
_METAVARS = {int: "N", float: "X"}
_LARGEST_FILE = 1 << 20  # bytes of options
_NAMES_SHOWN = 12  # more names than these are not listed in an error, but for the nearest


class Bound(NamedTuple):
    words: str
    holds: Callable[[float, float], bool]


_BOUNDS = {"least": Bound("of at least", operator.ge), "above": Bound("above", operator.gt), "below": Bound("below", operator.lt),
          "most": Bound("of at most", operator.le)}


def argument(help: str, *, default_text: str = "", **kwargs: Any) -> Any:
    """A positional field; a tuple type takes one or more values."""
    return dataclasses.field(metadata={"help": help, "positional": True, "default_text": default_text}, **kwargs)


def option(help: str, *, group: str = "options", needs: str = "", short: str = "", metavar: str = "", default_text: str = "",
           least: float | None = None, above: float | None = None, below: float | None = None, most: float | None = None,
           **kwargs: Any) -> Any:
    """A flag; without a default it is required. What lies outside its bounds is refused before anything is done with it.

    `needs` names the options without which it has no effect, as in "--loss-type simpo" or "--how text or --on-policy". `default_text` says
    what happens without the flag where the default itself (None, nothing) does not say it.
    """
    assert group in HELP_GROUPS, f"{group!r} is no heading of --help: {HELP_GROUPS}"
    bounds = {"least": least, "above": above, "below": below, "most": most}
    shown = {"help": f"with {needs}: {help}" if needs else help, "needs": needs, "group": group, "short": short, "metavar": metavar,
             "default_text": default_text}
    return dataclasses.field(metadata=shown | {k: v for k, v in bounds.items() if v is not None}, **kwargs)


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
    config = from_mapping(cls, values, where=path or prog)
    refuse_without_effect(config, prog)
    return config


def refuse_without_effect(config: Any, prog: str) -> None:
    """Refuse an option that is given without what it needs: it would change nothing, and not say so."""
    for field in dataclasses.fields(config):
        needs, given = field.metadata.get("needs"), getattr(config, field.name)
        if needs and given != field.default and not any(_holds(config, *each.split()) for each in needs.split(" or ")):
            raise UsageError(f"{prog}: --{_flag(field.name)} {given} has no effect without {needs}; leave it out, or give that too")


def _holds(config: Any, option: str, value: str = "") -> bool:
    found = getattr(config, option.removeprefix("--").replace("-", "_"))
    return str(found) == value if value else found not in (None, False, 0, (), "")


def from_mapping(cls: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """Build `cls` from plain values; unknown or missing keys and wrong types are errors, never defaults."""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise UsageError(f"{where}: unknown option {key!r}{nearest(key, fields)}")
    missing = [_flag(name) for name, field in fields.items() if _required(field) and name not in values]
    if missing:
        raise UsageError(f"{where}: missing {', '.join(missing)}; see --help")
    if values.get("out") == "":  # Path("") is the folder one stands in, and an unset variable is not meant to name that
        raise UsageError(f"{where}: --out is empty; expected a path")
    hints = typing.get_type_hints(cls)
    typed = {key: _typed(value, hints[key], f"{where}: {key}") for key, value in values.items()}
    for key, value in typed.items():
        for one in value if isinstance(value, tuple) else (value,):
            _require_within(one, fields[key].metadata, f"{where}: --{_flag(key)}")
    return cls(**typed)


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """'; did you mean …?' for an error about a mistyped name, or the names themselves where none is near."""
    known = list(known)
    meant = [name for name in known if _initials(name) == word.strip("-_")]
    close = sorted(meant, key=len, reverse=True) or difflib.get_close_matches(word, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    if len(known) > _NAMES_SHOWN:
        return f"; the nearest are: {', '.join(difflib.get_close_matches(word, known, n=3, cutoff=0.0))}"
    return f"; expected one of: {', '.join(known)}"


def _initials(name: str) -> str:
    """"lr" of learning_rate and of --learning-rate."""
    words = name.strip("-_").replace("-", "_").split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else name


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            flags = [s for action in self._actions for s in action.option_strings]
            word = (message.removeprefix(prefix).split() or [""])[0]
            message = f"unknown argument {word!r}{nearest(word, flags)}"
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")


def _parser(cls: type, prog: str, examples: str, config_file: bool) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=inspect.cleandoc(cls.__doc__ or ""), epilog=examples and f"examples:\n{examples}",
                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, add_help=False)
    fields, hints = [field for field in dataclasses.fields(cls) if not field.metadata.get("rest")], typing.get_type_hints(cls)
    arguments = parser.add_argument_group("arguments")
    headings = {group: parser.add_argument_group(group) for group in HELP_GROUPS}
    for field in fields:
        _add(arguments if field.metadata.get("positional") else headings[field.metadata["group"]], field, hints[field.name], config_file)
    own = headings["run" if any(field.metadata.get("group") == "run" for field in fields) else "options"]
    if config_file:
        own.add_argument("--config", metavar="FILE.yaml", default=argparse.SUPPRESS,
                         help="Options from a file; flags override it. Default: none.")
    own.add_argument("-h", "--help", action="help", default=argparse.SUPPRESS, help="Show this and exit.")
    parser.usage = " ".join([prog, *filter(None, map(_usage, parser._actions)), "[options]"])
    return parser


def _usage(action: argparse.Action) -> str:
    """Usage line's part of an argument: its place, a required flag with its value, nothing of the rest."""
    if not action.option_strings:
        more = f" [{action.dest} …]" if action.nargs in ("+", "*") else ""
        return f"[{action.dest}{more}]" if action.nargs in ("?", "*") else f"{action.dest}{more}"
    if not str(action.help).endswith(_REQUIRED):
        return ""
    value = str(action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}")
    return f"{action.option_strings[0]} {value}{' …' if action.nargs == '+' else ''}"


def _add(heading: Any, field: dataclasses.Field, hint: Any, in_file: bool) -> None:
    """Add one field as one argparse argument. Absent flags stay absent, so that a config file can fill them."""
    meta, hint = field.metadata, _unwrapped(hint)
    many, scalar = _element(hint)
    kwargs: dict[str, Any] = {"help": _sentence(field).replace("%", "%%"), "default": argparse.SUPPRESS}
    if scalar is bool:
        kwargs["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
    elif typing.get_origin(scalar) is Literal:
        kwargs["choices"] = typing.get_args(scalar)
    else:
        kwargs["type"] = scalar
    if meta.get("positional"):
        kwargs["nargs"] = ("+" if many else None) if _required(field) else ("*" if many else "?")
        heading.add_argument(field.name, **kwargs)
        return
    if many:
        kwargs["nargs"] = "+"
    if scalar is not bool and not kwargs.get("choices"):
        kwargs["metavar"] = meta["metavar"] or _METAVARS.get(scalar) or field.name.rstrip("_").rpartition("_")[2].upper()
    names = [f"--{_flag(field.name)}", *([meta["short"]] if meta["short"] else [])]
    heading.add_argument(*names, dest=field.name, required=_required(field) and not in_file, **kwargs)


_REQUIRED = "Required."


def _sentence(field: dataclasses.Field) -> str:
    """Help as it is shown: a capital, the sentence, and what holds without the flag."""
    text = f"{field.metadata['help'][:1].upper()}{field.metadata['help'][1:]}"
    if _required(field):
        return f"{text}." if field.metadata.get("positional") else f"{text}. {_REQUIRED}"
    return f"{text}. Default: {field.metadata.get('default_text') or _shown_default(field.default)}."


def _shown_default(value: Any) -> str:
    """Default value as one would type it. 0 and False are defaults like any other."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None or value == "" else str(value).replace("e-0", "e-")


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _flag(name: str) -> str:
    """`from_` → `from`, `max_length` → `max-length`."""
    return name.rstrip("_").replace("_", "-")


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
        if not isinstance(value, str | int | float | list | tuple):
            raise UsageError(f"{where} is {_shown(value)}; expected one or more values")
        return tuple(_typed(v, scalar, where) for v in (value if isinstance(value, list | tuple) else [value]))
    if typing.get_origin(scalar) is Literal:
        if value not in typing.get_args(scalar):
            raise UsageError(f"{where} is {_shown(value)}; expected one of {', '.join(map(str, typing.get_args(scalar)))}")
        return value
    if isinstance(value, str):
        _require_text(value, where)
    if isinstance(value, scalar) and not (scalar is int and isinstance(value, bool)):
        return value
    if scalar in _SCALARS and isinstance(value, str | int | float) and not isinstance(value, bool):
        return _converted(value, scalar, where)
    raise UsageError(f"{where} is {_shown(value)}; expected {scalar.__name__}")


def _converted(value: Any, scalar: type, where: str) -> Any:
    try:
        converted = scalar(value)
    except (TypeError, ValueError, OverflowError):
        fraction = scalar is int and _is_number(value)
        raise UsageError(f"{where} is {_shown(value)}; expected {'a whole number' if fraction else scalar.__name__}") from None
    if scalar is int and converted != value and not isinstance(value, str):
        raise UsageError(f"{where} is {value!r}; expected a whole number")
    return converted


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (ValueError, OverflowError):
        return False


def _require_text(value: str, where: str) -> None:
    """Refuse text that no file name and no terminal can hold here, not where it first does harm."""
    try:
        if b"\0" not in os.fsencode(value):
            return
    except UnicodeEncodeError:
        pass
    raise UsageError(f"{where} is {_shown(value)}; expected text that can be written")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…"


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
    """Options by name."""
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    if len(data) > _LARGEST_FILE:
        raise UsageError(f"--config {path}: more than {_LARGEST_FILE:,} bytes; expected NAME: VALUE on each line")
    return named_options(parse_yaml(data, where=f"--config {path}", error=UsageError), where=f"--config {path}")


def named_options(values: Any, *, where: str) -> dict[str, Any]:
    """Options of a YAML file by the fields' names: `from` is no name for a field, and `max-length` is `max_length`."""
    if not isinstance(values, dict):
        raise UsageError(f"{where}: expected a mapping of options, found {type(values).__name__}")
    named: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise UsageError(f"{where}: {_shown(key)} is not the name of an option; expected NAME: VALUE on each line")
        name = key.replace("-", "_")
        name = f"{name}_" if keyword.iskeyword(name) else name
        if name in named:
            raise UsageError(f"{where}: {_shown(key)} stands there twice; give it once")
        named[name] = value
    return named


def command_words(options: Any, given: typing.Iterable[str], *, where: str) -> list[str]:
    """The words of a command line that give these options: read back by `parse`, they are the same."""
    first, words = list[str](), list[str]()
    for field in dataclasses.fields(options):
        if field.name in given:
            value = getattr(options, field.name)
            texts = [str(one) for one in (value if isinstance(value, tuple) else (value,)) if one is not None]
            if field.metadata.get("positional"):
                first += texts
            elif isinstance(value, bool):
                words += [] if value == field.default else [f"--{'' if value else 'no-'}{_flag(field.name)}"]
            elif texts:
                words += [f"--{_flag(field.name)}", *texts] if len(texts) > 1 else [f"--{_flag(field.name)}={texts[0]}"]
    if parse(type(options), [*first, *words], prog=where) != options:
        raise UsageError(f"{where}: {' '.join([*first, *words])} does not say on the command line what the file says; change a value "
                         "that begins with a dash")
    return [*first, *words]

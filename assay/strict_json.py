"""Strict JSON and YAML: a file that a stranger may have written is read as what it says, or refused in one sentence.

Plain files of bounded size in UTF-8, bounded in depth and digits; no key twice, no NaN or infinity, no half of a surrogate pair.
A shape says what a document must look like: a type (float takes whole numbers, int no booleans), a range of whole numbers,
(this, or that), [each item], {"name": …, "optional?": …} where other names are free unless it says `...: None`,
{str: each value}, None.
"""

import codecs
import contextlib
import functools
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from assay.errors import ArtifactError, AssayError

JSON_LIMIT = 256 << 20  # bytes
DEPTH_LIMIT, DIGITS_LIMIT, YAML_LIMIT = 100, 40, 100_000  # levels; digits of a number; nodes once aliases are followed
NATURAL = range(2**63)
Shape = Any
_HUGE = re.compile(rb"\d(?:\d{%d}|[eE]\+?0*\d{3})" % DIGITS_LIMIT)  # perhaps: inside of text it means nothing
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: Path, shape: Shape = dict, *, limit: int = JSON_LIMIT, error: type[AssayError] = ArtifactError) -> Any:
    """The document in a file, of the given shape."""
    return parse_json(read_small_file(path, limit, error), where=str(path), shape=shape, error=error)


def read_json_if_there(path: Path) -> dict[str, Any] | None:
    """An object, or None where there is no such file."""
    return read_json(path) if os.path.lexists(path) else None


def read_json_lines(path: Path, shape: Shape = dict, *, limit: int = 1 << 30, error: type[AssayError] = ArtifactError) -> list[Any]:
    """Every whole line of a file, none where there is no file; a last line that a kill cut short is left out."""
    lines = read_small_file(path, limit, error).split(b"\n")[:-1] if path.exists() else []
    return [parse_json(line, where=f"{path}:{number}", shape=shape, error=error, surrogates=True) for number, line in enumerate(lines, 1)]


def parse_json(data: bytes | str, *, where: str, shape: Shape = object, error: type[AssayError] = ArtifactError,
               advice: str = "damaged, or not what its name says", surrogates: bool = False,
               parse_int: Callable[[str], Any] | None = None, parse_float: Callable[[str], Any] | None = None) -> Any:
    """Parse one JSON document. Every way in which hostile bytes fail is an `error` that says where."""
    try:
        raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
        if raw.startswith(codecs.BOM_UTF8):
            raise ValueError("begins with a byte order mark, which JSON does not allow; save the file as UTF-8 without one")
        if _HUGE.search(raw):
            parse_int, parse_float = parse_int or _bounded_int, parse_float or _finite_float
        value = json.loads(data if isinstance(data, str) else data.decode(), object_pairs_hook=_without_duplicates,
                           parse_constant=_refuse_constant, parse_int=parse_int, parse_float=parse_float)
        _require_depth(value)
        if not surrogates and b"\\u" in raw and _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise error(f"{where}: not JSON (half of a surrogate pair, which is no character); {advice}") from None
    except RecursionError:
        raise error(f"{where}: not JSON (nested too deeply to be read); {advice}") from None
    except ValueError as reason:
        raise error(f"{where}: not JSON ({_short(reason)}); {advice}") from None
    require_shape(value, shape, where=where, error=error)
    return value


def parse_yaml(data: bytes, *, where: str, error: type[AssayError] = ArtifactError) -> Any:
    """Parse one YAML document: no tags that make objects, no key twice, and aliases only where what they stand for stays small."""
    import yaml

    try:
        value = yaml.load(data.decode(), _yaml_loader())
        _require_depth(value, YAML_LIMIT)
    except RecursionError:
        raise error(f"{where}: not YAML: nested too deeply to be read") from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError) as reason:  # its constructors raise them on odd tags
        raise error(f"{where}: not YAML: {_short(reason)}") from None
    return value


def require_shape(value: Any, shape: Shape, *, where: str, error: type[AssayError] = ArtifactError) -> None:
    if misfit := _misfit(value, shape, ""):
        raise error(f"{where}: {misfit}")


def read_small_file(path: Path, limit: int = JSON_LIMIT, error: type[AssayError] = ArtifactError) -> bytes:
    """The bytes of a plain file, which are no more than `limit`."""
    with open_regular(path, error) as fd:
        size = os.fstat(fd).st_size
        if size > limit:
            raise error(f"{path}: {size:,} bytes, and at most {limit:,} are read; not what its name says")
        with as_artifact_error(path, error), open(fd, "rb", closefd=False) as file:
            data = file.read(size)
    if len(data) != size:
        raise error(f"{path}: ended {size - len(data):,} bytes early; another program changes it meanwhile")
    return data


@contextlib.contextmanager
def open_regular(path: Path, error: type[AssayError] = ArtifactError) -> Iterator[int]:
    """A descriptor for reading a plain file; a pipe or a device is refused, and never waited for."""
    with as_artifact_error(path, error):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise error(f"{path}: expected a file, found something else (a folder, device or pipe)")
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def as_artifact_error(path: Path, error: type[AssayError] = ArtifactError) -> Iterator[None]:
    """Turn what cannot be read into the same refusal as what reads wrong."""
    try:
        yield
    except (OSError, ValueError) as reason:  # ValueError: a NUL in the path
        said = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
        raise error(f"{path}: cannot be read: {said}; check the disk and the permissions") from None


# ---------------------------------------------------------------- what is refused


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:80]!r} stands twice in one object, and readers differ on which counts")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _bounded_int(text: str) -> int:
    if len(text) > DIGITS_LIMIT:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _finite_float(text: str) -> float:
    if len(text) > 10 * DIGITS_LIMIT or abs(value := float(text)) == float("inf"):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _require_depth(value: Any, most: int | None = None) -> None:
    """Require a bounded depth, level by level; with `most`, so many nodes are counted, each as often as it stands in the document."""
    level, counted = [value], 0
    for _ in range(DEPTH_LIMIT):
        level = [child for parent in level if isinstance(parent, dict | list)
                 for child in (parent.values() if isinstance(parent, dict) else parent) if most or isinstance(child, dict | list)]
        counted += len(level)
        if not level:
            return
        if most and counted > most:
            raise ValueError(f"more than {most:,} values once its aliases are followed")
    raise RecursionError


@functools.cache
def _yaml_loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def fetch_flow_collection_start(self, kind: Any) -> None:
            if self.flow_level >= DEPTH_LIMIT:  # the scanner's time grows with the square of the depth
                raise RecursionError
            super().fetch_flow_collection_start(kind)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            named = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if len(set(named)) < len(named):
                raise ValueError(f"the key {next(name for name in named if named.count(name) > 1)[:80]!r} stands twice")
            return super().construct_mapping(node, deep)

    return Loader


def _short(reason: Exception) -> str:
    """Error message without the offending document, which a UnicodeDecodeError or a long key would repeat in full."""
    return (" ".join(str(reason).split()) or type(reason).__name__)[:200]


# ---------------------------------------------------------------- shapes


def _misfit(value: Any, shape: Shape, at: str) -> str | None:
    """First mismatch with the shape, and where in the document; None where there is none."""
    if isinstance(shape, tuple):
        return None if any(_misfit(value, one, at) is None for one in shape) else _unlike(value, shape, at)
    if isinstance(shape, list) and isinstance(value, list):
        return next((fault for i, part in enumerate(value) if (fault := _misfit(part, shape[0], f"{at}[{i}]"))), None)
    if isinstance(shape, dict) and isinstance(value, dict):
        if str in shape:
            return next((fault for key, part in value.items() if (fault := _misfit(part, shape[str], f"{at}[{key!r}]"))), None)
        names = {name: one for name, one in shape.items() if name is not ...}
        if ... in shape and (others := value.keys() - {name.removesuffix("?") for name in names}):
            return f"{at or 'the document'} has {min(others)!r:.80}, which nothing asks for"
        return next((fault for name, one in names.items() if (fault := _misfit_field(value, name, one, at))), None)
    if isinstance(shape, range):
        fits = type(value) is int and value in shape
    elif shape in (int, float):
        fits = type(value) in ((int,) if shape is int else (int, float))
    else:
        fits = value is None if shape is None else isinstance(shape, type) and isinstance(value, shape)
    return None if fits else _unlike(value, shape, at)


def _misfit_field(value: dict[str, Any], name: str, shape: Shape, at: str) -> str | None:
    plain = name.removesuffix("?")
    if plain not in value:
        return None if name != plain else f"{at or 'the document'} has no {plain!r}"
    return _misfit(value[plain], shape, f"{at}.{plain}" if at else plain)


def _unlike(value: Any, shape: Shape, at: str) -> str:
    found = type(value).__name__ if isinstance(value, dict | list) else f"{value!r:.60}"
    return f"{at} is {found}; expected {_words(shape)}" if at else f"expected {_words(shape)}, found {found}"


def _words(shape: Shape) -> str:
    if isinstance(shape, tuple):
        return " or ".join(map(_words, shape))
    if isinstance(shape, range):
        return f"a whole number from {shape.start} to {shape.stop - 1}"
    kind = type(shape) if isinstance(shape, list | dict) else shape
    return {dict: "a JSON object", list: "a list", str: "text", int: "a whole number", float: "a number",
            bool: "true or false"}.get(kind, "null")

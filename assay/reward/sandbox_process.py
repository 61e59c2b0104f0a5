"""Sandboxed side of a program's run: gives up every right it can, then runs a program, hosts it, or runs its tests.

It is handed to a bare interpreter as text and imports nothing of Assay. Three parts, chosen by the first argument:

    run      the program is __main__, its stdin is what it was given;
    host     the program is imported; then its functions are called for whoever asks, one JSON line a question;
    examine  the tests run here, and what they take from the program are proxies that ask the host.

The examiner and the host share two pipes and nothing else: they are in sandboxes of their own. What comes over the pipe is
rebuilt as plain data, so that no object of the program's making (an `==` that is always true) is ever inside the examiner.
"""

import builtins
import collections.abc
import decimal
import fractions
import json
import os
import resource
import sys
import traceback
import types
from typing import Any, NoReturn

_LINE = 8 << 20  # the longest question or answer
ITEMS = 100_000  # the most that is taken from an iterator, which may be endless
MUTE = (StopIteration, StopAsyncIteration)  # raised inside a map() of the tests they would end it quietly


class _Unreadable(Exception):
    """Error of a message from the other side that is not a value."""


class Untransportable(Exception):
    """The tests hand the program something that has no plain form, such as a function of their own."""


class Ended(Exception):
    """The program's process is gone, or says nothing that can be read."""


class RaisedInProgram(Exception):
    """The program raised something that is no builtin exception, or one that would steer the tests."""


def main(part: str, setting: dict[str, Any]) -> None:
    surrender(setting)
    with open(setting["source"], "rb") as file:
        source = json.loads(file.read())
    control = setting["control"]
    os.write(control, b"ready\n")
    if part == "examine":
        examine(source, control, Link(setting["answers"], setting["questions"]))
        return
    os.close(control)
    if part == "host":
        host(source["program"], Link(setting["questions"], setting["answers"]))
    else:
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(source["program"], "<program>", "exec"), module.__dict__)


def surrender(setting: dict[str, Any]) -> None:
    """Limits first, then the user: a limit that is set can only be lowered by what comes after."""
    for name, value in setting["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if setting["uid"] is not None:
        os.setgroups([])
        os.setresgid(setting["uid"], setting["uid"], setting["uid"])
        os.setresuid(setting["uid"], setting["uid"], setting["uid"])
    sys.set_int_max_str_digits(0)  # a long answer costs CPU time, which is limited


# ---------------------------------------------------------------- the host: the program's side


def host(program: str, link: "Link") -> None:
    """Host the program; nothing of it runs before the examiner is ready: it could keep the machine so busy that it never is."""
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    link.receive()
    exec(compile(program, "<program>", "exec"), module.__dict__)
    kept: list[Any] = [module]
    while (question := link.receive()) is not None:
        try:
            answer = ["value", _plain(_answered(question, kept), kept)]
        except Exception as error:  # whatever the program raises is its answer
            answer = ["raised", type(error).__name__, str(error)[:1000]]
        link.send(answer)


def _answered(question: list[Any], kept: list[Any]) -> Any:
    kind, number, *rest = question
    if kind == "attribute":
        return getattr(kept[number], rest[0])
    args, kwargs = (rebuilt(part, lambda n: kept[n]) for part in rest)
    return kept[number](*args, **kwargs)


# ---------------------------------------------------------------- the examiner: the tests' side


def examine(source: dict[str, Any], control: int, link: "Link") -> None:
    """The tests' own prints go nowhere; the one thing said is how they ended, to a pipe that only we hold."""
    exam = Exam(link)
    link.send("begin")
    verdict: dict[str, Any] = {"passed": True}
    try:
        scope: dict[str, Any] = {"__name__": "tests"}
        exec(compile(source["setup"], "<setup>", "exec"), scope)
        scope |= exam.names(source["names"])
        exec(compile(source["tests"], "<tests>", "exec"), scope)
    except Untransportable as error:
        verdict = {"passed": False, "unjudged": str(error)}
    except BaseException as error:  # a test that exits, or is interrupted, has not passed either
        reason = "".join(traceback.format_exception_only(error))[-2000:]
        verdict = {"passed": False, "reason": reason, "gone": isinstance(error, Ended)}
    os.write(control, json.dumps(verdict | {"calls": exam.calls}).encode())


class Exam:
    """The program as the tests see it."""

    def __init__(self, link: "Link"):
        self.link, self.calls = link, 0

    def names(self, names: list[str]) -> dict[str, Any]:
        """Names of the program for the tests. What the program lacks stays undefined: the test that needs it fails with a NameError."""
        found = {}
        for name in names:
            try:
                found[name] = self.ask(["attribute", 0, name])
            except AttributeError:
                continue
        return found

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        return self.ask(["call", number, carried(args), carried(kwargs)])

    def ask(self, question: list[Any]) -> Any:
        self.link.send(question)
        answer = self.link.receive()
        match answer:
            case ["value", value]:
                return rebuilt(value, lambda number: Remote(self, number))
            case ["raised", str(name), str(message)]:
                raise_again(name, message)
        raise Ended("the program ended before it answered" if answer is None else "the program's answer is not one")


class Remote:
    """A function or object that stays in the program. Two of them are equal only if they are one."""

    def __init__(self, exam: Exam, number: int):
        self.__exam, self.__number = exam, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__exam.call(self.__number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copy, pickle and the like ask; the program is not to answer
        return self.__exam.ask(["attribute", self.__number, name])

    def _handle(self) -> int:
        return self.__number


def raise_again(name: str, message: str) -> NoReturn:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, MUTE):
        try:
            raised = kind(message)
        except TypeError:  # UnicodeDecodeError and its like want more than a message
            raise RaisedInProgram(f"{name}: {message}") from None
        raise raised
    raise RaisedInProgram(f"{name}: {message}")


# ---------------------------------------------------------------- values on the wire


class Link:
    """JSON lines over two pipes."""

    def __init__(self, reading: int, writing: int):
        self.reading, self.writing = os.fdopen(reading, "rb"), os.fdopen(writing, "wb", buffering=0)

    def send(self, message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            while line:
                line = line[self.writing.write(line):]
        except BrokenPipeError:
            raise Ended("the program ended before it was asked") from None

    def receive(self) -> Any:
        """Receive a message; None where the other side is gone."""
        line = self.reading.readline(_LINE + 1)
        if not line.endswith(b"\n"):
            return None
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise _Unreadable("a message is not JSON, or too deep") from None


def carried(value: Any) -> Any:
    """Value that the tests hand over: plain data and what came from the program; nothing of theirs stays reachable."""
    def refused(other: Any) -> Any:
        if isinstance(other, Remote):
            return ["kept", other._handle()]
        raise Untransportable(f"the tests hand the program a {type(other).__name__}, which cannot leave their sandbox")

    return wired(value, refused)


def _plain(value: Any, kept: list[Any]) -> Any:
    """Answer of the program: data as data, anything else as a number under which it is kept."""
    def keep(other: Any) -> Any:
        kept.append(other)
        return ["kept", len(kept) - 1]

    return wired(value, keep)


def wired(value: Any, other: Any) -> Any:
    """JSON scalars are themselves; the rest is [kind, content]."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        kind = next(k for k in (list, tuple, set, frozenset) if isinstance(value, k))
        return [kind.__name__, [wired(item, other) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[wired(k, other), wired(v, other)] for k, v in value.items()]]
    if isinstance(value, bytes | bytearray):
        return [type(value).__name__, value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, decimal.Decimal | fractions.Fraction):
        return [type(value).__name__, str(value)]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    if isinstance(value, collections.abc.Iterator):
        return ["iterator", [wired(item, other) for item, _ in zip(value, range(ITEMS), strict=False)]]
    return other(value)


def rebuilt(wire: Any, kept: Any) -> Any:
    """The value a message describes, of exactly the builtin types; Unreadable where it describes none."""
    if wire is None or isinstance(wire, bool | int | float | str):
        return wire
    try:
        kind, content = wire
        if kind == "dict":
            return {rebuilt(k, kept): rebuilt(v, kept) for k, v in content}
        if kind == "kept":
            return kept(content)
        if kind in _SCALARS:
            return _SCALARS[kind](content)
        return SEQUENCES[kind](rebuilt(item, kept) for item in content)
    except (TypeError, ValueError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise _Unreadable(f"not a value: {type(error).__name__}") from None


_SCALARS: dict[str, Any] = {"bytes": bytes.fromhex, "bytearray": bytearray.fromhex, "complex": lambda parts: complex(*parts),
                            "Decimal": decimal.Decimal, "Fraction": fractions.Fraction, "range": lambda parts: range(*parts)}
SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": lambda items: iter(list(items))}


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

"""Flags, files and mistakes: one dataclass is all of them."""

from dataclasses import dataclass
from typing import Literal

import pytest

from assay.config import argument, from_mapping, option, parse
from assay.errors import UsageError


@dataclass(frozen=True)
class Flags:
    """A verb."""

    path: str = argument("where")
    rate: float = option("how fast", default=0.5)
    steps: int | None = option("how long", default=None)
    names: tuple[str, ...] = option("which", default=())
    mode: Literal["a", "b"] = option("how", default="a")
    loud: bool = option("say more", default=False)


def parsed(*argv: str, config_file: bool = False) -> Flags:
    return parse(Flags, argv, prog="assay verb", config_file=config_file)


def test_flags_become_typed_values():
    assert parsed("x", "--rate", "2", "--names", "u", "v", "--mode", "b", "--loud") == Flags("x", 2.0, None, ("u", "v"), "b", True)


def test_an_unknown_flag_names_the_nearest():
    with pytest.raises(UsageError, match=r"unknown argument '--rte'; did you mean '--rate'\?"):
        parsed("x", "--rte", "1")


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("path: y\nrate: 3\nsteps: 7\n")
    assert parsed("x", "--config", str(file), "--steps", "9", config_file=True) == Flags("x", 3.0, 9)


@pytest.mark.parametrize(("text", "sentence"), [
    ("path: y\nrat: 1", "unknown option 'rat'; did you mean 'rate'"), ("path: y\nsteps: many", "expected int"),
    ("path: y\nsteps: 1.5", "expected a whole number"), ("path: y\nmode: c", "expected one of a, b"), ("- a list", "expected a mapping"),
    ("path: y\nloud: 1", "expected bool"), ("path: [", "not YAML"), ("path: y\nsteps: true", "expected int")])
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path, text, sentence):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        parsed("x", "--config", str(file), config_file=True)


def test_a_missing_value_is_named():
    with pytest.raises(UsageError, match="missing path"):
        from_mapping(Flags, {}, where="here")

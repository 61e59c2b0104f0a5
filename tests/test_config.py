"""Flags, files, help and mistakes: one dataclass is all of them."""

import importlib
import random
from dataclasses import dataclass, fields
from typing import Literal

import pytest

from assay.cli import VERBS
from assay.config import argument, from_mapping, nearest, option, parse
from assay.errors import UsageError
from assay.recipes.dpo_options import Dpo
from assay.recipes.edit_options import Edit
from assay.recipes.grpo_options import Grpo
from assay.recipes.options import Distill, Pretrain, Sft
from assay.recipes.ttt_options import Ttt


@dataclass(frozen=True)
class Flags:
    """A verb.

    More of it.
    """

    path: str = argument("where")
    rate: float = option("how fast", default=0.5)
    steps: int | None = option("how long", group="budget", default=None, default_text="until it is done")
    names: tuple[str, ...] = option("which", default=())
    mode: Literal["a", "b"] = option("how", default="a")
    loud: bool = option("say more", default=False)
    from_: str | None = option("whence", default=None)
    zero: int = option("nothing at all", default=0)
    warmup_share: float = option("5 % or so", default=1e-6)


@dataclass(frozen=True)
class Strict:
    """A verb that needs a file."""

    out: str = option("where to", metavar="FOLDER")
    data: tuple[str, ...] = option("what of", metavar="FILE")


def parsed(*argv: str, config_file: bool = False) -> Flags:
    return parse(Flags, argv, prog="assay verb", config_file=config_file)


def test_flags_become_typed_values():
    assert parsed("x", "--rate", "2", "--names", "u", "v", "--mode", "b", "--loud") == Flags("x", 2.0, None, ("u", "v"), "b", True)


def test_an_unknown_flag_names_the_nearest():
    with pytest.raises(UsageError, match=r"unknown argument '--rte'; did you mean '--rate'\?"):
        parsed("x", "--rte", "1")


def test_initials_are_near_and_of_many_names_only_the_nearest_are_listed():
    assert nearest("--lr", ["--rate", "--learning-rate"]) == "; did you mean '--learning-rate'?"
    assert nearest("zzz", ["one", "two"]) == "; expected one of: one, two"
    assert nearest("zzz", [f"name-{n}" for n in range(40)]).count("name-") == 3


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("path: y\nrate: 3\nsteps: 7\nfrom: there\n")
    assert parsed("x", "--config", str(file), "--steps", "9", config_file=True) == Flags("x", 3.0, 9, from_="there")

# ---------------------------------------------------------------- help


def helped(cls: type, capsys, **more) -> str:
    with pytest.raises(SystemExit):
        parse(cls, ["--help"], prog="assay verb", **more)
    return capsys.readouterr().out


def test_help_shows_every_default_also_nought_and_off(capsys):
    shown = " ".join(helped(Flags, capsys).split())
    for line in ("--rate X How fast. Default: 0.5.", "--steps N How long. Default: until it is done.", "Which. Default: none.",
                 "--mode {a,b} How. Default: a.", "--loud Say more. Default: off.", "--from FROM Whence. Default: none.",
                 "--zero N Nothing at all. Default: 0.", "5 % or so. Default: 1e-6."):
        assert line in shown
    assert "usage: assay verb path [options] A verb. More of it." in shown
    assert "budget: --steps" in shown


def test_help_marks_what_is_required_also_where_a_file_may_give_it(capsys):
    shown = " ".join(helped(Strict, capsys, config_file=True).split())
    assert "usage: assay verb --out FOLDER --data FILE … [options]" in shown
    assert "--out FOLDER Where to. Required." in shown
    assert "--config FILE.yaml Options from a file; flags override it. Default: none." in shown

# ---------------------------------------------------------------- files


@pytest.mark.parametrize(("text", "sentence"), [
    ("path: y\nrat: 1", "unknown option 'rat'; did you mean 'rate'"), ("path: y\nsteps: many", "expected int"),
    ("path: y\nsteps: 1.5", "expected a whole number"), ("path: y\nmode: c", "expected one of a, b"), ("- a list", "expected a mapping"),
    ("path: y\nloud: 1", "expected bool"), ("path: [", "not YAML"), ("path: y\nsteps: true", "expected int"), ("", "found NoneType"),
    ("path: y\nnames: {a: b}", "expected one or more values"), ("names: [[a], b]", r"names is \['a'\]; expected str"),
    ("path: y\nnames:", "names is None; expected one or more values"), ("rate: 1\nrate: 2", "'rate' stands twice"),
    ("warmup-share: 1\nwarmup_share: 2", "stands there twice"), ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "unknown option 'a'"),
    ("path: !!python/name:os.system y", "could not determine a constructor"), ("path: !!bool maybe", "not YAML"),
    ("path: y\nrate: .nan", "--rate is nan; expected a number"), ("path: y\nrate: nan", "--rate is nan; expected a number"),
    ("path: y\nrate: 1e999", "--rate is inf; expected a number"), (f"path: y\nsteps: {'9' * 5000}", "not YAML"),
    ("path: y\nsteps: 99999999999999999999", "expected a whole number of at most 18 digits"), ('from: "a\\0b"', "can be written"),
    ('from: "a\\ud800b"', "can be written"), ("yes: y", "True is not the name of an option"), ("1: y", "1 is not the name of an option"),
    ("? [a]\n: y", "not YAML"), ("? {a: b}\n: y", "not YAML"),
    ("path: y\n---\npath: z", "not YAML"), ("path: a" + "b" * (1 << 20), "more than 1,048,576 bytes")])
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path, text, sentence):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        parsed("--config", str(file), "x", config_file=True)


PIECES = ["", "~", "null", "true", "yes", "[", "]", "{", "}", "[]", "{}", "[[]]", "{a: b}", "&a x", "*a", "!!int x", "!!binary x",
          "!!set {a}", "!!timestamp x", "<<: *a", "? a", ": ", "- ", "---", "...", "|\n", ">", "%TAG ! x", "\t", "\0", "\x07", "\ufeff",
          "é", "🙂", "1", "-1", "1.5", "1e400", ".nan", ".inf", "0o7", "0x1f", "1:30", "2024-13-45", "9" * 5000, '"\\ud800"', '"\\0"',
          "'", '"', "#", "a" * 300, "from: x", "out: x", "model: [a, [b]]", "[" * 600, "{a: " * 300]


def mutated(random_: random.Random, text: bytes) -> bytes:
    """A file of options with a few of its pieces torn out, doubled, swapped, or replaced by what YAML has to offer."""
    for _ in range(random_.randint(1, 4)):
        start = random_.randrange(len(text) + 1)
        end = min(len(text), start + random_.choice([0, 0, 1, 3, 10, 40]))
        piece = random_.choice(PIECES).encode("utf-8", "surrogatepass")
        text = text[:start] + random_.choice([piece, b"", text[start:end] * 2, bytes(random_.randrange(256) for _ in range(3)),
                                              b" " + piece + b"\n"]) + text[end:]
    return text


@pytest.mark.parametrize("cls", [Sft, Grpo, Distill, Pretrain, Edit, Ttt])
def test_no_file_gives_a_traceback(cls, tmp_path):
    """Some hundreds of damaged files: each is read, or refused with one sentence."""
    whole = "\n".join(f"{name.rstrip('_')}: {value}" for name, value in {
        "out": "runs/a", "data": "[a.jsonl, b.jsonl]", "facts": "f.json", "text": "t.txt", "path": "m", "corpus": "c", "seed": 3,
        "minutes": 0.5, "reward": "[answer:1]", "device": "cpu", "probe_samples": 0}.items()
        if name in cls.__dataclass_fields__).encode() + b"\n"
    random_, file, refused = random.Random(cls.__name__), tmp_path / "run.yaml", 0
    for _ in range(150):
        file.write_bytes(mutated(random_, whole))
        refusal = refused_with(cls, ["--config", str(file)])
        refused += refusal is not None
        assert refusal is None or (len(refusal.splitlines()) == 1 and len(refusal) < 1000)
    assert refused > 50


def refused_with(cls: type, argv: list[str]) -> str | None:
    try:
        parse(cls, argv, prog="assay verb", config_file=True)
    except UsageError as error:
        return str(error)
    return None


def test_a_missing_value_is_named():
    with pytest.raises(UsageError, match="missing path"):
        from_mapping(Flags, {}, where="here")


@pytest.mark.parametrize(("cls", "given", "heard"), [
    (Dpo, ["--simpo-gamma", "2"], ["--loss-type", "simpo"]),
    (Distill, ["--beta", "0.1"], ["--divergence", "jsd"]),
    (Distill, ["--max-new-tokens", "8"], ["--on-policy", "0.5"]),
    (Distill, ["--max-new-tokens", "8"], ["--how", "text"]),
])
def test_an_option_that_another_must_be_given_for_is_refused_without_it(cls, given, heard):
    needed = ["--model", "m", "--data", "d", "--out", "o"]
    with pytest.raises(UsageError, match=f"{given[0]} .* has no effect without .*{heard[0]}"):
        parse(cls, [*needed, *given], prog="assay")
    parse(cls, [*needed, *given, *heard], prog="assay")
    parse(cls, [*needed, given[0], str(getattr(parse(cls, needed, prog="assay"), given[0].lstrip("-").replace("-", "_")))], prog="assay")


def test_what_a_help_asks_for_is_an_option_of_the_same_verb():
    read = 0
    for verb in VERBS:
        config = importlib.import_module(f"assay.verbs.{verb.replace('-', '_')}").FLAGS
        names = {field.name for field in fields(config)}
        for field in fields(config):
            if needs := field.metadata.get("needs"):
                read += 1
                assert {word[2:].replace("-", "_") for word in needs.split() if word.startswith("--")} <= names, field.name
    assert read > 15

"""Reward functions of (prompt, completion, row): built-in rules or a user's file, each with a weight.

    parse_rewards(["answer:1", "format:0.1", "length[longest=512,margin=128]:0.5", "mine.py:politeness:0.2"])
    parse_rewards(["judge[model=big,url=http://127.0.0.1:8000/v1]:1"], relative=True)       no rule: it compares a group's completions

A reward says what a completion is worth or raises: what it cannot tell is an error row (see worker_pool.py), never 0. A user's
file is not imported here, only in the worker processes.
"""

import ast
import builtins
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from assay.config import nearest
from assay.errors import ArtifactError, DataError, UsageError
from assay.reward.answer import AnswerForm, Strictness, gold_answer, read_answer, same_answer
from assay.reward.json_schema import check_schema, schema_fault
from assay.store.durable import hash_file
from assay.strict_json import parse_json, read_json

_Row = Mapping[str, Any]
RewardFunction = Callable[[str, str, _Row], float]

_SPEC = re.compile(r"(?P<name>[^\[\]]+?)(?:\[(?P<options>.*)\])?(?::(?P<weight>[-+.\deE]+))?", re.DOTALL)
_MODEL = re.compile(r"model:(?P<path>[^\[\]]*[^\[\]\d.:][^\[\]:]*)(?::(?P<weight>[-+.\deE]+))?")
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```[^\S\n]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class RewardSpec:
    """`file` is a user's .py; without it, `name` is one of BUILT_IN."""

    name: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None

    @property
    def relative(self) -> bool:
        """Whether the reward compares the completions of a group; of one alone it can say nothing."""
        return self.file is None and self.name in RELATIVE_REWARDS

    @property
    def learned(self) -> bool:
        """A model says it: nobody knows what a right completion gets."""
        return self.file is None and self.name == "model"

    @property
    def full_marks(self) -> float | None:
        """Reward of a right completion, before the weight; None where only the author of the file knows."""
        return FULL_MARKS[self.name] if self.file is None and not (self.relative or self.learned) else None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "weight": self.weight, "options": dict(self.options), "file": self.file}


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Any OpenAI-compatible endpoint; what is left out comes from OPENAI_BASE_URL and OPENAI_MODEL. The key is only ever in `key`,
    a variable of the environment. `rubric` is a file; `repeat` the share of groups that are scored twice."""

    model: str = ""
    url: str = ""
    key: str = "OPENAI_API_KEY"
    rubric: str = ""
    repeat: float = 0.1
    tries: int = 4
    seconds: float = 120.0
    concurrency: int = 4

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key):
            raise UsageError("--reward judge: key is the name of a variable of the environment, as in key=OPENAI_API_KEY; a key itself "
                             "would stand in the run's files")


def parse_rewards(specs: Sequence[str], *, relative: bool = False) -> list[RewardSpec]:
    """Parse rewards, each `NAME[OPTION=VALUE,…]:WEIGHT` or `FILE.py:FUNCTION:WEIGHT`; a weight left out is 1. `relative`: a judge is
    welcome."""
    rewards = [_parsed(spec) for spec in specs]
    if not relative and any(reward.relative for reward in rewards):
        raise UsageError("a judge compares the completions of a group, and here each is scored by itself: give a rule, such as answer; "
                         "the judge is for assay grpo --reward")
    names = [reward.name for reward in rewards]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UsageError(f"--reward: {twice!r} is given twice; give each once, with the weight it shall have")
    if not any(reward.weight for reward in rewards):
        raise UsageError("--reward: no reward has a weight, so every completion would be worth 0; give at least one, as in answer:1")
    return rewards


def built_in_reward(reward: RewardSpec) -> RewardFunction:
    """The function of a reward without a file, its options bound; a model that it asks is opened now, not on the first item's time."""
    if reward.learned:
        from assay.reward.model_reward import loaded_reward_model

        loaded_reward_model(reward.options["path"], reward.options.get("device", "cpu"))
    return partial(BUILT_IN_REWARDS[reward.name], **reward.options)


def reward_digest(reward: RewardSpec) -> str:
    """Digest of a rule: its name and options, and the bytes of its file, of a file that an option names, or of a model that it asks."""
    named = [reward.file, *(reward.options.get(option) for option in ("file", "rubric"))]
    read = [hash_file(Path(file)) for file in named if file]
    if reward.learned:
        from assay.reward.model_reward import reward_artifact

        read.append(reward_artifact(reward.options["path"]).digest)
    told = [reward.name, sorted((name, str(value)) for name, value in reward.options.items()), read]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()

# ---------------------------------------------------------------- built in


def answer_reward(prompt: str, completion: str, row: _Row, *, how: Strictness = "strict", form: AnswerForm = "any") -> float:
    """1 where the answer is the row's gold."""
    return float(same_answer(read_answer(completion, how, form), gold_answer(row)))


def format_reward(prompt: str, completion: str, row: _Row) -> float:
    """1 where the text is <think>…</think><answer>…</answer>, each tag once and nothing outside; a prompt may open the first."""
    text = "<think>" * prompt.rstrip().endswith("<think>") + completion
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return 0.0
    return float(bool(re.fullmatch(r"\s*<think>.*\S.*</think>\s*<answer>.*\S.*</answer>\s*", text, re.DOTALL)))


def length_reward(prompt: str, completion: str, row: _Row, *, longest: int, margin: int,
                  unit: Literal["tokens", "characters"] = "tokens") -> float:
    """DAPO's soft penalty (arXiv:2503.14476, eq. 13): 0 up to longest − margin, then down in a line to −1 at longest.

    Tokens are counted by who has the tokenizer: the row's `completion_tokens`.
    """
    if not 0 < margin <= longest:
        raise UsageError(f"reward length: margin must be from 1 to longest ({longest}), found {margin}")
    if unit == "tokens" and "completion_tokens" not in row:
        raise DataError("reward length counts tokens, and the row has no 'completion_tokens'; add it, or ask for unit=characters")
    used = int(row["completion_tokens"]) if unit == "tokens" else len(completion)
    return -min(1.0, max(0.0, (used - (longest - margin)) / margin))


def regex_reward(prompt: str, completion: str, row: _Row, *, pattern: str = "") -> float:
    """1 where the option's pattern, or else the row's `pattern`, is found in the completion."""
    return float(bool(re.search(pattern or _column(row, "pattern", str), completion)))


def json_schema_reward(prompt: str, completion: str, row: _Row, *, file: str = "") -> float:
    """1 where the completion is JSON, bare or in one fence, that fits the schema in the file, or else in the row's `schema`."""
    schema = read_json(Path(file), (dict, bool), error=UsageError) if file else _column(row, "schema", Mapping | bool)
    check_schema(schema)
    blocks = _FENCED.findall(completion) or [completion]
    if len(blocks) != 1:
        return 0.0
    try:
        value = parse_json(blocks[0], where="the completion")
    except ArtifactError:  # not JSON: the completion's fault, so no marks
        return 0.0
    return float(schema_fault(value, schema) is None)


def unit_tests_reward(prompt: str, completion: str, row: _Row, *, seconds: int = 5) -> float:
    """1 where the one fenced program, or the bare text, passes the row's `tests` in the sandbox: Python that raises when it is wrong.

    What the tests take from the program is the row's `entry_point` (HumanEval) or every name they use and do not make (MBPP).
    A program that fails, hangs or floods gets 0; a sandbox that does not start, or tests that test nothing, are errors.
    """
    from assay.reward.sandbox import Limits, judge_program

    blocks = _FENCED.findall(completion) or [completion]
    given = _column(row, "tests", str | list)
    tests = given if isinstance(given, str) else "\n".join(given)
    names = [row["entry_point"]] if "entry_point" in row else _names_wanted(tests)
    if len(blocks) != 1:
        return 0.0
    return float(judge_program(blocks[0], tests, names=names, limits=Limits(seconds=seconds, wall_seconds=3.0 * seconds)).passed)


def gym_reward(prompt: str, completion: str, row: _Row, *, how: Strictness = "strict", form: AnswerForm = "tag") -> float:
    """Score by reasoning-gym's own scorer, partial marks as it has them; rows come from `assay data gym`."""
    from assay.reward.gym import gym_score

    said = read_answer(completion, how, form)
    return 0.0 if said is None else gym_score(row, said)


def model_reward(prompt: str, completion: str, row: _Row, *, path: str, device: str = "cpu") -> float:
    """Reward of a reward model: the logit of its <|reward|> at the end of the text; model:PATH is short for model[path=PATH]."""
    from assay.reward.model_reward import text_reward

    return text_reward(path, prompt, completion, device)


BUILT_IN_REWARDS: dict[str, Callable[..., float]] = {
    "answer": answer_reward, "format": format_reward, "length": length_reward, "regex": regex_reward, "json_schema": json_schema_reward,
    "unit_tests": unit_tests_reward, "gym": gym_reward, "model": model_reward}
RELATIVE_REWARDS: dict[str, Callable[..., Any]] = {"judge": JudgeOptions}  # of groups, not in the workers
FULL_MARKS = dict.fromkeys(BUILT_IN_REWARDS, 1.0) | {"length": 0.0}

# ---------------------------------------------------------------- reading a request


def _parsed(spec: str) -> RewardSpec:
    if (short := _MODEL.fullmatch(spec.strip())) is not None:
        spec = f"model[path={short['path']}]:{short['weight'] or 1}"
    found = _SPEC.fullmatch(spec.strip())
    if found is None:
        raise UsageError(f"reward {spec}: expected NAME[OPTION=VALUE]:WEIGHT or FILE.py:FUNCTION:WEIGHT")
    name, options, weight = found["name"], found["options"], _weight(spec, found["weight"])
    if ".py:" not in name:
        known = {**BUILT_IN_REWARDS, **RELATIVE_REWARDS}
        if name not in known:
            raise UsageError(f"reward {spec}: unknown reward {name!r}{nearest(name, known)}; or give FILE.py:FUNCTION")
        if name == "gym" and find_spec("reasoning_gym") is None:
            from assay.reward.gym import HINT

            raise UsageError(f"reward {spec}: {HINT}")
        return RewardSpec(name, weight, _options(spec, name, options or ""))
    file, function = name.rsplit(":", 1)
    if options is not None or not function.isidentifier():
        raise UsageError(f"reward {spec}: expected FILE.py:FUNCTION:WEIGHT, without options")
    if not Path(file).is_file():
        raise UsageError(f"reward {spec}: there is no file {file}")
    _require_defined(spec, Path(file), function)
    return RewardSpec(function, weight, {}, str(Path(file).resolve()))


def _require_defined(spec: str, file: Path, function: str) -> None:
    """Require that the file defines the function, as far as its text tells: the file is run in the workers alone, once there is something
    to score."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes(), str(file))))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"reward {spec}: {file} is not Python: {error}") from None
    bound = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    if function not in bound and "*" not in bound:
        raise UsageError(f"reward {spec}: {file} has no {function!r}{nearest(function, sorted(bound))}")


def _weight(spec: str, given: str | None) -> float:
    try:
        weight = float("1" if given is None else given)
    except ValueError:
        raise UsageError(f"reward {spec}: the weight {given!r} is not a number") from None
    if not math.isfinite(weight):
        raise UsageError(f"reward {spec}: the weight {given!r} is not finite")
    return weight


def _options(spec: str, reward: str, text: str) -> dict[str, Any]:
    """The options as the function's keyword arguments have them; a value may hold commas, but no ',word='."""
    parameters = inspect.signature({**BUILT_IN_REWARDS, **RELATIVE_REWARDS}[reward]).parameters.values()
    known = {parameter.name: parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    options = {}
    for part in re.split(r",(?=\w+=)", text) if text else []:
        name, equals, value = part.partition("=")
        if not equals or name not in known:
            raise UsageError(f"reward {spec}: unknown option {name!r}{nearest(name, known) if known else '; it has none'}")
        options[name] = _typed(spec, name, value, known[name].annotation)
    missing = [name for name, parameter in known.items() if parameter.default is inspect.Parameter.empty and name not in options]
    if missing:
        raise UsageError(f"reward {spec}: needs {', '.join(missing)}, as in {reward}[{missing[0]}=…]")
    return options


def _typed(spec: str, name: str, value: str, annotation: Any) -> Any:
    if get_origin(annotation) is Literal:
        if value not in get_args(annotation):
            raise UsageError(f"reward {spec}: {name} is {value!r}{nearest(value, get_args(annotation))}")
        return value
    try:
        return annotation(value)
    except ValueError:
        raise UsageError(f"reward {spec}: {name} is {value!r}; expected {annotation.__name__}") from None


def _names_wanted(tests: str) -> list[str]:
    """Names that the tests read and nobody but the program can give them."""
    nodes = list(ast.walk(ast.parse(tests)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {(a.asname or a.name).split(".")[0] for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names}
    return sorted(used - made - set(dir(builtins)))


def _column(row: _Row, name: str, kind: Any) -> Any:
    if not isinstance(row.get(name), kind):
        raise DataError(f"the row has no usable {name!r}: found {row.get(name)!r}")
    return row[name]

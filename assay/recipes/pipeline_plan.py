"""Pipeline plan: a YAML file of stages with gates, read strictly: what each stage will run, on what and after which, or why it cannot.

    purpose: sums by reinforcement
    budget: 30 min                                # of all stages together
    inputs: {data: sums.jsonl}                    # names for what comes from outside; `--input data=other.jsonl` gives another
    stages:
      sft:                                        # the name is the verb, unless `verb:` says otherwise
        options: {model: tiny, data: "${inputs.data}"}
        require: proven
      after:
        verb: eval
        options: {path: "${stages.sft.model}", task: graded}
        require: shown better than before on graded
        budget: 10 min
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from assay.config import command_words, from_mapping, named_options, nearest
from assay.errors import UsageError
from assay.strict_json import parse_yaml, read_small_file, require_shape

LARGEST_PLAN = 1 << 20  # bytes
STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
RESERVED_STAGES = {"pipeline", "logs", "earlier"}  # what the pipeline itself writes
REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_BUDGET = re.compile(r"(\d+(?:\.\d+)?) *(s|min|h)")
_SHOWN = re.compile(r"(shown better|not shown worse) than (\S+) on (.+)")
GATES = "proven, not refuted, shown better than STAGE on NAME, not shown worse than STAGE on NAME"
_STAGE = {"verb?": str, "options?": (dict, None), "require?": (str, [str]), "budget?": str, ...: None}
_PLAN = {"purpose?": str, "budget?": str, "inputs?": {str: (str, float, bool)}, "stages": {str: (dict, None)}, ...: None}


@dataclass(frozen=True)
class StageKind:
    """Properties of a verb that a pipeline knows besides its options."""

    files: tuple[str, ...] = ()  # options that name files, or folders that are no models
    models: tuple[str, ...] = ()  # options that name models
    model: str | None = None  # where in its folder the model lies that it hands over; "": the folder itself
    goes_on: bool = False  # the same command resumes in the folder that it left; others want none there
    report: str | None = None  # the file that it writes last, once; where that is there, the same command does not go on
    prints: bool = False  # what it finds is the JSON that it prints, which is kept
    suffix: str = ""  # of what it writes


_TRAINING = StageKind(("data", "held_out_data", "suite"), ("model", "from_"), "model", goes_on=True)
KINDS = {
    "tiny": StageKind(model="model"),
    "fetch": StageKind(),
    "tokenizer": StageKind(("text",)),
    "corpus": StageKind(("text", "tokenizer", "held_out_files")),
    "pretrain": StageKind(("corpus", "mix"), (), "model", goes_on=True),
    "sft": _TRAINING,
    "dpo": _TRAINING,
    "kto": _TRAINING,
    "distill": replace(_TRAINING, models=("model", "from_", "teacher")),
    "reward-model": _TRAINING,
    "grpo": _TRAINING,
    "merge": StageKind(("data",), ("models", "base"), ""),
    "prune": StageKind(("data",), ("model",), ""),
    "edit": StageKind(("facts", "text"), ("path",), "model", goes_on=True, report="edits.json"),
    "ttt": StageKind(("text",), ("path",), goes_on=True, report="ttt.json"),
    "eval": StageKind(("data", "trained_on", "suite"), ("path", "base", "against"), goes_on=True),
    "compare": StageKind(("results",), prints=True, suffix=".json"),
    "probe": StageKind(("prompts", "history"), ("artifact", "against", "base"), prints=True, suffix=".json"),
    "prove": StageKind((), ("path", "against", "base"), prints=True, suffix=".json"),
    "export": StageKind(("text",), ("path", "base"), "", prints=True),
    "publish": StageKind(("run", "evals"), ("path",), prints=True, suffix=".json"),
    "report": StageKind(("run", "against", "evals"), suffix=".html"),
}
_CODE = ("grader", "reward", "metric", "environment", "environment_options")  # options that may name files among other things
_REWARD_MODEL = re.compile(r"model:([^\[\]:]*[^\[\]\d.:][^\[\]:]*)(?::[-+.\deE]+)?")
_OPTION_PATH = re.compile(r"=([^,\[\]]+)")


@dataclass(frozen=True)
class Gate:
    words: str
    kind: Literal["proven", "not refuted", "shown better", "not shown worse"]
    than: str = ""
    on: str = ""


@dataclass(frozen=True)
class Stage:
    """`said` are its options as the file says them, `words` the command's; `inputs` are paths and models that it reads."""

    name: str
    verb: str
    said: Mapping[str, Any]
    words: tuple[str, ...]
    needs: tuple[str, ...]
    inputs: tuple[str, ...]
    out: str
    model: str | None
    gates: tuple[Gate, ...] = ()
    budget: float | None = None  # seconds

    @property
    def kind(self) -> StageKind:
        return KINDS[self.verb]


@dataclass(frozen=True)
class PipelinePlan:
    """`stages` stand in the order in which they run: the file's, but for what must come before."""

    file: str
    out: Path
    purpose: str
    budget: float | None
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class _Draft:
    """A stage whose references still stand in its options."""

    name: str
    verb: str
    said: dict[str, Any]
    gates: tuple[Gate, ...]
    budget: float | None
    where: str
    needs: list[str] = field(default_factory=list)


def read_plan(file: Path, out: Path, flags_of: Callable[[str], type], given: Sequence[str] = ()) -> PipelinePlan:
    """Read a pipeline's plan. Everything that can be known beforehand is asked here. `flags_of` gives a verb's options; `given` are inputs
    as NAME=VALUE."""
    document = parse_yaml(read_small_file(file, LARGEST_PLAN, UsageError), where=str(file), error=UsageError)
    require_shape(document, _PLAN, where=str(file), error=UsageError)
    if not document["stages"]:
        raise UsageError(f"{file}: no stage stands under `stages`; expected NAME: {{verb: …, options: …}}")
    inputs = _inputs(document.get("inputs", {}), given, str(file))
    drafts = {name: _draft(name, said or {}, inputs, f"{file}: stage {name!r:.80}") for name, said in document["stages"].items()}
    for draft in drafts.values():
        draft.needs.extend(_needs(draft, drafts))
    ordered = _in_order(drafts, str(file))
    places = {name: _place(draft, out) for name, draft in drafts.items()}
    stages = tuple(_stage(draft, drafts, places, flags_of) for draft in ordered)
    return PipelinePlan(str(file), out, document.get("purpose", ""), _budget(document.get("budget"), str(file)), stages)


# ---------------------------------------------------------------- one stage as the file says it


def _inputs(named: dict[str, Any], given: Sequence[str], where: str) -> dict[str, Any]:
    for one in given:
        name, sign, value = one.partition("=")
        if not sign or name not in named:
            known = nearest(name, named) if named else f"; {where} names none"
            raise UsageError(f"--input {one}: expected NAME=VALUE with an input of {where}{known}")
        named = named | {name: value}
    return named


def _draft(name: str, said: dict[str, Any], inputs: Mapping[str, Any], where: str) -> _Draft:
    require_shape(said, _STAGE, where=where, error=UsageError)
    if not STAGE_NAME.fullmatch(name) or name in RESERVED_STAGES:
        raise UsageError(f"{where}: not a name for a stage; expected letters, digits, - and _, and none of "
                         f"{', '.join(sorted(RESERVED_STAGES))}")
    verb = said.get("verb", name)
    if verb not in KINDS:
        raise UsageError(f"{where}: unknown verb {verb!r:.80}{nearest(verb, KINDS)}")
    options = named_options(said.get("options") or {}, where=where)
    required = said.get("require", [])
    gates = tuple(_gate(words, verb, where) for words in ([required] if isinstance(required, str) else required))
    return _Draft(name, verb, {key: _with_inputs(value, inputs, f"{where}: {key}") for key, value in options.items()}, gates,
                  _budget(said.get("budget"), where), where)


def _gate(words: str, verb: str, where: str) -> Gate:
    if words in ("proven", "not refuted"):
        if KINDS[verb].model is None and verb not in ("fetch", "prove"):
            raise UsageError(f"{where}: require: {words}: assay {verb} hands over no model; put it to a stage that does, or to prove")
        return Gate(words, "proven" if words == "proven" else "not refuted")
    found = _SHOWN.fullmatch(words)
    if not found:
        raise UsageError(f"{where}: require: {words!r:.100} is no gate; expected one of: {GATES}")
    if verb not in ("eval", "compare"):
        raise UsageError(f"{where}: require: {words}: assay {verb} scores nothing; put it to the stage that evaluates the model, or to "
                         "compare")
    return Gate(words, "shown better" if found[1] == "shown better" else "not shown worse", found[2], found[3])


def _budget(text: str | None, where: str) -> float | None:
    if text is None:
        return None
    found = _BUDGET.fullmatch(text.strip())
    if not found or float(found[1]) == 0:
        raise UsageError(f"{where}: budget: {text!r:.60}; expected a time such as 90 s, 10 min or 2 h")
    return float(found[1]) * _SECONDS[found[2]]


def _with_inputs(value: Any, inputs: Mapping[str, Any], where: str) -> Any:
    """An option that is one input whole keeps its type."""
    if isinstance(value, list):
        return [_with_inputs(one, inputs, where) for one in value]
    if not isinstance(value, str):
        return value

    def resolved(found: re.Match[str]) -> str:
        kind, _, name = found[1].partition(".")
        if kind == "inputs" and name not in inputs:
            raise UsageError(f"{where}: {found[0]:.80}: no such input{nearest(name, inputs) if inputs else '; the file names none'}")
        return str(inputs[name]) if kind == "inputs" else found[0]

    whole = REFERENCE.fullmatch(value)
    name = whole[1].removeprefix("inputs.") if whole and whole[1].startswith("inputs.") else None
    return inputs[name] if name is not None and name in inputs else REFERENCE.sub(resolved, value)


# ---------------------------------------------------------------- stages among one another


def _texts(value: Any) -> list[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def _needs(draft: _Draft, drafts: Mapping[str, _Draft]) -> Iterator[str]:
    """The stages that must come before, each once."""
    named = [_reference(found, drafts, f"{draft.where}: {key}")[0] for key, value in draft.said.items() for text in _texts(value)
             for found in REFERENCE.finditer(text)]
    named += [gate.than for gate in draft.gates if gate.than and _beaten(gate, draft, drafts)]
    yield from dict.fromkeys(named)


def _beaten(gate: Gate, draft: _Draft, drafts: Mapping[str, _Draft]) -> bool:
    """Whether a gate names a stage; else it names the first arm of its own comparison, which is what the others are held against."""
    where = f"{draft.where}: require: {gate.words}"
    if draft.verb == "compare":
        first = next(iter(_texts(draft.said.get("results", []))), "")
        if f"${{stages.{gate.than}.out}}" not in first and not first.startswith(f"{gate.than}="):
            raise UsageError(f"{where}: the first of `results` is what the others are held against, and it is {first!r:.80}; expected "
                             f"{gate.than}=PATH or ${{stages.{gate.than}.out}}")
        return False
    if gate.than not in drafts:
        raise UsageError(f"{where}: no such stage{nearest(gate.than, drafts)}")
    if drafts[gate.than].verb != "eval":
        raise UsageError(f"{where}: {gate.than} is no eval stage; name the one that scored what is to be beaten")
    return True


def _reference(found: re.Match[str], drafts: Mapping[str, _Draft], where: str) -> tuple[str, str]:
    """(stage, what of it)."""
    kind, _, rest = found[1].partition(".")
    name, _, what = rest.partition(".")
    if kind != "stages" or what not in ("model", "out"):
        raise UsageError(f"{where}: {found[0]:.80} is no reference; expected ${{stages.NAME.model}}, ${{stages.NAME.out}} or "
                         "${inputs.NAME}")
    if name not in drafts:
        raise UsageError(f"{where}: {found[0]:.80}: no such stage{nearest(name, drafts)}")
    if what == "model" and KINDS[drafts[name].verb].model is None and drafts[name].verb != "fetch":
        raise UsageError(f"{where}: {found[0]}: assay {drafts[name].verb} hands over no model")
    return name, what


def _in_order(drafts: Mapping[str, _Draft], where: str) -> list[_Draft]:
    """Stages as they stand in the file, but each after all that it needs."""
    done: dict[str, _Draft] = {}
    while len(done) < len(drafts):
        ready = next((draft for draft in drafts.values() if draft.name not in done and all(name in done for name in draft.needs)), None)
        if ready is None:
            left = [name for name in drafts if name not in done]
            raise UsageError(f"{where}: the stages {', '.join(left)} wait for one another; take one of their references out")
        done[ready.name] = ready
    return list(done.values())


def _place(draft: _Draft, out: Path) -> dict[str, str]:
    """Paths of a stage's `out` and `model`. A fetched model is called by its name, as every verb takes it."""
    if draft.verb == "fetch":
        name = str(draft.said.get("name", ""))
        return {"out": name, "model": name}
    kind = KINDS[draft.verb]
    suffix = ".gguf" if draft.verb == "export" and draft.said.get("to") == "gguf" else kind.suffix
    place = out / f"{draft.name}{suffix}"
    return {"out": str(place)} | ({} if kind.model is None else {"model": str(place / kind.model)})


def _stage(draft: _Draft, drafts: Mapping[str, _Draft], places: Mapping[str, dict[str, str]], flags_of: Callable[[str], type]) -> Stage:
    flags, kind, place = flags_of(draft.verb), KINDS[draft.verb], places[draft.name]
    own = [name for name in ("out", "json", "config") if name in draft.said]
    if own:
        raise UsageError(f"{draft.where}: {own[0]}: the pipeline itself gives it; leave it out")
    resolved = {key: _resolved(value, drafts, places, draft.where) for key, value in draft.said.items()}
    known = {one.name for one in dataclasses.fields(flags)}
    ours = ({"out": place["out"]} if "out" in known else {}) | ({"json": True} if kind.prints else {})
    options: Any = from_mapping(flags, resolved | ours, where=draft.where)
    words = command_words(options, {*resolved, *ours}, where=draft.where)
    inputs = tuple(dict.fromkeys(_read_by(draft, resolved, drafts, places)))
    _require_inputs(draft, inputs, places)
    return Stage(draft.name, draft.verb, draft.said, tuple(words), tuple(draft.needs), inputs, place["out"], place.get("model"),
                 draft.gates, draft.budget)


def _resolved(value: Any, drafts: Mapping[str, _Draft], places: Mapping[str, dict[str, str]], where: str) -> Any:
    if isinstance(value, list):
        return [_resolved(one, drafts, places, where) for one in value]

    def place(found: re.Match[str]) -> str:
        name, what = _reference(found, drafts, where)
        return places[name][what]

    return REFERENCE.sub(place, value) if isinstance(value, str) else value


def _read_by(draft: _Draft, resolved: Mapping[str, Any], drafts: Mapping[str, _Draft],
             places: Mapping[str, dict[str, str]]) -> Iterator[str]:
    """Every path and model that the options name: what the stage's result depends on besides the options themselves."""
    yield from named_inputs(draft.verb, resolved)
    kind = KINDS[draft.verb]
    for key in resolved:
        if key not in kind.files and key not in kind.models:
            yield from (_resolved(found[0], drafts, places, draft.where) for text in _texts(draft.said[key])
                        for found in REFERENCE.finditer(text))


def named_inputs(verb: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Files, folders and models that a verb's options name, also those in a suite, a reward and an environment's options."""
    from assay.data.mixture import weighted_source

    kind = KINDS[verb]
    for key, value in options.items():
        texts = _texts(list(value) if isinstance(value, tuple) else value)
        if key in kind.files or key in kind.models:
            weighted = key in ("data", "mix")
            paths_in = (lambda text: [weighted_source(text).name]) if weighted else _PATHS_IN.get(verb, lambda text: [text])
            yield from (part for text in texts for part in paths_in(text))
            yield from (part for text in texts if key == "suite" for part in _files_of_suite(Path(text)))
        elif key in _CODE:
            yield from (part for text in texts for part in _files_of_code(text))


def _files_of_code(text: str) -> list[str]:
    """Files of a reward, a grader or an environment: FILE.py:NAME, model:PATH:WEIGHT, NAME[file=PATH], or an option KEY=PATH."""
    if ".py:" in text:
        return [text.partition(".py:")[0] + ".py"]
    if found := _REWARD_MODEL.fullmatch(text):
        return [found[1]]
    return [path for path in _OPTION_PATH.findall(text) if Path(path).exists()]


def _files_of_suite(file: Path) -> Iterator[str]:
    """Data, prompts and graders that a suite names; its data lie beside it."""
    if not file.is_file():
        return
    found = parse_yaml(read_small_file(file, LARGEST_PLAN, UsageError), where=str(file), error=UsageError)
    named = found if isinstance(found, dict) else {}
    tasks, probes = named.get("tasks"), named.get("probes")
    for part in [*(tasks.values() if isinstance(tasks, dict) else ()), probes]:
        said = part if isinstance(part, dict) else {}
        yield from (str(file.absolute().parent / said[key]) for key in ("data", "prompts") if isinstance(said.get(key), str))
        yield from _files_of_code(str(said.get("grader", "")))


def _paths_of_arm(text: str) -> list[str]:
    """PATH, name=PATH or name=PATH,PATH…, as `assay compare` reads them."""
    if Path(text).exists():
        return [text]
    return [part for part in text.rpartition("=")[2].split(",") if part]


def _path_of_merged(text: str) -> list[str]:
    """PATH or PATH=WEIGHT, as `assay merge` reads them."""
    return [text if Path(text).exists() else text.rpartition("=")[0] or text]


_PATHS_IN: dict[str, Callable[[str], list[str]]] = {"compare": _paths_of_arm, "merge": _path_of_merged}


def _require_inputs(draft: _Draft, inputs: Sequence[str], places: Mapping[str, dict[str, str]]) -> None:
    """Require that the inputs that no stage will make are there now."""
    from assay.store.model_cache import cached_model, fetch_hint
    from assay.store.remote import is_url

    made = {place for each in places.values() for place in each.values()}
    for text in inputs:
        later = any(text == place or text.startswith(f"{place}/") for place in made)
        if not (later or is_url(text) or Path(text).exists() or cached_model(text)):
            raise UsageError(f"{draft.where}: {text}: no such file or folder{fetch_hint(text)}")

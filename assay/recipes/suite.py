"""Before-after suite: a set of tasks and probes asked of a parent and of its child, and one verdict on what the child has forgotten.

    tasks:
      sums: {task: arithmetic, limit: 100, max_new_tokens: 16}
      wiki: {task: text, data: wiki.jsonl, margin: 0.03}
    probes: {n: 4, max_new_tokens: 128}        # or false; by default the share of malformed texts is compared too
    level: 0.05                                # chance of one false claim among all of them together (Holm)

REFUTED: on some task the child is shown worse, and by more than that task's margin. PROVEN: on every task more than the margin is
excluded, and the parent had more than that to lose. Else UNPROVEN, with the task that could not tell. A margin is in the unit of the task's
score: 0.05 of a rate, or bits per byte.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.comparison.pairwise import Comparison, compare
from assay.comparison.read_results import Arm, ScoredRun, read_eval
from assay.errors import UsageError
from assay.evaluation.evaluate import evaluate, refuse_unsound_request
from assay.evaluation.loaded_model import LoadedModel
from assay.evaluation.task import Task
from assay.evaluation.tasks import TaskRequest, open_task
from assay.generate.generation_request import Sampling
from assay.health.generation_probe import Health, ModelGenerator, probe
from assay.health.probe_prompts import BUILT_IN_PROMPTS, TEXT_BEGINNINGS, ProbePrompt, read_probe_prompts
from assay.store.artifact import Artifact
from assay.strict_json import NATURAL, parse_yaml, require_shape
from assay.verdict import Verdict, proven, refuted, unproven

MARGIN, LEVEL = 0.05, 0.05
PROBED_ROUNDS = 4
PROBES = "probes"
_TASK = {"task": str, "data?": str, "limit?": NATURAL, "grader?": str, "seed?": NATURAL, "k?": NATURAL, "temperature?": (float, int),
         "max_new_tokens?": NATURAL, "raw?": bool, "margin?": (float, int)}
_PROBES = {"prompts?": str, "n?": NATURAL, "max_new_tokens?": NATURAL, "temperature?": (float, int), "margin?": (float, int)}
_SUITE = {"tasks?": {str: _TASK}, "probes?": (_PROBES, bool), "level?": float}


@dataclass(frozen=True)
class Suite:
    """`tasks` and `probes` by the fields of the file; data lie beside it."""

    tasks: Mapping[str, Mapping[str, Any]]
    probes: Mapping[str, Any] | None
    level: float
    folder: Path

    def margin(self, name: str) -> float:
        return float(((self.probes or {}) if name == PROBES else self.tasks[name]).get("margin", MARGIN))


@dataclass(frozen=True)
class SuiteResult:
    comparisons: list[Comparison]
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict.to_json(), "comparisons": [found.to_json() for found in self.comparisons]}


def read_suite(path: str | Path) -> Suite:
    """Read a suite strictly: an unknown field is a mistake."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"--suite {path}: no such file; expected YAML with `tasks`, each with `task` and what it needs")
    found = parse_yaml(file.read_bytes(), where=f"--suite {path}", error=UsageError)
    require_shape(found, _SUITE, where=f"--suite {path}", error=UsageError)
    refuse_unknown(found, _SUITE, f"--suite {path}: the file")
    for name, task in found.get("tasks", {}).items():
        refuse_unknown(task, _TASK, f"--suite {path}: {name}")
    if isinstance(found.get("probes"), dict):
        refuse_unknown(found["probes"], _PROBES, f"--suite {path}: {PROBES}")
    probes = found.get("probes", True)
    if not found.get("tasks") and probes is False:
        raise UsageError(f"--suite {path}: there is nothing to ask; give `tasks`")
    refuse_meaningless_numbers(found, path)
    for name in found.get("tasks", {}):
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w. -]*", name) or name == PROBES:  # its answers lie in a folder of that name
            raise UsageError(f"--suite {path}: a task cannot be called {name!r}; give it another name, of letters, digits, dots, spaces "
                             "and dashes")
    return Suite(found.get("tasks", {}), None if probes is False else {} if probes is True else probes, found.get("level", LEVEL),
                 file.absolute().parent)


def refuse_meaningless_numbers(found: Mapping[str, Any], path: str | Path) -> None:
    if not 0 < found.get("level", LEVEL) < 1:
        raise UsageError(f"--suite {path}: level is {found['level']}; expected the chance of a false claim, above 0 and below 1")
    parts = found.get("tasks", {}) | ({PROBES: found["probes"]} if isinstance(found.get("probes"), dict) else {})
    for name, part in parts.items():
        if not 0 <= part.get("margin", MARGIN) < math.inf:
            raise UsageError(f"--suite {path}: {name}: margin is {part['margin']}; expected how much may be lost, from 0")


def refuse_unknown(fields: Mapping[str, Any], shape: Mapping[str, Any], where: str) -> None:
    known = [name.rstrip("?") for name in shape]
    if odd := sorted(map(str, set(fields) - set(known))):
        raise UsageError(f"{where} has {', '.join(odd)}; expected {', '.join(known)}")


def refuse_unanswerable(suite: Suite) -> None:
    """Refuse a suite that cannot be asked: what is missing or amiss is said before anything is paid for."""
    for name, task in open_tasks(suite).items():
        refuse_unsound_request(task, suite.tasks[name].get("k", 1), task_sampling(suite, name))
    if suite.probes is not None:
        probe_sampling(suite)
        own_prompts(suite)
        if suite.probes.get("n", PROBED_ROUNDS) < 1:
            raise UsageError(f"the {PROBES} of a suite: n is {suite.probes['n']}; expected at least one sample of each prompt")


def open_tasks(suite: Suite) -> dict[str, Task]:
    return {name: open_task(TaskRequest(task["task"], suite.folder / task["data"] if "data" in task else None, task.get("limit"),
                                        task.get("grader"), task.get("seed", 0))) for name, task in suite.tasks.items()}


def task_sampling(suite: Suite, name: str) -> Sampling:
    task = suite.tasks[name]
    return Sampling(task.get("max_new_tokens", 256), float(task.get("temperature", 0.0)), seed=task.get("seed", 0))


def probe_sampling(suite: Suite) -> Sampling:
    settings = suite.probes or {}
    return Sampling(settings.get("max_new_tokens", 128), float(settings.get("temperature", 0.7)))


def run_suite(suite: Suite, parent: Artifact, child: Artifact, out: Path, *, device: str,
              say: Callable[[str], None] = lambda _: None) -> SuiteResult:
    """Run the suite on both models, with the same seeds; OUT/parent and OUT/child hold every answer."""
    refuse_unanswerable(suite)
    if parent.digest == child.digest:
        return SuiteResult([], proven("forgetting", f"{child.path} has the weights of {parent.path}: nothing of it is lost"))
    arms = {name: [*suite_arms(suite, name, LoadedModel(artifact, device=device), out / name)]
            for name, artifact in (("parent", parent), ("child", child))}
    found = compare([*arms["parent"], *arms["child"]], level=suite.level)
    for each in found:
        say(each.sentence)
    return SuiteResult(found, judge_suite(suite, found, {arm.group: room_to_lose(arm) for arm in arms["parent"]}))


def suite_arms(suite: Suite, who: str, loaded: LoadedModel, out: Path) -> list[Arm]:
    """Scores of one of the two models on the suite: an arm of each task."""
    arms = []
    for name, opened in open_tasks(suite).items():
        task = suite.tasks[name]
        evaluate(loaded, opened, out / name, k=task.get("k", 1), sampling=task_sampling(suite, name), raw=task.get("raw", False))
        arms.append(replace(read_eval(out / name, None, None), name=who, group=name))
    if suite.probes is not None:
        arms.append(health_arm(probed(suite, loaded), who, loaded.identity))
    return arms


def probed(suite: Suite, loaded: LoadedModel) -> Health:
    """Probe a model in all rounds, whatever they show: both are asked the same."""
    generator = ModelGenerator(loaded, probe_sampling(suite))
    prompts = own_prompts(suite) or (TEXT_BEGINNINGS if generator.raw else BUILT_IN_PROMPTS)
    return probe(generator, prompts, n=(suite.probes or {}).get("n", PROBED_ROUNDS), enough=lambda _: False)


def own_prompts(suite: Suite) -> tuple[ProbePrompt, ...] | None:
    own = (suite.probes or {}).get("prompts")
    return read_probe_prompts(str(suite.folder / own)) if own else None


def health_arm(health: Health, who: str, weights: str) -> Arm:
    """The share of malformed texts to each prompt."""
    wrong: dict[str, tuple[float, ...]] = {}
    for sample in health.samples:
        wrong[sample.prompt.id] = (*wrong.get(sample.prompt.id, ()), float(sample.wrong is not None))
    return Arm(who, "malformed texts", (ScoredRun(who, wrong, weights),), True, group=PROBES, unit="prompts")


def room_to_lose(parent: Arm) -> float:
    """The most that a child can lose: of a rate what the parent has, of malformed texts the share that is left; of bits, without end."""
    share = parent.runs[0].score
    return 1 - share if parent.group == PROBES else math.inf if parent.lower_is_better else share


def judge_suite(suite: Suite, found: list[Comparison], room: Mapping[str, float]) -> Verdict:
    """Judge the suite: one verdict on all comparisons, whose intervals and claims hold together. What a parent cannot do shows nothing:
    `room` is what each task leaves to lose."""
    facts = {each.group: {"change": each.effect.mean, "low": each.effect.low, "high": each.effect.high, "p": each.p, "claim": each.claim,
                          "margin": suite.margin(each.group)} for each in found}
    lost = [each for each in found if each.claim == "shown worse" and loss_of(each) > suite.margin(each.group)]
    if lost:
        words = "; ".join(f"{each.group}: {comparison_in_words(each)}, margin {suite.margin(each.group):g}" for each in lost)
        return refuted("forgetting", f"the child lost what its parent could do on {len(lost)} of {len(found)}: {words}", **facts)
    if idle := [each.group for each in found if room[each.group] <= suite.margin(each.group)]:
        words = ", ".join(f"{name} ({room[name]:.3g}, margin {suite.margin(name):g})" for name in idle)
        return unproven("forgetting", f"nothing is shown to be lost, but the parent has no more to lose than the margin on {words}; ask it "
                                      "what it can do, or narrow the margin", optional=True, **facts)
    open_still = [each for each in found if not most_lost(each) <= suite.margin(each.group)]
    if open_still:
        words = "; ".join(f"{each.group}: {comparison_in_words(each)}, margin {suite.margin(each.group):g}" for each in open_still)
        return unproven("forgetting", f"nothing is shown to be lost beyond its margin, but it is not excluded on {len(open_still)} of "
                                      f"{len(found)}: {words}; ask more examples, or widen the margin", optional=True, **facts)
    return proven("forgetting", f"on all {len(found)} a loss beyond the margin is excluded: "
                                + "; ".join(f"{each.group}: {comparison_in_words(each)}" for each in found), **facts)


def loss_of(each: Comparison) -> float:
    return each.effect.mean if each.lower_is_better else -each.effect.mean


def most_lost(each: Comparison) -> float:
    """The worse end of the interval."""
    return each.effect.high if each.lower_is_better else -each.effect.low


def comparison_in_words(each: Comparison) -> str:
    return f"{each.metric} {each.effect.mean:+.4g} [{each.effect.low:.4g}, {each.effect.high:.4g}] (n={each.effect.n}), p = {each.p:.2g}"

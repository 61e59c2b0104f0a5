"""Mutation campaign: mutants are drawn by seed over all rooms and rules, run, sorted, and written down one by one."""

import compileall
import json
import os
import py_compile
import random
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.mutants import forked_runs, line_coverage, reference_runs
from tests.mutants.forked_runs import Ended, ForkedRun
from tests.mutants.reference_runs import REFERENCE_RUNS, ReferenceRun
from tests.mutants.rules import Mutant, is_python, mutants_of
from tests.mutants.sorting import Left, Reference, Sorted, left_in, sort_run, verdicts_in, volatile_keys

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kernels", "model", "data", "learn", "generate", "reward", "store", "editing", "evaluation", "recipes", "statistics", "comparison",
         "agents", "serving", "client.py")
DECLARED = ("options.py", "__init__.py")  # defaults that a user sees: another default is another program, not a mistake in this one
CHECKS = ("known_answers.py", "known_readings.py", "recount.py", "edit_recount.py", "edit_witness.py", "edit_preflight.py",
          "second_opinion.py", "soundness.py")  # they make no results: a mistake in them is a false alarm, or one guard less
LIMIT = 60.0  # seconds of one run
ELSEWHERE = 1  # other runs, the slowest first, that a silent mutant is shown to
SLOW = ("edit", "grpo", "distill-stored", "distill", "pretrain", "tools", "tools-tagged", "episodes", "grpo-model")  # of the reference runs
CLEAN = 3  # clean runs by which each reference is known


@dataclass
class Slot:
    """A place of its own for each job: a copy of the package, and a folder for its runs."""

    place: Path
    master: Path

    @property
    def code(self) -> Path:
        return self.place / "code"

    @property
    def answer(self) -> Path:
        return self.place / "answer"

    def made(self) -> "Slot":
        if not self.code.exists():
            shutil.copytree(self.master, self.code)
        return self

    def work(self, run: ReferenceRun, fixtures: Path) -> Path:
        folder = self.place / "work"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in run.needs:
            (shutil.copytree if (fixtures / name).is_dir() else shutil.copy2)(fixtures / name, folder / name)
        return folder

    def plant(self, file: str, source: str) -> None:
        """The compiled file goes too: it would be believed."""
        (self.code / file).write_text(source)
        self.compiled(self.code, file).unlink(missing_ok=True)

    def restore(self, file: str) -> None:
        shutil.copy2(self.master / file, self.code / file)
        compiled = self.compiled(self.master, file)
        shutil.copy2(compiled, self.compiled(self.code, file))
        shutil.rmtree(self.place / "work", ignore_errors=True)

    @staticmethod
    def compiled(code: Path, file: str) -> Path:
        path = code / file
        return path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"


@dataclass(frozen=True)
class CleanRun:
    ended: Ended
    left: Left
    verdicts: dict[str, str]

    @property
    def words(self) -> str:
        return f"{self.ended.out.strip()[-600:]} {self.ended.err.strip()[-600:]}"


class Bench:
    """Everything that is made once: a clean copy of the package, fixtures, reference runs, and which lines each of them reaches."""

    def __init__(self, scratch: Path, jobs: int, runs: Sequence[ReferenceRun] = REFERENCE_RUNS, say: Callable[[str], None] = print, *,
                 clean: int = CLEAN, others: Sequence[ReferenceRun] = ()) -> None:
        self.scratch, self.jobs, self.say, self.clean = scratch, jobs, say, clean
        self.runs = {run.name: run for run in runs}
        self.others = {run.name: run for run in others}  # of which only the lines that they reach are asked
        self.master, self.fixtures = scratch / "code", scratch / "fixtures"
        self.references: dict[str, Reference] = {}
        self.reached: dict[str, dict[str, set[int]]] = {}  # run → file → lines within functions
        self.reached_elsewhere: dict[str, set[int]] = defaultdict(set)  # by the others

    def prepare(self) -> None:
        self.copy_code()
        self.make_fixtures()
        self._trace_others()
        self._make_references()

    def copy_code(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        shutil.copytree(ROOT / "assay", self.master / "assay", ignore=shutil.ignore_patterns("__pycache__"))
        begin = (f"import os\nif os.environ.get({line_coverage.FOLDER!r}):\n    import sys\n    sys.path.append({str(ROOT)!r})\n"
                 "    from tests.mutants.line_coverage import begin\n    begin()\n    sys.path.pop()\n")
        (self.master / "sitecustomize.py").write_text(begin)
        compileall.compile_dir(self.master, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)

    def slot(self, number: int) -> Slot:
        return Slot(self.scratch / f"slot-{number}", self.master).made()

    def make_fixtures(self) -> None:
        self.fixtures.mkdir()
        names = self.scratch / "modules"
        names.mkdir()
        making = self.scratch / "making"
        making.mkdir()
        needed = sorted({name for run in (*self.runs.values(), *self.others.values()) for name in run.needs})
        done = forked_runs.wait(ForkedRun((str(self.fixtures), *needed), making, self.master, 10 * LIMIT, module=reference_runs.__name__,
                                          modules=names))
        if done.code:
            raise SystemExit(f"the fixtures could not be made:\n{done.out[-3000:]}\n{done.err[-3000:]}")
        used = {name for file in names.glob("*.txt") for name in file.read_text().splitlines()}
        forked_runs.preload(sorted(used - sys.modules.keys()))
        self.say(f"fixtures: {done.seconds:.0f} s")
        for run in list(self.runs.values()):
            if missing := [name for name in run.needs if not (self.fixtures / name).exists()]:
                self.say(f"reference {run.name} is left out: {missing[0]} could not be made: {done.err.strip()[-400:]}")
                del self.runs[run.name]

    def _trace_others(self) -> None:
        def job(run: ReferenceRun, slot: Slot) -> Ended:
            cover = self._coverage(run)
            return forked_runs.run_command(run.forked(slot.work(run, self.fixtures), slot.code, 5 * LIMIT, cover))

        def take(run: ReferenceRun, ended: Ended | None) -> None:
            if ended is None or ended.code:
                self.say(f"{run.name}: the lines that it reaches are not all known")
            for file, lines in _lines_reached(self.scratch / "coverage" / run.name).items():
                self.reached_elsewhere[file] |= lines

        run_all(self, iter(self.others.values()), job, take)

    def is_beyond(self, mutant: Mutant) -> bool:
        """None of the other runs reaches the mutant."""
        there = self.reached_elsewhere.get(mutant.file, set())
        return not there & set(range(mutant.line, mutant.last + 1)) if mutant.within else not there

    def _coverage(self, run: ReferenceRun) -> Path:
        cover = self.scratch / "coverage" / run.name
        cover.mkdir(parents=True)
        return cover

    def _make_references(self) -> None:
        """Each several times, from packages that differ by a comment, so that the digest of the code is known to differ; once traced."""
        traced = self.clean
        runs = sorted(self.runs.values(), key=lambda run: run.name not in SLOW)  # the slowest first, so that none is waited for alone
        work = [(run, number) for number in (traced, *range(self.clean)) for run in runs]
        clean: dict[str, list[CleanRun]] = defaultdict(list)

        def job(item: tuple[ReferenceRun, int], slot: Slot) -> CleanRun:
            run, number = item
            slot.plant("assay/__main__.py", (self.master / "assay/__main__.py").read_text() + f"# {slot.place.name} {number}\n")
            folder = slot.work(run, self.fixtures)
            cover = self._coverage(run) if number == traced else None
            ended = forked_runs.run_command(run.forked(folder, slot.code, 5 * LIMIT, cover))
            left = left_in(folder, ended, run.said)
            for file in folder.rglob("*.safetensors") if number == 0 else ():
                kept = self.kept(run.name) / file.relative_to(folder)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, kept)
            slot.restore("assay/__main__.py")
            return CleanRun(ended, left, verdicts_in(left, ended))

        def take(item: tuple[ReferenceRun, int], found: CleanRun | None) -> None:
            run, number = item
            if found is None or found.ended.code:
                words = "its job died" if found is None else f"it ended with {found.ended.code}: {found.words}"
                self.say(f"reference {run.name} is left out: {words}")
                self.runs.pop(run.name, None)
            elif number != traced:
                clean[run.name].append(found)

        run_all(self, iter(work), job, take)
        for name in self.runs:
            self._keep_reference(name, clean[name])

    def kept(self, name: str) -> Path:
        """Where the tensors of a clean run lie."""
        return self.scratch / "kept" / name

    def _keep_reference(self, name: str, clean: "list[CleanRun]") -> None:
        verdicts: dict[str, str] = {}
        for found in clean:
            verdicts |= {check: outcome for check, outcome in found.verdicts.items() if verdicts.get(check) in (None, "PROVEN")}
        lefts = [found.left for found in clean]
        reference = Reference(lefts[0], verdicts, volatile_keys(lefts), min(found.ended.seconds for found in clean), self.kept(name))
        self.references[name] = reference
        if broken := [file for file, key in reference.volatile if key == "bytes" and not file.endswith(".json")]:
            self.say(f"reference {name}: clean runs do not give the same bytes of {sorted(broken)}")
        self.reached[name] = _lines_reached(self.scratch / "coverage" / name)
        self.say(f"reference {name}: {reference.seconds:.1f} s, {sum(map(len, self.reached[name].values()))} lines, {len(lefts[0])} files, "
                 f"{len(reference.volatile)} keys that differ between clean runs")

    def runs_for(self, mutant: Mutant) -> list[str]:
        """Runs that reach the mutant, the fastest first; of one outside functions, those that use the most of its file. Commands that only
        print something, and so claim nothing proven, come last."""
        lines = {name: files.get(mutant.file, set()) for name, files in self.reached.items()}
        if not mutant.within:
            return sorted((name for name in lines if lines[name]), key=lambda name: (self.runs[name].said, -len(lines[name])))
        found = [name for name in lines if lines[name] & set(range(mutant.line, mutant.last + 1))]
        return sorted(found, key=lambda name: (self.runs[name].said, self.references[name].seconds))


def _lines_reached(folder: Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for file in folder.glob("*.txt"):
        for line in file.read_text().splitlines():
            name, number, within = line.split("\t")
            if within == "1":
                found["assay/" + name.rpartition("/code/assay/")[2]].add(int(number))
    return dict(found)


def run_all(bench: Bench, items: Iterator[Any], job: Callable[[Any, Slot], Any], take: Callable[[Any, Any], None],
            until: float | None = None) -> None:
    """`job` of each item in a process and a slot of its own, side by side; `take` gets what it returned, here. After `until` nothing is
    begun, and what is still going a little later is given up."""
    free = [bench.slot(number) for number in range(bench.jobs)]
    going: dict[int, tuple[Any, Slot]] = {}
    more = True
    try:
        while more or going:
            late = until is not None and time.monotonic() > until
            while more and free and not late:
                item = next(items, None)
                if item is None:
                    more = False
                    break
                slot = free.pop()
                going[forked_runs.start_job(partial(job, item, slot), slot.answer)] = (item, slot)
            more = more and not late
            if until is not None and time.monotonic() > until + 15:
                return
            pid, _ = os.waitpid(-1, os.WNOHANG) if going else (0, 0)
            if pid not in going:
                time.sleep(0.005)
                continue
            item, slot = going.pop(pid)
            take(item, forked_runs.job_answer(slot.answer))
            free.append(slot)
    finally:
        for pid in going:
            os.kill(pid, 15)
        for pid in going:
            os.waitpid(pid, 0)


def is_new(mutant: Mutant, since: str) -> bool:
    """The mutant stands in lines written since that commit."""
    return bool(lines_since(since, mutant.file) & set(range(mutant.line, mutant.last + 1)))


@cache
def lines_since(commit: str, file: str) -> set[int]:
    """Lines of a file that the commit has not, by git."""
    diff = subprocess.run(["git", "diff", "-U0", commit, "--", file], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    parts = re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", diff, re.MULTILINE)
    return {line for first, count in parts for line in range(int(first), int(first) + int(count or 1))}


def candidates(bench: Bench, rooms: tuple[str, ...], wanted: Callable[[Mutant], bool]) -> dict[str, dict[str, list[Mutant]]]:
    """Room → rule → wanted mutants that some reference run reaches."""
    found: dict[str, dict[str, list[Mutant]]] = {}
    for room in rooms:
        found[room] = defaultdict(list)
        place = bench.master / "assay" / room
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            if file.name.endswith(DECLARED) or file.name in CHECKS:
                continue
            name = file.relative_to(bench.master).as_posix()
            if not any(name in files for files in bench.reached.values()):
                continue
            for mutant in mutants_of(name, file.read_text()):
                if bench.runs_for(mutant) and wanted(mutant):
                    found[room][mutant.rule].append(mutant)
    return found


def found_again(bench: Bench, rows: Sequence[dict[str, Any]], say: Callable[[str], None] = print) -> Iterator[Mutant]:
    """Mutants of an earlier campaign where they stand in the code as it is now: the same change of the same text, nearest to its line."""
    for row in rows:
        file = bench.master / row["file"]
        same = [mutant for mutant in mutants_of(row["file"], file.read_text()) if bench.runs_for(mutant) and
                (mutant.rule, mutant.before[:300], mutant.after[:300]) == (row["rule"], row["before"], row["after"])]
        if same:
            yield min(same, key=lambda mutant: abs(mutant.line - row["line"]))
        else:
            say(f"gone: {row['file']}:{row['line']} {row['before'][:80]!r} → {row['after'][:80]!r}")


def drawn(found: dict[str, dict[str, list[Mutant]]], seed: int) -> Iterator[Mutant]:
    """Mutants drawn in turn from every room, and within it from every rule: any beginning of the campaign is a sample of the whole."""
    rooms = {}
    for room, rules in found.items():
        lists = []
        for rule in sorted(rules):
            mutants = sorted(rules[rule], key=lambda mutant: mutant.id)
            random.Random(f"{seed} {room} {rule}").shuffle(mutants)
            lists.append(mutants)
        random.Random(f"{seed} {room}").shuffle(lists)
        rooms[room] = _in_turn(lists)
    yield from _in_turn(rooms.values())


def _in_turn(sources: Any) -> Iterator[Mutant]:
    left = [iter(source) for source in sources]
    while left:
        for source in list(left):
            mutant = next(source, None)
            if mutant is None:
                left.remove(source)
            else:
                yield mutant


def run_mutants(bench: Bench, mutants: Iterator[Mutant], results: Path, *, until: float | None = None, tries: int = 1,
                say: Callable[[str], None] = print) -> int:
    """One line of `results` for each; how many were run. What `results` has already is skipped; an equivalent one is tried on up to
    `tries` runs that reach it."""
    done = {json.loads(line)["id"] for line in results.read_text().splitlines()} if results.exists() else set()
    count = 0

    def take(mutant: Mutant, row: dict[str, Any] | None) -> None:
        nonlocal count
        row = row or _row(mutant, bench.runs_for(mutant)[0], Sorted("crashed", words="its job died"), 1, 0.0, {})
        with open(results, "a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        count += 1
        if row["kind"] in ("silent", "timeout") or count % 50 == 0:
            say(f"{count}: {row['kind']} {mutant.file}:{mutant.line} {mutant.rule}: {mutant.before[:60]!r} → {mutant.after[:60]!r} "
                f"({row['run']}) {'; '.join(row['changed'])[:160]}")

    new = (mutant for mutant in mutants if mutant.id not in done and is_python(mutant.planted_in((bench.master / mutant.file).read_text())))
    run_all(bench, new, lambda mutant, slot: mutant_row(bench, mutant, slot, tries), take, until)
    return count


def mutant_row(bench: Bench, mutant: Mutant, slot: Slot, tries: int) -> dict[str, Any]:
    """The mutant in the fastest run that reaches it. One that looks equivalent is tried on more, up to `tries`; one that is silent is
    shown to another, the slowest."""
    slot.plant(mutant.file, mutant.planted_in((bench.master / mutant.file).read_text()))
    began, names = time.monotonic(), bench.runs_for(mutant)
    tried = 0
    for name in names[:max(1, tries)]:
        tried += 1
        found = _sorted(bench, slot, name)
        if found.kind != "equivalent":
            break
    elsewhere: dict[str, str] = {}
    if found.kind == "silent":
        others = sorted((one for one in names if one != name), key=lambda one: (bench.runs[one].said, -bench.references[one].seconds))
        for other in others[:ELSEWHERE]:
            there = _sorted(bench, slot, other)
            elsewhere[other] = f"{there.kind} {there.check}".strip()
    slot.restore(mutant.file)
    return _row(mutant, name, found, tried + len(elsewhere), time.monotonic() - began, elsewhere)


def _sorted(bench: Bench, slot: Slot, name: str) -> Sorted:
    run = bench.runs[name]
    limit = max(LIMIT / 4, min(LIMIT * 2, 6 * bench.references[name].seconds))
    folder = slot.work(run, bench.fixtures)
    ended = forked_runs.run_command(run.forked(folder, slot.code, limit))
    return sort_run(bench.references[name], left_in(folder, ended, run.said), ended, folder)


def _row(mutant: Mutant, name: str, found: Sorted, runs: int, seconds: float, elsewhere: dict[str, str]) -> dict[str, Any]:
    return {"id": mutant.id, "room": mutant.file.split("/")[1], "file": mutant.file, "line": mutant.line, "rule": mutant.rule,
            "before": mutant.before[:300], "after": mutant.after[:300], "run": name, "runs": runs, "seconds": round(seconds, 2),
            **asdict(found), "elsewhere": elsewhere}


SETTINGS: dict[str, tuple[str, ...]] = {  # those that a user could give to any of these commands, and it would be sound
    "--learning-rate": ("1e-3", "3e-3", "5e-4"), "--batch-tokens": ("128", "256"), "--warmup-steps": ("0", "1", "2"),
    "--max-steps": ("2", "4", "6"), "--held-out": ("0.1", "0.2", "0.3"), "--lora-r": ("1", "2", "4"), "--num-generations": ("4", "6"),
    "--max-completion-length": ("6", "8"), "--temperature": ("1", "0.8"), "--limit": ("16", "24"), "--rank": ("1", "2", "4"),
    "--batch-size": ("2", "4"), "--top-p": ("0.8", "0.9", "1"), "--ce-weight": ("0", "0.3", "0.5"), "--teacher-top-k": ("4", "8")}
OF_A_RUN: dict[str, dict[str, tuple[str, ...]]] = {  # where others would not be
    "grpo": {"--learning-rate": ("5e-5", "1e-4", "2e-4")}, "distill": {"--max-steps": ("2", "3", "4")},
    "distill-stored": {"--max-steps": ("2", "3", "4")}, "edit": {"--probe-rounds": ("3",)},
    "on-policy": {"--max-steps": ("2", "3", "4")}, "mixture": {"--max-steps": ("2", "3", "4")},
    "grpo-model": {"--learning-rate": ("5e-5", "1e-4", "2e-4")}, "episodes": {"--learning-rate": ("5e-5", "1e-4", "2e-4")},
    "tools": {"--max-completion-length": ("90", "100")}, "tools-tagged": {"--max-completion-length": ("90", "100")},
    **{name: {"--learning-rate": ("2e-5", "5e-5")} for name in ("shards-grpo", "fsdp-grpo", "rollouts", "rollouts-lora")}}
SEEDED = ("sft", "lora", "pretrain", "distill", "distill-stored", "grpo", "eval", "edit", "ttt", "sample", "dpo", "dpo-live", "simpo",
          "kto", "reward-model", "on-policy", "episodes", "tools", "tools-tagged", "grpo-model", "nf4", "int8", "mixture", "mix", "split",
          "dare", "shards", "shards-pretrain", "shards-grpo", "fsdp", "fsdp-pretrain", "fsdp-grpo", "serve", "serve-forms", "serve-train",
          "serve-lora", "rollouts", "rollouts-lora")


def run_clean(bench: Bench, count: int, results: Path, seed: int, *, until: float | None = None,
              say: Callable[[str], None] = print) -> None:
    """Clean runs with other seeds and settings: whatever stops one is a false alarm."""
    done = {json.loads(line)["id"] for line in results.read_text().splitlines()} if results.exists() else set()

    def job(number: int, slot: Slot) -> dict[str, Any]:
        run = clean_words(number, seed, bench)
        ended = forked_runs.run_command(run.forked(slot.work(run, bench.fixtures), slot.code, 2 * LIMIT))
        kind = "clean" if ended.code == 0 else "timeout" if ended.code == forked_runs.TIMED_OUT else "false alarm"
        words = "" if ended.code == 0 else f"exit {ended.code}: " + (ended.err.strip() or ended.out.strip())[-400:]
        return {"id": f"clean-{seed}-{number}", "kind": kind, "words": words, "command": " ".join(run.words),
                "seconds": round(ended.seconds, 2)}

    def take(number: int, row: dict[str, Any] | None) -> None:
        if row is None:
            say(f"clean run {number}: its job died")
            return
        with open(results, "a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if row["kind"] != "clean":
            say(f"{row['kind']}: {row['command']}: {row['words']}")

    new = (number for number in range(count) if f"clean-{seed}-{number}" not in done)
    run_all(bench, new, job, take, until)


def clean_words(number: int, seed: int, bench: Bench) -> ReferenceRun:
    chance = random.Random(f"clean {seed} {number}")
    run = chance.choice([run for run in bench.runs.values() if run.name in SEEDED])
    words = list(run.words)
    for place, word in enumerate(words):
        if word in (settings := SETTINGS | OF_A_RUN.get(run.name, {})):
            words[place + 1] = chance.choice(settings[word])
    return replace(run, words=(*words, "--seed", str(chance.randrange(1, 10**6))))

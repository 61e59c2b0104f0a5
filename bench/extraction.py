"""GSM8K answers read by us and by lm-eval: the same texts, our two readings beside its two filters, every difference with its cause.

    python bench/extraction.py --data gsm8k_test.jsonl EVALS/sft samples_gsm8k.jsonl --made

EVALS/sft is a folder of `assay eval --task gsm8k`, a .jsonl what lm-eval's own run kept (--log_samples); --made adds every solution
of the data, and right and wrong answers in each FORM. lm-eval's reading is its own: the filters and the metric of the installed
package (pip install lm-eval), as its gsm8k.yaml asks for them. Its strict-match stands beside our strict reading, flexible-extract
beside the lenient one. Two readings differ where one is right and the other wrong, or where they take different numbers.
"""

import argparse
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.errors import DataError, UsageError
from assay.evaluation.task import dataset_digest
from assay.evaluation.tasks import TaskRequest, open_task
from assay.reward.answer import Strictness, gold_answer, read_answer, read_number, same_answer
from assay.statistics.estimate import clustered

BESIDE: dict[Strictness, str] = {"strict": "strict-match", "lenient": "flexible-extract"}
INVALID = "[invalid]"  # what its filters give where they find nothing
SHOWN, LONGEST = 56, 24  # characters of a text, and of an answer, in a line of the list

CAUSES = {  # why two readings of one text differ: the first that fits
    "thinking": "what stands between think tags is no answer to us; lm-eval knows no such tags",
    "empty": "#### with nothing after it, ever: no answer to us; flexible-extract takes the last number of the working",
    "several": "several answers are marked: strictly we take none, leniently the last; lm-eval the first ####, or the text's last number",
    "spelling": "one number in two spellings (42.0, 1/2, 1e3): equal to us as numbers; lm-eval compares characters",
    "other mark": "stated without #### (The answer is …, \\boxed, <answer>, nothing but a number): an answer to us, not to strict-match",
    "dressed": "#### and then no bare number ($, +, =, words, markup, no space): strict-match takes nothing",
    "more": "#### and then more than a number (units, words, a sum): to us the whole is the answer, to strict-match its first number",
    "marked": "what is marked is not the text's last number: we stay with what is marked, flexible-extract takes the last number",
    "no digits": "'..', '$.' and the like: two characters of punctuation are an answer to flexible-extract; we take the last number",
    "list": "numbers joined by commas (1,2,3) are one number to flexible-extract; we take the last of them",
    "minus": "a minus between two numbers (10-3): a sign to lm-eval, not to us",
    "fraction": "a fraction (1/2) is one number to us; lm-eval takes its denominator",
    "in a word": "digits within a word or a code (x2, 3.5.1) are a number to lm-eval, not to us",
    "other": "none of these",
}

FORMS = {  # how an answer may be written after its working; {other} is one less than it
    "plain": "#### {n}", "thousands": "#### {n:,}", "full stop": "#### {n}.", "currency": "#### ${n}", "plus": "#### {n:+}",
    "decimals": "#### {n}.00", "percent": "#### {n}%", "no space": "####{n}", "equals": "#### = {n}", "unit": "#### {n} apples",
    "words before": "#### Answer: {n}", "bold": "#### **{n}**", "sum": "#### {other} + 1 = {n}", "one of two": "#### {n} or {other}",
    "marked twice": "#### {other}\n#### {n}", "talk after": "#### {n}\n\nThat leaves {other} for the rest.", "next line": "####\n{n}",
    "boxed": "\\boxed{{{n}}}", "tag": "<answer>{n}</answer>", "sentence": "The answer is {n}.", "in passing": "So it is {n} in all.",
}


@dataclass(frozen=True)
class Read:
    """One text by one pair of readings. Each pair is (ours, lm-eval's)."""

    id: str
    text: str
    gold: str
    ours: str | None
    theirs: str | None
    numbers: tuple[Fraction | None, Fraction | None]
    right: tuple[bool, bool]

    @property
    def judged_alike(self) -> bool:
        return self.right[0] == self.right[1]

    @property
    def alike(self) -> bool:
        return self.judged_alike and self.numbers[0] == self.numbers[1]


Text = tuple[str, Mapping[str, Any], str]  # the problem's id, its row, and what was said


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("said", type=Path, nargs="*", help="folders of assay eval --task gsm8k, .jsonl of lm-eval --log_samples")
    parser.add_argument("--data", type=Path, required=True, help="the rows that were asked")
    parser.add_argument("--made", action="store_true", help="the data's solutions, and answers in every form")
    parser.add_argument("--listed", type=int, help="differences shown of each cause; default: all")
    options = parser.parse_args()
    version = theirs_config()["metadata"]["version"]
    print(", ".join(f"{name} {metadata.version(name)}" for name in ("assay", "torch", "lm_eval")) + f" with its gsm8k {version}")
    for source in options.said:
        texts = read_samples(source, options.data)
        print(f"\n=== {source.name}: {len(texts)} texts\n")
        print("\n".join(report({how: compared(texts, how) for how in BESIDE}, options.listed)))
    if options.made:
        print("\n".join(["", *made_report(options.data)]))

# ---------------------------------------------------------------- texts


def read_samples(source: Path, data: Path) -> list[Text]:
    """Every sample that was said. The rows must be those that were asked."""
    return logged_by_them(source, data) if source.is_file() else kept_by_us(source, data)


def kept_by_us(folder: Path, data: Path) -> list[Text]:
    asked = json.loads((folder / "request.json").read_text())
    examples = open_task(TaskRequest("gsm8k", data, asked["examples"])).examples
    if asked["task"] != "gsm8k" or dataset_digest(examples) != asked["dataset"]:
        raise DataError(f"{folder} holds {asked['task']} on dataset {asked['dataset'][:12]}, {data} is {dataset_digest(examples)[:12]}")
    rows = {example.id: example.row for example in examples}
    scored = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    return [(row["id"], rows[row["id"]], sample["text"]) for row in scored for sample in row["samples"]]


def logged_by_them(log: Path, data: Path) -> list[Text]:
    """lm-eval logs a text once per filter. What it took and how it judged then must be what its filters give here."""
    rows = [example.row for example in open_task(TaskRequest("gsm8k", data)).examples]
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    for entry in logged:
        if entry["doc"]["answer"] != rows[entry["doc_id"]].get("answer"):
            raise DataError(f"{log}: document {entry['doc_id']} is not row {entry['doc_id']} of {data}; give the rows that were asked")
        [text], [then] = entry["resps"][0], entry["filtered_resps"]
        [now] = read_by_them([text], entry["filter"])
        if now != then or right_by_them(now, entry["doc"]) != bool(entry["exact_match"]):
            raise DataError(f"{log}: document {entry['doc_id']}: {entry['filter']} took {then!r} then, {now!r} now; use the same lm-eval")
    return [(str(entry["doc_id"]), entry["doc"], entry["resps"][0][0]) for entry in logged if entry["filter"] == BESIDE["strict"]]


def made(rows: Sequence[Mapping[str, Any]], form: str, off_by: int) -> Iterator[Text]:
    """Each row's working, and then its answer, or one that is `off_by` so much, in this form."""
    for number, row in enumerate(rows):
        gold = read_number(gold_answer(row))
        if gold is None or gold.denominator != 1:
            raise DataError(f"row {number} of the data has the gold answer {gold_answer(row)!r}; expected a whole number")
        working = str(row["answer"]).rpartition("####")[0]
        yield str(number), row, working + FORMS[form].format(n=int(gold) + off_by, other=int(gold) + off_by - 1)

# ---------------------------------------------------------------- lm-eval's own reading


def theirs_config() -> dict[str, Any]:
    """The packaged task: filters, metric and what it ignores."""
    found = find_spec("lm_eval")
    if found is None or found.origin is None:
        raise UsageError("lm-eval is not installed here; pip install lm-eval, in an environment of its own if need be")
    return _read_yaml(Path(found.origin).parent / "tasks" / "gsm8k" / "gsm8k.yaml")


@functools.cache
def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text())


def read_by_them(texts: Sequence[str], name: str) -> list[str]:
    """What its filter of this name takes from each text."""
    from lm_eval.api.instance import Instance
    from lm_eval.filters import build_filter_ensemble

    steps = next(entry["filter"] for entry in theirs_config()["filter_list"] if entry["name"] == name)
    parts = [(step["function"], {key: value for key, value in step.items() if key != "function"}) for step in steps]
    instances = [Instance("generate_until", {}, ("", {}), number, resps=[text]) for number, text in enumerate(texts)]
    build_filter_ensemble(name, parts).apply(instances)
    return [instance.filtered_resps[name] for instance in instances]


def right_by_them(taken: str, row: Mapping[str, Any]) -> bool:
    from lm_eval.api.registry import get_metric

    [metric] = theirs_config()["metric_list"]
    options = {key: metric[key] for key in ("ignore_case", "ignore_punctuation", "regexes_to_ignore")}
    target = row["answer"] if "answer" in row else f"#### {row['gold']}"
    return bool(get_metric(metric["metric"])(predictions=[taken], references=[str(target)], **options)["exact_match"])


def number_to_them(taken: str) -> Fraction | None:
    """Of what its metric compares: commas, $ and a full stop at the end are gone."""
    [metric] = theirs_config()["metric_list"]
    for ignored in metric["regexes_to_ignore"]:
        taken = re.sub(ignored, "", taken)
    return read_number(taken)

# ---------------------------------------------------------------- side by side


def compared(texts: Sequence[Text], how: Strictness) -> list[Read]:
    theirs = read_by_them([text for _, _, text in texts], BESIDE[how])
    found = []
    for (id, row, text), taken in zip(texts, theirs, strict=True):
        gold, ours = gold_answer(row), read_answer(text, how)
        numbers = read_number(ours or ""), number_to_them(taken)
        right = same_answer(ours, gold), right_by_them(taken, row)
        found.append(Read(id, text, gold, ours, None if taken == INVALID else taken, numbers, right))
    return found


def cause(read: Read) -> str:
    """The first of CAUSES that fits."""
    after = re.findall(r"#{4,}[^\S\n]*([^\n]*)", read.text)
    marks = len(after) + len(re.findall(r"\\boxed|<answer>", read.text))
    ours, theirs = read.numbers
    if "<think>" in read.text or "</think>" in read.text:
        return "thinking"
    if after and read.ours is None and not any(line.strip("# ") for line in after):
        return "empty"
    if marks > 1:
        return "several"
    if ours is not None and ours == theirs:
        return "spelling"
    if read.theirs is None:
        return "dressed" if after else "other mark"
    if after and ours is None and after[0].startswith(read.theirs):
        return "more"
    return "marked" if marks else _cause_without_marks(read, read.ours or "", read.theirs)


def _cause_without_marks(read: Read, ours: str, theirs: str) -> str:
    bare = theirs.rstrip(".,")
    if not re.search(r"[0-9]", theirs):
        return "no digits"
    if "/" in ours:
        return "fraction"
    if bare == f"-{ours}":
        return "minus"
    if "," in bare and bare.endswith(f",{ours}"):
        return "list"
    return "in a word" if re.search(r"[\w.]$", read.text[: read.text.rfind(theirs)]) else "other"

# ---------------------------------------------------------------- what is printed


def report(by: Mapping[Strictness, Sequence[Read]], listed: int | None) -> list[str]:
    head = "judged alike", "and the same number", "right: ours", "right: lm-eval"
    lines = [f"{'reading':27}" + "".join(f"{name:>34}" for name in head)]
    for how, reads in by.items():
        columns = zip(*((read.judged_alike, read.alike, *read.right) for read in reads), strict=True)
        rates = [str(clustered(column, [read.id for read in reads])) for column in columns]
        lines.append(f"{how + ' / ' + BESIDE[how]:27}" + "".join(f"{rate:>34}" for rate in rates))
    for how, reads in by.items():
        lines += ["", f"{how} / {BESIDE[how]}", *differences([read for read in reads if not read.alike], listed)]
    return lines


def differences(apart: Sequence[Read], listed: int | None) -> list[str]:
    lines = [] if apart else ["  no difference"]
    for name, count in Counter(map(cause, apart)).most_common():
        of_cause = sorted((read for read in apart if cause(read) == name), key=lambda read: read.judged_alike)
        alone = [sum(read.right[side] and not read.right[1 - side] for read in of_cause) for side in (0, 1)]
        lines.append(f"  {name}: {count}, of which right to us alone {alone[0]}, to lm-eval alone {alone[1]}. {CAUSES[name]}")
        lines += [f"    {' ' if read.judged_alike else '!'} {read.id}: gold {read.gold}, ours {shortened(read.ours)}, "
                  f"lm-eval {shortened(read.theirs)}: {shown(read.text)}" for read in of_cause[:listed]]
    return lines


def shortened(answer: str | None) -> str:
    return repr(answer) if answer is None or len(answer) <= LONGEST else f"{answer[:LONGEST]!r}…"


def shown(text: str) -> str:
    """From the first mark on, or else the end."""
    mark = re.search(r"#{4,}|\\boxed|<answer>", text)
    if mark and mark.start() < len(text) - SHOWN:
        return f"…{text[mark.start() : mark.start() + SHOWN]!r}…"
    return f"…{text[-SHOWN:]!r}"


def made_report(data: Path) -> list[str]:
    """The data's solutions, and answers in every form: how many right and how many wrong ones are judged right."""
    rows = [example.row for example in open_task(TaskRequest("gsm8k", data)).examples]
    solutions = [(str(number), row, str(row["answer"])) for number, row in enumerate(rows)]
    lines = [f"=== {len(rows)} solutions of the data\n", *report({how: compared(solutions, how) for how in BESIDE}, None)]
    lines += ["", f"=== {len(rows)} workings, then an answer in each form; judged right: of the right answers + of those one too high\n",
              f"{'form':14} {'as in':48} {'strict':>11} {'strict-match':>13} {'lenient':>11} {'flexible-extract':>17}"]
    for form, pattern in FORMS.items():
        counts = {how: [judged_right(list(made(rows, form, off_by)), how) for off_by in (0, 1)] for how in BESIDE}
        cells = [f"{right[side]} + {wrong[side]}" for right, wrong in counts.values() for side in (0, 1)]
        example = repr(pattern.format(n=1042, other=1041))
        lines.append(f"{form:14} {example:48} {cells[0]:>11} {cells[1]:>13} {cells[2]:>11} {cells[3]:>17}")
    return lines


def judged_right(texts: Sequence[Text], how: Strictness) -> tuple[int, int]:
    found = [read.right for read in compared(texts, how)]
    return sum(ours for ours, _ in found), sum(theirs for _, theirs in found)


if __name__ == "__main__":
    try:
        main()
    except (UsageError, DataError) as error:
        sys.exit(f"extraction: {error}")

"""GSM8K answers read by us and by lm-eval: the same texts, both of our readings beside both of its filters, each difference by kind.

    python bench/extraction.py EVALS/sft --data gsm8k_test.jsonl [--listed 5]

EVALS/sft is a folder of `assay eval --task gsm8k`. lm-eval's reading is its own: the filters and the metric of the installed package
(pip install lm-eval), as its gsm8k.yaml asks for them. Its strict-match stands beside our strict reading, flexible-extract beside
the lenient one.
"""

import argparse
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.errors import DataError, UsageError
from assay.measure.task import dataset_digest
from assay.measure.tasks import TaskRequest, open_task
from assay.reward.answer import gold_answer, read_answer, read_number, same_answer

BESIDE = {"strict": "strict-match", "lenient": "flexible-extract"}
INVALID = "[invalid]"  # what its filters give where they find nothing
SHOWN = 160  # characters of a text's end


@dataclass(frozen=True)
class Read:
    """One text by one pair of readings."""

    id: str
    text: str
    gold: str
    ours: str | None
    theirs: str | None
    right: tuple[bool, bool]  # ours, theirs

    @property
    def kind(self) -> str:
        return kind(self)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="written by assay eval --task gsm8k")
    parser.add_argument("--data", type=Path, required=True, help="the rows that were asked")
    parser.add_argument("--listed", type=int, default=5, help="texts shown of each kind of difference")
    options = parser.parse_args()
    samples, task = read_samples(options.folder, options.data), theirs_config()
    print(f"{len(samples)} texts of {options.folder}; lm-eval {metadata.version('lm_eval')}, task gsm8k {task['metadata']['version']}\n")
    print("\n".join(report({how: compared(samples, how) for how in BESIDE}, options.listed)))


def read_samples(folder: Path, data: Path) -> list[tuple[str, Mapping[str, Any], str]]:
    """(id, row, text) of every sample. The rows must be those that were asked."""
    asked = json.loads((folder / "request.json").read_text())
    examples = open_task(TaskRequest("gsm8k", data, asked["examples"])).examples
    if asked["task"] != "gsm8k" or dataset_digest(examples) != asked["dataset"]:
        raise DataError(f"{folder} holds {asked['task']} on dataset {asked['dataset'][:12]}, {data} is {dataset_digest(examples)[:12]}")
    rows = {example.id: example.row for example in examples}
    scored = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    return [(row["id"], rows[row["id"]], sample["text"]) for row in scored for sample in row["samples"]]

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

# ---------------------------------------------------------------- side by side


def compared(samples: Sequence[tuple[str, Mapping[str, Any], str]], how: Any) -> list[Read]:
    theirs = read_by_them([text for _, _, text in samples], BESIDE[how])
    found = []
    for (id, row, text), taken in zip(samples, theirs, strict=True):
        gold, ours = gold_answer(row), read_answer(text, how)
        right = same_answer(ours, gold), right_by_them(taken, row)
        found.append(Read(id, text, gold, ours, None if taken == INVALID else taken, right))
    return found


def kind(read: Read) -> str:
    """Why two readings of one text are not equally right: the first that fits."""
    after = re.findall(r"####[^\S\n]*([^\n]*)", read.text)
    ours, theirs = (read_number(answer) if answer else None for answer in (read.ours, read.theirs))
    if "<think>" in read.text or "</think>" in read.text:
        return "what is thought is no answer to us"
    if len(after) > 1:
        return "several ####: we take none, or the last; lm-eval the first, or the last number"
    if ours is not None and ours == theirs:
        return "one number written in two ways (42.0, 1/2, 1e3): equal to us, not to lm-eval"
    if not after and read.theirs is None:
        return "the answer stated without ####: we read it, lm-eval does not"
    if not after:
        return "no ####: another number is taken for the answer"
    if read.theirs is None:
        return "#### and then no bare number: no space, $, +, words: lm-eval takes nothing"
    if re.fullmatch(r"[-+]?\$?[\d.,]+[^\d].*", after[0].strip()) and read_number(after[0]) is None:
        return "more than a number after ####: units, words, a sum: to us the whole is the answer"
    return "other"


def report(by: Mapping[str, Sequence[Read]], listed: int) -> list[str]:
    lines = []
    for how, reads in by.items():
        apart = [read for read in reads if read.right[0] != read.right[1]]
        lines.append(f"{how} / {BESIDE[how]}: {len(reads) - len(apart)} of {len(reads)} texts are judged alike "
                     f"({(len(reads) - len(apart)) / len(reads):.4%})")
        for name, count in Counter(read.kind for read in apart).most_common():
            of_kind = [read for read in apart if read.kind == name]
            lines.append(f"  {count} × {name}; right to us alone {sum(read.right[0] for read in of_kind)}")
            lines += [f"      {read.id}: gold {read.gold}, ours {read.ours!r}, theirs {read.theirs!r}: …{read.text[-SHOWN:]!r}"
                      for read in of_kind[:listed]]
    head = f"{'reading':10} {'texts':>7} {'alike':>7} {'right (ours)':>13} {'right (lm-eval)':>16}"
    rows = [f"{how:10} {len(reads):7} {sum(r.right[0] == r.right[1] for r in reads):7} {sum(r.right[0] for r in reads):13} "
            f"{sum(r.right[1] for r in reads):16}" for how, reads in by.items()]
    return [*lines, "", head, *rows]


if __name__ == "__main__":
    try:
        main()
    except (UsageError, DataError) as error:
        sys.exit(f"extraction: {error}")

"""Recount: the figures of an evaluation computed once more from its rows, by plain sums; how each sample ended, from its tokens; and what
lies in its folder, read back.

It shares nothing with `summary.py` and `statistics/`: a mistake there is not repeated here.
"""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.statistics.estimate import Estimate
from assay.verdict import Verdict, proven, refuted

EQUAL = 1e-9  # of a mean: sums in another order
NARROWEST, WIDEST = 0.3, 6.0  # an interval's half-width, in those of a normal approximation over examples; exact ones are wider
TOO_FEW = 10  # examples: below it, and where all examples score alike, an approximation says nothing of the width

_OF_SAMPLES = {
    "pass@1": lambda sample: float(sample["score"]), "pass@1 read leniently": lambda sample: float(sample["lenient"]),
    "parsed": lambda sample: float(bool(sample["parsed"])), "tokens": lambda sample: float(len(sample["ids"])),
    "stopped": lambda sample: float(sample["ended"] != "length"), "hit the cap": lambda sample: float(sample["ended"] == "length")}


def check_figures(rows: Sequence[Mapping[str, Any]], estimates: Mapping[str, Estimate], *, votes: bool = False) -> Verdict:
    """Every mean of samples is the mean that its rows give, and its interval is about as wide as their scatter says; nothing that is due is
    left out, and nothing is added. `votes`: the task's answers are counted as votes."""
    k = len(rows[0]["samples"])
    wrong = [sentence for name, value in _OF_SAMPLES.items() if (sentence := _unlike(name, rows, value, estimates.get(name)))]
    passed = _passed(rows, k)
    wrong += [f"{name} is {due:.6g}, printed {estimates.get(name)}" for name, due in passed.items()
              if name not in estimates or abs(estimates[name].mean - due) > EQUAL]
    due = {*_OF_SAMPLES, *passed, *rows[0]["samples"][0].get("measures", {}), *([f"majority@{k}"] if votes and k > 1 else [])}
    wrong += [f"{name} is {'printed, and was not asked for' if name in estimates else 'not printed'}" for name in due ^ estimates.keys()]
    if wrong:
        return refuted("figures", f"the rows of {len(rows)} examples do not give what is printed: {'; '.join(wrong)}", wrong=wrong)
    return proven("figures", f"{len(due)} figures are what {len(rows)} rows give when they are counted again")


def _passed(rows: Sequence[Mapping[str, Any]], k: int) -> dict[str, float]:
    """pass@2, pass@4, … and pass@k, by counting subsets, where samples are right or wrong."""
    if any(sample["score"] not in (0, 1) for row in rows for sample in row["samples"]):
        return {}
    right = [sum(sample["score"] for sample in row["samples"]) for row in rows]
    drawn = [j for j in range(2, k + 1) if j == k or j & (j - 1) == 0]
    return {f"pass@{j}": sum(1 - math.comb(k - int(each), j) / math.comb(k, j) for each in right) / len(rows) for j in drawn}


def check_read_back(folder: Path, rows: Sequence[Mapping[str, Any]], estimates: Mapping[str, Estimate],
                    asked: Mapping[str, Any]) -> Verdict:
    """Check an evaluation's folder by nothing but the standard library: the rows, once each; what was asked; every figure; and the
    digest."""
    scores = (folder / "scores.jsonl").read_bytes()
    try:
        written = json.loads((folder / "eval.json").read_bytes())
        kept = [json.loads(line) for line in scores.splitlines()]
    except ValueError as error:
        return refuted("read back", f"{folder} is not readable: {error}")
    figures = {name: {end: getattr(estimate, end) for end in ("mean", "low", "high", "n")} for name, estimate in estimates.items()}
    found = {name: {end: values[end] for end in ("mean", "low", "high", "n")} for name, values in written["estimates"].items()}
    wrong = [sentence for sentence, so in (
        ("the digest of the scores is not that of the file", written["scores_sha256"] != hashlib.sha256(scores).hexdigest()),
        (f"{len(kept)} rows are in scores.jsonl, {len(rows)} were scored",
         sorted(row["id"] for row in kept) != sorted(row["id"] for row in rows)),
        ("the figures are not those that were found", found != figures),
        ("what was asked is not written down", any(written.get(name) != value for name, value in asked.items()))) if so]
    if wrong:
        return refuted("read back", f"{folder}: {'; '.join(wrong)}", wrong=wrong)
    return proven("read back", f"{len(kept)} rows, {len(found)} figures and what was asked lie in the folder as they were found")


def _unlike(name: str, rows: Sequence[Mapping[str, Any]], value: Any, printed: Estimate | None) -> str | None:
    of_examples = [sum(map(value, row["samples"])) / len(row["samples"]) for row in rows]
    counts = [len(row["samples"]) for row in rows]
    mean = sum(one * count for one, count in zip(of_examples, counts, strict=True)) / sum(counts)
    if printed is None:
        return f"{name} is {mean:.6g} and is not printed"
    if abs(mean - printed.mean) > EQUAL * max(1.0, abs(mean)):
        return f"{name} is {mean:.6g}, printed {printed.mean:.6g}"
    centre = sum(of_examples) / len(of_examples)
    spread = math.sqrt(sum((one - centre) ** 2 for one in of_examples) / max(1, len(of_examples) - 1))
    usual, half = 1.96 * spread / math.sqrt(len(of_examples)), (printed.high - printed.low) / 2
    if len(of_examples) >= TOO_FEW and spread > 0 and not NARROWEST * usual <= half <= max(WIDEST * usual, 3.7 / len(of_examples)):
        return f"{name} is printed as {printed}, and its rows scatter by ± {usual:.2g}"
    return None


def check_sample_endings(rows: Sequence[Mapping[str, Any]], stop_ids: Collection[int], most: int) -> Verdict:
    """`stop`: the last token is one that ends; `length`: none does, and the cap is reached; a stop string ends where neither is so."""
    samples = [(row["id"], sample) for row in rows for sample in row["samples"]]
    wrong = [f"{name}: {sample['ended']!r} after {len(sample['ids'])} of {most} tokens" for name, sample in samples
             if not _ended_so(sample, stop_ids, most)]
    if wrong:
        return refuted("endings", f"{len(wrong)} of {len(samples)} samples did not end as they say: {'; '.join(wrong[:3])}",
                       wrong=wrong[:20])
    return proven("endings", f"{len(samples)} samples ended as their tokens say")


def _ended_so(sample: Mapping[str, Any], stop_ids: Collection[int], most: int) -> bool:
    ids, ended = sample["ids"], sample["ended"]
    stops = bool(ids) and ids[-1] in stop_ids
    early = any(token in stop_ids for token in ids[:-1])
    return not early and (stops if ended == "stop" else not stops and len(ids) == most if ended == "length" else len(ids) <= most)

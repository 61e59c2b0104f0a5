"""Summary of an evaluation's scores: estimates with intervals and n, the problem being the unit."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from assay.errors import UsageError
from assay.evaluation.task import GenerationTask, MultipleChoiceTask, Task
from assay.statistics.estimate import Estimate, bits_per_byte, clustered, clustered_rate, cost_ratio, majority, mean, mean_rate, pass_at_k

_Rows = Sequence[Mapping[str, Any]]
_LISTED = 20


def summarise(task: Task, rows: _Rows, k: int) -> dict[str, Estimate]:
    if len(rows) < 2:
        raise UsageError("one example alone shows no spread, so no interval can be given; evaluate on 2 or more")
    if isinstance(task, GenerationTask):
        return _generated(task, rows, k)
    return _chosen(task, rows) if isinstance(task, MultipleChoiceTask) else _read(rows)


def sample_disagreements(rows: _Rows) -> list[dict[str, Any]]:
    """Samples that are right by one reading and wrong by the other."""
    return [{"id": row["id"], "sample": m, "strict": s["score"], "lenient": s["lenient"], "text": s["text"][-500:]}
            for row in rows for m, s in enumerate(row.get("samples", ())) if s["score"] != s["lenient"]]


def pass_at_ks(k: int) -> list[int]:
    """1, 2, 4, … and k itself."""
    return sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | {k})


def _generated(task: GenerationTask, rows: _Rows, k: int) -> dict[str, Estimate]:
    samples, owner = [s for row in rows for s in row["samples"]], [row["id"] for row in rows for _ in row["samples"]]

    def rate(values: list[float]) -> Estimate:
        return clustered_rate(values, owner)

    found = {"pass@1": rate([s["score"] for s in samples])}
    if all(s["score"] in (0, 1) for s in samples):
        counts = [sum(s["score"] == 1 for s in row["samples"]) for row in rows]
        found |= {f"pass@{j}": mean_rate([pass_at_k(k, right, j) for right in counts]) for j in pass_at_ks(k) if j > 1}
    if k > 1 and task.votes:
        votes = [majority([s["answer"] for s in row["samples"]], [s["score"] == 1 for s in row["samples"]]) for row in rows]
        found[f"majority@{k}"] = mean_rate(votes)
    found["pass@1 read leniently"] = rate([s["lenient"] for s in samples])
    for name in samples[0]["measures"]:
        found[name] = rate([s["measures"][name] for s in samples])
    found["parsed"] = rate([float(s["parsed"]) for s in samples])
    found["stopped"] = rate([float(s["ended"] != "length") for s in samples])
    found["hit the cap"] = rate([float(s["ended"] == "length") for s in samples])
    lengths = [float(len(s["ids"])) for s in samples]
    return found | {"tokens": clustered(lengths, owner) if k > 1 else mean(lengths)}


def _chosen(task: MultipleChoiceTask, rows: _Rows) -> dict[str, Estimate]:
    """Accuracy by every measure, the task's own first; each part of the task by itself."""
    found = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        for unit in sorted(("total", "byte", "token"), key=lambda unit: unit != task.by):
            values, units = [row["scores"][unit] for row in own], [row["unit"] or row["id"] for row in own]
            name = f"{part} accuracy".strip() + ("" if unit == "total" else f" per {unit}")
            found[name] = clustered_rate(values, units)
    return found


def _read(rows: _Rows) -> dict[str, Estimate]:
    nll = [-row["nats"] for row in rows]
    per_token = cost_ratio(nll, [row["tokens"] for row in rows])
    perplexity = Estimate(math.exp(per_token.mean), math.exp(per_token.low), math.exp(per_token.high), per_token.n, per_token.level)
    return {"bits per byte": bits_per_byte(nll, [row["bytes"] for row in rows]), "perplexity per token": perplexity}

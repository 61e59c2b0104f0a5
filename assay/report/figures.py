"""Figures of a report: curves of every number in metrics.jsonl with their bands, and the pictures that a run drew."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from assay.errors import ArtifactError
from assay.report.run_record import finite_number
from assay.report.run_status import held_out_scores
from assay.store import durable

MOST_POINTS = 1200  # of one curve; more are drawn as means of neighbours, with the least and the greatest as a band
FEW_POINTS = 60  # at most so many are marked one by one
NO_CURVES = {"step", "data", "num_tokens", "epoch", "seconds", "supervised_tokens", "eval_low", "eval_high", "eval_documents",
             "eval_prompts", "eval_weight_set", "groups"}
_NAMES = {"loss": "training loss", "eval_loss": "held-out loss", "grad_norm": "gradient norm", "learning_rate": "learning rate",
          "kl": "KL to the reference", "frac_reward_zero_std": "groups without signal (share)", "eval_reward": "held-out reward",
          "completions/mean_length": "completion length (mean)", "completions/clipped_ratio": "completions that hit the cap (share)",
          "kd": "divergence from the teacher (kd)", "ce": "cross-entropy (ce)",
          "eval_teacher_kl": "held-out KL to the teacher", "eval_teacher_top1": "held-out top-1 agreement with the teacher"}
_TOGETHER = (("Loss", ("loss", "eval_loss", "ce", "eval_ce")), ("The teacher's term", ("kd", "eval_teacher_kl")),
             ("Reward", ("reward", "eval_reward")), ("KL to the reference", ("kl",)),
             ("Entropy", ("entropy",)), ("Gradient norm", ("grad_norm",)), ("Learning rate", ("learning_rate",)),
             ("Completion length", ("completions/mean_length",)))
BETWEEN = {"completions/mean_length": ("completions/min_length", "completions/max_length")}  # mean → least, greatest
PICTURE_LIMIT = 8 << 20  # bytes of one picture
PNG = b"\x89PNG\r\n\x1a\n"
CAPTIONS = {"causal.png": "Causal trace: how much of the answer each layer brings back, by token; the numbers are in causal.json",
            "trace.png": "Trace: where two models part, by layer and site",
            "ttt.png": "Bits per byte that test-time training saved, document by document; the numbers are in ttt.json"}


@dataclass(frozen=True)
class MetricCurve:
    """Points over steps. `y` is None where the value was not finite; `band` says what lies between low and high."""

    key: str
    label: str
    x: list[int]
    y: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None
    band: str = ""


@dataclass(frozen=True)
class Chart:
    """`place` is its number on the page, by which the page's script finds it."""

    title: str
    curves: list[MetricCurve]
    place: int = 0

    @property
    def heading(self) -> str:
        return self.title[:1].upper() + self.title[1:]

    @property
    def bands(self) -> str:
        several = len(self.curves) > 1
        return "; ".join(f"{curve.label}: {curve.band}" if several else curve.band for curve in self.curves if curve.band)


def curves_section(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    main, more, gaps = charts(rows)
    placed = [replace(chart, place=place) for place, chart in enumerate([*main, *more])]
    numbers = [_numbers(curve) for chart in placed for curve in chart.curves]
    return {"main": placed[:len(main)], "more": placed[len(main):], "gaps": gaps, "numbers": numbers}


def charts(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Chart], list[Chart], list[str]]:
    """The charts to see first, the others, and what a curve cannot show: values that were not finite."""
    curves = {curve.key: curve for curve in _curves(rows)}
    score = _score(rows)
    main = []
    if score is not None:
        curves.pop(score.key, None)
        if "eval_loss" in curves and curves["eval_loss"].y == score.y:  # one number, two names
            curves["eval_loss"], score = replace(score, key="eval_loss", label=f"held-out loss ({score.label})"), None
    for title, keys in _TOGETHER:
        if found := [curves.pop(key) for key in keys if key in curves]:
            main.append(Chart(title, found))
        if title in ("Loss", "Reward") and score is not None and found:
            main.append(Chart(f"Held-out {score.label}", [score]))
            score = None
    if score is not None:
        main.insert(0, Chart(f"Held-out {score.label}", [score]))
    with_band = [key for key in sorted(curves) if curves[key].low is not None]
    main += [Chart(curves[key].label, [curves[key]]) for key in with_band if key.startswith("eval_")]
    rest = [Chart(curves[key].label, [curves[key]]) for key in sorted(curves) if not (key in with_band and key.startswith("eval_"))]
    return main, rest, _not_finite(rows)


def charts_json(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Data of the page's charts as JSON, in the order of the figures. No name of a metric can end the script element it stands in."""
    main, more, _ = charts(rows)
    drawn = [[_drawn(curve) for curve in chart.curves] for chart in [*main, *more]]
    text = json.dumps(drawn, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


# ---------------------------------------------------------------- from rows to curves


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[MetricCurve]:
    keys = sorted({key for row in rows for key, value in row.items() if finite_number(value) is not None} - NO_CURVES)
    bounds = {bound for key in keys for bound in _bounds(key, keys)}
    return [_curve(rows, key, keys) for key in keys if key not in bounds]


def _bounds(key: str, keys: Sequence[str]) -> tuple[str, ...]:
    """The columns that are not curves of their own but the band around `key`."""
    spread = _spread(key)
    pair = BETWEEN.get(key, (f"{key}_low", f"{key}_high"))
    return (*((spread,) if spread in keys else ()), *(pair if set(pair) <= set(keys) else ()))


def _spread(key: str) -> str:
    return f"{key.removesuffix('/mean')}/std" if key.endswith("/mean") else f"{key}_std"


def _curve(rows: Sequence[Mapping[str, Any]], key: str, keys: Sequence[str]) -> MetricCurve:
    points = {row["step"] + 1: row for row in rows if key in row and isinstance(row.get("step"), int)}
    x = sorted(points)
    y = [finite_number(points[at][key]) for at in x]
    low_key, high_key = BETWEEN.get(key, (f"{key}_low", f"{key}_high"))
    label = _NAMES.get(key, key.removeprefix("eval_").replace("_", " ") if key.startswith("eval_") else key)
    if {low_key, high_key} <= set(keys):
        low, high = ([finite_number(points[at].get(bound)) for at in x] for bound in (low_key, high_key))
        return _thinned(MetricCurve(key, label, x, y, low, high, "from least to greatest" if key in BETWEEN else "95 % interval"))
    if _spread(key) in keys:
        spread = [finite_number(points[at].get(_spread(key))) for at in x]
        low, high = ([None if mean is None or away is None else mean + sign * away for mean, away in zip(y, spread, strict=True)]
                     for sign in (-1, 1))
        return _thinned(MetricCurve(key, label, x, y, low, high, "± one standard deviation of the completions: a spread, not an interval"))
    return _thinned(MetricCurve(key, label, x, y))


def _score(rows: Sequence[Mapping[str, Any]]) -> MetricCurve | None:
    """The run's own measure on held-out data, with its interval."""
    found = {one.step: one for one in held_out_scores(rows)}
    if not found:
        return None
    x, name = sorted(found), found[max(found)].name
    key = "eval_" + name.replace(" ", "_")
    scores = [found[at] for at in x]
    return MetricCurve(key, name, x, [one.mean for one in scores], [one.low for one in scores], [one.high for one in scores],
                       "95 % interval")


def _thinned(curve: MetricCurve) -> MetricCurve:
    """Means of neighbours where there are more points than can be seen. A value that is not finite makes its whole neighbourhood a gap."""
    if len(curve.x) <= MOST_POINTS:
        return curve
    size = math.ceil(len(curve.x) / MOST_POINTS)
    parts = [slice(start, start + size) for start in range(0, len(curve.x), size)]
    x = [curve.x[part][-1] for part in parts]
    y = [_over(curve.y[part], _mean) for part in parts]
    if curve.low is not None and curve.high is not None:
        low, high, band = [_over(curve.low[p], _mean) for p in parts], [_over(curve.high[p], _mean) for p in parts], curve.band
    else:
        low, high, band = [_over(curve.y[p], min) for p in parts], [_over(curve.y[p], max) for p in parts], "from least to greatest"
    return MetricCurve(curve.key, curve.label, x, y, low, high, f"{band}; each point is the mean of {size} steps")


def _over(values: Sequence[float | None], reduce: Any) -> float | None:
    known = [value for value in values if value is not None]
    return reduce(known) if len(known) == len(values) else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _not_finite(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Values that stand in metrics.jsonl as a word, because they were no number."""
    found: dict[str, list[tuple[int, str]]] = {}
    for row in rows:
        for key, value in row.items():
            if value in ("nan", "inf", "-inf") and isinstance(row.get("step"), int):
                found.setdefault(key, []).append((row["step"] + 1, value))
    return [f"{key} was not finite at {len(at)} step(s), first {at[0][1]} at step {at[0][0]}: the curve has a gap there" for key, at in
            sorted(found.items())]


# ---------------------------------------------------------------- as numbers


def _drawn(curve: MetricCurve) -> dict[str, Any]:
    rounded = {"key": curve.key, "x": curve.x, "y": _digits(curve.y), "label": curve.label, "marked": len(curve.x) <= FEW_POINTS}
    return rounded if curve.low is None or curve.high is None else rounded | {"low": _digits(curve.low), "high": _digits(curve.high)}


def _digits(values: Sequence[float | None]) -> list[float | None]:
    """Six digits are more than a screen shows."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _numbers(curve: MetricCurve) -> list[Any]:
    known = [(value, at) for value, at in zip(curve.y, curve.x, strict=True) if value is not None]
    if not known:
        return [curve.label, "unknown", "unknown", "unknown", "unknown", len(curve.x)]
    (least, at_least), (most, at_most) = min(known), max(known, key=lambda point: (point[0], -point[1]))
    last = f"{known[-1][0]:.5g}"
    if curve.low is not None and curve.high is not None and curve.low[-1] is not None and curve.high[-1] is not None:
        last += f" [{curve.low[-1]:.5g}, {curve.high[-1]:.5g}]"
    return [curve.label, f"{known[0][0]:.5g}", f"{least:.5g} at {at_least}", f"{most:.5g} at {at_most}", last, len(curve.x)]

# ---------------------------------------------------------------- pictures


def pictures_section(folder: Path) -> dict[str, list[Any]]:
    """Every PNG file in the run's own folder, byte for byte, and a sentence for what is named so and is none."""
    shown: list[tuple[str, str]] = []
    wrong: list[str] = []
    for path in sorted(folder.glob("*.png")):
        try:
            data = durable.read_file(path, limit=PICTURE_LIMIT)
        except ArtifactError as error:
            wrong.append(f"{path.name}: {error}")
            continue
        if data.startswith(PNG):
            shown.append((CAPTIONS.get(path.name, path.name), f"data:image/png;base64,{base64.b64encode(data).decode()}"))
        else:
            wrong.append(f"{path.name} is no PNG file and is not shown")
    return {"shown": shown, "wrong": wrong}

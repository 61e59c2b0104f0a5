"""Adapter checks: rank and scale of an adapter, live and as written, are what the options ask for."""

from collections.abc import Collection, Mapping
from typing import Any

from assay.verdict import Verdict, proven, refuted

_ROUNDING = 1e-6


def asked_scale(rank: int, alpha: float | None, rslora: bool) -> float:
    """How many times an adapter counts, by the options alone: alpha/r or alpha/√r, alpha being 2·r unless it is said."""
    return (2 * rank if alpha is None else alpha) / (rank**0.5 if rslora else rank)


def check_adapter_scale(rank: int, alpha: float | None, rslora: bool, found: Collection[float]) -> Verdict:
    """Of the live model: every part of its adapter counts as often as was asked."""
    due = asked_scale(rank, alpha, rslora)
    wrong = sorted({scale for scale in found if abs(scale - due) > _ROUNDING * due})
    if wrong or not found:
        asked = f"rank {rank}, alpha {2 * rank if alpha is None else alpha:g}"
        return refuted("adapter scale", f"the options ask for an adapter that counts {due:g} times ({asked}), the model's counts "
                                        f"{', '.join(f'{scale:g}' for scale in wrong) or 'not'} times", due=due, found=wrong)
    return proven("adapter scale", f"all {len(found)} parts count {due:g} times, as asked for", due=due)


def check_written_adapter(rank: int, alpha: float | None, rslora: bool, fields: Mapping[str, Any]) -> Verdict:
    """Of adapter_config.json: whoever loads it scales the update as was asked."""
    due = {"r": rank, "lora_alpha": 2 * rank if alpha is None else alpha, "use_rslora": rslora}
    wrong = [f"{name} {fields.get(name)} instead of {value:g}" for name, value in due.items()
             if abs(float(fields.get(name) or 0) - value) > _ROUNDING * max(1, value)]
    if wrong:
        return refuted("adapter scale", f"adapter_config.json says {', '.join(wrong)}: it is not the adapter that was asked for")
    return proven("adapter scale", f"adapter_config.json says rank {rank}, alpha {due['lora_alpha']:g}, as asked for")

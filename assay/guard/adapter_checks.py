"""Adapter checks: rank and scale of an adapter, live and as written, are what the options ask for."""

from collections.abc import Collection, Mapping
from typing import Any

from assay.verdict import Verdict, proven, refuted

_ROUNDING = 1e-6


def asked_scale(rank: int, alpha: float | None, rslora: bool) -> float:
    """Scale of an adapter's update by the options alone: alpha/r, or alpha/√r with rsLoRA; alpha is 2·r by default."""
    return (2 * rank if alpha is None else alpha) / (rank**0.5 if rslora else rank)


def check_adapter_scale(rank: int, alpha: float | None, rslora: bool, found: Collection[float]) -> Verdict:
    """Check that every adapted layer of the live model scales its update as the options ask."""
    due = asked_scale(rank, alpha, rslora)
    wrong = sorted({scale for scale in found if abs(scale - due) > _ROUNDING * due})
    if wrong or not found:
        asked = f"rank {rank}, alpha {2 * rank if alpha is None else alpha:g}"
        return refuted("adapter scale", f"the options ask for an update scaled by {due:g} ({asked}), the model's is scaled by "
                                        f"{', '.join(f'{scale:g}' for scale in wrong) or 'nothing'}", due=due, found=wrong)
    return proven("adapter scale", f"the updates of all {len(found)} layers are scaled by {due:g}, as asked for", due=due)


def check_written_adapter(rank: int, alpha: float | None, rslora: bool, fields: Mapping[str, Any]) -> Verdict:
    """Check that adapter_config.json holds the rank and alpha that the options ask for."""
    due = {"r": rank, "lora_alpha": 2 * rank if alpha is None else alpha, "use_rslora": rslora}
    wrong = [f"{name} {fields.get(name)} instead of {value:g}" for name, value in due.items()
             if abs(float(fields.get(name) or 0) - value) > _ROUNDING * max(1, value)]
    if wrong:
        return refuted("adapter scale", f"adapter_config.json says {', '.join(wrong)}: it is not the adapter that was asked for")
    return proven("adapter scale", f"adapter_config.json says rank {rank}, alpha {due['lora_alpha']:g}, as asked for")

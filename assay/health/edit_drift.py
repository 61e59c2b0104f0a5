"""Drift after an edit: what the model says to prompts that have nothing to do with its edits, before and after."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from assay.evaluation.loaded_model import LoadedModel
from assay.generate.generation_request import Sampling
from assay.health.generation_probe import Health, ModelGenerator, compare_health, probe
from assay.health.probe_prompts import BUILT_IN_PROMPTS, TEXT_BEGINNINGS, ProbePrompt
from assay.statistics.estimate import Estimate, clustered_rate, paired
from assay.verdict import Outcome, Verdict, unproven

_TOKENS = 64  # enough for a loop to show; whether a text ends in time is not asked of so few
TEMPERATURE = 0.7
LARGEST_DRIFT = 0.5  # nats a token: a shown drift beyond it is harm. Facts swapped in a model that knows nothing else: 0.3


@dataclass(frozen=True)
class EditDrift:
    """Texts of the model before and after an edit, in the same rounds of the same prompts, each with its surprise under the model
    before."""

    before: Health
    after: Health

    def drift(self) -> Estimate:
        """Nats per token that the edited model's texts cost the model before, more than its own do; the unit is a prompt."""
        was, now = surprise_by_prompt(self.before), surprise_by_prompt(self.after)
        return paired(list(now.values()), list(was.values()), (list(now), list(was)))

    def estimates(self) -> dict[str, Estimate]:
        """Estimates of the drift; each sample of a prompt is a member of its cluster."""
        shares = {f"probe, malformed, {when}": malformed_share(health) for when, health in (("before", self.before), ("after", self.after))}
        return shares | {"probe, nats a token under the model before, change": self.drift()}

    def to_json(self) -> dict[str, Any]:
        return {name: [sample.to_json() for sample in health.samples] for name, health in (("before", self.before), ("after", self.after))}


def probe_edit(before: LoadedModel, after: LoadedModel, *, rounds: int, seed: int,
               prompts: Sequence[ProbePrompt] | None = None) -> EditDrift | None:
    """Probe an edited model for drift; None where fewer than two prompts fit into the model's context."""
    sampling = Sampling(_TOKENS, TEMPERATURE, seed=seed)
    parent, child = ModelGenerator(before, sampling), ModelGenerator(after, sampling)
    asked = fitting_prompts(before, prompts or (TEXT_BEGINNINGS if parent.raw else BUILT_IN_PROMPTS), raw=parent.raw)
    if len(asked) < 2:
        return None
    was = probe(parent, asked, n=rounds, name="the model before", surprise=parent.surprise)
    usual = [sample.said.surprise for sample in was.samples if sample.said.surprise is not None]
    return EditDrift(was, probe(child, asked, n=rounds, name="the edited model", surprise=parent.surprise, usual=usual))


def fitting_prompts(loaded: LoadedModel, prompts: Sequence[ProbePrompt], *, raw: bool) -> list[ProbePrompt]:
    room = loaded.model.config.max_length - _TOKENS
    return [replace(prompt, expected=replace(prompt.expected, ends=False)) for prompt in prompts
            if loaded.length_of(prompt.text, raw=raw) <= room]


def check_edit_drift(found: EditDrift | None) -> Verdict:
    """Texts on other prompts are not shown to be malformed more often than they were, and are shown to be ones that the model before
    would have said: the whole interval of their drift lies below the bound. Where it lies on both sides, nothing is shown."""
    if found is None:
        return unproven("probe", f"fewer than two prompts and {_TOKENS} new tokens fit into this model's context, so whether its texts are "
                                 "still healthy was not asked; use assay probe with prompts of your own")
    verdict, drift = compare_health(found.after, found.before)[1], found.drift()
    words = (f"{found.after.bad} of {len(found.after.samples)} texts on other prompts are malformed, {found.before.bad} of "
             f"{len(found.before.samples)} were before; they cost the model before {drift} nats a token more than its own")
    outcome, shown = verdict.outcome, ""
    if drift.low > LARGEST_DRIFT:
        outcome = Outcome.REFUTED
    elif outcome is Outcome.PROVEN and not drift.high <= LARGEST_DRIFT:
        outcome, shown = Outcome.UNPROVEN, " (not shown to be below it; raise --probe-rounds)"
    return Verdict("probe", outcome, f"{words}, bound {LARGEST_DRIFT:g}{shown}; {verdict.reason}",
                   verdict.evidence | {"drift": asdict(drift)})


def malformed_share(health: Health) -> Estimate:
    wrong, prompts = zip(*((float(sample.wrong is not None), sample.prompt.id) for sample in health.samples), strict=True)
    return clustered_rate(wrong, prompts)


def surprise_by_prompt(health: Health) -> dict[str, float]:
    """prompt → mean nats per token of its texts under the model before."""
    found: dict[str, list[float]] = {}
    for sample in health.samples:
        assert sample.said.surprise is not None
        found.setdefault(sample.prompt.id, []).append(sample.said.surprise)
    return {id: float(np.mean(values)) for id, values in found.items()}

"""Staleness faults: rollouts older than allowed or said to be newer, uncorrected or corrected by what is no number, and prompts in flight
that a resume loses."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from assay.data.batch import Batch
from assay.generate.engine import Engine
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import version_name
from assay.model.transformer import Transformer
from assay.testing import tiny_ahead
from assay.testing.fault_injection import fault, in_place_of
from assay.testing.tiny_ahead import a_run_ahead
from assay.testing.tiny_grpo import CompletionGroups


def ahead_fault(name: str, rows: tuple[str, ...], stage: str, check: str) -> Any:
    return fault(name, rows=rows, stage=stage, check=check, job=a_run_ahead)


@ahead_fault("rollout beyond the staleness bound", ("R02", "N39"), "sync", "staleness")
@in_place_of(tiny_ahead, "serve_copy")
def every_other_update(usual: Any, engine: Engine, model: Transformer, updates: int) -> None:
    """The sampler is busy when every other update is announced, and goes on with what it has."""
    if updates % 2 == 0:
        usual(engine, model, updates)


@ahead_fault("stale rollout under the newest version's name", ("R02",), "sync", "version")
@in_place_of(tiny_ahead, "written_down")
def newest_name(usual: Any, groups: CompletionGroups) -> CompletionGroups:
    """Versions are written down when a completion is read, by then with the name of the weights that came meanwhile."""
    def named(version: str) -> str:
        updates, _, digest = version.partition("@")
        return f"{int(updates) + 1}@{digest}"

    return [[replace(said, version=named(said.version)) for said in group] for group in usual(groups)]


@ahead_fault("weights of before under the right version", ("R01",), "sync", "version")
@in_place_of(tiny_ahead, "serve_copy")
def renamed_only(usual: Any, engine: Engine, model: Transformer, updates: int) -> None:
    """The count moves on, and the weights are those of the fork."""
    if updates == 0:
        usual(engine, model, updates)
    engine.version = version_name(updates, fingerprint(engine.weights.model))


@ahead_fault("stale rollout learned from as if it were not", ("R23",), "loss", "importance")
@in_place_of(tiny_ahead, "correct_stale")
def uncorrected(usual: Any, batch: Batch, now: Tensor, then: Tensor) -> Batch:
    """No correction: ratios are taken to the weights of before."""
    return batch


@ahead_fault("importance weights computed and not applied", ("R23",), "loss", "importance")
@in_place_of(tiny_ahead, "correct_stale")
def weights_not_applied(usual: Any, batch: Batch, now: Tensor, then: Tensor) -> Batch:
    """Log-probabilities are computed anew, and what was sampled by other weights counts as the policy's own."""
    return replace(usual(batch, now, then), advantage=batch.advantage)


@ahead_fault("importance weight that is no number", ("N32",), "loss", "importance")
@in_place_of(tiny_ahead, "correct_stale")
def no_number(usual: Any, batch: Batch, now: Tensor, then: Tensor) -> Batch:
    """The engine has no log-probability of one token; NaN is neither above the cap nor below it, and passes both comparisons."""
    unknown = then.clone()
    unknown[0, batch.weight[0].nonzero()[0]] = float("nan")
    return usual(batch, now, unknown)


@ahead_fault("prompts in flight lost at a resume", ("N27",), "resume", "in_flight")
@in_place_of(tiny_ahead, "saved")
def cursor_only(usual: Any, facts: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint keeps how far the data was drawn and not what was drawn: what was in flight is nowhere."""
    return usual({name: value for name, value in facts.items() if name != "ahead"})


@ahead_fault("part of what was in flight lost at a resume", ("N27",), "resume", "in_flight")
@in_place_of(tiny_ahead, "saved")
def those_that_had_ended(usual: Any, facts: dict[str, Any]) -> dict[str, Any]:
    """Prompts whose completions had ended are kept; the long ones are gone."""
    ahead = facts["ahead"]
    return usual(facts | {"ahead": ahead | {"prompts": ahead["prompts"][1:]}})

"""Staleness checks: how many updates behind the policy a rollout was drawn, that this was corrected, and that no prompt in flight is lost.

They read the versions and log-probabilities that the sampler wrote down, not what the recipe made of them.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.guard.policy_identity import LogprobFloor
from assay.learn.stale_weights import effective_share
from assay.verdict import Verdict, proven, refuted, unproven

LEAST_EFFECTIVE = 0.1  # share of the tokens that importance weights leave: below it a rollout is another policy's
SAME_ADVANTAGE = 1e-3  # relative: advantages are held in fp32, and both sides take the exponential of a difference


def updates_behind(versions: Sequence[tuple[str, int]], step: int) -> dict[int, int]:
    """Number of updates by which tokens are behind the policy after `step` updates, with the number of tokens of each. `versions` name
    the weights that sampled them.
    """
    found: dict[int, int] = {}
    for version, tokens in versions:
        behind = step - int(version.split("@")[0])
        found[behind] = found.get(behind, 0) + tokens
    return found


def check_staleness(versions: Sequence[tuple[str, int]], step: int, most: int) -> Verdict:
    """Check that no token was sampled more than `most` updates before the policy that learns from it, nor by one that is yet to come."""
    if not versions:
        return unproven("staleness", "no rollout was given")
    if unnamed := [version for version, _ in versions if not version.split("@")[0].isdecimal()]:
        return refuted("staleness", f"{len(unnamed)} of {len(versions)} samples are of version {unnamed[0]!r}, which does not say after "
                       "how many updates it was")
    behind = updates_behind(versions, step)
    words = ", ".join(f"{tokens} tokens by {updates}" for updates, tokens in sorted(behind.items()))
    if max(behind) > most or min(behind) < 0:
        return refuted("staleness", f"what step {step} learns from was sampled that many updates before it: {words}; 0 to {most} are "
                       "allowed: an old rollout was handed out, or versions are mixed up", most=max(behind), least=min(behind))
    return proven("staleness", f"updates behind the policy: {words}; at most {most} are allowed", most=max(behind))


def check_stale_weights(rows: Batch, sampled_BT: Tensor, advantage_BT: Tensor, now: Mapping[int, Sequence[float]], cap: float,
                     floor: LogprobFloor) -> Verdict:
    """Check that what is learned from is corrected for being sampled earlier: `rows` hold the log-probabilities of the policy that learns,
    and each advantage times π now / π then, at most `cap`.

    `sampled_BT` are the sampler's own log-probabilities, `advantage_BT` the advantages without a weight, `now` those of the policy at the
    counting tokens of some rows, computed anew.
    """
    assert rows.behaviour is not None
    assert rows.advantage is not None
    counts_BT = rows.weight != 0
    held = [np.abs(rows.behaviour[row][counts_BT[row]].numpy() - np.asarray(values)) for row, values in now.items() if len(values)]
    if not held:
        return unproven("importance", "of no token that counts was the policy asked anew")
    apart = float(np.concatenate(held).mean())
    if not apart <= floor.bound:
        return refuted("importance", f"ratios are taken to log-probabilities {apart:.1e} nats a token from the policy's, the floor allows "
                       f"{floor.bound:.1e}: what was sampled earlier is learned from as if it were not", apart=str(apart))
    weight_BT = (rows.behaviour - sampled_BT).exp().clamp(max=cap)
    wrong_BT = counts_BT & ~torch.isclose(rows.advantage, advantage_BT * weight_BT, rtol=SAME_ADVANTAGE, atol=1e-6)
    if bool(wrong_BT.any()):
        return refuted("importance", f"{int(wrong_BT.sum())} of {int(counts_BT.sum())} tokens do not have their importance weight, at most "
                       f"{cap:g}, on their advantage: what was sampled earlier is not corrected for", tokens=int(wrong_BT.sum()))
    share, cut = effective_share(weight_BT[counts_BT]), float((weight_BT[counts_BT] >= cap).float().mean())
    words = f"importance weights leave {share:.1%} of {int(counts_BT.sum())} tokens, {cut:.2%} are cut at {cap:g}"
    if not share >= LEAST_EFFECTIVE:
        return refuted("importance", f"{words}; at least {LEAST_EFFECTIVE:.0%} are expected: the policy has left what was sampled; lower "
                       "the learning rate or --num-iterations, or sample with --max-staleness 0", share=str(share))
    return proven("importance", words, effective=share, cut=cut)


def check_in_flight(drawn: Mapping[int, Collection[str]], trained: Collection[int], waiting: Mapping[int, Collection[str]],
                    dropped: Mapping[int, Collection[str]]) -> Verdict:
    """Every prompt that was drawn ahead, by the step that it was drawn for, is trained on, waits, or is named as dropped."""
    for step, prompts in drawn.items():
        if step in trained:
            continue
        kept = {*waiting.get(step, ()), *dropped.get(step, ())}
        if lost := [prompt for prompt in prompts if prompt not in kept]:
            return refuted("in_flight", f"{len(lost)} of {len(prompts)} prompts that were drawn for step {step} are neither trained on nor "
                           f"waiting nor named as dropped, such as {lost[0]}: they are lost", step=step, lost=len(lost))
    return proven("in_flight", f"of {len(drawn)} rollouts that were drawn ahead {sum(step in trained for step in drawn)} are trained on, "
                  f"{sum(step in waiting for step in drawn)} wait, {sum(step in dropped for step in drawn)} are named as dropped")


def check_waiting(recorded: Mapping[str, object], step: int, due: Sequence[str], updates: int) -> Verdict:
    """Check what a checkpoint of an asynchronous run says of the rollout that was in flight: the one of the step that comes next, with the
    prompts that are due, drawn one rollout before; or, in words, why there was none."""
    if "ahead" not in recorded:
        return refuted("in_flight", f"the checkpoint of step {step} does not say what was in flight: prompts that were drawn are lost")
    ahead = recorded["ahead"]
    if not isinstance(ahead, Mapping) or "step" not in ahead:
        return proven("in_flight", f"nothing was in flight at step {step}: {ahead}")
    found = list(ahead["prompts"])[: len(due)]
    if ahead["step"] != step or ahead["drawn_at"] != step - updates or found != list(due):
        lost = [prompt for prompt in due if prompt not in found]
        return refuted("in_flight", f"the checkpoint of step {step} holds a rollout for step {ahead['step']}, drawn at step "
                       f"{ahead['drawn_at']}; due is one for {step}, drawn at {step - updates}; {len(lost)} of {len(due)} prompts are lost",
                       lost=len(lost))
    return proven("in_flight", f"{len(found)} prompts that were in flight at step {step} are all there", prompts=len(found))

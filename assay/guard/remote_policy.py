"""Remote policy checks: what a server samples from are the trainer's weights, its keys and values are theirs too, and how far it is off.

Canaries are prompts long enough to be held by a cache of prefixes, asked again after every hand-over of weights: keys and values that
outlived the old weights answer them otherwise than the trainer does. A server is compared with the trainer to the floor of its engine
and number format, which is measured before the first step on the same canaries, and explained by rounding or refused.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from assay.generate.generation_request import Completion, Sampling
from assay.generate.policy_logprobs import completion_logprobs
from assay.guard.policy_identity import EXACT, SLACK, Ids, LogprobFloor, Logprobs, measure_last_bits
from assay.learn.importance import ImportanceWeights
from assay.model.placement import fp32_uncompiled, uncompiled
from assay.model.transformer import Transformer
from assay.verdict import Verdict, proven, refuted

CANARIES, CANARY_TOKENS, CANARY_ANSWERS, CANARY_NEW = 4, 400, 2, 8  # vLLM's blocks have 16 tokens on a GPU and 128 on a CPU
NO_FLOOR = LogprobFloor(0.0, 0.0, 0)  # its bounds leave the last bits of a small fp32 log-probability, and nothing else
# A server in half precision rounds its logits too, where the trainer's stay fp32: vLLM in bf16 was seen 0.018 to 0.025 nats a token off
# with the right weights, and an engine with lost ones 0.2 (see COARSE).
HALF_LOGITS = 0.05
LEAST_EFFECTIVE, MOST_KL = 0.5, 0.1  # below it half the rollout is worth nothing; nats a token: above it another policy was sampled


class CanaryAnswers(NamedTuple):
    """Answers of a server to the canaries, and the trainer's log-probabilities of the same tokens: each a list of tokens an answer."""

    prompts: list[tuple[int, ...]]
    said: list[Completion]
    server: list[list[float]]
    trainer: list[list[float]]
    exact: list[list[float]]  # the trainer in fp32
    rounded: list[list[float]]  # the trainer in the server's number format
    last_bits: LogprobFloor  # of fp32, with the weights as they are


def canary_prompts(texts: Sequence[Ids], length: int) -> list[tuple[int, ...]]:
    """The run's own prompts, one after another, to `length` tokens; each canary begins with another of them."""
    found = []
    for first in range(min(CANARIES, len(texts))):
        ids: list[int] = []
        for place in itertools.count(first):
            ids += texts[place % len(texts)]
            if len(ids) >= length:
                break
        found.append(tuple(ids[:length]))
    return found


@torch.no_grad()
def scored_canaries(model: Transformer, prompts: Sequence[tuple[int, ...]], said: Sequence[Sequence[Completion]], sampling: Sampling,
                    served: torch.dtype) -> CanaryAnswers:
    """`said`: of each prompt, its answers."""
    asked = [prompt for prompt, answers in zip(prompts, said, strict=True) for _ in answers]
    flat = [answer for answers in said for answer in answers]
    pairs = [(prompt, answer.ids) for prompt, answer in zip(asked, flat, strict=True)]

    def scored() -> list[list[float]]:
        return [row.tolist() for row in completion_logprobs(model, pairs, sampling)]

    with uncompiled():
        trainer = scored()
    with fp32_uncompiled(model):
        exact = scored()
        model.compute_dtype = served  # put back by the block
        rounded = exact if served == torch.float32 else scored()
    as_long = [(*prompt, *ids, *[prompt[0]] * sampling.max_new)[:len(prompt) + sampling.max_new] for prompt, ids in pairs]  # any ids tell
    last_bits = measure_last_bits(model, as_long, sampling.temperature, len(asked[0]))
    return CanaryAnswers(asked, flat, [list(answer.logprobs) for answer in flat], trainer, exact, rounded, last_bits)


def engine_floor(answers: CanaryAnswers) -> LogprobFloor:
    """How far the server is from the trainer, and how far rounding alone, the trainer's and the server's, would take them apart."""
    apart = np.abs(_flat(answers.server) - _flat(answers.trainer))
    return LogprobFloor(float(apart.mean()), float(apart.max()), len(apart), rounding_of(answers), float(apart.std()))


def rounding_of(answers: CanaryAnswers) -> float:
    exact = _flat(answers.exact)
    return float(np.abs(_flat(answers.trainer) - exact).mean() + np.abs(_flat(answers.rounded) - exact).mean())


def canary_floor(engine: LogprobFloor, answers: CanaryAnswers) -> LogprobFloor:
    """Log-probability floor for the canaries of a server whose rollouts are corrected. Rounding grows with the logits, so it is measured on
    the weights as they are; by our kernels: the server's round otherwise, and about as much."""
    return with_last_bits(replace(engine, both=max(engine.both, 2 * rounding_of(answers))), answers.last_bits)


def with_last_bits(floor: LogprobFloor, last_bits: LogprobFloor) -> LogprobFloor:
    """A floor that was measured on a few tokens of older weights, with room for any token of the weights as they are."""
    return replace(floor, mean=max(floor.mean, last_bits.mean), most=max(floor.most, last_bits.most))


def check_engine_floor(floor: LogprobFloor, engine: str, served: torch.dtype, *, same: bool, last_bits: LogprobFloor = NO_FLOOR) -> Verdict:
    """Check, before the first step, how far engine and trainer differ. Where nothing is corrected, nothing may differ but the last bits."""
    words = f"{engine} and the trainer differ by {floor.mean:.1e} nats a token (at most {floor.most:.1e}, {floor.tokens} tokens)"
    explained = EXACT + SLACK * floor.rounding + (0.0 if served == torch.float32 else HALF_LOGITS)
    if not floor.mean <= explained:
        return refuted("engine_floor", f"{words}, rounding explains {explained:.0e}: it serves another model, or log-probabilities of "
                       "another distribution", mean=str(floor.mean), rounding=str(floor.rounding))
    if same and not floor.mean <= last_bits.bound:
        return refuted("engine_floor", f"{words}, and without a correction {last_bits.bound:.0e} is the most: its kernels are not the "
                       "trainer's; leave --no-vllm-importance-sampling-correction out", mean=str(floor.mean))
    return proven("engine_floor", words, mean=floor.mean, most=floor.most, tokens=floor.tokens, rounding=floor.rounding)


def floor_of_server(engine: LogprobFloor, own: LogprobFloor, served: torch.dtype) -> LogprobFloor:
    """Log-probability floor for what a server drew: its engine's floor and the trainer's own, whichever is wider. Among many completions
    some are one rare token, whose logits, rounded to half precision, are farther off than any of the few that the floor was measured on."""
    wider = max(engine, own, key=lambda floor: floor.likely_most)
    most = max(engine.most, own.most, 0.0 if served == torch.float32 else 2 * HALF_LOGITS)
    return replace(wider, most=most, rounding=max(engine.rounding, own.rounding), both=max(engine.both, own.both))


def check_canaries(answers: CanaryAnswers, floor: LogprobFloor, version: str) -> Verdict:
    """Check, after the server took new weights, that the canaries are answered by the weights, keys and values of this version, and that
    the answers say so."""
    named = {answer.version for answer in answers.said}
    words = f"after the hand-over of {version} {len(answers.said)} answers to prompts of {len(answers.prompts[0])} tokens"
    if named != {version}:
        return refuted("canaries", f"{words} name {', '.join(sorted(named)) or 'no version'}: requests reach other weights",
                       found=sorted(named), due=version)
    apart = [np.abs(np.asarray(one) - np.asarray(two)) for one, two in zip(answers.server, answers.trainer, strict=True)]
    mean, alone = float(np.concatenate(apart).mean()), max(float(each.mean()) for each in apart)
    words += (f" differ from the trainer's by {mean:.1e} nats a token, {alone:.1e} in one; the floor allows {floor.bound:.1e} and "
              f"{floor.bound_alone:.1e}")
    if not (mean <= floor.bound and alone <= floor.bound_alone):
        return refuted("canaries", f"{words}: the server answers by other weights, or by keys and values of the old ones; reset its cache "
                       "of prefixes after every reload", mean=str(mean), floor=floor.mean)
    return proven("canaries", words, mean=mean, alone=alone, floor=floor.mean)


def check_importance(found: ImportanceWeights) -> Verdict:
    """Check that what another engine drew is still worth learning from: by effective sample size and KL."""
    words = (f"{found.tokens} tokens are worth {found.effective:.1%} of as many of the trainer's own; KL to the trainer {found.kl:.1e} "
             f"nats a token, {found.truncated:.2%} of the weights cut")
    if not (found.effective >= LEAST_EFFECTIVE and found.kl <= MOST_KL):
        return refuted("importance", f"{words}; expected at least {LEAST_EFFECTIVE:.0%} and at most {MOST_KL}: what was sampled is another "
                       "policy's, and no weights mend that", effective=str(found.effective), kl=str(found.kl))
    return proven("importance", words, effective=found.effective, kl=found.kl, truncated=found.truncated)


def _flat(rows: Logprobs) -> np.ndarray:
    return np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])

"""Made-up rollouts: prompts and completions of different lengths with every stream that a policy gradient needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.learn.advantage import token_weights
from assay.model.attention import PADDING
from assay.model.transformer import Transformer
from assay.seeds import generator

PROMPTS, COMPLETIONS = (3, 5, 2, 4, 6, 3), (7, 2, 5, 1, 4, 6)
CAP = 8


@dataclass(frozen=True)
class Rollout:
    prompt: Tensor
    completion: Tensor
    advantage: float
    behaviour: Tensor
    reference: Tensor


@torch.no_grad()
def made(model: Transformer, temperature: float = 1.0, noise: float = 0.3, seed: int = 0) -> list[Rollout]:
    """Log-probabilities about the model's own, far enough from them that some ratios are clipped on either side."""
    chance = generator(seed, "rollouts")
    rollouts = []
    for prompt, length in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.randint(0, model.config.vocab, (prompt + length,), generator=chance)
        own = (model(ids[None])[0] / temperature).log_softmax(-1)[prompt - 1:-1].gather(-1, ids[prompt:, None]).squeeze(-1)
        advantage, behaviour, reference = (torch.randn(n, generator=chance) for n in (1, length, length))
        rollouts.append(Rollout(ids[:prompt], ids[prompt:], float(advantage), own + noise * behaviour, own + noise * reference))
    return rollouts


def as_batch(rollouts: list[Rollout], rows: list[list[int]], how: str = "token", counted: list[bool] | None = None) -> Batch:
    """Row by row the rollouts of these numbers, packed one behind the other, padding at the end."""
    counting = token_weights([len(r.completion) for r in rollouts], counted or [True] * len(rollouts), how, CAP)  # type: ignore[arg-type]
    width = max(sum(len(rollouts[n].prompt) + len(rollouts[n].completion) for n in row) for row in rows) + 1
    shape = len(rows), width
    tokens, documents = torch.zeros(shape, dtype=torch.int64), torch.full(shape, PADDING, dtype=torch.int32)
    weight, advantage = torch.zeros(shape), torch.zeros(shape)
    behaviour, reference = torch.full(shape, torch.nan), torch.full(shape, torch.nan)  # unknown wherever nothing was sampled
    for row, numbers in enumerate(rows):
        at = 0
        for place, number in enumerate(numbers):
            rollout = rollouts[number]
            begin, end = at + len(rollout.prompt), at + len(rollout.prompt) + len(rollout.completion)
            tokens[row, at:end] = torch.cat([rollout.prompt, rollout.completion])
            documents[row, at:end] = place
            weight[row, begin:end] = float(counting.weight_N[number])
            advantage[row, begin:end] = rollout.advantage
            behaviour[row, begin:end], reference[row, begin:end] = rollout.behaviour, rollout.reference
            at = end
    return Batch(tokens, weight, documents, advantage=advantage, behaviour=behaviour, reference=reference, divisor=counting.divisor)

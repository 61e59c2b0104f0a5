"""Episode batches: trajectories as rows, a row for each of their token sequences; weights and advantages on what was sampled alone.

Shapes: N trajectories, B rows, T time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from assay.agents.trajectory import TokenSequence, Trajectory
from assay.data.batch import Batch
from assay.learn.advantage import Normalise, token_weights
from assay.model.attention import documents_from_lengths
from assay.recipes.rollout_batch import COLUMNS


class EpisodeRow(NamedTuple):
    """One token sequence, and which of the trajectories it belongs to."""

    sequence: TokenSequence
    trajectory: int


def episode_rows(trajectories: Sequence[Trajectory]) -> list[EpisodeRow]:
    return [EpisodeRow(sequence, number) for number, trajectory in enumerate(trajectories) for sequence in trajectory.sequences]


def episode_batch(trajectories: Sequence[Trajectory], advantage_N: Sequence[float], counted_N: Sequence[bool], normalise: Normalise, *,
                  cap: int) -> Batch:
    """A trajectory's length is what it sampled in all its sequences: where trajectories count alike, a branch does not make one count
    twice. `cap` is the most that one may sample."""
    spoken = [number for number, trajectory in enumerate(trajectories) if trajectory.tokens]
    counting = token_weights([trajectories[number].tokens for number in spoken], [counted_N[number] for number in spoken], normalise, cap)
    weight_of = dict(zip(spoken, counting.weight_N, strict=True))
    rows = episode_rows(trajectories)
    lengths = [len(row.sequence) for row in rows]
    width = -(-max(lengths) // COLUMNS) * COLUMNS
    tokens_BT = np.zeros((len(rows), width), np.int64)
    streams = {name: np.zeros((len(rows), width), np.float32) for name in ("weight", "advantage", "behaviour")}
    for row, (sequence, number) in enumerate(rows):
        said = np.array(sequence.sampled)
        tokens_BT[row, : lengths[row]] = sequence.ids
        streams["behaviour"][row, : lengths[row]] = sequence.logprobs
        streams["weight"][row, : lengths[row]][said] = weight_of[number]
        streams["advantage"][row, : lengths[row]][said] = advantage_N[number]
    return Batch(torch.from_numpy(tokens_BT), documents=documents_from_lengths(lengths, width).int(), divisor=counting.divisor,
                 ids=tuple((trajectories[row.trajectory].task,) for row in rows),
                 **{name: torch.from_numpy(stream) for name, stream in streams.items()})


def sampled_mask(rows: Sequence[EpisodeRow], width: int) -> Tensor:
    """(B, T): which tokens the policy sampled."""
    found = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        found[number, : len(row.sequence)] = torch.tensor(row.sequence.sampled)
    return found


def of_turns(values_BT: Tensor, rows: Sequence[EpisodeRow]) -> list[list[float]]:
    """Values at the tokens of each turn of each row."""
    found = []
    for values, row in zip(values_BT.tolist(), rows, strict=True):
        begin = 0
        for piece in row.sequence.pieces:
            if piece.source == "policy":
                found.append(values[begin:begin + len(piece.ids)])
            begin += len(piece.ids)
    return found

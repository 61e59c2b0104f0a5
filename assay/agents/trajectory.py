"""Trajectories: what was said in an episode, as token ids that are kept as they were sampled or inserted, each with its source.

Token in, token out: nothing that the policy sampled is decoded and encoded again to be trained on. A turn that comes after others is
sampled from the very ids of those before it. Where a chat template writes the history otherwise than it was said (it strips the
thinking of earlier turns, or wraps a tag anew), the policy sees another text from there on, so the trajectory has one more token
sequence: each holds the turns that were sampled in it, and is trained on by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Literal

from assay.agents.tool_calls import ChatMessage

Source = Literal["policy", "environment", "template"]
EpisodeEnd = Literal["done", "turns", "length", "error"]  # by itself, out of turns, out of room, or with an error


@dataclass(frozen=True)
class Piece:
    """Tokens of one source in a row. What the policy sampled has log-probabilities, and the version of the weights that they are of."""

    source: Source
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()  # the policy's alone, one each
    version: str = ""
    ended: str = ""  # how the turn did: stop, length, stop string

    def __post_init__(self) -> None:
        assert len(self.logprobs) == (len(self.ids) if self.source == "policy" else 0), "the policy's tokens have a log-probability each"


@dataclass(frozen=True)
class TokenSequence:
    """A training sequence: everything that the policy was shown and what it said, in one row."""

    pieces: tuple[Piece, ...]

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(piece.ids for piece in self.pieces))

    @cached_property
    def sampled(self) -> tuple[bool, ...]:
        """Whether the policy sampled each token: only these are trained on."""
        return tuple(chain.from_iterable(repeat(piece.source == "policy", len(piece.ids)) for piece in self.pieces))

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probability that each token was sampled with; 0 where it was not sampled."""
        return tuple(chain.from_iterable(piece.logprobs or repeat(0.0, len(piece.ids)) for piece in self.pieces))

    @cached_property
    def turns(self) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.source == "policy")

    def __len__(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)


@dataclass(frozen=True)
class Trajectory:
    """One episode. `reward` is None where an error makes it unknown; then it is learned from neither as good nor as bad."""

    episode: str  # its name: place in the rollout, task, member
    task: str
    member: int
    sequences: tuple[TokenSequence, ...]
    messages: tuple[ChatMessage, ...]  # the whole conversation, as the environment and the template saw it
    rewards: tuple[float, ...]  # of every step
    ended: EpisodeEnd
    error: str | None = None
    error_kind: str | None = None
    replayed: bool = False
    calls: int = 0  # tool calls that were read
    faults: int = 0  # tool calls that could not be read

    @property
    def reward(self) -> float | None:
        return None if self.error is not None else sum(self.rewards)

    @property
    def with_tools(self) -> bool:
        """Whether the policy tried to use a tool, be it in vain."""
        return self.calls + self.faults > 0

    @cached_property
    def turns(self) -> tuple[Piece, ...]:
        """Turns of the policy, in order."""
        return tuple(turn for sequence in self.sequences for turn in sequence.turns)

    @cached_property
    def tokens(self) -> int:
        """Tokens that the policy sampled: the length of a trajectory."""
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(turn.version for turn in self.turns)


def in_one_row(pieces: Sequence[Piece]) -> TokenSequence:
    """Neighbours of one source that were inserted become one piece; turns stay apart."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and piece.source == joined[-1].source != "policy":
            joined[-1] = Piece(piece.source, joined[-1].ids + piece.ids)
        elif piece.ids:
            joined.append(piece)
    return TokenSequence(tuple(joined))

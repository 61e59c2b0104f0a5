"""Agent faults: tool results trained on, history written anew, errors scored 0, kinds of episodes lost, rewards and branches miscounted."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from assay.agents import episodes
from assay.agents.episodes import PlayedEpisodes
from assay.agents.trajectory import Piece, TokenSequence, Trajectory
from assay.agents.transcript import Transcript
from assay.data.batch import Batch
from assay.generate.engine import Engine
from assay.generate.generation_request import GenerationRequest, Sampling
from assay.guard.policy_identity import check_identity, measure_logprob_floor, naive_logprobs
from assay.model.attention import PADDING
from assay.testing import tiny_episodes
from assay.testing.fault_injection import Plant, fault, in_place_of, swap, together
from assay.testing.tiny_episodes import an_episode_rollout
from assay.testing.tiny_models import nudge, tiny_model
from assay.verdict import Verdict


def a_turn_after_an_update(folder: Path, plant: Plant) -> list[Verdict]:
    """A turn, an update of the weights, and a turn that goes on from the first."""
    model, sampling = tiny_model(seed=0), Sampling(max_new=6, seed=0)
    engine, prompt = Engine(model, slots=1, length=64, version="0"), tuple(range(40, 60))
    floor = measure_logprob_floor(model, [prompt], 1.0)
    with plant(folder):
        ticket = engine.submit(GenerationRequest(prompt, sampling))
        [first] = engine.drain()
        nudge(model, far=0.05)
        engine.load("1")
        assert first.completion is not None
        prompt = (*prompt, *first.completion.ids, 70, 71)
        engine.submit(GenerationRequest(prompt, sampling, follows=(ticket, 0)))
        [again] = engine.drain()
    assert again.completion is not None
    return [check_identity([again.completion.logprobs], naive_logprobs(model, [prompt], [again.completion.ids], 1.0), floor)]


FAILING = "assay.testing.echo_environment:FailingEcho"


def rollout_fault(name: str, rows: Sequence[str], stage: str, check: str) -> Any:
    return fault(name, rows=rows, stage=stage, check=check, job=an_episode_rollout)

# ---------------------------------------------------------------- which tokens are trained on


@rollout_fault("tool result trained on", ("N15",), "mask", "token_law")
@in_place_of(tiny_episodes, "assembled")
def everything_counts(usual: Any, *arguments: Any) -> Batch:
    """The mask of what was inserted is forgotten: all that is not padding counts."""
    batch = usual(*arguments)
    return replace(batch, weight=torch.where(batch.documents != PADDING, 1.0, 0.0) * (torch.arange(batch.tokens.shape[1]) > 0))


@rollout_fault("objective ignores the mask of inserted tokens", ("N15",), "loss", "inserted_tokens")
@in_place_of(tiny_episodes, "policy_gradient")
def unmasked_objective(usual: Any, asked: Any) -> Any:
    """A fused loss takes every token that is not padding, whatever its weight."""
    objective = usual(asked)

    def everything(model: Any, batch: Batch) -> Any:
        assert batch.documents is not None
        weight = torch.where(batch.documents != PADDING, 1.0, 0.0)
        weight[:, 0] = 0
        return objective(model, replace(batch, weight=weight))

    return everything


@rollout_fault("turn looked for in the ids", ("N15",), "loss", "inserted_ids")
@in_place_of(tiny_episodes, "policy_gradient")
def turn_found_by_its_header(usual: Any, asked: Any) -> Any:
    """A completion-only loss: what follows the last header of an assistant counts, wherever the last one stands. Where no tool writes
    such a header, that is what was sampled."""
    objective = usual(asked)
    header = torch.tensor(tiny_episodes.templated(tiny_episodes.REWRITING_TEMPLATE).encode("<|im_start|>assistant\n"))

    def completion_only(model: Any, batch: Batch) -> Any:
        assert batch.documents is not None
        weight = batch.weight.clone()
        for row, ids, documents in zip(weight, batch.tokens, batch.documents, strict=True):
            found = (ids.unfold(0, len(header), 1) == header).all(-1).nonzero()
            follows = torch.arange(len(ids)) >= (int(found[-1]) + len(header) if len(found) else len(ids))
            row[follows & (documents != PADDING)] = row.max()
        return objective(model, replace(batch, weight=weight))

    return completion_only


@rollout_fault("old assistant turns trained as new", ("N17",), "mask", "token_law")
@in_place_of(Transcript, "branch")
def history_trained(usual: Any, self: Transcript, messages: Any, pieces: Sequence[Piece]) -> None:
    """Fault: after the template rewrote the history, all of it is taken for the policy's, because its role is assistant."""
    taken = [Piece("policy", piece.ids, (-1.0,) * len(piece.ids), "0", "stop") for piece in pieces[1:]]
    usual(self, messages, [*pieces[:1], *taken])


@rollout_fault("history rewritten by the template", ("N18", "N19"), "template", "token_law")
@in_place_of(Transcript, "branch")
def no_branch(usual: Any, self: Transcript, messages: Any, pieces: Sequence[Piece]) -> None:
    """One sequence for all turns: the template's words stand where the sampled ones stood, and the turns are looked for among them."""
    said = [piece for piece in self._sequences[-1] if piece.source == "policy"]
    self.messages += messages
    self._sequences[-1] = [*pieces[:1], *said[:1], *pieces[1:]]


@rollout_fault("sampled text encoded again", ("N18",), "tokens", "token_law")
@in_place_of(tiny_episodes, "kept_trajectories")
def turns_encoded_again(usual: Any, trajectories: list[Trajectory]) -> list[Trajectory]:
    """Ids are made from the decoded text: here a piece of a character, which decodes to a replacement character, becomes three bytes."""
    return [replace(each, sequences=tuple(_again(sequence) for sequence in each.sequences)) for each in usual(trajectories)]


def _again(sequence: TokenSequence) -> TokenSequence:
    tokenizer = tiny_episodes.templated(tiny_episodes.REWRITING_TEMPLATE)
    pieces = []
    for piece in sequence.pieces:
        ids = tuple(tokenizer.encode(tokenizer.decode(piece.ids)))
        pieces.append(piece if piece.source != "policy" else replace(piece, ids=ids, logprobs=(-1.0,) * len(ids)))
    return TokenSequence(tuple(pieces))

# ---------------------------------------------------------------- what an episode is worth


@rollout_fault("episode error scored 0", ("N34", "W01"), "reward", "episode_rewards")
def error_is_zero(folder: Any) -> Any:
    """A service that did not answer counts as a wrong answer."""
    return together(swap(tiny_episodes, "ECHO", FAILING), in_place_of(tiny_episodes, "rewarded")(
        lambda usual, trajectory: 0.0 if trajectory.error is not None else usual(trajectory))(folder))


@rollout_fault("reward given twice", ("W01",), "reward", "episode_rewards")
@in_place_of(tiny_episodes, "rewarded")
def twice(usual: Any, trajectory: Trajectory) -> float | None:
    """The reward of the last step is also added as the episode's own."""
    value = usual(trajectory)
    return None if value is None else value + trajectory.rewards[-1]


@rollout_fault("only tool-free episodes kept", ("N16",), "drop", "episode_kinds")
@in_place_of(tiny_episodes, "as_played")
def tools_dropped(usual: Any, played: PlayedEpisodes) -> PlayedEpisodes:
    """Fault: whatever called a tool raises in the parser, is tried again, and dropped in the end; what is left does without."""
    groups = [[replace(each, calls=1, error="the tool call could not be parsed") if each.member % 2 else each for each in group]
              for group in usual(played).groups]
    return replace(played, groups=groups)


@rollout_fault("tool calls in a format that nobody reads", ("N16", "N19"), "tools", "tool_format")
@in_place_of(tiny_episodes, "tool_template")
def calls_in_xml(usual: Any) -> str:
    """The model writes <function=name>, as later Qwens do, between the tags that its forerunners put around JSON: none of its calls is
    read, and only what does without a tool is ever rewarded."""
    return ("{% for message in messages %}{{ message.content }}{% for call in message.tool_calls %}<tool_call><function="
            "{{ call.function.name }}></function></tool_call>{% endfor %}{% endfor %}")

# ---------------------------------------------------------------- where it came from


@fault("turn that goes on from the weights before", rows=("N26",), stage="sync", check="identity", job=a_turn_after_an_update)
@in_place_of(Engine, "load")
def stale_turn(usual: Any, self: Engine, version: str, **options: Any) -> None:
    """What a slot holds of an earlier turn outlives the update: the next turn is sampled after keys of older weights."""
    held, kept = dict(self._kept), self.slots.cache.all.clone()
    usual(self, version, **options)
    self._kept = held
    self.slots.cache.all.copy_(kept)


@rollout_fault("trajectory of another version", ("N39", "N26"), "sync", "version")
@in_place_of(tiny_episodes, "as_played")
def older_version(usual: Any, played: PlayedEpisodes) -> PlayedEpisodes:
    """One episode was begun before the update and went on after it."""
    found = usual(played)
    last = found.sampled[-1]
    return replace(found, sampled=[*found.sampled[:-1], last._replace(completion=replace(last.completion, version="0@before"))])


@rollout_fault("branch lost", ("N17",), "branch", "every_turn")
@in_place_of(tiny_episodes, "kept_trajectories")
def last_sequence_only(usual: Any, trajectories: list[Trajectory]) -> list[Trajectory]:
    """Fault: of an episode whose history the template rewrote, only the last sequence is kept."""
    return [replace(each, sequences=each.sequences[-1:]) for each in usual(trajectories)]


rollout_fault("episodes cut after their first turn", (), "rollout", "episode_ends")(
    # Every episode is taken for done, though its environment goes on: what is learned is to answer at once.
    in_place_of(episodes, "take_replies")(lambda usual, writer, live, replies: usual(
        writer, live, {name: replace(reply, done=True) for name, reply in replies.items()})))


@rollout_fault("a branched episode counts once a branch", ("N31",), "weights", "trajectory_weights")
@in_place_of(tiny_episodes, "assembled")
def each_row_alike(usual: Any, trajectories: Sequence[Trajectory], advantage_N: Sequence[float], counted_N: Sequence[bool]) -> Batch:
    """Every row weighs 1, so that an episode of three sequences counts three times."""
    batch = usual(trajectories, advantage_N, counted_N)
    return replace(batch, weight=torch.where(batch.weight > 0, 1.0, 0.0) / (batch.weight > 0).sum(1, keepdim=True).clamp(min=1))


@rollout_fault("log-probabilities shifted by a token", ("N33",), "tokens", "every_turn")
@in_place_of(tiny_episodes, "kept_trajectories")
def shifted(usual: Any, trajectories: list[Trajectory]) -> list[Trajectory]:
    """What the sampler said of token t stands with token t + 1."""
    def turned(piece: Piece) -> Piece:
        return piece if piece.source != "policy" else replace(piece, logprobs=piece.logprobs[-1:] + piece.logprobs[:-1])

    return [replace(each, sequences=tuple(TokenSequence(tuple(map(turned, sequence.pieces))) for sequence in each.sequences))
            for each in usual(trajectories)]

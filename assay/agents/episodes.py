"""Episodes: turns sampled by an engine and answered by environments, all episodes of a rollout in step, until every one has ended.

In step means that what is sampled together does not depend on how fast an environment answers: the same seed gives the same bits. A
turn goes on from the keys and values of the one before (engine: `follows`), within one version of the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from assay.agents.environment_pool import EnvironmentPool, EnvironmentReply
from assay.agents.tool_calls import ChatMessage
from assay.agents.trajectory import EpisodeEnd, Trajectory
from assay.agents.transcript import ChatWriter, Transcript
from assay.errors import DataError
from assay.generate.engine import Engine
from assay.generate.generation_request import Completion, GenerationRequest, Sampling

Address = tuple[str | int, ...]


class EpisodeTask(NamedTuple):
    """A task of an environment: the seed that makes it, and what it says first, as ids."""

    id: str
    seed: int
    ids: tuple[int, ...]


class SampledTurn(NamedTuple):
    """One turn as the engine gave it: kept beside the trajectories, which must hold it as it is."""

    prompt: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True)
class PlayedEpisodes:
    groups: list[list[Trajectory]]  # by task, then by member
    sampled: list[SampledTurn]  # every turn, as the engine gave it
    given: dict[str, list[float]]  # by episode, the reward of every step, as its environment's process gave it
    over: list[str]  # episodes that their environments said are done


@dataclass(frozen=True)
class TurnLimits:
    turns: int
    context: int  # tokens of a sequence, with the turn that is to be sampled


@dataclass
class _Episode:
    """An episode under way. `last` is the ticket and member of its last turn."""

    place: int  # of the task in the rollout, where one may come twice
    task: EpisodeTask
    member: int
    transcript: Transcript | None = None
    rewards: list[float] = field(default_factory=list)
    ended: EpisodeEnd | None = None
    failed: EnvironmentReply | None = None
    replayed: bool = False
    calls: int = 0
    faults: int = 0
    last: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"{self.place}/{self.task.id}/{self.member}"

    def fail(self, reply: EnvironmentReply) -> None:
        self.failed, self.ended = reply, "error"

    def trajectory(self) -> Trajectory:
        transcript, failed = self.transcript, self.failed
        return Trajectory(self.name, self.task.id, self.member, () if transcript is None else transcript.sequences,
                          () if transcript is None else tuple(transcript.messages), tuple(self.rewards), self.ended or "turns",
                          None if failed is None else failed.error, None if failed is None else failed.kind, self.replayed, self.calls,
                          self.faults)


def play_episodes(engine: Engine, pool: EnvironmentPool, writer: ChatWriter, tasks: Sequence[EpisodeTask], sampling: Sampling,
                  address: Address, group: int, limits: TurnLimits) -> PlayedEpisodes:
    """`group` episodes of each task. Member m draws its turn t at (seed, *address, task, "turn", t, m)."""
    episodes = [_Episode(place, task, member) for place, task in enumerate(tasks) for member in range(group)]
    sampled: list[SampledTurn] = []
    begin_episodes(pool, writer, episodes)
    for turn in range(limits.turns):
        live = [episode for episode in episodes if episode.ended is None]
        for episode in live:
            if len(_written(episode).prompt) + sampling.max_new > limits.context:
                episode.ended = "length"
        live = [episode for episode in live if episode.ended is None]
        if not live:
            break
        drawn = sample_turns(engine, live, sampling, address, turn)
        messages: dict[str, ChatMessage] = {}
        for episode, (asked, said) in zip(live, drawn, strict=True):
            sampled.append(SampledTurn(asked, said))
            messages[episode.name] = message = writer.turn(said, f"{episode.name}/{turn}")
            episode.calls, episode.faults = (episode.calls + len(message.get("tool_calls", ())),
                                             episode.faults + len(message.get("faults", ())))
            _written(episode).say(said, message)
        take_replies(writer, live, pool.step(messages))
    names = [episode.name for episode in episodes]
    given, over = pool.rewards(names), pool.over(names)
    pool.close(names)
    trajectories = [episode.trajectory() for episode in episodes]
    return PlayedEpisodes([trajectories[first:first + group] for first in range(0, len(trajectories), group)], sampled, given, over)


def begin_episodes(pool: EnvironmentPool, writer: ChatWriter, episodes: Sequence[_Episode]) -> None:
    """Begin the episodes: every environment says its task again, which must be the one that was planned: a seed that gives another is an
    error."""
    opened = pool.open({episode.name: episode.task.seed for episode in episodes})
    begun = [episode for episode in episodes if opened[episode.name].error is None]
    for episode in episodes:
        if opened[episode.name].error is not None:
            episode.fail(opened[episode.name])
    for episode, (pieces, _) in zip(begun, writer.first([opened[episode.name].messages for episode in begun]), strict=True):
        transcript = Transcript(pieces, opened[episode.name].messages)
        if transcript.prompt == episode.task.ids:
            episode.transcript = transcript
        else:
            episode.fail(EnvironmentReply(error=f"seed {episode.task.seed} gave another task than it did before", kind="not repeatable"))


def sample_turns(engine: Engine, live: Sequence[_Episode], sampling: Sampling, address: Address,
                 turn: int) -> list[tuple[tuple[int, ...], Completion]]:
    """A turn of each: the ids that it was sampled after, and what was said. Members that see the same text share its computation."""
    tickets: dict[int, _Episode] = {}
    for episode in live:
        request = GenerationRequest(_written(episode).prompt, sampling, (*address, episode.task.id, "turn", turn), first=episode.member,
                                    follows=episode.last)
        tickets[engine.submit(request)] = episode
    ended = {progress.ticket: progress.completion for progress in engine.drain()}
    found = []
    for ticket, episode in tickets.items():
        completion = ended[ticket]
        assert completion is not None, "a drained engine has ended every request"
        episode.last = ticket, 0
        found.append((_written(episode).prompt, completion))
    return found


def take_replies(writer: ChatWriter, live: Sequence[_Episode], replies: Mapping[str, EnvironmentReply]) -> None:
    answered: list[tuple[_Episode, Sequence[ChatMessage]]] = []
    for episode in live:
        reply = replies[episode.name]
        episode.replayed |= reply.replayed
        if reply.error is not None:
            episode.fail(reply)
            continue
        episode.rewards.append(reply.reward)
        if reply.done:
            episode.ended = "done"
        elif not reply.messages:
            episode.fail(EnvironmentReply(error="it went on and said nothing, so that there is no next turn", kind="error"))
        else:
            answered.append((episode, reply.messages))
    refused = writer.insert([(_written(episode), messages) for episode, messages in answered])
    for (episode, _), why in zip(answered, refused, strict=True):
        if why is not None:
            episode.fail(EnvironmentReply(error=why, kind="error"))


def play_solution(pool: EnvironmentPool, writer: ChatWriter, seed: int, turns: Sequence[str], name: str) -> EnvironmentReply:
    """An episode of given turns, in the model's own format: the sum of its rewards, or its error."""
    reply = pool.open({name: seed})[name]
    total = 0.0
    for number, text in enumerate(turns):
        if reply.error is not None or reply.done:
            break
        reply = pool.step({name: writer.message(text, f"{name}/{number}")})[name]
        total += reply.reward
    pool.close([name])
    return replace(reply, reward=total)


def _written(episode: _Episode) -> Transcript:
    if episode.transcript is None:
        raise DataError(f"episode {episode.name} has not begun")
    return episode.transcript

"""Served policy faults: what an outside agent said is of other weights, paid twice, half lost, rewritten, or drawn after old keys."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from assay.agents.trajectory import Piece, TokenSequence, Trajectory
from assay.agents.transcript import Transcript
from assay.data.batch import Batch
from assay.generate.engine import Engine
from assay.model.attention import PADDING
from assay.serving import policy_training
from assay.serving.policy_training import OpenTrajectory, ServedPolicy
from assay.testing import tiny_served
from assay.testing.fault_injection import fault, in_place_of, together
from assay.testing.tiny_served import a_served_policy


def served_fault(name: str, rows: tuple[str, ...], stage: str, check: str) -> Any:
    return fault(name, rows=rows, stage=stage, check=check, job=a_served_policy)


@served_fault("agent's trajectory of another version", ("N39", "R02"), "sync", "version")
@in_place_of(tiny_served, "group_to_learn")
def said_before(usual: Any, made: list[str], before: list[str], updates: int) -> list[str]:
    """An agent that is slow hands in what it heard before the last update."""
    return before if updates else made


@served_fault("agent's reward given twice", ("W01",), "reward", "reward_once")
@in_place_of(tiny_served, "pay")
def paid_again(usual: Any, url: str, name: str, reward: float) -> None:
    """A client that saw no answer asks again, with what a second grader says."""
    usual(url, name, reward)
    usual(url, name, 1.0 - reward)


@served_fault("agent's crash scored 0", ("N34", "W01"), "reward", "episode_rewards")
@in_place_of(OpenTrajectory, "finished")
def crash_is_zero(usual: Any, self: OpenTrajectory) -> Trajectory:
    """A trajectory that was closed with an error is taken for one that failed at its task."""
    found = usual(self)
    return found if found.error is None else replace(found, error=None, ended="done", rewards=(0.0,))


@served_fault("agent's conversations with tools all crash", ("N16",), "reward", "episode_kinds")
def tools_crash(folder: Any) -> Any:
    """The agent's tool raises, so that whatever called it is closed with an error: what is learned from did without."""
    asked = itertools.count()

    def paid_or_closed(usual: Any, url: str, name: str, reward: float) -> None:
        if next(asked) % 4 < 2:
            usual(url, name, reward)
        else:
            tiny_served.post(url, f"/trajectories/{name}/close", {"error": "the tool raised"})

    def with_a_call(usual: Any, self: ServedPolicy, name: str, reward: float | None, error: str | None) -> None:
        usual(self, name, reward, error)
        if error == "the tool raised":  # this model calls none of its own accord
            found = self.find(name)
            found.calls, last = 1, found.heard[-1]
            last.tools, last.turn = ({},), {**(last.turn or {}), "tool_calls": [{}]}

    return together(in_place_of(tiny_served, "pay")(paid_or_closed)(folder), in_place_of(ServedPolicy, "close")(with_a_call)(folder))


@served_fault("agent's update that changes no weight", ("N39",), "update", "movement")
@in_place_of(policy_training, "train")
def update_undone(usual: Any, model: Any, *given: Any, **options: Any) -> list[Any]:
    """The optimizer holds other tensors than those that are served: a loss, a gradient, a new version, and the old policy."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    steps = list(usual(model, *given, **options))
    for parameter, kept in zip(model.parameters(), before, strict=True):
        parameter.data.copy_(kept)
    return steps


@served_fault("branch of an agent's conversation lost", ("N17",), "branch", "every_turn")
@in_place_of(OpenTrajectory, "finished")
def last_sequence(usual: Any, self: OpenTrajectory) -> Trajectory:
    """Fault: of a history that the client rewrote only the last sequence is kept."""
    found = usual(self)
    return replace(found, sequences=found.sequences[-1:])


@served_fault("agent's rewritten conversation not heard", ("N17",), "branch", "heard")
@in_place_of(Transcript, "branch")
def old_text_answered(usual: Any, self: Transcript, messages: Any, pieces: Any) -> None:
    """No sequence begins where the client wrote the history anew: its words are noted, and the old text is answered once more."""
    self.messages += messages


@served_fault("agent's own words taken for the policy's", ("N15", "N17"), "mask", "token_law")
@in_place_of(policy_training, "episode_batch")
def client_counts(usual: Any, *given: Any, **options: Any) -> Batch:
    """What the client wrote has the role assistant, and is learned from."""
    batch = usual(*given, **options)
    weight = (batch.documents != PADDING).float()
    weight[:, 0] = 0
    return replace(batch, weight=weight)


@served_fault("agent's conversation rendered and encoded again", ("N18",), "tokens", "every_turn")
@in_place_of(OpenTrajectory, "finished")
def turns_cut_short(usual: Any, self: OpenTrajectory) -> Trajectory:
    """Turns are made from their text once more, and the last token, which has none, is lost."""
    def again(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        return tuple(piece if piece.source != "policy" else replace(piece, ids=piece.ids[:-1], logprobs=piece.logprobs[:-1])
                     for piece in pieces)

    found = usual(self)
    return replace(found, sequences=tuple(TokenSequence(again(sequence.pieces)) for sequence in found.sequences))


@served_fault("agent's update written down twice", ("N39",), "record", "update_rows")
@in_place_of(policy_training, "append_json_rows")
def written_twice(usual: Any, path: Any, rows: Any) -> None:
    """Whoever counts the updates, or draws their curve, sees two."""
    usual(path, [*rows] * (1 + (path.name == "updates.jsonl")))


@served_fault("agent's dropped conversation not written down", ("N16", "W01"), "record", "update_rows")
@in_place_of(ServedPolicy, "_drop")
def nobody_dropped(usual: Any, self: ServedPolicy, named: Any) -> list[Any]:
    """What an update made unusable is forgotten, as if every conversation had been learned from."""
    usual(self, named)
    return []


@served_fault("agent's calls counted that nobody made", ("N16",), "record", "calls")
@in_place_of(OpenTrajectory, "finished")
def one_call_each(usual: Any, self: OpenTrajectory) -> Trajectory:
    """Every conversation counts as one with tools, so that none without is missed."""
    return replace(usual(self), calls=1)


@served_fault("served prefix cache of the weights before", ("N26", "R06"), "sync", "identity")
@in_place_of(Engine, "load")
def old_prompt_keys(usual: Any, self: Engine, version: str, **options: Any) -> None:
    """The cache of prompts survives an update: the next conversation that begins alike goes on from old keys."""
    held, kept = list(self._prefixes), self.slots.cache.all.clone()
    usual(self, version, **options)
    self._prefixes = held
    self.slots.cache.all.copy_(kept)

"""Training of a served policy: what clients said with it is kept as it was sampled, and learned from on their word.

    POST /v1/trajectories                   {}                            → {"id", "version"}
    POST /v1/chat/completions               with the header X-Assay-Trajectory: ID, any number of turns
    POST /v1/trajectories/ID/close          {"reward": 1.0}               or {"error": "…"}: then its reward is unknown, not 0
    POST /v1/train                          {"groups": [[ID, …], …]}      one update; → its loss, verdicts and the new version

Token ids, log-probabilities and versions are the server's own record: a client names trajectories and never sends tokens. A turn goes on
from the very ids of the one before; where a client or a template writes the history anew, a new sequence begins, in which only what is
sampled there is learned from. What was not said by the weights as they are now is refused. Of a policy that is an adapter on its base
(`--lora-r`, or a served adapter) the base stays as it is, which is looked at after every update.

What was said under weights that are gone can never be learned from: after each update such trajectories are named in trajectories.jsonl,
with why, and counted by kind (with tools, without). Where too many of one kind were closed with errors, updates are refused: the policy
would learn from the other kind alone.
"""

import math
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.agents.episodes import SampledTurn
from assay.agents.trajectory import Trajectory
from assay.agents.transcript import ChatWriter, Transcript
from assay.data.batch import Batch
from assay.errors import DataError, GuardStop, StoreError
from assay.generate.generation_request import Completion
from assay.generate.sampler_weights import fingerprint, tensor_checksums
from assay.guard.policy_identity import (
    LogprobFloor,
    OutgrownFloor,
    check_floor,
    check_identity,
    check_version,
    measure_logprob_floor,
    version_name,
)
from assay.guard.served_conversations import HeardRequest, as_shown, check_heard, hear_request
from assay.guard.trajectory_checks import check_episode_rewards, check_every_turn, check_kinds, check_token_law
from assay.guard.update_rows import SaidSoFar, added_rows, check_calls, check_saved, check_update_rows, said_so_far
from assay.learn.advantage import group_advantages
from assay.learn.loop import train
from assay.learn.optim import adamw
from assay.learn.policy import Surrogate, policy_gradient
from assay.model.probe_logits import probe_inputs
from assay.recipes.environment_tasks import kind_of
from assay.recipes.episode_batch import episode_batch, episode_rows, of_turns
from assay.recipes.episode_rollouts import check_inserted, turns_of
from assay.recipes.rollout_batch import Layout, batch_logprobs
from assay.recipes.run import append_json_rows
from assay.recipes.starting_model import AdapterModel
from assay.serving.hosted_model import HostedModel
from assay.serving.openai_protocol import ApiRequest, read_message
from assay.serving.request_fields import RequestRefused
from assay.store.checkpoint import Checkpoint, write_checkpoint
from assay.store.saving import adapter_contents, model_contents
from assay.verdict import Outcome, Verdict, proven

MOST_TRAJECTORIES = 4096  # that are held at a time
MICRO_ROWS = 8  # of a micro-batch
MOST_ERRORS = 0.5  # of the trajectories of a kind
TRAINED_SAMPLING = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": ()}


@dataclass(eq=False)
class OpenTrajectory:
    """One agent's conversation. `seen`: its messages as the client has them, with the last answer."""

    id: str
    transcript: Transcript | None = None
    writer: ChatWriter | None = None
    seen: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    speaking: bool = False
    closed: bool = False
    reward: float | None = None
    error: str | None = None
    asked: tuple[int, ...] = ()  # the ids that the last turn is sampled after
    sampled: list[SampledTurn] = field(default_factory=list)  # every turn as the engine gave it, beside what is made of it
    heard: list[HeardRequest] = field(default_factory=list)  # every request as it came, beside what is made of it
    calls: int = 0  # of tools that were offered: those that could be read
    faults: int = 0  # and those that could not
    dropped: bool = False  # said under weights that are gone, so that it can never be learned from

    def finished(self) -> Trajectory:
        assert self.transcript is not None
        return Trajectory(self.id, self.id, 0, self.transcript.sequences, tuple(self.transcript.messages),
                          () if self.reward is None else (self.reward,), "error" if self.error is not None else "done", self.error,
                          calls=self.calls, faults=self.faults)

    def why_dropped(self) -> str:
        if self.error is not None:
            return self.error
        return "an update came before it was trained on" if self.closed else "an update came before it was closed"


@dataclass(eq=False)
class ServedPolicy:
    """A served model that learns. Trajectories are touched on the event loop, weights on the engine's thread, between two steps."""

    model: HostedModel
    folder: Path
    learning_rate: float
    errors: float = MOST_ERRORS  # share of the trajectories of a kind that may be closed with an error
    save_steps: int = 0  # updates between checkpoints; 0: only at the end
    updates: int = 0
    trajectories: dict[str, OpenTrajectory] = field(default_factory=dict)
    given: dict[str, list[float]] = field(default_factory=dict)  # by trajectory, what its client paid, beside what is made of it
    played: Counter[str] = field(default_factory=Counter)  # by kind, trajectories that were learned from or closed with an error
    failed: Counter[str] = field(default_factory=Counter)  # of these, those with an error
    saved: tuple[int, Checkpoint] | None = None  # the last checkpoint, and after how many updates it was written

    def __post_init__(self) -> None:
        assert self.model.trained is not None, "a policy is opened to learn"
        self.weights, self.trained = self.model.engine.weights.source, self.model.trained
        learning = [(name, parameter) for name, parameter in self.weights.named_parameters() if parameter.requires_grad]
        self.optimizer = adamw(learning, self.learning_rate, weight_decay=0.0)
        self.frozen = tensor_checksums(self._frozen())
        self.asked = Surrogate(measure_entropy=False)
        tokens, _ = probe_inputs(self.weights.config.vocab, self.model.engine.length)
        self.floors = OutgrownFloor()
        self.floor: LogprobFloor = measure_logprob_floor(self.weights, tokens.tolist(), 1.0)
        verdict = check_floor(self.floor)
        if verdict.outcome is Outcome.REFUTED:
            raise GuardStop(f"{self.model.name!r} is not trained: {verdict.reason}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model.engine.load(version_name(0, fingerprint(self.weights)))

    # ── conversations ─────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self) -> dict[str, Any]:
        if len(self.trajectories) >= MOST_TRAJECTORIES:
            self._forget_dropped()
        if len(self.trajectories) >= MOST_TRAJECTORIES:
            raise RequestRefused(f"{len(self.trajectories)} trajectories are held already; train on them, or close with an error those in "
                                 "which nothing was said", status=429, code="too_many_trajectories")
        made = OpenTrajectory(f"traj-{secrets.token_hex(8)}")
        self.trajectories[made.id] = made
        return {"id": made.id, "version": self.model.engine.version}

    def _forget_dropped(self) -> None:
        """Forget trajectories that can never be learned from; they were kept so that a late client is told why."""
        for name in [each.id for each in self.trajectories.values() if each.dropped and not each.speaking]:
            del self.trajectories[name]
            self.given.pop(name, None)

    def find(self, name: str) -> OpenTrajectory:
        if name not in self.trajectories:
            raise RequestRefused(f"there is no trajectory {name[:60]!r}, or it was trained on already", status=404,
                                 code="trajectory_not_found")
        return self.trajectories[name]

    def begin_turn(self, name: str, asked: ApiRequest, model: HostedModel) -> tuple[int, ...]:
        """The ids that the turn is sampled after."""
        found = self.find(name)
        if found.closed or found.speaking:
            raise RequestRefused(f"trajectory {name} " + ("is closed" if found.closed else "has a turn under way"), status=409,
                                 code="trajectory_busy")
        _refuse_other_sampling(asked)
        if model is not self.model:
            raise RequestRefused(f"trajectories are of the policy {self.model.name!r}", param="model", code="invalid_value")
        if found.transcript is not None and {turn.version for each in found.transcript.sequences for turn in each.turns} - {
                model.engine.version}:
            raise RequestRefused(f"trajectory {name} began under other weights; open a new one", status=409, code="other_version")
        writer = found.writer if found.writer is not None and found.tools == asked.form.tools else ChatWriter(model.tokenizer,
                                                                                                              asked.form.tools)
        more = [as_shown(message, writer.format) for message in asked.messages[len(found.seen):]]
        goes_on = bool(found.seen and more) and found.writer is writer and asked.messages[: len(found.seen)] == found.seen
        if found.transcript is not None and goes_on:
            refused = writer.insert([(found.transcript, more)])[0]
            if refused is not None:
                raise RequestRefused(refused, param="messages", code="invalid_value")
        else:
            self._begin_sequence(found, writer, asked)
        found.heard.append(hear_request(found.heard, asked.messages, asked.form.tools, model.tokenizer, writer.format))
        found.writer, found.tools, found.seen, found.speaking = writer, asked.form.tools, asked.messages, True
        assert found.transcript is not None
        found.asked = found.transcript.prompt
        return found.asked

    def _begin_sequence(self, found: OpenTrajectory, writer: ChatWriter, asked: ApiRequest) -> None:
        messages = [as_shown(message, writer.format) for message in asked.messages]
        try:
            ((pieces, _),) = writer.first([messages])
        except DataError as error:
            raise RequestRefused(str(error), param="messages", code="invalid_value") from None
        if found.transcript is None:
            found.transcript = Transcript(pieces, messages)
        else:
            found.transcript.messages = []
            found.transcript.branch(messages, pieces)

    def end_turn(self, name: str, completion: Completion | None, message: Mapping[str, Any], address: str) -> None:
        """End a turn with what was sampled, as it was; None where it was cancelled: then the turn was never said."""
        found = self.find(name)
        found.speaking = False
        assert found.transcript is not None
        assert found.writer is not None
        if completion is None:
            found.seen = ()  # the next request begins a sequence
            return
        found.sampled.append(SampledTurn(found.asked, completion))
        turn = found.writer.turn(completion, address)
        if found.tools:
            found.calls += len(turn.get("tool_calls", ()))
            found.faults += len(turn.get("faults", ()))
        found.transcript.say(completion, turn)
        answer = read_message(message, "the answer")
        found.seen = (*found.seen, answer)
        found.heard[-1].answer, found.heard[-1].turn = answer, turn

    def close(self, name: str, reward: float | None, error: str | None) -> None:
        found = self.find(name)
        if found.closed or found.speaking:
            raise RequestRefused(f"trajectory {name} " + ("has its reward already; a reward is given once" if found.closed else
                                                          "has a turn under way"), status=409,
                                 code="reward_once" if found.closed else "trajectory_busy")
        if (reward is None) == (error is None) or (reward is not None and not math.isfinite(reward)):
            raise RequestRefused('expected {"reward": a finite number} or {"error": "why there is none"}', param="reward")
        if not found.sampled and error is not None:
            del self.trajectories[name]
            return
        if not found.sampled:
            raise RequestRefused(f"nothing was said in trajectory {name}, so there is nothing to reward", status=409, param="reward")
        found.closed, found.reward, found.error = True, reward, error
        if reward is not None:
            self.given[name] = [reward]

    # ── an update, on the engine's thread ─────────────────────────────────────────────────────────────────────────────

    def learn(self, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Train on groups of closed trajectories, one update. They are gone afterwards; what is refused leaves everything as it was."""
        named = [name for group in groups for name in group]
        if not named or any(len(group) != len(groups[0]) for group in groups) or len(groups[0]) < 2 or len(set(named)) < len(named):
            raise RequestRefused("groups: expected lists of at least two trajectories each, all of one length, none twice", param="groups")
        opened = [[self.find(name) for name in group] for group in groups]
        if unclosed := [each.id for group in opened for each in group if not each.closed]:
            raise RequestRefused(f"trajectory {unclosed[0]} is not closed: it has no reward yet", status=409, param="groups")
        if not self.model.engine.idle:
            raise RequestRefused("completions of the policy are under way; train when they are over", status=409, code="policy_busy")
        every = [each.finished() for group in opened for each in group]
        version = check_version([turn for each in every for turn in each.versions], self.model.engine.version)
        if version.outcome is Outcome.REFUTED:
            raise RequestRefused(f"not trained: version: {version.reason}", status=409, param="groups", code="other_version")
        rewards = [[each.finished().reward for each in group] for group in opened]
        advantages = group_advantages(rewards)
        if advantages.silent_P.all():
            raise RequestRefused("in every group all rewards are the same or unknown, so there is nothing to learn", status=409,
                                 param="groups", code="nothing_to_learn")
        counted = [each.error is None for each in every]
        batch = episode_batch(every, advantages.values_PG.flatten().tolist(), counted, "token", cap=self.model.engine.length)
        sampled = [turn for group in opened for each in group for turn in each.sampled]
        whole = Counter(sequence.ids for each, counts in zip(every, counted, strict=True) if counts for sequence in each.sequences)
        law = check_token_law(batch, sampled, whole, stop_ids=self.model.engine.stop_ids, cap=0)  # a client caps each turn as it likes
        paid = check_episode_rewards(every, [reward for group in rewards for reward in group], self.given)
        heard = [each.heard for group in opened for each in group]
        asked = check_heard([(each.heard, each.sampled) for group in opened for each in group], self.model.tokenizer)
        verdicts = [version, check_every_turn(sampled, every), asked, law, paid, self._check_kinds(every), check_calls(every, heard)]
        _stop_training_if_refuted(verdicts)  # first: what is not as it was sampled need not even have a log-probability
        verdicts.append(self._check_identity(batch, every))
        if self.updates == 0:
            verdicts += check_inserted(self.weights, policy_gradient(self.asked), batch, episode_rows(every), self.asked.temperature)
        _stop_training_if_refuted(verdicts)
        return self._update(named, every, batch, verdicts)

    def _check_kinds(self, every: Sequence[Trajectory]) -> Verdict:
        """Check the error rate of each kind over all trajectories so far: these, those of earlier updates, and those that were closed with
        an error and are in no group."""
        names = {each.episode for each in every}
        late = [each.finished() for each in self._left_out(names) if each.error is not None]
        played = self.played + Counter(kind_of(each) for each in (*every, *late))
        failed = self.failed + Counter(kind_of(each) for each in (*every, *late) if each.error is not None)
        return check_kinds(failed, played, self.errors)

    def _left_out(self, names: Collection[str]) -> list[OpenTrajectory]:
        """Trajectories in which something was said under the weights as they are, beside those named."""
        every = list(self.trajectories.values())  # at once: clients open others meanwhile
        return [each for each in every if each.sampled and not each.dropped and each.id not in names]

    def _check_identity(self, batch: Batch, every: Sequence[Trajectory]) -> Verdict:
        with torch.no_grad():
            scored = batch_logprobs(self.weights, batch, self.asked.temperature, Layout(MICRO_ROWS), entropy=False)
        rows = episode_rows(every)
        said = [turn.logprobs for each in every for turn in each.turns]
        return check_identity(said, of_turns(scored, rows), self.floors.over(self.floor),
                              anew=lambda worst: self.floors.measure(self.weights, *turns_of(rows), self.asked.temperature, worst))

    def _frozen(self) -> dict[str, Tensor]:
        return {name: parameter for name, parameter in self.weights.named_parameters() if not parameter.requires_grad}

    def _check_base(self) -> list[Verdict]:
        """Check, after an update of an adapter, that its base has the bits that it was opened with."""
        now = tensor_checksums(self._frozen())
        if strayed := [name for name, checksum in self.frozen.items() if now.get(name) != checksum]:
            self.model.broken = f"the base of {self.model.name!r} changed in an update of its adapter ({strayed[0]}); start again"
            raise GuardStop(self.model.broken)
        return [proven("frozen", f"all {len(now)} tensors of the base have their old bits")] if now else []

    def _update(self, named: Sequence[str], every: Sequence[Trajectory], batch: Batch, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        old = fingerprint(self.weights)
        (step,) = train(self.weights, self.optimizer, [batch], policy_gradient(self.asked), micro=MICRO_ROWS, start=self.updates)
        before, new = self.model.engine.version, fingerprint(self.weights)
        said = self._said_so_far()
        verdicts = [*verdicts, self._check_moved(old, new), *self._check_base()]
        self.updates += 1
        self.model.engine.load(version_name(self.updates, new))
        left = self._drop(named)
        for each in every:
            del self.trajectories[each.episode]
            self.given.pop(each.episode, None)
            self.played[kind_of(each)] += 1
            self.failed[kind_of(each)] += each.error is not None
        told = {"update": self.updates, "trained": len(every), "tokens": sum(each.tokens for each in every), "loss": float(step.loss),
                "grad_norm": float(step.grad_norm), "before": before, "version": self.model.engine.version, "dropped": len(left),
                "verdicts": [verdict.to_json() for verdict in verdicts]}
        recorded = self._write_rows(told, every, left, said)
        if self.save_steps and self.updates % self.save_steps == 0:
            self.save()
        saved = check_saved(self._step_folder(), self.updates, self.save_steps)
        self._stop_if_unrecorded(saved)
        return told | {"verdicts": [verdict.to_json() for verdict in (*verdicts, recorded, *saved)]}

    def _said_so_far(self) -> dict[str, SaidSoFar]:
        """What was said in each trajectory under the weights as they are."""
        every = list(self.trajectories.values())
        return {each.id: said_so_far(each.sampled, each.heard, self.given.get(each.id, ()), speaking=each.speaking)
                for each in every if each.sampled and not each.dropped}

    def _write_rows(self, told: Mapping[str, Any], every: Sequence[Trajectory], left: Sequence[Mapping[str, Any]],
                    said: Mapping[str, SaidSoFar]) -> Verdict:
        """Write down an update, the trajectories that it learned from, and those that it dropped; what was written is read back."""
        rows = [{"update": self.updates, "id": each.episode, "reward": each.reward, "error": each.error, "sequences": [
            {"ids": list(one.ids), "sampled": list(one.sampled), "logprobs": list(one.logprobs)} for one in each.sequences]}
            for each in every]
        files = self.folder / "trajectories.jsonl", self.folder / "updates.jsonl"
        ends = [file.stat().st_size if file.exists() else 0 for file in files]
        try:
            append_json_rows(files[0], [*rows, *left])
            append_json_rows(files[1], [told])
        except StoreError as error:
            self.model.broken = f"an update of {self.model.name!r} could not be written down: {error}; start again"
            raise
        written, updates = map(added_rows, files, ends)
        found = check_update_rows(told, updates, written, said, {each.episode for each in every})
        self._stop_if_unrecorded([found])
        return found

    def _stop_if_unrecorded(self, verdicts: Sequence[Verdict]) -> None:
        for found in verdicts:
            if found.outcome is Outcome.REFUTED:
                self.model.broken = f"what is written of an update of {self.model.name!r} is wrong: {found.reason}; start again"
                raise GuardStop(f"not recorded: {found.check}: {self.model.broken}")

    def _check_moved(self, old: str, new: str) -> Verdict:
        """An update that leaves the weights as they were would be served, and saved, as one that was learned from."""
        if old == new:
            self.model.broken = f"an update of {self.model.name!r} changed none of its weights; start again"
            raise GuardStop(f"not trained: movement: {self.model.broken}")
        return proven("movement", f"the weights were {old[:16]} and are {new[:16]}")

    def _drop(self, named: Collection[str]) -> list[dict[str, Any]]:
        """Drop what was said under the previous weights and is in no group: a row each. Its client is told when it comes back."""
        rows = []
        for each in self._left_out(set(named)):
            made, each.dropped = each.finished(), True
            self.played[kind_of(made)] += each.error is not None
            self.failed[kind_of(made)] += each.error is not None
            rows.append({"update": self.updates, "id": each.id, "reward": each.reward, "dropped": each.why_dropped(),
                         "kind": kind_of(made)})
        return rows

    def save(self) -> Checkpoint:
        """The policy as it is now, under its number of updates, once; nobody has proven it yet."""
        if self.saved is None or self.saved[0] != self.updates:
            self.saved = self.updates, self._write_checkpoint()
        return self.saved[1]

    def _write_checkpoint(self) -> Checkpoint:
        artifact, trained = self.model.artifact, self.trained
        lineage = trained.ancestry.lineage(moved=bool(self.updates), bound=None)
        if isinstance(trained, AdapterModel):
            contents = adapter_contents(self.weights, trained.patch(), trained.base, artifact.tokenizer, lineage, rslora=trained.rslora)
        else:
            contents = model_contents(self.weights, artifact.tokenizer, artifact.stops, lineage)
        return write_checkpoint(self._step_folder(), contents)

    def _step_folder(self) -> Path:
        return self.folder / "checkpoints" / f"step-{self.updates:06d}"


def _stop_training_if_refuted(verdicts: Sequence[Verdict]) -> None:
    if against := [verdict for verdict in verdicts if verdict.outcome is Outcome.REFUTED]:
        raise GuardStop(f"not trained: {against[0].check}: {against[0].reason}")


def _refuse_other_sampling(asked: ApiRequest) -> None:
    """A ratio is between log-probabilities of one distribution: the plain softmax, which is the trainer's."""
    for name, due in TRAINED_SAMPLING.items():
        if getattr(asked, name) != due:
            raise RequestRefused(f"{name} is {getattr(asked, name)}; a trajectory that is to be trained on is sampled with {due or 'none'}",
                                 param=name, code="unsupported_parameter")
    if asked.form.constrained:
        raise RequestRefused("a form that is demanded (response_format, tool_choice required) is not supported in a trajectory: its tokens "
                             "are drawn from another distribution than the one that learns", param="response_format",
                             code="unsupported_parameter")

"""Rollouts of episodes: tasks played by the policy itself, made into a batch; what they must show, and what they measure.

As `rollouts.py` for prompts and completions. A group's members are trajectories: rewards, advantages and normalisation are theirs.
Shapes: P tasks, G episodes of each, N = P · G trajectories, B rows of one token sequence each.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.agents.episodes import PlayedEpisodes
from assay.agents.trajectory import Trajectory
from assay.data.batch import Batch
from assay.data.data_ledger import ids_digest
from assay.errors import GuardStop
from assay.evaluation.soundness import DrawnTokens, judge_draws, rescored_together
from assay.generate.generation_request import Completion, Sampling
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import LogprobFloor, OutgrownFloor, check_identity, check_version, naive_logprobs, version_name
from assay.guard.policy_loss_checks import check_advantages, check_counted
from assay.guard.rollout_checks import SiblingCounts, check_none_held_out, check_planned_prompts, rollout_metrics
from assay.guard.trajectory_checks import (
    check_episode_ends,
    check_episode_figures,
    check_episode_rewards,
    check_every_turn,
    check_inserted_ids,
    check_inserted_tokens,
    check_kinds,
    check_token_law,
    check_trajectory_weights,
)
from assay.learn.advantage import Advantages, estimated_advantages
from assay.learn.objectives import Objective
from assay.learn.policy import Surrogate, token_logprobs
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.recipes.environment_tasks import EnvironmentTasks, kind_of, was_cut
from assay.recipes.episode_batch import EpisodeRow, episode_batch, episode_rows, of_turns, sampled_mask
from assay.recipes.grpo_options import Grpo
from assay.recipes.prompts import Prompt, PromptData
from assay.recipes.reference import Reference, with_reference
from assay.recipes.rollout_batch import Drawn, Layout, batch_logprobs, quickest_score
from assay.recipes.rollouts import COMPARED, RESCORED_A_ROLLOUT, Sampler, address
from assay.recipes.run import Run, append_json_rows, plain, rewrite_json_rows
from assay.strict_json import read_json_lines
from assay.verdict import Verdict

PREFLIGHT_SEQUENCES = 4  # on which the gradient at inserted tokens is looked at


@dataclass(frozen=True)
class EpisodeRollout:
    """`rows` hold one token sequence each; `batch` is how they go through the model."""

    step: int
    updates: int  # since the reference, as far as they have moved the weights
    tasks: list[Prompt]
    played: PlayedEpisodes
    rewards: list[list[float | None]]
    advantages: Advantages
    counted_N: list[bool]
    rows: Batch
    batch: Batch
    drawn_at: int  # updates that the weights had seen that played it; `step`, unless it was played ahead
    importance_BT: Tensor | None = None  # weights of its tokens, where it was
    weighed: bool = False  # a server drew it: the rows have the trainer's log-probabilities, and advantages with importance weights

    @property
    def scored(self) -> tuple[list[list[Completion]], list[list[float | None]]]:
        """Every episode as what was sampled in it, and what each was given."""
        return as_completions(self), self.rewards

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.played.groups for trajectory in group]

    def witness_facts(self) -> list[dict[str, Any]]:
        """Record of a step for the witness: every group's rewards, and of each episode its sequences with what was sampled in them. Of
        importance-weighted ones the ratio is to the trainer's log-probabilities, and the server's stand beside them."""
        kept = iter(self._kept_sequences())
        return [{"prompt": task.id, "ids": list(task.ids), "rewards": list(rewards), "completions": [
            {"ended": "length" if was_cut(episode) else "stop", "sequences": [next(kept) for _ in episode.sequences]} for episode in group]}
            for task, rewards, group in zip(self.tasks, self.rewards, self.played.groups, strict=True)]

    def _kept_sequences(self) -> Iterator[dict[str, Any]]:
        """Records of the sequences, in the order of the rows."""
        for row, each in enumerate(episode_rows(self.trajectories)):
            drawn_with = list(each.sequence.logprobs)
            found = {"ids": list(each.sequence.ids), "sampled": list(each.sequence.sampled), "logprobs": drawn_with}
            if self.weighed:
                assert self.rows.behaviour is not None
                found |= {"logprobs": self.rows.behaviour[row, : len(each.sequence)].tolist(), "sampler_logprobs": drawn_with}
            yield found


class EpisodeCollector:
    """Collector that plays rollouts of episodes with the weights as they are now."""

    def __init__(self, config: Grpo, prompts: PromptData, sampler: Sampler, environment: EnvironmentTasks, run: Run, asked: Surrogate,
                 layout: Layout):
        self.config, self.order, self.sampler, self.environment = config, prompts.order, sampler, environment
        self.run, self.asked, self.layout, self.model = run, asked, layout, sampler.model
        self.sampling = Sampling(max_new=config.max_completion_length, temperature=config.temperature, seed=config.seed)
        self.cap = config.max_turns * config.max_completion_length  # tokens that one trajectory may sample
        self.file = run.folder / "samples.jsonl"
        self.waiting: list[str] = []
        self._score = token_logprobs if config.fsdp else quickest_score(self.model, layout)
        self.train_ids = [prompt.id for prompt in prompts.train]
        self.held_out = frozenset(said for prompt in prompts.held_out for said in (prompt.content, prompt.text))
        self.fingerprints: dict[int, str] = {}  # of the policy after so many updates, as far as this process saw it
        self.draws, self.siblings, self.looks = DrawnTokens(), SiblingCounts(config.num_generations), 0
        self.floors = OutgrownFloor()

    def forget_after(self, step: int) -> None:
        """Samples of steps that are about to be taken again."""
        rewrite_json_rows(self.file, [row for row in read_json_lines(self.file) if row["step"] < step])

    def facts(self) -> dict[str, Any]:
        return {}

    def collect(self, step: int, reference: Reference | None) -> EpisodeRollout:
        """Tasks, episodes, rewards, advantages, and the batch to learn from."""
        self.load(step)
        return self.assemble(step, self.draw(step), reference, self.sampler.fingerprint, step)

    def load(self, step: int) -> None:
        """The sampler takes up the weights as they are now, after so many updates."""
        self.sampler.load(step)
        self.fingerprints.setdefault(step, self.sampler.fingerprint)

    def draw(self, step: int) -> PlayedEpisodes:
        """Play the episodes of a step with the weights that were loaded; tasks and draws are those of the step."""
        return self.environment.play(self.sampler, self._tasks(step), self.sampling, address(step), self.config.num_generations)

    def _tasks(self, step: int) -> list[Prompt]:
        return self.order.drawn(step // self.config.num_iterations)

    def assemble(self, step: int, played: PlayedEpisodes, reference: Reference | None, policy: str, drawn_at: int) -> EpisodeRollout:
        """Advantages and the batch to learn from; `policy` is the fingerprint of the weights that will."""
        config, tasks = self.config, self._tasks(step)
        updates = step if reference is not None and self._left(reference, policy) else 0
        every = [trajectory for group in played.groups for trajectory in group]
        self.environment.count(every)
        rewards = [[trajectory.reward for trajectory in group] for group in played.groups]
        advantages = estimated_advantages(rewards, config.advantage_estimator, config.scale_rewards)
        counted_N = counted_trajectories(every, mask_truncated=config.mask_truncated_completions)
        rows = episode_batch(every, advantages.values_PG.flatten().tolist(), counted_N, config.normalisation, cap=self.cap)
        rows = self.sampler.corrected(with_reference(rows, reference, self.asked, config), self.trainer_logprobs)
        return EpisodeRollout(step, updates, tasks, played, rewards, advantages, counted_N, rows, self.layout.packed(rows).batch, drawn_at,
                              weighed=self.sampler.importance is not None)

    def _left(self, reference: Reference, policy: str) -> bool:
        """Whether the policy has moved from what its reference should be."""
        assert reference.step is not None
        return policy != self.fingerprints.get(reference.step, reference.fingerprint)

    # ---------------------------------------------------------------- what is said of it

    def check(self, rollout: EpisodeRollout, floor: LogprobFloor, reference: Reference | None = None) -> list[Verdict]:
        """Check that a rollout came from the weights as they are, is trained on as it was sampled, and has the rewards that its
        environments gave."""
        config, every, sampled = self.config, rollout.trajectories, rollout.played.sampled
        fresh, versions = rollout.drawn_at == rollout.step, [version for version, _ in self.versions(rollout)]
        policy = fingerprint(self.sampler.model) if fresh else self.fingerprints[rollout.drawn_at]
        of_draws = self._check_fresh(rollout, self.sampler.identity_floor(floor)) if fresh else []  # else looked at when it was played
        counted = Counter(sequence.ids for trajectory, counts in zip(every, rollout.counted_N, strict=True) if counts
                          for sequence in trajectory.sequences)
        flat = [reward for group in rollout.rewards for reward in group]
        return [check_version(versions, version_name(rollout.drawn_at, policy)),
                check_every_turn(sampled, every),
                check_token_law(rollout.batch, sampled, counted, stop_ids=self.sampler.engine.stop_ids, cap=config.max_completion_length),
                check_trajectory_weights(rollout.batch, every, rollout.counted_N, config.normalisation, self.cap),
                check_episode_rewards(every, flat, rollout.played.given),
                check_episode_ends(every, rollout.played.over, config.max_turns),
                check_episode_figures(self.measure(rollout), every),
                check_kinds(self.environment.counts.dropped, self.environment.counts.played, config.reward_errors),
                *of_draws, *self.sampler.verdicts(),
                check_planned_prompts(self.due_prompts(rollout), self.train_ids, seed=config.seed,
                                      rollout=rollout.step // config.num_iterations),
                check_none_held_out({task.id: (task.content, task.text) for task in rollout.tasks}, self.held_out),
                check_advantages(rollout.rewards, rollout.advantages, config.scale_rewards, config.advantage_estimator),
                check_counted(rollout.counted_N, [trajectory.reward is not None for trajectory in every],
                              ["length" if was_cut(trajectory) else "stop" for trajectory in every],
                              mask_truncated=config.mask_truncated_completions)]

    def due_prompts(self, rollout: EpisodeRollout) -> list[str]:
        return [task.id for task in rollout.tasks]

    def prompts_digest(self, rollout: EpisodeRollout) -> str:
        """Digest of a rollout's tasks, written down with the step, so that all sessions together can be compared with the plan."""
        return ids_digest(((*self.due_prompts(rollout),),))

    def _check_fresh(self, rollout: EpisodeRollout, floor: LogprobFloor) -> list[Verdict]:
        part, some = self._compared(rollout.trajectories, rollout.rows)
        trainer = self.trainer_logprobs(part)
        return self._check_draws(rollout.played, some, of_turns(trainer, some), self.model, floor)

    def check_drawn(self, played: PlayedEpisodes, floor: LogprobFloor) -> list[Verdict]:
        """Check episodes that were played ahead, with the sampler's copy of the weights that played them, before it takes up others."""
        every, policy = [trajectory for group in played.groups for trajectory in group], self.sampler.engine.weights.model
        if not any(each.turns for each in every):
            return []  # no episode could begin: there is nothing to learn from, and that stops the run
        rows = episode_batch(every, [0.0] * len(every), [bool(each.turns) for each in every], self.config.normalisation, cap=self.cap)
        part, some = self._compared(every, rows)
        with uncompiled():
            found = batch_logprobs(policy, part, self.asked.temperature, Layout(COMPARED), entropy=self.asked.wants_entropy)
        return self._check_draws(played, some, of_turns(found, some), policy, floor)

    def _compared(self, trajectories: Sequence[Trajectory], batch: Batch) -> tuple[Batch, list[EpisodeRow]]:
        """Sequences to compare, spread over the rollout, as rows of the batch and as they were sampled."""
        rows = episode_rows(trajectories)
        chosen = sorted({round(place * (len(rows) - 1) / (COMPARED - 1)) for place in range(COMPARED)})
        part = Batch(**{name: stream[chosen] for name, stream in batch.streams().items()})  # type: ignore[arg-type]
        return part, [rows[place] for place in chosen]

    def _check_draws(self, played: PlayedEpisodes, some: Sequence[EpisodeRow], trainer: Sequence[Sequence[float]], model: Transformer,
                     floor: LogprobFloor) -> list[Verdict]:
        """`model` gives the turns of some sequences the probabilities that they were sampled with; and whether tokens look drawn from
        the stated distribution, over all rollouts of this process."""
        self.looks += 1
        self.siblings.add(completions_by_task(played))
        identity = check_identity([turn.logprobs for row in some for turn in row.sequence.turns], trainer, self.floors.over(floor),
                                  lambda: naive_logprobs(model, *turns_of(some), self.asked.temperature),
                                  anew=lambda worst: self.floors.measure(model, *turns_of(some), self.asked.temperature, worst))
        sampled = played.sampled
        with uncompiled():  # every length would be compiled anew
            some_turns = sampled[:: max(1, -(-len(sampled) // RESCORED_A_ROLLOUT))]
            self.draws += rescored_together(model, [(prompt, said.ids) for prompt, said in some_turns], self.sampling)
        return [identity, judge_draws(self.draws, self.sampling, self.looks), self.siblings.check()]

    def sampled_logprobs(self, rollout: EpisodeRollout) -> Tensor:
        """(B, T): of every sampled token of the rows, what the sampler wrote down."""
        found = torch.zeros(rollout.rows.tokens.shape)
        for row, each in enumerate(episode_rows(rollout.trajectories)):
            found[row, : len(each.sequence)] = torch.tensor(each.sequence.logprobs)
        return found

    def advantage_of_rows(self, rollout: EpisodeRollout) -> Tensor:
        """(B, 1): of every row, that of the trajectory that it belongs to."""
        values = rollout.advantages.values_PG.flatten()
        return torch.tensor([values[row.trajectory] for row in episode_rows(rollout.trajectories)], dtype=torch.float32)[:, None]

    def versions(self, rollout: EpisodeRollout) -> list[tuple[str, int]]:
        """Weight version of every turn, with its number of tokens."""
        return [(turn.completion.version, len(turn.completion.ids)) for turn in rollout.played.sampled]

    def trainer_logprobs(self, batch: Batch) -> Tensor:
        return batch_logprobs(self.model, batch, self.asked.temperature, self.layout, entropy=self.asked.wants_entropy, score=self._score)

    def measure(self, rollout: EpisodeRollout) -> dict[str, float]:
        """Metrics of a rollout. Asked for while a GPU is learning from it, they cost no time."""
        every = rollout.trajectories
        found = rollout_metrics(as_completions(rollout), rollout.rewards, rollout.advantages) | self.sampler.metrics()
        found |= {"episodes/turns": float(np.mean([len(each.turns) for each in every])),
                  "episodes/sequences": float(np.mean([len(each.sequences) for each in every])),
                  "episodes/calls": float(np.mean([each.calls for each in every])),
                  "episodes/faults": float(np.mean([each.faults for each in every])),
                  "episodes/with_tools": float(np.mean([each.with_tools for each in every])),
                  "episodes/done": float(np.mean([each.ended == "done" for each in every]))}
        for kind in ("with tools", "without tools"):
            mine, name = [each for each in every if kind_of(each) == kind], kind.replace(" ", "_")
            found |= {f"episodes/dropped_{name}": float(sum(each.error is not None for each in mine)),
                      f"episodes/replayed_{name}": float(sum(each.replayed for each in mine))}
        return found

    def keep_samples(self, rollout: EpisodeRollout) -> None:
        """Write some of the episodes, spread over the rollout, with all that says where they came from and what they were worth."""
        values = rollout.advantages.values_PG.flatten().tolist()
        pairs = list(zip(rollout.trajectories, values, [task for task in rollout.tasks for _ in range(self.config.num_generations)],
                         strict=True))
        append_json_rows(self.file, (plain({
            "step": rollout.step, "prompt_id": each.task, "prompt": task.text, "ids": [list(sequence.ids) for sequence in each.sequences],
            "text": conversation_text(each), "ended": each.ended, "reward": each.reward, "rewards": {"steps": list(each.rewards)},
            "error": each.error, "advantage": advantage, "version": next(iter(each.versions), ""), "messages": list(each.messages),
            "kind": kind_of(each), "address": [self.config.seed, "sample", *address(rollout.step), each.task, each.member]})
            for each, advantage, task in pairs[:: max(1, -(-len(pairs) // max(1, self.config.samples)))]))

    # ---------------------------------------------------------------- before the first step

    @torch.no_grad()
    def draw_for_preflight(self, step: int) -> tuple[Batch, Drawn]:
        """Episodes that are not learned from, as rows of their own, each with an advantage of its own so that every tensor gets a
        gradient; and the first turn of each."""
        config = self.config
        tasks = self.order.drawn(min(step // config.num_iterations, self.order.rollouts - 1))
        self.sampler.load(step)
        played = self.environment.play(self.sampler, tasks, self.sampling, ("rehearsal",), config.num_generations)
        begun = [(task, trajectory) for task, group in zip(tasks, played.groups, strict=True) for trajectory in group if trajectory.turns]
        if not begun:
            raise GuardStop(f"none of {len(tasks) * config.num_generations} episodes could begin: {played.groups[0][0].error}")
        self.rehearsed = [replace(trajectory, sequences=trajectory.sequences[:1]) for _, trajectory in begun]
        values = [(1 + 0.1 * (row % 10)) * (-1) ** row for row in range(len(begun))]
        batch = episode_batch(self.rehearsed, values, [True] * len(begun), config.normalisation, cap=self.cap)
        drawn = [(task, Completion(turn.ids, turn.logprobs, "stop", turn.version)) for task, trajectory in begun
                 for turn in trajectory.turns[:1]]
        return replace(batch, reference=batch.behaviour), drawn

    def preflight(self, objective: Objective, batch: Batch) -> list[Verdict]:
        """Preflight of episodes, beyond what is asked of completions. `batch` is that of `draw_for_preflight`, on its device."""
        inserted = check_inserted(self.model, objective, batch, episode_rows(self.rehearsed), self.config.temperature)
        return [*self.sampler.verdicts(), *inserted]


def check_inserted(model: Transformer, objective: Objective, batch: Batch, rows: Sequence[EpisodeRow], temperature: float) -> list[Verdict]:
    """Check that what was inserted is not learned from, and that other words there change nothing: by the gradients of the sequences of
    most turns."""
    counts = batch.weight.any(1).tolist()
    order = sorted(range(len(rows)), key=lambda row: (not counts[row], -len(rows[row].sequence.turns)))[:PREFLIGHT_SEQUENCES]
    part = Batch(**{name: stream[order].cpu() for name, stream in batch.streams().items()})  # type: ignore[arg-type]
    part, mask = part.to(model.embed.weight.device), sampled_mask([rows[row] for row in order], part.tokens.shape[1])
    return [check_inserted_tokens(model, objective, part, mask), check_inserted_ids(model, objective, part, mask, temperature)]


def counted_trajectories(trajectories: Sequence[Trajectory], *, mask_truncated: bool) -> list[bool]:
    """Mask of the trajectories that are learned from: those whose reward is known and, where asked, that hit no cap."""
    found = [trajectory.reward is not None and bool(trajectory.turns) and not (mask_truncated and was_cut(trajectory))
             for trajectory in trajectories]
    if not any(found):
        errors = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
        raise GuardStop(f"of {len(found)} episodes {len(errors)} ended with an error and the others hit a cap: nothing is left to learn "
                        f"from. {errors[0] if errors else 'Raise --max-turns, --max-completion-length or --max-episode-length'}")
    return found


def as_completions(rollout: EpisodeRollout) -> list[list[Completion]]:
    """Each trajectory as all that was sampled in it, for what is measured of completions."""
    return completions_by_task(rollout.played)


def completions_by_task(played: PlayedEpisodes) -> list[list[Completion]]:
    return [[Completion(tuple(chain.from_iterable(turn.ids for turn in each.turns)),
                        tuple(chain.from_iterable(turn.logprobs for turn in each.turns)), "length" if was_cut(each) else "stop",
                        next(iter(each.versions), "")) for each in group]
            for group in played.groups]


def turns_of(rows: Sequence[EpisodeRow]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Prompts and turns of some rows: what stands before each turn, and the turn."""
    before, said = [], []
    for row in rows:
        ids, begin = row.sequence.ids, 0
        for piece in row.sequence.pieces:
            if piece.source == "policy":
                before.append(ids[:begin])
                said.append(piece.ids)
            begin += len(piece.ids)
    return before, said


def conversation_text(trajectory: Trajectory) -> str:
    """Text of a trajectory after the task."""
    first = next((place for place, message in enumerate(trajectory.messages) if message["role"] == "assistant"), 0)
    return "\n".join(f"[{message['role']}] {message['content']}" for message in trajectory.messages[first:])

"""Tasks of an environment as the data and the rewards of reinforcement: drawn by their seeds, split, played, and audited before step 1.

It stands where `Rewards` does for prompts: what it is asked is whether a task is solved, and its answer is the environment's own.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from assay.agents.environment_pool import EnvironmentPool
from assay.agents.episodes import EpisodeTask, PlayedEpisodes, TurnLimits, play_episodes, play_solution
from assay.agents.tool_calls import ToolCall
from assay.agents.trajectory import Trajectory
from assay.agents.transcript import ChatWriter, Transcript
from assay.data.packing import hold_out
from assay.errors import GuardStop, UsageError
from assay.generate.generation_request import Completion, Sampling
from assay.guard.trajectory_checks import check_tool_format
from assay.model.tokenizer import Tokenizer, equal_but_for_blanks
from assay.recipes.grpo_options import Grpo
from assay.recipes.prompts import Prompt, PromptData, PromptOrder, prompts_digest
from assay.recipes.rewards import HELD_OUT_ADDRESS, Answered, known_means
from assay.recipes.rollouts import Sampler
from assay.recipes.starting_model import StartingModel
from assay.reward.worker_pool import ErrorLimit, ScoredItem
from assay.statistics.effects import paired_effect
from assay.strict_json import parse_json
from assay.verdict import Verdict, proven, refuted, unproven

TASKS_SOLVED = 8  # tasks whose solution is played before a run
SAID_BEFORE = "the ninth of them is 5081"  # that an earlier turn said
MOST_BY_CHANCE = 0.2  # p above which a solution that earns more than silence may be chance: of 8 tasks, a game's luck included
ANSWER_TOKENS = 256  # of room for what an environment says to a turn, at least
ASKED_AT_ONCE = 256  # tasks that are begun together while they are listed


class MetricName(NamedTuple):
    name: str


@dataclass(frozen=True)
class EpisodeCounts:
    """Episodes of one kind (with tools, without): all that were played, those without a reward, and those that were played again."""

    played: Counter[str]
    dropped: Counter[str]
    replayed: Counter[str]


class EnvironmentTasks:
    """The environment of a run, in worker processes. `counts` are of all episodes that were to be learned from."""

    judge = None
    rules = ()
    metric = MetricName("reward")

    def __init__(self, config: Grpo, start: StartingModel):
        assert config.environment is not None
        self.config, self.context = config, start.model.config.max_length
        self.pool = EnvironmentPool(config.environment, read_options(config.environment_options), count=config.reward_workers,
                                    seconds=config.reward_seconds)
        self.writer = ChatWriter(start.tokenizer, self.pool.tools, config.tool_format)
        self.limit = ErrorLimit(config.reward_errors)
        self.counts = EpisodeCounts(Counter(), Counter(), Counter())

    def __enter__(self) -> "EnvironmentTasks":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.__exit__()

    # ---------------------------------------------------------------- tasks

    def split(self) -> PromptData:
        """Tasks split into training and held-out ones: every seed's task, those that say the same once; which are held out is decided by
        what they say."""
        config, tasks = self.config, self._tasks()
        room = self.context - config.max_completion_length
        train, held_out = ([task for task in some if len(task.ids) <= min(room, config.max_prompt_length or room)]
                           for some in hold_out(tasks, config.held_out, config.seed))
        if len(held_out) < 2:
            raise UsageError(f"{len(held_out)} tasks of {config.environment} are held out, so nothing could be said about the result: "
                             "raise --tasks or --held-out")
        order = PromptOrder(train, config.seed, config.prompts, config.num_train_epochs)
        return PromptData(train, held_out, len(tasks) - len(train) - len(held_out), order, config.num_iterations,
                          self.writer.tokenizer.digest)

    def _tasks(self) -> list[Prompt]:
        found: dict[str, Prompt] = {}
        for first in range(0, self.config.tasks, ASKED_AT_ONCE):
            seeds = {f"task {seed}": seed for seed in range(first, min(first + ASKED_AT_ONCE, self.config.tasks))}
            opened = self.pool.open(seeds)
            self.pool.close(seeds)
            if failed := [(name, reply.error) for name, reply in opened.items() if reply.error is not None]:
                raise GuardStop(f"--environment {self.config.environment}: {failed[0][0]} cannot begin: {failed[0][1]}")
            written = self.writer.first([opened[name].messages for name in seeds])
            for seed, (pieces, text) in zip(seeds.values(), written, strict=True):
                digest = hashlib.sha256(text.encode()).hexdigest()[:16]
                ids = tuple(token for piece in pieces for token in piece.ids)
                found.setdefault(digest, Prompt(f"{self.config.environment}:{seed}:{digest}", ids, text, {"seed": seed}))
        if len(found) < 4:
            raise UsageError(f"--environment {self.config.environment}: {self.config.tasks} seeds begin with {len(found)} different texts; "
                             "have reset(seed) say what differs, or give more --tasks")
        return list(found.values())

    def longest(self, prompts: PromptData) -> int:
        """Tokens of an episode with everything in it."""
        config = self.config
        usual = prompts.longest + config.max_turns * (config.max_completion_length + max(config.max_completion_length, ANSWER_TOKENS))
        return min(self.context, config.max_episode_length or usual)

    # ---------------------------------------------------------------- episodes

    def play(self, sampler: Sampler, tasks: Sequence[Prompt], sampling: Sampling, address: tuple[str | int, ...],
             group: int) -> PlayedEpisodes:
        given = [EpisodeTask(task.id, task.row["seed"], task.ids) for task in tasks]
        return play_episodes(sampler.engine, self.pool, self.writer, given, sampling, address, group,
                             TurnLimits(self.config.max_turns, sampler.engine.length))

    def count(self, trajectories: Sequence[Trajectory]) -> None:
        """Count episodes and errors by kind; where too many of all episodes so far had errors, the run stops."""
        for trajectory in trajectories:
            kind = kind_of(trajectory)
            self.counts.played[kind] += 1
            self.counts.dropped[kind] += trajectory.error is not None
            self.counts.replayed[kind] += trajectory.replayed
        self.stop_at_limit([scored_episode(trajectory) for trajectory in trajectories])

    def answer(self, sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling, samples: int) -> Answered:
        """Rewards of the sampler's weights, as they were loaded, in held-out tasks. The draws have the same addresses each time."""
        played = self.play(sampler, prompts, sampling, HELD_OUT_ADDRESS, samples)
        every = [trajectory for group in played.groups for trajectory in group]
        scored = [scored_episode(trajectory) for trajectory in every]
        self.stop_at_limit(scored)
        cut = np.array([np.mean([was_cut(trajectory) for trajectory in group]) for group in played.groups])
        return Answered(known_means(prompts, [each.value for each in scored], scored, samples), None, prompts_digest(prompts), cut)

    def stop_at_limit(self, scored: Sequence[ScoredItem]) -> None:
        self.limit.feed(scored)

    # ---------------------------------------------------------------- what is said of it

    def facts(self) -> dict[str, Any]:
        return {"environment": self.identity}

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self.config.environment, "options": read_options(self.config.environment_options),
                "tools": hashlib.sha256(json.dumps(self.pool.tools, sort_keys=True).encode()).hexdigest(),
                "tool_format": self.writer.format.name}

    def check_same(self, recorded: Mapping[str, Any]) -> list[Verdict]:
        if recorded["environment"] == self.identity:
            return []
        return [refuted("same data", f"the environment is {self.identity} now, the run began with {recorded['environment']}; give that "
                                     "back, or begin a new run")]

    def audit(self, prompts: PromptData, tokenizer: Tokenizer) -> list[Verdict]:
        """A failure comes back as an error, the same seed is the same task twice, calls are read as the model's template writes them, and
        solving a task pays more than saying nothing."""
        some = prompts.train[:: max(1, len(prompts.train) // TASKS_SOLVED)][:TASKS_SOLVED]
        of_tools = [check_tool_format(tokenizer, self.writer.format)] if self.pool.tools else []
        return [check_failures(self.pool), check_environment_repeats(self.pool, [task.row["seed"] for task in some]), *of_tools,
                self._check_solutions(some), check_history(self.writer)]

    def _check_solutions(self, tasks: Sequence[Prompt]) -> Verdict:
        solved, silent = list[float](), list[float]()
        for task in tasks:
            self.pool.open({"solved": task.row["seed"]})
            turns = [turn if isinstance(turn, str) else self.writer.format.write("", [ToolCall(**turn)])
                     for turn in self.pool.solutions(["solved"])["solved"]]
            self.pool.close(["solved"])
            if not turns:
                return unproven("environment_reward", f"{self.config.environment} has no solution(): nothing shows that solving a task "
                                "pays", optional=True)
            for said, rewards in ((turns, solved), ([""] * len(turns), silent)):
                reply = play_solution(self.pool, self.writer, task.row["seed"], said, "played")
                if reply.error is not None:
                    return refuted("environment_reward", f"seed {task.row['seed']}: its {'solution' if said is turns else 'silence'} ends "
                                   f"with an error: {reply.error}")
                rewards.append(reply.reward)
        effect = paired_effect(np.array(solved), np.array(silent))
        words = f"solutions earn {np.mean(solved):.3g} on average, saying nothing {np.mean(silent):.3g} ({len(solved)} tasks)"
        if not (effect.mean > 0 and effect.p < MOST_BY_CHANCE):
            return refuted("environment_reward", f"{words}: what is wanted does not pay", solved=float(np.mean(solved)))
        return proven("environment_reward", words, solved=float(np.mean(solved)), silent=float(np.mean(silent)))


def check_history(writer: ChatWriter) -> Verdict:
    """A conversation of two turns goes on as the chat template writes it, and what the policy said in the first stands in it: plain words,
    in which no tool is called, not even wrongly."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    answer: list[dict[str, Any]] = [{"role": "user", "content": "!"}]
    ids = tuple(writer.tokenizer.encode(SAID_BEFORE))
    said = Completion(ids, (0.0,) * len(ids), "length", "", SAID_BEFORE)
    message = writer.turn(said, "canary")
    if message.get("tool_calls") or message.get("faults"):
        return refuted("history", f"a turn that says {SAID_BEFORE!r} is read as {str(message)[:200]}: plain words are taken for tool calls")
    transcript = Transcript(writer.first([asked])[0][0], asked)
    begun = writer.tokenizer.decode(transcript.prompt)
    transcript.say(said, message)
    if (why := writer.insert([(transcript, answer)])[0]) is not None:
        return unproven("history", f"the chat template does not take a second turn: {why}", optional=True)
    text = writer.tokenizer.decode(transcript.prompt)
    found = [begun, text]
    due = found if writer.tokenizer.template is None else writer.rendered([asked, [*asked, message, *answer]])
    if SAID_BEFORE not in text or not all(map(equal_but_for_blanks, found, due)):
        return refuted("history", f"after a turn that said {SAID_BEFORE!r} the next one is sampled after {text[-200:]!r}, and the chat "
                                  f"template writes {due[-1][-200:]!r}: the policy does not see what it has said, or not as its template "
                                  "has it")
    return proven("history", "a second turn is sampled after what was said in the first, as the chat template writes it")


def kind_of(trajectory: Trajectory) -> str:
    return "with tools" if trajectory.with_tools else "without tools"


def was_cut(trajectory: Trajectory) -> bool:
    """Whether an episode hit a cap: of its turns, of a turn's tokens, or of the episode's."""
    return trajectory.ended in ("turns", "length") or any(turn.ended == "length" for turn in trajectory.turns)


def scored_episode(trajectory: Trajectory) -> ScoredItem:
    """An error row where the episode had an error: its reward is unknown, and never 0."""
    return ScoredItem(trajectory.reward, trajectory.error, {"reward": trajectory.reward})


def read_options(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, the value as JSON where it is some, else as text."""
    found = {}
    for each in given:
        key, mark, value = each.partition("=")
        if not mark or not key.isidentifier():
            raise UsageError(f"--environment-options {each!r}; expected KEY=VALUE, as in largest=99")
        try:
            found[key] = parse_json(value, where=key, error=UsageError)
        except UsageError:
            found[key] = value
    return found


def check_failures(pool: EnvironmentPool) -> Verdict:
    """A step that raises, through the very path of every step."""
    reply = pool.drill()
    if reply.error is None:
        return refuted("environment_errors", f"a step that raised came back with a reward of {reply.reward:g}: an error is no reward")
    return proven("environment_errors", f"a step that raises is an error row ({reply.error})")


def check_environment_repeats(pool: EnvironmentPool, seeds: Sequence[int]) -> Verdict:
    """Check that an environment repeats itself: the same seeds twice, and the same turn in each."""
    seen = []
    for time in ("once", "twice"):
        names = {f"{time} {seed}": seed for seed in seeds}
        opened, replies = pool.open(names), pool.step({name: {"role": "assistant", "content": "?"} for name in names})
        pool.close(names)
        seen.append([(reply.messages, reply.reward, reply.done, reply.error) for part in (opened, replies) for reply in part.values()])
    others = sum(one != two for one, two in zip(*seen, strict=True))
    if others:
        return unproven("repeatable", f"{others} of {len(seen[0])} answers of the environment differ when the same seed is played twice: "
                        "the run goes on, but no two are bit for bit the same", optional=True, others=others)
    return proven("repeatable", f"{len(seeds)} tasks, played twice, answer the same")

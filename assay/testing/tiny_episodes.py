"""Tiny rollout of episodes with a template that may rewrite history, with every check that watches trajectories.

Each stage is a function of this module, so that a fault can take its place: what an environment answers, what is inserted, assembled
and rewarded.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from assay.agents.environment_pool import EnvironmentPool
from assay.agents.episodes import EpisodeTask, PlayedEpisodes, TurnLimits, play_episodes
from assay.agents.tool_calls import HERMES
from assay.agents.trajectory import Trajectory
from assay.agents.transcript import ChatWriter
from assay.data.batch import Batch
from assay.generate.engine import Engine
from assay.generate.generation_request import Sampling
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import check_version, version_name
from assay.guard.trajectory_checks import (
    check_episode_ends,
    check_episode_rewards,
    check_every_turn,
    check_inserted_ids,
    check_inserted_tokens,
    check_kinds,
    check_token_law,
    check_tool_format,
    check_trajectory_weights,
)
from assay.learn.advantage import group_advantages
from assay.learn.policy import Surrogate, policy_gradient
from assay.model.tokenizer import Tokenizer
from assay.recipes.environment_tasks import kind_of
from assay.recipes.episode_batch import episode_batch, episode_rows, sampled_mask
from assay.testing.echo_environment import TURNS
from assay.testing.fault_injection import Plant
from assay.testing.tiny_models import tiny_model, tiny_tokenizer
from assay.verdict import Verdict

TASKS, MEMBERS, TURN_TOKENS, CONTEXT = 3, 4, 6, 250
ECHO = "assay.testing.echo_environment:Echo"
# Earlier turns are written in brackets where they are long: whoever reads them again sees another text than was said.
REWRITING_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ "[%s]" % message.content if message.role == "assistant" and message.content | length > 3 else message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""


def an_episode_rollout(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return run_episodes()


def run_episodes(template: str = REWRITING_TEMPLATE) -> list[Verdict]:
    """Verdicts on one rollout of episodes."""
    model, tokenizer = tiny_model(seed=0), templated(template)
    version = version_name(0, fingerprint(model))
    engine = Engine(model, slots=TASKS * MEMBERS, length=CONTEXT, stop_ids=TURN_STOPS, version=version, tokenizer=tokenizer)
    with EnvironmentPool(ECHO, {}, count=1, seconds=20) as pool:
        writer = ChatWriter(tokenizer, ())
        opened = pool.open({f"task {seed}": seed for seed in range(TASKS)})
        pool.close(opened)
        prompts = writer.first([reply.messages for reply in opened.values()])
        tasks = [EpisodeTask(f"echo:{seed}", seed, tuple(token for piece in pieces for token in piece.ids))
                 for seed, (pieces, _) in enumerate(prompts)]
        played = as_played(play_episodes(engine, pool, writer, tasks, Sampling(max_new=TURN_TOKENS, seed=0), ("zoo",), MEMBERS,
                                         TurnLimits(TURNS, CONTEXT)))
    trajectories = kept_trajectories([trajectory for group in played.groups for trajectory in group])
    rewards = [[rewarded(trajectory) for trajectory in group] for group in by_task(trajectories)]
    advantages, counted = group_advantages(rewards), [trajectory.error is None for trajectory in trajectories]
    batch = assembled(trajectories, advantages.values_PG.flatten().tolist(), counted)
    mask = sampled_mask(episode_rows(trajectories), batch.tokens.shape[1])
    sequences = Counter(sequence.ids for trajectory in trajectories if trajectory.error is None for sequence in trajectory.sequences)
    every = Counter(kind_of(each) for group in played.groups for each in group)
    dropped = every - Counter(kind_of(each) for each in trajectories if each.error is None)
    shown, objective = replace(batch, reference=batch.behaviour), policy_gradient(Surrogate())
    return [check_version([turn.completion.version for turn in played.sampled], version_name(0, fingerprint(model))),
            check_every_turn(played.sampled, trajectories),
            check_token_law(batch, played.sampled, sequences, stop_ids=TURN_STOPS, cap=TURN_TOKENS),
            check_trajectory_weights(batch, trajectories, counted, "sequence", TURNS * TURN_TOKENS),
            check_episode_rewards(trajectories, [reward for group in rewards for reward in group], played.given),
            check_episode_ends(trajectories, played.over, TURNS), check_kinds(dropped, every, 0.05),
            check_inserted_tokens(model, objective, shown, mask),
            check_inserted_ids(model, objective, shown, mask, 1.0), check_tool_format(templated(tool_template()), HERMES)]


TURN_STOPS = tuple(range(250, 258))


def templated(template: str) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    return Tokenizer(tokenizer.document, tokenizer.settings, {"default": template})

# ---------------------------------------------------------------- the stages


def tool_template() -> str:
    """How the model's chat template writes a call."""
    return ("{% for message in messages %}{{ message.content }}{% for call in message.tool_calls %}<tool_call>"
            "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}{% endfor %}")


def as_played(played: PlayedEpisodes) -> PlayedEpisodes:
    """Episodes on their way from the sampler and the environments to the recipe."""
    return played


def kept_trajectories(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Trajectories that go on; an error is left out later, by its unknown reward."""
    return trajectories


def by_task(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    tasks = list(dict.fromkeys(trajectory.task for trajectory in trajectories))
    return [[trajectory for trajectory in trajectories if trajectory.task == task] for task in tasks]


def rewarded(trajectory: Trajectory) -> float | None:
    return trajectory.reward


def assembled(trajectories: Sequence[Trajectory], advantage_N: Sequence[float], counted_N: Sequence[bool]) -> Batch:
    """Every trajectory counts alike."""
    return episode_batch(trajectories, advantage_N, counted_N, "sequence", cap=TURNS * TURN_TOKENS)


"""A step of reinforcement over episodes: the recipe of `assay grpo --environment`, three turns an episode, and where its time goes.

    python bench/agents.py                                       # SmolLM2-135M, 16 tasks × 8 episodes of three turns of 64 tokens
    python bench/agents.py --model tiny --device cpu --tasks 2 --group 4 --max-new 8 --steps 2 --parts 1

Every turn is as long as it may be and every episode has its three turns: equal work in every step. The environment answers at once
(assay/testing/echo_environment.py), so that what is measured is the path to it and back. `outside the GPU` is the share of a step that is
spent in environments, in writing what they say as tokens, and in the checks of trajectories, each fenced by itself.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from beside import TINY, Clock, aloud, measured, middle, peak_memory, surroundings, train_only, weights, without_proofs
from grpo import Timed, parts_timed, without_stops

from assay.agents.environment_pool import EnvironmentPool
from assay.agents.transcript import ChatWriter
from assay.generate.engine import Engine
from assay.recipes import grpo
from assay.recipes.episode_rollouts import EpisodeCollector
from assay.recipes.grpo_options import Grpo
from assay.recipes.reference import Reference
from assay.recipes.rollouts import Sampler

ENVIRONMENT, TURNS = "assay.testing.echo_environment:Echo", 3
PARTS = {"weights to the sampler": (Sampler, "load"), "sampling": (Engine, "drain"), "environments": (EnvironmentPool, "step"),
         "beginning": (EnvironmentPool, "open"), "writing": (ChatWriter, "insert"), "checks of the rollout": (EpisodeCollector, "check"),
         "reference": (Reference, "logprobs")}
OUTSIDE = ("environments", "beginning", "writing", "checks of the rollout")


def ours(flags: argparse.Namespace, home: Path) -> str:
    clock, made = Clock(flags.warm, 1, flags.device), list[Timed]()
    room = TURNS * (flags.max_new + 64) + 128
    config = Grpo(model=str(weights(flags.model, "float32", home, room)), environment=ENVIRONMENT, tasks=(flags.tasks + 8) * 4,
                  out=str(home / "run"), prompts=flags.tasks, num_generations=flags.group, max_turns=TURNS,
                  max_completion_length=flags.max_new,
                  max_episode_length=room, num_train_epochs=1000, max_steps=flags.warm + flags.steps + flags.parts, warmup_steps=0,
                  learning_rate=Grpo.RATES.whole, save_steps=0, insist=True, eval_prompts=2, num_generations_eval=0,
                  micro_batch_size=flags.micro, device=flags.device)

    def timed(*given: Any, **named: Any) -> Timed:
        made.append(Timed(clock, flags.steps, *given, **named))
        return made[0]

    grpo.load_start = without_stops  # type: ignore[assignment]
    began = time.perf_counter()
    with parts_timed(PARTS, lambda: made[0].timing if made else None):
        trainer = train_only(grpo, config, aloud(flags.verbose), timed)
    seconds = clock.per_step()
    whole, apart = seconds[: flags.steps], seconds[flags.steps :]
    outside = sum(trainer.timing.seconds.get(name, 0.0) for name in OUTSIDE) / sum(apart)
    return (f"{middle([60 / each for each in whole])} steps a minute of {flags.tasks * flags.group} episodes, {outside:.1%} outside the "
            f"GPU, {peak_memory(flags.device)}; {trainer.timing.line(len(apart), sum(apart) / len(apart))}; first step after "
            f"{clock.marks[0] - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help=f"a model, or {TINY}")
    parser.add_argument("--device", default="cuda")
    for name, default in (("tasks", 16), ("group", 8), ("max-new", 64), ("micro", 32), ("warm", 2), ("steps", 10), ("parts", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--verbose", action="store_true")
    flags = parser.parse_args()
    without_proofs()
    with tempfile.TemporaryDirectory() as home:
        lines = measured({"assay, episodes of three turns": lambda: ours(flags, Path(home))}, flags.device)
    print("\n".join([surroundings(flags.device), *lines]))


if __name__ == "__main__":
    main()

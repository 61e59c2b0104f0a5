"""The checks of a rollout of episodes, part by part: processor time of each, on the rollouts of a short `assay grpo --environment`.

    python bench/episode_checks.py                                   # a tiny model on the CPU, 16 tasks × 8 episodes of three turns
    python bench/episode_checks.py --model drawn --device cuda       # random weights of SmolLM2-135M's shape

bench/agents.py says what a whole step takes, beside TRL. Here a step's rollout is judged again and again, and each part has its median in
milliseconds: on a GPU by a fenced clock; on a CPU of the processor, so that what else runs there does not count. `insert` is the writing of
what environments say, of a whole rollout; `passes` are those through the model, which a GPU waits for where they are not captured.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agents import ENVIRONMENT, TURNS, model_folder, room
from beside import Enough, aloud, fence, surroundings, without_proofs
from grpo import without_stops

from assay.agents.transcript import ChatWriter
from assay.model.transformer import Transformer
from assay.recipes import episode_rollouts, grpo
from assay.recipes.episode_rollouts import EpisodeCollector
from assay.recipes.grpo_options import Grpo

PARTS = ("fingerprint", "check_version", "check_every_turn", "check_token_law", "check_trajectory_weights", "check_episode_rewards",
         "check_kinds", "check_identity", "judge_draws", "check_planned_prompts", "check_none_held_out", "check_advantages",
         "check_counted")
OWN = ("_check_fresh", "_check_draws", "trainer_logprobs", "_trainer_logprobs")


class Stopwatch:
    """Milliseconds by name, a list each: one entry a rollout, however often it was called."""

    def __init__(self, device: str):
        self.device, self.found, self.now = device, {}, {}

    found: dict[str, list[float]]
    now: dict[str, float]

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            began = self.read()
            made = function(*given, **named)
            self.now[name] = self.now.get(name, 0.0) + 1e3 * (self.read() - began)
            return made

        return wrapped

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            self.now[name] = self.now.get(name, 0.0) + 1
            return function(*given, **named)

        return wrapped

    def read(self) -> float:
        fence(self.device)
        return time.perf_counter() if self.device.startswith("cuda") else time.process_time()

    def rollout_over(self) -> None:
        for name, value in self.now.items():
            self.found.setdefault(name, []).append(value)
        self.now = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    for name, default in (("tasks", 16), ("group", 8), ("max-new", 64), ("micro", 32), ("repeat", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args()
    without_proofs()
    watch = Stopwatch(flags.device)
    with tempfile.TemporaryDirectory() as home:
        measure(flags, Path(home), watch)
    print(surroundings(flags.device))
    print(f"{flags.tasks * flags.group} episodes of {TURNS} turns of {flags.max_new} tokens; median ms of n={flags.repeat} (insert: n=2)")
    for name, values in watch.found.items():
        print(f"{name:26} {statistics.median(values):8.1f}   [{min(values):.1f}, {max(values):.1f}]")


def measure(flags: argparse.Namespace, home: Path, watch: Stopwatch) -> None:
    config = Grpo(model=str(model_folder(flags, home, "float32")), environment=ENVIRONMENT, tasks=(flags.tasks + 8) * 4,
                  out=str(home / "run"), prompts=flags.tasks, num_generations=flags.group, max_turns=TURNS,
                  max_completion_length=flags.max_new, max_episode_length=room(flags), num_train_epochs=1000, max_steps=4,
                  warmup_steps=0, learning_rate=Grpo.RATES.whole,
                  save_steps=0, insist=True, eval_prompts=2, num_generations_eval=0, micro_batch_size=flags.micro, device=flags.device)
    usual, taken = EpisodeCollector.check, list[int]()

    def judged_often(collector: EpisodeCollector, rollout: Any, *more: Any) -> Any:
        watch.rollout_over()  # of `insert`
        taken.append(rollout.step)
        if len(taken) < 2:  # the first compiles, and captures graphs
            return usual(collector, rollout, *more)
        for name in PARTS:
            setattr(episode_rollouts, name, watch.around(name, getattr(episode_rollouts, name)))
        for name in OWN:
            if hasattr(collector, name):
                setattr(collector, name, watch.around(name, getattr(collector, name)))
        hidden = Transformer.hidden
        Transformer.hidden = watch.counted("passes", hidden)  # type: ignore[method-assign]
        for _ in range(flags.repeat):
            watch.around("all of them", usual)(collector, rollout, *more)
            watch.rollout_over()
        Transformer.hidden = hidden  # type: ignore[method-assign]
        raise Enough

    EpisodeCollector.check = judged_often  # type: ignore[method-assign, assignment]
    ChatWriter.insert = watch.around("insert", ChatWriter.insert)  # type: ignore[method-assign]
    grpo.load_start = without_stops  # type: ignore[assignment]
    with contextlib.suppress(Enough):
        grpo.grpo(config, aloud(False))


if __name__ == "__main__":
    main()

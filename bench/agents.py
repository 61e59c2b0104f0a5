"""A step of reinforcement over episodes of three turns: `assay grpo --environment` beside TRL's GRPOTrainer with a `rollout_func`.

    python bench/agents.py                                       # SmolLM2-135M, 16 tasks × 8 episodes of three turns of 64 tokens
    python bench/agents.py --model drawn --max-staleness 1       # random weights of its shape: nothing is fetched; a row one step off
    python bench/agents.py --model tiny --device cpu --tasks 2 --group 4 --max-new 8 --steps 2 --parts 1 --peer-steps 1

Every turn is as long as it may be and every episode has its three turns: equal work in every step. The environment answers at once
(assay/testing/echo_environment.py), so that what is measured is the path to it and back. `outside the GPU` is the share of a step that is
spent in environments, in writing what they say as tokens, and in the checks of trajectories, each fenced by itself.

TRL samples by transformers' generate, turn by turn, with the same number of tokens a turn, and computes every turn from the beginning of
its episode; the environment is called in its own process. Tasks, group, KL (k3, 0.01), loss (token-level, clip 0.2) and learning rate
are the same; it keeps fewer checks, and nothing of ours is left out but the proofs. `environment_factory`, TRL's other path of several
turns, goes on only where the model calls a tool, which random or small weights do not: its turns would not be equal work. With
--max-staleness 1 a second row of ours samples while it learns (its parts overlap). `drawn` weights have a made vocabulary of SmolLM2's
size, each token one to three letters.
"""

import argparse
import itertools
import string
import tempfile
import time
from pathlib import Path
from typing import Any

from beside import TINY, Clock, aloud, measured, middle, peak_memory, quiet, surroundings, train_only, weights, without_proofs
from grpo import KL_WEIGHT, Parts, Timed, parts_timed, without_stops
from train import SMOLLM2

from assay.agents.environment_pool import EnvironmentPool
from assay.agents.transcript import ChatWriter
from assay.generate.engine import Engine
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import initialised
from assay.recipes import grpo
from assay.recipes.episode_rollouts import EpisodeCollector
from assay.recipes.grpo_options import Grpo
from assay.recipes.reference import Reference
from assay.recipes.rollouts import Sampler
from assay.testing.echo_environment import Echo
from assay.testing.tiny_models import save_model, tiny_tokenizer

DRAWN = "drawn"
ENVIRONMENT, TURNS = "assay.testing.echo_environment:Echo", 3
PARTS = {"weights to the sampler": (Sampler, "load"), "sampling": (Engine, "drain"), "environments": (EnvironmentPool, "step"),
         "beginning": (EnvironmentPool, "open"), "writing": (ChatWriter, "insert"), "checks of the rollout": (EpisodeCollector, "check"),
         "reference": (Reference, "logprobs")}
OUTSIDE = ("environments", "beginning", "writing", "checks of the rollout")


def room(flags: argparse.Namespace) -> int:
    """Tokens that an episode may have."""
    return TURNS * (flags.max_new + 64) + 128


def made_vocabulary(size: int) -> Tokenizer:
    """Bytes, ChatML and as many words of two and three letters as fill it: any id decodes to text."""
    known = len(tiny_tokenizer(words=()).ids)
    pairs = ["".join(letters) for letters in itertools.product(string.ascii_letters, repeat=2)]
    threes = ("".join(letters) for letters in itertools.product(string.ascii_letters, repeat=3))
    return tiny_tokenizer(words=[*pairs, *itertools.islice(threes, size - known - len(pairs))])


def model_folder(flags: argparse.Namespace, home: Path, dtype: str) -> Path:
    """The same weights for both, in the dtype that each takes."""
    if flags.model == DRAWN and not (home / DRAWN).exists():
        save_model(home / DRAWN, initialised(SMOLLM2, 0), tokenizer=made_vocabulary(SMOLLM2.vocab))
    return weights(str(home / DRAWN) if flags.model == DRAWN else flags.model, dtype, home, room(flags))


def ours(flags: argparse.Namespace, home: Path, staleness: int) -> str:
    clock, made = Clock(flags.warm, 1, flags.device), list[Timed]()
    config = Grpo(model=str(model_folder(flags, home, "float32")), environment=ENVIRONMENT, tasks=(flags.tasks + 8) * 4,
                  out=str(home / f"run-{staleness}"), prompts=flags.tasks, num_generations=flags.group, max_turns=TURNS,
                  max_completion_length=flags.max_new,
                  max_episode_length=room(flags), num_train_epochs=1000, max_steps=flags.warm + flags.steps + flags.parts, warmup_steps=0,
                  learning_rate=Grpo.RATES.whole, save_steps=0, insist=True, eval_prompts=2, num_generations_eval=0,
                  micro_batch_size=flags.micro, device=flags.device, beta=KL_WEIGHT, max_staleness=staleness)

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


def theirs(flags: argparse.Namespace, home: Path) -> str:
    import datasets
    import transformers
    import trl

    quiet()
    clock, parts, began = Clock(1, 1, flags.device), Parts(flags.device), time.perf_counter()
    on_gpu, micro = flags.device.startswith("cuda"), min(flags.micro, flags.tasks * flags.group)
    args = trl.GRPOConfig(str(home / "trl"), per_device_train_batch_size=micro, num_generations=flags.group,
                          gradient_accumulation_steps=flags.tasks * flags.group // micro, max_completion_length=flags.max_new,
                          temperature=1.0, beta=KL_WEIGHT, max_steps=1 + flags.peer_steps, learning_rate=Grpo.RATES.whole,
                          lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, logging_steps=10**6, save_strategy="no",
                          report_to=[], disable_tqdm=True, use_cpu=not on_gpu, bf16=on_gpu, gradient_checkpointing=False,
                          generation_kwargs={"min_new_tokens": flags.max_new})

    class Stepped(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print(f"    step {state.global_step}", flush=True)
            if state.global_step == clock.warm:
                parts.begin()
            clock.stepped(state.global_step)

    folder = model_folder(flags, home, "bfloat16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tasks = datasets.Dataset.from_list([{"prompt": Echo().reset(seed)} for seed in range((2 + flags.peer_steps) * flags.tasks)])
    trainer = trl.GRPOTrainer(str(folder), paid, args=args, train_dataset=tasks, processing_class=tokenizer, callbacks=[Stepped()],
                              rollout_func=lambda prompts, trainer: three_turns(prompts, trainer, parts, flags.group))
    trainer._generate_single_turn = parts.timed("sampling", trainer._generate_single_turn)
    trainer.train()
    seconds = clock.per_step()
    outside = sum(parts.seconds.get(name, 0.0) for name in ("environments", "writing")) / sum(seconds)
    return (f"{middle([60 / each for each in seconds])} steps a minute of {flags.tasks * flags.group} episodes, {outside:.1%} outside the "
            f"GPU, {peak_memory(flags.device)}; {parts.line(len(seconds), sum(seconds) / len(seconds))}; first step after "
            f"{clock.marks[0] - began:.0f} s")


def three_turns(prompts: list[Any], trainer: Any, parts: Parts, group: int) -> dict[str, Any]:
    """TRL's `rollout_func`: every episode's turns, what was inserted between them masked."""
    tokenizer, environments = trainer.processing_class, [Echo() for _ in prompts]
    for number, environment in enumerate(environments):
        environment.reset(number)
    first = [tokenizer.encode(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False), add_special_tokens=False)
             for prompt in prompts]
    completions: list[list[int]] = [[] for _ in prompts]
    masks: list[list[int]] = [[] for _ in prompts]
    rewards = [0.0] * len(prompts)

    def answered(said: list[list[int]]) -> list[str]:
        answers = []
        for place, (environment, text) in enumerate(zip(environments, tokenizer.batch_decode(said, skip_special_tokens=True), strict=True)):
            messages, reward, _ = environment.step({"content": text})
            rewards[place] += reward
            answers.append(f"<|im_end|>\n<|im_start|>user\n{messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
        return answers

    def written(said: list[list[int]], answers: list[str], last: bool) -> None:
        for place, (ids, answer) in enumerate(zip(said, answers, strict=True)):
            more = [] if last else tokenizer.encode(answer, add_special_tokens=False)
            completions[place] += [*ids, *more]
            masks[place] += [1] * len(ids) + [0] * len(more)

    for turn in range(TURNS):
        before = [[*begin, *more] for begin, more in zip(first, completions, strict=True)]
        said, _ = trainer._generate_single_turn(before, None, {}, group)
        said = [list(map(int, ids)) for ids in said]
        parts.timed("writing", written)(said, parts.timed("environments", answered)(said), turn == TURNS - 1)
    return {"prompt_ids": first, "completion_ids": completions, "logprobs": None, "env_mask": masks, "episode_reward": rewards}


def paid(prompts: list[Any], completions: list[Any], episode_reward: list[float], **_: Any) -> list[float]:
    return episode_reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help=f"a model, {DRAWN} (random weights of SmolLM2-135M's shape) or {TINY}")
    parser.add_argument("--device", default="cuda")
    for name, default in (("tasks", 16), ("group", 8), ("max-new", 64), ("micro", 32), ("warm", 2), ("steps", 6), ("parts", 2),
                          ("peer-steps", 2), ("max-staleness", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--verbose", action="store_true")
    flags = parser.parse_args()
    without_proofs()
    with tempfile.TemporaryDirectory() as home:
        work = {"assay, episodes of three turns": lambda: ours(flags, Path(home), 0)}
        if flags.max_staleness:
            work["assay, sampling one step ahead"] = lambda: ours(flags, Path(home), flags.max_staleness)
        if not flags.no_peers:
            work["TRL, rollout_func of three turns"] = lambda: theirs(flags, Path(home))
        lines = measured(work, flags.device)
    print("\n".join([surroundings(flags.device), *lines]))


if __name__ == "__main__":
    main()

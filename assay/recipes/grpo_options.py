"""The options of reinforcement learning: what is sampled, how it is rewarded, what is learned from it, how far the policy may go."""

from dataclasses import dataclass
from typing import Literal

from assay.config import option
from assay.recipes.options import Trained


@dataclass(frozen=True, kw_only=True)
class Grpo(Trained):
    """Reinforce what is rewarded, the whole model or a LoRA adapter. An interrupted run in --out goes on where it stopped.

    A step is one update. A rollout draws --group completions of each of --prompts prompts and is learned from --inner times.
    """

    data: tuple[str, ...] = option("prompts with what their rewards need: .jsonl(.gz), .parquet or .csv; answers in it are not learned")
    reward: tuple[str, ...] = option("NAME[OPTION=VALUE]:WEIGHT, as in answer:1 format:0.1, FILE.py:FUNCTION:WEIGHT, or a judge behind "
                                     "an OpenAI-compatible endpoint, judge[model=NAME,url=http://…/v1]:1, its key from the environment")
    metric: str | None = option("what is wanted, on held-out prompts, beside what is rewarded: another reward; the heaviest rule of "
                                "--reward", default=None)
    prompts: int = option("prompts a rollout", default=16)
    group: int = option("completions of each prompt", default=8)
    max_new: int = option("tokens a completion has at most", default=256)
    max_prompt: int | None = option("tokens; longer prompts are dropped and counted (what the context leaves)", least=1, default=None)
    temperature: float = option("of the sampling, and of what is learned", default=1.0)
    gsm8k: Literal["plain", "think"] = option("GSM8K rows: as in assay sft", default="plain")
    held_out: float = option("share of the prompts that is never trained on, by what they say", least=0, below=1, default=0.05)
    held_out_data: str | None = option("score these instead, and hold nothing else out", default=None)
    epochs: int = option("how often the prompts are read, reshuffled each time", least=1, default=1)
    steps: int | None = option("stop after so many updates; otherwise the epochs decide", least=1, default=None)

    ratio: Literal["token", "sequence", "cispo"] = option("PPO's, GSPO's, or CISPO's", default="token")
    epsilon: float = option("how far below 1 a ratio is learned from", above=0, default=0.2)
    epsilon_high: float | None = option("how far above (as far as below)", above=0, default=None)
    normalise: Literal["token", "sequence", "constant"] = option("what counts alike: tokens, completions, or tokens over completions × "
                                                                 "--max-new (Dr. GRPO)", default="token")
    scale: Literal["group", "batch", "none"] = option("advantages in standard deviations of the group, of the batch, or plain",
                                                      default="group")
    kl: Literal["none", "k1", "k2", "k3", "shift"] = option("distance to the reference: in the loss, or as a shift of the advantages",
                                                            default="k3")
    kl_weight: float = option("of that distance", least=0, default=0.01)
    kl_window: int = option("the reference trails by so many steps, from checkpoint to checkpoint; 0: it stays at the fork", default=0)
    entropy_weight: float = option("bonus for entropy", default=0.0)
    entropy_decay: float = option("the bonus is this many times the one of the step before", least=0, default=1.0)
    inner: int = option("updates a rollout", default=1)
    micro: int = option("completions that go through the model at a time; changes nothing but memory", default=32)
    refill: int = option("draw other prompts up to so many times where all of a group get the same reward; 0: never", default=0)
    overlong: int = option("take up to 1 off the reward over the last so many tokens before --max-new; 0: nothing", default=0)
    mask_truncated: bool = option("learn nothing from completions that hit --max-new", default=False)

    lr: float | None = option("peak learning rate (whole model 1e-6, adapter 2e-5)", above=0, default=None)
    schedule: Literal["wsd", "cosine"] = option("flat, and down at the end; or down to a tenth over a cosine", default="wsd")
    warmup: int = option("steps", least=0, default=5)
    decay: float = option("share of the run over which wsd goes down", least=0, most=1, default=0.1)
    checkpoint_every: int = option("steps between checkpoints, the first after step 1; 0: none but the first and the last",
                                   least=0, default=20)
    eval_every: int = option("steps between looks at held-out prompts, each with a checkpoint; 0: as --checkpoint-every",
                             least=0, default=0)
    eval_samples: int = option("completions of each held-out prompt, at --temperature; 0: one, greedy", default=0)
    look_prompts: int = option("held-out prompts a look scores; what is handed over is scored on all", least=2, default=128)
    samples: int = option("completions of each rollout that are kept in RUN/samples.jsonl", default=8)
    reward_errors: float = option("share of completions whose reward may fail before the run stops", least=0, most=1, default=0.05)
    reward_workers: int = option("processes that score", least=1, default=2)
    reward_seconds: float = option("that scoring one completion may take", above=0, default=30.0)
    sampler_device: str | None = option("where to sample, as in cuda:1 (where the trainer is, on its own weights)", default=None)

"""Options of reinforcement learning: what is sampled, how it is rewarded, what is learned from it, how far the policy may go."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from assay.config import option
from assay.recipes.options import LIMIT_HELP, ByForm, Trained

POLICY_RATES = ByForm(whole=1e-6, adapter=2e-5)
NORMALISATIONS: dict[str, Literal["token", "sequence", "constant"]] = {"grpo": "sequence", "dapo": "token", "dr_grpo": "constant",
                                                                       "cispo": "token"}


@dataclass(frozen=True, kw_only=True)
class Grpo(Trained):
    """Reinforce what is rewarded, the whole model or a LoRA adapter. An interrupted run in --out goes on where it stopped.

    A step is one update. A rollout draws --num-generations completions of each of --prompts prompts and is learned from
    --num-iterations times.
    """

    RATES: ClassVar[ByForm] = POLICY_RATES

    data: tuple[str, ...] = option("prompts with what their rewards need: .jsonl(.gz), .parquet or .csv; answers in it are not learned; "
                                   "several as one, or by weight (a.jsonl:0.7 b.jsonl:0.3: shares of the prompts drawn)",
                                   group="data", metavar="FILE", default=(), default_text="none; then give --environment")
    limit: int | None = option(LIMIT_HELP, group="data", least=1, default=None, default_text="all")
    reward: tuple[str, ...] = option("NAME[OPTION=VALUE]:WEIGHT, as in answer:1 format:0.1, FILE.py:FUNCTION:WEIGHT, or a judge behind "
                                     "an OpenAI-compatible endpoint, judge[model=NAME,url=http://…/v1]:1, its key from the environment",
                                     group="rewards", default=(), default_text="none; an environment rewards its own episodes")
    environment: str | None = option("episodes of several turns with tools, in place of --data and --reward: calculator, kv, code, search, "
                                     "game, gym:NAME, openenv:URL, verifiers:NAME, or your own module:Class or file.py:Class",
                                     group="data", metavar="NAME", default=None)
    environment_options: tuple[str, ...] = option("options of the environment, as in largest=99", group="data", metavar="KEY=VALUE",
                                                  default=(), default_text="its own defaults")
    tasks: int = option("seeds of the environment, each a task; --held-out of them are never trained on", group="data", least=4,
                        default=1000)
    max_turns: int = option("the most turns of an episode, each of at most --max-completion-length tokens", group="generation", least=1,
                            default=8)
    max_episode_length: int | None = option("the most tokens of an episode with everything in it; one that fills them ends there",
                                            group="generation", least=2, default=None,
                                            default_text="room for the first messages, all turns, and 256 tokens or a turn's for "
                                                         "each answer")
    tool_format: Literal["hermes", "llama3", "mistral", "gpt_oss"] | None = option(
        "how the model writes tool calls", group="data", default=None, default_text="as its chat template does")
    metric: str | None = option("another reward that says what is wanted on held-out prompts", group="evaluation", metavar="REWARD",
                                default=None, default_text="the heaviest rule of --reward")
    prompts: int = option("prompts in a rollout", group="generation", default=16)
    num_generations: int = option("completions of each prompt", group="generation", default=8)
    max_completion_length: int = option("the most tokens of a completion", group="generation", default=256)
    max_prompt_length: int | None = option("the most tokens of a prompt; longer ones are dropped and counted", group="data", least=1,
                                           default=None, default_text="what the context leaves")
    temperature: float = option("temperature of the sampling, and of the distribution that is learned", group="generation", default=1.0)
    gsm8k: Literal["plain", "think"] = option("GSM8K rows: as in assay sft", group="data", default="plain")
    held_out: float = option("share of the prompts that is never trained on, chosen by what they say", group="evaluation", least=0, below=1,
                             default=0.05)
    held_out_data: str | None = option("score these prompts instead, and hold nothing else out", group="evaluation", metavar="FILE",
                                       default=None)
    num_train_epochs: int = option("how often the prompts are read, reshuffled each time", group="budget", least=1, default=1)
    max_steps: int | None = option("stop after so many updates", group="budget", least=1, default=None, default_text="the epochs decide")

    importance_sampling_level: Literal["token", "sequence"] = option("importance ratio of each token (PPO), or one of each sequence (GSPO)",
                                                                     group="method", default="token")
    epsilon: float = option("how far below 1 a ratio is learned from", group="method", above=0, default=0.2)
    epsilon_high: float | None = option("how far above 1 a ratio is learned from; with cispo the cap on the ratio itself, such as 5",
                                        group="method", above=0, default=None, default_text="as --epsilon; with cispo 1 + epsilon")
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = option(
        "what counts alike: completions (grpo), tokens (dapo), or tokens over completions × --max-completion-length (dr_grpo); cispo is as "
        "dapo, and its ratios are capped and not learned from", group="method", default="dapo")
    advantage_estimator: Literal["grpo", "rloo", "reinforce_pp"] = option(
        "what a completion is compared with: its group (grpo), its siblings alone, unscaled (rloo), or the whole batch (reinforce_pp, "
        "REINFORCE++)", group="method", default="grpo")
    scale_rewards: Literal["group", "batch", "none"] = option("with --advantage-estimator grpo: advantages in standard deviations of the "
                                                              "group, of the batch, or plain", group="method", default="group")
    beta: float = option("weight of the KL to the reference; 0: no reference", group="method", least=0, default=0.01)
    kl_estimator: Literal["k1", "k2", "k3", "shift"] = option("how that KL is measured: an estimator in the loss, or a shift of the "
                                                              "advantages", group="method", default="k3")
    kl_window: int = option("the reference trails by so many steps, from checkpoint to checkpoint; 0: it stays at the fork",
                            group="method", default=0)
    entropy_weight: float = option("weight of a bonus for entropy", group="method", default=0.0)
    entropy_decay: float = option("the bonus is this many times the one of the step before", group="method", least=0, default=1.0)
    num_iterations: int = option("updates on each rollout", group="method", default=1)
    max_staleness: int = option("rollouts that sampling may be ahead of learning: 0 samples, then learns; 1 samples the next rollout while "
                                "this one is learned from, one rollout off the policy, and weighs its tokens by how the policy changed",
                                group="generation", least=0, most=1, default=0)
    importance_sampling_cap: float = option("with --max-staleness 1: the most that a token's importance weight may be", group="method",
                                            least=1, default=2.0)
    micro_batch_size: int = option("completions that go through the model at a time; changes nothing but memory", group="memory",
                                   default=32)
    refill: int = option("draw other prompts up to so many times where all of a group get the same reward; 0: never", group="generation",
                         default=0)
    overlong_buffer: int = option("take up to 1 off the reward over the last so many tokens before --max-completion-length; 0: nothing",
                                  group="rewards",
                                  default=0)
    mask_truncated_completions: bool = option("learn nothing from completions that hit --max-completion-length", group="method",
                                              default=False)

    learning_rate: float | None = option("peak learning rate", group="optimizer", above=0, default=None, default_text=str(POLICY_RATES))
    lr_scheduler_type: Literal["wsd", "cosine"] = option("learning rate after the warm-up: flat and down at the end (wsd), or a cosine "
                                                         "down to a tenth", group="optimizer", default="wsd")
    warmup_steps: int = option("steps in which the learning rate rises", group="optimizer", least=0, default=5)
    decay_ratio: float = option("share of the run over which wsd goes down", group="optimizer", least=0, most=1, default=0.1)
    save_steps: int = option("steps between checkpoints, the first after step 1; 0: only the first and the last",
                             group="checkpoints", least=0, default=20)
    eval_steps: int = option("steps between evaluations on held-out prompts, each with a checkpoint; 0: as --save-steps",
                             group="evaluation", least=0, default=0)
    num_generations_eval: int | None = option("completions of each held-out prompt, at --temperature; 0: one, greedy", group="evaluation",
                                              least=0, default=None, default_text="as many as 5 % of what the run samples pay for; one, "
                                                                                  "greedy, where that is less than two")
    eval_prompts: int | None = option("held-out prompts that an evaluation scores, at most half of them: what is handed over is judged on "
                                      "the others", group="evaluation", least=2, default=None,
                                      default_text="as many as 5 % of what the run samples pay for")
    samples: int = option("completions of each rollout that are kept in RUN/samples.jsonl", group="checkpoints", default=8)
    reward_errors: float = option("share of completions whose reward may fail before the run stops", group="rewards", least=0, most=1,
                                  default=0.05)
    reward_workers: int = option("processes that score", group="rewards", least=1, default=2)
    reward_seconds: float = option("the most seconds that scoring one completion may take", group="rewards", above=0, default=30.0)
    sampler_device: str | None = option("where to sample, as in cuda:1", group="run", metavar="DEVICE", default=None,
                                        default_text="where the trainer is, on its own weights")
    vllm_server_base_url: str | None = option("a server that draws the rollouts, as in http://localhost:8000: vLLM (0.20 or later, with "
                                              "VLLM_SERVER_DEV_MODE=1), or assay serve --rollouts; it reads the weights in --out",
                                              group="run", metavar="URL", default=None, default_text="none, the trainer draws them itself")
    vllm_importance_sampling_correction: bool = option("weigh each token that a server drew by min(trainer's probability / server's, "
                                                       "--vllm-importance-sampling-clip-max); without it the two must be the same",
                                                       group="method", default=True)
    vllm_importance_sampling_clip_max: float = option("the largest of these weights", group="method", least=1, default=3.0)

    @property
    def normalisation(self) -> Literal["token", "sequence", "constant"]:
        """How tokens are weighed: every completion alike, every token alike, or every token over a constant."""
        return NORMALISATIONS[self.loss_type]

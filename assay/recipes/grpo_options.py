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
    """Train a policy by reinforcement with GRPO or a variant of it, the whole model or a LoRA adapter. The same command resumes an
    interrupted run in --out.

    A step is one update. A rollout samples --num-generations completions of each of --prompts prompts, and is trained on
    --num-iterations times.
    """

    RATES: ClassVar[ByForm] = POLICY_RATES

    data: tuple[str, ...] = option("prompts, with the columns that their rewards need: .jsonl(.gz), .parquet or .csv; answers in them are "
                                   "not trained on; several files are read as one or, where each has its share of the prompts "
                                   "(a.jsonl:0.7 b.jsonl:0.3), as a mixture",
                                   group="data", metavar="FILE", default=(), default_text="none; then give --environment")
    limit: int | None = option(LIMIT_HELP, group="data", least=1, default=None, default_text="all")
    reward: tuple[str, ...] = option("rewards with weights: NAME[OPTION=VALUE]:WEIGHT, as in answer:1 format:0.1; your own "
                                     "FILE.py:FUNCTION:WEIGHT; a reward model, model:PATH; or a judge behind an OpenAI-compatible "
                                     "endpoint, judge[model=NAME,url=http://…/v1]:1, whose key is in the environment",
                                     group="rewards", default=(), default_text="none; an environment rewards its own episodes")
    environment: str | None = option("environment of episodes of several turns with tools, instead of --data and --reward: calculator, "
                                     "kv, code, search, game, gym:NAME, openenv:URL, verifiers:NAME, or your own module:Class or "
                                     "file.py:Class",
                                     group="data", metavar="NAME", default=None)
    environment_options: tuple[str, ...] = option("options of the environment, as in largest=99", group="data", metavar="KEY=VALUE",
                                                  default=(), default_text="its own defaults")
    tasks: int = option("number of tasks, one for each seed; the share --held-out of them is never trained on",
                        needs="--environment", group="data", least=4,
                        default=1000)
    max_turns: int = option("the most turns of an episode, each of at most --max-completion-length tokens",
                            needs="--environment", group="generation", least=1,
                            default=8)
    max_episode_length: int | None = option("the most tokens of an episode, prompts and answers included; an episode "
                                            "that reaches it ends",
                                            needs="--environment", group="generation", least=2, default=None,
                                            default_text="room for the first messages and all turns, and for each answer 256 tokens or as "
                                                         "many as a turn")
    tool_format: Literal["qwen3_coder", "hermes", "mistral", "gpt_oss", "llama3"] | None = option(
        "format of the model's tool calls", group="data", default=None, default_text="as its chat template does")
    metric: str | None = option("reward that is evaluated on held-out prompts, and may differ from the trained ones",
                                group="evaluation", metavar="REWARD",
                                default=None, default_text="the rule of --reward with the largest weight")
    prompts: int = option("prompts per rollout", group="generation", default=16)
    num_generations: int = option("completions sampled for each prompt", group="generation", default=8)
    max_completion_length: int = option("the most tokens of a completion", group="generation", default=256)
    max_prompt_length: int | None = option("the most tokens of a prompt; longer ones are dropped and counted", group="data", least=1,
                                           default=None, default_text="what the context leaves")
    temperature: float = option("sampling temperature, and temperature of the trained distribution", group="generation", default=1.0)
    gsm8k: Literal["plain", "think"] = option("GSM8K rows: the answer as it is (plain), or in <think> and <answer> tags (think)",
                                              group="data", default="plain")
    held_out: float = option("share of the prompts that is never trained on, chosen by a hash of their content",
                             group="evaluation", least=0, below=1,
                             default=0.05)
    held_out_data: str | None = option("score these prompts instead, and hold nothing else out", group="evaluation", metavar="FILE",
                                       default=None)
    num_train_epochs: int = option("passes over the prompts, reshuffled each time", group="budget", least=1, default=1)
    max_steps: int | None = option("stop after this many updates", group="budget", least=1, default=None, default_text="the epochs decide")

    importance_sampling_level: Literal["token", "sequence"] = option("importance ratio for each token (PPO), or one for each sequence "
                                                                     "(GSPO)",
                                                                     group="method", default="token")
    epsilon: float = option("lower clip range: importance ratios are clipped at 1 - epsilon, as in PPO",
                            group="method", above=0, default=0.2)
    epsilon_high: float | None = option("upper clip range: importance ratios are clipped at 1 + epsilon-high; with cispo the cap on the "
                                        "ratio itself, such as 5",
                                        group="method", above=0, default=None, default_text="as --epsilon; with cispo 1 + epsilon")
    loss_type: Literal["grpo", "dapo", "dr_grpo", "cispo"] = option(
        "normalisation of the loss: every completion counts alike (grpo), every token counts alike (dapo), or the sum of tokens is "
        "divided by completions × --max-completion-length (dr_grpo); cispo is dapo with capped ratios that have no gradient",
        group="method", default="dapo")
    advantage_estimator: Literal["grpo", "rloo", "reinforce_pp"] = option(
        "what a completion's reward is compared with: its group (grpo), the others of its group, unscaled (rloo), or the whole batch "
        "(reinforce_pp, REINFORCE++)", group="method", default="grpo")
    scale_rewards: Literal["group", "batch", "none"] = option("divide advantages by the standard "
                                                              "deviation of the group, of the batch, or not at all",
                                                              needs="--advantage-estimator grpo", group="method", default="group")
    beta: float = option("weight of the KL to the reference model; 0: no reference", group="method", least=0, default=0.01)
    kl_estimator: Literal["k1", "k2", "k3", "shift"] = option("how the KL enters: as an estimator in the loss (k1, k2, k3), or as a shift "
                                                              "of the advantages", group="method", default="k3")
    kl_window: int = option("let the reference follow the policy this many steps behind, from checkpoint to checkpoint; 0: it stays the "
                            "starting model",
                            group="method", default=0)
    entropy_weight: float = option("weight of an entropy bonus", group="method", default=0.0)
    entropy_decay: float = option("factor by which the entropy bonus is multiplied at every step", group="method", least=0, default=1.0)
    num_iterations: int = option("updates on each rollout", group="method", default=1)
    max_staleness: int = option("0: sample, then train, in turn; 1: sample the next rollout while this one is trained on, so that it is "
                                "one rollout off-policy, and weight its tokens by importance",
                                group="generation", least=0, most=1, default=0)
    importance_sampling_cap: float = option("the largest importance weight of a token", needs="--max-staleness 1", group="method",
                                            least=1, default=2.0)
    micro_batch_size: int = option("completions that go through the model at a time; changes nothing but memory", group="memory",
                                   default=32)
    refill: int = option("where all completions of a group get the same reward, sample other prompts instead, up to this many times; 0: "
                         "never", group="generation",
                         default=0)
    overlong_buffer: int = option("reduce the reward by up to 1 over the last N tokens before --max-completion-length; 0: no reduction",
                                  group="rewards",
                                  default=0)
    mask_truncated_completions: bool = option("train on nothing in completions that reach --max-completion-length", group="method",
                                              default=False)

    learning_rate: float | None = option("peak learning rate", group="optimizer", above=0, default=None, default_text=str(POLICY_RATES))
    lr_scheduler_type: Literal["wsd", "cosine"] = option("learning-rate schedule after the warm-up: constant, then decaying at the end "
                                                         "(wsd), or cosine down to a tenth of the peak", group="optimizer", default="wsd")
    warmup_steps: int = option("steps over which the learning rate warms up", group="optimizer", least=0, default=5)
    decay_ratio: float = option("with wsd: share of the run over which the learning rate decays",
                                group="optimizer", least=0, most=1, default=0.1)
    save_steps: int | None = option("steps between checkpoints, each with an evaluation; the first is after step 1; 0: only the first and "
                                    "the last", group="checkpoints", least=0, default=None,
                                    default_text="an evaluation every 20, and checkpoints as often as saving takes at most 2 % of the "
                                                 "time, at least every 30 minutes; with --kl-window 20")
    eval_steps: int = option("steps between evaluations on held-out prompts; with --save-steps each has a checkpoint; 0: as --save-steps",
                             group="evaluation", least=0, default=0)
    num_generations_eval: int | None = option("completions sampled for each held-out prompt, at --temperature; 0: one, greedy",
                                              group="evaluation",
                                              least=0, default=None, default_text="as many as cost 5 % of the run's own sampling; one, "
                                                                                  "greedy, where that is less than two")
    eval_prompts: int | None = option("held-out prompts scored at each evaluation, at most half of them; the final model is judged on the "
                                      "others", group="evaluation", least=2, default=None,
                                      default_text="as many as cost 5 % of the run's own sampling")
    samples: int = option("completions of each rollout to keep in RUN/samples.jsonl", group="checkpoints", default=8)
    reward_errors: float = option("share of completions whose reward may fail; with more the run stops", group="rewards", least=0, most=1,
                                  default=0.05)
    reward_workers: int = option("processes that compute rewards", group="rewards", least=1, default=2)
    reward_seconds: float = option("the most seconds that scoring one completion may take; more is an error",
                                   group="rewards", above=0, default=30.0)
    sampler_device: str | None = option("device to sample on, as in cuda:1", group="run", metavar="DEVICE", default=None,
                                        default_text="the trainer's device, on its own weights")
    vllm_server_base_url: str | None = option("server that samples the rollouts, as in http://localhost:8000: vLLM (0.20 or later, with "
                                              "VLLM_SERVER_DEV_MODE=1), or assay serve --rollouts; it must be able to read --out",
                                              group="run", metavar="URL", default=None, default_text="none, the trainer samples them "
                                                                                                     "itself")
    vllm_importance_sampling_correction: bool = option("weight each token that a server sampled by min(trainer's probability / server's, "
                                                       "--vllm-importance-sampling-clip-max); without it the two probabilities must be "
                                                       "the same",
                                                       group="method", default=True)
    vllm_importance_sampling_clip_max: float = option("the largest of these importance weights", group="method", least=1, default=3.0)

    @property
    def normalisation(self) -> Literal["token", "sequence", "constant"]:
        """How tokens are weighed: every completion alike, every token alike, or every token over a constant."""
        return NORMALISATIONS[self.loss_type]

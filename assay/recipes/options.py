"""Options of the training recipes: one frozen dataclass each is default, type, help and command line at once.

Apart from the recipes themselves, so that `--help` loads no torch. A default that depends on another option stands here once, as a
method of its class.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from assay.config import option
from assay.errors import UsageError


class ByOptimizer(NamedTuple):
    """Defaults of a pretraining run that depend on the optimizer of its matrices."""

    learning_rate: float
    weight_decay: float


class ByForm(NamedTuple):
    """Peak learning rates: of a whole model, and of a LoRA adapter."""

    whole: float
    adapter: float

    def __str__(self) -> str:
        return f"{self.whole:.0e} for the whole model, {self.adapter:.0e} for an adapter".replace("e-0", "e-")


# A weight decay of 0.3: on enwik8, read five times in two minutes, it gave 1.145 bits per byte; 0.01 learned the text by heart.
MATRICES = {"muon": ByOptimizer(0.02, 0.3), "adamw": ByOptimizer(0.002, 0.1)}
TUNING_RATES = ByForm(whole=3e-5, adapter=3e-4)
REMOTE_HELP = ("URL of an object store (s3://, gs://, hf://, file://) to which every proven checkpoint and the final model are copied; "
               "the same command on a fresh machine resumes from it")
WITNESS_HELP = ("number of training steps, besides the first and the last, that a fresh process recomputes independently from options and "
                "files (docs/witness.md); off: none")
FSDP_HELP = ("split parameters, gradients and optimizer state over all processes (FSDP2), which saves memory; the number of processes "
             "then changes the result by rounding only")
SHARDS_HELP = "parts that a step is cut into for several processes; the result depends on this number, and not on the number of processes"
SHARDS_DEFAULT = "1, or with --gpus the larger of 8 and the number of GPUs"
REPLICA_HELP = ("with several processes: steps between comparisons of what they hold, besides those at every save: each tensor by digest "
                "or, with --fsdp, steps, norms and each process's frozen rows; 0: only at saves")
LIMIT_HELP = "read only the first N rows of each file of --data"
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
TRACK_HELP = ("send every step's metrics to these trackers during the run, from a separate process that cannot affect it; tensorboard "
              "writes to RUN/tensorboard, the others use their own settings")
TRACK_CHECKPOINTS_HELP = ("with --track wandb, trackio or mlflow: upload every checkpoint that has its hallmark, and the final model, as "
                          "artifacts")
MINUTES_HELP = "stop after this many minutes of training, all restarts together; the checks before step 1 are not counted"
PROBE_SAMPLES_HELP = ("the most texts sampled for each of eight prompts, by which a proof judges whether a checkpoint's text is "
                      "degenerate; one of each is enough where all are clean; 0: none")
GPUS_HELP = "processes on this machine, one on each GPU; for several machines use torchrun"
REPLAY_HELP = "every so many steps compute one micro-batch twice, and stop where the bits differ, which finds faulty hardware; 0: never"
TIMEOUT_HELP = "seconds after which a process that does not answer counts as dead, and the run ends"
PATIENCE_HELP = ("stop once this many evaluations together improve the held-out loss by less than --early-stopping-threshold; refused "
                 "where the noise of the evaluations is larger than that; 0: never")
THRESHOLD_HELP = "the smallest improvement worth continuing for, in the unit of the evaluations"
CHECKPOINTING_HELP = "recompute activations in the backward pass instead of keeping them: less memory, a third more time"
DTYPE_HELP = ("number format of the forward and backward pass; trained weights have fp32 masters. fp16 is for cards without bf16: the "
              "loss is scaled, and a batch whose gradients overflow is computed again at half the scale")
QUIET_HELP = "print only the verdicts and the headline"
JSON_HELP = "print the outcome as JSON, and everything else to stderr"
DEVICE = "a GPU if there is one, else cpu"


def _by_optimizer(name: str) -> str:
    return ", ".join(f"{getattr(found, name):g} with {optimizer}" for optimizer, found in MATRICES.items())


@dataclass(frozen=True)
class Pretrain:
    """Train a model from scratch on a corpus that `assay corpus` made. The same command resumes an interrupted run in --out."""

    corpus: str = option("folder that assay corpus made, or a URL of one", group="data", metavar="FOLDER")
    out: str = option("folder of the run", group="run", metavar="FOLDER")
    mix: tuple[str, ...] = option("other corpora with the same tokenizer, each with its share of the rows, as in code:0.2 old:0.1; the "
                                  "other rows come from --corpus, whose held-out documents are scored", group="data",
                                  metavar="FOLDER:SHARE", default=())
    depth: int = option("number of layers; the width is 64 times the depth, and the other sizes follow from it", group="model", default=6)
    minutes: float | None = option(MINUTES_HELP, group="budget", above=0, default=None, default_text="no limit")
    tokens: int | None = option("stop after this many training tokens", group="budget", least=1, default=None, default_text="no limit")
    max_bytes: int | None = option("also write a quantised and compressed artifact of at most this many bytes, and score it again",
                                   group="checkpoints", least=1, default=None, default_text="none is written")
    count_code: bool = option("count the code of Assay that opens and scores the artifact too; it is written beside it "
                              "as code.zip, and must score it by itself", needs="--max-bytes", group="checkpoints", default=False)
    artifact_seconds: float | None = option("the most seconds that a fresh process may take to open the artifact and "
                                            "score all held-out text", needs="--max-bytes", group="checkpoints", above=0, default=None,
                                            default_text="no limit")
    num_train_epochs: int = option("the most passes over the corpus, reshuffled each time", group="budget", least=1, default=1)
    max_length: int = option("length of a row in tokens", group="data", default=1024)
    batch_tokens: int = option("tokens per step", group="optimizer", default=32768)
    micro_batch_tokens: int = option("tokens that go through the model at a time; changes nothing but memory", group="memory", least=1,
                                     default=65536)
    shape: str = option("architecture: qwen3, which opens in transformers; assay, with relu², a soft cap on the logits and no gate; or "
                        "the path of a Hugging Face config.json, which then sets depth, width and all else", group="model", default="qwen3")
    value_residual: bool = option("mix the first layer's values into the values of every layer", needs="--shape assay", group="model",
                                  default=False)
    attention_gate: bool = option("multiply each head's output by a sigmoid gate of the layer's input", needs="--shape assay",
                                  group="model",
                                  default=False)
    optimizer: Literal["muon", "adamw"] = option("optimizer of the weight matrices", group="optimizer", default="muon")
    learning_rate: float | None = option("peak learning rate of the weight matrices", group="optimizer", above=0, default=None,
                                         default_text=_by_optimizer("learning_rate"))
    embedding_learning_rate: float = option("with muon: peak learning rate of embedding and head", group="optimizer", above=0, default=0.01)
    weight_decay: float | None = option("weight decay of the weight matrices", group="optimizer", least=0, default=None,
                                        default_text=_by_optimizer("weight_decay"))
    lr_scheduler_type: Literal["wsd", "cosine"] = option("learning-rate schedule after the warm-up: constant, then decaying at the end "
                                                         "(wsd), or cosine",
                                                         group="optimizer", default="wsd")
    warmup_steps: int = option("steps over which the learning rate warms up", group="optimizer", least=0, default=40)
    decay_ratio: float = option("with wsd: share of the run over which the learning rate decays",
                                group="optimizer", least=0, most=1, default=0.75)
    max_grad_norm: float = option("clip gradients to this norm", group="optimizer", above=0, default=1.0)
    gradient_checkpointing: bool = option(CHECKPOINTING_HELP, group="memory", default=False)
    dtype: Literal["fp32", "bf16", "fp16"] | None = option(DTYPE_HELP, group="memory", default=None,
                                                           default_text="bf16 on a GPU, fp32 elsewhere")
    ema: float = option("decay of an exponential moving average (EMA) of the weights, which is then what is evaluated and exported; 0: "
                        "none", group="optimizer", least=0,
                        below=1, default=0.0)
    save_steps: int | None = option("steps between checkpoints, each with an evaluation on held-out text; the first is after step 1",
                                    group="checkpoints", least=1, default=None,
                                    default_text="an evaluation every 500, and checkpoints as often as saving takes at most 2 % of the "
                                                 "time, at least every 30 minutes")
    eval_documents: int = option("held-out documents scored at each evaluation; the final model is scored on all",
                                 group="evaluation", least=2, default=64)
    early_stopping_patience: int = option(PATIENCE_HELP, group="budget", least=0, default=0)
    early_stopping_threshold: float = option(THRESHOLD_HELP, needs="--early-stopping-patience", group="budget", above=0, default=0.01)
    probe_samples: int = option(PROBE_SAMPLES_HELP, group="checkpoints", least=0, default=4)
    remote: str | None = option(REMOTE_HELP, group="checkpoints", metavar="URL", default=None, default_text="none")
    witness: str = option(WITNESS_HELP, group="checkpoints", metavar="STEPS", default="2")
    seed: int = option("seed of the initial weights and of the order of the data", group="run", default=0)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None, default_text=DEVICE)
    gpus: int = option(GPUS_HELP, group="run", least=1, default=1)
    shards: int = option(SHARDS_HELP, group="optimizer", least=1, default=1, default_text=SHARDS_DEFAULT)
    fsdp: bool = option(FSDP_HELP, group="memory", default=False)
    replay_steps: int = option(REPLAY_HELP, group="checkpoints", least=0, default=0)
    replica_steps: int = option(REPLICA_HELP, group="checkpoints", least=0, default=100)
    process_timeout: float = option(TIMEOUT_HELP, group="run", least=1, default=120.0)
    track: tuple[Tracker, ...] = option(TRACK_HELP, group="run", default=(), default_text="none")
    track_checkpoints: bool = option(TRACK_CHECKPOINTS_HELP, group="run", default=False)
    quiet: bool = option(QUIET_HELP, group="run", default=False)
    json: bool = option(JSON_HELP, group="run", default=False)

    def matrices(self) -> ByOptimizer:
        """Learning rate and weight decay of the matrices, as asked for or as the optimizer has them."""
        usual = MATRICES[self.optimizer]
        return ByOptimizer(self.learning_rate or usual.learning_rate,
                           usual.weight_decay if self.weight_decay is None else self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Options of every recipe that begins with a model."""

    RATES: ClassVar[ByForm] = TUNING_RATES

    out: str = option("folder of the run", group="run", metavar="FOLDER")
    model: str | None = option("model to train: a checkpoint, Hugging Face folder, GGUF file, URL of a checkpoint or fetched name; this "
                               "or --from is required",
                               group="model", default=None)
    from_: str | None = option("instead of --model: fork this proven checkpoint of a run, adapter included", group="model",
                               metavar="CHECKPOINT", default=None)
    optimizer_state: Literal["fresh", "carried"] | None = option("required with --from: start with fresh optimizer moments, or carry over "
                                                                 "the parent's", group="model", default=None)
    rope_scaling: str | None = option("extend the model's context: linear:F or yarn:F by a factor F, or long by the long factors of a "
                                      "LongRoPE model; the base with this in its config is written to RUN/base and trained on",
                                      group="model", metavar="KIND", default=None, default_text="the context of its config")
    lora_r: int = option("rank of a LoRA adapter; 0: train the whole model", group="model", least=0, default=0)
    lora_alpha: float | None = option("LoRA alpha; the update is scaled by alpha/r", group="model", above=0, default=None,
                                      default_text="2·r")
    use_rslora: bool = option("scale the update by alpha/√r instead (rsLoRA)", group="model", default=False)
    lora_target_modules: tuple[str, ...] = option("layers to adapt, by their names in PEFT", group="model", metavar="NAME",
                                                  default=(),
                                                  default_text="all linear layers of the blocks")
    base_dtype: Literal["bf16", "int8", "nf4"] | None = option(
        "with an adapter: number format of the frozen base's matrices; int8 and nf4 have one scale for 64 weights", group="memory",
        default=None, default_text="as in its file")
    merge: Literal["always", "never"] | None = option("whether to write RUN/model, adapter and base merged in fp32, beside RUN/adapter",
                                                      group="model",
                                                      default=None, default_text="written where the base's files have at most 4 GB")
    new_tokens: tuple[str, ...] = option("texts to add to the tokenizer as single tokens, such as <think> </think> <answer> </answer>",
                                         group="model",
                                         metavar="TEXT", default=())
    max_steps: int | None = option("stop after this many steps", group="budget", least=1, default=None, default_text="the epochs decide")
    minutes: float | None = option(MINUTES_HELP, group="budget", above=0, default=None, default_text="no limit")
    optim: Literal["adamw", "adamw_8bit"] = option("optimizer; adamw_8bit keeps the moments in 8 bits, a quarter of their memory",
                                                   group="optimizer", default="adamw")
    learning_rate: float | None = option("peak learning rate", group="optimizer", above=0, default=None, default_text=str(TUNING_RATES))
    weight_decay: float = option("weight decay of the weight matrices", group="optimizer", least=0, default=0.0)
    lr_scheduler_type: Literal["cosine", "wsd"] = option("learning-rate schedule after the warm-up: cosine down to a tenth of the peak, "
                                                         "or constant, then decaying at the end (wsd)", group="optimizer", default="cosine")
    warmup_steps: int = option("steps over which the learning rate warms up", group="optimizer", least=0, default=10)
    decay_ratio: float = option("with wsd: share of the run over which the learning rate decays",
                                group="optimizer", least=0, most=1, default=0.5)
    max_grad_norm: float = option("clip gradients to this norm", group="optimizer", above=0, default=1.0)
    gradient_checkpointing: bool = option(CHECKPOINTING_HELP, group="memory", default=False)
    save_steps: int | None = option("steps between checkpoints, each with an evaluation; the first is after step 1; 0: only the first and "
                                    "the last", group="checkpoints", least=0, default=None,
                                    default_text="an evaluation every 100, and checkpoints as often as saving takes at most 2 % of the "
                                                 "time, at least every 30 minutes")
    save_minutes: float | None = option("also save a checkpoint when this many minutes have passed since the last one",
                                        group="checkpoints", above=0, default=None,
                                        default_text="none")
    probe_samples: int = option(PROBE_SAMPLES_HELP, group="checkpoints", least=0, default=4)
    suite: str | None = option("YAML file of tasks and probes on which the parent and the final model are compared at the end; a model "
                               "that is shown to have lost more than a task's margin is refuted",
                               group="evaluation", metavar="FILE", default=None, default_text="forgetting is not measured")
    insist: bool = option("allow --save-steps 0 for a run of more than ten minutes", group="checkpoints", default=False)
    remote: str | None = option(REMOTE_HELP, group="checkpoints", metavar="URL", default=None, default_text="none")
    witness: str = option(WITNESS_HELP, group="checkpoints", metavar="STEPS", default="2")
    seed: int = option("seed of the order of the data and of everything that is sampled", group="run", default=0)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None, default_text=DEVICE)
    gpus: int = option(GPUS_HELP, group="run", least=1, default=1)
    shards: int = option(SHARDS_HELP, group="optimizer", least=1, default=1, default_text=SHARDS_DEFAULT)
    fsdp: bool = option(FSDP_HELP, group="memory", default=False)
    replay_steps: int = option(REPLAY_HELP, group="checkpoints", least=0, default=0)
    replica_steps: int = option(REPLICA_HELP, group="checkpoints", least=0, default=100)
    process_timeout: float = option(TIMEOUT_HELP, group="run", least=1, default=120.0)
    track: tuple[Tracker, ...] = option(TRACK_HELP, group="run", default=(), default_text="none")
    track_checkpoints: bool = option(TRACK_CHECKPOINTS_HELP, group="run", default=False)
    quiet: bool = option(QUIET_HELP, group="run", default=False)
    json: bool = option(JSON_HELP, group="run", default=False)

    def peak_rate(self, *, adapter: bool) -> float:
        """The peak learning rate: as asked for, or the default of the whole model or of an adapter."""
        return self.learning_rate or (self.RATES.adapter if adapter else self.RATES.whole)


@dataclass(frozen=True, kw_only=True)
class Tuned(Trained):
    """Options of every recipe that learns from examples, of which some are held out."""

    data: tuple[str, ...] = option("conversations: .jsonl(.gz), .parquet or .csv, a folder or URL of these, or a hub dataset, "
                                   "hf://OWNER/NAME[CONFIG][SPLIT]; several files are read as one or, where each has its share of the "
                                   "rows (a.jsonl:0.7 b.jsonl:0.3), as a mixture", group="data", metavar="FILE")
    limit: int | None = option(LIMIT_HELP, group="data", least=1, default=None, default_text="all")
    max_length: int = option("length of a row in tokens", group="data", default=1024)
    too_long: Literal["drop", "truncate", "error"] = option("what to do with conversations longer than a row", group="data", default="drop")
    packing: bool = option("pack several conversations into each row; they do not attend to each other", group="data", default=True)
    held_out: float = option("share of the conversations that is never trained on, and scored at every evaluation", group="evaluation",
                             least=0, below=1, default=0.05)
    held_out_data: str | None = option("score these conversations instead, and hold nothing else out", group="evaluation", metavar="FILE",
                                       default=None)
    num_train_epochs: int = option("passes over the conversations, reshuffled each time", group="budget", least=1, default=1)
    batch_tokens: int = option("tokens per step, padding included", group="optimizer", default=16384)
    micro_batch_tokens: int = option("tokens that go through the model at a time; changes nothing but memory", group="memory", least=1,
                                     default=16384)
    eval_examples: int = option("held-out conversations scored at each evaluation; the final model is scored on all",
                                group="evaluation", least=2, default=256)
    early_stopping_patience: int = option(PATIENCE_HELP, group="budget", least=0, default=0)
    early_stopping_threshold: float = option(THRESHOLD_HELP, needs="--early-stopping-patience", group="budget", above=0, default=0.01)

    @property
    def row_length(self) -> int:
        """Tokens in a row."""
        return self.max_length


@dataclass(frozen=True, kw_only=True)
class Tuning(Tuned):
    """Options that fine-tuning and distillation have in common."""

    roles: tuple[str, ...] = option("roles whose turns are trained on", group="data", metavar="ROLE", default=("assistant",))
    turns: Literal["together", "apart"] = option("one example for each conversation (together), or one for each trained turn (apart)",
                                                 group="data",
                                                 default="together")
    gsm8k: Literal["plain", "think"] = option("GSM8K rows: the answer as it is (plain), or in <think> and <answer> tags (think)",
                                              group="data", default="plain")


@dataclass(frozen=True, kw_only=True)
class Sft(Tuning):
    """Fine-tune a model on conversations, the whole of it or a LoRA adapter. The same command resumes an interrupted run in --out."""

    master_dtype: Literal["fp32", "bf16"] = option(
        "number format in which trained weights are kept; bf16, with stochastic rounding, takes a third less memory, and the run stops "
        "where updates are lost nevertheless", group="memory", default="fp32")
    dtype: Literal["fp32", "bf16", "fp16"] | None = option(DTYPE_HELP, group="memory", default=None,
                                                           default_text="bf16 on a GPU, fp32 elsewhere")


@dataclass(frozen=True, kw_only=True)
class Distill(Tuning):
    """Distil a teacher into a student, by its logits or by text that it writes. The same command resumes an interrupted run in --out."""

    model: str | None = option("the student: a checkpoint, Hugging Face folder, GGUF file or fetched name; this, --from or "
                               "--student-layers is required", group="model", default=None)
    student_layers: int | None = option("instead of --model: build the student from this many of the teacher's layers, evenly spaced, "
                                        "including the first and the last", group="model", least=1, default=None)
    teacher: str | None = option("the teacher, in the same forms as --model; several with weights that add up to 1: A=0.7,B=0.3; may be "
                                 "left out where its logits are stored", group="model", metavar="MODEL", default=None)
    how: Literal["online", "stored", "text"] = option("learn from the teacher's logits, computed during training (online) or stored "
                                                      "before it (stored), or from answers that the teacher writes to the prompts of the "
                                                      "data (text), which works with any tokenizer",
                                                      group="method", default="online")
    divergence: Literal["forward", "reverse", "jsd"] = option("loss: KL(teacher ‖ student) (forward), KL(student ‖ teacher) (reverse), or "
                                                              "Jensen–Shannon (jsd)",
                                                              group="method", default="forward")
    temperature: float = option("temperature of both distributions; the distillation loss is weighted by its square",
                                group="method", above=0,
                                default=1.0)
    kd_weight: float = option("weight of the distillation loss", group="method", least=0, default=1.0)
    ce_weight: float = option("weight of the cross-entropy on the data's own text", group="method", least=0, default=0.0)
    beta: float = option("the teacher's share in the mixture distribution",
                         needs="--divergence jsd", group="method", least=0, most=1, default=0.5)
    on_policy: float = option("share of the steps in which the student answers the prompts itself and the teacher scores these answers "
                              "(GKD's lambda); the other steps use the data's answers", group="method", least=0, most=1, default=0.0)
    divergence_top_k: int | None = option("compare only the N likeliest tokens (the student's with --divergence reverse, else the "
                                          "teacher's), and all others together as one more", group="method", least=1, default=None,
                                          default_text="every token")
    teacher_logits: str | None = option("the folder of the stored logits, written on first use",
                                        needs="--how stored", group="method", metavar="FOLDER",
                                        default=None, default_text="RUN/teacher-logits")
    teacher_top_k: int = option("how many of the likeliest tokens are stored at each position", needs="--how stored", group="method",
                               least=1,
                                default=64)
    max_new_tokens: int = option("the most tokens of an answer", needs="--how text or --on-policy", group="method", least=1,
                                 default=256)
    sample_temperature: float | None = option("temperature of the answers that the teacher writes with --how text (0: greedy), or the "
                                              "student with --on-policy", group="method", least=0, default=None,
                                              default_text="0 with --how text, 1 with --on-policy")

    def teachers(self) -> list[tuple[str, float]]:
        """Teachers that were named, each with its weight: PATH, or PATH=WEIGHT,PATH=WEIGHT."""
        if self.teacher is None:
            raise UsageError("name who teaches: --teacher")
        parts = [part.strip().rpartition("=") for part in self.teacher.split(",")]
        if len(parts) == 1:
            return [(self.teacher, 1.0)]
        try:
            found = [(path, float(weight)) for path, _, weight in parts]
        except ValueError:
            raise UsageError(f"--teacher {self.teacher}: expected one model, or several as PATH=WEIGHT,PATH=WEIGHT") from None
        if not all(path and 0 < weight < 1 for path, weight in found) or abs(sum(weight for _, weight in found) - 1) > 1e-6:
            raise UsageError(f"--teacher {self.teacher}: the weights are {', '.join(f'{weight:g}' for _, weight in found)}; expected "
                             "numbers above 0 that add up to 1, each after the path of a model")
        return found

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
REMOTE_HELP = ("URL of an object store (s3://, gs://, hf://, file://) that every proven checkpoint and what is handed over are copied to; "
               "a fresh machine with the same command goes on from it")
WITNESS_HELP = ("steps, drawn by the seed, that a fresh process replays from options and files alone, besides the first and the last; "
                "off: none")
FSDP_HELP = ("with several processes: each holds a part of parameters, gradients and moments (FSDP2), which saves memory; the result "
             "depends on the number of processes, by rounding alone")
SHARDS_HELP = "parts that a step is cut into for several processes; the result depends on it, and not on how many there are"
REPLICA_HELP = ("with several processes: every so many steps, and at every save, all of them say what they hold (each tensor by digest or, "
                "with --fsdp, its own rows of what is frozen, its steps and its norm), and must agree; 0: at saves alone")
LIMIT_HELP = "read only the first so many rows of each file of --data"
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
TRACK_HELP = ("hand every step's metrics to these while the run goes on, by a process beside it that cannot touch it; tensorboard writes "
              "to RUN/tensorboard, the others as they are set up")
TRACK_CHECKPOINTS_HELP = ("with --track wandb, trackio or mlflow: hand over every checkpoint too, as an artifact, once it has its "
                          "hallmark; and what the run hands over at its end")
QUIET_HELP = "print nothing but the verdicts and the headline"
JSON_HELP = "print the outcome as JSON, and everything else to stderr"
DEVICE = "a GPU where there is one, else cpu"


def _by_optimizer(name: str) -> str:
    return ", ".join(f"{getattr(found, name):g} with {optimizer}" for optimizer, found in MATRICES.items())


@dataclass(frozen=True)
class Pretrain:
    """Train a model from scratch on a corpus that `assay corpus` made. An interrupted run in --out goes on where it stopped."""

    corpus: str = option("folder that assay corpus made, or a URL of one", group="data", metavar="FOLDER")
    out: str = option("folder of the run", group="run", metavar="FOLDER")
    mix: tuple[str, ...] = option("other corpora of the same tokenizer, each with the share of the rows that come from it, as in code:0.2 "
                                  "old:0.1; the rest is --corpus's, whose held-out documents are scored", group="data",
                                  metavar="FOLDER:SHARE", default=())
    depth: int = option("layers; the width is 64 times as much, and the rest follows", group="model", default=6)
    minutes: float | None = option("stop after this much wall time of training, all sittings together; what is checked before step 1 "
                                   "is not counted", group="budget", above=0, default=None, default_text="no limit")
    tokens: int | None = option("stop after this many training tokens", group="budget", least=1, default=None, default_text="no limit")
    max_bytes: int | None = option("also write an artifact of at most this many bytes: quantised, compressed and scored again",
                                   group="checkpoints", least=1, default=None, default_text="none is written")
    num_train_epochs: int = option("how often the corpus may be read, reshuffled each time", group="budget", least=1, default=1)
    max_length: int = option("tokens in a row", group="data", default=1024)
    batch_tokens: int = option("tokens in a step", group="optimizer", default=32768)
    micro_batch_tokens: int = option("tokens that go through the model at a time; changes nothing but memory", group="memory", least=1,
                                     default=65536)
    shape: str = option("architecture: qwen3 opens in transformers; assay has relu², a soft cap on the logits and no gate; or the path of "
                        "a Hugging Face config.json, which then says depth, width and all else", group="model", default="qwen3")
    value_residual: bool = option("with --shape assay: every layer mixes the first layer's values into its own", group="model",
                                  default=False)
    attention_gate: bool = option("with --shape assay: a sigmoid of the layer's input weighs each head's output", group="model",
                                  default=False)
    optimizer: Literal["muon", "adamw"] = option("optimizer of the matrices", group="optimizer", default="muon")
    learning_rate: float | None = option("peak learning rate of the matrices", group="optimizer", above=0, default=None,
                                         default_text=_by_optimizer("learning_rate"))
    embedding_learning_rate: float = option("peak learning rate of embedding and head with muon", group="optimizer", above=0, default=0.01)
    weight_decay: float | None = option("weight decay of the matrices", group="optimizer", least=0, default=None,
                                        default_text=_by_optimizer("weight_decay"))
    lr_scheduler_type: Literal["wsd", "cosine"] = option("learning rate after the warm-up: flat and down at the end (wsd), or a cosine",
                                                         group="optimizer", default="wsd")
    warmup_steps: int = option("steps in which the learning rate rises", group="optimizer", least=0, default=40)
    decay_ratio: float = option("share of the run over which wsd goes down", group="optimizer", least=0, most=1, default=0.5)
    max_grad_norm: float = option("gradients are scaled down to this norm", group="optimizer", above=0, default=1.0)
    gradient_checkpointing: bool = option("compute activations again on the way back instead of keeping them: less memory, a third more "
                                          "time",
                                          group="memory", default=False)
    dtype: Literal["fp32", "bf16", "fp16"] | None = option(
        "number format of the forward and backward pass; what is trained has fp32 masters. fp16 is for cards without bf16: the loss is "
        "scaled, and a batch whose gradients overflow is computed again at half the scale", group="memory", default=None,
        default_text="bf16 on a GPU, fp32 elsewhere")
    ema: float = option("decay of a moving average of the weights, which is scored and handed over; 0: none", group="optimizer", least=0,
                        below=1, default=0.0)
    save_steps: int | None = option("steps between checkpoints, each with an evaluation on held-out text; the first comes after step 1",
                                    group="checkpoints", least=1, default=None,
                                    default_text="an evaluation every 500, and checkpoints that take at most a fiftieth of the time")
    eval_documents: int = option("held-out documents that an evaluation scores; the model that is handed over is scored on all",
                                 group="evaluation", least=2, default=64)
    early_stopping_patience: int = option("stop early once so many evaluations together improve the held-out loss by less than "
                                          "--early-stopping-threshold; refused where noise hides that; 0: never", group="budget", least=0,
                                          default=0)
    early_stopping_threshold: float = option("with --early-stopping-patience: the improvement that is worth going on for, in the unit of "
                                             "the evaluations", group="budget",
                                             above=0, default=0.01)
    probe_samples: int = option("texts to each of eight prompts by which a proof may judge what a checkpoint says; where the first of each "
                                "are clean, they are enough; 0: none", group="checkpoints", least=0, default=4)
    remote: str | None = option(REMOTE_HELP, group="checkpoints", metavar="URL", default=None, default_text="none")
    witness: str = option(WITNESS_HELP, group="checkpoints", metavar="STEPS", default="2")
    seed: int = option("seed of the weights and of the order of the data", group="run", default=0)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None, default_text=DEVICE)
    gpus: int = option("processes of this machine that compute the run together, one on each GPU; torchrun starts them on several machines",
                       group="run", least=1, default=1)
    shards: int = option(SHARDS_HELP, group="optimizer", least=1, default=1, default_text="1; with --gpus 8, or as many as GPUs")
    fsdp: bool = option(FSDP_HELP, group="memory", default=False)
    replay_steps: int = option("every so many steps one micro-batch is computed twice, and must give the same bits: a chip that computes "
                               "wrong now and then is found; 0: never", group="checkpoints", least=0, default=0)
    replica_steps: int = option(REPLICA_HELP, group="checkpoints", least=0, default=100)
    process_timeout: float = option("seconds after which a process that does not answer the others counts as dead, and the run ends",
                                    group="run", least=1, default=120.0)
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
    optimizer_state: Literal["fresh", "carried"] | None = option("with --from, where it is required: begin with new moments, or with the "
                                                                 "parent's", group="model", default=None)
    rope_scaling: str | None = option("lengthen the model's context: linear:F or yarn:F, by a factor F; long, by the long factors of a "
                                      "LongRoPE model. A base with this in its config is written to RUN/base, and trained on",
                                      group="model", metavar="KIND", default=None, default_text="the context of its config")
    lora_r: int = option("rank of a LoRA adapter; 0: train the whole model", group="model", least=0, default=0)
    lora_alpha: float | None = option("LoRA alpha; the update is scaled by alpha/r", group="model", above=0, default=None,
                                      default_text="2·r")
    use_rslora: bool = option("scale the update by alpha/√r instead", group="model", default=False)
    lora_target_modules: tuple[str, ...] = option("layers to adapt, by the names that PEFT knows", group="model", metavar="NAME",
                                                  default=(),
                                                  default_text="all linear layers of the blocks")
    base_dtype: Literal["bf16", "int8", "nf4"] | None = option(
        "of an adapter: the dtype in which the frozen base's matrices are held, in 8 or 4 bits with a scale for 64 of them", group="memory",
        default=None, default_text="as in its file")
    merge: Literal["always", "never"] | None = option("beside RUN/adapter also RUN/model, adapter and base merged in fp32", group="model",
                                                      default=None, default_text="where the base's files have at most 4 GB")
    new_tokens: tuple[str, ...] = option("texts that become single tokens, such as <think> </think> <answer> </answer>", group="model",
                                         metavar="TEXT", default=())
    max_steps: int | None = option("stop after so many steps", group="budget", least=1, default=None, default_text="the epochs decide")
    minutes: float | None = option("stop after this much wall time of training, all sittings together; what is checked before step 1 "
                                   "is not counted", group="budget", above=0, default=None, default_text="no limit")
    optim: Literal["adamw", "adamw_8bit"] = option("optimizer; adamw_8bit keeps the moments in 8 bits, a quarter of their memory",
                                                   group="optimizer", default="adamw")
    learning_rate: float | None = option("peak learning rate", group="optimizer", above=0, default=None, default_text=str(TUNING_RATES))
    weight_decay: float = option("weight decay of the matrices", group="optimizer", least=0, default=0.0)
    lr_scheduler_type: Literal["cosine", "wsd"] = option("learning rate after the warm-up: a cosine down to a tenth, or flat and down at "
                                                         "the end (wsd)", group="optimizer", default="cosine")
    warmup_steps: int = option("steps in which the learning rate rises", group="optimizer", least=0, default=10)
    decay_ratio: float = option("share of the run over which wsd goes down", group="optimizer", least=0, most=1, default=0.5)
    max_grad_norm: float = option("gradients are scaled down to this norm", group="optimizer", above=0, default=1.0)
    gradient_checkpointing: bool = option("compute activations again on the way back instead of keeping them: less memory, a third more "
                                          "time",
                                          group="memory", default=False)
    save_steps: int | None = option("steps between checkpoints, each with an evaluation; the first comes after step 1; 0: only the first "
                                    "and the last", group="checkpoints", least=0, default=None,
                                    default_text="an evaluation every 100, and checkpoints that take at most a fiftieth of the time")
    save_minutes: float | None = option("also a checkpoint after so many minutes", group="checkpoints", above=0, default=None,
                                        default_text="none")
    probe_samples: int = option("texts to each of eight prompts by which a proof may judge what a checkpoint says; where the first of each "
                                "are clean, they are enough; 0: none", group="checkpoints", least=0, default=4)
    suite: str | None = option("YAML of tasks and probes that parent and child are asked at the end: what the child is shown to have lost "
                               "voids it", group="evaluation", metavar="FILE", default=None, default_text="forgetting is not measured")
    insist: bool = option("allow --save-steps 0 for a run of more than ten minutes", group="checkpoints", default=False)
    remote: str | None = option(REMOTE_HELP, group="checkpoints", metavar="URL", default=None, default_text="none")
    witness: str = option(WITNESS_HELP, group="checkpoints", metavar="STEPS", default="2")
    seed: int = option("seed of the order of the data and of whatever is drawn", group="run", default=0)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None, default_text=DEVICE)
    gpus: int = option("processes of this machine that compute the run together, one on each GPU; torchrun starts them on several machines",
                       group="run", least=1, default=1)
    shards: int = option(SHARDS_HELP, group="optimizer", least=1, default=1, default_text="1; with --gpus 8, or as many as GPUs")
    fsdp: bool = option(FSDP_HELP, group="memory", default=False)
    replay_steps: int = option("every so many steps one micro-batch is computed twice, and must give the same bits: a chip that computes "
                               "wrong now and then is found; 0: never", group="checkpoints", least=0, default=0)
    replica_steps: int = option(REPLICA_HELP, group="checkpoints", least=0, default=100)
    process_timeout: float = option("seconds after which a process that does not answer the others counts as dead, and the run ends",
                                    group="run", least=1, default=120.0)
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

    data: tuple[str, ...] = option("conversations: .jsonl(.gz), .parquet or .csv, a folder or URL of these, or a dataset of the hub, "
                                   "hf://OWNER/NAME[CONFIG][SPLIT]; several are read as one, or, each with the share of the rows that come "
                                   "from it (a.jsonl:0.7 b.jsonl:0.3), as a mixture", group="data", metavar="FILE")
    limit: int | None = option(LIMIT_HELP, group="data", least=1, default=None, default_text="all")
    max_length: int = option("tokens in a row", group="data", default=1024)
    too_long: Literal["drop", "truncate", "error"] = option("what happens to conversations longer than a row", group="data", default="drop")
    packing: bool = option("several conversations share a row and do not see each other", group="data", default=True)
    held_out: float = option("share of the conversations that is never trained on and scored at every evaluation", group="evaluation",
                             least=0, below=1, default=0.05)
    held_out_data: str | None = option("score these conversations instead, and hold nothing else out", group="evaluation", metavar="FILE",
                                       default=None)
    num_train_epochs: int = option("how often the conversations are read, reshuffled each time", group="budget", least=1, default=1)
    batch_tokens: int = option("tokens in a step, padding included", group="optimizer", default=16384)
    micro_batch_tokens: int = option("tokens that go through the model at a time; changes nothing but memory", group="memory", least=1,
                                     default=16384)
    eval_examples: int = option("held-out conversations that an evaluation scores; the model that is handed over is scored on all",
                                group="evaluation", least=2, default=256)
    early_stopping_patience: int = option("stop early once so many evaluations together improve the held-out loss by less than "
                                          "--early-stopping-threshold; refused where noise hides that; 0: never", group="budget", least=0,
                                          default=0)
    early_stopping_threshold: float = option("with --early-stopping-patience: the improvement that is worth going on for, in the unit of "
                                             "the evaluations", group="budget",
                                             above=0, default=0.01)

    @property
    def row_length(self) -> int:
        """Tokens in a row."""
        return self.max_length


@dataclass(frozen=True, kw_only=True)
class Tuning(Tuned):
    """Options that fine-tuning and distillation have in common."""

    roles: tuple[str, ...] = option("whose turns are learned", group="data", metavar="ROLE", default=("assistant",))
    turns: Literal["together", "apart"] = option("one example of a conversation, or one of each learned turn (apart)", group="data",
                                                 default="together")
    gsm8k: Literal["plain", "think"] = option("GSM8K rows: the answer as it is, or in <think> and <answer>", group="data", default="plain")


@dataclass(frozen=True, kw_only=True)
class Sft(Tuning):
    """Teach a model from conversations, the whole of it or a LoRA adapter. An interrupted run in --out goes on where it stopped."""

    master_dtype: Literal["fp32", "bf16"] = option(
        "number format in which the weights that are trained are kept; bf16, with stochastic rounding, takes a third less memory, and is "
        "stopped where updates are lost all the same", group="memory", default="fp32")
    dtype: Literal["fp32", "bf16", "fp16"] | None = option(
        "number format of the forward and backward pass; what is trained has fp32 masters. fp16 is for cards without bf16: the loss is "
        "scaled, and a batch whose gradients overflow is computed again at half the scale", group="memory", default=None,
        default_text="bf16 on a GPU, fp32 elsewhere")


@dataclass(frozen=True, kw_only=True)
class Distill(Tuning):
    """Teach a student what a teacher knows, by its logits or in its words. An interrupted run in --out goes on where it stopped."""

    model: str | None = option("the student: a checkpoint, Hugging Face folder, GGUF file or fetched name; this, --from or "
                               "--student-layers is required", group="model", default=None)
    student_layers: int | None = option("instead of --model: so many of the teacher's layers, evenly spaced, the first and the last "
                                        "among them", group="model", least=1, default=None)
    teacher: str | None = option("the teacher: as --model; several with weights that add up to 1: A=0.7,B=0.3; may be left out where its "
                                 "logits are stored", group="model", metavar="MODEL", default=None)
    how: Literal["online", "stored", "text"] = option("learn from logits as the student reads, from stored ones, or from text that the "
                                                      "teacher writes to the data's prompts, which any tokenizer can read",
                                                      group="method", default="online")
    divergence: Literal["forward", "reverse", "jsd"] = option("KL(teacher ‖ student), KL(student ‖ teacher), or Jensen–Shannon",
                                                              group="method", default="forward")
    temperature: float = option("temperature of both distributions; the teacher's term is weighted by its square", group="method", above=0,
                                default=1.0)
    kd_weight: float = option("weight of the teacher's term", group="method", least=0, default=1.0)
    ce_weight: float = option("weight of the text's own cross-entropy", group="method", least=0, default=0.0)
    beta: float = option("with --divergence jsd: the teacher's share in the mixture", group="method", least=0, most=1, default=0.5)
    on_policy: float = option("share of the steps in which the student answers the prompts itself and its teacher scores what it said "
                              "(GKD's lambda); the others read the data's answers", group="method", least=0, most=1, default=0.0)
    divergence_top_k: int | None = option("compare so many of the likeliest tokens, the student's with --divergence reverse, else the "
                                          "teacher's, all others together being one more", group="method", least=1, default=None,
                                          default_text="every token")
    teacher_logits: str | None = option("with --how stored: their folder, made on first use", group="method", metavar="FOLDER",
                                        default=None, default_text="RUN/teacher-logits")
    teacher_top_k: int = option("with --how stored: the likeliest tokens that are stored at each position", group="method", least=1,
                                default=64)
    max_new_tokens: int = option("with --how text or --on-policy: the most tokens that are written to a prompt", group="method", least=1,
                                 default=256)
    sample_temperature: float | None = option("temperature of what is written: with --how text by the teacher, 0 being greedy, with "
                                              "--on-policy by the student", group="method", least=0, default=None,
                                              default_text="0 with --how text, 1 with --on-policy")

    def teachers(self) -> list[tuple[str, float]]:
        """Those named, each with its weight: PATH, or PATH=WEIGHT,PATH=WEIGHT."""
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

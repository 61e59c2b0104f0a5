"""The options of every recipe: one frozen dataclass each is default, type, help and command line at once.

Apart from the recipes themselves, so that `--help` loads no torch.
"""

from dataclasses import dataclass
from typing import Literal

from assay.config import option


@dataclass(frozen=True)
class Pretrain:
    """Train a model from scratch on a corpus that `assay corpus` made. An interrupted run in --out goes on where it stopped."""

    corpus: str = option("folder made by assay corpus")
    out: str = option("folder of the run")
    depth: int = option("layers; width is 64 times as much, and the rest follows", default=6)
    minutes: float | None = option("stop after this much wall time, all sittings together", above=0, default=None)
    tokens: int | None = option("stop after this many training tokens", least=1, default=None)
    max_bytes: int | None = option("also write an artifact of at most this many bytes: quantised, compressed, re-scored",
                                   least=1, default=None)
    epochs: int = option("how often the corpus may be read, reshuffled each time", least=1, default=1)
    length: int = option("tokens a row", default=1024)
    batch_tokens: int = option("tokens a step", default=32768)
    micro_tokens: int = option("tokens that go through the model at a time; changes nothing but memory", least=1, default=65536)
    shape: Literal["qwen3", "assay"] = option("qwen3 opens in transformers; assay has relu², a soft cap and no gate", default="qwen3")
    value_residual: bool = option("with --shape assay: every layer mixes the first layer's values into its own", default=False)
    attention_gate: bool = option("with --shape assay: a sigmoid of the layer's input weighs each head's output", default=False)
    optimizer: Literal["muon", "adamw"] = option("for the matrices", default="muon")
    lr: float | None = option("peak rate of the matrices (muon 0.02, adamw 0.002)", above=0, default=None)
    lr_embed: float = option("peak rate of embedding and head under muon", above=0, default=0.01)
    weight_decay: float | None = option("of the matrices (muon 0.3, adamw 0.1)", least=0, default=None)
    schedule: Literal["wsd", "cosine"] = option("warm-up, flat, and down at the end; or a cosine", default="wsd")
    warmup: int = option("steps", least=0, default=40)
    decay: float = option("share of the run over which wsd goes down", least=0, most=1, default=0.5)
    clip: float = option("gradient norm", above=0, default=1.0)
    recompute: bool = option("compute activations again on the way back, not keep them: less memory, a third more time", default=False)
    ema: float = option("decay of a moving average of the weights, which is scored and handed over; 0: none", least=0, below=1, default=0.0)
    every: int = option("steps between checkpoints, each with a look at held-out text; the first comes after step 1", least=1, default=500)
    look_documents: int = option("held-out documents a look scores; the handed-over model is scored on all", least=2, default=64)
    patience: int = option("stop early once so many looks together improve the held-out loss by less than --worth; refused where noise "
                           "hides that; 0: never", least=0, default=0)
    worth: float = option("with --patience: what is worth going on for, in the unit of the looks", above=0, default=0.01)
    probe_samples: int = option("texts to each of eight prompts by which a proof may judge what a checkpoint says; clean ones are enough "
                                "after one; 0: none", least=0, default=4)
    seed: int = option("seed", default=0)
    device: str | None = option("cpu or cuda (cuda where there is one)", default=None)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What every recipe that begins with a model has in common."""

    out: str = option("folder of the run")
    model: str | None = option("what is trained: a checkpoint, Hugging Face folder, GGUF file or fetched name", default=None)
    from_: str | None = option("instead of --model: fork this proven checkpoint of a run, adapter included", default=None)
    optimizer_state: Literal["fresh", "carried"] | None = option("with --from: begin with new moments, or with the parent's", default=None)
    lora_r: int = option("rank of a LoRA adapter; 0 trains the whole model", least=0, default=0)
    lora_alpha: float | None = option("the adapter counts alpha / r times, with --rslora alpha / √r; twice the rank", above=0, default=None)
    rslora: bool = option("scale by the root of the rank", default=False)
    lora_targets: tuple[str, ...] = option("layers to adapt, by the names that PEFT knows; all linear layers of the blocks", default=())
    new_tokens: tuple[str, ...] = option("texts that become single tokens, such as <think> </think> <answer> </answer>", default=())
    steps: int | None = option("stop after so many steps; otherwise the epochs decide", least=1, default=None)
    minutes: float | None = option("stop after this much wall time, all sittings together", above=0, default=None)
    lr: float | None = option("peak learning rate (whole model 3e-5, adapter 3e-4)", above=0, default=None)
    weight_decay: float = option("of the matrices", least=0, default=0.0)
    schedule: Literal["cosine", "wsd"] = option("down to a tenth over a cosine; or flat, and down at the end", default="cosine")
    warmup: int = option("steps", least=0, default=10)
    decay: float = option("share of the run over which wsd goes down", least=0, most=1, default=0.5)
    clip: float = option("gradient norm", above=0, default=1.0)
    recompute: bool = option("compute activations again on the way back, not keep them: less memory, a third more time", default=False)
    checkpoint_every: int = option("steps between checkpoints, each with a look at what is held out; the first comes after step 1; "
                                   "0: none but the first and the last", least=0, default=100)
    checkpoint_minutes: float | None = option("also one after so many minutes", above=0, default=None)
    probe_samples: int = option("texts to each of eight prompts by which a proof may judge what a checkpoint says; clean ones are enough "
                                "after one; 0: none", least=0, default=4)
    insist: bool = option("allow --checkpoint-every 0 for a run of more than ten minutes", default=False)
    seed: int = option("seed", default=0)
    device: str | None = option("cpu or cuda (cuda where there is one)", default=None)


@dataclass(frozen=True, kw_only=True)
class Tuning(Trained):
    """What fine-tuning and distillation have in common."""

    data: tuple[str, ...] = option("conversations: .jsonl(.gz), .parquet or .csv; several files are read one after the other")
    length: int = option("tokens a row", default=1024)
    over: Literal["drop", "truncate", "error"] = option("what happens to conversations longer than a row", default="drop")
    roles: tuple[str, ...] = option("whose turns are learned", default=("assistant",))
    turns: Literal["together", "apart"] = option("apart: an example of each learned turn", default="together")
    packing: bool = option("several conversations share a row and do not see each other", default=True)
    gsm8k: Literal["plain", "think"] = option("GSM8K rows: the answer as it is, or in <think> and <answer>", default="plain")
    held_out: float = option("share of the conversations that is never trained on and scored at every look", least=0, below=1, default=0.05)
    held_out_data: str | None = option("score these instead, and hold nothing else out", default=None)
    epochs: int = option("how often the conversations are read, reshuffled each time", least=1, default=1)
    batch_tokens: int = option("tokens a step, padding included", default=16384)
    micro_tokens: int = option("tokens that go through the model at a time; changes nothing but memory", least=1, default=16384)
    look_examples: int = option("held-out conversations a look scores; the handed-over model is scored on all", least=2, default=256)
    patience: int = option("stop early once so many looks together improve the held-out loss by less than --worth; refused where noise "
                           "hides that; 0: never", least=0, default=0)
    worth: float = option("with --patience: what is worth going on for, in the unit of the looks", above=0, default=0.01)


@dataclass(frozen=True, kw_only=True)
class Sft(Tuning):
    """Teach a model from conversations, the whole of it or a LoRA adapter. An interrupted run in --out goes on where it stopped."""


@dataclass(frozen=True, kw_only=True)
class Distill(Tuning):
    """Teach a student what a teacher knows, by its logits or in its words. An interrupted run in --out goes on where it stopped."""

    model: str | None = option("the student: a checkpoint, Hugging Face folder, GGUF file or fetched name", short="--student", default=None)
    student_layers: int | None = option("instead of --student: so many of the teacher's layers, evenly spaced, the first and the last "
                                        "among them", least=1, default=None)
    teacher: str | None = option("who teaches; may be left out where its logits are stored", default=None)
    how: Literal["online", "stored", "text"] = option("by logits as the student reads, by stored ones, or by text that the teacher writes "
                                                      "to the data's prompts, which any tokenizer can read", default="online")
    divergence: Literal["forward", "reverse", "jsd"] = option("KL(teacher ‖ student), KL(student ‖ teacher), or Jensen–Shannon",
                                                              default="forward")
    temperature: float = option("of both distributions; the teacher's term counts its square times", above=0, default=1.0)
    kd_weight: float = option("of the teacher's term", least=0, default=1.0)
    ce_weight: float = option("of the text's own cross-entropy", least=0, default=0.0)
    beta: float = option("the teacher's share in the mixture of jsd", least=0, most=1, default=0.5)
    teacher_logits: str | None = option("with --how stored: the folder, made on first use; RUN/teacher-logits", default=None)
    top_k: int = option("with --how stored: likeliest tokens stored in each place", least=1, default=64)
    max_new: int = option("with --how text: most tokens the teacher writes to a prompt", least=1, default=256)
    sample_temperature: float = option("with --how text: of the teacher's sampling; 0 is greedy", least=0, default=0.0)

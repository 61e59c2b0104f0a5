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
    minutes: float | None = option("stop after this much wall time, all sittings together", default=None)
    tokens: int | None = option("stop after this many training tokens", default=None)
    max_bytes: int | None = option("also write an artifact of at most this many bytes: quantised, compressed, re-scored", default=None)
    epochs: int = option("how often the corpus may be read, reshuffled each time", default=1)
    length: int = option("tokens a row", default=512)
    batch_tokens: int = option("tokens a step", default=32768)
    micro_tokens: int = option("tokens that go through the model at a time; changes nothing but memory", default=65536)
    shape: Literal["qwen3", "assay"] = option("qwen3 opens in transformers; assay has relu², a soft cap and no gate", default="qwen3")
    optimizer: Literal["muon", "adamw"] = option("for the matrices", default="muon")
    lr: float | None = option("peak rate of the matrices (muon 0.02, adamw 0.002)", default=None)
    lr_embed: float = option("peak rate of embedding and head under muon", default=0.01)
    weight_decay: float = option("of the matrices", default=0.1)
    schedule: Literal["wsd", "cosine"] = option("warm-up, flat, and down at the end; or a cosine", default="wsd")
    warmup: int = option("steps", default=40)
    decay: float = option("share of the run over which wsd goes down", default=0.5)
    clip: float = option("gradient norm", default=1.0)
    ema: float = option("decay of a moving average of the weights, which is scored and handed over; 0: none", default=0.0)
    every: int = option("steps between checkpoints, each with a look at held-out text; the first comes after step 1", default=500)
    look_documents: int = option("held-out documents a look scores; the handed-over model is scored on all", default=64)
    seed: int = option("seed", default=0)
    device: str | None = option("cpu or cuda (cuda where there is one)", default=None)

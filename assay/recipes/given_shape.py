"""Given shape: the architecture of a Hugging Face config.json, for pretraining from scratch, with initial weights by its family's rule.

The rule is transformers' own: every matrix and table is drawn from a normal distribution of the config's `initializer_range` (0.02 where it
says nothing), biases are 0, norms are the identity; GPT-2 divides what a layer adds to the stream by √(2 · layers). Families whose
weights are more than matrices, tables and norms (mixtures of experts, gpt-oss) are refused in a sentence.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.model.families import FAMILIES, config_from_hf
from assay.model.transformer import InitialSpread, ModelConfig
from assay.strict_json import read_json

MADE = ("qwen3", "assay")  # shapes that --depth makes
NOT_FROM_SCRATCH = {"qwen3_moe", "qwen2_moe", "gpt_oss", "assay"}
FROM_SCRATCH = ", ".join(name for name in FAMILIES if name not in NOT_FROM_SCRATCH)


@dataclass(frozen=True)
class GivenShape:
    model: ModelConfig
    spread: InitialSpread


def is_given(shape: str) -> bool:
    return shape not in MADE


def read_shape(shape: str, *, vocab: int, length: int) -> GivenShape:
    """`vocab` ids and rows of `length` tokens must fit into what the config says."""
    path = Path(shape) / "config.json" if Path(shape).is_dir() else Path(shape)
    if not path.is_file():
        raise UsageError(f"--shape {shape}: expected {' or '.join(MADE)}, or the path of a config.json of one of: {FROM_SCRATCH}")
    fields: dict[str, Any] = read_json(path, dict, error=UsageError)
    family = fields.get("model_type")
    if family in NOT_FROM_SCRATCH:
        raise UsageError(f"{path}: models of the family {family} cannot be made from scratch here: their initial weights follow no rule "
                         f"that is written down for them; expected one of: {FROM_SCRATCH}")
    if "tie_word_embeddings" not in fields and family != "gpt2":
        raise UsageError(f"{path}: does not say tie_word_embeddings, and there is no file whose tensors would; add true or false")
    model = config_from_hf(fields, (), str(path))
    if vocab > model.vocab:
        raise UsageError(f"{path}: has a vocabulary of {model.vocab:,}, and the corpus's tokenizer has {vocab:,} ids; raise vocab_size, or "
                         "build the corpus with the model's own tokenizer")
    if length > model.max_length:
        raise UsageError(f"{path}: has a context of {model.max_length:,} tokens, and --max-length is {length:,}; lower it, or raise "
                         "max_position_embeddings")
    wide = fields.get("initializer_range", 0.02)
    if not isinstance(wide, int | float) or not 0 < wide < 1 or not math.isfinite(wide):
        raise UsageError(f"{path}: initializer_range is {wide!r}; expected a number between 0 and 1")
    return GivenShape(model, InitialSpread(float(wide), divided=family == "gpt2"))

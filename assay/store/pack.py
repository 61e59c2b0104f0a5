"""A live model becomes the Contents of a checkpoint: foreign names, config, tokenizer, lineage, and its own answers to a probe."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from assay.model.families import config_to_hf, hf_layout, to_foreign
from assay.model.patch import Patch
from assay.model.probe import answer
from assay.model.stops import Stops
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig, Transformer
from assay.store.checkpoint import Contents
from assay.store.identity import code_digest, environment
from assay.store.peft import write_adapter


@dataclass(frozen=True)
class Ancestor:
    """Weights that this checkpoint came from or rests on: named by digest, with the place where they were."""

    weights: str
    path: str


@dataclass(frozen=True)
class Lineage:
    """What a proof may expect. `moved`: differs from the parent; `same`: equals it; `new`: nothing came before."""

    change: Literal["new", "moved", "same"] = "new"
    parent: Ancestor | None = None
    frozen: tuple[str, ...] = ()  # tensors that must equal the parent's, bit for bit
    movement_bound: float | None = None  # how far the optimizer could have moved one element since the parent
    taught_to_stop: bool = False  # the data ended its answers with a stop token, so generations must end
    weight_set: Literal["raw", "ema"] | None = None  # which of a run's two sets these weights are; None: there was one
    scored_set: Literal["raw", "ema"] | None = None  # which of them was scored; "ema" lies in the optimizer's file


def model_contents(model: Transformer, tokenizer: Tokenizer | None, stops: Stops, lineage: Lineage, *, dtype: torch.dtype = torch.float32,
                   run_config: Mapping[str, Any] | None = None, trainer: Mapping[str, Any] | None = None,
                   optimizer: Mapping[str, Tensor] | None = None) -> Contents:
    """A whole model. The tensors are live views where the dtype allows: BackgroundSaver or write() copies them."""
    weights = to_foreign(hf_layout(model.config), {name: p.detach().to(dtype) for name, p in model.named_parameters()})
    files = model_files(model.config, tokenizer, stops, dtype)
    facts = _facts(model.config, tokenizer, lineage, run_config)
    return Contents("model", weights, files, facts, answer(model)._asdict(), optimizer, trainer)


def adapter_contents(model: Transformer, patch: Patch, base: Ancestor, tokenizer: Tokenizer | None, lineage: Lineage, *,
                     rslora: bool = False, run_config: Mapping[str, Any] | None = None, trainer: Mapping[str, Any] | None = None,
                     optimizer: Mapping[str, Tensor] | None = None) -> Contents:
    """An adapter whose live model, base and patch together, is `model`."""
    fields, weights = write_adapter(model.config, patch, base.path, rslora=rslora)
    files = {"adapter_config.json": as_json(fields), **(tokenizer.files() if tokenizer else {})}
    facts = _facts(model.config, tokenizer, lineage, run_config) | {"base": dataclasses.asdict(base)}
    return Contents("adapter", weights, files, facts, answer(model)._asdict(), optimizer, trainer)


def model_files(config: ModelConfig, tokenizer: Tokenizer | None, stops: Stops, dtype: torch.dtype) -> dict[str, bytes]:
    """config.json, generation_config.json and the tokenizer's files, which agree on every special id."""
    eos = sorted(stops.stop_ids)
    ids = {"bos_token_id": stops.bos, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
    fields = config_to_hf(config, str(dtype).removeprefix("torch.")) | ids
    return {"config.json": as_json(fields), "generation_config.json": as_json(ids | {"do_sample": False}),
            **(tokenizer.files() if tokenizer else {})}


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _facts(config: ModelConfig, tokenizer: Tokenizer | None, lineage: Lineage, run_config: Mapping[str, Any] | None) -> dict[str, Any]:
    return dataclasses.asdict(lineage) | {
        "frozen": list(lineage.frozen), "model_config": dataclasses.asdict(config) | {"windows": list(config.windows)},
        "run_config": None if run_config is None else dict(run_config), "code": code_digest(), "environment": environment(),
        "tokenizer": tokenizer.digest if tokenizer else None, "template": tokenizer.template_digest if tokenizer else None}

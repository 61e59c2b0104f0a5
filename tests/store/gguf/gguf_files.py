"""GGUF files made for the tests: written by us, then taken apart and put together with something changed."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from assay.model.transformer import ModelConfig, Transformer
from assay.store.gguf import _value_type, write_gguf
from assay.store.gguf_header import read_gguf_header
from assay.testing.tiny_models import tiny_config
from tests.model.trained_tokenizers import byte_level

VOCAB = 512


def tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights, norms and biases included, so that nothing is 0 or 1 by convention."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm" in name)
            for name, parameter in Transformer(config).named_parameters()}


def made(path: Path, family: str = "llama", dtype: Any = "f16", scheme: str = "smollm") -> ModelConfig:
    config = tiny_config(family, vocab=VOCAB)
    write_gguf(path, config, tensors(config), byte_level(scheme), dtype)
    return config


def changed(source: Path, target: Path, metadata: dict[str, Any] | None = None, without: tuple[str, ...] = (),
            replaced: dict[str, tuple[np.ndarray, str]] | None = None) -> Path:
    """`source` with other keys and tensors; a replaced tensor is its raw bytes by row, and its type."""
    header = read_gguf_header(source)
    keys = {key: value for key, value in header.metadata.items() if key not in without} | (metadata or {})
    writer = gguf.GGUFWriter(target, keys["general.architecture"])
    for key, value in keys.items():
        if key != "general.architecture":
            writer.add_key_value(key, value, _value_type(value))
    data = source.read_bytes()
    raw = {}
    for name, info in header.tensors.items():
        rows = np.frombuffer(data[info.offset:info.offset + info.bytes], np.uint8).reshape(*info.shape[:-1], -1)
        raw |= {} if name in without else {name: (rows, info.type)}
    for name, (rows, type) in (raw | (replaced or {})).items():
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target

"""A command of Assay with a cause of the incident planted in its process: `python -m tests.incident.planted "CAUSE" VERB …`."""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from assay import cli
from assay.model.lora import LoraLinear
from assay.recipes import grpo
from assay.recipes.starting_model import AdapterModel
from assay.serving import policy_training
from assay.serving.engine_thread import EngineThread
from assay.serving.hosted_model import HostedModel
from assay.store.checkpoint import Contents
from assay.testing.fault_injection import Plant, in_place_of
from assay.zoo import catalogue


@in_place_of(grpo, "load_start")
def empty_fork(usual: Any, *given: Any, **named: Any) -> Any:
    """ART#651: the fork begins with an empty adapter."""
    start = usual(*given, **named)
    with torch.no_grad():
        for layer in start.model.modules():
            if isinstance(layer, LoraLinear):
                for left in layer.lefts:
                    left.zero_()
    return start


def other_weights(contents: Contents) -> Contents:
    """The first matrix of what is saved is turned upside down after its answers were recorded: garbage that opens without an error."""
    name = next(name for name, tensor in contents.weights.items() if tensor.dim() == 2)
    return replace(contents, weights={**contents.weights, name: contents.weights[name].flip(0).contiguous()})


@in_place_of(AdapterModel, "contents")
def garbage_adapter(usual: Any, self: AdapterModel, *given: Any, **named: Any) -> Contents:
    """ART#672: a saved adapter that is not the one that was trained, at every second save. What the server is handed is sound."""
    contents = usual(self, *given, **named)
    if contents.trainer:
        self.saves = getattr(self, "saves", 0) + 1  # type: ignore[attr-defined]
    return other_weights(contents) if contents.trainer and self.saves % 2 == 0 else contents  # type: ignore[attr-defined]


@in_place_of(policy_training, "model_contents")
def garbage_policy(usual: Any, *given: Any, **named: Any) -> Contents:
    return other_weights(usual(*given, **named))


@in_place_of(EngineThread, "take_weights")
def kept_prefixes(usual: Any, self: EngineThread, path: str, version: str) -> HostedModel:
    """Keys and values of prompts outlive the weights that made them: they are found by their ids."""
    def held() -> tuple[list[tuple[int, ...]], torch.Tensor]:
        return list(self.first.engine._prefixes), self.first.engine.slots.cache.all.clone()

    def hold(prefixes: list[tuple[int, ...]], keys: torch.Tensor) -> None:
        self.first.engine._prefixes = prefixes
        self.first.engine.slots.cache.all.copy_(keys)

    before = self.ask(held).result()
    found = usual(self, path, version)
    self.ask(lambda: hold(*before)).result()
    return found


OWN: Mapping[str, Plant] = {"fork that begins with an empty adapter": empty_fork,
                            "saved adapter that is not the trained one": garbage_adapter,
                            "saved policy that is not the served one": garbage_policy,
                            "prefix cache that outlives an adapter": kept_prefixes}


def main() -> None:
    cause, *command = sys.argv[1:]
    plant = (OWN[cause] if cause in OWN else catalogue()[cause].plant) if cause else lambda _: contextlib.nullcontext()
    with plant(Path()):
        cli.main(command)


if __name__ == "__main__":
    main()

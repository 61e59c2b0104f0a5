"""What a run trains and saves: the whole model, or an adapter on a base that stays as it is."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from assay.model.families import hf_layout, to_foreign
from assay.model.lora import LoraLinear
from assay.model.patch import Patch
from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.store.artifact import open_artifact
from assay.store.checkpoint import Checkpoint, Contents
from assay.store.peft import write_adapter
from assay.store.saving import Ancestor, Lineage, adapter_contents, model_contents


class Whole:
    """Every parameter is trained. `lineage` says how the checkpoint of a step stands to what came before it."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, stops: SpecialTokens, lineage: Callable[[int], Lineage]):
        self.model, self.tokenizer, self.stops, self.lineage = model, tokenizer, stops, lineage

    def trained(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    reachable = trained  # by a gradient, as the weights are now

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint's weight files hold, live, under the names it has there."""
        return to_foreign(hf_layout(self.model.config), {name: p.detach() for name, p in self.model.named_parameters()})

    def contents(self, step: int, run_config: Mapping[str, Any], trainer: Mapping[str, Any], optimizer: Mapping[str, Tensor]) -> Contents:
        return model_contents(self.model, self.tokenizer, self.stops, self.lineage(step), run_config=run_config, trainer=trainer,
                              optimizer=optimizer)

    @torch.no_grad()
    def restore(self, found: Checkpoint) -> None:
        tensors = open_artifact(found.folder).tensors
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])


class Adapter:
    """Low-rank layers are trained, everything else is the base's. `base` says where that lies and what its weights are."""

    def __init__(self, model: Transformer, base: Ancestor, tokenizer: Tokenizer, rslora: bool, lineage: Callable[[int], Lineage]):
        self.model, self.base, self.tokenizer, self.rslora, self.lineage = model, base, tokenizer, rslora, lineage

    def patch(self) -> Patch:
        """What has been learned so far, live."""
        return Patch(self.base.weights, {f"{name}.weight": module.parts() for name, module in self._layers().items()})

    def trained(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def reachable(self) -> list[str]:
        """A fresh adapter's left factors are 0, so that no gradient passes them to the right ones before the first step."""
        dead = {f"{name}.rights.{i}" for name, module in self._layers().items() for i, left in enumerate(module.lefts) if not left.any()}
        return [name for name in self.trained() if name not in dead]

    def _layers(self) -> dict[str, LoraLinear]:
        return {name: module for name, module in self.model.named_modules() if isinstance(module, LoraLinear)}

    def weights(self) -> dict[str, Tensor]:
        return write_adapter(self.model.config, self.patch(), self.base.path, rslora=self.rslora)[1]

    def contents(self, step: int, run_config: Mapping[str, Any], trainer: Mapping[str, Any], optimizer: Mapping[str, Tensor]) -> Contents:
        return adapter_contents(self.model, self.patch(), self.base, self.tokenizer, self.lineage(step), rslora=self.rslora,
                                run_config=run_config, trainer=trainer, optimizer=optimizer)

    def restore(self, found: Checkpoint) -> None:
        patch = open_artifact(found.folder, base=self.base.path).patch
        assert patch is not None, "a run that trains an adapter saves adapters"
        self.load(patch)

    @torch.no_grad()
    def load(self, patch: Patch) -> None:
        """The same layers, ranks and scales as this run's; other values."""
        for name, parts in patch.low_rank.items():
            module = self.model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(module, LoraLinear), f"{name} has no adapter here"
            for part, left, right in zip(parts, module.lefts, module.rights, strict=True):
                left.copy_(part.left)
                right.copy_(part.right)


Form = Whole | Adapter

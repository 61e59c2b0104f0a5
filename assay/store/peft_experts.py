"""PEFT adapters of stacked experts (`target_parameters`): one pair of factors for the matrices of all experts, to and from one for each.

PEFT wraps a module once for each adapted parameter, the last outermost: `experts.base_layer.lora_A` is gate_up_proj's where down_proj is
adapted too. Its A has the experts' rows one below the other, its B their columns in turns. gpt-oss has the rows of gate and up in turns.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from assay.errors import ArtifactError, UsageError
from assay.model.lora import LoraSite, stacked_experts
from assay.model.patch import LowRank
from assay.model.transformer import ModelConfig

LEAVES = ("gate_up_proj", "down_proj")  # in the order in which PEFT wraps them
STACKED = tuple(f"experts.{leaf}" for leaf in LEAVES)


def stacked_parameter(site: LoraSite) -> str:
    """model.layers.0.mlp.experts.gate_up_proj, of each expert's part of it."""
    module, _, leaf = site.foreign.rpartition(".")
    return f"{module.rpartition('.')[0]}.{leaf}"


def stacked_sites(config: ModelConfig, targets: Sequence[str], where: str) -> dict[str, list[LoraSite]]:
    """Parameter → the layers that it holds, of all that `target_parameters` names, by PEFT's own rule."""
    found: dict[str, list[LoraSite]] = {}
    for site in stacked_experts(config).values():
        name = stacked_parameter(site)
        if any(name == target or name.endswith(f".{target}") for target in targets):
            found.setdefault(name, []).append(site)
    idle = [target for target in targets if not any(name == target or name.endswith(f".{target}") for name in found)]
    if idle:
        raise UsageError(f"{where}: target_parameters names {', '.join(idle)}, which is no matrix of a {config.family}'s experts; merge it "
                         "with the tool that wrote it")
    return found


def factor_names(parameter: str, adapted: Sequence[str]) -> tuple[str, str]:
    """Names of A and B in the file, given all the parameters that are adapted."""
    module, _, leaf = parameter.rpartition(".")
    outside = sum(f"{module}.{later}" in adapted for later in LEAVES[LEAVES.index(leaf) + 1:])
    stem = module + ".base_layer" * outside
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def write_stacked(config: ModelConfig, parameter: str, parts: Sequence[LowRank]) -> tuple[Tensor, Tensor]:
    """A and B of all experts."""
    lefts = torch.stack([_in_turns(config, parameter, part.left) for part in parts], -1)  # out × rank × experts
    return torch.cat([part.right for part in parts]), lefts.flatten(1)


def read_stacked(config: ModelConfig, parameter: str, sites: Sequence[LoraSite], pair: Mapping[str, Tensor], names: tuple[str, str],
                 width: int, rank: int, scale: float, where: str) -> list[LowRank]:
    experts, rows = len(sites), sites[0].stop - sites[0].start
    for name, shape in zip(names, ((experts * rank, width), (rows, rank * experts)), strict=True):
        if name not in pair:
            raise ArtifactError(f"{where}: {name} is missing, though target_parameters names {parameter}; the adapter would do less than "
                                "it says")
        if tuple(pair[name].shape) != shape:
            raise ArtifactError(f"{where}: {name} has shape {list(pair[name].shape)}; {experts} experts and r = {rank} need {list(shape)}")
    rights, lefts = pair[names[0]].unflatten(0, (experts, rank)), pair[names[1]].unflatten(1, (rank, experts))
    return [LowRank(site.start, site.stop, _one_after_the_other(config, parameter, lefts[..., expert]), rights[expert], scale)
            for expert, site in enumerate(sites)]


def _in_turns(config: ModelConfig, parameter: str, left: Tensor) -> Tensor:
    if config.family != "gpt_oss" or not parameter.endswith(LEAVES[0]):
        return left
    return left.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def _one_after_the_other(config: ModelConfig, parameter: str, left: Tensor) -> Tensor:
    if config.family != "gpt_oss" or not parameter.endswith(LEAVES[0]):
        return left.contiguous()
    return left.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)

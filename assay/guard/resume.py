"""A run that goes on has what it saved in memory: every weight, every moment, every average, bit for bit."""

from collections.abc import Mapping

from torch import Tensor

from assay.store.checkpoint import OPTIMIZER, Checkpoint
from assay.store.identity import recorded_tensors
from assay.store.tensors import tensor_sha256
from assay.verdict import Verdict, proven, refuted


def check_resumed(weights: Mapping[str, Tensor], state: Mapping[str, Tensor], found: Checkpoint) -> Verdict:
    """`weights` and `state` are what the run keeps in a checkpoint's weight and optimizer files, live, under the names they have there."""
    wrong = _unlike(weights, recorded_tensors(found.manifest))
    cold = _unlike(state, found.manifest["tensors"].get(OPTIMIZER, {}))
    of = f"those of {found.folder.name}"
    if wrong or cold:
        return refuted("resumed", f"{len(wrong)} weights and {len(cold)} tensors of the optimizer in memory are not {of}: "
                                  f"{', '.join([*wrong, *cold][:3])}", weights=wrong, optimizer=cold)
    return proven("resumed", f"{len(weights)} weights and {len(state)} tensors of the optimizer are {of}, bit for bit",
                  weights=len(weights), optimizer=len(state))


def _unlike(live: Mapping[str, Tensor], recorded: Mapping[str, Mapping[str, str]]) -> list[str]:
    hashes = {name: tensor_sha256(tensor) for name, tensor in live.items()}
    return sorted(name for name in hashes.keys() | recorded.keys() if name not in recorded or hashes.get(name) != recorded[name]["sha256"])

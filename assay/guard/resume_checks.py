"""Resume checks: the state in memory is what was saved, bit for bit, and a rotation leaves the checkpoints that must stay."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from assay.errors import AssayError
from assay.store.checkpoint import OPTIMIZER, Checkpoint, latest_checkpoint, open_checkpoint, step_folders
from assay.store.digests import recorded_tensors
from assay.store.safetensors_files import tensor_sha256
from assay.verdict import Verdict, proven, refuted, unproven


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


def check_newest_checkpoint(folder: Path) -> Verdict:
    """Resuming takes the newest checkpoint; where it must fall back to an older one, that is said, with the reason."""
    found, passed_over = latest_checkpoint(folder)
    if passed_over:
        resumed = f"resumed from {found.folder.name} instead" if found else "there is none to resume from"
        return refuted("newest", f"{resumed}: {'; '.join(passed_over)}", resumed=found and found.folder.name,
                       passed_over=passed_over)
    if found is None:
        return unproven("newest", f"{folder} holds no checkpoint yet")
    return proven("newest", f"{found.folder.name}, the newest of {len(step_folders(folder))}, verifies",
                  resumed=found.folder.name)


def check_kept_checkpoints(wanted: Iterable[Path]) -> Verdict:
    """After a rotation: what was to stay (the newest, the best, parents that others name) is there and verifies."""
    problems, names = [], []
    for path in wanted:
        names.append(path.name)
        try:
            open_checkpoint(path)
        except AssayError as error:
            problems.append(str(error))
    if problems:
        return refuted("kept", f"{len(problems)} of {len(names)} checkpoints that were to stay are gone or damaged: "
                               f"{'; '.join(problems)}")
    if not names:
        return unproven("kept", "nothing was named that must stay")
    return proven("kept", f"{', '.join(names)} are there and verify")

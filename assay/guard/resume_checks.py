"""Resume checks: the checkpoint is this run's own, the state in memory is what was saved, and a rotation leaves what must stay."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from assay.errors import AssayError
from assay.store.checkpoint import Checkpoint, latest_checkpoint, open_checkpoint, recorded_state, step_folders
from assay.store.digests import recorded_tensors
from assay.store.ledger import Event
from assay.store.safetensors_files import tensor_sha256
from assay.verdict import Verdict, proven, refuted, unproven


def check_own_checkpoint(found: Checkpoint, events: Iterable[Mapping[str, Any]], changed: Iterable[str]) -> Verdict:
    """The run's ledger names this checkpoint by its digest. `changed` says which options its manifest has otherwise than the run.

    A run that was killed may have written its last save without having named it: then the manifest must hold, word for word, the
    options of the session that began to save it, folder included.
    """
    name, changed = found.folder.name, list(changed)
    digests, begun = saves_on_record(events)
    if changed:
        return refuted("own", f"{name} was saved with other options than this run's: {', '.join(changed)}; move it away", changed=changed)
    if not digests and not begun:
        return unproven("own", f"the ledger names no save, so nothing says that {name} is this run's", optional=True)
    if name in digests:
        same = digests[name] == found.digest
        words = f"{name} is {found.digest[:12]}, and the ledger says that {digests[name][:12]} was saved"
        return proven("own", words, digest=found.digest) if same else refuted(
            "own", f"{words}: it is another run's, or was replaced; move it away, or put the one that was saved back", digest=found.digest)
    if name not in begun:
        return refuted("own", f"the ledger names no save of {name}: it is another run's; move it away", digest=found.digest)
    if found.facts.get("run_config") != begun[name]:
        return refuted("own", f"{name} does not hold the options of the sitting that began to save it: it is another run's; move it away",
                       digest=found.digest)
    return proven("own", f"{name} was written before its digest could be: its options and folder are this run's", digest=found.digest)


def saves_on_record(events: Iterable[Mapping[str, Any]]) -> tuple[dict[str, str], dict[str, Any]]:
    """Saves that a ledger records, by name: the digests of what was saved; and, of saves that were begun and are not known to be done, the
    options of the session that began them."""
    digests: dict[str, str] = {}
    begun: dict[str, Any] = {}
    options: Any = None
    for event in events:
        kind, name = event["kind"], str(event.get("checkpoint") or event.get("path"))
        if kind in (Event.START, Event.RESUME):
            options = event.get("config")
        elif kind in (Event.SAVE, Event.SAVED, Event.RETIRE, Event.SET_ASIDE):
            digests.pop(name, None)
            begun.pop(name, None)
            if kind == Event.SAVE:
                begun[name] = options
            elif kind == Event.SAVED:
                digests[name] = event["digest"]
    return digests, begun


def check_resumed(weights: Mapping[str, Tensor], state: Mapping[str, Tensor], found: Checkpoint) -> Verdict:
    """`weights` and `state` are what the run keeps in a checkpoint's weight and optimizer files, live, under the names they have there."""
    wrong = _unlike(weights, recorded_tensors(found.manifest))
    cold = _unlike(state, recorded_state(found.manifest))
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
    """Check, after a rotation, that what was to stay (the newest, the best, parents that others name) is there and verifies."""
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

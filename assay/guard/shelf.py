"""Checks on a run's checkpoints as a set: the newest can be resumed from, and no rotation took one that was to stay."""

from collections.abc import Iterable
from pathlib import Path

from assay.errors import AssayError
from assay.store.checkpoint import latest, open_checkpoint, steps
from assay.verdict import Verdict, proven, refuted, unproven


def check_newest(folder: Path) -> Verdict:
    """Resuming takes the newest checkpoint; where it must fall back to an older one, that is said, with the reason."""
    found, passed_over = latest(folder)
    if passed_over:
        resumed = f"resumed from {found.folder.name} instead" if found else "there is none to resume from"
        return refuted("newest", f"{resumed}: {'; '.join(passed_over)}", resumed=found and found.folder.name,
                       passed_over=passed_over)
    if found is None:
        return unproven("newest", f"{folder} holds no checkpoint yet")
    return proven("newest", f"{found.folder.name}, the newest of {len(steps(folder))}, verifies",
                  resumed=found.folder.name)


def check_kept(wanted: Iterable[Path]) -> Verdict:
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

"""Sittings of the pretraining recipe, small and unproven, that can be struck after any step; and what a run leaves, bit for bit."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.outcome import RunOutcome
from assay.recipes import pretrain, run
from assay.recipes.options import Pretrain
from assay.recipes.trainer import Trainer
from assay.store.checkpoint import open_checkpoint, step_folder
from assay.store.ledger import Ledger
from assay.testing.tiny_training import NoProver, tiny_corpus
from assay.zoo.run_faults import hand_nothing_over

ROWS, LENGTH, EVERY = 16, 16, 6
STEPS = 26  # the corpus gives 20 such steps an epoch
Strike = Callable[[Trainer], object]


def options(out: Path, **changed: Any) -> Pretrain:
    usual: dict[str, Any] = {
        "corpus": str(tiny_corpus().folder), "out": str(out), "depth": 1, "max_length": LENGTH, "batch_tokens": ROWS * LENGTH,
        "micro_batch_tokens": 8 * LENGTH, "tokens": STEPS * ROWS * LENGTH, "num_train_epochs": 2, "save_steps": EVERY, "warmup_steps": 3,
                             "eval_documents": 4,
        "device": "cpu"}
    return Pretrain(**(usual | changed))


def sit(config: Pretrain, *, after: dict[int, Strike] | None = None, say: Callable[[str], None] = lambda _: None,
        handing_over: bool = False) -> RunOutcome:
    """`after[n]` is done once n steps are. Saves stay unproven, which takes a fresh process and is another test's matter."""
    over, strikes = Trainer.over, dict(after or {})

    def struck(trainer: Trainer) -> bool:
        strikes.pop(trainer.done, lambda _: None)(trainer)
        return over(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Prover", NoProver)
        patch.setattr(Trainer, "over", struck)
        if not handing_over:
            patch.setattr(pretrain, "hand_over", hand_nothing_over)
            patch.setattr(pretrain, "write_down", lambda *_, **__: None)
        return pretrain.pretrain(config, say)


def left_by(config: Pretrain, steps: int = STEPS) -> dict[str, Any]:
    """Everything that must be equal where two runs are the same: weights, moments, what was read, what was measured."""
    out = Path(config.out)
    last = open_checkpoint(step_folder(out / "checkpoints", steps))
    trainer = {key: value for key, value in (last.trainer() or {}).items() if key not in ("seconds", "saving")}
    metrics = [{key: value for key, value in row.items() if key != "seconds"} for row in rows(out / "metrics.jsonl")]
    return {"tensors": last.manifest["tensors"], "trainer": trainer, "metrics": metrics, "eval": rows(out / "eval.jsonl")}


class Now:
    """A clock that goes by so many seconds each time it is looked at."""

    def __init__(self, tick: float = 0.0) -> None:
        self.seconds, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.seconds += self.tick
        return self.seconds


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def events(config: Pretrain, kind: str) -> list[dict[str, Any]]:
    return [event for event in Ledger(Path(config.out) / "ledger.jsonl").events() if event["kind"] == kind]


def saved_steps(config: Pretrain) -> list[int]:
    names = [path.name for path in (Path(config.out) / "checkpoints").iterdir()]
    return sorted(int(name.removeprefix("step-")) for name in names if name.startswith("step-"))


def in_a_fork(act: Callable[[], int]) -> int:
    """The exit code of `act` in a child of this process, or minus the signal that ended it."""
    import os
    import traceback

    child = os.fork()
    if child == 0:
        code = 99
        with contextlib.suppress(BaseException):
            try:
                code = act()
            except BaseException:
                traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

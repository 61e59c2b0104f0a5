"""Supervised fine-tuning: pretraining's loss with other weights, on conversations; the whole model or an adapter."""

from collections.abc import Callable
from typing import Any

from assay.learn.objectives import Objective, next_token
from assay.recipes.handover import hand_over
from assay.recipes.options import Sft
from assay.recipes.run import say_now
from assay.recipes.tuning import Tuned
from assay.verdict import Verdict


def sft(config: Sft, say: Callable[[str], None] = say_now) -> tuple[list[Verdict], int | None]:
    """The verdicts on what was handed over, and the signal that interrupted the run, if one did: then nothing was."""
    work = FineTuning(config, say)
    with work.run.sitting():
        if (interrupted := work.go()) is not None:
            return [], interrupted
        _, verdicts = hand_over(work.run, work.looks.best_checkpoint(work.run.checkpoints), work.looks, work.score_all)
        return verdicts, None


class FineTuning(Tuned):
    def objective(self, config: Any, device: str, say: Callable[[str], None]) -> Objective:
        return next_token

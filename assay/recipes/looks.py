"""Looks at held-out text during a run: the same documents each time, so that two looks can be compared document by document."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from assay.evaluation.held_out_loss import HeldOut
from assay.guard.conclusion_checks import check_generalisation_gap
from assay.model.transformer import Transformer
from assay.recipes.run import Run, append_rows, rewrite_rows
from assay.statistics.early_stopping import choose_best
from assay.store.checkpoint import step_folder
from assay.store.ledger import Event
from assay.strict_json import read_json_lines
from assay.verdict import Outcome

ENOUGH_FOR_A_TREND = 5


class Looks:
    """History of one run. `looks.jsonl` keeps every document's loss, so that a resumed run remembers what it saw.

    `score` takes the same held-out documents at every look. From step `repeats_from` on the training text is read again:
    before, every training loss is of text that was never seen. `also` gives more columns of a look's line of metrics. What was
    saved must score as it did then, within a share of `scale`: of the mean loss, unless that may come near 0.
    """

    def __init__(self, run: Run, score: Callable[[Transformer], HeldOut], *, repeats_from: int, device: str,
                 also: Callable[[Transformer], Mapping[str, float]] | None = None, scale: float | None = None):
        self.run, self.score, self.repeats_from, self.device = run, score, repeats_from, device
        self.also, self.scale = also, scale
        self.file = run.folder / "looks.jsonl"
        self.steps: list[int] = []
        self.losses: list[np.ndarray] = []  # per document
        self.train: list[float] = []  # mean training loss since the look before
        self._since: list[float] = []

    @property
    def latest_step(self) -> int | None:
        return self.steps[-1] if self.steps else None

    def saw(self, loss: float) -> None:
        self._since.append(loss)

    def look(self, model: Transformer, step: int, weight_set: str | None = None) -> HeldOut:
        """`weight_set` names what the model holds now, where the run keeps more than one set."""
        found = self.score(model)
        train = sum(self._since) / len(self._since) if self._since else found.loss
        self._remember(step, found.per_document, train)
        append_rows(self.file, [{"step": step, "train": train, "per_document": found.per_document.tolist()}])
        named = {} if weight_set is None else {"eval_weight_set": weight_set}
        scored = found.estimate
        unit = found.unit.replace(" ", "_")
        self.run.record(step - 1, eval_loss=found.loss, **named, **{f"eval_{unit}": scored.mean}, eval_low=scored.low,
                        eval_high=scored.high, eval_documents=scored.n, **({} if self.also is None else self.also(model)))
        of = f" ({weight_set} weights)" if weight_set else ""
        self.run.say(f"step {step}: held-out {scored} {found.unit}{of}, train loss {train:.4f}")
        self._say_gap(step)
        return found

    def recall(self) -> None:
        """What was seen before the run was interrupted, up to the step it goes on from."""
        rows = [row for row in read_json_lines(self.file) if row["step"] <= self.run.going_on_from]
        rewrite_rows(self.file, rows)
        for row in rows:
            self._remember(row["step"], np.array(row["per_document"]), row["train"])
        self._since = [row["loss"] for row in read_json_lines(self.run.metrics_file)
                       if "loss" in row and row["step"] >= (self.latest_step or 0)]

    def best_step(self) -> int:
        return self.steps[choose_best(self.losses).best]

    def best_checkpoint(self, checkpoints: Path) -> Path:
        return step_folder(checkpoints, self.best_step())

    def verdict_in_words(self) -> str:
        return choose_best(self.losses).reason if len(self.losses) > 1 else "there was one look"

    def _remember(self, step: int, per_document: np.ndarray, train: float) -> None:
        self.steps.append(step)
        self.losses.append(per_document)
        self.train.append(train)
        self._since = []

    def _say_gap(self, step: int) -> None:
        """Of text that is new nothing can be learned by heart: a gap can open only once the corpus is read again."""
        since = [i for i, seen in enumerate(self.steps) if seen > self.repeats_from]
        if len(since) < ENOUGH_FOR_A_TREND:
            return
        verdict = check_generalisation_gap([self.train[i] for i in since], [float(self.losses[i].mean()) for i in since])
        if verdict.outcome is Outcome.REFUTED:
            self.run.say(f"step {step}: {verdict.reason}")
            self.run.ledger.append(Event.GAP, step=step, verdicts=[verdict.to_json()])

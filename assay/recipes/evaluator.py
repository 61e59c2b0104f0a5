"""Evaluation during a run, on the same held-out documents each time, so that two can be compared; and early stopping by what it shows."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut
from assay.guard.conclusion_checks import check_early_stopping, check_generalisation_gap, check_same_held_out
from assay.model.transformer import Transformer
from assay.recipes.run import Run, append_json_rows, rewrite_json_rows
from assay.statistics.early_stopping import StoppingRule, choose_best, paired_noise, plan_stopping, should_stop
from assay.statistics.estimate import Estimate
from assay.store.checkpoint import step_folder
from assay.store.ledger import Event
from assay.strict_json import read_json_lines
from assay.verdict import Outcome

ENOUGH_FOR_A_TREND = 5


class EvalHistory:
    """Every evaluation of a run. `eval.jsonl` keeps every document's loss, so that a resumed run remembers what it saw."""

    def __init__(self, run: Run):
        self.run, self.file = run, run.folder / "eval.jsonl"
        self.steps: list[int] = []
        self.losses: list[np.ndarray] = []  # per document, nats a token
        self.tokens: np.ndarray | None = None  # that count in each document, the same each time, where the printed score weighs by them
        self.train: list[float] = []  # mean training loss since the evaluation before
        self.digest: str | None = None  # of what was scored, the same each time

    @property
    def latest_step(self) -> int | None:
        return self.steps[-1] if self.steps else None

    def add(self, step: int, per_document: np.ndarray, train: float, digest: str | None, *, tokens: np.ndarray | None = None,
            **more: Any) -> None:
        """`digest` is of what was scored: where it is not what was scored before, the run stops and nothing is decided by it. `tokens`
        counted in each document, where the printed score weighs them by it."""
        self._require_same(digest)
        self._remember(step, per_document, train, tokens)
        counted = {} if tokens is None else {"tokens": tokens.tolist()}
        append_json_rows(self.file, [{"step": step, "train": train, "held_out": digest, "per_document": per_document.tolist(), **counted,
                                      **more}])

    def recall(self) -> list[dict[str, Any]]:
        """Recall the evaluations made before the run was interrupted, up to the step that it resumes from."""
        rows = [row for row in read_json_lines(self.file) if row["step"] <= self.run.going_on_from]
        rewrite_json_rows(self.file, rows)
        for row in rows:
            self._require_same(row.get("held_out"))
            tokens = row.get("tokens")
            self._remember(row["step"], np.array(row["per_document"]), row["train"], None if tokens is None else np.array(tokens))
        return rows

    def at(self, step: int) -> np.ndarray:
        return self.losses[self.steps.index(step)]

    def _require_same(self, digest: str | None) -> None:
        verdict = check_same_held_out(self.digest, digest)
        if verdict.outcome is not Outcome.UNPROVEN:
            self.run.judge(Event.HELD_OUT, [verdict])
        self.digest = digest or self.digest

    @property
    def scores(self) -> list[np.ndarray]:
        """Losses per document, weighed so that their mean is the loss over all tokens, which is printed."""
        return [losses if self.tokens is None else losses * self.tokens / self.tokens.mean() for losses in self.losses]

    def score_at(self, step: int) -> np.ndarray:
        return self.scores[self.steps.index(step)]

    def _remember(self, step: int, per_document: np.ndarray, train: float, tokens: np.ndarray | None = None) -> None:
        self.steps.append(step)
        self.losses.append(per_document)
        self.tokens = tokens if tokens is not None else self.tokens
        self.train.append(train)


class HeldOutEvaluator:
    """Scores held-out text. `score` takes the same documents each time. From step `repeats_from` on the training text is read again:
    before, every training loss is of text that was never seen. What was saved must score as it did then, within a share of `scale`:
    of the mean loss, unless that may come near 0.
    """

    def __init__(self, run: Run, score: Callable[[Transformer], HeldOut], *, repeats_from: int, device: str, scale: float | None = None):
        self.run, self.score, self.repeats_from, self.device, self.scale = run, score, repeats_from, device, scale
        self.history = EvalHistory(run)
        self._since: list[float] = []  # training losses since the last evaluation, of an earlier session

    def recall(self) -> None:
        self.history.recall()
        seen = self.history.latest_step or 0
        self._since = [row["loss"] for row in read_json_lines(self.run.metrics_file) if "loss" in row and row["step"] >= seen]

    def evaluate(self, model: Transformer, step: int, losses: Sequence[float], *, weight_set: str | None = None,
                 columns: Mapping[str, float] | None = None) -> HeldOut:
        """`losses` are those of training since the last time, `weight_set` what the model holds now where a run keeps two sets,
        `columns` more of the line of metrics."""
        with self.run.spent.part("evaluation"):
            found = self.score(model)
        since, self._since = [*self._since, *losses], []
        train = sum(since) / len(since) if since else found.loss
        self.history.add(step, found.per_document, train, found.digest, tokens=found.token_counts)
        named = {} if weight_set is None else {"eval_weight_set": weight_set}
        scored, unit = found.estimate, found.unit.replace(" ", "_")
        self.run.record(step - 1, eval_loss=found.loss, **named, **{f"eval_{unit}": scored.mean}, eval_low=scored.low,
                        eval_high=scored.high, eval_documents=scored.n, **(columns or {}))
        of = f" ({weight_set} weights)" if weight_set else ""
        self.run.say(f"step {step}: held-out {scored} {found.unit}{of}, train loss {train:.4f}")
        self._say_gap(step)
        self._tell_more(step, found)
        return found

    def _tell_more(self, step: int, found: HeldOut) -> None:
        """Record what was measured beside the loss: a line of metrics; of the trained model also its message and its doubts."""
        if found.columns:
            self.run.record(step - 1, **found.columns)
        if step and found.words:
            self.run.say(f"step {step}: {found.words}")
        for sentence in found.doubts if step else ():
            self.run.say(f"step {step}: {sentence}")
            self.run.log(Event.WARNING, step=step, reason=sentence)

    def best_step(self) -> int:
        """The step that scored best of those whose weights are kept, in a checkpoint or in memory until they are."""
        kept = self._kept()
        return kept[choose_best([self.history.score_at(step) for step in kept]).best]

    def _kept(self) -> list[int]:
        return [step for step in self.history.steps if step not in self.run.unsaved]

    @property
    def latest_step(self) -> int | None:
        return self.history.latest_step

    def best_losses(self) -> np.ndarray:
        return self.history.at(self.best_step())

    def best_checkpoint(self) -> Path | None:
        return step_folder(self.run.checkpoints, self.best_step()) if self._kept() else None

    def best_in_words(self) -> str:
        scores = self.history.scores
        if len(scores) < 2:
            return "there was one evaluation"
        found = choose_best(scores)
        lost = self.history.steps[found.best]
        if lost not in self.run.unsaved:
            return found.reason
        best = self.best_step()
        return (f"the best evaluation (step {lost}, {scores[found.best].mean():.4g}) was not saved: {self.run.unsaved[lost]}; the best of "
                f"what was saved is step {best} ({self.history.score_at(best).mean():.4g})")

    def _say_gap(self, step: int) -> None:
        """Report the generalisation gap. New text cannot be memorised: a gap can open only once the corpus is read again."""
        history = self.history
        since = [i for i, seen in enumerate(history.steps) if seen > self.repeats_from]
        if len(since) < ENOUGH_FOR_A_TREND:
            return
        verdict = check_generalisation_gap([history.train[i] for i in since], [float(history.scores[i].mean()) for i in since])
        if verdict.outcome is Outcome.REFUTED:
            self.run.say(f"step {step}: {verdict.reason}")
            self.run.log(Event.GAP, step=step, verdicts=[verdict.to_json()])


def interval_columns(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Columns of a line of metrics: each estimate with the ends of its interval."""
    return {f"{name}{end}": value for name, estimate in estimates.items()
            for end, value in (("", estimate.mean), ("_low", estimate.low), ("_high", estimate.high))}

# ---------------------------------------------------------------- early stopping


def stopping_rule(patience: int, worth: float, *, schedule: str, steps: int | None, every: int) -> StoppingRule | None:
    """The early-stopping rule of the options, or None; a rule that makes no sense is refused before training."""
    if not patience:
        return None
    if steps is None:
        raise UsageError("--early-stopping-patience shares its risk of a false stop among the evaluations to come, and --minutes does not "
                         "say how many come; bound the run by steps, tokens or epochs")
    if schedule == "wsd":
        raise UsageError("--early-stopping-patience with --lr-scheduler-type wsd: the loss falls most on the way down at the end, which a "
                         "run that stops before it never sees; give --lr-scheduler-type cosine")
    return StoppingRule(worth, patience, steps // every)


class EarlyStopping:
    """Early stopping, only where a run's evaluations show that it improves no more, and their noise lets that be seen.

    Those at multiples of `every` count, so that they lie evenly. The rule is compared with their noise once, just before it may stop.
    Without a `rule` a run is never stopped.
    """

    def __init__(self, run: Run, history: EvalHistory, rule: StoppingRule | None, every: int):
        self.run, self.history, self.rule, self.every = run, history, rule, every
        self.reason: str | None = None  # once it has stopped the run
        self._planned = False

    def judge(self, step: int) -> None:
        """Decide whether to stop, after every evaluation and after a resume; a function of the evaluations alone."""
        rule, seen = self.rule, [self.history.score_at(step) for step in self.history.steps if step and step % self.every == 0]
        if rule is None or self.reason is not None or len(seen) < rule.before_first_look:
            return
        if not self._planned:
            self._refuse_noise(rule, seen[: rule.before_first_look])
        decision = should_stop(seen, rule)
        verdict = check_early_stopping(seen, planned=rule.evaluations, min_improvement=rule.min_improvement, patience=rule.patience)
        if decision.stop and verdict.outcome is Outcome.PROVEN:  # refuted where the noise has grown since: then the run goes on
            self.reason = decision.reason
            self.run.say(f"step {step}: stopping early: {decision.reason}")
            self.run.log(Event.EARLY_STOP, step=step, verdicts=[verdict.to_json()])

    def _refuse_noise(self, rule: StoppingRule, seen: list[np.ndarray]) -> None:
        try:
            plan_stopping(paired_noise(seen[-1 - rule.patience], seen[-1]), rule.min_improvement, patience=rule.patience,
                          evaluations=rule.evaluations)
        except UsageError as error:
            raise UsageError(f"{error}. The run goes on from here with another --early-stopping-patience or --early-stopping-threshold, "
                             "or with --early-stopping-patience 0") from None
        self._planned = True

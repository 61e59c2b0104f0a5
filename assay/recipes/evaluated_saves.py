"""Evaluated saves: checkpoints of fine-tuning with the evaluations that go with them, for the recipe to call."""

from assay.recipes.conversations import Conversations
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator
from assay.recipes.run import Run
from assay.recipes.trainer import Trainer
from assay.store.ledger import Event


class EvaluatedSaves:
    """`resume` and `save_start` before the loop, `save_evaluated` and `save_unevaluated` in it, `finish` after it. What is saved is what
    was evaluated; what moved and what did not is accounted for first.
    """

    def __init__(self, trainer: Trainer, data: Conversations, evaluator: HeldOutEvaluator, early: EarlyStopping):
        self.run: Run = trainer.run
        self.trainer, self.data, self.evaluator, self.early = trainer, data, evaluator, early

    def resume(self) -> None:
        """Resume from the newest checkpoint, if there is one, and recall the evaluations up to it."""
        if (saved := self.run.newest()) is not None:
            self.trainer.resume(saved, self.data.check_same((saved.trainer() or {})["data"]))
        self.evaluator.recall()
        self.early.judge(self.trainer.done)

    def save_start(self) -> None:
        """Save, prove and evaluate the starting model before step 1, where nothing is saved yet."""
        self.trainer.save(self.data.facts(self.trainer.done))
        if self.trainer.done == 0 and not self.evaluator.history.steps:
            self.evaluator.evaluate(self.trainer.model, 0, [])

    def save_evaluated(self) -> None:
        trainer = self.trainer
        trainer.account()
        losses = trainer.new_losses()
        self.evaluator.evaluate(trainer.model, trainer.done, losses)
        if verdicts := self.data.check_losses(losses, trainer.done, trainer.schedule):
            self.run.judge(Event.STEP, verdicts)
        self._save()
        self.early.judge(trainer.done)

    def save_unevaluated(self) -> None:
        self.trainer.account()
        self._save()

    def finish(self) -> None:
        """The step that the loop ended with is saved, unless that was done; how often the data was read is written down. Where a signal
        ended the loop, the uninterrupted run would not have been evaluated here."""
        trainer, data = self.trainer, self.data
        if self.run.interrupted is None and self.evaluator.latest_step != trainer.done:
            self.save_evaluated()
        elif trainer.saved != trainer.done:
            self.save_unevaluated()
        trainer.finish(data.times_read(self.run, trainer.done), data.rows, self.evaluator.best_checkpoint())

    def _save(self) -> None:
        self.trainer.save(self.data.facts(self.trainer.done), best=self.evaluator.best_checkpoint())

"""Evaluated saves: checkpoints of fine-tuning with the evaluations that go with them, for the recipe to call."""

from assay.recipes.conversations import Conversations
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator
from assay.recipes.trainer import Trainer
from assay.store.ledger import Event


class EvaluatedSaves:
    """`resume` before the loop, `save_evaluated` and `save_unevaluated` in it, `save_last` after it. What is saved is what was evaluated;
    what moved and what did not is accounted for first.
    """

    def __init__(self, trainer: Trainer, data: Conversations, evaluator: HeldOutEvaluator, early: EarlyStopping):
        self.run, self.trainer, self.data, self.evaluator, self.early = trainer.run, trainer, data, evaluator, early

    def resume(self) -> None:
        """From the newest checkpoint, where there is one, with what the evaluations up to it found."""
        if (saved := self.run.newest()) is not None:
            self.trainer.resume(saved, self.data.check_same((saved.trainer() or {})["data"]))
        self.evaluator.recall()
        self.early.judge(self.trainer.done)

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

    def save_last(self) -> None:
        """Of the step that the loop ended with, unless that was done. Where a signal ended it, the uninterrupted run would not have been
        evaluated here."""
        if self.run.interrupted is None and self.evaluator.latest_step != self.trainer.done:
            self.save_evaluated()
        elif self.run.interrupted is not None and self.trainer.saved != self.trainer.done:
            self.save_unevaluated()

    def _save(self) -> None:
        self.trainer.save(self.data.facts(self.trainer.done), best=self.evaluator.best_checkpoint())

"""KTO: learning from single answers that were called desirable or undesirable; the whole model or an adapter, against its parent."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from assay.evaluation.held_out_feedback import ScoredFeedback
from assay.evaluation.held_out_loss import HeldOut
from assay.guard.conclusion_checks import check_budget
from assay.guard.kto_checks import (
    check_feedback_direction,
    check_kl_estimate,
    check_kto_loss_at_reference,
    check_kto_moves,
    feedback_doubts,
    preflight_kto,
)
from assay.guard.loss_preflight import sample_rows
from assay.guard.training_guards import LEARNING_SHARE, check_detectors
from assay.learn.unpaired import kto_objective
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.outcome import RunOutcome
from assay.recipes.conversations import evaluated_every, refuse_nonsense
from assay.recipes.dpo import pairs_in
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator, stopping_rule
from assay.recipes.feedback_data import FeedbackData, describe_feedback, kto_settings, load_feedback
from assay.recipes.hand_over import hand_over, void_if_refuted, write_down
from assay.recipes.kto_options import Kto
from assay.recipes.memory_plan import record_use
from assay.recipes.preference_data import ask_reference, check_parent_reference, reference_model
from assay.recipes.processes import follow, join_processes
from assay.recipes.run import Run, TimeSpent, open_run, print_line
from assay.recipes.sft import check_asked_scale, check_forked_loss, judge_written_adapter, micro_rows, tuning_optimizer, tuning_schedule
from assay.recipes.starting_model import StartingModel, load_start
from assay.recipes.trainer import SavePlan, Trainer
from assay.store.artifact import build_model, open_artifact
from assay.store.ledger import Event
from assay.store.remote import local_path
from assay.verdict import Verdict


def kto(config: Kto, say: Callable[[str], None] = print_line) -> RunOutcome:
    """An interrupted run hands nothing over; the same command goes on with it.

    Before every step the policy as it is reads the mismatched completions of the whole step, and their mean log-ratio is the KL that
    all examples of the step are compared with.
    """
    spent = TimeSpent()
    refuse_nonsense(config)
    objective = kto_objective(kto_settings(config))
    world, say = join_processes(config, say, shardable=True)
    device = world.device
    start = load_start(config, device, say)
    if world.rank > 0:
        return follow(world, start.model, objective, config, partial(tuning_optimizer, config, start))
    examples = load_feedback(config, start)
    schedule, every, micro = tuning_schedule(config, examples), evaluated_every(config.save_steps), micro_rows(config, examples)
    rule = stopping_rule(config.early_stopping_patience, config.early_stopping_threshold, schedule=config.lr_scheduler_type,
                         steps=examples.steps, every=every)
    optimizer = tuning_optimizer(config, start)
    for line in describe_feedback(config, start, examples, optimizer.param_groups[0]["lr"], device):
        say(line)
    with world, open_run(config, say, device, spent) as run:
        asked = ask_reference(examples, start, run.folder, micro, say)
        assert isinstance(asked, FeedbackData)
        data = asked.followed(start.model, micro)
        trainer = Trainer(run, start.weights, optimizer, objective, schedule, micro=micro, clip=config.max_grad_norm, order=data.order,
                          saves=SavePlan(every, data.last_step, config.save_minutes, paced=config.save_steps is None),
                          steps_before=start.steps_before, world=world)
        watched = WatchedFeedback(run, data, micro, config.eval_examples)
        evaluator = HeldOutEvaluator(run, watched.score, device=device, repeats_from=data.repeats_from, scale=1.0)
        early = EarlyStopping(run, evaluator.history, rule, every)

        def save(*, evaluate: bool) -> None:
            """What is saved is what was evaluated. What moved and what did not is accounted for first."""
            trainer.account()
            if evaluate:
                losses = trainer.new_losses()
                evaluator.evaluate(trainer.model, trainer.done, losses)
                watched.record(trainer.done)
                watched.judge_losses(trainer, losses)
            trainer.save(data.facts(trainer.done), best=evaluator.best_checkpoint())
            if evaluate:
                early.judge(trainer.done)

        with run.interruptible():
            if (saved := run.newest()) is not None:
                trainer.resume(saved, data.check_same((saved.trainer() or {})["data"]))
            evaluator.recall()
            early.judge(trainer.done)
            run.preflight([*preflight_feedback(trainer, data, start), *check_asked_scale(config, start)])
            trainer.save(data.facts(trainer.done))  # where nothing is saved yet: a save is made and proven before step 1
            if trainer.done == 0:
                if not evaluator.history.steps:
                    evaluator.evaluate(trainer.model, 0, [])
                    watched.record(0)
                if config.from_ is not None:
                    run.judge(Event.FORK, [check_forked_loss(local_path(config.from_), data, evaluator, trainer)])

            trainer.start_loop(data.facts(trainer.done), data.rows)
            with closing(trainer.steps(data.batches(run, trainer.done))) as steps:
                while not (trainer.over() or early.reason):
                    step = next(steps)
                    data.judge_step(run, step)
                    trainer.record(step, epoch=data.epoch_of(step.index), supervised_tokens=step.weight, examples=pairs_in(step.ids))
                    if trainer.save_due():
                        save(evaluate=True)
                    elif trainer.extra_save_due():
                        save(evaluate=False)
            trainer.end_loop()
            record_use(run, start.memory, device)
            if run.interrupted is not None and trainer.saved != trainer.done:
                save(evaluate=False)  # the uninterrupted run would not have been evaluated here
            elif run.interrupted is None and evaluator.latest_step != trainer.done:
                save(evaluate=True)
            trainer.finish(data.times_read(run, trainer.done), data.rows, evaluator.best_checkpoint())
        if run.interrupted is not None:
            return RunOutcome(run.folder, interrupted=run.interrupted)

        run.judge(Event.REFERENCE, check_parent_reference(data, start))
        handed = hand_over(run, evaluator, partial(score_all_feedback, data=data, rows=micro))
        judge_written_adapter(config, run, handed)
        direction, told = compare_feedback(run, data, start, trainer)
        void_if_refuted(run, handed.places, [direction])
        handed.verdicts.extend([direction, check_budget(trainer.schedule, trainer.done, early.reason)])
        write_down(run, handed, **told)
        return RunOutcome(run.folder, handed.verdicts, model=run.folder / "model", results={"held_out": handed.recorded.estimate, **told})

# ---------------------------------------------------------------- what is checked before step 1


def preflight_feedback(trainer: Trainer, data: FeedbackData, start: StartingModel) -> list[Verdict]:
    """The loss is the loss and begins where it must, the KL is the mismatched completions', the reference is the parent."""
    whole = data.batch(0)
    batch = trainer.first_micro_batch(whole)
    found = trainer.gradients(batch)
    with uncompiled():
        return [check_detectors(), *check_first_loss(trainer, data, float(batch.weight.sum()) * found[0] / pairs_in(batch.ids), batch.ids),
                *([check_kl_estimate(trainer.model, data.sample().to(trainer.device))] if data.settings.has_baseline else []),
                *check_parent_reference(data, start),
                *preflight_kto(trainer.model, trainer.objective, sample_rows(batch), data.settings, trainer.accumulate_alone),
                *trainer.check_precision(batch, found), *trainer.check_reach(found),
                *data.audit(start), *trainer.check_world(whole)]  # last: with --fsdp nobody holds the whole model afterwards


def check_first_loss(trainer: Trainer, data: FeedbackData, loss: float, ids: tuple[Any, ...]) -> list[Verdict]:
    """Nothing where the policy has left its reference already: a run that goes on."""
    if trainer.done:
        return []
    return [check_kto_loss_at_reference(loss, labels_of(data, ids), data.settings, trainer.model.compute_dtype)]


def labels_of(data: FeedbackData, ids: tuple[Any, ...]) -> torch.Tensor:
    read = {str(id) for row in ids for id in row}
    return torch.tensor([1.0 if pair.desirable else -1.0 for pair in data.train if pair.id in read])

# ---------------------------------------------------------------- evaluations


def score_all_feedback(model: Transformer, data: FeedbackData, rows: int) -> HeldOut:
    return data.score(model, rows).held_out


class WatchedFeedback:
    """Held-out answers at every evaluation: how far desirable and undesirable ones are apart, and what that does not tell."""

    def __init__(self, run: Run, data: FeedbackData, rows: int, count: int):
        self.run, self.data, self.rows, self.count = run, data, rows, count
        self.found: ScoredFeedback | None = None

    def score(self, model: Transformer) -> HeldOut:
        self.found = self.data.score(model, self.rows, self.count)
        return self.found.held_out

    def record(self, step: int) -> None:
        """One line of metrics, and what is to be said of it."""
        found = self.found
        assert found is not None, "an evaluation was made"
        columns = {"eval_accuracy": found.accuracy} | ({} if found.one_sided else {"eval_margin": found.margin()})
        if (bias := found.length_bias) is not None:
            columns["eval_length_bias"] = bias
        self.run.record(step - 1, **{f"{name}{end}": value for name, estimate in columns.items()
                                     for end, value in (("", estimate.mean), ("_low", estimate.low), ("_high", estimate.high))},
                        eval_kl=found.kl)
        if step == 0:
            return
        apart = "" if found.one_sided else f"margin {found.margin()}, "
        self.run.say(f"step {step}: {apart}on the right side of the KL {found.accuracy}")
        for sentence in feedback_doubts(None, found):
            self.run.say(f"step {step}: {sentence}")
            self.run.log(Event.WARNING, step=step, reason=sentence)

    def judge_losses(self, trainer: Trainer, losses: list[float]) -> None:
        """Those since the last evaluation; the first step of all is taken at the reference."""
        first, settings = trainer.done - len(losses), self.data.settings
        learning = [(loss, settings.at_reference(labels_of(self.data, self.data.order.ids(step))))
                    for step, loss in enumerate(losses, first) if step > 0 and trainer.schedule.multiplier(step) >= LEARNING_SHARE]
        self.run.judge(Event.STEP, [check_kto_moves([loss for loss, _ in learning], [due for _, due in learning])])


def compare_feedback(run: Run, data: FeedbackData, start: StartingModel, trainer: Trainer) -> tuple[Verdict, dict[str, Any]]:
    """On all answers held out, beside the parent: whether training went the right way, and what the bytes that were handed over hold."""
    before, trained = data.score(reference_model(start), trainer.micro), data.score(trainer.model, trainer.micro)
    after = data.score(build_model(open_artifact(run.folder / "model"), None).to(trainer.device), trainer.micro)
    verdict, said = check_feedback_direction(before, trained), feedback_doubts(before, after)
    margin = None if after.one_sided else asdict(after.margin())
    for sentence in (verdict.reason, *said):
        run.say(sentence)
    bias = after.length_bias
    return verdict, {"margin": margin, "accuracy": asdict(after.accuracy), "kl": after.kl, "length_bias": bias and asdict(bias),
                     "doubts": said}

"""Preference learning: DPO and its relatives on pairs of answers; the whole model or an adapter, against its parent."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any

from assay.evaluation.held_out_loss import HeldOut
from assay.evaluation.held_out_pairs import ScoredPairs
from assay.guard.conclusion_checks import check_budget
from assay.guard.loss_preflight import Gradients, sample_rows
from assay.guard.preference_checks import check_direction, check_loss_at_reference, check_loss_moves, doubts, preflight_preference
from assay.guard.training_guards import LEARNING_SHARE, check_detectors
from assay.learn.preference import preference
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.outcome import RunOutcome
from assay.recipes.conversations import evaluated_every, refuse_nonsense
from assay.recipes.dpo_options import Dpo
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator, stopping_rule
from assay.recipes.hand_over import hand_over, void_if_refuted, write_down
from assay.recipes.memory_plan import record_use
from assay.recipes.preference_data import (
    PreferenceData,
    ask_reference,
    check_parent_reference,
    describe_pairs,
    load_preferences,
    reference_model,
    settings_of,
)
from assay.recipes.processes import follow, join_processes
from assay.recipes.run import Run, TimeSpent, open_run, print_line
from assay.recipes.sft import check_asked_scale, check_forked_loss, judge_written_adapter, micro_rows, tuning_optimizer, tuning_schedule
from assay.recipes.starting_model import StartingModel, load_start
from assay.recipes.trainer import SavePlan, Trainer
from assay.store.artifact import build_model, open_artifact
from assay.store.ledger import Event
from assay.store.remote import local_path
from assay.verdict import Verdict, unproven


def dpo(config: Dpo, say: Callable[[str], None] = print_line) -> RunOutcome:
    """An interrupted run hands nothing over; the same command goes on with it."""
    spent = TimeSpent()
    refuse_nonsense(config)
    settings = settings_of(config)
    objective = preference(settings)
    world, say = join_processes(config, say, shardable=True)
    device = world.device
    start = load_start(config, device, say)
    if world.rank > 0:
        return follow(world, start.model, objective, config, partial(tuning_optimizer, config, start))
    pairs = load_preferences(config, start)
    schedule, every, micro = tuning_schedule(config, pairs), evaluated_every(config.save_steps), micro_rows(config, pairs)
    rule = stopping_rule(config.early_stopping_patience, config.early_stopping_threshold, schedule=config.lr_scheduler_type,
                         steps=pairs.steps, every=every)
    optimizer = tuning_optimizer(config, start)
    for line in describe_pairs(config, start, pairs, optimizer.param_groups[0]["lr"], device):
        say(line)
    with world, open_run(config, say, device, spent) as run:
        data = ask_reference(pairs, start, run.folder, micro, say)
        trainer = Trainer(run, start.weights, optimizer, objective, schedule, micro=micro, clip=config.max_grad_norm, order=data.order,
                          saves=SavePlan(every, data.last_step, config.save_minutes, paced=config.save_steps is None),
                          steps_before=start.steps_before, world=world,
                          steady=settings.loss != "hinge")  # whose loss is 0, and stays it, where every margin is wide enough
        watched = WatchedPairs(run, data, micro, config.eval_examples)
        evaluator = HeldOutEvaluator(run, watched.score, device=device, repeats_from=data.repeats_from,
                                     scale=max(1.0, settings.at_reference or 0.0))
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
            run.preflight([*preflight_dpo(trainer, data, start), *check_asked_scale(config, start)])
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
                    trainer.record(step, epoch=data.epoch_of(step.index), supervised_tokens=step.weight,
                                   pairs=pairs_in(step.ids))
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
        handed = hand_over(run, evaluator, partial(score_all_pairs, data=data, rows=micro))
        judge_written_adapter(config, run, handed)
        direction, told = compare_with_parent(run, data, start, trainer)
        void_if_refuted(run, handed.places, [direction])
        handed.verdicts.extend([direction, check_budget(trainer.schedule, trainer.done, early.reason)])
        write_down(run, handed, **told)
        return RunOutcome(run.folder, handed.verdicts, model=run.folder / "model", results={"held_out": handed.recorded.estimate, **told})

# ---------------------------------------------------------------- what is checked before step 1


def preflight_dpo(trainer: Trainer, data: PreferenceData, start: StartingModel) -> list[Verdict]:
    """The loss is the loss and begins where it must, the reference is the parent, every tensor is reached, both sides answer one prompt."""
    batch = trainer.first_micro_batch(data.batch(0))
    found = trainer.gradients(batch)
    with uncompiled():
        return [check_detectors(), *check_beginning(trainer, data, float(batch.weight.sum()) * found[0] / pairs_in(batch.ids)),
                *check_parent_reference(data, start),
                *preflight_preference(trainer.model, trainer.objective, sample_rows(batch), data.settings, trainer.accumulate_alone),
                *trainer.check_precision(batch, found), *reached(trainer, found),
                *data.audit(start), *trainer.check_world(data.batch(0))]  # last: with --fsdp nobody holds the whole model afterwards


def pairs_in(ids: tuple[Any, ...]) -> int:
    return sum(len(row) for row in ids)


def check_beginning(trainer: Trainer, data: PreferenceData, loss: float) -> list[Verdict]:
    """Nothing where the policy has left its reference already: a run that goes on."""
    return [check_loss_at_reference(loss, data.settings, trainer.model.compute_dtype)] if trainer.done == 0 else []


def reached(trainer: Trainer, found: Gradients) -> list[Verdict]:
    """A hinge that every pair of the batch has passed has no gradient, which is no fault."""
    if trainer.done and not trainer.steady and not any(gradient.any() for gradient in found[1].values()):
        return [unproven("gradients", "every pair of this batch has its margin: nothing is left to learn from it", optional=True)]
    return trainer.check_reach(found)

# ---------------------------------------------------------------- evaluations


def score_all_pairs(model: Transformer, data: PreferenceData, rows: int) -> HeldOut:
    return data.score(model, rows).held_out


class WatchedPairs:
    """Held-out pairs at every evaluation: their margin with its interval, and what it does not tell."""

    def __init__(self, run: Run, data: PreferenceData, rows: int, count: int):
        self.run, self.data, self.rows, self.count = run, data, rows, count
        self.found: ScoredPairs | None = None

    def score(self, model: Transformer) -> HeldOut:
        self.found = self.data.score(model, self.rows, self.count)
        return self.found.held_out

    def record(self, step: int) -> None:
        """One line of metrics, and what is to be said of it."""
        found = self.found
        assert found is not None, "an evaluation was made"
        bias = found.length_bias
        columns = {"eval_margin": found.margin, "eval_accuracy": found.accuracy} | ({} if bias is None else {"eval_length_bias": bias})
        self.run.record(step - 1, **{f"{name}{end}": value for name, estimate in columns.items()
                                     for end, value in (("", estimate.mean), ("_low", estimate.low), ("_high", estimate.high))},
                        eval_chosen_logps=float(found.chosen.mean()), eval_rejected_logps=float(found.rejected.mean()))
        if step == 0:
            return
        self.run.say(f"step {step}: margin {found.margin}, chosen preferred {found.accuracy}")
        for sentence in doubts(None, found) if self.data.settings.needs_reference else []:
            self.run.say(f"step {step}: {sentence}")
            self.run.log(Event.WARNING, step=step, reason=sentence)

    def judge_losses(self, trainer: Trainer, losses: list[float]) -> None:
        """Those since the last evaluation; the first step of all is taken at the reference."""
        first = trainer.done - len(losses)
        learning = [loss for step, loss in enumerate(losses, first) if step > 0 and trainer.schedule.multiplier(step) >= LEARNING_SHARE]
        self.run.judge(Event.STEP, [check_loss_moves(learning, self.data.settings)])


def compare_with_parent(run: Run, data: PreferenceData, start: StartingModel, trainer: Trainer) -> tuple[Verdict, dict[str, Any]]:
    """On all pairs held out, beside the parent: whether training went the right way, and what the bytes that were handed over prefer."""
    before, trained = data.score(reference_model(start), trainer.micro), data.score(trainer.model, trainer.micro)
    after = data.score(build_model(open_artifact(run.folder / "model"), None).to(trainer.device), trainer.micro)
    verdict, said = check_direction(before, trained), doubts(before, after)
    run.say(f"margin {before.margin} → {after.margin}, chosen preferred {after.accuracy}")
    for sentence in (verdict.reason, *said):
        run.say(sentence)
    bias = after.length_bias
    return verdict, {"margin": asdict(after.margin), "accuracy": asdict(after.accuracy), "margin_before": asdict(before.margin),
                     "length_bias": bias and asdict(bias), "doubts": said}

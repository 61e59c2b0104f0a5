"""DPO and its variants: learning from pairs of answers, with the parent as reference; the whole model or an adapter."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from assay.guard.conclusion_checks import check_budget
from assay.guard.loss_preflight import Gradients, sample_rows
from assay.guard.preference_checks import check_direction, check_loss_at_reference, doubts, preflight_preference
from assay.guard.training_guards import check_detectors
from assay.learn.preference import preference
from assay.model.placement import uncompiled
from assay.outcome import RunOutcome
from assay.recipes.conversations import refuse_nonsense
from assay.recipes.dpo_options import Dpo
from assay.recipes.evaluated_saves import EvaluatedSaves
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator
from assay.recipes.hand_over import conclude_hand_over, hand_over
from assay.recipes.memory_plan import record_use
from assay.recipes.preference_data import (
    PreferenceData,
    ask_reference,
    check_parent_reference,
    describe_pairs,
    judge_live_reference,
    load_preferences,
    pairs_in,
    refuse_idle_reference,
    score_beside_parent,
    settings_of,
)
from assay.recipes.processes import follow, join_processes
from assay.recipes.run import Run, TimeSpent, open_run, print_line
from assay.recipes.sft import check_asked_scale, check_forked_loss, judge_written_adapter, tuning_optimizer, tuning_plan
from assay.recipes.starting_model import StartingModel, beside_live, load_start
from assay.recipes.trainer import Trainer
from assay.store.ledger import Event
from assay.store.remote import local_path
from assay.verdict import Verdict, unproven


def dpo(config: Dpo, say: Callable[[str], None] = print_line) -> RunOutcome:
    """Run preference learning: load, compute the reference, preflight, train, evaluate and save, hand over. The same command resumes an
    interrupted run, which hands nothing over.
    """
    spent = TimeSpent()
    refuse_nonsense(config)
    settings = settings_of(config)
    refuse_idle_reference(config, settings)
    objective = preference(settings)
    world, say = join_processes(config, say)
    device = world.device
    start = load_start(config, device, say, world)
    if world.rank > 0:
        return follow(world, start.model, objective, config, partial(tuning_optimizer, config, start))
    pairs = load_preferences(config, start)
    plan, optimizer = tuning_plan(config, pairs), tuning_optimizer(config, start)
    for line in describe_pairs(config, start, pairs, optimizer.param_groups[0]["lr"], device):
        say(line)
    with world, open_run(config, say, device, spent) as run:
        data = ask_reference(pairs, start, config, run.folder, plan.micro, say)
        trainer = Trainer(run, start.weights, optimizer, objective, plan.schedule, micro=plan.micro, clip=config.max_grad_norm,
                          order=data.order, saves=plan.saves, steps_before=start.steps_before, world=world,
                          steady=settings.loss != "hinge")  # whose loss is 0, and stays it, where every margin is wide enough
        evaluator = HeldOutEvaluator(run, partial(data.evaluated, rows=plan.micro, count=config.eval_examples), device=device,
                                     repeats_from=data.repeats_from, scale=max(1.0, settings.at_reference or 0.0))
        early = EarlyStopping(run, evaluator.history, plan.rule, plan.every)
        saves = EvaluatedSaves(trainer, data, evaluator, early)

        with run.interruptible():
            saves.resume()
            run.preflight([*preflight_dpo(trainer, data, start), *check_asked_scale(config, start)])
            saves.save_start()
            if trainer.done == 0 and config.from_ is not None:
                run.judge(Event.FORK, [check_forked_loss(local_path(config.from_), data, evaluator, trainer)])

            trainer.start_loop(data.facts(trainer.done), data.rows)
            with closing(trainer.steps(data.batches(run, trainer.done))) as steps:
                while not (trainer.over() or early.reason):
                    step = next(steps)
                    data.judge_step(run, step)
                    trainer.record(step, epoch=data.epoch_of(step.index), supervised_tokens=step.weight, pairs=pairs_in(step.ids))
                    if trainer.save_due():
                        judge_live_reference(run, data)
                        saves.save_evaluated()
                    elif trainer.extra_save_due():
                        saves.save_unevaluated()
            trainer.end_loop()
            record_use(run, start.memory, device)
            saves.finish()
        if run.interrupted is not None:
            return RunOutcome(run.folder, interrupted=run.interrupted)

        run.judge(Event.REFERENCE, check_parent_reference(data, start))
        handed = hand_over(run, evaluator, partial(data.evaluated, rows=plan.micro), beside_live(start))
        judge_written_adapter(config, run, handed)
        direction, told = compare_with_parent(run, data, start, trainer, handed.places[-1])
        return conclude_hand_over(run, handed, [direction], check_budget(trainer.schedule, trainer.done, early.reason), **told)

# ---------------------------------------------------------------- what is checked before step 1


def preflight_dpo(trainer: Trainer, data: PreferenceData, start: StartingModel) -> list[Verdict]:
    """DPO preflight: the loss and its known value at the start, the reference against the parent, gradients of every trained tensor, and
    pairs that answer one prompt.
    """
    batch = trainer.first_micro_batch(data.batch(0))
    found = trainer.gradients(batch)
    with uncompiled():
        return [check_detectors(), *check_beginning(trainer, data, float(batch.weight.sum()) * found[0] / pairs_in(batch.ids)),
                *check_parent_reference(data, start),
                *preflight_preference(trainer.model, trainer.objective, sample_rows(batch), data.settings, trainer.accumulate_alone),
                *trainer.check_precision(batch, found), *reached(trainer, found),
                *data.audit(start), *trainer.check_world(data.batch(0))]  # last: with --fsdp nobody holds the whole model afterwards


def check_beginning(trainer: Trainer, data: PreferenceData, loss: float) -> list[Verdict]:
    """Check the known loss at the start; no verdict for a resumed run, whose policy has left its reference."""
    return [check_loss_at_reference(loss, data.settings, trainer.model.compute_dtype)] if trainer.done == 0 else []


def reached(trainer: Trainer, found: Gradients) -> list[Verdict]:
    """A hinge that every pair of the batch has passed has no gradient, which is no fault."""
    if trainer.done and not trainer.steady and not any(gradient.any() for gradient in found[1].values()):
        return [unproven("gradients", "every pair of this batch has its margin: nothing is left to learn from it", optional=True)]
    return trainer.check_reach(found)

# ---------------------------------------------------------------- what came of it


def compare_with_parent(run: Run, data: PreferenceData, start: StartingModel, trainer: Trainer,
                        handed: Path) -> tuple[Verdict, dict[str, Any]]:
    """Compare the exported model with its parent on all held-out pairs: whether training went in the right direction, and what the
    exported files prefer.
    """
    before, trained, after = score_beside_parent(data, start, trainer, handed)
    verdict, said = check_direction(before, trained), doubts(before, after)
    run.say(f"margin {before.margin} → {after.margin}, chosen preferred {after.accuracy}")
    for sentence in (verdict.reason, *said):
        run.say(sentence)
    bias = after.length_bias
    return verdict, {"margin": asdict(after.margin), "accuracy": asdict(after.accuracy), "margin_before": asdict(before.margin),
                     "length_bias": bias and asdict(bias), "doubts": said}

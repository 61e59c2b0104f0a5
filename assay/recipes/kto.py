"""KTO: learning from single answers labelled desirable or undesirable, with the parent as reference."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from assay.guard.conclusion_checks import check_budget
from assay.guard.kto_checks import (
    check_feedback_direction,
    check_kl_estimate,
    check_kto_loss_at_reference,
    feedback_doubts,
    preflight_kto,
)
from assay.guard.loss_preflight import sample_rows
from assay.guard.training_guards import check_detectors
from assay.learn.unpaired import kto_objective
from assay.model.placement import uncompiled
from assay.outcome import RunOutcome
from assay.recipes.conversations import refuse_nonsense
from assay.recipes.evaluated_saves import EvaluatedSaves
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator
from assay.recipes.feedback_data import FeedbackData, describe_feedback, kto_settings, load_feedback
from assay.recipes.hand_over import conclude_hand_over, hand_over
from assay.recipes.kto_options import Kto
from assay.recipes.memory_plan import record_use
from assay.recipes.preference_data import (
    ask_reference,
    check_parent_reference,
    judge_live_reference,
    pairs_in,
    score_beside_parent,
)
from assay.recipes.processes import follow, join_processes
from assay.recipes.run import Run, TimeSpent, open_run, print_line
from assay.recipes.sft import check_asked_scale, check_forked_loss, judge_written_adapter, tuning_optimizer, tuning_plan
from assay.recipes.starting_model import StartingModel, beside_live, load_start
from assay.recipes.trainer import Trainer
from assay.store.ledger import Event
from assay.store.remote import local_path
from assay.verdict import Verdict


def kto(config: Kto, say: Callable[[str], None] = print_line) -> RunOutcome:
    """Run KTO: load, compute the reference, preflight, train, evaluate and save, hand over. The same command resumes an interrupted run,
    which hands nothing over.

    Before every step the current policy scores the mismatched completions of the whole step; their mean log-ratio is the KL that all
    examples of the step are compared with.
    """
    spent = TimeSpent()
    refuse_nonsense(config)
    objective = kto_objective(kto_settings(config))
    world, say = join_processes(config, say)
    device = world.device
    start = load_start(config, device, say, world)
    if world.rank > 0:
        return follow(world, start.model, objective, config, partial(tuning_optimizer, config, start))
    examples = load_feedback(config, start)
    plan, optimizer = tuning_plan(config, examples), tuning_optimizer(config, start)
    for line in describe_feedback(config, start, examples, optimizer.param_groups[0]["lr"], device):
        say(line)
    with world, open_run(config, say, device, spent) as run:
        asked = ask_reference(examples, start, config, run.folder, plan.micro, say)
        assert isinstance(asked, FeedbackData)
        data = asked.followed(start.model, plan.micro)
        trainer = Trainer(run, start.weights, optimizer, objective, plan.schedule, micro=plan.micro, clip=config.max_grad_norm,
                          order=data.order, saves=plan.saves, steps_before=start.steps_before, world=world)
        evaluator = HeldOutEvaluator(run, partial(data.evaluated, rows=plan.micro, count=config.eval_examples), device=device,
                                     repeats_from=data.repeats_from, scale=1.0)
        early = EarlyStopping(run, evaluator.history, plan.rule, plan.every)
        saves = EvaluatedSaves(trainer, data, evaluator, early)

        with run.interruptible():
            saves.resume()
            run.preflight([*preflight_feedback(trainer, data, start), *check_asked_scale(config, start)])
            saves.save_start()
            if trainer.done == 0 and config.from_ is not None:
                run.judge(Event.FORK, [check_forked_loss(local_path(config.from_), data, evaluator, trainer)])

            trainer.start_loop(data.facts(trainer.done), data.rows)
            with closing(trainer.steps(data.batches(run, trainer.done))) as steps:
                while not (trainer.over() or early.reason):
                    step = next(steps)
                    data.judge_step(run, step)
                    trainer.record(step, epoch=data.epoch_of(step.index), supervised_tokens=step.weight, examples=pairs_in(step.ids))
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
        direction, told = compare_feedback(run, data, start, trainer, handed.places[-1])
        return conclude_hand_over(run, handed, [direction], check_budget(trainer.schedule, trainer.done, early.reason), **told)

# ---------------------------------------------------------------- what is checked before step 1


def preflight_feedback(trainer: Trainer, data: FeedbackData, start: StartingModel) -> list[Verdict]:
    """KTO preflight: the loss and its known value at the start, the KL of the mismatched completions, and the reference against the
    parent.
    """
    whole = data.batch(0)
    batch = trainer.first_micro_batch(whole)
    found = trainer.gradients(batch)
    with uncompiled():
        return [check_detectors(), *check_first_loss(trainer, data, float(batch.weight.sum()) * found[0] / pairs_in(batch.ids), batch.ids),
                *([check_kl_estimate(trainer.model, data.sample_off_reference().to(trainer.device))] if data.settings.has_baseline else []),
                *check_parent_reference(data, start),
                *preflight_kto(trainer.model, trainer.objective, sample_rows(batch), data.settings, trainer.accumulate_alone),
                *trainer.check_precision(batch, found), *trainer.check_reach(found),
                *data.audit(start), *trainer.check_world(whole)]  # last: with --fsdp nobody holds the whole model afterwards


def check_first_loss(trainer: Trainer, data: FeedbackData, loss: float, ids: tuple[Any, ...]) -> list[Verdict]:
    """Check the known loss at the start; no verdict for a resumed run, whose policy has left its reference."""
    if trainer.done:
        return []
    return [check_kto_loss_at_reference(loss, data.labels(ids), data.settings, trainer.model.compute_dtype)]

# ---------------------------------------------------------------- what came of it


def compare_feedback(run: Run, data: FeedbackData, start: StartingModel, trainer: Trainer,
                     handed: Path) -> tuple[Verdict, dict[str, Any]]:
    """Compare the exported model with its parent on all held-out answers: whether training went in the right direction, and what the
    exported files score.
    """
    before, trained, after = score_beside_parent(data, start, trainer, handed)
    verdict, said = check_feedback_direction(before, trained), feedback_doubts(before, after)
    margin = None if after.one_sided else asdict(after.margin())
    for sentence in (verdict.reason, *said):
        run.say(sentence)
    bias = after.length_bias
    return verdict, {"margin": margin, "accuracy": asdict(after.accuracy), "kl": after.kl, "length_bias": bias and asdict(bias),
                     "doubts": said}

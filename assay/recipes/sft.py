"""Supervised fine-tuning (SFT): next-token loss on the completions of conversations; the whole model or an adapter."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from assay.data.batch import Batch
from assay.evaluation.held_out_loss import score_examples
from assay.guard.adapter_checks import check_adapter_scale, check_written_adapter
from assay.guard.conclusion_checks import check_budget
from assay.guard.loss_preflight import preflight_loss, sample_rows
from assay.guard.training_guards import check_detectors
from assay.learn.low_bit_adamw import adamw_8bit, adamw_bf16_masters
from assay.learn.lr_schedule import Budget, Schedule
from assay.learn.objectives import Objective, next_token
from assay.learn.optim import adamw
from assay.model.placement import uncompiled
from assay.outcome import RunOutcome
from assay.recipes.compute_dtype import asked_masters
from assay.recipes.conversations import Conversations, describe_tuning, evaluated_every, load_conversations, refuse_nonsense
from assay.recipes.evaluated_saves import EvaluatedSaves
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator, stopping_rule
from assay.recipes.hand_over import SAME_LOSS, HandedOver, conclude_hand_over, hand_over, void_if_refuted
from assay.recipes.memory_plan import record_use
from assay.recipes.options import Sft, Trained, Tuned
from assay.recipes.processes import follow, join_processes, moments_wait
from assay.recipes.run import Run, TimeSpent, open_run, print_line
from assay.recipes.starting_model import AdapterModel, StartingModel, beside_live, carry_moments, load_start, reopen_beside, streamed_parent
from assay.recipes.trainer import SavePlan, Trainer
from assay.statistics.early_stopping import StoppingRule
from assay.store.artifact import Artifact
from assay.store.checkpoint import open_checkpoint
from assay.store.ledger import Event
from assay.store.remote import local_path
from assay.strict_json import read_json, read_json_lines
from assay.verdict import Verdict, proven, refuted, unproven

GUESS = 0.9  # of what a uniform guess pays: a model that reads a text pays far less


def sft(config: Sft, say: Callable[[str], None] = print_line) -> RunOutcome:
    """Run supervised fine-tuning: load, preflight, train, evaluate and save, hand over. The same command resumes an interrupted run,
    which hands nothing over.
    """
    spent = TimeSpent()
    refuse_nonsense(config)
    world, say = join_processes(config, say)
    device = world.device
    start = load_start(config, device, say, world)
    if world.rank > 0:
        return follow(world, start.model, next_token, config, partial(tuning_optimizer, config, start))
    data = load_conversations(config, start)
    plan, optimizer = tuning_plan(config, data), tuning_optimizer(config, start)
    for line in describe_tuning(config, start, data, optimizer.param_groups[0]["lr"], device):
        say(line)
    with world, open_run(config, say, device, spent) as run:
        run.rehearse_proofs(start.parent.path)
        trainer = Trainer(run, start.weights, optimizer, next_token, plan.schedule, micro=plan.micro, clip=config.max_grad_norm,
                          order=data.order, saves=plan.saves, steps_before=start.steps_before, world=world)
        watched = data.held_out_batches(plan.micro, config.eval_examples)
        evaluator = HeldOutEvaluator(run, partial(score_examples, batches=watched, rows=plan.micro), device=device,
                                     repeats_from=data.repeats_from)
        early = EarlyStopping(run, evaluator.history, plan.rule, plan.every)
        saves = EvaluatedSaves(trainer, data, evaluator, early)

        with run.interruptible():
            saves.resume()
            reopened = reopen_beside(start) if trainer.done == 0 else None
            run.preflight([*preflight_sft(trainer, data, start), *check_asked_scale(config, start)])
            saves.save_start()
            if reopened is not None:
                trainer.watch.parent_loss = parent_loss(start, reopened(), next_token, data.batch(0), trainer)
                if told := no_better_than_a_guess(trainer.watch.parent_loss, start.model.config.vocab):
                    run.say(told)
                if config.from_ is not None:
                    run.judge(Event.FORK, [check_forked_loss(local_path(config.from_), data, evaluator, trainer)])

            trainer.start_loop(data.facts(trainer.done), data.rows)
            with closing(trainer.steps(data.batches(run, trainer.done))) as steps:
                while not (trainer.over() or early.reason):
                    step = next(steps)
                    data.judge_step(run, step)
                    trainer.record(step, epoch=data.epoch_of(step.index), supervised_tokens=step.weight)
                    if trainer.save_due():
                        saves.save_evaluated()
                    elif trainer.extra_save_due():
                        saves.save_unevaluated()
            trainer.end_loop()
            record_use(run, start.memory, device)
            saves.finish()
        if run.interrupted is not None:
            return RunOutcome(run.folder, interrupted=run.interrupted)

        everything = partial(score_examples, batches=data.held_out_batches(plan.micro), rows=plan.micro)
        handed = hand_over(run, evaluator, everything, beside_live(start))
        judge_written_adapter(config, run, handed)
        return conclude_hand_over(run, handed, [], check_budget(trainer.schedule, trainer.done, early.reason))

# ---------------------------------------------------------------- what is derived


@dataclass(frozen=True)
class TuningPlan:
    """Plan of a fine-tuning run: its length, when it is evaluated and saved, and the size of a micro-batch."""

    schedule: Schedule
    every: int  # steps between two evaluations
    micro: int  # rows at a time
    rule: StoppingRule | None  # of early stopping
    saves: SavePlan


def tuning_plan(config: Tuned, data: Conversations) -> TuningPlan:
    """The plan that options and data give."""
    every, warmup = evaluated_every(config.save_steps), min(config.warmup_steps, data.steps // 4) if data.steps else config.warmup_steps
    return TuningPlan(
        Schedule(Budget(data.steps, config.minutes, config.lr_scheduler_type, warmup, config.decay_ratio)), every,
        max(1, min(data.order.rows, config.micro_batch_tokens // data.order.length)),
        stopping_rule(config.early_stopping_patience, config.early_stopping_threshold, schedule=config.lr_scheduler_type,
                      steps=data.steps, every=every),
        SavePlan(every, data.last_step, config.save_minutes, paced=config.save_steps is None))


def tuning_optimizer(config: Trained, start: StartingModel) -> torch.optim.Optimizer:
    """The optimizer that the options ask for, over the weights that are trained."""
    lr = config.peak_rate(adapter=isinstance(start.weights, AdapterModel))
    named = start.model.named_parameters()
    if asked_masters(config) == torch.bfloat16:
        optimizer: torch.optim.Optimizer = adamw_bf16_masters(named, lr, weight_decay=config.weight_decay, seed=config.seed,
                                                              coded=config.optim == "adamw_8bit")
    elif config.optim == "adamw_8bit":
        optimizer = adamw_8bit(named, lr, weight_decay=config.weight_decay)
    else:
        wait = moments_wait(config, in_parts=start.weights.stored is not None)
        optimizer = adamw(named, lr, weight_decay=config.weight_decay, moments=wait)
    carry_moments(optimizer, start)
    return optimizer

# ---------------------------------------------------------------- what is checked before step 1


def preflight_sft(trainer: Trainer, data: Conversations, start: StartingModel) -> list[Verdict]:
    """SFT preflight: the loss against plain cross-entropy, gradients of every trained tensor, the alarms for values that are not finite,
    and the audit of the data.
    """
    batch = trainer.first_micro_batch(data.batch(0))
    found = trainer.gradients(batch)
    with uncompiled():
        return [check_detectors(), *preflight_loss(trainer.model, trainer.objective, sample_rows(batch), trainer.accumulate_alone),
                *trainer.check_precision(batch, found), *trainer.check_reach(found), *data.audit(start),
                *trainer.check_world(data.batch(0))]  # last: with --fsdp nobody holds the whole model afterwards


def check_asked_scale(config: Tuned, start: StartingModel) -> list[Verdict]:
    """Check the scale of an adapter that the options ask for; an adapter that the run continues keeps its own."""
    if not config.lora_r or not isinstance(start.weights, AdapterModel) or start.parent.patch is not None:
        return []
    scales = [part.scale for parts in start.weights.patch().low_rank.values() for part in parts]
    return [check_adapter_scale(config.lora_r, config.lora_alpha, config.use_rslora, scales)]


def judge_written_adapter(config: Tuned, run: Run, handed: HandedOver) -> None:
    """Check the adapter folder that was handed over against the options; where they disagree its hallmark is taken back."""
    place = run.folder / "adapter"
    if config.lora_r and config.lora_alpha is not None and place in handed.places:
        verdict = check_written_adapter(config.lora_r, config.lora_alpha, config.use_rslora, read_json(place / "adapter_config.json"))
        handed.verdicts.append(verdict)
        void_if_refuted(run, handed.places, [verdict])


def no_better_than_a_guess(loss: float, vocab: int) -> str | None:
    """A model that is given another model's tokenizer trains, saves and is proven as any other; what it reads is noise to it."""
    guess = math.log(vocab)
    if loss < GUESS * guess:
        return None
    return (f"the starting model pays {loss:.2f} nats a token for this text, and a guess among its {vocab:,} tokens {guess:.2f}: it has "
            "learned nothing yet, or its tokenizer.json is another model's. Where it was trained before, stop here and look at that")


@torch.no_grad()
def parent_loss(start: StartingModel, reopened: Artifact, objective: Objective, batch: Batch, trainer: Trainer) -> float:
    """Loss of the parent, opened anew, on the first batch: the first loss of the run must equal it."""
    parent = streamed_parent(start, reopened, trainer.device, trainer.model.compute_dtype)
    parts = [objective(parent, part.to(trainer.device)).total for part in batch.split(trainer.micro)]
    return float(torch.stack(parts).sum()) / float(batch.weight.sum())


def check_forked_loss(parent: Path, data: Conversations, evaluator: HeldOutEvaluator, trainer: Trainer) -> Verdict:
    """Check that the first evaluation of a fork equals the one that the parent's run made of this checkpoint, conversation by
    conversation.
    """
    facts = (open_checkpoint(parent).trainer() or {}).get("data", {})
    step = open_checkpoint(parent).step
    evaluated = [row for row in read_json_lines(parent.parent.parent / "eval.jsonl") if row["step"] == step]
    if (facts.get("conversations"), facts.get("scored_as")) != (data.digest, data.scored_as) or not evaluated:
        return unproven("fork", f"the parent's run did not score these conversations by {data.scored_as}: its recorded loss says "
                                "nothing", optional=True)
    found, due = evaluator.history.losses[0], np.array(evaluated[-1]["per_document"])
    if found.shape != due.shape:
        return unproven("fork", f"the parent's run scored {len(due)} conversations, this one {len(found)}", optional=True)
    error = float(abs(found - due).max() / (evaluator.scale or due.mean()))
    bound = SAME_LOSS[trainer.model.compute_dtype or torch.float32]
    words = f"the first evaluation and the parent's at step {step} differ by {error:.1e} (relative, worst of {len(due)}), bound {bound:.0e}"
    return (proven if error <= bound else refuted)("fork", words, error=str(error))

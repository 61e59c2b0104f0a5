"""Distillation: a student learns its teacher's distribution, online or from stored logits, or text that the teacher writes."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from assay.data.batch import Batch
from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut, score_examples
from assay.evaluation.teacher_agreement import Agreement
from assay.guard import distillation_checks as guard
from assay.guard import loss_preflight
from assay.guard.conclusion_checks import check_budget, check_reported_loss
from assay.guard.loss_preflight import sample_rows
from assay.guard.policy_identity import check_floor
from assay.guard.training_guards import check_detectors
from assay.learn.objectives import Objective, next_token
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer
from assay.model.world import World
from assay.outcome import RunOutcome
from assay.recipes.conversations import Conversations, describe_tuning, held_out_batches, load_conversations, refuse_nonsense
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator, interval_columns
from assay.recipes.grpo_preflight import rollout_floor
from assay.recipes.hand_over import hand_over, void_if_refuted, write_down
from assay.recipes.memory_plan import record_use
from assay.recipes.on_policy import OnPolicy, longest_own_words, measured_words
from assay.recipes.options import Distill
from assay.recipes.processes import follow, join_processes
from assay.recipes.run import Run, TimeSpent, open_run, plain, print_line
from assay.recipes.sft import check_forked_loss, parent_loss, tuning_optimizer, tuning_plan
from assay.recipes.starting_model import StartingModel, beside_live, load_start, made_by_first, reopen_parent
from assay.recipes.teacher_text import write_teacher_text
from assay.recipes.teachers import (
    OnlineTeachers,
    Student,
    Teacher,
    load_online,
    load_stored_answers,
    make_student,
    open_teacher_model,
)
from assay.recipes.trainer import Trainer
from assay.statistics.estimate import Estimate, ratio
from assay.store.artifact import build_model, open_artifact
from assay.store.ledger import Event
from assay.store.remote import local_path
from assay.verdict import Verdict, refuted

NATS = 1.0  # a divergence may come near 0, where a share of it is less than rounding


def distill(config: Distill, say: Callable[[str], None] = print_line) -> RunOutcome:
    """Run distillation: load teacher and student, preflight, train, evaluate and save, hand over. The same command resumes an interrupted
    run, which hands nothing over.

    Evaluations, and the choice of the best checkpoint, use the loss that is minimised: the blend of distillation and cross-entropy, or
    next-token loss where the teacher writes the text.
    """
    spent = TimeSpent()
    refuse_unclear_distill(config)
    refuse_nonsense(config)
    world, say = join_processes(config, say)
    device = world.device
    start = load_start(with_student(config, say, world), device, say, world)
    if world.rank > 0:
        return follow(world, start.model, objective_alone(config, start, device), config, partial(tuning_optimizer, config, start))
    data = load_lessons(config, start, device, say)
    plan, optimizer = tuning_plan(config, data), tuning_optimizer(config, start)
    micro = plan.micro
    for line in describe_tuning(config, start, data, optimizer.param_groups[0]["lr"], device):
        say(line)
    teacher = None if config.how == "text" else load_teacher(config, start, data, device, say)
    objective = next_token if teacher is None else teacher.objective
    lessons = Lessons(data, teacher, config.how)
    own_words = OnPolicy(config, start, data.train) if config.on_policy else None

    with world, open_run(config, say, device, spent) as run:
        trainer = Trainer(run, start.weights, optimizer, objective, plan.schedule, micro=micro, clip=config.max_grad_norm, order=data.order,
                          saves=plan.saves, steps_before=start.steps_before, world=world, steady=own_words is None)
        evaluator = HeldOutEvaluator(run, partial(lessons.score, rows=micro, count=config.eval_examples), device=device,
                                     repeats_from=data.repeats_from, scale=None if teacher is None else NATS)
        early = EarlyStopping(run, evaluator.history, plan.rule, plan.every)

        def evaluate() -> None:
            columns = lessons.columns(trainer.model, micro, config.eval_examples)
            evaluator.evaluate(trainer.model, trainer.done, trainer.new_losses(), columns=columns)

        def save(*, evaluated: bool) -> None:
            """Account for the updates, evaluate, and save what was evaluated."""
            trainer.account()
            if evaluated:
                evaluate()
            trainer.save(lessons.facts(trainer.done), best=evaluator.best_checkpoint())
            if evaluated:
                early.judge(trainer.done)

        with run.interruptible():
            if (saved := run.newest()) is not None:
                trainer.resume(saved, lessons.check_same((saved.trainer() or {})["data"]))
            evaluator.recall()
            early.judge(trainer.done)
            run.preflight([*preflight_own_words(trainer, lessons, own_words), *preflight_distill(trainer, lessons, start)])
            if own_words is not None and trainer.sharded is not None:
                own_words.sample_gathered(trainer)
            trainer.save(lessons.facts(trainer.done))  # where nothing is saved yet: a save is made and proven before step 1
            if trainer.done == 0:
                if not evaluator.history.steps:
                    evaluate()
                compare_before_start(config, trainer, evaluator, lessons, start, own_words)

            trainer.start_loop(lessons.facts(trainer.done), data.rows)
            with closing(trainer.steps(taught_batches(run, trainer.done, lessons, own_words))) as steps:
                while not (trainer.over() or early.reason):
                    step = next(steps)
                    trainer.record(step, epoch=data.epoch_of(step.index), supervised_tokens=step.weight,
                                   **measured_words(own_words, step.index))
                    if trainer.save_due():
                        save(evaluated=True)
                    elif trainer.extra_save_due():
                        save(evaluated=False)
            if teacher is not None and (frozen := teacher.unmoved()):
                run.judge(Event.TEACHER_UNMOVED, frozen)
            trainer.end_loop()
            record_use(run, start.memory, device)
            if run.interrupted is None and evaluator.latest_step != trainer.done:
                save(evaluated=True)
            elif trainer.saved != trainer.done:
                save(evaluated=False)  # where a signal came, the uninterrupted run would not have been evaluated here
            trainer.finish(data.times_read(run, trainer.done), data.rows, evaluator.best_checkpoint())
        if run.interrupted is not None:
            return RunOutcome(run.folder, interrupted=run.interrupted)

        return hand_over_student(trainer, evaluator, lessons, start, check_budget(trainer.schedule, trainer.done, early.reason))


def compare_before_start(config: Distill, trainer: Trainer, evaluator: HeldOutEvaluator, lessons: "Lessons", start: StartingModel,
                         own_words: OnPolicy | None) -> None:
    """Compare the student with its parent before step 1: the loss of the first batch, a fork's held-out loss, and how far the student is
    from its teacher. Where the first batch is the student's own (--on-policy), its loss has no counterpart in the parent.
    """
    run, teacher = trainer.run, lessons.teacher
    if own_words is None or not own_words.due(0):
        trainer.watch.parent_loss = parent_loss(start, reopen_parent(start), trainer.objective, lessons.batch(0), trainer)
    if config.from_ is not None:
        run.judge(Event.FORK, [check_forked_loss(local_path(config.from_), lessons.data, evaluator, trainer)])
    if teacher is not None:
        tell_worth(run, teacher, teacher.agreement(trainer.model, lessons.data.held_out_batches(trainer.micro)))


def taught_batches(run: Run, step: int, lessons: "Lessons", own_words: OnPolicy | None) -> Iterable[Batch]:
    """Batches from `step` on: the data's, some with the student's own answers instead (--on-policy), all with the teacher's
    log-probabilities.
    """
    planned = lessons.data.batches(run, step)
    if own_words is not None:
        planned = own_words.batches(planned, step)
    return planned if lessons.teacher is None else map(lessons.teacher.answered, planned)


def hand_over_student(trainer: Trainer, evaluator: HeldOutEvaluator, lessons: "Lessons", start: StartingModel,
                      budget: Verdict) -> RunOutcome:
    """Export the best student, prove it, measure how far it came towards its teacher, and check the score that the ledger tells."""
    run, teacher, data = trainer.run, lessons.teacher, lessons.data
    handed = hand_over(run, evaluator, partial(lessons.score, rows=trainer.micro), beside_live(start))
    told = {} if teacher is None else compare_agreement(run, teacher, start, data, trainer, handed.places[-1])
    handed.verdicts.append(budget)
    write_down(run, handed, **told)
    verdicts = [*handed.verdicts, told_right := check_told(run, handed.recorded, len(data.held_out))]
    void_if_refuted(run, handed.places, [told_right])
    return RunOutcome(run.folder, verdicts, model=handed.places[-1], results={"held_out": handed.recorded.estimate, **told})


# ---------------------------------------------------------------- what is learned, and from whom


def objective_alone(config: Distill, start: StartingModel, device: str) -> Objective:
    """The objective without the data, for a process that only computes."""
    if config.how == "text":
        return next_token
    student = Student(start.parent.config.vocab, start.tokenizer)
    return load_online(config, student, device).objective


def refuse_unclear_distill(config: Distill) -> None:
    named = [flag for flag, value in (("--model", config.model), ("--from", config.from_), ("--student-layers", config.student_layers))
             if value is not None]
    if len(named) != 1:
        raise UsageError(f"name the student: --model, --from or --student-layers, one of them; found {' and '.join(named) or 'none'}")
    if config.teacher is None and (config.how != "stored" or config.student_layers is not None):
        raise UsageError("name who teaches: --teacher")
    if config.teacher_logits is not None and config.how != "stored":
        raise UsageError(f"--teacher-logits is for --how stored, and --how is {config.how}")
    if config.shards > 1 and config.how == "stored":
        raise UsageError("--how stored with --shards: stored logits are read by one process; give --how online, or leave --shards at 1")
    if config.fsdp and config.how == "stored":
        raise UsageError("--fsdp with --how stored: stored logits are read by one process; give --how online")
    if config.on_policy and (config.how != "online" or config.ce_weight):
        raise UsageError("--on-policy with " + (f"--how {config.how}: what the student says is not known before, so that its teacher must "
                         "read along; give --how online" if config.how != "online" else "--ce-weight: the student would be taught its own "
                         "words; leave it out"))
    if config.divergence_top_k is not None and config.how != "online":
        raise UsageError(f"--divergence-top-k with --how {config.how}: it is of a teacher that reads along; " + (
            "how many tokens are stored is --teacher-top-k" if config.how == "stored" else "leave it out"))
    if config.ce_weight and config.how == "text":
        raise UsageError("--how text learns the teacher's text by its cross-entropy alone: leave --ce-weight out")


def with_student(config: Distill, say: Callable[[str], None], world: World) -> Distill:
    """The options with the student's model, which is built first where it consists of some of the teacher's layers."""
    if config.student_layers is None:
        return config
    student = Path(config.out) / "student"
    layers = config.student_layers
    made_by_first(world, student, lambda: make_student(student, open_teacher_model(config), layers, say))
    return replace(config, model=str(student))


def load_lessons(config: Distill, start: StartingModel, device: str, say: Callable[[str], None]) -> Conversations:
    """The conversations to train on: those given, or the teacher's answers to their prompts, with its answers to other prompts held out."""
    if config.how != "text":
        return load_conversations(config, start)
    learned, held_out = write_teacher_text(config, open_teacher_model(config), start.tokenizer, device, say)
    return load_conversations(replace(config, data=(str(learned),), held_out_data=str(held_out), limit=None), start)


def load_teacher(config: Distill, start: StartingModel, data: Conversations, device: str, say: Callable[[str], None]) -> Teacher:
    student = Student(start.parent.config.vocab, start.tokenizer, longest_read(config, start, data))
    teacher: Teacher
    if config.how == "online":
        teacher = load_online(config, student, device)
    else:
        every, rows = [*data.train, *data.held_out], max(1, config.micro_batch_tokens // config.max_length)
        teacher = load_stored_answers(config, student, every, held_out_batches(every, config.max_length, rows), device, say)
    if teacher.digest == start.parent.digest and not config.ce_weight:
        raise UsageError(f"student and teacher are the same weights ({teacher.digest[:12]}): there is nothing to learn, and every "
                         "gradient would be 0. Name another student, or let the text teach too with --ce-weight")
    return teacher


def longest_read(config: Distill, start: StartingModel, data: Conversations) -> int:
    """Tokens of the longest text that the teacher reads: of the data or, where the student speaks itself, as many as it may say."""
    given = max((len(example.tokens) for example in (*data.train, *data.held_out)), default=0)
    return max(given, longest_own_words(config, start.model.config)) if config.on_policy else given


class Lessons:
    """Data of a distillation run: conversations with the teacher's log-probabilities, how they are scored, and what a checkpoint records
    of both.
    """

    def __init__(self, data: Conversations, teacher: Teacher | None, how: str):
        self.teacher = teacher
        self.data = data if teacher is None else replace(data, scored_as=scored_as(teacher, how))

    def batch(self, step: int) -> Batch:
        batch = self.data.batch(step)
        return batch if self.teacher is None else self.teacher.answered(batch)

    def score(self, model: Transformer, rows: int, count: int | None = None) -> HeldOut:
        batches = self.data.held_out_batches(rows, count)
        if self.teacher is None:
            return score_examples(model, batches, rows=rows)
        return score_examples(model, map(self.teacher.answered, batches), rows=rows, objective=self.teacher.objective,
                              unit="blended nats per token")

    def columns(self, model: Transformer, rows: int, count: int) -> dict[str, float]:
        """Evaluation columns beside the loss: the KL to the teacher and how often both hold the same token likeliest."""
        if self.teacher is None:
            return {}
        found = self.teacher.agreement(model, self.data.held_out_batches(rows, count)).estimates()
        columns = {"eval_teacher_kl": found["kl"], "eval_teacher_top1": found["top1"], "eval_ce": found["student_ce"]}
        return interval_columns(columns)

    def facts(self, step: int) -> dict[str, Any]:
        return self.data.facts(step) | ({} if self.teacher is None else {"teacher": self.teacher.digest})

    def check_same(self, recorded: Mapping[str, Any]) -> Verdict:
        if self.teacher is not None and recorded["teacher"] != self.teacher.digest:
            return refuted("same data", f"the teacher is {self.teacher.digest[:12]} now, the run began with {recorded['teacher'][:12]}; "
                                        "give it back, or begin a new run")
        return self.data.check_same(recorded)


def scored_as(teacher: Teacher, how: str) -> str:
    blend = teacher.blend
    among = "" if blend.top_k is None else f" among {blend.top_k} tokens and the rest"
    return (f"{how} {blend.divergence} divergence{among} from {teacher.digest[:12]}, temperature {blend.temperature:g}, "
            f"kd_weight {blend.kd_weight:g}, ce_weight {blend.ce_weight:g}")


def preflight_distill(trainer: Trainer, lessons: Lessons, start: StartingModel) -> list[Verdict]:
    """Distillation preflight: the loss, a teacher that knows the text, gradients of every trained tensor, and the audit of the data."""
    batch, teacher = trainer.first_micro_batch(lessons.batch(0)), lessons.teacher
    found, shown = trainer.gradients(batch), sample_rows(batch)
    several = teacher.teachers if isinstance(teacher, OnlineTeachers) else ()
    asked = [each.model for each in several] if several else [] if teacher is None or teacher.model is None else [teacher.model]
    with uncompiled():
        if teacher is None:
            of_loss = loss_preflight.preflight_loss(trainer.model, trainer.objective, shown, trainer.accumulate_alone)
        elif isinstance(teacher, OnlineTeachers):
            of_loss = guard.preflight_teachers(trainer.model, [(each.objective, each.blend, each.model) for each in several],
                                               teacher.shares, teacher.objective, shown,
                                               tokenizers=(start.tokenizer.digest, teacher.tokenizer),
                                               accumulate=trainer.accumulate_alone, reachable=trainer.weights.reachable())
        else:
            of_loss = guard.preflight_distillation(trainer.model, teacher.objective, shown, teacher.blend, teacher=teacher.model,
                                      accumulate=trainer.accumulate_alone, tokenizers=(start.tokenizer.digest, teacher.tokenizer),
                                      reachable=trainer.weights.reachable())
        return [check_detectors(), *of_loss, *trainer.check_precision(batch, found, *asked), *trainer.check_reach(found),
                *lessons.data.audit(start), *trainer.check_world(lessons.batch(0))]  # last: with --fsdp nobody holds the whole afterwards


def preflight_own_words(trainer: Trainer, lessons: Lessons, own_words: OnPolicy | None) -> list[Verdict]:
    """On-policy preflight on a batch of the student's own answers: sampler and trainer run the same student, and every teacher scores the
    sampled token and not its neighbour.
    """
    if own_words is None:
        return []
    planned, teacher = lessons.data.batch(0), lessons.teacher
    drawn = own_words.draw(planned, trainer.done)
    batch = own_words.packed(planned, drawn).to(trainer.device)
    assert teacher is not None
    teachers = teacher.teachers if isinstance(teacher, OnlineTeachers) else (teacher,)
    with uncompiled():
        return [check_floor(rollout_floor(trainer.model, drawn, own_words.temperature)),
                guard.check_drawn_tokens(batch, [(prompt.ids, said.ids) for prompt, said in drawn]),
                *(guard.check_own_words_loss(trainer.model, each.objective, sample_rows(batch), each.blend, each.model)
                  for each in teachers if each.model is not None)]

# ---------------------------------------------------------------- what is told of it


def tell_worth(run: Run, teacher: Teacher, agreement: Agreement) -> None:
    """Report the teacher's loss on all held-out text once, before the student has been trained."""
    found = agreement.estimates()
    run.log(Event.TEACHER, digest=teacher.digest, **plain({name: asdict(estimate) for name, estimate in found.items()}))
    said = f"the teacher {found['teacher_ce']}, " if "teacher_ce" in found else ""  # stored answers do not tell
    run.say(f"nats per token of what is held out: {said}the student {found['student_ce']}; KL {found['kl']}")


def compare_agreement(run: Run, teacher: Teacher, start: StartingModel, data: Conversations, trainer: Trainer,
                      written: Path) -> dict[str, Any]:
    """Agreement of the exported student with its teacher on all held-out text, beside the student before training."""
    parent = open_artifact(start.parent.path)  # anew: on a CPU the student has learned in the tensors that were opened first
    before, after = (teacher.agreement(build_model(artifact).to(trainer.device), data.held_out_batches(trainer.micro))
                     for artifact in (parent, open_artifact(written)))
    was, now, fell = before.estimates(), after.estimates(), fall(before, after)
    share = f", down by {fell} of what it was" if fell else ""
    run.say(f"KL to the teacher {was['kl']} → {now['kl']} nats{share}; the same token likeliest {now['top1']}; cross-entropy "
            f"{now['student_ce']}")
    return {"teacher": teacher.digest, "agreement": {name: asdict(found) for name, found in now.items()},
            "agreement_before": {name: asdict(found) for name, found in was.items()}, "kl_fell_by": fell and asdict(fell)}


def fall(before: Agreement, after: Agreement) -> Estimate | None:
    """The share by which the KL fell over all tokens, on the same documents before and after.

    None where the KL was 0 at the start: a student that equals its teacher.
    """
    assert before.ids == after.ids, "both read the same batches"
    start = np.maximum(before.kl * before.tokens, 0)  # rounding may leave a hair less
    if start.sum() - start.max() <= 0:
        return None
    return ratio(start - after.kl * after.tokens, start)


def check_told(run: Run, recorded: HeldOut, held_out: int) -> Verdict:
    """Check that the score in the ledger is the mean over every held-out token, and not the last batch's loss or another evaluation's."""
    told = [event for event in run.ledger.events() if event["kind"] == Event.HAND_OVER][-1]
    assert recorded.tokens is not None
    verdict = check_reported_loss(told["score"]["mean"], recorded.per_document, recorded.tokens)
    if recorded.per_document.size != held_out:
        return refuted("result", f"{recorded.per_document.size} of {held_out} held-out conversations were scored")
    return verdict

"""Distillation: a student learns its teacher's distribution, online or from stored logits, or the text that its teacher writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from assay.data.batch import Batch
from assay.data.chat import TrainingExample
from assay.data.packing import PackedExamples
from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut, score_examples
from assay.evaluation.teacher_agreement import Agreement
from assay.guard import distillation_checks as guard
from assay.guard.conclusion_checks import check_reported_loss
from assay.learn.objectives import Objective, next_token
from assay.model.transformer import Transformer
from assay.recipes.handover import hand_over
from assay.recipes.options import Distill, Tuning
from assay.recipes.run import plain, say_now
from assay.recipes.shrunk import make_student
from assay.recipes.teachers import Present, Pupil, Questions, Teacher, blend_of, opened, remembered
from assay.recipes.tuning import Conversations, Tuned, conversed, held_out_batches
from assay.recipes.written import write_text
from assay.statistics.estimate import Estimate, ratio
from assay.store.artifact import Artifact, build_model, open_artifact
from assay.store.ledger import Event
from assay.verdict import Verdict, refuted


def distill(config: Distill, say: Callable[[str], None] = say_now) -> tuple[list[Verdict], int | None]:
    """The verdicts on what was handed over, and the signal that interrupted the run, if one did: then nothing was."""
    _refuse_nonsense(config)
    work = Imitation(config, say) if config.how == "text" else Distillation(config, say)
    with work.run.sitting():
        if (interrupted := work.go()) is not None:
            return [], interrupted
        best = work.looks.best_checkpoint(work.run.checkpoints)
        recorded, verdicts = hand_over(work.run, best, work.looks, work.score_all, work.told)
        return [*verdicts, check_told(work, recorded)], None


def _refuse_nonsense(config: Distill) -> None:
    named = [flag for flag, value in (("--student", config.model), ("--from", config.from_), ("--student-layers", config.student_layers))
             if value is not None]
    if len(named) != 1:
        raise UsageError(f"name the student: --student, --from or --student-layers, one of them; found {' and '.join(named) or 'none'}")
    if config.teacher is None and (config.how != "stored" or config.student_layers is not None):
        raise UsageError("name who teaches: --teacher")
    if config.teacher_logits is not None and config.how != "stored":
        raise UsageError(f"--teacher-logits is for --how stored, and --how is {config.how}")
    if config.ce_weight and config.how == "text":
        raise UsageError("--how text learns the teacher's text by its cross-entropy alone: leave --ce-weight out")


class Taught(Tuned):
    """What all ways of distilling have in common."""

    def naming_parent(self, config: Distill, say: Callable[[str], None]) -> Tuning:
        if config.student_layers is None:
            return config
        student = Path(config.out) / "student"
        make_student(student, opened(config), config.student_layers, say)
        return replace(config, model=str(student))

    def told(self, handed_over: Artifact) -> dict[str, Any]:
        """What the hand-over's line in the ledger says besides the score."""
        return {}


class Imitation(Taught):
    """The teacher's words are the data, and what is held out are its words to prompts that are not trained on."""

    def converse(self, config: Distill, device: str, say: Callable[[str], None]) -> Conversations:
        learned, held_out = write_text(config, opened(config), self.beginning.tokenizer, device, say)
        return conversed(replace(config, data=(str(learned),), held_out_data=str(held_out)), self.beginning)

    def objective(self, config: Distill, device: str, say: Callable[[str], None]) -> Objective:
        return next_token


class Distillation(Taught):
    """What is minimised is what a look scores and what the best checkpoint is chosen by: the blend, on held-out conversations.

    Beside it stand the KL to the teacher and how often both hold the same token likeliest.
    """

    scale = 1.0  # nats: a divergence may come near 0, where a share of it is less than rounding
    teacher: Teacher

    def __init__(self, config: Distill, say: Callable[[str], None]):
        super().__init__(config, say)
        self.source = _Answered(self.order, self.teacher)

    def objective(self, config: Distill, device: str, say: Callable[[str], None]) -> Objective:
        pupil = Pupil(self.beginning.parent.config.vocab, self.beginning.tokenizer)
        if config.how == "online":
            self.teacher = Present(opened(config), pupil, blend_of(config), device)
        else:
            every = [*self.conversations.train, *self.conversations.held_out]
            rows = max(1, config.micro_tokens // config.length)
            asked = Questions(every, lambda: held_out_batches(every, config.length, rows))
            self.teacher = remembered(config, pupil, asked, device, say)
        if self.teacher.digest == self.beginning.parent.digest and not config.ce_weight:
            raise UsageError(f"student and teacher are the same weights ({self.teacher.digest[:12]}): there is nothing to learn, and every "
                             "gradient would be 0. Name another student, or let the text teach too with --ce-weight")
        blend = self.teacher.blend
        self.scored_as = (f"{config.how} {blend.divergence} divergence from {self.teacher.digest[:12]}, temperature {blend.temperature:g}, "
                          f"kd_weight {blend.kd_weight:g}, ce_weight {blend.ce_weight:g}")
        return self.teacher.objective

    def score(self, model: Transformer, examples: Sequence[TrainingExample], rows: int) -> HeldOut:
        batches = map(self.teacher.answered, held_out_batches(examples, self.config.length, rows))
        return score_examples(model, batches, rows=rows, objective=self.teacher.objective, unit="blended nats per token")

    def agreement(self, model: Transformer, examples: Sequence[TrainingExample], rows: int) -> Agreement:
        return self.teacher.agreement(model, held_out_batches(examples, self.config.length, rows))

    def also_looked(self, model: Transformer, examples: Sequence[TrainingExample], rows: int) -> dict[str, float]:
        found = self.agreement(model, examples, rows).estimates()
        columns = {"eval_teacher_kl": found["kl"], "eval_teacher_top1": found["top1"], "eval_ce": found["student_ce"]}
        return {f"{name}{end}": value for name, estimate in columns.items()
                for end, value in (("", estimate.mean), ("_low", estimate.low), ("_high", estimate.high))}

    def rehearsals(self, batch: Batch) -> list[Verdict]:
        teacher = self.teacher
        return guard.preflight_distillation(self.model, teacher.objective, batch, teacher.blend, teacher=teacher.model,
                                            accumulate=self.accumulate,
                               tokenizers=(self.beginning.tokenizer.digest, teacher.tokenizer), reachable=self.parts.form.reachable())

    def consulted(self) -> list[Transformer]:
        return [] if self.teacher.model is None else [self.teacher.model]

    def begin(self) -> None:
        """What the teacher is worth on all that is held out is said once, before the student has learned anything from it."""
        super().begin()
        if self.start == 0:
            found = self.agreement(self.model, self.conversations.held_out, self.parts.micro).estimates()
            self.run.ledger.append(Event.TEACHER, digest=self.teacher.digest, **plain({name: asdict(e) for name, e in found.items()}))
            teacher = f"the teacher {found['teacher_ce']}, " if "teacher_ce" in found else ""  # stored answers do not tell
            self.run.say(f"nats per token of what is held out: {teacher}the student {found['student_ce']}; KL {found['kl']}")

    def data_facts(self, step: int) -> dict[str, Any]:
        return super().data_facts(step) | {"teacher": self.teacher.digest}

    def same_data(self, recorded: Mapping[str, Any]) -> Verdict:
        verdict = super().same_data(recorded)
        if recorded["teacher"] != self.teacher.digest:
            return refuted("same data", f"the teacher is {self.teacher.digest[:12]} now, the run began with {recorded['teacher'][:12]}; "
                                        "give it back, or begin a new run")
        return verdict

    def finish(self) -> None:
        if frozen := self.teacher.unmoved():
            self.run.judge(Event.TEACHER_UNMOVED, frozen)
        super().finish()

    def told(self, handed_over: Artifact) -> dict[str, Any]:
        """Of the bytes on disk, on everything held out, beside the student as it was before the first step."""
        parent = open_artifact(self.beginning.parent.path)  # anew: on a CPU the student has learned in the tensors that were opened first
        before, after = (self.agreement(build_model(artifact).to(self.device), self.conversations.held_out, self.parts.micro)
                         for artifact in (parent, handed_over))
        was, now, fell = before.estimates(), after.estimates(), fall(before, after)
        share = f", down by {fell} of what it was" if fell else ""
        self.run.say(f"KL to the teacher {was['kl']} → {now['kl']} nats{share}; the same token likeliest {now['top1']}; cross-entropy "
                     f"{now['student_ce']}")
        return {"teacher": self.teacher.digest, "agreement": {name: asdict(found) for name, found in now.items()},
                "agreement_before": {name: asdict(found) for name, found in was.items()}, "kl_fell_by": fell and asdict(fell)}


@dataclass(frozen=True)
class _Answered:
    """The order's batches, each with what the teacher says of it."""

    order: PackedExamples
    teacher: Teacher

    def batch(self, step: int) -> Batch:
        return self.teacher.answered(self.order.batch(step))

    def epoch_of(self, step: int) -> int:
        return self.order.epoch_of(step)

    rows = property(lambda self: self.order.rows)
    windows = property(lambda self: self.order.windows)
    steps = property(lambda self: self.order.steps)


def fall(before: Agreement, after: Agreement) -> Estimate | None:
    """By what share the KL fell, over all tokens, the same documents before and after.

    None where there was none to fall: a student that is its teacher at the beginning.
    """
    assert before.ids == after.ids, "both read the same batches"
    start = np.maximum(before.kl * before.tokens, 0)  # rounding may leave a hair less
    if start.sum() - start.max() <= 0:
        return None
    return ratio(start - after.kl * after.tokens, start)


def check_told(work: Taught, recorded: HeldOut) -> Verdict:
    """The score in the ledger is the mean over every token held out: not the last batch's loss, nor a look's."""
    told = [event for event in work.run.ledger.events() if event["kind"] == Event.HAND_OVER][-1]
    assert recorded.tokens is not None
    verdict = check_reported_loss(told["score"]["mean"], recorded.per_document, recorded.tokens)
    if recorded.per_document.size != len(work.conversations.held_out):
        return refuted("result", f"{recorded.per_document.size} of {len(work.conversations.held_out)} held-out conversations were scored")
    return verdict

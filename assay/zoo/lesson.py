"""Where faults of distillation strike: a tiny teacher that has read the practice corpus, its stored answers, and short lessons."""

import copy
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from assay.data.batch import Batch
from assay.data.held_out import held_out_batches
from assay.data.teacher import entries_of, open_teacher, write_teacher
from assay.guard.held_out import check_result
from assay.guard.teacher import check_frozen, preflight
from assay.guard.update import parameter_digests
from assay.learn import distill, loop, objectives
from assay.learn.distill import Blend
from assay.measure.agreement import agreement
from assay.model.tiny import tiny_tokenizer
from assay.model.transformer import Transformer
from assay.verdict import Verdict
from assay.zoo.fault import Job, Plant
from assay.zoo.practice import LENGTH, MICRO, Practice, corpus, make_optimizer, refusal
from assay.zoo.stage import tiny

SOFT = Blend(temperature=2.0, kd_weight=0.5, ce_weight=0.5)
K = 8  # answers stored a token
STEPS = 40  # after which the teacher knows more than its student

# ---------------------------------------------------------------- teacher and student


@functools.cache
def learned() -> dict[str, Tensor]:
    """The teacher's weights."""
    course = Practice(steps=STEPS, lr=5e-3, epochs=4, rows=8)
    model, order = tiny("assay", 1), course.order()
    batches = (order.batch(step) for step in range(course.steps))
    for _ in loop.train(model, make_optimizer(model, course.lr), batches, objectives.next_token, micro=course.rows):
        pass
    return model.state_dict()


def a_teacher() -> Transformer:
    model = tiny("assay", 1)
    model.load_state_dict(learned())
    return frozen(model)


def frozen(teacher: Transformer) -> Transformer:
    return teacher.eval().requires_grad_(False)


def half_of(teacher: Transformer) -> Transformer:
    """A student of half the depth: the teacher's embedding and its first layer, to go on from."""
    student = tiny("assay", 0, depth=1, windows=(None,))
    student.embed, student.blocks[0] = taken(teacher.embed), taken(teacher.blocks[0])
    return student.requires_grad_(True)


def taken(part: Any) -> Any:
    """Of the teacher, for the student."""
    return copy.deepcopy(part)


def tokenizer_of(_: str) -> str:
    """The digest of the tokenizer of "student" or "teacher"."""
    return tiny_tokenizer().digest


def text(batch: Batch) -> Batch:
    """What the student reads: that which the teacher was asked about."""
    return batch

# ---------------------------------------------------------------- jobs


def a_lesson(blend: Blend = SOFT) -> Job:
    """The checks before a distillation's first step, on the first batch."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        batch = Practice().order().batch(0)
        with plant(folder):
            teacher = a_teacher()
            return preflight(tiny(), distill.distillation(teacher, blend), batch, blend, teacher=teacher,
                             tokenizers=(tokenizer_of("student"), tokenizer_of("teacher")))
    return job


def a_stored_lesson(folder: Path, plant: Plant) -> list[Verdict]:
    """The same, of answers that were written and are read back."""
    batch, blend = Practice().order().batch(0), Blend()
    store(folder, batch)
    with plant(folder):
        ids, logprobs = open_teacher(folder / "answers").streams_for(batch)
        said = replace(batch, teacher_ids=ids, teacher_logprobs=logprobs)
        return preflight(tiny(), distill.stored_distillation(blend), said, blend, teacher=None,
                         tokenizers=(tokenizer_of("student"), tokenizer_of("teacher")))


def answers_read_back(folder: Path, plant: Plant) -> list[Verdict]:
    batch = Practice().order().batch(0)
    store(folder, batch)
    with plant(folder):
        return [refusal("stored", lambda: open_teacher(folder / "answers", tokenizer=tokenizer_of("student")).streams_for(text(batch)))]


def a_short_distillation(folder: Path, plant: Plant) -> list[Verdict]:
    """A few steps, and what is told of them."""
    with plant(folder):
        teacher, course, last = a_teacher(), Practice(steps=3), math.nan
        before, order, student = parameter_digests(teacher), course.order(), half_of(teacher)
        batches = (order.batch(step) for step in range(course.steps))
        for step in loop.train(student, make_optimizer(student, course.lr), batches, distill.distillation(teacher, SOFT), micro=MICRO):
            last = float(step.loss)
        found = agreement(student, teacher, held_out_batches(corpus(), rows=8, length=LENGTH))
        told = result(last_batch=last, held_out=found.estimates()["student_ce"].mean)
    return [check_frozen(teacher, before), check_result(told, found.student_ce, found.tokens)]


def result(*, last_batch: float, held_out: float) -> float:
    """Which of the two is told."""
    return held_out


def store(folder: Path, batch: Batch) -> None:
    teacher = a_teacher()
    write_teacher(folder / "answers", entries_of(batch, *distill.top_k(teacher, batch, K)), tokenizer=tokenizer_of("teacher"),
                  teacher="of the zoo", vocab=teacher.config.vocab, k=K)

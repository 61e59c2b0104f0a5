"""Faults of distillation: a teacher that is not heard, or speaks of another text; a divergence that is none; a result that is no result."""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.data.batch import Batch
from assay.data.teacher import StoredTeacher
from assay.learn import distill, objectives
from assay.learn.distill import Blend, Divergence, Values
from assay.learn.objectives import Loss, Objective
from assay.model.transformer import Transformer
from assay.zoo import lesson
from assay.zoo.fault import fault
from assay.zoo.lesson import a_lesson, a_short_distillation, a_stored_lesson, answers_read_back
from assay.zoo.stage import flip_bit, on_disk, swapped

# ---------------------------------------------------------------- the teacher is not heard


@fault("teacher's term missing", rows=("L10",), stage="distil", check="signal", job=a_lesson())
def term_missing(_: Path) -> AbstractContextManager[None]:
    """The teacher is there, and the objective learns from the text alone: the loss falls as nicely."""
    return learning(lambda loss, text: loss._replace(total=text))


@fault("teacher's term without a gradient", rows=("L10",), stage="distil", check="signal", job=a_lesson())
def term_without_gradient(_: Path) -> AbstractContextManager[None]:
    """It is in the loss that is logged, and nothing comes of it."""
    return learning(lambda loss, text: loss._replace(total=loss.total.detach() + text - text.detach()))


@fault("teacher's answers dropped by the loader", rows=("L10",), stage="distil", check="teacher", job=a_stored_lesson)
def answers_dropped(_: Path) -> AbstractContextManager[None]:
    """The columns come through with their shapes and none of their values."""
    return reading(lambda ids, logprobs: (torch.zeros_like(ids), torch.zeros_like(logprobs)))


@fault("mean over the vocabulary", rows=("L10",), stage="distil", check="share", job=a_lesson(Blend(ce_weight=1.0)))
def mean_over_the_vocabulary(_: Path) -> AbstractContextManager[None]:
    """A library's default: each token's divergence is divided by V, and lost beside the cross-entropy."""
    whole = distill.forward_kl

    def shrunk(log_student: Tensor, log_teacher: Tensor) -> Values:
        values, slopes = whole(log_student, log_teacher)
        return values / log_student.shape[-1], slopes / log_student.shape[-1]

    return swapped(distill, "forward_kl", shrunk)

# ---------------------------------------------------------------- the teacher speaks of something else


@fault("teacher of another vocabulary", rows=("L08",), stage="distil", check="vocabulary", job=a_lesson())
def another_vocabulary(_: Path) -> AbstractContextManager[None]:
    """The student's ids go to a teacher whose tokenizer means other words by them."""
    return swapped(lesson, "tokenizer_of", lambda whose: {"student": "5" * 64, "teacher": "7" * 64}[whose])


@fault("teacher that cannot read the text", rows=("L08",), stage="distil", check="teacher", job=a_lesson())
def cannot_read(_: Path) -> AbstractContextManager[None]:
    """The tokenizers agree; the rows of its embedding are in another's order."""
    return teaching(lambda teacher: teacher.embed.weight.copy_(teacher.embed.weight.roll(101, 0)))


@fault("teacher's answers shifted by one", rows=("L05",), stage="distil", check="loss", job=a_lesson())
def shifted_by_one(_: Path) -> AbstractContextManager[None]:
    """What it says of the next token is held against the student's word on this one."""
    whole = distill.flat_states

    def late(model: Transformer, batch: Batch) -> Tensor:
        states = whole(model, batch)
        return states if model.embed.weight.requires_grad else states.roll(-1, 0)

    return swapped(distill, "flat_states", late)


@fault("stored answers shifted by one", rows=("L05",), stage="distil", check="teacher", job=a_stored_lesson)
def stored_shifted_by_one(_: Path) -> AbstractContextManager[None]:
    """Written at the token that predicts, read at the one that is predicted."""
    return reading(lambda ids, logprobs: (ids.roll(-1, 1), logprobs.roll(-1, 1)))


@fault("stored answers for another text", rows=("L08",), stage="distil", check="stored", job=answers_read_back)
def for_another_text(_: Path) -> AbstractContextManager[None]:
    """A word was changed in the data after the teacher was asked; lengths and ids are the same."""
    def edited(batch: Batch) -> Batch:
        tokens = batch.tokens.clone()
        tokens[0, 5] += 1
        return replace(batch, tokens=tokens)

    return swapped(lesson, "text", edited)


@fault("stored answers of another tokenizer", rows=("L08",), stage="distil", check="stored", job=answers_read_back)
def of_another_tokenizer(_: Path) -> AbstractContextManager[None]:
    return swapped(lesson, "tokenizer_of", lambda whose: "5" * 64)


@fault("stored answers damaged", rows=("C03",), stage="distil", check="stored", job=answers_read_back)
@on_disk
def stored_damaged(folder: Path) -> None:
    flip_bit(folder / "answers" / "logprobs.bin", 100)

# ---------------------------------------------------------------- the divergence is none


@fault("temperature without its square", rows=(), stage="loss", check="loss", job=a_lesson(Blend(temperature=4.0)))
def without_its_square(_: Path) -> AbstractContextManager[None]:
    """Warmer answers, and a gradient that is sixteen times too small."""
    return diverging(lambda values, slopes: (values / 16, slopes / 16))


@fault("divergence the wrong way round", rows=(), stage="loss", check="loss", job=a_lesson())
def wrong_way_round(_: Path) -> AbstractContextManager[None]:
    """Two arguments of a library's function exchanged: the student seeks one mode where it was to cover all."""
    return swapped(distill, "forward_kl", distill.reverse_kl)


@fault("only the teacher softened", rows=(), stage="loss", check="oneself", job=a_lesson())
def only_the_teacher_softened(_: Path) -> AbstractContextManager[None]:
    """The student's logits are not divided by the temperature: to agree, it would have to blur itself."""
    whole = distill.forward_kl
    return swapped(distill, "forward_kl", lambda student, teacher: whole((student * 2.0).log_softmax(-1), teacher))


@fault("impossible token times its probability", rows=("L09",), stage="loss", check="gradients", job=a_lesson(Blend("reverse")))
def impossible_token(_: Path) -> AbstractContextManager[None]:
    """Padded rows of the vocabulary are -inf to the teacher: the loss is masked and finite, its gradient is not."""
    def masked(log_student: Tensor, log_teacher: Tensor) -> Values:
        padded = log_teacher.clone()
        padded[:, -8:] = -math.inf
        student, excess = log_student.exp(), log_student - padded
        kl = torch.where(torch.isfinite(excess), student * excess, 0).sum(-1)
        return kl, student * (excess - kl[..., None])

    return swapped(distill, "reverse_kl", masked)


@fault("teacher's soft cap ignored", rows=("L12",), stage="kernel", check="loss", job=a_lesson())
def cap_ignored(_: Path) -> AbstractContextManager[None]:
    whole = distill.capped_logits
    return swapped(distill, "capped_logits", lambda states, head, cap: whole(states, head, None))


@fault("distillation that takes a mean", rows=("L03",), stage="loss", check="accumulation", job=a_lesson())
def takes_a_mean(_: Path) -> AbstractContextManager[None]:
    """Where the loop counts on a sum: at four micro-batches the gradient is four times what it should be."""
    return learning(lambda loss, text: loss._replace(total=loss.total / loss.weight))


@fault("padding in the teacher's term", rows=("L07",), stage="loss", check="padding", job=a_lesson())
def padding_in_the_term(_: Path) -> AbstractContextManager[None]:
    """Every position counts, because the teacher answers everywhere."""
    whole = distill.distillation

    def everywhere(teacher: Transformer, blend: Blend) -> Objective:
        def objective(student: Transformer, batch: Batch) -> Loss:
            weight = torch.ones_like(batch.weight)
            weight[:, 0] = 0
            return whole(teacher, blend)(student, unchecked(batch, weight))
        return objective

    return swapped(distill, "distillation", everywhere)

# ---------------------------------------------------------------- the teacher is not what it was


@fault("teacher in training mode", rows=("E02",), stage="distil", check="answers", job=a_lesson())
def in_training_mode(_: Path) -> AbstractContextManager[None]:
    return teaching(lambda teacher: teacher.train())


@fault("dropout in the teacher", rows=("E01",), stage="distil", check="answers", job=a_lesson())
@contextlib.contextmanager
def dropout_in_the_teacher(_: Path) -> Iterator[None]:
    """Whatever its mode: what it says is blurred anew at every step."""
    drop = lambda module, given, made: F.dropout(made, 0.1)  # noqa: E731
    with torch.random.fork_rng(), teaching(lambda teacher: teacher.blocks[0].mlp.register_forward_hook(drop)):
        yield


@fault("student built of the teacher's own layers", rows=("O07",), stage="distil", check="frozen", job=a_short_distillation)
def own_layers(_: Path) -> AbstractContextManager[None]:
    """Every second layer taken, none copied: the teacher learns along, and the two agree better and better."""
    return swapped(lesson, "taken", lambda part: part)

# ---------------------------------------------------------------- the result is none


@fault("last batch's loss as the result", rows=("S2",), stage="eval", check="result", job=a_short_distillation)
def last_batch_as_the_result(_: Path) -> AbstractContextManager[None]:
    """"Converged to 3.58": one batch of training text, told as what the student can do."""
    return swapped(lesson, "result", lambda *, last_batch, held_out: last_batch)

# ---------------------------------------------------------------- where in our code they are planted


def learning(change: Callable[[Loss, Tensor], Loss]) -> AbstractContextManager[None]:
    """The objective's loss, changed; beside it the summed cross-entropy of the text."""
    whole = distill.distillation

    def distillation(teacher: Transformer, blend: Blend) -> Objective:
        return lambda student, batch: change(whole(teacher, blend)(student, batch), objectives.next_token(student, batch).total)

    return swapped(distill, "distillation", distillation)


def diverging(change: Callable[[Tensor, Tensor], Values]) -> AbstractContextManager[None]:
    whole: Divergence = distill.forward_kl
    return swapped(distill, "forward_kl", lambda student, teacher: change(*whole(student, teacher)))


def reading(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> AbstractContextManager[None]:
    """The stored streams, as they reach the batch."""
    whole = StoredTeacher.streams_for
    return swapped(StoredTeacher, "streams_for", lambda self, batch: change(*whole(self, batch)))


def teaching(change: Callable[[Any], object]) -> AbstractContextManager[None]:
    whole = lesson.a_teacher

    def changed() -> Transformer:
        teacher = whole()
        change(teacher)
        return teacher

    return swapped(lesson, "a_teacher", changed)


def unchecked(batch: Batch, weight: Tensor) -> Batch:
    """A batch refuses weight on padding; code that keeps no batches does not."""
    made = replace(batch)
    object.__setattr__(made, "weight", weight)
    return made

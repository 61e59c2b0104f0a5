"""Distillation faults: a teacher without effect, or asked about another text; wrong divergences; a loss that is no result."""

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
from assay.data.teacher_store import StoredTeacher
from assay.learn import distillation, objectives
from assay.learn.distillation import DistillationSettings, DivergenceFunction, TermAndSlope
from assay.learn.objectives import Loss, Objective
from assay.model.transformer import Transformer
from assay.testing import tiny_training
from assay.testing.fault_injection import fault
from assay.testing.tiny_models import flip_bit, on_disk, swap
from assay.testing.tiny_training import a_distillation_preflight, a_short_distillation, a_stored_preflight, answers_read_back

# ---------------------------------------------------------------- the teacher is not heard


@fault("teacher's term missing", rows=("L10",), stage="distil", check="signal", job=a_distillation_preflight())
def term_missing(_: Path) -> AbstractContextManager[None]:
    """The teacher is there, and the objective learns from the text alone: the loss falls as nicely."""
    return learning(lambda loss, text: loss._replace(total=text))


@fault("teacher's term without a gradient", rows=("L10",), stage="distil", check="signal", job=a_distillation_preflight())
def term_without_gradient(_: Path) -> AbstractContextManager[None]:
    """It is in the loss that is logged, and nothing comes of it."""
    return learning(lambda loss, text: loss._replace(total=loss.total.detach() + text - text.detach()))


@fault("teacher's answers dropped by the loader", rows=("L10",), stage="distil", check="teacher", job=a_stored_preflight)
def answers_dropped(_: Path) -> AbstractContextManager[None]:
    """The columns come through with their shapes and none of their values."""
    return changing_stored(lambda ids, logprobs: (torch.zeros_like(ids), torch.zeros_like(logprobs)))


@fault("mean over the vocabulary", rows=("L10",), stage="distil", check="share",
       job=a_distillation_preflight(DistillationSettings(ce_weight=1.0)))
def mean_over_the_vocabulary(_: Path) -> AbstractContextManager[None]:
    """A library's default: each token's divergence is divided by V, and lost beside the cross-entropy."""
    whole = distillation.forward_kl

    def shrunk(log_student: Tensor, log_teacher: Tensor) -> TermAndSlope:
        values, slopes = whole(log_student, log_teacher)
        return values / log_student.shape[-1], slopes / log_student.shape[-1]

    return swap(distillation, "forward_kl", shrunk)

# ---------------------------------------------------------------- the teacher speaks of something else


@fault("teacher of another vocabulary", rows=("L08",), stage="distil", check="vocabulary", job=a_distillation_preflight())
def another_vocabulary(_: Path) -> AbstractContextManager[None]:
    """The student's ids go to a teacher whose tokenizer means other words by them."""
    return swap(tiny_training, "tokenizer_digest", lambda whose: {"student": "5" * 64, "teacher": "7" * 64}[whose])


@fault("teacher that cannot read the text", rows=("L08",), stage="distil", check="teacher", job=a_distillation_preflight())
def cannot_read(_: Path) -> AbstractContextManager[None]:
    """The tokenizers agree; the rows of its embedding are in another's order."""
    return teaching(lambda teacher: teacher.embed.weight.copy_(teacher.embed.weight.roll(101, 0)))


@fault("teacher's answers shifted by one", rows=("L05",), stage="distil", check="loss", job=a_distillation_preflight())
def shifted_by_one(_: Path) -> AbstractContextManager[None]:
    """What it says of the next token is held against the student's word on this one."""
    whole = distillation.flat_states

    def late(model: Transformer, batch: Batch) -> Tensor:
        states = whole(model, batch)
        return states if model.embed.weight.requires_grad else states.roll(-1, 0)

    return swap(distillation, "flat_states", late)


@fault("stored answers shifted by one", rows=("L05",), stage="distil", check="teacher", job=a_stored_preflight)
def stored_shifted_by_one(_: Path) -> AbstractContextManager[None]:
    """Written at the token that predicts, read at the one that is predicted."""
    return changing_stored(lambda ids, logprobs: (ids.roll(-1, 1), logprobs.roll(-1, 1)))


@fault("stored answers for another text", rows=("L08",), stage="distil", check="stored", job=answers_read_back)
def for_another_text(_: Path) -> AbstractContextManager[None]:
    """A word was changed in the data after the teacher was asked; lengths and ids are the same."""
    def edited(batch: Batch) -> Batch:
        tokens = batch.tokens.clone()
        tokens[0, 5] += 1
        return replace(batch, tokens=tokens)

    return swap(tiny_training, "student_text", edited)


@fault("stored answers of another tokenizer", rows=("L08",), stage="distil", check="stored", job=answers_read_back)
def of_another_tokenizer(_: Path) -> AbstractContextManager[None]:
    return swap(tiny_training, "tokenizer_digest", lambda whose: "5" * 64)


@fault("stored answers damaged", rows=("C03",), stage="distil", check="stored", job=answers_read_back)
@on_disk
def stored_damaged(folder: Path) -> None:
    flip_bit(folder / "answers" / "logprobs.bin", 100)

# ---------------------------------------------------------------- the divergence is none


@fault("temperature without its square", rows=(), stage="loss", check="loss",
       job=a_distillation_preflight(DistillationSettings(temperature=4.0)))
def without_its_square(_: Path) -> AbstractContextManager[None]:
    """Warmer answers, and a gradient that is sixteen times too small."""
    return diverging(lambda values, slopes: (values / 16, slopes / 16))


@fault("divergence the wrong way round", rows=(), stage="loss", check="loss", job=a_distillation_preflight())
def wrong_way_round(_: Path) -> AbstractContextManager[None]:
    """Two arguments of a library's function exchanged: the student seeks one mode where it was to cover all."""
    return swap(distillation, "forward_kl", distillation.reverse_kl)


@fault("only the teacher softened", rows=(), stage="loss", check="oneself", job=a_distillation_preflight())
def only_the_teacher_softened(_: Path) -> AbstractContextManager[None]:
    """The student's logits are not divided by the temperature: to agree, it would have to blur itself."""
    whole = distillation.forward_kl
    return swap(distillation, "forward_kl", lambda student, teacher: whole((student * 2.0).log_softmax(-1), teacher))


@fault("impossible token times its probability", rows=("L09",), stage="loss", check="gradients",
       job=a_distillation_preflight(DistillationSettings("reverse")))
def impossible_token(_: Path) -> AbstractContextManager[None]:
    """Padded rows of the vocabulary are -inf to the teacher: the loss is masked and finite, its gradient is not."""
    def masked(log_student: Tensor, log_teacher: Tensor) -> TermAndSlope:
        padded = log_teacher.clone()
        padded[:, -8:] = -math.inf
        student, excess = log_student.exp(), log_student - padded
        kl = torch.where(torch.isfinite(excess), student * excess, 0).sum(-1)
        return kl, student * (excess - kl[..., None])

    return swap(distillation, "reverse_kl", masked)


@fault("teacher's soft cap ignored", rows=("L12",), stage="kernel", check="loss", job=a_distillation_preflight())
def cap_ignored(_: Path) -> AbstractContextManager[None]:
    whole = distillation.capped_logits
    return swap(distillation, "capped_logits", lambda states, head, cap: whole(states, head, None))


@fault("distillation that takes a mean", rows=("L03",), stage="loss", check="accumulation", job=a_distillation_preflight())
def takes_a_mean(_: Path) -> AbstractContextManager[None]:
    """Where the loop counts on a sum: at four micro-batches the gradient is four times what it should be."""
    return learning(lambda loss, text: loss._replace(total=loss.total / loss.weight))


@fault("padding in the teacher's term", rows=("L07",), stage="loss", check="padding", job=a_distillation_preflight())
def padding_in_the_term(_: Path) -> AbstractContextManager[None]:
    """Every position counts, because the teacher answers everywhere."""
    whole = distillation.distillation

    def everywhere(teacher: Transformer, blend: DistillationSettings) -> Objective:
        def objective(student: Transformer, batch: Batch) -> Loss:
            weight = torch.ones_like(batch.weight)
            weight[:, 0] = 0
            return whole(teacher, blend)(student, unchecked(batch, weight))
        return objective

    return swap(distillation, "distillation", everywhere)

# ---------------------------------------------------------------- the teacher is not what it was


@fault("teacher in training mode", rows=("E02",), stage="distil", check="answers", job=a_distillation_preflight())
def in_training_mode(_: Path) -> AbstractContextManager[None]:
    return teaching(lambda teacher: teacher.train())


@fault("dropout in the teacher", rows=("E01",), stage="distil", check="answers", job=a_distillation_preflight())
@contextlib.contextmanager
def dropout_in_the_teacher(_: Path) -> Iterator[None]:
    """Whatever its mode: what it says is blurred anew at every step."""
    drop = lambda module, given, made: F.dropout(made, 0.1)  # noqa: E731
    with torch.random.fork_rng(), teaching(lambda teacher: teacher.blocks[0].mlp.register_forward_hook(drop)):
        yield


@fault("student built of the teacher's own layers", rows=("O07",), stage="distil", check="frozen", job=a_short_distillation)
def own_layers(_: Path) -> AbstractContextManager[None]:
    """Every second layer taken, none copied: the teacher learns along, and the two agree better and better."""
    return swap(tiny_training, "copy_layer", lambda part: part)

# ---------------------------------------------------------------- the result is none


@fault("last batch's loss as the result", rows=("S2",), stage="eval", check="result", job=a_short_distillation)
def last_batch_as_the_result(_: Path) -> AbstractContextManager[None]:
    """"Converged to 3.58": one batch of training text, told as what the student can do."""
    return swap(tiny_training, "reported_loss", lambda *, last_batch, held_out: last_batch)

# ---------------------------------------------------------------- where in our code they are planted


def learning(change: Callable[[Loss, Tensor], Loss]) -> AbstractContextManager[None]:
    """The objective's loss, changed; beside it the summed cross-entropy of the text."""
    whole = distillation.distillation

    def changed(teacher: Transformer, blend: DistillationSettings) -> Objective:
        return lambda student, batch: change(whole(teacher, blend)(student, batch), objectives.next_token(student, batch).total)

    return swap(distillation, "distillation", changed)


def diverging(change: Callable[[Tensor, Tensor], TermAndSlope]) -> AbstractContextManager[None]:
    whole: DivergenceFunction = distillation.forward_kl
    return swap(distillation, "forward_kl", lambda student, teacher: change(*whole(student, teacher)))


def changing_stored(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> AbstractContextManager[None]:
    """The stored streams, as they reach the batch."""
    whole = StoredTeacher.streams_for
    return swap(StoredTeacher, "streams_for", lambda self, batch: change(*whole(self, batch)))


def teaching(change: Callable[[Any], object]) -> AbstractContextManager[None]:
    whole = tiny_training.tiny_teacher

    def changed() -> Transformer:
        teacher = whole()
        change(teacher)
        return teacher

    return swap(tiny_training, "tiny_teacher", changed)


def unchecked(batch: Batch, weight: Tensor) -> Batch:
    """A batch refuses weight on padding; code that keeps no batches does not."""
    made = replace(batch)
    object.__setattr__(made, "weight", weight)
    return made

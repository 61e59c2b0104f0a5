"""Distillation faults: a teacher without effect, or asked about another text; wrong divergences; a loss that is no result."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
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
from assay.testing.fault_injection import fault, in_place_of, on_disk, swap, together
from assay.testing.tiny_models import flip_bit
from assay.testing.tiny_training import a_distillation_preflight, a_short_distillation, a_stored_preflight, answers_read_back

# ---------------------------------------------------------------- the teacher is not heard


fault("teacher's term missing", rows=("L10",), stage="distil", check="signal", job=a_distillation_preflight())(
    # The teacher is there, and the objective learns from the text alone: the loss falls as nicely.
    lambda _: learning(lambda loss, text: loss._replace(total=text)))
fault("teacher's term without a gradient", rows=("L10",), stage="distil", check="signal", job=a_distillation_preflight())(
    # It is in the loss that is logged, and nothing comes of it.
    lambda _: learning(lambda loss, text: loss._replace(total=loss.total.detach() + text - text.detach())))
fault("teacher's answers dropped by the loader", rows=("L10",), stage="distil", check="teacher", job=a_stored_preflight)(
    # The columns come through with their shapes and none of their values.
    lambda _: changing_stored(lambda ids, logprobs: (torch.zeros_like(ids), torch.zeros_like(logprobs))))


@fault("mean over the vocabulary", rows=("L10",), stage="distil", check="share",
       job=a_distillation_preflight(DistillationSettings(ce_weight=1.0)))
@in_place_of(distillation, "forward_kl")
def mean_over_the_vocabulary(usual: Any, log_student: Tensor, log_teacher: Tensor) -> TermAndSlope:
    """A library's default: each token's divergence is divided by V, and lost beside the cross-entropy."""
    values, slopes = usual(log_student, log_teacher)
    return values / log_student.shape[-1], slopes / log_student.shape[-1]

# ---------------------------------------------------------------- the teacher speaks of something else


fault("teacher of another vocabulary", rows=("L08",), stage="distil", check="vocabulary", job=a_distillation_preflight())(
    # The student's ids go to a teacher whose tokenizer means other words by them.
    lambda _: swap(tiny_training, "tokenizer_digest", lambda whose: {"student": "5" * 64, "teacher": "7" * 64}[whose]))
fault("teacher that cannot read the text", rows=("L08",), stage="distil", check="teacher", job=a_distillation_preflight())(
    # The tokenizers agree; the rows of its embedding are in another's order.
    lambda _: teaching(lambda teacher: teacher.embed.weight.copy_(teacher.embed.weight.roll(101, 0))))


@fault("teacher's answers shifted by one", rows=("L05",), stage="distil", check="loss", job=a_distillation_preflight())
@in_place_of(distillation, "flat_states")
def shifted_by_one(usual: Any, model: Transformer, batch: Batch) -> Tensor:
    """Fault: the teacher's distribution of the next token is compared with the student's of this one."""
    states = usual(model, batch)
    return states if model.embed.weight.requires_grad else states.roll(-1, 0)


fault("stored answers shifted by one", rows=("L05",), stage="distil", check="teacher", job=a_stored_preflight)(
    # Written at the token that predicts, read at the one that is predicted.
    lambda _: changing_stored(lambda ids, logprobs: (ids.roll(-1, 1), logprobs.roll(-1, 1))))


@fault("stored answers for another text", rows=("L08",), stage="distil", check="stored", job=answers_read_back)
@in_place_of(tiny_training, "student_text")
def for_another_text(_: Any, batch: Batch) -> Batch:
    """A word was changed in the data after the teacher was asked; lengths and ids are the same."""
    tokens = batch.tokens.clone()
    tokens[0, 5] += 1
    return replace(batch, tokens=tokens)


fault("stored answers of another tokenizer", rows=("L08",), stage="distil", check="stored", job=answers_read_back)(
    lambda _: swap(tiny_training, "tokenizer_digest", lambda whose: "5" * 64))
fault("stored answers damaged", rows=("C03",), stage="distil", check="stored", job=answers_read_back)(
    on_disk(lambda folder: flip_bit(folder / "answers" / "logprobs.bin", 100)))

# ---------------------------------------------------------------- the divergence is none


fault("temperature without its square", rows=(), stage="loss", check="loss",
      job=a_distillation_preflight(DistillationSettings(temperature=4.0)))(
    # Warmer answers, and a gradient that is sixteen times too small.
    lambda _: diverging(lambda values, slopes: (values / 16, slopes / 16)))
fault("divergence the wrong way round", rows=(), stage="loss", check="loss", job=a_distillation_preflight())(
    # Two arguments of a library's function exchanged: the student seeks one mode where it was to cover all.
    lambda _: swap(distillation, "forward_kl", distillation.reverse_kl))
fault("only the teacher softened", rows=(), stage="loss", check="oneself", job=a_distillation_preflight())(
    # The student's logits are not divided by the temperature: to agree, it would have to blur itself.
    in_place_of(distillation, "forward_kl")(lambda usual, student, teacher: usual((student * 2.0).log_softmax(-1), teacher)))


@fault("impossible token times its probability", rows=("L09",), stage="loss", check="gradients",
       job=a_distillation_preflight(DistillationSettings("reverse")))
@in_place_of(distillation, "reverse_kl")
def impossible_token(_: Any, log_student: Tensor, log_teacher: Tensor) -> TermAndSlope:
    """Padded rows of the vocabulary are -inf to the teacher: the loss is masked and finite, its gradient is not."""
    padded = log_teacher.clone()
    padded[:, -8:] = -math.inf
    student, excess = log_student.exp(), log_student - padded
    kl = torch.where(torch.isfinite(excess), student * excess, 0).sum(-1)
    return kl, student * (excess - kl[..., None])


fault("teacher's soft cap ignored", rows=("L12",), stage="kernel", check="loss", job=a_distillation_preflight())(
    in_place_of(distillation, "capped_logits")(lambda usual, states, head, cap: usual(states, head, None)))
fault("distillation that takes a mean", rows=("L03", "N41"), stage="loss", check="accumulation", job=a_distillation_preflight())(
    # Where the loop counts on a sum: at four micro-batches the gradient is four times what it should be.
    lambda _: learning(lambda loss, text: loss._replace(total=loss.total / loss.weight)))


@fault("padding in the teacher's term", rows=("L07",), stage="loss", check="padding", job=a_distillation_preflight())
@in_place_of(distillation, "distillation")
def padding_in_the_term(usual: Any, teacher: Transformer, blend: DistillationSettings) -> Objective:
    """Every position counts, because the teacher answers everywhere."""
    def objective(student: Transformer, batch: Batch) -> Loss:
        weight = torch.ones_like(batch.weight)
        weight[:, 0] = 0
        return usual(teacher, blend)(student, unchecked(batch, weight))
    return objective

# ---------------------------------------------------------------- the teacher is not what it was


fault("teacher in training mode", rows=("E02",), stage="distil", check="answers", job=a_distillation_preflight())(
    lambda _: teaching(lambda teacher: teacher.train()))


fault("dropout in the teacher", rows=("E01",), stage="distil", check="answers", job=a_distillation_preflight())(
    # Whatever its mode: what it says is blurred anew at every step.
    lambda _: together(torch.random.fork_rng(), teaching(lambda teacher: teacher.blocks[0].mlp.register_forward_hook(
        lambda module, given, made: F.dropout(made, 0.1)))))


fault("student built of the teacher's own layers", rows=("O07",), stage="distil", check="frozen", job=a_short_distillation)(
    # Every second layer taken, none copied: the teacher learns along, and the two agree better and better.
    lambda _: swap(tiny_training, "copy_layer", lambda part: part))

# ---------------------------------------------------------------- the result is none


fault("last batch's loss as the result", rows=("S2",), stage="eval", check="result", job=a_short_distillation)(
    # "Converged to 3.58": one batch of training text, told as what the student can do.
    lambda _: swap(tiny_training, "reported_loss", lambda *, last_batch, held_out: last_batch))

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

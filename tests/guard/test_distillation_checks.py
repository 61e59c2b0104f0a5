"""Checks of distillation: silent on every sound setting, loud where the fault is small, and they leave both models as they were."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.data.batch import Batch
from assay.evaluation.teacher_agreement import Agreement
from assay.guard import distillation_checks as guard
from assay.guard.conclusion_checks import check_reported_loss
from assay.guard.distillation_checks import (
    check_agreement,
    check_same_vocabulary,
    check_self_distillation,
    check_stored_answers,
    check_teacher,
    check_teacher_frozen,
    check_teacher_share,
    check_teacher_signal,
    preflight_distillation,
)
from assay.guard.training_guards import parameter_digests
from assay.learn.distillation import DistillationSettings, distillation, stored_distillation, teacher_top_k
from assay.learn.objectives import next_token
from assay.testing.tiny_models import tiny_model
from assay.testing.tiny_training import TinyRun, freeze, tiny_teacher
from assay.verdict import Outcome

SAME = ("a" * 64, "a" * 64)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return TinyRun().order().batch(0)


BLENDS = [DistillationSettings(), DistillationSettings("reverse", 2.0), DistillationSettings("jsd", 4.0, beta=0.2),
          DistillationSettings(temperature=3.0, kd_weight=0.9, ce_weight=0.1),
          DistillationSettings("jsd", ce_weight=1.0), DistillationSettings(temperature=0.5), DistillationSettings("reverse", top_k=16)]


@pytest.mark.parametrize("blend", BLENDS, ids=str)
@pytest.mark.parametrize("family", ["llama", "assay"])
def test_it_is_silent_on_a_sound_distillation_and_changes_nothing(blend: DistillationSettings, family: str, batch: Batch):
    student, teacher = tiny_model(family), tiny_teacher()
    before = parameter_digests(student), parameter_digests(teacher)
    verdicts = preflight_distillation(student, distillation(teacher, blend), batch, blend, tokenizers=SAME, teacher=teacher)
    assert [str(v) for v in verdicts if v.outcome is not Outcome.PROVEN] == []
    assert {"vocabulary", "teacher", "answers", "signal", "gradients", "frozen", "oneself", "share", "loss", "padding"} <= {
        v.check for v in verdicts}
    assert (parameter_digests(student), parameter_digests(teacher)) == before
    assert all(p.grad is None for model in (student, teacher) for p in model.parameters())
    assert "head_weight" not in vars(teacher)


def test_oneself_is_asked_in_fp32_where_passes_without_gradients_round_elsewhere(batch: Batch, monkeypatch):
    student = tiny_model()
    hidden, noise = student.hidden, torch.Generator().manual_seed(0)
    student.compute_dtype = torch.bfloat16

    def rounding(*given, **named):
        states = hidden(*given, **named)
        elsewhere = student.compute_dtype is torch.bfloat16 and not torch.is_grad_enabled()
        return states + 0.1 * torch.randn(states.shape, generator=noise) if elsewhere else states

    monkeypatch.setattr(student, "hidden", rounding)
    assert check_self_distillation(student, batch, DistillationSettings()).outcome is Outcome.PROVEN
    student.compute_dtype = None
    monkeypatch.setattr(student, "hidden", lambda *given, **named: 1.1 * hidden(*given, **named) if torch.is_grad_enabled() else hidden(
        *given, **named))
    assert check_self_distillation(student, batch, DistillationSettings()).outcome is Outcome.REFUTED


@pytest.mark.parametrize("temperature", [0.7, 1.0, 4.0])
def test_it_is_silent_on_stored_answers_at_any_temperature(temperature: float, batch: Batch):
    blend = DistillationSettings(temperature=temperature, ce_weight=0.2)
    ids, logprobs = teacher_top_k(tiny_teacher(), batch, 8, temperature=temperature)
    said = replace(batch, teacher_ids=ids, teacher_logprobs=logprobs.half().float())
    verdicts = preflight_distillation(tiny_model(), stored_distillation(blend), said, blend, tokenizers=SAME, teacher=None)
    assert [str(v) for v in verdicts if v.outcome is not Outcome.PROVEN] == []
    shifted = replace(said, teacher_ids=said.teacher_ids.roll(1, 1), teacher_logprobs=said.teacher_logprobs.roll(1, 1))
    assert check_stored_answers(tiny_model(), shifted, blend).outcome is Outcome.REFUTED


def test_stored_answers_cost_what_the_teacher_pays(batch: Batch):
    """With all but one token stored nothing is left to the others' equal share, at any temperature."""
    teacher = tiny_teacher()
    paid = float(next_token(teacher, batch).total / batch.weight.sum())
    for temperature in (1.0, 2.0):
        ids, logprobs = teacher_top_k(teacher, batch, 319, temperature=temperature)
        said = replace(batch, teacher_ids=ids, teacher_logprobs=logprobs)
        found = check_stored_answers(tiny_model(), said, DistillationSettings(temperature=temperature)).evidence["teacher_ce"]
        assert found == pytest.approx(paid, rel=2e-3)


def test_two_vocabularies_end_it_before_anything_is_compared(batch: Batch):
    other = freeze(tiny_model("assay", 1, vocab=500))
    verdicts = preflight_distillation(tiny_model(), distillation(other), batch, DistillationSettings(), tokenizers=("a" * 64, "b" * 64),
                                      teacher=other)
    assert [(v.check, v.outcome) for v in verdicts] == [("vocabulary", Outcome.REFUTED)]
    assert "fine-tune the student on that" in verdicts[0].reason
    assert check_same_vocabulary(*SAME).outcome is Outcome.PROVEN


def test_a_teacher_that_knows_nothing_or_less_than_its_student_is_refused(batch: Batch):
    knows = tiny_teacher()
    assert "does not read this text" in check_teacher(tiny_model(), freeze(tiny_model("assay", 1)), batch, DistillationSettings()).reason
    halfway = freeze(tiny_model("assay", 1))
    with torch.no_grad():
        for ours, theirs in zip(halfway.parameters(), knows.parameters(), strict=True):
            ours.lerp_(theirs, 0.6)
    assert "nothing to learn from it" in check_teacher(knows, halfway, batch, DistillationSettings()).reason
    assert check_teacher(tiny_model(), halfway, batch, DistillationSettings()).outcome is Outcome.PROVEN


def test_a_teacher_that_moved_or_may_move_is_not_frozen():
    teacher = tiny_teacher()
    before = parameter_digests(teacher)
    assert check_teacher_frozen(teacher, before).outcome is Outcome.PROVEN
    teacher.get_parameter("norm.weight").view(torch.int32)[0] += 1  # the last bit
    assert "1 of 18 tensors of the teacher changed, norm.weight" in check_teacher_frozen(teacher, before).reason
    teacher.norm.requires_grad_(True)
    assert "1 of 18 tensors of the teacher may learn" in check_teacher_frozen(teacher, before).reason


def test_a_faint_signal_is_none(batch: Batch):
    teacher, student = tiny_teacher(), tiny_model()
    faint, loud = DistillationSettings(kd_weight=1e-4, ce_weight=1.0), DistillationSettings(kd_weight=0.1, ce_weight=1.0)
    assert check_teacher_signal(student, distillation(teacher, faint), batch, teacher).outcome is Outcome.REFUTED
    assert check_teacher_signal(student, distillation(teacher, loud), batch, teacher).outcome is Outcome.PROVEN
    drowned = check_teacher_share(student, teacher, distillation(teacher, faint), batch, faint)
    assert "kd_weight 0.0001 drowns beside ce_weight 1" in drowned.reason
    assert check_teacher_share(student, teacher, distillation(teacher, loud), batch, loud).outcome is Outcome.PROVEN


def test_a_student_that_already_agrees_is_said_to(batch: Batch):
    teacher, blend = tiny_teacher(), DistillationSettings(ce_weight=1.0)
    assert check_teacher_share(tiny_teacher(), teacher, distillation(teacher, blend), batch, blend).outcome is Outcome.UNPROVEN


def test_a_share_that_is_no_number_is_refused(batch: Batch):
    blend = DistillationSettings(ce_weight=1.0)
    teacher = tiny_teacher()
    loss = distillation(teacher, blend)(tiny_model(), batch)
    broken = lambda student, read: loss._replace(metrics={"kd": torch.tensor(math.nan), "ce": torch.tensor(1.0)})
    assert "kd_weight · kd is nan" in check_teacher_share(tiny_model(), teacher, broken, batch, blend).reason


def test_a_result_is_the_mean_over_every_token():
    losses, tokens = np.array([1.0, 2.0, 4.0]), np.array([10.0, 10.0, 20.0])
    assert check_reported_loss(2.75, losses, tokens).outcome is Outcome.PROVEN
    for wrong in (4.0, 7 / 3, 2.7501, math.nan):  # the last batch's, the mean of means, nearly, nothing
        assert check_reported_loss(wrong, losses, tokens).outcome is Outcome.REFUTED


def test_the_naive_twins_are_not_the_objectives(batch: Batch, monkeypatch):
    """A wrong divergence does not change what it is held against."""
    teacher, blend, student = tiny_teacher(), DistillationSettings(temperature=2.0), tiny_model()
    due = float(guard.naive_distillation(teacher, blend)(student, batch))
    monkeypatch.setattr("assay.learn.distillation.forward_kl", None)
    assert float(guard.naive_distillation(teacher, blend)(student, batch)) == due


@pytest.mark.parametrize("stored", [False, True])
def test_agreement_is_what_its_words_mean(stored: bool, batch: Batch, monkeypatch):
    student, teacher, blend = tiny_model(), tiny_teacher(), DistillationSettings(temperature=2.0)
    ids, logprobs = teacher_top_k(teacher, batch, 8, temperature=2.0)
    given = replace(batch, teacher_ids=ids, teacher_logprobs=logprobs) if stored else batch
    asked = None if stored else teacher
    assert check_agreement(student, asked, given, blend).outcome is Outcome.PROVEN
    name = "compare_stored_tokens" if stored else "compare_tokens"
    right = getattr(guard, name)
    for place in range(3):
        monkeypatch.setattr(guard, name, lambda *asked, place=place, **more: [
            each + 0.01 * (number == place) for number, each in enumerate(right(*asked, **more))])
        assert check_agreement(student, asked, given, blend).outcome is Outcome.REFUTED


def test_figures_of_agreement_are_means_over_all_tokens(batch: Batch, monkeypatch):
    usual = Agreement.estimates
    monkeypatch.setattr(Agreement, "estimates", lambda found: usual(replace(found, top1=found.top1[::-1])))
    told = check_agreement(tiny_model(), tiny_teacher(), batch, DistillationSettings())
    assert told.outcome is Outcome.REFUTED
    assert "top1 is 0.4, told" in told.reason

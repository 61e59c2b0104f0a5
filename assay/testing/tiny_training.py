"""Tiny training and distillation runs on a made-up corpus, with the guards that a real run has.

A job enters `plant` around everything that the fault could touch: what a run does wrong, its guards must see while it runs.
"""

import atexit
import contextlib
import copy
import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data import order as data_order
from assay.data.batch import Batch
from assay.data.build_corpus import CorpusPlan, build_corpus
from assay.data.held_out_documents import held_out_document_batches
from assay.data.order import Order
from assay.data.teacher_store import open_teacher, teacher_entries, write_teacher
from assay.data.token_corpus import Corpus
from assay.errors import AssayError, GuardStop, UsageError
from assay.evaluation.teacher_agreement import measure_agreement
from assay.guard.conclusion_checks import check_reported_loss
from assay.guard.data_order_checks import check_consumed
from assay.guard.distillation_checks import check_teacher_frozen, preflight_distillation
from assay.guard.loss_preflight import preflight_loss
from assay.guard.training_guards import StepWatch, UpdateAccount, check_optimizer, check_steps, check_weights, parameter_digests
from assay.learn import distillation, loop, objectives
from assay.learn.distillation import DistillationSettings
from assay.learn.lr_schedule import cosine
from assay.learn.objectives import Objective
from assay.learn.optim import adamw
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.seeds import derive
from assay.statistics.early_stopping import paired_noise, plan_stopping, should_stop
from assay.store.durable import write_entry
from assay.store.scratch import scratch_folder
from assay.testing.fault_injection import Job, Plant
from assay.testing.tiny_models import tiny_model, tiny_tokenizer
from assay.verdict import Outcome, Verdict, proven, refuted

TINY_WORDS = ("river", "song", "bread", "tower", "star", "friend", "bird", "king", "stone", "letter", "garden", "window", "road",
         "winter", "lamp", "boat", "market", "bell", "cloud", "bridge", "teacher", "forest", "candle", "silver", "morning")
DOCUMENTS, WORDS_EACH = 64, 16
ROWS_A_STEP, TINY_LENGTH, MICRO_ROWS = 4, 32, 2
LEAST_IMPROVEMENT, PATIENCE = 0.01, 2  # what a run that may stop early waits for, and how long

# ---------------------------------------------------------------- text and corpora


def tiny_documents(count: int = DOCUMENTS, seed: int = 0) -> list[str]:
    """Documents that nobody wrote; the first word of each names it."""
    words = random.Random(derive(seed, "practice"))
    return [f"n{number} " + " ".join(words.choice(TINY_WORDS) for _ in range(WORDS_EACH)) + "." for number in range(count)]


def write_documents(where: Path, texts: Sequence[str]) -> Path:
    where.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return where


def write_tiny_tokenizer(where: Path, tokenizer: Tokenizer) -> Path:
    where.mkdir()
    for name, data in tokenizer.files().items():
        write_entry(where / name, data)
    return where


def make_corpus(where: Path, texts: Sequence[str], *, tokenizer: Tokenizer | None = None, seed: int = 0) -> Corpus:
    """`where`/corpus, a quarter of it held out, made from `where`/text.jsonl."""
    where.mkdir(parents=True, exist_ok=True)
    words = write_tiny_tokenizer(where / "tokenizer", tokenizer or tiny_tokenizer(template=False))
    return build_corpus([write_documents(where / "text.jsonl", texts)], where / "corpus", words, CorpusPlan(held_out=0.25, seed=seed))


@functools.cache
def process_folder() -> Path:
    """Folder for what is made once in a process; gone when it ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(scratch_folder())


@functools.cache
def tiny_corpus() -> Corpus:
    """Tiny corpus, never changed: a fault that strikes a corpus makes its own."""
    return make_corpus(process_folder() / "practice", tiny_documents())

# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class TinyRun:
    """A tiny run. Its defaults leave every guard silent."""

    family: str = "llama"
    steps: int = 8
    lr: float = 1e-3
    rows: int = ROWS_A_STEP
    micro: int = MICRO_ROWS
    epochs: int = 1
    seed: int = 0
    in_bf16: bool = False  # begin with weights that bf16 can hold, as a model of that dtype would

    def order(self) -> Order:
        return Order(tiny_corpus(), self.seed, self.rows, TINY_LENGTH, self.epochs)

    def multiplier(self, step: int) -> float:
        return cosine(step, self.steps, warmup=2)

    def model(self) -> Transformer:
        model = tiny_model(self.family, self.seed)
        with torch.no_grad():
            for parameter in model.parameters() if self.in_bf16 else ():
                parameter.copy_(parameter.bfloat16())
        return model

    def train(self, model: Transformer, objective: Objective | None = None) -> Iterator[loop.Step]:
        """Train with a constant rate, without guards; yields the steps."""
        order = self.order()
        batches = (order.batch(step) for step in range(self.steps))
        return loop.train(model, make_optimizer(model, self.lr), batches, objective or objectives.next_token, micro=self.micro)


def run_guarded(run: TinyRun) -> list[Verdict]:
    """Verdicts of the guards on a tiny run: those that read its steps, and those that account for its updates."""
    model, order = run.model(), run.order()
    trained = [name for name, _ in model.named_parameters()]
    optimizer = make_optimizer(model, run.lr)
    watch = StepWatch([group["lr"] for group in optimizer.param_groups], run.multiplier, vocab=model.config.vocab,
                      consumed=partial(check_consumed, order=order))
    held, account = check_optimizer(model, optimizer, trained), UpdateAccount(model)
    taken, stopped = 0, []
    batches = data_order.corpus_batches(order.corpus, seed=order.seed, rows=order.rows, length=TINY_LENGTH, epochs=order.epochs,
                                        stop=run.steps)
    try:
        for step in loop.train(model, optimizer, batches, objectives.next_token, micro=run.micro, schedule=run.multiplier):
            taken = step.index + 1
            watch.feed(step, [group["lr"] for group in optimizer.param_groups])
        watch.read()
    except GuardStop as stop:
        seen = any(verdict.outcome is Outcome.REFUTED for verdict in watch.verdicts)
        stopped = [] if seen else [refuted("finite", str(stop))]  # else it was the loop itself, before its step
    return [held, *stopped, *watch.verdicts, account.check_moved(), check_steps(optimizer, taken), check_weights(model)]


def make_optimizer(model: Transformer, lr: float) -> torch.optim.Optimizer:
    return adamw(model.named_parameters(), lr)


def reduce_gradients(ranks: Sequence[Transformer]) -> None:
    """Every replica gets the mean of all their gradients."""
    for copies in zip(*(model.named_parameters() for model in ranks), strict=True):
        reduce_gradient(copies[0][0], [parameter for _, parameter in copies])


def reduce_gradient(_: str, copies: Sequence[torch.nn.Parameter]) -> None:
    mean = torch.stack([each.grad for each in copies if each.grad is not None]).mean(0)
    for each in copies:
        each.grad = mean.clone()


def decides_to_stop(history: Sequence[NDArray[np.float64]], evaluations: int) -> bool:
    """Whether, after an evaluation, there is evidence that no more is gained. Where there cannot be any, a run goes on."""
    try:
        rule = plan_stopping(paired_noise(history[-2], history[-1]), LEAST_IMPROVEMENT, patience=PATIENCE, evaluations=evaluations)
    except UsageError:
        return False
    return should_stop(history, rule).stop

class NoProver:
    """Replacement of `Prover`: saves stay without a hallmark."""

    busy = witnesses = proves = False

    def start_early(self, device: str) -> None:
        pass

    def rehearse(self, model: Path, *_: Any) -> None:
        pass

    def replay_early(self, records: Sequence[Path], *_: Any) -> None:
        pass

    def start(self, folder: Path, **_: Any) -> None:
        pass

    def wait_no_longer(self) -> None:
        pass

    def finished(self) -> list[tuple[Path, list[Verdict]]]:
        return []

    close = finished


class RecordingProver(NoProver):
    """Replacement of `Prover` in a run whose witness records are replayed by whoever asks for them."""

    witnesses = True

# ---------------------------------------------------------------- jobs


@functools.cache
def a_training_run(of: TinyRun | None = None) -> Job:
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        with plant(folder):
            return run_guarded(of or TinyRun())
    return job


@functools.cache
def a_loss_preflight(family: str = "llama") -> Job:
    """The checks before step 1, on the first batch of the corpus."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        with plant(folder):
            return preflight_loss(tiny_model(family), objectives.next_token, TinyRun().order().batch(0))
    return job


def check_accepted(check: str, act: Callable[[], object]) -> Verdict:
    """An act that must be refused where it is faulty: the sentence of the refusal is the verdict's."""
    try:
        act()
    except AssayError as error:
        return refuted(check, str(error))
    return proven(check, "it was accepted")


SOFT_BLEND = DistillationSettings(temperature=2.0, kd_weight=0.5, ce_weight=0.5)
STORED_TOP_K = 8  # answers stored a token
TEACHER_STEPS = 40  # after which the teacher knows more than its student

# ---------------------------------------------------------------- teacher and student


@functools.cache
def teacher_weights() -> dict[str, Tensor]:
    """The teacher's weights."""
    model = tiny_model("assay", 1)
    for _ in TinyRun(steps=TEACHER_STEPS, lr=5e-3, epochs=4, rows=8, micro=8).train(model):
        pass
    return model.state_dict()


def tiny_teacher() -> Transformer:
    model = tiny_model("assay", 1)
    model.load_state_dict(teacher_weights())
    return freeze(model)


def freeze(teacher: Transformer) -> Transformer:
    return teacher.eval().requires_grad_(False)


def half_depth_student(teacher: Transformer) -> Transformer:
    """A student of half the depth: the teacher's embedding and its first layer, to go on from."""
    student = tiny_model("assay", 0, depth=1, windows=(None,))
    student.embed, student.blocks[0] = copy_layer(teacher.embed), copy_layer(teacher.blocks[0])
    return student.requires_grad_(True)


def copy_layer(part: Any) -> Any:
    """Copy of the teacher's layer, for the student."""
    return copy.deepcopy(part)


def tokenizer_digest(_: str) -> str:
    """The digest of the tokenizer of "student" or "teacher"."""
    return tiny_tokenizer().digest


def student_text(batch: Batch) -> Batch:
    """Text that the student reads: that which the teacher was asked about."""
    return batch

# ---------------------------------------------------------------- jobs


@functools.cache
def a_distillation_preflight(blend: DistillationSettings = SOFT_BLEND) -> Job:
    """The checks before a distillation's first step, on the first batch."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        batch = TinyRun().order().batch(0)
        with plant(folder):
            teacher = tiny_teacher()
            return preflight_distillation(tiny_model(), distillation.distillation(teacher, blend), batch, blend, teacher=teacher,
                             tokenizers=(tokenizer_digest("student"), tokenizer_digest("teacher")))
    return job


def a_stored_preflight(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: distillation preflight on stored answers that were written and are read back."""
    batch, blend = TinyRun().order().batch(0), DistillationSettings()
    store_answers(folder, batch)
    with plant(folder):
        ids, logprobs = open_teacher(folder / "answers").streams_for(batch)
        said = replace(batch, teacher_ids=ids, teacher_logprobs=logprobs)
        return preflight_distillation(tiny_model(), distillation.stored_distillation(blend), said, blend, teacher=None,
                         tokenizers=(tokenizer_digest("student"), tokenizer_digest("teacher")))


def answers_read_back(folder: Path, plant: Plant) -> list[Verdict]:
    batch = TinyRun().order().batch(0)
    store_answers(folder, batch)
    with plant(folder):
        return [check_accepted("stored", lambda: open_teacher(
            folder / "answers", tokenizer=tokenizer_digest("student")).streams_for(student_text(batch)))]


def a_short_distillation(folder: Path, plant: Plant) -> list[Verdict]:
    """A few steps, and the loss that is reported of them."""
    with plant(folder):
        teacher = tiny_teacher()
        before, student = parameter_digests(teacher), half_depth_student(teacher)
        *_, last = TinyRun(steps=3).train(student, distillation.distillation(teacher, SOFT_BLEND))
        found = measure_agreement(student, teacher, held_out_document_batches(tiny_corpus(), rows=8, length=TINY_LENGTH))
        reported = reported_loss(last_batch=float(last.loss), held_out=found.estimates()["student_ce"].mean)
    return [check_teacher_frozen(teacher, before), check_reported_loss(reported, found.student_ce, found.tokens)]


def reported_loss(*, last_batch: float, held_out: float) -> float:
    """Loss that is reported, of the two."""
    return held_out


def store_answers(folder: Path, batch: Batch) -> None:
    teacher = tiny_teacher()
    write_teacher(folder / "answers", teacher_entries(batch, *distillation.teacher_top_k(teacher, batch, STORED_TOP_K)),
                  tokenizer=tokenizer_digest("teacher"),
                  teacher="of the zoo", vocab=teacher.config.vocab, k=STORED_TOP_K)

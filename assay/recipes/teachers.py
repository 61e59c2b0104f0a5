"""Who answers a student's batches: a teacher in memory, or what one said before. Both give a loss and say how far the student agrees."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from assay.data.batch import Batch
from assay.data.chat import TrainingExample
from assay.data.teacher_store import StoredTeacher, TeacherEntry, open_teacher, teacher_entries, write_teacher
from assay.errors import UsageError
from assay.evaluation.teacher_agreement import Agreement, measure_agreement, measure_stored_agreement
from assay.guard.distillation_checks import check_teacher_frozen
from assay.guard.training_guards import parameter_digests
from assay.learn.distillation import DistillationSettings, distillation, stored_distillation, teacher_top_k
from assay.model.placement import place_for_training
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.recipes.options import Distill
from assay.store.artifact import Artifact, build_model, open_artifact
from assay.verdict import Verdict


class Pupil(NamedTuple):
    """What a teacher must know of its student."""

    vocab: int
    tokenizer: Tokenizer


class Present:
    """In memory: it reads every batch beside the student and never changes."""

    def __init__(self, artifact: Artifact, pupil: Pupil, blend: DistillationSettings, device: str):
        refuse_other_tokenizer(artifact, pupil)
        self.digest, self.tokenizer = artifact.digest, pupil.tokenizer.digest
        self.model: Transformer | None = seated(artifact, device)
        self.blend = replace(blend, vocab=shared_ids(artifact.config.vocab, pupil))
        self.objective = distillation(self.model, self.blend)
        self.before = parameter_digests(self.model)

    def answered(self, batch: Batch) -> Batch:
        return batch

    def agreement(self, student: Transformer, batches: Iterable[Batch]) -> Agreement:
        assert self.model is not None
        return measure_agreement(student, self.model, batches, vocab=self.blend.vocab)

    def unmoved(self) -> list[Verdict]:
        assert self.model is not None
        return [check_teacher_frozen(self.model, self.before)]


class Remembered:
    """Its likeliest tokens in every place of every example, on disk; it need not be in memory, and cannot move."""

    model = None

    def __init__(self, stored: StoredTeacher, pupil: Pupil, blend: DistillationSettings):
        self.stored, self.digest, self.tokenizer = stored, str(stored.manifest["teacher"]), str(stored.manifest["tokenizer"])
        vocab = int(stored.manifest["vocab"])
        self.blend = replace(blend, vocab=None if vocab == pupil.vocab else vocab)
        self.objective = stored_distillation(self.blend)

    def answered(self, batch: Batch) -> Batch:
        ids, logprobs = self.stored.streams_for(batch)
        return replace(batch, teacher_ids=ids, teacher_logprobs=logprobs)

    def agreement(self, student: Transformer, batches: Iterable[Batch]) -> Agreement:
        return measure_stored_agreement(student, map(self.answered, batches), temperature=self.blend.temperature, vocab=self.blend.vocab)

    def unmoved(self) -> list[Verdict]:
        return []


Teacher = Present | Remembered


def blend_of(config: Distill) -> DistillationSettings:
    return DistillationSettings(config.divergence, config.temperature, config.kd_weight, config.ce_weight, config.beta)


def opened(config: Distill) -> Artifact:
    if config.teacher is None:
        raise UsageError("name who teaches: --teacher")
    return open_artifact(config.teacher)


def seated(artifact: Artifact, device: str) -> Transformer:
    """Where the student computes, in what it computes, and with nothing to learn."""
    return place_for_training(build_model(artifact), device).eval().requires_grad_(False)


def refuse_other_tokenizer(teacher: Artifact, pupil: Pupil) -> None:
    found = None if teacher.tokenizer is None else teacher.tokenizer.digest
    if found != pupil.tokenizer.digest:
        raise UsageError(f"the student's tokenizer is {pupil.tokenizer.digest[:12]}, that of {teacher.path} "
                         f"{'missing' if found is None else found[:12]}: the same ids are another text to the teacher, and its logits "
                         "would be noise. Let it write text that the student learns: --how text")


def shared_ids(vocab: int, pupil: Pupil) -> int | None:
    """Blend's `vocab`: the tokenizer's size where the two tables were padded differently."""
    return None if vocab == pupil.vocab else max(pupil.tokenizer.tokens) + 1

# ---------------------------------------------------------------- stored answers


@dataclass(frozen=True)
class Questions:
    """Everything that will be asked about: what is learned and what is held out, in rows of `length`."""

    examples: Sequence[TrainingExample]
    batches: Callable[[], Iterable[Batch]]


def remembered(config: Distill, pupil: Pupil, questions: Questions, device: str, say: Callable[[str], None]) -> Remembered:
    """The folder that was named, or RUN/teacher-logits: asked for on first use, and opened as what it must be ever after."""
    folder, blend = Path(config.teacher_logits or Path(config.out) / "teacher-logits"), blend_of(config)
    stored_distillation(blend)  # refuses other divergences before the teacher is asked anything
    if not folder.exists():
        if config.teacher is None:
            raise UsageError(f"{folder} does not exist yet: name who is to be asked with --teacher")
        ask(folder, config, pupil, questions, device)
        say(f"{folder}: the teacher's {config.top_k} likeliest tokens in every place of {len(questions.examples):,} conversations")
    digest = None if config.teacher is None else open_artifact(config.teacher).digest
    stored = open_teacher(folder, tokenizer=pupil.tokenizer.digest, teacher=digest)
    if (stored.temperature, stored.k) != (config.temperature, config.top_k):
        raise UsageError(f"{folder} holds {stored.k} tokens a place at temperature {stored.temperature:g}; --top-k is {config.top_k} and "
                         f"--temperature {config.temperature:g}. What was not stored cannot be known: say --top-k {stored.k} --temperature "
                         f"{stored.temperature:g}, or name another folder with --teacher-logits")
    stored.require((example.id, example.tokens) for example in questions.examples)
    return Remembered(stored, pupil, blend)


def ask(folder: Path, config: Distill, pupil: Pupil, questions: Questions, device: str) -> None:
    artifact = opened(config)
    refuse_other_tokenizer(artifact, pupil)
    vocab, model = shared_ids(artifact.config.vocab, pupil) or artifact.config.vocab, seated(artifact, device)

    def entries() -> Iterator[TeacherEntry]:
        for batch in questions.batches():
            yield from teacher_entries(batch, *teacher_top_k(model, batch.to(device), config.top_k, temperature=config.temperature,
                                                             vocab=vocab))

    write_teacher(folder, entries(), tokenizer=pupil.tokenizer.digest, teacher=artifact.digest, vocab=vocab, k=config.top_k,
                  temperature=config.temperature)

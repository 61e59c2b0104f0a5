"""Teachers of a distillation, online or by stored answers: each gives a loss and says how far the student agrees; and a student made of
a teacher's layers."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.chat import TrainingExample
from assay.data.teacher_store import StoredTeacher, TeacherEntry, open_teacher, teacher_entries, write_teacher
from assay.errors import UsageError
from assay.evaluation.teacher_agreement import Agreement, measure_agreement, measure_stored_agreement, weighted_agreement
from assay.guard.distillation_checks import check_teacher_frozen
from assay.guard.training_guards import parameter_digests
from assay.learn.distillation import DistillationSettings, distillation, stored_distillation, teacher_top_k, weighted_sum
from assay.model.placement import place_for_training
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig, Transformer
from assay.recipes.options import Distill
from assay.recipes.starting_model import require_proven, write_proven
from assay.store.artifact import Artifact, assemble_model, build_model, merged_tensors, open_artifact, refuse_quarantined
from assay.store.checkpoint import open_checkpoint
from assay.store.saving import Lineage, model_contents
from assay.verdict import Verdict


class Student(NamedTuple):
    """Facts about a student that its teacher must know."""

    vocab: int
    tokenizer: Tokenizer
    longest: int = 0  # tokens of the longest text that the teacher reads


class OnlineTeacher:
    """Teacher in memory: it reads every batch beside the student and never changes."""

    def __init__(self, artifact: Artifact, student: Student, blend: DistillationSettings, device: str):
        refuse_other_tokenizer(artifact, student)
        refuse_shorter_context(artifact, student)
        self.digest, self.tokenizer = artifact.digest, student.tokenizer.digest
        self.model: Transformer = place_teacher(artifact, device)
        self.blend = replace(blend, vocab=shared_ids(artifact.config.vocab, student))
        self.objective = distillation(self.model, self.blend)
        self.before = parameter_digests(self.model)

    def answered(self, batch: Batch) -> Batch:
        return batch

    def agreement(self, student: Transformer, batches: Iterable[Batch]) -> Agreement:
        return measure_agreement(student, self.model, batches, vocab=self.blend.vocab)

    def unmoved(self) -> list[Verdict]:
        return [check_teacher_frozen(self.model, self.before)]


class OfflineTeacher:
    """Teacher stored on disk: its likeliest tokens in every place of every example; it need not be in memory, and cannot move."""

    model = None

    def __init__(self, stored: StoredTeacher, student: Student, blend: DistillationSettings):
        self.stored, self.digest, self.tokenizer = stored, str(stored.manifest["teacher"]), str(stored.manifest["tokenizer"])
        vocab = int(stored.manifest["vocab"])
        self.blend = replace(blend, vocab=None if vocab == student.vocab else vocab)
        self.objective = stored_distillation(self.blend)

    def answered(self, batch: Batch) -> Batch:
        """The batch with what the teacher says of it."""
        ids, logprobs = self.stored.streams_for(batch)
        return replace(batch, teacher_ids=ids, teacher_logprobs=logprobs)

    def agreement(self, student: Transformer, batches: Iterable[Batch]) -> Agreement:
        return measure_stored_agreement(student, map(self.answered, batches), temperature=self.blend.temperature, vocab=self.blend.vocab)

    def unmoved(self) -> list[Verdict]:
        return []


class OnlineTeachers:
    """Teachers in memory, several of them: the loss is the weighted sum of what each asks for. With forward KL that is the KL to their
    mixture, but for a constant."""

    model = None

    def __init__(self, teachers: Sequence[OnlineTeacher], shares: Sequence[float]):
        self.teachers, self.shares = tuple(teachers), tuple(shares)
        named = "\n".join(f"{teacher.digest} {share:g}" for teacher, share in zip(teachers, shares, strict=True))
        self.digest, self.tokenizer, self.blend = hashlib.sha256(named.encode()).hexdigest(), teachers[0].tokenizer, teachers[0].blend
        self.objective = weighted_sum([teacher.objective for teacher in teachers], shares)

    def answered(self, batch: Batch) -> Batch:
        return batch

    def agreement(self, student: Transformer, batches: Iterable[Batch]) -> Agreement:
        """The weighted mean of how far the student agrees with each."""
        read = list(batches)
        return weighted_agreement([teacher.agreement(student, read) for teacher in self.teachers], self.shares)

    def unmoved(self) -> list[Verdict]:
        return [verdict for teacher in self.teachers for verdict in teacher.unmoved()]


Teacher = OnlineTeacher | OnlineTeachers | OfflineTeacher


def load_online(config: Distill, student: Student, device: str) -> OnlineTeacher | OnlineTeachers:
    """The teacher, or all of them, beside the student."""
    named = config.teachers()
    teachers = [OnlineTeacher(refuse_quarantined(open_artifact(path)), student, blend_of(config), device) for path, _ in named]
    return teachers[0] if len(teachers) == 1 else OnlineTeachers(teachers, [share for _, share in named])


def blend_of(config: Distill) -> DistillationSettings:
    return DistillationSettings(config.divergence, config.temperature, config.kd_weight, config.ce_weight, config.beta,
                                top_k=config.divergence_top_k)


def open_teacher_model(config: Distill) -> Artifact:
    if len(named := config.teachers()) > 1:
        raise UsageError(f"{len(named)} teachers with --how {config.how}"
                         f"{' and --student-layers' if config.student_layers else ''}: several teach online alone, and a student is of "
                         "one teacher's layers; name one, or give --how online and --model")
    return refuse_quarantined(open_artifact(named[0][0]))


def place_teacher(artifact: Artifact, device: str) -> Transformer:
    """Place a teacher where the student computes, in what it computes, and with nothing to learn."""
    return place_for_training(build_model(artifact, None).requires_grad_(False), device).eval()


def refuse_other_tokenizer(teacher: Artifact, student: Student) -> None:
    found = None if teacher.tokenizer is None else teacher.tokenizer.digest
    if found != student.tokenizer.digest:
        raise UsageError(f"the student's tokenizer is {student.tokenizer.digest[:12]}, that of {teacher.path} "
                         f"{'missing' if found is None else found[:12]}: the same ids are another text to the teacher, and its logits "
                         "would be noise. Let it write text that the student learns: --how text")


def refuse_shorter_context(teacher: Artifact, student: Student) -> None:
    if student.longest > teacher.config.max_length:
        raise UsageError(f"the teacher {teacher.path} has a context of {teacher.config.max_length:,} tokens, and is to read a text of "
                         f"{student.longest:,}: beyond it positions mean nothing to it, and its logits would be noise. Give --max-length "
                         f"{teacher.config.max_length}, or a teacher with a longer context")


def shared_ids(vocab: int, student: Student) -> int | None:
    """Blend's `vocab`: the tokenizer's size where the two tables were padded differently."""
    return None if vocab == student.vocab else max(student.tokenizer.tokens) + 1

# ---------------------------------------------------------------- stored answers


def load_stored_answers(config: Distill, student: Student, examples: Sequence[TrainingExample], batches: Iterable[Batch], device: str,
                        say: Callable[[str], None]) -> OfflineTeacher:
    """The folder that was named, or RUN/teacher-logits: asked for on first use, and opened as what it must be ever after."""
    folder, blend = Path(config.teacher_logits or Path(config.out) / "teacher-logits"), blend_of(config)
    stored_distillation(blend)  # refuses other divergences before the teacher is asked anything
    if not folder.exists():
        if config.teacher is None:
            raise UsageError(f"{folder} does not exist yet: name who is to be asked with --teacher")
        store_teacher_answers(folder, config, student, batches, device)
        say(f"{folder}: the teacher's {config.teacher_top_k} likeliest tokens in every place of {len(examples):,} conversations")
    digest = None if config.teacher is None else refuse_quarantined(open_artifact(config.teacher)).digest
    stored = open_teacher(folder, tokenizer=student.tokenizer.digest, teacher=digest)
    if (stored.temperature, stored.k) != (config.temperature, config.teacher_top_k):
        raise UsageError(f"{folder} holds {stored.k} tokens a place at temperature {stored.temperature:g}; --teacher-top-k is "
                         f"{config.teacher_top_k} and --temperature {config.temperature:g}. What was not stored cannot be known: say "
                         f"--teacher-top-k {stored.k} --temperature {stored.temperature:g}, or name another folder with --teacher-logits")
    stored.require((example.id, example.tokens) for example in examples)
    return OfflineTeacher(stored, student, blend)


def store_teacher_answers(folder: Path, config: Distill, student: Student, batches: Iterable[Batch], device: str) -> None:
    artifact = open_teacher_model(config)
    refuse_other_tokenizer(artifact, student)
    refuse_shorter_context(artifact, student)
    vocab, model = shared_ids(artifact.config.vocab, student) or artifact.config.vocab, place_teacher(artifact, device)

    def entries() -> Iterator[TeacherEntry]:
        for batch in batches:
            yield from teacher_entries(batch, *teacher_top_k(model, batch.to(device), config.teacher_top_k, temperature=config.temperature,
                                                             vocab=vocab))

    write_teacher(folder, entries(), tokenizer=student.tokenizer.digest, teacher=artifact.digest, vocab=vocab, k=config.teacher_top_k,
                  temperature=config.temperature)

# ---------------------------------------------------------------- a student of the teacher's layers


def make_student(where: Path, teacher: Artifact, layers: int, say: Callable[[str], None]) -> None:
    """A checkpoint at `where`, proven, that says whose layers it has. One that an earlier session made must be the same."""
    kept = kept_layers(teacher.config.depth, layers)
    made = {"made_of": {"weights": teacher.digest, "path": str(teacher.path.resolve()), "layers": kept}}
    if where.exists():
        facts = open_checkpoint(where).facts["run_config"] or {}
        if facts.get("made_of", {}).get("weights") != teacher.digest or facts["made_of"]["layers"] != kept:
            raise UsageError(f"{where} is another student: made of {facts.get('made_of')}, asked for are layers {kept} of "
                             f"{teacher.digest[:12]}; give another --out")
        require_proven(where)
        return
    config, tensors = with_layers(teacher.config, merged_tensors(teacher, torch.float32), kept)
    model = assemble_model(config, tensors, torch.float32).eval()
    write_proven(where, model_contents(model, teacher.tokenizer, teacher.stops, Lineage("new"), run_config=made))
    say(f"{where}: layers {', '.join(map(str, kept))} of the {teacher.config.depth} of {teacher.path.name}, proven")


def kept_layers(depth: int, layers: int) -> list[int]:
    """Evenly spaced, the first and the last among them."""
    if not 2 <= layers < depth:
        if depth < 3:
            raise UsageError(f"--student-layers {layers} of a teacher with {depth}: its first and its last stay, so it has none to spare; "
                             "name a student with --model")
        raise UsageError(f"--student-layers {layers} of a teacher with {depth}: expected 2 to {depth - 1}, so that the first and the last "
                         "stay and one at least goes")
    return [round(place * (depth - 1) / (layers - 1)) for place in range(layers)]


def with_layers(config: ModelConfig, tensors: dict[str, Tensor], kept: list[int]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The geometry and the tensors, under our names, of the model that has these layers alone."""
    place = {str(layer): str(at) for at, layer in enumerate(kept)}
    taken = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] != "blocks":
            taken[name] = tensor
        elif parts[1] in place:
            taken[".".join(["blocks", place[parts[1]], *parts[2:]])] = tensor
    at = {layer: place for place, layer in enumerate(kept)}
    experts = config.experts and replace(config.experts, dense_layers=tuple(at[n] for n in config.experts.dense_layers if n in at))
    return replace(config, depth=len(kept), windows=tuple(config.windows[layer] for layer in kept), experts=experts,
                   unrotated=tuple(at[layer] for layer in config.unrotated if layer in at)), taken

"""Text of a teacher, for distillation without its logits: its own answers to the data's prompts, kept with who said them and how.

    RUN/teacher.jsonl             what the student learns: prompt, completion, and whose words they are
    RUN/teacher-held-out.jsonl    the same for prompts that are never trained on

Who is held out is decided on the prompts, each once, before the teacher is asked. An answer that did not end by itself teaches
nobody to end, so it is left out and counted.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.data.chat import text_prefix_ids
from assay.data.layouts import Conversation, Message, read_conversations
from assay.data.packing import hold_out
from assay.errors import DataError, UsageError
from assay.generate.engine import Engine, fitting_slots
from assay.generate.generation_request import Completion, GenerationRequest, Sampling
from assay.model.tokenizer import Tokenizer
from assay.recipes.options import Distill
from assay.recipes.teachers import place_teacher
from assay.store import durable
from assay.store.artifact import Artifact
from assay.store.ledger import Ledger
from assay.strict_json import read_json_lines


@dataclass(frozen=True)
class TeacherPrompt:
    """Prompt for a teacher: messages, a text, or both where a model without a template gets another text."""

    messages: tuple[Message, ...]
    plain: str | None

    @property
    def content(self) -> str:
        said = [list(map(dict, self.messages)), self.plain]
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def write_teacher_text(config: Distill, teacher: Artifact, student: Tokenizer, device: str,
                       say: Callable[[str], None]) -> tuple[Path, Path]:
    """Write the teacher's text for training and for evaluation. The files of an earlier session are taken as they are, where the same was
    asked of the same teacher."""
    if teacher.tokenizer is None:
        raise UsageError(f"{teacher.path} has no tokenizer, so it can neither be asked nor answer; add tokenizer.json")
    learned, held_out = prompts_of(config)
    sampling = Sampling(config.max_new_tokens, config.sample_temperature or 0.0, seed=config.seed)
    files = Path(config.out) / "teacher.jsonl", Path(config.out) / "teacher-held-out.jsonl"
    for file, prompts in zip(files, (learned, held_out), strict=True):
        asked = hashlib.sha256("\n".join([teacher.digest, repr(sampling), *(p.content for p in prompts)]).encode()).hexdigest()
        if file.exists():
            if {row["asked"] for row in read_json_lines(file)} != {asked}:
                raise UsageError(f"{file} holds what another teacher said, or was asked otherwise; give another --out")
        elif prompts:
            rows, left_out = sample_answers(prompts, teacher, teacher.tokenizer, student, sampling, device)
            if not rows:
                raise DataError(f"none of {len(prompts)} answers of the teacher can be learned: {in_words(left_out)}; raise "
                                "--max-new-tokens, or look at the prompts")
            write_once(file, "".join(json.dumps(row | {"asked": asked}) + "\n" for row in rows).encode())
            say(f"{file}: {len(rows):,} answers of {teacher.path.name}{f'; left out: {in_words(left_out)}' if left_out else ''}")
    return files[0], files[1] if config.held_out_data is None else Path(config.held_out_data)


def write_once(file: Path, data: bytes) -> None:
    """A teacher takes its time to answer: whoever began here meanwhile, and was quicker, has what it learns from."""
    ledger = Ledger(file.parent / "ledger.jsonl")
    ledger.claim()
    try:
        if file.exists():
            raise UsageError(f"{file} was written by another run while this one asked its teacher; give another --out")
        durable.replace_file(file, data)
    finally:
        ledger.close()


def prompts_of(config: Distill) -> tuple[list[TeacherPrompt], list[TeacherPrompt]]:
    """(to learn, held out), each prompt once. Where held-out conversations are given, their own answers are scored."""
    found = {prompt.content: prompt for file in config.data
             for row in read_conversations(file, gsm8k=config.gsm8k, limit=config.limit).rows
             if (prompt := prompt_of(row))}
    if config.held_out_data is not None:
        return list(found.values()), []
    learned, held_out = hold_out(list(found.values()), config.held_out, config.seed)
    if not held_out:
        raise UsageError("nothing is held out, so nothing could be said about the result: raise --held-out, or give --held-out-data")
    return learned, held_out


def prompt_of(row: Conversation) -> TeacherPrompt:
    """Prompt of a row: everything before the answer, the last one, where there are several."""
    if row.tools:
        raise DataError(f"{row.where}: the row offers tools, and the teacher's calls could not be told from its words; leave it out")
    answers = [place for place, message in enumerate(row.messages) if message["role"] == "assistant" and place >= row.learned_from]
    messages = row.messages[: answers[-1]] if answers else row.messages
    plain = row.plain[0] if row.plain else None
    if not messages and not plain:
        raise DataError(f"{row.where}: there is no prompt, so there is nothing to ask the teacher; --how text needs prompts")
    return TeacherPrompt(messages, plain)


def sample_answers(prompts: Sequence[TeacherPrompt], teacher: Artifact, tokenizer: Tokenizer, student: Tokenizer, sampling: Sampling,
            device: str) -> tuple[list[dict[str, Any]], Counter[str]]:
    """A row for each answer that can be learned, and why others cannot. What is drawn depends on the prompt, not on its place."""
    asked = [encode_teacher_prompt(prompt, tokenizer) for prompt in prompts]
    room, left_out, rows = teacher.config.max_length - sampling.max_new, Counter[str](), []
    fitting = [place for place, ids in enumerate(asked) if len(ids) <= room]
    if len(fitting) < len(asked):
        left_out[f"no room for {sampling.max_new} more tokens after the prompt"] = len(asked) - len(fitting)
    if not fitting:
        return [], left_out
    model, length = place_teacher(teacher, device), max(len(asked[place]) for place in fitting) + sampling.max_new
    engine = Engine(model, slots=fitting_slots(model, len(fitting), length), version=teacher.digest, stop_ids=teacher.stops.stop_ids,
                    length=length)
    place_of = {engine.submit(GenerationRequest(tuple(asked[place]), sampling, ("teacher", prompts[place].content))): place
                for place in fitting}
    said = {place_of[progress.ticket]: progress.completion for progress in engine.drain()}
    for place in fitting:
        completion = said[place]
        assert completion is not None
        if reason := unfit(completion, tokenizer):
            left_out[reason] += 1
        else:
            rows.append(row_of(prompts[place], tokenizer.decode(completion.ids[:-1]), student)
                        | {"teacher": teacher.digest, "seed": sampling.seed, "temperature": sampling.temperature})
    return rows, left_out


def encode_teacher_prompt(prompt: TeacherPrompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a teacher's prompt, by the teacher's own template, or as plain text begins for it."""
    if prompt.messages and tokenizer.template is not None:
        return tokenizer.encode(tokenizer.render(prompt.messages, add_generation_prompt=True))
    if prompt.plain is None:
        raise DataError("a row has messages, and the teacher has no chat template to read them with; give prompts as text")
    return text_prefix_ids(tokenizer) + tokenizer.encode(prompt.plain)


def unfit(completion: Completion, tokenizer: Tokenizer) -> str | None:
    if completion.ended != "stop":
        return "cut at --max-new-tokens"
    if tokenizer.special_ids.intersection(completion.ids[:-1]):
        return "a special token in the midst of it"
    return None if tokenizer.decode(completion.ids[:-1]).strip() else "empty"


def row_of(prompt: TeacherPrompt, text: str, student: Tokenizer) -> dict[str, Any]:
    if prompt.messages and (student.template is not None or prompt.plain is None):
        return {"prompt": [dict(message) for message in prompt.messages], "completion": [{"role": "assistant", "content": text}]}
    return {"prompt": prompt.plain, "completion": text}


def in_words(left_out: Counter[str]) -> str:
    return ", ".join(f"{count} ({reason})" for reason, count in left_out.items())

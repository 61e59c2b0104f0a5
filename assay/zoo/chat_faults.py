"""Chat data faults: masks lost or misplaced, ends never taught, BOS twice or not at all, templates and rows forgotten."""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from assay.data import chat, layouts, packing
from assay.data.batch import Batch
from assay.data.chat import Draft, TemplateWriter, TrainingExample
from assay.data.data_files import DataRow
from assay.data.layouts import Conversation, read_conversations
from assay.errors import DataError
from assay.guard.example_audit import audit_examples, check_batch
from assay.model import resize_embeddings
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.testing.fault_injection import Job, Plant, fault, in_place_of, swap
from assay.testing.tiny_models import TINY_CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from assay.testing.tiny_training import TINY_WORDS
from assay.verdict import Verdict, proven, refuted

BOS = "<|endoftext|>"
CONVERSATIONS = 24  # in a data file

# ---------------------------------------------------------------- lessons


def questions_and_answers() -> list[dict[str, Any]]:
    """Two turns each; every answer also stands in its question."""
    rows = []
    for number in range(CONVERSATIONS):
        one, other = TINY_WORDS[number % len(TINY_WORDS)], TINY_WORDS[(number * 7 + 3) % len(TINY_WORDS)]
        rows.append({"messages": [
            {"role": "user", "content": f"n{number}: is it the {one} {number} or the {other}?"},
            {"role": "assistant", "content": f"the {one} {number}"},
            {"role": "user", "content": f"and why the {one} {number}, not the {other}?"},
            {"role": "assistant", "content": f"the {one} is older."}]})
    return rows


def long_questions() -> list[dict[str, Any]]:
    """Every third question fills the length alone."""
    rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:2]} for row in questions_and_answers()]
    for row in rows[::3]:
        row["prompt"] = [{"role": "user", "content": row["prompt"][0]["content"] * 8}]
    return rows


def split_words() -> list[dict[str, Any]]:
    """Plain text whose prompt ends within a word, so that a token would reach over the seam."""
    return [{"prompt": f"n{number} say th", "completion": f"e {TINY_WORDS[number % len(TINY_WORDS)]}"} for number in range(CONVERSATIONS)]


def worked_answers() -> list[dict[str, Any]]:
    return [{"question": f"n{number} and {number}?", "answer": f"{number} and {number} is {2 * number}.\n#### {2 * number}"}
            for number in range(CONVERSATIONS)]


def chat_words() -> Tokenizer:
    return tiny_tokenizer()


def plain_words() -> Tokenizer:
    return tiny_tokenizer(template=False)


def words_with_bos() -> Tokenizer:
    """The tokenizer begins plain text with BOS, the template begins chats with it."""
    plain = tiny_tokenizer()
    special = {"id": BOS, "ids": [plain.ids[BOS]], "tokens": [BOS]}
    pieces = [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    around = {"type": "TemplateProcessing", "single": pieces, "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 0}}],
              "special_tokens": {BOS: special}}
    return Tokenizer({**plain.document, "post_processor": around}, {**plain.settings, "bos_token": BOS},
                     {"default": "{{ bos_token }}" + TINY_CHAT_TEMPLATE})


@dataclass(frozen=True)
class ChatData:
    """Rows of conversations on their way into the first batch of a tiny model. Its defaults leave the audit silent."""

    rows: Callable[[], list[dict[str, Any]]] = questions_and_answers
    words: Callable[[], Tokenizer] = chat_words
    over: chat.Overlong = "drop"
    length: int = 200
    new_tokens: tuple[str, ...] = ()

    def audit(self, folder: Path) -> list[Verdict]:
        before = self.words()
        words = resize_embeddings.with_new_tokens(before, self.new_tokens) if self.new_tokens else before
        stops, model = resolve_special_tokens(words, {}, {}), tiny_model()
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        embed = resize_embeddings.resize_embeddings(model.config, tensors, before, words).tensors["embed.weight"]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows()))
        conversations = read_conversations(folder / "rows.jsonl", gsm8k="think").rows
        rendered = chat.render_conversations(conversations, words, stops, length=self.length, over=self.over)
        train, held_out = packing.hold_out(rendered.examples, 4, seed=0)
        batch = packing.PackedExamples(train, 0, 2, self.length).batch(0)
        return [*audit_examples(train, words, stops, embed=embed, trainable=(), held_out=held_out, length=self.length),
                check_batch(batch, {example.id: example for example in train})]


@functools.cache
def a_chat_audit(of: ChatData | None = None) -> Job:
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        with plant(folder):
            return (of or ChatData()).audit(folder)
    return job

# ---------------------------------------------------------------- masks


@fault("completion truncated away", rows=("D01",), stage="data", check="supervised",
       job=a_chat_audit(ChatData(rows=long_questions, over="truncate")))
@in_place_of(chat, "fit_to_length")
def completion_truncated_away(_: Any, example: TrainingExample, length: int, over: str) -> TrainingExample:
    """Rows are cut at the length, and nobody looks whether anything supervised is left."""
    return replace(example, tokens=example.tokens[:length], weight=example.weight[:length], cut=len(example) > length)


fault("mask discarded", rows=("D02",), stage="data", check="supervised", job=a_chat_audit())(
    lambda _: made_otherwise(lambda example, _: replace(example, weight=(np.arange(len(example)) > 0).astype(np.float32))))


@fault("answer found by searching for it", rows=("D03",), stage="data", check="intended", job=a_chat_audit())
@in_place_of(TemplateWriter, "begin")
def answer_found_by_searching(_: Any, writer: TemplateWriter, conversation: Conversation, k: int, text: str, body: str) -> int:
    """The first place where its words stand may be the question."""
    return text.find(conversation.messages[k]["content"])


fault("mask off by one", rows=("D04",), stage="data", check="intended", job=a_chat_audit())(
    # The first token of each answer is never taught.
    lambda _: made_otherwise(lambda example, _: replace(example, weight=example.weight * np.append(0, example.weight[:-1]))))


@fault("prompt measured alone", rows=("D05",), stage="data", check="prompt",
       job=a_chat_audit(ChatData(rows=split_words, words=plain_words)))
@in_place_of(chat, "tokenize_in_parts")
def prompt_measured_alone(_: Any, draft: Draft, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The prompt's length in tokens is taken as its place in the whole, where a token reaches over the seam."""
    ids = tokenizer.encode(draft.text)
    return ids, [len(tokenizer.encode(draft.text[: draft.spans[0][0]])), len(ids)]

# ---------------------------------------------------------------- ends


fault("end never taught", rows=("D06",), stage="data", check="stop", job=a_chat_audit())(
    lambda _: swap(TemplateWriter, "until_stop", lambda writer, tail: ""))


fault("packed examples in one document", rows=(), stage="data", check="batch", job=a_chat_audit(ChatData(length=400)))(
    # Every token and weight is as it was audited, and each example reads those before it in its row.
    in_place_of(packing, "packed_rows")(lambda usual, *given: replace(made := usual(*given), documents=made.documents.clamp(max=0))))


@fault("end masked as padding", rows=("D07",), stage="data", check="batch", job=a_chat_audit())
@in_place_of(packing, "packed_rows")
def end_masked_as_padding(usual: Any, rows: Sequence[Sequence[TrainingExample]], length: int, fill: int) -> Batch:
    """One token pads and ends; the collator masks all of it."""
    batch, eos = usual(rows, length, fill), chat_words().eos
    return replace(batch, weight=batch.weight * (batch.tokens != eos))


fault("end of turn that stops nothing", rows=("D08",), stage="template", check="stop", job=a_chat_audit())(
    # The template ends turns with <|im_end|>, the tokenizer's EOS is <|endoftext|>.
    in_place_of(Tokenizer, "named_id")(lambda usual, words, name: words.ids[BOS] if name == "eos_token" else usual(words, name)))

# ---------------------------------------------------------------- beginnings


@fault("BOS twice", rows=("D10",), stage="data", check="bos", job=a_chat_audit(ChatData(words=words_with_bos)))
def bos_twice(_: Path) -> AbstractContextManager[None]:
    """What the template wrote, BOS included, is encoded as if it were plain text."""
    def begun_again(example: TrainingExample, words: Tokenizer) -> TrainingExample:
        begin = chat.text_prefix_ids(words)
        tokens, weight = np.append(np.array(begin, np.int32), example.tokens), np.append(np.zeros(len(begin), np.float32), example.weight)
        return replace(example, tokens=tokens, weight=weight, prompt=example.prompt + len(begin))

    return made_otherwise(begun_again)


fault("BOS dropped by another template", rows=("D11",), stage="template", check="bos", job=a_chat_audit(ChatData(words=words_with_bos)))(
    in_place_of(TemplateWriter, "write")(lambda usual, *given, **options: usual(*given, **options).removeprefix(BOS)))


@fault("template not applied", rows=("D12",), stage="data", check="rendered", job=a_chat_audit())
@in_place_of(TemplateWriter, "drafts")
def template_not_applied(_: Any, writer: TemplateWriter, conversation: Conversation) -> list[Draft]:
    """Messages become lines of plain text, the last of which is learned."""
    *before, last = [message["content"] for message in conversation.messages]
    asked = "\n".join([*before, ""])
    text = asked + last + (writer.eos or "")
    return [Draft(conversation.id, text, [(len(asked), len(text))], False, conversation)]


@fault("rows written with another template", rows=("D15",), stage="data", check="rendered", job=a_chat_audit())
def rows_of_another_template(_: Path) -> AbstractContextManager[None]:
    """A cache that an early version filled: its prompts are garbled, its answers are right."""
    def garbled(example: TrainingExample, _: Tokenizer) -> TrainingExample:
        tokens = example.tokens.copy()
        asked = tokens[: example.prompt]
        asked[asked < 255] += 1
        return replace(example, tokens=tokens)

    return made_otherwise(garbled)

# ---------------------------------------------------------------- rows of the model, and of the other set


@fault("new tokens without rows", rows=("D13",), stage="data", check="embeddings",
       job=a_chat_audit(ChatData(rows=worked_answers, new_tokens=resize_embeddings.THINKING_TOKENS)))
@in_place_of(resize_embeddings, "_extended")
def new_tokens_without_rows(usual: Any, table: Tensor, vocab: int, known: int, pieces: dict[int, Any]) -> Tensor:
    """The matrices are made longer, and stay empty there; under LoRA they are frozen."""
    longer = usual(table, vocab, known, pieces)
    longer[list(pieces)] = 0
    return longer


fault("held-out conversation trained on", rows=("D19",), stage="data", check="overlap", job=a_chat_audit())(
    # Rows are held out by their number, and the file holds some of them twice.
    lambda _: swap(packing, "hold_out", lambda examples, count, seed: (list(examples), list(examples)[:count])))

# ---------------------------------------------------------------- what a message says beside its content

CALLER = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def calls_and_thoughts() -> list[dict[str, Any]]:
    """Every answer is thought about, and calls a tool."""
    rows = [{"messages": row["messages"][:2]} for row in questions_and_answers()]
    for number, row in enumerate(rows):
        call = {"type": "function", "function": {"name": "look_up", "arguments": {"word": f"n{number}"}}}
        row["messages"][1] |= {"reasoning_content": f"it may be {number}.", "tool_calls": [call]}
    return rows


def words_with_calls() -> Tokenizer:
    plain = tiny_tokenizer()
    return Tokenizer(plain.document, plain.settings, {"default": CALLER})


def a_chat_reading(folder: Path, plant: Plant) -> list[Verdict]:
    """Job: the audit, with a row that is refused as a verdict."""
    try:
        return [*a_chat_audit(ChatData(rows=calls_and_thoughts, words=words_with_calls))(folder, plant),
                proven("conversations", "every row was read and written")]
    except DataError as error:
        return [refuted("conversations", str(error))]


def field_lost(name: str) -> Plant:
    """The template was written before such a field was."""
    def without(usual: Any, writer: TemplateWriter, conversation: Conversation, *given: Any, **options: Any) -> str:
        messages = tuple({key: value for key, value in message.items() if key != name} for message in conversation.messages)
        return usual(writer, replace(conversation, messages=messages), *given, **options)

    return in_place_of(TemplateWriter, "write")(without)


fault("tool calls lost by the template", rows=("D26",), stage="template", check="conversations", job=a_chat_reading)(
    field_lost("tool_calls"))
fault("reasoning lost by the template", rows=("D26",), stage="template", check="conversations", job=a_chat_reading)(
    field_lost("reasoning_content"))


@fault("empty answers taught", rows=("D27",), stage="data", check="conversations", job=a_chat_reading)
@in_place_of(layouts, "read_rows")
def empty_answers_taught(usual: Any, path: Path, *asked: Any, **named: Any) -> Iterator[DataRow]:
    """An export that lost what was said: the model would learn to say nothing and stop."""
    for row in usual(path, *asked, **named):
        yield replace(row, values={"messages": [row.values["messages"][0], {"role": "assistant", "content": ""}]})

# ---------------------------------------------------------------- tools to plant with


def made_otherwise(change: Callable[[TrainingExample, Tokenizer], TrainingExample]) -> AbstractContextManager[None]:
    """Each example is changed after it was made."""
    whole = chat.tokenize_draft

    def changed(*parts: Any) -> tuple[TrainingExample, bool]:
        example, reseamed = whole(*parts)
        return change(example, parts[-1]), reseamed

    return swap(chat, "tokenize_draft", changed)

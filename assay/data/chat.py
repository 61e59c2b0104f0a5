"""Chat rendering: conversations become tokens with weights, by the model's own template.

The template is rendered turn by turn. What it writes before a turn, with its generation prompt, must be the beginning of what
it writes with the turn: the difference is what the model is to learn, up to and with the token that ends the turn. The text
is tokenised once, and a supervised piece must begin and end between two tokens, after the very ids that a sampler would be
given; where a token would reach over that seam, the text is cut there and its parts are tokenised apart, and counted.

Plain text (rows without messages, models without a template) ends with the tokenizer's EOS and begins with whatever the
tokenizer puts before a text. Nothing is supervised in column 0, because nothing predicts it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from assay.data.layouts import Conversation, content_of
from assay.data.message_fields import is_written, other_fields, unwritten_fields
from assay.errors import DataError
from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer

Overlong = Literal["drop", "truncate", "error"]
Turns = Literal["together", "apart"]
_CHUNK = 512  # conversations tokenised at a time
_RENDERED_AHEAD = 128  # conversations rendered in one round trip
SENTINEL = "assay-turn"
TOO_LONG, NOTHING_LEFT = "longer than the length", "nothing supervised is left within the length"


@dataclass(frozen=True, eq=False)
class TrainingExample:
    """`weight[t]` is how much predicting token t counts. Tuples and lists are taken too, and kept as arrays that do not change."""

    id: str
    tokens: NDArray[np.int32]
    weight: NDArray[np.float32]
    intended: tuple[str, ...]  # the texts that were meant to be supervised, one for each run of weights
    prompt: int  # tokens before the first supervised one
    asked: str = ""  # the text that those tokens are, without what the tokenizer puts before every text
    cut: bool = False  # its end is beyond the length: the last intended text is longer than what is here
    conversation: Conversation | None = None  # what it was made from

    def __post_init__(self) -> None:
        for name, dtype in (("tokens", np.int32), ("weight", np.float32)):
            stream = np.array(getattr(self, name), dtype)
            stream.flags.writeable = False
            object.__setattr__(self, name, stream)
        if self.tokens.shape != self.weight.shape or self.tokens.ndim != 1:
            raise DataError(f"{self.id}: {self.tokens.shape} tokens with {self.weight.shape} weights; expected one weight a token")
        if self.weight[:1].any():
            raise DataError(f"{self.id}: column 0 has weight {self.weight[0]:g}, but nothing predicts it; expected 0")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def content(self) -> str:
        """Content key, equal for examples made from the same words, wherever they stood."""
        return content_of(self.id)


@dataclass(frozen=True)
class Rendered:
    examples: list[TrainingExample]
    dropped: dict[str, int] = field(default_factory=dict)  # reason → conversations
    truncated: int = 0
    seams: int = 0  # examples whose text was cut at a seam and tokenised in parts
    unread: dict[str, int] = field(default_factory=dict)  # what stands in conversations and is neither learned nor asked → how often

    @property
    def counts(self) -> dict[str, Any]:
        tokens = sum(map(len, self.examples))
        supervised = int(sum(np.count_nonzero(example.weight) for example in self.examples))
        return {"kept": len(self.examples), "truncated": self.truncated, "dropped": dict(self.dropped), "seams": self.seams,
                "unread": dict(self.unread), "tokens": tokens, "supervised": supervised}


class Draft(NamedTuple):
    """Text that is not yet tokens. `spans` are the characters to supervise; nothing follows the last of them."""

    id: str
    text: str
    spans: list[tuple[int, int]]
    plain: bool  # no template wrote it, so the tokenizer begins it
    source: Conversation


def render_conversations(conversations: Iterable[Conversation], tokenizer: Tokenizer, stops: SpecialTokens, *, length: int,
                         over: Overlong = "drop",
                         roles: Collection[str] = ("assistant",), turns: Turns = "together") -> Rendered:
    """`over` says what happens to what is longer than `length`. `turns="apart"` makes an example of each supervised turn, for
    templates that write a turn differently once another follows."""
    if length < 2:
        raise DataError(f"a length of {length} tokens holds nothing that is predicted; expected at least 2")
    writer = TemplateWriter(tokenizer, stops, frozenset(roles), turns)
    drafts = (draft for conversation in writer.rendered_ahead(conversations) for draft in writer.drafts(conversation))
    examples: list[TrainingExample] = []
    dropped: Counter[str] = Counter()
    seams = 0
    for example, reseamed in tokenize_drafts(drafts, tokenizer):
        seams += reseamed
        kept = fit_to_length(example, length, over)
        if isinstance(kept, TrainingExample):
            examples.append(kept)
        else:
            dropped[kept] += 1
    return Rendered(examples, dict(dropped), sum(example.cut for example in examples), seams, dict(writer.unread))


def unread_in_words(unread: Mapping[str, int]) -> list[str]:
    """A line on what stands in the data and the model never sees, where there is any."""
    found = ", ".join(f"{count:,} {what}" for what, count in unread.items())
    return [f"in the data, and neither asked nor learned: {found}"] if found else []


def fit_to_length(example: TrainingExample, length: int, over: Overlong) -> TrainingExample | str:
    """The example within `length` tokens, or why it is dropped."""
    if len(example) <= length:
        return example
    if over == "error":
        raise DataError(f"{example.id}: {len(example)} tokens, and the length is {length}; raise --max-length, or say --too-long drop or "
                        "truncate")
    if over == "drop":
        return TOO_LONG
    weight = example.weight[:length]
    pieces = len(supervised_runs(weight))
    if not pieces:
        return NOTHING_LEFT
    return TrainingExample(example.id, example.tokens[:length], weight, example.intended[:pieces], example.prompt, example.asked,
                           True, example.conversation)


def supervised_runs(weight: NDArray[np.float32]) -> list[tuple[int, int]]:
    """The stretches of tokens that are supervised, as (start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], weight != 0, [False]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

# ---------------------------------------------------------------- conversations → text


class TemplateWriter:
    """Writer of conversations by a chat template. It remembers what the template writes after a turn of each role, since that is the same
    for every conversation."""

    def __init__(self, tokenizer: Tokenizer, stops: SpecialTokens, roles: frozenset[str], turns: Turns):
        self.tokenizer, self.roles, self.turns = tokenizer, roles, turns
        ends = {*stops.stop_ids, *(id for id in (stops.turn_end, stops.eos) if id is not None)}
        self.ends = [tokenizer.tokens[id] for id in sorted(ends) if id in tokenizer.tokens]
        self.eos = None if stops.eos is None else tokenizer.tokens[stops.eos]
        self.tails: dict[str, str] = {}
        self.unread: Counter[str] = Counter()
        self.ahead: dict[tuple[int, int, bool], str] = {}  # texts of the conversations at hand, by what `write` is asked

    def rendered_ahead(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        """Conversations passed on some at a time, with the texts that their turns will ask for rendered together: a round trip to the
        template's process costs more than a rendering. A text that cannot be had is asked for again by its turn, which says why."""
        left = iter(conversations)
        while chunk := list(islice(left, _RENDERED_AHEAD)):
            asked = [] if self.tokenizer.template is None else [(one, *text) for one in chunk for text in self.texts_of(one)]
            chats = [(one.messages[:turns], one.tools, prompt) for one, turns, prompt in asked]
            texts = self.tokenizer.render_batch(chats) if chats else []
            self.ahead = {(id(one), turns, prompt): text for (one, turns, prompt), text in zip(asked, texts, strict=True)
                          if text is not None}
            yield from chunk

    def texts_of(self, conversation: Conversation) -> Iterator[tuple[int, bool]]:
        """How many of its messages, and whether with the generation prompt, for each text that `turn` needs."""
        for k in self.learned(conversation):
            yield k + 1, False
            if conversation.messages[k]["role"] == "assistant":
                yield k, True

    def learned(self, conversation: Conversation) -> list[int]:
        return [k for k, message in enumerate(conversation.messages)
                if k >= conversation.learned_from and message["role"] in self.roles]

    def drafts(self, conversation: Conversation) -> Iterator[Draft]:
        if conversation.prompt_only:
            raise DataError(f"{conversation.where}: there is a prompt and nothing to learn; expected a completion, or an answer")
        if conversation.messages and self.tokenizer.template is not None:
            yield from self.templated(conversation)
        elif conversation.plain is not None:
            yield self.plain(conversation, *conversation.plain)
        else:
            raise DataError(f"{conversation.where}: the row has messages, and this model has no chat template to write them with; "
                            "add chat_template.jinja to its folder, or give prompt and completion as text")

    def plain(self, conversation: Conversation, prompt: str, completion: str) -> Draft:
        if self.eos is None:
            raise DataError(f"{conversation.where}: no file of the model names an EOS token, so no text can be taught to end; "
                            "name eos_token in tokenizer_config.json")
        ended = completion if completion.endswith(self.eos) else completion + self.eos
        text = prompt + ended
        return Draft(conversation.id, text, [(len(prompt), len(text))], True, conversation)

    def templated(self, conversation: Conversation) -> Iterator[Draft]:
        learned = self.learned(conversation)
        if not learned:
            found = sorted({message["role"] for message in conversation.messages})
            raise DataError(f"{conversation.where}: nothing to learn: its messages are of {', '.join(found)}, and what is learned "
                            f"are those of {', '.join(sorted(self.roles))}")
        written = [self.turn(conversation, k) for k in learned]
        self.note_unread(conversation, learned, written[-1][0])
        if self.turns == "apart":
            for k, (text, span) in zip(learned, written, strict=True):
                yield Draft(f"{conversation.id}#{k}", text, [span], False, conversation)
            return
        for (text, _), (longer, _) in pairwise(written):
            if not longer.startswith(text):
                here, there = divergence_excerpts(text, longer)
                raise DataError(f"{conversation.where}: the chat template writes an earlier turn differently once another follows "
                                f"({here!r}, then {there!r}), so one text cannot teach both; make an example of each with --turns apart")
        yield Draft(conversation.id, written[-1][0], [span for _, span in written], False, conversation)

    def turn(self, conversation: Conversation, k: int) -> tuple[str, tuple[int, int]]:
        """The text up to the token that ends turn k, and which part of it is learned."""
        message = conversation.messages[k]
        text, content = self.write(conversation, k + 1), message["content"]
        tail = self.tail(conversation, k)
        body = text.removesuffix(tail)
        if not text.endswith(tail) or content.strip() not in body:
            raise DataError(f"{conversation.where}: the chat template does not write turn {k} ({message['role']}) as content and "
                            f"{tail!r}: it ends with {text[-60:]!r}; there is no telling what is to be learned")
        begin, end = self.begin(conversation, k, text, body), len(body) + len(self.until_stop(tail))
        if lost := unwritten_fields(message, text[self.begin_of_content(conversation, k, body, begin) :]):
            raise DataError(f"{conversation.where}: the chat template does not write {' and '.join(lost)} of turn {k} ({message['role']}), "
                            f"which would be taught without; it writes {text[begin:end][:80]!r}. Give the model a template that writes "
                            "it (chat_template.jinja in its folder), or put what is to be learned into the content")
        return text[:end], (begin, end)

    def begin_of_content(self, conversation: Conversation, k: int, body: str, begin: int) -> int:
        """Place where turn k's words begin: within the generation prompt, where that has the first of them (an opened thought, say)."""
        at = body.rfind(conversation.messages[k]["content"].strip())
        return at if at < begin and at >= len(self.write(conversation, k)) else begin

    def note_unread(self, conversation: Conversation, learned: Sequence[int], text: str) -> None:
        """Count what the data has and the model never sees, so that it can be reported."""
        messages, last = conversation.messages, learned[-1]
        if last + 1 < len(messages):
            self.unread["last turns that nothing answers"] += 1
        self.unread.update(f"message field {name!r}" for k in learned for name in other_fields(messages[k]))
        for message in messages[:last]:
            if message["role"] not in ("assistant", *self.roles) and unwritten_fields(message, text):
                self.unread[f"earlier turns of {message['role']} that the chat template does not write"] += 1
        if conversation.tools and not any(is_written(tool.get("function", tool).get("name"), text) for tool in conversation.tools):
            self.unread["rows whose tools the chat template does not write"] += 1

    def begin(self, conversation: Conversation, k: int, text: str, body: str) -> int:
        """Place where turn k begins: after the generation prompt for what a model writes, at the content for what it is told."""
        message = conversation.messages[k]
        if message["role"] != "assistant":
            return len(body) - len(message["content"] if body.endswith(message["content"]) else message["content"].strip())
        before = self.write(conversation, k, prompt=True)
        if not text.startswith(before):
            here, there = divergence_excerpts(before, text)
            raise DataError(f"{conversation.where}: before an answer the chat template's generation prompt has {here!r}, where its own "
                            f"answers have {there!r}: no sampler will begin there; {_way_out(here, there)}")
        return len(before)

    def tail(self, conversation: Conversation, k: int) -> str:
        """Text that the template writes after the content of such a turn."""
        message = conversation.messages[k]
        if message["role"] not in self.tails:
            probe = {"role": message["role"], "content": SENTINEL}
            text = self.tokenizer.render([*conversation.messages[:k], probe], tools=conversation.tools)
            _, found, self.tails[message["role"]] = text.rpartition(SENTINEL)
            if not found:
                raise DataError(f"{conversation.where}: the chat template does not write what a turn of {message['role']} says")
        return self.tails[message["role"]]

    def until_stop(self, tail: str) -> str:
        """Text up to and including the first token that ends a turn; nothing where none does, which the audit refuses."""
        ends = [at + len(end) for end in self.ends if (at := tail.find(end)) >= 0]
        return tail[: min(ends, default=0)]

    def write(self, conversation: Conversation, turns: int, *, prompt: bool = False) -> str:
        """Text of the first `turns` messages, with the generation prompt where that is asked for."""
        if (text := self.ahead.get((id(conversation), turns, prompt))) is not None:
            return text
        return self.tokenizer.render(conversation.messages[:turns], tools=conversation.tools, add_generation_prompt=prompt)


def _way_out(prompted: str, answered: str) -> str:
    """Advice about a template whose generation prompt is not how its answers begin: by what the prompt has and the answer has not."""
    mark = next((mark for mark in ("<think", "<|think", "[THINK", "<reason", "<thought", "<seed:think") if prompted.startswith(mark)), None)
    if mark is not None:
        return ("it opens a thought, and this answer has none: give the thoughts as reasoning_content in the row, or give the model "
                "a template whose generation prompt opens none (chat_template.jinja in its folder)")
    if not prompted:
        return "the template writes nothing where an answer is asked for: let it end with the answer's opening if add_generation_prompt"
    if prompted[:1].isspace() or answered[:1].isspace():
        return "they differ in white space: let the template write the same before an answer as in its generation prompt"
    return "let the template's generation prompt be what it writes before an answer (chat_template.jinja in the model's folder)"


def divergence_excerpts(one: str, other: str, *, before: int = 0, shown: int = 40) -> tuple[str, str]:
    """Excerpts of two texts from where they part, or from shortly before."""
    apart = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    at = max(0, next(apart, min(len(one), len(other))) - before)
    return one[at : at + shown], other[at : at + shown]

# ---------------------------------------------------------------- text → tokens


def tokenize_drafts(drafts: Iterable[Draft], tokenizer: Tokenizer) -> Iterator[tuple[TrainingExample, bool]]:
    """Each draft as an example, and whether it had to be cut at a seam."""
    begin = text_prefix_ids(tokenizer)
    drafts = iter(drafts)
    while chunk := list(islice(drafts, _CHUNK)):
        prompts = tokenizer.encode_batch([draft.text[: draft.spans[0][0]] for draft in chunk])
        for draft, whole, prompt in zip(chunk, tokenizer.encodings([draft.text for draft in chunk]), prompts, strict=True):
            yield tokenize_draft(draft, whole, prompt, begin, tokenizer)


def tokenize_draft(draft: Draft, whole: Encoding, prompt: list[int], begin: list[int], tokenizer: Tokenizer) -> tuple[TrainingExample,
                                                                                                                      bool]:
    ids, edges = whole.ids, token_edges(draft, whole)
    reseamed = edges is None or ids[: edges[0]] != prompt
    if edges is None or reseamed:
        ids, edges = tokenize_in_parts(draft, tokenizer)
    if draft.plain and ids[: len(begin)] != begin:
        ids, edges = begin + ids, [edge + len(begin) for edge in edges]
    intended = [draft.text[start:stop] for start, stop in draft.spans]
    if edges[0] == 0:  # nothing predicts the first token
        edges[0], intended[0] = 1, intended[0].removeprefix(tokenizer.decode(ids[:1]))
    weight = np.zeros(len(ids), np.float32)
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        weight[start:stop] = 1
    asked = draft.text[: draft.spans[0][0]]
    return TrainingExample(draft.id, np.array(ids, np.int32), weight, tuple(intended), edges[0], asked, False, draft.source), reseamed


def token_edges(draft: Draft, whole: Encoding) -> list[int] | None:
    """Token indices where the spans begin and end; None where an edge lies within a token."""
    edges = [token_edge(at, whole, draft.text) for span in draft.spans for at in span]
    return None if None in edges else edges  # type: ignore[return-value]


def token_edge(at: int, whole: Encoding, text: str) -> int | None:
    """The token that begins at a character, where one does and the one before ends."""
    if at == len(text):
        return len(whole.ids)
    index = whole.char_to_token(at)
    if index is None:
        return None
    here, before = whole.token_to_chars(index), whole.token_to_chars(index - 1) if index else None
    return index if here is not None and here[0] == at and (before is None or before[1] <= at) else None


def tokenize_in_parts(draft: Draft, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The text cut wherever a span begins or ends: ids that a sampler gets as its prompt are a prefix, by construction."""
    ids: list[int] = []
    edges: list[int] = []
    done = 0
    for at in (edge for span in draft.spans for edge in span):
        ids += tokenizer.encode(draft.text[done:at])
        edges.append(len(ids))
        done = at
    return ids, edges


def text_prefix_ids(tokenizer: Tokenizer) -> list[int]:
    """Token ids that the tokenizer puts before a text, such as BOS."""
    plain, around = tokenizer.encode("a"), tokenizer.encode("a", special=True)
    return next((around[:i] for i in range(len(around)) if around[i : i + len(plain)] == plain), [])

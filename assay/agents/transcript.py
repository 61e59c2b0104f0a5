"""Transcripts: an episode's conversation as the token ids that the policy is shown and says, written by its own chat template.

    written = ChatWriter(tokenizer, tools)
    transcript = Transcript(written.first(messages), messages)
    transcript.say(completion, message)                  the sampled ids, as they are
    written.insert([(transcript, answers), …])           what the template writes after them, or a new sequence where it rewrote them
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from assay.agents.tool_calls import ChatMessage, ToolCall, ToolFormat, format_for
from assay.agents.trajectory import Piece, Source, TokenSequence, in_one_row
from assay.data.chat import text_prefix_ids
from assay.errors import DataError
from assay.generate.generation_request import Completion
from assay.model.chat_template import Chat
from assay.model.tokenizer import Tokenizer

CANARY_CALL = ToolCall("assay_canary", {"place": "Ada's garden", "number": 17})
CANARY_TOOL: dict[str, Any] = {"type": "function", "function": {"name": CANARY_CALL.name, "description": "A test.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}, "number": {"type": "integer"}}, "required": ["place", "number"]}}}


class Transcript:
    """One episode's messages, and the sequences that they have become; the last one is where the next turn is sampled."""

    def __init__(self, prompt: Sequence[Piece], messages: Sequence[ChatMessage]):
        self.messages, self._sequences = [*messages], [[*prompt]]

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids that the next turn is sampled after."""
        return tuple(chain.from_iterable(piece.ids for piece in self._sequences[-1]))

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Sequences in which a turn was sampled, each up to the last one: what nobody has answered is not trained on."""
        return tuple(in_one_row(pieces[:-_unanswered(pieces) or None]) for pieces in self._sequences if _unanswered(pieces) < len(pieces))

    def say(self, completion: Completion, message: ChatMessage) -> None:
        self._sequences[-1].append(Piece("policy", completion.ids, completion.logprobs, completion.version, completion.ended))
        self.messages.append(message)

    def hear(self, messages: Sequence[ChatMessage], pieces: Sequence[Piece]) -> None:
        self.messages += messages
        self._sequences[-1] += pieces

    def branch(self, messages: Sequence[ChatMessage], pieces: Sequence[Piece]) -> None:
        """Begin a new sequence, because the policy now sees another text; nothing said before is trained on again in it."""
        self.messages += messages
        self._sequences.append([*pieces])


class ChatWriter:
    """Messages as ids. Without a chat template their contents stand one after another, as they are."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], tool_format: str | None = None):
        self.tokenizer, self.tools = tokenizer, list(tools) or None
        self.format: ToolFormat = format_for(tokenizer.template, tool_format)

    def turn(self, completion: Completion, address: str) -> dict[str, Any]:
        """A sampled turn as a message; special tokens within it are part of what was said, the one that ended it is not."""
        ids = completion.ids[:-1] if completion.ended == "stop" else completion.ids
        return self.message(self.tokenizer.decode(ids), address)

    def message(self, text: str, address: str) -> dict[str, Any]:
        return self.format.message(text, address, self.tools or ())

    def first(self, conversations: Sequence[Sequence[ChatMessage]]) -> list[tuple[list[Piece], str]]:
        """Pieces of ids, and the text, of each conversation that begins."""
        if self.tokenizer.template is None:
            begin, texts = text_prefix_ids(self.tokenizer), ["".join(each["content"] for each in said) for said in conversations]
            return [([Piece("template", tuple(begin)), *self.pieces(text, said)], text)
                    for text, said in zip(texts, conversations, strict=True)]
        known: dict[tuple[str, str], list[Piece]] = {}  # members of a group begin alike
        found = []
        for text, said in zip(self.rendered(conversations), conversations, strict=True):
            key = text, str(said)
            known[key] = known[key] if key in known else self.pieces(text, said)
            found.append((known[key], text))
        return found

    def insert(self, answered: Sequence[tuple[Transcript, Sequence[ChatMessage]]]) -> list[str | None]:
        """The environment's messages, after what was said: as the template goes on from there, or where it does not, in a new sequence.

        Of each, why the template does not take it, or None.
        """
        if self.tokenizer.template is None:
            for transcript, messages in answered:
                transcript.hear(messages, self.pieces("".join(each["content"] for each in messages), messages))
            return [None] * len(answered)
        texts = self._rendered([[*transcript.messages, *messages] for transcript, messages in answered])
        for (transcript, messages), whole in zip(answered, texts, strict=True):
            if isinstance(whole, DataError):
                continue
            said = self.tokenizer.decode(transcript.prompt)
            more = self.pieces(whole[len(said):], messages) if whole.startswith(said) else []
            if more and self.tokenizer.decode(chain.from_iterable(piece.ids for piece in more)) == whole[len(said):]:
                transcript.hear(messages, more)
            else:
                transcript.branch(messages, self.pieces(whole, [*transcript.messages, *messages]))
        return [str(whole) if isinstance(whole, DataError) else None for whole in texts]

    def rendered(self, conversations: Sequence[Sequence[ChatMessage]]) -> list[str]:
        """Conversations rendered by the chat template, each with the beginning of the next turn; one that the template does not take is a
        DataError."""
        found = []
        for text in self._rendered(conversations):
            if isinstance(text, DataError):
                raise text
            found.append(text)
        return found

    def _rendered(self, conversations: Sequence[Sequence[ChatMessage]]) -> list[str | DataError]:
        shown = [[self.format.history(each) if each["role"] == "assistant" else each for each in said] for said in conversations]
        texts = self.tokenizer.render_batch([(said, self.tools, True) for said in shown])
        return [self._alone(said) if text is None else text for text, said in zip(texts, shown, strict=True)]

    def _alone(self, said: Sequence[ChatMessage]) -> str | DataError:
        """A conversation that failed among others: its text, or what the template has against it."""
        try:
            return self.tokenizer.render(said, tools=self.tools, add_generation_prompt=True)
        except DataError as error:
            return error

    def pieces(self, text: str, messages: Sequence[ChatMessage]) -> list[Piece]:
        """A text's ids by source: what messages say is the environment's, what stands around it the template's, earlier turns that it
        wrote anew too. A token that holds some of both is the environment's."""
        ids, offsets = self.tokenizer.offsets(text)
        if ids != self.tokenizer.encode(text):
            raise DataError("this tokenizer gives a text other ids where it is asked for their places; sources of tokens cannot be told")
        spoken, begin = list[tuple[int, int]](), 0
        for message in (each for each in messages if each["role"] != "assistant"):
            at = text.find(str(message["content"]).strip(), begin)
            if at >= 0:
                begin = at + len(str(message["content"]).strip())
                spoken.append((at, begin))
        sources: list[Source] = ["environment" if any(first < stop and end > start for start, stop in spoken) else "template"
                                 for first, end in offsets]
        return [Piece(source, tuple(token for _, token in run))
                for source, run in groupby(zip(sources, ids, strict=True), key=itemgetter(0))]


def _unanswered(pieces: Sequence[Piece]) -> int:
    """How many pieces stand after the last turn."""
    return next((after for after, piece in enumerate(reversed(pieces)) if piece.source == "policy"), len(pieces))


def call_as_templated(tokenizer: Tokenizer) -> str | None:
    """A turn with a tool call as the model's own chat template writes it, without the token that ends it; None where it writes no call.

    Templates differ in what they take for one: without content or with an empty one, with arguments as an object or as text.
    """
    asked: ChatMessage = {"role": "user", "content": "?"}
    given = dict(CANARY_CALL.arguments)
    said: list[ChatMessage] = [{"role": "assistant", "content": content, "tool_calls": [
        {"id": "a1b2c3d4e", "type": "function", "function": {"name": CANARY_CALL.name, "arguments": arguments}}]}
        for arguments in (given, json.dumps(given)) for content in ("", None)]
    chats: list[Chat] = [([asked, each], [CANARY_TOOL], False) for each in said]
    before, *wholes = tokenizer.render_batch([([asked], [CANARY_TOOL], True), *chats])
    turns = [whole[_common_length(before, whole):] for whole in wholes if before is not None and whole is not None]
    written = next((turn.strip() for turn in turns if CANARY_CALL.name in turn), None)
    ends = tuple(filter(None, (tokenizer.tokens[token] for token in tokenizer.special_ids)))
    while written is not None and written.endswith(ends):
        written = next(written.removesuffix(end) for end in ends if written.endswith(end)).strip()
    return written


def _common_length(one: str, other: str) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

"""Served conversations: every turn was sampled after the conversation that its request carried, as the chat template writes it.

What is due of a request is worked out when it comes (a template may write the date), from it and the requests before it. The transcripts
that the policy's prompts are made of take no part.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.agents.episodes import SampledTurn
from assay.agents.tool_calls import ChatMessage, ToolCall, ToolFormat
from assay.model.tokenizer import Tokenizer, equal_but_for_blanks
from assay.verdict import Verdict, proven, refuted

NO_CHARACTER = "\ufffd"  # what bytes that are none are shown as; how often, depends on what stands beside them


@dataclass(eq=False)
class HeardRequest:
    """A request of a trajectory. `answer`: what its client was told; `turn`: the same as the policy said it. None of a turn cancelled."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...]
    conversation: tuple[ChatMessage, ...]  # the messages; where they go on from the turn before, with those before as they were said
    due: str  # this conversation by the chat template
    answer: ChatMessage | None = None
    turn: ChatMessage | None = None


def hear_request(before: Sequence[HeardRequest], messages: tuple[ChatMessage, ...], tools: tuple[Mapping[str, Any], ...],
                 tokenizer: Tokenizer, spoken: ToolFormat) -> HeardRequest:
    """A request, with what the policy must be shown of it."""
    conversation = [as_shown(message, spoken) for message in messages]
    last = before[-1] if before else None
    if last is not None and last.turn is not None and last.answer is not None and last.tools == tools:
        known = (*last.messages, last.answer)
        if len(messages) > len(known) and messages[: len(known)] == known:
            conversation = [*last.conversation, last.turn, *conversation[len(known):]]
    shown = [spoken.history(message) if message["role"] == "assistant" else message for message in conversation]
    due = tokenizer.render(shown, tools=[*tools] or None, add_generation_prompt=True)
    return HeardRequest(messages, tools, (*conversation,), due)


def as_shown(message: ChatMessage, spoken: ToolFormat) -> ChatMessage:
    """A message that the policy did not say here, as templates of its format are shown it."""
    if spoken.structured or not message.get("tool_calls"):
        return message
    calls = [ToolCall(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    return {**message, "content": spoken.write(message["content"], calls)}


def check_heard(trajectories: Iterable[tuple[Sequence[HeardRequest], Sequence[SampledTurn]]], tokenizer: Tokenizer) -> Verdict:
    """Check that every turn was sampled after the conversation that its request carried, and not after another that went before."""
    turns = 0
    for heard, sampled in trajectories:
        answered = [request for request in heard if request.turn is not None]
        if len(answered) != len(sampled):
            return refuted("heard", f"{len(sampled)} turns were sampled in a trajectory, and {len(answered)} of its requests were "
                           "answered")
        for request, turn in zip(answered, sampled, strict=True):
            if not says(turn.prompt, request.due, tokenizer):
                shown = tokenizer.decode(turn.prompt)
                return refuted("heard", f"a turn was sampled after {shown[-200:]!r}, and its request carried "
                               f"{request.due[-200:]!r}: what its client wrote was not heard, or not as the chat template has it")
        turns += len(sampled)
    return proven("heard", f"{turns} turns were sampled after the conversations that their requests carried", turns=turns)


def says(prompt: Sequence[int], due: str, tokenizer: Tokenizer) -> bool:
    """Whether ids say a text, as far as this tokenizer can write it. What was sampled need not be what encoding its text would give."""
    shown = tokenizer.decode(prompt).replace(NO_CHARACTER, "")
    return any(equal_but_for_blanks(shown, text.replace(NO_CHARACTER, "")) for text in (due, tokenizer.decode(tokenizer.encode(due))))

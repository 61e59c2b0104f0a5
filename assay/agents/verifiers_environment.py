"""Environments of the package `verifiers` (verifiers:NAME): its own rollout loop asks for turns, and its rubric scores the episode.

The loop runs in a thread, with a model client that hands each question out and waits for the turn. A rubric that raises is scored 0 by
verifiers and logged; here it is an error of the episode, whose reward is unknown. Versions 0.1.10 to 0.3 have such environments; those
of 0.4 run their own agents against an endpoint, which is `assay serve --train`: a trajectory a rollout, by the headers of its client.
"""

import asyncio
import functools
import json
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from assay.agents.environment import Answer
from assay.agents.tool_calls import ChatMessage
from assay.errors import DataError, UsageError

LOGGER = "verifiers"  # under which all of the package's loggers stand


class VerifiersEnvironment:
    """verifiers:NAME: a row of the environment's dataset a seed. Options are those of its load_environment."""

    def __init__(self, name: str, **options: Any):
        self.environment, self.rows = loaded_environment(name, json.dumps(options, sort_keys=True))
        self.tools: Sequence[Mapping[str, Any]] = [openai_tool(each) for each in getattr(self.environment, "tool_defs", None) or ()]

    def reset(self, seed: int) -> Sequence[ChatMessage]:
        self.episode = VerifiersEpisode(self.environment, dict(self.rows[seed % len(self.rows)]))
        asked = self.episode.next_question()
        if asked is None:
            raise DataError("the episode ended before its first turn")
        return asked

    def step(self, message: ChatMessage) -> Answer:
        self.episode.say(message)
        asked = self.episode.next_question()
        return ([], self.episode.reward, True) if asked is None else (asked, 0.0, False)


class VerifiersEpisode:
    """One rollout of theirs under way. Questions come one at a time, each with what is new since the turn before."""

    def __init__(self, environment: Any, row: Mapping[str, Any]):
        self.environment, self.row = environment, row
        self.asked: queue.SimpleQueue[list[dict[str, Any]] | BaseException | None] = queue.SimpleQueue()
        self.turn: asyncio.Future[ChatMessage] | None = None  # that the loop waits for
        self.reward = 0.0
        self._shown: list[dict[str, Any]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def next_question(self) -> list[dict[str, Any]] | None:
        """Messages that the policy is shown next; None where the episode is over and `reward` is known."""
        found = self.asked.get()
        if isinstance(found, BaseException):
            raise DataError(f"verifiers: {type(found).__name__}: {found}") from found
        return found

    def say(self, message: ChatMessage) -> None:
        assert self.turn is not None, "a question comes before a turn"
        self.turn.get_loop().call_soon_threadsafe(self.turn.set_result, message)

    def _run(self) -> None:
        try:
            self.reward = asyncio.run(self._play())
        except Exception as error:  # of code that anybody wrote; it is raised again where the turn is waited for
            self.asked.put(error)
        else:
            self.asked.put(None)

    async def _play(self) -> float:
        client = turn_client(self)
        state = await self.environment.rollout(self.row, client, "policy", {})
        if state.get("error") is not None:
            raise DataError(f"the rollout ended with {state['error']!r}")
        with HeardErrors() as errors:
            await self.environment.rubric.score_rollout(state)
        if errors:
            raise DataError(f"{errors[0]}; verifiers scores that 0, which it is not known to be")
        await self.environment.rubric.cleanup(state)
        return float(state["reward"])

    async def answer(self, prompt: Sequence[Any]) -> ChatMessage:
        """What the policy says to a prompt of theirs: the whole conversation, of which what is new is shown."""
        messages = [text_message(each) for each in prompt]
        known = len(self._shown)
        if [each | {"tool_calls": None} for each in messages[:known]] != [each | {"tool_calls": None} for each in self._shown]:
            raise DataError("the environment wrote the history anew, which an episode's turns cannot follow")
        self.turn = asyncio.get_running_loop().create_future()
        self.asked.put([each for each in messages[known:] if each["role"] != "assistant" or not known])
        said = await self.turn
        self._shown = [*messages, {"role": "assistant", "content": said["content"]}]
        return said


@functools.cache
def loaded_environment(name: str, options: str) -> tuple[Any, Any]:
    """The environment and its rows, once a process: a dataset is read with it."""
    try:
        import verifiers
        from verifiers.clients import Client  # noqa: F401 - from 0.1.10 on
        load = verifiers.load_environment
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--environment verifiers:{name}: {error}; pip install 'verifiers>=0.1.10,<0.4'. Environments of 0.4 talk to an "
                         "endpoint: give them assay serve --train") from None
    try:
        environment = load(name, **json.loads(options))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise UsageError(f"--environment verifiers:{name}: {error}") from None
    return environment, environment.get_dataset()


def turn_client(episode: VerifiersEpisode) -> Any:
    """A model client of theirs whose every answer is a turn of the episode."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class TurnClient(Client):
        async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
            said = await episode.answer(prompt)
            calls = [ToolCall(id=each["id"], name=each["function"]["name"], arguments=json.dumps(each["function"]["arguments"]))
                     for each in said.get("tool_calls", ())]
            message = ResponseMessage(content=said["content"], tool_calls=calls or None, finish_reason="tool_calls" if calls else "stop",
                                      is_truncated=False)
            return Response(id="turn", created=int(time.time()), model=model, message=message)

        def setup_client(self, config: Any) -> None: ...

        async def to_native_tool(self, tool: Any) -> None: ...

        async def to_native_prompt(self, messages: Any) -> Any: ...

        async def get_native_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> None: ...

        async def raise_from_native_response(self, response: Any) -> None: ...

        async def from_native_response(self, response: Any) -> Any: ...

        async def close(self) -> None: ...

    return TurnClient(None)


def text_message(message: Any) -> dict[str, Any]:
    """A message of theirs, a record or a mapping, as one with text content."""
    found = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    content = found.get("content") or ""
    if not isinstance(content, str):
        texts = [part.get("text") for part in content]
        if None in texts:
            raise DataError("a message holds something else than text, which the policy cannot be shown")
        content = "".join(texts)
    return {name: found[name] for name in ("role", "tool_call_id", "name") if found.get(name)} | {"content": content}


def openai_tool(tool: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}


class HeardErrors(logging.Handler):
    """Messages of the package's loggers at level ERROR, of this thread, inside the block."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []
        self.thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self.thread:
            self.said.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger(LOGGER).addHandler(self)
        return self.said

    def __exit__(self, *_: object) -> None:
        logging.getLogger(LOGGER).removeHandler(self)

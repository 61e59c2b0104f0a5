"""Known requests: a server answers a few before anybody else is let in, and every answer is compared with what is due of the model alone.

Each subject is a generator that asks its questions, is told the choices of every answer, and may ask again; all subjects are asked at the
same time, so that they cost little more than the longest answer. `due_replies` says what is right. `ask` is the way in of every client.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from assay.errors import DataError
from assay.guard.due_replies import (
    CHATS,
    CUT_IN_DOUBT,
    NEW,
    PLAIN_SOFTMAX,
    TEXTS,
    USUAL_NEW,
    Choice,
    KnownQuestion,
    Misanswered,
    ServedModel,
    check_reply,
    require,
    require_own_draws,
    require_same_draws,
)
from assay.verdict import Verdict, proven, refuted, unproven

CHECK = "known_requests"
Subject = Generator[list[KnownQuestion], list[list[Choice]], None]
Messages = Sequence[Mapping[str, Any]]
MEMBERS = 4  # completions of the largest known request
FORM_NEW = 96  # tokens that a demanded call or number may take
WARM_DRAW = PLAIN_SOFTMAX | {"temperature": 0.8, "repetition_penalty": 1.3}
NARROW_DRAW = WARM_DRAW | {"top_k": 20, "top_p": 0.9, "min_p": 0.02}
OPENING = "Once upon a"
KNOWN_CHAT: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Red "}, {"type": "text", "text": "or?"}]},
                              {"role": "assistant", "content": "Green"}, {"role": "user", "content": "and?"}]
CHAT_AS_SHOWN: list[dict[str, Any]] = [{**KNOWN_CHAT[0], "content": "Red or?"}, *KNOWN_CHAT[1:]]  # as a template is shown them
GO = {"type": "function", "function": {"name": "go", "description": "Go there.", "parameters": {
    "type": "object", "properties": {"to": {"enum": ["a", "b"]}}, "required": ["to"], "additionalProperties": False}}}
HALT = {"type": "function", "function": {"name": "halt", "description": "Halt.", "parameters": {
    "type": "object", "properties": {}, "additionalProperties": False}}}
DUE_CALLS: dict[str, list[dict[str, str]]] = {"go": [{"to": "a"}, {"to": "b"}], "halt": [{}]}
SCHEMA = {"enum": [1, 22]}
ONE_OF = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}


class KnownRequest(NamedTuple):
    path: str
    body: Mapping[str, Any] | None
    method: str | None = None  # POST with a body, GET without one


class KnownReply(NamedTuple):
    status: int
    body: Any  # an object; of a stream its events, the last of them text; or text


Ask = Callable[[Sequence[KnownRequest]], Sequence[KnownReply]]  # all at the same time


@dataclass
class Client:
    """Asks, and counts what it asked and was told. `room`: completions that the server takes at a time."""

    ask: Ask
    room: int
    replies: Counter[tuple[str, int]] = field(default_factory=Counter)
    prompt_tokens: Counter[str] = field(default_factory=Counter)  # by model, once for each completion
    completion_tokens: Counter[str] = field(default_factory=Counter)

    def hear(self, subjects: Sequence[Subject]) -> None:
        """Let every subject ask, all at the same time, until none has another question."""
        heard: list[tuple[Subject, Any]] = [(subject, None) for subject in subjects]
        while asking := [(subject, questions) for subject, choices in heard if (questions := next_questions(subject, choices))]:
            answers = iter(self.answers([question for _, questions in asking for question in questions]))
            heard = [(subject, [next(answers) for _ in questions]) for subject, questions in asking]

    def answers(self, questions: Sequence[KnownQuestion]) -> list[list[Choice]]:
        """The choices of each answer, as far as they follow from the question alone checked."""
        rounds = [[KnownRequest(each.path, each.body) for each in some] for some in self.in_rounds(questions)]
        replies = itertools.chain.from_iterable(map(self.send, rounds))
        return [self.answer(question, reply) for question, reply in zip(questions, replies, strict=True)]

    def in_rounds(self, questions: Sequence[KnownQuestion]) -> Iterator[list[KnownQuestion]]:
        """As many questions at a time as the server has room for."""
        some: list[KnownQuestion] = []
        for question in questions:
            if sum(members(each) for each in [*some, question]) > self.room:
                yield some
                some = []
            some.append(question)
        yield some

    def answer(self, question: KnownQuestion, reply: KnownReply) -> list[Choice]:
        require(reply.status == 200, f"{question.path} refused what it should answer, with {reply.status}: {json.dumps(reply.body)[:300]}; "
                f"asked was {json.dumps(question.asked)[:300]}")
        whole = gathered_stream(question, reply.body) if question.asked.get("stream") else reply.body
        name, choices = question.served.name, check_reply(question, whole)
        self.prompt_tokens[name] += question.choices * sum(map(len, question.prompts))
        self.completion_tokens[name] += sum(len(choice["token_ids"]) for choice in choices)
        return choices

    def send(self, requests: Sequence[KnownRequest]) -> Sequence[KnownReply]:
        replies = self.ask(requests)
        self.replies.update((request.path, reply.status) for request, reply in zip(requests, replies, strict=True))
        return replies

    def get(self, path: str) -> Any:
        reply, = self.send([KnownRequest(path, None)])
        require(reply.status == 200, f"{path} is answered with {reply.status}: {str(reply.body)[:300]}")
        return reply.body


def check_known_requests(ask: Ask, served: Sequence[ServedModel], *, slots: int, room: int) -> Verdict:
    """Whether a server answers, streams, counts and refuses as it should: its first model in all ways, the others once."""
    first, client = served[0], Client(ask, room)
    chats = first.tokenizer.template is not None and is_rendered(first)
    longest = max(len(text_prompt(each)) for each in served) + NEW + (len(chat_prompt(first)) if chats else 0)
    if room < MEMBERS or longest > min(each.length for each in served):
        return unproven(CHECK, f"the server has room for {room} completions of {first.length} tokens and the known requests take "
                        f"{MEMBERS} of {longest}, so they were not asked; raise --queue or --max-length", optional=True)
    try:
        client.hear([texts(first), *map(one_text, served[1:]), *([chats_of(first), demanded_number(first), shown_tools(first)] if chats
                                                                 else [])])
        refusals(client, first, chats)
        kept_models(client, first)
        listings(client, served, slots)
    except Misanswered as wrong:
        return refuted(CHECK, str(wrong))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return refuted(CHECK, f"a reply does not have the fields that are due ({type(error).__name__}: {error})")
    answered = sum(count for (_, status), count in client.replies.items() if status == 200)
    refused = client.replies.total() - answered
    return proven(CHECK, f"{answered} known requests are answered as the model itself says, and {refused} that ask for what cannot be are "
                  "refused" + ("" if first.no_forms is None else f"; answers in a given form are not served: {first.no_forms}"),
                  answered=answered, refused=refused)


def next_questions(subject: Subject, choices: Any) -> list[KnownQuestion]:
    """What a subject asks once it was told these choices, None at its beginning; nothing where it is over."""
    try:
        return subject.send(choices)
    except StopIteration:
        return []


def members(question: KnownQuestion) -> int:
    return question.choices * len(question.prompts)


def is_rendered(served: ServedModel) -> bool:
    """Whether the model's chat template takes the known conversation: some refuse roles."""
    try:
        return bool(chat_prompt(served))
    except DataError:
        return False


def takes_tools(served: ServedModel) -> bool:
    """Whether the model's chat template has a place for tools."""
    try:
        return chat_prompt(served, [GO]) != chat_prompt(served)
    except DataError:
        return False


def chat_prompt(served: ServedModel, tools: Messages | None = None, messages: Messages = CHAT_AS_SHOWN) -> list[int]:
    return served.tokenizer.encode(served.tokenizer.render(messages, tools=tools, add_generation_prompt=True))


def text_prompt(served: ServedModel) -> list[int]:
    return served.tokenizer.encode(OPENING, special=True)

# ---------------------------------------------------------------- subjects


def texts(served: ServedModel) -> Subject:
    """Texts: the likeliest tokens, warm ones, two choices for each of two prompts, whole and streamed; then the first, cut by a stop."""
    prompt = text_prompt(served)
    greedy: dict[str, Any] = {"prompt": prompt, "temperature": 0, "logprobs": 1}
    several: dict[str, Any] = {"prompt": [prompt[::-1], prompt], "n": 2, **NARROW_DRAW}
    (likeliest,), _, whole, streamed = yield [
        KnownQuestion(served, TEXTS, greedy, [prompt], PLAIN_SOFTMAX | {"temperature": 0}),
        KnownQuestion(served, TEXTS, {"prompt": prompt, "logprobs": 3, **WARM_DRAW}, [prompt], WARM_DRAW),
        KnownQuestion(served, TEXTS, several | {"logprobs": 0}, several["prompt"], NARROW_DRAW),
        KnownQuestion(served, TEXTS, several | {"logprobs": 0, "stream": True}, several["prompt"], NARROW_DRAW)]
    require_same_draws(served, whole, streamed)
    require_own_draws([(whole[0], whole[1]), (whole[2], whole[3])])
    text = likeliest["text"]
    stop = next((char for place, char in enumerate(text) if place and char != "\ufffd" and char not in text[:place]), None)
    if served.exact and stop is not None:
        cut = greedy | {"prompt": OPENING, "stop": ["never said", stop], "logprobs": None}
        for (choice,) in (yield [KnownQuestion(served, TEXTS, cut | {"stream": stream}, [prompt]) for stream in (False, True)]):
            due = text[: text.index(stop)]
            require(choice["text"] == due, f"{text!r} is cut before {stop!r} to {choice['text']!r}; {due!r} is right")


def one_text(served: ServedModel) -> Subject:
    """A text of a model beside the first, which must be its own."""
    prompt = text_prompt(served)
    yield [KnownQuestion(served, TEXTS, {"prompt": prompt, "logprobs": 1}, [prompt], PLAIN_SOFTMAX)]


def chats_of(served: ServedModel) -> Subject:
    """Chats: two choices, the first of them alone with the likeliest of the plain softmax, and a stream that nobody says how to draw."""
    prompt = chat_prompt(served)
    chat: dict[str, Any] = {"messages": KNOWN_CHAT, "logprobs": True}
    both, alone, _ = yield [
        KnownQuestion(served, CHATS, chat | NARROW_DRAW | {"n": 2, "max_completion_tokens": NEW}, [prompt], NARROW_DRAW),
        KnownQuestion(served, CHATS, chat | NARROW_DRAW | {"n": 1, "logprobs_under": "model", "top_logprobs": 3}, [prompt], NARROW_DRAW),
        KnownQuestion(served, CHATS, chat | {"stream": True}, [prompt], PLAIN_SOFTMAX)]
    require_same_draws(served, both[:1], alone)
    require_own_draws([(both[0], both[1])])


def demanded_number(served: ServedModel) -> Subject:
    """A number of a schema, in which no token may be less likely than among all of them."""
    if served.no_forms is not None:
        return
    prompt = chat_prompt(served)
    most = min(FORM_NEW, served.length - len(prompt))
    asked = {"messages": KNOWN_CHAT, "response_format": ONE_OF, "logprobs": True, "max_tokens": most}
    ((choice,),) = yield [KnownQuestion(served, CHATS, asked, [prompt])]
    content = choice["message"]["content"]
    if choice["finish_reason"] == "stop":
        require(content in ("1", "22"), f"{content!r} is not of the schema that was asked for")
    scores = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    rows = served.rows(prompt, choice["token_ids"], PLAIN_SOFTMAX)
    for id, score, row_V in zip(choice["token_ids"], scores, rows, strict=True):
        assert row_V is not None, "nothing is cut off"
        least = float(row_V[id])
        require(least - CUT_IN_DOUBT[served.dtype] <= score <= 0, f"among those that a schema allows id {id} has the log-probability "
                f"{score:.4g}, among all {least:.4g}")


def shown_tools(served: ServedModel) -> Subject:
    """Tools: shown as the template writes them, or not at all; called where a call must come; and a call and its result shown again."""
    tools = [GO, HALT]
    if not takes_tools(served) or len(shown := chat_prompt(served, tools)) + FORM_NEW > served.length:
        return
    asked = {"messages": KNOWN_CHAT, "tools": tools, "max_tokens": 1}
    questions = [KnownQuestion(served, CHATS, asked | {"tool_choice": "none"}, [chat_prompt(served)]),
                 KnownQuestion(served, CHATS, asked, [shown]), *shown_calls(served, tools)]
    named = {"type": "function", "function": {"name": "go"}}
    choices: list[tuple[Any, Collection[str]]] = [("required", ("go", "halt")), (named, ("go",))]
    demanded = choices if served.calls and served.no_forms is None else []
    questions += [KnownQuestion(served, CHATS, asked | {"tool_choice": choice, "max_tokens": FORM_NEW}, [shown]) for choice, _ in demanded]
    answers = yield questions
    for (choice,), (_, names) in zip(answers[len(answers) - len(demanded) :], demanded, strict=True):
        check_call(choice, names)


def shown_calls(served: ServedModel, tools: Messages) -> list[KnownQuestion]:
    """A chat in which a tool was called and has answered, where the template shows such."""
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "go", "arguments": {"to": "a"}}}
    sent = {**call, "function": {"name": "go", "arguments": '{"to": "a"}'}}
    result = {"role": "tool", "content": "done", "tool_call_id": call["id"]}
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if "tool_calls" not in (served.tokenizer.template or ""):
        return []
    try:
        prompt = chat_prompt(served, tools, [CHAT_AS_SHOWN[0], said, result])
    except DataError:
        return []
    messages = [KNOWN_CHAT[0], said | {"content": None, "tool_calls": [sent]}, result]
    return [KnownQuestion(served, CHATS, {"messages": messages, "tools": tools, "max_tokens": 1}, [prompt])]


def check_call(choice: Choice, names: Collection[str]) -> None:
    if choice["finish_reason"] == "length":
        return  # a tokenizer of single letters may need more
    message = choice["message"]
    calls = [(call["type"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    due = [("function", name, arguments) for name in names for arguments in DUE_CALLS[name]]
    require(len(calls) == 1 and calls[0] in due and message["content"] is None, f"one of {sorted(names)} must be called, and the answer is "
            f"{json.dumps(message)[:300]}")
    require(choice["finish_reason"] == "tool_calls", f"a call is said to have ended by {choice['finish_reason']!r}")

# ---------------------------------------------------------------- streams


def gathered_stream(question: KnownQuestion, events: Sequence[Any]) -> dict[str, Any]:
    """A stream as the reply that it is in pieces; its order and its end are looked at."""
    *pieces, usage, last = events
    require(last == "[DONE]", f"a stream ends with {last!r}")
    require(usage["choices"] == [] and all(piece["choices"] for piece in pieces), "usage does not come last in a stream, and once")
    heads = {(piece["object"], piece["model"], piece["seed"], piece["system_fingerprint"]) for piece in (*pieces, usage)}
    require(len(heads) == 1, f"the pieces of one stream say of themselves {heads}")
    kind = "chat.completion.chunk" if question.path == CHATS else "text_completion"
    require(usage["object"] == kind, f"a piece of a stream is called {usage['object']}, {kind} is right")
    parts = [choice for piece in pieces for choice in piece["choices"]]
    own = [[part for part in parts if part["index"] == index] for index in range(members(question))]
    choices = [streamed_choice(question, index, some) for index, some in enumerate(own)]
    return {**usage, "object": kind.removesuffix(".chunk"), "choices": choices}


def streamed_choice(question: KnownQuestion, index: int, parts: Sequence[Choice]) -> dict[str, Any]:
    *earlier, last = [part["finish_reason"] for part in parts]
    require(last is not None and not any(earlier), f"a choice is streamed with the reasons to end {[*earlier, last]}")
    told = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    names = ("content",) if question.path == CHATS else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    scores = {name: [*itertools.chain.from_iterable(each[name] for each in told)] for name in names} if told else None
    require_early_text(question, parts)
    found = {"index": index, "finish_reason": last, "logprobs": scores, "prompt_token_ids": [*question.prompts[index // question.choices]],
             "token_ids": [*itertools.chain.from_iterable(part.get("token_ids", ()) for part in parts)]}
    if question.path == TEXTS:
        return found | {"text": "".join(part["text"] for part in parts)}
    roles = [part["delta"].get("role") for part in parts]
    require(not any(roles[1:]), "a streamed chat says more than once who speaks")
    return found | {"message": {"role": roles[0], "content": "".join(part["delta"]["content"] for part in parts)}}



def require_early_text(question: KnownQuestion, parts: Sequence[Choice]) -> None:
    """Words come as they are drawn, not all of them with the end."""
    drawn = [*itertools.chain.from_iterable(part.get("token_ids", ()) for part in parts[:-1])]
    shown = "".join(part["text"] if question.path == TEXTS else part["delta"]["content"] for part in parts[:-1])
    words = question.served.tokenizer.decode(drawn, special=False)
    require(bool(shown) or "stop" in question.asked or not any(char.isascii() and char.isalnum() for char in words[:-1]),
            f"of {words!r} nothing is streamed before the end")

# ---------------------------------------------------------------- refusals and listings


CHAT_REFUSALS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": 2.5}, "temperature"), ({"temperature": -0.5}, "temperature"), ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"min_p": 2}, "min_p"), ({"top_k": -1}, "top_k"), ({"n": 0}, "n"),
    ({"n": 1000}, "n"), ({"repetition_penalty": 0}, "repetition_penalty"), ({"max_tokens": 0}, "max_tokens"), ({"seed": 0.5}, "seed"),
    ({"stop": ["a"] * 5}, "stop"), ({"stop": [""]}, "stop"), ({"stream": 1}, "stream"), ({"stream_options": {}}, "stream_options"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1, "stream": True}, "stream"), ({"logprobs_under": "none"}, "logprobs_under"),
    ({"logit_bias": {"5": 1}}, "logit_bias"), ({"frequency_penalty": 1}, "frequency_penalty"), ({"surprise": 1}, "surprise"),
    ({"messages": []}, "messages"), ({"messages": [{"role": "user"}]}, "messages[0]"), ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "audio": 1}]}, "messages[0]"), ({"tools": [{}]}, "tools[0]"),
    ({"tools": [GO, GO]}, "tools"), ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"tools": [GO], "tool_choice": {"type": "function", "function": {"name": "halt"}}}, "tool_choice"),
    ({"tools": [GO], "response_format": ONE_OF}, "response_format"), ({"tools": [GO], "parallel_tool_calls": False}, "parallel_tool_calls"))
TEXT_REFUSALS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompt": []}, "prompt"), ({"prompt": [1.5]}, "prompt"), ({"best_of": 2}, "best_of"), ({"logprobs": 6}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"), ({"echo": True}, "echo"), ({"suffix": "."}, "suffix"), ({"top_logprobs": 1}, "top_logprobs"))


def refusals(client: Client, served: ServedModel, chats: bool) -> None:
    """Requests that cannot be answered as they ask are refused by the name of what they ask for; nothing is left unheard."""
    both: tuple[tuple[dict[str, Any], str], ...] = (({"model": f"no {served.name}"}, "model"), ({"model": None}, "model"))
    chat, text = {"model": served.name, "messages": KNOWN_CHAT, "max_tokens": 1}, {"model": served.name, "prompt": "a", "max_tokens": 1}
    wrong = [(TEXTS, text, *each) for each in (*TEXT_REFUSALS, *both, ({"max_tokens": served.length}, "prompt"))]
    too_long = {"prompt": text_prompt(served)[:1] * (served.length - USUAL_NEW + 1), "max_tokens": None}
    wrong.append((TEXTS, text, too_long, "prompt"))
    wrong += [(CHATS, chat, *each) for each in (*CHAT_REFUSALS, *both, ({"max_tokens": served.length}, "messages")) if chats]
    if served.tokenizer.template is None:
        wrong.append((CHATS, chat, {}, "messages"))
    if chats and not takes_tools(served):
        wrong.append((CHATS, chat, {"tools": [GO]}, "tools"))
    for path, usual, change, param in wrong:  # one by one: one that is answered takes the place of others
        reply, = client.send([KnownRequest(path, usual | change)])
        status = 404 if change.get("model") else 400
        require(reply.status == status, f"{path} with {json.dumps(change)[:200]} is answered with {reply.status}, {status} is right: what "
                "was asked is not heard")
        error, kind = reply.body["error"], "not_found_error" if status == 404 else "invalid_request_error"
        require((error["param"], error["type"]) == (param, kind) and bool(error["message"]),
                f"{path} with {json.dumps(change)[:200]} is refused as {error}; {param!r} is wrong with it")
        require(not error["message"].endswith(": None"), f"{path} with {json.dumps(change)[:200]} is refused without a reason: {error}")
        require(change is not too_long or f"{served.length + 1} tokens" in error["message"],
                f"where nobody says how many, {USUAL_NEW} tokens of a text are due; a prompt with room for one less is refused as {error}")


def kept_models(client: Client, served: ServedModel) -> None:
    """Nothing is said to be retired that is not: neither a model that nobody serves, nor the one that the server began with."""
    for name, status in ((f"no-{served.name}", 404), (served.name, 409)):
        reply, = client.send([KnownRequest(f"/v1/adapters/{name}", None, "DELETE")])
        require(reply.status == status, f"DELETE /v1/adapters/{name} is answered with {reply.status}, {status} is right: what is said to "
                "be retired is not")


def listings(client: Client, served: Sequence[ServedModel], slots: int) -> None:
    """The models by their names and versions; and counts that are those of the requests before."""
    listed = {model["id"]: model for model in client.get("/v1/models")["data"]}
    require([*listed] == [each.name for each in served], f"{[*listed]} are listed, {[each.name for each in served]} are served")
    for each in served:
        due = {"object": "model", "owned_by": "assay", "system_fingerprint": each.version, "max_model_len": each.length,
               "parent": None if each is served[0] else served[0].name, "dtype": str(each.dtype).removeprefix("torch.")}
        require(due.items() <= listed[each.name].items() and client.get(f"/v1/models/{each.name}") == listed[each.name],
                f"a model is listed as {json.dumps(listed[each.name])[:300]}, {due} is right")
    health = client.get("/health")
    require(health == {"status": "ok", "models": len(served), "completions": 0, "slots": slots * len(served)},
            f"a server with nothing to do says of its health {health}")
    check_counts(client, served, slots)


def check_counts(client: Client, served: Sequence[ServedModel], slots: int) -> None:
    due = {f'assay_{name}{{model="{each.name}"}}': value for each in served for name, value in (
        ("prompt_tokens_total", client.prompt_tokens[each.name]), ("completion_tokens_total", client.completion_tokens[each.name]),
        ("completions", 0), ("slots", slots), ("model_broken", 0))}
    requests = Counter[str]()
    for (path, status), count in client.replies.items():
        known = next((each for each in ("/v1/models", "/v1/adapters") if path.startswith(each)), path)
        requests[f'assay_requests_total{{path="{known}",status="{status}"}}'] += count
    told = dict(line.rsplit(" ", 1) for line in str(client.get("/metrics")).splitlines() if not line.startswith("#"))
    for name, value in (due | requests).items():
        require(told.get(name) == str(value), f"{name} is counted as {told.get(name)}, {value} is right")

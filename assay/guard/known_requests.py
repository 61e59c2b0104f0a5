"""Known requests: a server answers a few before anybody else is let in, and every answer is worked out again from the model alone.

What is due is computed here by plain passes over whole texts, and in float64 after the logits: nothing of the server, its engine, its
sampler or its detokenizer takes part, only the model, its tokenizer and its chat template. `ask` is the way in that every client has.
What a draw should be cannot be worked out; under which distribution it was drawn can, by its log-probabilities.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.errors import DataError
from assay.model.placement import uncompiled
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.verdict import Verdict, proven, refuted, unproven

Ask = Callable[[str, str, Mapping[str, Any] | None], "KnownReply"]  # method, path, body
CHECK = "known_requests"
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
NEW, SEED = 3, 17  # tokens of an answer, and the seed that it is drawn at
USUAL_NEW = 16  # tokens of a text where nobody says how many, as OpenAI has it
MEMBERS = 4  # completions of the largest known request
PLAIN: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # where nobody says
NARROW: dict[str, float] = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3}
SAID: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Three "}, {"type": "text", "text": "colours?"}]},
        {"role": "assistant", "content": "Red, green"}, {"role": "user", "content": "and?"}]
SHOWN: list[dict[str, Any]] = [{**SAID[0], "content": "Three colours?"}, *SAID[1:]]
FORM_NEW = 96  # tokens that a demanded call may take
GO = {"type": "function", "function": {"name": "go", "description": "Go there.", "parameters": {
    "type": "object", "properties": {"to": {"enum": ["a", "b"]}}, "required": ["to"], "additionalProperties": False}}}
HALT = {"type": "function", "function": {"name": "halt", "description": "Halt.", "parameters": {
    "type": "object", "properties": {}, "additionalProperties": False}}}
CALLED = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "go", "arguments": '{"to": "a"}'}}
ONE_OF = {"type": "json_schema", "json_schema": {"name": "one", "schema": {
    "type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}}}
# Distances of logits, or shares, below which rounding decides which token stays or is the likeliest; and nats a token, in the mean of one
# completion, between two ways to compute: 1e-6 seen in fp32, 0.1 of SmolLM2-135M in bf16.
NEAR_A_CUT = {torch.float32: 1e-3, torch.bfloat16: 0.5}
SAME = {torch.float32: 1e-3, torch.bfloat16: 0.3}
UNLIKELY = -12.0  # nats: two draws of a text that is less likely are not the same one by chance


class Misanswered(Exception):
    """What a known request was answered that it should not have been."""


class KnownReply(NamedTuple):
    status: int
    body: Any  # an object; of a stream its events, the last of them text; or text


@dataclass(frozen=True)
class ServedModel:
    """What a server says it serves. `room`: completions that it takes at a time; `forms`: whether a call of a tool can be demanded."""

    name: str
    version: str
    model: Transformer
    tokenizer: Tokenizer
    stop_ids: Collection[int]
    length: int
    dtype: torch.dtype
    room: int
    slots: int
    models: int
    forms: bool

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float32


@dataclass
class Client:
    """Asks, and counts what it asked and was told."""

    ask: Ask
    served: ServedModel
    replies: Counter[tuple[str, int]] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    passes: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # by prompt and completion: logits that predict the completion

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        reply = self.reply(path, {"model": self.served.name, **body})
        require(reply.status == 200, f"{path} refused what it should answer, with {reply.status}: {json.dumps(reply.body)[:300]}; asked "
                f"was {json.dumps(body)[:300]}")
        return reply.body

    def get(self, path: str) -> Any:
        reply = self.reply(path, None)
        require(reply.status == 200, f"{path} is answered with {reply.status}: {str(reply.body)[:300]}")
        return reply.body

    def reply(self, path: str, body: Mapping[str, Any] | None) -> KnownReply:
        reply = self.ask("GET" if body is None else "POST", path, body)
        self.replies[path, reply.status] += 1
        return reply

    def whole(self, path: str, body: Mapping[str, Any], prompts: Sequence[Sequence[int]], how: Mapping[str, float]) -> dict[str, Any]:
        """The reply to a request of so many choices, each looked at: ids, text, end, log-probabilities, usage."""
        asked: dict[str, Any] = {"max_tokens": NEW, "seed": SEED, "return_token_ids": True, **body}
        found = self.post(path, asked)
        kind = "chat.completion" if path == CHATS else "text_completion"
        require((found["object"], found["model"], found["seed"]) == (kind, self.served.name, asked["seed"]),
                f"a reply says of itself {found['object']}, {found['model']}, seed {found['seed']}")
        require(found["system_fingerprint"] == self.served.version,
                f"a reply is said to come from {found['system_fingerprint']}, the weights are {self.served.version}")
        each = asked.get("n", 1)
        require([choice["index"] for choice in found["choices"]] == [*range(each * len(prompts))],
                f"{each} × {len(prompts)} choices were asked for, and came as {[choice['index'] for choice in found['choices']]}")
        for choice in found["choices"]:
            check_choice(self, asked, choice, prompts[choice["index"] // each], how)
        self.count(found["usage"], prompts, [len(choice["token_ids"]) for choice in found["choices"]])
        return found

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Logits that predict each id of a completion, by one pass over the whole text; they are not rounded."""
        text, model = (*prompt, *ids), self.served.model
        if text not in self.passes:
            with uncompiled():
                states_TD = model.hidden(torch.tensor([text], device=model.embed.weight.device))[0, len(prompt) - 1 : -1]
            logits_TV, cap = states_TD.float() @ model.head_weight().to(states_TD.dtype).float().T, model.config.softcap
            self.passes[text] = (logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)).cpu()
        return self.passes[text]

    def count(self, usage: Mapping[str, int], prompts: Sequence[Sequence[int]], said: Sequence[int]) -> None:
        due = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": sum(said)}
        due["total_tokens"] = sum(due.values())
        require(usage == due, f"a reply counts {usage}, {due} are right")
        self.prompt_tokens += sum(map(len, prompts)) * len(said) // len(prompts)
        self.completion_tokens += sum(said)


def require(condition: bool, words: str) -> None:
    if not condition:
        raise Misanswered(words)


def check_known_requests(ask: Ask, served: ServedModel) -> Verdict:
    """Whether a server answers, streams, counts and refuses as it should."""
    client = Client(ask, served)
    longest = len(text_prompt(served)) + (0 if served.tokenizer.template is None else len(chat_prompt(served)))
    if served.room < MEMBERS or longest + USUAL_NEW > served.length:
        return unproven(CHECK, f"a server of {served.room} completions at a time with {served.length} tokens each has no room for the "
                        f"known requests, which take {MEMBERS} of {longest + USUAL_NEW}; raise --queue or --max-length", optional=True)
    chats = served.tokenizer.template is not None
    parts = [greedy_text, several_texts, *([drawn_chats, demanded_form, shown_tools] if chats else []), refusals, listings]
    try:
        for part in parts:
            part(client)
    except Misanswered as wrong:
        return refuted(CHECK, str(wrong))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return refuted(CHECK, f"a reply has not the fields that were asked for ({type(error).__name__}: {error})")
    answered = sum(count for (_, status), count in client.replies.items() if status == 200)
    refused = sum(client.replies.values()) - answered
    return proven(CHECK, f"{answered} known requests are answered as the model itself says ({client.completion_tokens} tokens), and "
                  f"{refused} are refused by the name of what is wrong with them", answered=answered, refused=refused)

# ---------------------------------------------------------------- prompts


def chat_prompt(served: ServedModel, tools: Sequence[Mapping[str, Any]] | None = None,
                messages: Sequence[Mapping[str, Any]] = SHOWN) -> list[int]:
    return served.tokenizer.encode(served.tokenizer.render(messages, tools=tools, add_generation_prompt=True))


def text_prompt(served: ServedModel) -> list[int]:
    return served.tokenizer.encode("Once upon a", special=True)

# ---------------------------------------------------------------- what is due of one choice


def check_choice(client: Client, asked: Mapping[str, Any], choice: Mapping[str, Any], prompt: Sequence[int],
                 how: Mapping[str, float]) -> None:
    served, ids, most = client.served, choice["token_ids"], asked["max_tokens"]
    require(choice["prompt_token_ids"] == [*prompt], f"a prompt of {len(prompt)} ids was answered as another of "
            f"{len(choice['prompt_token_ids'])}: {choice['prompt_token_ids'][:40]} instead of {[*prompt][:40]}")
    stopped = bool(ids) and ids[-1] in served.stop_ids
    require(0 < len(ids) <= most and (stopped or len(ids) == most) and not set(ids[:-1]) & {*served.stop_ids},
            f"a completion of {len(ids)} ids, {ids}, where at most {most} were asked for and {sorted(served.stop_ids)} stop it")
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    if not asked.get("tools") and "response_format" not in asked:
        require(text == served.tokenizer.decode(ids, special=False), f"the ids {ids} are shown as {text!r}")
        require(choice["finish_reason"] == ("stop" if stopped else "length"), f"a completion of {ids} is said to have ended by "
                f"{choice['finish_reason']!r}")
    if "message" in choice:
        require(choice["message"]["role"] == "assistant", f"an answer's role is {choice['message']['role']!r}")
    check_logprobs(client, asked, choice, prompt, how)


def check_logprobs(client: Client, asked: Mapping[str, Any], choice: Mapping[str, Any], prompt: Sequence[int],
                   how: Mapping[str, float]) -> None:
    served, told, ids = client.served, choice["logprobs"], choice["token_ids"]
    if (wanted := asked.get("logprobs")) is None or wanted is False:
        require(told is None, "log-probabilities came though nobody asked for them")
        return
    most = asked.get("top_logprobs", 0) if "message" in choice else wanted
    under = how if asked.get("logprobs_under", "sampled") == "sampled" else PLAIN
    rows = [*due_rows(client, prompt, ids, under)]
    said = chat_scores(served, told, ids) if "message" in choice else text_scores(served, told, ids)
    apart = []
    for place, (row_V, (score, likeliest)) in enumerate(zip(rows, said, strict=True)):
        if row_V is None:
            continue
        due = float(row_V[ids[place]])
        require(math.isfinite(due), f"id {ids[place]} was drawn, which {dict(under)} leave no chance")
        apart.append(abs(score - due))
        kept = min(most, int(row_V.isfinite().sum()))
        best = row_V.topk(kept)
        require(len(likeliest) == kept, f"{most} likeliest tokens were asked for, {kept} have a chance, and {len(likeliest)} are named")
        apart += [abs(value - float(right)) for (_, value), right in zip(likeliest, best.values, strict=True)]
        if kept > 1 and float(best.values[0] - best.values[1]) > NEAR_A_CUT[served.dtype]:
            require(likeliest[0][0] == served.tokenizer.piece(int(best.indices[0])),
                    f"{likeliest[0]} is named the likeliest token, id {int(best.indices[0])} is")
    mean = sum(apart) / max(1, len(apart))
    require(mean <= SAME[served.dtype], f"log-probabilities are {mean:.2g} nats from those under {dict(under)}, bound "
            f"{SAME[served.dtype]:g}")


def chat_scores(served: ServedModel, told: Mapping[str, Any], ids: Sequence[int]) -> list[tuple[float, list[tuple[str, float]]]]:
    for id, entry in zip(ids, told["content"], strict=True):
        data = served.tokenizer.bytes_of(id)
        require((entry["token"], entry["bytes"]) == (served.tokenizer.piece(id), None if data is None else [*data]),
                f"id {id} is shown as {entry['token']!r} with the bytes {entry['bytes']}")
    return [(entry["logprob"], [(one["token"], one["logprob"]) for one in entry["top_logprobs"]]) for entry in told["content"]]


def text_scores(served: ServedModel, told: Mapping[str, Any], ids: Sequence[int]) -> list[tuple[float, list[tuple[str, float]]]]:
    pieces = [served.tokenizer.piece(id) for id in ids]
    places = [sum(map(len, pieces[:place])) for place in range(len(pieces))]
    require((told["tokens"], told["text_offset"]) == (pieces, places), f"the ids {[*ids]} are shown as {told['tokens']} at "
            f"{told['text_offset']}")
    return [(score, [*best.items()]) for score, best in zip(told["token_logprobs"], told["top_logprobs"], strict=True)]


def due_rows(client: Client, prompt: Sequence[int], ids: Sequence[int], how: Mapping[str, float]) -> Iterator[Tensor | None]:
    """Log-probabilities of the whole vocabulary at each place of a completion; None where rounding decides which tokens stay."""
    for place, logits_V in enumerate(client.logits(prompt, ids)):
        yield due_row(logits_V.double(), {*prompt, *ids[:place]}, how, NEAR_A_CUT[client.served.dtype])


def due_row(logits_V: Tensor, seen: Collection[int], how: Mapping[str, float], near: float) -> Tensor | None:
    """The distribution that is drawn from, by its definition: penalty, temperature, top-k, then of what is left top-p, and min-p."""
    logits_V = logits_V.clone()
    for id in seen if how["repetition_penalty"] != 1 else ():
        logits_V[id] *= how["repetition_penalty"] if logits_V[id] < 0 else 1 / how["repetition_penalty"]
    if how["temperature"] == 0:
        best = logits_V.topk(2).values
        greedy = torch.where(logits_V == best[0], 0.0, -math.inf)
        return greedy if float(best[0] - best[1]) > near else None
    scaled, order = (logits_V / how["temperature"]).sort(descending=True)
    count, doubtful = len(scaled), False
    if 0 < how["top_k"] < count:
        count = int(how["top_k"])
        doubtful = float(scaled[count - 1] - scaled[count]) < near
    shares = scaled[:count].softmax(-1)
    before = shares.cumsum(-1) - shares
    if how["top_p"] < 1:
        doubtful = doubtful or bool(((before - how["top_p"]).abs() < near).any())
        count = int((before < how["top_p"]).sum())
    if how["min_p"] > 0:
        edge = scaled[0] + math.log(how["min_p"])
        doubtful = doubtful or bool(((scaled[:count] - edge).abs() < near).any())
        count = min(count, int((scaled >= edge).sum()))
    found = torch.full_like(logits_V, -math.inf)
    found[order[:count]] = scaled[:count].log_softmax(-1)
    return None if doubtful else found

# ---------------------------------------------------------------- the requests


def greedy_text(client: Client) -> None:
    """A text completion as the likeliest token at each place, from ids and from text; and the default length of one."""
    served, prompt = client.served, text_prompt(client.served)
    body = {"prompt": prompt, "temperature": 0, "logprobs": 1}
    found = client.whole(TEXTS, body, [prompt], PLAIN | {"temperature": 0})["choices"][0]
    other = client.whole(TEXTS, body | {"prompt": "Once upon a"}, [prompt], PLAIN | {"temperature": 0})["choices"][0]
    require_same_draw(served, found["token_ids"], other["token_ids"])
    usual = client.post(TEXTS, {"prompt": prompt, "temperature": 0, "return_token_ids": True})
    ids = usual["choices"][0]["token_ids"]
    client.count(usual["usage"], [prompt], [len(ids)])
    require(len(ids) == USUAL_NEW or ids[-1] in served.stop_ids, f"where nobody says how long, {len(ids)} tokens come; {USUAL_NEW} are due")
    require_same_draw(served, found["token_ids"], ids[:NEW])
    if served.exact and len(text := found["text"]) > 1 and text.isascii() and text[0] != text[1]:
        cut = client.post(TEXTS, body | {"max_tokens": NEW, "stop": ["never said", text[1]], "return_token_ids": True})
        first = cut["choices"][0]
        require((first["text"], first["finish_reason"]) == (text[:1], "stop"), f"{text!r} is cut before {text[1]!r} to "
                f"{first['text']!r}, and ended by {first['finish_reason']!r}")
        client.count(cut["usage"], [prompt], [len(first["token_ids"])])


def require_same_draw(served: ServedModel, one: Sequence[int], two: Sequence[int]) -> None:
    """One seed draws one text, however it was asked for; where numbers are rounded to half precision, but for its rounding."""
    require(not served.exact or [*one] == [*two], f"the same request at the same seed is answered with {[*one]} and {[*two]}")


def several_texts(client: Client) -> None:
    """Two prompts with two choices each, whole and streamed."""
    prompts = [text_prompt(client.served), text_prompt(client.served)[::-1]]
    body = {"prompt": prompts, "n": 2, "logprobs": 2, **NARROW}
    found = client.whole(TEXTS, body, prompts, NARROW)
    plain = client.whole(TEXTS, {"prompt": prompts, "n": 2, "logprobs": 0}, prompts, PLAIN)
    check_stream(client, TEXTS, {"prompt": prompts, "n": 2, "logprobs": 0}, prompts, plain)
    choices = [choice["token_ids"] for choice in found["choices"]]
    likely = [sum(choice["logprobs"]["token_logprobs"]) for choice in plain["choices"]]
    for one in (0, 2):
        alike = plain["choices"][one]["token_ids"] == plain["choices"][one + 1]["token_ids"]
        require(not alike or likely[one] > UNLIKELY, f"two choices of one prompt are the same, {choices[one]}, though it is unlikely")


def drawn_chats(client: Client) -> None:
    """Chats: the likeliest tokens named, the plain softmax asked for, a choice alone, and a stream."""
    prompt = chat_prompt(client.served)
    body: dict[str, Any] = {"messages": SAID, "n": 2, "logprobs": True, **NARROW}
    found = client.whole(CHATS, body | {"top_logprobs": 3}, [prompt], NARROW)
    under = client.whole(CHATS, body | {"logprobs_under": "model", "top_logprobs": 1}, [prompt], NARROW)
    alone = client.whole(CHATS, body | {"n": 1, "max_tokens": NEW, "max_completion_tokens": NEW}, [prompt], NARROW)
    for reply in (under, alone):
        for one, two in zip(found["choices"], reply["choices"], strict=False):
            require_same_draw(client.served, one["token_ids"], two["token_ids"])
    plain = client.whole(CHATS, {"messages": SAID, "n": 2, "logprobs": True}, [prompt], PLAIN)
    check_stream(client, CHATS, {"messages": SAID, "n": 2, "logprobs": True}, [prompt], plain)


def check_stream(client: Client, path: str, body: Mapping[str, Any], prompts: Sequence[Sequence[int]], whole: Mapping[str, Any]) -> None:
    """A stream says in pieces what is said whole, counts the same, and ends."""
    asked = {"max_tokens": NEW, "seed": SEED, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    *events, last = client.post(path, {**asked, **body})
    require(last == "[DONE]", f"a stream ends with {last!r}")
    kind = "chat.completion.chunk" if path == CHATS else "text_completion"
    require({(each["object"], each["system_fingerprint"]) for each in events} == {(kind, client.served.version)},
            f"pieces of a stream say that they are {({(each['object'], each['system_fingerprint']) for each in events})}")
    require(events[-1]["choices"] == [] and not any(each["choices"] == [] for each in events[:-1]), "usage does not come last, and once")
    client.count(events[-1]["usage"], prompts, [len(choice["token_ids"]) for choice in whole["choices"]])
    pieces = [choice for each in events[:-1] for choice in each["choices"]]
    for due in whole["choices"]:
        own = [choice for choice in pieces if choice["index"] == due["index"]]
        said = "".join(choice["delta"]["content"] if path == CHATS else choice["text"] for choice in own)
        ids = [*itertools.chain.from_iterable(choice.get("token_ids", ()) for choice in own)]
        require_same_draw(client.served, due["token_ids"], ids)
        require(said == client.served.tokenizer.decode(ids, special=False), f"the ids {ids} are streamed as {said!r}")
        require(path != CHATS or [choice["delta"].get("role") for choice in own] == ["assistant", *[None] * (len(own) - 1)],
                "a streamed chat does not begin, and once, with who speaks")
        reasons = [choice["finish_reason"] for choice in own]
        ended = "stop" if ids[-1] in client.served.stop_ids else "length"
        require(reasons == [*[None] * (len(own) - 1), ended], f"a stream of {ids} ends by {reasons}")
        scores = streamed_scores(path, own)
        require(len(scores) == len(ids), f"{len(scores)} log-probabilities are streamed with {len(ids)} tokens")
        apart = [abs(one - two) for one, two in zip(scores, streamed_scores(path, [due]), strict=False)] if ids == due["token_ids"] else []
        require(sum(apart) <= SAME[client.served.dtype] * len(ids), "a stream's log-probabilities are others than the text's")


def streamed_scores(path: str, choices: Sequence[Mapping[str, Any]]) -> list[float]:
    told = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    if path == TEXTS:
        return [score for each in told for score in each["token_logprobs"]]
    return [entry["logprob"] for each in told for entry in each["content"]]


def demanded_form(client: Client) -> None:
    """JSON of a schema, in which no token may be less likely than among all of them."""
    prompt = chat_prompt(client.served)
    most = min(FORM_NEW, client.served.length - len(prompt))
    asked = {"messages": SAID, "response_format": ONE_OF, "logprobs": True, "max_tokens": most, "seed": SEED, "return_token_ids": True}
    found = client.post(CHATS, asked)
    choice = found["choices"][0]
    client.count(found["usage"], [prompt], [len(choice["token_ids"])])
    require(choice["prompt_token_ids"] == prompt, "a schema changes the prompt")
    if choice["finish_reason"] == "stop":
        require(json.loads(choice["message"]["content"]) in ({"a": 1}, {"a": 22}), f"{choice['message']['content']!r} is not in the form "
                "that was asked for")
    told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    rows = due_rows(client, prompt, choice["token_ids"], PLAIN)
    for score, id, row_V in zip(told, choice["token_ids"], rows, strict=True):
        least = -math.inf if row_V is None else float(row_V[id])
        require(least - NEAR_A_CUT[client.served.dtype] <= score <= 0, f"among those that a schema allows id {id} has the log-probability "
                f"{score:.4g}, among all {least:.4g}")


def shown_tools(client: Client) -> None:
    """Tools are in the prompt as the template writes them, calls that must come do, and earlier ones come back into the prompt."""
    served, tools = client.served, [GO, HALT]
    try:
        free, shown = chat_prompt(served), chat_prompt(served, tools)
    except DataError:
        return  # a template that takes no tools says so to whoever gives some
    body = {"messages": SAID, "tools": tools, "max_tokens": 1, "seed": SEED, "return_token_ids": True}
    if free == shown or len(shown) + FORM_NEW > served.length:
        return
    without, auto = client.post(CHATS, body | {"tool_choice": "none"}), client.post(CHATS, body)
    for found, prompt in ((without, free), (auto, shown)):
        require(found["choices"][0]["prompt_token_ids"] == prompt, "tools are not shown as the model's template writes them, or not only "
                "then")
        client.count(found["usage"], [prompt], [1])
    if not served.forms:
        return
    named = {"type": "function", "function": {"name": "go"}}
    for choice, names in (("required", {"go", "halt"}), (named, {"go"})):
        found = client.post(CHATS, body | {"tool_choice": choice, "max_tokens": FORM_NEW})
        client.count(found["usage"], [shown], [len(found["choices"][0]["token_ids"])])
        check_call(found["choices"][0], names)
    answered_calls(client, tools)


def check_call(choice: Mapping[str, Any], names: Collection[str]) -> None:
    if choice["finish_reason"] == "length":
        return  # a tokenizer of single letters may need more
    message = choice["message"]
    calls = [(call["type"], call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    due = [("function", name, arguments) for name in names for arguments in ([{"to": "a"}, {"to": "b"}] if name == "go" else [{}])]
    require(len(calls) == 1 and calls[0] in due and message["content"] is None, f"one of {sorted(names)} must be called, and the answer is "
            f"{json.dumps(message)[:300]}")
    require(choice["finish_reason"] == "tool_calls", f"a call is said to have ended by {choice['finish_reason']!r}")


def answered_calls(client: Client, tools: Sequence[Mapping[str, Any]]) -> None:
    """A call and its result, as a client sends them back, are what the template is shown."""
    served = client.served
    result = {"role": "tool", "content": "done", "tool_call_id": CALLED["id"]}
    said = {"role": "assistant", "content": "", "tool_calls": [CALLED]}
    read = {**CALLED, "function": {"name": "go", "arguments": {"to": "a"}}}
    if "tool_calls" not in (served.tokenizer.template or ""):
        return
    try:
        prompt = chat_prompt(served, tools, [*SHOWN[:1], {**said, "tool_calls": [read]}, result])
    except DataError:
        return
    found = client.post(CHATS, {"messages": [*SAID[:1], {**said, "content": None}, result], "tools": tools, "max_tokens": 1,
                                "seed": SEED, "return_token_ids": True})
    require(found["choices"][0]["prompt_token_ids"] == prompt, "a call and its result are not shown as the model's template writes them")
    client.count(found["usage"], [prompt], [1])


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


def refusals(client: Client) -> None:
    """Requests that cannot be answered as they ask are refused by the name of what they ask for; nothing is left unheard."""
    served = client.served
    chat, text = {"model": served.name, "messages": SAID, "max_tokens": 1}, {"model": served.name, "prompt": "a", "max_tokens": 1}
    for path, usual, changes in ((CHATS, chat, CHAT_REFUSALS), (TEXTS, text, TEXT_REFUSALS)):
        for change, param in (*changes, ({"model": f"no {served.name}"}, "model"), ({"model": None}, "model"),
                              ({"max_tokens": served.length}, "messages" if path == CHATS else "prompt")):
            if path == CHATS and served.tokenizer.template is None:
                change, param = {}, "messages"
            reply = client.reply(path, usual | change)
            status = 404 if change.get("model") else 400
            require(reply.status == status, f"{path} with {json.dumps(change)[:200]} is answered with {reply.status}, {status} is right: "
                    "what was asked is not heard")
            error = reply.body["error"]
            kind = "not_found_error" if status == 404 else "invalid_request_error"
            require((error["param"], error["type"]) == (param, kind) and bool(error["message"]),
                    f"{path} with {json.dumps(change)[:200]} is refused as {error}; {param!r} is wrong with it")


def listings(client: Client) -> None:
    """The model by its name and version; and counts that are those of the requests before."""
    served = client.served
    listed = {model["id"]: model for model in client.get("/v1/models")["data"]}
    found = listed[served.name]
    due = {"object": "model", "owned_by": "assay", "system_fingerprint": served.version, "max_model_len": served.length, "parent": None,
           "dtype": str(served.dtype).removeprefix("torch.")}
    require(len(listed) == served.models and due.items() <= found.items() and client.get(f"/v1/models/{served.name}") == found,
            f"the model is listed as {json.dumps(found)[:300]}, {due} is right")
    health = client.get("/health")
    require(health == {"status": "ok", "models": served.models, "completions": 0, "slots": served.slots * served.models},
            f"a server with nothing to do says of its health {health}")
    counts = dict(line.rsplit(" ", 1) for line in str(client.get("/metrics")).splitlines() if not line.startswith("#"))
    mine = f'{{model="{served.name}"}}'
    told = {"assay_prompt_tokens_total": client.prompt_tokens, "assay_completion_tokens_total": client.completion_tokens,
            "assay_completions": 0, "assay_slots": served.slots, "assay_model_broken": 0}
    asked = Counter[str]()
    for (path, status), count in client.replies.items():
        known = "/v1/models" if path.startswith("/v1/models") else path
        asked[f'assay_requests_total{{path="{known}",status="{status}"}}'] += count if known != "/metrics" else 0
    for name, value in {**{f"{name}{mine}": value for name, value in told.items()}, **+asked}.items():
        require(counts.get(name) == str(value), f"{name} is counted as {counts.get(name)}, {value} is right")

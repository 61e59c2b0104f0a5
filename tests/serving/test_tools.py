"""Tools, forms, reuse of earlier turns and metrics, over real HTTP with the official client."""

import asyncio
import json
import math

import httpx
import openai
import pytest
import torch

from assay.agents.tool_calls import HERMES, ToolCall
from assay.generate import token_grammar
from assay.generate.engine import Engine, generate
from assay.generate.generation_request import Completion, GenerationRequest, Sampling
from assay.generate.policy_logprobs import policy_logits
from assay.generate.token_grammar import GrammarPath, GrammarVocabulary
from assay.model.tokenizer import Tokenizer
from assay.serving.endpoints import CompletionFlow, api_prompt_ids
from assay.serving.engine_thread import EngineThread, ServerSize
from assay.serving.openai_protocol import ApiReply, read_chat
from assay.serving.server import serve_in_background
from assay.serving.tool_protocol import spoken_message
from assay.testing.tiny_models import TINY_CHAT_TEMPLATE, nudge, save_model, tiny_model, tiny_tokenizer

WEB = httpx.Client(timeout=60, trust_env=False)
ADD = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"enum": [1, 22]}, "b": {"enum": [3]}}, "required": ["a", "b"], "additionalProperties": False}}}
STOP = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}, "dark": {"type": "boolean"}},
          "required": ["colour", "dark"], "additionalProperties": False}
ASKED = [{"role": "user", "content": "1+3?"}]
# ChatML that shows tools and earlier calls, as Qwen's does.
TOOL_TEMPLATE = """{%- if tools -%}
<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call><|im_end|>
{% endif -%}""" + TINY_CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content }}{% for call in message.tool_calls %}"
                                             "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
                                             "</tool_call>{% endfor %}")


def with_template(template: str) -> Tokenizer:
    plain = tiny_tokenizer()
    return Tokenizer(plain.document, plain.settings, {"default": template})


@pytest.fixture(scope="module")
def model():
    return nudge(tiny_model("qwen3", vocab=270), 0.3)


@pytest.fixture(scope="module")
def serving(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("tools")
    made = EngineThread(ServerSize(slots=2))
    made.open("tools", save_model(root / "tools", model, tokenizer=with_template(TOOL_TEMPLATE)).folder)
    made._join("plain", save_model(root / "plain", model).folder, None, hallmark=False)
    odd = with_template(TOOL_TEMPLATE.replace("{{ {'name'", "call: {{ {'name'"))
    made._join("odd", save_model(root / "odd", model, tokenizer=odd).folder, None, hallmark=False)
    return made


@pytest.fixture(scope="module")
def url(serving):
    with serve_in_background(serving) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=WEB)


def chat(client, **options):
    return client.chat.completions.create(**{"model": "tools", "messages": ASKED, "max_tokens": 90, "seed": 5, **options})


def refusal(url, **change):
    reply = WEB.post(url + "/chat/completions", json={"model": "tools", "messages": ASKED, "max_tokens": 8} | change)
    return reply.status_code, reply.json()["error"]["param"], reply.json()["error"]["message"]

# ---------------------------------------------------------------- tools


def test_a_call_that_is_demanded_comes_whole_and_streamed(client):
    """Of any tool, and of a named one; the stream says the same."""
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        said = chat(client, tools=[ADD, STOP], tool_choice=choice, n=3).choices
        for each in said:
            (call,) = each.message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert each.finish_reason == "tool_calls"
            assert each.message.content is None
            assert (call.function.name == "add" and arguments["a"] in (1, 22)) or (call.function.name == "stop" and choice == "required")
        pieces = list(chat(client, tools=[ADD, STOP], tool_choice=choice, n=3, stream=True))
        streamed = {piece.choices[0].index: piece.choices[0] for piece in pieces if piece.choices[0].finish_reason}
        assert [streamed[each.index].delta.tool_calls[0].function for each in said] == [
            openai.types.chat.chat_completion_chunk.ChoiceDeltaToolCallFunction(**each.message.tool_calls[0].function.model_dump())
            for each in said]


def test_tools_are_shown_by_the_template_and_calls_come_back_into_it(client):
    shown = chat(client, tools=[ADD], max_tokens=1, extra_body={"return_token_ids": True}).choices[0].prompt_token_ids
    assert "add <tool_call>" in tiny_tokenizer().decode(shown)
    none = chat(client, tools=[ADD], tool_choice="none", max_tokens=1, extra_body={"return_token_ids": True}).choices[0].prompt_token_ids
    assert "add" not in tiny_tokenizer().decode(none)
    called = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 22}'}}]}
    history = [*ASKED, called, {"role": "tool", "tool_call_id": "x", "content": "25"}]
    written = '<tool_call>{"name": "add", "arguments": {"a": 22}}</tool_call>'
    for name, due in (("tools", written), ("plain", HERMES.write("", [ToolCall("add", {"a": 22})]))):
        reply = chat(client, model=name, messages=history, max_tokens=1, extra_body={"return_token_ids": True})
        assert due in tiny_tokenizer().decode(reply.choices[0].prompt_token_ids)


def test_what_the_model_says_is_a_call_in_its_own_format_or_stays_text():
    tokenizer = tiny_tokenizer()

    def said(text):
        ids = (*tokenizer.encode(text), tokenizer.eos)
        return spoken_message(Completion(ids, (0.0,) * len(ids), "stop"), tokenizer, HERMES, "there")

    called = said('so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    assert (called["content"], called["tool_calls"][0]["function"]) == ("so", {"name": "add", "arguments": '{"a": 1}'})
    broken = said("<tool_call>{add}</tool_call>")
    assert "tool_calls" not in broken
    assert broken["content"] == "<tool_call>{add}</tool_call>"
    assert broken["tool_call_faults"]
    assert said("four")["content"] == "four"

# ---------------------------------------------------------------- forms


def test_an_answer_has_the_form_of_its_schema_under_the_masked_distribution(client, model):
    """The log-probability of every token is what the plain softmax gives it among those that are allowed, and no other."""
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    (said,) = chat(client, response_format=form, logprobs=True, extra_body={"return_token_ids": True}).choices
    assert set(json.loads(said.message.content)) == {"colour", "dark"}
    tokenizer, prompt, ids = tiny_tokenizer(), said.prompt_token_ids, said.token_ids
    path = GrammarPath(GrammarVocabulary(tokenizer, vocab=270, stop_ids=[tokenizer.eos]).json_schema(COLOUR))
    with torch.no_grad():
        logits = policy_logits(model, model.hidden(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1: -1])
    for row, token, entry in zip(logits, ids, said.logprobs.content, strict=True):
        due = row.masked_fill(~path.allowed, -math.inf).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(due[token]), abs=1e-4)
        if token != tokenizer.eos:
            path.take([token])
    assert any(entry.logprob < -0.01 for entry in said.logprobs.content), "somewhere there was a choice"


def test_a_form_and_a_free_text_are_drawn_side_by_side(model):
    """A neighbour in a grammar changes nothing of what a free completion says."""
    tokenizer = tiny_tokenizer()
    form = GrammarVocabulary(tokenizer, vocab=270, stop_ids=[tokenizer.eos]).json_schema(COLOUR)
    free = GenerationRequest((5, 6, 7), Sampling(24, seed=1), ("free",), stop_ids=())
    bound = GenerationRequest((5, 6, 7), Sampling(60, seed=1), ("bound",), stop_ids=(tokenizer.eos,), grammar=form)
    alone, = generate(model, [free], tokenizer=tokenizer)
    beside, shaped = generate(model, [free, bound], tokenizer=tokenizer, slots=2)
    assert beside.ids == alone.ids
    assert set(json.loads(shaped.text)) == {"colour", "dark"}


def test_what_is_not_done_is_refused_by_name(url, monkeypatch):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
    strict = {"type": "function", "function": ADD["function"] | {"strict": True}}
    for change, param, words in (
            ({"response_format": schema}, "response_format", "objekt"), ({"tools": [ADD], "model": "plain"}, "tools", "template"),
            ({"tools": [ADD], "model": "odd"}, "tools", "the format hermes does not read"),
            ({"tools": [ADD], "response_format": {"type": "json_object"}}, "response_format", "with tools"),
            ({"tools": [strict]}, "tools[0].function.strict", "strict"), ({"tool_choice": "required"}, "tool_choice", "no tools"),
            ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "sub"),
            ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls", "not supported"),
            ({"tools": [ADD, ADD]}, "tools", "one name"), ({"functions": [ADD]}, "functions", "not supported"),
            ({"response_format": {"type": "json_object"}, "logprobs": True, "top_logprobs": 2}, "top_logprobs", "form")):
        status, at, told = refusal(url, **change)
        assert (status, at) == (400, param), told
        assert words in told
    monkeypatch.setattr(token_grammar.importlib.util, "find_spec", lambda name: None)
    status, at, told = refusal(url, model="plain", response_format={"type": "json_object"})
    assert (status, at) == (400, "response_format")
    assert "llguidance" in told

# ---------------------------------------------------------------- earlier turns, and metrics


def test_a_prompt_that_goes_on_from_what_was_said_is_computed_from_there_within_one_version(serving, url):
    served = serving.find("plain")

    def said(prompt):
        before = served.engine.forwarded
        reply = WEB.post(url + "/completions", json={"model": "plain", "prompt": prompt, "max_tokens": 6, "seed": 1, "logprobs": 0,
                                                     "return_token_ids": True}).json()
        return reply["choices"][0], served.engine.forwarded - before

    first, _ = said([40 + n % 7 for n in range(60)])
    longer = [*first["prompt_token_ids"], *first["token_ids"], 9, 8, 7]
    again, cost = said(longer)
    assert cost <= 6 + 6, "the first turn was computed again"
    served.engine.load(served.engine.version)  # what came before is of other weights
    fresh, whole = said(longer)
    assert whole >= 66
    assert again["token_ids"] == fresh["token_ids"]
    assert again["logprobs"]["token_logprobs"] == pytest.approx(fresh["logprobs"]["token_logprobs"], abs=1e-4)


def test_a_reply_names_the_weights_that_drew_it_whatever_was_taken_up_since(serving):
    model, asked = serving.find("plain"), read_chat({"model": "plain", "messages": ASKED, "max_tokens": 2})
    flow, drawn_by = CompletionFlow(serving, ApiReply.to(asked, model, api_prompt_ids(model, asked), 0)), model.engine.version

    async def answered():
        ended = {index: (progress.completion, None) async for index, progress, _ in flow.news() if progress and progress.completion}
        await asyncio.wrap_future(serving.ask(lambda: model.engine.load("later")))
        return flow.answer.whole(ended)

    try:
        assert asyncio.run(answered())["system_fingerprint"] == drawn_by
    finally:
        serving.ask(lambda: model.engine.load(drawn_by)).result()


def test_the_longest_earlier_turn_is_gone_on_from(model):
    engine = Engine(model, slots=3, length=64, version="one")
    for length in (4, 9):
        engine.submit(GenerationRequest(tuple(range(length)), Sampling(2), stop_ids=()))
    (short, long) = sorted((progress.ticket, progress.completion.ids) for progress in engine.drain())
    assert engine.latest_before((*range(4), *short[1], 3)) == (short[0], 0)
    assert engine.latest_before((*range(9), *long[1], 3)) == (long[0], 0)
    assert engine.latest_before((50, 51)) is None
    engine.load("two")
    assert engine.latest_before((*range(9), *long[1], 3)) is None


def test_metrics_count_requests_tokens_and_name_the_version(serving, url, client):
    address = url.removesuffix("/v1") + "/metrics"

    def value(line):
        found = [each for each in WEB.get(address).text.splitlines() if each.startswith(line)]
        return float(found[0].split()[-1]) if found else 0.0

    replies, tokens = 'assay_requests_total{path="/v1/chat/completions",status="200"}', 'assay_completion_tokens_total{model="tools"}'
    before = value(replies), value(tokens)
    chat(client, max_tokens=3, extra_body={"top_k": 5}, stop=None)
    assert value(replies) == before[0] + 1
    assert 1 <= value(tokens) - before[1] <= 3
    assert value(f'assay_model_info{{model="tools",version="{serving.find("tools").engine.version}"}}') == 1
    assert value('assay_requests_total{path="other",status="404"}') == 0
    WEB.get(url + "/nothing")
    assert value('assay_requests_total{path="other",status="404"}') == 1

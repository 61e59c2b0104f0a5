"""The server over real HTTP on loopback: the official client's requests, and everything that a client may get wrong."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch

from assay.errors import AssayError, UsageError
from assay.generate.access import bind_listener
from assay.generate.engine import sample
from assay.generate.generation_request import Sampling
from assay.serving import hosted_model, openai_protocol
from assay.serving.endpoints import BODY_BYTES, CompletionFlow
from assay.serving.engine_thread import EngineThread, ServerSize
from assay.serving.openai_protocol import ApiReply
from assay.serving.server import serve, serve_in_background
from assay.store import checkpoint
from assay.store.artifact import build_model, open_artifact
from assay.testing.tiny_models import nudge, save_adapter, save_model, tiny_model
from assay.verdict import proven

HELLO = [{"role": "user", "content": "hello"}]
SLOTS, QUEUE = 3, 5
WEB = httpx.Client(timeout=60, trust_env=False)  # no proxy on the way to ourselves


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, a proven adapter in two versions, and one that nobody proved."""
    root = tmp_path_factory.mktemp("served")
    found = {"base": save_model(root / "base", nudge(tiny_model("qwen3", vocab=270), 0.3)).folder}
    for name, far in (("first", 0.2), ("second", 0.3), ("unproven", 0.4)):
        found[name] = save_adapter(root / name, found["base"], far=far).folder
    for name in ("first", "second"):
        checkpoint.write_hallmark(checkpoint.open_checkpoint(found[name]), [proven("test", "made for a test")])
    return found


@pytest.fixture(scope="module")
def serving(folders):
    return EngineThread(ServerSize(slots=SLOTS, queue=QUEUE))


@pytest.fixture(scope="module")
def url(serving, folders):
    serving.open("base", folders["base"])
    serving.open_adapter("a@1", folders["first"])
    with serve_in_background(serving) as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=WEB)


def chat(client, **options):
    return client.chat.completions.create(**{"model": "base", "messages": HELLO, "max_tokens": 12, "seed": 5, **options})


def post(url, body, path="/chat/completions", **options):
    return WEB.post(url + path, json=body, **options)


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


@contextlib.contextmanager
def held(serving, *, now=True):
    """The engine's thread does nothing for the length of the block: what is in its queue then has been asked since.

    Without `now` it will do nothing once it comes to it.
    """
    gate, inside = threading.Event(), threading.Event()
    serving.ask(lambda: (inside.set(), gate.wait(60)))
    try:
        assert not now or inside.wait(60)
        yield gate
    finally:
        gate.set()

# ---------------------------------------------------------------- what a client gets


def test_models_are_listed_with_their_digests(client, folders):
    listed = {model.id: model for model in client.models.list()}
    assert {name: model.system_fingerprint for name, model in listed.items() if name in ("base", "a@1")} == {
        "base": open_artifact(folders["base"]).digest, "a@1": open_artifact(folders["first"]).digest}
    assert (listed["base"].proven, listed["a@1"].proven, listed["a@1"].parent) == (False, True, "base")
    assert client.models.retrieve("a@1").id == "a@1"


def test_greedy_chat_is_what_the_sampler_says(client, folders):
    """Both models, through the template: other text for other weights, and each its own."""
    texts = set()
    for name, folder in (("base", "base"), ("a@1", "first")):
        artifact = open_artifact(folders[folder])
        prompt = artifact.tokenizer.encode(artifact.tokenizer.render(HELLO, add_generation_prompt=True))
        due = sample(build_model(artifact), [prompt], artifact.stops.stop_ids, Sampling(12, temperature=0))[0]
        reply = chat(client, model=name, temperature=0)
        texts.add(reply.choices[0].message.content)
        assert reply.choices[0].message.content == artifact.tokenizer.decode(due.ids, special=False)
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(due.ids))
        assert reply.system_fingerprint == artifact.digest
    assert len(texts) == 2


def test_a_seed_gives_the_same_text_alone_and_among_others(client):
    alone = {seed: chat(client, seed=seed, max_completion_tokens=30).choices[0].message.content for seed in range(6)}
    with ThreadPoolExecutor(6) as pool:
        among = list(pool.map(lambda seed: chat(client, seed=seed, max_completion_tokens=30).choices[0].message.content, range(6)))
    assert among == list(alone.values())
    assert len(set(among)) == 6
    replied = chat(client, seed=None)
    assert chat(client, seed=replied.seed).choices[0].message.content == replied.choices[0].message.content


def test_n_choices_and_a_stream_say_the_same(client):
    whole = chat(client, n=3)
    texts, reasons, usage = ["", "", ""], {}, None
    for piece in chat(client, n=3, stream=True, stream_options={"include_usage": True}):
        usage = piece.usage or usage
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage
    assert len(set(texts)) == 3


def test_a_stop_string_ends_a_text_before_it(client):
    text = chat(client, max_tokens=40, temperature=0).choices[0].message.content
    stop = text[5:8]
    cut = chat(client, max_tokens=40, temperature=0, stop=[stop, "never said"])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    streamed = "".join(piece.choices[0].delta.content or "" for piece in chat(client, max_tokens=40, temperature=0, stop=stop, stream=True))
    assert streamed == text[: text.index(stop)]


def test_logprobs_are_of_the_sampled_distribution_unless_asked_otherwise(client, folders):
    artifact = open_artifact(folders["base"])
    extra = {"top_k": 3, "return_token_ids": True}
    drawn = chat(client, temperature=0.5, logprobs=True, top_logprobs=5, extra_body=extra).choices[0]
    plain = chat(client, temperature=0.5, logprobs=True, top_logprobs=5, extra_body=extra | {"logprobs_under": "model"}).choices[0]
    assert drawn.token_ids == plain.token_ids
    with torch.no_grad():
        logits = build_model(artifact)(torch.tensor([[*drawn.prompt_token_ids, *drawn.token_ids]]))[0, len(drawn.prompt_token_ids) - 1 : -1]
    for place, id in enumerate(drawn.token_ids):
        assert plain.logprobs.content[place].logprob == pytest.approx(float(logits[place].log_softmax(-1)[id]), abs=1e-4)
        kept = logits[place].topk(3)
        due = (kept.values / 0.5).log_softmax(-1)
        found = drawn.logprobs.content[place]
        assert [pair.logprob for pair in found.top_logprobs] == pytest.approx(due.tolist(), abs=1e-4)  # 3 of 5: no other could be drawn
        assert found.logprob == pytest.approx(float(due[kept.indices.tolist().index(id)]), abs=1e-4)
        assert bytes(found.bytes or b"") == (artifact.tokenizer.bytes_of(id) or b"")
    streamed = [token.logprob for piece in chat(client, temperature=0.5, logprobs=True, stream=True, extra_body={"top_k": 3})
                for choice in piece.choices if choice.logprobs for token in choice.logprobs.content]
    assert streamed == pytest.approx([token.logprob for token in drawn.logprobs.content], abs=1e-5)


def test_text_completions_of_several_prompts(client, folders):
    """Texts and ids; choice k of the request draws at (seed, k), whatever the other prompts are."""
    ids = open_artifact(folders["base"]).tokenizer.encode("once upon")
    one = client.completions.create(model="base", prompt=["once", "upon"], n=2, seed=1, max_tokens=6, logprobs=1)
    other = client.completions.create(model="base", prompt=["once", "a time"], n=2, seed=1, max_tokens=6)
    assert [choice.index for choice in one.choices] == [0, 1, 2, 3]
    assert [c.text for c in one.choices[:2]] == [c.text for c in other.choices[:2]]
    assert len(one.choices[0].logprobs.token_logprobs) == len(one.choices[0].logprobs.top_logprobs) == 6
    twins = client.completions.create(model="base", prompt=["once", "once"], seed=1, max_tokens=6)
    assert twins.choices[0].text == one.choices[0].text
    assert twins.choices[1].text == one.choices[1].text  # the same prompt at the same address, whichever way it was asked for
    by_text, by_ids = (client.completions.create(model="base", prompt=prompt, seed=1) for prompt in ("once upon", ids))
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage.completion_tokens <= 16
    assert "".join(piece.choices[0].text for piece in client.completions.create(
        model="base", prompt="once upon", seed=1, stream=True)) == by_text.choices[0].text

# ---------------------------------------------------------------- what a client may get wrong


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="gpt-4o")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(("change", "param"), [
    ({"messages": []}, "messages"), ({"messages": "hello"}, "messages"), ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0]"),
    ({"model": None}, "model"), ({"model": 3}, "model"), ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": True}, "n"), ({"n": 9}, "n"),
    ({"temperature": -1}, "temperature"), ({"temperature": 1e400}, "temperature"), ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"seed": 1.5}, "seed"), ({"seed": 2**63}, "seed"), ({"stop": [""]}, "stop"), ({"stop": ["a"] * 5}, "stop"),
    ({"stop": 7}, "stop"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 255}, "messages"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"stream": "yes"}, "stream"), ({"stream_options": {}}, "stream_options"),
    ({"logprobs": True, "top_logprobs": 2, "stream": True}, "stream"), ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"response_format": {"type": "xml"}}, "response_format"), ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"temprature": 0.5}, "temprature")])
def test_bad_fields_are_400_and_named(url, change, param):
    body = json.dumps({"model": "base", "messages": HELLO, "max_tokens": 4} | change).replace("Infinity", "1e400")
    reply = WEB.post(url + "/chat/completions", content=body, headers={"content-type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"n": ' + b"9" * 5000 + b"}"])
def test_a_body_that_is_no_request_is_400(url, body):
    reply = WEB.post(url + "/completions", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


def test_other_refusals_have_openais_shape(url):
    due = {
        405: WEB.get(url + "/chat/completions"), 404: WEB.get(url + "/nowhere"),
        415: WEB.post(url + "/chat/completions", content=b"{}", headers={"content-type": "text/plain"}),
        413: post(url, {"model": "base", "messages": [{"role": "user", "content": "a" * BODY_BYTES}]}),
        403: WEB.get(url + "/models", headers={"host": "evil.example"}),
        400: post(url, {"model": "base", "prompt": [3, 99999]}, "/completions")}
    for status, reply in due.items():
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    half = WEB.post(url + "/chat/completions", content=b'{"model": "base", "messages": [{"role": "user", "content": "\\ud800"}]}',
                      headers={"content-type": "application/json"})
    assert half.status_code == 400
    assert "surrogate" in half.json()["error"]["message"]


def test_a_prompt_that_does_not_fit_says_so(client):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[{"role": "user", "content": "z" * 300}])
    assert caught.value.code == "context_length_exceeded"

# ---------------------------------------------------------------- the queue


def test_the_queue_is_bounded_and_nobody_in_it_is_lost(serving, client, url):
    room = SLOTS + QUEUE
    with ThreadPoolExecutor(room) as pool:
        with held(serving):
            waiting = [pool.submit(chat, client, seed=seed) for seed in range(room)]
            until(lambda: serving.busy == room)
            reply = post(url, {"model": "base", "messages": HELLO})
            assert (reply.status_code, reply.headers["retry-after"], reply.json()["error"]["code"]) == (429, "1", "queue_full")
            assert WEB.get(url.removesuffix("/v1") + "/health").json() | {"models": 0, "slots": 0} == {
                "status": "ok", "completions": room, "models": 0, "slots": 0}
        assert len({one.result().choices[0].message.content for one in waiting}) == room
    assert serving.busy == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_request_along(serving, url, stream):
    body = json.dumps({"model": "base", "messages": HELLO, "max_tokens": 200, "temperature": 0, "stream": stream}).encode()
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    with held(serving) as before, socket.create_connection((host, int(port))) as line:
        line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        until(lambda: serving.busy == 1 and serving._queue.qsize() == 1)  # it waits to be submitted
        with held(serving, now=False):
            before.set()
            if stream:
                assert b"200 OK" in line.recv(100)
            line.close()
            until(lambda: serving.busy == 0)
    assert serving.ask(lambda: serving.models["base"].engine.idle).result(), "it is still being served"

# ---------------------------------------------------------------- adapters


def test_a_proven_adapter_joins_under_a_name_of_its_own(serving, url, client, folders):
    before = chat(client, model="a@1", temperature=0).choices[0].message.content
    taken = post(url, {"name": "a@1", "path": str(folders["second"])}, "/adapters")
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    joined = post(url, {"name": "a@2", "path": str(folders["second"])}, "/adapters").json()
    assert joined["system_fingerprint"] == open_artifact(folders["second"]).digest
    assert [verdict["outcome"] for verdict in joined["verdicts"]] == ["PROVEN", "PROVEN"]
    assert post(url, {"name": "a@2", "path": str(folders["second"])}, "/adapters").json() == joined  # asked twice, served once
    after, new = (chat(client, model=name, temperature=0) for name in ("a@1", "a@2"))
    assert after.choices[0].message.content == before != new.choices[0].message.content
    assert new.system_fingerprint == joined["system_fingerprint"]


def test_what_is_not_proven_or_not_an_adapter_does_not_join(url, folders):
    for path, word in (("unproven", "hallmark"), ("base", "whole model"), ("nowhere", "no such")):
        reply = post(url, {"name": f"x-{path}", "path": str(folders.get(path, "/nowhere"))}, "/adapters")
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "adapter_refused")
        assert word in reply.json()["error"]["message"]
        assert WEB.get(f"{url}/models/x-{path}").status_code == 404
    for body in ({"name": "../x y", "path": str(folders["first"])}, {"name": "x"}, {"name": "x", "path": 3}, {"nam": "x"}):
        assert post(url, body, "/adapters").status_code == 400


def test_an_adapter_that_is_loaded_and_not_applied_takes_no_traffic(url, folders, monkeypatch):
    """Its bytes are proven; what the engine runs is the base."""
    whole = hosted_model.build_model
    monkeypatch.setattr(hosted_model, "build_model", lambda artifact, *dtype: whole(artifact.base or artifact, *dtype))
    reply = post(url, {"name": "a@idle", "path": str(folders["first"])}, "/adapters")
    assert reply.status_code == 400
    assert "other weights are served than were saved" in reply.json()["error"]["message"]
    assert WEB.get(f"{url}/models/a@idle").status_code == 404


def test_a_young_adapter_that_is_not_applied_shows_too(folders, tmp_path, monkeypatch):
    """Its whole change is within the bound on answers; none of it shows."""
    where = save_adapter(tmp_path / "young", folders["base"], far=4e-5).folder
    artifact = open_artifact(where)
    whole = hosted_model.build_model
    options = {"slots": 1, "length": 64, "device": "cpu", "dtype": torch.float32}
    assert hosted_model.host_model("young", artifact, **options).verdicts[0].evidence["share"] == pytest.approx(1, abs=0.02)
    monkeypatch.setattr(hosted_model, "build_model", lambda artifact, *dtype: whole(artifact.base or artifact, *dtype))
    with pytest.raises(hosted_model.ArtifactError, match="change to its base shows"):
        hosted_model.host_model("young", artifact, **options)


def test_a_retired_adapter_finishes_what_it_began(serving, url, client, folders):
    post(url, {"name": "a@old", "path": str(folders["second"])}, "/adapters")
    with ThreadPoolExecutor(1) as pool:
        with held(serving):
            under_way = pool.submit(chat, client, model="a@old")
            until(lambda: serving.busy == 1)
            assert WEB.delete(url + "/adapters/a@old").json()["deleted"]
            assert post(url, {"model": "a@old", "messages": HELLO}).status_code == 404
        assert under_way.result().choices[0].finish_reason in ("stop", "length")
    assert "a@old" not in [model.name for model in serving.ask(lambda: serving._engines).result()]
    assert WEB.delete(url + "/adapters/base").status_code == 409
    assert post(url, {"name": "a@old", "path": str(folders["first"])}, "/adapters").status_code == 409  # the name keeps its weights

# ---------------------------------------------------------------- who may speak, and the end


TOKEN = "0123456789abcdef"


def test_a_token_is_needed_beyond_loopback():
    with pytest.raises(UsageError, match="ASSAY_TOKEN"):
        bind_listener("0.0.0.0", 0, None)
    bind_listener("0.0.0.0", 0, TOKEN).close()
    with serve_in_background(EngineThread(ServerSize()), token=TOKEN) as url:
        for headers, status in (({}, 401), ({"authorization": "Bearer wrong"}, 401), ({"authorization": f"Bearer {TOKEN}"}, 200)):
            reply = WEB.get(url + "/models", headers=headers)
            assert reply.status_code == status
            assert status == 200 or reply.json()["error"]["code"] == "invalid_api_key"
        assert WEB.get(url.removesuffix("/v1") + "/health").status_code == 200


@pytest.mark.parametrize("token", [" ", "\t", TOKEN + " ", TOKEN + "\n", "schlüssel-schlüssel"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_token_that_no_header_carries_is_refused(host, token):
    with pytest.raises(UsageError, match="blank, or holds spaces") as refused:
        bind_listener(host, 0, token)
    assert TOKEN not in str(refused.value)


def test_a_token_that_is_soon_guessed_does_not_open_the_server_to_others():
    with pytest.raises(UsageError, match="at least 16"):
        bind_listener("0.0.0.0", 0, TOKEN[1:])
    bind_listener("127.0.0.1", 0, TOKEN[1:]).close()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_page_whose_name_was_rebound_to_loopback_is_refused(token):
    """Even about health; and whoever holds the token comes through a proxy of any name."""
    with serve_in_background(EngineThread(ServerSize()), token=token) as url:
        for path in ("/health", "/v1/models"):
            for host, expected in (("rebound.example:8000", 403), ("localhost.rebound.example", 403), ("", 403), ("LOCALHOST:1", 200)):
                reply = WEB.get(url.removesuffix("/v1") + path, headers={"host": host})
                assert reply.status_code == (401 if expected == 200 and token and path != "/health" else expected), (path, host)
                assert expected == 200 or reply.json()["error"]["code"] == "wrong_host"
        holder = {"host": "proxy.example", "authorization": f"Bearer {token}"}
        assert WEB.get(url + "/models", headers=holder).status_code == (403 if token is None else 200)


def test_a_guard_that_stops_one_model_is_told_to_its_clients(folders):
    serving = EngineThread(ServerSize(slots=2, queue=2))
    model = serving.open("base", folders["base"])
    serving.open_adapter("a@1", folders["first"])
    with serve_in_background(serving) as url:
        with torch.no_grad():
            model.engine.weights.source.embed.weight.add_(1)
        for status in (500, 503):  # the one that found out, and all after it
            reply = post(url, {"model": "base", "messages": HELLO})
            assert (reply.status_code, reply.json()["error"]["type"]) == (status, "server_error")
            assert "weights have changed" in reply.json()["error"]["message"]
        assert WEB.get(url.removesuffix("/v1") + "/health").status_code == 503
        assert post(url, {"model": "a@1", "messages": HELLO, "max_tokens": 3}).status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_an_engine_that_died(folders):
    serving = EngineThread(ServerSize(slots=2, queue=2))
    serving.open("base", folders["base"])
    with serve_in_background(serving) as url, ThreadPoolExecutor(1) as pool:
        with held(serving):
            waiting = pool.submit(post, url, {"model": "base", "messages": HELLO})
            until(lambda: serving.busy == 1 and serving._queue.qsize() == 1)
            serving.ask(lambda: 1 / 0)
        assert waiting.result().status_code == 500
        serving._thread.join(60)
        assert serving.failed
        assert post(url, {"model": "base", "messages": HELLO}).status_code == 503


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nor_does_who_asks_while_it_dies(folders):
    """The thread is alive until it has told everybody, and somebody asks meanwhile."""
    serving, late = EngineThread(ServerSize(slots=1, queue=1)), []
    serving.on_failure = lambda: late.append(serving.ask(lambda: "done"))
    with pytest.raises(AssayError, match="stopped"):
        serving.ask(lambda: 1 / 0).result(60)
    until(lambda: late)
    with pytest.raises(AssayError, match="stopped"):
        late[0].result(60)
    serving._thread.join(60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_who_left_does_not_keep_the_others_from_being_told(folders):
    serving = EngineThread(ServerSize(slots=1, queue=1))
    failed = threading.Event()
    serving.on_failure = failed.set
    with held(serving):
        serving.ask(lambda: 1 / 0)
        left, waits = serving.ask(lambda: None), serving.ask(lambda: None)
        assert left.cancel()
    with pytest.raises(AssayError, match="stopped"):
        waits.result(60)
    assert failed.wait(60)
    serving._thread.join(60)


def test_an_event_loop_that_is_closed_does_not_end_the_engine(folders):
    """A server that did not wait any longer: what it had asked for is cancelled after its loop is gone."""
    serving, gate = EngineThread(ServerSize(slots=1, queue=1)), threading.Event()
    model = serving.open("base", folders["base"])
    asked = openai_protocol.read_completion({"model": "base", "prompt": [1, 2, 3], "max_tokens": 40})
    news = CompletionFlow(serving, ApiReply.to(asked, model, ((1, 2, 3),), 5)).news()

    async def leave() -> None:
        with held(serving):
            begun = asyncio.ensure_future(anext(news))
            await asyncio.sleep(0)  # it is to be submitted
            serving.ask(lambda: gate.wait(60))
        await begun
        await news.aclose()

    asyncio.run(leave())
    gate.set()
    assert serving.ask(lambda: model.engine.idle).result(60)
    serving.stop()
    assert not serving.failed


def test_an_adapter_that_stays_is_not_said_to_be_retired(serving, url, folders, monkeypatch):
    post(url, {"name": "a@stays", "path": str(folders["second"])}, "/adapters")
    with monkeypatch.context() as patched:
        patched.setattr(serving, "retire", lambda name: None)
        told = WEB.delete(url + "/adapters/a@stays")
    assert told.status_code == 500
    assert "still served" in told.json()["error"]["message"]
    assert WEB.delete(url + "/adapters/a@stays").json()["deleted"]


def test_an_adapter_that_comes_back_while_it_finishes_is_held_once(folders):
    serving = EngineThread(ServerSize(slots=1, queue=1))
    serving.open("base", folders["base"])
    old = serving.open_adapter("a@1", folders["first"])
    asked = openai_protocol.read_completion({"model": "a@1", "prompt": [1, 2, 3], "max_tokens": 40})
    flow = CompletionFlow(serving, ApiReply.to(asked, old, ((1, 2, 3),), 5))

    async def retire_and_return() -> None:
        with held(serving):
            answer = asyncio.ensure_future(flow.collect())
            await asyncio.sleep(0)
            serving.retire("a@1")
            joined = asyncio.ensure_future(asyncio.to_thread(serving.open_adapter, "a@1", folders["first"]))
            while serving._queue.qsize() < 3:  # the request, a look at what is over, the adapter
                await asyncio.sleep(0.002)
        assert (await answer)["usage"]["completion_tokens"]
        assert await joined is not old

    asyncio.run(retire_and_return())
    assert [model.name for model in serving.ask(lambda: serving._engines).result(60)] == ["base", "a@1"]
    serving.stop()


@contextlib.contextmanager
def in_time():
    """Time limit of a minute: what would go on for ever is ended, and that is a failure."""
    late = []
    clock = threading.Timer(60, lambda: (late.append(True), os.kill(os.getpid(), signal.SIGTERM)))
    clock.start()
    try:
        yield
    finally:
        clock.cancel()
    assert not late, "it had to be ended"


def test_a_signal_that_comes_before_the_server_listens_to_signals_ends_it(folders):
    with in_time():
        listener = bind_listener("127.0.0.1", 0, None)
        ended = serve(EngineThread(ServerSize()), listener, token=None, ready=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert ended == 128 + signal.SIGTERM


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_died_before_the_server_began_is_not_served():
    serving = EngineThread(ServerSize())
    serving.ask(lambda: 1 / 0)
    serving._thread.join(60)
    with in_time():
        assert serve(serving, bind_listener("127.0.0.1", 0, None), token=None, ready=lambda _: None) == 1


def test_what_has_no_time_to_finish_is_told(folders):
    serving = EngineThread(ServerSize(slots=1, queue=1))
    serving.open("base", folders["base"])
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        url = stack.enter_context(serve_in_background(serving, grace=0))
        with held(serving):
            waiting = pool.submit(post, url, {"model": "base", "messages": HELLO, "max_tokens": 200, "temperature": 0})
            until(lambda: serving.busy == 1 and serving._queue.qsize() == 1)
            end = threading.Thread(target=stack.close)
            end.start()
            until(lambda: serving._queue.qsize() == 2)  # all are to be cancelled
        end.join()
    assert (waiting.result().status_code, waiting.result().json()["error"]["code"]) == (503, "unavailable")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signals_end_it_after_what_is_under_way(folders, number):
    code = ("import sys; from assay.config import parse; from assay.verbs import serve; "
            "sys.exit(serve.run(parse(serve.FLAGS, sys.argv[1:], prog='assay serve')))")
    command = [sys.executable, "-c", code, str(folders["base"]), "--port", "0", "--grace", "60", "--slots", "2", "--device", "cpu",
               "--adapter", f"a@1={folders['first']}"]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                                       env=os.environ | {"OMP_NUM_THREADS": "1"}))
        stack.callback(process.kill)
        lines = iter(process.stdout.readline, "")
        url = next(line.split()[-1] for line in lines if line.startswith("serving at"))
        with WEB.stream("POST", url + "/chat/completions", json={
                "model": "a@1", "messages": HELLO, "max_tokens": 200, "stream": True}) as reply:
            events = reply.iter_lines()
            assert "assistant" in next(events)
            process.send_signal(number)
            assert [line for line in events if line][-1] == "data: [DONE]"
        assert process.wait(60) == 128 + number
        assert process.stderr.read() == ""

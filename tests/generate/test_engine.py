"""The engine says what a full pass would say, whoever is served beside it, in whatever slot, after whatever stood there."""

import random
import re
from dataclasses import replace

import pytest
import torch

from assay.errors import GuardStop, UsageError
from assay.generate.engine import Engine, generate, sample
from assay.generate.generation_request import GenerationRequest, Sampling
from assay.generate.policy_logprobs import completion_logprobs
from assay.generate.sampler_weights import fingerprint
from assay.generate.slots import blocks_per_graph
from assay.model.lora import attach, fresh, plan
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config, tiny_tokenizer

FAMILIES = ["gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "assay", "mixed"]
PROMPTS = [(1, 2, 3), tuple(range(40, 75)), (7,), (9, 8, 7, 6, 5, 4), (1, 2, 3, 4)]
DRAWN = Sampling(max_new=30, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)
GREEDY = Sampling(max_new=30, temperature=0)  # past mistral's window of 24, with every prompt


def lively(family: str, depth_seed: int = 1, **changed):
    """Weights larger than an initialisation's, so that greedy has no ties and distributions have a shape."""
    model, g = initialised(replace(tiny_config(family), **changed), depth_seed), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.1)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return lively("qwen3")


def requests(sampling, prompts=PROMPTS):
    return [GenerationRequest(prompt, sampling, ("test", index)) for index, prompt in enumerate(prompts)]


def apart(one, two):
    return max(abs(a - b) for x, y in zip(one, two, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True))


# ── one law ───────────────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_the_argmax_of_a_full_pass(family):
    """Two slots for five requests: every slot is refilled."""
    model = lively(family)
    found = generate(model, requests(GREEDY), slots=2)
    assert [c.ids for c in found] == [c.ids for c in sample(model, PROMPTS, (), GREEDY)]
    for prompt, completion in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.ids]]))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(completion.ids)
        assert set(completion.logprobs) == {0.0}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainers_path_gives_the_same_logprobs(family):
    """Policy identity: sampled ids through the cache and scored without one, with everything switched on."""
    model = lively(family)
    for sampling in (DRAWN, Sampling(max_new=30, temperature=0.7)):
        found = generate(model, requests(sampling))
        due = completion_logprobs(model, [(p, c.ids) for p, c in zip(PROMPTS, found, strict=True)], sampling)
        for completion, scored in zip(found, due, strict=True):
            torch.testing.assert_close(torch.tensor(completion.logprobs), scored, atol=1e-5, rtol=0)


def test_a_request_does_not_depend_on_who_stands_beside_it(model):
    """Alone, among others, in any order and for any number of slots: the same ids, log-probabilities within rounding."""
    asked = requests(DRAWN)
    alone = [generate(model, [request], slots=1)[0] for request in asked]
    for slots, seed in ((1, 0), (2, 1), (3, 2), (5, 3), (9, 4)):
        order = random.Random(seed).sample(range(len(asked)), len(asked))
        found = dict(zip(order, generate(model, [asked[i] for i in order], slots=slots), strict=True))
        assert [found[i].ids for i in range(len(asked))] == [c.ids for c in alone]
        assert apart([found[i] for i in range(len(asked))], alone) <= 1e-5


@pytest.mark.parametrize("ahead", [1, 2])
def test_several_steps_at_once_change_nothing(model, ahead):
    """As on a GPU: seven tokens before the host looks, and the next seven on their way while it does; ends within a flight."""
    asked = [replace(request, sampling=replace(DRAWN, max_new=9 + 5 * index)) for index, request in enumerate(requests(DRAWN))]
    engine = Engine(model, slots=2, length=80, stop_ids=(11, 12), version="v", steps=7)
    engine._launches_ahead = ahead
    tickets = [engine.submit(request) for request in asked]
    found = {progress.ticket: progress.completion for progress in engine.drain()}
    due = generate(model, asked, stop_ids=(11, 12))
    assert [found[ticket].ids for ticket in tickets] == [c.ids for c in due]
    assert [found[ticket].ended for ticket in tickets] == [c.ended for c in due]


@pytest.mark.parametrize(("family", "window", "graphs"), [
    ("llama", 24, 1), ("mixed", None, 2), *(pytest.param(family, None, 1, marks=pytest.mark.slow) for family in ("qwen3", "gpt2"))])
def test_blocks_compiled_together_say_the_same(family, window, graphs, monkeypatch):
    """As on a GPU: a stretch of blocks is one graph that knows that attention writes to the cache; all stretches share it, but for the
    first where later ones mix its values in."""
    model = lively(family, depth=4, windows=(window, None) * 2)
    due = generate(model, requests(DRAWN), slots=2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = Engine(model, slots=2, length=80, version="v")
    monkeypatch.setattr("assay.generate.slots.MOST_BLOCKS_PER_GRAPH", 2)
    engine.slots.compile(backend="aot_eager", fullgraph=True)
    launch = engine.slots.launch
    engine.slots.launch = lambda steps, horizon, penalise, allowed: launch(steps, 80, penalise, allowed)  # one shape
    tickets = [engine.submit(request) for request in requests(DRAWN)]
    found = {progress.ticket: progress.completion for progress in engine.drain()}
    assert [found[ticket].ids for ticket in tickets] == [c.ids for c in due]
    assert apart([found[ticket] for ticket in tickets], due) <= 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_a_compiled_stretch_copies_nothing_of_the_cache():
    """It is written in place: the kernels that a compiler makes itself are those of norms, sums and activations."""
    from torch._inductor.utils import run_and_get_code  # slow to import

    torch._dynamo.reset()
    engine = Engine(lively("llama"), slots=2, length=80, version="v")
    engine.slots.compile(fullgraph=True)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, (code,) = run_and_get_code(engine.slots.step, 80, False)
    kernels = set(re.findall(r"cpp_fused_\w+", code))
    assert kernels
    assert not [name for name in kernels if "clone" in name or "copy" in name]


@pytest.mark.parametrize(("windows", "blocks"), [
    ((None,) * 30, 6), ((None,) * 7, 1), ((None,) * 5, 5), ((4, None) * 6, 6), ((4, 4, 4, None) * 7, 4), ((4, None, None), 3),
    ((4,) * 9 + (None,), 1)])
def test_stretches_are_alike(windows, blocks):
    assert blocks_per_graph(replace(tiny_config(), depth=len(windows), windows=windows)) == blocks


def test_members_of_a_group_share_a_prefill_and_nothing_else(model, monkeypatch):
    """A group is as many requests at addresses of their own; it is computed once, even where its members wait for slots."""
    group = [GenerationRequest(PROMPTS[1], DRAWN, ("g",), group=5)]
    apart_ = [GenerationRequest(PROMPTS[1], DRAWN, ("g",), first=member) for member in range(5)]
    due = [generate(model, [request])[0] for request in apart_]
    engine = Engine(model, slots=2, length=80, version="v")
    filled = []
    fill = engine.slots.fill
    monkeypatch.setattr(engine.slots, "fill", lambda prompts, slots: (filled.append(prompts), fill(prompts, slots)))
    engine.submit(group[0])
    found = {progress.member: progress.completion for progress in engine.drain()}
    assert [found[member].ids for member in range(5)] == [c.ids for c in due]
    assert len({c.ids for c in due}) == 5
    assert filled == [[PROMPTS[1][:-1]]]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_an_earlier_tenant_left_is_never_seen(family):
    model = lively(family)
    engine = Engine(model, slots=2, length=80, version="v")
    for tensor in (*engine.slots.cache.keys, *engine.slots.cache.values):
        tensor.fill_(1e4)
    tickets = [engine.submit(request) for request in requests(DRAWN)]
    found = {progress.ticket: progress.completion for progress in engine.drain()}
    due = generate(model, requests(DRAWN))
    assert [found[ticket].ids for ticket in tickets] == [c.ids for c in due]
    assert apart([found[ticket] for ticket in tickets], due) <= 1e-5


def test_a_source_that_is_overwritten_in_the_same_admission_is_read_first(model):
    """Slot 0 holds A, slot 1 holds B; then B is wanted in slot 0 and A in slot 1."""
    a, b = PROMPTS[1], PROMPTS[3]
    engine = Engine(model, slots=2, length=80, version="v")
    for prompt in (a, b):
        engine.submit(GenerationRequest(prompt, GREEDY))
    engine.drain()
    again = [engine.submit(GenerationRequest(prompt, GREEDY)) for prompt in (b, a)]
    found = {progress.ticket: progress.completion for progress in engine.drain()}
    assert [found[ticket].ids for ticket in again] == [c.ids for c in generate(model, [GenerationRequest(p, GREEDY) for p in (b, a)])]


def test_seeds_members_and_addresses_draw_differently(model):
    free = Sampling(max_new=12, temperature=1.5)
    asked = [GenerationRequest((1, 2), free, ("a",), group=2), GenerationRequest((1, 2), free, ("b",)),
             GenerationRequest((1, 2), replace(free, seed=1), ("a",))]
    assert len({c.ids for c in generate(model, asked)}) == 4
    assert generate(model, asked) == generate(model, asked)


# ── ends ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

def test_a_stop_id_ends_its_request_only(model):
    free = generate(model, requests(GREEDY))
    stop = free[0].ids[4]
    found = generate(model, requests(GREEDY), stop_ids=(stop,))
    assert found[0].ids == free[0].ids[: free[0].ids.index(stop) + 1]
    assert found[0].ended == "stop"
    assert all(c.ids == f.ids[: len(c.ids)] and (c.ended == "stop") == (c.ids[-1] == stop) for c, f in zip(found, free, strict=True))
    own = generate(model, [replace(requests(GREEDY)[0], stop_ids=())], stop_ids=(stop,))
    assert own[0].ids == free[0].ids


def test_a_stop_string_cuts_the_text_and_keeps_the_ids(model):
    """The string begins in one token and ends in another; several tokens a step, so that some come too many."""
    tokenizer = tiny_tokenizer()
    free = generate(model, requests(DRAWN)[:2], tokenizer=tokenizer)
    text = free[1].text
    at = next(i for i in range(4, len(text) - 1) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    stop = text[at : at + 2]
    asked = replace(requests(DRAWN)[1], stop=(stop,))
    for steps, ahead in ((1, 1), (8, 1), (2, 2)):
        engine = Engine(model, slots=2, length=80, version="v", tokenizer=tokenizer, steps=steps)
        engine._launches_ahead = ahead
        engine.submit(asked)
        (progress,) = engine.drain()
        found = progress.completion
        assert (found.text, found.ended) == (text[:at], "stop string")
        assert found.ids == free[1].ids[: len(found.ids)]
        assert stop in tokenizer.decode(found.ids, special=False)
        assert stop not in tokenizer.decode(found.ids[:-1], special=False)
        assert len(found.ids) == len(found.logprobs)


@pytest.mark.parametrize("steps", [1, 5])
def test_streamed_pieces_are_the_completion(model, steps):
    tokenizer = tiny_tokenizer()
    engine = Engine(model, slots=2, length=80, version="v", tokenizer=tokenizer, steps=steps)
    tickets = [engine.submit(replace(request, stream=True, stop=("zq",))) for request in requests(DRAWN)]
    texts, ids, ended = dict.fromkeys(tickets, ""), dict.fromkeys(tickets, ()), {}
    while not engine.idle:
        for progress in engine.step():
            assert progress.ticket not in ended
            texts[progress.ticket] += progress.text
            ids[progress.ticket] += progress.ids
            if progress.completion is not None:
                ended[progress.ticket] = progress.completion
    assert ended.keys() == set(tickets)
    for ticket, completion in ended.items():
        assert (texts[ticket], ids[ticket]) == (completion.text, completion.ids)
        assert completion.text == tokenizer.decode(completion.ids, special=False)


def test_a_cancelled_request_frees_its_slots_and_disturbs_nobody(model):
    engine = Engine(model, slots=2, length=80, version="v")
    unwanted, wanted = engine.submit(GenerationRequest(PROMPTS[1], DRAWN, ("x",), group=3)), engine.submit(requests(DRAWN)[0])
    for _ in range(4):
        engine.step()
    cut = engine.cancel(unwanted)
    assert engine.slots.running.tolist() == [0, 0]
    assert [(p.completion.ended, len(p.completion.ids)) for p in cut] == [("cancelled", 0), ("cancelled", 4), ("cancelled", 4)]
    (progress,) = engine.drain()
    assert progress.ticket == wanted
    assert progress.completion.ids == generate(model, requests(DRAWN)[:1])[0].ids
    assert engine.cancel(unwanted) == []


# ── versions ──────────────────────────────────────────────────────────────────────────────────────────────────────────

def nudged(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)


def test_weights_that_moved_are_not_served_under_the_old_name():
    model = lively("llama")
    engine = Engine(model, slots=2, length=80, version="one")
    engine.submit(requests(DRAWN)[1])
    engine.step()
    nudged(model)
    with pytest.raises(GuardStop, match="changed since version 'one'"):
        engine.step()
    with pytest.raises(UsageError, match="1 requests have begun under version 'one'"):
        engine.load("two")
    engine.load("two", begun="restart")
    (progress,) = engine.drain()
    assert progress.completion == generate(model, requests(DRAWN)[1:2], version="two", slots=2)[0]
    assert progress.completion.version == "two"


def test_no_key_of_an_earlier_version_is_used():
    """R06: the same prompt after an update. Also where the old weights had left no numbers."""
    model = lively("llama")
    engine = Engine(model, slots=2, length=80, version="one")
    engine.submit(requests(DRAWN)[1])
    engine.drain()
    for tensor in (*engine.slots.cache.keys, *engine.slots.cache.values):
        tensor.fill_(float("nan"))
    nudged(model)
    engine.load("two")
    engine.submit(requests(DRAWN)[1])
    (progress,) = engine.drain()
    assert progress.completion == generate(model, requests(DRAWN)[1:2], version="two", slots=2)[0]


def test_an_adapter_attached_behind_the_engines_back_is_noticed():
    model = lively("llama")
    engine = Engine(model, slots=2, length=80, version="one")
    attach(model, fresh(model.config, plan(model.config), 4, 2.0, 0, None))
    engine.submit(requests(DRAWN)[0])
    with pytest.raises(GuardStop, match="changed since version"):
        engine.step()
    with pytest.raises(UsageError, match="make a new engine"):
        engine.load("two")


def test_a_live_adapter_is_sampled_and_scored_alike():
    model = lively("llama")
    patch = fresh(model.config, plan(model.config), 4, 2.0, 0, None)
    plain = generate(model, requests(DRAWN))
    for parameter in attach(model, patch):
        torch.nn.init.normal_(parameter, 0, 0.2, generator=torch.Generator().manual_seed(1))
    found = generate(model, requests(DRAWN))
    assert [c.ids for c in found] != [c.ids for c in plain]
    due = completion_logprobs(model, [(p, c.ids) for p, c in zip(PROMPTS, found, strict=True)], DRAWN)
    assert max(float((torch.tensor(c.logprobs) - s).abs().max()) for c, s in zip(found, due, strict=True)) <= 2e-5


def test_completions_carry_the_fingerprint_where_no_version_is_given(model):
    assert {c.version for c in generate(model, requests(GREEDY))} == {fingerprint(model)}


def test_a_model_that_says_no_numbers_stops_the_run():
    model = lively("llama")
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(GuardStop, match="not finite"):
        generate(model, requests(DRAWN))


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize(("request_", "sentence"), [
    (GenerationRequest(()), "no tokens"), (GenerationRequest((320,)), "vocabulary ends at 319"),
                                                    (GenerationRequest((-1, 3)), "token id -1"),
    (GenerationRequest((1,) * 20), "context is 80"), (GenerationRequest((1,), Sampling(8), group=0), "at least 1 completion"),
    (GenerationRequest((1,), Sampling(8), stop_ids=tuple(range(9))), "at most 8 stop ids"),
    (GenerationRequest((1,), Sampling(8), stop=("x",)), "need a tokenizer")])
def test_what_cannot_be_served_is_refused(model, request_, sentence):
    engine = Engine(model, slots=2, length=80, version="v")
    with pytest.raises(UsageError, match=sentence):
        engine.submit(request_)
    assert engine.idle


@pytest.mark.parametrize(("slots", "length"), [(0, 80), (2, 1), (2, 257)])
def test_an_engine_that_cannot_be_is_refused(model, slots, length):
    with pytest.raises(UsageError, match=f"an engine of {slots} slots of {length} tokens"):
        Engine(model, slots=slots, length=length, version="v")

# ---------------------------------------------------------------- several turns


def conversation(engine, turns, max_new=6, *, follow=True, seed=3):
    """Greedy turns, after each of which five tokens are inserted; the tokens of each turn and the last prompt."""
    prompt, said, follows = tuple(range(40, 60)), [], None
    for turn in range(turns):
        ticket = engine.submit(GenerationRequest(prompt, Sampling(max_new=max_new, temperature=0.8, seed=seed), ("turn", turn),
                                                 follows=follows))
        [ended] = engine.drain()
        said.append(ended.completion)
        prompt, follows = (*prompt, *ended.completion.ids, *range(70 + turn, 75 + turn)), (ticket, 0) if follow else None
    return said, prompt


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "mixed", "gemma2", "gpt_oss"])
def test_a_turn_that_goes_on_from_an_earlier_one_says_what_a_new_prompt_would(family):
    model = lively(family)
    make = lambda: Engine(model, slots=2, length=120, version="v")
    (one, _), (two, _) = conversation(make(), 5), conversation(make(), 5, follow=False)
    assert [turn.ids for turn in one] == [turn.ids for turn in two]
    assert apart(one, two) < 1e-4


def test_five_turns_cost_little_more_than_their_own_tokens(model):
    """Without reuse every turn computes all of the turns before it."""
    engine, anew = (Engine(model, slots=2, length=120, version="v") for _ in range(2))
    _, prompt = conversation(engine, 5)
    conversation(anew, 5, follow=False)
    assert engine.forwarded <= 1.2 * len(prompt)
    assert anew.forwarded > 2 * len(prompt)


def test_turns_of_several_keep_their_slots_and_lose_nothing_when_these_are_taken(model):
    """Three conversations over two slots: some go on in place, some are computed anew, and all say the same."""
    def all_turns(slots, follow):
        engine, prompts = Engine(model, slots=slots, length=120, version="v"), [tuple(range(n, n + 9)) for n in (5, 6, 7)]
        before, said = {}, []
        for turn in range(3):
            tickets = {engine.submit(GenerationRequest(prompt, Sampling(max_new=4, temperature=0), (turn, n),
                                                       follows=before.get(n) if follow else None)): n for n, prompt in enumerate(prompts)}
            ended = {tickets[each.ticket]: each.completion for each in engine.drain()}
            before = {n: (ticket, 0) for ticket, n in tickets.items()}
            prompts = [(*prompt, *ended[n].ids, 90 + turn) for n, prompt in enumerate(prompts)]
            said.append([ended[n].ids for n in range(3)])
        return said
    assert all_turns(2, follow=True) == all_turns(3, follow=True) == all_turns(3, follow=False)


def test_no_turn_goes_on_from_keys_of_an_earlier_version():
    """Drawn, not greedy: of the likeliest token the reported log-probability is 0 whatever the keys."""
    model, drawn = lively("llama"), Sampling(max_new=4, temperature=1.0, seed=1)
    engine = Engine(model, slots=1, length=64, version="one")
    ticket = engine.submit(GenerationRequest((5, 6, 7), drawn))
    [first] = engine.drain()
    nudged(model)
    engine.load("two")
    prompt = (5, 6, 7, *first.completion.ids, 9)
    engine.submit(GenerationRequest(prompt, drawn, follows=(ticket, 0)))
    [again] = engine.drain()
    [due] = generate(model, [GenerationRequest(prompt, drawn)])
    assert again.completion.ids == due.ids
    assert apart([again.completion], [due]) < 1e-5


def test_a_prompt_that_does_not_begin_with_what_it_follows_is_computed_whole(model):
    engine = Engine(model, slots=1, length=64, version="v")
    ticket = engine.submit(GenerationRequest((5, 6, 7), Sampling(max_new=4, temperature=0)))
    engine.drain()
    engine.submit(GenerationRequest((8, 6, 7, 9, 10, 11, 12, 13), Sampling(max_new=4, temperature=0), follows=(ticket, 0)))
    [found] = engine.drain()
    [due] = generate(model, [GenerationRequest((8, 6, 7, 9, 10, 11, 12, 13), Sampling(max_new=4, temperature=0))])
    assert found.completion.ids == due.ids

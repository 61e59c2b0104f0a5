"""The engine on CUDA: kernels against their twins, captured steps against eager ones, the GPU against the CPU, no wait in a flight."""

import re
from dataclasses import replace

import pytest
import torch

from assay.generate.engine import Engine, generate
from assay.generate.generation_request import GenerationRequest, Sampling
from assay.generate.policy_logprobs import completion_logprobs
from assay.kernels.advance_slots import SlotState, TokenLog, advance_slots
from assay.kernels.cached_attention import fused_cached_attention, plain_cached_attention
from assay.kernels.draw_tokens import SamplingRule, fused_draw_tokens, plain_draw_tokens
from assay.model.placement import place_for_training
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config

pytestmark = pytest.mark.gpu
PROMPTS = [(1, 2, 3), tuple(range(40, 75)), (7,), (9, 8, 7, 6, 5, 4), (1, 2, 3, 4)]
DRAWN = Sampling(max_new=40, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5)
GREEDY = Sampling(max_new=40, temperature=0)


def lively(family, dtype=torch.float32, device="cuda"):
    """Head size 64, which every attention kernel takes."""
    config = replace(tiny_config(family), head_dim=64)
    model, g = initialised(config, 1), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.1)
    return place_for_training(model, device, compute=dtype, compile=False).eval()


def requests(sampling):
    return [GenerationRequest(prompt, sampling, ("test", index)) for index, prompt in enumerate(PROMPTS)]


def served(model, sampling, **options):
    engine = Engine(model, slots=3, length=96, version="v", **options)
    tickets = [engine.submit(request) for request in requests(sampling)]
    found = {progress.ticket: progress.completion for progress in engine.drain()}
    return [found[ticket] for ticket in tickets]


def apart(one, two):
    return max(abs(a - b) for x, y in zip(one, two, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True))


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("V", [49_152, 50_257, 320])
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), [
    (0.7, 50, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (0.8, 100, 0.95, 0.02), (0.0, 0, 1.0, 0.0), (1.3, 1, 1.0, 0.0)])
def test_draws_equal_the_twins(V, temperature, top_k, top_p, min_p):
    """Of 512 draws at most two may fall on the other side of an edge by rounding; log-probabilities agree where ids do."""
    rows = 512
    logits = torch.randn(rows, V, device="cuda", generator=torch.Generator("cuda").manual_seed(V)) * 3
    rule = SamplingRule(*(torch.full((rows,), value, device="cuda") for value in (temperature, top_k, top_p, min_p)))
    keys, counters = torch.randint(0, 2**62, (rows,), device="cuda"), torch.arange(rows, device="cuda")
    ids, logprobs = fused_draw_tokens(logits, rule, keys, counters)
    due_ids, due_logprobs = plain_draw_tokens(logits.cpu(), SamplingRule(*(part.cpu() for part in rule)), keys.cpu(), counters.cpu())
    same = ids.cpu() == due_ids
    assert int((~same).sum()) <= 2
    torch.testing.assert_close(logprobs.cpu()[same], due_logprobs[same], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("H", "K", "d"), [(9, 3, 64), (4, 4, 64), (32, 4, 128), (4, 2, 24)])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("turned", [False, True])
def test_attention_over_slots_equals_float64(dtype, bound, H, K, d, window, turned):
    """Inputs that are views of one product, slots of every length, and no number in any place that a slot must not see."""
    S, L = 64, 300
    g = torch.Generator("cuda").manual_seed(H)
    product = torch.randn(S, (H + 2 * K) * d, device="cuda", generator=g).to(dtype)
    q, k, v = (part.view(S, -1, d) for part in product.split([H * d, K * d, K * d], -1))
    keys, values = (torch.randn(S, L, K, d, device="cuda", generator=g).to(dtype) for _ in range(2))
    positions = torch.randint(0, L, (S,), device="cuda", generator=g)
    positions[:2] = torch.tensor([0, L - 1])
    turns = positions[:, None] * 10000 ** -(torch.arange(0, d, 2, device="cuda") / d) * turned
    q_due, k_due = (in_float64(x, turns) for x in (q, k))
    due = plain_cached_attention(q_due, k_due, v.double(), keys.double(), values.double(), positions, window, L)
    unseen = torch.arange(L, device="cuda") >= positions[:, None]
    keys[unseen], values[unseen] = float("nan"), float("nan")
    found = fused_cached_attention(q, k, v, keys, values, positions, window, L, (turns.cos(), turns.sin()) if turned else None)
    assert float((found.double() - due).norm() / due.norm()) < bound
    stored = keys[torch.arange(S), positions].double()
    assert float((stored - k_due).norm() / k_due.norm()) < bound
    assert turned or torch.equal(stored, k_due)


def in_float64(x, turns):
    z = torch.complex(*x.double().chunk(2, -1)) * torch.complex(turns.cos().double(), turns.sin().double())[:, None]
    return torch.cat([z.real, z.imag], -1)


@pytest.mark.parametrize("S", [3, 256, 1500])
def test_notes_equal_the_twins(S):
    g = torch.Generator().manual_seed(S)
    ints = torch.randint(0, 6, (8, S), generator=g)
    ints[1], ints[2], ints[3] = ints[1] + 10, ints[2] + 13, ints[3] > 0
    draws, logprobs = torch.randint(0, 9, (40, S), generator=g), torch.randn(40, S, generator=g)
    both = []
    for device in ("cpu", "cuda"):
        mine = ints.to(device, copy=True)
        log = TokenLog(torch.zeros_like(draws, device=device), torch.zeros_like(logprobs, device=device), torch.zeros_like(mine[0, :1]))
        for chosen, logprob in zip(draws.to(device), logprobs.to(device), strict=True):
            advance_slots(chosen, logprob, SlotState(*mine[:4], mine[4:]), log)
        both.append([x.cpu() for x in (mine, *log)])
    assert all(torch.equal(found, due) for found, due in zip(*both[::-1], strict=True))


# ── the engine ────────────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2", "assay", "mixed"])
@pytest.mark.parametrize("sampling", [DRAWN, GREEDY, Sampling(max_new=40, temperature=0.7)], ids=["all", "greedy", "temperature"])
def test_captured_steps_say_what_eager_ones_and_the_cpu_say(family, sampling):
    """fp32: the same ids everywhere, log-probabilities within 1e-4."""
    graphed, eager = (served(lively(family), sampling, graphed=graphed) for graphed in (True, False))
    on_cpu = served(lively(family, device="cpu"), sampling)
    assert [c.ids for c in graphed] == [c.ids for c in eager] == [c.ids for c in on_cpu]
    assert apart(graphed, eager) < 1e-4
    assert apart(graphed, on_cpu) < 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_policy_identity_in_bf16(family):
    """Sampled through cache, kernels and graph; scored by the training path: mean |Δ log p| within bf16's rounding."""
    model = lively(family, torch.bfloat16)
    for sampling in (Sampling(max_new=40, temperature=0.7), Sampling(max_new=40, temperature=0.7, top_k=200)):
        found = served(model, sampling)
        due = completion_logprobs(model, [(p, c.ids) for p, c in zip(PROMPTS, found, strict=True)], sampling)
        gap = torch.cat([(torch.tensor(c.logprobs) - s).abs() for c, s in zip(found, due, strict=True)])
        assert float(gap[gap.isfinite()].mean()) < 0.03
        assert int((~gap.isfinite()).sum()) <= 2  # a token at the edge of top-k


def test_a_graph_takes_up_new_weights():
    """Casts are refreshed in place; a captured graph must see them, and the keys of the old weights must be gone."""
    model = lively("llama", torch.bfloat16)
    engine = Engine(model, slots=3, length=96, version="one")
    for version in ("one", "two"):
        if version == "two":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            engine.load(version)
        tickets = [engine.submit(request) for request in requests(GREEDY)]
        found = {progress.ticket: progress.completion for progress in engine.drain()}
        assert [found[t].ids for t in tickets] == [c.ids for c in served(model, GREEDY)]
        assert {c.version for c in found.values()} == {version}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixed"])
def test_compiled_stretches_copy_nothing_of_the_cache(family):
    """One graph each, without a break; what the compiler makes itself are norms, sums and activations."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    engine = Engine(lively(family, torch.bfloat16), slots=3, length=96, version="v", graphed=False)
    engine.slots.compile(fullgraph=True)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(engine.slots.step, 96, False)
    kernels = set(re.findall(r"triton_\w*fused\w*", "".join(codes)))
    assert kernels
    assert not [name for name in kernels if "clone" in name or "copy" in name]


def test_a_flight_waits_for_nothing():
    model = lively("llama", torch.bfloat16)
    engine = Engine(model, slots=3, length=96, version="v")
    for request in requests(DRAWN):
        engine.submit(request)
    engine.step()  # captures
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.slots.launch(4, 96, True)
        engine.slots.launch(4, 96, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_trainers_compiled_model_is_sampled_from():
    """place_for_training compiles the trainer's blocks; prefill and decoding run beside that."""
    model = place_for_training(initialised(replace(tiny_config("llama"), head_dim=64), 1), "cuda")
    model(torch.arange(64, device="cuda")[None])
    completions = generate(model, requests(Sampling(max_new=20, temperature=0.8)), version="v")
    assert all(len(c.ids) == 20 for c in completions)

# ── several turns ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 0.2)])
def test_a_turn_that_goes_on_in_its_slot_is_the_same_as_one_from_the_beginning(family, dtype, bound):
    """Its log-probabilities are those of the trainer's path over the whole text; fewer tokens are computed for them."""
    model, sampling = lively(family, dtype), Sampling(max_new=12, temperature=0.9, seed=5)
    engine, before, prompt = Engine(model, slots=3, length=128, version="v"), None, tuple(range(40, 60))
    for turn in range(4):
        ticket = engine.submit(GenerationRequest(prompt, sampling, ("turn", turn), follows=before))
        [ended] = engine.drain()
        [due] = completion_logprobs(model, [(prompt, ended.completion.ids)], sampling)
        assert max(abs(a - b) for a, b in zip(ended.completion.logprobs, due.tolist(), strict=True)) < bound
        before, prompt = (ticket, 0), (*prompt, *ended.completion.ids, *range(70, 75))
    assert engine.forwarded <= 1.2 * len(prompt)

"""The sampler's Triton kernels in Triton's interpreter, on the CPU. Run by test_interpreted.py.

Blocks are shrunk, so that a row takes several and ends inside one: groups of 4 logits, of which 16 are held at once.
"""

import pytest
import torch

from assay.kernels import draw_tokens
from assay.kernels.advance_slots import SlotState, TokenLog, fused_advance_slots, plain_advance_slots
from assay.kernels.cached_attention import LAUNCH, fused_cached_attention, plain_cached_attention
from assay.kernels.draw_tokens import SamplingRule, fused_draw_tokens, plain_draw_tokens, truncated_logprobs, uniforms

SMALL = LAUNCH._replace(block=16)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # int64 products wrap, as they should
# (temperature, top_k, top_p, min_p), all in one batch
RULES = [(1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (0.9, 20, 0.6, 0.0), (1.0, 0, 1.0, 0.1), (0.0, 5, 0.5, 0.0),
         (0.6, 1, 1.0, 0.0), (1.0, 40, 0.9, 0.05), (2.0, 999, 0.99, 0.0), (1.0, 16, 1.0, 0.0), (1.0, 17, 1.0, 0.0), (1.5, 12, 0.9, 0.02),
         (1.0, 0, 0.3, 0.0), (1.0, 203, 1.0, 0.0), (3.0, 202, 1.0, 0.0), (5.0, 0, 1.0, 0.4), (1.0, 5, 0.0, 0.0), (9.0, 0, 0.0, 0.0),
         (9.0, 50, 0.5, 0.0), (5.0, 12, 0.99, 0.6), (9.0, 50, 0.99, 0.6)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for name, value in (("PART", 64), ("_GROUP", 4), ("TILE", 16)):
        monkeypatch.setattr(draw_tokens, name, value)


def rule(rows):
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingRule(torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))


def check(logits, rows):
    """Every rule on every row of logits: ids and log-probabilities of the twin."""
    logits, chosen = logits.repeat_interleave(len(rows), 0), rule(rows * len(logits))
    keys, counters = torch.arange(len(logits)) * 2**57, torch.arange(len(logits)) % 5
    ids, logprobs = fused_draw_tokens(logits, chosen, keys, counters)
    due_ids, due_logprobs = plain_draw_tokens(logits, chosen, keys, counters)
    assert ids.tolist() == due_ids.tolist()
    torch.testing.assert_close(logprobs, due_logprobs, atol=1e-5, rtol=1e-5)


def noise(rows, V, scale=3.0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(V)) * scale


@pytest.mark.parametrize(("V", "rows"), [(203, RULES), (128, RULES[3:4]), (5, RULES[3:5])])
def test_the_draw_equals_its_twin(V, rows):
    check(noise(1, V), rows)


def test_ties_at_the_edge_stay_together():
    """Three tokens share the second place: top-2 keeps all of them, and so does a nucleus that ends within them."""
    logits = torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0, -1.0]).expand(5, 6).contiguous()
    counters, keys = torch.arange(5), torch.full((5,), 14)  # whose five draws meet all four
    for row in ((1.0, 2, 1.0, 0.0), (1.0, 0, 0.6, 0.0)):
        ids, logprobs = fused_draw_tokens(logits, rule([row] * 5), keys, counters)
        assert set(ids.tolist()) == {1, 2, 3, 4}
        due = truncated_logprobs(logits[:1], rule([row]))[0]
        torch.testing.assert_close(logprobs, due[ids], atol=1e-6, rtol=1e-6)
        assert ids.tolist() == plain_draw_tokens(logits, rule([row] * 5), keys, counters)[0].tolist()


@pytest.mark.parametrize("tied", [9, 60])
def test_ties_over_few_groups_and_over_many(tied):
    """One token above, `tied` of them share the next place, spread over the row; the edge of every rule falls among them."""
    logits = torch.full((1, 203), -3.0)
    logits[0, 1:3 * tied:3] = 1.5
    logits[0, 100] = 2.0
    check(logits, [(1.0, k, p, 0.0) for k, p in ((2, 1.0), (8, 1.0), (0, 0.3), (5, 0.5), (1, 1.0), (40, 0.9))])


def test_a_flat_row():
    rows = [(1.0, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (0.5, 50, 0.9, 0.5), (0.0, 0, 1.0, 0.0)]
    check(torch.full((1, 203), 0.7), rows)


def test_tokens_that_are_ruled_out():
    """Three tokens are left, far from one another, with whole parts of the row ruled out; then none of the first 150."""
    sparse, late = torch.full((1, 203), float("-inf")), noise(1, 203)
    sparse[0, [3, 99, 202]] = torch.tensor([1.0, 0.5, 0.8])
    late[0, :150] = float("-inf")
    rows = [(1.0, 0, 1.0, 0.0), (1.0, 2, 1.0, 0.0), (1.0, 12, 1.0, 0.0), (1.0, 50, 0.9, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 0, 1.0, 0.8),
            (0.0, 0, 1.0, 0.0)]
    check(torch.cat([sparse, late]), rows)


def test_scores_far_apart_and_far_from_zero():
    """A part whose mass vanishes beside another's is never drawn from; what decides is the distance from the best."""
    logits = noise(1, 203) + 1000
    logits[0, :64] -= 400
    check(logits, RULES[:4] + RULES[9:12])


def test_a_small_top_k_needs_no_pass_over_the_row(monkeypatch):
    draw_tokens._kernels()  # which binds the functions
    monkeypatch.setattr(draw_tokens, "_by_passes", None)
    rows = [(1.0, k, p, 0.0) for k, p in ((1, 1.0), (7, 1.0), (16, 1.0), (16, 0.5), (0, 0.1))]
    check(noise(1, 203), [*rows, (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.3)])
    with pytest.raises(Exception, match="NoneType"):
        check(noise(1, 203), [(1.0, 17, 1.0, 0.0)])


def test_a_draw_at_the_very_end_takes_the_last_token_kept():
    """u = 1 - 2^-53, so that u · total rounds to the total in float32, beyond which nothing lies."""
    keys, counters, logits = torch.full((3,), 3558559446808474027), torch.zeros(3, dtype=torch.int64), noise(1, 203).expand(3, 203)
    assert uniforms(keys, counters).eq(1 - 2**-53).all()
    rows = rule([(1.0, 0, 1.0, 0.0), (1.0, 12, 1.0, 0.0), (5.0, 50, 1.0, 0.0)])
    ids, _ = fused_draw_tokens(logits.contiguous(), rows, keys, counters)
    assert ids.tolist() == plain_draw_tokens(logits, rows, keys, counters)[0].tolist()


def test_greedy_takes_the_lowest_id_of_the_best():
    logits = torch.tensor([[0.0, 3.0, -2.0, 3.0]])
    ids, logprobs = fused_draw_tokens(logits, rule([(0.0, 0, 1.0, 0.0)]), torch.tensor([7]), torch.tensor([0]))
    assert (ids.item(), logprobs.item()) == (1, 0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_said(bad):
    """Whether every logit is bad or one of them, wherever it stands and whatever the rule."""
    rows = [(1.0, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 50, 0.9, 0.0), (1.0, 0, 0.9, 0.1), (0.0, 0, 1.0, 0.0)]
    logits = noise(3, 203)
    logits[0], logits[1, 1], logits[2, 202] = bad, bad, bad
    logits = logits.repeat_interleave(len(rows), 0)
    ids, logprobs = fused_draw_tokens(logits, rule(rows * 3), torch.full((15,), 7), torch.arange(15))
    assert logprobs.isnan().all()
    assert 0 <= ids.min() <= ids.max() < 203


@pytest.mark.parametrize(("H", "K", "d", "window"), [(9, 3, 24, None), (4, 2, 16, 7), (2, 2, 8, 40), (3, 1, 6, 16)])
@pytest.mark.parametrize("turned", [False, True])
def test_attention_equals_its_twin(H, K, d, window, turned):
    """Slots of every length, strided inputs, and garbage in every place that no slot sees."""
    S, L = 6, 50
    g = torch.Generator().manual_seed(H)
    fused = torch.randn(S, (H + 2 * K) * d, generator=g)
    q, k, v = (part.view(S, -1, d) for part in fused.split([H * d, K * d, K * d], -1))
    keys, values = torch.randn(S, L, K, d, generator=g), torch.randn(S, L, K, d, generator=g)
    positions = torch.tensor([0, 3, 16, 33, 49, 1])
    rotary = angles(positions, d) if turned else None
    twin = [keys.clone(), values.clone()]
    due = plain_cached_attention(q, k, v, *twin, positions, window, L, rotary)
    for slot, position in enumerate(positions.tolist()):
        keys[slot, position:], values[slot, position:] = float("nan"), float("nan")
    found = fused_cached_attention(q, k, v, keys, values, positions, window, L, rotary, launch=SMALL)
    torch.testing.assert_close(found, due, atol=1e-5, rtol=1e-5)
    slots = torch.arange(S)
    torch.testing.assert_close(keys[slots, positions], twin[0][slots, positions], atol=1e-6, rtol=1e-6)
    assert turned != torch.equal(keys[slots[1:], positions[1:]], k[1:])
    assert torch.equal(values[slots, positions], v)
    keys[slots, positions] = twin[0][slots, positions]
    assert torch.equal(torch.nan_to_num(keys[:, :, 0, 0]), torch.where(torch.arange(L) <= positions[:, None], twin[0][:, :, 0, 0], 0))


@pytest.mark.parametrize(("scale", "softcap", "sinks"), [(0.4, None, False), (None, 1.5, False), (None, None, True), (0.3, 2.0, True)])
def test_attention_with_a_cap_or_sinks_equals_its_twin(scale, softcap, sinks):
    """A scale of its own (Granite), bent scores (Gemma 2) and sinks (gpt-oss), each against one softmax written out."""
    S, L, H, K, d = 5, 40, 6, 2, 16
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(S, heads, d, generator=g) for heads in (H, K, K))
    keys, values = torch.randn(S, L, K, d, generator=g), torch.randn(S, L, K, d, generator=g)
    positions, sink_H = torch.tensor([0, 3, 16, 33, 39]), torch.randn(H, generator=g) if sinks else None
    plainly = plain_cached_attention(q, k, v, keys.clone(), values.clone(), positions, 20, L)
    due = plain_cached_attention(q, k, v, keys.clone(), values.clone(), positions, 20, L, None, scale, softcap, sink_H)
    found = fused_cached_attention(q, k, v, keys, values, positions, 20, L, None, scale, softcap, sink_H, launch=SMALL)
    torch.testing.assert_close(found, due, atol=1e-5, rtol=1e-5)
    assert (due - plainly).norm() > 0.05 * plainly.norm(), "what is asked for must show"


def angles(positions, d):
    turns = positions[:, None] * 10000 ** -(torch.arange(0, d, 2) / d)
    return turns.cos(), turns.sin()


def test_attention_turns_by_complex_numbers():
    """A slot's own angle, in float64: the key is stored turned, the query only looks so, and what is turned is rounded once."""
    S, L, H, K, d = 4, 20, 4, 2, 12
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(S, heads, d, generator=g).half() for heads in (H, K, K))
    keys, values = (torch.randn(S, L, K, d, generator=g).half() for _ in range(2))
    positions = torch.tensor([0, 19, 7, 16])
    cos, sin = angles(positions, d)
    turn = torch.complex(cos.double(), sin.double())[:, None]
    q_due, k_due = (torch.cat([(z := torch.complex(*x.double().chunk(2, -1)) * turn).real, z.imag], -1) for x in (q, k))
    kept = [keys.double(), values.double()]
    due = plain_cached_attention(q_due, k_due, v.double(), *kept, positions, None, L)
    found = fused_cached_attention(q, k, v, keys, values, positions, None, L, (cos, sin), launch=SMALL)
    stored = keys[torch.arange(S), positions]
    torch.testing.assert_close(stored.double(), k_due, atol=1e-6, rtol=2.0**-11)
    assert float((found.double() - due).norm() / due.norm()) < 2e-3


@pytest.mark.parametrize("S", [1, 16, 37])
def test_notes_equal_their_twins(S):
    """Slots that run, rest, stop at one of their ids and reach their end, for as many steps as are written down."""
    g, steps = torch.Generator().manual_seed(S), 5
    ints = torch.randint(0, 6, (8, S), generator=g)
    ints[1], ints[2], ints[3] = ints[1] + 10, ints[2] + 11, ints[3] > 0
    ints[4:] = torch.where(ints[4:] < 3, ints[4:], -1)
    both = []
    for verb, options in ((plain_advance_slots, {}), (fused_advance_slots, {"block": 16})):
        mine = ints.clone()
        course = SlotState(*mine[:4], mine[4:])
        log = TokenLog(torch.full((steps, S), 99), torch.full((steps, S), 9.0), torch.zeros(1, dtype=torch.int64))
        draws = torch.Generator().manual_seed(7)
        for _ in range(steps - 1):
            verb(torch.randint(0, 9, (S,), generator=draws), torch.randn(S, generator=draws), course, log, **options)
        both.append((mine, *log))
    assert all(torch.equal(found, due) for found, due in zip(*both[::-1], strict=True))
    state, ids, _, cursor = both[1]
    assert cursor.item() == steps - 1
    assert bool((ids[-1] == 99).all())
    if S > 16:
        assert 0 < int(state[3].sum()) < int(ints[3].sum()) < S
        assert bool((ids[:-1] == -1).any())
        assert not torch.equal(state[0], ints[0])

"""Policy identity: silent to the floor, alarmed beyond it, and it says which side is off."""

from dataclasses import replace

import pytest
import torch

from assay.data.batch import Batch
from assay.errors import DataError
from assay.guard import policy_identity as guard
from assay.guard.policy_identity import (
    LogprobFloor,
    OutgrownFloor,
    check_floor,
    check_identity,
    check_on_policy,
    check_reference,
    check_sampled_ids,
    check_version,
    floor_anew,
    measure_logprob_floor,
    naive_logprobs,
)
from assay.guard.remote_policy import NO_FLOOR, floor_of_server
from assay.learn.policy import token_logprobs
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config
from assay.verdict import Outcome

FLOOR = LogprobFloor(1e-3, 8e-3, 100)
ON_POLICY = {"sampling/importance_sampling_ratio/mean": 1.0, "sampling/sampling_logp_difference/mean": 1e-3, "clip_ratio/region_mean": 0.0}


@pytest.mark.parametrize("family", ["llama", "assay", "gpt2", "mistral"])
def test_the_floor_is_rounding_and_the_third_opinion_agrees(family: str):
    model = initialised(tiny_config(family), 0)
    ids = torch.randint(0, 320, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()
    floor = measure_logprob_floor(model, ids, 0.7)
    assert check_floor(floor).outcome is Outcome.PROVEN
    assert floor.tokens == 3 * 39
    assert floor.mean < 1e-6
    naive = naive_logprobs(model, [row[:10] for row in ids], [row[10:] for row in ids], 0.7)
    with torch.no_grad():
        trainer, _ = token_logprobs(model, Batch(torch.tensor(ids), torch.zeros(3, 40)), 0.7)
    assert check_identity(trainer[:, 10:].tolist(), naive, floor).outcome is Outcome.PROVEN


def test_a_floor_that_is_no_rounding_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Decoding that forgets where it is would be forgiven everywhere else."""
    whole = guard.DecodeView
    monkeypatch.setattr(guard, "DecodeView", lambda cache, positions, horizon: whole(cache, positions.clamp(max=3), min(horizon, 4)))
    model = initialised(tiny_config(), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attn.out.weight"):
                parameter.mul_(20)
    ids = torch.randint(0, 320, (2, 30), generator=torch.Generator().manual_seed(0)).tolist()
    assert "decoding over the cache is another model" in check_floor(measure_logprob_floor(model, ids, 1.0)).reason


def test_the_floor_of_what_follows_a_prompt_is_that_of_the_whole_where_both_are_rounding(monkeypatch: pytest.MonkeyPatch):
    model = initialised(tiny_config(), 0)
    ids = torch.randint(0, 320, (2, 30), generator=torch.Generator().manual_seed(0)).tolist()
    floor = measure_logprob_floor(model, ids, 1.0, prompt=12)
    assert check_floor(floor).outcome is Outcome.PROVEN
    assert (floor.tokens, floor.rounding) == (2 * 18, 0.0)
    whole = guard.PrefillView  # a prompt that is filled into the wrong slots
    monkeypatch.setattr(guard, "PrefillView", lambda cache, places: whole(cache, places.flip(0)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attn.out.weight"):
                parameter.mul_(20)
    assert "decoding over the cache is another model" in check_floor(measure_logprob_floor(model, ids, 1.0, prompt=12)).reason
    with pytest.raises(DataError, match="at least 2 tokens"):
        measure_logprob_floor(model, ids, 1.0, prompt=30)


def test_a_coarse_dtype_explains_as_much_as_it_moves_and_no_more():
    model = initialised(tiny_config(), 0)
    model.compute_dtype = torch.float16
    ids = torch.randint(0, 320, (2, 30), generator=torch.Generator().manual_seed(0)).tolist()
    floor = measure_logprob_floor(model, ids, 1.0)
    assert 1e-5 < floor.rounding < 1e-2
    assert check_floor(floor).outcome is Outcome.PROVEN
    assert model.compute_dtype is torch.float16
    assert check_floor(LogprobFloor(0.052, 0.3, 252, rounding=0.05)).outcome is Outcome.PROVEN  # as SmolLM2 has it in bf16, on prompts
    assert "rounding explains 3e-02: decoding" in check_floor(LogprobFloor(0.052, 0.3, 252, rounding=0.01)).reason
    assert "from the same in fp32" in check_floor(LogprobFloor(0.2, 0.6, 252, rounding=0.2)).reason
    assert check_floor(LogprobFloor(0.01, 0.6, 252, rounding=float("nan"))).outcome is Outcome.REFUTED


def test_identity_by_its_mean_and_by_every_single_completion():
    sampler = [[-1.0, -2.0, -3.0]] * 50
    near = [[x + 1e-3 for x in row] for row in sampler]
    assert check_identity(sampler, near, FLOOR).outcome is Outcome.PROVEN
    far = [[x + 4e-3 for x in row] for row in sampler]
    assert check_identity(sampler, far, FLOOR).outcome is Outcome.REFUTED
    one = [*near[:-1], [-1.1, -2.0, -3.1]]  # the mean of all is still within its bound
    assert check_identity(sampler, one, FLOOR).outcome is Outcome.REFUTED
    assert "in completion 49" in check_identity(sampler, one, FLOOR).reason
    lost = [*near[:-1], [float("nan"), -2.0, -3.0]]
    assert check_identity(sampler, lost, FLOOR).outcome is Outcome.REFUTED
    assert "different numbers of tokens" in check_identity(sampler, [row[:2] for row in sampler], FLOOR).reason


def test_it_says_which_side_is_off():
    true, off = [[-1.0, -2.0]] * 4, [[-1.5, -2.5]] * 4
    assert "; the sampler is off (5.0e-01 and 0.0e+00" in check_identity(off, true, FLOOR, lambda: true).reason
    assert "; the trainer is off" in check_identity(true, off, FLOOR, lambda: true).reason
    assert "the sampler and the trainer are off" in check_identity([[-3.0, -3.0]] * 4, off, FLOOR, lambda: true).reason
    explained = check_identity(off, true, FLOOR, lambda: true, {"the base": lambda: off, "nobody": lambda: [[0.0, 0.0]] * 4}).reason
    assert explained.endswith("the sampler's are those of the base")


def test_versions():
    assert check_version(["3@ab"] * 4, "3@ab").outcome is Outcome.PROVEN
    assert "1 of 4 rollouts come from version '2@cd'" in check_version(["3@ab"] * 3 + ["2@cd"], "3@ab").reason
    assert "the same version by name, and other weights" in check_version(["3@cd"], "3@ab").reason
    assert check_version([], "3@ab").outcome is Outcome.UNPROVEN


def test_on_policy():
    assert check_on_policy(ON_POLICY, FLOOR, 0.2).outcome is Outcome.PROVEN
    assert "where 0 is due" in check_on_policy(ON_POLICY | {"clip_ratio/region_mean": 0.177}, FLOOR, 0.2).reason
    noisy = replace(FLOOR, most=0.1)  # where rounding alone reaches the clip, a few clipped tokens are no fault
    assert check_on_policy(ON_POLICY | {"clip_ratio/region_mean": 1e-4}, noisy, 0.2).outcome is Outcome.PROVEN
    assert check_on_policy(ON_POLICY | {"sampling/importance_sampling_ratio/mean": 1.02}, FLOOR, 0.2).outcome is Outcome.REFUTED
    assert check_on_policy(ON_POLICY | {"sampling/sampling_logp_difference/mean": float("nan")}, FLOOR, 0.2).outcome is Outcome.REFUTED


@pytest.mark.parametrize(("kl", "updates", "used", "outcome"), [
    (0.0, 0, "a", "PROVEN"), (1e-5, 0, "a", "PROVEN"), (0.01, 0, "a", "REFUTED"), (0.01, 3, "a", "PROVEN"), (0.0, 3, "a", "REFUTED"),
    (0.01, 3, "b", "REFUTED"), (float("nan"), 0, "a", "REFUTED"), (-0.1, 2, "a", "REFUTED")])
def test_the_reference(kl: float, updates: int, used: str, outcome: str):
    assert check_reference(kl, updates, FLOOR, "a", used).outcome == outcome


def test_ids():
    prompts, completions = [[1, 2], [3]], [[5, 6, 9], [7, 9]]
    tokens = torch.tensor([[1, 2, 5, 6, 9, 3, 7, 9, 0]])
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1]], dtype=torch.int32)
    weight = torch.tensor([[0, 0, 1, 1, 1, 0, 0.5, 0.5, 0]])
    batch = Batch(tokens, weight, documents)
    check = lambda batch, completions=completions: check_sampled_ids(batch, prompts, completions, stop_ids=[9], cap=4)
    assert check(batch).outcome is Outcome.PROVEN
    assert check(replace(batch, weight=torch.where(documents == 1, 0.0, weight))).outcome is Outcome.PROVEN  # one does not count at all
    assert "2 prompt ids and 3 sampled ones, 0 and 2 count" in check(replace(batch, weight=weight * (torch.arange(9) != 4))).reason
    assert "1 and 3 count" in check(replace(batch, weight=weight + (torch.arange(9) == 1))).reason
    assert "was never sampled" in check(replace(batch, tokens=tokens + (torch.arange(9) == 3))).reason
    assert "1 of 2 sampled sequences are not in the batch" in check(Batch(tokens[:, :5], weight[:, :5], documents[:, :5])).reason
    assert "its stop token was cut off" in check(batch, [[5, 6, 9], [7]]).reason


@torch.no_grad()
def test_a_floor_of_a_handful_of_tokens_in_bf16_refuses_no_sound_rollout():
    """Two honest paths of a small model round alike on a few tokens and otherwise on many."""
    model = initialised(tiny_config(), 0)
    model.norm.weight.mul_(10)
    model.compute_dtype = torch.bfloat16
    ids = torch.randint(0, 320, (64, 11), generator=torch.Generator().manual_seed(1))
    at_once = token_logprobs(model, Batch(ids, torch.zeros(ids.shape)), 1.0)[0][:, 3:]
    stepwise = guard._one_by_one(model, ids, 3, 1.0)
    for first in range(0, 64, 4):
        floor = measure_logprob_floor(model, ids[first : first + 4, :4].tolist(), 1.0, 3)
        for other in range(0, 64, 16):
            found = check_identity(stepwise[other : other + 16].tolist(), at_once[other : other + 16].tolist(), floor)
            assert found.outcome is Outcome.PROVEN, found.reason
        stale = check_identity((stepwise[:16] + 0.2).tolist(), at_once[:16].tolist(), floor)
        assert stale.outcome is Outcome.REFUTED


@torch.no_grad()
def test_a_floor_gives_room_for_what_rounding_does_to_both_paths():
    """A rollout on a GPU was refused: 1.8e-3 nats apart, where bf16 had moved the trainer by 1.7e-3, and the sampler by as much."""
    model = initialised(tiny_config(), 0)
    model.norm.weight.mul_(10)
    model.compute_dtype = torch.bfloat16
    ids = torch.randint(0, 320, (4, 40), generator=torch.Generator().manual_seed(1)).tolist()
    floor = measure_logprob_floor(model, ids, 1.0, 3)
    assert floor.mean <= floor.both <= floor.bound
    assert 1.5 * floor.rounding < floor.both < 3 * floor.rounding
    # where it was measured, both happened to round alike
    alike = LogprobFloor(mean=3e-4, most=2e-3, tokens=256, rounding=1.7e-3, spread=3e-4, both=3.4e-3)
    for apart, outcome in ((1.8e-3, Outcome.PROVEN), (3.3e-3, Outcome.PROVEN), (3.6e-3, Outcome.REFUTED)):
        assert check_on_policy(ON_POLICY | {"sampling/sampling_logp_difference/mean": apart}, alike, 0.2).outcome is outcome
    assert alike.bound_alone == pytest.approx(guard.SLACK * alike.both, rel=1e-3)
    assert floor_of_server(LogprobFloor(1e-3, 2e-3, 9), alike, torch.bfloat16).both == alike.both


@torch.no_grad()
def test_a_floor_that_the_weights_have_outgrown_is_measured_anew():
    """Weights that grow make rounding grow: a sound rollout is not refused for it, and one of other weights is."""
    model = initialised(tiny_config(), 0)
    model.compute_dtype = torch.bfloat16
    ids = torch.randint(0, 320, (16, 11), generator=torch.Generator().manual_seed(1))
    floor = measure_logprob_floor(model, ids[:4].tolist(), 1.0, 3)
    model.norm.weight.mul_(20)
    trainer = token_logprobs(model, Batch(ids, torch.zeros(ids.shape)), 1.0)[0][:, 3:].tolist()
    sampler = guard._one_by_one(model, ids, 3, 1.0)
    floors = OutgrownFloor()
    anew = lambda worst: floors.measure(model, ids[:, :3].tolist(), ids[:, 3:].tolist(), 1.0, worst)
    assert check_identity(sampler.tolist(), trainer, floor).outcome is Outcome.REFUTED
    assert check_identity(sampler.tolist(), trainer, floor, anew=anew).outcome is Outcome.PROVEN
    assert floors.over(floor).bound > floor.bound  # in force for whatever else is asked of these weights
    assert check_identity((sampler + 0.2).tolist(), trainer, floor, anew=anew).outcome is Outcome.REFUTED
    model.blocks[0].attn.out.weight.mul_(1.5)  # what the sampler does not have yet
    later = token_logprobs(model, Batch(ids, torch.zeros(ids.shape)), 1.0)[0][:, 3:].tolist()
    assert check_identity(sampler.tolist(), later, floor, anew=anew).outcome is Outcome.REFUTED


@torch.no_grad()
def test_a_floor_is_measured_anew_on_tokens_enough():
    """Short turns of which few hold a rare token, on which bf16 is farthest off: the longest four do not speak for them."""
    model = initialised(tiny_config(), 0)
    model.norm.weight.mul_(10)
    ids = torch.randint(0, 320, (64, 7), generator=torch.Generator().manual_seed(1)).tolist()
    assert floor_anew(model, [row[:3] for row in ids], [row[3:] for row in ids], 1.0, 0).tokens == 256
    assert floor_anew(model, [row[:3] for row in ids[:9]], [row[3:] for row in ids[:9]], 1.0, 0).tokens == 36
    long = torch.randint(0, 320, (6, 80), generator=torch.Generator().manual_seed(1)).tolist()
    assert floor_anew(model, [row[:3] for row in long], [row[3:] for row in long], 1.0, 0).tokens == 256


@torch.no_grad()
def test_a_floor_is_measured_anew_on_the_completion_that_is_farthest_off():
    """A policy that is sure of nearly all it says, to the last bit, and not of a short turn: a sound run in fp32 was refused for that."""
    model = initialised(tiny_config(), 0)
    model.norm.weight.fill_(100)
    prompts = torch.randint(0, 320, (13, 4), generator=torch.Generator().manual_seed(1))
    sure, unsure = prompts[:12], torch.cat([prompts[12:], torch.randint(0, 320, (1, 8), generator=torch.Generator().manual_seed(2))], 1)
    for _ in range(24):
        sure = torch.cat([sure, model(sure)[:, -1:].argmax(-1)], 1)
    rows = [*sure.tolist(), *unsure.tolist()]
    said = [row for ids in (sure, unsure) for row in guard._one_by_one(model, ids, 4, 1.0).tolist()]
    due = [row for ids in (sure, unsure) for row in token_logprobs(model, Batch(ids, torch.zeros(ids.shape)), 1.0)[0][:, 4:].tolist()]
    floors, floor = OutgrownFloor(), measure_logprob_floor(model, rows[:4], 1.0, 4)
    anew = lambda worst: floors.measure(model, [row[:4] for row in rows], [row[4:] for row in rows], 1.0, worst)
    assert check_identity(said, due, floor).outcome is Outcome.REFUTED
    assert check_identity(said, due, floor, anew=anew).outcome is Outcome.PROVEN
    said[-1][-1] += 1e-2  # of other weights
    assert check_identity(said, due, floor, anew=anew).outcome is Outcome.REFUTED


def test_a_floor_that_is_demanded_is_not_outgrown():
    """A server of the trainer's own kernels: what differs is refused, however far the trainer's weights round by now."""
    wide, said, asked = LogprobFloor(1e-3, 2e-3, 50), [[-1.0, -2.0]], list[str]()
    floors = OutgrownFloor(wide)
    assert floors.over(LogprobFloor(1e-6, 1e-6, 50)) == wide
    assert floors.over(NO_FLOOR) == NO_FLOOR
    found = check_identity(said, [[-1.0005, -2.0]], floors.over(NO_FLOOR), anew=lambda _: asked.append("anew") or wide)
    assert (found.outcome, asked) == (Outcome.REFUTED, [])
    assert check_identity(said, [[-1.0005, -2.0]], LogprobFloor(1e-6, 1e-6, 50), anew=lambda _: wide).outcome is Outcome.PROVEN

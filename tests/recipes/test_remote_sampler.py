"""Rollouts drawn by a server: what it samples from is the trainer's policy, proven after every hand-over, or the run stops."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.data.batch import Batch
from assay.errors import AssayError, GuardStop, UsageError
from assay.generate.generation_request import Completion, GenerationRequest, Sampling
from assay.generate.remote import HttpServer, RemoteDraw, RemoteReply, VllmServer, connect, fault_of_reply
from assay.guard.policy_identity import MOST_LAST_BITS, LogprobFloor, check_identity, measure_last_bits, measure_logprob_floor
from assay.guard.remote_policy import (
    NO_FLOOR,
    CanaryAnswers,
    canary_floor,
    canary_prompts,
    check_canaries,
    check_engine_floor,
    check_importance,
    floor_of_server,
)
from assay.learn.importance import corrected, truncated_importance
from assay.recipes import grpo as recipe
from assay.recipes.remote_sampler import RemoteSampler
from assay.serving.engine_thread import EngineThread, ServerSize
from assay.serving.server import serve_in_background
from assay.store.checkpoint import step_folders
from assay.testing.tiny_models import save_model, tiny_model, tokenizer_and_stops
from assay.verdict import Outcome
from assay.zoo import catalogue
from tests.recipes.sums import events, options, reinforced, steps_of, unproven


@pytest.fixture(scope="module")
def whole(knows_sums: Path) -> Path:
    """Sure of most that it says, so that the last bits of a rare token stand out: 4e-06 nats in one answer to a canary."""
    return knows_sums


@pytest.fixture(autouse=True)
def without_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch)


@pytest.fixture
def server(whole: Path) -> Iterator[str]:
    serving = EngineThread(ServerSize(slots=16, takes_weights=True))
    serving.open("policy", whole)
    with serve_in_background(serving) as url:
        yield url


def outcomes(event: dict[str, Any]) -> dict[str, str]:
    return {verdict["check"]: verdict["outcome"] for verdict in event["verdicts"]}


def test_a_run_drawn_by_a_server_learns_and_every_rollout_is_of_the_weights_that_it_names(whole: Path, server: str, tmp_path: Path):
    config = options(whole, tmp_path / "run", vllm_server_base_url=server, max_steps=3)
    assert not [verdict for verdict in reinforced(config) if verdict.outcome is Outcome.REFUTED]
    before = outcomes(events(config, "preflight")[0])
    assert {before[check] for check in ("engine_floor", "canaries", "reply", "seeds")} == {"PROVEN"}
    judged = [outcomes(event) for event in events(config, "rollout")]
    assert judged
    assert all({each[check] for check in ("canaries", "reply", "identity", "importance", "version")} == {"PROVEN"} for each in judged)
    rows = steps_of(config)
    assert len(rows) == 3
    assert all(row["sampling/effective_sample_size"] > 0.999 and 0 <= row["sampling/kl"] < 1e-8 for row in rows)
    assert len(list((tmp_path / "run" / "handed_over").iterdir())) == 1  # older ones are gone


def test_an_adapter_is_handed_over_and_nothing_is_corrected_where_nothing_differs(whole: Path, server: str, tmp_path: Path):
    config = options(whole, tmp_path / "run", model=str(whole), lora_r=4, vllm_server_base_url=server, max_steps=1,
                     vllm_importance_sampling_correction=False)
    assert not [verdict for verdict in reinforced(config) if verdict.outcome is Outcome.REFUTED]
    assert "sampling/kl" not in steps_of(config)[0]
    (place,) = (tmp_path / "run" / "handed_over").iterdir()
    assert (place / "adapter_config.json").exists()


@pytest.mark.parametrize(("name", "check", "weighed"), [
    ("prefix cache that outlives a reload", "canaries", True), ("prefix cache that outlives a reload", "canaries", False),
    ("reply of another version", "version", True), ("prompt encoded again by the server", "reply", True)])
def test_a_faulty_server_stops_the_run_before_anything_is_learned_from_it(name: str, check: str, weighed: bool, whole: Path, server: str,
                                                                          tmp_path: Path):
    """The zoo's faults, in the recipe itself: at the first rollout that they show in, which may need an update, and a cache that has
    not forgotten the canaries meanwhile one more."""
    config = options(whole, tmp_path / "run", vllm_server_base_url=server, max_steps=4, vllm_importance_sampling_correction=weighed)
    with catalogue()[name].plant(tmp_path), pytest.raises(GuardStop, match=f"{check}: "):
        recipe.grpo(config, lambda _: None)
    learned = [row for row in steps_of(config) if row["grad_norm"] > 0] if (tmp_path / "run" / "metrics.jsonl").exists() else []
    assert len(learned) <= 2


def test_a_run_goes_on_where_it_was_interrupted_and_hands_its_weights_over_again(whole: Path, server: str, tmp_path: Path):
    config = options(whole, tmp_path / "run", vllm_server_base_url=server, max_steps=4)
    with catalogue()["adapter name reused"].plant(tmp_path), pytest.raises(GuardStop):
        recipe.grpo(config, lambda _: None)
    assert not [verdict for verdict in reinforced(config) if verdict.outcome is Outcome.REFUTED]
    assert step_folders(tmp_path / "run" / "checkpoints")[-1].name == "step-000004"

# ---------------------------------------------------------------- servers


def test_a_server_that_takes_no_weights_is_refused_with_its_option(whole: Path):
    serving = EngineThread(ServerSize(slots=2))
    serving.open("policy", whole)
    with serve_in_background(serving) as url:
        with pytest.raises(UsageError, match="--rollouts"):
            connect(url, temperature=1.0, adapters=False)
        with pytest.raises(AssayError, match=r"409.*--rollouts"):
            HttpServer(url.removesuffix("/v1")).post("/v1/weights", {"path": str(whole), "version": "1"})
    with pytest.raises(AssayError, match="is the server that makes the rollouts running"):
        connect(url, temperature=1.0, adapters=False)


def test_weights_that_are_refused_leave_the_server_with_what_it_had(server: str, tmp_path: Path):
    http = HttpServer(server.removesuffix("/v1"))
    before = http.get("/v1/models")["data"]
    with pytest.raises(AssayError, match="no such file or folder"):
        http.post("/v1/weights", {"path": str(tmp_path / "nothing"), "version": "1"})
    assert http.get("/v1/models")["data"] == before
    with pytest.raises(AssayError, match="the version that replies shall name"):
        http.post("/v1/weights", {"path": str(tmp_path)})


class SpokenServer(HttpServer):
    """A vLLM of which only the words are needed: the real one is asked by tests/vllm."""

    def get(self, path: str, *, absent_ok: bool = False) -> Any:
        return {"/server_info?config_format=json": {"vllm_config": {"model_config": {
            "dtype": "torch.bfloat16", "max_model_len": 64, "logprobs_mode": "raw_logprobs"}}}}.get(path)


@pytest.mark.parametrize(("version", "temperature", "words"), [
    ("0.19.1", 1.0, "rollouts need 0.20"), ("0.32.0", 0.7, "--logprobs-mode processed_logprobs"), ("0.32.0", 1.0, "train an adapter")])
def test_a_vllm_that_cannot_say_what_is_needed_is_refused(version: str, temperature: float, words: str):
    with pytest.raises(UsageError, match=words):
        VllmServer.asked(SpokenServer("http://here"), version, temperature=temperature, adapters=False)


@pytest.mark.parametrize(("reply", "words"), [
    (RemoteReply([1, 2], [RemoteDraw([3], [-1.0], "stop", "v")]), None),
    (RemoteReply([1, 2, 3], [RemoteDraw([3], [-1.0], "stop", "v")]), "answered other ids"),
    (RemoteReply(None, [RemoteDraw([3], [-1.0], "stop", "v")]), "does not say which ids"),
    (RemoteReply([1, 2], []), "1 completions were asked for and 0 came"),
    (RemoteReply([1, 2], [RemoteDraw([3, 4], [-1.0], "stop", "v")]), "2 ids came with 1 log-probabilities"),
    (RemoteReply([1, 2], [RemoteDraw([3], [float("nan")], "stop", "v")]), "log-probability nan"),
    (RemoteReply([1, 2], [RemoteDraw([3], [0.1], "stop", "v")]), "log-probability 0.1"),
    (RemoteReply([1, 2], [RemoteDraw([3] * 5, [-1.0] * 5, "length", "v")]), "at most 4"),
    (RemoteReply([1, 2], [RemoteDraw([3], [-1.0], "abort", "v")]), "ended by 'abort'")])
def test_a_reply_is_read_whole_or_refused(reply: RemoteReply, words: str | None):
    found = fault_of_reply(reply, GenerationRequest((1, 2), Sampling(max_new=4)))
    assert found is None if words is None else words in (found or "")


def test_a_server_and_a_device_of_the_trainer_are_not_asked_for_together(whole: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="leave --sampler-device"):
        recipe.grpo(options(whole, tmp_path / "run", vllm_server_base_url="http://here", sampler_device="cpu"), lambda _: None)

# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize(("served", "alone", "outcome"), [
    (torch.bfloat16, 0.17, "PROVEN"), (torch.bfloat16, 0.5, "REFUTED"), (torch.float32, 0.17, "REFUTED")])
def test_one_rare_token_may_be_off_by_the_rounding_of_half_precision_logits(served: torch.dtype, alone: float, outcome: str):
    """As it was seen: 1.2e-02 nats a token, 0.17 in a completion of one token, and a floor measured on few tokens allowed 0.16."""
    own = LogprobFloor(1e-6, 1e-5, 256)
    floor = floor_of_server(LogprobFloor(9e-3, 5e-2, 256, 9e-3, 1e-2), own, served)
    trainer = [[-1.0] * 16 for _ in range(15)] + [[-9.0]]
    sampler = [[-1.0 + 0.012] * 16 for _ in range(15)] + [[-9.0 + alone]]
    assert check_identity(sampler, trainer, floor).outcome.value == outcome


def test_a_half_precision_server_with_lost_weights_is_still_refuted():
    floor = floor_of_server(LogprobFloor(9e-3, 5e-2, 256, 9e-3, 1e-2), LogprobFloor(1e-6, 1e-5, 256), torch.bfloat16)
    assert check_identity([[-1.2] * 16] * 8, [[-1.0] * 16] * 8, floor).outcome.value == "REFUTED"  # below what one alone may be off


def test_the_last_bits_are_those_of_any_token_of_the_weights_as_they_are_and_forgive_no_stale_keys():
    model, texts = tiny_model(), [tuple(range(40, 60)), tuple(range(50, 70))]
    small = measure_last_bits(model, texts, 1.0, 12)
    model.head_weight().data.mul_(16)  # the same states, of which louder logits are made
    loud = measure_last_bits(model, texts, 1.0, 12)
    assert small.demanded
    assert measure_logprob_floor(model, texts, 1.0, 12).mean * 2 < loud.mean, "of all tokens, not of those that were drawn"
    assert small.mean * 2 < loud.mean <= loud.most < MOST_LAST_BITS[1]
    most = LogprobFloor(*MOST_LAST_BITS, 0)
    assert check_identity([[-1.0] * 8] * 4, [[-1.001] * 8] * 4, most).outcome is Outcome.REFUTED  # keys of old weights: 0.01 and more


def test_canaries_are_long_repeated_and_begin_differently():
    found = canary_prompts([(1, 2, 3), (4, 5)], 12)
    assert found == [(1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2), (4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5)]
    assert found == canary_prompts([(1, 2, 3), (4, 5)], 12)


def test_importance_weights_are_those_of_the_textbook_and_cut_at_the_cap():
    trainer, sampler = torch.tensor([[7.0, -1.0, -2.0, -0.5]]), torch.tensor([[0.0, -1.0, -2.5, -3.0]])
    counts = torch.tensor([[False, True, True, True]])
    found = truncated_importance(trainer, sampler, counts, 3.0)
    weights = [1.0, float(torch.tensor(0.5).exp()), 3.0]
    assert found.weights_BT[0, 1:].tolist() == pytest.approx(weights)
    assert found.effective == pytest.approx(sum(weights) ** 2 / (3 * sum(weight**2 for weight in weights)))
    apart = [0.0, 0.5, 2.5]
    assert found.kl == pytest.approx(sum(float(torch.tensor(d).expm1()) - d for d in apart) / 3)
    assert (found.truncated, found.tokens) == (pytest.approx(1 / 3), 3)
    rows = Batch(torch.zeros(1, 4, dtype=torch.long), weight=counts.float(), advantage=torch.full((1, 4), -2.0), behaviour=sampler)
    weighed, _ = corrected(rows, trainer, 3.0)
    assert weighed.behaviour is trainer
    assert weighed.advantage is not None
    assert weighed.advantage[0, 1:].tolist() == pytest.approx([-2 * weight for weight in weights])


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), -9999.0])
def test_a_log_probability_that_is_none_cannot_hide_behind_the_cap(value: float):
    found = truncated_importance(torch.full((1, 3), -1.0), torch.tensor([[-1.0, value, -1.0]]), torch.ones(1, 3, dtype=torch.bool), 3.0)
    assert check_importance(found).outcome is Outcome.REFUTED


@pytest.mark.parametrize(("mean", "dtype", "same", "outcome"), [
    (1.9e-6, torch.float32, False, Outcome.PROVEN), (1.8e-2, torch.float32, False, Outcome.REFUTED),
    (1.8e-2, torch.bfloat16, False, Outcome.PROVEN), (0.2, torch.bfloat16, False, Outcome.REFUTED),
    (1.8e-2, torch.bfloat16, True, Outcome.REFUTED), (0.0, torch.float32, True, Outcome.PROVEN),
    (1e-5, torch.float32, True, Outcome.REFUTED), (float("nan"), torch.float32, False, Outcome.REFUTED)])
def test_the_floor_of_an_engine_is_rounding_or_refused(mean: float, dtype: torch.dtype, same: bool, outcome: Outcome):
    """What vLLM was measured at in fp32 and in bf16; and where nothing is corrected, nothing may differ."""
    verdict = check_engine_floor(LogprobFloor(mean, mean, 100, 2.7e-3 if dtype == torch.bfloat16 else 0.0), "vLLM", dtype, same=same)
    assert verdict.outcome is outcome
    assert re.search("rounding explains|--no-vllm-importance-sampling-correction|differ by", verdict.reason)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_where_nothing_is_corrected_what_is_drawn_may_differ_by_nothing(cap: float | None, tmp_path: Path):
    """However far apart engine and trainer were found, or the trainer from itself."""
    model, (tokenizer, stops) = tiny_model(), tokenizer_and_stops()
    serving = EngineThread(ServerSize(slots=2, takes_weights=True))
    serving.open("policy", save_model(tmp_path / "policy", model).folder)
    with serve_in_background(serving) as url:
        sampler = RemoteSampler(model, tokenizer, stops, connect(url, temperature=1.0, adapters=False),
                                write=lambda folder, _: save_model(folder, model), folder=tmp_path / "handed", texts=[range(40, 60)],
                                temperature=1.0, cap=cap)
        sampler.load(0)
        assert {verdict.outcome for verdict in sampler.verdicts()} == {Outcome.PROVEN}
        sampler.floor = wide = LogprobFloor(0.02, 0.07, 35)
        floors = sampler.identity_floor(wide), sampler._canary_floor(sampler._ask_canaries())
    assert all(floor.demanded is (cap is None) for floor in floors)
    assert all((floor.bound_alone < 1e-4) is (cap is None) for floor in floors)


@pytest.mark.parametrize(("apart", "outcome"), [(0.0103, Outcome.PROVEN), (0.018, Outcome.PROVEN), (0.022, Outcome.REFUTED)])
def test_a_server_in_bf16_may_be_as_far_off_as_its_own_kernels_round(apart: float, outcome: Outcome):
    """Seen: 1.03 times what our kernels' bf16 did on the same tokens, after an update by which rounding had outgrown the engine's floor."""
    exact = [[-1.0] * 8]
    answers = CanaryAnswers([(1, 2)], [Completion((3,) * 8, (-1.0,) * 8, "length", "1@a")], server=[[-1.0 - apart] * 8],
                            trainer=exact, exact=exact, rounded=[[-0.99] * 8], last_bits=NO_FLOOR)
    assert check_canaries(answers, canary_floor(LogprobFloor(1e-3, 2e-3, 64), answers), "1@a").outcome is outcome


def test_a_canary_may_be_off_by_the_last_bits_of_the_weights_as_they_are():
    """Of a corrected server too: its floor was measured on a few tokens of older weights."""
    exact, last_bits = [[-1.0] * 8], LogprobFloor(3e-5, 2e-4, 0)
    answers = CanaryAnswers([(1, 2)], [], server=exact, trainer=exact, exact=exact, rounded=exact, last_bits=last_bits)
    for engine, due in ((LogprobFloor(1e-6, 1e-5, 64), (3e-5, 2e-4)), (LogprobFloor(1e-3, 2e-3, 64), (1e-3, 2e-3))):
        floor = canary_floor(engine, answers)
        assert (floor.mean, floor.most) == due

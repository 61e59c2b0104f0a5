"""Rollouts by a real vLLM server: handed weights and adapters, asked after every hand-over, corrected, or refused."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.errors import AssayError, GuardStop
from assay.generate.generation_request import Sampling
from assay.generate.remote import HttpServer, RemoteRequest, VllmServer, connect
from assay.guard.policy_identity import version_name
from assay.recipes import grpo as recipe
from assay.recipes import remote_sampler
from assay.recipes.remote_sampler import RemoteSampler
from assay.store.artifact import build_model, open_artifact
from assay.testing.fault_injection import in_place_of, swap
from assay.testing.tiny_models import nudge, save_hf_folder, save_model, tiny_model, tokenizer_and_stops
from assay.verdict import Outcome
from tests.recipes.sums import events, options, reinforced, steps_of, taught, unproven

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(PYTHON is None, reason="vLLM lives in an environment of its own: make vllm")]
STARTED = 400  # seconds that vLLM has to start


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's attention on a CPU wants heads of 64. The output head is a matrix of its own: see the last test."""
    home = tmp_path_factory.mktemp("taught")
    return taught(home, save_model(home / "base64", tiny_model("llama", head_dim=64, tied=False)).folder, steps=150)


@pytest.fixture(scope="module")
def plain(whole: Path) -> Path:
    """The same weights in a folder that holds nothing else."""
    return save_hf_folder(whole.parent / "plain", build_model(open_artifact(whole)))


@contextlib.contextmanager
def served(model: Path, *more: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy", "--host",
               "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--max-num-seqs", "16", "--enforce-eager",
               "--enable-scale-out", "--logprobs-mode", "processed_logprobs", *more]
    with (model.parent / f"vllm-{port}.log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + STARTED
        while True:
            with contextlib.suppress(AssayError):
                HttpServer(f"http://127.0.0.1:{port}").get("/health")
                break
            assert process.poll() is None, Path(log.name).read_text()[-3000:]
            assert time.monotonic() < deadline, Path(log.name).read_text()[-3000:]
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def exact(plain: Path) -> Iterator[str]:
    with served(plain, "--dtype", "float32") as url:
        yield url


@pytest.fixture(scope="module")
def adaptable(plain: Path) -> Iterator[str]:
    with served(plain, "--dtype", "float32", "--enable-lora", "--max-lora-rank", "8") as url:
        yield url


@pytest.fixture(scope="module")
def rounded(plain: Path) -> Iterator[str]:
    with served(plain, "--dtype", "bfloat16") as url:
        yield url


@pytest.fixture(autouse=True)
def without_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    unproven(monkeypatch)


def judged(config: Any) -> dict[str, dict[str, Any]]:
    """Verdicts on the last rollout that was written down."""
    return {verdict["check"]: verdict for verdict in events(config, "rollout")[-1]["verdicts"]}


def refuted_by(config: Any) -> set[str]:
    return {verdict.check for verdict in reinforced(config) if verdict.outcome is Outcome.REFUTED}


def floor_in_words(config: Any) -> str:
    return next(verdict["reason"] for verdict in events(config, "preflight")[0]["verdicts"] if verdict["check"] == "engine_floor")


def test_a_whole_model_is_reloaded_at_every_step_and_answers_as_the_trainer_does(whole: Path, exact: str, tmp_path: Path):
    config = options(whole, tmp_path / "run", vllm_server_base_url=exact, temperature=0.9, max_steps=3)
    assert refuted_by(config) <= {"gain"}  # a few steps at this rate teach nothing that is asked for
    print(floor_in_words(config), judged(config)["canaries"]["reason"], judged(config)["importance"]["reason"], sep="\n")
    assert {judged(config)[check]["outcome"] for check in ("canaries", "reply", "identity", "importance", "version", "ids")} == {"PROVEN"}
    assert any(row["grad_norm"] > 0 for row in steps_of(config))


def test_a_cache_of_prefixes_that_is_not_reset_is_caught(whole: Path, exact: str, tmp_path: Path):
    """vLLM keeps its prefixes through a reload, and answers with them: that is the fault, and not resetting them plants it."""
    HttpServer(exact).post("/reset_prefix_cache", {})  # the run before had the same canaries
    config = options(whole, tmp_path / "run", vllm_server_base_url=exact, max_steps=6)
    with swap(VllmServer, "_reset_cache", lambda self: None), pytest.raises(GuardStop, match=r"canaries: .*keys and values") as stopped:
        recipe.grpo(config, lambda _: None)
    print(stopped.value)


def test_weights_that_are_not_reloaded_are_caught(whole: Path, exact: str, tmp_path: Path):
    """The server is told the new version's name and given the fork's folder."""
    kept: list[Path] = []

    def first_folder(usual: Any, server: VllmServer, folder: Path, version: str) -> None:
        if not kept:
            kept.append(save_hf_folder(tmp_path / "kept", build_model(open_artifact(folder))))
        usual(server, kept[0], version)

    config = options(whole, tmp_path / "run", vllm_server_base_url=exact, max_steps=6)
    with in_place_of(VllmServer, "take")(first_folder)(tmp_path), pytest.raises(GuardStop, match="canaries: ") as stopped:
        recipe.grpo(config, lambda _: None)
    print(stopped.value)


def test_an_adapter_joins_under_a_name_of_its_own_at_every_version(whole: Path, plain: Path, adaptable: str, tmp_path: Path):
    config = options(whole, tmp_path / "run", model=str(plain), lora_r=4, vllm_server_base_url=adaptable, max_steps=3, learning_rate=2e-3)
    assert refuted_by(config) <= {"gain"}  # a few steps at this rate teach nothing that is asked for
    print(floor_in_words(config), judged(config)["canaries"]["reason"], sep="\n")
    names = [model["id"] for model in HttpServer(adaptable).get("/v1/models")["data"]]
    assert len([name for name in names if "@" in name]) == 1  # the versions before are gone


def test_an_adapter_name_that_is_used_again_is_refused_or_caught(whole: Path, plain: Path, adaptable: str, tmp_path: Path):
    config = options(whole, tmp_path / "run", model=str(plain), lora_r=4, vllm_server_base_url=adaptable, max_steps=6, learning_rate=2e-3)
    with swap(remote_sampler, "version_name", lambda updates, name: version_name(0, "again")), \
            pytest.raises(AssayError, match=r"version: |canaries: |refused with 400") as stopped:
        recipe.grpo(config, lambda _: None)
    print(stopped.value)


def test_a_base_of_other_weights_is_refused_before_the_first_step(whole: Path, adaptable: str, tmp_path: Path):
    """The server was started with another base than the adapter's."""
    other = save_hf_folder(tmp_path / "other", tiny_model("llama", head_dim=64, tied=False, seed=5))
    config = options(whole, tmp_path / "run", model=str(other), lora_r=4, vllm_server_base_url=adaptable, max_steps=2)
    with pytest.raises(GuardStop, match=r"engine_floor: .*another model") as stopped:
        recipe.grpo(config, lambda _: None)
    print(stopped.value)


def test_in_bfloat16_what_it_draws_is_corrected_and_without_a_correction_refused(whole: Path, rounded: str, tmp_path: Path):
    config = options(whole, tmp_path / "corrected", vllm_server_base_url=rounded, max_steps=3)
    assert refuted_by(config) <= {"gain"}  # a few steps at this rate teach nothing that is asked for
    print(floor_in_words(config), judged(config)["canaries"]["reason"], judged(config)["importance"]["reason"], sep="\n")
    assert all(0.9 < row["sampling/effective_sample_size"] <= 1 for row in steps_of(config))
    same = options(whole, tmp_path / "same", vllm_server_base_url=rounded, max_steps=2, vllm_importance_sampling_correction=False)
    with pytest.raises(GuardStop, match=r"engine_floor: .*without a correction") as stopped:
        recipe.grpo(same, lambda _: None)
    print(stopped.value)


def test_ids_go_in_and_come_out_with_seeds_that_count(whole: Path, rounded: str):
    server = connect(rounded, temperature=1.0, adapters=False)
    request = RemoteRequest(tuple(range(40, 60)), Sampling(max_new=6), 7, 2, (258,))
    one, again, other = server.ask(request), server.ask(request), server.ask(request._replace(seed=8))
    assert one.prompt == list(request.prompt)
    assert [draw.ids for draw in one.draws] == [draw.ids for draw in again.draws]
    assert one.draws[0].ids != one.draws[1].ids
    assert [draw.ids for draw in one.draws] != [draw.ids for draw in other.draws]


def test_a_tied_head_that_vllm_forgets_is_caught(tmp_path: Path):
    """A fault of vLLM 0.32.0 on a CPU: a reload leaves the packed copy of a tied output head as it was, and says so in its log alone."""
    model, (tokenizer, stops) = tiny_model("llama", head_dim=64), tokenizer_and_stops()
    with served(save_hf_folder(tmp_path / "tied", model), "--dtype", "float32") as url:
        server = connect(url, temperature=1.0, adapters=False)
        if server.words != "vLLM 0.32.0":
            pytest.skip(f"{server.words} may have no such fault")
        sampler = RemoteSampler(model, tokenizer, stops, server, write=lambda folder, _: save_hf_folder(folder, model),
                                folder=tmp_path / "handed_over", texts=[tuple(range(40, 60))], temperature=1.0, cap=3.0)
        sampler.load(0)
        assert {verdict.outcome for verdict in sampler.verdicts()} == {Outcome.PROVEN}
        nudge(model, 0.01)
        sampler.load(1)
    (found,) = [verdict for verdict in sampler.verdicts() if verdict.check == "canaries"]
    print(found.reason)
    assert found.outcome is Outcome.REFUTED


TRANSFER = """
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
print("engines:", *sorted(WeightTransferEngineFactory._registry))
try:
    NCCLLibrary()
except (OSError, ValueError) as error:
    print("nccl:", error)
try:
    IPCWeightTransferUpdateInfo(names=["a"], dtype_names=["float32"], shapes=[[1]], ipc_handles_pickled="gASVAAAAAAAAAAA=")
except ValueError as error:
    print("ipc:", error)
"""


def test_no_engine_of_vllms_transfer_api_serves_a_cpu_and_the_one_over_http_wants_pickle():
    """Why weights go by folder: docs/guide.md says it, and this is the day to read it again where a later vLLM says otherwise."""
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ALLOW_INSECURE_SERIALIZATION"}
    told = subprocess.run([str(PYTHON), "-c", TRANSFER], capture_output=True, text=True, timeout=STARTED, check=True, env=environment)
    said = dict(line.split(": ", 1) for line in told.stdout.splitlines() if ": " in line)
    print(told.stdout)
    assert set(said["engines"].split()) == {"ipc", "modelexpress", "nccl", "nccl_m2n", "sharded_rdt", "sparse_nccl"}
    assert "nccl" in said
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" in said["ipc"]

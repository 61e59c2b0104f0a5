"""Serving on CUDA: graphs are captured and replayed on the engine's own thread, and an adapter joins beside running requests."""

import queue

import pytest
import torch

from assay.generate.generation_request import GenerationRequest, Sampling
from assay.serving.engine_thread import EngineThread, PendingCall, ServerSize
from assay.store import checkpoint
from assay.testing.tiny_models import nudge, save_adapter, save_model, tiny_model
from assay.verdict import Outcome, overall, proven

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_joins_and_each_name_answers_with_its_own_weights(tmp_path, dtype):
    base = save_model(tmp_path / "base", nudge(tiny_model("qwen3"), 0.2)).folder
    adapter = save_adapter(tmp_path / "adapter", base, far=0.2)
    checkpoint.write_hallmark(adapter, [proven("test", "made for a test")])
    serving = EngineThread(ServerSize(slots=4, queue=16, length=128, device="cuda", dtype=dtype))
    arrivals: queue.SimpleQueue = queue.SimpleQueue()
    try:
        serving.open("base", base)
        for seed in range(8):
            serving.submit(PendingCall(serving.find("base"), GenerationRequest((1, 2, 3), Sampling(100, seed=seed), stop_ids=()),
                                lambda item, _: arrivals.put(("base", item)))).result()
        joined = serving.open_adapter("a@1", adapter.folder)
        assert overall(joined.verdicts) is Outcome.PROVEN
        serving.submit(PendingCall(joined, GenerationRequest((1, 2, 3), Sampling(100, seed=0), stop_ids=()),
                            lambda item, _: arrivals.put(("a@1", item)))).result()
        ended = []
        while len(ended) < 9:
            name, item = arrivals.get(timeout=120)
            if item.completion is not None:
                ended.append((name, item.completion))
        assert {name: {c.version for n, c in ended if n == name} for name in ("base", "a@1")} == {
            name: {serving.find(name).digest} for name in ("base", "a@1")}
        assert len({completion.ids for _, completion in ended}) == 9
    finally:
        serving.stop()

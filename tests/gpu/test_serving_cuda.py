"""Serving on CUDA: graphs are captured and replayed on the engine's own thread, and an adapter joins beside running requests."""

import json
import queue

import pytest
import torch

from assay.generate.engine import generate
from assay.generate.generation_request import GenerationRequest, Sampling
from assay.generate.token_grammar import GrammarVocabulary
from assay.model.placement import place_for_inference
from assay.serving.engine_thread import EngineThread, PendingCall, ServerSize
from assay.store import checkpoint
from assay.testing.tiny_models import nudge, save_adapter, save_model, tiny_model, tiny_tokenizer
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_form_is_followed_beside_free_completions(dtype):
    """Steps of a form are not captured; those of its neighbours before and after are, and say what they say alone."""
    tokenizer, model = tiny_tokenizer(), place_for_inference(nudge(tiny_model("qwen3", vocab=270), 0.3), "cuda", compute=dtype)
    schema = {"type": "object", "properties": {"dark": {"type": "boolean"}}, "required": ["dark"], "additionalProperties": False}
    form = GrammarVocabulary(tokenizer, vocab=270, stop_ids=[tokenizer.eos]).json_schema(schema)
    free = GenerationRequest((5, 6, 7), Sampling(60, seed=1), ("free",), stop_ids=())
    bound = GenerationRequest((5, 6, 7), Sampling(40, seed=1), ("bound",), stop_ids=(tokenizer.eos,), grammar=form)
    alone, = generate(model, [free], tokenizer=tokenizer, slots=2)
    beside, shaped = generate(model, [free, bound], tokenizer=tokenizer, slots=2)
    assert json.loads(shaped.text)["dark"] in (True, False)
    assert all(value <= 0 for value in shaped.logprobs)
    if dtype == torch.float32:
        assert beside.ids == alone.ids

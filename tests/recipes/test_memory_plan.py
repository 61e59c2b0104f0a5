"""Memory plans: parameters as the real models have them, parts that follow the options, and refusals that say what would fit."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from assay.cli import run as assay
from assay.data.batch import Batch
from assay.errors import UsageError
from assay.generate.engine import Engine
from assay.guard.loss_preflight import preflight_loss
from assay.learn.objectives import next_token
from assay.model.families import config_from_hf, parameter_shapes
from assay.model.lora import attach, fresh, plan
from assay.model.placement import place_for_inference, place_for_training
from assay.model.transformer import Transformer, initialised
from assay.recipes import memory_plan, sft
from assay.recipes.grpo_options import Grpo
from assay.recipes.memory_plan import (
    GIB,
    NEAR,
    MemoryPlan,
    PlannedModel,
    PlannedWork,
    activation_bytes,
    adapter_parameters,
    alternatives,
    compared_with_use,
    layer_entries,
    logit_bytes,
    plan_memory,
    plan_pretraining,
    planned_model,
    planned_work,
    preflight_bytes,
    record_use,
    require_fit,
    score_bytes,
)
from assay.recipes.options import Distill, Pretrain, Sft
from assay.recipes.run import Run
from assay.recipes.time_plan import forward_operations, step_operations, step_seconds
from assay.store.artifact import open_artifact
from assay.store.export_artifact import export_artifact
from assay.testing.tiny_models import save_adapter, save_hf_folder, save_model, tiny_config, tiny_model, tiny_tokenizer
from assay.verdict import Outcome, overall
from tests.live_bytes import LiveBytes

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 40960, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
         "rope_theta": 1000000, "vocab_size": 151936, "torch_dtype": "bfloat16"}
REAL: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-8B": (QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36,
                          "tie_word_embeddings": False}, 8_190_735_360),
    "Qwen3-0.6B": (QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28,
                            "tie_word_embeddings": True}, 596_049_920),
    "SmolLM2-1.7B": ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 2048,
                      "intermediate_size": 8192, "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 24,
                      "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "rope_theta": 130000, "tie_word_embeddings": True,
                      "torch_dtype": "bfloat16", "vocab_size": 49152}, 1_711_376_384),
}


SMOLLM2_135M = REAL["SmolLM2-1.7B"][0] | {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_hidden_layers": 30,
                                         "num_key_value_heads": 3, "rope_theta": 100000}
REAL["SmolLM2-135M"] = SMOLLM2_135M, 134_515_008
UNFUSED = ("gemma2", "gpt_oss")  # soft caps, and sinks
_4K, _16K = PlannedWork(4, 1024, lora_r=16), PlannedWork(16, 1024)
_GRPO = PlannedWork(4, 1024, 16, slots=128, slot_length=288, reference=True)
# Peaks in GiB that torch's allocator told on an H200. "steps": a loop alone; "total": a run with its preflight and its saves.
MEASURED = [
    ("results/size.txt, 8b lora", "Qwen3-8B", _4K, "steps", 35.48),
    ("results/size.txt, 1.7b lora", "SmolLM2-1.7B", _4K, "steps", 12.38),
    ("results/size.txt, 8b sft", "Qwen3-8B", _4K, "total", 36.15),
    ("results/size.txt, 8b nf4-16gib", "Qwen3-8B", PlannedWork(1, 1024, 16, checkpointing=True, base_dtype="nf4"), "steps", 7.22),
    ("results/size.txt, 8b grpo, prompts of at most 32 tokens", "Qwen3-8B", _GRPO, "steps", 40.88),
    ("results/time-to-proof.txt, 8b", "Qwen3-8B", _4K, "total", 35.67),
    ("results/time-to-proof.txt, 135m, the largest of five", "SmolLM2-135M", _16K, "total", 13.29),
    ("results/time-to-proof.txt, 135m, the smallest of five", "SmolLM2-135M", _16K, "total", 13.18),
    ("results/train.txt, smollm2 assay", "SmolLM2-135M", _16K, "steps", 10.9),
    ("results/sft-speed.txt, LoRA r16, 32 rows of 512", "SmolLM2-135M", PlannedWork(32, 512, 16), "steps", 10.2),
]


def real(name: str) -> PlannedModel:
    config = config_from_hf(REAL[name][0], (), name)
    return PlannedModel(config, 2 * PlannedModel(config, 0).parameters)


@pytest.mark.parametrize("name", REAL)
def test_parameters_are_those_of_the_real_models(name: str):
    assert real(name).parameters == REAL[name][1]


@pytest.mark.parametrize(("source", "model", "work", "what", "used"), MEASURED, ids=[row[0] for row in MEASURED])
def test_every_peak_that_was_measured_is_planned_within_the_promise(source: str, model: str, work: PlannedWork, what: str, used: float):
    assert getattr(plan_memory(real(model), work), what) / GIB == pytest.approx(used, rel=NEAR), source


@pytest.mark.parametrize("whole", [False, True])
def test_the_preflight_is_planned_as_it_is_counted(whole: bool):
    """Storage by storage, with activations made again as on a GPU, beside what stays."""
    model = tiny_model("qwen3", width=192, depth=4, heads=6, kv_heads=3, head_dim=32, hidden=576, vocab=1024, windows=(None,) * 4)
    if not whole:
        attach(model.requires_grad_(False).to(torch.bfloat16), fresh(model.config, plan(model.config), 8, 2.0, 0, "base"))
    place_for_training(model, "cpu", compute=torch.bfloat16, recompute=True)
    tokens = torch.randint(0, 1000, (2, 96), generator=torch.Generator().manual_seed(0))
    weight = torch.ones(tokens.shape)
    weight[:, 0] = 0
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    stays = sum(p.numel() * p.element_size() for p in model.parameters()) + 12 * trained
    with LiveBytes() as live:
        assert overall(preflight_loss(model, next_token, Batch(tokens, weight))) is Outcome.PROVEN
    due = preflight_bytes(model.config, PlannedWork(2, 96, lora_r=0 if whole else 8), trained, whole=whole)
    assert stays + due == pytest.approx(stays + live.peak, rel=NEAR)


def bytes_of_a_step(model: Transformer, length: int) -> tuple[int, int]:
    """Bytes at the peak of a step, and of a pass without gradients, of one row, storage by storage."""
    tokens = torch.randint(0, 200, (1, length), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, (torch.arange(length) > 0).float()[None])
    with LiveBytes() as step:
        next_token(model, batch).total.backward()
    with LiveBytes() as asked, torch.no_grad():
        next_token(model, batch)
    return step.peak, asked.peak


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("family", UNFUSED)
def test_scores_of_attention_that_no_fused_kernel_computes_are_planned_as_they_are_counted(family: str, rank: int, compute: torch.dtype,
                                                                                          recompute: bool):
    """Of a row so long that scores are nearly all there is: logits, which are not there at the same time, are counted beside them."""
    length = 1536 if recompute else 768
    model = tiny_model(family, max_length=length)
    if rank:
        attach(model.requires_grad_(False), fresh(model.config, plan(model.config), rank, 2.0, 0, "base"))
    place_for_training(model, "cpu", compute=compute, recompute=recompute)
    work = PlannedWork(1, length, lora_r=rank, compute=compute.itemsize, checkpointing=recompute, compiled=False)
    gradients = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    step, asked = bytes_of_a_step(model, length)
    logits = logit_bytes(model.config, work, whole=not rank)
    assert gradients + activation_bytes(model.config, work, whole=not rank) + logits == pytest.approx(step, rel=NEAR)
    assert score_bytes(model.config, length, length, compute.itemsize, compiled=False).ungraded == pytest.approx(asked, rel=NEAR)
    assert asked < step, "an evaluation is no more than a step"


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", UNFUSED)
def test_scores_that_a_compiled_layer_keeps_are_planned_as_the_compiler_keeps_them(family: str, compute: torch.dtype):
    """What torch's compiler chooses to keep of a layer does not depend on the device, nor on the code that it writes then."""
    model, kept = tiny_model(family, max_length=512), dict[int, int]()
    place_for_training(model, "cpu", compute=compute)
    for layer, block in enumerate(model.blocks):  # as `place_for_training` has them compiled
        compiled = block.attn if model.config.mixture_at(layer) else block
        assert isinstance(compiled, torch.nn.Module)
        compiled.compile(dynamic=False, backend="aot_eager_decomp_partition")

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.hidden(torch.randint(0, 300, (1, 512), generator=torch.Generator().manual_seed(0)))
    assert states.requires_grad
    scores = 512 * 512 * model.config.heads
    due = score_bytes(model.config, 512, 512, compute.itemsize, compiled=True).kept
    assert model.config.depth * due == pytest.approx(sum(size for size in kept.values() if size > scores), rel=NEAR)


def test_families_of_fused_attention_are_planned_as_they_were():
    works = (_4K, _16K, _GRPO, PlannedWork(1, 2048, checkpointing=True), PlannedWork(2, 1024, 16, processes=4, streamed=True))
    assert {name: [plan_memory(real(name), work).total for work in works] for name in REAL} == {
        "Qwen3-8B": [38654797824, 329962991616, 44352497664, 235096223744, 14996888064],
        "Qwen3-0.6B": [7170555904, 40079196160, 11458969600, 18896388096, 3868963840],
        "SmolLM2-1.7B": [13441896448, 88586510336, 20798181376, 49462042624, 5684380672],
        "SmolLM2-135M": [3129995904, 13837468416, 4008649344, 4691123712, 1448895648]}
    for family in ("llama", "gpt2", "qwen3", "gemma3_text", "qwen3_moe"):
        assert score_bytes(tiny_config(family), 64, 64, 2, compiled=True) == (0, 0, 0)
    for work in works:
        eager, plain = (plan_memory(real("Qwen3-8B"), replace(work, compiled=compiled)) for compiled in (False, True))
        assert eager.parts == plain.parts


@pytest.mark.parametrize("family", [*UNFUSED, "llama"])
def test_prompts_that_a_sampler_reads_are_planned_as_they_are_counted(family: str, tmp_path: Path):
    model = place_for_inference(tiny_model(family, max_length=1024), "cpu")
    engine = Engine(model, slots=2, length=520, stop_ids=(), version="1")
    where = save_hf_folder(tmp_path / "model", tiny_model(family, max_length=1024))
    config = Grpo(model=str(where), data=("a",), reward=("format",), out="b", device="cpu", prompts=2, num_generations=2,
                  max_prompt_length=512, max_completion_length=8)
    work = planned_work(config, planned_model(where), "cpu")
    with LiveBytes() as live, torch.no_grad():
        engine.slots.fill([tuple(range(n, n + 256)) * 2 for n in range(2)], [0, 1])
    if family == "llama":
        assert work.ungraded == 0
        return
    assert work.ungraded == pytest.approx(live.peak, rel=NEAR)
    assert plan_memory(planned_model(where), replace(work, rows=1, length=32)).parts["passes"] > work.ungraded / 2
    assert plan_memory(planned_model(where), replace(work, rows=8)).parts["passes"] == 0, "a step takes more than prompts do"


def test_scores_of_a_teacher_are_planned_and_layers_are_compiled_on_a_gpu_alone(tmp_path: Path):
    where, teacher = (save_hf_folder(tmp_path / family, tiny_model(family)) for family in ("llama", "gemma2"))
    given: dict[str, Any] = {"model": str(where), "data": ("a",), "out": "b", "batch_tokens": 512, "max_length": 256}
    online = Distill(**given, teacher=str(teacher), how="online")
    work = planned_work(online, planned_model(where), "cpu")
    assert (work.rows, work.ungraded) == (2, 2 * 256 * 256 * (4 * 12 + 1))
    assert planned_work(Sft(**given), planned_model(where), "cpu").ungraded == 0
    found = [planned_work(Sft(**given, fsdp=fsdp), planned_model(where), device).compiled for fsdp, device in
             ((False, "cuda"), (False, "cpu"), (True, "cuda"))]
    assert found == [True, False, False]
    shape = tiny_config("gemma2")
    kept = [plan_pretraining(Pretrain(corpus="a", out="b", fsdp=fsdp), shape, "cuda").work.compiled for fsdp in (False, True)]
    assert kept == [True, False]


def test_an_adapter_has_as_many_parameters_as_peft_gives_it():
    assert adapter_parameters(real("Qwen3-8B").config, 16) == 43_646_976  # what PEFT says of Qwen3-8B with r=16 on all linear layers
    assert adapter_parameters(real("Qwen3-8B").config, 16, ("q_proj",)) == 36 * 16 * (4096 + 4096)


def test_every_part_of_a_large_adapter_run():
    found = plan_memory(real("Qwen3-8B"), PlannedWork(4, 1024, lora_r=16))
    assert found.parts["weights"] == 2 * 8_190_735_360, "what is frozen stays in bf16, once"
    assert found.parts["masters"] == found.parts["gradients"] == 4 * 43_646_976
    assert found.parts["moments"] == 8 * 43_646_976
    assert 15 * GIB < found.parts["activations"] < 25 * GIB
    assert found.parts["logits"] < GIB, "never whole"
    assert sum(found.parts.values()) == found.total
    less = plan_memory(real("Qwen3-8B"), PlannedWork(1, 1024, lora_r=16, checkpointing=True))
    assert less.total < 24 * GIB
    whole = plan_memory(real("SmolLM2-1.7B"), PlannedWork(4, 1024))
    assert whole.parts["weights"] == 0
    assert whole.parts["moments"] == 8 * 1_711_376_384
    assert whole.parts["saving"] == 12 * 1_711_376_384, "a save copies weights and moments on the device"
    require_fit(whole, whole.total - whole.parts["saving"], "cuda")  # or, where there is no room, to the host


def test_with_fsdp_process_0_samples_from_a_whole_copy():
    model = real("SmolLM2-1.7B")
    alone, four = (plan_memory(model, PlannedWork(4, 1024, slots=8, slot_length=512, reference=True, processes=count)) for count in (1, 4))
    assert four.parts["moments"] * 4 == alone.parts["moments"]
    assert four.parts["sampler"] == 2 * model.parameters
    assert four.parts["reference"] == 4 * model.parameters


def test_with_fsdp_a_frozen_base_and_a_fresh_model_are_opened_in_parts():
    """Nothing of process 0's is the size of the model, before step 1 neither."""
    model = real("Qwen3-8B")
    for lora_r, bytes_held in ((16, 2), (0, 12)):
        work = PlannedWork(1, 1024, lora_r=lora_r, checkpointing=True, processes=64)
        whole, parts = (plan_memory(model, replace(work, streamed=streamed)) for streamed in (False, True))
        assert whole.total > bytes_held * model.parameters
        assert parts.total < (bytes_held + 1) / 2 * model.parameters


def test_what_does_not_fit_is_refused_with_what_would():
    found = plan_memory(real("Qwen3-8B"), PlannedWork(16, 1024, lora_r=16))
    require_fit(found, 139 * GIB, "cuda")
    with pytest.raises(UsageError, match=r"cuda has 40\.0; these would fit: --micro-batch-tokens"):
        require_fit(found, 40 * GIB, "cuda")
    with pytest.raises(UsageError, match="nothing that leaves the model as it is would fit"):
        require_fit(found, 4 * GIB, "cuda")
    assert alternatives(plan_memory(real("Qwen3-8B"), PlannedWork(4, 1024)), 80 * GIB)[0].startswith("--lora-r 16")
    long = plan_memory(real("Qwen3-8B"), PlannedWork(4, 4096, lora_r=16))
    assert alternatives(long, 30 * GIB)[0].startswith("--gradient-checkpointing")


def test_use_is_told_beside_the_plan():
    found = plan_memory(real("Qwen3-0.6B"), PlannedWork(4, 1024, lora_r=16))
    assert "off by more" not in compared_with_use(found, int(found.total * 1.05))
    assert "off by more than 10%" in compared_with_use(found, int(found.total * 1.3))


@pytest.mark.parametrize(("seen", "told"), [(0, "6.00 GiB at the most"), (8, "8.00 GiB at the most")])
def test_memory_that_graphs_hold_beside_a_snapshot_is_told_as_used(seen: int, told: str, monkeypatch: pytest.MonkeyPatch):
    """torch counts a graph's activations only while it is captured, and a snapshot comes later."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 6 * GIB)
    said, logged = list[str](), dict[str, Any]()
    run = SimpleNamespace(memory_seen=seen * GIB, say=said.append, log=lambda kind, **facts: logged.update(facts))
    record_use(cast(Run, run), cast(MemoryPlan, SimpleNamespace(total=8 * GIB, parts={"weights": 8 * GIB})), "cuda")
    assert told in said[0]
    assert logged["used"] == max(6, seen) * GIB
    assert logged["near"] is bool(seen)


def test_a_run_that_cannot_fit_is_refused_before_a_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from assay.recipes import starting_model

    folder = save_hf_folder(tmp_path / "model", tiny_model("qwen3"))
    monkeypatch.setattr(memory_plan, "device_memory", lambda _: 1 << 20)
    monkeypatch.setattr(starting_model, "open_artifact", lambda *_, **__: pytest.fail("a weight was read"))
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "completion": "2"}\n' * 9)
    config = Sft(model=str(folder), data=(str(tmp_path / "a.jsonl"),), out=str(tmp_path / "run"), max_steps=1, device="cpu")
    with pytest.raises(UsageError, match="this run needs about"):
        sft.sft(config, lambda _: None)


def test_a_tokenizer_with_more_ids_than_rows_is_found_before_step_1(tmp_path: Path):
    folder = save_hf_folder(tmp_path / "model", tiny_model("llama"))
    more = tiny_tokenizer(words=[f"word{i}" for i in range(400)])
    for name, data in more.files().items():
        (folder / name).write_bytes(data)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "completion": "2"}\n' * 9)
    config = Sft(model=str(folder), data=(str(tmp_path / "a.jsonl"),), out=str(tmp_path / "run"), max_steps=1, device="cpu")
    with pytest.raises(UsageError, match=r"tokenizer has ids up to \d+, and the model has 320 rows"):
        sft.sft(config, lambda _: None)
    assert not (tmp_path / "run").exists()


def test_the_verb_answers_from_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(REAL["Qwen3-8B"][0]))
    began = time.process_time()
    assert assay(["plan", "sft", "--model", str(tmp_path / "qwen"), "--lora-r", "16", "--micro-batch-tokens", "4096", "--memory", "139",
                  "--json"]) == 0
    assert time.process_time() - began < 2  # of the processor: others may use it too
    told = json.loads(capsys.readouterr().out)
    assert (told["parameters"], told["trained"], told["fits"]) == (8_190_735_360, 43_646_976, True)
    assert assay(["plan", "grpo", "--model", str(tmp_path / "qwen"), "--lora-r", "16", "--memory", "24"]) == 3
    said = capsys.readouterr().out
    assert "does not fit" in said
    assert "cache" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "qwen"], "nothing is written"


def test_headers_say_what_is_stored(tmp_path: Path):
    model = tiny_model("qwen3")
    assert planned_model(save_hf_folder(tmp_path / "model", model)).stored == sum(4 * p.numel() for p in model.parameters())
    assert torch.float32.itemsize == 4


def test_the_arithmetic_of_a_token_is_that_of_the_products_that_it_meets():
    """Counted by torch itself, by a kernel of attention whose products it sees: all of a row's square, of which a token sees half."""
    for family in ("llama", "gpt2", "qwen3_moe"):
        model, tokens = tiny_model(family), torch.randint(0, 300, (1, 64))
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model.logits(model.hidden(tokens))
        unseen = model.config.depth * 4 * 32 * model.config.heads * model.config.head_dim
        assert forward_operations(model.config, 64) + unseen == pytest.approx(counter.get_total_flops() / 64), family


def test_the_verb_says_what_a_step_takes_where_its_device_is_here(tmp_path: Path, capsys: pytest.CaptureFixture):
    where = save_hf_folder(tmp_path / "model", tiny_model("qwen3"))
    asked = ["plan", "sft", "--model", str(where), "--device", "cpu", "--batch-tokens", "8192", "--max-length", "64"]
    assert assay(asked) == 0
    said = capsys.readouterr().out
    assert "s or so of 8,192 tokens" in said
    assert "takes longer, since launching decides" in said
    assert assay([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds_a_step"] > 0
    assert assay([*asked, "--memory", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds_a_step"] is None, "of a device that is elsewhere nothing is known"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_a_gpu_that_is_not_here_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture):
    where = save_hf_folder(tmp_path / "model", tiny_model("qwen3"))
    asked = ["plan", "sft", "--model", str(where), "--device", "cuda"]
    assert assay(asked) == 0
    said = capsys.readouterr().out
    assert "together" in said
    assert "no cuda is here" in said
    assert assay([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["fits"], told["seconds_a_step"]) == (None, None)


def test_what_is_frozen_is_not_learned_and_what_is_made_again_costs_again():
    model = real("Qwen3-8B")
    whole, adapter, again = (step_operations(plan_memory(model, PlannedWork(4, 1024, rank, checkpointing=recompute)), 16384)
                             for rank, recompute in ((0, False), (16, False), (16, True)))
    assert whole == again == adapter * 1.5
    assert step_seconds(plan_memory(model, PlannedWork(4, 1024, 16)), 16384, 7.2e14) == pytest.approx(1.06, rel=0.25)  # measured on an H200


@pytest.mark.parametrize(("recipe", "options", "words"), [
    ("sft", ("--base-dtype", "nf4"), "is for a frozen base"), ("sft", ("--lora-alpha", "8"), "are for adapters; give --lora-r too"),
    ("sft", ("--from", "elsewhere"), "name what to train"), ("sft", ("--optimizer-state", "fresh"), "it needs --from"),
    ("sft", ("--rope-scaling", "yarn:0.5"), "a factor above 1"), ("sft", ("--rope-scaling", "yarn:1e308"), "give a smaller factor"),
    ("sft", ("--batch-tokens", "64"), "a batch of at least one row"), ("sft", ("--max-steps", "1", "--minutes", "1"), "one budget"),
    ("sft", ("--lora-r", "4", "--master-dtype", "bf16"), "is for the whole model"),
    ("sft", ("--fsdp", "--optim", "adamw_8bit"), "not of codes"), ("dpo", ("--loss-type", "simpo", "--reference", "live"), "reference"),
    ("grpo", ("--temperature", "0"), "teach nothing"), ("distill", (), "name who teaches"),
])
def test_what_a_run_would_refuse_its_plan_refuses(recipe: str, options: tuple[str, ...], words: str, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture):
    """In the same words, which the run says on the same options."""
    where, data = save_hf_folder(tmp_path / "model", tiny_model("llama")), tmp_path / "a.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    asked = ("--model", str(where), "--device", "cpu", *options)
    assert assay(["plan", recipe, *asked]) == 2
    said = capsys.readouterr().err
    assert words in said
    reward = ("--reward", "format") if recipe == "grpo" else ()
    assert assay([recipe, *asked, *reward, "--data", str(data), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == said
    assert not (tmp_path / "run").exists()


def test_an_adapter_is_planned_as_it_is_and_on_the_base_that_it_was_trained_on(tmp_path: Path):
    base = save_model(tmp_path / "base", tiny_model("llama")).folder
    adapter = save_adapter(tmp_path / "adapter", base, held="nf4").folder
    found, plain = planned_model(adapter), planned_model(save_adapter(tmp_path / "plain", base).folder)
    opened = open_artifact(adapter)
    assert opened.patch is not None
    factors = sum(part.left.numel() + part.right.numel() for parts in opened.patch.low_rank.values() for part in parts)
    assert (found.adapted, found.held, plain.held) == (factors, "nf4", None)
    config = Sft(model=str(adapter), data=("a",), out="b", device="cpu", batch_tokens=64, max_length=64, dtype="bf16")
    work, as_filed = planned_work(config, found, "cpu"), planned_work(config, plain, "cpu")
    assert plan_memory(found, work).trained == factors
    assert plan_memory(found, work).parts["weights"] < plan_memory(plain, as_filed).parts["weights"]


def test_the_disk_holds_what_a_run_writes_and_nothing_that_it_does_not(tmp_path: Path):
    """A merged model of a large base is written where it is asked for; RUN/base where the base is made first."""
    where = save_hf_folder(tmp_path / "model", tiny_model("llama"))
    model = planned_model(where)

    def disk(**options: Any) -> int:
        config = Sft(model=str(where), data=("a",), out="b", device="cpu", batch_tokens=64, max_length=64, lora_r=4, **options)
        return plan_memory(model, planned_work(config, model, "cpu")).disk

    assert disk(merge="always") - disk(merge="never") == 4 * model.parameters
    assert disk() == disk(merge="always"), "it is a small one"
    assert disk(rope_scaling="yarn:2") - disk() == model.stored


def test_a_gguf_file_and_a_folder_of_codes_are_planned_by_their_headers(tmp_path: Path):
    folder = save_model(tmp_path / "model", tiny_model("llama")).folder
    export_artifact(open_artifact(folder), "gguf", tmp_path / "model.gguf", None)
    export_artifact(open_artifact(folder), "w8a8", tmp_path / "codes", None)
    due = planned_model(folder)
    assert planned_model(tmp_path / "model.gguf") == due
    assert planned_model(tmp_path / "codes") == due, "codes are made numbers when they are opened"


def test_a_student_of_some_of_its_teachers_layers_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture):
    deep = replace(tiny_config("llama"), depth=4, windows=(None,) * 4)
    where = save_hf_folder(tmp_path / "model", initialised(deep, 0))
    assert assay(["plan", "distill", "--teacher", str(where), "--student-layers", "2", "--device", "cpu", "--json"]) == 0
    made = replace(deep, depth=2, windows=(None,) * 2)
    assert json.loads(capsys.readouterr().out)["parameters"] == sum(map(math.prod, parameter_shapes(made).values()))


@pytest.mark.parametrize("verb", [("inspect",), ("plan", "sft", "--model")])
def test_headers_that_are_not_those_of_their_index_are_refused(verb: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture):
    """A tensor in two shards: who reads headers alone would count it twice, or take the wrong one."""
    folder = save_hf_folder(tmp_path / "model", tiny_model("llama"), sharded=True)
    assert assay([*verb, str(folder)]) == 0
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    held = dict(load_file(first)) | dict(list(load_file(second).items())[:1])
    save_file(held, first)
    assert assay([*verb, str(folder)]) == 3
    assert "not the shard that the index describes" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--lora-r", "4"), (), ("--master-dtype", "bf16"), ("--model", "adapter"), ("--lora-r", "4", "--fsdp",
                                     "--gpus", "2")])
def test_every_setting_that_is_proposed_is_one_that_a_run_takes(options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture,
                                                                monkeypatch: pytest.MonkeyPatch):
    """Every variant that could be, whatever there is room for, is planned again with its own words."""
    base = save_model(tmp_path / "base", tiny_model("llama")).folder
    adapter = save_adapter(tmp_path / "adapter", base).folder
    named = ["--model", str(adapter if "adapter" in options else base), *(word for word in options if word not in ("--model", "adapter"))]
    asked = ["plan", "sft", *named, "--device", "cpu", "--batch-tokens", "256", "--micro-batch-tokens", "256", "--max-length", "64"]
    proposed = list[str]()

    def every_variant(found: MemoryPlan, available: int) -> list[str]:
        proposed.extend(words for words, _ in memory_plan._variants(found))
        return proposed

    monkeypatch.setattr(memory_plan, "alternatives", every_variant)
    assert assay([*asked, "--memory", "0.0000001"]) == 3
    assert proposed
    for words in list(dict.fromkeys(proposed)):
        capsys.readouterr()
        assert assay([*asked, *words.split(), "--memory", "100"]) == 0, (words, capsys.readouterr().err)


def test_a_mixture_keeps_the_states_of_the_experts_that_a_token_goes_to():
    """As many numbers as autograd saves, beside what it saves of a dense model for as many planned."""
    def kept(family: str) -> float:
        model, saved = tiny_model(family), dict[int, int]()
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def count(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            states = model.hidden(torch.randint(0, 300, (4, 64), generator=torch.Generator().manual_seed(0)))
        assert states.requires_grad
        numbers = sum(size for place, size in saved.items() if place not in own) / 4 / 256 / model.config.depth
        return numbers / layer_entries(model.config)

    assert kept("qwen3_moe") == pytest.approx(kept("qwen3"), rel=0.2)
    assert kept("qwen2_moe") == pytest.approx(kept("qwen2"), rel=0.2)

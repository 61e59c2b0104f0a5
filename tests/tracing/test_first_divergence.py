"""Of more than fifty planted faults a trace names the right site; of fifty clean pairs it says nothing."""

import functools
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from assay import cli
from assay.editing.block_hooks import block
from assay.model.lora import attach, fresh, plan
from assay.model.patch import patched_tensors
from assay.model.transformer import Transformer
from assay.testing.tiny_forward import FORWARD_FAULTS, RUNNERS, TRACE_DEPTH, broken_model, random_model, reference_run, traced_tokens
from assay.testing.tiny_models import nudge, save_hf_folder, save_model, tiny_model
from assay.tracing.first_divergence import PassDivergence, ReferencePass, check_forward, compare_passes, run_reference, weight_changes
from assay.tracing.forward_modes import ForwardMode, PassObserver, batched_forward, cached_forward, plain_forward
from assay.tracing.hooks import Site
from assay.verbs import trace
from assay.verdict import Outcome
from assay.zoo import forward_faults as _  # noqa: F401 - importing registers

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3", "gpt2", "assay", "mixed")
# What is broken in every layer shows in the first.
IN_EVERY_LAYER = {"another model's rotary base", "rope scaling left out", "position not carried on", "padding seen",
                  "padding counted as positions"}
torch.set_num_threads(1)


OF_THE_CONFIG = ("Gemma's window off by one", "local layers turned as global ones are", "YaRN's attention factor missed",
                 "LongRoPE's attention factor missed")  # in every layer too
ONE_LAYER = {"positions in a layer that has none": 1, "shares of experts made whole": 2, "shared expert without its gate": 1}


def named_rightly(name: str, layer: int) -> bool:
    planting = FORWARD_FAULTS[name]
    found = compare_passes(reference_run(planting.family),
                           RUNNERS[planting.way](broken_model(planting.family, breaks=planting.breaks, layer=layer)), torch.float32)
    first = found.first
    everywhere = name in IN_EVERY_LAYER or name in OF_THE_CONFIG
    return first is not None and first.site.name in planting.right and first.site.layer in (
        (None,) if planting.right[0] in ("embedding", "final norm", "logits") else (0,) if everywhere else (layer,))


def test_planted_faults_are_found_where_they_are():
    missed = [name for number, name in enumerate(FORWARD_FAULTS) if not named_rightly(name, ONE_LAYER.get(name, number % TRACE_DEPTH))]
    assert len(FORWARD_FAULTS) >= 50
    assert len(missed) <= len(FORWARD_FAULTS) // 25, missed  # 48 of 50
    assert missed == []  # and in fact none

# ---------------------------------------------------------------- clean pairs


@functools.cache
def in_other_dtype(family: str, dtype: torch.dtype) -> ReferencePass:
    model = random_model(family)
    return run_reference(model.config, plain_forward(model), traced_tokens(), torch.float32, plain_forward(random_model(family).to(dtype)))


def by_another_kernel(model: Transformer) -> ForwardMode:
    def run(tokens_BT: torch.Tensor, look: PassObserver) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            plain_forward(model)(tokens_BT, look)

    return run


def without_matrix_units(run: ForwardMode) -> ForwardMode:
    """bf16 products by torch itself: some machines promise instructions for them that they then refuse."""
    def plainer(tokens_BT: torch.Tensor, look: PassObserver) -> None:
        with torch.backends.mkldnn.flags(enabled=False):
            run(tokens_BT, look)

    return plainer


def clean(family: str, kind: str) -> PassDivergence:
    model = random_model(family)
    if kind == "company":
        return compare_passes(reference_run(family), batched_forward(model), torch.float32)
    if kind == "cache":
        return compare_passes(reference_run(family), cached_forward(model, filled=36), torch.float32)
    if kind == "kernel":
        return compare_passes(reference_run(family), by_another_kernel(model), torch.float32)
    if kind == "float64":
        return compare_passes(reference_run(family), batched_forward(model.double()), torch.float64)
    dtype = getattr(torch, kind)
    with torch.backends.mkldnn.flags(enabled=False):
        known = in_other_dtype(family, dtype)
    return compare_passes(known, without_matrix_units(batched_forward(model.to(dtype))), dtype)


@pytest.mark.filterwarnings("ignore:TF32")
@pytest.mark.parametrize("kind", ["company", "cache", "kernel", "float64", "float16", "bfloat16"])
def test_clean_pairs_are_silent(kind: str):
    """7 families × 6 kinds: 42 pairs."""
    for family in FAMILIES:
        found = clean(family, kind)
        assert found.first is None, (family, str(check_forward(found)))
        assert check_forward(found).outcome is Outcome.PROVEN
        assert not found.unseen


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3", "gpt2"])
def test_transformers_runs_the_same_model_at_every_site(family: str, tmp_path: Path):
    """6 pairs; and a fault in ours is found against theirs."""
    pytest.importorskip("transformers")
    from assay.tracing.forward_modes import load_with_transformers, transformers_forward

    model = random_model(family)
    run = transformers_forward(load_with_transformers(save_hf_folder(tmp_path / "model", model), torch.float32), model.config)
    found = compare_passes(reference_run(family), run, torch.float32)
    assert found.first is None, str(check_forward(found))
    assert not found.unseen
    known = run_reference(model.config, run, traced_tokens(), torch.float32, plain_forward(random_model(family).double()))
    planting = FORWARD_FAULTS["two heads exchanged"]
    first = compare_passes(known, plain_forward(broken_model(family, breaks=planting.breaks, layer=2)), torch.float32).first
    assert first is not None
    assert first.site == Site(2, "attended")


def test_a_live_adapter_is_the_merged_one():
    """A pair."""
    live, merged = random_model("llama"), random_model("llama")
    patch = fresh(live.config, plan(live.config), 4, 2.0, 0, None)
    learned = {name: tuple(replace(part, left=torch.full_like(part.left, 0.02)) for part in parts)
               for name, parts in patch.low_rank.items()}
    patch = replace(patch, low_rank=learned)
    attach(live, patch)
    weights = dict(merged.named_parameters())
    changed = patched_tensors({name: weights[name].detach() for name in patch.names()}, patch, None)
    merged.load_state_dict(changed, strict=False)
    known = run_reference(merged.config, plain_forward(merged), traced_tokens(), torch.float32, plain_forward(doubled(merged)))
    assert compare_passes(known, plain_forward(live), torch.float32).first is None
    assert compare_passes(known, plain_forward(random_model("llama")), torch.float32).first.site == Site(0, "q")


def doubled(model: Transformer) -> Transformer:
    other = random_model(model.config.family)
    other.load_state_dict(model.state_dict())
    return other.double()


def massive(spoiled: bool = False) -> Transformer:
    """One feature of the stream is a thousand times the others; `spoiled`: and a small thing is wrong beside it."""
    model = random_model("llama")
    with torch.no_grad():
        block(model, 0).mlp.down.weight[5] *= 3000
        if spoiled:
            block(model, 1).attn.out.weight[9] *= 1.01
    return model


def test_massive_activations_that_both_have_are_no_fault():
    """A pair; and beside them a small fault is still found."""
    known = run_reference(massive().config, plain_forward(massive()), traced_tokens(), torch.float32, plain_forward(massive().double()))
    stream = known.values[Site(0, "residual")]
    assert stream.abs().max() > 1000 * stream.median().abs()
    assert compare_passes(known, batched_forward(massive()), torch.float32).first is None
    first = compare_passes(known, plain_forward(massive(spoiled=True)), torch.float32).first
    assert first is not None
    assert first.site == Site(1, "attn out")



def cancelling() -> Transformer:
    """Two features of the MLP are the same, and `down` takes their difference a thousand times: rounding is much of what is left."""
    model = random_model("llama")
    with torch.no_grad():
        mlp = block(model, 1).mlp
        mlp.up.weight[[1, 97]] = mlp.up.weight[[0, 96]]
        mlp.down.weight[:, 0] += 1000
        mlp.down.weight[:, 1] -= 1000
    return model


def test_rounding_is_measured_on_the_model_at_hand():
    """What it amplifies is allowed for there, and there alone."""
    known = run_reference(cancelling().config, plain_forward(cancelling()), traced_tokens(), torch.float32,
                          plain_forward(cancelling().double()))
    found = compare_passes(known, batched_forward(cancelling().double()), torch.float64)
    amplified = next(gap for gap in found.gaps if gap.site == Site(1, "down"))
    assert found.first is None
    assert amplified.introduced.worst > 20 * max(gap.introduced.worst for gap in found.gaps if gap.site == Site(0, "down"))
    without = compare_passes(replace(known, floors={}), batched_forward(cancelling().double()), torch.float64)
    assert without.first is not None
    assert without.first.site == Site(1, "down")


def test_one_token_is_enough_and_is_named():
    """Too little to show in the mean over all tokens."""
    model = random_model("llama")
    block(model, 1).mlp.down.register_forward_hook(lambda module, given, out: out * torch.ones(2, 40, 1).index_put(
        (torch.tensor(0), torch.tensor(7)), torch.tensor(1 + 8e-6)))
    first = compare_passes(reference_run("llama"), plain_forward(model), torch.float32).first
    assert first is not None
    assert (first.site, first.introduced.token) == (Site(1, "down"), 7)
    assert first.introduced.error < first.bound

# ---------------------------------------------------------------- what else a comparison says


@pytest.mark.parametrize("name", ["gated product off by one", "another model's rotary base", "two heads exchanged", "scale left out",
                                  "norm left out", "attention's residual lost"])
def test_faults_are_found_across_dtypes(name: str):
    planting = FORWARD_FAULTS[name]
    model = broken_model("llama", breaks=planting.breaks, layer=0).half()
    first = compare_passes(in_other_dtype("llama", torch.float16), plain_forward(model), torch.float16).first
    assert first is not None
    assert first.site.name in planting.right


def test_the_weights_behind_a_site_are_named_or_the_code_is():
    right = dict(random_model("llama").named_parameters())
    for name, words in (("scale of the last layer left on", "behind it differ blocks.1.mlp.down.weight (2.9e-01)"),
                        ("norm that subtracts the mean", "the weights behind it are the same, so the code differs"),
                        ("gated product off by one", "no weights stand behind it, so the code differs")):
        model = broken_model("llama", breaks=FORWARD_FAULTS[name].breaks, layer=1)
        found = compare_passes(reference_run("llama"), plain_forward(model), torch.float32)
        assert found.first is not None
        verdict = check_forward(found, weight_changes(found.first.site, model.config, right, dict(model.named_parameters())))
        assert verdict.outcome is Outcome.REFUTED
        assert words in verdict.reason


def test_a_fault_is_not_carried_on_and_two_are_both_found():
    model = broken_model("llama", breaks=FORWARD_FAULTS["gated product off by one"].breaks, layer=0)
    FORWARD_FAULTS["two heads exchanged"].breaks(model, 2)
    found = compare_passes(reference_run("llama"), plain_forward(model), torch.float32)
    assert [gap.site for gap in found.diverging] == [Site(0, "product"), Site(2, "attended")]
    assert found.gaps[-1].free.error > 0.1  # freely, everything behind the first is wrong


def test_every_edited_layer_of_an_edit_is_found_and_nothing_else():
    edited = random_model("llama")
    with torch.no_grad():
        for layer in (1, 2):
            block(edited, layer).mlp.down.weight[3] += 0.01
    found = compare_passes(reference_run("llama"), plain_forward(edited), torch.float32)
    assert [gap.site for gap in found.diverging] == [Site(1, "down"), Site(2, "down")]


def test_a_trained_model_parts_and_its_own_nan_is_said():
    found = compare_passes(reference_run("llama"), plain_forward(nudge(random_model("llama"))), torch.float32)
    assert found.first.site == Site(None, "embedding")
    spoiled = random_model("llama")
    with torch.no_grad():
        block(spoiled, 1).mlp.down.weight[0, 0] = torch.nan
    parted = compare_passes(reference_run("llama"), plain_forward(spoiled), torch.float32)
    assert parted.first.site == Site(1, "down")
    assert check_forward(parted).outcome is Outcome.REFUTED
    known = run_reference(spoiled.config, plain_forward(spoiled), traced_tokens(), torch.float32)
    assert check_forward(compare_passes(known, plain_forward(random_model("llama")), torch.float32)).outcome is Outcome.UNPROVEN


def test_a_tolerance_takes_the_place_of_rounding():
    other = nudge(random_model("llama"), far=1e-4)
    assert compare_passes(reference_run("llama"), plain_forward(other), torch.float32).first is not None
    assert compare_passes(reference_run("llama"), plain_forward(other), torch.float32, tolerance=0.05).first is None


def test_two_models_and_the_twin_of_the_first_are_in_memory_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The twin in float64 is the largest of them: with another beside it, a model that fits on a GPU twice would not be traced there."""
    folders = [str(save_model(tmp_path / name, tiny_model("llama", seed)).folder) for seed, name in enumerate("ab")]
    load, made, beside = trace.load_on_device, list[weakref.ref[Transformer]](), list[int]()

    def counted(*asked: Any) -> Transformer:
        beside.append(sum(each() is not None for each in made))
        model = load(*asked)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(trace, "load_on_device", counted)
    assert cli.run(["trace", *folders, "--prompt", "2+3=", "--device", "cpu"]) == 3
    assert beside == [0, 0, 0]

"""Every family beyond Llama's line against transformers, from a folder: site by site, and through what Assay does with a model."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel

from assay.data.batch import Batch
from assay.learn.objectives import next_token
from assay.model.lora import fresh, plan
from assay.store import checkpoint
from assay.store.artifact import assemble_model, build_model, merged_tensors, open_artifact
from assay.store.saving import Ancestor, Lineage, adapter_contents
from assay.testing.tiny_forward import random_model, reference_run
from assay.testing.tiny_models import examine_folder, live_patch, save_hf_folder, save_model, tokenizer_and_stops
from assay.tracing.first_divergence import check_forward, compare_passes
from assay.tracing.forward_modes import load_with_transformers, transformers_forward
from assay.verdict import Outcome

FAMILIES = ("gemma3_text", "gemma2", "phi3", "olmo2", "smollm3", "granite", "yarn", "qwen3_moe", "qwen2_moe", "gpt_oss")
TOKENS = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_agrees_at_every_site(family, tmp_path):
    """From the folder that we write. Where its attention is eager, what attention is given does not show; its router never does."""
    model = random_model(family)
    theirs = load_with_transformers(save_hf_folder(tmp_path / "model", model), torch.float32, fused=model.config.fused_attention)
    found = compare_passes(reference_run(family), transformers_forward(theirs, model.config), torch.float32)
    assert found.first is None, str(check_forward(found))
    assert max(gap.free.worst for gap in found.gaps) < 1e-4
    hidden = {"router"} | (set() if model.config.fused_attention else {"query", "key", "scores"})
    assert {site.name for site in found.unseen} <= hidden


def adapted(base):
    """An adapter of every linear layer, trained for three steps on random tokens."""
    artifact = open_artifact(base)
    patch = fresh(artifact.config, plan(artifact.config), 4, 2.0, 0, artifact.digest)
    model = build_model(replace(artifact, patch=patch))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for step in range(3):
        tokens = torch.randint(0, 300, (4, 24), generator=torch.Generator().manual_seed(step))
        next_token(model, Batch(tokens, (torch.arange(24) > 0).float().expand(4, 24))).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, live_patch(model, artifact.digest), artifact


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_trains_merges_and_opens_in_peft(family, tmp_path):
    base = save_hf_folder(tmp_path / "base", random_model(family))
    model, patch, artifact = adapted(base)
    assert all(part.left.any() for parts in patch.low_rank.values() for part in parts[:1])
    ground = Ancestor(artifact.digest, str(base))
    contents = adapter_contents(model, patch, ground, tokenizer_and_stops()[0], Lineage("moved", ground))
    folder = checkpoint.write_checkpoint(tmp_path / "adapter", contents).folder
    with torch.no_grad():
        ours = model(TOKENS)
        opened = open_artifact(folder)
        assert torch.equal(build_model(opened)(TOKENS), ours)
        merged = assemble_model(artifact.config, merged_tensors(opened), torch.float32)(TOKENS)
        theirs = PeftModel.from_pretrained(load_with_transformers(base, torch.float32, fused=False), folder)(TOKENS).logits
        before = build_model(artifact)(TOKENS)
    torch.testing.assert_close(merged, ours, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    assert (before - ours).norm() > 0.002 * ours.norm(), "what was learned must show"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_the_family_is_proven(family, tmp_path):
    """Ours, through the whole of a proof, with transformers as the second reader."""
    save_model(tmp_path / "checkpoint", random_model(family))
    verdicts = {verdict.check: verdict for verdict in examine_folder(tmp_path / "checkpoint")}
    assert not [str(verdict) for verdict in verdicts.values() if verdict.outcome is Outcome.REFUTED]
    assert all(verdicts[check].outcome is Outcome.PROVEN for check in ("architecture", "answers", "consumer")), verdicts["consumer"]

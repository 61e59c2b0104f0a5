"""Folders without a manifest: what training does is never called damage, and what cannot be known is said."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from assay.guard.foreign_folder_checks import adapter_scale_records, untrained_change
from assay.guard.proof_subject import ProofSampling
from assay.guard.tokenizer_comparison import compare_templates, silent_generation_prompt
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.store.artifact import merged_tensors, open_artifact
from assay.testing.tiny_models import (
    examine_folder,
    nudge,
    rewrite_tensors,
    save_adapter,
    save_hf_folder,
    save_model,
    save_peft_folder,
    tiny_model,
    tiny_tokenizer,
)
from assay.verdict import Outcome, Verdict

_NO_TEXTS = ProofSampling(samples=0)


def found(check: str, verdicts: list[Verdict]) -> Verdict:
    return next(verdict for verdict in verdicts if verdict.check == check)


def trained(model: Transformer, rate: float, steps: int) -> Transformer:
    """Model trained on few tokens: most rows of the embedding never move, some elements hardly do."""
    optimizer, chance = torch.optim.AdamW(model.parameters(), lr=rate), torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, 40, (2, 16), generator=chance)
        loss = cross_entropy(model.logits(model.hidden(tokens))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(("rate", "steps"), [(1e-5, 1), (1e-3, 8), (1e-2, 8)])
def test_what_training_and_rounding_do_is_no_damage(rate: float, steps: int):
    before, after = tiny_model("qwen2").state_dict(), trained(tiny_model("qwen2"), rate, steps).state_dict()
    for one in (torch.float32, torch.bfloat16):
        for other in (torch.float32, torch.bfloat16):
            assert untrained_change((name, before[name].to(one), after[name].to(other)) for name in before) is None


def test_a_merged_adapter_is_no_damage(tmp_path: Path):
    base = save_model(tmp_path / "base", tiny_model()).folder
    adapter = open_artifact(save_adapter(tmp_path / "adapter", base).folder)
    merged = merged_tensors(adapter)
    assert untrained_change((name, tensor, merged[name]) for name, tensor in adapter.tensors.items()) is None


def test_a_matrix_that_was_zero_in_the_parent_has_no_direction_to_lose():
    assert untrained_change([("out", torch.zeros(16, 16), torch.randn(16, 16))]) is None


def test_a_matrix_that_began_near_zero_may_move_far_for_its_size():
    chance = torch.Generator().manual_seed(0)
    kept = [torch.randn(32, 32, generator=chance) for _ in range(6)]
    pairs = [(f"kept {number}", one, one + 1e-3 * torch.randn(32, 32, generator=chance)) for number, one in enumerate(kept)]
    faint = 0.01 * kept[0]
    assert untrained_change([*pairs, ("out", faint, faint + 0.05 * torch.randn(32, 32, generator=chance))]) is None
    assert "were exchanged" in str(untrained_change([*pairs, ("out", kept[0], torch.cat([kept[0][:16], kept[1][:16]]))]))


def test_a_child_with_rows_for_new_tokens_and_a_head_of_its_own_is_its_parents(tmp_path: Path):
    """Through the whole proof: neither geometry nor lineage objects, and a flipped bit is still seen."""
    parent, child = tiny_model(), tiny_model(vocab=328, tied=False)
    with torch.no_grad():
        for name, parameter in parent.named_parameters():
            child.get_parameter(name)[:len(parameter)] = parameter
        child.head.weight.copy_(child.embed.weight)
    folders = [str(save_hf_folder(tmp_path / name, model)) for name, model in (("parent", parent), ("child", nudge(child)))]
    verdict = found("lineage", verdicts := examine_folder(Path(folders[1]), against=folders[0]))
    assert verdict.outcome is Outcome.PROVEN, verdict.reason
    assert not [each for each in verdicts if each.outcome is Outcome.REFUTED]


def test_an_empty_tensor_that_no_layer_reads_is_no_damage(tmp_path: Path):
    """Some GPT-2 folders hold buffers besides the weights; of nothing there is no largest change."""
    parent = tiny_model("gpt2")
    folders = [save_hf_folder(tmp_path / "parent", parent), save_hf_folder(tmp_path / "child", nudge(parent))]
    for folder in folders:
        rewrite_tensors(folder / "model.safetensors", lambda tensors: tensors | {"transformer.h.0.attn.bias": torch.zeros(0, 3)})
    verdict = found("lineage", examine_folder(folders[1], against=str(folders[0]), probing=_NO_TEXTS))
    assert verdict.outcome is Outcome.PROVEN, verdict.reason


def test_another_width_is_still_another_geometry(tmp_path: Path):
    folders = [str(save_hf_folder(tmp_path / f"{hidden}", tiny_model(hidden=hidden))) for hidden in (96, 64)]
    assert "another geometry" in found("lineage", examine_folder(Path(folders[0]), against=folders[1], probing=_NO_TEXTS)).reason


def test_what_no_file_beside_an_adapter_says_of_its_scale_could_not_be_checked(tmp_path: Path):
    base = save_model(tmp_path / "base", tiny_model()).folder
    folder = save_peft_folder(tmp_path / "adapter", base)
    verdict = found("fields", examine_folder(folder, base=str(base), probing=_NO_TEXTS))
    assert verdict.outcome is Outcome.UNPROVEN
    assert "(alpha 8, rank 4, use_rslora false) stands in adapter_config.json alone and could not be checked" in verdict.reason


@pytest.mark.parametrize(("name", "text", "agrees"), [
    ("README.md", "```yaml\nlora_alpha: 8\n```", True), ("README.md", "- lora_alpha: 16\n", False),
    ("args.json", json.dumps({"lora_alpha": 8, "use_rslora": False}, indent=1), True),
    ("args.json", json.dumps({"lora_alpha": 8, "use_rslora": True}, indent=1), False),
    ("config.yaml", "lora_alpha: 8.0\npeft_use_rslora: false\n", True), ("README.md", "We tried lora_alpha: 16 first.", None)])
def test_records_beside_an_adapter_agree_or_differ(tmp_path: Path, name: str, text: str, agrees: bool | None):
    (tmp_path / name).write_text(text)
    agree, differ = adapter_scale_records(tmp_path, {"lora_alpha": 8, "r": 4})
    assert (bool(agree), bool(differ)) == (agrees is True, agrees is False)


def with_template(template: str | None) -> Tokenizer:
    words = tiny_tokenizer()
    return Tokenizer(words.document, words.settings, {"default": template} if template else {})


INSTRUCT = ("{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + '<|im_end|>' }}"
            "{% endfor %}")


@pytest.mark.parametrize(("change", "outcome"), [
    (lambda text: text, None), (lambda text: f"{text}\n", None),
    (lambda text: text.replace("add_generation_prompt", "false"), Outcome.REFUTED),
    (lambda text: INSTRUCT, Outcome.UNPROVEN),  # trained with a template that has no generation prompt: sound, and not known
    (lambda text: text.replace("assistant\n", "assistant\n<think>\n"), Outcome.UNPROVEN), (lambda text: None, Outcome.UNPROVEN)])
def test_a_template_against_the_parents(change: Any, outcome: Outcome | None):
    verdict = compare_templates(with_template(change(tiny_tokenizer().template)), tiny_tokenizer(), "parent")
    assert (verdict.outcome if verdict else None) is outcome


def test_alone_a_template_that_opens_answers_but_writes_no_generation_prompt_is_said():
    lost = with_template(str(tiny_tokenizer().template).replace("add_generation_prompt", "false"))
    assert "answers begin with '<|im_start|>assistant\\n'" in str(silent_generation_prompt(lost))
    assert silent_generation_prompt(tiny_tokenizer()) is None
    assert silent_generation_prompt(with_template(INSTRUCT)) is None

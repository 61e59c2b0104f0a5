"""What is in memory after a resume is what was saved, bit for bit."""

from pathlib import Path

import pytest
import torch

from assay.guard.resume_checks import check_own_checkpoint, check_resumed
from assay.learn.optim import adamw, state_tensors
from assay.model.families import hf_layout, to_foreign
from assay.model.transformer import Transformer
from assay.store.ledger import Event, Ledger, read_chain
from assay.testing.tiny_models import nudge, save_model, tiny_model
from assay.verdict import Outcome


def weights(model: Transformer) -> dict[str, torch.Tensor]:
    return to_foreign(hf_layout(model.config), dict(model.named_parameters()))


@pytest.fixture
def saved(tmp_path: Path):
    model = nudge(tiny_model("qwen3"))
    optimizer = adamw(model.named_parameters(), 1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = state_tensors(optimizer, dict(model.named_parameters()))
    return model, state, save_model(tmp_path / "step-000001", model, optimizer=state)


def test_what_was_saved_is_proven(saved):
    assert check_resumed(weights(saved[0]), *saved[1:]).outcome is Outcome.PROVEN


def test_one_bit_of_a_weight_is_found(saved):
    model, state, found = saved
    with torch.no_grad():
        model.norm.weight.view(torch.int32)[0] ^= 1
    verdict = check_resumed(weights(model), state, found)
    assert (verdict.outcome, verdict.evidence) == (Outcome.REFUTED, {"weights": ["model.norm.weight"], "optimizer": []})


@pytest.mark.parametrize("change", ["cold", "missing", "extra", "rounded"])
def test_other_moments_are_found(saved, change: str):
    model, state, found = saved
    name = "norm.weight/exp_avg"
    state = {"cold": state | {name: torch.zeros_like(state[name])}, "missing": {k: v for k, v in state.items() if k != name},
             "extra": state | {"norm.weight/third": state[name]}, "rounded": state | {name: state[name].bfloat16().float()}}[change]
    verdict = check_resumed(weights(model), state, found)
    assert verdict.outcome is Outcome.REFUTED
    assert verdict.evidence["optimizer"] == ["norm.weight/third" if change == "extra" else name]


def test_a_checkpoint_without_moments_is_no_place_to_go_on_from(saved, tmp_path: Path):
    model, state, _ = saved
    verdict = check_resumed(weights(model), state, save_model(tmp_path / "step-000002", model))
    assert verdict.outcome is Outcome.REFUTED
    assert f"0 weights and {len(state)} tensors" in verdict.reason


def test_a_ledger_that_was_cut_off_no_longer_names_its_last_save(tmp_path: Path):
    """The lines that are left are a whole chain; the checkpoint that they do not name is refuted, and the one that they name is not."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(Event.START, config={})
    found = {}
    for step in (1, 2):
        found[step] = save_model(tmp_path / f"step-{step:06d}", nudge(tiny_model(), step))
        ledger.append(Event.SAVE, step=step, checkpoint=found[step].folder.name)
        ledger.append(Event.SAVED, checkpoint=found[step].folder.name, digest=found[step].digest)
    ledger.close()
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    assert check_own_checkpoint(found[2], read_chain(ledger.path).events, []).outcome is Outcome.PROVEN
    ledger.path.write_bytes(b"".join(lines[:3]))
    events = read_chain(ledger.path).events
    assert [check_own_checkpoint(found[step], events, []).outcome for step in (1, 2)] == [Outcome.PROVEN, Outcome.REFUTED]

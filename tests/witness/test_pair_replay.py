"""Steps of DPO and KTO, replayed from options, pairs and the parent's bytes alone; stored and live references, every loss, every schema."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.data.batch import Batch
from assay.errors import GuardStop
from assay.learn import bradley_terry, unpaired
from assay.model.tokenizer import Tokenizer
from assay.recipes import reward_model, run, starting_model
from assay.recipes.live_reference import LiveReference
from assay.recipes.reward_model_options import RewardModel
from assay.recipes.witness_records import pending_records
from assay.testing.fault_injection import swap
from assay.testing.tiny_models import TINY_CHAT_TEMPLATE, save_model, tiny_model, tiny_tokenizer
from assay.testing.tiny_training import RecordingProver
from assay.verdict import Outcome, Verdict, proven
from assay.witness.replay import replay_step
from assay.zoo.run_faults import sums_folder
from assay.zoo.witness_faults import judged_sums, train_witnessed


def turn(role: str, said: str) -> dict[str, str]:
    return {"role": role, "content": said}


def explicit(a: int, b: int) -> dict[str, Any]:
    return {"prompt": [turn("user", f"{a}+{b}")], "chosen": [turn("assistant", f"{a + b}")], "rejected": [turn("assistant", "no idea")]}


def implicit(a: int, b: int) -> dict[str, Any]:
    begin = [turn("system", "Add."), turn("user", f"{a}+{b}")]
    return {"chosen": [*begin, turn("assistant", f"{a + b}")], "rejected": [*begin, turn("assistant", f"{a * b}, or {a}")]}


def shared_text(a: int, b: int) -> dict[str, Any]:
    return {"chosen": f"{a} plus {b} is {a + b}", "rejected": f"{a} plus {b} is nothing"}


def with_tools(a: int, b: int) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    return explicit(a, b) | {"tools": json.dumps([tool])}


def labelled_with_tools(a: int, b: int) -> dict[str, Any]:
    return labelled(a, b) | {"tools": with_tools(a, b)["tools"]}


def labelled(a: int, b: int) -> dict[str, Any]:
    return {"prompt": [turn("user", f"{a}+{b}")], "completion": [turn("assistant", f"{a + b + a % 2}")], "label": a % 2 == 0}


def written(where: Path, row: Any) -> Path:
    where.write_text("".join(json.dumps(row(a, b)) + "\n" for a in range(6) for b in range(4)))
    return where


def replayed(folder: Path, recipe: str, **options: Any) -> list[Verdict]:
    train_witnessed(folder / "run", recipe, **options)
    return [replay_step(record) for record in pending_records(folder / "run")]


LOSSES: list[dict[str, Any]] = [
    {"recipe": "dpo", "loss_type": "ipo", "lora_r": 4}, {"recipe": "dpo", "loss_type": "hinge", "packing": False},
    {"recipe": "dpo", "loss_type": "robust", "label_smoothing": 0.2}, {"recipe": "dpo", "loss_type": "sigmoid_norm", "reference": "live"},
    {"recipe": "dpo", "loss_type": "simpo", "max_length": 8, "too_long": "truncate"}, {"recipe": "dpo", "loss_type": "orpo"},
    {"recipe": "kto", "loss_type": "apo_zero_unpaired", "lora_r": 4, "reference": "live"}]


@pytest.mark.parametrize("changed", LOSSES, ids=lambda changed: changed["loss_type"])
def test_a_sound_step_is_proven_whatever_the_loss(changed: dict[str, Any], tmp_path: Path):
    found = replayed(tmp_path, max_steps=2, **changed)
    assert [verdict.outcome for verdict in found] == [Outcome.PROVEN] * 2, found


@pytest.mark.parametrize(("recipe", "row"), [("dpo", explicit), ("dpo", implicit), ("dpo", shared_text), ("dpo", with_tools),
                                             ("kto", labelled), ("kto", explicit), ("kto", labelled_with_tools)])
def test_every_schema_is_read_as_the_run_reads_it(recipe: str, row: Any, tmp_path: Path):
    writes_tools = "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif -%}" + TINY_CHAT_TEMPLATE
    tokenizer = Tokenizer.from_parts(tiny_tokenizer().document, writes_tools, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    save_model(tmp_path / "base", tiny_model("llama"), tokenizer=tokenizer)
    found = replayed(tmp_path, recipe, data=(str(written(tmp_path / "rows.jsonl", row)),), model=str(tmp_path / "base"), max_length=192,
                     batch_tokens=1536, micro_batch_tokens=768, max_steps=1)
    assert [verdict.outcome for verdict in found] == [Outcome.PROVEN], found


def rewarding(folder: Path, **options: Any) -> list[Verdict]:
    """The recipe itself, without preflight, up to its hand-over."""
    def stop(*_: Any) -> Any:
        raise GuardStop("nothing is handed over")

    data = options.pop("data", (str(judged_sums()["dpo"]),))
    config = RewardModel(model=str(sums_folder() / "base"), data=data, out=str(folder / "run"), max_length=24,
                         held_out=0.1, batch_tokens=288, micro_batch_tokens=192, max_steps=2, learning_rate=3e-3, warmup_steps=1,
                         witness="0", save_steps=100, device="cpu", **options)
    with (swap(run, "Prover", RecordingProver), swap(starting_model, "prove_checkpoint", lambda *_, **__: [proven("whole", "taken")]),
          swap(reward_model, "preflight_rewards_of", lambda *_: []), swap(reward_model, "hand_over", stop), contextlib.suppress(GuardStop)):
        reward_model.reward_model(config, lambda _: None)
    return [replay_step(record) for record in pending_records(folder / "run")]


def test_steps_of_a_reward_model_are_proven_and_a_reward_of_another_token_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = rewarding(tmp_path / "sound", center_rewards_coefficient=0.01)
    assert [verdict.outcome for verdict in found] == [Outcome.PROVEN] * 2, found
    usual = bradley_terry.last_tokens
    monkeypatch.setattr(bradley_terry, "last_tokens", lambda documents: usual(documents).roll(-1, 1))
    assert "its loss was" in rewarding(tmp_path / "early")[0].reason


def test_mixed_pairs_of_a_reward_model_are_proven(tmp_path: Path):
    data = f"{judged_sums()['dpo']}:0.6", f"{written(tmp_path / 'more.jsonl', shared_text)}:0.4"
    found = rewarding(tmp_path, data=data, num_train_epochs=3)
    assert [verdict.outcome for verdict in found] == [Outcome.PROVEN] * 2, found
    record = json.loads((sorted((tmp_path / "run").glob("witness/step-*"))[0] / "record.json").read_text())
    assert {id.partition(":")[0] for row in record["ids"] for id in row} == {"dpo.jsonl", "more.jsonl"}


def test_a_live_reference_that_says_a_little_else_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = LiveReference.attached

    def louder(self: LiveReference, batch: Batch) -> Batch:
        found = usual(self, batch)
        assert found.reference is not None
        return replace(found, reference=1.2 * found.reference)

    monkeypatch.setattr(LiveReference, "attached", louder)
    found = replayed(tmp_path, "dpo", max_steps=2, reference="live")
    assert any("are not those of these texts" in verdict.reason or "its loss was" in verdict.reason for verdict in found), found


def test_a_kl_that_is_not_the_mismatched_answers_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = unpaired.mismatch_kl
    monkeypatch.setattr(unpaired, "mismatch_kl", lambda model, parts: usual(model, parts) + 1.0)
    found = replayed(tmp_path, "kto", max_steps=1)
    assert found[0].outcome is Outcome.REFUTED, found
    assert "its loss was" in found[0].reason

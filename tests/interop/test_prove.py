"""Our proofs inside the real Trainer, and inside TRL's SFTTrainer: one line, and no checkpoint is taken on trust."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli import run as assay
from assay.errors import GuardStop
from assay.guard.proof import examine_artifact
from assay.interop import Prove, hf
from assay.interop.hf import PROOF, verify_proof
from assay.interop.trackers import trainer_state
from assay.store.artifact import open_artifact
from assay.testing.tiny_models import save_hf_folder, tiny_model
from assay.verdict import Outcome
from tests.refusals import stopped_by

transformers = pytest.importorskip("transformers")


class Rows(torch.utils.data.Dataset):
    """Sixteen rows of tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(12) * 7 + index) % 250
        return {"input_ids": tokens, "labels": tokens}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_hf_folder(tmp_path / "base", tiny_model("llama"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checks without a process for each: what is asked here is what the callback makes of them."""
    monkeypatch.setattr(hf, "prove", examine_artifact)


def trainer(base: Path, out: Path, callback: Any, **options: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    usual: dict[str, Any] = {"max_steps": 2, "save_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
                             "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_total_limit": 5}
    args = transformers.TrainingArguments(str(out), **(usual | options))
    return transformers.Trainer(model, args, train_dataset=Rows(), callbacks=[callback])


def test_every_checkpoint_of_the_trainer_is_proven_and_a_changed_byte_found(base: Path, tmp_path: Path):
    callback = Prove(against=str(base))
    trainer(base, tmp_path / "run", callback, max_steps=1).train()
    verdicts = {verdict.check: verdict.outcome for verdict in callback.proofs["checkpoint-1"]}
    must = ("movement", "frozen", "weights", "whole", "architecture", "values", "lineage", "consumer", "live")
    assert {name: verdicts[name] for name in must} == dict.fromkeys(must, Outcome.PROVEN)
    assert Outcome.REFUTED not in verdicts.values()
    folder = tmp_path / "run" / "checkpoint-1"
    record = json.loads((folder / PROOF).read_text())
    assert "model.safetensors" in record["files"]
    before = verify_proof(folder)
    assert (before.outcome, "files are as they were" in before.reason) == (Outcome.UNPROVEN, True)  # without a manifest
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert verify_proof(folder).outcome is Outcome.REFUTED
    assert "model.safetensors" in verify_proof(folder).reason


def test_a_trainer_that_saves_other_weights_than_it_trains_is_stopped(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folder opens, every value is finite, and it is not the model."""
    work = trainer(base, tmp_path / "run", Prove())
    whole = type(work.model).save_pretrained

    def stale(model: Any, where: Any, **options: Any) -> None:
        with torch.no_grad():
            kept = {name: p.clone() for name, p in model.named_parameters()}
            for parameter in model.parameters():
                parameter.mul_(0.9)
            whole(model, where, **(options | {"state_dict": None}))
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])

    monkeypatch.setattr(type(work.model), "save_pretrained", stale)
    with stopped_by("live"):
        work.train()


def test_weights_that_do_not_move_are_found_at_the_save(base: Path, tmp_path: Path):
    with stopped_by("movement"):
        trainer(base, tmp_path / "run", Prove(), learning_rate=0.0).train()


def test_a_tensor_that_the_optimizer_does_not_hold_is_found_before_step_1(base: Path, tmp_path: Path):
    work = trainer(base, tmp_path / "run", Prove())
    held = [p for name, p in work.model.named_parameters() if "down_proj" not in name]
    work.optimizer = torch.optim.AdamW(held, 1e-3)
    with pytest.raises(GuardStop, match=r"down_proj.* they will never move"):
        work.train()


@pytest.mark.usefixtures("here")
def test_a_warm_up_that_begins_at_rate_0_is_no_fault(base: Path, tmp_path: Path):
    """Step 1 is taken at rate 0: nothing moved, the folder equals its parent, and the run is sound."""
    callback = Prove(against=str(base))
    trainer(base, tmp_path / "run", callback, lr_scheduler_type="linear", warmup_steps=1).train()
    first, second = ({verdict.check: verdict for verdict in callback.proofs[f"checkpoint-{step}"]} for step in (1, 2))
    assert [first[name].outcome for name in ("movement", "lineage", "live")] == [Outcome.UNPROVEN, Outcome.UNPROVEN, Outcome.PROVEN]
    assert "at a rate above 0" in first["movement"].reason
    assert [second[name].outcome for name in ("movement", "lineage", "live")] == [Outcome.PROVEN] * 3


def adapted(base: Path, out: Path, callback: Any, **options: Any) -> Any:
    """The trainer above, with an adapter as PEFT attaches it: every B is 0."""
    peft = pytest.importorskip("peft")
    work = trainer(base, out, callback)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return transformers.Trainer(peft.get_peft_model(work.model, lora), work.args, train_dataset=Rows(), callbacks=[callback])


@pytest.mark.usefixtures("here")
def test_an_adapters_a_may_stand_still_in_step_1_and_not_in_step_2(base: Path, tmp_path: Path):
    callback = Prove(base=str(base))
    adapted(base, tmp_path / "run", callback).train()
    movement = [next(v for v in callback.proofs[f"checkpoint-{step}"] if v.check == "movement") for step in (1, 2)]
    assert [verdict.outcome for verdict in movement] == [Outcome.PROVEN] * 2
    assert ["all 4 " in movement[0].reason, "all 8 " in movement[1].reason] == [True, True]


@pytest.mark.usefixtures("here")
def test_an_a_that_never_moves_is_found_in_step_2(base: Path, tmp_path: Path):
    work = adapted(base, tmp_path / "run", Prove(base=str(base)))
    still = next(p for name, p in work.model.named_parameters() if "lora_A" in name)
    still.register_hook(torch.zeros_like)
    with stopped_by("movement"):
        work.train()
    assert (tmp_path / "run" / "checkpoint-2" / PROOF).exists()


@pytest.mark.usefixtures("here")
def test_an_adapter_that_assay_does_not_know_costs_no_run(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    callback = Prove(base=str(base))
    adapted(base, tmp_path / "run", callback, init_lora_weights="olora").train()
    found = {v.check: v for v in callback.proofs["checkpoint-2"]}
    assert (found["support"].outcome, "olora" in found["support"].reason) == (Outcome.UNPROVEN, True)
    assert found["consumer"].outcome is Outcome.PROVEN
    assert "assay: checkpoint-2: UNPROVEN" in capsys.readouterr().out
    assert "cannot be merged" in verify_proof(tmp_path / "run" / "checkpoint-2").reason


@pytest.mark.usefixtures("here")
def test_dora_is_proven_live(base: Path, tmp_path: Path):
    callback = Prove(base=str(base))
    adapted(base, tmp_path / "run", callback, use_dora=True).train()
    found = {v.check: v.outcome for v in callback.proofs["checkpoint-2"]}
    assert [found[name] for name in ("live", "consumer", "architecture")] == [Outcome.PROVEN] * 3


@pytest.mark.slow
def test_an_adapter_of_trl_is_proven_and_merges(base: Path, tmp_path: Path):
    trl, peft, datasets = (pytest.importorskip(name) for name in ("trl", "peft", "datasets"))
    rows = datasets.Dataset.from_list([{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(6) for b in range(6)])
    args = trl.SFTConfig(str(tmp_path / "run"), max_steps=2, save_steps=2, logging_steps=1, per_device_train_batch_size=4, report_to=[],
                         use_cpu=True, bf16=False, disable_tqdm=True, learning_rate=1e-2, gradient_checkpointing=False)
    callback = Prove(base=str(base))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trl.SFTTrainer(model, args=args, train_dataset=rows, processing_class=transformers.AutoTokenizer.from_pretrained(base),
                   peft_config=lora, callbacks=[callback]).train()
    verdicts = {verdict.check: verdict.outcome for verdict in callback.proofs["checkpoint-2"]}
    assert (verdicts["live"], verdicts["whole"], verdicts["frozen"]) == (Outcome.PROVEN,) * 3
    folder = tmp_path / "run" / "checkpoint-2"
    assert assay(["export", str(folder), "--base", str(base), "--to", "merged", "--out", str(tmp_path / "merged")]) == 0
    assert open_artifact(tmp_path / "merged").patch is None

# ---------------------------------------------------------------- metrics on other pages


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [{"step": 0, "loss": 3.0, "learning_rate": 0.1, "epoch": 0, "data": "abc"}, {"step": 0, "eval_loss": 2.5},
            {"step": 1, "loss": "nan", "epoch": 0}, {"step": 2, "loss": 2.0, "epoch": 1}, {"step": 2, "eval_loss": 2.25}]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
    return tmp_path / "run"


def test_transformers_reads_our_trainer_state(run: Path, capsys: pytest.CaptureFixture[str]):
    assert assay(["track", str(run)]) == 0
    state = transformers.TrainerState.load_from_json(str(run / "trainer_state.json"))
    assert (state.global_step, state.best_metric, state.epoch) == (3, 2.25, 1)
    assert [row["loss"] for row in state.log_history if "loss" in row] == [3.0, 2.0]  # what is no number is no point
    assert trainer_state(run)["best_model_checkpoint"] is None, "no checkpoint is there"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    assert [trainer_state(run)[name] for name in ("best_metric", "best_global_step")] == [2.5, 1], "step 3 was not saved"
    (run / "checkpoints" / "step-000003").mkdir()
    assert trainer_state(run)["best_model_checkpoint"].endswith("step-000003")


def test_tensorboard_reads_our_points(run: Path, capsys: pytest.CaptureFixture[str]):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert assay(["track", str(run), "--to", "tensorboard"]) == 0
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 3.0), (3, 2.0)]
    assert [event.value for event in events.Scalars("eval/loss")] == [2.5, 2.25]


def test_what_is_no_run_or_not_installed_is_a_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert assay(["track", str(tmp_path)]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err
    assert assay(["track", str(run), "--to", "trackio"]) == 2
    assert "pip install trackio" in capsys.readouterr().err

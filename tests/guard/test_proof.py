"""Proofs on our checkpoints and on what transformers and PEFT wrote: what holds is PROVEN, what does not is REFUTED by name."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PrefixTuningConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from assay.cli import run as assay
from assay.errors import UsageError
from assay.guard import proof, proving_process
from assay.guard.proof import ProofRequest, Prover, examine_artifact, prove, prove_checkpoint
from assay.guard.proof_subject import ProofSampling
from assay.model.probe_logits import probe_inputs
from assay.model.special_tokens import resolve_special_tokens
from assay.model.transformer import initialised
from assay.store import checkpoint
from assay.store.artifact import build_model, open_artifact
from assay.store.export_artifact import EXPORT_ROUNDING, export_artifact, rounding_bound
from assay.store.gguf import EXPORT_EXACT
from assay.store.saving import Lineage, model_contents
from assay.testing.tiny_models import save_hf_folder, tiny_config, tiny_model, tiny_tokenizer
from assay.verdict import Outcome, overall, without_optional
from tests.processes import ended

NEW = Lineage()
QUICK = ProofSampling(samples=0)  # where no test asks how it speaks


def save(where, family="llama", seed=0, lineage=NEW, change=0.0):
    model, tokenizer = initialised(tiny_config(family), seed), tiny_tokenizer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)) * change)
    return checkpoint.write_checkpoint(where, model_contents(model, tokenizer, resolve_special_tokens(tokenizer, {}, {}), lineage))


def outcomes(verdicts):
    return {verdict.check: verdict.outcome for verdict in verdicts}


def refuted(verdicts):
    return {verdict.check: verdict.reason for verdict in verdicts if verdict.outcome is Outcome.REFUTED}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Ours, and the folder that transformers writes of it: its own save_pretrained, tokenizer included."""
    home = tmp_path_factory.mktemp("both")
    save(home / "ours", "qwen2")
    AutoModelForCausalLM.from_pretrained(home / "ours").save_pretrained(home / "theirs")
    PreTrainedTokenizerFast.from_pretrained(home / "ours").save_pretrained(home / "theirs")
    return home


@pytest.fixture
def foreign(both, tmp_path):
    """A copy for each test, which may break it."""
    shutil.copytree(both, tmp_path, dirs_exist_ok=True)
    return tmp_path / "theirs"


def adapter(foreign, folder, *, train=True, **options):
    """An adapter as PEFT writes it."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=options.pop("targets", ["q_proj", "v_proj"]), task_type="CAUSAL_LM", **options)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(foreign), config)
    if train:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    far = 0.001 if "lora_embedding" in name else 0.05  # PEFT begins with an embedding's B of size 1
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * far)
    model.save_pretrained(folder)
    return folder


def test_a_checkpoint_earns_its_hallmark_in_a_fresh_process(fresh_proofs, tmp_path):
    saved = save(tmp_path / "step-000000")
    verdicts = prove_checkpoint(saved.folder)
    assert overall(without_optional(verdicts)) is Outcome.PROVEN, verdicts
    assert outcomes(verdicts)["health"] is Outcome.UNPROVEN  # an untrained model babbles
    mark = checkpoint.open_checkpoint(saved.folder).hallmark
    assert mark is not None
    assert {v["check"] for v in mark["verdicts"]} == {v.check for v in without_optional(verdicts)}


def test_what_equals_its_parent_though_it_should_have_moved_is_quarantined(tmp_path):
    parent = save(tmp_path / "step-000000")
    recorded = {"weights": open_artifact(parent.folder).digest, "path": str(parent.folder)}
    from assay.store.saving import Ancestor

    child = save(tmp_path / "step-000001", lineage=Lineage("moved", Ancestor(**recorded)))
    assert "equals the parent's" in refuted(prove_checkpoint(child.folder))["lineage"]
    assert checkpoint.open_checkpoint(child.folder).quarantined
    found, passed_over = checkpoint.latest_checkpoint(tmp_path)
    assert found is not None
    assert found.folder == parent.folder
    assert "quarantined" in passed_over[0]


def test_what_was_made_of_a_quarantined_model_is_refuted(tmp_path):
    from assay.store.saving import Ancestor
    from assay.verdict import refuted as against

    parent = save(tmp_path / "parent")
    recorded = Ancestor(open_artifact(parent.folder).digest, str(parent.folder))
    child = save(tmp_path / "child", lineage=Lineage("same", recorded))
    assert "parent" not in outcomes(prove_checkpoint(child.folder)), "a clean twin"
    checkpoint.quarantine_checkpoint(parent, [against("values", "it talks nonsense")])
    assert "is quarantined: it talks nonsense" in refuted(prove_checkpoint(child.folder))["parent"]
    assert checkpoint.open_checkpoint(child.folder).hallmark is None


def test_a_hallmark_copied_onto_other_bytes_is_refuted(tmp_path):
    """The same command that would have proven either of them."""
    for seed in (0, 1):
        prove_checkpoint(save(tmp_path / f"step-{seed:06d}", seed=seed).folder, probing=ProofSampling(0))
    shutil.copy(tmp_path / "step-000000" / "hallmark.json", tmp_path / "step-000001" / "hallmark.json")
    assert "speaks of the checkpoint" in refuted(examine_artifact(ProofRequest(str(tmp_path / "step-000001"))))["whole"]
    assert assay(["prove", str(tmp_path / "step-000001"), "--probe-samples", "0"]) == 3


def test_movement_beyond_what_the_optimizer_could_do_is_refuted(tmp_path):
    from assay.store.saving import Ancestor

    parent = save(tmp_path / "parent")
    ancestor = Ancestor(open_artifact(parent.folder).digest, str(parent.folder))
    near = save(tmp_path / "near", lineage=Lineage("moved", ancestor, movement_bound=0.1), change=0.01)
    far = save(tmp_path / "far", lineage=Lineage("moved", ancestor, movement_bound=0.001), change=0.01)
    frozen = save(tmp_path / "frozen", lineage=Lineage("moved", ancestor, frozen=("norm.weight",)), change=0.01)
    assert outcomes(examine_artifact(ProofRequest(str(near.folder), probing=QUICK)))["lineage"] is Outcome.PROVEN
    assert "could have moved an element by 1.00e-03" in refuted(examine_artifact(ProofRequest(str(far.folder), probing=QUICK)))["lineage"]
    assert "frozen have moved: norm.weight" in refuted(examine_artifact(ProofRequest(str(frozen.folder), probing=QUICK)))["lineage"]


def test_a_folder_of_transformers_is_proven_as_far_as_it_can_be(foreign, tmp_path):
    verdicts = prove(ProofRequest(str(foreign)))
    found = outcomes(verdicts)
    assert {c for c, o in found.items() if o is Outcome.PROVEN} >= {"whole", "architecture", "values", "fields", "consumer"}
    assert {c for c, o in found.items() if o is Outcome.UNPROVEN} >= {"hashes", "answers", "lineage"}
    assert Outcome.REFUTED not in found.values()
    assert overall(without_optional(verdicts)) is Outcome.UNPROVEN
    against = outcomes(examine_artifact(ProofRequest(str(foreign), against=str(tmp_path / "ours"), expect="same")))
    assert against["lineage"] is Outcome.PROVEN


def test_a_folder_of_transformers_is_refuted_where_it_is_wrong(foreign):
    config = json.loads((foreign / "generation_config.json").read_text())
    (foreign / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    assert "generation_config.json" in refuted(examine_artifact(ProofRequest(str(foreign))))["fields"]
    (foreign / "model.safetensors").write_bytes((foreign / "model.safetensors").read_bytes()[:-8])
    assert "whole" in refuted(examine_artifact(ProofRequest(str(foreign))))


@pytest.mark.parametrize("options", [
    {}, {"use_rslora": True}, {"targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
    {"modules_to_save": ["lm_head"]}, {"targets": "all-linear"}, {"layers_to_transform": [1]}, {"use_dora": True},
    {"use_dora": True, "use_rslora": True, "init_lora_weights": "pissa"}, {"bias": "all"}, {"bias": "lora_only"},
    {"rank_pattern": {"layers.0.self_attn.q_proj": 2, "v_proj": 3}, "alpha_pattern": {"v_proj": 32}}, {"init_lora_weights": "pissa"},
    {"targets": ["q_proj", "embed_tokens"]}, {"targets": ["lm_head"]}, {"trainable_token_indices": [5, 9]}], ids=str)
def test_an_adapter_of_peft_is_proven_and_merges_to_what_peft_computes(foreign, tmp_path, options):
    folder = adapter(foreign, tmp_path / "adapter", **options)
    verdicts = examine_artifact(ProofRequest(str(folder), against=str(foreign), base=str(foreign), probing=QUICK))
    assert not refuted(verdicts), verdicts
    assert outcomes(verdicts)["consumer"] is Outcome.PROVEN
    assert outcomes(verdicts)["lineage"] is Outcome.PROVEN
    source = open_artifact(folder, base=foreign)
    bound = export_artifact(source, "merged", tmp_path / "merged")
    merged = examine_artifact(ProofRequest(str(tmp_path / "merged"), str(folder), expect="same", bound=bound, against_base=str(foreign),
                                           probing=QUICK))
    assert overall(without_optional(merged)) is Outcome.PROVEN, merged
    tokens, _ = probe_inputs(320, 256)
    live = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(foreign), folder).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(build_model(source)(tokens), live(tokens).logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(theirs(tokens).logits, live(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"use_rslora": True}, {
    "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 5}, "targets": ["q_proj", "k_proj"]}], ids=str)
def test_our_adapter_goes_back_to_peft(foreign, tmp_path, options):
    source = open_artifact(adapter(foreign, tmp_path / "adapter", **options), base=foreign)
    export_artifact(source, "peft", tmp_path / "again")
    assert overall(without_optional(examine_artifact(ProofRequest(str(tmp_path / "again"), str(tmp_path / "adapter"), expect="same",
                                                                  bound=2e-4, probing=QUICK,
                                            against_base=str(foreign))))) is Outcome.PROVEN
    tokens, _ = probe_inputs(320, 256)
    live = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(foreign), tmp_path / "again").eval()
    with torch.no_grad():
        torch.testing.assert_close(live(tokens).logits, build_model(source)(tokens), atol=1e-5, rtol=1e-5)


PEFT_KINDS = {
    "IA3": lambda: IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
    "PREFIX_TUNING": lambda: PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "ADALORA": lambda: AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "LOHA": lambda: LoHaConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "VERA": lambda: VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "OFT": lambda: OFTConfig(oft_block_size=8, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "TRAINABLE_TOKENS": lambda: TrainableTokensConfig(token_indices=[3, 5], task_type="CAUSAL_LM"),
}


def of_another_kind(foreign, folder, kind, *, train=True):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(foreign), PEFT_KINDS[kind]())
    if train:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.05)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_an_adapter_that_only_peft_knows_is_proven_through_peft(foreign, tmp_path, kind):
    """Whole, finite, loaded and with an effect; that it cannot be merged here leaves it UNPROVEN."""
    folder = of_another_kind(foreign, tmp_path / "adapter", kind)
    verdicts = examine_artifact(ProofRequest(str(folder), base=str(foreign)))
    assert outcomes(verdicts) == {"whole": Outcome.PROVEN, "support": Outcome.UNPROVEN, "values": Outcome.PROVEN,
                                  "consumer": Outcome.PROVEN, "movement": Outcome.PROVEN}, verdicts
    with pytest.raises(UsageError, match=f"peft_type = '{kind}' is not supported"):
        open_artifact(folder, base=foreign)


def test_an_adapter_that_only_peft_knows_is_refuted_where_it_is_wrong(foreign, tmp_path):
    idle = of_another_kind(foreign, tmp_path / "idle", "IA3", train=False)
    assert "has no effect" in refuted(examine_artifact(ProofRequest(str(idle), base=str(foreign))))["movement"]
    file = of_another_kind(foreign, tmp_path / "bad", "IA3") / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    save_file(tensors | {first: tensors[first] * float("nan")}, file)
    found = refuted(prove(ProofRequest(str(file.parent), base=str(foreign))))
    assert first in found["values"]
    assert "NaN" in found["movement"]
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, file)
    assert first in refuted(examine_artifact(ProofRequest(str(file.parent), base=str(foreign))))["consumer"]
    file.write_bytes(file.read_bytes()[:-8])
    assert "whole" in refuted(examine_artifact(ProofRequest(str(file.parent), base=str(foreign))))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_rounded_export_is_proven_again_by_what_it_records(tmp_path, dtype):
    """The rounding that an export was allowed was forgotten: the next proof called the same folder another model."""
    save(tmp_path / "source")
    assert assay(["export", str(tmp_path / "source"), "--to", "hf", "--out", str(tmp_path / "out"), "--dtype", dtype]) == 0
    assert checkpoint.open_checkpoint(tmp_path / "out").facts["rounded"] == dtype
    lineage = next(v for v in examine_artifact(ProofRequest(str(tmp_path / "out"))) if v.check == "lineage")
    assert (lineage.outcome, lineage.evidence["bound"]) == (Outcome.PROVEN, EXPORT_ROUNDING[dtype]), lineage
    assert lineage.evidence["error"] > EXPORT_EXACT or dtype == "float16"
    assert assay(["prove", str(tmp_path / "out")]) == 0


def test_what_was_not_rounded_is_held_to_the_exact_bound(tmp_path):
    """Neither a lossless export nor a manifest that claims a rounding which its weights do not show widens the bound."""
    save(tmp_path / "source")
    export_artifact(open_artifact(tmp_path / "source"), "hf", tmp_path / "out", "float32")
    assert checkpoint.open_checkpoint(tmp_path / "out").facts["rounded"] is None
    claimed = save(tmp_path / "claimed", lineage=Lineage("same", rounded="bfloat16"))
    assert [rounding_bound(open_artifact(folder)) for folder in (tmp_path / "out", claimed.folder)] == [EXPORT_EXACT] * 2


def trainer_output(foreign, folder):
    for step in (9, 10):
        shutil.copytree(foreign, folder / f"checkpoint-{step}")
    (folder / "checkpoint-11").mkdir()  # a save that was cut off
    return folder


def test_each_checkpoint_in_a_trainers_output_is_proven_newest_first(foreign, tmp_path, capsys):
    out = trainer_output(foreign, tmp_path / "out")
    data = (out / "checkpoint-9" / "model.safetensors").read_bytes()
    (out / "checkpoint-9" / "model.safetensors").write_bytes(data[:-8])
    assert assay(["prove", str(out), "--json", "--probe-samples", "0"]) == 3
    proofs = json.loads(capsys.readouterr().out)
    assert [(Path(proof["path"]).name, proof["outcome"]) for proof in proofs] == [
        ("checkpoint-11", "UNPROVEN"), ("checkpoint-10", "UNPROVEN"), ("checkpoint-9", "REFUTED")]
    assert "not a model folder" in proofs[0]["verdicts"][0]["reason"]
    assert "consumer" in {v["check"] for v in proofs[1]["verdicts"] if v["outcome"] == "PROVEN"}
    assert assay(["inspect", str(out)]) == 2
    assert "name one of its checkpoints: checkpoint-11, checkpoint-10" in capsys.readouterr().err


def test_a_trainers_output_of_which_nothing_opens_is_a_sentence(tmp_path, capsys):
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
    assert assay(["prove", str(tmp_path / "out")]) == 2
    assert "checkpoint-1: neither manifest.json" in capsys.readouterr().err


def test_an_adapter_that_was_never_trained_is_refused_by_name(foreign, tmp_path):
    folder = adapter(foreign, tmp_path / "adapter", train=False)
    assert "no effect" in refuted(examine_artifact(ProofRequest(str(folder), base=str(foreign))))["architecture"]


def test_where_there_are_cores_proofs_run_side_by_side(tmp_path, monkeypatch):
    """Two that wait for each other end only if both are under way at once."""
    both = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(proof, "usable_cores", lambda: 16)
    monkeypatch.setattr(proof, "prove_checkpoint", lambda folder, **_: both.wait() * [])
    prover = Prover()
    for name in ("one", "two"):
        prover.start(tmp_path / name)
    assert sorted(folder.name for folder, _ in prover.close()) == ["one", "two"]


@pytest.mark.parametrize(("there", "at_once"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (64, 4)])
def test_a_proof_leaves_most_cores_to_the_loop(there, at_once, monkeypatch):
    monkeypatch.setattr(proof, "usable_cores", lambda: there)
    assert Prover()._pool._max_workers == at_once


@pytest.mark.parametrize(("there", "beside", "alone"), [(1, 1, 1), (2, 1, 1), (8, 1, 4), (16, 2, 8)])
def test_a_proof_takes_more_threads_once_no_loop_needs_them(there, beside, alone, monkeypatch):
    monkeypatch.setattr(proving_process, "usable_cores", lambda: there)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (proof.proof_threads(beside=True), proof.proof_threads(beside=False)) == (beside, alone)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert proof.proof_threads(beside=False) == min(alone, 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert proof.proof_threads(beside=False) == alone


def test_no_proof_is_lost_between_the_thread_that_begins_it_and_the_one_that_asks(tmp_path, monkeypatch):
    often = sys.getswitchinterval()
    monkeypatch.setattr(proof, "prove_checkpoint", lambda folder, **_: [])
    prover, names, found = Prover(), [str(number) for number in range(2000)], []
    begin = threading.Thread(target=lambda: [prover.start(tmp_path / name) for name in names])
    sys.setswitchinterval(1e-6)
    try:
        begin.start()
        while begin.is_alive():
            found += prover.finished()
    finally:
        sys.setswitchinterval(often)
    assert sorted(folder.name for folder, _ in [*found, *prover.close()]) == sorted(names)


def test_a_proof_ends_with_who_asked_for_it(tmp_path):
    """A second Ctrl-C, a kill: nobody is left to be answered, and a check may take half an hour."""
    begun, wrapper, asking, endless = (tmp_path / name for name in ("begun", "python", "asking.py", "endless.py"))
    endless.write_text(f"import os, sys, time\nfrom pathlib import Path\nfrom assay.guard import proof\n"
                       f"proof.examine_artifact = lambda *_: (Path({str(begun)!r}).write_text(f'{{os.getpid()}}.'), time.sleep(600))\n"
                       "proof.main()\n")
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {endless} "$@"\n')
    wrapper.chmod(0o755)
    asking.write_text(f"import sys\nfrom assay.guard.proof import ProofRequest, prove\n"
                      f"sys.executable = {str(wrapper)!r}\nprove(ProofRequest('x'))\n")
    with subprocess.Popen([sys.executable, str(asking)]) as parent:
        deadline = time.monotonic() + 120
        while not (begun.exists() and begun.read_text().endswith(".")) and parent.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        parent.kill()
    assert ended(int(begun.read_text()[:-1]))


def test_a_proof_that_takes_too_long_says_nothing_of_the_artifact(fresh_proofs, tmp_path):
    found = save(tmp_path / "step-000001")
    (verdict,) = prove_checkpoint(found.folder, timeout=0.05)
    assert (verdict.outcome, overall([verdict])) == (Outcome.UNPROVEN, Outcome.UNPROVEN)
    assert "did not finish within 0.05 s" in verdict.reason
    again = checkpoint.open_checkpoint(found.folder)
    assert not again.quarantined
    assert again.hallmark is None


def test_an_index_that_transformers_does_not_open_is_refuted_in_a_sentence(tmp_path):
    folder = save_hf_folder(tmp_path / "model", tiny_model(), sharded=True)
    index = folder / "model.safetensors.index.json"
    assert outcomes(examine_artifact(ProofRequest(str(folder))))["consumer"] is Outcome.PROVEN
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    assert 'add "metadata": {} to it' in refuted(examine_artifact(ProofRequest(str(folder))))["consumer"]

"""Every fault is caught by its check, for its own reason, and its clean twin is silent; and the zoo itself can fail."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from assay.cli import run
from assay.guard import proof
from assay.guard.proof_subject import ProofSubject
from assay.testing.fault_injection import Plant, nothing, swap
from assay.verdict import Outcome, Verdict, proven, refuted, unproven
from assay.zoo import Fault, catalogue, observe
from tests.zoo.sightings import sight

# What the refusal must speak of: a fault that is caught for another reason was planted badly.
REASONS = {
    # checkpoints
    "empty host map": "holds no weights",
    "no index beside the weights": "has no index beside it",
    "empty weights file": "20 tensor(s) missing",
    "weights not gathered": "gather the weights",
    "placeholders in a folder": "has shape [0]",
    "matrix never filled": "down_proj.weight (100%); they were never filled",
    "hole in a matrix": "down_proj.weight (20%)",
    "NaN weights": "embed_tokens.weight (20480 of 20480)",
    "half-written checkpoint": "resumed from step-000030 instead",
    "newest checkpoint truncated": "resumed from step-000020 instead",
    "renamed checkpoint": "says step 10",
    "truncated shard": "truncated",
    "hole in a shard": "rows of zeros in 4 matrices",
    "absent shard": "model-00006-of-00006.safetensors, which is missing",
    "tensor in another shard": "lacks 'model.norm.weight'",
    "swapped shards": "not the shard that the index describes",
    "stale shard": "model-00002-of-00006.safetensors: its bytes hash to",
    "manifest of another checkpoint": "its bytes hash to",
    "manifest changed by hand": "manifest.json: its content hashes to",
    "hallmark of another checkpoint": "hallmark.json: speaks of the checkpoint",
    "optimizer state deleted": "lacks optimizer.safetensors",
    "rotation by name": "step-1000000: no such folder",
    "rotation forgets the best": "step-999970: no such folder",
    "flipped bit": "its bytes hash to",
    "bit flipped in memory": "down_proj.weight",
    "bit flipped before the save": "probe logits differ",
    "wrapper's prefix in the names": "20 tensor(s) missing",
    "wrapper's prefix in a folder": "20 tensor(s) missing",
    "loader that forgives its writer": "22 tensor(s) missing",
    "quantisation state dropped": "has shape [10240, 1]",
    "scales dropped": "float8_e4m3fn, quantised or",
    "head diverged, config tied": "lm_head.weight and model.embed_tokens.weight differ",
    "trained head dropped as tied": "probe logits differ",
    "tied in a folder, heads differ": "lm_head.weight and model.embed_tokens.weight differ",
    "tied head left unsaid": "transformers makes another model of these files",
    "rope scaling after the buffers": "probe logits differ",
    "rope base defaulted": "probe logits differ",
    "rope base missing": "rope_theta is missing",
    "rope fields disagree": "rope_theta 10000.0",
    "stale EOS in both configs": "config.json with '<|endoftext|>'",
    "stale EOS in generation_config": "generation_config.json with '<|endoftext|>'",
    "tokenizer rule changed at export": "normalizer differ, and an export changes nothing of it",
    "generation prompt lost at export": "a chat with its generation prompt is rendered as",
    "stop token lost": "though the model was taught to stop",
    "re-initialised after loading": "probe logits differ",
    "rows re-initialised after loading": "not what the files hold: embed.weight",
    "the last, not the best": "as parent",
    "nothing learned": "every one of 14 tensors equals the parent's",
    "untrained folder": "every one of 20 tensors equals the parent's",
    "transposed in a folder": "q_proj.weight is in the order of its transpose",
    "heads exchanged in a folder": "parts of it were exchanged or initialised anew",
    "exponent bit flipped in a folder": "1 of 4,096 weights moved by",
    "absurd weight in a folder": "weights that no training makes",
    "generation prompt lost in a folder": "lost the generation prompt: an answer begins with '<|im_start|>assistant",
    "alpha changed after the training": "adapter_config.json says alpha 16, rank 4, use_rslora false, README.md says alpha 8",
    "layers exchanged": "is unrelated to the parent's",
    "frozen tensor moved": "frozen have moved: norm.weight",
    "re-initialised while training": "the optimizer could have moved an element by 1.00e-03: blocks.0.mlp.up.weight",
    # adapters
    "wrong key names": "does not start with 'base_model.model.'",
    "module path with another prefix": "is missing, though target_modules names this layer",
    "empty adapter": "holds no tensors",
    "adapter not gathered": "gather the weights",
    "all-NaN adapter": "384 of 384 values that are NaN",
    "adapter without effect": "every product B·A is zero",
    "adapter on another base": "was trained on weights",
    "adapter of another width": "need [4, 128]",
    "magnitudes of DoRA left out": "layers.1.self_attn.q_proj.lora_magnitude_vector is missing",
    "layer left out": "layers.0.self_attn.q_proj.lora_A.weight is missing",
    "flipped bit in an adapter": "its bytes hash to",
    "trained head under its wrapper's name": "modules_to_save names 'lm_head'",
    "trained head not in the file": "modules_to_save names 'lm_head'",
    "modules_to_save dropped": "probe logits differ",
    "resized embedding not saved": "knows 321 ids, the model has 320 rows",
    "adapter's embedding dropped on save": "probe logits differ",
    "rank scaling lost": "probe logits differ",
    "re-wrapped with a fresh adapter": "the optimizer could have moved an element by 1.00e-02",
    "merged and applied again": "was trained on weights",
    "merge skipped the adapter": "of 4 tensors that it changes 4 are the base's",
    "merge skipped a layer": "1 are the base's (blocks.1.mlp.down.weight)",
    "merged onto a coarser base": "tensor(s) are not those of adapter",
    "merged twice": "merged more than once",
    "norm shifted by the merge": "1 tensor(s) are not those of adapter, rounded: norm.weight",
    "merged into 8-bit codes": "of 4 tensors that it changes 4 are the base's",
    "rounding swallowed the adapter": "of the adapter's effect on the answers is here: rounding swallowed it",
    # formats
    "duplicate key in a header": "'model.layers.1.self_attn.v_proj.weight' stands twice",
    "duplicate key in config.json": "'rope_theta' stands twice",
    "climbing name in an index": "'../outside.safetensors'",
    "climbing name in a header": "climbing",
    "header of 97 MB": "announces a header of 97,",
    "weights linked from elsewhere": "model.safetensors: a link that leads out",
    "tokenizer linked from elsewhere": "tokenizer.json: a link that leads out",
    "mutated headers": "of 301 files were refused",
    "q and k not permuted": "blocks.0.attn.qkv.weight",
    "k permuted by q's heads": "blocks.0.attn.qkv.weight",
    "wrong pre-tokenizer tag": "'x = 3.14159 + 1,000' becomes",
    "trained on 4 bits, merged into the file": "are not those of adapter",
    "scale of the block before": "a scale or a code is another block's",
    "trained with the scale of the block before": "the model computes something else",
    "base in 4 bits whose file was trained on since": "the adapter was trained on weights",
    "base dtype forgotten": "the adapter was trained on weights",
    "chat template lost": "rendered as None here",
    "quantised twice": "tensor(s) are not those of source",
    "one tensor badly quantised": "1 tensor(s) are not those of source, rounded: blocks.1.attn.qkv.weight",
    "EOS is the start of a turn": "'<|im_start|>' (id 257)",
    "GGUF cut short": "cut short",
    "squeezed out of four bits": "9 tensor(s) are not those of source, rounded",
    "squeezed file damaged": "the bytes of 'matrices' are not those that were written",
    "half-uploaded checkpoint": "model.safetensors: is not there, and the manifest lists it",
    "half-uploaded file": "model.safetensors: its bytes hash to",
    "flipped byte in the store": "model.safetensors: its bytes hash to",
    # codes with scales
    "codes that are all zero": "they were never filled",
    "scales of FP8 transposed": "have shape [1, 64], expected [64, 1]",
    "rows of codes with other rows' scales": "blocks.1.attn.out.weight (relative error 1.9e-01)",
    "one layer not in FP8, as the config says it is": "it was not quantised as stated",
    "four-bit codes packed from the other end": "blocks.0.mlp.down.weight (relative error 1.4",
    "scales twice what they must be": "half steps",
}


def test_every_row_about_artifacts_has_a_fault():
    assert REASONS.keys() <= catalogue().keys()
    rows = {row for fault in catalogue().values() for row in fault.rows}
    wanted = {"D09", "L13", "L14", "S2", *(f"C{i:02d}" for i in range(1, 15))}
    assert not (wanted | {f"M{i:02d}" for i in (1, 2, 3, 4, 5, 6, 8, 9, 10)}) - rows


@pytest.mark.parametrize("name", REASONS)
def test_it_is_caught_and_its_clean_twin_is_silent(name: str):
    sighting = sight(catalogue()[name])
    shown = "\n".join(["planted:", *map(str, sighting.planted), "clean:", *map(str, sighting.clean)])
    assert sighting.caught, f"{name} was missed\n{shown}"
    assert not sighting.false_alarm, f"the clean twin of {name} is not silent\n{shown}"
    assert REASONS.get(name, "") in sighting.facts()["reason"], shown


def test_a_blind_check_misses_its_fault():
    """A flipped bit in memory passes once the check that exists for it proves whatever it is shown."""
    def check_hashes(_: ProofSubject) -> Verdict:
        return proven("hashes", "looks fine")

    checks = tuple(check_hashes if check.__name__ == "check_hashes" else check for check in proof.PROOF_CHECKS)
    with swap(proof, "PROOF_CHECKS", checks):
        sighting = observe(catalogue()["bit flipped in memory"])
    assert not sighting.caught
    assert not sighting.false_alarm


def test_an_alarm_in_the_clean_twin_is_a_false_alarm():
    def nervous(_: ProofSubject) -> Verdict:
        return refuted("values", "it could be worse")

    nervous.__name__ = "check_values"
    checks = tuple(nervous if check.__name__ == "check_values" else check for check in proof.PROOF_CHECKS)
    with swap(proof, "PROOF_CHECKS", checks):
        sighting = observe(catalogue()["matrix never filled"])
    assert sighting.caught
    assert sighting.false_alarm


def made_up(planted: list[Verdict], clean: list[Verdict]) -> Fault:
    @contextmanager
    def plant(folder: Path) -> Iterator[None]:
        (folder / "planted").touch()
        yield

    def job(folder: Path, plant: Plant) -> list[Verdict]:
        with plant(folder):
            return planted if (folder / "planted").exists() else clean

    return Fault("made up", ("X00",), "save", "values", job, plant)


GOOD, BAD, IDLE = proven("values", "good"), refuted("values", "bad"), unproven("values", "did not run")
OTHER = refuted("fields", "bad")


@pytest.mark.parametrize(("planted", "clean", "caught", "false_alarm"), [
    ([BAD], [GOOD], True, False),
    ([GOOD], [GOOD], False, False),
    ([OTHER, GOOD], [GOOD], False, False),  # another check's alarm is luck
    ([IDLE], [GOOD], False, False),
    ([], [GOOD], False, False),
    ([BAD], [BAD], True, True),
    ([BAD], [GOOD, OTHER], True, True),
    ([BAD], [IDLE], True, True),  # silence must be earned
    ([BAD], [], True, True),
])
def test_what_counts_as_caught_and_what_as_a_false_alarm(planted, clean, caught, false_alarm):
    sighting = observe(made_up(planted, clean))
    assert (sighting.caught, sighting.false_alarm) == (caught, false_alarm)
    assert {"caught", "false_alarm", "seconds"} <= sighting.facts().keys()


def test_the_clean_twin_plants_nothing(tmp_path: Path):
    with nothing(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_swapped_restores_what_was_there_even_after_an_error():
    def fail() -> None:
        with swap(proof, "PROOF_TIMEOUT", 1.0):
            assert proof.PROOF_TIMEOUT == 1.0
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        fail()
    assert proof.PROOF_TIMEOUT == 1800.0


def test_a_refusal_of_a_hostile_header_counts_only_if_it_was_cheap(monkeypatch: pytest.MonkeyPatch):
    from assay.zoo import file_format_faults

    monkeypatch.setattr(file_format_faults, "MEMORY", 1000)
    sighting = observe(catalogue()["header of 97 MB"])
    assert not sighting.caught
    assert "but that took" in sighting.facts()["reason"]

# ---------------------------------------------------------------- the verb


def test_list_names_every_fault(capsys: pytest.CaptureFixture[str]):
    assert run(["zoo", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [fault["name"] for fault in listed] == list(catalogue())
    assert all(set(fault) == {"name", "rows", "stage", "check"} for fault in listed)
    assert sum(bool(fault["rows"]) for fault in listed) > 0.85 * len(listed)  # some were found here, and stand in no table


def test_json_adds_what_happened(capsys: pytest.CaptureFixture[str]):
    assert run(["zoo", "--only", "mutated headers", "truncated shard", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [(s["name"], s["caught"], s["false_alarm"]) for s in seen] == [
        ("mutated headers", True, False), ("truncated shard", True, False)]
    assert all(s["seconds"] > 0 for s in seen)


def test_a_missed_fault_is_exit_code_3(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(catalogue(), "made up", made_up([GOOD], [GOOD]))
    assert run(["zoo", "--only", "made up"]) == 3
    assert "MISSED" in capsys.readouterr().out


def test_an_unknown_name_is_exit_code_2_and_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert run(["zoo", "--only", "truncated shart"]) == 2
    assert "truncated shard" in capsys.readouterr().err


def test_nothing_planted_outlives_its_job():
    before = [check.__name__ for check in proof.PROOF_CHECKS]
    clean = observe(catalogue()["flipped bit"]).clean
    assert all(v.outcome is not Outcome.REFUTED for v in clean)
    assert [check.__name__ for check in proof.PROOF_CHECKS] == before

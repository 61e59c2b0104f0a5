"""Publishing and verifying: what is not proven does not leave, what arrives is hashed, and a changed byte or another key is found."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from assay.cli import run as assay
from assay.guard.publication_checks import check_published
from assay.interop.publish_targets import UrlTarget, open_target
from assay.interop.publishing import PublishRequest, publish
from assay.report.markdown import code_block, markdown_text
from assay.report.model_card import CardSource, model_card
from assay.store import ssh_signature
from assay.store.artifact import open_artifact
from assay.store.checkpoint import open_checkpoint, quarantine_checkpoint, write_hallmark
from assay.store.digests import recorded_digest
from assay.testing.tiny_models import flip_bit, save_model, tiny_model
from assay.verdict import proven, refuted, unproven
from assay.zoo.publication_faults import allowed_signers, make_ssh_key
from tests.interop.hub_double import running_hub
from tests.report import crafted

needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
HOSTILE_VERDICT = unproven("open", f"| a | b |\n# big\n`code` {crafted.HOSTILE[:40]} @everyone [x](http://evil)")
HUB_SCRIPT = """
import sys
from assay.cli import run
model, hub = sys.argv[1], "hf://me/"
codes = [run(["publish", model, "--to", hub + "good"]), run(["verify", hub + "good"]), run(["publish", model, "--to", hub + "good"]),
         run(["publish", model, "--to", hub + "spoiled"]), run(["verify", hub + "spoiled"]), run(["verify", hub + "nowhere"])]
print("codes", codes)
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run with a ledger, whose model was handed over and carries a hallmark."""
    folder = crafted.a_run(tmp_path_factory.mktemp("runs") / "sft", verdicts=[proven("loss", "the loss is the loss"), HOSTILE_VERDICT])
    write_hallmark(save_model(folder / "model", tiny_model()), [proven("whole", "every file is there"), proven("answers", "the same")])
    return folder


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("maker", "stranger"):
        make_ssh_key(folder / name)
        allowed_signers(folder / f"{name}.allowed", folder / name)
    return folder


@pytest.fixture(scope="module")
def published(run_folder, keys, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("published") / "model"
    assert assay(["publish", str(run_folder / "model"), "--to", str(place), "--sign", str(keys / "maker")]) == 0
    return place


def verified(folder: Path, signers: Path | None = None) -> dict[str, str]:
    return {verdict.check: f"{verdict.outcome} {verdict.reason}" for verdict in check_published(folder, signers)}

# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("mark", "sentence"), [(None, "nobody proved these bytes"), ("quarantine", "quarantined: a byte is off")])
def test_what_is_not_proven_does_not_leave(mark, sentence, tmp_path, capsys):
    checkpoint = save_model(tmp_path / "model", tiny_model())
    if mark:
        quarantine_checkpoint(checkpoint, [refuted("values", "a byte is off")])
    assert assay(["publish", str(tmp_path / "model"), "--to", str(tmp_path / "out")]) == 3
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert assay(["verify", str(tmp_path / "model")]) == 3


def test_there_is_no_target_unless_it_is_named_and_none_is_overwritten(run_folder, published, tmp_path, capsys):
    model = str(run_folder / "model")
    assert assay(["publish", model]) == 2
    assert assay(["publish", model, "--to", ""]) == 2
    assert assay(["publish", model, "--to", "hf://nobody"]) == 2
    assert assay(["publish", model, "--to", str(tmp_path / "x"), "--public"]) == 2
    before = (published / "publication.json").read_bytes()
    assert assay(["publish", model, "--to", str(published)]) == 2
    assert "never overwritten" in capsys.readouterr().err
    assert (published / "publication.json").read_bytes() == before


def test_the_state_of_a_run_and_another_runs_ledger_are_refused(run_folder, tmp_path, capsys):
    write_hallmark(save_model(tmp_path / "step", tiny_model(), optimizer={"m": torch.ones(2)}), [proven("whole", "there")])
    assert assay(["publish", str(tmp_path / "step"), "--to", str(tmp_path / "out")]) == 2
    assert "assay export" in capsys.readouterr().err
    write_hallmark(save_model(tmp_path / "elsewhere", tiny_model(seed=5)), [proven("whole", "there")])
    assert assay(["publish", str(tmp_path / "elsewhere"), "--to", str(tmp_path / "out"), "--run", str(run_folder)]) == 2
    assert "none of its checkpoints holds the weights" in capsys.readouterr().err

# ---------------------------------------------------------------- what is found


@needs_ssh
@pytest.mark.parametrize(("name", "check"), [
    ("model.safetensors", "files"), ("tokenizer.json", "files"), ("manifest.json", "files"), ("hallmark.json", "files"),
    ("README.md", "publication"), ("publication.json", "publication"), ("publication.json.sig", "signature")])
def test_one_changed_byte_is_found(published, keys, tmp_path, name, check):
    copy = tmp_path / "copy"
    shutil.copytree(published, copy)
    flip_bit(copy / name, (copy / name).stat().st_size // 2, bit=0)
    found = verified(copy, keys / "maker.allowed")
    assert found[check].startswith("REFUTED")
    assert name in found[check]


@needs_ssh
def test_what_nobody_published_and_what_is_missing_is_found(published, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(published, copy)
    (copy / "extra.gguf").write_bytes(b"GGUF")
    assert "extra.gguf: not published with the rest" in verified(copy)["publication"]
    (copy / "extra.gguf").unlink()
    (copy / "modeling.py").write_text("")
    assert "modeling.py, which its manifest does not list" in verified(copy)["files"]
    (copy / "modeling.py").unlink()
    (copy / "README.md").unlink()
    assert "README.md: published, and not here" in verified(copy)["publication"]


@needs_ssh
def test_who_signed_is_said(published, keys, tmp_path, capsys):
    assert assay(["verify", str(published), "--signers", str(keys / "maker.allowed")]) == 0
    assert "signed by maker@lab (the ED25519 key SHA256:" in capsys.readouterr().out
    assert assay(["verify", str(published), "--signers", str(keys / "stranger.allowed")]) == 3
    assert "signed by another key" in capsys.readouterr().out
    assert assay(["verify", str(published)]) == 0
    assert "whose key that is, --signers would say" in capsys.readouterr().out
    copy = tmp_path / "copy"
    shutil.copytree(published, copy)
    (copy / "publication.json.sig").unlink()
    assert assay(["verify", str(copy), "--signers", str(keys / "maker.allowed")]) == 3
    assert assay(["verify", str(copy)]) == 0
    assert "nobody signed it" in capsys.readouterr().out


@needs_ssh
def test_a_signature_for_another_purpose_does_not_count(published, keys, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(published, copy)
    (copy / "publication.json.sig").unlink()
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-f", str(keys / "maker"), "-n", "git", str(copy / "publication.json")], check=True,
                   capture_output=True)
    assert verified(copy, keys / "maker.allowed")["signature"].startswith("REFUTED")


def test_without_ssh_keygen_it_is_refused_in_words(run_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "key").write_text("a key")
    monkeypatch.setattr(ssh_signature, "_PROGRAM", "no-such-ssh-keygen")
    assert assay(["publish", str(run_folder / "model"), "--to", str(tmp_path / "out"), "--sign", str(tmp_path / "key")]) == 2
    assert "install OpenSSH" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_published_folder_is_still_a_checkpoint(published):
    assert open_checkpoint(published).hallmark is not None
    assert open_artifact(published).config.depth == 2

# ---------------------------------------------------------------- other targets


def test_an_object_store_by_fsspec(run_folder, tmp_path):
    """In fsspec's own memory filesystem: the code of s3://, without S3."""
    place = "memory://bucket/model"
    done = publish(PublishRequest(run_folder / "model", place))
    assert done.verdicts[0].check == "fetched back"
    assert assay(["verify", place]) == 0
    target = open_target(place)
    assert isinstance(target, UrlTarget)
    path = f"{target.root}/config.json"
    target.files.pipe_file(path, target.files.cat_file(path).replace(b"64", b"65", 1))
    assert assay(["verify", place]) == 3


def test_the_hub_by_its_own_client(run_folder, tmp_path):
    """Pushed, fetched back and verified; a second push is refused; weights that come back changed are found."""
    with running_hub() as hub:
        told = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_none", "HF_HUB_OFFLINE": "0",
                             "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run([sys.executable, "-c", HUB_SCRIPT, str(run_folder / "model")], env=told, capture_output=True, text=True,
                              timeout=120)
    assert "codes [0, 0, 2, 3, 3, 1]" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "REFUTED   fetched back: model.safetensors hashes to" in done.stdout
    assert hub.private["me/good"] is True
    assert {"README.md", "publication.json", "hallmark.json", "model.safetensors"} <= hub.repositories["me/good"].keys()

# ---------------------------------------------------------------- the card


def headings(card: str) -> list[str]:
    return [line for line in card.splitlines() if line.startswith("## ")]


def test_the_card_is_made_from_the_ledger_and_stays_text(run_folder, published):
    card = (published / "README.md").read_text()
    manifest = open_checkpoint(run_folder / "model").manifest
    for said in (recorded_digest(manifest), "c0ffee", "0.5 \\[0.4, 0.6\\] (n=90)", "Made by `assay sft`", "no held-out losses",
                 "| ✅ PROVEN | answers | the same |", "assay verify FOLDER", "Licences", "transformers is not installed"):
        assert said in card, said
    assert "<script" not in card
    assert "\n# big" not in card
    assert "](http" not in card.replace("\\]", "")
    shown = (Path(__file__).parents[2] / "docs" / "model-card.md").read_text()
    assert headings(card) == headings(shown)
    assert len(headings(card)) == 8  # all that a card says


def test_without_a_ledger_the_card_says_so(published):
    card = model_card(CardSource("alone", open_checkpoint(published), None))
    assert "Unknown: no ledger says which data were read" in card
    assert "None on record: nothing says what this model is worth" in card


def test_an_evaluation_of_other_weights_does_not_stand_on_the_card(run_folder, tmp_path, capsys):
    scores = b'{"id": "1"}\n'
    weights = recorded_digest(open_checkpoint(run_folder / "model").manifest)
    summary = {"task": "gsm8k", "dataset": "d" * 64, "checkpoint": weights, "k": 1, "scores_sha256": hashlib.sha256(scores).hexdigest(),
               "estimates": {"pass@1": {"mean": 0.25, "low": 0.2, "high": 0.3, "n": 100}}}
    for name, changed in (("good", {}), ("others", {"checkpoint": "0" * 64}), ("edited", {"scores_sha256": "0" * 64})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores.jsonl").write_bytes(scores)
        (tmp_path / name / "eval.json").write_text(json.dumps(summary | changed))
    words = ["publish", str(run_folder / "model"), "--to", str(tmp_path / "out"), "--evals"]
    assert assay([*words, str(tmp_path / "others")]) == 2
    assert assay([*words, str(tmp_path / "edited")]) == 2
    assert not (tmp_path / "out").exists()
    assert assay([*words, str(tmp_path / "good")]) == 0
    assert "0.25 \\[0.2, 0.3\\] (n=100)" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_a_gguf_file_goes_along_with_what_was_proven_of_it(run_folder, tmp_path):
    assert assay(["publish", str(run_folder / "model"), "--to", str(tmp_path / "out"), "--gguf", "q8_0"]) == 0
    assert "Of `model-q8_0.gguf`, opened in a fresh process" in (tmp_path / "out" / "README.md").read_text()
    assert "model-q8_0.gguf" in verified(tmp_path / "out")["publication"]
    (tmp_path / "out" / "model-q8_0.gguf").unlink()
    assert "not here, so not looked at: model-q8_0.gguf" in verified(tmp_path / "out")["publication"]


def test_text_stays_text_in_markdown():
    assert markdown_text("a|b <b> `c` @me") == "a\\|b &#60;b&#62; \\`c\\` &#64;me"
    assert code_block("a\n````\nb").startswith("`````\n")

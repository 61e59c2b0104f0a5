"""KTO: what is called desirable is learned against a reference that stays; flipped labels and data of one kind do not pass."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.data.feedback import read_feedback, refuse_one_sided, render_feedback
from assay.errors import DataError
from assay.guard.kto_checks import check_feedback
from assay.guard.preference_checks import check_contradictions
from assay.learn import unpaired
from assay.model.special_tokens import resolve_special_tokens
from assay.recipes import hand_over, kto, run, starting_model
from assay.recipes.kto_options import Kto
from assay.recipes.trainer import Trainer
from assay.store.artifact import open_artifact
from assay.store.digests import weights_digest
from assay.testing.tiny_models import save_model, tiny_model, tiny_tokenizer
from assay.testing.tiny_training import NoProver
from assay.verdict import Outcome, proven
from tests.recipes.sittings import rows
from tests.refusals import stopped_by


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kto")
    save_model(folder / "base", tiny_model("llama"))
    write(folder / "answers.jsonl", answers())
    return folder


def answers(*, flipped: bool = False, end: str = "=") -> list[dict[str, Any]]:
    """Right sums are desirable, wrong ones are not."""
    return [{"prompt": f"{a}+{b}{end}", "completion": f"{'yes' if good else 'no'} {a + b + (not good)}", "label": good != flipped}
            for a in range(12) for b in range(8) for good in [(a + b) % 2 == 0]]


def write(where: Path, said: list[dict[str, Any]]) -> Path:
    where.write_text("".join(json.dumps(row) + "\n" for row in said))
    return where


def options(home: Path, out: Path, **changed: Any) -> Kto:
    usual: dict[str, Any] = {"model": str(home / "base"), "data": (str(home / "answers.jsonl"),), "out": str(out), "max_length": 24,
                             "batch_tokens": 384, "num_train_epochs": 4, "learning_rate": 1e-2, "micro_batch_tokens": 192, "save_steps": 3,
                             "held_out": 0.2, "max_steps": 6, "device": "cpu", "warmup_steps": 1}
    return Kto(**(usual | changed))


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave saves unproven: what a fresh process says is the matter of tests/guard/test_proof.py."""
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    monkeypatch.setattr(starting_model, "prove_checkpoint", lambda folder, **_: [proven("whole", "not looked at")])


def metrics(config: Kto, name: str) -> list[float]:
    return [row[name] for row in rows(Path(config.out) / "metrics.jsonl") if name in row]


@pytest.mark.parametrize("changed", [{"lora_r": 4, "reference": "live"},
                                     {"loss_type": "apo_zero_unpaired", "shards": 3, "reference": "live"}], ids=["lora", "apo"])
def test_a_run_learns_what_is_desirable_and_hands_it_over(changed: dict[str, Any], home: Path, tmp_path: Path):
    config, said = options(home, tmp_path / "run", **changed), []
    found = kto.kto(config, said.append)
    assert all(verdict.outcome is Outcome.PROVEN for verdict in found.verdicts), str(found)
    assert metrics(config, "eval_margin")[-1] > metrics(config, "eval_margin")[0] == pytest.approx(0, abs=1e-4)
    assert metrics(config, "rewards/signed")[-1] > 0
    assert any("PROVEN    initial loss" in line for line in said)
    assert any("PROVEN    kl" in line for line in said) == (config.loss_type == "kto")
    assert (tmp_path / "run" / "model").exists()


def test_interrupted_and_resumed_is_the_uninterrupted_run_bit_for_bit(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, parts = options(home, tmp_path / "whole"), options(home, tmp_path / "parts")
    kto.kto(whole, lambda _: None)
    over = Trainer.over

    def interrupted(trainer: Trainer) -> bool:
        if trainer.done == 4:
            trainer.run.interrupted = 15
        return over(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", interrupted)
        assert kto.kto(parts, lambda _: None).exit_code == 143
    assert kto.kto(parts, lambda _: None).exit_code == 0
    assert metrics(parts, "loss") == metrics(whole, "loss")
    one, two = (weights_digest(open_artifact(Path(config.out) / "model").tensors) for config in (whole, parts))
    assert one == two


def test_flipped_labels_are_caught_by_answers_held_out(home: Path, tmp_path: Path):
    held_out = write(tmp_path / "held.jsonl", answers(flipped=True, end=" = "))
    found = kto.kto(options(home, tmp_path / "run", held_out_data=str(held_out)), lambda _: None)
    assert found.exit_code == 3
    assert [verdict.check for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED] == ["direction"]


def test_a_kl_of_other_completions_is_stopped_before_step_1(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = unpaired.mismatch_kl
    monkeypatch.setattr(unpaired, "mismatch_kl", lambda model, parts: usual(model, parts) + 0.3)
    with stopped_by("kl"):
        kto.kto(options(home, tmp_path / "run"), lambda _: None)


@pytest.mark.parametrize(("row", "words"), [
    ({"prompt": "a", "completion": "b"}, "there is no label"), ({"prompt": "a", "completion": "b", "label": "good"}, "expected true"),
    ({"prompt": "a", "completion": " ", "label": True}, "completion is empty")])
def test_rows_that_say_nothing_are_refused_by_file_and_line(row: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(DataError, match=f"answers.jsonl:1: .*{words}|answers.jsonl:1: {words}"):
        read_feedback(write(tmp_path / "answers.jsonl", [row]))


def test_a_run_on_conversations_passes_its_own_audit(home: Path, tmp_path: Path):
    """Labelled rows and pairs in one file."""
    turn = lambda role, said: [{"role": role, "content": said}]
    rows = [{"prompt": turn("user", row["prompt"]), "completion": turn("assistant", row["completion"]), "label": row["label"]}
            for row in answers()]
    rows += [{"prompt": turn("user", f"{n}?"), "chosen": turn("assistant", f"yes {n}"), "rejected": turn("assistant", f"no {n}")}
             for n in range(20)]
    config = options(home, tmp_path / "run", data=(str(write(tmp_path / "answers.jsonl", rows)),), max_length=64, batch_tokens=512,
                     micro_batch_tokens=256, max_steps=2)
    said: list[str] = []
    kto.kto(config, said.append)
    assert any("PROVEN    rendered: " in line for line in said)


def test_one_label_alone_is_refused_and_pairs_are_two_labelled_rows(tmp_path: Path):
    said_again = [row | {"completion": row["prompt"] + row["completion"]} for row in answers()]
    with pytest.raises(DataError, match="in 96 of 96 rows the completion begins with the whole prompt"):
        read_feedback(write(tmp_path / "answers.jsonl", said_again))
    good = [row | {"label": True} for row in answers()]
    with pytest.raises(DataError, match="all 96 rows are desirable"):
        refuse_one_sided(read_feedback(write(tmp_path / "answers.jsonl", good)), "answers.jsonl")
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(4)])
    said = read_feedback(pairs)
    assert [each.desirable for each in said] == [True, False] * 4
    tokenizer = tiny_tokenizer()
    made = render_feedback(said, tokenizer, resolve_special_tokens(tokenizer, {}, {}), length=64)[0]
    assert check_feedback(made).outcome is Outcome.PROVEN
    assert check_contradictions([pair.preference for pair in made], "answer").outcome is Outcome.PROVEN
    flipped = [replace(pair, desirable=not pair.desirable) for pair in made]
    assert check_contradictions([pair.preference for pair in (*made, *flipped)], "answer").outcome is Outcome.REFUTED
    assert check_contradictions([pair.preference for pair in (*made, flipped[0])], "answer").outcome is Outcome.UNPROVEN
    assert all(pair.rejected.prompt == pair.chosen.prompt and list(pair.rejected.tokens) != list(pair.chosen.tokens) for pair in made)

"""A reward model learns to tell pairs apart, is proven on held-out ones, and scores the completions of a GRPO run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.data.batch import Batch
from assay.data.chat import render_conversations
from assay.data.layouts import Conversation
from assay.data.preferences import read_preferences, render_pairs
from assay.errors import AssayError, DataError, UsageError
from assay.guard.reward_model_checks import check_reward_head
from assay.learn.bradley_terry import REWARD_TOKEN, token_rewards
from assay.model.resize_embeddings import with_new_tokens
from assay.outcome import RunOutcome
from assay.recipes import hand_over, reward_model, run, starting_model
from assay.recipes.prompts import read_prompts
from assay.recipes.reward_model_options import RewardModel
from assay.recipes.rewards import check_reward_readings, proven_reward_model
from assay.reward.model_reward import reading_ids, text_ids, text_reward
from assay.reward.reward_functions import parse_rewards
from assay.reward.worker_pool import AskedPrompt, RewardItem, RewardWorkers
from assay.store.artifact import build_model, open_artifact
from assay.testing.tiny_methods import other_tokenizer
from assay.testing.tiny_models import save_model, tiny_model, tiny_tokenizer
from assay.testing.tiny_training import NoProver
from assay.verdict import Outcome, proven
from tests.recipes import sums
from tests.recipes.sittings import rows


def write(where: Path, said: list[dict[str, Any]]) -> Path:
    where.write_text("".join(json.dumps(row) + "\n" for row in said))
    return where


def pairs(*, swapped: bool = False, end: str = "=") -> list[dict[str, Any]]:
    rows = [{"prompt": f"{a}+{b}{end}", "chosen": f"yes {a + b}", "rejected": f"no {a + b + 1}"} for a in range(12) for b in range(8)]
    return [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows] if swapped else rows


def options(home: Path, out: Path, **changed: Any) -> RewardModel:
    usual: dict[str, Any] = {"model": str(home / "base"), "data": (str(home / "pairs.jsonl"),), "out": str(out), "max_length": 24,
                             "batch_tokens": 384, "num_train_epochs": 4, "learning_rate": 5e-3, "micro_batch_tokens": 192, "save_steps": 6,
                             "held_out": 0.3, "max_steps": 6, "device": "cpu", "warmup_steps": 1}
    return RewardModel(**(usual | changed))


def quietly(patch: pytest.MonkeyPatch) -> None:
    """Leave saves unproven: what a fresh process says is the matter of tests/guard/test_proof.py."""
    patch.setattr(run, "Prover", NoProver)
    patch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    patch.setattr(starting_model, "prove_checkpoint", lambda folder, **_: [proven("whole", "not looked at")])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    save_model(folder / "base", tiny_model("llama"))
    write(folder / "pairs.jsonl", pairs())
    return folder


@pytest.fixture(scope="module")
def trained(home: Path) -> RunOutcome:
    with pytest.MonkeyPatch.context() as patch:
        quietly(patch)
        return reward_model.reward_model(options(home, home / "run"), lambda _: None)


def test_it_tells_held_out_pairs_apart_and_its_head_was_learned(trained: RunOutcome, home: Path):
    assert all(verdict.outcome is Outcome.PROVEN for verdict in trained.verdicts), str(trained)
    assert {"reward head", "accuracy", "direction"} <= {verdict.check for verdict in trained.verdicts}
    written = open_artifact(home / "run" / "model")
    assert written.tokenizer is not None
    row = written.tensors["embed.weight"][written.tokenizer.ids[REWARD_TOKEN]]
    assert check_reward_head(written, row).outcome is Outcome.REFUTED  # as it began
    assert check_reward_head(open_artifact(home / "base"), row).outcome is Outcome.REFUTED


def test_workers_score_texts_as_training_does_and_only_proven_reward_models_are_taken(trained: RunOutcome, home: Path):
    path = str(home / "run" / "model")
    rewards = parse_rewards([f"model:{path}:0.5"])
    assert (rewards[0].name, rewards[0].weight, rewards[0].options) == ("model", 0.5, {"path": path})
    assert parse_rewards([f"model:{path}"])[0].weight == 1
    with RewardWorkers(rewards, count=1) as workers:
        good, bad = workers.score([RewardItem("3+4=", said, {}) for said in ("yes 7", "no 8")])
    assert good.value > bad.value  # type: ignore[operator]
    artifact = open_artifact(path)
    assert artifact.tokenizer is not None
    ids = text_ids(artifact, "3+4=", "yes 7")
    learned = render_pairs(read_preferences(home / "pairs.jsonl"), artifact.tokenizer, artifact.stops, length=24)[0]
    assert ids in [pair.sides[0].tokens.tolist() for pair in learned]  # the end of the turn among them
    with torch.no_grad():
        batch = Batch(torch.tensor([ids]), torch.zeros(1, len(ids)))
        due = token_rewards(build_model(artifact), batch, artifact.tokenizer.ids[REWARD_TOKEN])
    assert good.components["model"] == pytest.approx(float(due[0, -1]), rel=1e-4)
    with pytest.raises(UsageError, match="it is no reward model"):
        proven_reward_model(str(home / "base"))
    assert proven_reward_model(path) == artifact.digest
    shutil.copytree(path, home / "unproven")
    (home / "unproven" / "hallmark.json").unlink()
    with pytest.raises(UsageError, match="has no hallmark"):
        proven_reward_model(str(home / "unproven"))


def test_swapped_columns_are_caught_by_pairs_held_out(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    quietly(monkeypatch)
    held_out = write(tmp_path / "held.jsonl", pairs(swapped=True, end=" = "))
    found = reward_model.reward_model(options(home, tmp_path / "run", held_out_data=str(held_out)), lambda _: None)
    assert found.exit_code == 3
    assert "direction" in [verdict.check for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED]
    with pytest.raises(UsageError, match="leave it out"):
        reward_model.reward_model(options(home, tmp_path / "other", lora_r=4), lambda _: None)
    further = write(tmp_path / "margins.jsonl", [row | {"margin": 0.5} for row in pairs()])
    with pytest.raises(DataError, match=r"margins.jsonl:1: the column margin is 0.5"):
        reward_model.reward_model(options(home, tmp_path / "other", data=(str(further),)), lambda _: None)

# ---------------------------------------------------------------- as the reward of a run


@pytest.fixture(scope="module")
def plain_is_better(knows_sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model, of the policy's own parent, that prefers a number to one with another beside it."""
    folder = tmp_path_factory.mktemp("plain")
    said = [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a + b} or {a + b + 1}"} for a in range(10) for b in range(10)]
    with pytest.MonkeyPatch.context() as patch:
        quietly(patch)
        config = options(folder, folder / "run", model=str(knows_sums.parent.parent / "model"),
                         data=(str(write(folder / "pairs.jsonl", said)),), max_steps=8, save_steps=8)
        found = reward_model.reward_model(config, lambda _: None)
    assert all(verdict.outcome is Outcome.PROVEN for verdict in found.verdicts), str(found)
    return folder / "run" / "model"


def test_a_reinforcement_run_is_rewarded_by_it_text_by_text(plain_is_better: Path, knows_sums: Path, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch):
    sums.unproven(monkeypatch)
    config = sums.options(knows_sums, tmp_path / "run", reward=(f"model:{plain_is_better}",), metric="answer", max_steps=2)
    verdicts = sums.reinforced(config)
    assert not [str(verdict) for verdict in verdicts if verdict.outcome is Outcome.REFUTED]
    digest = open_artifact(plain_is_better).digest
    assert digest in (tmp_path / "run" / "ledger.jsonl").read_text()
    drawn = rows(tmp_path / "run" / "samples.jsonl")
    assert drawn
    for row in drawn[:8]:
        due = text_reward(str(plain_is_better), row["prompt"], row["text"], "cpu")
        assert row["reward"] == row["rewards"]["model"] == pytest.approx(due, rel=1e-4, abs=1e-5)
    plain, hedged = ([row["reward"] for row in drawn if (" or " in row["text"]) is said] for said in (False, True))
    assert sum(plain) / len(plain) > sum(hedged) / len(hedged)


def asked_sums(where: Path, **system: str) -> Path:
    said = [{"prompt": [*({"role": role, "content": text} for role, text in system.items()), {"role": "user", "content": f"{a}+{b}"}],
             "gold": str(a + b)} for a in range(5) for b in range(4)]
    return write(where, said)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a tokenizer and a template of its own, that prefers numbers to words."""
    folder = tmp_path_factory.mktemp("stranger")
    save_model(folder / "base", tiny_model("llama"), tokenizer=other_tokenizer())
    said = [{"prompt": [{"role": "user", "content": f"{a}+{b}"}], "chosen": [{"role": "assistant", "content": f"{a + b}"}],
             "rejected": [{"role": "assistant", "content": "who knows?"}]} for a in range(10) for b in range(10)]
    with pytest.MonkeyPatch.context() as patch:
        quietly(patch)
        found = reward_model.reward_model(options(folder, folder / "run", data=(str(write(folder / "pairs.jsonl", said)),), max_length=64,
                                                  batch_tokens=1024, micro_batch_tokens=512), lambda _: None)
    assert all(verdict.outcome is Outcome.PROVEN for verdict in found.verdicts), str(found)
    return folder / "run" / "model"


def test_a_reward_model_of_another_tokenizer_reads_in_its_own_words_and_that_is_said(stranger: Path, home: Path, tmp_path: Path,
                                                                                    monkeypatch: pytest.MonkeyPatch):
    sums.unproven(monkeypatch)
    config = sums.options(home, tmp_path / "run", model=str(home / "base"), data=(str(asked_sums(tmp_path / "asked.jsonl")),),
                          reward=(f"model:{stranger}",), metric="answer", max_steps=1, save_steps=1)
    said = list[str]()
    sums.reinforced(config, said.append)
    assert any("another tokenizer or template than the policy: 20 of 20 prompts are written by its own template" in line for line in said)
    drawn, artifact = rows(tmp_path / "run" / "samples.jsonl"), open_artifact(stranger)
    assert drawn
    assert artifact.tokenizer is not None
    for row in drawn[:4]:
        question = row["prompt"].split("user\n")[1].split("<|im_end|>")[0]
        messages = ({"role": "user", "content": question}, {"role": "assistant", "content": row["text"]})
        [example] = render_conversations([Conversation("a:1:b", "a", messages)], artifact.tokenizer, artifact.stops, length=99).examples
        ids = example.tokens.tolist()
        with torch.no_grad():
            due = token_rewards(build_model(artifact), Batch(torch.tensor([ids]), torch.zeros(1, len(ids))),
                                artifact.tokenizer.ids[REWARD_TOKEN])
        assert row["rewards"]["model"] == pytest.approx(float(due[0, -1]), rel=1e-4, abs=1e-5)


def test_a_completion_that_says_nothing_is_read_between_prompt_and_end(stranger: Path):
    asked = AskedPrompt("a.jsonl:1", ({"role": "user", "content": "1+2"},))
    artifact = open_artifact(stranger)
    assert artifact.tokenizer is not None
    said, empty, blank = reading_ids(str(stranger), [(asked, "3"), (asked, ""), (asked, " ")])
    assert [artifact.tokenizer.decode(ids) for ids in (said, empty, blank)] == [  # type: ignore[arg-type]
        f"<<turn>>user: 1+2<<stop>><<turn>>assistant:{end}" for end in (" 3<<stop>>", "<<stop>>", " <<stop>>")]


def test_a_template_that_cannot_write_the_prompts_is_refused_before_the_first_rollout(tmp_path: Path):
    """None at all, and one that has no system turn."""
    prompts = read_prompts(str(asked_sums(tmp_path / "asked.jsonl", system="Be brief.")), tiny_tokenizer())
    for number, (template, words) in enumerate(((None, "has no chat template to read them by"), (
            "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system turns') }}{%- endif -%}x", "no system turns"))):
        where = tmp_path / f"reward-{number}"
        save_model(where, tiny_model("llama"), tokenizer=with_new_tokens(other_tokenizer(template), (REWARD_TOKEN,)))
        with pytest.raises(UsageError, match=f"--reward model:.*{words}"):
            check_reward_readings(str(where), tiny_tokenizer(), prompts)


def test_no_run_begins_with_a_reward_model_that_is_unproven_or_none(plain_is_better: Path, knows_sums: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch):
    sums.unproven(monkeypatch)
    shutil.copytree(plain_is_better, tmp_path / "unproven")
    (tmp_path / "unproven" / "hallmark.json").unlink()
    for path, words in ((tmp_path / "unproven", "has no hallmark"), (knows_sums, "it is no reward model"), (tmp_path / "none", "none")):
        with pytest.raises(AssayError, match=words):
            sums.reinforced(sums.options(knows_sums, tmp_path / "run", reward=(f"model:{path}",), metric="answer"))
        assert not (tmp_path / "run").exists()

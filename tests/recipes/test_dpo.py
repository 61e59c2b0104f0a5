"""Preference learning: what is preferred is learned against a reference that stays, and a run that shows nothing else says so."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.data.batch import Batch
from assay.data.chat import NOTHING_LEFT, TOO_LONG
from assay.data.packing import hold_out
from assay.data.preferences import ALIKE, by_prompt, read_preferences, render_pairs
from assay.data.reference_store import StoredReference
from assay.errors import ArtifactError, DataError, UsageError
from assay.evaluation.held_out_pairs import ScoredPairs
from assay.guard.preference_checks import check_pairs, doubts, explained_by_length
from assay.learn import preference as preference_module
from assay.model.special_tokens import resolve_special_tokens
from assay.recipes import dpo, hand_over, preference_data, run, starting_model
from assay.recipes.dpo_options import Dpo
from assay.recipes.live_reference import LiveReference
from assay.recipes.trainer import Trainer
from assay.store.artifact import open_artifact
from assay.store.checkpoint import open_checkpoint
from assay.store.digests import weights_digest
from assay.testing.tiny_models import flip_bit, save_model, tiny_model, tiny_tokenizer
from assay.testing.tiny_training import NoProver
from assay.verdict import Outcome, Verdict, proven
from tests.recipes.sittings import rows
from tests.refusals import stopped_by

STEPS = 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and pairs: the right sum is preferred to a wrong one."""
    folder = tmp_path_factory.mktemp("dpo")
    save_model(folder / "base", tiny_model("llama"))
    write(folder / "pairs.jsonl", sums())
    return folder


def sums(**more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{a}+{b}=", "chosen": f"yes {a + b}", "rejected": f"no {a + b + 1}", **more} for a in range(12) for b in range(8)]


def write(where: Path, said: list[dict[str, Any]]) -> Path:
    where.write_text("".join(json.dumps(row) + "\n" for row in said))
    return where


def options(home: Path, out: Path, **changed: Any) -> Dpo:
    usual: dict[str, Any] = {"data": (str(home / "pairs.jsonl"),), "out": str(out), "max_length": 24, "batch_tokens": 384,
                             "num_train_epochs": 4, "learning_rate": 1e-2, "micro_batch_tokens": 192, "save_steps": 3, "held_out": 0.2,
                             "max_steps": STEPS, "device": "cpu", "warmup_steps": 1}
    return Dpo(**(({} if "from_" in changed else {"model": str(home / "base")}) | usual | changed))


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave saves unproven: what a fresh process says is the matter of tests/guard/test_proof.py."""
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    monkeypatch.setattr(starting_model, "prove_checkpoint", lambda folder, **_: [proven("whole", "not looked at")])


def preferred(config: Dpo, say: Any = lambda _: None) -> list[Verdict]:
    found = dpo.dpo(config, say)
    assert found.interrupted is None
    assert all(verdict.outcome is Outcome.PROVEN for verdict in found.verdicts), str(found)
    assert found.exit_code == 0
    return found.verdicts


def metrics(config: Dpo, name: str) -> list[float]:
    return [row[name] for row in rows(Path(config.out) / "metrics.jsonl") if name in row]


def sigmoid_run(home: Path, *, lora_r: int = 0) -> Dpo:
    """A whole run against a stored reference, made once for all tests that compare another with it; it must not be written to."""
    config = options(home, home / f"sigmoid-{lora_r}", lora_r=lora_r, merge="never")
    if not Path(config.out).exists():
        said: list[str] = []
        preferred(config, said.append)
        (home / f"sigmoid-{lora_r}.txt").write_text("\n".join(said))
    return config


@pytest.mark.parametrize("changed", [{}, {"lora_r": 4}, {"loss_type": "ipo", "reference": "live"},
                                     {"loss_type": "simpo"}], ids=["sigmoid", "lora", "ipo", "simpo"])
def test_a_run_learns_what_is_preferred_and_hands_it_over(changed: dict[str, Any], home: Path, tmp_path: Path):
    if "loss_type" in changed:
        config, said = options(home, tmp_path / "run", **changed), []
        preferred(config, said.append)
    else:
        config = sigmoid_run(home, **changed)
        said = Path(f"{config.out}.txt").read_text().splitlines()
    margins, accuracy = metrics(config, "eval_margin"), metrics(config, "eval_accuracy")
    assert margins[-1] > margins[0]
    assert accuracy[-1] > 0.8
    assert metrics(config, "rewards/margins")[-1] > metrics(config, "rewards/margins")[0]
    if config.loss_type != "simpo":
        assert margins[0] == pytest.approx(0, abs=1e-4)
        assert any("PROVEN    initial loss" in line for line in said)
        assert (Path(config.out) / "reference" / "manifest.json").exists() == (config.reference == "stored")
    handed = {name for name in ("adapter", "model") if (Path(config.out) / name).exists()}
    assert handed == ({"adapter"} if config.lora_r else {"model"})


def test_interrupted_and_resumed_is_the_uninterrupted_run_bit_for_bit(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, parts = sigmoid_run(home), options(home, tmp_path / "parts")
    over = Trainer.over

    def interrupted(trainer: Trainer) -> bool:
        if trainer.done == 4:
            trainer.run.interrupted = 15
        return over(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", interrupted)
        assert dpo.dpo(parts, lambda _: None).exit_code == 143
    asked = []
    monkeypatch.setattr(preference_data, "write_reference", lambda *_, **__: asked.append(1))
    preferred(parts)
    assert not asked, "the reference is asked once"
    assert metrics(parts, "loss") == metrics(whole, "loss")
    digests = [weights_digest(open_artifact(Path(config.out) / "model").tensors) for config in (whole, parts)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("lora_r", [0, 4])
def test_a_live_reference_gives_the_stored_ones_losses_and_resumes_bit_for_bit(lora_r: int, home: Path, tmp_path: Path,
                                                                              monkeypatch: pytest.MonkeyPatch):
    """The same numbers but for rounding, since a reference that reads other rows adds in another order; and ln 2 exactly at step 1."""
    stored = sigmoid_run(home, lora_r=lora_r)
    live, parts = (options(home, tmp_path / name, reference="live", lora_r=lora_r, merge="never") for name in ("live", "parts"))
    preferred(live)
    assert metrics(live, "loss") == pytest.approx(metrics(stored, "loss"), rel=1e-5)
    assert metrics(live, "eval_margin") == pytest.approx(metrics(stored, "eval_margin"), rel=1e-4, abs=1e-5)
    assert metrics(live, "loss")[0] == pytest.approx(math.log(2), abs=1e-7)
    assert not (tmp_path / "live" / "reference").exists()
    if lora_r:
        return
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", lambda trainer: trainer.done == 4)
        patch.setattr(dpo.EvaluatedSaves, "finish", lambda saves: (saves.save_unevaluated(), setattr(saves.run, "interrupted", 15)))
        assert dpo.dpo(parts, lambda _: None).exit_code == 143
    preferred(parts)
    assert metrics(parts, "loss") == metrics(live, "loss")
    digests = [weights_digest(open_artifact(Path(config.out) / "model").tensors) for config in (live, parts)]
    assert digests[0] == digests[1]


def test_shards_compute_what_one_process_computes(home: Path, tmp_path: Path):
    """The preflight compares their gradients; rows are pairs that no shard parts."""
    alone, cut = options(home, tmp_path / "alone", max_steps=2), options(home, tmp_path / "cut", max_steps=2, shards=3)
    preferred(alone)
    preferred(cut)
    assert metrics(cut, "loss") == pytest.approx(metrics(alone, "loss"), rel=1e-5)

# ---------------------------------------------------------------- what is refused before anything is spent


def chat(*turns: str) -> list[dict[str, str]]:
    return [{"role": role, "content": said} for role, said in zip(("user", "assistant") * 3, turns, strict=False)]


@pytest.mark.parametrize(("row", "words"), [
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, r"pairs.jsonl:2: chosen and rejected are the same"),
    ({"prompt": "a", "chosen": " ", "rejected": "b"}, r"pairs.jsonl:2: chosen is empty"),
    ({"prompt": "a", "chosen": "b", "rejected": ""}, r"pairs.jsonl:2: rejected is empty"),
    ({"prompt": "a", "chosen": "b"}, r"pairs.jsonl:2: there is no rejected"),
    ({"chosen": chat("a", "b"), "rejected": chat("c", "d")}, r"pairs.jsonl:2: .* answer different prompts"),
    ({"chosen": "abc", "rejected": "xyz"}, r"pairs.jsonl:2: .* answer different prompts"),
    ({"prompt": chat("a"), "chosen": chat("a", "b"), "rejected": chat("a", "c")}, r"chosen begins with a message of user"),
    ({"prompt": "z", "chosen": chat("a", "b"), "rejected": chat("a", "c")}, r"expected the same question"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 1, "score_rejected": 8.5}, r"the wrong way round"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "chosen-rating": "1.5", "rejected-rating": "3"}, r"chosen-rating is 1.5 and"),
    ({"prompt": "a", "chosen": "b", "rejected": " b\n"}, r"pairs.jsonl:2: .* differ in white space at their ends alone"),
    ({"chosen": chat("a", "b"), "rejected": chat("a", "b ")}, r"pairs.jsonl:2: .* differ in white space at their ends alone"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [{"type": "function"}]}, r"pairs.jsonl:2: tools stand beside a prompt"),
])
def test_a_row_that_prefers_nothing_is_refused_by_file_and_line(row: dict[str, Any], words: str, tmp_path: Path):
    first = {"prompt": "a", "chosen": "b", "rejected": "c"} if isinstance(row["chosen"], str) else {"chosen": chat("a", "b"),
                                                                                                   "rejected": chat("a", "c")}
    with pytest.raises(DataError, match=words):
        read_preferences(write(tmp_path / "pairs.jsonl", [first, row]))


@pytest.mark.parametrize(("rows", "words"), [
    ([{"prompt": f"ask {n}: ", "chosen": f"ask {n}: yes", "rejected": f"ask {n}: no"} for n in range(6)], "in 6 of 6 rows the completion"),
    ([{"chosen": f"Human: {n}? yes", "rejected": f"Human: {n + 20}? no"} for n in range(20, 30)], "share, in each of 10 rows, is 'Human:'"),
])
def test_a_file_whose_sides_do_not_answer_its_prompts_is_refused(rows: list[dict[str, Any]], words: str, tmp_path: Path):
    """Whole texts beside a column prompt; texts that share a header and no question."""
    with pytest.raises(DataError, match=words):
        read_preferences(write(tmp_path / "pairs.jsonl", rows))
    for sound in ([*rows[:1], *sums()[:4]], [{"prompt": "say", **row} for row in rows[-1:] * 3]):
        read_preferences(write(tmp_path / "sound.jsonl", sound))


def test_schemas_say_the_same_pair(tmp_path: Path):
    """TRL's explicit and implicit prompts, and the text beside conversations that many files have."""
    tokenizer = tiny_tokenizer()
    stops = resolve_special_tokens(tokenizer, {}, {})
    question, good, bad = "What is 2+2?", "It is 4.", "It is 5."
    same = [{"prompt": chat(question), "chosen": [chat(question, good)[1]], "rejected": [chat(question, bad)[1]]},
            {"chosen": chat(question, good), "rejected": chat(question, bad)},
            {"prompt": question, "chosen": chat(question, good), "rejected": chat(question, bad)}]
    found = [render_pairs(read_preferences(write(tmp_path / "pairs.jsonl", [row])), tokenizer, stops, length=128)[0][0] for row in same]
    assert all(np.array_equal(found[0].tokens, other.tokens) and np.array_equal(found[0].weight, other.weight) for other in found)
    texts = [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}, {"chosen": "2+2=4", "rejected": "2+2=5"}]
    plain = [render_pairs(read_preferences(write(tmp_path / "pairs.jsonl", [row])), tokenizer, stops, length=128)[0][0] for row in texts]
    assert np.array_equal(plain[0].tokens, plain[1].tokens)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


SCHEMAS = ("explicit", "implicit", "text beside conversations", "tools")


def in_schema(schema: str, a: int, b: int) -> dict[str, Any]:
    asked = f"{SCHEMAS.index(schema)}: {a}+{b}="
    prompt, good, bad = chat(asked), [chat("", f"yes {a + b}")[1]], [chat("", f"no {a + b + 1}")[1]]
    return {"explicit": {"prompt": prompt, "chosen": good, "rejected": bad},
            "implicit": {"chosen": prompt + good, "rejected": prompt + bad},
            "text beside conversations": {"prompt": asked, "chosen": prompt + good, "rejected": prompt + bad},
            "tools": {"prompt": prompt, "chosen": good, "rejected": bad, "tools": [TOOL]}}[schema]


def test_a_run_on_conversations_of_every_schema_by_weight_passes_its_own_audit(home: Path, tmp_path: Path):
    """A whole run: what reads a row is not all that must know a side from a turn."""
    files = [write(tmp_path / f"{schema}#1.jsonl", [in_schema(schema, a, b) for a in range(5) for b in range(5)]) for schema in SCHEMAS]
    said: list[str] = []
    config = options(home, tmp_path / "run", data=tuple(f"{file}:0.25" for file in files), max_length=64, batch_tokens=512,
                     micro_batch_tokens=256, max_steps=2)
    dpo.dpo(config, said.append)
    assert any("PROVEN    rendered: " in line for line in said)
    mixture = next(line for line in said if "PROVEN    mixture: " in line)
    assert mixture.count("1 of 4 rows (25.0%, asked for 25.0%)") == 4, mixture
    assert metrics(config, "loss")[0] == pytest.approx(math.log(2), abs=1e-6)


def test_what_is_too_long_is_cut_alike_or_dropped(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    stops, prompt = resolve_special_tokens(tokenizer, {}, {}), "ask " * 6
    said = read_preferences(write(tmp_path / "pairs.jsonl", [
        {"prompt": prompt, "chosen": "short", "rejected": "a much longer answer that does not fit"},
        {"prompt": prompt, "chosen": "the same beginning, and then one end", "rejected": "the same beginning, and then another"},
        {"prompt": prompt * 9, "chosen": "b", "rejected": "c"}]))
    length = len(tokenizer.encode(prompt)) + 8
    assert render_pairs(said, tokenizer, stops, length=length)[1].dropped == {TOO_LONG: 3}
    pairs, counted = render_pairs(said, tokenizer, stops, length=length, over="truncate")
    assert counted.dropped == {ALIKE: 1, NOTHING_LEFT: 1}
    assert (len(pairs), pairs[0].rejected.cut, len(pairs[0].rejected)) == (1, True, length)
    assert check_pairs(pairs).outcome is Outcome.PROVEN


def test_pairs_of_one_prompt_are_held_out_together(home: Path, tmp_path: Path):
    twice = [{**row, "rejected": row["rejected"] + again} for row in sums() for again in ("", "!")]
    said = read_preferences(write(tmp_path / "pairs.jsonl", twice))
    train, apart = hold_out(by_prompt(said), 0.25, 0)
    assert not {pair.prompt for pair in train} & {pair.prompt for pair in apart}
    assert len(apart) == 48
    few = read_preferences(write(tmp_path / "few.jsonl", [{"prompt": "a", "chosen": f"b{n}", "rejected": "c"} for n in range(20)]))
    assert len(hold_out(by_prompt(few), 0.25, 0)[1]) == 5

# ---------------------------------------------------------------- what is caught


def test_swapped_columns_are_caught_by_pairs_held_out(home: Path, tmp_path: Path):
    """Trained on the one file, judged by the other: what it learned is the opposite."""
    swapped = [{"prompt": f"{row['prompt']}?", "chosen": row["rejected"], "rejected": row["chosen"]} for row in sums()]
    config = options(home, tmp_path / "run", held_out_data=str(write(tmp_path / "held.jsonl", swapped)))
    found = dpo.dpo(config, lambda _: None)
    assert found.exit_code == 3
    against = [verdict.check for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED]
    assert against == ["direction"]
    assert open_checkpoint(Path(config.out) / "model").quarantined is not None


def test_a_file_that_holds_itself_twice_is_stopped_by_rows(home: Path, tmp_path: Path):
    twice = write(tmp_path / "pairs.jsonl", sums() + sums())
    with stopped_by("duplicates") as stop:
        dpo.dpo(options(home, tmp_path / "run", data=(str(twice),)), lambda _: None)
    assert re.search(r"pairs\.jsonl:\d+ and \S*pairs\.jsonl:\d+ \(2 times in all\)", str(stop.value))


def test_a_reference_that_moves_is_stopped(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Halfway through, every batch is answered by another model."""
    usual, asked = StoredReference.attached, []

    def moving(self: StoredReference, batch: Batch) -> Batch:
        asked.append(1)
        found = usual(self, batch)
        return found if len(asked) < 12 else replace(found, reference=found.reference - 0.5)  # type: ignore[operator]

    monkeypatch.setattr(StoredReference, "attached", moving)
    with stopped_by("reference"):
        dpo.dpo(options(home, tmp_path / "run"), lambda _: None)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("check", ["live reference", "reference"])
def test_a_live_reference_that_moves_is_stopped(check: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It shares the policy's tensors from some step on: seen with the next save by its bits, and at the end by the parent's."""
    usual, asked = LiveReference.attached, []

    def moving(self: LiveReference, batch: Batch) -> Batch:
        asked.append(1)
        if len(asked) == 8:
            self.model.embed.weight.data.mul_(1.5)
        return usual(self, batch)

    monkeypatch.setattr(LiveReference, "attached", moving)
    if check == "reference":
        monkeypatch.setattr(preference_data, "check_live_reference", lambda data: [])
    with stopped_by(check):
        dpo.dpo(options(home, tmp_path / "run", reference="live"), lambda _: None)
    assert not (tmp_path / "run" / "model").exists()


def test_a_live_reference_of_a_loss_without_one_is_refused(home: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="simpo, which has no reference"):
        dpo.dpo(options(home, tmp_path / "run", reference="live", loss_type="simpo"), lambda _: None)


def test_a_changed_reference_file_or_parent_is_refused_on_resume(home: Path, tmp_path: Path):
    config = options(home, tmp_path / "run", max_steps=3)
    preferred(config)
    flip_bit(tmp_path / "run" / "reference" / "logprobs.bin", 40)
    with pytest.raises(ArtifactError, match=r"logprobs\.bin"):
        dpo.dpo(config, lambda _: None)


def test_ln_2_for_ever_is_stopped(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The reference is whatever the policy is, but for rounding: weights move, and the loss says nothing."""
    usual, asked = preference_module.pair_scores, []

    def following(model: Any, batch: Batch, settings: Any) -> Any:
        found = usual(model, batch, settings)
        asked.append(5e-6 * math.sin(len(asked)))
        return found._replace(chosen_reference=found.chosen.detach() + asked[-1], rejected_reference=found.rejected.detach())

    monkeypatch.setattr(preference_module, "pair_scores", following)
    monkeypatch.setattr(dpo, "preflight_preference", lambda *_: [])  # whose formula written out would see it first
    with stopped_by("loss moves"):
        dpo.dpo(options(home, tmp_path / "run", max_steps=24, num_train_epochs=20, save_steps=20), lambda _: None)


def test_both_answers_becoming_unlikely_and_length_bias_are_said():
    longer = np.arange(-10.0, 10.0)
    made = {"losses": longer, "chosen": -longer, "rejected": longer, "ids": tuple(map(str, range(20))), "digest": "", "longer": longer}
    fallen = ScoredPairs(margins=longer + 0.01 * longer**2, chosen_rewards=np.full(20, -1.0), rejected_rewards=np.full(20, -3.0), **made)
    assert [words for sentence in doubts(None, fallen) for words in ("both", "length") if words in sentence] == ["both", "length"]
    sound = ScoredPairs(margins=np.tile([1.0, 2.0], 10), chosen_rewards=np.full(20, 1.0), rejected_rewards=np.full(20, -3.0), **made)
    assert doubts(None, sound) == []


def test_pairs_that_length_alone_tells_apart_show_nothing_more():
    right, n = np.tile([1.0, -0.5], 20), 40
    made = {"losses": right, "chosen": right, "rejected": right, "chosen_rewards": right, "rejected_rewards": right,
            "ids": tuple(map(str, range(n))), "digest": ""}
    longer = np.where(np.arange(n) < 30, 3.0, -1.0)
    as_good, better = ScoredPairs(margins=longer, longer=longer, **made), ScoredPairs(margins=np.ones(n), longer=longer, **made)
    assert "the longer answer is the chosen one in 0.750 [0.588, 0.873] (n=40)" in explained_by_length(as_good)[0]
    assert "the shorter answer" in explained_by_length(replace(as_good, longer=-longer))[0]
    assert explained_by_length(better) == []
    assert explained_by_length(replace(as_good, margins=right, longer=right)) == [], "where lengths say nothing"

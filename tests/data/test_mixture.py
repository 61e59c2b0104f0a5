"""Mixtures: every source has exactly its share, is read whole before anything of it is read again, and the witness agrees."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from assay.data.chat import TrainingExample
from assay.data.data_files import read_rows
from assay.data.layouts import read_conversations
from assay.data.mixture import (
    MixedDraws,
    MixedExamples,
    MixedOrder,
    MixedPart,
    placed_row,
    rows_given,
    rows_until_empty,
    source_cycle,
    weighted_sources,
    whole_shares,
)
from assay.data.order import Order
from assay.errors import DataError, UsageError
from assay.guard.data_order_checks import check_mixture
from assay.recipes.witness_records import pending_records
from assay.testing.tiny_models import tiny_tokenizer
from assay.testing.tiny_training import make_corpus, tiny_corpus, tiny_documents
from assay.verdict import Outcome
from assay.witness.due_rollout import DuePrompt, PromptPlan
from assay.witness.due_rows import DueText, MixedPlan, MixedWindows, source_and_number
from assay.witness.replay import replay_step
from assay.zoo.run_faults import sums_folder
from assay.zoo.witness_faults import a_witnessed_run, judged_sums, nothing, reinforce_witnessed

SHARES = (7, 3)


def test_weights_are_read_as_written(tmp_path: Path):
    (tmp_path / "odd:2").write_text("")
    found = weighted_sources(("a.jsonl:0.7", "hf://o/n[main][train]:.3"), "--data")
    assert found == [("a.jsonl", Fraction(7, 10)), ("hf://o/n[main][train]", Fraction(3, 10))]
    assert weighted_sources((str(tmp_path / "odd:2"),), "--data")[0].weight is None
    assert whole_shares([source.weight or Fraction(0) for source in found]) == SHARES
    for wrong in (("a:0.5", "b"), ("a:0", "b:1"), ("a:1", "a:2")):
        with pytest.raises(UsageError, match="a weight above 0 after each source"):
            weighted_sources(wrong, "--data")
    with pytest.raises(UsageError, match="fewer digits"):
        whole_shares([Fraction("0.123457"), Fraction("0.5")])


@pytest.mark.parametrize("shares", [SHARES, (1, 1), (5, 1, 2), (997, 3)])
def test_every_cycle_has_exactly_the_shares_and_the_witness_draws_alike(shares: tuple[int, ...]):
    assert tuple(Counter(source_cycle(shares))[source] for source in range(len(shares))) == shares
    rows = [placed_row(row, shares) for row in range(2 * sum(shares) + 5)]
    assert [tuple(row) for row in rows] == [source_and_number(row, shares) for row in range(len(rows))]
    for row in range(len(rows)):
        given = [sum(each.source == source for each in rows[:row]) for source in range(len(shares))]
        assert given == rows_given(row, shares)
        assert all(abs(has - row * share / sum(shares)) <= len(shares) / 2 for has, share in zip(given, shares, strict=True))
        if row > 40:
            break


def test_rows_end_where_a_source_does():
    assert rows_until_empty([10, 10], SHARES) == next(row for row in range(99) if placed_row(row, SHARES) == (0, 10))
    assert rows_until_empty([99, 2], SHARES) == next(row for row in range(99) if placed_row(row, SHARES) == (1, 2))


def examples(name: str, count: int) -> list[TrainingExample]:
    return [TrainingExample(f"{name}:{n + 1}:{n:016x}", (1,) * (3 + n % 5), (0,) + (1,) * (2 + n % 5), ("a",), 1) for n in range(count)]


@pytest.mark.parametrize("packing", [True, False])
def test_a_mixture_reads_each_source_whole_before_it_repeats_and_ends_with_the_first(packing: bool):
    order = MixedExamples([*examples("large", 200), *examples("small", 9)], 5, 4, 16, 3, packing,
                          sources=(MixedPart("large", 7, 0, 200), MixedPart("small", 3, 200, 9)))
    said = check_mixture(order, order.steps)
    assert said.outcome is Outcome.PROVEN, said
    assert said.evidence["sources"]["small"]["times_read"] == pytest.approx(3, abs=0.8)
    read = Counter(index for row in order.plans[0] for index in row if index >= 200)
    assert set(read.values()) == {3}  # all of it, as often as asked
    with pytest.raises(DataError, match="small has been read 3 time"):
        order.require(order.steps + 1)
    texts = [DueText(each.id, each.tokens.tolist(), []) for each in order.examples]
    witness = MixedPlan(texts, [("large", Fraction(7)), ("small", Fraction(3))],
                        {"batch_tokens": 64, "max_length": 16, "max_steps": None, "num_train_epochs": 3, "packing": packing, "seed": 5})
    assert [[[text.name for text in row] for row in witness.due(step)] for step in range(order.steps)] == [
        [list(row) for row in order.ids(step)] for step in range(order.steps)]
    assert witness.steps == order.steps
    assert order.epoch_of(0) == 0
    assert order.epoch_of(order.steps - 1) >= 1


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_corpus(tmp_path_factory.mktemp("other"), tiny_documents(12, seed=7))


def test_corpora_are_mixed_window_by_window_as_the_witness_says(other: Any):
    corpus = tiny_corpus()
    order = MixedOrder(corpus, 3, 4, 16, 2, others=(other,), shares=SHARES)
    assert check_mixture(order, order.steps).outcome is Outcome.PROVEN
    witness = MixedWindows([(corpus.folder, Fraction(0)), (other.folder, Fraction(3, 10))],
                           {"batch_tokens": 64, "max_length": 16, "num_train_epochs": 2, "seed": 3})
    for step in (0, 1, order.steps - 1):
        batch, due = order.batch(step), witness.due(step)
        assert [row[0].name for row in due] == [str(id) for (id,) in batch.ids] == [str(id) for id in order.consumed(step)]
        assert [[id for text in row for id in text.tokens] for row in due] == [
            batch.tokens[row][batch.documents[row] >= 0].tolist() for row in range(4)]  # type: ignore[index]
    alone = Order(corpus, 3, 4, 16, 2)
    assert order.steps != alone.steps
    assert order.epoch_of(order.steps - 1) >= 1
    with pytest.raises(DataError, match="has been read 2 time"):
        order.require(order.steps + 1)
    stranger = make_corpus(other.folder.parent / "stranger", tiny_documents(6), tokenizer=tiny_tokenizer(words=("Ġa",)))
    with pytest.raises(UsageError, match="another tokenizer"):
        MixedOrder(corpus, 3, 4, 16, 2, others=(stranger,), shares=SHARES)


def test_a_mixed_fine_tuning_is_replayed_by_the_witness(tmp_path: Path):
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps({"text": f"{n} comes before {n + 1}."}) + "\n" for n in range(9)))
    data = (f"{sums_folder() / 'sums.jsonl'}:0.7", f"{more}:0.3")
    said = a_witnessed_run(data=data, limit=60, num_train_epochs=9)(tmp_path, lambda _: nothing(tmp_path))
    assert said, said
    assert all(each.outcome is Outcome.PROVEN for each in said), said
    counted = counted_mixtures(tmp_path / "run")
    assert "asked for 30.0%" in counted[-1]["reason"], counted


def counted_mixtures(run: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [each for event in events for each in event.get("verdicts", []) if each["check"] == "mixture"]


@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_mixed_pairs_and_answers_are_replayed_by_the_witness(recipe: str, tmp_path: Path):
    """KTO's rows of pairs are two answers each, of one name."""
    pairs, more = judged_sums()["dpo"], tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps({"prompt": f"So {n}=", "chosen": f"{n}", "rejected": f"{n + 1}, no"}) + "\n" for n in range(21)))
    data = f"{pairs}:0.7", f"{more}:0.3"
    said = a_witnessed_run(recipe, data=data, num_train_epochs=9, packing=recipe == "dpo")(tmp_path, lambda _: nothing(tmp_path))
    assert said
    assert all(each.outcome is Outcome.PROVEN for each in said), said
    counted = counted_mixtures(tmp_path / "run")
    assert "asked for 30.0%" in counted[-1]["reason"], counted
    assert counted[-1]["outcome"] == "PROVEN"


def test_mixed_prompts_are_drawn_by_their_shares_and_replayed_by_the_witness(tmp_path: Path):
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps({"prompt": f"{n} and one is", "answer": str(n + 1)}) + "\n" for n in range(8)))
    data = (f"{sums_folder() / 'sums.jsonl'}:0.5", f"{more}:0.5")
    reinforce_witnessed(tmp_path, data=data)
    said = [replay_step(record) for record in pending_records(tmp_path / "run")]
    assert said
    assert all(each.outcome is Outcome.PROVEN for each in said), said
    counted = counted_mixtures(tmp_path / "run")
    assert "more.jsonl: 2 of 4 rows (50.0%, asked for 50.0%)" in counted[-1]["reason"], counted
    drawn = [json.loads(path.read_text())["rollout"] for path in sorted((tmp_path / "run").glob("witness/step-*/record.json"))]
    assert [sum(group["prompt"].startswith("more.jsonl:") for group in rollout) for rollout in drawn] == [1] * len(drawn)
    with pytest.raises(UsageError, match="--refill with weights"):
        reinforce_witnessed(tmp_path, data=data, refill=1)


def prompt_plan(sizes: dict[str, int], options: dict[str, Any]) -> PromptPlan:
    """The witness's, of prompts that are already read."""
    plan = PromptPlan.__new__(PromptPlan)
    plan.prompts, plan.options = [DuePrompt(f"{name}:{n}:x", [n]) for name, size in sizes.items() for n in range(size)], options
    plan.take_apart(options)
    return plan


def test_prompts_end_with_the_first_source_and_the_witness_counts_alike():
    parts = MixedPart("large", 7, 0, 40), MixedPart("small", 3, 40, 9)
    draws = MixedDraws(parts, 5, 4, 2)
    rollouts = draws.prompts_in_all // 4
    said = check_mixture(draws, rollouts)
    assert said.outcome is Outcome.PROVEN, said
    often = Counter(each for rollout in range(rollouts) for each in draws.drawn(rollout))
    assert draws.times_drawn(rollouts) == Counter(often[number] for number in range(49))
    plan = prompt_plan({"large": 40, "small": 9}, {"data": ["large:0.7", "small:0.3"], "seed": 5, "prompts": 4, "num_iterations": 1,
                                                   "num_train_epochs": 2})
    names = [prompt.name for prompt in plan.prompts]
    assert plan.steps == rollouts
    assert [[names.index(prompt.name) for prompt in plan.due(step)] for step in range(rollouts)] == [
        draws.drawn(step) for step in range(rollouts)]
    with pytest.raises(UsageError, match="up to 4 of 12 prompts a rollout come from it, and it has 3"):
        MixedDraws((parts[0], MixedPart("small", 3, 40, 3)), 5, 12, 2)


def test_a_mixed_pretraining_is_replayed_by_the_witness(other: Any, tmp_path: Path):
    said = a_witnessed_run("pretrain", mix=(f"{other.folder}:0.25",))(tmp_path, lambda _: nothing(tmp_path))
    assert said, said
    assert all(each.outcome is Outcome.PROVEN for each in said), said


def test_limits_and_folders_of_rows(tmp_path: Path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{n}"}) + "\n" for n in range(3)))
    assert [(row.number, row.values["text"]) for row in read_rows(tmp_path, limit=4)] == [(1, "a0"), (2, "a1"), (3, "a2"), (4, "b0")]
    assert len(read_conversations(tmp_path / "a.jsonl", limit=2).rows) == 2
    (tmp_path / "notes.md").write_text("")
    with pytest.raises(UsageError, match=r"notes\.md in it"):
        list(read_rows(tmp_path))
    with pytest.raises(UsageError, match="a weight after a colon"):
        list(read_rows(tmp_path / "a.jsonl:0.5"))

"""Laws of the data: it never runs out in silence, and what is held out stays held out."""

import json
import re
from pathlib import Path

import pytest

from assay.data.order import Order, corpus_batches
from assay.errors import DataError, GuardStop
from assay.model.tokenizer import Tokenizer
from assay.store.checkpoint import latest_checkpoint
from assay.testing.tiny_training import tiny_corpus
from tests.recipes.sittings import events, left_by, options, rows, saved_steps, sit


def test_a_budget_that_the_data_does_not_fill_is_refused_before_the_first_step(tmp_path: Path):
    config = options(tmp_path / "run", num_train_epochs=1)  # 26 steps of 20
    with pytest.raises(DataError, match=r"after 20 steps\..*--num-train-epochs 2"):
        sit(config)
    assert not (tmp_path / "run").exists()


def test_data_that_ends_under_a_budget_of_time_raises_and_nothing_is_lost(tmp_path: Path):
    config = options(tmp_path / "run", tokens=None, minutes=60, num_train_epochs=1, save_steps=100)
    with pytest.raises(DataError, match="the data ends after 20 steps"):
        sit(config)
    assert saved_steps(config)[-1] == 20
    found, passed_over = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert (found and found.step, passed_over) == (20, [])
    assert [row["step"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row] == list(range(20))


def test_the_ledger_says_how_much_of_the_data_was_never_read(tmp_path: Path):
    ended = options(tmp_path / "run", tokens=20 * 256, num_train_epochs=1)
    sit(ended)
    assert left_by(ended, 20)["trainer"]["data"]["windows_read"] == 320
    assert events(ended, "consumed")[0]["read_times"] == {"1": 320, "0": 8}


def test_a_run_that_wrote_down_other_data_than_was_planned_does_not_end_well(tmp_path: Path):
    """Even where no check saw it as it happened: the account is made of what lies on the disk."""
    def forge(_: object) -> None:
        file = tmp_path / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines()
        at = next(i for i, line in enumerate(lines) if json.loads(line)["step"] == 3 and "data" in json.loads(line))
        lines[at] = json.dumps(json.loads(lines[at]) | {"data": "0" * 16})
        file.write_text("\n".join(lines) + "\n")

    config = options(tmp_path / "run")
    with pytest.raises(GuardStop, match=r"data ledger: step 3 .*[0-9a-f]{16}"):
        sit(config, after={12: forge})
    assert events(config, "consumed") == []


def test_wraps_read_every_document_and_never_one_that_is_held_out():
    """By id, and by text: each document names itself in its first word."""
    tokenizer, train, held_out = Tokenizer.from_folder(tiny_corpus().folder), tiny_corpus().train, tiny_corpus().held_out
    names = [tokenizer.decode(held_out.document(i)[1:6].tolist()).split(" ")[0] for i in range(held_out.documents)]
    order = Order(tiny_corpus(), 3, 16, 24, epochs=3)
    ids: set[int] = set()
    for batch in corpus_batches(tiny_corpus(), seed=3, rows=16, length=24, epochs=3, stop=order.steps):
        ids |= {int(train.index["id"][number]) for number in batch.documents.unique().tolist() if number >= 0}
        text = "\n".join(map(tokenizer.decode, batch.tokens.tolist()))
        assert not re.search(rf"\b({'|'.join(names)}) ", text)
    assert ids == set(train.index["id"].tolist())
    assert not ids & set(held_out.index["id"].tolist())


def test_an_epoch_reads_every_token_once_and_the_next_one_in_another_order():
    order = Order(tiny_corpus(), 3, 16, 24, epochs=2)
    rows_read = [int(window) for step in range(order.steps) for window in order.consumed(step)]
    first, second = rows_read[: order.windows], rows_read[order.windows :]
    assert sorted(first) == list(range(order.windows))
    assert len(set(second)) == len(second)
    assert second != first[: len(second)]

"""Damaged files: whatever a checkpoint, folder, run, evaluation, corpus or data file holds, a command answers in a sentence."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from assay.cli import run
from assay.data.bpe import train_tokenizer, write_tokenizer
from assay.data.build_corpus import CorpusPlan, build_corpus
from assay.data.chat import render_conversations
from assay.data.data_files import DocumentRule
from assay.data.held_out_documents import held_out_document_batches
from assay.data.layouts import read_conversations
from assay.data.order import Order
from assay.data.token_corpus import assert_disjoint, open_corpus
from assay.errors import AssayError
from assay.store.artifact import open_artifact
from assay.store.saving import Ancestor, Lineage
from assay.store.sealed import seal
from assay.testing.tiny_models import save_adapter, save_hf_folder, save_model, save_peft_folder, tiny_model, tokenizer_and_stops
from tests.data.conftest import made_text, write_jsonl
from tests.fuzz import byte_mutants, mutants_of_json, mutants_of_lines
from tests.report.crafted import a_checkpoint, a_run

MUTANTS = 24  # of each file


def survive(file: Path, mutants: Iterable[bytes], act: Callable[[], object], *, before: Callable[[bytes], object] = lambda _: None) -> None:
    """Each mutant in the file's place is read or refused; any other exception is a fault of ours. The file is put back."""
    whole, refused = file.read_bytes(), 0
    for mutant in mutants:
        file.write_bytes(mutant)
        before(mutant)
        try:
            refused += act() not in (0, None)
        except AssayError:
            refused += 1
    file.write_bytes(whole)
    assert refused, f"no mutant of {file.name} was refused"


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_checkpoints(there: Path):
    base = save_model(there / "base", tiny_model())
    child = save_model(there / "child", tiny_model(seed=1), Lineage("moved", Ancestor("0" * 64, str(base.folder)))).folder
    adapter = save_adapter(there / "adapter", base.folder).folder
    for folder in (child, adapter):
        survive(folder / "manifest.json", mutants_of_json((folder / "manifest.json").read_bytes(), 3 * MUTANTS, 1),
                lambda folder=folder: run(["inspect", str(folder)]))
        for file in sorted({*folder.glob("*.json")} - {folder / "manifest.json"}):
            survive(file, mutants_of_json(file.read_bytes(), MUTANTS, 2), lambda folder=folder: run(["inspect", str(folder)]))


def test_files_that_a_manifest_vouches_for(there: Path):
    folder = save_model(there / "vouched", tiny_model()).folder
    manifest = json.loads((folder / "manifest.json").read_bytes())

    def vouch(name: str, data: bytes) -> None:
        files = {**manifest["files"], name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
        document = {key: value for key, value in manifest.items() if key != "self"} | {"files": files}
        (folder / "manifest.json").write_bytes(seal(document, where="x", indent=1))

    for file in (folder / "config.json", folder / "tokenizer_config.json"):
        survive(file, mutants_of_json(file.read_bytes(), MUTANTS, 3), lambda: open_artifact(folder) and None,
                before=lambda data, name=file.name: vouch(name, data))


def test_folders_of_other_tools(there: Path):
    model, sharded = save_hf_folder(there / "hf", tiny_model()), save_hf_folder(there / "sharded", tiny_model(), sharded=True)
    adapter = save_peft_folder(there / "peft", model)
    files = [*sorted(model.glob("*.json")), sharded / "model.safetensors.index.json", adapter / "adapter_config.json"]
    for file in files:
        options: dict[str, Any] = {"base": model} if file.parent == adapter else {}
        survive(file, mutants_of_json(file.read_bytes(), MUTANTS, 4),
                lambda file=file, options=options: open_artifact(file.parent, **options) and None)


def test_runs(there: Path):
    folder = a_run(there / "runs" / "run")
    a_checkpoint(folder / "checkpoints" / "step-000040", 1.0, parent={"weights": "0" * 64, "path": "base"}, step=40)
    commands = [["report", str(folder), "--out", str(there / "page.html")], ["runs", str(folder.parent)]]

    def told() -> None:
        """A page or a list is written whatever the files hold: what is wrong is said there."""
        assert {run(command) for command in commands} <= {0, 2, 3}

    for name, mutants in (("ledger.jsonl", mutants_of_lines), ("metrics.jsonl", mutants_of_lines), ("config.yaml", byte_mutants)):
        survive_silently(folder / name, mutants((folder / name).read_bytes(), MUTANTS, 5), told)
    for file in sorted((folder / "checkpoints" / "step-000040").glob("*.json")):
        survive_silently(file, mutants_of_json(file.read_bytes(), MUTANTS, 6), told)


def survive_silently(file: Path, mutants: Iterable[bytes], act: Callable[[], object]) -> None:
    whole = file.read_bytes()
    for mutant in mutants:
        file.write_bytes(mutant)
        act()
    file.write_bytes(whole)


def test_evaluations(there: Path):
    model = str(save_model(there / "model", tiny_model()).folder)
    for name in ("one", "other"):
        assert run(["eval", model, "--task", "arithmetic", "--limit", "6", "--max-new-tokens", "4", "--raw", "--device", "cpu",
                    "--witness", "0", "--out", str(there / name)]) == 0
    one, compare = there / "one", lambda: run(["compare", str(there / "one"), str(there / "other")])
    survive(one / "eval.json", mutants_of_json((one / "eval.json").read_bytes(), 2 * MUTANTS, 7), compare)
    facts = json.loads((one / "eval.json").read_bytes())
    (one / "eval.json").write_text(json.dumps({key: value for key, value in facts.items() if key != "scores_sha256"}))
    survive(one / "scores.jsonl", mutants_of_lines((one / "scores.jsonl").read_bytes(), 4 * MUTANTS, 8), compare)


def test_plain_results(there: Path):
    rows = [{"arm": arm, "id": str(i), "score": (i + k) % 2} for k, arm in enumerate("ab") for i in range(8)]
    series = [{"step": i, "score": 1 / (i + 1)} for i in range(12)]
    tallies = [{"arm": arm, "count": 3, "n": 10, "runs": 2} for arm in "ab"]
    for name, each in (("rows", rows), ("series", series), ("tallies", tallies)):
        file, table = there / f"{name}.jsonl", there / f"{name}.csv"
        file.write_text("".join(json.dumps(row) + "\n" for row in each))
        table.write_text("\n".join([",".join(each[0]), *(",".join(map(str, row.values())) for row in each)]) + "\n")
        survive(file, mutants_of_lines(file.read_bytes(), 2 * MUTANTS, 9), lambda file=file: run(["compare", str(file)]))
        survive(table, byte_mutants(table.read_bytes(), MUTANTS, 10), lambda table=table: run(["compare", str(table)]))


def test_a_corpus(there: Path):
    text = write_jsonl(there / "made.jsonl", [made_text(seed, 40) for seed in range(40)])
    write_tokenizer(train_tokenizer([text], 300, rule=DocumentRule())[0], there / "bpe")
    folder = build_corpus([text], there / "corpus", there / "bpe", CorpusPlan(held_out=0.2, shard_tokens=2000)).folder
    manifest = json.loads((folder / "manifest.json").read_bytes())

    def use() -> None:
        corpus = open_corpus(folder)
        assert_disjoint(corpus)
        Order(corpus, 0, 2, 16).batch(0)
        assert list(held_out_document_batches(corpus, rows=2, length=16))

    def vouch(name: str, data: bytes) -> None:
        entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps({**manifest, "files": {**manifest["files"], name: entry}}))

    use()
    survive(folder / "manifest.json", mutants_of_json((folder / "manifest.json").read_bytes(), 4 * MUTANTS, 11), use)
    for name in ("train-00000.bin", "held-00000.bin", "train-index.bin", "held-index.bin", "samples.jsonl", "tokenizer.json"):
        mutants = mutants_of_lines if name == "samples.jsonl" else byte_mutants
        survive(folder / name, mutants((folder / name).read_bytes(), MUTANTS, 12), use, before=lambda data, name=name: vouch(name, data))


def test_conversations(there: Path):
    tokenizer, stops = tokenizer_and_stops()
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = {"messages": {"messages": turns, "tools": [{"a": 1}]}, "pairs": {"prompt": "a", "completion": "b"},
            "sharegpt": {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], "system": "s"},
            "alpaca": {"instruction": "a", "output": "b", "input": "c"}, "gsm8k": {"question": "q", "answer": "a\n#### 3"}}
    for name, row in rows.items():
        file = there / f"{name}.jsonl"
        file.write_text(f"{json.dumps(row)}\n" * 3)
        survive(file, mutants_of_lines(file.read_bytes(), MUTANTS, 13),
                lambda file=file: render_conversations(read_conversations(file).rows, tokenizer, stops, length=64) and None)

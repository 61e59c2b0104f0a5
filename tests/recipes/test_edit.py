"""assay edit, end to end on a tiny model: refused by name, edited, written, proven, and measured as read back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.config import parse
from assay.errors import ArtifactError, DataError, GuardStop, UsageError
from assay.model.special_tokens import resolve_special_tokens
from assay.recipes import edit as recipe
from assay.recipes.edit import EditOutcome, apply_patch, check_edit_report, parsed_layers
from assay.recipes.edit_options import Edit
from assay.statistics.estimate import Estimate
from assay.store import checkpoint
from assay.store.artifact import open_artifact
from assay.store.checkpoint import open_checkpoint
from assay.store.ledger import read_chain
from assay.store.saving import Lineage, model_contents
from assay.testing import tiny_facts
from assay.testing.fault_injection import swap
from assay.verbs import edit as verb
from assay.verdict import Outcome, proven, refuted
from tests.editing.test_memit import six

TUNED = ("--v-lr 0.1 --clamp-norm-factor 1 --v-num-grad-steps 60 --kl-factor 0 --mom2-update-weight 10 --max-update 10 --prefixes 3 "
         "--prefix-tokens 8 --drift-tokens 1000 --probe-rounds 1")


def row(fact: Any) -> dict[str, Any]:
    return {"name": fact.name, "prompt": fact.prompt, "subject": fact.subject, "target": fact.target, "old": fact.old,
            "paraphrases": list(fact.paraphrases), "neighbourhood": [{"prompt": n.prompt, "answer": n.answer} for n in fact.neighbourhood]}


def base(tmp_path: Path) -> Path:
    tokenizer = tiny_facts.facts_tokenizer()
    contents = model_contents(tiny_facts.facts_model(), tokenizer, resolve_special_tokens(tokenizer, {}, {}), Lineage())
    return checkpoint.write_checkpoint(tmp_path / "base", contents).folder


def options(tmp_path: Path, *rows: dict[str, Any], more: str = "") -> Edit:
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    files = f"--facts {tmp_path / 'facts.jsonl'} --text {tiny_facts.write_facts_text(tmp_path / 'text.txt')} --out {tmp_path / 'run'}"
    traced = "" if "--layers" in more else "--trace-facts 1"
    return parse(Edit, [str(tmp_path / "base"), *f"{files} {TUNED} {traced} {more}".split()], prog="assay edit")


def test_from_facts_to_a_proven_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    base(tmp_path)
    rows = [row(fact) for fact in tiny_facts.fact_edits(2)]
    flags = options(tmp_path, *rows, rows[0] | {"name": "ghost", "subject": "borin"}, more="--json --quiet --window 2")
    killed_before_the_probe(flags)
    assert verb.run(flags) == 3  # a refused request is no success
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert shown.err == "", "--quiet"
    assert told["headline"].startswith("facts said: ")
    assert open_checkpoint(tmp_path / "run" / "earlier-1-model").digest == open_checkpoint(tmp_path / "run" / "model").digest
    verdicts = {verdict["check"]: verdict["outcome"] for verdict in told["verdicts"]}
    assert {check for check, outcome in verdicts.items() if outcome != "PROVEN"} == {"subjects"}
    assert [one["name"] for one in told["refused"]] == ["ghost"]
    assert told["estimates"]["efficacy, generated, after"]["mean"] == 1.0
    assert told["layers"] == [0, 1]

    saved = open_checkpoint(tmp_path / "run" / "model")
    assert saved.hallmark is not None
    before, after = open_artifact(tmp_path / "base").tensors, open_artifact(saved.folder).tensors
    assert {name for name in before if not torch.equal(before[name], after[name])} == {f"blocks.{i}.mlp.down.weight" for i in (0, 1)}
    written = json.loads((tmp_path / "run" / "edits.json").read_text())
    assert [one["after"]["said"].split(".")[0] for one in written["replies"] if one["question"]["kind"] == "efficacy"] == [
        f" {fact.target}" for fact in tiny_facts.fact_edits(2)]
    assert (tmp_path / "run" / "causal.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "run" / "causal.json").read_text())["chosen"] == [0, 1]
    assert [event["kind"] for event in read_chain(tmp_path / "run" / "ledger.jsonl").events if event["kind"] != "time"] == [
        "start", "preflight", "layers", "proof", "resume", "set aside", "preflight", "layers", "proof", "edits"]
    with pytest.raises(UsageError, match="never overwritten"):
        verb.run(flags)


@pytest.mark.parametrize("lost", ["efficacy", "solution"])
def test_an_edit_that_is_refuted_has_no_hallmark_and_nothing_is_made_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recipe, "prove", lambda _: [proven("whole", "not looked at")])
    base(tmp_path)
    if lost == "solution":
        monkeypatch.setattr(recipe, "check_solution", lambda *_: refuted("solution", "another update than the least"))
    else:
        monkeypatch.setattr(recipe, "check_edits", lambda *_: [refuted("efficacy", "nothing is said")])
    flags = options(tmp_path, row(tiny_facts.fact_edits(2)[0]), more="--layers 0,1 --v-num-grad-steps 2")
    assert recipe.edit(flags, lambda _: None).exit_code == 3
    edited = open_checkpoint(tmp_path / "run" / "model")
    assert edited.hallmark is None
    assert edited.quarantined is not None
    with pytest.raises(UsageError, match="is quarantined"):
        recipe.open_editable(replace(flags, path=str(edited.folder), out=str(tmp_path / "on")))


def test_an_edit_has_no_hallmark_before_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(recipe, "prove", lambda _: [proven("whole", "not looked at")])
    base(tmp_path)
    flags = options(tmp_path, row(tiny_facts.fact_edits(2)[0]), more="--layers 0,1 --v-num-grad-steps 2")
    killed_before_the_probe(flags)
    assert open_checkpoint(tmp_path / "run" / "model").hallmark is None


def killed_before_the_probe(flags: Edit) -> None:
    """The model was written and proven, and nothing was measured of it."""
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with swap(recipe, "probe_edit", killed), pytest.raises(KeyboardInterrupt):
        verb.run(flags)


def test_what_could_not_be_measured_is_refused_before_any_work(tmp_path: Path):
    base(tmp_path)
    rows = [row(fact) for fact in tiny_facts.fact_edits(2)]
    with pytest.raises(UsageError, match="probe-rounds"):
        options(tmp_path, *rows, more="--probe-rounds 0")
    flags = options(tmp_path, *rows)
    with swap(recipe, "build_model", lambda *_: pytest.fail("the model was built")):
        with pytest.raises(UsageError, match="probe-rounds 0: expected at least 1"):
            recipe.edit(replace(flags, probe_rounds=0))
        (tmp_path / "text.txt").write_text("The home of Zarah is Lund.\n" * 40)
        with pytest.raises(DataError, match="or lower --drift-tokens"):
            recipe.edit(flags)
    assert not (tmp_path / "run").exists()


def test_a_paraphrase_that_is_sought_and_evaluated_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    base(tmp_path)
    rows = [row(fact) | {"rephrasings": [tiny_facts.HOME_AGAIN]} for fact in tiny_facts.fact_edits(2)]
    with pytest.raises(GuardStop, match="2 of 2 rephrasings are among the paraphrases that judge the edits"):
        recipe.edit(options(tmp_path, *rows, more="--layers 0-1"))
    assert not (tmp_path / "run" / "model").exists()


def test_a_tuned_edit_is_written_proven_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Through the recipe: a row's own rephrasing is sought, the paraphrase is evaluated, and the report knows ranks and relations."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    base(tmp_path)
    rows = [row(fact) | {"rephrasings": ["They know that {} lives in"], "relation": "home"} for fact in tiny_facts.fact_edits(2)]
    more = "--layers 0-1 --method tune --tune-steps 30 --tune-lr 0.01 --tune-hold 0.5 --moment-tokens 1500 --probe-samples 0 --goal-drift 1"
    outcome = recipe.edit(options(tmp_path, *rows, more=more))
    judged = {verdict.check: verdict.outcome for verdict in outcome.verdicts}
    assert judged["search"] is judged["figures"] is judged["replies"] is judged["hashes"] is Outcome.PROVEN
    assert outcome.results["efficacy, reciprocal rank, after"].mean > outcome.results["efficacy, reciprocal rank, before"].mean
    written = json.loads((tmp_path / "run" / "edits.json").read_text())
    assert written["relations"]["home"]["facts"] == 2
    assert written["relations"]["home"]["efficacy, median rank"] < 10
    assert all(isinstance(one["after"]["rank"], int) for one in written["replies"])


def test_a_patch_belongs_to_its_parent_and_frozen_tensors_stay(tmp_path: Path):
    source = open_artifact(base(tmp_path))
    with pytest.raises(ArtifactError, match="for another base"):
        apply_patch(source, replace(six().patch, parent="0" * 64), tmp_path / "wrong", taught=False)
    assert not (tmp_path / "wrong").exists()


def test_what_cannot_be_served_is_said_before_anything_is_written(tmp_path: Path):
    base(tmp_path)
    rows = [row(fact) for fact in tiny_facts.fact_edits(2)]
    told = [{key: one[key] for key in ("name", "prompt", "subject", "target")} for one in rows]  # and not what was said before
    cases = (([rows[0] | {"subject": "Nobody"}], "", "every request was refused; the first: Borin: the subject 'Nobody'"),
             ([rows[0], rows[0]], "", "two facts are called 'Borin'"),
             (told, "--known 1", "no row says what the answer was before"),
             (rows, "--known 3", "gives the old answer of 2 facts by itself, 3 are asked for"))
    for given, more, words in cases:
        with pytest.raises(DataError, match=words):
            verb.run(options(tmp_path, *given, more=more))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("text", "layers"), [("3-5", [3, 4, 5]), ("2", [2]), ("1,4", [1, 4])])
def test_layers_as_they_are_written(text: str, layers: list[int]):
    assert parsed_layers(text) == layers


def test_layers_that_are_no_layers():
    with pytest.raises(UsageError, match="expected auto, a range such as 3-8"):
        parsed_layers("3..5")


def test_a_report_that_was_not_written_or_lacks_a_figure_is_refuted(tmp_path: Path):
    outcome = EditOutcome(tmp_path, results={"efficacy": Estimate(0.5, 0.4, 0.6, 8)}, failed={}, refused=[], layers=[], sizes={})
    assert check_edit_report(tmp_path / "edits.json", outcome, 0).outcome is Outcome.REFUTED
    (tmp_path / "edits.json").write_text(json.dumps({"estimates": {"efficacy": {"mean": 0.5}}, "facts": [{}]}))
    assert check_edit_report(tmp_path / "edits.json", outcome, 1).outcome is Outcome.PROVEN
    assert check_edit_report(tmp_path / "edits.json", outcome, 2).outcome is Outcome.REFUTED

"""Model arithmetic: what is written is what the formula gives, parents that began apart are refused, and the effect is measured."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut
from assay.guard.merge_checks import check_ancestry, check_dropped_layers, check_effect, check_merged_bytes, naive_merge
from assay.model.merging import Merge, merged_models, slerp
from assay.recipes import merge
from assay.recipes.merge_options import MergeModels, PruneLayers
from assay.recipes.teachers import with_layers
from assay.statistics.estimate import mean
from assay.store.artifact import open_artifact
from assay.store.checkpoint import open_checkpoint
from assay.testing.fault_injection import swap
from assay.testing.tiny_models import save_model, tiny_model
from assay.verdict import Outcome, proven

METHODS = [Merge("linear", (0.7, 0.3)), Merge("slerp", (0.4, 0.6)), Merge("task", (1.0, 0.5)), Merge("ties", (1.0, 1.0), density=0.3),
           Merge("dare", (0.5, 0.5), density=0.25)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two that were moved a little from it, and a stranger."""
    folder = tmp_path_factory.mktemp("merge")
    save_model(folder / "base", tiny_model("llama"))
    for name, seed in (("one", 1), ("two", 2)):
        torch.manual_seed(seed)
        model = tiny_model("llama")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.004 * torch.randn_like(parameter)
        save_model(folder / name, model)
    save_model(folder / "stranger", tiny_model("llama", 9))
    (folder / "said.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": f"{n + 1}"}) + "\n" for n in range(24)))
    return folder


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave saves unproven: what a fresh process says is the matter of tests/guard/test_proof.py."""
    monkeypatch.setattr(merge, "prove", lambda _: [proven("whole", "not looked at")])


def options(home: Path, out: Path, *models: str, **changed: Any) -> MergeModels:
    return MergeModels(models=tuple(str(home / model) for model in models or ("one", "two")), out=str(out), device="cpu", **changed)


@pytest.mark.parametrize("asked", METHODS, ids=lambda asked: asked.method)
def test_every_method_is_its_formula_and_another_is_refuted(asked: Merge):
    torch.manual_seed(0)
    base = {"w": torch.randn(40, 50)}
    models = [{"w": base["w"] + 0.1 * torch.randn(40, 50)} for _ in range(2)]
    made = merged_models(asked, models, base if asked.method in ("task", "ties", "dare") else None)
    assert check_merged_bytes(made, asked, models, base).outcome is Outcome.PROVEN
    assert made["w"].double() == pytest.approx(naive_merge(asked, "w", [m["w"] for m in models], base["w"]), abs=1e-6)
    noise = torch.randn(40, 50)
    for wrong in ({"w": made["w"] + 0.01}, {"w": made["w"] + 0.01 * (noise - noise.mean())}, {"w": made["w"] * torch.nan}, {},
                  made | {"v": made["w"]}):
        assert check_merged_bytes(wrong, asked, models, base).outcome is Outcome.REFUTED


def test_dare_keeps_a_share_and_its_expectation_and_ties_the_prevailing_sign():
    base, task = {"w": torch.zeros(200, 200)}, {"w": torch.ones(200, 200)}
    kept = merged_models(Merge("dare", (1.0,), density=0.25), [task], base)["w"]
    assert set(kept.unique().tolist()) == {0.0, 4.0}
    assert float(kept.mean()) == pytest.approx(1, abs=0.05)
    signs = [{"w": torch.tensor([[1.0, -3.0, 2.0, 0.1]])}, {"w": torch.tensor([[2.0, 1.0, -5.0, 0.0]])}]
    found = merged_models(Merge("ties", (1.0, 1.0), density=0.75), signs, {"w": torch.zeros(1, 4)})["w"]
    assert found.tolist() == [[1.5, -3.0, -5.0, 0.0]]
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert slerp(one, other, 0.5).tolist() == pytest.approx([2**-0.5, 2**-0.5])


def test_a_merge_is_written_with_its_parents_and_its_effect_is_measured(home: Path, tmp_path: Path):
    said: list[str] = []
    asked = options(home, tmp_path / "made", base=str(home / "base"), method="ties", data=str(home / "said.jsonl"))
    found = merge.merge(asked, said.append)
    assert found.exit_code == 0, str(found)
    assert {"parents", "relatives", "arithmetic", "effect"} <= {v.check for v in found.verdicts if v.outcome is Outcome.PROVEN}
    written = open_artifact(tmp_path / "made")
    assert written.raw.checkpoint is not None
    recorded = written.raw.checkpoint.facts["run_config"]["merged"]
    assert [parent["weights"] for parent in recorded["parents"]] == [open_artifact(home / name).digest for name in ("one", "two")]
    with pytest.raises(UsageError, match=r"lost\.jsonl"):
        merge.merge(options(home, tmp_path / "other", data=str(home / "lost.jsonl")), lambda _: None)
    assert not (tmp_path / "other").exists()
    with pytest.raises(UsageError, match="exists already"):
        merge.merge(options(home, tmp_path / "made"), lambda _: None)


def test_what_was_made_otherwise_than_asked_keeps_no_hallmark(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(merge, "merged_models", lambda asked, models, base: models[0])
    monkeypatch.setattr(merge, "with_layers", lambda config, tensors, kept: with_layers(config, tensors, [0]))
    ways = {"merged": lambda out: merge.merge(options(home, out), lambda _: None),
            "pruned": lambda out: merge.prune(PruneLayers(model=str(home / "base"), drop=(0,), out=str(out)), lambda _: None)}
    for name, made in ways.items():
        found = made(tmp_path / name)
        assert found.exit_code == 3
        assert [verdict.check for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED] == ["arithmetic"]
        assert open_checkpoint(tmp_path / name).hallmark is None
        assert open_checkpoint(tmp_path / name).quarantined is not None


def test_what_was_made_has_no_hallmark_before_it_was_compared_with_what_was_asked(home: Path, tmp_path: Path,
                                                                                monkeypatch: pytest.MonkeyPatch):
    def killed(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    ways = {"merged": (lambda out: merge.merge(options(home, out), lambda _: None), "check_merged_bytes"),
            "pruned": (lambda out: merge.prune(PruneLayers(model=str(home / "base"), drop=(0,), out=str(out)), lambda _: None),
                       "check_kept_layers")}
    for name, (made, check) in ways.items():
        with swap(merge, check, killed), pytest.raises(KeyboardInterrupt):
            made(tmp_path / name)
        assert open_checkpoint(tmp_path / name).hallmark is None
        made(tmp_path / "again" / name)
        assert open_checkpoint(tmp_path / "again" / name).hallmark is not None, "a clean twin"


def test_one_ancestor_is_proven_and_two_are_not(home: Path):
    def child(name: str, parent: str) -> Any:
        facts = SimpleNamespace(facts={"parent": {"weights": parent}})
        return SimpleNamespace(path=Path(name), digest=f"digest of {name}", raw=SimpleNamespace(checkpoint=facts))

    base, one, two, other = child("base", "older"), *(child(name, "digest of base") for name in ("one", "two")), child("other", "elsewhere")
    for parents, given, outcome in (([one, two], None, Outcome.PROVEN), ([one, two], base, Outcome.PROVEN),
                                    ([one, base], base, Outcome.PROVEN), ([one, other], None, Outcome.UNPROVEN),
                                    ([one, other], base, Outcome.UNPROVEN), ([other, base], base, Outcome.UNPROVEN)):
        assert check_ancestry(parents, given).outcome is outcome


def test_unrelated_parents_are_refused_and_nothing_is_written(home: Path, tmp_path: Path):
    found = merge.merge(options(home, tmp_path / "made", "one", "stranger"), lambda _: None)
    assert found.exit_code == 3
    assert [verdict.check for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED] == ["relatives"]
    assert not (tmp_path / "made").exists()
    for changed, words in (({"method": "ties"}, "needs --base"), ({"base": str(home / "base")}, "leave --base out")):
        with pytest.raises(UsageError, match=words):
            merge.merge(options(home, tmp_path / "made", **changed), lambda _: None)


def test_layers_that_do_least_go_and_the_rest_is_bit_for_bit(home: Path, tmp_path: Path):
    said: list[str] = []
    asked = PruneLayers(model=str(home / "base"), layers=1, out=str(tmp_path / "made"), data=str(home / "said.jsonl"), device="cpu")
    found = merge.prune(asked, said.append)
    assert found.exit_code == 0, str(found)
    assert open_artifact(tmp_path / "made").config.depth == open_artifact(home / "base").config.depth - 1
    assert any("influence of layers" in line for line in said)
    for wrong in ({"layers": None}, {"layers": 1, "data": None}, {"layers": None, "drop": (99,)},
                  {"layers": None, "drop": (0, 0)}):
        with pytest.raises(UsageError):
            merge.prune(PruneLayers(model=str(home / "base"), out=str(tmp_path / "other"), **wrong), lambda _: None)


def test_layers_that_were_not_asked_for_are_refuted(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(merge, "prove", lambda _: [proven("whole", "not looked at")])
    every = open_artifact(home / "base").config.depth
    usual = merge.layer_influence
    ways: dict[str, Callable[[], Any]] = {
        "none": lambda: swap(merge, "least_influential", lambda *_: []),
        "others": lambda: swap(merge, "layer_influence", lambda *given: [-value for value in usual(*given)])}
    for name, fault in ways.items():
        with fault():
            found = merge.prune(PruneLayers(model=str(home / "base"), layers=1, out=str(tmp_path / name), data=str(home / "said.jsonl"),
                                            device="cpu"), lambda _: None)
        assert [verdict.check for verdict in found.verdicts if verdict.outcome is Outcome.REFUTED] == ["layers"]
        assert open_checkpoint(tmp_path / name).quarantined is not None
    assert check_dropped_layers([1], every, (0,), None, None).outcome is Outcome.PROVEN
    assert check_dropped_layers([0], every, (0,), None, None).outcome is Outcome.REFUTED
    assert check_dropped_layers([0], every, (), 1, [0.2, math.nan]).outcome is Outcome.REFUTED


def test_a_merge_that_is_worse_than_all_it_was_made_of_is_refuted():
    losses = np.linspace(1, 2, 40)
    found = lambda shift: HeldOut(mean(losses + shift), "nats per token", 1.5 + shift, losses + shift + 0.01 * np.sin(np.arange(40)))
    assert check_effect({"one": found(0.0), "two": found(0.1)}, found(0.5)).outcome is Outcome.REFUTED
    assert check_effect({"one": found(0.0), "two": found(0.1)}, found(0.05)).outcome is Outcome.PROVEN

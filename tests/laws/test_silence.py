"""A clean run raises no alarm: five of them, and fifteen more with the slow tests, of different seeds, optimizers, shapes and schedules."""

from pathlib import Path

import pytest

from assay.testing.tiny_training import TINY_LENGTH
from tests.recipes.sittings import events, options, sit

KINDS = [{}, {"optimizer": "adamw"}, {"shape": "assay"}, {"lr_scheduler_type": "cosine"}, {"ema": 0.95}]
SEEDS = [range(1), pytest.param(range(1, 4), marks=pytest.mark.slow)]
STEPS = 66  # enough for the change points in the loss, which are judged from step 64 on


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_clean_runs_are_silent(kind: dict, seeds: range, tmp_path: Path):
    for seed in seeds:
        config = options(tmp_path / f"run-{seed}", tokens=STEPS * 4 * TINY_LENGTH, max_length=TINY_LENGTH, batch_tokens=4 * TINY_LENGTH,
                         save_steps=66, seed=seed,
                         eval_documents=2, **kind)
        said: list[str] = []
        assert sit(config, say=said.append) .interrupted is None  # a guard that trips raises
        verdicts = [verdict for event in (*events(config, "preflight"), *events(config, "account")) for verdict in event["verdicts"]]
        assert len(verdicts) == 13 + 2 * (4 + ("ema" in kind))  # before step 1, and at steps 1 and 66
        assert {verdict["outcome"] for verdict in verdicts} == {"PROVEN"}
        assert not events(config, "gap")
        assert not [line for line in said if "stopped" in line or "passed over" in line]

"""The mutation campaign itself: its rules write what they say, and mutants of each kind are sorted rightly."""

import json
import subprocess
import sys

import pytest

from tests.mutants.known_mutants import KNOWN, ROOT
from tests.mutants.rules import RULES, is_python, mutants_of
from tests.mutants.sorting import differences, volatile_keys
from tests.mutants.table import table, wilson

SOURCE = '''
LEVEL = 0.5


@torch.no_grad()
def mean(values, weights, *, dim=0):
    """Not touched: 1 + 2."""
    with torch.no_grad():
        model.eval()
    total = 0.0
    for value in sorted(values):
        if value < LEVEL and value:
            continue
        total += value * weights[0]
        self.cache[value, dim] = total.clone()
    try:
        check(total, LEVEL, strict=True)
    except ValueError:
        raise
    if dim:
        return loss.sum(dim=-1)
    return max(total, generator(seed, "a", value))
'''


def test_every_rule_plants_its_mistake_and_nothing_else():
    found = list(mutants_of("assay/x.py", SOURCE))
    assert {mutant.rule for mutant in found} == set(RULES)
    for mutant in found:
        planted = mutant.planted_in(SOURCE)
        assert is_python(planted), planted
        assert planted != SOURCE
        assert '"""Not touched: 1 + 2."""' in planted
    assert len({mutant.id for mutant in found}) == len(found)


@pytest.mark.slow
def test_mutants_of_each_kind_are_sorted_rightly():
    done = subprocess.run([sys.executable, "-m", "tests.mutants.known_mutants"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {kind: kind for kind in KNOWN}


def test_what_clean_runs_disagree_on_is_no_difference():
    clean = [{"metrics.jsonl": {"0.loss": "1.5", "0.seconds": str(seconds)}} for seconds in (1, 2)]
    other = {"metrics.jsonl": {"0.loss": "1.5", "0.seconds": "3", "1.seconds": "4"}}
    volatile = volatile_keys(clean)
    assert not any(differences(clean[0], other, volatile).values())
    assert differences(clean[0], {"metrics.jsonl": {"0.loss": "1.25"}}, volatile)["scores"] == ["metrics.jsonl 0.loss: 1.5 → 1.25"]


def test_the_share_is_of_those_that_differ():
    row = {"room": "learn", "rule": "wrong axis", "run": "sft", "file": "assay/learn/x.py", "line": 1, "before": "a", "after": "b",
           "check": "", "step": 0, "changed": []}
    rows = [row | {"id": str(number), "kind": kind} for number, kind in enumerate(("silent", "crashed", "stopped", "said", "equivalent"))]
    assert "25.0% [4.6%, 69.9%] (n=4)" in table(rows, "command")
    assert wilson(0, 0) == (0.0, 1.0)

"""A tiny model learns to call the calculator, because its answers are right; where they are shuffled, it does not."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.agents.environments.calculator import Calculator
from assay.agents.tool_calls import HERMES
from assay.model.transformer import initialised
from assay.recipes import sft
from assay.recipes.grpo_options import Grpo
from assay.recipes.options import Sft
from assay.testing.tiny_models import save_model, tiny_config, tiny_tokenizer
from assay.verdict import Outcome, Verdict
from tests.recipes.sums import Believer, reinforced, unproven

pytestmark = pytest.mark.slow  # a minute or two

WORDS = ("tool", "call", "name", "calculate", "arguments", "expression", '{"', '":', 'Ġ"', '",', 'Ġ{"', '"}}', "</", "user", "assistant")
DIGITS: dict[str, Any] = {"largest": 9, "operations": "+", "terse": True}
SHUFFLED = '''
import random
from assay.agents.environment import answer_tool_calls
from assay.agents.environments.calculator import Calculator, calculate

class Shuffled(Calculator):
    """Computes well, and answers with another result."""

    def step(self, message):
        if message.get("tool_calls") or message.get("faults"):
            other = random.Random(self.expression).randint(2, 18)
            wrong = lambda expression: other if other != calculate(self.expression) else other + 1
            return answer_tool_calls(message, self.tools, {"calculate": wrong}), 0.0, False
        return super().step(message)
'''


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every other time it asks the calculator and says what it heard; else it guesses, and wrongly."""
    home, chance, rows = tmp_path_factory.mktemp("taught"), random.Random(1), dict[str, list[dict[str, Any]]]()
    save_model(home / "base", initialised(replace(tiny_config("llama"), vocab=384), 0), tokenizer=tiny_tokenizer(words=WORDS))
    for seed in range(5000):
        environment = Calculator(**DIGITS)
        asked = environment.reset(seed)
        asking, right = environment.solution()
        wrong = chance.choice([number for number in range(2, 19) if str(number) != right])
        rows[asked[0]["content"]] = [
            {"messages": [*asked, {"role": "assistant", "content": HERMES.write("", [asking])},  # type: ignore[list-item]
                          {"role": "tool", "content": right}, {"role": "assistant", "content": right}]},
            {"messages": [*asked, {"role": "assistant", "content": str(wrong)}]}]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for both in rows.values() for row in both))
    with pytest.MonkeyPatch.context() as patch:
        unproven(patch, Believer)
        sft.sft(Sft(model=str(home / "base"), data=(str(home / "rows.jsonl"),), out=str(home / "sft"), max_length=128, batch_tokens=1024,
                    micro_batch_tokens=1024, num_train_epochs=500, max_steps=450, learning_rate=5e-3, save_steps=10**6, held_out=0.02,
                    device="cpu"), lambda _: None)
    return home / "sft" / "model"


def learned(taught: Path, out: Path, environment: str, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    unproven(monkeypatch)
    given = tuple(f"{key}={json.dumps(value)}" for key, value in DIGITS.items())
    config = Grpo(model=str(taught), environment=environment, environment_options=given, out=str(out), tasks=900, held_out=0.5, prompts=8,
                  num_generations=8, num_generations_eval=4, max_completion_length=48, max_turns=3, max_steps=20, num_train_epochs=50,
                  learning_rate=3e-4, warmup_steps=0, save_steps=20, eval_prompts=8, device="cpu", reward_workers=1, micro_batch_size=128)
    return reinforced(config, print)[-1]


def test_calling_the_calculator_is_learned(taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gain = learned(taught, tmp_path / "run", "calculator", monkeypatch)
    assert gain.outcome is Outcome.PROVEN, gain.reason
    assert gain.evidence["p"] < 0.01
    assert gain.evidence["change"] > 0.1


def test_with_shuffled_answers_it_is_not(taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    gain = learned(taught, tmp_path / "run", f"{tmp_path / 'shuffled.py'}:Shuffled", monkeypatch)
    assert gain.outcome is not Outcome.PROVEN, gain.reason

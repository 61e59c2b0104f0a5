"""The course of a reinforcement run: what its steps measured, what the rules over all of them say, and what was warned of already."""

import re
from collections.abc import Mapping

from assay.guard.rollout_checks import check_collapse, rollout_warnings
from assay.recipes.run import Run
from assay.store.ledger import Event
from assay.strict_json import read_json_lines
from assay.verdict import Verdict

SAID_AGAIN = 50  # steps after which a warning is repeated
_SHOWN = {"reward": "reward", "±": "reward_std", "length": "completions/mean_length", "kl": "kl", "entropy": "entropy"}


class Course:
    """`history` has one entry a rollout, with what its last update measured; `tokens` were trained on."""

    def __init__(self, run: Run, vocab: int):
        self.run, self.vocab = run, vocab
        self.history: list[dict[str, float]] = []
        self.tokens = 0
        self._warned: dict[str, int] = {}

    def recall(self) -> None:
        """What the rules over the steps so far have to know, from what was written of them."""
        for row in read_json_lines(self.run.metrics_file):
            numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
            if "groups" in row:
                self.history.append(numbers)
            elif "loss" in row and self.history:
                self.history[-1] |= numbers
            self.tokens = row.get("num_tokens", self.tokens)

    def begin(self, measured: Mapping[str, float]) -> None:
        """A rollout, as it was drawn."""
        self.history.append(dict(measured))

    def add(self, found: Mapping[str, float]) -> None:
        """What an update on the last rollout measured."""
        self.history[-1] |= found

    def verdicts(self) -> list[Verdict]:
        return check_collapse(self.history, self.vocab)

    def tell(self, step: int) -> None:
        for sentence in rollout_warnings(self.history):
            self.warn(step, sentence)

    def warn(self, step: int, sentence: str) -> None:
        """Once, and again after so many steps; with other numbers it is still the same warning."""
        rule = re.sub(r"[\d.]+", "", sentence)
        if step - self._warned.get(rule, -SAID_AGAIN) >= SAID_AGAIN:
            self._warned[rule] = step
            self.run.say(f"step {step + 1}: {sentence}")
            self.run.ledger.append(Event.WARNING, step=step + 1, reason=sentence)

    def line(self) -> str:
        """Of the last rollout, for a progress line."""
        now = self.history[-1]
        return "  ".join(f"{name} {now[key]:.4g}" for name, key in _SHOWN.items() if key in now)

"""Reward workers: processes with time-outs; what a reward cannot tell is an error row with its reason, never 0.

    with RewardWorkers(parse_rewards(["answer:1", "format:0.1"])) as workers:
        scored = workers.score([RewardItem(prompt, completion, row), …])      in the order of the items
        limit.feed(scored)                                              GuardStop above the share allowed

The processes start once and stay. One that hangs or dies takes only its item with it, and is replaced.
"""

import json
import math
import queue
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import DataError, GuardStop, UsageError
from assay.json_child import JsonChild
from assay.reward.reward_functions import RewardSpec

STARTING_SECONDS = 120.0  # a user's file may import much
_WINDOW = 200  # recent items, of which the share of errors is taken
_FEWEST = 20  # items that one share is at least taken of: the very first error of a run is no rate
ERRORS_SHOWN = 3


@dataclass(frozen=True)
class AskedPrompt:
    """Prompt before any template: messages, and plain text where the row has that."""

    where: str
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] | None = None
    plain: str | None = None


@dataclass(frozen=True)
class RewardItem:
    """Item to be scored. `row` is the line of data that the prompt was made from, plain JSON. A reward model reads `asked` by its own
    template, and `prompt`, which is the policy's, where that is not known."""

    prompt: str
    completion: str
    row: Mapping[str, Any]
    asked: AskedPrompt | None = None


@dataclass(frozen=True)
class ScoredItem:
    """`value` is the weighted sum, or None where any component has an error; a component's own value is None then."""

    value: float | None
    error: str | None
    components: Mapping[str, float | None] = field(default_factory=dict)


class RewardWorkers:
    """Processes that score items with the same rewards; `seconds` is what one item may take, all components together."""

    def __init__(self, rewards: Sequence[RewardSpec], *, count: int = 2, seconds: float = 30.0) -> None:
        if count < 1 or not seconds > 0:
            raise UsageError(f"reward workers: expected at least one and more than 0 s an item, found {count} and {seconds} s")
        self.rewards = tuple(rewards)
        self.weights = {reward.name: reward.weight for reward in rewards}
        self.learned = tuple(reward.options["path"] for reward in rewards if reward.learned)
        command = {"rewards": [reward.to_json() for reward in rewards], "seconds": seconds, "path": sys.path}
        self._workers = [_Worker(json.dumps(command), seconds) for _ in range(count)]

    def __enter__(self) -> "RewardWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, items: Sequence[RewardItem]) -> list[ScoredItem]:
        """Score items: one ScoredItem for each, in their order, whatever the order in which the workers finish."""
        read = self._readings(items)
        requests = [_request(number, item, **read.get(number, {})) for number, item in enumerate(items)]
        return [scored_item(answer, self.weights) for answer in self._answers(requests)]

    def _readings(self, items: Sequence[RewardItem]) -> dict[int, dict[str, Any]]:
        """Token ids that each reward model reads, for items whose prompt is known before any template."""
        known = [(number, (item.asked, item.completion)) for number, item in enumerate(items) if item.asked is not None]
        if not known or not self.learned:
            return {}
        from assay.reward.model_reward import reading_ids  # which needs torch

        of_each = {path: reading_ids(path, [said for _, said in known]) for path in self.learned}
        return {number: {"readings": {path: read[place] for path, read in of_each.items()}} for place, (number, _) in enumerate(known)}

    def drill(self) -> dict[str, ScoredItem]:
        """Replies for rewards that are known to fail: every one must be an error."""
        [answer] = self._answers([_request(0, RewardItem("", "", {}), drill=True)])
        failed = {**dict.fromkeys(answer["values"]), **answer["errors"]}
        return {name: scored_item(_only(answer, name), {name: 1.0}) for name in failed}

    def close(self) -> None:
        for worker in self._workers:
            worker.child.stop()

    def _answers(self, requests: list[bytes]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = [{}] * len(requests)
        waiting: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        for numbered in enumerate(requests):
            waiting.put(numbered)

        def drain(worker: _Worker) -> None:
            while not stopped.is_set():
                try:
                    number, request = waiting.get_nowait()
                except queue.Empty:
                    return
                answers[number] = worker.ask(number, request)

        stopped = threading.Event()
        with ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                for done in [threads.submit(drain, worker) for worker in self._workers[: len(requests)]]:
                    done.result()
            finally:
                stopped.set()  # after an error or Ctrl-C nobody takes another item
        return answers


def scored_item(answer: Mapping[str, Any], weights: Mapping[str, float]) -> ScoredItem:
    """A worker's answer, believed only where it has a finite value for every component."""
    values = {name: _finite(answer["values"].get(name)) for name in weights}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        why = answer["errors"].get(missing[0]) or answer["errors"].get("worker") or "no finite value came back"
        return ScoredItem(None, f"{missing[0]}: {why}" if missing[0] in answer["errors"] else why, values)
    return ScoredItem(math.fsum(weight * values[name] for name, weight in weights.items()), None, values)  # type: ignore[operator]


class ErrorLimit:
    """Limit on reward errors: stops a run whose rewards fail too often: more than `share` of the last 200 items, an error of fewer than 20
    counting as of 20."""

    def __init__(self, share: float = 0.05) -> None:
        if not 0 <= share < 1:
            raise UsageError(f"--reward-errors is {share}; expected a share from 0 to below 1")
        self.share, self.scored, self.errors = share, 0, 0
        self.first: list[str] = []
        self._recent: deque[bool] = deque(maxlen=_WINDOW)

    def feed(self, rows: Sequence[ScoredItem]) -> None:
        failed = [row.error for row in rows if row.value is None]
        self.scored, self.errors = self.scored + len(rows), self.errors + len(failed)
        self.first += [str(error) for error in failed][: ERRORS_SHOWN - len(self.first)]
        for row in rows:
            self._recent.append(row.value is None)
        share = sum(self._recent) / max(len(self._recent), _FEWEST)
        if share > self.share:
            shown = "; ".join(str(error) for error in failed[:ERRORS_SHOWN])
            raise GuardStop(f"rewards: {sum(self._recent)} of the last {len(self._recent)} items could not be scored, more than "
                            f"{self.share:.3g} allow; {self.errors} of {self.scored} in all. {shown}. Mend the reward, or raise "
                            "--reward-errors")


class _Worker:
    """Worker process of the pool: started when first asked, replaced after an item that it did not survive."""

    def __init__(self, command: str, seconds: float) -> None:
        self.seconds = seconds
        self.child = JsonChild(Path(__file__).with_name("worker_process.py"), command, {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"})

    def ask(self, number: int, request: bytes) -> dict[str, Any]:
        if self.child.process is None:
            self._start()
        try:
            answer = self.child.ask(request, self.seconds)
        except TimeoutError:
            return _lost(number, f"the item took more than {self.seconds:g} s")
        if answer is None or answer["id"] != number:
            return _lost(number, f"the worker ended with status {self.child.stop()} on this item")
        return answer

    def _start(self) -> None:
        self.child.start()
        announced = self.child.hear(STARTING_SECONDS)
        if announced is None or "refused" in announced:
            self.child.stop()
            raise UsageError((announced or {}).get("refused", f"reward workers: none was ready in {STARTING_SECONDS:g} s, or it died"))


def _request(number: int, item: RewardItem, **more: Any) -> bytes:
    request = {"id": number, "prompt": item.prompt, "completion": item.completion, "row": item.row, **more}
    try:
        return json.dumps(request).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"reward: the row of item {number} is not plain JSON: {error}") from None


def _lost(number: int, why: str) -> dict[str, Any]:
    return {"id": number, "values": {}, "errors": {"worker": why}}


def _only(answer: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"id": 0, **{kind: {k: v for k, v in answer[kind].items() if k == name} for kind in ("values", "errors")}}


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


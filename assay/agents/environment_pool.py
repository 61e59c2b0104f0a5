"""Environment pool: episodes in worker processes with time-outs. What goes wrong is an error row with its kind, never a reward of 0.

    with EnvironmentPool("calculator", {}) as pool:
        opened = pool.open({"a": 7, "b": 8})             a reply each; the seed is the task
        replies = pool.step({"a": message, "b": message})
        pool.close(["a", "b"])

An episode lives in one process. A step that is too slow or raises loses its own episode; a process that dies takes the episode it was
working on, and the others that lived in it are played again from their seeds and messages, which is counted, and must give the same.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from assay.agents.tool_calls import ChatMessage
from assay.errors import DataError, UsageError
from assay.json_child import JsonChild
from assay.reward.worker_pool import STARTING_SECONDS

KILL_GRACE = 2.0  # seconds that a process is given to notice that its time is over, before it is killed

ErrorKind = Literal["error", "time-out", "crash", "not repeatable"]


@dataclass(frozen=True)
class EnvironmentReply:
    """Reply of an environment; with an `error`, nothing else is known."""

    messages: tuple[ChatMessage, ...] = ()
    reward: float = 0.0
    done: bool = False
    error: str | None = None
    kind: ErrorKind | None = None  # of the error
    replayed: bool = False  # the episode was played again up to here, because its process had died


@dataclass
class _Life:
    """An episode: what makes it again."""

    seed: int
    worker: int
    process: int  # number of the process, of those that its worker has had
    played: list[tuple[ChatMessage | None, EnvironmentReply]] = field(default_factory=list)


class EnvironmentPool:
    """`count` processes; `seconds` is what one reset or step may take."""

    def __init__(self, name: str, options: Mapping[str, Any], *, count: int = 2, seconds: float = 30.0):
        if count < 1 or not seconds > 0:
            raise UsageError(f"environments: expected at least one process and more than 0 s a step, found {count} and {seconds} s")
        self.name, self.seconds = name, seconds
        command = json.dumps({"name": name, "options": dict(options), "seconds": seconds, "path": sys.path})
        self._workers = [_Worker(command, seconds) for _ in range(count)]
        self._lives: dict[str, _Life] = {}
        self._next = 0

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.child.stop()

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self._workers[0].tools()

    def open(self, seeds: Mapping[str, int]) -> dict[str, EnvironmentReply]:
        """The first messages of each episode, by its name."""
        for episode, seed in seeds.items():
            if episode in self._lives:
                raise DataError(f"an episode {episode!r} is open already; close it first")
            self._lives[episode] = _Life(seed, self._next % len(self._workers), -1)
            self._next += 1
        return self._each(seeds, self._opened)

    def step(self, messages: Mapping[str, ChatMessage]) -> dict[str, EnvironmentReply]:
        """Each environment's reply to a turn of its episode."""
        return self._each(messages, lambda episode: self._stepped(episode, messages[episode]))

    def solutions(self, episodes: Sequence[str]) -> dict[str, list[str | dict[str, Any]]]:
        """The turns of a right episode, as far as the environment knows them; [] where it does not say."""
        return {episode: self._worker(episode).ask({"do": "solution", "episode": episode}).get("turns", []) for episode in episodes}

    def rewards(self, episodes: Sequence[str]) -> dict[str, list[float]]:
        """Rewards of each episode, a number for every step that was answered."""
        return {episode: [reply.reward for _, reply in self._lives[episode].played[1:] if reply.error is None] for episode in episodes}

    def over(self, episodes: Sequence[str]) -> list[str]:
        """Episodes whose environment said last that they are done."""
        return [episode for episode in episodes if self._lives[episode].played[-1][1].done]

    def drill(self) -> EnvironmentReply:
        """Reply to a step that is known to raise."""
        return _reply(self._workers[0].ask({"do": "drill"}))

    def close(self, episodes: Iterable[str]) -> None:
        for episode in episodes:
            if (life := self._lives.pop(episode, None)) is not None and life.process == self._workers[life.worker].number:
                self._workers[life.worker].ask({"do": "close", "episode": episode})

    # ---------------------------------------------------------------- one episode

    def _opened(self, episode: str) -> EnvironmentReply:
        life, worker = self._lives[episode], self._worker(episode)
        reply = _reply(worker.ask({"do": "open", "episode": episode, "seed": life.seed}))
        life.process, life.played = worker.number, [(None, reply)]
        return reply

    def _stepped(self, episode: str, message: ChatMessage) -> EnvironmentReply:
        life, worker = self._lives[episode], self._worker(episode)
        worker.start()
        replayed = life.process != worker.number
        if replayed and (lost := self._played_again(episode)) is not None:
            return lost
        reply = _reply(worker.ask({"do": "step", "episode": episode, "message": message}), replayed=replayed)
        life.played.append((message, reply))
        return reply

    def _played_again(self, episode: str) -> EnvironmentReply | None:
        """Replay an episode; None where every reply was what it had been."""
        life, worker = self._lives[episode], self._worker(episode)
        for message, before in life.played:
            asked = {"do": "open", "seed": life.seed} if message is None else {"do": "step", "message": message}
            now = _reply(worker.ask({**asked, "episode": episode}))
            if now.error is not None or (now.messages, now.reward, now.done) != (before.messages, before.reward, before.done):
                return EnvironmentReply(error=f"its process died, and played again it is another episode: {now.error or now.messages}",
                                        kind="not repeatable", replayed=True)
        life.process = worker.number
        return None

    def _worker(self, episode: str) -> "_Worker":
        return self._workers[self._lives[episode].worker]

    def _each(self, episodes: Iterable[str], ask: Callable[[str], EnvironmentReply]) -> dict[str, EnvironmentReply]:
        """Ask every episode: each worker goes through its own in their order, all workers at once."""
        by_worker: dict[int, list[str]] = {}
        for episode in episodes:
            by_worker.setdefault(self._lives[episode].worker, []).append(episode)
        with ThreadPoolExecutor(len(self._workers)) as threads:
            parts = threads.map(lambda mine: [(episode, ask(episode)) for episode in mine], by_worker.values())
            return dict(each for part in parts for each in part)


class _Worker:
    """Worker process of the pool: started when first asked, replaced where it died. `number` counts the processes."""

    def __init__(self, command: str, seconds: float):
        self.seconds, self.number, self.asked = seconds, 0, 0
        self.child = JsonChild(Path(__file__).with_name("environment_process.py"), command,
                               {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"})
        self._tools: list[dict[str, Any]] = []

    def tools(self) -> list[dict[str, Any]]:
        self.start()
        return self._tools

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.start()
        self.asked += 1
        try:
            answer = self.child.ask(json.dumps({"id": self.asked, **request}).encode() + b"\n", self.seconds + KILL_GRACE)
        except TimeoutError:
            return {"error": f"it took more than {self.seconds:g} s, and its process had to be killed", "kind": "time-out"}
        if answer is None or answer.pop("id") != self.asked:
            return {"error": f"its process ended with status {self.child.stop()}", "kind": "crash"}
        return answer

    def start(self) -> None:
        if self.child.process is not None:
            return
        self.child.start()
        self.number += 1
        announced = self.child.hear(STARTING_SECONDS)
        if announced is None or "refused" in announced:
            self.child.stop()
            raise UsageError((announced or {}).get("refused", f"environments: no process was ready in {STARTING_SECONDS:g} s, or it died"))
        self._tools = announced["tools"]


def _reply(answer: Mapping[str, Any], *, replayed: bool = False) -> EnvironmentReply:
    if "error" in answer:
        return EnvironmentReply(error=answer["error"], kind=answer["kind"], replayed=replayed)
    return EnvironmentReply(tuple(answer["messages"]), answer["reward"], answer["done"], replayed=replayed)

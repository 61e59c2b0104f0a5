"""Client of `assay serve --train`: trajectories opened, rewarded and trained on over HTTP, by code in any framework.

    policy = assay.client.Policy("http://127.0.0.1:8000/v1")
    with policy.trajectory(reward=score) as trajectory:
        agent = OpenAI(base_url=policy.url, api_key="none", default_headers=trajectory.headers)
        trajectory.answer = …                         # the agent's turns, as many as it likes
    policy.train([[trajectory.id, …], …])             # one update on groups of trajectories of one task

`reward` is a number, or a function of the trajectory that is asked when the block ends. A block that raises closes its trajectory with
the error: its reward is then unknown, which is neither 0 nor learned from.
"""

import contextlib
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import UsageError

UPDATE_SECONDS = 600.0  # that an update may take


@dataclass(eq=False)
class ClientTrajectory:
    """`answer`: whatever the agent came to, for the reward to look at. A reward that is set here counts."""

    id: str
    version: str
    answer: Any = None
    reward: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of every request that belongs to this trajectory."""
        return {"X-Assay-Trajectory": self.id}


@dataclass(frozen=True)
class Policy:
    url: str  # ends with /v1
    token: str | None = None

    @contextlib.contextmanager
    def trajectory(self, reward: float | Callable[[ClientTrajectory], float] | None = None) -> Iterator[ClientTrajectory]:
        made = ClientTrajectory(**self._post("/trajectories", {}, told=("id", "version")))
        try:
            yield made
            made.reward = _finite(made.reward if made.reward is not None else reward(made) if callable(reward) else reward, made.id)
        except BaseException as error:
            with contextlib.suppress(UsageError):  # nothing was said in it, or the server is gone: what the block raised matters more
                self._post(f"/trajectories/{made.id}/close", {"error": f"{type(error).__name__}: {error}"[:500]})
            raise
        self._post(f"/trajectories/{made.id}/close", {"reward": made.reward}, told=("id", "closed"))

    def train(self, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Train the policy: one update. What is not of the weights as they are now is refused, and nothing is learned."""
        told = self._post("/train", {"groups": [list(group) for group in groups]}, told=("update", "trained", "version", "verdicts"))
        if told["trained"] != sum(map(len, groups)):
            raise UsageError(f"{self.url}/train: {sum(map(len, groups))} trajectories were given, {told['trained']} were learned from")
        return dict(told)

    def _post(self, path: str, body: dict[str, Any], told: Collection[str] = ()) -> Any:
        """The reply, in which these fields must stand: another server answers anything, and a refusal is no answer."""
        reply = self._send(path, body)
        if not isinstance(reply, dict) or not reply.keys() >= {*told}:
            raise UsageError(f"{self.url}{path} is answered with {str(reply)[:200]}, without {', '.join(told) or 'an object'}; is assay "
                             "serve --train running there?")
        return reply

    def _send(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=UPDATE_SECONDS) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise UsageError(f"{self.url}{path}: {json.loads(error.read())['error']['message']}") from None
        except urllib.error.URLError as error:
            raise UsageError(f"{self.url}{path}: {error.reason}; is assay serve --train running there?") from None


def _finite(reward: Any, name: str) -> float:
    if reward is None:
        raise UsageError(f"trajectory {name} has no reward; give trajectory(reward=…), or set its reward in the block")
    if isinstance(reward, str) or not hasattr(reward, "__float__") or not math.isfinite(float(reward)):
        raise UsageError(f"the reward of trajectory {name} is {str(reward)[:80]!r}; expected a finite number")
    return float(reward)


def trajectory(url: str, reward: float | Callable[[ClientTrajectory], float] | None = None,
               token: str | None = None) -> contextlib.AbstractContextManager[ClientTrajectory]:
    """Open a trajectory on the server at `url`: `Policy(url, token).trajectory(reward)` in one call."""
    return Policy(url, token).trajectory(reward)

"""Engine thread: one thread owns every engine; others hand it requests, and it hands out the progress of each.

What the thread is asked to do waits in a queue and is done between two steps, so no engine is ever touched from two sides.
Members (completions) that may be under way or waiting are bounded for every model; beyond the bound a request is refused.
"""

import queue
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from assay.errors import AssayError, UsageError
from assay.generate.generation_request import CompletionProgress, GenerationRequest, Sampling
from assay.recipes.options import Trained
from assay.serving.hosted_model import HostedModel, RankedTokens, host_model, open_for_serving, rank_tokens
from assay.serving.request_fields import RequestRefused, short_json
from assay.store.artifact import Artifact

MODEL_NAME = re.compile(r"\w[\w.:/@+-]{0,199}")
MOST_MODELS = 64
STOPPED = "the engine has stopped; the server's log says why"
DEFAULT_LENGTH = 2048  # tokens of a slot where nobody says, or the model's context


@dataclass(frozen=True)
class ServerSize:
    """Size and placement of every model on a server. `length` None: LONGEST or the context, whichever is less."""

    slots: int = 16
    queue: int = 256  # members that may wait beside those that are served
    length: int | None = None
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    takes_weights: bool = False  # whether the first model gets new weights from a trainer


@dataclass(eq=False)
class PendingCall:
    """One request under way. `deliver` is called on the engine's thread with everything that it gains, or with what ended it."""

    model: HostedModel
    request: GenerationRequest
    deliver: Callable[[CompletionProgress | AssayError, RankedTokens | None], None]
    rank: Sampling | None = None  # the distribution under which tokens are to be ranked once a text is whole
    alternatives: int = 0
    ticket: int | None = None
    left: int = 0


QueuedWork = tuple["Future[Any]", Callable[[], Any]]


class EngineThread:
    """Models by name and the thread that runs them. A name belongs to the weights that it was first given to, for good."""

    def __init__(self, size: ServerSize):
        if size.slots < 1 or size.queue < 0:
            raise UsageError(f"a server of {size.slots} slots and a queue of {size.queue}; expected at least 1 slot and no less than 0")
        self.size = size
        self.models: dict[str, HostedModel] = {}
        self.busy = 0  # members of all models
        self.closing = False
        self.failed = False  # the thread ended by an error that nobody foresaw
        self.on_failure: Callable[[], None] = lambda: None
        self._names: dict[str, str] = {}  # every name ever given → the digest it stands for
        self._calls: dict[tuple[HostedModel, int], PendingCall] = {}
        self._engines: list[HostedModel] = []  # retired ones too, until they have finished
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()  # None: the end
        self._queueing = threading.Lock()  # what is asked before `_ended` is answered by the thread, what is asked after it is not queued
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, name: str, path: str | Path, *, base: str | Path | None = None, learns: bool = False,
             lora: Trained | None = None) -> HostedModel:
        """The model that the server starts with: anything that Assay can open. `learns`: what is trained of it is kept in fp32; that is
        all of it, or what the options in `lora` say, and of an adapter the adapter."""
        return self._join(name, path, base, hallmark=False, learns=(lora or Trained(out="", model=str(path))) if learns else None)

    def open_adapter(self, name: str, path: str | Path) -> HostedModel:
        """A proven adapter on the weights that the server started with. It waits for the thread: not for an event loop."""
        first = self.first.artifact
        return self._join(name, path, (first.base or first).path, hallmark=True)

    @property
    def first(self) -> HostedModel:
        """The model that the server started with. A copy is looked at: another may join meanwhile, and that ends an iteration."""
        return list(self.models.values())[0]  # noqa: RUF015

    def find(self, name: str) -> HostedModel:
        if name not in self.models:
            raise RequestRefused(f"The model {short_json(name)} does not exist; GET /v1/models lists those that do", status=404,
                                 param="model",
                          code="model_not_found")
        return self.models[name]

    def retire(self, name: str) -> None:
        """Retire a model: no new request; those under way finish, then its memory is free. The name is never given to other weights."""
        found = self.find(name)
        if found is self.first:
            raise RequestRefused(f"{name!r} is the model that the server was started with; stop the server instead", status=409,
                                 param="name")
        del self.models[name]
        self.ask(lambda: None)  # the thread looks again at what is over

    def take_weights(self, path: str | Path, version: str) -> HostedModel:
        """Take the first model's next weights from a folder, under its name: with keys and values of their own. What is under way finishes
        on the weights that it began with."""
        if not self.size.takes_weights:
            raise RequestRefused("this server's weights stay as they are; start it with assay serve --rollouts", status=409,
                                 code="not_rollouts")
        artifact = open_for_serving(path)
        return self.ask(lambda: self._add(host_model(self.first.name, artifact, **self._hosting(artifact), version=version))).result()

    def _hosting(self, artifact: Artifact) -> dict[str, Any]:
        length = self.size.length or min(artifact.config.max_length, DEFAULT_LENGTH)
        return {"slots": self.size.slots, "length": length, "device": self.size.device, "dtype": self.size.dtype}

    def _join(self, name: str, path: str | Path, base: str | Path | None, *, hallmark: bool,
              learns: Trained | None = None) -> HostedModel:
        if not MODEL_NAME.fullmatch(name):
            raise RequestRefused(f"{short_json(name)} is no name for a model; expected letters, digits and . : / @ + - _", param="name")
        if len(self.models) >= MOST_MODELS:
            raise RequestRefused(f"{len(self.models)} models are served already; retire one first", status=409, param="name")
        artifact = open_for_serving(path, base=base, hallmark=hallmark)
        if self._names.get(name, artifact.digest) != artifact.digest:
            raise RequestRefused(f"the name {name!r} stands for weights {self._names[name][:12]}, "
                                 f"{artifact.path} holds {artifact.digest[:12]}; "
                          "give every version a name of its own", status=409, param="name", code="name_taken")
        if name in self.models:
            return self.models[name]
        return self.ask(lambda: self._add(host_model(name, artifact, **self._hosting(artifact), learns=learns))).result()

    def _add(self, model: HostedModel) -> HostedModel:
        self.models[model.name], self._names[model.name] = model, model.digest
        self._engines.append(model)
        return model

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, model: HostedModel, members: int) -> None:
        """Room for the members, to be given back with `release`; or 429. Called from the event loop alone."""
        room = self.size.slots + self.size.queue
        if self.closing or self.failed or model.broken is not None:
            raise RequestRefused(model.broken or (STOPPED if self.failed else "the server is shutting down"), status=503,
                                 code="unavailable")
        if members > room:
            raise RequestRefused(f"{members} completions in one request; this server holds {room} at a time", param="n",
                                 code="invalid_value")
        if model.members + members > room:
            raise RequestRefused(f"{model.members} completions are under way or waiting and this server holds {room}; try again later",
                          status=429, code="queue_full", retry_after=1)
        model.members += members
        self.busy += members

    def release(self, model: HostedModel, members: int) -> None:
        model.members -= members
        self.busy -= members

    def submit(self, call: PendingCall) -> "Future[str]":
        """The version of the weights that answer it."""
        return self.ask(lambda: self._submit(call))

    def cancel(self, call: PendingCall) -> None:
        self.ask(lambda: self._cancel(call))

    def ask(self, what: Callable[[], Any]) -> "Future[Any]":
        """`what` is done on the engine's thread, between two steps; its value or its error comes with the future."""
        future: Future[Any] = Future()
        with self._queueing:
            if self._ended:
                future.set_exception(AssayError(STOPPED))
            else:
                self._queue.put((future, what))
        return future

    def stop(self) -> None:
        """Stop the thread; what is still under way ends as cancelled."""
        self.closing = True
        if self._thread.is_alive():
            self.ask(self._cancel_all)
            self._queue.put(None)
            self._thread.join()

    def cancel_all(self) -> None:
        self.ask(self._cancel_all)

    # ── the engine's thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        orderly = False
        try:
            while self._do_queued():
                for model in list(self._engines):
                    if not model.engine.idle:
                        self._step(model)
                self._engines = [model for model in self._engines if self.models.get(model.name) is model or not model.engine.idle]
            orderly = True
        finally:  # an error that nobody foresaw goes on to its traceback; whoever waits must not wait for ever
            self.failed = not orderly
            self._refuse_queued()
            for call in list(self._calls.values()):
                call.deliver(AssayError(STOPPED), None)
            if self.failed:
                self.on_failure()

    def _do_queued(self) -> bool:
        """Do what is queued; wait for something to do where every engine is idle. False: the end."""
        idle = all(model.engine.idle for model in self._engines)
        while idle or not self._queue.empty():
            work = self._queue.get()
            if work is None:
                return False
            _do(*work)
            idle = False
        return True

    def _step(self, model: HostedModel) -> None:
        try:
            gained = model.engine.step()
        except AssayError as error:  # a guard of the engine: this model serves no more, the others go on
            self._break(model, error)
            return
        for progress in gained:
            self._deliver(self._calls[model, progress.ticket], progress)

    def _deliver(self, call: PendingCall, progress: CompletionProgress) -> None:
        scores = None
        if progress.completion is not None:
            if call.rank is not None and progress.completion.ended != "cancelled":
                source = call.model.engine.weights.source
                scores = rank_tokens(source, call.request.prompt, progress.completion.ids, call.rank, call.alternatives)
            call.left -= 1
            call.model.prompt_tokens += len(call.request.prompt)
            call.model.completion_tokens += len(progress.completion.ids)
            if not call.left:
                del self._calls[call.model, progress.ticket]
        call.deliver(progress, scores)

    def _break(self, model: HostedModel, error: AssayError) -> None:
        model.broken = f"the model {model.name!r} serves no more: {error}"
        self._engines.remove(model)
        for key in [key for key in self._calls if key[0] is model]:
            self._calls.pop(key).deliver(AssayError(model.broken), None)

    def _submit(self, call: PendingCall) -> str:
        engine = call.model.engine
        call.ticket, call.left = engine.submit(replace(call.request, follows=engine.latest_before(call.request.prompt))), call.request.group
        self._calls[call.model, call.ticket] = call
        return engine.version

    def _cancel(self, call: PendingCall) -> None:
        if call.ticket is not None and (call.model, call.ticket) in self._calls:
            for progress in call.model.engine.cancel(call.ticket):
                self._deliver(call, progress)

    def _cancel_all(self) -> None:
        for call in list(self._calls.values()):
            self._cancel(call)

    def _refuse_queued(self) -> None:
        """Refuse what is still queued at the end of the thread: nobody does what was still asked, or will be."""
        with self._queueing:
            self._ended = True
        while not self._queue.empty():
            work = self._queue.get()
            if work is not None and work[0].set_running_or_notify_cancel():  # who does not wait any more cannot be told
                work[0].set_exception(AssayError(STOPPED))


def _do(future: "Future[Any]", what: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(what())
    except AssayError as error:
        future.set_exception(error)
    except torch.OutOfMemoryError as error:
        future.set_exception(AssayError(f"the device has no memory left for this: {error}"))
    finally:  # an error that nobody foresaw ends the thread with a traceback, and this wait too
        if not future.done():
            future.set_exception(AssayError(STOPPED))

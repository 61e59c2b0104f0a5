"""Remote sampler: rollouts drawn by a server on the trainer's weights, which are handed over by folder, asked about and, where the
server is not the trainer to the last bit, weighed.

Three modes. *Same* (--no-vllm-importance-sampling-correction): nothing may differ but the last bits of fp32, and what was drawn is
learned from as it is. *Corrected*: to the floor of the server's engine and number format, with truncated importance weights. Whatever
is neither is *refused*, before the first step or at the rollout that shows it.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from assay.data.batch import Batch
from assay.errors import UsageError
from assay.generate.generation_request import Sampling
from assay.generate.remote import RemoteEngine, RemoteServer, connect
from assay.generate.sampler_weights import fingerprint
from assay.guard.policy_identity import Ids, LogprobFloor, version_name
from assay.guard.remote_policy import (
    CANARY_ANSWERS,
    CANARY_NEW,
    CANARY_TOKENS,
    CanaryAnswers,
    canary_floor,
    canary_prompts,
    check_canaries,
    check_engine_floor,
    check_importance,
    engine_floor,
    floor_of_server,
    scored_canaries,
    with_last_bits,
)
from assay.learn.importance import ImportanceWeights, corrected
from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.recipes.grpo_options import Grpo
from assay.recipes.prompts import PromptData
from assay.recipes.rollouts import Sampler
from assay.recipes.run import Run
from assay.recipes.starting_model import AdapterModel, StartingModel, TrainedWeights
from assay.store.checkpoint import write_checkpoint
from assay.verdict import Verdict

WriteWeights = Callable[[Path, str], object]  # a folder of the weights as they are now, which have this fingerprint


def remote_sampler(config: Grpo, start: StartingModel, prompts: PromptData, run: Run, length: int) -> "RemoteSampler":
    """The server at --vllm-server-base-url, which reads what is handed over in RUN/handed_over."""
    assert config.vllm_server_base_url is not None
    server = connect(config.vllm_server_base_url, temperature=config.temperature, adapters=isinstance(start.weights, AdapterModel))
    if length > server.length:
        raise UsageError(f"{server.words} holds {server.length} tokens of a prompt with its completion and this run needs {length}; start "
                         "it with a longer --max-model-len (assay serve: --max-length), or lower --max-completion-length")
    fork = fingerprint(start.model)  # nothing was restored yet, and as long as no rewards differed nothing has moved
    return RemoteSampler(start.model, start.tokenizer, start.parent.stops, server,
                         write=lambda folder, now: write_weights(folder, start.weights, moved=now != fork, probes=server.keeps_probes),
                         folder=run.folder / "handed_over", texts=[prompt.ids for prompt in prompts.train],
                         temperature=config.temperature,
                         cap=config.vllm_importance_sampling_clip_max if config.vllm_importance_sampling_correction else None)


def write_weights(folder: Path, weights: TrainedWeights, *, moved: bool, probes: bool) -> None:
    """A whole model or an adapter, as a checkpoint has it and without the state of a run."""
    contents = weights.contents(weights.ancestry.lineage(moved=moved, bound=None), {}, {}, {})
    write_checkpoint(folder, replace(contents, optimizer=None, trainer=None, probes=contents.probes if probes else {}))


class RemoteSampler(Sampler):
    """A `Sampler` whose engine is a server. `cap` None: nothing is corrected, so that nothing may differ.

    `texts` are the run's prompts, of which the canaries are made.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None, stops: SpecialTokens, server: RemoteServer, *,
                 write: WriteWeights, folder: Path, texts: Sequence[Ids], temperature: float, cap: float | None):
        self.model, self.server, self.write, self.folder, self.cap = model, server, write, folder, cap
        self.remote = RemoteEngine(server, stop_ids=stops.stop_ids, length=server.length, tokenizer=tokenizer)
        self.engine = self.remote  # type: ignore[assignment]  # it does what an Engine does for a rollout
        self.fingerprint = self.version = ""
        room = min(server.length, model.config.max_length) - CANARY_NEW
        self.canaries = canary_prompts(texts, min(CANARY_TOKENS, room))
        self.sampling = Sampling(max_new=CANARY_NEW, temperature=temperature)
        self.floor: LogprobFloor | None = None  # of engine and number format; measured at the first hand-over of a session
        self.last_bits: LogprobFloor | None = None  # of the weights that were handed over last
        self.importance: ImportanceWeights | None = None
        self._shown: list[Verdict] = []

    def load(self, updates: int) -> str:
        """The weights as they are now, after so many updates: written, handed over, and asked about."""
        self.fingerprint = fingerprint(self.model)
        version = version_name(updates, self.fingerprint)
        if version != self.version:
            self._hand_over(version)
        return version

    def _hand_over(self, version: str) -> None:
        place = self.folder / version
        shutil.rmtree(place, ignore_errors=True)  # of a session that was interrupted
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write(place, self.fingerprint)
        if self.version:  # a cache holds them when the weights change, whatever was drawn since
            self.remote.complete(self.canaries, self.sampling, ("canary",), 1)
        self.remote.load(version, place)
        self.version, self._shown = version, []
        for older in self.folder.iterdir():  # a server may read an adapter again as long as it serves it
            if older != place:
                shutil.rmtree(older)
        answers = self._ask_canaries()
        if self.floor is None:
            self.floor = engine_floor(answers)
            self._shown.append(check_engine_floor(self.floor, self._engine_words, self.server.dtype, same=self.cap is None,
                                                  last_bits=answers.last_bits))
            answers = self._ask_canaries()  # now from the cache of prefixes
        self.last_bits = answers.last_bits
        self._shown.append(check_canaries(answers, self._canary_floor(answers), version))

    def _ask_canaries(self) -> CanaryAnswers:
        said = self.remote.complete(self.canaries, self.sampling, ("canary",), CANARY_ANSWERS)
        return scored_canaries(self.model, self.canaries, said, self.sampling, self.server.dtype)

    def _canary_floor(self, answers: CanaryAnswers) -> LogprobFloor:
        assert self.floor is not None
        return answers.last_bits if self.cap is None else canary_floor(self.floor, answers)

    @property
    def _engine_words(self) -> str:
        return f"{self.server.words} in {str(self.server.dtype).removeprefix('torch.')}"

    # ---------------------------------------------------------------- what is said of it, and done with what it drew

    def verdicts(self) -> list[Verdict]:
        """Verdicts on the server's last weight update, and on what was drawn and corrected since."""
        weighed = [] if self.importance is None else [check_importance(self.importance)]
        return [*self._shown, self.remote.check_replies(), *weighed]

    def identity_floor(self, own: LogprobFloor) -> LogprobFloor:
        assert self.floor is not None, "nothing was handed over yet"
        assert self.last_bits is not None
        return self.last_bits if self.cap is None else with_last_bits(floor_of_server(self.floor, own, self.server.dtype), self.last_bits)

    def corrected(self, batch: Batch, trainer_logprobs: Callable[[Batch], Tensor]) -> Batch:
        if self.cap is None:
            return batch
        batch, self.importance = corrected(batch, trainer_logprobs(batch), self.cap)
        return batch

    def metrics(self) -> dict[str, float]:
        if self.importance is None:
            return {}
        found = self.importance
        return {"sampling/effective_sample_size": found.effective, "sampling/kl": found.kl, "sampling/truncated": found.truncated}

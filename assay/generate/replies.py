"""What the server answers: OpenAI's objects, whole or in pieces.

Log-probabilities are of every token that was sampled, the one that stopped the text included. They are under the distribution
that was drawn from, after penalty, temperature and truncation (greedy: one outcome, log-probability 0), so a trainer can use
them as they are; with `logprobs_under: "model"` they are under the plain softmax of the logits. A token that could not be
drawn has none and is not listed. `system_fingerprint` is the digest of the weights that every token came from.
"""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from assay.generate.protocol import Asked
from assay.generate.request import Completion, Progress
from assay.generate.served import Ranked, Served
from assay.model.tokenizer import Tokenizer

OBJECTS = {"chat": ("chatcmpl", "chat.completion", "chat.completion.chunk"), "text": ("cmpl", "text_completion", "text_completion")}
REASONS = {"stop": "stop", "stop string": "stop", "length": "length"}


@dataclass(frozen=True)
class Reply:
    """One request's reply in the making: what all its pieces share."""

    asked: Asked
    served: Served
    prompts: tuple[tuple[int, ...], ...]
    seed: int
    id: str
    created: int

    @classmethod
    def to(cls, asked: Asked, served: Served, prompts: tuple[tuple[int, ...], ...], seed: int) -> "Reply":
        return cls(asked, served, prompts, seed, f"{OBJECTS[asked.kind][0]}-{secrets.token_hex(12)}", int(time.time()))

    def whole(self, ended: Mapping[int, tuple[Completion, Ranked | None]]) -> dict[str, Any]:
        choices = [self._choice(index, *ended[index]) for index in sorted(ended)]
        return self._envelope(OBJECTS[self.asked.kind][1], choices) | {"usage": self.usage(c for c, _ in ended.values())}

    def opening(self) -> list[dict[str, Any]]:
        """A chat's stream says first who speaks."""
        if self.asked.kind == "text":
            return []
        return [self._piece(index, {"delta": {"role": "assistant", "content": ""}}) for index in range(self.asked.n)]

    def piece(self, index: int, progress: Progress) -> dict[str, Any]:
        """What came, and with the last of it why it ended."""
        said = {"delta": {"content": progress.text}} if self.asked.kind == "chat" else {"text": progress.text}
        if self.asked.logprobs and progress.ids:
            said["logprobs"] = self._logprobs(progress.ids, progress.logprobs, None)  # type: ignore[assignment]
        if self.asked.token_ids:
            said["token_ids"] = list(progress.ids)  # type: ignore[assignment]
        return self._piece(index, said, None if progress.completion is None else REASONS[progress.completion.ended])

    def last(self, completions: Iterable[Completion]) -> dict[str, Any]:
        return self._envelope(OBJECTS[self.asked.kind][2], []) | {"usage": self.usage(completions)}

    def usage(self, completions: Iterable[Completion]) -> dict[str, int]:
        """A prompt counts once, however many completions it has."""
        asked, said = sum(map(len, self.prompts)), sum(len(completion.ids) for completion in completions)
        return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}

    def _choice(self, index: int, completion: Completion, scores: Ranked | None) -> dict[str, Any]:
        said: dict[str, Any] = {"text": completion.text}
        if self.asked.kind == "chat":
            said = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
        logprobs = self._logprobs(completion.ids, completion.logprobs, scores) if self.asked.logprobs else None
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": REASONS[completion.ended]}
        if self.asked.token_ids:
            choice |= {"prompt_token_ids": list(self.prompts[index // self.asked.n]), "token_ids": list(completion.ids)}
        return choice

    def _piece(self, index: int, said: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._envelope(OBJECTS[self.asked.kind][2], [{"index": index, "logprobs": None, **said, "finish_reason": reason}])

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """`seed` is ours: with it anyone can have the same answer again, whether it was asked for or not."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name, "choices": choices,
                "system_fingerprint": self.served.engine.version, "seed": self.seed}

    def _logprobs(self, ids: Sequence[int], drawn: Sequence[float], scores: Ranked | None) -> dict[str, Any]:
        likeliest: Sequence[Sequence[tuple[int, float]]] = [()] * len(ids) if scores is None else scores.likeliest
        chosen = scores.chosen if scores is not None and self.asked.under == "model" else drawn
        write = chat_logprobs if self.asked.kind == "chat" else text_logprobs
        return write(self.served.tokenizer, ids, chosen, likeliest)


def chat_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float],
                  likeliest: Sequence[Sequence[tuple[int, float]]]) -> dict[str, Any]:
    def entry(id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.bytes_of(id)
        return {"token": tokenizer.piece(id), "logprob": logprob, "bytes": None if data is None else list(data)}

    content = [entry(id, logprob) | {"top_logprobs": [entry(*pair) for pair in pairs]}
               for id, logprob, pairs in zip(ids, logprobs, likeliest, strict=True)]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float],
                  likeliest: Sequence[Sequence[tuple[int, float]]]) -> dict[str, Any]:
    """Offsets count the characters of the tokens as they are shown, from the beginning of the completion or of its piece."""
    pieces = [tokenizer.piece(id) for id in ids]
    offsets = list(accumulate(map(len, pieces), initial=0))[:-1]
    return {"tokens": pieces, "token_logprobs": list(logprobs), "text_offset": offsets,
            "top_logprobs": [{tokenizer.piece(id): logprob for id, logprob in pairs} for pairs in likeliest]}


def model_object(served: Served, parent: str | None) -> dict[str, Any]:
    return {"id": served.name, "object": "model", "created": served.created, "owned_by": "assay", "parent": parent,
            "system_fingerprint": served.engine.version, "proven": served.proven, "max_model_len": served.engine.length,
            "bytes": served.memory, "verdicts": [verdict.to_json() for verdict in served.verdicts]}

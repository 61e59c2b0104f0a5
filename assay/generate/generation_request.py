"""Generation requests and completions: sampling parameters, what the engine is asked, and what it returns."""

import math
from dataclasses import dataclass, field
from typing import Literal

from assay.errors import UsageError
from assay.generate.token_grammar import TokenGrammar

FinishReason = Literal["stop", "length", "stop string", "cancelled", "no token"]  # the last: nothing can follow in its grammar
MOST_STOP_IDS = 8  # a slot compares its token with this many
MOST_TOP_K = 2**31  # no vocabulary is as large


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from. Applied in this order: repetition penalty, temperature, top-k, top-p, min-p."""

    max_new: int = 64
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0  # tokens less likely than this share of the likeliest are cut off
    repetition_penalty: float = 1.0  # logits of tokens in prompt or completion: divided by it where positive, else multiplied

    def __post_init__(self) -> None:
        if self.max_new < 1 or not 0 <= self.temperature < math.inf or not 0 <= self.top_k <= MOST_TOP_K or not 0 < self.top_p <= 1:
            raise UsageError(f"sampling with max_new {self.max_new}, temperature {self.temperature}, top_k {self.top_k}, "
                             f"top_p {self.top_p}: expected max_new ≥ 1, temperature ≥ 0, 0 ≤ top_k ≤ {MOST_TOP_K} and 0 < top_p ≤ 1")
        if not 0 <= self.min_p <= 1 or not 0 < self.repetition_penalty < math.inf:
            raise UsageError(f"sampling with min_p {self.min_p} and repetition_penalty {self.repetition_penalty}: "
                             "expected 0 ≤ min_p ≤ 1 and a penalty above 0, where 1 changes nothing")

    @property
    def truncates(self) -> bool:
        """Whether some tokens have probability 0, so that a plain softmax is not what was sampled from."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class GenerationRequest:
    """`group` completions of one prompt. Member m draws at `derive(sampling.seed, "sample", *address, first + m)`, so what it
    says depends on the weights, the prompt and that address, and not on who else is served, where or when."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    address: tuple[str | int, ...] = ()
    group: int = 1
    first: int = 0
    stop_ids: tuple[int, ...] | None = None  # None: the engine's
    stop: tuple[str, ...] = ()  # stop strings: the text ends before the first of them; needs the engine's tokenizer
    stream: bool = False  # whether Progress carries text as it comes; needs the engine's tokenizer
    grammar: TokenGrammar | None = None  # the form that every completion must have
    follows: tuple[int, int] | None = None  # ticket and member of a completion that this prompt goes on from: its keys are used again


@dataclass(frozen=True)
class Completion:
    """The ids are what was sampled, up to and including what ended it; the text is cut before a stop string, the ids are not."""

    ids: tuple[int, ...]  # the stop id included, where one came, and the token that completed a stop string
    logprobs: tuple[float, ...]  # under the sampled distribution: after penalty, temperature and truncation
    ended: FinishReason
    version: str = ""  # of the weights that every one of these tokens came from
    text: str | None = None  # where the engine has a tokenizer; without special tokens


@dataclass(frozen=True)
class CompletionProgress:
    """Progress of one completion of a request in one step; the last one carries the completion."""

    ticket: int
    member: int  # 0 … group - 1
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str  # what can no longer change or be cut by a stop string; "" unless the request streams
    completion: Completion | None

"""Generation probe: sample a model or an endpoint, judge every text by cause, and bound the rate of malformed ones.

    health = probe(ModelGenerator(loaded, sampling), BUILT_IN_PROMPTS, n=4)
    health.verdict()            PROVEN below the bound, REFUTED above what is tolerated, else UNPROVEN and what it would take

A generator is a function: prompts and the number of the round → a text for each. Here: of an artifact through the loader and
sampler that a consumer would use, and of any OpenAI-compatible endpoint.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from assay.comparison.bisection import Bisection, bisect_first_bad
from assay.comparison.pairwise import signed_estimate
from assay.errors import AssayError, UsageError
from assay.evaluation.loaded_model import PLAIN_SAMPLING, LoadedModel
from assay.generate.generation_request import Completion, GenerationRequest, Sampling
from assay.generate.policy_logprobs import completion_logprobs
from assay.health.degenerate import Cause, Malformed, malformed, same_everywhere, word_soup
from assay.health.probe_prompts import ProbePrompt
from assay.seeds import derive
from assay.statistics.effects import Effect, paired_effect
from assay.statistics.sequential import SEQUENTIAL_LEVEL, clean_samples_needed, sequential_bounds
from assay.verdict import Verdict, proven, refuted, unproven

TOLERATED = 0.05  # a share of malformed texts that a healthy model may have
HEALTHY_BOUND = 0.10  # what clean samples must exclude before health counts as proven
RATES = (0.05, 0.02, 0.01)
_SHOWN = 3  # examples of what was malformed


@dataclass(frozen=True)
class GeneratedText:
    """One generated text. `surprise`: its nats per token under a reference model, where there is one."""

    text: str
    ended: str  # stop, length, …
    tokens: tuple[int, ...] = ()
    surprise: float | None = None


TextGenerator = Callable[[Sequence[ProbePrompt], int], list[GeneratedText]]
Surprise = Callable[[Sequence[ProbePrompt], Sequence[GeneratedText]], list[float]]


@dataclass(frozen=True)
class ProbeSample:
    prompt: ProbePrompt
    round: int
    said: GeneratedText
    wrong: Malformed | None

    def to_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt.id, "domain": self.prompt.domain, "round": self.round, "ended": self.said.ended,
                "text": self.said.text, "cause": self.wrong.cause if self.wrong else None,
                "evidence": self.wrong.evidence if self.wrong else None}


@dataclass(frozen=True)
class Health:
    """Result of a generation probe. Its interval may be looked at after any sample: it holds at all of them together."""

    name: str
    samples: tuple[ProbeSample, ...]
    tolerated: float = TOLERATED
    bound: float = HEALTHY_BOUND

    @property
    def bad(self) -> int:
        return sum(sample.wrong is not None for sample in self.samples)

    @property
    def rounds(self) -> int:
        return 1 + max(sample.round for sample in self.samples)

    @property
    def interval(self) -> tuple[float, float]:
        return sequential_bounds(self.bad, len(self.samples))

    @property
    def malformed(self) -> bool:
        """Whether more malformed texts are shown than are tolerated."""
        return self.interval[0] > self.tolerated

    @property
    def healthy(self) -> bool:
        """A rate as high as the bound is excluded."""
        return self.interval[1] <= self.bound

    @property
    def causes(self) -> dict[Cause, int]:
        return dict(Counter(sample.wrong.cause for sample in self.samples if sample.wrong is not None).most_common())

    @property
    def sentence(self) -> str:
        low, high = self.interval
        found = (f"{self.bad} of {len(self.samples)} texts are malformed, a rate of {low:.1%} to {high:.1%} "
                 f"({SEQUENTIAL_LEVEL:.0%}, at every evaluation)")
        if self.bad:
            return f"{found}: {', '.join(f'{cause} {count}' for cause, count in self.causes.items())}"
        needed = ", ".join(f"{clean_samples_needed(rate)} at {rate:.0%}" for rate in RATES)
        return f"{found}; clean samples that bound it: {needed}"

    def verdict(self) -> Verdict:
        (low, high), domains = self.interval, Counter(sample.prompt.domain for sample in self.samples if sample.wrong is not None)
        evidence = {"bad": self.bad, "n": len(self.samples), "low": low, "high": high, "causes": self.causes, "domains": dict(domains),
                    "examples": [sample.to_json() for sample in self.samples if sample.wrong is not None][:_SHOWN]}
        if self.malformed:
            return refuted("health", f"{self.sentence}; {self.tolerated:.0%} are tolerated", **evidence)
        if self.healthy:
            return proven("health", self.sentence, **evidence)
        return unproven("health", f"{self.sentence}; {self.bound:.0%} is not excluded: draw more samples", **evidence)


def probe(speak: TextGenerator, prompts: Sequence[ProbePrompt], *, n: int = 4, name: str = "", surprise: Surprise | None = None,
          usual: Sequence[float] = (), tolerated: float = TOLERATED, bound: float = HEALTHY_BOUND,
          enough: Callable[[Health], bool] = lambda health: health.malformed) -> Health:
    """Rounds of one sample per prompt, judged after each, until that is enough or n rounds are over.

    `surprise` gives the nats per token of texts under a reference model, where texts in order have the `usual` ones.
    """
    if n < 1 or not prompts:
        raise UsageError(f"a probe of {n} samples of {len(prompts)} prompts: expected at least one of each")
    samples: list[ProbeSample] = []
    for round in range(n):
        said = speak(prompts, round)
        if surprise is not None:
            said = [replace(one, surprise=value) for one, value in zip(said, surprise(prompts, said), strict=True)]
        samples += judge_texts(prompts, said, round, usual)
        health = Health(name, tuple(samples), tolerated, bound)
        if enough(health):
            break
    return health


def judge_texts(prompts: Sequence[ProbePrompt], said: Sequence[GeneratedText], round: int = 0,
                usual: Sequence[float] = ()) -> list[ProbeSample]:
    """Judge each text by itself, then all of a round together: what is said to every prompt is an answer to none."""
    alone = [malformed(one.text, ended=one.ended, expected=prompt.expected, tokens=one.tokens) or _soup(one, usual)
             for prompt, one in zip(prompts, said, strict=True)]
    texts = {prompt.id: one.text for prompt, one in zip(prompts, said, strict=True) if not prompt.expected.short}
    same = same_everywhere(texts)
    return [ProbeSample(prompt, round, one, wrong or same.get(prompt.id)) for prompt, one, wrong in zip(prompts, said, alone, strict=True)]


def compare_health(child: Health, parent: Health) -> tuple[Effect, Verdict]:
    """The share of malformed texts, paired by prompt over the rounds that both have had."""
    rounds = min(max(sample.round for sample in health.samples) for health in (child, parent))
    new, old = (_by_prompt(health, rounds) for health in (child, parent))
    if new.keys() != old.keys():
        raise UsageError("the two were not asked the same prompts")
    effect = paired_effect([np.mean(new[id]) for id in old], [np.mean(old[id]) for id in old])
    words = f"malformed texts against {parent.name or 'the parent'}: {signed_estimate(effect.interval())} prompts, p = {effect.p:.2g}"
    evidence = {"change": effect.mean, "p": effect.p, "child": child.bad, "parent": parent.bad}
    if effect.p <= 1 - SEQUENTIAL_LEVEL and effect.mean > 0:
        return effect, refuted("health against parent", f"{words}: shown worse", **evidence)
    return effect, proven("health against parent", f"{words}: not shown worse", **evidence)


def first_malformed(names: Sequence[str], look: Callable[[str], Health], *, every: int = 8) -> Bisection[str]:
    """Find the first malformed checkpoint. Up to `every` checkpoints are all looked at; of more, the ends and then halves, taking what is
    bad to stay bad."""
    if not names:
        raise UsageError("there is no checkpoint to probe")
    return bisect_first_bad(names, lambda name: look(name).malformed, every=len(names) <= every)


def _by_prompt(health: Health, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sample in health.samples:
        if sample.round <= rounds:
            found.setdefault(sample.prompt.id, []).append(float(sample.wrong is not None))
    return found


def _soup(said: GeneratedText, usual: Sequence[float]) -> Malformed | None:
    return None if said.surprise is None else word_soup(said.surprise, usual)


_SECONDS = 120.0


class ModelGenerator:
    """A loaded artifact. A model without a chat template continues the prompt as text.

    So many rounds `ahead` are drawn together: a GPU takes as long for four as for one, and each text draws at its own address.
    """

    def __init__(self, loaded: LoadedModel, sampling: Sampling, *, ahead: int = 1):
        self.loaded, self.sampling, self.ahead = loaded, sampling, ahead
        self.raw = loaded.tokenizer.template is None
        self._drawn: dict[tuple[int, ProbePrompt], Completion] = {}

    def __call__(self, prompts: Sequence[ProbePrompt], round: int) -> list[GeneratedText]:
        """One sample of each; a round draws at an address of its own."""
        if any((round, prompt) not in self._drawn for prompt in prompts):
            self._draw(prompts, range(round, round + self.ahead))
        completions = [self._drawn[round, prompt] for prompt in prompts]
        return [GeneratedText(completion.text or "", completion.ended, completion.ids) for completion in completions]

    def _draw(self, prompts: Sequence[ProbePrompt], rounds: Sequence[int]) -> None:
        ids = {prompt: self._ids_of(prompt) for prompt in prompts}
        longest = max(map(len, ids.values()))
        room = self.loaded.model.config.max_length - longest
        if room < 1:
            raise UsageError(f"the longest prompt has {longest} tokens and the model's context is {longest + room}; give shorter --prompts")
        sampling = replace(self.sampling, max_new=min(self.sampling.max_new, room))
        asked = [GenerationRequest(ids[prompt], replace(sampling, seed=derive(self.sampling.seed, "probe", round)), (prompt.id,))
                 for round in rounds for prompt in prompts]
        of = [(round, prompt) for round in rounds for prompt in prompts]
        self._drawn = dict(zip(of, self.loaded.complete(asked), strict=True))

    def _ids_of(self, prompt: ProbePrompt) -> tuple[int, ...]:
        if not prompt.before:
            return self.loaded.ids_of(prompt.text, raw=self.raw)
        if self.raw:
            raise UsageError(f"prompt {prompt.id!r} is a conversation, and {self.loaded.artifact.path} has no chat template; give texts")
        tokenizer = self.loaded.tokenizer
        return tuple(tokenizer.encode(tokenizer.render(prompt.messages, add_generation_prompt=True)))

    def surprise(self, prompts: Sequence[ProbePrompt], said: Sequence[GeneratedText]) -> list[float]:
        """Nats per token of texts, whoever said them, after their prompts; 0 where nothing was said."""
        tokenizer, limit = self.loaded.tokenizer, self.loaded.model.config.max_length
        pairs = [(self._ids_of(prompt), tuple(tokenizer.encode(one.text)))
                 for prompt, one in zip(prompts, said, strict=True)]
        fitting = [(asked, text[: max(0, limit - len(asked))]) for asked, text in pairs]
        spoken = [i for i, (_, text) in enumerate(fitting) if text]
        values = [0.0] * len(said)
        for i, found in zip(spoken, completion_logprobs(self.loaded.model, [fitting[i] for i in spoken], PLAIN_SAMPLING), strict=True):
            values[i] = -float(found.double().mean())
        return values

    def reading(self, prompts: Sequence[ProbePrompt]) -> list[float]:
        """Nats per token of the prompts themselves, as texts, after the first token of each: what real words cost this model."""
        texts = [tuple(self.loaded.tokenizer.encode(prompt.text))[: self.loaded.model.config.max_length] for prompt in prompts]
        return [-float(found.double().mean()) for found in completion_logprobs(self.loaded.model, [(ids[:1], ids[1:]) for ids in texts],
                                                                               PLAIN_SAMPLING)]


@dataclass(frozen=True)
class EndpointGenerator:
    """POST …/chat/completions, as OpenAI's clients do. `key` names the environment variable that holds a key, where one is needed."""

    url: str
    model: str
    sampling: Sampling
    key: str | None = None

    def __call__(self, prompts: Sequence[ProbePrompt], round: int) -> list[GeneratedText]:
        return [self._said(prompt, derive(self.sampling.seed, "probe", round, prompt.id) % 2**31) for prompt in prompts]

    def _said(self, prompt: ProbePrompt, seed: int) -> GeneratedText:
        body = {"model": self.model, "messages": prompt.messages, "max_tokens": self.sampling.max_new,
                "temperature": self.sampling.temperature, "top_p": self.sampling.top_p, "seed": seed}
        answer = request_json(f"{self.url}/chat/completions", body, self.key)
        try:
            choice = answer["choices"][0]
            return GeneratedText(choice["message"]["content"] or "", choice["finish_reason"])
        except (KeyError, IndexError, TypeError):
            raise AssayError(f"{self.url}: the answer has no choices[0].message.content and finish_reason: {str(answer)[:200]}") from None


def open_endpoint(url: str, sampling: Sampling, *, model: str | None = None, key: str | None = None) -> EndpointGenerator:
    """Open an OpenAI-compatible endpoint for probing; without a name, the only model that it lists."""
    url = url.rstrip("/").removesuffix("/chat/completions")
    if model is None:
        listed = request_json(f"{url}/models", None, key)
        names = [one.get("id") for one in listed.get("data", [])] if isinstance(listed, dict) else []
        if len(names) != 1:
            raise UsageError(f"{url} lists {len(names)} models ({', '.join(map(str, names[:5]))}); name one with --model")
        model = str(names[0])
    return EndpointGenerator(url, model, sampling, key)


def request_json(url: str, body: dict[str, Any] | None, key: str | None) -> Any:
    """GET without a body, else POST; what goes wrong is a sentence, never an empty text."""
    import httpx

    if key is not None and key not in os.environ:
        raise UsageError(f"--key-env {key}: that environment variable is not set")
    headers = {"Authorization": f"Bearer {os.environ[key]}"} if key is not None else {}
    try:
        answer = httpx.request("GET" if body is None else "POST", url, json=body, headers=headers, timeout=_SECONDS)
        answer.raise_for_status()
        return answer.json()
    except httpx.HTTPStatusError as error:
        raise AssayError(f"{url} answered {error.response.status_code}: {error.response.text[:200]}") from None
    except (httpx.HTTPError, ValueError) as error:
        raise AssayError(f"{url}: {type(error).__name__}: {error}") from None

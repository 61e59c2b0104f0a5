"""Who is probed: an artifact through the loader and sampler that a consumer would use, or any OpenAI-compatible endpoint."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from assay.errors import AssayError, UsageError
from assay.generate.request import Sampling
from assay.measure.probe import Said
from assay.measure.probe_prompts import Prompt
from assay.seeds import derive

if TYPE_CHECKING:
    from assay.measure.examinee import OpenedModel

SECONDS = 120.0


class OfModel:
    """An opened artifact. A model without a chat template continues the prompt as text."""

    def __init__(self, opened: "OpenedModel", sampling: Sampling):
        self.opened, self.sampling = opened, sampling
        self.raw = opened.tokenizer.template is None

    def __call__(self, prompts: Sequence[Prompt], round: int) -> list[Said]:
        """One sample of each; a round draws at an address of its own."""
        longest = max(self.opened.length_of(prompt.text, raw=self.raw) for prompt in prompts)
        room = self.opened.model.config.max_length - longest
        if room < 1:
            raise UsageError(f"the longest prompt has {longest} tokens and the model's context is {longest + room}; give shorter --prompts")
        sampling = replace(self.sampling, seed=derive(self.sampling.seed, "probe", round), max_new=min(self.sampling.max_new, room))
        found = self.opened.generate_until({prompt.id: prompt.text for prompt in prompts}, sampling, k=1, stop=(), raw=self.raw)
        completions = [found[prompt.id][0] for prompt in prompts]
        return [Said(completion.text or "", completion.ended, completion.ids) for completion in completions]

    def surprise(self, prompts: Sequence[Prompt], said: Sequence[Said]) -> list[float]:
        """Nats per token of texts, whoever said them, after their prompts; 0 where nothing was said."""
        from assay.generate.policy import logprobs_of
        from assay.measure.examinee import PLAIN, prompt_ids

        tokenizer, limit = self.opened.tokenizer, self.opened.model.config.max_length
        pairs = [(prompt_ids(tokenizer, prompt.text, raw=self.raw), tuple(tokenizer.encode(one.text)))
                 for prompt, one in zip(prompts, said, strict=True)]
        fitting = [(asked, text[: limit - len(asked)]) for asked, text in pairs]
        spoken = [i for i, (_, text) in enumerate(fitting) if text]
        values = [0.0] * len(said)
        for i, found in zip(spoken, logprobs_of(self.opened.model, [fitting[i] for i in spoken], PLAIN), strict=True):
            values[i] = -float(found.double().mean())
        return values

    def reading(self, prompts: Sequence[Prompt]) -> list[float]:
        """Nats per token of the prompts themselves, as texts, after the first token of each: what real words cost this model."""
        from assay.generate.policy import logprobs_of
        from assay.measure.examinee import PLAIN

        texts = [tuple(self.opened.tokenizer.encode(prompt.text))[: self.opened.model.config.max_length] for prompt in prompts]
        return [-float(found.double().mean()) for found in logprobs_of(self.opened.model, [(ids[:1], ids[1:]) for ids in texts], PLAIN)]


@dataclass(frozen=True)
class OfEndpoint:
    """POST …/chat/completions, as OpenAI's clients do. `key` names the environment variable that holds a key, where one is needed."""

    url: str
    model: str
    sampling: Sampling
    key: str | None = None

    def __call__(self, prompts: Sequence[Prompt], round: int) -> list[Said]:
        return [self._said(prompt, derive(self.sampling.seed, "probe", round, prompt.id) % 2**31) for prompt in prompts]

    def _said(self, prompt: Prompt, seed: int) -> Said:
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt.text}], "max_tokens": self.sampling.max_new,
                "temperature": self.sampling.temperature, "top_p": self.sampling.top_p, "seed": seed}
        answer = asked(f"{self.url}/chat/completions", body, self.key)
        try:
            choice = answer["choices"][0]
            return Said(choice["message"]["content"] or "", choice["finish_reason"])
        except (KeyError, IndexError, TypeError):
            raise AssayError(f"{self.url}: the answer has no choices[0].message.content and finish_reason: {str(answer)[:200]}") from None


def endpoint(url: str, sampling: Sampling, *, model: str | None = None, key: str | None = None) -> OfEndpoint:
    """Without a name, the only model that the endpoint lists."""
    url = url.rstrip("/").removesuffix("/chat/completions")
    if model is None:
        listed = asked(f"{url}/models", None, key)
        names = [one.get("id") for one in listed.get("data", [])] if isinstance(listed, dict) else []
        if len(names) != 1:
            raise UsageError(f"{url} lists {len(names)} models ({', '.join(map(str, names[:5]))}); name one with --model")
        model = str(names[0])
    return OfEndpoint(url, model, sampling, key)


def asked(url: str, body: dict[str, Any] | None, key: str | None) -> Any:
    """GET without a body, else POST; what goes wrong is a sentence, never an empty text."""
    import httpx

    if key is not None and key not in os.environ:
        raise UsageError(f"--key-env {key}: that environment variable is not set")
    headers = {"Authorization": f"Bearer {os.environ[key]}"} if key is not None else {}
    try:
        answer = httpx.request("GET" if body is None else "POST", url, json=body, headers=headers, timeout=SECONDS)
        answer.raise_for_status()
        return answer.json()
    except httpx.HTTPStatusError as error:
        raise AssayError(f"{url} answered {error.response.status_code}: {error.response.text[:200]}") from None
    except (httpx.HTTPError, ValueError) as error:
        raise AssayError(f"{url}: {type(error).__name__}: {error}") from None

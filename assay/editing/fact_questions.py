"""Questions about a fact, and what a model answers: by likelihood, and free-running.

A teacher-forced share of right tokens is not among the answers: it is high before any edit, since most tokens of a target
follow from its first ones. Free-running means greedy generation from the prompt alone, compared as text.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from assay.editing.block_hooks import padded
from assay.editing.facts import Fact
from assay.editing.subject_tokens import answer_ids, encode_prompt
from assay.generate.engine import generate
from assay.generate.generation_request import GenerationRequest, Sampling
from assay.generate.policy_logprobs import completion_logprobs
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer

QuestionKind = Literal["efficacy", "paraphrase", "neighbourhood", "portability"]
_ROWS = {"cpu": 32}  # in one batch; elsewhere MANY
_MANY = 256
BEYOND = 3  # tokens generated past the answer's, so that its end shows
FLUENT_TOKENS = 48
PLAIN = Sampling()  # the model's own distribution


@dataclass(frozen=True)
class FactQuestion:
    """`answer` is what counts as right, `other` what it competes with; None: nothing is known to be."""

    kind: QuestionKind
    fact: str
    prompt: str
    answer: str | None
    other: str | None


@dataclass(frozen=True)
class FactReply:
    """Mean surprise per token (nats) of both answers, the first words that the model says by itself, and the answer's rank."""

    question: FactQuestion
    answer_nll: float | None
    other_nll: float | None
    said: str
    rank: int | None = None  # of the answer's first token among all that could follow; 1: the likeliest

    @property
    def prefers(self) -> bool | None:
        """The answer is likelier than the other, per token; None where one of them is not known."""
        if self.answer_nll is None or self.other_nll is None:
            return None
        return self.answer_nll < self.other_nll

    @property
    def says(self) -> bool | None:
        """Whether the generated text begins with the answer, whole."""
        return None if self.question.answer is None else begins_with(self.said, self.question.answer)

    @property
    def says_other(self) -> bool | None:
        """Whether the generated text begins with the other answer: before an edit, of its own questions, the old one."""
        return None if self.question.other is None else begins_with(self.said, self.question.other)


def begins_with(said: str, answer: str) -> bool:
    """Whether `said` begins with the answer, after spaces, and not as the beginning of a longer word."""
    said = said.lstrip()
    return said.startswith(answer) and not (answer[-1:].isalnum() and said[len(answer) :][:1].isalnum())


def fact_questions(facts: Sequence[Fact]) -> list[FactQuestion]:
    """Questions that the facts bring along, in their order."""
    asked: list[FactQuestion] = []
    for fact in facts:
        asked += [FactQuestion("efficacy", fact.name, fact.prompt, fact.target, fact.old)]
        asked += [FactQuestion("paraphrase", fact.name, prompt, fact.target, fact.old) for prompt in fact.paraphrases]
        asked += [FactQuestion("neighbourhood", fact.name, near.prompt, near.answer, fact.target) for near in fact.neighbourhood]
        asked += [FactQuestion("portability", fact.name, far.prompt, far.answer, None) for far in fact.portability]
    return asked


def ask_questions(model: Transformer, tokenizer: Tokenizer, asked: Sequence[FactQuestion], stop_ids: Collection[int]) -> list[FactReply]:
    answers = answer_surprises(model, tokenizer, [(q.prompt, q.answer) for q in asked])
    others = answer_surprises(model, tokenizer, [(q.prompt, q.other) for q in asked])
    lengths = [len(answer_ids(tokenizer, q.answer or q.other or "x")) for q in asked]
    said = greedy_texts(model, tokenizer, [q.prompt for q in asked], max(lengths, default=1) + BEYOND, stop_ids)
    ranks = first_ranks(model, tokenizer, [(q.prompt, q.answer) for q in asked])
    return [FactReply(*parts) for parts in zip(asked, answers, others, said, ranks, strict=True)]


@torch.no_grad()
def first_ranks(model: Transformer, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str | None]]) -> list[int | None]:
    """The place of each answer's first token among all that could follow its prompt; None where there is no answer."""
    asked = [(i, encode_prompt(tokenizer, prompt), answer_ids(tokenizer, answer)[0]) for i, (prompt, answer) in enumerate(pairs) if answer]
    asked.sort(key=lambda one: len(one[1]))  # like lengths together: little padding
    found: dict[int, int] = {}
    for start in range(0, len(asked), _at_once(model)):
        numbers, prompts, tokens = zip(*asked[start : start + _at_once(model)], strict=True)
        ids, documents = padded(prompts, model.embed.weight.device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=ids.device)
        logits = model.logits(model.hidden(ids, documents=documents)[torch.arange(len(prompts), device=ids.device), last]).float()
        due = torch.tensor(tokens, device=ids.device)
        found |= zip(numbers, ((logits > logits.gather(-1, due[:, None])).sum(-1) + 1).tolist(), strict=True)
    return [found.get(i) for i in range(len(pairs))]


def answer_surprises(model: Transformer, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str | None]]) -> list[float | None]:
    """Mean −log p per token of each answer after its prompt; None where there is no answer."""
    asked = {i: (encode_prompt(tokenizer, prompt), answer_ids(tokenizer, answer)) for i, (prompt, answer) in enumerate(pairs) if answer}
    found = dict(zip(asked, completion_logprobs(model, list(asked.values()), PLAIN), strict=True))
    return [-float(found[i].mean()) if i in found else None for i in range(len(pairs))]


def greedy_texts(model: Transformer, tokenizer: Tokenizer, prompts: Sequence[str], new: int, stop_ids: Collection[int]) -> list[str]:
    """Greedy text after each prompt."""
    return [tokenizer.decode(ids, special=False) for ids in greedy_ids(model, tokenizer, prompts, new, stop_ids)]


def greedy_ids(model: Transformer, tokenizer: Tokenizer, prompts: Sequence[str], new: int,
               stop_ids: Collection[int]) -> list[tuple[int, ...]]:
    """Greedy, by one engine for all prompts: those of like length stand beside each other."""
    ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    order, greedily = sorted(range(len(ids)), key=lambda i: len(ids[i])), Sampling(max_new=new, temperature=0)
    completions = generate(model, [GenerationRequest(ids[i], greedily) for i in order], stop_ids=stop_ids, version="",
                           slots=min(len(ids), _at_once(model)))
    found = {i: completion.ids for i, completion in zip(order, completions, strict=True)}
    return [found[i] for i in range(len(ids))]


def fluency(model: Transformer, tokenizer: Tokenizer, prompts: Sequence[str], stop_ids: Collection[int]) -> list[float]:
    """The n-gram entropy (bits) of what each prompt goes on to; text that repeats itself has little."""
    return [ngram_entropy(ids) for ids in greedy_ids(model, tokenizer, prompts, FLUENT_TOKENS, stop_ids)]


def ngram_entropy(ids: Sequence[int]) -> float:
    """A third of the entropy of pairs and two thirds of that of triples, as ROME's authors weigh them."""
    return (_entropy(ids, 2) + 2 * _entropy(ids, 3)) / 3


def _entropy(ids: Sequence[int], n: int) -> float:
    counts = Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
    total = sum(counts.values())
    return -sum(count / total * math.log2(count / total) for count in counts.values()) if total else 0.0


def _at_once(model: Transformer) -> int:
    return _ROWS.get(model.embed.weight.device.type, _MANY)

"""Subject tokens: a subject's place in a prompt, found by the encoding's offsets and checked by decoding.

The incident: in 27 of 50 edits the subject was not found as spelled, another position was edited in silence, and the
score was believed. Here a span that does not decode to its subject is refused, with a sentence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from assay.editing.facts import Fact, RefusedFact, with_leading_space
from assay.errors import DataError
from assay.model.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class SubjectSpan:
    """A text as ids, and where its subject lies in them; both ends belong to it."""

    ids: tuple[int, ...]
    first: int
    last: int


def locate_subject(tokenizer: Tokenizer, text: str, start: int, subject: str, name: str) -> SubjectSpan:
    """The tokens of `text[start:start + len(subject)]`. Refused where they hold anything beyond it but leading spaces."""
    ids, offsets = tokenizer.offsets(text)
    stop = start + len(subject)
    held = [i for i, (begin, end) in enumerate(offsets) if begin < stop and end > start]
    if not held:
        raise DataError(f"{name}: no token of {text!r} holds the subject {subject!r}")
    first, last = held[0], held[-1]
    require_span(tokenizer, ids[first : last + 1], subject, name)
    lead = leading_special_ids(tokenizer)
    return SubjectSpan((*lead, *ids), len(lead) + first, len(lead) + last)


def require_span(tokenizer: Tokenizer, span: Sequence[int], subject: str, name: str) -> None:
    """The law of the span: decoded, without leading spaces, it is the subject."""
    decoded = tokenizer.decode(span).lstrip()
    if decoded != subject:
        raise DataError(f"{name}: the tokens at the subject's place decode to {decoded!r}, not to {subject!r}; "
                        "a token reaches across the subject's end, or the tokenizer changes the text: spell prompt and subject otherwise")


def answer_ids(tokenizer: Tokenizer, answer: str) -> tuple[int, ...]:
    """Token ids that must be generated after a prompt, first space included."""
    ids = tokenizer.encode(with_leading_space(answer))
    if (decoded := tokenizer.decode(ids)).strip() != answer:
        raise DataError(f"the answer {answer!r} decodes to {decoded!r}: this tokenizer cannot say it")
    return tuple(ids)


def encode_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return (*leading_special_ids(tokenizer), *tokenizer.encode(text))


def leading_special_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens that this tokenizer puts before every text (BOS)."""
    plain, dressed = tokenizer.encode("a"), tokenizer.encode("a", special=True)
    at = next(i for i in range(len(dressed)) if dressed[i : i + len(plain)] == plain)
    return tuple(dressed[:at])


def placeable_facts(tokenizer: Tokenizer, facts: Sequence[Fact]) -> tuple[list[Fact], list[RefusedFact]]:
    """The facts whose subject this tokenizer can place and whose answers it can say, and the others by name."""
    def place(fact: Fact) -> None:
        for prompt, start in ((fact.prompt, fact.start), *((said.prompt, said.start) for said in fact.rephrasings)):
            locate_subject(tokenizer, prompt, start, fact.subject, fact.name)
        for answer in (fact.target, fact.old, *(asked.answer for asked in (*fact.neighbourhood, *fact.portability))):
            if answer is not None:
                answer_ids(tokenizer, answer)

    return sifted(facts, place)


def sifted(facts: Sequence[Fact], check: Callable[[Fact], object]) -> tuple[list[Fact], list[RefusedFact]]:
    """Facts that pass a check, in order, and those that raise a DataError, with its sentence."""
    kept: list[Fact] = []
    refused: list[RefusedFact] = []
    for fact in facts:
        try:
            check(fact)
            kept.append(fact)
        except DataError as error:
            refused.append(RefusedFact(fact.name, str(error)))
    return kept, refused

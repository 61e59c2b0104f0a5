"""Rephrasings of facts: other wordings of a fact's question for the search of its target, never those in which it is evaluated.

A wording is a prompt with {} in the subject's place. Prompts of one file share wordings, and two wordings are of one relation where the
file asks one fact in both and the answers of both are of one kind. CounterFact's "rephrase" prompts are mostly other questions about the
subject ("… is known for"); a paraphrase counts as one only where the file asks that relation in its wording.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from assay.editing.facts import Fact, Rephrasing
from assay.editing.subject_tokens import locate_subject
from assay.errors import DataError
from assay.model.tokenizer import Tokenizer
from assay.seeds import generator
from assay.verdict import Verdict, proven, refuted

SUBJECT = "{}"


@dataclass(frozen=True)
class Wordings:
    """The wordings of a file's prompts: the relation that each asks for, and the answers that it is given."""

    relations: Mapping[str, str]
    answers: Mapping[str, frozenset[str]]

    def paraphrased(self, fact: Fact, prompt: str) -> str | None:
        """The wording in which this prompt asks for the fact's relation; None where no prompt of the file asks for it so."""
        template = template_of(prompt, fact.subject)
        found = [wording for wording in self.answers if template is not None and asks_in(template, wording)]
        if not found:
            return None
        longest = max(found, key=len)
        return longest if {fact.target, fact.old} & self.answers[longest] else None

    def relation(self, fact: Fact) -> str:
        return fact.relation or self.relations.get(wording_of(fact), wording_of(fact))


def read_wordings(facts: Sequence[Fact]) -> Wordings:
    """Wordings of the relations. Two are one relation where a fact's prompt has the one and its paraphrase the other. Each is named by its
    commonest."""
    answers, counts = defaultdict[str, set[str]](set), defaultdict[str, int](int)
    for fact in facts:
        answers[wording_of(fact)] |= {answer for answer in (fact.target, fact.old) if answer}
        counts[wording_of(fact)] += 1
    known = Wordings({}, {wording: frozenset(said) for wording, said in answers.items()})
    joined = {wording: wording for wording in answers}

    def first(wording: str) -> str:
        while joined[wording] != wording:
            wording = joined[wording]
        return wording

    for fact in facts:
        for prompt in fact.paraphrases:
            if (other := known.paraphrased(fact, prompt)) is not None:
                ends = sorted((first(wording_of(fact)), first(other)), key=lambda wording: -counts[wording])
                joined[ends[1]] = ends[0]
    return replace(known, relations={wording: first(wording) for wording in answers})


def wording_of(fact: Fact) -> str:
    return fact.prompt[: fact.start] + SUBJECT + fact.prompt[fact.start + len(fact.subject) :]


def template_of(prompt: str, subject: str) -> str | None:
    """The prompt with {} for the subject's last occurrence; None where it does not name the subject."""
    at = prompt.rfind(subject)
    return None if at < 0 else prompt[:at].lstrip() + SUBJECT + prompt[at + len(subject) :].rstrip()


def asks_in(template: str, wording: str) -> bool:
    """The template is the wording, or ends with it after another sentence; case does not count."""
    template, wording = template.casefold(), wording.casefold()
    before = template.removesuffix(wording).rstrip()
    return template.endswith(wording) and not before[-1:].isalnum()


def with_rephrasings(facts: Sequence[Fact], wordings: Wordings, tokenizer: Tokenizer, count: int, seed: int) -> list[Fact]:
    """Each fact with its own rephrasings and at most `count` other wordings of its relation, drawn at the seed's address; none in which
    any of them is evaluated."""
    evaluated = evaluated_templates(facts)
    free = [wording for wording in wordings.answers if not any(asks_in(template, wording) for template in evaluated)]
    found = []
    for fact in facts:
        fitting = [wording for wording in free if wording != wording_of(fact) and {fact.target, fact.old} & wordings.answers[wording]
                   and wordings.relations[wording] == wordings.relations.get(wording_of(fact))]
        order = torch.randperm(len(fitting), generator=generator(seed, "rephrasings", fact.name)).tolist()
        placed = [said for i in order if (said := placed_rephrasing(tokenizer, fact, fitting[i])) is not None]
        found.append(replace(fact, rephrasings=(*fact.rephrasings, *placed[:count])))
    return found


def evaluated_templates(facts: Sequence[Fact]) -> list[str]:
    return [template for fact in facts for prompt in fact.paraphrases if (template := template_of(prompt, fact.subject)) is not None]


def placed_rephrasing(tokenizer: Tokenizer, fact: Fact, wording: str) -> Rephrasing | None:
    """Fact in another wording; None where this tokenizer cannot place the subject in it."""
    said = Rephrasing(wording.replace(SUBJECT, fact.subject), wording.index(SUBJECT))
    try:
        locate_subject(tokenizer, said.prompt, said.start, fact.subject, fact.name)
    except DataError:
        return None
    return said


def check_rephrasings(facts: Sequence[Fact]) -> Verdict:
    """Check that no fact is sought in a wording in which it is evaluated: such a score would say that the search fits, not that the fact
    holds."""
    seen = [f"{fact.name}: {said.prompt!r} is sought and evaluated" for fact in facts for said in fact.rephrasings
            if any(_same_question(fact, said, prompt) for prompt in fact.paraphrases)]
    count = sum(len(fact.rephrasings) for fact in facts)
    if seen:
        words = f"{len(seen)} of {count} rephrasings are among the paraphrases that judge the edits: {seen[0]}"
        return refuted("rephrasings", f"{words}; give other wordings to the search, or other paraphrases to the evaluation", wrong=seen)
    asked = sum(bool(fact.rephrasings) for fact in facts)
    return proven("rephrasings", f"{asked} of {len(facts)} facts are sought in {count} other wordings; none of these is evaluated")


def _same_question(fact: Fact, said: Rephrasing, prompt: str) -> bool:
    template = template_of(prompt, fact.subject)
    sought = said.prompt[: said.start] + SUBJECT + said.prompt[said.start + len(fact.subject) :]
    return template is not None and asks_in(template, sought)

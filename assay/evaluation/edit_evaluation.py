"""Evaluation of edits on the model that was read back from the disk, beside the model before: estimates and verdicts.

Every edit is asked again at the end, together with its paraphrases and neighbours; what was true before is the control.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import expm1
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.editing import fact_questions as q
from assay.editing.fact_questions import FactReply, QuestionKind
from assay.editing.facts import Fact, RefusedFact
from assay.editing.memit import EditResult
from assay.editing.moments import TokenizedText
from assay.editing.rephrasings import wording_of
from assay.generate.policy_logprobs import completion_logprobs
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.statistics.estimate import Estimate, clustered_rate, mean, paired, proportion, ratio
from assay.verdict import Verdict, proven, refuted, unproven

ALREADY = 0.1  # more of the targets than this said before any edit: the score measures something else
LOCALITY_LOSS = 0.1  # a shown fall of the neighbours' right answers beyond this is harm
LARGEST_UPDATE = 0.5  # ‖ΔW‖ / ‖W‖ of one matrix; 50 healthy edits of SmolLM2-135M reach 0.24
SOLVED = 1e-4  # how far a rank-one edit's key may be from its value, relative


@dataclass(frozen=True)
class EditGoals:
    efficacy: float = 0.95
    generated: float = 0.8
    drift: float = 0.02


@dataclass(frozen=True)
class EditedReplies:
    """One model's replies, the entropy of its texts, and its surprise (nats) and tokens per row of text."""

    replies: list[FactReply]
    fluency: list[float]
    text_nll: NDArray[np.float64]
    text_tokens: NDArray[np.float64]

    def of(self, kind: QuestionKind) -> list[FactReply]:
        return [reply for reply in self.replies if reply.question.kind == kind]


def evaluate_edits(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], reading: TokenizedText,
                   stop_ids: Collection[int]) -> EditedReplies:
    replies = q.ask_questions(model, tokenizer, q.fact_questions(facts), stop_ids)
    entropy = q.fluency(model, tokenizer, [fact.prompt for fact in facts], stop_ids)
    return EditedReplies(replies, entropy, *text_surprise(model, reading))


def text_surprise(model: Transformer, reading: TokenizedText) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Summed −log p per row of text, and over how many tokens."""
    rows = [row for row in reading.rows if len(row) > 1]
    found = completion_logprobs(model, [(row[:1], row[1:]) for row in rows], q.PLAIN)
    return np.array([-float(row.double().sum()) for row in found]), np.array([len(row) for row in found], dtype=np.float64)

# ---------------------------------------------------------------- estimates


def edit_estimates(before: EditedReplies, after: EditedReplies) -> dict[str, Estimate]:
    """Each score before and after; the unit is the fact. A score that nothing was asked for is not there."""
    found: dict[str, Estimate] = {}
    for when, examined in (("before", before), ("after", after)):
        for kind in ("efficacy", "paraphrase", "neighbourhood", "portability"):
            for way in ("prefers", "says"):
                if (estimate := reply_rate(examined.of(kind), way)) is not None:
                    found[f"{kind}, {'likelier' if way == 'prefers' else 'generated'}, {when}"] = estimate
            if kind in ("efficacy", "paraphrase") and (ranks := reciprocal_ranks(examined.of(kind))) is not None:
                found[f"{kind}, reciprocal rank, {when}"] = ranks
    found |= answered_paraphrases(before, after)
    if (kept := unmoved(before, after)) is not None:
        found["neighbourhood, says the same as before"] = kept
    if len(before.fluency) > 1:
        found |= {"fluency (bits), before": mean(before.fluency), "fluency (bits), after": mean(after.fluency)}
    found["perplexity drift"] = perplexity_drift(before, after)
    return found


def reply_rate(replies: Sequence[FactReply], way: str) -> Estimate | None:
    """Rate of replies that pass; paraphrases and neighbours of one fact count as one cluster."""
    known = [(bool(value), reply.question.fact) for reply in replies
             if (value := reply.prefers if way == "prefers" else reply.says) is not None]
    if not known:
        return None
    values, facts = zip(*known, strict=True)
    return _rate(values, facts)


def reciprocal_ranks(replies: Sequence[FactReply]) -> Estimate | None:
    """1 where the answer's first token is the likeliest of all, a half where it is the second; the unit is the fact."""
    known = [(1 / reply.rank, reply.question.fact) for reply in replies if reply.rank is not None]
    if len({fact for _, fact in known}) < 2:
        return None
    values, facts = zip(*known, strict=True)
    return clustered_rate(values, facts)


def answered_paraphrases(before: EditedReplies, after: EditedReplies) -> dict[str, Estimate]:
    """How often the unedited model gives the old answer to a paraphrase: one that asks something else gets no new answer either. And how
    often the new one follows those to which it gave the old."""
    pairs = [(was, now) for was, now in zip(before.of("paraphrase"), after.of("paraphrase"), strict=True) if was.says_other is not None]
    if not pairs:
        return {}
    found = {"paraphrase, old answer generated, before": _rate([bool(was.says_other) for was, _ in pairs], [was.question.fact
                                                                                                         for was, _ in pairs])}
    if answered := [now for was, now in pairs if was.says_other]:
        found["paraphrase, generated, after, where the old answer was"] = _rate([bool(now.says) for now in answered],
                                                                                [now.question.fact for now in answered])
    return found


def relation_rates(facts: Sequence[Fact], after: EditedReplies) -> dict[str, dict[str, float | int | None]]:
    """relation → its facts, how many of their targets are said as asked and in other words, and the median rank of these targets. Where a
    row names no relation, its prompt's wording stands for it."""
    relations = {fact.name: fact.relation or wording_of(fact) for fact in facts}
    found: dict[str, dict[str, float | int | None]] = {}
    for relation in dict.fromkeys(relations.values()):
        row: dict[str, float | int | None] = {"facts": sum(relations[fact.name] == relation for fact in facts)}
        for kind in ("efficacy", "paraphrase"):
            replies = [reply for reply in after.of(kind) if relations[reply.question.fact] == relation]
            ranks = [reply.rank for reply in replies if reply.rank is not None]
            row[f"{kind}, generated"] = sum(bool(reply.says) for reply in replies) / len(replies) if replies else None
            row[f"{kind}, median rank"] = float(np.median(ranks)) if ranks else None
        found[relation] = row
    return found


def _rate(values: Sequence[bool], facts: Sequence[str]) -> Estimate:
    if len(set(facts)) == 1:  # all of one fact: nothing to cluster
        return proportion(sum(values), len(values))
    return clustered_rate([float(value) for value in values], facts)


def unmoved(before: EditedReplies, after: EditedReplies) -> Estimate | None:
    """Neighbours of which the model goes on as it did before: the first words, right or wrong."""
    pairs = list(zip(before.of("neighbourhood"), after.of("neighbourhood"), strict=True))
    return _rate([a.said == b.said for a, b in pairs], [a.question.fact for a, _ in pairs]) if pairs else None


def perplexity_drift(before: EditedReplies, after: EditedReplies) -> Estimate:
    """How much larger the perplexity of text has become, as a share; the unit is a row of text."""
    change = ratio(after.text_nll - before.text_nll, before.text_tokens)
    return Estimate(expm1(change.mean), expm1(change.low), expm1(change.high), change.n, change.level)


def update_sizes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """‖ΔW‖ / ‖W‖ of every tensor that changed."""
    return {name: float((after[name].detach().double() - tensor.double()).norm() / tensor.double().norm())
            for name, tensor in before.items() if not torch.equal(tensor, after[name])}

# ---------------------------------------------------------------- verdicts


def check_edits(before: EditedReplies, after: EditedReplies, goals: EditGoals) -> list[Verdict]:
    found = edit_estimates(before, after)
    verdicts = [check_control(before.of("efficacy"))]
    for name, way, goal in (("efficacy", "likelier", goals.efficacy), ("generated", "generated", goals.generated)):
        key = f"efficacy, {way}, after"
        verdicts.append(at_least(name, found[key], goal) if key in found
                        else unproven(name, "no fact says what was true before, so likelihood has nothing to compare; give `old`"))
    return [*verdicts, check_locality(before, after), check_perplexity(found["perplexity drift"], goals.drift)]


def at_least(name: str, found: Estimate, goal: float) -> Verdict:
    """PROVEN where the share is there: these are all the facts that were asked for, not a sample of them. REFUTED where even the
    interval's end is not, and UNPROVEN between."""
    words = f"{found}, goal {goal:g}"
    if found.mean >= goal:
        return proven(name, words, **asdict(found))
    return refuted(name, words, **asdict(found)) if found.high < goal else unproven(name, f"{words}: not shown", **asdict(found))


def check_control(before: Sequence[FactReply]) -> Verdict:
    """The score of the unedited model: what is high there is no success of the edit."""
    said = proportion(sum(bool(reply.says) for reply in before), len(before))
    already = [reply.question.fact for reply in before if reply.says]
    words = f"the unedited model says {said} of the targets"
    if said.low > ALREADY:
        return refuted("control", f"{words}: these were no edits, or the score counts what it should not", facts=already)
    return proven("control", words, facts=already)


def check_locality(before: EditedReplies, after: EditedReplies) -> Verdict:
    """The unit is the fact: how many of its neighbours keep their right answer as the likelier one."""
    was, now = kept_shares(before.of("neighbourhood")), kept_shares(after.of("neighbourhood"))
    if len(was) < 2:
        return unproven("locality", "fewer than two facts have neighbours with a known answer, so whether others moved is not known; "
                                    "give neighbourhood prompts")
    change = paired(list(now.values()), list(was.values()), (list(now), list(was)))
    words = (f"the neighbours' right answers are the likelier ones in {np.mean(list(now.values())):.3f}, change {change}; "
             f"of all neighbours {unmoved(before, after)} go on in the same words")
    if change.high < -LOCALITY_LOSS:
        return refuted("locality", words, **asdict(change))
    if change.mean < -LOCALITY_LOSS:
        return unproven("locality", f"{words}: a fall beyond {LOCALITY_LOSS:g}, neither shown nor excluded; give more facts",
                        **asdict(change))
    return proven("locality", words, **asdict(change))


def kept_shares(replies: Sequence[FactReply]) -> dict[str, float]:
    """fact → the share of its neighbours whose right answer is likelier than the new target."""
    shares: dict[str, list[bool]] = {}
    for reply in replies:
        if reply.prefers is not None:
            shares.setdefault(reply.question.fact, []).append(reply.prefers)
    return {fact: sum(values) / len(values) for fact, values in shares.items()}


def check_perplexity(found: Estimate, goal: float) -> Verdict:
    """PROVEN where the whole interval is within the goal: the text is a sample of all texts."""
    words = f"perplexity of text changed by {found.mean:+.2%} [{found.low:+.2%}, {found.high:+.2%}] (n={found.n}), goal {goal:.0%} at most"
    if found.high <= goal:
        return proven("perplexity", words, **asdict(found))
    if found.low > goal:
        return refuted("perplexity", words, **asdict(found))
    return unproven("perplexity", f"{words}: not shown; raise --drift-tokens", **asdict(found))


def check_update(sizes: Mapping[str, float], reached: Sequence[float] | None = None, largest_update: float = LARGEST_UPDATE) -> Verdict:
    """Check that no matrix is moved by a large part of itself; a rank-one edit maps its key to its value (`reached` is 1)."""
    if not sizes:
        return refuted("update", "no tensor changed: nothing was edited")
    largest = max(sizes, key=lambda name: sizes[name])
    words = f"{len(sizes)} matrices moved, at most by {sizes[largest]:.2%} of themselves ({largest})"
    evidence: dict[str, Any] = {"sizes": dict(sizes)}
    if reached and (worst := max(abs(1 - value) for value in reached)) > SOLVED:
        return refuted("update", f"{words}; a key arrives {worst:.2%} away from its value, bound {SOLVED:.2%}: the solve and its "
                                 "denominator do not use the same key", **evidence)
    if not sizes[largest] <= largest_update:
        return refuted("update", f"{words}, bound {largest_update:.0%}: such an edit destroys what the matrix did before", **evidence)
    return proven("update", words, **evidence)


def check_subjects(served: int, refused: Sequence[RefusedFact]) -> Verdict:
    if refused:
        words = f"{len(refused)} of {served + len(refused)} requests were refused by name"
        return unproven("subjects", f"{words}; the first: {refused[0].reason}", refused=[asdict(one) for one in refused])
    return proven("subjects", f"all {served} subjects were found as spelled, and their tokens decode to them")


def check_retest(claimed: Sequence[FactReply], found: Sequence[FactReply]) -> Verdict:
    """Check that what was claimed of an edit, whenever it was measured, is true of the final model as read back from the disk."""
    final = {reply.question.fact: reply for reply in found if reply.question.kind == "efficacy"}
    lost = [reply.question.fact for reply in claimed if reply.says and not final[reply.question.fact].says]
    words = f"of {sum(bool(reply.says) for reply in claimed)} edits that were said to hold, {len(lost)} do not hold in the final model"
    if lost:
        return refuted("retest", f"{words} ({', '.join(lost[:3])}): undone by later edits, or measured on another model", facts=lost)
    return proven("retest", words)


# ---------------------------------------------------------------- failures


def edit_failures(facts: Sequence[Fact], edited: EditResult, after: EditedReplies) -> list[dict[str, str]]:
    """Every edit that the final model does not say, with the reason that the evidence gives."""
    said = {reply.question.fact: reply for reply in after.of("efficacy")}
    return [{"fact": fact.name, "said": said[fact.name].said, "reason": _reason(fact, number, facts, edited, said[fact.name])}
            for number, fact in enumerate(facts) if not said[fact.name].says]


def _reason(fact: Fact, number: int, facts: Sequence[Fact], edited: EditResult, reply: FactReply) -> str:
    rivals = [other.name for other in facts if other.subject == fact.subject and other.name != fact.name
              and q.begins_with(reply.said, other.target)]
    if rivals:
        return f"overwritten: the model says the target of {rivals[0]}, which has the same subject"
    target, reached = edited.targets[number], edited.reached[number]
    if target.probability < 0.5:
        clamp = ", with δ at its longest" if target.clamped else ""
        return f"never reached in the search: probability {target.probability:.2f} after {target.steps} steps{clamp}"
    if reached < 0.5:
        return f"lost in the solve: the state went {reached:.0%} of its way, the other edits and the text's moments hold it back"
    if reply.prefers:
        return "the target is likelier than the old answer, but something else is likelier still"
    return f"the state went {reached:.0%} of its way and the old answer is still the likelier one"

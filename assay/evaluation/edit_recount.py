"""Recount of an edit's evaluation: replies asked again one by one by plain forward passes, and every score counted again from them.

It shares the model and the tokenizer with what it checks, and nothing else: no batches, no cache, no engine, no `statistics/`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from assay.editing.fact_questions import FLUENT_TOKENS, FactReply
from assay.editing.facts import Fact, with_leading_space
from assay.editing.moments import TokenizedText
from assay.evaluation.edit_evaluation import EditedReplies
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.statistics.estimate import Estimate
from assay.verdict import Verdict, proven, refuted

REPLIES_AGAIN = 6  # replies, spread over all
ROWS_AGAIN = 2  # of text
SAME_NATS = 2e-3  # a token: what fp32 differs by when other rows stand beside one, as the preflight allows
CLOSE_CALL = 1e-3  # between the two likeliest tokens, below which greedy may take either
SAME_MEAN = 1e-9
HALF = "\ufffd"  # stands for a character of which not all tokens are there yet


@torch.no_grad()
def check_replies(model: Transformer, tokenizer: Tokenizer, found: EditedReplies, reading: TokenizedText, stop_ids: Collection[int],
                  when: str) -> Verdict:
    """A few replies and rows of text, each alone in a forward pass of its own."""
    step = max(1, len(found.replies) // REPLIES_AGAIN)
    some = found.replies[::step]
    wrong = [words for reply in some for words in _unlike_reply(model, tokenizer, reply, stop_ids)]
    rows = [row for row in reading.rows if len(row) > 1]
    for number, row in enumerate(rows[:ROWS_AGAIN]):
        nats = -sum(_logprobs(model, row[:1], row[1:]))
        if abs(nats - found.text_nll[number]) > SAME_NATS * len(row) or found.text_tokens[number] != len(row) - 1:
            wrong.append(f"row {number} of the text costs {nats:.4f} nats in {len(row) - 1} tokens, recorded {found.text_nll[number]:.4f} "
                         f"in {found.text_tokens[number]:.0f}")
    wrong += _unlike_fluency(model, tokenizer, found, stop_ids)
    words = f"{when} the edit, {len(some)} replies and {len(rows[:ROWS_AGAIN])} rows of text were asked for again, each alone"
    if wrong or len(rows) != len(found.text_nll):
        return refuted("replies", f"{words}: {'; '.join(wrong[:3]) or f'{len(rows)} rows, {len(found.text_nll)} recorded'}", wrong=wrong)
    return proven("replies", f"{words}, and came out as recorded")


def _unlike_reply(model: Transformer, tokenizer: Tokenizer, reply: FactReply, stop_ids: Collection[int]) -> list[str]:
    asked, prompt = reply.question, _prompt_ids(tokenizer, reply.question.prompt)
    wrong = []
    for answer, recorded in ((asked.answer, reply.answer_nll), (asked.other, reply.other_nll)):
        due = None if not answer else -_mean(_logprobs(model, prompt, tokenizer.encode(with_leading_space(answer))))
        if (due is None) != (recorded is None) or (due is not None and recorded is not None and abs(due - recorded) > SAME_NATS):
            wrong.append(f"{asked.prompt!r} → {answer!r} costs {due} nats a token, recorded {recorded}")
    if (said := _greedy(model, tokenizer, prompt, reply.said, stop_ids)) is not None:
        wrong.append(f"{asked.prompt!r} goes on with {said!r}, recorded {reply.said!r}")
    return wrong + _unlike_rank(model, tokenizer, prompt, reply)


def _unlike_rank(model: Transformer, tokenizer: Tokenizer, prompt: Sequence[int], reply: FactReply) -> list[str]:
    """Tokens as likely as the answer's first, within rounding, may stand before it or after it."""
    if reply.rank is None or not reply.question.answer:
        return []
    logits = _next_logits(model, prompt)
    own = logits[tokenizer.encode(with_leading_space(reply.question.answer))[0]]
    best, worst = (int((logits > own + shift).sum()) + 1 for shift in (CLOSE_CALL, -CLOSE_CALL))
    return [] if best <= reply.rank <= worst else [
        f"{reply.question.prompt!r} → {reply.question.answer!r} has rank {best}, recorded {reply.rank}"]


def _unlike_fluency(model: Transformer, tokenizer: Tokenizer, found: EditedReplies, stop_ids: Collection[int]) -> list[str]:
    """Differences in the fluency of the first fact, recomputed: its text token by token, and the entropy of its pairs and triples by
    counting."""
    prompt = _prompt_ids(tokenizer, found.of("efficacy")[0].question.prompt)
    ids: list[int] = []
    while len(ids) < FLUENT_TOKENS:
        best = _next_logits(model, [*prompt, *ids]).topk(2)
        if float(best.values[0] - best.values[1]) < CLOSE_CALL:
            return []
        if (token := int(best.indices[0])) in stop_ids:
            return []  # whether what ends a text belongs to it is the engine's to say
        ids.append(token)
    pairs, triples = (Counter(zip(*(ids[first:] for first in range(size)), strict=False)) for size in (2, 3))
    bits = (_bits(pairs) + 2 * _bits(triples)) / 3
    return [] if math.isclose(bits, found.fluency[0], abs_tol=SAME_NATS) else [
        f"the first text has {bits:.4f} bits of fluency, recorded {found.fluency[0]:.4f}"]


def _bits(counts: "Counter[tuple[int, ...]]") -> float:
    total = sum(counts.values())
    return math.log2(total) - math.fsum(count * math.log2(count) for count in counts.values()) / total


def _prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt, with what this tokenizer puts before every text, and without what some put after it."""
    plain, dressed = tokenizer.encode(text), tokenizer.encode(text, special=True)
    starts = [place for place in range(len(dressed)) if dressed[place : place + len(plain)] == plain]
    return dressed[: starts[0] + len(plain)] if starts else plain


def _greedy(model: Transformer, tokenizer: Tokenizer, prompt: Sequence[int], recorded: str, stop_ids: Collection[int]) -> str | None:
    """Greedy text where it differs from what is recorded; None where it does not, or where two tokens are as likely."""
    ids: list[int] = []
    while len(text := tokenizer.decode(ids, special=False)) < len(recorded) or _half_said(text, recorded):
        best = _next_logits(model, [*prompt, *ids]).topk(2)
        if float(best.values[0] - best.values[1]) < CLOSE_CALL:
            return None
        if (token := int(best.indices[0])) in stop_ids:
            break
        ids.append(token)
    return None if text.startswith(recorded) else text


def _half_said(text: str, recorded: str) -> bool:
    """Whether the text ends within a character, whose other tokens are still to come."""
    return len(text) == len(recorded) and text[-1:] == HALF != recorded[-1:]


def _next_logits(model: Transformer, ids: Sequence[int]) -> torch.Tensor:
    tokens = torch.tensor([list(ids)], device=model.embed.weight.device)
    return model.logits(model.hidden(tokens)).float()[0, -1]


def _logprobs(model: Transformer, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
    ids = [*prompt, *completion]
    tokens = torch.tensor([ids], device=model.embed.weight.device)
    table = model.logits(model.hidden(tokens))[0].double().log_softmax(-1)
    return [float(table[place - 1, ids[place]]) for place in range(len(prompt), len(ids))]


def check_edit_figures(facts: Sequence[Fact], before: EditedReplies, after: EditedReplies, estimates: Mapping[str, Estimate]) -> Verdict:
    """Check that all that the facts bring along was asked; every score is the mean that the replies give, and its n counts facts, or
    replies where they are all of one fact."""
    due = _scores(before, after)
    asked = {"efficacy": len(facts), "paraphrase": sum(len(fact.paraphrases) for fact in facts),
             "neighbourhood": sum(len(fact.neighbourhood) for fact in facts), "portability": sum(len(fact.portability) for fact in facts)}
    wrong = [f"{len(replies)} {kind} questions were asked, the facts bring {count}" for kind, count in asked.items()
             for replies in (before.of(kind), after.of(kind)) if len(replies) != count]  # type: ignore[arg-type]
    wrong += [words for name, scores in due.items() if (words := _unlike_scores(name, scores, estimates.get(name)))]
    nats = math.fsum(after.text_nll - before.text_nll) / math.fsum(before.text_tokens)
    drift = estimates["perplexity drift"]
    if not math.isclose(math.log1p(drift.mean), nats, rel_tol=1e-6, abs_tol=SAME_MEAN) or drift.n != len(before.text_nll):
        wrong.append(f"perplexity drift is {math.expm1(nats):.6g} over {len(before.text_nll)} rows, printed {drift}")
    if wrong:
        return refuted("figures", f"the replies do not give what is printed: {'; '.join(wrong[:3])}", wrong=wrong)
    return proven("figures", f"{len(due) + 1} scores are what the replies give when they are counted again")


def _scores(before: EditedReplies, after: EditedReplies) -> dict[str, list[tuple[str, float]]]:
    """name → (fact, score) of every reply that has one."""
    found: dict[str, list[tuple[str, float]]] = {}
    ways: dict[str, Callable[[FactReply], float | None]] = {"likelier": _likelier, "generated": _generated}
    for when, replies in (("before", before.replies), ("after", after.replies)):
        for reply in replies:
            for way, value in ways.items():
                if (score := value(reply)) is not None:
                    found.setdefault(f"{reply.question.kind}, {way}, {when}", []).append((reply.question.fact, score))
    for was, now in zip(before.replies, after.replies, strict=True):
        if was.question.kind == "neighbourhood":
            found.setdefault("neighbourhood, says the same as before", []).append((was.question.fact, float(was.said == now.said)))
    for name, scores in _ranks_and_old_answers(before, after).items():
        if len({fact for fact, _ in scores}) > 1 or not name.endswith(("rank, before", "rank, after")):
            found[name] = scores
    for when, entropies in (("before", before.fluency), ("after", after.fluency)):
        if len(entropies) > 1:
            found[f"fluency (bits), {when}"] = [(str(place), bits) for place, bits in enumerate(entropies)]
    return found


def _ranks_and_old_answers(before: EditedReplies, after: EditedReplies) -> dict[str, list[tuple[str, float]]]:
    found: dict[str, list[tuple[str, float]]] = {}
    for when, replies in (("before", before.replies), ("after", after.replies)):
        for reply in replies:
            if reply.rank is not None and reply.question.kind in ("efficacy", "paraphrase"):
                found.setdefault(f"{reply.question.kind}, reciprocal rank, {when}", []).append((reply.question.fact, 1 / reply.rank))
    for was, now in zip(before.replies, after.replies, strict=True):
        if was.question.kind == "paraphrase" and (old := was.question.other) is not None:
            said = _begins(was.said, old)
            found.setdefault("paraphrase, old answer generated, before", []).append((was.question.fact, said))
            if said:
                found.setdefault("paraphrase, generated, after, where the old answer was", []).append((was.question.fact,
                                                                                                      _generated(now) or 0.0))
    return found


def _likelier(reply: FactReply) -> float | None:
    return None if reply.answer_nll is None or reply.other_nll is None else float(reply.other_nll - reply.answer_nll > 0)


def _generated(reply: FactReply) -> float | None:
    return None if reply.question.answer is None else _begins(reply.said, reply.question.answer)


def _begins(said: str, answer: str) -> float:
    end = r"(?![^\W_])" if answer[-1:].isalnum() else ""
    return float(re.match(rf"\s*{re.escape(answer)}{end}", said) is not None)


def _unlike_scores(name: str, scores: Sequence[tuple[str, float]], printed: Estimate | None) -> str | None:
    mean, facts = _mean([score for _, score in scores]), {fact for fact, _ in scores}
    units = len(facts) if len(facts) > 1 else len(scores)
    if printed is None:
        return f"{name} is {mean:.6g} and is not printed"
    if not math.isclose(mean, printed.mean, rel_tol=SAME_MEAN, abs_tol=SAME_MEAN) or printed.n != units:
        return f"{name} is {mean:.6g} of {units}, printed {printed}"
    return None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

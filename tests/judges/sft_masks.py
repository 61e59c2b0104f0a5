"""SFT masks: what we supervise of a row, beside what the template writes for the assistant's turn, as transformers renders it."""

import json
import tempfile
from pathlib import Path
from typing import Any

from assay.data.chat import render_conversations, supervised_runs
from assay.data.layouts import read_conversations
from assay.errors import AssayError
from assay.guard.example_audit import audit_examples
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.verdict import Outcome
from tests.judges.chat_templates import transformers_text, transformers_tokenizer
from tests.judges.conversations import LEARNED, templates, tokenizer_for
from tests.judges.score import Score, first_words, packages

ASKS = "is what is supervised the assistant's turn as the template writes it, call and reasoning included, or is the row refused?"
PIECES = {"tools": ("weigh_bar", "number seven"), "reasoning": ("Sterling silver is 92.5 percent pure.",)}


def judge(folder: Path) -> Score:
    score = Score(packages("transformers", "jinja2"))
    found = templates(folder)
    with tempfile.TemporaryDirectory() as scratch:
        for name, template in found.items():
            ours = ended(tokenizer_for(template))
            theirs = transformers_tokenizer(ours)
            for kind, row in LEARNED.items():
                try_row(score, f"{name}, {kind}", kind, ours, theirs, row, Path(scratch))
    score.notes.append(f"{len(found)} different templates × {len(LEARNED)} conversations")
    return score


def ended(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the token as EOS with which its template ends an answer, as the model's own files name it."""
    end = resolve_special_tokens(tokenizer, {}, {}).turn_end
    return tokenizer if end is None else tokenizer_for(tokenizer.template or "", tokenizer.tokens[end])


def try_row(score: Score, case: str, kind: str, ours: Tokenizer, theirs: Any, row: dict[str, Any], scratch: Path) -> None:
    try:
        learned = supervised(ours, row, scratch)
    except AssayError as error:
        score.refusals[f"{kind}: {in_kind(str(error))}"] += 1
        return
    expected = expected_turns(theirs, row, ours)
    lost = [piece for piece in PIECES.get(kind, ()) if not any(piece in text for text in learned)]
    score.agree(learned == expected and not lost, case, f"supervised {learned!r}, the template writes {expected!r}; lost {lost}")


def supervised(ours: Tokenizer, row: dict[str, Any], scratch: Path) -> list[str]:
    """The supervised texts of the row, read from a file, rendered and audited as `assay data check` does; an AssayError where refused."""
    file = scratch / "row.jsonl"
    file.write_text(json.dumps(row) + "\n")
    stops = resolve_special_tokens(ours, {}, {})
    rendered = render_conversations(read_conversations(str(file)).rows, ours, stops, length=1 << 20)
    for verdict in audit_examples(rendered.examples, ours, stops):
        if verdict.outcome is Outcome.REFUTED:
            raise AssayError(str(verdict))
    return [ours.decode(example.tokens[start:stop].tolist())
            for example in rendered.examples for start, stop in supervised_runs(example.weight)]


def expected_turns(theirs: Any, row: dict[str, Any], ours: Tokenizer) -> list[str] | None:
    """Text that transformers writes from the generation prompt to the first end token after each assistant turn."""
    turns = []
    for k, message in enumerate(row["messages"]):
        if message["role"] == "assistant":
            whole, _ = transformers_text(theirs, row | {"messages": row["messages"][: k + 1]})
            before, _ = transformers_text(theirs, row | {"messages": row["messages"][:k], "add_generation_prompt": True})
            if whole is None or before is None or not whole.startswith(before):
                return None
            turn, end = whole[len(before):], ours.settings["eos_token"]
            turns.append(turn[: turn.index(end) + len(end)] if end in turn else turn)
    return turns


def in_kind(words: str) -> str:
    """A refusal without its file and its quotations, so that alike ones count together."""
    kinds = {"does not write": "the template does not write what the row says",
             "generation prompt has": "answers do not begin with the template's own generation prompt",
             "writes an earlier turn differently": "an earlier turn is written differently once another follows (--turns apart)",
             "does not accept this conversation": "the template itself objects",
             "mean to teach what": "the template puts words into the answer that the row does not have",
             "end with no supervised stop token": "the answer ends with no stop token", "stop token before": "a stop token in mid-answer"}
    return next((told for kind, told in kinds.items() if kind in words), first_words(ValueError(words)))

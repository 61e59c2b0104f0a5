"""Chat templates: real models' templates × conversations, rendered by us and by transformers' own tokenizer."""

from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.model.tokenizer import Tokenizer
from tests.judges.conversations import TOLD, templates, tokenizer_for
from tests.judges.score import Score, first_words, packages

ASKS = "what does this model's template write for this conversation? (plain, two turns, system, tools, calls, results, reasoning)"


def judge(folder: Path) -> Score:
    score = Score(packages("transformers", "jinja2"))
    found = templates(folder)
    for name, template in found.items():
        ours = tokenizer_for(template)
        theirs = transformers_tokenizer(ours)
        for kind, told in TOLD.items():
            compare(score, f"{name}, {kind}", ours, theirs, told)
    score.notes.append(f"{len(found)} different templates × {len(TOLD)} conversations")
    return score


def transformers_tokenizer(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, chat_template=tokenizer.template, bos_token="<s>",
                                   eos_token=tokenizer.settings["eos_token"])


def compare(score: Score, case: str, ours: Tokenizer, theirs: Any, told: dict[str, Any]) -> None:
    expected, objection = transformers_text(theirs, told)
    try:
        text = ours.render(**told)
    except AssayError as error:
        if expected is None:
            score.right += 1  # the template objects, and both say so
        else:
            score.refusals[first_words(error)] += 1
        return
    score.agree(text == expected, case, f"we wrote {text[-80:]!r}, transformers {objection or repr((expected or '')[-80:])}")


def transformers_text(theirs: Any, told: dict[str, Any]) -> tuple[str | None, str]:
    """The text; or None, and what the template objected to."""
    try:
        return theirs.apply_chat_template(told["messages"], tools=told.get("tools"), tokenize=False,
                                          add_generation_prompt=told.get("add_generation_prompt", False)), ""
    except Exception as error:  # a template may raise whatever it likes: jinja2's errors, TypeError, KeyError
        return None, f"{type(error).__name__}: {first_words(error)}"

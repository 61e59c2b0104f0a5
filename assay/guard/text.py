"""Check on what text becomes: the ids that the parent or source gave it, and the same words around a chat."""

from assay.errors import DataError
from assay.guard.subject import Subject
from assay.model.gguf_tokenizer import HARD
from assay.model.tokenizer import Tokenizer
from assay.verdict import Verdict, proven, refuted, unproven

CHAT = ({"role": "user", "content": "Is it so?"}, {"role": "assistant", "content": "It is."})


def check_tokenizer(subject: Subject) -> Verdict:
    """A wrong split gives plausible ids that the model has never seen, and everything else still looks right."""
    tokenizer = subject.artifact.tokenizer
    if tokenizer is None:
        return unproven("tokenizer", "there is none here", optional=True)
    if subject.facts.get("tokenizer", tokenizer.digest) != tokenizer.digest:
        return refuted("tokenizer", f"its manifest records tokenizer {subject.facts['tokenizer'][:12]}, "
                                    f"the files make {tokenizer.digest[:12]}")
    if subject.against is None or subject.against.tokenizer is None:
        if subject.facts.get("tokenizer"):
            return proven("tokenizer", f"the files make the tokenizer that was saved, {tokenizer.digest[:12]}")
        return unproven("tokenizer", "there is none to compare it with; name a parent with --against", optional=True)
    return _compared(tokenizer, subject.against.tokenizer, subject.expect == "same", subject.against.path.name)


def _compared(ours: Tokenizer, theirs: Tokenizer, same: bool, name: str) -> Verdict:
    for text in HARD:
        found, due = (tokenizer.encode(text, special=same) for tokenizer in (ours, theirs))
        if found != due:
            return refuted("tokenizer", f"{text!r} becomes {found[:12]} here and {due[:12]} in {name}", text=text)
    if same and _rendered(ours) != _rendered(theirs):  # training may bring a template, an export may not
        return refuted("tokenizer", f"a chat is rendered as {_rendered(ours)!r} here, {_rendered(theirs)!r} in {name}")
    return proven("tokenizer", f"{len(HARD)} hard texts have the ids that they have in {name}", texts=len(HARD))


def _rendered(tokenizer: Tokenizer) -> str | None:
    if tokenizer.template is None:
        return None
    try:
        return tokenizer.render(CHAT)
    except DataError as error:
        return f"({error})"

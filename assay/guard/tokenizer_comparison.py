"""Tokenizer comparison: a copy's tokenizer against its source's, by digest, by behaviour on many texts, and by rendered chats.

Equal digests give equal ids. Where a format or another tool has written the same rules in another form, texts decide: the hard ones,
the source's own tokens one by one, and a sample of all characters, each within a word, before a digit and alone.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.errors import ArtifactError, DataError
from assay.model.gguf_tokenizer import HARD
from assay.model.tokenizer import Tokenizer
from assay.verdict import Verdict, proven, refuted, unproven

QUESTION = ({"role": "user", "content": "Is it so?"},)
CHAT = (*QUESTION, {"role": "assistant", "content": "It is."})
CHATS: tuple[tuple[Sequence[Mapping[str, Any]], bool], ...] = (  # and whether an answer is asked for
    (CHAT, False), (CHAT, True), (QUESTION, True), (({"role": "system", "content": "Be brief."}, *QUESTION), True),
    ((*CHAT, *QUESTION), True))
MOST_TOKENS, EVERY_CHARACTER = 20_000, 37  # of the vocabulary; one code point in so many
_SHOWN = 12


def compare_tokenizers(ours: Tokenizer, theirs: Tokenizer, name: str, *, same: bool, exact: bool = False) -> Verdict:
    """`same`: a copy must give the ids and the chats of the source. `exact`: and nothing in its form could excuse another digest."""
    if (text := _first_difference(HARD, ours, theirs, special=same)) is not None:
        return _other_ids(text, ours, theirs, name, special=same)
    if not same:
        return proven("tokenizer", f"{len(HARD)} hard texts have the ids that they have in {name}", texts=len(HARD))
    texts = len(HARD)
    if ours.digest != theirs.digest:
        many = list(probing_texts(theirs))
        if (text := _first_difference(many, ours, theirs, special=True)) is not None:
            return _other_ids(text, ours, theirs, name, special=True)
        parts = differing_parts(ours.document, theirs.document)
        if exact and parts:
            return refuted("tokenizer", f"tokenizer.json is {ours.digest[:12]} here and {theirs.digest[:12]} in {name}: {', '.join(parts)} "
                                        "differ, and an export changes nothing of it", parts=parts)
        texts += len(many)
    if (words := _other_chats(ours, theirs, name)) is not None:
        return refuted("tokenizer", words)
    form = "the same tokenizer.json" if ours.digest == theirs.digest else "written in another form"
    return proven("tokenizer", f"{texts:,} texts have the ids that they have in {name} ({form}), and chats are rendered as there",
                  texts=texts)


def probing_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Every token's own text, or a sample of them, and a sample of all characters among letters and digits."""
    step = max(1, tokenizer.size // MOST_TOKENS)
    yield from (f"{piece} x{piece}1" for id in sorted(tokenizer.tokens)[::step] if (piece := tokenizer.decode([id])).strip())
    for code in [*range(0x250), *range(0x250, 0x30000, EVERY_CHARACTER)]:
        if unicodedata.category(character := chr(code)) not in ("Cs", "Cn", "Co"):
            yield f"a{character}b {character}{character}1"


def differing_parts(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Parts of two tokenizer.json that are not the same once both are written in the library's own form."""
    one, other = _parts(ours), _parts(theirs)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _parts(document: Mapping[str, Any]) -> dict[str, Any]:
    import tokenizers

    whole = json.loads(tokenizers.Tokenizer.from_str(json.dumps(document)).to_str())
    model = whole.pop("model")
    return {key: value for key, value in whole.items() if key not in ("version", "truncation", "padding")} | {
        f"model.{key}": value for key, value in model.items()}


def _first_difference(texts: Sequence[str], ours: Tokenizer, theirs: Tokenizer, *, special: bool) -> str | None:
    found, due = (tokenizer.encode_batch(texts, special=special) for tokenizer in (ours, theirs))
    return next((text for text, one, other in zip(texts, found, due, strict=True) if one != other), None)


def _other_ids(text: str, ours: Tokenizer, theirs: Tokenizer, name: str, *, special: bool) -> Verdict:
    found, due = (tokenizer.encode(text, special=special)[:_SHOWN] for tokenizer in (ours, theirs))
    return refuted("tokenizer", f"{text!r} becomes {found} here and {due} in {name}", text=text)


def _other_chats(ours: Tokenizer, theirs: Tokenizer, name: str) -> str | None:
    """Training may bring a template, an export may not: neither another rendering nor another text of it."""
    for chat, prompted in CHATS:
        found, due = (_rendered(tokenizer, chat, prompted) for tokenizer in (ours, theirs))
        if found != due:
            how = " with its generation prompt" if prompted else ""
            return f"a chat{how} is rendered as {found!r} here, {due!r} in {name}"
    texts = [{key: text.strip() for key, text in tokenizer.templates.items()} for tokenizer in (ours, theirs)]
    if texts[0] != texts[1]:
        wrong = sorted(key for key in texts[0].keys() | texts[1].keys() if texts[0].get(key) != texts[1].get(key))
        return f"the chat template is not that of {name} ({', '.join(wrong)}), though a short chat is rendered alike"
    return None


def compare_templates(ours: Tokenizer, theirs: Tokenizer, name: str) -> Verdict | None:
    """Compare the chat template of a trained folder that nothing recorded with its parent's. Training may bring another, but not the
    parent's own turns without the prompt that begins an answer. None where there is nothing to say."""
    if theirs.template is None or (ours.template or "").strip() == theirs.template.strip():
        return None
    ids = f"the hard texts have the ids that they have in {name}"
    if ours.template is None:
        return unproven("tokenizer", f"{ids}, but {name} has a chat template and this has none: whether it was lost could not be checked")
    if _generation_prompt(theirs) and _generation_prompt(ours) == "" and all(
            _rendered(ours, chat, False) == _rendered(theirs, chat, False) for chat in (QUESTION, CHAT)):
        return refuted("tokenizer", f"the chat template writes the turns of {name}, and lost the generation prompt: an answer begins with "
                                    f"{_generation_prompt(theirs)!r} there and with nothing here")
    return unproven("tokenizer", f"{ids}; the chat template is another one, and whether it is the one of the training could not be checked")


def silent_generation_prompt(tokenizer: Tokenizer) -> str | None:
    """Said of a template that opens an answer's turn with words of its own, and writes them only after the answer is there."""
    asked, said = _rendered(tokenizer, QUESTION, True), _rendered(tokenizer, CHAT, False)
    if asked is None or said is None or _generation_prompt(tokenizer) != "" or not said.startswith(asked):
        return None
    opening = said[len(asked):].partition(CHAT[-1]["content"])[0]
    return f"answers begin with {opening!r}, and the chat template does not write it when asked for a generation prompt" \
        if opening.strip() else None


def _generation_prompt(tokenizer: Tokenizer) -> str | None:
    """Generation prompt of a tokenizer's template; None where that cannot be said."""
    usual, prompted = (_rendered(tokenizer, QUESTION, wanted) for wanted in (False, True))
    return prompted[len(usual):] if usual is not None and prompted is not None and prompted.startswith(usual) else None


def _rendered(tokenizer: Tokenizer, chat: Sequence[Mapping[str, Any]], prompted: bool) -> str | None:
    if tokenizer.template is None:
        return None
    try:
        return tokenizer.render(chat, add_generation_prompt=prompted)
    except (DataError, ArtifactError) as error:
        return f"({error})"

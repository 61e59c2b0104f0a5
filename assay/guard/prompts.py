"""Checks on how examples begin: once, as the model's own template writes it, with the very ids that a sampler would be given."""

import numpy as np

from assay.data.chat import Example, before_text, parting
from assay.errors import ArtifactError, DataError
from assay.guard.examples import REPLACEMENT, Flat
from assay.model.stops import Stops
from assay.model.tokenizer import Tokenizer
from assay.seeds import derive
from assay.verdict import Verdict, proven, refuted, unproven

SAMPLE = 64  # rows that are written again from their conversations


def check_bos(flat: Flat, tokenizer: Tokenizer, stops: Stops) -> Verdict:
    """A text begins once: BOS stands at most once and first, and there where a sampler's prompts have it."""
    bos = stops.bos
    if bos is None:
        return proven("bos", "the model has no BOS token")
    name, is_bos, firsts = repr(tokenizer.piece(bos)), flat.tokens == bos, flat.starts
    seconds = np.minimum(firsts + 1, firsts + flat.lengths - 1)
    doubled = np.flatnonzero(is_bos[firsts] & is_bos[seconds] & (seconds > firsts))
    if doubled.size:
        return refuted("bos", f"{doubled.size} examples begin with {name} twice, first {flat.id(int(doubled[0]))}: the template writes it "
                               "and the tokenizer adds it again", rows=int(doubled.size))
    ways = beginnings(tokenizer, bos)
    begun = is_bos[firsts]
    if len(ways) == 1 and (begun != (due := True in ways)).any():
        row = int(np.flatnonzero(begun != due)[0])
        return refuted("bos", f"{int((begun != due).sum())} examples begin {'without' if due else 'with'} {name}, first {flat.id(row)}; a "
                               f"sampler's prompts begin {'with' if due else 'without'} it", rows=int((begun != due).sum()))
    if bos not in stops.stop_ids and not _marks_turns(tokenizer, bos):
        later = np.unique(flat.rows[is_bos & (flat.places > 0)])
        if later.size:
            return refuted("bos", f"{later.size} examples hold {name} after their beginning, first {flat.id(int(later[0]))}",
                           rows=int(later.size))
    return proven("bos", f"{int(begun.sum()):,} of {len(begun):,} examples begin with {name}, none twice", begun=int(begun.sum()))


def beginnings(tokenizer: Tokenizer, bos: int) -> set[bool]:
    """Whether prompts begin with BOS: as the template writes them, and as the tokenizer begins plain text. They may differ."""
    ways = {before_text(tokenizer)[:1] == [bos]}
    chat = _chat_ids(tokenizer)
    return ways | ({chat[:1] == [bos]} if chat else set())


def _marks_turns(tokenizer: Tokenizer, bos: int) -> bool:
    """SmolLM2's BOS is the mark that begins every turn."""
    return _chat_ids(tokenizer).count(bos) > 1


def _chat_ids(tokenizer: Tokenizer) -> list[int]:
    if tokenizer.template is None:
        return []
    try:
        return tokenizer.encode(tokenizer.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]))
    except (DataError, ArtifactError):  # a template for other conversations than this one says nothing here
        return []


def check_prompt(flat: Flat, tokenizer: Tokenizer) -> Verdict:
    """The prompt's ids are those that a sampler would be given for its text: the model learns to go on from where it will be."""
    begin, rows = before_text(tokenizer), [row for row, example in enumerate(flat.examples) if example.asked]
    encoded = tokenizer.encode_batch([flat.examples[row].asked for row in rows])
    wrong = []
    for row, ids in zip(rows, encoded, strict=True):
        prompt = flat.examples[row].tokens[: flat.examples[row].prompt].tolist()
        if prompt not in (ids, begin + ids):
            wrong.append(row)
    if wrong:
        return refuted("prompt", f"{len(wrong)} of {len(rows)} prompts are other ids than their text alone becomes, first "
                                 f"{flat.id(wrong[0])}: a token reaches over the seam, or the prompt was measured on another text",
                       rows=len(wrong))
    return proven("prompt", f"{len(rows):,} prompts are the ids that a sampler would be given", rows=len(rows))


def check_rendered(flat: Flat, tokenizer: Tokenizer, stops: Stops, seed: int) -> Verdict:
    """A sample of rows, written again from what they were made of: no cache, and no forgotten template."""
    made = [row for row, example in enumerate(flat.examples) if example.conversation is not None]
    if not made:
        return unproven("rendered", "the examples do not say which conversations they were made from")
    chosen = sorted(made, key=lambda row: derive(seed, "rendered", row))[:SAMPLE]
    for row in chosen:
        example = flat.examples[row]
        due, ids = _written_again(example, tokenizer, stops), example.tokens.tolist()
        if not due.startswith(text := tokenizer.decode(ids).rstrip(REPLACEMENT if example.cut else "")):
            found, meant = parting(text, due, before=8)
            return refuted("rendered", f"{example.id} is not what its conversation becomes: it reads {found!r}, the model's own template "
                                       f"or tokenizer writes {meant!r}", id=example.id)
    return proven("rendered", f"{len(chosen)} examples, written again from their conversations, are the same", rows=len(chosen))


def _written_again(example: Example, tokenizer: Tokenizer, stops: Stops) -> str:
    source = example.conversation
    assert source is not None
    if source.messages and tokenizer.template is not None:
        turn = example.id.partition("#")[2]
        text = tokenizer.render(source.messages[: int(turn) + 1 if turn else None], tools=source.tools)
        return tokenizer.decode(tokenizer.encode(text))
    prompt, completion = source.plain or ("", "")
    eos = "" if stops.eos is None else tokenizer.tokens[stops.eos]
    ended = completion if completion.endswith(eos) else completion + eos
    ids, begin = tokenizer.encode(prompt + ended), before_text(tokenizer)
    return tokenizer.decode(ids if ids[: len(begin)] == begin else begin + ids)

"""Example checks: what each example supervises, how it begins and how it ends.

The mask is not believed: the supervised tokens are decoded and compared with the intended text. Counts are taken on whole arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data.chat import SENTINEL, TrainingExample, divergence_excerpts, text_prefix_ids
from assay.data.message_fields import says_more_than_content, unwritten_fields
from assay.errors import ArtifactError, DataError
from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer
from assay.seeds import derive
from assay.verdict import Verdict, proven, refuted, unproven

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what half a character decodes to


@dataclass(frozen=True)
class FlatExamples:
    """Examples as one stream; `runs` are its supervised stretches, each within one row."""

    examples: Sequence[TrainingExample]

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        return np.concatenate([example.tokens for example in self.examples])

    @cached_property
    def weight(self) -> NDArray[np.float32]:
        return np.concatenate([example.weight for example in self.examples])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(example) for example in self.examples], np.int64)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """Index of the example that each token belongs to."""
        return np.repeat(np.arange(len(self.examples)), self.lengths)

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Place of each token in its example."""
        return np.arange(len(self.tokens)) - self.starts[self.rows]

    @cached_property
    def prompts(self) -> NDArray[np.int64]:
        return np.array([example.prompt for example in self.examples], np.int64)

    @cached_property
    def runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(start, stop, example) of each; column 0 is never supervised, so none reaches into the next example."""
        mask = np.concatenate(([False], self.weight != 0, [False]))
        edges = np.flatnonzero(mask[1:] != mask[:-1])
        return edges[::2], edges[1::2], self.rows[edges[::2]]

    @cached_property
    def complete(self) -> NDArray[np.bool_]:
        """Whether the end of each supervised run is here: the last run of an example cut at the length may lack it."""
        _, _, rows = self.runs
        cut = np.array([example.cut for example in self.examples], np.bool_)
        last = np.append(rows[1:] != rows[:-1], True) if len(rows) else np.zeros(0, np.bool_)
        return ~(cut[rows] & last)

    def id(self, row: int) -> str:
        return self.examples[row].id


def check_supervised(flat: FlatExamples) -> Verdict:
    """Every example teaches something, and none teaches its prompt."""
    if not np.isfinite(flat.weight).all() or (flat.weight < 0).any():
        return refuted("supervised", "a weight is negative or not finite")
    counts = np.bincount(flat.rows, flat.weight != 0, len(flat.examples))
    if (empty := np.flatnonzero(counts == 0)).size:
        return refuted("supervised", f"{empty.size} of {len(flat.examples)} examples supervise no token, first {flat.id(empty[0])}: they "
                                     "would be a loss of 0, or not a number", rows=empty.size)
    early = (flat.weight != 0) & (flat.places < flat.prompts[flat.rows])
    if early.any():
        rows = np.unique(flat.rows[early])
        return refuted("supervised", f"{int(early.sum())} tokens of prompts are supervised, in {rows.size} of {len(flat.examples)} "
                                     f"examples, first {flat.id(rows[0])}: the mask is lost or misplaced", rows=rows.size)
    share = float(np.count_nonzero(flat.weight) / len(flat.tokens))
    return proven("supervised", f"{int(counts.sum()):,} of {len(flat.tokens):,} tokens ({share:.1%}) in {len(flat.examples):,} examples, "
                                f"{int(counts.min())} or more in each", tokens=len(flat.tokens), share=share, least=int(counts.min()))


def check_intended(flat: FlatExamples, tokenizer: Tokenizer) -> Verdict:
    """The supervised tokens, decoded, are the intended texts: each as a whole, byte for byte, and nothing else."""
    starts, stops, rows = flat.runs
    found = np.bincount(rows, minlength=len(flat.examples))
    due = np.array([len(example.intended) for example in flat.examples])
    if (wrong := np.flatnonzero(found != due)).size:
        row = int(wrong[0])
        return refuted("intended", f"{wrong.size} examples do not supervise what was meant: {flat.id(row)} has {found[row]} supervised "
                                   f"stretches, {due[row]} texts were meant", rows=wrong.size)
    texts = [text for example in flat.examples for text in example.intended]
    pieces = [flat.tokens[start:stop].tolist() for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    decoded = tokenizer.backend.decode_batch(pieces, skip_special_tokens=False)
    bad = [run for run, (text, meant) in enumerate(zip(decoded, texts, strict=True))
           if text != meant and not _means(flat, run, meant, tokenizer)]
    if bad:
        shown, meant = divergence_excerpts(decoded[bad[0]], texts[bad[0]], before=8)
        return refuted("intended", f"{len(bad)} of {len(texts)} supervised texts are not what was meant: {flat.id(int(rows[bad[0]]))} "
                                   f"supervises {shown!r}, meant was {meant!r}", texts=len(bad))
    marks = tuple(tokenizer.tokens[id] for id in tokenizer.special_ids)
    frame = _answer_frame(tokenizer)
    strange = [example for example in flat.examples if not _said(example, marks, frame)]
    if strange:
        return refuted("intended", f"{len(strange)} examples mean to teach what their conversations do not say: {strange[0].id} teaches "
                                   f"{strange[0].intended[0][:80]!r}", rows=len(strange))
    return proven("intended", f"{len(texts):,} supervised texts decode to what was meant, byte for byte", texts=len(texts))


def _answer_frame(tokenizer: Tokenizer) -> str:
    """Text that the template writes between its generation prompt and the words of any answer, such as gpt-oss's channel; often nothing."""
    if tokenizer.template is None:
        return ""
    asked = [{"role": "user", "content": "?"}]
    try:
        before = tokenizer.render(asked, add_generation_prompt=True)
        head, found, _ = tokenizer.render([*asked, {"role": "assistant", "content": SENTINEL}]).partition(SENTINEL)
    except (DataError, ArtifactError):  # a template for other conversations than this one says nothing here
        return ""
    return head.removeprefix(before).strip() if found and head.startswith(before) else ""


def _said(example: TrainingExample, marks: tuple[str, ...], frame: str) -> bool:
    """The intended texts are what the conversation says, in its order."""
    source = example.conversation
    if source is None or example.cut:
        return True
    texts = [_without_end(text, marks) for text in example.intended]
    if not source.messages:
        completion = _without_end((source.plain or ("", ""))[1], marks)
        return texts == [completion] or (not example.asked and completion.endswith(texts[0]))  # nothing predicts the first token
    said = iter(source.messages[source.learned_from :])
    return all(any(_teaches(text, message, marks, frame) for message in said) for text in texts)


def _teaches(text: str, message: Mapping[str, Any], marks: tuple[str, ...], frame: str) -> bool:
    """The content alone, or after words that the template puts before it, which are never the marks of another turn, unless it puts
    them before every answer. Of a message that says more than its content, all of it."""
    if says_more_than_content(message):
        return not unwritten_fields(message, text)
    content = message["content"].strip()
    before = text[: len(text) - len(content)].strip()
    return text.endswith(content) and (before == frame or not any(mark in before for mark in marks))


def _without_end(text: str, marks: tuple[str, ...]) -> str:
    return next(text.removesuffix(mark) for mark in marks if text.endswith(mark)).strip() if text.endswith(marks) else text.strip()


def _means(flat: FlatExamples, run: int, meant: str, tokenizer: Tokenizer) -> bool:
    """A closer look at a run that decodes to another text alone: it may be cut, follow a space that decoders strip from a
    beginning, or hold letters that the tokenizer's normalizer writes in another form."""
    start, stop, row = (int(array[run]) for array in flat.runs)
    first = int(flat.starts[row])
    context = tokenizer.decode(flat.tokens[first:start].tolist())
    text = tokenizer.decode(flat.tokens[first:stop].tolist()).removeprefix(context)
    normalizer = tokenizer.backend.normalizer
    forms = {meant, meant if normalizer is None else normalizer.normalize_str(meant)}
    if flat.complete[run]:
        return text in forms
    return any(form.startswith(text.rstrip(REPLACEMENT)) for form in forms)


def check_stop(flat: FlatExamples, tokenizer: Tokenizer, stops: SpecialTokens) -> Verdict:
    """Every completion ends with a token at which generation stops, supervised; no answer holds one before its end."""
    _, ends, rows = flat.runs
    if not stops.stop_ids:
        return refuted("stop", "no file of the model names a token at which to stop: it would never learn to")
    is_stop = np.isin(flat.tokens, stops.stop_ids)
    open_runs = np.flatnonzero(~is_stop[ends - 1] & flat.complete)
    if open_runs.size:
        last = int(flat.tokens[ends[open_runs[0]] - 1])
        names = " or ".join(repr(tokenizer.piece(id)) for id in stops.stop_ids)
        hint = _no_stop_hint(tokenizer, stops, last)
        return refuted("stop", f"{open_runs.size} of {len(ends)} completions end with no supervised stop token ({names}): "
                               f"{flat.id(int(rows[open_runs[0]]))} ends with {tokenizer.piece(last)!r}. The model will not stop: {hint}",
                       completions=int(open_runs.size))
    if (inside := _stops_inside(flat, is_stop)).size:
        return refuted("stop", f"{inside.size} answers hold a stop token before their end, first {flat.id(int(inside[0]))}: the text "
                               "spells it out, and the model would learn to stop there", answers=int(inside.size))
    cut = int(np.count_nonzero(~is_stop[ends - 1]))
    kept = f"; {cut} are cut at the length and do not end" if cut else ""
    if cut == len(ends):
        return refuted("stop", "no completion has its end within the length, so that none teaches to stop; raise the length")
    return proven("stop", f"{len(ends) - cut:,} completions end with a supervised stop token{kept}", completions=len(ends), cut=cut)


def _no_stop_hint(tokenizer: Tokenizer, stops: SpecialTokens, last: int) -> str:
    """Advice where an answer ends with `last`, which stops nothing."""
    if last == stops.turn_end:
        return (f"the chat template ends turns with {tokenizer.piece(last)!r}, which stops nothing; name it as eos_token in "
                "tokenizer_config.json, or among eos_token_id in generation_config.json")
    if tokenizer.template is not None and stops.turn_end is None:
        return "the chat template writes no special token after an answer; let it write the model's stop token there (chat_template.jinja)"
    return "end each answer with one, as the chat template does"


def _stops_inside(flat: FlatExamples, is_stop: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Examples made of messages that have a stop token within an answer; running text may hold several documents."""
    supervised = flat.weight != 0
    within = is_stop[:-1] & supervised[:-1] & supervised[1:] & (flat.rows[1:] == flat.rows[:-1])
    rows = np.unique(flat.rows[:-1][within])
    return np.array([row for row in rows.tolist() if (source := flat.examples[row].conversation) and source.messages], np.int64)


def check_pad(flat: FlatExamples, tokenizer: Tokenizer, stops: SpecialTokens) -> Verdict:
    """Padding teaches nothing; where one token both pads and ends, check_stop looks at the end."""
    if tokenizer.pad is None or tokenizer.pad in stops.stop_ids:
        return proven("pad", "no token is there to pad alone")
    wrong = int(np.count_nonzero(flat.weight[flat.tokens == tokenizer.pad]))
    if wrong:
        return refuted("pad", f"{wrong} padding tokens ({tokenizer.piece(tokenizer.pad)!r}) are supervised", tokens=wrong)
    return proven("pad", f"no {tokenizer.piece(tokenizer.pad)!r} is supervised")


_SAMPLE = 64  # rows that are written again from their conversations


def check_bos(flat: FlatExamples, tokenizer: Tokenizer, stops: SpecialTokens) -> Verdict:
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
    ways = bos_beginnings(tokenizer, bos)
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


def bos_beginnings(tokenizer: Tokenizer, bos: int) -> set[bool]:
    """Whether prompts begin with BOS: as the template writes them, and as the tokenizer begins plain text. They may differ."""
    ways = {text_prefix_ids(tokenizer)[:1] == [bos]}
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


def check_prompt(flat: FlatExamples, tokenizer: Tokenizer) -> Verdict:
    """The prompt's ids are those that a sampler would be given for its text: the model learns to go on from where it will be."""
    begin, rows = text_prefix_ids(tokenizer), [row for row, example in enumerate(flat.examples) if example.asked]
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


def check_rendered(flat: FlatExamples, tokenizer: Tokenizer, stops: SpecialTokens, seed: int) -> Verdict:
    """A sample of rows, written again from what they were made of: no cache, and no forgotten template."""
    made = [row for row, example in enumerate(flat.examples) if example.conversation is not None]
    if not made:
        return unproven("rendered", "the examples do not say which conversations they were made from")
    chosen = sorted(made, key=lambda row: derive(seed, "rendered", row))[:_SAMPLE]
    for row in chosen:
        example = flat.examples[row]
        due, ids = _written_again(example, tokenizer, stops), example.tokens.tolist()
        if not due.startswith(text := tokenizer.decode(ids).rstrip(REPLACEMENT if example.cut else "")):
            found, meant = divergence_excerpts(text, due, before=8)
            return refuted("rendered", f"{example.id} is not what its conversation becomes: it reads {found!r}, the model's own template "
                                       f"or tokenizer writes {meant!r}", id=example.id)
    return proven("rendered", f"{len(chosen)} examples, written again from their conversations, are the same", rows=len(chosen))


def _written_again(example: TrainingExample, tokenizer: Tokenizer, stops: SpecialTokens) -> str:
    source = example.conversation
    assert source is not None
    if source.messages and tokenizer.template is not None:
        part = example.id.rpartition(":")[2].partition("#")[2]  # the number of a turn, or which side of a pair
        text = tokenizer.render(source.messages[: int(part) + 1 if part.isdecimal() else None], tools=source.tools)
        return tokenizer.decode(tokenizer.encode(text))
    prompt, completion = source.plain or ("", "")
    eos = "" if stops.eos is None else tokenizer.tokens[stops.eos]
    ended = completion if completion.endswith(eos) else completion + eos
    ids, begin = tokenizer.encode(prompt + ended), text_prefix_ids(tokenizer)
    return tokenizer.decode(ids if ids[: len(begin)] == begin else begin + ids)

"""Example audit before step 1 and on batches: what is supervised is what was meant, and the model has rows for it."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batch import Batch
from assay.data.chat import TrainingExample
from assay.data.layouts import Conversation
from assay.data.overlap import COPIES_REFUSED, COPIES_SAID, measure_overlap
from assay.data.packing import PackedExamples
from assay.data.preferences import PreferencePair
from assay.guard.example_checks import (
    FlatExamples,
    check_bos,
    check_intended,
    check_pad,
    check_prompt,
    check_rendered,
    check_stop,
    check_supervised,
)
from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer
from assay.store.scratch import scratch_folder
from assay.verdict import Verdict, proven, refuted, unproven

SHARED = 0.05  # share of the evaluation's 13-grams that may stand in the training text
_FAINT = 1e-3  # an embedding row this much shorter than the median was never trained


def audit_examples(examples: Sequence[TrainingExample], tokenizer: Tokenizer, stops: SpecialTokens, *, embed: Tensor | None = None,
                   trainable: Collection[int] | Literal["all"] = "all", held_out: Sequence[TrainingExample] | None = None,
                   evaluation: Sequence[str] = (), length: int | None = None, seed: int = 0) -> list[Verdict]:
    """`embed` is the model's embedding, `trainable` the rows of it that learn; `evaluation` the texts it will be judged on."""
    if not examples:
        return [refuted("supervised", "there are no examples: none was read, or all were dropped")]
    flat = FlatExamples(examples)
    return [*audit_each(flat, tokenizer, stops, embed=embed, trainable=trainable, length=length, seed=seed),
            check_duplicates(flat), check_overlap(flat, held_out, evaluation)]


def audit_each(flat: FlatExamples, tokenizer: Tokenizer, stops: SpecialTokens, *, embed: Tensor | None,
               trainable: Collection[int] | Literal["all"], length: int | None, seed: int) -> list[Verdict]:
    """Verdicts on each example by itself."""
    return [check_supervised(flat), check_intended(flat, tokenizer), check_stop(flat, tokenizer, stops), check_bos(flat, tokenizer, stops),
            check_prompt(flat, tokenizer), check_pad(flat, tokenizer, stops), check_vocabulary(flat, tokenizer, embed),
            check_embeddings(flat, tokenizer, embed, trainable), check_rendered(flat, tokenizer, stops, seed), check_lengths(flat, length)]

# ---------------------------------------------------------------- what the model has for it


def check_vocabulary(flat: FlatExamples, tokenizer: Tokenizer, embed: Tensor | None) -> Verdict:
    used = np.unique(flat.tokens)
    rows = tokenizer.size if embed is None else len(embed)
    beyond = used[(used < 0) | (used >= rows)]
    if beyond.size:
        return refuted("vocabulary", f"{beyond.size} ids are beyond the model's {rows} rows, such as {int(beyond[0])}: data of another "
                                     "tokenizer, or rows that were never added", ids=int(beyond.size))
    unknown = [id for id in used.tolist() if id not in tokenizer.tokens]
    if unknown:
        return refuted("vocabulary", f"{len(unknown)} ids have no token, such as {unknown[0]}: data of another tokenizer", ids=len(unknown))
    return proven("vocabulary", f"{used.size:,} different ids, all of the tokenizer and within {rows:,} rows", ids=int(used.size))


def check_embeddings(flat: FlatExamples, tokenizer: Tokenizer, embed: Tensor | None,
                     trainable: Collection[int] | Literal["all"]) -> Verdict:
    """A token whose row is empty says nothing, and says so for ever if the row is frozen."""
    if embed is None:
        return unproven("embeddings", "there is no embedding to look at; give a model with weights")
    used = np.unique(flat.tokens)
    used = used[(used >= 0) & (used < len(embed))]
    norms = embed[torch.from_numpy(used.astype(np.int64)).to(embed.device)].detach().float().norm(dim=1).cpu().numpy()
    if not np.isfinite(norms).all():
        return refuted("embeddings", f"{int((~np.isfinite(norms)).sum())} rows of the embedding are not finite, such as that of "
                                     f"{tokenizer.piece(int(used[~np.isfinite(norms)][0]))!r}")
    faint = used[norms <= _FAINT * np.median(norms)]
    dead = faint if trainable != "all" else faint[:0]
    dead = np.array([id for id in dead.tolist() if id not in trainable], np.int64)
    if dead.size:
        shown = ", ".join(repr(tokenizer.piece(int(id))) for id in dead[:4])
        return refuted("embeddings", f"{dead.size} tokens in the data have an empty embedding row that is frozen: {shown}; train their "
                                     "rows, or initialise them", ids=int(dead.size))
    learning = f"; {faint.size} are empty and will be trained" if faint.size else ""
    return proven("embeddings", f"{used.size:,} ids have a row that says something, or one that learns{learning}", empty=int(faint.size))

# ---------------------------------------------------------------- the set as a whole


def check_lengths(flat: FlatExamples, length: int | None) -> Verdict:
    marks = {f"p{q}": int(np.percentile(flat.lengths, q)) for q in (5, 50, 95, 99)} | {"longest": int(flat.lengths.max())}
    shown = ", ".join(f"{name} {value}" for name, value in marks.items())
    if flat.lengths.min() < 2 or (length is not None and flat.lengths.max() > length):
        return refuted("lengths", f"an example of {int(flat.lengths.min())} or {int(flat.lengths.max())} tokens; expected 2 to "
                                  f"{length or 'any number'} ({shown})", **marks)
    return proven("lengths", f"{shown} tokens", **marks)


def check_duplicates(flat: FlatExamples) -> Verdict:
    """Copies are an epoch in disguise. A few are normal, many are a doubt, and a file that holds itself twice is a mistake."""
    rows: dict[bytes, list[int]] = {}
    for row, example in enumerate(flat.examples):
        rows.setdefault(_print(example), []).append(row)
    copies = len(flat.examples) - len(rows)
    share = copies / len(flat.examples)
    if share < COPIES_SAID:
        return proven("duplicates", f"{copies} of {len(flat.examples):,} examples are exact copies of another", copies=copies)
    most = max(rows.values(), key=len)
    words = (f"{copies} of {len(flat.examples)} examples ({share:.0%}) are copies of others, such as "
             f"{' and '.join(_place(flat.examples[row]) for row in most[:2])} ({len(most)} times in all)")
    advice = "remove them, and say --num-train-epochs for more passes"
    if share >= COPIES_REFUSED:
        return refuted("duplicates", f"{words}: the file repeats itself; {advice}", copies=copies)
    return unproven("duplicates", f"{words}: they are read more often than the epochs say; {advice}", copies=copies)


def _place(example: TrainingExample) -> str:
    return example.conversation.where if example.conversation is not None else example.id


def check_overlap(flat: FlatExamples, held_out: Sequence[TrainingExample] | None, evaluation: Sequence[str]) -> Verdict:
    """Check that no example that the model is evaluated on is trained on."""
    if not held_out and not evaluation:
        return unproven("overlap", "nothing to be judged on was named; give held-out examples or evaluation texts", optional=True)
    prints, contents = {_print(example) for example in flat.examples}, {example.content for example in flat.examples}
    shared = [example.id for example in held_out or () if _print(example) in prints or example.content in contents]
    if shared:
        return refuted("overlap", f"{len(shared)} of {len(held_out or ())} held-out examples are trained on, first {shared[0]}: "
                                  "held-out numbers would measure memory", examples=len(shared))
    if not evaluation:
        return proven("overlap", f"none of {len(held_out or ())} held-out examples is trained on", held_out=len(held_out or ()))
    with scratch_folder() as folder:
        found = measure_overlap(_said(flat.examples), ((f"text {i}", text.encode()) for i, text in enumerate(evaluation)), folder)
    if found.exact or found.share > SHARED:
        return refuted("overlap", f"{found}: what the model is judged on is trained on", **found.to_json())
    return proven("overlap", str(found), **found.to_json())


def conversation_prompts(conversations: Sequence[Conversation]) -> list[str]:
    """Prompts of conversations, for `evaluation`: the last that is said to the model, or the plain prompt."""
    texts = []
    for conversation in conversations:
        told = [message["content"] for message in conversation.messages if message["role"] == "user"]
        texts.append(told[-1] if told else (conversation.plain or ("", ""))[0])
    return [text for text in texts if text]


def _said(examples: Sequence[TrainingExample]) -> Iterator[bytes]:
    """Every message, or what was asked and what was answered where there are none."""
    for example in examples:
        source = example.conversation
        texts = [message["content"] for message in source.messages] if source and source.messages else [example.asked, *example.intended]
        yield from (text.encode() for text in texts if text)


def _print(example: TrainingExample) -> bytes:
    return hashlib.blake2b(example.tokens.tobytes() + example.weight.tobytes(), digest_size=16).digest()


# ---------------------------------------------------------------- what a step is given


def check_batch(batch: Batch, examples: Mapping[str, TrainingExample | PreferencePair]) -> Verdict:
    """A batch holds the examples that it names, token for token and weight for weight, each a document of its own with places from 0, and
    padding that counts for nothing."""
    assert batch.documents is not None
    assert batch.positions is not None
    if not batch.ids:
        return refuted("batch", f"{len(batch)} rows name no example: nothing says what is learned from")
    for row, ids in enumerate(batch.ids):
        at = document = 0
        for id in ids:
            example = examples.get(str(id))
            here = slice(at, at + len(example) if example is not None else at)
            if example is None or not _same(batch.tokens[row, here], example.tokens):
                return refuted("batch", f"row {row}: the tokens are not those of {id}", row=row)
            if not _same(batch.weight[row, here], example.weight):
                return refuted("batch", f"row {row}: the weights of {id} are not those that were audited", row=row)
            lengths = [len(side) for side in example.sides] if isinstance(example, PreferencePair) else [len(example)]
            documents = np.repeat(np.arange(document, document + len(lengths)), lengths)
            if not (_same(batch.documents[row, here], documents)
                    and _same(batch.positions[row, here], np.concatenate([np.arange(length) for length in lengths]))):
                return refuted("batch", f"row {row}: {id} is not a document of its own: examples that share the row would see each other",
                               row=row)
            at, document = here.stop, document + len(lengths)
        if batch.weight[row, at:].any():
            return refuted("batch", f"row {row}: padding has weight", row=row)
    return proven("batch", f"{sum(map(len, batch.ids))} examples in {len(batch)} rows, as they were audited", rows=len(batch))


def check_supervised_weight(step: int, learned: float, due: float) -> Verdict:
    """Check the supervised weight of a step that was taken against that of its audited examples."""
    words = f"step {step} learned from tokens that weigh {learned:g}, its audited examples weigh {due:g}"
    if abs(learned - due) > 1e-4 * due:
        return refuted("batch", f"{words}: something between the batch and the loss masks or adds tokens", step=step)
    return proven("batch", words, step=step)


def check_packing(packed: PackedExamples) -> Verdict:
    """Every epoch reads each example once, in an order of its own."""
    due = Counter(example.id for example in packed.examples)
    orders = [packed.epoch_ids(epoch) for epoch in range(packed.epochs)]
    for epoch, ids in enumerate(orders):
        if (had := Counter(ids)) != due:
            return refuted("packing", f"epoch {epoch} reads {(had - due).total()} examples too often and {(due - had).total()} not at all")
        if ids in orders[:epoch] and len(ids) > 1:
            return refuted("packing", f"epoch {epoch} reads in the order of epoch {orders.index(ids)}: it is not shuffled anew")
    return proven("packing", f"{len(due):,} examples in {packed.windows:,} rows of {packed.length}, {packed.padding:.1%} of them padding; "
                             f"each once in each of {packed.epochs} epochs", rows=packed.windows, padding=packed.padding)


def _same(stream: Tensor, values: NDArray[Any]) -> bool:
    return np.array_equal(stream.cpu().numpy(), values)

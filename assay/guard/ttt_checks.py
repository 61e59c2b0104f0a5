"""Test-time training checks: no token is learned from before it is scored, the base is unchanged, the gain is shown."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.learn.ttt_loop import ChunkScored, TttEvent
from assay.model.transformer import Transformer
from assay.seeds import derive
from assay.statistics.effects import sign_flip_p
from assay.statistics.estimate import Array, Estimate, ratio
from assay.verdict import Verdict, proven, refuted, unproven

TokenCosts = list[NDArray[np.float32]]  # of each document, what each token but the first was recorded to cost
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # relative, of a cost: the same sums in another shape
Reading = Callable[[Sequence[Sequence[int]]], TokenCosts]


def causality_cuts(chunk: int, length: int) -> list[int]:
    """Places at which causality is tested: within every chunk of a document of so many tokens, the last and ragged one too, and where the
    third begins. A chunk that is learned before it is scored shows in its own first tokens, whatever is undone afterwards. The first token
    is predicted by nothing."""
    spans = [(start, min(start + chunk, length)) for start in range(1, length, chunk)]
    within = {start + (stop - start + 1) // 2 for start, stop in spans}
    return sorted(cut for cut in within | {1 + 2 * chunk} if cut < length)


def check_causality(reading: Reading, documents: Sequence[Sequence[int]], cuts: Sequence[int], vocab: int, *,
                    shared_chunk: int | None = None) -> Verdict:
    """Each document in turn is read again with every token from a cut on replaced by another: scores before the cut, and all scores
    of the other documents, must be the same bits. A cut within a chunk shows what the chunk's own later tokens did to it.

    Documents that share an adapter, and are read side by side in chunks of `shared_chunk`, may differ from the chunk after the cut's on.
    """
    before = reading(documents)
    compared, moved, tried = 0, 0, [(at, cut) for at, tokens in enumerate(documents) for cut in cuts if cut < len(tokens)]
    for at, cut in tried:
        after = reading([changed_from(tokens, cut, vocab) if number == at else tokens for number, tokens in enumerate(documents)])
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            past = cut - 1 if number == at else len(old) if shared_chunk is None else -(-cut // shared_chunk) * shared_chunk
            wrong = np.flatnonzero(old[:past].view(np.int32) != new[:past].view(np.int32))  # score i is that of token i + 1
            if wrong.size:
                return refuted("causality", f"tokens of document {at} from {cut} on were replaced, and the score of document {number}'s "
                               f"token {wrong[0] + 1} went from {old[wrong[0]]:.6g} to {new[wrong[0]]:.6g} nats: it was scored by what "
                               "had seen the future", cut=cut, document=number, token=int(wrong[0]) + 1, changed=int(wrong.size))
            compared += min(past, len(old))
        moved += int((before[at][cut - 1 :] != after[at][cut - 1 :]).sum())
    if not moved:
        return unproven("causality", "replacing tokens changed no score at all, not even their own: the reading does not look at them")
    return proven("causality", f"{compared} scores are the same bits when the tokens after them are others ({len(tried)} cuts), and "
                  f"{moved} scores of replaced tokens are not", compared=compared, moved=moved)


@torch.no_grad()
def check_target_unseen(model: Transformer, recorded: NDArray[np.float32], tokens: Sequence[int], places: Sequence[int]) -> Verdict:
    """Recorded costs are those of a model that was given only what stands before the token: what is not there cannot be seen.

    For tokens that were scored before any step, since the model here is without a patch; in another shape, hence the bound.
    """
    bound = _BOUNDS[model.embed.weight.dtype]
    for place in places:
        states = model.hidden(torch.tensor([tokens[:place]], device=model.embed.weight.device))
        due = float(-model.logits(states[:, -1]).float().log_softmax(-1)[0, tokens[place]])
        if not abs(due - recorded[place - 1]) <= bound * max(1.0, due):
            return refuted("sight", f"token {place} was scored {recorded[place - 1]:.6g} nats, and costs {due:.6g} where it is not shown: "
                           "its score has seen the token itself", token=place)
    return proven("sight", f"{len(places)} tokens cost what they were scored, within {bound:g}, where they are not shown")


def changed_from(tokens: Sequence[int], cut: int, vocab: int) -> list[int]:
    """Tokens of which each from `cut` on is another one."""
    offsets = np.random.default_rng(derive(0, "causality", cut)).integers(1, vocab, len(tokens))
    return [*tokens[:cut], *((token + int(offset)) % vocab for token, offset in zip(tokens[cut:], offsets[cut:], strict=True))]


def token_costs(events: Iterable[TttEvent], documents: int) -> TokenCosts:
    """Recorded cost of each document's tokens."""
    found: list[list[NDArray[np.float32]]] = [[] for _ in range(documents)]
    for event in events:
        for one in event:
            if isinstance(one, ChunkScored):
                found[one.document].append(one.losses)
    return [np.concatenate(parts) for parts in found]


def check_score_order(events: Sequence[Mapping[str, Any]], tokens: Sequence[int], *, warm: bool, carry_over: bool = False) -> Verdict:
    """The ledger of scores, read back: each chunk was scored once, in order, by the adapter that the step on the chunk before had
    left, and only then stepped on; every document began with left factors of 0 and, unless `warm`, with the first right ones. Where
    one adapter is carried over, every document began with what all steps before had left.

    `tokens` is how many each document has to be scored on.
    """
    order = _Order(warm, carry_over)
    for event in events:
        if carry_over and event["kind"] == "update" and len(left := {(row["adapter"], row["steps"]) for row in event["rows"]}) > 1:
            return refuted("order", f"ledger of scores, line {event['seq'] + 1}: one step left {len(left)} adapters: they are not carried "
                           "over", line=event["seq"] + 1)
        for row in event.get("rows", ()):
            if wrong := order.follow(event["kind"], row):
                return refuted("order", f"ledger of scores, line {event['seq'] + 1}: document {row['document']}: {wrong}",
                               line=event["seq"] + 1, document=row["document"])
    short = [number for number, count in enumerate(tokens) if order.tokens.get(number, 0) != count]
    if short:
        return refuted("order", f"document {short[0]} was scored on {order.tokens.get(short[0], 0)} tokens of {tokens[short[0]]}")
    return proven("order", f"{order.scores} chunks were each scored before the step that learned from them, by the adapter that the "
                  f"{order.updates} steps before had left", scores=order.scores, updates=order.updates)


class _Order:
    """State that the ledger has told so far: each slot's document, its adapter, and whether its last chunk is scored."""

    def __init__(self, warm: bool, carry_over: bool):
        self.warm, self.carry_over, self.scores, self.updates = warm, carry_over, 0, 0
        self.carried: dict[str, Any] | None = None  # the adapter of all slots
        self.first: str | None = None
        self.slots: dict[int, dict[str, Any]] = {}
        self.tokens: dict[int, int] = {}

    def follow(self, kind: str, row: Mapping[str, Any]) -> str | None:
        """Follow one row of the ledger; returns what is wrong with it after those before it."""
        if kind == "begin":
            return self._begin(row)
        slot = self.slots.get(row["slot"])
        if slot is None or slot["document"] != row["document"]:
            return f"slot {row['slot']} had not begun it"
        return self._score(slot, row) if kind == "score" else self._update(slot, row)

    def _begin(self, row: Mapping[str, Any]) -> str | None:
        self.first = self.first or row["adapter"]
        learned = {"adapter": row["adapter"], "steps": 0}
        if self.carry_over:
            learned = self.carried = self.carried or learned
        self.slots[row["slot"]] = {"document": row["document"], "learned": learned, "due": 0, "scored": None}
        if row["adapter"] != learned["adapter"]:
            return (f"it began with adapter {row['adapter']}; the one that the documents before it left is {learned['adapter']}: it was "
                    "not carried over")
        if row["left"] != 0 and not learned["steps"]:
            return f"it began with left factors of norm {row['left']:.3g}, not 0: what another document taught was still there"
        if not (self.warm or self.carry_over) and row["adapter"] != self.first:
            return f"it began with adapter {row['adapter']}, not with the first one, {self.first}: it was not reset"
        return None

    def _score(self, slot: dict[str, Any], row: Mapping[str, Any]) -> str | None:
        if row["chunk"] != slot["due"]:
            return f"chunk {row['chunk']} was scored where chunk {slot['due']} was due"
        learned = slot["learned"]
        if (row["adapter"], row["steps"]) != (learned["adapter"], learned["steps"]):
            return (f"chunk {row['chunk']} was scored by adapter {row['adapter']} after {row['steps']} steps; the one that the chunks "
                    f"before it left is {learned['adapter']} after {learned['steps']}")
        slot |= {"due": row["chunk"] + 1, "scored": row["chunk"]}
        self.tokens[row["document"]] = self.tokens.get(row["document"], 0) + row["tokens"]
        self.scores += 1
        return None

    def _update(self, slot: dict[str, Any], row: Mapping[str, Any]) -> str | None:
        if row["chunk"] != slot["scored"]:
            return f"a step was taken on chunk {row['chunk']} before it was scored, or twice"
        slot["scored"] = None
        slot["learned"] |= {"adapter": row["adapter"], "steps": row["steps"]}
        self.updates += 1
        return None


_LEVEL = 0.95


def check_base_unchanged(before: Mapping[str, str], after: Mapping[str, str]) -> Verdict:
    """Every tensor's sha256, before anything was read and once all was."""
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        return refuted("base", f"{len(changed)} of {len(before)} tensors of the model are not as they were: {', '.join(changed[:3])}",
                       changed=changed)
    return proven("base", f"all {len(before)} tensors of the model are as they were, bit for bit")


def ttt_gain(bits_with: Array, bits_without: Array, bytes_: Array) -> Estimate:
    """Bits per byte that were saved, over all bytes; its interval is over documents, each paired with itself."""
    return ratio(bits_without - bits_with, bytes_, level=_LEVEL)


def check_ttt_gain(bits_with: Array, bits_without: Array, bytes_: Array, *, carry_over: bool = False) -> Verdict:
    """Check the gain of test-time training: shown where the interval leaves out 0 and so does an exact test: were there no gain, each
    document would be as likely to lose."""
    found, p = ttt_gain(bits_with, bits_without, bytes_), sign_flip_p(bits_without - bits_with)
    words = f"{found} bits per byte saved, sign flips p = {p:.2g}" + (
        ", in this order of the documents: each has learned from those before it" if carry_over else "")
    shown = p <= 1 - _LEVEL
    if shown and found.low > 0:
        return proven("gain", f"test-time training helps: {words}", gain=found.mean, p=p)
    if shown and found.high < 0:
        return refuted("gain", f"test-time training hurts: {words}; lower --learning-rate or --steps-per-chunk", gain=found.mean, p=p)
    return unproven("gain", f"not shown, either way: {words}; read more documents", gain=found.mean, p=p)


def check_document_regressions(bits_with: Array, bits_without: Array, names: Sequence[str], bound: float) -> Verdict:
    """Check that no document costs more than (1 + bound) times what it costs the model alone: a mean can hide a document that collapsed."""
    lost = bits_with / bits_without - 1
    worse, worst = int((lost > 0).sum()), int(lost.argmax())
    words = f"{worse} of {len(names)} documents got worse"
    if worse:
        words += f", {names[worst]} most: {bits_without[worst]:.0f} bits became {bits_with[worst]:.0f} ({lost[worst]:+.2%})"
    evidence = {"worse": worse, "worst": names[worst], "lost": float(lost[worst])}
    if not lost[worst] <= bound:
        return refuted("regressions", f"{words}; allowed is {bound:.1%}", **evidence)
    return proven("regressions", f"{words}; allowed is {bound:.1%}", **evidence)


def check_factor_drift(norms: Sequence[float], bound: float) -> Verdict:
    """Check that right factors that are kept from document to document stay of the size they began with. `norms` are relative to the
    first."""
    values = np.asarray(norms, dtype=np.float64)
    if not values.size:
        return unproven("drift", "no document began with kept factors; read more documents than there are slots")
    words = (f"the right factors that {values.size} documents were handed had {values.min():.3g} to {values.max():.3g} times the norm of "
             f"the first, {values[-1]:.3g} in the end")
    if not ((values >= 1 / bound) & (values <= bound)).all():  # so said, that what is no number is not within
        return refuted("drift", f"{words}; allowed is {1 / bound:.3g} to {bound:.3g}: they run away or die out, so that a seed or a longer "
                       "text can end elsewhere. Change --weight-decay or --learning-rate, or let every document begin afresh",
                       norms=list(map(str, norms)))
    return proven("drift", f"{words}; allowed is {1 / bound:.3g} to {bound:.3g}", low=float(values.min()), high=float(values.max()))

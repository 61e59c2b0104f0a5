"""Due replies: what a served model must answer to a question, worked out from the model alone.

Logits come from plain passes over whole texts, everything after them is computed in float64: nothing of the server, its engine, its
sampler or its detokenizer takes part, only the model, its tokenizer and its chat template. What a draw should be cannot be worked out;
under which distribution it was drawn can, by its log-probabilities. Shapes: T places, D width, V vocabulary.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from assay.model.placement import uncompiled
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer

Choice = Mapping[str, Any]  # of a reply
TokenScores = list[tuple[float, list[tuple[str, float]]]]  # at each place: of the token that was drawn, and the likeliest with theirs
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
NEW, SEED = 3, 17  # tokens of an answer, and the seed that it is drawn at
USUAL_NEW = 16  # tokens of a text where nobody says how many, as OpenAI has it
PLAIN_SOFTMAX: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # the default
# Distances of logits, or shares, below which rounding decides which token stays or is the likeliest; and nats a token, in the mean of one
# completion, between two ways to compute: 1e-6 seen in fp32, 0.1 of SmolLM2-135M in bf16.
CUT_IN_DOUBT = {torch.float32: 1e-3, torch.bfloat16: 0.5}
SAME_TO = {torch.float32: 1e-3, torch.bfloat16: 0.3}
UNLIKELY = -12.0  # nats: draws that are less likely are not the same by chance
HEAD_ROWS = 16384  # of the output matrix that are widened at once


class Misanswered(Exception):
    """What a server answered that it should not have."""


def require(condition: bool, words: str) -> None:
    if not condition:
        raise Misanswered(words)


@dataclass(frozen=True)
class ServedModel:
    """A model as a server says that it serves it. `calls`: whether a call of a tool can be demanded of it, where forms of answers can."""

    name: str
    version: str
    model: Transformer
    tokenizer: Tokenizer
    stop_ids: Collection[int]
    length: int
    dtype: torch.dtype
    calls: bool
    no_forms: str | None = None  # why no form can be demanded of its answers
    passes: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # by prompt and completion: logits that predict the completion

    @property
    def exact(self) -> bool:
        return self.dtype == torch.float32

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Logits that predict each id of a completion, by one pass over the whole text; they are not rounded."""
        text, model = (*prompt, *ids), self.model
        if text not in self.passes:
            with uncompiled():
                states_TD = model.hidden(torch.tensor([text], device=model.embed.weight.device))[0, len(prompt) - 1 : -1]
            head_VD = model.head_weight().to(states_TD.dtype)
            logits_TV = torch.cat([states_TD.float() @ rows.float().T for rows in head_VD.split(HEAD_ROWS)], -1)
            cap = model.config.softcap
            self.passes[text] = (logits_TV if cap is None else cap * torch.tanh(logits_TV / cap)).cpu()
        return self.passes[text]

    def rows(self, prompt: Sequence[int], ids: Sequence[int], how: Mapping[str, float]) -> Iterator[Tensor | None]:
        """Log-probabilities of the whole vocabulary at each place of a completion; None where rounding decides which tokens stay."""
        for place, logits_V in enumerate(self.logits(prompt, ids)):
            yield due_row(logits_V.double(), {*prompt, *ids[:place]}, how, CUT_IN_DOUBT[self.dtype])


@dataclass(frozen=True)
class KnownQuestion:
    """A request, and what its answer follows from: the ids of its prompts, and how tokens are drawn where no form decides it too."""

    served: ServedModel
    path: str
    asked: dict[str, Any]
    prompts: Sequence[Sequence[int]]
    how: Mapping[str, float] | None = None

    @property
    def body(self) -> dict[str, Any]:
        usual = {"model": self.served.name, "max_tokens": NEW, "seed": SEED, "return_token_ids": True}
        return usual | self.asked | ({"stream_options": {"include_usage": True}} if self.asked.get("stream") else {})

    @property
    def choices(self) -> int:
        """Choices of each prompt."""
        return self.asked.get("n", 1)

# ---------------------------------------------------------------- what is due of a whole reply


def check_reply(question: KnownQuestion, reply: Mapping[str, Any]) -> list[Choice]:
    """The choices of a reply, each looked at: ids, text, end, log-probabilities."""
    served = question.served
    kind = "chat.completion" if question.path == CHATS else "text_completion"
    told, due = (reply["object"], reply["model"], reply["seed"]), (kind, served.name, SEED)
    require(told == due, f"a reply says of itself {told}, {due} is right")
    require(reply["system_fingerprint"] == served.version,
            f"a reply is said to come from {reply['system_fingerprint']}, the weights are {served.version}")
    found = [choice["index"] for choice in reply["choices"]]
    require(found == [*range(question.choices * len(question.prompts))],
            f"{question.choices} × {len(question.prompts)} choices were asked for, and came as {found}")
    for choice in reply["choices"]:
        check_choice(question, choice, question.prompts[choice["index"] // question.choices])
    check_usage(question, reply)
    return reply["choices"]


def check_usage(question: KnownQuestion, reply: Mapping[str, Any]) -> None:
    prompt, said = sum(map(len, question.prompts)), sum(len(choice["token_ids"]) for choice in reply["choices"])
    due = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    require(reply["usage"] == due, f"a reply counts {reply['usage']}, {due} are right")


def check_choice(question: KnownQuestion, choice: Choice, prompt: Sequence[int]) -> None:
    check_ids(question, choice, prompt)
    require("message" not in choice or choice["message"]["role"] == "assistant", "the role of an answer is not assistant")
    if not question.asked.get("tools"):
        check_text(question, choice)
    if not question.asked.get("logprobs") and question.asked.get("logprobs") != 0:
        require(choice["logprobs"] is None, "log-probabilities came though nobody asked for them")
    elif question.how is not None:
        check_logprobs(question, choice, prompt)


def check_ids(question: KnownQuestion, choice: Choice, prompt: Sequence[int]) -> None:
    ids, most, stops = choice["token_ids"], question.body["max_tokens"] or USUAL_NEW, {*question.served.stop_ids}
    told = choice["prompt_token_ids"]
    require(told == [*prompt], f"a prompt of {len(prompt)} ids was answered as another of {len(told)}: {told[:40]} instead of "
            f"{[*prompt][:40]}")
    ended = bool(ids) and (ids[-1] in stops or len(ids) == most or "stop" in question.asked)
    require(ended and len(ids) <= most and not stops & {*ids[:-1]},
            f"a completion of {len(ids)} ids, {ids}, where {most} are due and {sorted(stops)} stop it")


def check_text(question: KnownQuestion, choice: Choice) -> None:
    tokenizer, ids = question.served.tokenizer, choice["token_ids"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    whole, stopped = tokenizer.decode(ids, special=False), ids[-1] in question.served.stop_ids
    if cut := [whole.index(stop) for stop in question.asked.get("stop", ()) if stop in whole]:
        before = tokenizer.decode(ids[:-1], special=False)
        require(not any(stop in before for stop in question.asked["stop"]), f"{ids} go on after {before!r}, which has a stop string")
        whole, stopped = whole[: min(cut)], True
    require(text == whole, f"the ids {ids} are shown as {text!r}; {whole!r} is right")
    due = "stop" if stopped else "length"
    require(choice["finish_reason"] == due, f"a completion of {ids} is said to have ended by {choice['finish_reason']!r}; {due!r} is right")

# ---------------------------------------------------------------- what is due of log-probabilities


def check_logprobs(question: KnownQuestion, choice: Choice, prompt: Sequence[int]) -> None:
    """Each token's log-probability, and the likeliest tokens with theirs, against those of a plain pass."""
    assert question.how is not None
    served, ids, asked = question.served, choice["token_ids"], question.asked
    most = asked.get("top_logprobs", 0) if question.path == CHATS else asked["logprobs"]
    under = PLAIN_SOFTMAX if asked.get("logprobs_under") == "model" else question.how
    apart: list[float] = []
    for id, row_V, (score, likeliest) in zip(ids, served.rows(prompt, ids, under), told_scores(question, choice), strict=True):
        if row_V is None:
            continue
        due = float(row_V[id])
        require(math.isfinite(due), f"id {id} was drawn, which {dict(under)} leave no chance")
        apart += [abs(score - due), *ranked_apart(served, row_V, likeliest, most)]
    mean = sum(apart) / max(1, len(apart))
    require(mean <= SAME_TO[served.dtype], f"log-probabilities are {mean:.2g} nats from those under {dict(under)}, bound "
            f"{SAME_TO[served.dtype]:g}")


def ranked_apart(served: ServedModel, row_V: Tensor, likeliest: Sequence[tuple[str, float]], most: int) -> list[float]:
    """How far the likeliest tokens' log-probabilities are from those due; the first is the likeliest where rounding leaves no doubt."""
    best = row_V.topk(min(most, int(row_V.isfinite().sum())))
    values, indices = best.values.tolist(), best.indices.tolist()
    require(len(likeliest) == len(values), f"{most} likeliest tokens were asked for, {len(values)} are due, and {len(likeliest)} are named")
    if len(values) > 1 and values[0] - values[1] > CUT_IN_DOUBT[served.dtype]:
        require(likeliest[0][0] == served.tokenizer.piece(indices[0]), f"{likeliest[0]} is named the likeliest token, id {indices[0]} is")
    return [abs(told - due) for (_, told), due in zip(likeliest, values, strict=True)]


def told_scores(question: KnownQuestion, choice: Choice) -> TokenScores:
    """Log-probabilities as a choice names them, once its tokens are shown as they should be."""
    tokenizer, told, ids = question.served.tokenizer, choice["logprobs"], choice["token_ids"]
    pieces = [shown_piece(tokenizer, id) for id in ids]
    if question.path == TEXTS:
        places = [sum(map(len, pieces[:place])) for place in range(len(pieces))]
        require(told["tokens"] == pieces and (question.asked.get("stream", False) or told["text_offset"] == places),
                f"the ids {ids} are shown as {told['tokens']} at {told['text_offset']}; {pieces} at {places} are right")
        return [(score, [*best.items()]) for score, best in zip(told["token_logprobs"], told["top_logprobs"], strict=True)]
    for id, piece, entry in zip(ids, pieces, told["content"], strict=True):
        data = tokenizer.bytes_of(id)
        require((entry["token"], entry["bytes"]) == (piece, None if data is None else [*data]),
                f"id {id} is shown as {entry['token']!r} with the bytes {entry['bytes']}")
    return [(entry["logprob"], [(one["token"], one["logprob"]) for one in entry["top_logprobs"]]) for entry in told["content"]]


def shown_piece(tokenizer: Tokenizer, id: int) -> str:
    """A token as it is displayed; where it decodes to a plain word of its own, as this word."""
    piece, word = tokenizer.piece(id), tokenizer.decode([id]).strip()
    if word.isascii() and word.isalpha() and id not in tokenizer.special_ids and not piece.startswith("<0x"):
        require(piece.strip() == word, f"id {id}, which is {word!r}, is displayed as {piece!r}")
    return piece


def due_row(logits_V: Tensor, seen: Collection[int], how: Mapping[str, float], near: float) -> Tensor | None:
    """The distribution that is drawn from, by its definition: penalty, temperature, top-k, then of what is left top-p, and min-p."""
    logits_V = logits_V.clone()
    for id in seen if how["repetition_penalty"] != 1 else ():
        logits_V[id] *= how["repetition_penalty"] if logits_V[id] < 0 else 1 / how["repetition_penalty"]
    if how["temperature"] == 0:
        best = logits_V.topk(2).values
        greedy = torch.where(logits_V == best[0], 0.0, -math.inf)
        return greedy if float(best[0] - best[1]) > near else None
    scaled, order = (logits_V / how["temperature"]).sort(descending=True)
    count, doubtful = len(scaled), False
    if 0 < how["top_k"] < count:
        count = int(how["top_k"])
        doubtful = float(scaled[count - 1] - scaled[count]) < near
    shares = scaled[:count].softmax(-1)
    before = shares.cumsum(-1) - shares
    if how["top_p"] < 1:
        doubtful = doubtful or bool(((before - how["top_p"]).abs() < near).any())
        count = int((before < how["top_p"]).sum())
    if how["min_p"] > 0:
        edge = scaled[0] + math.log(how["min_p"])
        doubtful = doubtful or bool(((scaled[:count] - edge).abs() < near).any())
        count = min(count, int((scaled >= edge).sum()))
    found = torch.full_like(logits_V, -math.inf)
    found[order[:count]] = scaled[:count].log_softmax(-1)
    return None if doubtful else found


# ---------------------------------------------------------------- what is due of draws


def require_same_draws(served: ServedModel, some: Sequence[Choice], again: Sequence[Choice]) -> None:
    """One seed draws one text, however it was asked for; where numbers are rounded to half precision, but for its rounding.

    Only draws among few tokens can be compared: in the tail of a whole vocabulary the last bit decides between neighbours.
    """
    for one, two in zip(some, again, strict=True):
        require(not served.exact or one["token_ids"] == two["token_ids"],
                f"the same request at the same seed is answered with {one['token_ids']} and {two['token_ids']}")


def require_own_draws(pairs: Sequence[tuple[Choice, Choice]]) -> None:
    """Two choices of one prompt are drawn independently: not all pairs are alike, unless this is likely."""
    likely = sum(logprob for one, _ in pairs for logprob in drawn_logprobs(one))
    require(likely > UNLIKELY or any(one["token_ids"] != two["token_ids"] for one, two in pairs),
            f"two choices of one prompt are the same for each of {len(pairs)} prompts, at a log-probability of {likely:.3g}")


def drawn_logprobs(choice: Choice) -> list[float]:
    told = choice["logprobs"]
    return [entry["logprob"] for entry in told["content"]] if "message" in choice else told["token_logprobs"]

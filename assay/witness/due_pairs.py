"""Due pairs: preferences and single answers as two texts side by side, and what these cost by DPO, KTO and Bradley–Terry.

A pair's loss is no sum over tokens. So its two log-probabilities are summed first, and a token then costs the slope of the loss there:
the same value, and the same gradient. The reference's log-probabilities come from the parent's bytes, stored or live in the run alike.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.witness.due_gradient import TOKENS_TOGETHER, CostOfTokens, TwinModel, a_few_at_a_time, cross_entropy, right_padded
from assay.witness.due_rows import DueText, MixedPlan, PackedPlan, kept_contents
from assay.witness.due_texts import NotWitnessed, Renderer, Row, file_rows, fitted, named_sources, plain_message, read_tools

PAIRED, REWARD_TOKEN_NAME = ("Dpo", "Kto", "RewardModel"), "<|reward|>"
PROMPTS_APART, MOST_SIDES = 10, 4  # different prompts from which on those are held out; sides of full length that a row has room for
READ_COLUMNS = ("prompt", "chosen", "rejected", "tools")
FIRST, SECOND = "first", "second"


class OneAnswer(Row):
    """A prompt with one answer to it, as the renderer takes it."""

    def __init__(self, name: str, prompt: Any, said: Any, tools: Any = None):
        self.name, self.content, self.tools = name, name.rsplit(":", 1)[1].partition("#")[0], tools
        self.plain = (prompt, said) if isinstance(said, str) else None
        self.messages, self.learned_from = ([], 0) if isinstance(said, str) else ([*prompt, *said], len(prompt))


class ReadPair(NamedTuple):
    """A row as it was read; of a single answer, which is `label` 1 or −1, `second` is made once all are rendered."""

    name: str
    asked: str  # a digest of the prompt
    first: OneAnswer
    second: OneAnswer | None
    label: float = 1.0


class DuePair(NamedTuple):
    name: str
    first: DueText
    second: DueText
    label: float


def digest_of(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]

# ---------------------------------------------------------------- rows


def said_pair(file: str, number: int, values: Mapping[str, Any]) -> ReadPair:
    columns = {name: values[name] for name in READ_COLUMNS if values.get(name) is not None}
    if "chosen" not in columns or "rejected" not in columns:
        raise NotWitnessed(f"{file}: row {number} has the columns {', '.join(values)}, which the witness does not know")
    name = f"{file}:{number}:{digest_of(columns)}"
    texts = all(isinstance(columns[each], str) for each in ("prompt", "chosen", "rejected") if each in columns)
    prompt, chosen, rejected = text_sides(columns) if texts else message_sides(columns)
    first, second = (OneAnswer(f"{name}#{side}", prompt, said, None if texts else read_tools(values))
                     for side, said in (("chosen", chosen), ("rejected", rejected)))
    return ReadPair(name, digest_of(prompt), first, second)


def text_sides(columns: Mapping[str, Any]) -> tuple[str, str, str]:
    """Prompt, chosen and rejected text. Without a prompt, what both begin with is one; a space at its end belongs to the answers."""
    chosen, rejected = columns["chosen"], columns["rejected"]
    if "prompt" in columns:
        return columns["prompt"], chosen, rejected
    shared = len(list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
    if shared and chosen[shared - 1] == " ":
        shared -= 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def message_sides(columns: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Prompt, chosen and rejected messages. Without a list of prompt messages, those that both begin with; what one side ends with is no
    part of it."""
    chosen, rejected = ([plain_message(turn) for turn in columns[side]] for side in ("chosen", "rejected"))
    if isinstance(columns.get("prompt"), list):
        return [plain_message(turn) for turn in columns["prompt"]], chosen, rejected
    prompt = [one for one, _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))]
    while prompt and prompt[-1]["role"] == "assistant" and len(prompt) in (len(chosen), len(rejected)):
        prompt.pop()
    return prompt, chosen[len(prompt):], rejected[len(prompt):]


def said_answers(file: str, number: int, values: Mapping[str, Any]) -> list[ReadPair]:
    """Answers of a KTO file: a labelled row, or a pair as two of them."""
    if values.get("label") is None and values.get("chosen") is not None:
        pair = said_pair(file, number, values)
        assert pair.second is not None
        return [ReadPair(side.name, pair.asked, side, None, label) for side, label in ((pair.first, 1.0), (pair.second, -1.0))]
    columns = {name: values.get(name) for name in ("prompt", "completion", "label")}
    prompt, said = columns["prompt"], columns["completion"]
    tools = None if isinstance(said, str) else read_tools(values)
    if not isinstance(said, str):
        prompt, said = ([plain_message(turn) for turn in turns] for turns in (prompt or (), said or ()))
    name = f"{file}:{number}:{digest_of(columns)}"
    return [ReadPair(name, digest_of(columns["prompt"]), OneAnswer(name, prompt, said, tools), None, 1.0 if columns["label"] else -1.0)]


def learned_rows(options: Mapping[str, Any], recipe: str) -> list[ReadPair]:
    """Training rows: all rows of all files but those that are held out, with all of their prompt where there are enough of those."""
    rows = list[ReadPair]()
    for path in (Path(file) for file, _ in named_sources(options)):
        for number, values in enumerate(islice(file_rows(path), options.get("limit")), 1):
            rows += said_answers(path.name, number, values) if recipe == "Kto" else [said_pair(path.name, number, values)]
    if options["held_out_data"] is not None:
        return rows
    by_prompt = len({row.asked for row in rows}) >= PROMPTS_APART
    contents = [row.asked if by_prompt else row.first.content for row in rows]
    kept = kept_contents(contents, options["held_out"], options["seed"])
    return [row for row, content in zip(rows, contents, strict=True) if content in kept]

# ---------------------------------------------------------------- texts and their order


class PairPlan:
    """The pairs that are trained on, in the order of their rows."""

    def __init__(self, folder: Path, options: Mapping[str, Any], recipe: str):
        renderer = Renderer(folder, {**options, "roles": ("assistant",), "turns": "together"})
        said = learned_rows(options, recipe)
        pairs = answers_and_others(renderer, said, options) if recipe == "Kto" else preferred_pairs(renderer, said, options)
        self.reward_token = renderer.vocabulary.token_to_id(REWARD_TOKEN_NAME)
        self.pairs = {pair.name: pair for pair in pairs}
        sides = max(2, min(MOST_SIDES if options["packing"] else 2, options["batch_tokens"] // options["max_length"]))
        whole = [DueText(pair.name, pair.first.tokens + pair.second.tokens, pair.first.weights + pair.second.weights) for pair in pairs]
        wide, sources = {**options, "max_length": sides * options["max_length"]}, named_sources(options)
        self.plan: PackedPlan | MixedPlan = PackedPlan(whole, wide) if sources[0][1] is None else MixedPlan(whole, sources, wide)

    @property
    def steps(self) -> int:
        return self.plan.steps

    def due(self, step: int) -> list[list[DuePair]]:
        return [[self.pairs[text.name] for text in row] for row in self.plan.due(step)]


def side_texts(row: Sequence[DuePair]) -> list[DueText]:
    return [side for pair in row for side in (pair.first, pair.second)]


def preferred_pairs(renderer: Renderer, said: Sequence[ReadPair], options: Mapping[str, Any]) -> list[DuePair]:
    """Pairs with both sides cut alike; a pair goes where one side does, and where nothing is left to prefer."""
    found = []
    for row in said:
        assert row.second is not None
        sides = [fitted(renderer.texts(side)[0], options["max_length"], options["too_long"]) for side in (row.first, row.second)]
        first, second = sides
        if first is not None and second is not None and first.tokens != second.tokens:
            found.append(due_pair(row, first, second))
    return found


def answers_and_others(renderer: Renderer, said: Sequence[ReadPair], options: Mapping[str, Any]) -> list[DuePair]:
    """Each answer, and beside it its prompt with the answer before it that says something else to another prompt."""
    kept = [(row, text) for row in said
            if (text := fitted(renderer.texts(row.first)[0], options["max_length"], options["too_long"])) is not None and any(text.weights)]
    found = []
    for place, (row, own) in enumerate(kept):
        apart = (text for other, text in (kept[place - back] for back in range(1, len(kept)))
                 if other.asked != row.asked and from_learned(text)[0] != from_learned(own)[0])
        tokens, weights = from_learned(next(apart, kept[place - 1][1]))
        begin = len(own.tokens) - len(from_learned(own)[0])
        weights = (own.weights[:begin] + weights)[:options["max_length"]]
        if not any(weights):
            weights[-1] = 1.0
        other = DueText(row.name, (own.tokens[:begin] + tokens)[:options["max_length"]], weights)
        found.append(due_pair(row, own, other))
    return found


def from_learned(text: DueText) -> tuple[list[int], list[float]]:
    """Tokens and weights from the first token that is learned."""
    begin = next(place for place, weight in enumerate(text.weights) if weight)
    return text.tokens[begin:], text.weights[begin:]


def due_pair(row: ReadPair, first: DueText, second: DueText) -> DuePair:
    return DuePair(row.name, first._replace(name=row.name, part=FIRST), second._replace(name=row.name, part=SECOND), row.label)

# ---------------------------------------------------------------- what a token costs


def pair_costs(twin: TwinModel, policy: Mapping[str, Tensor], parent: Mapping[str, Tensor], pairs: Sequence[DuePair],
               options: Mapping[str, Any], recipe: str) -> CostOfTokens:
    """Cost of the tokens of both sides, so that all of them together cost what the pairs do."""
    texts = side_texts(pairs)
    needed = recipe == "Kto" or options["loss_type"] not in ("simpo", "orpo")
    sums, theirs = summed(twin, policy, texts), summed(twin, parent, texts) if needed else {}
    places = [[(pair.name, part) for part in (FIRST, SECOND)] for pair in pairs]
    said = torch.tensor([[sums[place] for place in both] for both in places], dtype=torch.float64, requires_grad=True)
    of_parent = torch.tensor([[theirs.get(place, 0.0) for place in both] for both in places], dtype=torch.float64)
    tokens = torch.tensor([[sum(side.weights) for side in (pair.first, pair.second)] for pair in pairs], dtype=torch.float64)
    labels = torch.tensor([pair.label for pair in pairs], dtype=torch.float64)
    losses = answer_losses(said, of_parent, labels, options) if recipe == "Kto" else pair_losses(said, of_parent, tokens, options)
    slopes = torch.autograd.grad(losses.sum(), said)[0]
    known = {place: (float(slope), float(loss) / 2 / float(count))
             for both, loss, row, counts in zip(places, losses.detach(), slopes, tokens, strict=True)
             for place, slope, count in zip(both, row, counts, strict=True)}

    def costs(logits: Tensor, tokens: Tensor, texts: Sequence[DueText]) -> Tensor:
        logp = -cross_entropy(logits, tokens, texts)
        slope, value = (torch.tensor([[known[text.name, text.part][which]] for text in texts], dtype=torch.float64, device=logp.device)
                        for which in (0, 1))
        return slope * (logp - logp.detach()) + value
    return costs


def reward_costs(twin: TwinModel, policy: Mapping[str, Tensor], pairs: Sequence[DuePair], options: Mapping[str, Any],
                 token: int | None) -> CostOfTokens:
    """Cost of tokens for a reward model: the logit of its token at the end of each text is the text's reward. It costs at the last learned
    token."""
    if token is None:
        raise NotWitnessed(f"the tokenizer has no {REWARD_TOKEN_NAME}")

    def worth(logits: Tensor, texts: Sequence[DueText]) -> Tensor:
        return torch.stack([logits[row, len(text.tokens) - 1, token] for row, text in enumerate(texts)])

    found = dict[tuple[str, str], float]()
    with torch.no_grad():
        for some in a_few_at_a_time(side_texts(pairs), TOKENS_TOGETHER[twin.device.partition(":")[0]]):
            values = worth(twin.logits(policy, right_padded(some)[0].to(twin.device)), some).tolist()
            found |= {(text.name, text.part): value for text, value in zip(some, values, strict=True)}
    places = [[(pair.name, part) for part in (FIRST, SECOND)] for pair in pairs]
    said = torch.tensor([[found[place] for place in both] for both in places], dtype=torch.float64, requires_grad=True)
    chosen, rejected = said.unbind(1)
    losses = -F.logsigmoid(chosen - rejected) + options["center_rewards_coefficient"] * (chosen + rejected).square()
    slopes = torch.autograd.grad(losses.sum(), said)[0].tolist()
    known = {place: (slope, loss / 2) for both, row, loss in zip(places, slopes, losses.tolist(), strict=True)
             for place, slope in zip(both, row, strict=True)}

    def costs(logits: Tensor, tokens: Tensor, texts: Sequence[DueText]) -> Tensor:
        values, spread = worth(logits, texts), torch.zeros(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.float64, device=logits.device)
        for row, text in enumerate(texts):
            slope, value = known[text.name, text.part]
            last = max(place for place, weight in enumerate(text.weights) if weight)
            spread[row, last - 1] = (slope * (values[row] - values[row].detach()) + value) / text.weights[last]
        return spread
    return costs


@torch.no_grad()
def summed(twin: TwinModel, weights: Mapping[str, Tensor], texts: Sequence[DueText]) -> dict[tuple[str, str], float]:
    """The log-probability of what is learned of each text."""
    found = dict[tuple[str, str], float]()
    for some in a_few_at_a_time(texts, TOKENS_TOGETHER[twin.device.partition(":")[0]]):
        tokens, learned = (part.to(twin.device) for part in right_padded(some))
        totals = (-cross_entropy(twin.logits(weights, tokens), tokens, some) * learned[:, 1:]).sum(1).tolist()
        found |= {(text.name, text.part): total for text, total in zip(some, totals, strict=True)}
    return found


def pair_losses(said: Tensor, parent: Tensor, tokens: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Loss of each pair, (chosen, rejected) in the columns; as the papers write them."""
    kind, wrong = options["loss_type"], options["label_smoothing"]
    beta = options["beta"] or (2.0 if kind == "simpo" else 0.1)
    ratio, mean = said - parent, (said - parent) / tokens
    if kind == "orpo":
        chosen, rejected = mean.unbind(1)
        odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
        return -chosen - beta * F.logsigmoid(odds)
    margin = beta * (ratio if kind in ("sigmoid", "hinge", "robust") else mean).mul(torch.tensor([1.0, -1.0])).sum(1)
    if kind == "ipo":
        return (margin / beta - 1 / (2 * beta)).square()
    if kind == "hinge":
        return torch.relu(1 - margin)
    if kind == "robust":
        return (wrong * F.logsigmoid(-margin) - (1 - wrong) * F.logsigmoid(margin)) / (1 - 2 * wrong)
    if kind == "simpo":
        margin = margin - options["simpo_gamma"]
    return -(1 - wrong) * F.logsigmoid(margin) - wrong * F.logsigmoid(-margin)


def answer_losses(said: Tensor, parent: Tensor, labels: Tensor, options: Mapping[str, Any]) -> Tensor:
    """λ (1 − σ(±β (log-ratio − KL))); the KL is the mean log-ratio of the step's mismatched answers, 0 at least, and is not learned."""
    ratio = said - parent
    kl = max(0.0, float(ratio[:, 1].detach().mean())) if options["loss_type"] == "kto" else 0.0
    weight = torch.where(labels > 0, options["desirable_weight"], options["undesirable_weight"])
    return weight * (1 - torch.sigmoid(labels * options["beta"] * (ratio[:, 0] - kl)))

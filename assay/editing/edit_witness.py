"""Edit witness: contexts, second moments, targets and the solved update of an edit, each computed again one text at a time in float64.

It shares the model, the tokenizer and the records with what it watches: no batches, no padding, no caches of prefixes, no factored solves.
An update is judged by what it minimises, which says the same of every good solver: tr(Δ P Δᵀ) + ‖Δ K − R‖².
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from assay.editing.contexts import OPENINGS, Contexts
from assay.editing.facts import Fact, with_leading_space
from assay.editing.memit import EditResult
from assay.editing.moments import SAME_MOMENTS, TokenizedText
from assay.editing.targets import Target, TargetOptions
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.verdict import Verdict, proven, refuted, unproven

FACTS_AGAIN = 4  # whose targets are scored again
MOST_PASSES = 800  # of one text each
TOKENS_AGAIN = 4096  # of text, whose moments are summed again
LIKELIEST = 5  # a prefix is drawn from so many
AMONG_THEM = 0.1  # of its tokens, where none was drawn from them: text that is encoded again may be cut otherwise
SAME_TARGET = 5e-3  # of a target's loss, and of a probability
ABOVE_LEAST, FREE = 1e-3, 1e-5  # of the least cost: how far above it an update may lie; of what no update costs: added to the least


@dataclass(frozen=True)
class EditMethod:
    """Settings of the solve: λ of MEMIT; the share of text and the ridge of AlphaEdit; whether each context's key is its own column."""

    name: Literal["memit", "alphaedit"]
    weight: float
    null_share: float
    ridge: float
    each: bool = False


@torch.no_grad()
def check_contexts(model: Transformer, tokenizer: Tokenizer, contexts: Contexts, count: int) -> Verdict:
    """The bare prompt comes first, then `count` prefixes that the model itself would say."""
    drawn = contexts.prefixes[1:]
    shares = [_share_of_likeliest(model, _ids(tokenizer, prefix.removesuffix(". ")), len(_ids(tokenizer, OPENINGS[place % len(OPENINGS)])))
              for place, prefix in enumerate(drawn) if "\ufffd" not in prefix]  # bytes that are no text are not encoded as they were
    share = sum(shares) / len(shares) if shares else 1.0
    weights = contexts.weights().tolist()
    due = [0.5, *[0.5 / count] * count] if count else [1.0]
    if contexts.prefixes[0] != "" or len(drawn) != count or any(abs(a - b) > 1e-9 for a, b in zip(weights, due, strict=True)):
        return refuted("contexts", f"{len(contexts.prefixes)} contexts weigh {weights}; expected none before the prompt for one half, and "
                                   f"{count} prefixes for the other")
    if share < AMONG_THEM:
        return refuted("contexts", f"{share:.0%} of the tokens of {len(shares)} prefixes, such as {drawn[0]!r}, are among the {LIKELIEST} "
                                   "that the model would say there: they were not drawn from them")
    return proven("contexts", f"the bare prompt, and {count} prefixes; {share:.0%} of their tokens are among the model's {LIKELIEST} "
                              "likeliest")


def _share_of_likeliest(model: Transformer, ids: Sequence[int], given: int) -> float:
    """Share of the tokens after the first `given` that are among the model's likeliest there."""
    logits = model.logits(model.hidden(_row(model, ids)))[0, given - 1 : -1].float()
    said = torch.tensor(ids[given:], device=logits.device)
    better = (logits > logits.gather(-1, said[:, None])).sum(-1)
    return float((better < LIKELIEST).double().mean()) if len(said) else 1.0


@torch.no_grad()
def check_moments(model: Transformer, reading: TokenizedText, moments: Mapping[int, Tensor],
                  compute: Callable[[Transformer, Sequence[Sequence[int]], Sequence[int]], dict[int, Tensor]]) -> Verdict:
    """Check the moments by `compute` and by the witness, on all of a short text, or on the first rows of a long one."""
    rows, held = list[tuple[int, ...]](), 0
    for row in reading.rows:
        if rows and held + len(row) > TOKENS_AGAIN:
            break
        rows.append(row)
        held += len(row)
    whole = len(rows) == len(reading.rows)
    found = moments if whole else compute(model, rows, list(moments))
    sums = {layer: torch.zeros_like(moment) for layer, moment in moments.items()}
    for row in rows:
        for layer, keys in _keys(model, _row(model, row), list(moments)).items():
            sums[layer] += keys.T @ keys
    apart = {layer: float((total / held - found[layer]).norm() / (total / held).norm()) for layer, total in sums.items()}
    worst = max(apart, key=lambda layer: apart[layer])
    words = (f"second moments of {'all' if whole else 'the first'} {held} tokens, summed again row by row, differ by {apart[worst]:.1e} "
             f"at most (layer {worst}), bound {SAME_MOMENTS:g}")
    return (proven if apart[worst] <= SAME_MOMENTS else refuted)("moments", words, apart=apart[worst])


@torch.no_grad()
def check_search(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], contexts: Contexts, targets: Sequence[Target], layer: int,
                 options: TargetOptions) -> Verdict:
    """Targets of some facts: their loss and probability come out again, none is longer than it may be, none stopped too early."""
    wrong, known = [], 0
    for fact, target in list(zip(facts, targets, strict=True))[:FACTS_AGAIN]:
        places = _places(tokenizer, contexts, fact)
        essence = _subject_end(tokenizer, f"{fact.subject} is a", len(fact.subject))
        if essence is None or any(place is None for place in places):
            continue
        known += 1
        answer = tokenizer.encode(with_leading_space(fact.target))
        wrong += [f"{fact.name}: {words}" for words in _unlike_target(
            model, [place for place in places if place], essence, answer, target, layer, options)]
    if not known:
        return unproven("search", "no subject ends where a token does, as far as decoding shows, so no target was scored again",
                        optional=True)
    if wrong:
        return refuted("search", f"{len(wrong)} things are not so in {known} targets: {'; '.join(wrong[:3])}", wrong=wrong)
    return proven("search", f"{known} targets have the loss and the probability that were recorded, and are no longer than they may be")


Place = tuple[list[int], int]  # a text's tokens, and the last of its subject's


def _unlike_target(model: Transformer, places: Sequence[Place], essence: Place, answer: Sequence[int], target: Target, layer: int,
                   options: TargetOptions) -> list[str]:
    (bare, at), delta = places[0], target.delta
    start = _state(model, bare, at, layer)
    asked = [_surprise(model, (ids, place), answer, layer, delta) for ids, place in places]
    nll = math.fsum(asked) / len(asked)
    was, now = (_next_logprobs(model, essence, layer, change) for change in (torch.zeros_like(delta), delta))
    loss = nll + options.kl * float((was.exp() * (was - now)).sum()) + options.decay * float(delta.norm() / start.norm() ** 2)
    longest, probability = options.clamp * float(start.norm()), math.exp(-nll)
    return [words for words, so in (
        (f"loss {loss:.4f}, recorded {target.loss:.4f}", abs(loss - target.loss) > SAME_TARGET * max(1.0, abs(loss))),
        (f"probability {probability:.4f}, recorded {target.probability:.4f}", abs(probability - target.probability) > SAME_TARGET),
        (f"δ is {float(delta.norm()):.4g} long, at most {longest:.4g} is allowed", float(delta.norm()) > longest * (1 + 1e-4)),
        ("its state is not the prompt's with δ added", float((start + delta - target.state).norm()) > 1e-3 * float(start.norm())),
        (f"it was given up at step {target.steps} of {options.steps} with a loss of {target.loss:.3g}",
         target.steps < options.steps and target.loss >= options.enough)) if so]


@torch.no_grad()
def check_tuned(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], contexts: Contexts, edited: EditResult) -> Verdict:
    """Tuned facts, some of them: under the update each target's probability in all its contexts comes out again, one text at a time."""
    wrong, known, nothing = [], 0, torch.zeros(model.config.width)
    with contextlib.ExitStack() as added:
        for name, tensor in edited.patch.replaced.items():
            added.enter_context(_added(model, name, tensor.double() - model.get_parameter(name).detach().double().cpu()))
        for fact, target in list(zip(facts, edited.targets, strict=True))[:FACTS_AGAIN]:
            places, answer = _places(tokenizer, contexts, fact), tokenizer.encode(with_leading_space(fact.target))
            if any(place is None for place in places):
                continue
            known += 1
            found = math.exp(-math.fsum(_surprise(model, place, answer, 0, nothing) for place in places if place) / len(places))
            if abs(found - target.probability) > SAME_TARGET:
                wrong.append(f"{fact.name}: probability {found:.4f}, recorded {target.probability:.4f}")
    if not known:
        return unproven("search", "no subject ends where a token does, as far as decoding shows: no fact was scored again", optional=True)
    if wrong:
        return refuted("search", f"{len(wrong)} of {known} tuned facts are not as recorded: {'; '.join(wrong[:3])}", wrong=wrong)
    return proven("search", f"{known} tuned facts have the probability that was recorded")


def check_solution(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], contexts: Contexts, edited: EditResult,
                   moments: Mapping[int, Tensor], method: EditMethod) -> Verdict:
    """Every layer's update, in the order in which they were solved, costs no more than the least. ROME's is judged by `update`."""
    layers = sorted(moments)
    places = [_places(tokenizer, contexts, fact) for fact in facts]
    if any(place is None for of_fact in places for place in of_fact):
        return unproven("solution", "a subject does not end where a token does, as far as decoding shows: not solved again", optional=True)
    if len(layers) * sum(map(len, places)) > MOST_PASSES:
        return _check_some_keys(model, places[:FACTS_AGAIN], edited, layers, method.each)
    goal_Dn = torch.stack([target.state for target in edited.targets], 1)
    worst = 0.0
    with contextlib.ExitStack() as added:
        for done, layer in enumerate(layers):
            keys_Fn, states_Dn = _keys_and_states(model, places, layer, layers[-1], method.each)
            residual_Dn = (goal_Dn - states_Dn) / (len(layers) - done)
            if method.each:
                residual_Dn = torch.stack([residual_Dn[:, number] * weight**0.5 for number, of_fact in enumerate(places)
                                           for weight in _weights(len(of_fact))], 1)
            penalty, keys_Fn = _penalty(moments[layer], keys_Fn, method)
            name, delta = _update(edited, layer)
            worst = max(worst, _above_least(delta, residual_Dn, keys_Fn, penalty))
            added.enter_context(_added(model, name, delta))
    words = f"the updates of {len(layers)} layers cost at most {worst:.1e} of the least more than the least; bound {ABOVE_LEAST:g}"
    return (proven if worst <= ABOVE_LEAST else refuted)("solution", words, above=worst)


def _check_some_keys(model: Transformer, places: "Sequence[Sequence[Place | None]]", edited: EditResult, layers: Sequence[int],
                     each: bool) -> Verdict:
    """Check the keys of a few facts, under the updates of the layers before, where all facts in all contexts would take too long."""
    worst = 0.0
    with contextlib.ExitStack() as added:
        for layer in layers:
            due, _ = _keys_and_states(model, places, layer, layers[-1], each)
            worst = max(worst, float((edited.keys[layer][:, : due.shape[1]] - due).norm() / due.norm()))
            added.enter_context(_added(model, *_update(edited, layer)))
    words = f"the keys of {len(places)} facts in {len(layers)} layers, each text alone, differ by {worst:.1e}, bound {SAME_MOMENTS:g}"
    return (proven if worst <= SAME_MOMENTS else refuted)("solution", words, apart=worst)


def _update(edited: EditResult, layer: int) -> tuple[str, Tensor]:
    name = f"blocks.{layer}.mlp.down.weight"
    return name, sum((part.scale * part.left.double() @ part.right.double() for part in edited.patch.low_rank[name]), torch.zeros(1))


def _above_least(delta: Tensor, residual: Tensor, keys: Tensor, penalty: Tensor) -> float:
    def cost(update: Tensor) -> float:
        return float((update @ penalty * update).sum() + (update @ keys - residual).square().sum())

    least = torch.linalg.solve(penalty + keys @ keys.T, keys @ residual.T).T
    return abs(cost(delta) - cost(least)) / (cost(least) + FREE * cost(torch.zeros_like(least)))


def _penalty(moment: Tensor, keys: Tensor, method: EditMethod) -> tuple[Tensor, Tensor]:
    """P, and the keys as the method sees them."""
    identity = torch.eye(len(moment), dtype=torch.float64)
    if method.name == "memit":
        return method.weight * (moment + 1e-6 * moment.trace() / len(moment) * identity), keys
    values, vectors = torch.linalg.eigh(moment)
    values = values.clamp(min=0)
    quiet = vectors[:, values.cumsum(0) <= method.null_share * values.sum()]
    keys = quiet @ (quiet.T @ keys)
    return method.ridge * float(keys.square().sum() / keys.shape[1]) * (1 + 1e-6) * identity, keys


# ---------------------------------------------------------------- one text at a time


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, with what this tokenizer puts before every text, and without what some put after it."""
    plain, dressed = tokenizer.encode(text), tokenizer.encode(text, special=True)
    starts = [place for place in range(len(dressed)) if dressed[place : place + len(plain)] == plain]
    return dressed[: starts[0] + len(plain)] if starts else plain


def _subject_end(tokenizer: Tokenizer, text: str, stop: int) -> Place | None:
    """The text's tokens, and the first by which they say all up to `stop`; None where no token ends there."""
    ids, due = _ids(tokenizer, text), text[:stop].strip()
    for place in range(len(ids)):
        if tokenizer.decode(ids[: place + 1], special=False).strip() == due:
            return ids, place
    return None


def _places(tokenizer: Tokenizer, contexts: Contexts, fact: Fact) -> list[Place | None]:
    """The bare prompt, the prompt after each prefix, and the rephrasings."""
    after_prefixes = [_subject_end(tokenizer, prefix + fact.prompt, len(prefix) + fact.start + len(fact.subject))
                      for prefix in contexts.prefixes]
    return after_prefixes + [_subject_end(tokenizer, said.prompt, said.start + len(fact.subject)) for said in fact.rephrasings]


def _row(model: Transformer, ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)], device=model.embed.weight.device)


def _keys(model: Transformer, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """layer → what enters its down-projection, a row for each token."""
    seen: dict[int, Tensor] = {}
    handles = [model.get_submodule(f"blocks.{layer}.mlp.down").register_forward_pre_hook(
        lambda _, inputs, layer=layer: seen.__setitem__(layer, inputs[0][0].double().cpu())) for layer in layers]
    with _removed(handles):
        model.hidden(tokens)
    return seen


def _state(model: Transformer, ids: Sequence[int], at: int, layer: int) -> Tensor:
    seen: list[Tensor] = []
    with _removed([model.get_submodule(f"blocks.{layer}").register_forward_hook(lambda _, __, output: seen.append(output[0, at]))]):
        model.hidden(_row(model, ids))
    return seen[0].double().cpu()


@torch.no_grad()
def _keys_and_states(model: Transformer, places: Sequence[Sequence[Place | None]], layer: int, top: int,
                     each: bool) -> tuple[Tensor, Tensor]:
    keys, states = [], []
    for of_fact in places:
        known = [place for place in of_fact if place is not None]
        seen = [_keys(model, _row(model, ids), [layer])[layer][at] for ids, at in known]
        weighed = list(zip(seen, _weights(len(known)), strict=True))
        keys += [key * weight**0.5 for key, weight in weighed] if each else [
            sum((key * weight for key, weight in weighed), torch.zeros(1, dtype=torch.float64))]
        states.append(_state(model, *known[0], top))
    return torch.stack(keys, 1), torch.stack(states, 1)


def _weights(contexts: int) -> list[float]:
    return [0.5, *[0.5 / (contexts - 1)] * (contexts - 1)] if contexts > 1 else [1.0]


def _with_delta(model: Transformer, ids: Sequence[int], at: int, layer: int, delta: Tensor) -> Tensor:
    """(T, V) log-probabilities where δ is added to what the layer's MLP says at one place."""
    def add(_: torch.nn.Module, __: object, output: Tensor) -> Tensor:
        output = output.clone()
        output[0, at] += delta.to(output)
        return output

    with _removed([model.get_submodule(f"blocks.{layer}.mlp.down").register_forward_hook(add)]):
        return model.logits(model.hidden(_row(model, ids)))[0].double().log_softmax(-1).cpu()


def _surprise(model: Transformer, place: Place, answer: Sequence[int], layer: int, delta: Tensor) -> float:
    ids, at = place
    table = _with_delta(model, [*ids, *answer[:-1]], at, layer, delta)
    return -math.fsum(float(table[len(ids) - 1 + step, token]) for step, token in enumerate(answer)) / len(answer)


def _next_logprobs(model: Transformer, place: Place, layer: int, delta: Tensor) -> Tensor:
    return _with_delta(model, *place, layer, delta)[-1]


@contextlib.contextmanager
def _removed(handles: Sequence[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _added(model: Transformer, name: str, delta: Tensor) -> Iterator[None]:
    """The weight with the update, and afterwards its own bits."""
    weight = model.get_parameter(name)
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.add_(delta.to(weight))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(saved)

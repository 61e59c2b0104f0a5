"""Causal tracing: which layers, at which tokens, carry a fact from its subject to its answer.

The subject's embeddings are blurred by noise until the answer is lost; then single states, or the MLPs of a few layers
in a row, are put back as they were, and what that brings back of the answer's probability is their indirect effect.
Edits belong where the MLPs at the subject's last token bring back most.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from assay.editing.block_hooks import block, down_projection, hooked
from assay.editing.facts import Fact
from assay.editing.subject_tokens import SubjectSpan, locate_subject
from assay.errors import DataError, UsageError
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.seeds import generator

GROUPS = ("first subject token", "middle subject tokens", "last subject token", "first token after", "further tokens", "last token")
LAST_SUBJECT = GROUPS.index("last subject token")
_ROWS = {"cpu": 64}  # in one forward pass; elsewhere MANY
_MANY = 1024
Kind = Literal["state", "mlp"]


@dataclass(frozen=True)
class IndirectEffects:
    """Average indirect effects, [group][layer]; an MLP's entry is that of `window` layers from this one on. None: no such token."""

    state: list[list[float | None]]
    mlp: list[list[float | None]]
    window: int
    facts: tuple[str, ...]
    clean: float  # the answers' mean probability as asked
    blurred: float  # and with the subject blurred
    noise: float
    samples: int


class Restored(NamedTuple):
    """One run: which sample of the noise it has, and what is put back in it."""

    kind: Kind
    layer: int
    token: int
    sample: int


class CleanRun(NamedTuple):
    """Activations of one unblurred run, per layer (T, D), and the answer it gave."""

    states: list[Tensor]
    values: list[Tensor]
    answer: int
    probability: float


def causal_trace(model: Transformer, tokenizer: Tokenizer, facts: Sequence[Fact], *, window: int, samples: int, seed: int,
                 noise: float = 3.0) -> IndirectEffects:
    """Causal tracing over facts that the model knows; their answer is the model's own. `noise` is in standard deviations of the
    embeddings."""
    if not facts:
        raise DataError("no fact is known to this model, so nothing can be traced; name the layers, as in --layers 3-8")
    sums: dict[tuple[Kind, int, int], list[float]] = {}
    clean_chances, blurred_chances = [], []
    spans = [locate_subject(tokenizer, fact.prompt, fact.start, fact.subject, fact.name) for fact in facts]
    scale = noise * _spread(model, spans)
    for fact, span in zip(facts, spans, strict=True):
        clean = clean_run(model, span)
        shape = (span.last + 1 - span.first, model.config.width)
        blur = scale * torch.stack([torch.randn(shape, generator=generator(seed, "blur", fact.name, s)) for s in range(samples)])
        blur = blur.to(model.embed.weight)
        plain = [_probability(model, span, clean, blur, [Restored("state", -1, 0, s)], window)[0] for s in range(samples)]
        clean_chances.append(clean.probability)
        blurred_chances.append(sum(plain) / samples)
        for run, probability in _runs(model, span, clean, blur, window, samples):
            sums.setdefault((run.kind, token_group(span, run.token), run.layer), []).append(probability - plain[run.sample])
    return IndirectEffects(_table(sums, "state", model.config.depth), _table(sums, "mlp", model.config.depth - window + 1), window,
                           tuple(fact.name for fact in facts), _mean(clean_chances), _mean(blurred_chances), noise, samples)


def best_window(effects: IndirectEffects, depth: int) -> list[int]:
    """The layers whose MLPs, put back together at the subject's last token, bring back most; the model's last is not among them."""
    row = effects.mlp[LAST_SUBJECT][: depth - effects.window]
    scored = [(effect, -start) for start, effect in enumerate(row) if effect is not None]
    if not scored:
        raise UsageError(f"a window of {effects.window} layers does not fit below the last of {depth}; name the layers")
    start = -max(scored)[1]
    return list(range(start, start + effects.window))


def token_group(span: SubjectSpan, token: int) -> int:
    """Index in GROUPS of a token; a leading special token counts with the text before, which is not traced."""
    end = len(span.ids) - 1
    if token <= span.last:
        return LAST_SUBJECT if token == span.last else 0 if token == span.first else 1
    return 5 if token == end else 3 if token == span.last + 1 else 4


@torch.no_grad()
def clean_run(model: Transformer, span: SubjectSpan) -> CleanRun:
    states: list[Tensor] = []
    values: list[Tensor] = []
    depth = model.config.depth
    handles = [block(model, layer).register_forward_hook(lambda _, __, output: states.append(output[0])) for layer in range(depth)]
    handles += [down_projection(model, layer).register_forward_hook(lambda _, __, output: values.append(output[0]))
                for layer in range(depth)]
    with hooked(handles):
        tokens = torch.tensor([span.ids], device=model.embed.weight.device)
        chances = model.logits(model.hidden(tokens)[0, -1]).float().softmax(-1)
    answer = int(chances.argmax())
    return CleanRun(states, values, answer, float(chances[answer]))


def _runs(model: Transformer, span: SubjectSpan, clean: CleanRun, blur: Tensor, window: int,
          samples: int) -> Iterator[tuple[Restored, float]]:
    """Every layer and token, from the subject on, in batches."""
    depth, at_once = model.config.depth, _ROWS.get(model.embed.weight.device.type, _MANY)
    layers: dict[Kind, int] = {"state": depth, "mlp": depth - window + 1}
    runs = [Restored(kind, layer, token, sample) for kind, count in layers.items() for layer in range(count)
            for token in range(span.first, len(span.ids)) for sample in range(samples)]
    for start in range(0, len(runs), at_once):
        part = runs[start : start + at_once]
        yield from zip(part, _probability(model, span, clean, blur, part, window), strict=True)


@torch.no_grad()
def _probability(model: Transformer, span: SubjectSpan, clean: CleanRun, blur: Tensor, runs: Sequence[Restored],
                 window: int) -> list[float]:
    """The answer's probability in each run."""
    device = model.embed.weight.device
    chosen = blur[[run.sample for run in runs]]

    def blurred(_: nn.Module, arguments: tuple) -> tuple:
        x_BTD = arguments[0].clone()
        x_BTD[:, span.first : span.last + 1] += chosen.to(x_BTD.dtype)
        return (x_BTD, *arguments[1:])

    def put_back(rows: list[int], whole_TD: Tensor) -> Callable[[nn.Module, object, Tensor], Tensor]:
        tokens = [runs[row].token for row in rows]

        def hook(_: nn.Module, __: object, output_BTD: Tensor) -> Tensor:
            output_BTD = output_BTD.clone()
            output_BTD[rows, tokens] = whole_TD[tokens]
            return output_BTD

        return hook

    handles = [block(model, 0).register_forward_pre_hook(blurred)]
    for layer in range(model.config.depth):
        if rows := [i for i, run in enumerate(runs) if run.kind == "state" and run.layer == layer]:
            handles.append(block(model, layer).register_forward_hook(put_back(rows, clean.states[layer])))
        if rows := [i for i, run in enumerate(runs) if run.kind == "mlp" and run.layer <= layer < run.layer + window]:
            handles.append(down_projection(model, layer).register_forward_hook(put_back(rows, clean.values[layer])))
    with hooked(handles):
        tokens = torch.tensor([span.ids], device=device).expand(len(runs), -1)
        chances = model.logits(model.hidden(tokens)[:, -1]).float().softmax(-1)
    return chances[:, clean.answer].tolist()


def _spread(model: Transformer, spans: Sequence[SubjectSpan]) -> float:
    """The standard deviation of the embeddings of all subjects' tokens."""
    ids = sorted({id for span in spans for id in span.ids[span.first : span.last + 1]})
    return float(model.embed.weight.detach()[ids].float().std())


def _table(sums: dict[tuple[Kind, int, int], list[float]], kind: Kind, layers: int) -> list[list[float | None]]:
    return [[_mean(found) if (found := sums.get((kind, of_group, layer))) else None for layer in range(layers)]
            for of_group in range(len(GROUPS))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

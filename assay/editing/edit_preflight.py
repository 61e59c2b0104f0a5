"""Edit preflight: the right places, the right targets, keys that are the model's own, and padding that counts for nothing."""

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor

from assay.editing import block_hooks, subject_tokens, targets
from assay.editing import fact_questions as q
from assay.editing.fact_questions import FactQuestion
from assay.editing.facts import Fact, with_leading_space
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Mlp, Transformer
from assay.verdict import Verdict, proven, refuted

SAME_SURPRISE = 2e-3  # nats: what fp32 differs by when other rows stand beside one
SAME_DIRECTION = 0.9999  # an off-by-one in the product leaves 0.1, rounding takes 1e-10


def check_spans(tokenizer: Tokenizer, facts: Sequence[Fact]) -> Verdict:
    """Check, by decoding, where each fact will be edited: the tokens up to there end with the subject, and with nothing but it."""
    wrong = []
    for fact in facts:
        span = subject_tokens.locate_subject(tokenizer, fact.prompt, fact.start, fact.subject, fact.name)
        if tokenizer.decode(span.ids[span.first : span.last + 1]).lstrip() != fact.subject:
            wrong.append(f"{fact.name}: {tokenizer.decode(span.ids[span.first : span.last + 1])!r} for {fact.subject!r}")
    if wrong:
        words = f"{len(wrong)} of {len(facts)} edits would strike another place than their subject"
        return refuted("spans", f"{words}: {wrong[0]}", wrong=wrong)
    return proven("spans", f"the tokens of all {len(facts)} edits decode to their subjects")


def check_targets(tokenizer: Tokenizer, facts: Sequence[Fact]) -> Verdict:
    """The ids that the search for targets asks for, decoded after their prompt, are the prompt and the target."""
    wrong = []
    for fact in facts:
        text = tokenizer.decode([*subject_tokens.encode_prompt(tokenizer, fact.prompt), *targets.answer_ids(tokenizer, fact.target)],
                                special=False)
        if text.strip() != fact.prompt + with_leading_space(fact.target):
            wrong.append(f"{fact.name}: {text!r}")
    if wrong:
        return refuted("targets", f"{len(wrong)} of {len(facts)} targets are not what would follow their prompts: {wrong[0]}", wrong=wrong)
    return proven("targets", f"all {len(facts)} targets follow their prompts, space and all")


@torch.no_grad()
def check_keys(model: Transformer, ids: Sequence[int]) -> Verdict:
    """Check that what enters each down-projection is the product that the weights say, by its direction: a shifted product keeps its
    size."""
    entering: list[Tensor] = []
    keys: list[Tensor] = []
    blocks = [block_hooks.block(model, layer) for layer in range(model.config.depth)]
    handles = [block.mlp.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0])) for block in blocks]
    handles += [block.mlp.down.register_forward_pre_hook(lambda _, inputs: keys.append(inputs[0])) for block in blocks]
    with block_hooks.hooked(handles):
        model.hidden(torch.tensor([list(ids)], device=model.embed.weight.device))
    cosines = [float(torch.nn.functional.cosine_similarity(key.double().flatten(), _key_by_rows(cast(Mlp, block.mlp), x).flatten(), dim=0))
               for block, x, key in zip(blocks, entering, keys, strict=True)]
    worst = min(range(len(cosines)), key=lambda layer: cosines[layer])
    words = f"the keys of {len(cosines)} layers agree with their weights by cosine {cosines[worst]:.6f} at the least (layer {worst})"
    if not cosines[worst] >= SAME_DIRECTION:
        return refuted("keys", f"{words}, bound {SAME_DIRECTION}: the MLP multiplies other elements than its weights pair", cosines=cosines)
    return proven("keys", words, cosines=cosines)


def _key_by_rows(mlp: Mlp, x_BTD: Tensor) -> Tensor:
    """The plain formula in float64, gate and up rows taken apart."""
    rows = mlp.up.weight.double()
    inner = x_BTD.double() @ rows.T + (0 if mlp.up.bias is None else mlp.up.bias.double())
    half = mlp.down.in_features
    return mlp.activation(inner[..., :half]) * inner[..., half:] if mlp.gated else mlp.activation(inner)


def check_batching(model: Transformer, tokenizer: Tokenizer, asked: Sequence[FactQuestion], stop_ids: Collection[int]) -> Verdict:
    """A question gets the same reply alone and beside others of other lengths: padding counts for nothing."""
    pairs = [(one.prompt, one.answer or one.other) for one in asked]
    together, alone = q.answer_surprises(model, tokenizer, pairs), [q.answer_surprises(model, tokenizer, [pair])[0] for pair in pairs]
    worst = max((abs(a - b) for a, b in zip(together, alone, strict=True) if a is not None and b is not None), default=0.0)
    prompts = [one.prompt for one in asked]
    first = q.greedy_ids(model, tokenizer, prompts, 1, stop_ids)
    differing = [prompt for prompt, ids in zip(prompts, first, strict=True)
                 if q.greedy_ids(model, tokenizer, [prompt], 1, stop_ids)[0] != ids]
    words = f"{len(pairs)} questions alone and in one batch: surprises differ by {worst:.1e} nats, {len(differing)} first words differ"
    if worst > SAME_SURPRISE or differing:
        return refuted("batching", f"{words}: padding is counted", prompts=differing)
    return proven("batching", words, error=worst)

"""Checks of a compressed-tensors folder against its source: every weight within half a step, text as likely, greedy texts as good."""

from pathlib import Path

import torch

from assay.generate.engine import sample
from assay.generate.generation_request import Sampling
from assay.guard.llama_cpp_checks import SAID_TOKENS, LlamaReading, choice_losses, planned_reading, token_logps
from assay.model.families import from_foreign, hf_layout, to_foreign
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact, assemble_model, build_model, open_artifact
from assay.store.compressed_tensors import (
    CompressedScheme,
    compressed_weights,
    is_linear,
    layers_with_steps,
    plain_weights,
    recipe_of,
)
from assay.verdict import Verdict, proven, refuted, unproven

FULL_USE = 0.98  # of the largest code: a row whose codes stay below it wastes what few bits there are


def check_compressed(folder: Path, source: Artifact, held_out: list[list[int]] | None = None) -> list[Verdict]:
    """Three verdicts; of texts only where there is a tokenizer. Rounding that was fitted to a text is judged by rows that are
    `held_out`, and not by the nearest codes."""
    written = open_artifact(folder)
    scheme = recipe_of(written.raw.fields, str(folder)).scheme
    found = [check_rounding(written, source, scheme) if held_out is None else check_fitted(written, source, scheme, held_out)]
    if source.tokenizer is None:
        return [*found, unproven("perplexity", f"{source.path} has no tokenizer, so that no text can be compared", optional=True)]
    reading = planned_reading(source, source.tokenizer)
    before, after = (build_model(one).float().eval() for one in (source, written))
    return [*found, *judge_rounded_texts(reading, source, before, after, scheme)]


def check_rounding(written: Artifact, source: Artifact, scheme: CompressedScheme) -> Verdict:
    """Each weight is at most half a step from the source's, and each row's codes use the whole range."""
    due, farthest, count = to_foreign(hf_layout(source.config), source.tensors), 0.0, 0
    wrong, wasted, plain = list[str](), list[str](), {name for name, tensor in due.items() if is_linear(name, tensor)}
    for name, matrix, steps, codes in layers_with_steps(written.raw.fields, written.raw.tensors, str(written.path)):
        ways = (matrix - due[name].float()).abs() / steps
        farthest, count = max(farthest, float(ways.max())), count + 1
        plain.discard(name)
        if not bool((ways <= 1).all()):
            wrong.append(f"{name} ({int((ways > 1).sum())} of {ways.numel()} weights, at most {float(ways.max()):.3g} half steps)")
        used = codes.abs().amax(1)
        if bool(((used < FULL_USE * scheme.largest) & (used > 0)).any()):
            wasted.append(name)
    if plain or not count:
        return refuted("rounding", f"{len(plain)} matrices are not in codes, and {count} are: {', '.join(sorted(plain)[:3])}",
                       tensors=sorted(plain))
    if wrong:
        return refuted("rounding", f"{len(wrong)} of {count} matrices are not the source's, rounded to {scheme.name}: "
                                   f"{'; '.join(wrong[:3])}", tensors=wrong)
    if wasted:
        return refuted("rounding", f"codes of {len(wasted)} matrices leave a part of their range unused: {', '.join(wasted[:3])}: the "
                                   "scales are larger than they must be", tensors=wasted)
    return proven("rounding", f"every weight of {count} matrices is within half a step of {scheme.name} of the source's, at most "
                              f"{farthest:.3f} of it, and every row uses its codes' whole range", matrices=count, farthest=farthest)


def check_fitted(written: Artifact, source: Artifact, scheme: CompressedScheme, rows: list[list[int]]) -> Verdict:
    """Check that the fitted model answers nearer to the source than the source rounded to the nearest codes does, on rows that it was not
    fitted to."""
    layout = hf_layout(source.config)
    codes, said = compressed_weights(to_foreign(layout, source.tensors), scheme, torch.float32)
    plain = plain_weights({"quantization_config": said}, codes, "the nearest codes")
    meant = from_foreign(source.config, layout, plain, "the nearest codes")
    models = [build_model(source).float().eval(), build_model(written).float().eval(), assemble_model(source.config, meant, torch.float32)]
    fitted, nearest = (torch.stack(column) for column in zip(*(_divergences(models, row) for row in rows), strict=True))
    better = int((fitted < nearest).sum())
    words = (f"on {len(rows)} rows of {len(rows[0])} tokens that it was not fitted to it is {float(fitted.mean()):.3g} nats a token from "
             f"the source (KL), the nearest codes {float(nearest.mean()):.3g}; nearer in {better} of {len(rows)} rows")
    evidence = {"fitted": float(fitted.mean()), "nearest": float(nearest.mean()), "better": better, "n": len(rows)}
    if fitted.mean() < nearest.mean():
        return proven("fitted", words, **evidence)
    return unproven("fitted", f"{words}: fitting has gained nothing; give more text, or take --to {scheme.name}", **evidence)


@torch.no_grad()
def _divergences(models: list[Transformer], row: list[int]) -> list[torch.Tensor]:
    """Mean KL from the first model to each of the others."""
    tokens = torch.tensor([row])
    source, *others = [model.logits(model.hidden(tokens))[0].double().log_softmax(-1) for model in models]
    return [(source.exp() * (source - other)).sum(-1).mean() for other in others]


def judge_rounded_texts(reading: LlamaReading, source: Artifact, before: Transformer, after: Transformer,
                scheme: CompressedScheme) -> list[Verdict]:
    """Compare perplexity and texts: how surprised both are by the same tokens, and how much less likely the source finds what the rounded
    one says."""
    ours, theirs = (torch.cat([token_logps(one, row) for row in reading.rows]) for one in (before, after))
    change, band = float((ours - theirs).mean()), scheme.nats
    words = (f"perplexity {float((-theirs.mean()).exp()):.4g}, the source's {float((-ours.mean()).exp()):.4g}: {change:+.4f} nats a token "
             f"over {len(ours)} tokens, band of {scheme.name} {band:g}")
    room = Sampling(max_new=min(SAID_TOKENS, source.config.max_length // 2), temperature=0)
    texts = [[list(one.ids) for one in sample(model, [list(prompt) for prompt in reading.prompts], source.stops.stop_ids, room,
                                              graphed=False)] for model in (before, after)]
    lost = float(torch.cat([choice_losses(before, list(prompt), said)
                            for prompt, said in zip(reading.prompts, texts[1], strict=True)]).mean())
    same = sum(a == b for a, b in zip(*texts, strict=True))
    said = (f"{same} of {len(texts[0])} greedy texts are the source's own; it finds the others' tokens less likely than its choice by "
            f"{lost:.4f} nats on average, band of {scheme.name} {2 * band:g}")
    return [(proven if abs(change) <= band else refuted)("perplexity", words, nats=str(change), band=band, n=len(ours)),
            (proven if lost <= 2 * band else refuted)("greedy texts", said, nats=str(lost), band=2 * band, same=same, n=len(texts[0]))]

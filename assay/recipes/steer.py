"""Steering: a vector from pairs of answers, added to the stream while it is wanted; its effect and cost measured, its passing proven."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.data.batch import Batch
from assay.data.chat import TrainingExample, render_conversations
from assay.data.data_files import DocumentRule, TextSource, iter_documents
from assay.data.layouts import Conversation, read_conversations
from assay.data.packing import hold_out, packed_rows
from assay.data.preferences import PreferencePair, by_prompt, read_preferences, render_pairs
from assay.editing.steering import RECORD_FILE, SteeringVector, contrast_vector, read_steering, steered, write_steering
from assay.errors import UsageError
from assay.evaluation.held_out_loss import score_examples
from assay.model.placement import default_device, require_device, uncompiled
from assay.model.transformer import Transformer
from assay.outcome import RunOutcome
from assay.recipes.run import print_line
from assay.recipes.steer_options import Steer
from assay.statistics.effects import Effect, paired_effect
from assay.statistics.known_answers import check_statistics
from assay.store import durable
from assay.store.artifact import Artifact, build_model, open_artifact, refuse_quarantined
from assay.verdict import Verdict, proven, refuted, unproven

STEER_ROWS, TEXT_BYTES = 8, 2048
SAME_VECTOR = {True: 1e-3, False: 5e-2}  # relative, in fp32 and below: rounding of states that mostly cancel
LEAST_PAIRS = 4  # on each side


def steer(config: Steer, say: Callable[[str], None] = print_line) -> RunOutcome:
    source, device = refuse_quarantined(open_artifact(config.model)), require_device(config.device or default_device())
    if Path(config.out).exists():
        raise UsageError(f"{config.out} exists already; give another --out")
    made_of, judged = steering_pairs(config, source)
    layer = source.config.depth // 2 if config.layer is None else config.layer
    if layer >= source.config.depth:
        raise UsageError(f"--layer {layer}: the model has {source.config.depth} layers, counted from 0")
    texts = None if config.text is None else plain_texts(config, source)
    with uncompiled(), torch.no_grad():
        model = build_model(source, None).to(device).eval()
        before = model_fingerprint(model)
        shown, other = (in_order(sides) for sides in ([pair.chosen for pair in made_of], [pair.rejected for pair in made_of]))
        write_steering(contrast_vector(model, shown, other, layer, source.digest), Path(config.out))
        steering = read_steering(config.out)  # what is measured is what was written
        verdicts = [check_statistics(), check_contrast(model, steering, made_of),
                    check_effect_of_steering(model, steering, config, judged), check_cost(model, steering, config, texts),
                    check_passed(before, model_fingerprint(model))]
    say(f"{config.out}: a vector of length {float(steering.vector.norm()):.3g} after layer {layer}, of {len(made_of)} pairs")
    durable.replace_file(Path(config.out) / RECORD_FILE, json.dumps(
        {"model": str(source.path), "weights": source.digest, "options": asdict(config), "layer": layer,
         "verdicts": [verdict.to_json() for verdict in verdicts]}, indent=1, default=str).encode())
    return RunOutcome(Path(config.out), verdicts)


def steering_pairs(config: Steer, source: Artifact) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """(what the vector is made of, what its effect is measured on): of different prompts."""
    if source.tokenizer is None:
        raise UsageError(f"{source.path} has no tokenizer, so no text can be read with it; add tokenizer.json")
    said = by_prompt([pair for file in config.data for pair in read_preferences(file, config.limit)])
    length = min(config.max_length, source.config.max_length)
    parts = [render_pairs(some, source.tokenizer, source.stops, length=length)[0] for some in hold_out(said, config.held_out, config.seed)]
    if min(map(len, parts)) < LEAST_PAIRS:
        raise UsageError(f"{len(parts[0])} pairs to make a vector of and {len(parts[1])} to measure it on; expected at least {LEAST_PAIRS} "
                         "of each: give more pairs, another --held-out, or a larger --max-length")
    return parts[0], parts[1]


def check_contrast(model: Transformer, steering: SteeringVector, pairs: Sequence[PreferencePair]) -> Verdict:
    """The written vector is the chosen answers' mean state less that of the rejected ones, each text read alone."""
    sums, states = torch.zeros(model.config.width, dtype=torch.float64), list[Tensor]()
    handle = model.blocks[steering.layer].register_forward_hook(lambda _, __, output: states.append(output[0]))
    try:
        for sign, sides in ((1, [pair.chosen for pair in pairs]), (-1, [pair.rejected for pair in pairs])):
            for side in sides:
                model.hidden(torch.tensor(side.tokens.tolist(), device=model.embed.weight.device)[None])
                sums += sign * states.pop().double().cpu()[torch.tensor((side.weight > 0).tolist())].mean(0) / len(pairs)
    finally:
        handle.remove()
    apart = float((steering.vector.double() - sums).norm() / sums.norm())
    bound = SAME_VECTOR[model.embed.weight.dtype == torch.float32]
    words = f"the vector is {apart:.1e} (relative) from the mean difference of {len(pairs)} pairs read one by one, bound {bound:.0e}"
    return (proven if apart <= bound else refuted)("contrast", words, apart=str(apart))


def check_effect_of_steering(model: Transformer, steering: SteeringVector, config: Steer, pairs: Sequence[PreferencePair]) -> Verdict:
    """How much likelier than the rejected answers the chosen ones become, in nats per token, on pairs that made no part of the vector."""
    plain = margins(model, pairs)
    with steered(model, steering, config.scale, steering.parent):
        moved = margins(model, pairs)
    effect = paired_effect(moved, plain)
    words = f"chosen over rejected, in nats per token: {plain.mean():+.4f} plain, {moved.mean():+.4f} steered; {effect_in_words(effect)}"
    facts = {"plain": float(plain.mean()), "steered": float(moved.mean()), "p": effect.p, "pairs": len(pairs)}
    if effect.p > 0.05:
        return unproven("steering", f"{words}: no effect is shown; give more pairs, another --layer or a larger --scale", **facts)
    if effect.mean < 0:
        return refuted("steering", f"{words}: away from the chosen; turn the columns or the sign of --scale", **facts)
    return proven("steering", f"{words}: towards the chosen", **facts)


def check_cost(model: Transformer, steering: SteeringVector, config: Steer, texts: Sequence[TrainingExample] | None) -> Verdict:
    """Check how much the loss of plain text rises while the vector is added."""
    if texts is None:
        return unproven("steering cost", "no --text was given: what else the vector changes is not known", optional=True)
    batches = in_order(texts)
    plain = score_examples(model, batches, rows=STEER_ROWS).per_document
    with steered(model, steering, config.scale, steering.parent):
        effect = paired_effect(score_examples(model, batches, rows=STEER_ROWS).per_document, plain)
    interval = effect.interval(0.95)
    words = f"loss of {len(plain)} plain texts {effect_in_words(effect)} nats per token, allowed {config.max_cost:g}"
    if interval.low > config.max_cost:
        return refuted("steering cost", f"{words}: it costs more; lower --scale", cost=effect.mean)
    if interval.high <= config.max_cost:
        return proven("steering cost", words, cost=effect.mean)
    return unproven("steering cost", f"{words}: the interval does not tell; give more text", cost=effect.mean, optional=True)


def check_passed(before: str, after: str) -> Verdict:
    """Weights and answers after everything are those before it, bit for bit: nothing of the vector is left."""
    words = f"weights and answers without the vector are {after[:12]}, and were {before[:12]} before it"
    return (proven if before == after else refuted)("passing", words)


def model_fingerprint(model: Transformer) -> str:
    """Fingerprint of every weight, and of the logits of a fixed text."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    tokens = torch.arange(min(32, model.config.vocab, model.config.max_length), device=model.embed.weight.device)[None]
    found.update(model(tokens).float().cpu().numpy().tobytes())
    return found.hexdigest()


def margins(model: Transformer, pairs: Sequence[PreferencePair]) -> NDArray[np.float64]:
    """Margin of each pair: how much lower the loss of the chosen answer is than that of the rejected one, in nats per token."""
    chosen, rejected = (score_examples(model, in_order(sides), rows=STEER_ROWS).per_document
                        for sides in ([pair.chosen for pair in pairs], [pair.rejected for pair in pairs]))
    return rejected - chosen


def in_order(examples: Sequence[TrainingExample]) -> list[Batch]:
    """A row each, in their order."""
    parts = [examples[at : at + STEER_ROWS] for at in range(0, len(examples), STEER_ROWS)]
    return [packed_rows([[example] for example in part], max(map(len, part)), 0) for part in parts]


def plain_texts(config: Steer, source: Artifact) -> list[TrainingExample]:
    path = Path(str(config.text))
    if path.name.endswith((".jsonl", ".jsonl.gz", ".parquet", ".csv")):
        said = list(read_conversations(path, layout="text").rows)
    else:
        rule = DocumentRule(document_bytes=TEXT_BYTES)
        said = [Conversation(f"{path.name}:{document.ordinal}:{document.id:x}", document.where, plain=("", document.raw.decode()))
                for document in iter_documents(TextSource(path, path.name), rule, Counter())]
    assert source.tokenizer is not None
    length = min(config.max_length, source.config.max_length)
    found = render_conversations(said, source.tokenizer, source.stops, length=length, over="truncate").examples
    if len(found) < 2:
        raise UsageError(f"--text {config.text}: {len(found)} texts; expected at least 2, so that an interval can be given")
    return list(found)


def effect_in_words(effect: Effect) -> str:
    found = effect.interval(0.95)
    return f"{found.mean:+.4f} [{found.low:.4f}, {found.high:.4f}] (n={found.n}), p = {effect.p:.2g}"

"""Model arithmetic: fine-tunes of one model merged, or layers taken out; parentage proven, bytes proven, the effect measured."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.chat import render_conversations
from assay.data.layouts import read_conversations
from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut, score_examples
from assay.guard.merge_checks import (
    check_ancestry,
    check_dropped_layers,
    check_effect,
    check_kept_layers,
    check_merged_bytes,
    check_relatives,
    check_same_shape,
    influence_by_text,
)
from assay.guard.proof import ProofRequest, mark_judged, prove
from assay.guard.proof_subject import ProofSampling
from assay.model.merging import WITH_BASE, Merge, merged_models
from assay.model.placement import default_device, place_for_inference, require_device
from assay.model.transformer import Transformer
from assay.outcome import RunOutcome
from assay.recipes.conversations import held_out_batches
from assay.recipes.merge_options import MeasuredWriting, MergeModels, PruneLayers
from assay.recipes.run import print_line
from assay.recipes.teachers import with_layers
from assay.store.artifact import Artifact, assemble_model, build_model, merged_tensors, open_artifact, refuse_quarantined
from assay.store.checkpoint import write_checkpoint
from assay.store.saving import Lineage, model_contents
from assay.verdict import Outcome, Verdict, proven, unproven

ROWS = 8  # conversations at a time, where an effect is measured
INFLUENCE_BATCHES = 4  # of so many conversations, on which it is seen which layers do least


def merge(config: MergeModels, say: Callable[[str], None] = print_line) -> RunOutcome:
    """Merge models. Nothing is written where the parents are not of one model."""
    asked, paths = asked_merge(config)
    require_new_folder(Path(config.out))
    parents = [refuse_quarantined(open_artifact(path)) for path in paths]
    base = None if config.base is None else refuse_quarantined(open_artifact(config.base))
    every = [*([] if base is None else [base]), *parents]
    verdicts = [shapes := check_same_shape(every)]
    if shapes.outcome is Outcome.PROVEN:
        verdicts += [check_relatives(every), check_ancestry(parents, base)]
    if any(verdict.outcome is Outcome.REFUTED for verdict in verdicts):
        return RunOutcome(Path(config.out), verdicts)
    batches = data_batches(config, parents[0])
    models, ground = [whole_tensors(parent) for parent in parents], None if base is None else whole_tensors(base)
    made = {"merged": {"method": asked.method, "density": asked.density, "seed": asked.seed, "base": None if base is None else base.digest,
                       "parents": [{"weights": parent.digest, "path": str(parent.path.resolve()), "weight": weight}
                                   for parent, weight in zip(parents, asked.weights, strict=True)]}}
    tensors = merged_models(asked, models, ground)
    proof = write_made(Path(config.out), parents[0], assemble_model(parents[0].config, tensors, torch.float32), made)
    verdicts += proof
    verdicts.append(check_merged_bytes(open_artifact(config.out).tensors, asked, models, ground))
    say(f"{config.out}: {asked.method} of {', '.join(f'{path} × {weight:g}' for path, weight in zip(paths, asked.weights, strict=True))}")
    names = {("base " if parent is base else "") + str(parent.path): parent for parent in every}
    return made_outcome(config, proof, [*verdicts, *measured_effect(config, batches, names, say)])


def prune(config: PruneLayers, say: Callable[[str], None] = print_line) -> RunOutcome:
    require_new_folder(Path(config.out))
    source = refuse_quarantined(open_artifact(config.model))
    if bool(config.layers) == bool(config.drop):
        raise UsageError("say which layers go: --layers, a number of those that do least on --data, or --drop, their places; one of them")
    batches = data_batches(config, source)
    dropped = sorted(config.drop) if config.drop else least_influential(config, source, batches, say)
    kept = [layer for layer in range(source.config.depth) if layer not in dropped]
    if not kept or len(kept) + len(dropped) != source.config.depth:
        raise UsageError(f"--drop {' '.join(map(str, dropped))} of a model with layers 0 to {source.config.depth - 1}: expected some of "
                         "them, each once, and one at least to stay")
    geometry, tensors = with_layers(source.config, whole_tensors(source), kept)
    made = {"made_of": {"weights": source.digest, "path": str(source.path.resolve()), "layers": kept}}
    proof = write_made(Path(config.out), source, assemble_model(geometry, tensors, torch.float32), made)
    influence = influence_by_text(build_model(source, None).eval(), (batches or [])[:INFLUENCE_BATCHES]) if config.layers else None
    verdicts = [*proof, check_kept_layers(open_artifact(config.out).tensors, whole_tensors(source), kept),
                check_dropped_layers(kept, source.config.depth, config.drop, config.layers, influence)]
    say(f"{config.out}: {source.path} without layers {', '.join(map(str, dropped))}")
    return made_outcome(config, proof, [*verdicts, *measured_effect(config, batches, {str(source.path): source}, say, bound=False)])

# ---------------------------------------------------------------- what is asked for


def asked_merge(config: MergeModels) -> tuple[Merge, list[str]]:
    """Weights that are left out are alike: shares of 1, or 1 each for task vectors (with ties, whose sum is a mean, too)."""
    if len(config.models) < (1 if config.method in WITH_BASE else 2):
        raise UsageError(f"a {config.method} merge of {len(config.models)} models; expected two at least")
    if (config.method in WITH_BASE) != (config.base is not None):
        why = "needs --base, the model that all were fine-tuned from" if config.base is None else "has no base: leave --base out"
        raise UsageError(f"--method {config.method} {why}")
    usual = 1.0 if config.method in WITH_BASE else 1 / len(config.models)
    paths, weights = zip(*(weighed(model, usual) for model in config.models), strict=True)
    return Merge(config.method, tuple(weights), config.density, config.seed), list(paths)


def weighed(named: str, usual: float) -> tuple[str, float]:
    path, equals, weight = named.rpartition("=")
    try:
        return (path, float(weight)) if equals and path else (named, usual)
    except ValueError:
        return named, usual  # a path may have an = in it


def whole_tensors(artifact: Artifact) -> dict[str, Tensor]:
    return {name: tensor.float() for name, tensor in merged_tensors(artifact, torch.float32).items()}

# ---------------------------------------------------------------- what is written, and what it did


def require_new_folder(where: Path) -> None:
    if where.exists():
        raise UsageError(f"{where} exists already; give another --out")


def write_made(where: Path, source: Artifact, model: Transformer, made: Mapping[str, Any]) -> list[Verdict]:
    """A checkpoint that says what it was made of, and what a fresh process says of it."""
    write_checkpoint(where, model_contents(model.eval(), source.tokenizer, source.stops, Lineage("new"), run_config=dict(made)))
    return prove(ProofRequest(str(where), probing=ProofSampling(samples=0)))


def made_outcome(config: MeasuredWriting, proof: Sequence[Verdict], verdicts: list[Verdict]) -> RunOutcome:
    """The bytes were proven by themselves: they have no hallmark where a verdict on what they should be goes against them."""
    where = Path(config.out)
    mark_judged(where, proof, verdicts)
    return RunOutcome(where, verdicts, model=where)


def measured_effect(config: MeasuredWriting, batches: Sequence[Batch] | None, parents: Mapping[str, Artifact], say: Callable[[str], None],
                    *, bound: bool = True) -> list[Verdict]:
    """Loss on the conversations of --data, of everything that went in and of the bytes that came out. A model that lost layers is not
    `bound` to be as good as it was: how much worse it is, is the answer."""
    if batches is None:
        return [unproven("effect", "no --data was given: what the model is good for is not known", optional=True)]
    device = require_device(config.device or default_device())
    before = {name: loss_on(parent, batches, device) for name, parent in parents.items()}
    after = loss_on(open_artifact(config.out), batches, device)
    for name, found in before.items():
        say(f"held-out loss of {name}: {found.estimate}")
    verdict = check_effect(before, after)
    say(verdict.reason)
    if verdict.outcome is Outcome.REFUTED and not bound:
        return [proven("effect", verdict.reason.replace("the merge", "it"), **verdict.evidence)]
    return [verdict]


def data_batches(config: MeasuredWriting, artifact: Artifact) -> list[Batch] | None:
    """Read before anything is written: what cannot be measured is refused while there is nothing to lose. None without --data."""
    if config.data is None:
        return None
    require_device(config.device or default_device())
    if artifact.tokenizer is None:
        raise UsageError(f"{artifact.path} has no tokenizer, so that --data cannot be read; leave it out")
    length = min(config.max_length, artifact.config.max_length)
    rendered = render_conversations(read_conversations(str(config.data)).rows, artifact.tokenizer, artifact.stops, length=length,
                                    over="truncate")
    return held_out_batches(rendered.examples, length, ROWS)


def loss_on(artifact: Artifact, batches: Sequence[Batch], device: str) -> HeldOut:
    return score_examples(place_for_inference(build_model(artifact, None), device), batches, rows=ROWS)

# ---------------------------------------------------------------- which layers do least


def least_influential(config: PruneLayers, source: Artifact, batches: Sequence[Batch] | None, say: Callable[[str], None]) -> list[int]:
    """ShortGPT's block influence: 1 less the cosine of what goes into a layer and what comes out, in the mean over tokens."""
    if batches is None or not config.layers or config.layers >= source.config.depth:
        raise UsageError(f"--layers {config.layers} of a model with {source.config.depth}: expected fewer than it has, and --data to see "
                         "which of them do least; or name them with --drop")
    influence = layer_influence(build_model(source, None).eval(), batches)
    say("influence of layers: " + ", ".join(f"{layer} {value:.4f}" for layer, value in enumerate(influence)))
    return sorted(sorted(range(len(influence)), key=lambda layer: influence[layer])[: config.layers])


@torch.no_grad()
def layer_influence(model: Transformer, batches: Sequence[Batch]) -> list[float]:
    sums, count = torch.zeros(model.config.depth, dtype=torch.float64), 0
    seen = dict[int, Tensor]()

    def watch(layer: int) -> Callable[..., None]:
        def look(_: Any, inputs: tuple[Any, ...], output: Any) -> None:
            before, after = inputs[0], output[0] if isinstance(output, tuple) else output
            seen[layer] = 1 - torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)

        return look

    hooks = [block.register_forward_hook(watch(layer)) for layer, block in enumerate(model.blocks)]
    try:
        for batch in batches[:INFLUENCE_BATCHES]:
            model.hidden(batch.tokens, documents=batch.documents, positions=batch.positions)
            real = batch.documents >= 0 if batch.documents is not None else torch.ones_like(batch.weight, dtype=torch.bool)
            sums += torch.stack([seen[layer][real].double().sum() for layer in range(model.config.depth)])
            count += int(real.sum())
    finally:
        for hook in hooks:
            hook.remove()
    return (sums / max(1, count)).tolist()

"""Where a fine-tuning begins: a model opened strictly, made ready to be trained as a whole or by an adapter, and its lineage."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from assay.errors import GuardStop, UsageError
from assay.guard.proof import prove_checkpoint, without_optional
from assay.guard.proof_subject import ProofSampling
from assay.guard.training_guards import check_adapted, stop_if_refuted
from assay.learn.optim import load_state_tensors
from assay.model.lora import LoraSite, attach, fresh, plan
from assay.model.placement import place_for_training
from assay.model.resize_embeddings import resize_embeddings, with_new_tokens
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.recipes.forms import Adapter, Form, Whole
from assay.recipes.options import Trained
from assay.store import checkpoint
from assay.store.artifact import Artifact, assemble_model, build_model, open_artifact
from assay.store.checkpoint import open_checkpoint
from assay.store.saving import Ancestor, Lineage, model_contents
from assay.verdict import Outcome, overall


@dataclass(frozen=True)
class Beginning:
    """`parent` is what the first checkpoint equals: the model as given, or a base made from it with rows for new tokens."""

    parent: Artifact
    model: Transformer
    form: Form
    tokenizer: Tokenizer
    carried: dict[str, Tensor]  # the parent's moments, where they are carried on
    steps_before: int  # that those moments have seen


def begin(config: Trained, device: str, reach: Callable[[int], float], say: Callable[[str], None]) -> Beginning:
    """`reach(step)` is how far the optimizer can have moved one element after so many steps."""
    parent = prepared(config, given(config), say)
    tokenizer = parent.tokenizer
    if tokenizer is None:
        raise UsageError(f"{parent.path} has no tokenizer, so no conversation can be written for it; add tokenizer.json")
    model, form = trainable(config, parent, tokenizer, reach, say)
    place_for_training(model, device, recompute=config.recompute)
    model.train()
    carried, steps = carried_state(config)
    return Beginning(parent, model, form, tokenizer, carried, steps)


def given(config: Trained) -> Artifact:
    """The model that was named. A fork's parent must be proven: what is wrong with it would be wrong with everything after it."""
    if (config.model is None) == (config.from_ is None):
        raise UsageError("name what to train: --model for a model, or --from for a checkpoint of a run")
    if config.from_ is None:
        if config.optimizer_state is not None:
            raise UsageError("--optimizer-state says what a fork does with its parent's moments; it needs --from")
        assert config.model is not None
        return open_artifact(config.model)
    if config.optimizer_state is None:
        raise UsageError("--from: say what becomes of the parent's moments: --optimizer-state fresh or carried")
    if open_checkpoint(Path(config.from_)).hallmark is None:
        raise UsageError(f"{config.from_} carries no hallmark: nothing has proven it; run assay prove {config.from_}, then fork")
    return open_artifact(config.from_)


def prepared(config: Trained, source: Artifact, say: Callable[[str], None]) -> Artifact:
    """The source itself, or RUN/base: a folder that others can open, with rows for new tokens, proven before it is trained on."""
    grows = bool(config.new_tokens) and source.tokenizer is not None
    if not grows and not (config.lora_r and source.raw.place.kind == "gguf"):
        return source
    if source.patch is not None:
        raise UsageError(f"{source.path} is an adapter: new tokens need rows of their own in its base; merge it first")
    base, against = Path(config.out) / "base", None if grows else str(source.path)
    if base.exists():
        require_proven(base, against=against)
    else:
        write_proven(base, _based(config, source, say), against=against)
        say(f"{base}: {source.path.name} as a folder that other tools open, proven")
    return open_artifact(base)


def write_proven(where: Path, contents: checkpoint.Contents, *, against: str | None = None) -> None:
    """A model that a run makes to begin with: written, and proven before it is trained on. What it says, the first checkpoint shows."""
    checkpoint.write_checkpoint(where, contents)
    require_proven(where, against=against)


def require_proven(where: Path, *, against: str | None = None) -> None:
    """Also of one that an earlier sitting wrote: it may have been killed before the proof, or stopped by it."""
    if checkpoint.open_checkpoint(where).hallmark is not None:
        return
    verdicts = prove_checkpoint(where, against=against, probing=ProofSampling(samples=0))
    if overall(without_optional(verdicts)) is not Outcome.PROVEN:
        raise GuardStop(f"{where} is not proven: " + "; ".join(str(v) for v in verdicts if v.outcome is not Outcome.PROVEN))


def _based(config: Trained, source: Artifact, say: Callable[[str], None]) -> checkpoint.Contents:
    tokenizer = source.tokenizer
    if not config.new_tokens or tokenizer is None:
        lineage = Lineage("same", Ancestor(source.digest, str(source.path.resolve())))
        return model_contents(build_model(source), tokenizer, source.stops, lineage)
    grown_tokenizer = with_new_tokens(tokenizer, config.new_tokens)
    grown = resize_embeddings(source.config, source.tensors, tokenizer, grown_tokenizer)
    say(f"new tokens {' '.join(config.new_tokens)}: rows {', '.join(map(str, grown.rows))} of {grown.config.vocab}, each the mean of "
        "the pieces its text was")
    model = assemble_model(grown.config, grown.tensors, torch.float32).eval()
    return model_contents(model, grown_tokenizer, resolve_special_tokens(grown_tokenizer, {},
                                                                         {"eos_token_id": list(source.stops.stop_ids)}),
                          Lineage("new"))


def trainable(config: Trained, parent: Artifact, tokenizer: Tokenizer, reach: Callable[[int], float],
              say: Callable[[str], None]) -> tuple[Transformer, Form]:
    model, ancestor = build_model(parent), Ancestor(parent.digest, str(parent.path.resolve()))
    for parameter in model.parameters():  # memory of its own: what is learned must not change the parent it is held against
        parameter.data = parameter.data.clone()
    if parent.patch is not None and parent.base is not None and parent.adapter is not None:
        rank = next(iter(parent.patch.low_rank.values()))[0].right.shape[0]
        if config.lora_r not in (0, rank) or config.lora_targets or config.lora_alpha or parent.patch.replaced:
            raise UsageError(f"{parent.path} is an adapter of rank {rank}, which is trained on as it is: leave the --lora options out; "
                             "for another adapter merge it first")
        base = Ancestor(parent.base.digest, str(parent.base.path.resolve()))
        say(f"going on with the adapter of {parent.path}: rank {rank}, {len(parent.patch.low_rank)} matrices")
        return model, Adapter(model, base, tokenizer, parent.adapter.rslora, _moving(ancestor, None))
    if not config.lora_r:
        if config.lora_targets or config.lora_alpha or config.rslora:
            raise UsageError("--lora-alpha, --lora-targets and --rslora are for adapters; give --lora-r too")
        return model.requires_grad_(True), Whole(model, tokenizer, parent.stops, _moving(ancestor, reach))
    alpha = config.lora_alpha or 2 * config.lora_r
    scale = alpha / (config.lora_r**0.5 if config.rslora else config.lora_r)
    planned = plan(parent.config, config.lora_targets or None)
    say(_plan_in_words(planned, config.lora_r, alpha, scale))
    attach(model, fresh(parent.config, planned, config.lora_r, scale, config.seed, parent.digest))
    # A fresh adapter changes nothing yet, and there is no adapter that came before it.
    form = Adapter(model, ancestor, tokenizer, config.rslora, lambda step: Lineage("moved", ancestor) if step else Lineage("new"))
    stop_if_refuted([check_adapted(planned, form.patch())])
    return model, form


def _moving(parent: Ancestor, reach: Callable[[int], float] | None) -> Callable[[int], Lineage]:
    """Step 0 is the parent; every later one has moved, and not farther than the optimizer could."""
    def lineage(step: int) -> Lineage:
        if step == 0:
            return Lineage("same", parent)
        return Lineage("moved", parent, movement_bound=None if reach is None else reach(step))
    return lineage


def carried_state(config: Trained) -> tuple[dict[str, Tensor], int]:
    if config.from_ is None or config.optimizer_state == "fresh":
        return {}, 0
    found = open_checkpoint(Path(config.from_))
    state, trainer = found.optimizer(), found.trainer()
    if not state or not trainer:
        raise UsageError(f"{config.from_} holds no moments to carry on; use --optimizer-state fresh")
    return {name: tensor for name, tensor in state.items() if not name.startswith("ema/")}, trainer["step"] + trainer.get("steps_before", 0)


def carry(optimizer: torch.optim.Optimizer, beginning: Beginning) -> None:
    if beginning.carried:
        load_state_tensors(optimizer, dict(beginning.model.named_parameters()), beginning.carried)


def _plan_in_words(planned: list[LoraSite], rank: int, alpha: float, scale: float) -> str:
    leaves: dict[str, int] = {}
    for site in planned:
        leaf = site.foreign.rpartition(".")[2]
        leaves[leaf] = leaves.get(leaf, 0) + 1
    counted = ", ".join(f"{leaf} × {count}" for leaf, count in leaves.items())
    return f"LoRA of rank {rank}, alpha {alpha:g}: the adapter counts {scale:g} times; {len(planned)} layers: {counted}"



"""Starting model of a fine-tuning, opened strictly; and the trained weights that a run saves: a whole model, or an adapter on its base."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.data.data_files import read_rows
from assay.data.hub_datasets import local_data
from assay.data.mixture import weighted_sources
from assay.errors import DataError, GuardStop, UsageError
from assay.guard.proof import prove_checkpoint
from assay.guard.proof_subject import ProofSampling
from assay.guard.training_guards import check_adapted, stop_if_refuted
from assay.learn.optim import load_state_tensors
from assay.learn.sharded import StoredTensors
from assay.learn.streamed import LazyTensors, Streaming
from assay.model.chat_template import start_renderer, write_day
from assay.model.families import hf_layout, one_from_foreign, scaled_context, to_foreign
from assay.model.lora import LoraLinear, LoraSite, attach, fresh, live_factors, plan
from assay.model.patch import Patch
from assay.model.placement import frozen_tensors, load_compiler_beside, place_for_inference, place_for_training, require_device
from assay.model.resize_embeddings import resize_embeddings, with_new_tokens
from assay.model.special_tokens import SpecialTokens, resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig, Transformer
from assay.model.world import World
from assay.recipes.compute_dtype import asked_compute, asked_masters, refuse_bf16_masters, refuse_fp16
from assay.recipes.memory_plan import MemoryPlan, makes_base, may_open_in_parts, merges, refuse_unfit, sampled_whole
from assay.recipes.options import Trained
from assay.recipes.processes import holds_outline, shards_parameters
from assay.store import checkpoint
from assay.store.artifact import (
    Artifact,
    Destination,
    assemble_model,
    build_model,
    locate_artifact,
    open_artifact,
    refuse_quarantined,
    straight_to,
)
from assay.store.checkpoint import Checkpoint, Contents, open_checkpoint
from assay.store.compressed_tensors import is_compressed
from assay.store.export_artifact import majority_dtype
from assay.store.peft import write_adapter
from assay.store.remote import local_path
from assay.store.saving import Ancestor, Lineage, adapter_contents, model_contents
from assay.strict_json import parse_json, read_json
from assay.verdict import Outcome, overall, without_optional

# ---------------------------------------------------------------- trained weights


@dataclass(frozen=True)
class Ancestry:
    """Lineage of a run's checkpoints: of the first, and of every later one, which has moved from its parent.

    `largest` is the largest weight of the starting model, where the optimizer's reach bounds how far a later one can have moved.
    """

    first: Lineage
    later: Lineage
    largest: float | None = None

    def lineage(self, *, moved: bool, bound: float | None) -> Lineage:
        return replace(self.later, movement_bound=bound) if moved else self.first


class WholeModel:
    """Trained weights of a whole model: every parameter is trained. `ancestry` says how a checkpoint stands to what came before it."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, stops: SpecialTokens, ancestry: "Ancestry"):
        self.model, self.tokenizer, self.stops, self.ancestry = model, tokenizer, stops, ancestry
        self.words = "the whole model is trained"
        self.stored: StoredTensors | None = None  # in process 0, where the model is opened in parts and nobody holds it whole

    def trained(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    reachable = trained  # by a gradient, as the weights are now

    def weights(self) -> dict[str, Tensor]:
        """Live tensors of a checkpoint's weight files, under the names they have there."""
        return to_foreign(hf_layout(self.model.config), {name: p.detach() for name, p in self.model.named_parameters()})

    def contents(self, lineage: Lineage, run_config: Mapping[str, Any], trainer: Mapping[str, Any],
                 optimizer: Mapping[str, Tensor]) -> Contents:
        return model_contents(self.model, self.tokenizer, self.stops, lineage, dtype=self.model.embed.weight.dtype, run_config=run_config,
                              trainer=trainer, optimizer=optimizer)

    @torch.no_grad()
    def restore(self, found: Checkpoint) -> None:
        tensors = open_artifact(found.folder).tensors
        for name, parameter in self.model.named_parameters():
            parameter.copy_(tensors[name])

    def stored_in(self, found: Checkpoint, moments: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> StoredTensors:
        """A checkpoint's tensors for a model in parts, which has no memory to restore them in."""
        return stored_tensors(open_artifact(found.folder, to=Destination("meta")), None, moments, average)


class AdapterModel:
    """Low-rank layers are trained, everything else is the base's. `base` says where that lies and what its weights are; `words` say
    which layers."""

    stored: StoredTensors | None = None

    def __init__(self, model: Transformer, base: Ancestor, tokenizer: Tokenizer, rslora: bool, ancestry: "Ancestry", words: str):
        self.model, self.base, self.tokenizer, self.rslora, self.ancestry, self.words = model, base, tokenizer, rslora, ancestry, words

    def patch(self) -> Patch:
        """The adapter as trained so far, as a patch of live tensors."""
        return Patch(self.base.weights, {f"{name}.weight": module.parts() for name, module in self._layers().items()})

    def trained(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def reachable(self) -> list[str]:
        """A fresh adapter's left factors are 0, so that no gradient passes them to the right ones before the first step."""
        dead = {f"{name}.rights.{i}" for name, module in self._layers().items() for i, left in enumerate(module.lefts) if not left.any()}
        return [name for name in self.trained() if name not in dead]

    def _layers(self) -> dict[str, LoraLinear]:
        return {name: module for name, module in self.model.named_modules() if isinstance(module, LoraLinear)}

    def weights(self) -> dict[str, Tensor]:
        return write_adapter(self.model.config, self.patch(), self.base.path, rslora=self.rslora)[1]

    def contents(self, lineage: Lineage, run_config: Mapping[str, Any], trainer: Mapping[str, Any],
                 optimizer: Mapping[str, Tensor]) -> Contents:
        return adapter_contents(self.model, self.patch(), self.base, self.tokenizer, lineage, rslora=self.rslora,
                                run_config=run_config, trainer=trainer, optimizer=optimizer)

    def restore(self, found: Checkpoint) -> None:
        patch = open_artifact(found.folder, base=self.base.path, to=beside_held(self.model, self.base)).patch
        assert patch is not None, "a run that trains an adapter saves adapters"
        self.load(patch)

    def stored_in(self, found: Checkpoint, moments: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> StoredTensors:
        opened = open_artifact(found.folder, base=self.base.path, to=Destination("meta"))
        return stored_tensors(opened, opened.patch, moments, average)

    @torch.no_grad()
    def load(self, patch: Patch) -> None:
        """Load values into the adapter; layers, ranks and scales must be this run's."""
        for name, parts in patch.low_rank.items():
            module = self.model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(module, LoraLinear), f"{name} has no adapter here"
            module.load(parts)


TrainedWeights = WholeModel | AdapterModel


def beside_held(model: Transformer, base: Ancestor) -> Destination | None:
    """Destination of a base that is opened anew beside the live one: what the two have in the same bits is shared."""
    device, held = str(model.embed.weight.device), frozen_tensors(model)
    return straight_to(device, held) if base.held is None else Destination(device, held, base.weights)


def writes_merged(config: Trained, base: str | Path) -> bool:
    """Whether an adapter is handed over merged into its base too."""
    return merges(config, sum(file.stat().st_size for file in Path(base).glob("*.safetensors")))

# ---------------------------------------------------------------- the starting model


@dataclass(frozen=True)
class StartingModel:
    """A parent and what is trained of it.

    `parent` is what the first checkpoint equals: the model as given, or a base made from it with rows for new tokens.
    """

    parent: Artifact
    model: Transformer
    weights: TrainedWeights
    tokenizer: Tokenizer
    carried: dict[str, Tensor]  # the parent's moments, where they are carried on
    steps_before: int  # that those moments have seen
    device: str  # where it computes
    memory: MemoryPlan | None = None  # what was planned, where a GPU bounds it


def day_of_run(folder: Path) -> datetime:
    """Day on which the run in a folder began; now, where there is none yet."""
    ledger = folder / "ledger.jsonl"
    first, whole, _ = (ledger.read_bytes() if ledger.exists() else b"").partition(b"\n")
    if not whole:
        return datetime.now()
    return datetime.fromisoformat(parse_json(first, where=str(ledger), shape={"time": str})["time"]).astimezone()


def load_start(config: Trained, device: str, say: Callable[[str], None], world: World | None = None) -> StartingModel:
    write_day(day_of_run(Path(config.out)))
    if device.startswith("cuda"):  # a machine with cores for it: they get ready while the weights are read
        load_compiler_beside(device)
        start_renderer()
    memory = refuse_unfit(config, device)
    refuse_base_dtype(config)
    in_parts = opens_in_parts(config)
    if shards_parameters(config):
        say(_opening_in_words(config, in_parts=in_parts))
    source = given(config, _destination(config, device))
    for note in source.notes:
        say(f"{source.path}: {note}; what this run writes names {_stops_in_words(source)}")
    parent = prepared(config, source, say, device, world)
    tokenizer = parent.tokenizer
    if tokenizer is None:
        raise UsageError(f"{parent.path} has no tokenizer, so no conversation can be written for it; add tokenizer.json")
    refuse_more_ids_than_rows(parent, tokenizer)
    weights = trainable(config, parent, tokenizer)
    carried, steps = carried_state(config)
    if in_parts and not holds_outline(config):
        weights.stored = stored_tensors(parent, None if isinstance(weights, WholeModel) else weights.patch(), carried)
        if isinstance(weights, WholeModel):
            weights.ancestry = replace(weights.ancestry, largest=largest_weight(parent, weights.stored))
    if isinstance(weights, WholeModel):  # masters are its own, and the parent is opened anew where it is asked: nobody needs these
        parent = replace(parent, tensors={name: tensor.to("meta") for name, tensor in parent.tensors.items()})
    weights.words += _held_in_words(parent.base or parent)
    # Hooks of FSDP that come after a compilation are not seen by it.
    refuse_fp16(config, weights.model.config)
    refuse_bf16_masters(config, adapter=isinstance(weights, AdapterModel))
    place_for_training(weights.model, device, compute=asked_compute(config), recompute=config.gradient_checkpointing,
                       compile=False if config.fsdp else None, masters=asked_masters(config))
    weights.model.train()
    return StartingModel(parent, weights.model, weights, tokenizer, carried, steps, device, memory)


def _stops_in_words(source: Artifact) -> str:
    ids = source.stops.stop_ids
    return f"the stop ids {', '.join(map(str, ids))}" if ids else "no stop id"


def opens_in_parts(config: Trained) -> bool:
    """Whether no process needs to hold the whole model: with --fsdp, several processes, and a folder whose tensors can be read one at a
    time.
    """
    return shards_parameters(config) and may_open_in_parts(config) and (makes_base(config) or _read_whole(config) is None)


def _read_whole(config: Trained) -> str | None:
    """Why what was named is not read tensor by tensor, where it is not."""
    place = locate_artifact(str(config.from_ or config.model))
    if place.format.read is not None:
        return f"a {place.kind} file is read as one; write it as a folder with assay export --to hf"
    compressed = not place.adapter and is_compressed(read_json(place.path / "config.json"))
    return "its matrices are codes, which are made numbers together" if compressed else None


def _opening_in_words(config: Trained, *, in_parts: bool) -> str:
    if in_parts and makes_base(config):
        return "RUN/base is written by process 0, and opened in parts from there: nobody holds the model whole after that"
    if in_parts:
        return "opened in parts: process 0 reads a tensor at a time, and nobody holds the model whole"
    return f"process 0 opens the model whole before it is cut: {sampled_whole(config) or _read_whole(config)}"


def stored_tensors(parent: Artifact, patch: Patch | None, moments: Mapping[str, Tensor],
                   average: Mapping[str, Tensor] | None = None) -> StoredTensors:
    """A model's tensors as its files hold them, each made ours when it is asked for; with a live `patch` its factors, which are small,
    and those of its base."""
    base = parent.base or parent
    factors = {} if patch is None else live_factors(base.config, patch)
    read = base.tensors.__getitem__ if base.raw.whole is not None else one_from_foreign(
        base.config, hf_layout(base.config), base.raw.tensors, str(base.path))
    return StoredTensors(lambda name: factors[name] if name in factors else read(name.replace(".base.", ".")), moments, average)


def largest_weight(parent: Artifact, stored: StoredTensors) -> float:
    return max(float(max(end.abs() for end in stored.weight(name).aminmax())) for name in parent.tensors)


def under_foreign_names(config: ModelConfig, ours: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors under the names of a checkpoint's weight files, made one at a time."""
    layout = hf_layout(config)
    holder = {piece.name: name for name, pieces in layout.items() for piece in pieces}
    return LazyTensors(list(holder), lambda name: to_foreign({(own := holder[name]): layout[own]}, {own: ours[own]})[name])


def _destination(config: Trained, device: str) -> Destination | None:
    """A model goes to a GPU as it is opened, tensor by tensor, in its file's dtype: it is joined, and where it is trained widened, there.
    What has to be changed first is opened where it lies; what is sent to all in parts has no memory here."""
    changed = bool(config.new_tokens) or config.rope_scaling is not None or str(config.from_ or config.model).endswith(".gguf")
    if holds_outline(config) or (opens_in_parts(config) and not makes_base(config)):
        return Destination("meta")
    if changed:
        return None
    return Destination(require_device(device)) if config.base_dtype is not None else straight_to(device)


def refuse_base_dtype(config: Trained) -> None:
    """A base is held in few bits where it is frozen."""
    named = config.from_ or config.model
    if config.base_dtype is None or named is None:
        return
    place = locate_artifact(named)
    if not config.lora_r and not place.adapter:
        raise UsageError(f"--base-dtype {config.base_dtype} is for a frozen base, and the whole model is trained here; give --lora-r too")
    recorded = (open_checkpoint(place.path, verify=False).facts.get("base") or {}).get("held") if place.kind == "checkpoint" else None
    if place.adapter and recorded != config.base_dtype:
        raise UsageError(f"{named} is an adapter that was trained on a base in {recorded or 'the dtype of its file'}, and goes on there; "
                         "leave --base-dtype out, or merge it first")


def refuse_more_ids_than_rows(parent: Artifact, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that can say an id without a row: a proof would find it, after the first steps."""
    if tokenizer.size > parent.config.vocab:
        raise UsageError(f"{parent.path}: its tokenizer has ids up to {tokenizer.size - 1}, and the model has {parent.config.vocab} rows: "
                         "the tokenizer is another model's, or tokens were added to it alone; give back the right tokenizer.json, or name "
                         "the added ones with --new-tokens on a tokenizer without them")


def beside_live(start: StartingModel) -> Destination | None:
    """Destination of the base of a run's adapters when it is opened anew, so that it is held once; None where none is frozen here, or it
    lies in parts."""
    whole = start.weights.model is start.model and start.weights.stored is None
    return beside_held(start.model, start.weights.base) if isinstance(start.weights, AdapterModel) and whole else None


def reopen_parent(start: StartingModel) -> Artifact:
    """Open the parent anew: what a run is compared with is what lies on the disk. What the live model holds of it in the same bits is
    shared with it."""
    parent = start.parent
    to = beside_live(start) or straight_to(start.device) if start.weights.stored is None else Destination("meta")
    found = open_artifact(parent.path, base=None if parent.base is None else parent.base.path, to=to, held=parent.held)
    if found.digest != parent.digest:
        raise GuardStop(f"{parent.path} holds weights {found.digest[:12]}, the run began with {parent.digest[:12]}: it was changed")
    return found


def streamed_parent(start: StartingModel, reopened: Artifact, device: str, compute: torch.dtype | None) -> Transformer:
    """The parent as it lies on the disk, to compute with; of a model that nobody holds whole, read matrix by matrix at every pass."""
    parent = place_for_inference(build_model(reopened, None), device, compute=compute)
    if start.weights.stored is not None:
        Streaming(parent, device, stored_tensors(reopened, reopened.patch, {}).weight)
    return parent


def reopen_beside(start: StartingModel) -> Callable[[], Artifact]:
    """`reopen_parent`, on a GPU begun at once in a thread: reading and hashing a large base again takes seconds that a preflight has."""
    if start.model.embed.weight.device.type == "cpu":
        return partial(reopen_parent, start)
    thread = ThreadPoolExecutor(1, "parent")
    reopened = thread.submit(reopen_parent, start)
    thread.shutdown(wait=False)
    return reopened.result


def refuse_unclear_start(config: Trained) -> None:
    if (config.model is None) == (config.from_ is None):
        raise UsageError("name what to train: --model for a model, or --from for a checkpoint of a run")
    if config.from_ is None and config.optimizer_state is not None:
        raise UsageError("--optimizer-state says what a fork does with its parent's moments; it needs --from")
    if config.from_ is not None and config.optimizer_state is None:
        raise UsageError("--from: say what becomes of the parent's moments: --optimizer-state fresh or carried")


def given(config: Trained, to: Destination | None = None) -> Artifact:
    """The model that was named. A fork's parent must be proven: what is wrong with it would be wrong with everything after it."""
    refuse_unclear_start(config)
    if config.from_ is None:
        assert config.model is not None
        return refuse_quarantined(open_artifact(config.model, to=to, held=_held_dtype(config)))
    if open_checkpoint(local_path(config.from_)).hallmark is None:
        raise UsageError(f"{config.from_} carries no hallmark: nothing has proven it; run assay prove {config.from_}, then fork")
    return open_artifact(config.from_, to=to, held=_held_dtype(config))


def _held_dtype(config: Trained) -> str | None:
    """Base dtype of a whole model that is opened to be a base as it is; an adapter's manifest says in which its own is held."""
    named = str(config.from_ or config.model)
    remade = config.new_tokens or config.rope_scaling or named.endswith(".gguf")
    return None if remade or locate_artifact(named).adapter else config.base_dtype


def prepared(config: Trained, source: Artifact, say: Callable[[str], None], device: str = "cpu", world: World | None = None) -> Artifact:
    """The source itself, or RUN/base: a folder that others can open, with rows for new tokens, proven before it is trained on. Of
    several processes the first writes it."""
    grows = (bool(config.new_tokens) and source.tokenizer is not None) or config.rope_scaling is not None
    if not grows and not (config.lora_r and source.raw.place.kind == "gguf"):
        return source
    if source.patch is not None:
        raise UsageError(f"{source.path} is an adapter: new tokens and another context change its base; merge it first")
    base, against = Path(config.out) / "base", None if grows else str(source.path)

    def make() -> None:
        if base.exists():
            require_proven(base, against=against)
        else:
            require_rows(config)
            write_proven(base, _based(config, source, say), against=against)
            say(f"{base}: {source.path.name} as a folder that other tools open, proven")

    made_by_first(world, base, make)
    to = straight_to(device) if config.base_dtype is None else Destination(device)
    if holds_outline(config) or opens_in_parts(config):
        return open_artifact(base, to=Destination("meta"))
    return open_artifact(base, to=to, held=config.base_dtype)


def require_rows(config: Trained) -> None:
    """Require that every file of --data has a row, before a folder is written for a run that could not begin."""
    for source in weighted_sources(getattr(config, "data", ()), "--data"):
        if next(iter(read_rows(local_data(source.name), limit=1)), None) is None:
            raise DataError(f"{source.name}: there is no row in it")


def made_by_first(world: World | None, where: Path, make: Callable[[], object]) -> None:
    """A folder of the run that every process opens, made by process 0 alone."""
    (world or World(0, 1, "cpu")).made_by_first(where.name, make)
    if not where.exists():
        raise UsageError(f"{where}: process 0 wrote it, and it is not here: with several machines --out must lie on a disk that all share")


def write_proven(where: Path, contents: checkpoint.Contents, *, against: str | None = None) -> None:
    """A model that a run makes to begin with: written, and proven before it is trained on. What it says, the first checkpoint shows."""
    checkpoint.write_checkpoint(where, contents)
    require_proven(where, against=against)


def require_proven(where: Path, *, against: str | None = None) -> None:
    """Require a hallmark, also of a model that an earlier session wrote: that may have been killed before the proof, or stopped by it."""
    if checkpoint.open_checkpoint(where).hallmark is not None:
        return
    verdicts = prove_checkpoint(where, against=against, probing=ProofSampling(samples=0))
    if overall(without_optional(verdicts)) is not Outcome.PROVEN:
        raise GuardStop(f"{where} is not proven: " + "; ".join(str(v) for v in verdicts if v.outcome is not Outcome.PROVEN))


def _based(config: Trained, source: Artifact, say: Callable[[str], None]) -> checkpoint.Contents:
    """Contents of RUN/base in the dtype of what was given: what is frozen is held as its file holds it."""
    tokenizer, dtype = source.tokenizer, common_dtype(source.tensors)
    if config.rope_scaling is not None:
        source = replace(source, config=scaled_context(source.config, config.rope_scaling))
        say(f"--rope-scaling {config.rope_scaling}: a context of {source.config.max_length:,} tokens")
        if not config.new_tokens or tokenizer is None:
            return model_contents(build_model(source), tokenizer, source.stops, Lineage("new"), dtype=dtype)
    if not config.new_tokens or tokenizer is None:
        lineage = Lineage("same", Ancestor(source.digest, str(source.path.resolve())))
        return model_contents(build_model(source), tokenizer, source.stops, lineage, dtype=dtype)
    grown_tokenizer = with_new_tokens(tokenizer, config.new_tokens)
    grown = resize_embeddings(source.config, source.tensors, tokenizer, grown_tokenizer)
    say(f"new tokens {' '.join(config.new_tokens)}: rows {', '.join(map(str, grown.rows))} of {grown.config.vocab}, each the mean of "
        "the pieces its text was")
    model = assemble_model(grown.config, grown.tensors, torch.float32).eval()
    return model_contents(model, grown_tokenizer, resolve_special_tokens(grown_tokenizer, {},
                                                                         {"eos_token_id": list(source.stops.stop_ids)}),
                          Lineage("new"), dtype=dtype)


def common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The one dtype that all have, or fp32, which holds every one of several."""
    found = {tensor.dtype for tensor in tensors.values()}
    return found.pop() if len(found) == 1 else torch.float32


def _narrowed(config: Trained, parent: Artifact) -> str | None:
    """The dtype to which masters round a parent that is wider, before the first step."""
    masters = str(asked_masters(config)).removeprefix("torch.")
    return masters if masters == "bfloat16" and majority_dtype(parent.tensors) != masters else None


def refuse_lora_options(config: Trained, path: Path, rank: int | None, *, rslora: bool = False) -> None:
    """`rank` is of the adapter that was named; None: a whole model was."""
    if rank is not None and (config.lora_r not in (0, rank) or config.lora_target_modules or config.lora_alpha
                             or config.use_rslora > rslora):
        raise UsageError(f"{path} is an adapter of rank {rank}, which is trained on as it is: leave the --lora options out; "
                         "for another adapter merge it first")
    if rank is None and not config.lora_r and (config.lora_target_modules or config.lora_alpha or config.use_rslora):
        raise UsageError("--lora-alpha, --lora-target-modules and --use-rslora are for adapters; give --lora-r too")


def trainable(config: Trained, parent: Artifact, tokenizer: Tokenizer) -> TrainedWeights:
    whole = parent.patch is None and not config.lora_r
    model, ancestor = build_model(parent, torch.float32 if whole else None), Ancestor(parent.digest, str(parent.path.resolve()),
                                                                                           parent.held)
    # Memory of its own where all is trained: what is learned must not change the parent it is held against.
    given_away = {tensor.data_ptr() for tensor in parent.tensors.values()}
    for parameter in model.parameters() if whole else ():
        if parameter.data_ptr() in given_away:  # others were widened, and are copies already
            parameter.data = parameter.data.clone()
    same, moved = Lineage("same", ancestor, rounded=_narrowed(config, parent)), Lineage("moved", ancestor)
    if parent.patch is not None and parent.base is not None and parent.adapter is not None:
        if parent.patch.replaced:
            raise UsageError(f"{parent.path} is an adapter that changes whole tensors ({', '.join(sorted(parent.patch.replaced)[:3])}), "
                             "which cannot be trained on as one; export it --to merged, and train that")
        rank = next(iter(parent.patch.low_rank.values()))[0].right.shape[0]
        refuse_lora_options(config, parent.path, rank, rslora=parent.adapter.rslora)
        base = Ancestor(parent.base.digest, str(parent.base.path.resolve()), parent.base.held)
        words = f"continuing the adapter of {parent.path}: rank {rank}, {len(parent.patch.low_rank)} matrices"
        return AdapterModel(model, base, tokenizer, parent.adapter.rslora, Ancestry(same, moved), words)
    refuse_lora_options(config, parent.path, None)
    if not config.lora_r:
        values = [tensor for tensor in parent.tensors.values() if not tensor.is_meta]
        largest = max((float(max(end.abs() for end in tensor.aminmax())) for tensor in values), default=None)
        return WholeModel(model.requires_grad_(True), tokenizer, parent.stops, Ancestry(same, moved, largest))
    alpha = config.lora_alpha or 2 * config.lora_r
    scale = alpha / (config.lora_r**0.5 if config.use_rslora else config.lora_r)
    planned = plan(parent.config, config.lora_target_modules or None)
    attach(model, fresh(parent.config, planned, config.lora_r, scale, config.seed, parent.digest))
    # A fresh adapter changes nothing yet, and there is no adapter that came before it.
    weights = AdapterModel(model, ancestor, tokenizer, config.use_rslora, Ancestry(Lineage("new"), moved),
                           _plan_in_words(planned, config.lora_r, alpha, scale))
    stop_if_refuted([check_adapted(planned, weights.patch())])
    return weights


def carried_state(config: Trained) -> tuple[dict[str, Tensor], int]:
    if config.from_ is None or config.optimizer_state == "fresh":
        return {}, 0
    found = open_checkpoint(local_path(config.from_))
    state, trainer = found.optimizer(), found.trainer()
    if not state or not trainer:
        raise UsageError(f"{config.from_} holds no moments to carry on; use --optimizer-state fresh")
    return {name: tensor for name, tensor in state.items() if not name.startswith("ema/")}, trainer["step"] + trainer.get("steps_before", 0)


def carry_moments(optimizer: torch.optim.Optimizer, start: StartingModel) -> None:
    if start.carried:
        load_state_tensors(optimizer, dict(start.model.named_parameters()), start.carried)


def _held_in_words(base: Artifact) -> str:
    return "" if base.held is None else f"; the base is held in {base.held}, {base.rounding:.2%} from its file (norm of all differences)"


def _plan_in_words(planned: list[LoraSite], rank: int, alpha: float, scale: float) -> str:
    leaves: dict[str, int] = {}
    for site in planned:
        leaf = site.foreign.rpartition(".")[2]
        leaves[leaf] = leaves.get(leaf, 0) + 1
    counted = ", ".join(f"{leaf} × {count}" for leaf, count in leaves.items())
    return f"LoRA of rank {rank}, alpha {alpha:g}, so its update is scaled by {scale:g}; {len(planned)} layers: {counted}"

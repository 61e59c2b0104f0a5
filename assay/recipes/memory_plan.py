"""Memory plan: what a run will take on its device and its disk, by part, from config and headers alone; and what would fit instead.

The arithmetic is of what must be held at once: everything that stays (weights, masters, gradients, moments, a cache), and the larger
of what the preflight adds for a while, and of what a step adds beside the copy of weights and moments that a save takes on the device
where there is room. What torch and CUDA take for themselves is not in it.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from assay.errors import ArtifactError, UsageError
from assay.guard.loss_preflight import LARGE, TOKENS_TOGETHER_FP32
from assay.kernels.softcap_ce import CHUNK_BYTES
from assay.model.families import config_from_hf, parameter_shapes
from assay.model.lora import plan
from assay.model.quantised import STORED_BITS, is_quantisable
from assay.model.transformer import ModelConfig, qkv_rows
from assay.recipes.compute_dtype import asked_masters, compute_bytes
from assay.recipes.dpo_options import AgainstReference
from assay.recipes.grpo_options import Grpo
from assay.recipes.options import Distill, Pretrain, Trained, Tuned
from assay.recipes.run import Run
from assay.store import model_cache
from assay.store.artifact import ArtifactPlace, locate_artifact
from assay.store.checkpoint import open_checkpoint
from assay.store.compressed_tensors import is_compressed, plain_fields, plain_names
from assay.store.gguf import gguf_config
from assay.store.ledger import Event
from assay.store.safetensors_files import SAFETENSORS_DTYPES, read_folder_headers
from assay.strict_json import read_json

GIB = 2**30
NEAR = 0.10  # predicted and used agree to this share
CERTAIN = 0.85  # of what is predicted: what no run was seen to do with less of, so that nothing sound is refused
KEPT_CHECKPOINTS = 4  # the newest two, the best, and one that is being written
MASTER = 4  # bytes of an fp32 number
MERGED_UNASKED = 4 * 10**9  # bytes of a base
_PROMPT = 512  # tokens of the longest prompt, where --max-prompt-length does not say it


@dataclass(frozen=True)
class PlannedModel:
    """A model as its config and its headers describe it. `rank` is of the adapter that it comes with, 0 where it has none."""

    config: ModelConfig
    stored: int  # bytes of the weights in their file
    rank: int = 0
    adapted: int = 0  # parameters of that adapter
    rslora: bool = False
    held: str | None = None  # the dtype in which that adapter's base was held when it was trained

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in parameter_shapes(self.config).values())


@dataclass(frozen=True)
class PlannedWork:
    """Settings of a run that decide on its memory. `rows` of `length` tokens go through the model at a time."""

    rows: int
    length: int
    lora_r: int = 0
    lora_targets: tuple[str, ...] = ()
    checkpointing: bool = False
    compute: int = 2  # bytes of a number in the stream
    moments: int = 8  # bytes of the optimizer's state for each trained number
    averaged: bool = False  # a moving average is kept
    slots: int = 0  # of the sampler; 0: nothing is sampled
    slot_length: int = 0
    reference: bool = False
    teacher: int = 0  # bytes of its weights
    processes: int = 1  # that hold the model in parts
    streamed: bool = False  # and open it in parts: nobody holds it whole before step 1 either
    base_dtype: str | None = None  # that a frozen base is held in; None: its file's
    masters: int = 4  # bytes of a trained number, and of its gradient
    merged: bool = True  # whether a whole model is handed over, or an adapter alone
    makes_base: bool = False  # RUN/base is written first
    compiled: bool = True  # as on a GPU
    ungraded: int = 0  # bytes of attention scores that no fused kernel computes, where a sampler reads prompts or a teacher rows

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part. The parts add up to the peak: what the preflight takes counts as far as a step and a save do not take it later, and
    what passes without gradients take as far as neither does. Evaluations take less than a step: their scores are those of `ungraded`."""

    model: PlannedModel
    work: PlannedWork
    parts: dict[str, int]
    trained: int  # parameters
    disk: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def least(self) -> int:
        """Least memory that the run can do with: a sampler takes fewer slots, and a save copies to the host, where there is less room."""
        return self.on_device_at_least - self.parts["cache"] - self.parts["passes"]

    @property
    def on_device_at_least(self) -> int:
        """Device memory with saves that copy to the host. Where the preflight takes more than a step and a save, they save nothing."""
        return self.total - (0 if self.parts["preflight"] else self.parts["saving"])

    @property
    def steps(self) -> int:
        """Memory of the steps, without a preflight before them, saves beside them and passes between them."""
        return self.total - self.parts["preflight"] - self.parts["saving"] - self.parts["passes"]

    def lines(self) -> list[str]:
        """Lines of the plan for people."""
        w, m = self.work, self.model
        how = f"LoRA of rank {w.lora_r or m.rank}" if w.lora_r or m.rank else "the whole model"
        again = ", activations made again" if w.checkpointing else ""
        return [f"{m.parameters:,} parameters, {self.trained:,} trained ({how}); {w.rows} × {w.length} tokens at a time{again}",
                *(f"  {name:12} {size / GIB:8.2f} GiB" for name, size in self.parts.items() if size),
                f"  {'together':12} {self.total / GIB:8.2f} GiB on the device", f"  {'disk':12} {self.disk / GIB:8.2f} GiB in --out"]

    def to_json(self) -> dict[str, Any]:
        return {"parameters": self.model.parameters, "trained": self.trained, "parts": self.parts, "device_bytes": self.total,
                "disk_bytes": self.disk, "rows": self.work.rows, "length": self.work.length,
                "gradient_checkpointing": self.work.checkpointing, "lora_r": self.work.lora_r or self.model.rank}

# ---------------------------------------------------------------- the arithmetic


def plan_memory(model: PlannedModel, work: PlannedWork) -> MemoryPlan:
    config, adapter = model.config, bool(work.lora_r or model.rank)
    trained = model.adapted or (adapter_parameters(config, work.lora_r or model.rank, work.lora_targets) if adapter else model.parameters)
    wide = work.compute == MASTER  # fp32 compute widens what is frozen
    frozen = base_bytes(model, work.base_dtype, wide=wide) if adapter else 0
    stays = {"weights": frozen, "masters": work.masters * trained, "gradients": work.masters * trained,
             "moments": work.moments * trained, "average": MASTER * trained * work.averaged,
             "reference": (MASTER * trained) * work.reference,
             "teacher": work.teacher, "sampler": work.compute * trained * bool(work.slots) * (not wide),
             "cache": 2 * config.depth * config.kv_heads * config.head_dim * work.compute * work.slots * work.slot_length}
    activations, logits = activation_bytes(config, work, whole=not adapter), logit_bytes(config, work, whole=not adapter)
    preflight = preflight_bytes(config, work, trained, whole=not adapter)
    a_checkpoint = (MASTER + work.moments + MASTER * work.averaged) * trained
    if work.base_dtype in STORED_BITS:
        activations += unpacked_bytes(config, work.compute)
    saving = 0 if wide or work.processes > 1 else a_checkpoint
    stays |= {"activations": activations, "logits": logits, "preflight": max(0, preflight - activations - logits - saving),
              "saving": saving}
    if work.processes > 1 and work.slots:  # process 0 samples from a copy of its own, and holds the reference whole
        stays |= {"sampler": work.compute * model.parameters, "reference": (frozen + MASTER * trained) * work.reference}
    if work.processes > 1:
        stays |= in_parts(stays, work.processes)
    if work.processes > 1 and work.streamed:
        passing = preflight_bytes(config, work, 0, whole=not adapter) + streamed_bytes(config, trained, work.processes, adapter=adapter)
        stays["preflight"] = max(0, passing - activations - logits)
    stays["passes"] = max(0, work.ungraded - activations - logits - stays["preflight"])
    handed_over = MASTER * model.parameters * work.merged + (MASTER * trained if adapter else 0)
    return MemoryPlan(model, work, stays, trained, KEPT_CHECKPOINTS * a_checkpoint + handed_over + made_base_bytes(model, work))


def made_base_bytes(model: PlannedModel, work: PlannedWork) -> int:
    """Bytes of RUN/base, which is as what it is made of."""
    return model.stored * work.makes_base


def in_parts(whole: dict[str, int], processes: int) -> dict[str, int]:
    """Memory parts with --fsdp: each process holds its part of what stays. Before step 1 process 0 holds the model and its gradients whole,
    but no moments: what that takes more counts as the preflight's."""
    parts = {name: -(-whole[name] // processes) for name in ("weights", "masters", "gradients", "moments", "average")}
    before = sum(whole[name] for name in ("weights", "masters", "gradients", "average")) + whole["preflight"]
    return parts | {"preflight": max(0, before - sum(parts.values()))}


def streamed_bytes(config: ModelConfig, trained: int, processes: int, *, adapter: bool) -> int:
    """Memory of process 0 before step 1, for a model that is opened in parts: three sets of gradients in parts; embedding and head whole,
    with the gradients that are compared; a layer and its gradients as it is fetched. What is frozen has no gradients."""
    shapes = parameter_shapes(config)
    root = sum(math.prod(shape) for name, shape in shapes.items() if not name.startswith("blocks."))
    layer = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("blocks.0."))
    return MASTER * (3 * (trained if adapter else -(-trained // processes)) + (root + layer if adapter else 4 * root + 2 * layer))


def base_bytes(model: PlannedModel, base_dtype: str | None, *, wide: bool) -> int:
    """Bytes of a frozen base: as in its file, or its matrices in few bits and the rest as in its file. fp32 compute widens what is no
    code."""
    each = MASTER if wide else 2 if base_dtype == "bf16" else model.stored / max(1, model.parameters)
    coded = sum(math.prod(shape) for name, shape in parameter_shapes(model.config).items() if is_quantisable(name, shape))
    coded = coded if base_dtype in STORED_BITS else 0
    return round(each * (model.parameters - coded) + coded * STORED_BITS.get(str(base_dtype), 0) / 8)


def unpacked_bytes(config: ModelConfig, compute: int) -> int:
    """The largest matrix of a quantised base as it is used."""
    largest = max(math.prod(shape) for name, shape in parameter_shapes(config).items() if is_quantisable(name, shape))
    return largest * (2 if compute == 2 else 2 + compute)


def adapter_parameters(config: ModelConfig, rank: int, targets: tuple[str, ...] = ()) -> int:
    shapes = parameter_shapes(config)
    return sum(rank * (site.stop - site.start + shapes[site.parameter][1]) for site in plan(config, targets or None))


def layer_entries(config: ModelConfig) -> int:
    """Numbers that a layer keeps of each token for the way back: its two streams and their norms, q, k and v as they are made and as
    they are attended with, what attention gives, and the MLP's inner states before and after its activation. Of a mixture those of the
    experts that a token goes to, each with what it is given and what it gives."""
    q, k, v = qkv_rows(config)
    e = config.experts
    wide, carried = (config.hidden, 0) if e is None else (e.active * e.hidden + (e.shared_hidden or 0), 2 * e.active * config.width)
    inner = (3 if config.gated else 2) * wide + carried
    turned = q + k if config.qk_norm or config.rope else 0
    return 4 * config.width + (q + k + v) + turned + q + inner


class ScoreBytes(NamedTuple):
    """Bytes of a layer's attention scores, where no fused kernel computes them."""

    kept: int  # for the way back
    passing: int  # more, while the layer is computed, with gradients
    ungraded: int  # all of it where there are none


def score_bytes(config: ModelConfig, tokens: int, length: int, compute: int, *, compiled: bool) -> ScoreBytes:
    """Memory of a layer's attention scores with soft caps or sinks (`ruled_attention`), as torch was seen to take it.

    Kept are the shares in fp32 and as they are rounded; with a cap its tanh in fp32 too or, compiled, products and shares alone, in the
    stream's dtype. A pass holds three sets in fp32 at once, and the cap's way back, uncompiled, one more. The mask is a byte for all heads.
    """
    if config.fused_attention:
        return ScoreBytes(0, 0, 0)
    places, heads, capped = tokens * length, config.heads, config.attention_softcap is not None
    shares = MASTER + (compute if compute < MASTER else 0)
    kept = shares if not capped else 2 * compute if compiled else MASTER + shares
    at_once = MASTER * (4 if capped and not compiled else 3)
    return ScoreBytes(places * (heads * kept + 1), places * heads * (at_once - kept), places * (3 * MASTER * heads + 1))


def activation_bytes(config: ModelConfig, work: PlannedWork, *, whole: bool) -> int:
    scores, passing, _ = score_bytes(config, work.tokens, work.length, work.compute, compiled=work.compiled)
    a_layer = layer_entries(config) * work.compute * work.tokens
    matrices = sum(math.prod(shape) for name, shape in parameter_shapes(config).items() if name.startswith("blocks.") and len(shape) == 2)
    rounded = work.compute * matrices if whole and work.compute < MASTER else 0  # masters are rounded once for both ways
    if work.checkpointing:  # the streams between layers; and one layer as it is made again, with the gradients that run through it
        return config.depth * config.width * work.compute * work.tokens + 2 * a_layer + scores + passing + rounded // config.depth
    return config.depth * (a_layer + scores) + (a_layer // 2) + passing + rounded


def logit_bytes(config: ModelConfig, work: PlannedWork, *, whole: bool) -> int:
    """A chunk of them, the states' gradient in fp32, and of a head that learns its rounded copy and its gradient."""
    head = config.vocab * config.width
    whole_logits = work.tokens * config.vocab * work.compute
    chunk = min(CHUNK_BYTES, whole_logits) if work.compute < MASTER else 3 * whole_logits
    return chunk + 2 * MASTER * work.tokens * config.width + ((work.compute + MASTER) * head if whole else 0)


def preflight_bytes(config: ModelConfig, work: PlannedWork, trained: int, *, whole: bool) -> int:
    """Memory of the preflight, in fp32 a row or a few at a time, activations recomputed; two more sets of gradients are held. The head,
    widened, and a row's logits come when no layer is being recomputed, and a layer, its frozen MLP widened, when they are gone."""
    row = min(work.length, 2048)
    large = sum(map(math.prod, parameter_shapes(config).values())) >= LARGE
    shown, together = (min(row, 256), row) if large else (row, max(row, min(work.tokens, TOKENS_TOGETHER_FP32)))
    streams, a_layer = config.depth * config.width * MASTER * together, 3 * layer_entries(config) * MASTER * together // 2
    scores, passing, _ = score_bytes(config, together, row, MASTER, compiled=False)
    a_layer += scores + passing
    mlp = MASTER * config.width * config.hidden * (0 if whole else 3)
    head = MASTER * config.vocab * config.width
    return 2 * MASTER * trained + streams + max(head + 3 * MASTER * shown * config.vocab, a_layer + mlp)

# ---------------------------------------------------------------- from options


def planned_model(name: str | Path) -> PlannedModel:
    """Model to plan for, from config.json and the headers of the weight files; where there are no weights yet, from config.json alone."""
    path = model_cache.cached_model(str(name)) or Path(name)
    if path.is_dir() and (path / "config.json").exists() and not any(path.glob("*.safetensors*")):
        fields = read_json(path / "config.json")
        config = config_from_hf(fields, (), str(path / "config.json"))
        named = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
        dtype = {str(known).removeprefix("torch."): known for known in SAFETENSORS_DTYPES.values()}.get(named)
        if dtype is None:
            raise UsageError(f"{path / 'config.json'}: dtype is {named!r}; expected float32, bfloat16 or float16")
        return PlannedModel(config, dtype.itemsize * PlannedModel(config, 0).parameters)
    place = locate_artifact(path)
    if place.adapter:
        fields, base = read_json(place.path / "adapter_config.json"), _base_of(place)
        if base is None:
            raise UsageError(f"{place.path}: an adapter is planned with its base, and {fields.get('base_model_name_or_path')} is not here")
        entries = read_folder_headers(place.path, "adapter_model")
        recorded = open_checkpoint(place.path, verify=False).facts.get("base") or {} if place.kind == "checkpoint" else {}
        return replace(planned_model(base), rank=adapter_rank(fields, place.path), rslora=bool(fields.get("use_rslora")),
                       held=recorded.get("held"), adapted=sum(math.prod(entry.shape) for entry in entries.values()))
    if place.kind == "gguf":  # made numbers of fp32 when it is opened
        config = gguf_config(place.path)
        return PlannedModel(config, MASTER * PlannedModel(config, 0).parameters)
    if place.format.read is not None:
        raise UsageError(f"{place.path}: a plan is made from a folder; a {place.kind} file says its sizes only when it is opened. "
                         "Write it as a folder with assay export --to hf")
    entries, fields = read_folder_headers(place.path), read_json(place.path / "config.json")
    config = config_from_hf(plain_fields(fields), plain_names(entries), str(place.path / "config.json"))
    stored = sum(SAFETENSORS_DTYPES[entry.dtype].itemsize * math.prod(entry.shape) for entry in entries.values())
    return PlannedModel(config, MASTER * PlannedModel(config, 0).parameters if is_compressed(fields) else stored)


def adapter_rank(fields: Mapping[str, Any], where: Path) -> int:
    rank = fields.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ArtifactError(f"{where / 'adapter_config.json'}: r is {rank!r}; expected the rank of a LoRA adapter")
    return rank


def _base_of(place: ArtifactPlace) -> Path | None:
    named = Path(str(read_json(place.path / "adapter_config.json").get("base_model_name_or_path")))
    places = (model_cache.cached_model(str(named)), named, place.path / named)
    return next((one for one in places if one is not None and one.exists()), None)


def planned_work(config: Tuned | Grpo, model: PlannedModel, device: str) -> PlannedWork:
    compute = compute_bytes(config, device)
    common = PlannedWork(1, 1, config.lora_r, config.lora_target_modules, config.gradient_checkpointing, compute,
                         moments=2 if config.optim == "adamw_8bit" else 8, base_dtype=config.base_dtype or model.held,
                         merged=not (config.lora_r or model.rank) or merges(config, model.stored), makes_base=makes_base(config),
                         processes=parting_processes(config), streamed=may_open_in_parts(config),
                         masters=asked_masters(config).itemsize, compiled=is_compiled(config, device))
    if isinstance(config, Grpo):
        from assay.generate.engine import PREFILL_TOKENS
        from assay.recipes.rollout_batch import layout_of  # which begins with a starting model, and that with a plan

        prompt = min(model.config.max_length, config.max_prompt_length or _PROMPT)
        read = max(prompt, min(PREFILL_TOKENS, config.prompts * prompt))
        longest = min(model.config.max_length, (config.max_prompt_length or _PROMPT) + config.max_completion_length)
        layout = layout_of(device, config.micro_batch_size, longest, model.config.max_length)
        return replace(common, rows=layout.rows, length=layout.width or longest, slots=min(1024, config.prompts * config.num_generations),
                       slot_length=longest, reference=config.beta > 0,
                       ungraded=score_bytes(model.config, read, prompt, compute, compiled=False).ungraded)
    rows = max(1, min(config.batch_tokens, config.micro_batch_tokens) // config.row_length)
    online = isinstance(config, Distill) and config.how == "online" and config.teacher is not None
    teachers = [planned_model(path) for path, _ in config.teachers()] if online and isinstance(config, Distill) else []
    asked = (score_bytes(each.config, rows * config.row_length, config.row_length, compute, compiled=False).ungraded for each in teachers)
    live = isinstance(config, AgainstReference) and config.reference == "live"
    return replace(common, rows=rows, length=config.row_length, teacher=sum(each.stored for each in teachers), reference=live,
                   ungraded=max(asked, default=0))


def is_compiled(config: Trained | Pretrain, device: str) -> bool:
    return device.startswith("cuda") and not config.fsdp


def makes_base(config: Trained) -> bool:
    """RUN/base: what is trained, or adapted, is another folder than the one that was named."""
    gguf = str(config.from_ or config.model).endswith(".gguf")
    return bool(config.new_tokens) or config.rope_scaling is not None or (bool(config.lora_r) and gguf)


def merges(config: Trained, stored: int) -> bool:
    """Whether an adapter is handed over merged too, on a base of so many bytes: of a large one that takes minutes and twice its bytes,
    and PEFT, vLLM and `assay serve` take RUN/adapter as it is."""
    return stored <= MERGED_UNASKED if config.merge is None else config.merge == "always"


def plan_tuning(config: Tuned | Grpo, device: str) -> MemoryPlan:
    name = config.model or config.from_
    if name is None:
        raise UsageError("name what to plan for: --model for a model, or --from for a checkpoint of a run")
    model = planned_model(name)
    return plan_memory(model, planned_work(config, model, device))


def plan_pretraining(config: Pretrain, shape: ModelConfig, device: str) -> MemoryPlan:
    rows = max(1, min(config.batch_tokens, config.micro_batch_tokens) // config.max_length)
    moments = 8 if config.optimizer == "adamw" else 5  # muon keeps one average of a matrix's gradients, AdamW the rest's
    work = PlannedWork(rows, config.max_length, checkpointing=config.gradient_checkpointing, moments=moments, averaged=config.ema > 0,
                       compute=compute_bytes(config, device), processes=parting_processes(config), streamed=config.fsdp,
                       compiled=is_compiled(config, device))
    return plan_memory(PlannedModel(shape, 0), work)


def may_open_in_parts(config: Trained) -> bool:
    return config.fsdp and sampled_whole(config) is None


def sampled_whole(config: Trained) -> str | None:
    """Why process 0 holds the model whole whatever else is cut into parts, where it does."""
    samples = isinstance(config, Grpo) or (isinstance(config, Distill) and config.on_policy > 0)
    return "it samples, alone, from a copy of the model that it gathers for every rollout" if samples else None


def parting_processes(config: Tuned | Grpo | Pretrain) -> int:
    """Number of processes that --fsdp splits the model over: those that there are, or that --gpus would start."""
    return int(os.environ.get("WORLD_SIZE", config.gpus)) if config.fsdp else 1

# ---------------------------------------------------------------- does it fit?


def device_memory(device: str) -> int | None:
    """Bytes that a run may take on a GPU; None where nothing bounds it but the host."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    limited = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    share = limited(torch.device(device if ":" in device else f"{device}:0")) if limited is not None else 1.0
    return min(free + torch.cuda.memory_reserved(device), int(share * total))


def alternatives(found: MemoryPlan, available: int) -> list[str]:
    """Settings that would fit, the least change first, in the options that say them."""
    return [f"{words} ({made.total / GIB:.1f} GiB)" for words, made in _variants(found)
            if made.on_device_at_least <= available][:3]


def _variants(found: MemoryPlan) -> Iterator[tuple[str, MemoryPlan]]:
    model, work = found.model, found.work
    fewer = [work.rows // 2**halved for halved in range(1, 12) if work.rows // 2**halved >= 1]
    option: Callable[[int], str] = (lambda rows: f"--micro-batch-size {rows}") if work.slots else \
        (lambda rows: f"--micro-batch-tokens {rows * work.length}")
    for rows in fewer:
        yield option(rows), plan_memory(model, replace(work, rows=rows))
    if not work.checkpointing:
        for rows in (work.rows, *fewer):
            smaller = "" if rows == work.rows else f" {option(rows)}"
            yield f"--gradient-checkpointing{smaller}", plan_memory(model, replace(work, rows=rows, checkpointing=True))
    if work.lora_r and not model.rank and work.processes == 1 and work.base_dtype not in STORED_BITS:  # where a run takes it
        for dtype in STORED_BITS:
            yield (f"--base-dtype {dtype} --gradient-checkpointing {option(1)}",
                   plan_memory(model, replace(work, rows=1, base_dtype=dtype, checkpointing=True)))
    if not (work.lora_r or model.rank) and model.stored:
        words = "--lora-r 16" if work.masters == MASTER else "--lora-r 16 --master-dtype fp32"
        adapter = replace(work, lora_r=16, masters=MASTER)
        for rows in (work.rows, *fewer):
            smaller = "" if rows == work.rows else f" {option(rows)}"
            yield f"{words}{smaller}", plan_memory(model, replace(adapter, rows=rows))
        yield f"{words} --gradient-checkpointing {option(1)}", plan_memory(model, replace(adapter, rows=1, checkpointing=True))


def refuse_unfit(config: Trained, device: str) -> MemoryPlan | None:
    """The plan of a run on a GPU, before anything is loaded. What certainly does not fit is refused, with what would.

    None where nothing bounds it, or where its sizes are only known once it is opened: grown by new tokens, or one file.
    """
    available, name = device_memory(device), config.model or config.from_
    if available is None or not isinstance(config, Tuned | Grpo) or config.new_tokens or name is None:
        return None  # a run of no model is refused, in its own words, by whoever opens it
    place = locate_artifact(name)
    if place.format.read is not None or (place.adapter and _base_of(place) is None):
        return None
    shortest = replace(config, max_prompt_length=config.max_prompt_length or 1) if isinstance(config, Grpo) else config
    require_fit(plan_tuning(shortest, device), available, device)  # prompts that no option bounds may be short
    return plan_tuning(config, device)


def require_fit(found: MemoryPlan, available: int, device: str) -> None:
    if CERTAIN * found.least <= available:
        return
    fitting = alternatives(found, available)
    instead = f"these would fit: {'; '.join(fitting)}" if fitting else "nothing that leaves the model as it is would fit"
    largest = ", ".join(f"{part} {size / GIB:.1f}" for part, size in sorted(found.parts.items(), key=lambda part: -part[1])[:3])
    raise UsageError(f"this run needs about {found.total / GIB:.1f} GiB ({largest}), and {device} has {available / GIB:.1f}; {instead}. "
                     "assay plan shows every part")


def compared_with_use(found: MemoryPlan, used: int) -> str:
    """Sentence about planned and used memory, for the log and the ledger."""
    apart = found.total / used - 1 if used else math.inf
    words = f"GPU memory: {used / GIB:.2f} GiB at the most, {found.total / GIB:.2f} planned ({apart:+.0%})"
    return words if abs(apart) <= NEAR else f"{words}: the plan is off by more than {NEAR:.0%}"


def record_use(run: Run, found: MemoryPlan | None, device: str) -> None:
    """Report and record the GPU memory used so far beside what was planned."""
    if found is None or not device.startswith("cuda"):
        return
    used = max(run.memory_seen, torch.cuda.max_memory_allocated(device))
    run.say(compared_with_use(found, used))
    run.log(Event.MEMORY, used=used, planned=found.total, parts=found.parts, near=abs(found.total / used - 1) <= NEAR)

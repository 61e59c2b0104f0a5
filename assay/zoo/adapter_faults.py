"""Adapter faults: saved, loaded, resumed, merged and served, in PEFT folders and in our own checkpoints."""

import functools
import math
import queue
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.errors import ArtifactError, AssayError
from assay.generate.generation_request import CompletionProgress, GenerationRequest, Sampling
from assay.guard.policy_identity import check_version
from assay.model import patch as patches
from assay.model import quantised
from assay.model.lora import fresh, lora_sites, plan
from assay.model.patch import Patch
from assay.model.quantised import QuantisedMatrix
from assay.model.transformer import Transformer
from assay.serving import hosted_model
from assay.serving.engine_thread import EngineThread, PendingCall, ServerSize
from assay.store import artifact, checkpoint, export_artifact, quantised_base, saving
from assay.store.artifact import Artifact, build_model, merged_tensors, open_artifact
from assay.store.saving import Ancestor, Lineage, adapter_contents
from assay.testing import tiny_models
from assay.testing.fault_injection import Job, Plant, fault, in_place_of, on_disk, swap
from assay.testing.tiny_models import (
    ADAPTED_LAYERS,
    ADAPTER_FILE,
    changed_json,
    changed_tensors,
    edit_json,
    examine_folder,
    live_patch,
    nudge,
    rewrite_tensors,
    rounded_to_four_bits,
    save_adapter,
    save_and_examine,
    save_model,
    save_peft_folder,
    tiny_model,
    tokenizer_and_stops,
)
from assay.verdict import Verdict, proven, refuted

_Weights = dict[str, Tensor]
DOWN = "blocks.1.mlp.down.weight"
_HEAD: dict[str, Any] = {"family": "llama3", "replaced": ("head.weight",)}  # an adapter with which the head was trained

# ---------------------------------------------------------------- jobs


@functools.cache
def an_adapter(family: str = "llama", **options: Any) -> Job:
    """Ours, saved well beside its base; struck on the disk, or in our own code while it loads."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        base = save_model(folder / "base", tiny_model(family)).folder
        where = save_adapter(folder / "adapter", base, **options).folder
        with plant(where):
            return examine_folder(where)
    return job


@functools.cache
def a_peft_folder(family: str = "llama", **options: Any) -> Job:
    """Another tool's, struck on the disk: it names its base by path and records nothing else about it."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        base = tiny_models.save_hf_folder(folder / "base", tiny_model(family))
        where = save_peft_folder(folder / "adapter", base, **options)
        with plant(where):
            return examine_folder(where)
    return job


def a_documented_adapter(folder: Path, plant: Plant) -> list[Verdict]:
    """Its trainer wrote the settings into the model card, as some do."""
    base = save_model(folder / "base", tiny_model()).folder
    where = save_peft_folder(folder / "adapter", base)
    (where / "README.md").write_text("# An adapter\n\n```yaml\nadapter: lora\nlora_r: 4\nlora_alpha: 8\n```\n")
    with plant(where):
        return examine_folder(where, base=str(base))


def a_dora_folder(folder: Path, plant: Plant) -> list[Verdict]:
    """Another tool's DoRA adapter: beside its factors, the length of every adapted row, here 1.05 times the base's."""
    base = tiny_models.save_hf_folder(folder / "base", tiny_model())
    where, weights = save_peft_folder(folder / "adapter", base), open_artifact(base).tensors
    edit_json(where / "adapter_config.json", lambda fields: fields | {"use_dora": True})
    sites = lora_sites(tiny_model().config)

    def with_magnitudes(tensors: _Weights) -> _Weights:
        layers = {name.partition(".lora_")[0] for name in tensors}
        chosen = {layer: sites[layer.removeprefix("base_model.model.")] for layer in layers}
        return tensors | {f"{layer}.lora_magnitude_vector": 1.05 * weights[site.parameter][site.start : site.stop].norm(dim=1)
                          for layer, site in chosen.items()}

    rewrite_tensors(where / ADAPTER_FILE, with_magnitudes)
    with plant(where):
        return examine_folder(where)


@functools.cache
def an_adapter_save(family: str = "llama", **options: Any) -> Job:
    """Struck while our own code saves it."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        base, where = save_model(folder / "base", tiny_model(family)).folder, folder / "adapter"
        return save_and_examine(where, lambda: save_adapter(where, base, **options), plant)
    return job


def a_resumed_adapter(folder: Path, plant: Plant) -> list[Verdict]:
    """Opened, trained one small step further, saved again: struck while it is opened."""
    base = save_model(folder / "base", tiny_model()).folder
    first = save_adapter(folder / "step-000001", base).folder
    with plant(folder):
        loaded = open_artifact(first)
        model = nudge(artifact.build_model(loaded), 1e-4)
    ground = Ancestor(open_artifact(base).digest, str(base))
    lineage = Lineage("moved", Ancestor(loaded.digest, str(first)), movement_bound=1e-2)
    contents = adapter_contents(model, live_patch(model, ground.weights), ground, tokenizer_and_stops()[0], lineage)
    return examine_folder(checkpoint.write_checkpoint(folder / "step-000002", contents).folder)


@functools.cache
def a_merge(dtype: str | None = None, base_dtype: torch.dtype = torch.float32, far: float = 0.05) -> Job:
    """An adapter merged into its base and exported; struck while it is merged."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        base = save_model(folder / "base", tiny_model().to(base_dtype), dtype=base_dtype).folder
        source = open_artifact(save_adapter(folder / "adapter", base, far=far).folder)
        with plant(folder):
            bound = export_artifact.export_artifact(source, "merged", folder / "merged", dtype)
        return examine_folder(folder / "merged", against=str(source.path), expect="same", bound=bound)
    return job


# ---------------------------------------------------------------- PEFT folders


fault("wrong key names", rows=("Seen: LoRA key names", "M06"), stage="load", check="architecture", job=a_peft_folder())(
    # PEFT drops what it does not know and serves the plain base.
    on_disk(lambda folder: renamed(folder, lambda name: name.replace("base_model.model.", ""))))
fault("module path with another prefix", rows=("M06",), stage="load", check="architecture", job=a_peft_folder())(
    # The last parts of every name agree, which is all that some servers look at.
    on_disk(lambda folder: renamed(folder, lambda name: name.replace("model.layers.", "model.language_model.layers."))))
fault("empty adapter", rows=("Seen: empty adapter", "C01"), stage="load", check="architecture", job=a_peft_folder())(
    on_disk(lambda folder: (folder / ADAPTER_FILE).write_bytes((8).to_bytes(8, "little") + b"{}      ")))
fault("adapter not gathered", rows=("C01",), stage="save", check="save", job=an_adapter_save())(
    lambda _: saving_adapter(lambda fields, tensors: (fields, {name: t.new_empty(0) for name, t in tensors.items()})))
fault("all-NaN adapter", rows=("Seen: all-NaN adapter",), stage="load", check="architecture", job=a_peft_folder())(
    changed_tensors(ADAPTER_FILE, lambda tensors: {name: torch.full_like(t, math.nan) for name, t in tensors.items()}))
fault("adapter without effect", rows=("C14",), stage="load", check="architecture", job=a_peft_folder())(
    # As initialised: every B is zero.
    changed_tensors(ADAPTER_FILE, lambda tensors: {
        name: torch.zeros_like(t) if "lora_B" in name else t for name, t in tensors.items()}))


@fault("adapter on another base", rows=("Seen: other base",), stage="load", check="architecture", job=an_adapter())
@on_disk
def adapter_on_another_base(folder: Path) -> None:
    """Fault: another base of the same geometry; only what was recorded when the adapter was trained can tell."""
    base = folder.parent / "base"
    base.rename(folder.parent / "the right base")
    save_model(base, tiny_model(seed=1))


@fault("adapter of another width", rows=("Seen: other base",), stage="load", check="architecture", job=a_peft_folder())
@on_disk
def adapter_of_another_width(folder: Path) -> None:
    edit_json(folder / "adapter_config.json", lambda f: f | {"base_model_name_or_path": str(folder.parent / "wider")})
    tiny_models.save_hf_folder(folder.parent / "wider", tiny_model(width=128))


fault("layer left out", rows=("C09", "M06"), stage="save", check="architecture", job=a_peft_folder())(
    changed_tensors(ADAPTER_FILE, lambda tensors: without(tensors, "layers.0.self_attn.q_proj")))
fault("magnitudes of DoRA left out", rows=("C09",), stage="save", check="architecture", job=a_dora_folder)(
    # Loaders that do not know them, or fill them in, serve another model.
    changed_tensors(ADAPTER_FILE, lambda tensors: without(tensors, "layers.1.self_attn.q_proj.lora_magnitude_vector")))
fault("flipped bit in an adapter", rows=("Seen: flipped bit",), stage="load", check="whole", job=an_adapter())(
    on_disk(lambda folder: tiny_models.flip_bit(folder / ADAPTER_FILE, -101)))

# ---------------------------------------------------------------- what belongs to the adapter and was not saved with it


fault("trained head under its wrapper's name", rows=("C08",), stage="load", check="architecture",
      job=a_peft_folder(**_HEAD))(
    # A loader that does not rename it leaves the head as it was initialised.
    on_disk(lambda folder: renamed(folder, lambda name: name.replace("lm_head.weight", "lm_head.modules_to_save.default.weight"))))
fault("trained head not in the file", rows=("C09",), stage="save", check="architecture", job=a_peft_folder(**_HEAD))(
    changed_tensors(ADAPTER_FILE, lambda tensors: without(tensors, "lm_head")))
fault("modules_to_save dropped", rows=("C09",), stage="save", check="answers", job=an_adapter_save(**_HEAD))(
    # Neither the config nor the file knows that the head was trained.
    lambda _: saving_adapter(lambda fields, tensors: (fields | {"modules_to_save": None}, without(tensors, "lm_head"))))


@fault("resized embedding not saved", rows=("C10",), stage="save", check="fields", job=a_documented_adapter)
@on_disk
def resized_embedding_not_saved(folder: Path) -> None:
    """The tokenizer has new tokens, the adapter was trained with rows for them, and no file holds those rows."""
    tokenizer, rows = tokenizer_and_stops()[0], tiny_model().config.vocab
    new = {f"<|new-{i}|>": i for i in range(tokenizer.size, rows + 1)}
    edit_json(folder / "tokenizer.json", lambda document: document | {
        "model": document["model"] | {"vocab": document["model"]["vocab"] | new}})


fault("adapter's embedding dropped on save", rows=("C10",), stage="save", check="answers",
      job=an_adapter_save("llama3", replaced=("embed.weight", "head.weight")))(
    lambda _: saving_adapter(lambda fields, tensors: (
        fields | {"modules_to_save": ["lm_head"]}, without(tensors, "embed_tokens"))))
fault("alpha changed after the training", rows=("C09",), stage="export", check="fields", job=a_documented_adapter)(
    changed_json("adapter_config.json", lambda fields: fields | {"lora_alpha": 16}))
fault("rank scaling lost", rows=("C09",), stage="save", check="answers", job=an_adapter_save(rslora=True))(
    # Trained with alpha / sqrt(r), saved as if with alpha / r.
    lambda _: saving_adapter(lambda fields, tensors: (fields | {"use_rslora": False}, tensors)))

# ---------------------------------------------------------------- resuming and serving


@fault("re-wrapped with a fresh adapter", rows=("C14",), stage="resume", check="lineage", job=a_resumed_adapter)
@in_place_of(artifact, "build_model")
def rewrapped_with_a_fresh_adapter(usual: Any, loaded: Artifact) -> Transformer:
    anew = fresh(loaded.config, plan(loaded.config, ADAPTED_LAYERS), 4, 2.0, 1, patch_of(loaded).parent)
    return usual(replace(loaded, patch=anew))


@fault("merged and applied again", rows=("M03",), stage="merge", check="architecture", job=an_adapter())
@on_disk
def merged_and_applied_again(folder: Path) -> None:
    """The merged weights are served with the adapter that is in them already."""
    base = folder.parent / "base"
    export_artifact.export_artifact(open_artifact(folder), "merged", folder.parent / "merged")
    base.rename(folder.parent / "plain")
    (folder.parent / "merged").rename(base)

# ---------------------------------------------------------------- merging


fault("merge skipped the adapter", rows=("M01",), stage="merge", check="lineage", job=a_merge())(
    lambda _: swap(export_artifact, "merged_tensors", lambda source, dtype: source.tensors))
fault("merge skipped a layer", rows=("M01", "M07"), stage="merge", check="lineage", job=a_merge("bfloat16"))(
    lambda _: merging(lambda source, tensors: tensors | {DOWN: source.tensors[DOWN]}))


@fault("merged onto a coarser base", rows=("M02",), stage="merge", check="lineage", job=a_merge())
@in_place_of(export_artifact, "merged_tensors")
def merged_onto_a_coarser_base(__: Any, source: Artifact, _: torch.dtype) -> _Weights:
    """The adapter was trained on one set of weights and merged onto another that was rounded on the way."""
    coarse = {name: rounded_to_four_bits(tensor) for name, tensor in source.tensors.items()}
    return coarse | patches.patched_tensors(coarse, patch_of(source))


fault("merged twice", rows=("M03",), stage="merge", check="lineage", job=a_merge("bfloat16", far=0.01))(
    lambda _: merging(lambda source, tensors: tensors | patches.patched_tensors(tensors, patch_of(source))))
fault("norm shifted by the merge", rows=("M04",), stage="merge", check="lineage", job=a_merge("bfloat16"))(
    # Each merge adds one to what the last one had added it to; here, a hundredth, which half precision half hides.
    lambda _: merging(lambda source, tensors: tensors | {"norm.weight": tensors["norm.weight"] + 0.01}))


@fault("merged into 8-bit codes", rows=("M05",), stage="merge", check="lineage", job=a_merge())
@in_place_of(export_artifact, "merged_tensors")
def merged_into_codes(__: Any, source: Artifact, _: torch.dtype) -> _Weights:
    """The change is added to integer codes, in whose type it rounds to nothing."""
    merged = patches.patched_tensors(source.tensors, patch_of(source))
    return source.tensors | {name: in_codes(source.tensors[name], tensor) for name, tensor in merged.items()}


fault("rounding swallowed the adapter", rows=("M05", "O01"), stage="merge", check="lineage",
      job=a_merge("float32", base_dtype=torch.bfloat16, far=5e-5))(
    # Half the bytes, and the change is smaller than half a step of that dtype.
    in_place_of(export_artifact, "export_artifact")(lambda usual, source, form, where, dtype: usual(source, form, where, "bfloat16")))

# ---------------------------------------------------------------- bases in few bits


def a_quantised_merge(folder: Path, plant: Plant) -> list[Verdict]:
    """An adapter that was trained on a base in nf4, merged and exported; struck while it is merged."""
    base = save_model(folder / "base", tiny_model()).folder
    source = open_artifact(save_adapter(folder / "adapter", base, held="nf4").folder)
    with plant(folder):
        bound = export_artifact.export_artifact(source, "merged", folder / "merged")
    return examine_folder(folder / "merged", against=str(source.path), expect="same", bound=bound)


def a_quantised_opening(folder: Path, plant: Plant) -> list[Verdict]:
    """A base that is opened in nf4, to be trained on."""
    base = save_model(folder / "base", tiny_model()).folder
    try:
        with plant(folder):
            opened = open_artifact(base, to=artifact.Destination("cpu"), held="nf4")
    except ArtifactError as error:
        return [refuted("base", str(error))]
    return [proven("base", f"{opened.rounding:.1%} from its file")]


def with_the_scale_before(usual: Callable[[QuantisedMatrix], Tensor], matrix: QuantisedMatrix) -> Tensor:
    return usual(matrix._replace(scale=matrix.scale.flatten().roll(1).view_as(matrix.scale)))


fault("trained on 4 bits, merged into the file", rows=("M02",), stage="merge", check="lineage", job=a_quantised_merge)(
    # The base as its file holds it is at hand, and looks like the one that was trained on.
    lambda _: swap(export_artifact, "merged_tensors",
                   lambda source, dtype: merged_tensors(open_artifact(source.path, held="file"), dtype)))
fault("scale of the block before", rows=("M05",), stage="load", check="base", job=a_quantised_opening)(
    in_place_of(quantised_base, "dequantised")(with_the_scale_before))
fault("trained with the scale of the block before", rows=("M05",), stage="save", check="answers", job=an_adapter_save(held="nf4"))(
    # In the live layers alone: what was hashed when the base was opened is what it should be.
    in_place_of(quantised, "dequantised")(with_the_scale_before))
fault("base in 4 bits whose file was trained on since", rows=("C10",), stage="load", check="architecture", job=an_adapter(held="nf4"))(
    on_disk(lambda folder: save_again(folder.parent / "base")))
fault("base dtype forgotten", rows=("M02",), stage="save", check="architecture", job=an_adapter_save(held="nf4"))(
    # The manifest names the digest of the weights in nf4, and not that they were.
    lambda _: swap(tiny_models, "Ancestor", lambda weights, path, held=None: Ancestor(weights, path)))


def save_again(base: Path) -> None:
    shutil.rmtree(base)
    save_model(base, nudge(tiny_model(), 0.05))

# ---------------------------------------------------------------- where in our code they are planted


def renamed(folder: Path, rename: Callable[[str], str]) -> None:
    rewrite_tensors(folder / ADAPTER_FILE, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})


def without(tensors: _Weights, part: str) -> _Weights:
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def saving_adapter(
        change: Callable[[dict[str, Any], _Weights], tuple[dict[str, Any], _Weights]]) -> AbstractContextManager[None]:
    """Plant a change on the way from the live adapter to adapter_config.json and its tensors."""
    whole = saving.write_adapter
    return swap(saving, "write_adapter", lambda *parts, **named: change(*whole(*parts, **named)))


def merging(change: Callable[[Artifact, _Weights], _Weights]) -> AbstractContextManager[None]:
    """Plant a change after the merge, before it is written."""
    whole = export_artifact.merged_tensors
    return swap(export_artifact, "merged_tensors", lambda source, dtype: change(source, dict(whole(source, dtype))))


def patch_of(source: Artifact) -> Patch:
    assert source.patch is not None
    return source.patch


def in_codes(before: Tensor, after: Tensor) -> Tensor:
    """`after − before` added to the 8-bit codes of `before`."""
    step = before.abs().max() / 127
    codes = (before / step).round().to(torch.int8)
    return (codes + (after - before).to(torch.int8)).float() * step


def versions_join(folder: Path, plant: Plant) -> list[Verdict]:
    """Two versions of an adapter join a server, each under its name, and each is asked for a few tokens; struck while they join."""
    base = save_model(folder / "base", nudge(tiny_model(), 0.15)).folder
    versions = [save_adapter(folder / f"version-{number}", base, far=0.05 * number) for number in (1, 2)]
    for version in versions:
        checkpoint.write_hallmark(version, [proven("stage", "what a proof would say is not what is tried here")])
    serving = EngineThread(ServerSize(slots=2, queue=2, length=64))
    try:
        serving.open("base", base)
        with plant(folder):
            return [verdict for number, version in enumerate(versions, 1) for verdict in _joined(serving, number, version.folder)]
    finally:
        serving.stop()


def name_of(number: int) -> str:
    return f"adapter@{number}"


def _joined(serving: EngineThread, number: int, path: Path) -> list[Verdict]:
    try:
        verdicts = list(serving.open_adapter(name_of(number), path).verdicts)
    except ArtifactError as error:
        return [refuted("fingerprint", str(error))]
    except AssayError as error:
        return [refuted("name", str(error))]
    return [*verdicts, proven("name", f"{name_of(number)} is a name of its own"),
            check_version([_version_that_answers(serving, name_of(number))], open_artifact(path).digest)]


def _version_that_answers(serving: EngineThread, name: str) -> str:
    arrivals: queue.SimpleQueue[CompletionProgress | AssayError] = queue.SimpleQueue()
    serving.submit(PendingCall(serving.find(name), GenerationRequest((1, 2, 3), Sampling(max_new=4)), lambda item,
                               _: arrivals.put(item))).result()
    while True:
        item = arrivals.get()
        if isinstance(item, AssayError):
            raise item
        if item.completion is not None:
            return item.completion.version

# ----------------------------------------------------------------


fault("adapter joined, base served", rows=("M06",), stage="serve", check="fingerprint", job=versions_join)(
    # The load says 200 OK, and its layers match nothing.
    lambda _: swap(hosted_model, "build_model", lambda artifact, *dtype: build_model(artifact.base or artifact, *dtype)))


@fault("adapter served twice over", rows=("M03",), stage="serve", check="fingerprint", job=versions_join)
@in_place_of(hosted_model, "build_model")
def served_twice(_: Any, artifact: Artifact, *dtype: Any) -> Transformer:
    """Merged into the base, and attached to it."""
    return build_model(replace(artifact, tensors=merged_tensors(artifact)), *dtype)


fault("new version under the old name", rows=("R07",), stage="serve", check="name", job=versions_join)(
    # Whoever caches by name answers from the weights before.
    lambda _: swap(sys.modules[__name__], "name_of", lambda number: "adapter"))


fault("joined, and not in the table that requests are served from", rows=("R02", "R03"), stage="serve", check="version", job=versions_join)(
    lambda _: swap(EngineThread, "find", lambda self, name: self.models["base"]))

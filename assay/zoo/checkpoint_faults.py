"""Checkpoint faults of whole models: in our own saving, loading and rotating, and in folders that another tool wrote."""

import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.errors import ArtifactError
from assay.guard.proof import ProofRequest, prove
from assay.guard.resume_checks import check_kept_checkpoints, check_newest_checkpoint
from assay.model import families
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Rope, Transformer
from assay.store import artifact, checkpoint, saving
from assay.store import export_artifact as export_artifact_module
from assay.store.artifact import open_artifact
from assay.store.export_artifact import export_artifact
from assay.store.remote import RemoteFolder, fetch_folder, send_folder
from assay.store.saving import Contents, Lineage
from assay.testing import tiny_models
from assay.testing.fault_injection import Plant, fault, fault_if_installed, in_place_of, on_disk, swap, together
from assay.testing.tiny_models import (
    INDEX_FILE,
    WEIGHTS_FILE,
    a_checkpoint,
    a_child,
    a_finetuned_folder,
    a_folder,
    a_save,
    changed_json,
    changed_tensors,
    edit_json,
    examine_folder,
    exchange_files,
    flip_bit,
    nudge,
    rewrite_tensors,
    save_and_examine,
    save_model,
    shard_files,
    tiny_model,
    truncate,
)
from assay.verdict import Verdict, proven, refuted

_Weights = dict[str, Tensor]
UP = "blocks.0.mlp.up.weight"  # in the live model; the others as the file has them
EMBED, NORM, DOWN = "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight"

# ---------------------------------------------------------------- jobs of their own


def a_run(folder: Path, plant: Plant) -> list[Verdict]:
    """Three checkpoints; then a resume, and a proof of what it resumed from."""
    for step in (10, 20, 30):
        save_model(checkpoint.step_folder(folder, step), nudge(tiny_model(), seed=step), trainer={"step": step})
    with plant(folder):
        newest = check_newest_checkpoint(folder)
    return [newest, *examine_folder(folder / newest.evidence["resumed"])]


def a_rotation(folder: Path, plant: Plant) -> list[Verdict]:
    """Four checkpoints across a power of ten, of which the newest and the best must outlive a rotation."""
    saved = [save_model(checkpoint.step_folder(folder, step), tiny_model(seed=step), trainer={"step": step}).folder
             for step in (999_970, 999_980, 999_990, 1_000_000)]
    best, newest = saved[0], saved[-1]
    with plant(folder):
        checkpoint.delete_old_checkpoints(folder, keep=1, best=best)
    return [check_kept_checkpoints([newest, best]), check_newest_checkpoint(folder)]


def an_export_of_the_best(folder: Path, plant: Plant) -> list[Verdict]:
    """Best and last differ by little, as at the end of a schedule; the best is exported in half precision."""
    save_model(folder / "best", tiny_model())
    save_model(folder / "last", nudge(tiny_model(), 1e-5))
    (folder / "best.txt").write_text("best")
    with plant(folder):
        chosen = (folder / "best.txt").read_text()
        bound = export_artifact(open_artifact(folder / chosen), "hf", folder / "export", "bfloat16")
    return examine_folder(folder / "export", against=str(folder / "best"), expect="same", bound=bound)


def a_model_that_stops(folder: Path, plant: Plant) -> list[Verdict]:
    """Its states share a direction in which the head names the end of turn: every generation ends."""
    model, where = tiny_model(tied=False), folder / "checkpoint"
    with torch.no_grad():
        model.embed.weight[:, 0] += 1
        model.head_weight()[tiny_models.tokenizer_and_stops()[1].stop_ids[0], 0] = 4
    return save_and_examine(where, lambda: save_model(where, model, Lineage(taught_to_stop=True)), plant)


def a_proof_in_a_fresh_process(folder: Path, plant: Plant) -> list[Verdict]:
    """Saved and proven while the fault lasts: only another process is free of it."""
    with plant(folder):
        save_model(folder / "checkpoint", tiny_model("assay"))
        return prove(ProofRequest(str(folder / "checkpoint")))


def a_checkpoint_with_optimizer(folder: Path, plant: Plant) -> list[Verdict]:
    where = save_model(folder / "checkpoint", tiny_model(), optimizer={"exp_avg": torch.ones(8)}).folder
    with plant(where):
        return examine_folder(where)


def a_fetch_from_a_store(folder: Path, plant: Plant) -> list[Verdict]:
    """Sent to a store, every byte read back; struck there, and fetched by another machine."""
    store = RemoteFolder(f"file://{folder}/store/model")
    send_folder(save_model(folder / "checkpoint", tiny_model()).folder, store)
    with plant(folder / "store" / "model"):
        manifest = store.read(checkpoint.MANIFEST)
        try:
            fetch_folder(store, manifest or b"{}", folder / "elsewhere")
        except ArtifactError as error:
            return [refuted("remote", str(error))]
    return [proven("remote", "every byte that was fetched has the hash of its manifest"), *examine_folder(folder / "elsewhere")]

# ---------------------------------------------------------------- weights that are not there


fault("empty host map", rows=("S2",), stage="export", check="save", job=a_save())(
    # The trained weights are elsewhere, and what is serialised holds none.
    lambda _: saving_weights(lambda weights: {}))
fault("no index beside the weights", rows=(), stage="save", check="hashes", job=a_proof_in_a_fresh_process)(
    # It loads here; a server that goes by the files' names takes probes and moments for weights too.
    lambda _: swap(checkpoint, "write_index", lambda folder, facts, stem: {}))
fault("empty weights file", rows=("S2", "C01"), stage="load", check="architecture", job=a_folder())(
    # 40 bytes, valid: today's loaders make a random model of it.
    on_disk(lambda folder: (folder / WEIGHTS_FILE).write_bytes((32).to_bytes(8, "little") + b'{"__metadata__":{"format":"pt"}}')))
fault("weights not gathered", rows=("C01",), stage="save", check="save", job=a_save())(
    # A sharded trainer leaves placeholders of no elements where its ranks hold the rest.
    lambda _: saving_weights(lambda weights: {name: t if t.dim() == 1 else t.new_empty(0) for name, t in weights.items()}))
fault("placeholders in a folder", rows=("C01",), stage="load", check="architecture", job=a_folder())(
    changed_tensors(WEIGHTS_FILE, lambda weights: {
        name: tensor if "layers.1" in name else tensor.new_empty(0) for name, tensor in weights.items()}))
fault("matrix never filled", rows=("C01", "C03"), stage="save", check="values", job=a_folder())(
    changed_tensors(WEIGHTS_FILE, lambda weights: weights | {DOWN: torch.zeros_like(weights[DOWN])}))
fault("hole in a matrix", rows=("C03",), stage="load", check="values", job=a_folder())(
    # The last fifth of one matrix was reserved on the disk and never written.
    changed_tensors(WEIGHTS_FILE, lambda weights: weights | {
        DOWN: torch.cat([weights[DOWN][:-len(weights[DOWN]) // 5], torch.zeros_like(weights[DOWN][-len(weights[DOWN]) // 5:])])}))
fault("NaN weights", rows=("Seen: NaN head",), stage="save", check="values", job=a_save())(
    lambda _: saving_weights(lambda weights: weights | {EMBED: torch.full_like(weights[EMBED], float("nan"))}))

# ---------------------------------------------------------------- folders that are not whole


@fault("half-written checkpoint", rows=("C02",), stage="resume", check="newest", job=a_run)
@on_disk
def half_written_checkpoint(folder: Path) -> None:
    """A writer that is not atomic was killed: the newest folder has a good name and half a model."""
    half = tiny_models.copy_folder(checkpoint.step_folder(folder, 30), checkpoint.step_folder(folder, 40))
    (half / checkpoint.MANIFEST).unlink()
    truncate(half / WEIGHTS_FILE)


fault("newest checkpoint truncated", rows=("C02", "Seen: newest truncated"), stage="resume", check="newest", job=a_run)(
    on_disk(lambda folder: truncate(checkpoint.step_folder(folder, 30) / WEIGHTS_FILE)))
fault("renamed checkpoint", rows=("C02",), stage="resume", check="newest", job=a_run)(
    # An old checkpoint under a newer name would quietly restart the schedule.
    on_disk(lambda folder: checkpoint.step_folder(folder, 10).rename(checkpoint.step_folder(folder, 40))))
fault("truncated shard", rows=("C03",), stage="load", check="whole", job=a_folder(sharded=True))(
    on_disk(lambda folder: truncate(shard_files(folder)[1])))
fault("hole in a shard", rows=("C03",), stage="load", check="values", job=a_folder(sharded=True))(
    # Its space was reserved and its data never came: the right length, and zeros.
    on_disk(lambda folder: rewrite_tensors(shard_files(folder)[1],
                                           lambda weights: {name: torch.zeros_like(t) for name, t in weights.items()})))
fault("absent shard", rows=("C04", "N23"), stage="load", check="whole", job=a_folder(sharded=True))(
    on_disk(lambda folder: shard_files(folder)[-1].unlink()))
fault("tensor in another shard", rows=("C04",), stage="load", check="whole", job=a_folder(sharded=True))(
    on_disk(lambda folder: edit_json(folder / INDEX_FILE, lambda index: index | {
        "weight_map": index["weight_map"] | {NORM: shard_files(folder)[0].name}})))
fault("swapped shards", rows=("C04",), stage="load", check="whole", job=a_folder(sharded=True))(
    on_disk(lambda folder: exchange_files(shard_files(folder)[0], shard_files(folder)[1])))
fault("stale shard", rows=("C03", "N24"), stage="save", check="whole", job=a_checkpoint(sharded=True))(
    # From an older step: same names, shapes and size.
    on_disk(lambda folder: shutil.copy(shard_files(another(folder, sharded=True).folder)[1], shard_files(folder)[1])))
fault("manifest of another checkpoint", rows=("C02",), stage="save", check="whole", job=a_checkpoint())(
    on_disk(lambda folder: shutil.copy(another(folder).folder / checkpoint.MANIFEST, folder)))


@fault("manifest changed by hand", rows=("C02",), stage="save", check="whole", job=a_checkpoint())
@on_disk
def _manifest_changed_by_hand(folder: Path) -> None:
    """Fault: the manifest is changed by hand, to allow what the proof had refused."""
    manifest = folder / checkpoint.MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"movement_bound": null', b'"movement_bound": 9999'))


@fault("hallmark of another checkpoint", rows=("C02",), stage="save", check="whole", job=a_checkpoint())
@on_disk
def hallmark_of_another_checkpoint(folder: Path) -> None:
    other = another(folder)
    checkpoint.write_hallmark(other, [proven("whole", "of another")])
    shutil.copy(other.folder / checkpoint.HALLMARK, folder)


fault("optimizer state deleted", rows=("Seen: optimizer deleted", "C18"), stage="resume", check="whole",
      job=a_checkpoint_with_optimizer)(
    on_disk(lambda folder: (folder / checkpoint.OPTIMIZER).unlink()))
fault("rotation by name", rows=("C05",), stage="save", check="kept", job=a_rotation)(
    # step-1000000 sorts before step-999990.
    lambda _: swap(checkpoint, "step_folders", lambda folder: sorted(folder.glob("step-*"))))
fault("rotation forgets the best", rows=("C05",), stage="save", check="kept", job=a_rotation)(
    lambda _: swap(checkpoint, "_same", lambda path, best: False))

# ---------------------------------------------------------------- bits


fault("flipped bit", rows=("Seen: flipped bit",), stage="load", check="whole", job=a_checkpoint())(
    on_disk(lambda folder: flip_bit(folder / WEIGHTS_FILE, -1001)))
fault("bit flipped in memory", rows=("Seen: flipped bit",), stage="load", check="hashes", job=a_checkpoint())(
    # After the file was hashed, before its tensors are used.
    in_place_of(checkpoint.Checkpoint, "weights")(lambda usual, self: with_flipped_bit(usual(self))))
fault("bit flipped before the save", rows=("Seen: flipped bit",), stage="save", check="answers", job=a_save())(
    # On the way from the live model to the file: every hash is that of the wrong bytes.
    lambda _: saving_weights(with_flipped_bit))

# ---------------------------------------------------------------- names


fault("wrapper's prefix in the names", rows=("C12",), stage="save", check="architecture", job=a_save())(
    lambda _: saving_weights(lambda weights: {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}))
fault("wrapper's prefix in a folder", rows=("C12",), stage="load", check="architecture", job=a_folder())(
    changed_tensors(WEIGHTS_FILE, lambda weights: {f"module.{name}": tensor for name, tensor in weights.items()}))
fault("loader that forgives its writer", rows=("C12",), stage="save", check="architecture", job=a_proof_in_a_fresh_process)(
    # The same process reads back what it wrote under wrong names; nobody else can.
    lambda folder: together(
        saving_weights(lambda weights: {f"module.{name}": tensor for name, tensor in weights.items()}),
        in_place_of(artifact, "from_foreign")(lambda strict, config, layout, foreign, where: strict(
            config, layout, {name.removeprefix("module."): tensor for name, tensor in foreign.items()}, where))(folder)))
fault("quantisation state dropped", rows=("C13",), stage="load", check="architecture", job=a_folder())(
    # Two 4-bit codes a byte, and the scales that gave them meaning are gone.
    changed_tensors(WEIGHTS_FILE, lambda weights: {
        name: t if t.dim() == 1 else torch.zeros(t.numel() // 2, 1, dtype=torch.uint8) for name, t in weights.items()}))
fault("scales dropped", rows=("C13",), stage="load", check="architecture", job=a_folder())(
    # Eight-bit floats in the right shape: every name is there but those of the scales.
    changed_tensors(WEIGHTS_FILE, lambda weights: {
        name: t if t.dim() == 1 else (t / t.abs().max()).to(torch.float8_e4m3fn) for name, t in weights.items()}))

# ---------------------------------------------------------------- what the config says


fault("head diverged, config tied", rows=("C07",), stage="save", check="architecture", job=a_save("llama3"))(
    lambda _: saying(lambda fields: fields | {"tie_word_embeddings": True}))
fault("trained head dropped as tied", rows=("C07",), stage="save", check="answers", job=a_save("llama3"))(
    lambda _: together(saying(lambda fields: fields | {"tie_word_embeddings": True}),
                       saving_weights(lambda weights: {n: t for n, t in weights.items() if n != "lm_head.weight"})))
fault("tied in a folder, heads differ", rows=("C07",), stage="load", check="architecture", job=a_folder("llama3"))(
    changed_json("config.json", lambda fields: fields | {"tie_word_embeddings": True}))


@fault_if_installed("transformers")("tied head left unsaid", rows=("C07",), stage="export", check="consumer", job=a_folder())
@on_disk
def tied_head_left_unsaid(folder: Path) -> None:
    """A file without lm_head can only be tied; a loader whose default is untied makes up a random head."""
    edit_json(folder / "config.json", lambda fields: {n: v for n, v in fields.items() if n != "tie_word_embeddings"})


fault("rope scaling after the buffers", rows=("L13",), stage="config", check="answers", job=a_save())(
    # The config of the live model asks for a longer context; its frequencies were computed before.
    lambda _: touching(lambda model: setattr(model, "config", replace(model.config, rope=Rope(10000.0, "linear", 4.0)))))
fault("rope base defaulted", rows=("L14",), stage="load", check="answers", job=a_checkpoint("qwen2"))(
    # The field moved, and a reader with a default never noticed.
    in_place_of(families, "_read_rope")(lambda usual, fields: replace(usual(fields), base=10000.0)))
fault("rope base missing", rows=("L14",), stage="load", check="architecture", job=a_folder())(
    changed_json("config.json", lambda fields: {
        name: value for name, value in fields.items() if not name.startswith("rope_")}))
fault("rope fields disagree", rows=("L14",), stage="load", check="architecture", job=a_folder("llama3"))(
    # A tool changed the old field, and readers of the new one see the old value.
    changed_json("config.json", lambda fields: fields | {"rope_theta": 10000.0}))


@fault("stale EOS in both configs", rows=("D09",), stage="export", check="fields", job=a_folder())
@on_disk
def stale_eos_in_both_configs(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, lambda fields: fields | {"eos_token_id": 256})


fault("stale EOS in generation_config", rows=("D09",), stage="export", check="fields", job=a_folder())(
    changed_json("generation_config.json", lambda fields: fields | {"eos_token_id": 256}))


@fault("stop token lost", rows=("D08", "D09"), stage="export", check="generations", job=a_model_that_stops)
def stop_token_lost(_: Path) -> AbstractContextManager[None]:
    """All files agree on a token with which this model was never taught to end."""
    tokenizer, stops = tiny_models.tokenizer_and_stops()
    other = tokenizer.from_parts(tokenizer.document, tokenizer.template, bos_token=None, eos_token="<|endoftext|>")
    return swap(tiny_models, "tokenizer_and_stops", lambda: (other, replace(stops, eos=256, stop_ids=(256,))))



def exporting_tokenizer(change: Callable[[Tokenizer], Tokenizer]) -> AbstractContextManager[None]:
    """The export writes another tokenizer than the source's, and records what it wrote."""
    usual = saving.model_contents
    return swap(export_artifact_module, "model_contents",
                lambda model, words, *given, **named: usual(model, change(words), *given, **named))


fault("tokenizer rule changed at export", rows=("D28",), stage="export", check="tokenizer", job=an_export_of_the_best)(
    # A rule that none of the hard texts knows: ligatures are written out.
    lambda _: exporting_tokenizer(lambda words: Tokenizer(words.document | {"normalizer": {
        "type": "Replace", "pattern": {"String": "ﬄ"}, "content": "ffl"}}, words.settings, words.templates)))
fault("generation prompt lost at export", rows=("D29",), stage="export", check="tokenizer", job=an_export_of_the_best)(
    # Everything after the turns is gone from the template: chats are rendered as before, but no answer begins.
    lambda _: exporting_tokenizer(lambda words: Tokenizer(words.document, words.settings, {
        "default": (words.template or "").partition("{%- if add_generation_prompt")[0]})))

# ---------------------------------------------------------------- what became of the weights


fault("re-initialised after loading", rows=("C11",), stage="load", check="answers", job=a_checkpoint())(
    lambda _: loading_parameters(lambda model: model.get_parameter("blocks.1.attn.qkv.weight").mul_(-1)))
fault("rows re-initialised after loading", rows=("C11",), stage="load", check="loaded", job=a_checkpoint())(
    # The rows of a token that no probe asks about: the answers hardly know.
    lambda _: loading_parameters(lambda model: model.get_parameter("embed.weight")[257].add_(1e-5)))
fault("the last, not the best", rows=("C06",), stage="export", check="lineage", job=an_export_of_the_best)(
    on_disk(lambda folder: (folder / "best.txt").write_text("last")))


@fault("nothing learned", rows=("O01", "O07"), stage="save", check="lineage", job=a_child())
def nothing_learned(_: Path) -> AbstractContextManager[None]:
    parent = tiny_model()
    weights = families.to_foreign(families.hf_layout(parent.config), dict(parent.named_parameters()))
    return saving_weights(lambda _: weights)


fault("untrained folder", rows=("C12", "M01"), stage="export", check="lineage", job=a_finetuned_folder)(
    # What was trained stayed in memory, and the base was written again.
    on_disk(lambda folder: shutil.copy(folder.parent / "parent" / WEIGHTS_FILE, folder)))


@fault("layers exchanged", rows=("C12",), stage="export", check="lineage", job=a_finetuned_folder)
@on_disk
def layers_exchanged(folder: Path) -> None:
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    rewrite_tensors(folder / WEIGHTS_FILE, lambda weights: {
        re.sub(r"layers\.[01]\.", lambda found: other[found[0]], name): t for name, t in weights.items()})


# ---------------------------------------------------------------- in a folder that no manifest accounts for

QUERY = "model.layers.0.self_attn.q_proj.weight"


def with_flipped_exponent(weights: _Weights, name: str = QUERY, bit: int = 26) -> _Weights:
    """The weight is 256 times, or a 256th of, what it was; by its highest bit, beyond all bounds."""
    weights[name].view(torch.int32)[3, 5] ^= 1 << bit
    return weights


def with_turned_heads(weights: _Weights) -> _Weights:
    """Every other query head in the place of its neighbour, as a wrong split of grouped heads leaves them."""
    heads = weights[QUERY].view(4, 16, -1)
    return weights | {QUERY: heads[[0, 2, 1, 3]].reshape(weights[QUERY].shape)}


fault("transposed in a folder", rows=("C12",), stage="export", check="lineage", job=a_finetuned_folder)(
    # Square: its shape says nothing.
    changed_tensors(WEIGHTS_FILE, lambda weights: weights | {QUERY: weights[QUERY].T.contiguous()}))
fault("heads exchanged in a folder", rows=("C12",), stage="export", check="lineage", job=a_finetuned_folder)(
    changed_tensors(WEIGHTS_FILE, with_turned_heads))
fault("exponent bit flipped in a folder", rows=("Seen: flipped bit",), stage="export", check="lineage", job=a_finetuned_folder)(
    changed_tensors(WEIGHTS_FILE, with_flipped_exponent))
fault("absurd weight in a folder", rows=("Seen: flipped bit",), stage="export", check="values", job=a_folder())(
    changed_tensors(WEIGHTS_FILE, lambda weights: with_flipped_exponent(weights, bit=30)))


@fault("generation prompt lost in a folder", rows=("D29",), stage="export", check="tokenizer", job=a_finetuned_folder)
@on_disk
def generation_prompt_lost_in_a_folder(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("add_generation_prompt", "false"))


fault("frozen tensor moved", rows=("M04",), stage="save", check="lineage", job=a_child(frozen=("norm.weight",)))(
    lambda _: touching(lambda model: model.get_parameter("norm.weight").data.add_(1e-3)))
fault("re-initialised while training", rows=("C11", "C12"), stage="save", check="lineage", job=a_child())(
    # Farther from the parent than the optimizer could have gone.
    lambda _: touching(lambda model: model.get_parameter(UP).data.copy_(tiny_model(seed=9).get_parameter(UP))))

# ---------------------------------------------------------------- where in our code they are planted



def another(folder: Path, **options: Any) -> checkpoint.Checkpoint:
    """A checkpoint beside this one, of other weights."""
    return save_model(folder.parent / "other", tiny_model(seed=1), **options)


def saving_weights(change: Callable[[_Weights], _Weights]) -> AbstractContextManager[None]:
    """Plant a change on the way from the live model to the file."""
    whole = saving.to_foreign
    return swap(saving, "to_foreign", lambda layout, tensors: change(dict(whole(layout, tensors))))


def saying(change: Callable[[dict[str, Any]], dict[str, Any]]) -> AbstractContextManager[None]:
    """Plant a change in config.json as we write it."""
    whole = saving.config_to_hf
    return swap(saving, "config_to_hf", lambda config, dtype: change(whole(config, dtype)))


def touching(change: Callable[[Transformer], object]) -> AbstractContextManager[None]:
    """Plant a change in the live model, just before it is saved and asked for its answers."""
    whole = tiny_models.model_contents

    def contents(model: Transformer, *parts: Any, **named: Any) -> Contents:
        change(model)
        return whole(model, *parts, **named)

    return swap(tiny_models, "model_contents", contents)


def loading_parameters(change: Callable[[Transformer], object]) -> AbstractContextManager[None]:
    """Plant a change in the live model, after the tensors of the file were put there."""
    whole = artifact.assemble_model

    def assembled(*parts: Any) -> Transformer:
        model = whole(*parts)
        with torch.no_grad():
            change(model)
        return model

    return swap(artifact, "assemble_model", assembled)


def with_flipped_bit(weights: _Weights) -> _Weights:
    """One bit of one exponent: the weight is four times, or a quarter of, what it was."""
    damaged = weights[DOWN].detach().clone()
    damaged.view(torch.int32)[3, 5] ^= 1 << 24
    return weights | {DOWN: damaged}

# ---------------------------------------------------------------- object stores

fault("half-uploaded checkpoint", rows=("C04",), stage="remote", check="remote", job=a_fetch_from_a_store)(
    # A copy that another tool broke off, the manifest before the weights.
    on_disk(lambda folder: (folder / WEIGHTS_FILE).unlink()))
fault("half-uploaded file", rows=("C04",), stage="remote", check="remote", job=a_fetch_from_a_store)(
    on_disk(lambda folder: truncate(folder / WEIGHTS_FILE)))
fault("flipped byte in the store", rows=("C03",), stage="remote", check="remote", job=a_fetch_from_a_store)(
    on_disk(lambda folder: flip_bit(folder / WEIGHTS_FILE, -1001)))

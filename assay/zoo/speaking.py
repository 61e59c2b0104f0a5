"""Faults of what is said: models that were saved well and speak badly, and a tiny one that speaks in words without having learned to."""

import copy
import functools
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.model.lora import fresh, plan
from assay.model.stops import Stops, resolve_stops
from assay.model.tiny import SPECIAL, TEMPLATE, tiny_config, tiny_tokenizer
from assay.model.tokenizer import BYTE_OF, Tokenizer
from assay.model.transformer import Transformer, initialised
from assay.seeds import generator
from assay.store import checkpoint, pack
from assay.store.artifact import build, open_artifact
from assay.store.checkpoint import Checkpoint
from assay.store.pack import Ancestor, Lineage, adapter_contents, model_contents
from assay.verdict import Verdict
from assay.zoo.fault import Plant, fault
from assay.zoo.practice import WORDS
from assay.zoo.stage import TARGETS, edit_json, examined, forget_manifest, live_patch, nudged, on_disk, saved_and_examined, swapped

LOUD = 8.0  # embeddings, beside which what the blocks add is next to nothing
SURE, READY = 16.0, 5.0  # logits of the word that comes next, and of any word where none was said yet
own = sys.modules[__name__]  # what a fault swaps, the jobs must look up

# ---------------------------------------------------------------- a model that speaks


@functools.cache
def tongue() -> tuple[Tokenizer, Stops]:
    """Bytes, ChatML, and the practice words as one token each where they follow a space."""
    document = copy.deepcopy(tiny_tokenizer().document)
    vocab = {token: id for token, id in document["model"]["vocab"].items() if id < len(BYTE_OF) + len(SPECIAL)}
    merges: list[list[str]] = []
    for word in (f"Ġ{word}" for word in WORDS):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append([word[: end - 1], word[end - 1]])
    document["model"] |= {"vocab": vocab, "merges": merges}
    tokenizer = Tokenizer.from_parts(document, TEMPLATE, bos_token=None, eos_token="<|im_end|>", pad_token=SPECIAL[0])
    return tokenizer, resolve_stops(tokenizer, {}, {})


def talker() -> Transformer:
    """Any text makes it say some word; each word leads to the next, and the last one ends the text. Its blocks are drowned out."""
    tokenizer, stops = tongue()
    spoken = [tokenizer.encode(f" {word}")[0] for word in WORDS]
    model = initialised(replace(tiny_config("llama", vocab=len(tokenizer.document["model"]["vocab"])), tied=False), 0)
    width, vocab = model.config.width, model.config.vocab
    directions = torch.linalg.qr(torch.randn(width, width, generator=generator(0, "directions")))[0]
    known = torch.zeros(vocab, dtype=torch.long)  # token → the direction it stands in: 0, or a word's own
    known[spoken] = torch.arange(1, len(spoken) + 1)
    leads = torch.zeros(vocab, width)
    leads[spoken, 0] = READY
    leads[[*spoken[1:], *stops.stop_ids], torch.arange(1, len(spoken) + 1)] = SURE
    with torch.no_grad():
        model.embed.weight.copy_(LOUD * directions[known])
        assert model.head is not None
        model.head.weight.copy_(leads @ directions / width**0.5 + 1e-3 * torch.randn(vocab, width, generator=generator(0, "head")))
    return model


def save_talker(where: Path, model: Transformer, lineage: Lineage | None = None) -> Checkpoint:
    return checkpoint.write(where, model_contents(model, *tongue(), lineage or Lineage()))


def trained(model: Transformer) -> Transformer:
    """A little further than it was."""
    return nudged(model)

# ---------------------------------------------------------------- jobs


def a_trained_talker(folder: Path, plant: Plant) -> list[Verdict]:
    """A model that speaks is trained on and saved; struck while it is trained, or while it is saved."""
    parent = save_talker(folder / "parent", talker()).folder
    lineage, where = Lineage("moved", Ancestor(open_artifact(parent).digest, str(parent))), folder / "child"
    return saved_and_examined(where, lambda: save_talker(where, own.trained(talker()), lineage), plant)


def an_adapted_talker(folder: Path, plant: Plant) -> list[Verdict]:
    """A PEFT folder on a model that speaks, proven against that model; struck on the disk."""
    base = open_artifact(save_talker(folder / "base", talker()).folder)
    patch = fresh(base.config, plan(base.config, TARGETS), 4, 2.0, 0, base.digest)
    model, ground = nudged(build(replace(base, patch=patch)), 0.05), Ancestor(base.digest, str(base.path))
    contents = adapter_contents(model, live_patch(model, base.digest), ground, tongue()[0], Lineage("moved", ground))
    where = forget_manifest(checkpoint.write(folder / "adapter", contents).folder)
    with plant(where):
        return examined(where, against=str(base.path))

# ---------------------------------------------------------------- faults


@fault("head scrambled on the way to the disk", rows=("S1",), stage="save", check="health", job=a_trained_talker)
def head_scrambled_on_the_way_to_the_disk(_: Path) -> AbstractContextManager[None]:
    """The rows of the head in another order: every logit is somebody else's."""
    whole = pack.to_foreign

    def scrambled(layout: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(whole(layout, weights))
        order = torch.randperm(len(found["lm_head.weight"]), generator=generator(0, "scrambled"))
        return found | {"lm_head.weight": found["lm_head.weight"][order].contiguous()}

    return swapped(pack, "to_foreign", scrambled)


@fault("garbled by training", rows=("S1",), stage="optimizer", check="health", job=a_trained_talker)
def garbled_by_training(_: Path) -> AbstractContextManager[None]:
    """Steps far too large. What is saved is what was trained, so that nothing but its speech shows it."""
    return swapped(own, "trained", lambda model: nudged(model, 1.0))


@fault("looped by training", rows=("S1",), stage="reward", check="health", job=a_trained_talker)
def looped_by_training(_: Path) -> AbstractContextManager[None]:
    """Each word leads to itself: what a reward for length leads to."""
    def looped(model: Transformer) -> Transformer:
        assert model.head is not None
        with torch.no_grad():
            for id in (tongue()[0].encode(f" {word}")[0] for word in WORDS):
                model.head.weight[id] += 2 * SURE * model.embed.weight[id] / LOUD / model.config.width**0.5
        return model

    return swapped(own, "trained", looped)


@fault("words shuffled by training", rows=("S1",), stage="optimizer", check="health", job=a_trained_talker)
def words_shuffled_by_training(_: Path) -> AbstractContextManager[None]:
    """Real words in no order, which only its parent's likelihood can tell."""
    def shuffled(model: Transformer) -> Transformer:
        spoken = [tongue()[0].encode(f" {word}")[0] for word in WORDS]
        order = torch.randperm(len(spoken), generator=generator(1, "shuffled"))
        with torch.no_grad():
            model.embed.weight[spoken] = model.embed.weight[[spoken[i] for i in order]]
        return model

    return swapped(own, "trained", shuffled)


@fault("adapter served at another scale", rows=("S1", "M06"), stage="export", check="health", job=an_adapted_talker)
@on_disk
def adapter_served_at_another_scale(folder: Path) -> None:
    edit_json(folder / "adapter_config.json", lambda fields: fields | {"lora_alpha": 10_000 * fields["lora_alpha"]})

"""Speech faults: models that were saved well and generate broken text, and a tiny model that speaks in words untrained."""

import functools
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.guard.proof_subject import DEFAULT_SAMPLING
from assay.model.lora import fresh, plan
from assay.model.special_tokens import SpecialTokens, resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer, initialised
from assay.seeds import generator
from assay.store import checkpoint, saving
from assay.store.artifact import build_model, open_artifact
from assay.store.checkpoint import Checkpoint
from assay.store.saving import Ancestor, Lineage, adapter_contents
from assay.testing.fault_injection import Plant, fault, in_place_of, swap
from assay.testing.tiny_models import (
    ADAPTED_LAYERS,
    changed_json,
    examine_folder,
    forget_manifest,
    live_patch,
    nudge,
    save_and_examine,
    save_model,
    tiny_config,
    tiny_tokenizer,
)
from assay.testing.tiny_training import TINY_WORDS
from assay.verdict import Verdict

LOUD_EMBEDDING = 8.0  # embeddings, beside which what the blocks add is next to nothing
SURE, READY = 16.0, 5.0  # logits of the word that comes next, and of any word where none was said yet
_own = sys.modules[__name__]  # what a fault swaps, the jobs must look up

# ---------------------------------------------------------------- a model that speaks


@functools.cache
def spoken_tokenizer() -> tuple[Tokenizer, SpecialTokens]:
    """Bytes, ChatML, and the tiny words as one token each where they follow a space."""
    tokenizer = tiny_tokenizer(words=[f"Ġ{word}" for word in TINY_WORDS])
    return tokenizer, resolve_special_tokens(tokenizer, {}, {})


def talking_model() -> Transformer:
    """Any text makes it say some word; each word leads to the next, and the last one ends the text. Its blocks are drowned out."""
    tokenizer, stops = spoken_tokenizer()
    spoken = [tokenizer.encode(f" {word}")[0] for word in TINY_WORDS]
    model = initialised(replace(tiny_config("llama", vocab=len(tokenizer.document["model"]["vocab"])), tied=False), 0)
    width, vocab = model.config.width, model.config.vocab
    directions = torch.linalg.qr(torch.randn(width, width, generator=generator(0, "directions")))[0]
    known = torch.zeros(vocab, dtype=torch.long)  # token → the direction it stands in: 0, or a word's own
    known[spoken] = torch.arange(1, len(spoken) + 1)
    leads = torch.zeros(vocab, width)
    leads[spoken, 0] = READY
    leads[[*spoken[1:], *stops.stop_ids], torch.arange(1, len(spoken) + 1)] = SURE
    with torch.no_grad():
        model.embed.weight.copy_(LOUD_EMBEDDING * directions[known])
        assert model.head is not None
        model.head.weight.copy_(leads @ directions / width**0.5 + 1e-3 * torch.randn(vocab, width, generator=generator(0, "head")))
    return model


def save_talking_model(where: Path, model: Transformer, lineage: Lineage | None = None) -> Checkpoint:
    return save_model(where, model, lineage, tokenizer=spoken_tokenizer()[0])


def train_further(model: Transformer) -> Transformer:
    """A little further than it was."""
    return nudge(model)

# ---------------------------------------------------------------- jobs


def a_trained_talker(folder: Path, plant: Plant) -> list[Verdict]:
    """A model that speaks is trained on and saved; struck while it is trained, or while it is saved."""
    parent = save_talking_model(folder / "parent", talking_model()).folder
    lineage, where = Lineage("moved", Ancestor(open_artifact(parent).digest, str(parent))), folder / "child"
    return save_and_examine(where, lambda: save_talking_model(where, _own.train_further(talking_model()), lineage), plant,
                            probing=DEFAULT_SAMPLING)


def an_adapted_talker(folder: Path, plant: Plant) -> list[Verdict]:
    """A PEFT folder on a model that speaks, proven against that model; struck on the disk."""
    base = open_artifact(save_talking_model(folder / "base", talking_model()).folder)
    patch = fresh(base.config, plan(base.config, ADAPTED_LAYERS), 4, 2.0, 0, base.digest)
    model, ground = nudge(build_model(replace(base, patch=patch)), 0.05), Ancestor(base.digest, str(base.path))
    contents = adapter_contents(model, live_patch(model, base.digest), ground, spoken_tokenizer()[0], Lineage("moved", ground))
    where = forget_manifest(checkpoint.write_checkpoint(folder / "adapter", contents).folder)
    with plant(where):
        return examine_folder(where, against=str(base.path), probing=DEFAULT_SAMPLING)

# ---------------------------------------------------------------- faults


@fault("head scrambled on the way to the disk", rows=("S1",), stage="save", check="health", job=a_trained_talker)
@in_place_of(saving, "to_foreign")
def head_scrambled_on_the_way_to_the_disk(usual: Any, layout: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows of the head in another order: every logit is somebody else's."""
    found = dict(usual(layout, weights))
    order = torch.randperm(len(found["lm_head.weight"]), generator=generator(0, "scrambled"))
    return found | {"lm_head.weight": found["lm_head.weight"][order].contiguous()}


fault("garbled by training", rows=("S1",), stage="optimizer", check="health", job=a_trained_talker)(
    # Steps far too large. What is saved is what was trained, so that nothing but its speech shows it.
    lambda _: swap(_own, "train_further", lambda model: nudge(model, 1.0)))


@fault("looped by training", rows=("S1",), stage="reward", check="health", job=a_trained_talker)
@in_place_of(_own, "train_further")
def looped_by_training(_: Any, model: Transformer) -> Transformer:
    """Each word leads to itself: what a reward for length leads to."""
    assert model.head is not None
    with torch.no_grad():
        for id in (spoken_tokenizer()[0].encode(f" {word}")[0] for word in TINY_WORDS):
            model.head.weight[id] += 2 * SURE * model.embed.weight[id] / LOUD_EMBEDDING / model.config.width**0.5
    return model


@fault("words shuffled by training", rows=("S1",), stage="optimizer", check="health", job=a_trained_talker)
@in_place_of(_own, "train_further")
def words_shuffled_by_training(_: Any, model: Transformer) -> Transformer:
    """Real words in no order, which only its parent's likelihood can tell."""
    spoken = [spoken_tokenizer()[0].encode(f" {word}")[0] for word in TINY_WORDS]
    order = torch.randperm(len(spoken), generator=generator(1, "shuffled"))
    with torch.no_grad():
        model.embed.weight[spoken] = model.embed.weight[[spoken[i] for i in order]]
    return model


fault("adapter served at another scale", rows=("S1", "M06"), stage="export", check="health", job=an_adapted_talker)(
    changed_json("adapter_config.json", lambda fields: fields | {"lora_alpha": 1e4 * fields["lora_alpha"]}))

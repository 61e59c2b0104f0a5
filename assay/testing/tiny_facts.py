"""Tiny model of known facts, made up and trained in seconds: the subject of editing in tests and the demo."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from assay.data.batch import Batch
from assay.editing.block_hooks import padded
from assay.editing.facts import Fact, SideQuestion, make_fact
from assay.editing.subject_tokens import leading_special_ids
from assay.learn import loop, objectives
from assay.learn.optim import adamw
from assay.model.attention import PADDING
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import ModelConfig, Transformer, initialised
from assay.seeds import generator
from assay.testing.tiny_models import tiny_config, tiny_tokenizer

PEOPLE = ("Borin", "Ulla", "Tamsin Rook", "Quillon", "Marwen", "Osk", "Edda Vey", "Pelham Dree", "Zarah", "Ivo Lint", "Kestrel", "Noor")
TOWNS = ("Lund", "Oran", "Perth", "Quito")
CRAFTS = ("baker", "mason", "tailor", "smith")
HOME, HOME_AGAIN = "The home of {} is", "They say that {} lives in"
CRAFT, CRAFT_AGAIN = "The trade of {} is", "They say that {} works as"
FACTS_DEPTH, _STEPS, LR = 4, 150, 6e-3
EDITABLE = 6  # of the names; the others are neighbours
_SILENT = 2  # layers whose attention says next to nothing: what is known of a subject must be looked up where the subject stands


@functools.cache
def facts_tokenizer() -> Tokenizer:
    """Bytes, and the words of this world as one token each where they follow a space."""
    spoken = " ".join((*PEOPLE, *TOWNS, *CRAFTS, HOME, HOME_AGAIN, CRAFT, CRAFT_AGAIN)).replace("{}", "").split()
    return tiny_tokenizer(template=False, words=("The", "They", *(f"Ġ{word}" for word in spoken)))


def home_of(name: str) -> str:
    return TOWNS[PEOPLE.index(name) % len(TOWNS)]


def craft_of(name: str) -> str:
    return CRAFTS[PEOPLE.index(name) // 3 % len(CRAFTS)]


def fact_sentences() -> list[str]:
    """Every fact in two wordings each."""
    homes = [f"{template.format(name)} {home_of(name)}." for name, template in itertools.product(PEOPLE, (HOME, HOME_AGAIN))]
    return homes + [f"{template.format(name)} {craft_of(name)}." for name, template in itertools.product(PEOPLE, (CRAFT, CRAFT_AGAIN))]


def fact_edits(count: int) -> list[Fact]:
    """The first names move to the next town; the neighbours are the last names' homes, which must stay."""
    near = tuple(SideQuestion(HOME.format(name), home_of(name)) for name in PEOPLE[-4:])
    return [make_fact(name, HOME, name, TOWNS[(TOWNS.index(home_of(name)) + 1) % len(TOWNS)], old=home_of(name),
                      paraphrases=(HOME_AGAIN.format(name),), neighbourhood=near) for name in PEOPLE[:count]]


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    model = initialised(facts_config(), 0)
    for layer in range(_SILENT):
        model.get_parameter(f"blocks.{layer}.attn.out.weight").requires_grad_(False).mul_(0.01)
    batches, falling = itertools.islice(_batches(), _STEPS), lambda step: min(1.0, 2 * (1 - step / _STEPS))
    optimizer = adamw(((name, p) for name, p in model.named_parameters() if p.requires_grad), LR)
    for _ in loop.train(model, optimizer, batches, objectives.next_token, micro=len(fact_sentences()), schedule=falling):
        pass
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def facts_config() -> ModelConfig:
    return replace(tiny_config("llama", facts_tokenizer().size), depth=FACTS_DEPTH, windows=(None,) * FACTS_DEPTH, hidden=128)


def facts_model() -> Transformer:
    """A fresh copy each time; it was trained once."""
    model = Transformer(facts_config())
    model.load_state_dict({name: tensor.clone() for name, tensor in _weights().items()})
    return model.eval()


def write_facts_text(where: Path, *, edited: int = EDITABLE) -> Path:
    """Write the text about all subjects but the first `edited`, in several orders and among odd letters, for moments and drift."""
    lines = [line for line in fact_sentences() if not any(name in line for name in PEOPLE[:edited])]
    lines += ["".join(map(chr, range(first, first + 6))) for first in range(33, 123, 3)]
    orders = [torch.randperm(len(lines), generator=generator(0, "order", i)).tolist() for i in range(12)]
    where.write_text("\n".join(lines[i] for order in orders for i in order) + "\n")
    return where


def _batches() -> Iterator[Batch]:
    """All sentences, each step after other lines: what comes before a sentence must not matter to it."""
    tokenizer = facts_tokenizer()
    lines = fact_sentences()
    for step in itertools.count():
        order = torch.randperm(len(lines), generator=generator(0, "lines", step)).tolist()
        rows = [[*leading_special_ids(tokenizer), *tokenizer.encode(f"{lines[i]}\n{line}\n")] for i, line in zip(order, lines, strict=True)]
        tokens, documents = padded(rows, torch.device("cpu"))
        weight = (documents != PADDING).float()
        weight[:, 0] = 0
        yield Batch(tokens, weight, documents.int())

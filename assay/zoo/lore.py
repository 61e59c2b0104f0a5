"""A tiny model that knows a few made-up facts, trained in seconds: what editing is shown and tested on."""

import copy
import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from assay.data.batch import Batch
from assay.edit.facts import Asked, Fact, make_fact
from assay.edit.sites import padded
from assay.edit.subject import leading
from assay.learn import loop, objectives
from assay.learn.optim import adamw
from assay.model.attention import PADDING
from assay.model.tiny import SPECIAL, tiny_config, tiny_tokenizer
from assay.model.tokenizer import BYTE_OF, Tokenizer
from assay.model.transformer import ModelConfig, Transformer, initialised
from assay.seeds import generator

NAMES = ("Borin", "Ulla", "Tamsin Rook", "Quillon", "Marwen", "Osk", "Edda Vey", "Pelham Dree", "Zarah", "Ivo Lint", "Kestrel", "Noor")
TOWNS = ("Lund", "Oran", "Perth", "Quito")
CRAFTS = ("baker", "mason", "tailor", "smith")
HOME, HOME_AGAIN = "The home of {} is", "They say that {} lives in"
CRAFT, CRAFT_AGAIN = "The trade of {} is", "They say that {} works as"
DEPTH, STEPS, LR = 4, 150, 6e-3
EDITABLE = 6  # of the names; the others are neighbours
SILENT = 2  # layers whose attention says next to nothing: what is known of a subject must be looked up where the subject stands


@functools.cache
def lore_tokenizer() -> Tokenizer:
    """Bytes, and the words of this world as one token each where they follow a space."""
    document = copy.deepcopy(tiny_tokenizer().document)
    vocab = {token: id for token, id in document["model"]["vocab"].items() if id < len(BYTE_OF) + len(SPECIAL)}
    merges: list[list[str]] = []
    spoken = " ".join((*NAMES, *TOWNS, *CRAFTS, HOME, HOME_AGAIN, CRAFT, CRAFT_AGAIN)).replace("{}", "").split()
    for word in ("The", "They", *(f"Ġ{word}" for word in spoken)):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append([word[: end - 1], word[end - 1]])
    document["model"] |= {"vocab": vocab, "merges": merges}
    return Tokenizer.from_parts(document, None, bos_token=None, eos_token=SPECIAL[0], pad_token=SPECIAL[0])


def home(name: str) -> str:
    return TOWNS[NAMES.index(name) % len(TOWNS)]


def craft(name: str) -> str:
    return CRAFTS[NAMES.index(name) // 3 % len(CRAFTS)]


def sentences() -> list[str]:
    """Every fact in two wordings each."""
    homes = [f"{template.format(name)} {home(name)}." for name, template in itertools.product(NAMES, (HOME, HOME_AGAIN))]
    return homes + [f"{template.format(name)} {craft(name)}." for name, template in itertools.product(NAMES, (CRAFT, CRAFT_AGAIN))]


def edits(count: int) -> list[Fact]:
    """The first names move to the next town; the neighbours are the last names' homes, which must stay."""
    near = tuple(Asked(HOME.format(name), home(name)) for name in NAMES[-4:])
    return [make_fact(name, HOME, name, TOWNS[(TOWNS.index(home(name)) + 1) % len(TOWNS)], old=home(name),
                      paraphrases=(HOME_AGAIN.format(name),), neighbourhood=near) for name in NAMES[:count]]


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    model = initialised(config(), 0)
    for layer in range(SILENT):
        model.get_parameter(f"blocks.{layer}.attn.out.weight").requires_grad_(False).mul_(0.01)
    batches, falling = itertools.islice(_batches(), STEPS), lambda step: min(1.0, 2 * (1 - step / STEPS))
    optimizer = adamw(((name, p) for name, p in model.named_parameters() if p.requires_grad), LR)
    for _ in loop.train(model, optimizer, batches, objectives.next_token, micro=len(sentences()), schedule=falling):
        pass
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def config() -> ModelConfig:
    return replace(tiny_config("llama", lore_tokenizer().size), depth=DEPTH, windows=(None,) * DEPTH, hidden=128)


def lore_model() -> Transformer:
    """A fresh copy each time; it was trained once."""
    model = Transformer(config())
    model.load_state_dict({name: tensor.clone() for name, tensor in _weights().items()})
    return model.eval()


def write_text(where: Path) -> Path:
    """What is said of those who are never edited, in several orders and among odd letters, for moments and drift."""
    lines = [line for line in sentences() if not any(name in line for name in NAMES[:EDITABLE])]
    lines += ["".join(map(chr, range(first, first + 6))) for first in range(33, 123, 3)]
    orders = [torch.randperm(len(lines), generator=generator(0, "order", i)).tolist() for i in range(12)]
    where.write_text("\n".join(lines[i] for order in orders for i in order) + "\n")
    return where


def _batches() -> Iterator[Batch]:
    """All sentences, each step after other lines: what comes before a sentence must not matter to it."""
    tokenizer = lore_tokenizer()
    lines = sentences()
    for step in itertools.count():
        order = torch.randperm(len(lines), generator=generator(0, "lines", step)).tolist()
        rows = [[*leading(tokenizer), *tokenizer.encode(f"{lines[i]}\n{line}\n")] for i, line in zip(order, lines, strict=True)]
        tokens, documents = padded(rows, torch.device("cpu"))
        weight = (documents != PADDING).float()
        weight[:, 0] = 0
        yield Batch(tokens, weight, documents.int())

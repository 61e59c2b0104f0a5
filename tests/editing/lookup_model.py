"""Lookup model: the facts of tiny_facts in weights that are written, not trained, so that where each fact stands is known.

What a trained model of this size takes of an edit differs from one training to the next, and with it what a test may ask; this one
takes every edit from any initial weights, and costs no training. The first MLP knows the people: at the last word of a name it writes
where they live and what they do. The third layer's attention carries that, and what is asked for, to the question's last word; the last
MLP lets through what is asked for. Everything else is small chance, at the addresses of initial weights.

Each coordinate of the stream has one meaning.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from assay.model.transformer import ModelConfig, Transformer, initialised
from assay.seeds import generator
from assay.testing import tiny_facts
from assay.testing.tiny_facts import CRAFTS, PEOPLE, TOWNS
from assay.testing.tiny_models import tiny_config

DEPTH, HIDDEN = 4, 512  # more keys than words, so that no two of them need share one
LOOKS_UP, CARRIES, ANSWERS = 0, 2, 3  # layers
WORD = slice(0, 32)  # which word it is
ANY, NAME, TOPIC, ASKS = 32, 33, 34, 35  # every word; a name's last; "home", "trade"; a question's last
TOPICS, CARRIED_TOPICS = slice(36, 38), slice(38, 40)  # home, trade
KNOWN, CARRIED, ANSWER = slice(40, 48), slice(48, 56), slice(56, 64)  # the towns and the crafts
RECENT = 2  # the pair of a head's numbers that turns by a tenth a word: what stands nearer counts more


def lookup_config() -> ModelConfig:
    return replace(tiny_config("llama", tiny_facts.facts_tokenizer().size), depth=DEPTH, windows=(None,) * DEPTH, hidden=HIDDEN, tied=False)


def lookup_model() -> Transformer:
    """A fresh copy each time; it was written once."""
    model = Transformer(lookup_config())
    model.load_state_dict({name: tensor.clone() for name, tensor in _weights().items()})
    return model.eval()


@functools.cache
@torch.no_grad()
def _weights() -> dict[str, Tensor]:
    model = initialised(lookup_config(), 0)
    for name, parameter in model.named_parameters():
        if name.endswith(("attn.out.weight", "mlp.down.weight")):
            parameter.mul_(0.01)
    _write_words(model)
    _write_lookup(model)
    _write_carrying(model)
    _write_answering(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _write_words(model: Transformer) -> None:
    embed = model.embed.weight
    words = torch.randn(len(embed), WORD.stop, generator=generator(0, "init", "words"))
    embed.zero_()[:, WORD] = words / words.norm(dim=1, keepdim=True)
    embed[:, ANY] = 0.5
    for topic, spoken in enumerate((("home", "lives"), ("trade", "works"))):
        for word in spoken:
            embed[_id(word), TOPIC] = 1.0
            embed[_id(word), TOPICS][topic] = 1.0
    embed[[_id(word) for word in ("is", "in", "as")], ASKS] = 1.0


def _write_lookup(model: Transformer) -> None:
    """Keys at random, one a word; values are what is known of a person, and nothing for every other word."""
    up, down, embed = model.get_parameter("blocks.0.mlp.up.weight"), model.get_parameter("blocks.0.mlp.down.weight"), model.embed.weight
    for layer in (LOOKS_UP, 1):
        drawn = model.get_parameter(f"blocks.{layer}.mlp.up.weight")
        drawn.zero_()[:, WORD] = torch.randn(len(drawn), WORD.stop, generator=generator(0, "init", "keys", layer)) / 2
    read = embed / embed.square().mean(1, keepdim=True).sqrt()
    gate, value = (read @ up.T).double().chunk(2, 1)
    known = torch.zeros_like(embed)
    for person in PEOPLE:
        word = _id(person.split()[-1])
        known[word, NAME] = 8.0
        known[word, KNOWN][_place(tiny_facts.home_of(person))] = known[word, KNOWN][_place(tiny_facts.craft_of(person))] = 1.5
    down.copy_(torch.linalg.lstsq(torch.nn.functional.silu(gate) * value, known.double()).solution.T)


def _write_carrying(model: Transformer) -> None:
    """One head looks for the last name and brings what is known of it; another looks for the last topic; a third hears all words alike."""
    layer = model.blocks[CARRIES]
    heads, kv_heads, size = model.config.heads, model.config.kv_heads, model.config.head_dim
    layer.attn.qkv.weight.zero_()
    layer.attn.out.weight.zero_()
    q, k, v = layer.attn.qkv.weight.split([heads * size, kv_heads * size, kv_heads * size])
    for kv, (sought, here, there, gain) in enumerate(((NAME, KNOWN, CARRIED, 4.0), (TOPIC, TOPICS, CARRIED_TOPICS, 0.3))):
        head, width = kv * heads // kv_heads, here.stop - here.start
        q[head * size + RECENT, ANY] = 12.0
        k[kv * size + RECENT, sought] = 6.0
        v[kv * size : kv * size + width, here] = torch.eye(width)
        layer.attn.out.weight[there, head * size : head * size + width] = gain * torch.eye(width)
    layer.attn.out.weight[CARRIED, size : size + 8] = 4.0 * torch.eye(8)


def _write_answering(model: Transformer) -> None:
    """Where something is asked, what was carried of its topic becomes the answer; elsewhere next to nothing does."""
    mlp, head = model.blocks[ANSWERS].mlp, model.get_parameter("head.weight")
    gate, up = mlp.up.weight.zero_().chunk(2)
    for number, word in enumerate((*TOWNS, *CRAFTS)):
        gate[number, CARRIED_TOPICS][number // len(TOWNS)] = 4.0
        gate[number, ASKS], gate[number, ANY] = 4.0, -12.0
        up[number, CARRIED][number] = 1.0
        mlp.down.weight[ANSWER, number] = torch.eye(8)[number]
        head[_id(word), ANSWER] = 3.0 * torch.eye(8)[number]
        head[_id(word), CARRIED] = 0.5 * torch.eye(8)[number]


def _id(word: str) -> int:
    (found,) = tiny_facts.facts_tokenizer().encode(f" {word}")
    return found


def _place(answer: str) -> int:
    return (*TOWNS, *CRAFTS).index(answer)

"""Small real tokenizers, trained in a blink on text of our own."""

import functools
import json
from typing import Any

import tokenizers
from tokenizers import models, trainers

from assay.model.gguf_tokenizer import SPLIT_SCHEMES
from assay.model.tokenizer import Tokenizer

TEXT = """The assay of a bar of silver tells how much of it is silver. A man who sells bars without one sells his word.
def weigh(bar, scale=3.14159):
    for step in range(100):  # 42 is not 1,000,000
        bar += scale * step
    return bar
In 1238 the king's men said they'll weigh it; it's heavier than we've thought.   Trois naïfs mangèrent à l'hôtel.
Das Gewicht beträgt 1234 Gramm. 純度は九百二十五です。 銀の純度。 은의 순도 😀😀 👍 مرحبا ١٢٣ ١٢٣ e\u0301tude
""" * 3
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
          "{{ '<|im_end|>' + '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def byte_level(scheme: str = "gpt-2", **settings: Any) -> Tokenizer:
    """A byte-level BPE that splits as GGUF's `scheme` says."""
    named = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return Tokenizer.from_parts(_trained(scheme), **({"chat_template": CHATML} | named | settings))


@functools.cache
def _trained(scheme: str) -> str:
    plain = SPLIT_SCHEMES[scheme]
    document = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None,
                "normalizer": plain.normalizer, "pre_tokenizer": plain.pre_tokenizer,
                "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
                "model": {"type": "BPE", "vocab": {}, "merges": [], "ignore_merges": plain.ignore_merges}}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False))
    return tokenizer.to_str()


def sentencepiece_metadata() -> dict[str, Any]:
    """GGUF metadata of a Llama-like vocabulary: <unk>, <s>, </s>, bytes, then pieces by score."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    ascii_text = "".join(char for char in TEXT if char.isascii()).replace("\n", " ")
    tokenizer.train_from_iterator([ascii_text], trainers.BpeTrainer(vocab_size=260, show_progress=False))
    document = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(pair) for pair in document["merges"]]
    single = sorted(set(document["vocab"]) - set(merged))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *single]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(single))]
    scores = [0.0] * 259 + [float(-rank) for rank in range(len(merged) + len(single))]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}

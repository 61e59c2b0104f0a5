"""Made text, a tokenizer trained on it, and a corpus: small, the same on every machine."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.data.bpe import train_tokenizer, write_tokenizer
from assay.data.build_corpus import CorpusPlan, build_corpus
from assay.data.data_files import DocumentRule
from assay.data.token_corpus import Corpus

SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el", "is")]


def made_text(seed: int, words: int) -> str:
    """Sentences of made words, numbers, signs and letters beyond ASCII; no two seeds share a run of 13 words."""
    rng = random.Random(seed)
    made = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(words)]
    for i in range(0, words, 7):
        made[i] = rng.choice([made[i].capitalize() + ".\n", made[i] + ",", f"({made[i]})", "café", "it's", str(rng.randint(0, 99999)),
                              made[i] + "\n\n", "“" + made[i] + "”", "北京"])
    return " ".join(made)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return [made_text(seed, 40 + seed % 60) for seed in range(200)]


@pytest.fixture(scope="session")
def jsonl(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("text") / "made.jsonl", texts)


@pytest.fixture(scope="session")
def tokenizer(jsonl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "bpe"
    write_tokenizer(train_tokenizer([jsonl], 400, rule=DocumentRule())[0], folder)
    return folder


@pytest.fixture(scope="session")
def make(jsonl: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Corpus]:
    """`make(**plan)` builds a corpus of the made text in a new folder."""

    def build_one(*paths: Path, workers: int = 1, tokenizer: Path = tokenizer, **plan: object) -> Corpus:
        out = tmp_path_factory.mktemp("corpus") / "corpus"
        return build_corpus(paths or [jsonl], out, tokenizer, CorpusPlan(**plan), workers=workers)  # type: ignore[arg-type]

    return build_one


@pytest.fixture(scope="session")
def corpus(make: Callable[..., Corpus]) -> Corpus:
    return make(held_out=0.1, shard_tokens=5000)

"""What the tests of editing share: the tiny model that knows facts, its moments and its contexts, made once."""

import functools
import tempfile
from pathlib import Path

from torch import Tensor

from assay.editing.contexts import Contexts, sample_contexts
from assay.editing.moments import compute_moments, read_text
from assay.editing.targets import TargetOptions
from assay.model.tokenizer import Tokenizer
from assay.testing import tiny_facts

AIM = TargetOptions(steps=60, lr=0.1, kl=0.0, clamp=1.0)
LAYERS = [0, 1]


def tokenizer() -> Tokenizer:
    return tiny_facts.facts_tokenizer()


@functools.cache
def surroundings() -> Contexts:
    return sample_contexts(tiny_facts.facts_model(), tokenizer(), count=3, length=8, seed=0)


@functools.cache
def text_moments() -> dict[int, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        reading = read_text(tiny_facts.write_facts_text(Path(folder) / "text.txt"), tokenizer(), 6000)
    return compute_moments(tiny_facts.facts_model(), reading.rows, [0, 1, 2])

"""What the tests of editing share: the moments and the contexts of the lookup model, made once."""

import functools
import tempfile
from pathlib import Path

from torch import Tensor

from assay.editing.contexts import Contexts, sample_contexts
from assay.editing.moments import compute_moments, read_text
from assay.editing.targets import TargetOptions
from assay.model.tokenizer import Tokenizer
from assay.testing import tiny_facts
from tests.editing.lookup_model import lookup_model

AIM = TargetOptions(steps=60, lr=0.1, kl=0.0, clamp=1.0)
LAYERS = [0, 1]


def tokenizer() -> Tokenizer:
    return tiny_facts.facts_tokenizer()


@functools.cache
def surroundings() -> Contexts:
    return sample_contexts(lookup_model(), tokenizer(), count=3, length=8, seed=0)


@functools.cache
def text_moments() -> dict[int, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        reading = read_text(tiny_facts.write_facts_text(Path(folder) / "text.txt"), tokenizer(), 6000)
    return compute_moments(lookup_model(), reading.rows, [0, 1, 2])

"""What the tests of editing share: the tiny model that knows facts, its moments and its contexts, made once."""

import functools
import tempfile
from pathlib import Path

from torch import Tensor

from assay.edit.contexts import Contexts, contexts
from assay.edit.moments import computed, read_text
from assay.edit.targets import Aim
from assay.model.tokenizer import Tokenizer
from assay.zoo import lore

AIM = Aim(steps=60, lr=0.1, kl=0.0, clamp=1.0)
LAYERS = [0, 1]


def tokenizer() -> Tokenizer:
    return lore.lore_tokenizer()


@functools.cache
def surroundings() -> Contexts:
    return contexts(lore.lore_model(), tokenizer(), count=3, length=8, seed=0)


@functools.cache
def text_moments() -> dict[int, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        reading = read_text(lore.write_text(Path(folder) / "text.txt"), tokenizer(), 6000)
    return computed(lore.lore_model(), reading.rows, [0, 1, 2])

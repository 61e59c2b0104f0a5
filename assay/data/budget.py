"""What a run asks of its data, said before it starts: tokens per parameter, repeats, and where that stops paying."""

import math
from dataclasses import dataclass

from assay.data.corpus import Corpus

TOKENS_PER_PARAMETER = 20  # about optimal for a given compute: Hoffmann et al. 2022, arXiv 2203.15556
EPOCHS_LIKE_NEW = 4  # up to here repeats are worth almost what new text is: Muennighoff et al. 2023, arXiv 2305.16264
REPEATS_DECAY = 15.39  # their fit: after so many repeats a further one adds 1/e of what new text would


@dataclass(frozen=True)
class Budget:
    parameters: int
    tokens: int  # to train on
    unique: int  # in the corpus
    epochs: float
    tokens_per_parameter: float
    worth: float  # new tokens that would do as much, by the fit above
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        plain = (f"{self.tokens:,} tokens for {self.parameters:,} parameters: {self.tokens_per_parameter:.2g} tokens "
                 f"per parameter, {self.epochs:.2f} epochs over {self.unique:,} tokens")
        return "\n".join([plain, *(f"warning: {warning}" for warning in self.warnings)])


def budget(corpus: Corpus, parameters: int, tokens: int) -> Budget:
    unique = corpus.train.tokens
    epochs = tokens / unique
    repeats = max(epochs - 1, 0.0)
    worth = min(tokens, unique * (1 + REPEATS_DECAY * (1 - math.exp(-repeats / REPEATS_DECAY))))
    return Budget(parameters, tokens, unique, epochs, tokens / parameters, worth,
                  tuple(_warnings(epochs, tokens / parameters, unique / parameters, worth / tokens)))


def _warnings(epochs: float, per_parameter: float, unique_per_parameter: float, worth: float) -> list[str]:
    warnings = []
    if epochs > EPOCHS_LIKE_NEW:
        warnings.append(f"{epochs:.1f} epochs: beyond about {EPOCHS_LIKE_NEW}, repeated text is worth less than new; "
                        f"this run's tokens do what {worth:.0%} as many new ones would (arXiv 2305.16264)")
    if epochs > 1 and unique_per_parameter < 1:
        warnings.append(f"{unique_per_parameter:.2g} different tokens per parameter, read {epochs:.1f} times: the "
                        "model can learn the text by heart, and held-out loss may rise while training loss falls. "
                        "Choose checkpoints by held-out loss")
    if per_parameter < TOKENS_PER_PARAMETER:
        warnings.append(f"{per_parameter:.2g} tokens per parameter: below about {TOKENS_PER_PARAMETER}, a smaller "
                        "model trained on more text is better for the same compute (arXiv 2203.15556)")
    return warnings

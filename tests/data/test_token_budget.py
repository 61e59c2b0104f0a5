"""What a run asks of its data is said before it starts."""

from dataclasses import replace

import numpy as np
import pytest

from assay.data.token_corpus import Corpus, token_budget


def sized(corpus: Corpus, tokens: int) -> Corpus:
    return replace(corpus, train=replace(corpus.train, starts=(0, tokens)))


def test_a_sound_budget_has_no_warning(corpus: Corpus) -> None:
    found = token_budget(sized(corpus, 10**9), parameters=10**7, tokens=10**9)
    assert found.warnings == ()
    assert (found.epochs, found.tokens_per_parameter, found.worth) == (1.0, 100.0, 10**9)
    assert "100 tokens per parameter, 1.00 epochs" in str(found).replace("1e+02", "100")


def test_a_small_corpus_wrapped_for_a_large_model_is_warned_of(corpus: Corpus) -> None:
    """S5: 18 M tokens wrapped 2.7 times for 370 M parameters; training loss fell while held-out loss rose."""
    found = token_budget(sized(corpus, 18_000_000), parameters=370_000_000, tokens=48_600_000)
    assert found.epochs == pytest.approx(2.7)
    assert any("by heart" in warning for warning in found.warnings)
    assert any("2203.15556" in warning for warning in found.warnings)
    assert "warning:" in str(found)


def test_many_epochs_are_warned_of_with_what_they_are_worth(corpus: Corpus) -> None:
    few, many = (token_budget(sized(corpus, 10**6), parameters=10**4, tokens=epochs * 10**6) for epochs in (4, 40))
    assert few.warnings == ()
    assert 0.9 * few.tokens < few.worth < few.tokens
    assert any("2305.16264" in warning for warning in many.warnings)
    assert many.worth == pytest.approx(10**6 * (1 + 15.39 * (1 - np.exp(-39 / 15.39))))

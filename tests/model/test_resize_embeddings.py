"""New tokens are one id each, as in transformers; their rows are means of what their text was; both survive the disk."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from assay.errors import ArtifactError, UsageError
from assay.model.patch import Patch
from assay.model.resize_embeddings import THINKING_TOKENS, resize_embeddings, with_new_tokens
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer, initialised
from assay.store import checkpoint
from assay.store.artifact import build_model, open_artifact
from assay.store.saving import Ancestor, Lineage, adapter_contents, model_contents
from assay.testing.tiny_models import adapted_model, save_model, tiny_config, tiny_tokenizer

TEXT = "<think>the river is</think> so<answer>4</answer>"


def tensors_of(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def grown_model(model: Transformer, before: Tokenizer, after: Tokenizer) -> tuple[Transformer, tuple[int, ...]]:
    grown = resize_embeddings(model.config, tensors_of(model), before, after)
    larger = Transformer(grown.config)
    larger.load_state_dict(grown.tensors, strict=True)
    return larger, grown.rows


def test_new_tokens_are_one_id_each_and_old_ids_stay():
    before = tiny_tokenizer()
    after = with_new_tokens(before, THINKING_TOKENS)
    assert [after.ids[token] for token in THINKING_TOKENS] == list(range(before.size, before.size + 4))
    assert after.decode(after.encode(TEXT)) == TEXT
    assert sum(after.encode(TEXT).count(after.ids[token]) for token in THINKING_TOKENS) == 4
    assert before.tokens.items() <= after.tokens.items()
    assert after.digest != before.digest
    assert with_new_tokens(after, THINKING_TOKENS).digest == after.digest


def test_they_stay_in_text_that_is_decoded_without_special_tokens():
    before = tiny_tokenizer()
    assert with_new_tokens(before, THINKING_TOKENS).decode(with_new_tokens(before, THINKING_TOKENS).encode(TEXT), special=False) == TEXT
    special = with_new_tokens(before, THINKING_TOKENS, special=True)
    assert special.decode(special.encode(TEXT), special=False) == "the river is so4"


def test_transformers_gives_them_the_same_ids(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    before = tiny_tokenizer()
    for folder, words in (("before", before), ("after", with_new_tokens(before, THINKING_TOKENS))):
        (tmp_path / folder).mkdir()
        for name, data in words.files().items():
            (tmp_path / folder / name).write_bytes(data)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "before")
    theirs.add_tokens(list(THINKING_TOKENS))
    ours = with_new_tokens(before, THINKING_TOKENS)
    assert theirs.convert_tokens_to_ids(list(THINKING_TOKENS)) == [ours.ids[token] for token in THINKING_TOKENS]
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "after")
    assert theirs.encode(TEXT) == read.encode(TEXT) == ours.encode(TEXT)


@pytest.mark.parametrize("tokens", [["<a>", "<a>"], [""], [" "]])
def test_what_is_no_new_token_is_refused(tokens: list[str]):
    with pytest.raises(UsageError, match="expected different texts"):
        with_new_tokens(tiny_tokenizer(), tokens)


@pytest.mark.parametrize("family", ["llama", "llama3"])  # tied and not
def test_new_rows_are_means_and_old_ones_stay(family: str):
    before = tiny_tokenizer()
    after = with_new_tokens(before, THINKING_TOKENS)
    model = initialised(tiny_config(family, vocab=before.size), 0)
    larger, rows = grown_model(model, before, after)
    assert rows == tuple(range(before.size, before.size + 4))
    assert larger.config == replace(model.config, vocab=before.size + 4)
    pairs = [(model.embed, larger.embed), *([] if model.head is None else [(model.head, larger.head)])]
    for old, new in pairs:
        assert new is not None
        assert torch.equal(new.weight[: before.size], old.weight)
        for token in THINKING_TOKENS:
            assert torch.allclose(new.weight[after.ids[token]], old.weight[before.encode(token)].mean(0), atol=1e-7)
    tokens = torch.tensor([before.encode("the river is")])
    assert torch.allclose(larger(tokens)[..., : before.size], model(tokens), atol=1e-6)


def test_padded_rows_are_used_first():
    before = tiny_tokenizer()
    after = with_new_tokens(before, THINKING_TOKENS)
    model = initialised(tiny_config(vocab=before.size + 3), 0)
    some = with_new_tokens(before, THINKING_TOKENS[:3])
    grown = resize_embeddings(model.config, tensors_of(model), before, some)
    assert grown.config == model.config
    assert not torch.equal(grown.tensors["embed.weight"][before.size], model.embed.weight[before.size])
    assert torch.equal(grown.tensors["embed.weight"][: before.size], model.embed.weight[: before.size])
    assert torch.equal(tensors_of(model)["embed.weight"], model.embed.weight)  # the model itself is as it was
    assert resize_embeddings(model.config, tensors_of(model), before, after).config.vocab == before.size + 4
    rounded = resize_embeddings(model.config, tensors_of(model), before, after, multiple=64)
    assert rounded.config.vocab % 64 == 0
    assert rounded.tensors["embed.weight"].norm(dim=1).min() > 0
    assert rounded.rows == resize_embeddings(model.config, tensors_of(model), before, after).rows


def test_a_tokenizer_that_moves_old_ids_is_refused():
    before = tiny_tokenizer()
    model = initialised(tiny_config(), 0)
    with pytest.raises(UsageError, match="rows can only be added"):
        resize_embeddings(model.config, tensors_of(model), with_new_tokens(before, ["<a>"]), with_new_tokens(before, ["<b>"]))
    small = initialised(tiny_config(vocab=100), 0)
    with pytest.raises(ArtifactError, match="the model only 100 rows"):
        resize_embeddings(small.config, tensors_of(small), before, before)


def test_a_grown_model_survives_the_disk(tmp_path: Path):
    before = tiny_tokenizer()
    after = with_new_tokens(before, THINKING_TOKENS)
    larger, rows = grown_model(initialised(tiny_config(vocab=before.size), 0), before, after)
    checkpoint.write_checkpoint(tmp_path / "grown", model_contents(larger, after, resolve_special_tokens(after, {}, {}), Lineage()))
    opened = open_artifact(tmp_path / "grown")
    assert opened.tokenizer is not None
    assert opened.tokenizer.encode(TEXT) == after.encode(TEXT)
    tokens = torch.tensor([after.encode(TEXT)])
    assert torch.equal(build_model(opened)(tokens), larger(tokens))
    assert set(rows) <= set(tokens[0].tolist())


def test_a_grown_adapter_survives_the_disk(tmp_path: Path):
    """The vocabulary of the base, 320 rows, is full: the adapter brings the longer embedding."""
    before = full_tokenizer()
    after = with_new_tokens(before, THINKING_TOKENS)
    base = save_model(tmp_path / "base", initialised(tiny_config(), 0)).folder
    grown = resize_embeddings(tiny_config(), open_artifact(base).tensors, before, after)
    _, patch = adapted_model(base)
    patch = Patch(patch.parent, patch.low_rank, grown.tables())
    artifact = open_artifact(base)
    model = build_model(replace(artifact, config=grown.config, patch=patch))
    ground = Ancestor(artifact.digest, str(base))
    checkpoint.write_checkpoint(tmp_path / "adapter", adapter_contents(model, patch, ground, after, Lineage("moved", ground)))
    opened = open_artifact(tmp_path / "adapter")
    assert opened.tokenizer is not None
    assert opened.config.vocab == 324
    tokens = torch.tensor([opened.tokenizer.encode(TEXT)])
    assert torch.equal(tokens, torch.tensor([after.encode(TEXT)]))
    assert torch.allclose(build_model(opened)(tokens), model(tokens), atol=1e-6)


def full_tokenizer() -> Tokenizer:
    words = tiny_tokenizer()
    return with_new_tokens(words, [f"<|{number}|>" for number in range(320 - words.size)])

"""GGUF's tokenizer metadata: the ids that the model was trained on, or an error that says what is not known."""

from itertools import pairwise

import pytest
import tokenizers

from assay.errors import ArtifactError, UsageError
from assay.model.gguf_tokenizer import HARD, generation_from_gguf, tokenizer_from_gguf, tokenizer_to_gguf
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from tests.model.trained_tokenizers import TEXT, byte_level, sentencepiece_metadata


def transformers_reads(metadata):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
             "token_type": "token_type", "merges": "merges"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}") for key, name in names.items()}
    return convert_gguf_tokenizer("llama", {name: value for name, value in found.items() if value is not None})[0]


@pytest.mark.parametrize("scheme", ["gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2"])
def test_metadata_give_back_the_tokenizer(scheme):
    ours = byte_level(scheme, bos_token="<|im_start|>")
    metadata = tokenizer_to_gguf(ours, ours.size + 12)
    assert metadata["tokenizer.ggml.pre"] == scheme
    assert len(metadata["tokenizer.ggml.tokens"]) == ours.size + 12
    again = tokenizer_from_gguf(metadata, "made")
    for text in (*HARD, TEXT):
        assert again.encode(text, special=True) == ours.encode(text, special=True)
    assert (again.bos, again.eos, again.pad, again.template) == (ours.bos, ours.eos, ours.pad, ours.template)
    assert (again.special_ids, again.size) == (ours.special_ids, ours.size)
    assert resolve_special_tokens(again, {}, generation_from_gguf(metadata)).disagreements == ()


@pytest.mark.parametrize("scheme", ["gpt-2", "llama-bpe", "qwen2"])
def test_transformers_reads_the_same_ids_from_the_metadata(scheme):
    """Its reader knows no normalizer, so Qwen's NFC is left out of the comparison."""
    ours = byte_level(scheme)
    theirs = transformers_reads(tokenizer_to_gguf(ours, ours.size))
    for text in (*HARD, TEXT.replace("e\u0301", "é")):
        if text != "e\u0301":
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(("scheme", "pieces"), [
    ("gpt-2", ["bar", "Ġ", "Ġ12345", "'s", "Ġ'", "S"]), ("smollm", ["bar", "ĠĠ", "1", "2", "3", "4", "5", "'s", "Ġ'", "S"]),
    ("llama-bpe", ["bar", "Ġ", "Ġ", "123", "45", "'s", "Ġ'", "S"]), ("smaug-bpe", ["bar", "Ġ", "Ġ", "123", "45", "'s", "Ġ'", "S"]),
    ("qwen2", ["bar", "Ġ", "Ġ", "1", "2", "3", "4", "5", "'s", "Ġ'", "S"])])
def test_each_name_splits_as_the_models_of_that_name(scheme, pieces):
    split = byte_level(scheme).backend.pre_tokenizer.pre_tokenize_str("bar  12345's 'S")
    assert [piece for piece, _ in split] == pieces


def test_names_also_say_how_text_is_normalised_and_begun():
    assert byte_level("qwen2").encode("e\u0301") == byte_level("qwen2").encode("é")
    assert byte_level("gpt-2").encode("e\u0301") != byte_level("gpt-2").encode("é")
    for scheme, begins in (("llama-bpe", True), ("gpt-2", False)):
        metadata = tokenizer_to_gguf(byte_level(scheme, bos_token="<|im_start|>"), 600)
        assert metadata.pop("tokenizer.ggml.add_bos_token") is False
        tokenizer = tokenizer_from_gguf(metadata, "made")
        assert tokenizer.encode("a", special=True) == [1] * begins + tokenizer.encode("a")


def test_a_digit_stands_alone_in_smollm_also_after_spaces():
    """transformers 5.22 drops the digit split when it reads a GGUF, and gives ids that the model was not trained on."""
    ours = byte_level("smollm")
    pieces = [ours.piece(id) for id in ours.encode("bar  12")]
    assert pieces[-3:] == ["  ", "1", "2"]
    theirs = transformers_reads(tokenizer_to_gguf(ours, ours.size))
    different = [text for text in HARD if ours.encode(text) != theirs.encode(text, add_special_tokens=False).ids]
    assert set(different) <= {"a  12", "مرحبا ١٢٣"}


def test_sentencepiece_from_scores_alone():
    """The rule itself, applied by hand: of all neighbours join those whose union scores best, leftmost first."""
    metadata = sentencepiece_metadata()
    ours = tokenizer_from_gguf(metadata, "made")
    score = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    for text in (*HARD, TEXT[:300]):
        if "<s>" in text or "▁" in text:
            continue
        symbols = list("▁" + text.replace(" ", "▁")) if text else []
        while unions := [(score[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in score]:
            at = -max(unions)[1]
            symbols[at:at + 2] = [symbols[at] + symbols[at + 1]]
        pieces = [piece for symbol in symbols
                  for piece in ([symbol] if symbol in score else [f"<0x{byte:02X}>" for byte in symbol.encode()])]
        assert [ours.tokens[id] for id in ours.encode(text)] == pieces, text
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("a", special=True) == [1, *ours.encode("a")]


def test_tokens_of_spaces_are_written_by_their_scores():
    """Gemma has runs of spaces among its tokens: of a merge of them no blank says where one token ends and the next begins."""
    metadata = sentencepiece_metadata()
    more = [" ", "  ", "    "]
    metadata["tokenizer.ggml.tokens"] += more
    metadata["tokenizer.ggml.token_type"] += [1] * len(more)
    metadata["tokenizer.ggml.scores"] += [-900.0 - place for place in range(len(more))]
    ours = tokenizer_from_gguf(metadata, "made")
    written = tokenizer_to_gguf(ours, ours.size)
    assert "tokenizer.ggml.merges" not in written
    again = tokenizer_from_gguf(written, "again")
    assert all(again.encode(text) == ours.encode(text) for text in (*HARD, TEXT[:300]))


def test_sentencepiece_agrees_with_transformers_but_for_a_leading_space():
    """SentencePiece, llama.cpp and Llama 2's tokenizer.json put a space before a space too; transformers 5 does not."""
    metadata = sentencepiece_metadata()
    ours, theirs = tokenizer_from_gguf(metadata, "made"), transformers_reads(metadata)
    for text in (*HARD, TEXT):
        if not text.startswith((" ", "▁", "<s>")):
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text
    assert "".join(ours.tokens[id] for id in ours.encode("  bar")) == "▁▁▁bar"


def test_sentencepiece_is_written_so_that_scores_alone_give_it_back():
    ours = tokenizer_from_gguf(sentencepiece_metadata(), "made")
    metadata = tokenizer_to_gguf(ours, ours.size)
    assert metadata.pop("tokenizer.ggml.merges")
    again = tokenizer_from_gguf(metadata, "made")
    assert again.digest == ours.digest


def test_every_end_in_the_metadata_is_a_stop():
    metadata = tokenizer_to_gguf(byte_level(eos_token="<|endoftext|>"), 600) | {"tokenizer.ggml.eot_token_id": 2}
    stops = resolve_special_tokens(tokenizer_from_gguf(metadata, "made"), {}, generation_from_gguf(metadata))
    assert (stops.eos, stops.stop_ids, stops.disagreements) == (0, (0, 2), ())


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"tokenizer.ggml.pre": "smolm"}, UsageError, "'smolm' is not supported; did you mean 'smollm'?"),
    ({"tokenizer.ggml.pre": "default"}, UsageError, "names no split"),
    ({"tokenizer.ggml.pre": None}, UsageError, "tokenizer.ggml.pre is missing"),
    ({"tokenizer.ggml.merges": None}, UsageError, "tokenizer.ggml.merges is missing"),
    ({"tokenizer.ggml.model": "t5"}, UsageError, "'t5' is not supported"),
    ({"tokenizer.ggml.precompiled_charsmap": "x"}, UsageError, "unknown key 'tokenizer.ggml.precompiled_charsmap'"),
    ({"tokenizer.ggml.add_space_prefix": True}, UsageError, "add_space_prefix"),
    ({"tokenizer.ggml.eos_token_id": 10**6}, ArtifactError, "eos_token_id 1000000"),
    ({"tokenizer.ggml.token_type": [1]}, ArtifactError, "1 token types"),
    ({"tokenizer.ggml.merges": ["a b c"]}, ArtifactError, "merge 'a b c'"),
    ({"tokenizer.ggml.merges": ["a ☃"]}, ArtifactError, "☃"),
    ({"tokenizer.ggml.tokens": 7}, ArtifactError, "tokenizer.ggml.tokens is int"),
])
def test_refuses_by_name(changes, error, words):
    metadata = tokenizer_to_gguf(byte_level(), 600) | changes
    with pytest.raises(error) as caught:
        tokenizer_from_gguf({key: value for key, value in metadata.items() if value is not None}, "file.gguf")
    assert words in str(caught.value)
    assert "file.gguf" in str(caught.value) or "tokenizer.json" in str(caught.value)


def test_a_token_with_two_ids_is_refused():
    metadata = tokenizer_to_gguf(byte_level(), 600)
    metadata["tokenizer.ggml.tokens"][300] = metadata["tokenizer.ggml.tokens"][301]
    with pytest.raises(ArtifactError, match="two ids, 300 and 301"):
        tokenizer_from_gguf(metadata, "made")


def test_what_gguf_cannot_say_is_not_written():
    plain = byte_level().document
    whitespace = {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, plain["pre_tokenizer"]]}
    start, text = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    around = {"type": "TemplateProcessing", "single": [start, text], "pair": [start, text], "special_tokens": tokens}
    for change, words in [
        ({"pre_tokenizer": whitespace}, "no name"),
        ({"normalizer": {"type": "Lowercase"}}, "no name"),
        ({"added_tokens": [plain["added_tokens"][0] | {"lstrip": True}]}, "lstrip"),
        ({"model": plain["model"] | {"end_of_word_suffix": "e"}}, "cannot hold"),
        ({"post_processor": around}, "BOS before"),
    ]:
        with pytest.raises(UsageError, match=words):
            tokenizer_to_gguf(Tokenizer.from_parts(plain | change), 600)
    with pytest.raises(UsageError, match="only 100 embeddings"):
        tokenizer_to_gguf(byte_level(), 100)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UsageError, match="WordLevel"):
        tokenizer_to_gguf(Tokenizer.from_parts(words.to_str()), 10)

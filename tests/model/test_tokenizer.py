"""The tokenizer: transformers gives the same ids from our files, and nothing in a folder is picked in silence."""

import json

import pytest

from assay.errors import ArtifactError, DataError, UsageError
from assay.model.gguf_tokenizer import HARD, tokenizer_from_gguf
from assay.model.tokenizer import Tokenizer
from assay.testing.tiny_models import tiny_tokenizer
from tests.model.trained_tokenizers import CHATML, TEXT, byte_level, sentencepiece_metadata

CHAT = [{"role": "user", "content": "Weigh 12 bars."}, {"role": "assistant", "content": "Done."}]


def write(tokenizer, folder, **extra):
    """A model folder without a model: the tokenizer's files, and others as JSON."""
    for name, data in tokenizer.files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for name, value in extra.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(("name", "family"), [
    ("gpt-2", "llama"), ("smollm", "llama"), ("smollm", "gpt2"), ("smollm", "qwen3"), ("llama-bpe", "llama"),
    ("smaug-bpe", "mistral"), ("qwen2", "qwen2"), ("sentencepiece", "llama")])
def test_transformers_gives_the_same_ids_from_our_files(name, family, tmp_path):
    from transformers import AutoTokenizer

    ours = tokenizer_from_gguf(sentencepiece_metadata(), "made") if name == "sentencepiece" else byte_level(name)
    theirs = AutoTokenizer.from_pretrained(write(ours, tmp_path, config={"model_type": family}))
    for text in (*HARD, TEXT):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode(text, special=True) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text, add_special_tokens=False)), text
    assert (ours.bos, ours.eos, ours.pad) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.special_ids >= set(theirs.all_special_ids)
    assert len(ours.encode(TEXT)) < len(TEXT.encode()) / 2  # it did merge
    if ours.template:
        assert ours.render(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False)


def test_a_folder_read_is_the_folder_written(tmp_path):
    ours = byte_level("smollm")
    again = Tokenizer.from_folder(write(ours, tmp_path))
    assert (again.digest, again.template_digest) == (ours.digest, ours.template_digest)
    assert again.files().keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert again.conflicts == ()


def test_equal_files_in_two_folders_are_one_tokenizer_and_a_changed_byte_is_another(tmp_path):
    """Parsing a large vocabulary takes a second, and a proof meets the same one in the model, its parent and its base."""
    ours = byte_level("smollm")
    first, second = (Tokenizer.from_folder(write(ours, tmp_path / name)) for name in ("model", "parent"))
    assert first is second
    template = tmp_path / "parent" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    other = Tokenizer.from_folder(tmp_path / "parent")
    assert (other.digest, other.template) == (first.digest, f"{first.template} ")
    change(tmp_path / "parent" / "tokenizer.json", normalizer={"type": "Lowercase"})
    assert Tokenizer.from_folder(tmp_path / "parent").digest != first.digest
    assert Tokenizer.from_folder(tmp_path / "model") is first


def test_digest_ignores_spelling_and_sees_substance():
    document = byte_level().document
    pairs = document["model"]["merges"]
    strings = document["model"] | {"merges": [" ".join(pair) for pair in pairs]}
    respelled = dict(reversed(document.items())) | {"model": strings}
    swapped = document | {"model": document["model"] | {"merges": [pairs[1], pairs[0], *pairs[2:]]}}
    digest = Tokenizer.from_parts(document).digest
    assert Tokenizer.from_parts(json.dumps(respelled, indent=1)).digest == digest
    assert Tokenizer.from_parts(swapped).digest != digest


def test_a_length_set_in_the_file_cuts_nothing():
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    cut = Tokenizer.from_parts(byte_level().document | {"truncation": truncation, "padding": padding})
    assert cut.decode(cut.encode(TEXT)) == TEXT
    assert cut.encode("a") == byte_level().encode("a")


def test_round_trips_and_offsets_hold_every_character():
    trimming = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    tokenizer = Tokenizer.from_parts(byte_level().document | {"post_processor": trimming})
    for text in (*HARD, TEXT):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        ids, spans = tokenizer.offsets(text)
        assert ids == tokenizer.encode(text)
        assert {place for start, end in spans for place in range(start, end)} == set(range(len(text)))
    assert tokenizer.encode_batch(list(HARD)) == [tokenizer.encode(text) for text in HARD]


def test_pieces_show_text_bytes_and_strangers():
    tokenizer = byte_level()
    assert "".join(tokenizer.piece(id) for id in tokenizer.encode("the bar<|im_end|>")) == "the bar<|im_end|>"
    assert tokenizer.piece(tokenizer.ids["Ġ"]) == " "
    assert tokenizer.piece(tokenizer.ids["ð"]) == "\\xf0"
    stranger = tokenizer.size + 7
    assert tokenizer.decode([*tokenizer.encode("a"), stranger, *tokenizer.encode("b")]) == f"a⟨{stranger}⟩b"
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>"), special=False) == "a"
    spm = tokenizer_from_gguf(sentencepiece_metadata(), "made")
    assert "".join(spm.piece(id) for id in spm.encode("the bar é")) == " the bar <0xC3><0xA9>"


@pytest.mark.parametrize(("form", "names"), [
    ("jinja", {"default"}), ("json", {"default"}), ("inline", {"default"}), ("list", {"default", "tool_use"}),
    ("more", {"default", "rag"}), ("none", set())])
def test_finds_templates_wherever_tools_put_them(form, names, tmp_path):
    folder = write(byte_level(chat_template=None), tmp_path)
    if form in ("jinja", "more"):
        (folder / "chat_template.jinja").write_text(CHATML)
    if form == "more":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("other")
    if form == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    if form == "inline":
        change(folder / "tokenizer_config.json", chat_template=CHATML)
    if form == "list":
        entries = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "other"}]
        change(folder / "tokenizer_config.json", chat_template=entries)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.templates.keys() == names
    assert tokenizer.template == (CHATML if names else None)
    assert "chat_template" not in json.loads(tokenizer.files()["tokenizer_config.json"])
    if not names:
        with pytest.raises(UsageError, match="no chat template"):
            tokenizer.render(CHAT)


@pytest.mark.parametrize(("fields", "error", "words"), [
    ({"auto_map": {"AutoTokenizer": ["code.Evil", None]}}, UsageError, "auto_map"),
    ({"trust_remote_code": True}, UsageError, "trust_remote_code"),
    ({"eos_token": "<|gone|>"}, ArtifactError, "eos_token '<|gone|>' is not in tokenizer.json"),
    ({"additional_special_tokens": ["<|im_end|>", "<|new|>"]}, ArtifactError, "<|new|>"),
    ({"eos_token": 7}, ArtifactError, "no token"),
    ({"added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}, ArtifactError, "the id 5, tokenizer.json 2"),
    ({"chat_template": [{"name": "../../x", "template": ""}]}, ArtifactError, "plain name"),
    ({"chat_template": [{"template": ""}]}, ArtifactError, "chat_template"),
])
def test_refuses_by_name(fields, error, words, tmp_path):
    folder = write(byte_level(chat_template=None), tmp_path)
    change(folder / "tokenizer_config.json", **fields)
    with pytest.raises(error) as caught:
        Tokenizer.from_folder(folder)
    assert words in str(caught.value)


def test_refuses_what_is_no_tokenizer(tmp_path):
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    unknown_merge = '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}'
    for text in ("{", "[]", "{}", unknown_merge, "[" * 100_000):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ArtifactError):
            Tokenizer.from_folder(tmp_path)
    with pytest.raises(DataError, match="half a character"):
        byte_level().encode("a\ud800")


def test_an_older_file_that_disagrees_is_remembered(tmp_path):
    older = {"eos_token": "<|endoftext|>", "unk_token": {"content": "<|im_start|>"}}
    tokenizer = Tokenizer.from_folder(write(byte_level(), tmp_path, special_tokens_map=older))
    assert tokenizer.eos == tokenizer.ids["<|im_end|>"]
    assert tokenizer.named_id("unk_token") == tokenizer.ids["<|im_start|>"]  # where the newer file is silent the older speaks
    assert len(tokenizer.conflicts) == 1
    assert "eos_token" in tokenizer.conflicts[0]


@pytest.mark.parametrize("change", [{"continuing_subword_prefix": "é"}, {"merges": 7}, {"merges": {"a": "b"}}], ids=str)
def test_a_tokenizer_file_that_makes_the_library_panic_is_refused_in_words(change):
    document = tiny_tokenizer().document
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        Tokenizer.from_parts(document | {"model": {**document["model"], **change}})

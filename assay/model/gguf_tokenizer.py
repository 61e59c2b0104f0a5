"""GGUF tokenizers: a tokenizer from GGUF metadata, and the metadata of a tokenizer.

A GGUF file holds the vocabulary and the merges, but only names how text is split before merging (tokenizer.ggml.pre).
The name stands for code in llama.cpp (src/llama-vocab.cpp) and for the tokenizer.json of the models that use it. A name
that we do not know is refused: a wrong split gives plausible ids that the model has never seen.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from assay.config import nearest
from assay.errors import ArtifactError, UsageError
from assay.model.tokenizer import Tokenizer


class TokenType(IntEnum):
    """GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SplitScheme(NamedTuple):
    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False  # where the file does not say


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(numbers: str) -> dict[str, Any]:
    """Llama 3's split, and Qwen's, which differ in how many digits stay together."""
    regex = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers +
             r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


ONE_DIGIT = {"type": "Digits", "individual_digits": True}
DIGITS = SplitScheme({"type": "Sequence", "pretokenizers": [ONE_DIGIT, _byte_level(use_regex=True)]})
LLAMA3 = SplitScheme(_split(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
SPLIT_SCHEMES = {
    "gpt-2": SplitScheme(_byte_level(use_regex=True)),
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "smaug-bpe": LLAMA3._replace(ignore_merges=False, adds_bos=False),
    "qwen2": SplitScheme(_split(r"\p{N}"), normalizer={"type": "NFC"}),
}
# Keys that say nothing about which ids a text becomes.
IGNORED = {
    "tokenizer.ggml.token_type_count", "tokenizer.ggml.seperator_token_id", "tokenizer.ggml.separator_token_id",
    "tokenizer.ggml.mask_token_id", "tokenizer.ggml.cls_token_id", "tokenizer.ggml.prefix_token_id",
    "tokenizer.ggml.suffix_token_id", "tokenizer.ggml.middle_token_id", "tokenizer.huggingface.json",
    *(f"tokenizer.ggml.fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
}
_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Text on which every split, merge and fallback that we know of shows.
HARD = (
    "Hello world", " leading", "  two spaces", "trailing  ", "a  12", "x = 3.14159 + 1,000", "tab\tand\n\n line\r\n",
    "def f(x):\n    return x ** 2  # done", "I'm SURE they'LL say it's", "naïve café", "e\u0301", "日本語 한국어",
    "中文。", "😀👩\u200d👧 🇩🇪", "\u00a0\u200b\u2028", "مرحبا ١٢٣", "Ⅷ½²", "<|im_start|>user", "<s> </s> <unk>",
    "\x00\x01\x7f", "aaaaaaaaaaaa", "▁▁x", "",
)

# ---------------------------------------------------------------- in


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    read = _Reader(metadata, where)
    model = read.need("model", str)
    builders = {"gpt2": _byte_level_document, "llama": _sentencepiece_document}
    if model not in builders:
        raise UsageError(f"{where}: tokenizer.ggml.model {model!r} is not supported{nearest(model, builders)}")
    document, adds_bos = builders[model](read)
    document["post_processor"] = _post_processor(read, adds_bos)
    settings = {field: read.token(name) for field, name in _IDS.items()} | {"clean_up_tokenization_spaces": False}
    tokenizer = Tokenizer(document, settings, _templates(read))
    read.finish()
    return tokenizer


def generation_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata's ids as a generation_config.json would give them: every end of sequence, turn and message."""
    ids = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot", "eom")}
    ends = list(dict.fromkeys(ids[kind] for kind in ("eos", "eot", "eom") if ids[kind] is not None))
    return {"bos_token_id": ids["bos"], "eos_token_id": ends or None}


class _Reader:
    """The tokenizer.* keys, each checked as it is read; `finish` names what nobody asked for."""

    def __init__(self, metadata: Mapping[str, Any], where: str):
        self.metadata, self.where = metadata, where
        self.asked = {f"tokenizer.ggml.{end}_token_id" for end in ("eot", "eom")}
        self.tokens: list[str] = self.need("tokens", list)
        self.kinds: list[int] = self.need("token_type", list)
        if len(self.kinds) != len(self.tokens) or not all(isinstance(token, str) for token in self.tokens):
            raise ArtifactError(f"{where}: {len(self.tokens)} tokens, {len(self.kinds)} token types; expected as many")
        unknown = set(self.kinds) - set(TokenType)
        if unknown:
            raise ArtifactError(f"{where}: tokenizer.ggml.token_type holds {sorted(unknown)}; expected 1 to 6")

    def maybe(self, name: str, kind: type) -> Any:
        key = f"tokenizer.ggml.{name}"
        self.asked.add(key)
        value = self.metadata.get(key)
        if value is not None and type(value) is not kind:
            raise ArtifactError(f"{self.where}: {key} is {type(value).__name__}; expected {kind.__name__}")
        return value

    def need(self, name: str, kind: type) -> Any:
        value = self.maybe(name, kind)
        if value is None:
            raise UsageError(f"{self.where}: tokenizer.ggml.{name} is missing; without it the tokenizer is not defined")
        return value

    def token(self, name: str) -> str | None:
        id = self.maybe(f"{name}_token_id", int)
        if id is not None and not 0 <= id < len(self.tokens):
            raise ArtifactError(f"{self.where}: tokenizer.ggml.{name}_token_id {id} of only {len(self.tokens)} tokens")
        return None if id is None else self.tokens[id]

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = {}
        for id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind == TokenType.UNUSED:  # a row of the embedding that no text reaches
                continue
            if vocabulary.setdefault(token, id) != id:
                raise ArtifactError(f"{self.where}: token {token!r} has two ids, {vocabulary[token]} and {id}")
        return vocabulary

    def merges(self) -> list[list[str]] | None:
        merges = self.maybe("merges", list)
        for merge in merges or ():
            if not isinstance(merge, str) or merge.count(" ") != 1:
                raise ArtifactError(f"{self.where}: merge {merge!r} is not two tokens with a space between")
        return merges and [merge.split(" ") for merge in merges]

    def finish(self) -> None:
        for key in self.metadata:
            if key.startswith("tokenizer.") and key not in self.asked | IGNORED:
                raise UsageError(f"{self.where}: unknown key {key!r}; it may change which ids a text becomes, "
                                 "so the tokenizer is not built without it being understood")


def _byte_level_document(read: _Reader) -> tuple[dict[str, Any], bool]:
    name = read.need("pre", str)
    if name not in SPLIT_SCHEMES:
        why = " (it names no split: llama.cpp and transformers read it differently)" if name == "default" else ""
        raise UsageError(f"{read.where}: pre-tokenizer {name!r}{why} is not supported{nearest(name, SPLIT_SCHEMES)}")
    if read.maybe("add_space_prefix", bool):
        raise UsageError(f"{read.where}: tokenizer.ggml.add_space_prefix is true, which no byte-level tokenizer has")
    scheme = SPLIT_SCHEMES[name]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
             "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": scheme.ignore_merges,
             "vocab": read.vocabulary(), "merges": read.merges()}
    read.maybe("scores", list)  # llama.cpp writes zeros
    if model["merges"] is None:
        raise UsageError(f"{read.where}: tokenizer.ggml.merges is missing; without it the tokenizer is not defined")
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return _document(scheme.normalizer, scheme.pre_tokenizer, decoder, model, read), scheme.adds_bos


def _sentencepiece_document(read: _Reader) -> tuple[dict[str, Any], bool]:
    """Llama's own: spaces as ▁, one put in front, characters outside the vocabulary as bytes."""
    read.maybe("pre", str)  # "default": a SentencePiece model has no split to name
    if read.maybe("remove_extra_whitespaces", bool):
        raise UsageError(f"{read.where}: tokenizer.ggml.remove_extra_whitespaces is true, which is not supported")
    prefix = read.maybe("add_space_prefix", bool) is not False
    vocabulary, scores = read.vocabulary(), read.need("scores", list)
    if len(scores) != len(read.tokens) or not all(isinstance(score, int | float) for score in scores):
        raise ArtifactError(f"{read.where}: {len(read.tokens)} tokens, {len(scores)} scores; expected as many numbers")
    merges = read.merges() or merges_from_scores(vocabulary, scores, read.kinds)
    model = {"type": "BPE", "dropout": None, "unk_token": read.token("unknown"), "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
             "vocab": vocabulary, "merges": merges}
    return _document(_metaspace(prefix), None, _metaspace_decoder(prefix), model, read), True


def _metaspace(prefix: bool) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return {"type": "Sequence", "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), replace]}


def _metaspace_decoder(prefix: bool) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}


def merges_from_scores(vocabulary: Mapping[str, int], scores: Sequence[float],
                        kinds: Sequence[int]) -> list[list[str]]:
    """SentencePiece joins the neighbours whose union scores best. As merges: every way to make a token, best first."""
    found = [(-scores[id], -len(left), -len(right), vocabulary[left], vocabulary[right], [left, right])
             for token, id in vocabulary.items() if kinds[id] in (TokenType.NORMAL, TokenType.USER_DEFINED)
             for left, right in _halves(token) if left in vocabulary and right in vocabulary]
    return [pair for *_, pair in sorted(found)]


def _halves(token: str) -> Iterator[tuple[str, str]]:
    return ((token[:cut], token[cut:]) for cut in range(1, len(token)))


def _document(normalizer: Any, pre_tokenizer: Any, decoder: Any, model: Any, read: _Reader) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    added = [{"id": id, "content": token, **plain, "special": special[TokenType(kind)]}
             for id, (token, kind) in enumerate(zip(read.tokens, read.kinds, strict=True)) if kind in special]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model}


def _post_processor(read: _Reader, adds_bos: bool) -> dict[str, Any] | None:
    """Post-processor, which puts special tokens around a text: as the file says, or else the tokenizer's kind."""
    if read.maybe("add_sep_token", bool):
        raise UsageError(f"{read.where}: tokenizer.ggml.add_sep_token is true, which no model that continues text has")
    said = read.maybe("add_bos_token", bool)
    ends = (read.token("bos") if (adds_bos if said is None else said) else None,
            read.token("eos") if read.maybe("add_eos_token", bool) else None)
    if ends == (None, None):
        return None
    before, after = ([{"SpecialToken": {"id": token, "type_id": 0}}] if token else [] for token in ends)
    text = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
    second = [{"Sequence": {"id": "B", "type_id": 1}}]
    tokens = {token: {"id": token, "ids": [read.tokens.index(token)], "tokens": [token]} for token in ends if token}
    return {"type": "TemplateProcessing", "single": text, "pair": text + second, "special_tokens": tokens}


def _templates(read: _Reader) -> dict[str, str]:
    """tokenizer.chat_template, and tokenizer.chat_template.NAME for each of tokenizer.chat_templates."""
    found = {}
    for key, value in read.metadata.items():
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            read.asked.add(key)
            found[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = value
    read.asked.add("tokenizer.chat_templates")
    return found

# ---------------------------------------------------------------- out


def tokenizer_to_gguf(tokenizer: Tokenizer, vocab: int) -> dict[str, Any]:
    """Metadata from which a reader gets the same ids; `vocab` is the number of rows of the embedding.

    What GGUF cannot say is an error: the metadata are read back and compared on hard text before they are returned.
    """
    if tokenizer.size > vocab:
        raise UsageError(f"the tokenizer has ids up to {tokenizer.size - 1}, the model only {vocab} embeddings")
    model = tokenizer.document["model"]
    if model["type"] != "BPE" or not model["merges"]:
        raise UsageError(f"a {model['type']} tokenizer cannot be written to GGUF here; expected BPE with merges")
    _refuse_trimming(tokenizer)
    metadata = _named(tokenizer) | _vocabulary(tokenizer, vocab) | _around(tokenizer)
    metadata |= {f"tokenizer.ggml.{name}_token_id": id for field, name in _IDS.items()
                 if (id := tokenizer.named_id(field)) is not None}
    for name, text in tokenizer.templates.items():
        metadata["tokenizer.chat_template" + ("" if name == "default" else f".{name}")] = text
    _prove_round_trip(tokenizer, metadata)
    return metadata


def _named(tokenizer: Tokenizer) -> dict[str, Any]:
    """model and pre: the names under which a reader finds how this tokenizer splits."""
    model = tokenizer.document["model"]
    normalizer, split = tokenizer.document.get("normalizer"), tokenizer.document.get("pre_tokenizer")
    for prefix in (True, False):
        if model.get("byte_fallback") and normalizer == _metaspace(prefix) and split is None:
            return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default",
                    "tokenizer.ggml.add_space_prefix": prefix}
    wanted = (_plain(split), normalizer, bool(model.get("ignore_merges")))
    for name, scheme in SPLIT_SCHEMES.items():
        if wanted == (_plain(scheme.pre_tokenizer), scheme.normalizer, scheme.ignore_merges):
            return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name}
    raise UsageError(f"GGUF only names how text is split, and we know no name for pre_tokenizer {split} "
                     f"with normalizer {normalizer}; known: {', '.join(SPLIT_SCHEMES)}")


def _plain(pre_tokenizer: Any) -> Any:
    """Pre-tokenizer without what changes offsets and not ids."""
    if not isinstance(pre_tokenizer, Mapping):
        return pre_tokenizer
    steps = pre_tokenizer.get("pretokenizers")
    if steps is not None:
        return [_plain(step) for step in steps]
    return {key: value for key, value in pre_tokenizer.items() if key != "trim_offsets"}


def _refuse_trimming(tokenizer: Tokenizer) -> None:
    for token in tokenizer.document["added_tokens"]:
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if token[flag]]
        if flags:
            raise UsageError(f"token {token['content']!r} has {flags[0]}, which GGUF cannot say")


def _vocabulary(tokenizer: Tokenizer, vocab: int) -> dict[str, Any]:
    document = tokenizer.document
    merges = document["model"]["merges"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": [tokenizer.tokens.get(id, f"[PAD{id}]") for id in range(vocab)],
        "tokenizer.ggml.token_type": [int(_kind(tokenizer, id)) for id in range(vocab)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    if document["model"].get("byte_fallback"):  # llama.cpp merges by score, best first
        ranks: dict[str, int] = {}
        for rank, (left, right) in enumerate(merges):
            ranks.setdefault(left + right, rank)
        tokens = metadata["tokenizer.ggml.tokens"]
        metadata["tokenizer.ggml.scores"] = [float(-ranks.get(token, len(merges))) for token in tokens]
        if any(" " in part for pair in merges for part in pair):  # Gemma's runs of spaces: the blank between two tokens says nothing
            del metadata["tokenizer.ggml.merges"]
    return metadata


def _kind(tokenizer: Tokenizer, id: int) -> TokenType:
    token, model = tokenizer.tokens.get(id), tokenizer.document["model"]
    if token is None:
        return TokenType.UNUSED
    if token == model.get("unk_token"):
        return TokenType.UNKNOWN
    if id in tokenizer.special_ids:
        return TokenType.CONTROL
    if id in tokenizer.added_ids:
        return TokenType.USER_DEFINED
    is_byte = model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x")
    return TokenType.BYTE if is_byte else TokenType.NORMAL


def _around(tokenizer: Tokenizer) -> dict[str, bool]:
    plain, whole = tokenizer.encode("a"), tokenizer.encode("a", special=True)
    for bos in (False, True):
        for eos in (False, True):
            if whole == [tokenizer.bos] * bos + plain + [tokenizer.eos] * eos:
                return {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    raise UsageError(f"the tokenizer puts {whole} around {plain}; GGUF can only say BOS before and EOS after")


def _prove_round_trip(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    again = tokenizer_from_gguf(metadata, "GGUF export")
    for text in HARD:
        for special in (False, True):
            ours, theirs = tokenizer.encode(text, special), again.encode(text, special)
            if ours != theirs:
                raise UsageError(f"GGUF cannot hold this tokenizer: {text!r} is {ours} here, {theirs} when read back")

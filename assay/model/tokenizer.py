"""Tokenizer: text to ids and back, over the `tokenizers` library.

tokenizer.json is the tokenizer, tokenizer_config.json names its special tokens; no class and no code rebuilds either.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from assay.errors import ArtifactError, DataError, UsageError
from assay.model import chat_template
from assay.strict_json import parse_json, read_small_file

_SENTENCEPIECE = "tokenizer.model"
_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "chat_template.jinja")
_NAMED_TEMPLATES = "additional_chat_templates"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """`settings` are tokenizer_config.json's fields, `templates` the chat templates by name ("default" is used)."""

    def __init__(self, document: Mapping[str, Any], settings: Mapping[str, Any], templates: Mapping[str, str],
                 conflicts: Iterable[str] = ()):
        _refuse_odd_templates(templates)
        self.document = _canonical(document)
        self.settings, self.templates, self.conflicts = dict(settings), dict(templates), tuple(conflicts)
        self.backend = _backend(self._written)
        self.ids: dict[str, int] = self.backend.get_vocab()
        self.tokens = {id: token for token, id in self.ids.items()}
        self.size = max(self.tokens, default=-1) + 1
        self._refuse_unknown_tokens()
        named = {self.ids[content] for content in _named_tokens(self.settings).values()}
        added = {token["id"] for token in self.document["added_tokens"] if token["special"]}
        self.special_ids = frozenset(named | added)

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Tokenizer":
        """Tokenizer of a folder: reads tokenizer.json (SentencePiece's tokenizer.model where there is none), tokenizer_config.json,
        special_tokens_map.json and the chat templates beside them.

        A vocabulary takes a second to parse, and a run or a proof meets the same one in many folders: the same bytes are the same object.
        """
        folder = Path(folder)
        if folder.is_file():
            raise UsageError(f"{folder}: a file; expected the folder that holds tokenizer.json")
        vocabulary = "tokenizer.json" if os.path.lexists(folder / "tokenizer.json") else _SENTENCEPIECE
        names = sorted(name for name in (vocabulary, *_FILES, *_named_template_files(folder)) if os.path.lexists(folder / name))
        return _tokenizer_of(_TokenizerFiles(folder, tuple((name, read_small_file(folder / name)) for name in names)))

    @classmethod
    def from_parts(cls, tokenizer_json: str | bytes | Mapping[str, Any], chat_template: str | None = None,
                   **settings: Any) -> "Tokenizer":
        """Tokenizer from a tokenizer.json and named tokens: `from_parts(text, eos_token="</s>")`."""
        document = tokenizer_json if isinstance(tokenizer_json, Mapping) else parse_json(tokenizer_json, where="tokenizer.json", shape=dict)
        return cls(document, settings, {} if chat_template is None else {"default": chat_template})

    # ---------------------------------------------------------------- text and ids

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Special tokens in the text are recognised; `special` adds those that the tokenizer puts around a text (BOS).

        A rendered chat template has its own: encode it without, or it begins twice.
        """
        return self.backend.encode(_text(text), add_special_tokens=special).ids

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[list[int]]:
        """Encode many texts as `encode` does, on all cores."""
        encodings = self.backend.encode_batch_fast([_text(text) for text in texts], add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, the characters of `text` behind each): nothing trimmed, so a token that holds a space says so."""
        encoding = self._untrimmed.encode(_text(text), add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encodings(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """Encodings of many texts with offsets, on all cores: which characters are behind a token, which token is behind a character."""
        return self._untrimmed.encode_batch([_text(text) for text in texts], add_special_tokens=False)

    def decode(self, ids: Iterable[int], special: bool = True) -> str:
        """`special` keeps special tokens in the text. An id without a token stands out as ⟨id⟩; it is never dropped."""
        parts: list[str] = []
        run: list[int] = []
        ids = list(ids)
        if self.tokens.keys() >= set(ids):
            return self.backend.decode(ids, skip_special_tokens=not special)
        for id in ids:
            if id in self.tokens:
                run.append(id)
                continue
            parts += [self.backend.decode(run, skip_special_tokens=not special), self.piece(id)]
            run = []
        return "".join([*parts, self.backend.decode(run, skip_special_tokens=not special)])

    def piece(self, id: int) -> str:
        """One token for display: its text, or its bytes as \\x.. where they are no whole character."""
        token = self.tokens.get(id)
        if token is None:
            return f"⟨{id}⟩"
        data = self.bytes_of(id)
        return token.replace("▁", " ") if data is None else data.decode("utf-8", "backslashreplace")

    def bytes_of(self, id: int) -> bytes | None:
        """A token's own bytes, be they part of a character; None where the tokenizer does not say."""
        token = self.tokens.get(id)
        if token is not None and (id in self.special_ids or id in self.added_ids):
            return token.encode()
        if token is not None and self._byte_level and all(char in BYTE_OF for char in token):
            return bytes(BYTE_OF[char] for char in token)
        return None

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = False, **variables: Any) -> str:
        """The conversation through the model's own chat template."""
        return chat_template.render_template(self._own_template(), messages, tools=tools, add_generation_prompt=add_generation_prompt,
                                             **(self._named_texts() | variables))

    def render_batch(self, chats: Sequence[chat_template.Chat]) -> list[str | None]:
        """Render many chats as `render` does; None where `render` raises an error."""
        return chat_template.render_templates(self._own_template(), chats, **self._named_texts())

    def _own_template(self) -> str:
        if self.template is None:
            raise UsageError("this tokenizer has no chat template; give text, or add chat_template.jinja to its folder")
        return self.template

    def _named_texts(self) -> dict[str, str]:
        return {name: content for name in _NAMED if (content := _content(self.settings.get(name))) is not None}

    # ---------------------------------------------------------------- what it is

    @property
    def bos(self) -> int | None:
        return self.named_id("bos_token")

    @property
    def eos(self) -> int | None:
        return self.named_id("eos_token")

    @property
    def pad(self) -> int | None:
        return self.named_id("pad_token")

    @property
    def template(self) -> str | None:
        return self.templates.get("default")

    @cached_property
    def digest(self) -> str:
        """sha256 of tokenizer.json as `files` writes it: equal digests give equal ids."""
        return hashlib.sha256(self._written).hexdigest()

    @cached_property
    def _written(self) -> bytes:
        return _dumps(self.document)

    @cached_property
    def template_digest(self) -> str | None:
        return hashlib.sha256(_dumps(self.templates)).hexdigest() if self.templates else None

    def files(self) -> dict[str, bytes]:
        """Files that a checkpoint folder needs for transformers to load this tokenizer and give the same ids.

        The class is always PreTrainedTokenizerFast: transformers 5 lets a model's own class rebuild the tokenizer from
        the vocabulary alone, which drops what that class does not expect (SmolLM2's digit split, for one).
        """
        settings = self.settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
        files = {"tokenizer.json": self._written, "tokenizer_config.json": _dumps(settings, indent=2)}
        for name, text in self.templates.items():
            path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            files[path] = text.encode()
        return files

    def named_id(self, name: str) -> int | None:
        content = _content(self.settings.get(name))
        return None if content is None else self.ids[content]

    @cached_property
    def added_ids(self) -> frozenset[int]:
        return frozenset(token["id"] for token in self.document["added_tokens"])

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(self.document.get("decoder"))

    @cached_property
    def _untrimmed(self) -> tokenizers.Tokenizer:
        return _backend(_dumps(self.document | {"post_processor": None}))

    def _refuse_unknown_tokens(self) -> None:
        """transformers would add what it does not find, and so shift ids; we refuse."""
        for name, content in _named_tokens(self.settings).items():
            if content not in self.ids:
                raise ArtifactError(f"tokenizer_config.json: {name} {content!r} is not in tokenizer.json; "
                                    "add it there or correct the name")
        for id, token in (self.settings.get("added_tokens_decoder") or {}).items():
            found = self.ids.get(_content(token) or "")
            if str(found) != str(id):
                raise ArtifactError(f"tokenizer_config.json: added_tokens_decoder gives {_content(token)!r} "
                                    f"the id {id}, tokenizer.json {found}; they must agree")


def equal_but_for_blanks(one: str, two: str) -> bool:
    """Whether two texts have the same characters; blanks do not count, since SentencePiece's decoder writes one after a special token."""
    return "".join(one.split()) == "".join(two.split())

# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class _TokenizerFiles:
    """Files of a tokenizer: equal where the bytes are, wherever they lie."""

    folder: Path = field(compare=False)
    contents: tuple[tuple[str, bytes], ...]

    def object(self, name: str) -> dict[str, Any] | None:
        """JSON object in a file; None where there is no such file."""
        data = dict(self.contents).get(name)
        return None if data is None else parse_json(data, where=str(self.folder / name), shape=dict)

    def text(self, name: str) -> str | None:
        try:
            return None if (data := dict(self.contents).get(name)) is None else data.decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{self.folder / name}: not UTF-8 at byte {error.start}") from None


@functools.lru_cache(maxsize=4)
def _tokenizer_of(files: _TokenizerFiles) -> Tokenizer:
    settings, document = files.object("tokenizer_config.json") or {}, files.object("tokenizer.json")
    if (model := dict(files.contents).get(_SENTENCEPIECE)) is not None:
        from assay.model.sentencepiece_model import sentencepiece_document  # which imports what stands here

        document, named = sentencepiece_document(model, str(files.folder / _SENTENCEPIECE), settings)
        settings = {"clean_up_tokenization_spaces": False} | named | settings
    if document is None:
        raise UsageError(f"{files.folder}: no tokenizer.json; transformers makes one: "
                         "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)")
    _refuse_code(settings, files.folder / "tokenizer_config.json")
    older = files.object("special_tokens_map.json") or {}
    conflicts = [f"special_tokens_map.json says {name} is {_content(older[name])!r}, tokenizer_config.json "
                 f"{_content(settings[name])!r}" for name in _NAMED
                 if name in older and name in settings and _content(older[name]) != _content(settings[name])]
    merged = {name: older[name] for name in _NAMED if name in older} | settings
    return Tokenizer(document, merged, _read_templates(files, merged.pop("chat_template", None)), conflicts)


def _named_template_files(folder: Path) -> list[str]:
    return [f"{_NAMED_TEMPLATES}/{path.name}" for path in (folder / _NAMED_TEMPLATES).glob("*.jinja")]


def _read_templates(files: _TokenizerFiles, inline: Any) -> dict[str, str]:
    """chat_template.jinja, chat_template.json or the field of tokenizer_config.json: the first that is there."""
    beside, folder = files.object("chat_template.json"), files.folder
    inline = beside.get("chat_template") if beside else inline
    inline = text if (text := files.text("chat_template.jinja")) is not None else inline
    inline = [{"name": "default", "template": inline}] if isinstance(inline, str) else inline or ()
    try:
        entries = [(entry["name"], entry["template"]) for entry in inline]
    except (TypeError, KeyError):
        raise ArtifactError(f"{folder}: chat_template is neither text nor a list of named templates") from None
    entries += [(Path(name).stem, files.text(name)) for name, _ in files.contents if name.startswith(_NAMED_TEMPLATES)]
    return dict(entries)


def _refuse_odd_templates(templates: Mapping[Any, Any]) -> None:
    """A template's name becomes a file's."""
    for name, text in templates.items():
        if not isinstance(text, str) or not re.fullmatch(r"\w[\w.-]*", str(name)):
            raise ArtifactError(f"chat template {name!r} is not text under a plain name")


def _refuse_code(settings: Mapping[str, Any], path: Path) -> None:
    for name in ("auto_map", "trust_remote_code"):
        if settings.get(name):
            raise UsageError(f"{path}: {name} {settings[name]!r} asks to run code from the folder, which Assay never "
                             "does; remove it if tokenizer.json alone is the tokenizer")


def _canonical(document: Mapping[str, Any]) -> dict[str, Any]:
    """Merges as pairs, and no truncation or padding: a length that someone once set must not cut our texts."""
    model, added = document.get("model"), document.get("added_tokens", [])
    if not isinstance(model, Mapping) or not isinstance(added, list):
        raise ArtifactError("tokenizer.json: no model, or added_tokens is not a list")
    if model.get("dropout"):
        raise ArtifactError(f"tokenizer.json: dropout {model['dropout']} makes ids random; set it to null")
    merges = model.get("merges")
    if merges is not None and not isinstance(merges, list):
        raise ArtifactError(f"tokenizer.json: merges is a {type(merges).__name__}, not a list")
    if merges:
        model = {**model, "merges": [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]}
    return {**document, "added_tokens": added, "model": model, "truncation": None, "padding": None}


def _backend(written: bytes) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(written.decode())
    except BaseException as error:  # the library raises nothing narrower, and for some files a Rust panic, no Exception at all
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ArtifactError(f"tokenizer.json: {error}") from None


def _dumps(value: Any, indent: int | None = None) -> bytes:
    separators = None if indent else (",", ":")
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, indent=indent, separators=separators).encode()
    except UnicodeEncodeError as error:
        raise ArtifactError(f"tokenizer files hold text that is no Unicode: {error}") from None


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Field of tokenizer_config.json → the token it names."""
    named = {name: settings.get(name) for name in _NAMED}
    for listed in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(listed) or ()
        entries = more.items() if isinstance(more, dict) else enumerate(more)
        named |= {f"{listed} {index}": token for index, token in entries}
    return {name: content for name, token in named.items() if (content := _content(token)) is not None}


def _content(token: Any) -> str | None:
    """A token is text, or an object whose `content` is."""
    content = token.get("content") if isinstance(token, Mapping) else token
    if content is not None and not isinstance(content, str):
        raise ArtifactError(f"tokenizer_config.json: {token!r} is no token")
    return content


def _text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"text cannot be encoded: it holds half a character (surrogate) at {error.start}") from None
    return text


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one character: itself where it is printable, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()

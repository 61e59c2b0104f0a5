"""Due texts: conversations read from the raw files and made tokens with weights, by transformers' template renderer where it is installed.

A turn's text is what the template writes with it, up to the first token that ends a turn; what is learned of it is what the template's
generation prompt does not already say. Written from docs/witness.md, not from the code that trains.
"""

import csv
import gzip
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Vocabulary

from assay.witness.due_rows import DueText, kept_contents

LAYOUT_COLUMNS = {"messages": ("messages", "tools"), "prompt-completion": ("prompt", "completion", "tools"), "text": ("text",),
           "alpaca": ("instruction", "output", "input", "system"), "sharegpt": ("conversations", "system"),
           "gsm8k": ("question", "answer"), "prompt": ("prompt", "tools")}
NEEDED = {"messages": ("messages",), "prompt-completion": ("prompt", "completion"), "text": ("text",),
          "alpaca": ("instruction", "output"), "sharegpt": ("conversations",), "gsm8k": ("question", "answer"), "prompt": ("prompt",)}
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "model": "assistant",
         "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool"}
PROBE = "\ue000witness\ue000"  # stands in a turn's place, to see what the template writes after it


class NotWitnessed(Exception):
    """The witness does not know this setting: its verdict is UNPROVEN, with this sentence."""


class Row:
    """A row of a file as a conversation: `messages` with the first that may be learned, and `plain` text where it has that."""

    def __init__(self, file: str, number: int, values: Mapping[str, Any], gsm8k: str):
        layouts = [name for name, needed in NEEDED.items() if all(values.get(column) is not None for column in needed)]
        if "prompt" in layouts and len(layouts) > 1:
            layouts.remove("prompt")
        if len(layouts) != 1:
            raise NotWitnessed(f"{file}: row {number} has the columns {', '.join(values)}, which the witness does not know")
        columns = {name: value for name, value in values.items() if name in LAYOUT_COLUMNS[layouts[0]] and value}
        self.content = hashlib.sha256(json.dumps(columns, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.name = f"{file}:{number}:{self.content}"
        self.messages, self.learned_from, self.plain, self.tools = [], 0, None, None
        getattr(self, "_" + layouts[0].replace("-", "_"))(values, gsm8k)

    messages: list[dict[str, Any]]
    plain: tuple[str, str] | None
    tools: list[Any] | None

    def _messages(self, values: Mapping[str, Any], _: str) -> None:
        self.tools = read_tools(values)
        self.messages = [plain_message(turn) for turn in values["messages"]]

    def _prompt_completion(self, values: Mapping[str, Any], _: str) -> None:
        if isinstance(values["prompt"], str):
            self.plain = values["prompt"], values["completion"]
        else:
            self.messages = [plain_message(turn) for turn in (*values["prompt"], *values["completion"])]
            self.learned_from, self.tools = len(values["prompt"]), read_tools(values)

    def _prompt(self, values: Mapping[str, Any], _: str) -> None:
        if isinstance(values["prompt"], str):
            self.plain = values["prompt"], ""
        else:
            self.messages = [plain_message(turn) for turn in values["prompt"]]
            self.learned_from, self.tools = len(self.messages), read_tools(values)

    def _text(self, values: Mapping[str, Any], _: str) -> None:
        self.plain = "", values["text"]

    def _alpaca(self, values: Mapping[str, Any], _: str) -> None:
        more = f"\n\n{values['input']}" if values.get("input") else ""
        self._asked(values["instruction"] + more, values["output"], values.get("system"))

    def _sharegpt(self, values: Mapping[str, Any], _: str) -> None:
        system = [{"role": "system", "content": values["system"]}] if values.get("system") else []
        self.messages = system + [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in values["conversations"]]

    def _gsm8k(self, values: Mapping[str, Any], gsm8k: str) -> None:
        answer = values["answer"]
        if gsm8k == "think":
            reasoning, _, result = answer.rpartition("\n#### ")
            answer = f"<think>{reasoning}</think><answer>{result.strip()}</answer>"
        self._asked(values["question"], answer, None)

    def _asked(self, question: str, answer: str, system: str | None) -> None:
        before = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": question}]
        self.messages, self.learned_from = [*before, {"role": "assistant", "content": answer}], len(before)
        self.plain = "".join(f"{turn['content']}\n" for turn in before), answer


def read_tools(values: Mapping[str, Any]) -> list[Any] | None:
    """Tools of a row: a list, or one as JSON text."""
    tools = values.get("tools")
    return (json.loads(tools) if isinstance(tools, str) else tools) or None


def plain_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {"content": "", **{name: value for name, value in turn.items() if value is not None}}


def file_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.is_dir():
        for inside in sorted(each for each in path.iterdir() if not each.name.startswith(".")):
            yield from file_rows(inside)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from (json.loads(line) for line in file if line.strip())
    elif path.suffix in (".csv", ".tsv"):
        with path.open(encoding="utf-8-sig", newline="") as table:
            yield from csv.DictReader(table, delimiter="\t" if path.suffix == ".tsv" else ",")
    elif path.suffix == ".parquet" and importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
    else:
        raise NotWitnessed(f"{path}: a file of this kind is not read here")


def named_sources(options: Mapping[str, Any]) -> list[tuple[str, Fraction | None]]:
    """The files of --data, each with its weight where it has one: PATH or PATH:WEIGHT. Copies of what URLs name come in their place."""
    found: list[tuple[str, Fraction | None]] = []
    for entry in options["data"]:
        weighted = re.fullmatch(r"(.+):([0-9]*\.?[0-9]+)", entry)
        path, weight = (entry, None) if weighted is None or Path(entry).exists() else (weighted[1], Fraction(weighted[2]))
        found.append((options.get("copies", {}).get(path, path), weight))
    return found


def training_rows(options: Mapping[str, Any]) -> list[Row]:
    """Training rows: all rows of all files but those that are held out."""
    rows = [Row(Path(file).name, number, values, options["gsm8k"]) for file, _ in named_sources(options)
            for number, values in enumerate(islice(file_rows(Path(file)), options.get("limit")), 1)]
    if options["held_out_data"] is not None:
        return rows
    kept = kept_contents([row.content for row in rows], options["held_out"], options["seed"])
    return [row for row in rows if row.content in kept]

# ---------------------------------------------------------------- rendering and masks


class Renderer:
    """The tokenizer and chat template of a model's folder, with what its files name as ends."""

    def __init__(self, folder: Path, options: Mapping[str, Any]):
        if not (folder / "tokenizer.json").is_file():
            raise NotWitnessed(f"{folder} holds no tokenizer.json")
        self.options, self.settings = options, read_fields(folder / "tokenizer_config.json")
        for name, token in read_fields(folder / "special_tokens_map.json").items():
            self.settings.setdefault(name, token)
        self.vocabulary = Vocabulary.from_file(str(folder / "tokenizer.json"))
        self.vocabulary.no_truncation()
        self.vocabulary.no_padding()
        document = json.loads(self.vocabulary.to_str())
        self.untrimmed = Vocabulary.from_str(json.dumps(document | {"post_processor": None}))  # whose offsets hold their spaces
        self.template, self.folder = read_template(folder, self.settings), folder
        self.eos = named(self.settings.get("eos_token"))
        others = [read_fields(folder / name).get("eos_token_id") for name in ("config.json", "generation_config.json")]
        ids = [id for ends in others for id in (ends if isinstance(ends, list) else [ends]) if id is not None]
        self.eos = self.eos or next((self.vocabulary.id_to_token(id) for id in ids), None)
        self.ends = {token for token in (self.eos, *map(self.vocabulary.id_to_token, ids), self._turn_end()) if token}

    def texts(self, row: Row) -> list[DueText]:
        """A row's texts as tokens, before any is dropped for its length."""
        if row.messages and self.template is not None:
            learned = [k for k, turn in enumerate(row.messages) if k >= row.learned_from and turn["role"] in self.options["roles"]]
            turns = [self.turn(row, k) for k in learned]
            if self.options["turns"] == "apart":
                return [self.tokens(f"{row.name}#{k}", text, [span], False) for k, (text, span) in zip(learned, turns, strict=True)]
            return [self.tokens(row.name, turns[-1][0], [span for _, span in turns], False)]
        if row.plain is None or self.eos is None:
            raise NotWitnessed(f"{row.name} has messages, and {self.folder} no template or no EOS")
        prompt, answer = row.plain
        text = prompt + answer + ("" if answer.endswith(self.eos) else self.eos)
        return [self.tokens(row.name, text, [(len(prompt), len(text))], True)]

    def turn(self, row: Row, k: int) -> tuple[str, tuple[int, int]]:
        """The text up to the end of turn k, and what of it is learned."""
        written = self.render(row.messages[:k + 1], row.tools)
        after = self.render([*row.messages[:k], {"role": row.messages[k]["role"], "content": PROBE}], row.tools).rpartition(PROBE)[2]
        ends = [after.find(end) + len(end) for end in self.ends if end in after]
        stop = len(written) - len(after) + min(ends, default=0)
        if row.messages[k]["role"] == "assistant":
            return written[:stop], (len(self.render(row.messages[:k], row.tools, prompt=True)), stop)
        said, body = row.messages[k]["content"], written[:len(written) - len(after)]
        return written[:stop], (len(body) - len(said if body.endswith(said) else said.strip()), stop)

    def tokens(self, name: str, text: str, spans: Sequence[tuple[int, int]], plain: bool) -> DueText:
        """Tokenised whole, where every span begins and ends between two tokens after the prompt's own ids; else in parts, cut there."""
        edges = [at for span in spans for at in span]
        whole = self.untrimmed.encode(text, add_special_tokens=False)
        bounds = {at: index for index, (at, _) in reversed(list(enumerate(whole.offsets)))} | {len(text): len(whole.ids)}
        before = self.ids(text[:edges[0]])
        if all(at in bounds for at in edges) and whole.ids[:bounds[edges[0]]] == before and self.seamless(whole.offsets, edges, len(text)):
            ids, places = whole.ids, [bounds[at] for at in edges]
        else:
            ids, places = [], []
            for start, stop in zip([0, *edges], edges, strict=False):
                ids += self.ids(text[start:stop])
                places.append(len(ids))
        begin = self.prefix() if plain else []
        if ids[:len(begin)] != begin:
            ids, places = begin + ids, [place + len(begin) for place in places]
        weights = [0.0] * len(ids)
        for start, stop in zip(places[::2], places[1::2], strict=True):
            weights[start:stop] = [1.0] * (stop - start)
        weights[0] = 0.0  # nothing predicts it
        return DueText(name, list(ids), weights)

    @staticmethod
    def seamless(offsets: Sequence[tuple[int, int]], edges: Sequence[int], end: int) -> bool:
        return all(at == end or not any(start < at < stop for start, stop in offsets) for at in edges)

    def ids(self, text: str) -> list[int]:
        return self.vocabulary.encode(text, add_special_tokens=False).ids

    def prefix(self) -> list[int]:
        """Token ids that the tokenizer puts before a plain text."""
        around, alone = self.vocabulary.encode("a", add_special_tokens=True).ids, self.ids("a")
        return next((around[:i] for i in range(len(around)) if around[i:i + len(alone)] == alone), [])

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
        assert self.template is not None
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
        tokens: dict[str, Any] = {name: token for name in names if (token := named(self.settings.get(name)))}
        if importlib.util.find_spec("transformers"):
            from transformers.utils.chat_template_utils import render_jinja_template

            found: Any = render_jinja_template([[dict(turn) for turn in messages]], tools=tools, chat_template=self.template,
                                               add_generation_prompt=prompt, **tokens)
            return found[0][0]
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        sandbox.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
        return sandbox.from_string(self.template).render(messages=messages, tools=tools, add_generation_prompt=prompt, **tokens)

    def _turn_end(self) -> str | None:
        """The first special token that the template writes after an assistant's words."""
        if self.template is None:
            return None
        after = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]).partition(PROBE)[2]
        special = {token.content for token in self.vocabulary.get_added_tokens_decoder().values() if token.special}
        return next((token for id in self.ids(after) if (token := self.vocabulary.id_to_token(id)) in special), None)


def fitted(text: DueText, length: int, too_long: str) -> DueText | None:
    """Text within `length` tokens: dropped, or cut where something that is learned is left."""
    if len(text.tokens) <= length:
        return text
    if too_long == "drop" or not any(text.weights[:length]):
        return None
    return DueText(text.name, text.tokens[:length], text.weights[:length])


def texts_to_learn(folder: Path, options: Mapping[str, Any]) -> list[DueText]:
    """Texts that the options say are learned from, in the order of the files."""
    renderer = Renderer(folder, options)
    rendered = [text for row in training_rows(options) for text in renderer.texts(row)]
    return [kept for text in rendered if (kept := fitted(text, options["max_length"], options["too_long"])) is not None]


def read_fields(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, chat_template.json or the field of tokenizer_config.json: the first that is there."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    found = read_fields(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    return {entry["name"]: entry["template"] for entry in found}.get("default") if isinstance(found, list) else found


def named(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token

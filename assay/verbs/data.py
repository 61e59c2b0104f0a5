"""assay data: check conversations token by token, as they will be trained on; look at rows, mix, split, deduplicate or make them."""

import json
import re
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from assay.config import argument, option
from assay.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from assay.data.chat import Rendered, TrainingExample
    from assay.data.layouts import ConversationFile
    from assay.model.tokenizer import Tokenizer
    from assay.store.artifact import Artifact
    from assay.verdict import Verdict

_ROW_SHOWN = 300  # characters
AROUND = 160  # tokens shown before and after the first supervised one


@dataclass(frozen=True)
class FLAGS:
    """check: render conversations with a model's own template, show which tokens are supervised, and audit every row.

    look: show columns, layout, lengths and duplicates of any rows. mix: take rows of several files in exact shares. split: hold out
    rows by a hash of their content. dedup: remove duplicates and near duplicates. gym: write rows for `assay grpo --reward gym` from
    a dataset of reasoning-gym.
    """

    action: Literal["check", "look", "mix", "split", "dedup", "gym"] = argument("action: check, look, mix, split, dedup or gym")
    file: str = argument("rows: .jsonl, .jsonl.gz, .parquet or .csv, a folder or URL of these, or hf://OWNER/NAME[CONFIG][SPLIT]; with "
                         "check their columns are messages; prompt and completion; text; or Alpaca's, ShareGPT's or GSM8K's; with mix: "
                         "FILE:WEIGHT; with gym: a dataset's name, such as chain_sum")
    more: tuple[str, ...] = argument("with mix and dedup: more files", default=())
    model: str | None = option("with check, required there: checkpoint, folder, adapter, GGUF file or fetched name whose template and "
                               "tokenizer are used", group="model", default=None)
    n: int | None = option("with gym: number of problems; with mix: number of rows", group="data", least=1, default=None,
                           default_text="1000 problems; with mix until a file has been read --epochs times")
    seed: int = option("with gym, mix and split: random seed", group="data", default=0)
    out: str | None = option("with gym, mix and dedup, required there: the .jsonl file to write; with split: a folder for train.jsonl and "
                             "held-out.jsonl", group="run", metavar="FILE", default=None)
    limit: int | None = option("with check and look: read only the first N rows", group="data", least=1, default=None,
                               default_text="all")
    epochs: int = option("with mix: how many times a file may be read", group="data", least=1, default=1)
    share: float = option("with split: share of the distinct rows to hold out", group="data", above=0, below=1, default=0.05)
    how: Literal["minhash", "exact"] = option("with dedup: remove near duplicates too (minhash), or only equal rows (exact)",
                                              group="method",
                                              default="minhash")
    threshold: float = option("with dedup: Jaccard similarity of the rows' 5-word shingles from which a row counts as a near duplicate",
                              group="method", above=0, most=1, default=0.8)
    field: str | None = option("with dedup: column to compare", group="data", default=None, default_text="all of a row")
    workers: int = option("with dedup: number of processes; 0: one per core", group="run", least=0, default=0)
    show: int = option("with check: number of rows to show as tokens", group="run", least=0, default=3)
    roles: tuple[str, ...] = option("with check: roles whose messages are trained on", group="data", metavar="ROLE", default=("assistant",))
    max_length: int | None = option("with check: the most tokens of a row", group="data", least=1, default=None,
                                    default_text="the model's own")
    too_long: Literal["drop", "truncate", "error"] = option("with check: what to do with longer rows", group="data", default="drop")
    turns: Literal["together", "apart"] = option("with check: one example for each conversation (together), or one for each trained turn "
                                                 "(apart)",
                                                 group="data", default="together")
    layout: str | None = option("with check: layout of the rows, where their columns allow two", group="data", default=None,
                                default_text="recognised by the columns")
    gsm8k: Literal["plain", "think"] = option("with check: GSM8K answers as they are (plain), or in <think> and <answer> tags (think)",
                                              group="data",
                                              default="plain")
    new_tokens: tuple[str, ...] = option("with check: tokens to add to the vocabulary", group="model", metavar="TEXT", default=())
    held_out: str | None = option("with check: evaluation rows, none of which may be trained on", group="data",
                                  metavar="FILE", default=None)
    base: str | None = option("base of an adapter that does not name its base", group="model", metavar="MODEL", default=None)
    json: bool = option("print JSON", group="run", default=False)


EXAMPLES = """  assay data check train.jsonl --model smollm2-135m
  assay data check train.jsonl --model smollm2-135m --gsm8k think --new-tokens '<think>' '</think>' '<answer>' '</answer>' \\
      --held-out test.jsonl --max-length 1024
  assay data look hf://openai/gsm8k[main][train]
  assay data mix chats.jsonl:0.7 code.jsonl:0.3 --n 10000 --out mixed.jsonl
  assay data split rows.jsonl --share 0.1 --out parts
  assay data dedup crawl.jsonl --out clean.jsonl
  assay data gym chain_sum --n 2000 --out sums.jsonl && assay grpo --model runs/sft/model --data sums.jsonl --reward gym:1 --out runs/a"""


def run(flags: FLAGS) -> int:
    if flags.more and flags.action not in ("mix", "dedup"):
        raise UsageError(f"assay data {flags.action}: takes one file; found {flags.file} and {', '.join(flags.more)}")
    refuse_options_without_effect(flags)
    acts = {"gym": write_gym_problems, "look": look_at_file, "mix": mix_files, "split": split_file, "dedup": deduplicate_files,
            "check": check_conversations}
    return acts[flags.action](flags)


def refuse_options_without_effect(flags: FLAGS) -> None:
    """Refuse an option whose help names other actions ("with mix: …") than the one that is asked for: it would change nothing, silently."""
    for each in (each for each in fields(FLAGS) if each.name not in ("action", "file", "more")):
        named = re.findall(r"(?:^|; )with ([a-z, ]+?)(?:, required there)?:", each.metadata["help"])
        actions = [action for names in named for action in re.split(", | and ", names)]
        if actions and flags.action not in actions and getattr(flags, each.name) != each.default:
            raise UsageError(f"assay data {flags.action}: --{each.name.replace('_', '-')} is for {' and '.join(actions)} alone; leave it "
                             "out")


def look_at_file(flags: FLAGS) -> int:
    from assay.data.row_files import look_at_rows

    found = look_at_rows(flags.file, flags.limit)
    if flags.json:
        print(json.dumps(found, ensure_ascii=False, indent=1, default=str))
        return 0
    sizes = found["row_bytes"]
    print(f"{found['file']}: {found['rows']:,} rows, {found['bytes']:,} bytes of JSON; a row has {sizes['least']:,} to {sizes['most']:,}, "
          f"half have at most {sizes['median']:,}, 95 % at most {sizes['p95']:,}; {found['copies']:,} are copies of others")
    print("layout: " + ", ".join(f"{name} ({count:,} rows)" for name, count in found["layouts"].items()))
    for name, column in found["columns"].items():
        print(f"  {name}: {', '.join(f'{kind} {count:,}' for kind, count in column['kinds'].items())}")
    for row in found["first"]:
        print(printable(json.dumps(row, ensure_ascii=False, default=str))[:_ROW_SHOWN])
    return 0


def printable(text: str) -> str:
    """Printable text: no control character of the data reaches the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text)


def required_out(flags: FLAGS) -> str:
    if flags.out is None:
        raise UsageError(f"assay data {flags.action}: say where to write: --out")
    return flags.out


def mix_files(flags: FLAGS) -> int:
    from assay.data.mixture import weighted_sources
    from assay.data.row_files import mix_rows
    from assay.guard.row_file_checks import check_mixed

    sources = weighted_sources((flags.file, *flags.more), "assay data mix")
    if sources[0].weight is None:
        raise UsageError("assay data mix: give every file a weight, as in a.jsonl:0.7 b.jsonl:0.3")
    found = mix_rows(sources, required_out(flags), rows=flags.n, epochs=flags.epochs, seed=flags.seed)
    words = [f"{found['file']}: {found['rows']:,} rows, sha256 {found['sha256'][:12]}"
             + (f"; it ends where {found['ran_out']} had been read {flags.epochs} time(s)" if found["ran_out"] else "")]
    words += [f"  {name}: {source['rows']:,} rows, {source['share']:.2%} (asked for {source['asked']:.2%}), "
              f"read {source['times_read']:.2f} times" for name, source in found["sources"].items()]
    return concluded(flags, found, words, [check_mixed(sources, found, rows=flags.n, epochs=flags.epochs)], [found["file"]])


def split_file(flags: FLAGS) -> int:
    from assay.data.row_files import split_rows
    from assay.guard.row_file_checks import check_split

    found = split_rows(flags.file, required_out(flags), held_out=flags.share, seed=flags.seed)
    files = [found[side]["file"] for side in ("train", "held-out")]
    words = [f"{found[side]['file']}: {found[side]['rows']:,} rows" for side in ("train", "held-out")]
    words.append(f"{found['copies']:,} rows are copies of others, and stand on the side of these; {found['near']:,} of the held-out rows "
                 "are near copies of rows to learn" + (": assay data dedup leaves these out" if found["near"] else ""))
    return concluded(flags, found, words, [check_split(flags.file, found, held_out=flags.share)], files)


def deduplicate_files(flags: FLAGS) -> int:
    import os

    from assay.data.row_files import deduplicate
    from assay.guard.row_file_checks import check_deduplicated

    names, threshold = (flags.file, *flags.more), None if flags.how == "exact" else flags.threshold
    found = deduplicate(names, required_out(flags), threshold=threshold, field=flags.field, workers=flags.workers or os.cpu_count() or 1)
    near = "" if flags.how == "exact" else f" and {found['near']:,} near copies (at least {flags.threshold:g} of five-word runs in common)"
    words = [f"{found['file']}: {found['kept']:,} of {found['rows']:,} rows; left out are {found['exact']:,} copies{near}"]
    words += [f"  row {row:,} repeats row {first:,}" for row, first in found["pairs"]]
    return concluded(flags, found, words, [check_deduplicated(names, found, threshold=threshold, field=flags.field)], [found["file"]])


def concluded(flags: FLAGS, found: dict[str, Any], words: list[str], counted: "list[Verdict]", files: list[str]) -> int:
    """Print what was made and what a recount says of it. Files that it refutes get another name, which nobody takes for rows."""
    from pathlib import Path

    from assay.guard.row_file_checks import check_known_rows
    from assay.verdict import Outcome, overall

    verdicts = [check_known_rows(flags.action), *counted]
    print(json.dumps(found | {"verdicts": [verdict.to_json() for verdict in verdicts]}, indent=1) if flags.json else
          "\n".join([*words, *map(str, verdicts)]))
    if overall(verdicts) is not Outcome.REFUTED:
        return 0
    for file in files:
        Path(file).rename(f"{file}.refuted")
    print(f"refuted; kept under another name: {', '.join(f'{file}.refuted' for file in files)}", file=sys.stderr)
    return 3


def write_gym_problems(flags: FLAGS) -> int:
    """Problems of reasoning-gym, whole or not at all."""
    from pathlib import Path

    from assay.reward.gym import gym_problems
    from assay.store.durable import replace_file

    if flags.out is None:
        raise UsageError("assay data gym: give --out FILE.jsonl")
    if Path(flags.out).exists():
        raise UsageError(f"{flags.out} is there already; remove it, or give another --out")
    rows = gym_problems(flags.file, flags.n or 1000, seed=flags.seed)
    replace_file(Path(flags.out), "".join(json.dumps(row) + "\n" for row in rows).encode())
    print(json.dumps({"file": flags.out, "rows": len(rows), "first": rows[0]}, indent=1) if flags.json else
          f"{flags.out}: {len(rows):,} problems of {flags.file}; the first:\n{rows[0]['prompt']}\nits answer: {rows[0]['answer']}")
    return 0


def check_conversations(flags: FLAGS) -> int:
    from assay.data.layouts import read_conversations
    from assay.store.artifact import open_artifact
    from assay.verdict import Outcome, overall

    if flags.model is None:
        raise UsageError("assay data check: give --model, whose template and tokenizer say what is learned")
    artifact = open_artifact(flags.model, base=flags.base)
    conversations = read_conversations(flags.file, layout=flags.layout, gsm8k=flags.gsm8k, limit=flags.limit)
    tokenizer, rendered, verdicts = render_and_audit(flags, artifact, conversations)
    if flags.json:
        rows = [as_json(example, tokenizer) for example in rendered.examples[: flags.show]]
        print(json.dumps({"file": flags.file, "layout": conversations.layout, "ignored": conversations.ignored, "counts": rendered.counts,
                          "rows": rows, "verdicts": [verdict.to_json() for verdict in verdicts]}, indent=1))
    else:
        print_check(conversations, rendered, tokenizer, verdicts, flags.show)
    return 3 if overall(verdicts) is Outcome.REFUTED else 0


def render_and_audit(flags: FLAGS, artifact: "Artifact", conversations: "ConversationFile") -> "tuple[Tokenizer, Rendered, list[Verdict]]":
    from assay.data.chat import render_conversations
    from assay.data.layouts import read_conversations
    from assay.guard.example_audit import audit_examples, conversation_prompts
    from assay.model.resize_embeddings import resize_embeddings, with_new_tokens

    if artifact.tokenizer is None:
        raise UsageError(f"{artifact.path}: there is no tokenizer here, so text means nothing to it; add tokenizer.json")
    tokenizer = with_new_tokens(artifact.tokenizer, flags.new_tokens) if flags.new_tokens else artifact.tokenizer
    tensors = artifact.tensors | (artifact.patch.replaced if artifact.patch else {})
    embed = resize_embeddings(artifact.config, tensors, artifact.tokenizer, tokenizer).tensors["embed.weight"]
    options: dict[str, Any] = {"length": flags.max_length or artifact.config.max_length, "over": flags.too_long, "roles": flags.roles,
                               "turns": flags.turns}
    rendered = render_conversations(conversations.rows, tokenizer, artifact.stops, **options)
    held_out = read_conversations(flags.held_out, gsm8k=flags.gsm8k).rows if flags.held_out else ()
    verdicts = audit_examples(rendered.examples, tokenizer, artifact.stops, embed=embed, trainable=(), length=options["length"],
                     held_out=render_conversations(held_out, tokenizer, artifact.stops, **options).examples if held_out else None,
                     evaluation=conversation_prompts(held_out))
    return tokenizer, rendered, verdicts


def print_check(conversations: "ConversationFile", rendered: "Rendered", tokenizer: "Tokenizer", verdicts: "list[Verdict]",
                show: int) -> None:
    from rich.console import Console

    from assay.data.chat import unread_in_words

    console = Console(highlight=False, soft_wrap=True)
    coloured = console.is_terminal and sys.stdout.isatty()
    print(f"{conversations.path}: {len(conversations.rows):,} rows, layout {conversations.layout}")
    if conversations.ignored:
        print("columns left alone: " + ", ".join(f"{name} ({count:,} rows)" for name, count in conversations.ignored.items()))
    for example in rendered.examples[:show]:
        supervised = int((example.weight != 0).sum())
        print(f"\n{example.id}: {len(example)} tokens, {supervised} supervised" + ("" if coloured else " «so»"))
        if coloured:
            console.print(coloured_text(example, tokenizer))
        else:
            print(marked_text(example, tokenizer))
    counts = rendered.counts
    dropped = "; ".join(f"{count:,} {reason}" for reason, count in counts["dropped"].items()) or "0"
    print(f"\nkept {counts['kept']:,}, truncated {counts['truncated']:,}, dropped {dropped}, tokenised in parts {counts['seams']:,}")
    for line in unread_in_words(counts["unread"]):
        print(line)
    print("\n".join(map(str, verdicts)))


def marked_text(example: "TrainingExample", tokenizer: "Tokenizer") -> str:
    """Tokens apart by |, what is supervised within « and », its weight after it where that is not 1."""
    parts, before = [], 0.0
    for token, weight, gap in tokens_around_start(example):
        if weight != before:
            parts.append(_closed(before) + ("«" if weight else ""))
        parts.append((f" … {gap} tokens … " if gap else "") + _piece(tokenizer, token) + "|")
        before = weight
    return "".join([*parts, _closed(before)])


def coloured_text(example: "TrainingExample", tokenizer: "Tokenizer") -> Any:
    """Training example as coloured text for a terminal: supervised tokens on green in two shades, context dim, special tokens bold."""
    from rich.text import Text

    text = Text()
    for number, (token, weight, gap) in enumerate(tokens_around_start(example)):
        if gap:
            text.append(f" … {gap} tokens … ", "dim italic")
        ground = f"black on {('green3', 'pale_green3')[number % 2]}" if weight else "dim"
        text.append(_piece(tokenizer, token), f"{ground} bold" if token in tokenizer.special_ids else ground)
        if weight not in (0, 1):
            text.append(f"×{weight:g}", "red")
    return text


def tokens_around_start(example: "TrainingExample") -> "Iterator[tuple[int, float, int]]":
    """(token, weight, tokens left out before it), around the place where learning begins."""
    first, last = max(0, example.prompt - AROUND), min(len(example), example.prompt + AROUND)
    for place in range(first, last):
        yield int(example.tokens[place]), float(example.weight[place]), first if place == first else 0


def as_json(example: "TrainingExample", tokenizer: "Tokenizer") -> dict[str, Any]:
    ids = example.tokens.tolist()
    return {"id": example.id, "prompt": example.prompt, "cut": example.cut, "intended": list(example.intended), "ids": ids,
            "weight": example.weight.tolist(), "tokens": [tokenizer.piece(token) for token in ids]}


def _closed(weight: float) -> str:
    return "" if not weight else "»" if weight == 1 else f"»×{weight:g}"


def _piece(tokenizer: "Tokenizer", token: int) -> str:
    """Printable piece of a token: no control character of the data reaches the terminal."""
    text = tokenizer.piece(token).replace("\n", "⏎")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

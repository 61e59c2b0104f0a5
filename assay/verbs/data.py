"""assay data: check conversations token by token, as they will be trained on; or make problems with reasoning-gym."""

import json
import sys
from dataclasses import dataclass
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

AROUND = 160  # tokens shown before and after the first supervised one


@dataclass(frozen=True)
class FLAGS:
    """check: render conversations with a model's own template, show what is supervised, and audit every row.

    gym: make rows for `assay grpo --reward gym` from a dataset of reasoning-gym.
    """

    action: Literal["check", "gym"] = argument("what to do: check or gym")
    file: str = argument(".jsonl, .jsonl.gz, .parquet or .csv with messages, prompt and completion, text, or Alpaca, ShareGPT, GSM8K rows; "
                         "for gym: a dataset's name, as in chain_sum")
    model: str | None = option("with check: checkpoint, folder, adapter, GGUF file or fetched name whose template and tokenizer are used; "
                               "required there", group="model", default=None)
    n: int = option("with gym: how many problems", group="data", least=1, default=1000)
    seed: int = option("with gym: seed that the problems are made from", group="data", default=0)
    out: str | None = option("with gym: the .jsonl to write; required there", group="run", metavar="FILE", default=None)
    show: int = option("with check: rows to show as tokens", group="run", least=0, default=3)
    roles: tuple[str, ...] = option("with check: whose messages are learned", group="data", metavar="ROLE", default=("assistant",))
    max_length: int | None = option("with check: the most tokens of a row", group="data", least=1, default=None,
                                    default_text="the model's own")
    too_long: Literal["drop", "truncate", "error"] = option("with check: what happens to longer rows", group="data", default="drop")
    turns: Literal["together", "apart"] = option("with check: one row of a conversation, or one of every turn that is learned (apart)",
                                                 group="data", default="together")
    layout: str | None = option("with check: the layout of the rows, where their columns allow two", group="data", default=None,
                                default_text="read from the columns")
    gsm8k: Literal["plain", "think"] = option("with check: answers of GSM8K as they are, or in <think> and <answer>", group="data",
                                              default="plain")
    new_tokens: tuple[str, ...] = option("with check: tokens to add to the vocabulary", group="model", metavar="TEXT", default=())
    held_out: str | None = option("with check: rows on which the model will be judged, none of which may be trained on", group="data",
                                  metavar="FILE", default=None)
    base: str | None = option("an adapter's base, where the adapter does not name it", group="model", metavar="MODEL", default=None)
    json: bool = option("print JSON", group="run", default=False)


EXAMPLES = """  assay data check train.jsonl --model smollm2-135m
  assay data check train.jsonl --model smollm2-135m --gsm8k think --new-tokens '<think>' '</think>' '<answer>' '</answer>' \\
      --held-out test.jsonl --max-length 1024
  assay data gym chain_sum --n 2000 --out sums.jsonl && assay grpo --model runs/sft/model --data sums.jsonl --reward gym:1 --out runs/a"""


def run(flags: FLAGS) -> int:
    if flags.action == "gym":
        return write_gym_problems(flags)
    return check_conversations(flags)


def write_gym_problems(flags: FLAGS) -> int:
    """Problems of reasoning-gym, whole or not at all."""
    from pathlib import Path

    from assay.reward.gym import gym_problems
    from assay.store.durable import replace_file

    if flags.out is None or flags.n < 1:
        raise UsageError("assay data gym: give --out FILE.jsonl, and at least one problem with --n")
    if Path(flags.out).exists():
        raise UsageError(f"{flags.out} is there already; remove it, or give another --out")
    rows = gym_problems(flags.file, flags.n, seed=flags.seed)
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
    conversations = read_conversations(flags.file, layout=flags.layout, gsm8k=flags.gsm8k)
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
    """As text for a terminal: supervised tokens on green in two shades, context dim, special tokens bold."""
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
    """No control character of the data reaches the terminal."""
    text = tokenizer.piece(token).replace("\n", "⏎")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

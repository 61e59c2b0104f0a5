"""Preference pairs: TRL's rows become pairs of conversations, rendered alike, packed side by side.

  explicit prompt       prompt, chosen, rejected: all text, or all lists of messages; tools where there are any
  implicit prompt       chosen, rejected: lists of messages, or texts, that begin alike; what they share is the prompt. A prompt as text
                        beside lists must be their last question, and says nothing more

A pair is refused, by file and row, where its sides are equal but for white space at their ends, or one says nothing, where they have no
prompt in common, and where columns that score both sides say that these are the wrong way round. A file is refused whose texts repeat the
column prompt, or share no more than one beginning. Whatever is too long is cut at the end, at the same length on both sides, so that both
have the same prompt; a pair whose sides are equal then, or have nothing left, is dropped.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data.batch import Batch
from assay.data.chat import NOTHING_LEFT, Overlong, Rendered, TrainingExample, fit_to_length, render_conversations
from assay.data.data_files import DataRow, read_rows
from assay.data.hub_datasets import local_data
from assay.data.layouts import (
    Conversation,
    Message,
    content_of,
    messages_of,
    refuse_odd_turns,
    refuse_repeated_prompts,
    refuse_tools_beside_text,
    tools_of,
)
from assay.data.mixture import MixedExamples
from assay.data.packing import PackedExamples, packed_rows
from assay.errors import DataError
from assay.model.special_tokens import SpecialTokens
from assay.model.tokenizer import Tokenizer

PAIR_COLUMNS = {"prompt", "chosen", "rejected", "tools"}
SCORES = [(name.format("chosen"), name.format("rejected")) for side in ("score", "rating", "reward")
          for name in (f"{side}_{{}}", f"{{}}_{side}", f"{{}}-{side}")]  # columns that say how good each side was, where a file has them
ALIKE = "chosen and rejected are the same within the length"
_UNBOUNDED = 10**9  # tokens: sides are rendered whole, and cut as pairs
ENOUGH_PROMPTS = 10  # different ones, from which on a prompt's pairs are held out together


@dataclass(frozen=True)
class SaidPair:
    """A row as it was read: the same prompt, twice answered."""

    id: str  # file:row:content
    chosen: Conversation
    rejected: Conversation
    prompt: str  # a digest of what both answer

    @property
    def content(self) -> str:
        """Key by which pairs are held out together."""
        return self.prompt


@dataclass(frozen=True, eq=False)
class PreferencePair:
    """A pair as tokens. As a whole it is its two sides, one after the other."""

    id: str
    chosen: TrainingExample
    rejected: TrainingExample

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @cached_property
    def tokens(self) -> NDArray[np.int32]:
        return np.concatenate([self.chosen.tokens, self.rejected.tokens])

    @cached_property
    def weight(self) -> NDArray[np.float32]:
        return np.concatenate([self.chosen.weight, self.rejected.weight])

    @property
    def content(self) -> str:
        return content_of(self.id)

    @property
    def conversation(self) -> Conversation | None:
        """Conversation of the chosen side; both stand in one row of the file."""
        return self.chosen.conversation

    @property
    def preference(self) -> tuple[Hashable, Hashable]:
        """Preference as a key, and the key of its opposite."""
        chosen, rejected = (side.tokens.tobytes() for side in self.sides)
        return (chosen, rejected), (rejected, chosen)

    @property
    def prompt(self) -> bytes:
        """The tokens that both sides answer."""
        return self.chosen.tokens[: self.chosen.prompt].tobytes()

    @property
    def sides(self) -> tuple[TrainingExample, TrainingExample]:
        return self.chosen, self.rejected

    @property
    def longer(self) -> int:
        """Supervised tokens that the chosen completion has more than the rejected one."""
        return int(np.count_nonzero(self.chosen.weight)) - int(np.count_nonzero(self.rejected.weight))


@dataclass(frozen=True)
class PackedPairs(PackedExamples):
    """Rows of pairs, each two neighbouring documents: the chosen even, the rejected odd. A step's loss is a mean over its pairs."""

    examples: Sequence[PreferencePair]  # type: ignore[assignment]

    def batch(self, step: int) -> Batch:
        return pair_rows([[self.examples[index] for index in row] for row in self.plan(step)], self.length, self.fill)


@dataclass(frozen=True)
class MixedPairs(PackedPairs, MixedExamples):
    """Pairs of several sources by their weights; no row holds those of two."""


def pair_rows(rows: Sequence[Sequence[PreferencePair]], length: int, fill: int = 0) -> Batch:
    made = packed_rows([[side for pair in row for side in pair.sides] for row in rows], length, fill)
    return replace(made, ids=tuple(tuple(pair.id for pair in row) for row in rows), divisor=float(sum(map(len, rows))))

# ---------------------------------------------------------------- rows → pairs of conversations


def read_preferences(path: Path | str, limit: int | None = None) -> list[SaidPair]:
    path = local_data(path)
    pairs, implicit = list[SaidPair](), 0
    for row in read_rows(path, limit=limit):
        pairs.append(read_pair(row, path.name))
        implicit += row.values.get("prompt") is None
    if not pairs:
        raise DataError(f"{path}: there is no row in it")
    refuse_repeated_prompts(path, [[pair.chosen.plain, pair.rejected.plain] for pair in pairs])
    if implicit == len(pairs) >= ENOUGH_PROMPTS and len({pair.prompt for pair in pairs}) == 1 and (said := pairs[0].chosen.plain):
        raise DataError(f"{path}: all that chosen and rejected share, in each of {len(pairs)} rows, is {said[0][:60]!r}: they answer "
                        "different prompts; give pairs that answer one, or their prompt as a column")
    return pairs


def read_reward_pairs(path: Path | str, limit: int | None = None) -> list[SaidPair]:
    """Pairs for a reward model. TRL's subtracts a column `margin` from the difference of two rewards; here it is refused, not left out."""
    path = local_data(path)
    for row in read_rows(path, limit=limit):
        if row.values.get("margin") is not None:
            raise DataError(f"{row.where}: the column margin is {row.values['margin']!r}, by which TRL's reward model tells some pairs "
                            "further apart than others; here every pair counts alike: remove the column")
    return read_preferences(path, limit)


def by_prompt(pairs: Sequence[SaidPair]) -> list[SaidPair]:
    """Pairs of one prompt are held out together, but for data that has hardly any prompts: there each pair is by itself."""
    if len({pair.prompt for pair in pairs}) >= ENOUGH_PROMPTS:
        return list(pairs)
    return [replace(pair, prompt=content_of(pair.id)) for pair in pairs]


def read_pair(row: DataRow, name: str) -> SaidPair:
    columns = {key: value for key, value in row.values.items() if key in PAIR_COLUMNS and value is not None}
    if missing := {"chosen", "rejected"} - columns.keys():
        raise DataError(f"{row.where}: there is no {' and no '.join(sorted(missing))} among the columns {', '.join(row.values) or 'none'}; "
                        "expected prompt, chosen and rejected, or chosen and rejected that begin alike")
    refuse_swapped(row)
    _refuse_alike(row, columns["chosen"], columns["rejected"])
    prompt, chosen, rejected = _text_sides(row, columns) if _all_text(columns) else _message_sides(row, columns)
    _refuse_alike(row, chosen, rejected)
    digest = hashlib.sha256(json.dumps(columns, sort_keys=True, default=str).encode()).hexdigest()[:16]
    id = f"{name}:{row.number}:{digest}"
    better, worse = (_side(row, f"{id}#{side}", prompt, said) for side, said in (("chosen", chosen), ("rejected", rejected)))
    asked = hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return SaidPair(id, better, worse, asked)


def refuse_swapped(row: DataRow) -> None:
    """Refuse a row whose sides are swapped, where the file itself says how good each side was."""
    for names in SCORES:
        better, worse = (_number(row.values.get(name)) for name in names)
        if better is not None and worse is not None and better < worse:
            raise DataError(f"{row.where}: {names[0]} is {better:g} and {names[1]} {worse:g}: chosen and rejected are the wrong way round; "
                            "swap the two columns, or remove the row")


def _number(value: Any) -> float | None:
    """A score, also as the text that CSV files hold; None where it is none."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _refuse_alike(row: DataRow, chosen: Any, rejected: Any) -> None:
    if chosen == rejected:
        raise DataError(f"{row.where}: chosen and rejected are the same: {_shown(chosen)}; there is nothing to prefer. Remove the row")
    if _stripped(chosen) == _stripped(rejected):
        raise DataError(f"{row.where}: chosen and rejected differ in white space at their ends alone: {_shown(chosen)} and "
                        f"{_shown(rejected)}; there is nothing to prefer. Remove the row")


def _stripped(said: Any) -> Any:
    """A text without white space at its ends, or messages whose contents are such."""
    if isinstance(said, str):
        return said.strip()
    return [{**turn, "content": _stripped(turn.get("content"))} if isinstance(turn, dict) else turn for turn in said] if isinstance(
        said, list | tuple) else said


def _all_text(columns: dict[str, Any]) -> bool:
    return all(isinstance(columns[name], str) for name in ("prompt", "chosen", "rejected") if name in columns)


def _text_sides(row: DataRow, columns: dict[str, Any]) -> tuple[str, str, str]:
    chosen, rejected = columns["chosen"], columns["rejected"]
    refuse_tools_beside_text(row)
    if "prompt" in columns:
        prompt = columns["prompt"]
    else:
        shared = len(list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))))
        shared -= shared > 0 and chosen[shared - 1] == " "  # a space belongs to the word after it, as in TRL
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not prompt:
            raise DataError(f"{row.where}: chosen begins with {chosen[:40]!r} and rejected with {rejected[:40]!r}: they answer different "
                            "prompts. Give the prompt as a column, or remove the row")
    _refuse_empty(row, chosen=chosen.strip(), rejected=rejected.strip())
    return prompt, chosen, rejected


def _message_sides(row: DataRow, columns: dict[str, Any]) -> tuple[tuple[Message, ...], ...]:
    for name in ("chosen", "rejected"):
        if columns[name] == []:
            _refuse_empty(row, **{name: None})
    chosen, rejected = messages_of(row, "chosen"), messages_of(row, "rejected")
    if isinstance(columns.get("prompt"), list):
        prompt = messages_of(row, "prompt")
    else:
        prompt = tuple(a for a, _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
        while prompt and prompt[-1]["role"] == "assistant" and len(prompt) in (len(chosen), len(rejected)):
            prompt = prompt[:-1]  # one side ends where the other goes on, or both are the same
        if not prompt:
            raise DataError(f"{row.where}: chosen begins with {_shown(chosen)} and rejected with {_shown(rejected)}: they answer different "
                            "prompts. Give the prompt as a column, or remove the row")
        _refuse_other_prompt(row, columns.get("prompt"), prompt)
        chosen, rejected = chosen[len(prompt):], rejected[len(prompt):]
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        _refuse_empty(row, **{name: any(message["content"].strip() or message.get("tool_calls") for message in side)})
        if side[0]["role"] != "assistant":
            raise DataError(f"{row.where}: after the prompt {name} begins with a message of {side[0]['role']}; expected the assistant's: "
                            "the two sides answer different prompts, or repeat the column prompt")
    return prompt, chosen, rejected


def _refuse_other_prompt(row: DataRow, asked: Any, prompt: tuple[Message, ...]) -> None:
    """A column of text beside full conversations, as many files have it."""
    if asked is not None and str(asked).strip() not in {message["content"].strip() for message in prompt}:
        raise DataError(f"{row.where}: prompt is {str(asked)[:60]!r}, and what chosen and rejected share ends with "
                        f"{prompt[-1]['content'][:60]!r}; expected the same question, or no column prompt")


def _refuse_empty(row: DataRow, **sides: Any) -> None:
    if empty := [name for name, said in sides.items() if not said]:
        raise DataError(f"{row.where}: {' and '.join(empty)} is empty: there is nothing to prefer; remove the row")


def _side(row: DataRow, id: str, prompt: Any, said: Any) -> Conversation:
    if isinstance(said, str):
        return Conversation(id, row.where, plain=(prompt, said))
    refuse_odd_turns(row, (*prompt, *said), len(prompt))
    return Conversation(id, row.where, (*prompt, *said), learned_from=len(prompt), tools=tools_of(row))


def _shown(said: Any) -> str:
    return repr(said if isinstance(said, str) else said[0] if said else "")[:80]

# ---------------------------------------------------------------- conversations → tokens


def render_pairs(said: Sequence[SaidPair], tokenizer: Tokenizer, stops: SpecialTokens, *, length: int,
                 over: Overlong = "drop") -> tuple[list[PreferencePair], Rendered]:
    """The pairs whose sides fit into `length` tokens each, by the model's own template; and what became of the others."""
    if not said:
        return [], Rendered([])
    sides = render_conversations([side for pair in said for side in (pair.chosen, pair.rejected)], tokenizer, stops, length=_UNBOUNDED)
    pairs: list[PreferencePair] = []
    dropped: Counter[str] = Counter()
    for pair, chosen, rejected in zip(said, sides.examples[0::2], sides.examples[1::2], strict=True):
        kept = fit_pair(PreferencePair(pair.id, chosen, rejected), length, over)
        if isinstance(kept, PreferencePair):
            pairs.append(kept)
        else:
            dropped[kept] += 1
    kept_sides = [side for pair in pairs for side in pair.sides]
    cut = sum(pair.chosen.cut or pair.rejected.cut for pair in pairs)
    return pairs, Rendered(kept_sides, dict(dropped), cut, sides.seams, sides.unread)


def fit_pair(pair: PreferencePair, length: int, over: Overlong) -> PreferencePair | str:
    """Pair with both sides within `length` tokens, cut at the end alone, or why it is dropped."""
    sides = [fit_to_length(side, length, over) for side in pair.sides]
    if reasons := [side for side in sides if isinstance(side, str)]:
        return reasons[0]
    chosen, rejected = (side for side in sides if isinstance(side, TrainingExample))
    if min(np.count_nonzero(chosen.weight), np.count_nonzero(rejected.weight)) == 0:
        return NOTHING_LEFT
    if np.array_equal(chosen.tokens, rejected.tokens):
        return ALIKE
    return PreferencePair(pair.id, chosen, rejected)

"""Row file checks: what `assay data` mixed, split or deduplicated is counted again from the files alone, and known rows make known files.

A recount opens files as the work does, and shares nothing else with it: its keys, counts and likenesses are its own.
"""

import gzip
import hashlib
import json
import re
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.data.hub_datasets import local_data
from assay.data.mixture import WeightedSource
from assay.data.row_files import deduplicate, mix_rows, row_lines, split_rows
from assay.verdict import Verdict, proven, refuted

Keys = NDArray[np.uint64]
RUN, SLACK = 5, 0.25  # words of a run; how much less alike rows may be, counted out, than their signatures said
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_]+")

# ---------------------------------------------------------------- known rows

KNOWN_FILES: dict[str, tuple[str | int, ...]] = {  # by action, what is made of known rows: sha256s, and what is told of them
    "mix": ("f81acde591ca61f1", 61, "26141fb834f14880", 11),
    "split": ("30866d4d00030f15", "3ab0b7b0291f4c6c", 10, 2, 2, "fee5d1f4763375b4", "88da40d0871e4ab2", 10, 2, 1),
    "dedup": ("d02155f006b43e71", 45, 2, 2, "950ca4b29a3d6066", 36, 13, 0),
}


def check_known_rows(action: str) -> Verdict:
    """Check that known rows are mixed, split or deduplicated as they were when this was written, whatever the machine."""
    with tempfile.TemporaryDirectory(prefix="assay-known-rows-") as folder:
        found = REHEARSALS[action](Path(folder))
    if found != KNOWN_FILES[action]:
        wrong = next(place for place, (one, other) in enumerate(zip(found, KNOWN_FILES[action], strict=True)) if one != other)
        return refuted("known rows", f"{action}: of known rows other files are made than should be ({found[wrong]} in the place of "
                                     f"{KNOWN_FILES[action][wrong]}): nothing that this makes can be trusted", found=list(found))
    return proven("known rows", f"known rows give the {len(found)} files and counts that they should")


def known_rows(folder: Path) -> tuple[str, str]:
    """Two files: forty rows, of which one is a copy, one a copy with its columns in another order, and two near copies; and nine short
    rows."""
    tale = ("in the {} week of spring {} walked along the river bank with {} loaves of bread and a letter for the miller, who had not been "
            "seen at market since the frost broke the wheel; nobody knew then what was written in it, nor who had sealed it at the old {}")
    rows: list[dict[str, Any]] = [{"text": tale.format(n, "ABCDEFGH"[n % 8], 3 * n, "bridge"), "n": n} for n in range(36)]
    rows += [{"n": 7, "text": rows[7]["text"]}, rows[11], {"text": tale.format(20, "E", 60, "tower"), "n": 20},
             {"text": tale.format(20, "E", 61, "tower"), "n": 20}]
    names = str(folder / "many.jsonl"), str(folder / "few.jsonl")
    for name, written in zip(names, (rows, [{"text": f"row {number}", "n": number} for number in range(9)]), strict=True):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in written))
    return names


def known_mixtures(folder: Path) -> tuple[Any, ...]:
    many, few = known_rows(folder)
    sources = [WeightedSource(many, Fraction(7, 10)), WeightedSource(few, Fraction(3, 10))]
    whole = mix_rows(sources, str(folder / "whole.jsonl"), rows=None, epochs=2, seed=3)
    part = mix_rows(sources[::-1], str(folder / "part.jsonl"), rows=11, epochs=1, seed=4)
    return whole["sha256"][:16], whole["rows"], part["sha256"][:16], part["rows"]


def known_splits(folder: Path) -> tuple[Any, ...]:
    many, _ = known_rows(folder)
    made = [split_rows(many, str(folder / f"parts-{seed}"), held_out=0.25, seed=seed) for seed in (3, 4)]
    return tuple(fact for found in made for fact in (found["train"]["sha256"][:16], found["held-out"]["sha256"][:16],
                                                     found["held-out"]["rows"], found["copies"], found["near"]))


def known_duplicates(folder: Path) -> tuple[Any, ...]:
    names = known_rows(folder)
    made = [deduplicate(names, str(folder / "words.jsonl"), threshold=0.8, field=None, workers=1),
            deduplicate(names, str(folder / "column.jsonl"), threshold=None, field="n", workers=1)]
    return tuple(fact for found in made for fact in (found["sha256"][:16], found["kept"], found["exact"], found["near"]))


REHEARSALS: dict[str, Callable[[Path], tuple[Any, ...]]] = {"mix": known_mixtures, "split": known_splits, "dedup": known_duplicates}

# ---------------------------------------------------------------- recounts


def check_mixed(sources: Sequence[WeightedSource], told: Mapping[str, Any], *, rows: int | None, epochs: int) -> Verdict:
    """Check a mixture: as many rows as were asked for, of each source the share that was asked for, and every row of a source as often as
    every other, but for one time."""
    made, keys = line_keys(told["file"]), [line_keys(source.name) for source in sources]
    given = [told["sources"][source.name]["rows"] for source in sources]
    wrong = wrong_totals(sources, given, len(made), list(map(len, keys)), rows, epochs) + wrong_sources(sources, given, made, keys)
    if wrong:
        return refuted("rows", f"{told['file']}: {'; '.join(wrong)}", wrong=wrong)
    return proven("rows", f"{len(made):,} rows counted again: each is of a source, as often as its neighbours, in the shares that were "
                          "asked for")


def wrong_totals(sources: Sequence[WeightedSource], given: Sequence[int], made: int, sizes: Sequence[int], rows: int | None,
                 epochs: int) -> list[str]:
    """What is wrong with how many rows there are, and with how many each source was given."""
    wrong, weights = list[str](), [source.weight or Fraction(1) for source in sources]
    if made != sum(given) or made != (made if rows is None else rows):
        wrong.append(f"{made:,} rows are there, {sum(given):,} were counted and {'as many' if rows is None else f'{rows:,}'} asked for")
    if rows is None and not any(count == epochs * size for count, size in zip(given, sizes, strict=True)):
        wrong.append(f"it ends, and no source has been read {epochs} time(s)")
    for source, weight, count, size in zip(sources, weights, given, sizes, strict=True):
        due = made * weight / sum(weights)
        if abs(count - due) > len(sources):
            wrong.append(f"{source.name} was given {count:,} rows, {float(due):,.1f} were due")
        if count > epochs * size:
            wrong.append(f"{source.name} has {size:,} rows and was given {count:,}, more than --epochs {epochs} allows")
    return wrong


def wrong_sources(sources: Sequence[WeightedSource], given: Sequence[int], made: Keys, keys: Sequence[Keys]) -> list[str]:
    """What is wrong with which rows there are. Sources may have rows in common: these may be of either."""
    known = np.unique(np.concatenate([*keys, made]))
    times, *copies = (np.bincount(np.searchsorted(known, each), minlength=len(known)) for each in (made, *keys))
    everywhere = np.sum(copies, axis=0)
    least = sum(each * (count // each.sum()) for each, count in zip(copies, given, strict=True))
    most = sum(each * -(-count // each.sum()) for each, count in zip(copies, given, strict=True))
    unlike, wrong = int(((times < least) | (times > most)).sum()), list[str]()
    if unlike:
        wrong.append(f"{unlike:,} different rows are there more or less often than the other rows of their source")
    for source, count, each in zip(sources, given, copies, strict=True):
        own, shared = (int(times[(each > 0) & which].sum()) for which in (everywhere == each, everywhere != each))
        if not own <= count <= own + shared:
            wrong.append(f"{source.name} was given {count:,} rows by the count, {own:,} by the rows that are its own")
    return wrong


def check_split(name: str, told: Mapping[str, Any], *, held_out: float) -> Verdict:
    """Check a split: every row is on one side, copies on one, and as many different rows are held out as were asked for."""
    files = [told[side]["file"] for side in ("train", "held-out")]
    lines = [line_keys(file) for file in files]
    train, held = (np.unique(said_keys(file)) for file in files)
    due, wrong = round(held_out * (len(train) + len(held))), list[str]()
    if not np.array_equal(np.sort(line_keys(name)), np.sort(np.concatenate(lines))):
        wrong.append(f"{len(lines[0]):,} and {len(lines[1]):,} rows are not those of {name}")
    if both := len(np.intersect1d(train, held)):
        wrong.append(f"{both:,} different rows are on both sides")
    if len(held) != due or not due:
        wrong.append(f"{len(held):,} different rows are held out, {due:,} of {len(train) + len(held):,} were to be")
    if wrong:
        return refuted("rows", f"{name}: {'; '.join(wrong)}", wrong=wrong)
    return proven("rows", f"{sum(map(len, lines)):,} rows counted again, each on one side, {len(held):,} different ones held out")


def check_deduplicated(names: Sequence[str], told: Mapping[str, Any], *, threshold: float | None, field: str | None) -> Verdict:
    """Check what was left out: of equal rows all but the first; and of near copies only such as repeat a row, run of words by run of words,
    of which a few are compared."""
    lines = np.concatenate([line_keys(name) for name in names])
    said = np.concatenate([said_keys(name, field) for name in names])
    first = np.sort(np.unique(said, return_index=True)[1])
    made, wrong = line_keys(told["file"]), list[str]()
    if threshold is None and not np.array_equal(lines[first], made):
        wrong.append(f"{len(first):,} different rows are in the files, and {len(made):,} rows, not these, were written")
    if not is_rest_of(made, lines[first]):
        wrong.append("rows were written that are not the first of their copies, or not in their order")
    if told["near"] != len(first) - len(made) or told["exact"] != len(lines) - len(first):
        wrong.append(f"{len(lines) - len(first):,} copies and {len(first) - len(made):,} others were left out, {told['exact']:,} and "
                     f"{told['near']:,} were counted")
    compared = least_alike(names, told["compared"], field)
    wrong += [f"row {row:,} was left out, and has at most {share:.2f} of its runs of words in common with those it is said to repeat"
              for row, share in compared.items() if share < (threshold or 1.0) - SLACK]
    if wrong:
        return refuted("rows", f"{told['file']}: {'; '.join(wrong[:5])}", wrong=wrong[:20])
    return proven("rows", f"{len(lines):,} rows counted again: of copies the first was kept, and {len(compared)} of those left out were "
                          "compared with what they repeat")


def least_alike(names: Sequence[str], compared: Sequence[Sequence[int]], field: str | None) -> dict[int, float]:
    """Of rows that were left out, each with the numbers of those it is said to repeat: how much it has in common with the nearest."""
    wanted, found = {number for numbers in compared for number in numbers}, dict[int, tuple[int, set[tuple[str, ...]]]]()
    for number, line in enumerate((line for name in names for line in lines_of(name)), 1):
        if number in wanted:
            row = json.loads(line)
            found[number] = key_of(sorted_json(row, field)), word_runs(row if field is None else row[field])
    return {row: max((shared_runs(found[row], found[other]) for other in others), default=0.0) for row, *others in compared}


def shared_runs(one: tuple[int, set[tuple[str, ...]]], other: tuple[int, set[tuple[str, ...]]]) -> float:
    """Share of the runs of words that two rows have in common; 1 where the rows are equal."""
    if one[0] == other[0]:
        return 1.0
    both = one[1] | other[1]
    return len(one[1] & other[1]) / len(both) if both else 0.0


def word_runs(value: Any) -> set[tuple[str, ...]]:
    words = WORD.findall(" ".join(texts_in(value)).lower())
    return {tuple(words[place : place + RUN]) for place in range(len(words) - RUN + 1)}


def texts_in(value: Any) -> Iterator[str]:
    """Everything that a row says, in its order."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_in(each)
    elif value is not None:
        yield str(value)


def is_rest_of(part: Keys, whole: Keys) -> bool:
    """Whether `part` is what is left of `whole` where some of it is taken out."""
    rest = iter(whole.tolist())
    return all(key in rest for key in part.tolist())

# ---------------------------------------------------------------- keys


def lines_of(name: str) -> Iterator[bytes]:
    """Rows of a file as lines; those of a .jsonl file as they stand."""
    path = local_data(name)
    if not path.is_file() or not path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from row_lines(name)
        return
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield from filter(bytes.strip, file)


def key_of(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, person=b"recount").digest())


def line_keys(name: str) -> Keys:
    return np.frombuffer(array("Q", (key_of(line.strip()) for line in lines_of(name))), np.uint64)


def said_keys(name: str, field: str | None = None) -> Keys:
    """Keys of what rows say, or of one column, in whatever order the columns stand."""
    return np.frombuffer(array("Q", (key_of(sorted_json(json.loads(line), field)) for line in lines_of(name))), np.uint64)


def sorted_json(row: Any, field: str | None) -> bytes:
    return json.dumps(row if field is None else row[field], sort_keys=True).encode()

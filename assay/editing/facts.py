"""Facts to edit, and facts that a model knows: CounterFact in both layouts, known_1000, and plain rows.

A prompt is kept whole, with the place of its subject in characters; `{}` in a template is where the subject goes. A row
without a template must hold the subject as it is spelled: the last whole-word occurrence counts, the one nearest to the
answer. A row whose subject is not there is refused by name, and the others go on.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.data.data_files import read_rows
from assay.errors import DataError, UsageError
from assay.strict_json import read_json

NO_SPACES_FROM = 0x2E80  # scripts from here on (CJK) write no spaces between words


@dataclass(frozen=True)
class SideQuestion:
    """A question beside the edit, with the answer that is right for it (None: whatever the model said before)."""

    prompt: str
    answer: str | None


@dataclass(frozen=True)
class Rephrasing:
    """A fact's question in other words, with the subject at `start`: its target is sought in it too, and it is never evaluated."""

    prompt: str
    start: int


@dataclass(frozen=True)
class Fact:
    """`prompt[start:start + len(subject)]` is the subject; `target` is what shall follow, `old` what followed so far."""

    name: str
    prompt: str
    subject: str
    start: int
    target: str
    old: str | None = None
    paraphrases: tuple[str, ...] = ()
    neighbourhood: tuple[SideQuestion, ...] = ()
    portability: tuple[SideQuestion, ...] = ()
    rephrasings: tuple[Rephrasing, ...] = ()
    relation: str | None = None


@dataclass(frozen=True)
class RefusedFact:
    """A request that was not served, and why."""

    name: str
    reason: str


def read_facts(path: Path, first: int | None = None) -> tuple[list[Fact], list[RefusedFact]]:
    """Every row, or the first so many, of a .json list or of .jsonl lines becomes a fact or is refused by name; a row of no known
    layout is an error."""
    facts: list[Fact] = []
    refused: list[RefusedFact] = []
    for number, row in enumerate(_rows(path)[:first]):
        name, where = _name(row, number), f"{path}, row {number}"
        fields = _fields(row, where)
        try:
            facts.append(make_fact(name, **fields))
        except DataError as error:
            refused.append(RefusedFact(name, str(error)))
    if not facts and not refused:
        raise DataError(f"{path} holds no fact")
    return facts, refused


def make_fact(name: str, prompt: str, subject: str, target: str, rephrasings: Iterable[str] = (), **more: Any) -> Fact:
    """The one way to a Fact: a template is filled, spaces around the parts go, the subject is found or the fact refused."""
    subject, target = subject.strip(), target.strip()
    if not subject or not target:
        raise DataError(f"{name}: the {'target' if subject else 'subject'} is empty")
    prompt, start = filled_template(prompt, subject, name)
    others = tuple(Rephrasing(*filled_template(other, subject, name)) for other in rephrasings)
    return Fact(name, prompt, subject, start, target, rephrasings=others, **more)


def filled_template(prompt: str, subject: str, name: str) -> tuple[str, int]:
    """The prompt with the subject in it, without spaces around it, and where the subject starts."""
    if "{}" in prompt:
        if prompt.count("{}") > 1:
            raise DataError(f"{name}: the template {prompt!r} has {prompt.count('{}')} places for the subject; expected one")
        start = prompt.index("{}")
        prompt = prompt.replace("{}", subject)
    else:
        start = last_occurrence(prompt, subject, name)
    stripped = prompt.rstrip()  # the answer brings its own space: a space left at the end would be a token of its own
    return stripped.lstrip(), start - (len(stripped) - len(stripped.lstrip()))


def last_occurrence(text: str, subject: str, name: str) -> int:
    """Place of the subject in the text, exactly as spelled, not inside a longer word; the last of several."""
    places = [m.start() for m in re.finditer(f"(?={re.escape(subject)})", text)]
    whole = [start for start in places if not _inside_a_word(text, start, start + len(subject))]
    if whole:
        return whole[-1]
    if places:
        raise DataError(f"{name}: the subject {subject!r} stands only inside a longer word of {text!r}; name the whole word")
    other = re.search(re.escape(subject), text, re.IGNORECASE)
    hint = f"it is spelled {other.group()!r} there; spell it alike" if other else "give the prompt with {} in its place"
    raise DataError(f"{name}: the subject {subject!r} does not occur in {text!r}; {hint}")


def with_leading_space(answer: str) -> str:
    """An answer as it follows its prompt: after one space, but where its script has none."""
    return answer if ord(answer[0]) >= NO_SPACES_FROM else f" {answer}"


def _inside_a_word(text: str, start: int, stop: int) -> bool:
    def glued(left: str, right: str) -> bool:
        return left.isalnum() and right.isalnum() and max(ord(left), ord(right)) < NO_SPACES_FROM

    return (start > 0 and glued(text[start - 1], text[start])) or (stop < len(text) and glued(text[stop - 1], text[stop]))

# ---------------------------------------------------------------- layouts


def _fields(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments of `make_fact`, from whichever layout this row has."""
    layout = next((layout for key, layout in LAYOUTS.items() if key in row), None)
    try:
        if layout is not None:
            fields = layout(row)
            return fields | {key: fields[key] + "" for key in ("prompt", "subject", "target")}  # text, or a TypeError
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{where}: its layout is known, but {error!r}: a field is not as that layout has it") from None
    raise DataError(f"{where}: has {', '.join(sorted(row))}; expected CounterFact (requested_rewrite), EasyEdit (prompt, subject, "
                    "target_new) or plain (prompt, subject, target)")


def _counterfact(row: Mapping[str, Any]) -> dict[str, Any]:
    asked = row["requested_rewrite"]
    old = asked["target_true"]["str"].strip()
    return {"prompt": asked["prompt"], "subject": asked["subject"], "target": asked["target_new"]["str"], "old": old,
            "relation": asked.get("relation_id"), "paraphrases": _prompts(row.get("paraphrase_prompts", ())),
            "neighbourhood": tuple(_asked(prompt, old) for prompt in row.get("neighborhood_prompts", ()))}


def _easy_edit(row: Mapping[str, Any]) -> dict[str, Any]:
    def asked(kind: str) -> tuple[SideQuestion, ...]:
        prompts, answers = _listed(row.get(f"{kind}_prompt")), _listed(row.get(f"{kind}_ground_truth"))
        return tuple(_asked(p, a) for p, a in zip(prompts, answers, strict=True))

    old = row.get("ground_truth")
    return {"prompt": row["prompt"], "subject": row["subject"], "target": row["target_new"], "old": old.strip() if old else None,
            "paraphrases": _prompts(_listed(row.get("rephrase_prompt"))), "neighbourhood": asked("locality"),
            "portability": asked("portability")}


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    def asked(kind: str) -> tuple[SideQuestion, ...]:
        return tuple(_asked(p, None) if isinstance(p, str) else _asked(p["prompt"], p["answer"]) for p in row.get(kind, ()))

    old = row.get("old")
    return {"prompt": row["prompt"], "subject": row["subject"], "target": row["target"], "old": old.strip() if old else None,
            "paraphrases": _prompts(row.get("paraphrases", ())), "neighbourhood": asked("neighbourhood"),
            "portability": asked("portability"), "rephrasings": _prompts(row.get("rephrasings", ())), "relation": row.get("relation")}


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    """known_1000: what is so, and no edit."""
    return {"prompt": row["prompt"], "subject": row["subject"], "target": row["attribute"]}


# By a field that the ones before it do not have.
LAYOUTS = {"requested_rewrite": _counterfact, "target_new": _easy_edit, "attribute": _known, "target": _plain}


def _asked(prompt: str, answer: str | None) -> SideQuestion:
    """An empty answer is none."""
    return SideQuestion(prompt.strip(), (answer or "").strip() or None)


def _prompts(prompts: Iterable[str]) -> tuple[str, ...]:
    return tuple(prompt.strip() for prompt in prompts)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _name(row: Mapping[str, Any], number: int) -> str:
    key = next((key for key in ("name", "case_id", "known_id", "id") if key in row), None)
    return f"row {number}" if key is None else f"{key.removesuffix('_id').replace('name', '')} {row[key]}".strip()


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [row.values for row in read_rows(path)]
    if not path.is_file():
        raise UsageError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}; expected a .json list or .jsonl lines")
    return read_json(path, [dict], error=DataError)

"""Probe prompts: our own in several domains, beginnings for models without a chat template, and users' own files."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from assay.comparison.read_results import read_values
from assay.errors import DataError
from assay.health.degenerate import PROSE, Expected

PROBE_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ProbePrompt:
    """`text` is what the user says last; `before` are the messages before it, each a role and what was said."""

    id: str
    domain: str
    text: str
    expected: Expected = PROSE
    before: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": text} for role, text in (*self.before, ("user", self.text))]


SPOKEN = ("um so basically what we uh what we decided is that the the launch moves to thursday because because anna still needs the "
          "numbers from from the warehouse and uh mark will call them you know tomorrow morning")
CALL = ("okay so the customer said she she ordered two lamps but um only one came and it was it was the wrong colour so i i told her we "
        "would send the right one by friday at at no cost")
NUMBERS, CODE, _SHORT = Expected(numbers=True), Expected(code=True, numbers=True), Expected(numbers=True, short=True)

# Each asks for a short answer, so that one which does not end is a fault and not a long answer.
BUILT_IN_PROMPTS = (
    ProbePrompt("chat-greeting", "chat", "Hello! How are you today?"),
    ProbePrompt("chat-advice", "chat", "I slept badly before an important day. What can I do to get through it? Answer in two sentences."),
    ProbePrompt("chat-explain", "chat", "Explain to a child, in two or three sentences, why the moon changes its shape."),
    ProbePrompt("short-colour", "chat", "Name one colour. Answer with one word.", _SHORT),
    ProbePrompt("reasoning-sum", "reasoning", "A shelf holds 8 boxes and each box holds 12 pencils. How many pencils are there? Say how.",
           NUMBERS),
    ProbePrompt("reasoning-order", "reasoning", "Ben is taller than Ada, and Ada is taller than Cy. Who is the shortest? Say why."),
    ProbePrompt("reasoning-time", "reasoning", "A train leaves at 9:40 and arrives at 12:05. How long is the journey?", NUMBERS),
    ProbePrompt("code-function", "code", "Write a Python function that returns the largest number in a list.", CODE),
    ProbePrompt("code-explain", "code", "In two sentences and without showing code: what does a loop do in a program?"),
    ProbePrompt("cleanup-launch", "transcript clean-up",
           f"Rewrite this spoken text as clean written sentences. Keep every fact and leave out filler words.\n\n{SPOKEN}"),
    ProbePrompt("cleanup-call", "transcript clean-up",
           f"Rewrite this spoken text as clean written sentences. Keep every fact and leave out filler words.\n\n{CALL}", NUMBERS),
    ProbePrompt("other-sea", "off-domain", "Describe the sea on a windy day in three sentences."),
    ProbePrompt("other-soup", "off-domain", "How does one make vegetable soup? Answer in three sentences.", NUMBERS),
    ProbePrompt("other-town", "off-domain", "Write a letter of three sentences to a friend who has moved to another town."),
    ProbePrompt("other-history", "off-domain", "Why did people build cities near rivers? Answer in two sentences."),
    ProbePrompt("other-list", "off-domain", "List five things that are found in a kitchen.", NUMBERS),
)

_OPEN = Expected(ends=False, numbers=True)  # nothing taught these models to stop, nor what is asked of them
TEXT_BEGINNINGS = tuple(ProbePrompt(f"beginning-{i}", domain, text, replace(_OPEN, code=domain == "code")) for i,
                        (domain, text) in enumerate((
    ("prose", "The old house at the end of the road had been empty for years, and"),
    ("prose", "When the rain stopped, the children ran outside and"),
    ("prose", "The history of the town begins with a bridge. In the year"),
    ("prose", "Dear Sir, I am writing to you because"),
    ("dialogue", "\"Where have you been?\" she asked. He looked at the floor and"),
    ("explanation", "Water boils at a lower temperature on a mountain because"),
    ("explanation", "There are three reasons why people keep bees. The first is"),
    ("code", "def largest(numbers):\n    "),
)))


def read_probe_prompts(path: str | Path) -> tuple[ProbePrompt, ...]:
    """JSON lines with `prompt`, a text or a list of messages, and where wanted `id`, `domain`, and what is expected: script, code,
    numbers, short, tags, ends. Of a .txt file every line that is not blank is a prompt."""
    path = Path(path)
    if path.suffix == ".txt":
        lines = _text(path).splitlines() if path.is_file() else []
        found = tuple(ProbePrompt(f"{path.stem}-{i}", path.stem, line) for i, line in enumerate(lines) if line.strip())
    else:
        found = tuple(_prompt(row, i, path) for i, row in enumerate(read_values(path)))
    if not found:
        raise DataError(f"{path}: no prompts; expected JSON lines with `prompt`, or a .txt file with one on each line")
    if len({prompt.id for prompt in found}) < len(found):
        raise DataError(f"{path}: two prompts have the same id")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start} ({error.reason}); convert the file") from None


def _prompt(row: Mapping[str, Any], i: int, path: Path) -> ProbePrompt:
    known = {field.name: field.default for field in fields(Expected)}
    strangers = row.keys() - known.keys() - {"prompt", "id", "domain"}
    messages = _messages(row.get("prompt"))
    if messages is None or strangers:
        found = f"unknown {', '.join(sorted(strangers))}" if strangers else f"`prompt` is {str(row.get('prompt'))[:200]!r}"
        raise DataError(f"{path}, row {i + 1}: {found}; expected `prompt`, a text or a list of messages (role system, user or assistant, "
                        f"and content) that ends with the user's, and of id, domain, {', '.join(known)} what is wanted")
    wanted: dict[str, Any] = {name: tuple(row[name]) if name == "tags" else row[name] for name in known if name in row}
    for name, value in wanted.items():
        if type(value) is not type(known[name]):
            raise DataError(f"{path}, row {i + 1}: {name} is {value!r}; expected {type(known[name]).__name__}")
    return ProbePrompt(str(row.get("id", f"{path.stem}-{i}")), str(row.get("domain", path.stem)), messages[-1][1], Expected(**wanted),
                       tuple(messages[:-1]))


def _messages(prompt: Any) -> list[tuple[str, str]] | None:
    """Role and content of each, the last the user's; None of what is neither a text nor such a list."""
    if isinstance(prompt, str):
        return [("user", prompt)]
    told = [(message["role"], message["content"]) for message in prompt if _is_message(message)] if isinstance(prompt, list) else []
    return told if told and len(told) == len(prompt) and told[-1][0] == "user" else None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in PROBE_ROLES and isinstance(value.get("content"), str)

"""Score of a judge: how many answers of ours were right, refused in words, or wrong; and what the judge was."""

import hashlib
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

PINS = {"llama.cpp": "b21e4de74567f5eef213765c9476a843c2e43f0d", "JSON-Schema-Test-Suite": "44401e0c046704b476ec9d2e2fccdaee618f259d",
        "safetensors": "24b0b2857fef49be734b9ab72ce97c09bb25f5b9", "trl": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
        "openai-openapi": "f85dbe223d40e1a31cba812ab2d755c7e98a92a3", "human-eval": "6d43fb980f9fee3c892a914eda09951f772ad10d"}


class AbsentJudge(Exception):
    """Error of a judge whose requirements are not here; the sentence says what and where it comes from."""


@dataclass
class Score:
    """A case is right, refused (we say in words that we do not answer, where the judge does), or wrong (we answer otherwise)."""

    version: str
    right: int = 0
    refusals: Counter[str] = field(default_factory=Counter)  # reason → cases
    mistakes: list[str] = field(default_factory=list)  # case and what was found
    notes: list[str] = field(default_factory=list)

    @property
    def n(self) -> int:
        return self.right + self.refused + self.wrong

    @property
    def refused(self) -> int:
        return self.refusals.total()

    @property
    def wrong(self) -> int:
        return len(self.mistakes)

    def agree(self, alike: bool, case: str, found: str) -> None:
        """Right where ours and theirs are alike, else wrong with what was found."""
        if alike:
            self.right += 1
        else:
            self.mistakes.append(f"{case}: {found}")


def packages(*names: str) -> str:
    """Names and versions of installed packages; AbsentJudge where one is missing."""
    try:
        return ", ".join(f"{name} {metadata.version(name)}" for name in names)
    except metadata.PackageNotFoundError as error:
        raise AbsentJudge(f"{error.name or names} is not installed: pip install -r tests/judges/requirements.txt") from None


def checkout(folder: Path, name: str, *parts: str) -> Path:
    """FOLDER/NAME/PARTS of a checkout that the user named."""
    path = folder.joinpath(name, *parts)
    if not path.exists():
        raise AbsentJudge(f"{'/'.join((name, *parts))} is not in the folder of judges: git clone it there, at {PINS[name][:12]}")
    return path


def checkout_version(folder: Path, name: str, files: list[Path]) -> str:
    """The commit of a git checkout, beside the pinned one where they differ; of plain files, their digest."""
    found = None
    if (folder / name / ".git").exists():
        asked = subprocess.run(["git", "-C", str(folder / name), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        found = asked.stdout.strip()
    elif (folder / f"{name}.commit").is_file():  # of an archive that was unpacked without its history
        found = (folder / f"{name}.commit").read_text().strip()
    if found is None:
        digest = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
        return f"{name}, files {digest[:12]}"
    return f"{name} {found[:12]}" + ("" if found == PINS.get(name) else f" (pinned: {PINS.get(name, 'none')[:12]})")


def first_words(error: Exception, limit: int = 110) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[:limit] + "…"

"""assay tiny: make a tiny model and its data, to try the other verbs on a CPU in seconds."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from assay.config import argument, option
from assay.errors import UsageError


@dataclass(frozen=True)
class FLAGS:
    """Write a tiny model (OUT/model) and data for it. sums: an untrained one, learned.jsonl to fine-tune it on (sums of digits, every other
    one hedged) and sums.jsonl to reinforce and evaluate it on. facts: one that knows a few made-up facts, facts.jsonl to edit two of
    them, and text.txt in its language."""

    what: Literal["sums", "facts"] = argument("which model")
    out: str = option("folder to write; it must not exist", metavar="FOLDER")


EXAMPLES = "  assay tiny sums --out tiny\n  assay sft --model tiny/model --data tiny/learned.jsonl --max-steps 20 --out runs/sft\n" \
           "  assay tiny facts --out lore"


def run(flags: FLAGS) -> int:
    from assay.store.durable import make_folder
    from assay.testing.tiny_facts import write_facts_text
    from assay.verbs.demo.stages import build_and_save, write_lessons, write_lore

    out = Path(flags.out)
    if os.path.lexists(out):
        raise UsageError(f"{out} exists; choose another with --out, or remove it")
    make_folder(out)
    if flags.what == "sums":
        build_and_save(out / "model")
        write_lessons(out)
    else:
        write_lore(out, "model")
        write_facts_text(out / "text.txt")
    print(f"{out}: a tiny model and its {flags.what}")
    return 0

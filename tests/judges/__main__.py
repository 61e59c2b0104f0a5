"""Runner of the judges: each that has what it needs is asked, and docs/scorecard.md says what came of it."""

import argparse
import datetime
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.judges.score import AbsentJudge, Score

ROOT = Path(__file__).parents[2]
JUDGES = {"chat_templates": "chat templates, transformers' renderer", "sft_masks": "SFT masks on the same templates",
          "json_schema": "JSON Schema Test Suite, required", "json_schema_optional": "JSON Schema Test Suite, optional",
          "gguf_vocabularies": "llama.cpp's vocabularies", "broken_gguf": "llama.cpp's broken GGUF files",
          "safetensors_attacks": "safetensors' attack files", "trl_rewards": "TRL's rewards", "trl_curves": "TRL's training curves",
          "lm_eval_graders": "lm-eval's graders",
          "gym_datasets": "reasoning-gym", "peft_adapters": "PEFT's adapters", "openai_schema": "OpenAI's schema, by schemathesis",
          "human_eval_solutions": "HumanEval's canonical solutions", "evalplus_solutions": "EvalPlus's canonical solutions",
          "vllm_logprobs": "vLLM's log-probabilities",
          "llama_cpp_logprobs": "llama.cpp's log-probabilities"}
HEAD = """# Scorecard

Other people's tests, run by `make judges JUDGES=FOLDER` at pinned versions in an environment of their own; their files come from PyPI or
from checkouts that the user names, and are not kept here. Right: the answer is the judge's. Refused in words: we answer nothing and say
why, or differ for a reason that is stated. **Wrong**: another answer, or a crash; the goal is 0 everywhere.
"""
SHOWN = 12  # refusals and mistakes of a judge that are written out


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder with checkouts of the judges")
    parser.add_argument("--only", nargs="+", choices=JUDGES, default=list(JUDGES), help="these judges; what the others said is kept")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "scorecard.md")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "judges" / "scores.json", help="what each judge said last")
    flags = parser.parse_args(words)
    kept: dict[str, Any] = json.loads(flags.kept.read_text()) if flags.kept.exists() else {}
    for name in flags.only:
        kept[name] = ask(name, flags.folder)
        print(f"{JUDGES[name]}: {in_words(kept[name])}", flush=True)
        flags.kept.parent.mkdir(parents=True, exist_ok=True)
        flags.kept.write_text(json.dumps(kept, indent=1))
        flags.out.write_text(scorecard(kept))
    return int(any(record.get("mistakes") for record in kept.values()))


def ask(name: str, folder: Path) -> dict[str, Any]:
    """Answer of a judge as JSON; `absent` where it cannot be asked."""
    module = importlib.import_module(f"tests.judges.{name}")
    day, began = datetime.date.today().isoformat(), time.monotonic()
    try:
        score: Score = module.judge(folder)
    except AbsentJudge as absence:
        return {"asks": module.ASKS, "absent": str(absence), "date": day}
    return {"asks": module.ASKS, "date": day, "seconds": round(time.monotonic() - began, 1), **vars(score)}


def in_words(record: dict[str, Any]) -> str:
    if "absent" in record:
        return f"skipped: {record['absent']}"
    refused, wrong = sum(record["refusals"].values()), len(record["mistakes"])
    return f"{record['right'] + refused + wrong} asked, {record['right']} right, {refused} refused in words, {wrong} wrong"


def scorecard(kept: dict[str, Any]) -> str:
    """The page: one table, then what was skipped, refused and wrong, by judge."""
    lines = [HEAD, "| judge | what it asks | n | right | refused in words | wrong | version | date |", "|---|---|--:|--:|--:|--:|---|---|"]
    known = [name for name in JUDGES if name in kept]
    lines += [row(JUDGES[name], kept[name]) for name in known]
    for name in known:
        lines += details(JUDGES[name], kept[name])
    return "\n".join(lines) + "\n"


def row(title: str, record: dict[str, Any]) -> str:
    asks = cell(record["asks"])
    if "absent" in record:
        return f"| {title} | {asks} | | | | | not run: {cell(record['absent'])} | {record['date']} |"
    refused, wrong = sum(record["refusals"].values()), len(record["mistakes"])
    return (f"| {title} | {asks} | {record['right'] + refused + wrong:,} | {record['right']:,} | {refused:,} | "
            f"{f'**{wrong}**' if wrong else 0} | {cell(record['version'])} | {record['date']} |")


def details(title: str, record: dict[str, Any]) -> list[str]:
    if "absent" in record or not (record["refusals"] or record["mistakes"] or record["notes"]):
        return []
    lines = ["", f"## {title[0].upper()}{title[1:]}", "", *(f"- {cell(note)}" for note in record["notes"])]
    refusals = sorted(record["refusals"].items(), key=lambda item: -item[1])
    lines += [f"- refused, {count}: {cell(reason)}" for reason, count in refusals[:SHOWN]]
    if rest := refusals[SHOWN:]:
        lines.append(f"- refused for {len(rest)} other reasons: {sum(count for _, count in rest)}")
    lines += [f"- **wrong**: {cell(mistake)}" for mistake in record["mistakes"][:SHOWN]]
    if len(record["mistakes"]) > SHOWN:
        lines.append(f"- **wrong**, and {len(record['mistakes']) - SHOWN} more")
    return lines


def cell(text: str, limit: int = 240) -> str:
    """One line of a page: what a test quotes stays text."""
    flat = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return flat if len(flat) <= limit else flat[:limit] + "…"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

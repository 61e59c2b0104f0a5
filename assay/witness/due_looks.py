"""Due evaluations of GRPO: what the prompts, texts and scores of an evaluation during the run, or of the gain at its end, must be.

A record is `RUN/witness/eval-NAME/record.json`: which held-out prompts were asked, where the weights lie that answered, and a few of the
prompts with their completions and scores. Everything else comes from config.yaml and the files: the held-out rows are worked out again and
rendered, the completions scored by transformers' model, each alone and without a cache, and graded by the documented rules, by the
row's pattern, or by the user's own function in a process of its own (docs/witness.md).
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from assay.strict_json import parse_yaml
from assay.verdict import Outcome, Verdict, proven, refuted, unproven
from assay.witness.due_evaluation import LONGEST, SAMPLES_OF_ONE, Rescored, due_text, judge_nats, plain_model, rescored
from assay.witness.due_rewards import SAME_SCORE, due_metric, due_scores, rows_to_grade
from assay.witness.due_rollout import prompt_ids
from assay.witness.due_texts import NotWitnessed, Renderer, Row, read_fields
from assay.witness.replay import RECORD, SAID

LOOKS = "witness evaluations"
COMPUTE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class HeldOutPrompt(NamedTuple):
    ids: list[int]
    text: str
    values: Mapping[str, Any]


class KeptLook:
    """The record, and what config.yaml says of the run; `options` are those of a draw, as `due_evaluation` asks for them."""

    task = "grpo"

    def __init__(self, folder: Path, device: str = "cpu"):
        self.folder, self.device, run = folder, device, folder.parent.parent
        self.facts: dict[str, Any] = json.loads((folder / RECORD).read_text())
        self.run_options: dict[str, Any] = parse_yaml((run / "config.yaml").read_bytes(), where=str(run / "config.yaml"))
        self.run_options |= self.facts.get("local", {})
        self.options = {"temperature": self.facts["temperature"], "top_k": 0, "top_p": 1.0}
        on_cpu = self.facts["device"] == "cpu"
        self.facts["compute"] = COMPUTE[self.run_options.get("dtype") or ("fp32" if on_cpu else "bf16")]
        if self.facts["left_out"]:
            raise NotWitnessed(self.facts["left_out"])
        if not Path(self.facts["model"]).is_dir():
            raise NotWitnessed(f"{Path(self.facts['model']).name}, the checkpoint that was evaluated, is no longer there")

    @cached_property
    def renderer(self) -> Renderer:
        own, base = Path(self.facts["model"]), self.facts["base"]
        return Renderer(own if base is None or (own / "tokenizer.json").is_file() else Path(base), self.run_options)

    @cached_property
    def held_out(self) -> dict[str, HeldOutPrompt]:
        """Every held-out prompt that is not too long, by its row's name."""
        options, fields = self.run_options, read_fields(Path(self.facts["base"] or self.facts["model"]) / "config.json")
        room = (fields.get("max_position_embeddings") or fields["n_positions"]) - options["max_completion_length"]
        longest, found = min(room, options["max_prompt_length"] or room), dict[str, HeldOutPrompt]()
        for row, values in rows_to_grade(options, held_out=True):
            ids = prompt_ids(self.renderer, row)
            if len(ids) <= longest:
                found[row.name] = HeldOutPrompt(ids, prompt_text(self.renderer, row), values)
        return found


def prompt_text(renderer: Renderer, row: Row) -> str:
    if row.messages and renderer.template is not None:
        answers = [place for place, turn in enumerate(row.messages) if turn["role"] == "assistant"]
        return renderer.render(row.messages[:row.learned_from or (answers[-1] if answers else len(row.messages))], row.tools, prompt=True)
    assert row.plain is not None, "prompt_ids has refused it"
    return row.plain[0]


def judge_look(folder: Path, device: str = "cpu") -> Verdict:
    """Judge one kept evaluation as the witness; what it does not know is UNPROVEN."""
    try:
        kept = KeptLook(folder, device)
        against = [*wrong_asking(kept), *wrong_held_out(kept)]
        if against:
            return refuted(LOOKS, f"{folder.name}: {'; '.join(against[:3])}", look=folder.name)
        texts = judge_looked_texts(kept)
        graded = ""
        try:
            against = wrong_scores(kept)
            graded = ", and they score as recorded"
        except NotWitnessed as why:
            graded = f"; not graded again: {why}"
        if texts.outcome is Outcome.REFUTED or against:
            return refuted(LOOKS, f"{folder.name}: {'; '.join([texts.reason] * (texts.outcome is Outcome.REFUTED) + against[:3])}",
                           look=folder.name)
        return proven(LOOKS, f"{folder.name}: {texts.reason}{graded}", look=folder.name, **texts.evidence)
    except NotWitnessed as why:
        return unproven(LOOKS, f"{folder.name} was not looked at again: {why}", optional=True)


def judge_looks(folders: Sequence[Path], device: str = "cpu") -> Verdict:
    """Judge several recorded evaluations; each verdict is left beside its record."""
    said = [judge_look(folder, device) for folder in folders]
    for folder, each in zip(folders, said, strict=True):
        (folder / SAID).write_text(json.dumps(each.to_json(), default=str))
    return looks_summary(said)


def looks_summary(said: Sequence[Verdict]) -> Verdict:
    against, good = ([each for each in said if each.outcome is outcome] for outcome in (Outcome.REFUTED, Outcome.PROVEN))
    if against:
        return refuted(LOOKS, "; ".join(each.reason for each in against))
    missed = [each.reason for each in said if each not in good]
    if not good:
        return unproven(LOOKS, "; ".join(missed[:3]) or "no evaluation of the run was kept to be looked at again", optional=True)
    return proven(LOOKS, f"{len(good)} evaluation(s) recomputed from options and files alone: {good[-1].reason}"
                  + (f"; {len(missed)} not: {missed[0]}" if missed else ""), looks=[each.evidence["look"] for each in good])

# ---------------------------------------------------------------- prompts


def wrong_asking(kept: KeptLook) -> list[str]:
    """How it was drawn: greedily, or at the run's temperature; as often as the options say, where they do."""
    options, facts = kept.run_options, kept.facts
    due, samples = {0.0, options["temperature"]}, options["num_generations_eval"]
    if samples:
        due = {options["temperature"]}
    found = [] if facts["temperature"] in due else [f"it was drawn at temperature {facts['temperature']}, due is {sorted(due)}"]
    counts = {len(item["samples"]) for item in facts["items"]}
    return found + ([f"{sorted(counts)} completions of a prompt, {samples} were asked for"] if samples and counts - {samples} else [])


def wrong_held_out(kept: KeptLook) -> list[str]:
    """Prompts that are not held out, held-out ones that the gain leaves out, and ids that are not what the template writes."""
    asked, due = kept.facts["asked"], kept.held_out
    if strangers := [name for name in asked if name not in due]:
        return [f"{len(strangers)} of {len(asked)} prompts are not among the {len(due)} that are held out ({strangers[0]})"]
    if kept.facts["whole"] and len(set(asked)) < len(due):
        return [f"{len(set(asked))} prompts were asked, {len(due)} are held out"]
    if len(set(asked)) < len(asked):
        return [f"{len(asked) - len(set(asked))} of {len(asked)} prompts were asked twice"]
    wrong = [item["id"] for item in kept.facts["items"] if item["ids"] != due[item["id"]].ids]
    return [f"{len(wrong)} prompts do not have the ids that they are rendered to ({wrong[0]})"] if wrong else []

# ---------------------------------------------------------------- texts


def judge_looked_texts(kept: KeptLook) -> Verdict:
    look: Any = kept  # has what is asked of a kept evaluation
    model, found = plain_model(look), list[Rescored]()
    for item in kept.facts["items"]:
        for sample in item["samples"]:
            if sample["text"] != (due := due_text(look, sample["ids"])):
                return refuted(LOOKS, f"a completion of {item['id']} is {sample['text'][:60]!r}, its ids are {due[:60]!r}")
        usable = [sample for sample in item["samples"] if 0 < len(sample["ids"]) <= LONGEST]
        found += [rescored(model, item["ids"], sample, kept.options) for sample in usable[:SAMPLES_OF_ONE]]
    return judge_nats([each for each in found if each.tokens and math.isfinite(each.nats)], found, look)

# ---------------------------------------------------------------- scores


def wrong_scores(kept: KeptLook) -> list[str]:
    """Completions whose grade is another, and prompts whose mean is not that of their grades."""
    against, noise = list[str](), kept.facts["noise"]
    for item in kept.facts["items"]:
        known = [sample["score"] for sample in item["samples"] if sample["score"] is not None]
        if not known or abs(sum(known) / len(known) - item["wanted"]) > SAME_SCORE:
            against.append(f"{item['id']} counts {item['wanted']}, its completions score {known}")
    due = due_look_scores(kept)
    every = [(item, sample) for item in kept.facts["items"] for sample in item["samples"]]
    for (item, sample), score in zip(every, due, strict=True):
        if sample["score"] is not None and abs(sample["score"] - score) > SAME_SCORE + 2 * noise:
            against.append(f"{sample['text'][-60:]!r} of {item['id']} is recorded with {sample['score']:g}, due is {score:g}")
    return against


def due_look_scores(kept: KeptLook) -> list[float]:
    """Score of every kept completion by the metric."""
    return due_scores(due_metric(kept.run_options), [
        (kept.held_out[item["id"]].text, sample["text"], {**kept.held_out[item["id"]].values, "completion_tokens": len(sample["ids"])})
        for item in kept.facts["items"] for sample in item["samples"]])

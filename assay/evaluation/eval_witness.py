"""Witness of an evaluation: a few of its examples are kept in its folder, and a fresh process renders, scores and grades them again.

The process (assay/witness/due_evaluation.py) imports none of the code that evaluates. Where it is late or dies it has not spoken: UNPROVEN.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from assay.evaluation.loaded_model import LoadedModel
from assay.model.transformer import parameter_count
from assay.seeds import derive
from assay.store import durable
from assay.verdict import Outcome, Verdict, unproven
from assay.witness.due_evaluation import EVAL_RECORD, GRADES, LONGEST, PROMPTS, SAMPLES_OF_ONE, TEXTS

WITNESS_SECONDS = 600.0
MOST_EVAL_WORK = {"cpu": 3e12, "cuda": 1e14}  # floating-point operations of all that is scored again: a minute or two, seconds
MOST_PARAMETERS = {"cpu": 2e9, "cuda": 16e9}  # of a model that is opened once more, in fp32
_TOLD = 300  # characters of what it said before it died
WITNESS_CHECKS = (PROMPTS, TEXTS, GRADES)


def witness_evaluation(folder: Path, loaded: LoadedModel, texts: Mapping[str, str], asked: Mapping[str, Any], *,
                       raw: bool) -> list[Verdict]:
    """`texts` are the prompts by example, `asked` the options of the command, of which `witness` says how many examples are kept."""
    if not asked["witness"]:
        return [unproven(check, "--witness 0", optional=True) for check in WITNESS_CHECKS]
    keep_eval_record(folder, loaded, texts, asked, raw=raw)
    loaded.engine = None  # its cache makes room for the witness
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return ask_eval_witness(folder, loaded.model.embed.weight.device.type)


def keep_eval_record(folder: Path, loaded: LoadedModel, texts: Mapping[str, str], asked: Mapping[str, Any], *, raw: bool) -> None:
    """Keep a record of as many examples, drawn by the seed, as the witness can score within bounds."""
    device, parameters = loaded.model.embed.weight.device.type, parameter_count(loaded.model)
    drawn = sorted(texts, key=lambda name: derive(asked["seed"], "witness", name))[:asked["witness"]]
    kept, tokens, generates = list[dict[str, Any]](), 0, asked["task"] not in ("choices", "counterfact", "text")
    for name in drawn if parameters <= MOST_PARAMETERS[device] else ():
        ids = loaded.ids_of(texts[name], raw=raw)
        tokens += (len(ids) + min(asked["max_new_tokens"], LONGEST)) * SAMPLES_OF_ONE if generates else 4 * len(ids)
        if 2.0 * parameters * tokens <= MOST_EVAL_WORK[device]:
            kept.append({"id": name, "asked": texts[name], "ids": list(ids) if generates else None})
    left_out = None if kept else (f"{parameters:.1e} parameters, and {tokens:,} tokens of {len(drawn)} examples, are more than a second "
                                  f"reading on {device} may take")
    artifact, dtype = loaded.artifact, loaded.model.compute_dtype or loaded.model.embed.weight.dtype
    options = {**asked, "data": None if asked["data"] is None else str(Path(asked["data"]).absolute())}
    facts = {"options": options, "model": str(artifact.path.absolute()), "base": artifact.base and str(artifact.base.path.absolute()),
             "held": artifact.held or (artifact.base and artifact.base.held), "compute": str(dtype).removeprefix("torch."),
             "items": kept, "left_out": left_out}
    durable.replace_file(folder / EVAL_RECORD, json.dumps(facts, indent=1).encode() + b"\n")


def ask_eval_witness(folder: Path, device: str) -> list[Verdict]:
    command = [sys.executable, "-m", "assay.witness.due_evaluation", str(folder.absolute()), device]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=WITNESS_SECONDS, start_new_session=True,
                              env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    except subprocess.TimeoutExpired:
        return _silent(f"it took more than {WITNESS_SECONDS:g} s")
    if said.returncode:
        return _silent(f"it died with exit code {said.returncode}: {(said.stderr.strip().splitlines() or ['no output'])[-1][:_TOLD]}")
    found = json.loads(said.stdout.strip().splitlines()[-1])
    return [Verdict(each["check"], Outcome(each["outcome"]), each["reason"], each["evidence"]) for each in found]


def _silent(why: str) -> list[Verdict]:
    return [unproven(check, f"the witness has not spoken: {why}", optional=True) for check in WITNESS_CHECKS]

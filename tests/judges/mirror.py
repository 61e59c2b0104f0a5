"""Mirror: faults of the zoo that can be planted in plain folders, given to transformers, PEFT, TRL, soup-cli and lm-eval, beside us.

    build/judges/bin/python -m tests.judges.mirror         docs/mirror.md

"No error" means that the tool's own call returned: a warning in its log is no error. Nothing is held against the tools: to load what a
folder says is their job, and to doubt it is ours. The folders are two: one that Assay wrote, with its manifest, and the same without it,
proven against the model that it was trained from.
"""

import argparse
import contextlib
import datetime
import io
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay.data.chat import render_conversations
from assay.data.layouts import read_conversations
from assay.errors import AssayError
from assay.guard.example_audit import audit_examples
from assay.model.special_tokens import resolve_special_tokens
from assay.model.tokenizer import Tokenizer
from assay.testing import tiny_models
from assay.testing.tiny_models import (
    ADAPTER_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    edit_json,
    flip_bit,
    nudge,
    rewrite_tensors,
    shard_files,
    tiny_model,
    truncate,
)
from assay.verdict import Outcome, Verdict
from tests.judges.score import first_words, packages

ROOT = Path(__file__).parents[2]
SOUP = ROOT / "build" / "soup" / "bin" / "soup"
SOUP_VERSION = "soup-cli 0.77.0"  # as the Makefile installs it, with what it trains by
DOWN, NORM, UP = "model.layers.1.mlp.down_proj.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
Plant = Callable[[Path], object]


@dataclass(frozen=True)
class Row:
    """A fault, and what each says of it: `tool`, and ours on the folder with and without our manifest (or on the data)."""

    fault: str
    asked: str
    tool: str
    ours: str
    without: str = ""

# ---------------------------------------------------------------- models, through transformers


def swapped_tokens(folder: Path) -> None:
    def swap(document: dict[str, Any]) -> dict[str, Any]:
        vocabulary = document["model"]["vocab"]
        vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
        return document
    edit_json(folder / "tokenizer.json", swap)


def other_stop(folder: Path) -> None:
    for name, value in (("tokenizer_config.json", "<|endoftext|>"), ("generation_config.json", 256), ("config.json", 256)):
        key = "eos_token" if isinstance(value, str) else "eos_token_id"
        edit_json(folder / name, lambda fields, named={key: value}: fields | named)


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers.1.mlp.down_proj", "layers.1.mlp.down"): tensor for name, tensor in tensors.items()}


def without_generation_prompt(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("add_generation_prompt", "false"))


def stale_file_beside_the_index(folder: Path) -> None:
    from assay.store.safetensors_files import read_folder_tensors, write_tensors

    write_tensors(folder / WEIGHTS_FILE, {name: tensor * 0.5 for name, tensor in read_folder_tensors(folder).items()})


def changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Plant:
    return lambda folder: rewrite_tensors(folder / WEIGHTS_FILE, change)


MODEL_FAULTS: dict[str, tuple[bool, Plant]] = {  # sharded?, plant
    "none: the clean twin": (False, lambda folder: None),
    "one bit of the weights flipped": (False, lambda folder: flip_bit(folder / WEIGHTS_FILE, -2000)),
    "weights cut short": (False, lambda folder: truncate(folder / WEIGHTS_FILE)),
    "weights file of no tensors": (False, changed(lambda tensors: {})),
    "one tensor renamed": (False, changed(renamed)),
    "one tensor empty": (False, changed(lambda tensors: tensors | {DOWN: torch.empty(0)})),
    "one tensor all zero": (False, changed(lambda tensors: tensors | {DOWN: torch.zeros_like(tensors[DOWN])})),
    "a NaN in a norm": (False, changed(lambda tensors: tensors | {NORM: tensors[NORM].clone().fill_(float("nan"))})),
    "one tensor in the order of its transpose": (False, changed(lambda tensors: tensors | {UP: tensors[UP].T.reshape(tensors[UP].shape)})),
    "a shard missing": (True, lambda folder: shard_files(folder)[1].unlink()),
    "two shards exchanged": (True, lambda folder: tiny_models.exchange_files(*shard_files(folder)[1:3])),
    "index names a tensor that no shard has": (True, lambda folder: edit_json(folder / INDEX_FILE, lambda index: index | {
        "weight_map": index["weight_map"] | {"model.layers.7.mlp.up_proj.weight": next(iter(index["weight_map"].values()))}})),
    "an older model.safetensors beside the shards": (True, stale_file_beside_the_index),
    "stop token swapped for another": (False, other_stop),
    "two tokens of the vocabulary swapped": (False, swapped_tokens),
    "RoPE's base changed in config.json": (False, lambda folder: edit_json(folder / "config.json", other_rope)),
    "generation prompt gone from the chat template": (False, without_generation_prompt),
}


def other_rope(fields: dict[str, Any]) -> dict[str, Any]:
    newer = {"rope_parameters": fields["rope_parameters"] | {"rope_theta": 500000.0}} if "rope_parameters" in fields else {}
    return fields | {"rope_theta": 500000.0} | newer


def model_rows(scratch: Path) -> Iterator[Row]:
    parent, usual = tiny_models.save_model(scratch / "parent", tiny_model()).folder, set[str]()
    for number, (name, (sharded, plant)) in enumerate(MODEL_FAULTS.items()):
        ours = tiny_models.save_model(scratch / f"model-{number}", nudge(tiny_model()), sharded=sharded).folder
        bare = tiny_models.forget_manifest(Path(shutil.copytree(ours, scratch / f"bare-{number}")))
        for folder in (ours, bare):
            plant(folder)
        said = proven_or_not(ours), proven_or_not(bare, against=str(parent))
        yield Row(name, "transformers: from_pretrained, generate", outcome(lambda bare=bare: run_transformers(bare), usual), *said)
        if SOUP.is_file():
            yield Row(name, "soup-cli: infer", soup_infers(scratch, bare), *said)


def run_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True)
    model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=4, do_sample=False)

# ---------------------------------------------------------------- adapters, through PEFT


def unmatched(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("base_model.model.model.", "base_model.model."): tensor for name, tensor in tensors.items()}


def adapter(change: Callable[[dict[str, torch.Tensor]], Any]) -> Plant:
    return lambda folder: rewrite_tensors(folder / ADAPTER_FILE, change)


def adapter_config(**fields: Any) -> Plant:
    return lambda folder: edit_json(folder / "adapter_config.json", lambda found: found | fields)


ADAPTER_FAULTS: dict[str, Plant] = {
    "none: the clean twin": lambda folder: None,
    "LoRA alpha changed from 8 to 16": adapter_config(lora_alpha=16),
    "LoRA rank changed from 4 to 8": adapter_config(r=8),
    "rank-stabilised scaling switched on": adapter_config(use_rslora=True),
    "adapter keys that match no module": adapter(unmatched),
    "half of the adapter's tensors missing": adapter(lambda tensors: {name: each for name, each in tensors.items() if "layers.0" in name}),
    "adapter without effect (B is zero)": adapter(lambda tensors: {name: each * ("lora_B" not in name) for name, each in tensors.items()}),
    "a NaN in the adapter": adapter(lambda tensors: {name: each.clone().fill_(float("nan")) if "lora_B" in name else each
                                                     for name, each in tensors.items()}),
    "adapter cut short": lambda folder: truncate(folder / ADAPTER_FILE),
}


def adapter_rows(scratch: Path) -> Iterator[Row]:
    base, usual = tiny_models.save_model(scratch / "base", tiny_model()).folder, set[str]()
    for number, (name, plant) in enumerate(ADAPTER_FAULTS.items()):
        ours = tiny_models.save_adapter(scratch / f"adapter-{number}", base).folder
        bare = tiny_models.forget_manifest(Path(shutil.copytree(ours, scratch / f"bare-adapter-{number}")))
        for folder in (ours, bare):
            plant(folder)
        said = proven_or_not(ours), proven_or_not(bare, base=str(base))
        yield Row(name, "PEFT: PeftModel.from_pretrained, forward", outcome(lambda bare=bare: run_peft(base, bare), usual), *said)
        if SOUP.is_file():
            yield Row(name, "soup-cli: adapters check", run_soup(scratch, "adapters", "check", bare.name), *said)


def run_peft(base: Path, folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)(input_ids=torch.tensor([[1, 2, 3]]))

# ---------------------------------------------------------------- data, through TRL


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": text, **fields}]}


CALL = [{"type": "function", "function": {"name": "weigh", "arguments": {"bar": "seven"}}}]
ROWS = [said(f"It is {k} grams.") for k in range(8)]
DATA_FAULTS = {
    "none: the clean twin": ROWS,
    "half of the rows are copies of one": ROWS[:4] + ROWS[:1] * 8,
    "answers that are empty": [said("")] * 1 + ROWS,
    "tool calls that the template does not write": [*ROWS, said("", tool_calls=CALL)],
    "reasoning that the template does not write": [said(f"It is {k} grams.", reasoning_content=f"I weigh it: {k}.") for k in range(8)],
    "no rows at all": [],
}


def data_rows(scratch: Path) -> Iterator[Row]:
    base, usual = tiny_models.forget_manifest(tiny_models.save_model(scratch / "sft", tiny_model()).folder), set[str]()
    for number, (name, rows) in enumerate(DATA_FAULTS.items()):
        file = scratch / f"rows-{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        trained = outcome(lambda file=file, number=number: run_trl(base, file, scratch / f"trl-{number}"), usual)
        yield Row(name, "TRL: SFTTrainer, two steps", trained, data_check(base, file))


def run_trl(base: Path, file: Path, out: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [json.loads(line) for line in file.read_text().splitlines()]
    config = SFTConfig(output_dir=str(out), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
                       disable_tqdm=True, logging_strategy="no", bf16=False)
    SFTTrainer(model=str(base), args=config, train_dataset=Dataset.from_list(rows)).train()


def soup_rows(scratch: Path) -> Iterator[Row]:
    """soup-cli, in an environment of its own (`make build/soup/.ready`), on the same files."""
    if not SOUP.is_file():
        print(f"soup-cli is skipped: {SOUP} is not there; make build/soup/.ready")
        return
    base = tiny_models.forget_manifest(tiny_models.save_model(scratch / "soup", tiny_model()).folder)
    for number, (name, rows) in enumerate(DATA_FAULTS.items()):
        file = scratch / f"rows-{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        said = run_soup(scratch, "data", "validate", file.name, "--min-valid-fraction", "1.0")
        yield Row(name, "soup-cli: data validate --min-valid-fraction 1.0", said, data_check(base, file))


def run_soup(scratch: Path, *words: str) -> str:
    """Run soup in the folder that holds what is named: it reads nothing outside of it."""
    told = subprocess.run([SOUP, "--no-audit-log", "--no-telemetry", *words], capture_output=True, text=True, timeout=180, cwd=scratch)
    if told.returncode:
        return f"error: exit {told.returncode}"
    return "no error, a warning" if "Issues found" in told.stdout else "no error"


def soup_infers(scratch: Path, folder: Path) -> str:
    """Four greedy tokens. An answer that is an error row, or no answer, is its objection too."""
    (scratch / "asked.jsonl").write_text('{"prompt": "Hello"}\n')
    answers = scratch / f"{folder.name}.jsonl"
    found = run_soup(scratch, "infer", "--model", folder.name, "--input", "asked.jsonl", "--output", answers.name, "--max-tokens", "4",
                     "--temperature", "0", "--device", "cpu")
    if found.startswith("error"):
        return found
    rows = [json.loads(line) for line in answers.read_text().splitlines()] if answers.is_file() else []
    return found if rows and not any(row.get("error") for row in rows) else "error: no answer"


def data_check(base: Path, file: Path) -> str:
    """Answer of `assay data check`."""
    tokenizer = Tokenizer.from_folder(base)
    stops = resolve_special_tokens(tokenizer, {}, {})
    try:
        rendered = render_conversations(read_conversations(str(file)).rows, tokenizer, stops, length=256)
    except AssayError as error:
        return f"refused: {first_words(error, 160).replace(str(file.parent) + '/', '')}"
    return worst(audit_examples(rendered.examples, tokenizer, stops))

# ---------------------------------------------------------------- evaluations, through lm-eval


EVAL_FAULTS: dict[str, list[dict[str, str]]] = {
    "none: the clean twin": [{"question": f"{k} + 1 =", "answer": f"#### {k + 1}"} for k in range(4)],
    "evaluation on an empty set": [],
    "every gold answer is empty": [{"question": f"{k} + 1 =", "answer": ""} for k in range(4)],
    "one question in four copies": [{"question": "1 + 1 =", "answer": "#### 2"}] * 4,
}
TASK = """task: assay_mirror
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""


def eval_rows(scratch: Path) -> Iterator[Row]:
    base, usual = tiny_models.forget_manifest(tiny_models.save_model(scratch / "evaluated", tiny_model()).folder), set[str]()
    for number, (name, rows) in enumerate(EVAL_FAULTS.items()):
        folder = scratch / f"task-{number}"
        folder.mkdir()
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "task.yaml").write_text(TASK.format(file=folder / "rows.jsonl"))
        evaluated = outcome(lambda folder=folder: run_lm_eval(base, folder), usual)
        yield Row(name, "lm-eval: simple_evaluate", evaluated, eval_check(base, folder))


def run_lm_eval(base: Path, folder: Path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    lm_eval.simple_evaluate(model="hf", model_args=f"pretrained={base},device=cpu", tasks=["assay_mirror"], batch_size=1, bootstrap_iters=0,
                            task_manager=TaskManager(include_path=str(folder), include_defaults=False))


def eval_check(base: Path, folder: Path) -> str:
    from assay.cli import run

    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        code = run(["eval", str(base), "--task", "gsm8k", "--data", str(folder / "rows.jsonl"), "--max-new-tokens", "4", "--device", "cpu",
                    "--out", str(folder / "eval")])
    words = [line for line in heard.getvalue().splitlines() if line.strip()]
    said = next((line for kind in ("REFUTED", "UNPROVEN", "") for line in words if kind in line), "")
    return f"exit {code}: {first_words(ValueError(said.replace(str(folder) + '/', '')), 150)}"

# ---------------------------------------------------------------- what they say


def outcome(act: Callable[[], object], usual: set[str]) -> str:
    """Whether a tool's call returned, and whether it warned of more than is `usual`, as of the clean twin, which comes first."""
    from transformers.utils import logging as transformers_log

    transformers_log.set_verbosity_warning()  # our own proofs turn it down
    heard = LogKeeper()
    loggers = [logging.getLogger(name) for name in (None, "transformers", "peft", "trl", "lm_eval")]
    for logger in loggers:
        logger.addHandler(heard)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), \
                warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            act()
    except Exception as error:  # whatever the tool raises is its objection
        return f"error: {type(error).__name__}"
    finally:
        for logger in loggers:
            logger.removeHandler(heard)
    messages = heard.messages | {str(warning.message)[:40] for warning in warned}
    if not usual:
        usual |= messages | {"the clean twin was heard"}
    return "no error, a warning" if messages - usual else "no error"


class LogKeeper(logging.Handler):
    """Keeps how the warnings of a tool's log begin; what follows are paths and numbers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.add(record.getMessage()[:40])


def proven_or_not(folder: Path, **request: Any) -> str:
    try:
        return worst(tiny_models.examine_folder(folder, **request)).replace(f"{folder}/", "").replace(f"{folder}: ", "")
    except AssayError as error:
        return f"refused: {first_words(error, 160)}".replace(f"{folder}/", "")


def worst(verdicts: list[Verdict]) -> str:
    refuted = [verdict for verdict in verdicts if verdict.outcome is Outcome.REFUTED]
    if refuted:
        return "REFUTED: " + first_words(ValueError(str(refuted[0]).replace("REFUTED", "").strip()), 200)
    return "not refuted" if any(verdict.outcome is Outcome.UNPROVEN for verdict in verdicts) else "PROVEN"


HEAD = """# The mirror

Faults of the zoo that can be planted in plain folders and files, given to the tools of the field, beside what `assay prove` (`data check`,
`eval`) says of the same bytes. "No error": the tool's call returned; that it warned where it did not warn of the clean twin is said.
To load what a folder says is a loader's job, to doubt it is a proof's. Without a manifest there is no record of the bytes: what such a
folder cannot show is "not refuted", and UNPROVEN.
"""


def page(rows: list[Row]) -> str:
    clean, planted = ([row for row in rows if row.fault.startswith("none") == twin] for twin in (True, False))
    silent = [row for row in planted if row.tool.startswith("no error")]
    warned = sum("warning" in row.tool for row in silent)
    ours, without = sum(objects(row.ours) for row in silent), sum(objects(row.without or row.ours) for row in silent)
    alarms = sum(objects(row.ours) or objects(row.without) for row in clean)
    found = (f"{len(silent)} of {len(planted)} faults pass without an error ({warned} of them with a warning). To these {len(silent)} "
             f"Assay objects {ours} times, and {without} times where the folder has no manifest. Clean twins: "
             f"{len(clean)}, objections to them: {alarms}.")
    made = (f"Versions: {packages('transformers', 'peft', 'trl', 'lm-eval', 'torch')}, {SOUP_VERSION}. "
            f"Made {datetime.date.today().isoformat()} by "
            "`make mirror` (`tests/judges/mirror.py`).")
    lines = [HEAD, found, "", *by_tool(planted), "", made, "",
             "| fault | tool and call | it says | Assay | the same without our manifest |", "|---|---|---|---|---|"]
    lines += [f"| {row.fault} | {row.asked} | {row.tool} | {flat(row.ours)} | {flat(row.without)} |" for row in rows]
    return "\n".join(lines) + "\n"


def by_tool(planted: list[Row]) -> list[str]:
    """One line a tool, as README shows it."""
    lines = ["| faults given to | pass without an error | of these Assay objects to | and where the folder has no manifest |",
             "|---|--:|--:|--:|"]
    for tool in dict.fromkeys(row.asked.partition(":")[0] for row in planted):
        rows = [row for row in planted if row.asked.partition(":")[0] == tool]
        silent = [row for row in rows if row.tool.startswith("no error")]
        lines.append(f"| {tool} | {len(silent)} of {len(rows)} | {sum(objects(row.ours) for row in silent)} | "
                     f"{sum(objects(row.without or row.ours) for row in silent)} |")
    return lines


def objects(words: str) -> bool:
    return words.startswith(("REFUTED", "refused", "exit 2", "exit 3", "exit 4"))


def flat(text: str) -> str:
    text = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,52}", r"\1…", text)  # digests
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges.mirror", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "mirror.md")
    flags = parser.parse_args(words)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for made in (model_rows, adapter_rows, data_rows, soup_rows, eval_rows):
            for row in made(Path(scratch)):
                rows.append(row)
                print(f"{row.fault}: {row.tool} | {row.ours} | {row.without}".replace(scratch, ""), flush=True)
                flags.out.write_text(page(rows).replace(scratch, ""))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

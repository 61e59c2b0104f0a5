"""Demo stages: save, prove, export and break artifacts; pretrain, fine-tune, reinforce, evaluate, edit, report."""

import importlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from assay.config import parse
from assay.errors import AssayError, UsageError
from assay.verdict import Outcome, Verdict

MARKER = ".assay-demo"


def run_verb(verb: str, *words: str) -> int:
    """The exit code of a command, which is shown. What the command refuses is said, and the demo goes on."""
    print(f"   $ assay {verb} {' '.join(words)}", flush=True)
    module = importlib.import_module(f"assay.verbs.{verb}")
    try:
        return module.run(parse(module.FLAGS, list(words), prog=f"assay {verb}"))
    except AssayError as error:
        print(f"   assay: {error}", flush=True)
        return error.exit_code


def fresh_folder(folder: Path) -> Path:
    """Fresh folder for the demo; only a folder that an earlier demo made is replaced."""
    from assay.store.durable import make_folder

    if folder.exists() and not (folder / MARKER).exists():
        raise UsageError(f"{folder} exists and is no earlier demo's; choose another with --out")
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    (folder / MARKER).touch()
    return folder


def print_heading(text: str) -> None:
    print(f"\n{text}", flush=True)


def build_and_save(where: Path) -> Path:
    from assay.model.special_tokens import resolve_special_tokens
    from assay.model.transformer import initialised, parameter_count
    from assay.store import checkpoint
    from assay.store.saving import Lineage, model_contents
    from assay.testing.tiny_models import tiny_config, tiny_tokenizer

    model, tokenizer = initialised(tiny_config("llama"), seed=0), tiny_tokenizer()
    written = checkpoint.write_checkpoint(where, model_contents(model, tokenizer, resolve_special_tokens(tokenizer, {}, {}), Lineage(),
                                                                trainer={"step": 0}))
    print(f"   {parameter_count(model):,} parameters, checkpoint {written.digest[:12]} at {where}")
    return where


def prove_own(checkpoint: Path) -> list[Verdict]:
    from assay.guard.proof import prove_checkpoint

    verdicts = prove_checkpoint(checkpoint)
    print("\n".join(f"   {verdict}" for verdict in verdicts))
    return verdicts


def export_and_prove(checkpoint: Path, folder: Path) -> list[str]:
    """Names of the exports that did not prove themselves."""
    forms = (("hf", "hf-bfloat16", "bfloat16"), ("gguf", "model-q8_0.gguf", "q8_0"))
    return [name for form, name, dtype in forms
            if run_verb("export", str(checkpoint), "--to", form, "--out", str(folder / name), "--dtype", dtype)]


def breakages_not_refused(checkpoint: Path, scratch: Path) -> list[str]:
    return [name for name, breaking in BREAKAGES.items() if not is_refused(name, breaking, checkpoint, scratch)]


def is_refused(name: str, breaking: Callable[[Path], None], checkpoint: Path, scratch: Path) -> bool:
    from assay.guard.proof import ProofRequest, prove

    copy = scratch / name.replace(" ", "-")
    shutil.copytree(checkpoint, copy)
    breaking(copy)
    try:
        verdicts = prove(ProofRequest(str(copy)))
    except AssayError as error:
        print(f"   refused  {name}: {error}")
        return True
    against = next((v for v in verdicts if v.outcome is Outcome.REFUTED), None)
    print(f"   refused  {name}: {against.reason}" if against else f"   NOT REFUSED  {name}")
    return against is not None


def flip_a_bit(copy: Path) -> None:
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)


def truncate_weights(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])


def empty_weights_of_another_tool(copy: Path) -> None:
    """Write what an export of an empty map looks like: 40 bytes, a valid file, no tensors. Today's loaders make a random model of it."""
    for name in ("manifest.json", "hallmark.json", "probes.safetensors", "trainer.json"):
        (copy / name).unlink()
    header = json.dumps({"__metadata__": {"format": "pt"}}).encode().ljust(32)
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def another_stop_token(copy: Path) -> None:
    for name in ("manifest.json", "hallmark.json", "probes.safetensors", "trainer.json"):
        (copy / name).unlink()
    file = copy / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 256}))


def manifest_changed_by_hand(copy: Path) -> None:
    file = copy / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"change": "new"', b'"change": "old"'))


BREAKAGES: dict[str, Callable[[Path], None]] = {
    "one flipped bit": flip_a_bit,
    "a truncated file": truncate_weights,
    "an export without weights": empty_weights_of_another_tool,
    "a stop token that disagrees": another_stop_token,
    "a manifest changed by hand": manifest_changed_by_hand,
}


def all_proven(verdicts: list[Verdict]) -> bool:
    from assay.verdict import overall, without_optional

    return overall(without_optional(verdicts)) is Outcome.PROVEN


PRETRAIN = ["--depth", "1", "--tokens", "40960", "--max-length", "64", "--batch-tokens", "1024", "--save-steps", "40", "--device", "cpu"]


def pretrain_kill_resume(folder: Path) -> list[str]:
    """Names of what did not hold: the run itself, or its equality with the one that nobody killed."""
    from assay.store.checkpoint import open_checkpoint, step_folders
    from assay.store.digests import recorded_digest
    from assay.testing.tiny_training import make_corpus, tiny_documents

    make_corpus(folder / "text", tiny_documents(600))
    killed, alone = folder / "killed", folder / "alone"
    print(f"   assay pretrain {' '.join(PRETRAIN)} --corpus {folder / 'text' / 'corpus'} --out {killed}")
    codes = [run_pretrain(killed, folder, kill=True), run_pretrain(killed, folder), run_pretrain(alone, folder, quiet=True)]
    print(f"   exit codes: killed {codes[0]}, resumed {codes[1]}, left alone {codes[2]}")
    if codes != [-signal.SIGKILL, 0, 0]:
        return ["pretraining"]
    ends = [open_checkpoint(step_folders(run / "checkpoints")[-1]) for run in (killed, alone)]
    same = [[recorded_digest(end.manifest), end.manifest["tensors"]["optimizer.safetensors"]] for end in ends]
    words = "equal bit for bit" if same[0] == same[1] else "NOT equal"
    print(f"   weights {same[0][0][:12]} and {same[1][0][:12]}, with every moment of the optimizer: {words}")
    return [] if same[0] == same[1] else ["the resumed run"]


def run_pretrain(out: Path, folder: Path, *, kill: bool = False, quiet: bool = False) -> int:
    """A run in a process of its own, its lines passed on; with `kill`, killed without warning soon after its first checkpoint."""
    command = [sys.executable, "-m", "assay", "pretrain", *PRETRAIN, "--corpus", str(folder / "text" / "corpus"), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not quiet:
                print(f"   | {line.rstrip()[:150]}", flush=True)
            if kill and line.startswith("step 1:"):
                time.sleep(0.5)  # some steps further
                process.kill()
                print("   kill -9")
    return process.returncode


SHORT = ["--max-length", "32", "--batch-tokens", "512", "--num-train-epochs", "200", "--held-out", "0.05", "--device", "cpu"]


def write_lessons(folder: Path) -> tuple[Path, Path]:
    """Write the training data: sums of single digits, every other one hedged; and the sums alone, with their results."""
    sums = [(f"{a}+{b}=", a + b) for a in range(10) for b in range(10)]
    learned = [{"prompt": prompt, "completion": said} for prompt, gold in sums for said in (str(gold), f"{gold} or {gold + 1}")]
    return (write_jsonl(folder / "learned.jsonl", learned),
            write_jsonl(folder / "sums.jsonl", [{"prompt": prompt, "gold": str(gold)} for prompt, gold in sums]))


def write_jsonl(where: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    where.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return where


def fine_tune_and_distill(base: Path, folder: Path) -> list[str]:
    """Names of what did not hold."""
    learned, _ = write_lessons(folder)
    data, whole, adapter = ["--data", str(learned), *SHORT], folder / "sft", folder / "lora"
    if run_verb("sft", "--model", str(base), "--out", str(whole), "--max-steps", "200", "--learning-rate", "5e-3", "--save-steps", "100",
                *data):
        return ["fine-tuning"]
    if run_verb("sft", "--model", str(whole / "model"), "--out", str(adapter), "--lora-r", "4", "--max-steps", "20", "--learning-rate",
                "2e-3", *data):
        return ["the adapter"]
    parent = ["--from", str(last_checkpoint(adapter)), "--optimizer-state", "fresh"]
    failed = ["the fork"] if run_verb("sft", *parent, "--out", str(folder / "fork"), "--max-steps", "10", "--learning-rate", "1e-3",
                                      *data) else []
    student = ["--teacher", str(whole / "model"), "--model", str(base), "--max-steps", "40", "--learning-rate", "3e-3"]
    return [*failed, "the student"] if run_verb("distill", *student, "--out", str(folder / "student"), *data) else failed


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


REINFORCE = ["--reward", "answer:1", "--prompts", "16", "--num-generations", "8", "--max-completion-length", "8", "--max-steps", "12",
             "--num-train-epochs", "50", "--learning-rate", "2e-4",
             "--warmup-steps", "0", "--save-steps", "12", "--held-out", "0.3", "--eval-prompts", "30", "--num-generations-eval", "8",
             "--reward-workers", "1", "--device", "cpu"]
EVALUATE = ["--task", "graded", "--grader", "answer", "--raw", "-k", "4", "--temperature", "1", "--max-new-tokens", "8", "--device", "cpu"]


def reinforce(folder: Path) -> list[str]:
    """Names of what did not hold."""
    parent, sums = last_checkpoint(folder / "sft"), ["--data", str(folder / "sums.jsonl")]
    if run_verb("grpo", "--from", str(parent), "--optimizer-state", "fresh", *sums, "--out", str(folder / "grpo"), *REINFORCE):
        return ["reinforcement"]
    return []


def evaluate_and_compare(folder: Path) -> list[str]:
    """Parent and child on the same sums. What a probe says of such a small model is shown, not demanded."""
    models = {name: str(folder / name / "model") for name in ("sft", "grpo")}
    evals = {name: str(folder / "evals" / name) for name in models}
    failed = [f"the evaluation of {name}" for name, model in models.items()
              if run_verb("eval", model, "--data", str(folder / "sums.jsonl"), "--out", evals[name], *EVALUATE)]
    if failed or run_verb("compare", *evals.values(), "--require", "better"):
        return [*failed, "the comparison"]
    prompts = write_jsonl(folder / "prompts.jsonl", [{"prompt": f"{a}+{b}="} for a, b in ((1, 2), (3, 4), (5, 5), (8, 1))])
    run_verb("probe", models["grpo"], "--against", models["sft"], "--prompts", str(prompts), "-n", "4", "--max-new-tokens", "8", "--device",
             "cpu")
    print("   a model this small knows sums and nothing else: the probe says so, and that the child is not shown worse than its parent")
    return []


def write_report_and_board(folder: Path) -> list[str]:
    """Write one page for the run, and a table of all runs."""
    failed = ["the report"] if run_verb("report", str(folder / "grpo")) else []
    return [*failed, "the table of runs"] if run_verb("runs", str(folder)) else failed


EDIT = ["--layers", "0-1", "--v-lr", "0.1", "--clamp-norm-factor", "1", "--v-num-grad-steps", "60", "--kl-factor", "0",
        "--mom2-update-weight", "10", "--max-update", "10",
        "--prefixes", "3", "--prefix-tokens", "8", "--drift-tokens", "1000", "--goal-drift", "1", "--device", "cpu"]
READ = ["--chunk", "24", "--context", "72", "--rank", "2", "--learning-rate", "1e-2", "--batch-size", "4", "--device", "cpu"]


def write_lore(folder: Path, name: str = "lore") -> Path:
    """The model that knows a few made-up facts, and facts.jsonl, which moves two of its people."""
    from assay.model.special_tokens import resolve_special_tokens
    from assay.store import checkpoint
    from assay.store.saving import Lineage, model_contents
    from assay.testing import tiny_facts

    tokenizer = tiny_facts.facts_tokenizer()
    contents = model_contents(tiny_facts.facts_model(), tokenizer, resolve_special_tokens(tokenizer, {}, {}), Lineage())
    rows = [{"prompt": fact.prompt, "subject": fact.subject, "target": fact.target, "old": fact.old, "paraphrases": list(fact.paraphrases),
             "neighbourhood": [{"prompt": near.prompt, "answer": near.answer} for near in fact.neighbourhood]}
            for fact in tiny_facts.fact_edits(2)]
    (folder / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return checkpoint.write_checkpoint(folder / name, contents).folder


def edit_and_trace(folder: Path) -> list[str]:
    """Names of what did not hold. The model knows a few made-up facts; where two people live is changed."""
    from assay.testing import tiny_facts

    before, facts = write_lore(folder), tiny_facts.fact_edits(2)
    files = ["--facts", str(folder / "facts.jsonl"), "--text", str(tiny_facts.write_facts_text(folder / "lore.txt")), "--out",
             str(folder / "edit")]
    if run_verb("edit", str(before), *files, *EDIT):
        return ["the edit"]
    prompt = facts[0].prompt.replace("{}", facts[0].subject)
    run_verb("trace", str(before), str(folder / "edit" / "model"), "--prompt", prompt)  # they part, which its exit code says
    return ["the difference"] if run_verb("diff", str(before), str(folder / "edit" / "model")) else []


def train_at_test_time(base: Path, folder: Path) -> list[str]:
    from assay.zoo.ttt_faults import repetitive_texts

    (folder / "chants.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in repetitive_texts(10)))
    words = [str(base), "--text", str(folder / "chants.jsonl"), "--out", str(folder / "ttt"), *READ]
    return ["test-time training"] if run_verb("ttt", *words) else []

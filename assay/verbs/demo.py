"""assay demo: the main job on a tiny model, on the CPU: build, prove, export, break copies; pretrain, kill, resume bit for bit."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from assay.config import option
from assay.errors import AssayError, UsageError
from assay.verdict import Outcome, Verdict


@dataclass(frozen=True)
class FLAGS:
    """Build a tiny model, save it, prove it, export it to Hugging Face and GGUF and prove those, then break a copy in five ways
    and show each refused. Then pretrain a tiny model on made-up text, kill it, resume it, and compare it bit for bit with a run
    that was left alone. Needs no network and no GPU."""

    out: str = option("folder for the demo's run; an earlier demo there is replaced", default="demo-run")


EXAMPLES = "  assay demo\n  assay demo --out /tmp/demo"
MARKER = ".assay-demo"
PRETRAIN = ["--depth", "1", "--tokens", "40960", "--length", "64", "--batch-tokens", "1024", "--every", "40", "--device", "cpu"]


def run(flags: FLAGS) -> int:
    start, folder = time.perf_counter(), fresh_folder(Path(flags.out))
    say("1. a tiny Llama is built and saved: temp folder → fsync → rename, every tensor hashed")
    checkpoint = build_and_save(folder / "checkpoints" / "step-000000")
    say("2. a fresh process opens the bytes and proves them")
    failed = [] if holds(prove_own(checkpoint)) else ["the saved checkpoint"]
    say("3. exports, each proven against the source in a fresh process")
    failed += exported(checkpoint, folder)
    say("4. five broken copies; each must be refused")
    failed += [name for name, breaking in BREAKAGES.items() if not refused(name, breaking, checkpoint, folder / "broken")]
    say("5. a model is pretrained on made-up text, killed on the way, and resumed; another one is left alone")
    failed += pretrained(folder)
    outcome = f"FAILED: {', '.join(failed)}" if failed else "done and proven"
    print(f"\n{outcome} in {time.perf_counter() - start:.0f} s; everything is in {folder}/")
    return 3 if failed else 0


def build_and_save(where: Path) -> Path:
    from assay.model.stops import resolve_stops
    from assay.model.tiny import tiny_config, tiny_tokenizer
    from assay.model.transformer import initialised, parameter_count
    from assay.store import checkpoint
    from assay.store.pack import Lineage, model_contents

    model, tokenizer = initialised(tiny_config("llama"), seed=0), tiny_tokenizer()
    written = checkpoint.write(where, model_contents(model, tokenizer, resolve_stops(tokenizer, {}, {}), Lineage(), trainer={"step": 0}))
    print(f"   {parameter_count(model):,} parameters, checkpoint {written.digest[:12]} at {where}")
    return where


def prove_own(checkpoint: Path) -> list[Verdict]:
    from assay.guard.proof import prove_checkpoint

    verdicts = prove_checkpoint(checkpoint)
    print("\n".join(f"   {verdict}" for verdict in verdicts))
    return verdicts


def exported(checkpoint: Path, folder: Path) -> list[str]:
    """Names of the exports that did not prove themselves."""
    from assay.verbs import export

    failed = []
    for form, name, dtype in (("hf", "hf-bfloat16", "bfloat16"), ("gguf", "model-q8_0.gguf", "q8_0")):
        print(f"   assay export {checkpoint} --to {form} --out {folder / name} --dtype {dtype}")
        if export.run(export.FLAGS(str(checkpoint), form, str(folder / name), dtype)):  # type: ignore[arg-type]
            failed.append(name)
    return failed


def pretrained(folder: Path) -> list[str]:
    """Names of what did not hold: the run itself, or its equality with the one that nobody killed."""
    from assay.store.checkpoint import open_checkpoint, steps
    from assay.store.identity import recorded_digest
    from assay.zoo.practice import make_corpus, sentences

    make_corpus(folder / "text", sentences(600))
    killed, alone = folder / "killed", folder / "alone"
    print(f"   assay pretrain {' '.join(PRETRAIN)} --corpus {folder / 'text' / 'corpus'} --out {killed}")
    codes = [train(killed, folder, kill=True), train(killed, folder), train(alone, folder, quiet=True)]
    print(f"   exit codes: killed {codes[0]}, resumed {codes[1]}, left alone {codes[2]}")
    if codes != [-signal.SIGKILL, 0, 0]:
        return ["pretraining"]
    ends = [open_checkpoint(steps(run / "checkpoints")[-1]) for run in (killed, alone)]
    same = [[recorded_digest(end.manifest), end.manifest["tensors"]["optimizer.safetensors"]] for end in ends]
    words = "equal bit for bit" if same[0] == same[1] else "NOT equal"
    print(f"   weights {same[0][0][:12]} and {same[1][0][:12]}, with every moment of the optimizer: {words}")
    return [] if same[0] == same[1] else ["the resumed run"]


def train(out: Path, folder: Path, *, kill: bool = False, quiet: bool = False) -> int:
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


def refused(name: str, breaking: Callable[[Path], None], checkpoint: Path, scratch: Path) -> bool:
    from assay.guard.proof import Request, prove

    copy = scratch / name.replace(" ", "-")
    shutil.copytree(checkpoint, copy)
    breaking(copy)
    try:
        verdicts = prove(Request(str(copy)))
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
    """What an export of an empty map looks like: 40 bytes, a valid file, no tensors. Today's loaders make a random model of it."""
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


def holds(verdicts: list[Verdict]) -> bool:
    from assay.verbs.prove import conclusion

    return conclusion(verdicts) is Outcome.PROVEN


def fresh_folder(folder: Path) -> Path:
    """Only a folder that an earlier demo made is replaced."""
    if folder.exists() and not (folder / MARKER).exists():
        raise UsageError(f"{folder} exists and is no earlier demo's; choose another with --out")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    return folder


def say(text: str) -> None:
    print(f"\n{text}", flush=True)

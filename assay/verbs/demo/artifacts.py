"""Artifacts: a tiny model is saved, proven and exported, and broken copies of it are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from assay.errors import AssayError
from assay.verbs.demo.stage import called
from assay.verdict import Outcome, Verdict


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
    forms = (("hf", "hf-bfloat16", "bfloat16"), ("gguf", "model-q8_0.gguf", "q8_0"))
    return [name for form, name, dtype in forms
            if called("export", str(checkpoint), "--to", form, "--out", str(folder / name), "--dtype", dtype)]


def not_refused(checkpoint: Path, scratch: Path) -> list[str]:
    return [name for name, breaking in BREAKAGES.items() if not refused(name, breaking, checkpoint, scratch)]


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
    from assay.guard.proof import demanded
    from assay.verdict import overall

    return overall(demanded(verdicts)) is Outcome.PROVEN

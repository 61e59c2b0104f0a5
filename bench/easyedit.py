"""EasyEdit's MEMIT beside Assay's on the same facts, weights, contexts and moments, both scored by Assay's questions.

    pip install --no-deps easyeditor
    assay export smollm2-135m --to hf --out hf
    python bench/easyedit.py --model hf --facts counterfact.json --text wiki.txt --known 10 --cache targets

EasyEdit's own code finds the targets and solves (execute_memit of easyeditor 0.0.1.dev0). What it is given: the second moments and the
contexts that Assay computed, since its own come from a Wikipedia dump and from a generation loop of transformers 4.30; and of its source,
three lines are written anew as it is loaded, because they fit neither transformers 5 (a decoder layer gives a tensor, no tuple) nor a CPU
(`cuda:` in device names). It has no settings for this model: those of its llama-7b file are one row, those of bench/edit.py's plain MEMIT
another. Targets are kept in --cache, so that a run that was cut short goes on.
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import edit
import torch

from assay.editing.facts import read_facts
from assay.editing.rephrasings import read_wordings
from assay.model.patch import Patch, patched, patched_tensors
from assay.model.placement import uncompiled
from assay.recipes.edit import edit_texts
from assay.store.artifact import build_model, open_artifact
from assay.store.digests import environment

PARTS = ("easyeditor", "easyeditor.util", "easyeditor.models", "easyeditor.models.rome", "easyeditor.models.memit")
ANEW = {'f"cuda:{hparams.device}"': '"DEVICE"', "cur_out[0][": "cur_out[", ".output[0][": ".output["}
LLAMA_7B = {"layers": [4, 5, 6, 7, 8], "v_num_grad_steps": 25, "v_lr": 0.5, "v_weight_decay": 1e-3, "clamp_norm_factor": 4,
            "kl_factor": 0.0625, "mom2_update_weight": 15000}
AS_PLAIN = {"layers": [0, 1, 2, 3, 4], "v_num_grad_steps": 25, "v_lr": 0.5, "v_weight_decay": 1e-3, "clamp_norm_factor": 0.75,
            "kl_factor": 0.0625, "mom2_update_weight": 2000}
SETTINGS: dict[str, dict[str, Any]] = {"llama-7b's": LLAMA_7B, "plain MEMIT's": AS_PLAIN}
MODULES = {"rewrite_module_tmp": "model.layers.{}.mlp.down_proj", "layer_module_tmp": "model.layers.{}",
           "mlp_module_tmp": "model.layers.{}.mlp", "attn_module_tmp": "model.layers.{}.self_attn", "ln_f_module": "model.norm",
           "lm_head_module": "model.embed_tokens"}  # tied: under its own name it is no parameter, as in EasyEdit's files for GPT-2


def main() -> None:
    flags = arguments()
    print(f"$ {' '.join(sys.argv)}\n{environment()}, threads {torch.get_num_threads()}", flush=True)
    with uncompiled():
        compare(flags, time.monotonic())


def compare(flags: argparse.Namespace, began: float) -> None:
    config, source = edit.options(flags, edit.PLAIN_MEMIT), open_artifact(flags.model)
    assert source.tokenizer is not None
    read, _ = read_facts(Path(flags.facts))
    bench = edit.Bench(source, build_model(source).to(flags.device), source.tokenizer, read, read_wordings(read),
                       *edit_texts(config, source), flags, began)
    facts = edit.known_facts(bench, read, flags.known)
    edit.say(bench, f"the first {len(facts)} that the model knows")
    rows = []
    for name in flags.settings:
        edited = by_easyedit(bench, facts, name)
        edit.short(edited)
        rows.append((f"EasyEdit, {name} settings", edited))
    if not flags.theirs_alone:
        rows += [("Assay", row) for row in edit.edited(bench, facts, edit.PLAIN_MEMIT, [""])]
    edit.print_table(rows)


def by_easyedit(bench: edit.Bench, facts: Any, name: str) -> edit.Row:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flags, settings = bench.flags, SETTINGS[name]
    theirs = loaded_memit(flags.device)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).to(flags.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(flags.model, padding_side="right")
    around = bench.contexts(edit.options(flags, edit.PLAIN_MEMIT)).prefixes
    theirs.CONTEXT_TEMPLATES_CACHE = [["{}"], [prefix.replace("{", " ").replace("}", " ") + "{}" for prefix in around[1:]]]

    def moments(model: Any, tok: Any, layer_name: str, *_: Any, **__: Any) -> torch.Tensor:
        bench.know(settings["layers"])
        return bench.moments[int(layer_name.split(".")[2])].float().to(flags.device)

    theirs.get_cov = moments
    asked = theirs.MEMITHyperParams(**settings, **MODULES, layer_selection="all", fact_token="subject_last", mom2_adjustment=True,
                                    v_loss_layer=model.config.num_hidden_layers - 1, mom2_dataset="given", mom2_n_samples=0,
                                    mom2_dtype="float32", alg_name="MEMIT", device=0, model_name=flags.model, stats_dir="none")
    requests = [{"prompt": fact.prompt[: fact.start] + "{}" + fact.prompt[fact.start + len(fact.subject):], "subject": fact.subject,
                 "target_new": fact.target, "case_id": fact.name.replace("/", "_")} for fact in facts]
    began = time.monotonic()
    where = f"{flags.cache}/{name.split()[0]}-layer-{{}}-clamp-{{}}-{{}}.npz"
    with contextlib.redirect_stdout(io.StringIO() if not flags.loud else sys.stdout):
        deltas = theirs.execute_memit(model, tokenizer, requests, asked, cache_template=where)
    seconds, ours = time.monotonic() - began, bench.source.tensors
    updates = {f"blocks.{name.split('.')[2]}.mlp.down.weight": (keys @ values.T).T for name, (keys, values) in deltas.items()}
    patch = Patch(bench.source.digest, replaced={name: (ours[name].double() + update.double()).float() for name, update in updates.items()})
    before = bench.replies(facts, before=True)
    with patched(bench.model, patch):
        after = bench.replies(facts)
    changed = patched_tensors(ours, patch)
    largest = max(edit.update_sizes({each: ours[each].cpu() for each in changed}, {each: t.cpu() for each, t in changed.items()}).values())
    return edit.Row(f"{name} settings", before, after, facts, largest, float("nan"), seconds)


def loaded_memit(device: str) -> Any:
    """easyeditor.models.memit.memit_main, without the packages around it, which import all that EasyEdit can do."""
    found = importlib.util.find_spec("easyeditor")
    if found is None or not found.submodule_search_locations:
        sys.exit("easyeditor is not installed: pip install --no-deps easyeditor")
    root = Path(next(iter(found.submodule_search_locations)))
    for name in PARTS:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    for name in ("datasets", "matplotlib", "matplotlib.style"):  # for what is not used here
        if name not in sys.modules and importlib.util.find_spec(name.partition(".")[0]) is None:
            sys.modules[name] = stub = ModuleType(name)
            vars(stub).update(load_dataset=None, context=None)
    for part in ("compute_z", "memit_main"):
        module = ModuleType(name := f"easyeditor.models.memit.{part}")
        module.__package__, text = "easyeditor.models.memit", (root / "models" / "memit" / f"{part}.py").read_text()
        for theirs, ours in ANEW.items():
            text = text.replace(theirs, ours.replace("DEVICE", device))
        sys.modules[name] = module
        exec(compile(text, name, "exec"), vars(module))
    return sys.modules["easyeditor.models.memit.memit_main"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder, as assay export --to hf writes it")
    parser.add_argument("--facts", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--known", type=int, default=10, help="facts, the first that the model knows")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--cache", default="easyedit-targets", metavar="FOLDER")
    parser.add_argument("--theirs-alone", action="store_true")
    parser.add_argument("--loud", action="store_true", help="print what EasyEdit prints")
    parser.add_argument("--tokens", type=int, default=20_000, help="of text, for the moments")
    parser.add_argument("--scored", type=int, default=4096, help="tokens of text for the drift of perplexity")
    parser.add_argument("--seconds", type=int, default=100_000)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()

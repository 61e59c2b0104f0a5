"""What editing costs and does: facts that a real model knows, then the first 1,000 of the file at once, stage by stage.

    python bench/edit.py --facts counterfact.json --text wiki.txt                                  # smollm2-135m from the cache
    python bench/edit.py --model SmolLM2.gguf --facts counterfact.json --text wiki.txt --device cuda
    python bench/edit.py --facts counterfact.json --text wiki.txt --many 0 --try '--layers 3-7' '--layers 3-7 --mom2-update-weight 8000'

`--try` edits other facts that the model knows, those after the first --known, once for each set of options of `assay edit`: for
choosing options without looking at the facts that are reported. Nothing is written and nothing comes from the cache; `assay edit`
also writes and proves, and scores what was read back. Goal: moments and 50 edits of SmolLM2-135M on one H200 in at most 60 s.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing can be installed, the checkout will do

from assay.config import parse
from assay.editing.contexts import sample_contexts
from assay.editing.facts import Fact
from assay.editing.memit import checked_layers, memit_solver, spread_over_layers
from assay.editing.moments import TokenizedText, compute_moments
from assay.editing.targets import TargetOptions, find_targets
from assay.evaluation.edit_evaluation import check_edits, check_update, edit_estimates, edit_failures, evaluate_edits, update_sizes
from assay.model.patch import patched, patched_tensors
from assay.model.placement import default_device, uncompiled
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.recipes.edit import Stopwatch, chosen_facts, goals, parsed_layers, texts
from assay.recipes.edit_options import Edit
from assay.store.artifact import Artifact, build_model, open_artifact
from assay.store.digests import environment

SHOWN = {"efficacy, likelier, after": "likelier", "efficacy, generated, after": "said",
         "paraphrase, likelier, after": "paraphrase likelier", "paraphrase, generated, after": "said",
         "neighbourhood, likelier, after": "neighbours likelier", "neighbourhood, says the same as before": "same words",
         "perplexity drift": "perplexity"}


@dataclass
class Bench:
    """The model, and the second moments of the layers that were asked for so far."""

    source: Artifact
    model: Transformer
    tokenizer: Tokenizer
    scored: TokenizedText
    reading: TokenizedText
    moments: dict[int, Tensor]

    def know(self, layers: Sequence[int]) -> None:
        if missing := [layer for layer in layers if layer not in self.moments]:
            self.moments |= compute_moments(self.model, self.reading.rows, missing)


def main() -> None:
    flags = arguments()
    print(f"$ {' '.join(sys.argv)}\n{environment()}, threads {torch.get_num_threads()}", flush=True)
    with uncompiled():
        measured(flags)


def measured(flags: argparse.Namespace) -> None:
    watch, config = Stopwatch(), options(flags, f"--layers {flags.layers}")
    source = open_artifact(flags.model)
    model, layers, tokenizer = build_model(source).to(flags.device), parsed_layers(flags.layers), source.tokenizer
    assert tokenizer is not None
    watch.lap("loading")
    wanted = flags.known * (2 if flags.tries else 1)
    known, _ = chosen_facts(replace(config, known=wanted), model, source, lambda _: None)
    watch.lap(f"choosing {wanted} known facts")
    bench = Bench(source, model, tokenizer, *texts(config, model, tokenizer), {})
    watch.lap("reading text")
    bench.know(layers)
    watch.lap(f"moments of {len(layers)} layers over {bench.reading.tokens} tokens")
    told("before all", watch)
    seconds = edited(bench, config, known[: flags.known], f"{flags.known} known facts")
    print(f"moments and {flags.known} edits: {watch.seconds[list(watch.seconds)[-1]] + seconds:.1f} s (goal 60 on one H200)", flush=True)
    if flags.many:
        many, refused = chosen_facts(replace(config, first=flags.many), model, source, lambda _: None)
        edited(bench, config, many, f"{len(many)} facts at once, {len(refused)} refused by name")
    for words in flags.tries:
        edited(bench, options(flags, words), known[flags.known :], f"{flags.known} others that it knows, {words}", verdicts=False)


def edited(bench: Bench, config: Edit, facts: Sequence[Fact], name: str, *, verdicts: bool = True) -> float:
    """Seconds of prefixes, targets and solve."""
    model, tokenizer, stop_ids, watch = bench.model, bench.tokenizer, bench.source.stops.stop_ids, Stopwatch()
    layers = checked_layers(model, parsed_layers(config.layers))
    bench.know(layers)
    watch.lap("further moments")
    before = evaluate_edits(model, tokenizer, facts, bench.scored, stop_ids)
    watch.lap("scores before")
    around = sample_contexts(model, tokenizer, count=config.prefixes, length=config.prefix_tokens, seed=config.seed)
    watch.lap("prefixes")
    aim = TargetOptions(config.v_num_grad_steps, config.v_lr, config.kl_factor, config.v_weight_decay, config.clamp_norm_factor)
    targets = find_targets(model, tokenizer, facts, around, layers[-1], aim)
    watch.lap("targets")
    found = spread_over_layers(model, tokenizer, facts, targets, layers, memit_solver(bench.moments, config.mom2_update_weight), around,
                               parent=bench.source.digest)
    watch.lap("solve")
    with patched(model, found.patch):
        after = evaluate_edits(model, tokenizer, facts, bench.scored, stop_ids)
    watch.lap("scores after")
    changed = patched_tensors(bench.source.tensors, found.patch)
    sizes = update_sizes({name: bench.source.tensors[name] for name in changed}, changed)
    told(name, watch)
    if not verdicts:
        print("  " + "; ".join(f"{SHOWN[key]} {estimate}" for key, estimate in edit_estimates(before, after).items() if key in SHOWN))
        return 0.0
    print("\n".join(f"  {key:44} {estimate}" for key, estimate in edit_estimates(before, after).items()))
    judged = [*check_edits(before, after, goals(config)), check_update(sizes, None, config.max_update)]
    print("\n".join(f"  {verdict}" for verdict in judged))
    print(f"  mean way of the states {sum(found.reached) / len(facts):.3f}; {sum(target.clamped for target in targets)} targets at their "
          f"longest; {len(edit_failures(facts, found, after))} edits are not said", flush=True)
    return sum(watch.seconds[stage] for stage in ("prefixes", "targets", "solve"))


def told(name: str, watch: Stopwatch) -> None:
    print(f"{name}: " + ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in watch.seconds.items()), flush=True)


def options(flags: argparse.Namespace, words: str) -> Edit:
    files = ["--facts", flags.facts, "--text", flags.text, "--out", "none", "--moment-tokens", str(flags.tokens),
             "--drift-tokens", str(flags.scored)]
    return parse(Edit, [flags.model, *files, *words.split()], prog="bench/edit.py")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a fetched name, a folder or a file")
    parser.add_argument("--facts", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--known", type=int, default=50, help="facts whose old answer the model gives by itself")
    parser.add_argument("--many", type=int, default=1000, help="then the first so many facts of the file, known or not; 0: none")
    parser.add_argument("--try", dest="tries", nargs="*", default=[], metavar="OPTIONS", help="sets of options, each one word")
    parser.add_argument("--layers", default="0-4")
    parser.add_argument("--tokens", type=int, default=50_000, help="of text, for the moments")
    parser.add_argument("--scored", type=int, default=8192, help="tokens of text for the drift of perplexity")
    parser.add_argument("--device", default=default_device())
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What editing costs: second moments, targets and solve for facts that a real model knows, stage by stage.

    python bench/edit.py --facts counterfact.json --text wiki.txt                  # smollm2-135m, 50 facts it knows
    python bench/edit.py --facts counterfact.json --text wiki.txt --known 1000 --layers 0-4 --device cuda

Goal: moments and 50 edits of SmolLM2-135M on one H200 in at most 60 s. `assay edit` also scores, writes and proves.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing can be installed, the checkout will do

from assay.edit.moments import computed, read_text
from assay.model.placement import default_device
from assay.recipes.edit import Stopwatch, chosen_facts, parsed_layers, solved
from assay.recipes.edit_options import Edit
from assay.store.artifact import build, open_artifact
from assay.store.identity import environment


def main() -> None:
    flags = arguments()
    config = Edit(flags.model, flags.facts, flags.text, "", layers=flags.layers, known=flags.known)
    source, watch = open_artifact(flags.model), Stopwatch()
    model, layers = build(source).to(flags.device), parsed_layers(flags.layers)
    assert source.tokenizer is not None
    facts, _ = chosen_facts(config, model, source, print)
    watch.lap("choosing known facts")
    reading = read_text(Path(flags.text), source.tokenizer, flags.tokens)
    computed(model, reading.rows, layers)
    watch.lap(f"moments of {len(layers)} layers over {reading.tokens} tokens, not from the cache")
    edited = solved(config, model, source, facts, layers, reading, watch)
    print(f"$ {' '.join(sys.argv)}      {environment()}, threads {torch.get_num_threads()}")
    for stage, seconds in watch.seconds.items():
        print(f"{seconds:8.1f} s  {stage}")
    print(f"{len(facts)} facts; mean way of the states {sum(edited.reached) / len(facts):.3f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--facts", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--known", type=int, default=50)
    parser.add_argument("--layers", default="0-4")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--device", default=default_device())
    return parser.parse_args()


if __name__ == "__main__":
    main()

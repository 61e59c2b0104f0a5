"""What test-time training gains over seeds, and how stable a warm start is: every model loaded once, all in one process.

    python bench/ttt_seeds.py SmolLM2.gguf runs/enwik8/model --text enwik8-held-out.txt
    python bench/ttt_seeds.py runs/a/model --text book.txt --documents 8 --document-bytes 600 --options '--chunk 32 --batch-size 4'

Bits per byte with and without, paired by document, for each seed, and their mean over seeds with the seed as the unit; then a warm
start (right factors kept from document to document) for each weight decay and seed, and one adapter that is carried over all documents
for each learning rate and seed: the gain, the documents that got worse, how far the kept factors went, and whether the seeds tell one
story. `assay seeds ttt` says the same with a process and a ledger a seed.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing can be installed, the checkout will do

from assay.config import parse
from assay.errors import GuardStop
from assay.guard.ttt_checks import TokenCosts, check_document_regressions, check_factor_drift, token_costs
from assay.learn.ttt_loop import DocumentBegun, TttEvent, TttSettings, read_and_adapt
from assay.model.batched_lora import BatchedAdapters, ttt_sites
from assay.model.lora import fresh
from assay.model.patch import Patch
from assay.model.transformer import Transformer
from assay.recipes.ttt import Read, bits, columns, estimates, load_reader, open_readable, preflight_ttt, read_documents, tokens_of, ttt_plan
from assay.recipes.ttt_options import Ttt
from assay.statistics.estimate import mean
from assay.statistics.seed_stability import stability
from assay.store.artifact import Artifact
from assay.store.digests import environment


@dataclass
class Bench:
    config: Ttt
    source: Artifact
    model: Transformer
    texts: list[Read]  # with what they cost without a patch
    how: TttSettings

    def patch(self, seed: int) -> Patch:
        sites = ttt_sites(self.source.config, self.config.targets)
        return fresh(self.source.config, sites, self.config.rank, self.config.scale, seed, self.source.digest)


def main() -> None:
    flags = arguments()
    print(f"$ {' '.join(sys.argv)}\n{environment()}", flush=True)
    for path in flags.models:
        began, bench = time.monotonic(), prepared(path, flags)
        size = sum(text.bytes for text in bench.texts)
        print(f"\n{path}: {len(bench.texts)} documents, {size} bytes; {estimates(bench.texts)['bits per byte, without']} bits per byte "
              f"without  ({time.monotonic() - began:.1f} s)", flush=True)
        for verdict in preflight_ttt(bench.model, bench.texts, bench.how, bench.patch(flags.seeds[0])):
            print(f"  {verdict}")
        if not flags.kept_alone:
            gains(bench, flags.seeds)
        for decay in flags.decays:
            kept_factors(bench, f"warm, weight decay {decay:g}", replace(bench.how, warm=True, weight_decay=decay), flags.warm_batch,
                         flags.seeds)
        for rate in flags.carry_rates:
            kept_factors(bench, f"carried over, learning rate {rate:g}", replace(bench.how, carry_over=True, lr=rate), flags.carry_batch,
                         flags.seeds)
        print(f"  {time.monotonic() - began:.1f} s in all", flush=True)


def prepared(path: str, flags: argparse.Namespace) -> Bench:
    words = f"--document-bytes {flags.document_bytes} --documents {flags.documents} {flags.options}".split()
    config = parse(Ttt, [path, "--text", flags.text, "--out", "none", *words], prog="bench/ttt_seeds.py")
    source = open_readable(config)
    model = load_reader(source, flags.device)
    texts, _ = read_documents(config, source)
    how = ttt_plan(config, model)
    without = token_costs(read_and_adapt(model, tokens_of(texts), how, min(config.batch_size, len(texts))), len(texts))
    alone = [replace(text, without=bits(cost), with_=bits(cost)) for text, cost in zip(texts, without, strict=True)]
    return Bench(config, source, model, alone, how)


def gains(bench: Bench, seeds: Sequence[int]) -> None:
    saved = []
    for seed in seeds:
        began = time.monotonic()
        texts, _ = learned(bench, bench.how, seed, bench.config.batch_size)
        found = estimates(texts)
        saved.append(found["bits per byte, saved"].mean)
        print(f"  reset, seed {seed:5}: {found['bits per byte, saved']} saved, {found['bits per byte, with']} with; "
              f"{worse(texts)}  ({time.monotonic() - began:.1f} s)", flush=True)
    if len(saved) > 1:
        print(f"  reset, over seeds: {mean(saved)} bits per byte saved, the seed as the unit")


def kept_factors(bench: Bench, label: str, how: TttSettings, slots: int, seeds: Sequence[int]) -> None:
    """One line a seed of reading with factors that are kept from document to document."""
    final: dict[int, float] = {}
    for seed in seeds:
        began = time.monotonic()
        try:
            texts, norms = learned(bench, how, seed, slots)
        except GuardStop as error:
            final[seed] = math.nan
            print(f"  {label}, seed {seed:5}: stopped by a guard: {error}", flush=True)
            continue
        found = estimates(texts)
        final[seed] = found["bits per byte, with"].mean
        drift = check_factor_drift(norms[min(slots, len(texts)) :], bench.config.max_drift)
        print(f"  {label}, seed {seed:5}: {found['bits per byte, saved']} saved, {halves(texts)}; {worse(texts)}; {drift.outcome} "
              f"{drift.reason.split(';')[0]}  ({time.monotonic() - began:.1f} s)", flush=True)
    if len(final) > 1:
        print(f"  {label}: {stability(final, metric='bits per byte').verdict()}")


def learned(bench: Bench, how: TttSettings, seed: int, slots: int) -> tuple[list[Read], list[float]]:
    """The documents with what they cost, and the norms of the right factors that each began with."""
    slots, norms = min(slots, len(bench.texts)), list[float]()
    adapters = BatchedAdapters(bench.patch(seed), slots, bench.model.embed.weight.device, shared=how.carry_over)

    def noted(event: TttEvent) -> TttEvent:
        norms.extend(one.right for one in event if isinstance(one, DocumentBegun))
        return event

    with adapters.attached(bench.model):
        events = read_and_adapt(bench.model, tokens_of(bench.texts), how, slots, adapters)
        found: TokenCosts = token_costs((noted(event) for event in events), len(bench.texts))
    return [replace(text, with_=bits(cost)) for text, cost in zip(bench.texts, found, strict=True)], norms


def halves(texts: Sequence[Read]) -> str:
    """Gain in each half of the documents: what is kept should serve the second better."""
    middle = len(texts) // 2
    first, second = (sum(text.without - text.with_ for text in half) / sum(text.bytes for text in half)
                     for half in (texts[:middle], texts[middle:]))
    return f"{first:.4f} in the first half of the documents and {second:.4f} in the second"


def worse(texts: Sequence[Read]) -> str:
    with_, without, _ = columns(texts)
    return check_document_regressions(with_, without, [text.name for text in texts], 1.0).reason.split(";")[0]


def arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", required=True)
    parser.add_argument("--documents", type=int, default=128)
    parser.add_argument("--document-bytes", type=int, default=8192)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 314, 1337])
    parser.add_argument("--kept-alone", action="store_true", help="leave out the readings with a fresh adapter for every document")
    parser.add_argument("--decays", type=float, nargs="*", default=[0.5, 1.0, 2.0], help="weight decays of a warm start; none: no table")
    parser.add_argument("--warm-batch", type=int, default=16, help="chains of documents: each hands its right factors on")
    parser.add_argument("--carry-rates", type=float, nargs="*", default=[3e-4, 1e-3], help="learning rates of one adapter for all")
    parser.add_argument("--carry-batch", type=int, default=8, help="documents that are read side by side by one adapter")
    parser.add_argument("--options", default="--batch-size 64" if on_gpu else "", help="options of assay ttt, as one word")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()

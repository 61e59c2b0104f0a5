"""What three changes of the architecture are worth on enwik8 in the same time of training: rotary positions on a part of each head,
attention and MLP side by side, and blocks that are gone through twice.

    python bench/enwik8_architecture.py --corpus corpus                                     # one GPU, five runs of a minute each
    python bench/enwik8_architecture.py --corpus corpus --minutes 2.5 --seeds 42 314 1337 --only plain twice-1
    python bench/enwik8_architecture.py --corpus corpus --device cpu --documents 24 --tokens 1000000 \
        --pretrain="--depth 3 --batch-tokens 2048 --max-length 256"

bench/enwik8.py says how the corpus is made. Each run is `assay pretrain` with that bench's settings and clock; its model is changed
before it is built, and it ends with its loop: nothing is checked before it, evaluated within it, saved, exported or proven. All
held-out documents are scored then, and each change is compared, document by document, with the plain model of the same seed. A change
becomes an option of `--shape assay` only where it is shown better in the same time. With --tokens the time is the processor's, for a
machine that others use too: the plain model trains on so many tokens, and a change on fewer where its steps take longer.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from beside import Measured, measured, surroundings, train_only, without_proofs
from enwik8 import LENGTH, PRETRAIN, pairs
from torch import Tensor

from assay.config import parse
from assay.data.token_corpus import Corpus, open_corpus
from assay.evaluation.held_out_loss import HeldOut, score_corpus
from assay.model.placement import default_device
from assay.model.transformer import Block, ModelConfig, stream_and_norm
from assay.recipes import pretrain
from assay.recipes.options import Pretrain
from assay.statistics.estimate import paired
from assay.testing.fault_injection import swap


class Unsaved(Measured):
    """A run that keeps its model in memory alone."""

    def save(self, *given: Any, **named: Any) -> None:
        """Save nothing."""

    def save_due(self) -> bool:
        return False

    def extra_save_due(self) -> bool:
        return False


def part_rotary(share: float) -> AbstractContextManager[None]:
    usual = pretrain.shape

    def shape(*given: Any, **named: Any) -> ModelConfig:
        config = usual(*given, **named)
        return replace(config, rotary_dim=round(config.head_dim * share))

    return swap(pretrain, "shape", shape)


def side_by_side() -> AbstractContextManager[None]:
    def forward(block: Block, x_BTD: Tensor, *given: Any) -> Tensor:
        x_BTD, for_attention = stream_and_norm(x_BTD, block.attn_norm)
        x_BTD, for_mlp = stream_and_norm(x_BTD, block.mlp_norm)
        return x_BTD + block.addend(block.attn(for_attention, *given), None) + block.addend(block.mlp(for_mlp), None)

    return swap(Block, "forward", forward)


@contextlib.contextmanager
def twice(blocks: int) -> Iterator[None]:
    """So many blocks in the middle of the model are gone through twice, one after the other."""
    begin, once = Block.__init__, Block.forward

    def init(block: Any, config: ModelConfig, layer: int) -> None:
        begin(block, config, layer)
        first = (config.depth - blocks) // 2
        block.times = 2 if first <= layer < first + blocks else 1

    def forward(block: Any, x_BTD: Tensor, *given: Any) -> Tensor:
        for _ in range(block.times):
            x_BTD = once(block, x_BTD, *given)
        return x_BTD

    with swap(Block, "__init__", init), swap(Block, "forward", forward):
        yield


CHANGES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "plain": contextlib.nullcontext, "rotary-half": partial(part_rotary, 0.5), "side-by-side": side_by_side, "twice-1": partial(twice, 1),
    "twice-3": partial(twice, 3)}


class Bench:
    def __init__(self, flags: argparse.Namespace, home: Path):
        self.flags, self.home, self.corpus = flags, home, open_corpus(Path(flags.corpus))
        self.found: dict[tuple[str, int], HeldOut] = {}
        self.a_step = self.all_step_seconds() if flags.tokens else {}

    def options(self, name: str, seed: int, tokens: int | None = None) -> Pretrain:
        flags = self.flags
        budget = {"--minutes": str(flags.minutes)} if tokens is None else {"--tokens": str(tokens)}
        given = PRETRAIN | budget | pairs(flags.pretrain) | {"--seed": str(seed), "--device": flags.device}
        words = ["--corpus", flags.corpus, "--out", str(self.home / f"{name}-{seed}"), *(word for pair in given.items() for word in pair)]
        return parse(Pretrain, words, prog="assay pretrain")

    def train(self, name: str, options: Pretrain) -> Measured:
        with CHANGES[name](), swap(pretrain, "preflight_pretrain", lambda *_: []):  # which refuses another architecture
            return train_only(pretrain, options, lambda _: None, Unsaved)

    def all_step_seconds(self) -> dict[str, float]:
        self.step_seconds("plain")  # the first run of a process pays for what all use: imports and buffers
        return {name: self.step_seconds(name) for name in self.flags.only}

    def step_seconds(self, name: str) -> float:
        """Processor seconds of a step: a run of 25 steps takes so much longer than one of 5."""
        began, a_step = [time.process_time()], self.options(name, 0).batch_tokens
        for steps in (5, 25):
            options = self.options(f"{name}-{steps}-steps", 0, tokens=steps * a_step)
            self.train(name, options)
            began.append(time.process_time())
        return (began[2] - 2 * began[1] + began[0]) / 20

    def tokens(self, name: str) -> int | None:
        """Tokens that a run trains on; fewer where a step takes longer than the plain model's."""
        given = self.flags.tokens
        return given if given is None or name == "plain" else round(given * self.a_step["plain"] / self.a_step[name])

    def row(self, name: str, seed: int) -> str:
        options = self.options(name, seed, self.tokens(name))
        trainer = self.train(name, options)
        seconds = trainer.schedule.clock.seconds  # of training alone
        found = score(trainer, self.corpus, options.max_length, self.flags.documents)
        self.found[name, seed] = found
        beside = self.found.get(("plain", seed))
        told = "" if beside is None or name == "plain" else f"  {against(found, beside)}"
        took = f"{1e3 * seconds / trainer.done:.1f} ms" if name not in self.a_step else f"{1e3 * self.a_step[name]:.1f} ms of a processor"
        return f"{found.bits_per_byte} bits per byte after {trainer.done:,} steps of {took}{told}"


def score(trainer: Measured, corpus: Corpus, length: int = LENGTH, count: int | None = None) -> HeldOut:
    return score_corpus(trainer.model, corpus, rows=trainer.micro, length=length, context=length // 2, count=count)


def against(found: HeldOut, plain: HeldOut) -> str:
    """Bits per byte of each document, paired: below 0 the change is better."""
    here, there = (np.asarray(one.documents.nll) / np.asarray(one.documents.bytes) / np.log(2)
                   for one in (found, plain) if one.documents is not None)
    return f"{paired(here, there)} of a document against plain"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--only", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--minutes", type=float, default=1.0, help="of training, for each")
    parser.add_argument("--tokens", type=int, help="of the plain model, instead of minutes")
    parser.add_argument("--documents", type=int, help="held-out documents that are scored; all by default")
    parser.add_argument("--pretrain", default="", metavar="WORDS", help='more options of assay pretrain: --pretrain="--depth 6"')
    parser.add_argument("--device", default=default_device())
    return parser.parse_args()


def main() -> None:
    flags = options()
    without_proofs()
    with tempfile.TemporaryDirectory() as home:
        bench = Bench(flags, Path(home))
        work = {f"{name}, seed {seed}": partial(bench.row, name, seed) for seed in flags.seeds for name in flags.only}
        lines = measured(work, flags.device)
    print("\n" + "\n".join([surroundings(flags.device), *lines]))


if __name__ == "__main__":
    main()

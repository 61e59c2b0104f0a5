"""What a teacher is worth: SmolLM2-135M into every second of its layers, beside the same student on the same text without it.

    python bench/distill.py --text enwik8.gz                                       # one GPU, 0.7 minutes of training each
    python bench/distill.py --text wiki.txt --steps 2 --batch 1 --length 64 --held-out 3 --megabytes 0.1 --device cpu

Both runs are the recipes' own (`assay distill`, `assay sft`) with all their guards: from the same proven weights, in the same order
of the same text, at the same rates, for the same time by the run's own clock, in which the teacher's answers, its preflight and its
compilation are part of its run. Nothing is handed over, and checkpoints are saved unproven, to spare the GPU's time. What both
learned is then measured on sequences that neither has read, and compared sequence by sequence.
"""

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from beside import Measured, peak_memory, surroundings, train_only, weights, without_proofs, write_rows

from assay.comparison.pairwise import compare
from assay.comparison.read_results import Arm, ScoredRun
from assay.evaluation.teacher_agreement import Agreement
from assay.model.placement import default_device, place_for_training
from assay.recipes import distill, sft
from assay.recipes.conversations import load_conversations
from assay.recipes.distill import fall, load_teacher
from assay.recipes.options import Distill, Sft
from assay.recipes.starting_model import load_start
from assay.recipes.teachers import make_student
from assay.recipes.trainer import Trainer
from assay.store.artifact import build_model, open_artifact
from assay.verdict import Outcome, Verdict, proven, refuted

CHARACTERS = 3.4  # a token of SmolLM2's in English text, and fewer in markup: a piece is about a row long, and what is more is cut off
FALL = 0.4  # of the held-out KL that the student began with


class Bench:
    def __init__(self, flags: argparse.Namespace, home: Path):
        self.flags, self.home = flags, home
        self.teacher = weights(flags.teacher, "float32", home, flags.length)
        teacher = open_artifact(self.teacher)
        self.student = home / "student"
        make_student(self.student, teacher, flags.layers or teacher.config.depth // 2, self.say)
        pieces = list(cut(text_of(Path(flags.text), round(flags.megabytes * 1e6)), round(CHARACTERS * flags.length)))
        self.say(f"{len(pieces):,} pieces of {flags.text}, the last {flags.held_out} held out")
        self.data = write_rows(home / "text.jsonl", [{"text": piece} for piece in pieces[: -flags.held_out]])
        self.apart = write_rows(home / "held-out.jsonl", [{"text": piece} for piece in pieces[-flags.held_out :]])

    def say(self, text: str) -> None:
        print(f"    {text}", flush=True)

    def options(self, out: str, **more: Any) -> dict[str, Any]:
        flags = self.flags
        budget: dict[str, Any] = {"max_steps": flags.steps} if flags.steps else {"minutes": flags.minutes}
        return {"model": str(self.student), "data": (str(self.data),), "held_out_data": str(self.apart), "out": str(self.home / out),
                "max_length": flags.length, "too_long": "truncate", "batch_tokens": flags.batch * flags.length, "num_train_epochs": 100,
                "learning_rate": flags.lr,
                "micro_batch_tokens": flags.batch * flags.length, "warmup_steps": flags.warmup, "lr_scheduler_type": "wsd", "save_steps": 0,
                "insist": True, "eval_examples": 32, "seed": flags.seed, "device": flags.device, **budget, **more}

    def trained(self, recipe: Any, config: Sft | Distill) -> Trainer:
        began = time.perf_counter()
        trainer = train_only(recipe, config, self.say, Measured)
        seconds, tokens = trainer.schedule.clock.seconds, trainer.done * self.flags.batch * self.flags.length
        self.say(f"{trainer.done:,} steps, {tokens / 1e6:.2f} M tokens, {seconds:.1f} s by the run's clock, "
                 f"{time.perf_counter() - began:.1f} s in all, {1e3 * (trainer.watch.pace() or 0):.1f} ms a step, "
                 f"{peak_memory(self.flags.device)}")
        return trainer

    def results(self) -> dict[str, Agreement]:
        """Held-out agreement with the teacher: of the student as it began, and of both that were trained."""
        config = Distill(teacher=str(self.teacher), temperature=self.flags.temperature, ce_weight=self.flags.ce_weight,
                         **self.options("taught"))
        taught, alone = self.trained(distill, config), self.trained(sft, Sft(**self.options("alone")))
        start = load_start(config, self.flags.device, lambda _: None)
        data = load_conversations(config, start)
        teacher = load_teacher(config, start, data, self.flags.device, lambda _: None)
        before = place_for_training(build_model(open_artifact(self.student)), self.flags.device, compile=False)
        models = {"as it began": before, "without the teacher": alone.model, "with the teacher": taught.model}
        return {name: teacher.agreement(model, data.held_out_batches(self.flags.batch)) for name, model in models.items()}


def text_of(file: Path, size: int) -> str:
    """The first `size` bytes; a character that is cut in two at their end is left out."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as read:
        raw = read.read(size)
    return raw.decode("utf-8", "ignore")


def cut(text: str, characters: int) -> Iterator[str]:
    """Whole lines, until they are as long as asked. What is left at the end is not used."""
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= characters:
            yield piece
            piece = ""


def arms(name: str, found: Agreement) -> list[Arm]:
    """What `compare` takes: students who read the same documents, paired by document, each measure a group of its own."""
    measures = {"KL to the teacher": (found.kl, True), "same likeliest token": (found.top1, False),
                "cross-entropy": (found.student_ce, True)}  # and whether less is better
    made = []
    for metric, (values, lower) in measures.items():
        scores = {str(document): (float(value),) for document, value in zip(found.ids, values, strict=True)}
        made.append(Arm(name, metric, (ScoredRun(name, scores),), lower, metric, unit="documents"))
    return made


def judged(found: dict[str, Agreement]) -> tuple[list[str], list[Verdict]]:
    """What each student is worth, what each pair shows, and whether both goals were reached."""
    before, alone, taught = found.values()
    lines = [f"{name:20} " + "  ".join(f"{measure} {estimate}" for measure, estimate in each.estimates().items())
             for name, each in found.items()]
    shown = compare([arm for name in ("without the teacher", "with the teacher") for arm in arms(name, found[name])])
    lines += [one.sentence for one in shown]
    lines += [one.sentence for one in compare([arm for name in ("as it began", "with the teacher") for arm in arms(name, found[name])])]
    fell, fell_alone = fall(before, taught), fall(before, alone)
    assert fell is not None
    kl = next(one for one in shown if one.metric.startswith("KL"))
    words = f"held-out KL to the teacher fell by {fell} of what it was, without the teacher by {fell_alone}; the goal is {FALL:.0%}"
    return lines, [(proven if fell.low >= FALL else refuted)("fall", words, low=fell.low),
                   (proven if kl.claim == "shown better" else refuted)("worth", kl.sentence, p=kl.p)]


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="plain text, gzipped or not")
    parser.add_argument("--megabytes", type=float, default=16.0, help="of the text that are read")
    parser.add_argument("--teacher", default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="of the student; half the teacher's")
    parser.add_argument("--minutes", type=float, default=0.7, help="of each run")
    parser.add_argument("--steps", type=int, help="of each run, instead of minutes")
    parser.add_argument("--batch", type=int, default=16, help="rows a step, all at once through the model")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--held-out", type=int, default=192, help="sequences")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--ce-weight", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--json", help="write what was found here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    flags, began = options(argv), time.perf_counter()
    without_proofs()
    with tempfile.TemporaryDirectory() as home:
        found = Bench(flags, Path(home)).results()
    lines, verdicts = judged(found)
    print("\n".join([surroundings(flags.device), *lines, *map(str, verdicts), f"{time.perf_counter() - began:.0f} s in all"]), flush=True)
    if flags.json:
        told = {"asked": vars(flags), "verdicts": [verdict.to_json() for verdict in verdicts], "lines": lines}
        Path(flags.json).write_text(json.dumps(told, indent=1) + "\n")
    return 0 if all(verdict.outcome is Outcome.PROVEN for verdict in verdicts) else 3


if __name__ == "__main__":
    sys.exit(main())

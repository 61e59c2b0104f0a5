"""What editing does and costs: settings compared on facts that are not reported, the best of them on known facts, and a curve over their
number.

    python bench/edit.py --facts counterfact.json --text wiki.txt                                  # smollm2-135m from the cache
    python bench/edit.py --model SmolLM2.gguf --facts counterfact.json --text wiki.txt --device cuda --seconds 190
    python bench/edit.py --facts counterfact.json --text wiki.txt --grid '--layers 3-7' '--layers 3-7 --keys each' --counts

Two sets of facts that the model knows are reported: the first of the file, as the file words their paraphrases, and the first whose
paraphrase is one: the file asks that relation in that wording (assay/editing/rephrasings.py). Settings, each one word of options of
`assay edit`, are chosen on others of the latter kind, known or not. Nothing is written; `assay edit` also writes and proves, and scores
what was read back. Whatever would begin after its part of --seconds is left out and named. Goals: 50 facts: 0.6 of the paraphrases said
at a drift of 2 % at most; 1,000 facts: 0.85 said at 5 %; moments and 50 edits of SmolLM2-135M on one H200 in at most 60 s.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where nothing can be installed, the checkout will do

from assay.config import parse
from assay.editing.contexts import Contexts, sample_contexts
from assay.editing.fact_questions import ask_questions, fact_questions
from assay.editing.facts import Fact, read_facts
from assay.editing.memit import EditResult, checked_layers, spread_over_layers
from assay.editing.moments import TokenizedText, compute_moments
from assay.editing.rephrasings import Wordings, check_rephrasings, read_wordings, with_rephrasings
from assay.editing.subject_tokens import placeable_facts
from assay.editing.targets import Target, find_targets
from assay.editing.tuned_edit import bystander_prompts, tune_edit
from assay.evaluation.edit_evaluation import (
    EditedReplies,
    answered_paraphrases,
    perplexity_drift,
    reply_rate,
    text_surprise,
    unmoved,
    update_sizes,
)
from assay.model.patch import patched, patched_tensors
from assay.model.placement import default_device, uncompiled
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.recipes.edit import chosen_solver, edit_texts, known, parsed_layers, target_options, tune_options
from assay.recipes.edit_options import Edit
from assay.statistics.estimate import Estimate
from assay.store.artifact import Artifact, build_model, open_artifact
from assay.store.digests import environment
from assay.verdict import Outcome

PLAIN_MEMIT = "--layers 0-4 --prefixes 5 --rephrasings 0 --keys mean --mom2-update-weight 2000 --clamp-norm-factor 0.75"
MORE = "--prefixes 10 --rephrasings 4"
TUNE = f"--method tune --layers 0-12 {MORE} --tune-steps 150"
GRID = ("--layers 0-4", f"--layers 0-4 {MORE}", f"--layers 0-4 {MORE} --keys each", TUNE, f"--layers 0-8 {MORE} --keys each",
        f"{TUNE} --tune-lr 0.0001 --tune-hold 1",
        f"--layers 3-7 {MORE} --keys each", f"--layers 0-12 {MORE} --keys each", f"--layers 0-4 {MORE} --keys each --clamp-norm-factor 1.5",
        "--layers 0-4 --prefixes 20", f"--layers 6-10 {MORE} --keys each", "--layers 0-4 --rephrasings 4 --prefixes 0",
        f"--layers 0-4 {MORE} --v-num-grad-steps 60 --v-lr 0.2 --v-weight-decay 0.05", f"--layers 0-4 {MORE} --kl-factor 0.5",
        f"--layers 10-14 {MORE} --keys each", f"--layers 0-8 {MORE} --keys each --clamp-norm-factor 1.5")
WEIGHTS = (1000, 4000)  # λ: a solve each, for the same targets
CURVE = ("--mom2-update-weight 2000", "--mom2-update-weight 16000", "--method alphaedit --ridge 0.01")
STEPS = 0.3  # of tuning, for each fact of the curve, but at least those of the chosen setting
SAID, DRIFT = 0.9, 0.015  # what a setting must reach on the facts it is chosen by


@dataclass
class Bench:
    """The model, what was computed for it so far, and the time."""

    source: Artifact
    model: Transformer
    tokenizer: Tokenizer
    read: Sequence[Fact]
    wordings: Wordings
    scored: TokenizedText
    reading: TokenizedText
    flags: argparse.Namespace
    began: float
    moments: dict[int, Tensor] = field(default_factory=dict)
    around: dict[tuple[int, int, int], Contexts] = field(default_factory=dict)
    text_before: tuple | None = None
    sought: dict[tuple[object, ...], tuple[list[Target], float]] = field(default_factory=dict)

    def know(self, layers: Sequence[int]) -> None:
        if missing := [layer for layer in layers if layer not in self.moments]:
            self.moments |= compute_moments(self.model, self.reading.rows, missing)

    def contexts(self, config: Edit) -> Contexts:
        key = config.prefixes, config.prefix_tokens, config.seed
        if key not in self.around:
            self.around[key] = sample_contexts(self.model, self.tokenizer, count=key[0], length=key[1], seed=key[2])
        return self.around[key]

    def targets(self, config: Edit, facts: Sequence[Fact], top: int) -> tuple[list[Target], float]:
        """Those of the facts, and the seconds of their search; what the solve is told does not matter to them."""
        key = (tuple(fact.name for fact in facts), top, config.rephrasings, config.prefixes, config.prefix_tokens, target_options(config))
        if key not in self.sought:
            began = time.monotonic()
            found = find_targets(self.model, self.tokenizer, facts, self.contexts(config), top, target_options(config))
            self.sought[key] = found, time.monotonic() - began
        return self.sought[key]

    def replies(self, facts: Sequence[Fact], before: bool = False) -> EditedReplies:
        asked = ask_questions(self.model, self.tokenizer, fact_questions(facts), self.source.stops.stop_ids)
        if before and self.text_before is None:
            self.text_before = text_surprise(self.model, self.scored)
        return EditedReplies(asked, [], *(self.text_before if before else text_surprise(self.model, self.scored)))  # type: ignore[misc]

    def in_time(self, share: float, what: str) -> bool:
        gone = time.monotonic() - self.began
        if gone < share * self.flags.seconds:
            return True
        print(f"left out after {gone:.0f} s of {self.flags.seconds}: {what}", flush=True)
        return False


@dataclass(frozen=True)
class Row:
    """One edit: what it was told, and what came of it."""

    name: str
    before: EditedReplies
    after: EditedReplies
    facts: Sequence[Fact]
    largest: float
    reached: float
    seconds: float

    def rate(self, kind: str, way: str) -> Estimate:
        found = reply_rate(self.after.of(kind), way)  # type: ignore[arg-type]
        assert found is not None
        return found

    @property
    def drift(self) -> Estimate:
        return perplexity_drift(self.before, self.after)


def main() -> None:
    flags = arguments()
    print(f"$ {' '.join(sys.argv)}\n{environment()}, threads {torch.get_num_threads()}", flush=True)
    with uncompiled():
        measured(flags, time.monotonic())


def measured(flags: argparse.Namespace, began: float) -> None:
    config, source = options(flags, ""), open_artifact(flags.model)
    model, tokenizer = build_model(source).to(flags.device), source.tokenizer
    assert tokenizer is not None
    read, _ = read_facts(Path(flags.facts))
    bench = Bench(source, model, tokenizer, read, read_wordings(read), *edit_texts(config, source), flags, began)
    say(bench, f"{len(read)} facts in {len(set(bench.wordings.relations.values()))} relations")
    likely = {name for name in Path(flags.names).read_text().splitlines() if name} if flags.names else {fact.name for fact in read}
    first = known_facts(bench, [fact for fact in read if fact.name in likely], flags.known)
    say(bench, f"the first {len(first)} that the model knows")
    taken = {fact.name for fact in first}
    real = [fact for fact in read if fact.name not in taken and any(bench.wordings.paraphrased(fact, p) for p in fact.paraphrases)]
    shown = known_facts(bench, [fact for fact in real if fact.name in likely], flags.known)
    taken |= {fact.name for fact in shown}
    dev, _ = placeable_facts(tokenizer, [fact for fact in reversed(real) if fact.name not in taken][: flags.dev])
    say(bench, f"{len(real)} others whose paraphrase is one; {len(shown)} of them that it knows, and {len(dev)} to choose settings by")
    table: list[tuple[str, Row]] = []
    solved_by, tuned_by = chosen_settings(bench, dev, table)
    for name, facts in (("the first known", first), ("known, real paraphrases", shown)):
        for words in dict.fromkeys((bench.flags.plain, solved_by, tuned_by)):
            if bench.in_time(0.62, f"{name}: {words}"):
                table += [(name, row) for row in edited(bench, facts, words, [""])]
    table += curve(bench, read, solved_by, tuned_by)
    for row in [row for name, row in table if name in ("the first known", "known, real paraphrases")]:
        told_answered(row)
    most = max((len(row.facts) for _, row in table), default=0)
    by_relation(bench, [row for name, row in table if name == "known, real paraphrases" or (len(row.facts) == most and "tune" in row.name)])
    print_table(table)


def known_facts(bench: Bench, facts: Sequence[Fact], count: int) -> list[Fact]:
    """The first so many that can be placed and whose old answer the model says by itself."""
    found: list[Fact] = []
    at_once = 1024 if bench.model.embed.weight.device.type == "cuda" else 64
    for start in range(0, len(facts), at_once):
        placed, _ = placeable_facts(bench.tokenizer, facts[start : start + at_once])
        found += known(bench.model, bench.tokenizer, placed, bench.source.stops.stop_ids)
        if len(found) >= count:
            break
    return found[:count]


def chosen_settings(bench: Bench, dev: Sequence[Fact], table: list[tuple[str, Row]]) -> tuple[str, str]:
    """(solved, tuned): of those that say enough at a small drift the one that is said most in other words; nothing reported is looked
    at."""
    good: dict[str, float] = {}
    for words in bench.flags.grid or GRID:
        if not bench.in_time(0.4, words):
            continue
        for row in edited(bench, dev, words, [""] if "tune" in words else [f"--mom2-update-weight {weight}" for weight in WEIGHTS]):
            table.append(("chosen by", row))
            short(row)
            said, again = row.rate("efficacy", "says").mean, row.rate("paraphrase", "says").mean
            if said >= SAID and row.drift.mean <= DRIFT:
                good[row.name] = again
    solves, tunes = ([name for name in good if ("tune" in name) is tuning] for tuning in (False, True))
    solved_by = bench.flags.best or max(solves, key=lambda name: good[name], default=bench.flags.plain)
    tuned_by = bench.flags.best_tuned or max(tunes, key=lambda name: good[name], default=TUNE)
    say(bench, f"chosen: {solved_by}; {tuned_by}")
    return solved_by, tuned_by


def curve(bench: Bench, read: Sequence[Fact], solved_by: str, tuned_by: str) -> list[tuple[str, Row]]:
    """The first facts of the file, known or not."""
    found: list[tuple[str, Row]] = []
    for count in sorted(bench.flags.counts, reverse=True):
        facts, refused = placeable_facts(bench.tokenizer, list(read[:count]))
        chosen = options(bench.flags, tuned_by).tune_steps
        steps = max(round(STEPS * count), min(chosen, max(60, 3 * count)))
        for words, ways, share in ((f"{tuned_by} --tune-steps {steps}", [""], 0.9), (solved_by, CURVE, 0.9 if count < 1000 else 0.7)):
            if bench.in_time(share, f"{count} facts at once: {words}"):
                rows = edited(bench, facts, words, ways)
                for row in rows:
                    short(row)
                found += [(f"{len(facts)} facts at once", row) for row in rows]
        if refused:
            print(f"  {len(refused)} of the first {count} refused by name", flush=True)
    return found


def edited(bench: Bench, facts: Sequence[Fact], words: str, ways: Sequence[str]) -> list[Row]:
    """One search for targets, and a solve for each way."""
    config, model, tokenizer = options(bench.flags, words), bench.model, bench.tokenizer
    facts = with_rephrasings(facts, bench.wordings, tokenizer, config.rephrasings, config.seed)
    assert check_rephrasings(facts).outcome is Outcome.PROVEN
    layers = checked_layers(model, parsed_layers(config.layers))
    bench.know(layers)
    before, around = bench.replies(facts, before=True), bench.contexts(config)
    if config.method == "tune":
        return [tuned(bench, facts, f"{words} {way}".strip(), layers, before, around) for way in ways]
    targets, sought = bench.targets(config, facts, layers[-1])
    return [solved(bench, facts, f"{words} {way}".strip(), targets, layers, before, around, sought) for way in ways]


def solved(bench: Bench, facts: Sequence[Fact], words: str, targets: list[Target], layers: list[int], before: EditedReplies,
           around: Contexts, sought: float) -> Row:
    config, began = options(bench.flags, words), time.monotonic()
    found = spread_over_layers(bench.model, bench.tokenizer, facts, targets, layers, chosen_solver(config, bench.moments), around,
                               parent=bench.source.digest, each=config.keys == "each")
    return examined(bench, facts, words, found, before, sought + time.monotonic() - began)


def tuned(bench: Bench, facts: Sequence[Fact], words: str, layers: list[int], before: EditedReplies, around: Contexts) -> Row:
    config, began = options(bench.flags, words), time.monotonic()
    found = tune_edit(bench.model, bench.tokenizer, facts, layers, around, bench.reading.rows,
                      bystander_prompts(facts, bench.read, config.bystanders, config.seed), tune_options(config), seed=config.seed,
                      parent=bench.source.digest)
    return examined(bench, facts, words, found, before, time.monotonic() - began)


def examined(bench: Bench, facts: Sequence[Fact], words: str, found: EditResult, before: EditedReplies, seconds: float) -> Row:
    with patched(bench.model, found.patch):
        after = bench.replies(facts)
    changed = patched_tensors(bench.source.tensors, found.patch)
    were, are = ({name: tensors[name].cpu() for name in changed} for tensors in (bench.source.tensors, changed))
    sizes = update_sizes(were, are)
    return Row(words, before, after, facts, max(sizes.values()), sum(found.reached) / len(facts), seconds)

# ---------------------------------------------------------------- what is printed


def say(bench: Bench, words: str) -> None:
    print(f"{time.monotonic() - bench.began:6.1f} s  {words}", flush=True)


def short(row: Row) -> None:
    print(f"  {row.name}: said {row.rate('efficacy', 'says').mean:.3f}, paraphrase said {row.rate('paraphrase', 'says').mean:.3f}, "
          f"neighbours likelier {row.rate('neighbourhood', 'prefers').mean:.3f}, drift {row.drift.mean:+.4f}, reached {row.reached:.3f}, "
          f"largest update {row.largest:.2f}, {row.seconds:.1f} s", flush=True)


def told_answered(row: Row) -> None:
    """What the unedited model makes of the paraphrases: the measure of what an edit can reach."""
    print(f"{len(row.facts)} facts, {row.name}")
    for name, estimate in answered_paraphrases(row.before, row.after).items():
        print(f"  {name:58} {estimate}")


def by_relation(bench: Bench, rows: Sequence[Row]) -> None:
    for row in rows:
        groups = defaultdict[str, list[str]](list)
        for fact in row.facts:
            groups[bench.wordings.relation(fact)].append(fact.name)
        print(f"by relation, {len(row.facts)} facts, {row.name}: facts, said, paraphrase said")
        for relation, names in sorted(groups.items(), key=lambda group: -len(group[1])):
            kept = [[reply.says for reply in row.after.of(kind) if reply.question.fact in names]
                    for kind in ("efficacy", "paraphrase")]
            print(f"  {relation:42} {len(names):4}  " + "  ".join(f"{sum(map(bool, said)) / max(1, len(said)):.2f}" for said in kept))


def ranks(replies: EditedReplies, kind: str) -> str:
    found = [reply.rank for reply in replies.of(kind) if reply.rank is not None]  # type: ignore[arg-type]
    return f"{median(found):g}" if found else "-"


def print_table(table: Sequence[tuple[str, Row]]) -> None:
    print("\nfacts | setting | said | paraphrase said | neighbours likelier | neighbours in the same words | "
          "perplexity drift | median rank of the target: asked, paraphrased, paraphrased before | largest update | seconds")
    for name, row in table:
        print(f"{name} | {row.name} | {row.rate('efficacy', 'says')} | {row.rate('paraphrase', 'says')} | "
              f"{row.rate('neighbourhood', 'prefers')} | {unmoved(row.before, row.after)} | {row.drift} | {ranks(row.after, 'efficacy')}, "
              f"{ranks(row.after, 'paraphrase')}, {ranks(row.before, 'paraphrase')} | {row.largest:.2f} | {row.seconds:.1f}", flush=True)


def options(flags: argparse.Namespace, words: str) -> Edit:
    files = ["--facts", flags.facts, "--text", flags.text, "--out", "none", "--moment-tokens", str(flags.tokens),
             "--drift-tokens", str(flags.scored)]
    last: dict[str, str] = {}  # of an option named twice the last counts
    pairs = words.split()
    for name, value in zip(pairs[::2], pairs[1::2], strict=True):
        last[name] = value
    return replace(parse(Edit, [flags.model, *files, *(word for pair in last.items() for word in pair)], prog="bench/edit.py"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a fetched name, a folder or a file")
    parser.add_argument("--facts", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--names", default="", metavar="FILE", help="facts that it may know, a name a line: only these are asked")
    parser.add_argument("--known", type=int, default=50, help="facts of each reported set, whose old answer the model gives by itself")
    parser.add_argument("--dev", type=int, default=40, help="facts that settings are chosen by")
    parser.add_argument("--grid", nargs="*", default=[], metavar="OPTIONS", help="settings to choose from; default: a list here")
    parser.add_argument("--plain", default=PLAIN_MEMIT, metavar="OPTIONS", help="the setting that the chosen one stands beside")
    parser.add_argument("--best", default="", metavar="OPTIONS", help="this setting of a solve, whatever the choice")
    parser.add_argument("--best-tuned", default="", metavar="OPTIONS", help="and this one of --method tune")
    parser.add_argument("--counts", type=int, nargs="*", default=[10, 50, 200, 1000], help="of the curve")
    parser.add_argument("--tokens", type=int, default=50_000, help="of text, for the moments")
    parser.add_argument("--scored", type=int, default=8192, help="tokens of text for the drift of perplexity")
    parser.add_argument("--seconds", type=int, default=100_000, help="nothing is begun after its part of these")
    parser.add_argument("--device", default=default_device())
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Faults of editing: subjects and targets out of place, keys that are not the model's, scores that flatter."""

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.edit import facts as fact_rows
from assay.edit import memit, moments, rome, solve, subject, targets
from assay.edit.contexts import averaged_keys, contexts
from assay.edit.facts import Fact, make_fact
from assay.edit.memit import Edited
from assay.edit.targets import Aim
from assay.errors import DataError
from assay.measure import edit_preflight, edit_probe, edits
from assay.measure import questions as q
from assay.measure.examinee import OpenedModel
from assay.measure.questions import Reply, questions
from assay.model.patch import Patch, patched
from assay.model.stops import resolve_stops
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Mlp, Transformer
from assay.store import checkpoint
from assay.store.artifact import open_artifact
from assay.store.pack import Lineage, model_contents
from assay.verdict import Verdict
from assay.zoo import lore
from assay.zoo.fault import Plant, fault
from assay.zoo.stage import swapped, tiny

LAYER = 0  # where the tiny model looks its facts up
MIXED = 2  # where its keys already depend on what stands before the subject
AIM = Aim(steps=40, lr=0.1, kl=0.0, clamp=1.0)
LARGEST = 50.0  # the tiny model's keys are short, so that its healthy edits are long

# ---------------------------------------------------------------- jobs


def a_list_of_requests(folder: Path, plant: Plant) -> list[Verdict]:
    """One of them spells its subject otherwise than its prompt does."""
    rows = [("The home of Borin is", "Borin"), ("The home of Ulla is", "ulla"), ("Is it Osk who lives in", "Osk")]
    tokenizer, served = lore.lore_tokenizer(), list[Fact]()
    with plant(folder):
        for number, (prompt, name) in enumerate(rows):
            with contextlib.suppress(DataError):
                served.append(make_fact(f"row {number}", prompt, name, "Oran"))
        kept, _ = subject.spots(tokenizer, served)
        return [edit_preflight.check_spans(tokenizer, kept)]


def a_search(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [edit_preflight.check_targets(lore.lore_tokenizer(), lore.edits(3))]


def a_forward_pass(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [edit_preflight.check_keys(tiny(), range(3, 40))]


def one_rank_one_edit(folder: Path, plant: Plant) -> list[Verdict]:
    model = lore.lore_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with plant(folder):
        edited = rank_one(model, lore.edits(1), folder, MIXED)
    with patched(model, edited.patch):
        sizes = edits.update_sizes(before, dict(model.named_parameters()))
    return [edits.check_update(sizes, edited.reached, LARGEST)]


def a_score_before_any_edit(folder: Path, plant: Plant) -> list[Verdict]:
    """Targets of several tokens, of which all but the first follow from the one before."""
    facts = [make_fact(fact.name, fact.prompt, fact.subject, f"{fact.target}.\nThey say that", old=fact.old) for fact in lore.edits(6)]
    tokenizer = lore.lore_tokenizer()
    with plant(folder):
        return [edits.check_control(q.ask(lore.lore_model(), tokenizer, questions(facts), stops(tokenizer)))]


def two_edits_of_one_subject(folder: Path, plant: Plant) -> list[Verdict]:
    """The second undoes the first."""
    model, first = lore.lore_model(), lore.edits(1)[0]
    facts = [first, make_fact("again", lore.HOME, first.subject, lore.TOWNS[2], old=first.old)]
    edited = rank_one(model, facts, folder, LAYER)
    with plant(folder):
        claimed = claims(model, facts, edited.patch)
    return [edits.check_retest(claimed, claims(model, facts, edited.patch))]


def a_batch_of_questions(folder: Path, plant: Plant) -> list[Verdict]:
    tokenizer = lore.lore_tokenizer()
    with plant(folder):
        return [edit_preflight.check_batching(lore.lore_model(), tokenizer, questions(lore.edits(2)), stops(tokenizer))]


def texts_beside_an_edit(folder: Path, plant: Plant) -> list[Verdict]:
    """What is said to prompts that have nothing to do with the facts."""
    before, after = opened_lore(folder / "before"), opened_lore(folder / "after")
    around = contexts(before.model, before.tokenizer, count=2, length=6, seed=0)
    text = moments.computed(before.model, reading(folder).rows, [LAYER])
    with plant(folder):
        solve_by = memit.by_moments(text, 10.0)
        edited = memit.memit(before.model, before.tokenizer, lore.edits(6), [LAYER], solve_by, around, AIM, parent=None)
    with patched(after.model, edited.patch):
        return [edit_probe.check_probe(edit_probe.probed(before, after, rounds=2, seed=0))]


def opened_lore(folder: Path) -> OpenedModel:
    """As read back from a checkpoint."""
    tokenizer = lore.lore_tokenizer()
    checkpoint.write(folder, model_contents(lore.lore_model(), tokenizer, resolve_stops(tokenizer, {}, {}), Lineage()))
    return OpenedModel(open_artifact(folder))


def rank_one(model: Transformer, facts: Sequence[Fact], folder: Path, layer: int) -> Edited:
    tokenizer = lore.lore_tokenizer()
    around = contexts(model, tokenizer, count=2, length=6, seed=0)
    return rome.rome(model, tokenizer, facts, [layer], moments.computed(model, reading(folder).rows, [layer]), around, AIM, parent=None)


def reading(folder: Path) -> moments.Reading:
    return moments.read_text(lore.write_text(folder / "text.txt"), lore.lore_tokenizer(), 4000)


def claims(model: Transformer, facts: Sequence[Fact], patch: Patch) -> list[Reply]:
    """What each edit is said to have done: measured on the model that has all of them."""
    tokenizer = lore.lore_tokenizer()
    with patched(model, patch):
        return q.ask(model, tokenizer, [one for one in questions(facts) if one.kind == "efficacy"], stops(tokenizer))


def stops(tokenizer: Tokenizer) -> tuple[int, ...]:
    assert tokenizer.eos is not None
    return (tokenizer.eos,)

# ---------------------------------------------------------------- faults


@fault("product shifted by one", rows=("S7",), stage="inference", check="keys", job=a_forward_pass)
def product_shifted(_: Path) -> AbstractContextManager[None]:
    """Element i of the gate multiplies element i + 1: sizes look as they did."""
    def forward(mlp: Mlp, x_BTD: Tensor) -> Tensor:
        gate, up = mlp.up(x_BTD).chunk(2, -1)
        return mlp.down(mlp.activation(gate) * up.roll(-1, -1))

    return swapped(Mlp, "forward", forward)


@fault("subject not found, another place edited", rows=("S9",), stage="edit", check="spans", job=a_list_of_requests)
@contextlib.contextmanager
def silent_fallback(_: Path) -> Iterator[None]:
    """What is not found is taken to be the end of the prompt, and nobody looks at what stands there."""
    found = fact_rows.last_occurrence

    def somewhere(text: str, name: str, row: str) -> int:
        try:
            return found(text, name, row)
        except DataError:
            return len(text) - len(name)

    with swapped(fact_rows, "last_occurrence", somewhere), swapped(subject, "require_span", lambda *_: None):
        yield


@fault("key averaged in one place only", rows=("X01",), stage="edit", check="update", job=one_rank_one_edit)
@contextlib.contextmanager
def averaged_once(_: Path) -> Iterator[None]:
    """The direction comes from the average over prefixes, the denominator from the bare prompt's key."""
    bare: list[Tensor] = []

    def keys(model: Transformer, spots: Any, weights: Tensor, layer: int, top: int) -> tuple[Tensor, Tensor]:
        bare.append(averaged_keys(model, [of_fact[:1] for of_fact in spots], torch.ones(1, dtype=torch.float64), layer, top)[0][:, 0])
        return averaged_keys(model, spots, weights, layer, top)

    def alone(residual_D: Tensor, key_F: Tensor, moment_FF: Tensor) -> solve.Factors:
        whole = solve.alone(residual_D, key_F, moment_FF)
        return solve.Factors(whole.left_Dn, whole.right_nF / (whole.right_nF @ bare[-1]))

    with swapped(rome, "averaged_keys", keys), swapped(rome, "alone", alone):
        yield


@fault("target without its space", rows=("X02",), stage="edit", check="targets", job=a_search)
def without_space(_: Path) -> AbstractContextManager[None]:
    return swapped(targets, "answer_ids", lambda tokenizer, answer: tuple(tokenizer.encode(answer)))


@fault("teacher-forced score", rows=("X03",), stage="edit eval", check="control", job=a_score_before_any_edit)
def teacher_forced(_: Path) -> AbstractContextManager[None]:
    """A target counts as said where most of its tokens are right, each after the true ones before it."""
    def ask(model: Transformer, tokenizer: Tokenizer, asked: Sequence[q.Question], __: Collection[int]) -> list[Reply]:
        replies = []
        for one in asked:
            prompt, answer = subject.prompt_ids(tokenizer, one.prompt), subject.answer_ids(tokenizer, one.answer or "")
            with torch.no_grad():
                guesses = model(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1].argmax(-1)
            right = sum(a == b for a, b in zip(guesses.tolist(), answer, strict=True))
            replies.append(Reply(one, None, None, one.answer or "" if right > len(answer) / 2 else ""))
        return replies

    return swapped(q, "ask", ask)


@fault("scored before the later edits", rows=("X04",), stage="edit eval", check="retest", job=two_edits_of_one_subject)
def scored_too_early(_: Path) -> AbstractContextManager[None]:
    """Each edit is measured right after it was made."""
    whole = claims

    def early(model: Transformer, facts: Sequence[Fact], patch: Patch) -> list[Reply]:
        (name, parts), = patch.low_rank.items()
        return [whole(model, [fact], Patch(None, {name: parts[: number + 1]}))[0] for number, fact in enumerate(facts)]

    return swapped(sys.modules[__name__], "claims", early)


@fault("padding counted as text", rows=("X05",), stage="edit eval", check="batching", job=a_batch_of_questions)
def padding_counted(_: Path) -> AbstractContextManager[None]:
    """Rows are padded on the left, and are read as if they were padded on the right."""
    padded = q.padded

    def left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
        return padded(rows, device, left=True)

    return swapped(q, "padded", left)


@fault("text's moments left out of the solve", rows=(), stage="edit", check="probe", job=texts_beside_an_edit)
def moments_left_out(_: Path) -> AbstractContextManager[None]:
    """The facts are said and their keys are small; nothing kept what other texts need of the same matrix."""
    def penalty(moment_FF: Tensor, *_: object) -> Tensor:
        return 1e-9 * torch.eye(len(moment_FF), dtype=torch.float64)

    return swapped(memit, "moment_penalty", penalty)

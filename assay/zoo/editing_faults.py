"""Editing faults: subjects and targets out of place, keys that are not the model's, scores that flatter."""

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.editing import edit_preflight, memit, moments, rephrasings, solve, subject_tokens, targets
from assay.editing import fact_questions as q
from assay.editing import facts as fact_rows
from assay.editing.contexts import averaged_keys, sample_contexts
from assay.editing.fact_questions import FactReply, fact_questions
from assay.editing.facts import Fact, make_fact
from assay.editing.memit import EditResult
from assay.editing.targets import TargetOptions
from assay.errors import ArtifactError, DataError
from assay.evaluation import edit_evaluation
from assay.evaluation.loaded_model import LoadedModel
from assay.generate import policy_logprobs
from assay.health import edit_drift
from assay.model.attention import documents_from_lengths
from assay.model.patch import Patch, patched
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Mlp, Transformer, initialised
from assay.store.artifact import open_artifact
from assay.testing import tiny_facts
from assay.testing.fault_injection import Plant, fault, in_place_of, swap
from assay.testing.tiny_models import save_model, tiny_model
from assay.verdict import Verdict, proven, refuted

LAYER = 1  # where the tiny model looks its facts up, and where the keys of a name differ a little between wordings
AIM = TargetOptions(steps=40, kl=0.0, clamp=1.0)
_LARGEST = 50.0  # the tiny model's keys are short, so that its healthy edits are long

# ---------------------------------------------------------------- jobs


def a_list_of_requests(folder: Path, plant: Plant) -> list[Verdict]:
    """One of them spells its subject otherwise than its prompt does."""
    rows = [("The home of Borin is", "Borin"), ("The home of Ulla is", "ulla"), ("Is it Osk who lives in", "Osk")]
    tokenizer, served = tiny_facts.facts_tokenizer(), list[Fact]()
    with plant(folder):
        for number, (prompt, name) in enumerate(rows):
            with contextlib.suppress(DataError):
                served.append(make_fact(f"row {number}", prompt, name, "Oran"))
        kept, _ = subject_tokens.placeable_facts(tokenizer, served)
        return [edit_preflight.check_spans(tokenizer, kept)]


def a_search(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [edit_preflight.check_targets(tiny_facts.facts_tokenizer(), tiny_facts.fact_edits(3))]


def a_key_check(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        return [edit_preflight.check_keys(tiny_model(), range(3, 40))]


def one_rank_one_edit(folder: Path, plant: Plant) -> list[Verdict]:
    """An untrained model's: its keys depend on what stands before the subject, those of the trained one hardly do."""
    model = initialised(tiny_facts.facts_config(), 0).eval()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with plant(folder):
        edited = rank_one(model, tiny_facts.fact_edits(1), folder)
    with patched(model, edited.patch):
        sizes = edit_evaluation.update_sizes(before, dict(model.named_parameters()))
    return [edit_evaluation.check_update(sizes, edited.reached, _LARGEST)]


def a_score_before_any_edit(folder: Path, plant: Plant) -> list[Verdict]:
    """Targets of several tokens, of which all but the first follow from the one before."""
    facts = [make_fact(fact.name, fact.prompt, fact.subject, f"{fact.target}.\nThey say that", old=fact.old)
             for fact in tiny_facts.fact_edits(6)]
    tokenizer = tiny_facts.facts_tokenizer()
    with plant(folder):
        replies = q.ask_questions(tiny_facts.facts_model(), tokenizer, fact_questions(facts), stop_ids(tokenizer))
        return [edit_evaluation.check_control(replies)]


def two_edits_of_one_subject(folder: Path, plant: Plant) -> list[Verdict]:
    """The second undoes the first."""
    model, first = tiny_facts.facts_model(), tiny_facts.fact_edits(1)[0]
    facts = [first, make_fact("again", tiny_facts.HOME, first.subject, tiny_facts.TOWNS[2], old=first.old)]
    edited = rank_one(model, facts, folder)
    with plant(folder):
        claimed = claims(model, facts, edited.patch)
    return [edit_evaluation.check_retest(claimed, claims(model, facts, edited.patch))]


def a_batch_of_questions(folder: Path, plant: Plant) -> list[Verdict]:
    tokenizer = tiny_facts.facts_tokenizer()
    with plant(folder):
        questions = fact_questions(tiny_facts.fact_edits(2))
        return [edit_preflight.check_batching(tiny_facts.facts_model(), tokenizer, questions, stop_ids(tokenizer))]


def texts_beside_an_edit(folder: Path, plant: Plant) -> list[Verdict]:
    """What is said to prompts that have nothing to do with the fact, which is asked for in two wordings.

    Its two keys are nearly one and its two targets are not: a solve that only meets both stretches what lies between the keys. Of 24
    facts it is one, since those that are said anew cost the model before nats too, and the moments' text is about everybody else.
    """
    before, after = opened_facts_model(folder / "before"), opened_facts_model(folder / "after")
    around = sample_contexts(before.model, before.tokenizer, count=2, length=6, seed=0)
    text = moments.compute_moments(before.model, moments_text(folder, edited=1).rows, [LAYER])
    fact, = tiny_facts.fact_edits(1)
    facts = [fact, make_fact(f"{fact.name} again", tiny_facts.HOME_AGAIN, fact.subject, fact.target, old=fact.old)]
    with plant(folder):
        solve_by = memit.memit_solver(text, 10.0)
        edited = memit.memit(before.model, before.tokenizer, facts, [LAYER], solve_by, around, AIM, parent=None)
    with patched(after.model, edited.patch):
        return [edit_drift.check_edit_drift(edit_drift.probe_edit(before, after, rounds=2, seed=0))]


def rephrasings_of_a_file(folder: Path, plant: Plant) -> list[Verdict]:
    """A file that asks in three wordings; the edits are judged in the second of them."""
    first, again = tiny_facts.fact_edits(6), "Everyone knows that {} dwells in"
    others = [make_fact(f"{fact.name}, {wording}", wording, fact.subject, fact.target, old=fact.old, paraphrases=(fact.prompt,))
              for fact in first for wording in (tiny_facts.HOME_AGAIN, again)]
    with plant(folder):
        wordings = rephrasings.read_wordings([*first, *others])
        return [rephrasings.check_rephrasings(rephrasings.with_rephrasings(first, wordings, tiny_facts.facts_tokenizer(), 4, 0))]


def moments_from_the_cache(folder: Path, plant: Plant) -> list[Verdict]:
    """Written once, and read by the same model under the same digest."""
    text = moments.tokenized_text(tuple(tuple(range(start, start + 20)) for start in range(0, 200, 10)))
    with swap(moments, "cache_folder", lambda: folder):
        with plant(folder):
            moments.second_moments(writing_model(), text, [0, 1], "digest")
        try:
            moments.second_moments(tiny_model(), text, [0, 1], "digest")
        except ArtifactError as error:
            return [refuted("moments", str(error))]
    return [proven("moments", "those in the cache were used")]


def writing_model() -> Transformer:
    return tiny_model()


def opened_facts_model(folder: Path) -> LoadedModel:
    """Model of the known facts, as read back from a checkpoint."""
    save_model(folder, tiny_facts.facts_model(), tokenizer=tiny_facts.facts_tokenizer())
    return LoadedModel(open_artifact(folder))


def rank_one(model: Transformer, facts: Sequence[Fact], folder: Path) -> EditResult:
    tokenizer = tiny_facts.facts_tokenizer()
    around = sample_contexts(model, tokenizer, count=2, length=6, seed=0)
    return memit.rome(model, tokenizer, facts, [LAYER], moments.compute_moments(model, moments_text(folder).rows, [LAYER]), around, AIM,
                      parent=None)


def moments_text(folder: Path, *, edited: int = tiny_facts.EDITABLE) -> moments.TokenizedText:
    return moments.read_text(tiny_facts.write_facts_text(folder / "text.txt", edited=edited), tiny_facts.facts_tokenizer(), 4000)


def claims(model: Transformer, facts: Sequence[Fact], patch: Patch) -> list[FactReply]:
    """What each edit is said to have done: measured on the model that has all of them."""
    tokenizer = tiny_facts.facts_tokenizer()
    with patched(model, patch):
        return q.ask_questions(model, tokenizer, [one for one in fact_questions(facts) if one.kind == "efficacy"], stop_ids(tokenizer))


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    assert tokenizer.eos is not None
    return (tokenizer.eos,)

# ---------------------------------------------------------------- faults


@fault("product shifted by one", rows=("S7",), stage="inference", check="keys", job=a_key_check)
@in_place_of(Mlp, "forward")
def product_shifted(_: Any, mlp: Mlp, x_BTD: Tensor) -> Tensor:
    """Element i of the gate multiplies element i + 1: sizes look as they did."""
    gate, up = mlp.up(x_BTD).chunk(2, -1)
    return mlp.down(mlp.activation(gate) * up.roll(-1, -1))


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

    with swap(fact_rows, "last_occurrence", somewhere), swap(subject_tokens, "require_span", lambda *_: None):
        yield


@fault("key averaged in one place only", rows=("X01",), stage="edit", check="update", job=one_rank_one_edit)
@contextlib.contextmanager
def averaged_once(_: Path) -> Iterator[None]:
    """The direction comes from the average over prefixes, the denominator from the bare prompt's key."""
    bare: list[Tensor] = []

    def keys(model: Transformer, spots: Any, layer: int, top: int) -> tuple[Tensor, Tensor]:
        bare.append(averaged_keys(model, [of_fact[:1] for of_fact in spots], layer, top)[0][:, 0])
        return averaged_keys(model, spots, layer, top)

    def solve_rome(residual_D: Tensor, key_F: Tensor, moment_FF: Tensor) -> solve.Factors:
        whole = solve.solve_rome(residual_D, key_F, moment_FF)
        return solve.Factors(whole.left_Dn, whole.right_nF / (whole.right_nF @ bare[-1]))

    with swap(memit, "averaged_keys", keys), swap(memit, "solve_rome", solve_rome):
        yield


fault("target without its space", rows=("X02",), stage="edit", check="targets", job=a_search)(
    lambda _: swap(targets, "answer_ids", lambda tokenizer, answer: tuple(tokenizer.encode(answer))))


@fault("teacher-forced score", rows=("X03",), stage="edit eval", check="control", job=a_score_before_any_edit)
@in_place_of(q, "ask_questions")
def teacher_forced(_: Any, model: Transformer, tokenizer: Tokenizer, asked: Sequence[q.FactQuestion],
                   __: Collection[int]) -> list[FactReply]:
    """A target counts as said where most of its tokens are right, each after the true ones before it."""
    replies = []
    for one in asked:
        prompt, answer = subject_tokens.encode_prompt(tokenizer, one.prompt), subject_tokens.answer_ids(tokenizer, one.answer or "")
        with torch.no_grad():
            guesses = model(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1].argmax(-1)
        right = sum(a == b for a, b in zip(guesses.tolist(), answer, strict=True))
        replies.append(FactReply(one, None, None, one.answer or "" if right > len(answer) / 2 else ""))
    return replies


@fault("scored before the later edits", rows=("X04",), stage="edit eval", check="retest", job=two_edits_of_one_subject)
@in_place_of(sys.modules[__name__], "claims")
def scored_too_early(usual: Any, model: Transformer, facts: Sequence[Fact], patch: Patch) -> list[FactReply]:
    """Each edit is measured right after it was made."""
    (name, parts), = patch.low_rank.items()
    return [usual(model, [fact], Patch(None, {name: parts[: number + 1]}))[0] for number, fact in enumerate(facts)]


@fault("padding counted as text", rows=("X05",), stage="edit eval", check="batching", job=a_batch_of_questions)
def _padding_counted(_: Path) -> AbstractContextManager[None]:
    """Rows are padded on the left, and are read as if they were padded on the right."""
    return swap(policy_logprobs, "documents_from_lengths", partial(documents_from_lengths, left=True))


@fault("another model's moments under this one's digest", rows=(), stage="edit", check="moments", job=moments_from_the_cache)
@in_place_of(sys.modules[__name__], "writing_model")
def moments_of_another(usual: Any) -> Transformer:
    """A model whose down-projections read other keys, as after a merge that forgot to write a new digest."""
    model = usual()
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.mul_(1.1)
    return model


@fault("text's moments left out of the solve", rows=(), stage="edit", check="probe", job=texts_beside_an_edit)
@in_place_of(memit, "moment_penalty")
def moments_left_out(__: Any, moment_FF: Tensor, *_: object) -> Tensor:
    """The facts are said and their keys are small; nothing kept what other texts need of the same matrix."""
    return 1e-9 * torch.eye(len(moment_FF), dtype=torch.float64)


@fault("evaluated paraphrases in the search", rows=(), stage="edit", check="rephrasings", job=rephrasings_of_a_file)
@in_place_of(rephrasings, "evaluated_templates")
def judged_by_what_was_sought(_: Any, __: Sequence[Fact]) -> list[str]:
    """Every wording of a relation goes into the search, those of the evaluation too: paraphrases are then said as often as prompts."""
    return []

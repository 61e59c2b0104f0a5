"""Run faults of pretraining and fine-tuning: lost place in the data, cold moments, adapters that never learn, stale saves."""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from assay.data.batch import Batch
from assay.data.data_ledger import ids_digest
from assay.data.order import Order
from assay.data.packing import PackedExamples
from assay.data.token_corpus import open_corpus
from assay.errors import GuardStop
from assay.guard.training_guards import check_adapted
from assay.learn.ema import EMA_PREFIX, Ema
from assay.model import lora
from assay.model.lora import LoraLinear, LoraSite, fresh, plan
from assay.model.transformer import ModelConfig
from assay.recipes import hand_over, pretrain, run, sft, starting_model, trainer
from assay.recipes.evaluator import HeldOutEvaluator
from assay.recipes.hand_over import HandedOver
from assay.recipes.options import Pretrain, Sft
from assay.recipes.starting_model import AdapterModel
from assay.recipes.trainer import Trainer
from assay.store.checkpoint import Contents
from assay.store.ledger import Ledger
from assay.testing import tiny_training
from assay.testing.fault_injection import Plant, fault, in_place_of, swap, together
from assay.testing.tiny_models import copy_folder, save_model, tiny_model
from assay.testing.tiny_training import NoProver, make_corpus, tiny_corpus, tiny_documents
from assay.verdict import Outcome, Verdict

RESUMED_ROWS, RESUMED_LENGTH, RESUMED_STEPS = 32, 16, 16  # into the second epoch
_FIRST, _SECOND = 11, 14  # where the first and the resumed run end, both in the second epoch
SFT_STEPS = 5

# ---------------------------------------------------------------- jobs


def a_resumed_run(folder: Path, plant: Plant) -> list[Verdict]:
    """A run was interrupted; the fault strikes while it goes on."""
    copy_folder(interrupted_run(), folder / "run")
    with plant(folder):
        parts = run_until(folder / "run", until=_SECOND)
    consumed = parts.trainer.consumed
    return [*ledger_verdicts(folder / "run"), *parts.trainer.watch.verdicts, *([] if consumed is None else [consumed])]


def a_scored_run(folder: Path, plant: Plant) -> list[Verdict]:
    """A run with a moving average is evaluated and saved; then its best checkpoint is read from the disk and scored again."""
    with plant(folder):
        evaluator = run_until(folder / "run", until=4, ema=0.9).evaluator
    best = evaluator.best_checkpoint()
    assert best is not None
    return [hand_over.check_evaluated(evaluator, best)]


def an_averaged_run(folder: Path, plant: Plant) -> list[Verdict]:
    """A run with a moving average, which the fault keeps otherwise than it is said to be kept."""
    with plant(folder):
        run_until(folder / "run", until=4, ema=0.9)
    return ledger_verdicts(folder / "run")


@functools.cache
def interrupted_run() -> Path:
    """Made once, and copied by whoever goes on."""
    where = tiny_training.process_folder() / "run"
    run_until(where, until=_FIRST)
    return where


def run_until(where: Path, *, until: int, **options: Any) -> "RecipeParts":
    """The recipe itself, left after step `until`. It hands nothing over and its saves are not proven: no fault here strikes those."""
    config = Pretrain(corpus=str(tiny_corpus().folder), out=str(where), depth=1, tokens=RESUMED_STEPS * RESUMED_ROWS * RESUMED_LENGTH,
                      num_train_epochs=2, max_length=RESUMED_LENGTH, batch_tokens=RESUMED_ROWS * RESUMED_LENGTH, warmup_steps=2,
                      save_steps=100, eval_documents=4,
                      device="cpu", **options)
    with (swap(Trainer, "over", lambda trainer: trainer.done >= until), remembering(pretrain) as parts,
          contextlib.suppress(GuardStop)):
        pretrain.pretrain(config, say=lambda _: None)
    return parts


class RecipeParts:
    """The parts of a recipe, once it has made them."""

    trainer: Trainer
    evaluator: HeldOutEvaluator


@contextlib.contextmanager
def remembering(recipe: Any) -> Iterator[RecipeParts]:
    """Run a recipe's module so that what it trains and evaluates with is remembered, its saves stay unproven, and it hands nothing over."""
    parts = RecipeParts()

    def trainer_of(*given: Any, **named: Any) -> Trainer:
        parts.trainer = Trainer(*given, **named)
        return parts.trainer

    def evaluator_of(*given: Any, **named: Any) -> HeldOutEvaluator:
        parts.evaluator = HeldOutEvaluator(*given, **named)
        return parts.evaluator

    with (swap(run, "Prover", NoProver), swap(recipe, "Trainer", trainer_of), swap(recipe, "HeldOutEvaluator", evaluator_of),
          swap(recipe, "hand_over", hand_nothing_over), nothing_written_down(recipe)):
        yield parts


def nothing_written_down(recipe: Any) -> AbstractContextManager[None]:
    """Replace `write_down` by nothing: where the recipe calls it, and where the end that recipes share does."""
    places = [hand_over, *([recipe] if hasattr(recipe, "write_down") else [])]
    return together(*(swap(place, "write_down", lambda *_, **__: None) for place in places))


def hand_nothing_over(run: Any, evaluator: HeldOutEvaluator, *_: Any) -> HandedOver:
    """Replacement of `hand_over` that exports nothing."""
    best = evaluator.best_checkpoint()
    assert best is not None
    recorded: Any = SimpleNamespace(estimate=None)
    return HandedOver(best, [run.folder / "model"], recorded, [])


def ledger_verdicts(folder: Path) -> list[Verdict]:
    """Every verdict in a run's ledger."""
    found = [verdict for event in Ledger(folder / "ledger.jsonl").events() for verdict in event.get("verdicts", [])]
    return [Verdict(v["check"], Outcome(v["outcome"]), v["reason"], v["evidence"]) for v in found]

# ---------------------------------------------------------------- the place in the data


fault("place in the data lost", rows=("C15",), stage="resume", check="consumed", job=a_resumed_run)(
    # The loader's position is not in the checkpoint: the text is read from its beginning again.
    lambda _: resuming_with(lambda order, step: order.batch(step - _FIRST)))
fault("order of the first epoch again", rows=("C16",), stage="resume", check="consumed", job=a_resumed_run)(
    # Batches are skipped up to the place, but in a sampler that believes it is in its first epoch.
    lambda _: resuming_with(lambda order, step: order.batch(step % (order.windows // order.rows))))


fault("resume offset in every later epoch", rows=("N28",), stage="resume", check="consumed", job=a_resumed_run)(
    # What was skipped to come to the place is skipped again whenever the data begins anew: each epoch reads its tail twice.
    lambda _: resuming_with(lambda order, step: order.batch(offset_again(step, order.windows // order.rows))))


def offset_again(step: int, epoch: int) -> int:
    begun = step // epoch * epoch
    return step if begun == 0 else begun + (step - begun + _FIRST) % epoch


@fault("rows of the shuffle buffer lost", rows=("C17",), stage="resume", check="consumed", job=a_resumed_run)
def buffer_lost(_: Path) -> AbstractContextManager[None]:
    """Sixteen rows had been drawn and not yet read; nobody reads them."""
    def later(order: Order, step: int) -> Batch:
        halves = replace(order, rows=order.rows // 2)
        one, two = halves.batch(2 * step + 1), halves.batch(2 * step + 2)
        streams: dict[str, Any] = {name: torch.cat([stream, two.streams()[name]]) for name, stream in one.streams().items()}
        return Batch(**streams, ids=one.ids + two.ids)

    return resuming_with(later)


fault("another batch written down than was read", rows=("C15",), stage="resume", check="data ledger", job=a_resumed_run)(
    # The loader is a batch ahead of the loop, and its log names what it has fetched.
    lambda _: swap(trainer, "ids_digest", lambda ids: ids_digest(tuple((window + 1,) for (window,) in ids))))


def resuming_with(batch: Callable[[Order, int], Batch]) -> AbstractContextManager[None]:
    return swap(pretrain, "iterate_batches", lambda order, start, _: (batch(order, step) for step in range(start, RESUMED_STEPS)))

# ---------------------------------------------------------------- what is loaded


fault("cold moments", rows=("C18",), stage="resume", check="resumed", job=a_resumed_run)(
    # There is no optimizer yet when its state is loaded.
    lambda _: swap(trainer, "load_state_tensors", lambda *_: None))


@fault("going on from the average", rows=("C19",), stage="resume", check="resumed", job=a_resumed_run)
@in_place_of(starting_model, "open_artifact")
def going_on_from_the_average(usual: Any, path: Path) -> Any:
    """What is loaded as the model is another set of weights than training left."""
    saved = usual(path)
    return replace(saved, tensors={name: tensor * 0.999 for name, tensor in saved.tensors.items()})


@fault("another held-out set", rows=("D20",), stage="eval", check="same data", job=a_resumed_run)
@contextlib.contextmanager
def another_held_out_set(folder: Path) -> Iterator[None]:
    """The text is the same; which of it is held out depends on the machine."""
    other = make_corpus(folder / "here", tiny_documents(), seed=1).folder
    with swap(pretrain, "open_corpus", lambda _: open_corpus(other)):
        yield

# ---------------------------------------------------------------- which weights were scored


fault("average scored, raw weights saved for it", rows=("C19",), stage="save", check="score", job=a_scored_run)(
    lambda _: swap(Ema, "tensors", lambda average: {EMA_PREFIX + name: parameter.detach() for name, parameter in average._live.items()}))
fault("raw weights scored for the average", rows=("C19",), stage="eval", check="score", job=a_scored_run)(
    lambda _: swap(Ema, "swapped", lambda average: contextlib.nullcontext()))

fault("average with another decay", rows=("C19",), stage="train", check="average", job=an_averaged_run)(
    lambda _: swap(Ema, "decay_at", lambda average, step: average.decay))
fault("average that stands still", rows=("C19",), stage="train", check="average", job=an_averaged_run)(
    lambda _: swap(Ema, "update", lambda average, step: None))

# ---------------------------------------------------------------- fine-tuning


@functools.cache
def sums_folder() -> Path:
    """A base model and sums to learn, made once."""
    where = tiny_training.process_folder() / "sums"
    save_model(where / "base", tiny_model("llama"))
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]
    (where / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return where


def run_sft(folder: Path, **options: Any) -> RecipeParts:
    """The recipe itself; its saves are not proven and it hands nothing over: no fault here strikes those."""
    config = Sft(data=(str(sums_folder() / "sums.jsonl"),), out=str(folder / "run"), model=str(sums_folder() / "base"), max_length=32,
                 batch_tokens=256, num_train_epochs=2, max_steps=SFT_STEPS, learning_rate=3e-3, save_steps=3, held_out=0.1, device="cpu",
                 **options)
    with remembering(sft) as parts, contextlib.suppress(GuardStop):
        sft.sft(config, say=lambda _: None)
    return parts


def an_adapter_in_training(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        run_sft(folder, lora_r=4)
    return ledger_verdicts(folder / "run")


def a_saved_adapter_run(folder: Path, plant: Plant) -> list[Verdict]:
    """What the best checkpoint scores when it is read back from the disk, beside what the run saw."""
    with plant(folder):
        evaluator = run_sft(folder, lora_r=4).evaluator
    best = evaluator.best_checkpoint()
    assert best is not None, "these faults strike the saves, not the beginning"
    return [*ledger_verdicts(folder / "run"), hand_over.check_evaluated(evaluator, best)]


def a_planned_adapter(folder: Path, plant: Plant) -> list[Verdict]:
    """An adapter is planned and attached."""
    model = tiny_model("llama")
    planned = plan(model.config)
    with plant(folder):
        lora.attach(model, lora.fresh(model.config, planned, 4, 2.0, 0, None))
    layers = {f"{name}.weight": module.parts() for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    return [check_adapted(planned, lora.Patch(None, layers))]


@fault("planned layers left without an adapter", rows=("O11",), stage="LoRA", check="adapted", job=a_planned_adapter)
@in_place_of(lora, "fresh")
def layers_left_out(_: Any, config: ModelConfig, planned: list[LoraSite], *given: Any) -> Any:
    """The list of layers is printed, and a container that the matcher does not look into stays frozen."""
    return fresh(config, [site for site in planned if ".mlp." not in site.foreign], *given)


@fault("adapter cut from the gradient", rows=("O06", "O05"), stage="LoRA", check="gradients", job=an_adapter_in_training)
@in_place_of(LoraLinear, "forward")
def cut_from_the_gradient(usual: Any, layer: LoraLinear, x: torch.Tensor) -> torch.Tensor:
    """What the hook adds is not replayed in the backward pass: the adapter counts, and never learns."""
    out = usual(layer, x)
    return out if layer.base.weight.shape[0] > layer.base.weight.shape[1] else layer.base(x) + (out - layer.base(x)).detach()


@fault("a save that saves what was before", rows=("C06", "S2"), stage="save", check="score", job=a_saved_adapter_run)
def a_save_that_does_nothing(folder: Path) -> AbstractContextManager[None]:
    """`save` returns, a folder is there, and it holds the adapter of the first save."""
    kept: list[Contents] = []

    def first_again(usual: Any, weights: AdapterModel, *given: Any) -> Contents:
        now = usual(weights, *given)
        kept.append(replace(now, weights={name: tensor.clone() for name, tensor in now.weights.items()}))
        return replace(now, weights=kept[min(1, len(kept) - 1)].weights)

    return in_place_of(AdapterModel, "contents")(first_again)(folder)


def a_whole_model_in_training(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        run_sft(folder)
    return ledger_verdicts(folder / "run")


def batches_from_step_2(change: Callable[[PackedExamples, Batch], Batch]) -> Plant:
    """What is seen before step 1 and at step 0 is right."""
    return in_place_of(PackedExamples, "batch")(
        lambda usual, packed, step: change(packed, usual(packed, step)) if step >= 2 else usual(packed, step))


@fault("stop token masked from step 2 on", rows=("D06",), stage="data", check="batch", job=a_whole_model_in_training)
@batches_from_step_2
def stop_masked_later(packed: PackedExamples, batch: Batch) -> Batch:
    """The mask is made anew with every epoch, and once without the end."""
    last = batch.weight * (torch.roll(batch.weight, -1, 1) == 0)
    return replace(batch, weight=batch.weight - last)


@fault("held-out row trained on under a planned id", rows=("D19",), stage="data", check="batch", job=a_whole_model_in_training)
@batches_from_step_2
def held_out_under_a_planned_id(packed: PackedExamples, batch: Batch) -> Batch:
    """A cache by row number gives the row of another file: here, a sum that was held out."""
    tokens = batch.tokens.clone()
    tokens[0, 0] += 1
    return replace(batch, tokens=tokens)


@fault("tokens masked between the batch and the loss", rows=("D07",), stage="loss", check="batch", job=a_whole_model_in_training)
@in_place_of(trainer, "train")
def masked_after_the_batch(usual: Any, model: Any, optimizer: Any, batches: Any, *given: Any, **named: Any) -> Any:
    """A collator of the loop's own: the last token of each row counts for nothing."""
    def masked() -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            weight = batch.weight * (torch.roll(batch.weight, -1, 1) != 0) if number >= 2 else batch.weight
            yield replace(batch, weight=weight)

    return usual(model, optimizer, masked(), *given, **named)


fault("another alpha than was asked for", rows=("C09",), stage="LoRA", check="adapter scale", job=an_adapter_in_training)(
    # The default is taken where an alpha was given: 8 asked for, 16 trained and written.
    lambda _: swap(starting_model, "fresh", lambda config, planned, rank, scale, *given: fresh(config, planned, rank, 2 * scale, *given)))


@fault("alpha taken for the scale", rows=("C09",), stage="save", check="score", job=a_saved_adapter_run)
@in_place_of(starting_model, "adapter_contents")
def alpha_taken_for_the_scale(usual: Any, *given: Any, **options: Any) -> Contents:
    """Alpha means two things: the file says the scale, and whoever reads it divides by the rank again."""
    found = usual(*given, **options)
    fields = json.loads(found.files["adapter_config.json"])
    config = json.dumps(fields | {"lora_alpha": fields["lora_alpha"] / fields["r"]}).encode()
    return replace(found, files={**found.files, "adapter_config.json": config})

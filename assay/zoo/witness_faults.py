"""Witness faults: a step that reads, masks, sums, clips, schedules, decays or averages wrongly, in a run whose other checks agree with it.

Each strikes a function that the run and its own guards share. The kept steps are then replayed by the witness, which shares none.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.data.layouts import read_conversations
from assay.data.packing import PackedExamples, hold_out, packed_rows
from assay.errors import GuardStop
from assay.learn import distillation, loop
from assay.learn.lr_schedule import Schedule
from assay.learn.objectives import Objective
from assay.model.lora import LoraLinear
from assay.model.transformer import Transformer
from assay.recipes import distill, dpo, feedback_data, grpo, kto, preference_data, pretrain, rewards, rollouts, run, sft, starting_model
from assay.recipes.conversations import Conversations
from assay.recipes.dpo_options import Dpo
from assay.recipes.grpo_options import Grpo
from assay.recipes.kto_options import Kto
from assay.recipes.options import Distill, Pretrain, Sft
from assay.recipes.prompt_evaluator import PromptEvaluator
from assay.recipes.prompts import PromptOrder, split_prompts
from assay.recipes.rewards import Rewards
from assay.recipes.run import Run
from assay.recipes.trainer import Trainer
from assay.recipes.witness_records import pending_looks, pending_records
from assay.testing import tiny_training
from assay.testing.fault_injection import Job, Plant, fault, in_place_of, nothing, swap
from assay.testing.tiny_models import copy_folder, save_model, tiny_model
from assay.testing.tiny_training import RecordingProver, tiny_corpus
from assay.verdict import Verdict, proven
from assay.witness.due_looks import LOOKS, judge_look
from assay.witness.replay import replay_step
from assay.zoo.run_faults import hand_nothing_over, nothing_written_down, sums_folder

WITNESSED_STEPS, _INTERRUPTED_AFTER = 4, 2
STOP_ID = 258  # <|im_end|> of the tiny tokenizer

# ---------------------------------------------------------------- jobs


def a_witnessed_run(recipe: str = "sft", *, resumed: bool = False, **options: Any) -> Job:
    """A run without preflight and without its look at each batch, so that nothing stops it; then every kept step is replayed."""
    def job(folder: Path, plant: Plant) -> list[Verdict]:
        if plant is nothing:
            return list(clean_verdicts(recipe, resumed, tuple(sorted(options.items()))))
        return _witnessed(folder, plant, recipe, resumed, options)
    return job


@functools.cache
def clean_verdicts(recipe: str, resumed: bool, options: tuple[tuple[str, Any], ...]) -> list[Verdict]:
    """Verdicts on the clean twin, once for all faults that strike the same run."""
    folder = tiny_training.process_folder() / f"witnessed-{recipe}-{resumed}-{len(options)}-{abs(hash(options))}"
    folder.mkdir()
    return _witnessed(folder, nothing, recipe, resumed, dict(options))


def _witnessed(folder: Path, plant: Plant, recipe: str, resumed: bool, options: dict[str, Any]) -> list[Verdict]:
    if resumed:
        copy_folder(struck_run(), folder / "run")
    with plant(folder):
        train_witnessed(folder / "run", recipe, **options)
    records = pending_records(folder / "run")
    assert records, "no step was kept"
    return [replay_step(record) for record in records]


@functools.cache
def struck_run() -> Path:
    """A fine-tuning that was left after two steps, made once; its own records are done with."""
    where = tiny_training.process_folder() / "struck"
    with swap(Trainer, "over", lambda trainer: trainer.done >= _INTERRUPTED_AFTER):
        train_witnessed(where, "sft")
    for record in pending_records(where):
        (record / "record.json").unlink()
    return where


def train_witnessed(where: Path, recipe: str, **options: Any) -> None:
    """The recipe itself, without preflight and without its look at each batch; its steps are kept."""
    common: dict[str, Any] = {"out": str(where), "warmup_steps": 1, "save_steps": 100, "witness": "0", "device": "cpu", "weight_decay": 0.1}
    config: Any
    if recipe in ("sft", "distill"):
        folder = sums_folder()
        common |= {"data": (str(folder / "sums.jsonl"),), "model": str(folder / "base"), "max_length": 32, "held_out": 0.1,
                   "batch_tokens": 256, "micro_batch_tokens": 96, "num_train_epochs": 2, "max_steps": WITNESSED_STEPS,
                   "learning_rate": 3e-3, **options}
        config = Sft(**common) if recipe == "sft" else Distill(**common, teacher=str(a_teacher()))
    elif recipe in ("dpo", "kto"):
        common |= {"data": (str(judged_sums()[recipe]),), "model": str(sums_folder() / "base"), "max_length": 24, "held_out": 0.1,
                   "batch_tokens": 288, "micro_batch_tokens": 192, "num_train_epochs": 2, "max_steps": WITNESSED_STEPS,
                   "learning_rate": 3e-3, **options}
        config = Dpo(**common) if recipe == "dpo" else Kto(**common)
    else:
        config = Pretrain(**common | {"corpus": str(tiny_corpus().folder), "depth": 1, "tokens": WITNESSED_STEPS * 256, "max_length": 16,
                                      "batch_tokens": 256, "micro_batch_tokens": 96, "eval_documents": 4, **options})
    module: Any = {"sft": sft, "distill": distill, "pretrain": pretrain, "dpo": dpo, "kto": kto}[recipe]
    preflight = {"kto": "preflight_feedback"}.get(recipe, f"preflight_{recipe}")
    with (swap(distill, "compare_agreement", lambda *_: {}), swap(distill, "check_told", lambda *_: proven("told", "not looked at")),
          swap(run, "Prover", RecordingProver), swap(module, "hand_over", hand_nothing_over),
          nothing_written_down(module), swap(module, preflight, lambda *_: []),
          swap(dpo, "compare_with_parent", lambda *_: (proven("told", "not looked at"), {})),
          swap(kto, "compare_feedback", lambda *_: (proven("told", "not looked at"), {})),
          swap(Conversations, "_judge", lambda *_: None), contextlib.suppress(GuardStop)):
        getattr(module, recipe)(config, say=lambda _: None)


@functools.cache
def judged_sums() -> dict[str, Path]:
    """Right sums preferred to wrong ones; and one of the two of each, called right or wrong."""
    sums, folder = [(f"{a}+{b}=", a + b) for a in range(8) for b in range(8)], sums_folder()
    rows: dict[str, list[dict[str, Any]]] = {
        "dpo": [{"prompt": asked, "chosen": f"yes {due}", "rejected": f"no {due + 1}, no"} for asked, due in sums],
        "kto": [{"prompt": asked, "completion": f"{due + due % 2}", "label": due % 2 == 0} for asked, due in sums]}
    for name, said in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    return {name: folder / f"{name}.jsonl" for name in rows}


def a_witnessed_rollout(folder: Path, plant: Plant) -> list[Verdict]:
    """Reinforcement of an untaught model by a reward that means nothing, so that every group differs, without preflight and without a look
    at each rollout; then its steps are replayed."""
    if plant is nothing:
        return list(clean_rollout())
    return _reinforced(folder, plant)


@functools.cache
def clean_rollout() -> list[Verdict]:
    folder = tiny_training.process_folder() / "reinforced"
    folder.mkdir()
    return _reinforced(folder, nothing)


def _reinforced(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        reinforce_witnessed(folder)
    records = pending_records(folder / "run")
    assert records, "no step was kept"
    return [replay_step(record) for record in records]


def reinforce_witnessed(folder: Path, **changed: Any) -> None:
    """GRPO run with evaluations of the parent and of the last step."""
    (folder / "spread.py").write_text("def spread(prompt, completion, row):\n    return sum(completion.encode()) % 7 / 6\n")
    data = changed.pop("data", (str(sums_folder() / "sums.jsonl"),))
    config = Grpo(model=str(sums_folder() / "base"), data=data, out=str(folder / "run"), prompts=2,
                  reward=(f"{folder / 'spread.py'}:spread:1",), num_generations=4, max_completion_length=6, max_steps=2, held_out=0.1,
                  learning_rate=5e-3, warmup_steps=0, save_steps=100, eval_prompts=2, micro_batch_size=8, device="cpu", reward_workers=1,
                  witness="0", **changed)
    with (swap(run, "Prover", RecordingProver), swap(grpo, "hand_over_best", lambda *_: None),
          swap(grpo, "preflight_grpo", lambda *_: []), swap(Rewards, "audit", lambda *_: []),
          swap(rollouts.RolloutCollector, "check", lambda *_: []), contextlib.suppress(GuardStop)):
        grpo.grpo(config, say=lambda _: None)


def witnessed_looks(folder: Path, plant: Plant) -> list[Verdict]:
    """The same reinforcement, whose own verdicts stop nothing; then its evaluations are looked at again."""
    return list(clean_looks()) if plant is nothing else _looked_at(folder, plant)


@functools.cache
def clean_looks() -> list[Verdict]:
    folder = tiny_training.process_folder() / "looked-at"
    folder.mkdir()
    return _looked_at(folder, nothing)


def _looked_at(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder), swap(Run, "judge", lambda *_: None), swap(Run, "judge_often", lambda *_: None):
        reinforce_witnessed(folder, num_generations_eval=2)
    return [judge_look(kept) for kept in pending_looks(folder / "run", WITNESSED_STEPS)]


@functools.cache
def a_teacher() -> Path:
    """Another model than the student, made once; it knows as little."""
    return save_model(tiny_training.process_folder() / "teacher", tiny_model("llama", seed=3)).folder


def witnessed(name: str, stage: str, *, rows: Sequence[str] = (), **run_of: Any) -> Any:
    return fault(name, rows=rows or ("W01",), stage=stage, check="witness", job=a_witnessed_run(**run_of))


def from_the_second_step(change: Any) -> Plant:
    """A plant that gives `change(order, step, batch)` in the place of every batch but the first, whose audit would see it."""
    def batch(usual: Any, order: PackedExamples, step: int) -> Batch:
        found = usual(order, step)
        return change(order, step, found) if step else found
    return in_place_of(PackedExamples, "batch")(batch)

# ---------------------------------------------------------------- data


@functools.cache
def a_held_out_sum() -> list[int]:
    """The tokens of a sum that is never trained on; its answer has one digit."""
    rows = read_conversations(sums_folder() / "sums.jsonl").rows
    texts = [row.plain for row in hold_out(rows, 0.1, 0)[1] if row.plain is not None and len(row.plain[1]) == 1]
    return [*"".join(texts[0]).encode(), STOP_ID]


def with_a_held_out_row(order: PackedExamples, step: int, found: Batch) -> Batch:
    held, tokens = a_held_out_sum(), found.tokens.clone()
    for row in range(len(tokens)):
        for at in range(tokens.shape[1] - len(held) + 1):
            here = slice(at, at + len(held))
            assert found.positions is not None
            if found.positions[row, at] == 0 and tokens[row, at + len(held) - 1] == STOP_ID:
                tokens[row, here] = torch.tensor(held)
                return replace(found, tokens=tokens)
    return found


def of_another_seed(order: PackedExamples, step: int) -> Batch:
    rows = replace(order, seed=order.seed + 1).plan(step)
    return packed_rows([[order.examples[index] for index in row] for row in rows], order.length, order.fill)


witnessed("a held-out row trained on under a planned id", "data")(from_the_second_step(with_a_held_out_row))
witnessed("stop token never learned after step 1", "data")(
    from_the_second_step(lambda order, step, found: replace(found, weight=found.weight * (found.tokens != STOP_ID))))
witnessed("another seed's order under the planned ids", "data")(
    from_the_second_step(lambda order, step, found: replace(of_another_seed(order, step), ids=found.ids)))
witnessed("prompts learned from step 2 on", "data")(
    from_the_second_step(lambda order, step, found: replace(found, weight=((found.positions > 0) & (found.documents >= 0)).float())))


@witnessed("packed texts see each other", "forward")
@in_place_of(Transformer, "hidden")
def packed_texts_leak(usual: Any, model: Transformer, tokens: Tensor, **streams: Any) -> Tensor:
    """Positions still begin anew; the mask does not."""
    return usual(model, tokens, positions=streams.get("positions"))

# ---------------------------------------------------------------- teachers


witnessed("the divergence turned round", "loss", rows=("L06",), recipe="distill")(
    lambda _: swap(distillation, "forward_kl", distillation.reverse_kl))

# ---------------------------------------------------------------- preferences


witnessed("chosen and rejected swapped as they are read", "data", recipe="dpo", reference="live")(
    # What is held out is read by the same function: every margin rises, of the wrong side.
    in_place_of(preference_data, "read_preferences")(lambda usual, *given: [
        replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in usual(*given)]))
witnessed("labels turned round as they are read", "data", recipe="kto")(
    in_place_of(feedback_data, "read_feedback")(lambda usual, *given: [
        replace(each, desirable=not each.desirable) for each in usual(*given)]))

# ---------------------------------------------------------------- rollouts


@fault("completions drawn and not learned from", rows=("R08",), stage="accumulation", check="witness", job=a_witnessed_rollout)
@in_place_of(loop, "accumulated")
def half_of_the_rollout(usual: Any, model: Transformer, objective: Objective, batch: Batch, micro: int, weight: float) -> loop.Accumulated:
    return usual(model, objective, next(batch.split(len(batch) // 2)), micro, weight)


fault("the next rollout's prompts in this one's place", rows=("R08",), stage="data", check="witness", job=a_witnessed_rollout)(
    # The order and whoever checks it share the function that draws.
    in_place_of(PromptOrder, "drawn")(lambda usual, order, rollout: usual(order, rollout + 1)))
fault("advantages of the wrong sign", rows=("R10",), stage="reward", check="witness", job=a_witnessed_rollout)(
    in_place_of(rollouts, "estimated_advantages")(lambda usual, *given, **named: _turned(usual(*given, **named))))


def _turned(found: Any) -> Any:
    return replace(found, values_PG=-found.values_PG)

# ---------------------------------------------------------------- evaluations during a reinforcement


@functools.cache
def training_prompts() -> list[Any]:
    """Prompts of the same file that are not held out."""
    config = Grpo(model=str(sums_folder() / "base"), data=(str(sums_folder() / "sums.jsonl"),), out="", reward=("answer:1",), prompts=2,
                  held_out=0.1, max_completion_length=6, device="cpu")
    return list(split_prompts(config, starting_model.load_start(config, "cpu", lambda _: None)).train)


looked_at = functools.partial(fault, rows=("W01",), stage="eval", check=LOOKS, job=witnessed_looks)

looked_at("training prompts in the place of held-out ones")(
    # The digest of what is asked is the same at every evaluation.
    in_place_of(grpo, "spread")(lambda usual, prompts, count: usual(training_prompts(), count)))
looked_at("held-out answers colder than the run's")(
    in_place_of(grpo, "held_out_sampling")(lambda usual, *given: replace(usual(*given), temperature=0.5)))
looked_at("an evaluation's scores given to the next prompt")(
    in_place_of(rewards, "known_means")(lambda usual, prompts, values, *given: usual(prompts, [*values[2:], *values[:2]], *given)))


@looked_at("answers by other weights than the step's")
@in_place_of(PromptEvaluator, "evaluate")
def evaluated_with_another_norm(usual: Any, evaluator: PromptEvaluator, sampler: Any, step: int) -> Any:
    """What is evaluated has a tenth more in its last norm than what is saved."""
    norm = sampler.model.norm.weight
    with torch.no_grad():
        kept = norm.clone()
        norm.mul_(1.1)
        try:
            return usual(evaluator, sampler, step)
        finally:
            norm.copy_(kept)

# ---------------------------------------------------------------- sums


@witnessed("last ragged micro-batch dropped", "accumulation")
@in_place_of(Batch, "split")
def last_part_dropped(usual: Any, batch: Batch, rows: int) -> Iterator[Batch]:
    return (part for part in usual(batch, rows) if len(part) == min(rows, len(batch)))


@witnessed("mean of the micro-batches' means", "accumulation")
@in_place_of(loop, "accumulated")
def mean_of_means(usual: Any, model: Transformer, objective: Objective, batch: Batch, micro: int, weight: float) -> loop.Accumulated:
    parts = list(batch.split(micro))
    found = [usual(model, objective, part, micro, float(part.weight.sum()) * len(parts)) for part in parts]
    return loop.Accumulated(torch.stack([each.loss for each in found]).sum(), found[0].metrics)


witnessed("clipping computed and not applied", "optimizer")(
    in_place_of(loop, "clip_gradients")(lambda usual, optimizer, parameters, clip: usual(optimizer, parameters, 1e9)))

# ---------------------------------------------------------------- embedding rows


def embeddings_of(optimizer: torch.optim.Optimizer) -> Tensor:
    return max((p for group in optimizer.param_groups for p in group["params"]), key=len)


@witnessed("gradients of half of the embedding rows lost", "optimizer", rows=("O05",))
@in_place_of(loop, "clip_gradients")
def rows_without_gradient(usual: Any, optimizer: torch.optim.Optimizer, *given: Any) -> Tensor:
    table = embeddings_of(optimizer)
    assert table.grad is not None
    table.grad[1::2] = 0
    return usual(optimizer, *given)


@witnessed("half of the embedding rows put back after the step", "optimizer", rows=("O05",))
@in_place_of(loop, "guarded_step")
def rows_put_back(usual: Any, optimizer: torch.optim.Optimizer, alarm: loop.Alarm) -> None:
    table = embeddings_of(optimizer)
    kept = table.detach()[1::2].clone()
    usual(optimizer, alarm)
    with torch.no_grad():
        table[1::2] = kept


@witnessed("half of the embedding rows detached in the forward pass", "forward", rows=("O05",))
@in_place_of(torch.nn.functional, "embedding")
def rows_detached(usual: Any, tokens: Tensor, table: Tensor, *given: Any) -> Tensor:
    """What they are as inputs teaches them nothing; as rows of the tied head they learn."""
    found = usual(tokens, table, *given)
    return torch.where((tokens % 2 == 1)[..., None], found.detach(), found)

# ---------------------------------------------------------------- optimizer and schedule


@witnessed("Adam's betas swapped on resume", "resume", resumed=True)
@in_place_of(loop, "guarded_step")
def betas_swapped(usual: Any, optimizer: torch.optim.Optimizer, alarm: loop.Alarm) -> None:
    """The groups say the right ones, and the update unpacks them the other way round."""
    for again in range(2):
        for group in optimizer.param_groups:
            group["betas"] = group["betas"][::-1]
        if not again:
            usual(optimizer, alarm)


@witnessed("weight decay on norms and embeddings", "optimizer")
@in_place_of(sft, "tuning_optimizer")
def everything_decays(usual: Any, config: Sft, start: Any) -> torch.optim.Optimizer:
    optimizer = usual(config, start)
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay
    return optimizer


witnessed("a warm-up that never ends", "schedule")(
    lambda _: swap(Schedule, "multiplier", lambda schedule, step: 1 / (schedule.budget.warmup + 1)))


@witnessed("a norm outside the optimizer", "optimizer")
@in_place_of(sft, "tuning_optimizer")
def norm_left_out(usual: Any, config: Sft, start: Any) -> torch.optim.Optimizer:
    optimizer = usual(config, start)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not start.model.norm.weight]
    return optimizer


@witnessed("adapter learned at twice its scale", "LoRA", lora_r=4, lora_alpha=8.0)
@in_place_of(LoraLinear, "forward")
def twice_the_scale(usual: Any, layer: LoraLinear, x: Tensor) -> Tensor:
    return 2 * usual(layer, x) - layer.base(x)


@witnessed("q, k and v orthogonalised as one matrix", "optimizer", recipe="pretrain")
@in_place_of(pretrain, "muon")
def sliced_as_one(usual: Any, *given: Any, **options: Any) -> torch.optim.Optimizer:
    return usual(*given, **options | {"slices": {}})


@witnessed("bf16 in the place of fp32", "forward")
@in_place_of(starting_model, "place_for_training")
def computed_in_bf16(usual: Any, *given: Any, **options: Any) -> Transformer:
    return usual(*given, **options | {"compute": torch.bfloat16})

"""Reward model: a language model learns what an answer is worth, from pairs, and is proven to tell held-out ones apart."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from assay.data.packing import hold_out
from assay.data.preferences import PackedPairs, PreferencePair, by_prompt, read_preferences, render_pairs
from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut
from assay.evaluation.held_out_pairs import ScoredPairs
from assay.evaluation.held_out_rewards import score_rewards
from assay.guard.conclusion_checks import check_budget
from assay.guard.corpus_checks import require_held_out
from assay.guard.loss_preflight import sample_rows
from assay.guard.preference_checks import check_direction
from assay.guard.reward_model_checks import check_reward_accuracy, check_reward_head, preflight_reward_model, reward_doubts
from assay.guard.training_guards import check_detectors
from assay.learn.bradley_terry import REWARD_TOKEN, RewardModelSettings, reward_objective
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer, parameter_count
from assay.outcome import RunOutcome
from assay.recipes.conversations import evaluated_every, ordered, refuse_beyond_context, refuse_nonsense
from assay.recipes.dpo import pairs_in
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator, stopping_rule
from assay.recipes.hand_over import hand_over, void_if_refuted, write_down
from assay.recipes.memory_plan import record_use
from assay.recipes.preference_data import PreferenceData, reference_model
from assay.recipes.processes import follow, join_processes
from assay.recipes.reward_model_options import RewardModel
from assay.recipes.run import Run, TimeSpent, open_run, print_line
from assay.recipes.sft import micro_rows, tuning_optimizer, tuning_schedule
from assay.recipes.starting_model import StartingModel, load_start
from assay.recipes.trainer import SavePlan, Trainer
from assay.store.artifact import build_model, open_artifact
from assay.verdict import Verdict


def reward_model(config: RewardModel, say: Callable[[str], None] = print_line) -> RunOutcome:
    """An interrupted run hands nothing over; the same command goes on with it."""
    spent = TimeSpent()
    refuse_nonsense(config)
    if config.lora_r:
        raise UsageError("--lora-r: a reward model learns a row of its head, which an adapter does not hold; leave it out")
    world, say = join_processes(config, say)
    device = world.device
    start = load_start(replace(config, new_tokens=with_reward_token(config.new_tokens)), device, say)
    settings = RewardModelSettings(start.tokenizer.ids[REWARD_TOKEN], config.center_rewards_coefficient)
    objective = reward_objective(settings)
    if world.rank > 0:
        return follow(world, start.model, objective, config)
    data, began = load_reward_pairs(config, start, settings), start.model.head_weight()[settings.token].detach().clone()
    schedule, every, micro = tuning_schedule(config, data), evaluated_every(config.save_steps), micro_rows(config, data)
    rule = stopping_rule(config.early_stopping_patience, config.early_stopping_threshold, schedule=config.lr_scheduler_type,
                         steps=data.steps, every=every)
    optimizer = tuning_optimizer(config, start)
    for line in describe_reward_model(start, data, optimizer.param_groups[0]["lr"], device):
        say(line)
    with world, open_run(config, say, device, spent) as run:
        trainer = Trainer(run, start.weights, optimizer, objective, schedule, micro=micro, clip=config.max_grad_norm, order=data.order,
                          saves=SavePlan(every, data.last_step, config.save_minutes, paced=config.save_steps is None),
                          steps_before=start.steps_before, world=world)
        watched = WatchedRewards(run, data, micro, config.eval_examples)
        evaluator = HeldOutEvaluator(run, watched.score, device=device, repeats_from=data.repeats_from, scale=1.0)
        early = EarlyStopping(run, evaluator.history, rule, every)

        def save(*, evaluate: bool) -> None:
            """What is saved is what was evaluated. What moved and what did not is accounted for first."""
            trainer.account()
            if evaluate:
                evaluator.evaluate(trainer.model, trainer.done, trainer.new_losses())
                watched.record(trainer.done)
            trainer.save(data.facts(trainer.done), best=evaluator.best_checkpoint())
            if evaluate:
                early.judge(trainer.done)

        with run.interruptible():
            if (saved := run.newest()) is not None:
                trainer.resume(saved, data.check_same((saved.trainer() or {})["data"]))
            evaluator.recall()
            early.judge(trainer.done)
            run.preflight(preflight_rewards_of(trainer, data, start))
            trainer.save(data.facts(trainer.done))  # where nothing is saved yet: a save is made and proven before step 1
            if trainer.done == 0 and not evaluator.history.steps:
                evaluator.evaluate(trainer.model, 0, [])
                watched.record(0)

            trainer.start_loop(data.facts(trainer.done), data.rows)
            with closing(trainer.steps(data.batches(run, trainer.done))) as steps:
                while not (trainer.over() or early.reason):
                    step = next(steps)
                    data.judge_step(run, step)
                    trainer.record(step, epoch=data.epoch_of(step.index), supervised_tokens=step.weight, pairs=pairs_in(step.ids))
                    if trainer.save_due():
                        save(evaluate=True)
                    elif trainer.extra_save_due():
                        save(evaluate=False)
            trainer.end_loop()
            record_use(run, start.memory, device)
            if run.interrupted is not None and trainer.saved != trainer.done:
                save(evaluate=False)  # the uninterrupted run would not have been evaluated here
            elif run.interrupted is None and evaluator.latest_step != trainer.done:
                save(evaluate=True)
            trainer.finish(data.times_read(run, trainer.done), data.rows, evaluator.best_checkpoint())
        if run.interrupted is not None:
            return RunOutcome(run.folder, interrupted=run.interrupted)

        handed = hand_over(run, evaluator, partial(score_all_rewards, data=data, rows=micro))
        written = open_artifact(run.folder / "model")
        after = data.score(build_model(written, None).to(trainer.device), trainer.micro)
        before, trained = data.score(reference_model(start), trainer.micro), data.score(trainer.model, trainer.micro)
        judged = [check_direction(before, trained), check_reward_head(written, began), check_reward_accuracy(after)]
        void_if_refuted(run, handed.places, judged)
        handed.verdicts.extend([*judged, check_budget(trainer.schedule, trainer.done, early.reason)])
        told = {"accuracy": asdict(after.accuracy), "margin": asdict(after.margin), "doubts": reward_doubts(after),
                "length_bias": after.length_bias and asdict(after.length_bias)}
        for sentence in (judged[-1].reason, *reward_doubts(after)):
            run.say(sentence)
        write_down(run, handed, **told)
        return RunOutcome(run.folder, handed.verdicts, model=run.folder / "model", results={"held_out": handed.recorded.estimate, **told})


def with_reward_token(tokens: tuple[str, ...]) -> tuple[str, ...]:
    return tokens if REWARD_TOKEN in tokens else (*tokens, REWARD_TOKEN)

# ---------------------------------------------------------------- the pairs


@dataclass(frozen=True)
class RewardPairs(PreferenceData):
    """Pairs, of which no reference says anything."""

    settings: RewardModelSettings = field(kw_only=True)  # type: ignore[assignment]

    def score(self, model: Transformer, rows: int, count: int | None = None) -> ScoredPairs:
        return score_rewards(model, self.held_out_batches(rows, count), self.settings, rows=rows)


def load_reward_pairs(config: RewardModel, start: StartingModel, settings: RewardModelSettings) -> RewardPairs:
    """Who is held out is decided on prompts, before anything is rendered."""
    said = [pair for file in config.data for pair in read_preferences(file, config.limit)]
    kept, apart = (said, read_preferences(config.held_out_data)) if config.held_out_data is not None else hold_out(
        by_prompt(said), config.held_out, config.seed)

    def rendered(pairs: Sequence[Any]) -> tuple[list[PreferencePair], Any]:
        return render_pairs(pairs, start.tokenizer, start.parent.stops, length=config.max_length, over=config.too_long)

    (train, counted), (held_out, _) = rendered(kept), rendered(apart)
    require_held_out(config.held_out_data or ", ".join(map(str, config.data)), len(held_out), "pair",
                     "raise --held-out, give --held-out-data with more of them, or raise --max-length where they were dropped as too long")
    refuse_beyond_context([side for pair in (*train, *held_out) for side in pair.sides], start.model.config)
    order, steps = ordered(config, train, PackedPairs)
    scored_as = f"Bradley–Terry loss of {REWARD_TOKEN}, centred by {settings.center:g}"
    return RewardPairs(train, held_out, counted, order, steps, start.tokenizer.digest, scored_as, settings=settings,
                       length=config.max_length)


def describe_reward_model(start: StartingModel, data: RewardPairs, lr: float, device: str) -> list[str]:
    """Everything that was derived, before anything is spent."""
    counts, order = data.rendered.counts, data.order
    dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in counts["dropped"].items()) or "none dropped"
    return [start.weights.words,
            f"{start.parent.path}: {parameter_count(start.model):,} parameters; the reward is the logit of {REWARD_TOKEN} "
            f"({data.settings.token}) at the end of a text",
            f"{len(data.train):,} pairs to learn, {counts['truncated']} truncated, {dropped}; {len(data.held_out):,} held out, of other "
            "prompts",
            f"adamw at {lr:g}, {order.rows} × {order.length} tokens a step, {len(data.train) / order.windows:.1f} pairs a row, on {device}"]

# ---------------------------------------------------------------- checks and evaluations


def preflight_rewards_of(trainer: Trainer, data: RewardPairs, start: StartingModel) -> list[Verdict]:
    """The loss is the loss, every tensor is reached, both sides answer one prompt."""
    batch = trainer.first_micro_batch(data.batch(0))
    found = trainer.gradients(batch)
    with uncompiled():
        return [check_detectors(),
                *preflight_reward_model(trainer.model, trainer.objective, sample_rows(batch), data.settings, trainer.accumulate_alone),
                *trainer.check_precision(batch, found), *trainer.check_reach(found),
                *trainer.check_world(data.batch(0)), *data.audit(start)]


def score_all_rewards(model: Transformer, data: RewardPairs, rows: int) -> HeldOut:
    return data.score(model, rows).held_out


class WatchedRewards:
    """Held-out pairs at every evaluation: how often and by how much the chosen answer is worth more."""

    def __init__(self, run: Run, data: RewardPairs, rows: int, count: int):
        self.run, self.data, self.rows, self.count = run, data, rows, count
        self.found: ScoredPairs | None = None

    def score(self, model: Transformer) -> HeldOut:
        self.found = self.data.score(model, self.rows, self.count)
        return self.found.held_out

    def record(self, step: int) -> None:
        assert self.found is not None, "an evaluation was made"
        columns = {"eval_margin": self.found.margin, "eval_accuracy": self.found.accuracy}
        self.run.record(step - 1, **{f"{name}{end}": value for name, estimate in columns.items()
                                     for end, value in (("", estimate.mean), ("_low", estimate.low), ("_high", estimate.high))})
        if step:
            self.run.say(f"step {step}: chosen worth more {self.found.accuracy}, margin {self.found.margin}")

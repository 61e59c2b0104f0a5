"""Reward model: a language model that scores answers, trained on preference pairs and proven to tell held-out pairs apart."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from assay.data.chat import unread_in_words
from assay.data.preferences import read_reward_pairs
from assay.errors import UsageError
from assay.evaluation.held_out_loss import HeldOut
from assay.evaluation.held_out_pairs import ScoredPairs
from assay.evaluation.held_out_rewards import score_rewards
from assay.guard.conclusion_checks import check_budget
from assay.guard.loss_preflight import sample_rows
from assay.guard.preference_checks import check_direction
from assay.guard.reward_model_checks import check_reward_accuracy, check_reward_head, preflight_reward_model, reward_doubts
from assay.guard.training_guards import check_detectors
from assay.learn.bradley_terry import REWARD_TOKEN, RewardModelSettings, reward_objective
from assay.learn.lr_schedule import Schedule
from assay.model.placement import uncompiled
from assay.model.transformer import Transformer, parameter_count
from assay.outcome import RunOutcome
from assay.recipes.conversations import mixture_in_words, refuse_nonsense
from assay.recipes.evaluated_saves import EvaluatedSaves
from assay.recipes.evaluator import EarlyStopping, HeldOutEvaluator, interval_columns
from assay.recipes.hand_over import conclude_hand_over, hand_over
from assay.recipes.memory_plan import record_use
from assay.recipes.preference_data import PreferenceData, pairs_in, read_sources, score_beside_parent, split_pairs
from assay.recipes.processes import follow, join_processes
from assay.recipes.reward_model_options import RewardModel
from assay.recipes.run import TimeSpent, open_run, print_line
from assay.recipes.sft import tuning_optimizer, tuning_plan
from assay.recipes.starting_model import StartingModel, beside_live, load_start
from assay.recipes.trainer import Trainer
from assay.store.artifact import open_artifact
from assay.verdict import Verdict


def reward_model(config: RewardModel, say: Callable[[str], None] = print_line) -> RunOutcome:
    """Run reward-model training: load, preflight, train, evaluate and save, hand over. The same command resumes an interrupted run, which
    hands nothing over.
    """
    spent = TimeSpent()
    refuse_nonsense(config)
    if config.lora_r:
        raise UsageError("--lora-r: a reward model learns a row of its head, which an adapter does not hold; leave it out")
    read_sources(replace(config, limit=1), read_reward_pairs)  # before RUN/base is written for rows that are no pairs
    world, say = join_processes(config, say)
    device = world.device
    start = load_start(replace(config, new_tokens=with_reward_token(config.new_tokens)), device, say, world)
    settings = RewardModelSettings(start.tokenizer.ids[REWARD_TOKEN], config.center_rewards_coefficient)
    objective = reward_objective(settings)
    if world.rank > 0:
        return follow(world, start.model, objective, config, partial(tuning_optimizer, config, start))
    data = load_reward_pairs(config, start, settings)
    plan, optimizer = tuning_plan(config, data), tuning_optimizer(config, start)
    for line in describe_reward_model(config, start, data, optimizer.param_groups[0]["lr"], device):
        say(line)
    with world, open_run(config, say, device, spent) as run:
        trainer = Trainer(run, start.weights, optimizer, objective, plan.schedule, micro=plan.micro, clip=config.max_grad_norm,
                          order=data.order, saves=plan.saves, steps_before=start.steps_before, world=world)
        began = start.model.head_weight()[settings.token].detach().clone()
        evaluator = HeldOutEvaluator(run, partial(data.evaluated, rows=plan.micro, count=config.eval_examples), device=device,
                                     repeats_from=data.repeats_from, scale=1.0)
        early = EarlyStopping(run, evaluator.history, plan.rule, plan.every)
        saves = EvaluatedSaves(trainer, data, evaluator, early)

        with run.interruptible():
            saves.resume()
            run.preflight(preflight_rewards_of(trainer, data, start))
            saves.save_start()

            trainer.start_loop(data.facts(trainer.done), data.rows)
            with closing(trainer.steps(data.batches(run, trainer.done))) as steps:
                while not (trainer.over() or early.reason):
                    step = next(steps)
                    data.judge_step(run, step)
                    trainer.record(step, epoch=data.epoch_of(step.index), supervised_tokens=step.weight, pairs=pairs_in(step.ids))
                    if trainer.save_due():
                        saves.save_evaluated()
                    elif trainer.extra_save_due():
                        saves.save_unevaluated()
            trainer.end_loop()
            record_use(run, start.memory, device)
            saves.finish()
        if run.interrupted is not None:
            return RunOutcome(run.folder, interrupted=run.interrupted)

        handed = hand_over(run, evaluator, partial(data.evaluated, rows=plan.micro), beside_live(start))
        before, trained, after = score_beside_parent(data, start, trainer, handed.places[-1])
        judged = [check_direction(before, trained), check_reward_head(open_artifact(handed.places[-1]), began),
                  check_reward_accuracy(after)]
        told = {"accuracy": asdict(after.accuracy), "margin": asdict(after.margin), "doubts": reward_doubts(after),
                "length_bias": after.length_bias and asdict(after.length_bias)}
        for sentence in (judged[-1].reason, *reward_doubts(after)):
            run.say(sentence)
        return conclude_hand_over(run, handed, judged, check_budget(trainer.schedule, trainer.done, early.reason), **told)


def with_reward_token(tokens: tuple[str, ...]) -> tuple[str, ...]:
    return tokens if REWARD_TOKEN in tokens else (*tokens, REWARD_TOKEN)

# ---------------------------------------------------------------- the pairs


@dataclass(frozen=True)
class RewardPairs(PreferenceData):
    """Preference pairs without a reference."""

    settings: RewardModelSettings = field(kw_only=True)  # type: ignore[assignment]

    def score(self, model: Transformer, rows: int, count: int | None = None) -> ScoredPairs:
        return score_rewards(model, self.held_out_batches(rows, count), self.settings, rows=rows)

    def evaluated(self, model: Transformer, rows: int, count: int | None = None) -> HeldOut:
        found = self.score(model, rows, count)
        columns = interval_columns({"eval_margin": found.margin, "eval_accuracy": found.accuracy})
        return replace(found.held_out, columns=columns, words=f"chosen worth more {found.accuracy}, margin {found.margin}")

    def check_losses(self, losses: Sequence[float], done: int, schedule: Schedule) -> list[Verdict]:
        """No verdicts: there is no reference to leave."""
        return []


def load_reward_pairs(config: RewardModel, start: StartingModel, settings: RewardModelSettings) -> RewardPairs:
    scored_as = f"Bradley–Terry loss of {REWARD_TOKEN}, centred by {settings.center:g}"
    return RewardPairs(*split_pairs(config, start, read_reward_pairs), start.tokenizer.digest, scored_as, settings=settings,
                       length=config.max_length)


def describe_reward_model(config: RewardModel, start: StartingModel, data: RewardPairs, lr: float, device: str) -> list[str]:
    """Lines that describe everything that was derived, printed before training."""
    counts, order = data.rendered.counts, data.order
    dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in counts["dropped"].items()) or "none dropped"
    return [start.weights.words,
            f"{start.parent.path}: {parameter_count(start.model):,} parameters; the reward is the logit of {REWARD_TOKEN} "
            f"({data.settings.token}) at the end of a text",
            f"{len(data.train):,} pairs to learn, {counts['truncated']} truncated, {dropped}; {len(data.held_out):,} held out",
            *unread_in_words(data.rendered.unread), *mixture_in_words(order, data.steps),
            f"{config.optim} at {lr:g}, {order.rows} × {order.length} tokens a step, {order.examples_a_row:.1f} pairs a row, on {device}"]

# ---------------------------------------------------------------- what is checked before step 1


def preflight_rewards_of(trainer: Trainer, data: RewardPairs, start: StartingModel) -> list[Verdict]:
    """Reward-model preflight: the loss, gradients of every trained tensor, and pairs that answer one prompt."""
    batch = trainer.first_micro_batch(data.batch(0))
    found = trainer.gradients(batch)
    with uncompiled():
        return [check_detectors(),
                *preflight_reward_model(trainer.model, trainer.objective, sample_rows(batch), data.settings, trainer.accumulate_alone),
                *trainer.check_precision(batch, found), *trainer.check_reach(found),
                *data.audit(start), *trainer.check_world(data.batch(0))]  # last: with --fsdp nobody holds the whole model afterwards

"""GRPO and its variants: the policy samples groups of completions, rewards score them, and the better ones are made likelier."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from assay.data.batch import Batch
from assay.data.mixture import weighted_sources
from assay.errors import UsageError
from assay.generate.generation_request import Sampling
from assay.generate.sampler_weights import fingerprint
from assay.guard.conclusion_checks import check_budget
from assay.guard.policy_identity import LogprobFloor, check_floor, check_on_policy, check_reference
from assay.guard.policy_loss_checks import check_directions, check_policy_loss
from assay.guard.rollout_checks import check_measured
from assay.guard.training_guards import check_detectors
from assay.learn.lr_schedule import Budget, Schedule
from assay.learn.objectives import averages
from assay.learn.policy import Surrogate, policy_gradient
from assay.model.placement import place_for_inference, require_device, uncompiled
from assay.model.transformer import parameter_count
from assay.outcome import RunOutcome
from assay.recipes.conversations import NEVER, refuse_unbudgeted
from assay.recipes.environment_tasks import EnvironmentTasks
from assay.recipes.episode_rollouts import EpisodeCollector
from assay.recipes.grpo_hand_over import hand_over_best
from assay.recipes.grpo_options import Grpo
from assay.recipes.grpo_preflight import check_forked_policy, check_seeds_count, rollout_floor
from assay.recipes.memory_plan import record_use
from assay.recipes.processes import check_gathered, follow, join_processes
from assay.recipes.prompt_evaluator import EvaluationPlan, PromptEvaluator, plan_evaluations
from assay.recipes.prompts import PromptData, check_prompt_ledger, split_prompts, spread
from assay.recipes.reference import Reference, check_pinned, check_same_reference
from assay.recipes.remote_sampler import remote_sampler
from assay.recipes.rewards import JudgeReward, Rewards
from assay.recipes.rollout_batch import Drawn, Layout, layout_of
from assay.recipes.rollouts import Collector, RolloutCollector, RolloutHistory, Sampler
from assay.recipes.rollouts_ahead import RolloutsAhead
from assay.recipes.run import Run, TimeSpent, open_run, print_line
from assay.recipes.sft import tuning_optimizer
from assay.recipes.starting_model import StartingModel, load_start, reopen_parent
from assay.recipes.trainer import SavePlan, Trainer
from assay.recipes.witness_looks import LookRecords
from assay.store.artifact import build_model
from assay.store.ledger import Event
from assay.verdict import Verdict

POLICY_EVALUATED_EVERY = 20  # steps, where no --save-steps is given


def grpo(config: Grpo, say: Callable[[str], None] = print_line) -> RunOutcome:
    """Run GRPO: load, preflight, then sample, reward, train, evaluate and save; hand over the best. The same command resumes an
    interrupted run, which hands nothing over.

    A step is one update. A rollout begins at every multiple of `num_iterations` steps, and checkpoints are saved only there.
    """
    spent = TimeSpent()
    refuse_unclear_grpo(config)
    world, say = join_processes(config, say)
    device = world.device
    start = load_start(config, device, say, world)
    asked = surrogate_of(config, device)
    objective = policy_gradient(asked)
    if world.rank > 0:
        return follow(world, start.model, objective, config, partial(tuning_optimizer, config, start))
    rewards: Rewards | EnvironmentTasks = Rewards(config) if config.environment is None else EnvironmentTasks(config, start)
    prompts = split_prompts(config, start) if isinstance(rewards, Rewards) else rewards.split()
    schedule, longest = grpo_schedule(config, prompts), longest_sequence(config, prompts, rewards)
    optimizer = tuning_optimizer(config, start)
    for line in describe_grpo(config, start, prompts, optimizer.param_groups[0]["lr"], schedule, device, rewards.judge):
        say(line)

    with world, open_run(config, say, device, spent) as run, rewards:
        sampler_of = partial(Sampler, tokenizer=start.tokenizer, stops=start.parent.stops, slots=config.prompts * config.num_generations,
                             length=longest)
        own = sampler_of(start.model, device=config.sampler_device, lags=config.max_staleness > 0)  # evaluations sample with this one
        sampler = own if config.vllm_server_base_url is None else remote_sampler(config, start, prompts, run, longest)
        layout = layout_of(device, config.micro_batch_size, longest, start.model.config.max_length)
        saves, eval_every = save_plan(config, prompts.steps)
        trainer = Trainer(run, start.weights, optimizer, objective, schedule, micro=layout.rows, clip=config.max_grad_norm,
                          saves=saves, steps_before=start.steps_before, steady=False, world=world)
        collector = rollout_collector(config, prompts, sampler, rewards, run, asked, layout)
        ahead = RolloutsAhead(config, collector, prompts.order, run)
        evaluator = held_out_evaluator(config, run, start, prompts, rewards, device, evaluation_plan(config, prompts, schedule, eval_every))
        history, fork = RolloutHistory(run, start.model.config.vocab), fingerprint(start.model)
        collector.fingerprints[0] = fork
        reference: Reference | None = None

        def facts() -> dict[str, Any]:
            followed = None if reference is None else reference.facts()
            return {**prompts.facts(trainer.done), "reference": followed, **rewards.facts(), **collector.facts()}

        def save(*, evaluate: bool) -> LogprobFloor:
            """Account for the updates, evaluate, and save what was evaluated; then measure the log-probability floor again."""
            if reference is not None:
                run.settle()
                reference.keep_needed()
                run.judge(Event.REFERENCE, [check_pinned(reference, trainer.done - config.num_iterations)])
            trainer.account()
            ahead.settle()  # a rollout that is under way is finished, and saved with the weights
            if evaluate:
                evaluator.evaluate(own, trainer.done)
            # As long as no rewards differed, the weights are still the fork's, and a proof must not expect otherwise.
            trainer.save(facts() | ahead.facts(), best=evaluator.best_checkpoint(), moved=fingerprint(sampler.model) != fork)
            floor = rollout_floor(start.model, drawn, config.temperature)
            run.judge(Event.FLOOR, [check_floor(floor)])
            if rewards.judge is not None and (swayed := rewards.judge.write_down(run, trainer.done)):
                history.warn(trainer.done - 1, swayed)
            return floor

        with ahead, run.interruptible():
            recorded = resume_newest(run, trainer, prompts, rewards, collector, ahead)
            evaluator.recall()
            batch, drawn = collector.draw_for_preflight(trainer.done)
            floor = rollout_floor(start.model, drawn, config.temperature)
            run.preflight(preflight_grpo(config, trainer, collector, start, batch, drawn, floor)
                          + prompts.audit() + rewards.audit(prompts, start.tokenizer))
            if trainer.sharded is not None:  # from here on no process holds the whole policy: it is gathered whenever it is sampled from
                own = sampler = collector.sampler = sampler_of(trainer.sampled_weights().model, gather=trainer.sharded.refresh,
                                                               device=config.sampler_device or (None if device == "cpu" else device))
            trainer.save(facts() | ahead.facts())  # where nothing is saved yet: a save is made and proven before step 1
            if not evaluator.history.steps:
                evaluator.evaluate(own, trainer.done)
            collector.forget_after(trainer.done)
            history.recall()
            if rewards.judge is not None and trainer.done:
                say_not_bit_exact(run, rewards.judge)
            if config.beta:
                reference = Reference(trainer.sampled_weights(), run, layout, device=device, window=config.kl_window,
                                      every=saves.every if config.kl_window else NEVER)
                reference.follow(trainer.done)
                run.judge(Event.REFERENCE, [check_same_reference(reference, recorded.get("reference"))])

            trainer.start_loop(facts(), len(prompts.train))
            while not trainer.over():
                if reference is not None:
                    reference.follow(trainer.done)
                rollout = ahead.take(trainer.done, reference)  # prompts → completions → rewards → advantages
                run.judge_often(Event.ROLLOUT, [*check_gathered(trainer.sharded), *collector.check(rollout, floor, reference),
                                                *ahead.check(rollout, collector.floors.over(floor))])
                collector.keep_samples(rollout)
                trainer.records.rollout = rollout.witness_facts()
                ahead.begin(trainer.done + config.num_iterations, trainer.schedule.stop_at, floor)  # --max-staleness 1: the next one
                for step in trainer.steps(annealed(rollout.batch, asked, config, trainer.done)):
                    first = step.index == rollout.step
                    measured = collector.measure(rollout) | ahead.measure(rollout) if first else None
                    found = averages(step.metrics)  # waits for the GPU
                    verdicts = [] if measured is None else check_first_update(asked, rollout, measured, found, collector.floors.over(floor),
                                                                             reference)
                    history.add(step, found, measured)
                    run.judge_often(Event.STEP, [*verdicts, *history.verdicts()])
                    history.say_warnings(step.index)
                    trainer.record(step, shown=history.line(), epoch=prompts.epoch_of(step.index), num_tokens=history.tokens,
                                   **(measured or {}), **({"prompts_digest": collector.prompts_digest(rollout)} if first else {}))
                if trainer.save_due() or trainer.done % eval_every == 0:
                    floor = save(evaluate=trainer.done % eval_every == 0)
                elif trainer.extra_save_due():
                    floor = save(evaluate=False)
            trainer.end_loop()
            record_use(run, start.memory, device)
            if run.interrupted is not None and trainer.saved != trainer.done:
                save(evaluate=False)  # the uninterrupted run would not have been evaluated here
            elif run.interrupted is None and evaluator.latest_step != trainer.done:
                save(evaluate=True)
            if run.interrupted is None:
                ahead.drop("the run has come to its end")
                run.judge(Event.DATA_LEDGER, [check_prompt_ledger(run.metrics_file, prompts, trainer.done),
                                              *prompts.check_shares(trainer.done), *ahead.check_end()])
            trainer.finish(prompts.times_read(trainer.done), len(prompts.train), evaluator.best_checkpoint())
        if run.interrupted is not None:
            return RunOutcome(run.folder, interrupted=run.interrupted)
        budget = check_budget(trainer.schedule, trainer.done, None)
        return hand_over_best(run, evaluator, prompts, start, sampler_of, device, budget)


# ---------------------------------------------------------------- parts of the run


def rollout_collector(config: Grpo, prompts: PromptData, sampler: Sampler, rewards: Rewards | EnvironmentTasks, run: Run,
                      asked: Surrogate, layout: Layout) -> Collector:
    """Collector of rollouts: of completions that rewards score, or of episodes in an environment."""
    if isinstance(rewards, Rewards):
        return RolloutCollector(config, prompts, sampler, rewards, run, asked, layout)
    return EpisodeCollector(config, prompts, sampler, rewards, run, asked, layout)


def held_out_evaluator(config: Grpo, run: Run, start: StartingModel, prompts: PromptData, rewards: Rewards | EnvironmentTasks,
                       device: str, plan: EvaluationPlan) -> PromptEvaluator:
    """Evaluator of held-out prompts, whose plan is printed; the witness keeps records of its evaluations."""
    run.say(words_of_plan(plan))
    return PromptEvaluator(run, spread(prompts.held_out, plan.prompts), rewards, held_out_sampling(config, plan), plan.samples,
                           LookRecords(run, start, config.sampler_device or device, rewards))


def resume_newest(run: Run, trainer: Trainer, prompts: PromptData, rewards: Rewards | EnvironmentTasks, collector: Collector,
                  ahead: RolloutsAhead) -> dict[str, Any]:
    """Resume from the newest checkpoint, if there is one, and return what it records of data, rewards and reference."""
    if (saved := run.newest()) is None:
        return {}
    state = saved.trainer() or {}
    recorded: dict[str, Any] = state["data"]
    trainer.resume(saved, prompts.check_same(recorded), *rewards.check_same(recorded), *ahead.recall(recorded, state["step"]))
    collector.waiting = list(recorded.get("waiting", ()))
    return recorded


def say_not_bit_exact(run: Run, judge: JudgeReward) -> None:
    """Report that a resumed run with a judge does not repeat the uninterrupted one bit for bit."""
    run.say("a judge may answer otherwise the second time: the run goes on, but is not bit for bit the uninterrupted one")
    run.log(Event.NOT_BIT_EXACT, changed={"judge": judge.identity})


def check_first_update(asked: Surrogate, rollout: Any, measured: Mapping[str, float], found: Mapping[str, float], floor: LogprobFloor,
                       reference: Reference | None) -> list[Verdict]:
    """Verdicts on the first update of a rollout: it is on-policy, its figures recount, and the KL is measured from the reference."""
    verdicts = [check_on_policy(found, floor, asked.epsilon),
                check_measured(measured, found, *rollout.scored, entropy=asked.wants_entropy)]
    if reference is not None:
        verdicts.append(check_reference(found["kl"], rollout.updates, floor, reference.fingerprint, reference.used))
    return verdicts


def preflight_grpo(config: Grpo, trainer: Trainer, collector: Collector, start: StartingModel, batch: Batch,
                   drawn: Drawn, floor: LogprobFloor) -> list[Verdict]:
    """GRPO preflight: sampler and trainer run the same policy, the loss is the one that was asked for, its gradient points the right way,
    and seeds reach the sampler.

    There is no precision check here: before the first rewards a policy's gradient is a sum of cancelling terms, of which rounding
    remains. Instead sampler and trainer must agree.
    """
    model, objective, asked = trainer.model, trainer.objective, collector.asked
    found = trainer.gradients(trainer.first_micro_batch(collector.layout.packed(batch).batch))
    shown, prompts = batch.to(trainer.device), [prompt for prompt, _ in drawn[:: config.num_generations]]
    with uncompiled():
        verdicts = [check_detectors(), check_floor(floor),
                    check_policy_loss(model, objective, shown, asked, config.normalisation, collector.cap),
                    check_directions(model, objective, shown, asked), check_seeds_count(collector.sampler, prompts, collector.sampling)]
        if trainer.done == 0:
            parent = place_for_inference(build_model(reopen_parent(start), None), trainer.device)
            verdicts.append(check_forked_policy(parent, model, shown, drawn, config.temperature, floor))
        return [*verdicts, *collector.preflight(objective, shown), *trainer.check_reach(found),
                *trainer.check_world(collector.layout.packed(batch).batch, torch.float32)]  # last: with --fsdp nobody holds the whole after


# ---------------------------------------------------------------- what the options come to


def refuse_unclear_grpo(config: Grpo) -> None:
    refuse_unbudgeted(config)
    if config.environment is None and not (config.data and config.reward):
        raise UsageError("give --data and --reward, or an --environment, which has tasks and rewards of its own")
    if config.environment is not None and (config.data or config.reward or config.metric or config.held_out_data or config.refill
                                           or config.overlong_buffer):
        raise UsageError("--environment has tasks and rewards of its own: leave --data, --reward, --metric, --held-out-data, --refill and "
                         "--overlong-buffer out")
    if config.refill and any(source.weight is not None for source in weighted_sources(config.data, "--data")):
        raise UsageError("--refill with weights in --data: a prompt in the place of a silent one may be of any source, and the shares "
                         "would not be those asked for; give one of them")
    if config.shards > 1 and config.entropy_weight:
        raise UsageError("--shards with --entropy-weight: the bonus changes from step to step in one process alone; give one of them")
    if config.fsdp and config.entropy_weight:
        raise UsageError("--fsdp with --entropy-weight: the bonus changes from step to step in one process alone; give one of them")
    if config.sampler_device is not None:
        require_device(config.sampler_device)
    judged, shifted = any(reward.startswith("judge") for reward in config.reward), config.beta > 0 and config.kl_estimator == "shift"
    if config.max_staleness and (judged or shifted or config.fsdp or config.vllm_server_base_url is not None):
        raise UsageError("--max-staleness 1 is not for --kl-estimator shift, whose shift would be the earlier policy's, nor for a judge, "
                         "who keeps account of one rollout at a time, nor with --fsdp or a server; give --max-staleness 0")
    if config.vllm_server_base_url is not None and (config.sampler_device is not None or config.shards > 1 or config.fsdp):
        raise UsageError("--vllm-server-base-url: the server draws the rollouts, on weights that one process writes for it; leave "
                         "--sampler-device, --shards and --fsdp out")
    counts = (config.prompts, config.num_generations - 1, config.num_iterations, config.micro_batch_size, config.max_completion_length)
    if min(counts) < 1:
        raise UsageError(f"{config.prompts} prompts of {config.num_generations} completions of {config.max_completion_length} tokens, "
                         f"{config.num_iterations} updates a rollout, {config.micro_batch_size} rows at a time: expected at least 2 "
                         "completions and 1 of everything else")
    if not config.temperature > 0:
        raise UsageError(f"--temperature is {config.temperature}: completions that are all the same teach nothing; give one above 0")
    if config.max_steps is not None and config.max_steps % config.num_iterations:
        raise UsageError(f"--max-steps {config.max_steps} with --num-iterations {config.num_iterations}: a rollout is learned from "
                         f"{config.num_iterations} times; give a multiple of that")
    if config.loss_type == "cispo" and (config.importance_sampling_level != "token" or (config.epsilon_high or 2) <= 1):
        raise UsageError("--loss-type cispo caps the ratio of each token at --epsilon-high: leave --importance-sampling-level at token, "
                         "and give a cap above 1, such as 5")
    if config.advantage_estimator != "grpo" and config.scale_rewards != "group":
        raise UsageError(f"--scale-rewards {config.scale_rewards} with --advantage-estimator {config.advantage_estimator}, which has a "
                         "scale of its own; leave it out")
    if config.kl_window and not (config.beta and config.save_steps != 0):
        raise UsageError("--kl-window: the reference trails from checkpoint to checkpoint; it needs --beta and --save-steps above 0")
    least = min(config.refill, config.overlong_buffer, config.kl_window, config.samples)
    if least < 0 or config.overlong_buffer > config.max_completion_length:
        raise UsageError("--refill, --overlong-buffer, --kl-window and --samples are counts, and --overlong-buffer at most "
                         "--max-completion-length")


def surrogate_of(config: Grpo, device: str) -> Surrogate:
    in_loss, cispo = config.beta > 0 and config.kl_estimator != "shift", config.loss_type == "cispo"
    high = config.epsilon_high - 1 if cispo and config.epsilon_high is not None else config.epsilon_high  # TRL's is the cap itself
    bonus = torch.tensor(config.entropy_weight, device=device) if config.entropy_weight else 0.0
    return Surrogate(ratio="cispo" if cispo else config.importance_sampling_level, epsilon=config.epsilon, epsilon_high=high,
                     kl=config.kl_estimator if in_loss else "none", kl_weight=config.beta if in_loss else 0.0,  # type: ignore[arg-type]
                     entropy_weight=bonus, temperature=config.temperature)


def annealed(batch: Batch, asked: Surrogate, config: Grpo, step: int) -> Iterator[Batch]:
    """The rollout's batch, repeated as often as it is trained on, with the entropy bonus of each step."""
    for later in range(step, step + config.num_iterations):
        if isinstance(asked.entropy_weight, torch.Tensor):
            asked.entropy_weight.fill_(config.entropy_weight * config.entropy_decay**later)
        yield batch


def evaluation_plan(config: Grpo, prompts: PromptData, schedule: Schedule, every: int) -> EvaluationPlan:
    """How many prompts and completions an evaluation samples: by what the run itself samples, where its length is known."""
    steps = schedule.stop_at
    rollouts = None if steps is None else steps // config.num_iterations
    evaluations = 2 if steps is None else 1 + -(-steps // every)  # the parent, every so many steps, the last
    return plan_evaluations(held_out=len(prompts.held_out), asked_prompts=config.eval_prompts, asked_samples=config.num_generations_eval,
                            completions=None if rollouts is None else rollouts * config.prompts * config.num_generations,
                            evaluations=evaluations)


def words_of_plan(plan: EvaluationPlan) -> str:
    how = "one greedy answer" if plan.greedy else f"{plan.samples} answers"
    share = "" if plan.share is None else f", all evaluations together {plan.share:.1%} of what the run samples"
    return f"an evaluation takes {how} to each of {plan.prompts} held-out prompts{share}"


def held_out_sampling(config: Grpo, plan: EvaluationPlan) -> Sampling:
    return Sampling(max_new=config.max_completion_length, temperature=0.0 if plan.greedy else config.temperature, seed=config.seed)


def grpo_schedule(config: Grpo, prompts: PromptData) -> Schedule:
    """Learning-rate schedule of the run, which ends with a whole rollout."""
    steps = None if config.minutes is not None else config.max_steps or prompts.steps
    prompts.order.drawn((steps or config.num_iterations) // config.num_iterations - 1)  # refused now, where the data does not suffice
    warmup = min(config.warmup_steps, steps // 4) if steps else config.warmup_steps
    return Schedule(Budget(steps, config.minutes, config.lr_scheduler_type, warmup, config.decay_ratio), multiple=config.num_iterations)


def longest_sequence(config: Grpo, prompts: PromptData, rewards: Rewards | EnvironmentTasks) -> int:
    """The most tokens of a sequence that is sampled and trained on in one row."""
    return config.max_completion_length + prompts.longest if isinstance(rewards, Rewards) else rewards.longest(prompts)


def save_plan(config: Grpo, last: int) -> tuple[SavePlan, int]:
    """Save plan, and the steps between evaluations, both in whole rollouts. Without --save-steps the cost of saving decides, unless a
    reference trails from checkpoint to checkpoint.
    """
    asked = POLICY_EVALUATED_EVERY if config.save_steps is None else config.save_steps
    evaluated = whole_rollouts(config.eval_steps or asked, config.num_iterations)
    paced = config.save_steps is None and not config.kl_window
    every = evaluated if paced else whole_rollouts(asked, config.num_iterations)
    return SavePlan(every, last, config.save_minutes, paced=paced), evaluated


def whole_rollouts(steps: int, inner: int) -> int:
    """A number of steps, rounded up to the end of a rollout; 0 stays 0 (never)."""
    return -(-steps // inner) * inner or NEVER


def describe_grpo(config: Grpo, start: StartingModel, prompts: PromptData, lr: float, schedule: Schedule, device: str,
              judge: JudgeReward | None) -> list[str]:
    """Lines that describe everything that was derived, printed before training."""
    trained = sum(p.numel() for p in start.model.parameters() if p.requires_grad)
    end = f"{schedule.stop_at:,} steps" if schedule.stop_at else f"{config.minutes:g} minutes"
    things = ("prompts", "completions") if config.environment is None else (f"tasks of {config.environment}",
                                                                           f"episodes of at most {config.max_turns} turns")
    return [start.weights.words,
            f"{start.parent.path}: {parameter_count(start.model):,} parameters, of which {trained:,} are trained; weights "
            f"{start.parent.digest[:12]}",
            f"{len(prompts.train):,} prompts to train on, {len(prompts.held_out):,} held out, {prompts.dropped} dropped as too long",
            *(f"mixture: {said.reason}" for said in prompts.check_shares(schedule.stop_at or prompts.updates)),
            f"{prompts.order.places} {things[0]} × {config.num_generations} {things[1]} of at most {config.max_completion_length} tokens a "
            f"rollout, {config.num_iterations} updates; {config.optim} at {lr:g}, {end}, on {device}"
            + (f", sampling on {config.sampler_device}" if config.sampler_device else "")
            + (f", sampling at {config.vllm_server_base_url}" if config.vllm_server_base_url else ""),
            *([] if judge is None else [f"judged by {judge.endpoint.model} at {judge.endpoint.base_url}, {judge.judge.repeat:.0%} "
                                          "of the groups twice; a judge is asked anew by every run: no two are bit for bit the same"])]

"""Reinforcement learning: groups of completions by the policy itself, scored, and the better ones made likelier. GRPO and its family."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.data.batch import Batch
from assay.data.data_ledger import ids_digest
from assay.errors import GuardStop
from assay.generate.sampler_weights import fingerprint
from assay.guard.judge_checks import check_judge_order, check_judge_parser
from assay.guard.loss_preflight import Gradients
from assay.guard.policy_identity import check_floor, check_on_policy, check_reference
from assay.guard.policy_loss_checks import check_directions, check_policy_loss
from assay.guard.proof_subject import ProofSampling
from assay.guard.reward_checks import completion_style, preflight_rewards
from assay.guard.training_guards import StepReading, StepWatch, check_steps, check_weights
from assay.learn.loop import Step
from assay.learn.objectives import averages
from assay.learn.optim import adamw
from assay.learn.policy import policy_gradient
from assay.model.placement import default_device, place_for_training
from assay.model.transformer import Transformer
from assay.recipes.beginning import begin, carry
from assay.recipes.course import Course
from assay.recipes.experience import Experience
from assay.recipes.forms import Adapter
from assay.recipes.grpo_options import Grpo
from assay.recipes.grpo_plan import (
    NEVER,
    announced,
    check_apart,
    chosen_metric,
    examining,
    paced,
    prompted,
    refuse_nonsense,
    spread,
    surrogate,
    whole_rollouts,
)
from assay.recipes.handover import exported
from assay.recipes.judged import Judging
from assay.recipes.layout import layout_of
from assay.recipes.pace import Pace
from assay.recipes.reference import Reference, check_same_reference
from assay.recipes.rehearsed import check_fork, check_seeds_count, floor_of
from assay.recipes.rollouts import PromptOrder, Sampler
from assay.recipes.run import Run, plain, say_now
from assay.recipes.training import Parts, Training
from assay.recipes.trials import Answered, Examiner, Trials, check_gain, check_same_answers
from assay.recipes.tuning import BETAS, reach
from assay.reward.reward_functions import parse_rewards
from assay.reward.worker_pool import ErrorLimit, RewardWorkers
from assay.store.artifact import Artifact, build_model, open_artifact
from assay.store.ledger import Event
from assay.store.saving import Lineage
from assay.verdict import Verdict, proven, refuted, unproven

LR_WHOLE, LR_ADAPTER = 1e-6, 2e-5


def grpo(config: Grpo, say: Callable[[str], None] = say_now) -> tuple[list[Verdict], int | None]:
    """The verdicts on what was handed over and on what was gained, and the signal that interrupted the run, if one did."""
    work = Reinforcement(config, say)
    with work.run.sitting(), work.workers, work.metric_workers or work.workers, work.judging or work.workers:
        if (interrupted := work.go()) is not None:
            return [], interrupted
        return work.hand_over(), None


class Reinforcement(Training):
    """`done` counts updates; a rollout begins at every multiple of `inner` of them, and only there is anything saved."""

    def __init__(self, config: Grpo, say: Callable[[str], None]):
        refuse_nonsense(config)
        device = config.device or default_device()
        pace_known: list[Pace] = []
        start = begin(config, device, lambda step: reach(replace(config, lr=self.lr), start, pace_known[0], step), say)
        self.beginning, self.lr = start, config.lr or (LR_ADAPTER if isinstance(start.form, Adapter) else LR_WHOLE)
        self.prompts = prompted(config, start)
        self.longest = config.max_new + max(len(prompt.ids) for prompt in (*self.prompts.train, *self.prompts.held_out))  # with its prompt
        order = PromptOrder(self.prompts.train, config.seed, config.prompts, config.epochs)
        pace = paced(config, order)
        pace_known.append(pace)
        rewards, self.metric = parse_rewards(config.reward, relative=True), chosen_metric(config)
        self.rules = [reward for reward in rewards if not reward.relative]
        self.judging = next((Judging(reward, config.seed) for reward in rewards if reward.relative), None)
        self.workers = RewardWorkers(self.rules, count=config.reward_workers, seconds=config.reward_seconds)
        self.metric_workers = None if config.metric is None else RewardWorkers([self.metric], count=1, seconds=config.reward_seconds)
        self.asked = surrogate(config, device)
        for line in announced(config, start, order, self.prompts, self.lr, pace, device, self.judging):
            say(line)
        optimizer = adamw(start.model.named_parameters(), self.lr, betas=BETAS, weight_decay=config.weight_decay)
        carry(optimizer, start)
        limit = ErrorLimit(config.reward_errors)
        # A request that was refused until here leaves no folder, but for RUN/base.
        run = Run(Path(config.out), config, say=say, probing=ProofSampling(config.probe_samples, device))
        self.sampler = self.sampler_of(start.model, config, config.sampler_device)
        self.layout = layout_of(device, config.micro, self.longest, start.model.config.max_length)
        self.experience = Experience(config, order, self.sampler, self.workers, self.judging, limit, run, self.asked, self.layout)
        self.examiner = Examiner(spread(self.prompts.held_out, config.look_prompts), self.workers, self.metric, self.metric_workers, limit,
                                 examining(config), max(1, config.eval_samples), judged=self.judging is not None)
        watch = StepWatch([group["lr"] for group in optimizer.param_groups], pace.multiplier, steady=False)
        super().__init__(config, Parts(run, start.model, start.form, optimizer, policy_gradient(self.asked), self.experience, pace,
                                       Trials(run, self.answered, name=self.metric.name, device=device), watch, self.layout.rows,
                                       config.clip, whole_rollouts(config.checkpoint_every, config.inner),
                                       minutes=config.checkpoint_minutes, steps_before=start.steps_before, look_first=True))
        self.eval_every = whole_rollouts(config.eval_every or config.checkpoint_every, config.inner)
        self.fork, self.lineage = fingerprint(self.model), start.form.lineage
        start.form.lineage = self.as_far_as_moved
        self.reference: Reference | None = None
        self.recorded_reference: Mapping[str, Any] | None = None
        self.course = Course(run, self.model.config.vocab)
        self.noted: dict[int, dict[str, float]] = {}  # of steps whose loss is still to be read
        self.informed = self.ending = False

    def sampler_of(self, model: Transformer, config: Grpo, device: str | None = None) -> Sampler:
        return Sampler(model, self.beginning.tokenizer, self.beginning.parent.stops, slots=config.prompts * config.group,
                       length=self.longest, device=device)

    def as_far_as_moved(self, step: int) -> Lineage:
        """As long as no rewards differed, the weights are still the fork's, and a proof must not expect otherwise."""
        return self.lineage(step if fingerprint(self.model) != self.fork else 0)

    # ---------------------------------------------------------------- before the first step

    def begin(self) -> None:
        super().begin()
        self.experience.forget_after(self.start)
        self.course.recall()
        if self.judging is not None and self.start:
            self.run.say("a judge may answer otherwise the second time: the run goes on, but is not bit for bit the uninterrupted one")
            self.run.ledger.append(Event.NOT_BIT_EXACT, changed={"judge": self.judging.identity})
        if self.config.kl != "none":
            every = self.parts.every if self.config.kl_window else NEVER
            self.reference = Reference(self.parts.form, self.run, self.layout, window=self.config.kl_window, every=every)
            self.experience.reference = self.reference
            self.reference.follow(self.start)
            self.run.judge(Event.REFERENCE, [check_same_reference(self.reference, self.recorded_reference)])

    def rehearsal_batch(self) -> Batch:
        batch, self.rehearsed = self.experience.rehearsal(self.start)
        self.shown = batch.to(self.device)
        self.measure_floor()
        return self.layout.packed(batch).batch

    def measure_floor(self) -> None:
        self.experience.floor = floor_of(self.model, self.rehearsed, self.config.temperature)

    def rehearsals(self, batch: Batch) -> list[Verdict]:
        """Sampler and trainer are one policy; the loss is the one that was asked for, and pulls the way it should; seeds count."""
        asked, objective, normalise = self.asked, self.parts.objective, self.config.normalise
        prompts = [prompt for prompt, _ in self.rehearsed[:: self.config.group]]
        verdicts = [check_floor(self.experience.floor),
                    check_policy_loss(self.model, objective, self.shown, asked, normalise, self.config.max_new),
                    check_directions(self.model, objective, self.shown, asked),
                    check_seeds_count(self.sampler, prompts, self.experience.sampling)]
        return [*verdicts, self.check_fork()] if self.start == 0 else verdicts

    def check_fork(self) -> Verdict:
        parent = place_for_training(build_model(self.parent()), self.device, compile=False)
        return check_fork(parent, self.model, self.shown, self.rehearsed, self.config.temperature, self.experience.floor)

    def precision(self, batch: Batch, found: Gradients) -> list[Verdict]:
        """Not asked: before the first rewards a policy's gradient is the sum of terms that cancel, and rounding is what is left of it.
        What is asked of precision here is that sampler and trainer agree."""
        return []

    def parent(self) -> Artifact:
        """Opened anew: what a gain is measured from is what lies on the disk."""
        parent = self.beginning.parent
        found = open_artifact(parent.path, base=None if parent.base is None else parent.base.path)
        if found.digest != parent.digest:
            raise GuardStop(f"{parent.path} holds weights {found.digest[:12]}, the run began with {parent.digest[:12]}: it was changed")
        return found

    # ---------------------------------------------------------------- what the run asks

    def data_facts(self, step: int) -> dict[str, Any]:
        reference = None if self.reference is None else {"step": self.reference.step, "weights": self.reference.digest}
        judge = {} if self.judging is None else {"judge": self.judging.identity, "waiting": list(self.experience.waiting)}
        return {"prompts": self.prompts.digest, "tokenizer": self.beginning.tokenizer.digest, "seed": self.config.seed,
                "examples": len(self.prompts.train), "held_out": len(self.prompts.held_out), "reference": reference, **judge}

    def data_verdicts(self) -> list[Verdict]:
        every = (*self.prompts.train, *self.prompts.held_out)
        rows, texts, encode = [prompt.row for prompt in every], [prompt.text for prompt in every], self.beginning.tokenizer.encode
        verdicts = [check_apart(self.prompts.train, self.prompts.held_out)]
        if self.rules:
            verdicts += preflight_rewards(self.rules, rows, self.workers, prompts=texts, count_tokens=lambda text: len(encode(text)))
        if self.judging is not None:
            verdicts += [check_judge_parser(), check_judge_order(self.judging.asked, rows, texts, completion_style(self.rules, rows))]
        return verdicts

    def same_data(self, recorded: Mapping[str, Any]) -> Verdict:
        self.recorded_reference = recorded["reference"]
        if self.judging is not None and recorded["judge"] != self.judging.identity:
            return refuted("same data", f"the judge is {self.judging.identity} now, the run began with {recorded['judge']}: scores of two "
                           "judges do not compare; give the first one back, or begin a new run")
        self.experience.waiting = list(recorded.get("waiting", ()))
        words = f"the prompts are {self.prompts.digest[:12]} now, the run began with {recorded['prompts'][:12]}"
        if recorded["prompts"] != self.prompts.digest:
            return refuted("same data", f"{words}: a file, the template or the split is another; give them back, or begin a new run")
        return proven("same data", words)

    def read_times(self) -> dict[int, int]:
        """As planned: prompts that took the place of silent ones come on top, and the samples name them."""
        whole, more = divmod(self.done // self.config.inner * self.source.rows, self.source.windows)
        return {times: prompts for times, prompts in ((whole, self.source.windows - more), (whole + 1, more)) if prompts}

    def planned_batches(self) -> Iterator[Batch]:
        for step, batch in enumerate(super().planned_batches(), self.start):
            if isinstance(self.asked.entropy_weight, torch.Tensor):
                self.asked.entropy_weight.fill_(self.config.entropy_weight * self.config.entropy_decay**step)
            yield batch

    # ---------------------------------------------------------------- after a step

    def after(self, step: Step) -> None:
        self.judge_step(step)
        self.informed |= float(step.grad_norm) > 0
        self.course.tokens += step.tokens
        self.noted[step.index] |= {"num_tokens": self.course.tokens}
        super().after(step)

    def judge_step(self, step: Step) -> None:
        first = step.index % self.config.inner == 0
        measured = self.experience.measured() if first else {}  # before the step's own figures, for which a GPU is waited
        found, verdicts = averages(step.metrics), list[Verdict]()
        if first:
            verdicts.append(check_on_policy(found, self.experience.floor, self.config.epsilon))
            self.course.begin(measured)
        if first and self.reference is not None:
            verdicts.append(check_reference(found["kl"], self.experience.updates, self.experience.floor, self.reference.fingerprint,
                                            self.reference.used))
        self.course.add(found | {"grad_norm": float(step.grad_norm)})
        self.noted[step.index] = measured
        self.experience.judge(Event.STEP, [*verdicts, *self.course.verdicts()])
        self.course.tell(step.index)

    def record(self, read: list[StepReading]) -> None:
        for step, loss, norm, metrics in read:
            self.run.record(step.index, loss=loss, grad_norm=norm, learning_rate=self.watch.peaks[0] * step.multiplier,
                            epoch=self.source.epoch_of(step.index), data=ids_digest(step.ids), **self.noted.pop(step.index), **metrics,
                            seconds=round(self.pace.clock.seconds, 3))
        if read:
            self.run.progress(read[-1].step.index + 1, self.pace.stop_at, self.course.line(), self.pace.clock.seconds)

    def due(self) -> bool:
        return self.done % self.config.inner == 0 and (super().due() or self.done == self.config.inner or self.done % self.eval_every == 0)

    def over(self) -> bool:
        return self.done % self.config.inner == 0 and super().over()

    def checkpoint(self, *, look: bool = True) -> None:
        if self.reference is not None and self.reference.step is not None:
            self.run.settle()
            self.reference.keep_needed()
        super().checkpoint(look=look and (self.ending or self.done % self.eval_every == 0))
        self.measure_floor()
        self.run.judge(Event.FLOOR, [check_floor(self.experience.floor)])
        if self.judging is not None and (swayed := self.judging.heard(self.run, self.done)):
            self.course.warn(self.done - 1, swayed)

    def settle_account(self) -> None:
        """Where no rewards differed since the last time nothing was to move; everything else still holds."""
        if self.informed:
            super().settle_account()
            self.informed = False
            return
        self.run.judge(Event.ACCOUNT, [unproven("movement", "no step since the last account had a gradient", optional=True),
                                   self.account.frozen(), check_steps(self.optimizer, self.done + self.parts.steps_before),
                                   check_weights(self.model)])

    def finish(self) -> None:
        self.ending = True
        super().finish()

    # ---------------------------------------------------------------- held-out prompts, and what is handed over

    def answered(self, model: Transformer, updates: int) -> Answered:
        sampler = self.sampler if model is self.model else self.sampler_of(model, self.config)
        sampler.load(updates)
        return self.examiner(sampler)

    def answers_of(self, artifact: Artifact) -> np.ndarray:
        """To all held-out prompts, by the bytes on disk."""
        model = place_for_training(build_model(artifact), self.device, compile=False)
        return self.examiner(self.sampler_of(model, self.config), self.prompts.held_out).wanted

    def hand_over(self) -> list[Verdict]:
        """The best look's checkpoint, proven as `RUN/model` (and `RUN/adapter`), and whether it is better than its parent."""
        best = self.looks.best_checkpoint(self.run.checkpoints)
        self.run.say(f"best: {best.name}; {self.looks.verdict_in_words()}")
        places, verdicts = exported(self.run, best)
        before, saved, after = (self.answers_of(artifact) for artifact in (
            self.parent(), open_artifact(best), open_artifact(self.run.folder / "model")))
        watched = {prompt.id for prompt in self.examiner.prompts}
        looked_at = np.array([prompt.id in watched for prompt in self.prompts.held_out])
        recorded = -self.looks.losses[self.looks.steps.index(self.looks.best_step())]
        verdicts += [check_same_answers(f"{best.name} as looked at and as saved", recorded, saved[looked_at]),
                     check_same_answers(f"{best.name} as saved and as handed over", saved, after),
                     check_gain(self.metric.name, before, after, len(self.looks.steps) - 1)]
        self.run.ledger.append(Event.HAND_OVER, checkpoint=best.name, metric=self.metric.name, before=float(before.mean()),
                               after=float(after.mean()), verdicts=plain([verdict.to_json() for verdict in verdicts]))
        self.run.say(f"{', '.join(map(str, places))}: {verdicts[-1].reason}")
        return verdicts

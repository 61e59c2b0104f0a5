"""Hand-over of GRPO: the chosen checkpoint is exported, and must answer held-out prompts as it did, and better than its parent."""

from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from assay.guard.conclusion_checks import check_same_held_out
from assay.guard.rollout_checks import check_still_ends
from assay.model.placement import frozen_tensors, place_for_inference
from assay.model.transformer import ModelConfig, Transformer
from assay.outcome import RunOutcome
from assay.recipes.hand_over import (
    Exporting,
    OpenedBases,
    check_forgetting,
    check_handed_over,
    check_last_evaluated,
    send_to_remote,
    void_if_refuted,
)
from assay.recipes.prompt_evaluator import PromptEvaluator, check_gain, check_same_answers
from assay.recipes.prompts import PromptData, prompts_digest
from assay.recipes.rewards import Answered
from assay.recipes.rollouts import Sampler
from assay.recipes.run import Run, plain
from assay.recipes.starting_model import StartingModel, reopen_parent
from assay.store.artifact import Artifact, build_model, open_artifact, straight_to
from assay.store.checkpoint import step_folder
from assay.store.ledger import Event
from assay.verdict import Verdict, proven


def hand_over_best(run: Run, evaluator: PromptEvaluator, prompts: PromptData, start: StartingModel,
                   sampler_of: Callable[[Transformer], Sampler], device: str, budget: Verdict) -> RunOutcome:
    """Export the chosen checkpoint as `RUN/model` (and `RUN/adapter`), prove it, and test whether it is better than its parent on prompts
    that were not used to choose it.
    """
    (step, why), metric = evaluator.chosen(), evaluator.rewards.metric.name
    chosen = step_folder(run.checkpoints, step)
    run.say(f"final model: {chosen.name}; {why}")
    run.spent.phase("hand-over")
    to = straight_to(device, {} if run.config.fsdp else frozen_tensors(start.model))

    def answers_of(artifact: Artifact) -> tuple[Answered, tuple[str, ModelConfig]]:
        """Answers of the bytes on disk to all held-out prompts, and what tells these weights from others."""
        with run.spent.part("evaluation"):
            sampler = sampler_of(place_for_inference(build_model(artifact, None), device))
            return evaluator.answer(sampler, prompts.held_out), (artifact.digest, artifact.config)

    with Exporting(run, chosen, OpenedBases(None)) as exporting:  # and parent and checkpoint answer, while the last proofs go on
        exporting.wait_for_large_proofs(device)
        (before, _), (saved, weights) = answers_of(reopen_parent(start)), answers_of(open_artifact(chosen, to=to))
        places = exporting.begin_proofs()
        exported = open_artifact(places[-1], to=to)
        same = (exported.digest, exported.config) == weights
        after = saved if same else answers_of(exported)[0]
        watched = {prompt.id for prompt in evaluator.prompts}
        evaluated = np.array([prompt.id in watched for prompt in prompts.held_out])
        again = prompts_digest([prompt for prompt in prompts.held_out if prompt.id in watched])
        verdicts = [*exporting.verdicts(), check_same_held_out(evaluator.history.digest, again),
                    check_same_answers(f"{chosen.name} as evaluated and as saved", evaluator.scores_at(step), saved.wanted[evaluated]),
                    proven("score", f"the exported weights and config are those of {chosen.name} that answered, by digest") if same else
                    check_same_answers(f"{chosen.name} as saved and as handed over", saved.wanted, after.wanted),
                    *check_last_evaluated(run, evaluator.latest_step), check_still_ends(before.cut, after.cut), budget]
        if evaluator.looks is not None:
            verdicts += evaluator.looks.ask_of_gain({"parent": before, "model": after}, places[-1], prompts.held_out, evaluator.sampling)
        unseen = ~evaluated if (~evaluated).sum() > 1 else np.ones_like(evaluated)
        chances = 1 if not (unseen & evaluated).any() else len(evaluator.history.steps) - 1
        gain = check_gain(metric, before.wanted[unseen], after.wanted[unseen], chances)
        void_if_refuted(run, places, [*verdicts, gain])
    forgotten = check_forgetting(run, places[-1], device)  # takes long, and may be interrupted
    void_if_refuted(run, places, forgotten)
    verdicts += [*forgotten, *send_to_remote(run, places), check_handed_over(places, [*verdicts, *forgotten, gain]), gain]
    run.log(Event.HAND_OVER, checkpoint=chosen.name, metric=metric, before=float(before.wanted.mean()), after=float(after.wanted.mean()),
            score=plain(asdict(after.estimate)), chosen=why, verdicts=plain([verdict.to_json() for verdict in verdicts]))
    run.say(f"{', '.join(map(str, places))}: {gain.reason}")
    return RunOutcome(run.folder, verdicts, model=places[-1], results={
        f"{metric} before": before.estimate, f"{metric} after": after.estimate, "gain": gain.evidence})

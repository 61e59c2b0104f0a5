"""Reference policy: read from a proven checkpoint of the run, named by its digest, fixed at the fork or trailing by a window."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from assay.data.batch import Batch
from assay.errors import GuardStop
from assay.generate.sampler_weights import fingerprint
from assay.guard.proof import prove_checkpoint
from assay.learn.advantage import kl_shift
from assay.learn.policy import Surrogate
from assay.model.placement import place_for_training
from assay.recipes.grpo_options import Grpo
from assay.recipes.rollout_batch import Layout, batch_logprobs, quickest_score
from assay.recipes.run import Run
from assay.recipes.starting_model import TrainedWeights
from assay.store.checkpoint import Checkpoint, open_checkpoint, step_folder, step_folders
from assay.store.digests import recorded_digest, weights_digest
from assay.store.ledger import Event
from assay.verdict import Outcome, Verdict, overall, proven, refuted, without_optional


class Reference:
    """A second model around the parameters that stay as they are, with its own of those that learn.

    With a `window` of 0 it holds step 0 of the run, which is the fork: what the run began with, whole, never an empty adapter in
    the place of the parent's. Otherwise it holds the newest checkpoint that is `window` steps old and stands at a multiple of
    `every`: which one that is depends on the step alone, so that a resumed run has the same. A checkpoint that it holds, or will
    come to hold, is not retired.
    """

    def __init__(self, weights: TrainedWeights, run: Run, layout: Layout, *, window: int, every: int, device: str | None = None):
        self.run, self.layout, self.window, self.every = run, layout, window, every
        there = weights.model.embed.weight.device
        device = device or str(there)
        shared = torch.device(device).type == there.type  # what lies elsewhere is copied
        frozen = {id(parameter): parameter for parameter in weights.model.parameters() if shared and not parameter.requires_grad}
        self.model = copy.deepcopy(weights.model, frozen).requires_grad_(False)
        place_for_training(self.model, device)
        self._score = quickest_score(self.model, layout)
        self.weights = copy.copy(weights)
        self.weights.model = self.model
        self.step: int | None = None
        self.digest = self.fingerprint = ""

    def due(self, step: int) -> int:
        """The step whose checkpoint is the reference while `step` steps are done."""
        return 0 if not self.window else max(0, (step - self.window) // self.every * self.every)

    def follow(self, step: int) -> None:
        if self.due(step) != self.step:
            self.load(self.due(step))

    def load(self, step: int) -> None:
        """The weights on disk, and in memory what they say."""
        self.run.settle(proofs=step > 0)
        found = self.open_proven(step) if step else open_checkpoint(step_folder(self.run.checkpoints, 0))
        self.weights.restore(found)
        due, held = recorded_digest(found.manifest), weights_digest({name: t.cpu() for name, t in self.weights.weights().items()})
        if due != held:
            raise GuardStop(f"reference: {found.folder.name} holds weights {due[:12]}, what was loaded of it is {held[:12]}")
        self.step, self.digest, self.fingerprint = step, held, fingerprint(self.model)
        self.keep_needed()
        self.run.log(Event.REFERENCE, step=step, checkpoint=found.folder.name, manifest=found.digest, weights=held)
        self.run.say(f"reference: {found.folder.name}, weights {held[:12]}")

    def facts(self) -> dict[str, Any]:
        return {"step": self.step, "weights": self.digest}

    def open_proven(self, step: int) -> Checkpoint:
        """A reference that nothing has proven pulls the policy towards nobody knows what."""
        folder = step_folder(self.run.checkpoints, step)
        found = open_checkpoint(folder)
        if found.hallmark is None:
            verdicts = prove_checkpoint(folder, probing=self.run.probing)
            if overall(without_optional(verdicts)) is not Outcome.PROVEN:
                raise GuardStop(f"reference: {folder.name} is not proven: "
                                + "; ".join(str(v) for v in verdicts if v.outcome is not Outcome.PROVEN))
        return found

    def keep_needed(self) -> None:
        """Keep the checkpoints that the reference uses now, or will: they may not be retired."""
        assert self.step is not None
        self.run.needed.clear()
        newer = step_folders(self.run.checkpoints) if self.window else [step_folder(self.run.checkpoints, 0)]
        for folder in newer:
            if folder >= step_folder(self.run.checkpoints, self.step):
                self.run.needed.add(open_checkpoint(folder, verify=False).digest)

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float, *, entropy: bool) -> Tensor:
        return batch_logprobs(self.model, batch, temperature, self.layout, entropy=entropy, score=self._score)

    @property
    def used(self) -> str:
        """Digest of what is in memory now, to be compared with what was recorded when it was loaded."""
        return fingerprint(self.model)


def with_reference(batch: Batch, reference: Reference | None, asked: Surrogate, config: Grpo) -> Batch:
    """The batch with what the reference says of its tokens, and where the KL is to shift the advantages, with those shifted."""
    if reference is None:
        return batch
    of_reference = reference.logprobs(batch, asked.temperature, entropy=asked.wants_entropy)
    batch = replace(batch, reference=of_reference)
    if config.kl_estimator != "shift":
        return batch
    assert batch.behaviour is not None
    assert batch.advantage is not None
    return replace(batch, advantage=batch.advantage + kl_shift(batch.behaviour, of_reference, batch.weight, config.beta))


def check_pinned(reference: Reference, step: int) -> Verdict:
    """Check that the reference in memory has the bytes of the checkpoint that is due at this step, by the digest in its file: not what
    memory says of it."""
    folder = step_folder(reference.run.checkpoints, reference.due(step))
    due = recorded_digest(open_checkpoint(folder, verify=False).manifest)
    asked = copy.copy(reference.weights)
    asked.model = reference.model  # what is asked, whatever else is kept beside it
    held = weights_digest({name: tensor.cpu() for name, tensor in asked.weights().items()})
    words = f"the reference in memory is {held[:12]}, {folder.name} on the disk holds {due[:12]}"
    if held != due:
        return refuted("pinned", f"{words}: it was moved, or taken from the policy", held=held, due=due)
    return proven("pinned", words, weights=held)


def check_same_reference(reference: Reference, recorded: Mapping[str, Any] | None) -> Verdict:
    """Check that a resumed run is pulled towards the same reference as before. `recorded` stands in the checkpoint that it resumes from."""
    if recorded is None or recorded["step"] != reference.step:
        return proven("same reference", f"step {reference.step}, weights {reference.digest[:12]}", weights=reference.digest)
    words = f"step {reference.step} holds {reference.digest[:12]}, the run was pulled towards {recorded['weights'][:12]}"
    return (proven if recorded["weights"] == reference.digest else refuted)("same reference", words)

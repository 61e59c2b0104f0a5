"""Live reference: the parent's frozen weights beside the policy, asked about each batch as it is read; nothing is computed ahead."""

from dataclasses import replace

import torch

from assay.data.batch import Batch
from assay.generate.sampler_weights import fingerprint
from assay.learn.policy import token_logprobs
from assay.model.transformer import Transformer
from assay.verdict import Verdict, proven, refuted

LIVE = "live"  # stands in a checkpoint where the digest of stored log-probabilities would


class LiveReference:
    """`model` is the parent, opened anew; what an adapter's policy holds of it in the same bits is shared. `micro` rows at a time."""

    digest = LIVE

    def __init__(self, model: Transformer, weights: str, micro: int):
        self.model, self.weights, self.micro = model, weights, micro
        self.fingerprint = fingerprint(model)

    @torch.no_grad()
    def attached(self, batch: Batch) -> Batch:
        """The batch with what the reference says of the tokens that are learned from, and 0 elsewhere."""
        device = self.model.embed.weight.device
        said = torch.cat([token_logprobs(self.model, part.to(device))[0].float() for part in batch.split(self.micro)])
        return replace(batch, reference=torch.where(batch.weight != 0, said.to(batch.weight.device), 0.0))

    def check_unmoved(self) -> Verdict:
        """Every parameter has the bits that it was opened with, and none learns."""
        learning = [name for name, p in self.model.named_parameters() if p.requires_grad or p.grad is not None]
        now = fingerprint(self.model)
        words = f"the live reference {self.weights[:12]} was opened as {self.fingerprint[:12]} and is {now[:12]}"
        if learning:
            return refuted("live reference", f"{words}: {len(learning)} of its tensors may learn or got a gradient ({learning[0]})",
                           tensors=learning)
        if now != self.fingerprint:
            return refuted("live reference", f"{words}: it was moved, or shares tensors with the policy that learn", weights=self.weights)
        return proven("live reference", words, weights=self.weights)

"""Update accounting: what was to be trained is in the optimizer, got a gradient and moved; what was frozen did not.

Nothing here waits for a GPU during a step: samples of each tensor are kept on its device and compared when a verdict is asked.
"""

import torch
from torch import Tensor, nn

from assay.store.tensors import tensor_sha256
from assay.verdict import Verdict, proven, refuted

SAMPLE = 2048  # elements of each tensor that are watched, spread evenly over it
MOVED = 0.5  # share of a matrix's watched elements that an update must change: rounding may swallow a few, not most


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Verdict:
    """The optimizer holds exactly the model's own trainable tensors, each once: not copies, not what they were before wrapping."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if lost := [name for key, name in names.items() if key not in set(held)]:
        return refuted("optimizer", f"{len(lost)} trainable tensor(s) are not in the optimizer: {', '.join(lost[:3])}; they will never move", tensors=lost)
    if strange := len([key for key in held if key not in names]):
        return refuted("optimizer", f"the optimizer holds {strange} tensor(s) that are frozen or not the model's: it was built before the model was")
    if len(held) != len(set(held)):
        return refuted("optimizer", "a tensor is in the optimizer twice and would be stepped twice")
    return proven("optimizer", f"all {len(names)} trainable tensors are in the optimizer, each once", tensors=len(names))


def check_gradients(model: nn.Module) -> Verdict:
    """After a backward pass: every trainable tensor has a gradient that is finite and not zero throughout."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    without = [name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    if without:
        return refuted("gradients", f"{len(without)} of {len(names)} trainable tensors got no gradient: {', '.join(without[:3])}", tensors=without)
    if bad := [name for name, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]:
        return refuted("gradients", f"gradients that are not finite: {', '.join(bad[:3])}", tensors=bad)
    return proven("gradients", f"all {len(names)} trainable tensors have finite gradients", tensors=len(names))


class Account:
    """Watches a model from now on. `moved` and `frozen` judge what happened since."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.before = {name: _watched(p).clone() for name, p in model.named_parameters() if p.requires_grad}
        self.hashes = {name: tensor_sha256(p) for name, p in model.named_parameters() if not p.requires_grad}

    def moved(self) -> Verdict:
        """Embeddings move where their tokens occurred; every other tensor moves nearly everywhere, or rounding swallows updates."""
        parameters = dict(self.model.named_parameters())
        share = {name: float((_watched(parameters[name]) != before).float().mean()) for name, before in self.before.items()}
        stuck = [name for name, part in share.items() if part == 0]
        swallowed = [name for name, part in share.items() if 0 < part < MOVED and parameters[name].dim() == 2 and "embed" not in name
                     and "position" not in name]
        if stuck:
            return refuted("movement", f"{len(stuck)} of {len(share)} trainable tensors did not move: {', '.join(stuck[:3])}", tensors=stuck)
        if swallowed:
            worst = min(swallowed, key=lambda name: share[name])
            return refuted("movement", f"only {share[worst]:.1%} of {worst} moved ({len(swallowed)} tensors below {MOVED:.0%}): the updates are smaller "
                                       "than the weights' rounding; keep master weights in fp32 or raise the learning rate", share=share[worst])
        return proven("movement", f"all {len(share)} trainable tensors moved, the least in {min(share.values()):.0%} of its elements", least=min(share.values()))

    def frozen(self) -> Verdict:
        parameters = dict(self.model.named_parameters())
        strayed = [name for name, digest in self.hashes.items() if tensor_sha256(parameters[name]) != digest]
        if strayed:
            return refuted("frozen", f"{len(strayed)} frozen tensor(s) changed: {', '.join(strayed[:3])}", tensors=strayed)
        return proven("frozen", f"all {len(self.hashes)} frozen tensors have their old bits", tensors=len(self.hashes))


def check_steps(optimizer: torch.optim.Optimizer, taken: int) -> Verdict:
    """Steps that the optimizer applied, by its own count, against steps that the loop took: a skipped update is not a step."""
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    if counts and counts != {taken}:
        return refuted("steps", f"the loop took {taken} steps, the optimizer applied {sorted(counts)}: updates are being skipped", applied=sorted(counts))
    return proven("steps", f"all {taken} steps were applied", taken=taken)


def _watched(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE]

"""Base difference: how far the answers of an adapter trained on a quantised base differ on the unquantised file, measured and stated.

PEFT and whoever merges into the file compute on weights that the adapter was not trained on. That may be good enough, and is never the
same: it is said in numbers, and no check calls it proven.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from assay.model.probe_logits import compute_probe_logits, probe_distance, probe_inputs
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact, OpenBase, build_model, locate_artifact, open_artifact
from assay.store.checkpoint import open_checkpoint
from assay.verdict import Verdict, unproven

MOST_MEASURED = 4 * 10**9  # bytes of a base: a larger one is measured where it is asked for


class BaseDifference(NamedTuple):
    """Difference of two models on the probes' tokens."""

    answers: float  # log-probabilities, relative to their spread
    kl: float  # nats a token, from as trained to as merged
    same: float  # share of places where both find the same token likeliest

    def __str__(self) -> str:
        return (f"answers differ by {self.answers:.1e} (relative), {self.kl:.2e} nats a token (KL), and the likeliest token is the same at "
                f"{self.same:.1%} of the probes' places")


def base_difference(as_trained: Artifact, on_file: Artifact) -> BaseDifference:
    trained, other = (build_model(artifact, None) for artifact in (as_trained, on_file))
    answers = probe_distance(compute_probe_logits(other), compute_probe_logits(trained))
    due, found = (_log_probabilities(model) for model in (trained, other))
    kl = (due.exp() * (due - found)).sum(-1).mean()
    return BaseDifference(answers, float(kl), float((due.argmax(-1) == found.argmax(-1)).double().mean()))


@torch.no_grad()
def _log_probabilities(model: Transformer) -> torch.Tensor:
    tokens, _ = probe_inputs(model.config.vocab, model.config.max_length)
    return model.logits(model.hidden(tokens.to(model.embed.weight.device))).float().log_softmax(-1)


def state_base_difference(path: Path, opened: OpenBase | None = None) -> list[Verdict]:
    """State how an adapter that was trained on a quantised base differs on the unquantised base; no verdict for any other artifact."""
    place = locate_artifact(path)
    base = open_checkpoint(place.path, verify=False).facts.get("base") if place.kind == "checkpoint" else None
    if not base or not base.get("held"):
        return []
    how = f"the adapter was trained on {Path(base['path']).name} in {base['held']}; on the file itself, as PEFT loads it,"
    if sum(file.stat().st_size for file in Path(base["path"]).glob("*.safetensors")) > MOST_MEASURED:
        return [unproven("file base", f"{how} it is another model, which was not measured: the base has more than "
                                      f"{MOST_MEASURED / 1e9:.0f} GB; assay export --to merged --onto file does", optional=True)]
    found = base_difference(open_artifact(path, opened=opened), open_artifact(path, opened=opened, held="file"))
    return [unproven("file base", f"{how} {found}", optional=True, **found._asdict())]

"""Check on what a saved artifact says: texts sampled as a consumer would sample them, judged one by one, held against its parent's.

Only what is wrong with a text whatever was asked counts here: loops, bytes that make no characters, words in no order; and nothing
said, which proves nothing. A run may well teach another language or nothing but sums; `assay probe` judges that too.

When it counts: REFUTED where more of the texts are shown to be malformed than are tolerated, and more of them than of the parent's
to the same prompts. Without a parent nothing can have been lost: a model in its first steps babbles, and that is UNPROVEN. So is
silence: a model that was taught one thing alone may have nothing to say to the rest.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from assay.generate.request import Sampling
from assay.guard.subject import Subject
from assay.measure.degenerate import Expected
from assay.measure.examinee import OpenedModel
from assay.measure.probe import Health, against, probe
from assay.measure.probe_prompts import BEGINNINGS, BUILT_IN, Prompt
from assay.measure.sequential import LEVEL
from assay.measure.speakers import OfModel
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact
from assay.verdict import Outcome, Verdict, refuted, unproven

ASKED = ("chat-greeting", "chat-explain", "short-colour", "reasoning-order", "code-function", "other-sea", "other-soup", "other-list")
ANY = Expected(script="", code=True, numbers=True, short=True, ends=False)
FEWEST = 4  # prompts that must fit into the context
BOUND = 0.5  # what a few clean samples must exclude: of the runs that went wrong every other text was malformed
HOW = Sampling(max_new=32, temperature=0.7)


def check_health(subject: Subject) -> Verdict:
    """A few samples prove little, so what they leave open is UNPROVEN and not demanded; what they refute stops a run."""
    if subject.probing.samples == 0:
        return unproven("health", "no texts were asked for (--probe-samples 0)", optional=True)
    if subject.artifact.tokenizer is None:
        return unproven("health", "there is no tokenizer here, so nothing that it says is text", optional=True)
    try:
        return _judged(subject, subject.probing.device)
    except torch.OutOfMemoryError:  # the run that is proven here may fill its GPU
        return _judged(subject, "cpu")


def _judged(subject: Subject, device: str) -> Verdict:
    child = _speaker(subject.artifact, lambda: subject.model, device)
    prompts = asked(child)
    if len(prompts) < FEWEST:
        return unproven("health", f"a context of {subject.artifact.config.max_length} tokens has no room for our questions", optional=True)
    parent = None
    if subject.against is not None and subject.against.tokenizer is not None:
        parent = _speaker(subject.against, lambda: subject.against_model, device)
    # What it was not taught surprises a parent; words in no order do so far more than our prompts, which are in order.
    of_parent: dict[str, Any] = {"surprise": parent.surprise, "usual": parent.reading(prompts)} if parent else {}
    probed = partial(probe, child, prompts, n=subject.probing.samples, bound=BOUND, **of_parent)
    health = probed(enough=lambda health: health.malformed or health.healthy)
    verdict = health.verdict()
    if health.malformed:
        verdict = _held_against(health, probed, partial(probe, parent, prompts) if parent else None)
    optional = {"optional": True} if verdict.outcome is Outcome.UNPROVEN else {}
    return replace(verdict, evidence=health.verdict().evidence | verdict.evidence | {"device": device} | optional)


def _held_against(first: Health, again: Callable[..., Health], of_parent: Callable[..., Health] | None) -> Verdict:
    """Malformed texts are held against a model whose parent's are not, and only where that is shown, by all the samples there may be."""
    if of_parent is None:
        return unproven("health", f"{first.sentence}; it has no parent whose texts were better: in its first steps every model babbles")
    spoken, parent = _spoken(first), _spoken(of_parent(n=first.rounds))
    if not spoken.malformed:
        return unproven("health", f"{first.sentence}; nothing is wrong with what was said")
    if parent.bad >= spoken.bad:
        return unproven("health", f"{first.sentence}; of its parent's {parent.bad} of {len(parent.samples)}: no better")
    health = _spoken(again(enough=lambda _: False))
    parent = _spoken(of_parent(n=health.rounds, enough=lambda _: False))
    effect, _ = against(health, parent)
    words = f"{health.sentence}; of its parent's {parent.bad} of {len(parent.samples)}"
    if effect.mean > 0 and effect.p <= 1 - LEVEL:
        return refuted("health", f"{words}: shown worse, p = {effect.p:.2g} (--probe-samples 0 leaves this check out)",
                       **health.verdict().evidence, parent_bad=parent.bad)
    return unproven("health", f"{words}: not shown worse", **health.verdict().evidence, parent_bad=parent.bad)


def _spoken(health: Health) -> Health:
    """The same samples, with silence no fault."""
    silent = [sample.wrong is not None and sample.wrong.cause == "empty" for sample in health.samples]
    return replace(health, samples=tuple(replace(sample, wrong=None) if nothing else sample
                                         for sample, nothing in zip(health.samples, silent, strict=True)))


def asked(speaker: OfModel) -> tuple[Prompt, ...]:
    """Questions that fit, for a model that answers; beginnings, as much of them as fits, for one that continues. Any text is an answer."""
    room = speaker.opened.model.config.max_length - HOW.max_new
    if speaker.raw:
        wanted = tuple(replace(prompt, text=_end(prompt.text, speaker, room)) for prompt in BEGINNINGS)
    else:
        wanted = tuple(prompt for prompt in BUILT_IN if prompt.id in ASKED and speaker.opened.length_of(prompt.text, raw=False) <= room)
    return tuple(replace(prompt, expected=ANY) for prompt in wanted if prompt.text)


def _end(text: str, speaker: OfModel, room: int) -> str:
    """Its last words, as many as fit."""
    words = text.split(" ")
    fitting = (" ".join(words[first:]) for first in range(len(words)))
    return next((end for end in fitting if speaker.opened.length_of(end, raw=True) <= room), "")


def _speaker(artifact: Artifact, built: Callable[[], Transformer], device: str) -> OfModel:
    """Nothing is compiled: a few hundred tokens are over sooner. On the CPU the proof has built the model already."""
    return OfModel(OpenedModel(artifact, device=device, model=built() if device == "cpu" else None, graphed=False), HOW)

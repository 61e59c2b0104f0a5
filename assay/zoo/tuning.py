"""Faults of fine-tuning: layers that never got their adapter, gradients that never reach it, saves that save what was before."""

import contextlib
import functools
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from assay.errors import GuardStop
from assay.guard.update import check_adapted
from assay.model import lora
from assay.model.lora import LoraLinear, Site, fresh, plan
from assay.model.transformer import ModelConfig
from assay.recipes import forms, handover, run, sft
from assay.recipes.forms import Adapter
from assay.recipes.options import Sft
from assay.recipes.sft import FineTuning
from assay.store.checkpoint import Contents
from assay.verdict import Verdict
from assay.zoo import practice
from assay.zoo.fault import Plant, fault
from assay.zoo.resuming import NoProver, written_down
from assay.zoo.stage import save, swapped, tiny

STEPS = 5


@functools.cache
def lesson() -> Path:
    """A base model and sums to learn, made once."""
    where = Path(practice.home().name) / "sums"
    save(where / "base", tiny("llama"))
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]
    (where / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return where


def tuned(folder: Path, **options: Any) -> FineTuning | None:
    """The recipe itself; its saves are not proven and it hands nothing over: no fault here strikes those."""
    config = Sft(data=(str(lesson() / "sums.jsonl"),), out=str(folder / "run"), model=str(lesson() / "base"), length=32, batch_tokens=256,
                 epochs=2, steps=STEPS, lr=3e-3, checkpoint_every=3, held_out=0.1, device="cpu", **options)
    works: list[FineTuning] = []

    def remembered(given: Sft, say: Any) -> FineTuning:
        works.append(FineTuning(given, say))
        return works[0]

    with (swapped(run, "Prover", NoProver), swapped(sft, "hand_over", lambda *_, **__: (None, [])),
          swapped(sft, "FineTuning", remembered), contextlib.suppress(GuardStop)):
        sft.sft(config, say=lambda _: None)
    return works[0] if works else None


def an_adapter_in_training(folder: Path, plant: Plant) -> list[Verdict]:
    with plant(folder):
        tuned(folder, lora_r=4)
    return written_down(folder / "run")


def a_saved_tuning(folder: Path, plant: Plant) -> list[Verdict]:
    """What the best checkpoint scores when it is read back from the disk, beside what the run saw."""
    with plant(folder):
        work = tuned(folder, lora_r=4)
    assert work is not None, "these faults strike the saves, not the beginning"
    return [*written_down(folder / "run"), handover.check_look(work.looks, work.looks.best_checkpoint(work.run.checkpoints))]


def a_planned_adapter(folder: Path, plant: Plant) -> list[Verdict]:
    """An adapter is planned and attached."""
    model = tiny("llama")
    planned = plan(model.config)
    with plant(folder):
        lora.attach(model, lora.fresh(model.config, planned, 4, 2.0, 0, None))
    layers = {f"{name}.weight": module.parts() for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    return [check_adapted(planned, lora.Patch(None, layers))]


@fault("planned layers left without an adapter", rows=("O11",), stage="LoRA", check="adapted", job=a_planned_adapter)
def layers_left_out(_: Path) -> AbstractContextManager[None]:
    """The list of layers is printed, and a container that the matcher does not look into stays frozen."""
    def without_mlp(config: ModelConfig, planned: list[Site], *given: Any) -> Any:
        return fresh(config, [site for site in planned if ".mlp." not in site.foreign], *given)

    return swapped(lora, "fresh", without_mlp)


@fault("adapter cut from the gradient", rows=("O06", "O05"), stage="LoRA", check="gradients", job=an_adapter_in_training)
def cut_from_the_gradient(_: Path) -> AbstractContextManager[None]:
    """What the hook adds is not replayed in the backward pass: the adapter counts, and never learns."""
    whole = LoraLinear.forward

    def forward(layer: LoraLinear, x: torch.Tensor) -> torch.Tensor:
        out = whole(layer, x)
        return out if layer.base.weight.shape[0] > layer.base.weight.shape[1] else layer.base(x) + (out - layer.base(x)).detach()

    return swapped(LoraLinear, "forward", forward)


@fault("a save that saves what was before", rows=("C06", "S2"), stage="save", check="score", job=a_saved_tuning)
@contextlib.contextmanager
def a_save_that_does_nothing(_: Path) -> Iterator[None]:
    """`save` returns, a folder is there, and it holds the adapter of the first save."""
    whole = Adapter.contents
    kept: list[Contents] = []

    def first_again(form: Adapter, *given: Any) -> Contents:
        now = whole(form, *given)
        kept.append(replace(now, weights={name: tensor.clone() for name, tensor in now.weights.items()}))
        return replace(now, weights=kept[min(1, len(kept) - 1)].weights)

    with swapped(forms.Adapter, "contents", first_again):
        yield


@fault("alpha taken for the scale", rows=("C09",), stage="save", check="score", job=a_saved_tuning)
def alpha_taken_for_the_scale(_: Path) -> AbstractContextManager[None]:
    """Alpha means two things: the file says the scale, and whoever reads it divides by the rank again."""
    whole = forms.adapter_contents

    def scaled(*given: Any, **options: Any) -> Contents:
        found = whole(*given, **options)
        fields = json.loads(found.files["adapter_config.json"])
        config = json.dumps(fields | {"lora_alpha": fields["lora_alpha"] / fields["r"]}).encode()
        return replace(found, files={**found.files, "adapter_config.json": config})

    return swapped(forms, "adapter_contents", scaled)



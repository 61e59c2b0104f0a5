"""assay diff: compare the weights of two models, tensor by tensor."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.config import argument, option
from assay.verbs.terminal import print_table

if TYPE_CHECKING:
    from torch import Tensor

    from assay.comparison.weights_diff import TensorDiff, WeightsDiff
    from assay.store.artifact import Artifact

_SHOWN = 24


@dataclass(frozen=True)
class FLAGS:
    """Compare weights: norms, cosine, relative difference, rank of the difference, moved fraction. Adapters count as merged."""

    a: str = argument("checkpoint, folder, adapter, GGUF file or fetched name")
    b: str = argument("another, to compare with A")
    base: str | None = option("base of A, where A is an adapter that does not name it", metavar="MODEL", default=None)
    b_base: str | None = option("base of B, where B is an adapter that does not name it", metavar="MODEL", default=None)
    all_: bool = option("show every tensor, also those that did not move", default=False)
    json: bool = option("print JSON, every tensor included", default=False)


EXAMPLES = """  assay diff runs/a/checkpoints/step-000400 runs/a/checkpoints/step-000500
  assay diff smollm2-135m ./edited --all"""


def run(flags: FLAGS) -> int:
    from assay.comparison.weights_diff import diff_weights, weights_diff_json
    from assay.recipes.run import plain
    from assay.store.artifact import open_artifact

    a, b = open_artifact(flags.a, base=flags.base), open_artifact(flags.b, base=flags.b_base)
    found = diff_weights(hf_tensors(a), hf_tensors(b))
    if flags.json:
        print(json.dumps(plain({"a": flags.a, "b": flags.b, **weights_diff_json(found)}), indent=1))
    else:
        print_diff(found, every=flags.all_)
    return 0


def hf_tensors(artifact: "Artifact") -> "dict[str, Tensor]":
    """Tensors under Hugging Face's names, so that q, k and v are three tensors and a GGUF file has the same ones."""
    from assay.model.families import hf_layout, to_foreign
    from assay.store.artifact import merged_tensors

    return to_foreign(hf_layout(artifact.config), merged_tensors(artifact))


def print_diff(found: "WeightsDiff", *, every: bool) -> None:
    moved = [one for one in found.tensors if one.moved > 0]
    shown = found.tensors if every else moved[:_SHOWN]
    if shown:
        print_table(["tensor", "relative", "cosine", "moved", "rank", "‖a‖", "‖b‖", "largest"], [row(one) for one in shown])
    for names, what in ((found.only_a, "only in A"), (found.only_b, "only in B"), (found.other_shape, "of another shape")):
        if names:
            print(f"{len(names)} {what}: {', '.join(names[:6])}{' …' if len(names) > 6 else ''}")
    left = "" if every or len(moved) <= _SHOWN else f", the {_SHOWN} furthest shown; --all shows the rest"
    print(f"{len(moved)} of {len(found.tensors)} tensors differ{left}")


def row(one: "TensorDiff") -> list[str]:
    return [one.name, f"{one.relative:.2e}", f"{one.cosine:.6f}", f"{100 * one.moved:.1f} %", "" if one.rank is None else str(one.rank),
            f"{one.norm_a:.4g}", f"{one.norm_b:.4g}", f"{one.largest:.1e}"]

"""assay trace: record a forward pass site by site, and find the first divergence of two."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay.config import argument, option
from assay.errors import UsageError
from assay.strict_json import parse_json
from assay.verbs.terminal import print_table

if TYPE_CHECKING:
    import torch

    from assay.store.artifact import Artifact
    from assay.tracing.activations import Trace
    from assay.tracing.first_divergence import PassDivergence, WeightChange
    from assay.tracing.forward_modes import ForwardMode

GEOMETRY = ("vocab", "width", "depth", "heads", "kv_heads", "head_dim", "hidden", "gated", "qk_norm", "value_residual", "attention_gate")
NEAREST = 5  # sites shown beside those that diverge


@dataclass(frozen=True)
class FLAGS:
    """Record every site of a forward pass; with B, or another dtype or way to run A, find the first site that diverges."""

    a: str = argument("checkpoint, folder, adapter, GGUF file or fetched name")
    b: str | None = argument("another model, to compare with A", default=None, default_text="A itself, in --b-dtype or --through")
    prompt: str | None = option("text to run the model on", group="data", default=None, default_text="fixed tokens")
    tokens: str | None = option("instead of --prompt, a JSON file: a list of token ids, or lists of the same length", group="data",
                                metavar="FILE", default=None)
    max_length: int = option("the most tokens of the prompt", group="data", default=512)
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = option("number format for A", group="model",
                                                                         default="float32")
    b_dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = option("number format for B", group="model",
                                                                                  default=None, default_text="A's")
    through: Literal["plain", "batched", "cache", "transformers"] = option(
        "how to run B: in one plain pass, in a batch with other rows (batched), with the KV cache (cache), or by transformers",
        group="method",
        default="plain")
    tolerance: float | None = option("bound on the difference that one site may introduce", group="method", default=None,
                                     default_text="what rounding explains")
    base: str | None = option("base of A, where A is an adapter that does not name it", group="model", metavar="MODEL", default=None)
    b_base: str | None = option("base of B, where B is an adapter that does not name it", group="model", metavar="MODEL", default=None)
    device: str = option("where to compute: cpu or cuda", group="run", default="cpu")
    all_: bool = option("show every site", group="run", default=False)
    picture: str | None = option("PNG file to write a heat map to", group="run", metavar="FILE", default=None)
    json: bool = option("print JSON, every site included", group="run", default=False)


EXAMPLES = """  assay trace smollm2-135m --prompt 'The capital of France is' --picture trace.png
  assay trace runs/a/checkpoints/step-000400 runs/a/checkpoints/step-000500
  assay trace smollm2-135m --through transformers
  assay trace smollm2-135m smollm2.gguf --tolerance 0.02"""


def run(flags: FLAGS) -> int:
    from assay.store.artifact import open_artifact

    a = open_artifact(flags.a, base=flags.base)
    tokens = tokens_to_trace(flags, a)
    if flags.b is None and flags.b_dtype is None and flags.through == "plain":
        return run_alone(flags, a, tokens)
    b = a if flags.b is None else open_artifact(flags.b, base=flags.b_base)
    require_same_geometry(a, b)
    found, moved = compare_models(a, b, tokens, flags)
    return report_divergence(found, moved, flags)


def run_alone(flags: FLAGS, a: "Artifact", tokens: "torch.Tensor") -> int:
    from assay.recipes.run import plain
    from assay.tracing.activations import trace_activations, trace_json
    from assay.tracing.plots import draw_activations

    seen = trace_activations(load_on_device(a, flags.dtype, flags.device), tokens)
    if flags.picture is not None:
        draw_activations(seen, Path(flags.picture))
    if flags.json:
        print(json.dumps({"a": flags.a, "tokens": list(tokens.shape), "sites": plain(trace_json(seen))}, indent=1))
    else:
        print_activations(seen, every=flags.all_)
    return 3 if any(stats.nans for stats in seen.values()) else 0


def compare_models(a: "Artifact", b: "Artifact", tokens: "torch.Tensor",
                   flags: FLAGS) -> "tuple[PassDivergence, list[WeightChange] | None]":
    """A, its twin and B run one after the other, each alone in memory with the values that A leaves."""
    import torch

    from assay.store.artifact import merged_tensors
    from assay.tracing.first_divergence import compare_passes, measure_floors, run_reference, weight_changes
    from assay.tracing.forward_modes import plain_forward

    other = flags.b_dtype or flags.dtype
    of_twin = other if other != flags.dtype else "float64" if flags.dtype != "float64" else "float32"
    dtypes = {name: getattr(torch, name) for name in (flags.dtype, other)}
    known = run_reference(a.config, plain_forward(load_on_device(a, flags.dtype, flags.device)), tokens, dtypes[flags.dtype])
    known = measure_floors(known, plain_forward(load_on_device(a, of_twin, flags.device)))
    found = compare_passes(known, forward_mode_of(b, other, flags, tokens.shape[1]), dtypes[other], flags.tolerance)
    moved = None if found.first is None else weight_changes(found.first.site, a.config, merged_tensors(a), merged_tensors(b))
    return found, moved


def forward_mode_of(b: "Artifact", dtype: str, flags: FLAGS, length: int) -> "ForwardMode":
    import torch

    from assay.tracing import forward_modes
    from assay.tracing.forward_modes import load_with_transformers, transformers_forward

    if flags.through == "transformers":
        if b.patch is not None:
            raise UsageError(f"{b.path} is an adapter; merge it (assay export --to merged) to run it by transformers")
        loaded = load_with_transformers(b.path, getattr(torch, dtype), fused=b.config.fused_attention)
        return transformers_forward(loaded.to(flags.device), b.config)
    model = load_on_device(b, dtype, flags.device)
    if flags.through == "cache":
        return forward_modes.cached_forward(model, filled=max(1, length - 16))
    return forward_modes.batched_forward(model) if flags.through == "batched" else forward_modes.plain_forward(model)


def load_on_device(artifact: "Artifact", dtype: str, device: str) -> "Any":
    import torch

    from assay.model.placement import require_device
    from assay.store.artifact import build_model

    return build_model(artifact, getattr(torch, dtype)).to(require_device(device))


def tokens_to_trace(flags: FLAGS, a: "Artifact") -> "torch.Tensor":
    """The prompt's ids, the file's, or those that every model's fingerprint is taken on."""
    import torch

    from assay.model.placement import require_device
    from assay.model.probe_logits import probe_inputs

    if flags.prompt is not None and flags.tokens is not None:
        raise UsageError("assay trace: --prompt and --tokens both say what to run; give one")
    if flags.max_length < 1:
        raise UsageError(f"assay trace: --max-length is {flags.max_length}; expected 1 or more tokens")
    require_device(flags.device)
    if flags.prompt is None and flags.tokens is None:
        return probe_inputs(a.config.vocab, a.config.max_length)[0].to(flags.device)
    ids = read_ids(Path(flags.tokens)) if flags.tokens is not None else [encode_for_trace(flags.prompt or "", a)]
    if not all(0 <= id < a.config.vocab for row in ids for id in row) or not ids[0]:
        raise UsageError(f"there are no tokens to run, or one is outside the vocabulary of {a.config.vocab}")
    rows = [row[: flags.max_length] for row in ids]
    if len(rows[0]) > a.config.max_length:
        raise UsageError(f"{len(rows[0])} tokens, and the context of {a.path} is {a.config.max_length}: beyond it positions mean nothing "
                         f"to the model; give --max-length {a.config.max_length}, or fewer tokens")
    return torch.tensor(rows, dtype=torch.long).to(flags.device)


def encode_for_trace(text: str, a: "Artifact") -> list[int]:
    if a.tokenizer is None:
        raise UsageError(f"{a.path}: there is no tokenizer here, so text means nothing to it; use --tokens")
    return a.tokenizer.encode(text)


def read_ids(path: Path) -> list[list[int]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--tokens {path}: {error.strerror}; expected a JSON file of token ids") from None
    rows = parse_json(data, where=f"--tokens {path}", error=UsageError,
                      advice="expected a list of token ids, or several of the same length")
    rows = rows if isinstance(rows, list) and rows and isinstance(rows[0], list) else [rows]
    whole = all(isinstance(row, list) and len(row) == len(rows[0]) and all(type(id) is int for id in row) for row in rows)
    if not whole:
        raise UsageError(f"--tokens {path}: expected a JSON list of token ids, or several of the same length")
    return rows


def require_same_geometry(a: "Artifact", b: "Artifact") -> None:
    for name in GEOMETRY:
        one, other = getattr(a.config, name), getattr(b.config, name)
        if one != other:
            grown = "; where one was trained with --new-tokens, compare with RUN/base, which has their rows" if name == "vocab" else ""
            raise UsageError(f"{a.path} has {name} {one}, {b.path} has {other}: sites of different shape cannot be compared{grown}")

# ---------------------------------------------------------------- what is shown


def report_divergence(found: "PassDivergence", moved: "list[WeightChange] | None", flags: FLAGS) -> int:
    from assay.recipes.run import plain
    from assay.tracing.first_divergence import check_forward, gap_json
    from assay.tracing.plots import draw_divergence
    from assay.verdict import Outcome

    verdict = check_forward(found, moved)
    if flags.picture is not None:
        draw_divergence(found, Path(flags.picture))
    if flags.json:
        weights = None if moved is None else [{**one.behind._asdict(), "relative": one.relative} for one in moved]
        print(json.dumps(plain({"a": flags.a, "b": flags.b or flags.a, "verdict": verdict.to_json(), "weights": weights,
                                "unseen": [str(site) for site in found.unseen], "sites": [gap_json(gap) for gap in found.gaps]}), indent=1))
    else:
        print_divergence(found, every=flags.all_)
        print(verdict)
    return 0 if verdict.outcome is Outcome.PROVEN else 3


def print_activations(seen: "Trace", *, every: bool) -> None:
    """Print every site, or for each kind of site the layer in which it is largest."""
    from assay.tracing.activations import STATISTICS

    largest: dict[str, Any] = {}
    for site, stats in seen.items():
        if site.name not in largest or not stats.rms <= seen[largest[site.name]].rms:
            largest[site.name] = site
    chosen = list(seen) if every else [site for site in seen if site in largest.values()]
    rows = [[str(site), *(f"{getattr(seen[site], name):.4g}" for name in STATISTICS)] for site in chosen]
    print_table(["site" if every else "largest in", *STATISTICS], rows)


def print_divergence(found: "PassDivergence", *, every: bool) -> None:
    """Print the sites that diverge, as many again that came nearest to it, and the logits; or every site."""
    near = sorted(found.gaps, key=lambda gap: -gap.excess)[: len(found.diverging[: 2 * NEAREST]) + NEAREST]
    chosen = [gap for gap in found.gaps if every or gap in near or gap.site.name == "logits"]
    rows = [[str(gap.site), f"{gap.free.error:.1e}", f"{gap.free.cosine:.6f}", f"{gap.introduced.worst:.1e}", f"{gap.bound:.1e}",
             "DIVERGES" if gap.diverges else ""] for gap in chosen]
    print_table(["site", "error", "cosine", "introduced", "bound", ""], rows)

"""Soundness checks of an evaluation: every example scored, seeds that reach the sampler, the same data, pass@k as defined."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from assay.data.overlap import measure_overlap
from assay.errors import AssayError
from assay.evaluation.loaded_model import LoadedModel, encode_continuation, prompt_token_ids
from assay.evaluation.task import Task, TaskExample, dataset_digest
from assay.model.transformer import Transformer
from assay.verdict import Verdict, proven, refuted, unproven

_CHANCE = 1e-9  # below this, identical samples are no accident
LEAKED = 0.01  # share of the examples, or of their runs of 13 words, that may stand in training text by accident

_Rows = Sequence[Mapping[str, Any]]


def check_complete(task: Task, rows: _Rows, k: int) -> Verdict:
    """One line per example, k samples on each: nothing that failed was left out of the mean."""
    wanted, found = [example.id for example in task.examples], [row["id"] for row in rows]
    missing = sorted(set(wanted) - set(found))
    short = [row["id"] for row in rows if "samples" in row and len(row["samples"]) != k]
    strangers = len(found) - len(set(found) & set(wanted))
    if missing or short or strangers:
        return refuted("every example", f"{len(missing)} of {len(wanted)} examples have no score, {len(short)} do not have {k} samples, "
                       f"{strangers} lines are twice there or of other examples: the mean would be of another set",
                       missing=missing[:20], short=short[:20])
    return proven("every example", f"all {len(wanted)} examples are scored" + (f", {k} samples each" if k > 1 else ""))


def check_sample_seeds(rows: _Rows, temperature: float) -> Verdict:
    """Two samples of one prompt may be equal by chance; how small that chance is, their own log-probability says."""
    pairs = [row["samples"][:2] for row in rows if len(row.get("samples", ())) > 1]
    if temperature == 0 or not pairs:
        why = "greedy decoding draws nothing" if temperature == 0 else "one sample a prompt has nothing to be compared with"
        return unproven("seeds", f"{why}; sample with a temperature and -k 2 or more")
    if any(first["seed"] == second["seed"] for first, second in pairs):
        return refuted("seeds", "two samples of one prompt were drawn at the same seed")
    equal = [first["logprob"] for first, second in pairs if first["ids"] == second["ids"]]
    chance = min(1.0, math.exp(min(equal, default=0.0)) * len(pairs))
    if chance < _CHANCE:
        return refuted("seeds", f"{len(equal)} of {len(pairs)} prompts got the same text twice, one of them at a chance of {chance:.1g}: "
                       "the seeds do not reach the sampler", equal=len(equal), pairs=len(pairs))
    return proven("seeds", f"samples of one prompt differ as their log-probabilities say ({len(equal)} of {len(pairs)} pairs are equal)")


def check_dataset(recorded: str, examples: Sequence[TaskExample]) -> Verdict:
    """Scores are of the rows they were made on, and of no others."""
    found = dataset_digest(examples)
    if found != recorded:
        return refuted("dataset", f"these scores were made on dataset {recorded[:12]}, this one is {found[:12]}: a row was changed, added, "
                       "removed or moved; evaluate both models on one file", recorded=recorded, found=found)
    return proven("dataset", f"the rows are those that were scored ({found[:12]}, {len(examples)} examples)", digest=found)


def check_pass_at_k(estimator: Callable[[int, int, int], float], n: int = 6) -> Verdict:
    """Against the definition, for every count and k up to n: the share of k-subsets of n samples that hold a right one."""
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        due = sum(map(any, subsets)) / len(subsets)
        if abs((found := estimator(n, correct, k)) - due) > 1e-12:
            return refuted("pass@k", f"pass@{k} of {n} samples, {correct} right, is {due:.4f} by counting; the estimator says {found:.4f}")
    try:
        beyond = estimator(n, 1, n + 1)
    except AssayError:
        return proven("pass@k", f"the estimator agrees with counting for all n, c, k up to {n}, and refuses k > n")
    return refuted("pass@k", f"pass@{n + 1} of {n} samples was answered with {beyond:.4f}; so many were never drawn")


@torch.no_grad()
def check_repeatable(model: Transformer, ids: Sequence[int]) -> Verdict:
    """Two passes over the same tokens give the same bits: nothing random, such as dropout, is left on."""
    tokens = torch.tensor([list(ids)], device=model.embed.weight.device)
    first, second = model.logits(model.hidden(tokens)), model.logits(model.hidden(tokens))
    if model.training or not torch.equal(first, second):
        apart = float((first - second).abs().max())
        return refuted("repeatable", f"the same {len(ids)} tokens gave other logits the second time (up to {apart:.3g} apart"
                       f"{', and the model is in training mode' if model.training else ''}): dropout is on", apart=apart)
    return proven("repeatable", f"two passes over the same {len(ids)} tokens give the same bits")


def check_text_start(loaded: LoadedModel, texts: Sequence[str]) -> Verdict:
    """Prompts and contexts begin as this tokenizer begins every text, once: a missing or doubled BOS halves scores in silence."""
    tokenizer = loaded.tokenizer
    for text in texts:
        due, context = tuple(tokenizer.encode(text, special=True)), encode_continuation(tokenizer, text, " and so on")[0]
        for where, found in (("a prompt", prompt_token_ids(tokenizer, text, raw=True)), ("a context", context)):
            if found != due:
                return refuted("beginning", f"{where} begins with ids {list(found[:3])}, the tokenizer begins it with {list(due[:3])}")
        bos, chat = loaded.artifact.stops.bos, prompt_token_ids(tokenizer, text, raw=False)
        if bos is not None and chat[:2] == (bos, bos):
            return refuted("beginning", f"a chat prompt begins with BOS {bos} twice: the template and the tokenizer each put one")
    return proven("beginning", f"{len(texts)} prompts begin as the tokenizer begins a text, and none begins twice")


def check_leak(examples: Iterable[TaskExample], training: Iterable[str]) -> Verdict:
    """Whether the examples stand in the training text: whole, or in runs of 13 words."""
    with TemporaryDirectory() as folder:
        held_out = ((example.id, row_text(example.row).encode()) for example in examples)
        found = measure_overlap((text.encode() for text in training), held_out, Path(folder))
    if found.share > LEAKED:
        return refuted("leak", f"{found}: the model was trained on what it is tested on", **found.to_json())
    return proven("leak", str(found), **found.to_json())


def row_text(value: Any) -> str:
    """Every text in a row, in its order."""
    if isinstance(value, str):
        return value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return "\n".join(filter(None, map(row_text, parts)))
